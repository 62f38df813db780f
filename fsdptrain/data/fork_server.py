"""A server that forks processes, and ends with the process that started it, as they do.

Python's own server, once it has imported all, waits until none of its forks is left, and these wait for work.
"""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from fsdptrain.processes import die_with_parent

PARENT = "FSDPTRAIN_FORK_SERVER_OF"  # the variable with the process that starts the server

if PARENT in os.environ:  # this is the server, which imports this module first
    die_with_parent(int(os.environ.pop(PARENT)))
    os.register_at_fork(after_in_child=partial(die_with_parent, os.getpid()))


def forked_after_import(module: str) -> ForkServerContext:
    """Return what starts processes that have imported a module, and share its memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, module])
    os.environ[PARENT] = str(os.getpid())
    forkserver.ensure_running()
    del os.environ[PARENT]
    return context
