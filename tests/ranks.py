"""Jobs that run on every rank of a real gloo process group (see `support.on_ranks`); each returns something JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdptrain.export import export_live
from fsdptrain.launch import StopRequest
from fsdptrain.optim import learning_rate
from fsdptrain.plan import find_topology, make_plan
from fsdptrain.recipe import load
from fsdptrain.report import Reporter
from fsdptrain.rundir import RunDir
from fsdptrain.worker import Run, assemble

torch.set_num_threads(1)


def build(recipe: str, overrides: list[str]) -> tuple[Run, Any]:
    """The assembled run of a recipe on this process group, and the bare skeleton of its model."""
    written = load(Path(recipe), overrides)
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    return assemble(plan, RunDir(Path(plan.run_dir)), Reporter(None), StopRequest())


def curve(run: Run, steps: int, first: int = 0) -> list[list[float]]:
    """[loss, gradient norm] of each step from `first` to `steps`."""
    made = []
    for step in range(first, steps):
        batches = [run.stream.batch(micro) for micro in run.plan.micro_batches(step, run.world.rank)]
        tokens = run.stream.label_tokens(run.plan.step_positions(step))
        lr = learning_rate(step, run.total_steps, run.plan.recipe.optim, run.plan.recipe.schedule)
        stats = run.engine.step(step, batches, tokens, lr)
        made.append([stats.loss, stats.grad_norm])
    return made


def curves(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """The curve of each variant (name → overrides), one after the other."""
    return {name: curve(build(recipe, overrides)[0], steps) for name, overrides in variants.items()}


def save_between(recipe: str, overrides: list[str], at: int, steps: int) -> dict[str, Any]:
    """The curve of a run that saves a checkpoint after `at` steps and goes on, and what it saw of the data."""
    run, _ = build(recipe, overrides)
    made = curve(run, at)
    run.checkpointer.save(at, run.engine.model, run.engine.optimizer, wait=False)
    made += curve(run, steps, at)
    run.checkpointer.wait()
    return {"curve": made, "samples": [run.stream.digest(run.plan.step_positions(step)) for step in range(steps)]}


def resume(recipe: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """The curve of a run that goes on from its newest checkpoint."""
    run, _ = build(recipe, overrides)
    first = run.engine.steps_made
    samples = [run.stream.digest(run.plan.step_positions(step)) for step in range(first, steps)]
    return {"first": first, "curve": curve(run, steps, first), "samples": samples}


def exports(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Make some steps of each variant and export it; what went wrong, by name."""
    wrong = {}
    for name, overrides in variants.items():
        try:
            run, bare = build(recipe, overrides)
            curve(run, steps)
            export_live(run.engine.model, bare, run.checkpointer.rundir, run.plan, run.checkpointer, run.reporter)
        except Exception:
            wrong[name] = traceback.format_exc()
    return wrong


if __name__ == "__main__":
    result = globals()[sys.argv[1]](**json.loads(sys.argv[3]))
    (Path(sys.argv[2]) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
