"""What is trained of a model: adapters (LoRA) and the modules beside them, some of its parameters, or all of it.

Adapters are those of peft: in the modules, their first weights, and their files. They are injected into the skeleton
before it is sharded, because peft takes shapes from the weights that it finds. A linear layer `q_proj` becomes a module
with the layer inside: `q_proj.base_layer`, `q_proj.lora_A.default`, … `without_adapters` restores the plain model for a
while, so that files are read into it under their own names.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from fsdptrain.config.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdptrain.config.schema import Adapter, Recipe
from fsdptrain.errors import RecipeError, error_summary, listed
from fsdptrain.model.nf4 import BLOCK, NF4Linear, is_quantisable, linear_layers
from fsdptrain.model.patches import import_quietly
from fsdptrain.model.skeleton import parameters_on_meta, seed_of
from fsdptrain.model.units import (
    Unit,
    base_name,
    beside_text,
    copy_own_rows,
    expert_count,
    full_name,
    is_adapter,
    names_by_parameter,
    whole_shape,
)
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.files import openable

ALL_LINEAR = "all-linear"  # a target: all linear layers but the head
NAME = "default"  # of the adapter in peft's modules
PREFIX = "base_model.model."  # of every name in peft's files


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the modules of peft that hold a layer and its adapter, by the name of the layer."""
    return {name: module for name, module in model.named_modules() if _is_adapted(module)}


