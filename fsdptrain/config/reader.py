"""Reading a recipe strictly: YAML and overrides → `Recipe`, with the line number in every complaint.

Reading goes in one direction: YAML text → nodes (for the line numbers) → values → an OmegaConf structured config (for
the types and `${name}` references) → `Recipe`. Everything wrong is collected on the way and reported at once.
"""

from __future__ import annotations

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
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdptrain.config.names import home_of, key_in, sentence
from fsdptrain.config.rules import _relations
from fsdptrain.config.schema import Recipe, all_fields, all_paths, attribute, key_of, section_of, spelled, type_words
from fsdptrain.config.syntax import MAX_DEPTH, _RecipeLoader, _refused_yaml
from fsdptrain.config.values import _accepted, _not_taken, _open, _out_of_range, _show, _unconverted, _yaml
from fsdptrain.errors import Problem, RecipeError, first_line

MAX_RECIPE_BYTES = 64_000


MAX_PROBLEMS = 50  # told at once


UNKNOWN = "unknown key"


# What PyYAML says, in part, and what to do about it.
YAML_HINTS = {
    "'\\t'": "a tab: indent with spaces",
    "cannot start any token": "put quotes around the value",
    "expected ':'": "a key, here or in the line above, needs a colon and a space behind it",
    "mapping values are not allowed": "check the indentation; a value with a colon and a space in it needs quotes",
    "escape": "use single quotes around a text with backslashes",
    "<stream end>": "a bracket is not closed",
    "end of stream": "a quote is not closed",
    "another document": "a file holds one recipe: no `---` between its parts",
}


# What a recipe must not hold, for it is kept in the run folder: tokens of the Hub, of GitHub, AWS, W&B and others by
# their beginnings, and a URL with a password.
SECRET = re.compile(
    r"\b(?:hf_|api_org_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|wandb_v1_)[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b|://[^/\s:@]*:[^/\s@]+@"
)


@dataclass(frozen=True)
class Leaf:
    """One value somebody wrote: `path` in the schema, the value, and where it was written."""

    path: str
    value: Any
    where: str


@dataclass(frozen=True)
class Written:
    """A recipe together with what the person actually wrote: needed to tell a default from a wish."""

    recipe: Recipe
    where: dict[str, str]  # dotted path → "file:line" or "command line"
    text: str
    folder: Path


def load(path: Path, overrides: list[str] | None = None) -> Written:
    """Read the recipe at `path` and apply dotlist `overrides` (`optim.lr=1e-5`).

    Raises RecipeError with every problem found: unknown keys, wrong types, values out of range, combinations that
    cannot be honoured, and keys that would have no effect.
    """
    text = _text_of(path)
    overrides = overrides or []
    if problems := [*_secrets(text, path.name), *_overlong(overrides)]:
        raise RecipeError(problems)  # and nothing else, for other problems would repeat what is written
    leaves = [*_leaves_of_file(text, path.name, problems), *_leaves_of_overrides(overrides, problems)]
    where = {leaf.path: leaf.where for leaf in leaves}
    recipe = _assemble(leaves, problems)
    problems += _out_of_range(recipe, where)
    faulty = {section for problem in problems for section in _sections(problem)}  # their relations would mislead
    problems += [
        dataclasses.replace(p, where=where.get(p.field or "", path.name))
        for p in _relations(recipe, where)
        if not faulty & {None, *_sections(p), *(["data"] if p.field == "eval.every" else [])}
    ]
    if problems:
        raise RecipeError(_readable(problems))
    return Written(recipe, where, text, path.resolve().parent)


def _text_of(path: Path) -> str:
    """The text of a recipe file; raises RecipeError for what is no file, too long for a recipe, or not UTF-8."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never answer, and a device never end
            raise OSError("it is not a regular file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_RECIPE_BYTES + 1)
        if len(raw) > MAX_RECIPE_BYTES:
            raise OSError(f"it is longer than {MAX_RECIPE_BYTES:,} bytes; a recipe is a page of YAML")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise RecipeError([Problem(reason, where=str(path))])


def _secrets(text: str, name: str) -> Iterator[Problem]:
    """Lines, comments too, with what looks like a secret, which is not repeated."""
    for number, line in enumerate(text.splitlines(), 1):
        if SECRET.search(line):
            yield Problem(f"holds what looks like a secret{_SECRET_WAY_OUT}", where=f"{name}:{number}")


_SECRET_WAY_OUT = ", and a recipe is kept in the run folder: take it out, and set HF_TOKEN in the environment"


def _overlong(overrides: list[str]) -> Iterator[Problem]:
    """Overrides with what looks like a secret, or longer together than a recipe may be."""
    for number, word in enumerate(overrides, 1):
        if SECRET.search(word):
            yield Problem(f"word {number} holds what looks like a secret{_SECRET_WAY_OUT}", where="command line")
    if sum(map(len, overrides)) > MAX_RECIPE_BYTES:
        yield Problem(f"the overrides are longer than {MAX_RECIPE_BYTES:,} characters", where="command line")


def _sections(problem: Problem) -> Iterator[str | None]:
    """Yield the section a problem is in, and that in which another tool's name would live here."""
    yield problem.field.partition(".")[0] if problem.field else None
    if home := home_of((problem.field or "").rpartition(".")[2]):
        yield (key_in(home) or "").partition(".")[0]


