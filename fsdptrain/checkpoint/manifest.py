"""The manifest of a checkpoint: what makes it complete, and how to check that it and an export still are. No torch.

A checkpoint exists only when all of it was written (`storage`). The manifest's sizes and SHA-256 sums show damage since
then. Its last line is the checksum of the lines before it, which is checked before anything in the manifest is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdptrain.config.adapter import ADAPTER_CONFIG
from fsdptrain.errors import CheckpointError, OtherVersion, StorageError, Unreadable, listed
from fsdptrain.plan.plan import open_plan
from fsdptrain.run_folder.events import read_losses
from fsdptrain.run_folder.files import NOTHING_THERE, is_there, regular_file_status, system_errors
from fsdptrain.run_folder.ownership import ExportRecord, file_stamps, read_export_record
from fsdptrain.run_folder.records import COUNT, OBJECT, TEXT, FieldType, by_loss, field_fault, read_bytes
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import MANIFEST_NAME, Location, checkpoint_name
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import size

FORMAT_VERSION, READABLE = 4, (3, 4)
NOT_READ = ("sha256", "world_size", "plan_digest")  # the last two of version 3, which had no plan
CHECKSUM_PREFIX = ',\n  "sha256": "'
FILE_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors")

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: its step, the plan that wrote it, and every file's size and checksum."""

    format: int
    step: int
    plan: dict[str, Any]  # {}: not known
    identity: dict[str, Any]
    files: dict[str, dict[str, Any]]  # name → {"bytes", "sha256"}
    skipped: int = 0  # of the steps, those that were not finite: the optimizer has not made them
    loss_scale: list[float] | None = None  # in float16: the loss scale, and the steps since it changed

    def sealed(self) -> bytes:
        """Return the content of `manifest.json`, with its checksum."""
        fields = dataclasses.asdict(self)
        text = json.dumps(fields, indent=2, sort_keys=True)
        return with_checksum(text.removesuffix("\n}").encode())


def with_checksum(body: bytes) -> bytes:
    """Complete the JSON text of an object, given without its closing brace, with the checksum of that text."""
    return body + f'{CHECKSUM_PREFIX}{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(folder: Location) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises OtherVersion when its format is another version's, StorageError when it cannot be read, and another
    CheckpointError when it is missing or differs from what was written.
    """
    path = folder / MANIFEST_NAME
    try:
        with system_errors(path):
            if folder.is_symlink():
                raise CheckpointError(f"{folder} is a link, which may lead elsewhere")
        raw = read_bytes(path)
        fields = json.loads(raw)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
    except NOTHING_THERE:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}: the checkpoint is not complete") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).removeprefix(f'{path}: ')}") from None
    version = fields.get("format")
    # Compare the version before the checksum, which another version may compute differently.
    if type(version) is int and version not in READABLE:
        raise OtherVersion(
            f"{path}: written by another version of fsdptrain (checkpoint format {reprlib.repr(version)}; this version "
            f"reads {listed(READABLE)}): continue with that version, or choose another output_dir"
        )
    if with_checksum(raw.rpartition(CHECKSUM_PREFIX.encode())[0]) != raw:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    fields = {"plan": {}} | {name: value for name, value in fields.items() if name not in NOT_READ}
    if fields.keys() != FIELDS.keys():
        raise CheckpointError(f"{path} is not a valid manifest: its fields are {reprlib.repr(sorted(fields))}")
    if fault := field_fault(fields, FIELDS):
        raise CheckpointError(f"{path} is not a valid manifest: {fault}")
    return Manifest(**fields)


def _are_files(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    for name, entry in value.items():
        if not isinstance(entry, dict) or entry.keys() != ENTRY.keys() or field_fault(entry, ENTRY):
            return False
        if not FILE_NAME.fullmatch(name) or not SHA256.fullmatch(entry["sha256"]):
            return False
    return True


def _is_scale(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) == 2 and all(type(number) is float for number in value)
    return numbers and 0 < value[0] < math.inf and 0 <= value[1] < math.inf


ENTRY = {"bytes": COUNT, "sha256": TEXT}
FIELDS = {
    "format": COUNT, "step": COUNT, "skipped": COUNT, "plan": OBJECT, "identity": OBJECT,
    "files": FieldType("an object of files, with their bytes and SHA-256", _are_files),
    "loss_scale": FieldType("null, or a scale and a count of steps", lambda value: value is None or _is_scale(value)),
}  # fmt: skip


def file_entry(path: Location) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file, as a manifest holds them."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def file_sums(folder: Path, names: Iterable[str], poll: Callable[[], None]) -> dict[str, str]:
    """Return the SHA-256 of files, read in parallel; `poll` is called until all are read, and may raise."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        entries = {name: pool.submit(file_entry, folder / name) for name in names}
        try:
            while wait(entries.values(), timeout=0).not_done:
                poll()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return {name: entry.result()["sha256"] for name, entry in entries.items()}


