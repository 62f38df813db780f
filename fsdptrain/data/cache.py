"""Prepared data and tokenizers on disk: made once, stored with checksums, made again when damaged."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from fsdptrain.config.paths import cache_root
from fsdptrain.errors import CheckpointError, RecipeError, is_disk_full
from fsdptrain.files import NOTHING_THERE, system_errors

CHECKED_BYTES = 2**26  # of the beginning of a prepared file have a checksum; of the rest only the size is compared


CHECKSUM_FILE = "sums.json"


def cached_folder(kind: str, key: Any, write: Callable[[Path], None]) -> Path:
    """Return the cache's folder for `key` (JSON); `write` fills it when it is missing or damaged."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir(kind) / name
    if is_intact(folder):  # many ranks may look at once, and do not wait for one another
        return folder
    with FileLock(f"{folder}.lock"):
        if not is_intact(folder):  # another process may have written it while this one waited
            shutil.rmtree(folder, ignore_errors=True)
            scratch = folder.with_suffix(f".{os.getpid()}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                with full_disk_errors(folder.parent):
                    write(scratch)
                    seal(scratch)
                    scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


@contextlib.contextmanager
def full_disk_errors(folder: Path) -> Iterator[None]:
    """Raise CheckpointError, with the way out, when the disk of a folder of the cache fills up inside."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise CheckpointError(
            f"no space: {error.strerror} on {socket.gethostname()} for the cache {folder}: {MORE_SPACE}"
        ) from None


MORE_SPACE = "free some, or set FSDPTRAIN_CACHE to a folder on another disk"


def cache_dir(kind: str) -> Path:
    """Return the cache's folder for one kind (data, digests, objects, splits or tokenizers), created if it is missing.

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
    (folder / CHECKSUM_FILE).write_text(json.dumps(_checksums(folder)), encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """Return whether a prepared folder is as it was when it was sealed; raise StorageError if it cannot be read."""
    try:
        with system_errors(folder):
            return bool(json.loads((folder / CHECKSUM_FILE).read_text(encoding="utf-8")) == _checksums(folder))
    except (*NOTHING_THERE, ValueError, RecursionError):
        return False


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Return [bytes, CRC-32 of its beginning] of every file."""
    found = {}
    for file in folder.iterdir():
        if file.name != CHECKSUM_FILE:
            with file.open("rb") as stream:
                found[file.name] = [file.stat().st_size, zlib.crc32(stream.read(CHECKED_BYTES))]
    return found
