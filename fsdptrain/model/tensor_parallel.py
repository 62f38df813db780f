"""Tensor parallelism: the ranks of a group divide the matrices of every decoder layer.

Between blocks (attention, MLP, experts) they are ranks that share rows: each has its own tokens. A block gathers the
tokens of the group, computes with this rank's heads or features, and gives the sum over the ranks back, to each rank
for its own tokens (sequence parallelism, Korthikanti et al., arXiv:2205.05198):

    own tokens ─> gather ─> q, k, v ─> attention ─> o ─> sum and return ─> own tokens

So embedding, head and loss are as without tensor parallelism, and one rule holds for every weight of a layer that is
not divided, in a block (norms of queries) or beside it: its gradient on a rank is a part, to be summed over the group.

Which matrices are divided, and how, is what transformers lists for an architecture (`base_model_tp_plan`). Attention
that it does not divide exchanges heads for tokens, as with `parallel.context`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.model.exchange import exchanged
from fsdptrain.model.parts import IN, OUT, Part, keep_own_parts
from fsdptrain.model.units import base_of, decoder_layers, full_name

EXPERTS = "moe_tp_experts"
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"  # what is between them, every rank computes as a whole
FIRST, LAST = ("colwise", GATHERED), ("rowwise", SPLIT)  # of the layers of a block
DIVIDED = {**dict.fromkeys((*FIRST, "packed_colwise"), OUT), **dict.fromkeys(LAST, IN)}
# Of weights that every rank has: the gradients of all such are summed.
WHOLE = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}


def styles(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the modules and parameters of the decoder layers that transformers divides among ranks: (name, style)."""
    plan: dict[str, str] = model.tp_plan or {}
    apart = [f"{name}." for name in model.divided_experts]
    for layer_name, layer in decoder_layers(model):
        for name in [*(name for name, _ in layer.named_modules()), *(name for name, _ in layer.named_parameters())]:
            whole = full_name(layer_name, name)
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", whole))
            if style and not f"{whole}.".startswith(tuple(apart)):
                yield whole, style


def check_layers(model: Any, ranks: int) -> None:
    """Raise RecipeError, which names the obstacle, if ranks cannot divide the layers of a skeleton."""
    if ranks > 1 and (reason := _obstacle(model, ranks)):
        message = f"{ranks} ranks cannot divide the layers of {type(model).__name__}: {reason}"
        raise RecipeError([Problem(message, "parallel.tensor")])


def _obstacle(model: Any, ranks: int) -> str | None:
    found = dict(styles(model))
    if not found:
        return "transformers has no plan for it (base_model_tp_plan)"
    blocks = {_block(name) for name, style in found.items() if style in FIRST}
    for name, style in found.items():
        module = _module(model, name)
        if style not in {*DIVIDED, *WHOLE, EXPERTS}:
            return f"{name} would be divided in a way that is not supported ({style})"
        if style == EXPERTS and (getattr(module, "is_transposed", False) or getattr(module, "has_bias", False)):
            return f"the weights of {name} are transposed or have biases"
        if style in (*FIRST, *LAST) and module is not None and type(module).forward != nn.Linear.forward:
            return f"{name} is no linear layer"
        if style in LAST and module is not None and _block(name) not in blocks:
            return f"of {_block(name)} only the last layer is divided"
        block: Any = model.get_submodule(_block(name))
        results = getattr(module, "out_features", 0)
        if style == "colwise" and (heads := _heads(block, results)) and heads % ranks and ranks % heads:
            return f"{name} has {heads} heads"
        if getattr(block, "activation_sparsity", 0):  # gemma3n
            return f"{_block(name)} compares its features with one another"
    hidden = model.config.get_text_config().hidden_size
    for name, part in _parts(model, ranks, 0).items():
        if len(part.shape) == 3 and part.shape[IN if part.dim == OUT else OUT] != hidden:  # of experts
            return f"the weights of {_block(name)} are transposed or have biases"
        if (size := part.shape[part.dim]) % (part.count * len(part.spans)):
            return f"{name} has {size} {'results' if part.dim == OUT else 'inputs'}"
    return None


def divides_attention(model: Any) -> bool:
    """Return whether the ranks of a group have heads of their own in attention."""
    names = [name for name, style in styles(model) if style in LAST and _module(model, name)]
    return any("Attention" in type(model.get_submodule(_block(name))).__name__ for name in names)


def _module(model: Any, name: str) -> nn.Module | None:
    """Return the module of this name; None if it is a parameter."""
    try:
        found: nn.Module = model.get_submodule(name)
    except AttributeError:
        return None
    return found


def _block(name: str) -> str:
    return name.rpartition(".")[0]


