"""What failures cost: the formulas against a simulation of runs that fail, and the best interval against all others."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from support import write_recipe

from fsdptrain.config.hardware import KNOWN
from fsdptrain.config.plan import make_plan
from fsdptrain.config.reader import load
from fsdptrain.config.topology import Topology
from fsdptrain.forecast.goodput import best_interval, goodput, useful_share
from fsdptrain.forecast.render import failure_lines, failure_table, failures_line

HOUR = 3600.0


def simulated_share(interval: float, blocked: float, restart: float, mtbf: float, segments: int = 20_000) -> float:
    """Return the share of new steps in a run of so many intervals, whose failures are drawn one after another."""
    draw = random.Random(0)
    spent = 0.0
    for _ in range(segments):
        while (failure := draw.expovariate(1 / mtbf)) < interval + blocked:
            spent += failure
            while (again := draw.expovariate(1 / mtbf)) < restart:  # a restart can fail as well
                spent += again
            spent += restart
        spent += interval + blocked
    return segments * interval / spent


@pytest.mark.parametrize(
    ("interval", "blocked", "restart", "mtbf"),
    [(1800, 60, 300, 3 * HOUR), (600, 200, 900, HOUR), (4 * HOUR, 5, 300, 100 * HOUR), (1200, 600, 300, 1200)],
)
def test_the_share_is_that_of_runs_that_fail(interval: float, blocked: float, restart: float, mtbf: float) -> None:
    expected = simulated_share(interval, blocked, restart, mtbf)
    assert useful_share(interval, blocked, restart, mtbf) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("mtbf", [HOUR, 24 * HOUR, 800 * HOUR])
@pytest.mark.parametrize("blocked", [0.5, 30, 400])
def test_no_other_interval_is_better(blocked: float, mtbf: float) -> None:
    best = useful_share(best_interval(blocked, mtbf), blocked, 300, mtbf)
    others = (best_interval(blocked, mtbf) * 1.1**power for power in range(-30, 30))
    assert max(useful_share(other, blocked, 300, mtbf) for other in others) <= best * 1.0005


def test_a_job_fails_as_often_as_all_its_nodes_together(tmp_path: Path) -> None:
    one = make_plan(load(write_recipe(tmp_path, train__global_batch_size=64)), Topology("cuda", 1, 8))
    many = dataclasses.replace(one, topology=Topology("cuda", 4, 8))
    card = KNOWN["h100-80gb"]
    alone, together = (goodput(plan, card, 2.0, 800 * 10**9, 1000) for plan in (one, many))
    assert (alone.mtbf_hours, together.mtbf_hours) == (1000, 250)
    assert together.share < alone.share and together.every < alone.every
    assert alone.own_share is not None and alone.own_share <= alone.share


def test_a_synchronous_checkpoint_stops_training_until_it_is_written(tmp_path: Path) -> None:
    card, topology = KNOWN["h100-80gb"], Topology("cuda", 1, 8)
    changes = {"train__global_batch_size": 64, "checkpoint__every": 10}
    in_thread, waiting = (
        goodput(
            make_plan(load(write_recipe(tmp_path, **changes, checkpoint__async=background)), topology),
            card, 2.0, 80 * 10**9, 100,
        )
        for background in (True, False)
    )  # fmt: skip
    assert in_thread.write_s == 80 and in_thread.blocked_s == pytest.approx(10**10 / card.pcie_bw)
    assert waiting.write_s == 0 and waiting.blocked_s == pytest.approx(in_thread.blocked_s + 80)
    assert waiting.share < in_thread.share
    assert waiting.every > in_thread.every >= 40, "a checkpoint begins when the one before is complete"
    # Ten steps take 20 seconds, and then wait another 60 until the checkpoint before is written.
    assert in_thread.own_share == pytest.approx(0.25, abs=0.01)


def test_the_costs_of_two_intervals_are_shown(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__global_batch_size=64, checkpoint__every=10)
    plan = make_plan(load(recipe), Topology("cuda", 4, 8))
    cost = {"run_s": 100 * HOUR, "gpu_hours": 3200.0, "dollars": 8000.0}
    lost = goodput(plan, KNOWN["h100-80gb"], 2.0, 80 * 10**9, 400)
    assert failures_line(lost, plan, 400).startswith("a node fails every 400 hours on average, so one of the job's 4 ")
    header, (best, own) = failure_table(lost, 2.0, plan, cost)
    assert header == ["", "interval", "lost time", "run", "GPU-hours", "failures", "cost"]
    assert best[0] == f"checkpoint.every={lost.every} (loses least)" and own[0] == "checkpoint.every=10 (the recipe's)"
    assert own[1] == "0:20" and own[2] == f"{1 - lost.own_share:.2%}"
    for row, share in ((best, lost.share), (own, lost.own_share)):
        gpu_hours, failures, dollars = (float(cell.strip("$").replace(",", "")) for cell in row[4:])
        assert gpu_hours == pytest.approx(3200 / share, rel=1e-3) and dollars == pytest.approx(8000 / share, rel=1e-3)
        assert failures == pytest.approx(100 / share / 100, rel=0.1)  # the job fails every 100 hours
    assert "is complete 20 s later; a failure costs 320 s until" in failure_lines(lost, plan)[0]  # 4 nodes write
    # Without the number of steps only shares are known; with a failure a second the run would not end.
    assert [len(row) for row in failure_table(lost, 2.0, plan, {})[1]] == [3, 3]
    constant = goodput(plan, KNOWN["h100-80gb"], 2.0, 80 * 10**9, 4 / 3600)
    assert {row[3] for row in failure_table(constant, 2.0, plan, cost)[1]} == {"never ends"}
