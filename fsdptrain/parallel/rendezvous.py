"""Where the nodes of a run meet: torch's rendezvous, in which a node that comes late does not end the running workers.

MIN nodes are there ── LAST_CALL_S are over, or MAX are there ──> the workers start; the number of nodes is fixed
                                                                                │
a node that comes now waits until the workers exit: after a checkpoint (`on_waiting` asks them to), or one is lost

A node that is refused before it can come (`tell_refusal`), or there (`check_run`), leaves its reason in the
TCPStore. If it hosts that, it stays until all others have read the reason. A fixed number of nodes cannot meet then, so
those that wait end (`refused`). The TCPStore ends with them, so no later attempt reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from fsdptrain.errors import RecipeError, to_record

BACKEND = "fsdptrain"  # its name for torchrun
LISTEN_S = 0.5  # between two looks of a waiting node for a refusal of another
LEAVE_S = 5.0  # how long a node that knows of a refusal stays, so that all can read it: it may host the TCPStore
RUN_KEY = "fsdptrain/run"  # under which the first node leaves what it runs
REFUSED_KEY = "fsdptrain/refused"  # before the name of a meeting
LAST_CALL_S = 30  # once MIN nodes are there: how long others may still come, as in torchrun


class Rendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous, which reports that the nodes have met, and that another node waits."""

    met: threading.Event
    report: Callable[[dict[str, Any]], None]
    on_waiting: Callable[[], None]

    def __init__(self, node: Any, *others: Any) -> None:
        """`node` is torch's description of this one, the same for containers with equal host names and processes."""
        super().__init__(dataclasses.replace(node, local_id=secrets.randbits(62)), *others)

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes; return the number of this node and of all of them.

        Torch's time limit does not apply while others train, which have met: they may need hours to a checkpoint.
        """
        while True:
            try:
                found = super().next_rendezvous()
            except RendezvousTimeoutError:
                if not self._state_holder.state.complete:  # it is, until the last of them is lost or ends
                    raise
                self.report({"others": True})
            else:
                self.met.set()
                self.report({"node": found.rank, "nodes": found.world_size})
                return found

    def num_nodes_waiting(self) -> int:
        """Return 0: for any other number torchrun's agent kills its workers at once, and their work is lost."""
        with contextlib.suppress(RendezvousError):  # without the first node the workers notice it themselves
            if super().num_nodes_waiting():
                self.on_waiting()
        return 0


def register_rendezvous(
    report: Callable[[dict[str, Any]], None], on_waiting: Callable[[], None], meeting: str = "", run: str = "{}"
) -> None:
    """Give torchrun this rendezvous, under the name BACKEND, in this process.

    `report` gets `{node, nodes}`, the number of this node and of all, when they have met; `{others}` when this node has
    waited for ten minutes while others train; from a thread, `{refused}`, the record of a node that was refused in the
    same `meeting`. `on_waiting` is called again and again while the workers run and another node waits. `run` is as in
    `check_run`.
    """

    def create(wanted: RendezvousParameters) -> RendezvousHandler:
        backend, tcp_store = create_backend(wanted)
        key, nodes = f"{REFUSED_KEY}/{meeting}", wanted.max_nodes
        can_meet_without = wanted.min_nodes < nodes
        check_run(
            tcp_store, run, wanted.endpoint,
            lambda refusal: None if can_meet_without else _leave_together(tcp_store, key, nodes, LEAVE_S, refusal),
        )  # fmt: skip
        timeout = RendezvousTimeout(last_call=timedelta(seconds=LAST_CALL_S))
        handler = Rendezvous.from_backend(
            wanted.run_id, tcp_store, backend, wanted.min_nodes, nodes, wanted.local_addr, timeout
        )
        handler.report, handler.on_waiting, handler.met = report, on_waiting, threading.Event()
        if not can_meet_without:
            listening = (tcp_store, key, nodes, handler)
            threading.Thread(target=_listen, args=listening, name="refusals", daemon=True).start()
        return handler

    rendezvous_handler_registry.register(BACKEND, create)


def check_run(tcp_store: dist.Store, run: str, endpoint: str, tell: Callable[[dict[str, str]], None]) -> None:
    """Raise RecipeError if nodes of another run, or with another plan, meet at this place.

    The first node leaves the description of its run, JSON with `digest`, `name`, `output_dir`, `versions` and `host`.
    `tell` is called with the refusal if the others belong to the same run, and so wait for this node.
    """
    first, own = json.loads(tcp_store.compare_set(RUN_KEY, "", run)), json.loads(run)
    if first.get("digest") == own.get("digest"):
        return
    there = f"{endpoint}: {first.get('host', 'another command')}"
    if (first.get("name"), first.get("output_dir")) != (own.get("name"), own.get("output_dir")):
        what = f"the run {first['name']} in {first['output_dir']}" if "name" in first else "fsdptrain validate --here"
        raise RecipeError(f"{there} has started {what} at this meeting place: use another port for this run")
    pairs = [(name, version, own["versions"].get(name)) for name, version in first["versions"].items()]
    differ = "; ".join(f"{name} {theirs}, here {ours}" for name, theirs, ours in pairs if theirs != ours)
    cause = f"has other versions ({differ}): install the same" if differ else "has another plan: start the same command"
    error = RecipeError(f"{there} {cause} on all nodes; fsdptrain validate RECIPE --here compares them")
    tell({"host": own["host"], **to_record(error)})
    raise error


def _listen(tcp_store: dist.Store, key: str, nodes: int, handler: Rendezvous) -> None:
    """Look for the refusal of another node until this one has met the others, or their TCPStore is lost."""
    with contextlib.suppress(dist.DistError):
        while not tcp_store.check([key]):
            if handler.met.wait(LISTEN_S):
                return
        refusal = json.loads(tcp_store.get(key))
        _leave_together(tcp_store, key, nodes, LEAVE_S)
        handler.report({"refused": refusal})


def tell_refusal(
    endpoint: str, meeting: str, nodes: int, is_first: bool | None, refusal: dict[str, str], within_s: float
) -> None:
    """Tell all nodes of a meeting at an endpoint that this one was refused; give up after `within_s` seconds.

    `is_first` says whether it hosts the TCPStore; None if its address must tell.
    """
    settings: dict[str, Any] = {"read_timeout": math.ceil(within_s)}
    settings |= {} if is_first is None else {"is_host": is_first}
    wanted = RendezvousParameters(BACKEND, endpoint, meeting, nodes, nodes, **settings)
    with contextlib.suppress(dist.DistError, RendezvousError):  # no node waits there
        _, tcp_store = create_backend(wanted)
        _leave_together(tcp_store, f"{REFUSED_KEY}/{meeting}", nodes, within_s, refusal)


def _leave_together(
    tcp_store: dist.Store, key: str, nodes: int, within_s: float, refusal: dict[str, str] | None = None
) -> None:
    """Wait until all nodes know of a refusal, at most `within_s` seconds, because one of them hosts the TCPStore.

    The node that was refused leaves its `refusal` there before.
    """
    if refusal:
        tcp_store.set(key, json.dumps(refusal))
    known, end = tcp_store.add(f"{key}/known", 1), time.monotonic() + within_s
    with contextlib.suppress(dist.DistError):  # the node that hosts it has left
        while known < nodes and time.monotonic() < end:
            time.sleep(LISTEN_S / 5)
            known = tcp_store.add(f"{key}/known", 0)
