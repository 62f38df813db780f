"""What this machine has of what a run needs: devices, backends, the attention kernel, a port, room on the disk."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from transformers.utils import is_flash_attn_2_available, is_kernels_available, is_torch_flex_attn_available

from fsdptrain.checkpoint.disk import existing_parent
from fsdptrain.config.plan import Plan
from fsdptrain.errors import FsdptrainError, RecipeError
from fsdptrain.launch.claim import check_run_dir
from fsdptrain.text import size

TORCHRUN_PORT = 29400  # where torchrun's c10d rendezvous listens when the endpoint names no port


def machine_facts(plan: Plan) -> dict[str, Any]:
    """The devices and what torch and transformers can do with them here."""
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
            name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
        ],
        "attention": {"kernel": kernel, "available": attention_available(kernel)},
        "rendezvous": rendezvous(plan),
    }


def machine_line(facts: dict[str, Any]) -> str:
    """Those facts for the person."""
    names = [f"{gpu['name']} {size(gpu['memory_bytes'])}" for gpu in facts["gpus"]]
    cpu = f"{facts['cpu']['cores']} cores, {size(facts['cpu']['memory_bytes'])} of RAM"
    kinds = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return (
        f"{' + '.join([*kinds, cpu])}; torch {facts['torch']}, transformers {facts['transformers']}; "
        f"{' and '.join(facts['backends'])}; ranks meet at "
        f"{facts['rendezvous']['endpoint']} ({facts['rendezvous']['state']})"
    )


def machine_problems(plan: Plan, facts: dict[str, Any]) -> Iterator[FsdptrainError]:
    """What the run needs and this machine lacks; another machine may have it."""
    workers, gpus, kernel = plan.topology.nproc_per_node, len(facts["gpus"]), facts["attention"]["kernel"]
    if plan.topology.device == "cuda" and gpus < workers:
        yield RecipeError(f"launch.nproc_per_node: {workers} workers, but {gpus} GPUs are visible")
    for name in ["gloo", "nccl"] if plan.topology.device == "cuda" else ["gloo"]:
        if name not in facts["backends"]:
            yield RecipeError(f"this build of torch has no {name}, in which {plan.topology.device} ranks talk")
    if not facts["attention"]["available"]:
        yield RecipeError(
            f"model.attn_implementation: {kernel} is not available: install flash-attn (needs a GPU), or use auto"
        )
    if facts["rendezvous"]["state"] in ("in use", "unknown host"):
        yield RecipeError(
            f"launch.rdzv_endpoint: {facts['rendezvous']['endpoint']}: {facts['rendezvous']['state']}; name a host "
            "that every node knows and a port that is free on it"
        )
    folder = existing_parent(Path(plan.run_dir))
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield RecipeError(f"output_dir: cannot write to {folder}")
    try:
        check_run_dir(plan)
    except FsdptrainError as error:
        yield error


def attention_available(kernel: str) -> bool:
    """Whether an attention kernel can be imported here: transformers' own checks."""
    if kernel == "flash_attention_2":  # transformers also takes it from the `kernels` package
        return bool(is_flash_attn_2_available() or (torch.cuda.is_available() and is_kernels_available()))
    return bool(kernel != "flex_attention" or is_torch_flex_attn_available())


def rendezvous(plan: Plan) -> dict[str, str]:
    """Where the ranks would meet, and whether they can: free, in use, another machine, unknown host.

    Raises RecipeError for an endpoint that is not host:port.
    """
    endpoint = plan.recipe.launch.rdzv_endpoint
    if plan.topology.nnodes == 1 or endpoint is None:
        return {"endpoint": "loopback", "state": "any free port"}
    try:
        host, port = parse_rendezvous_endpoint(endpoint, TORCHRUN_PORT)
    except ValueError as error:
        raise RecipeError(f"launch.rdzv_endpoint: {error}") from None
    return {"endpoint": f"{host}:{port}", "state": _port_state(host, port)}


def _port_state(host: str, port: int) -> str:
    """Only the machine that owns the address can listen on it, so trying to tells whose it is."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return "unknown host"
    try:
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return "another machine" if error.errno == errno.EADDRNOTAVAIL else "in use"
    return "free"