def file_problem(path: Location, entry: dict[str, Any], checksums: bool, record: str = "the manifest's") -> str | None:
    """Return how a file differs from its recorded size and, with `checksums`, SHA-256; None if it does not."""
    try:
        with system_errors(path):
            status = regular_file_status(path)
            if not status:
                return f"{path} is not a regular file"
            if status.st_size != entry["bytes"]:
                return f"{path} has {status.st_size} bytes, not {entry['bytes']}"
            if checksums and file_entry(path) != entry:
                return f"{path} is damaged: its checksum differs from {record}"
    except NOTHING_THERE:
        return f"{path} is missing"
    return None


def checkpoint_problems(folder: Location, share: slice = slice(None), checksums: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint, one line each; `share` selects the files that this rank checks.

    Without `checksums`, only check that the files exist and have the right sizes. Files are read in parallel, because
    SHA-256 on one core is slower than a disk and hashlib releases the GIL. Raises OtherVersion or StorageError for a
    checkpoint that is not known to be damaged, but that only another version can read, or of which the system or the
    store cannot read a file.
    """
    try:
        manifest = read_manifest(folder)
    except (OtherVersion, StorageError):
        raise
    except CheckpointError as error:
        return [str(error)]
    found = [None if checkpoint_name(manifest.step) == folder.name else f"{folder} holds step {manifest.step}"]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        names = sorted(manifest.files)[share]
        found += pool.map(lambda name: file_problem(folder / name, manifest.files[name], checksums), names)
    return [problem for problem in found if problem]


def complete_steps(rundir: RunDir, unless: tuple[type[CheckpointError], ...] = (OtherVersion,)) -> list[int]:
    """Return the steps of complete checkpoints, ascending; checksums of their files are not compared.

    Those that raise an error of `unless` do not count. Raises StorageError for another one that cannot be read.
    """
    complete = []
    for step in rundir.checkpoint_steps():
        with contextlib.suppress(*unless):
            if not checkpoint_problems(rundir.checkpoint(step), checksums=False):
                complete.append(step)
    return complete


def newest_manifest(rundir: RunDir) -> Manifest | None:
    """Return the manifest of the newest checkpoint whose manifest can be read.

    Raises OtherVersion for a newer one of another version, StorageError if a newer one cannot be read, and
    CheckpointError for a link out of the run folder.
    """
    reject_external_symlinks(rundir)
    for step in reversed(rundir.checkpoint_steps()):
        try:
            return read_manifest(rundir.checkpoint(step))
        except (OtherVersion, StorageError):
            raise
        except CheckpointError:
            continue
    return None


def reject_external_symlinks(rundir: RunDir) -> None:
    """Raise CheckpointError for a symlink that leads out of the run folder, which may come from someone else.

    Raises StorageError if the system cannot tell.
    """
    root = os.path.realpath(rundir.root)
    folders = (rundir.checkpoints, rundir.logs, rundir.plans)
    with system_errors(rundir.root):
        within = (path for folder in folders for path in _links_inside(folder))
        assets = () if rundir.model.is_symlink() else rundir.model.rglob("*")
        for path in (*rundir.written_paths(), *within, *assets):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                raise CheckpointError(f"{path} is a link that leads out of the run folder, to {os.path.realpath(path)}")


def _links_inside(folder: Path) -> list[Path]:
    """Return the links in a folder, with one list of it: the logs have a file of every rank."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if entry.is_symlink()]


CONFIG, WEIGHTS = "config.json", ("model.safetensors", "model.safetensors.index.json")  # that from_pretrained opens


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
    """Compare the files of the export with the sizes and checksums in export.json."""
    folder, unreadable = rundir.export, False
    try:
        problems = _differences(folder, read_export_record(rundir))
    except StorageError as error:
        problems, unreadable = [str(error)], True
    sizes = [size for size, _ in file_stamps(folder).values()]
    return {
        "path": str(folder), "bytes": sum(sizes), "files": len(sizes), "problems": problems, "unreadable": unreadable,
    }  # fmt: skip


def _differences(folder: Path, record: ExportRecord) -> list[str]:
    if record.step is None:
        return [f"{record.fault or 'export.json is missing'}, so contents were not compared"]
    names = sorted(record.files.keys() & record.sums.keys())  # a model card has no sum
    entries = [{"bytes": record.files[name][0], "sha256": record.sums[name]} for name in names]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compare = partial(file_problem, checksums=True, record="that in export.json")
        found = pool.map(compare, [folder / name for name in names], entries)
        problems = [problem for problem in found if problem]
    others = [folder / name for name in WEIGHTS if name not in names and is_there(folder / name)]
    return problems + [f"{path} is not of this export, and from_pretrained may load it: remove it" for path in others]
