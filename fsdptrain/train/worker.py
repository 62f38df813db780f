"""One rank of a run: set it up, train, export, and end the process with the right exit code.

set up: plan → data → world → model → shard → resume → engine
train:  while steps remain: evaluate? save? done? step → report
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
import transformers

from fsdptrain.errors import NodeWaits, RecipeError, Stopped
from fsdptrain.failures.translate import as_fsdptrain_error, first_line_of, record_failure, write_error_file
from fsdptrain.failures.watchdog import Watchdog
from fsdptrain.plan.plan import ONLY_TEACHER, Plan, read_plan
from fsdptrain.processes import JOIN_SIGNAL, STOP_SIGNAL, StopRequest
from fsdptrain.report.run_banner import next_steps
from fsdptrain.report.trackers import tracked
from fsdptrain.run_folder.events import Reporter
from fsdptrain.run_folder.files import open_to_append
from fsdptrain.terminal.page import Page
from fsdptrain.terminal.screen import Screen
from fsdptrain.train.setup import Session, join_ranks
from fsdptrain.train.teacher import with_teacher
from fsdptrain.train.trainer import Trainer


def train(plan: Plan, stop: StopRequest, screen: Screen | None) -> None:
    """Run the plan on this rank. Raises Stopped after a stop signal, another FsdptrainError if the run failed.

    With a range of nodes it raises NodeWaits after a checkpoint, if another node waits to join.
    """
    rank = int(os.environ["RANK"])
    with (
        StopRequest(JOIN_SIGNAL) as join,
        Watchdog(plan, rank) as watchdog,
        # Rank 0 writes the events, and may show them; the others write nothing.
        contextlib.closing(Reporter(None if rank else plan.rundir, *([screen.show] if screen else []))) as reporter,
    ):
        try:
            session = Session(plan, reporter, stop, watchdog, join)
            if ONLY_TEACHER in os.environ:
                with_teacher(session, *join_ranks(session))
                leave_group(watchdog)
                return
            # plan → data → world → model → shard → resume → engine
            trainer = Trainer.set_up(session)
        except Stopped:
            reporter.event("stop", step=0, signal=stop.name or "another rank")
            leave_group(watchdog)
            raise
        # while steps remain: evaluate? save? done? step → report
        stopped_at = trainer.train()
        if stopped_at is None and plan.recipe.export.at_end:
            stopped_at = trainer.export()
        if stopped_at is not None:
            reporter.event("stop", step=stopped_at, signal=stop.name or "another rank")
        leave_group(watchdog)
        if stopped_at is not None:
            raise Stopped(f"stopped by {stop.by or 'another rank'} after step {stopped_at}, with a checkpoint")


def leave_group(watchdog: Watchdog) -> None:
    """Leave the process group after a run that is finished or stopped, watched: NCCL may wait for ever for a rank."""
    if dist.is_initialized():
        watchdog.reset()
        dist.destroy_process_group()


def work(plan: Plan) -> NoReturn:
    """Train as one rank, then end the process with the right exit code.

    It ends by `os._exit`: an interpreter that shuts down after FSDP and gloo sometimes aborts (pytorch#179291).
    """
    faulthandler.enable()
    transformers.utils.logging.disable_progress_bar()  # the set-up reports its own progress
    joined, code = plan.topology.joined, 0
    # The agent sends STOP_SIGNAL; its SIGTERM means that another worker failed. But `scancel` sends SIGTERM to every
    # process of a job, so where a launcher like Slurm started the run, it asks for a checkpoint, too.
    signals = (STOP_SIGNAL, signal.SIGTERM) if plan.topology.source else (STOP_SIGNAL,)
    try:
        with StopRequest(*(() if joined else signals)) as stop:  # none: all signals that stop a command
            if joined and os.environ["RANK"] == "0":  # under torchrun there is no launcher that shows the run
                with Screen() as screen, tracked(plan, screen.say) as trackers:
                    trackers.poll()
                    started = time.monotonic()
                    train(plan, stop, screen)
                    trackers.finish("finished")
                    screen.summary(time.monotonic() - started)
                    next_steps(plan, sys.argv[1:], Page(screen.console))
            else:
                train(plan, stop, None)
    except NodeWaits as waits:
        print(f"fsdptrain: {waits}", file=sys.stderr)
        write_error_file(waits)  # the launcher gets it, and starts the workers again
        code = waits.exit_code
    except Stopped as stopped:
        print(f"fsdptrain: {stopped}", file=sys.stderr)
        code = stopped.exit_code if joined else 0  # for torchrun, a worker that stopped on request has not failed
    except BaseException as error:
        failure = as_fsdptrain_error(error)
        with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
            record_failure(plan, failure)
            traceback.print_exc()
        code = failure.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """Train as one rank of the plan in the file argv[1], with the output in a log file of this rank."""
    try:
        plan = read_plan(Path(sys.argv[1])).on_nodes(int(os.environ["GROUP_WORLD_SIZE"]))
    except RecipeError as error:
        write_error_file(error)
        sys.exit(error.exit_code)
    log = plan.rundir.rank_log(int(os.environ["RANK"]))
    with open_to_append(log) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        with contextlib.suppress(OSError):  # the disk may be full
            os.write(stream.fileno(), first_line_of(os.getpid()))
    work(plan)