def _readable(problems: list[Problem]) -> list[Problem]:
    """The problems in the order of the lines, as many and as much of each as a person will read."""
    cut = [dataclasses.replace(p, message=p.message[:500], field=p.field and p.field[:200]) for p in problems]
    more = [Problem(f"and {len(cut) - MAX_PROBLEMS} more")] if len(cut) > MAX_PROBLEMS else []
    return list(_listed_once(sorted(cut, key=_line)[:MAX_PROBLEMS])) + more


def _listed_once(problems: list[Problem]) -> Iterator[Problem]:
    """Yield the problems with each list of keys in the first one only: a file of another tool has dozens of them."""
    seen = set()
    for problem in problems:
        repeated = problem.message in seen and problem.message.startswith(UNKNOWN)
        yield dataclasses.replace(problem, message=UNKNOWN) if repeated else problem
        seen.add(problem.message)


def _line(problem: Problem) -> tuple[int, int]:
    """Sort key: the file's problems by line, then the command line's."""
    line = (problem.where or "").rpartition(":")[2]
    return (0, int(line)) if line.isdigit() else (1, 0)


def _leaves_of_file(text: str, name: str, problems: list[Problem]) -> list[Leaf]:
    """Every value of a YAML file, with its line."""
    try:
        problems += [Problem(refused, where=f"{name}:{line}") for refused, line in _refused_yaml(text)]
        if problems:
            return []
        node = yaml.compose(text, Loader=_RecipeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or first_line(error)
        hint = next((f" ({words})" for part, words in YAML_HINTS.items() if part in reason), "")
        problems.append(Problem(f"is not YAML: {reason}{hint}", where=f"{name}{line}"))
        return []
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        problems.append(Problem("a recipe is a mapping of keys (`model:`, `data:`, …)", where=f"{name}:1"))
        return []
    return list(_walk(node, Recipe, "", name, problems))


def _walk(node: yaml.MappingNode, schema: type, prefix: str, name: str, problems: list[Problem]) -> Iterator[Leaf]:
    """The leaves of a mapping node that follows the dataclass `schema`."""
    sections = {key_of(f): f for f in dataclasses.fields(schema)}
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem("a key is a plain word", prefix.rstrip(".") or None, where))
            continue
        word = str(key_node.value)
        path = prefix + word
        if word in seen:
            problems.append(Problem(f"is written twice (first in line {seen[word]})", path, where))
            continue
        seen[word] = key_node.start_mark.line + 1
        if word not in sections:
            problems.append(Problem(_unknown(word, prefix, list(sections)), path, where))
            continue
        section = section_of(schema, sections[word].name)
        if section is None:
            known = len(problems)
            value = _construct(value_node, path, where, problems)
            if len(problems) == known:
                yield Leaf(path, spelled(path, value), where)
        elif isinstance(value_node, yaml.MappingNode):
            yield from _walk(value_node, section, f"{path}.", name, problems)
        elif not (isinstance(value_node, yaml.ScalarNode) and value_node.tag.endswith(":null")):
            problems.append(Problem(_no_section(value_node, section, path), path, where))


def _no_section(node: yaml.Node, section: type, path: str) -> str:
    """What to say where a section is set to a value: its keys, and the first of them if it takes that value."""
    keys = [key_of(f) for f in dataclasses.fields(section)]
    message = f"is a section with the keys {', '.join(keys)}"
    value = spelled(f"{path}.{keys[0]}", _construct(node, path, "", []))
    if value is not None and _accepted(f"{path}.{keys[0]}", value):
        message += f"; did you mean {{{keys[0]}: {_yaml(value)}}}?"
    return message


def _construct(node: yaml.Node, path: str, where: str, problems: list[Problem]) -> Any:
    loader = _RecipeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = getattr(error, "problem", None) or first_line(error)
        problems.append(Problem(f"cannot be read: {reason}", path, where))
        return None
    finally:
        loader.dispose()


def _leaves_of_overrides(overrides: list[str], problems: list[Problem]) -> list[Leaf]:
    """The values of `key=value` words, read with the same YAML rules as the file."""
    leaves = []
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not path:
            problems.append(Problem(f"{word!r} is not an override; write key=value", where="command line"))
            continue
        if not _known(path):
            parent, _, last = path.rpartition(".")
            if any(known.startswith(f"{path}.") for known in all_paths()):
                message = f"is a section: set one of its keys ({', '.join(_siblings(path))})"
            elif parent in all_paths():
                message = f"`{parent}` is set as a whole: {parent}={type_words(parent)}"
            else:
                message = _unknown(last, f"{parent}." if parent else "", _siblings(parent))
            problems.append(Problem(message, path, "command line"))
            continue
        try:
            refused, _ = next(_refused_yaml(text), (None, 0))
            value = None if refused else yaml.load(text, Loader=_RecipeLoader)  # a SafeLoader
        except (yaml.constructor.ConstructorError, ValueError) as error:
            refused, value = f"cannot be read: {getattr(error, 'problem', None) or error}", None
        except yaml.YAMLError:
            refused, value = None, text
        if refused:
            problems.append(Problem(refused, path, "command line"))
        else:
            leaves.append(Leaf(path, spelled(path, value), "command line"))
    return leaves


