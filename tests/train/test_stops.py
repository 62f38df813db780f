"""Stop requests are exchanged rarely, and by all ranks at the same call."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ranks import build
from support import events, on_ranks, write_recipe

from fsdptrain.parallel.world import World
from fsdptrain.train import pace
from fsdptrain.train.pace import MOST, StopPoll
from fsdptrain.train.trainer import Trainer


def test_all_ranks_exchange_at_the_same_calls_however_fast_each_of_them_is(tmp_path: Path) -> None:
    first, second = on_ranks(2, polls, tmp_path / "ranks", recipe=str(write_recipe(tmp_path)))
    assert first == second, "the second rank is slower"
    exchanged, stopped_at = first["meta"]
    assert exchanged[:2] == [1, 2] and len(exchanged) < 35, "most calls exchange nothing"
    assert stopped_at == exchanged[-1] and 40 <= stopped_at <= 40 + MOST
    assert first["cpu"] == [[*range(1, 41)], 40], "every call exchanges on a CPU"


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


def polls(recipe: str) -> dict[str, list[Any]]:
    """Call StopPoll on a device without and with a queue; return the calls that exchanged, and the last one.

    The second rank is slower, and wants to stop from call 40 on.
    """
    world, pace.NOTICED_S = build(recipe, []).world, 0.02
    return {device: polled(world, device) for device in ("meta", "cpu")}


def polled(world: World, device: str) -> list[Any]:
    call, exchanged, request = 0, list[int](), SimpleNamespace(count=0)

    def gather(mine: torch.Tensor) -> Any:
        exchanged.append(call)
        return world.gather(mine)

    poll = StopPoll(SimpleNamespace(device=torch.device(device), gather=gather), request)  # type: ignore[arg-type]
    stopped = False
    while not stopped:
        call += 1
        request.count = int(world.rank == 1 and call >= 40)
        stopped = poll()
        time.sleep(0.002 * world.rank)
    return [exchanged, call]


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
