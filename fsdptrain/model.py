"""The model without its weights: configuration, a skeleton on the meta device, and its units as data.

Nothing here knows a strategy. A skeleton's parameters are on the meta device and its buffers are real, as the
constructor made them: non-persistent buffers (rotary frequencies) are in no file, and nothing else could fill them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.integrations import hub_kernels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_flash_attn_2_available

from fsdptrain.errors import NoModel, Problem, RecipeError
from fsdptrain.hub import OWN_CODE, hub_errors, in_a_line, read_json, recipe_errors, source
from fsdptrain.plan import Plan, varied
from fsdptrain.schema import Model

# The largest sizes that a model is built with, each some ten times what the largest models have: a damaged or hostile
# configuration would ask for all the memory there is before anybody could count parameters.
LIMITS = {
    "vocab_size": 2**22, "hidden_size": 2**18, "intermediate_size": 2**21, "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12, "num_key_value_heads": 2**12, "head_dim": 2**14, "max_position_embeddings": 2**28,
    "num_experts": 2**14, "num_local_experts": 2**14,
}  # fmt: skip
NO_AUXILIARY = "the auxiliary loss of a mixture's router is not computed here; remove the key"
NO_CLASSES = "it is about classifiers and has no effect on a language model; remove the key"
WITHOUT_EFFECT = {  # keys of a configuration that nothing reads here → the way out
    "dtype": "use model.dtype (master weights) or export.dtype (exported weights)",
    "torch_dtype": "use model.dtype (master weights) or export.dtype (exported weights)",
    "attn_implementation": "use model.attn_implementation",
    "_attn_implementation": "use model.attn_implementation",
    **dict.fromkeys(("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef", "moe_loss_weight"), NO_AUXILIARY),
    **dict.fromkeys(("num_labels", "id2label", "label2id", "problem_type"), NO_CLASSES),
    **dict.fromkeys(
        ("output_hidden_states", "output_attentions", "return_dict"), "it has no effect on training; remove the key"
    ),
}
OLD_ROPE = ("rope_theta", "rope_scaling")  # of `config.json` before transformers 5
LARGEST_BUFFER = 2**28  # elements


@dataclasses.dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered, freed and reduced together. Units are listed in forward order."""

    name: str
    modules: list[nn.Module]


def load_config(plan: Plan, vocab_size: int | None) -> Any:
    """The architecture: `model.config` where it is a whole one, else that of `model.id` with its overrides.

    `vocab_size` is the tokenizer's, taken where the recipe gives none; a smaller one is refused, for its tokens would
    have no embedding. None: a dry run could not load the tokenizer. Raises RecipeError for keys the architecture does
    not have, and NoModel when there is no telling how large the vocabulary is.
    """
    model = plan.recipe.model
    overrides = dict(model.config)
    kind = overrides.pop("model_type", None)
    if kind is not None:
        with recipe_errors(f"model.config: no architecture {kind!r}"):
            known = AutoConfig.for_model(kind)
        overrides = translated(overrides, known)
        text = _text_of(overrides, known)
        if vocab_size is None and "vocab_size" not in text:
            raise NoModel("model.config.vocab_size: unknown without the tokenizer; give it to plan without one")
        text.setdefault("vocab_size", vocab_size)
        with recipe_errors("model.config"):
            config = AutoConfig.for_model(kind, **overrides)
    else:
        own = own_classes(plan)
        where = {**source(plan, None), "trust_remote_code": bool(own)}
        cannot = f"model.id: cannot read the configuration of {model.id!r}"
        with recipe_errors(cannot), hub_errors("model.id", str(model.id)):
            known = AutoConfig.from_pretrained(str(model.id), **where)
        overrides = translated(overrides, known)
        with recipe_errors("model.config"):
            config = type(known).from_dict(overridden(known, overrides)) if overrides else known
            _adopt(plan, own, config)
    text_config = config.get_text_config()
    if not plan.own_tokenizer and "pad_token_id" not in overrides:
        # It is a token of another vocabulary, whose embedding would get no gradient, or it lies beyond this one.
        for part in (config, text_config):
            set_token(part, "pad_token_id", None)
    for part in {id(part): part for part in (config, text_config)}.values():
        _refuse_sizes(part)
    refuse_without_effect(overrides, config)
    limit, problems = position_limit(text_config), []
    if vocab_size is not None and text_config.vocab_size < vocab_size:
        problems.append(f"model.config.vocab_size: {text_config.vocab_size}, but the tokenizer has {vocab_size} tokens")
    if limit and plan.recipe.data.seq_len > limit:
        problems.append(
            f"data.seq_len: {plan.recipe.data.seq_len} is beyond the model's {limit} positions: use {limit} or less"
        )
    if problems:
        raise RecipeError([Problem(problem) for problem in problems])
    return config


