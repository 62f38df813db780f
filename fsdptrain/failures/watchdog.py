"""Watch one rank from a thread of its own, and report where the rank is when it makes no progress.

The rank calls `Watchdog.reset` after every unit of work: a micro-batch, a tensor read, a layer exported. After
`launch.timeout_s` seconds without a reset the stacks of all threads go to the rank's log, and its place and its last
collectives into the folder of the attempt, of which the launcher makes one paragraph. Native code that holds the
interpreter lock stops this thread as well: then faulthandler's own thread, the alarm, writes the stacks.

Another thread sends a heartbeat for `status`: it sets the modification time of the file for these stacks.

Until the ranks have joined the process group, a heartbeat between nodes notices one that is lost.

All files are in the folder of the attempt (`RunDir.attempt`), whose number the ranks agree on when they meet: a rank of
an earlier attempt, whose host was frozen, writes into a folder that is no longer read.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from fsdptrain.errors import Stopped, WorkerLost, own_frame
from fsdptrain.failures.explain import heartbeat_s, is_done
from fsdptrain.parallel.patches import ISSUED, collective_of, named, recorded_collectives
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.files import open_to_append, write_atomically

POLL_S = 0.25  # how often the thread compares the time with the deadline
FIRST_STEP_FACTOR = 3  # times the timeout until the first step is done: compilers and allocators warm up
SLOWEST_DISK = 20e6  # bytes per second; a slower disk counts as a hang
PAUSE_S = 3.0  # a longer gap between two polls means that the whole process was not scheduled
ALARM_S = 1.0, 2.0  # from the deadline to the alarm, at least and at most: most resets need not move it
EXIT_S = 15.0  # after its report a hung rank ends itself, unless the launcher did it before
COLLECTIVES = "distributed_c10d.py"  # a stack with a frame of this file waits for other ranks
WAITS_FOR = {"save.wait": "checkpoint", "prefetch.get": "data_0"}  # function → the thread for which it waits

# Of the heartbeat between nodes.
INTERVAL_S = 1.0
MAX_MISSED = 30  # intervals without a change: native code can block Python for some seconds, a lost node stays silent
MAX_MISSED_AT_START = 300  # intervals until the first heartbeat: importing torch from a cold network disk takes minutes
FAILURE_S = 5  # in which a worker that failed reaches the TCPStore, or not
# Added by a node that has joined (from then on collectives notice a loss), subtracted by every worker that failed.
JOINED = 2**40


class Watchdog:
    """Reports a hang of this rank, from `begin` on, inside of its `with` block; `reset` may be called before."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rundir, self._rank, self._heartbeat_s = plan.rundir, rank, heartbeat_s(plan.topology.world_size)
        self._entered, self._attempt = False, 0  # number 0: it has not begun
        self._timeout = float(plan.recipe.launch.timeout_s)
        self._warm = False
        self._deadline = float("inf")  # there is none before the first reset: preparing data may take any time
        self._alarm = float("inf")  # when faulthandler writes the stacks
        self._setting_alarm = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._entered = True
        return self

    def begin(self, attempt: int) -> None:
        """Watch from now on, as a rank of the attempt of this number. Does nothing outside of the `with` block."""
        if not self._entered:
            return
        folder = self._rundir.attempt(attempt)
        for each in (self._rundir.logs, folder.parent, folder):  # but not the run folder, if it was removed
            each.mkdir(exist_ok=True)
        self._dump = open_to_append(self._rundir.stack_dump(attempt, self._rank))
        self._attempt = attempt
        self._thread.start()
        # Nothing waits for this thread, because a shared folder may not answer.
        stamped = os.dup(self._dump.fileno())
        threading.Thread(target=self._send_heartbeats, args=(stamped,), name="heartbeat", daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        self._entered = False
        self._ended.set()
        if not self._attempt:
            return
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            if not os.fstat(self._dump.fileno()).st_size:
                self._rundir.stack_dump(self._attempt, self._rank).unlink()
        self._dump.close()

    def reset(self, step_done: bool = False, disk_bytes: int = 0) -> None:
        """Restart the timeout, longer by what a slow disk needs for `disk_bytes`."""
        self._warm |= step_done
        timeout = self._timeout * (1 if self._warm else FIRST_STEP_FACTOR)
        self._set_deadline(time.monotonic() + timeout + disk_bytes / SLOWEST_DISK)

    def _set_deadline(self, deadline: float) -> None:
        """Set the deadline and, with it, the alarm. Stacks that the alarm has written already do not count."""
        self._deadline = deadline
        least, most = ALARM_S
        if not self._attempt or deadline == float("inf") or least <= self._alarm - deadline <= most:
            return
        with self._setting_alarm:
            now, before = time.monotonic(), self._alarm
            faulthandler.dump_traceback_later(deadline + most - now, file=self._dump)  # waits for one that writes now
            self._alarm = deadline + most
            if before <= now:
                self._dump.truncate(0)

    def _watch(self) -> None:
        polled = time.monotonic()
        while not self._ended.wait(POLL_S):
            now = time.monotonic()
            # A process that was not scheduled does not hang: it gets the time back.
            if now - polled > PAUSE_S:
                self._set_deadline(self._deadline + now - polled)
            polled = now
            if self._deadline < now:
                self._report()
                return

    def _send_heartbeats(self, stamped: int) -> None:
        while not self._ended.wait(self._heartbeat_s):
            with contextlib.suppress(OSError):
                os.utime(stamped)
        os.close(stamped)

    def _report(self) -> None:
        with self._setting_alarm:  # the rank has reported itself
            faulthandler.cancel_dump_traceback_later()
        waits, where = current_place()
        print(f"fsdptrain: rank {self._rank} hangs: {where}", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        with contextlib.suppress(OSError):
            self._rundir.hangs(self._attempt).mkdir(exist_ok=True)
            report = {"rank": self._rank, "waits": waits, "where": where, "collectives": last_collectives()}
            write_atomically(self._rundir.hang_report(self._attempt, self._rank), json.dumps(report, indent=1))
        if not self._ended.wait(EXIT_S):
            os._exit(WorkerLost.exit_code)


def current_place() -> tuple[bool, str]:
    """Return whether this process waits for other ranks, and where it is: a collective of a unit, or a function."""
    # On a GPU autograd runs FSDP's hooks on threads of its own, which `threading.enumerate` does not list.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = {names.get(ident, f"thread {ident}"): frame for ident, frame in sys._current_frames().items()}
    main = [*_stack(threads["MainThread"])]
    # FSDP's own frames know the unit.
    for stack in ([*_stack(frame)] for name, frame in threads.items() if name not in ("watchdog", "checkpoint")):
        for frame in stack:
            if collective := collective_of(frame):
                return True, collective
    # A main thread that waits for the save under way, or for its data, is where the thread is that makes them.
    for function, helper in WAITS_FOR.items():
        if helper in threads and _innermost(main).startswith(f"{function} "):
            main = [*_stack(threads[helper])]
    return any(frame.f_code.co_filename.endswith(COLLECTIVES) for frame in main), _innermost(main)


def _innermost(stack: list[FrameType]) -> str:
    """Return the innermost function of this package on a stack: `corpus.batch (corpus.py:112)`."""
    frames = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in stack]
    file, line, name = frames[0]
    return own_frame(frames) or f"{name} ({file}:{line})"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def last_collectives(count: int = 40) -> dict[str, Any]:
    """Return the newest `count` collectives of each group of ranks, with their units, and all that are not done.

    They are backend → the dump of torch's flight recorder.
    """
    recorded = recorded_collectives()
    # NCCL, where it was used: a build with CUDA has its recorder on a CPU too, without entries.
    trained_with = max((backend for backend, dump in recorded.items() if dump.get("entries")), default="")
    newest = {}
    for backend, dump in recorded.items():
        entries = named(dump.get("entries", []), [*ISSUED] if backend == trained_with else [])
        groups: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            groups.setdefault(entry["process_group"][0], []).append(entry)
        kept = [
            entry
            for group in groups.values()
            for place, entry in enumerate(group)
            if len(group) - place <= count or not is_done(entry)
        ]
        newest[backend] = {**dump, "entries": kept}
    return newest


class Heartbeat:
    """A heartbeat between nodes until all ranks have joined the process group, while it is entered.

    On one node the agent notices when a worker ends. With several nodes, a node gets no such notice from the others: it
    would wait forever for one that was killed, or that found no data, before it joined. So the first worker of every
    node increments a counter in the agents' TCPStore once a second, and checks that the counters of the others change.
    A worker that fails makes the counter of its node negative, because the first one may still be importing, and is
    then killed.
    """

    def __init__(self, plan: Plan, lost: Callable[[str], None]) -> None:
        """`lost` is called from a thread, with a message, when another node is lost."""
        local = plan.topology.nproc_per_node
        self._node, inside = divmod(int(os.environ["RANK"]), local)
        self._nodes, self._lost = plan.topology.nnodes, lost
        self._keys = [f"fsdptrain/heartbeat/{node}" for node in range(self._nodes)]  # of the counters
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
                self._named_tcp_store(FAILURE_S).add(self._keys[self._node], self._last)

    def _named_tcp_store(self, timeout_s: float) -> dist.Store:
        """Return the agents' TCPStore, with this node's host name in it. Raises DistError if it cannot be reached."""
        tcp_store: dist.Store = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
        tcp_store.set(f"fsdptrain/host/{self._node}", socket.gethostname())
        return tcp_store

    def _watch(self) -> None:
        try:
            tcp_store = self._named_tcp_store(MAX_MISSED)
            keys = self._keys
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
