"""Files and Hub data sets → rows, with the file and line in every complaint.

Text files are parsed here, line by line, and no type is guessed. (`datasets` settles a file's types on its first 10 MB,
takes texts that are all dates for timestamps and digits in CSV for numbers, remembers files by path and mtime, and its
JSON parser can end the process; it reads what comes from the Hub, where types are declared.)
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fsdptrain.errors import DataError, NoData, listed
from fsdptrain.plan import DATA_SUFFIXES, matches, shortened
from fsdptrain.schema import FORMAT_FIELDS, Data

BATCH = 1000
Rows = Iterator[tuple[str, dict[str, Any]]]  # (where it stands: `file:line` or `file, row 3`; column → value)

csv.field_size_limit(sys.maxsize)  # a document may be longer than csv's own limit of 128 KiB


@dataclass(frozen=True)
class Source:
    """One file or Hub data set: its name for complaints, its columns, its rows, and how to read columns of them."""

    name: str
    columns: list[str]
    count: int
    rows: Callable[[list[str]], Rows]

    def __len__(self) -> int:
        return self.count


def data_files(path: str) -> list[Path]:
    """The data files behind a path, a glob or a folder, each once, sorted; empty when `path` is not local.

    Raises DataError for a folder that cannot be read, and for what has a data file's name and is none: a pipe, a device
    or a link to nowhere, for which a reader would wait, or which would be missing without a word.
    """
    found = {Path(name) for name in matches(path)}
    files = {file for p in found for file in _files_in(p)}
    wanted = sorted(file for file in files if file.suffix in DATA_SUFFIXES or file in found)
    for file in wanted:
        if not os.path.isfile(file):  # noqa: PTH113  (Path's raises where a folder may not be entered)
            raise DataError(f"{file} is not a regular file that can be read")
    return wanted


def _files_in(path: Path) -> Iterator[Path]:
    """The path itself, or everything below a folder that is no folder."""
    if not os.path.isdir(path):  # noqa: PTH112
        yield path
        return
    for folder, _, names in os.walk(path, onerror=_unreadable):
        yield from (Path(folder, name) for name in names)


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """A file may vanish, or be on a disk that fails, at any moment."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every data file: equal before and after, and nobody wrote to them meanwhile."""
    found = []
    for file in data_files(path):
        with _reading(file):
            known = file.stat()
        found.append((str(file), known.st_size, known.st_mtime_ns))
    return found


