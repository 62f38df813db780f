"""What a run exports: the model, an adapter by itself in peft's format, or a model with its adapter merged into it.

The folder is written under another name, one group of tensors at a time, checked, and then renamed.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import constants, split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype
from transformers.pytorch_utils import Conv1D

from fsdptrain.checkpoint.export_check import LIMITS, Way, weights_memory
from fsdptrain.checkpoint.nodes import report_full_disk
from fsdptrain.checkpoint.resume import BASE_KEY
from fsdptrain.checkpoint.save import save_tensors
from fsdptrain.checkpoint.shards import Tensors
from fsdptrain.config.adapter import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from fsdptrain.errors import CheckpointError, FsdptrainError
from fsdptrain.model.adapters import (
    adapted_layers,
    adapted_weight,
    freeze,
    layers_in_nf4,
    merged_weight,
    save_config,
    saved_names,
)
from fsdptrain.model.config import special_token_conflicts
from fsdptrain.model.nf4 import round_trip
from fsdptrain.model.skeleton import skeleton_in_dtype
from fsdptrain.model.units import base_name, decoder_layers, is_adapter, saved_state, trained_state
from fsdptrain.model.weights import Header, carried_tensors, read_groups
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.files import fsync
from fsdptrain.run_folder.ownership import (
    Stamps,
    copy_assets,
    file_stamps,
    make_scratch,
    remove_scratch,
    replace_export,
)
from fsdptrain.run_folder.rundir import RunDir

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
        self,
        unsharded: PreTrainedModel,
        plan: Plan,
        rundir: RunDir,
        step: int,
        identity: dict[str, Any],
        dtype: str | None = None,
    ) -> None:
        """`unsharded` is a skeleton without adapters; the weights are of `step`, of a run with this `identity`.

        `dtype` is that of the exported model, by default `export.dtype`.
        """
        self.unsharded, self.plan, self.rundir, self.step, self.identity = unsharded, plan, rundir, step, identity
        self.assets = rundir.model
        self.adapter = plan.recipe.export.adapter if plan.recipe.adapter.kind else None
        separate = self.adapter == "separate"
        self.needs_base = BASE_KEY in identity and not separate  # files of `model.id` are exported as they are
        self.dtype = plan.recipe.model.dtype if separate else dtype or plan.recipe.export.dtype
        self.groups = names_by_decoder_layer(unsharded)
        self.trained: Any = freeze(copy.deepcopy(unsharded), plan.recipe) if plan.freezes else unsharded
        self.trained_groups = trained_groups(self.trained, self.groups)

    @property
    def needed_bytes(self) -> int:
        """What the weights take on the disk, without those that are carried over."""
        if self.adapter == "separate":
            return sum(param.nbytes for param in self.trained.parameters() if param.requires_grad)
        return weights_memory(self.unsharded, self.dtype)

    def write(
        self,
        tensors: Iterator[Tensors],
        folder: Path,
        progress: Progress,
        check_base: Callable[[], None] = lambda: None,
    ) -> int:
        """Write a folder from the tensors of `trained_groups`, and check it; return the bytes of its tensors.

        `check_base` is called before and after the files of `model.id` are read; it may raise.
        """
        adapter: Tensors = {}
        if self.adapter == "separate":
            for done, group in enumerate(tensors, 1):
                adapter |= group
                progress("export", done, len(self.groups))
            return write_adapter(folder, self.trained, adapter, self.assets)
        if self.needs_base:
            check_base()
        if self.plan.freezes:
            base = read_groups(self.unsharded, self.plan, self.groups)
            if self.plan.recipe.export.merge_base == "dequantized":
                base = self._dequantized(base)
            tensors = merged_tensors(self.trained, base, tensors, adapter if self.adapter == "both" else None)
        with contextlib.ExitStack() as stack:
            carried = stack.enter_context(carried_tensors(self.unsharded, self.plan)) if self.needs_base else {}
            count = write_folder(
                self.unsharded, self.groups, tensors, self.assets, folder, self.dtype, progress, carried
            )
        if self.needs_base:
            check_base()
        if self.adapter == "both":
            count += write_adapter(folder / ADAPTER_FOLDER, self.trained, adapter, self.assets)
        return count

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
            coarser = max(compute, self.dtype, key=LIMITS.__getitem__)
            found[name] = Way(".", self.dtype, memory, None if differs else coarser)
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
    copy_assets(assets, folder, lambda name: name not in OF_MODEL and not name.endswith(".py"))
    names = saved_names(trained)
    saved = {key: tensors[name].contiguous() for name, key in names.items()}
    save_tensors(saved, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    fsync(folder / ADAPTER_WEIGHTS)
    save_config(trained, folder)
    PeftConfig.from_pretrained(str(folder))  # peft reads it
    check_tensors(folder, shapes_and_dtypes(saved))
    return sum(tensor.nbytes for tensor in saved.values())


# --- the folder ------------------------------------------------------------------------------------------------------


MAX_FILE_BYTES = 5 * 10**9
ShapeAndDtype = tuple[tuple[int, ...], torch.dtype]  # of a tensor
DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}  # in safetensors files: BF16, …


class SafetensorsWriter:
    """Writes tensors into safetensors files of at most 5 GB, each at once to its place: it keeps none in memory.

    A file is synced when its last tensor is written. The ranks would seem to hang in one wait for a whole model.
    """

    def __init__(self, folder: Path, expected: Tensors) -> None:
        """Write the headers of the files. `expected` are the tensors to come, on the meta device, by name in a file."""
        self._wanted = shapes_and_dtypes(expected)
        files = split_state_dict_into_shards_factory(
            expected,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_FILE_BYTES,
        )
        self._missing = {folder / file: set(names) for file, names in files.filename_to_tensors.items()}
        self._places: dict[str, tuple[Path, int]] = {}
        for path, names in self._missing.items():
            places = _write_header(path, {name: expected[name] for name in names})
            self._places |= {name: (path, place) for name, place in places.items()}
        self.bytes = int(files.metadata["total_size"])
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": dict(sorted(files.tensor_to_filename.items()))}
            (folder / constants.SAFETENSORS_INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def add(self, tensors: Tensors) -> None:
        """Write tensors, under their names in the file. Raises CheckpointError if one is not as expected."""
        for name, found in shapes_and_dtypes(tensors).items():
            if found != (wanted := self._wanted.get(name)):
                raise CheckpointError(f"{name}: expected {wanted}, found {found}")
            path, place = self._places[name]
            with path.open("r+b") as file:
                file.seek(place)
                file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
            self._missing[path].discard(name)
            if not self._missing[path]:
                fsync(path)

    def finish(self) -> None:
        """Raise CheckpointError if a tensor was not added."""
        if missing := set().union(*self._missing.values()):
            raise CheckpointError(f"{len(missing)} tensors are missing: {min(missing)}")


def _write_header(path: Path, tensors: Tensors) -> dict[str, int]:
    """Write the beginning of a safetensors file; return where the bytes of each tensor belong.

    The format: https://huggingface.co/docs/safetensors. As in files of its library, wide numbers are first, so that all
    are aligned.
    """
    begins, end = {}, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor, begins[name] = tensors[name], end
        end += tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + begin for name, begin in begins.items()}


def write_folder(
    unsharded: PreTrainedModel,
    groups: list[list[str]],
    tensors: Iterator[Tensors],
    assets: Path,
    folder: Path,
    dtype: str,
    progress: Progress,
    carried: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Write a complete Hugging Face folder and check it; return the bytes of its tensors.

    `unsharded` is a skeleton of the same architecture, `assets` the folder with config and tokenizer. `carried` are
    slices of files that are copied, by name. Raises CheckpointError when the files read back are not what should be in
    them.
    """
    wanted = skeleton_in_dtype(unsharded, dtype)
    state = saved_state(wanted)
    headers = {name: Header(each)[...] for name, each in carried.items()}
    expected = {**tensors_in_files(wanted), **headers}
    # Configurations and tokenizer first: a folder that transformers cannot open fails before the weights.
    copy_assets(assets, folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)
    # One group at a time is cast, converted to the form of files, and written.
    writer = SafetensorsWriter(folder, expected)
    for done, group in enumerate(tensors, 1):
        cast = {name: tensor.to(state[name].dtype) for name, tensor in group.items()}
        writer.add(revert_weight_conversion(unsharded, cast))
        progress("export", done, len(groups))
    for name, each in carried.items():
        writer.add({name: each[...]})
        progress("export", len(groups), len(groups))
    writer.finish()
    # Only a folder that reads back as intended replaces an earlier export.
    check_export(folder, expected)
    return writer.bytes


