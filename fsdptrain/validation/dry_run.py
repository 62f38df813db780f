"""A dry run in a process of its own: every level of a run, in order, without launching it.

The levels below the recipe are plan, machine, data, model, and step (memory, communication, time). A level with a
problem does not stop the next one, so that all problems are reported together. `request` sends the
request; `docs/validate.md` documents the values that `--json` prints.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from fsdptrain.checkpoint.nodes import existing_parent
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.errors import FsdptrainError, RecipeError
from fsdptrain.forecast import render
from fsdptrain.forecast.forecaster import Forecast, Forecaster
from fsdptrain.forecast.search import override_words, search
from fsdptrain.launch.run_lock import check_run_dir
from fsdptrain.model.attention import installed_flash
from fsdptrain.plan.gpus import unused_cards_note
from fsdptrain.plan.hardware import CPU, CUSTOM, Hardware, card, dtype_fault
from fsdptrain.plan.limits import fatal_limits, risky_limits, uncompiled_note
from fsdptrain.plan.network import address_of
from fsdptrain.plan.plan import Counts, Plan
from fsdptrain.plan.topology import NO_ENDPOINT
from fsdptrain.text import counted, duration, size
from fsdptrain.train.optim import warmup_note
from fsdptrain.train.setup import gpu_fault
from fsdptrain.validation.data import check_data, choose
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.model import attention_available, check_model, check_teacher
from fsdptrain.validation.request import Request

MEMORY = "Peak memory (highest rank)"
COMMUNICATION = "Communication per step"
ADVICE = "Other plans for the same job"


def dry_run(request: Request, findings: Findings, *forecasters: Forecaster) -> None:
    """Check every level of a run, each as far as possible.

    If the model is built, without weights, and the plan has no problems, the first of `forecasters` forecasts the step.
    As many plans are forecast at a time as there are processes.
    """
    plan = request.plan
    for problem in request.problems:
        findings.add_problem(RecipeError(problem))
    if not request.problems:
        _check_plan(plan, findings)
    with findings.continue_on_error():
        _check_machine(plan, findings)
    vocab_size, steps = check_data(plan, findings)
    if steps and (note := warmup_note(steps, plan.recipe.optim, plan.recipe.schedule)):
        findings.add_warning(note)
    if request.build:
        with findings.continue_on_error():
            check_model(plan, vocab_size, steps, findings, request.hardware)
            hardware = request.hardware or hardware_here(plan)
            with findings.continue_on_error():
                check_teacher(plan, vocab_size, hardware.memory if hardware else 0, findings)
            if forecasters and not request.problems:
                check_step(request, hardware, vocab_size, steps, findings, forecasters)


def _check_machine(plan: Plan, findings: Findings) -> None:
    """Record what this machine has, and a problem for each thing that the run needs and it lacks."""
    machine = describe_machine(plan)
    findings.add_values("machine", machine, "This machine")
    for error in machine_problems(plan, machine):
        findings.add_problem(error, this_machine_only=True)
    workers, cores = plan.topology.nproc_per_node, machine["cpu"]["cores"]
    if plan.topology.device == "cpu" and workers > cores:
        findings.add_note(f"{workers} workers share {counted(cores, 'core')}")
    if findings.elsewhere:
        return
    for note in (uncompiled_note(plan), unused_cards_note(os.environ)):
        if note:
            findings.add_note(note)
    names = [f"{gpu['name']} {size(gpu['memory_bytes'])}" for gpu in machine["gpus"]]
    cpu = f"{machine['cpu']['cores']} cores, {size(machine['cpu']['memory_bytes'])} of RAM"
    kinds = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    findings.add_lines(
        "This machine",
        f"{' + '.join([*kinds, cpu])}; torch {machine['torch']}, transformers {machine['transformers']}",
    )


def describe_machine(plan: Plan) -> dict[str, Any]:
    """Return the devices of this machine, and what torch and transformers support on them."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    kernel = plan.recipe.model.attn_implementation
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "cpu": {
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        },
        "attention": {"kernel": kernel, "available": attention_available(kernel)},
    }


def machine_problems(plan: Plan, machine: dict[str, Any]) -> Iterator[FsdptrainError]:
    """Yield an error for each thing that the run needs and this machine lacks; another machine may have it."""
    yield from node_problems(plan, machine)
    if plan.topology.nnodes > 1 and plan.topology.endpoint is None:
        yield RecipeError(f"launch.nnodes: {NO_ENDPOINT}")
    elif plan.topology.endpoint is not None:
        try:
            host, _ = parse_rendezvous_endpoint(plan.topology.endpoint, default_port=0)
        except ValueError as error:
            yield RecipeError(f"launch.rdzv_endpoint: {error}")
        else:
            if not plan.topology.joined and address_of(host) is None:
                yield plan.topology.unknown_host()


