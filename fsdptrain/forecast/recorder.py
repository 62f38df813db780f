"""Record what torch does on fake or real tensors as a `Trace`: memory, kernels, collectives and their order."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from fsdptrain.forecast import device as pretend
from fsdptrain.forecast import kernels
from fsdptrain.forecast.timing import COMPUTE_STREAM
from fsdptrain.forecast.trace import (
    HOST,
    HOST_STREAM,
    Alloc,
    Category,
    Collective,
    Event,
    Free,
    Kernel,
    Moment,
    Storage,
    Synchronize,
    Trace,
    WaitEvent,
)
from fsdptrain.model import tiles, varlen
from fsdptrain.model.patches import VARLEN_FORWARD
from fsdptrain.parallel.patches import CONTEXT, EXPERTS, REDUCTIONS, TENSOR, TorchDispatchMode

LOSS, END_OF_STAGE = "loss", "end of the stage"  # moments behind the layers
LOSS_BACKWARD = "backward of the loss"
BACKWARD = {LOSS: LOSS_BACKWARD, END_OF_STAGE: "backward of the stage"}  # the moments that follow
MESSAGES = -2  # the stream of messages between stages
aten, c10d, fsdp = torch.ops.aten, torch.ops.c10d, torch.ops.fsdp


def _of_fsdp(*names: str) -> set[Any]:
    """Return those of FSDP2's own operators that this version of torch has."""
    return {getattr(fsdp, name).default for name in names if hasattr(fsdp, name)}


OPERANDS: dict[Any, dict[int | str, Category]] = {  # operator → what its arguments are, by place or name
    c10d._allgather_base_.default: {0: "communication buffers"},
    c10d._reduce_scatter_base_.default: {1: "communication buffers", 0: "gradients"},
    c10d.alltoall_base_.default: {1: "communication buffers", 0: "communication buffers"},
    fsdp.split_with_sizes_copy.default: {"out": "gathered parameters"},
    # Since torch 2.15 the second.
    **{
        each: {0: "gradients", "out": "communication buffers"}
        for each in _of_fsdp("chunk_cat", "chunk_cat_mixed_dtype")
    },
}

COLLECTIVES: dict[Any, tuple[Any, int]] = {  # operator → kind, and which argument is the full buffer
    c10d._allgather_base_.default: ("all-gather", 0),
    c10d.allgather_.default: ("all-gather", 0),
    c10d._reduce_scatter_base_.default: ("reduce-scatter", 1),
    c10d.alltoall_base_.default: ("reduce-scatter", 1),  # see shard._GlooReduceScatter
    c10d.allreduce_.default: ("all-reduce", 0),
    c10d.broadcast_.default: ("broadcast", 0),
}

OF_TOKENS: dict[str, dict[Any, Any]] = {  # description of a group that exchanges tokens → operator → kind
    CONTEXT: {c10d.alltoall_base_.default: "all-to-all"},
    TENSOR: {
        c10d._allgather_base_.default: "gather of tokens",
        c10d._reduce_scatter_base_.default: "sum of tokens",
        c10d.alltoall_base_.default: "sum of tokens",  # on a CPU: see tensor_parallel
    },
    EXPERTS: {c10d.alltoall_base_.default: "tokens to experts"},
}

# For operators whose inside is not seen: FLOPs and, in bytes, what they allocate besides results.
ATTENTION: dict[Any, Callable[..., int]] = kernels.FLOPS | tiles.FLOPS | varlen.FLOPS

WORKSPACE: dict[Any, Callable[..., int]] = kernels.WORKSPACE | tiles.WORKSPACE | varlen.WORKSPACE

NO_KERNEL = {  # compute and move nothing, although their schemas are not those of views
    aten._unsafe_view.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.lift_fresh.default, aten.detach.default, aten.new_empty_strided.default,
    *_of_fsdp("record_grad_output_stream"),
}  # fmt: skip

