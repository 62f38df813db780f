"""Check single values: their types and limits, and which valid value was probably meant."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from fsdptrain.config.names import FOREIGN_VALUES, HINTS
from fsdptrain.config.reflection import (
    all_fields,
    annotation_of,
    canonical_spelling,
    choices_of,
    enumerated,
    form_words,
    forms_of,
    hints,
    key_of,
    limits_of,
    matches_form,
    section_of,
    type_words,
    value_at,
)
from fsdptrain.config.schema import Recipe
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
        beside = HINTS.get((path, str(_plain(value))), "")
        hint = f"; did you mean {yaml_text(near)}{beside}?"
    return f"{value_text(value)} is not {_expected(path)}{hint}"


def _plain(value: Any) -> Any:
    """Return a value as other tools' values are listed: a string in small letters, `ZeRO-1` as `zero1`."""
    return value.lower().replace("-", "") if isinstance(value, str) else value


def _candidates(path: str, value: Any) -> Iterator[Any]:
    """Yield values that may have been meant by an invalid one, the likeliest first."""
    choices, plain = choices_of(path), _plain(value)
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
    if value is None and value_at(Recipe(), path) == []:
        yield []
    if isinstance(value, list):  # without quotes, a text that ends with a colon is a mapping
        yield [
            f"{next(iter(item))}:" if isinstance(item, dict) and [*item.values()] == [None] else item for item in value
        ]
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


def accepts(path: str, value: Any) -> bool:
    """Return whether a key accepts a value, by its type and its limits."""
    forms = forms_of(path)
    if below_open_mapping(path) or (forms and not any(matches_form(value, form) for form in forms)):
        return False
    try:
        return not _limit_message(path, typed(value, annotation_of(path)))
    except (ValueError, OverflowError):
        return False


def typed(value: Any, annotation: Any) -> Any:
    """Return a value that YAML or JSON has as the type of its key: a word of an enumeration as its member, …

    A whole number is also a float, and a number is a text. Raise ValueError for a value of another type, OverflowError
    for a number that is too large for a float.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for arg in args[:-1]:
            with contextlib.suppress(ValueError):
                return typed(value, arg)
        return typed(value, args[-1])
    if value is None and annotation is type(None):
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is Any or (annotation is bool and isinstance(value, bool)):
        return value
    if annotation is str and (isinstance(value, str) or is_number):
        return str(value)
    if (annotation is int and isinstance(value, int) and is_number) or (annotation is float and is_number):
        return annotation(value)
    if origin is list and isinstance(value, list):
        return [typed(item, args[0]) for item in value]
    if origin is dict and isinstance(value, dict):
        return dict(value)
    if isinstance(value, str) and value in enumerated(annotation):
        return value if origin is Literal else annotation(value)
    raise ValueError(value)


def recipe_of(tree: dict[str, Any], schema: type = Recipe) -> Any:
    """Return the recipe, a section of one or another dataclass of a tree of plain values, with defaults for the rest.

    Raise ValueError, KeyError or another error for a tree that is none.
    """
    specs = {key_of(spec): spec.name for spec in dataclasses.fields(schema)}
    given = {specs[word]: value for word, value in tree.items()}
    for name, value in given.items():
        if section := section_of(schema, name):
            given[name] = recipe_of(value, section)
            continue
        try:
            given[name] = typed(value, hints(schema)[name])
        except ValueError:
            raise ValueError(f"it has another value for {name}") from None
    return schema(**given)


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
        messages = [message] if message else [*item_messages(path, value)]
        problems += [Problem(each, path, where[set_here[-1]] if set_here else None) for each in messages]
    return problems


def item_messages(path: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with single values in a list of mappings; nothing if the key is not one (`items`)."""
    schema = limits_of(path).get("items")
    keys = [key_of(spec) for spec in dataclasses.fields(schema)] if schema else []
    for number, item in enumerate(value, 1) if schema else ():
        for word, value in item.items():
            if word not in keys:
                near = get_close_matches(word, keys, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"the keys here are: {', '.join(keys)}"
                yield f"source {number}: {word}: unknown key; {hint}"
            elif not accepts(f"{path}.{word}", value):
                yield f"source {number}: {word}: {_not_accepted_message(f'{path}.{word}', value)}"


def _not_accepted_message(path: str, value: Any) -> str:
    """Return why a key does not accept a value."""
    try:
        message = _limit_message(path, typed(value, annotation_of(path)))
    except (ValueError, OverflowError):
        message = None
    return message or wrong_type_message(path, value)


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
    return path.startswith(("model.config.", "data.columns.", "data.chat_template_kwargs."))


def _expected(path: str) -> str:
    return "a plain value" if below_open_mapping(path) else type_words(path)


def value_text(value: Any) -> str:
    """Return a value for a message, in at most 60 characters."""
    text = json.dumps(value) if isinstance(value, (bool, type(None))) else str(value)
    text = repr(value) if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "…"
