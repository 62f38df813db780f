"""Data files → tokens in the cache: parts, each encoded once, and the rows of a data set, which are read from them.

A part is some rows of a large file, or several small files. Its folder in the cache is named by their content and by
what decides their tokens. So what a killed process had finished is kept, an added file does not redo the others, and
neither does another `seq_len` or `packing`. The tokens are the same with any number of processes.

A data set has its own folder, with offsets and digest of its rows. Tokens are copied there only from a part in which
rows are cut: all others are read from the folders of the parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from fsdptrain.config.paths import DataPath, data_kind, is_hub_data
from fsdptrain.config.schema import Data
from fsdptrain.data.cache import PARTS_FILE, cached_folder, intact_folder
from fsdptrain.data.chat import stop_tokens
from fsdptrain.data.columns import Unread, read_rows
from fsdptrain.data.encode import OF_TURNS, TRAINED, Encoder
from fsdptrain.data.readers import BEGIN, PART_BYTES, Cut, DataFile, Source
from fsdptrain.data.sources import (
    DIGEST_FILE,
    Content,
    contents,
    fingerprint,
    open_sources,
    opened_files,
    readable_files,
    stamp,
)
from fsdptrain.data.tokenizer import tokenizer_digest
from fsdptrain.errors import DataError, WorkerLost
from fsdptrain.processes import STOP_SIGNAL, STOP_SIGNALS, forked_after_import
from fsdptrain.run_folder.events import Progress

TOKENS_VERSION = 4  # the version of how a row becomes tokens: raise it when that changes, and parts are encoded again

# Keys of `data` that do not change the tokens of a part: which rows are read, and what is done with their tokens. The
# chat template is in the digest of the tokenizer.
NOT_OF_TOKENS = frozenset(
    {"path", "revision", "max_rows", "eval", "sources", "seq_len", "packing", "long_rows", "chat_template"}
)
KIND = "tokens"  # of the folders of parts in the cache
# What rows of a folder hold that is not read → count, and place of the first: number of its part (0 in the folder of a
# part), number of its source there, whose name may be another in the next run, and the rest of the place.
UNREAD_FILE = "unread.json"
SMALL = 2**20  # bytes; smaller files share parts
POOLED = 2**25  # bytes to encode from which on more processes are worth their start
POLL_S = 0.2  # between two reports of what the processes have done

Array = np.ndarray[Any, Any]
RowBytes = tuple[bytes, bytes]  # tokens, uint32, and whether each is trained
TOKENS, FLAGS = np.dtype(np.uint32), np.dtype(np.bool_)


@dataclass(frozen=True)
class DataPart:
    """Sources that are encoded together: `content` (JSON) identifies their rows, `stamps` are their files as found."""

    content: list[Any]
    sources: list[Source]
    stamps: dict[DataFile, tuple[str, int, int]]
    size: int  # in bytes


def parts_of(path: DataPath) -> list[DataPart]:
    """Return the parts of all files behind a path, or of a Hub data set, in the order of their rows.

    Raises as `open_sources` does.
    """
    if is_hub_data(path):
        [source], identity = open_sources(path), fingerprint(path)
        return [
            DataPart([identity, start, stop], [source.between(start, stop)], {}, PART_BYTES)
            for start, stop in _bounds(source.cuts)
        ]
    stamps = {file: stamp(file) for file in readable_files(path)}
    found, sources, parts = contents(path), opened_files(path, count_rows=False), list[DataPart]()
    for group in _groups(list(sources), {file: size for file, (_, size, _) in stamps.items()}, found):
        own = {file: stamps[file] for file in group}
        bounds = _bounds(sources[group[0]].cuts or found[group[0]].cuts) if len(group) == 1 else [(BEGIN, None)]
        for start, stop in bounds:
            content = [[data_kind(file.name), found[file].sha256, start, stop] for file in group]
            size = sum(size for _, size, _ in own.values()) // len(bounds)
            parts.append(DataPart(content, [sources[file].between(start, stop) for file in group], own, size))
    return parts


def _bounds(cuts: Sequence[Cut]) -> list[tuple[Cut, Cut | None]]:
    edges: list[Cut] = [BEGIN, *((place, rows) for place, rows in cuts)]
    return list(zip(edges, [*edges[1:], None], strict=True))


def _groups(
    files: list[DataFile], sizes: dict[DataFile, int], found: dict[DataFile, Content]
) -> Iterator[list[DataFile]]:
    """Yield each large file by itself, and small ones in groups; an added file changes one group at most."""
    group: list[DataFile] = []
    for file in files:
        if group and sizes[file] >= SMALL:
            yield group
            group = []
        group.append(file)
        ends_group = int(found[file].sha256[:2], 16) < 4  # one in 64: whatever stands before the file
        if ends_group or sizes[file] >= SMALL or sum(sizes[each] for each in group) >= PART_BYTES:
            yield group
            group = []
    if group:
        yield group


def token_key(tokenizer: Any, data: Data, day: date | None) -> list[Any]:
    """Return (JSON) what decides the tokens of a row beside its content."""
    usual = vars(Data())
    keys = {k: v for k, v in vars(data).items() if k not in NOT_OF_TOKENS and v != usual[k]}
    return [TOKENS_VERSION, tokenizer_digest(tokenizer), stop_tokens(tokenizer), day and day.isoformat(), keys]


class PartEncoder:
    """Encodes parts into the cache; `tick` is called after each batch, and may raise.

    A folder has `tokens.bin` (uint32 [T]), `trained.bin` (bool [T]), `kept.bin` (uint32 [R], tokens of each row),
    `lengths.bin` (uint32, also those of rows that were dropped, because nothing in them is trained), `notes.json` and
    UNREAD_FILE; with `data.turns: split` also `conversations.bin` (uint32 [R]): of which conversation each row is.
    """

    def __init__(self, settings: tuple[Any, Data, date | None], tick: Callable[[], None]) -> None:
        """Take tokenizer, data, and the day that a chat template sees as `settings`."""
        self.settings, self.tick = settings, tick
        self.tokenizer, self.data, self.day = settings
        self.key = token_key(self.tokenizer, self.data, self.day)

    def is_encoded(self, part: DataPart, limit: int | None) -> bool:
        """Return whether the cache has the folder of a part."""
        return intact_folder(KIND, [self.key, part.content, limit]) is not None

    def encode(self, part: DataPart, limit: int | None = None) -> Path:
        """Return the folder of a part, or of its first rows. Raises DataError for wrong rows and for changed files."""

        def write(folder: Path) -> None:
            self._write(folder, part, limit)
            for file, before in part.stamps.items():
                if stamp(file) != before:
                    raise DataError(f"{file} changed while it was read: run again when nothing writes to it")

        return cached_folder(KIND, [self.key, part.content, limit], write)

    def _write(self, folder: Path, part: DataPart, limit: int | None) -> None:
        encoder = Encoder(self.tokenizer, self.data, self.day, self.tick)
        done, kept = 0, array("I")
        unread = Unread(self.tokenizer.chat_template)
        with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as trained:
            for batch in read_rows(part.sources, self.data, limit, unread):
                for ids, mask in encoder(batch):
                    tokens.write(array("I", ids).tobytes())
                    trained.write(mask)
                    kept.append(len(ids))
                done += len(batch)
                self.tick()
        (folder / "kept.bin").write_bytes(kept.tobytes())
        (folder / "lengths.bin").write_bytes(encoder.lengths.tobytes())
        if self.data.turns == "split":
            (folder / "conversations.bin").write_bytes(encoder.conversations.tobytes())
        notes = {"rows": done, "dropped": encoder.dropped, "tokens": sum(kept), **encoder.notes}
        (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")
        found, names = dict[str, list[Any]](), [source.name for source in part.sources]
        for what, (count, place) in unread.found.items():
            name = max((each for each in names if place.startswith(each)), key=len)
            found[what] = [count, 0, names.index(name), place.removeprefix(name)]
        (folder / UNREAD_FILE).write_text(json.dumps(found), encoding="utf-8")


def unread_in(folder: Path, path: DataPath) -> dict[str, tuple[int, str]]:
    """Return what rows of a data set hold that is not read: what → (count, place of the first)."""
    found = json.loads((folder / UNREAD_FILE).read_text(encoding="utf-8"))
    parts = parts_of(path) if found else []
    return {what: (count, f"{parts[part].sources[n].name}{rest}") for what, (count, part, n, rest) in found.items()}


def encode_parts(
    parts: list[DataPart], tokenizer: Any, data: Data, day: date | None, limit: int | None, progress: Progress
) -> Generator[Path, None, None]:
    """Yield the folder of each part, up to the first `limit` rows.

    Raises DataError as `read_rows` and `Encoder` do, and WorkerLost if a process is killed.
    """
    done, jobs = 0, list(_limited(parts, limit))
    encoder = PartEncoder((tokenizer, data, day), lambda: progress("tokenise", done, len(jobs)))
    encoder.tick()
    missing = [part for part, rows in jobs if not encoder.is_encoded(part, rows)]
    cores = min(len(os.sched_getaffinity(0)), len(missing)) if sum(part.size for part in missing) >= POOLED else 1
    with contextlib.closing(_encoded(encoder, jobs, cores)) as folders:
        for folder in folders:
            done += 1
            encoder.tick()
            yield folder


def _limited(parts: list[DataPart], limit: int | None) -> Iterator[tuple[DataPart, int | None]]:
    """Yield parts up to the first `limit` rows, the last one with how many of its rows, unless that is all."""
    left = limit
    for part in parts:
        if left is None:
            yield part, None
        elif left > 0:
            count = sum(source.counted() for source in part.sources)
            yield part, left if left < count else None
            left -= count


def _encoded(encoder: PartEncoder, jobs: list[tuple[DataPart, int | None]], count: int) -> Generator[Path, None, None]:
    """Yield the folders of parts in their order, encoded in `count` processes."""
    if count == 1:
        yield from (encoder.encode(*job) for job in jobs)
        return
    # A new process, which has no threads and no GPU, imports what is needed and forks: the others share its memory.
    others = {*multiprocessing.active_children()}
    settings = (dict(os.environ), encoder.settings)
    pool = ProcessPoolExecutor(count, forked_after_import(__name__), _start, settings)
    try:
        for future in [pool.submit(_encode, *job) for job in jobs]:
            while not wait([future], POLL_S).done:
                encoder.tick()
            yield future.result()
    except BrokenProcessPool:
        raise WorkerLost(
            "a process that tokenises was killed (is the memory of the host full?): what was finished is kept; "
            "run the same command again"
        ) from None
    finally:
        for process in {*multiprocessing.active_children()} - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


_encoder: PartEncoder  # of a process that encodes


def _start(environment: dict[str, str], settings: tuple[Any, Data, date | None]) -> None:
    """Begin such a process. It ends with the one that asked for it, which alone obeys signals."""
    global _encoder
    for number in (*STOP_SIGNALS, STOP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(environment | {"TOKENIZERS_PARALLELISM": "false"})  # each core has a process
    _encoder = PartEncoder(settings, lambda: None)


def _encode(part: DataPart, limit: int | None) -> Path:
    return _encoder.encode(part, limit)


class TokenArray:
    """The arrays of several files as one [T], of which a slice reads no more than it needs."""

    def __init__(self, folder: Path, stream: str) -> None:
        """`stream`: tokens or trained. `folder` is one that `join` wrote."""
        parts = json.loads((folder / PARTS_FILE).read_text(encoding="utf-8"))
        self.dtype = {"tokens": TOKENS, "trained": FLAGS}[stream]
        self.starts = np.cumsum([0, *(count for _, count, _ in parts)])
        self.files = [
            folder / f"{stream}-{number}.bin" if is_copied else folder.parent.parent / name / f"{stream}.bin"
            for number, (name, _, is_copied) in enumerate(parts)
        ]
        self.folders = [folder, *(folder.parent.parent / name for name, *_ in parts)]  # of the cache, with parts
        self._opened: dict[int, Array] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return len(self) * self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> Array:
        start, stop, _ = wanted.indices(len(self))
        # A last piece of one token predicts the empty slice at the very end: it is of the last file.
        first = min(int(np.searchsorted(self.starts, start, side="right")), len(self.files)) - 1
        if stop <= self.starts[first + 1]:  # as all pieces of rows
            begin = int(self.starts[first])
            return self._open(first)[start - begin : stop - begin]
        last = int(np.searchsorted(self.starts, stop))
        parts = [self._open(number) for number in range(first, last)]
        return np.concatenate(parts)[start - self.starts[first] : stop - self.starts[first]]

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self[:]

    def open_files(self) -> None:
        """Open all files, so that they can be read after they were removed."""
        for number in range(len(self.files)):
            self._open(number)

    def _open(self, number: int) -> Array:
        if number not in self._opened:  # a plain array: slicing a memory map takes ten times as long
            self._opened[number] = np.asarray(np.memmap(self.files[number], self.dtype, "r"))
        return self._opened[number]


def join(folder: Path, encoded: Iterable[Path], data: Data) -> dict[str, int]:
    """Write the rows of all parts, in order, to a folder of the cache; return counts of rows and tokens.

    `encoded`: the folder of each part. Beside PARTS_FILE, `ends.bin` has the offsets of the rows (int64 [R+1]),
    `lengths.bin` the tokens of every row that was read (uint32) and, with `data.turns: split`, `conversations.bin` the
    conversation of each row (uint32 [R]).
    """
    treatment, width = data.treatment, data.format.rows
    notes = dict.fromkeys(["rows", "cut", "dropped", "split", "tokens", "label_tokens", *OF_TURNS], 0)
    if treatment == "drop":
        notes["too_long"] = 0
    if data.turns == "split":
        notes["conversations"] = 0
    ends, lengths, conversations = [np.zeros(1, np.int64)], list[Array](), list[Array]()
    parts, unread, digest = list[tuple[str, int, bool]](), dict[str, list[Any]](), hashlib.sha256()
    for of_part, part in enumerate(encoded):
        found = json.loads((part / "notes.json").read_text(encoding="utf-8"))
        read, kept = (np.fromfile(part / f"{of}.bin", TOKENS) for of in ("lengths", "kept"))
        # Cut or leave out what is too long. What is not is read where it is.
        rows: Iterable[RowBytes | None] = _rows(part, kept)
        is_copied = treatment in ("cut", "drop") and bool((kept.reshape(-1, width).sum(axis=1) > data.seq_len).any())
        if is_copied:
            rows = _copied(_fitted(_rows(part, kept), data.seq_len, treatment, width), folder, len(parts))
        sizes = np.zeros(len(kept), np.int64)
        for number, row in enumerate(rows):
            if row is not None:
                tokens, flags = row
                digest.update(len(flags).to_bytes(8) + tokens + flags)
                notes["label_tokens"] += flags.count(TRAINED, 1)  # nothing predicts the first token of a row
                sizes[number] = len(flags)
        used = sizes > 0
        lengths.append(read)
        ends.append(notes["tokens"] + np.cumsum(sizes[used]))
        if data.turns == "split":
            numbers = np.fromfile(part / "conversations.bin", TOKENS)[used]
            conversations.append((numbers + notes["conversations"]).astype(TOKENS))
            notes["conversations"] += found["rows"]
        # Rows that are both too long and without a trained token are counted as too long.
        long = int(np.count_nonzero(read > data.seq_len))
        if treatment != "continued":
            notes["too_long" if treatment == "drop" else treatment] += long
        dropped = found["dropped"] + int(np.count_nonzero(~used)) // width
        notes["dropped"] += dropped - long if treatment == "drop" else dropped
        notes["rows"] += len(read)
        notes["tokens"] += int(sizes.sum())
        for name in OF_TURNS:
            notes[name] += found.get(name, 0)
        for what, (count, _, *place) in json.loads((part / UNREAD_FILE).read_text(encoding="utf-8")).items():
            unread.setdefault(what, [0, of_part, *place])[0] += count
        if used.any():
            parts.append((f"{part.parent.name}/{part.name}", int(sizes.sum()), is_copied))
    for name, arrays in (("ends", ends), ("lengths", lengths), ("conversations", conversations)):
        if arrays:
            np.concatenate(arrays).tofile(folder / f"{name}.bin")
    (folder / UNREAD_FILE).write_text(json.dumps(unread), encoding="utf-8")
    (folder / PARTS_FILE).write_text(json.dumps(parts), encoding="utf-8")
    (folder / DIGEST_FILE).write_text(digest.hexdigest(), encoding="ascii")
    return notes


def _rows(part: Path, lengths: Array) -> Iterator[RowBytes]:
    if not len(lengths):
        return
    tokens = np.asarray(np.memmap(part / "tokens.bin", TOKENS, "r"))
    flags = np.asarray(np.memmap(part / "trained.bin", FLAGS, "r"))
    stop = 0
    for length in lengths.tolist():
        start, stop = stop, stop + length
        yield tokens[start:stop].tobytes(), flags[start:stop].tobytes()


def _fitted(rows: Iterator[RowBytes], size: int, treatment: str, width: int) -> Iterator[RowBytes | None]:
    """Yield rows, of which every `width` have at most `size` tokens together: longer ones are cut, or None.

    They are None if any of them would have no trained token. Of two, the longer one gets what the other leaves.
    """
    for whole in zip(*[rows] * width, strict=True):
        sizes = [len(flags) for _, flags in whole]
        limit = max(size // width, size - sum(sizes) + max(sizes))
        if sum(sizes) > size and (treatment == "drop" or any(TRAINED not in flags[1:limit] for _, flags in whole)):
            yield from [None] * width
        else:
            yield from ((tokens[: limit * TOKENS.itemsize], flags[:limit]) for tokens, flags in whole)


def _copied(rows: Iterable[RowBytes | None], folder: Path, number: int) -> Iterator[RowBytes | None]:
    with (folder / f"tokens-{number}.bin").open("wb") as tokens, (folder / f"trained-{number}.bin").open("wb") as flags:
        for row in rows:
            if row is not None:
                tokens.write(row[0])
                flags.write(row[1])
            yield row
