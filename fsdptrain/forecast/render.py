"""A forecast in words: memory, communication, time and the verdict, as the person at the terminal reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdptrain.config.plan import Plan
from fsdptrain.errors import DoesNotFit
from fsdptrain.forecast.client import Forecast
from fsdptrain.text import duration, size

TRAFFIC_HEADER = ["collective", "ranks", "where", "calls", "buffers", "sent by a rank"]


def memory_lines(forecast: Forecast) -> list[str]:
    """The peak, when it comes, and what is taken beside it."""
    lines = [f"{size(forecast.peak_bytes)} allocated at the peak, in the {forecast.moment}"]
    if forecast.reserved_bytes > forecast.peak_bytes:
        lines.append(f"{size(forecast.reserved_bytes)} held by the caching allocator then, fragments included")
    lines.append(
        f"{size(forecast.overhead_bytes)} outside torch, "
        + ("for the process and its libraries" if forecast.hardware == "cpu" else "for the CUDA context and NCCL")
    )
    if forecast.host_bytes >= 2**20:
        lines.append(f"{size(forecast.host_bytes)} of host memory")
    if forecast.tight:
        lines.append(
            "so little is left that the allocator must give cached memory back and ask again, which is slow; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
        )
    return lines


def traffic_rows(forecast: Forecast) -> list[list[str]]:
    """The collectives of a step, under `TRAFFIC_HEADER`."""
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
    """What a step sends, and what the textbook formulas say of it."""
    wire = sum(traffic["wire"] for traffic in forecast.collectives)
    if not wire:
        return ["none: there is one rank"]
    between = sum(traffic["wire"] for traffic in forecast.collectives if traffic["nodes"] > 1)
    book = ", ".join(f"{name} {size(amount)}" for name, amount in forecast.textbook.items())
    return [
        f"a rank sends {size(wire)} in all" + (f", {size(between)} of it in rings that cross nodes" if between else ""),
        f"for comparison, by the textbook, for one micro-batch: {book}",
    ]


def time_lines(forecast: Forecast, plan: Plan, cost: Mapping[str, Any]) -> list[str]:
    """The step, rates, and the whole run, whose `cost` is known if the number of steps is."""
    world, unit = plan.topology.world_size, _unit(plan)
    low, high = (seconds / forecast.step_s for seconds in forecast.step_s_range)
    each = "" if world == 1 else f" ({forecast.tokens_per_s / world:,.0f} a {unit})"
    lines = [
        f"{forecast.step_s:.3g} s a step ({low * forecast.step_s:.3g} to {high * forecast.step_s:.3g}); "
        f"{forecast.tokens_per_s:,.0f} tok/s{each}; MFU {forecast.mfu:.1%}",
        f"computing alone takes {forecast.compute_s:.3g} s ({_tera(forecast.flops)} TFLOP a rank, recomputation and "
        f"attention included), collectives alone {forecast.communication_s:.3g} s; {forecast.exposed_s:.3g} s of the "
        "step are spent waiting",
    ]
    if not cost:
        return [*lines, "how many steps there are is not known without the data: give train.steps"]
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
    """Whether it fits, how fast and how dear it is, in one line; `step` is what `--json` says of the forecast."""
    world, gpu = plan.topology.world_size, plan.topology.device == "cuda"
    where = f"{world}×{step['hardware'].upper()}" if gpu else f"{world} CPU rank{'s' * (world > 1)}"
    needed, capacity = size(step["needed_bytes"]), size(step["memory_bytes"])
    number, unit = needed.split()
    share = f"{number if capacity.endswith(unit) else needed} of {capacity} a {_unit(plan)}"
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


def does_not_fit_error(verdict: str, searched: bool) -> DoesNotFit:
    """That it does not fit, with ways out; `searched`: other plans are shown already."""
    search = "plans that do are above, if there are any" if searched else "search for plans that do with --advise"
    return DoesNotFit(
        f"{verdict}; {search}; the usual ways out are fsdp.activation_checkpointing=full, train.micro_batch_size=1, "
        "more ranks, fsdp.cpu_offload=true"
    )
