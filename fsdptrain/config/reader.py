"""Read a recipe strictly: YAML and overrides → `Recipe`, with a line number for every problem.

The stages: YAML text → nodes (for the line numbers) → values by key, each checked by the schema → `${name}` references,
resolved by OmegaConf → `Recipe` → rules between keys. All problems are collected on the way and reported together.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from unicodedata import category

import yaml

from fsdptrain.config.keys import (
    KEYS,
    OPEN_MAPPINGS,
    SECTIONS,
    RecipeLoader,
    accepts,
    canonical_spelling,
    faults,
    flat,
    recipe_of,
    value_text,
    yaml_text,
)
from fsdptrain.config.names import leading_key, nearest_foreign_name, replacement_message, replacement_of, replacements
from fsdptrain.config.rules import ALTERNATIVES, cross_field_problems
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import Problem, RecipeError, first_line

MAX_RECIPE_BYTES = 64_000
MAX_VALUES = 2_000  # the longest model configs list one or two words per layer
MAX_DEPTH = 32  # a model config has about three levels; OmegaConf and PyYAML overflow the stack at about eighty
MAX_PROBLEMS = 50  # reported at once
UNKNOWN = "unknown key"
COMMAND_LINE = "command line"  # where an override is written

# Part of a PyYAML message → what to do about it.
YAML_HINTS = {
    "'\\t'": "indent with spaces, not with tabs",
    "cannot start any token": "put quotes around the value",
    "expected ':'": "the key on this line or the line above needs a colon and a space after it",
    "mapping values are not allowed": "check the indentation; a value that contains a colon and a space needs quotes",
    "escape": "use single quotes around a string with backslashes",
    "<stream end>": "a bracket is not closed",
    "end of stream": "a quote is not closed",
    "another document": "a file contains one recipe: remove the `---` line",
}

# Secrets, which must not be in a recipe because it is copied to the run folder: tokens of the Hub, GitHub, AWS, W&B and
# others, recognised by their prefixes, and URLs with a password.
SECRET = re.compile(
    r"\b(?:hf_|api_org_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|wandb_v1_)[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b|://[^/\s:@]*:[^/\s@]+@"
)
SECRET_FOUND = (
    "seems to contain a secret, and recipes are copied to the run folder: remove it, and set HF_TOKEN in the "
    "environment"
)

PLAIN_REFERENCE = re.compile(r"(?<!\\)\$\{[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*\}")


@dataclass(frozen=True)
class Leaf:
    """One value of a recipe file or an override: its `path` in the schema, the value, and where it is written."""

    path: str
    value: Any
    where: str


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with the place of every value that was set explicitly: all other values are defaults."""

    recipe: Recipe
    where: dict[str, str]  # dotted path → "file:line" or COMMAND_LINE
    text: str  # of the file
    folder: Path  # of the file


def load(path: Path, overrides: list[str] | None = None) -> LoadedRecipe:
    """Read the recipe at `path` and apply dotlist `overrides` (`optim.lr=1e-5`).

    Raises RecipeError with every problem found: unknown keys, wrong types, values out of range, combinations that
    cannot be honoured, and keys that would have no effect.
    """
    return parse(_recipe_text(path), path.name, path.resolve().parent, overrides or [])


def parse(text: str, name: str, folder: Path, overrides: list[str]) -> LoadedRecipe:
    """Read the text of a recipe, called `name` in messages and in `folder`; raises RecipeError as `load` does."""
    # Secrets come first and alone: other messages could repeat the line that contains one.
    lines, words = enumerate(text.splitlines(), 1), enumerate(overrides, 1)
    problems = [Problem(SECRET_FOUND, where=f"{name}:{number}") for number, line in lines if SECRET.search(line)]
    problems += [
        Problem(f"override {number} {SECRET_FOUND}", where=COMMAND_LINE)
        for number, word in words
        if SECRET.search(word)
    ]
    if sum(map(len, overrides)) > MAX_RECIPE_BYTES:
        problems.append(Problem(f"the overrides have more than {MAX_RECIPE_BYTES:,} characters", where=COMMAND_LINE))
    if problems:
        raise RecipeError(problems)
    # What is written, and what each value is.
    written, overriding = _leaves_of_file(text, name, problems), _leaves_of_overrides(overrides, problems)
    replaced = {ALTERNATIVES.get(leaf.path) for leaf in overriding if leaf.value is not None}
    leaves = [*(leaf for leaf in written if leaf.path not in replaced), *overriding]
    where = {leaf.path: leaf.where for leaf in leaves}
    recipe = recipe_of(_tree(_checked(leaves, problems)))
    recipe = dataclasses.replace(recipe, output_dir=recipe.output_dir.replace("${name}", recipe.name))  # of the default
    # Skip rules between keys in sections that contain an invalid value: they would see the default in its place. The
    # sections that a rule reads are those of the keys that its message names.
    faulty = {section for problem in problems for section in _sections(problem)}
    problems += [
        dataclasses.replace(p, where=where.get(p.field or "", name))
        for p in cross_field_problems(recipe, where)
        if not faulty & {None, *re.findall(r"\b(\w+)\.\w", f"{p.field} {p.message}")}
    ]
    if problems:
        raise RecipeError(_readable(problems))
    unset = {key: value for key, value in recipe.optim.name.traits.settings.items() if f"optim.{key}" not in where}
    recipe = dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, **copy.deepcopy(unset)))
    return LoadedRecipe(recipe, where, text, folder)


