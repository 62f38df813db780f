"""Explain a failure in one message, from what workers and watchdogs wrote: which rank failed first, or which hang.

Every rank that hangs writes what its flight recorders hold: `{"nccl": {"entries": [...]}, "gloo": ...}`. Collectives
of a group have numbers that are the same on all of its ranks, which show which one a hung run waits for, and which rank
never entered it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdptrain.errors import (
    FsdptrainError,
    KilledForMemory,
    WorkerError,
    WorkerLost,
    from_record,
    killed_by,
    listed,
    own_frame,
)
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.records import NOT_READ, Record, open_regular, read_object, read_text
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import hosts_of, ranks_text

HEARTBEAT_S, HEARTBEATS_PER_S = 5.0, 100  # seconds between heartbeats of a rank; heartbeats of all ranks a second
MISSED = 3  # such intervals, after which a rank is silent
REPORT = re.compile(r"rank-([0-9]+)\.json")
SILENT = "does not respond: it is stopped, or its machine cannot be reached"


def explain(failure: Record, rundir: RunDir, when: str, hosts: Sequence[str] = ()) -> FsdptrainError:
    """Return the error of the first rank that failed, as the agent reported it, with its log file.

    `hosts` are the host names of all ranks, if they are known.
    """
    log, rank = rundir.rank_log(failure["rank"]), ranks_text([failure["rank"]], hosts)
    log = log if log.exists() else rundir.launcher_log  # it failed before it opened its own log
    if record := failure.get("record"):
        error = from_record(record)
        if not isinstance(error, WorkerError):
            return error
        lines = [line.strip() for line in record.get("traceback", "").splitlines()]
        frames = [line for line in lines if line.startswith("File ")]
        innermost = f"{frames[-1]}\n" if frames else ""
        return type(error)(f"{rank} failed {when}: {error}\n{innermost}full traceback: {log}")
    if failure.get("out_of_memory"):
        return KilledForMemory(
            f"{rank} was killed by the kernel {when}, because the memory of its host was full; its output: {log}"
        )
    if failure.get("signal"):
        return WorkerLost(f"{rank} was {killed_by(failure['signal'])} {when}; its output: {log}")
    return WorkerLost(f"{rank} exited with {failure['exitcode']} {when}, without an error message; its output: {log}")


def hung_ranks(rundir: RunDir, attempt: int, dumps_of: Iterable[int]) -> list[int]:
    """Return the ranks that have reported a hang in an attempt, and those of `dumps_of` that have a stack dump.

    The reports of all ranks are found with one list of a folder, a dump with a look at the file of its rank.
    """
    reported: set[int] = set()
    with contextlib.suppress(OSError):  # a shared folder may refuse for a moment: it is read again
        matches = [REPORT.fullmatch(path.name) for path in rundir.hangs(attempt).iterdir()]
        reported.update(int(match[1]) for match in matches if match)
    for rank in dumps_of:
        with contextlib.suppress(OSError):
            if rundir.stack_dump(attempt, rank).stat().st_size > 0:
                reported.add(rank)
    return sorted(reported)


def heartbeat_s(world: int) -> float:
    """Return the seconds between two heartbeats of a rank: one file system may get those of all ranks."""
    return max(HEARTBEAT_S, world / HEARTBEATS_PER_S)


def silent_ranks(rundir: RunDir, attempt: int, world: int) -> list[int]:
    """Return the ranks whose process has sent no heartbeat for some time, while others have.

    A heartbeat is the modification time of the file for stack dumps (see `failures.watchdog`). They are compared with
    each other, because the clock of this machine may differ.
    """
    stamps: dict[int, float] = {}
    for rank in range(world):
        with contextlib.suppress(*NOT_READ), open_regular(rundir.stack_dump(attempt, rank)) as file:  # opened: NFS asks
            stamps[rank] = os.fstat(file.fileno()).st_mtime
    oldest = max(stamps.values(), default=0.0) - MISSED * heartbeat_s(world)
    return [rank for rank, stamp in stamps.items() if stamp < oldest]


def explain_hang(attempt: int, plan: Plan, rundir: RunDir, when: str, hosts: Sequence[str] = ()) -> str:
    """Return one paragraph that says where each rank waits, from the reports of the watchdogs in an attempt.

    `hosts` are the host names of all ranks, if they are known.
    """
    ranks = range(plan.topology.world_size)
    hung, places, reports = hung_ranks(rundir, attempt, ranks), dict[str, list[int]](), dict[int, Record]()
    for rank in hung:
        with contextlib.suppress(*NOT_READ):  # the file may be incomplete
            reports[rank] = read_object(rundir.hang_report(attempt, rank))
    for rank in ranks:
        where = _place(reports.get(rank, {}), rundir.stack_dump(attempt, rank)) if rank in hung else SILENT
        places.setdefault(where, []).append(rank)
    groups = sorted(places.items(), key=lambda item: (not item[0].startswith("waits"), item[1]))
    places_text = "; ".join(
        f"{ranks_text(where_ranks, hosts)} {where if len(where_ranks) == 1 else _plural(where)}"
        for where, where_ranks in groups
    )
    recorded = {r: found for r, report in reports.items() if isinstance(found := report.get("collectives"), dict)}
    collective = waited_for(recorded, places.get(SILENT, []), hosts)
    timeout = plan.recipe.launch.timeout_s
    return (
        f"the run hung {when}: no progress for {timeout} s (launch.timeout_s; 3 times that for the first step); "
        f"{places_text}{f'; {collective}' if collective else ''}. "
        f"All stacks: {rundir.logs / 'rank-N.log'}; the last collectives: {rundir.hangs(attempt)}"
    )


def _place(report: Record, stacks: Path) -> str:
    """Return where a rank is that hangs: as its watchdog reports or, if that could not run, from its stacks."""
    if "where" in report:
        return f"{'waits in' if report.get('waits') else 'is in'} {report['where']}"
    with contextlib.suppress(*NOT_READ):
        # Of faulthandler's dump, the main thread is the last one that it lists.
        main = read_text(stacks).rpartition("Thread 0x")[2]
        frames = re.findall(r'File "(.*?)", line (\d+) in (\w+)', main)
        where = own_frame((file, int(line), name) for file, line, name in frames) or "code outside fsdptrain"
        return f"is in {where}, in native code that blocks Python"
    return "is in unknown code, because its report cannot be read"


def _plural(where: str) -> str:
    verb, _, rest = where.partition(" ")
    text = f"{ {'waits': 'wait', 'is': 'are', 'does': 'do'}[verb] } {rest}"
    return text.replace("it is stopped, or its", "they are stopped, or their").replace("its report", "their reports")


def waited_for(recorded: Mapping[int, Mapping[str, Any]], silent: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return one sentence on the collective that the run waits for; "" if no rank has entered one that is not done.

    `recorded` is rank → backend → dump; `silent` are the ranks that have not reported; `hosts` are the host names of
    all ranks, if they are known. A group of the training loop comes first: a save under way waits for a rank that is
    lost as well, and may have begun to do so earlier. Then the earliest comes first: it is the cause of the others.
    """
    groups: dict[tuple[str, str], dict[int, list[Record]]] = {}  # of ranks: what each of them has entered there
    for rank, dumps in recorded.items():
        for backend, dump in dumps.items():
            for entry in dump.get("entries", []):
                if not entry["is_p2p"]:  # sends and receives have numbers of their own
                    groups.setdefault((backend, entry["process_group"][0]), {}).setdefault(rank, []).append(entry)
    # Of a group the lowest number: an asynchronous rank has entered many collectives behind the one that it waits for.
    waiting = [
        (min(pending, key=lambda entry: (entry["collective_seq_id"], entry["time_created_ns"])), of_ranks)
        for of_ranks in groups.values()
        if (pending := [entry for entries in of_ranks.values() for entry in entries if not is_done(entry)])
    ]
    if not waiting:
        return ""
    first, of_ranks = min(waiting, key=lambda each: (each[0]["side"], each[0]["time_created_ns"]))
    number, (name, _, unit) = first["collective_seq_id"], first["collective"].partition(" of ")
    what = f"{name} #{number}" + (f" of {unit}" if unit else "")
    last = {rank: max(entry["collective_seq_id"] for entry in entries) for rank, entries in of_ranks.items()}
    if absent := [rank for rank in last if last[rank] < number]:
        return f"{ranks_text(absent, hosts)} never entered {what}"
    if silent:
        return f"the other ranks wait for {ranks_text(silent, hosts)} in {what}"
    between = hosts_of([*last], hosts)
    suspects = f"a GPU or the network of {listed(between, 4)}" if len(between) > 1 else "the network or a GPU"
    return f"all ranks entered {what}, but it did not complete: suspect {suspects}"


def is_done(entry: Record) -> bool:
    """Return whether a collective of a recorder has completed."""
    return bool(entry["retired"] or entry["state"] == "completed")
