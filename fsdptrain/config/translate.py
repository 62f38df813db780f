"""One value of another tool's file → what it sets in a recipe, or the reason why it has no counterpart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdptrain.config.names import FOREIGN_VALUES, leading_key, replacement_of
from fsdptrain.config.reader import SECRET
from fsdptrain.config.reflection import all_paths, canonical_spelling
from fsdptrain.config.tools import COPIED, COUNTED_OTHERWISE, KINDS, MEANINGS, NOTE, PART_TYPES, Settings
from fsdptrain.config.values import accepts, value_text, wrong_type_message
from fsdptrain.errors import listed

UNKNOWN_NAME = "not known: nothing here has this name"


@dataclass(frozen=True)
class Entry:
    """One value of a file, with its name, and the name of the mapping that it is in (empty at the top)."""

    parent: str
    word: str
    value: Any

    @property
    def name(self) -> str:
        """The dotted name, for messages and for the tables."""
        return f"{self.parent}.{self.word}".lstrip(".")

    @property
    def keys(self) -> tuple[str, ...]:
        """The names under which the tables may have it, the more specific first; `fsdp_` is Accelerate's prefix."""
        return self.name, self.word, self.word.removeprefix("fsdp_")


def is_section(word: str) -> bool:
    """Return whether a mapping of this name holds settings of its own; otherwise it is one value."""
    text = replacement_of(word)
    return text is None or leading_key(text) not in (None, "model.config")


def is_empty(entry: Entry) -> bool:
    """Return whether a value says nothing: null, an empty one, or `false` or `auto` without a meaning of their own."""
    value, known = entry.value, _meaning(_table(entry), entry.value) is not None
    return value is None or value in ("", [], {}) or (not known and (value is False or value == "auto"))


def settings_of(entry: Entry) -> Settings | None:
    """Return what a value sets in a recipe, {} for nothing; None if it has no counterpart or may be a secret."""
    if _is_secret(entry.value):
        return None
    if rule := next((RULES[key] for key in entry.keys if key in RULES), None):
        return rule(entry.value)
    settings = _meaning(_table(entry), entry.value)
    return _copied(entry) if settings is None else settings


def _table(entry: Entry) -> dict[Any, Settings]:
    return next((MEANINGS[key] for key in entry.keys if key in MEANINGS), {})


def _meaning(table: dict[Any, Settings], value: Any) -> Settings | None:
    """Return what a value sets by a table of MEANINGS, by its words in any case; None if the table does not have it."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    for known, settings in table.items():
        same_type = isinstance(known, bool) == isinstance(value, bool)
        if same_type and (known == value or (isinstance(known, str) and known.lower() == str(value).lower())):
            return settings
    return None


def _destination(entry: Entry) -> str | None:
    """Return the recipe key or the part to which a value is copied; None if there is none."""
    for key in entry.keys:
        if key in COPIED:
            return COPIED[key]
    if any(key in COUNTED_OTHERWISE for key in entry.keys):
        return None
    path = leading_key(replacement_of(entry.word) or "")
    return path if path in all_paths() else None


def _copied(entry: Entry) -> Settings | None:
    """Return a value under the key that replaces its name, as a recipe spells it; None if the key does not take it."""
    path = _destination(entry)
    if path is None:
        return None
    if path.startswith("_"):
        kind = PART_TYPES.get(path, str)
        valid = isinstance(entry.value, kind) and not isinstance(entry.value, bool)
        return {path: entry.value} if valid and (kind is str or entry.value > 0) else None
    for value in _spellings(path, entry.value):
        if accepts(path, value):
            return {path: value}
    return None


def _is_secret(value: Any) -> bool:
    return SECRET.search(str(value)) is not None


def _spellings(path: str, value: Any) -> Iterator[Any]:
    """Yield the forms in which a recipe may have a value."""
    yield canonical_spelling(path, value)
    if isinstance(value, (str, bool)):
        known = FOREIGN_VALUES.get(path, {})
        plain = value.lower() if isinstance(value, str) else value
        yield from [known[plain]] if plain in known else []
    if isinstance(value, str) and re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", value):
        yield float(value) if re.search(r"[.e]", value) else int(value)
    if isinstance(value, float) and value.is_integer():
        yield int(value)


def reason_for(entry: Entry) -> str:
    """Return why a value has no counterpart."""
    if _is_secret(entry.value):
        return "seems to contain a secret, and recipes are copied to the run folder: set HF_TOKEN in the environment"
    for key in entry.keys:
        if key in COUNTED_OTHERWISE:
            return COUNTED_OTHERWISE[key]
    path, text = _destination(entry), replacement_of(entry.word)
    if text and (leading_key(text) is None or (": " in text and path not in (None, "fsdp.strategy"))):
        return text.removesuffix("delete the line").rstrip(":; ")
    if path is not None and not path.startswith("_"):
        return f"{path}: {wrong_type_message(path, entry.value)}"
    return f"{value_text(entry.value)} is not known; see {text}" if text else UNKNOWN_NAME


def hub_path(path: str, config: str | None, split: str | None) -> str:
    """Return the `data.path` of a data set, with its configuration and split unless they are the usual ones."""
    split = None if split == "train" else split
    return ":".join([path, *([config or "", split] if split else [config] if config else [])])


def _words(value: Any) -> list[str]:
    """Return the words of a list, or of a text with commas or spaces."""
    return [str(word) for word in value] if isinstance(value, list) else re.split(r"[,\s]+", str(value).strip())


def _fsdp_words(value: Any) -> Settings | None:
    """Return what the words of the Trainer's `fsdp` set: `full_shard auto_wrap`."""
    found = [_meaning(MEANINGS["fsdp"], word) for word in _words(value)]
    return None if None in found else {key: item for settings in found if settings for key, item in settings.items()}


