"""Find out by a run which tokens of a model see one another; there is no list of architectures.

Whether it computes a document alone as it does among others, whether the varlen kernel computes it without a mask, and
whether ranks can compute parts of a row. Some architectures ignore position ids, some choose their rotary frequencies
by the longest position of a micro-batch, some are not causal. The architecture runs in its own sizes, but with one
layer of each kind, random weights that take no memory, and a selection of the inputs instead of every large product:
this takes about a second on a CPU for a model of any size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from fsdptrain.data.corpus import document_bounds
from fsdptrain.errors import RecipeError, error_summary
from fsdptrain.model import patches, varlen
from fsdptrain.model.units import decoder_layers

SMALL = 2**16  # elements of a weight; products with larger ones are not computed
TOLERANCE = 1e-3  # of the largest logit: above rounding, and far below the effect of another document
RECORDED = "recorded"  # in transformers' registry of attention functions: see `run_in_varlen`

PRODUCTS: dict[Callable[..., Any], int] = {  # a product → the dimension of its second factor that is the result's last
    functional.linear: -2, torch.matmul: -1, torch.Tensor.matmul: -1, torch.Tensor.__matmul__: -1, torch.bmm: -1,
}  # fmt: skip


class Probe:
    """A causal LM reduced to what decides which tokens see one another."""

    def __init__(self, model: Any, compute: torch.dtype = torch.float32) -> None:
        """Reduce a skeleton, in place: it must not be used otherwise. Its parameters get the dtype `compute`."""
        self.model = model.eval()
        self.recurrences = patches.accept_documents(model)
        model.set_experts_implementation("eager")  # one expert at a time: all at once would be copied
        kinds = {id(layer): _layer_kind(layer) for _, layer in decoder_layers(model)}
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and all(id(layer) in kinds for layer in module):
                there = [kinds[id(layer)] for layer in module]
                del module[max((there.index(kind) for kind in there), default=0) + 1 :]
        _fill_cheaply(model, compute)

    def same(self, rows: list[list[int]], document: slice, packed: bool = False) -> bool:
        """Return whether a document in the first row gets the same logits as alone.

        `rows` are the position ids of a micro-batch; if they are `packed`, recurrences get the bounds of documents.
        Raises what the model raises, and ValueError if logits are not finite.
        """
        inputs: dict[str, Any] = {"packed_documents": bounds_of(rows)} if packed and self.recurrences else {}
        among = self.logits(rows, **inputs)[document]
        alone = self.logits(rows, document)
        if not (alone.isfinite().all() and among.isfinite().all()):
            raise ValueError("its logits are not finite for random weights")
        return alike(among, alone)

    def logits(self, rows: list[list[int]], document: slice | None = None, **inputs: Any) -> torch.Tensor:
        """Return the first row's logits, float32 [tokens, vocabulary], called as the engine calls the model.

        With a `document`, the model gets that part of the first row alone; `inputs` are passed on to it.
        Raises what the model raises.
        """
        positions = torch.tensor(rows)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = (torch.arange(positions.numel()) * 7 % min(vocabulary, 97)).view(positions.shape)
        if document:
            ids, positions = ids[:1, document], positions[:1, document]
        with torch.no_grad(), patches.torch_operators(), _CheapProducts(), patches.one_thread():
            found: torch.Tensor = self.model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
        return found[0].float()


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors are equal but for rounding."""
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def bounds_of(rows: list[list[int]]) -> torch.Tensor:
    """Return the bounds of documents, int32 [N+1], in the tokens of all rows from position ids that restart at 0."""
    positions = [position for row in rows for position in row]
    return torch.tensor([i for i, position in enumerate(positions) if not position] + [len(positions)]).int()


def _layer_kind(layer: nn.Module) -> str:
    """Return a text that is equal for layers that differ only by number and weights."""
    return repr([
        (type(module).__name__, sorted(
            (name, value) for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and not name.endswith(("idx", "index", "_id"))
        ))
        for module in layer.modules()
    ])  # fmt: skip


def _fill_cheaply(model: Any, compute: torch.dtype) -> None:
    """Replace every parameter by a random one of little memory: entry [i, j] of a matrix is entry i + j of a list.

    Parameters get the dtype `compute`, except those that stay in float32.
    """
    wide = {id(param) for name, param in model.named_parameters() if name in model.float32_names}
    random = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            dtype = torch.float32 if id(param) in wide else compute
            vector = torch.empty(sum(param.shape) or 1)
            if param.ndim > 1:
                vector.normal_(std=1 / math.sqrt(param.shape[-1]), generator=random)
            else:
                vector.uniform_(0.5, 1.5, generator=random)
            cheap = vector.to(dtype).as_strided(param.shape, (1,) * param.ndim)
            setattr(module, name, nn.Parameter(cheap, requires_grad=False))


