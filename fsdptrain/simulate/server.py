"""The forecasting process: plans come in on standard input, a line each, and forecasts go out.

`forecast.Forecaster` starts it, and is the other side.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from fsdptrain.config.hardware import Hardware
from fsdptrain.config.plan import Plan, varied
from fsdptrain.errors import FsdptrainError, to_record
from fsdptrain.forecast import allocator, plot, timing
from fsdptrain.forecast import memory as ledger
from fsdptrain.forecast.client import Forecast
from fsdptrain.forecast.trace import HOST, Collective, Trace
from fsdptrain.model.config import load_config
from fsdptrain.model.flops import model_flops
from fsdptrain.model.skeleton import settle_attention, skeleton
from fsdptrain.parallel.world import matrix_rate
from fsdptrain.simulate.device import PRETEND
from fsdptrain.simulate.step import simulate

GPU_BLOCK = 512  # bytes: the CUDA allocator rounds up to these


def estimate(plan: Plan, config: Any, hardware: Hardware, pretend: bool, drawing: Path | None = None) -> Forecast:
    """Simulate a step of the plan and read everything off its trace. Raises RecipeError as the run would."""
    notes = []
    if plan.recipe.train.compile:
        notes.append("train.compile: what the compiler saves is unknown; these are the figures without it")
        plan = varied(plan, {"train.compile": False})
    if plan.recipe.model.attn_implementation == "auto":
        plan, _ = settle_attention(plan, config)
    kernel = plan.recipe.model.attn_implementation
    if kernel in ("flash_attention_2", "flex_attention"):
        notes.append(f"{kernel}: counted as the flash kernel of torch, without a mask")
        plan = varied(plan, {"model.attn_implementation": "sdpa", "data.packing": "none"})
    if hardware.is_cpu:
        hardware = measured_cpu(hardware, plan)
    trace = simulate(plan, config, pretend)
    device = PRETEND if pretend else HOST
    if drawing:
        title = f"{plan.recipe.name}: {plan.recipe.fsdp.strategy} over {plan.topology.world_size} ranks"
        plot.draw_timeline(trace, device, hardware.memory, drawing, title)
    step = plan.recipe.train.global_batch_size * plan.recipe.data.seq_len
    useful = model_flops(skeleton(config, plan.recipe.model), step, plan.recipe.data.seq_len)
    return Forecast(
        **memory(trace, device, hardware),
        **communication(plan, trace, config),
        **time(plan, trace, hardware, step, useful),
        model_flops=useful,
        hardware=hardware.name,
        method="pretended accelerator" if pretend else "fake CPU",
        notes=notes,
    )


def measured_cpu(hardware: Hardware, plan: Plan) -> Hardware:
    """This machine: its memory shared by the ranks, and the matrix rate of a rank's threads."""
    torch.set_num_threads(plan.threads)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rate = {dtype: matrix_rate(torch.device(HOST), dtype) for dtype in (torch.bfloat16, torch.float32)}
    return dataclasses.replace(
        hardware, memory=total // plan.topology.nproc_per_node, flops=rate[torch.bfloat16], flops32=rate[torch.float32]
    )


def memory(trace: Trace, device: str, hardware: Hardware) -> dict[str, Any]:
    """The peak and its parts, and whether it fits beside what torch does not see."""
    blocks = 1 if hardware.is_cpu else GPU_BLOCK
    top = ledger.peak(trace, device, blocks)
    groups = {e.ranks for e in trace.events if isinstance(e, Collective) and len(e.ranks) > 1}
    overhead = hardware.context + hardware.communicator * len(groups)
    room = hardware.memory - overhead
    reserved, tight = top.allocated, False
    if not hardware.is_cpu:
        reserved = allocator.replay_allocations(trace, device).peak_reserved
        tight = reserved > room and room > 0 and allocator.replay_allocations(trace, device, room).fits
    return {
        "fits": reserved <= room or tight,
        "tight": tight,
        "memory_bytes": hardware.memory,
        "peak_bytes": top.allocated,
        "reserved_bytes": reserved,
        "overhead_bytes": overhead,
        "host_bytes": ledger.peak(trace, HOST).allocated if device != HOST else 0,
        "moment": top.moment,
        "breakdown": {name: size for name, size in top.by_category.items() if size},
        "peaks": ledger.peaks(trace, device, blocks),
    }


def communication(plan: Plan, trace: Trace, config: Any) -> dict[str, Any]:
    """The collectives of a step as they were called, and what the book says of a micro-batch."""
    found = ledger.traffic(trace.repeated(plan.accumulation), plan.topology.nproc_per_node)
    dtypes = plan.recipe.fsdp.mixed_precision
    width = {name: getattr(torch, getattr(dtypes, name)).itemsize for name in ("param_dtype", "reduce_dtype")}
    parameters = sum(p.numel() for p in skeleton(config, plan.recipe.model).parameters())
    return {
        "collectives": [dataclasses.asdict(t) | {"wire": t.wire} for t in found],
        "textbook": ledger.textbook(parameters, plan.topology.world_size, *width.values()),
    }


def time(plan: Plan, trace: Trace, hardware: Hardware, tokens: int, useful: float) -> dict[str, Any]:
    """Seconds and rates. MFU counts the model's own FLOPs, as the run does, not recomputation."""
    half = plan.recipe.fsdp.mixed_precision.param_dtype == "bfloat16"
    timed = timing.replay_streams(trace.repeated(plan.accumulation), hardware, half, plan.topology.nproc_per_node)
    peak = plan.topology.world_size * (hardware.flops if half else hardware.flops32)
    return {
        "flops": timed.flops,
        "step_s": timed.step_s,
        "step_s_range": [timed.step_s * (1 - hardware.spread), timed.step_s * (1 + hardware.spread)],
        "compute_s": timed.compute_s,
        "communication_s": timed.communication_s,
        "exposed_s": timed.exposed_s,
        "tokens_per_s": tokens / timed.step_s,
        "mfu": useful / (timed.step_s * peak),
    }


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """The forecast a job asks for, as a dict; `{"error": record}` for an error of the recipe."""
    plan, hardware = Plan.from_json(job["plan"]), Hardware(**job["hardware"])
    hardware = dataclasses.replace(hardware, attention_share=tuple(hardware.attention_share))  # type: ignore[arg-type]
    try:
        folder = job.get("config_dir")
        adopted = plan.trust_remote_code  # by `load_config`, which registers the classes that were trusted
        config = (
            AutoConfig.from_pretrained(folder) if folder and not adopted else load_config(plan, job.get("vocab_size"))
        )
        drawing = Path(job["plot"]) if job.get("plot") else None
        return dataclasses.asdict(estimate(plan, config, hardware, job["pretend"], drawing))
    except FsdptrainError as error:
        return {"error": to_record(error)}


def main() -> None:
    """Answer every line; nothing else goes to standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
