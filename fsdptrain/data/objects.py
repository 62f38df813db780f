"""Data in object stores: what is behind a URL, and its copies in this node's cache, from which it is read.

An object is identified by its URL, its size and its ETag. A copy that has all three is used again, so that a later
start lists the objects and downloads only what is new.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fsdptrain.config.paths import data_kind
from fsdptrain.data.cache import MORE_SPACE, cache_dir, full_disk_errors, key_digest, remove_leftovers, scratch_beside
from fsdptrain.data.readers import reject_saved_to_disk
from fsdptrain.errors import CheckpointError, DataError, NoData, StorageError, shortened
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.storage import ObjectPath, object_path, store_errors
from fsdptrain.text import size as size_text

REQUEST_BYTES = 2**24  # bytes of one request
AT_ONCE = 8  # objects that are downloaded at the same time
POLL_S = 0.25  # between two reports of progress


@dataclass(frozen=True)
class DataObject:
    """An object as the store listed it."""

    place: ObjectPath
    size: int
    etag: str

    @property
    def copy(self) -> Path:
        """Its copy in the cache, which exists only if it is complete."""
        return cache_dir("objects") / key_digest([str(self.place), self.size, self.etag])

    @property
    def is_here(self) -> bool:
        """Whether the cache has a copy."""
        try:
            return self.copy.stat().st_size == self.size
        except OSError:
            return False


@functools.cache  # per process: everything that reads the data sees the same objects
def list_objects(url: str) -> tuple[DataObject, ...]:
    """Return the data files behind the URL of an object, a folder or a glob, in the order of `data_files`.

    As in a local folder, `*` matches no name that starts with a dot, and an object that is named or matched is returned
    whatever its suffix. Raises NoData when the store refuses or does not answer and when nothing is there, and
    DataError when there are no data files.
    """
    with _data_errors(url, NoData(f"data: {shortened(url)!r} was not found")):
        found = _find(object_path(url))
    if not found:
        raise DataError(f"data: no data files in {shortened(url)}")
    return tuple(found[key] for key in sorted(found, key=lambda key: key.split("/")))


@contextlib.contextmanager
def _data_errors(place: object, if_missing: DataError) -> Iterator[None]:
    """Raise `if_missing` for an object that does not exist, and NoData for all else that a store may raise."""
    try:
        with store_errors(place):
            yield
    except FileNotFoundError:
        raise if_missing from None
    except StorageError as error:
        raise NoData(f"data: {error}") from None


def _find(root: ObjectPath) -> dict[str, DataObject]:
    """Return the objects behind a path or a glob by their keys; raises FileNotFoundError when nothing is there."""
    try:
        matched = {root.key: root.fs.info(root.key)}
    except (FileNotFoundError, PermissionError) as error:
        if "bucket does not exist" in str(error):
            raise
        matched = _matching(root)
        # A user may have the right to read what is in a folder, and none for the folder's own name.
        if not matched and isinstance(error, PermissionError) and root.fs.find(root.key):
            matched = {root.key: {"type": "directory"}}
        if not matched:
            raise
    found = {}
    folders = {key for key, info in matched.items() if info["type"] != "file"}
    for key, info in matched.items():
        if key in folders and not folders.isdisjoint(_parents(key)):
            continue  # it is listed with that folder
        below = _list_folder(ObjectPath(root.fs, key)) if key in folders else {key: info}
        for name, each in below.items():
            if (name == key or data_kind(name)) and not name.endswith("/"):
                found[name] = DataObject(place := ObjectPath(root.fs, name), each["size"], _etag(each))
                if not found[name].etag:
                    raise DataError(f"data: {place} has no ETag, without which a change of it is not noticed")
    return found


def _parents(key: str) -> list[str]:
    """Return the folders that contain a key, the bucket first."""
    parts = key.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def _list_folder(folder: ObjectPath) -> dict[str, Any]:
    """Return the objects below a folder; raises DataError where save_to_disk has written it."""
    below: dict[str, Any] = folder.fs.find(folder.key, detail=True)
    names: dict[str, set[str]] = {}
    for key in below:
        parent, _, name = key.rpartition("/")
        names.setdefault(parent, set()).add(name)
    for parent, inside in names.items():
        reject_saved_to_disk(ObjectPath(folder.fs, parent), inside)
    return below


def _matching(root: ObjectPath) -> dict[str, Any]:
    """Return the matches of a glob without those in which a wildcard stands for a name that starts with a dot."""
    import fsspec

    if not has_magic(root.key):
        return {}
    # Beside other characters, ** is the same as *; fsspec refuses it.
    pattern = "/".join(part if part == "**" else re.sub(r"\*+", "*", part) for part in root.key.split("/"))
    try:
        matched = root.fs.glob(pattern, detail=True)
    except PermissionError:  # glob requests the folder's own name, a listing of all that is below does not
        fixed = "/".join(itertools.takewhile(lambda part: not has_magic(part), pattern.split("/")))
        matches = re.compile(fsspec.utils.glob_translate(pattern)).match
        listed = root.fs.find(fixed, withdirs=True, detail=True)
        matched = {key: info for key, info in listed.items() if matches(key)}
    named = [part for part in pattern.split("/") if part.startswith(".")]

    def is_seen(part: str) -> bool:
        return not part.startswith(".") or any(fnmatchcase(part, each) for each in named)

    return {key: info for key, info in matched.items() if all(map(is_seen, key.split("/")))}


def _etag(info: dict[str, Any]) -> str:
    """Return the ETag in what a store reports about an object; libraries spell it in two ways, some add quotes."""
    return str(info.get("ETag") or info.get("etag") or "").strip('"')


def fetch(objects: Sequence[DataObject], progress: Progress = lambda *_: None) -> None:
    """Download the objects of which the cache has no copy; other processes of the node wait for the one that does.

    Raises NoData when the store refuses or does not answer, DataError when an object changes during the download, and
    CheckpointError when the disk is too small. What was complete then stays in the cache.
    """
    if all(each.is_here for each in objects):
        return
    folder, name = cache_dir("objects"), key_digest(str(objects[0].place))
    with _locked(folder / f"{name}.lock", objects, progress):
        missing = [each for each in objects if not each.is_here]
        scratch = scratch_beside(folder / name)
        remove_leftovers(folder)
        if not missing:
            return
        _check_space(folder, sum(each.size for each in missing))
        scratch.mkdir()
        try:
            with full_disk_errors(folder):
                _download(missing, scratch, progress)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, objects: Sequence[DataObject], progress: Progress) -> Iterator[None]:
    """Hold a lock; while another process holds it, report what that one has completed, so that a stop ends the wait."""
    lock, total = FileLock(path), sum(each.size for each in objects)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=POLL_S)
        except Timeout:
            _report(progress, sum(each.size for each in objects if each.is_here), total)
    try:
        yield
    finally:
        lock.release()


def _report(progress: Progress, received: int, total: int) -> None:
    unit, bytes_of_unit = ("MiB", 2**20) if total > 10 * 2**20 else ("KiB", 2**10)
    whole = -(-total // bytes_of_unit)
    progress(f"downloading data ({unit})", received // bytes_of_unit if received < total else whole, whole)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"no space: the data needs {size_text(needed)}, and {size_text(free)} are free on {socket.gethostname()} "
            f"for the cache {folder}: {MORE_SPACE}"
        )


def _download(objects: Sequence[DataObject], scratch: Path, progress: Progress) -> None:
    """Download objects into `scratch`, AT_ONCE at a time, and rename each when it is complete."""
    total, received, stop, lock = sum(each.size for each in objects), [0], threading.Event(), threading.Lock()

    def copy(number: int) -> None:
        each, path = objects[number], scratch / str(number)
        with path.open("wb") as file:
            for start in range(0, each.size, REQUEST_BYTES):
                if stop.is_set():
                    return
                data = _read(each, start)
                file.write(data)
                with lock:
                    received[0] += len(data)
            os.fsync(file.fileno())
        _reject_changed(each, path.stat().st_size)
        path.replace(each.copy)

    _report(progress, 0, total)
    with ThreadPoolExecutor(AT_ONCE, "download") as pool:
        try:
            waiting = {pool.submit(copy, number) for number in range(len(objects))}
            while waiting:
                done, waiting = wait(waiting, POLL_S, FIRST_EXCEPTION)
                for each in done:
                    each.result()
                _report(progress, received[0], total)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _read(each: DataObject, start: int) -> bytes:
    with _data_errors(each.place, _changed(each)):
        try:
            return each.place.read(start, min(start + REQUEST_BYTES, each.size))
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) == errno.EINVAL:  # this range is beyond the end of the object
                _reject_changed(each, each.size)
            raise


def _reject_changed(each: DataObject, received: int) -> None:
    """Raise DataError when an object is no longer the one that was listed: its parts may be of two versions."""
    with _data_errors(each.place, _changed(each)):
        info = each.place.fs.info(each.place.key)
    if (info["size"], _etag(info)) != (each.size, each.etag) or received != each.size:
        raise _changed(each)


def _changed(each: DataObject) -> DataError:
    return DataError(f"data: {each.place} changed while it was downloaded: run again when nothing writes to it")
