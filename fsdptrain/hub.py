"""Reading from the Hub or a local folder: what pins it, how its failures read, and which files hold weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from fsdptrain.errors import RecipeError
from fsdptrain.plan import Plan


def source(plan: Plan, tokenizer: str | None) -> dict[str, Any]:
    """Keyword arguments that pin where transformers reads from."""
    revision = plan.recipe.model.revision if tokenizer is None else None
    return {"revision": revision or "main", "trust_remote_code": False}


@contextlib.contextmanager
def recipe_errors(message: str) -> Iterator[None]:
    """Turn what transformers raises for something that is not there or does not fit into one RecipeError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise RecipeError(
            f"{message}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
        ) from None


def checkpoint_files(plan: Plan) -> list[str]:
    """The safetensors files of `model.id`, from a local folder or (downloaded) from the Hub; never pickled ones."""
    model = plan.recipe.model
    where = {"revision": model.revision or "main"}
    for name in ("model.safetensors.index.json", "model.safetensors"):
        with recipe_errors(f"model.id: cannot read {model.id}"):
            found = cached_file(str(model.id), name, _raise_exceptions_for_missing_entries=False, **where)
        if found and name.endswith(".json"):
            return _shards_of(plan, found)
        if found:
            return [found]
    raise RecipeError(f"model.id: {model.id} has no safetensors weights (other formats can run code and are not read)")


def _shards_of(plan: Plan, index: str) -> list[str]:
    names = set(json.loads(Path(index).read_text())["weight_map"].values())
    if any(name != Path(name).name for name in names):
        raise RecipeError(f"model.id: {index} names files outside its folder")
    with recipe_errors(f"model.id: cannot read {plan.recipe.model.id}"):
        files, _ = get_checkpoint_shard_files(
            plan.recipe.model.id, index, revision=plan.recipe.model.revision or "main"
        )
    return list(files)
