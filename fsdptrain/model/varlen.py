"""Attention on CUDA, each document by itself: torch's varlen kernel behind transformers' attention interface.

A micro-batch is flattened to one row of tokens, and `documents` says where each document begins. These bounds come from
the host (`data.corpus`), so that no mask is built and nothing is searched for on the device: transformers builds a mask
only for an attention implementation that has a mask function, and "varlen" has none. `obstacle` decides whether a model
can be computed so. The operator has a kernel for CPUs too, which is plain arithmetic: the reference for tests, and what
`obstacle` runs.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import varlen as of_torch
from transformers import AttentionInterface

from fsdptrain.data.corpus import document_bounds
from fsdptrain.errors import RecipeError, error_summary
from fsdptrain.model.patches import VARLEN_BACKWARD, VARLEN_FORWARD
from fsdptrain.model.probe import Probe, alike
from fsdptrain.plan.plan import Plan

NAME = "varlen"  # in transformers' registry of attention functions
LEAST_CAPABILITY = 8, 0  # of a GPU, major and minor: T4, V100 and RTX 20 have less
LARGEST_HEAD = 256  # elements: the flash kernels support multiples of 8 up to here
PARAMETERS = inspect.signature(of_torch.varlen_attn).parameters  # `window_size` and `enable_gqa` are not in every torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor,
    longest: int,
    *,
    window_size: tuple[int, int],
    scale: float,
    enable_gqa: bool | None = None,
) -> torch.Tensor:
    """Return the attention of each document [T, H, D], by torch's operator.

    This is what torch's `varlen_attn` calls, which since torch 2.15 prefers cuDNN on Hopper and Blackwell. The operator
    by itself is FlashAttention in every version, as `flash`, the forecast and the exchange of kernels assume.
    """
    groups = () if enable_gqa is None else (enable_gqa,)
    causal, window = window_size == (-1, 0), list(window_size)
    out: torch.Tensor = VARLEN_FORWARD(
        query, key, value, documents, documents, longest, longest, causal, scale, window, *groups
    )[0]
    return out


def attend_within_documents(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: torch.Tensor | None = None,
    longest_document: int = 0,
    sliding_window: int | None = None,
    context: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document: transformers' attention interface.

    `query` is [B, H, S, D], `key` [B, G, S, D] and `value` [B, G, S, E]; returns [B, S, H, E]. `documents` int32 [N+1]
    are bounds in the B·S tokens of all rows, `longest_document` tokens is at least the length of each. A query sees
    itself and the `sliding_window` - 1 tokens before it, by default all of its document. With `context`, a
    `context.Exchange`, S are this rank's tokens of each row. Raises RecipeError for what the kernel does not compute.
    """
    _check_supported(module, (query, key, value), attention_mask, dropout, documents, others)
    assert documents is not None
    if context is not None:
        query, key, value = context.to_heads(query, key, value)
    rows, heads, length, size = query.shape
    # The kernel needs one size for all heads. Added zeros change no score and no other element of the result.
    q, k, v = (_padded(x.transpose(1, 2).flatten(0, 1), _size_in_kernel(query, value)) for x in (query, key, value))
    options: dict[str, Any] = {"scale": size**-0.5 if scaling is None else scaling}
    if "enable_gqa" in PARAMETERS:
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # tokens before a query, and after it
    out = varlen_attn(q, k, v, documents, longest_document, window_size=window, **options)
    out = out[..., : value.shape[3]].unflatten(0, (rows, length))
    return (out if context is None else context.to_tokens(out)), None


