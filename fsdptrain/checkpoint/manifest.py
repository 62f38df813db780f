"""The manifest of a checkpoint: what makes it complete, and how to check that it still is. JSON, no torch.

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
from pathlib import Path
from typing import Any

from fsdptrain.config.keys import flat
from fsdptrain.config.mixture import mixture_changes
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import CheckpointError, OtherVersion, Problem, StorageError, listed
from fsdptrain.plan.plan import HAS_MOMENTUM, LAYOUT_KEY
from fsdptrain.run_folder.files import NOTHING_THERE, regular_file_status, system_errors
from fsdptrain.run_folder.records import COUNT, OBJECT, TEXT, FieldType, field_fault
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import MANIFEST_NAME, Location, checkpoint_name

FORMAT_VERSION = 2
MAX_BYTES = 2**24  # of a manifest; one of a hundred thousand files is smaller
CHECKSUM_PREFIX = ',\n  "sha256": "'
FILE_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors")

# Keys of an identity beside those of the recipe. What they stand for is read or computed by the workers, who must all
# find the same; a resume must find it again, except for MEASURED.
BASE_KEY = "model.id.content"  # with frozen weights: the digest of the files that hold them

DATA_KEY, HELD_OUT_KEY = "data.content", "data.eval.content"  # digests of files; the second with data.eval.path only
TOKENS_KEY = "data.tokens"  # the digest of the rows as they are trained
TOKENIZER_KEY = "model.tokenizer.content"  # the digest of the tokenizer, with its chat template
CODE_KEY = "model.code"  # of a model's own code, the SHA-256 of each file
RESOLVED = "settled."  # before each key of the model's configuration that decides what is trained
MEASURED = (HELD_OUT_KEY,)  # changes what is measured, not what is trained: a resume may change it, and says so
ANOTHER_RUN = "choose another `name` or output_dir"
DIGITS = 12  # of a digest that is shown
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: its step, the plan that wrote it, and every file's size and checksum."""

    format: int
    step: int
    world_size: int
    plan_digest: str
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
    raw = _read_bytes(path)
    fields = parse_object(path, raw)
    version = fields.get("format")
    # Compare the version before the checksum, which another version may compute differently.
    if type(version) is int and version != FORMAT_VERSION:
        raise OtherVersion(
            f"{path}: written by another version of fsdptrain (checkpoint format {reprlib.repr(version)}; this version "
            f"reads {FORMAT_VERSION}): continue with that version, or choose another output_dir"
        )
    if with_checksum(raw.rpartition(CHECKSUM_PREFIX.encode())[0]) != raw:
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    del fields["sha256"]
    if fields.keys() != FIELDS.keys():
        raise CheckpointError(f"{path} is not a valid manifest: its fields are {reprlib.repr(sorted(fields))}")
    if fault := field_fault(fields, FIELDS):
        raise CheckpointError(f"{path} is not a valid manifest: {fault}")
    return Manifest(**fields)


def parse_object(path: Location, raw: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes of a file hold; raises CheckpointError when they hold anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object")
    return value


def _read_bytes(path: Location) -> bytes:
    """Return a manifest's bytes; raises CheckpointError for links, which lead elsewhere, and pipes, which never end."""
    try:
        with system_errors(path):
            if path.parent.is_symlink() or not regular_file_status(path):
                raise CheckpointError(f"{path} is not a regular file in a regular folder")
            with path.open("rb") as stream:
                raw = stream.read(MAX_BYTES + 1)
    except NOTHING_THERE:
        raise CheckpointError(f"{path.parent} has no {MANIFEST_NAME}: the checkpoint is not complete") from None
    if len(raw) > MAX_BYTES:
        raise CheckpointError(f"{path} is damaged: too large for a manifest (over {MAX_BYTES:,} bytes)")
    return raw


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
    "format": COUNT, "step": COUNT, "skipped": COUNT, "world_size": COUNT, "plan_digest": TEXT, "identity": OBJECT,
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


def resume_problems(before: dict[str, Any], now: dict[str, Any]) -> list[Problem]:
    """Return the differences between two identities, which would silently turn a resumed run into another one.

    A key that is missing in `before` had its default then. Raises OtherVersion when `before` is of a version that makes
    other tokens, batches or updates from the same recipe.
    """
    layout_before, layout_now = before.get(LAYOUT_KEY), now[LAYOUT_KEY]
    if layout_before != layout_now:
        raise OtherVersion(
            "the run to resume was trained by another version of fsdptrain, which makes other tokens, batches or "
            f"updates from the same recipe (layout {layout_before}; this version: {layout_now}): "
            f"continue with that version, or {ANOTHER_RUN}"
        )
    values_before = flat(Recipe()) | before
    changed = {
        path: value
        for path, value in now.items()
        if path in values_before and values_before[path] != value and path not in MEASURED
    }
    if changed.keys() & {DATA_KEY, TOKENIZER_KEY}:  # which are the reason for other tokens
        changed.pop(TOKENS_KEY, None)
    return [_changed(path, values_before[path], value) for path, value in changed.items()]


def measured_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what a resume may change beside the recipe, and what it says then: key → [old, new] digest."""
    return {
        key: [before[key][:DIGITS], now[key][:DIGITS]]
        for key in MEASURED
        if key in before and key in now and before[key] != now[key]
    }


def recipe_key(path: str) -> str:
    """Return the key of the recipe that a key of an identity belongs to."""
    if path.startswith(RESOLVED):
        return f"model.config.{path.removeprefix(RESOLVED)}"
    fields = {DATA_KEY: "data.path", TOKENS_KEY: "data.path", CODE_KEY: "model.id"}
    return fields.get(path) or path.removesuffix(".content").removesuffix(HAS_MOMENTUM)


def _changed(path: str, before: Any, now: Any) -> Problem:
    if path == CODE_KEY:
        files = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        flag = "pass --trust-remote-code" if before else "leave out --trust-remote-code"
        way_out = "restore it" if before and now else flag
        message = f"its own code differs from that of the run to resume ({listed(files)}): {way_out}"
    elif path in DIFFERENT:
        message = DIFFERENT[path].format(f"(digest {now[:DIGITS]}, was {before[:DIGITS]})")
    elif path == "data.sources":
        message = f"{mixture_changes(before, now)}, so the run would train on another stream"
    elif path.endswith(HAS_MOMENTUM):
        was, what = ("not 0", "0") if before else ("0", "not 0")
        message = f"was {was} in the run to resume, is {what} now"
    else:
        message = f"was {before!r} in the run to resume, is {now!r} now"
        if path.startswith(RESOLVED):
            message += ": restore it in the config.json of the model (a default: the version of transformers)"
    return Problem(f"{message}; or {ANOTHER_RUN}", recipe_key(path))


# What is compared by a digest → the message if it differs.
DIFFERENT = {
    BASE_KEY: "the files of the model differ from those that the run to resume has frozen {}, and checkpoints hold "
    "only what is trained: put those files back",
    DATA_KEY: "the data differs from that of the run to resume {}: put that data back",
    TOKENIZER_KEY: "the tokenizer or its chat template differs from that of the run to resume {}: put its files back",
    TOKENS_KEY: "the same rows became other tokens than in the run to resume {}: restore pinned.json, which has the "
    "date of the chat template, or the versions of transformers and tokenizers",
}
