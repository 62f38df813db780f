"""The checks of the model that a run and a dry run share, before any data is tokenised or any weight is read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdptrain.config.optimizers import Weight
from fsdptrain.data.hub import hub_errors, recipe_errors, safetensors_files
from fsdptrain.data.tokenizer import load_tokenizer, open_tokenizer, own_code_note, size_to_train, vocabulary_size
from fsdptrain.errors import Problem, RecipeError, error_summary, listed, shortened
from fsdptrain.model.adapters import (
    check_adapter_file,
    check_experts_in_one_unit,
    freeze,
    quantised_ids,
    unquantised_note,
)
from fsdptrain.model.attention import choose_attention, mask_note
from fsdptrain.model.config import check_base_config, check_special_tokens, load_config, longrope_threshold
from fsdptrain.model.expert_parallel import check_biases, check_experts
from fsdptrain.model.float8 import float8_notes, layers_in_float8
from fsdptrain.model.loss import after_head
from fsdptrain.model.patches import accept_documents
from fsdptrain.model.pipeline import check_stages
from fsdptrain.model.probe import Probe
from fsdptrain.model.router_loss import check_router_loss, is_wanted
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.tensor_parallel import check_layers
from fsdptrain.model.units import (
    Unit,
    base_name,
    beside_text,
    expert_count,
    in_buckets,
    model_flops,
    saved_state,
    tied,
    token_parameters,
    units_of,
    weights_of,
)
from fsdptrain.model.weights import check_weights, fit_config, place_buffers
from fsdptrain.parallel.shard import check_dtypes
from fsdptrain.plan.plan import Plan, teacher_plan
from fsdptrain.run_folder.events import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedModel:
    """A model that can be trained: the plan with an attention kernel chosen, configuration, skeletons and units.

    `bare` is the model as its files describe it; `trained` has the recipe's adapters, and what is frozen is marked so.
    Without adapters and frozen weights they are the same. The units are those of `trained`. Of files of weights on this
    machine `carried` are the tensors that are exported as they are, and `notes` say how they differ from the
    configuration.
    """

    plan: Plan
    config: PreTrainedConfig
    bare: PreTrainedModel
    trained: PreTrainedModel
    units: list[Unit]
    carried: list[str]
    notes: list[str]

    @property
    def weights(self) -> list[Weight]:
        """What each parameter of `trained` is."""
        return [*weights_of(self.trained, quantised_ids(self.trained, self.plan.recipe)).values()]


def slow_dtype_note(plan: Plan) -> str | None:
    """Return a note on a plan that computes in a 16-bit dtype on a CPU, unless this one has instructions for it."""
    dtype = plan.recipe.fsdp.mixed_precision.param_dtype
    has_bfloat16 = torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
    if plan.topology.device != "cpu" or dtype == "float32" or (dtype == "bfloat16" and has_bfloat16):
        return None
    return (
        f"this CPU may have no instructions for {dtype}: without them matrix products take up to 70 times as long as "
        "in float32; set fsdp.mixed_precision.param_dtype=float32"
    )


def model_notes(ready: PreparedModel) -> list[str]:
    """Return what is worth knowing about a model that can be trained, before a run and in a dry run."""
    plan = ready.plan
    found = (
        *ready.notes,
        own_code_note(ready.bare),
        slow_dtype_note(plan),
        mask_note(plan, ready.bare),
        missing_kernels(plan, ready.bare),
        balance_note(plan, ready.config),
        router_loss_note(plan, ready.bare),
        unquantised_note(ready.trained, plan.recipe),
        *float8_notes(ready.trained, plan.recipe, plan.topology.device == "cpu", plan.compiles),
    )
    return [note for note in found if note]


def balance_note(plan: Plan, config: PreTrainedConfig) -> str | None:
    """Return a note on a mixture of experts that is trained from scratch; a pretrained router is balanced already."""
    experts = expert_count(config)
    if plan.pretrained or experts < 2 or getattr(config.get_text_config(), "output_router_logits", False):
        return None
    return (
        f"model: a mixture of {experts} experts from scratch, which nothing balances: few of them may get most tokens "
        "(expert_load in the step events). Start from a pretrained mixture, or, where the model defines it, set "
        "model.config.output_router_logits: true (the auxiliary loss of its router) or train.router_bias_rate"
    )


def router_loss_note(plan: Plan, bare: PreTrainedModel) -> str | None:
    """Return a note if the auxiliary loss of routers takes a forward pass more: a step has several micro-batches."""
    if not is_wanted(bare) or plan.accumulation == 1:
        return None
    return (
        "model.config.output_router_logits: the auxiliary loss is that of the global batch, so all "
        f"{plan.accumulation} micro-batches of a step pass the model once more, without gradients"
    )


def prepare_model(
    plan: Plan, vocab_size: int | None, prefers_cudnn: bool | None = None, files: list[str] | None = None
) -> PreparedModel:
    """Build the skeleton of the plan's model, and check that it can be trained.

    `vocab_size` is that of the tokenizer, None if it is unknown; `prefers_cudnn` is as in `choose_attention`; `files`
    are those of the weights, by default if `model.id` is a folder: a dry run downloads nothing. Raises one RecipeError
    for all problems.
    """
    config = load_config(plan, vocab_size)
    # The model as its files describe it; where they differ from the configuration, that is changed.
    plan, bare = choose_attention(plan, config, prefers_cudnn)
    files = files or []
    problems: list[Problem] = []
    carried: list[str] = []
    notes: list[str] = []
    with _collected(problems):
        if plan.pretrained and not files and Path(str(plan.recipe.model.id)).is_dir():
            files = safetensors_files(plan)
        if files and (notes := fit_config(config, bare, plan, files)):
            plan, bare = choose_attention(plan, config, prefers_cudnn)
    # The model as it is trained: with adapters, and with what is frozen.
    trained = bare
    with _collected(problems):
        if plan.freezes:
            trained = freeze(
                skeleton(config, plan.recipe.model, plan.recipe.fsdp.mixed_precision.param_dtype), plan.recipe
            )
        if plan.recipe.adapter.from_ is not None:
            check_adapter_file(trained, Path(plan.recipe.adapter.from_))
    units: list[Unit] = []
    with _collected(problems):
        units = in_buckets(units_of(trained, plan.recipe.fsdp.wrap), plan.recipe.fsdp)
        check_experts_in_one_unit(trained, units)
    # Each check reports its own problems: all of them are shown at once.
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_beside_text(trained),
        lambda: check_added_rows(plan, trained),
        lambda: check_base_config(plan, config),
        lambda: check_dtypes(bare, plan),
        lambda: check_router_loss(bare, plan.recipe.fsdp.mixed_precision.param_dtype),
        lambda: check_biases(bare, plan.recipe.train.router_bias_rate),
        lambda: check_layers(bare, plan.recipe.parallel.tensor),
        lambda: check_experts(bare, plan.recipe.parallel.experts),
        lambda: check_stages(trained, plan.recipe.parallel),
        lambda: layers_in_float8(trained, plan.recipe),
        lambda: plan.recipe.train.loss == "chunked" and after_head(bare),
        lambda: model_flops(bare, 1, plan.recipe.data.seq_len),
        lambda: check_documents(plan, config, bare),
        lambda: check_buffers(plan, config, bare),
    )
    for check in checks:
        with _collected(problems):
            check()
    with _collected(problems):
        if files:
            names = check_weights(bare, plan, files)
            carried, notes = names.carried, [*notes, *names.notes]
    if problems:
        raise RecipeError(problems)
    return PreparedModel(plan, config, bare, trained, units, carried, notes)


@contextlib.contextmanager
def _collected(problems: list[Problem]) -> Iterator[None]:
    """Append the problems of a RecipeError to `problems` instead of raising it."""
    try:
        yield
    except RecipeError as error:
        problems.extend(error.problems)


def prepare_tokenizer_and_model(plan: Plan, progress: Progress) -> tuple[PreTrainedTokenizerBase, PreparedModel]:
    """Load or train the tokenizer, and prepare the model for its vocabulary.

    If a tokenizer must be trained, the model is checked before, with the vocabulary size that the recipe asks for.
    Raises RecipeError as `prepare_model` and `load_tokenizer` do.
    """
    trained_size = size_to_train(plan.recipe.model)
    prepared = prepare_model(plan, trained_size) if trained_size else None
    tokenizer = load_tokenizer(plan, progress)
    if prepared is None or vocabulary_size(tokenizer) != trained_size:
        prepared = prepare_model(plan, vocabulary_size(tokenizer))
    check_special_tokens(plan, tokenizer)
    return tokenizer, prepared


def prepare_teacher(plan: Plan, vocab_size: int | None) -> PreparedModel | None:
    """Build the skeleton of the teacher, as `prepare_model` does; None if the objective needs none."""
    if not plan.recipe.train.objective.needs_teacher:
        return None
    with errors_of_teacher():
        return prepare_model(teacher_plan(plan), vocab_size)


def check_vocabulary(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RecipeError unless the teacher, if there is one, has the student's tokens, each with the same id."""
    if not plan.recipe.train.objective.needs_teacher:
        return
    name, own = str(plan.recipe.teacher.id), tokenizer.get_vocab()
    with recipe_errors(f"teacher.id: cannot load the tokenizer of {name!r}"), hub_errors("teacher.id", name):
        theirs = open_tokenizer(name, plan.recipe.teacher.revision or "main").get_vocab()
    if token := next((token for token in [*own, *theirs] if own.get(token) != theirs.get(token)), None):
        there, here = (f"id {ids[token]}" if token in ids else "missing" for ids in (theirs, own))
        raise RecipeError(
            f"teacher.id: {name} has another tokenizer than the student: {shortened(token)!r} is {there} there and "
            f"{here} here: use a teacher with the student's tokenizer, or train the student with that of {name} "
            "(model.tokenizer)"
        )


