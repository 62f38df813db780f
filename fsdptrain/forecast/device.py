"""A pretended accelerator and a pretended world: a device with streams, and a process group without other processes.

torch treats the device (PrivateUse1) as a real one, separate from the host, with streams and events. The device only
records which stream waits for which. It cannot be unregistered: use it in a separate process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fsdptrain.forecast.kernels import cuda_attention
from fsdptrain.forecast.patches import KERNELS
from fsdptrain.forecast.trace import HOST, Event, RecordEvent, Synchronize, WaitEvent
from fsdptrain.parallel.world import Floats, HostCopy, World, make_groups, make_meshes
from fsdptrain.plan.plan import Plan

PRETEND = "pretend"  # the accelerator's device type
listeners: list[Callable[[Event], None]] = []  # called with every event of the device; see `recorder`


def trace_event(event: Event) -> None:
    """Pass an event of the device to the recorder, if one is entered."""
    for listener in listeners:
        listener(event)


class PretendStream:
    """A stream of the pretended accelerator: a number, and a record of what waits for what.

    It has what `torch.Stream` has, for torch may use any of it; only the native handle does not exist.
    """

    device_index, device_type = 0, 20  # torch's number for a device of another maker, PrivateUse1
    is_capturing = staticmethod(lambda: False)  # no graph of kernels is captured
    query = staticmethod(lambda: True)  # nothing computes, so all work is done
    numbers = 0
    current: list[PretendStream] = []  # noqa: RUF012  (the innermost `with stream:` is last)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = PretendStream.numbers
        PretendStream.numbers += 1
        self.waited_for = 0  # the newest event on this stream for which the host has waited

    @property
    def device(self) -> torch.device:
        """The accelerator."""
        return torch.device(PRETEND, self.device_index)

    def record_event(self, event: DeviceEvent | None = None) -> DeviceEvent:
        """Record an event on this stream."""
        event = event or DeviceEvent()
        event.record(self)
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        """Make this stream wait for an event."""
        if event.number is not None:
            trace_event(WaitEvent(event.number, self.stream_id))

    def wait_stream(self, other: PretendStream) -> None:
        """Make this stream wait for all work that was given to another one."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait."""
        trace_event(Synchronize())


class DeviceEvent:
    """An event of the pretended accelerator. It happens when the host waits for it or for a later one of its stream."""

    numbers = 0
    elapsed_time = staticmethod(lambda end: 0.0)  # nothing computes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number: int | None = None

    def record(self, stream: PretendStream | None = None) -> DeviceEvent:
        """Record this event on a stream, by default the current one."""
        DeviceEvent.numbers += 1
        self.number, self.stream = DeviceEvent.numbers, stream or PretendStream.current[-1]
        trace_event(RecordEvent(self.number, self.stream.stream_id))
        return self

    def wait(self, stream: PretendStream | None = None) -> None:
        """Make a stream, by default the current one, wait for this event."""
        (stream or PretendStream.current[-1]).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for this event. If it has happened already, that is no wait."""
        if self.number is not None and not self.query():
            self.stream.waited_for = self.number
            trace_event(Synchronize(self.number))

    def query(self) -> bool:
        """Return whether the event has happened."""
        return self.number is None or self.number <= self.stream.waited_for


class Backend:
    """The accelerator's module: what torch calls as `torch.pretend`. There is one accelerator."""

    Stream, Event = PretendStream, DeviceEvent
    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = set_device = staticmethod(lambda _: None)  # nothing is random, and there is only one
    current_stream = staticmethod(lambda device=None: PretendStream.current[-1])
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])  # recomputation reads them

    @contextlib.contextmanager
    def stream(self, stream: PretendStream) -> Iterator[None]:
        """Give work to another stream."""
        PretendStream.current.append(stream)
        try:
            yield
        finally:
            PretendStream.current.pop()

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait."""
        trace_event(Synchronize())


def pretend_accelerator() -> torch.device:
    """Register the accelerator (once a process), with the attention kernels that CUDA would choose.

    Without kernels of its own a device would get attention and some backward operators in pieces.
    """
    if not hasattr(torch, PRETEND):
        PretendStream.current.append(PretendStream())
        _setup_privateuseone_for_python_backend(PRETEND, backend_module=Backend())
        functional: Any = torch.nn.functional
        accelerator: Any = torch.accelerator
        functional.scaled_dot_product_attention = cuda_attention(PRETEND, functional.scaled_dot_product_attention)
        for operator in ("silu_backward", "mish_backward"):
            KERNELS.impl(operator, lambda *_: None, "PrivateUse1")  # never called: fake tensors need only its shape
        accelerator.current_stream = Backend.current_stream
    return torch.device(PRETEND)


class PretendCopy(HostCopy):
    """A copy whose numbers do not exist: they are finite."""

    def _numbers(self) -> Floats:
        return np.full(self._copy.shape, 1e6)


class PretendWorld(World):
    """A world whose other ranks do not exist: collectives return at once, and what they return is arbitrary."""

    def host_copy(self, tensor: torch.Tensor) -> HostCopy:
        """Start the copy of a run; the numbers in it are arbitrary."""
        return PretendCopy(tensor)

    def peak_memory(self) -> int:
        """Return 0: the peak is computed from the trace."""
        return 0


@contextlib.contextmanager
def pretend_world(plan: Plan, device: torch.device, rank: int = 0) -> Iterator[World]:
    """Provide a rank of the plan's world over torch's fake process group: the first of a stage."""
    size = plan.topology.world_size
    backend = "cpu:fake" if device.type == HOST else f"cpu:fake,{device.type}:fake"
    dist.init_process_group(backend, rank=rank, world_size=size, store=dist.HashStore())
    try:
        meshes = make_meshes(plan, device.type)
        side: Any = dist.group.WORLD
        yield PretendWorld(rank, 0, size, device, meshes[1], side, [], meshes=meshes, **make_groups(plan))
    finally:
        dist.destroy_process_group()


def current_stream() -> int:
    """Return the number of the stream that work is given to."""
    return PretendStream.current[-1].stream_id if PretendStream.current else 0
