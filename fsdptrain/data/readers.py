"""Data files of every supported type → rows, with the file and the line in every error.

Text files are parsed here, line by line, and no type is inferred. `datasets` reads only what comes from the Hub, where
types are declared: it infers a file's types from the first 10 MB, turns texts that are all dates into timestamps and
digits in CSV into numbers, caches files by path and mtime, and its JSON parser can end the process.

Objects in stores are read from their copies in this node's cache. An object is identified by its URL, its size and its
ETag: a copy that has all three is used again, so that a later start lists the objects and downloads only what is new.
"""

from __future__ import annotations

import collections
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from fsdptrain.config.paths import COMPRESSED, DATA_SUFFIXES, data_kind
from fsdptrain.data.cache import MORE_SPACE, cache_dir, full_disk_errors, key_digest, scratch_beside
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
AT_ONCE = 8  # requests at the same time
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


def broken_rows_error(broken: list[DataError], read: int) -> DataError:
    """Return one error for these broken rows, up to MOST_BROKEN of them; `read` rows were read after the first."""
    lines = [str(each) for each in broken[:MOST_BROKEN]]
    if len(broken) > MOST_BROKEN:
        among = f" in the {read + 1:,} rows from there, after which reading stopped" if read >= READ_ON else ""
        lines.append(f"{len(broken):,} broken rows{among}, of which the first {MOST_BROKEN} are listed")
    return DataError("\n  ".join(lines))


csv.field_size_limit(sys.maxsize)  # a document may be longer than csv's own limit of 128 KiB


@dataclass(frozen=True)
class Source:
    """One file or Hub data set: its name for errors, its columns, its row count, and a reader of some columns.

    `count` is None where rows have to be read to be counted. `rows` can be pickled. It reads what is between two of the
    `cuts`, of which the list is complete unless the rows of a file of JSON lines have to be found first. `selects`: its
    rows have the wanted columns alone. `sampled`: `columns` are those of the first rows, and `whole` reads all of the
    file.
    """

    name: str
    columns: list[str]
    count: int | None
    rows: Callable[..., Rows]
    cuts: Sequence[Cut] = ()
    selects: bool = False
    sampled: bool = False
    whole: Callable[..., Rows] | None = None

    def between(self, start: Cut, stop: Cut | None) -> Source:
        """Return the part of the source between two cuts; None is its end."""
        rows = self.rows if (start, stop) == (BEGIN, None) else partial(self.rows, start=start, stop=stop)
        count = None if self.count is None else (stop[1] if stop else self.count) - start[1]
        return replace(self, rows=rows, count=count, cuts=(), whole=self.whole or self.rows)

    def has(self, column: str) -> bool:
        """Return whether any row has a column; of a JSON file all rows are read unless one of the first has it."""
        if column in self.columns or not self.sampled:
            return column in self.columns
        rows = (self.whole or self.rows)([column])
        return any(isinstance(row, dict) and column in row for _, row in rows)

    def counted(self) -> int:
        """Return the number of rows, which are read unless it is known; a broken one counts, too."""
        return sum(1 for _ in self.rows(self.columns)) if self.count is None else self.count


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


def open_file(file: DataFile) -> Source:
    """Open a data file by its suffix.

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
        is_empty = next(reader(file), None) is None
        count = 0 if is_empty else None
        source = Source(str(file), columns, count, partial(reader, file), sampled=not is_table)
    if source.count is not None and source.count < 1:  # the count in a damaged parquet file may even be negative
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


def _lines(file: DataFile, start: Cut = BEGIN, stop: Cut | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) without a byte order mark, decompressed; raises DataError for what is not UTF-8."""
    kind = next((kind for suffix, kind in COMPRESSED.items() if file.name.lower().endswith(suffix)), None)
    with file_errors(file):  # Arrow raises OSError where compressed data is damaged or cut
        opened = io.BufferedReader(pa.input_stream(str(file.path), compression=kind)) if kind else file.path.open("rb")
    with file_errors(file), opened as stream:
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


def _json_lines(file: DataFile, columns: object = None, start: Cut = BEGIN, stop: Cut | None = None) -> Rows:
    for number, line in _lines(file, start, stop):
        if line.strip():
            place = f"{file}:{number}"
            try:
                value = json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:
                yield place, DataError(f"{place}: not a JSON object: {error}")
            else:
                yield place, _object_or_broken(value, place)


def _json(file: DataFile, columns: object = None) -> Rows:
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
    first = re.sub(r'"[^"]*"', "", next((line for _, line in _lines(file)), ""))
    order = "\t" if data_kind(file.name) == ".tsv" else ",;\t"
    delimiter = next((mark for mark in order if mark in first), order[0])
    return csv.reader((line for _, line in _lines(file)), delimiter=delimiter, strict=strict)


def _csv(file: DataFile, columns: object = None) -> Rows:
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


