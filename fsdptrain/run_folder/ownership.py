"""Remove and replace only files that fsdptrain wrote; no other file is ever lost. No torch.

A mark file identifies a folder that fsdptrain writes. The files of a checkpoint are known by their names; those of an
export by a record of names, sizes and modification times. Other files stay in place or are moved to NAME.kept.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdptrain.errors import FolderLost, RecipeError, Unreadable
from fsdptrain.run_folder.files import (
    NOTHING_THERE,
    is_at,
    is_regular_file,
    regular_file_status,
    set_aside,
    try_lock,
    unused_name,
    write_atomically,
)
from fsdptrain.run_folder.records import read_object
from fsdptrain.run_folder.rundir import MARK, RunDir
from fsdptrain.run_folder.storage import Location, ObjectPath

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")  # files that from_pretrained may load as weights
CARD = "README.md"  # the model card of an export, which its author completes: it is never compared, and stays
MARK_TEXT = "fsdptrain writes this folder. It does not change files that it did not write.\n"
Stamps = dict[str, list[int]]  # path inside the folder → [bytes, modification time in ns]


def is_marked(folder: Path) -> bool:
    """Return whether the folder contains the mark as a regular file."""
    return is_regular_file(folder / MARK)


def write_mark(folder: Path) -> None:
    """Write the mark into a folder that has none, under its name: a folder with another file cannot be marked."""
    _create(folder / MARK, MARK_TEXT)


def mark_checkpoints(folder: Location, run: str) -> None:
    """Mark a place outside of the run folder as that of the checkpoints of a run, whose place is `run`.

    Raises FileExistsError if another run has marked it a moment ago.
    """
    text, mark = json.dumps({"about": MARK_TEXT.strip(), "run": run}) + "\n", folder / MARK
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    replaced = marked_run(folder)  # that of this run at another place
    if replaced is None and _create(mark, text):
        return
    if marked_run(folder) not in (None, run, replaced):  # other nodes of this run may have marked it
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(mark))
    if isinstance(mark, ObjectPath):
        mark.write_bytes(text.encode())
    else:
        write_atomically(mark, text)


def _create(mark: Location, text: str) -> bool:
    if isinstance(mark, ObjectPath):
        return mark.create(text.encode())
    with contextlib.suppress(FileExistsError), mark.open("x", encoding="utf-8") as stream:
        stream.write(text)
        return True
    return False


def marked_run(folder: Location) -> str | None:
    """Return the place of the run whose checkpoints a place is marked for; None without such a mark.

    Raises StorageError if the system or the store cannot read it.
    """
    with contextlib.suppress(*NOTHING_THERE, ValueError):  # the mark of a run folder is text
        found = read_object(folder / MARK).get("run")
        return found if isinstance(found, str) else None
    return None


class FolderWatch:
    """Tells whether a run folder is still the one that a process has begun to use."""

    def __init__(self, rundir: RunDir) -> None:
        """Watch the mark, which goes with the folder, or else the folder. An open file keeps its number from others."""
        self._rundir = rundir
        self._path = rundir.mark if is_marked(rundir.root) else rundir.root
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def check(self) -> None:
        """Raise FolderLost if the folder was removed, renamed or replaced."""
        if is_at(self._descriptor, self._path):
            return
        lost, now = "removed", os.readlink(f"/proc/self/fd/{self._descriptor}")  # noqa: PTH115
        if not now.endswith("(deleted)"):
            lost = f"renamed to {Path(now).parent if self._path == self._rundir.mark else now}"
        raise FolderLost(
            f"output_dir: {self._rundir.root} was {lost} while the run was using it, so the run was ended: to "
            "continue, restore the folder and run the same command; to begin a new run, delete what is left of it"
        )

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)


@contextlib.contextmanager
def parents_made(path: Path) -> Iterator[None]:
    """Create the folders above a path, and remove those that are empty in the end. Raise RecipeError if one cannot."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"cannot write {path}: {error.filename}: {error.strerror}; name another folder") from None
        yield
    finally:
        for folder in made:  # the innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def output_lock(out: Path) -> Iterator[None]:
    """Lock the name of a folder while this process writes an export there. Raise RecipeError if another one does."""
    path = out.with_name(f".{out.name}.lock")
    try:
        descriptor = try_lock(path)
    except OSError as error:
        raise RecipeError(f"cannot write {out}: {out.parent}: {error.strerror}; name another folder") from None
    if descriptor is None:
        raise RecipeError(f"another export is writing {out}: wait until it has ended, or name another folder")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is unlocked, or it could be the file that another process locks
        os.close(descriptor)


def make_scratch(target: Path) -> Path:
    """Create a marked folder beside `target` to write into, and remove those that killed processes left there.

    The process holds the `output_lock` of the target, so no living process writes into one of them.
    """
    name = f".{target.name}.writing"
    for path in target.parent.glob(f"{glob.escape(name)}*"):
        if is_marked(path) and not path.is_symlink():
            remove_scratch(path)
        else:
            with contextlib.suppress(OSError):
                path.rmdir()  # an empty folder: its process was killed before it wrote the mark, or after it removed it
    # The name is unique also where hosts do not see each other's locks.
    scratch = target.with_name(f"{name}-{uuid.uuid4().hex[:8]}")
    scratch.mkdir()
    write_mark(scratch)
    return scratch


def remove_scratch(scratch: Path) -> None:
    """Remove a folder that `make_scratch` made. The mark goes last, so that the next process can finish the removal."""
    for path in scratch.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()
    shutil.rmtree(scratch)


