"""A dry run in a process of its own: every level of a run, in order, without launching it.

The levels below the recipe are plan, machine, data, model, and step (memory, communication, time). A level with a
problem does not stop the next one, so that all problems are reported together. `request` sends the
request; `docs/validate.md` documents the values that `--json` prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.errors import RecipeError
from fsdptrain.forecast.forecaster import Forecast, Forecaster
from fsdptrain.forecast.render import (
    ADVICE_HEADER,
    ADVICE_TITLES,
    MEMORY_HEADER,
    TRAFFIC_HEADER,
    advice_lines,
    advice_rows,
    does_not_fit_error,
    memory_lines,
    memory_rows,
    shown_options,
    time_lines,
    traffic_lines,
    traffic_rows,
    verdict,
)
from fsdptrain.forecast.search import override_words, search
from fsdptrain.model.attention import installed_flash
from fsdptrain.plan.hardware import CPU, CUSTOM, Hardware, card, dtype_fault
from fsdptrain.plan.plan import Counts, Plan
from fsdptrain.processes import answer_parent, records_of_parent
from fsdptrain.text import counted, duration
from fsdptrain.train.optim import warmup_note
from fsdptrain.validation.data import check_data, choose
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.machine import check_machine
from fsdptrain.validation.model import check_model
from fsdptrain.validation.request import Request

MEMORY = "Peak memory (highest rank)"
COMMUNICATION = "Communication per step"
ADVICE = "Other plans for the same job"
MOST_FORECASTERS, CORES_OF_FORECASTER = 4, 2  # of a search; there are two at least


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
            check_model(plan, vocab_size, steps, findings, request.hardware)
            if forecaster and not request.problems:
                check_step(request, vocab_size, steps, findings, forecaster)


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
    lines = [
        f"{values['strategy']} on {topology.nnodes} × {topology.nproc_per_node} {device}: {copies} {spread}",
        f"a step: {train.global_batch_size} sequences of {seq_len:,} tokens ({values['tokens_per_step']:,} tokens) = "
        f"{plan.ranks_text} × {micro} × {size}",
    ]
    if fewer:
        lines.append(f"if nodes are lost: {'; '.join(fewer)}")
    return values, lines


def check_step(
    request: Request,
    vocab_size: int | None,
    steps: int | None,
    findings: Findings,
    forecaster: Forecaster,
) -> None:
    """Forecast a step, and add a problem if it does not fit.

    Raise RecipeError if the engine refuses the plan, and FsdptrainError if the step cannot be simulated.
    """
    # Without the figures of the card, or on a card without units for the recipe's dtypes, there is nothing to simulate.
    plan, hardware = request.plan, request.hardware or hardware_here(request.plan)
    if hardware is None:
        if torch.cuda.is_available():  # else there is a problem already
            findings.add_note(
                f"this GPU is unknown: describe it with --hardware {','.join(f'{name}=…' for name in CUSTOM)} to "
                "forecast memory and time"
            )
        return
    if fault := dtype_fault(plan.recipe, hardware.name, hardware.bf16, hardware.float8):
        findings.add_problem(RecipeError(fault))
        return
    findings.send_busy("simulating a step")
    forecast = forecaster.forecast(plan, hardware, vocab_size=vocab_size, plot=request.plot)
    # The forecast comes first, because the verdict reads it; other plans last, because their search takes minutes.
    cost = run_cost(forecast, plan, steps, request.price)
    findings.step = dataclasses.asdict(forecast) | {"needed_bytes": forecast.needed_bytes} | cost
    show_forecast(forecast, plan, cost, findings)
    if not forecast.fits:
        findings.add_problem(does_not_fit_error(verdict(findings.step, plan), plan, searched=request.advise))
    check_least_nodes(plan, hardware, vocab_size, findings, forecaster)
    if request.plot:
        findings.step["plot"] = request.plot
        findings.add_lines(MEMORY, f"plotted over the step in {request.plot}")
    for note in forecast.notes:
        findings.add_note(note)
    if request.advise:
        advise(request, hardware, forecast, vocab_size, findings, forecaster)


def check_least_nodes(
    plan: Plan, hardware: Hardware, vocab_size: int | None, findings: Findings, forecaster: Forecaster
) -> None:
    """Forecast a step on the least number of nodes, which need the most memory; add a problem if it does not fit."""
    if plan.topology.least_nnodes is None:
        return
    fewest = plan.on_nodes(plan.topology.least_nnodes)
    forecast = forecaster.forecast(fewest, hardware, vocab_size=vocab_size)
    step = dataclasses.asdict(forecast) | {"needed_bytes": forecast.needed_bytes}
    findings.step["on_least_nodes"] = step
    nodes = counted(fewest.topology.nnodes, "node")
    findings.add_lines(MEMORY, f"on {nodes}, if others are lost: {verdict(step, fewest)}")
    if not forecast.fits:
        findings.add_problem(does_not_fit_error(f"on {nodes}, {verdict(step, fewest)}", fewest, searched=False))


def run_cost(forecast: Forecast, plan: Plan, steps: int | None, price: float | None) -> dict[str, Any]:
    """Return seconds, GPU-hours and dollars of the whole run; nothing if the number of steps is unknown."""
    if steps is None:
        return {}
    run_s = steps * forecast.step_s
    hours = run_s / 3600 * plan.topology.world_size
    cost = {"run_s": run_s, "gpu_hours": hours}
    return cost if price is None else cost | {"price_per_gpu_hour": price, "dollars": hours * price}


def show_forecast(forecast: Forecast, plan: Plan, cost: dict[str, Any], findings: Findings) -> None:
    """Add the lines, tables and bars of a forecast, and its one-line verdict."""
    findings.add_lines(MEMORY, *memory_lines(forecast))
    findings.add_item(MEMORY, "table", header=MEMORY_HEADER, rows=memory_rows(forecast))
    rows = traffic_rows(forecast)
    if rows:
        findings.add_item(COMMUNICATION, "table", header=TRAFFIC_HEADER, rows=rows)
    findings.add_lines(COMMUNICATION, *traffic_lines(forecast))
    findings.add_lines("Time", *time_lines(forecast, plan, cost))
    if "sequences" in (data := findings.levels.get("data", {})):
        findings.add_lines("Time", *times_beside_steps(forecast.step_s, plan, data))
    findings.forecast = verdict(findings.step, plan)


def times_beside_steps(step_s: float, plan: Plan, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield how long that takes which is in no step; `data` has the numbers of sequences and steps."""
    train, wanted = plan.recipe.train, plan.recipe.eval
    forward_s = step_s / 3  # of a global batch: backward takes twice as long
    held_out_s = data["eval_sequences"] / train.global_batch_size * forward_s
    if train.objective == "dpo":
        reference_s = data["sequences"] / train.global_batch_size * forward_s + held_out_s
        yield f"before step 1, the reference reads all pairs: about {duration(reference_s)}"
    if data["eval_sequences"]:
        often = 1 + -(-data["steps"] // (wanted.every or data["steps"]))
        micro_batches = -(-len(wanted.prompts) // train.micro_batch_size)  # every rank computes all of them
        prompts_s = wanted.max_new_tokens * micro_batches * forward_s / plan.accumulation
        prompts = f", and up to {duration(prompts_s)} more for eval.prompts" if wanted.prompts else ""
        yield f"beside the steps, {often:,} evaluations: about {duration(held_out_s)} each{prompts}"


def advise(
    request: Request,
    hardware: Hardware,
    own: Forecast,
    vocab_size: int | None,
    findings: Findings,
    forecaster: Forecaster,
) -> None:
    """Search other plans for the same job on the same ranks, and add those that fit, the fastest first."""
    model = findings.levels["model"]
    counts = Counts(*(model[f"{kind}parameters"] for kind in ("", "trainable_", "adapter_", "quantised_")))
    others = max(1, min(MOST_FORECASTERS, (os.cpu_count() or 1) // CORES_OF_FORECASTER) - 1)
    with contextlib.ExitStack() as stack:  # as many plans are forecast at a time as there are processes
        forecasters = [forecaster, *(stack.enter_context(Forecaster()) for _ in range(others))]
        advice = search(
            request.plan, hardware, own, [each.forecast for each in forecasters], counts,
            lambda tried: findings.send_progress("comparing plans", tried, 0), vocab_size=vocab_size,
        )  # fmt: skip
    findings.levels["advice"] = dataclasses.asdict(advice)
    findings.add_lines(ADVICE, *advice_lines(advice))
    options = shown_options(advice.options)
    findings.add_item(ADVICE, "table", header=ADVICE_HEADER, rows=advice_rows(options), titles=ADVICE_TITLES)
    commands = [(number, option) for number, option in enumerate(options, 1) if not option.own]
    if commands:
        findings.add_lines(ADVICE, "append the overrides of a plan to the command:")
    for number, option in commands:
        findings.add_lines(ADVICE, f"plan {number}:")
        findings.add_item(ADVICE, "command", words=override_words(option.overrides))


def hardware_here(plan: Plan) -> Hardware | None:
    """Return the hardware of this machine; None for a GPU that is not in the table, or that torch does not see."""
    if plan.topology.device == "cpu":
        return CPU
    if not torch.cuda.is_available():
        return None
    properties, (major, _) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability(0)
    return card(properties.name, properties.total_memory, next(iter(installed_flash(major)), "flash"))


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
    if not (request.choose and findings.problems):  # else nothing could be chosen
        with Forecaster() as forecaster:
            dry_run(request, findings, forecaster)
    for option, requested, key in (("--plot", request.plot, "plot"), ("--advise", request.advise, "advice")):
        if requested and key not in findings.step | findings.levels:
            findings.add_note(f"{option} was skipped: the step could not be simulated")
    send({"event": "outcome", **dataclasses.asdict(findings.outcome())})