def _document(file: DataFile, columns: object = None) -> Rows:
    text = _full_text(file)
    yield str(file), {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


_TEXT_READERS: dict[str, Callable[..., Rows]] = {  # they read all columns, whichever are wanted

    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv, ".txt": _document, ".text": _document,
}  # fmt: skip


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
class DataObject(DataFile):
    """An object as the store listed it. `path` is that of its copy in the cache, which exists if it is complete."""

    place: ObjectPath = field(compare=False)
    size: int
    etag: str

    def __reduce__(self) -> Any:  # the processes that encode need the copy alone
        return DataFile, (self.path, self.name)

    @property
    def is_here(self) -> bool:
        """Whether the cache has a copy."""
        try:
            return self.path.stat().st_size == self.size
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
    folder = "/".join(itertools.takewhile(lambda part: not has_magic(part), root.key.split("/")))
    try:
        listed = root.fs.find(folder, detail=True)
    except PermissionError:  # a user may have the right to read an object, and none to list others
        if folder != root.key:
            raise
        listed = {folder: root.fs.info(folder)}
    matches = _matcher(root.key)
    found, names = dict[str, DataObject](), dict[str, set[str]]()
    for key, info in listed.items():
        parts = key.split("/")
        above = ["/".join(parts[:number]) for number in range(folder.count("/") + 1, len(parts))]
        if not matches(key) and not any(map(matches, above)):
            continue
        names.setdefault(above[-1] if above else "", set()).add(parts[-1])
        if (matches(key) or data_kind(key)) and parts[-1]:
            place, size, etag = ObjectPath(root.fs, key), info["size"], _etag(info)
            if not etag:
                raise DataError(f"data: {place} has no ETag, without which a change of it is not noticed")
            path = cache_dir("objects") / key_digest([str(place), size, etag])
            found[key] = DataObject(path, str(place), place, size, etag)
    if not names:
        raise FileNotFoundError(root.key)
    for parent, inside in names.items():
        reject_saved_to_disk(ObjectPath(root.fs, parent), inside)
    return found


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Return whether a key is the one of a path, or matches a glob; `*` matches no name that starts with a dot."""
    import fsspec

    if not has_magic(pattern):
        return pattern.__eq__
    # Beside other characters, ** is the same as *; fsspec refuses it.
    pattern = "/".join(part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.split("/"))
    dotted = [part for part in pattern.split("/") if part.startswith(".")]
    match = re.compile(fsspec.utils.glob_translate(pattern)).match

    def is_seen(part: str) -> bool:
        return not part.startswith(".") or any(fnmatchcase(part, each) for each in dotted)

    return lambda key: bool(match(key)) and all(map(is_seen, key.split("/")))


def _etag(info: dict[str, Any]) -> str:
    return str(info.get("ETag") or info.get("etag") or "").strip('"')


def fetch(files: Iterable[DataFile], progress: Progress = lambda *_: None) -> None:
    """Download the objects of which the cache has no copy; other processes of the node wait for the one that does.

    Raises NoData when the store refuses or does not answer, DataError when an object changes during the download, and
    CheckpointError when the disk is too small. What was complete then stays in the cache.
    """
    objects = [each for each in files if isinstance(each, DataObject)]
    if all(each.is_here for each in objects):
        return
    folder, name = cache_dir("objects"), key_digest(str(objects[0].place))
    with FileLock(folder / f"{name}.lock"):
        missing = [each for each in objects if not each.is_here]
        scratch = scratch_beside(folder / name)
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


def _download(objects: Sequence[DataObject], scratch: Path, progress: Progress) -> None:
    """Download objects into `scratch`, with AT_ONCE requests at a time, and rename each when it is complete."""
    total, received = sum(each.size for each in objects), 0
    unit, bytes_of_unit = ("MiB", 2**20) if total > 10 * 2**20 else ("KiB", 2**10)
    whole = -(-total // bytes_of_unit)

    def report() -> None:
        done = received // bytes_of_unit if received < total else whole
        progress(f"downloading data ({unit})", done, whole)

    report()
    requests = ((each, start) for each in objects for start in range(0, each.size, REQUEST_BYTES))
    with ThreadPoolExecutor(AT_ONCE, "download") as pool:
        sent = collections.deque(pool.submit(_read, *request) for request in islice(requests, AT_ONCE))
        for each in objects:
            path = scratch / each.path.name
            with path.open("wb") as file:
                for _ in range(0, each.size, REQUEST_BYTES):
                    while not wait([sent[0]], POLL_S).done:
                        report()
                    received += file.write(sent.popleft().result())
                    sent.extend(pool.submit(_read, *request) for request in islice(requests, 1))
                file.flush()
                os.fsync(file.fileno())
            _reject_changed(each, path.stat().st_size)
            path.replace(each.path)
            report()


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
