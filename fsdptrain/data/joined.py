"""Parts → the rows of a data set: cut to sequences where they have to be, with their offsets and their digest.

Tokens are copied only for a part in which rows are cut: all others are read from the folders of the parts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fsdptrain.config.schema import Data
from fsdptrain.data.cache import PARTS_FILE
from fsdptrain.data.encode import OF_TURNS, TRAINED
from fsdptrain.data.parts import UNREAD_FILE, notes_of
from fsdptrain.data.sources import DIGEST_FILE

Array = np.ndarray[Any, Any]
RowBytes = tuple[bytes, bytes]  # tokens, uint32, and whether each is trained
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


def join(folder: Path, encoded: Iterable[tuple[int, Path | None]], data: Data) -> dict[str, int]:
    """Write the rows of all parts, in order, to a folder of the cache; return counts of rows and tokens.

    `encoded`: rows in each part, and its folder, or None if it is not used. Beside JOINED_FILE, `ends.bin` has the
    offsets of the rows (int64 [R+1]), `lengths.bin` the tokens of every row that was read (uint32) and, with
    `data.turns: split`, `conversations.bin` the conversation of each row (uint32 [R]).
    """
    treatment, split, width = data.treatment, data.turns == "split", data.format.rows
    names = ["rows", "available", "cut", "dropped", "split", "tokens", "label_tokens", *OF_TURNS]
    notes = dict.fromkeys([*names, *["too_long"] * (treatment == "drop"), *["conversations"] * split], 0)
    joined, digest = list[tuple[int, str | None, int]](), hashlib.sha256()
    unread = dict[str, list[Any]]()
    with contextlib.ExitStack() as files:
        ends, lengths, *of_rows = (
            files.enter_context((folder / f"{name}.bin").open("wb"))
            for name in ("ends", "lengths", *["conversations"] * split)
        )
        ends.write(bytes(8))
        for number, (available, part) in enumerate(encoded):
            notes["available"] += available
            if part is None:
                continue
            for what, (count, _, *place) in json.loads((part / UNREAD_FILE).read_text(encoding="utf-8")).items():
                unread.setdefault(what, [0, number, *place])[0] += count
            found, read = notes_of(part), np.fromfile(part / "lengths.bin", TOKENS)
            read.tofile(lengths)
            kept = np.fromfile(part / "kept.bin", TOKENS)
            long, kept_long = (
                int(np.count_nonzero(sizes > data.seq_len)) for sizes in (read, kept.reshape(-1, width).sum(axis=1))
            )
            if treatment != "continued":
                notes["too_long" if treatment == "drop" else treatment] += long
            is_copied = treatment in ("cut", "drop") and kept_long > 0
            rows: Iterable[RowBytes | None] = _rows(part, kept)
            if is_copied:
                rows = _copied(_fitted(_rows(part, kept), data.seq_len, treatment, width), folder, number)
            sizes, used = np.zeros(len(kept), np.int64), np.zeros(len(kept), np.bool_)
            for row, fitted in enumerate(rows):
                if fitted is not None:
                    tokens, flags = fitted
                    digest.update(len(flags).to_bytes(8) + tokens + flags)
                    notes["label_tokens"] += flags.count(TRAINED, 1)  # nothing predicts the first token of a row
                    sizes[row], used[row] = len(flags), True
            (notes["tokens"] + np.cumsum(sizes[used])).tofile(ends)
            for numbers in of_rows:
                (np.fromfile(part / "conversations.bin", TOKENS)[used] + notes["conversations"]).astype(TOKENS).tofile(
                    numbers
                )
                notes["conversations"] += found["rows"]
            notes["rows"] += len(read)
            for name in OF_TURNS:
                notes[name] += found.get(name, 0)
            # Rows that are both too long and without a trained token are counted as too long.
            notes["dropped"] += found["dropped"] + int(np.count_nonzero(~used)) // width - long * (treatment == "drop")
            notes["tokens"] += int(sizes.sum())
            if used.any():
                joined.append((int(sizes.sum()), None if is_copied else f"{part.parent.name}/{part.name}", number))
    (folder / UNREAD_FILE).write_text(json.dumps(unread), encoding="utf-8")
    (folder / JOINED_FILE).write_text(json.dumps(joined), encoding="utf-8")
    (folder / PARTS_FILE).write_text(json.dumps([name for _, name, _ in joined if name]), encoding="utf-8")
    (folder / DIGEST_FILE).write_text(digest.hexdigest(), encoding="ascii")
    return notes


def _rows(part: Path, lengths: Array) -> Iterator[RowBytes]:
    """Yield the rows of a part: tokens as bytes, and flags."""
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
    """Write rows to files of a folder, and yield them."""
    with (folder / f"tokens-{number}.bin").open("wb") as tokens, (folder / f"trained-{number}.bin").open("wb") as flags:
        for row in rows:
            if row is not None:
                tokens.write(row[0])
                flags.write(row[1])
            yield row
