"""Where the nodes of a run meet: torch's rendezvous, in which a node that comes late does not end the running workers.

MIN nodes are there ── LAST_CALL_S are over, or MAX are there ──> the workers start; the number of nodes is fixed
                                                                                │
a node that comes now waits until the workers exit: after a checkpoint (`on_waiting` asks them to), or one is lost
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
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

from fsdptrain.errors import RecipeError

BACKEND = "fsdptrain"  # its name for torchrun
RUN_KEY = "fsdptrain/run"  # under which the first node leaves what it runs
LAST_CALL_S = 30  # once MIN nodes are there: how long others may still come, as in torchrun


class Rendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous, which reports that the nodes have met, and that another node waits."""

    on_met: Callable[[int, int], None]
    on_waiting: Callable[[], None]
    on_others: Callable[[], None]

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
                self.on_others()
            else:
                self.on_met(found.rank, found.world_size)
                return found

    def num_nodes_waiting(self) -> int:
        """Return 0: for any other number torchrun's agent kills its workers at once, and their work is lost."""
        with contextlib.suppress(RendezvousError):  # without the first node the workers notice it themselves
            if super().num_nodes_waiting():
                self.on_waiting()
        return 0


def register_rendezvous(
    on_met: Callable[[int, int], None],
    on_waiting: Callable[[], None],
    on_others: Callable[[], None],
    run: str = "{}",
) -> None:
    """Give torchrun this rendezvous, under the name BACKEND, in this process.

    `on_met` is called with the number of this node and of all nodes, `on_waiting` again and again while the workers run
    and another node waits, `on_others` when this node has waited for ten minutes while others train. `run` is as in
    `check_run`.
    """

    def create(wanted: RendezvousParameters) -> RendezvousHandler:
        backend, tcp_store = create_backend(wanted)
        check_run(tcp_store, run, wanted.endpoint)
        timeout = RendezvousTimeout(last_call=timedelta(seconds=LAST_CALL_S))
        handler = Rendezvous.from_backend(
            wanted.run_id, tcp_store, backend, wanted.min_nodes, wanted.max_nodes, wanted.local_addr, timeout
        )
        handler.on_met, handler.on_waiting, handler.on_others = on_met, on_waiting, on_others
        return handler

    rendezvous_handler_registry.register(BACKEND, create)


def check_run(tcp_store: dist.Store, run: str, endpoint: str) -> None:
    """Raise RecipeError if nodes of another run, or with another plan, meet at this place.

    The first node leaves the description of its run, JSON with `digest`, `name`, `output_dir`, `versions` and `host`.
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
    raise RecipeError(f"{there} {cause} on all nodes; fsdptrain validate RECIPE --here compares them")