def _targets(value: Any) -> Settings | None:
    """Return the layers that get adapters, with torchtune's names of them in those of the models of transformers."""
    names = _words(value)
    if names in (["all"], ["all-linear"]):
        return {"adapter.target": "all-linear"}
    return {"adapter.target": [{"output_proj": "o_proj"}.get(name, name) for name in names]}


def _kind_settings(kind: Any) -> Settings | None:
    """Return how rows of a kind of data set are read; None for a kind that is not known."""
    if isinstance(kind, dict):  # Axolotl's own format: the names of the columns
        prompt = [kind[key] for key in ("field_instruction", "field_input") if isinstance(kind.get(key), str)]
        columns = {"prompt": prompt, "completion": kind.get("field_output", "output")}
        note = "the format texts of a data set's type are not used: a prompt is its columns, joined by empty lines"
        return {"data.format": "prompt_completion", "data.columns": columns, NOTE: note} if prompt else None
    return KINDS.get(str(kind).partition(":")[0].partition(".")[0])


def _data_sets(value: Any) -> Settings | None:
    """Return what a list of data sets sets: the first one, and a note on the others, which data.sources can name."""
    sets = value if isinstance(value, list) else [value]
    first = sets[0] if isinstance(sets[0], dict) else {"path": sets[0]}
    path = first.get("data_files") or first.get("path")
    path = path[0] if isinstance(path, list) and path else path
    if not isinstance(path, str):
        return None
    settings: Settings = {"data.path": path}
    if isinstance(kind := first.get("type"), (str, dict)):
        read_as = _kind_settings(kind)
        settings |= read_as or {NOTE: f"data.format: the type {value_text(kind)} is not known; check how rows are read"}
    for name, part in (("name", "_config"), ("split", "_split"), ("field_messages", "_messages"), ("field", "_text")):
        settings |= {part: first[name]} if isinstance(first.get(name), str) else {}
    if len(sets) > 1:
        others = listed(item.get("path") if isinstance(item, dict) else item for item in sets[1:])
        settings[NOTE] = (
            f"data.path: only the first of {len(sets)} data sets; for the others ({others}) use data.sources"
        )
    return settings


def _data_set_names(value: Any) -> Settings | None:
    """Return what the names of data sets set: a list, or a text with commas."""
    return _data_sets(_words(value) if isinstance(value, str) else value)


def _held_out(value: Any) -> Settings | None:
    """Return what held-out data sets set."""
    found = _data_set_names(value)
    return found and {"data.eval": {"path": hub_path(found["data.path"], found.get("_config"), found.get("_split"))}}


def _held_out_share(value: Any) -> Settings | None:
    """Return what a share of held-out rows sets; None for a number of rows."""
    if value == 0:
        return {}
    return {"data.eval": {"fraction": value}} if isinstance(value, float) and 0 < value < 1 else None


def _component(value: Any) -> Settings | None:
    """Return what the name of torchtune's model builder sets: only whether it has adapters."""
    name = str(value).rpartition(".")[2]
    kind = {"lora": "lora", "qlora": "qlora", "dora": "lora", "qdora": "qlora"}.get(name.partition("_")[0])
    return {"adapter.kind": kind} | ({"adapter.use_dora": True} if "dora" in name else {}) if kind else {}


