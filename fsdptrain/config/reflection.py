"""Read the schema of a recipe: paths, types, limits and needs of its keys, in words and as JSON Schema."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdptrain import __version__
from fsdptrain.config.schema import NODE_RANGE, Recipe


def key_of(spec: dataclasses.Field[Any]) -> str:
    """Return the YAML key of a dataclass field: `async` for `async_`."""
    return spec.name.rstrip("_")


hints = functools.cache(get_type_hints)  # of a section: attribute → type


def section_of(schema: type, name: str) -> type | None:
    """Return the dataclass of a field that is a section of the recipe; None for a leaf."""
    annotation = hints(schema)[name]
    return annotation if dataclasses.is_dataclass(annotation) and isinstance(annotation, type) else None


@functools.cache
def all_fields(schema: type = Recipe) -> tuple[tuple[str, dataclasses.Field[Any]], ...]:
    """Return every leaf of the schema as (dotted YAML path, dataclass field), in order."""
    leaves: list[tuple[str, dataclasses.Field[Any]]] = []
    for spec in dataclasses.fields(schema):
        if section := section_of(schema, spec.name):
            leaves += ((f"{key_of(spec)}.{path}", leaf) for path, leaf in all_fields(section))
        else:
            leaves.append((key_of(spec), spec))
    return tuple(leaves)


def all_paths() -> list[str]:
    """Return every dotted YAML path of the schema, in order."""
    return [path for path, _ in all_fields()]


def value_at(recipe: Recipe, path: str) -> Any:
    """Return the value at a dotted YAML path."""
    value: Any = recipe
    for word in attribute(path).split("."):
        value = getattr(value, word)
    return value


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as one flat mapping from dotted YAML path to value; a member of an Enum is its value."""
    values = {path: value_at(recipe, path) for path in all_paths()}
    return {path: value.value if isinstance(value, Enum) else value for path, value in values.items()}


def attribute(path: str) -> str:
    """Return the attribute path of a dotted YAML path: `checkpoint.async_` for `checkpoint.async`."""
    return f"{path}_" if path in ("checkpoint.async", "adapter.from") else path


def matches_form(value: Any, form: Any) -> bool:
    """Return whether a value matches one of the forms that `key(forms=…)` declares."""
    if isinstance(form, dict):
        allowed = {name.rstrip("?"): kind for name, kind in form.items()}
        needed = {name for name in form if not name.endswith("?")}
        return (
            isinstance(value, dict)
            and needed <= value.keys() <= allowed.keys()
            and all(matches_form(item, allowed[name]) for name, item in value.items())
        )
    if get_origin(form) is list:
        return isinstance(value, list) and bool(value) and all(matches_form(item, get_args(form)[0]) for item in value)
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    if words := enumerated(form):
        return value in words
    if form is bool:
        return isinstance(value, bool)
    if isinstance(form, type):
        numbers = (int, float) if form is float else form
        return isinstance(value, numbers) and not isinstance(value, bool)
    return bool(value == form)


def form_words(forms: tuple[Any, ...]) -> str:
    """Return the forms of a key of several types, in words."""

    def show(form: Any) -> str:
        if isinstance(form, dict):
            return "{" + ", ".join(f"{name.rstrip('?')}: …" for name in form) + "}"
        if get_origin(form) is list:
            return "a list of names"
        return _TYPE_WORDS.get(form, "null" if form is None else str(form))

    words = [show(form) for form in forms]
    return words[0] if len(words) == 1 else f"one of: {', '.join(words)}"


_TYPE_WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", str: "a string", bool: "true or false", list: "a list", dict: "a mapping",
    NODE_RANGE: "a string MIN:MAX",
}  # fmt: skip


def limits_of(path: str) -> dict[str, Any]:
    """Return what `key` declares of a key: its limits, its description (`doc`), …"""
    return dict(_leaf(path)[0].metadata)


def needs_of(path: str) -> dict[str, Sequence[str]]:
    """Return what a key needs to have an effect: other key → the values that it must have, () for any that is set."""
    needs = limits_of(path).get("needs", {})
    return {needs: ()} if isinstance(needs, str) else dict(needs)


def unused_with(other: str, value: Any) -> dict[str, Any]:
    """Return the keys that have no effect if the key `other` has this value: path → the value that means unset."""
    needed = ((path, spec.metadata.get("unset"), needs_of(path).get(other)) for path, spec in all_fields())
    return {path: unset for path, unset, values in needed if values and value not in values}


def forms_of(path: str) -> tuple[Any, ...]:
    """Return the forms of a key of several types; () for any other key."""
    return tuple(limits_of(path).get("forms", ()))


def choices_of(path: str) -> list[str]:
    """Return the words that a key accepts: those of its enumeration or of its forms."""
    spec, annotation = _leaf(path)
    kinds = [annotation, *get_args(annotation)]
    words = [word for kind in kinds for word in enumerated(kind)]
    return words or [form for form in spec.metadata.get("forms", ()) if isinstance(form, str)]