def fingerprint(path: str) -> str:
    """SHA-256 over the kind and content of every data file; for a Hub data set over its name."""
    digest = hashlib.sha256()
    files = data_files(path)
    for file in files:
        with _reading(file), file.open("rb") as stream:
            digest.update(file.suffix.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest() if files else hashlib.sha256(path.encode()).hexdigest()


def open_sources(path: str) -> list[Source]:
    """Open every file of a local path, or the Hub data set `org/name[:config[:split]]`.

    Raises DataError for an unreadable, empty or unknown kind of file, naming the line where there is one.
    """
    files = data_files(path)
    if Path(path).is_absolute():
        if not Path(path).exists() and not files:
            raise NoData(f"data.path: nothing at {shortened(path)}")
        if not files:
            raise DataError(f"data.path: no data files in {path} (known: {', '.join(DATA_SUFFIXES)})")
        return [_open_file(file) for file in files]
    return [_open_hub(path)]


def peek(path: str, data: Data, rows: int = 8) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns behind a path and its first rows, checked as `read` checks them; the rest is not read.

    Raises DataError as `open_sources` and `read` do.
    """
    files = data_files(path)
    source = _open_file(files[0], counted=False) if files else open_sources(path)[0]
    return source.columns, next(read(source, data, rows), [])


def _open_file(file: Path, counted: bool = True) -> Source:
    if file.suffix not in DATA_SUFFIXES:
        raise DataError(f"{file}: unknown kind of data file; known: {', '.join(DATA_SUFFIXES)}")
    with _reading(file):
        size = file.stat().st_size
    if size == 0:
        raise DataError(f"{file} is empty")
    if file.suffix == ".parquet":
        source = _open_parquet(file)
    else:
        reader = _READERS[file.suffix]
        place, first = next(reader(file), ("", {}))
        columns = list(first) if file.suffix != ".csv" else _csv_header(file)
        count = sum(1 for _ in reader(file)) if counted else bool(place)
        source = Source(str(file), columns, count, lambda _columns: reader(file))
    if source.count < 1:  # a damaged parquet file may even have fewer
        raise DataError(f"{file} holds no rows")
    return source


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines as text, without the mark that some programs put at the beginning of a file."""
    with _reading(file), file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad = f"byte {error.object[error.start]:#04x} at column {error.start + 1}"
                raise DataError(f"{file}:{number}: not UTF-8 text: {bad}") from None


def _json_lines(file: Path) -> Rows:
    for number, line in _lines(file):
        if line.strip():
            place = f"{file}:{number}"
            try:
                value = json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: not a JSON object: {error}") from None
            yield place, _object(value, place)


def _json(file: Path) -> Rows:
    text = "".join(line for _, line in _lines(file))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # JSON lines under this name are common
            yield from _json_lines(file)
            return
        raise DataError(f"{file}:{getattr(error, 'lineno', 1)}: not JSON: {error}") from None
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield f"{file}, row {number}", _object(row, f"{file}, row {number}")


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, got {_kind(value)}")
    return value


def _csv_header(file: Path) -> list[str]:
    """The names in the first line; a row as a mapping would not show that one stands there twice."""
    return next(csv.reader(line for _, line in _lines(file)), [])


def _csv(file: Path) -> Rows:
    reader = csv.reader((line for _, line in _lines(file)), strict=True)
    number = 1
    try:
        header = next(reader, [])
        number = reader.line_num + 1
        for values in reader:
            if len(values) > len(header):
                raise DataError(f"{file}:{number}: {len(values)} values for {len(header)} columns")
            if values:
                yield f"{file}:{number}", dict(zip(header, values, strict=False))
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{file}:{number}: not CSV: {error}") from None


def _document(file: Path) -> Rows:
    text = "".join(line for _, line in _lines(file))
    yield str(file), {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".txt": _document, ".text": _document,
}  # fmt: skip


def _open_parquet(file: Path) -> Source:
    def rows(columns: list[str]) -> Rows:
        number = 0
        try:
            for batch in pq.ParquetFile(file).iter_batches(BATCH, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", {name: _unpadded(value) for name, value in row.items()}
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{file}: cannot be read after row {number}: {_first_line(error)}") from None

    try:
        opened = pq.ParquetFile(file)
        return Source(str(file), opened.schema_arrow.names, opened.metadata.num_rows, rows)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read: {_first_line(error)}") from None


def _unpadded(value: Any) -> Any:
    """A value without the nulls with which Arrow fills up every mapping to the keys of all rows' together."""
    if isinstance(value, list):
        return [_unpadded(item) for item in value]
    if isinstance(value, dict):
        return {name: _unpadded(item) for name, item in value.items() if item is not None}
    return value


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _open_hub(path: str) -> Source:
    from datasets import load_dataset  # a second to import, and files do not need it
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    name, _, rest = path.partition(":")
    config, _, split = rest.partition(":")
    try:
        opened = load_dataset(name, config or None, split=split or "train")
    except ConnectionError:
        raise NoData(
            f"data.path: the data set {path!r} is not in the cache, and the Hub cannot be reached; name a local file "
            "or folder"
        ) from None
    except Exception as error:  # the Hub fails in many classes: all of them mean that there is no data
        raise DataError(f"data.path: cannot load the Hub data set {path!r}: {_root(error)}") from None

    def rows(columns: list[str]) -> Rows:
        for number, row in enumerate(opened.select_columns(columns), 1):
            yield f"{path}, row {number}", {name: _unpadded(value) for name, value in row.items()}

    return Source(path, opened.column_names, len(opened), rows)


def _root(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return f"{type(error).__name__}: {_first_line(error)}"


def read(source: Source, data: Data, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """Batches of rows with our field names, every value checked; those of conversations with their `place`, too.

    Raises DataError with the row's place for a missing column, a null or a value of the wrong type.
    """
    columns = {field: data.columns.get(field, field) for field in FORMAT_FIELDS[data.format]}
    missing = [name for name in columns.values() if name not in source.columns]
    if missing:
        raise DataError(
            f"{source.name}: no column {missing[0]!r}, which format {data.format} reads; there are: "
            f"{listed(source.columns)}. "
            f"Name yours in data.columns: {{{next(f for f, c in columns.items() if c == missing[0])}: …}}"
        )
    if twice := [name for name in columns.values() if source.columns.count(name) > 1]:
        raise DataError(f"{source.name}: {len(source.columns)} columns, and more than one is called {twice[0]!r}")
    check: Callable[[dict[str, Any], str], dict[str, Any]] = partial(_texts_of, columns)
    if data.format == "chat":  # rows of a JSON file may have tools where the first, which lists the columns, has none
        columns["tools"] = data.columns.get("tools", "tools")
        if "tools" in data.columns and columns["tools"] not in source.columns:
            raise DataError(f"{source.name}: no column {columns['tools']!r}, which data.columns names as tools")
        check = partial(_conversation, columns)
    wanted = [name for name in dict.fromkeys(columns.values()) if name in source.columns]
    checked = (check(row, place) for place, row in islice(source.rows(wanted), limit))
    yield from iter(partial(_take, checked), [])


def _take(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(islice(rows, BATCH))


def _texts_of(columns: dict[str, str], row: dict[str, Any], place: str) -> dict[str, Any]:
    return {field: _check_text(row, column, place) for field, column in columns.items()}


def _conversation(columns: dict[str, str], row: dict[str, Any], place: str) -> dict[str, Any]:
    tools = _check_tools(row, columns["tools"], place)
    messages = _check_messages(row, columns["messages"], place)
    return {"messages": messages, "place": place} | ({"tools": tools} if tools else {})


def _check_text(row: dict[str, Any], column: str, place: str) -> str:
    if column not in row:
        raise DataError(f"{place}: no {column!r} here; there are: {listed(row)}")
    value = row[column]
    if not isinstance(value, str):
        raise DataError(f"{place}: {column!r} is {_kind(value)}; expected a text")
    return _whole(value, column, place)


def _whole(text: str, column: str, place: str) -> str:
    """The text; `\\ud83d` in JSON without its other half is no character, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {column!r} holds half a character: {error.object[error.start]!a}") from None
    return text


def _check_messages(row: dict[str, Any], column: str, place: str) -> list[dict[str, Any]]:
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: {column!r} is {_kind(value)}; expected a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content", ""), str):
            raise DataError(f"{place}: message {number} of {column!r} is not {{role: text, content: text}}")
        _whole(json.dumps(kept, ensure_ascii=False, default=str), column, place)
        messages.append(kept)
    return messages


def _check_tools(row: dict[str, Any], column: str, place: str) -> list[dict[str, Any]] | None:
    """The JSON schemas of the tools of a conversation, given as a list or as JSON text; None where it has none."""
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        _whole(value, column, place)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: {column!r} is a text that is not JSON: {error}") from None
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return None
    tools = [_tool(tool) for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) and tool for tool in tools):
        raise DataError(f"{place}: {column!r} is {_kind(row[column])}; expected a list of JSON schemas, or one as text")
    _whole(json.dumps(tools, ensure_ascii=False, default=str), column, place)
    return tools


def _tool(tool: Any) -> Any:
    """One tool; some data sets hold each as a JSON text."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(tool) if isinstance(tool, str) else tool
    return None


def _kind(value: Any) -> str:
    return "null" if value is None else "empty" if value == [] else f"a {type(value).__name__}"