def _adapted_name(model: Any, name: str) -> str:
    """Return the name, in a model with adapters, of a parameter or buffer of the model without them."""
    owner, _, key = name.rpartition(".")
    while _is_adapted(model.get_submodule(owner)):  # experts may have an adapter for each of their tensors
        owner += ".base_layer"
    return full_name(owner, key)


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def adapted_weight(name: str, layer: Any) -> str:
    """Return the name that the weight changed by the module `name` of `adapted_layers` has without adapters."""
    return base_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Put the layers of a model back into the place of their adapters inside this context."""
    layers = {name: layer for name, layer in adapted_layers(model).items() if not name.endswith(".base_layer")}

    def place(inner: bool) -> None:
        for name, layer in layers.items():
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, layer.get_base_layer() if inner else layer)

    place(inner=True)
    try:
        yield
    finally:
        place(inner=False)


def freeze(model: Any, recipe: Recipe) -> Any:
    """Add the recipe's adapters to a skeleton and freeze what is not trained, in place; return the skeleton.

    Frozen parameters get the compute dtype, trained ones keep the master dtype; what transformers keeps in float32
    stays so (`float32_names` get the new names). A recipe that trains everything changes nothing. Raises RecipeError if
    the recipe names layers that the model does not have or that cannot be adapted.
    """
    if recipe.adapter.kind is not None:
        whole = _modules_to_save(model, recipe)
        targets, experts = _targets(model, recipe, whole)
        inject(model, recipe, targets, experts, whole)
        trained = {id(param) for name in whole for param in model.get_submodule(name).parameters()}
        trained |= {id(param) for name, param in model.named_parameters() if is_adapter(name)}
    elif recipe.model.trainable:
        trained, params = set(), dict(model.named_parameters(remove_duplicate=False))  # a tied weight has several names
        for pattern in recipe.model.trainable:
            matched = {id(param) for name, param in params.items() if _matches(name, pattern)}
            if not matched:
                raise RecipeError(f"model.trainable: {pattern!r} matches no parameter{_nearest(pattern, params)}")
            trained |= matched
    else:
        return model
    model.float32_names = {_adapted_name(model, name) for name in model.float32_names}
    # Replace the parameters by trained ones in the master dtype and frozen ones in the compute dtype.
    master, compute = (getattr(torch, name) for name in (recipe.model.dtype, recipe.fsdp.mixed_precision.param_dtype))
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
    model.frozen_names = {name for name, param in model.named_parameters() if not param.requires_grad}
    return model


def layers_in_nf4(model: Any, recipe: Recipe) -> dict[str, nn.Module]:
    """Return the layers whose weights the recipe quantises, by name; raises RecipeError if there are none."""
    if recipe.adapter.kind != "qlora":
        return {}
    found = {name: layer for name, layer in _frozen_linear_layers(model, recipe).items() if is_quantisable(layer)}
    if not found:
        raise RecipeError(
            f"adapter.kind: qlora quantises linear layers whose inputs are a multiple of {BLOCK}, and "
            f"{type(model).__name__} has none: use kind: lora"
        )
    return found


def _frozen_linear_layers(model: Any, recipe: Recipe) -> dict[str, nn.Module]:
    with without_adapters(model):
        whole = _modules_to_save(model, recipe)
        layers = linear_layers(model)
    return {name: layer for name, layer in layers.items() if not any(_matches(name, module) for module in whole)}


def unquantised_note(model: Any, recipe: Recipe) -> str | None:
    """Return a sentence on the linear layers that the recipe would quantise and cannot; None if there are none."""
    layers = _frozen_linear_layers(model, recipe)
    left = [name for name, layer in layers.items() if not is_quantisable(layer)]
    if recipe.adapter.kind != "qlora" or not left:
        return None
    return (
        f"{len(left)} of {len(layers)} linear layers stay in {recipe.fsdp.mixed_precision.param_dtype}, because the "
        f"number of their inputs is not a multiple of {BLOCK}: {listed(left, 2)}"
    )


def quantised_ids(model: Any, recipe: Recipe) -> set[int]:
    """Return the ids of the parameters of a skeleton that the recipe quantises."""
    return {id(layer.weight) for layer in layers_in_nf4(model, recipe).values()}


def _targets(model: Any, recipe: Recipe, whole: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the layers, and of the tensors of experts, that get an adapter, as the model lists them."""
    adapter, head = recipe.adapter, model.get_output_embeddings()
    # A linear layer that does more than multiply gets none: llama4's router also chooses experts.
    plain = (nn.Linear.forward, Conv1D.forward, NF4Linear.forward)
    beside = {name.rpartition(".")[0] for name in beside_text(model)}
    layers = {
        name: module
        for name, module in model.named_modules()
        if name not in beside
        and (
            isinstance(module, nn.Embedding)
            or (isinstance(module, (nn.Linear, Conv1D)) and type(module).forward in plain)
        )
    }
    # The matrices of all experts of a layer are one tensor [experts, …, …].
    count = expert_count(model.config)
    shapes = {name: whole_shape(model, name) for name, _ in model.named_parameters()}
    experts = [name for name, shape in shapes.items() if len(shape) == 3 and shape[0] == count > 0]
    found: set[str] = set()
    for pattern in [adapter.target] if isinstance(adapter.target, str) else adapter.target:
        if pattern == ALL_LINEAR:
            matched = [n for n, m in layers.items() if not isinstance(m, nn.Embedding) and m is not head]
        else:
            named = [name for name in experts if name.split(".")[-2] in pattern]  # `down_proj` is also a linear layer
            matched = [name for name in (*layers, *named) if _matches(name, pattern)]
            if not matched:
                raise RecipeError(
                    f"adapter.target: {pattern!r} matches no linear layer, embedding or experts of "
                    f"{type(model).__name__}{_nearest(pattern, [*layers, *experts])}"
                )
        found |= {*matched}
    kept = [n for n in (*layers, *experts) if n in found and not any(_matches(n, module) for module in whole)]
    targets, adapted = [name for name in kept if name in layers], [name for name in kept if name in experts]
    if not kept:
        raise RecipeError(
            f"adapter.target: {adapter.target} leaves no layer of {type(model).__name__} with an adapter, beside those "
            "that adapter.modules_to_save trains as a whole"
        )
    if recipe.train.loss == "chunked" and any(layers[name] is head for name in targets):
        raise RecipeError(
            f"adapter.target: {adapter.target} includes the head, and train.loss: chunked does not support an adapter "
            "on it: use target: all-linear, train.loss: plain, or adapter.modules_to_save"
        )
    if shared := _shared(model, targets):
        raise RecipeError(
            f"adapter.target: {shared[0]} shares its weight with {shared[1]}, so its adapter could not be merged: "
            "leave it out"
        )
    for key, value in {"dropout": adapter.dropout, "use_dora": adapter.use_dora}.items():
        if adapted and value:
            raise RecipeError(
                f"adapter.{key}: {value} is not possible for experts ({adapted[0]}), whose adapters are added to the "
                f"weights: remove {key}, or leave experts out of adapter.target"
            )
    return targets, adapted