def enumerated(annotation: Any) -> list[str]:
    """Return the words of a Literal or an Enum; [] for any other annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word.value for word in annotation] if isinstance(annotation, type) and issubclass(annotation, Enum) else []


_DTYPE_WORDS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def canonical_spelling(path: str, value: Any) -> Any:
    """Return a word of an enumeration (`full_shard`, `bf16`) in the spelling of the schema; other values unchanged."""
    if not isinstance(value, str):
        return value
    plain = value.strip().lower().removeprefix("torch.").lstrip("_").replace("-", "_")
    plain = _DTYPE_WORDS.get(plain, plain)
    return next((word for word in choices_of(path) if word.lower() == plain), value)


@functools.cache
def _leaf(path: str) -> tuple[dataclasses.Field[Any], Any]:
    """Return the field and the annotation of a key; for a key below model.config, those of model.config.

    A key of the items of a list is below that of the list: `data.sources.weight`.
    """
    schema: type = Recipe
    for word in attribute(path).split("."):
        spec = next(f for f in dataclasses.fields(schema) if f.name == word)
        annotation = hints(schema)[word]
        section = section_of(schema, word) or spec.metadata.get("items")
        if section is None:
            break
        schema = section
    return spec, annotation


def annotation_of(path: str) -> Any:
    """Return the type of a key."""
    return _leaf(path)[1]


def type_words(path: str) -> str:
    """Return the type of a key in words: `a whole number or null`, `one of: all, completion`."""
    spec, annotation = _leaf(path)
    if "items" in spec.metadata:
        return f"a list of mappings such as {{{key_of(dataclasses.fields(spec.metadata['items'])[0])}: …}}"
    return form_words(spec.metadata["forms"]) if "forms" in spec.metadata else _annotation_words(annotation)


def _annotation_words(annotation: Any) -> str:
    if words := enumerated(annotation):
        return "one of: " + ", ".join(words)
    if get_origin(annotation) is list and (words := enumerated(get_args(annotation)[0])):
        return f"a list of {', '.join(words)}"
    if get_origin(annotation) is list and get_args(annotation) == (str,):
        return "a list of strings"
    if get_origin(annotation) in (list, dict):
        return _TYPE_WORDS[get_origin(annotation)]
    if args := get_args(annotation):
        return " or ".join("null" if arg is type(None) else _annotation_words(arg) for arg in args)
    return _TYPE_WORDS.get(annotation, str(annotation))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe, for completion and checks in editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:fsdptrain:recipe:{__version__}",
        "title": "fsdptrain recipe",
        **_section_schema(Recipe),
    }


def _section_schema(schema: type) -> dict[str, Any]:
    properties = {}
    for spec in dataclasses.fields(schema):
        section = section_of(schema, spec.name)
        properties[key_of(spec)] = _section_schema(section) if section else _leaf_schema(spec, hints(schema)[spec.name])
    doc = (schema.__doc__ or "").splitlines()[0]
    return {"type": "object", "description": doc, "properties": properties, "additionalProperties": False}


_BOUNDS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum"}


def _leaf_schema(spec: dataclasses.Field[Any], annotation: Any) -> dict[str, Any]:
    forms = spec.metadata.get("forms")
    kind = {"anyOf": [_form_schema(form) for form in forms]} if forms else _type_schema(annotation)
    if "values" in spec.metadata:
        values = [_form_schema(form) for form in spec.metadata["values"]]
        kind = {"type": "object", "additionalProperties": {"anyOf": values}}
    if "items" in spec.metadata:
        kind = {"type": "array", "items": _section_schema(spec.metadata["items"])}
    default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
    bounds = {_BOUNDS[name]: limit for name, limit in spec.metadata.items() if name in _BOUNDS}
    return {"description": spec.metadata["doc"], "default": default, **kind, **bounds}


_JSON_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, Any: {},
}  # fmt: skip


def _type_schema(annotation: Any) -> dict[str, Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if words := enumerated(annotation):
        return {"enum": words}
    if origin is list:
        return {"type": "array", "items": _type_schema(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(args[1])}
    if origin in (Union, UnionType):
        return {"anyOf": [_type_schema(arg) for arg in args]}
    return dict(_JSON_TYPES[annotation])


def _form_schema(form: Any) -> dict[str, Any]:
    if isinstance(form, dict):
        return {
            "type": "object",
            "properties": {name.rstrip("?"): _type_schema(kind) for name, kind in form.items()},
            "required": [name for name in form if not name.endswith("?")],
            "additionalProperties": False,
        }
    if form is None or isinstance(form, str):
        return {"const": form}
    if isinstance(form, re.Pattern):
        return {"type": "string", "pattern": f"^{form.pattern}$"}
    return _type_schema(form)
