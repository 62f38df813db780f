"""The optimizer over the shards of a model, its learning rate, and the loss scale of float16."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from fsdptrain.checkpoint.shards import named_parts, state_of
from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.schema import Optim, Recipe, Schedule
from fsdptrain.model.units import part_of, weights_of

# Of the loss scale, as in torch.amp.GradScaler. All are powers of two, so that scaling rounds nothing.
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


def make_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model with weights. Parameters with and without weight decay are two groups.

    It updates this rank's part of each parameter, a plain tensor: with DTensors, a step takes the host four times as
    long. `named_parts` finds them by the names of the parameters. Each group has the whole `shapes` of its parameters.
    """
    # FSDP2 takes the parameters that were set since it sharded the model. Else it does so in the first forward, where
    # it may replace a rank's memory by a padded or a pinned copy: too late for an optimizer that has that memory.
    model.load_state_dict({}, strict=False)
    traits, weights = optim.name.traits, weights_of(model)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups: dict[tuple[bool, bool], list[str]] = {}  # (treated otherwise by this optimizer, decays) → names
    for name in trained:
        weight = weights[name]
        groups.setdefault((bool(traits.splits and traits.splits(weight)), weight.decays), []).append(name)
    settings = {key: getattr(optim, key) for key in ("lr", *traits.settings)}
    if traits.needs_ranks:
        first = next(iter(trained.values()))
        settings["ranks"] = first.device_mesh["shard"] if isinstance(first, DTensor) else None
    return optimizer_class(optim.name)(
        [
            {
                "params": [(name, part_of(trained[name].detach())) for name in names],
                "weight_decay": optim.weight_decay if decays else 0.0,
                "shapes": [weights[name].shape for name in names],
                "split": split,
            }
            for (split, decays), names in sorted(groups.items(), reverse=True)
        ],
        **settings,
        **traits.options,
    )


