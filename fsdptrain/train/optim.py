"""The optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
import pkgutil
import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.schema import Optim, Recipe, Schedule
from fsdptrain.parallel.patches import adopt_parameters

WSD_DECAY = 0.2  # the last fifth of a warm-up–stable–decay schedule decays


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model with weights: one group of parameters with weight decay, one without.

    It updates this rank's part of each parameter, a plain tensor: with DTensors, a step takes the host four times as
    long. `named_parts` finds them by the names of the parameters.
    """
    adopt_parameters(model)
    kind = optim.name
    undecayed = undecayed_ids(model)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    parts = [(name, part_of(param.detach())) for name, param in params.items()]
    groups = [
        {"params": [p for p in parts if id(params[p[0]]) not in undecayed], "weight_decay": optim.weight_decay},
        {"params": [p for p in parts if id(params[p[0]]) in undecayed], "weight_decay": 0.0},
    ]
    settings = {key: getattr(optim, key) for key in kind.settings}
    make = pkgutil.resolve_name(kind.torch_class)
    return make([group for group in groups if group["params"]], **settings, **kind.options)


@torch.no_grad()
def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The last three: parameters of state space models, and scales of norms whose class is not called a norm.
UNDECAYED_NAMES = re.compile(r"bias|norm|^(A_log|D|scale)$")


def undecayed_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters without weight decay: norms, biases, scales and embeddings.

    What a parameter is depends on class and name, not on its number of dimensions: biases of experts and norms of heads
    have two dimensions, and some vectors have dimensions of size 1. A head that is tied to an embedding counts as one.
    """
    return {
        id(param)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if isinstance(module, nn.Embedding)
        or any("Norm" in cls.__name__ for cls in type(module).__mro__)
        or UNDECAYED_NAMES.search(name)
        or sum(size > 1 for size in param.shape) < 2
    }


def learning_rate(step: int, total: int, optim: Optim, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up, then constant, linear or cosine decay to `min_lr`·lr at the last step, or WSD: constant, then
    linear decay over the last 20% (Hägele et al., arXiv:2405.18392).
    """
    warmup = warmup_steps(total, schedule)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if schedule.name == "constant":
        return optim.lr
    first = max(warmup, round(total * (1 - WSD_DECAY))) if schedule.name == "wsd" else warmup
    decayed = min(1.0, max(0.0, (step - first) / max(1, total - 1 - first)))  # from 0 to 1
    shape = 0.5 * (1 + math.cos(math.pi * decayed)) if schedule.name == "cosine" else 1 - decayed
    return optim.lr * (schedule.min_lr + (1 - schedule.min_lr) * shape)


def warmup_steps(total: int, schedule: Schedule) -> int:
    """Return the length of the warm-up in steps; a setting below 1 is a fraction of `total`."""
    return min(total, round(schedule.warmup * total) if schedule.warmup < 1 else round(schedule.warmup))


def start_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state, all zeros, by one step whose learning rate and gradients are 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for part in group["params"]:
            part.grad = torch.zeros_like(part)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_step(optimizer: torch.optim.Optimizer, kind: OptimizerKind, step: int) -> None:
    """Set the number of steps that a started optimizer has made; Adam corrects the bias of its moments by it."""
    for state in optimizer.state.values():
        for key in kind.counters:
            state[key].fill_(step)


def assert_dtypes(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Raise RuntimeError unless weights and state have their dtypes (accelerate#3979).

    Master weights have model.dtype or, where a model keeps them so, float32; the registry has the dtypes of the state.
    """
    master = getattr(torch, recipe.model.dtype)
    wrong = {param.dtype for param in model.parameters()} - {master, torch.float32}
    for part, state in optimizer.state.items():
        for tensor in recipe.optim.name.state:
            wanted = getattr(torch, tensor.dtype) if tensor.dtype else part.dtype
            wrong |= {state[tensor.key].dtype} - {wanted}
    if wrong:
        raise RuntimeError(
            f"internal error: master weights and optimizer state should be {master}, but some are {wrong} (please "
            "report it)"
        )
