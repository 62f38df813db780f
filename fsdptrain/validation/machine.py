"""The machine level of a dry run: devices, backends, the attention kernel, the rendezvous, the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from transformers.utils import is_flash_attn_2_available, is_kernels_available, is_torch_flex_attn_available

from fsdptrain.checkpoint.nodes import existing_parent
from fsdptrain.errors import FsdptrainError, RecipeError
from fsdptrain.launch.run_lock import check_run_dir
from fsdptrain.model.attention import card_obstacle
from fsdptrain.plan.driver import unused_cards_note
from fsdptrain.plan.limits import fatal_limits, limits_here, risky_limits, uncompiled_note
from fsdptrain.plan.network import address_of
from fsdptrain.plan.plan import Plan
from fsdptrain.plan.topology import NO_ENDPOINT
from fsdptrain.text import counted, size
from fsdptrain.train.setup import gpu_fault
from fsdptrain.validation.findings import Findings


def check_machine(plan: Plan, findings: Findings) -> None:
    """Record what this machine has, and a problem for each thing that the run needs and it lacks."""
    machine = describe_machine(plan)
    findings.add_values("machine", machine, "This machine", *([] if findings.elsewhere else [machine_line(machine)]))
    for error in machine_problems(plan, machine):
        findings.add_problem(error, this_machine_only=True)
    for note in [] if findings.elsewhere else [uncompiled_note(plan, limits_here()), unused_cards_note(os.environ)]:
        if note:
            findings.add_note(note)
    workers, cores = plan.topology.nproc_per_node, machine["cpu"]["cores"]
    if plan.topology.device == "cpu" and workers > cores:
        findings.add_note(f"{workers} workers share {counted(cores, 'core')}")


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
        "backends": [
            name
            for name, available in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
            if available
        ],
        "attention": {"kernel": kernel, "available": attention_available(kernel)},
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Return this machine as a line of text."""
    names = [f"{gpu['name']} {size(gpu['memory_bytes'])}" for gpu in machine["gpus"]]
    cpu = f"{machine['cpu']['cores']} cores, {size(machine['cpu']['memory_bytes'])} of RAM"
    kinds = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return (
        f"{' + '.join([*kinds, cpu])}; torch {machine['torch']}, transformers {machine['transformers']}; "
        f"{' and '.join(machine['backends'])}"
    )


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
                yield plan.topology.endpoint_fault("unknown host", "a host that every node can resolve")


def node_problems(plan: Plan, machine: dict[str, Any]) -> Iterator[FsdptrainError]:
    """Yield those of `machine_problems` that are left when the workers of all nodes have met."""
    kernel = machine["attention"]["kernel"]
    if fault := gpu_fault(plan.topology, len(machine["gpus"]), os.environ):
        yield RecipeError(fault)
    for name in ["gloo", "nccl"] if plan.topology.device == "cuda" else ["gloo"]:
        if name not in machine["backends"]:
            yield RecipeError(f"this build of torch has no {name}, which {plan.topology.device} ranks need")
    if not machine["attention"]["available"]:
        yield RecipeError(
            f"model.attn_implementation: {kernel} is not available: install flash-attn (needs a GPU of compute "
            "capability 8.0), or use auto"
        )
    limits = limits_here()
    for problem in fatal_limits(plan, limits):
        yield RecipeError([problem])
    for risk in risky_limits(plan, limits):
        yield RecipeError(risk)
    folder = existing_parent(Path(plan.run_dir))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield RecipeError(f"output_dir: cannot write to {folder}")
    try:
        check_run_dir(plan)
    except FsdptrainError as error:
        yield error


def attention_available(kernel: str) -> bool:
    """Return whether an attention kernel can be imported here, by transformers' checks, and runs on these GPUs."""
    if kernel == "flash_attention_2":  # transformers also takes it from the `kernels` package
        there = is_flash_attn_2_available() or (torch.cuda.is_available() and is_kernels_available())
        return bool(there and not card_obstacle())
    return bool(kernel != "flex_attention" or is_torch_flex_attn_available())
