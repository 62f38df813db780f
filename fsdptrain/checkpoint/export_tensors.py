"""What a run exports: the model, an adapter by itself in peft's format, or a model with its adapter merged into it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdptrain.checkpoint.comparison import Way, coarser, weights_memory
from fsdptrain.checkpoint.save import save_tensors
from fsdptrain.checkpoint.shards import Tensors
from fsdptrain.checkpoint.writer import ExportResult, check_tensors, publish, shapes_and_dtypes, write_folder
from fsdptrain.config.adapter import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from fsdptrain.model.adapters import (
    adapted_layers,
    adapted_weight,
    freeze,
    layers_in_nf4,
    merged_weight,
    save_config,
    saved_names,
)
from fsdptrain.model.nf4 import round_trip
from fsdptrain.model.skeleton import skeleton_in_dtype
from fsdptrain.model.units import base_name, decoder_layers, is_adapter, saved_state, trained_state
from fsdptrain.model.weights import carried_tensors, read_groups
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.files import fsync
from fsdptrain.run_folder.ownership import Stamps, asset_names, copy_assets

# Files of the model itself, which an adapter's folder does not have: transformers would open it as a whole model.
OF_MODEL = ("config.json", "generation_config.json")


def names_by_decoder_layer(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of the model's state in groups that are exported together: each decoder layer, each other
    tensor."""
    layers = [f"{name}." for name, _ in decoder_layers(model)]
    groups: dict[str, list[str]] = {}
    for name in saved_state(model):
        groups.setdefault(next((layer for layer in layers if name.startswith(layer)), name), []).append(name)
    return list(groups.values())


