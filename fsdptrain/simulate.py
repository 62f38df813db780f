"""The engine itself on fake tensors: one optimizer step of rank 0, without a GPU, without weights, as a `Trace`.

Everything is the trainer's own: skeleton, units, `shard`, `allocate`, optimizer, `Engine.step`. What is pretended are
the device, the process group and the numbers. A pretended accelerator is registered for the whole process and cannot
be taken back: simulate in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary
from transformers import masking_utils

from fsdptrain.dist import World, make_mesh
from fsdptrain.engine import Engine
from fsdptrain.model import Unit, skeleton, units_of
from fsdptrain.optim import make_optimizer, start_state
from fsdptrain.plan import Plan
from fsdptrain.shard import shard
from fsdptrain.trace import (
    HOST, Alloc, Category, Collective, Event, Free, Kernel, Moment, Record, Storage, Synchronize, Trace, Wait,
)  # fmt: skip
from fsdptrain.weights import allocate, place_buffers

PRETEND = "pretend"  # the accelerator's device type
LOSS_BACKWARD = "backward of the loss"
aten = torch.ops.aten


class Stream:
    """A stream of the pretended accelerator: it only has a number, and writes down who waits for whom."""

    numbers = 0
    current: list[Stream] = []  # noqa: RUF012  (the innermost `with stream:` is last)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = Stream.numbers
        Stream.numbers += 1

    def record_event(self, event: DeviceEvent | None = None) -> DeviceEvent:
        event = event or DeviceEvent()
        event.record(self)
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        if event.number is not None:
            write_down(Wait(event.number, self.number))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        write_down(Synchronize())


class DeviceEvent:
    """An event of the pretended accelerator."""

    numbers = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> DeviceEvent:
        DeviceEvent.numbers += 1
        self.number = DeviceEvent.numbers
        write_down(Record(self.number, (stream or Stream.current[-1]).number))
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream.current[-1]).wait_event(self)

    def synchronize(self) -> None:
        write_down(Synchronize())

    def query(self) -> bool:
        return True


def write_down(event: Event) -> None:
    """Add an event of the device to the trace that is being written, if one is."""
    if Recorder.active is not None:
        Recorder.active.trace.events.append(event)


def pretend_accelerator() -> torch.device:
    """Register the accelerator (once a process) and send its attention to the kernels CUDA would choose."""
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Backend(_DummyBackendModule):
        Stream, Event = Stream, DeviceEvent

        def current_stream(self, device: Any = None) -> Stream:
            return Stream.current[-1]

        @contextlib.contextmanager
        def stream(self, stream: Stream) -> Iterator[None]:
            Stream.current.append(stream)
            try:
                yield
            finally:
                Stream.current.pop()

        def set_device(self, device: Any) -> None: ...

        def get_amp_supported_dtype(self) -> list[torch.dtype]:  # asked for by recomputation
            return [torch.bfloat16, torch.float16]

        def synchronize(self, device: Any = None) -> None:
            write_down(Synchronize())

    if not hasattr(torch, PRETEND):
        Stream.current.append(Stream())
        _setup_privateuseone_for_python_backend(PRETEND, backend_module=Backend())
        attention = cuda_attention(torch.nn.functional.scaled_dot_product_attention)
        torch.nn.functional.scaled_dot_product_attention = attention
        torch._C._nn.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
        torch.accelerator.current_stream = lambda device=None: Stream.current[-1]  # type: ignore[assignment,return-value]
    return torch.device(PRETEND)


def cuda_attention(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Scaled dot product attention by the rules CUDA chooses its kernel by; a device of our own would get `math`."""

    def attention(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if q.device.type != PRETEND:
            return otherwise(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        half = q.dtype in (torch.bfloat16, torch.float16)
        if attn_mask is None and half and q.shape[-1] == v.shape[-1] <= 256:
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
            attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        grad = any(x.requires_grad for x in (q, k, v))
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, grad, dropout_p, is_causal, scale=scale
        )[0]

    return attention


class PretendWorld(World):
    """A world whose other ranks only seem to be there: collectives return at once, with anything in them."""

    def gather(self, values: torch.Tensor) -> np.ndarray[Any, Any]:
        """The same traffic as in a run, and finite numbers that are large enough to be clipped."""
        local = values.to(self.device, torch.float64)
        dist.all_gather([torch.empty_like(local) for _ in range(self.size)], local)
        write_down(Synchronize())
        return np.full((self.size, len(values)), 1e6)

    def peak_memory(self) -> int:
        """Nothing: the trace knows."""
        return 0


@contextlib.contextmanager
def pretend_world(plan: Plan, device: torch.device) -> Iterator[World]:
    """Rank 0 of the plan's world over torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = plan.topology.world_size
    backend = "cpu:fake" if device.type == HOST else f"cpu:fake,{device.type}:fake"
    dist.init_process_group(backend, rank=0, world_size=size, store=FakeStore())
    try:
        yield PretendWorld(0, 0, size, device, make_mesh(plan, device.type), dist.group.WORLD)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


c10d, fsdp = torch.ops.c10d, torch.ops.fsdp
COLLECTIVES: dict[Any, tuple[Any, int]] = {  # operator → kind, and which argument is the full buffer
    c10d._allgather_base_.default: ("all-gather", 0),
    c10d.allgather_.default: ("all-gather", 0),
    c10d._reduce_scatter_base_.default: ("reduce-scatter", 1),
    c10d.allreduce_.default: ("all-reduce", 0),
    c10d.broadcast_.default: ("broadcast", 0),
}
ATTENTION = {  # the CPU's flash kernel is missing from torch's registry of FLOP formulas
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}
NO_KERNEL = {  # neither computes nor moves anything, though no view by its schema
    aten._unsafe_view.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.lift_fresh.default, aten.detach.default, aten.new_empty_strided.default,
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Writes a trace of all that torch does while it is entered: on fake tensors, or on real ones.

    It sees storages, not tensors: views share one, and FSDP2 gives its storages back by resizing them to nothing.
    """

    active: Recorder | None = None

    def __init__(self, vocab_size: int | None = None) -> None:
        super().__init__()
        self.trace = Trace()
        self.vocab_size = vocab_size
        self.known: Any = WeakIdKeyDictionary()  # torch storage → _Entry
        self.moment = ""
        self.backwards = 0  # begun so far

    def __enter__(self) -> Recorder:
        Recorder.active = self
        self._resize, recorder = torch.UntypedStorage.resize_, self

        def resize(storage: Any, size: int) -> None:
            recorder._resize(storage, size)
            entry = recorder.known.get(storage)
            if entry is not None:
                recorder._sized(entry, storage.nbytes())

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        Recorder.active = None

    def begin(self, moment: str) -> None:
        """From now on it is this moment of the step."""
        self.moment = moment
        self.backwards += moment == LOSS_BACKWARD
        self.trace.events.append(Moment(moment))

    def tag(self, tensor: torch.Tensor, category: Category, known_only: bool = False) -> None:
        """Say what a tensor's memory is for; if it was not seen before, it was there before the trace."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        entry = self.known.get(storage)
        if entry is not None:
            entry.storage.category = category
        elif not known_only:
            self._new(storage, tensor.device.type, category)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes back as operators on local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _Propagation.depth or func.namespace == "prim":  # prim asks for a tensor's device and the like
            return result
        backward = torch._C._current_graph_task_id() != -1
        if backward and self.moment == "loss":
            self.begin(LOSS_BACKWARD)
        elif func is aten._foreach_norm.Scalar:
            self.begin("gradient norm")
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self._new(storage, tensor.device.type, self._category(tensor, backward))
        self._roles(func, args, kwargs)
        self._work(func, args, kwargs, result)
        return result

    def _category(self, tensor: torch.Tensor, backward: bool) -> Category:
        """What a new tensor is for, as far as that can be told at its birth."""
        if tensor.ndim and tensor.shape[-1] == self.vocab_size and self.moment != "optimizer":
            return "logits and loss"
        if backward:  # with gradients enabled it is recomputation
            return "recomputed activations" if torch.is_grad_enabled() else "temporaries"
        return "saved activations" if torch.is_grad_enabled() else "temporaries"

    def _roles(self, func: Any, args: Any, kwargs: Any) -> None:
        """FSDP2's own operators say what their tensors are for."""
        if func is c10d._allgather_base_.default:
            self.tag(args[0], "communication buffers")
        elif func is fsdp.split_with_sizes_copy.default:
            for tensor in kwargs["out"]:
                self.tag(tensor, "gathered parameters")
        elif func is fsdp.chunk_cat.default:
            for tensor in args[0]:
                self.tag(tensor, "gradients")
            self.tag(kwargs["out"], "communication buffers")
        elif func is c10d._reduce_scatter_base_.default:
            self.tag(args[1], "communication buffers")
            self.tag(args[0], "gradients")

    def _work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A collective or a kernel, on the current stream."""
        stream = Stream.current[-1].number if Stream.current else 0
        if func in collective_ops:
            if func not in sync_ops:
                kind, place = COLLECTIVES.get(func, ("other", 0))
                ranks = tuple(dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args)))
                self.trace.events.append(Collective(kind, ranks, _bytes(args[place]), stream))
            return
        if func.is_view or func in NO_KERNEL:
            return
        formula = flop_registry.get(func._overloadpacket)
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        if func in ATTENTION:
            flops = ATTENTION[func](*args, **kwargs)
        moved = _bytes((args, kwargs)) + (_bytes(result) if not func._schema.is_mutable else 0)
        devices = {t.device.type for t in tree_iter((args, kwargs, result)) if isinstance(t, torch.Tensor) and t.ndim}
        link = _bytes(result) if len(devices) > 1 else 0
        if devices == {HOST} and Stream.current:
            stream = -1  # the host computes
        self.trace.events.append(Kernel(func._overloadpacket.__name__, int(flops), moved, link, stream))

    def _new(self, storage: Any, device: str, category: Category) -> None:
        entry = _Entry(Storage(device, category), self.backwards)
        self.known[storage] = entry
        self._sized(entry, storage.nbytes())
        weakref.finalize(storage, self._sized, entry, 0).atexit = False

    def _sized(self, entry: _Entry, size: int) -> None:
        """A storage now has this many bytes."""
        before, entry.size = entry.size, size
        if size == before:
            return
        if before:
            if entry.storage.category == "saved activations" and entry.born == self.backwards:
                entry.storage.category = "temporaries"  # gone before any backward could need it
            self.trace.events.append(Free(entry.storage))
        if size:
            stream = Stream.current[-1].number if Stream.current else 0
            self.trace.events.append(Alloc(entry.storage, size, stream))


@dataclasses.dataclass(slots=True)
class _Entry:
    storage: Storage
    born: int  # after so many backwards
    size: int = 0


def _bytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_iter(tree) if isinstance(t, torch.Tensor))


class _Propagation:
    """DTensor finds output shapes by running operators at *global* shape, under the same fake mode: not for us to see."""

    depth = 0


@contextlib.contextmanager
def _mends(packed: bool) -> Iterator[None]:
    """Where torch and transformers behave differently on fake tensors than on real ones, make them not."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    find_packed = masking_utils.find_packed_sequence_indices

    def unseen(self: Any, schema: Any) -> Any:
        _Propagation.depth += 1
        try:
            return propagate(self, schema)
        finally:
            _Propagation.depth -= 1

    def found(position_ids: torch.Tensor) -> torch.Tensor | None:  # on fake tensors it says packed, whatever they are
        return find_packed(position_ids) if packed else None

    def first_chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:  # 512 fake chunks take a while
        return [tensor.narrow(dim, 0, min(tensor.size(dim), -(-tensor.size(dim) // count)))]

    with (
        _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen),
        _replaced(masking_utils, "find_packed_sequence_indices", found),
        _replaced(_fsdp_param, "_chunk_with_empty", first_chunk),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def simulate(plan: Plan, config: Any, pretend: bool) -> Trace:
    """The trace of one optimizer step of rank 0, of at most two micro-batches, with the optimizer's state in place.

    `pretend` chooses the pretended accelerator, else the fake device is the CPU. `config` is the transformers
    configuration of the model.
    """
    device = pretend_accelerator() if pretend else torch.device(HOST)
    with (
        _mends(plan.recipe.data.packing != "none"),
        pretend_world(plan, device) as world,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        engine, units = build(plan, config, world)
        with Recorder(config.get_text_config().vocab_size) as recorder:
            return record_step(recorder, engine, units, plan)


def build(plan: Plan, config: Any, world: World) -> tuple[Engine, list[Unit]]:
    """The engine as the worker builds it, but with memory where weights would be."""
    recipe = plan.recipe
    model = skeleton(config, recipe.model)
    units = units_of(model, recipe.fsdp.wrap)
    place_buffers(model, world.device, recipe.fsdp.mixed_precision.buffer_dtype)
    shard(model, units, world, plan)
    allocate(model, torch.device(HOST) if recipe.fsdp.cpu_offload else world.device)
    optimizer = make_optimizer(model, recipe.optim)
    start_state(optimizer)
    return Engine(model, optimizer, world, plan), units


def record_step(recorder: Recorder, engine: Engine, units: list[Unit], plan: Plan) -> Trace:
    """Make one step while the recorder is entered; what was there before it comes first."""
    trace = recorder.trace
    for param in engine.model.parameters():
        recorder.tag(param.detach(), "parameter shards")
    for state in engine.optimizer.state.values():
        for value in state.values():
            recorder.tag(value, "optimizer state")
    for buffer in engine.model.buffers():
        recorder.tag(buffer, "inputs and buffers")
    trace.before, trace.events = [e for e in trace.events if isinstance(e, Alloc)], []
    mark_moments(recorder, engine, units)
    shape = (plan.recipe.train.micro_batch_size, plan.recipe.data.seq_len)
    batches = [
        {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "position_ids", "labels")}
        for _ in range(min(plan.accumulation, 2))
    ]
    engine.step(0, batches, 1, plan.recipe.optim.lr)
    return trace


def mark_moments(recorder: Recorder, engine: Engine, units: list[Unit]) -> None:
    """Let the recorder know which unit is computing, through hooks that change nothing."""

    def forward(name: str) -> Callable[..., None]:
        return lambda *_: recorder.begin(f"forward of {name}")

    def backward(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = next((t for t in tree_iter(output) if isinstance(t, torch.Tensor) and t.requires_grad), None)
            if first is not None:
                first.register_hook(lambda grad: recorder.begin(f"backward of {name}"))

        return hook

    for unit in units:
        unit.modules[0].register_forward_pre_hook(forward(unit.name))
        unit.modules[-1].register_forward_hook(backward(unit.name))
    engine.model.register_forward_hook(lambda *_: recorder.begin("loss"))
    engine.optimizer.register_step_pre_hook(lambda *_: recorder.begin("optimizer"))
