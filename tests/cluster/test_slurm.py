"""Runs under a real Slurm: submitted, cancelled, requeued, preempted, and past their time limit. Run by `make cluster`.

Whatever happens to a job, the run is bitwise equal to an undisturbed one when it is finished.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from injection import differences, small_recipe, valid_steps
from slurm import Slurm, missing, private_slurm
from support import TESTS, environment, events, fsdptrain, python_path, wait_for_step

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing())]

HYBRID: dict[str, Any] = {"fsdp__strategy": "HYBRID_SHARD", "launch__nproc_per_node": 2}
URGENT = ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with private_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def whole(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was submitted, and that nothing disturbed."""
    tmp = tmp_path_factory.mktemp("whole")
    finishes(slurm, slurm.submit(small_recipe(tmp, **HYBRID)), tmp / "run", tmp / "run", restarts="0")
    return tmp / "run"


def slowly(seconds: float) -> dict[str, str]:
    """Return the environment in which every step takes so much longer."""
    fault = {"where": "fsdptrain.data.corpus:batch_of", "do": "sleep", "rank": 0, "times": None}
    return with_faults({**fault, "how": {"seconds": seconds}})


def with_faults(*faults: dict[str, Any]) -> dict[str, str]:
    return environment(PYTHONPATH=python_path(TESTS / "faults"), FSDPTRAIN_FAULTS=json.dumps(faults))


def log_of(run: Path, job: str) -> str:
    return (run / "logs" / f"slurm-{job}.log").read_text()


def finishes(slurm: Slurm, job: str, run: Path, whole: Path, restarts: str = "1") -> None:
    """Check that a job ends, after so many restarts, with a run that is equal to an undisturbed one."""
    shown = slurm.wait(job, "COMPLETED", "FAILED", "PREEMPTED", "TIMEOUT")
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", restarts), log_of(run, job)
    assert differences(run, whole) == []


def test_a_submitted_job_trains_on_both_nodes(slurm: Slurm, whole: Path) -> None:
    plan = json.loads((whole / "plan.json").read_text())
    assert (plan["topology"]["nnodes"], plan["replicas"], plan["shard_size"]) == (2, 2, 2)
    (start,) = events(whole, "start")
    assert start["world_size"] == 4 and start["host"] in {node.name for node in slurm.nodes}
    (log,) = whole.glob("logs/slurm-*.log")
    text = log.read_text()
    assert f"4 × cpu on 2 nodes (from {plan['topology']['source']})" in text
    assert text.count("step 12/12") == 1  # only the first node prints
    assert json.loads(fsdptrain("status", whole, "--json").stdout)["state"] == "finished"


def test_a_task_for_each_rank(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fsdptrain", "run", small_recipe(tmp_path, **HYBRID)]
    output = slurm.call("srun", "--nodes=2", "--ntasks-per-node=2", *command)
    assert output.count("step 12/12") == 1 and differences(tmp_path / "run", whole) == []


@pytest.mark.parametrize("tasks", [1, 2])
def test_nodes_are_compared_before_a_run(tasks: int, slurm: Slurm, tmp_path: Path) -> None:
    launcher = ("srun", "--nodes=2", f"--ntasks-per-node={tasks}", sys.executable, "-m", "fsdptrain")
    command = (*launcher, "validate", "--here", "--json", small_recipe(tmp_path, **HYBRID))
    found = json.loads(slurm.call(*command))
    assert found["verdict"] == "2 nodes, 4 ranks: ready" and not found["problems"] and not (tmp_path / "run").exists()
    for node in slurm.nodes:
        here = found["nodes"][node.name]
        assert (here["ranks"], here["shares_output"]) == (2, True)
        assert here["between_bw"] > 0 and here["inside_bw"] > 0

    refused = slurm.run(*command, GLOO_SOCKET_IFNAME="lo")
    (problem,) = json.loads(refused.stdout)["problems"]
    assert refused.returncode == 5 and "the ranks cannot exchange data" in problem and "GLOO_SOCKET_IFNAME" in problem


def test_scancel_saves_and_does_not_come_back(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path, checkpoint__every=None, **HYBRID), tmp_path / "run"
    job = slurm.submit(recipe, **slowly(1.0))
    wait_for_step(run, 3, timeout=600)
    slurm.call("scancel", job)
    slurm.wait(job, "CANCELLED")
    while "EndTime" not in slurm.show(job) or slurm.call("squeue", "--noheader"):
        time.sleep(0.5)
    (stop,) = events(run, "stop")
    assert valid_steps(run) == [stop["step"]] and slurm.show(job)["JobState"] == "CANCELLED"
    assert json.loads(fsdptrain("status", run, "--json").stdout)["state"] == "stopped"
    second = slurm.submit(recipe)
    finishes(slurm, second, run, whole, restarts="0")
    assert f"resumes after step {stop['step']}" in log_of(run, second)


@pytest.mark.parametrize("way", ["requeued", "preempted"])
def test_a_job_that_is_started_again_resumes(way: str, slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path, **HYBRID), tmp_path / "run"
    job = slurm.submit(recipe, **slowly(1.0))
    wait_for_step(run, 5, timeout=600)
    slurm.call(*(("scontrol", "requeue", job) if way == "requeued" else URGENT))
    finishes(slurm, job, run, whole)


def test_a_job_that_loses_a_worker_restarts_it(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path, **HYBRID), tmp_path / "run"
    kill = {"where": "fsdptrain.train.step:Engine.update", "do": "send"}
    job = slurm.submit(recipe, **with_faults({**kill, "rank": 3, "call": 5, "mark": str(tmp_path / "worker")}))
    finishes(slurm, job, run, whole, restarts="0")
    log = log_of(run, job)
    assert "lost the connection" in log and "restart 1 of 3" in log


def test_a_job_that_is_preempted_with_a_grace_time_saves_and_resumes(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path, checkpoint__every=None, **HYBRID), tmp_path / "run"
    job = slurm.submit(recipe, "--partition=grace", "--time=60", **slowly(1.0))
    wait_for_step(run, 3, timeout=600)
    slurm.call(*URGENT)
    finishes(slurm, job, run, whole)
    (stop,), (resume,) = events(run, "stop"), events(run, "resume")
    assert resume["step"] == stop["step"]


def test_a_job_continues_after_its_time_limit(slurm: Slurm, whole: Path, tmp_path: Path) -> None:
    """The time limit is set when the job trains, and removed when it is requeued: the speed of the machine is unknown.

    Slurm counts limits in minutes and compares them every 30 s. So the signal comes within 30 s, and the limit is over
    after 90 s or more. The nine steps that are left take 54 s.
    """
    recipe, run = small_recipe(tmp_path, checkpoint__every=None, **HYBRID), tmp_path / "run"
    job = slurm.submit(recipe, "--time", "60", "--sbatch=--signal=B:USR1@180", **slowly(6.0))
    wait_for_step(run, 3, timeout=600)
    hours, minutes, _ = map(int, slurm.show(job)["RunTime"].split(":"))
    slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 3}")
    slurm.wait(job, "1", key="Restarts")
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    finishes(slurm, job, run, whole)
    (stop,), (resume,) = events(run, "stop"), events(run, "resume")
    assert 3 <= stop["step"] < 12 and resume["step"] == stop["step"]
