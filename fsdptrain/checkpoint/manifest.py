"""The manifest of a checkpoint: what makes it complete, and how to tell that it still is. JSON, no torch.

A checkpoint folder is written aside under another name and renamed once, after its manifest; so a folder of the right
name exists only when everything in it was written. The manifest's sizes and SHA-256 sums tell what the disk did since,
and its last line holds the sum of all the lines before it. Whoever reads one believes nothing in it before that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptrain.config.plan import LAYOUT_KEY
from fsdptrain.config.schema import Recipe, flat
from fsdptrain.errors import CheckpointError, OtherVersion, Problem
from fsdptrain.ownership import regular_file_status, unused_name
from fsdptrain.rundir import RunDir, checkpoint_name

MANIFEST_NAME = "manifest.json"


FORMAT_VERSION = 2


MAX_BYTES = 2**24  # a hundred thousand files take less


CHECKSUM_PREFIX = ',\n  "sha256": "'


FILE_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors")


SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: the step, who wrote it, and every file's size and checksum."""

    format: int
    step: int
    world_size: int
    plan_digest: str
    identity: dict[str, Any]
    files: dict[str, dict[str, Any]]  # name → {"bytes", "sha256"}

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`, durably."""
        path = folder / MANIFEST_NAME
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)
        path.write_bytes(with_checksum(text.removesuffix("\n}").encode()))
        fsync(path)


def with_checksum(body: bytes) -> bytes:
    """The JSON text of an object but for its closing brace, closed with the checksum of all that stands before it."""
    return body + f'{CHECKSUM_PREFIX}{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises OtherVersion when it is of another format, and another CheckpointError when there is none or when it is not,
    to the last byte, as it was written.
    """
    path = folder / MANIFEST_NAME
    raw = _read_bytes(path)
    fields = parse_object(path, raw)
    version = fields.get("format")
    if type(version) is int and version != FORMAT_VERSION:  # asked first: another version may seal otherwise
        raise OtherVersion(
            f"{path}: written by another version of fsdptrain (checkpoint format {reprlib.repr(version)}; this one "
            f"reads {FORMAT_VERSION}): go on with that version, or choose another output_dir"
        )
    if with_checksum(raw.rpartition(CHECKSUM_PREFIX.encode())[0]) != raw:
        raise CheckpointError(f"{path} is damaged: its own checksum differs")
    del fields["sha256"]
    fault = _field_problem(fields)
    if fault:
        raise CheckpointError(f"{path} is not as fsdptrain writes it: {fault}")
    return Manifest(**fields)


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes of a file hold. Raise CheckpointError when they hold anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is not an object")
    return value


def _read_bytes(path: Path) -> bytes:
    """A manifest's bytes. A link would lead to where the checkpoint is not, and a pipe would never end."""
    try:
        if path.parent.is_symlink() or not regular_file_status(path):
            raise CheckpointError(f"{path} is not a plain file in a plain folder")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: there is no {MANIFEST_NAME}: the checkpoint is not complete") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise CheckpointError(f"{path} is damaged: it is larger than a manifest ever is")
    return raw


def _field_problem(fields: dict[str, Any]) -> str | None:
    """What stands in a manifest that fsdptrain would not write, if anything does."""
    if fields.keys() != {field.name for field in dataclasses.fields(Manifest)}:
        return f"its fields are {reprlib.repr(sorted(fields))}"
    files = fields["files"]
    sound = {
        "format": type(fields["format"]) is int,
        "step": _is_count(fields["step"]),
        "world_size": _is_count(fields["world_size"]),
        "plan_digest": isinstance(fields["plan_digest"], str),
        "identity": isinstance(fields["identity"], dict),
        "files": isinstance(files, dict) and len(files) > 0,
    }
    faulty = {name: fields[name] for name, well in sound.items() if not well}
    if sound["files"]:
        faulty |= {f"files: {name!r}": facts for name, facts in files.items() if not _is_file_entry(name, facts)}
    return next((f"{name}: {reprlib.repr(value)}" for name, value in faulty.items()), None)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_file_entry(name: str, facts: Any) -> bool:
    if not FILE_NAME.fullmatch(name) or not isinstance(facts, dict) or facts.keys() != {"bytes", "sha256"}:
        return False
    return _is_count(facts["bytes"]) and isinstance(facts["sha256"], str) and bool(SHA256.fullmatch(facts["sha256"]))


def file_entry(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _file_problem(path: Path, facts: dict[str, Any], checksums: bool) -> str | None:
    try:
        status = regular_file_status(path)
        if not status:
            return f"{path} is not a plain file"
        if status.st_size != facts["bytes"]:
            return f"{path} has {status.st_size} bytes, not {facts['bytes']}"
        if checksums and file_entry(path) != facts:
            return f"{path} is damaged: its checksum differs from the manifest's"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def checkpoint_problems(folder: Path, share: slice = slice(None), checksums: bool = True) -> list[str]:
    """What is wrong with a checkpoint, a line each; of its files only a `share` is looked at, that of one rank.

    Without `checksums` only that the files are there and have their sizes. Files are read side by side: SHA-256 keeps
    a core busy with less than a disk delivers, and Python lets others work meanwhile. Raises OtherVersion for what is
    not damaged, but not for us to read.
    """
    try:
        manifest = read_manifest(folder)
    except OtherVersion:
        raise
    except CheckpointError as error:
        return [str(error)]
    found = [None if checkpoint_name(manifest.step) == folder.name else f"{folder} holds step {manifest.step}"]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        names = sorted(manifest.files)[share]
        found += pool.map(lambda name: _file_problem(folder / name, manifest.files[name], checksums), names)
    return [fault for fault in found if fault]


def complete_steps(rundir: RunDir) -> list[int]:
    """Steps of the checkpoints that can be relied on, as far as one sees without reading them whole, ascending."""
    complete = []
    for step in rundir.checkpoint_steps():
        with contextlib.suppress(OtherVersion):
            if not checkpoint_problems(rundir.checkpoint(step), checksums=False):
                complete.append(step)
    return complete


def newest_manifest(rundir: RunDir) -> Manifest | None:
    """The manifest of the newest checkpoint whose manifest can be read.

    Raises OtherVersion for a newer one of another version, and CheckpointError for a run folder that leads elsewhere.
    """
    reject_external_symlinks(rundir)
    for step in reversed(rundir.checkpoint_steps()):
        try:
            return read_manifest(rundir.checkpoint(step))
        except OtherVersion:
            raise
        except CheckpointError:
            continue
    return None


def reject_external_symlinks(rundir: RunDir) -> None:
    """Raise CheckpointError when a link in a run folder leads out of it: a stranger may have made the folder."""
    root = os.path.realpath(rundir.root)
    folders = {rundir.model: "**/*", rundir.checkpoints: "*", rundir.logs: "*", rundir.plans: "*"}
    within = (path for folder, pattern in folders.items() for path in _entries(folder, pattern))
    for path in (*rundir.written_paths(), *within):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise CheckpointError(f"{path} is a link that leads out of the run folder, to {os.path.realpath(path)}")


def _entries(folder: Path, pattern: str) -> Iterable[Path]:
    return () if folder.is_symlink() else folder.glob(pattern)


def resume_problems(before: dict[str, Any], now: dict[str, Any]) -> list[Problem]:
    """What a resume would silently turn into another run: every difference between the two identities.

    A key that `before` does not have was its default then. Raises OtherVersion when a version wrote `before` that makes
    other tokens, batches or updates of the same recipe.
    """
    theirs, ours = before.get(LAYOUT_KEY), now[LAYOUT_KEY]
    if theirs != ours:
        raise OtherVersion(
            "the run to resume was trained by another version of fsdptrain, which makes other tokens, batches or "
            f"updates of the same recipe (layout {theirs or 'not recorded'}; this one: {ours}): go on with that "
            "version, or choose another output_dir"
        )
    were = flat(Recipe()) | before
    return [
        Problem(f"was {were[path]!r} in the run to resume, is {value!r} now; choose another output_dir", path)
        for path, value in now.items()
        if path in were and were[path] != value
    ]


def fsync(path: Path) -> None:
    """Make a file or a folder durable; what is read of it next comes from the disk, where the system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def set_damaged_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is neither taken nor lost: `.damaged`, `.damaged-2`, …; its new path."""
    aside = unused_name(folder.with_name(f"{folder.name}.damaged"))
    folder.rename(aside)
    fsync(folder.parent)
    return aside
