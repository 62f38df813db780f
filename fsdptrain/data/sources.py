"""Files and Hub data sets → rows, with the file and line in every complaint.

Text files are parsed here, line by line, and no type is guessed. (`datasets` settles a file's types on its first 10 MB,
takes texts that are all dates for timestamps and digits in CSV for numbers, remembers files by path and mtime, and its
JSON parser can end the process; it reads what comes from the Hub, where types are declared.)
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fsdptrain.config.paths import COMPRESSED, DATA_SUFFIXES, data_kind, matches
from fsdptrain.config.plan import HubData
from fsdptrain.errors import DataError, NoData, first_line, listed, shortened

BATCH = 1000


MAX_JSON = 2**30  # bytes of a file that is one JSON value, which has to be read whole


KNOWN = f"{', '.join(DATA_SUFFIXES)}, all but .parquet also with {', '.join(COMPRESSED)}"


# Kinds of files that people have, and the way from each to one that is read.
CONVERT = {
    (".xlsx", ".xls", ".ods"): "save the sheet as CSV",
    (".arrow", ".feather"): "write Parquet instead: Dataset.from_file(…).to_parquet('data.parquet')",
    (".zip", ".tar", ".tgz", ".7z", ".xz", ".rar"): "unpack it first",
    (".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz", ".bin"): "nothing is unpickled here: write JSON lines",
    (".md", ".rst", ".html", ".xml", ".pdf", ".docx"): "save its text as .txt",
}


COMMIT = re.compile("[0-9a-f]{40}")


HUB_S = 5.0  # how long the Hub may take to name a commit


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
    wanted = sorted(file for file in files if data_kind(file.name) or file in found)
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
        if {"dataset_info.json", "state.json"} <= set(names):
            way_out = "write Parquet instead: datasets.load_from_disk(…).to_parquet('data.parquet')"
            raise DataError(f"{folder} was written by save_to_disk, and is not read: {way_out}")
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


def data_stamps(path: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every data file: equal before and after, and nobody wrote to them meanwhile."""
    found = []
    for file in data_files(path):
        with _reading(file):
            known = file.stat()
        found.append((str(file), known.st_size, known.st_mtime_ns))
    return found


