"""Measure the work of each rank, and name a rank that slows the others down.

In sharded training every rank is as slow as the slowest, because all ranks wait for each other in every unit: the time
of a step is equal on all ranks. A rank waits for no other while it fetches its data, and while it computes a decoder
layer whose weights are gathered. These two times are measured here.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fsdptrain.model.units import decoder_layers
from fsdptrain.parallel.world import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_COST = 0.1  # share of a step that a rank must cost the others before it is named
CAUSES = "input", "compute"
WINDOW = 20  # steps that are judged together
STEP_PER_FORWARD = 3  # forward and backward take three times as long as forward alone


class LayerClock:
    """Measures the seconds that this rank computes in the forward passes of its decoder layers, without waiting for
    weights.

    FSDP's hooks run outside of these hooks, and recomputation runs inside `forward`, so each layer is timed once, after
    it is gathered. On a GPU it is timed with events, which are read when they have happened, so that nothing waits.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._event = None if device.type == "cpu" else torch.get_device_module(device).Event
        self._running = True
        self._spans: list[tuple[Any, Any]] = []  # begin and end of each forward pass: seconds, or events
        self._queued: deque[list[tuple[Any, Any]]] = deque()  # of the steps that the device may not have finished
        self._finished_s = 0.0  # of the newest step that the device has finished
        self._begin: Any = None
        for _, layer in decoder_layers(model):
            layer.register_forward_pre_hook(self._before_layer)
            layer.register_forward_hook(self._after_layer)

    def seconds(self) -> float:
        """Return the seconds measured since the last call; on a GPU, those of the newest step that it has finished."""
        spans, self._spans = self._spans, []
        if self._event is None:
            return float(sum(end - begin for begin, end in spans))
        self._queued.append(spans)
        while self._queued and (not self._queued[0] or self._queued[0][-1][1].query()):
            self._finished_s = float(sum(begin.elapsed_time(end) for begin, end in self._queued.popleft())) / 1e3
        return self._finished_s

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock inside this context: evaluation is not timed."""
        self._running = False
        yield
        self._running = True

    def _now(self) -> Any:
        if self._event is None:
            return time.perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def _before_layer(self, *_: object) -> None:
        if self._running:
            self._begin = self._now()

    def _after_layer(self, *_: object) -> None:
        if self._running:
            self._spans.append((self._begin, self._now()))


@dataclass(frozen=True)
class Straggler:
    """A rank that makes the others wait: `cause` is `input` or `compute`, `cost` the share of a step it takes."""

    rank: int
    cause: str
    cost: float


class Pace:
    """Compares the ranks over 20 steps at a time, and names one that costs the others more than a tenth of a step."""

    def __init__(self) -> None:
        self._costs: list[Floats] = []  # one for each step [causes, ranks]: shares of the step

    def add(self, data_s: list[float], compute_s: list[float], step_s: float) -> Straggler | None:
        """Add a step, measured in seconds by rank. Return a straggler every 20 steps if there is one, else None.

        A rank's cost is how far it is behind the median rank, in the median step: one slow step makes no straggler.
        """
        data, compute = np.array(data_s), np.array(compute_s)
        late, delay = (own - np.quantile(own, 0.5, method="lower") for own in (data, compute))
        # Backward is assumed to be as slow as forward; the cost is at most the rank's own share of delay.
        share = np.divide(delay, compute, out=np.zeros_like(compute), where=compute > 0)
        self._costs.append(np.stack([late / step_s, np.minimum(STEP_PER_FORWARD * delay / step_s, share)]))
        if len(self._costs) < WINDOW:
            return None
        costs, self._costs = np.median(self._costs, axis=0), []
        cause, rank = np.unravel_index(costs.argmax(), costs.shape)
        cost = float(costs[cause, rank])
        return Straggler(int(rank), CAUSES[cause], cost) if cost > MIN_COST else None
