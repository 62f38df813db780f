"""How long the rows are, in tokens: counts in bins."""

from __future__ import annotations

from typing import Any

import numpy as np


def length_facts(lengths: np.ndarray[Any, Any], seq_len: int) -> dict[str, Any]:
    """Rows by length. A bin is {from, to, rows}, both ends in it; bins double, and one of them ends at `seq_len`."""
    longest = int(lengths.max())
    edges = {2**power for power in range(int(lengths.min()).bit_length(), longest.bit_length())} | {seq_len}
    tops = [*sorted(edge for edge in edges if edge < longest), longest]
    counts = np.bincount(np.searchsorted(tops, lengths), minlength=len(tops))
    bins = [
        {"from": low, "to": top, "rows": int(count)}
        for low, top, count in zip([0, *(top + 1 for top in tops)], tops, counts, strict=False)
    ]
    return {
        "bins": bins,
        "longest": longest,
        "median": int(np.median(lengths)),
        "mean": float(lengths.mean()),
        "over_seq_len": int((lengths > seq_len).sum()),
    }
