"""Do in the server's own process what commands and workers do, so that the processes it forks have it all imported."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from histories.world import STEPS, make_inputs

from fsdptrain import cli
from fsdptrain.config.reader import load
from fsdptrain.launch.agent import worker_environment
from fsdptrain.launch.run_lock import claim_run_dir
from fsdptrain.plan.network import unused_port
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest
from fsdptrain.train.worker import train


def warm_up(folder: Path) -> None:
    """Train a run in `folder`, look at it, and export each of its steps. All stays there: nothing has disturbed it."""
    make_inputs(folder)
    written = load(folder / "recipe.yaml", ["checkpoint.keep=100"])
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    environment = dict(os.environ)
    os.environ.update(worker_environment(plan, 0, 0, str(folder / "error.json")) | {"MASTER_PORT": str(unused_port())})
    transformers.utils.logging.disable_progress_bar()

    def first_run() -> None:
        with claim_run_dir(plan, written.text, fresh=False), StopRequest() as stop:
            train(plan, stop, None)

    # A process that has computed gradients with a CUDA build of torch may have threads, and then cannot be forked.
    (in_a_fork if torch.version.cuda else call)(first_run)
    os.environ.clear()
    os.environ.update(environment)
    run = str(folder / "runs" / "run")
    for words in (["run", str(folder / "recipe.yaml")], ["status", run], ["status", run, "--json"], ["verify", run]):
        quietly(cli.main, words)
    for step in range(1, STEPS + 1):
        quietly(cli.main, ["export", run, "--step", str(step), "--out", f"{folder}/exports/{step}", "--no-compare"])


def call(work: Callable[[], None]) -> None:
    """Do some work in this process."""
    work()


def in_a_fork(work: Callable[[], None]) -> None:
    """Do some work in a fork of this process."""
    if (child := os.fork()) == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def quietly(main: Callable[[], object], words: list[str]) -> None:
    """Call the command line in this process."""
    streams, arguments = (sys.stdout, sys.stderr), sys.argv
    sys.argv = ["fsdptrain", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    finally:
        sys.stdout, sys.stderr = streams
        sys.argv = arguments
