"""Tell the other nodes of a run that this one was refused before they met; else they would wait for it.

They read it at the endpoint at which they wait (`parallel.rendezvous`), not through the run folder, which may be
what is wrong, and in which what earlier attempts have left could be taken for news.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from fsdptrain.config.schema import Recipe, node_range
from fsdptrain.errors import FolderInUse, FsdptrainError, RecipeError, to_record
from fsdptrain.plan.launchers import find_launcher
from fsdptrain.plan.network import address_of, is_this_machine
from fsdptrain.plan.topology import host_of

TELL_S = 60.0  # under a launcher, which starts all nodes together: they come within such a time, or not at all
TELL_BY_HAND_S = 10.0  # on plain hosts, where a person waits for the prompt
CONNECT_S = 1.0


def tell_other_nodes(error: FsdptrainError, recipe: Recipe | None) -> None:
    """Tell the nodes that wait for this one, or will, why it was refused. Does nothing if none is known.

    The launcher's name or the recipe's is that of the meeting (see `agent.run_torchrun`).

    `recipe` is None if it could not be read: then only a launcher's nodes are known. With a range of nodes the others
    need not wait. A folder that another run uses on this machine does not speak for this node's own run.
    """
    launched = None
    with contextlib.suppress(RecipeError):  # of variables that contradict each other
        launched = find_launcher(os.environ)
    if isinstance(error, FolderInUse) or (launched and launched.local_rank is not None):
        return
    if launched:
        name, endpoint, nnodes, is_first = launched.source, launched.endpoint, launched.nnodes, launched.node == 0
    elif recipe:
        least, nnodes = node_range(recipe.launch.nnodes)
        name, endpoint, is_first = recipe.name, recipe.launch.rdzv_endpoint if least == nnodes else None, None
    else:
        return
    port = (endpoint or "").rpartition(":")[2]
    if not endpoint or not port.isdigit() or nnodes < 2 or (address := address_of(host_of(endpoint))) is None:
        return
    if not launched:
        print(f"fsdptrain: telling the nodes that wait at {endpoint} …", file=sys.stderr)
    end = time.monotonic() + (TELL_S if launched else TELL_BY_HAND_S)
    if not (is_first or is_this_machine(address) or _answers(address, int(port), end)):
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns, with its stack, when the other end leaves
    from fsdptrain.parallel.rendezvous import tell_refusal

    record = {"host": socket.gethostname(), **to_record(error)}
    tell_refusal(endpoint, name, nnodes, is_first, record, max(1.0, end - time.monotonic()))


def _answers(address: str, port: int, end: float) -> bool:
    """Return whether something listens at an address until `end`, in seconds of `time.monotonic`."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((address, port), CONNECT_S):
            return True
        time.sleep(CONNECT_S)
    return False
