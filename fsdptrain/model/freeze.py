"""What is trained of a model: adapters and the modules beside them, some of its parameters, or all of it.

The layers that a recipe names are found and checked here; `peft` adds the adapters.
"""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fsdptrain.config.schema import Adapter, Recipe
from fsdptrain.errors import RecipeError, listed
from fsdptrain.model.flops import expert_count
from fsdptrain.model.nf4 import BLOCK, NF4Linear, is_quantisable, linear_layers
from fsdptrain.model.peft import (
    adapted_layers,
    adapted_name,
    inject,
    is_adapter,
    is_pattern,
    without_adapters,
)
from fsdptrain.model.units import Unit, beside_text, names_by_parameter

ALL_LINEAR = "all-linear"  # a target: all linear layers but the head


def freeze(model: Any, recipe: Recipe) -> Any:
    """Add the recipe's adapters to a skeleton and freeze what is not trained, in place; return the skeleton.

    Frozen parameters get the compute dtype, trained ones keep the master dtype; what transformers keeps in float32
    stays so (`float32_names` get the new names). A recipe that trains everything changes nothing. Raises RecipeError if
    the recipe names layers that the model does not have or that cannot be adapted.
    """
    if recipe.adapter.kind is not None:
        whole = _modules_to_save(model, recipe.adapter)
        _check_opened_in_nf4(model, whole, recipe)
        targets, experts = _targets(model, recipe.adapter, whole)
        _check_targets(model, targets, recipe)
        _check_experts(model, experts, recipe)
        inject(model, recipe, targets, experts, whole)
        trained = {id(param) for name in whole for param in model.get_submodule(name).parameters()}
        trained |= {id(param) for name, param in model.named_parameters() if is_adapter(name)}
    elif recipe.model.trainable:
        trained = {id(param) for param in _trainable(model, recipe.model.trainable)}
    else:
        return model
    model.float32_names = {adapted_name(model, name) for name in model.float32_names}
    _set_dtypes(model, trained, getattr(torch, recipe.model.dtype), getattr(torch, _compute(recipe)))
    model.frozen_names = {name for name, param in model.named_parameters() if not param.requires_grad}
    return model


def _compute(recipe: Recipe) -> str:
    return str(recipe.fsdp.mixed_precision.param_dtype)


def _set_dtypes(model: Any, trained: set[int], master: torch.dtype, compute: torch.dtype) -> None:
    """Replace the parameters of a skeleton by trained ones in the master dtype and frozen ones in the compute dtype."""
    made: dict[int, nn.Parameter] = {}
    wide = {id(param) for name, param in model.named_parameters() if name in model.float32_names}
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False):
            if not param.is_floating_point():  # quantised
                continue
            wanted = id(param) in trained
            dtype = torch.float32 if id(param) in wide else master if wanted else compute
            if id(param) not in made:
                made[id(param)] = nn.Parameter(param.detach().to(dtype), requires_grad=wanted)
            setattr(module, key, made[id(param)])


def _trainable(model: Any, patterns: list[str]) -> list[nn.Parameter]:
    """Return the parameters that `model.trainable` names."""
    params = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has several names
    found: list[nn.Parameter] = []
    for pattern in patterns:
        matched = [param for name, param in params.items() if _matches(name, pattern)]
        if not matched:
            raise RecipeError(f"model.trainable: {pattern!r} matches no parameter{_nearest(pattern, params)}")
        found += matched
    return found


def layers_in_nf4(model: Any, recipe: Recipe) -> dict[str, nn.Module]:
    """Return the layers of a skeleton, with adapters or without, whose weights the recipe quantises: name → layer.

    Raises RecipeError if it should quantise some, but the model has none.
    """
    if recipe.adapter.kind != "qlora":
        return {}
    layers = _frozen_linear_layers(model, recipe.adapter)
    found = {name: layer for name, layer in layers.items() if is_quantisable(layer)}
    if not found:
        raise RecipeError(
            f"adapter.kind: qlora quantises linear layers whose inputs are a multiple of {BLOCK}, and "
            f"{type(model).__name__} has none: use kind: lora"
        )
    return found


def unquantised_note(model: Any, recipe: Recipe) -> str | None:
    """Return a sentence on the linear layers that the recipe would quantise and cannot; None if there are none."""
    if recipe.adapter.kind != "qlora":
        return None
    layers = _frozen_linear_layers(model, recipe.adapter)
    left = [name for name, layer in layers.items() if not is_quantisable(layer)]
    if not left:
        return None
    return (
        f"{len(left)} of {len(layers)} linear layers stay in {_compute(recipe)}, because the number of their inputs is "
        f"not a multiple of {BLOCK}: {listed(left, 2)}"
    )


