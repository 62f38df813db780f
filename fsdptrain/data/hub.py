"""Models and tokenizers of the Hub or a local folder: the revision, the files of weights, and clear errors."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from transformers.utils.hub import get_checkpoint_shard_files

from fsdptrain.config.paths import is_folder, model_name_fault
from fsdptrain.data.patches import cached_file_or_none, go_offline
from fsdptrain.errors import HUB_UNREACHABLE, FsdptrainError, NoModel, RecipeError, causes, error_summary, is_panic
from fsdptrain.plan.plan import HUB_TIMEOUT_S, Plan
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.files import nearest_hint, openable

COMPARED_NUMBERS = 2**22  # of a tensor that are in memory while two are compared


def hub_arguments(plan: Plan, tokenizer: str | None) -> dict[str, Any]:
    """Return keyword arguments of `from_pretrained` that pin the revision; no code of the files is run.

    `tokenizer` is the one that the recipe names: that of `model.id` has its revision.
    """
    of_model = tokenizer in (None, plan.recipe.model.id)
    return {"revision": model_revision(plan) if of_model else "main", "trust_remote_code": False}


def model_revision(plan: Plan) -> str:
    """Return the branch, tag or commit of `model.id`."""
    return plan.recipe.model.revision or "main"


def read_json(model: str, revision: str | None, name: str, field: str) -> dict[str, Any]:
    """Return a JSON file of a model, {} when there is none; raises RecipeError when it is not a JSON object."""
    with recipe_errors(f"{field}: cannot read {name} of {model}"), hub_errors(field, model):
        found = cached_file_or_none(model, name, revision or "main")
        value = json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
    if not isinstance(value, dict):
        raise RecipeError(f"{field}: {name} of {model} is not a JSON object")
    return value


def reject_symlinks_outside(field: str, name: str) -> None:
    """Raise RecipeError when a file of a local folder is a symlink to a place outside.

    Its text would be read and exported: a chat template could be a link to a secret token. Weights may be links,
    because only tensors are read from them; so may all files of the Hub's cache, within the cache.
    """
    folder = Path(name).resolve()
    cache = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    for path in sorted(folder.iterdir()) if is_folder(name) else ():
        inside = any(path.resolve().is_relative_to(home) for home in [folder, *cache])
        if path.is_symlink() and not inside and path.suffix != ".safetensors":
            raise RecipeError(
                f"{field}: {path} is a link to a file outside its folder, which is not followed: copy the file there"
            )


@contextlib.contextmanager
def recipe_errors(message: str) -> Iterator[None]:
    """Raise RecipeError for any error of a library inside: a missing, damaged or unsuitable file."""
    try:
        yield
    except FsdptrainError:
        raise
    except BaseException as error:  # a damaged or hostile file may raise any class
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise RecipeError(f"{message}: {error_summary(error)}") from None


@contextlib.contextmanager
def hub_errors(field: str, name: str) -> Iterator[None]:
    """Raise NoModel when `name` is neither a folder nor a Hub id, or cannot be downloaded."""
    if fault := model_name_fault(name):
        raise NoModel(f"{field}: {fault}")
    parts = [Path(name, file) for file in ("config.json", "adapter_config.json")]
    if field != "model.tokenizer" and is_folder(name) and not any(map(os.path.lexists, parts)):
        raise NoModel(f"{field}: {name!r} has no config.json: it is not the folder of a model")
    try:
        yield
    except Exception as error:
        if not any(isinstance(cause, (LocalEntryNotFoundError, ConnectionError)) for cause in causes(error)):
            raise
        raise NoModel(
            f"{field}: {name!r} is not in the cache, and {HUB_UNREACHABLE}{nearest_hint(Path(name))}. Name a local "
            "folder in model.id "
            "and model.tokenizer; or, to plan without it, give model_type, vocab_size and the dimensions in "
            "model.config"
        ) from None


def go_offline_if_unreachable(plan: Plan, progress: Progress) -> None:
    """Send the Hub one request if the plan needs it, and continue offline when it does not answer in time.

    Otherwise huggingface_hub would request every file of every id six times over 23 seconds. The request has its own
    thread, because a DNS lookup or a proxy may take longer than any timeout of the HTTP library.
    """
    names = plan.hub_names()
    if not names or constants.HF_HUB_OFFLINE:
        return
    progress(f"asking the Hub for {' and '.join(names)}", 0, 0)
    answered = threading.Event()

    def send() -> None:
        with contextlib.suppress(Exception):  # the HTTP library may raise any class
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
            answered.set()

    request = threading.Thread(target=send, daemon=True)
    request.start()
    request.join(HUB_TIMEOUT_S)
    if not answered.is_set():
        go_offline()
        progress(f"the Hub did not respond within {HUB_TIMEOUT_S:g} s; continuing offline with the local cache", 0, 0)


def safetensors_files(plan: Plan) -> list[str]:
    """Return the safetensors files of `model.id`, from a local folder or downloaded from the Hub; never pickled ones.

    They are those that transformers reads. Raises RecipeError when there are none, one of them is not a safetensors
    file, or a single file and an index beside it name different weights.
    """
    model = plan.recipe.model
    # A configuration may name the file; a single file comes before an index.
    named = str(read_json(str(model.id), model.revision, "config.json", "model.id").get("transformers_weights") or "")
    if named != Path(named).name:
        raise RecipeError(
            f"model.id: transformers_weights in config.json of {model.id} names a file outside its folder"
        )
    names = [named] if named else [constants.SAFETENSORS_SINGLE_FILE, constants.SAFETENSORS_INDEX_FILE]
    with recipe_errors(f"model.id: cannot read {model.id}"):
        found = [path for name in names if (path := cached_file_or_none(str(model.id), name, model_revision(plan)))]
    if not found:
        raise RecipeError(
            f"model.id: {model.id} has no safetensors weights (other formats can run code and are not read)"
        )
    if len(found) == 1:
        return _indexed_files(plan, found[0]) if found[0].endswith(".json") else _check_headers(found)
    single, index, reason = _check_headers(found[:1]), found[1], ""
    try:
        same = _same_weights(*(tuple(stamps_of(files)) for files in (single, _indexed_files(plan, index))))
    except RecipeError as error:  # its files may be gone
        same, reason = False, f" ({error.problems[0].message})"
    if not same:
        raise RecipeError(
            f"model.id: {model.id} has {names[0]}, which transformers reads, and {names[1]}, which names files with "
            f"other weights{reason}: remove the one that is not of this model"
        )
    return single


@functools.lru_cache(maxsize=4)
def _same_weights(one: tuple[tuple[str, int, int], ...], other: tuple[tuple[str, int, int], ...]) -> bool:
    """Return whether two lists of safetensors files, as `stamps_of` has them, have the same tensors."""
    with contextlib.ExitStack() as stack:
        found = []
        for stamps in (one, other):
            opened = [stack.enter_context(safe_open(path, framework="pt")) for path, *_ in stamps]
            found.append({name: each.get_slice(name) for each in opened for name in each.keys()})  # noqa: SIM118
        first, second = found
        return first.keys() == second.keys() and all(same_values(first[name], second[name]) for name in first)


def same_values(one: Any, other: Any, dtype: torch.dtype | None = None) -> bool:
    """Return whether two slices of safetensors files have the same values, in `dtype` or as they are stored."""
    shape = one.get_shape()
    if shape != other.get_shape() or (dtype is None and one.get_dtype() != other.get_dtype()):
        return False
    rows = max(1, COMPARED_NUMBERS // max(1, math.prod(shape[1:])))
    parts: Iterable[Any] = (slice(start, start + rows) for start in range(0, shape[0], rows)) if shape else [...]
    return all(_equal(one[part].to(dtype), other[part].to(dtype)) for part in parts)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal; a NaN is equal to one with the same bits."""
    return torch.equal(one, other) or torch.equal(*(each.flatten().view(torch.uint8) for each in (one, other)))


