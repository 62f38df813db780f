"""Check single values: their types and limits, and which valid value was probably meant."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Iterator
from difflib import get_close_matches
from enum import Enum
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdptrain.config.names import FOREIGN_VALUES
from fsdptrain.config.schema import (
    Recipe,
    all_fields,
    attribute,
    canonical_spelling,
    choices_of,
    form_words,
    forms_of,
    limits_of,
    matches_form,
    type_words,
    value_at,
)
from fsdptrain.config.syntax import RecipeLoader, yaml_text
from fsdptrain.errors import Problem


def wrong_type_message(path: str, value: Any) -> str:
    """Return the message for a value that its key does not accept: what it accepts, and a valid value near it."""
    if isinstance(value, str) and "${" in value:
        return (
            f"{value_text(value)} does not give {_expected(path)}: ${{key}} refers to another key of the recipe, not "
            "to an environment variable (~ is your home folder)"
        )
    if value == [] and list[str] in forms_of(path):
        words = [form for form in forms_of(path) if isinstance(form, str)]
        return f"[] is empty: name at least one{''.join(f', or use {word}' for word in words)}"
    near = next((meant for meant in _candidates(path, value) if accepts(path, meant)), None)
    hint = ""
    if isinstance(near, (int, float)) and isinstance(value, str) and _number(value) == near:
        hint = f"; did you mean {value.strip().replace(',', '')}, a number without quotes?"
    elif value is None and near == []:
        hint = "; use [] for none"
    elif near is not None:
        hint = f"; did you mean {yaml_text(near)}?"
    return f"{value_text(value)} is not {_expected(path)}{hint}"


def _candidates(path: str, value: Any) -> Iterator[Any]:
    """Yield values that may have been meant by an invalid one, the likeliest first."""
    choices = choices_of(path)
    plain = value.lower() if isinstance(value, str) else value
    if isinstance(value, (str, bool, type(None))) and plain in (known := FOREIGN_VALUES.get(path, {})):
        yield known[plain]
    if isinstance(value, str):
        yield from {"yes": [True], "on": [True], "true": [True], "no": [False], "off": [False], "false": [False]}.get(
            value.strip().lower(), []
        )
        yield from [number] if (number := _number(value)) is not None else []
        near = get_close_matches(value.lower(), [choice.lower() for choice in choices], n=1)
        yield from (canonical_spelling(path, choice) for choice in near)
        yield [value]
    if isinstance(value, int):
        yield bool(value)
    if value is None and _expected(path) == "a list" and value_at(Recipe(), path) == []:
        yield []
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    for form in forms_of(path):
        if isinstance(form, dict):  # the value may be given without its mapping
            yield {next(iter(form)).rstrip("?"): value}


def _number(text: str) -> Any:
    """Return the number that a string would be without quotes and commas; None if it would not be one."""
    try:
        value = yaml.load(text.strip().replace(",", ""), Loader=RecipeLoader) if len(text) < 30 else None
    except (yaml.YAMLError, ValueError):
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def default_config() -> DictConfig:
    """Return a new structured config of the schema, with its defaults."""
    return copy.deepcopy(_default_config())


@functools.cache
def _default_config() -> DictConfig:
    """Return the config that `default_config` copies: building it takes 24 ms, five times as long as copying."""
    return OmegaConf.structured(Recipe)


def accepts(path: str, value: Any) -> bool:
    """Return whether a key accepts a value, by its type and its limits."""
    forms = forms_of(path)
    if below_open_mapping(path) or (forms and not any(matches_form(value, form) for form in forms)):
        return False
    config = default_config()
    try:
        OmegaConf.update(config, attribute(path), value, merge=False)
        return same_kind(value, OmegaConf.select(config, attribute(path))) and not _limit_message(
            path,
            value_at(OmegaConf.to_object(config), path),  # type: ignore[arg-type]
        )
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError, RecursionError):
        return False


def same_kind(written: Any, read: Any) -> bool:
    """Return whether OmegaConf kept the kind of a value: it would convert `"010"` to ten and 1 to true."""
    if isinstance(written, str) and "${" in written:
        return True
    if isinstance(read, bool) or isinstance(written, bool):
        return written is read
    if isinstance(written, list) and not isinstance(read, str):
        return all(same_kind(a, b) for a, b in zip(written, read, strict=False))
    if isinstance(read, Enum):  # OmegaConf accepts `Strategy.NO_SHARD` too
        return bool(written == read)
    return not isinstance(read, (int, float)) or not isinstance(written, str)


def range_problems(recipe: Recipe, where: dict[str, str]) -> list[Problem]:
    """Return a problem for each value that has the right type but is outside its limits."""
    problems = []
    for path, spec in all_fields():
        value = value_at(recipe, path)
        set_here = [place for place in where if place == path or place.startswith(f"{path}.")]
        if not set_here and path != "output_dir":  # a default is valid; that of output_dir depends on name
            continue
        if value is None and None in spec.metadata.get("forms", (None,)):
            continue
        message = _limit_message(path, value)
        if path == "optim.betas" and not (len(value) == 2 and all(0 <= beta < 1 for beta in value)):
            message = f"{value_text(value)} is not a pair of numbers in [0, 1)"
        if message:
            problems.append(Problem(message, path, where[set_here[-1]] if set_here else None))
    return problems


def _limit_message(path: str, value: Any) -> str | None:
    """Return how a value breaks the limits of its key; None if it does not."""
    limits = limits_of(path)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if isinstance(value, (int, float)) and (message := _bound_message(limits, value)):
        return message
    if isinstance(value, str) and not value.strip() and "any_text" not in limits:
        return "is empty"
    if "forms" in limits and not any(matches_form(value, form) for form in limits["forms"]):
        return wrong_type_message(path, value)
    for name, item in value.items() if "values" in limits else ():
        if not any(matches_form(item, form) for form in limits["values"]):
            return f"{name}: {value_text(item)} is not {form_words(limits['values'])}"
    return _number_message(value, in_mapping="forms" in limits)


def _bound_message(limits: dict[str, Any], value: float) -> str | None:
    if "at_least" in limits and value < limits["at_least"]:
        return f"{value} is too small: must be at least {limits['at_least']}"
    if "above" in limits and value <= limits["above"]:
        return f"{value} is too small: must be above {limits['above']}"
    if "at_most" in limits and value > limits["at_most"]:
        return f"{value} is too large: must be at most {limits['at_most']}"
    return None


def _number_message(value: Any, in_mapping: bool) -> str | None:
    """Return why a number, or a number in a small mapping (`{train: N}`, `{every: n}`, …), is out of range, or None."""
    for name, number in value.items() if in_mapping and isinstance(value, dict) else ():
        if isinstance(number, int) and number > 2**53:
            return f"{name}: {number} is too large"
        if name == "fraction" and not 0 < number < 1:
            return f"fraction {number} is not between 0 and 1"
        if name == "train" and isinstance(number, int) and number < 257:
            return f"train: {number} is too small: must be at least 257 (256 bytes and the end-of-text token)"
        if name in ("every", "min_params", "max_rows") and isinstance(number, int) and number < 1:
            return f"{name}: {number} is too small: must be at least 1"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return f"{value} is too large"
    return None


def below_open_mapping(path: str) -> bool:
    """Return whether a path is below a mapping whose keys are free: those of the model's config or of the data."""
    return path.startswith(("model.config.", "data.columns."))


def _expected(path: str) -> str:
    """Return the type of a key in words."""
    return "a plain value" if below_open_mapping(path) else type_words(path)


def value_text(value: Any) -> str:
    """Return a value for a message, in at most 60 characters."""
    text = json.dumps(value) if isinstance(value, (bool, type(None))) else str(value)
    text = repr(value) if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "…"
