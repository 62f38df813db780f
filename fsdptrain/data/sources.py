"""A data path → its files, its objects or its Hub data set, opened; and what identifies their content."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdptrain.config.paths import data_kind, is_hub_data, matching_paths
from fsdptrain.config.plan import HubData
from fsdptrain.data.cache import PIECE, QUICKLY_READ, cached_folder
from fsdptrain.data.hub_data import hub_commit, open_hub_data
from fsdptrain.data.objects import StoredObject, fetch, list_objects
from fsdptrain.data.readers import (
    SUPPORTED,
    DataFile,
    Source,
    conversion_advice,
    file_errors,
    open_file,
    reject_saved_to_disk,
)
from fsdptrain.errors import DataError, NoData, shortened
from fsdptrain.events import Progress
from fsdptrain.storage import URL

SETTLED_S = 10.0  # since the last change: two changes within a tick of the file system's clock look like one


DIGEST_FILE = "sha256"  # in a folder of the cache


def data_files(path: str) -> list[Path]:
    """Return the data files behind a path, a glob or a folder, each once, sorted; empty when `path` is not local.

    Raises DataError for a folder that cannot be read, and for a pipe, a device or a broken link with the name of a data
    file: a reader would wait for the first two, and rows would be missing without notice because of the third.
    """
    found = {Path(name) for name in matching_paths(path)}
    files = {file for p in found for file in _files_in(p)}
    wanted = sorted(file for file in files if data_kind(file.name) or file in found)
    for file in wanted:
        if not os.path.isfile(file):  # noqa: PTH113  (Path's raises where a folder may not be entered)
            raise DataError(f"{file} is not a readable regular file")
    return wanted


def _files_in(path: Path) -> Iterator[Path]:
    """Yield the path itself or, when it is a folder, every file below it."""
    if not os.path.isdir(path):  # noqa: PTH112
        yield path
        return
    for folder, _, names in os.walk(path, onerror=_raise_unreadable):
        reject_saved_to_disk(folder, names)
        yield from (Path(folder, name) for name in names)


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None


def stored_objects(path: str) -> tuple[StoredObject, ...]:
    """Return the objects behind a URL; none for a local path or a Hub data set. Raises as `list_objects` does."""
    return list_objects(path) if URL.fullmatch(path) else ()


def readable_files(path: str, limit: int | None = None, progress: Progress = lambda *_: None) -> list[DataFile]:
    """Return the files behind a path, or its first `limit` ones; objects are downloaded. None for a Hub data set.

    Raises as `data_files`, `list_objects` and `fetch` do.
    """
    if objects := stored_objects(path)[:limit]:
        fetch(objects, progress)
        return [DataFile(each.copy, str(each.place)) for each in objects]
    return [DataFile(file, str(file)) for file in data_files(path)[:limit]]


def count_files(path: str) -> int:
    """Return the number of files behind a path; 0 for a Hub data set."""
    return len(stored_objects(path) or data_files(path))


def bytes_to_download(path: str) -> int:
    """Return the bytes of the objects behind a URL of which the cache has no copy; 0 for anything else."""
    return sum(each.size for each in stored_objects(path) if not each.is_here)


def data_stamps(path: str) -> list[tuple[str, int, int]]:
    """Return (name, bytes, mtime in ns) of every data file, to compare before and after reading them."""
    stamps = []
    for file in readable_files(path):
        with file_errors(file):
            status = file.path.stat()
        stamps.append((file.name, status.st_size, status.st_mtime_ns))
    return stamps


def fingerprint(path: str) -> str:
    """Return a SHA-256 over the type and content of every data file, or over a Hub data set's name and commit.

    From QUICKLY_READ on they are read by one process of a node only: their digest is cached, until a file is changed.
    The copies of objects do not change: their digest is cached by URL, size and ETag.
    """
    files = readable_files(path)
    if not files:
        data = HubData.of(path)
        identity = [data.name, data.config, data.split or "train", hub_commit(path)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    if objects := stored_objects(path):
        states: list[Any] = [(str(each.place), each.size, each.etag) for each in objects]
        size, changed_s = sum(each.size for each in objects), 0.0
    else:
        states = [_state(file) for file in files]
        size, changed_s = sum(size for _, _, size, _ in states), max(max(changes) for *_, changes in states) / 1e9
    if size < QUICKLY_READ or time.time() - changed_s < SETTLED_S:
        return _digest(files)

    def write(folder: Path) -> None:
        (folder / DIGEST_FILE).write_text(_digest(files), encoding="ascii")

    return (cached_folder("digests", states, write) / DIGEST_FILE).read_text(encoding="ascii")


def _state(file: DataFile) -> tuple[str, int, int, tuple[int, int]]:
    """Return name, inode, bytes, and when content and status were changed in ns: no write leaves all of them.

    The file is opened, because a client of NFS trusts what it knows of files that are not.
    """
    with file_errors(file), file.path.open("rb") as stream:
        status = os.fstat(stream.fileno())
    return file.name, status.st_ino, status.st_size, (status.st_mtime_ns, status.st_ctime_ns)


def _digest(files: list[DataFile]) -> str:
    """Return a SHA-256 over the type and content of files, which are read."""
    digest = hashlib.sha256()
    for file in files:
        with file_errors(file), file.path.open("rb") as stream:
            digest.update(str(data_kind(file.name)).encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def quick_fingerprint(path: str, budget: int) -> str:
    """Return a SHA-256 over the type, the size and the beginning of every data file; at most `budget` bytes are read.

    Files that have fewer bytes together are read as a whole. For a Hub data set it is that of `fingerprint`; of objects
    it is made from what the store lists, the type, size and ETag of each. Raises NoData for a local path without files.
    """
    if objects := stored_objects(path):
        listed = [(data_kind(each.place.name), each.size, each.etag) for each in objects]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    files, digest = data_stamps(path), hashlib.sha256()
    if not files and Path(path).is_absolute():
        raise NoData(f"data.path: {shortened(path)!r} was not found")
    if not files:
        return fingerprint(path)
    whole = sum(size for _, size, _ in files) <= budget
    for name, size, _ in files:
        digest.update(f"{data_kind(name)} {size}".encode() + b"\0")
        left = size if whole else budget // len(files)
        with file_errors(Path(name)), Path(name).open("rb") as stream:
            while left > 0 and (piece := stream.read(min(left, PIECE))):
                digest.update(piece)
                left -= len(piece)
    return digest.hexdigest()


def open_sources(path: str) -> list[Source]:
    """Open every file of a local path or a URL, or the Hub data set `org/name[:config[:split]][@revision]`.

    Raises DataError for an unreadable, empty or unsupported file, naming the line where there is one; NoData when the
    data is not on this machine and cannot be downloaded.
    """
    files = readable_files(path)
    if is_hub_data(path):
        return [open_hub_data(path)]
    if not Path(path).exists() and not files:
        raise NoData(f"data.path: {shortened(path)!r} was not found")
    if not files:
        raise DataError(f"data.path: no data files in {path} (supported: {SUPPORTED}){_conversion_hint(path)}")
    return [open_file(file) for file in files]


def first_source(path: str) -> Source:
    """Open the first file behind a path without counting its rows; raises as `open_sources` does."""
    files = readable_files(path, limit=1)
    return open_file(files[0], count_rows=False) if files else open_sources(path)[0]


def _conversion_hint(folder: str) -> str:
    """Return how to convert a file of a folder that has no supported one, as the end of a message."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []  # noqa: PTH112, PTH208
    return next((f"; {name}: {advice}" for name in names if (advice := conversion_advice(name))), "")
