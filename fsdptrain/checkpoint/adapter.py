"""Export what was trained beside frozen weights: an adapter by itself, in peft's format, or merged into the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fsdptrain import __version__
from fsdptrain.checkpoint.save import save_tensors
from fsdptrain.checkpoint.shards import Tensors
from fsdptrain.config.adapter import ADAPTER_WEIGHTS
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import CheckpointError
from fsdptrain.folder.events import Progress
from fsdptrain.folder.files import fsync
from fsdptrain.folder.ownership import asset_names, copy_assets
from fsdptrain.model.adapter import adapted_layers, base_name, is_adapter, merged_weight, save_config, saved_names
from fsdptrain.model.units import trained_state

# Files of the model itself, which an adapter's folder does not have: transformers would open it as a whole model.
OF_MODEL = ("config.json", "generation_config.json")


def trained_groups(trained: Any, groups: list[list[str]]) -> list[list[str]]:
    """Return the names of what is trained, in the groups of the tensors that it changes in the exported model."""
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    layers = adapted_layers(trained)
    found: list[list[str]] = [[] for _ in groups]
    for name in trained_state(trained):
        home = f"{_layer_of(name, layers)}.weight" if is_adapter(name) else base_name(name)
        found[group_of[home]].append(name)
    return found


def _layer_of(name: str, layers: dict[str, Any]) -> str:
    """Return the name of the layer that a parameter of an adapter belongs to."""
    owner = name
    while owner not in layers:
        owner = owner.rpartition(".")[0]
    return owner


def collected(tensors: Iterator[Tensors], groups: list[list[str]], progress: Progress) -> Tensors:
    """Return the tensors of all groups."""
    found: Tensors = {}
    for done, group in enumerate(tensors, 1):
        found |= group
        progress("export", done, len(groups))
    return found


def merged_tensors(
    trained: Any, base: Iterator[Tensors], tensors: Iterator[Tensors], kept: Tensors | None = None
) -> Iterator[Tensors]:
    """Yield the state of the exported model, group by group: the base, with what was trained.

    `trained` is a skeleton with adapters, `tensors` are its trained ones in the same groups as `base`. They are added
    to `kept`.
    """
    layers = adapted_layers(trained)
    for group, changed in zip(base, tensors, strict=True):
        adapters: dict[str, Tensors] = {}
        for name, tensor in changed.items():
            if is_adapter(name):
                layer = _layer_of(name, layers)
                adapters.setdefault(layer, {})[name.removeprefix(f"{layer}.")] = tensor
            else:
                group[base_name(name)] = tensor
        for layer, adapter in adapters.items():
            name = f"{layer}.weight"
            group[name] = merged_weight(layers[layer], group[name], adapter)
        if kept is not None:
            kept |= changed
        yield group


def write_adapter(folder: Path, trained: Any, tensors: Tensors, recipe: Recipe, assets: Path) -> int:
    """Write an adapter as peft does, with tokenizer and model card; check it, and return the bytes of its tensors."""
    folder.mkdir(exist_ok=True)
    copy_assets(assets, folder, [n for n in asset_names(assets) if n not in OF_MODEL and not n.endswith(".py")])
    names = saved_names(trained)
    saved = {key: tensors[name].contiguous() for name, key in names.items()}
    save_tensors(saved, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    fsync(folder / ADAPTER_WEIGHTS)
    save_config(trained, folder)
    (folder / "README.md").write_text(model_card(trained, recipe), encoding="utf-8")
    check_adapter(folder, {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in saved.items()})
    return sum(tensor.nbytes for tensor in saved.values())


def check_adapter(folder: Path, expected: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Raise CheckpointError unless peft reads the configuration in the folder, and its file has just these tensors."""
    from peft import PeftConfig

    PeftConfig.from_pretrained(str(folder))
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as opened:
        found = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        read = {key: (tuple(piece.get_shape()), piece[:0].dtype) for key, piece in found.items()}
    if wrong := sorted(key for key in read.keys() | expected.keys() if read.get(key) != expected.get(key)):
        raise CheckpointError(f"{folder}: {wrong[0]}: expected {expected.get(wrong[0])}, found {read.get(wrong[0])}")


def model_card(trained: Any, recipe: Recipe) -> str:
    """Return the README.md of an adapter's folder."""
    config, adapter = trained.peft_config["default"], recipe.adapter
    name = Path(config.base_model_name_or_path).name if Path(str(recipe.model.id)).is_dir() else str(recipe.model.id)
    kind = "DoRA" if adapter.use_dora else {"lora": "LoRA", "qlora": "QLoRA"}[str(adapter.kind)]
    whole = f", and {', '.join(adapter.modules_to_save)} as a whole" if adapter.modules_to_save else ""
    return f"""---
base_model: {name}
library_name: peft
pipeline_tag: text-generation
tags:
- {kind.lower()}
- fsdptrain
---

# {recipe.name}

A {kind} adapter of rank {adapter.r} (alpha {adapter.alpha:g}, dropout {adapter.dropout:g}) for `{name}`,
trained by fsdptrain {__version__} on {len(adapted_layers(trained))} layers{whole}: learning rate {recipe.optim.lr:g}, \
{recipe.train.global_batch_size} sequences of {recipe.data.seq_len:,} tokens per step.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("PATH OR ID OF THE BASE MODEL"), "THIS FOLDER")
```
"""
