"""Watches one rank from a thread of its own, and says where it stands when nothing moves.

`Watchdog.beat` says that something was done: a micro-batch, a tensor read, a block exported. When nothing was for
`launch.timeout_s` seconds, every thread's stack goes to the rank's log, its last collectives to a file beside it, and
the place where it stands to `logs/hang-rank-N.json`, from which the launcher makes one paragraph. A rank whose native
code holds the interpreter cannot run this thread either: faulthandler's own then writes the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fsdptrain.config.plan import Plan
from fsdptrain.errors import WorkerLost, own_frame
from fsdptrain.ownership import write_atomically
from fsdptrain.rundir import RunDir
from fsdptrain.train.patches import collective_of, recorded_collectives

LOOK_S = 0.25  # how often the thread looks


FIRST_STEP = 3  # before the first step is done, compilers and allocators warm up: so many times the patience


SLOWEST_DISK = 20e6  # bytes a second; a disk slower than that is a hang


PAUSE_S = 3.0  # the thread was not scheduled for so long


LEAVE_S = 15.0  # a hung rank leaves by itself where no launcher ends it


COLLECTIVES = "distributed_c10d.py"  # whoever has a frame of it on the stack waits for other ranks


class Watchdog:
    """Inert until it is entered; `beat` may be called in any case."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rundir, self._rank = RunDir(Path(plan.run_dir)), rank
        self._patience = float(plan.recipe.launch.timeout_s)
        self._warm = False
        self._until = float("inf")  # until the first beat: preparing data may take any time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._rundir.logs.mkdir(parents=True, exist_ok=True)
        self._rundir.hang_report(self._rank).unlink(missing_ok=True)
        self._stuck = self._rundir.stack_dump(self._rank).open("w")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._stuck.close()
        stuck = self._rundir.stack_dump(self._rank)
        if not stuck.stat().st_size:
            stuck.unlink()

    def beat(self, step_done: bool = False, disk_bytes: int = 0) -> None:
        """Something was done. Reading or writing `disk_bytes` in one go is given the time of a slow disk."""
        self._warm |= step_done
        patience = self._patience * (1 if self._warm else FIRST_STEP)
        self._until = time.monotonic() + patience + disk_bytes / SLOWEST_DISK

    def _watch(self) -> None:
        looked, armed = time.monotonic(), 0.0
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            if now - looked > PAUSE_S:  # the whole process stood still: a scheduler's pause is not a hang
                self._until += now - looked
                self._stuck.truncate(0)
            looked = now
            if self._until < now:
                self._report()
                return
            if self._until < float("inf") and now - armed > min(5.0, self._patience / 4):
                armed = now
                faulthandler.dump_traceback_later(self._until - now + 1, file=self._stuck)

    def _report(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        waits, where = place()
        print(f"fsdptrain: rank {self._rank} hangs: {where}", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        with contextlib.suppress(OSError):
            self._rundir.collectives(self._rank).write_text(last_collectives(), encoding="utf-8")
            report = json.dumps({"rank": self._rank, "waits": waits, "where": where})
            write_atomically(self._rundir.hang_report(self._rank), report)
        if not self._ended.wait(LEAVE_S):
            os._exit(WorkerLost.exit_code)


def place() -> tuple[bool, str]:
    """Whether this process waits for other ranks, and what its main thread does, in the words of training."""
    frames = sys._current_frames()
    threads = {thread.name: frames[thread.ident] for thread in threading.enumerate() if thread.ident in frames}
    main = [*_stack(threads["MainThread"])]
    for stack in ([*_stack(frame)] for name, frame in threads.items() if name not in ("watchdog", "checkpoint")):
        for frame in stack:  # autograd runs FSDP's hooks on a thread of its own where there is a GPU
            if collective := collective_of(frame):
                return True, collective
    if "checkpoint" in threads and _innermost(main).startswith("save.wait "):
        main = [*_stack(threads["checkpoint"])]
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


def last_collectives(count: int = 40) -> str:
    """The newest collectives of this rank as JSON, from torch's flight recorder (it records gloo and NCCL)."""
    facts = recorded_collectives()
    return json.dumps({**facts, "entries": facts.get("entries", [])[-count:]}, indent=1)
