"""What this package replaces in torch and transformers, and the private functions of both that it relies on.

`RELIES_ON` names every original, and digests of its source with the versions in which it was read. A test fails when an
original has changed within a version, and warns when a version has another source: read it, adapt this package, add it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.attention.varlen  # noqa: F401  (registers two operators)
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import core_model_loading, masking_utils
from transformers.integrations import hub_kernels

RELIES_ON = {
    # Replaced below.
    "transformers.core_model_loading._dtensor_from_local_like": {"9eb29ea0e054": "5.23.0"},
    "transformers.integrations.hub_kernels.is_torchdynamo_exporting": {"906fc60c30b3": "5.23.0"},
    "transformers.masking_utils.find_packed_sequence_indices": {"ebd2ac7ca795": "5.23.0"},
    # Used as they are: by skeleton and weights,
    "transformers.PreTrainedModel._get_dtype_plan": {"9ef80238ec5a": "5.23.0"},
    "transformers.PreTrainedModel._adjust_missing_and_unexpected_keys": {"82ffcc857800": "5.24.0"},
    "transformers.PreTrainedConfig._attn_implementation": {"0ecad559168e": "5.23.0"},
    "transformers.PreTrainedModel._supports_flash_attn": {"60a33e6cf515": "5.23.0"},
    # by units and init,
    "transformers.PreTrainedModel._no_split_modules": {"dc937b598926": "5.23.0"},
    "transformers.PreTrainedModel._init_weights": {"a315e7d7cb00": "5.23.0", "2f3d605374c4": "5.24.0"},
    # by tiles.
    "torch.ops.aten._softmax_backward_data.default": {"2827cddc7f79": "2.11.0 2.13.0 2.15.0"},
    # by varlen: torch calls these operators by position, and there are kernels for them on a CPU here,
    "torch.ops.torch_attn._varlen_attn.default": {
        "9a02c9f457e9": "2.11.0",
        "b21b9f9d7174": "2.13.0",
        "0552340bc519": "2.15.0",
    },
    "torch.ops.torch_attn._varlen_attn_backward.default": {"e39279965701": "2.11.0 2.13.0", "3aa89126d8b1": "2.15.0"},
}


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of this rank's part, sharded as `like` is; the part may be on another device than the mesh."""
    return DTensor(local.contiguous(), like._spec, requires_grad=False)


