"""cuDNN's attention for rows of one document: torch takes it on Hopper and Blackwell, where it is faster than varlen.

It is reached as `sdpa`. Such rows need no mask: padding is at their end, hidden by causality from the tokens before it,
and has no labels. The price is that a short document is computed as a full row.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdptrain.model import flash
from fsdptrain.plan.plan import Plan

LARGEST_HEAD = 128  # elements, and a multiple of 8: what cuDNN computes in forward and in backward
LEAST_VERSION = 91501  # wheels for CUDA 12.9 and before have older ones, which torch does not prefer
MAJORS = {9, 10}  # of the compute capability: Hopper and Blackwell's data centre cards; RTX cards have 12


def is_preferred_here() -> bool:
    """Return whether torch prefers cuDNN's attention on every GPU of this process; False without a GPU."""
    majors = {torch.cuda.get_device_capability(index)[0] for index in range(torch.cuda.device_count())}
    return bool(majors) and majors <= MAJORS and (torch.backends.cudnn.version() or 0) >= LEAST_VERSION


def computes(plan: Plan, bare: Any) -> bool:
    """Return whether cuDNN computes the attention of a plan without a mask, on a card where torch prefers it.

    `bare` is the model's skeleton with varlen attention, which ranks that share rows need. Windows need a mask. torch
    excludes cuDNN where algorithms must be deterministic, and `varlen.avoid_wrong_kernel` excludes some lengths.
    """
    recipe, seq_len = plan.recipe, plan.recipe.data.seq_len
    if plan.context > 1 or recipe.documents_share_sequences or seq_len % 128 or recipe.train.deterministic:
        return False
    return all(
        each.size == each.of_values <= LARGEST_HEAD and each.size % 8 == 0 and not each.window
        for each in flash.heads_of(bare)
    )