def check_experts_in_one_unit(model: Any, units: list[Unit]) -> None:
    """Raise RecipeError if a part of experts with adapters is a unit of its own, which is gathered too late."""
    for name, layer in adapted_layers(model).items():
        inside = next((unit.name for unit in units if unit.name.startswith(f"{name}.")), None)
        if hasattr(layer, "parameter_name") and inside:
            raise RecipeError(f"fsdp.wrap: {inside} would be a unit apart from its adapters: use wrap: auto")


def _modules_to_save(model: Any, recipe: Recipe) -> list[str]:
    """Return the names of the modules that are trained as a whole; raises RecipeError for one that cannot be."""
    found: list[str] = []
    modules = {name: module for name, module in model.named_modules() if name}
    for wanted in recipe.adapter.modules_to_save:
        matched = [name for name in modules if name == wanted or name.endswith(f".{wanted}")]
        if not matched:
            raise RecipeError(
                f"adapter.modules_to_save: {wanted!r} is no module of {type(model).__name__}{_nearest(wanted, modules)}"
            )
        for name in matched:
            if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)) or not [*modules[name].parameters()]:
                raise RecipeError(
                    f"adapter.modules_to_save: {name} has no parameters, or is a list of modules, which peft cannot "
                    "open: name other modules, or modules in it"
                )
        found += matched
    if shared := _shared(model, found):
        raise RecipeError(
            f"adapter.modules_to_save: {shared[0]} shares its weight with {shared[1]}, and peft would save only one of "
            "them: leave it out, or train it with model.trainable"
        )
    in_4_bits = recipe.adapter.kind == "qlora" and recipe.export.adapter != "merged"
    layers = linear_layers(model) if in_4_bits and found else {}
    if wrong := [(layer, name) for layer in layers for name in found if _matches(layer, name)]:
        raise RecipeError(
            f"adapter.modules_to_save: {wrong[0][1]} has linear layers ({wrong[0][0]}), which peft cannot open "
            "beside a base in 4 bits: use export.adapter: merged, or adapter.kind: lora"
        )
    return found


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
    return fnmatchcase(name, pattern) if _is_pattern(pattern) else f".{pattern}." in f".{name}."


def _is_pattern(name: str) -> bool:
    return bool(set("*?[") & set(name))


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """Return a hint with the names nearest to a pattern: whole ones, or their last words without layer numbers."""
    if _is_pattern(pattern):
        return ": a pattern must match the whole name"
    ends = {name.removesuffix(".weight").rpartition(".")[2] for name in names if not name.endswith(tuple("0123456789"))}
    near = get_close_matches(pattern, sorted({*ends, *names}), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(sorted(ends)[:12])}"


