"""Exchanges of tokens among the ranks of a group inside a layer, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Exchanging = Callable[[torch.Tensor], torch.Tensor]


def exchanged(x: torch.Tensor, there: Exchanging, back: Exchanging) -> torch.Tensor:
    """Return `there(x)`; its gradient comes by `back`. Collective, in forward and in backward."""
    found: torch.Tensor = _Exchanged.apply(x, there, back)
    return found


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Exchanging, back: Exchanging) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grads[0]), None, None
