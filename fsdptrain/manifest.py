"""The manifest of a checkpoint: what makes it complete, and how to tell that it still is. JSON, no torch.

A checkpoint folder is written aside under another name and renamed once, after its manifest; so a folder of the right
name exists only when everything in it was written. The manifest's sizes and SHA-256 sums tell what the disk did since.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptrain.errors import CheckpointError, Problem
from fsdptrain.rundir import RunDir

NAME = "manifest.json"
FORMAT = 1


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
        path = folder / NAME
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True))
        fsync(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises CheckpointError when there is none, when it cannot be read, or when it names a file outside the folder.
    """
    try:
        manifest = Manifest(**json.loads((folder / NAME).read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: there is no manifest: the checkpoint is not complete") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / NAME} is damaged: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{folder}: checkpoint format {manifest.format}; this version reads {FORMAT}")
    for name in manifest.files:
        if name != Path(name).name or name in ("", ".", "..") or (folder / name).is_symlink():
            raise CheckpointError(f"{folder / NAME} names {name!r}, which is not a plain file of the folder")
    return manifest


def file_entry(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def damaged(folder: Path, manifest: Manifest, names: list[str]) -> list[str]:
    """What is wrong with these files of a checkpoint, a line each; an empty list when they are as they were written."""
    problems = []
    for name in names:
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != manifest.files[name]["bytes"]:
            problems.append(f"{path} has {path.stat().st_size} bytes, not {manifest.files[name]['bytes']}")
        elif file_entry(path) != manifest.files[name]:
            problems.append(f"{path} is damaged: its checksum differs from the manifest's")
    return problems


def newest_manifest(rundir: RunDir) -> Manifest | None:
    """The manifest of the newest checkpoint whose manifest can be read."""
    for step in reversed(rundir.checkpoint_steps()):
        try:
            return read_manifest(rundir.checkpoint(step))
        except CheckpointError:
            continue
    return None


def resume_problems(before: dict[str, Any], now: dict[str, Any]) -> list[Problem]:
    """What a resume would silently turn into another run: every difference between the two identities."""
    return [
        Problem(f"was {before.get(path)!r} in the run to resume, is {value!r} now; choose another output_dir", path)
        for path, value in now.items()
        if path in before and before[path] != value
    ]


def fsync(path: Path) -> None:
    """Make a file or a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
