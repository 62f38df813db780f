"""Recomputation: what the forward of a layer keeps for its backward, which computes the rest again.

A layer keeps its input; with `selective` the results of products and of attention too, with `keep_attention` those of
attention. With `offload` all of it waits in host memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface

from fsdptrain.config.schema import Recomputation
from fsdptrain.errors import RecipeError
from fsdptrain.model import varlen
from fsdptrain.model.patches import VARLEN_FORWARD
from fsdptrain.parallel.offload import Layer, Offload, Waiting
from fsdptrain.parallel.patches import TorchDispatchMode

aten = torch.ops.aten
SMALL = 256  # bytes: such tensors stay on the device (the state of a generator)

ATTENTION = [
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default, torch.ops.fsdptrain.attention.default, VARLEN_FORWARD,
]  # fmt: skip

SAVED = [  # selective checkpointing does not recompute these: matrix products and attention
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default,
    aten._scaled_mm.default, *ATTENTION,
]  # fmt: skip

KERNELS = ("sdpa", varlen.NAME)  # in transformers' registry: those whose attention is one of these operators


def recompute(layers: list[nn.Module], how: Recomputation, device: torch.device) -> None:
    """Free the activations of these layers after forward and compute them again in backward."""
    if how.kind == "none":
        return
    offload = Offload(device) if how.offload else None
    if how.keep_attention:
        keep_attention()
    for layer in layers[:: how.every]:
        if how.beside_compiler:
            layer.forward = _sent_or_kept(layer.forward, how.keep_attention, offload)
        else:
            context = functools.partial(create_selective_checkpoint_contexts, SAVED)
            layer.forward = _recomputed(layer.forward, context if how.kind == "selective" else None)


def _recomputed(forward: Callable[..., Any], context: Callable[[], Any] | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": context} if context else {})

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _sent_or_kept(forward: Callable[..., Any], keep: bool, offload: Offload | None) -> Callable[..., Any]:
    """Return the forward of a layer, which is recomputed from its input; `keep`: without its attention.

    The input is the first argument. What else the layer gets belongs to all layers, and stays where it is.
    """

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args:
            raise RecipeError(
                "fsdp.activation_checkpointing: offload and keep_attention need layers that take their input as the "
                "first argument, and this architecture names it: use full"
            )
        layer = offload.next_layer() if offload else None
        kept = KeptAttention(offload, layer)
        with contextlib.ExitStack() as entered:
            if offload and layer:
                pack = functools.partial(_send, offload, layer)
                entered.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, functools.partial(_fetch, offload)))
            return checkpoint(
                lambda x: forward(x, *args[1:], **kwargs), args[0], use_reentrant=False,
                context_fn=kept.contexts if keep else _no_contexts,
            )  # fmt: skip

    return recomputed


def _no_contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


def _send(offload: Offload | None, layer: Layer | None, kept: Any) -> Any:
    """Return what stands for a result that is kept: a tensor that waits in host memory, or the result itself."""
    if not isinstance(kept, torch.Tensor):
        return kept
    if offload is None or layer is None or kept.nbytes <= SMALL:
        return kept.detach()
    return offload.send(kept.detach(), layer)


def _fetch(offload: Offload | None, kept: Any) -> Any:
    """Return the result that `_send` was given."""
    return offload.fetch(kept) if offload and isinstance(kept, Waiting) else kept


class KeptAttention:
    """The results of the attention operators in one forward of a layer, in their order."""

    def __init__(self, offload: Offload | None, layer: Layer | None) -> None:
        self._offload, self._layer = offload, layer
        self._results: list[Any] = []

    def contexts(self) -> tuple[Any, Any]:
        """Return a context for the forward of the layer, and one for its recomputation."""
        return _active(Keeping(self)), _active(Returning(self))

    def keep(self, result: Any) -> None:
        """Keep the result of an operator: a tensor, or a tuple."""
        parts = result if isinstance(result, tuple) else (result,)
        self._results.append((type(result), [_send(self._offload, self._layer, part) for part in parts]))

    def take(self) -> Any:
        """Return the next result, which is then no longer kept."""
        kind, parts = self._results.pop(0)
        fetched = [_fetch(self._offload, part) for part in parts]
        return tuple(fetched) if issubclass(kind, tuple) else fetched[0]


class Keeping(TorchDispatchMode):
    """Keeps the results of attention operators while it is entered."""

    def __init__(self, kept: KeptAttention) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        result = func(*args, **(kwargs or {}))
        if func in ATTENTION:
            self.kept.keep(result)
        return result


class Returning(Keeping):
    """Returns the kept results of attention operators while it is entered, instead of running them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return its result in forward."""
        return self.kept.take() if func in ATTENTION else func(*args, **(kwargs or {}))


_modes: list[Keeping] = []  # of the layer that computes now
_keeping: list[Callable[..., Any]] = []  # attention functions that enter them


@contextlib.contextmanager
def _active(mode: Keeping) -> Iterator[None]:
    """Enter a mode in each call of attention in this context: it would take time in all other operators."""
    _modes.append(mode)
    try:
        yield
    finally:
        _modes.remove(mode)


def keep_attention() -> None:
    """Let layers keep the results of attention from now on, in this process, inside `KeptAttention.contexts`.

    A compiler leaves these calls out of its graphs.
    """
    registered: Any = AttentionInterface()
    for name in KERNELS:
        if registered[name] not in _keeping:
            _keeping.append(_with_modes(registered[name]))
            AttentionInterface.register(name, _keeping[-1])


def _with_modes(attention: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(attention)
    def with_mode(*args: Any, **kwargs: Any) -> Any:
        if not _modes:
            return attention(*args, **kwargs)
        if kwargs.get("dropout"):
            raise RecipeError(
                "fsdp.activation_checkpointing: keep_attention cannot repeat the random numbers of dropout in "
                "attention: set that of model.config to 0, or leave keep_attention out"
            )
        with _modes[-1]:
            return attention(*args, **kwargs)

    return with_mode