def inject(model: Any, recipe: Recipe, targets: list[str], experts: list[str], whole: list[str]) -> None:
    """Let peft add the adapters, on the meta device; its weights are set by `start_adapters` or by a checkpoint.

    `targets` are the layers that get one, `experts` the tensors of experts that do. `whole` are the modules that are
    trained as a whole. Raises RecipeError for what peft refuses.
    """
    adapter, name = recipe.adapter, str(recipe.model.id)
    ends = {name for name, _ in model.named_modules() if name.endswith(tuple(adapter.modules_to_save))}
    config = import_quietly("peft").LoraConfig(
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=[],
        use_dora=adapter.use_dora,
        use_rslora=adapter.use_rslora,
        fan_in_fan_out=any(isinstance(model.get_submodule(layer), Conv1D) for layer in targets),  # transposed
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(name).absolute()) if Path(name).is_dir() else name,
        revision=recipe.model.revision,
    )
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    from fsdptrain.model.lora import AdaptedExperts, AdaptedLinear

    with warnings.catch_warnings():  # of what `freeze` has checked, and Conv1D beside Linear
        warnings.simplefilter("ignore")
        try:
            with parameters_on_meta() if targets else contextlib.nullcontext():
                # From the keys of a state dict peft takes exactly these layers; it changes names of `target_modules`.
                keys = dict.fromkeys((f"{layer}.lora_A.weight" for layer in targets), torch.empty(0))
                if targets:
                    inject_adapter_in_model(config, model, NAME, state_dict=keys)
                else:
                    model.peft_config = {NAME: config}
                # The adapters of several tensors of a module are inside one another, in peft's order.
                for tensor in experts:
                    owner, _, key = tensor.rpartition(".")
                    layer = model.get_submodule(owner)
                    wrapped = AdaptedExperts(layer, NAME, key, config, config.r, config.lora_alpha)
                    model.set_submodule(owner, wrapped)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise RecipeError(
                f"adapter.target: peft refuses {type(model).__name__}: {error_summary(error)}; name other layers"
            ) from None
    # Give adapted linear layers a faster forward; DoRA keeps peft's.
    for layer in adapted_layers(model).values():
        if type(layer) is Linear and not layer.lora_variant:
            layer.__class__ = AdaptedLinear
            cast(AdaptedLinear, layer).in_place = recipe.fsdp.recomputation.kind != "selective"
    _set_targets(model, targets, experts, adapter)
    # peft takes every module whose name ends so, also within a word: `norm` is `input_layernorm` too.
    model.peft_config[NAME].modules_to_save = (adapter.modules_to_save if ends == set(whole) else whole) or None


def _set_targets(model: Any, targets: list[str], experts: list[str], adapter: Adapter) -> None:
    """Set what peft's configuration needs so that peft finds the adapted layers again when it opens the adapter.

    Raises RecipeError for DoRA on a layer that peft would only find by its weight.
    """
    config = model.peft_config[NAME]
    by_weight = _taken_for_experts(model, targets)
    if by_weight:
        if adapter.use_dora:
            raise RecipeError(
                f"adapter.use_dora: peft could not open an adapter with DoRA on {by_weight[0]} of "
                f"{type(model).__name__}: remove use_dora, or name other layers in adapter.target"
            )
        config.lora_dropout = 0.0
    # peft computes with `weight + B A` there: the same function, but for dropout, which it cannot apply.
    config.target_parameters = [*(f"{name}.weight" for name in by_weight), *experts] or None
    config.target_modules = set(targets) - set(by_weight)
    if adapter.target != ALL_LINEAR and not experts and not by_weight and not any(map(_is_pattern, adapter.target)):
        # peft takes every module that ends with a name: the recipe's names are enough if these are the same layers.
        ends = tuple(f".{name}" for name in adapter.target)
        if {name for name, _ in model.named_modules() if f".{name}".endswith(ends)} == set(targets):
            config.target_modules = set(adapter.target)


