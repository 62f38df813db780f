"""Compare the copies of a model, before the first step and while it is trained."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fsdptrain.errors import FsdptrainError, WorkerLost
from fsdptrain.parallel.world import World


def check_replicas(model: nn.Module, world: World, steps_made: int | None = None) -> None:
    """Raise an error unless all copies of the model are bitwise equal; collective.

    Only gradients are summed over the copies: copies that differ once would differ forever, without an error. The sums
    of the bits of each rank's shards are compared: each rank reads them once, which takes 10 ms for 30 GB at 3 TB/s.
    Before the first step the buffers are compared too, which every rank has as a whole; a forward may change them (the
    frequencies of longrope depend on the longest row). Raises FsdptrainError then, because only a defect of the code
    makes copies differ; WorkerLost after `steps_made` steps, where the hardware is to be suspected.
    """
    state: dict[str, torch.Tensor] = dict(model.named_parameters())
    if steps_made is None:
        state |= dict(model.named_buffers())
    sums = torch.stack([_bit_sum(tensor).to(world.device) for tensor in state.values()])
    halves = torch.stack([sums >> 32, sums & 0xFFFFFFFF])  # float64, in which they are gathered, has 53 bits
    ranks = torch.from_numpy(world.gather(halves.flatten())).unflatten(1, (2, -1))
    grid = world.mesh.mesh if world.mesh.ndim == 2 else world.mesh.mesh[None]
    for number, (name, tensor) in enumerate(state.items()):
        copies = grid if isinstance(tensor, DTensor) else grid.reshape(-1, 1)
        found = ranks[:, :, number][copies]
        if (found != found[0]).any():
            other, shard, _ = map(int, (found != found[0]).nonzero()[0])
            raise _error(name, int(copies[0, shard]), int(copies[other, shard]), world, steps_made)


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a local tensor's 64-bit words modulo 2⁶⁴, int64 on its device; a flipped bit changes it."""
    local = tensor.detach()
    data = (local.to_local() if isinstance(local, DTensor) else local).flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = pad(data, (0, -len(data) % 8))  # a copy, which begins at a whole word
    return data.view(torch.int64).sum()


def _error(name: str, first: int, other: int, world: World, steps_made: int | None) -> FsdptrainError:
    """Return the error for a tensor that differs on two ranks."""
    hosts = world.hosts
    places = f"ranks {first} ({hosts[first]}) and {other} ({hosts[other]}), which hold copies of it"
    if steps_made is None:
        return FsdptrainError(
            f"internal error: before the first step {name} is not the same on {places} (please report it)"
        )
    return WorkerLost(
        f"after step {steps_made} {name} is not the same on {places}: suspect the memory of one of them, or a link; "
        "the weights in every checkpoint were the same on all copies"
    )
