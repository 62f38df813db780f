"""Read a recipe strictly: YAML and overrides → `Recipe`, with a line number for every problem.

The stages: YAML text → nodes (for the line numbers) → values, checked by the schema → `${name}` references, resolved by
OmegaConf → `Recipe`. All problems are collected on the way and reported together.
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

from fsdptrain.config.names import (
    REPLACEMENTS,
    TRAINER_FSDP,
    leading_key,
    nearest_foreign_name,
    replacement_message,
    replacement_of,
)
from fsdptrain.config.reflection import (
    all_fields,
    all_paths,
    annotation_of,
    canonical_spelling,
    flat,
    key_of,
    section_of,
    type_words,
)
from fsdptrain.config.rules import ALTERNATIVES, cross_field_problems, sections_read
from fsdptrain.config.schema import Recipe
from fsdptrain.config.syntax import MAX_DEPTH, RecipeLoader, unsupported_yaml, yaml_text
from fsdptrain.config.values import (
    accepts,
    below_open_mapping,
    range_problems,
    recipe_of,
    typed,
    value_text,
    wrong_type_message,
)
from fsdptrain.errors import Problem, RecipeError, first_line

MAX_RECIPE_BYTES = 64_000
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
    return parse(read_recipe_text(path), path.name, path.resolve().parent, overrides or [])


def parse(text: str, name: str, folder: Path, overrides: list[str]) -> LoadedRecipe:
    """Read the text of a recipe, called `name` in messages and in `folder`; raises RecipeError as `load` does."""
    # Secrets come first and alone: other messages could repeat the line that contains one.
    if problems := [*_secrets(text, name, overrides)]:
        raise RecipeError(problems)
    written, overriding = _leaves_of_file(text, name, problems), _leaves_of_overrides(overrides, problems)
    replaced = {ALTERNATIVES.get(leaf.path) for leaf in overriding if leaf.value is not None}
    leaves = [*(leaf for leaf in written if leaf.path not in replaced), *overriding]
    where = {leaf.path: leaf.where for leaf in leaves}
    recipe = _assemble(leaves, problems)
    problems += range_problems(recipe, where)
    # Skip cross-field checks in sections that contain an invalid value: they would see the default in its place.
    faulty = {section for problem in problems for section in _sections(problem)}
    problems += [
        dataclasses.replace(p, where=where.get(p.field or "", name))
        for p in cross_field_problems(recipe, where)
        if not faulty & {None, *sections_read(p.field or "")}
    ]
    if problems:
        raise RecipeError(_readable(problems))
    return LoadedRecipe(_with_optimizer_defaults(recipe, where), where, text, folder)


def _with_optimizer_defaults(recipe: Recipe, where: dict[str, str]) -> Recipe:
    """Return the recipe with the defaults of its optimizer in place of those of the schema."""
    unset = {name: value for name, value in recipe.optim.name.traits.settings.items() if f"optim.{name}" not in where}
    return dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, **copy.deepcopy(unset)))


def read_recipe_text(path: Path) -> str:
    """Return the text of a recipe file. Raise RecipeError if it is not a regular file, too large, or not UTF-8."""
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


_SECRET_MESSAGE = (
    "seems to contain a secret, and recipes are copied to the run folder: remove it, and set HF_TOKEN in the "
    "environment"
)


def _secrets(text: str, name: str, overrides: list[str]) -> Iterator[Problem]:
    """Yield a problem for each line and override that seems to contain a secret, which is not repeated.

    Comments are included; and yield one if the overrides are too long together.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if SECRET.search(line):
            yield Problem(_SECRET_MESSAGE, where=f"{name}:{number}")
    for number, word in enumerate(overrides, 1):
        if SECRET.search(word):
            yield Problem(f"override {number} {_SECRET_MESSAGE}", where=COMMAND_LINE)
    if sum(map(len, overrides)) > MAX_RECIPE_BYTES:
        yield Problem(f"the overrides have more than {MAX_RECIPE_BYTES:,} characters", where=COMMAND_LINE)


def _sections(problem: Problem) -> Iterator[str | None]:
    """Yield the section of a problem and, for another tool's key, the section of the key that replaces it."""
    yield problem.field.partition(".")[0] if problem.field else None
    if text := replacement_of((problem.field or "").rpartition(".")[2]):
        yield (leading_key(text) or "").partition(".")[0]