def _taken_for_experts(model: Any, targets: list[str]) -> list[str]:
    """Return the layers that peft does not find by their names in `target_modules`.

    In adapters for deepseek_v3, glm4_moe and others peft reads the words gate_proj, up_proj and down_proj as experts of
    transformers 4, whose weights are one tensor now. Dense MLPs and shared experts have layers of these names too.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    words = {name.rpartition(".")[2] for name in targets}
    kept: set[str] = set()
    for word in words:
        config = LoraConfig(target_modules=[word])
        with contextlib.suppress(ValueError):  # up_proj without gate_proj
            convert_peft_config_for_transformers(config, model, None)
            kept.update(config.target_modules or ())
    return [name for name in targets if name.rpartition(".")[2] not in kept]


def start_adapters(model: Any, plan: Plan) -> None:
    """Set the adapters of a sharded model, whose base has weights: from `adapter.from`, else as peft draws them.

    What is drawn depends on the seed and the parameter's name only, so every world size starts from the same weights.
    Collective with DoRA. Raises RecipeError if the folder, of which `check_adapter_file` has seen the names, has values
    that are not finite.
    """
    folder = plan.recipe.adapter.from_
    if folder is not None:
        for name, tensor in saved_tensors(model, Path(folder)):
            copy_own_rows(model, name, tensor)
        return
    for name, param in model.named_parameters():
        if is_adapter(name):
            whole = torch.zeros(whole_shape(model, name), dtype=param.dtype)
            generator = torch.Generator().manual_seed(seed_of(plan.recipe.seed, name))
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            elif ".lora_embedding_B." in name:
                nn.init.normal_(whole, generator=generator)
            copy_own_rows(model, name, whole)
    for name, layer in adapted_layers(model).items():
        for key, magnitude in layer.lora_magnitude_vector.items():
            weight = layer.base_layer.weight.detach()
            whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).float()
            # A vector of a Linear is a row, of a Conv1D or an Embedding a column.
            norms = torch.linalg.norm(whole, dim=0 if magnitude.fan_in_fan_out else 1)
            copy_own_rows(model, f"{name}.lora_magnitude_vector.{key}.weight", norms)


def check_adapter_file(model: Any, folder: Path) -> None:
    """Raise RecipeError unless a folder that peft has written has just the tensors that are trained of a model."""
    path = folder / ADAPTER_WEIGHTS
    expected = {key: whole_shape(model, name) for name, key in saved_names(model).items()}
    try:
        with safe_open(openable(path), framework="pt") as opened:
            found = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecipeError(
            f"adapter.from: cannot read {path}: {error_summary(error)}; copy the file again, or export the adapter "
            "again"
        ) from None
    if wrong := sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)):
        key = wrong[0]
        raise RecipeError(
            f"adapter.from: {path} does not fit {type(model).__name__}: {key} is {found.get(key, 'missing')}, the "
            f"model needs {expected.get(key, 'no such tensor')}; name the model of this adapter in model.id, or merge "
            "both with peft if its file has copies of the embedding or the head"
        )


def saved_tensors(model: Any, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trained parameters in a folder of peft as (name, values); raises RecipeError if some are not finite."""
    path = folder / ADAPTER_WEIGHTS
    with safe_open(path, framework="pt") as opened:
        for name, key in saved_names(model).items():
            tensor = opened.get_tensor(key)
            if not tensor.isfinite().all():
                raise RecipeError(
                    f"adapter.from: {key} in {path} has values that are not finite: name an adapter that was saved "
                    "before its training diverged"
                )
            yield name, tensor


def saved_names(model: Any) -> dict[str, str]:
    """Return the trained parameters of a model with adapters: name → name in peft's file."""
    from peft import get_peft_model_state_dict

    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    adapters = {name: param for name, param in trained.items() if is_adapter(name)}
    saved = get_peft_model_state_dict(model, state_dict=adapters, adapter_name=NAME, save_embedding_layers=False)
    keys = {id(param): key for key, param in saved.items()}
    return {name: PREFIX + (keys[id(param)] if is_adapter(name) else name) for name, param in trained.items()}


def merged_weight(layer: Any, weight: torch.Tensor, adapter: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight with its adapter, tensors by their names inside a skeleton's `layer`, added in float32."""
    own = _adapted_name(layer, f"base_layer.{getattr(layer, 'parameter_name', 'weight')}")
    twin = copy.deepcopy(layer)  # on the meta device
    for name, tensor in {own: weight, **adapter}.items():
        owner, _, key = name.rpartition(".")
        whole = nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False)
        setattr(twin.get_submodule(owner), key, whole)
    twin.merge(safe_merge=True)
    merged: torch.Tensor = twin.get_parameter(own).detach()
    return merged


def save_config(model: Any, folder: Path) -> None:
    """Write peft's configuration of the adapter into a folder."""
    dataclasses.replace(model.peft_config[NAME], inference_mode=True).save_pretrained(folder)
    path = folder / ADAPTER_CONFIG
    values = json.loads(path.read_text(encoding="utf-8"))
    values["target_modules"] = sorted(values["target_modules"])  # of a set: their order would differ from run to run
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