def _recipe_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # reading a pipe may block; a device may never end
            raise OSError("it is not a regular file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_RECIPE_BYTES + 1)
        if len(raw) > MAX_RECIPE_BYTES:
            raise OSError(f"it is larger than {MAX_RECIPE_BYTES:,} bytes; a recipe is about a page of YAML")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise RecipeError([Problem(reason, where=str(path))])


def _sections(problem: Problem) -> Iterator[str | None]:
    """Yield the section of a problem and, for another tool's key, the section of the key that replaces it."""
    yield problem.field.partition(".")[0] if problem.field else None
    if text := replacement_of((problem.field or "").rpartition(".")[2]):
        yield (leading_key(text) or "").partition(".")[0]


def _readable(problems: list[Problem]) -> list[Problem]:
    """Return the first `MAX_PROBLEMS` problems in line order, long ones cut, and a count of the rest."""

    def line(problem: Problem) -> tuple[int, int]:  # problems of the file come first
        number = (problem.where or "").rpartition(":")[2]
        return (0, int(number)) if number.isdigit() else (1, 0)

    found: list[Problem] = []
    for problem in sorted(problems, key=line)[:MAX_PROBLEMS]:
        message = problem.message[:500]
        # Another tool's file has dozens of unknown keys: the valid ones are listed once.
        if message.startswith(UNKNOWN) and any(message == each.message for each in found):
            message = UNKNOWN
        found.append(dataclasses.replace(problem, message=message, field=problem.field and problem.field[:200]))
    if len(problems) > MAX_PROBLEMS:
        found.append(Problem(f"and {len(problems) - MAX_PROBLEMS} more problems"))
    return found


# --- what is written -------------------------------------------------------------------------------------------------


def _unsupported_yaml(text: str) -> Iterator[tuple[str, int]]:
    """Yield a message and a line for everything that YAML allows and a recipe does not.

    The text is read as a stream of events, so a deeply nested value is never built.
    """
    depth = values = 0
    for event in yaml.parse(text, Loader=RecipeLoader):
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            yield "anchors and aliases (`&`, `*`) are not allowed in a recipe: write the value out", line
        tag = getattr(event, "tag", None)
        if tag and tag not in ("!", "tag:yaml.org,2002:str"):
            yield f"the YAML tag {tag!r} is not allowed: a recipe cannot name Python objects", line
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            yield f"is nested more than {MAX_DEPTH} levels deep", line
            return
        values += isinstance(event, yaml.ScalarEvent)
        if values > MAX_VALUES:
            yield f"has more than {MAX_VALUES:,} keys and values", line
            return


def _leaves_of_file(text: str, name: str, problems: list[Problem]) -> list[Leaf]:
    try:
        problems += [Problem(message, where=f"{name}:{line}") for message, line in _unsupported_yaml(text)]
        node = None if problems else yaml.compose(text, Loader=RecipeLoader)
        if isinstance(node, yaml.MappingNode):
            return [*_walk(node, "", name, problems)]
        if node is not None:  # an empty file is no problem by itself
            problems.append(Problem("a recipe must be a mapping of keys (`model:`, `data:`, …)", where=f"{name}:1"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or first_line(error)
        hint = next((f" ({words})" for part, words in YAML_HINTS.items() if part in reason), "")
        problems.append(Problem(f"is not valid YAML: {reason}{hint}", where=f"{name}{line}"))
    return []


def _walk(node: yaml.MappingNode, section: str, name: str, problems: list[Problem]) -> Iterator[Leaf]:
    """Yield the leaves of a mapping node whose keys should be those of a section of the schema ("": the recipe)."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        where = f"{name}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem("a key must be a plain word", section or None, where))
            continue
        word = str(key_node.value)
        path = f"{section}.{word}" if section else word
        if word in seen:
            problems.append(Problem(f"is set twice (first on line {seen[word]})", path, where))
        elif word not in SECTIONS[section]:
            problems.append(Problem(_unknown_key_message(word, section), path, where))
        elif path in KEYS:
            yield from _leaf(value_node, path, where, problems)
        elif isinstance(value_node, yaml.MappingNode):
            yield from _walk(value_node, path, name, problems)
        elif not (isinstance(value_node, yaml.ScalarNode) and value_node.tag.endswith(":null")):
            # A hint if the first key of the section accepts the value.
            message, first = f"is a section with the keys {', '.join(SECTIONS[path])}", SECTIONS[path][0]
            for leaf in _leaf(value_node, f"{path}.{first}", where, []):
                if leaf.value is not None and accepts(leaf.path, leaf.value):
                    message += f"; did you mean {{{first}: {yaml_text(leaf.value)}}}?"
            problems.append(Problem(message, path, where))
        seen.setdefault(word, line)


def _leaf(node: yaml.Node | None, path: str, where: str, problems: list[Problem]) -> Iterator[Leaf]:
    """Yield the value of a node; if it has none, add a problem."""
    try:
        value = None if node is None else RecipeLoader("").construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = getattr(error, "problem", None) or first_line(error)
        problems.append(Problem(f"cannot be read: {reason}", path, where))
    else:
        yield Leaf(path, canonical_spelling(path, value), where)


def _leaves_of_overrides(overrides: list[str], problems: list[Problem]) -> list[Leaf]:
    leaves: list[Leaf] = []
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not path:
            problems.append(Problem(f"{word!r} is not an override; write key=value", where=COMMAND_LINE))
            continue
        fault = _not_a_key_message(path)
        try:
            fault = fault or next((message for message, _ in _unsupported_yaml(text)), None)
            node = None if fault else yaml.compose(text, Loader=RecipeLoader)
        except yaml.YAMLError:  # the text itself, which may be what a string key needs
            node = yaml.ScalarNode("tag:yaml.org,2002:str", text)
        if fault:
            problems.append(Problem(fault, path, COMMAND_LINE))
        else:
            leaves += _leaf(node, path, COMMAND_LINE, problems)
    return leaves


def _not_a_key_message(path: str) -> str | None:
    """Return what is wrong with the path of an override; None for a key, or a key of an open mapping."""
    parent, _, last = path.rpartition(".")
    words = path.split(".")
    if path in KEYS:
        return None
    if path in SECTIONS:
        return f"is a section: set one of its keys ({', '.join(SECTIONS[path])})"
    if _key_above(path) in OPEN_MAPPINGS:
        plain = len(words) <= MAX_DEPTH and all(re.fullmatch(r"\w+", word) for word in words)
        return None if plain else f"a key has letters, digits and _, and is at most {MAX_DEPTH} levels deep"
    if parent in KEYS:
        words_of_type = KEYS[parent].type_words
        way_out = f"write '{parent}={{{last}: …}}'" if f"{last}: …" in words_of_type else f"use {words_of_type}"
        return f"`{parent}` can only be set as a whole: {way_out}"
    return _unknown_key_message(last, parent)


def _key_above(path: str) -> str:
    """Return the open mapping that a path is below: `model.config` of `model.config.hidden_size`; else the path."""
    return next((key for key in OPEN_MAPPINGS if path.startswith(f"{key}.")), path)


def _unknown_key_message(word: str, section: str) -> str:
    """Return the message for a key that does not exist: what replaces another tool's key, or the nearest name."""
    other = f"{section}.{word}".replace(".", "_")  # in a section of another tool: lora.rank
    if text := replacement_of(word) or (section not in SECTIONS and replacement_of(other)):
        return replacement_message(text)
    here = SECTIONS.get(section, SECTIONS[""])
    same_word = [path for path in [*KEYS, *SECTIONS] if path.rpartition(".")[2] == word and "." in path]
    near = get_close_matches(word, here if section in SECTIONS else [], n=1, cutoff=0.6)
    foreign = None if same_word else nearest_foreign_name(word)
    if foreign and get_close_matches(word, [*near, foreign], n=1) == [foreign]:  # nearer than the recipe's own keys
        return f"{UNKNOWN}; did you mean `{foreign}`? It {replacement_message(replacements()[foreign])}"
    suggestions = [f"{section}.{name}".lstrip(".") for name in near] + same_word
    suggestions += get_close_matches(f"{section}.{word}".lstrip("."), KEYS, n=1, cutoff=0.7)
    if suggestions:
        return f"{UNKNOWN}; did you mean `{suggestions[0]}`?"
    return f"{UNKNOWN}; the keys here are: {', '.join(here)}"


# --- the values ------------------------------------------------------------------------------------------------------


def _checked(leaves: list[Leaf], problems: list[Problem]) -> dict[str, Any]:
    """Return the valid values, by key, with references resolved; add a problem for each other one."""
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    for leaf in leaves:
        key, value, field = _key_above(leaf.path), leaf.value, leaf.path
        messages = [*_not_plain_messages(value, any_text="any_text" in KEYS[key].limits)][:1]
        if not messages and key != leaf.path:
            value, messages = _with_item(values.get(key, {}), leaf.path.removeprefix(f"{key}.").split("."), value)
        if not messages and not _has_reference(value):
            field, messages = key, faults(key, value)
        problems += [Problem(message, field, leaf.where) for message in messages]
        if not messages:
            values[key], where[key] = value, leaf.where
    # References are resolved when all values are set: one may point further down, and an override replaces a value.
    referring = {key: value for key, value in values.items() if _has_reference(value)}
    for key, value in _resolved(values, referring).items() if referring else ():
        messages = faults(key, value)
        if _has_reference(value):
            messages = [
                f"{value_text(value)} does not give {KEYS[key].type_words}: ${{key}} refers to another key of the "
                "recipe, not to an environment variable (~ is your home folder)"
            ]
        problems += [Problem(message, key, where[key]) for message in messages]
        values[key] = value
        if messages:
            del values[key]
    return values


def _with_item(mapping: dict[str, Any], words: list[str], value: Any) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of an open mapping with one more value, and what prevents it."""
    mapping = copy.deepcopy(mapping)
    place: Any = mapping
    if not isinstance(place, dict):  # a reference
        return mapping, [f"{value_text(place)} has no keys below it: set it as a whole"]
    for word in words[:-1]:
        place = place.setdefault(word, {})
        if not isinstance(place, dict):
            return mapping, [f"`{word}` is {value_text(place)}, which has no keys below it: set it as a whole"]
    place[words[-1]] = value
    return mapping, []


def _resolved(values: dict[str, Any], referring: dict[str, Any]) -> dict[str, Any]:
    """Return the values that have references, resolved; as they are if they cannot be."""
    from omegaconf import OmegaConf  # takes 0.1 s to import, and few recipes have references
    from omegaconf.errors import OmegaConfBaseException

    config, found = OmegaConf.create(_tree(flat(Recipe()) | values)), dict(referring)
    for key in referring:
        try:
            value = OmegaConf.select(config, key, throw_on_missing=True)
            found[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError):
            continue
    return found


def _tree(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        place = tree
        for word in parents:
            place = place.setdefault(word, {})
        place[last] = value
    return tree


def _has_reference(value: Any) -> bool:
    return any(isinstance(item, str) and "${" in item for item in _within(value))


def _not_plain_messages(value: Any, any_text: bool) -> Iterator[str]:
    """Yield why a value would not survive a round trip through the plan, which is JSON."""
    refused = ("Cs",) if any_text else ("Cc", "Cs")
    for item in _within(value):
        if isinstance(item, float) and not math.isfinite(item):
            yield f"{item} is not a finite number"
        if isinstance(item, dict) and not all(isinstance(name, str) for name in item):
            yield f"{value_text(item)} has keys that are not strings: put quotes around them"
        if item == "???":  # to OmegaConf and Hydra
            yield "??? stands for a value that is missing: replace it"
        # A resolver, or an incomplete or escaped reference, which would become a real one when the plan is read again.
        if isinstance(item, str) and "${" in PLAIN_REFERENCE.sub("", item):
            yield "only plain ${key} references are allowed; resolvers are refused"
        if isinstance(item, str) and (odd := next((c for c in item if category(c) in refused), None)):
            yield f"contains the control character {odd!a}"


def _within(value: Any) -> Iterator[Any]:
    """Yield a value and, recursively, every key and value inside it."""
    yield value
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _within(item)
