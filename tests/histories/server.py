"""A process that has imported everything once, and forks the commands of histories, their agents and their workers.

A command takes half a second to import its modules and a worker five: a history of ten commands would take a minute.
A forked process starts in milliseconds, and from there on runs the code of the package alone: the command line, the
launcher, the claim, the agent, the worker, the checkpointer and the export are real, and so are the signals that end
them. Only these are different from what a user starts:

* processes are forked instead of executing an interpreter (see `forks`);
* waits between two looks are milliseconds, so that a run of four steps is no longer than its work (`WAITS`);
* a process has the fault that the history asks for (`faults`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import forks
import torch
import transformers
import typer.main
from histories import faults, world
from histories.client import STACKS
from torch.distributed import HashStore

import fsdptrain.checkpoint.export
import fsdptrain.failures.watchdog
import fsdptrain.launch.agent
import fsdptrain.launch.launcher
import fsdptrain.parallel.world
from fsdptrain import cli
from fsdptrain.config.reader import load
from fsdptrain.launch.run_lock import claim_run_dir
from fsdptrain.plan.network import unused_port
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest
from fsdptrain.train.worker import train

WAITS = {  # seconds between two looks, which are 0.1 to 90 where machines and file systems are slow
    fsdptrain.checkpoint.export: {"POLL_S": 0.002},
    fsdptrain.launch.launcher: {"POLL_S": 0.005},  # each look reads two files
    fsdptrain.launch.agent: {"POLL_S": 0.005},
    fsdptrain.failures.watchdog: {"POLL_S": 0.01, "PAUSE_S": 0.2, "EXIT_S": 0.5},
}
TIMEOUT_FACTOR = 0.01  # of launch.timeout_s, for the same reason
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2  # capabilities(7): with them, root ignores the rights of files
CAPABILITY_VERSION_3 = 0x20080522


def obey_rights() -> None:
    """Let this process obey the rights of its own files, even if it is root's."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable of 32 capabilities each, twice
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, sets) == 0:
        ignored = 1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH
        for place in range(3):
            sets[place] &= ~ignored
        libc.capset(header, sets)


def adapt() -> None:
    """Make this process fork its children, and wait as shortly as a history needs."""
    set_threads = torch.set_num_threads
    set_threads(1)
    torch.set_num_threads = lambda threads: None  # a pool of threads does not survive a fork
    # A fork makes torch's pool anew at its first use, which must not be in two threads (of autograd) at once.
    os.register_at_fork(after_in_child=lambda: set_threads(1))
    for module, waits in WAITS.items():
        for name, seconds in waits.items():
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            setattr(module, name, seconds)
    made = fsdptrain.failures.watchdog.Watchdog.__init__

    @functools.wraps(made)
    def sooner(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self._timeout *= TIMEOUT_FACTOR * (faults.HANG_FACTOR if faults.given().get("do") == "hang" else 1)

    fork = fsdptrain.launch.agent.run_worker

    @functools.wraps(fork)
    def with_fault(worker: str, *rest: Any) -> None:
        faults.start(worker)
        fork(worker, *rest)

    fsdptrain.launch.agent.run_worker = with_fault
    typer.main.get_command = functools.cache(typer.main.get_command)  # of the signatures of all commands
    Plan.from_json = functools.cache(Plan.from_json)  # type: ignore[method-assign]  # a pure function of the text
    fsdptrain.failures.watchdog.Watchdog.__init__ = sooner  # type: ignore[method-assign]
    # One rank needs no socket; that of a TCPStore is libuv's, which opens descriptors of its own in every fork.
    fsdptrain.parallel.world.open_tcp_store = lambda *_: HashStore()
    fsdptrain.parallel.world.World.peak_flops = lambda self, dtype: 1e9  # type: ignore[method-assign]  # else measured


def read_plans(history: Path) -> None:
    """Read the plans of all runs of a history: what is read here, no child reads again."""
    for plan in history.glob("runs/*/plan.json"):
        with contextlib.suppress(Exception):
            Plan.from_json(plan.read_text())


def warm_up(folder: Path) -> None:
    """Train a run in `folder`, look at it, and export each of its steps: forks have all that this needs imported.

    All stays there: nothing has disturbed it.
    """
    world.make_inputs(folder)
    written = load(folder / "recipe.yaml", ["checkpoint.keep=100"])
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    environment = dict(os.environ)
    variables = fsdptrain.launch.agent.worker_environment(plan, 0, 0, str(folder / "error.json"))
    os.environ.update(variables | {"MASTER_PORT": str(unused_port())})
    transformers.utils.logging.disable_progress_bar()

    def first_run() -> None:
        with claim_run_dir(plan, written.text, fresh=False), StopRequest() as stop:
            train(plan, stop, None)

    if torch.version.cuda:  # with such a build, a process that has computed gradients may have threads: it cannot fork
        child = multiprocessing.get_context("fork").Process(target=first_run)
        child.start()
        child.join()
        assert child.exitcode == 0
    else:
        first_run()
    os.environ.clear()
    os.environ.update(environment)
    run, recipe = str(folder / "runs" / "run"), str(folder / "recipe.yaml")
    for words in (["run", recipe], ["status", run], ["status", run, "--json"], ["verify", run]):
        command(words)
    for step in range(1, world.STEPS + 1):
        command(["export", run, "--step", str(step), "--out", f"{folder}/exports/{step}", "--no-compare"])


def command(words: list[str]) -> None:
    streams, arguments = (sys.stdout, sys.stderr), sys.argv
    sys.argv = ["fsdptrain", *words]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    finally:
        sys.stdout, sys.stderr = streams
        sys.argv = arguments


def main() -> None:
    faulthandler.register(STACKS)
    listener, name = forks.begin()
    obey_rights()
    # It adopts the processes whose parent is killed, so that all that a history leaves are its children.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    adapt()
    folder = Path(name)
    world.register_store(folder / "history" / "store")
    warm_up(folder / "warm")
    forks.Forked.started = staticmethod(faults.start)
    gc.collect()
    gc.freeze()  # the collector of a child would touch, and so copy, every page
    forks.serve(listener, lambda: read_plans(folder / "history"), lambda: faults.start("command"))


if __name__ == "__main__":
    main()
