"""Reading from the Hub or a local folder: what pins it, how its failures read, and which files hold weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from fsdptrain.errors import NoModel, RecipeError
from fsdptrain.plan import HUB_ID, Plan

ANSWER_S = 5  # how long the Hub may take to answer before a dry run does without it


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


@contextlib.contextmanager
def hub_errors(field: str, name: str) -> Iterator[None]:
    """Raise NoModel, with the ways out, when `name` is not here and not to be had either."""
    if not Path(name).is_dir() and not HUB_ID.fullmatch(name):
        raise NoModel(f"{field}: {name!r} is neither a folder here nor a Hub id; if a run exports it, do that first")
    try:
        yield
    except Exception as error:
        if not _out_of_reach(error):
            raise
        raise NoModel(
            f"{field}: {name!r} is not in the cache, and the Hub cannot be reached. Name a local folder in model.id "
            "and model.tokenizer; or, to plan without it, give model_type, vocab_size and the dimensions in "
            "model.config"
        ) from None


def _out_of_reach(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (LocalEntryNotFoundError, ConnectionError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def spare_retries(plan: Plan) -> None:
    """Ask the Hub one short question where the plan needs it, and go on offline when it does not answer.

    Without this, every file of every id is asked for six times over 23 seconds.
    """
    model = plan.recipe.model
    names = [name for name in (model.id, model.tokenizer) if isinstance(name, str) and not Path(name).is_dir()]
    names += [path for path in (plan.data_path, plan.eval_path) if path and not Path(path).is_absolute()]
    if names and not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
        except Exception:  # whatever the HTTP library of the day raises
            constants.HF_HUB_OFFLINE = True


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
