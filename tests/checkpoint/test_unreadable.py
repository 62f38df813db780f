"""An error of the system is not damage: what cannot be read is left as it is, and named with the error's number."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from broken_saves import save
from ranks import build, curve
from safetensors.torch import save_file
from support import as_nobody, make_searchable, on_ranks, planned, run_folder, write_recipe
from typer.testing import CliRunner

from fsdptrain.checkpoint.export import export_checkpoint
from fsdptrain.checkpoint.manifest import MANIFEST_NAME, checkpoint_problems, complete_steps, newest_manifest, survey
from fsdptrain.checkpoint.resume import inspect_earlier_attempts
from fsdptrain.checkpoint.save import remove_old_checkpoints
from fsdptrain.checkpoint.shards import CheckpointReader
from fsdptrain.cli import app
from fsdptrain.config.paths import is_folder, model_name_fault
from fsdptrain.config.reader import load
from fsdptrain.data.cache import cached_folder, is_intact
from fsdptrain.errors import CheckpointError, RecipeError, StorageError
from fsdptrain.launch.run_lock import _wait_for_plan
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.report.document import write_report
from fsdptrain.report.status import list_runs
from fsdptrain.run_folder.ownership import file_stamps, read_export_record, write_export_record, write_mark
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import open_storage
from fsdptrain.terminal.screen import Screen

FILE = "rank-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_searchable(tmp_path)
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> RunDir:
    """Return a run folder with a plan and the checkpoints of steps 2 and 4, which everybody may read."""
    plan = planned(write_recipe(folder), ranks=2)
    rundir = run_folder(plan)
    for step in (2, 4):
        save(rundir.storage, step, plan=plan)
    return rundir


def names_in(run: RunDir) -> list[str]:
    return sorted(str(path.relative_to(run.checkpoints)) for path in run.checkpoints.rglob("*"))


def without_rights(name: str) -> Callable[[RunDir], AbstractContextManager[None]]:
    """Take all rights from a file of the newest checkpoint ("." is its folder), and root's right to ignore that."""

    @contextmanager
    def taking(run: RunDir) -> Iterator[None]:
        path = run.checkpoint(4) / name
        mode = path.stat().st_mode
        path.chmod(0)
        try:
            with as_nobody():
                yield
        finally:
            path.chmod(mode)

    return taking


