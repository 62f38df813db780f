"""CUDA's attention kernels: which of them torch chooses, the FLOPs that they compute, and what they allocate.

And products in float8, which are recorded without their casts: the compiler fuses these with what is around them.

Read in torch 2.11 and 2.13: `sdp_utils.cpp` (the choice), `flash_api.cpp` and `attention_backward.cu` (workspaces).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from fsdptrain.forecast.timing import is_attention
from fsdptrain.forecast.trace import Event, Kernel
from fsdptrain.model.attention import CUDNN_HEAD, CUDNN_VERSION, FLASH_NAMES
from fsdptrain.model.tiles import attention_flops
from fsdptrain.plan.hardware import Hardware

aten = torch.ops.aten
FLASH_HEAD = 256
_cards: list[Hardware | None] = [None]  # the card that is simulated is last


@contextlib.contextmanager
def on_card(card: Hardware | None) -> Iterator[None]:
    """Choose the kernels of this card inside the context; None: of one for which torch does not prefer cuDNN."""
    _cards.append(card)
    try:
        yield
    finally:
        _cards.pop()


def cuda_attention(device: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return scaled dot product attention that on `device` chooses its kernel as CUDA does; `otherwise` elsewhere.

    On Hopper and later cuDNN comes first. Without it a mask or float32 leads to the memory-efficient kernel, which has
    no groups: keys and values are repeated. With a mask cuDNN is used only for lengths in multiples of 128: see
    pytorch#196678.
    """

    def attention(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if q.device.type != device:
            return otherwise(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        card, half, size = _cards[-1], q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
        version = torch.backends.cudnn.version() or CUDNN_VERSION  # without cuDNN here, as with a recent one
        cudnn = half and size == v.shape[-1] <= CUDNN_HEAD and size % 8 == 0
        cudnn = cudnn and card is not None and card.prefers_cudnn and version >= CUDNN_VERSION
        flash = half and (card is None or card.has_flash) and size == v.shape[-1] <= FLASH_HEAD
        if attn_mask is None and flash and not cudnn:
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        if attn_mask is not None:
            cudnn = cudnn and q.shape[2] % 128 == 0
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
            attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        grad = any(x.requires_grad for x in (q, k, v))
        if cudnn:
            return aten._scaled_dot_product_cudnn_attention(
                q, k, v, attn_mask, grad, dropout_p, is_causal, False, scale=scale
            )[0]
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, grad, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def computed_flops(operator: Any, *args: Any, **kwargs: Any) -> int:
    """Return the FLOPs that an attention operator computes: half of all pairs if it is causal and has no mask.

    With a mask CUDA's kernels compute the hidden pairs too.
    """
    call = _arguments(operator, args, kwargs)
    masked = call.get("attn_bias") is not None or call.get("attn_mask") is not None
    q, k, v = (call[name].shape for name in ("query", "key", "value"))
    flops = attention_flops(q, k, v, backward="backward" in operator.__name__)
    return flops // 2 if call.get("is_causal") and not masked else flops


def backward_workspace(operator: Any, *args: Any, **kwargs: Any) -> int:
    """Return the bytes that an attention kernel allocates in backward besides its results.

    The gradient of q is summed in float32, its length rounded up to 128 and its heads to 32 elements, with a number for
    every query. Where several heads of q share one of k, the gradients of k and v are computed for each head of q.
    """
    call = _arguments(operator, args, kwargs)
    q, k = call["query"], call["key"]
    rows, heads, length, size = q.shape
    queries = rows * heads * (-(-length // 128) * 128)
    expanded = 2 * rows * heads * k.shape[2] * size * k.element_size() if heads != k.shape[1] else 0
    return 4 * queries * (-(-size // 32) * 32 + 1) + expanded


def _arguments(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


CUDA_ATTENTION = [
    getattr(aten, f"_scaled_dot_product_{kind}_attention{way}").default
    for kind in ("flash", "cudnn", "efficient")
    for way in ("", "_backward")
]

# By a part of an operator's name, or the key of the card's rate for FlashAttention's operators.
NAMES = {
    "cudnn": "cuDNN", "efficient": "torch's memory-efficient kernel", "flash": "FlashAttention 2",
    "flex": "flex_attention", **FLASH_NAMES,
}  # fmt: skip


def attention_kernels(events: Iterable[Event], flash_key: str) -> list[str]:
    """Return the names of the kernels that compute attention in a trace of a GPU, in the order of their first use.

    `flash_key` is the kernel that computes FlashAttention's operators.
    """
    used = {
        next((key for key in ("cudnn", "efficient") if key in event.name), flash_key): None
        for event in events
        if isinstance(event, Kernel) and is_attention(event)
    }
    return [NAMES[key] for key in used] or ["plain matrix products"]


CPU_ATTENTION = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
]

# By operator; torch's own formulas refuse fewer key heads than query heads up to 2.11, and do not know causal masks.
FLOPS: dict[Any, Callable[..., int]] = {
    operator: partial(computed_flops, operator) for operator in [*CUDA_ATTENTION, *CPU_ATTENTION]
}

WORKSPACE: dict[Any, Callable[..., int]] = {
    operator: partial(backward_workspace, operator) for operator in CUDA_ATTENTION if "backward" in operator.__name__
}

_products: list[str] = []  # what the trace calls the products of the layer that computes now


def name_of(operator: Any) -> str:
    """Return what the trace calls an operator."""
    return _products[-1] if _products and operator is aten.mm.default else str(operator._overloadpacket.__name__)


def multiply_in_float8(layers: Iterable[Any], kind: str) -> None:
    """Record the products of these layers under a name of their own, `float8_rowwise` or `float8_tensorwise`.

    They keep for backward what torchao keeps, input and weight in bf16.
    """

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Product.apply(x, layer.weight, f"float8_{kind}")
        return result if layer.bias is None else result + layer.bias

    for layer in layers:
        layer.forward = partial(forward, layer)


class _Product(torch.autograd.Function):
    """x · weightᵀ, whose products the trace calls `name`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name = name
        [result] = _multiplied(name, (x.flatten(0, -2), weight.t()))
        return result.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        of_x, of_weight = _multiplied(ctx.name, (rows, weight), (rows.t(), x.flatten(0, -2)))
        return of_x.view_as(x), of_weight, None


def _multiplied(name: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    _products.append(name)
    try:
        return [a.mm(b) for a, b in pairs]
    finally:
        _products.pop()