@contextlib.contextmanager
def errors_of_teacher() -> Iterator[None]:
    """Say in the errors of a model that it is the teacher."""
    try:
        yield
    except RecipeError as error:
        texts = [re.sub(r"^(model|teacher)\.id: ", "", str(problem)) for problem in error.problems]
        raise type(error)([Problem(text, "teacher.id") for text in texts]) from None


def check_beside_text(trained: PreTrainedModel) -> None:
    """Raise RecipeError if parameters that no text reaches would be trained; `trained` is a skeleton."""
    if names := [name for name in beside_text(trained) if trained.get_parameter(name).requires_grad]:
        decoder = next(name for name, module in trained.named_modules() if module is trained.get_decoder())
        raise RecipeError(
            f"model.trainable: {type(trained).__name__} has parameters that no text reaches ({names[0]}): train its "
            f"language model alone with model.trainable=[{decoder.rpartition('.')[2]},lm_head], or an adapter"
        )


def check_added_rows(plan: Plan, trained: PreTrainedModel) -> None:
    """Raise RecipeError if the rows of `model.add_tokens` would not be trained; `trained` is a skeleton."""
    frozen = [base_name(name) for name, param in token_parameters(trained).items() if not param.requires_grad]
    if plan.recipe.model.add_tokens and frozen:
        modules = dict.fromkeys(name.split(".")[-2] for name in frozen)
        key = "adapter.modules_to_save" if plan.recipe.adapter.kind else "model.trainable"
        way_out = "train without an adapter" if tied(trained) and plan.recipe.adapter.kind else f"add them to {key}"
        raise RecipeError(
            f"model.add_tokens: the rows of new tokens would stay as they are, because {listed(modules)} would be "
            f"frozen: {way_out}"
        )


