"""The keys of a recipe: one walk of the schema's dataclasses, the check of a value, and the JSON Schema.

Values are written in a safe subset of YAML, with scalars as in YAML 1.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fsdptrain import __version__
from fsdptrain.config.names import foreign_values
from fsdptrain.config.schema import NODE_RANGE, DataSource, Recipe
from fsdptrain.errors import Problem

OPEN_MAPPINGS = ("model.config", "data.columns", "data.chat_template_kwargs")  # their keys are free
LARGEST = 2**53  # of whole numbers: larger ones are not exact in the plan, which is JSON

# --- values as YAML --------------------------------------------------------------------------------------------------


class RecipeLoader(yaml.SafeLoader):
    """A safe YAML loader: 1e-5 is a number; 010, 12:30:45, yes and no are strings, unlike in YAML 1.1."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node. Raise ConstructorError for a key that is set twice."""
        words = [str(key_node.value) for key_node, _ in node.value]
        if twice := next((word for word in words if words.count(word) > 1), None):
            raise yaml.constructor.ConstructorError(problem=f"`{twice}` is set twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


RecipeLoader.yaml_implicit_resolvers = {}
_NUMBER = r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|nan)"
for _tag, _pattern, _first_characters in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)", "-+0123456789"),
    ("float", _NUMBER, "-+.0123456789"),
    ("null", "", [""]),
):
    RecipeLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first_characters)
    )


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {  # a text that either reader would take for something else is quoted  # noqa: RUF012
        first: [
            *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
            *RecipeLoader.yaml_implicit_resolvers.get(first, []),
        ]
        for first in (*yaml.SafeDumper.yaml_implicit_resolvers, *RecipeLoader.yaml_implicit_resolvers)
    }


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Outside of double quotes PyYAML writes Unicode's line breaks as they are, and YAML reads them as others.
    style = '"' if {*text} & {"\n", "\x85", "\u2028", "\u2029"} else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(value: Any) -> str:
    """Return a value as one line of YAML, for anywhere in a recipe; YAML 1.1 reads it as that value, too.

    It is written as the item of a list, because `a{` is a text by itself, but not inside of brackets.
    """
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True}
    return yaml.dump([value], Dumper=_Dumper, width=math.inf, **options).strip()[1:-1]


# --- the keys --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of the recipe. `forms` are what it accepts: types, words, patterns and shapes of small mappings."""

    path: str  # dotted, as in YAML
    attribute: str  # dotted, of a `Recipe`
    forms: tuple[Any, ...]
    doc: str
    spec: dataclasses.Field[Any]

    @property
    def limits(self) -> Mapping[str, Any]:
        """What `schema.key` declares of it."""
        return self.spec.metadata

    @property
    def default(self) -> Any:
        """A new copy of its default."""
        factory = self.spec.default_factory
        return self.spec.default if factory is dataclasses.MISSING else factory()

    @property
    def needs(self) -> dict[str, Sequence[str]]:
        """What it needs to have an effect: other key → the values that it must have, () for any that is set."""
        needs = self.limits.get("needs", {})
        return {needs: ()} if isinstance(needs, str) else dict(needs)

    @property
    def choices(self) -> list[str]:
        """The words that it accepts, by themselves or in a list."""
        return [word for form in self.forms for each in (form, *get_args(form)) for word in _words(each)]

    @property
    def type_words(self) -> str:
        """Its type in words: `a whole number or null`, `one of: all, completion`."""
        if "items" in self.limits:
            return f"a list of mappings such as {{{key_of(dataclasses.fields(self.limits['items'])[0])}: …}}"
        return _forms_text(self.forms)

    def read(self, value: Any) -> Any:
        """Return a value as the first form that fits has it; raises ValueError if none does."""
        return _typed(value, self.forms, strict="forms" in self.limits)


def key_of(spec: dataclasses.Field[Any]) -> str:
    """Return the YAML key of a dataclass field: `async` for `async_`."""
    return spec.name.rstrip("_")


