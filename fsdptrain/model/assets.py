"""The files of a Hugging Face folder besides the weights: config, generation config and tokenizer, made consistent.

The tokenizer's special tokens are used: with the defaults of an architecture (Llama's end token is 2) and another
tokenizer, generation would stop at the wrong token, or never.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from fsdptrain.config.mixture import prompt_source
from fsdptrain.data.hub import model_revision
from fsdptrain.errors import RecipeError, error_summary
from fsdptrain.model.skeleton import config_parts, set_special_token
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.files import scratch_folder
from fsdptrain.run_folder.ownership import install_assets

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
    align_special_tokens(config, generation, tokenizer, plan.own_tokenizer, turn_end)
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


def align_special_tokens(config: Any, generation: Any, tokenizer: Any, own: bool, turn_end: int | None = None) -> None:
    """Set the special tokens of both configurations, in place, to the tokenizer's.

    `own`: the tokenizer is the model's own. Then tokens that it does not define keep the model's values, and every end
    token of either configuration is kept (Llama 3 has three). `turn_end` ends an assistant's turn in training.
    """
    for part in config_parts(config):
        for name in SPECIAL_TOKENS:
            wanted, there = getattr(tokenizer, name), getattr(part, name, None)
            keep = own and (wanted is None or (isinstance(there, list) and wanted in there))
            if not keep:
                set_special_token(part, name, wanted)
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
    generation = GenerationConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    files = [("config.json", part) for part in config_parts(config)] + [("generation_config.json", generation)]
    faults = []
    for name in SPECIAL_TOKENS:
        wanted = getattr(tokenizer, name)
        for file, part in files:
            found = _as_list(getattr(part, name, None))
            if wanted is not None and wanted not in found:
                faults.append(f"{name}: the tokenizer has {wanted}, {file} {found[0] if len(found) == 1 else found}")
    return faults


def check_special_tokens(plan: Plan, tokenizer: Any) -> None:
    """Raise RecipeError when `model.config` names a special token and the tokenizer defines another."""
    for name in SPECIAL_TOKENS:
        written, wanted = plan.recipe.model.config.get(name), getattr(tokenizer, name)
        if written is not None and wanted is not None and wanted not in _as_list(written):
            raise RecipeError(
                f"model.config.{name}: {written}: remove this key: the tokenizer's value ({wanted}) is used"
            )


def end_of_turn(tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> int | None:
    """Return the special token that ends an assistant's turn in the chat template; None without one.

    A model that is trained to end its turns with it must stop there when it generates. None if the end-of-sequence
    token ends the turn.
    """
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
    """Return the generation config of `model.id`, or the architecture's if it has none or an invalid one.

    Raises OSError if there is one that cannot be read.
    """
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