def optimizer_class(kind: OptimizerKind) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of an optimizer. Its module is imported now, because it may need a library of its own."""
    return cast(Callable[..., torch.optim.Optimizer], pkgutil.resolve_name(kind.traits.torch_class))


class AdamWBfloat16(torch.optim.AdamW):
    """AdamW with moments in bfloat16, whose update is computed in the dtype of the weights.

    torch's own kernel for moments of another dtype is for CUDA only, and not in every version. Here the moments of one
    parameter at a time are widened for the kernel that all devices have, then rounded to nearest.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            settings = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            for part in group["params"]:
                if part.grad is None:
                    continue
                if not (state := self.state[part]):
                    state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
                    state |= {key: torch.zeros_like(part, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
                kept = [state["exp_avg"], state["exp_avg_sq"]]
                first, second = (moment.to(part.dtype) for moment in kept)
                adamw(
                    [part], [part.grad], [first], [second], [], [state["step"]], fused=True,
                    found_inf=getattr(self, "found_inf", None), beta1=beta1, beta2=beta2, **settings,
                )  # fmt: skip
                kept[0].copy_(first)
                kept[1].copy_(second)


def start_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state, all zeros, by one step whose learning rate, decay and gradients are 0."""
    settings = [{name: group[name] for name in ("lr", "weight_decay")} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
        for part in group["params"]:
            part.grad = torch.zeros_like(part)
    optimizer.step()
    optimizer.zero_grad()
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the number of updates that a started optimizer has made; Adam corrects the bias of its moments by it."""
    for state in optimizer.state.values():
        if isinstance(counter := state.get("step"), torch.Tensor):
            counter.fill_(step)
        elif counter is not None:
            state["step"] = step


def assert_dtypes(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Raise RuntimeError unless weights and state have their dtypes (accelerate#3979).

    Master weights have model.dtype or, where a model keeps them so, float32; the registry has the dtypes of the state.
    Frozen weights are no master weights.
    """
    master = getattr(torch, recipe.model.dtype)
    wrong = {param.dtype for param in model.parameters() if param.requires_grad} - {master, torch.float32}
    parts = named_parts(optimizer)
    for name, weight in weights_of(model).items():
        for tensor in state_of(recipe.optim, weight, parts[name]) if name in parts else ():
            wrong |= {optimizer.state[parts[name]][tensor.key].dtype} - {getattr(torch, tensor.dtype)}
    if wrong:
        raise RuntimeError(
            f"internal error: master weights should be {master}, and optimizer state as config/optimizers.py lists it, "
            f"but some are {', '.join(sorted(map(str, wrong)))} (please report it)"
        )


class LossScale:
    """A loss scale that is halved when a gradient overflows, and doubled after INTERVAL steps in which none did.

    Without it gradients in float16 would be rounded to 0, or overflow. It is where the shards are, and the host never
    waits for it.
    """

    def __init__(self, device: torch.device, state: Sequence[float] | None = None) -> None:
        """`state` is that of `state`, from a checkpoint; None: begin with START."""
        self.value, self._clean = (torch.full((), number, device=device) for number in state or (START, 0.0))

    def overflows(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Return whether the scale is to blame for a gradient norm that is not finite: the loss is, and it is above 1.

        Below, a step that overflows is not finite for another reason. Bool, scalar.
        """
        return loss.isfinite() & ~norm.isfinite() & (self.value > 1)

    def update(self, overflow: torch.Tensor, blocked: torch.Tensor) -> None:
        """Set the scale of the next step, as GradScaler does; nothing changes if `blocked` is not 0."""
        grown = self.value * GROWTH
        grows = (self._clean + 1 >= INTERVAL) & grown.isfinite()
        value = torch.where(overflow, self.value * BACKOFF, torch.where(grows, grown, self.value))
        clean = torch.where(overflow | (self._clean + 1 >= INTERVAL), 0.0, self._clean + 1)
        self.value = torch.where(blocked > 0, self.value, value)
        self._clean = torch.where(blocked > 0, self._clean, clean)

    def state(self) -> list[float]:
        """Return what a checkpoint needs of it: the scale, and the steps since it changed. Waits for the device."""
        return torch.stack([self.value, self._clean]).tolist()


WSD_DECAY = 0.2  # the last fifth of a warm-up–stable–decay schedule decays


def learning_rate(step: int, total: int, optim: Optim, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up, then constant, linear or cosine decay to `min_lr`·lr at the last step, or WSD: constant, then
    linear decay over the last 20%, at least the last step (Hägele et al., arXiv:2405.18392). A run of a single step
    without warm-up has the peak rate.
    """
    warmup = warmup_steps(total, schedule)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if schedule.name == "constant" or total == 1:
        return optim.lr
    first = max(warmup, min(round(total * (1 - WSD_DECAY)), total - 2)) if schedule.name == "wsd" else warmup
    # From 0 to 1; if a single step follows the warm-up, whose last step has the peak rate, it is the end.
    decayed = max(0.0, (step - first) / (total - 1 - first)) if first < total - 1 else 1.0
    shape = 0.5 * (1 + math.cos(math.pi * decayed)) if schedule.name == "cosine" else 1 - decayed
    return optim.lr * (schedule.min_lr + (1 - schedule.min_lr) * shape)


def warmup_steps(total: int, schedule: Schedule) -> int:
    """Return the length of the warm-up in steps, which may exceed `total`; a setting below 1 is a fraction of it."""
    return round(schedule.warmup * total) if schedule.warmup < 1 else round(schedule.warmup)


def warmup_note(total: int, optim: Optim, schedule: Schedule) -> str | None:
    """Return a note if the warm-up is longer than the run, so that the rate never reaches `optim.lr`; else None."""
    warmup = warmup_steps(total, schedule)
    if warmup <= total:
        return None
    highest = learning_rate(total - 1, total, optim, schedule)
    return (
        f"schedule.warmup: the warm-up has {warmup:,} steps and the run {total:,}, so the learning rate rises to "
        f"{highest:.2g} only, not to optim.lr ({optim.lr:g}); a fraction below 1 counts from the length of the run"
    )


def length_note(step: int, before: int, total: int, optim: Optim, schedule: Schedule) -> str | None:
    """Return a note if a resume after `step` steps changes the rate, because the run has another length than `before`.

    None if the last step would have had the same rate, within 1%, in a run of `total` steps.
    """
    if not step:
        return None
    had, would_have_had = (learning_rate(step - 1, steps, optim, schedule) for steps in (before, total))
    if math.isclose(had, would_have_had, rel_tol=0.01):
        return None
    return (
        f"the schedule has {total:,} steps now and had {before:,}: the learning rate goes from {had:.2e} in step "
        f"{step:,} to {learning_rate(step, total, optim, schedule):.2e} in the next"
    )
