"""The forecast as text for the terminal: memory, communication, time and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdptrain.errors import DoesNotFit, listed
from fsdptrain.forecast.client import Forecast
from fsdptrain.forecast.kinds import leaner_kinds
from fsdptrain.forecast.search import changes_that_save_memory, command_text, override_words
from fsdptrain.plan.plan import Plan
from fsdptrain.text import duration, size

TRAFFIC_HEADER = ["collective", "ranks", "where", "calls", "buffers", "sent by a rank"]


def memory_lines(forecast: Forecast) -> list[str]:
    """Return the peak, its moment, and the memory that torch does not allocate."""
    lines = [f"{size(forecast.peak_bytes)} allocated at the peak, in the {forecast.moment}"]
    if forecast.reserved_bytes > forecast.peak_bytes:
        least = size(forecast.peak_bytes + forecast.overhead_bytes)
        lines.append(
            f"{size(forecast.reserved_bytes)} reserved by the caching allocator, fragments included; a card with less "
            f"memory releases them, down to {least} with what is outside torch, and takes longer for a step"
        )
    lines.append(
        f"{size(forecast.overhead_bytes)} outside torch: "
        + ("the process and its libraries" if forecast.hardware == "cpu" else "the CUDA context and NCCL")
    )
    if forecast.host_bytes >= 2**20:
        lines.append(f"{size(forecast.host_bytes)} of host memory")
    if forecast.tight:
        lines.append("little is left: the allocator must release cached memory and retry, which is slow")
    return lines


def traffic_rows(forecast: Forecast) -> list[list[str]]:
    """Return the table of collectives in a step, with the columns of TRAFFIC_HEADER."""
    return [
        [
            traffic["kind"],
            f"{traffic['ranks']}",
            "inside a node" if traffic["nodes"] == 1 else f"between {traffic['nodes']} nodes",
            f"{traffic['count']:,}",
            size(traffic["size"]),
            size(traffic["wire"]),
        ]
        for traffic in forecast.collectives
        if traffic["ranks"] > 1
    ]


def traffic_lines(forecast: Forecast) -> list[str]:
    """Return what a rank sends in a step, and what the textbook formulas give for comparison."""
    wire = sum(traffic["wire"] for traffic in forecast.collectives)
    if not wire:
        return ["none: there is one rank"]
    network = sum(traffic["network"] for traffic in forecast.collectives)
    book = ", ".join(f"{name} {size(amount)}" for name, amount in forecast.textbook.items())
    return [
        f"a rank sends {size(wire)} in all" + (f", {size(network)} of it to other nodes" if network else ""),
        f"textbook formulas, for one micro-batch: {book}",
    ]


def time_lines(forecast: Forecast, plan: Plan, cost: Mapping[str, Any]) -> list[str]:
    """Return the time of a step, rates, and the time of the run; `cost` is empty if the number of steps is unknown."""
    world, unit = plan.topology.world_size, _unit(plan)
    low, high = (seconds / forecast.step_s for seconds in forecast.step_s_range)
    each = "" if world == 1 else f" ({forecast.tokens_per_s / world:,.0f} a {unit})"
    lines = [
        f"{forecast.step_s:.3g} s a step ({low * forecast.step_s:.3g} to {high * forecast.step_s:.3g}; "
        f"rates: {forecast.time_basis}); "
        f"{forecast.tokens_per_s:,.0f} tok/s{each}; MFU {forecast.mfu:.1%}",
        f"compute alone takes {forecast.compute_s:.3g} s ({_tera(forecast.flops)} TFLOP a rank, recomputation and "
        f"attention included), collectives alone {forecast.communication_s:.3g} s; {forecast.exposed_s:.3g} s of the "
        "step are spent waiting",
    ]
    if plan.compiles:
        lines[0] += "; what train.compile saves is unknown, and not counted"
    if not cost:
        return [*lines, "the number of steps is unknown without the data: set train.steps to get the total"]
    hours = cost["gpu_hours"]
    total = f"{_amount(hours)} {unit}-hours ({_amount(hours * low)} to {_amount(hours * high)})"
    if "dollars" in cost:
        total += f"; {_dollars(cost['dollars'])} at {_dollars(cost['price_per_gpu_hour'])} a GPU-hour"
    return [*lines, f"{cost['run_s'] / forecast.step_s:,.0f} steps take {duration(cost['run_s'])}: {total}"]


def _unit(plan: Plan) -> str:
    return "rank" if plan.topology.device == "cpu" else "GPU"


def _amount(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}"


def _tera(count: float) -> str:
    return f"{count / 1e12:,.0f}" if count >= 1e14 else f"{count / 1e12:.3g}"


def verdict(step: Mapping[str, Any], plan: Plan) -> str:
    """Return one line: whether the plan fits, its speed and its cost. `step` has the forecast's keys of `--json`."""
    world, gpu = plan.topology.world_size, plan.topology.device == "cuda"
    where = f"{world}×{step['hardware'].upper()}" if gpu else f"{world} CPU rank{'s' * (world > 1)}"
    needed, capacity = size(step["needed_bytes"]), size(step["memory_bytes"])
    number, unit = needed.split()
    share = f"{number if capacity.endswith(unit) else needed} of {capacity} a {_unit(plan)}"
    if plan.recipe.fsdp.cpu_offload and step.get("host_bytes"):
        share += f" and {size(step['host_bytes'])} of host memory"
    if not step["fits"]:
        return f"does not fit {where}: {share}"
    parts = [f"fits {where}{', but only just' if step.get('tight') else ''}: {share}"]
    if "step_s" in step:
        parts.append(f"{step['step_s']:.3g} s a step")
    if "run_s" in step:
        parts.append(f"{_amount(step['gpu_hours'])} GPU-hours" if gpu else f"{duration(step['run_s'])} in all")
    if "dollars" in step:
        parts.append(_dollars(step["dollars"]))
    return "; ".join(parts)


def does_not_fit_error(verdict: str, plan: Plan, searched: bool) -> DoesNotFit:
    """Return the error for a plan that does not fit, with what saves memory and is not set in it yet.

    `searched`: other plans were printed.
    """
    search = "plans that fit, if any, are listed above" if searched else "--advise searches for plans that fit"
    saving: dict[str, Any] = {}
    for change in changes_that_save_memory(plan):  # of a key with several values, the last saves the most
        saving |= change
    tries = f"or try {', '.join([*override_words(saving), 'more ranks'])}"
    kinds = [command_text(kind.overrides) for kind in leaner_kinds(plan)]
    other = f"; these need less too, but change what is trained or the numerics: {listed(kinds)}" if kinds else ""
    return DoesNotFit(f"{verdict}; {search}; {tries}{other}")
