"""Attention on the CPU, in tiles: keys that no query of a tile sees are skipped.

torch's own CPU kernel takes a fifth of a step in bf16, and where several documents share a sequence it also computes
the scores between documents, which are masked. Here oneDNN multiplies a tile of queries with the keys from the first to
the last that any of them sees, and scores are computed again in backward, as in FlashAttention (Dao et al.,
arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

QUERIES = 64  # in a tile: fewer are slow to multiply, more include keys that most of them do not see
SHORT = 1024  # tokens in a row: up to here float32 is faster in tiles, if nothing but what is later is masked
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # at import, because compilers cannot trace the call
LARGE = 8  # above it bf16 rounds a score by up to 2^-5, which changes its weight by 3%
STEP = 64  # tiles of keys begin at multiples of it: oneDNN compiles a kernel for every new shape


def install() -> None:
    """Replace transformers' `sdpa` by `attend` from now on, in this process."""
    AttentionInterface.register("sdpa", attend)


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention by transformers' interface: `query` [B, H, S, D], `key`, `value` [B, G, S, D] → [B, S, H, D].

    Calls transformers' own function where tiles cannot be used, or torch's kernel is faster.
    """
    special = dropout or any(others.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    special = special or query.device.type != "cpu"  # a simulation on the pretended accelerator follows one on the CPU
    same = query.shape[2] == key.shape[2] and query.shape[3] == key.shape[3] == value.shape[3]
    if attention_mask is None:
        # If nothing but what is later is masked, torch's float32 kernel is faster with AVX-512 and for long rows.
        short = query.dtype == torch.float32 and query.shape[2] <= SHORT and not AVX512
        causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        tiled = causal and (short or query.dtype == torch.bfloat16)
    else:
        tiled = attention_mask.dtype == torch.bool and attention_mask.shape == (len(query), 1, *2 * query.shape[2:3])
    if special or not same or not tiled:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return torch.ops.fsdptrain.attention(query, key, value, attention_mask, scale), None


@torch.library.custom_op("fsdptrain::attention", mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return softmax(scale · q kᵀ) v: [B, S, H, D] of q's dtype.

    `q` is [B, H, S, D], `k` and `v` [B, G, S, D]; each of the G heads serves H / G of q's. `mask`, bool [B, 1, S, S],
    is True where a query sees a key, at least once for each query; it must never be modified. None: causal. Products
    are computed in the dtype of q, k and v. Large bf16 scores are computed relative to the highest of their row, so
    that those with a large weight are rounded by little.
    """
    out = q.new_empty(len(q), q.shape[2], q.shape[1], q.shape[3])
    k, v = k.contiguous(), v.contiguous()
    large = _may_be_large(q, k, scale)
    for tile in tiles(q, mask):
        weights = _weights(tile, tile.queries_of(q, k), k, scale, large)
        tile.put(out.transpose(1, 2), weights @ tile.keys_of(v))
        del weights  # before those of the next tile are allocated
    return out


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    return q.new_empty(len(q), q.shape[2], q.shape[1], q.shape[3])


