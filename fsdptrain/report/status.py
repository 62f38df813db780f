"""The state of a run, read from its folder by any machine that sees it. Changes nothing. No torch.

The folder says what the workers did and when. Whether they still run is certain only where the lock of the folder can
be seen: on the same machine. From another one, the age of the newest record must do.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fsdptrain.config.schema import node_range
from fsdptrain.errors import RecipeError, StorageError, first_line
from fsdptrain.failures.explain import explain_hang, hung_ranks, silent_ranks
from fsdptrain.plan.plan import Plan, open_plan
from fsdptrain.processes import STOP_SIGNAL, Interrupted
from fsdptrain.report.trackers import TrackerState
from fsdptrain.run_folder.files import NOTHING_THERE
from fsdptrain.run_folder.ownership import is_marked, read_export_record
from fsdptrain.run_folder.records import Record, RunState, Tail, by_loss, waits_for_slow_ranks, without_better
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.page import LiveLine, Page, Part
from fsdptrain.text import counted, duration, ranks_text, rate, wrapped

REFRESH_S = 1.0
LOCKS = Path("/proc/locks")  # every lock on this machine that this process may see
CURRENT_STEPS = 40  # a straggler is looked for every 20 steps: an older one has caught up
LATE_STEPS, LATE_S = 10, 5.0  # by which the next record of a late run is overdue: steps, and seconds at least
SAME_END_S = 60.0  # errors that were recorded within such a time are of one attempt

# What `status` returns of a run of which nothing is known: all fields.
UNKNOWN: dict[str, Any] = {
    "state": None, "why": None, "name": None, "run_dir": None, "ranks": None, "nodes": None, "nodes_allowed": None,
    "source": None, "host": None, "hosts": [], "attempts": 0, "last_record_age_s": None, "late": False,
    "silent_ranks": [], "stage": None, "step": 0, "total_steps": None, "loss": None, "lr": None, "grad_norm": None,
    "step_s": None, "positions_per_s": None, "mfu": None, "eta_s": None, "eval": None, "best": None,
    "checkpoint": None, "unsaved_steps": 0, "straggler": None, "hung_ranks": [], "export": None, "trackers": {},
    "skipped": [],
}  # fmt: skip

ENDED = ("finished", "stopped", "failed", "killed")


def stop_text(stop: Record) -> str:
    """Return how a `stop` event says that the run ended: `by SIGTERM after step 12, with a checkpoint`."""
    # A launcher passes every signal on to its workers as STOP_SIGNAL, also Ctrl-C.
    known = {STOP_SIGNAL.name: "on request", "SIGINT": "by Ctrl-C"}
    by = known.get(stop["signal"], f"by {stop['signal']}")
    step = stop["step"]
    return f"{by} after step {step:,}, with a checkpoint" if step else f"{by} before the first step"


class Observer:
    """Follows a run: `status` reads what is new in its folder, and returns what is known."""

    plan: Plan  # from the first attempt on
    _run: RunState

    def __init__(self, rundir: RunDir) -> None:
        """Raise RecipeError unless the folder has a plan that this version can read, or `submit` has prepared it."""
        self.rundir = rundir
        self._tails = [Tail(path, from_end=False) for path in (rundir.metrics, rundir.progress)]
        self._has_started = self._open()

    def _open(self) -> bool:
        if is_marked(self.rundir.root) and not os.path.lexists(self.rundir.plan):
            return False
        try:
            self.plan = open_plan(self.rundir.plan)
        except NOTHING_THERE:
            raise RecipeError(f"{self.rundir.root} is not a run folder: it has no plan.json") from None
        self._run = RunState(self.plan.topology.is_elastic)
        self._last = self._run.newest
        return True

    def _not_started(self) -> dict[str, Any]:
        logs = [path for path in self.rundir.logs.glob("slurm-*.log") if path.stat().st_size]
        why = "its job may be in the queue of a scheduler"
        if logs:
            why = f"the log of its job: {max(logs, key=lambda path: path.stat().st_mtime)}"
        why = f"no attempt has started yet; {why}"
        return UNKNOWN | {"state": "waiting", "why": why, "run_dir": str(self.rundir.root)}

    def status(self) -> dict[str, Any]:
        """Return the state of the run, why it is in this state, and how far it is; times are in seconds."""
        self._has_started = self._has_started or self._open()
        if not self._has_started:
            return self._not_started()
        for tail in self._tails:
            for record in tail.read():
                self._run.add(record)
        now, last = time.time(), self._last
        step, start = last.get("step", {}), last.get("start", {})
        total, made = start.get("total_steps"), self._run.steps_made
        newest, times = self._run.newest_at, self._run.step_times
        silent_s = None if newest is None else max(0.0, now - newest)
        here = is_locked(self.rundir)
        state, why = self._state(made, total, silent_s, here)
        running = state == "running"
        trackers = {name: TrackerState.read(self.rundir, name) for name in self.plan.recipe.log.chosen_trackers}
        late = running and self._is_late(silent_s)
        checkpoint, world = self._checkpoint(now), self._newest_plan.topology.world_size
        return {
            "state": state,
            "why": why,
            "name": self.plan.recipe.name,
            "run_dir": str(self.rundir.root),
            "ranks": world,
            "nodes": self._newest_plan.topology.nnodes,
            "nodes_allowed": [*node_range(self.plan.recipe.launch.nnodes)] if self.plan.topology.is_elastic else None,
            "source": self.plan.topology.source or None,
            "host": start.get("host"),
            "hosts": self._run.hosts(world),
            "attempts": self._run.attempts,
            "last_record_age_s": silent_s,
            "late": late,
            "silent_ranks": silent_ranks(self.rundir, self.rundir.newest_attempt(), world)
            if late or state == "silent"
            else [],
            "stage": self._stage() if running else None,
            "step": made,
            "total_steps": total,
            "loss": self._run.training_loss if "loss" in step else None,  # as the run prints it
            **{name: step.get(name) for name in ("lr", "grad_norm", "step_s", "positions_per_s", "mfu")},
            "eta_s": (total - made) * statistics.fmean(times) if total and times and running and not late else None,
            "eval": {key: last["eval"][key] for key in ("step", "loss", "losses") if key in last["eval"]}
            if "eval" in last
            else None,
            "best": self._best(),
            "checkpoint": checkpoint,
            "unsaved_steps": max(0, made - self._run.saved_step),
            "straggler": self._straggler(made) if running else None,
            "hung_ranks": self._hung_ranks(),
            "export": self._last.get("export", {}).get("path"),
            "trackers": {name: state.shown_by for name, state in trackers.items() if state.shown_by},
            "skipped": self._skipped(),
        }

    def _best(self) -> dict[str, Any] | None:
        source = self.plan.recipe.eval.best_of
        losses = self._run.losses(source)
        if not (best := by_loss(losses)[:1]):
            return None
        kept = bool(self.plan.recipe.checkpoint.keep_best) and self._run.has("save", best[0])
        return {"step": best[0], "loss": losses[best[0]], "source": source, "kept": kept}

    def _skipped(self) -> list[str]:
        faults = [fault for tail in self._tails for fault in tail.faults]
        try:
            fault = read_export_record(self.rundir).fault
        except StorageError as error:
            fault = str(error)
        return [*faults, *([fault] if fault else [])]

    @property
    def _newest_plan(self) -> Plan:
        return self.plan.of_attempt(self._last.get("start"))

    def _state(self, made: int, total: int | None, silent_s: float | None, here: bool) -> tuple[str, str]:
        """Return the state in one word, and what it is derived from. `here`: its lock is held on this machine."""
        if self._is_finished(made, total):
            if early := self._last.get("early_stop"):
                return "finished", f"{without_better(early)}: ended after step {made:,} of {total:,}"
            return "finished", f"{made:,}/{made:,} steps"
        if self._meets_again(silent_s):
            return "running", "workers were lost; the other nodes meet again"
        if self._run.ends and not here and self._stage() is None:  # else it was started again, and prepares
            return self._end()
        if self._hung_ranks():
            attempt, when = self.rundir.newest_attempt(), f"after step {made}"
            plan = self._newest_plan
            hosts = self._run.hosts(plan.topology.world_size)
            return "hung", explain_hang(attempt, plan, self.rundir, when, hosts)
        if here and (restart := self._last.get("restart")):
            again = f"its workers are started again (restart {restart['restart']} of {restart['of']})"
            return "running", f"on this machine; {again}"
        if here:
            return "running", "on this machine"
        host, limit = self._last.get("start", {}).get("host"), self.plan.recipe.launch.timeout_s
        if silent_s is None:
            return "starting", "nothing was recorded yet"
        if host == socket.gethostname() and self.plan.topology.nnodes == 1:
            return "killed", "no process holds the lock of the folder, and none recorded why the run ended"
        where = f"on {host or 'another machine'}"
        if silent_s <= limit:
            return "running", f"{where}: its newest record is {duration(silent_s)} old"
        return "silent", (
            f"nothing was recorded for {duration(silent_s)}, longer than launch.timeout_s ({limit} s): it ran {where} "
            "and was killed there, or cannot write to this folder"
        )

    def _is_late(self, silent_s: float | None) -> bool:
        """Return whether a running run should have recorded something: a step, if it makes steps."""
        stage, limit = self._stage(), float(self.plan.recipe.launch.timeout_s)
        if self._run.step_times and (stage is None or stage["total"] > 1):  # else it does work of unknown length
            steps = LATE_STEPS + self.plan.recipe.log.every
            limit = max(LATE_S, steps * statistics.fmean(self._run.step_times))
        return silent_s is not None and silent_s > limit

    def _meets_again(self, silent_s: float | None) -> bool:
        """Return whether a node of an elastic run was lost a moment ago, and no launcher has given up since."""
        lost = bool(self._run.ends) and all(
            end["event"] == "error" and end["type"] == "WorkerLost" and "rank" in end for end in self._run.ends
        )
        limit = self.plan.recipe.launch.timeout_s
        return lost and self.plan.topology.is_elastic and silent_s is not None and silent_s <= limit

    def _end(self) -> tuple[str, str]:
        """Return how the newest attempt ended.

        Every rank that fails says so, and the launcher of each node. A rank that lost its peers is no cause, and a
        launcher knows which rank failed first.
        """
        newest = self._run.ends[-1]
        if newest["event"] == "stop":
            return "stopped", f"{stop_text(newest)}; run the same command to continue"
        errors = [end for end in self._run.ends if end["event"] == "error" and newest["at"] - end["at"] < SAME_END_S]
        cause = min(
            errors, key=lambda end: (end["event"] == "error" and end["type"] == "WorkerLost", "rank" in end, end["at"])
        )
        rank = f"rank {cause['rank']}: " if "rank" in cause else ""
        return "failed", f"{rank}{cause['message']}"

    def _is_finished(self, made: int, total: int | None) -> bool:
        if total is None or (made < total and "early_stop" not in self._last):
            return False
        exported = self._last.get("export", {}).get("at", 0.0) > self._last.get("step", {}).get("at", 0.0)
        return exported or (not self.plan.recipe.export.at_end and made == self._last.get("save", {}).get("step"))

    def _stage(self) -> dict[str, Any] | None:
        """Return the work that is reported last, such as tokenising, if no event came after it."""
        progress = self._last.get("progress")
        newest = max((record["at"] for kind, record in self._last.items() if kind != "progress"), default=0.0)
        if progress is None or progress["at"] < newest:
            return None
        return {name: progress[name] for name in ("stage", "done", "total")}

    def _checkpoint(self, now: float) -> dict[str, Any] | None:
        """Return the newest checkpoint, wherever it is; its path and age are None if only a resume names it."""
        if not (step := self._run.saved_step):
            return None
        save = self._last.get("save")
        if save is None or save["step"] != step:
            return {"step": step, "path": None, "age_s": None}
        return {"step": step, "path": save["path"], "age_s": max(0.0, now - save["at"])}

    def _hung_ranks(self) -> list[int]:
        attempt = self.rundir.newest_attempt()
        if attempt <= self._last.get("restart", {}).get("attempt", 0):  # that attempt is over
            return []
        return hung_ranks(self.rundir, attempt, range(self._newest_plan.topology.world_size))

    def _straggler(self, made: int) -> Record | None:
        found = self._last.get("straggler")
        if found is None or made - found["step"] > CURRENT_STEPS or not waits_for_slow_ranks(self._last.get("start")):
            return None
        return {name: found[name] for name in ("step", "rank", "cause", "cost")}


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder has the mark or the plan of a run."""
    return is_marked(folder) or os.path.lexists(folder / "plan.json")


