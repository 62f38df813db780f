"""Context parallelism: ranks that share a row exchange heads for tokens around the attention kernel.

Each of N ranks computes 1/N of the tokens of a row with all heads, but in attention all tokens with 1/N of the heads
(DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509). Nothing else of a step changes: the loss is divided by the label
tokens of the global batch and gradients are summed over all ranks, so that such a rank is one with other tokens.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface

from fsdptrain.data.corpus import document_bounds
from fsdptrain.errors import error_summary
from fsdptrain.model import varlen
from fsdptrain.model.probe import Probe, alike

REPLAY = "replay"  # in transformers' registry of attention functions: see `_Replay`


class Exchange:
    """Exchanges heads for tokens, and back, among the ranks of a group.

    It is no part of compiled graphs: compilers may move collectives, and NCCL needs one order on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, group.size()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return query, key and value [B, H, S/N, D] as [B, H/N, S, D], from one all-to-all.

        Key heads that N does not divide are repeated.
        """
        heads = tensors[0].shape[1]
        parts = [
            x.repeat_interleave(repeats_of(x.shape[1], heads, self.ranks), dim=1)
            .transpose(1, 2)
            .unflatten(2, (self.ranks, -1))
            .permute(2, 0, 1, 3, 4)
            for x in tensors
        ]  # [N, B, S/N, H/N, D]
        received: torch.Tensor = AllToAll.apply(torch.cat([x.flatten(3) for x in parts], dim=3), self.group)
        rows = received.permute(1, 0, 2, 3).flatten(1, 2)  # [B, S, …]: rank i has sent part i of a row
        split = rows.split([x.shape[3:].numel() for x in parts], dim=2)
        return [x.unflatten(2, part.shape[3:]).transpose(1, 2) for x, part in zip(split, parts, strict=True)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Return the result of attention [B, S, H/N, D] as [B, S/N, H, D]."""
        heads = out.shape[2:]
        parts = out.unflatten(1, (self.ranks, -1)).permute(1, 0, 2, 3, 4).flatten(3)  # [N, B, S/N, …]
        received: torch.Tensor = AllToAll.apply(parts.contiguous(), self.group)
        return received.permute(1, 2, 0, 3).unflatten(3, heads).flatten(2, 3)


class AllToAll(torch.autograd.Function):
    """Sends part i to rank i of a group, and returns what all have sent, in the order of ranks. It is its own inverse.

    torch has deprecated its own (`torch.distributed.nn.functional`) for one in a private module.
    """

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Exchange the parts [N, …] among the N ranks of a group."""
        ctx.group, received = group, torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Exchange the gradients back."""
        received = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grads[0].contiguous(), group=ctx.group)
        return received, None


def repeats_of(heads: int, queries: int, ranks: int) -> int:
    """Return how often each of `heads` is repeated so that they divide among the ranks, and `queries` among them."""
    wanted = math.lcm(heads, ranks)
    return wanted // heads if queries % wanted == 0 else queries // heads


# ----------------------------------------------------------------------------------------- where a row can be divided


class WrongInputs(Exception):
    """Attention gets other inputs for a part of a row than for the whole."""


class _Replay:
    """Attention that notes its inputs and result for a whole row, and returns the result's part for a part of the row.

    It raises WrongInputs if the inputs for a part are not the part of those for the whole.
    """

    def __init__(self) -> None:
        self.whole: list[tuple[torch.Tensor, ...]] = []
        self.part: slice | None = None
        self.calls = 0
        self.heads: set[int] = set()

    def __call__(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> tuple[Any, None]:
        """Compute attention by transformers' interface."""
        if self.part is None:
            out, _ = varlen.attend_within_documents(module, query, key, value, mask, **others)
            self.whole.append((query, key, value, out))
            self.heads.add(query.shape[1])
            return out, None
        *inputs, out = self.whole[self.calls]
        self.calls += 1
        for found, expected in zip((query, key, value), inputs, strict=True):
            if not alike(found, expected[:, :, self.part]):
                raise WrongInputs("what attention gets depends on more than a token and its position")
        return out[:, self.part], None


def sharing_obstacle(bare: Any, ranks: int, seq_len: int) -> str | None:
    """Return why `ranks` cannot compute parts of a row of this skeleton's model, None if they can.

    The model's own forward runs on a CPU, on a row and on both halves of it, with the same results of attention. So
    nothing but attention may let a token see another: no recurrence, no convolution, no rotary frequencies that depend
    on the longest position of a micro-batch.
    """
    name, replay = type(bare).__name__, _Replay()
    AttentionInterface.register(REPLAY, replay)
    model = copy.deepcopy(bare)
    model.set_attn_implementation(REPLAY)
    positions = [0, 1, 2, 3, *range(seq_len - 4, seq_len)]
    documents, longest = document_bounds([[len(positions)]])
    try:
        probe = Probe(model)
        whole = probe.logits([positions], documents=documents, longest_document=longest)
        for half in (slice(0, 4), slice(4, 8)):
            replay.part, replay.calls = half, 0
            if not alike(probe.logits([positions], half), whole[half]):
                return f"in {name} a token sees others outside of attention (a recurrence or a convolution)"
    except WrongInputs as error:
        return f"in {name} {error}"
    except Exception as error:  # whatever the architecture's code raises
        return f"{name} fails when a part of a row is compared with the whole: {error_summary(error)}"
    if heads := next((heads for heads in sorted(replay.heads) if heads % ranks), None):
        return f"{name} has {heads} query heads, which do not divide among {ranks} ranks"
    return None