_hints = functools.cache(get_type_hints)  # of a dataclass: attribute → type


def _docs(schema: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and of its bases say of each key."""
    text = "\n".join(inspect.cleandoc(cls.__doc__ or "") for cls in schema.__mro__ if dataclasses.is_dataclass(cls))
    return {name: re.sub(r"\n +", " ", doc) for name, doc in re.findall(r"^(\w+): (.+(?:\n +.+)*)", text, re.MULTILINE)}


def _walk(schema: type, path: str = "", attribute: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass and of its sections, in order; `SECTIONS` gets the names in each."""
    SECTIONS[path.rstrip(".")] = [key_of(spec) for spec in dataclasses.fields(schema)]
    docs = _docs(schema)
    for spec in dataclasses.fields(schema):
        annotation, own = _hints(schema)[spec.name], path + key_of(spec)
        if dataclasses.is_dataclass(annotation):
            yield from _walk(annotation, f"{own}.", f"{attribute}{spec.name}.")  # type: ignore[arg-type]
        else:
            forms = spec.metadata.get("forms") or tuple(_forms(annotation))
            yield Key(own, attribute + spec.name, forms, docs.get(key_of(spec), ""), spec)


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
_ALL = KEYS | {key.path: key for key in _walk(DataSource, "data.sources.")}  # those are no paths of the recipe
del SECTIONS["data.sources"]


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


# --- the check of a value --------------------------------------------------------------------------------------------


def faults(path: str, value: Any) -> list[str]:
    """Return what is wrong with a value of a key, or of a key of a source (`data.sources.weight`); [] if nothing is."""
    key = _ALL[path]
    try:
        found = key.read(value)
    except ValueError:
        return [_wrong_type_message(key, value)]
    return [*_item_faults(found)] if "items" in key.limits else [*_limit_faults(key, found)][:1]


def accepts(path: str, value: Any) -> bool:
    """Return whether a key accepts a value, by its type and its limits."""
    try:
        return not [*_limit_faults(KEYS[path], KEYS[path].read(value))]
    except ValueError:
        return False


def recipe_problems(recipe: Recipe) -> list[Problem]:
    """Return a problem for each value of a recipe that its key does not accept."""
    return [Problem(message, path) for path in KEYS for message in faults(path, value_at(recipe, path))]


def _typed(value: Any, form: Any, strict: bool = False) -> Any:
    """Return a value that YAML or JSON has as what `form` says: a word of an enumeration as its member, …

    A whole number is also a float. Unless `strict`, a number is a text, and a list may be empty. Several forms are
    alternatives. Raise ValueError for a value of another type.
    """
    origin, args = get_origin(form), get_args(form)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if form is Any or (value is None and form in (None, NoneType)) or (form is bool and isinstance(value, bool)):
        return value
    if form is str and (isinstance(value, str) or (is_number and not strict)):
        return str(value)
    if is_number and (form is float or (form is int and isinstance(value, int))):
        try:
            return form(value)
        except OverflowError:
            raise ValueError(value) from None
    if isinstance(value, str) and (value in _words(form) or (isinstance(form, re.Pattern) and form.fullmatch(value))):
        return form(value) if isinstance(form, type) else value
    if origin is list and isinstance(value, list) and (value or not strict):
        return [_typed(item, args[0], strict) for item in value]
    if isinstance(form, dict) and isinstance(value, dict):
        types = {name.rstrip("?"): kind for name, kind in form.items()}
        if value.keys() <= types.keys() and all(name in value or name.endswith("?") for name in form):
            return {name: _typed(item, types[name], strict=True) for name, item in value.items()}
    if origin is dict and isinstance(value, dict):
        return dict(value)
    alternatives = form if isinstance(form, tuple) else args if origin in (Union, UnionType) else ()
    for each in alternatives:
        with contextlib.suppress(ValueError):
            return _typed(value, each, strict)
    raise ValueError(value)


_BOUNDS: dict[str, tuple[Any, str, str | None]] = {  # limit → what breaks it, in words, and its name in JSON Schema
    "at_least": (operator.lt, "too small: must be at least", "minimum"),
    "above": (operator.le, "too small: must be above", "exclusiveMinimum"),
    "below": (operator.ge, "too large: must be below", None),
    "at_most": (operator.gt, "too large: must be at most", "maximum"),
}

# Limits of the numbers in small mappings: name → as those of keys.
_INNER_LIMITS: dict[str, dict[str, Any]] = {
    "train": {"at_least": 257},  # 256 bytes and the end-of-text token
    "fraction": {"above": 0, "below": 1},
    "every": {"at_least": 1}, "min_params": {"at_least": 1}, "max_rows": {"at_least": 1},
}  # fmt: skip


def _limit_faults(key: Key, value: Any) -> Iterator[str]:
    limits = key.limits
    if isinstance(value, str) and not value.strip() and "any_text" not in limits:
        yield "is empty"
    if most := limits.get("pair_below"):
        if len(value) != 2 or not all(0 <= item < most for item in value):
            yield f"{value_text(value)} is not a pair of numbers in [0, {most})"
    elif isinstance(value, dict):
        for name, item in value.items():
            try:
                _typed(item, limits.get("values", Any), strict=True)
            except ValueError:
                yield f"{name}: {value_text(item)} is not {_forms_text(limits['values'])}"
            if "forms" in limits:
                yield from (f"{name}: {fault}" for fault in _bound_faults(_INNER_LIMITS.get(name, {}), item))
    yield from _bound_faults(limits, value)


def _bound_faults(limits: Mapping[str, Any], value: Any) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{value} is not a finite number"
    for name, (is_broken, words, _) in _BOUNDS.items():
        if name in limits and is_broken(value, limits[name]):
            yield f"{value} is {words} {limits[name]}"
    if isinstance(value, int) and abs(value) > LARGEST:
        yield f"{value} is too large"


def _item_faults(items: list[dict[str, Any]]) -> Iterator[str]:
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


def _candidates(key: Key, value: Any) -> Iterator[Any]:
    """Yield values that may have been meant by an invalid one, the likeliest first."""
    known = foreign_values().get(key.path, {})
    as_listed = value.lower().replace("-", "") if isinstance(value, str) else value  # `ZeRO-1` as `zero1`
    if isinstance(value, (str, bool, NoneType)) and as_listed in known:
        yield known[as_listed]
    if isinstance(value, str):
        if (word := value.strip().lower()) in ("yes", "on", "true", "no", "off", "false"):
            yield word in ("yes", "on", "true")
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
        is_text = [isinstance(item, dict) and [*item.values()] == [None] for item in value]
        yield [f"{next(iter(item))}:" if text else item for item, text in zip(value, is_text, strict=True)]
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
        properties[key_of(spec)] = (
            _section_schema(_hints(schema)[spec.name], f"{own}.") if own in SECTIONS else _key_schema(_ALL[own])
        )
    doc = (schema.__doc__ or "").splitlines()[0]
    return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}


def _key_schema(key: Key) -> dict[str, Any]:
    limits, kind = key.limits, _forms_schema(key.forms)
    if "values" in limits:
        kind = {"type": "object", "additionalProperties": _forms_schema(limits["values"])}
    if "items" in limits:
        kind = {"type": "array", "items": _section_schema(DataSource, "data.sources.")}
    bounds = {as_json: limits[name] for name, (_, _, as_json) in _BOUNDS.items() if as_json and name in limits}
    return {"description": key.doc, "default": key.default, **kind, **bounds}


def _forms_schema(forms: Sequence[Any]) -> dict[str, Any]:
    words = [word for form in forms for word in _words(form)]
    options = [{"enum": words}] if words else []
    options += [_form_schema(form) for form in forms if not _words(form)]
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
