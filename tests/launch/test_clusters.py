"""The files for clusters and clouds: each is as its published schema requires, and starts a command that exists."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT, fsdptrain

from fsdptrain.errors import FsdptrainError, Stopped

FOLDER = ROOT / "recipes" / "clusters"


def subclasses(cls: type[FsdptrainError]) -> list[type[FsdptrainError]]:
    return [cls, *(each for child in cls.__subclasses__() for each in subclasses(child))]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_the_objects_of_kubeflow_have_the_published_schema() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime, job = documents("trainjob.yaml")
    kinds = models.TrainerV1alpha1TrainingRuntime, models.TrainerV1alpha1TrainJob
    for kind, written in zip(kinds, (runtime, job), strict=True):
        assert kind.from_dict(written).to_dict() == written  # it drops unknown fields
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": runtime["kind"], "name": runtime["metadata"]["name"],
    }  # fmt: skip


def test_a_pod_restarts_after_a_stop_and_not_after_what_would_fail_again() -> None:
    runtime, job = documents("trainjob.yaml")
    (replicas,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pods = replicas["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    rules = pods["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes["Ignore"] == [Stopped.exit_code]
    assert codes["FailJob"] == sorted({cls.exit_code for cls in subclasses(FsdptrainError)} - {5, 75})
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container["name"]}
    volumes = {volume["name"]: volume for volume in pods["template"]["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys() and volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert all(variable["value"].startswith(mounts["data"]) for variable in container["env"])
    assert job["spec"]["trainer"]["command"][2].startswith(mounts["recipe"])


def test_the_task_of_skypilot_has_the_published_schema_and_comes_back() -> None:
    (task,) = documents("skypilot.yaml")
    assert task["resources"]["use_spot"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [Stopped.exit_code]
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate({**task, "resources": {}}, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_the_function_of_modal_is_one_and_starts_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "modal_run.py").read_text()
    compile(text, "modal_run.py", "exec")
    assert '["fsdptrain", "run", "/recipe.yaml", "output_dir=/work/run"' in text and 'volumes={"/work": volume}' in text
    modal = pytest.importorskip("modal")
    shutil.copytree(FOLDER, tmp_path / "recipes" / "clusters")
    (tmp_path / "recipe.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert isinstance(runpy.run_path(str(FOLDER / "modal_run.py"))["train"], modal.Function)


def test_the_image_copies_what_exists_and_runs_the_command() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} == {"FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT"}
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "recipes", "fsdptrain"} <= {*copied}  # the build of the package includes the recipes
    assert all((ROOT / name).exists() for name in copied)
    assert lines[-1] == 'ENTRYPOINT ["fsdptrain"]'


@pytest.mark.parametrize("name", ["docker-run.sh", "hosts.sh", "job.sbatch"])
def test_a_script_has_no_fault_that_shellcheck_knows(name: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("needs pip install '.[dev]'")
    done = subprocess.run([shellcheck, FOLDER / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Return a folder with an ssh that runs what it gets here, and a docker and a fsdptrain that say what they get."""
    say = '#!/bin/sh\nprintf "%s|" "${0##*/}" "$@"; echo\n'
    ssh = '#!/bin/sh\nsaid=$(sh -c "$3"); echo "$2|$said"\n'
    for name, text in {"ssh": ssh, "docker": say, "fsdptrain": say}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run_script(commands: Path, name: str, *words: str, **env: str) -> str:
    path = f"{commands}:{Path(str(shutil.which('sh'))).parent}:/usr/bin"
    done = subprocess.run(
        ["sh", FOLDER / name, *words], env={"PATH": path, "HOME": str(commands), **env}, cwd=commands, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return done.stdout


def test_the_commands_of_hosts_form_one_run(commands: Path) -> None:
    lines = run_script(commands, "hosts.sh", "my recipe.yaml", "name=it's", HOSTS="me@a b").splitlines()
    words = "fsdptrain|run|my recipe.yaml|name=it's|launch.nnodes=2|launch.rdzv_endpoint=a:29400|"
    assert sorted(lines) == [f"b|{words}", f"me@a|{words}"]


def test_the_command_of_a_container_has_the_memory_that_nccl_needs(commands: Path) -> None:
    words = run_script(commands, "docker-run.sh", "my recipe.yaml", "optim.lr=1e-5").strip().split("|")
    assert words[:2] == ["docker", "run"] and "--ipc=host" in words and "memlock=-1" in words
    assert words[-5:] == ["fsdptrain", "run", "my recipe.yaml", "optim.lr=1e-5", ""]
    assert f"{commands}:{commands}" in words


def test_the_files_are_listed_shown_and_copied(tmp_path: Path) -> None:
    bytecode = FOLDER / "__pycache__"  # as pip leaves one beside an installed program
    bytecode.mkdir(exist_ok=True)
    listed = fsdptrain("recipes", "list").stdout
    shutil.rmtree(bytecode)
    names = re.findall(r"^clusters/(\S+) +[A-Z]", listed, re.MULTILINE)
    assert all(path.read_text().splitlines()[0][-1] in ".:" for path in FOLDER.parent.glob("*.yaml")), "a sentence each"
    assert names == sorted(path.name for path in FOLDER.iterdir())
    assert fsdptrain("recipes", "show", "clusters/trainjob.yaml").stdout == (FOLDER / "trainjob.yaml").read_text()
    assert fsdptrain("recipes", "copy", "clusters/Dockerfile", tmp_path).returncode == 0
    assert (tmp_path / "Dockerfile").read_bytes() == (FOLDER / "Dockerfile").read_bytes()
    assert "no such file or shipped recipe" in fsdptrain("run", "clusters/trainjob.yaml").stderr
