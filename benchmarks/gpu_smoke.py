"""The first calls of `gpu.py`, each in seconds and by itself: what fails here fails in every run."""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional

DOCUMENTS = (0, 100, 128, 256)  # bounds of three documents


def join(device: str) -> torch.device:
    """Join the process group of the ranks; return the device of this one."""
    at = own_device(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return at


def own_device(device: str) -> torch.device:
    """Return the device of this rank, and make it the current one."""
    at = torch.device(device, int(os.environ["LOCAL_RANK"]) if device == "cuda" else None)
    if device == "cuda":
        torch.cuda.set_device(at)
    return at


def product(device: str) -> float:
    """Return the largest error of a product of ones, which is exact in bfloat16, on this rank's card."""
    size = 4096 if device == "cuda" else 256
    ones = torch.ones(size, size, dtype=torch.bfloat16, device=own_device(device))
    return float((ones @ ones - size).abs().max())


def all_reduce(device: str) -> float:
    """Return the error of an all-reduce over all ranks, of 64 MB."""
    at = join(device)
    total = torch.full((2**24,), dist.get_rank() + 1.0, device=at)
    dist.all_reduce(total)
    world = dist.get_world_size()
    return float((total - world * (world + 1) / 2).abs().max())


def varlen(device: str) -> float:
    """Return the error of packed attention against each document by itself, relative to its largest element."""
    from fsdptrain.model.varlen import attend_within_documents

    at = own_device(device)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, DOCUMENTS[-1], 64, device=at, dtype=torch.bfloat16) for _ in range(3))
    bounds = torch.tensor(DOCUMENTS, dtype=torch.int32, device=at)
    found = attend_within_documents(torch.nn.Module(), q, k, v, None, documents=bounds, longest_document=128)[0]
    parts = [slice(*both) for both in itertools.pairwise(DOCUMENTS)]
    expected = torch.cat(
        [
            functional.scaled_dot_product_attention(*(each[:, :, part].float() for each in (q, k, v)), is_causal=True)
            for part in parts
        ],
        dim=2,
    ).transpose(1, 2)
    return relative(found, expected)


def compiled_block(device: str) -> float:
    """Return the error of a compiled block, its output and the gradient of its input, against the same one eager."""
    at = own_device(device)
    torch.manual_seed(0)
    linear = [torch.nn.Linear(256, 256, device=at, dtype=torch.bfloat16) for _ in range(2)]
    norm = torch.nn.RMSNorm(256, device=at, dtype=torch.bfloat16)

    def block(x: torch.Tensor) -> torch.Tensor:
        return x + linear[1](functional.silu(linear[0](norm(x))))

    backend = "inductor" if device == "cuda" else "aot_eager"  # which takes a minute on a CPU
    found = []
    for work in (block, torch.compile(block, backend=backend, dynamic=False)):
        x = torch.ones(8, 256, device=at, dtype=torch.bfloat16).cumsum(1).div(256).requires_grad_()
        out = work(x)
        out.float().square().sum().backward()
        found.append(torch.cat([out.detach(), x.grad if x.grad is not None else out]))
    return relative(found[1], found[0])


def fused_step(device: str) -> float:
    """Return the error of a step of fused AdamW against the plain one."""
    at, made = own_device(device), []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 4096, device=at))
        weight.grad = weight.detach().cos()
        torch.optim.AdamW([weight], lr=1e-3, fused=fused, foreach=False).step()
        made.append(weight.detach())
    return relative(made[1], made[0])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element expected."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-12))


CALLS = {  # what is called, and the largest error
    "product": (product, 0.0), "all-reduce": (all_reduce, 0.0), "varlen": (varlen, 2e-2),
    "compile": (compiled_block, 2e-2), "optimizer": (fused_step, 1e-6),
}  # fmt: skip


def smoke(device: str, what: str) -> float:
    """Make one of CALLS; return its error. Exits if this rank's is too large, so that every card is judged."""
    call, largest = CALLS[what]
    error = call(device)
    if not error <= largest:
        sys.exit(f"rank {os.environ['RANK']}: {what} differs by {error:.2e}; at most {largest:g}")
    return error
