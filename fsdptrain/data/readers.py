"""Data files of every supported type → rows, with the file and the line in every error.

Text files are parsed here, line by line, and no type is inferred. `datasets` reads only what comes from the Hub, where
types are declared: it infers a file's types from the first 10 MB, turns texts that are all dates into timestamps and
digits in CSV into numbers, caches files by path and mtime, and its JSON parser can end the process.

Objects in stores are read from their copies in this node's cache. An object is identified by its URL, its size and its
ETag: a copy that has all three is used again, so that a later start lists the objects and downloads only what is new.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import io
import itertools
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from fsdptrain.config.paths import COMPRESSED, DATA_SUFFIXES, data_kind
from fsdptrain.data.cache import MORE_SPACE, cache_dir, full_disk_errors, key_digest, remove_leftovers, scratch_beside
from fsdptrain.errors import CheckpointError, DataError, NoData, StorageError, first_line, shortened
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.storage import ObjectPath, object_path, store_errors
from fsdptrain.text import size as size_text

BATCH_ROWS = 1000
COLUMN_ROWS = 100  # rows of a JSON file, about, whose columns are those of the file
PART_BYTES = 2**25  # of a source, about, that one process encodes and the cache keeps by itself
MOST_BROKEN = 10  # rows that a message lists
READ_ON = 100_000  # rows that are read after the first broken one, to report others with it
MAX_JSON = 2**30  # bytes of a line, and of a file that is one row or JSON value, which have to be read whole
REQUEST_BYTES = 2**24  # of an object, by one request
AT_ONCE = 8  # objects that are downloaded at the same time
POLL_S = 0.25  # between two reports of progress
SUPPORTED = f"{', '.join(DATA_SUFFIXES)}, all but .parquet also with {', '.join(COMPRESSED)}"

# File types that are not read, and how to convert each to one that is.
CONVERSIONS = {
    (".xlsx", ".xls", ".ods"): "save the sheet as CSV",
    (".arrow", ".feather"): "convert it to Parquet: Dataset.from_file(…).to_parquet('data.parquet')",
    (".zip", ".tar", ".tgz", ".7z", ".xz", ".rar"): "unpack it first",
    (".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz", ".bin"): "pickles are never loaded: convert it to JSON lines",
    (".md", ".rst", ".html", ".xml", ".pdf", ".docx"): "save its text as .txt",
}


def conversion_advice(name: str) -> str | None:
    """Return how to convert a file with this name, if its type is known and not read."""
    return next((advice for suffixes, advice in CONVERSIONS.items() if name.lower().endswith(suffixes)), None)


Rows = Iterator[
    tuple[str, dict[str, Any] | DataError]
]  # (the row's place, `file:line` or `file, row 3`; column → value, or what is wrong with it)
Cut = tuple[int, int]  # between two rows: byte, row group or row at which a source can be cut, and lines or rows before
BEGIN: Cut = (0, 0)


class EmptyFile(DataError):
    """A file without rows: not an error beside other files."""


class BrokenRows(DataError):
    """Rows that are not what the recipe says they are; rows behind them may be broken too."""


def broken_rows_error(broken: list[DataError], read: int) -> BrokenRows:
    """Return one error for these broken rows, up to MOST_BROKEN of them; `read` rows were read after the first."""
    lines = [str(each) for each in broken[:MOST_BROKEN]]
    if len(broken) > MOST_BROKEN:
        among = f" in the {read + 1:,} rows from there, after which reading stopped" if read >= READ_ON else ""
        lines.append(f"{len(broken):,} broken rows{among}, of which the first {MOST_BROKEN} are listed")
    return BrokenRows("\n  ".join(lines))


csv.field_size_limit(sys.maxsize)  # a document may be longer than csv's own limit of 128 KiB


@dataclass(frozen=True)
class Source:
    """One file or Hub data set: its name for errors, its columns, its row count, and a reader of some columns.

    `rows` can be pickled. It reads what is between two of the `cuts`, of which the list is complete unless the rows of
    a file of JSON lines have to be found first. `selects`: its rows have the wanted columns alone. `sampled`: `columns`
    are those of the first rows, and `whole` reads all of the file.
    """

    name: str
    columns: list[str]
    count: int
    rows: Callable[..., Rows]
    cuts: Sequence[Cut] = ()
    is_counted: bool = True
    selects: bool = False
    sampled: bool = False
    whole: Callable[..., Rows] | None = None

    def __len__(self) -> int:
        return self.count

    def between(self, start: Cut, stop: Cut | None) -> Source:
        """Return the part of the source between two cuts; None is its end."""
        rows = self.rows if (start, stop) == (BEGIN, None) else partial(self.rows, start=start, stop=stop)
        count = (stop[1] if stop else self.count) - start[1] if self.is_counted else self.count
        return replace(self, rows=rows, count=count, cuts=(), whole=self.whole or self.rows)

    def has(self, column: str) -> bool:
        """Return whether any row has a column; of a JSON file all rows are read unless one of the first has it."""
        if column in self.columns or not self.sampled:
            return column in self.columns
        rows = (self.whole or self.rows)([column])
        return any(isinstance(row, dict) and column in row for _, row in rows)

    def counted(self) -> int:
        """Return the number of rows, which are read unless it is known."""
        return self.count if self.is_counted else sum(1 for _ in self.rows(self.columns))


@dataclass(frozen=True)
class DataFile:
    """A data file on a local disk, and its name in messages: its path, or the URL of the object it is a copy of."""

    path: Path
    name: str

    def __str__(self) -> str:
        return self.name


@contextlib.contextmanager
def file_errors(file: object) -> Iterator[None]:
    """Raise DataError for any OSError inside: a file may vanish, or its disk may fail, at any moment."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def open_file(file: DataFile, count_rows: bool = True) -> Source:
    """Open a data file by its suffix; without `count_rows` a text file's count is 1 as soon as it has a row.

    Raises DataError for an unreadable, empty or unsupported file, naming the line where there is one.
    """
    kind = data_kind(file.name)
    if kind is None:
        advice = conversion_advice(file.name)
        raise DataError(f"{file}: unknown data file type; {advice + '; ' if advice else ''}supported: {SUPPORTED}")
    with file_errors(file):
        size = file.path.stat().st_size
    if size == 0:
        raise EmptyFile(f"{file} is empty")
    if kind == ".parquet":
        source = _open_parquet(file)
    else:
        reader = _TEXT_READERS[kind]
        is_table = kind in (".csv", ".tsv")
        columns = next(_table(file), []) if is_table else _columns_of_first(reader(file))
        count = sum(1 for _ in reader(file)) if count_rows else sum(1 for _ in islice(reader(file), 1))
        rows = partial(_read_text, kind, file)
        source = Source(str(file), columns, count, rows, is_counted=count_rows, sampled=not is_table)
    if source.count < 1:  # the count in a damaged parquet file may even be negative
        raise EmptyFile(f"{file} has no rows")
    return source


