"""Prepared data and tokenizers on disk: made once, kept with checksums, made again when damaged."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fsdptrain.config.paths import cache_root
from fsdptrain.errors import CheckpointError, RecipeError, StorageError, first_line, is_disk_full
from fsdptrain.run_folder.files import NOTHING_THERE, system_errors, write_atomically

QUICKLY_READ = 2**26  # bytes; digests of less are not kept
READ_BYTES = 2**24  # bytes of a file that are read at a time
CHECKSUM_FILE = "sums.json"
PARTS_FILE = "parts.json"  # of a folder that needs others: a list for each, which begins with its KIND/NAME
COMPARED_FILE = "compared.json"  # states of the files when they were last found equal to their checksums


def cached_folder(kind: str, key: Any, write: Callable[[Path], None]) -> Path:
    """Return the cache's folder for `key` (JSON); `write` fills it when it is missing or damaged.

    Raises StorageError when it cannot be read, another CheckpointError when there is no space for it.
    """
    if intact_folder(kind, key):  # many ranks may look at once, and do not wait for one another
        return folder_of(kind, key)
    folder = folder_of(kind, key)
    with FileLock(f"{folder}.lock"):
        try:
            found = is_intact(folder)  # another process may have written it while this one waited
        except StorageError as error:
            raise StorageError(
                f"cannot read the cache on {socket.gethostname()}: {error}; or set FSDPTRAIN_CACHE to another folder"
            ) from None
        if not found:
            shutil.rmtree(folder, ignore_errors=True)
            scratch = scratch_beside(folder)
            scratch.mkdir()
            try:
                with full_disk_errors(folder.parent):
                    write(scratch)
                    seal(scratch)
                    scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def intact_folder(kind: str, key: Any) -> Path | None:
    """Return the cache's folder for `key` if it is there and its files were not touched since they were compared."""
    folder = folder_of(kind, key)
    with contextlib.suppress(OSError, StorageError):  # another process may be replacing it
        if is_intact(folder, may_read=False):
            return folder
    return None


def folder_of(kind: str, key: Any) -> Path:
    """Return the cache's folder for `key` (JSON), which may not be there."""
    return cache_dir(kind) / key_digest(key)


def key_digest(key: Any) -> str:
    """Return the name in the cache of what JSON values identify."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def scratch_beside(path: Path) -> Path:
    """Return where a process makes what will be at `path`, of which it holds the lock; what was there is removed.

    The name has the host, because locks of some network file systems do not reach other hosts.
    """
    scratch = path.with_name(f"{path.name}.{socket.gethostname()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    return scratch


def remove_folder(folder: Path) -> None:
    """Remove a folder of the cache, unless another process writes it. One that has its files open can read on."""
    with contextlib.suppress(Timeout, OSError), FileLock(f"{folder}.lock", timeout=0):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def full_disk_errors(folder: Path) -> Iterator[None]:
    """Raise CheckpointError, with the way out, when the disk of a folder of the cache fills up inside."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(
            f"no space: {reason} on {socket.gethostname()} for the cache {folder}: {MORE_SPACE}"
        ) from None


MORE_SPACE = "free some, or set FSDPTRAIN_CACHE to a folder on another disk"


def cache_dir(kind: str) -> Path:
    """Return the cache's folder for one kind (data, tokens, packed, digests, …), created if it is missing.

    It is in $FSDPTRAIN_CACHE, else in fsdptrain/ of the user's cache folder. Raises RecipeError when it cannot be
    written.
    """
    try:
        folder = cache_root() / kind
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        if is_disk_full(error):
            raise
        where = f"{folder}: {error.strerror}" if isinstance(error, OSError) else f"{error}"
        raise RecipeError(
            f"the cache for prepared {kind} cannot be written ({where}); set FSDPTRAIN_CACHE to a writable folder"
        ) from None
    return folder


def seal(folder: Path) -> None:
    """Write the checksums of a prepared folder into it."""
    states = _states(folder)
    (folder / CHECKSUM_FILE).write_text(json.dumps(_checksums(folder, states)), encoding="utf-8")
    (folder / COMPARED_FILE).write_text(json.dumps(states), encoding="utf-8")


def is_intact(folder: Path, may_read: bool = True) -> bool:
    """Return whether a prepared folder, and those that its PARTS_FILE names, are as they were when they were sealed.

    Files are read when the state of one is another than when they were last compared: with `may_read=False` the answer
    is False instead. Raises StorageError when the system fails to read a file that is there.
    """
    try:
        with system_errors(folder):
            sums, states = _read_json(folder / CHECKSUM_FILE), _states(folder)
            parts = _read_json(folder / PARTS_FILE) or []
            if _read_json(folder / COMPARED_FILE) != states:
                if not may_read or sums is None or sums != _checksums(folder, states):
                    return False
                with contextlib.suppress(OSError):  # a folder of another user: it is read every time
                    write_atomically(folder / COMPARED_FILE, json.dumps(states))
    except NOTHING_THERE:
        return False
    return all(is_intact(folder.parent.parent / name, may_read) for name, *_ in parts)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _states(folder: Path) -> dict[str, list[int]]:
    """Return inode, bytes, and when content and status were changed in ns, of every file: no write leaves all."""
    found = {}
    for file in folder.iterdir():
        if file.name not in (CHECKSUM_FILE, COMPARED_FILE) and file.suffix != ".tmp":
            status = file.stat()
            found[file.name] = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return found


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    found = {}
    for name in names:
        size = checksum = 0
        with (folder / name).open("rb") as stream:
            while data := stream.read(READ_BYTES):
                size, checksum = size + len(data), zlib.crc32(data, checksum)
        found[name] = [size, checksum]
    return found
