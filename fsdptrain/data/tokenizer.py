"""The tokenizer: the one a recipe names, or a byte-level BPE trained on its data."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from fsdptrain import __version__
from fsdptrain.config.schema import Data, Model
from fsdptrain.data.cache import cached_folder
from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE
from fsdptrain.data.columns import read_rows
from fsdptrain.data.encode import prefix_tokens
from fsdptrain.data.hub import hub_arguments, hub_errors, read_json, recipe_errors, reject_symlinks_outside
from fsdptrain.data.sources import fingerprint, open_sources, readable_files
from fsdptrain.errors import RecipeError
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import Progress

END_OF_TEXT = "<|endoftext|>"
OWN_CLASSES = ("AutoModelForCausalLM", "AutoConfig", "AutoTokenizer")  # those of `auto_map` that are opened here


def load_tokenizer(plan: Plan, progress: Progress) -> Any:
    """Return the tokenizer that the recipe names, or one trained on its data.

    When conversations are trained, it gets the recipe's chat template, or the plain one if it has none, so that the
    export has the template that the model learned. Raises RecipeError for a tokenizer that cannot be loaded or used.
    """
    wanted, model = plan.recipe.model.tokenizer, plan.recipe.model
    if isinstance(wanted, dict):
        tokenizer = _trained_tokenizer(plan, wanted["train"], progress)
    else:
        field, name = ("model.tokenizer", wanted) if wanted else ("model.id", str(model.id))
        reject_symlinks_outside(field, name)
        with recipe_errors(f"model.tokenizer: cannot load {name!r}"), hub_errors(field, name):
            tokenizer = open_tokenizer(name, hub_arguments(plan, wanted)["revision"])
    data = plan.recipe.data
    if data.chat_template is not None:
        tokenizer.chat_template = data.chat_template
    if not isinstance(tokenizer.chat_template, (str, type(None))):
        raise RecipeError("model.tokenizer: it has several chat templates: bring one in data.chat_template")
    if tokenizer.chat_template is None and any(source.data.format.is_chat for source in plan.sources):
        prefix = "".join(tokenizer.convert_ids_to_tokens(prefix_tokens(tokenizer)))
        tokenizer.chat_template = prefix + PLAIN_CHAT_TEMPLATE
    _check_template_arguments(tokenizer, [data, *(source.data for source in plan.sources)])
    _add_tokens(tokenizer, model.add_tokens)
    tokenizer.stop_tokens = _stop_tokens(plan, tokenizer)
    return tokenizer


def _stop_tokens(plan: Plan, tokenizer: Any) -> list[str]:
    if not plan.own_tokenizer:
        return []
    model, generation = plan.recipe.model, dict[str, Any]()
    config = read_json(str(model.id), model.revision, "config.json", "model.id")
    with contextlib.suppress(RecipeError):  # one that cannot be used is replaced in the export, which is said
        generation = read_json(str(model.id), model.revision, "generation_config.json", "model.id")
    found = [part.get("eos_token_id") for part in (generation, config, config.get("text_config") or {})]
    ids = [number for each in found for number in (each if isinstance(each, list) else [each])]
    tokens = tokenizer.convert_ids_to_tokens([number for number in ids if isinstance(number, int)])
    return [token for token in dict.fromkeys(tokens) if token]


def open_tokenizer(name: str, revision: str = "main") -> Any:
    """Return a tokenizer; raises RecipeError for one in Python, and if it needs its own code, which is never run."""
    fault, more = "is a tokenizer written in Python, which is not supported", ""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        if hasattr(tokenizer, "backend_tokenizer"):
            return tokenizer
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        fault = "needs the tokenizer's own code, which is never run"
        more = ", and a tokenizer_config.json without auto_map"
    raise RecipeError(f"model.tokenizer: {name} {fault}: name a folder with its tokenizer.json{more}")


def own_code_note(made: Any) -> str | None:
    """Return a note if `auto_map` in the files of a model or tokenizer names a class, and `made` is of another one."""
    is_model = hasattr(made, "config")
    auto_map = (vars(made.config) if is_model else made.init_kwargs).get("auto_map") or {}
    named = next((auto_map[kind] for kind in OWN_CLASSES if kind in auto_map), None)
    if named is None or type(made).__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME):
        return None
    own = named if isinstance(named, str) else next(filter(None, reversed(named)), None)  # of slow and fast tokenizers
    field, used = "model.id" if is_model else "model.tokenizer", type(made).__name__
    return f"{field}: its own code ({own}) is not run: {used} of transformers is used"


def _check_template_arguments(tokenizer: Any, sets: Sequence[Data]) -> None:
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in itertools.chain.from_iterable(data.chat_template_kwargs for data in sets):
        if name in {*own, "messages"}:
            raise RecipeError(f"data.chat_template_kwargs: {name} is set by fsdptrain: remove it")
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise RecipeError(f"data.chat_template_kwargs: the chat template does not read {name}: remove it")


def _add_tokens(tokenizer: Any, tokens: list[str]) -> None:
    before = tokenizer.get_vocab()
    for token in tokens:
        if token in before:
            raise RecipeError(
                f"model.add_tokens: the tokenizer has {token!r} already (id {before[token]}): remove it from the list"
            )
    first = vocabulary_size(tokenizer)
    tokenizer.add_tokens(tokens, special_tokens=True)
    if tokens and min(tokenizer.convert_tokens_to_ids(tokens)) < first:
        raise RecipeError(
            "model.add_tokens: the ids of this tokenizer have gaps, so a new token would get the id of another: add "
            "them to the tokenizer's files"
        )


def size_to_train(model: Model) -> int | None:
    """Return the size of the vocabulary of a tokenizer that a run will train; None if it trains none."""
    return model.tokenizer["train"] + len(model.add_tokens) if isinstance(model.tokenizer, dict) else None


def vocabulary_size(tokenizer: Any) -> int:
    """Return how many rows of an embedding its tokens need: one more than the largest id, because ids may have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def _trained_tokenizer(plan: Plan, size: int, progress: Progress) -> Any:

    def write(folder: Path) -> None:
        progress("tokenizer", 0, 1)
        train_bpe(_training_texts(plan), size).save_pretrained(folder)
        progress("tokenizer", 1, 1)

    content: list[Any] = [__version__, size]
    for data in (source.data for source in plan.sources):
        readable_files(data.path, progress=progress)  # downloads what is in an object store
        content += [fingerprint(data.path), data.format, data.columns, data.max_rows]
    return AutoTokenizer.from_pretrained(cached_folder("tokenizers", content, write))


def train_bpe(texts: Iterator[str], size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of `size` tokens, which include an end-of-text token, trained on these texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def _training_texts(plan: Plan) -> Iterator[str]:
    for data in (source.data for source in plan.sources):
        for row in itertools.chain.from_iterable(read_rows(open_sources(data.path), data, data.max_rows)):
            for value in (row[field] for field in dict.fromkeys(["prompt", *data.format.text_fields]) if field in row):
                contents = [m.get("content", "") for m in value] if isinstance(value, list) else [value]
                for content in contents:
                    yield from [part["text"] for part in content] if isinstance(content, list) else [content]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a SHA-256 over all that decides which tokens a text becomes: vocabulary, rules, chat template."""
    rules = tokenizer.backend_tokenizer.to_str()
    split = bool(getattr(tokenizer, "split_special_tokens", False))  # special tokens in a text, like plain text
    parts = [rules, str(split), str(tokenizer.chat_template), str(sorted(tokenizer.special_tokens_map.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
