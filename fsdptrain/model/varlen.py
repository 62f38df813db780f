"""Attention on CUDA, each document by itself: torch's varlen kernel behind transformers' attention interface.

A micro-batch is flattened to one row of tokens, and `documents` says where each document begins. These bounds come from
the host (`data.corpus`), and no mask is built: transformers does that only for an attention implementation that has a
mask function, and "varlen" has none. The operator has a kernel for CPUs too, which is plain arithmetic: the reference
for tests, and what `probe` runs.

Context parallelism: ranks that share a row exchange heads for tokens around the kernel. Each of N ranks computes 1/N of
the tokens of a row with all heads, but in attention all tokens with 1/N of the heads (DeepSpeed-Ulysses, Jacobs et al.,
arXiv:2309.14509).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import varlen as of_torch
from transformers import AttentionInterface

from fsdptrain.errors import RecipeError
from fsdptrain.model.exchange import exchanged
from fsdptrain.model.patches import VARLEN_BACKWARD, VARLEN_FORWARD

NAME = "varlen"  # in transformers' registry of attention functions
LARGEST_HEAD = 256  # elements: the flash kernels support multiples of 8 up to here
TAKES_GROUPS = "enable_gqa" in inspect.signature(of_torch.varlen_attn).parameters  # torch 2.11 does not


def varlen_attn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor, longest: int,
    window: tuple[int, int], scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of each document [T, H, D], by torch's operator.

    torch's own `varlen_attn` calls it, but since torch 2.15 prefers cuDNN on Hopper and Blackwell. The operator is
    FlashAttention in every version, as `attention` and the forecast assume.
    """
    groups = (True,) if TAKES_GROUPS else ()
    out: torch.Tensor = VARLEN_FORWARD(
        query, key, value, documents, documents, longest, longest, window == (-1, 0), scale, list(window), *groups
    )[0]
    return out