def node_problems(plan: Plan, machine: dict[str, Any]) -> Iterator[FsdptrainError]:
    """Yield those of `machine_problems` that are left when the workers of all nodes have met."""
    kernel = machine["attention"]["kernel"]
    if fault := gpu_fault(plan.topology, len(machine["gpus"]), os.environ):
        yield RecipeError(fault)
    if not machine["attention"]["available"]:
        yield RecipeError(
            f"model.attn_implementation: {kernel} is not available: install flash-attn (needs a GPU of compute "
            "capability 8.0), or use auto"
        )
    for problem in fatal_limits(plan):
        yield RecipeError([problem])
    for risk in risky_limits(plan):
        yield RecipeError(risk)
    folder = existing_parent(Path(plan.run_dir))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield RecipeError(f"output_dir: cannot write to {folder}")
    try:
        check_run_dir(plan, fresh=plan.recipe.checkpoint.resume == "never")
    except FsdptrainError as error:
        yield error


def _check_plan(plan: Plan, findings: Findings) -> None:
    """Record the plan, and how its ranks share a step."""
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
    micro, rows = counted(plan.accumulation, "micro-batch", "es"), counted(train.micro_batch_size, "sequence")
    fewer = [
        f"on {counted(each.topology.nnodes, 'node')}: {each.ranks_text} × "
        f"{counted(each.accumulation, 'micro-batch', 'es')} × {rows}"
        for each in plan.on_each_number()
    ][1:]
    lines = [
        f"{values['strategy']} on {topology.nnodes} × {topology.nproc_per_node} {device}: {copies} {spread}"
        + plan.division_text
        + ", with the state in host memory (fsdp.cpu_offload)" * plan.recipe.fsdp.cpu_offload,
        f"a step: {counted(train.global_batch_size, 'sequence')} of {seq_len:,} tokens "
        f"({values['tokens_per_step']:,} tokens) = {plan.ranks_text} × {micro} × {rows}",
    ]
    if fewer:
        lines.append(f"if nodes are lost: {'; '.join(fewer)}")
    findings.add_values("plan", values, "Plan", *lines)


def check_step(
    request: Request,
    hardware: Hardware | None,
    vocab_size: int | None,
    steps: int | None,
    findings: Findings,
    forecasters: Sequence[Forecaster],
) -> None:
    """Forecast a step, and add a problem if it does not fit.

    Raise RecipeError if the engine refuses the plan, and FsdptrainError if the step cannot be simulated.
    """
    # Without the figures of the card, or on a card without units for the recipe's dtypes, there is nothing to simulate.
    plan = request.plan
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
    forecast = forecasters[0].forecast(plan, hardware, findings.send_progress, vocab_size=vocab_size, plot=request.plot)
    # The forecast comes first, because the verdict reads it; other plans last, because their search takes minutes.
    cost: dict[str, Any] = {}
    if steps is not None:
        cost = {"run_s": steps * forecast.step_s}
        cost["gpu_hours"] = cost["run_s"] / 3600 * plan.topology.world_size
        if request.price is not None:
            cost |= {"price_per_gpu_hour": request.price, "dollars": cost["gpu_hours"] * request.price}
    findings.step = dataclasses.asdict(forecast) | {"needed_bytes": forecast.needed_bytes} | cost
    _show_forecast(forecast, plan, cost, findings)
    if not forecast.fits:
        findings.add_problem(
            render.does_not_fit_error(render.verdict(findings.step, plan), plan, searched=request.advise)
        )
    _check_least_nodes(plan, hardware, vocab_size, findings, forecasters[0])
    if request.plot:
        findings.step["plot"] = request.plot
        findings.add_lines(MEMORY, f"plotted over the step in {request.plot}")
    for note in forecast.notes:
        findings.add_note(note)
    if request.advise:
        _advise(request, hardware, forecast, vocab_size, findings, forecasters)


