"""Recomputation: what the forward of a layer keeps for its backward, which computes the rest again.

A layer keeps its input; with `selective` the results of products and of attention too, with `keep_attention` those of
attention, and with experts on other ranks which of them its routers have chosen. With `offload` all of it waits in host
memory.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
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

CHOICE = aten.topk.default  # of experts: a near-tie that is decided otherwise would send a token to another rank

KERNELS = ("sdpa", varlen.NAME)  # in transformers' registry: those whose attention is one of these operators


def recompute(layers: list[nn.Module], how: Recomputation, device: torch.device, sends_tokens: bool = False) -> None:
    """Free the activations of these layers after forward and compute them again in backward.

    If they send tokens to experts of other ranks, the choice of experts is kept: see `keep_choices`.
    """
    if how.kind == "none":
        return
    if how.keep_attention:
        keep_attention()
    operators = [*(ATTENTION if how.keep_attention else ()), *((CHOICE,) if sends_tokens else ())]
    selective = functools.partial(create_selective_checkpoint_contexts, SAVED) if how.kind == "selective" else None
    offload = Offload(device) if how.offload else None

    def start() -> Kept:
        return Kept(operators, offload, selective)

    for layer in layers[:: how.every]:
        if offload:
            layer.forward = _sent(layer.forward, start)
        else:
            layer.forward = _recomputed(layer.forward, (lambda: start().contexts()) if operators else selective)


def _recomputed(forward: Callable[..., Any], context: Callable[[], Any] | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": context} if context else {})

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _sent(forward: Callable[..., Any], start: Callable[[], Kept]) -> Callable[..., Any]:
    """Return the forward of a layer, which is recomputed from its first argument; that waits in host memory."""

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not args:
            raise RecipeError(
                "fsdp.activation_checkpointing: offload needs layers that take their input as the first argument, and "
                "this architecture names it: use full"
            )
        kept, (x, *rest) = start(), args
        del args  # so that the function below has no reference to the input
        with torch.autograd.graph.saved_tensors_hooks(kept.send, kept.fetch_input):
            return checkpoint(lambda x: forward(x, *rest, **kwargs), x, use_reentrant=False, context_fn=kept.contexts)

    return recomputed


class Kept(TorchDispatchMode):
    """What one forward of a layer keeps: its input, and the results of some operators in their order.

    Calls of attention and blocks with experts enter it: in all other operators it would take time. With `offload` the
    layer before is fetched early, but not before the memory of this layer's feed-forward part is free again, if that is
    known: then its attention is next in backward. `others` makes contexts in addition.
    """

    def __init__(self, operators: Sequence[Any], offload: Offload | None = None, others: Any = None) -> None:
        super().__init__()
        self.operators, self.offload, self._others = operators, offload, others
        self._results: list[tuple[bool, list[Any]]] = []
        self.recomputing = False
        self.sent: list[weakref.ref[_Offloaded]] = []  # autograd alone keeps them alive, and this as well
        self.before = offload.follow(self) if offload else None

    def contexts(self) -> tuple[Any, Any]:
        """Return a context for the forward of the layer, and one for its recomputation."""
        first, again = self._others() if self._others else (contextlib.nullcontext(), contextlib.nullcontext())
        return self._computing(first, recomputing=False), self._computing(again, recomputing=True)

    @contextlib.contextmanager
    def _computing(self, other: Any, recomputing: bool) -> Iterator[None]:
        self.recomputing = recomputing
        _computing.append(self)
        try:
            with other:
                yield
        finally:
            _computing.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the result of an operator, or return the one that was kept instead of running it."""
        if func not in self.operators:
            return func(*args, **(kwargs or {}))
        if self.recomputing:
            return self.take()
        result = func(*args, **(kwargs or {}))
        self.keep(result)
        return tuple(map(torch.clone, result)) if func is CHOICE else result  # some routers change it in place

    def send(self, kept: Any) -> Any:
        """Return what is kept instead: a tensor that waits in host memory, or the thing itself."""
        if not isinstance(kept, torch.Tensor):
            return kept
        if self.offload is None or kept.nbytes <= SMALL:
            return kept.detach()
        waiting = self.offload.send(kept.detach())
        self.sent.append(weakref.ref(waiting))
        return waiting

    def fetch(self, kept: Any) -> Any:
        """Return what `send` was given."""
        return self.offload.fetch(kept, self.sent) if self.offload and isinstance(kept, _Offloaded) else kept

    def fetch_input(self, kept: Any) -> Any:
        """Return the input of the layer, which is about to be recomputed."""
        fetched = self.fetch(kept)
        if isinstance(kept, _Offloaded) and not self.keeps_attention:
            self.fetch_before()
        return fetched

    @property
    def keeps_attention(self) -> bool:
        """Whether the results of attention are kept."""
        return ATTENTION[0] in self.operators

    def fetch_before(self, *_: Any) -> None:
        """Start to fetch what the layer before has kept."""
        before = self.before() if self.before else None
        if self.offload and before:
            self.offload.start_fetching(before.sent)

    def keep(self, result: Any) -> None:
        """Keep the result of an operator, its largest part last: the next one waits until it is sent."""
        parts = result if isinstance(result, tuple) else (result,)
        ascending = sorted(range(len(parts)), key=lambda i: getattr(parts[i], "nbytes", 0))
        sent = {i: self.send(parts[i]) for i in ascending}
        self._results.append((isinstance(result, tuple), [sent[i] for i in range(len(parts))]))

    def take(self) -> Any:
        """Return the next result, which is then no longer kept."""
        several, parts = self._results.pop(0)
        fetched = [self.fetch(part) for part in parts]
        return tuple(fetched) if several else fetched[0]


