"""A process that has imported everything once, and forks the commands of histories, their agents and their workers.

A command takes half a second to import its modules and a worker five: a history of ten commands would take a minute.
A forked process starts in milliseconds, and from there on runs the code of the package alone: the command line, the
launcher, the claim, the agent, the worker, the checkpointer and the export are real, and so are the signals that end
them. Only these are different from what a user starts:

* `subprocess.Popen` of a `child_command` forks instead of executing an interpreter (`Forked`), as the agent forks its
  workers anyway;
* waits between two looks are milliseconds, so that a run of four steps is no longer than its work (`WAITS`);
* a process has the fault that the history asks for (`faults`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer.main
from histories import faults, store
from histories.client import STACKS
from torch.distributed import HashStore

import fsdptrain.attempts.holder
import fsdptrain.checkpoint.export
import fsdptrain.launch.agent
import fsdptrain.launch.launcher
import fsdptrain.parallel.world
import fsdptrain.train.watchdog
from fsdptrain import processes
from fsdptrain.__main__ import main as fsdptrain_main
from fsdptrain.plan.plan import Plan

WAITS = {  # seconds between two looks, which are 0.1 to 90 where machines and file systems are slow
    fsdptrain.checkpoint.export: {"POLL_S": 0.002},
    fsdptrain.launch.launcher: {"POLL_S": 0.005},  # each look reads two files
    fsdptrain.launch.agent: {"POLL_S": 0.005},
    fsdptrain.attempts.holder: {"RENEW_S": 0.05, "STALE_S": 0.3, "POLL_S": 0.02},
    fsdptrain.train.watchdog: {"POLL_S": 0.01, "PAUSE_S": 0.2, "EXIT_S": 0.5},
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


def close_others(kept: set[int]) -> None:
    """Close every descriptor that an exec would close: a lock is held until all copies of its descriptor are closed."""
    for link in [*Path("/proc/self/fd").iterdir()]:
        if int(link.name) not in {0, 1, 2, *kept}:
            with contextlib.suppress(OSError):
                os.close(int(link.name))


def run_as_new(main: Callable[[], object], kept: set[int], setup: Callable[[], object] = lambda: None) -> NoReturn:
    """Run a `main` in this forked process as if an interpreter had just been started for it, and end the process."""
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) and number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        close_others(kept)
        setup()
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


class Forked(subprocess.Popen[bytes]):
    """A `Popen` that forks this process where it would start `python -m fsdptrain.processes`."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [os.fsdecode(word) for word in args] if isinstance(args, list) else []
        if words[1:3] != ["-m", "fsdptrain.processes"]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        (_, _, _, pass_fds, _, env, _, _, _, *pipes, _, _, _, _, _, new_session, _) = rest
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return

        def setup() -> None:
            if new_session:
                os.setsid()
            if env is not None:
                os.environ.clear()
                os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
            sys.argv = [processes.__file__, *words[3:]]
            faults.start(words[4])

        for target, descriptor in zip((0, 1, 2), (pipes[0], pipes[3], pipes[5]), strict=True):
            if descriptor != -1:
                os.dup2(descriptor, target)
        run_as_new(processes.main, set(pass_fds), setup)


def adapt() -> None:
    """Make this process fork its children, and wait as shortly as a history needs."""
    torch.set_num_threads(1)
    torch.set_num_threads = lambda threads: None  # a pool of threads does not survive a fork
    subprocess.Popen = Forked  # type: ignore[misc]
    for module, waits in WAITS.items():
        for name, seconds in waits.items():
            assert hasattr(module, name), f"{module.__name__} has no {name} any more"
            setattr(module, name, seconds)
    made = fsdptrain.train.watchdog.Watchdog.__init__

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
    fsdptrain.train.watchdog.Watchdog.__init__ = sooner  # type: ignore[method-assign]
    # One rank needs no socket; that of a TCPStore is libuv's, which opens descriptors of its own in every fork.
    fsdptrain.parallel.world.open_tcp_store = lambda *_: HashStore()
    fsdptrain.parallel.world.World.peak_flops = lambda self, dtype: 1e9  # type: ignore[method-assign]  # else measured


def command(request: dict[str, Any], server: int) -> NoReturn:
    """Run the command of a request in this process, which the process `server` has forked."""

    def setup() -> None:
        processes.die_with_parent(server)  # also if it is frozen: nothing of a test that was killed stays
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request["env"])
        sys.argv = ["fsdptrain", *request["words"]]
        faults.start("command")

    run_as_new(fsdptrain_main, set(), setup)


def set_subreaper() -> None:
    """Adopt the processes whose parent is killed, so that all that a history leaves are children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def serve(requests: socket.socket) -> None:
    """Fork a command for each line of JSON; answer with its process id, and with [id, exit code] when it ends."""
    server = os.getpid()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    while True:
        ready, _, _ = select.select([requests, read], [], [])
        if read in ready:
            os.read(read, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    requests.sendall(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode() + b"\n")
        if requests in ready:
            if not (line := requests.recv(2**20)):
                return
            request = json.loads(line)
            for plan in Path(request["below"]).glob("runs/*/plan.json"):  # what is read here, no child reads again
                with contextlib.suppress(Exception):
                    Plan.from_json(plan.read_text())
            if (child := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                command(request, server)
            requests.sendall(json.dumps([child]).encode() + b"\n")


def main() -> None:
    """Serve on the socket whose descriptor is the first argument; the second is the folder of all histories."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    faulthandler.register(STACKS)
    processes.die_with_parent(os.getppid())
    obey_rights()
    set_subreaper()
    adapt()
    folder = Path(sys.argv[2])
    store.register(folder / "history" / "store")
    from histories.warm import warm_up

    warm_up(folder / "warm")
    gc.collect()
    gc.freeze()  # the collector of a child would touch, and so copy, every page
    requests.sendall(b"[0]\n")
    serve(requests)


if __name__ == "__main__":
    main()