def attend_within_documents(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, documents: torch.Tensor | None = None,
    longest_document: int = 0, sliding_window: int | None = None, context: Exchange | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute causal attention within each document: transformers' attention interface.

    `query` is [B, H, S, D], `key` [B, G, S, D] and `value` [B, G, S, E]; returns [B, S, H, E]. `documents` int32 [N+1]
    are bounds in the B·S tokens of all rows, `longest_document` tokens is at least the length of each. A query sees
    itself and the `sliding_window` - 1 tokens before it, by default all of its document. With `context` S are this
    rank's tokens of each row. Raises RecipeError for what the kernel does not compute.
    """
    # The kernel needs one size for all heads. Added zeros change no score and no other element of the result.
    padded = -(-max(query.shape[3], value.shape[3]) // 8) * 8
    _check_supported(module, (query, key, value), padded, attention_mask, dropout, documents, others)
    assert documents is not None
    if context is not None:
        query, key, value = context.to_heads(query, key, value)
    rows, heads, length, size = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    q, k, v = (functional.pad(x, (0, padded - x.shape[2])) if x.shape[2] < padded else x for x in (q, k, v))
    if not TAKES_GROUPS:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # tokens before a query, and after it
    scale = size**-0.5 if scaling is None else scaling
    out = varlen_attn(q, k, v, documents, longest_document, window, scale)
    out = out[..., : value.shape[3]].unflatten(0, (rows, length))
    return (out if context is None else context.to_tokens(out)), None


AttentionInterface.register(NAME, attend_within_documents)


def _check_supported(
    module: Any, qkv: tuple[torch.Tensor, ...], size: int, mask: Any, dropout: float, documents: Any, others: Any
) -> None:
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    reasons = {
        "its attention layers do not get `documents` from its forward": documents is None,
        "it builds a mask itself": mask is not None,
        "its attention is not causal": not causal,
        "its attention has dropout": bool(dropout),
        "its attention scores are capped": others.get("softcap") is not None,
        "its attention has sinks": others.get("s_aux") is not None,
        "its attention has a position bias": others.get("position_bias") is not None,
        "its queries and keys differ in length": len({x.shape[2] for x in qkv}) > 1,
        f"its heads have {size} elements, more than {LARGEST_HEAD}": size > LARGEST_HEAD,
        f"its attention is computed in {str(qkv[0].dtype).removeprefix('torch.')}": (
            qkv[0].device.type == "cuda" and qkv[0].dtype not in (torch.bfloat16, torch.float16)
        ),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        raise RecipeError(
            f"model.attn_implementation: sdpa cannot compute this model in torch's varlen kernel: {reason}; use eager"
        )


def used_by(model: Any) -> bool:
    """Return whether a model was built with this attention, and so needs `documents` and `longest_document`."""
    return bool(model.config._attn_implementation == NAME)


# ----------------------------------------------------------------------------------------- the exchange among ranks


class Exchange:
    """Exchanges heads for tokens, and back, among the ranks of a group.

    It is no part of compiled graphs: compilers may move collectives, and NCCL needs one order on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self._all_to_all = group.size(), functools.partial(all_to_all, group=group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return query, key and value [B, H, S/N, D] as [B, H/N, S, D], from one all-to-all.

        Key heads that N does not divide are repeated.
        """
        queries, parts = tensors[0].shape[1], []  # [N, B, S/N, H/N, D]
        for x in tensors:
            heads = x.shape[1]
            # Heads must divide among the ranks, and queries among heads.
            wanted = math.lcm(heads, self.ranks)
            repeats = wanted // heads if queries % wanted == 0 else queries // heads
            split_heads = x.repeat_interleave(repeats, dim=1).transpose(1, 2).unflatten(2, (self.ranks, -1))
            parts.append(split_heads.permute(2, 0, 1, 3, 4))
        received = exchanged(torch.cat([x.flatten(3) for x in parts], dim=3), self._all_to_all, self._all_to_all)
        rows = received.permute(1, 0, 2, 3).flatten(1, 2)  # [B, S, …]: rank i has sent part i of a row
        split = rows.split([x.shape[3:].numel() for x in parts], dim=2)
        return [x.unflatten(2, part.shape[3:]).transpose(1, 2) for x, part in zip(split, parts, strict=True)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Return the result of attention [B, S, H/N, D] as [B, S/N, H, D]."""
        heads = out.shape[2:]
        parts = out.unflatten(1, (self.ranks, -1)).permute(1, 0, 2, 3, 4).flatten(3)  # [N, B, S/N, …]
        received = exchanged(parts, self._all_to_all, self._all_to_all)
        return received.permute(1, 2, 0, 3).unflatten(3, heads).flatten(2, 3)


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part i of [N, …] to rank i of a group; return what all have sent, in the order of ranks: its own inverse."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


# ------------------------------------------------------------------------------------------ the same operator on a CPU


def _forward_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, _bounds: Any, _longest: int, _: int,
    _causal: bool, scale: float, window: list[int], *_others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return attention within each document, as q [T, H, D]; k and v are [T, G, D]. The second result is not used."""
    out = torch.empty_like(q)
    for part in _parts(bounds):
        weights, values = _weights(q[part], k[part], scale, window), v[part].float()
        out[part] = torch.einsum("ghij,jgd->ighd", weights, values).flatten(1, 2).to(q.dtype)
    sums, state = q.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)
    return out, sums, state


def _backward_on_cpu(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _sums: Any,
    bounds: torch.Tensor, _bounds: Any, _longest: int, _: int, _causal: bool, _state: Any, scale: float,
    window: list[int], *_others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for part in _parts(bounds):
        weights = _weights(q[part], k[part], scale, window)
        groups = (len(weights), -1)
        queries, outs, of_outs = (x[part].float().unflatten(1, groups) for x in (q, out, grad))
        of_weights = torch.einsum("ighd,jgd->ghij", of_outs, v[part].float())
        of_weights -= (outs * of_outs).sum(-1).permute(1, 2, 0)[..., None]
        of_scores = weights * of_weights * scale
        grads[0][part] = torch.einsum("ghij,jgd->ighd", of_scores, k[part].float()).flatten(1, 2).to(q.dtype)
        grads[1][part] = torch.einsum("ghij,ighd->jgd", of_scores, queries).to(k.dtype)
        grads[2][part] = torch.einsum("ghij,ighd->jgd", weights, of_outs).to(v.dtype)
    return grads


def _weights(q: torch.Tensor, k: torch.Tensor, scale: float, window: list[int]) -> torch.Tensor:
    """Return the softmax of one document's scores, float32 [G, H/G, n, n]; `window` is (tokens before, 0)."""
    scores = torch.einsum("ighd,jgd->ghij", q.float().unflatten(1, (k.shape[1], -1)), k.float()) * scale
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = distance < 0
    if window[0] >= 0:
        hidden |= distance > window[0]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _parts(bounds: torch.Tensor) -> Iterator[slice]:
    """Yield the tokens of each document that is not empty."""
    yield from (slice(start, end) for start, end in itertools.pairwise(bounds.tolist()) if start < end)


torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", _forward_on_cpu)
torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", _backward_on_cpu)


# ------------------------------------------------------------------------------------------------------ for forecasts


def _flops(products: int, q: torch.Tensor, longest: int, window: list[int]) -> int:
    """Return the FLOPs of some products a pair of query and key; at most, as if all documents had `longest` tokens."""
    seen = min(longest, window[0] + 1) if window[0] >= 0 else longest
    pairs = len(q) // longest * (seen * longest - seen * (seen - 1) // 2)
    return products * 2 * q.shape[1] * q.shape[2] * pairs


FLOPS: dict[Any, Callable[..., int]] = {  # the arguments are those of `_forward_on_cpu` and `_backward_on_cpu`
    VARLEN_FORWARD: lambda *args, **_: _flops(2, args[0], args[5], args[9]),
    VARLEN_BACKWARD: lambda *args, **_: _flops(5, args[1], args[8], args[13]),
}


def _backward_workspace(grad: Any, q: torch.Tensor, k: torch.Tensor, *others: Any) -> int:
    """Return the bytes that FlashAttention 2 needs in backward besides arguments and results.

    The gradient of q is summed in float32, with 128 tokens of padding a document; k's and v's are first computed for
    every head of q.
    """
    documents = len(others[4]) - 1
    heads, size = q.shape[1:]
    padded = (len(q) + 128 * documents) * heads * 4
    expanded = 2 * len(k) * heads * size * k.element_size() if heads != k.shape[1] else 0
    return padded * (-(-size // 32) * 32 + 1) + expanded


WORKSPACE: dict[Any, Callable[..., int]] = {VARLEN_BACKWARD: _backward_workspace}
