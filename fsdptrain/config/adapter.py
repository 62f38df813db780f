"""Read the configuration of an adapter that peft has saved, for `adapter.from`. No torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from fsdptrain.config.paths import expanded
from fsdptrain.config.schema import Recipe
from fsdptrain.config.values import accepts
from fsdptrain.errors import Problem

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


ADAPTER_FOLDER = "adapter"  # in an export of both


# Recipe key → peft's key, which the folder determines.
FROM_FOLDER = {
    "r": "r", "alpha": "lora_alpha", "target": "target_modules", "modules_to_save": "modules_to_save",
    "use_dora": "use_dora", "use_rslora": "use_rslora",
}  # fmt: skip


REQUIRED = ("r", "lora_alpha", "target_modules")  # the others are optional: old versions of peft do not write them


# peft's keys with the only values that this engine can continue from. Others of `init_lora_weights` change the base.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": (True, False, "gaussian", None),
}  # fmt: skip


# peft's keys that do not change what an adapter computes while every key outside of these three tables is unset.
HARMLESS = (
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "layers_pattern", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
)  # fmt: skip


UNSET: tuple[Any, ...] = (None, False, {}, [])


def with_adapter_of_folder(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with the values that the folder of `adapter.from` determines, and the problems with it."""
    if recipe.adapter.from_ is None:
        return recipe, []
    folder = Path(expanded(recipe.adapter.from_))
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = "name a folder on this machine that peft has saved, such as the export of an earlier run"
        if (folder / ADAPTER_FOLDER / ADAPTER_CONFIG).is_file():
            hint = f"the adapter of this export is in {folder / ADAPTER_FOLDER}"
        return recipe, [Problem(f"cannot read {folder / ADAPTER_CONFIG}: {reason}; {hint}", "adapter.from")]
    if not (folder / ADAPTER_WEIGHTS).is_file():
        return recipe, [Problem(f"{folder} has no {ADAPTER_WEIGHTS}", "adapter.from")]
    _name_layers_once(found)
    problems = [
        Problem(f"{folder} has {name}: {found.get(name)!r}, which cannot be continued here", "adapter.from")
        for name in dict.fromkeys([*REQUIRED, *found])
        if not _can_continue(name, found.get(name))
    ]
    if recipe.adapter.kind == "qlora" and found.get("use_dora"):
        reason = f"{folder} has DoRA, which is not possible with quantised weights: use kind: lora"
        problems.append(Problem(reason, "adapter.from"))
    if problems:
        return recipe, problems
    values = {key: found[name] for key, name in FROM_FOLDER.items() if found.get(name) is not None}
    values["alpha"] = float(values["alpha"])  # as it is read from the plan, which must have the same digest
    if isinstance(values["target"], list):
        values["target"] = sorted(values["target"])
    adapter = dataclasses.replace(recipe.adapter, from_=str(folder.absolute()), **values)
    return dataclasses.replace(recipe, adapter=adapter), []


def _name_layers_once(found: dict[str, Any]) -> None:
    """Move layers that peft only finds by their weights (see `model.adapter`) from target_parameters to target_modules.

    Weights of experts, whose names end otherwise, stay there.
    """
    layers, weights = found.get("target_modules"), found.get("target_parameters")
    if not isinstance(layers, list) or not isinstance(weights, list):
        return
    if all(isinstance(name, str) and name.endswith(".weight") for name in weights):
        found["target_modules"] = [*layers, *(name.removesuffix(".weight") for name in weights)]
        del found["target_parameters"]


def _can_continue(name: str, value: Any) -> bool:
    """Return whether an adapter with this value in peft's configuration is trained here as peft would train it."""
    if "${" in str(value):  # OmegaConf would resolve it
        return False
    if name in ONLY:
        return value in ONLY[name]
    for key, peft_name in FROM_FOLDER.items():
        if name == peft_name:
            return (value is None and name not in REQUIRED) or accepts(f"adapter.{key}", value)
    return name in HARMLESS or value in UNSET
