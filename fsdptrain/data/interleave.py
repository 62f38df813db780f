"""Which source each position of a stream is of, by shares: a pure function of the position.

Two sources alternate as evenly as whole numbers allow: of the first n sequences, the smaller one has its share of n,
rounded. More of them are joined two by two, the smallest first, until two are left. So for any n the count of a source
among the first n is near its share of n: of two sources within 1/2, of three within 1, of more within 1.7 (the sum of
half of w/W over the nodes above a source of share w, of which Huffman's tree has W of at least w, 2w, 3w, 5w, 8w, …).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Interleave:
    """The order of the sources in a stream. `shares` are relative to one another."""

    shares: tuple[int, ...]
    tree: Any  # the number of a source, or (share of the left part, share of both, left, right)

    @classmethod
    def of(cls, shares: Sequence[Fraction]) -> Interleave:
        """Return the order of sources with these shares, which are above 0."""
        unit = math.lcm(*(share.denominator for share in shares))
        whole = tuple(int(share * unit) for share in shares)
        heap: list[tuple[int, int, Any]] = [(share, number, number) for number, share in enumerate(whole)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (smaller, first, left), (larger, second, right) = heapq.heappop(heap), heapq.heappop(heap)
            both = smaller + larger
            heapq.heappush(heap, (both, min(first, second), (smaller, both, left, right)))
        return cls(whole, heap[0][2])

    def at(self, position: int) -> tuple[int, int]:
        """Return the number of the source at a position, and how many sequences of it are before."""
        node = self.tree
        while isinstance(node, tuple):
            share, both, left, right = node
            before, after = _rounded(position * share, both), _rounded((position + 1) * share, both)
            node, position = (left, before) if after > before else (right, position - before)
        return node, position

    def counts(self, positions: int) -> list[int]:
        """Return how many of the first `positions` are of each source."""
        counts = [0] * len(self.shares)
        todo = [(self.tree, positions)]
        while todo:
            node, number = todo.pop()
            if isinstance(node, tuple):
                share, both, left, right = node
                of_left = _rounded(number * share, both)
                todo += [(left, of_left), (right, number - of_left)]
            else:
                counts[node] = number
        return counts


def _rounded(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded to a whole number."""
    return (2 * dividend + divisor) // (2 * divisor)