class _CheapProducts(TorchFunctionMode):
    """Replaces a product with a large weight: each of its results is one of the inputs, with a sign."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[1] if func in PRODUCTS and len(args) > 1 else None
        if weight is None or weight.numel() <= SMALL or weight.stride() != (1,) * weight.ndim:
            return func(*args, **(kwargs or {}))
        results = weight.shape[PRODUCTS[func]]
        random = torch.Generator().manual_seed(int(weight[(0,) * weight.ndim].double().abs() * 2**30))
        chosen = torch.randint(args[0].shape[-1], (results,), generator=random)
        return args[0].index_select(-1, chosen) * (1 - 2 * (chosen % 2))


# ----------------------------------------------------------------------------------------------- kernels for attention

# Query, key, value, result, window.
AttentionCall = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int | None]


def run_in_varlen(bare: Any, positions: list[int]) -> tuple[Probe, torch.Tensor, list[AttentionCall]]:
    """Run a copy of a skeleton on a row of one document in the varlen kernel, on a CPU.

    Returns the copy, its logits [tokens, vocabulary], and the calls of its attention. Raises what the model raises.
    """
    calls: list[AttentionCall] = []

    def recorded(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> tuple[Any, None]:
        out, _ = varlen.attend_within_documents(module, query, key, value, mask, **others)
        calls.append((query, key, value, out, others.get("sliding_window")))
        return out, None

    AttentionInterface.register(RECORDED, recorded)
    model = copy.deepcopy(bare)
    model.set_attn_implementation(RECORDED)
    documents, longest = document_bounds([[len(positions)]])
    probe = Probe(model)
    return probe, probe.logits([positions], documents=documents, longest_document=longest), calls


def varlen_obstacle(bare: Any) -> str | None:
    """Return why the varlen kernel, which has no masks, does not compute a skeleton's model; None if it does."""
    name = type(bare).__name__
    model = copy.deepcopy(bare)
    # Windows and chunks become 2 tokens long, so that short documents exceed them.
    for owner in {id(x): x for module in model.modules() for x in (module, getattr(module, "config", None))}.values():
        for window in ("sliding_window", "attention_chunk_size"):
            if isinstance(getattr(owner, window, None), int):
                setattr(owner, window, 2)
    rows, lengths = [[0, 1, 2, 3, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 0, 1]], [[4, 3, 1], [1, 5, 2]]
    documents, longest = document_bounds(lengths)
    probe = Probe(model)
    try:
        masked = probe.logits(rows)
        model.set_attn_implementation(varlen.NAME)
        if not varlen.used_by(model):
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


def sharing_obstacle(bare: Any, ranks: int, seq_len: int) -> str | None:
    """Return why `ranks` cannot compute parts of a row of this skeleton's model, None if they can.

    The model's own forward runs on a row and on both halves of it, with the same results of attention. So nothing but
    attention may let a token see another: no recurrence, no convolution, no rotary frequencies that depend on the
    longest position of a micro-batch.
    """

    def replay(part: slice, calls: Iterator[AttentionCall]) -> Callable[..., tuple[Any, None]]:
        def replayed(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> tuple[Any, None]:
            *inputs, out, _ = next(calls)
            same.extend(alike(x, of_row[:, :, part]) for x, of_row in zip((query, key, value), inputs, strict=True))
            return out[:, part], None

        return replayed

    same: list[bool] = []  # whether attention gets the same for a part of a row as for the whole
    name = type(bare).__name__
    positions = [0, 1, 2, 3, *range(seq_len - 4, seq_len)]
    try:
        probe, whole, calls = run_in_varlen(bare, positions)
        for half in (slice(0, 4), slice(4, 8)):
            AttentionInterface.register(RECORDED, replay(half, iter(calls)))
            found = probe.logits([positions], half)
            if not all(same):
                return f"in {name} what attention gets depends on more than a token and its position"
            if not alike(found, whole[half]):
                return f"in {name} a token sees others outside of attention (a recurrence or a convolution)"
    except Exception as error:  # whatever the architecture's code raises
        return f"{name} fails when a part of a row is compared with the whole: {error_summary(error)}"
    heads = sorted({query.shape[1] for query, *_ in calls})
    if uneven := next((count for count in heads if count % ranks), None):
        return f"{name} has {uneven} query heads, which do not divide among {ranks} ranks"
    return None
