"""The architecture's configuration: read, with the recipe's overrides, checked; and as an export has it.

Configuration, generation configuration and tokenizer of an export are made consistent. The tokenizer's special tokens
are used: with the defaults of an architecture (Llama's end token is 2) and another tokenizer, generation would stop at
the wrong token, or never.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.dynamic_module_utils import (
    TRANSFORMERS_DYNAMIC_MODULE_NAME,
    custom_object_save,
    get_class_from_dynamic_module,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdptrain.config.mixture import prompt_source
from fsdptrain.data.hub import hub_errors, model_revision, read_json, recipe_errors
from fsdptrain.data.tokenizer import OWN_CLASSES
from fsdptrain.errors import CUSTOM_CODE, NoModel, Problem, RecipeError, error_summary
from fsdptrain.plan.plan import Plan, unpinned_code, varied
from fsdptrain.run_folder.files import scratch_folder
from fsdptrain.run_folder.ownership import install_assets

# The largest sizes that a model is built with, about ten times those of the largest models: a damaged or hostile
# configuration could use all memory before its parameters are counted.
LIMITS = {
    "vocab_size": 2**22, "hidden_size": 2**18, "intermediate_size": 2**21, "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12, "num_key_value_heads": 2**12, "head_dim": 2**14, "max_position_embeddings": 2**28,
    "num_experts": 2**14, "num_local_experts": 2**14,
}  # fmt: skip

WITHOUT_EFFECT = {  # keys of a configuration that have no effect on training → what to do instead
    **dict.fromkeys(("dtype", "torch_dtype"), "use model.dtype (master weights) or export.dtype (exported weights)"),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), "use model.attn_implementation"),
    **dict.fromkeys(
        ("router_z_loss_coef", "aux_loss_coef", "moe_loss_weight"),
        "this auxiliary loss of a mixture's router is not computed; remove the key",
    ),
    **dict.fromkeys(
        ("num_labels", "id2label", "label2id", "problem_type", "output_hidden_states", "output_attentions",
         "return_dict"),
        "it has no effect on training; remove the key",
    ),
}  # fmt: skip

# Keys whose values decide nothing about the steps after the first. `pad_token_id` does: its embedding gets no gradient.
NOT_COMPARED = {
    *WITHOUT_EFFECT, "architectures", "transformers_version", "use_cache", "initializer_range", "_name_or_path",
    "bos_token_id", "eos_token_id", "auto_map", "tokenizer_class",
}  # fmt: skip

OLD_ROPE = ("rope_theta", "rope_scaling")  # of `config.json` before transformers 5

TIES = "tie_word_embeddings"

# Keys with the number of layers for multi-token prediction, which transformers does not build and servers look for.
MTP_LAYERS = re.compile(r"num_nextn_predict_layers|num_mtp_(layers|modules)|mtp_num_(hidden_)?layers")


def _set_special_token(config: Any, name: str, value: int | None) -> None:
    """Set a special token; None changes nothing where the architecture requires a number."""
    with contextlib.suppress(StrictDataclassFieldValidationError):
        setattr(config, name, value)


def config_parts(config: Any) -> list[Any]:
    """Return the configuration, and the language model's inside it if there is one: both name special tokens."""
    text = config.get_text_config()
    return [text] if text is config else [config, text]


