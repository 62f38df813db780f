"""Check that the checkpoints and the export of a run are as they were written; changes nothing, needs no torch."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fsdptrain.checkpoint.manifest import checkpoint_problems, file_problem, parse_object, reject_external_symlinks
from fsdptrain.config.adapter import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from fsdptrain.errors import CheckpointError, OtherVersion, StorageError, Unreadable
from fsdptrain.plan.plan import open_plan
from fsdptrain.run_folder.events import read_losses
from fsdptrain.run_folder.files import NOTHING_THERE, is_there, openable, regular_file_status, system_errors
from fsdptrain.run_folder.ownership import CARD, ExportRecord, file_stamps, read_export_record
from fsdptrain.run_folder.records import by_loss
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import size

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def is_model(folder: Path) -> bool:
    """Return whether a folder has the configuration of a model or an adapter."""
    return any(is_there(folder / name) for name in (CONFIG, ADAPTER_CONFIG))


def survey(rundir: RunDir) -> dict[str, Any]:
    """Return the checkpoints and the export of a run and what is wrong with them, ready for JSON; reads every file.

    `resume` is the step from which a resume would continue, or None; `best` is that with the lowest held-out loss, of
    those that are whole and evaluated. `good`: there is a checkpoint and no problem;
    folders that were set aside or left over are no problem. Raises CheckpointError for a link out of the run folder.
    """
    reject_external_symlinks(rundir)
    checkpoints = [_survey_checkpoint(rundir, step) for step in rundir.checkpoint_steps()]
    source = None
    with contextlib.suppress(*NOTHING_THERE, Unreadable):  # of another version
        source = open_plan(rundir.plan).recipe.eval.best_of
    whole = {each["step"] for each in checkpoints if not each["problems"]}
    newest = _newest_undamaged(checkpoints)
    set_aside, left_over = rundir.storage.other_names()
    export = _survey_export(rundir) if is_there(rundir.export) else None
    found = [*checkpoints, export] if export else checkpoints
    return {
        "run": str(rundir.root),
        "checkpoints": checkpoints,
        "set_aside": set_aside,
        "left_over": left_over,
        "resume": None if newest is None or newest["problems"] else newest["step"],
        "best": next(iter(by_loss(read_losses(rundir.metrics, source), whole)), None),
        "best_of": source,
        "export": export,
        "good": bool(checkpoints) and not any(part["problems"] for part in found),
    }


def show_survey(found: dict[str, Any], screen: Screen) -> None:
    """Show a survey: one row per checkpoint and export, then what a resume would do."""
    parts = {f"step {checkpoint['step']}": checkpoint for checkpoint in found["checkpoints"]}
    if found["export"]:
        parts["export"] = found["export"]
    if parts:
        rows = [
            [what, size(part["bytes"]), str(part["files"]), "; ".join(part["problems"]) or "good"]
            for what, part in parts.items()
        ]
        screen.table(["what", "size", "files", "state"], rows)
    for name in found["set_aside"]:
        screen.say(f"{name}: a run found it damaged and set it aside")
    for name in found["left_over"]:
        screen.say(f"{name}: left over from an interrupted save or removal; the next run removes it")
    if found["best"] is not None:
        of = f" of {found['best_of']}" if found["best_of"] else ""
        screen.say(f"the lowest held-out loss{of} is that of step {found['best']}")
    if found["resume"] is not None:
        screen.say(f"a resume continues from step {found['resume']}")
    elif (newest := _newest_undamaged(found["checkpoints"])) is None:
        screen.say("there is no checkpoint to resume from")
    elif newest["unreadable"]:
        screen.say(f"a resume is refused while the checkpoint of step {newest['step']} cannot be read")
    else:
        screen.say("a resume is refused: only the version that wrote the newest checkpoint can continue from it")


def _survey_checkpoint(rundir: RunDir, step: int) -> dict[str, Any]:
    folder, refused, total, files = rundir.checkpoint(step), None, 0, 0
    try:
        total, files = rundir.storage.size_of(step)
        problems = checkpoint_problems(folder)
    except (OtherVersion, StorageError) as error:
        problems, refused = [str(error)], error
    survey = {"step": step, "path": str(folder), "bytes": total, "files": files, "problems": problems}
    kinds = {"other_version": OtherVersion, "unreadable": StorageError}
    return survey | {name: isinstance(refused, kind) for name, kind in kinds.items()}


def _newest_undamaged(checkpoints: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest checkpoint that is good, or that is refused and not known to be damaged."""
    candidates = (c for c in reversed(checkpoints) if not c["problems"] or c["other_version"] or c["unreadable"])
    return next(candidates, None)


