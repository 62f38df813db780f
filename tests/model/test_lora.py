"""The adapted layer in one function against peft's own: results and gradients, for every kind of layer below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from test_nf4 import quantised
from torch import nn
from transformers.pytorch_utils import Conv1D

from fsdptrain.model.lora import AdaptedLinear

IN, OUT, RANK = 128, 192, 3
KINDS = ("linear", "bias", "conv1d", "nf4")


def base_layer(kind: str, dtype: torch.dtype) -> Any:
    layer: Any = Conv1D(OUT, IN) if kind == "conv1d" else nn.Linear(IN, OUT, bias=kind == "bias")
    layer.to(dtype)
    return quantised(layer.weight.detach()) if kind == "nf4" else layer.requires_grad_(False)


def adapted(kind: str, dtype: torch.dtype, dropout: float) -> Any:
    config = LoraConfig(lora_dropout=dropout, fan_in_fan_out=kind == "conv1d")
    layer: Any = Linear(base_layer(kind, dtype), "default", config, r=RANK, lora_alpha=7)
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    for part in (layer.lora_A, layer.lora_B):
        part.to(dtype)
    return layer.train()


def results(layer: Any, x: torch.Tensor, grad: torch.Tensor, needs_x: bool) -> list[torch.Tensor | None]:
    x = x.clone().requires_grad_(needs_x)
    layer.zero_grad()
    torch.manual_seed(5)  # of dropout
    out = layer(x)
    out.backward(grad)
    return [out.detach(), x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]


def assert_equal_to_peft(layer: Any, x: torch.Tensor, limit: float, needs_x: bool = True) -> None:
    """Compare peft's results with those of one function; `limit` is relative to the largest value of each."""
    grad = torch.randn(*x.shape[:-1], OUT).to(x.dtype)
    expected = results(layer, x, grad, needs_x)
    layer.__class__ = AdaptedLinear
    for layer.in_place in (True, False):
        for ours, theirs in zip(results(layer, x, grad, needs_x), expected, strict=True):
            if ours is None or theirs is None:
                assert ours is theirs and not needs_x
            else:
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                assert (ours - theirs).abs().max() <= limit * theirs.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_peft(kind: str, dropout: float) -> None:
    torch.manual_seed(0)
    assert_equal_to_peft(adapted(kind, torch.float32, dropout), torch.randn(2, 5, IN), 2e-6)
    assert_equal_to_peft(adapted(kind, torch.float32, dropout), torch.randn(7, IN), 2e-6, needs_x=False)
    assert_equal_to_peft(adapted(kind, torch.float32, dropout).eval(), torch.randn(7, IN), 2e-6)
    assert_equal_to_peft(adapted(kind, torch.bfloat16, dropout), torch.randn(2, 5, IN).bfloat16(), 2e-2)


def test_peft_computes_what_the_function_cannot() -> None:
    torch.manual_seed(0)
    layer, x = adapted("linear", torch.float32, 0.0), torch.randn(7, IN)
    layer.__class__ = AdaptedLinear
    out = layer(x)
    layer(x).clamp_(-1, 1).sum().backward()  # as olmo does
    layer.enable_adapters(False)
    torch.testing.assert_close(layer(x), layer.base_layer(x), rtol=0, atol=0)
    layer.enable_adapters(True)
    layer.merge()
    torch.testing.assert_close(layer(x), out)
    layer.unmerge()
    layer.base_layer.bfloat16()
    assert layer(x.bfloat16()).dtype == torch.bfloat16  # the adapter is still float32


def test_what_a_layer_returns_for_a_batch_can_be_changed_in_place() -> None:
    """Olmo clips queries, keys and values so, with `clip_qkv`."""
    torch.manual_seed(0)
    layer, x = adapted("linear", torch.float32, 0.0), torch.randn(2, 7, IN)
    found = []
    for kind in (Linear, AdaptedLinear):
        layer.__class__ = kind
        layer.zero_grad()
        clipped = layer(x).clamp_(-0.5, 0.5)
        clipped.sum().backward()
        found.append([clipped.detach(), *(param.grad.clone() for param in layer.parameters() if param.requires_grad)])
    assert found[0][0].abs().max() == 0.5
    torch.testing.assert_close(found[1], found[0])
