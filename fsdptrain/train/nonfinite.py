"""Find what made a step not finite: repeat its micro-batches, watching the units and the gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdptrain.data.corpus import Batch
from fsdptrain.model.units import base_name, nonfinite_names, nonfinite_note
from fsdptrain.parallel.shard import begin_backward
from fsdptrain.train.patches import nonfinite_gradients
from fsdptrain.train.step import Engine


def find_sources(engine: Engine, step: int, batches: Sequence[Batch], divisor: int) -> list[tuple[int, int, str]]:
    """Repeat the micro-batches of a step; return rank, number and fault of those that are not finite; collective.

    After the reduction the gradient is non-finite on every rank, whichever rank caused it. So every rank checks its own
    loss of each micro-batch, and its own gradients before they are reduced. The fault (`the loss is nan`, `the gradient
    of NAME`) says where it began: in the unit whose output is the first that is not finite, or in the parameter. The
    list is empty if the failure is not reproducible: then suspect the hardware, not the data. Nothing is updated.
    """
    mine: list[Watched] = []
    with _watched_outputs(engine.model) as bad_units, nonfinite_gradients(engine.model) as bad_names:
        engine.estimate_kl(batches, divisor)
        engine.seed(step)
        begin_backward(engine.model, engine.plan.recipe.fsdp, last=True)
        for batch in batches:
            losses: list[float] = []

            def forward(chunk: int, _: int, hidden: torch.Tensor | None) -> torch.Tensor:
                result = engine.loss(batch, divisor or 1, chunk, hidden)  # noqa: B023  # called within this round
                if engine.stages.is_last(chunk):
                    losses.append(result.item())  # noqa: B023
                return result

            engine.stages.train(1, batch["input_ids"].shape, forward, lambda _: engine.on_progress())
            engine.drop_gradients()
            mine.append(Watched(losses, bad_units[:1], bad_names[:1]))
            bad_units.clear()
            bad_names.clear()
    found, apart = engine.world.gather_objects(mine), engine.plan.stage_ranks
    faults = []
    for first in range(apart):
        ranks = range(first, engine.world.size, apart)  # those that have the same rows, in the order of the stages
        for number in range(len(batches)):
            if fault := _first_fault({rank: found[rank][number] for rank in ranks}):
                faults.append((fault[0], number, fault[1]))
    return faults


class Watched(NamedTuple):
    """What a rank has seen of a micro-batch: its loss if it has the last stage, and the first of what is not finite."""

    losses: list[float]
    units: list[str]
    gradients: list[str]


def _first_fault(ranks: dict[int, Watched]) -> tuple[int, str] | None:
    """Return on which rank a micro-batch was not finite first, and what; None if it was finite on all."""
    last, loss = next((rank, each.losses[0]) for rank, each in ranks.items() if each.losses)
    if not math.isfinite(loss):
        rank = next((rank for rank, each in ranks.items() if each.units), last)
        return rank, f"the loss is {loss:g}" + "".join(f", first in the output of {unit}" for unit in ranks[rank].units)
    # In the order of backward: the first one is the cause of the others.
    bad = [(rank, f"the gradient of {each.gradients[0]}") for rank, each in ranks.items() if each.gradients]
    return bad[-1] if bad else None


def find_weights(engine: Engine) -> list[str]:
    """Return a sentence on the weights of any rank that are not finite, [] if all are; collective."""
    found = engine.world.gather_objects(nonfinite_names(engine.model))
    names = dict.fromkeys(base_name(name) for names in found for name in names)
    return [nonfinite_note(names)] if names else []


@contextlib.contextmanager
def _watched_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collect the modules of units whose outputs are not finite, in the order of forward.

    The hooks are outside of what is compiled, so nothing is compiled again.
    """
    bad_units: list[str] = []

    def check(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        values = output if isinstance(output, tuple) else (output,)
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            bad_units.append(name)

    hooks = [
        module.register_forward_hook(functools.partial(check, name))
        for name, module in model.named_modules()
        if name and issubclass(type(module), FSDPModule)
    ]
    yield bad_units
    for hook in hooks:
        hook.remove()
