"""Prepared data and tokenizers on disk: made once, sealed with checksums, made again when damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from fsdptrain.errors import RecipeError, is_disk_full

CHECKED_BYTES = 2**26  # bytes at the beginning of a prepared file whose checksum is kept; beyond, its size is enough


CHECKSUM_FILE = "sums.json"


def cached_folder(kind: str, wanted: Any, write: Callable[[Path], None]) -> Path:
    """The cache's folder of what `wanted` (JSON) describes; `write` fills it where there is none, or a damaged one."""
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir(kind) / name
    with FileLock(f"{folder}.lock"):
        if not is_intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
            scratch = folder.with_suffix(f".{os.getpid()}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                write(scratch)
                seal(scratch)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def cache_dir(kind: str) -> Path:
    """The folder that keeps what is prepared of a kind, made if need be: data, splits, or tokenizers.

    It is in $FSDPTRAIN_CACHE, else in fsdptrain/ of the user's cache folder. Raises RecipeError where none can be had.
    """
    wanted, base = os.environ.get("FSDPTRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(wanted or Path(base or Path.home() / ".cache") / "fsdptrain") / kind
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        if is_disk_full(error):
            raise
        where = f"{folder}: {error.strerror}" if isinstance(error, OSError) else f"{error}"
        raise RecipeError(
            f"the cache for prepared {kind} cannot be written ({where}); set FSDPTRAIN_CACHE to a folder that can be"
        ) from None
    return folder


def seal(folder: Path) -> None:
    """Write down what is in a prepared folder."""
    (folder / CHECKSUM_FILE).write_text(json.dumps(_checksums(folder)), encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """Whether a prepared folder holds what it held when it was sealed; a damaged one is made again."""
    try:
        return bool(json.loads((folder / CHECKSUM_FILE).read_text(encoding="utf-8")) == _checksums(folder))
    except (OSError, ValueError, RecursionError):
        return False


def _checksums(folder: Path) -> dict[str, list[int]]:
    """The size of every file, and the CRC-32 of its beginning."""
    found = {}
    for file in folder.iterdir():
        if file.name != CHECKSUM_FILE:
            with file.open("rb") as stream:
                found[file.name] = [file.stat().st_size, zlib.crc32(stream.read(CHECKED_BYTES))]
    return found
