"""Collectives over gloo that refuse what NCCL refuses: gloo takes tensors with gaps, and NCCL hangs if ranks differ.

What torch checks for NCCL is in `ProcessGroupNCCL.cpp`: `check_gpu_single_tensor`, `_allgather_base`, `ncclDataType`.
The functional collectives of DTensor do not pass here: torch itself takes only contiguous tensors there.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from fsdptrain.parallel.patches import SIDE

DTYPES = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
GATHERS, SCATTERS = ("_allgather_base", "all_gather_single"), ("_reduce_scatter_base", "reduce_scatter_single")
EXCHANGES = ("alltoall_base", "all_to_all_single")  # ranks may send parts of unequal sizes
OTHERS = ("allreduce", "broadcast", "allgather", "reduce_scatter", "reduce", "scatter", "gather", "allreduce_coalesced")

Log = dict[tuple[str, tuple[int, ...]], list[str]]  # (name of a group, its ranks) → its collectives, in their order
log: Log = defaultdict(list)


def be_strict(device: str | None = None) -> None:
    """Check every collective of this process from now on, except those of `World.side`, which is gloo on GPUs too.

    Their tensors must be on `device`, if it is given: groups of GPUs send those of the CPU over gloo.
    """
    for kind in (*GATHERS, *SCATTERS, *EXCHANGES, *OTHERS):
        if original := getattr(dist.ProcessGroup, kind, None):  # some are new in torch 2.13
            setattr(dist.ProcessGroup, kind, _checked(kind, original, device))


def _checked(kind: str, original: Callable[..., Any], device: str | None) -> Callable[..., Any]:
    def checked(group: dist.ProcessGroup, *words: Any, **options: Any) -> Any:
        if group.group_desc != SIDE:
            tensors = [leaf for leaf in tree_leaves((words, options)) if isinstance(leaf, torch.Tensor)]
            check(kind, tensors, group.size(), device)
            size = "" if kind in EXCHANGES else f" of {tensors[-1].numel()}"
            ranks = tuple(dist.get_process_group_ranks(group))
            log[group.group_name, ranks].append(f"{kind}{size} {tensors[-1].dtype}")
        return original(group, *words, **options)

    return checked


def check(kind: str, tensors: Sequence[torch.Tensor], ranks: int, device: str | None = None) -> None:
    """Raise ValueError if NCCL refuses these tensors, or if they are not on `device`."""
    for tensor in tensors:
        if tensor.device.type != (device or tensor.device.type):
            raise ValueError(f"NCCL refuses {kind}: a tensor {list(tensor.shape)} is on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"NCCL refuses {kind}: a tensor {list(tensor.shape)} {tensor.stride()} is not contiguous")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"NCCL refuses {kind}: it has no {tensor.dtype}")
    whole, part = (tensors[0], tensors[-1]) if kind in GATHERS else (tensors[-1], tensors[0])
    if kind in GATHERS + SCATTERS and whole.numel() != ranks * part.numel():
        raise ValueError(f"NCCL refuses {kind}: {whole.numel()} elements are not {ranks} × {part.numel()}")


def differences(ranks: Sequence[Log]) -> list[str]:
    """Return where ranks of a group issued other collectives than its first rank: NCCL would hang there."""
    found = []
    for key in sorted({key for own in ranks for key in own}):
        first, *others = [(rank, ranks[rank].get(key, [])) for rank in key[1]]
        for rank, own in others:
            for one, other in itertools.zip_longest(first[1], own):
                if one != other:
                    found.append(f"group {key[0]}: rank {first[0]} issued {one}, and rank {rank} {other}")
                    break
    return found


def compare_ranks() -> None:
    """Raise RuntimeError if ranks issued other collectives than others; collective, and the last of this process."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dict(log))
    if found := differences(ranks):
        raise RuntimeError("; ".join(found))
