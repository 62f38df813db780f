"""One rank of `fsdptrain prepare --teacher`: fill the cache with the outputs of the teacher, and train nothing."""

from __future__ import annotations

import contextlib
import os
from typing import NoReturn

from fsdptrain.failures.watchdog import Watchdog
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import StopRequest
from fsdptrain.run_folder.events import Reporter
from fsdptrain.terminal.screen import Screen
from fsdptrain.train import worker
from fsdptrain.train.setup import Session, join_ranks
from fsdptrain.train.teacher import with_teacher


def ask(plan: Plan, stop: StopRequest, screen: Screen | None) -> None:
    """Compute on this rank what the cache lacks, as a run does before it builds the student."""
    rank = int(os.environ["RANK"])
    with (
        Watchdog(plan, rank) as watchdog,
        contextlib.closing(Reporter(None if rank else plan.rundir)) as reporter,
        worker.group_left_at_end(watchdog),
    ):
        session = Session(plan, reporter, stop, watchdog)
        with_teacher(session, *join_ranks(session))


def main() -> NoReturn:
    """Do it for the plan in the file argv[1]."""
    worker.main(ask)
