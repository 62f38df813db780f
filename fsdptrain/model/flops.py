"""Count the floating-point operations that a step of training must do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdptrain.model.peft import base_name
from fsdptrain.model.skeleton import layer_values
from fsdptrain.model.units import decoder_layers, tied

# What configurations call the number of experts, and how many of them a token uses.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def model_flops(bare: Any, tokens: int, document: float) -> float:
    """Return the FLOPs of forward and backward for T tokens: 6·N·T + 12·L·A·S·T (Chowdhery et al., arXiv:2204.02311).

    N counts the weights that multiply every token: all matrices of the unsharded skeleton `bare` except tables that are
    only looked up, and of a mixture's experts the share that a token uses. L is the number of layers, A heads × head
    size, 0 without attention, S = `document` the tokens of the document that a token belongs to, on average: those of
    other documents are not attended to. As in the paper, all S are counted, also the half that causality hides. Of the
    6, 2 are those of forward, 2 those of the weight's gradient if it is trained, and 2 those of its input's gradient if
    something before it is trained. Attention that passes no gradient on has 4 instead of 12.
    """
    config = bare.config.get_text_config()
    experts, used = (_first_number(config, names) for names in (EXPERTS, EXPERTS_OF_A_TOKEN))
    share = used / experts if experts and used else 1.0
    tables = {module.weight for module in bare.modules() if isinstance(module, nn.Embedding)}
    head = bare.get_output_embeddings()
    reached = _with_gradient_of_input(bare)
    products = 0.0
    for param in bare.parameters():
        # All experts of a layer are one tensor with three dimensions.
        count = param.numel() * (share if param.ndim == 3 and param.shape[0] == experts else 1.0)
        if param.ndim > 1 and (param not in tables or (head is not None and param is head.weight)):
            products += (2 + 2 * param.requires_grad + 2 * (param in reached)) * count
    layers = config.num_hidden_layers
    heads, sizes = (layer_values(config, name) for name in ("num_attention_heads", "head_dim"))
    heads, sizes = (values * layers if len(values) == 1 else values for values in (heads, sizes))
    widths = [n * (size or config.hidden_size // n) if n else 0 for n, size in zip(heads, sizes, strict=True)]
    forward_only = _decoder_layers_without_gradient(bare, reached)
    pairs = 4.0 * sum(widths[:forward_only]) + 12.0 * sum(widths[forward_only:])
    return (products + pairs * document) * tokens


def _with_gradient_of_input(bare: Any) -> set[nn.Parameter]:
    """Return the parameters of layers that compute a gradient of their input, because something before is trained.

    Layers count in the order in which they are registered, a decoder layer's norms first. Those of one part of it
    (attention, MLP) have the input of the part, except the last one, whose input is the result of the others.
    """
    found: set[nn.Parameter] = set()
    before = False
    layers = {f"{name}." for name, layer in decoder_layers(bare) if _trains_norms(layer)}
    for owner, members in itertools.groupby(bare.named_parameters(), key=lambda member: _part_of(member[0])):
        before = before or f"{owner}.".startswith(tuple(layers))
        part = [(_layer_of(name), ".lora_B." in name, param) for name, param in members]
        last = part[-1][0]
        inside = any(param.requires_grad for layer, _, param in part if layer != last)
        found |= {param for layer, second, param in part if before or second or (inside and layer == last)}
        before = before or any(param.requires_grad for *_, param in part)
    if tied(bare) and before:  # listed first, but multiplied last
        found.add(bare.get_input_embeddings().weight)
    return found


def _trains_norms(layer: nn.Module) -> bool:
    """Return whether a norm of a decoder layer itself, not of one of its parts, is trained."""
    return any(p.requires_grad and p.ndim == 1 and name.count(".") == 1 for name, p in layer.named_parameters())


def _layer_of(name: str) -> str:
    """Return the layer of a parameter, by name; an adapter belongs to the layer that it adapts."""
    return re.sub(r"\.lora_.*", "", base_name(name).rpartition(".")[0])


def _part_of(name: str) -> str:
    return _layer_of(name).rpartition(".")[0]


def _decoder_layers_without_gradient(bare: Any, reached: set[nn.Parameter]) -> int:
    """Return how many decoder layers at the beginning have attention that passes no gradient on."""
    layers = decoder_layers(bare)
    for number, (_, layer) in enumerate(layers):
        matrices = [(_part_of(name), param) for name, param in layer.named_parameters() if param.ndim > 1]
        if any(part == matrices[0][0] and param in reached for part, param in matrices):  # attention comes first
            return number
    return len(layers)


def expert_count(config: Any) -> int:
    """Return how many experts each mixture of a model has; 0 if it has none."""
    return _first_number(config.get_text_config(), EXPERTS) or 0


def _first_number(config: Any, names: Iterable[str]) -> int | None:
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
