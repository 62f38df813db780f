"""How often the ranks of a run exchange stop requests: an accelerator would be idle if they did so all the time.

All ranks must see a stop at the same moment of the run, so none may decide by its own clock. They count steps or
micro-batches instead: as many as the slowest rank makes in half of `NOTICED_S`, by times that all of them have
exchanged.
"""

from __future__ import annotations

import time

import torch

from fsdptrain.parallel.world import World
from fsdptrain.processes import StopRequest

NOTICED_S = 5.0  # on an accelerator: the longest time for which a stop request or a NaN is not noticed
MOST = 32  # steps or micro-batches, however short they were: the next ones may take longer


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
