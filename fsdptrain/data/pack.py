"""Cut rows into pieces and pack the pieces into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdptrain.config.schema import Data

Ints = np.ndarray[Any, np.dtype[np.int64]]


def cut_and_pack(starts: Ints, stops: Ints, trained: np.ndarray[Any, Any], data: Data) -> tuple[Ints, Ints, Ints]:
    """Cut and pack rows, given by starts [R] and ends [R]: pieces [P, 3], blocks [B+1] and labels [B] of a `Corpus`.

    Pieces without a label token are left out.
    """
    # Rows are cut as if they followed one another without gaps; then the pieces are moved to where their rows are.
    ends = np.concatenate([[0], np.cumsum(stops - starts)])
    pieces = cut(ends, data)
    shift = (starts - ends[:-1])[np.searchsorted(ends, pieces[:, 0], side="right") - 1]
    placed = pieces + np.stack([shift, np.zeros_like(shift), shift], axis=1)
    labels = piece_labels(placed, trained)
    used = labels > 0
    if not used.any():
        return placed[used], np.zeros(1, np.int64), labels[used]
    order, blocks = pack(pieces[used], data)
    return placed[used][order], blocks, np.add.reduceat(labels[used][order], blocks[:-1])


def cut(ends: Ints, data: Data) -> Ints:
    """Cut rows (offsets [R+1]) into pieces [P, 3] of at most seq_len tokens: (first token, length, end of the row).

    With `concat` the stream of all rows is cut every seq_len tokens, so that blocks are full; otherwise every row is
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


def piece_labels(pieces: Ints, trained: np.ndarray[Any, Any]) -> Ints:
    """Count the label tokens of each piece: the trained tokens that its positions predict, all in the same row."""
    flags = np.asarray(trained)  # a plain array: slicing a memory map takes ten times as long
    start, length, end = pieces.T
    wanted = zip((start + 1).tolist(), np.minimum(start + length + 1, end).tolist(), strict=True)
    return np.array([np.count_nonzero(flags[a:b]) for a, b in wanted], np.int64)


def pack(pieces: Ints, data: Data) -> tuple[Ints, Ints]:
    """Put pieces into blocks; return the order of the pieces [P] and the offsets of the blocks [B+1].

    `concat` fills block after block in order; `none` gives every piece its own block; `bfd` is best-fit decreasing.
    """
    lengths = pieces[:, 1]
    if data.packing == "none":
        return np.arange(len(pieces)), np.arange(len(pieces) + 1)
    if data.packing == "concat":
        block = pieces[:, 0] // data.seq_len
        changes = np.flatnonzero(np.diff(block)) + 1
        return np.arange(len(pieces)), np.concatenate([[0], changes, [len(pieces)]])
    bins = best_fit_decreasing(lengths.tolist(), data.seq_len)
    order = np.array([piece for members in bins for piece in members])
    return order, np.cumsum([0] + [len(members) for members in bins])


def best_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return bins of at most `size`: long items first, each in the fullest bin that has space for it.

    `spaces` is a bit set of the free spaces that some open bin has; its lowest bit from `length` on is the best fit, so
    an item costs O(size / 64) instead of a search over the bins. (Johnson et al., SIAM J. Comput. 3(4), 1974.)
    """
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces = 0
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[item]
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            number = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, number = size, len(bins)
            bins.append([])
        bins[number].append(item)
        left = space - length
        by_space.setdefault(left, []).append(number)
        spaces |= 1 << left
    return bins
