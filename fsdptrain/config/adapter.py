"""Read the configuration of an adapter that peft has saved, for `adapter.from`. No torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from fsdptrain.config.keys import accepts, value_text
from fsdptrain.config.paths import expanded, is_folder
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import Problem, shortened

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

UNSET: tuple[Any, ...] = (None, False, {}, [])


def with_adapter_of_folder(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with the values that the folder of `adapter.from` determines, and the problems with it.

    With problems the recipe has no `adapter.from`, so that later checks of a dry run do not report the folder again.
    """
    if recipe.adapter.from_ is None:
        return recipe, []
    folder = Path(expanded(recipe.adapter.from_))
    found, problems = _read_config(folder)
    layers, weights = found.get("target_modules"), found.get("target_parameters")
    if isinstance(layers, list) and isinstance(weights, list) and all(isinstance(name, str) for name in weights):
        # What peft only finds by its weights (see `model.adapters`), such as tensors of experts, is in `target`, too.
        found["target_modules"] = [*layers, *(name.removesuffix(".weight") for name in weights)]
        del found["target_parameters"]
    for name in dict.fromkeys([*REQUIRED, *found]) if not problems else ():
        if not _can_continue(name, found.get(name)):
            message = (
                f"{folder} has {name}: {value_text(found.get(name))} in {ADAPTER_CONFIG}, which is not supported: "
                "merge this adapter with peft, name the merged model in model.id, and leave adapter.from out"
            )
            problems.append(Problem(message, "adapter.from"))
    if recipe.adapter.kind == "qlora" and found.get("use_dora"):
        message = f"{folder} has DoRA, which needs the norms of the unquantised weights: use adapter.kind: lora"
        problems.append(Problem(message, "adapter.from"))
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


def base_note(recipe: Recipe) -> str | None:
    """Return a sentence if the adapter to continue from names another base than `model.id`; None if it names none.

    The weights of both may be the same, in folders with different names.
    """
    if recipe.adapter.from_ is None:
        return None
    found, _ = _read_config(Path(recipe.adapter.from_))
    base, model = found.get(BASE), str(recipe.model.id)
    if not base or base == model or (is_folder(str(base)) and is_folder(model) and Path(base).samefile(model)):
        return None
    return (
        f"the adapter of adapter.from was trained on {shortened(str(base))!r}, and model.id is {shortened(model)!r}: "
        "they must have the same weights"
    )


def _can_continue(name: str, value: Any) -> bool:
    """Return whether an adapter with this value of peft's key is trained here as peft would train it."""
    if "${" in str(value):  # no plan may have a reference
        return False
    if name in ONLY:
        return value in ONLY[name]
    for key, peft_name in FROM_FOLDER.items():
        if name == peft_name:
            return (value is None and name not in REQUIRED) or accepts(f"adapter.{key}", value)
    return name in HARMLESS or value in UNSET
