"""The command `export`: it is the only one that writes its folder, and whatever ends it leaves nothing behind."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from broken_saves import flip
from forks import Command
from huggingface_hub import ModelCard
from injection import small_recipe
from support import TESTS, environment, events, fsdptrain, python_path

from fsdptrain.checkpoint import export as exports
from fsdptrain.checkpoint.manifest import survey
from fsdptrain.errors import CheckpointError
from fsdptrain.run_folder.ownership import export_has, read_export_record
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run without an export."""
    tmp = tmp_path_factory.mktemp("trained")
    done = fsdptrain("run", small_recipe(tmp, train__steps=4, launch__nproc_per_node=1, export__at_end=False))
    assert done.returncode == 0, done.stderr
    return tmp


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunDir:
    """Return a copy of that run."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return RunDir(tmp_path / "run")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_second_export_to_a_folder_is_refused_and_a_stopped_one_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    mark, out = tmp_path / "mark", tmp_path / "new" / "out"
    pause = {"where": "fsdptrain.checkpoint.export_tensors:check_export", "do": "sleep", "how": {"seconds": 600}}
    faults = json.dumps([pause | {"mark": str(mark)}])
    words = [sys.executable, "-m", "fsdptrain", "export", str(trained / "run"), "--out", str(out)]
    env = environment(PYTHONPATH=python_path(TESTS / "faults"), FSDPTRAIN_FAULTS=faults)
    with Command(words, stderr=subprocess.PIPE, text=True, env=env) as first:
        try:
            while not mark.exists() and first.poll() is None:
                time.sleep(0.05)
            (scratch,) = (path for path in out.parent.iterdir() if path.is_dir())
            before = names(scratch)
            second = fsdptrain("export", trained / "run", "--out", out)
            assert second.returncode == 2 and f"another export is writing {out}" in second.stderr, second.stderr
            assert names(scratch) == before
            first.send_signal(signal.SIGTERM)
            _, said = first.communicate(timeout=60)
        finally:
            first.kill()
    assert first.returncode == 75 and "stopped by SIGTERM before the export was complete" in said, said
    assert names(tmp_path) == {"mark"}
    done = fsdptrain("export", trained / "run", "--out", out)
    assert done.returncode == 0 and names(out.parent) == {"out"}, done.stderr


def test_a_checkpoint_that_a_run_removes_meanwhile_is_named(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, folder = exports._build_skeleton, run.checkpoint(2)

    def build_late(*arguments: Any) -> Any:
        shutil.rmtree(folder)  # as by the retention of a run
        return build(*arguments)

    monkeypatch.setattr(exports, "_build_skeleton", build_late)
    with pytest.raises(CheckpointError, match=rf"{folder} was removed while it was read .*checkpoint\.keep: 2"):
        exports.export_checkpoint(run, 2, tmp_path / "out", None, Screen())
    assert names(tmp_path) == {"run"}


def test_a_mount_point_is_refused_before_anything_is_read(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    script = f"mount -t tmpfs none {tmp_path}/out && exec {sys.executable} -m fsdptrain export {trained}/run --out "
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script + f"{tmp_path}/out"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert done.returncode == 2 and "out is a mount point, which an export cannot replace" in done.stderr, done.stderr
    assert names(tmp_path) == {"out"}


def test_verify_compares_the_bytes_of_an_export(run: RunDir) -> None:
    exports.export_checkpoint(run, None, run.export, None, Screen())
    weights = run.export / "model.safetensors"
    (run.export / "notes.md").write_text("mine")
    assert survey(run)["good"]
    flip(weights, weights.stat().st_size - 1)
    assert survey(run)["export"]["problems"] == [f"{weights} is damaged: its checksum differs from that in export.json"]
    run.export_record.unlink()
    assert survey(run)["export"]["problems"] == ["export.json is missing, so contents were not compared"]
    assert not survey(run)["good"]


def test_an_export_says_where_it_comes_from(run: RunDir) -> None:
    exports.export_checkpoint(run, None, run.export, None, Screen())
    card = ModelCard.load(run.export / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.base_model is None and card.data.license is None and "TODO: choose a licence" in card.text
    manifest = json.loads((run.checkpoint(4) / "manifest.json").read_text())
    assert f"`text.jsonl` (SHA-256 {manifest['identity']['data.content']})" in card.text
    assert str(run.root.parent) not in card.text, "it names folders of this machine"
    digest = hashlib.sha256((run.export / "model.safetensors").read_bytes()).hexdigest()
    assert f"- `model.safetensors` {digest}\n" in card.text
    recipe = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    assert (recipe["train.steps"], recipe["data.seq_len"]) == (4, 32) and "log.tensorboard" not in recipe
    losses = [step["loss"] for step in events(run.root, "step")]
    assert f"training loss {statistics.fmean(losses):.4f} (mean of" in card.text
    exports.export_checkpoint(run, 2, run.root.parent / "other", None, Screen())
    earlier = ModelCard.load(run.root.parent / "other" / "README.md").text
    assert f"training loss {statistics.fmean(losses[:2]):.4f} (mean of" in earlier


def test_what_the_author_writes_into_the_card_stays(run: RunDir) -> None:
    exports.export_checkpoint(run, None, run.export, None, Screen())
    card = run.export / "README.md"
    card.write_text(card.read_text().replace("TODO: choose a licence", "Apache 2.0, see"))
    edited = card.read_text()
    assert survey(run)["good"] and export_has(run, read_export_record(run).files)
    for step in (2, 4):  # from the second on, the card is no file of the export
        exports.export_checkpoint(run, step, run.export, None, Screen())
        assert card.read_text() == edited and survey(run)["good"]
    assert not (run.root / "export.kept").exists()
    card.unlink()
    exports.export_checkpoint(run, 2, run.export, None, Screen())
    assert "TODO: choose a licence" in card.read_text()
    exports.export_checkpoint(run, 4, run.export, None, Screen())  # one that nobody has edited is replaced
    assert "- 4 steps" in card.read_text() and not (run.root / "export.kept").exists()
