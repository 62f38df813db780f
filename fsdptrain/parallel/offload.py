"""Host memory for what the forward of a layer keeps for its backward: copied out behind it, and in one layer ahead.

Copies run on a stream of their own. All memory of the device belongs to the stream that computes: it waits for a copy
before it frees or reads what was copied, so that the allocator needs no record of the other stream.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch

PORTABLE = 1  # cudaHostRegisterPortable


class Offloaded:
    """A tensor of a layer that waits in host memory.

    `on_device` is there until it is copied, and again from one layer before its use, until it is `used`. `event` is
    after its newest copy.
    """

    def __init__(self, tensor: torch.Tensor, layer: Layer, memory: torch.Tensor) -> None:
        self.layer, self.event, self.used = layer, None, False
        # With the strides of the tensor, which has no gaps, a copy is one piece, and layers get the layout they made.
        self.in_host = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        self.hold(tensor)

    def hold(self, tensor: torch.Tensor) -> None:
        """Hold the tensor itself, on the device."""
        self.on_device: torch.Tensor | None = tensor
        self._version = tensor._version

    def free(self) -> torch.Tensor:
        """Return the tensor, which is then no longer on the device. Raises RuntimeError if anything has changed it."""
        tensor, self.on_device = self.on_device, None
        assert tensor is not None
        if tensor._version != self._version:
            raise RuntimeError("internal error: what a layer keeps was changed in place (please report it)")
        return tensor


class Layer:
    """What one forward of a layer has sent to host memory; `before` is the layer before it.

    It owns nothing: what autograd no longer needs is freed at once.
    """

    def __init__(self, before: weakref.ref[Layer] | None) -> None:
        self.before = before
        self.tensors: list[weakref.ref[Offloaded]] = []


class Offload:
    """Sends tensors of layers to host memory in forward, and fetches them in backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._newest: weakref.ref[Layer] | None = None
        self._sending: weakref.ref[Offloaded] | None = None
        self._free: dict[int, list[torch.Tensor]] = {}  # bytes → pieces of host memory, which are never given back

    @functools.cached_property
    def _stream(self) -> Any:
        assert self._module is not None
        return self._module.Stream()

    def next_layer(self) -> Layer:
        """Return a place for what the layer that computes now sends."""
        layer = Layer(self._newest)
        self._newest = weakref.ref(layer)
        return layer

    def send(self, tensor: torch.Tensor, layer: Layer) -> Offloaded:
        """Start to copy a tensor to host memory, where it waits until it is fetched.

        One copy at a time is under way: the computation first waits for the one before, and frees what that has copied.
        """
        self._free_sent()
        pieces = self._free.setdefault(tensor.nbytes, [])
        memory = pieces.pop() if pieces else host_memory(tensor.nbytes, self._device)
        waiting = Offloaded(tensor, layer, memory)
        # Later copies are on the same stream, so that another tensor may take the memory while the last one is running.
        weakref.finalize(waiting, pieces.append, memory).atexit = False
        self._copy(waiting.in_host, tensor, waiting)
        layer.tensors.append(weakref.ref(waiting))
        self._sending = weakref.ref(waiting)
        if self._module is None:
            self._free_sent()
        return waiting

    def fetch(self, waiting: Offloaded) -> torch.Tensor:
        """Return a tensor on the device again; the computation waits for it, unless it was fetched before."""
        self._start_fetching(waiting.layer)
        if waiting.on_device is None:  # it is needed a second time
            self._start(waiting)
        self._wait_for(waiting)
        waiting.used = True
        return waiting.free()

    def fetch_before(self, layer: Layer) -> None:
        """Start to copy what the layer before has sent to the device."""
        before = layer.before() if layer.before else None
        if before is not None:
            self._start_fetching(before)

    def _start_fetching(self, layer: Layer) -> None:
        for each in [tensor() for tensor in layer.tensors]:
            if each is not None and each.on_device is None and not each.used:
                self._start(each)

    def _start(self, waiting: Offloaded) -> None:
        """Start to copy a tensor to the device."""
        target = torch.empty_like(waiting.in_host, device=self._device)
        self._copy(target, waiting.in_host, waiting)
        waiting.hold(target)

    def _free_sent(self) -> None:
        waiting = self._sending() if self._sending else None
        self._sending = None
        if waiting is not None:
            self._wait_for(waiting)
            waiting.free()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, waiting: Offloaded) -> None:
        """Copy after all that computes now, on the stream for copies."""
        if self._module is None:
            target.copy_(source)
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            waiting.event = self._stream.record_event()

    def _wait_for(self, waiting: Offloaded) -> None:
        """Let the computation wait for the newest copy of a tensor."""
        if self._module is not None:
            self._module.current_stream().wait_event(waiting.event)


def host_memory(size: int, device: torch.device) -> torch.Tensor:
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
    """Print a text once."""
    print(text, flush=True)


def pin_memory(memory: torch.Tensor) -> None:
    """Pin memory where it is. Raises RuntimeError if the driver refuses."""
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)
    if not int(error):
        return
    # CUDA keeps the error for whoever looks at the next kernel: a kernel of no importance takes it away.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    raise RuntimeError(cudart.cudaGetErrorString(error))
