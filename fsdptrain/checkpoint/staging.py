"""Host memory for the copies of a rank's tensors, which are written while training goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch

from fsdptrain.parallel.offload import pin_memory

ALIGNMENT = 64  # bytes: each copy begins at a multiple, as a tensor of any dtype may


class Staging:
    """One flat piece of host memory with a copy of each of some tensors; pinned if any of them is on a GPU.

    It is pinned where it is: torch's allocator of pinned memory would round what it is asked for up to a power of two,
    each tensor or all of them, and keep it for ever (CachingHostAllocator.h: `allocate`, `free`).
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], pin: Callable[[torch.Tensor], None] | None = None) -> None:
        """Allocate unset memory; it is pageable if `pin`, by default `pin_memory`, raises RuntimeError."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self.copies = {
            name: self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), start in zip(tensors.items(), itertools.accumulate(sizes, initial=0))  # noqa: B905
        }
        self.pinned = False
        if self.memory.nbytes and any(tensor.device.type == "cuda" for tensor in tensors.values()):
            try:
                (pin or pin_memory)(self.memory)
                self.pinned = True
            except RuntimeError as error:
                print(f"a checkpoint's copy is in pageable memory, which is slower: {error}", flush=True)

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor; if it is on a GPU, only when the GPU has been waited for."""
        return self.copies[name].copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Free the memory, which the GPU must not be writing."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        self.copies, self.pinned = {}, False
        del self.memory
