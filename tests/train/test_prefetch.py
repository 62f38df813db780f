"""The inputs of a step are made ahead in a thread: the same, in the same order, with the same errors."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdptrain.errors import DataError
from fsdptrain.train.prefetch import Prefetch

CPU, STEPS = torch.device("cpu"), 4


class Stream:
    """A stream whose batches hold their positions; it notes what was made, and fails at one position."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.made: list[int] = []
        self.fails_at = fails_at

    def batch(self, positions: Any) -> dict[str, torch.Tensor]:
        if self.fails_at in positions:
            raise DataError("row 3 cannot be read")
        self.made.append(positions[0])
        return {"input_ids": torch.tensor(list(positions))}

    def label_tokens(self, positions: Any) -> int:
        return sum(positions)

    divisor = label_tokens


PLAN: Any = SimpleNamespace(
    ranks_of_row=1,
    part_of_row=lambda rank: 0,
    step_positions=lambda step: range(4 * step, 4 * step + 4),
    micro_batches=lambda step, rank: [range(4 * step + 2 * rank, 4 * step + 2 * rank + 1) for _ in range(2)],
)


def test_inputs_are_those_of_their_step_of_which_one_is_made_ahead_and_none_after_the_last() -> None:
    stream = Stream()
    with contextlib.closing(Prefetch(PLAN, stream, 1, CPU, STEPS)) as prefetch:  # type: ignore[arg-type]
        prefetch.get(0)
        prefetch.future(1).result(10)
        assert stream.made == [2, 2, 6, 6]
        for step in (1, 2, 3):
            prefetch.get(step)
        time.sleep(0.05)
        assert stream.made == [4 * step + 2 for step in range(STEPS) for _ in range(2)]
        for step in (0, 1, 2, 2, 3, 1):  # a skipped step is followed by the same one again
            inputs = prefetch.get(step)
            assert (inputs.step, inputs.positions) == (step, range(4 * step, 4 * step + 4))
            assert [batch["input_ids"].tolist() for batch in inputs.batches] == [[4 * step + 2]] * 2
            assert inputs.label_tokens == sum(inputs.positions)
    with contextlib.closing(Prefetch(PLAN, Stream(fails_at=6), 1, CPU, STEPS)) as prefetch:  # type: ignore[arg-type]
        prefetch.get(0)
        with pytest.raises(DataError, match="row 3"):
            prefetch.get(1)