def layer_values(config: Any, name: str) -> list[Any]:
    """Return the values of a configuration's key: a list of one, or of one for each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # a key that differs between layers
        value = [getattr(layer, name) for layer in config.per_layer_config]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def load_config(plan: Plan, vocab_size: int | None) -> PreTrainedConfig:
    """Return the configuration of `model.config` if it has a `model_type`, else that of `model.id` with its overrides.

    `vocab_size` is the tokenizer's, or None if a dry run could not load it. It is the default of the vocabulary size in
    `model.config`, which must not be smaller; that of `model.id` grows by `model.add_tokens` if it has no room for
    them. Raises RecipeError for keys that the architecture does not have, and NoModel if the size of the vocabulary is
    unknown.
    """
    # Read the configuration, under the names that this version of transformers has for its keys.
    model = plan.recipe.model
    overrides = dict(model.config)
    kind = overrides.pop("model_type", None)
    if kind is not None:
        with recipe_errors(f"model.config: no architecture {kind!r}"):
            known = AutoConfig.for_model(kind)
        overrides = _translate_overrides(overrides, known)
        text = _text_overrides(overrides, known)
        if vocab_size is None and "vocab_size" not in text:
            raise NoModel("model.config.vocab_size: unknown without the tokenizer; set it to plan without one")
        text.setdefault("vocab_size", vocab_size)
        with recipe_errors("model.config"):
            config = known = AutoConfig.for_model(kind, **overrides)
    else:
        known = read_config(str(model.id), model.revision, plan.trust_remote_code)
        if plan.pretrained and getattr(known, "quantization_config", None):
            raise RecipeError(
                f"model.id: the weights of {model.id} are stored quantised, which cannot be read: name the model that "
                "they were made from; adapter.kind: qlora quantises weights while it reads them"
            )
        overrides = _translate_overrides(overrides, known)
        with recipe_errors("model.config"):
            config = type(known).from_dict(_apply_overrides(known, overrides)) if overrides else known
    # Layers for multi-token prediction are in the files, behind all of the decoder layers there.
    depth, of_files = (layer_values(each.get_text_config(), "num_hidden_layers") for each in (config, known))
    if not plan.pretrained or depth != of_files:
        for name, value in _text_overrides({**overrides}, config).items():
            if MTP_LAYERS.fullmatch(name) and value:
                raise RecipeError(
                    f"model.config.{name}: layers for multi-token prediction are never trained, only copied from the "
                    "files of a model with all of its layers: remove the key"
                )
        announce_no_mtp(config)
    # Remove the padding token of another vocabulary: its embedding would get no gradient, or does not exist.
    if not plan.own_tokenizer and "pad_token_id" not in overrides:
        for part in config_parts(config):
            _set_special_token(part, "pad_token_id", None)
    _check_config(plan, config, overrides, vocab_size)
    return config


def _check_config(plan: Plan, config: Any, overrides: dict[str, Any], vocab_size: int | None) -> None:
    """Raise RecipeError if no model can be built, the recipe is beyond its limits, or keys have no effect."""
    for part in config_parts(config):
        for name, largest in LIMITS.items():
            for size in layer_values(part, name):
                if size is not None and not (type(size) is int and 1 <= size <= largest):
                    raise RecipeError(
                        f"model.config.{name}: {size!r} is not a whole number from 1 to {largest:,} ({part.model_type})"
                    )
    text = config.get_text_config()
    if overrides.get("sliding_window") and getattr(text, "use_sliding_window", None) is False:
        raise RecipeError("model.config.sliding_window: no effect without use_sliding_window: true")
    if "router_aux_loss_coef" in overrides and not getattr(text, "output_router_logits", False):
        raise RecipeError("model.config.router_aux_loss_coef: no effect without output_router_logits: true")
    # The vocabulary and the positions: both problems at once.
    added, seq_len = plan.recipe.model.add_tokens, plan.recipe.data.seq_len
    limit, problems = position_limit(text), []
    if vocab_size is not None and added and text.vocab_size >= vocab_size - len(added):
        text.vocab_size = max(text.vocab_size, vocab_size)
    if vocab_size is not None and text.vocab_size < vocab_size:
        problems.append(f"model.config.vocab_size: {text.vocab_size}, but the tokenizer has {vocab_size} tokens")
    if limit and seq_len > limit:
        problems.append(f"data.seq_len: {seq_len} is beyond the model's {limit} positions: use {limit} or less")
    if problems:
        raise RecipeError([Problem(problem) for problem in problems])


def check_base_config(plan: Plan, config: PreTrainedConfig) -> None:
    """Raise RecipeError if an adapter that is saved alone would be opened on another model than it is trained on.

    peft opens it on `model.id`, with the `config.json` that is there, and knows nothing of `model.config`.
    """
    model = plan.recipe.model
    nearby = "model_type" not in model.config or Path(str(model.id)).is_dir()  # a dry run downloads nothing
    as_it_is = not model.config and not model.add_tokens
    if plan.recipe.adapter.kind is None or plan.recipe.export.adapter == "merged" or as_it_is or not nearby:
        return
    # The number of positions of the base need not suffice for the sequences of the recipe.
    base = load_config(varied(plan, {"model.config": {}, "data.seq_len": 1}), None)
    there = resolved_values(base.get_text_config())
    has_rope = any("rope_type" in one for one in rope_sets(config.get_text_config()))
    for name, value in resolved_values(config.get_text_config()).items():
        of_files = name == TIES and TIES not in model.config  # see `weights.fit_config`
        no_limit = name == "max_position_embeddings" and not has_rope
        ignored = of_files or no_limit or name == "pad_token_id" or re.search(r"dropout|_pdrop$", name)
        if not ignored and value != there.get(name):
            raise RecipeError(
                f"model.config.{name}: {value}, but {there.get(name)} in {model.id}, which peft opens the adapter on: "
                "use export.adapter: merged, or change config.json in a copy of the model"
            )


def announced_mtp(config: Any) -> int | None:
    """Return how many layers for multi-token prediction a configuration announces; None if it has no such key."""
    values = [item for part in config_parts(config) for item in vars(part).items()]
    return max((n for name, n in values if MTP_LAYERS.fullmatch(name) and isinstance(n, int)), default=None)


def announce_no_mtp(config: Any) -> None:
    """Let a configuration announce no layers for multi-token prediction: the exported files will have none."""
    for part in config_parts(config):
        for name in filter(MTP_LAYERS.fullmatch, [*vars(part)]):
            setattr(part, name, 0)


def resolved_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the values that decide what is trained, after all defaults, by dotted key, as JSON gives them back."""
    kinds = {str(one["rope_type"]) for one in rope_sets(config.get_text_config()) if "rope_type" in one}
    ignored = NOT_COMPARED | ({"max_position_embeddings"} if kinds == {"default"} else set())
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        inner = vars(config).get(name)  # an attribute that differs between layers raises an error
        if isinstance(inner, PreTrainedConfig):
            found |= {f"{name}.{key}": each for key, each in resolved_values(inner).items()}
        elif name not in ignored and not MTP_LAYERS.fullmatch(name):
            found[name] = json.loads(json.dumps(value, default=str))
    return found


