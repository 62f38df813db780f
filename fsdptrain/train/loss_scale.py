"""The dynamic loss scale of training in float16, whose gradients would otherwise be rounded to 0, or overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# As in torch.amp.GradScaler. All are powers of two, so that scaling rounds nothing.
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """A loss scale that is halved when a gradient overflows, and doubled after INTERVAL steps in which none did.

    It is where the shards are, and the host never waits for it.
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
