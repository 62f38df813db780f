"""What a run and a dry run check of the model alike, before any data is tokenised and any weight is read."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdptrain.config.plan import Plan
from fsdptrain.data.hub import error_summary, safetensors_files
from fsdptrain.data.tokenizer import load_tokenizer, vocabulary_size
from fsdptrain.errors import FsdptrainError, Problem, RecipeError
from fsdptrain.events import Progress
from fsdptrain.model.assets import refuse_other_tokens
from fsdptrain.model.config import load_config, long_positions
from fsdptrain.model.flops import model_flops
from fsdptrain.model.loss import after_head
from fsdptrain.model.probe import Probe
from fsdptrain.model.skeleton import one_row_if_packed, settle_attention, skeleton
from fsdptrain.model.units import Unit, saved_state, units_of
from fsdptrain.model.weights import place_buffers, refuse_other_weights
from fsdptrain.parallel.shard import check_dtypes


@dataclass(frozen=True)
class Ready:
    """A model that can be trained: the plan with its attention kernel decided, configuration, skeleton and units."""

    plan: Plan
    config: Any
    bare: Any
    units: list[Unit]


def prepare_model(plan: Plan, vocab_size: int | None) -> Ready:
    """Return what the recipe, the configuration and the headers of local weights make of the model.

    `vocab_size` is the tokenizer's, None where it is not known. Raises RecipeError with all that is wrong at once.
    """
    config = load_config(plan, vocab_size)
    plan, bare = settle_attention(plan, config)
    problems: list[Problem] = []

    def trying(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except RecipeError as error:
            problems.extend(error.problems)

    units = trying(lambda: units_of(bare, plan.recipe.fsdp.wrap))
    trying(lambda: check_dtypes(bare, plan))
    trying(lambda: check_forward(plan, bare))
    trying(lambda: check_documents(plan, config, bare))
    trying(lambda: check_buffers(plan, config, bare))
    if plan.pretrained and Path(str(plan.recipe.model.id)).is_dir():  # a dry run downloads nothing
        trying(lambda: refuse_other_weights(bare, plan, safetensors_files(plan)))
    if problems:
        raise RecipeError(problems)
    return Ready(plan, config, bare, units)


def load_checked(plan: Plan, progress: Progress) -> tuple[Any, Ready]:
    """Return the tokenizer, and the model checked against it; before a tokenizer is trained, by the size it will have.

    Raises RecipeError as `prepare_model` and `load_tokenizer` do.
    """
    wanted = plan.recipe.model.tokenizer
    trained = wanted["train"] if isinstance(wanted, dict) else None
    ready = prepare_model(plan, trained) if trained else None
    tokenizer = load_tokenizer(plan, progress)
    if ready is None or vocabulary_size(tokenizer) != trained:
        ready = prepare_model(plan, vocabulary_size(tokenizer))
    refuse_other_tokens(plan, tokenizer)
    return tokenizer, ready


def check_forward(plan: Plan, bare: Any) -> None:
    """Raise RecipeError for an architecture whose loss or whose FLOPs the engine cannot compute."""
    recipe = plan.recipe
    if recipe.train.loss == "chunked":
        after_head(bare)
    if recipe.model.attn_implementation == "flash_attention_2" and not one_row_if_packed(plan):
        raise RecipeError(
            "model.attn_implementation: flash_attention_2 takes packed documents in micro-batches of one row only: set "
            "train.micro_batch_size=1, data.packing=none or model.attn_implementation=sdpa"
        )
    try:
        model_flops(bare, 1, recipe.data.seq_len)
    except Exception as error:
        raise FsdptrainError(f"the FLOPs of {type(bare).__name__} cannot be counted: {error_summary(error)}") from error


def check_documents(plan: Plan, config: Any, bare: Any) -> None:
    """Raise RecipeError when a document would not be computed as if it were alone: before padding, or among others."""
    recipe, name = plan.recipe, type(bare).__name__
    seq_len, packed = recipe.data.seq_len, recipe.data.packing != "none"
    if recipe.model.attn_implementation in ("eager", "sdpa"):
        model = copy.deepcopy(bare)
    else:  # these kernels may need a GPU; documents are told apart by the same position ids
        model = skeleton(config, dataclasses.replace(recipe.model, attn_implementation="auto"))
    # Position ids of a short document, of the beginning and end of a long one, and of padding (see `Corpus.batch`).
    short, long = [0, 1, 2], [0, 1, seq_len - 1]
    threshold = long_positions(config, seq_len)
    padding = [0, 0] if threshold else [3, seq_len - 1]
    beside = [[*long, *short, *padding] if packed else [*short, *padding]]
    if recipe.train.micro_batch_size > 1:
        beside.append([*range(len(beside[0]) - 1), seq_len - 1])
    try:
        probe = Probe(model)
        causal = probe.same([[*short, *padding]], slice(0, 3))
        apart = not packed or probe.same([[*short, *short, *padding]], slice(3, 6))
        alone = probe.same(beside, slice(3, 6) if packed else slice(0, 3))
    except Exception as error:  # whatever the architecture's code raises over three tokens
        raise RecipeError(f"model: {name} cannot be trained here: {error_summary(error)}") from None
    if not causal:
        raise RecipeError(f"model: {name} is not causal: tokens attend to later positions, so labels are visible")
    if not apart:
        raise RecipeError(
            f"data.packing: {recipe.data.packing} would let the documents of a block see one another: {name} ignores "
            "position ids; use data.packing=none"
        )
    if not alone:
        raise RecipeError(
            f"data.seq_len: rotary frequencies of {name} depend on the longest position in the micro-batch above "
            f"{threshold or 'some number of'} tokens; use data.seq_len={threshold or '…'}, or data.packing=none with "
            "train.micro_batch_size=1"
        )


def check_buffers(plan: Plan, config: Any, bare: Any) -> None:
    """Raise RecipeError for buffers that are computed with in another dtype than weights, where the code expects one.

    Those that are saved have the master dtype (minimax's decay tables); `buffer_dtype` casts them.
    """
    dtypes, model = plan.recipe.fsdp.mixed_precision, plan.recipe.model
    saved = [tensor for tensor in saved_state(bare).values() if not isinstance(tensor, nn.Parameter)]
    if dtypes.param_dtype == model.dtype or not any(tensor.is_floating_point() for tensor in saved):
        return
    mixed = skeleton(config, dataclasses.replace(model, attn_implementation="auto"), dtypes.param_dtype)
    place_buffers(mixed, torch.device("cpu"), dtypes.buffer_dtype)
    try:
        Probe(mixed, getattr(torch, dtypes.param_dtype)).logits([[0, 1, 2]])
    except Exception as error:
        raise RecipeError(
            f"fsdp.mixed_precision.buffer_dtype: {dtypes.buffer_dtype or model.dtype} buffers of {type(bare).__name__} "
            f"cannot be used with {dtypes.param_dtype} weights ({error_summary(error)}): set buffer_dtype to "
            f"{dtypes.param_dtype}, or param_dtype to {model.dtype}"
        ) from None
