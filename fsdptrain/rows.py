"""Files and Hub data sets → rows, read through `datasets`, with the file and line in every complaint."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrain.errors import DataError
from fsdptrain.plan import DATA_SUFFIXES
from fsdptrain.schema import FORMAT_FIELDS, Data

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".text": "text"}
BATCH = 1000


@dataclass(frozen=True)
class Source:
    """One file, or one Hub data set: a list of rows with a name for complaints."""

    name: str
    rows: Dataset
    file: Path | None

    def place(self, row: int) -> str:
        """Where row number `row` (from 0) stands: `file:line` in JSON lines, else the row's number."""
        if self.file is not None and self.file.suffix == ".jsonl":
            with self.file.open("rb") as stream:
                numbers = [number for number, line in enumerate(stream, 1) if line.strip()]
            return f"{self.file}:{numbers[row]}"
        return f"{self.name}, row {row + 1}"


def data_files(path: str) -> list[Path]:
    """The data files behind a path, a glob or a folder, sorted; empty when `path` is not local."""
    found = [Path(name) for name in glob.glob(path, recursive=True)]
    files = [file for p in found for file in (sorted(p.rglob("*")) if p.is_dir() else [p])]
    return sorted(file for file in files if file.is_file() and (file.suffix in DATA_SUFFIXES or file in found))


def fingerprint(path: str) -> str:
    """SHA-256 over the content of every data file; for a Hub data set over its name."""
    digest = hashlib.sha256()
    files = data_files(path)
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest() if files else hashlib.sha256(path.encode()).hexdigest()


def open_sources(path: str) -> list[Source]:
    """Open every file of a local path, or the Hub data set `org/name[:config[:split]]`.

    Raises DataError for an unreadable, empty or unknown kind of file, naming the line where there is one.
    """
    files = data_files(path)
    if Path(path).is_absolute():
        if not files:
            raise DataError(f"data.path: no data files in {path} (known: {', '.join(DATA_SUFFIXES)})")
        return [_open_file(file) for file in files]
    name, _, rest = path.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = _load(name, config or None, split=split or "train")
    except Exception as error:  # the Hub fails in many classes: all of them mean that there is no data
        raise DataError(f"data.path: cannot load the Hub data set {path!r}: {_root(error)}") from None
    return [Source(path, rows, None)]


def _load(*words: str | None, **options: Any) -> Dataset:
    """`datasets.load_dataset`, imported late: it takes half a second, and with everything cached nobody asks."""
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    return load_dataset(*words, **options)


def _open_file(file: Path) -> Source:
    reader = READERS.get(file.suffix)
    if reader is None:
        raise DataError(f"{file}: unknown kind of data file; known: {', '.join(READERS)}")
    if file.stat().st_size == 0:
        raise DataError(f"{file} is empty")
    options = {"sample_by": "document"} if reader == "text" else {}
    try:
        rows = _load(reader, data_files=[str(file)], split="train", **options)
    except Exception as error:  # pyarrow's and datasets' classes; the cause is found by reading the file ourselves
        raise DataError(_diagnose(file) or f"{file}: cannot be read: {_root(error)}") from None
    if len(rows) == 0:
        raise DataError(f"{file} holds no rows")
    return Source(str(file), rows, file)


def _diagnose(file: Path) -> str | None:
    """The first line that is not what the kind of file asks for."""
    if file.suffix not in (".jsonl", ".json", ".txt", ".text", ".csv"):
        return None
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"{file}:{number}: not UTF-8 text: byte {line[error.start]:#04x} at column {error.start + 1}"
            if file.suffix == ".jsonl" and text.strip():
                try:
                    value = json.loads(text)
                except (json.JSONDecodeError, RecursionError) as error:
                    return f"{file}:{number}: not a JSON object: {error}"
                if not isinstance(value, dict):
                    return f"{file}:{number}: expected a JSON object, got {type(value).__name__}"
    if file.suffix == ".json":
        try:
            json.loads(file.read_text())
        except (json.JSONDecodeError, RecursionError) as error:
            return f"{file}:{getattr(error, 'lineno', 1)}: not JSON: {error}"
    return None


def _root(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def read(source: Source, data: Data, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """Batches of rows with our field names, every value checked.

    Raises DataError with the row's place for a missing column, a null or a value of the wrong type.
    """
    columns = {field: data.columns.get(field, field) for field in FORMAT_FIELDS[data.format]}
    missing = [name for name in columns.values() if name not in source.rows.column_names]
    if missing:
        have = ", ".join(source.rows.column_names)
        raise DataError(
            f"{source.name}: no column {missing[0]!r}, which format {data.format} reads; there are: {have}. "
            f"Name yours in data.columns: {{{next(f for f, c in columns.items() if c == missing[0])}: …}}"
        )
    rows = source.rows.select_columns(list(columns.values()))
    rows = rows.select(range(min(limit, len(rows)))) if limit is not None else rows
    check = _check_messages if data.format == "chat" else _check_text
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        yield [
            {field: check(batch[column][i], source, start + i, column) for field, column in columns.items()}
            for i in range(len(batch[next(iter(columns.values()))]))
        ]


def _check_text(value: Any, source: Source, row: int, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{source.place(row)}: {column!r} is {_kind(value)}; expected a text")
    return value


def _check_messages(value: Any, source: Source, row: int, column: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{source.place(row)}: {column!r} is {_kind(value)}; expected a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content", ""), str):
            raise DataError(f"{source.place(row)}: message {number} of {column!r} is not {{role: text, content: text}}")
        messages.append(kept)
    return messages


def _kind(value: Any) -> str:
    return "null" if value is None else "empty" if value == [] else f"a {type(value).__name__}"
