"""What `fsdptrain status` derives from a run folder: of events written by hand, and of a run that is watched."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from pseudo_terminal import Terminal
from rich.console import Console
from support import fsdptrain, run_folder, sample, write_recipe

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError, WorkerLost
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.report.status import Observer, is_locked, list_runs, show_runs, status_lines
from fsdptrain.report.trackers import TrackerState
from fsdptrain.run_folder.events import progress_record, record_error, record_restart
from fsdptrain.run_folder.ownership import write_mark
from fsdptrain.terminal.page import Page

HERE = socket.gethostname()
STEP = {
    "loss": 5.5, "lr": 3e-4, "grad_norm": 0.8, "step_s": 2.0, "positions_per_s": 1024.0, "mfu": 0.3,
    "total_tokens": 1, "total_positions": 1, "total_s": 1.0,
}  # fmt: skip


class Written:
    """A run folder as the workers write it."""

    def __init__(self, tmp: Path, nodes: int = 1, least: int | None = None, **changes: Any) -> None:
        written = load(write_recipe(tmp, **changes))
        source = "Slurm job 7" if nodes > 1 else ""
        plan = make_plan(written, Topology("cpu", nodes, 2, source=source, least_nnodes=least))
        self.rundir = run_folder(plan)

    def event(self, kind: str, ago_s: float = 0.0, **fields: Any) -> None:
        with self.rundir.metrics.open("a") as stream:
            stream.write(json.dumps({"event": kind, "at": time.time() - ago_s, **sample(kind, **fields)}) + "\n")

    def start(self, total: int = 100, host: str = HERE, ago_s: float = 500.0) -> None:
        self.event("start", ago_s, total_steps=total, host=host)

    def steps(self, last: int, first: int = 1, ago_s: float = 0.0) -> None:
        for number in range(first, last + 1):
            self.event("step", ago_s, step=number, **STEP)

    def status(self) -> dict[str, Any]:
        return Observer(self.rundir).status()

    def shown(self) -> str:
        page = Page(Console(file=io.StringIO()))
        page.say("\n".join(status_lines(self.status())))
        return page.console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_whose_lock_is_held_here_is_running(tmp_path: Path) -> None:
    run = Written(tmp_path, log__trackers=["tensorboard"])
    run.start()
    run.steps(10, ago_s=400)
    run.event("save", step=8, path="/x/step-00000008", bytes=1, seconds=0.1)
    run.event("straggler", step=10, rank=1, cause="input", cost=0.25)
    assert run.status()["state"] == "killed"  # the same machine, and no lock
    with FileLock(run.rundir.mark):
        assert is_locked(run.rundir)
        status = run.status()
        text = run.shown()
    assert not is_locked(run.rundir)
    assert (status["state"], status["step"], status["eta_s"], status["unsaved_steps"]) == ("running", 10, 180.0, 2)
    assert status["straggler"] == {"step": 10, "rank": 1, "cause": "input", "cost": 0.25}
    assert "run    run: running on this machine\n" in text
    assert "step   10 of 100 · loss 5.5000 · 1,024 tok/s · 2.00 s a step · ETA 3:00\n" in text
    assert "saved  step 8, 0:0" in text and " ago; 2 steps since\n" in text
    assert "slow   rank 1: all others wait for its input, about 25% of each step (at step 10)\n" in text
    assert status["trackers"] == {} and "curves" not in text
    run.rundir.trackers.mkdir()
    TrackerState("a", ["tensorboard", "--logdir", "/my runs/tensorboard"]).write(run.rundir, "tensorboard")
    assert "\ncurves tensorboard --logdir '/my runs/tensorboard'\n" in run.shown()


@pytest.mark.parametrize(("ago_s", "state"), [(5, "running"), (500, "silent")])
def test_of_another_machine_the_age_of_the_newest_record_counts(ago_s: float, state: str, tmp_path: Path) -> None:
    run = Written(tmp_path, nodes=2)
    run.start(host="n1")
    run.steps(3, ago_s=ago_s)
    status = run.status()
    assert (status["state"], status["source"], status["nodes"]) == (state, "Slurm job 7", 2)
    assert "on n1" in status["why"] and ("longer than launch.timeout_s (60 s)" in status["why"]) == (state == "silent")
    assert (status["eta_s"] is None) == (state == "silent")
    assert "4 on 2 nodes (from Slurm job 7), rank 0 on n1" in run.shown()


def heartbeats(run: Written, *ages_s: float) -> None:
    """Write the heartbeats of all ranks, this many seconds old."""
    run.rundir.attempt(1).mkdir(parents=True, exist_ok=True)
    for rank, age_s in enumerate(ages_s):
        path = run.rundir.stack_dump(1, rank)
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)


def test_a_run_that_should_have_made_a_step_is_late_and_the_silent_ranks_are_named(tmp_path: Path) -> None:
    run = Written(tmp_path, nodes=2)
    run.event("start", 60.0, total_steps=100, host="n1", hosts=["n1", "n1", "n2", "n2"])
    run.steps(3, ago_s=20)  # of 2 s each: up to 22 s without a step are usual
    heartbeats(run, 2, 1, 30, 31)
    status = run.status()
    assert (status["late"], status["silent_ranks"], status["eta_s"]) == (False, [], 194.0)
    run.steps(4, first=4, ago_s=23)
    heartbeats(run, 2, 1, 30, 31)
    status = run.status()
    assert (status["state"], status["late"], status["silent_ranks"], status["eta_s"]) == ("running", True, [2, 3], None)
    text = run.shown()
    assert "late   nothing was recorded for 0:23 (a step took 2.00 s); ranks 2 and 3 on n2 do not respond\n" in text
    heartbeats(run, 402, 401, 400, 400)  # all: then the age of the newest record must do
    assert run.status()["silent_ranks"] == [] and "(a step took 2.00 s)\n" in run.shown()
    run.event("straggler", step=4, rank=3, cause="input", cost=0.25)
    assert run.status()["eta_s"] and "slow   rank 3 on n2: all others wait for its input" in run.shown()
    run.event("straggler", step=4, rank=9, cause="input", cost=0.25)  # a folder may come from anyone
    assert "slow   rank 9: all others wait for its input" in run.shown()


def test_work_of_unknown_length_is_late_only_after_the_timeout(tmp_path: Path) -> None:
    run = Written(tmp_path, nodes=2)
    run.start(host="n1", ago_s=60)
    run.steps(3, ago_s=50)
    with run.rundir.progress.open("w") as stream:
        stream.write(json.dumps({**progress_record("evaluating", 0, 0), "at": time.time() - 45}) + "\n")
    assert not run.status()["late"]
    with run.rundir.progress.open("a") as stream:
        stream.write(json.dumps({**progress_record("exporting", 3, 9), "at": time.time() - 44}) + "\n")
    assert run.status()["late"]


def test_how_a_run_ended(tmp_path: Path) -> None:
    run = Written(tmp_path)
    assert (run.status()["state"], run.status()["step"]) == ("starting", 0)
    run.start()
    run.steps(5)
    record_error(run.rundir, WorkerLost("connection closed"), rank=1)
    record_error(run.rundir, WorkerLost("rank 0 was killed by SIGKILL after step 5"))
    status = run.status()
    assert (status["state"], status["why"]) == ("failed", "rank 0 was killed by SIGKILL after step 5")
    # Started again: the earlier error is history, and steps that the resume undid do not count.
    run.start()
    run.event("resume", step=2)
    assert (run.status()["step"], run.status()["attempts"], run.status()["loss"]) == (2, 2, None)
    run.steps(3, first=3)
    run.event("stop", step=3, signal="SIGTERM")
    assert run.status()["why"] == "by SIGTERM after step 3, with a checkpoint; run the same command to continue"
    run.event("stop", step=3, signal="SIGUSR1")  # what a launcher passes on, after Ctrl-C too
    assert run.status()["why"].startswith("on request after step 3, ")
    run.start(total=4)
    run.steps(4, first=4)
    with FileLock(run.rundir.mark):
        assert run.status()["state"] == "running"  # the export is missing
    run.event("export", path="/x/export")
    assert (run.status()["state"], run.status()["export"]) == ("finished", "/x/export")
    assert "run    run: finished; 4/4 steps\n" in run.shown()


def test_work_without_steps_and_hangs_are_shown(tmp_path: Path) -> None:
    run = Written(tmp_path, nodes=2)
    run.event("stop", ago_s=9, step=0, signal="SIGTERM")
    assert run.status()["state"] == "stopped"
    with run.rundir.progress.open("w") as stream:
        stream.write(json.dumps({**progress_record("tokenising", 30, 90), "at": time.time()}) + "\n")
    status = run.status()
    assert (status["state"], status["stage"]) == ("running", {"stage": "tokenising", "done": 30, "total": 90})
    assert "stage  tokenising: 30 of 90\n" in run.shown()
    run.start(host="n1", ago_s=1)
    run.steps(6)
    report = json.dumps({"rank": 2, "waits": True, "where": "all-gather of model.layers.7"})
    for attempt, rank in ((1, 0), (2, 2)):
        run.rundir.hangs(attempt).mkdir(parents=True)
        run.rundir.hang_report(attempt, rank).write_text(report)
    status = run.status()
    assert (status["state"], status["hung_ranks"], status["stage"]) == ("hung", [2], None)
    assert "rank 2 waits in all-gather of model.layers.7" in status["why"]


def test_a_run_that_is_started_again_after_a_hang_is_not_hung(tmp_path: Path) -> None:
    run = Written(tmp_path)
    run.start()
    run.steps(6)

    def hang(attempt: int) -> None:
        run.rundir.hangs(attempt).mkdir(parents=True)
        run.rundir.hang_report(attempt, 1).write_text(json.dumps({"rank": 1, "waits": True, "where": "all-gather"}))

    hang(1)
    lost(run, 1, 0)
    with FileLock(run.rundir.mark):
        assert run.status()["state"] == "hung"
        record_restart(run.rundir, 1, 3)
        status = run.status()
        assert (status["state"], status["hung_ranks"], status["late"]) == ("running", [], False)
        assert "running on this machine; its workers are started again (restart 1 of 3)\n" in run.shown()
        hang(2)  # before its first event
        assert run.status()["hung_ranks"] == [1]
        run.start()
        assert run.status()["state"] == "hung" and "started again" not in run.shown()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is not a run folder: it has no plan\.json, and there is no run below it"):
        list_runs(tmp_path)
    for name in (__file__, tmp_path / "missing"):
        with pytest.raises(RecipeError, match="is not a run folder: there is no such folder"):
            list_runs(Path(name))


def test_an_undone_save_leaves_the_one_before_it(tmp_path: Path) -> None:
    run = Written(tmp_path)
    run.start()
    run.steps(12)
    for step in (4, 8, 12):
        run.event("save", step=step, path=f"/x/step-{step:08}")
    assert run.status()["checkpoint"]["step"] == 12 and run.status()["unsaved_steps"] == 0
    run.start()
    run.event("resume", step=8)  # the newest one was damaged
    assert run.status()["checkpoint"]["path"] == "/x/step-00000008" and "saved  step 8, 0:0" in run.shown()
    run.event("resume", step=2)  # of which no save is recorded: the disk was full
    assert run.status()["checkpoint"] == {"step": 2, "path": None, "age_s": None} and "saved  step 2\n" in run.shown()
    run.event("resume", step=0)
    assert run.status()["checkpoint"] is None and "saved  no checkpoint yet\n" in run.shown()


def test_the_runs_below_a_folder(tmp_path: Path) -> None:
    for name, last in (("b", 3), ("a/long-name-of-a-run", 12)):
        (tmp_path / name).mkdir(parents=True)
        run = Written(tmp_path / name)
        run.start(total=1200)
        run.steps(last, ago_s=100)
    (tmp_path / "a" / "of-another-program").mkdir()
    (tmp_path / "a" / "of-another-program" / "plan.json").write_text("{}")
    (tmp_path / "queued").mkdir()
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "plan.json").write_text("[]")
    for name in ("queued", "z"):
        write_mark(tmp_path / name)
    names = ["a/long-name-of-a-run/run", "b/run", "queued", "z"]
    done = fsdptrain("status", tmp_path, "--json")
    runs = json.loads(done.stdout)
    assert [Path(status["run_dir"]).relative_to(tmp_path).as_posix() for status in runs] == names
    assert [status["state"] for status in runs] == ["killed", "killed", "waiting", "unreadable"]
    assert "plan.json is not a plan of this version" in runs[3]["why"] and len({len(status) for status in runs}) == 1
    header, first, *_ = fsdptrain("status", tmp_path).stdout.splitlines()
    assert header.split() == ["run", "state", "step", "loss", "age"]
    assert first.split()[:4] == [names[0], "killed", "12/1,200", "5.5000"]
    assert re.fullmatch(r"\d+:\d\d", first.split()[4])
    page = Page(Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None))
    show_runs(list_runs(tmp_path), tmp_path, page)
    lines = page.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 40 and all(name in lines for name in names)


def test_a_run_whose_job_is_in_a_queue_is_watched_until_it_ends(tmp_path: Path) -> None:
    run = Written(tmp_path)
    run.start(total=3)
    started, plan = Observer(run.rundir).status(), run.rundir.plan.rename(tmp_path / "plan.json")
    write_mark(run.rundir.root)  # as `submit` leaves the folder
    log = run.rundir.logs / "slurm-7.log"
    log.touch()
    status = Observer(run.rundir).status()
    assert (status["state"], status["step"], status["total_steps"]) == ("waiting", 0, None)
    assert list(status) == list(started) and json.loads(json.dumps(status)) == status
    assert "queue" in status["why"] and "slurm-7.log" not in status["why"]
    assert "run    run: waiting; no attempt has started yet; its job" in run.shown()
    with Terminal("status", run.rundir.root, columns=60) as terminal:
        terminal.wait_for("waiting; no attempt has started yet")
        log.write_text("refused\n")
        terminal.wait_for("slurm-7.log")
        plan.rename(run.rundir.plan)
        with FileLock(run.rundir.mark):
            for step in (1, 2):  # what is written meanwhile is shown
                run.steps(step, first=step)
                terminal.wait_for(f"step   {step} of 3")
        run.steps(3, first=3)
        run.event("export", path="/x/export")
        terminal.wait_for("run: finished; 3/3 steps")
        assert terminal.process.wait(10) == 0
    done = fsdptrain("status", run.rundir.root, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["state"] == "finished"
    assert [*run.rundir.logs.iterdir()] == [log]  # nothing was written


ELASTIC: dict[str, Any] = {"nproc_per_node": 2, "rdzv_endpoint": "a:1", "max_restarts": 1}


def test_the_nodes_are_those_of_the_newest_attempt(tmp_path: Path) -> None:
    run = Written(tmp_path, nodes=4, least=1, launch=ELASTIC | {"nnodes": "1:4"}, train__global_batch_size=24)
    for nodes in (4, 2):
        run.event("start", 500.0, total_steps=100, host="elsewhere", world_size=2 * nodes)
    run.steps(12)
    assert (run.status()["nodes"], run.status()["ranks"], run.status()["nodes_allowed"]) == (2, 4, [1, 4])
    assert "ranks  4 on 2 of 1 to 4 nodes" in run.shown()


def lost(run: Written, rank: int | None, ago_s: float, kind: str = "WorkerLost") -> None:
    run.event("error", ago_s, type=kind, message=f"of rank {rank}", **({} if rank is None else {"rank": rank}))


def test_a_run_that_lost_ranks_goes_on_if_it_is_elastic_or_failed_for_the_cause(tmp_path: Path) -> None:
    run = Written(tmp_path, nodes=2, least=1, launch=ELASTIC | {"nnodes": "1:2"})
    run.event("start", 9.0, total_steps=100, host="elsewhere", world_size=4)
    run.steps(3)
    lost(run, 0, 2)
    lost(run, 1, 1)
    assert run.status()["state"] == "running" and "the other nodes meet again" in run.status()["why"]
    lost(run, None, 0)  # a launcher gives up
    assert (run.status()["state"], run.status()["why"]) == ("failed", "of rank None")
    (tmp_path / "fixed").mkdir()
    run = Written(tmp_path / "fixed", nodes=2)
    run.start(host="elsewhere", ago_s=9)
    lost(run, 3, 3, "DataError")
    run.steps(3)  # on a GPU rank 0 reads its steps one late
    lost(run, 0, 1)
    assert (run.status()["state"], run.status()["why"]) == ("failed", "rank 3: of rank 3")
