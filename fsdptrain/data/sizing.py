"""Sizes of a first recipe, chosen from the lengths of all rows: sequences, batches, epochs, evaluation, intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdptrain.config.schema import Treatment

COVERED = 0.99  # share of the rows that are not longer than a sequence
LONGEST = {"split": 2048, "cut": 8192, "drop": 8192, "continued": 2048}  # tokens of a sequence, by `Data.treatment`
STEP_TOKENS = 2**17  # of an optimizer step, if there are enough
MICRO_TOKENS = 2**11  # of a micro-batch, before a search for the fastest plan
STEPS = 100  # that a run should have at least
FEW = 800  # sequences; below, an epoch has not enough for STEPS of a useful size


@dataclass(frozen=True)
class RowLengths:
    """What is known of the data: tokens of every row that was read [R], and how many rows there are in all."""

    lengths: np.ndarray[Any, Any]
    available: int

    def tokens(self, seq_len: int, treatment: Treatment) -> int:
        """Return how many tokens all rows have in sequences of `seq_len`, extrapolated from those that were read."""
        return round(kept_tokens(self.lengths, seq_len, treatment) * self.available / len(self.lengths))


def kept_tokens(lengths: np.ndarray[Any, Any], seq_len: int, treatment: Treatment) -> float:
    """Return how many tokens of rows of these lengths [R] are in sequences of `seq_len`."""
    kept = {"cut": np.minimum(lengths, seq_len), "drop": lengths[lengths <= seq_len]}.get(treatment, lengths)
    return float(kept.sum())


def choose_sizes(rows: RowLengths, treatment: Treatment, positions: int | None, ranks: int) -> dict[str, Any]:
    """Return keys of a recipe for these rows: dotted path → value.

    `positions` is the longest sequence that the model supports, None if there is no limit; the batch divides over
    `ranks`.
    """
    seq_len = _sequence_length(
        rows.lengths, LONGEST[treatment] if positions is None else min(positions, LONGEST[treatment])
    )
    sequences = max(1, math.ceil(rows.tokens(seq_len, treatment) / seq_len))
    held_out = _held_out(rows.available if treatment in ("cut", "drop") else max(rows.available, sequences), sequences)
    sequences = max(1, math.floor(sequences * (1 - (held_out or 0))))
    epochs = 1 if sequences >= FEW else 3
    batch = _batch(sequences, epochs, STEP_TOKENS // seq_len, ranks)
    steps = math.ceil(epochs * sequences / batch)
    micro = _power_of_two_below(min(batch // ranks, MICRO_TOKENS // seq_len))  # divides another power of two
    return {
        "data.seq_len": seq_len,
        "data.eval": {"fraction": held_out} if held_out else None,
        "eval.every": _round_down(steps / 10) if held_out else None,
        "train.epochs": epochs,
        "train.global_batch_size": batch,
        "train.micro_batch_size": micro,
        "checkpoint.every": _round_down(min(500, max(steps / 5, 10))),
        "log.every": 1 if steps < 5000 else 10,
    }


def _sequence_length(lengths: np.ndarray[Any, Any], limit: int) -> int:
    """Return the tokens that cover nearly all rows, as a multiple of 64, or of 128 above 1,024; at most `limit`."""
    covering = math.ceil(np.quantile(lengths, COVERED))
    multiple = 64 if covering <= 1024 else 128
    return max(8, min(-(-covering // multiple) * multiple, limit))


def _held_out(rows: int, sequences: int) -> float | None:
    """Return the share of the tokens to hold out; None if they are too few to be divided."""
    if rows < 100 or sequences < 40:
        return None
    return 0.01 if sequences >= 10_000 else 0.05


def _batch(sequences: int, epochs: int, most: int, ranks: int) -> int:
    """Return the sequences of a step: a multiple of `ranks` that gives STEPS if possible, at most an epoch."""
    wanted = min(epochs * sequences // STEPS, most, sequences)
    return ranks * _power_of_two_below(wanted // ranks)


def _power_of_two_below(number: int) -> int:
    """Return the largest power of two that is not larger than `number`; 1 for less."""
    return 1 << max(0, number.bit_length() - 1)


def _round_down(number: float) -> int:
    """Return a round number of steps: 1, 2 or 5 times a power of ten, not larger than `number`; 1 for less."""
    power = 10 ** max(0, math.floor(math.log10(max(number, 1))))
    return next((factor * power for factor in (5, 2, 1) if factor * power <= number), 1)
