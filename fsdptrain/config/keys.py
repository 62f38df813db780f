"""The keys of a recipe: one walk of the schema's dataclasses, the check of a value, and the JSON Schema."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fsdptrain import __version__
from fsdptrain.config.names import FOREIGN_VALUES
from fsdptrain.config.schema import NODE_RANGE, DataSource, Recipe
from fsdptrain.config.syntax import RecipeLoader, yaml_text
from fsdptrain.errors import Problem

OPEN_MAPPINGS = ("model.config", "data.columns", "data.chat_template_kwargs")  # their keys are free
LARGEST = 2**53  # of whole numbers: larger ones are not exact in the plan, which is JSON


@dataclass(frozen=True)
class Key:
    """A key of the recipe. `forms` are what it accepts: types, words, patterns and shapes of small mappings."""

    path: str  # dotted, as in YAML
    attribute: str  # dotted, of a `Recipe`
    forms: tuple[Any, ...]
    spec: dataclasses.Field[Any]

    @property
    def limits(self) -> dict[str, Any]:
        """What `schema.key` declares of it: its limits, its description (`doc`), …"""
        return dict(self.spec.metadata)

    @property
    def default(self) -> Any:
        """A new copy of its default."""
        if self.spec.default_factory is not dataclasses.MISSING:
            return self.spec.default_factory()
        return self.spec.default

    @property
    def needs(self) -> dict[str, Sequence[str]]:
        """What it needs to have an effect: other key → the values that it must have, () for any that is set."""
        needs = self.spec.metadata.get("needs", {})
        return {needs: ()} if isinstance(needs, str) else dict(needs)

    @property
    def choices(self) -> list[str]:
        """The words that it accepts, by themselves or in a list."""
        return [word for form in self.forms for each in (form, *get_args(form)) for word in _words(each)]

    @property
    def type_words(self) -> str:
        """Its type in words: `a whole number or null`, `one of: all, completion`."""
        if "items" in self.spec.metadata:
            return f"a list of mappings such as {{{key_of(dataclasses.fields(self.spec.metadata['items'])[0])}: …}}"
        return _forms_text(self.forms)


def key_of(spec: dataclasses.Field[Any]) -> str:
    """Return the YAML key of a dataclass field: `async` for `async_`."""
    return spec.name.rstrip("_")


_hints = functools.cache(get_type_hints)  # of a dataclass: attribute → type


def _walk(schema: type, path: str = "", attribute: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass and of its sections, in order; `SECTIONS` gets the names in each."""
    SECTIONS[path.rstrip(".")] = [key_of(spec) for spec in dataclasses.fields(schema)]
    for spec in dataclasses.fields(schema):
        annotation, own = _hints(schema)[spec.name], path + key_of(spec)
        if dataclasses.is_dataclass(annotation):
            yield from _walk(annotation, f"{own}.", f"{attribute}{spec.name}.")  # type: ignore[arg-type]
        else:
            forms = spec.metadata.get("forms") or tuple(_forms(annotation))
            yield Key(own, attribute + spec.name, forms, spec)


