"""A rank's rows of every tensor that a checkpoint holds."""

from __future__ import annotations

import dataclasses
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
    shards = {f"model.{name}": shard_of(tensor) for name, tensor in saved_state(model).items()}
    parts = named_parts(optimizer)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is not sharded: a forward without a backward left it gathered"
        weights = shard_of(param)
        for key, value in optimizer.state[parts[name]].items() if name in parts else ():
            if key in kind.saved:  # the same rows as of the weights
                shards[f"optim.{name}.{key}"] = dataclasses.replace(weights, local=torch.atleast_1d(value))
    return shards


def named_parts(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what the optimizer updates, this rank's part of each parameter, by the parameter's name."""
    groups = optimizer.param_groups
    return {name: part for group in groups for name, part in zip(group["param_names"], group["params"], strict=True)}


def shard_of(tensor: torch.Tensor) -> Shard:
    """Return the local rows of a tensor, which are all of them when it is not sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Shard(torch.atleast_1d(tensor), 0, tuple(tensor.shape))
    return Shard(tensor.to_local(), first_row(tensor), tuple(tensor.shape))