# A context in which transformers builds DTensors from local tensors without moving them, as its own function does with
# `DTensor.from_local`, to the device of the mesh: the weights of `fsdp.cpu_offload` must stay in host memory.
dtensors_stay_on_their_device = partial(mock.patch.object, core_model_loading, "_dtensor_from_local_like", dtensor_like)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def import_quietly(name: str) -> Any:
    """Return the module bitsandbytes, or peft, which imports it; raises ImportError if it is not installed.

    On a CPU with bfloat16 instructions the import of bitsandbytes downloads a faster kernel for inference with the
    package `kernels`, and warns if that fails. The import must not run downloaded code, so `kernels` is hidden from it.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    hidden = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    sys.modules["kernels"] = None  # type: ignore[assignment]  # the documented way to make `import kernels` fail
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hidden)


# A context in which state space models and linear attention run transformers' own torch code; `start()` never ends it.
# Where causal_conv1d, fla and mamba_ssm are installed, transformers calls them on any device, although they need a
# GPU, unless a model is exported.
torch_operators = partial(mock.patch.object, hub_kernels, "is_torchdynamo_exporting", lambda: True)


def find_documents_without_waiting(packed: bool) -> None:
    """Build masks without waiting for the device from now on, in this process; `packed` as in `documents_of`.

    Replaces `transformers.masking_utils.find_packed_sequence_indices`, which reads the position ids.
    """
    masking_utils.find_packed_sequence_indices = partial(documents_of, packed=packed)


def documents_of(position_ids: torch.Tensor, packed: bool) -> torch.Tensor | None:
    """Return the number of the document of each token [B, S], from 0 in each row; None if rows are one document each.

    `packed` is whether rows may have several documents. `position_ids` is [B, S]: each document begins again at 0.
    """
    if not packed:
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


VARLEN_FORWARD, VARLEN_BACKWARD = (
    torch.ops.torch_attn._varlen_attn.default, torch.ops.torch_attn._varlen_attn_backward.default
)  # fmt: skip


# ---------------------------------------------------------------- recurrences and convolutions, each document by itself

BOUNDS = {  # a kernel → the dimension of the tokens in its tensors, and its argument for the bounds of documents
    "causal_conv1d_fn": (2, "seq_idx"),
    "chunk_gated_delta_rule": (1, "cu_seqlens"),
    "chunk_kda": (1, "cu_seqlens"),
    "mamba_chunk_scan_combined": (1, "seq_idx"),
    "mamba_split_conv1d_scan_combined": (1, "seq_idx"),
}


class SequenceKernel(NamedTuple):
    """A kernel for training: its name, its distribution, and whether that is installed and takes bounds."""

    name: str
    distribution: str
    usable: bool


def accept_documents(model: nn.Module) -> list[SequenceKernel]:
    """Let the recurrences of a model compute each document alone where they get `packed_documents`, in this process.

    transformers calls the kernel of a package, or a function in torch that stands in for it. Kernels take bounds of
    documents, but stand-ins ignore or refuse them. So this replaces functions in the modules of the model's classes, as
    the argument reaches them in every architecture that hands its own to its layers. Returns the kernels of these
    modules.
    """
    found = []
    for module_name in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
        for name, function in list(vars(sys.modules[module_name]).items()):
            if kernel := _kernel_of(function):
                found.append(kernel)
                if not hasattr(function, "without_bounds"):
                    setattr(sys.modules[module_name], name, _taking_documents(function, kernel.name))
    return found


def _kernel_of(function: Any) -> SequenceKernel | None:
    """Return the kernel that transformers calls in place of a function, None if it has none for training.

    `use_kernel_func_from_hub_with_fallback` keeps it in its closure. With other names there nothing is found: packed
    documents are then refused.
    """
    function = getattr(function, "without_bounds", function)
    if not (inspect.isfunction(function) and hasattr(function, "__wrapped__")):
        return None
    known = inspect.getclosurevars(function).nonlocals
    name, package = known.get("func_name"), known.get("package")
    if package is None or name not in BOUNDS:
        return None
    usable = known.get("implementation", function.__wrapped__) is not function.__wrapped__
    usable &= BOUNDS[name][1] in known["applicable_params"]
    return SequenceKernel(name, {"fla": "flash-linear-attention"}.get(package, package.replace("_", "-")), usable)


def _taking_documents(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, packed_documents: torch.Tensor | None = None, **options: Any) -> Any:
        if packed_documents is None:
            return function(*args, **options)
        return within_documents(function, name, packed_documents, *args, **options)

    wrapped.without_bounds = function  # type: ignore[attr-defined]
    return wrapped


@torch.compiler.disable  # type: ignore[untyped-decorator]
def within_documents(function: Any, name: str, bounds: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Return what a function computes for each document of some rows by itself, for the kernel `name`.

    Tensors with more than two dimensions have the rows in their first. `bounds`, int32 [N+1], count the tokens of all
    rows. Where it returns a last state too, which training does not use, that is None.
    """
    dim = BOUNDS[name][0]
    rows, tokens = args[0].shape[0], args[0].shape[dim]

    def in_one_row(value: Any) -> Any:
        """Return a tensor as one row of all tokens, [1, B·S, …] if `dim` is 1; others as they are."""
        if not (isinstance(value, torch.Tensor) and value.ndim > 2):
            return value
        return value.transpose(1, dim).flatten(0, 1)[None].transpose(1, dim)

    args, options = tuple(map(in_one_row, args)), {key: in_one_row(value) for key, value in options.items()}
    compute = one_after_another if bounds.device.type == "cpu" else in_kernel
    out = compute(function, name, bounds, args, options)
    if out is not None:
        out = out.transpose(1, dim)[0].unflatten(0, (rows, tokens)).transpose(1, dim)
    return (out, None) if "output_final_state" in options else out


def in_kernel(function: Any, name: str, bounds: torch.Tensor, args: Any, options: dict[str, Any]) -> Any:
    """Return the result for one row of all tokens from the kernel, which gets the documents' bounds or numbers."""
    dim, argument = BOUNDS[name]
    documents = bounds
    if argument == "seq_idx":
        at = torch.arange(args[0].shape[dim], dtype=bounds.dtype, device=bounds.device)
        documents = torch.searchsorted(bounds[1:], at, right=True, out_int32=True)[None]
    return _result_of(function(*args, **{**options, argument: documents}))


def one_after_another(function: Any, name: str, bounds: torch.Tensor, args: Any, options: dict[str, Any]) -> Any:
    """Return the result for one row of all tokens from transformers' function in torch, called for every document."""
    dim, stand_in, results = BOUNDS[name][0], inspect.unwrap(function), []
    for start, end in itertools.pairwise(bounds.tolist()):
        if start == end:
            continue

        def part(value: Any, start: int = start, end: int = end) -> Any:
            tokens = isinstance(value, torch.Tensor) and value.ndim > 2
            return value.narrow(dim, start, end - start) if tokens else value

        own = {key: part(value) for key, value in options.items()}
        results.append(_result_of(stand_in(*map(part, args), **own)))
    return None if results[0] is None else torch.cat(results, dim)  # None: only the kernel computes it


def _result_of(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found
