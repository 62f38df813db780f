"""The adapters of a model (LoRA): in its modules, their first weights, and their files, all as peft has them.

Adapters are injected into the skeleton before it is sharded, because peft takes shapes from the weights that it finds.
A linear layer `q_proj` becomes a module with the layer inside: `q_proj.base_layer`, `q_proj.lora_A.default`, …
`without_adapters` restores the plain model for a while, so that files are read into it under their own names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from fsdptrain.config.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fsdptrain.config.schema import Adapter, Recipe
from fsdptrain.errors import RecipeError, error_summary
from fsdptrain.model.init import seed_of
from fsdptrain.model.patches import import_quietly
from fsdptrain.model.skeleton import parameters_on_meta
from fsdptrain.model.units import full_name, token_parameters
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.files import openable

if TYPE_CHECKING:
    from peft import LoraConfig

NAME = "default"  # of the adapter in peft's modules
PREFIX = "base_model.model."  # of every name in peft's files


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's matrix or vector."""
    return bool(re.search(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.", name))


def is_adapter_matrix(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's matrix, not of DoRA's vector of magnitudes."""
    return is_adapter(name) and ".lora_magnitude_vector." not in name


def base_name(name: str) -> str:
    """Return the name that a parameter has without adapters; an adapter's own parameters have none."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def adapted_name(model: Any, name: str) -> str:
    """Return the name, in a model with adapters, of a parameter or buffer of the model without them."""
    owner, _, key = name.rpartition(".")
    while _is_adapted(model.get_submodule(owner)):  # experts may have an adapter for each of their tensors
        owner += ".base_layer"
    return full_name(owner, key)


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the modules of peft that hold a layer and its adapter, by the name of the layer."""
    return {name: module for name, module in model.named_modules() if _is_adapted(module)}


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


def lora_config(recipe: Recipe, convolutions: bool = False) -> LoraConfig:
    """Return peft's configuration, without targets. `convolutions`: layers are transformers' Conv1D, transposed."""
    adapter, model = recipe.adapter, recipe.model
    name = str(model.id)
    config: LoraConfig = import_quietly("peft").LoraConfig(
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=[],
        use_dora=adapter.use_dora,
        use_rslora=adapter.use_rslora,
        fan_in_fan_out=convolutions,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(name).absolute()) if Path(name).is_dir() else name,
        revision=model.revision,
    )
    return config


def inject(model: Any, recipe: Recipe, targets: list[str], experts: list[str], whole: list[str]) -> None:
    """Let peft add the adapters, on the meta device; its weights are set by `start_adapters` or by a checkpoint.

    `targets` are the layers that get one, `experts` the tensors of experts that do, and `whole` the modules that are
    trained as a whole. Raises RecipeError for what peft refuses.
    """
    adapter = recipe.adapter
    ends = {name for name, _ in model.named_modules() if name.endswith(tuple(adapter.modules_to_save))}
    config = lora_config(recipe, any(isinstance(model.get_submodule(name), Conv1D) for name in targets))
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():  # of what `freeze` has checked, and Conv1D beside Linear
        warnings.simplefilter("ignore")
        try:
            with parameters_on_meta() if targets else contextlib.nullcontext():
                # From the keys of a state dict peft takes exactly these layers; it changes names of `target_modules`.
                keys = dict.fromkeys((f"{name}.lora_A.weight" for name in targets), torch.empty(0))
                if targets:
                    inject_adapter_in_model(config, model, NAME, state_dict=keys)
                else:
                    model.peft_config = {NAME: config}
                _wrap_experts(model, config, experts)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise RecipeError(
                f"adapter.target: peft refuses {type(model).__name__}: {error_summary(error)}; name other layers"
            ) from None
    _use_one_function(model, in_place=recipe.fsdp.recomputation.kind != "selective")
    _set_targets(model, targets, experts, adapter)
    # peft takes every module whose name ends so, also within a word: `norm` is `input_layernorm` too.
    model.peft_config[NAME].modules_to_save = (adapter.modules_to_save if ends == set(whole) else whole) or None


def _wrap_experts(model: Any, config: LoraConfig, tensors: list[str]) -> None:
    """Add an adapter to each of these tensors, those of a module inside one another, in peft's order."""
    from fsdptrain.model.lora import AdaptedExperts

    for tensor in tensors:
        owner, _, key = tensor.rpartition(".")
        parent, _, child = owner.rpartition(".")
        home = model.get_submodule(parent)
        setattr(home, child, AdaptedExperts(getattr(home, child), NAME, key, config, config.r, config.lora_alpha))


def _use_one_function(model: Any, in_place: bool) -> None:
    """Give the adapted linear layers of a skeleton a faster forward; DoRA keeps peft's.

    `in_place` is described in `AdaptedLinear`.
    """
    from peft.tuners.lora import Linear

    from fsdptrain.model.lora import AdaptedLinear

    for layer in adapted_layers(model).values():
        if type(layer) is Linear and not layer.lora_variant:
            layer.__class__ = AdaptedLinear
            cast(AdaptedLinear, layer).in_place = in_place


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
    plain = adapter.target != "all-linear" and not experts and not any(map(is_pattern, adapter.target))
    exact = plain and not by_weight and not _more_than(model, adapter.target, targets)
    config.target_modules = set(adapter.target if exact else targets) - set(by_weight)


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


def is_pattern(name: str) -> bool:
    """Return whether a name in a recipe is a pattern, which must match a whole name."""
    return bool(set("*?[") & set(name))


def _more_than(model: Any, names: list[str], targets: list[str]) -> bool:
    """Return whether peft, which takes every module that ends with a name, would adapt other layers than `targets`."""
    matched = {n for n, _ in model.named_modules() if any(n == name or n.endswith(f".{name}") for name in names)}
    return matched != set(targets)


def start_adapters(model: Any, plan: Plan, copy_own_rows: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Set the adapters of a sharded model, whose base has weights: from `adapter.from`, else as peft draws them.

    What is drawn depends on the seed and the parameter's name only, so every world size starts from the same weights.
    Collective with DoRA. Raises RecipeError if the folder has other tensors, or values that are not finite.
    """
    folder = plan.recipe.adapter.from_
    if folder is not None:
        _read_adapter(model, Path(folder), copy_own_rows)
        return
    for name, param in model.named_parameters():
        if is_adapter(name):
            copy_own_rows(param, _first_value(name, param, plan.recipe.seed))
    for layer in adapted_layers(model).values():
        for magnitude in layer.lora_magnitude_vector.values():
            weight = layer.base_layer.weight.detach()
            whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).float()
            # A vector of a Linear is a row, of a Conv1D or an Embedding a column.
            copy_own_rows(magnitude.weight, torch.linalg.norm(whole, dim=0 if magnitude.fan_in_fan_out else 1))


def _first_value(name: str, param: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the value that an adapter's parameter starts with, whole and on the CPU."""
    whole = torch.zeros(param.shape, dtype=param.dtype)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        nn.init.normal_(whole, generator=generator)
    return whole


def check_adapter_file(model: Any, folder: Path) -> None:
    """Raise RecipeError unless a folder that peft has written has just the tensors that are trained of a model."""
    path = folder / ADAPTER_WEIGHTS
    expected = {key: tuple(model.get_parameter(name).shape) for name, key in saved_names(model).items()}
    try:
        with safe_open(openable(path), framework="pt") as opened:
            found = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecipeError(
            f"adapter.from: cannot read {path}: {error_summary(error)}; copy the file again, or export the adapter "
            "again"
        ) from None
    for key, name in copies_of_base(model, found.keys() - expected.keys()).items():
        expected[key] = tuple(model.get_parameter(adapted_name(model, name)).shape)
        if found[key] != expected[key]:
            raise RecipeError(
                f"adapter.from: {path} has a copy of the base's {name} of shape {found[key]}, and the model needs "
                f"{expected[key]}, so its base had other tokens: merge both with peft, and name the result in model.id"
            )
    if wrong := sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)):
        key = wrong[0]
        raise RecipeError(
            f"adapter.from: {path} does not fit {type(model).__name__}: {key} is {found.get(key, 'missing')}, the "
            f"model needs {expected.get(key, 'no such tensor')}; name the model of this adapter in model.id"
        )


def copies_of_base(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return the tensors of an adapter's file that peft has copied from its base: key → name in the model without it.

    It saves the embedding, and the head, if they have an adapter or its caller has asked for it.
    """
    names = {base_name(name) for name in token_parameters(model) if not is_adapter(name)}
    return {key: name for key in sorted(keys) if (name := base_name(key.removeprefix(PREFIX))) in names}


def _read_adapter(model: Any, folder: Path, copy_own_rows: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Set adapters, and modules that are trained as a whole, from a folder that peft has written."""
    check_adapter_file(model, folder)
    for name, tensor in _saved_tensors(model, folder):
        copy_own_rows(model.get_parameter(name), tensor)


def check_adapter_values(model: Any, folder: Path) -> None:
    """Raise RecipeError if a file that `check_adapter_file` accepts has values that are not finite."""
    for _ in _saved_tensors(model, folder):
        pass


def _saved_tensors(model: Any, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name of a trained parameter, its values) from a folder that peft has written; raises RecipeError."""
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
    """Return the weight of an adapted layer with its adapter added, computed by peft in float32.

    `layer` is the layer of a skeleton; `adapter` has its adapter's tensors by their names inside the layer.
    """
    home = "base_layer"
    while _is_adapted(layer.get_submodule(home)):
        home += ".base_layer"
    own = f"{home}.{getattr(layer, 'parameter_name', 'weight')}"
    places = {own: weight, **adapter}
    before = {name: layer.get_parameter(name) for name in places}
    try:
        for name, tensor in places.items():
            _set_parameter(layer, name, nn.Parameter(tensor.to(torch.float32, copy=True), requires_grad=False))
        layer.merge(safe_merge=True)
        return layer.get_parameter(own).detach()
    finally:
        layer.merged_adapters.clear()
        for name, param in before.items():
            _set_parameter(layer, name, param)


def _set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    owner, _, key = name.rpartition(".")
    setattr(module.get_submodule(owner), key, param)


def save_config(model: Any, folder: Path) -> None:
    """Write peft's configuration of the adapter into a folder."""
    dataclasses.replace(model.peft_config[NAME], inference_mode=True).save_pretrained(folder)
    path = folder / ADAPTER_CONFIG
    values = json.loads(path.read_text(encoding="utf-8"))
    values["target_modules"] = sorted(values["target_modules"])  # of a set: their order would differ from run to run
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
