"""A Hugging Face folder: written under another name, one group of tensors at a time, checked, and then renamed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

from fsdptrain.checkpoint.disk import report_full_disk
from fsdptrain.checkpoint.shards import Tensors
from fsdptrain.checkpoint.verify import INDEX, WEIGHTS
from fsdptrain.errors import CheckpointError, FsdptrainError
from fsdptrain.model.config import special_token_conflicts
from fsdptrain.model.skeleton import skeleton_in_dtype
from fsdptrain.model.units import saved_state
from fsdptrain.model.weights import Header
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.files import fsync
from fsdptrain.run_folder.ownership import (
    Stamps,
    asset_names,
    copy_assets,
    file_stamps,
    make_scratch,
    remove_scratch,
    replace_export,
)

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
        self._missing: dict[Path, set[str]] = {}  # the tensors of each file that are not written
        self._places: dict[str, tuple[Path, int]] = {}
        files = _in_files(expected)
        numbered = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        for file, tensors in zip(numbered if len(files) > 1 else [WEIGHTS], files, strict=True):
            path = folder / file
            self._missing[path] = set(tensors)
            self._places |= {name: (path, place) for name, place in _write_header(path, tensors).items()}
        self.bytes = sum(tensor.nbytes for tensor in expected.values())
        if len(files) > 1:
            weight_map = {name: self._places[name][0].name for name in sorted(expected)}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

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


def _in_files(tensors: Tensors) -> list[Tensors]:
    """Return the same tensors for each file, in their order."""
    files: list[Tensors] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > MAX_FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files


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


@dataclass(frozen=True)
class ExportResult:
    """What was written: bytes of weights, the files, and the folder with older files that were moved away, if any."""

    bytes: int
    files: Stamps
    kept: Path | None


def write_folder(
    unsharded: PreTrainedModel,
    groups: list[list[str]],
    tensors: Iterator[Tensors],
    assets: Path,
    out: Path,
    dtype: str,
    progress: Progress,
    written: Stamps | None = None,
    beside: Callable[[Path], int] = lambda scratch: 0,
    carried: Mapping[str, Any] = MappingProxyType({}),
) -> ExportResult:
    """Write a complete Hugging Face folder to `out` and check it.

    `unsharded` is a skeleton of the same architecture, `assets` the folder with config and tokenizer. `written` are the
    files of an earlier export at `out`, which are replaced; others stay. `beside` writes more into the folder, when all
    tensors are written, and returns its bytes. `carried` are slices of files that are copied, by name. Raises
    CheckpointError for a full disk, or when the files read back are not what should be in them.
    """
    wanted = skeleton_in_dtype(unsharded, dtype)
    state = saved_state(wanted)
    headers = {name: Header(each.get_shape(), each.get_dtype())[...] for name, each in carried.items()}
    expected = {**tensors_in_files(wanted), **headers}

    def fill(scratch: Path) -> int:
        # Configurations and tokenizer first: a folder that transformers cannot open fails before the weights.
        copy_assets(assets, scratch, asset_names(assets))
        config = AutoConfig.from_pretrained(scratch, trust_remote_code=False)
        config.dtype = getattr(torch, dtype)
        config.save_pretrained(scratch)
        # One group at a time is cast, converted to the form of files, and written.
        writer = SafetensorsWriter(scratch, expected)
        for done, group in enumerate(tensors, 1):
            cast = {name: tensor.to(state[name].dtype) for name, tensor in group.items()}
            writer.add(revert_weight_conversion(unsharded, cast))
            progress("export", done, len(groups))
        for name, each in carried.items():
            writer.add({name: each[...]})
            progress("export", len(groups), len(groups))
        writer.finish()
        # Only a folder that reads back as intended replaces an earlier export.
        check_export(scratch, expected)
        return writer.bytes + beside(scratch)

    return publish(fill, out, sum(tensor.nbytes for tensor in expected.values()), written)


def publish(fill: Callable[[Path], int], out: Path, needed: int, written: Stamps | None = None) -> ExportResult:
    """Let `fill` write a folder, return its bytes and check it; then rename it to `out`.

    `needed` are the bytes on the disk. The caller holds the `output_lock` of `out`. Raises CheckpointError as
    `write_folder` does; then, and after a signal, `out` is as it was.
    """
    scratch = make_scratch(out)
    try:
        with report_full_disk(scratch, needed):
            count = fill(scratch)
        files = file_stamps(scratch)
        kept = replace_export(scratch, out, written or {})
    except BaseException as error:  # safetensors and transformers raise classes of their own
        with contextlib.suppress(OSError):
            remove_scratch(scratch)
        if not isinstance(error, Exception) or (
            isinstance(error, FsdptrainError) and not isinstance(error, CheckpointError)
        ):
            raise
        raise CheckpointError(f"cannot write {out}: {error}") from error
    fsync(out.parent)
    return ExportResult(count, files, kept)


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
