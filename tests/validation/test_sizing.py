"""The sizes of a first recipe: they follow from the lengths of the rows, and never contradict the data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fsdptrain.validation.init_recipe import RowLengths, Treatment, choose_sizes


def sizes(
    lengths: np.ndarray[Any, Any], treatment: Treatment = "cut", positions: int | None = 512, ranks: int = 1,
    times: int = 1,
) -> dict[str, Any]:  # fmt: skip
    return choose_sizes(RowLengths(lengths, len(lengths) * times), treatment, positions, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 8, 6])
@pytest.mark.parametrize("rows", [1, 7, 90, 400, 5_000, 300_000])
@pytest.mark.parametrize("tokens", [12, 300, 3_000, 30_000])
@pytest.mark.parametrize("treatment", ["cut", "split", "continued"])
def test_a_batch_fits_an_epoch_and_gives_steps_if_the_data_allow(
    ranks: int, rows: int, tokens: int, treatment: Treatment
) -> None:
    found = sizes(np.full(rows, tokens), treatment, 4096, ranks)
    seq_len, batch = found["data.seq_len"], found["train.global_batch_size"]
    assert 8 <= seq_len <= 4096
    held_out = (found["data.eval"] or {"fraction": 0})["fraction"]
    whole, rest = divmod(tokens, seq_len) if treatment != "cut" else (tokens >= seq_len, tokens % seq_len)
    rest = 0 if treatment == "cut" and whole else rest
    sequences = (rows * whole + (math.ceil(rows / (seq_len // rest)) if rest else 0)) * (1 - held_out)
    assert batch % (found["train.micro_batch_size"] * ranks) == 0
    assert batch <= max(sequences, ranks), "never more than an epoch"
    steps = found["train.epochs"] * sequences / batch
    assert steps >= 99 or batch == ranks
    assert steps / found["checkpoint.every"] <= 5 or found["checkpoint.every"] == 500, "a run floods its disk"
    assert found["eval.every"] is None or found["eval.every"] <= max(1, steps)
    assert 1 <= found["checkpoint.every"] <= 500


def test_sequences_cover_nearly_all_rows_up_to_the_positions_of_the_model() -> None:
    lengths = np.array([200] * 990 + [5_000] * 10)
    assert sizes(lengths, positions=256)["data.seq_len"] == 256
    assert sizes(np.array([100] * 995 + [170] * 5), positions=192)["data.seq_len"] == 192, (
        "none is cut that is not much longer"
    )
    assert sizes(np.full(1000, 1_500))["data.seq_len"] == 512, "the limit of GPT-2 in this test"
    assert sizes(np.full(1000, 1_500), positions=None)["data.seq_len"] == 1_536
    assert sizes(np.full(10, 100_000), "split", None)["data.seq_len"] == 2_048


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [24, 500, 7_000])
@pytest.mark.parametrize("tokens", [20, 67, 130, 700])
def test_several_short_rows_fill_a_sequence_unless_too_few_steps_were_left(tokens: int, rows: int, ranks: int) -> None:
    found = sizes(np.full(rows, tokens), positions=8192, ranks=ranks)
    seq_len = found["data.seq_len"]
    fill = seq_len // tokens * tokens / seq_len
    assert fill >= (0.85 if rows > 24 else 0.7), seq_len


def test_a_tenth_of_few_rows_is_held_out_and_a_hundredth_of_many() -> None:
    held_out = {rows: sizes(np.full(rows, 100))["data.eval"] for rows in (24, 60, 7_000, 50_000)}
    fractions = {60: {"fraction": 0.1}, 7_000: {"fraction": 0.05}, 50_000: {"fraction": 0.01}}
    assert held_out == {24: None, **fractions}
    rows, given = RowLengths(np.full(60, 100), 60), {"path": "held-out.jsonl"}
    found = choose_sizes(rows, "cut", 512, 1, given)
    assert found["data.eval"] == given and found["eval.every"]


def test_data_of_which_a_part_was_read_counts_as_a_whole() -> None:
    part, whole = sizes(np.full(1000, 100)), sizes(np.full(1000, 100), times=50)
    assert whole["train.global_batch_size"] > part["train.global_batch_size"]
    assert (part["train.epochs"], whole["train.epochs"]) == (3, 1) and math.isclose(
        whole["data.eval"]["fraction"], 0.01
    )