def _survey_export(rundir: RunDir) -> dict[str, Any]:
    """Open the files of the export, and compare them with the index and with the sizes and checksums in export.json."""
    folder, record, unreadable = rundir.export, ExportRecord(), False
    try:
        record = read_export_record(rundir)
        _check_export(folder)
        problems = _differences(folder, record)
    except CheckpointError as error:
        problems, unreadable = [str(error)], isinstance(error, StorageError)
    sizes = [size for size, _ in file_stamps(folder).values()]
    return {
        "path": str(folder), "bytes": sum(sizes), "files": len(sizes), "problems": problems, "unreadable": unreadable,
    }  # fmt: skip


def _differences(folder: Path, record: ExportRecord) -> list[str]:
    """Return how the files of an export differ from its record, one line each."""
    if record.fault:
        return [f"{record.fault}, so contents were not compared"]
    names = sorted(record.files.keys() - {CARD})
    entries = [{"bytes": record.files[name][0], "sha256": record.sums.get(name)} for name in names]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compare = partial(file_problem, record="that in export.json")
        found = pool.map(compare, [folder / name for name in names], entries, [name in record.sums for name in names])
        return [problem for problem in found if problem]


def _check_export(folder: Path) -> None:
    """Raise CheckpointError when a part of an export is missing, unreadable, or hidden by older weights."""
    if is_there(folder / ADAPTER_CONFIG):  # an adapter by itself
        _check_adapter(folder)
        return
    if is_there(folder / ADAPTER_FOLDER / ADAPTER_CONFIG):
        _check_adapter(folder / ADAPTER_FOLDER)
    _read_object(folder / CONFIG)
    if not is_there(folder / INDEX):
        _tensor_names(folder / WEIGHTS)
        return
    if is_there(folder / WEIGHTS):  # from_pretrained tries this name first
        raise CheckpointError(
            f"{folder / WEIGHTS} exists besides {INDEX}: from_pretrained loads it instead of the files in the index; "
            "remove the one that does not belong to this export, or run `fsdptrain export` again"
        )
    weight_map = _read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in weight_map.values()
    ):
        raise CheckpointError(f"{folder / INDEX} does not name a file of the folder for every tensor")
    for file in sorted(set(weight_map.values())):
        missing = {name for name, home in weight_map.items() if home == file} - _tensor_names(folder / file)
        if missing:
            raise CheckpointError(f"{folder / file} has no {min(missing)!r}, which {INDEX} lists for this file")


def _check_adapter(folder: Path) -> None:
    """Raise CheckpointError unless a folder holds a configuration of peft and a file with tensors."""
    _read_object(folder / ADAPTER_CONFIG)
    if not _tensor_names(folder / ADAPTER_WEIGHTS):
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} is empty")


def _read_object(path: Path) -> dict[str, Any]:
    with system_errors(path):
        return parse_object(path, _check_regular(path).read_bytes())


def _tensor_names(path: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file; opening it compares its header with its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with system_errors(path), safe_open(openable(_check_regular(path)), framework="numpy") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def _check_regular(path: Path) -> Path:
    """Return the path of a regular file; raise CheckpointError for another or none, StorageError if it is unknown."""
    with contextlib.suppress(*NOTHING_THERE), system_errors(path):
        if regular_file_status(path):
            return path
    raise CheckpointError(f"{path} is missing or not a regular file")
