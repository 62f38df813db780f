"""Paths that a person writes, in a recipe or on the command line: `~` is their home, and `$` is refused. No torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from fsdptrain.errors import Problem
from fsdptrain.schema import Recipe


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
