"""Parts → the rows of a data set: cut to sequences where they have to be, with their offsets and their digest.

Tokens are copied only for a part in which rows are cut: all others are read from the folders of the parts.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fsdptrain.config.schema import Data
from fsdptrain.data.cache import PARTS_FILE
from fsdptrain.data.encode import TRAINED
from fsdptrain.data.parts import notes_of
from fsdptrain.data.sources import DIGEST_FILE

Array = np.ndarray[Any, Any]
TOKENS, FLAGS = np.dtype(np.uint32), np.dtype(np.bool_)
JOINED_FILE = "joined.json"  # [tokens, the folder of the part or null, the number of the part] of each


class Joined:
    """The arrays of several files as one [T], of which a slice reads no more than it needs."""

    def __init__(self, folder: Path, stream: str) -> None:
        """`stream`: tokens or trained. `folder` is one that `join` wrote."""
        joined = json.loads((folder / JOINED_FILE).read_text(encoding="utf-8"))
        self.dtype = {"tokens": TOKENS, "trained": FLAGS}[stream]
        self.starts = np.cumsum([0, *(count for count, *_ in joined)])
        cache, own = folder.parent.parent, functools.partial("{}-{}.bin".format, stream)
        self.files = [cache / name / f"{stream}.bin" if name else folder / own(number) for _, name, number in joined]
        self._opened: dict[int, Array] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return len(self) * self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> Array:
        start, stop, _ = wanted.indices(len(self))
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        if stop <= self.starts[min(first + 1, len(self.files))]:  # as all pieces of rows
            begin = int(self.starts[first])
            return self._open(first)[start - begin : stop - begin]
        last = int(np.searchsorted(self.starts, stop))
        parts = [self._open(number) for number in range(first, last)]
        return np.concatenate(parts)[start - self.starts[first] : stop - self.starts[first]]

    def __array__(self, *_: Any, **__: Any) -> Array:
        return self[:]

    def _open(self, number: int) -> Array:
        if number not in self._opened:  # a plain array: slicing a memory map takes ten times as long
            self._opened[number] = np.asarray(np.memmap(self.files[number], self.dtype, "r"))
        return self._opened[number]


def join(folder: Path, encoded: Iterable[tuple[int, Path | None]], data: Data) -> dict[str, int]:
    """Write the rows of all parts, in order, to a folder of the cache; return counts of rows and tokens.

    `encoded`: rows in each part, and its folder, or None if it is not used. Beside JOINED_FILE, `ends.bin` has the
    offsets of the rows (int64 [R+1]), and `lengths.bin` the tokens of every row that was read (uint32).
    """
    notes = dict.fromkeys(("rows", "available", "cut", "dropped", "split", "tokens", "label_tokens"), 0)
    joined, digest = list[tuple[int, str | None, int]](), hashlib.sha256()
    with (folder / "ends.bin").open("wb") as ends, (folder / "lengths.bin").open("wb") as lengths:
        ends.write(bytes(8))
        for number, (available, part) in enumerate(encoded):
            notes["available"] += available
            if part is None:
                continue
            found, read = notes_of(part), np.fromfile(part / "lengths.bin", TOKENS)
            read.tofile(lengths)
            if data.long_rows != "continued":
                notes[data.long_rows] += int(np.count_nonzero(read > data.seq_len))
            kept = np.fromfile(part / "kept.bin", TOKENS)
            is_copied = data.long_rows == "cut" and int(kept.max(initial=0)) > data.seq_len
            rows = _rows(part, kept)
            if is_copied:
                rows = _copied(_cut(rows, data.seq_len), folder, number)
            sizes = np.zeros(len(kept), np.int64)
            used = 0
            for tokens, flags in rows:
                digest.update(len(flags).to_bytes(8) + tokens + flags)
                notes["label_tokens"] += flags.count(TRAINED, 1)  # nothing predicts the first token of a row
                sizes[used] = len(flags)
                used += 1
            (notes["tokens"] + np.cumsum(sizes[:used])).tofile(ends)
            notes["rows"] += found["rows"]
            notes["dropped"] += found["dropped"] + len(kept) - used
            notes["tokens"] += int(sizes.sum())
            if used:
                joined.append((int(sizes.sum()), None if is_copied else f"{part.parent.name}/{part.name}", number))
    (folder / JOINED_FILE).write_text(json.dumps(joined), encoding="utf-8")
    (folder / PARTS_FILE).write_text(json.dumps([name for _, name, _ in joined if name]), encoding="utf-8")
    (folder / DIGEST_FILE).write_text(digest.hexdigest(), encoding="ascii")
    return notes


def _rows(part: Path, lengths: Array) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of a part: tokens as bytes, and flags."""
    if not len(lengths):
        return
    tokens = np.asarray(np.memmap(part / "tokens.bin", TOKENS, "r"))
    flags = np.asarray(np.memmap(part / "trained.bin", FLAGS, "r"))
    stop = 0
    for length in lengths.tolist():
        start, stop = stop, stop + length
        yield tokens[start:stop].tobytes(), flags[start:stop].tobytes()


def _cut(rows: Iterable[tuple[bytes, bytes]], size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the beginnings, of `size` tokens, of rows that then still have a trained token."""
    for tokens, flags in rows:
        if TRAINED in flags[1:size]:
            yield tokens[: size * TOKENS.itemsize], flags[:size]


def _copied(rows: Iterable[tuple[bytes, bytes]], folder: Path, number: int) -> Iterator[tuple[bytes, bytes]]:
    """Write rows to files of a folder, and yield them."""
    with (folder / f"tokens-{number}.bin").open("wb") as tokens, (folder / f"trained-{number}.bin").open("wb") as flags:
        for row in rows:
            tokens.write(row[0])
            flags.write(row[1])
            yield row
