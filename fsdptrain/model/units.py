"""The parts of a model: its decoder layers and parameters by name, and its units.

A unit is what is gathered, freed and reduced together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptrain.config.optimizers import Weight
from fsdptrain.config.schema import Fsdp
from fsdptrain.errors import RecipeError, listed
from fsdptrain.model.config import layer_values
from fsdptrain.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered, freed and reduced together. Units are listed in forward order."""

    name: str
    modules: list[nn.Module]


def full_name(module: str, key: str) -> str:
    """Return the name in the model of the child, parameter or buffer `key` of the module of this name."""
    return f"{module}.{key}" if module else key


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's matrix or vector."""
    return bool(re.search(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.", name))


def base_name(name: str) -> str:
    """Return the name that a parameter has without adapters; an adapter's own parameters have none."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def base_of(module: Any) -> Any:
    """Return the module that a module of peft adapts; others are returned as they are."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def decoder_layers(model: Any) -> list[tuple[str, nn.Module]]:
    """Return the decoder layers of a model, sharded or not, by the class names that transformers lists for this.

    Of those inside one another (mamba lists decoder layers and their mixers) only the outer one is returned.
    """
    classes = set(model._no_split_modules or ())
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():  # an outer module precedes those inside it
        inside = found and name.startswith(f"{found[-1][0]}.")
        if not inside and classes & {cls.__name__ for cls in type(module).__mro__} and _holds_parameters(module):
            found.append((name, module))
    return found


def bytes_in_host(plan: Plan, model: Any) -> int:
    """Return the bytes of host memory in which a rank's layers keep what they need for backward (offload)."""
    how, config = plan.recipe.fsdp.recomputation, model.config.get_text_config()
    if not how.offload:
        return 0
    itemsize = getattr(torch, plan.recipe.fsdp.mixed_precision.param_dtype).itemsize
    attention = 0
    if how.keep_attention:
        heads: int = config.num_attention_heads
        size: int = (
            getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
        )
        attention = heads * (size * itemsize + 4)  # and a float32 for each query
    tokens = plan.recipe.train.micro_batch_size * plan.tokens_of_row
    return len(decoder_layers(model)) * tokens * (config.hidden_size * itemsize + attention)


def saved_state(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters (tied ones once) and persistent buffers, by name."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}


def trained_state(model: Any) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds, by name: `saved_state` without what the recipe freezes."""
    return {name: tensor for name, tensor in saved_state(model).items() if name not in model.frozen_names}


@torch.no_grad()
def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: torch.Tensor) -> int:
    """Return the number of the first row of this rank's shard, ⌈rows / ranks⌉ of them, in the whole tensor; else 0."""
    if not isinstance(tensor, DTensor):
        return 0
    for dim, placement in enumerate(tensor.placements):
        if tensor.ndim and placement.is_shard(0):
            chunk = -(-len(tensor) // tensor.device_mesh.size(dim))
            return min(len(tensor), chunk * tensor.device_mesh.get_local_rank(dim))
    return 0


def copy_own_rows(model: Any, name: str, whole: torch.Tensor) -> None:
    """Set this rank's numbers of a parameter from the whole tensor, of which nothing else leaves its device."""
    target, part = model.get_parameter(name).detach(), model.parts.get(name)
    local, first = part_of(target), first_row(target)
    local.copy_((part.take(whole) if part else whole)[first : first + len(local)])


def nonfinite_names(model: Any) -> list[str]:
    """Return the names of the saved tensors of which this process holds values that are not finite."""
    own = {name: part_of(tensor) for name, tensor in saved_state(model).items() if tensor.is_floating_point()}
    return [name for name, tensor in own.items() if not tensor.isfinite().all()]


def nonfinite_note(names: Collection[str]) -> str:
    """Return a sentence on tensors with values that are not finite."""
    return f"{listed([*names], 3)} {'has' if len(names) == 1 else 'have'} values that are not finite"


def units_of(model: Any, wrap: Any) -> list[Unit]:
    """Return the units of a skeleton in forward order; the root holds what is in no unit.

    `wrap` is `fsdp.wrap`. `auto`: the decoder layers; the embedding, and what follows them with the head, unless the
    two are tied: tied weights stay together in the root. A list names classes; `{min_params: N}` takes the innermost
    modules of that size. Raises RecipeError if nothing matches, with the classes of the model.
    """
    # Make the units that the recipe asks for.
    if isinstance(wrap, dict):
        units = _units_by_size(model, wrap["min_params"])
    elif isinstance(wrap, list):
        units = _units_by_class(model, wrap)
    else:
        units = [Unit(name, [module]) for name, module in decoder_layers(model)]
        if units and not tied(model):
            units = _with_embedding_and_head(model, units)
    # Move shared weights to the root, which gathers them once; a class that the recipe names is rejected instead.
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), set()).add(id(module))
    shared = []
    for unit in units:
        inside = {id(inner) for module in unit.modules for inner in module.modules()}
        if any(not owners[id(param)] <= inside for module in unit.modules for param in module.parameters()):
            shared.append(unit)
    if shared and isinstance(wrap, list):
        raise RecipeError(
            f"fsdp.wrap: {shared[0].name} of {type(model).__name__} shares weights with other modules: leave it out"
        )
    units = [unit for unit in units if unit not in shared]
    if not units:
        classes = sorted({type(m).__name__ for m in model.modules() if _holds_parameters(m)} - {type(model).__name__})
        raise RecipeError(f"fsdp.wrap: {wrap!r} matches nothing in {type(model).__name__}; it has {', '.join(classes)}")
    return units


def in_buckets(units: list[Unit], fsdp: Fsdp) -> list[Unit]:
    """Return the units of a skeleton, neighbours as one while their gradients have at most `fsdp.bucket_cap_mb`.

    Backward begins at the last unit, so what is left over is the first one, whose all-reduce no compute hides.
    """
    if fsdp.bucket_cap_mb is None:
        return units
    width = getattr(torch, fsdp.mixed_precision.reduce_dtype).itemsize
    found: list[Unit] = []
    left = 0  # bytes in the bucket of the last unit that was found
    for unit in reversed(units):
        params = {param for module in unit.modules for param in module.parameters() if param.requires_grad}
        size = width * sum(param.numel() for param in params)
        if found and size <= left:
            name = f"{unit.name} to {found[-1].name.rpartition(' to ')[2]}"
            found[-1] = Unit(name, [*unit.modules, *found[-1].modules])
            left -= size
        else:
            found.append(unit)
            left = fsdp.bucket_cap_mb * 2**20 - size
    return found[::-1]


def tied(model: Any) -> bool:
    """Return whether the head shares its weight with the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is not None and head.weight is model.get_input_embeddings().weight


def names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, by its id: a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def whole_shape(model: Any, name: str) -> tuple[int, ...]:
    """Return the shape of a parameter, of which a rank may have a part only."""
    return tuple((getattr(model, "parts", {}).get(name) or model.get_parameter(name)).shape)


def token_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of embedding and head, which have a row for each token; tied ones under every name."""
    ends = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    ids = {id(param) for layer in ends for param in layer.parameters()}
    return {name: param for name, param in model.named_parameters(remove_duplicate=False) if id(param) in ids}


def beside_text(model: Any) -> list[str]:
    """Return the names of the parameters that no text reaches: in a vision-language model, those for images."""
    if model.config.get_text_config() is model.config:
        return []
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    reached = {id(param) for part in parts if part is not None for param in part.parameters()}
    return [name for name, param in model.named_parameters() if id(param) not in reached]


def _with_embedding_and_head(model: Any, layers: list[Unit]) -> list[Unit]:
    """Return these units, with the embedding before and [what follows them, head] after them."""
    base = model.base_model
    if base is model:  # llama4_text has no base model: use the module that holds the list of decoder layers
        base = model.get_submodule(layers[-1].name.rpartition(".")[0].rpartition(".")[0])
    inside = {id(m) for unit in layers for m in unit.modules}
    children = list(base.children())
    last = max((i for i, c in enumerate(children) if any(id(m) in inside for m in c.modules())), default=-1)
    after = [child for child in children[last + 1 :] if _holds_parameters(child)]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding in after:
        return layers
    units = [Unit("embedding", [embedding]), *layers, Unit("head", [*after, head])]
    return [unit for unit in units if any(map(_holds_parameters, unit.modules))]  # the ends may be on other ranks


def _units_by_class(model: Any, names: list[str]) -> list[Unit]:
    missing = set(names) - {type(module).__name__ for module in model.modules()}
    if missing:
        return []
    found = [(n, m) for n, m in model.named_modules() if type(m).__name__ in names and m is not model]
    for outer, (name, module) in pairwise(found):  # the first one inside a module follows it directly
        if name.startswith(f"{outer[0]}."):
            kinds = f"{type(module).__name__} is inside {type(outer[1]).__name__}"
            raise RecipeError(f"fsdp.wrap: {kinds}: name one of the two")
    return [Unit(name, [module]) for name, module in found]


def _units_by_size(model: Any, size: int) -> list[Unit]:
    """Return the innermost modules that hold at least `size` parameters. What is left beside them stays in the root."""
    units: list[Unit] = []

    def visit(name: str, module: nn.Module) -> int:
        before = len(units)
        left = sum(visit(full_name(name, n), child) for n, child in module.named_children())
        left += sum(p.numel() for p in module.parameters(recurse=False))
        innermost = len(units) == before and not isinstance(module, nn.ModuleList)
        if left >= size and innermost and module is not model:
            units.append(Unit(name, [module]))
            return 0
        return left

    visit("", model)
    return units


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


# ----------------------------------------------------------------------------------------------- what each parameter is

# The last three: parameters of state space models, and scales of norms whose class is not called a norm.
UNDECAYED_NAMES = re.compile(r"bias|norm|^(A_log|D|scale)$")


def weights_of(model: Any, quantised: Collection[int] = ()) -> dict[str, Weight]:
    """Return what each parameter of a model is, by name, tied ones once. The model may be sharded.

    `quantised` are the ids of the parameters of a skeleton that will be stored in NF4.
    """
    undecayed = _undecayed_ids(model)
    find_head = getattr(model, "get_output_embeddings", None)
    head = {id(param) for param in find_head().parameters()} if find_head and find_head() is not None else set()
    outer = undecayed | head
    return {
        name: Weight(
            whole_shape(model, name),
            decays=id(param) not in undecayed,
            matrix=id(param) not in outer,
            trained=param.requires_grad,
            adapter=is_adapter(name),
            quantised=id(param) in quantised,
        )
        for name, param in model.named_parameters()
    }


def _undecayed_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters without weight decay: norms, biases, scales and embeddings.

    What a parameter is depends on class and name, not on its number of dimensions: biases of experts and norms of heads
    have two dimensions, and some vectors have dimensions of size 1. The matrices of adapters decay.
    """
    return {
        id(param)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if isinstance(module, nn.Embedding)
        or any("Norm" in cls.__name__ for cls in type(module).__mro__)
        or UNDECAYED_NAMES.search(name)
        or sum(size > 1 for size in param.shape) < 2
    } - {  # also those of rank 1
        id(param)
        for name, param in model.named_parameters()
        if is_adapter(name) and ".lora_magnitude_vector." not in name
    }


# What configurations call the number of experts, and how many of them a token uses.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def model_flops(bare: Any, tokens: int, document: float) -> float:
    """Return the FLOPs of forward and backward for T tokens: 6·N·T + 12·L·A·S·T (Chowdhery et al., arXiv:2204.02311).

    N counts the weights that multiply every token: all matrices of the unsharded skeleton `bare` except tables that are
    only looked up, and of a mixture's experts the share that a token uses. L is the number of layers, A heads × head
    size, 0 without attention, S = `document` the tokens of the document that a token belongs to, on average: those of
    other documents are not attended to. As in the paper, all S are counted, also the half that causality hides. Of the
    6, 2 are those of forward, 2 those of the weight's gradient if it is trained, and 2 those of its input's gradient,
    from the first layer on that trains anything. Attention before that layer has 4 instead of 12.
    """
    config = bare.config.get_text_config()
    experts, used = (first_number(config, names) for names in (EXPERTS, EXPERTS_OF_A_TOKEN))
    share = used / experts if experts and used else 1.0
    tables = {module.weight for module in bare.modules() if isinstance(module, nn.Embedding)}
    head, beside = bare.get_output_embeddings(), {*beside_text(bare)}
    layer_of = {param: n for n, (_, layer) in enumerate(decoder_layers(bare)) for param in layer.parameters()}
    last, first = max(layer_of.values(), default=0), _first_trained(bare)
    products = 0.0
    for name, param in bare.named_parameters():
        # All experts of a layer are one tensor with three dimensions.
        count = param.numel() * (share if param.ndim == 3 and param.shape[0] == experts else 1.0)
        if (
            name not in beside
            and param.ndim > 1
            and (param not in tables or (head is not None and param is head.weight))
        ):
            products += (2 + 2 * param.requires_grad + 2 * (layer_of.get(param, last) >= first)) * count
    layers = config.num_hidden_layers
    heads, sizes = (layer_values(config, name) for name in ("num_attention_heads", "head_dim"))
    heads, sizes = (values * layers if len(values) == 1 else values for values in (heads, sizes))
    widths = [n * (size or config.hidden_size // n) if n else 0 for n, size in zip(heads, sizes, strict=True)]
    pairs = 4.0 * sum(widths[:first]) + 12.0 * sum(widths[first:])
    return (products + pairs * document) * tokens


def _first_trained(bare: Any) -> int:
    """Return the number of the first decoder layer that gradients reach; how many there are if they reach none."""
    parts = [bare.get_input_embeddings(), *(layer for _, layer in decoder_layers(bare))]
    trained = [any(param.requires_grad for param in part.parameters()) for part in parts]
    return max(0, trained.index(True) - 1) if any(trained) else len(parts) - 1


def expert_count(config: Any) -> int:
    """Return how many experts each mixture of a model has; 0 if it has none."""
    return first_number(config.get_text_config(), EXPERTS) or 0


def first_number(config: Any, names: Iterable[str]) -> int | None:
    """Return the value of the first of these names that a configuration has; None without one."""
    return next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
