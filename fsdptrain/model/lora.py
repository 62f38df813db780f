"""A linear layer with an adapter, whose forward and backward are one autograd function.

peft's own forward, `x Wᵀ + (x Aᵀ) Bᵀ · scale`, multiplies the large result by the scale and adds it in further passes
over memory, and so does its backward. Here the small products are scaled, and matrix products add to what is there.
The function is the same, and so are the module, its names and all else that peft does with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.nn import functional
from torch.utils.flop_counter import addmm_flop, register_flop_formula
from transformers.pytorch_utils import Conv1D

from fsdptrain.model.nf4 import NF4Linear, dequantise
from fsdptrain.model.patches import import_quietly

_lora: Any = import_quietly("peft").tuners.lora
Linear: Any = _lora.Linear
ParamWrapper: Any = _lora.ParamWrapper
register_flop_formula(torch.ops.aten.addmm_, get_raw=True)(addmm_flop)  # torch counts only the one that is not in place

# Makes the weight [out, in] of a layer from what the layer keeps, in the dtype to compute in.
WeightOf = Callable[[Any, torch.dtype], torch.Tensor]


class AdaptedLinear(Linear):
    """peft's layer, for one adapter without DoRA on a frozen base layer.

    With `in_place` the adapter's product is added to the base layer's result in its memory. Selective recomputation,
    which keeps the results of products, refuses one that has changed.
    """

    in_place = True

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return base_layer(x) + dropout(x) · Aᵀ · Bᵀ · scale for x [..., in]; peft computes it if dtypes differ."""
        (name,) = self.lora_A
        layers = base, first, second = self.base_layer, self.lora_A[name], self.lora_B[name]
        a, b = first.weight, second.weight
        weight_of, tensors = _weight(base)
        same = x.dtype == a.dtype == b.dtype and (isinstance(base, NF4Linear) or x.dtype == base.weight.dtype)
        # A layer that is a unit of its own gathers its weights when it is called.
        units = any(isinstance(layer, FSDPModule) for layer in layers)
        if args or kwargs or self.merged or self.disable_adapters or units or not same:
            plain: torch.Tensor = super().forward(x, *args, **kwargs)
            return plain
        dropout = self.lora_dropout[name]
        dropped = None if isinstance(dropout, nn.Identity) or not self.training else dropout(x)
        result: torch.Tensor = _Adapted.apply(
            x, dropped, a, b, self.scaling[name], self.in_place, base.bias, weight_of, *tensors
        )
        return result.unflatten(0, x.shape[:-1])  # not in the function: some models change what it returns in place


def _weight(layer: Any) -> tuple[WeightOf, tuple[torch.Tensor, ...]]:
    """Return how the weight [out, in] of a linear layer is made, and from what."""
    if isinstance(layer, NF4Linear):
        return dequantise, layer.quantised
    transposed = isinstance(layer, Conv1D)
    return lambda tensors, dtype: tensors[0].T if transposed else tensors[0], (layer.weight,)


class AdaptedExperts(ParamWrapper):
    """peft's layer for a tensor with the weights of all experts [experts, …, …]; of two tensors, one is in the other.

    During its forward peft replaces the parameter by another object in the module, which FSDP has to find there
    (peft#3080). Here the module is called with the sum in the parameter's place.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the experts compute with W + scale · B A for each tensor W that has an adapter."""
        sums: dict[str, torch.Tensor] = {}
        layer: Any = self
        while isinstance(layer, AdaptedExperts):
            if layer.disable_adapters or layer.merged:
                return super().forward(*args, **kwargs)
            sums[layer.parameter_name] = layer.adapted()
            layer = layer.base_layer
        return functional_call(layer, sums, args, kwargs)

    def adapted(self) -> torch.Tensor:
        """Return W + scale · B A; the rows of A and the columns of B are laid out as peft has them."""
        (name,) = self.lora_A
        weight = self.get_param()
        experts, (rows, columns) = len(weight), (self.lora_A[name].weight, self.lora_B[name].weight)
        a = rows.reshape(experts, -1, rows.shape[-1]).to(weight.dtype)  # [experts, r, in]
        b = columns.reshape(len(columns), -1, experts).permute(2, 0, 1).to(weight.dtype)  # [experts, out, r]
        factors = (a.mT, b.mT) if getattr(self.get_base_layer(), "is_transposed", False) else (b, a)
        return torch.baddbmm(weight, *factors, alpha=self.scaling[name])


class _Adapted(torch.autograd.Function):
    """x · Wᵀ + bias + scale · dropped · Aᵀ · Bᵀ [all rows, out]; W and bias get no gradient; `dropped` is x if None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dropped: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float,
        in_place: bool, bias: torch.Tensor | None, weight_of: WeightOf, *tensors: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        seen = x if dropped is None else dropped
        small = functional.linear(seen, a).flatten(0, -2)
        base = functional.linear(x.flatten(0, -2), weight_of(tensors, x.dtype), bias)  # no view of another tensor
        ctx.save_for_backward(seen, small, a, b, *tensors)  # FSDP2 frees what it has gathered, and gathers it again
        ctx.scale, ctx.weight_of = scale, weight_of
        return (base.addmm_ if in_place else base.addmm)(small, b.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        seen, small, a, b, *tensors = ctx.saved_tensors
        needs_x, needs_dropped, needs_a, needs_b, *_ = ctx.needs_input_grad
        of_small = (grad @ b).mul_(ctx.scale)
        of_a = of_small.T @ seen.flatten(0, -2) if needs_a else None
        of_b = grad.T @ (small * ctx.scale) if needs_b else None
        of_x = grad @ ctx.weight_of(tensors, grad.dtype) if needs_x else None
        of_dropped = of_small @ a if needs_dropped else None
        if of_x is not None and of_dropped is None:  # without dropout
            of_x.addmm_(of_small, a)
        of_inputs = (found if found is None else found.view_as(seen) for found in (of_x, of_dropped))
        return *of_inputs, of_a, of_b, *[None] * (4 + len(tensors))
