"""The pace of the ranks: how often they exchange stop requests, which slows the others down, and profiles of steps.

In sharded training every rank is as slow as the slowest, because all ranks wait for each other in every unit: the time
of a step is equal on all ranks. A rank waits for no other while it fetches its data, and while it computes a decoder
layer whose weights are gathered. These two times are measured here.

All ranks must see a stop at the same moment of the run, so none may decide by its own clock. They count steps or
micro-batches instead: as many as the slowest rank makes in half of `NOTICED_S`, by times that all of them have
exchanged. If they exchanged requests in every step, an accelerator would be idle.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from fsdptrain.model.units import decoder_layers
from fsdptrain.parallel.world import Floats, World
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import StopRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_COST = 0.1  # share of a step that a rank must cost the others before it is named
CAUSES = "input", "compute"
WINDOW = 20  # steps that are judged together
STEP_PER_FORWARD = 3  # forward and backward take three times as long as forward alone
NOTICED_S = 5.0  # on an accelerator: the longest time for which a stop request or a NaN is not noticed
MOST = 32  # steps or micro-batches, however short they were: the next ones may take longer


class LayerClock:
    """Measures the seconds that this rank computes in the forward passes of its decoder layers, without waiting for
    weights.

    FSDP's hooks run outside of these hooks, and recomputation runs inside `forward`, so each layer is timed once, after
    it is gathered. On a GPU it is timed with events, which are read when they have happened, so that nothing waits.
    The ranks at each of `places` of a pipeline have some of the layers: their seconds are those of as many layers as
    the others have, so that they can be compared.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, places: int = 1) -> None:
        self._event = None if device.type == "cpu" else torch.get_device_module(device).Event
        self._running = True
        self._spans: list[tuple[Any, Any]] = []  # begin and end of each forward pass: seconds, or events
        self._queued: deque[list[tuple[Any, Any]]] = deque()  # of the steps that the device may not have finished
        self._finished_s = 0.0  # of the newest step that the device has finished
        self._begin: Any = None
        layers = [layer for _, layer in decoder_layers(model)]
        own = [layer for layer in layers if next(layer.parameters(), None) is not None]
        self._scale = len(layers) / (places * len(own)) if own else 1.0  # some architectures have no list of layers
        for layer in own:
            layer.register_forward_pre_hook(self._before_layer)
            layer.register_forward_hook(self._after_layer)

    def seconds(self) -> float:
        """Return the seconds measured since the last call; on a GPU, those of the newest step that it has finished."""
        spans, self._spans = self._spans, []
        if self._event is None:
            return self._scale * float(sum(end - begin for begin, end in spans))
        self._queued.append(spans)
        while self._queued and (not self._queued[0] or self._queued[0][-1][1].query()):
            self._finished_s = float(sum(begin.elapsed_time(end) for begin, end in self._queued.popleft())) / 1e3
        return self._scale * self._finished_s

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


class Pace:
    """Compares the ranks over 20 steps at a time, and names one that costs the others more than a tenth of a step."""

    def __init__(self) -> None:
        self._costs: list[Floats] = []  # one for each step [causes, ranks]: shares of the step

    def add(self, data_s: list[float], compute_s: list[float], step_s: float) -> dict[str, Any] | None:
        """Add a step, measured in seconds by rank. Return a straggler every 20 steps if there is one, else None.

        Its fields are those of the event: `rank`, `cause` (`input` or `compute`) and `cost`, the share of a step that
        it takes. A rank's cost is how far it is behind the median rank, in the median step: one slow step makes no
        straggler.
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
        return {"rank": int(rank), "cause": CAUSES[cause], "cost": cost} if cost > MIN_COST else None


def count_within(noticed_s: float, each_s: float) -> int:
    """Return how many steps of `each_s` seconds to make from one exchange to the next.

    A request that misses an exchange is sent with the next one, and is known when that is read: two intervals, so each
    is half of `noticed_s`. The count is 1 to MOST, and 1 if `each_s` is 0 (unknown).
    """
    return min(MOST, max(1, int(noticed_s / 2 / each_s))) if each_s else 1


class StopPoll:
    """Called before every micro-batch: exchanges stop requests, in the first call and then every half of `NOTICED_S`.

    On a CPU, where the exchange costs nothing, it does so in every call.
    """

    def __init__(self, world: World, stop: StopRequest) -> None:
        self._world, self._stop = world, stop
        self._noticed_s = NOTICED_S if world.device.type != "cpu" else 0.0
        self._calls, self._next = 0, 1  # calls since the last exchange, and the one that makes the next
        self._exchanged = 0.0  # when; 0 before the first exchange

    def __call__(self) -> bool:
        """Return whether any rank had a stop request at the last exchange; every rank must call this."""
        self._calls += 1
        if self._calls < self._next:
            return False
        each_s = (time.perf_counter() - self._exchanged) / self._calls if self._exchanged else 0.0
        mine = torch.tensor([bool(self._stop.count), each_s], dtype=torch.float64)
        stop, slowest_s = self._world.gather(mine).max(axis=0)
        self._next = count_within(self._noticed_s, slowest_s)
        self._calls, self._exchanged = 0, time.perf_counter()
        return bool(stop)


class Recording:
    """Records the steps of `log.profile` on this rank, into files of the run folder; a closed one records no more.

    The files have a trace of what ran on host and device and, on CUDA, what was allocated.
    A run that continues or stops within these steps records a part of them.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self._steps = range(0)  # numbered from 0
        if plan.recipe.log.profile:
            first, last = plan.recipe.log.profile["steps"]
            self._steps = range(first - 1, last)
        self._folder, self._rank, self._on_cuda = plan.rundir.profiles, rank, device.type == "cuda"
        self._profile: profile | None = None
        self._first = self._newest = 0  # of the steps that are recorded

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record what is done inside this context, and until the next step, if `step` is to be recorded."""
        if step in self._steps and self._profile is None:
            self._begin(step)
        self._newest = step
        yield
        if step + 1 not in self._steps:
            self.close()

    def _begin(self, step: int) -> None:
        self._first = step
        if self._on_cuda:
            torch.cuda.memory._record_memory_history(stacks="python")
        # Stacks would make a trace many times larger; FSDP2 names its units in it anyway.
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
        self._profile = profile(activities=sorted(wanted, key=str), record_shapes=True, profile_memory=True)
        self._profile.start()

    def close(self) -> None:
        """Wait for the device, and write what was recorded."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._folder.mkdir(exist_ok=True)  # but not the run folder, if it was removed
        name = f"rank-{self._rank}-steps-{self._first + 1}-{self._newest + 1}"
        recorded.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
        if self._on_cuda:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.pickle"))  # for pytorch.org/memory_viz
            torch.cuda.memory._record_memory_history(enabled=None)
