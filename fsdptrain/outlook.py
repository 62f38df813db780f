"""A forecast in words: memory, communication, time and the verdict, as the person at the terminal reads them."""

from __future__ import annotations

from fsdptrain.errors import DoesNotFit
from fsdptrain.forecast import Forecast
from fsdptrain.plan import Plan
from fsdptrain.report import size
from fsdptrain.text import duration

TRAFFIC_HEADER = ["collective", "ranks", "where", "a step", "buffers", "on the wire, a rank"]


def memory_lines(forecast: Forecast) -> list[str]:
    """The peak, when it comes, and what is taken beside it."""
    lines = [f"the peak of the worst rank: {size(forecast.peak_bytes)} allocated, in the {forecast.moment}"]
    if forecast.reserved_bytes > forecast.peak_bytes:
        lines.append(f"the caching allocator then holds {size(forecast.reserved_bytes)}, fragments included")
    lines.append(
        f"beside it, unseen by torch: {size(forecast.overhead_bytes)} "
        + ("for the process and its libraries" if forecast.hardware == "cpu" else "for the CUDA context and NCCL")
    )
    if forecast.host_bytes >= 2**20:
        lines.append(f"and in host memory: {size(forecast.host_bytes)} a rank")
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
    """What a step sends, and what the book says of it."""
    wire = sum(traffic["wire"] for traffic in forecast.collectives)
    between = sum(traffic["wire"] for traffic in forecast.collectives if traffic["nodes"] > 1)
    book = ", ".join(f"{name} {size(amount)}" for name, amount in forecast.textbook.items())
    return [
        f"a rank sends {size(wire)} a step, {size(between)} of it in rings that cross nodes",
        f"by the book, for one micro-batch: {book}",
    ]


def time_lines(forecast: Forecast, plan: Plan, steps: int | None) -> list[str]:
    """The step, rates, and the whole run."""
    world = plan.topology.world_size
    low, high = forecast.step_s_range
    each = "" if world == 1 else f" ({forecast.tokens_per_s / world:,.0f} a rank)"
    lines = [
        f"a step takes {forecast.step_s:.3g} s, give or take: {low:.3g} to {high:.3g}; "
        f"{forecast.tokens_per_s:,.0f} tok/s{each}, MFU {forecast.mfu:.1%}",
        f"of it compute {forecast.compute_s:.3g} s ({_tera(forecast.flops)} TFLOP a rank, recomputation and "
        f"attention included); collectives alone {forecast.communication_s:.3g} s; {forecast.exposed_s:.3g} s idle",
    ]
    if steps is None:
        return [*lines, "how many steps there are is not known without the data; or say train.steps"]
    what = "rank-hours" if plan.topology.device == "cpu" else "GPU-hours"
    hours = [steps * seconds / 3600 for seconds in (forecast.step_s, low, high)]
    total = f"{hours[0] * world:,.1f} {what} ({hours[1] * world:,.1f} to {hours[2] * world:,.1f})"
    return [*lines, f"{steps:,} steps take {duration(hours[0] * 3600)}: {total}"]


def _tera(count: float) -> str:
    return f"{count / 1e12:,.0f}" if count >= 1e14 else f"{count / 1e12:.3g}"


def verdict(forecast: Forecast) -> str:
    """Whether it fits, in one line."""
    share = f"{size(forecast.needed_bytes)} of {size(forecast.memory_bytes)}"
    if forecast.tight:
        return (
            f"fits only just: {share} would be wanted, and the allocator must give back and ask again, which is slow; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
        )
    return f"fits: {share}" if forecast.fits else f"does not fit: {share}"


def refusal(forecast: Forecast) -> DoesNotFit:
    """That it does not fit, with ways out."""
    return DoesNotFit(
        f"{verdict(forecast)}; `fsdptrain validate --advise` searches for plans that do, the usual steps being "
        "fsdp.activation_checkpointing=full, train.micro_batch_size=1, more ranks, fsdp.cpu_offload=true"
    )
