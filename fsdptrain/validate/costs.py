"""The step level of a dry run: memory, communication, time and cost of a step, and other plans for the same job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from fsdptrain.errors import RecipeError
from fsdptrain.forecast.forecaster import Forecast, Forecaster
from fsdptrain.forecast.render import (
    ADVICE_HEADER,
    ADVICE_TITLES,
    TRAFFIC_HEADER,
    advice_commands,
    advice_lines,
    advice_rows,
    cards_line,
    does_not_fit_error,
    memory_lines,
    time_lines,
    traffic_lines,
    traffic_rows,
    verdict,
)
from fsdptrain.forecast.search import Advice, search
from fsdptrain.model.attention import installed_flash
from fsdptrain.plan.hardware import CPU, CUSTOM, Hardware, card, dtype_fault
from fsdptrain.plan.plan import Counts, Plan
from fsdptrain.text import counted, duration
from fsdptrain.validate.findings import Findings
from fsdptrain.validate.request import Request

MEMORY = "Memory of the worst rank"
COMMUNICATION = "Communication per step"
ADVICE = "Other plans for the same job"


def check_step(
    request: Request,
    config: PreTrainedConfig,
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
    document = findings.levels.get("data", {}).get("document")
    forecast = forecaster.forecast(plan, hardware, vocab_size=vocab_size, plot=request.plot, document=document)
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
        findings.send_outcome("so far")
        advise(request, config, hardware, forecast, vocab_size, findings, forecaster)


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
    fragments = forecast.reserved_bytes - forecast.peak_bytes
    beside = {"fragments": fragments, "outside torch": forecast.overhead_bytes}
    findings.add_item(MEMORY, "memory", by_category=forecast.breakdown, beside=beside, capacity=forecast.memory_bytes)
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
    config: PreTrainedConfig,
    hardware: Hardware,
    own: Forecast,
    vocab_size: int | None,
    findings: Findings,
    forecaster: Forecaster,
) -> None:
    """Search other plans for the same job on the same ranks, and add those that fit, the fastest first."""
    model = findings.levels["model"]
    counts = Counts(*(model[f"{kind}parameters"] for kind in ("", "trainable_", "adapter_", "quantised_")))

    def progress(done: int, total: int, what: str = "comparing plans") -> None:
        findings.send_progress(what, done, total)

    def so_far(advice: Advice) -> None:  # shown if Ctrl-C stops the search
        show_advice(advice, hardware, findings)
        findings.send_outcome("so far")

    with Forecaster() as second:  # two processes, so that two plans are forecast at a time
        forecasters = [forecaster.forecast, second.forecast]
        advice = search(
            request.plan, hardware, own, forecasters, counts, config.to_dict(), progress,
            count_cards=not request.choose,
            so_far=so_far, vocab_size=vocab_size,
        )  # fmt: skip
    show_advice(advice, hardware, findings)


def show_advice(advice: Advice, hardware: Hardware, findings: Findings) -> None:
    """Add the plans of a search in place of those that were known before."""
    findings.levels["advice"] = dataclasses.asdict(advice)
    findings.sections.pop(ADVICE, None)
    findings.add_lines(ADVICE, *advice_lines(advice))
    if advice.cards:
        findings.add_lines(ADVICE, cards_line(advice, hardware.name))
    rows = advice_rows(advice.options)
    findings.add_item(ADVICE, "table", header=ADVICE_HEADER, rows=rows, titles=ADVICE_TITLES)
    commands = advice_commands(advice)
    if commands:
        findings.add_lines(ADVICE, "append the overrides of a plan to the command:")
    for name, words in commands:
        findings.add_lines(ADVICE, name)
        findings.add_item(ADVICE, "command", words=words)


def hardware_here(plan: Plan) -> Hardware | None:
    """Return the hardware of this machine; None for a GPU that is not in the table, or that torch does not see."""
    if plan.topology.device == "cpu":
        return CPU
    if not torch.cuda.is_available():
        return None
    properties, (major, _) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability(0)
    return card(properties.name, properties.total_memory, next(iter(installed_flash(major)), "flash"))