def translated(overrides: dict[str, Any], known: Any, field: str = "model.config") -> dict[str, Any]:
    """Return overrides of the configuration `known` under the names that this version of transformers has for them.

    Keys of older files (`rope_theta`, `rope_scaling`) mean what they mean there. Raises RecipeError for a key that the
    architecture does not have.
    """
    found: dict[str, Any] = {}
    for name, value in overrides.items():
        inner = getattr(known, name, None)
        if name in WITHOUT_EFFECT:
            raise RecipeError(f"{field}.{name}: {WITHOUT_EFFECT[name]}")
        if name in OLD_ROPE and name not in vars(known) and hasattr(known, "rope_parameters"):
            continue
        if not hasattr(known, name):
            near = get_close_matches(name, known.to_dict(), n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise RecipeError(f"{field}.{name}: {known.model_type} has no such key{hint}")
        if isinstance(inner, PreTrainedConfig) and isinstance(value, dict):
            value = translated(value, inner, f"{field}.{name}")
        found[known.attribute_map.get(name, name)] = value
    old = {name: value for name, value in overrides.items() if name in OLD_ROPE and name not in found}
    if old or isinstance(found.get("rope_parameters"), dict):
        found["rope_parameters"] = _rope_parameters(old, found.get("rope_parameters"), known, field)
    return found


def _rope_parameters(old: dict[str, Any], new: dict[str, Any] | None, known: Any, field: str) -> dict[str, Any]:
    """The rotary parameters that older keys, or the new one, ask for; those of `known` where they say nothing."""
    there = known.rope_parameters or {}
    if old and new is not None:
        raise RecipeError(f"{field}.{next(iter(old))}: rope_parameters is there as well: keep one of the two")
    if any(isinstance(one, dict) for one in there.values()):
        if old:
            raise RecipeError(
                f"{field}.{next(iter(old))}: {known.model_type} has rotary parameters for each type of layer: write "
                f"rope_parameters: {there}"
            )
        return new or {}
    asked = dict(new or old.get("rope_scaling") or {})
    if "type" in asked:
        asked.setdefault("rope_type", asked["type"])
    kept = {name: there[name] for name in ("rope_theta", "partial_rotary_factor") if name in there}
    if "rope_scaling" not in old and new is None:
        kept = there
    theta = {"rope_theta": old["rope_theta"]} if "rope_theta" in old else {}
    return {**kept, **asked, **theta}


def overridden(known: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration `known` as a dict with `overrides` in it, inner configurations included.

    With fewer layers, lists with an entry for each layer are cut; with more they are left to the architecture.
    """
    whole = known.to_dict()
    name = known.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    before, layers = whole.get(name), overrides.get(name, whole.get(name))
    for key in _lists_of_layers(known, name) - overrides.keys() if layers != before else ():
        whole[key] = whole[key][:layers] if layers < before else None
    for key, value in overrides.items():
        inner = getattr(known, key, None)
        nested = isinstance(inner, PreTrainedConfig) and isinstance(value, dict)
        whole[key] = overridden(inner, value) if nested else value
    return whole


def _lists_of_layers(known: Any, name: str) -> set[str]:
    """The keys that hold a list with an entry for each layer: those that by default are as long as there are layers."""
    default = [type(known)(**{name: layers}).to_dict() for layers in (12, 13)]
    return {
        key for key, value in known.to_dict().items()
        if isinstance(value, list) and len(value) == getattr(known, name)
        and all(isinstance(d.get(key), list) and len(d[key]) == d[name] for d in default)
    }  # fmt: skip


def _text_of(overrides: dict[str, Any], known: Any) -> dict[str, Any]:
    """The overrides of the language model: all of them, or those of the configuration inside `known` that is its."""
    inner = known.get_text_config()
    name = next((name for name, value in vars(known).items() if value is inner), None)
    if name is None:
        return overrides
    overrides[name] = dict(overrides.get(name) or {})
    found: dict[str, Any] = overrides[name]
    return found


def position_limit(config: Any) -> int | None:
    """The longest sequence an architecture was made for; None where it has no positions to run out of.

    Rotary positions that are stretched by a factor (yarn and the like) reach that many times as far as they did before;
    dynamic ones do not: beyond the limit their frequencies depend on the longest sequence so far.
    """
    limit = next((n for key in ("max_position_embeddings", "max_seq_len") if (n := getattr(config, key, None))), None)
    stretched = [
        int(one["original_max_position_embeddings"] * (one.get("factor") or 1))
        for one in rope_sets(config)
        if one.get("original_max_position_embeddings") and one.get("rope_type") != "dynamic"
    ]
    no_limit = getattr(config, "alibi", None) or getattr(config, "attn_config", None)  # MPT keeps alibi in there
    return None if no_limit or not isinstance(limit, int) else max([limit, *stretched])


def rope_sets(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a language model's configuration: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    inner = [one for one in rope.values() if isinstance(one, dict)]
    return inner or [rope]


def long_positions(config: Any, seq_len: int) -> int | None:
    """Return the position from which on longrope takes other frequencies for a whole micro-batch, if `seq_len` has it.

    There padding must not have higher positions than documents do.
    """
    limits = [
        int(one["original_max_position_embeddings"])
        for one in rope_sets(config.get_text_config())
        if one.get("rope_type") == "longrope"
    ]
    return min((limit for limit in limits if limit < seq_len), default=None)


def own_classes(plan: Plan) -> dict[str, str]:
    """The classes of its own that `model.id` asks for (`auto_map`), when they are to be run; nothing is run here.

    Raises RecipeError when it cannot do without them and the command line does not allow them, or when they are to come
    from another repository, which no revision pins.
    """
    written = read_json(plan, "config.json")
    named = written.get("auto_map") or {}
    if not isinstance(named, dict):
        raise RecipeError(f"model.id: auto_map in config.json of {plan.recipe.model.id} is not a mapping")
    classes = written.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    known = written.get("model_type") in CONFIG_MAPPING_NAMES and (
        "AutoModelForCausalLM" not in named or first in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
    if known or not named:
        return {}  # transformers has this architecture: its own code is as good
    if not plan.trust_remote_code:
        raise RecipeError(f"model.id: {plan.recipe.model.id} {OWN_CODE}")
    elsewhere = [name for name in named.values() if "--" in str(name)]
    if elsewhere:
        raise RecipeError(f"model.id: {elsewhere[0]} is code of another repository, which model.revision does not pin")
    return named


def _adopt(plan: Plan, own: dict[str, str], config: Any) -> None:
    """Make the model's own classes those of its kind of configuration, in this process; runs their code.

    From here on everything that builds or reads this model, the export too, gets them without asking again.
    """
    if "AutoModelForCausalLM" in own:
        made: Any = get_class_from_dynamic_module(
            own["AutoModelForCausalLM"], str(plan.recipe.model.id), revision=plan.recipe.model.revision
        )
        made.register_for_auto_class("AutoModelForCausalLM")
        AutoModelForCausalLM.register(type(config), made, exist_ok=True)
    if "AutoConfig" in own:
        AutoConfig.register(config.model_type, type(config), exist_ok=True)


def set_token(config: Any, name: str, value: int | None) -> None:
    """Set a special token; None leaves a number where the architecture must have one."""
    with contextlib.suppress(StrictDataclassFieldValidationError):
        setattr(config, name, value)


def layer_values(config: Any, name: str) -> list[Any]:
    """Return what a configuration has for a key: a list of one value, or of one for each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # a key that differs between layers
        value = [getattr(layer, name) for layer in config.per_layer_config]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _refuse_sizes(config: Any) -> None:
    for name, limit in LIMITS.items():
        for size in layer_values(config, name):
            if size is not None and not (type(size) is int and 1 <= size <= limit):
                raise RecipeError(
                    f"model.config.{name}: {size!r} is not a whole number from 1 to {limit:,} ({config.model_type})"
                )


def refuse_without_effect(overrides: dict[str, Any], config: Any) -> None:
    """Raise RecipeError for a window that is switched off, and for an auxiliary loss that would not be added.

    That of a mixture is a product of two means over the global batch, which no micro-batch knows.
    """
    text = config.get_text_config()
    if overrides.get("sliding_window") and getattr(text, "use_sliding_window", None) is False:
        raise RecipeError("model.config.sliding_window: it has no effect without use_sliding_window: true")
    if getattr(text, "output_router_logits", False):
        raise RecipeError(
            f"model.config.output_router_logits: the auxiliary loss of {config.model_type}'s router is not computed "
            "here; set output_router_logits: false to train on the tokens' loss alone"
        )


def skeleton(config: Any, model: Model, compute: str | None = None) -> Any:
    """The model with parameters on the meta device in the master dtype, and real buffers on the CPU.

    `compute` is the dtype that its parameters are cast to for compute, by default the master dtype: buffers that are in
    no file are as transformers makes them in a model of that dtype, and `float32_names` lists what transformers keeps
    in float32 there, by the architecture's lists or by its constructors. That has float32 as its master dtype, too.
    Raises RecipeError for a configuration of which no model can be built.
    """
    master, computed = getattr(torch, model.dtype), getattr(torch, compute or model.dtype)
    kernel = model.attn_implementation
    with _building_errors(kernel), parameters_on_meta():
        made = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # it would get the dtype
            dtype=computed,
            attn_implementation=None if kernel == "auto" else kernel,  # None: sdpa if the class has it, else eager
            trust_remote_code=False,  # classes that are trusted have been registered by `load_config`
        )
        if computed != torch.float32:  # as `from_pretrained` does: buffers are computed in float32, and then cast
            for module in made.modules():
                module._is_hf_initialized = False
            made.initialize_weights()
    state = {name: tensor for name, tensor in saved_state(made).items() if tensor.is_floating_point()}
    explicit = {name for name, tensor in state.items() if tensor.dtype == torch.float32 != computed}
    made.float32_names = explicit | _listed_as_float32(made, computed)
    wide = made.float32_names | _listed_as_float32(made, master)
    stored = {
        id(tensor): _like(tensor, torch.float32 if name in wide else master)
        for name, tensor in state.items()
        if tensor.dtype != (torch.float32 if name in wide else master)
    }
    for module in made.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({key: stored[id(tensor)] for key, tensor in tensors.items() if id(tensor) in stored})
    made.tie_weights()
    return made


def in_dtype(model: Any, dtype: str) -> Any:
    """A skeleton of the same architecture as transformers would hold it in `dtype`, with what it keeps in float32."""
    return skeleton(model.config, Model(dtype=dtype, attn_implementation=model.config._attn_implementation))  # type: ignore[arg-type]


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """The same parameter or buffer in another dtype."""
    cast = tensor.detach().to(dtype)
    return nn.Parameter(cast, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cast


def _listed_as_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """The state that `from_pretrained` loads in float32 when it is asked for `dtype`."""
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    return {name for name in saved_state(model) if any(pattern.search(name) for pattern in patterns)}


def settle_attention(plan: Plan, config: Any) -> tuple[Plan, Any]:
    """Return the plan with `attn_implementation: auto` replaced by a kernel, and the skeleton that has it.

    The only place that decides: the best one that the architecture, this machine and the recipe's batches allow.
    """
    model = plan.recipe.model
    if model.attn_implementation != "auto":
        return plan, skeleton(config, model)
    if _flash_is_possible(plan):
        flash = varied(plan, {"model.attn_implementation": "flash_attention_2"})
        with contextlib.suppress(RecipeError):  # the architecture does not support it
            return flash, skeleton(config, flash.recipe.model)
    bare = skeleton(config, model)
    kernels = {part._attn_implementation for part in (bare.config, bare.config.get_text_config())}
    kernel = kernels.pop() if len(kernels) == 1 else "eager"  # one that the whole model has
    return varied(plan, {"model.attn_implementation": kernel}), bare


def _flash_is_possible(plan: Plan) -> bool:
    """Whether flash_attention_2 is installed, and takes this recipe's dtype and its packed documents."""
    return flash_fits(plan) and bool(is_flash_attn_2_available())


def flash_fits(plan: Plan) -> bool:
    """Return whether flash_attention_2 takes this recipe's device, dtype and packed documents, installed or not."""
    half = plan.recipe.fsdp.mixed_precision.param_dtype == "bfloat16"
    return plan.topology.device == "cuda" and half and one_row_if_packed(plan)


def one_row_if_packed(plan: Plan) -> bool:
    """Return whether no micro-batch has several rows of packed documents: transformers refuses them."""
    return plan.recipe.data.packing == "none" or plan.recipe.train.micro_batch_size == 1


@contextlib.contextmanager
def _building_errors(kernel: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # sizes that do not fit together, names of activations that do not exist, no such kernel
        words = in_a_line(error)
        if kernel != "auto" and re.search("attention|flash|flex|sdpa", words, re.IGNORECASE):
            reason = words.split(". ")[0]
            raise RecipeError(f"model.attn_implementation: {kernel} is not available: {reason}; use auto") from None
        raise RecipeError(f"model.config: no model can be built of it: {words}") from None


@contextlib.contextmanager
def parameters_on_meta(but: type[nn.Module] | None = None) -> Iterator[None]:
    """Inside, every parameter a module registers goes to the meta device at once; buffers stay as they are.

    Parameters of modules of the class `but` stay real.
    """
    register = nn.Module.register_parameter

    def register_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta and type(self) is not but:
            self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register_meta  # type: ignore[method-assign]
    try:
        with contextlib.nullcontext() if but else _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def use_torch_operators() -> None:
    """Let state space models and linear attention run transformers' own torch code from now on, in this process.

    Where causal_conv1d, fla and mamba_ssm are installed, transformers calls them on any device, but they need a GPU. It
    makes one exception: while a model is exported.
    """
    hub_kernels.is_torchdynamo_exporting = lambda: True


@contextlib.contextmanager
def torch_operators() -> Iterator[None]:
    """Use them inside only."""
    before = hub_kernels.is_torchdynamo_exporting
    use_torch_operators()
    try:
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = before


class _LargeOnMeta(TorchFunctionMode):
    """Inside, what is too large to be a buffer is made on the meta device: all experts of a layer may be 30 GB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, a factory of large tensors on the meta device."""
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn):
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() > LARGEST_BUFFER:
                return made
        return func(*args, **kwargs)


def blocks_of(model: Any) -> list[tuple[str, nn.Module]]:
    """The model's transformer blocks, by the class names that transformers keeps for this purpose.

    Sharded or not: FSDP gives a module a new class that is derived from its own. Of one inside another (mamba names its
    blocks and their mixers) only the outer one is taken.
    """
    classes = set(model._no_split_modules or ())
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():  # an outer module comes first, and those inside it at once
        inside = found and name.startswith(f"{found[-1][0]}.")
        if not inside and classes & {cls.__name__ for cls in type(module).__mro__} and _holds_parameters(module):
            found.append((name, module))
    return found


def saved_state(model: Any) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers, by name."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}


def units_of(model: Any, wrap: Any) -> list[Unit]:
    """The units of a skeleton in forward order; what no unit claims belongs to the root.

    `auto`: the blocks; the embedding, and what follows the blocks with the head, unless the two are tied: tied weights
    stay together in the root. A list names classes; `{min_params: N}` takes the innermost modules of that size.
    Raises RecipeError when nothing matches, with the classes the model has.
    """
    if isinstance(wrap, dict):
        units = _units_by_size(model, wrap["min_params"])
    elif isinstance(wrap, list):
        units = _units_by_class(model, wrap)
    else:
        units = [Unit(name, [module]) for name, module in blocks_of(model)]
        if units and not tied(model):
            units = _with_ends(model, units)
    split = [unit for unit in units if tied(model) and _holds_one_end(model, unit)]
    if split and isinstance(wrap, list):
        raise RecipeError(f"fsdp.wrap: {split[0].name} holds only one of the tied embedding and head: leave it out")
    shared = _sharing(units)
    if shared and isinstance(wrap, list):
        names = f"{shared[0].name} and {shared[1].name}"
        raise RecipeError(f"fsdp.wrap: {names} of {type(model).__name__} share weights: leave their class out")
    units = [unit for unit in units if unit not in split + shared]  # a tied weight has one home: the root
    if not units:
        classes = sorted({type(m).__name__ for m in model.modules() if _holds_parameters(m)} - {type(model).__name__})
        raise RecipeError(f"fsdp.wrap: {wrap!r} matches nothing in {type(model).__name__}; it has {', '.join(classes)}")
    return units


def tied(model: Any) -> bool:
    """Whether the head shares its weight with the embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _with_ends(model: Any, blocks: list[Unit]) -> list[Unit]:
    """Blocks, with the embedding in front and [what follows the blocks, head] behind."""
    base = model.base_model
    if base is model:  # llama4_text has no base model: take what the last block's list is in
        base = model.get_submodule(blocks[-1].name.rpartition(".")[0].rpartition(".")[0])
    inside = {id(m) for unit in blocks for m in unit.modules}
    children = list(base.children())
    last = max((i for i, c in enumerate(children) if any(id(m) in inside for m in c.modules())), default=-1)
    after = [child for child in children[last + 1 :] if _holds_parameters(child)]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding in after:
        return blocks
    return [Unit("embedding", [embedding]), *blocks, Unit("head", [*after, head])]


def _units_by_class(model: Any, names: list[str]) -> list[Unit]:
    missing = set(names) - {type(module).__name__ for module in model.modules()}
    if missing:
        return []
    found = [(n, m) for n, m in model.named_modules() if type(m).__name__ in names and m is not model]
    for outer, (name, module) in pairwise(found):  # the first inside a module follows it at once
        if name.startswith(f"{outer[0]}."):
            kinds = f"{type(module).__name__} lies inside {type(outer[1]).__name__}"
            raise RecipeError(f"fsdp.wrap: {kinds}: name one of the two")
    return [Unit(name, [module]) for name, module in found]


def _units_by_size(model: Any, size: int) -> list[Unit]:
    """The innermost modules that hold at least `size` parameters not already in a unit inside them."""
    units: list[Unit] = []

    def visit(name: str, module: nn.Module) -> int:
        left = sum(visit(f"{name}.{n}" if name else n, child) for n, child in module.named_children())
        left += sum(p.numel() for p in module.parameters(recurse=False))
        if left >= size and module is not model and not isinstance(module, nn.ModuleList):
            units.append(Unit(name, [module]))
            return 0
        return left

    visit("", model)
    return units


def _sharing(units: list[Unit]) -> list[Unit]:
    """The units that hold weights of another one (zamba's blocks share an attention layer)."""
    holders: dict[int, list[Unit]] = {}
    for unit in units:
        for param in {id(param) for module in unit.modules for param in module.parameters()}:
            holders.setdefault(param, []).append(unit)
    shared = [unit for several in holders.values() if len(several) > 1 for unit in several]
    return [unit for unit in units if unit in shared]


def _holds_one_end(model: Any, unit: Unit) -> bool:
    inside = {id(inner) for module in unit.modules for inner in module.modules()}
    return len(inside & {id(model.get_input_embeddings()), id(model.get_output_embeddings())}) == 1


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
