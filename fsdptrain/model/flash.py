"""FlashAttention 3 or 4 behind torch's varlen operator, where it is installed and computes the model's heads correctly.

torch has FlashAttention 2 built in. `torch.nn.attention.activate_flash_attention_impl` puts another implementation
behind the same operators, for the whole process: autograd, recomputation, compilers and forecasts see no difference.
Builds of the packages may lack a backward pass, a head size or a window. So a short trial on the device decides.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import attention
from transformers import AttentionInterface

from fsdptrain.data.corpus import document_bounds
from fsdptrain.errors import error_summary
from fsdptrain.model import varlen
from fsdptrain.model.probe import Probe

PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}  # what torch 2.13 imports
BEST = {9: ("FA3", "FA4"), 10: ("FA4",)}  # by major compute capability, the fastest first: Hopper, Blackwell
NAMES = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}
# The versions of CUDA for which torch's index has builds of FlashAttention 3; PyPI has none. They also run with a torch
# for a later one of the same major version (dev-discuss.pytorch.org/t/flash-attention-3-wheels/3322).
FA3_BUILDS = ((13, 0), (12, 8), (12, 6))
LENGTHS = (200, 1, 55, 128)  # of the documents of a trial, in tokens
WINDOW = 70  # tokens
TOLERANCE = 0.02  # relative, of a norm: bf16 rounds attention by 0.5%


def installed(major: int) -> list[str]:
    """Return the implementations that are installed and run on a GPU of this major compute capability, best first."""
    if not hasattr(attention, "activate_flash_attention_impl"):  # torch 2.11 may not have it
        return []
    return [name for name in BEST.get(major, ()) if _is_there(PACKAGES[name])]


def _is_there(module: str) -> bool:
    """Return whether a module is installed, without importing it or what contains it."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return spec is not None and (
        not inner or any(Path(folder, *inner).with_suffix(".py").exists() for folder in folders)
    )


def note_before(major: int) -> str | None:
    """Return a note for a dry run if another implementation than FlashAttention 2 is installed."""
    found = [NAMES[name] for name in installed(major)]
    return f"{found[0]} is installed: the run uses it if it passes a trial with this model's heads" if found else None


def install_line(name: str, cuda: str | None) -> str | None:
    """Return the command that installs an implementation beside a torch for this version of CUDA; None: no build.

    A torch without CUDA plans for other machines: with PyPI's torch, for CUDA 13.
    """
    if name == "FA4":
        return "pip install flash-attn-4"
    major, minor = map(int, (cuda or "13.0").split(".")[:2])
    found = next((build for build in FA3_BUILDS if build[0] == major and build[1] <= minor), None)
    index = "https://download.pytorch.org/whl/cu{}{}"
    return found and f"pip install flash-attn-3 --no-deps --index-url {index.format(*found)}"


def recommendation(name: str, cuda: str | None = torch.version.cuda) -> str | None:
    """Return a note that recommends an implementation which is not installed; None if there is no build of it."""
    line = install_line(name, cuda)
    return line and f"attention is computed by FlashAttention 2; {NAMES[name]} is faster on this card: {line}"


def activate_best(bare: Any, device: torch.device, major: int) -> str | None:
    """Use the best implementation that computes the attention of a model from now on, in this process.

    `bare` is the model's skeleton with varlen attention, `major` the compute capability of `device`. Returns a note on
    what is used and what failed, or what to install; None on a card for which there is nothing better.
    """
    failed, found = "", installed(major)
    heads = heads_of(bare) if found else set()
    for name in found:
        try:
            attention.activate_flash_attention_impl(name)
            for each in heads:
                check(each, device)
            return f"{failed}attention is computed by {NAMES[name]}"
        except Exception as error:  # whatever the package raises, when it is imported or when it computes
            failed += f"{NAMES[name]} is installed but not used: {error_summary(error)}; "
        restore()
    if found:
        return f"{failed}attention is computed by FlashAttention 2"
    return recommendation(BEST[major][0]) if major in BEST else None


def active() -> str | None:
    """Return the implementation that is used instead of FlashAttention 2; None if none is."""
    current: str | None = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return current


def restore() -> None:
    """Use FlashAttention 2 again."""
    if active():
        attention.restore_flash_attention_impl()


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer: how many for queries and for keys, their elements, and whether it has a window.

    `of_values` are the elements of a head of values.
    """

    queries: int
    keys: int
    size: int
    of_values: int
    window: bool


def heads_of(bare: Any) -> set[Heads]:
    """Return the different heads of a skeleton with varlen attention, from its own forward on a CPU."""
    seen = set()

    def watched(module: Any, query: Any, key: Any, value: Any, *args: Any, **others: Any) -> Any:
        window = others.get("sliding_window") is not None
        seen.add(Heads(query.shape[1], key.shape[1], query.shape[3], value.shape[3], window))
        return varlen.attend_within_documents(module, query, key, value, *args, **others)

    documents, longest = document_bounds([[3]])
    AttentionInterface.register(varlen.NAME, watched)
    try:
        Probe(copy.deepcopy(bare)).logits([[0, 1, 2]], documents=documents, longest_document=longest)
    finally:
        AttentionInterface.register(varlen.NAME, varlen.attend_within_documents)
    return seen


def check(heads: Heads, device: torch.device) -> None:
    """Raise RuntimeError if attention with these heads has a wrong result or gradient on `device`, in bf16."""
    random = torch.Generator().manual_seed(0)
    shapes = [(heads.queries, heads.size), (heads.keys, heads.size), (heads.keys, heads.of_values)]
    inputs = [torch.randn(1, sum(LENGTHS), n, size, generator=random).bfloat16() for n, size in shapes]
    upstream = torch.randn(1, sum(LENGTHS), heads.queries, heads.of_values, generator=random).bfloat16()
    documents, longest = document_bounds([LENGTHS])

    def computed(on: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(on, dtype).transpose(1, 2).requires_grad_() for x in inputs)
        out, _ = varlen.attend_within_documents(
            torch.nn.Module(), q, k, v, None, documents=documents.to(on), longest_document=longest,
            sliding_window=WINDOW if heads.window else None,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream.to(on, dtype))]

    exact = computed(torch.device("cpu"), torch.float32)
    found = computed(device, torch.bfloat16)
    for what, a, b in zip(("result", "dq", "dk", "dv"), found, exact, strict=True):
        error = float((a.cpu().float() - b).norm() / b.norm())
        if not error <= TOLERANCE:
            raise RuntimeError(f"for {heads} its {what} has an error of {error:.1%}")
