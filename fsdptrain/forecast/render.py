"""The forecast as text for the terminal: memory, communication, time and the verdict; and the plans of a search."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from fsdptrain.errors import DoesNotFit
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.forecast.search import (
    SAME_TIME,
    Advice,
    Option,
    changes_that_save_memory,
    other_kinds_note,
    override_words,
)
from fsdptrain.plan.plan import Plan
from fsdptrain.text import counted, duration, seconds, size

MEMORY_HEADER = ["", "size", "share"]
LEAST_SHARE = 0.001  # of all memory in use: smaller parts are not in the table
TRAFFIC_HEADER = ["collective", "ranks", "where", "calls", "buffers", "sent by a rank"]
ADVICE_SHOWN = 8  # plans in the table, besides the recipe's own
ADVICE_HEADER = ["", "strategy", "micro-batches", "recomputed", "memory", "a step", "tok/s", "MFU", ""]
ADVICE_TITLES = 2  # the first cells of a row, which name the plan


def memory_lines(forecast: Forecast) -> list[str]:
    """Return the peak, its moment, and the memory that torch does not allocate."""
    lines = [f"{size(forecast.peak_bytes)} allocated at the peak, in the {forecast.moment}"]
    if forecast.reserved_bytes > forecast.peak_bytes:
        least = size(forecast.peak_bytes + forecast.overhead_bytes)
        lines.append(
            f"{size(forecast.reserved_bytes)} reserved by the caching allocator, fragments included; a smaller card "
            f"({least} at least, what is outside torch included) would free cached memory and retry, with slower steps"
        )
    lines.append(
        f"{size(forecast.overhead_bytes)} outside torch: "
        + ("the process and its libraries" if forecast.hardware == "cpu" else "the CUDA context and NCCL")
    )
    if forecast.host_bytes >= 2**20:
        lines.append(f"{size(forecast.host_bytes)} of host memory")
    free = forecast.memory_bytes - forecast.needed_bytes
    rest = f"{size(free)} free" if free >= 0 else f"{size(-free)} TOO MUCH"
    if forecast.tight:
        rest = "only just, because the allocator must release cached memory and retry, which is slow"
    return [*lines, f"{size(forecast.needed_bytes)} of {size(forecast.memory_bytes)}: {rest}"]


def memory_rows(forecast: Forecast) -> list[list[str]]:
    """Return the parts of the peak with the columns of MEMORY_HEADER, the largest first, and what no tensor holds."""
    parts = sorted(forecast.breakdown.items(), key=lambda part: -part[1])
    fragments = forecast.reserved_bytes - forecast.peak_bytes
    return [
        [name, size(part), f"{part / forecast.memory_bytes:.1%}"]
        for name, part in (*parts, ("fragments", fragments), ("outside torch", forecast.overhead_bytes))
        if part > LEAST_SHARE * forecast.needed_bytes
    ]


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
    """Return what a rank sends in a step."""
    wire = sum(traffic["wire"] for traffic in forecast.collectives)
    if not wire:
        return ["none: there is one rank"]
    network = sum(traffic["network"] for traffic in forecast.collectives)
    line = f"a rank sends {size(wire)} in all"
    if network:
        line += f", {size(network)} of it to other nodes"
    return [line]


def time_lines(forecast: Forecast, plan: Plan, cost: Mapping[str, Any]) -> list[str]:
    """Return the time of a step, rates, and the time of the run; `cost` is empty if the number of steps is unknown."""
    world, unit = plan.topology.world_size, _unit(plan)
    low, high = forecast.step_s_range
    each = "" if world == 1 else f" ({forecast.tokens_per_s / world:,.0f} a {unit})"
    attention = f"; attention by {forecast.attention}" if forecast.attention else ""
    tera = f"{forecast.flops / 1e12:,.0f}" if forecast.flops >= 1e14 else f"{forecast.flops / 1e12:.3g}"
    lines = [
        f"{seconds(forecast.step_s)} s a step ({seconds(low)} to {seconds(high)}; rates: {forecast.time_basis}); "
        f"{forecast.tokens_per_s:,.0f} tok/s{each}; MFU {forecast.mfu:.1%}",
        f"compute alone takes {seconds(forecast.compute_s)} s ({tera} TFLOP a rank, recomputation and "
        f"attention included{attention}), collectives alone {seconds(forecast.communication_s)} s; the step waits "
        f"{seconds(forecast.exposed_s)} s for what compute does not hide",
    ]
    parallel = plan.recipe.parallel
    if parallel.pipeline > 1:
        lines.append(
            f"the {parallel.pipeline} groups of ranks of the pipeline wait for one another in "
            f"{forecast.waiting_share:.1%} of their time, and less with more micro-batches a step"
        )
    if parallel.experts > 1:
        lines.append("all experts are assumed to get as many tokens: if a router prefers some, the step takes longer")
    if not cost:
        return [*lines, "the number of steps is unknown without the data: set train.steps to get the total"]
    hours, steps = cost["gpu_hours"], cost["run_s"] / forecast.step_s
    ends = " to ".join(_amount(hours * end / forecast.step_s) for end in (low, high))
    total = f"{_amount(hours)} {unit}-hours ({ends})"
    if "dollars" in cost:
        total += f"; {_dollars(cost['dollars'])} at {_dollars(cost['price_per_gpu_hour'])} a GPU-hour"
    return [*lines, f"{steps:,.0f} steps take {duration(cost['run_s'])}: {total}"]


def _unit(plan: Plan) -> str:
    return "rank" if plan.topology.device == "cpu" else "GPU"


def _amount(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}"


def verdict(step: Mapping[str, Any], plan: Plan) -> str:
    """Return one line: whether the plan fits, its speed and its cost. `step` has the forecast's keys of `--json`."""
    world, gpu = plan.topology.world_size, plan.topology.device == "cuda"
    where = f"{world}×{step['hardware'].upper()}" if gpu else f"{world} CPU rank{'s' * (world > 1)}"
    needed, capacity = size(step["needed_bytes"]), size(step["memory_bytes"])
    number, unit = needed.split()
    share = f"{number if capacity.endswith(unit) else needed} of {capacity} a {_unit(plan)}"
    if plan.recipe.fsdp.cpu_offload and step.get("host_bytes"):
        share += f", and {size(step['host_bytes'])} of host memory each"
    if not step["fits"]:
        return f"does not fit {where}: {share}"
    parts = [f"fits {where}{', but only just' if step.get('tight') else ''}: {share}"]
    if "step_s" in step:
        parts.append(f"{seconds(step['step_s'])} s a step")
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
    on_gpus = plan.topology.device != "cpu"
    tried = [*map(shlex.quote, override_words(saving)), *(["more ranks"] if on_gpus else [])]
    tries = f"or try one or more of: {', '.join(tried)}" if tried else ""
    other = other_kinds_note(plan) if on_gpus else ""
    return DoesNotFit("; ".join(filter(None, [verdict, search, tries, other])))