def _forms(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _forms(each)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        yield None if annotation is NoneType else annotation


SECTIONS: dict[str, list[str]] = {}  # path of a section ("" is the recipe) → the names in it
KEYS = {key.path: key for key in _walk(Recipe)}
# Those of a source in data.sources, which are no paths of the recipe.
_SOURCE_KEYS = {key.path: key for key in _walk(DataSource, "data.sources.")}
del SECTIONS["data.sources"]
_ALL = KEYS | _SOURCE_KEYS


def value_at(recipe: Recipe, path: str) -> Any:
    """Return the value at a dotted YAML path."""
    return functools.reduce(getattr, KEYS[path].attribute.split("."), recipe)


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as one flat mapping from dotted YAML path to value; a member of an Enum is its value."""
    values = {path: value_at(recipe, path) for path in KEYS}
    return {path: value.value if isinstance(value, Enum) else value for path, value in values.items()}


def unused_with(other: str, value: Any) -> dict[str, Any]:
    """Return the keys that have no effect if the key `other` has this value: path → the value that means unset."""
    needed = {path: key.needs.get(other) for path, key in KEYS.items()}
    return {path: KEYS[path].limits.get("unset") for path, values in needed.items() if values and value not in values}


# --- the check of a value --------------------------------------------------------------------------------------------


def faults(path: str, value: Any) -> list[str]:
    """Return what is wrong with a value of a key, or of a key of a source (`data.sources.weight`); [] if nothing is."""
    key = _ALL[path]
    try:
        found = _read(key, value)
    except (ValueError, OverflowError):
        return [_wrong_type_message(key, value)]
    if "items" in key.limits:
        return [*_item_faults(found)]
    message = _limit_message(key, found)
    return [] if message is None else [message]


def accepts(path: str, value: Any) -> bool:
    """Return whether a key accepts a value, by its type and its limits."""
    try:
        return _limit_message(KEYS[path], _read(KEYS[path], value)) is None
    except (ValueError, OverflowError):
        return False


def recipe_problems(recipe: Recipe) -> list[Problem]:
    """Return a problem for each value of a recipe that its key does not accept."""
    return [Problem(message, path) for path in KEYS for message in faults(path, value_at(recipe, path))]


def recipe_of(tree: dict[str, Any], schema: type = Recipe) -> Any:
    """Return the recipe, a section of one or another dataclass of a tree of plain values, with defaults for the rest.

    Raise ValueError, KeyError or another error for a tree that is none.
    """
    specs = {key_of(spec): spec.name for spec in dataclasses.fields(schema)}
    given = {specs[word]: value for word, value in tree.items()}
    for name, value in given.items():
        annotation = _hints(schema)[name]
        if dataclasses.is_dataclass(annotation):
            given[name] = recipe_of(value, annotation)  # type: ignore[arg-type]
            continue
        try:
            given[name] = _typed(value, annotation)
        except ValueError:
            raise ValueError(f"it has another value for {name}") from None
    return schema(**given)


def _read(key: Key, value: Any) -> Any:
    """Return a value as the first form of a key that fits has it; raise as `_typed` does."""
    for form in key.forms[:-1]:
        with contextlib.suppress(ValueError):
            return _typed(value, form, strict="forms" in key.limits)
    return _typed(value, key.forms[-1], strict="forms" in key.limits)


def _typed(value: Any, form: Any, strict: bool = False) -> Any:
    """Return a value that YAML or JSON has as what `form` says: a word of an enumeration as its member, …

    A whole number is also a float. Unless `strict`, a number is a text, and a list may be empty. Raise ValueError for a
    value of another type, OverflowError for a number that is too large for a float.
    """
    origin, args = get_origin(form), get_args(form)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if form is Any or (value is None and form in (None, NoneType)) or (form is bool and isinstance(value, bool)):
        return value
    if form is str and (isinstance(value, str) or (is_number and not strict)):
        return str(value)
    if is_number and (form is float or (form is int and isinstance(value, int))):
        return form(value)
    if isinstance(value, str) and (value in _words(form) or (isinstance(form, re.Pattern) and form.fullmatch(value))):
        return form(value) if isinstance(form, type) else value
    if origin is list and isinstance(value, list) and (value or not strict):
        return [_typed(item, args[0], strict) for item in value]
    if isinstance(value, dict) and (origin is dict or (isinstance(form, dict) and _has_shape(value, form))):
        return dict(value)
    for each in args if origin in (Union, UnionType) else ():
        with contextlib.suppress(ValueError):
            return _typed(value, each, strict)
    raise ValueError(value)


def _has_shape(value: dict[str, Any], shape: dict[str, Any]) -> bool:
    """Return whether a mapping has these names with values of these types; those that end in `?` are optional."""
    types = {name.rstrip("?"): kind for name, kind in shape.items()}
    needed = {name for name in shape if not name.endswith("?")}
    return needed <= value.keys() <= types.keys() and all(_fits(item, types[name]) for name, item in value.items())


def _fits(value: Any, form: Any) -> bool:
    try:
        _typed(value, form, strict=True)
    except (ValueError, OverflowError):
        return False
    return True


# Limits of the numbers in small mappings: name → as those of keys.
_INNER_LIMITS: dict[str, dict[str, Any]] = {
    "train": {"at_least": 257},  # 256 bytes and the end-of-text token
    "fraction": {"above": 0, "below": 1},
    "every": {"at_least": 1}, "min_params": {"at_least": 1}, "max_rows": {"at_least": 1},
}  # fmt: skip


def _limit_message(key: Key, value: Any) -> str | None:
    """Return how a value, which has the type of its key, breaks the key's limits; None if it does not."""
    if isinstance(value, str) and not value.strip() and "any_text" not in key.limits:
        return "is empty"
    if "pair_below" in key.limits and not (
        len(value) == 2 and all(0 <= item < key.limits["pair_below"] for item in value)
    ):
        return f"{value_text(value)} is not a pair of numbers in [0, {key.limits['pair_below']})"
    for name, item in value.items() if "values" in key.limits else ():
        if not any(_fits(item, form) for form in key.limits["values"]):
            return f"{name}: {value_text(item)} is not {_forms_text(key.limits['values'])}"
    for name, item in value.items() if isinstance(value, dict) and "forms" in key.limits else ():
        if message := _bound_message(_INNER_LIMITS.get(name, {}), item):
            return f"{name}: {message}"
    return _bound_message(key.limits, value)


def _bound_message(limits: dict[str, Any], value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a finite number"
    if "at_least" in limits and value < limits["at_least"]:
        return f"{value} is too small: must be at least {limits['at_least']}"
    if "above" in limits and value <= limits["above"]:
        return f"{value} is too small: must be above {limits['above']}"
    if "below" in limits and value >= limits["below"]:
        return f"{value} is too large: must be below {limits['below']}"
    if "at_most" in limits and value > limits["at_most"]:
        return f"{value} is too large: must be at most {limits['at_most']}"
    return f"{value} is too large" if isinstance(value, int) and abs(value) > LARGEST else None


def _item_faults(items: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with single values of the items of `data.sources`."""
    names = [key_of(spec) for spec in dataclasses.fields(DataSource)]
    for number, item in enumerate(items, 1):
        for name, value in item.items():
            if name in names:
                yield from (f"source {number}: {name}: {fault}" for fault in faults(f"data.sources.{name}", value))
                continue
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"the keys here are: {', '.join(names)}"
            yield f"source {number}: {name}: unknown key; {hint}"


def _wrong_type_message(key: Key, value: Any) -> str:
    """Return the message for a value that its key does not accept: what it accepts, and a valid value near it."""
    if value == [] and list[str] in key.forms:
        return f"[] is empty: name at least one{''.join(f', or use {word}' for word in key.choices)}"
    near = next((meant for meant in _candidates(key, value) if key.path in KEYS and accepts(key.path, meant)), None)
    hint = ""
    if isinstance(near, (int, float)) and isinstance(value, str) and _number(value) == near:
        hint = f"; did you mean {value.strip().replace(',', '')}, a number without quotes?"
    elif value is None and near == []:
        hint = "; use [] for none"
    elif near is not None:
        hint = f"; did you mean {yaml_text(near)}?"
    return f"{value_text(value)} is not {key.type_words}{hint}"


def _plain(value: Any) -> Any:
    """Return a value as other tools' values are listed: a string in small letters, `ZeRO-1` as `zero1`."""
    return value.lower().replace("-", "") if isinstance(value, str) else value


def _candidates(key: Key, value: Any) -> Iterator[Any]:
    """Yield values that may have been meant by an invalid one, the likeliest first."""
    known = FOREIGN_VALUES.get(key.path, {})
    if isinstance(value, (str, bool, NoneType)) and _plain(value) in known:
        yield known[_plain(value)]
    if isinstance(value, str):
        if value.strip().lower() in ("yes", "on", "true", "no", "off", "false"):
            yield value.strip().lower() in ("yes", "on", "true")
        if (number := _number(value)) is not None:
            yield number
        near = get_close_matches(value.lower(), [word.lower() for word in key.choices], n=1)
        yield from (canonical_spelling(key.path, word) for word in near)
        yield [value]
    if isinstance(value, int):
        yield bool(value)
    if value is None and key.default == []:
        yield []
    if isinstance(value, list):  # without quotes, a text that ends with a colon is a mapping
        yield [
            f"{next(iter(item))}:" if isinstance(item, dict) and [*item.values()] == [None] else item for item in value
        ]
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    for form in key.forms:
        if isinstance(form, dict):  # the value may be given without its mapping
            yield {next(iter(form)).rstrip("?"): value}


def _number(text: str) -> Any:
    """Return the number that a string would be without quotes and commas; None if it would not be one."""
    try:
        value = yaml.load(text.strip().replace(",", ""), Loader=RecipeLoader) if len(text) < 30 else None
    except (yaml.YAMLError, ValueError):
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_DTYPE_WORDS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def canonical_spelling(path: str, value: Any) -> Any:
    """Return a word of an enumeration (`full_shard`, `bf16`) in the spelling of the schema; other values unchanged."""
    if path not in KEYS or not isinstance(value, str):
        return value
    plain = value.strip().lower().removeprefix("torch.").lstrip("_").replace("-", "_")
    plain = _DTYPE_WORDS.get(plain, plain)
    return next((word for word in KEYS[path].choices if word.lower() == plain), value)


# --- in words, and as JSON Schema ------------------------------------------------------------------------------------

_TYPES: dict[Any, tuple[str, dict[str, Any]]] = {  # in words, and as JSON Schema
    int: ("a whole number", {"type": "integer"}), float: ("a number", {"type": "number"}),
    str: ("a string", {"type": "string"}), bool: ("true or false", {"type": "boolean"}),
    None: ("null", {"type": "null"}), Any: ("any value", {}),
    NODE_RANGE: ("a string MIN:MAX", {"type": "string", "pattern": f"^{NODE_RANGE.pattern}$"}),
}  # fmt: skip


def value_text(value: Any) -> str:
    """Return a value for a message, in at most 60 characters."""
    text = json.dumps(value) if isinstance(value, (bool, NoneType)) else str(value)
    text = repr(value) if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "…"


def _words(form: Any) -> list[str]:
    """Return the words of an enumeration, or the word that a form is; [] for any other form."""
    if isinstance(form, type) and issubclass(form, Enum):
        return [word.value for word in form]
    if get_origin(form) is Literal:
        return list(get_args(form))
    return [form] if isinstance(form, str) else []


def _forms_text(forms: Sequence[Any]) -> str:
    words = [word for form in forms for word in _words(form)]
    texts = words + [_form_text(form) for form in forms if not _words(form)]
    return f"one of: {', '.join(texts)}" if words or len(texts) > 2 else " or ".join(texts)


def _form_text(form: Any) -> str:
    if isinstance(form, dict):
        return "{" + ", ".join(f"{name.rstrip('?')}: …" for name in form) + "}"
    if get_origin(form) is list and get_args(form) != (float,):
        return "a list of " + (", ".join(_words(get_args(form)[0])) or "strings")
    return {list: "a list", dict: "a mapping"}.get(get_origin(form)) or _TYPES[form][0]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:fsdptrain:recipe:{__version__}",
        "title": "fsdptrain recipe",
        **_section_schema(Recipe, ""),
    }


def _section_schema(schema: type, path: str) -> dict[str, Any]:
    properties = {}
    for spec in dataclasses.fields(schema):
        own = path + key_of(spec)
        section = own in SECTIONS
        properties[key_of(spec)] = (
            _section_schema(_hints(schema)[spec.name], f"{own}.") if section else _key_schema(_ALL[own])
        )
    doc = (schema.__doc__ or "").splitlines()[0]
    return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}


_BOUNDS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum"}


def _key_schema(key: Key) -> dict[str, Any]:
    kind = _forms_schema(key.forms)
    if "values" in key.limits:
        kind = {"type": "object", "additionalProperties": _forms_schema(key.limits["values"])}
    if "items" in key.limits:
        kind = {"type": "array", "items": _section_schema(DataSource, "data.sources.")}
    bounds = {_BOUNDS[name]: limit for name, limit in key.limits.items() if name in _BOUNDS}
    return {"description": key.limits["doc"], "default": key.default, **kind, **bounds}


def _forms_schema(forms: Sequence[Any]) -> dict[str, Any]:
    words = [word for form in forms for word in _words(form)]
    others = [_form_schema(form) for form in forms if not _words(form)]
    options = [{"enum": words}, *others] if words else others
    return options[0] if len(options) == 1 else {"anyOf": options}


def _form_schema(form: Any) -> dict[str, Any]:
    if isinstance(form, dict):
        return {
            "type": "object",
            "properties": {name.rstrip("?"): _forms_schema([kind]) for name, kind in form.items()},
            "required": [name for name in form if not name.endswith("?")],
            "additionalProperties": False,
        }
    if get_origin(form) is list:
        return {"type": "array", "items": _forms_schema(get_args(form))}
    if get_origin(form) is dict:
        return {"type": "object", "additionalProperties": _forms_schema(get_args(form)[1:])}
    return dict(_TYPES[form][1])
