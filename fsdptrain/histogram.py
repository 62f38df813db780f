"""How long the rows are, in tokens: counts in bins, and bars for the terminal."""

from __future__ import annotations

from typing import Any

import numpy as np

BAR = 32  # characters of the longest bar


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


def bars(facts: dict[str, Any], seq_len: int, beyond: str) -> list[str]:
    """One line a bin, from the first that holds a row; `beyond` says what happens to rows longer than `seq_len`."""
    bins = facts["bins"]
    while len(bins) > 1 and not bins[0]["rows"]:
        bins = bins[1:]
    most = max(bin["rows"] for bin in bins)
    names = [f"{bin['from']:,}–{bin['to']:,}" for bin in bins]
    width, digits = max(map(len, names)), len(f"{most:,}")
    return [
        f"{name:>{width}} {bin['rows']:>{digits},} {'█' * round(BAR * bin['rows'] / most) or '▏' * bool(bin['rows'])}"
        + (f" {beyond}" if bin["from"] > seq_len and bin["rows"] else "")
        for name, bin in zip(names, bins, strict=True)
    ]
