"""One rank of a run: set it up, train, and leave the process with the right exit code.

set up: plan → data → world → model → shard → resume → engine
train:  while steps remain: evaluate? save? done? step → report
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
import transformers

from fsdptrain.config.plan import Plan, read_plan
from fsdptrain.errors import RecipeError, Stopped
from fsdptrain.events import Reporter
from fsdptrain.processes import STOP_SIGNAL, StopRequest
from fsdptrain.rundir import RunDir
from fsdptrain.screen import Screen
from fsdptrain.train.failure import leave_record, ours, record_failure
from fsdptrain.train.setup import Session
from fsdptrain.train.trainer import Trainer
from fsdptrain.train.watchdog import Watchdog


def train(plan: Plan, stop: StopRequest, screen: Screen | None) -> None:
    """Run the plan on this rank. Raises Stopped when a stop signal ended it, another FsdptrainError when it failed."""
    rundir, rank = RunDir(Path(plan.run_dir)), int(os.environ["RANK"])
    with (
        Watchdog(plan, rank) as watchdog,
        contextlib.closing(reporter_of(plan, rundir, rank, screen)) as reporter,
    ):
        try:
            # plan → data → world → model → shard → resume → engine
            trainer = Trainer.set_up(Session(plan, rundir, reporter, stop, watchdog))
        except Stopped:
            reporter.event("stop", step=0, signal=stop.name or "another rank")
            raise
        # while steps remain: evaluate? save? done? step → report
        stopped_at = trainer.train()
        if stopped_at is None and plan.recipe.export.at_end:
            stopped_at = trainer.export()
        if stopped_at is not None:
            reporter.event("stop", step=stopped_at, signal=stop.name or "another rank")
            raise Stopped(f"stopped by {stop.by or 'another rank'} after step {stopped_at}, with a checkpoint")


def reporter_of(plan: Plan, rundir: RunDir, rank: int, screen: Screen | None) -> Reporter:
    """The pen of the first rank; the others' do nothing."""
    return Reporter(rundir, plan.recipe.log.tensorboard, screen) if rank == 0 else Reporter(None)


def quiet_libraries() -> None:
    """Keep transformers' bars out of the log: loading has a bar of ours."""
    transformers.utils.logging.disable_progress_bar()


def work(plan: Plan) -> NoReturn:
    """Be one rank, and leave the process with the right exit code.

    Leaves by `os._exit`: an interpreter that shuts down after FSDP and gloo aborts now and then (pytorch#179291).
    """
    faulthandler.enable()
    quiet_libraries()
    joined = plan.topology.joined
    code = 0
    try:
        with StopRequest(*(() if joined else (STOP_SIGNAL,))) as stop:
            if joined and os.environ["RANK"] == "0":
                with Screen() as screen:
                    started = time.monotonic()
                    train(plan, stop, screen)
                    screen.summary(time.monotonic() - started)
            else:
                train(plan, stop, None)
    except Stopped as stopped:
        print(f"fsdptrain: {stopped}", file=sys.stderr)
        code = stopped.exit_code if joined else 0  # to torchrun, a worker that did what it was told has not failed
    except BaseException as error:
        ending = ours(error)
        with contextlib.suppress(OSError):  # a full disk must not hide why we end
            record_failure(plan, ending)
            traceback.print_exc()
        code = ending.exit_code
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """Be one rank of the plan that the agent names, with the output in a file of its own."""
    try:
        plan = read_plan(Path(sys.argv[1]))
    except RecipeError as error:
        leave_record(error)
        sys.exit(error.exit_code)
    log = RunDir(Path(plan.run_dir)).rank_log(int(os.environ["RANK"]))
    with log.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    work(plan)
