"""Paths that a person writes, in a recipe or on the command line: `~` is their home, and `$` is refused. No torch."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdptrain.config.schema import Recipe
from fsdptrain.errors import DataError, NoData, Problem, shortened


def expanded(path: str) -> str:
    """Return the path with `~` and `~user` replaced by that home; unchanged where there is no such user."""
    return os.path.expanduser(path)  # noqa: PTH111  (Path's raises for an unknown user)


def fault_of(path: str) -> str | None:
    """Return why a path cannot be used as it is written, with the way out; None where it can."""
    if "$" in path:
        return (
            f"{path!r}: variables like $HOME are not expanded here; write the path out (~ is your home), or give it on "
            "the command line without quotes, where the shell expands it"
        )
    if expanded(path).startswith("~"):
        user = path.partition("/")[0]
        return f"{path!r}: there is no user {user[1:]!r}; for a folder of that name write ./{path}"
    return None


def paths_of(recipe: Recipe) -> dict[str, str]:
    """Return everything in a recipe that is a path or may be one, by its key."""
    held_out = recipe.data.eval or {}
    found: dict[str, Any] = {
        "output_dir": recipe.output_dir,
        "model.id": recipe.model.id,
        "model.tokenizer": recipe.model.tokenizer,
        "data.path": recipe.data.path,
        "data.eval": held_out.get("path") if isinstance(held_out, dict) else None,
    }
    return {key: path for key, path in found.items() if isinstance(path, str)}


def path_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for every path in a recipe that cannot be used as it is written."""
    for key, path in paths_of(recipe).items():
        if fault := fault_of(path):
            yield Problem(fault, key)


def at_home(recipe: Recipe) -> Recipe:
    """Return the recipe with `~` expanded where libraries would not; data paths stay, they identify a run to resume."""
    names: dict[str, Any] = {"id": recipe.model.id, "tokenizer": recipe.model.tokenizer}
    names = {key: expanded(name) if isinstance(name, str) else name for key, name in names.items()}
    return dataclasses.replace(
        recipe, output_dir=expanded(recipe.output_dir), model=dataclasses.replace(recipe.model, **names)
    )


def is_folder(path: str) -> bool:
    """Whether there is a folder of this name; no text is so odd a name that asking fails."""
    try:
        return Path(path).is_dir()
    except OSError:  # too long for a file name
        return False


DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".text")


COMPRESSED = (".gz", ".bz2", ".zst")  # behind any of these but .parquet, which has compression of its own


HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[\w.-]{1,96})?")


MAX_FOLDERS = 10_000  # looked into behind one data.path: /** has no end


def find_data(path: str, folder: Path, elsewhere: bool = False) -> str:
    """Where `data.path` lies: the working folder is looked in first, then the recipe's own; else it is a Hub id.

    Returns an absolute path or glob, or the Hub id as written. When it can be none of these: raises NoData, or returns
    the path it would have in the working folder where files need not be here.
    """
    for base in (Path.cwd(), folder):
        candidate = str(base / expanded(path))
        if matches(candidate):
            return candidate
    if HUB_ID.fullmatch(path.partition(":")[0]) and not data_kind(path):
        return path
    if elsewhere:
        return str(Path.cwd() / expanded(path))
    places = " and ".join(dict.fromkeys(map(str, (Path.cwd(), folder))))
    raise NoData(f"data.path: nothing at {shortened(path)!r} (looked in {places})")


def data_kind(path: str) -> str | None:
    """Return the kind of a data file by its name (`.jsonl` for `rows.JSONL.gz`); None for a name of no known kind."""
    name, suffix = os.path.splitext(path.lower())  # noqa: PTH122
    if suffix in COMPRESSED:
        suffix = os.path.splitext(name)[1]  # noqa: PTH122
        return suffix if suffix in DATA_SUFFIXES and suffix != ".parquet" else None
    return suffix if suffix in DATA_SUFFIXES else None


def matches(pattern: str) -> list[str]:
    """The names behind a path or glob, sorted; an existing name is no pattern.

    As in the shell, `**` is any number of folders, links are not followed by it, and names that begin with a dot have
    to be asked for. Raises DataError for a folder that may not be read, and when more than
    MAX_FOLDERS would have to be looked into.
    """
    if os.path.lexists(pattern):
        return [pattern]
    found, opened = set(), 0
    todo: list[tuple[str, tuple[str, ...]]] = [("", Path(pattern).parts)]  # texts: paths take five times as long
    while todo:
        folder, parts = todo.pop()
        first, rest = (parts[0], parts[1:]) if parts else ("", ())
        if not parts:
            found.add(folder)
        elif not glob.has_magic(first):
            path = os.path.join(folder, first)  # noqa: PTH118
            todo += [(path, rest)] if os.path.lexists(path) else []
        elif (opened := opened + 1) > MAX_FOLDERS:
            where = f"leads through more than {MAX_FOLDERS:,} folders: name a narrower place"
            raise DataError(f"data.path: {shortened(pattern)!r} {where}")
        else:
            names = [e for e in _entries(folder) if first.startswith(".") or not e.name.startswith(".")]
            todo += _below(folder, names, first, rest)
    return sorted(found)


def _below(folder: str, entries: list[os.DirEntry[str]], first: str, rest: tuple[str, ...]) -> Iterator[Any]:
    """What is to be looked at next in a folder, as (path, pattern from there on); `first` is a pattern."""
    if first != "**":
        yield from ((e.path, rest) for e in entries if fnmatch.fnmatchcase(e.name, first))
        return
    yield folder, rest
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield entry.path, ("**", *rest)
        elif not rest:
            yield entry.path, ()


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder or ".") as entries:
            yield from entries
    except (NotADirectoryError, FileNotFoundError):
        return
    except OSError as error:
        raise DataError(f"data.path: {folder} cannot be read: {error.strerror}") from None