def _indexed_files(plan: Plan, index: str) -> list[str]:
    model = plan.recipe.model
    with recipe_errors(f"model.id: cannot read {index}"):
        names = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
        outside = [name for name in names if name != Path(name).name]
    if outside:
        raise RecipeError(f"model.id: {index} names files outside its folder")
    with recipe_errors(f"model.id: cannot read {model.id}"):
        files, _ = get_checkpoint_shard_files(model.id, index, revision=model_revision(plan))
    return _check_headers(list(files))


def file_checksums(files: list[str]) -> list[tuple[str, int, str]]:
    """Return (name, bytes, SHA-256) of each file.

    A file of the Hub's cache is a link to a blob whose name is its SHA-256; other files are read, several at a time.
    """

    def of(file: str) -> tuple[str, int, str]:
        path = Path(file)
        blob = path.resolve()
        size = blob.stat().st_size
        if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
            return path.name, size, blob.name
        with blob.open("rb") as stream:
            return path.name, size, hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(of, files))


def stamps_of(files: list[str]) -> list[tuple[str, int, int]]:
    """Return (path, bytes, modification time in ns) of each file, (path, 0, 0) of one that is missing."""
    found = []
    for file in files:
        try:
            status = Path(file).stat()
            found.append((file, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((file, 0, 0))
    return found


def files_digest(checksums: list[tuple[str, int, str]]) -> str:
    """Return one digest of the sizes and checksums of files, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(checksums)).encode()).hexdigest()


def _check_headers(files: list[str]) -> list[str]:
    """Open each file once, which compares its header with its length, and return them."""
    for file in files:
        with (
            recipe_errors(f"model.id: {file} cannot be read as safetensors"),
            safe_open(openable(Path(file)), framework="pt"),
        ):
            pass
    return files
