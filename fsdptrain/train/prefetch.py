"""Make the micro-batches of the next step in a thread, while a step computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fsdptrain.data.corpus import Batch, Stream, part_of_rows
from fsdptrain.parallel.world import to_device
from fsdptrain.plan.plan import Plan


@dataclass(frozen=True)
class StepInputs:
    """What a rank trains on in a step: `positions` of the global batch, and its own micro-batches on its device.

    `label_tokens` counts the global batch, and `divisor` divides its loss (see `Corpus.divisor`).
    """

    step: int
    positions: range
    batches: list[Batch]
    label_tokens: int
    divisor: int


def batches_of(plan: Plan, stream: Stream, step: int, rank: int) -> list[Batch]:
    """Return the micro-batches that a rank computes in a step: of ranks that share rows, its part of each."""
    whole = (stream.batch(positions) for positions in plan.micro_batches(step, rank))
    return [part_of_rows(batch, plan.part_of_row(rank), plan.context) for batch in whole]


class Prefetch:
    """Makes the inputs of steps, one step ahead.

    They are a pure function of the step: what was made ahead is either used or dropped, and never differs. The copies
    to the device are queued on its default stream, before the work that reads them.
    """

    def __init__(self, plan: Plan, stream: Stream, rank: int, device: torch.device, total_steps: int) -> None:
        self._plan, self._stream, self._rank, self._device = plan, stream, rank, device
        self._total_steps = total_steps
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: dict[int, Future[StepInputs]] = {}

    def get(self, step: int) -> StepInputs:
        """Return the inputs of step `step` (from 0); raise what was raised when they were made."""
        wanted, following = self.future(step), step + 1
        self._ahead = {following: self._executor.submit(self._make, following)} if following < self._total_steps else {}
        return wanted.result()

    def future(self, step: int) -> Future[StepInputs]:
        """Return the inputs of a step to come; begin to make them if nothing has."""
        if step not in self._ahead:
            self._ahead = {step: self._executor.submit(self._make, step)}
        return self._ahead[step]

    def close(self) -> None:
        """End the thread as soon as it has made what it is making."""
        self._ahead = {}
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _make(self, step: int) -> StepInputs:
        positions = self._plan.step_positions(step)
        batches = batches_of(self._plan, self._stream, step, self._rank)
        on_device = [to_device(batch, self._device) for batch in batches]
        stream = self._stream
        return StepInputs(step, positions, on_device, stream.label_tokens(positions), stream.divisor(positions))
