"""Room on the disk: what a run will need, what there is, and a full disk in clear words."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fsdptrain.checkpoint.manifest import fsync
from fsdptrain.config.plan import Plan
from fsdptrain.errors import DISK_FULL_ERRNOS, CheckpointError, FsdptrainError
from fsdptrain.ownership import remove_checkpoint
from fsdptrain.rundir import RunDir
from fsdptrain.text import counted, size


def disk_facts(plan: Plan, parameters: int, steps: int | None) -> dict[str, Any]:
    """Return what checkpoints and export will take on the disk of output_dir, and what is free there.

    A checkpoint holds master weights and optimizer state. One more is there than is kept, while it is written; those
    an earlier run left will make room. Prepared data is not counted: it lies in the cache already.
    """
    recipe, rundir = plan.recipe, RunDir(Path(plan.run_dir))
    every, copies = recipe.checkpoint.every, recipe.checkpoint.keep + 1
    if steps is not None:
        copies = min(copies, -(-steps // every) if every else 1)
    checkpoint = plan.state_bytes(parameters)
    export = parameters * getattr(torch, recipe.export.dtype).itemsize if recipe.export.at_end else 0
    standing = [rundir.checkpoint(step) for step in rundir.checkpoint_steps()]
    held = sum(path.stat().st_size for folder in standing for path in folder.glob("*") if path.is_file())
    return {
        "checkpoint_bytes": checkpoint,
        "checkpoints": copies,
        "export_bytes": export,
        "needed_bytes": max(0, copies * checkpoint - held) + export,
        "free_bytes": shutil.disk_usage(existing_parent(rundir.root)).free,
    }


def disk_problems(plan: Plan, facts: dict[str, Any]) -> Iterator[FsdptrainError]:
    """That there is too little room, with what takes it."""
    if facts["free_bytes"] < facts["needed_bytes"]:
        yield CheckpointError(
            f"output_dir: no space: needs {size(facts['needed_bytes'])}, has {size(facts['free_bytes'])} on the disk "
            f"of {plan.run_dir} ({_breakdown(facts)}): lower checkpoint.keep, or choose another"
        )


def disk_summary(facts: dict[str, Any]) -> str:
    """The disk's facts for the person."""
    return f"{size(facts['needed_bytes'])} needed ({_breakdown(facts)}), {size(facts['free_bytes'])} free"


def _breakdown(facts: dict[str, Any]) -> str:
    checkpoints = f"{counted(facts['checkpoints'], 'checkpoint')} of {size(facts['checkpoint_bytes'])}"
    return f"at most {checkpoints} at a time, an export of {size(facts['export_bytes'])}"


def existing_parent(path: Path) -> Path:
    """Return the nearest folder on the way up from `path` that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


DISK_FULL = re.compile(rf"(?:os error|Errno) (?:{'|'.join(map(str, DISK_FULL_ERRNOS))})\b")


def prepare_scratch(scratch: Path, target: Path, needed: int) -> None:
    """Make an empty folder to write into.

    Raises CheckpointError when the target's name is taken, or when the disk has less than `needed` bytes free.
    """
    reject_existing(target)
    remove_checkpoint(scratch)
    missing = [folder for folder in (scratch, *scratch.parents) if not folder.exists()]
    scratch.mkdir(parents=True)
    for folder in missing:
        fsync(folder.parent)
    needed += needed // 100  # headers, and what the file system takes for itself
    if available_bytes(scratch) < needed:
        raise CheckpointError(no_space_message(scratch, needed))


def reject_existing(target: Path) -> None:
    """Raise CheckpointError when there is something of this name: a checkpoint never replaces anything."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already: move it away, nothing is overwritten")


def available_bytes(scratch: Path) -> int:
    """Bytes there are for what is written into `scratch`: those free, and those it has taken."""
    return shutil.disk_usage(scratch.parent).free + sum(path.stat().st_size for path in scratch.glob("*"))


def no_space_message(scratch: Path, needed: int) -> str:
    """What is said of a full disk, whenever it is noticed."""
    return f"no space: needs {size(needed)}, has {size(available_bytes(scratch))}"


@contextlib.contextmanager
def report_full_disk(scratch: Path, needed: int) -> Iterator[None]:
    """Inside, a disk that fills up is a CheckpointError with the numbers (safetensors says `os error 28`)."""
    try:
        yield
    except Exception as error:
        if DISK_FULL.search(str(error)):
            raise CheckpointError(f"{no_space_message(scratch, needed)} ({error})") from error
        raise