def runs_below(folder: Path) -> list[Path]:
    """Return the run folders below a folder, sorted; links and hidden folders are not followed."""
    found = []
    for name, folders, _ in os.walk(folder):
        path = Path(name)
        if is_run_folder(path):
            found.append(path)
            folders.clear()
        folders[:] = [below for below in folders if not below.startswith(".")]
    return sorted(found)


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the status of every run below a folder; of one that cannot be read, the reason as `why`.

    Raises RecipeError if there is none.
    """
    found = []
    for path in runs_below(folder):
        try:
            found.append(Observer(RunDir.open(path)).status())
        except (RecipeError, StorageError) as error:
            if is_marked(path):  # else plan.json is of another program
                found.append(UNKNOWN | {"state": "unreadable", "why": first_line(error), "run_dir": str(path)})
    if not found:
        why = "it has no plan.json, and there is no run below it" if folder.is_dir() else "there is no such folder"
        raise RecipeError(f"{folder} is not a run folder: {why}")
    return found


def show_runs(runs: list[dict[str, Any]], folder: Path, page: Page) -> None:
    """Print a line for each run below a folder: its name, state, steps, loss, and the age of its newest record."""
    rows = []
    for status in runs:
        steps = "" if status["total_steps"] is None else f"{status['step']:,}/{status['total_steps']:,}"
        loss = "" if status["loss"] is None else f"{status['loss']:.4f}"
        age = "" if status["last_record_age_s"] is None else duration(status["last_record_age_s"])
        rows.append([os.path.relpath(status["run_dir"], folder), status["state"], steps, loss, age])
    page.table(["run", "state", "step", "loss", "age"], rows)


def is_locked(rundir: RunDir) -> bool:
    """Return whether a process that this machine can see holds a lock of the run folder.

    The lock is not tried, because a run that starts at that moment would be refused.
    """
    with contextlib.suppress(OSError):
        held = {line.split()[-3] for line in LOCKS.read_text(encoding="ascii").splitlines() if " FLOCK " in line}
        for path in (rundir.mark, *rundir.logs.glob("lock*")):
            if not path.exists():
                continue
            stat = path.stat()
            device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
            if f"{device}:{stat.st_ino}" in held:
                return True
    return False


def watch(rundir: RunDir, console: Console) -> None:
    """Show the status on a terminal, always new, until the run has ended or the user presses Ctrl-C.

    Raises RecipeError if it is no run folder, or of another version.
    """
    bar, text, hint, observer = LiveLine(), Text(), Text(style="dim"), Observer(rundir)
    with contextlib.suppress(Interrupted), Live(Group(text, bar, hint), console=console, auto_refresh=False) as display:
        while True:
            status = observer.status()
            ended = status["state"] in ENDED
            text.plain = wrapped("\n".join(status_lines(status)), console.width)
            hint.plain = "" if ended else "Ctrl-C ends this view; the run goes on"
            bar.clear()
            if status["total_steps"] and not ended:
                bar.show_step(
                    status["step"], status["total_steps"], [Part(1, f"{status['step'] / status['total_steps']:.1%}")]
                )
            display.refresh()
            if ended:
                return
            time.sleep(REFRESH_S)


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return one labelled line for each thing that is known."""
    between = " " if status["why"].startswith(("on ", "by ")) else "; "
    run = f"{status['name'] or Path(status['run_dir']).name}: {status['state']}{between}{status['why']}"
    if status["state"] == "waiting":
        return [f"run    {run}"]
    lines = {"run": run, "ranks": _ranks_text(status), "step": _step_text(status)}
    if stage := status["stage"]:
        lines["stage"] = stage["stage"] + (f": {stage['done']:,} of {stage['total']:,}" if stage["total"] > 1 else "")
    if found := status["eval"]:
        sources = ", ".join(f"{name} {loss:.4f}" for name, loss in found.get("losses", {}).items())
        lines["eval"] = f"held-out loss {found['loss']:.4f} at step {found['step']:,}"
        lines["eval"] += f" ({sources})" if sources else ""
    if found := status["best"]:
        of, kept = (f" ({found['source']})" if found["source"] else ""), (", kept" if found["kept"] else "")
        lines["best"] = f"{found['loss']:.4f}{of} at step {found['step']:,}{kept}"
    lines |= {"saved": _checkpoint_text(status), "late": _late_text(status)}
    if found := status["straggler"]:
        cost, who = f"about {found['cost']:.0%} of each step", ranks_text([found["rank"]], status["hosts"])
        lines["slow"] = f"{who}: all others wait for its {found['cause']}, {cost} (at step {found['step']:,})"
    lines["export"] = status["export"]
    lines["curves"] = "; ".join(map(shlex.join, status["trackers"].values()))
    lines["note"] = "; ".join(status["skipped"])
    return [f"{label:<7}{text}" for label, text in lines.items() if text]