def _readable(problems: list[Problem]) -> list[Problem]:
    """Return the first `MAX_PROBLEMS` problems in line order, long ones cut, and a count of the rest."""
    cut = [dataclasses.replace(p, message=p.message[:500], field=p.field and p.field[:200]) for p in problems]
    more = [Problem(f"and {len(cut) - MAX_PROBLEMS} more problems")] if len(cut) > MAX_PROBLEMS else []
    return list(_without_repeated_key_lists(sorted(cut, key=_line)[:MAX_PROBLEMS])) + more


def _without_repeated_key_lists(problems: list[Problem]) -> Iterator[Problem]:
    """Yield the problems, each list of valid keys only once: another tool's file has dozens of unknown keys."""
    seen = set()
    for problem in problems:
        repeated = problem.message in seen and problem.message.startswith(UNKNOWN)
        yield dataclasses.replace(problem, message=UNKNOWN) if repeated else problem
        seen.add(problem.message)


def _line(problem: Problem) -> tuple[int, int]:
    """Return a sort key: problems of the file by line, then those of the command line."""
    line = (problem.where or "").rpartition(":")[2]
    return (0, int(line)) if line.isdigit() else (1, 0)


def _leaves_of_file(text: str, name: str, problems: list[Problem]) -> list[Leaf]:
    """Return every value of a YAML file, with its line."""
    node = root_node(text, name, problems)
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        problems.append(Problem("a recipe must be a mapping of keys (`model:`, `data:`, …)", where=f"{name}:1"))
        return []
    return list(_walk(node, Recipe, "", name, problems))


def root_node(text: str, name: str, problems: list[Problem]) -> yaml.Node | None:
    """Return the root of a YAML file; None if it is empty or if problems were added."""
    try:
        problems += [Problem(message, where=f"{name}:{line}") for message, line in unsupported_yaml(text)]
        return None if problems else yaml.compose(text, Loader=RecipeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or first_line(error)
        hint = next((f" ({words})" for part, words in YAML_HINTS.items() if part in reason), "")
        problems.append(Problem(f"is not valid YAML: {reason}{hint}", where=f"{name}{line}"))
        return None


def _walk(node: yaml.MappingNode, schema: type, prefix: str, name: str, problems: list[Problem]) -> Iterator[Leaf]:
    """Yield the leaves of a mapping node whose keys should be the fields of the dataclass `schema`."""
    sections = {key_of(f): f for f in dataclasses.fields(schema)}
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem("a key must be a plain word", prefix.rstrip(".") or None, where))
            continue
        word = str(key_node.value)
        path = prefix + word
        if word in seen:
            problems.append(Problem(f"is set twice (first on line {seen[word]})", path, where))
            continue
        seen[word] = key_node.start_mark.line + 1
        if word not in sections:
            problems.append(Problem(_unknown_key_message(word, prefix, list(sections)), path, where))
            continue
        section = section_of(schema, sections[word].name)
        if section is None:
            before = len(problems)
            value = value_of_node(value_node, path, where, problems)
            if len(problems) == before:
                yield Leaf(path, canonical_spelling(path, value), where)
        elif isinstance(value_node, yaml.MappingNode):
            yield from _walk(value_node, section, f"{path}.", name, problems)
        elif not (isinstance(value_node, yaml.ScalarNode) and value_node.tag.endswith(":null")):
            problems.append(Problem(_section_message(value_node, section, path), path, where))


def _section_message(node: yaml.Node, section: type, path: str) -> str:
    """Return the message for a section that is set to a value: its keys, and a hint if the first accepts the value."""
    keys = [key_of(f) for f in dataclasses.fields(section)]
    message = f"is a section with the keys {', '.join(keys)}"
    written = value_of_node(node, path, "", [])
    words = [str(word).lower() for word in (written if isinstance(written, list) else str(written).split())]
    if path == "fsdp" and words and all(word in TRAINER_FSDP for word in words):
        meant = {key: item for word in words for key, item in TRAINER_FSDP[word].items()}
        return f"{message}; did you mean {yaml_text(meant)}?"
    value = canonical_spelling(f"{path}.{keys[0]}", written)
    if value is not None and accepts(f"{path}.{keys[0]}", value):
        message += f"; did you mean {{{keys[0]}: {yaml_text(value)}}}?"
    return message


def value_of_node(node: yaml.Node, path: str, where: str, problems: list[Problem]) -> Any:
    """Return the Python value of a node; None, with a problem added, if it has none."""
    loader = RecipeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = getattr(error, "problem", None) or first_line(error)
        problems.append(Problem(f"cannot be read: {reason}", path, where))
        return None
    finally:
        loader.dispose()