def reject_saved_to_disk(folder: object, names: Iterable[str]) -> None:
    """Raise DataError, with the way out, if a folder with these names in it was written by save_to_disk."""
    if {"dataset_info.json", "state.json"} <= set(names):
        way_out = "convert it to Parquet: datasets.load_from_disk(…).to_parquet('data.parquet')"
        raise DataError(f"{folder} was written by save_to_disk, which is not supported: {way_out}")


def type_name(value: Any) -> str:
    """Return what a value is, for a message: `null`, `empty`, `an int`, `a list`."""
    if value is None:
        return "null"
    if value == []:
        return "empty"
    return f"{'an' if type(value) is int else 'a'} {type(value).__name__}"


def without_nulls(value: Any) -> Any:
    """Return a value without the null entries that Arrow adds so that every mapping has the keys of all rows.

    Arrow's maps, which are lists of tuples, become mappings.
    """
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        value = dict(value)
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value


def _open_bytes(file: DataFile) -> io.BufferedIOBase:
    """Open a file for reading its decompressed bytes, which raises OSError where compressed data is damaged or cut."""
    kind = next((kind for suffix, kind in COMPRESSED.items() if file.name.lower().endswith(suffix)), None)
    return io.BufferedReader(pa.input_stream(str(file.path), compression=kind)) if kind else file.path.open("rb")


