"""Turn what workers and watchdogs left behind into one message: who failed first, and who waits where."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fsdptrain.config.plan import Plan
from fsdptrain.errors import FsdptrainError, WorkerError, WorkerLost, from_record, own_frame
from fsdptrain.rundir import RunDir


def explain(failure: dict[str, object], rundir: RunDir, when: str) -> FsdptrainError:
    """The error behind what the agent wrote: the first failing rank's own words, and where to read on."""
    rank = failure["rank"]
    log = rundir.rank_log(int(str(rank)))
    log = log if log.exists() else rundir.launcher_log  # it failed before it had a log of its own
    record = failure.get("record")
    if isinstance(record, dict):
        error = from_record(record)
        if not isinstance(error, WorkerError):
            return error
        return type(error)(f"rank {rank} failed {when}: {error}\n{_where(record, log)}")
    if failure.get("signal"):
        hint = " (often: out of host memory)" if failure["signal"] == "SIGKILL" else ""
        return WorkerLost(f"rank {rank} was killed by {failure['signal']} {when}{hint}; its output: {log}")
    return WorkerLost(f"rank {rank} exited with {failure['exitcode']} {when} and said nothing; its output: {log}")


def explain_hang(hung: list[int], plan: Plan, rundir: RunDir, when: str) -> str:
    """Which ranks wait where, in one paragraph, made of what their watchdogs wrote."""
    places: dict[str, list[int]] = {}
    for rank in range(plan.topology.world_size):
        report = rundir.hang_report(rank)
        if rank not in hung:
            where = "does not answer: it is stopped, or its machine cannot be reached"
        elif report.exists():
            facts = json.loads(report.read_text(encoding="utf-8"))
            where = f"{'waits in' if facts['waits'] else 'is in'} {facts['where']}"
        else:
            stacks = rundir.stack_dump(rank).read_text(encoding="utf-8", errors="replace")
            where = f"is in {_stuck_in(stacks)}, in native code that lets no Python run"
        places.setdefault(where, []).append(rank)
    groups = sorted(places.items(), key=lambda item: (not item[0].startswith("waits"), item[1]))
    told = "; ".join(f"{_ranks(ranks)} {where if len(ranks) == 1 else _plural(where)}" for where, ranks in groups)
    patience = plan.recipe.launch.timeout_s
    return (
        f"the run hung {when}: nothing was done for {patience} s (launch.timeout_s; threefold for the first step). "
        f"{told}. All stacks and the last collectives: {rundir.logs}"
    )


def _ranks(ranks: list[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _plural(where: str) -> str:
    verb, _, rest = where.partition(" ")
    return f"{ {'waits': 'wait', 'is': 'are', 'does': 'do'}[verb] } {rest}".replace("it is stopped", "they are stopped")


def _stuck_in(dump: str) -> str:
    """The innermost function of ours in what faulthandler wrote of the main thread (the last one it lists)."""
    main = dump.rpartition("Thread 0x")[2]
    frames = re.findall(r'File "(.*?)", line (\d+) in (\w+)', main)
    return own_frame((file, int(line), name) for file, line, name in frames) or "code outside fsdptrain"


def _where(record: dict[str, str], log: Path) -> str:
    frames = [line.strip() for line in record.get("traceback", "").splitlines() if line.strip().startswith("File ")]
    return (f"{frames[-1]}\n" if frames else "") + f"the whole traceback: {log}"
