"""Read the configuration of an adapter that peft has saved, for `adapter.from`. No torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from fsdptrain.config.paths import expanded
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import Problem

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


ADAPTER_FOLDER = "adapter"  # in an export of both


# Recipe key → peft's key, which the folder determines.
FROM_FOLDER = {
    "r": "r", "alpha": "lora_alpha", "target": "target_modules", "modules_to_save": "modules_to_save",
    "use_dora": "use_dora", "use_rslora": "use_rslora",
}  # fmt: skip


# peft's keys with the values that this engine can continue from.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "lora_bias": (False, None), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "layers_to_transform": (None, []), "layer_replication": (None,),
    "target_parameters": (None, []), "trainable_token_indices": (None,), "exclude_modules": (None, []),
}  # fmt: skip


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
        return recipe, [Problem(f"cannot read {folder / ADAPTER_CONFIG}: {reason}", "adapter.from")]
    if not (folder / ADAPTER_WEIGHTS).is_file():
        return recipe, [Problem(f"{folder} has no {ADAPTER_WEIGHTS}", "adapter.from")]
    problems = [
        Problem(f"{folder} has {name}: {found[name]!r}, which cannot be continued here", "adapter.from")
        for name, allowed in ONLY.items()
        if name in found and found[name] not in allowed
    ]
    values = {key: found[name] for key, name in FROM_FOLDER.items() if found.get(name) is not None}
    if not isinstance(values.get("target"), list):
        problems.append(Problem(f"{folder}: target_modules is not a list of names", "adapter.from"))
    if problems:
        return recipe, problems
    values["target"] = sorted(values["target"])
    adapter = dataclasses.replace(recipe.adapter, from_=str(folder.absolute()), **values)
    return dataclasses.replace(recipe, adapter=adapter), []