def _known(path: str) -> bool:
    schema: type | None = Recipe
    words = path.split(".")
    if not all(re.fullmatch(r"[^\W\d]\w*|\d+", word) for word in words) or len(words) > MAX_DEPTH:
        return False
    for i, word in enumerate(words):
        names = {key_of(f): f.name for f in dataclasses.fields(schema)} if schema else {}
        if word not in names or schema is None:
            return False
        schema = section_of(schema, names[word])
        if schema is None:  # a leaf: only model.config and data.columns go on below it
            return i == len(words) - 1 or path.startswith(("model.config.", "data.columns."))
    return False


def _siblings(parent: str) -> list[str]:
    below = [p.removeprefix(f"{parent}.") for p in all_paths() if p.startswith(f"{parent}.")]
    return below or ([] if parent else [key_of(f) for f in dataclasses.fields(Recipe)])


def _unknown(word: str, prefix: str, siblings: list[str]) -> str:
    """What to say about a key that does not exist: the nearest name, or where another tool's key lives here."""
    if home := home_of(word):
        return sentence(home)
    near = [f"{prefix}{name}" for name in get_close_matches(word, siblings, n=1, cutoff=0.6)]
    near += [path[: at.end()] for path in all_paths() if (at := re.search(rf"(?<=\.){re.escape(word)}\b", path))]
    near += get_close_matches(prefix + word, all_paths(), n=1, cutoff=0.7)
    if near:
        return f"{UNKNOWN}; did you mean `{near[0]}`?"
    return f"{UNKNOWN}; here are: {', '.join(siblings or [key_of(f) for f in dataclasses.fields(Recipe)])}"


def _assemble(leaves: list[Leaf], problems: list[Problem]) -> Recipe:
    """Type every leaf through OmegaConf, resolve plain references, and make the dataclass."""
    config = OmegaConf.structured(Recipe)
    written: dict[str, Leaf] = {}
    wrong: list[Leaf] = []
    for leaf in leaves:
        if refused := _unkept(leaf.value, any_text=leaf.path in _ANY_TEXT):
            problems.append(Problem(refused, leaf.path, leaf.where))
            continue
        try:
            OmegaConf.update(config, attribute(leaf.path), leaf.value, merge=False, force_add=_open(leaf.path))
            written[leaf.path] = leaf
        except (OmegaConfBaseException, ValueError, TypeError, OverflowError):
            wrong.append(leaf)
    for leaf in written.values():  # only now: a reference may lead to a value further down, an override win over it
        try:
            read = OmegaConf.select(config, attribute(leaf.path), throw_on_missing=False)
            sound = _unconverted(leaf.value, read)
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError):
            sound = False
        if not sound:
            wrong.append(leaf)
    problems += [Problem(_not_taken(leaf.path, leaf.value), leaf.path, leaf.where) for leaf in wrong]
    if wrong:  # what stands beside it is judged with the defaults in its place
        return _assemble([leaf for leaf in leaves if leaf not in wrong], [])
    by_path = {leaf.path: leaf.where for leaf in leaves}
    try:
        OmegaConf.resolve(config)
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except (OmegaConfBaseException, RecursionError) as error:
        path = str(getattr(error, "full_key", "") or "")
        problems.append(Problem(first_line(error), path or None, by_path.get(path)))
        return Recipe()


_ANY_TEXT = {path for path, spec in all_fields() if spec.metadata.get("any_text")}


def _unkept(value: Any, any_text: bool) -> str | None:
    """Why a value cannot be kept in a plan, which is JSON, exactly as it is written; None where it can."""
    for item in _within(value):
        if isinstance(item, float) and not math.isfinite(item):
            return f"{item} is not a finite number"
        if isinstance(item, dict) and not all(isinstance(name, str) for name in item):
            return f"the keys of {_show(item)} are not all texts: write quotes around them"
        if isinstance(item, str) and _bad_reference(item):
            return "only plain ${key} references are read; resolvers are refused"
        refused = ("Cs",) if any_text else ("Cc", "Cs")
        if isinstance(item, str) and (odd := next((c for c in item if category(c) in refused), None)):
            return f"holds the control character {odd!a}"
    return None


def _within(value: Any) -> Iterator[Any]:
    """A value and every key and value inside it."""
    yield value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _within(name)
            yield from _within(item)
    elif isinstance(value, list):
        for item in value:
            yield from _within(item)


def _bad_reference(text: str) -> bool:
    """A resolver, half a reference, or an escaped one, which would become a reference when the plan is read again."""
    plain = r"(?<!\\)\$\{[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*\}"
    return "${" in re.sub(plain, "", text)