def _size_in_kernel(query: torch.Tensor, value: torch.Tensor) -> int:
    """Return how many elements the heads have in the kernel."""
    return -(-max(query.shape[3], value.shape[3]) // 8) * 8


def _padded(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Return the heads [T, H, D] as [T, H, size], with zeros at the end. A padding of 0 would be a copy."""
    missing = size - heads.shape[2]
    return functional.pad(heads, (0, missing)) if missing else heads


AttentionInterface.register(NAME, attend_within_documents)


def _check_supported(
    module: Any, qkv: tuple[torch.Tensor, ...], mask: Any, dropout: float, documents: Any, others: dict[str, Any]
) -> None:
    """Raise RecipeError if a call of an attention layer asks for what the kernel does not compute."""
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    size = _size_in_kernel(qkv[0], qkv[2])
    reasons = {
        "its attention layers do not get `documents` from its forward": documents is None,
        "it builds a mask itself": mask is not None,
        "its attention is not causal": not causal,
        "its attention has dropout": bool(dropout),
        "its attention scores are capped": others.get("softcap") is not None,
        "its attention has sinks": others.get("s_aux") is not None,
        "its attention has a position bias": others.get("position_bias") is not None,
        "its queries and keys differ in length": len({x.shape[2] for x in qkv}) > 1,
        f"its heads have {size} elements, more than {LARGEST_HEAD}": size > LARGEST_HEAD,
        f"its attention is computed in {str(qkv[0].dtype).removeprefix('torch.')}": (
            qkv[0].device.type == "cuda" and qkv[0].dtype not in (torch.bfloat16, torch.float16)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise RecipeError(
                f"model.attn_implementation: sdpa cannot compute this model in torch's varlen kernel: {reason}; use "
                "eager"
            )


def used_by(model: Any) -> bool:
    """Return whether a model was built with this attention, and so needs `documents` and `longest_document`."""
    return bool(model.config._attn_implementation == NAME)


# ------------------------------------------------------------------------------------------- where the kernel applies


def obstacle(plan: Plan, bare: Any) -> str | None:
    """Return why the varlen kernel cannot compute the plan's model, None if it can.

    On a CPU it is used only where ranks share rows, because it is slow there. `bare` is the model's skeleton, with sdpa
    as its attention.
    """
    on_gpu = plan.topology.device == "cuda"
    if not (on_gpu or plan.context > 1):
        return "it needs a GPU"
    if reason := card_obstacle():
        return reason
    if "window_size" not in PARAMETERS:
        return f"torch {torch.__version__} has no windows in it"
    if on_gpu and plan.recipe.fsdp.mixed_precision.param_dtype == "float32":
        return "it computes in bfloat16, not in float32"
    if not bare._supports_flash_attn:
        return f"transformers declares no flash attention for {type(bare).__name__}"
    kind = f"{type(bare).__name__} {bare.config.to_json_string()}"
    if kind not in _obstacles:
        _obstacles[kind] = _obstacle_in_forward(bare)
    return _obstacles[kind]


def card_obstacle() -> str | None:
    """Return why FlashAttention does not run on a GPU of this process, None if it does or if no GPU is here.

    torch's own and the package's refuse such cards only when they are called: `mha_fwd` in flash_api.cpp.
    """
    capability = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())), default=LEAST_CAPABILITY)
    if capability >= LEAST_CAPABILITY:
        return None
    least, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
    return f"it needs a GPU of compute capability {least}, and this one has {found}"


_obstacles: dict[str, str | None] = {}  # class and configuration of a model → what `obstacle` found


def _obstacle_in_forward(bare: Any) -> str | None:
    """Run the model's own forward with and without masks, on a CPU. Return what is wrong without, None if nothing is.

    The sizes are the model's own, except that windows and chunks are 2 tokens long, so that short documents exceed
    them.
    """
    name = type(bare).__name__
    model = copy.deepcopy(bare)
    for owner in {id(x): x for module in model.modules() for x in (module, getattr(module, "config", None))}.values():
        for window in ("sliding_window", "attention_chunk_size"):
            if isinstance(getattr(owner, window, None), int):
                setattr(owner, window, 2)
    rows, lengths = [[0, 1, 2, 3, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 0, 1]], [[4, 3, 1], [1, 5, 2]]
    documents, longest = document_bounds(lengths)
    probe = Probe(model)
    try:
        masked = probe.logits(rows)
        model.set_attn_implementation(NAME)
        if not used_by(model):
            return f"{name} does not take its attention from transformers' interface"
        model.train()  # only then is there dropout
        probe.logits(rows, documents=documents, longest_document=longest)
        model.eval()
        found = probe.logits(rows, documents=documents, longest_document=longest)
    except RecipeError as error:
        return str(error).partition("varlen kernel: ")[2].removesuffix("; use eager")
    except Exception as error:  # whatever the architecture's code raises
        return f"{name} fails when it is compared with a mask: {error_summary(error)}"
    if not alike(found, masked):
        return f"{name} hides more from a token than other documents and what is outside of its window"
    return None


def mask_note(plan: Plan, bare: Any) -> str | None:
    """Return a note if a mask tells documents of a sequence apart on a GPU; `plan` has the kernel that is used."""
    kernel, together = plan.recipe.model.attn_implementation, plan.recipe.documents_share_sequences
    if plan.topology.device != "cuda" or kernel not in ("sdpa", "eager") or not together:
        return None
    reason = obstacle(plan, bare)
    return reason and (
        f"model.attn_implementation: {kernel} with a mask of seq_len² entries, because torch's varlen kernel cannot "
        f"compute this model: {reason}"
    )


def avoid_wrong_kernel(seq_len: int) -> None:
    """Switch cuDNN's attention off in this process if its backward may give NaN with a mask at this length.

    It does for `seq_len % 128 == 64` (pytorch#196678); other lengths between multiples of 128 are avoided as well.
    """
    if seq_len % 128:
        torch.backends.cuda.enable_cudnn_sdp(False)


# ------------------------------------------------------------------------------------------ the same operator on a CPU


def _forward_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, _bounds: Any, _longest: int, _: int,
    causal: bool = False, scale: float | None = None, window: list[int] | None = None, *_others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return attention within each document, as q [T, H, D]; k and v are [T, G, D]. The second result is not used."""
    out = torch.empty_like(q)
    for part in _parts(bounds):
        weights, values = _weights(q[part], k[part], scale, causal, window), v[part].float()
        out[part] = torch.einsum("ghij,jgd->ighd", weights, values).flatten(1, 2).to(q.dtype)
    sums, state = q.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)
    return out, sums, state


def _backward_on_cpu(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _sums: Any,
    bounds: torch.Tensor, _bounds: Any, _longest: int, _: int, causal: bool, _state: Any,
    scale: float | None = None, window: list[int] | None = None, *_others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    for part in _parts(bounds):
        weights = _weights(q[part], k[part], scale, causal, window)
        groups = (len(weights), -1)
        queries, outs, of_outs = (x[part].float().unflatten(1, groups) for x in (q, out, grad))
        of_weights = torch.einsum("ighd,jgd->ghij", of_outs, v[part].float())
        of_weights -= (outs * of_outs).sum(-1).permute(1, 2, 0)[..., None]
        of_scores = weights * of_weights * factor
        grads[0][part] = torch.einsum("ghij,jgd->ighd", of_scores, k[part].float()).flatten(1, 2).to(q.dtype)
        grads[1][part] = torch.einsum("ghij,ighd->jgd", of_scores, queries).to(k.dtype)
        grads[2][part] = torch.einsum("ghij,ighd->jgd", weights, of_outs).to(v.dtype)
    return grads


def _weights(
    q: torch.Tensor, k: torch.Tensor, scale: float | None, causal: bool, window: list[int] | None
) -> torch.Tensor:
    """Return the softmax of one document's scores, float32 [G, H/G, n, n]."""
    factor = q.shape[2] ** -0.5 if scale is None else scale
    scores = torch.einsum("ighd,jgd->ghij", q.float().unflatten(1, (k.shape[1], -1)), k.float()) * factor
    before, after = (-1, 0) if causal else window or (-1, -1)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= (distance > before) & (before >= 0)
    hidden |= (-distance > after) & (after >= 0)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _parts(bounds: torch.Tensor) -> Iterator[slice]:
    """Yield the tokens of each document that is not empty."""
    yield from (slice(start, end) for start, end in itertools.pairwise(bounds.tolist()) if start < end)


torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", _forward_on_cpu)
torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", _backward_on_cpu)


# ------------------------------------------------------------------------------------------------------ for forecasts


def _pairs(tokens: int, longest: int, window: list[int] | None) -> int:
    """Return how many pairs of a query and a key are computed if every document has `longest` tokens.

    No trace has the documents of the data, so that this is an upper bound.
    """
    seen = min(longest, window[0] + 1) if window and window[0] >= 0 else longest
    return tokens // longest * (seen * longest - seen * (seen - 1) // 2)


def _forward_flops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _bounds: Any, _same: Any, longest: int, _: int,
    causal: bool = False, scale: float | None = None, window: list[int] | None = None, *_others: Any, **_more: Any,
) -> int:  # fmt: skip
    return 2 * 2 * q.shape[1] * q.shape[2] * _pairs(len(q), longest, window)


def _backward_flops(
    grad: Any, q: torch.Tensor, k: Any, v: Any, out: Any, _sums: Any, _bounds: Any, _same: Any, longest: int, _: int,
    causal: bool, _state: Any, scale: float | None = None, window: list[int] | None = None, *_others: Any, **_more: Any,
) -> int:  # fmt: skip
    return 5 * 2 * q.shape[1] * q.shape[2] * _pairs(len(q), longest, window)


FLOPS: dict[Any, Callable[..., int]] = {VARLEN_FORWARD: _forward_flops, VARLEN_BACKWARD: _backward_flops}


def _backward_workspace(grad: Any, q: torch.Tensor, k: torch.Tensor, *others: Any) -> int:
    """Return the bytes that FlashAttention 2 needs in backward besides arguments and results.

    The gradient of q is summed in float32, with 128 tokens of padding a document; k's and v's are first computed for
    every head of q.
    """
    documents = len(others[4]) - 1
    heads, size = q.shape[1:]
    padded = (len(q) + 128 * documents) * heads * 4
    expanded = 2 * len(k) * heads * size * k.element_size() if heads != k.shape[1] else 0
    return padded * (-(-size // 32) * 32 + 1) + expanded


WORKSPACE: dict[Any, Callable[..., int]] = {VARLEN_BACKWARD: _backward_workspace}
