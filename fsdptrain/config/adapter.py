"""Read the configuration of an adapter that peft has saved, for `adapter.from`. No torch."""

from __future__ import annotations

import dataclasses
import filecmp
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdptrain.config.keys import accepts, value_text
from fsdptrain.config.paths import expanded, is_folder
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import Problem, error_summary, shortened
from fsdptrain.run_folder.files import openable

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"  # in an export of both

# Recipe key → peft's key, which the folder determines.
FROM_FOLDER = {
    "r": "r", "alpha": "lora_alpha", "target": "target_modules", "modules_to_save": "modules_to_save",
    "use_dora": "use_dora", "use_rslora": "use_rslora",
}  # fmt: skip

BASE = "base_model_name_or_path"  # peft's key: a folder or a Hub id
REQUIRED = ("r", "lora_alpha", "target_modules")  # the others are optional: old versions of peft do not write them

# peft's keys with the only values that this engine can continue from. Others of `init_lora_weights` change the base.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": (True, False, "gaussian", None),
}  # fmt: skip

# peft's keys that do not change what an adapter computes while every key outside of these three tables is unset.
HARMLESS = (
    "auto_mapping", BASE, "fan_in_fan_out", "inference_mode", "layers_pattern", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
)  # fmt: skip

CHOOSE_LAYERS = ("exclude_modules", "layers_to_transform", "layers_pattern")  # peft's keys, beside target_modules
HAS_ADAPTER = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?A(?:\.weight)?")  # peft's names of tensors

UNSET: tuple[Any, ...] = (None, False, {}, [])


