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

import fsdptrain.model.tiles  # noqa: F401  (registers an operator)
from fsdptrain.config.schema import Recomputation
from fsdptrain.errors import RecipeError
from fsdptrain.model import varlen
from fsdptrain.model.patches import VARLEN_FORWARD
from fsdptrain.parallel.offload import Offload, Offloaded
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
        kept = Kept(offload, keep)
        with torch.autograd.graph.saved_tensors_hooks(kept.send, kept.fetch_input) if offload else _nothing():
            return checkpoint(
                _with_rest(forward, args[1:], kwargs), args[0], use_reentrant=False,
                context_fn=kept.contexts if keep else lambda: (_nothing(), _nothing()),
            )  # fmt: skip

    return recomputed


_nothing = contextlib.nullcontext


def _with_rest(forward: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the forward of a layer as a function of its input alone, to which it has no reference."""
    return lambda x: forward(x, *rest, **kwargs)


class Kept:
    """What one forward of a layer keeps: its input, and the results of attention operators in their order.

    The layer before is fetched early, but not before the memory of this layer's feed-forward part is free again, if
    that is known: then its attention is next in backward.
    """

    def __init__(self, offload: Offload | None, attention: bool) -> None:
        self._offload, self._layer = offload, offload.next_layer() if offload else None
        self._attention = attention
        self._results: list[Any] = []

    def contexts(self) -> tuple[Any, Any]:
        """Return a context for the forward of the layer, and one for its recomputation."""
        return _active(Keeping(self)), _active(Returning(self))

    def send(self, kept: Any) -> Any:
        """Return what stands for something that is kept: a tensor that waits in host memory, or the thing itself."""
        if not isinstance(kept, torch.Tensor):
            return kept
        if self._offload is None or self._layer is None or kept.nbytes <= SMALL:
            return kept.detach()
        return self._offload.send(kept.detach(), self._layer)

    def fetch(self, kept: Any) -> Any:
        """Return what `send` was given."""
        return self._offload.fetch(kept) if self._offload and isinstance(kept, Offloaded) else kept

    def fetch_input(self, kept: Any) -> Any:
        """Return the input of the layer, which is about to be recomputed."""
        fetched = self.fetch(kept)
        if isinstance(kept, Offloaded) and not self._attention:
            self.fetch_before()
        return fetched

    def fetch_before(self, *_: Any) -> None:
        """Start to fetch what the layer before has kept."""
        if self._offload and self._layer:
            self._offload.fetch_before(self._layer)

    def keep(self, result: Any) -> None:
        """Keep the result of an operator: a tensor, or a tuple.

        The largest part is sent last, because the computation waits for each copy when the next one is sent.
        """
        parts = result if isinstance(result, tuple) else (result,)
        ascending = sorted(range(len(parts)), key=lambda i: getattr(parts[i], "nbytes", 0))
        sent = {i: self.send(parts[i]) for i in ascending}
        self._results.append((isinstance(result, tuple), [sent[i] for i in range(len(parts))]))

    def take(self) -> Any:
        """Return the next result, which is then no longer kept."""
        several, parts = self._results.pop(0)
        fetched = [self.fetch(part) for part in parts]
        return tuple(fetched) if several else fetched[0]


class Keeping(TorchDispatchMode):
    """Keeps the results of attention operators while it is entered."""

    def __init__(self, kept: Kept) -> None:
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
    """Let layers keep the results of attention from now on, in this process, inside `Kept.contexts`.

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
        with _modes[-1] as mode:
            result = attention(*args, **kwargs)
        # Backward uses the result of forward, not that of the recomputation.
        if not isinstance(mode, Returning) and result[0].requires_grad:
            result[0].register_hook(mode.kept.fetch_before)
        return result

    return with_mode