def replace_export(scratch: Path, out: Path, written: Stamps) -> Path | None:
    """Rename a finished scratch folder to `out`; return the folder of files that could not stay in `out`, or None.

    If `out` exists, its unchanged files in `written` (the record of the older export) are removed, and the user's files
    move into the new folder. OUT.kept gets files whose name is taken in the new folder, files that may belong to the
    older model (weights, and files in `written` whose size or time differs, as in a copy) and, if `written` is empty,
    the whole old folder.
    """
    # Move the old folder away, so that the new one gets its name in one rename.
    old = None
    if os.path.lexists(out) and not _is_empty(out):
        old = unused_name(out.with_name(f"{out.name}.kept"))
        out.rename(old)
    try:
        scratch.rename(out)
    except BaseException:
        if old:
            old.rename(out)
        raise
    (out / MARK).unlink(missing_ok=True)
    if old is None or not written:
        return old
    # Remove the files of the old export, unless they changed or a link leads out of the folder.
    root = old.resolve()
    for name, stamp in written.items():
        if _stamp(old / name) == stamp and (old / name).parent.resolve().is_relative_to(root):
            (old / name).unlink()
    # Move the user's files into the new folder, unless from_pretrained could load them as a part of the new model.
    parts = {Path(name).parts[0] for name in written if name != CARD}
    for path in old.iterdir():
        of_model = path.name in parts or any(fnmatchcase(path.name, pattern) for pattern in WEIGHTS)
        if path.is_dir() and not path.is_symlink() and _is_empty(path):
            path.rmdir()
        elif not of_model and not os.path.lexists(out / path.name):
            path.rename(out / path.name)
    with contextlib.suppress(OSError):
        old.rmdir()
    return old if old.exists() else None


def write_export_record(rundir: RunDir, step: int, written: Stamps, sums: dict[str, str]) -> None:
    """Write the record of the export: its step, its files, and their SHA-256."""
    record = {"step": step, "files": written, "sha256": sums}
    write_atomically(rundir.export_record, json.dumps(record, indent=2))


@dataclass(frozen=True)
class ExportRecord:
    """The record of an export."""

    step: int | None = None  # None: there is no record, or one that counts as none
    files: Stamps = field(default_factory=dict)  # that were written into it
    sums: dict[str, str] = field(default_factory=dict)  # their SHA-256
    fault: str | None = None  # why a record that is there counts as none


def read_export_record(rundir: RunDir) -> ExportRecord:
    """Return the record of the export; raise StorageError if the system cannot read it."""
    path = rundir.export_record
    try:
        record = read_object(path)
    except NOTHING_THERE:
        return ExportRecord()
    except Unreadable as error:
        return ExportRecord(fault=f"{path.name}: {str(error).removeprefix(f'{path}: ')}; it counts as none")
    try:
        files = {name: [int(size), int(changed)] for name, (size, changed) in record["files"].items()}
        sums = {name: str(digest) for name, digest in record["sha256"].items()}
        return ExportRecord(int(record["step"]), files, sums)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return ExportRecord(fault=f"{path.name}: not the record of an export; it counts as none")


def export_has(rundir: RunDir, written: Stamps) -> bool:
    """Return whether the export has all files that were written into it, with their sizes."""
    found = {name: _stamp(rundir.export / name) for name in written if name != CARD}
    return all(stamp and stamp[0] == written[name][0] for name, stamp in found.items())


def install_assets(scratch: Path, folder: Path) -> None:
    """Move every file of `scratch` into a `model` folder, which may hold the user's files, and list them in its mark.

    A file in its place that the user wrote or edited is renamed to NAME.kept, unless its content is the same.
    """
    before = _recorded_assets(folder)
    folder.mkdir(exist_ok=True)  # but not the run folder, if it was removed
    names = sorted(str(path.relative_to(scratch)) for path in scratch.rglob("*") if path.is_file())
    for name in names:
        target, new = folder / name, (scratch / name).read_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        edited = os.path.lexists(target) and (name not in before or before[name] != _stamp(target))
        if edited and not (is_regular_file(target) and target.read_bytes() == new):
            set_aside(target)
        write_atomically(target, new)
    write_atomically(folder / MARK, json.dumps({name: _stamp(folder / name) for name in names}, indent=2))


def _recorded_assets(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / MARK)
    except (*NOTHING_THERE, Unreadable):
        return {}


def asset_names(folder: Path) -> list[str]:
    """Return the files of a `model` folder that an export copies: those its mark lists, or all if it lists none."""
    present = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    wanted = _recorded_assets(folder) or set(present) - {MARK}
    return [name for name in present if name in wanted]


def copy_assets(assets: Path, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Copy the files of a `model` folder that an export has."""
    for name in filter(wanted, asset_names(assets)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(assets / name, folder / name)


def file_stamps(folder: Path) -> Stamps:
    """Return the size and modification time of every file in a folder, by its path inside the folder."""
    found = {str(path.relative_to(folder)): _stamp(path) for path in sorted(folder.rglob("*"))}
    return {name: stamp for name, stamp in found.items() if stamp and name != MARK}


def _stamp(path: Path) -> list[int] | None:
    """Return [bytes, modification time in ns] of a regular file, else None."""
    with contextlib.suppress(OSError):
        status = regular_file_status(path)
        return [status.st_size, status.st_mtime_ns] if status else None
    return None


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None
