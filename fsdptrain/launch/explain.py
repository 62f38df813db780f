"""Explain a failure in one message, from what workers and watchdogs wrote: which rank failed first, or which hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdptrain.config.plan import Plan
from fsdptrain.errors import (
    FsdptrainError,
    KilledForMemory,
    WorkerError,
    WorkerLost,
    from_record,
    killed_by,
    own_frame,
)
from fsdptrain.launch.collectives import waited_for
from fsdptrain.rundir import RunDir
from fsdptrain.text import ranks_text

ALIVE_S, STAMPS_PER_S = 5.0, 100  # how often each rank says that it is alive; how often all ranks together


MISSED = 3  # such intervals, after which a rank is silent


def explain(failure: dict[str, object], rundir: RunDir, when: str, hosts: Sequence[str] = ()) -> FsdptrainError:
    """Return the error of the first rank that failed, as the agent reported it, with its log file.

    `hosts` are the host names of all ranks, if they are known.
    """
    number = int(str(failure["rank"]))
    log, rank = rundir.rank_log(number), ranks_text([number], hosts)
    log = log if log.exists() else rundir.launcher_log  # it failed before it opened its own log
    record = failure.get("record")
    if isinstance(record, dict):
        error = from_record(record)
        if not isinstance(error, WorkerError):
            return error
        return type(error)(f"{rank} failed {when}: {error}\n{_where(record, log)}")
    if failure.get("out_of_memory"):
        return KilledForMemory(
            f"{rank} was killed by the kernel {when}, because the memory of its host was full; its output: {log}"
        )
    if failure.get("signal"):
        return WorkerLost(f"{rank} was {killed_by(str(failure['signal']))} {when}; its output: {log}")
    return WorkerLost(f"{rank} exited with {failure['exitcode']} {when}, without an error message; its output: {log}")


def hung_ranks(rundir: RunDir, world: int, since: float) -> list[int]:
    """Return the ranks with a hang report or a stack dump that is newer than `since` (seconds since 1970)."""

    def is_new(path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            return status.st_size > 0 and status.st_mtime > since
        return False

    return [rank for rank in range(world) if is_new(rundir.hang_report(rank)) or is_new(rundir.stack_dump(rank))]


def alive_every_s(world: int) -> float:
    """Return the seconds between two signs of life of a rank: one file system may get those of all ranks."""
    return max(ALIVE_S, world / STAMPS_PER_S)


def silent_ranks(rundir: RunDir, world: int) -> list[int]:
    """Return the ranks whose process has given no sign of life for some time, while others have.

    The sign is the modification time of the file for stack dumps (see `train.watchdog`). These times are compared with
    each other, because the clock of this machine may differ.
    """
    stamps: dict[int, float] = {}
    for rank in range(world):
        with contextlib.suppress(OSError), rundir.stack_dump(rank).open("rb") as file:  # opened: NFS asks its server
            stamps[rank] = os.fstat(file.fileno()).st_mtime
    oldest = max(stamps.values(), default=0.0) - MISSED * alive_every_s(world)
    return [rank for rank, stamp in stamps.items() if stamp < oldest]


def explain_hang(hung: list[int], plan: Plan, rundir: RunDir, when: str, hosts: Sequence[str] = ()) -> str:
    """Return one paragraph that says where each rank waits, from the reports of the watchdogs.

    `hosts` are the host names of all ranks, if they are known.
    """
    places: dict[str, list[int]] = {}
    world = plan.topology.world_size
    for rank in range(world):
        report = rundir.hang_report(rank)
        if rank not in hung:
            where = "does not respond: it is stopped, or its machine cannot be reached"
        elif report.exists():
            facts = json.loads(report.read_text(encoding="utf-8"))
            where = f"{'waits in' if facts['waits'] else 'is in'} {facts['where']}"
        else:
            stacks = rundir.stack_dump(rank).read_text(encoding="utf-8", errors="replace")
            where = f"is in {_innermost_function(stacks)}, in native code that blocks Python"
        places.setdefault(where, []).append(rank)
    groups = sorted(places.items(), key=lambda item: (not item[0].startswith("waits"), item[1]))
    places_text = "; ".join(
        f"{ranks_text(ranks, hosts)} {where if len(ranks) == 1 else _plural(where)}" for where, ranks in groups
    )
    collective = waited_for(_recorded(hung, rundir), [rank for rank in range(world) if rank not in hung], hosts)
    timeout = plan.recipe.launch.timeout_s
    return (
        f"the run hung {when}: no progress for {timeout} s (launch.timeout_s; 3 times that for the first step); "
        f"{places_text}{f'; {collective}' if collective else ''}. All stacks and the last collectives: {rundir.logs}"
    )


def _recorded(hung: list[int], rundir: RunDir) -> dict[int, Any]:
    """Return rank → what its flight recorders held, for the ranks whose file is complete."""
    found = {}
    for rank in hung:
        if not rundir.hang_report(rank).exists():
            continue  # the file may be of an earlier start: a rank writes it before its report
        with contextlib.suppress(OSError, json.JSONDecodeError):
            found[rank] = json.loads(rundir.collectives(rank).read_text(encoding="utf-8"))
    return found


def _plural(where: str) -> str:
    verb, _, rest = where.partition(" ")
    return f"{ {'waits': 'wait', 'is': 'are', 'does': 'do'}[verb] } {rest}".replace(
        "it is stopped, or its", "they are stopped, or their"
    )


def _innermost_function(dump: str) -> str:
    """Return fsdptrain's innermost function in faulthandler's dump of the main thread (the last one it lists)."""
    main = dump.rpartition("Thread 0x")[2]
    frames = re.findall(r'File "(.*?)", line (\d+) in (\w+)', main)
    return own_frame((file, int(line), name) for file, line, name in frames) or "code outside fsdptrain"


def _where(record: dict[str, str], log: Path) -> str:
    frames = [line.strip() for line in record.get("traceback", "").splitlines() if line.strip().startswith("File ")]
    return (f"{frames[-1]}\n" if frames else "") + f"full traceback: {log}"
