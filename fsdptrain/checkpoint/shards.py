"""A rank's rows of every tensor that a checkpoint holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.model.units import saved_state
from fsdptrain.parallel.patches import first_row


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one tensor: `local` holds rows first … first + len(local) of `shape`; a scalar is one row."""

    local: torch.Tensor
    first: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the tensor."""
        return self.local.numel() == math.prod(self.shape)


def shards_of(model: nn.Module, optimizer: torch.optim.Optimizer, kind: OptimizerKind) -> dict[str, Shard]:
    """Return all that a checkpoint holds: parameters and persistent buffers as `model.NAME`, state as `optim.NAME.KEY`.

    `kind` says which tensors of the optimizer's state are saved.
    """
    tensors = {f"model.{name}": tensor for name, tensor in saved_state(model).items()}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is not sharded: a forward without a backward left it gathered"
        state = optimizer.state[param].items()
        tensors |= {f"optim.{name}.{key}": value for key, value in state if key in kind.saved}
    return {name: shard_of(tensor) for name, tensor in tensors.items()}


def shard_of(tensor: torch.Tensor) -> Shard:
    """Return the local rows of a tensor, which are all of them when it is not sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Shard(torch.atleast_1d(tensor), 0, tuple(tensor.shape))
    return Shard(tensor.to_local(), first_row(tensor), tuple(tensor.shape))