def shown_options(options: list[Option]) -> list[Option]:
    """Return the ranked options to show: the fastest, and the recipe's own."""
    return [option for number, option in enumerate(options) if number < ADVICE_SHOWN or option.own]


def advice_rows(options: list[Option]) -> list[list[str]]:
    """Return the rows of the options, with the columns of `ADVICE_HEADER`."""
    return [[f"{number}", *_option_cells(option, options[0])] for number, option in enumerate(options, 1)]


def why_slower(option: Option, best: Option) -> str:
    """Return what takes the time by which a plan is slower than the best: most of it, in seconds; "" for none."""
    if not best.fits or option.step_s < SAME_TIME * best.step_s:
        return ""
    waiting_s, of_best_s = (each.waiting_share * each.step_s for each in (option, best))
    longer = {
        "computes": option.compute_s - best.compute_s,
        "stages wait": waiting_s - of_best_s,
        "waits for collectives": (option.step_s - option.compute_s - waiting_s)
        - (best.step_s - best.compute_s - of_best_s),
    }
    cause = max(longer, key=lambda cause: longer[cause])
    return f"{cause} {seconds(longer[cause])} s longer"


def _option_cells(option: Option, best: Option) -> list[str]:
    hybrid = f" of {option.shard_size}" if option.strategy.in_groups else ""
    divided = {key.removeprefix("parallel."): n for key, n in option.overrides.items() if key.startswith("parallel.")}
    marks = {
        "yours": option.own,
        "does not fit": not option.fits,
        "only just": option.fits and option.tight,
        ", ".join(f"{key} {ranks}" for key, ranks in divided.items()): bool(divided),
        "hold_shards": option.overrides.get("fsdp.accumulation") == "hold_shards",
        f"and {size(option.host_bytes)} of host memory": option.cpu_offload,
        why_slower(option, best): option.fits,
    }
    return [
        option.strategy + hybrid,
        f"{option.accumulation} × {option.micro_batch_size}",
        _recomputed(option.activation_checkpointing),
        size(option.needed_bytes),
        f"{seconds(option.step_s)} s",
        f"{option.tokens_per_s:,.0f}",
        f"{option.mfu:.1%}",
        ", ".join(mark for mark, applies in marks.items() if mark and applies),
    ]


def _recomputed(value: str | dict[str, Any]) -> str:
    """Return a value of `fsdp.activation_checkpointing` as a cell."""
    if isinstance(value, str):
        return value
    marks = {"keep_attention": "attention kept", "offload": "offloaded"}
    kept = [mark for name, mark in marks.items() if value.get(name)]
    return f"every {value['every']}" if "every" in value else ", ".join([value["kind"], *kept])


def advice_lines(advice: Advice) -> list[str]:
    """Return what the search found, in a few lines."""
    best, own = advice.best, next(option for option in advice.options if option.own)
    found = [f"{advice.tried} other plans were tried; a rank has {size(own.memory_bytes)}"]
    if best is None:
        found.append("no plan fits")
    elif best.own:
        found.append("your plan is the fastest that fits")
    elif own.fits and own.step_s < SAME_TIME * best.step_s:
        found.append("your plan is about as fast as the fastest that fits")
    else:
        gain = f"{own.step_s / best.step_s:.2f} times as fast as yours" if own.fits else "yours does not fit"
        found.append(f"the fastest that fits takes {seconds(best.step_s)} s a step, {gain}")
    found += advice.refused
    if advice.failed:
        found.append(f"{counted(len(advice.failed), 'plan')} could not be forecast; the first: {advice.failed[0]}")
    return found
