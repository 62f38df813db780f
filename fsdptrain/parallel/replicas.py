"""Compare the copies of a model before the first step."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptrain.errors import FsdptrainError
from fsdptrain.parallel.world import World


def check_replicas(model: nn.Module, world: World) -> None:
    """Raise FsdptrainError unless all copies of the model are bitwise equal; collective.

    Only gradients are summed over the copies: copies that differ at the start would differ forever, without an error.
    The sums of the bits of each rank's shards are compared, and of the buffers, which every rank has as a whole.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sums = torch.stack([_bit_sum(tensor) for tensor in state.values()]).double()
    ranks = torch.from_numpy(world.gather(sums))
    grid = world.mesh.mesh if world.mesh.ndim == 2 else world.mesh.mesh[None]
    for number, (name, tensor) in enumerate(state.items()):
        copies = grid if isinstance(tensor, DTensor) else grid.reshape(-1, 1)
        found = ranks[:, number][copies]
        if (found != found[0]).any():
            other, shard = map(int, (found != found[0]).nonzero()[0])
            raise FsdptrainError(
                f"internal error: before the first step {name} is not the same on ranks {int(copies[0, shard])} and "
                f"{int(copies[other, shard])}, which hold copies of it (please report it)"
            )


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a local tensor's bit patterns modulo 2⁵³, which float64 represents exactly."""
    local = tensor.detach()
    local = (local.to_local() if isinstance(local, DTensor) else local).contiguous()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    return local.view(bits).sum(dtype=torch.int64).cpu() % 2**53