def _lines(file: DataFile, start: Cut = BEGIN, stop: Cut | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) without a byte order mark, decompressed; raises DataError for what is not UTF-8."""
    with file_errors(file), _open_bytes(file) as stream:
        if start != BEGIN:
            stream.seek(start[0])
        lines = iter(partial(stream.readline, MAX_JSON + 1), b"")
        for number, line in enumerate(islice(lines, stop[1] - start[1] if stop else None), start[1] + 1):
            if len(line) > MAX_JSON:
                raise DataError(f"{file}:{number}: a line longer than {MAX_JSON:,} bytes: divide it into several rows")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad = f"byte {error.object[error.start]:#04x} at column {error.start + 1}"
                raise DataError(f"{file}:{number}: not UTF-8 text: {bad}; save the file as UTF-8") from None
            if "\r" in text.rstrip("\r\n"):  # a carriage return alone may end a line, too
                yield from enumerate(io.StringIO(text, newline=""), number)
            else:
                yield number, text


def _json_lines(file: DataFile, start: Cut = BEGIN, stop: Cut | None = None) -> Rows:
    for number, line in _lines(file, start, stop):
        if line.strip():
            place = f"{file}:{number}"
            try:
                value = json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:
                yield place, DataError(f"{place}: not a JSON object: {error}")
            else:
                yield place, _object_or_broken(value, place)


def _json(file: DataFile) -> Rows:
    """Yield the rows of a list of objects, of one object, or of JSON lines, which are often named .json."""
    first = next((line for _, line in _lines(file) if line.strip()), "")
    if not first.lstrip().startswith("["):
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            pass  # one value on several lines
        else:
            yield from _json_lines(file)
            return
    text = _full_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}:{getattr(error, 'lineno', 1)}: not JSON: {error}") from None
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield f"{file}, row {number}", _object_or_broken(row, f"{file}, row {number}")


def _full_text(file: DataFile) -> str:
    lines, size = [], 0
    for _, line in _lines(file):
        size += len(line)
        if size > MAX_JSON:
            raise DataError(
                f"{file} is one row or JSON value longer than {MAX_JSON:,} bytes: write one object per line (.jsonl)"
            )
        lines.append(line)
    return "".join(lines)


def _object_or_broken(value: Any, place: str) -> dict[str, Any] | DataError:
    if not isinstance(value, dict):
        return DataError(f"{place}: expected a JSON object, got {type_name(value)}")
    return value


def _columns_of_first(rows: Rows) -> list[str]:
    """Return the columns of the first rows that are not broken; raise DataError if all that are read are broken."""
    broken: list[DataError] = []
    columns: dict[str, None] = {}
    try:
        for number, (_, row) in enumerate(islice(rows, READ_ON)):
            if isinstance(row, dict):
                columns |= dict.fromkeys(row)
                if number >= COLUMN_ROWS:
                    break
            else:
                broken.append(row)
    except DataError:
        if not columns:  # else reading the rows reports it
            raise
    if broken and not columns:
        raise broken_rows_error(broken, len(broken) - 1)
    return list(columns)


def _table(file: DataFile, strict: bool = False) -> Any:
    """Return a reader of a table; it is divided at tabs in .tsv, else at commas, or what the first line has instead."""
    first = re.sub(r'"[^"]*"', "", next((line for _, line in _lines(file)), ""))
    order = "\t" if data_kind(file.name) == ".tsv" else ",;\t"
    delimiter = next((mark for mark in order if mark in first), order[0])
    return csv.reader((line for _, line in _lines(file)), delimiter=delimiter, strict=strict)


def _csv(file: DataFile) -> Rows:
    reader = _table(file, strict=True)
    number = 1
    try:
        header: list[str] = next(reader, [])
        number = reader.line_num + 1
        for values in reader:
            if len(values) > len(header):
                message = f"{file}:{number}: {len(values)} values for {len(header)} columns"
                yield f"{file}:{number}", DataError(message)
            elif values:
                yield f"{file}:{number}", dict(zip(header, values, strict=False))
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{file}:{number}: not CSV: {error}") from None


def _document(file: DataFile) -> Rows:
    text = _full_text(file)
    yield str(file), {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


_TEXT_READERS: dict[str, Callable[..., Rows]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv, ".txt": _document, ".text": _document,
}  # fmt: skip


def _read_text(kind: str, file: DataFile, columns: list[str], **part: Cut | None) -> Rows:
    return _TEXT_READERS[kind](file, **part)


def _read_parquet(file: DataFile, columns: list[str], start: Cut = BEGIN, stop: Cut | None = None) -> Rows:
    number = start[1]
    try:
        opened = pq.ParquetFile(file.path)
        groups = range(start[0], stop[0] if stop else opened.num_row_groups)
        for batch in opened.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", {name: without_nulls(value) for name, value in row.items()}
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read after row {number}: {first_line(error)}") from None


def _open_parquet(file: DataFile) -> Source:
    try:
        opened = pq.ParquetFile(file.path)
        found, size, before = opened.metadata, 0, 0
        cuts: list[Cut] = []
        for number in range(found.num_row_groups):
            if size >= PART_BYTES:
                size = 0
                cuts.append((number, before))
            group = found.row_group(number)
            size, before = size + group.total_byte_size, before + group.num_rows
        rows = partial(_read_parquet, file)
        return Source(str(file), opened.schema_arrow.names, found.num_rows, rows, cuts, selects=True)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read: {first_line(error)}") from None


@dataclass(frozen=True)
class DataObject:
    """An object as the store listed it."""

    place: ObjectPath
    size: int
    etag: str

    def __str__(self) -> str:
        return str(self.place)

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
        if key in folders and any(key.startswith(f"{folder}/") for folder in folders):
            continue  # it is listed with that folder
        below = _list_folder(ObjectPath(root.fs, key)) if key in folders else {key: info}
        for name, each in below.items():
            if (name == key or data_kind(name)) and not name.endswith("/"):
                found[name] = DataObject(place := ObjectPath(root.fs, name), each["size"], _etag(each))
                if not found[name].etag:
                    raise DataError(f"data: {place} has no ETag, without which a change of it is not noticed")
    return found


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
        needed, free = sum(each.size for each in missing), shutil.disk_usage(folder).free
        if free < needed:
            raise CheckpointError(
                f"no space: the data needs {size_text(needed)}, and {size_text(free)} are free on "
                f"{socket.gethostname()} for the cache {folder}: {MORE_SPACE}"
            )
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
