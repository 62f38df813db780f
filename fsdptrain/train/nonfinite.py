"""Find what made a step non-finite: which rank, which micro-batch, which samples, which parameter.

After the reduction the gradient is non-finite on every rank, whichever rank caused it. So the micro-batches of the step
are repeated one by one, and every rank checks its own loss, and its own gradients before they are reduced.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdptrain.data.corpus import Batch
from fsdptrain.parallel.shard import begin_micro_batch
from fsdptrain.train.patches import reductions_watched
from fsdptrain.train.step import Engine


@dataclass(frozen=True)
class NonFiniteBatch:
    """A micro-batch of a rank, and what in it is not finite: `the loss is nan`, `the gradient of NAME`."""

    rank: int
    micro_batch: int
    what: str


def find_sources(engine: Engine, step: int, batches: Sequence[Batch], label_tokens: int) -> list[NonFiniteBatch]:
    """Repeat the micro-batches of a step, and return those that are not finite, of all ranks; collective.

    The list is empty if the failure is not reproducible: then suspect the hardware, not the data. Nothing is updated.
    """
    mine: list[tuple[int, str]] = []
    with _watched_reductions(engine.model) as bad_names:
        engine.seed(step)
        begin_micro_batch(engine.model, engine.plan.recipe.fsdp, last=True)
        for number, batch in enumerate(batches):
            loss = engine.loss(batch, label_tokens or 1)
            loss.backward()
            engine.drop_gradients()
            engine.beat()
            if not math.isfinite(loss.item()):
                mine.append((number, f"the loss is {loss.item():g}"))
            elif bad_names:  # in the order of backward: the first one is the cause of the others
                mine.append((number, f"the gradient of {bad_names[0]}"))
            bad_names.clear()
    found: list[list[tuple[int, str]]] = [[]] * engine.world.size
    dist.all_gather_object(found, mine, group=engine.world.side)
    return [NonFiniteBatch(rank, number, what) for rank, ranks in enumerate(found) for number, what in ranks]


@contextlib.contextmanager
def _watched_reductions(model: nn.Module) -> Iterator[list[str]]:
    """Collect the parameters whose gradients on this rank are not finite before reduction, in the order of backward."""
    bad_names: list[str] = []
    names = {id(param): name for name, param in model.named_parameters()}

    def check(params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        named = zip(params, gradients, strict=True)
        bad_names.extend(reversed([names[id(param)] for param, grad in named if not grad.isfinite().all()]))

    with reductions_watched(check):
        yield bad_names
