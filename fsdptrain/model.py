"""The model without its weights: configuration, a skeleton on the meta device, and its units as data.

Nothing here knows a strategy. A skeleton's parameters are on the meta device and its buffers are real, as the
constructor made them: non-persistent buffers (rotary frequencies) are in no file, and nothing else could fill them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import shutil
import tempfile
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdptrain.errors import NoModel, RecipeError
from fsdptrain.hub import OWN_CODE, hub_errors, in_a_line, read_json, recipe_errors, source
from fsdptrain.ownership import list_assets
from fsdptrain.plan import Plan
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
        if vocab_size is None and "vocab_size" not in overrides:
            raise NoModel("model.config.vocab_size: unknown without the tokenizer; give it to plan without one")
        overrides.setdefault("vocab_size", vocab_size)
    else:
        cannot = f"model.id: cannot read the configuration of {model.id!r}"
        own = own_classes(plan)
        where = {**source(plan, None), "trust_remote_code": bool(own)}
        with recipe_errors(cannot), hub_errors("model.id", str(model.id)):
            known = AutoConfig.from_pretrained(str(model.id), **where)
    _refuse_unknown(overrides, known)
    with recipe_errors("model.config"):
        if kind is not None:
            config = AutoConfig.for_model(kind, **overrides)
        else:
            config = AutoConfig.from_pretrained(str(model.id), **overrides, **where)
            _adopt(plan, own, config)
    _refuse_sizes(config)
    refuse_without_effect(overrides, config)
    if vocab_size is not None and config.vocab_size < vocab_size:
        raise RecipeError(f"model.config.vocab_size: {config.vocab_size}, but the tokenizer has {vocab_size} tokens")
    limit = position_limit(config)
    if limit and plan.recipe.data.seq_len > limit:
        raise RecipeError(
            f"data.seq_len: {plan.recipe.data.seq_len} is beyond the model's {limit} positions: use {limit} or less"
        )
    return config


def position_limit(config: Any) -> int | None:
    """The longest sequence an architecture was made for; None where it has no positions to run out of.

    Rotary positions that are stretched by a factor (yarn and the like) reach that many times as far as they did before.
    """
    limit = next((n for key in ("max_position_embeddings", "max_seq_len") if (n := getattr(config, key, None))), None)
    rope = getattr(config, "rope_parameters", None) or {}
    sets = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]  # some have one for each layer type
    stretched = [
        int(one["original_max_position_embeddings"] * one.get("factor", 1))
        for one in sets
        if one.get("original_max_position_embeddings")
    ]
    no_limit = getattr(config, "alibi", None) or getattr(config, "attn_config", None)  # MPT keeps alibi in there
    return None if no_limit or not isinstance(limit, int) else max([limit, *stretched])


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


def _refuse_sizes(config: Any) -> None:
    for name, limit in LIMITS.items():
        value = getattr(config, name, None)
        for size in value if isinstance(value, (list, tuple)) else [value]:  # some have one for each layer
            if size is not None and not (type(size) is int and 1 <= size <= limit):
                raise RecipeError(f"model.config.{name}: {size!r} is not a whole number from 1 to {limit:,}")


def _refuse_unknown(overrides: dict[str, Any], known: Any) -> None:
    for name in overrides:
        if name in WITHOUT_EFFECT:
            raise RecipeError(f"model.config.{name}: {WITHOUT_EFFECT[name]}")
        if not hasattr(known, name):
            near = get_close_matches(name, known.to_dict(), n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise RecipeError(f"model.config.{name}: {known.model_type} has no such key{hint}")


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
    with _attention_errors(model.attn_implementation), parameters_on_meta():
        made = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),  # it would get the dtype
            dtype=computed,
            attn_implementation=model.attn_implementation,
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


@contextlib.contextmanager
def _attention_errors(kernel: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError) as error:
        reason = str(error).split(". ")[0]
        raise RecipeError(f"model.attn_implementation: {kernel} is not to be had: {reason}; eager always is") from None
    except Exception as error:  # sizes that do not fit together, names of activations that do not exist
        raise RecipeError(f"model.config: no model can be built of it: {in_a_line(error)}") from None


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
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def blocks_of(model: Any) -> list[tuple[str, nn.Module]]:
    """The model's transformer blocks, by the class names that transformers keeps for this purpose.

    Sharded or not: FSDP gives a module a new class that is derived from its own.
    """
    classes = set(model._no_split_modules or ())
    found = [(n, m) for n, m in model.named_modules() if classes & {cls.__name__ for cls in type(m).__mro__}]
    return [(name, module) for name, module in found if _holds_parameters(module)]


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
    units = [unit for unit in units if unit not in split]  # a tied weight has one home: the root
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


def _holds_one_end(model: Any, unit: Unit) -> bool:
    inside = {id(inner) for module in unit.modules for inner in module.modules()}
    return len(inside & {id(model.get_input_embeddings()), id(model.get_output_embeddings())}) == 1


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def save_assets(plan: Plan, config: Any, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write config, generation config and tokenizer: all of a Hugging Face folder but the weights."""
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory(prefix="fsdptrain-") as temporary:
        scratch = Path(temporary)
        if type(model)._auto_class is not None:  # code of its own goes along
            custom_object_save(model, scratch, config=config)
        config.save_pretrained(scratch)
        _save_generation_config(plan, model, scratch)
        tokenizer.save_pretrained(scratch)
        names = [str(path.relative_to(scratch)) for path in scratch.rglob("*") if path.is_file()]
        for name in names:  # one by one: files of others may lie beside ours
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_name(f".{target.name}.tmp")
            shutil.copyfile(scratch / name, aside)
            aside.replace(target)
    list_assets(folder, names)


def _save_generation_config(plan: Plan, model: Any, folder: Path) -> None:
    """The generation config of `model.id`, or the architecture's where it has none or one that cannot be used."""
    model.generation_config.save_pretrained(folder)
    name = plan.recipe.model.id
    if name is not None:
        try:
            found = GenerationConfig.from_pretrained(name, revision=plan.recipe.model.revision or "main")
            found.save_pretrained(folder)
        except OSError:  # many models have none of their own
            pass
        except Exception as error:  # it takes no part in training; and many a one that is shipped contradicts itself
            print(f"generation_config.json of {name} is left out, a plain one is written: {in_a_line(error)}")
