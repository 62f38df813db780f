"""The command `export`: it is the only one that writes its folder, and whatever ends it leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from broken_saves import flip
from forks import Command
from injection import small_recipe
from support import TESTS, environment, fsdptrain, python_path

from fsdptrain.checkpoint import export as exports
from fsdptrain.checkpoint.verify import survey
from fsdptrain.errors import CheckpointError
from fsdptrain.folder.rundir import RunDir
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
    pause = {"where": "fsdptrain.checkpoint.writer:check_export", "do": "sleep", "how": {"seconds": 600}}
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
    weights, before = run.export / "model.safetensors", run.export_record.read_text()
    (run.export / "notes.md").write_text("mine")
    assert survey(run)["good"] and survey(run)["export"]["note"] is None
    flip(weights, weights.stat().st_size - 1)
    assert survey(run)["export"]["problems"] == [f"{weights} is damaged: its checksum differs from that in export.json"]
    assert not survey(run)["good"]
    fields = json.loads(before)
    del fields["sha256"]
    run.export_record.write_text(json.dumps(fields))  # as an earlier version wrote it
    assert survey(run)["good"] and "no checksums were recorded" in survey(run)["export"]["note"]
    run.export_record.write_text(before)
    (run.export / "config.json").unlink()
    assert not survey(run)["good"]
