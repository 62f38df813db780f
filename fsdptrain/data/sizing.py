"""Sizes of a first recipe, chosen from the lengths of all rows: sequences, batches, epochs, evaluation, intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdptrain.config.schema import Treatment
from fsdptrain.data.pack import fill_sequences

COVERED = 0.99  # share of the rows that are not longer than a sequence, if a few are much longer
FILLED = 0.85  # share of the tokens of sequences that are not padding, if rows and steps allow
LONGEST = {"split": 2048, "cut": 8192, "drop": 8192, "continued": 2048}  # tokens of a sequence, by `Data.treatment`
STEP_TOKENS = 2**17  # of an optimizer step, if there are enough
MICRO_TOKENS = 2**11  # of a micro-batch, before a search for the fastest plan
STEPS = 100  # that a run should have at least
FEWEST_STEPS = 10  # that longer sequences must leave
FEW, FEW_ROWS = 800, 2000  # sequences, or rows; below, an epoch has not enough for STEPS of a useful size
SAMPLED = 2000  # rows that are packed to see how well they fill sequences


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


def choose_sizes(
    rows: RowLengths, treatment: Treatment, positions: int | None, ranks: int, held_out: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return keys of a recipe for these rows: dotted path → value.

    `positions` is the longest sequence that the model supports, None if there is no limit; the batch divides over
    `ranks`. `held_out` is the recipe's `data.eval`, None to choose one.
    """
    limit = LONGEST[treatment] if positions is None else min(positions, LONGEST[treatment])
    seq_len, sequences = _sequence_length(rows, treatment, limit, ranks)
    units = rows.available if treatment in ("cut", "drop") else max(rows.available, sequences)
    epochs = _epochs(units, sequences)
    if held_out is None and (fraction := _held_out(units)):
        held_out, sequences = {"fraction": fraction}, max(1, math.floor(sequences * (1 - fraction)))
    batch = _batch(sequences, epochs, STEP_TOKENS // seq_len, ranks)
    steps = math.ceil(epochs * sequences / batch)
    micro = _power_of_two_below(min(batch // ranks, MICRO_TOKENS // seq_len))  # divides another power of two
    return {
        "data.seq_len": seq_len,
        "data.eval": held_out,
        "eval.every": _round_down(steps / 10) if held_out else None,
        "train.epochs": epochs,
        "train.global_batch_size": batch,
        "train.micro_batch_size": micro,
        "checkpoint.every": _round_down(min(500, steps / 2)),
        "log.every": 1 if steps < 5000 else 10,
    }


def _sequence_length(rows: RowLengths, treatment: Treatment, limit: int, ranks: int) -> tuple[int, int]:
    """Return the tokens of a sequence, at most `limit`, and how many sequences the rows fill.

    It is the first multiple of 64, or of 128 above 1,024, that covers nearly all rows, or all if none is much longer,
    and that rows fill well; else the one that they fill best, as long as there are FEWEST_STEPS.
    """
    usual, longest = np.quantile(rows.lengths, COVERED), rows.lengths.max()
    covering = math.ceil(longest if longest <= 2 * usual else usual)
    multiple = 64 if covering <= 1024 else 128
    least = max(8, min(-(-covering // multiple) * multiple, limit))
    found = best = (0.0, least, 0)
    for seq_len in range(least, max(least, min(limit, MICRO_TOKENS)) + 1, multiple):
        sequences = _packed(rows, seq_len, treatment)
        found = (rows.tokens(seq_len, treatment) / (sequences * seq_len), seq_len, sequences)
        if seq_len > least and _epochs(rows.available, sequences) * sequences < FEWEST_STEPS * ranks:
            break
        best = max(best, found)
        if best[0] >= FILLED:
            break
    return best[1:]


def _packed(rows: RowLengths, seq_len: int, treatment: Treatment) -> int:
    """Return how many sequences all rows fill, extrapolated from SAMPLED of them, packed as a run packs them."""
    sample = np.random.default_rng(0).permutation(rows.lengths)[:SAMPLED].astype(np.int64)
    whole, rest = np.divmod(sample, seq_len)
    if treatment in ("cut", "drop"):
        fits = sample < seq_len
        whole, rest = (sample == seq_len if treatment == "drop" else ~fits), np.where(fits, sample, 0)
    packed = int(whole.sum()) + sum(1 for _ in fill_sequences(rest[rest > 0].tolist(), seq_len))
    return max(1, math.ceil(packed * rows.available / len(sample)))


def _epochs(rows: int, sequences: int) -> int:
    return 1 if rows >= FEW_ROWS or sequences >= FEW else 3


def _held_out(rows: int) -> float | None:
    """Return the share of the tokens to hold out; None if the rows are too few to be divided."""
    if rows < 50:
        return None
    return 0.1 if rows < 1000 else 0.05 if rows < 20_000 else 0.01


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
