"""Which kernel computes a model's attention: the choice before a model is built, and a trial of FlashAttention 3 and 4.

On a CPU it is `tiles`. On a GPU it is torch's `varlen` operator, each document by itself, if that computes the model.
Where rows have one document it is torch's sdpa, if that is cuDNN (Hopper and Blackwell): padding is at their end, and
causality hides it from the tokens before it, so that no mask is needed. Else it is sdpa or eager with a mask.

Behind the varlen operator is FlashAttention 2, which torch has built in.
`torch.nn.attention.activate_flash_attention_impl` puts another one behind it, for the whole process: autograd,
recomputation, compilers and forecasts see no difference. Builds of the packages may lack a backward pass, a head size
or a window. So a short trial on the device decides.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch.nn import attention as of_torch

from fsdptrain.data.corpus import document_bounds
from fsdptrain.errors import Problem, RecipeError, error_summary
from fsdptrain.model import varlen
from fsdptrain.model.config import config_parts
from fsdptrain.model.probe import run_in_varlen, sharing_obstacle, varlen_obstacle
from fsdptrain.model.skeleton import skeleton
from fsdptrain.plan.plan import Plan, varied

LEAST_CAPABILITY = 8, 0  # of a GPU for FlashAttention, major and minor: T4, V100 and RTX 20 have less

CUDNN_HEAD = 128  # elements, and a multiple of 8: what cuDNN computes in forward and in backward
CUDNN_VERSION = 91501  # wheels for CUDA 12.9 and before have older ones, which torch does not prefer
CUDNN_MAJORS = {9, 10}  # of the compute capability: Hopper and Blackwell's data centre cards; RTX cards have 12


def choose_attention(
    plan: Plan, config: Any, prefers_cudnn: bool | None = None, has_flash: bool = True
) -> tuple[Plan, Any]:
    """Return the plan with the attention kernel that its model is built with, and the skeleton that has it.

    sdpa becomes varlen where that applies; auto becomes varlen, or what transformers chooses: sdpa or eager. Instead of
    varlen it is sdpa where torch's sdpa is cuDNN; `prefers_cudnn` is whether torch prefers that on the card, by default
    on those of this process. `has_flash` is whether a card that is not in this process has FlashAttention: those before
    Ampere do not.
    """
    model = plan.recipe.model
    bare = skeleton(config, model)
    if model.attn_implementation not in ("auto", "sdpa"):
        return plan, bare
    if plan.ranks_of_row > 1:
        check_context(plan, bare, has_flash)
    kernels = _kernels(bare)
    # A model of several parts may support sdpa in some of them only.
    kernel = kernels.pop() if len(kernels) == 1 else "eager"
    if kernel == "sdpa" and has_flash and obstacle(plan, bare) is None:
        bare.set_attn_implementation(kernel := varlen.NAME)
        if (is_cudnn_preferred() if prefers_cudnn is None else prefers_cudnn) and _cudnn_computes(plan, bare):
            bare.set_attn_implementation(kernel := "sdpa")
    elif model.attn_implementation == "sdpa":
        return plan, bare
    return varied(plan, {"model.attn_implementation": kernel}), bare


def _kernels(bare: Any) -> set[str]:
    return {part._attn_implementation for part in config_parts(bare.config)}


def check_context(plan: Plan, bare: Any, has_flash: bool = True) -> None:
    """Raise RecipeError if ranks cannot share the rows of a skeleton's model."""
    kernels = _kernels(bare)
    reason = f"its attention is {', '.join(sorted(kernels))}" if kernels != {"sdpa"} else obstacle(plan, bare)
    reason = reason or (None if has_flash else "this card has no FlashAttention")
    reason = reason or sharing_obstacle(bare, plan.ranks_of_row, plan.recipe.data.seq_len)
    parallel = plan.recipe.parallel
    if reason:
        key = "parallel.context" if parallel.context > 1 else "parallel.tensor"
        raise RecipeError([Problem(f"{plan.ranks_of_row} ranks cannot share a row: {reason}", key)])


_obstacles: dict[str, str | None] = {}  # class and configuration of a model → what `obstacle` found