_computing: list[Kept] = []  # of the layer that computes now
_keeping: list[Callable[..., Any]] = []  # attention functions that enter it


def keep_choices(block: Any) -> None:
    """Let a block with a router and experts keep what it chooses, in a layer that is recomputed."""
    forward = block.forward

    @functools.wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with _computing[-1] if _computing else contextlib.nullcontext():
            return forward(*args, **kwargs)

    block.forward = kept


def keep_attention() -> None:
    """Let layers keep the results of attention from now on, in this process, inside `Kept.contexts`."""
    registered: Any = AttentionInterface()
    for name in KERNELS:
        if registered[name] not in _keeping:
            _keeping.append(_entering_kept(registered[name]))
            AttentionInterface.register(name, _keeping[-1])


def _entering_kept(attention: Callable[..., Any]) -> Callable[..., Any]:
    # A compiler leaves these calls out of its graphs.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(attention)
    def entering_kept(*args: Any, **kwargs: Any) -> Any:
        if not (_computing and _computing[-1].keeps_attention):
            return attention(*args, **kwargs)
        if kwargs.get("dropout"):
            raise RecipeError(
                "fsdp.activation_checkpointing: keep_attention cannot repeat the random numbers of dropout in "
                "attention: set that of model.config to 0, or leave keep_attention out"
            )
        with _computing[-1] as kept:
            result = attention(*args, **kwargs)
        # Backward uses the result of forward, not that of the recomputation.
        if not kept.recomputing and result[0].requires_grad:
            result[0].register_hook(kept.fetch_before)
        return result

    return entering_kept


# ---------------------------------------------------------------------------------------------------------- host memory

PORTABLE = 1  # cudaHostRegisterPortable


