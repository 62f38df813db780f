"""The forecasting process: gets jobs as records, and answers each with a forecast.

`forecast.forecaster.Forecaster` starts it and sends the jobs.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from fsdptrain.config.optimizers import HALF
from fsdptrain.config.schema import Parallel
from fsdptrain.errors import FsdptrainError, to_record
from fsdptrain.forecast import allocator, plot, timing
from fsdptrain.forecast import trace as ledger
from fsdptrain.forecast.depth import simulate_by_depth
from fsdptrain.forecast.device import PRETEND
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.forecast.kept import kept_or_made
from fsdptrain.forecast.kernels import NAMES, attention_kernels
from fsdptrain.forecast.simulation import progress
from fsdptrain.forecast.trace import HOST, Collective, Kernel, Trace
from fsdptrain.model import varlen
from fsdptrain.model.adapters import freeze, quantised_ids
from fsdptrain.model.attention import choose_attention, flash_recommendation
from fsdptrain.model.config import load_config
from fsdptrain.model.expert_parallel import check_experts
from fsdptrain.model.pipeline import check_stages, layers_of_stages
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.tensor_parallel import check_layers
from fsdptrain.model.units import bytes_in_host, model_flops, weights_of
from fsdptrain.parallel.world import matrix_rate
from fsdptrain.plan.hardware import BEYOND_RUNS, CALIBRATED, SAME_CHIP, Hardware
from fsdptrain.plan.plan import Plan, fastest_on_one_gpu, varied
from fsdptrain.processes import answer_parent, records_of_parent
from fsdptrain.text import seconds

MAX_ALLOCATED = 0.97  # of torch's share of the card: with more allocated, releasing fragments does not help


def estimate(plan: Plan, config: PreTrainedConfig, hardware: Hardware, drawing: Path | None = None) -> Forecast:
    """Simulate a step of the plan and compute its forecast from the trace. Raises RecipeError if the run would."""
    notes = []
    bare = None
    if plan.recipe.model.attn_implementation in ("auto", "sdpa"):
        plan, bare = choose_attention(plan, config, hardware.prefers_cudnn, hardware.has_flash)
    # A kernel that cannot run on fake tensors is simulated as sdpa without a mask, on a card that computes at its rate.
    kernel, masked = plan.recipe.model.attn_implementation, plan.recipe.documents_share_sequences
    flash = {varlen.NAME: hardware.flash, "flash_attention_2": "flash", "flex_attention": "flex"}.get(kernel)
    if kernel in ("flash_attention_2", "flex_attention"):
        plan, masked = varied(plan, {"model.attn_implementation": "sdpa"}), False
    card = hardware
    if flash is not None and not hardware.is_cpu:
        hardware = hardware.with_attention(flash)
    model = counted_model(plan, config) if bare is None or plan.freezes else bare
    parallel = plan.recipe.parallel
    check_layers(model if bare is None else bare, parallel.tensor)
    check_experts(model if bare is None else bare, parallel.experts)
    check_stages(model, parallel)
    weights = weights_of(model, quantised_ids(model, plan.recipe)).values()
    suited = fastest_on_one_gpu(plan, weights, hardware.memory)
    if suited is not plan:
        fsdp = suited.recipe.fsdp
        notes.append(
            f"one GPU: {plan.recipe.fsdp.strategy} runs as {fsdp.strategy} with accumulation {fsdp.accumulation}: "
            "weights are copied once a step, and gradients are reduced once"
        )
        plan = suited
    # The simulation gives the trace; memory, traffic and time are computed from that alone.
    if hardware.is_cpu:
        hardware = measured_cpu(hardware, plan)
    device, places = HOST if hardware.is_cpu else PRETEND, simulated_places(model, parallel)
    traces = {place: simulate_by_depth(plan, config, model, hardware, masked, place) for place in dict.fromkeys(places)}
    memories = {place: memory_of(each, device, hardware) for place, each in traces.items()}
    fullest = max(memories, key=lambda place: memories[place]["reserved_bytes"] + memories[place]["overhead_bytes"])
    trace = traces[fullest]
    if drawing:
        title = f"{plan.recipe.name}: {plan.recipe.fsdp.strategy} over {plan.topology.world_size} ranks"
        plot.draw_timeline(trace, device, hardware.memory, drawing, title, block_bytes(hardware))
    sent = ledger.traffic(trace.repeated(plan.accumulation), plan.topology.nproc_per_node)
    tokens = plan.recipe.train.global_batch_size * plan.recipe.data.seq_len
    useful_flops = model_flops(model, tokens, plan.recipe.data.seq_len)
    attention = [] if hardware.is_cpu else attention_kernels(trace.events, flash or "flash")
    time = time_of(plan, traces, places, hardware, tokens, useful_flops, attention)
    if kernel == varlen.NAME and attention and (name := card.faster_flash):
        faster = time_of(plan, traces, places, card.with_attention(name), tokens, useful_flops)["step_s"]
        if seconds(faster) != (now := seconds(time["step_s"])):
            notes.append(f"{flash_recommendation(name)}; its forecast: {seconds(faster)} s a step instead of {now} s")
    # Stages are about equally large.
    host_bytes = (plan.host_state_bytes(weights) + bytes_in_host(plan, model)) // parallel.pipeline
    return Forecast(
        **memories[fullest],
        host_bytes=0 if hardware.is_cpu else host_bytes,
        collectives=[dataclasses.asdict(each) for each in sent],
        **time,
        attention=" and ".join(attention),
        model_flops=useful_flops,
        hardware=hardware.name,
        method="fake CPU" if hardware.is_cpu else "pretended accelerator",
        notes=notes,
    )


def counted_model(plan: Plan, config: PreTrainedConfig) -> Any:
    """Return a skeleton with which parameters and FLOPs are counted: no kernel changes them."""
    compute = plan.recipe.fsdp.mixed_precision.param_dtype
    return freeze(skeleton(config, plan.recipe.model, compute), plan.recipe)


def simulated_places(model: Any, parallel: Parallel) -> list[int]:
    """Return for each place of a pipeline, and for one without, the place whose simulation stands for it.

    The first has the embedding, and the activations of the most micro-batches, the last one the head. Of those between,
    the first that has the most layers stands for all.
    """
    last = parallel.pipeline - 1
    if last < 2:
        return [*range(parallel.pipeline)]
    stages = layers_of_stages(model, parallel)
    layers = [sum(map(len, stages[place :: parallel.pipeline])) for place in range(parallel.pipeline)]
    most = max(range(1, last), key=lambda place: layers[place])
    return [0, *[most] * (last - 1), last]


def measured_cpu(hardware: Hardware, plan: Plan) -> Hardware:
    """Return the hardware of this machine: a rank's share of its memory, and the matrix rate of a rank's threads."""
    torch.set_num_threads(plan.threads)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    compute = plan.recipe.fsdp.mixed_precision.param_dtype
    half = getattr(torch, compute if compute in HALF else "bfloat16")
    rate = {dtype: matrix_rate(torch.device(HOST), dtype) for dtype in (half, torch.float32)}
    return dataclasses.replace(
        hardware, memory=total // plan.topology.nproc_per_node, flops=rate[half], flops32=rate[torch.float32]
    )


def block_bytes(hardware: Hardware) -> int:
    """Return the multiple of bytes that the allocator of a device rounds sizes up to."""
    return 1 if hardware.is_cpu else allocator.GRANULARITY


def memory_of(trace: Trace, device: str, hardware: Hardware) -> dict[str, Any]:
    """Return the peak and its parts, and whether it fits together with the memory that torch does not allocate."""
    granularity = block_bytes(hardware)
    top = ledger.peak(trace, device, granularity)
    groups = {(e.ranks, e.apart) for e in trace.events if isinstance(e, Collective) and len(e.ranks) > 1}
    overhead = hardware.context + hardware.communicator * len(groups)
    available = hardware.memory - overhead
    reserved, tight = top.allocated, False
    if not hardware.is_cpu:
        reserved = allocator.reserved_bytes(trace, device)
        tight = reserved > available and top.allocated <= MAX_ALLOCATED * available
    return {
        "fits": reserved <= available or tight,
        "tight": tight,
        "memory_bytes": hardware.memory,
        "peak_bytes": top.allocated,
        "reserved_bytes": reserved,
        "overhead_bytes": overhead,
        "moment": top.moment,
        "breakdown": {name: size for name, size in top.by_category.items() if size},
        "peaks": ledger.peaks(trace, device, granularity),
    }


def time_of(
    plan: Plan, traces: Mapping[int, Trace], places: list[int], hardware: Hardware, tokens: int, useful_flops: float,
    attention: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return seconds and rates. MFU counts the model's own FLOPs, as the run does, without recomputation.

    `traces` are those of the `simulated_places`, and `places` those. `attention` are the names of the kernels that
    compute it.
    """
    half = plan.recipe.fsdp.mixed_precision.param_dtype in HALF
    recompute_s = timing.recomputation_s(plan.recipe.fsdp.recomputation)
    ranks, compiled = plan.topology.nproc_per_node, plan.compiles and not hardware.is_cpu
    timings = {
        place: timing.replay_step(trace, plan.accumulation, hardware, half, ranks, recompute_s, compiled)
        for place, trace in traces.items()
    }
    timed, waiting = timings[0], 0.0
    if len(places) > 1:
        message = next(each for each in traces[0].events if isinstance(each, Collective) and each.kind == "message")
        message_s = timing.collective_s(message, hardware, ranks)
        timed, waiting = timing.time_stages(plan.recipe.parallel, timings, places, plan.accumulation, message_s)
    peak = plan.topology.world_size * (hardware.flops if half else hardware.flops32)
    spread, basis = hardware.spread, hardware.basis
    if basis in (CALIBRATED, SAME_CHIP) and (differs := beyond_runs(plan, traces[0], attention)):
        spread, basis = spread + BEYOND_RUNS, f"{basis}, but none {differs}"
    return {
        "flops": timed.flops,
        "step_s": timed.step_s,
        "step_s_range": [timed.step_s * (1 - spread), timed.step_s * (1 + spread)],
        "time_basis": basis,
        "compute_s": timed.compute_s,
        "communication_s": timed.communication_s,
        "exposed_s": timed.exposed_s,
        "waiting_share": waiting,
        "tokens_per_s": tokens / timed.step_s,
        "mfu": useful_flops / (timed.step_s * peak),
    }


