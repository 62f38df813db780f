"""Optimizers that need more of a parameter than a rank's rows: the ranks that have the others exchange it in a step."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers.optimization import Adafactor

COEFFICIENTS, ITERATIONS, EPSILON = (3.4445, -4.775, 2.0315), 5, 1e-7  # of `newton_schulz`, as in `torch.optim.Muon`


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


class ShardedMuon(torch.optim.Optimizer):
    """Muon as in `torch.optim.Muon` for groups with `split`, and fused AdamW for all others.

    Its learning rate is scaled so that an update is as large as one of AdamW (`match_rms_adamw`): both share one.
    """

    def __init__(
        self, params: Any, lr: float, betas: list[float], eps: float, momentum: float, ranks: DeviceMesh | None
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.momentum, self.ranks = momentum, ranks
        others = [group for group in self.param_groups if not group["split"]]
        # The same groups and the same state, so that who sets or reads them sees one optimizer.
        self._adamw = (
            torch.optim.AdamW(others, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True) if others else None
        )
        if self._adamw:
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; collective."""
        if self._adamw:
            self._adamw.step()
        for group in self.param_groups:
            if group["split"]:
                self._update_matrices(group)

    def _update_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group: as many at a time as there are ranks, the largest first.

        So those at the same time are of about equal size, and no rank waits long for another.
        """
        matrices = [
            (part, shape) for part, shape in zip(group["params"], group["shapes"], strict=True) if part.grad is not None
        ]
        matrices.sort(key=lambda matrix: math.prod(matrix[1]), reverse=True)
        step = self.ranks.size() if self.ranks else 1
        for first in range(0, len(matrices), step):
            some = matrices[first : first + step]
            updates = orthogonalised(
                [self._direction(part) for part, _ in some], [shape for _, shape in some], self.ranks
            )
            for (part, shape), update in zip(some, updates, strict=True):
                part.mul_(1 - group["lr"] * group["weight_decay"])
                part.add_(update, alpha=-(group["lr"] * (0.2 * math.sqrt(max(shape)))))

    def _direction(self, part: torch.Tensor) -> torch.Tensor:
        """Add the gradient of a part to its momentum; return the rows to orthogonalise."""
        state = self.state[part]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(part)
        momentum = state["momentum_buffer"].lerp_(part.grad, 1 - self.momentum)
        return part.grad.lerp(momentum, self.momentum)  # type: ignore[union-attr]  # Nesterov's


def orthogonalised(
    parts: list[torch.Tensor], shapes: list[tuple[int, ...]], ranks: DeviceMesh | None
) -> list[torch.Tensor]:
    """Return, in bfloat16, this rank's rows of the orthogonalised matrices of which it has the rows `parts`.

    There are at most as many matrices as ranks; matrix i is computed on rank i, on the device of the mesh (not on the
    host, where the parts are with fsdp.cpu_offload). Every rank sends its rows to the ranks that compute, and gets the
    same rows back.
    """
    if ranks is None or ranks.size() == 1:
        return [newton_schulz(part) for part in parts]
    rank, count = ranks.get_local_rank(), ranks.size()
    # What this rank sends to each rank, and what it receives from each: rows of its own matrix, if it has one.
    sizes = [part.numel() for part in parts] + [0] * (count - len(parts))
    shape = shapes[rank] if rank < len(shapes) else (0, 0)
    chunk = -(-shape[0] // count)  # FSDP2 gives each rank ⌈rows / ranks⌉, as long as there are any
    own_sizes = [max(0, min(chunk, shape[0] - other * chunk)) * shape[1] for other in range(count)]
    sent = torch.cat([part.bfloat16().flatten() for part in parts]).to(ranks.device_type)
    own = sent.new_empty(sum(own_sizes))
    dist.all_to_all_single(own, sent, own_sizes, sizes, group=ranks.get_group())
    if own.numel():
        own = newton_schulz(own.view(shape)).flatten()
    dist.all_to_all_single(sent, own, sizes, own_sizes, group=ranks.get_group())
    return [rows.view_as(part) for rows, part in zip(sent.to(parts[0].device).split(sizes), parts, strict=False)]


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix in bfloat16 whose singular values are all about 1, as `torch.optim.Muon` computes it.

    Five iterations of a polynomial of fifth order, the steepest at 0: singular values end between 0.5 and 1.5.
    """
    first, second, third = COEFFICIENTS
    high = matrix.size(0) > matrix.size(1)
    update = (matrix.T if high else matrix).to(torch.bfloat16, copy=True)
    update.div_(update.norm().clamp(min=EPSILON))  # the largest singular value is at most 1
    for _ in range(ITERATIONS):
        gram = update @ update.T
        update = torch.addmm(update, torch.addmm(gram, gram, gram, beta=second, alpha=third), update, beta=first)
    return update.T if high else update
