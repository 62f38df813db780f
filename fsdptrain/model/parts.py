"""Which part of a parameter a rank has, where ranks divide the layers of a model or their experts.

The parameters stay plain tensors, of a smaller shape, which FSDP2 shards over the ranks that have the same part.
`model.parts` has one for every parameter of such layers, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdptrain.model.adapters import adapted_layers, adapted_weight
from fsdptrain.model.units import base_name

OUT, IN = -2, -1  # dimensions of a weight [..., out, in]


@dataclass(frozen=True)
class Part:
    """Which numbers of a whole parameter a rank has: along dimension `dim` (from the end) those of `spans`.

    Of `ranks` ranks that divide the parameter, this one has part `number` of `count`. With fewer parts than ranks (of
    few key heads, or of what is not divided: one), several ranks have the same. `shape` is that of the whole.
    """

    shape: tuple[int, ...]
    dim: int
    spans: tuple[tuple[int, int], ...]
    number: int
    count: int
    ranks: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int, number: int, count: int, ranks: int, packed: int = 1) -> Part:
        """Return one of `count` equal parts of a tensor, or of each of its `packed` equal pieces along `dim`."""
        if count == 1:
            return cls(shape, dim, (), 0, 1, ranks)
        piece = shape[dim] // packed
        size = piece // count
        spans = ((n * piece + number * size, n * piece + (number + 1) * size) for n in range(packed))
        return cls(shape, dim, tuple(spans), number, count, ranks)

    def at(self, number: int) -> Part:
        """Return another part of the same tensor."""
        return Part.of(self.shape, self.dim, number, self.count, self.ranks, len(self.spans))

    def spans_in(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return the spans in a tensor of a file with `size` numbers along the dimension: the whole, or one piece."""
        if size == self.shape[self.dim]:
            return self.spans
        return ((self.number * size // self.count, (self.number + 1) * size // self.count),)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a whole tensor."""
        if self.count == 1:
            return whole
        return torch.cat([whole.narrow(self.dim, first, last - first) for first, last in self.spans], dim=self.dim)

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy this part to its place in the whole tensor."""
        at = 0
        for first, last in self.spans:
            whole.narrow(self.dim, first, last - first).copy_(part.narrow(self.dim, at, last - first))
            at += last - first


def keep_own_parts(model: Any, parts: dict[str, Part]) -> None:
    """Replace parameters of a skeleton by parts of them, and note that in `model.parts`."""
    model.parts |= parts
    for name, part in parts.items():
        owner, _, key = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        whole = getattr(module, key)
        setattr(module, key, nn.Parameter(part.take(whole.detach()), requires_grad=whole.requires_grad))
        if isinstance(module, nn.Linear) and key == "weight":
            module.out_features, module.in_features = module.weight.shape


def name_parts(model: Any) -> None:
    """Give `model.parts` the names that parameters have with adapters, and those parts of adapters that follow.

    Of W + B A, B has the results of a part of W, or A its inputs. Experts have their own A and B: the rows of A are
    expert by expert, of the columns of B those of one number of the rank.
    """
    before, model.parts = model.parts, {}
    own = dict(model.named_parameters())
    for name, layer in adapted_layers(model).items():
        part = before.get(adapted_weight(name, layer))
        for matrix, dim in (("lora_A", IN), ("lora_B", OUT)):
            adapter = next((each for each in own if each.startswith(f"{name}.{matrix}.")), None)
            if part is None or adapter is None:
                continue
            packed, shape = len(part.spans), [*own[adapter].shape]
            if part.dim not in (IN, OUT):
                dim = IN if matrix == "lora_B" else OUT
                packed = shape[dim] // (part.shape[0] // part.count) if matrix == "lora_B" else 1
            elif dim != part.dim:
                continue
            shape[dim] *= part.count
            model.parts[adapter] = Part.of(tuple(shape), dim, part.number, part.count, part.ranks, packed)
    renamed = {base_name(name): name for name in own}
    model.parts |= {renamed[name]: part for name, part in before.items()}
