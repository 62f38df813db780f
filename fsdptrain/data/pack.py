"""Cut rows into pieces and pack the pieces into sequences.

Rows are packed in random order: rows of one length, or of one place in the file, in one sequence would make the
gradient of a step a worse estimate, and learning slower (docs/internals/measurements.md).
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fsdptrain.config.schema import Data
from fsdptrain.data.token_store import TokenArray

Ints = np.ndarray[Any, np.dtype[np.int64]]
Flags = TokenArray | np.ndarray[Any, Any]
WINDOW = 1024  # pieces among which `fill_sequences` looks for those that fill a sequence
CHUNK = 2**16  # pieces whose labels are counted at a time: a Python number takes more memory than one in an array
TRIED = 4  # pieces that it tries to complete with another


def cut_and_pack(starts: Ints, stops: Ints, trained: Flags, data: Data, seed: int) -> tuple[Ints, Ints, Ints]:
    """Cut and pack rows, given by starts [R] and ends [R]: `pieces`, `offsets` and `labels` of a `Corpus`.

    Rows that share sequences are shuffled by `seed`. Pieces without a label token are left out.
    """
    if data.packing != "none":
        shuffled = np.random.default_rng([seed, 0, 2]).permutation(len(starts))  # [seed, epoch] is the stream's
        starts, stops = starts[shuffled], stops[shuffled]
    # Rows are cut as if they followed one another without gaps; then the pieces are moved to where their rows are.
    ends = np.concatenate([[0], np.cumsum(stops - starts)])
    pieces = cut(ends, data)
    shift = (starts - ends[:-1])[np.searchsorted(ends, pieces[:, 0], side="right") - 1]
    pieces[:, 0] += shift
    pieces[:, 2] += shift
    labels = piece_labels(pieces, trained)
    used = labels > 0
    if not used.all():
        pieces, labels, shift = pieces[used], labels[used], shift[used]
    if not len(pieces):
        return pieces, np.zeros(1, np.int64), labels
    order, offsets = pack(pieces[:, :2] - np.stack([shift, 0 * shift], axis=1), data)
    return pieces[order], offsets, np.add.reduceat(labels[order], offsets[:-1])


def cut(ends: Ints, data: Data) -> Ints:
    """Cut rows (offsets [R+1]) into pieces [P, 3] of at most seq_len tokens: (first token, length, end of the row).

    With `concat` the stream of all rows is cut every seq_len tokens, so that sequences are full; otherwise every row is
    cut from its own beginning.
    """
    size = data.seq_len
    if data.packing == "concat":
        bounds = np.union1d(ends, np.arange(0, ends[-1], size))
    else:
        lengths = np.diff(ends)
        counts = -(-lengths // size)
        first = np.repeat(ends[:-1], counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        bounds = np.append(first + within * size, ends[-1])
    starts = bounds[:-1]
    return np.stack([starts, np.diff(bounds), ends[np.searchsorted(ends, starts, side="right")]], axis=1)


def split_pairs(pieces: Ints, offsets: Ints, ends: Ints, trained: Flags) -> tuple[Ints, Ints, Ints]:
    """Return `pieces`, `offsets` and `labels` with two pieces for each pair, chosen and rejected, that was one piece.

    `ends` [R+1] are the offsets of the rows, two for each pair.
    """
    start, length, end = pieces.T
    middle = ends[np.searchsorted(ends, start, side="right")]
    halves = np.stack([start, middle - start, middle, middle, start + length - middle, end], axis=1).reshape(-1, 3)
    return halves, 2 * offsets, np.add.reduceat(piece_labels(halves, trained), 2 * offsets[:-1])


def piece_labels(pieces: Ints, trained: Flags) -> Ints:
    """Count the label tokens of each piece: the trained tokens that its positions predict, all in the same row."""
    labels = np.empty(len(pieces), np.int64)
    in_file = np.argsort(pieces[:, 0])  # read in order: they may be larger than memory
    for at in range(0, len(pieces), CHUNK):
        some = in_file[at : at + CHUNK]
        start, length, end = pieces[some].T
        wanted = zip((start + 1).tolist(), np.minimum(start + length + 1, end).tolist(), strict=True)
        labels[some] = [np.count_nonzero(trained[a:b]) for a, b in wanted]
    return labels


def pack(pieces: Ints, data: Data) -> tuple[Ints, Ints]:
    """Put pieces into sequences; return the order of the pieces [P] and the offsets of the sequences [B+1].

    `concat` fills one after another in order; `none` gives each piece its own; `bfd` is `fill_sequences`.
    """
    if data.packing == "none":
        return np.arange(len(pieces)), np.arange(len(pieces) + 1)
    if data.packing == "concat":
        sequence = pieces[:, 0] // data.seq_len
        changes = np.flatnonzero(np.diff(sequence)) + 1
        return np.arange(len(pieces)), np.concatenate([[0], changes, [len(pieces)]])
    order, counts = array("q"), array("q", [0])
    lengths = np.ascontiguousarray(pieces[:, 1]).data  # a memoryview: its items are ints
    for members in fill_sequences(lengths, data.seq_len):
        order.extend(members)
        counts.append(len(members))
    return np.asarray(order), np.cumsum(counts)


def fill_sequences(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield sequences of at most `size`, as numbers of pieces, which have these lengths and come in random order.

    A sequence takes the pieces that come next until there is space for about two more. The rest is filled as well as
    possible with one or two of the next WINDOW pieces, again and again until none fits. So a sequence is a random
    sample of the pieces but for its last ones, and is filled as well as by best-fit decreasing over all pieces.
    """
    window = _Window(lengths)
    two = 2 * sum(lengths) / max(1, len(lengths))
    while window.waiting:
        sequence: list[int] = []
        space = size
        while (piece := window.first()) is not None and (not sequence or space >= max(two, lengths[piece])):
            space -= window.take(piece)
            sequence.append(piece)
        while found := window.best_fit(space):
            space -= sum(map(window.take, found))
            sequence += found
        yield sequence


class _Window:
    """The next WINDOW pieces: `waiting` in the order in which they come, `ranked` as sorted (length, piece)."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.ranked: list[tuple[int, int]] = []
        self._coming = iter(range(len(lengths)))
        self._admit(WINDOW)

    def _admit(self, count: int) -> None:
        for piece in itertools.islice(self._coming, count):
            self.waiting[piece] = None
            insort(self.ranked, (self.lengths[piece], piece))

    def first(self) -> int | None:
        """Return the piece that comes next."""
        return next(iter(self.waiting), None)

    def take(self, piece: int) -> int:
        """Remove a piece, and admit another; return its length."""
        length = self.lengths[piece]
        del self.waiting[piece]
        del self.ranked[bisect_left(self.ranked, (length, piece))]
        self._admit(1)
        return length

    def best_fit(self, space: int) -> list[int]:
        """Return the piece that fills a space best, or two of which one is among the first TRIED; [] if none fits."""
        best, longest = self._longest(space)
        found = [longest]
        for piece in itertools.islice(self.waiting, TRIED):
            length, other = self._longest(space - self.lengths[piece], besides=piece)
            if length and self.lengths[piece] + length > best:
                best, found = self.lengths[piece] + length, [piece, other]
        return found if best else []

    def _longest(self, space: int, besides: int = -1) -> tuple[int, int]:
        """Return (length, piece) of the longest piece that fits, `besides` another one; (0, -1) if none fits."""
        at = bisect_right(self.ranked, (space, math.inf)) - 1
        at -= at >= 0 and self.ranked[at][1] == besides
        return self.ranked[at] if at >= 0 else (0, -1)