def _named(path: str) -> Callable[[Any], Settings | None]:
    """Return a rule for the name of a class or function, such as `torch.optim.AdamW`: its last word as a value."""

    def rule(value: Any) -> Settings | None:
        word = str(value).rpartition(".")[2]
        if path == "data":
            return KINDS.get(word)
        word = word.removeprefix("get_").removesuffix("_schedule_with_warmup").replace("Paged", "")
        return next(({path: known} for known in _spellings(path, word) if accepts(path, known)), None)

    return rule


def _stage_of_file(value: Any) -> Settings | None:
    """Return the strategy that the name of a DeepSpeed file tells."""
    found = re.search(r"(?:zero|z|stage)_?([0-3])", str(value).rpartition("/")[2].lower())
    note = f"fsdp: by the name {value_text(value)}; pass the file with another --from to convert its settings"
    return {**MEANINGS["zero_stage"][int(found[1])], NOTE: note} if found else None


def _positive(path: str) -> Callable[[Any], Settings | None]:
    """Return a rule for a count that is not in use when it is 0 or -1."""

    def rule(value: Any) -> Settings | None:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if value <= 0:
            return {}
        return next(({path: known} for known in _spellings(path, value) if accepts(path, known)), None)

    return rule


def _clipping(value: Any) -> Settings | None:
    """Return the largest gradient norm; 0 means that gradients are not clipped."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return {"optim.max_grad_norm": value or None}


def _plain_patterns(value: Any) -> Settings | None:
    """Return the parameters that Axolotl's regular expressions match, as plain names; None if one cannot be plain."""
    names = [re.sub(r"^\^|\$$|\\(?=\.)", "", str(word)) for word in (value if isinstance(value, list) else [value])]
    return {"model.trainable": names} if not any(re.search(r"[\\\[\](){}+?|*^$]", name) for name in names) else None


def _nothing(value: Any) -> Settings | None:
    """Return no settings: the tokenizer's file is in the folder of the model, and there is one loss."""
    return {}


# Foreign name → the function that returns what its value sets; None if that has no counterpart.
RULES: dict[str, Callable[[Any], Settings | None]] = {
    "fsdp": _fsdp_words,
    "new_special_tokens": lambda value: {"model.add_tokens": _words(value)},
    "lora_target": _targets,
    "lora_target_modules": _targets,
    "lora_attn_modules": _targets,
    "transformer_layer_cls_to_wrap": lambda value: {"fsdp.wrap": _words(value)},
    "min_num_params": lambda value: {"fsdp.wrap": {"min_params": value}} if isinstance(value, int) and value else {},
    "datasets": _data_sets,
    "pretraining_dataset": lambda value: (found := _data_sets(value)) and {**found, "data.format": "text"},
    "dataset": _data_set_names,
    "dataset_name": _data_sets,
    "test_datasets": _held_out,
    "eval_dataset": _held_out,
    "validation_file": _held_out,
    "val_set_size": _held_out_share,
    "val_size": _held_out_share,
    "rope_scaling": lambda value: {"model.config": {"rope_scaling": value}},
    "rope_theta": lambda value: {"model.config": {"rope_theta": value}},
    "dataset._component_": _named("data"),
    "optimizer._component_": _named("optim.name"),
    "lr_scheduler._component_": _named("schedule.name"),
    "model._component_": _component,
    "tokenizer.path": _nothing,
    "tokenizer._component_": _nothing,
    "checkpointer._component_": _nothing,
    "loss._component_": _nothing,
    "deepspeed": _stage_of_file,
    "max_steps": _positive("train.steps"),
    "max_train_steps": _positive("train.steps"),
    "training_steps": _positive("train.steps"),
    "unfrozen_parameters": _plain_patterns,
    "roles_to_train": lambda value: {"data.train_on": "completion"} if value == ["assistant"] else None,
    "ddp_timeout": lambda value: {"launch.timeout_s": value} if isinstance(value, int) and value <= 86_400 else None,
    "wandb_project": lambda value: {"log.trackers": ["wandb"], "log.project": value} if value else {},
    "num_machines": lambda value: {} if value == 1 else {"launch.nnodes": value},
    "max_grad_norm": _clipping,
    "clip_grad_norm": _clipping,
    "gradient_clipping": _clipping,
}
