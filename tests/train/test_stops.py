"""Stop requests are exchanged rarely, and by all ranks at the same call."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import build
from support import events, on_ranks, write_recipe

from fsdptrain.train import pace
from fsdptrain.train.pace import MOST, StopPoll, count_within
from fsdptrain.train.trainer import Trainer

RANKS, CALLS = 2, 60


@pytest.mark.parametrize(
    ("each_s", "count"), [(0.0, 1), (100.0, 1), (2.6, 1), (1.25, 2), (0.5, 5), (0.001, MOST), (1e-12, MOST)]
)
def test_steps_between_two_reads_take_at_most_half_the_time_in_which_a_stop_is_noticed(
    each_s: float, count: int
) -> None:
    assert count_within(5.0, each_s) == count


class Ranks:
    """A world of threads: `gather` waits for all of them, and notes at which call of its rank it was made."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.values: dict[int, Any] = {}
        self.calls = [0] * RANKS
        self.exchanged: list[list[int]] = [[] for _ in range(RANKS)]
        self.stopped_at = [0] * RANKS

    def of(self, rank: int) -> Any:
        return SimpleNamespace(device=self.device, gather=lambda mine: self.gather(rank, mine))

    def gather(self, rank: int, mine: torch.Tensor) -> Any:
        self.values[rank] = mine.numpy()
        self.exchanged[rank].append(self.calls[rank])
        self.barrier.wait()
        found = np.stack([self.values[other] for other in range(RANKS)])
        self.barrier.wait()
        return found

    def work(self, rank: int) -> None:
        """Make calls, of which the second rank's take longer; it wants to stop from call 40 on."""
        request = SimpleNamespace(count=0)
        poll = StopPoll(self.of(rank), request)  # type: ignore[arg-type]
        for call in range(1, CALLS + 1):
            self.calls[rank] = call
            request.count = int(rank == 1 and call >= 40)
            if poll():
                self.stopped_at[rank] = call
                return
            time.sleep(0.002 * rank)


def made(device: str) -> Ranks:
    ranks = Ranks(device)
    threads = [threading.Thread(target=ranks.work, args=(rank,)) for rank in range(RANKS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return ranks


def test_all_ranks_exchange_at_the_same_calls_however_fast_each_of_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "NOTICED_S", 0.02)
    ranks = made("meta")
    first, second = ranks.exchanged
    assert first == second and first[:2] == [1, 2]
    assert len(first) < 35, "most calls exchange nothing"
    assert ranks.stopped_at == [first[-1]] * RANKS and 40 <= first[-1] <= 40 + MOST


def test_on_a_cpu_every_call_exchanges() -> None:
    ranks = made("cpu")
    assert ranks.exchanged == [[*range(1, 41)]] * RANKS and ranks.stopped_at == [40] * RANKS


def test_each_step_is_evaluated_and_saved_once_however_a_run_is_stopped(tmp_path: Path) -> None:
    """A stop in the evaluation after step 2 is followed by a checkpoint; a resume evaluates what the stop prevented."""
    recipe = write_recipe(
        tmp_path, data__eval={"fraction": 0.1}, eval__every=2, checkpoint__every=100, train__steps=3,
        launch__nproc_per_node=1,
    )  # fmt: skip
    # The rest, then more steps, of which one is saved while they go on: step 3 is evaluated already.
    later = [[], ["train.steps=6", "eval.every=3", "checkpoint.every=4", "checkpoint.keep=9"]]
    [found] = on_ranks(1, stopped_in_evaluation, tmp_path / "ranks", recipe=str(recipe), later=later)
    assert found == [[2, [2], [0]], [None, [2, 3], [0, 2, 3]], [None, [2, 3, 4, 6], [0, 2, 3, 6]]]


# --- on every rank -------------------------------------------------------------------------------------------------


def stopped_in_evaluation(recipe: str, later: list[list[str]]) -> list[Any]:
    """Train until a signal comes in the evaluation after step 2; then go on with each of these overrides.

    Returns after each of them the number of steps at which it was stopped, if it was, and the steps that have a
    checkpoint, and those that have an evaluation.
    """
    run = build(recipe, [])
    on_progress, rundir = run.engine.on_progress, run.session.rundir

    def stopping() -> None:
        on_progress()
        if not run.engine.model.training and run.totals.tokens and not run.session.stop.count:
            os.kill(os.getpid(), signal.SIGTERM)

    run.engine.on_progress = stopping

    def state(run: Trainer) -> list[Any]:
        stopped = run.train()
        assert not run.checkpointer._staging, "an export needs the memory of the copies"
        return [stopped, rundir.checkpoint_steps(), [event["step"] for event in events(rundir.root, "eval")]]

    with run.session.stop:
        found = [state(run)]
    return found + [state(build(recipe, overrides)) for overrides in later]
