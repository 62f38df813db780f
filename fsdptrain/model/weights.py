"""Read weights from safetensors into a sharded skeleton; each rank reads its own slices only."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, str_to_torch_dtype

from fsdptrain.config.plan import Plan
from fsdptrain.data.hub import recipe_errors, safetensors_files
from fsdptrain.errors import RecipeError
from fsdptrain.events import Progress
from fsdptrain.model.init import full_name
from fsdptrain.model.patches import dtensors_stay_on_their_device


def allocate(model: Any, device: torch.device) -> None:
    """Replace every sharded meta parameter by one with unset memory on `device` for this rank's shard."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta:
                memory = torch.empty_like(param, device=device)  # `from_local` would move it to the device of the mesh
                setattr(module, name, nn.Parameter(memory, requires_grad=param.requires_grad))
    model.tie_weights()


def place_buffers(model: Any, device: torch.device, dtype: str | None) -> None:
    """Move buffers to `device`; cast floating-point ones to a given `dtype`, except those that stay in float32."""
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            cast = dtype and buffer.is_floating_point() and full_name(owner, name) not in model.float32_names
            module._buffers[name] = buffer.to(device=device, dtype=getattr(torch, str(dtype)) if cast else buffer.dtype)


def read_weights(model: Any, bare: Any, plan: Plan, device: torch.device, progress: Progress) -> None:
    """Fill a sharded meta model from the safetensors of `model.id`; this rank reads its own slices only.

    `bare` is an unsharded skeleton. Raises RecipeError if the files do not fit the architecture.
    """
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in safetensors_files(plan):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        _fill(model, bare, _counted(slices, progress), plan, device)


def check_weights(bare: Any, plan: Plan, files: list[str]) -> None:
    """Raise RecipeError if `read_weights` would; reads only the headers of the files.

    `bare` is a skeleton, which is not changed.
    """
    slices: dict[str, Any] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                piece = opened.get_slice(name)
                slices[name] = _Header(piece.get_shape(), piece.get_dtype())
    _fill(copy.deepcopy(bare), bare, slices, plan, torch.device("meta"))


def _fill(model: Any, bare: Any, slices: dict[str, Any], plan: Plan, device: torch.device) -> None:
    """Let transformers fill `model` from the tensors of a checkpoint: slices of files, or headers only.

    transformers maps the names and layouts of files to the model's (fused experts, for example) by class names. FSDP
    changes class names, so the mapping is made for the unsharded skeleton `bare`.
    """
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=getattr(torch, plan.recipe.model.dtype),
        dtype_plan=bare._get_dtype_plan(getattr(torch, plan.recipe.model.dtype)),
        weight_mapping=get_model_conversion_mapping(bare),  # type: ignore[arg-type]
    )
    with recipe_errors("model.id: cannot read the weights"), dtensors_stay_on_their_device():
        info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    # What transformers found is an error here: a weight that is missing, unknown or of another shape.
    model.tie_weights()
    names: dict[int, list[str]] = {}  # a tied parameter has several names: one of them in the files is enough
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    missing = sorted(same[0] for same in names.values() if info.missing_keys.issuperset(same))
    unexpected = sorted(set(info.unexpected_keys) - set(getattr(model, "all_tied_weights_keys", None) or ()))
    reshaped = sorted(f"{name} {list(found)} for {list(wanted)}" for name, found, wanted in info.mismatched_keys)
    faults = {"of another shape": reshaped, "missing": missing, "unknown": unexpected}
    for what, found in faults.items():
        if found:
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise RecipeError(f"model.id: {plan.recipe.model.id} does not fit the architecture: {what}: {shown}")
    if info.conversion_errors or info.error_msgs:
        raise RecipeError(f"model.id: cannot convert the weights: {info.conversion_errors or info.error_msgs}")


class _Header:
    """A tensor of a file of which only shape and dtype are known; reading it gives a tensor on the meta device."""

    def __init__(self, shape: list[int], dtype: str) -> None:
        self._shape, self._dtype = shape, dtype

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        return self._shape

    def get_dtype(self) -> str:
        """Return the dtype, as a slice of a safetensors file does: `BF16`."""
        return self._dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.empty(self._shape, dtype=str_to_torch_dtype[self._dtype], device="meta")[key]


class _Counted:
    """A tensor of a file that calls `read` whenever it is read."""

    def __init__(self, rows: Any, read: Callable[[], None]) -> None:
        self._rows, self._read = rows, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._rows[key]
        self._read()
        return tensor


def _counted(slices: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Return the same slices, which report progress as they are read (by transformers, from several threads)."""
    done = itertools.count(1)

    def read() -> None:
        progress("load", min(next(done), len(slices)), len(slices))

    return {name: _Counted(rows, read) for name, rows in slices.items()}
