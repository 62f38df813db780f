"""Track and remove only files that fsdptrain wrote; a file of anybody else is never lost. No torch.

A folder of ours carries a mark. Of a checkpoint we know the names of the files, of an export we keep a record of names,
sizes and times; what is not among them stays, where it is or in a folder called NAME.kept.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import stat
from fnmatch import fnmatchcase
from pathlib import Path

from fsdptrain.rundir import MARK, RunDir

CHECKPOINT_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors|manifest\.json|\.tmp\w{6}")  # the last: safetensors' own


UNFINISHED = re.compile(r"step-[0-9]{8,}\.(?:tmp|old)")


WEIGHTS = ("*.safetensors", "*.safetensors.index.json")  # what from_pretrained may take for the model


MARK_TEXT = "fsdptrain writes this folder. Files that it did not write stay as they are.\n"


Stamps = dict[str, list[int]]  # path inside the folder → [bytes, time of change in ns]


def is_marked(folder: Path) -> bool:
    """Return whether the folder carries our mark, as a plain file."""
    return _is_file(folder / MARK)


def write_mark(folder: Path) -> None:
    """Put our mark into a folder that has none."""
    if not is_marked(folder):
        (folder / MARK).write_text(MARK_TEXT, encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write a file aside and give it its name, so that a reader sees the old text or the new one."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def unused_name(path: Path) -> Path:
    """Return the path itself where nothing has its name, else NAME-2, NAME-3, …"""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def set_aside(path: Path) -> None:
    """Rename what somebody else changed to NAME.kept, NAME.kept-2, …"""
    path.rename(unused_name(path.with_name(f"{path.name}.kept")))


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint, and the folder if it is empty then; else it is called NAME.kept from now on."""
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.iterdir():
            if CHECKPOINT_FILE.fullmatch(path.name) and _is_file(path):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
    if os.path.lexists(folder):
        set_aside(folder)


def remove_leftovers(rundir: RunDir) -> None:
    """Remove what an interrupted save or clean-up left behind."""
    for path in rundir.checkpoints.glob("step-*"):
        if UNFINISHED.fullmatch(path.name):
            with contextlib.suppress(OSError):
                remove_checkpoint(path)


def make_scratch(target: Path) -> Path:
    """Make a marked folder beside `target` to write into, and remove those that a killed process left there."""
    name = f".{target.name}.writing"
    for path in target.parent.glob(f"{glob.escape(name)}*"):
        if is_marked(path) and not path.is_symlink():
            shutil.rmtree(path)
    scratch = unused_name(target.with_name(name))
    scratch.mkdir(parents=True)
    write_mark(scratch)
    return scratch


def replace_export(scratch: Path, out: Path, written: Stamps) -> Path | None:
    """Give a finished scratch folder the name `out`; return the folder with what could not be kept in place, if any.

    Of an older folder `out`, the unchanged files in `written` are removed, and files of others move along into the new
    one. OUT.kept gets what has the name of a new file, what may be a part of the older model (weights; files of
    `written` with another size or time, as a copy has), and, without a record, the whole old folder.
    """
    old = None
    if os.path.lexists(out) and not _is_empty(out):
        old = unused_name(out.with_name(f"{out.name}.kept"))
        out.rename(old)
    scratch.rename(out)
    (out / MARK).unlink(missing_ok=True)
    if old is None or not written:
        return old
    root = old.resolve()
    for name, stamp in written.items():
        if _stamp(old / name) == stamp and (old / name).parent.resolve().is_relative_to(root):
            (old / name).unlink()
    for path in old.iterdir():
        if path.is_dir() and not path.is_symlink() and _is_empty(path):
            path.rmdir()
        elif not os.path.lexists(out / path.name) and not _may_be_of_the_model(path.name, written):
            path.rename(out / path.name)
    with contextlib.suppress(OSError):
        old.rmdir()
    return old if old.exists() else None


def _may_be_of_the_model(name: str, written: Stamps) -> bool:
    """Return whether a file or folder beside a new export could be loaded as a part of it."""
    ours = {Path(path).parts[0] for path in written}
    return name in ours or any(fnmatchcase(name, pattern) for pattern in WEIGHTS)


def write_export_record(rundir: RunDir, step: int, written: Stamps) -> None:
    """Write down which step the export holds, and the files in it."""
    write_atomically(rundir.export_record, json.dumps({"step": step, "files": written}, indent=2))


def read_export_record(rundir: RunDir) -> tuple[int | None, Stamps]:
    """Return the step that the export holds, and the files that were written into it; (None, {}) without a record."""
    try:
        found = json.loads(rundir.export_record.read_bytes() if _is_file(rundir.export_record) else "{}")
        files = {str(name): [int(n) for n in stamp] for name, stamp in found["files"].items()}
        return int(found["step"]), files
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, {}


def install_assets(scratch: Path, folder: Path) -> None:
    """Move every file of `scratch` into a `model` folder, where files of others may lie, and list them in its mark.

    One of ours that was edited since is renamed to NAME.kept; one of the same content, as in a copied folder, is
    replaced.
    """
    before = _assets(folder)
    names = sorted(str(path.relative_to(scratch)) for path in scratch.rglob("*") if path.is_file())
    for name in names:
        target, new = folder / name, (scratch / name).read_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        edited = os.path.lexists(target) and (name not in before or before[name] != _stamp(target))
        if edited and not (_is_file(target) and target.read_bytes() == new):
            set_aside(target)
        aside = target.with_name(f".{target.name}.tmp")
        aside.write_bytes(new)
        aside.replace(target)
    write_atomically(folder / MARK, json.dumps({name: _stamp(folder / name) for name in names}, indent=2))


def _assets(folder: Path) -> dict[str, list[int] | None]:
    """Return the files that the mark of a `model` folder lists, with their stamps; earlier versions wrote none."""
    try:
        found = json.loads((folder / MARK).read_bytes())
        return dict(found) if isinstance(found, dict) else {str(name): _stamp(folder / str(name)) for name in found}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def asset_names(folder: Path) -> list[str]:
    """Return the files of a `model` folder that go into an export: ours, or all of them where nothing says which."""
    there = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    listed = _assets(folder) or set(there) - {MARK}
    return [name for name in there if name in listed]


def file_stamps(folder: Path) -> Stamps:
    """Return size and time of change of every file in a folder, by its path inside it."""
    found = {str(path.relative_to(folder)): _stamp(path) for path in sorted(folder.rglob("*"))}
    return {name: stamp for name, stamp in found.items() if stamp and name != MARK}


def _stamp(path: Path) -> list[int] | None:
    """Return [bytes, time of change in ns] of a plain file, else None."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        return [facts.st_size, facts.st_mtime_ns] if stat.S_ISREG(facts.st_mode) else None
    return None


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None
