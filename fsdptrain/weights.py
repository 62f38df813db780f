"""Weights into a sharded skeleton: drawn from a seed, or read from safetensors, each rank its own slices only."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from fsdptrain.data import Progress
from fsdptrain.errors import RecipeError
from fsdptrain.hub import checkpoint_files, recipe_errors
from fsdptrain.model import blocks_of
from fsdptrain.plan import Plan, seed_of


def allocate(model: Any, device: torch.device) -> None:
    """Give every sharded meta parameter real, unset memory for its own shard; buffers go to `device`."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta:
                memory = torch.empty_like(param, device=device)  # from_local would move it to the mesh's own device
                setattr(module, name, nn.Parameter(memory, requires_grad=param.requires_grad))
    model.tie_weights()


def place_buffers(model: Any, device: torch.device, dtype: str | None) -> None:
    """Move buffers to `device`; floating-point ones are cast to `dtype` where one is asked for."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kind = getattr(torch, dtype) if dtype and buffer.is_floating_point() else buffer.dtype
            module._buffers[name] = buffer.to(device=device, dtype=kind)


def draw_weights(model: Any, mirror: Any, seed: int, progress: Progress) -> None:
    """Fill a sharded model with random weights that depend on `seed` and the parameter's name alone.

    `mirror` is an unsharded skeleton. It is made real a block at a time on the CPU and initialised by the
    architecture's own rules; every rank keeps its slices. So all world sizes start from the same weights, and no rank
    ever holds the model.
    """
    targets = dict(model.named_parameters())
    names = {id(param): name for name, param in mirror.named_parameters()}
    groups = _init_groups(mirror)
    for done, (group, module) in enumerate(groups, 1):
        present = [(m, n, p) for m in module.modules() for n, p in m.named_parameters(recurse=False) if id(p) in names]
        for owner, name, param in present:
            owner._parameters[name] = nn.Parameter(torch.empty_like(param, device="cpu"))
        torch.manual_seed(seed_of(seed, group))
        module.apply(mirror._init_weights)
        for owner, name, param in present:
            target = targets[names[id(param)]]
            whole = owner._parameters[name]
            assert isinstance(whole, torch.Tensor)
            sliced = distribute_tensor(whole.detach(), target.device_mesh, target.placements, src_data_rank=None)
            target.detach().to_local().copy_(sliced.to_local())
            owner._parameters[name] = param
        progress("initialise", done, len(groups))


def _init_groups(mirror: Any) -> list[tuple[str, nn.Module]]:
    """Blocks, and every other module that has parameters of its own: what is initialised in one go."""
    blocks = blocks_of(mirror)
    inside = {id(m) for _, block in blocks for m in block.modules()}
    others = [
        (name, module)
        for name, module in mirror.named_modules()
        if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
    ]
    return blocks + others


def read_weights(model: Any, bare: Any, plan: Plan, device: torch.device, progress: Progress) -> None:
    """Fill a sharded meta model from the safetensors of `model.id`: this rank reads its own slices and no more.

    transformers maps the files' names and layouts to the model's (fused experts and the like), by class names, which
    FSDP changes: so the mapping is taken from the unsharded skeleton `bare`. Raises RecipeError when the files and the
    architecture do not belong together.
    """
    files = checkpoint_files(plan)
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        slices = _counted(slices, progress)
        settings = LoadStateDictConfig(
            device_map={"": device},
            dtype=getattr(torch, plan.recipe.model.dtype),
            weight_mapping=get_model_conversion_mapping(bare),  # type: ignore[arg-type]
        )
        with recipe_errors("model.id: cannot read the weights"), _wrapped_where_they_are():
            info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    model.tie_weights()
    missing = sorted(name for name, param in model.named_parameters() if param.is_meta)
    unexpected = sorted(set(info.unexpected_keys) - set(getattr(model, "all_tied_weights_keys", None) or ()))
    reshaped = sorted(f"{name} {list(found)} for {list(wanted)}" for name, found, wanted in info.mismatched_keys)
    faults = {"of another shape": reshaped, "missing": missing, "unknown": unexpected}
    for what, names in faults.items():
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise RecipeError(f"model.id: {plan.recipe.model.id} does not fit the architecture: {what}: {shown}")
    if info.conversion_errors or info.error_msgs:
        raise RecipeError(f"model.id: cannot convert the weights: {info.conversion_errors or info.error_msgs}")


@contextlib.contextmanager
def _wrapped_where_they_are() -> Iterator[None]:
    """transformers makes DTensors by `from_local`, which moves them to the mesh's device: offloaded ones stay here."""

    def wrapped(local: torch.Tensor, like: DTensor) -> DTensor:
        return DTensor(local.contiguous(), like._spec, requires_grad=False)

    before = core_model_loading._dtensor_from_local_like
    core_model_loading._dtensor_from_local_like = wrapped  # type: ignore[assignment]
    try:
        yield
    finally:
        core_model_loading._dtensor_from_local_like = before


class _Counted:
    """A tensor of a file that says when it is read."""

    def __init__(self, rows: Any, read: Callable[[], None]) -> None:
        self._rows, self._read = rows, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._rows[key]
        self._read()
        return tensor


def _counted(slices: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The same slices, with progress told as they are read (by transformers, from several threads)."""
    done = itertools.count(1)

    def read() -> None:
        progress("load", min(next(done), len(slices)), len(slices))

    return {name: _Counted(rows, read) for name, rows in slices.items()}