@torch.library.custom_op("fsdptrain::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `attention` for q, k and v, in their shapes and dtypes; sums over tiles are float32."""
    of_q = q.new_empty(q.shape)
    k, v = k.contiguous(), v.contiguous()
    of_k, of_v = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
    large = _may_be_large(q, k, scale)
    for tile in tiles(q, mask):
        queries, of_out = tile.queries_of(q, k), tile.queries_of(grad.transpose(1, 2), k)
        weights = _weights(tile, queries, k, scale, large)
        of_weights = of_out @ tile.keys_of(v).mT
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(scale)
        tile.put(of_q, of_scores @ tile.keys_of(k))
        _add_product(tile.keys_of(of_k), of_scores.mT, queries)
        _add_product(tile.keys_of(of_v), weights.mT, of_out)
        del weights, of_weights, of_scores  # before those of the next tile are allocated
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype == total.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(a @ b)


@attention_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return *torch.ops.fsdptrain.attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


attention.register_autograd(_backward, setup_context=_keep)


@dataclass(frozen=True)
class Tile:
    """Queries of some rows, the keys from the first to the last that any of them sees, and which pairs are masked.

    No pair before the key `clear` is masked; `hidden` is bool [queries, keys from `clear` on].
    """

    rows: slice
    queries: slice
    keys: slice
    clear: int
    hidden: torch.Tensor

    def queries_of(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return the tile's part of [B, H, S, D] as [B·G, H/G·n, D]: heads that share a key head share a matrix."""
        return q[self.rows, :, self.queries].reshape(-1, q.shape[1] // k.shape[1] * len(self.hidden), q.shape[3])

    def keys_of(self, k: torch.Tensor) -> torch.Tensor:
        """Return a view of the tile's part of a contiguous [B, G, S, D]: [B·G, n, D]."""
        return k[self.rows].flatten(0, 1)[:, self.keys]

    def hide(self, scores: torch.Tensor) -> None:
        """Set the scores [B·G, H/G·queries, keys] of masked pairs to the lowest value of their dtype."""
        part = scores.unflatten(1, (-1, len(self.hidden)))[..., self.clear - self.keys.start :]
        part.masked_fill_(self.hidden, torch.finfo(scores.dtype).min)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` into the tile's part of `target` [B, H, S, D]."""
        part = target[self.rows, :, self.queries]
        part.copy_(values.view(part.shape))


def _may_be_large(q: torch.Tensor, k: torch.Tensor, scale: float) -> bool:
    """Return whether rounding could matter: no score exceeds the product of the longest query and the longest key."""
    return q.dtype == torch.bfloat16 and float(scale * q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) > LARGE


def _weights(tile: Tile, queries: torch.Tensor, k: torch.Tensor, scale: float, large: bool) -> torch.Tensor:
    """Return the softmax of a tile's scores: [B·G, H/G·queries, keys].

    oneDNN rounds scores once. Where they are large, they are computed again minus the highest of their row: the softmax
    is the same, and the differences with a large weight are near 0, where rounding is small.
    """
    keys = tile.keys_of(k).mT
    scores = torch.baddbmm(queries.new_empty(()), queries, keys, beta=0, alpha=scale)
    tile.hide(scores)
    if large and float((highest := scores.amax(dim=-1, keepdim=True)).abs().amax()) > LARGE:
        scores.copy_(-highest).baddbmm_(queries, keys, alpha=scale)
        tile.hide(scores)
    return scores.softmax(dim=-1)


_tiles_by_mask: Any = WeakIdKeyDictionary()  # all layers of a model share a mask, in forward and in backward


def tiles(q: torch.Tensor, mask: torch.Tensor | None) -> list[Tile]:
    """Return the tiles for q [B, H, S, D]: of all rows together if their masks are equal, else of each row."""
    if mask is None:
        rows, later = slice(0, len(q)), torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
        ends = [(at, min(at + QUERIES, q.shape[2])) for at in range(0, q.shape[2], QUERIES)]
        return [Tile(rows, slice(at, end), slice(0, end), at, later[: end - at, : end - at]) for at, end in ends]
    if mask not in _tiles_by_mask:
        alike = bool((mask == mask[:1]).all())
        parts = [slice(0, len(mask))] if alike else [slice(row, row + 1) for row in range(len(mask))]
        _tiles_by_mask[mask] = [tile for part in parts for tile in _tiles_of(part, mask[part.start, 0])]
    found: list[Tile] = _tiles_by_mask[mask]
    return found


def _tiles_of(rows: slice, seen: torch.Tensor) -> list[Tile]:
    """Return the tiles of rows with the same mask: `seen` is bool [queries, keys]."""
    found = []
    for at in range(0, len(seen), QUERIES):
        part = seen[at : at + QUERIES]
        seen_keys = part.any(dim=0).nonzero()
        first, end = int(seen_keys[0]) // STEP * STEP, int(seen_keys[-1]) + 1
        masked_keys = (~part[:, first:end].all(dim=0)).nonzero()
        clear = first + int(masked_keys[0]) if len(masked_keys) else end
        hidden = ~part[:, clear:end]
        found.append(Tile(rows, slice(at, at + len(part)), slice(first, end), clear, hidden))
    return found


def attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], backward: bool) -> int:
    """Return the FLOPs of attention over all pairs, for shapes [B, H, S, D], [B, G, K, D] and [B, G, K, E].

    Forward has two products for each pair and head of q. Backward computes the scores again, and then four gradients.
    """
    pairs = q[0] * q[1] * q[2] * k[2]
    return 2 * pairs * (3 * q[3] + 2 * v[3] if backward else q[3] + v[3])


FLOPS: dict[Any, Callable[..., int]] = {  # for `forecast.recorder`: no tile computes what comes after its queries
    torch.ops.fsdptrain.attention.default: lambda q, k, v, *_: attention_flops(q.shape, k.shape, v.shape, False) // 2,
    torch.ops.fsdptrain.attention_backward.default: lambda grad, q, k, v, *_: (
        attention_flops(q.shape, k.shape, v.shape, True) // 2
    ),
}


def _workspace(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backward: bool) -> int:
    """Return the bytes that an operator needs besides arguments and results, in the last tile of a causal mask.

    The contents of masks are not known in advance; most need less. A tile has two tensors of scores in forward, three
    in backward.
    """
    tile = len(q) * q.shape[1] * min(QUERIES, q.shape[2])
    copies = sum(x.numel() for x in (k, v) if not x.is_contiguous())
    size = q.element_size() * ((3 if backward else 2) * tile * k.shape[2] + 2 * tile * q.shape[3] + copies)
    if backward and k.dtype != torch.float32:  # the float32 gradients of k and v, and a product to add to one of them
        size += k.numel() * (2 * 4 + k.element_size())
    return size


WORKSPACE: dict[Any, Callable[..., int]] = {  # for `forecast.recorder`, which cannot see inside an operator
    torch.ops.fsdptrain.attention.default: lambda q, k, v, *_: _workspace(q, k, v, backward=False),
    torch.ops.fsdptrain.attention_backward.default: lambda grad, q, k, v, *_: _workspace(q, k, v, backward=True),
}
