"""A dry run in a process of its own: every level of a run, in order, without launching it.

The levels below the recipe are plan, machine, data, model, and step (memory, communication, time). A level with a
problem does not stop the next one, so that all problems are reported together. `request` sends the
request; `docs/validate.md` documents the values that `--json` prints.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers

from fsdptrain.config.schedule import warmup_note
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.errors import RecipeError
from fsdptrain.forecast.forecaster import Forecaster
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import answer_parent, records_of_parent
from fsdptrain.text import counted
from fsdptrain.validate.costs import check_step
from fsdptrain.validate.data import check_data, choose
from fsdptrain.validate.findings import Findings
from fsdptrain.validate.machine import check_machine
from fsdptrain.validate.model import check_model
from fsdptrain.validate.request import Request


def dry_run(request: Request, findings: Findings, forecaster: Forecaster | None = None) -> None:
    """Check every level of a run, each as far as possible.

    If the model is built, without weights, and the plan has no problems, `forecaster` forecasts the step.
    """
    plan = request.plan
    for problem in request.problems:
        findings.add_problem(RecipeError(problem))
    if not request.problems:
        values, lines = describe_plan(plan)
        findings.add_values("plan", values, "Plan", *lines)
    with findings.continue_on_error():
        check_machine(plan, findings)
    vocab_size, steps = check_data(plan, findings)
    if steps and (note := warmup_note(steps, plan.recipe.optim, plan.recipe.schedule)):
        findings.add_warning(note)
    if request.build:
        with findings.continue_on_error():
            config = check_model(plan, vocab_size, steps, findings, request.hardware)
            if forecaster and not request.problems:
                check_step(request, config, vocab_size, steps, findings, forecaster)


def describe_plan(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Return what is shown of a plan, and lines that explain how its ranks share a step."""
    train, topology, seq_len = plan.recipe.train, plan.topology, plan.recipe.data.seq_len
    values = {
        "strategy": plan.recipe.fsdp.strategy, "world_size": topology.world_size, "replicas": plan.replicas,
        "shard_size": plan.shard_size, "accumulation": plan.accumulation,
        "tokens_per_step": train.global_batch_size * seq_len, "source": topology.source or None,
        "least_nodes": topology.least_nnodes,
    }  # fmt: skip
    device = ("GPU" if topology.device == "cuda" else "CPU rank") + "s" * (topology.world_size > 1) + topology.origin
    copies = "one copy of the model" if plan.replicas == 1 else f"{plan.replicas} copies of the model, each"
    spread = f"sharded over {plan.shard_size} ranks" if plan.shard_size > 1 else "on one rank"
    micro, size = counted(plan.accumulation, "micro-batch", "es"), counted(train.micro_batch_size, "sequence")
    fewer = [
        f"on {counted(each.topology.nnodes, 'node')}: {each.ranks_text} × "
        f"{counted(each.accumulation, 'micro-batch', 'es')} × {size}"
        for each in plan.on_each_number()
    ][1:]
    return values, [
        f"{values['strategy']} on {topology.nnodes} × {topology.nproc_per_node} {device}: {copies} {spread}",
        f"a step: {train.global_batch_size} sequences of {seq_len:,} tokens ({values['tokens_per_step']:,} tokens) = "
        f"{plan.ranks_text} × {micro} × {size}",
        *([f"if nodes are lost: {'; '.join(fewer)}"] if fewer else []),
    ]


def main() -> None:
    """Answer the request of the parent with records of progress, and the outcome last."""
    send = answer_parent()

    # The levels report what matters among transformers' warnings.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    request = Request.from_record(next(records_of_parent()))
    findings = Findings(send, elsewhere=request.hardware is not None or request.choose)
    for note in request.notes:
        findings.add_note(note)
    go_offline_if_unreachable(request.plan, findings.send_progress)
    if request.choose:
        with findings.continue_on_error():
            request = dataclasses.replace(request, plan=choose(request.plan, findings))
            findings.send_outcome("so far")
        if findings.problems:  # nothing could be chosen
            findings.send_outcome("outcome")
            return
    with Forecaster() as forecaster:
        dry_run(request, findings, forecaster)
    for option, requested, key in (("--plot", request.plot, "plot"), ("--advise", request.advise, "advice")):
        if requested and key not in findings.step | findings.levels:
            findings.add_note(f"{option} was skipped: the step could not be simulated")
    findings.send_outcome("outcome")
