"""Nobody outlives a killed process, and nobody ends for what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import FaultTable
from injection import LEAVE_WITHIN_S, small_recipe
from support import ROOT, environment

AGENT, WORKER = "fsdptrain.agent", "fsdptrain.worker"
FSDPTRAIN = ("-m", "fsdptrain")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", *FSDPTRAIN)


def outlived(run: Path, moment: str, victim: str, *words: object) -> dict[str, Any]:
    """Start `python words` below a subreaper and kill one of its processes: who was left, and for how long."""
    command = [sys.executable, str(ROOT / "tests" / "subreaper.py"), str(run), moment, victim]
    done = subprocess.run(
        [*command, sys.executable, *map(str, words)],
        capture_output=True, text=True, timeout=180, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def check_killed(tmp: Path, table: FaultTable, moment: str, victim: str, start: Sequence[str] = FSDPTRAIN) -> None:
    found = outlived(tmp / "run", moment, victim, *start, "run", small_recipe(tmp, train__steps=5000))
    gone = not found["left"] and found["seconds"] < LEAVE_WITHIN_S
    table.add(f"{victim} killed {moment} s", 1, int(gone), [found["seconds"]])
    assert gone, found


@pytest.mark.parametrize(("moment", "victim"), [(f"{WORKER}+0", "command"), (f"{WORKER}+0.8", AGENT)])
def test_nobody_outlives_a_process_killed_while_workers_import(
    moment: str, victim: str, tmp_path: Path, fault_table: FaultTable
) -> None:
    check_killed(tmp_path, fault_table, moment, victim)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["command", AGENT, WORKER])
@pytest.mark.parametrize("moment", ["0", "0.5", "2", "6", f"{AGENT}+0", f"{WORKER}+0", f"{WORKER}+2", "step+1"])
def test_nobody_outlives_any_killed_process(moment: str, victim: str, tmp_path: Path, fault_table: FaultTable) -> None:
    check_killed(tmp_path, fault_table, moment, victim)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["command", "-u -m fsdptrain run "])  # torchrun, or a worker
@pytest.mark.parametrize("moment", ["-u -m fsdptrain+1", "-u -m fsdptrain+4", "step+1"])
def test_nobody_outlives_a_killed_process_under_torchrun(
    moment: str, victim: str, tmp_path: Path, fault_table: FaultTable
) -> None:
    check_killed(tmp_path, fault_table, moment, victim, TORCHRUN)


def test_nobody_outlives_a_killed_validate(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    found = outlived(tmp_path / "run", "fsdptrain.estimate+0.2", "command", *FSDPTRAIN, "validate", "--advise", recipe)
    assert not found["left"] and found["seconds"] < LEAVE_WITHIN_S, found