class Exported:
    """What a run exports: the model, its adapter, or both; written from the tensors that were trained."""

    def __init__(
        self, unsharded: PreTrainedModel, plan: Plan, assets: Path, dtype: str | None = None, needs_base: bool = False
    ) -> None:
        """`unsharded` is a skeleton without adapters, `assets` the run's folder with config and tokenizer.

        `dtype` is that of the exported model, by default `export.dtype`. `needs_base`: tensors of the files of
        `model.id` may be exported as they are.
        """
        self.unsharded, self.plan, self.assets = unsharded, plan, assets
        self.adapter = plan.recipe.export.adapter if plan.recipe.adapter.kind else None
        separate = self.adapter == "separate"
        self.needs_base = needs_base and not separate
        self.dtype = plan.recipe.model.dtype if separate else dtype or plan.recipe.export.dtype
        self.groups = names_by_decoder_layer(unsharded)
        self.trained: Any = freeze(copy.deepcopy(unsharded), plan.recipe) if plan.freezes else unsharded
        self.trained_groups = trained_groups(self.trained, self.groups)

    def write(
        self,
        tensors: Iterator[Tensors],
        out: Path,
        progress: Progress,
        written: Stamps | None = None,
        check: Callable[[Path], None] = lambda folder: None,
        check_base: Callable[[], None] = lambda: None,
    ) -> ExportResult:
        """Write and check the folder `out` from the tensors of `trained_groups`; see `write_folder`.

        `check` is called with the complete folder, before it replaces an earlier one, and `check_base` before and after
        the files of `model.id` are read; both may raise.
        """
        recipe = self.plan.recipe
        if self.adapter == "separate":

            def fill(scratch: Path) -> int:
                adapter = collected(tensors, self.groups, progress)
                count = write_adapter(scratch, self.trained, adapter, self.assets)
                check(scratch)
                return count

            needed = sum(param.nbytes for param in self.trained.parameters() if param.requires_grad)
            return publish(fill, out, needed, written)
        adapter: Tensors = {}

        def beside(scratch: Path) -> int:
            count = 0
            if self.needs_base:
                check_base()
            if self.adapter == "both":
                count = write_adapter(scratch / ADAPTER_FOLDER, self.trained, adapter, self.assets)
            check(scratch)
            return count

        if self.needs_base:
            check_base()
        if self.plan.freezes:
            base = read_groups(self.unsharded, self.plan, self.groups)
            if recipe.export.merge_base == "dequantized":
                base = self._dequantized(base)
            tensors = merged_tensors(self.trained, base, tensors, adapter if self.adapter == "both" else None)
        with contextlib.ExitStack() as stack:
            carried = stack.enter_context(carried_tensors(self.unsharded, self.plan)) if self.needs_base else {}
            return write_folder(
                self.unsharded, self.groups, tensors, self.assets, out, self.dtype, progress, written, beside, carried
            )

    def _dequantized(self, groups: Iterator[Tensors]) -> Iterator[Tensors]:
        """Yield the same groups, with the weights that were quantised for training as the model computed with them."""
        compute = getattr(torch, self.plan.recipe.fsdp.mixed_precision.param_dtype)
        layers = self._quantised_layers()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # it quantises a hundred times as fast
        for group in groups:
            for name, weight in group.items():
                if layer := layers.get(name.removesuffix(".weight")):
                    group[name] = round_trip(weight.to(device), layer, compute).to(weight)
            yield group

    def _quantised_layers(self) -> dict[str, nn.Module]:
        """Return the layers that are quantised for training: name → layer."""
        recipe = self.plan.recipe
        # What transformers keeps in float32, and is not quantised, depends on the compute dtype.
        compute = recipe.fsdp.mixed_precision.param_dtype
        return layers_in_nf4(skeleton_in_dtype(self.unsharded, recipe.model.dtype, compute), recipe)

    @property
    def runs_own_code(self) -> bool:
        """Whether opening the export runs code of the model, which its assets then have and the user has allowed."""
        return self.plan.trust_remote_code and any(self.assets.glob("*.py"))

    def ways(self) -> dict[str, Way]:
        """Return how the folder that `write` makes is opened: `model`, `merged`, `separate` → way."""
        recipe, found = self.plan.recipe, {}
        compute, quantised = recipe.fsdp.mixed_precision.param_dtype, self._quantised_layers()
        if self.adapter != "separate":
            # Merged into the original weights, an adapter of QLoRA computes something else than what was trained.
            differs = quantised and recipe.export.merge_base == "original"
            memory = weights_memory(self.unsharded, self.dtype)
            name = "merged" if self.adapter else "model"
            found[name] = Way(".", self.dtype, memory, None if differs else coarser(compute, self.dtype))
        if self.adapter in ("separate", "both"):
            layers = [n for n, layer in self.unsharded.named_modules() if isinstance(layer, (nn.Linear, Conv1D))]
            found["separate"] = Way(
                "." if self.adapter == "separate" else ADAPTER_FOLDER,
                compute,
                weights_memory(self.unsharded, compute, quantised),
                compute,
                adapter=True,
                unquantised=[name for name in layers if name not in quantised] if quantised else None,
            )
        return found


def trained_groups(trained: Any, groups: list[list[str]]) -> list[list[str]]:
    """Return the names of what is trained, in the groups of the tensors that it changes in the exported model."""
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    layers = adapted_layers(trained)
    found: list[list[str]] = [[] for _ in groups]
    for name in trained_state(trained):
        layer = _layer_of(name, layers) if is_adapter(name) else None
        home = adapted_weight(layer, layers[layer]) if layer else base_name(name)
        found[group_of[home]].append(name)
    return found


def _layer_of(name: str, layers: dict[str, Any]) -> str:
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
            name = adapted_weight(layer, layers[layer])
            group[name] = merged_weight(layers[layer], group[name], adapter)
        if kept is not None:
            kept |= changed
        yield group


def write_adapter(folder: Path, trained: Any, tensors: Tensors, assets: Path) -> int:
    """Write an adapter as peft does, with the tokenizer; check it, and return the bytes of its tensors."""
    from peft import PeftConfig

    folder.mkdir(exist_ok=True)
    copy_assets(assets, folder, [n for n in asset_names(assets) if n not in OF_MODEL and not n.endswith(".py")])
    names = saved_names(trained)
    saved = {key: tensors[name].contiguous() for name, key in names.items()}
    save_tensors(saved, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    fsync(folder / ADAPTER_WEIGHTS)
    save_config(trained, folder)
    PeftConfig.from_pretrained(str(folder))  # peft reads it
    check_tensors(folder, shapes_and_dtypes(saved))
    return sum(tensor.nbytes for tensor in saved.values())
