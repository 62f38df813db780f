"""A rank's rows of every tensor that a checkpoint holds."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptrain.config.optimizers import StateTensor, Weight
from fsdptrain.config.schema import Optim
from fsdptrain.model.parameters import weights_of
from fsdptrain.model.units import trained_state
from fsdptrain.parallel.world import first_row

Tensors = dict[str, torch.Tensor]  # by name


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


def shards_of(model: nn.Module, optimizer: torch.optim.Optimizer, optim: Optim) -> dict[str, Shard]:
    """Return all that a checkpoint holds: trained parameters and persistent buffers as `model.NAME`, and their state.

    The state is called `optim.NAME.KEY`; `optim` says which of its tensors are saved, and which have the rows of the
    weights. Frozen parameters are in the files of the pretrained model.
    """
    state = trained_state(model)
    shards = {f"model.{name}": shard_of(tensor) for name, tensor in state.items()}
    parts, weights = named_parts(optimizer), weights_of(model)
    for name, param in model.named_parameters():
        sharded = isinstance(param, DTensor) or name not in state
        assert sharded, f"{name} is not sharded: a forward without a backward left it gathered"
        rows = shard_of(param)
        for tensor in state_of(optim, weights[name], parts[name]) if name in parts else ():
            value = optimizer.state[parts[name]][tensor.key]
            if tensor.whole:
                shard = Shard(value, 0, tensor.shape)
            else:  # some libraries keep a tensor flat
                shard = Shard(value.view(len(rows.local), *tensor.shape[1:]), rows.first, tensor.shape)
            shards[f"optim.{name}.{tensor.key}"] = shard
    return shards


def share_of_copy(shards: dict[str, Shard], copy: int, copies: int, writes_whole: bool) -> dict[str, Shard]:
    """Return those of a rank's shards that it writes: `copies` ranks hold the same ones, and share the bytes evenly.

    `copy` is its number among these. Whole tensors (buffers, single rows) are equal on the ranks of one copy too, so
    only those with `writes_whole` write them.
    """
    loads, share = [(0, number) for number in range(copies)], {}
    for name, shard in sorted(shards.items(), key=lambda item: (-item[1].local.nbytes, item[0])):
        if shard.is_whole and not writes_whole:
            continue
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + shard.local.nbytes, writer))
        if writer == copy:
            share[name] = shard
    return share


def state_of(optim: Optim, weight: Weight, part: torch.Tensor) -> list[StateTensor]:
    """Return the tensors that an optimizer keeps for a parameter, of which it updates the rows `part`."""
    master: Any = str(part.dtype).removeprefix("torch.")
    return optim.state(weight, master)


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