def _parts(model: Any, ranks: int, rank: int) -> dict[str, Part]:
    """Return which part of each divided parameter of a skeleton this rank of the group has."""
    parts: dict[str, Part] = {}
    for name, style in styles(model):
        if style not in DIVIDED:
            continue
        module = _module(model, name)
        tensors = {name: model.get_parameter(name)} if module is None else dict(module.named_parameters(prefix=name))
        for each, tensor in tensors.items():
            if tensor.ndim == 1 and style in LAST:
                continue  # a bias, which every rank adds to its own tokens
            dim = DIVIDED[style] if tensor.ndim > 1 else IN
            heads = _heads(model.get_submodule(_block(name)), tensor.shape[dim]) if style == "colwise" else 0
            count = heads if heads and ranks % heads == 0 else ranks
            packed = 2 if style == "packed_colwise" else 1
            parts[each] = Part.of(tuple(tensor.shape), dim, rank * count // ranks, count, ranks, packed)
    return parts


def _heads(block: Any, results: int) -> int:
    """Return the number of heads in the results of a layer of attention; 0 in another block."""
    size = getattr(block, "head_dim", None)
    return results // size if isinstance(size, int) and size and results % size == 0 else 0


def divide_layers(model: Any, ranks: int, rank: int) -> None:
    """Replace the divided parameters of a skeleton by this rank's parts."""
    keep_own_parts(model, _parts(model, ranks, rank))


def connect_blocks(model: Any, group: dist.ProcessGroup) -> None:
    """Let the blocks of a skeleton with divided layers exchange tokens; its adapters are in place."""
    for name, style in [*styles(model)]:
        module: Any = _module(model, name)
        if style == EXPERTS:
            _gather_before(module, group, 3)  # tokens, their experts, and the weights of these
            module.register_forward_hook(lambda _, __, out: return_tokens(out, group))
        elif style == GATHERED:
            module.register_forward_hook(lambda _, __, out: gather_tokens(out.mT, group).mT)
        elif style in LAST and module is not None:
            base = base_of(module)
            if base is not module and base.bias is not None:
                raise RecipeError(f"adapter.target: {name} has a bias, with which it cannot be divided: leave it out")
            if style == SPLIT:
                module.register_forward_pre_hook(lambda _, args: args[0].chunk(group.size(), dim=-1)[group.rank()])
            # Its bias is added once, to the sum.
            base.forward = functools.partial(_without_bias, base)
            module.register_forward_hook(functools.partial(_sum_after, group, base))
            _gather_before(model.get_submodule(_block(name)), group, 1)
    if divides_attention(model):
        for module in model.modules():
            # Attention uses the rotary tables of all tokens.
            if any(re.search("inv_freq|embed_positions", key) for key, _ in module.named_buffers(recurse=False)):
                _gather_before(module, group, 0)


def note_whole_weights(model: Any, ranks: int) -> None:
    """Note in `model.parts` the weights of layers that all ranks of a group have."""
    for layer_name, layer in decoder_layers(model):
        for name, param in layer.named_parameters(prefix=layer_name):
            model.parts.setdefault(name, Part.of(tuple(param.shape), IN, 0, 1, ranks))


def _without_bias(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, layer.weight)


def _sum_after(group: dist.ProcessGroup, layer: nn.Linear, _module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
    out = return_tokens(out, group)
    return out if layer.bias is None else out + layer.bias


def _gather_before(module: Any, group: dist.ProcessGroup, count: int) -> None:
    """Gather the first `count` arguments of a module, and the positions of its tokens if it asks for them."""
    names = [*inspect.signature(base_of(module).forward).parameters]

    def gathered(name: str, x: Any) -> Any:
        if name == "position_ids" and x is not None:
            return gather_tokens(x[..., None], group)[..., 0]
        return gather_tokens(x, group) if name in names[:count] else x

    def gather(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = (gathered(name, x) for name, x in zip(names, args, strict=False))
        return (*named, *args[len(names) :]), {name: gathered(name, x) for name, x in kwargs.items()}

    module.register_forward_pre_hook(gather, with_kwargs=True)


# ----------------------------------------------------------------------------------------------------- the exchange


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tokens [..., T·N, H] of N ranks from each one's [..., T, H]; the gradient is summed over the ranks."""
    return exchanged(x, functools.partial(all_tokens, group=group), functools.partial(own_sums, group=group))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def return_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens [..., T, H] of the sum over N ranks of [..., T·N, H]; the gradient is gathered."""
    return exchanged(x, functools.partial(own_sums, group=group), functools.partial(all_tokens, group=group))


def all_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the tokens of the group."""
    parts = x.new_empty(group.size() * x.numel())
    dist.all_gather_into_tensor(parts, x.flatten(), group=group)
    return parts.view(-1, *x.shape).movedim(0, -3).flatten(-3, -2)


def own_sums(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum this rank's tokens over the group."""
    parts = x.unflatten(-2, (group.size(), -1)).movedim(-3, 0).contiguous()
    if x.device.type == "cpu":  # gloo's reduce-scatter all-reduces everything
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received.sum(0)
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
    return own