def obstacle(plan: Plan, bare: Any) -> str | None:
    """Return why the varlen kernel cannot compute the plan's model, None if it can.

    On a CPU it is used only where ranks share rows, because it is slow there. `bare` is the model's skeleton, with sdpa
    as its attention.
    """
    on_gpu = plan.topology.device == "cuda"
    if not (on_gpu or plan.ranks_of_row > 1):
        return "it needs a GPU"
    if reason := card_obstacle():
        return reason
    if on_gpu and plan.recipe.fsdp.mixed_precision.param_dtype == "float32":
        return "it computes in bfloat16, not in float32"
    if not bare._supports_flash_attn:
        return f"transformers declares no flash attention for {type(bare).__name__}"
    kind = f"{type(bare).__name__} {bare.config.to_json_string()}"
    if kind not in _obstacles:
        _obstacles[kind] = varlen_obstacle(bare)
    return _obstacles[kind]


def card_obstacle() -> str | None:
    """Return why FlashAttention does not run on a GPU of this process, None if it does or if no GPU is here."""
    capability = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())), default=LEAST_CAPABILITY)
    if capability >= LEAST_CAPABILITY:
        return None
    least, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
    return f"it needs a GPU of compute capability {least}, and this one has {found}"


def mask_note(plan: Plan, bare: Any) -> str | None:
    """Return a note if a mask tells documents of a sequence apart on a GPU; `plan` has the kernel that is used."""
    kernel, together = plan.recipe.model.attn_implementation, plan.recipe.documents_share_sequences
    if plan.topology.device != "cuda" or kernel not in ("sdpa", "eager") or not together:
        return None
    reason = obstacle(plan, bare)
    hint = "; if flash-attn is installed, try flash_attention_2" if bare._supports_flash_attn else ""
    return reason and (
        f"model.attn_implementation: {kernel} with a mask of seq_len² entries, because torch's varlen kernel cannot "
        f"compute this model: {reason}{hint}"
    )


# --------------------------------------------------------------------------------------------------------------- cuDNN


def is_cudnn_preferred() -> bool:
    """Return whether torch prefers cuDNN's attention on every GPU of this process; False without a GPU."""
    majors = {torch.cuda.get_device_capability(index)[0] for index in range(torch.cuda.device_count())}
    return bool(majors) and majors <= CUDNN_MAJORS and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION


def _cudnn_computes(plan: Plan, bare: Any) -> bool:
    """Return whether cuDNN computes the attention of a plan without a mask, on a card where torch prefers it.

    `bare` is the model's skeleton with varlen attention, which ranks that share rows need. Windows need a mask. torch
    excludes cuDNN where algorithms must be deterministic, and `avoid_wrong_kernel` excludes some lengths.
    """
    recipe, seq_len = plan.recipe, plan.recipe.data.seq_len
    if plan.ranks_of_row > 1 or recipe.documents_share_sequences or seq_len % 128 or recipe.train.deterministic:
        return False
    return all(
        heads.size == heads.of_values <= CUDNN_HEAD and heads.size % 8 == 0 and not heads.has_window
        for heads in heads_of(bare)
    )


def avoid_wrong_kernel(seq_len: int) -> None:
    """Switch cuDNN's attention off where its backward may give NaN: at `seq_len % 128 == 64` (pytorch#196678)."""
    if seq_len % 128:
        torch.backends.cuda.enable_cudnn_sdp(False)


# ----------------------------------------------------------------------------------------------- FlashAttention 3 and 4

BEST_FLASH = {9: ("FA3", "FA4"), 10: ("FA4",)}  # by major compute capability, the fastest first: Hopper, Blackwell
FLASH_NAMES = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}
PACKAGES = {"FA3": "flash-attn-3", "FA4": "flash-attn-4"}
INSTALL = {  # PyPI has no builds of FlashAttention 3; torch's index has them for CUDA 12.6, 12.8 and 13.0
    "FA3": "for CUDA 13 (for 12, replace cu130 by cu128 or cu126): pip install flash-attn-3 --no-deps --index-url "
    "https://download.pytorch.org/whl/cu130",
    "FA4": "pip install flash-attn-4",
}
LENGTHS = (200, 1, 55, 128)  # of the documents of a trial, in tokens
WINDOW = 70  # tokens
TOLERANCE = 0.02  # relative, of a norm: bf16 rounds attention by 0.5%