def with_adapter_of_folder(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with the values that the folder of `adapter.from` determines, and the problems with it.

    With problems the recipe has no `adapter.from`, so that later checks of a dry run do not report the folder again.
    """
    if recipe.adapter.from_ is None:
        return recipe, []
    folder = Path(expanded(recipe.adapter.from_))
    found, problems = _read_config(folder)
    problems = problems or _name_layers_once(folder, found)
    problems = problems or [*_folder_problems(folder, found, recipe)]
    if problems:
        return dataclasses.replace(recipe, adapter=dataclasses.replace(recipe.adapter, from_=None)), problems
    values = {key: found[name] for key, name in FROM_FOLDER.items() if found.get(name) is not None}
    values["alpha"] = float(values["alpha"])  # as it is read from the plan, which must have the same digest
    if isinstance(values["target"], list):
        values["target"] = sorted(values["target"])
    adapter = dataclasses.replace(recipe.adapter, from_=str(folder.absolute()), **values)
    return dataclasses.replace(recipe, adapter=adapter), []


def _read_config(folder: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return peft's configuration in a folder, or {} and the problem with it."""
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = "name a folder on this machine that peft has saved, such as the export of an earlier run"
        if (folder / ADAPTER_FOLDER / ADAPTER_CONFIG).is_file():
            hint = f"the adapter of this export is in {folder / ADAPTER_FOLDER}"
        return {}, [Problem(f"cannot read {folder / ADAPTER_CONFIG}: {reason}; {hint}", "adapter.from")]
    if not (folder / ADAPTER_WEIGHTS).is_file():
        reason = f"{folder} has no {ADAPTER_WEIGHTS}: copy the whole folder again, or export the adapter again"
        return {}, [Problem(reason, "adapter.from")]
    return found, []


def _folder_problems(folder: Path, found: dict[str, Any], recipe: Recipe) -> Iterator[Problem]:
    """Yield what prevents training from continuing with the adapter in a folder; `found` is peft's configuration."""
    for name in dict.fromkeys([*REQUIRED, *found]):
        if not _can_continue(name, found.get(name)):
            yield Problem(
                f"{folder} has {name}: {value_text(found.get(name))} in {ADAPTER_CONFIG}, which is not supported: "
                "merge this adapter with peft, name the merged model in model.id, and leave adapter.from out",
                "adapter.from",
            )
    if recipe.adapter.kind == "qlora" and found.get("use_dora"):
        reason = f"{folder} has DoRA, which needs the norms of the unquantised weights: use adapter.kind: lora"
        yield Problem(reason, "adapter.from")
    if _is_merged_into(str(recipe.model.id), folder, found):
        yield Problem(
            f"model.id ({recipe.model.id}) is the export that this adapter is merged into, so it would be applied "
            f"twice: set model.id to the adapter's base ({shortened(str(found.get(BASE)))!r}), or remove adapter.from "
            "to train a new adapter on the merged model",
            "adapter.from",
        )


def _is_merged_into(model: str, folder: Path, found: dict[str, Any]) -> bool:
    """Return whether a model is an export of `both` whose merged weights contain the adapter of a folder.

    The adapter of an export keeps the name of the base that it was trained on. A base may have its own adapters in
    subfolders too: these name that base.
    """
    inside = Path(model) / ADAPTER_FOLDER / ADAPTER_WEIGHTS
    if not is_folder(model) or not inside.is_file() or _is_same_model(str(found.get(BASE)), model):
        return False
    try:
        return filecmp.cmp(inside, folder / ADAPTER_WEIGHTS, shallow=False)
    except OSError:  # reading the adapter reports it
        return False


def _is_same_model(one: str, other: str) -> bool:
    """Return whether two values of `model.id` are the same name or the same folder."""
    return one == other or (is_folder(one) and is_folder(other) and Path(one).samefile(other))


def base_note(recipe: Recipe) -> str | None:
    """Return a sentence if the adapter to continue from names another base than `model.id`; None if it names none.

    The weights of both may be the same, in folders with different names.
    """
    if recipe.adapter.from_ is None:
        return None
    found, _ = _read_config(Path(recipe.adapter.from_))
    base, model = found.get(BASE), str(recipe.model.id)
    if not base or _is_same_model(str(base), model):
        return None
    return (
        f"the adapter of adapter.from was trained on {shortened(str(base))!r}, and model.id is {shortened(model)!r}: "
        "they must have the same weights"
    )


def _name_layers_once(folder: Path, found: dict[str, Any]) -> list[Problem]:
    """Let `target_modules` alone name what has an adapter; return the problem that prevents it.

    What peft only finds by its weights (see `model.adapters`) is moved there from target_parameters: layers, and
    tensors of experts. Where peft chose layers by an expression, or left some out, they are those that have tensors in
    the file.
    """
    layers, weights = found.get("target_modules"), found.get("target_parameters")
    if isinstance(layers, list) and isinstance(weights, list) and all(isinstance(name, str) for name in weights):
        found["target_modules"] = [*layers, *(name.removesuffix(".weight") for name in weights)]
        del found["target_parameters"]
    elif weights in UNSET and (isinstance(layers, str) or any(found.get(name) not in UNSET for name in CHOOSE_LAYERS)):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(openable(folder / ADAPTER_WEIGHTS), framework="numpy") as opened:
                matches = [HAS_ADAPTER.fullmatch(key) for key in opened.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            reason = f"cannot read {folder / ADAPTER_WEIGHTS}: {error_summary(error)}"
            return [Problem(f"{reason}; copy the file again, or export the adapter again", "adapter.from")]
        found["target_modules"] = sorted({match[1] for match in matches if match})
        for name in CHOOSE_LAYERS:
            found.pop(name, None)
    return []


def _can_continue(name: str, value: Any) -> bool:
    """Return whether an adapter with this value in peft's configuration is trained here as peft would train it."""
    if "${" in str(value):  # no plan may have a reference
        return False
    if name in ONLY:
        return value in ONLY[name]
    for key, peft_name in FROM_FOLDER.items():
        if name == peft_name:
            return (value is None and name not in REQUIRED) or accepts(f"adapter.{key}", value)
    return name in HARMLESS or value in UNSET
