"""Data files of every supported type → rows, with the file and the line in every error.

Text files are parsed here, line by line, and no type is inferred. `datasets` reads only what comes from the Hub, where
types are declared: it infers a file's types from the first 10 MB, turns texts that are all dates into timestamps and
digits in CSV into numbers, caches files by path and mtime, and its JSON parser can end the process.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fsdptrain.config.paths import COMPRESSED, DATA_SUFFIXES, data_kind
from fsdptrain.errors import DataError, first_line

BATCH_ROWS = 1000
COLUMN_ROWS = 100  # rows of a JSON file, about, whose columns are those of the file
PART_BYTES = 2**25  # of a source, about, that one process encodes and the cache keeps by itself
MAX_JSON = 2**30  # bytes of a line, and of a file that is one row or JSON value, which have to be read whole
SUPPORTED = f"{', '.join(DATA_SUFFIXES)}, all but .parquet also with {', '.join(COMPRESSED)}"

# File types that are not read, and how to convert each to one that is.
CONVERSIONS = {
    (".xlsx", ".xls", ".ods"): "save the sheet as CSV",
    (".arrow", ".feather"): "convert it to Parquet: Dataset.from_file(…).to_parquet('data.parquet')",
    (".zip", ".tar", ".tgz", ".7z", ".xz", ".rar"): "unpack it first",
    (".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz", ".bin"): "pickles are never loaded: convert it to JSON lines",
    (".md", ".rst", ".html", ".xml", ".pdf", ".docx"): "save its text as .txt",
}

Rows = Iterator[
    tuple[str, dict[str, Any] | DataError]
]  # (the row's place, `file:line` or `file, row 3`; column → value, or what is wrong with it)
Cut = tuple[int, int]  # between two rows: byte, row group or row at which a source can be cut, and lines or rows before
BEGIN: Cut = (0, 0)


class EmptyFile(DataError):
    """A file without rows: not an error beside other files."""


MOST_BROKEN = 10  # rows that a message lists
READ_ON = 100_000  # rows that are read after the first broken one, to report others with it


class BrokenRows(DataError):
    """Rows that are not what the recipe says they are; rows behind them may be broken too."""


def broken_rows_error(broken: list[DataError], read: int) -> BrokenRows:
    """Return one error for these broken rows, up to MOST_BROKEN of them; `read` rows were read after the first."""
    among = f" in the {read + 1:,} rows from there, after which reading stopped" if read >= READ_ON else ""
    count = [f"{len(broken):,} broken rows{among}, of which the first {MOST_BROKEN} are listed"]
    return BrokenRows("\n  ".join([*map(str, broken[:MOST_BROKEN]), *(count if len(broken) > MOST_BROKEN else [])]))


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
        columns = _csv_header(file) if is_table else _columns_of_first(reader(file))
        count = sum(1 for _ in reader(file)) if count_rows else sum(1 for _ in islice(reader(file), 1))
        rows = partial(_read_text, kind, file)
        source = Source(str(file), columns, count, rows, is_counted=count_rows, sampled=not is_table)
    if source.count < 1:  # the count in a damaged parquet file may even be negative
        raise EmptyFile(f"{file} has no rows")
    return source


def conversion_advice(name: str) -> str | None:
    """Return how to convert a file of this name to a supported type, where that is known."""
    return next((advice for suffixes, advice in CONVERSIONS.items() if name.lower().endswith(suffixes)), None)


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
    """Yield (line number, text) without a byte order mark; raises DataError for what is not UTF-8."""
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
    if not first.lstrip().startswith("[") and _is_json(first):
        yield from _json_lines(file)
        return
    text = _full_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}:{getattr(error, 'lineno', 1)}: not JSON: {error}") from None
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield f"{file}, row {number}", _object_or_broken(row, f"{file}, row {number}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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


def _delimiter(file: DataFile) -> str:
    """Return the delimiter of a table: a tab in .tsv; in .csv a comma, or what the first line has instead of one."""
    first = re.sub(r'"[^"]*"', "", next((line for _, line in _lines(file)), ""))
    order = "\t" if data_kind(file.name) == ".tsv" else ",;\t"
    return next((mark for mark in order if mark in first), order[0])


def _csv_header(file: DataFile) -> list[str]:
    """Return the names in the first line, repeated ones included, which a row as a mapping would not show."""
    return next(csv.reader((line for _, line in _lines(file)), delimiter=_delimiter(file)), [])


def _csv(file: DataFile) -> Rows:
    reader = csv.reader((line for _, line in _lines(file)), delimiter=_delimiter(file), strict=True)
    number = 1
    try:
        header = next(reader, [])
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
