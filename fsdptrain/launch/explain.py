"""Explain a failure in one message, from what workers and watchdogs wrote: which rank failed first, or which hang."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdptrain.errors import (
    FsdptrainError,
    KilledForMemory,
    StorageError,
    Unreadable,
    WorkerError,
    WorkerLost,
    from_record,
    killed_by,
    own_frame,
)
from fsdptrain.folder.files import NOTHING_THERE
from fsdptrain.folder.records import open_regular, read_object, read_text
from fsdptrain.folder.rundir import RunDir
from fsdptrain.launch.collectives import waited_for
from fsdptrain.plan.plan import Plan
from fsdptrain.text import ranks_text

ALIVE_S, STAMPS_PER_S = 5.0, 100  # how often each rank says that it is alive; how often all ranks together


MISSED = 3  # such intervals, after which a rank is silent


REPORT = re.compile(r"rank-([0-9]+)\.json")


NOT_READ = (*NOTHING_THERE, Unreadable, StorageError)  # errors of a file that is missing, damaged, or out of reach


SILENT = "does not respond: it is stopped, or its machine cannot be reached"


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


def hung_ranks(rundir: RunDir, attempt: int, dumps_of: Iterable[int]) -> list[int]:
    """Return the ranks that have reported a hang in an attempt, and those of `dumps_of` that have a stack dump.

    The reports of all ranks are found with one list of a folder, a dump with a look at the file of its rank.
    """
    reported: set[int] = set()
    with contextlib.suppress(OSError):  # a shared folder may refuse for a moment: it is read again
        matches = [REPORT.fullmatch(path.name) for path in rundir.hangs(attempt).iterdir()]
        reported.update(int(match[1]) for match in matches if match)
    return sorted(reported.union(rank for rank in dumps_of if _is_stuck(rundir.stack_dump(attempt, rank))))


def _is_stuck(dump: Path) -> bool:
    with contextlib.suppress(OSError):
        return dump.stat().st_size > 0
    return False


def alive_every_s(world: int) -> float:
    """Return the seconds between two signs of life of a rank: one file system may get those of all ranks."""
    return max(ALIVE_S, world / STAMPS_PER_S)


def silent_ranks(rundir: RunDir, attempt: int, world: int) -> list[int]:
    """Return the ranks whose process has given no sign of life for some time, while others have.

    The sign is the modification time of the file for stack dumps (see `train.watchdog`). These times are compared with
    each other, because the clock of this machine may differ.
    """
    stamps: dict[int, float] = {}
    for rank in range(world):
        with contextlib.suppress(*NOT_READ), open_regular(rundir.stack_dump(attempt, rank)) as file:  # opened: NFS asks
            stamps[rank] = os.fstat(file.fileno()).st_mtime
    oldest = max(stamps.values(), default=0.0) - MISSED * alive_every_s(world)
    return [rank for rank, stamp in stamps.items() if stamp < oldest]


def explain_hang(attempt: int, plan: Plan, rundir: RunDir, when: str, hosts: Sequence[str] = ()) -> str:
    """Return one paragraph that says where each rank waits, from the reports of the watchdogs in an attempt.

    `hosts` are the host names of all ranks, if they are known.
    """
    ranks = range(plan.topology.world_size)
    hung, places = hung_ranks(rundir, attempt, ranks), dict[str, list[int]]()
    for rank in ranks:
        where = _place(rundir, attempt, rank) if rank in hung else SILENT
        places.setdefault(where, []).append(rank)
    groups = sorted(places.items(), key=lambda item: (not item[0].startswith("waits"), item[1]))
    places_text = "; ".join(
        f"{ranks_text(where_ranks, hosts)} {where if len(where_ranks) == 1 else _plural(where)}"
        for where, where_ranks in groups
    )
    collective = waited_for(_recorded(hung, attempt, rundir), places.get(SILENT, []), hosts)
    timeout = plan.recipe.launch.timeout_s
    return (
        f"the run hung {when}: no progress for {timeout} s (launch.timeout_s; 3 times that for the first step); "
        f"{places_text}{f'; {collective}' if collective else ''}. "
        f"All stacks: {rundir.logs}; the last collectives: {rundir.hangs(attempt)}"
    )


def _place(rundir: RunDir, attempt: int, rank: int) -> str:
    """Return where a rank is that hangs: as its watchdog reports or, if that could not run, from its stacks."""
    with contextlib.suppress(*NOT_READ, KeyError):
        facts = read_object(rundir.hang_report(attempt, rank))
        return f"{'waits in' if facts['waits'] else 'is in'} {facts['where']}"
    with contextlib.suppress(*NOT_READ):
        stacks = read_text(rundir.stack_dump(attempt, rank))
        return f"is in {_innermost_function(stacks)}, in native code that blocks Python"
    return "is in unknown code, because its report cannot be read"


def _recorded(hung: list[int], attempt: int, rundir: RunDir) -> dict[int, Any]:
    """Return rank → what its flight recorders held, for the ranks whose file is complete."""
    found = {}
    for rank in hung:
        with contextlib.suppress(*NOT_READ):
            found[rank] = read_object(rundir.collectives(attempt, rank))
    return found


def _plural(where: str) -> str:
    verb, _, rest = where.partition(" ")
    text = f"{ {'waits': 'wait', 'is': 'are', 'does': 'do'}[verb] } {rest}"
    return text.replace("it is stopped, or its", "they are stopped, or their").replace("its report", "their reports")


def _innermost_function(dump: str) -> str:
    """Return fsdptrain's innermost function in faulthandler's dump of the main thread (the last one it lists)."""
    main = dump.rpartition("Thread 0x")[2]
    frames = re.findall(r'File "(.*?)", line (\d+) in (\w+)', main)
    return own_frame((file, int(line), name) for file, line, name in frames) or "code outside fsdptrain"


def _where(record: dict[str, str], log: Path) -> str:
    frames = [line.strip() for line in record.get("traceback", "").splitlines() if line.strip().startswith("File ")]
    return (f"{frames[-1]}\n" if frames else "") + f"full traceback: {log}"
