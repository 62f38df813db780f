"""A heartbeat between nodes until all ranks have joined the process group.

On one node the agent notices when a worker ends. With several nodes, a node gets no such notice from the others: it
would wait forever for one that was killed, or that found no data, before it joined. So the first worker of every node
increments a counter in the agents' TCPStore once a second, and checks that the counters of the others change. A worker
that fails makes the counter of its node negative, because the first one may still be importing, and is then killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from fsdptrain.errors import Stopped
from fsdptrain.plan.plan import Plan

INTERVAL_S = 1.0
MAX_MISSED = 30  # intervals without a change: native code can block Python for some seconds, a lost node stays silent
MAX_MISSED_AT_START = 300  # intervals until the first heartbeat: importing torch from a cold network disk takes minutes
FAILURE_S = 5  # in which a worker that failed reaches the TCPStore, or not

# Added by a node that has joined (from then on collectives notice a loss), subtracted by every worker that failed.
JOINED = 2**40


class Heartbeat:
    """Sends and checks heartbeats while it is entered, in the first worker of each node; does nothing on one node.

    In the other workers it only reports a failure.
    """

    def __init__(self, plan: Plan, lost: Callable[[str], None]) -> None:
        """`lost` is called from a thread, with a message, when another node is lost."""
        local = plan.topology.nproc_per_node
        self._node, inside = divmod(int(os.environ["RANK"]), local)
        self._nodes, self._lost = plan.topology.nnodes, lost
        self._ended, self._last = threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._several = self._nodes > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._active = self._several and inside == 0

    def __enter__(self) -> Heartbeat:
        if self._active:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        stopped = kind is not None and issubclass(kind, Stopped)  # each node gets the signal itself
        self._last = JOINED if kind is None else 0 if stopped else -JOINED
        self._ended.set()
        if self._active:
            self._thread.join()
        elif self._several and self._last < 0:
            with contextlib.suppress(dist.DistError):  # the first node is lost, too
                self._named_tcp_store(FAILURE_S).add(_counter(self._node), self._last)

    def _named_tcp_store(self, timeout_s: float) -> dist.Store:
        """Return the agents' TCPStore, with this node's host name in it. Raises DistError if it cannot be reached."""
        tcp_store: dist.Store = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
        tcp_store.set(f"fsdptrain/host/{self._node}", socket.gethostname())
        return tcp_store

    def _watch(self) -> None:
        try:
            tcp_store = self._named_tcp_store(MAX_MISSED)
            keys = [_counter(node) for node in range(self._nodes)]
            counts, missed = [tcp_store.add(key, 0) for key in keys], [0] * self._nodes
            while True:
                tcp_store.add(keys[self._node], 1)
                for node, text in enumerate(tcp_store.multi_get(keys)):  # one request, however many nodes there are
                    if node == self._node:  # if another worker has failed here, its error counts
                        continue
                    count = int(text)
                    missed[node] = 0 if count != counts[node] or count >= JOINED else missed[node] + 1
                    counts[node] = count
                    if count < 0 or missed[node] > (MAX_MISSED if count else MAX_MISSED_AT_START):
                        key = f"fsdptrain/host/{node}"
                        host = f" ({tcp_store.get(key).decode()})" if tcp_store.check([key]) else ""
                        return self._lost(
                            f"node {node}{host} stopped responding before training started; see that node's output"
                        )
                if self._ended.wait(INTERVAL_S):
                    break
            tcp_store.add(keys[self._node], self._last)
        except dist.DistError:
            where = os.environ["MASTER_ADDR"]
            self._lost(f"the first node ({where}) stopped responding before training started; see that node's output")


def _counter(node: int) -> str:
    return f"fsdptrain/heartbeat/{node}"