def own_code(model: Any) -> dict[str, str]:
    """Return the SHA-256 of each file of a model's own code that was imported; {} if transformers implements it."""
    names = {type(each).__module__.rpartition(".")[0] for each in (model, model.config)}
    packages = tuple(f"{name}." for name in names if name.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."))
    if not packages:
        return {}
    files = [Path(str(module.__file__)) for name, module in [*sys.modules.items()] if name.startswith(packages)]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _translate_overrides(overrides: dict[str, Any], known: Any, field: str = "model.config") -> dict[str, Any]:
    """Return overrides of the configuration `known` under the names that this version of transformers has for them."""
    found: dict[str, Any] = {}
    for name, value in overrides.items():
        inner = getattr(known, name, None)
        if name in WITHOUT_EFFECT:
            raise RecipeError(f"{field}.{name}: {WITHOUT_EFFECT[name]}")
        if name in OLD_ROPE and name not in vars(known) and hasattr(known, "rope_parameters"):
            continue
        if not hasattr(known, name) and not _is_read(known, name):
            near = get_close_matches(name, known.to_dict(), n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise RecipeError(f"{field}.{name}: {known.model_type} has no such key{hint}")
        if isinstance(inner, PreTrainedConfig) and isinstance(value, dict):
            value = _translate_overrides(value, inner, f"{field}.{name}")
        found[known.attribute_map.get(name, name)] = value
    old = {name: value for name, value in overrides.items() if name in OLD_ROPE and name not in found}
    if old or isinstance(found.get("rope_parameters"), dict):
        found["rope_parameters"] = _rope_parameters(old, found.get("rope_parameters"), known, field)
    return found


def _is_read(known: Any, name: str) -> bool:
    """Return whether the architecture's code reads a key that its configuration does not declare, as `head_dim`."""
    code = importlib.util.find_spec(type(known).__module__.replace("configuration_", "modeling_"))
    if code is None or code.origin is None:
        return False
    asks = rf'getattr\(\s*(self\.)?config,\s*"{re.escape(name)}"'
    return re.search(asks, Path(code.origin).read_text(encoding="utf-8")) is not None


def _rope_parameters(old: dict[str, Any], new: dict[str, Any] | None, known: Any, field: str) -> dict[str, Any]:
    """Return the rotary parameters of older keys (`old`) or of `rope_parameters` (`new`), else those of `known`."""
    there = known.rope_parameters or {}
    several = any(isinstance(one, dict) for one in there.values())
    if old and (several or new is not None):
        raise RecipeError(f"{field}.{next(iter(old))}: remove it, and set all in rope_parameters: {there}")
    if several:
        return new or {}
    given = dict(new or old.get("rope_scaling") or {})
    if "type" in given:
        given.setdefault("rope_type", given["type"])
    kept = {name: there[name] for name in ("rope_theta", "partial_rotary_factor") if name in there}
    if "rope_scaling" not in old and new is None:
        kept = there
    theta = {"rope_theta": old["rope_theta"]} if "rope_theta" in old else {}
    return {**kept, **given, **theta}


def _apply_overrides(known: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration `known`, and those inside it, as a dict with `overrides` applied.

    With fewer layers, lists with an entry for each layer are cut; with more, the architecture sets them.
    """
    whole = known.to_dict()
    name = known.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    before, layers = whole.get(name), overrides.get(name, whole.get(name))
    if layers != before:  # by default, lists with an entry for each layer grow with the layers
        defaults = [type(known)(**{name: count}).to_dict() for count in (12, 13)]
        for key, value in known.to_dict().items():
            grows = all(isinstance(each.get(key), list) and len(each[key]) == each[name] for each in defaults)
            if grows and isinstance(value, list) and len(value) == before and key not in overrides:
                whole[key] = value[:layers] if layers < before else None
    for key, value in overrides.items():
        inner = getattr(known, key, None)
        nested = isinstance(inner, PreTrainedConfig) and isinstance(value, dict)
        whole[key] = _apply_overrides(inner, value) if nested else value
    return whole


def _text_overrides(overrides: dict[str, Any], known: Any) -> dict[str, Any]:
    """Return the overrides of the language model: all, or those of its configuration inside `known`."""
    inner = known.get_text_config()
    name = next((name for name, value in vars(known).items() if value is inner), None)
    if name is None:
        return overrides
    overrides[name] = dict(overrides.get(name) or {})
    found: dict[str, Any] = overrides[name]
    return found


def position_limit(config: Any) -> int | None:
    """Return the longest sequence that an architecture supports; None if its positions have no limit."""
    limit = next((n for key in ("max_position_embeddings", "max_seq_len") if (n := getattr(config, key, None))), None)
    # A factor (yarn) stretches it, except a dynamic one: then frequencies depend on the longest sequence so far.
    stretched = [
        int(one["original_max_position_embeddings"] * (one.get("factor") or 1))
        for one in rope_sets(config)
        if one.get("original_max_position_embeddings") and one.get("rope_type") != "dynamic"
    ]
    # MPT has its alibi setting inside attn_config.
    no_limit = getattr(config, "alibi", None) or getattr(config, "attn_config", None)
    return None if no_limit or not isinstance(limit, int) else max([limit, *stretched])


def rope_sets(config: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters of a language model's configuration: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    inner = [one for one in rope.values() if isinstance(one, dict)]
    return inner or [rope]


def longrope_threshold(config: Any, seq_len: int) -> int | None:
    """Return from which position longrope changes the frequencies of a whole micro-batch, if `seq_len` reaches it."""
    limits = [
        int(one["original_max_position_embeddings"])
        for one in rope_sets(config.get_text_config())
        if one.get("rope_type") == "longrope"
    ]
    return min((limit for limit in limits if limit < seq_len), default=None)


def own_classes(name: str, revision: str | None, trusted: bool, field: str = "model.id") -> dict[str, str]:
    """Return the model's own classes (`auto_map`) that are used; none is imported here.

    Trusted ones are used as transformers uses them. Raises RecipeError if they are needed and the command line does not
    allow them, or if no revision pins them.
    """
    written = read_json(name, revision, "config.json", field)
    named = written.get("auto_map") or {}
    if not isinstance(named, dict):
        raise RecipeError(f"{field}: auto_map in config.json of {name} is not a mapping")
    named = {kind: str(named[kind]) for kind in OWN_CLASSES[:2] if kind in named}
    classes = written.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    known = written.get("model_type") in CONFIG_MAPPING_NAMES and (
        "AutoModelForCausalLM" not in named or first in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
    if not named or (known and not trusted):
        return {}  # transformers implements this architecture itself
    if not trusted:
        raise RecipeError(f"{field}: {name} {CUSTOM_CODE}")
    if fault := unpinned_code(name, revision):
        raise RecipeError(f"{field}: {fault}")
    if foreign := [each for each in named.values() if "--" in each]:
        raise RecipeError(f"{field}: {foreign[0]} is code of another repository, which no revision pins")
    return named


def read_config(name: str, revision: str | None, trusted: bool) -> Any:
    """Return the configuration in a model's files; its own classes that are used run, and are registered."""
    own = own_classes(name, revision, trusted)
    with recipe_errors(f"model.id: cannot read the configuration of {name!r}"), hub_errors("model.id", name):
        config = AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=bool(own))
        if "AutoModelForCausalLM" in own:
            made: Any = get_class_from_dynamic_module(own["AutoModelForCausalLM"], name, revision=revision)
            made.register_for_auto_class("AutoModelForCausalLM")
            AutoModelForCausalLM.register(type(config), made, exist_ok=True)
        if "AutoConfig" in own:
            AutoConfig.register(config.model_type, type(config), exist_ok=True)
    return config


# ---------------------------------------------------------------------- the files of an export besides the weights

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# The other token ids of a generation config: another tokenizer has other tokens under these ids.
GENERATION_TOKENS = (
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "sequence_bias",
)  # fmt: skip

CONTENT = "fsdptrain-answer"  # an assistant's turn in a probe of the chat template


def save_assets(plan: Plan, config: Any, model: Any, tokenizer: Any, folder: Path) -> None:
    """Write config, generation config and tokenizer into `folder`; `config` itself is not changed."""
    config, generation, tokenizer = copy.deepcopy(config), _generation_config(plan, model), copy.copy(tokenizer)
    tokenizer.init_kwargs = {key: value for key, value in tokenizer.init_kwargs.items() if key != "auto_map"}
    kwargs = prompt_source(plan.recipe.data).data.chat_template_kwargs
    turn_end = end_of_turn(tokenizer, kwargs) if plan.trains_chat and tokenizer.chat_template else None
    _align_special_tokens(config, generation, tokenizer, plan.own_tokenizer, turn_end)
    config.architectures = [type(model).__name__]
    with scratch_folder() as scratch:
        if type(model).__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME):  # the folder needs the model's own code
            custom_object_save(model, scratch, config=config)
        else:  # the folder must not name code that it does not have
            vars(config).pop("auto_map", None)
        config.save_pretrained(scratch)
        generation.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        install_assets(scratch, folder)


def _align_special_tokens(config: Any, generation: Any, tokenizer: Any, own: bool, turn_end: int | None = None) -> None:
    """Set the special tokens of both configurations, in place, to the tokenizer's.

    `own`: the tokenizer is the model's own. Then tokens that it does not define keep the model's values, and every end
    token of either configuration is kept (Llama 3 has three). `turn_end` ends an assistant's turn in training.
    """
    for part in config_parts(config):
        for name in SPECIAL_TOKENS:
            wanted, there = getattr(tokenizer, name), getattr(part, name, None)
            keep = own and (wanted is None or (isinstance(there, list) and wanted in there))
            if not keep:
                _set_special_token(part, name, wanted)
    ends = [*_as_list(tokenizer.eos_token_id), *_as_list(turn_end)]
    if own:
        ends += [*_as_list(generation.eos_token_id), *_as_list(config.get_text_config().eos_token_id)]
    else:
        for name in GENERATION_TOKENS:
            setattr(generation, name, None)
    ends = list(dict.fromkeys(ends))
    generation.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    for name in ("bos_token_id", "pad_token_id"):
        wanted = getattr(tokenizer, name)
        if wanted is not None or not own:
            setattr(generation, name, wanted)


def special_token_conflicts(folder: Path) -> list[str]:
    """Return how config, generation config and tokenizer of a Hugging Face folder disagree on special tokens."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    files = [("config.json", part) for part in config_parts(config)]
    files.append(("generation_config.json", GenerationConfig.from_pretrained(folder)))
    return [
        f"{name}: the tokenizer has {wanted}, {file} {getattr(part, name, None)}"
        for name in SPECIAL_TOKENS
        for file, part in files
        if (wanted := getattr(tokenizer, name)) is not None and wanted not in _as_list(getattr(part, name, None))
    ]


def check_special_tokens(plan: Plan, tokenizer: Any) -> None:
    """Raise RecipeError when `model.config` names a special token and the tokenizer defines another."""
    for name in SPECIAL_TOKENS:
        written, wanted = plan.recipe.model.config.get(name), getattr(tokenizer, name)
        if written is not None and wanted is not None and wanted not in _as_list(written):
            raise RecipeError(
                f"model.config.{name}: {written}: remove this key: the tokenizer's value ({wanted}) is used"
            )


def end_of_turn(tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> int | None:
    """Return the special token that ends an assistant's turn, if that is not the end-of-sequence token; else None."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": CONTENT}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, **(template_kwargs or {}))
    except Exception:  # a template may reject this conversation; errors of real rows are reported when they are encoded
        return None
    after = tokenizer(text.rpartition(CONTENT)[2], add_special_tokens=False).input_ids
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    ends = [token for token in after if token in special]
    return ends[0] if ends and tokenizer.eos_token_id not in ends else None


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _generation_config(plan: Plan, model: Any) -> GenerationConfig:
    """Return the generation config of `model.id`, or the architecture's if it has none or an invalid one."""
    name, plain = plan.recipe.model.id, copy.deepcopy(model.generation_config)
    if name is None:
        return plain
    try:
        found = GenerationConfig.from_pretrained(name, revision=model_revision(plan))
        plain.eos_token_id = found.eos_token_id
        found.validate(strict=True)  # as `save_pretrained` does
        return found
    except Exception as error:  # training does not use it, and many published ones are inconsistent
        if isinstance(error, OSError) and error.errno:
            raise
        # transformers raises OSError where there is none, as for many models, and where it is no JSON.
        if not isinstance(error, OSError) or isinstance(error.__context__, ValueError):
            print(f"generation_config.json of {name} is invalid, so a plain one is written: {error_summary(error)}")
    return plain