def _frozen_linear_layers(model: Any, adapter: Adapter) -> dict[str, nn.Module]:
    """Return the linear layers that could be quantised, if their shapes fit: name → layer."""
    with without_adapters(model):
        whole = _modules_to_save(model, adapter)
        layers = linear_layers(model)
        return {n: layer for n, layer in layers.items() if not any(_matches(n, module) for module in whole)}


def quantised_ids(model: Any, recipe: Recipe) -> set[int]:
    """Return the ids of the parameters of a skeleton that the recipe quantises."""
    return {id(layer.weight) for layer in layers_in_nf4(model, recipe).values()}


def _targets(model: Any, adapter: Adapter, whole: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the layers, and of the tensors of experts, that get an adapter, as the model lists them.

    `whole` are the modules that are trained as a whole. Raises RecipeError for a name that matches nothing.
    """
    beside = {name.rpartition(".")[0] for name in beside_text(model)}
    layers = {n: module for n, module in model.named_modules() if _can_be_adapted(module) and n not in beside}
    experts = _tensors_of_experts(model)
    found: set[str] = set()
    for pattern in [adapter.target] if isinstance(adapter.target, str) else adapter.target:
        if pattern == ALL_LINEAR:
            head = model.get_output_embeddings()
            matched = [n for n, m in layers.items() if not isinstance(m, nn.Embedding) and m is not head]
        else:
            named = [name for name in experts if name.split(".")[-2] in pattern]  # `down_proj` is also a linear layer
            matched = [name for name in (*layers, *named) if _matches(name, pattern)]
            if not matched:
                raise RecipeError(_no_target_message(model, pattern, [*layers, *experts]))
        found |= {*matched}
    kept = [n for n in (*layers, *experts) if n in found and not any(_matches(n, module) for module in whole)]
    if not kept:
        whole_only = ": adapter.modules_to_save trains them all as a whole; name other layers" if found else ""
        raise RecipeError(
            f"adapter.target: {adapter.target} leaves no layer of {type(model).__name__} with an adapter{whole_only}"
        )
    return [name for name in kept if name in layers], [name for name in kept if name in experts]


def _tensors_of_experts(model: Any) -> list[str]:
    """Return the names of the tensors that have the matrices of all experts of a layer [experts, …, …]."""
    count = expert_count(model.config)
    return [name for name, param in model.named_parameters() if param.ndim == 3 and param.shape[0] == count > 0]


def _can_be_adapted(module: nn.Module) -> bool:
    """Return whether a module can get an adapter: an embedding, or a linear layer that does nothing else.

    Some linear layers do more than multiply: llama4's router also chooses experts.
    """
    plain = (nn.Linear.forward, Conv1D.forward, NF4Linear.forward)
    return isinstance(module, nn.Embedding) or (
        isinstance(module, (nn.Linear, Conv1D)) and type(module).forward in plain
    )


def _no_target_message(model: Any, pattern: str, layers: list[str]) -> str:
    other = next(((name, module) for name, module in model.named_modules() if name and _matches(name, pattern)), None)
    if other is None:
        return f"adapter.target: {pattern!r} matches no layer of {type(model).__name__}{_nearest(pattern, layers)}"
    return (
        f"adapter.target: {pattern!r}: {other[0]} is a {type(other[1]).__name__}, which cannot get an adapter: name "
        "linear layers, embeddings or experts"
    )


def _check_targets(model: Any, targets: list[str], recipe: Recipe) -> None:
    """Raise RecipeError for a layer that cannot be trained or merged with an adapter."""
    if shared := _shared(model, targets):
        raise RecipeError(
            f"adapter.target: {shared[0]} shares its weight with {shared[1]}, so its adapter could not be merged: "
            "leave it out"
        )
    highest = max((_highest_rank(model.get_submodule(name)) for name in targets), default=recipe.adapter.r)
    if recipe.adapter.r > highest:
        raise RecipeError(
            f"adapter.r: {recipe.adapter.r} exceeds the smaller dimension of every adapted layer: use at most {highest}"
        )
    head = model.get_output_embeddings()
    names = [name for name in targets if model.get_submodule(name) is head]
    if names and recipe.train.loss == "chunked":
        pattern = next(pattern for pattern in recipe.adapter.target if _matches(names[0], pattern))
        raise RecipeError(
            f"adapter.target: {pattern!r} includes the head ({names[0]}); train.loss: chunked does not support an "
            f"adapter on it: use target: all-linear, train.loss: plain, or modules_to_save: [{names[0]}]"
        )


def _check_experts(model: Any, experts: list[str], recipe: Recipe) -> None:
    """Raise RecipeError for tensors of experts that cannot be trained with adapters as the recipe wants them."""
    adapter = recipe.adapter
    for key, value in {"dropout": adapter.dropout, "use_dora": adapter.use_dora}.items():
        if experts and value:
            raise RecipeError(
                f"adapter.{key}: {value} is not possible for experts ({experts[0]}), whose adapters are added to the "
                f"weights: remove {key}, or leave experts out of adapter.target"
            )
    highest = max((min(model.get_parameter(name).shape[1:]) for name in experts), default=adapter.r)
    if adapter.r > highest:
        raise RecipeError(
            f"adapter.r: {adapter.r} exceeds the smaller dimension of every matrix of an expert: use at most {highest}"
        )


def check_experts_in_one_unit(model: Any, units: list[Unit]) -> None:
    """Raise RecipeError if a part of experts with adapters is a unit of its own, which is gathered too late."""
    for name, layer in adapted_layers(model).items():
        inside = next((unit.name for unit in units if unit.name.startswith(f"{name}.")), None)
        if hasattr(layer, "parameter_name") and inside:
            raise RecipeError(f"fsdp.wrap: {inside} would be a unit apart from its adapters: use wrap: auto")


def _highest_rank(layer: Any) -> int:
    sizes = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else layer.weight.shape
    return int(min(sizes))


def _modules_to_save(model: Any, adapter: Adapter) -> list[str]:
    """Return the names of the modules that are trained as a whole; raises RecipeError for a name that matches none."""
    found: list[str] = []
    names = [name for name, _ in model.named_modules() if name]
    for wanted in adapter.modules_to_save:
        matched = [name for name in names if name == wanted or name.endswith(f".{wanted}")]
        if not matched:
            allowed = [name for name in names if _saved_fault(name, model.get_submodule(name)) is None]
            raise RecipeError(
                f"adapter.modules_to_save: {wanted!r} is no module of {type(model).__name__}{_nearest(wanted, allowed)}"
            )
        for name in matched:
            if fault := _saved_fault(name, model.get_submodule(name)):
                raise RecipeError(f"adapter.modules_to_save: {fault}")
        found += matched
    if shared := _shared(model, found):
        raise RecipeError(
            f"adapter.modules_to_save: {shared[0]} shares its weight with {shared[1]}, and peft would save only one of "
            "them: leave it out, or train it with model.trainable"
        )
    return found


def _saved_fault(name: str, module: nn.Module) -> str | None:
    """Return why a module has nothing to train, or would not be opened by peft; None if it can be trained."""
    if next(module.parameters(), None) is None:
        return f"{name} has no parameters to train: leave it out"
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        first = next(module.named_children())[0]
        return f"{name} is a list of modules, which peft cannot open: name modules in it, such as {name}.{first}"
    return None


def _check_opened_in_nf4(model: Any, whole: list[str], recipe: Recipe) -> None:
    """Raise RecipeError if the adapter would be saved with layers that peft could not open beside a base in 4 bits."""
    if recipe.adapter.kind != "qlora" or recipe.export.adapter == "merged":
        return
    if wrong := [(layer, name) for layer in linear_layers(model) for name in whole if _matches(layer, name)]:
        raise RecipeError(
            f"adapter.modules_to_save: {wrong[0][1]} has linear layers ({wrong[0][0]}), which peft cannot open beside "
            "a base in 4 bits: use export.adapter: merged, or adapter.kind: lora"
        )


def _shared(model: Any, names: list[str]) -> tuple[str, str] | None:
    """Return the first of these modules that has a parameter in common with another module, and that one."""
    several = names_by_parameter(model)
    for name in names:
        for param in model.get_submodule(name).parameters():
            if others := [other for other in several[id(param)] if not other.startswith(f"{name}.")]:
                return name, others[0].rpartition(".")[0]
    return None


def _matches(name: str, pattern: str) -> bool:
    """Return whether a dotted name is `pattern`, is below it, ends with it, or matches it as a pattern."""
    return fnmatchcase(name, pattern) if is_pattern(pattern) else f".{pattern}." in f".{name}."


def _nearest(pattern: str, names: Any) -> str:
    """Return a hint with the names nearest to a pattern: whole ones, or their last words without layer numbers."""
    wider = next(
        (p for p in (f"*{pattern}", f"{pattern}*", f"*{pattern}*") if any(_matches(n, p) for n in names)), None
    )
    if wider and is_pattern(pattern):
        return f": a pattern must match the whole name; did you mean {wider!r}?"
    ends = [name.removesuffix(".weight").rpartition(".")[2] for name in names]
    ends = [end for end in ends if not end.isdigit()]
    near = get_close_matches(pattern, dict.fromkeys([*ends, *names]), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(set(ends))[:12])}"