def _ranks_text(status: dict[str, Any]) -> str:
    nodes = f" on {status['nodes']} nodes" if status["nodes"] > 1 else ""
    if status["nodes_allowed"]:
        least, most = status["nodes_allowed"]
        nodes = f" on {status['nodes']} of {least} to {most} nodes"
    host = f", rank 0 on {status['host']}" if status["host"] else ""
    starts = f"; started {status['attempts']} times" if status["attempts"] > 1 else ""
    return f"{status['ranks']}{nodes}{f' (from {source})' if (source := status['source']) else ''}{host}{starts}"


def _step_text(status: dict[str, Any]) -> str:
    if status["total_steps"] is None:
        return ""
    parts = [f"{status['step']:,} of {status['total_steps']:,}"]
    if status["loss"] is not None:
        parts += [f"loss {float(status['loss']):.4f}", rate(status["positions_per_s"])]
        parts.append(f"{status['step_s']:.2f} s a step")
    if status["eta_s"] is not None:
        parts.append(f"ETA {duration(status['eta_s'])}")
    return " · ".join(parts)


def _checkpoint_text(status: dict[str, Any]) -> str:
    if not (checkpoint := status["checkpoint"]):
        return "no checkpoint yet"
    unsaved = f"; {counted(status['unsaved_steps'], 'step')} since" if status["unsaved_steps"] else ""
    age = "" if checkpoint["age_s"] is None else f", {duration(checkpoint['age_s'])} ago"
    return f"step {checkpoint['step']:,}{age}{unsaved}"


def _late_text(status: dict[str, Any]) -> str:
    ranks, parts = status["silent_ranks"], []
    if status["late"]:
        usual = "no step yet" if status["step_s"] is None else f"a step took {status['step_s']:.2f} s"
        parts.append(f"nothing was recorded for {duration(status['last_record_age_s'])} ({usual})")
    if ranks:
        verb = "does" if len(ranks) == 1 else "do"
        parts.append(f"{ranks_text(ranks, status['hosts'])} {verb} not respond")
    return "; ".join(parts)