def _leaves_of_overrides(overrides: list[str], problems: list[Problem]) -> list[Leaf]:
    """Return the values of `key=value` overrides, read with the YAML rules of the file."""
    leaves = []
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not path:
            problems.append(Problem(f"{word!r} is not an override; write key=value", where=COMMAND_LINE))
            continue
        if not _is_key(path):
            problems.append(Problem(_not_a_key_message(path), path, COMMAND_LINE))
            continue
        try:
            message, _ = next(unsupported_yaml(text), (None, 0))
            value = None if message else yaml.load(text, Loader=RecipeLoader)  # a SafeLoader
        except (yaml.constructor.ConstructorError, ValueError) as error:
            message, value = f"cannot be read: {getattr(error, 'problem', None) or error}", None
        except yaml.YAMLError:
            message, value = None, text  # not YAML: the text itself, which may be what a string key needs
        if message:
            problems.append(Problem(message, path, COMMAND_LINE))
        else:
            leaves.append(Leaf(path, canonical_spelling(path, value), COMMAND_LINE))
    return leaves


def _is_key(path: str) -> bool:
    """Return whether a dotted path is a key of the recipe, or of an open mapping such as model.config."""
    schema: type | None = Recipe
    words = path.split(".")
    if not all(re.fullmatch(r"[^\W\d]\w*|\d+", word) for word in words) or len(words) > MAX_DEPTH:
        return False
    for i, word in enumerate(words):
        names = {key_of(f): f.name for f in dataclasses.fields(schema)} if schema else {}
        if word not in names or schema is None:
            return False
        schema = section_of(schema, names[word])
        if schema is None:  # a leaf: only open mappings have keys below it
            return i == len(words) - 1 or below_open_mapping(path)
    return False


def _not_a_key_message(path: str) -> str:
    """Return the message for an override of a path that is not a key: a section, a part of a value, or unknown."""
    parent, _, last = path.rpartition(".")
    if any(known.startswith(f"{path}.") for known in all_paths()):
        return f"is a section: set one of its keys ({', '.join(_keys_below(path))})"
    if parent in all_paths():
        return f"`{parent}` has no keys below it: set {parent} to {type_words(parent)}"
    return _unknown_key_message(last, f"{parent}." if parent else "", _keys_below(parent))


def _keys_below(parent: str) -> list[str]:
    """Return the dotted paths below a section, without the section's own; the top-level keys for an empty parent."""
    below = [p.removeprefix(f"{parent}.") for p in all_paths() if p.startswith(f"{parent}.")]
    return below or ([] if parent else [key_of(f) for f in dataclasses.fields(Recipe)])


def _unknown_key_message(word: str, prefix: str, siblings: list[str]) -> str:
    """Return the message for a key that does not exist: what replaces another tool's key, or the nearest name."""
    if text := replacement_of(word):
        return replacement_message(text)
    same_word = [path[: at.end()] for path in all_paths() if (at := re.search(rf"(?<=\.){re.escape(word)}\b", path))]
    near = get_close_matches(word, siblings, n=1, cutoff=0.6)
    foreign = None if same_word else nearest_foreign_name(word)
    if foreign and get_close_matches(word, [*near, foreign], n=1) == [foreign]:  # nearer than the recipe's own keys
        return f"{UNKNOWN}; did you mean `{foreign}`? It {replacement_message(REPLACEMENTS[foreign])}"
    suggestions = [f"{prefix}{name}" for name in near] + same_word
    suggestions += get_close_matches(prefix + word, all_paths(), n=1, cutoff=0.7)
    if suggestions:
        return f"{UNKNOWN}; did you mean `{suggestions[0]}`?"
    return f"{UNKNOWN}; the keys here are: {', '.join(siblings or [key_of(f) for f in dataclasses.fields(Recipe)])}"