@contextmanager
def without_descriptors(run: RunDir) -> Iterator[None]:
    """Leave no descriptor to open a file with."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, before[1]))
    try:
        while True:
            fillers.append(os.open("/", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE
    try:
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


FAULTS: dict[str, tuple[Callable[[RunDir], AbstractContextManager[None]], str]] = {
    "a file": (without_rights(FILE), rf"/{FILE} cannot be read: .*\(errno 13, EACCES\): give this user"),
    "the manifest": (without_rights(MANIFEST_NAME), rf"/{MANIFEST_NAME} cannot be read: .*\(errno 13, EACCES\)"),
    "the folder": (without_rights("."), rf"/{MANIFEST_NAME} cannot be read: .*\(errno 13, EACCES\)"),
    "open files": (without_descriptors, r"cannot be read: .*\(errno 24, EMFILE\): raise the number of open files"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_checkpoint_that_the_system_cannot_read_has_no_known_problem_and_refuses_a_start(
    name: str, run: RunDir
) -> None:
    """A start does not go back to the checkpoint before."""
    fault, words = FAULTS[name]
    before, plan = names_in(run), planned(run.root.parent / "recipe.yaml", ranks=2)
    for reading in (checkpoint_problems, CheckpointReader):
        with fault(run), pytest.raises(StorageError, match=f"{words}(.|\\n)*nothing was renamed or removed"):
            reading(run.checkpoint(4))
    for starting in (newest_manifest, complete_steps, lambda run: inspect_earlier_attempts(run, plan)):
        if name != "a file":  # which only a load reads
            with fault(run), pytest.raises(StorageError, match=words if name != "open files" else "EMFILE"):
                starting(run)
    assert names_in(run) == before and checkpoint_problems(run.checkpoint(4)) == []
    assert inspect_earlier_attempts(run, plan).step == 4


def wait_for_plan(run: RunDir) -> None:
    recipe = load(run.root.parent / "recipe.yaml", ["launch.timeout_s=1"])
    _wait_for_plan(make_plan(recipe, Topology("cpu", 2, 1, endpoint="host-0:29500")), run)


READERS: dict[str, tuple[str, Callable[[RunDir], object]]] = {  # a path of the run folder, and what reads it
    "listing": ("checkpoints", lambda run: run.checkpoint_steps()),
    "the newest checkpoint": (
        f"checkpoints/step-00000004/{FILE}",
        lambda run: export_checkpoint(run, None, run.root.parent / "out", None, Screen()),
    ),
    "what was exported": ("export.json", read_export_record),
    "where checkpoints are": ("plan.json", lambda run: RunDir.open(run.root)),
    "the plan, on another node": ("plan.json", wait_for_plan),
    "prepared data": ("cache/rows", lambda run: is_intact(run.root / "cache")),
}


@pytest.mark.parametrize("name", READERS)
def test_what_the_system_cannot_read_is_neither_missing_nor_damaged(
    name: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_export_record(run, 4, {}, {})
    monkeypatch.setenv("FSDPTRAIN_CACHE", str(run.root))
    made = cached_folder("data", str(run.root), lambda folder: (folder / "rows").write_bytes(b"1") and None)
    made.rename(run.root / "cache")
    part, reading = READERS[name]
    path = run.root / part
    mode = path.stat().st_mode
    path.chmod(0)
    with as_nobody(), pytest.raises(StorageError, match=rf"{path} cannot be read: .*\(errno 13, EACCES\)"):
        reading(run)
    path.chmod(mode)
    assert is_intact(run.root / "cache") and run.checkpoint_steps() == [2, 4]


def test_verify_shows_what_cannot_be_read_and_that_a_resume_is_refused(run: RunDir) -> None:
    before = names_in(run)
    with without_rights(FILE)(run):
        found = survey(run)
        done = CliRunner().invoke(app, ["verify", str(run.root)])
    seen = [(each["step"], each["unreadable"], len(each["problems"])) for each in found["checkpoints"]]
    assert seen == [(2, False, 0), (4, True, 1)]
    assert found["resume"] is None and not found["good"]
    assert isinstance(done.exception, StorageError) and "files cannot be read" in str(done.exception)
    assert "a resume is refused while the checkpoint of step 4 cannot be read" in done.stdout
    assert "errno 13, EACCES" in " ".join(done.stdout.split())
    assert names_in(run) == before and survey(run)["resume"] == 4


def test_an_old_checkpoint_that_cannot_be_read_is_neither_counted_nor_removed(run: RunDir) -> None:
    run.checkpoint(2).chmod(0)
    with as_nobody():
        remove_old_checkpoints(run, 4, keep=1)
    assert run.checkpoint_steps() == [2, 4]
    run.checkpoint(2).chmod(0o755)


def test_a_resume_renames_nothing_if_one_rank_cannot_read(folder: Path) -> None:
    recipe = write_recipe(folder)
    found = on_ranks(2, resume_without_rights, folder / "ranks", recipe=str(recipe))
    for seen in found:
        assert "rank 1: " in seen["unreadable"] and "(errno 13, EACCES)" in seen["unreadable"]
        assert re.search(r"rank 1: .*step-00000004 does not exist on \S+, and rank 0 lists it", seen["not mounted"])
        assert seen["resumed"] == 4 and seen["names"] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("name", ["export/model.safetensors", "export/config.json", "export.json", "export"])
def test_an_export_that_cannot_be_read_is_not_damaged(name: str, run: RunDir) -> None:
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, run.export / "model.safetensors")
    write_export_record(run, 4, file_stamps(run.export), dict.fromkeys(("config.json", "model.safetensors"), "0" * 64))
    (run.root / name).chmod(0)
    with as_nobody():
        found, verified = survey(run), CliRunner().invoke(app, ["verify", str(run.root)])
    assert found["export"]["unreadable"] and "(errno 13, EACCES)" in found["export"]["problems"][0]
    assert str(verified.exception) == f"{run.root}: files cannot be read, and may be intact"


def test_a_model_without_rights_is_neither_missing_nor_a_name_on_the_hub(folder: Path) -> None:
    model = folder / "closed" / "model"
    model.mkdir(parents=True)
    model.parent.chmod(0)
    for reading in (is_folder, model_name_fault):
        with as_nobody(), pytest.raises(StorageError, match=rf"{model} cannot be read: .*\(errno 13, EACCES\)"):
            reading(str(model))
    assert is_folder(str(model)) and not is_folder("x" * 300) and not is_folder("a\0b")


def test_a_run_that_cannot_be_read_does_not_hide_the_others(folder: Path, run: RunDir) -> None:
    write_mark(run.root)
    shutil.copytree(run.root, folder / "other")
    run.plan.chmod(0)
    with as_nobody():
        other, unreadable = list_runs(folder)
        with pytest.raises(RecipeError, match=r"no run has anything to report:\n.*nothing w(.|\n)*Permission denied"):
            write_report([RunDir(folder)], folder / "report.html")
    assert other["name"] and other["state"] != "unreadable"
    assert unreadable["state"] == "unreadable" and "plan.json cannot be read: Permission denied" in unreadable["why"]


# --- on every rank -------------------------------------------------------------------------------------------------


def resume_without_rights(recipe: str) -> dict[str, Any]:
    """Save steps 2 and 4, and resume when rank 1 may not read, and does not see, the newest checkpoint."""
    run, found = build(recipe, []), dict[str, Any]()
    checkpointer, model, optimizer = run.checkpointer, run.engine.model, run.engine.optimizer
    for step in (2, 4):
        curve(run, step, step - 2)
        checkpointer.save(step, model, optimizer, wait=True)
    folder = checkpointer.rundir.checkpoint(4)

    def refusal() -> str:
        try:
            return f"resumed from step {checkpointer.load_newest(model, optimizer)}"
        except CheckpointError as error:
            return str(error)

    if run.world.rank == 0:
        for path in (folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"):
            path.chmod(0)
    dist.barrier(run.world.side)
    with as_nobody() if run.world.rank == 1 else contextlib.nullcontext():
        found["unreadable"] = refusal()
    dist.barrier(run.world.side)
    if run.world.rank == 0:
        for path in folder.iterdir():
            path.chmod(0o644)
    dist.barrier(run.world.side)
    elsewhere = open_storage(None, checkpointer.rundir.root / "elsewhere")
    with patch.object(checkpointer, "storage", elsewhere if run.world.rank == 1 else checkpointer.storage):
        found["not mounted"] = refusal()
    found["resumed"] = checkpointer.load_newest(model, optimizer)
    found["names"] = sorted(path.name for path in checkpointer.rundir.checkpoints.iterdir())
    return found
