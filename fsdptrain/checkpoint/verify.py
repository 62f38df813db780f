"""Is what a run left behind still as it was written? Reads a run folder, changes nothing, needs no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsdptrain.checkpoint.manifest import checkpoint_problems, parse_object, reject_external_symlinks
from fsdptrain.errors import CheckpointError, OtherVersion
from fsdptrain.ownership import is_regular_file, regular_file_status
from fsdptrain.rundir import RunDir
from fsdptrain.screen import Screen
from fsdptrain.text import size

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def survey(rundir: RunDir) -> dict[str, Any]:
    """What there is in a run folder and what is wrong with it, every file read whole; ready for JSON.

    `resume` is the step that a resume would go on from, or None. `good`: there is a checkpoint, and nothing is wrong;
    folders that were set aside or left over are only told. Raises CheckpointError for a folder that leads elsewhere.
    """
    reject_external_symlinks(rundir)
    checkpoints = [_checkpoint(rundir.checkpoint(step), step) for step in rundir.checkpoint_steps()]
    export = _export(rundir.export) if rundir.export.exists() else None
    found = [*checkpoints, *([export] if export else [])]
    return {
        "run": str(rundir.root),
        "checkpoints": checkpoints,
        "set_aside": _names(rundir, "step-*.damaged*"),
        "left_over": [*_names(rundir, "step-*.tmp"), *_names(rundir, "step-*.old")],
        "resume": _resumed(checkpoints),
        "export": export,
        "good": bool(checkpoints) and not any(part["problems"] for part in found),
    }


def show_survey(found: dict[str, Any], screen: Screen) -> None:
    """A survey for the person: a line a checkpoint, and what a resume would do."""
    rows = [_row(f"step {checkpoint['step']}", checkpoint) for checkpoint in found["checkpoints"]]
    rows += [_row("export", found["export"])] if found["export"] else []
    if rows:
        screen.table(["what", "size", "files", "state"], rows)
    for name in found["set_aside"]:
        screen.say(f"{name}: found damaged by a run, and set aside")
    for name in found["left_over"]:
        screen.say(f"{name}: of a save or a removal that did not come to its end; the next run removes it")
    if found["resume"] is not None:
        screen.say(f"a resume goes on from step {found['resume']}")
    elif any(checkpoint["other_version"] for checkpoint in found["checkpoints"]):
        screen.say("a resume is refused: only the version that wrote the newest checkpoint can go on from it")
    else:
        screen.say("there is no checkpoint to go on from")


def _row(what: str, part: dict[str, Any]) -> list[str]:
    return [what, size(part["bytes"]), str(part["files"]), "; ".join(part["problems"]) or "good"]


def _checkpoint(folder: Path, step: int) -> dict[str, Any]:
    other_version = False
    try:
        problems = checkpoint_problems(folder)
    except OtherVersion as error:
        problems, other_version = [str(error)], True
    return {"step": step, **_extent(folder), "problems": problems, "other_version": other_version}


def _extent(folder: Path) -> dict[str, Any]:
    """The plain files of a folder, as they lie there."""
    sizes = [status.st_size for path in folder.glob("*") if (status := regular_file_status(path))]
    return {"path": str(folder), "bytes": sum(sizes), "files": len(sizes)}


def _names(rundir: RunDir, pattern: str) -> list[str]:
    return sorted(path.name for path in rundir.checkpoints.glob(pattern))


def _resumed(checkpoints: list[dict[str, Any]]) -> int | None:
    """The step a resume takes: the newest good one, unless another version's is found on the way to it."""
    for checkpoint in reversed(checkpoints):
        if checkpoint["other_version"]:
            return None
        if not checkpoint["problems"]:
            return int(checkpoint["step"])
    return None


def _export(folder: Path) -> dict[str, Any]:
    """A Hugging Face folder has no checksums: its files are opened, and its index is compared with what is in them."""
    try:
        _read_export(folder)
        problems = []
    except CheckpointError as error:
        problems = [str(error)]
    return {**_extent(folder), "problems": problems}


def _read_export(folder: Path) -> None:
    """Raise CheckpointError when something is missing from an export, cannot be opened, or hides what was exported."""
    _read_object(folder / CONFIG)
    if not (folder / INDEX).exists():
        _tensors(folder / WEIGHTS)
        return
    if os.path.lexists(folder / WEIGHTS):  # from_pretrained looks for this name first
        raise CheckpointError(
            f"{folder / WEIGHTS} lies beside {INDEX}: from_pretrained loads it instead of the files in the index; "
            "remove the one that is not of this export, or export again with `fsdptrain export`"
        )
    where = _read_object(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in where.values()
    ):
        raise CheckpointError(f"{folder / INDEX} does not say in which file of the folder each tensor is")
    for file in sorted(set(where.values())):
        missing = {name for name, home in where.items() if home == file} - _tensors(folder / file)
        if missing:
            raise CheckpointError(f"{folder / file} has no {min(missing)!r}, which {INDEX} says is in it")


def _read_object(path: Path) -> dict[str, Any]:
    return parse_object(path, _plain(path).read_bytes())


def _tensors(path: Path) -> set[str]:
    """The names in the header of a safetensors file, which has to describe the file to its end."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_plain(path), framework="numpy") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _plain(path: Path) -> Path:
    if not is_regular_file(path):
        raise CheckpointError(f"{path} is missing, or not a plain file")
    return path
