"""The optimizers of bitsandbytes, on a rank's rows of each parameter.

Its 8-bit moments are quantised in blocks of 256 values with a scale each. The library counts blocks from the beginning
of a tensor, and decides by the number of its elements whether to quantise at all. On a rank's part of a tensor both
would depend on the number of ranks. Here a block never crosses the border of a row: see `padded_columns`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from fsdptrain.config.optimizers import padded_columns
from fsdptrain.model.patches import import_quietly

bitsandbytes = import_quietly("bitsandbytes")
Optimizer8bit: Any = bitsandbytes.optim.optimizer.Optimizer8bit
AdamW8bit: Any = bitsandbytes.optim.AdamW8bit
Lion: Any = bitsandbytes.optim.Lion

# The tables of 8-bit values, made at import: this needs numbers, which the fake tensors of a simulation do not have.
TABLES: dict[str, list[float]] = {
    name: bitsandbytes.functional.create_dynamic_map(signed=name == "dynamic").tolist()
    for name in ("dynamic", "udynamic")
}


class _Rowwise(Optimizer8bit):
    """The step of bitsandbytes without its wait for the device after each parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for part in group["params"]:
                if part.grad is None:
                    continue
                if part not in self.state:
                    self.init_state(group, part, 0, 0)
                if part.numel():  # a rank may have no row: a kernel cannot be launched for that
                    self.update_step(group, part, 0, 0)
                else:
                    self.state[part]["step"] += 1


class RowwiseLion(_Rowwise, Lion):
    """Lion with a float32 moment."""


class RowwiseAdamW8bit(_Rowwise, AdamW8bit):
    """AdamW with moments of 8 bits, whose blocks do not depend on which rank has which rows."""

    def fill_qmap(self) -> None:
        """Take the tables of 8-bit values."""
        self.name2qmap = {name: torch.tensor(values) for name, values in TABLES.items()}

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Create the state of a part, of 8 bits if its rows have whole blocks."""
        columns = padded_columns(tuple(p.shape))
        like = with_columns(p, columns) if columns else p
        self.args.min_8bit_size = 0 if columns else like.numel() + 1
        super().init_state(group, like, gindex, pindex)
        self.state[p] = self.state.pop(like)

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update a part; if its rows are not whole blocks, as a copy that is padded with zeros."""
        columns = padded_columns(tuple(p.shape))
        if columns in (0, p.shape[-1]):
            super().update_step(group, p, gindex, pindex)
            return
        assert p.grad is not None
        padded = with_columns(p, columns)
        padded.grad = with_columns(p.grad, columns)
        self.state[padded] = self.state[p]
        super().update_step(group, padded, gindex, pindex)
        del self.state[padded]
        p.copy_(padded[..., : p.shape[-1]])


def with_columns(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a tensor, detached, with `columns` columns: zeros are added if it has fewer."""
    return pad(tensor.detach(), (0, columns - tensor.shape[-1]))