def publish(fill: Callable[[Path], int], out: Path, needed: int, written: Stamps) -> tuple[int, Stamps, Path | None]:
    """Let `fill` write and check a folder and return its bytes; then rename it to `out`.

    Return these bytes, the files, and the folder with older files that were moved away, if any. `needed` are the bytes
    on the disk. `written` are the files of an earlier export at `out`, which are replaced; others stay. The caller
    holds the `output_lock` of `out`. Raises CheckpointError for a full disk, or for any failure of `fill`; then, and
    after a signal, `out` is as it was.
    """
    scratch = make_scratch(out)
    try:
        with report_full_disk(scratch, needed):
            count = fill(scratch)
        files = file_stamps(scratch)
        kept = replace_export(scratch, out, written)
    except BaseException as error:  # safetensors and transformers raise classes of their own
        with contextlib.suppress(OSError):
            remove_scratch(scratch)
        if not isinstance(error, Exception) or (
            isinstance(error, FsdptrainError) and not isinstance(error, CheckpointError)
        ):
            raise
        raise CheckpointError(f"cannot write {out}: {error}") from error
    fsync(out.parent)
    return count, files, kept


def tensors_in_files(model: PreTrainedModel) -> Tensors:
    """Return the state of a skeleton as the files of an export have it, on the meta device: name → tensor."""
    state = {name: tensor.to("meta") for name, tensor in saved_state(model).items()}
    expected: Tensors = revert_weight_conversion(model, state)
    return expected


def check_export(folder: Path, expected: Tensors) -> None:
    """Raise CheckpointError unless the folder holds exactly these tensors.

    Its configurations and its tokenizer must agree on the special tokens.
    """
    check_tensors(folder, shapes_and_dtypes(expected))
    if disagreements := special_token_conflicts(folder):  # which also opens config, generation config and tokenizer
        raise CheckpointError(f"{folder}: {'; '.join(disagreements)}")


def shapes_and_dtypes(tensors: Tensors) -> dict[str, ShapeAndDtype]:
    """Return shape and dtype of each tensor."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def check_tensors(folder: Path, expected: dict[str, ShapeAndDtype]) -> None:
    """Raise CheckpointError unless the safetensors files of a folder hold exactly these tensors."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                shape = tuple(opened.get_slice(name).get_shape())
                piece = opened.get_slice(name)[:0] if shape else opened.get_tensor(name)
                found[name] = (shape, piece.dtype)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors are missing, unexpected or different; {name}: "
            f"expected {expected.get(name)}, found {found.get(name)}"
        )
