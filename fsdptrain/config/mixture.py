"""The sources of a recipe's data: each has the keys of `data`, with its own in their place."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath
from typing import Any

from fsdptrain.config.formats import Format
from fsdptrain.config.keys import key_of, recipe_of
from fsdptrain.config.paths import DataPath, places
from fsdptrain.config.schema import Data, DataSource, SourceKeys
from fsdptrain.errors import Problem, RecipeError, shortened

KEYS = [key_of(spec) for spec in dataclasses.fields(SourceKeys)]  # of `data` that a source may have for itself
READING = [key for key in KEYS if key not in ("path", "revision", "max_rows")]  # how a row is read


@dataclass(frozen=True)
class MixtureSource:
    """One source of the training data, with all keys of `data` as they are for it.

    `weight` is its share of the sequences, relative to the others; without it the source is read `epochs` times in an
    epoch of the run.
    """

    name: str
    data: Data
    weight: Fraction | None = None
    epochs: Fraction = Fraction(1)


def sources_of(data: Data) -> list[MixtureSource]:
    """Return the sources of a recipe's data: those of `data.sources`, or the only one that `data.path` names."""
    if not data.sources:
        return [MixtureSource(_default_name(data.path), data)]
    return [_source(data, item) for item in data.sources]


def prompt_source(data: Data) -> MixtureSource:
    """Return the source as whose rows prompts are read: the first of conversations, else of prompts, else of texts."""
    return max(sources_of(data), key=lambda source: [*Format].index(source.data.format))


def source_named(data: Data, name: str) -> MixtureSource:
    """Return the source that the option --source names; raises RecipeError if there is none."""
    found = {source.name: source for source in sources_of(data)}
    if name not in found:
        raise RecipeError(f"--source: {shortened(repr(name))} is no source of the run: use one of {', '.join(found)}")
    return found[name]


def reading(data: Data, source: MixtureSource, columns: Mapping[str, Any] = {}) -> Data:
    """Return `data` for other rows, which are read as those of a source, but for these columns."""
    way = {key: getattr(source.data, key) for key in READING} | {"columns": {**source.data.columns, **columns}}
    return dataclasses.replace(data, sources=[], **way)


def _source(data: Data, item: dict[str, Any]) -> MixtureSource:
    own: DataSource = recipe_of(item, DataSource)
    keys = {name: getattr(own, name) for name in item if name in KEYS}
    return MixtureSource(
        own.name or _default_name(own.path),
        dataclasses.replace(data, sources=[], **keys),
        None if own.weight is None else Fraction(str(own.weight)),  # as it is written: 0.7 is 7/10
        Fraction(1) if own.epochs is None else Fraction(str(own.epochs)),
    )


def _default_name(path: DataPath | None) -> str:
    """Return the last part of a path, without suffixes."""
    name = PurePath(next(iter(places(path)), "")).name.partition(":")[0]
    return name.partition(".")[0] or name


def mixture_problems(data: Data) -> Iterator[Problem]:
    """Yield the problems between the sources of a mixture, and with `data.path` beside them."""
    if data.path is not None:
        yield Problem("has no effect beside data.sources: remove one of the two", "data.path")
    sources, key = sources_of(data), "data.sources"
    for number, (source, item) in enumerate(zip(sources, data.sources, strict=True), 1):
        if source.data.path is None:
            yield Problem(f"source {number}: path is not set: give a file, a folder or a Hub data set", key)
        if item.get("weight") is not None and item.get("epochs") is not None:
            yield Problem(f"{source.name}: weight and epochs both say how much is read: remove one of the two", key)
        if not source.name.isprintable():
            yield Problem(f"source {number}: {source.name!r} cannot be shown: choose another name", key)
    weighted = [source.name for source in sources if source.weight is not None]
    if (without := [source.name for source in sources if source.weight is None]) and weighted:
        message = f"{weighted[0]} has a weight and {without[0]} has none: give all of them a weight, or none"
        yield Problem(message, key)
    if twice := [name for name, times in Counter(source.name for source in sources).items() if times > 1]:
        yield Problem(f"two sources are called {twice[0]!r}: set a `name` for one of them", key)


def mixture_changes(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    """Return in words how the sources of a run differ from those that it began with; names do not count."""
    if len(before) != len(now):
        return f"there were {len(before) or 'no'} sources, and there are {len(now) or 'none'} now"
    changes = [
        f"source {number}: {key} was {old.get(key)!r}, is {new.get(key)!r} now"
        for number, (old, new) in enumerate(zip(before, now, strict=True), 1)
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
    return "; ".join(changes)


def without_names(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sources without their names, which change no token, and revisions, which the data's digest tells."""
    return [{key: value for key, value in item.items() if key not in ("name", "revision")} for item in sources]
