"""Adafactor on a rank's rows of each parameter, with the statistics of the whole parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers.optimization import Adafactor


class ShardedAdafactor(Adafactor):
    """Adafactor of transformers with the learning rate of the schedule, as the Trainer of transformers uses it.

    Its second moment is the product of the means over the rows and over the columns of a matrix, and it limits the root
    mean square of each update. Both are made those of the whole parameter: `ranks` have its rows.
    """

    def __init__(self, params: Any, lr: float, ranks: DeviceMesh | None) -> None:
        super().__init__(params, lr=lr, scale_parameter=False, relative_step=False, warmup_init=False)
        self.ranks = ranks.get_group() if ranks is not None and ranks.size() > 1 else None

    def _approx_sq_grad(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return 1 / √(second moment) of this rank's rows, from the means over each row and over each column.

        `columns` comes with the newest gradient of this rank's rows only, and is replaced by the mean over all ranks.
        That is right for an average of many steps too, because it is linear. In a stack of matrices (three dimensions)
        a rank has whole matrices.
        """
        if self.ranks is None or rows.ndim > 1:
            return super()._approx_sq_grad(rows, columns)
        count = len(rows)
        own = columns * count if count else torch.zeros_like(columns)
        sums = torch.cat([own, rows.sum()[None], rows.new_full((1,), count)])
        dist.all_reduce(sums, group=self.ranks)
        columns.copy_(sums[:-2] / sums[-1])
        mean = sums[-2] / sums[-1]
        return (rows / mean).rsqrt_().unsqueeze(-1) * columns.unsqueeze(-2).rsqrt()

    def _rms(self, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the root mean square of a tensor of which this rank has some rows."""
        if self.ranks is None:
            return super()._rms(tensor)
        square = tensor.norm(2).double().square()
        sums = torch.stack([square, torch.full_like(square, tensor.numel())])
        dist.all_reduce(sums, group=self.ranks)
        return (sums[0] / sums[1]).sqrt().float()
