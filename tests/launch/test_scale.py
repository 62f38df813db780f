"""What a run of a thousand ranks asks of its file system and of each rank, counted on ranks that are pretended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import write_recipe

from fsdptrain.checkpoint.manifest import reject_external_symlinks
from fsdptrain.config.reader import load
from fsdptrain.launch.launcher import Attempt
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.processes import StopRequest
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen

NODES, WORKERS = 128, 8


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the list to which each request to a file system adds its name."""
    found: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **words: (found.append(name), function(*args, **words))[1]

    for name in ("stat", "lstat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return found


def plan_of_thousand(tmp_path: Path) -> Plan:
    recipe = load(write_recipe(tmp_path, train__global_batch_size=NODES * WORKERS))
    return make_plan(recipe, Topology("cpu", NODES, WORKERS, source="Slurm job 7", endpoint="n1:20000"))


def test_all_launchers_together_look_at_each_rank_once(tmp_path: Path, looks: list[str]) -> None:
    plan = plan_of_thousand(tmp_path)
    launchers = [Attempt(plan, Screen(quiet=True), StopRequest()) for _ in range(NODES)]
    for node, launcher in enumerate(launchers):
        launcher._meeting = {"nodes": NODES, "node": node, "before": 0}
        launcher._note_meeting()
    plan.rundir.hangs(1).mkdir(parents=True)
    for rank in range(NODES * WORKERS):
        plan.rundir.stack_dump(1, rank).touch()
    looks.clear()
    assert not any(launcher._hung_ranks() for launcher in launchers)
    assert looks.count("stat") == NODES * WORKERS and len(looks) <= NODES * WORKERS + 2 * NODES
    plan.rundir.hang_report(1, 900).write_text("{}")
    plan.rundir.stack_dump(1, 9).write_text("Thread 0x")
    assert [launcher._hung_ranks() for launcher in launchers[:3]] == [[900], [9, 900], [900]]


def test_looking_for_links_does_not_look_at_the_files_of_each_rank(tmp_path: Path, looks: list[str]) -> None:
    rundir = RunDir(tmp_path)
    rundir.logs.mkdir()
    for rank in range(NODES * WORKERS):
        (rundir.logs / f"rank-{rank}.log").touch()
    looks.clear()
    reject_external_symlinks(rundir)
    assert len(looks) < 50