def check_documents(plan: Plan, config: PreTrainedConfig, bare: PreTrainedModel) -> None:
    """Raise RecipeError unless every document is computed as if it were alone: without padding, without others."""
    recipe, name = plan.recipe, type(bare).__name__
    seq_len, together = recipe.data.seq_len, recipe.documents_share_sequences
    # flash and flex attention may need a GPU. They tell documents apart by the same position ids as the others do.
    if recipe.model.attn_implementation in ("eager", "sdpa"):
        model = copy.deepcopy(bare)
    else:
        model = skeleton(config, dataclasses.replace(recipe.model, attn_implementation="auto"))
    # Position ids of a short document, of the beginning and end of a long one, and of padding (see `Corpus.batch`).
    short, long = [0, 1, 2], [0, 1, seq_len - 1]
    threshold = longrope_threshold(config, seq_len)
    padding = [0, 0] if threshold else [3, seq_len - 1]
    beside = [[*long, *short, *padding] if together else [*short, *padding]]
    if recipe.train.micro_batch_size > 1 or plan.ranks_of_row > 1:
        beside.append([*range(len(beside[0]) - 1), seq_len - 1])
    # Compare the short document alone with itself before padding, after another one, and beside longer positions.
    try:
        probe = Probe(model)
        causal = probe.same([[*short, *padding]], slice(0, 3))
        second = [*range(min(10, seq_len))]  # some layers compress every few tokens of a sequence (DeepSeek-V4)
        apart = not together or probe.same([[*short, *second, *padding]], slice(3, 3 + len(second)), together)
        alone = probe.same(beside, slice(3, 6) if together else slice(0, 3), together)
    except Exception as error:  # an architecture's own code may raise anything
        raise RecipeError(f"model: {name} cannot be trained: its forward pass failed: {error_summary(error)}") from None
    if not causal:
        raise RecipeError(f"model: {name} is not causal: tokens attend to later positions, so labels are visible")
    pairs = recipe.train.objective.shares_sequences  # not even data.packing=none puts their answers apart
    if not apart:
        way_out = "use another model, or learn the chosen answers alone, with train.objective=next_token"
        raise RecipeError(
            f"{why_shared(plan)} would let the documents of a sequence attend to one another, because {name} does not "
            f"tell documents apart by their position ids: {way_out if pairs else 'use data.packing=none'}"
        )
    if missing := missing_kernels(plan, bare) if torch.cuda.is_available() else None:
        raise RecipeError(f"{missing}: install them{'' if pairs else ', or use data.packing=none'}")
    if not alone:
        length, way_out = (
            (f"above {threshold}", f"={threshold}") if threshold else (f"at {seq_len}", " of fewer tokens")
        )
        raise RecipeError(
            f"data.seq_len: {length} tokens the rotary frequencies of {name} depend on the longest position in the "
            f"micro-batch: use data.seq_len{way_out}"
            f"{'' if pairs else ', or data.packing=none with train.micro_batch_size=1'}"
        )


def why_shared(plan: Plan) -> str:
    """Return the key and value by which several documents may share a sequence."""
    objective = plan.recipe.train.objective
    return (
        f"train.objective: {objective}" if objective.shares_sequences else f"data.packing: {plan.recipe.data.packing}"
    )


def missing_kernels(plan: Plan, bare: PreTrainedModel) -> str | None:
    """Return which kernels documents of one sequence need on a GPU that are not here, None if there are none.

    In torch alone the host would wait for the bounds of the documents, and compute one document after another.
    """
    if plan.topology.device != "cuda" or not plan.recipe.documents_share_sequences:
        return None
    needed = sorted({kernel.distribution for kernel in accept_documents(bare) if not kernel.usable})
    if not needed:
        return None
    return f"{why_shared(plan)} with {type(bare).__name__} needs the kernels of {' and '.join(needed)} on a GPU"


def check_buffers(plan: Plan, config: PreTrainedConfig, bare: PreTrainedModel) -> None:
    """Raise RecipeError if the architecture cannot compute with buffers in another dtype than its weights.

    Saved buffers have the master dtype (minimax's decay tables), unless `buffer_dtype` casts them.
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
