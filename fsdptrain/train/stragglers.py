"""Who makes the others wait: each rank's own work, measured where no rank waits for another; and when to say so.

In sharded training every rank is as slow as the slowest, for they meet in every unit; so a step's time tells nothing.
What a rank does alone is to fetch its data, and to compute a block once its weights are there.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdptrain.model.units import blocks_of

COST = 0.1  # share of a step


STEPS = 20


WHOLE_STEP = 3  # forward and backward take three times the forward alone


class BlockClock:
    """Seconds that this rank computes in the forward passes of its blocks, without the wait for their weights.

    FSDP's hooks stand before and behind ours, and recomputation happens inside `forward`: so a block is timed once,
    when it is gathered. On a GPU events measure it, and they are read where the step waits for the GPU anyway.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running = True
        self._spans: list[tuple[Any, Any]] = []
        self._begun: Any = None
        for _, block in blocks_of(model):
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end)

    def seconds(self) -> float:
        """Seconds since the last call; on a GPU this waits for the work given to it so far."""
        spans, self._spans = self._spans, []
        if not self._cuda:
            return float(sum(end - begin for begin, end in spans))
        if spans:
            spans[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1e3

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Evaluation is not timed."""
        self._running = False
        yield
        self._running = True

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, *_: object) -> None:
        if self._running:
            self._begun = self._now()

    def _end(self, *_: object) -> None:
        if self._running:
            self._spans.append((self._begun, self._now()))


@dataclass(frozen=True)
class Straggler:
    """A rank that makes the others wait: for its `input` or its `compute`, at `cost` of a step (a share)."""

    rank: int
    cause: str
    cost: float


class Pace:
    """Looks at every step, and names a rank that over twenty of them costs the others more than a tenth."""

    def __init__(self) -> None:
        self._costs: list[dict[tuple[int, str], float]] = []  # of each step: (rank, cause) → share of it

    def see(self, data_s: list[float], compute_s: list[float], step_s: float) -> Straggler | None:
        """Take note of a step (seconds by rank); the straggler when it is time to name it, else None.

        What counts is a rank's distance to the median rank, and of that the median step: a hiccup is no straggler.
        """
        usual = {"input": statistics.median_low(data_s), "compute": statistics.median_low(compute_s)}
        costs = {(rank, "input"): (own - usual["input"]) / step_s for rank, own in enumerate(data_s)}
        for rank, own in enumerate(compute_s):  # backward is taken to be as late; but no step is all lateness
            late = own - usual["compute"]
            costs[rank, "compute"] = min(WHOLE_STEP * late / step_s, late / own if own else 0.0)
        self._costs.append(costs)
        if len(self._costs) < STEPS:
            return None
        steps, self._costs = self._costs, []
        found = [Straggler(*key, statistics.median(costs[key] for costs in steps)) for key in steps[0]]
        worst = max(found, key=lambda straggler: straggler.cost)
        return worst if worst.cost > COST else None