def _check_least_nodes(
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
    findings.add_lines(MEMORY, f"on {nodes}, if others are lost: {render.verdict(step, fewest)}")
    if not forecast.fits:
        findings.add_problem(
            render.does_not_fit_error(f"on {nodes}, {render.verdict(step, fewest)}", fewest, searched=False)
        )


def _show_forecast(forecast: Forecast, plan: Plan, cost: dict[str, Any], findings: Findings) -> None:
    """Add the lines, tables and bars of a forecast, and its one-line verdict."""
    findings.add_lines(MEMORY, *render.memory_lines(forecast))
    findings.add_item(MEMORY, "table", header=render.MEMORY_HEADER, rows=render.memory_rows(forecast))
    rows = render.traffic_rows(forecast)
    if rows:
        findings.add_item(COMMUNICATION, "table", header=render.TRAFFIC_HEADER, rows=rows)
    findings.add_lines(COMMUNICATION, *render.traffic_lines(forecast))
    if forecast.fits or plan.topology.device != "cpu":  # else it is most probably a recipe for GPUs
        findings.add_lines("Time", *render.time_lines(forecast, plan, cost))
        if "sequences" in (data := findings.levels.get("data", {})):
            findings.add_lines("Time", *times_beside_steps(forecast.step_s, plan, data))
            if teacher := findings.levels.get("teacher"):
                tokens = (data["sequences"] + data["eval_sequences"]) * plan.recipe.data.seq_len
                teacher_s = tokens * teacher["forward_flops_per_token"] * forecast.step_s / forecast.model_flops
                findings.add_lines(
                    "Time", f"before step 1, the teacher reads {tokens:,} tokens: about {duration(teacher_s)}"
                )
    findings.forecast = render.verdict(findings.step, plan)


def times_beside_steps(step_s: float, plan: Plan, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield how long that takes which is in no step; `data` has the numbers of sequences and steps."""
    train, wanted = plan.recipe.train, plan.recipe.eval
    passes = 1 + train.objective.estimates_kl
    forward_s = step_s / (2 + passes)  # of a global batch: backward takes twice as long
    held_out_s = passes * data["eval_sequences"] / train.global_batch_size * forward_s
    if train.objective.needs_reference:
        reference_s = passes * data["sequences"] / train.global_batch_size * forward_s + held_out_s
        yield f"before step 1, the reference reads all {train.objective.unit}s: about {duration(reference_s)}"
    if data["eval_sequences"]:
        often = 1 + -(-data["steps"] // (wanted.every or data["steps"]))
        micro_batches = -(-len(wanted.prompts) // train.micro_batch_size)  # every rank computes all of them
        prompts_s = wanted.max_new_tokens * micro_batches * forward_s / plan.accumulation
        prompts = f", and up to {duration(prompts_s)} more for eval.prompts" if wanted.prompts else ""
        yield f"beside the steps, {often:,} evaluations: about {duration(held_out_s)} each{prompts}"


def _advise(
    request: Request,
    hardware: Hardware,
    own: Forecast,
    vocab_size: int | None,
    findings: Findings,
    forecasters: Sequence[Forecaster],
) -> None:
    """Search other plans for the same job on the same ranks, and add those that fit, the fastest first."""
    model = findings.levels["model"]
    counts = Counts(*(model[f"{kind}parameters"] for kind in ("", "trainable_", "adapter_", "quantised_")))
    advice = search(
        request.plan, hardware, own, [each.forecast for each in forecasters], counts,
        lambda tried: findings.send_progress("comparing plans", tried, 0), experts=model["experts"],
        vocab_size=vocab_size,
    )  # fmt: skip
    findings.levels["advice"] = dataclasses.asdict(advice)
    findings.add_lines(ADVICE, *render.advice_lines(advice))
    options = render.shown_options(advice.options)
    findings.add_item(
        ADVICE, "table", header=render.ADVICE_HEADER, rows=render.advice_rows(options), titles=render.ADVICE_TITLES
    )
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


def answer(request: Request, forecasters: Sequence[Forecaster], send: Callable[[dict[str, Any]], None]) -> None:
    """Make the dry run of a request; send records of progress, and the outcome last."""
    # The levels report what matters among transformers' warnings.
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    findings = Findings(send, elsewhere=request.hardware is not None or request.choose)
    for note in request.notes:
        findings.add_note(note)
    go_offline_if_unreachable(request.plan, findings.send_progress)
    if request.choose:
        with findings.continue_on_error():
            request = dataclasses.replace(request, plan=choose(request.plan, findings))
    if not (request.choose and findings.problems):  # else nothing could be chosen
        dry_run(request, findings, *forecasters)
    for option, requested, key in (("--plot", request.plot, "plot"), ("--advise", request.advise, "advice")):
        if requested and key not in findings.step | findings.levels:
            findings.add_note(f"{option} was skipped: the step could not be simulated")
    send({"event": "outcome", **dataclasses.asdict(findings.outcome())})
