"""Recurrences and convolutions, each document by itself: what state space models and linear attention compute.

transformers calls the kernel of a package for them, or, where that is not installed, a function in torch that stands in
for it. Kernels take bounds of documents, but stand-ins ignore or refuse them, and architectures pass them on under
different names. So `accept_documents` lets these functions take `packed_documents`, which reaches them in every
architecture that hands its own arguments to its layers; whether documents then are apart is for `Probe` to find out.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BOUNDS = {  # a kernel → the dimension of the tokens in its tensors, and its argument for the bounds of documents
    "causal_conv1d_fn": (2, "seq_idx"),
    "chunk_gated_delta_rule": (1, "cu_seqlens"),
    "chunk_kda": (1, "cu_seqlens"),
    "mamba_chunk_scan_combined": (1, "seq_idx"),
    "mamba_split_conv1d_scan_combined": (1, "seq_idx"),
}
UNBOUNDED = ("mamba_inner_fn", "selective_scan_fn")  # kernels without such an argument


@dataclass(frozen=True)
class SequenceKernel:
    """A kernel for training: its name, its distribution, and whether that is installed and takes bounds."""

    name: str
    distribution: str
    usable: bool


def accept_documents(model: nn.Module) -> list[SequenceKernel]:
    """Let the recurrences of a model compute each document alone where they get `packed_documents`, in this process.

    Replaces functions in the modules of its classes; without that argument they do what they did before. Returns the
    kernels of these modules, also those that take no bounds.
    """
    found = []
    for module_name in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
        for name, function in list(vars(sys.modules[module_name]).items()):
            if kernel := kernel_of(function):
                found.append(kernel)
                if kernel.name in BOUNDS and not hasattr(function, "without_bounds"):
                    setattr(sys.modules[module_name], name, taking_documents(function, kernel.name))
    return found


def kernel_of(function: Any) -> SequenceKernel | None:
    """Return the kernel that transformers calls in place of a function, None if it has none for training.

    `use_kernel_func_from_hub_with_fallback` keeps it in its closure. With other names there nothing is found: packed
    documents are then refused.
    """
    function = getattr(function, "without_bounds", function)
    if not (inspect.isfunction(function) and hasattr(function, "__wrapped__")):
        return None
    known = inspect.getclosurevars(function).nonlocals
    name, package = known.get("func_name"), known.get("package")
    if package is None or not (name in BOUNDS or name in UNBOUNDED):
        return None
    usable = known.get("implementation", function.__wrapped__) is not function.__wrapped__
    usable &= name in BOUNDS and BOUNDS[name][1] in known["applicable_params"]
    return SequenceKernel(name, {"fla": "flash-linear-attention"}.get(package, package.replace("_", "-")), usable)


def taking_documents(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of transformers that computes each document alone if it gets `packed_documents`."""

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
    return result_of(function(*args, **{**options, argument: documents}))


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
        results.append(result_of(stand_in(*map(part, args), **own)))
    return None if results[0] is None else torch.cat(results, dim)  # None: only the kernel computes it


def result_of(found: Any) -> Any:
    """Return the first of several results."""
    return found[0] if isinstance(found, tuple) else found
