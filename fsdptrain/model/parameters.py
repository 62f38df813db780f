"""What each parameter of a model is, and the floating-point operations that a step of training must do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from fsdptrain.config.optimizers import Weight
from fsdptrain.model.config import layer_values
from fsdptrain.model.units import base_name, beside_text, decoder_layers, is_adapter, is_adapter_matrix, tied

# The last three: parameters of state space models, and scales of norms whose class is not called a norm.
UNDECAYED_NAMES = re.compile(r"bias|norm|^(A_log|D|scale)$")


def weights_of(model: Any, quantised: Collection[int] = ()) -> dict[str, Weight]:
    """Return what each parameter of a model is, by name, tied ones once. The model may be sharded.

    `quantised` are the ids of the parameters of a skeleton that will be stored in NF4.
    """
    undecayed = undecayed_ids(model)
    find_head = getattr(model, "get_output_embeddings", None)
    head = {id(param) for param in find_head().parameters()} if find_head and find_head() is not None else set()
    outer = undecayed | head
    return {
        name: Weight(
            tuple(param.shape),
            decays=id(param) not in undecayed,
            matrix=id(param) not in outer,
            trained=param.requires_grad,
            adapter=is_adapter(name),
            quantised=id(param) in quantised,
        )
        for name, param in model.named_parameters()
    }


def undecayed_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters without weight decay: norms, biases, scales and embeddings.

    What a parameter is depends on class and name, not on its number of dimensions: biases of experts and norms of heads
    have two dimensions, and some vectors have dimensions of size 1. A head that is tied to an embedding counts as one.
    The matrices of adapters decay.
    """
    return {
        id(param)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if isinstance(module, nn.Embedding)
        or any("Norm" in cls.__name__ for cls in type(module).__mro__)
        or UNDECAYED_NAMES.search(name)
        or sum(size > 1 for size in param.shape) < 2
    } - {id(param) for name, param in model.named_parameters() if is_adapter_matrix(name)}  # also those of rank 1


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
    beside = {*beside_text(bare)}
    for name, param in bare.named_parameters():
        # All experts of a layer are one tensor with three dimensions.
        count = param.numel() * (share if param.ndim == 3 and param.shape[0] == experts else 1.0)
        if (
            name not in beside
            and param.ndim > 1
            and (param not in tables or (head is not None and param is head.weight))
        ):
            products += (2 + 2 * param.requires_grad + 2 * (param in reached)) * count
    layers = config.num_hidden_layers
    heads, sizes = (layer_values(config, name) for name in ("num_attention_heads", "head_dim"))
    heads, sizes = (values * layers if len(values) == 1 else values for values in (heads, sizes))
    widths = [n * (size or config.hidden_size // n) if n else 0 for n, size in zip(heads, sizes, strict=True)]
    forward_only = 0  # decoder layers at the beginning with attention that passes no gradient on
    for _, layer in decoder_layers(bare):
        matrices = [(_part_of(name), param) for name, param in layer.named_parameters() if param.ndim > 1]
        if any(part == matrices[0][0] and param in reached for part, param in matrices):  # attention comes first
            break
        forward_only += 1
    pairs = 4.0 * sum(widths[:forward_only]) + 12.0 * sum(widths[forward_only:])
    return (products + pairs * document) * tokens


def _with_gradient_of_input(bare: Any) -> set[nn.Parameter]:
    """Return the parameters of layers that compute a gradient of their input, because something before is trained.

    Layers count in the order in which they are registered, a decoder layer's norms first. Those of one part of it
    (attention, MLP) have the input of the part, except the last one, whose input is the result of the others.
    """
    found: set[nn.Parameter] = set()
    before = False
    layers = {  # those that train a norm of their own, not of one of their parts
        f"{name}."
        for name, layer in decoder_layers(bare)
        if any(p.requires_grad and p.ndim == 1 and key.count(".") == 1 for key, p in layer.named_parameters())
    }
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


def _layer_of(name: str) -> str:
    """Return the layer of a parameter, by name; an adapter belongs to the layer that it adapts."""
    return re.sub(r"\.lora_.*", "", base_name(name).rpartition(".")[0])


def _part_of(name: str) -> str:
    return _layer_of(name).rpartition(".")[0]


def expert_count(config: Any) -> int:
    """Return how many experts each mixture of a model has; 0 if it has none."""
    return _first_number(config.get_text_config(), EXPERTS) or 0


def _first_number(config: Any, names: Iterable[str]) -> int | None:
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
