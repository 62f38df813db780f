"""Runs as jobs: the batch script with stand-ins for Slurm, the manifest for Kubernetes, the commands for hosts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import fsdptrain, write_recipe

from fsdptrain.cli import _load_recipe
from fsdptrain.errors import RecipeError
from fsdptrain.launch.submit import Job, host_commands, manifest, prepare_job, slurm_script, train_job

# Stands in for srun: says that it has started, and what it gets; a while later it ends with the code in EXIT.
SRUN = """#!/bin/bash
trap 'echo USR1 >> calls; sleep 0.5; exit $EXIT' USR1
trap 'echo TERM >> calls; sleep 0.5; exit $EXIT' TERM
echo "srun $*" >> calls
[ -n "$AT_ONCE" ] && exit $EXIT
for _ in $(seq 600); do sleep 0.1; done
"""
# Stands in for scontrol: shows the job as $RECORD says; ends the script that requeues it, which sleeps after it.
SCONTROL = """#!/bin/bash
[ "$1" = show ] && { echo "JobId=12 JobName=run $RECORD JobName=run"; exit; }
echo "scontrol $*" >> calls
kill $PPID
"""
RECORD = "JobState={} Reason=None PreemptEligibleTime=2026-11-23T00:03:50 PreemptTime={}"
RUNNING = RECORD.format("RUNNING", "None")
CANCELLED = RECORD.format("CANCELLED", "None")
PREEMPTED = RECORD.format("RUNNING", "2026-11-23T00:04:26")
CANCELLED_LATER = RECORD.format("CANCELLED", "2026-11-23T00:04:26")  # scancel within the grace time of a preemption


def job_of(tmp: Path, *overrides: str, on: str = "slurm", nodes: int | None = 2, gpus: int = 4, **changes: Any) -> Job:
    recipe = write_recipe(tmp, launch={"nproc_per_node": "auto"}, **changes)
    return prepare_job(str(recipe), _load_recipe(str(recipe), list(overrides)), overrides, on, nodes, gpus)


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def run_script(tmp: Path, code: int, send: signal.Signals | None, age_s: int, record: str) -> tuple[int, list[str]]:
    """Run the batch script of a job with stand-ins; return its exit code and what they were called with."""
    bin_folder = tmp / "bin"
    bin_folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    (tmp / "job.sh").write_text(slurm_script(job_of(tmp), []))
    env = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "EXIT": str(code)}
    env |= {"AT_ONCE": "" if send else "yes", "SECONDS": str(age_s), "RECORD": record}  # bash counts SECONDS from there
    process = subprocess.Popen(["bash", "job.sh"], cwd=tmp, env=env, start_new_session=True)
    calls, end = tmp / "calls", time.monotonic() + 30
    wait_until(calls.exists, 30)
    if send == signal.SIGUSR1:  # Slurm sends it to the script alone, and long after the start of srun
        while "USR1" not in calls.read_text() and time.monotonic() < end:
            process.send_signal(send)  # again, if the script did not know srun yet
            wait_until(lambda: "USR1" in calls.read_text(), 3)
    elif send:
        os.killpg(process.pid, send)  # scancel sends it to every process
    try:
        return process.wait(30), calls.read_text().splitlines()[1:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "send", "age_s", "record", "exits", "calls"),
    [
        (0, None, 100, RUNNING, 0, []),
        (5, None, 100, RUNNING, 5, []),
        (75, None, 100, RUNNING, 75, []),  # stopped by another signal
        (75, signal.SIGUSR1, 100, RUNNING, -15, ["USR1", "scontrol requeue 12"]),
        (75, signal.SIGUSR1, 0, RUNNING, 75, ["USR1"]),  # at once: the time limit is too short
        (0, signal.SIGUSR1, 100, RUNNING, 0, ["USR1"]),  # it was finished just then
        (75, signal.SIGTERM, 100, CANCELLED, 75, ["TERM"]),
        (75, None, 0, PREEMPTED, -15, ["scontrol requeue 12"]),  # the step alone got SIGTERM
        (0, None, 100, PREEMPTED, 0, []),  # it was finished just then
        (75, signal.SIGTERM, 100, CANCELLED_LATER, 75, ["TERM"]),
    ],
)
def test_a_job_is_requeued_only_if_its_time_is_over_or_it_is_preempted(
    code: int, send: signal.Signals | None, age_s: int, record: str, exits: int, calls: list[str], tmp_path: Path
) -> None:
    assert run_script(tmp_path, code, send, age_s, record) == (exits, calls)


def test_the_script_of_a_job(tmp_path: Path) -> None:
    folder = tmp_path / "a 100% run"
    job = job_of(tmp_path, "optim.lr=1e-4", name="my run", output_dir=str(folder))
    script = slurm_script(job, ["--time=4:00:00", "--account=lab"])
    directives = dict(
        words[0].partition("=")[::2]
        for line in script.splitlines()
        if line.startswith("#SBATCH ") and (words := shlex.split(line)[1:])
    )
    assert directives == {
        "--job-name": "my run", "--nodes": "2", "--ntasks-per-node": "1", "--gpus-per-node": "4", "--exclusive": "",
        "--mem": "0", "--output": f"{tmp_path}/a 100%% run/logs/slurm-%j.log", "--open-mode": "append", "--requeue": "",
        "--signal": "B:USR1@300", "--time": "4:00:00", "--account": "lab",
    }  # fmt: skip
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert shlex.split(line)[2:-1] == [
        sys.executable, "-P", "-m", "fsdptrain", "run", str(tmp_path / "recipe.yaml"), "optim.lr=1e-4",
    ]  # fmt: skip
    assert "--exclusive" not in slurm_script(job, ["--cpus-per-task=8"])
    assert "--gpus-per-node" not in slurm_script(job_of(tmp_path, gpus=0), [])
    assert not folder.exists()


def test_options_of_sbatch_are_words_of_the_script(tmp_path: Path) -> None:
    job, options = job_of(tmp_path), ["--comment=it's; $HOME #1", "-C ib", "--signal=B:USR1@600"]
    lines = [line for line in slurm_script(job, options).splitlines() if line.startswith("#SBATCH ")]
    assert [shlex.split(line)[1:] for line in lines[-3:]] == [["--comment=it's; $HOME #1"], ["-C", "ib"], [options[2]]]
    for option in ("--signal=USR1@600", "--signal=B:TERM@600", "--signal USR1", "--signal=B:USR1"):
        with pytest.raises(RecipeError, match=r"would not reach the script, .* write --sbatch=--signal=B:USR1@300"):
            slurm_script(job, [option])
    for option in ("constraint=ib", "--comment=a\nrm -r /"):
        with pytest.raises(RecipeError, match="is not an option: write it as"):
            slurm_script(job, [option])


def test_the_manifest_has_the_published_schema(tmp_path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = job_of(tmp_path, on="k8s", name="My_run 1", output_dir="/data/run")
    config, train = train_job(job, "org/image:1", "claim", "/data", "torch-distributed")
    assert models.TrainerV1alpha1TrainJob.from_dict(train).to_dict() == train  # it drops unknown fields
    assert train["metadata"]["name"] == config["metadata"]["name"] == "my-run-1"


def test_the_manifest_of_a_job(tmp_path: Path) -> None:
    job = job_of(tmp_path, "optim.lr=1e-4", on="k8s", output_dir="/data/run", data__path="org/name")
    config, train = yaml.safe_load_all(manifest(job, "org/image:1", "claim:/data", "torch-distributed"))
    assert config["data"]["recipe.yaml"] == (tmp_path / "recipe.yaml").read_text()
    trainer = train["spec"]["trainer"]
    assert trainer == {
        "image": "org/image:1", "numNodes": 2, "resourcesPerNode": {"limits": {"nvidia.com/gpu": "4"}},
        "command": ["fsdptrain", "run", "/etc/fsdptrain/recipe.yaml", "optim.lr=1e-4"],
    }  # fmt: skip
    (pods,) = train["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = pods["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]} and mounted["run"] == "/data"
    for image, volume in ((None, "claim:/data"), ("i", None), ("i", "claim"), ("i", "claim:data")):
        with pytest.raises(RecipeError, match="needs --image, and --volume"):
            manifest(job, image, volume, "r")
    with pytest.raises(RecipeError, match=r"output_dir: /data/run is not on the volume: give a path below /mnt"):
        manifest(job, "i", "claim:/mnt", "r")


def test_a_run_in_an_object_store_needs_no_volume_and_its_log_is_here(tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="needs pip install 'fsdptrain[dev]'")
    job = job_of(tmp_path, on="k8s", output_dir="s3://bucket/run", data__path="org/name")
    _, train = yaml.safe_load_all(manifest(job, "org/image:1", None, "torch-distributed"))
    (pods,) = train["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert [volume["name"] for volume in pods["template"]["spec"]["template"]["spec"]["volumes"]] == ["recipe"]
    assert f"#SBATCH --output={Path.cwd()}/slurm-%j.log" in slurm_script(job, [])
    local = job_of(tmp_path, on="k8s", output_dir="s3://bucket/run")
    with pytest.raises(RecipeError, match=r"data\.path: .* is not on the volume: add --volume CLAIM:/PATH"):
        manifest(local, "org/image:1", None, "torch-distributed")


def test_the_commands_of_hosts_form_one_run(tmp_path: Path) -> None:
    job = job_of(tmp_path, on="hosts", gpus=0)
    commands = [shlex.split(command) for command in host_commands(job, ["a", "b"])]
    assert [command[:2] for command in commands] == [["ssh", "a"], ["ssh", "b"]]
    assert commands[0][2] == commands[1][2]
    words = shlex.split(commands[0][2])
    assert words[:3] == ["cd", str(Path.cwd()), "&&"] and words[-3:] == [
        str(tmp_path / "recipe.yaml"), "launch.nnodes=2", "launch.rdzv_endpoint=a:29500",
    ]  # fmt: skip
    (alone,) = host_commands(job_of(tmp_path, on="hosts", nodes=1, gpus=0), ["a"])
    assert "launch." not in alone
    with pytest.raises(RecipeError, match="--hosts: give the 2 hosts"):
        host_commands(job, ["a"])


def test_a_range_of_nodes_becomes_the_number_of_the_job_and_stays_one_on_hosts(tmp_path: Path) -> None:
    job = job_of(tmp_path, "launch.nnodes=1:2", nodes=None)
    assert "#SBATCH --nodes=2\n" in slurm_script(job, [])
    assert job.range_note() == "launch.nnodes: 1:2: this job is for 2 nodes; --nodes chooses another number"
    assert job_of(tmp_path, "launch.nnodes=1:2", nodes=1).plan.topology.nnodes == 1
    with pytest.raises(RecipeError, match=r"launch\.nnodes: 1:2 contradicts this job, which has 4"):
        job_of(tmp_path, "launch.nnodes=1:2", nodes=4)
    ranged = ("launch.nnodes=1:4", "launch.max_restarts=1")
    assert "launch.nnodes=1:2" in host_commands(job_of(tmp_path, *ranged, on="hosts", gpus=0), ["a", "b"])[0]
    with pytest.raises(RecipeError, match=r"has no effect without launch\.max_restarts"):
        job_of(tmp_path, "launch.nnodes=1:2", on="hosts", nodes=2, gpus=0)


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        (["launch.nnodes=4"], {}, "launch.nnodes: 4 contradicts this job, which has 2"),
        ([], {"gpus": 3}, "train.global_batch_size: 8 sequences do not divide over 6 ranks"),
        ([], {"gpus": None}, "--gpus-per-node is not set"),
        ([], {"on": "pbs"}, "--on: 'pbs' is not one of slurm, k8s, hosts"),
        (["output_dir=/"], {}, "output_dir: / is the root or home folder"),
    ],
)
def test_a_job_that_would_fail_is_not_submitted(
    overrides: list[str], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as refused:
        job_of(tmp_path, *overrides, **options)
    assert says in str(refused.value)


def test_the_command_refuses_what_does_not_fit_and_prints_what_does(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, launch={"nproc_per_node": "auto"})
    words = ["submit", recipe, "--nodes", 2, "--dry-run", "--time", "1:00", "train.global_batch_size=16"]
    done = fsdptrain(*words, "--hardware", "8xh100-80gb")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=8\n" in done.stdout and "#SBATCH --time=1:00\n" in done.stdout
    assert done.stderr.strip().startswith("fits 16×H100-80GB")
    small = fsdptrain(*words, "--gpus-per-node", 8, "--hardware", "memory=1e8,flops=1e15,intra_bw=1e11,inter_bw=1e10")
    assert small.returncode == 3 and "#SBATCH" not in small.stdout