NEED_RESULT = {  # the host needs a number or a shape that the device computes
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default,
    aten.masked_select.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip

PRODUCTS = {aten.mm.default, aten.addmm.default}
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Recorder(TorchDispatchMode):
    """Records a trace of what torch does while it is entered, on fake or real tensors.

    It tracks storages, not tensors: views share one, and FSDP2 frees a storage by resizing it to 0 bytes.
    """

    hidden = 0  # nothing is recorded while this is above 0

    def __init__(
        self, device: str, vocab_size: int | None = None, on_moment: Callable[[], None] = lambda: None
    ) -> None:
        """`on_moment` is called whenever a moment of the step begins."""
        super().__init__()
        self.on_moment = on_moment
        self.device = device
        self.trace = Trace()
        self.vocab_size = vocab_size
        self.known: Any = WeakIdKeyDictionary()  # torch storage → _Entry
        self.moment = ""
        self.backwards = 0  # backward passes begun so far
        self.entered = False

    def __enter__(self) -> Recorder:
        pretend.listeners.append(self.write)
        self.entered = True
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if entry := self.known.get(storage):
                self._set_size(entry, storage.nbytes())

        self._resizes = mock.patch.object(torch.UntypedStorage, "resize_", resized)  # no dispatch mode sees it
        self._resizes.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._resizes.stop()
        pretend.listeners.remove(self.write)
        self.entered = False  # what is freed from now on is not part of the trace

    @classmethod
    @contextlib.contextmanager
    def unrecorded(cls) -> Iterator[None]:
        """Record nothing of what happens inside."""
        Recorder.hidden += 1
        try:
            yield
        finally:
            Recorder.hidden -= 1

    def write(self, event: Event) -> None:
        """Add an event to the trace."""
        self.trace.events.append(event)

    def begin(self, moment: str) -> None:
        """Name the moment of the step that begins now."""
        self.moment = moment
        self.on_moment()
        self.backwards += moment in BACKWARD.values()
        self.write(Moment(moment))

    def tag(self, tensor: torch.Tensor, category: Category, unless: Category | None = None) -> None:
        """Set the category of a tensor's memory; memory that is not known yet was allocated before the trace."""
        storage = storage_of(tensor)
        entry = self.known.get(storage)
        if entry is None:
            self._add_storage(storage, tensor.device.type, category)
        elif entry.storage.category != unless:
            entry.storage.category = category

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor then calls operators on local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if Recorder.hidden or func.namespace == "prim":  # prim reads a tensor's device and the like
            return result
        backward = torch._C._current_graph_task_id() != -1
        if backward and self.moment in BACKWARD:
            self.begin(BACKWARD[self.moment])
        elif func is aten._foreach_norm.Scalar:
            self.begin("gradient norm")
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage not in self.known:
                self._add_storage(storage, tensor.device.type, self._category(func, tensor, backward))
        self._tag_operands(func, args, kwargs)
        self._record_work(func, args, kwargs, result)
        return result

    def _category(self, func: Any, tensor: torch.Tensor, backward: bool) -> Category:
        """Return the category of a new tensor, as far as it is known at its allocation."""
        if tensor.ndim and tensor.shape[-1] == self.vocab_size and self.moment != "optimizer":
            return "logits and loss"
        # Functions with a backward of their own call these without: see varlen and nf4.
        differentiated = torch.is_grad_enabled() or func is VARLEN_FORWARD or (func in PRODUCTS and not backward)
        if backward:  # gradients are enabled there only in recomputation
            return "recomputed activations" if differentiated else "temporaries"
        return "saved activations" if differentiated else "temporaries"

    def _tag_operands(self, func: Any, args: Any, kwargs: Any) -> None:
        """Set the categories of tensors that FSDP2's own operators take and return."""
        if func in COLLECTIVES and func in OF_TOKENS.get(_group_of(args).group_desc, ()):
            return  # activations
        for place, category in OPERANDS.get(func, {}).items():
            for tensor in tensors_in(kwargs[place] if isinstance(place, str) else args[place]):
                self.tag(tensor, category)
        if func is aten.add_.Tensor and pretend.current_stream() != COMPUTE_STREAM:
            for tensor in args[:2]:  # FSDP2 adds shards of gradients of several micro-batches
                self.tag(tensor, "gradients")
        elif func is aten.sum.IntList_out and args[0].numel() > kwargs["out"].numel() > 1:
            self.tag(kwargs["out"], "gradients")

    def _record_work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a collective or a kernel on the current stream."""
        stream = pretend.current_stream()
        if func is c10d.send.default:
            self._record_message(args)
            return
        if func.namespace == "c10d":
            if func not in (c10d.barrier.default, c10d.recv_.default):
                kind, place = COLLECTIVES.get(func, ("other", 0))
                group = _group_of(args)
                what = group.group_desc
                if func is c10d.alltoall_base_.default and self.moment == "optimizer":
                    kind = "all-to-all"  # of Muon
                kind = OF_TOKENS.get(what, {}).get(func, kind)
                ranks = tuple(dist.get_process_group_ranks(group))
                apart = what in (REDUCTIONS, TENSOR, EXPERTS)
                self.write(Collective(kind, ranks, _total_bytes(args[place]), stream, apart))
            return
        if func.is_view or func in NO_KERNEL:
            return
        if func in ATTENTION:
            flops = ATTENTION[func](*args, **kwargs)
        else:
            formula = flop_registry.get(func._overloadpacket)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
        moved = _total_bytes((args, kwargs)) + (_total_bytes(result) if not func._schema.is_mutable else 0)
        devices = {tensor.device.type for tensor in tensors_in((args, kwargs, result)) if tensor.ndim}
        link = _total_bytes(result) if len(devices) > 1 else 0
        if devices == {HOST} != {self.device}:
            stream = HOST_STREAM
        if func in WORKSPACE:
            workspace = Storage(self.device, "temporaries")
            self.write(Alloc(workspace, WORKSPACE[func](*args, **kwargs), stream))
            self.write(Free(workspace))
        self.write(Kernel(kernels.name_of(func), int(flops), moved, link, stream))
        if host_waits(func, args, kwargs, result):
            self.write(Synchronize())

    def _record_message(self, args: Any) -> None:
        """Record a message to another stage, in a stream of its own, behind what was computed before."""
        group, other = _group_of(args), args[2]
        every = dist.get_process_group_ranks(group)
        ranks, stream = (every[group.rank()], every[other]), COMPUTE_STREAM
        if self.device != HOST:
            stream = MESSAGES
            self.write(WaitEvent(pretend.DeviceEvent().record().number or 0, stream))
        self.write(Collective("message", ranks, _total_bytes(args[0]), stream, apart=True))

    def _add_storage(self, storage: Any, device: str, category: Category) -> None:
        entry = _Entry(Storage(device, category), self.backwards)
        self.known[storage] = entry
        self._set_size(entry, storage.nbytes())
        weakref.finalize(storage, self._set_size, entry, 0).atexit = False

    def _set_size(self, entry: _Entry, size: int) -> None:
        before, entry.size = entry.size, size
        if size == before or not self.entered:
            return
        if before:
            if entry.storage.category == "saved activations" and entry.born == self.backwards:
                entry.storage.category = "temporaries"  # freed before a backward pass could use it
            self.write(Free(entry.storage))
        if size:
            self.write(Alloc(entry.storage, size, pretend.current_stream()))


@dataclasses.dataclass(slots=True)
class _Entry:
    storage: Storage
    born: int  # how many backward passes had begun when it was allocated
    size: int = 0


def _group_of(args: Any) -> dist.ProcessGroup:
    """Return the group of a collective: of two objects among its arguments the first, before the operation."""
    group: dist.ProcessGroup = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
    return group


def host_waits(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Return whether the host waits for the device in an operator: for a number, a shape or a blocking copy."""
    devices = {tensor.device.type for tensor in tensors_in((args, kwargs, result))}
    if devices <= {HOST}:
        return False
    if func in COPIES:
        return len(devices) > 1 and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    if func in INDEXED:  # a mask is first searched for its true elements
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))
    return func in NEED_RESULT


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor, or of this rank's part of a DTensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, in their order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(each)


def _total_bytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))