def installed_flash(major: int) -> list[str]:
    """Return the implementations that are installed and run on a GPU of this major compute capability, best first."""
    if not hasattr(of_torch, "activate_flash_attention_impl"):  # torch 2.11 may not have it
        return []
    return [name for name in BEST_FLASH.get(major, ()) if [*metadata.distributions(name=PACKAGES[name])]]


def flash_recommendation(name: str) -> str:
    """Return a note that recommends an implementation which is not installed."""
    return f"attention is computed by FlashAttention 2; {FLASH_NAMES[name]} is faster on this card: {INSTALL[name]}"


def activate_best_flash(bare: Any, device: torch.device, major: int) -> str | None:
    """Use the best implementation that computes the attention of a model from now on, in this process.

    `bare` is the model's skeleton with varlen attention, `major` the compute capability of `device`. Returns a note on
    what is used and what failed, or what to install; None on a card for which there is nothing better.
    """
    failed, found = "", installed_flash(major)
    heads = heads_of(bare) if found else set()
    for name in found:
        try:
            of_torch.activate_flash_attention_impl(name)
            for each in heads:
                check_heads(each, device)
            return f"{failed}attention is computed by {FLASH_NAMES[name]}"
        except Exception as error:  # whatever the package raises, when it is imported or when it computes
            failed += f"{FLASH_NAMES[name]} is installed but not used: {error_summary(error)}; "
        restore_flash()
    if found:
        return f"{failed}attention is computed by FlashAttention 2"
    return flash_recommendation(BEST_FLASH[major][0]) if major in BEST_FLASH else None


def active_flash() -> str | None:
    """Return the implementation that is used instead of FlashAttention 2; None if none is."""
    current: str | None = getattr(of_torch, "current_flash_attention_impl", lambda: None)()
    return current


def restore_flash() -> None:
    """Use FlashAttention 2 again."""
    if active_flash():
        of_torch.restore_flash_attention_impl()


class Heads(NamedTuple):
    """The heads of an attention layer: how many for queries and keys, their elements, and whether it has a window."""

    queries: int
    keys: int
    size: int
    of_values: int
    has_window: bool


def heads_of(bare: Any) -> set[Heads]:
    """Return the different heads of a skeleton, from its own forward on a CPU in the varlen kernel."""
    _, _, calls = run_in_varlen(bare, [0, 1, 2])
    return {Heads(q.shape[1], k.shape[1], q.shape[3], v.shape[3], window is not None) for q, k, v, _, window in calls}


def check_heads(heads: Heads, device: torch.device) -> None:
    """Raise RuntimeError if attention with these heads has a wrong result or gradient on `device`, in bf16."""
    queries, keys, size, of_values, has_window = heads
    random = torch.Generator().manual_seed(0)
    shapes = [(queries, size), (keys, size), (keys, of_values), (queries, of_values)]
    *inputs, upstream = (torch.randn(1, sum(LENGTHS), *shape, generator=random).bfloat16() for shape in shapes)
    documents, longest = document_bounds([LENGTHS])

    def computed(on: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (x.to(on, dtype).transpose(1, 2).requires_grad_() for x in inputs)
        out, _ = varlen.attend_within_documents(
            torch.nn.Module(), q, k, v, None, documents=documents.to(on), longest_document=longest,
            sliding_window=WINDOW if has_window else None,
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream.to(on, dtype))]

    exact = computed(torch.device("cpu"), torch.float32)
    found = computed(device, torch.bfloat16)
    for what, a, b in zip(("result", "dq", "dk", "dv"), found, exact, strict=True):
        error = float((a.cpu().float() - b).norm() / b.norm())
        if not error <= TOLERANCE:
            raise RuntimeError(f"for heads of {heads} its {what} has an error of {error:.1%}")