def fingerprint(path: str) -> str:
    """SHA-256 over the kind and content of every data file; for a Hub data set over its name and commit."""
    digest = hashlib.sha256()
    files = data_files(path)
    if not files:
        data = HubData.of(path)
        known = [data.name, data.config, data.split or "train", hub_commit(path)]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()
    for file in files:
        with _reading(file), file.open("rb") as stream:
            digest.update(str(data_kind(file.name)).encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


@functools.cache  # of a process: what looks at a data set twice sees one commit
def hub_commit(path: str) -> str | None:
    """Return the commit that `org/name[:config[:split]][@revision]` stands for; None where nobody can tell.

    Asks the Hub; without it, what the revision was when it was last asked from here, else the commit in the cache.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    data = HubData.of(path)
    if COMMIT.fullmatch(data.revision):
        return data.revision
    try:
        return HfApi().dataset_info(data.name, revision=data.revision or None, timeout=HUB_S).sha
    except Exception:  # offline, no such revision, or whatever the HTTP library of the day raises: loading will tell
        refs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=data.name, repo_type="dataset") / "refs"
        known = refs / (data.revision or "main")
    if known.is_file():
        return known.read_text().strip()
    try:
        cached = _commits_of(_loaded(data, None))
    except Exception:  # again: opening it will tell
        return None
    return cached.pop() if len(cached) == 1 else None


def _loaded(data: HubData, commit: str | None) -> Any:
    """The data set as `datasets` has or gets it: without the Hub, of the commit where that is in its cache."""
    from datasets import load_dataset  # a second to import, and files do not need it
    from datasets.packaged_modules.cache.cache import Cache
    from datasets.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # it would name the newest commit in its cache, which may not be the one that is read
    split = data.split or "train"
    opened = load_dataset(data.name, data.config or None, split=split, revision=commit or data.revision or None)
    if commit is None or commit in _commits_of(opened):
        return opened
    for file in opened.cache_files:
        folder = Path(file["filename"]).parent  # …/CONFIG/VERSION/COMMIT of the newest there is
        if COMMIT.fullmatch(folder.name) and folder.with_name(commit).is_dir():
            config, version = folder.parts[-3:-1]
            name = data.name.rpartition("/")[2]
            wanted = Cache(dataset_name=name, config_name=config, version=version, hash=commit, repo_id=data.name)
            return wanted.as_dataset(split=split)
    return opened


def _commits_of(opened: Any) -> set[str]:
    """The commits whose files a data set of `datasets` lies in."""
    return {part for file in opened.cache_files for part in Path(file["filename"]).parts if COMMIT.fullmatch(part)}


def open_sources(path: str) -> list[Source]:
    """Open every file of a local path, or the Hub data set `org/name[:config[:split]][@revision]`.

    Raises DataError for an unreadable, empty or unknown kind of file, naming the line where there is one.
    """
    files = data_files(path)
    if Path(path).is_absolute():
        if not Path(path).exists() and not files:
            raise NoData(f"data.path: nothing at {shortened(path)}")
        if not files:
            raise DataError(f"data.path: no data files in {path} (known: {KNOWN}){_others_in(path)}")
        return [_open_file(file) for file in files]
    return [_open_hub(path)]


def _others_in(folder: str) -> str:
    """What to do with the files of a folder that holds none of a known kind, where that is known."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []  # noqa: PTH112, PTH208
    return next((f"; {name}: {way}" for name in names if (way := _conversion(name))), "")


def _conversion(name: str) -> str | None:
    return next((way for kinds, way in CONVERT.items() if name.lower().endswith(kinds)), None)


def first_source(path: str) -> Source:
    """Open the first file behind a path, without counting its rows; raises DataError as `open_sources` does."""
    files = data_files(path)
    return _open_file(files[0], counted=False) if files else open_sources(path)[0]


def _open_file(file: Path, counted: bool = True) -> Source:
    kind = data_kind(file.name)
    if kind is None:
        way_out = _conversion(file.name)
        raise DataError(f"{file}: unknown kind of data file; {way_out + '; ' if way_out else ''}known: {KNOWN}")
    with _reading(file):
        size = file.stat().st_size
    if size == 0:
        raise DataError(f"{file} is empty")
    if kind == ".parquet":
        source = _open_parquet(file)
    else:
        reader = _READERS[kind]
        place, first = next(reader(file), ("", {}))
        columns = list(first) if kind not in (".csv", ".tsv") else _csv_header(file)
        count = sum(1 for _ in reader(file)) if counted else bool(place)
        source = Source(str(file), columns, count, lambda _columns: reader(file))
    if source.count < 1:  # a damaged parquet file may even have fewer
        raise DataError(f"{file} holds no rows")
    return source


def _opened(file: Path) -> io.BufferedIOBase:
    """The bytes of a file, decompressed; an OSError where the compressed ones are damaged or cut."""
    if file.suffix.lower() not in COMPRESSED:
        return file.open("rb")
    kind = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}[file.suffix.lower()]
    return io.BufferedReader(pa.input_stream(str(file), compression=kind))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines as text, without the mark that some programs put at the beginning of a file."""
    with _reading(file), _opened(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad = f"byte {error.object[error.start]:#04x} at column {error.start + 1}"
                raise DataError(f"{file}:{number}: not UTF-8 text: {bad}; save it as UTF-8") from None


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
    """A list of objects, one object, or, as is common under this name, JSON lines."""
    first = next((line for _, line in _lines(file) if line.strip()), "")
    if not first.lstrip().startswith("[") and _is_json(first):
        yield from _json_lines(file)
        return
    text = _whole_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}:{getattr(error, 'lineno', 1)}: not JSON: {error}") from None
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield f"{file}, row {number}", _object(row, f"{file}, row {number}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _whole_text(file: Path) -> str:
    lines, size = [], 0
    for _, line in _lines(file):
        size += len(line)
        if size > MAX_JSON:
            raise DataError(
                f"{file} is one JSON value longer than {MAX_JSON:,} bytes: write one object a line (.jsonl)"
            )
        lines.append(line)
    return "".join(lines)


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, got {type_name(value)}")
    return value


def _separator(file: Path) -> str:
    """What separates the values: a tab in .tsv; in .csv a comma, or what the first line has instead of one."""
    first = re.sub(r'"[^"]*"', "", next((line for _, line in _lines(file)), ""))
    order = "\t" if data_kind(file.name) == ".tsv" else ",;\t"
    return next((mark for mark in order if mark in first), order[0])


def _csv_header(file: Path) -> list[str]:
    """The names in the first line; a row as a mapping would not show that one stands there twice."""
    return next(csv.reader((line for _, line in _lines(file)), delimiter=_separator(file)), [])


def _csv(file: Path) -> Rows:
    reader = csv.reader((line for _, line in _lines(file)), delimiter=_separator(file), strict=True)
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
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _csv, ".txt": _document, ".text": _document,
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
            raise DataError(f"{file}: cannot be read after row {number}: {first_line(error)}") from None

    try:
        opened = pq.ParquetFile(file)
        return Source(str(file), opened.schema_arrow.names, opened.metadata.num_rows, rows)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read: {first_line(error)}") from None


def _unpadded(value: Any) -> Any:
    """A value without the nulls with which Arrow fills up every mapping to the keys of all rows' together."""
    if isinstance(value, list):
        return [_unpadded(item) for item in value]
    if isinstance(value, dict):
        return {name: _unpadded(item) for name, item in value.items() if item is not None}
    return value


def _open_hub(path: str) -> Source:
    data, commit = HubData.of(path), hub_commit(path)
    try:
        opened = _loaded(data, commit)
    except ConnectionError:
        raise NoData(
            f"data.path: the data set {path!r} is not in the cache, and the Hub cannot be reached; name a local file "
            "or folder"
        ) from None
    except Exception as error:  # the Hub fails in many classes: all of them mean that there is no data
        raise DataError(f"data.path: cannot load the Hub data set {path!r}: {_root(error)}") from None

    cached = _commits_of(opened)
    if commit and cached and commit not in cached:
        raise NoData(
            f"data.revision: commit {commit} of {data.name} is not in the cache (there is {listed(sorted(cached))}), "
            "and the Hub cannot be reached; name that one, or run where the Hub can be reached"
        )

    def rows(columns: list[str]) -> Rows:
        for number, row in enumerate(opened.select_columns(columns), 1):
            yield f"{path}, row {number}", {name: _unpadded(value) for name, value in row.items()}

    return Source(path, opened.column_names, len(opened), rows)


def _root(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return f"{type(error).__name__}: {first_line(error)}"


def type_name(value: Any) -> str:
    """Return what a value is, for a message: `null`, `empty`, `an int`, `a list`."""
    return (
        "null"
        if value is None
        else "empty"
        if value == []
        else f"{'an' if isinstance(value, int) and not isinstance(value, bool) else 'a'} {type(value).__name__}"
    )
