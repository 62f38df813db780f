"""Find what made a step not finite: repeat its micro-batches, watching the units and the gradients."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdptrain.data.corpus import Batch
from fsdptrain.model.units import base_name, nonfinite_names, nonfinite_note
from fsdptrain.parallel.shard import begin_micro_batch
from fsdptrain.train.patches import nonfinite_gradients
from fsdptrain.train.step import Engine


def find_sources(engine: Engine, step: int, batches: Sequence[Batch], divisor: int) -> list[tuple[int, int, str]]:
    """Repeat the micro-batches of a step; return rank, number and fault of those that are not finite; collective.

    After the reduction the gradient is non-finite on every rank, whichever rank caused it. So every rank checks its own
    loss of each micro-batch, and its own gradients before they are reduced. The fault (`the loss is nan`, `the gradient
    of NAME`) says where it began: in the unit whose output is the first that is not finite, or in the parameter. The
    list is empty if the failure is not reproducible: then suspect the hardware, not the data. Nothing is updated.
    """
    mine: list[tuple[int, str]] = []
    with _watched_outputs(engine.model) as bad_units, nonfinite_gradients(engine.model) as bad_names:
        engine.seed(step)
        begin_micro_batch(engine.model, engine.plan.recipe.fsdp, last=True)
        for number, batch in enumerate(batches):
            loss = engine.loss(batch, divisor or 1)
            loss.backward()
            engine.drop_gradients()
            engine.on_progress()
            if not math.isfinite(loss.item()):
                unit = f", first in the output of {bad_units[0]}" if bad_units else ""
                mine.append((number, f"the loss is {loss.item():g}{unit}"))
            elif bad_names:  # in the order of backward: the first one is the cause of the others
                mine.append((number, f"the gradient of {bad_names[0]}"))
            bad_units.clear()
            bad_names.clear()
    found = engine.world.gather_objects(mine)
    return [(rank, number, what) for rank, ranks in enumerate(found) for number, what in ranks]


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
