"""After a step whose loss or gradient is not finite: which rank, which micro-batch, which samples, which parameter.

The reduced gradient is not finite everywhere, whoever spoilt it. So the step's micro-batches are made once more, one by
one, and every rank looks at its own loss, and at its own gradients on their way into the reduction.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdptrain.data.corpus import Batch
from fsdptrain.train.patches import reductions_watched
from fsdptrain.train.step import Engine


@dataclass(frozen=True)
class NonFiniteBatch:
    """A micro-batch of a rank, and what of it is not finite."""

    rank: int
    micro_batch: int
    what: str


def find_sources(engine: Engine, step: int, batches: Sequence[Batch], label_tokens: int) -> list[NonFiniteBatch]:
    """Make the micro-batches of a step once more, and say where it is not finite; collective.

    Empty when it is not seen again: then the hardware is to be suspected, not the data. Nothing is updated.
    """
    mine: list[tuple[int, str]] = []
    with _watched_reductions(engine.model) as spoilt:
        engine.seed(step)
        engine.model.set_requires_gradient_sync(True)
        for number, batch in enumerate(batches):
            loss = engine.loss(batch, label_tokens or 1)
            loss.backward()
            engine.optimizer.zero_grad()
            engine.beat()
            if not math.isfinite(loss.item()):
                mine.append((number, f"the loss is {loss.item():g}"))
            elif spoilt:  # autograd goes backwards: the first parameter is where it began
                mine.append((number, f"the gradient of {spoilt[0]}"))
            spoilt.clear()
    found: list[list[tuple[int, str]]] = [[]] * engine.world.size
    dist.all_gather_object(found, mine, group=engine.world.side)
    return [NonFiniteBatch(rank, number, what) for rank, ranks in enumerate(found) for number, what in ranks]


@contextlib.contextmanager
def _watched_reductions(model: Any) -> Iterator[list[str]]:
    """The parameters whose gradients on this rank are not finite before they are reduced, in the order of backward."""
    spoilt: list[str] = []
    names = {id(param): name for name, param in model.named_parameters()}

    def look(params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        named = zip(params, gradients, strict=True)
        bad = [names[id(param)] for param, grad in named if not grad.isfinite().all()]
        spoilt.extend(reversed(bad))

    with reductions_watched(look):
        yield spoilt