def _assemble(leaves: list[Leaf], problems: list[Problem]) -> Recipe:
    """Return the `Recipe` of these values: check their types, resolve references, build the dataclass."""
    tree: dict[str, Any] = {}
    accepted: dict[str, Leaf] = {}
    wrong: list[Leaf] = []
    for leaf in leaves:
        if message := _not_json_message(leaf.value, any_text=leaf.path in _ANY_TEXT):
            problems.append(Problem(message, leaf.path, leaf.where))
        elif not (_has_reference(leaf.value) or _has_type(leaf.path, leaf.value)) or not _put(tree, leaf):
            wrong.append(leaf)
        else:
            accepted.pop(leaf.path, None)  # so that the values are in the order in which they were set
            accepted[leaf.path] = leaf
    # References are resolved when all values are set: one may point further down, and an override replaces a value.
    if any(_has_reference(leaf.value) for leaf in accepted.values()):
        tree, unresolved = _with_references(tree, accepted)
        wrong += unresolved
    problems += [Problem(wrong_type_message(leaf.path, leaf.value), leaf.path, leaf.where) for leaf in wrong]
    if wrong:  # start again without them: the other values are then checked beside defaults
        return _assemble([leaf for leaf in leaves if leaf not in wrong], [])
    recipe: Recipe = recipe_of(tree)
    return dataclasses.replace(recipe, output_dir=recipe.output_dir.replace("${name}", recipe.name))  # of the default


def _has_type(path: str, value: Any) -> bool:
    """Return whether a value has the type of its key; below an open mapping every value has it."""
    if not below_open_mapping(path):
        try:
            typed(value, annotation_of(path))
        except (ValueError, OverflowError):
            return False
    return True


def _has_reference(value: Any) -> bool:
    return any(isinstance(item, str) and "${" in item for item in _within(value))


def _put(tree: dict[str, Any], leaf: Leaf) -> bool:
    """Set a value in a tree of sections; return whether there is such a place."""
    *parents, last = leaf.path.split(".")
    place: Any = tree
    for word in parents:
        if isinstance(place, dict):
            place = place.setdefault(word, {})
        else:  # in a value of an open mapping
            place = place[int(word)] if _is_index(place, word) else None
    if not isinstance(place, dict) and not _is_index(place, last):
        return False
    place[last if isinstance(place, dict) else int(last)] = copy.deepcopy(leaf.value)
    return True


def _is_index(value: Any, word: str) -> bool:
    return isinstance(value, list) and word.isdigit() and int(word) < len(value)


def _with_references(tree: dict[str, Any], accepted: dict[str, Leaf]) -> tuple[dict[str, Any], list[Leaf]]:
    """Return the tree with its references resolved, and the values with references that cannot be."""
    from omegaconf import OmegaConf  # takes 0.1 s to import, and few recipes have references
    from omegaconf.errors import OmegaConfBaseException

    whole: dict[str, Any] = {}
    for path, value in flat(Recipe()).items():
        _put(whole, Leaf(path, value, ""))
    for leaf in accepted.values():
        _put(whole, leaf)
    config, unresolved = OmegaConf.create(whole), []
    for leaf in accepted.values():
        if _has_reference(leaf.value):
            try:
                value = OmegaConf.select(config, leaf.path, throw_on_missing=True)
                value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except (OmegaConfBaseException, ValueError, TypeError, RecursionError):
                unresolved.append(leaf)
                continue
            if _has_type(leaf.path, value):
                _put(tree, dataclasses.replace(leaf, value=value))
            else:
                unresolved.append(leaf)
    return tree, unresolved


_ANY_TEXT = {path for path, spec in all_fields() if spec.metadata.get("any_text")}


def _not_json_message(value: Any, any_text: bool) -> str | None:
    """Return why a value would not survive a round trip through the plan, which is JSON; None if it would."""
    for item in _within(value):
        if isinstance(item, float) and not math.isfinite(item):
            return f"{item} is not a finite number"
        if isinstance(item, dict) and not all(isinstance(name, str) for name in item):
            return f"{value_text(item)} has keys that are not strings: put quotes around them"
        if item == "???":  # to OmegaConf and Hydra
            return "??? stands for a value that is missing: replace it"
        if isinstance(item, str) and _bad_reference(item):
            return "only plain ${key} references are allowed; resolvers are refused"
        refused = ("Cs",) if any_text else ("Cc", "Cs")
        if isinstance(item, str) and (odd := next((c for c in item if category(c) in refused), None)):
            return f"contains the control character {odd!a}"
    return None


def _within(value: Any) -> Iterator[Any]:
    """Yield a value and, recursively, every key and value inside it."""
    yield value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _within(name)
            yield from _within(item)
    elif isinstance(value, list):
        for item in value:
            yield from _within(item)


def _bad_reference(text: str) -> bool:
    """Return whether a text contains a resolver, or a reference that is incomplete or escaped.

    An escaped reference would become a real one when the plan is read again.
    """
    plain = r"(?<!\\)\$\{[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*\}"
    return "${" in re.sub(plain, "", text)