class _Offloaded:
    """A tensor of a layer that waits in host memory.

    `on_device` is there until it is copied, and again from one layer before its use, until it is `used`. `event` is
    after its newest copy.
    """

    def __init__(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        self.event, self.used = None, False
        # With the strides of the tensor, which has no gaps, a copy is one piece, and layers get the layout they made.
        self.in_host = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        self.hold(tensor)

    def hold(self, tensor: torch.Tensor) -> None:
        self.on_device: torch.Tensor | None = tensor
        self._version = tensor._version

    def free(self) -> torch.Tensor:
        """Return the tensor, which is then no longer on the device. Raises RuntimeError if anything has changed it."""
        tensor, self.on_device = self.on_device, None
        assert tensor is not None
        if tensor._version != self._version:
            raise RuntimeError("internal error: what a layer keeps was changed in place (please report it)")
        return tensor


class Offload:
    """Sends tensors of layers to host memory in forward, and fetches them in backward."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._newest: weakref.ref[Kept] | None = None
        self._sending: weakref.ref[_Offloaded] | None = None
        self._free: dict[int, list[torch.Tensor]] = {}  # bytes → pieces of host memory, which are never given back

    @functools.cached_property
    def _stream(self) -> Any:
        return self._module.Stream()

    def follow(self, kept: Kept) -> weakref.ref[Kept] | None:
        """Return the forward of a layer before this one, which is the newest now."""
        before, self._newest = self._newest, weakref.ref(kept)
        return before

    def send(self, tensor: torch.Tensor) -> _Offloaded:
        """Start to copy a tensor to host memory, where it waits until it is fetched.

        One copy at a time is under way: the computation first waits for the one before, and frees what that has copied.
        """
        self._free_sent()
        pieces = self._free.setdefault(tensor.nbytes, [])
        memory = pieces.pop() if pieces else _host_memory(tensor.nbytes, self._device)
        waiting = _Offloaded(tensor, memory)
        # Later copies are on the same stream, so that another tensor may take the memory while the last one is running.
        weakref.finalize(waiting, pieces.append, memory).atexit = False
        self._copy(waiting.in_host, tensor, waiting)
        self._sending = weakref.ref(waiting)
        if self._device.type == "cpu":
            self._free_sent()
        return waiting

    def fetch(self, waiting: _Offloaded, others: list[weakref.ref[_Offloaded]]) -> torch.Tensor:
        """Return a tensor on the device again; the computation waits for it, unless it was fetched before.

        All `others` of its layer are fetched with it.
        """
        self.start_fetching(others)
        if waiting.on_device is None:  # it is needed a second time
            self._start(waiting)
        self._module.current_stream().wait_event(waiting.event)
        waiting.used = True
        return waiting.free()

    def start_fetching(self, tensors: list[weakref.ref[_Offloaded]]) -> None:
        """Start to copy to the device what is not there and not used."""
        for each in [tensor() for tensor in tensors]:
            if each is not None and each.on_device is None and not each.used:
                self._start(each)

    def _start(self, waiting: _Offloaded) -> None:
        target = torch.empty_like(waiting.in_host, device=self._device)
        self._copy(target, waiting.in_host, waiting)
        waiting.hold(target)

    def _free_sent(self) -> None:
        waiting = self._sending() if self._sending else None
        self._sending = None
        if waiting is not None:
            self._module.current_stream().wait_event(waiting.event)
            waiting.free()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, waiting: _Offloaded) -> None:
        """Copy after all that computes now, on the stream for copies; a CPU's stands for none."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            waiting.event = self._stream.record_event()


def _host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Return `size` bytes of unset host memory, pinned if `device` is a GPU and its driver allows it.

    It is pinned where it is: torch's allocator of pinned memory would round `size` up to a power of two
    (CachingHostAllocator.h: `allocate`).
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda":
        try:
            pin_memory(memory)
        except RuntimeError as error:
            _note(f"activations wait in pageable host memory, which is slower: {error}")
    return memory


@functools.cache
def _note(text: str) -> None:
    print(text, flush=True)


def pin_memory(memory: torch.Tensor) -> None:
    """Pin memory where it is. Raises RuntimeError if the driver refuses."""
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
    if int(error):
        # CUDA keeps the error for whoever looks at the next kernel: a kernel of no importance takes it away.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(cudart.cudaGetErrorString(error))