def beyond_runs(plan: Plan, trace: Trace, attention: Iterable[str]) -> str:
    """Return how a plan differs from all published runs that the times of cards are calibrated on; "" if it does not.

    docs/calibration.md has the errors of these runs.
    """
    recipe = plan.recipe
    others = " and ".join(kernel for kernel in attention if kernel != NAMES["flash"])
    return " or ".join(
        what
        for what, differs in (
            ("on more than 512 GPUs", plan.topology.world_size > 512),
            ("with rows of more than 8,192 tokens", recipe.data.seq_len > 8192),
            ("with micro-batches of less than 4,096 tokens", recipe.train.micro_batch_size * plan.tokens_of_row < 4096),
            (f"with attention by {others}", others != ""),
            ("with experts", any("grouped_mm" in event.name for event in trace.events if isinstance(event, Kernel))),
            ("with frozen weights", plan.freezes),
            ("in a pipeline", recipe.parallel.pipeline > 1),
            ("with offloading", recipe.fsdp.cpu_offload),
            ("in float8", recipe.train.float8 is not None),
            ("in float32", recipe.fsdp.mixed_precision.param_dtype == "float32"),
        )
        if differs
    )


def main() -> None:
    """Answer each job of the parent with its forecast as a dict, or `{"error": record}` for an error of the recipe."""
    send = answer_parent()
    gc.disable()  # as a run does; it takes a quarter of the time, for there are many events
    for job in records_of_parent():
        plan, hardware, folder = Plan.from_json(job["plan"]), Hardware(**job["hardware"]), job.get("config_dir")
        drawing = Path(job["plot"]) if job.get("plot") else None
        progress[:] = [lambda *stage: send({"progress": stage})] if job.get("progress") else []
        try:
            if folder and not plan.trust_remote_code:  # trusted code is registered by `load_config` alone
                config = AutoConfig.from_pretrained(folder)
            else:
                config = load_config(plan, job.get("vocab_size"))
            make = partial(estimate, config=config, hardware=hardware, drawing=drawing)
            model = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
            forecast = make(plan) if drawing else kept_or_made(plan, model, hardware, make)
            send(dataclasses.asdict(forecast))
        except FsdptrainError as error:
            send({"error": to_record(error)})
        gc.collect()
