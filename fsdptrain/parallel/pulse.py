"""Before the ranks of several nodes have met, tells each node that the others live, or that one is lost.

On one node the agent sees a worker end. From another node nothing is seen: whoever came first to the meeting would wait
for ever for a node that was killed, or found no data, on its way there. So the first worker of every node counts in the
agents' store, once a second, and looks whether the others count.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from fsdptrain.config.plan import Plan
from fsdptrain.errors import Stopped

LOOK_S = 1.0


SILENT = 30  # looks: native code may keep Python from counting for some seconds, a lost node does for good


SLOW_START = 300  # looks until the first count of a node: a cold network disk takes minutes to import torch from


MET = 2**40  # what a node adds that has come to the meeting, where collectives notice; one that failed subtracts it


class Pulse:
    """Counts and looks while it is entered. Inert on one node, and in all workers of a node but the first."""

    def __init__(self, plan: Plan, lost: Callable[[str], None]) -> None:
        """`lost` is called from a thread, with what has happened."""
        local = plan.topology.nproc_per_node
        self._node, inside = divmod(int(os.environ["RANK"]), local)
        self._nodes, self._lost = plan.topology.nnodes, lost
        self._ended, self._last = threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)
        self._wanted = self._nodes > 1 and inside == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def __enter__(self) -> Pulse:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        stopped = kind is not None and issubclass(kind, Stopped)  # so will the others be, by a signal of their own
        self._last = MET if kind is None else 0 if stopped else -MET
        self._ended.set()
        if self._wanted:
            self._thread.join()

    def _watch(self) -> None:
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=SILENT)))
            counts, silent = [0] * self._nodes, [0] * self._nodes
            while True:
                for node in range(self._nodes):
                    count = store.add(f"fsdptrain/pulse/{node}", int(node == self._node))
                    silent[node] = 0 if count != counts[node] or count >= MET else silent[node] + 1
                    counts[node] = count
                    if count < 0 or silent[node] > (SILENT if count else SLOW_START):
                        return self._lost(
                            f"node {node} stopped responding before training started; see that node's output"
                        )
                if self._ended.wait(LOOK_S):
                    break
            store.add(f"fsdptrain/pulse/{self._node}", self._last)
        except dist.DistError:
            self._lost("the first node stopped responding before training started; see that node's output")
