"""Check a recipe across its keys: contradictions, and keys that would have no effect."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version

from fsdptrain.config.adapter import ADAPTER_CONFIG, FROM_FOLDER
from fsdptrain.config.keys import KEYS, value_at, value_text
from fsdptrain.config.mixture import KEYS as SOURCE_KEYS
from fsdptrain.config.mixture import mixture_problems, sources_of
from fsdptrain.config.objectives import Objective
from fsdptrain.config.optimizers import DEFAULT_OPTIMIZER
from fsdptrain.config.paths import expanded, path_problems
from fsdptrain.config.schema import MAX_NODES, Recipe, node_range
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import Problem, install_line

# Keys that say the same thing in different ways. On the command line, one replaces the other one of the file.
ALTERNATIVES = {
    "train.steps": "train.epochs", "train.epochs": "train.steps",
    "log.trackers": "log.tensorboard", "log.tensorboard": "log.trackers",
}  # fmt: skip


def cross_field_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    """Yield a problem for each contradiction and each key without effect. `where` has the keys set explicitly.

    A message names a key of each section that its rule reads, as `reader.parse` expects.
    """
    of_data = {path for path in where if path.startswith("data.")} if recipe.data.sources else set()
    yield from unmet_needs(recipe, where.keys() - of_data)
    yield from path_problems(recipe)
    yield from _model_problems(recipe, where)
    yield from _adapter_problems(recipe, where)
    yield from _attention_problems(recipe)
    if recipe.data.sources:
        yield from _mixture_problems(recipe, of_data)
    else:
        yield from _data_problems(recipe)
        yield from _objective_problems(recipe)
    yield from _teacher_problems(recipe)
    yield from _window_problems(recipe)
    yield from _held_out_problems(recipe)
    yield from _fsdp_problems(recipe)
    yield from _parallel_problems(recipe)
    yield from _router_problems(recipe)
    yield from _optim_problems(recipe)
    yield from _float8_problems(recipe)
    yield from _run_problems(recipe, where)


def _run_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    train, launch, log = recipe.train, recipe.launch, recipe.log
    if "/" in recipe.name or recipe.name in (".", ".."):
        yield Problem(f"{value_text(recipe.name)} cannot name a folder: choose a name without `/`", "name")
    if train.steps is not None and train.epochs is not None and "train.epochs" in where:
        yield Problem("has no effect if train.steps is set: remove one of the two", "train.epochs")
    if train.steps is None and train.epochs is None:
        yield Problem("is null, and so is train.steps: set one of the two", "train.epochs")
    least, most = node_range(launch.nnodes)
    if most > MAX_NODES:
        yield Problem(f"{most} is too large: must be at most {MAX_NODES}", "launch.nnodes")
    if isinstance(launch.nnodes, str) and least >= most:
        yield Problem(f"{launch.nnodes} is not a range MIN:MAX: MIN must be below MAX", "launch.nnodes")
    if most == 1 and launch.rdzv_endpoint is not None:
        yield Problem("has no effect with launch.nnodes: 1 (a single node uses loopback)", "launch.rdzv_endpoint")
    beside = [name for name in log.chosen_trackers if name != "tensorboard"]  # which is always installed
    for name in beside:
        yield from _missing_library(name, name, "log.trackers")
    if log.tensorboard is not None and "log.trackers" in where:
        yield Problem("is short for log.trackers, which is set, too: remove one of the two", "log.tensorboard")
    if log.project is not None and not beside:
        yield Problem("has no effect without wandb, mlflow or trackio in log.trackers", "log.project")
    if log.profile and (problem := profile_problem(recipe, train.steps)):
        yield problem


def _missing_library(name: str, extra: str, field: str) -> Iterator[Problem]:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # or a folder that a tracker has written here
        yield Problem(f"{name} is not installed: {install_line(extra)}", field)


PROFILE = "log.profile"
MOST_PROFILED = 50  # steps, of which the traces are in host memory until they are written


def profile_problem(recipe: Recipe, total_steps: int | None) -> Problem | None:
    """Return the problem with `log.profile`, which is set, in a run of so many steps; None: their number is unknown."""
    steps, example = recipe.log.profile["steps"], "give the first and the last, such as [10, 12]"
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        return Problem(f"steps: {value_text(steps)} is not a range of steps, which count from 1: {example}", PROFILE)
    if steps[1] - steps[0] >= MOST_PROFILED:
        return Problem(f"steps: {value_text(steps)} are more than {MOST_PROFILED} steps: {example}", PROFILE)
    if total_steps is not None and steps[1] > total_steps:
        last = f"the last step of the run is {total_steps} (train.steps, train.epochs)"
        return Problem(f"steps: {value_text(steps)}, but {last}", PROFILE)
    return None


def unmet_needs(recipe: Recipe, written: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each `written` key that has no effect without another key, or with its value."""
    for path, key in KEYS.items():
        own = value_at(recipe, path)
        if path not in written or own is None or own is False or own in ("", [], key.limits.get("unset")):
            continue  # a number 0 is a value
        for other, values in key.needs.items():
            value = value_at(recipe, other)
            if values and value not in values:
                shown = value if isinstance(value, str) else value_text(value)
                message = f"has no effect with {other}: {shown}, only with {' or '.join(values)}"
            elif not values and not value:
                choices = " or ".join(KEYS[other].choices)
                message = f"has no effect without {other}: set {other}" + (f": {choices}" if choices else "")
            else:
                continue
            yield Problem(message, path)
            break


def _model_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    model = recipe.model
    if model.id is None:
        if "model_type" not in model.config:
            yield Problem("is not set: give a Hub id, a folder, or a whole model.config with `model_type`", "model.id")
        if model.tokenizer is None:
            yield Problem("is not set: for a model from scratch give a folder, an id or {train: N}", "model.tokenizer")
        if model.init == "pretrained" and "model.init" in where:
            yield Problem("there are no weights to load without model.id: use init: random", "model.init")
    elif model.revision is not None and os.path.lexists(expanded(model.id)):
        yield Problem("has no effect: model.id is a local folder", "model.revision")
    if model.id is not None and os.path.lexists(expanded(f"{model.id}/{ADAPTER_CONFIG}")):
        message = f"{model.id} has an adapter ({ADAPTER_CONFIG}): name its model here, and the adapter in adapter.from"
        yield Problem(message, "model.id")
    if any(not token.strip() for token in model.add_tokens):
        yield Problem("a token without a visible character: remove it from the list", "model.add_tokens")
    if repeated := next((token for token in model.add_tokens if model.add_tokens.count(token) > 1), None):
        yield Problem(f"{value_text(repeated)} is listed twice: remove one of the two", "model.add_tokens")


def _attention_problems(recipe: Recipe) -> Iterator[Problem]:
    kernel, how = recipe.model.attn_implementation, recipe.fsdp.recomputation
    if kernel == "flash_attention_2" and recipe.documents_share_sequences and recipe.train.micro_batch_size > 1:
        apart = "" if recipe.train.objective.shares_sequences else ", data.packing=none"
        yield Problem(
            "flash_attention_2 supports several documents in a sequence only in micro-batches of one: set "
            f"train.micro_batch_size=1{apart} or model.attn_implementation=sdpa",
            "model.attn_implementation",
        )
    for name in ("offload", "keep_attention"):
        if getattr(how, name) and how.kind != "full":
            message = f"{name} has no effect with kind: {how.kind}: use kind: full"
            yield Problem(message, "fsdp.activation_checkpointing")
    if how.keep_attention and how.kind == "full" and kernel not in ("auto", "sdpa"):
        message = f"keep_attention is not possible with model.attn_implementation: {kernel}: use auto or sdpa"
        yield Problem(message, "fsdp.activation_checkpointing")


def _adapter_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    adapter, model = recipe.adapter, recipe.model
    if adapter.kind and model.trainable:
        yield Problem("has no effect with an adapter: name modules in adapter.modules_to_save", "model.trainable")
    for library in ("peft", "bitsandbytes")[: {"lora": 1, "qlora": 2}.get(adapter.kind or "", 0)]:
        yield from _missing_library(library, str(adapter.kind), "adapter.kind")
    if adapter.kind == "qlora" and adapter.use_dora:
        yield Problem("needs the norms of the unquantised weights: use adapter.kind: lora", "adapter.use_dora")
    if adapter.kind and adapter.from_ is not None:
        for path in (path for name in FROM_FOLDER if (path := f"adapter.{name}") in where):
            yield Problem("is determined by the folder of adapter.from: remove this key", path)
    set_dtype = "export.dtype" in where and recipe.export.dtype != Recipe().export.dtype
    if adapter.kind and recipe.export.adapter == "separate" and set_dtype:
        message = (
            "an adapter (adapter.kind) is exported in model.dtype with export.adapter: separate: use merged or both"
        )
        yield Problem(f"has no effect: {message}", "export.dtype")
    for path, freezes in (("adapter.kind", adapter.kind is not None), ("model.trainable", bool(model.trainable))):
        if freezes and (model.id is None or model.init == "random"):
            yield Problem("freezes weights, which must be pretrained: set model.id, without model.init: random", path)


def _data_problems(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    fields = (*data.format.fields, *data.format.optional)
    if data.path is None:
        yield Problem("is not set: give a file, a glob, a folder, a list of them, or a Hub data set", "data.path")
    for name in data.columns:
        if name not in fields:
            message = f"`{name}` is not a field of format {data.format}; its fields: {', '.join(fields)}"
            yield Problem(message, "data.columns")
    for name in fields if data.format.renders_chat else ():
        if isinstance(data.columns.get(name), list) and name not in ("messages", "prompt"):
            yield Problem(f"`{name}` must be a single column: only texts and messages can be joined", "data.columns")


def _objective_problems(recipe: Recipe) -> Iterator[Problem]:
    data, objective, form = recipe.data, recipe.train.objective, recipe.data.format
    if form not in objective.formats:
        fitting = " or ".join(each for each in Objective if form in each.formats)
        wanted = " or ".join(
            f"{each} ({', '.join(('prompt', *each.fields))})" for each in objective.formats if each.answers
        )
        way_out = f", or data.format: {wanted}" if wanted else ""
        message = f"{form} cannot be trained with train.objective: {objective}: use train.objective: {fitting}{way_out}"
        yield Problem(message, "data.format")
    if not form.answers:
        return
    if data.train_on == "all":
        yield Problem("all judges prompts, too: use completion", "data.train_on")
    if data.packing == "concat":
        yield Problem(f"concat divides {form.unit}s: use bfd or none", "data.packing")
    if data.long_rows == "split":
        yield Problem(f"split divides {form.unit}s: use cut or drop", "data.long_rows")


def _teacher_problems(recipe: Recipe) -> Iterator[Problem]:
    teacher, objective = recipe.teacher, recipe.train.objective
    if objective.needs_teacher and teacher.id is None:
        message = f"is not set: train.objective: {objective} needs a Hub id or folder with the same tokenizer"
        yield Problem(message, "teacher.id")
    elif teacher.id is not None and teacher.revision is not None and os.path.lexists(expanded(teacher.id)):
        yield Problem("has no effect: teacher.id is a local folder", "teacher.revision")


def _mixture_problems(recipe: Recipe, written: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of several sources: each is checked alone; `written` has the keys of `data` that are set.

    A key of `data` is refused if no source can use it, a key of a source if that one cannot.
    """
    yield from mixture_problems(recipe.data)
    everywhere: list[Problem] | None = None
    for source, item in zip(sources_of(recipe.data), recipe.data.sources, strict=True):
        alone = dataclasses.replace(recipe, data=source.data)
        own = {f"data.{key}" for key in item if key in SOURCE_KEYS}
        found = [*unmet_needs(alone, {*written, *own}), *(_data_problems(alone) if source.data.path else ())]
        # All sources are of the format that the objective needs.
        for problem in [*(each for each in found if each.field in own), *_objective_problems(alone)]:
            key = (problem.field or "").removeprefix("data.")
            yield Problem(f"{source.name}: {key}: {problem.message}", "data.sources")
        common = [problem for problem in found if problem.field not in own]
        everywhere = common if everywhere is None else [each for each in everywhere if each in common]
    yield from everywhere or []


def _window_problems(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    needs_all = {
        "data.sources": bool(data.sources),
        "data.eval: {fraction}": "fraction" in (data.eval or {}),
        "data.max_rows": data.max_rows is not None,
        f"train.objective: {recipe.train.objective}": recipe.train.objective.needs_reference
        or recipe.train.objective.needs_teacher,
        "model.tokenizer: {train}": isinstance(recipe.model.tokenizer, dict),
    }
    for key, is_set in needs_all.items():
        if is_set and data.window is not None:
            yield Problem(f"{key} needs all data before the first step: remove one of the two", "data.window")


def _held_out_problems(recipe: Recipe) -> Iterator[Problem]:
    data, best_of, held_out = recipe.data, recipe.eval.best_of, recipe.data.eval or {}
    names = [source.name for source in sources_of(data)]
    if "source" in held_out and not data.sources:
        yield Problem("source has no effect without data.sources: remove it", "data.eval")
    elif data.sources and "path" in held_out and held_out.get("source") not in names:
        message = f"source: {value_text(held_out.get('source'))} is not one of the sources {', '.join(names)}"
        yield Problem(f"{message}: name the one as whose rows these are read", "data.eval")
    if best_of is None or not held_out:
        return
    if "fraction" not in held_out or len(names) < 2:
        yield Problem("has no effect: the held-out rows are of one source (data.eval): remove it", "eval.best_of")
    elif best_of not in names:
        message = f"{value_text(best_of)} is no source with held-out rows (data.eval): use one of {', '.join(names)}"
        yield Problem(message, "eval.best_of")


def _optim_problems(recipe: Recipe) -> Iterator[Problem]:
    kind = recipe.optim.name
    if library := kind.traits.library:
        yield from _missing_library(library, library, "optim.name")
    beta2, most = recipe.optim.betas[1], kind.traits.largest_beta2
    if beta2 > most:
        message = (
            f"{beta2} is above {most}, where {kind} rounds decay away: set less, or use optim.name: {DEFAULT_OPTIMIZER}"
        )
        yield Problem(message, "optim.betas")


FLOAT8_LIBRARY = ("torchao", (0, 18))  # compiled by Triton, the casts of earlier versions give NaN (triton#11111)
FLOAT8_MULTIPLE = 16  # of the sizes of a product in float8


def _float8_problems(recipe: Recipe) -> Iterator[Problem]:
    kind, adapter, dtypes = recipe.train.float8, recipe.adapter.kind, recipe.fsdp.mixed_precision
    if kind is None:
        return
    library, (major, minor) = FLOAT8_LIBRARY
    try:
        found = version(library)
    except PackageNotFoundError:
        found = "none"
    if [int(number) for number in re.findall(r"\d+", found)[:2]] < [major, minor]:
        message = f"needs {library} {major}.{minor} or newer, and {found} is installed: {install_line('float8')}"
        yield Problem(message, "train.float8")
    if adapter or recipe.model.trainable:
        frozen = f"adapter.kind: {adapter}" if adapter else "model.trainable"
        yield Problem(f"{kind} trains all weights, and {frozen} freezes some: remove one of the two", "train.float8")
    if dtypes.param_dtype != "bfloat16":
        yield Problem(f"{kind} needs fsdp.mixed_precision.param_dtype: bfloat16", "train.float8")
    tokens = recipe.train.micro_batch_size * recipe.data.seq_len // max(1, recipe.parallel.ranks_of_row)
    if tokens % FLOAT8_MULTIPLE:
        message = (
            f"micro-batches need a multiple of {FLOAT8_MULTIPLE} tokens on each rank, and these have {tokens} "
            "(micro_batch_size × data.seq_len / parallel.context): change data.seq_len"
        )
        yield Problem(message, "train.float8")
    if isinstance(recipe.fsdp.wrap, list) and "Linear" in recipe.fsdp.wrap:
        yield Problem(f"{kind} replaces the layers that fsdp.wrap names, Linear: name decoder layers", "train.float8")


def _fsdp_problems(recipe: Recipe) -> Iterator[Problem]:
    strategy = recipe.fsdp.strategy
    if recipe.fsdp.mixed_precision.param_dtype == "float16" and recipe.model.dtype != "float32":
        message = f"float16 needs model.dtype: float32: {recipe.model.dtype} cannot add its small gradients"
        yield Problem(message, "fsdp.mixed_precision.param_dtype")
    if recipe.fsdp.accumulation == "hold_shards" and not may_hold_shards(strategy, recipe.fsdp.cpu_offload):
        message = f"hold_shards has no effect with {strategy} without fsdp.cpu_offload: use reduce"
        yield Problem(message, "fsdp.accumulation")


def _parallel_problems(recipe: Recipe) -> Iterator[Problem]:
    parallel, adapter, fsdp = recipe.parallel, recipe.adapter, recipe.fsdp
    kernel, seq_len = recipe.model.attn_implementation, recipe.data.seq_len
    keys = [f"parallel.{name}" for name in ("context", "tensor") if getattr(parallel, name) > 1]
    if keys and seq_len % parallel.ranks_of_row:
        message = f"{seq_len} tokens do not divide among {parallel.ranks_of_row} ranks ({', '.join(keys)})"
        yield Problem(message, "data.seq_len")
    if keys and kernel not in ("auto", "sdpa"):
        message = f"has no effect with model.attn_implementation: {kernel}, which computes whole rows: use auto or sdpa"
        yield Problem(message, keys[0])
    traits = recipe.optim.name.traits
    others = {  # why weights cannot be divided → (whether it is set, the way out)
        f"adapter.kind: {adapter.kind}": (adapter.kind == "qlora", "use adapter.kind: lora"),
        "adapter.use_dora": (adapter.use_dora, "remove one of the two"),
        f"train.float8: {recipe.train.float8}": (recipe.train.float8 is not None, "remove one of the two"),
        "fsdp.wrap": (fsdp.wrap != "auto", "use fsdp.wrap: auto"),
        "fsdp.bucket_cap_mb": (fsdp.bucket_cap_mb is not None, "remove one of the two"),
    }
    yield from _pipeline_problems(recipe)
    for name in ("tensor", "experts"):
        if getattr(parallel, name) == 1:
            continue
        optimizer = (name not in traits.divides, f"use optim.name: {DEFAULT_OPTIMIZER}")
        for key, (is_set, way_out) in {**others, f"optim.name: {recipe.optim.name}": optimizer}.items():
            if is_set:
                yield Problem(f"weights that ranks divide are not supported with {key}: {way_out}", f"parallel.{name}")


def _pipeline_problems(recipe: Recipe) -> Iterator[Problem]:
    parallel, objective = recipe.parallel, recipe.train.objective
    if parallel.pipeline == 1:
        for name in ("schedule", "stage_layers"):
            if getattr(parallel, name) not in ("1f1b", None):
                yield Problem("has no effect without a pipeline: set parallel.pipeline", f"parallel.{name}")
        return
    if parallel.stage_layers is not None and len(parallel.stage_layers) != parallel.stages:
        message = f"{len(parallel.stage_layers)} numbers of layers for {parallel.stages} stages: give one for each"
        yield Problem(message, "parallel.stage_layers")
    others = {
        f"train.objective: {objective}": (
            objective.answers > 0 or objective.needs_teacher,
            "use parallel.tensor or context",
        ),
        "fsdp.wrap": (recipe.fsdp.wrap != "auto", "use fsdp.wrap: auto"),
        "fsdp.bucket_cap_mb": (recipe.fsdp.bucket_cap_mb is not None, "remove one of the two"),
    }
    for key, (is_set, way_out) in others.items():
        if is_set:
            yield Problem(f"a pipeline is not supported with {key}: {way_out}", "parallel.pipeline")


def _router_problems(recipe: Recipe) -> Iterator[Problem]:
    for key, is_set in (("adapter.kind", recipe.adapter.kind), ("model.trainable", recipe.model.trainable)):
        if recipe.train.router_bias_rate and is_set:
            yield Problem(
                f"has no effect with {key}: exports take what is frozen from the files", "train.router_bias_rate"
            )


def may_hold_shards(strategy: Strategy, offload: bool) -> bool:
    """Return whether anything follows the reduction of gradients to shards that `hold_shards` could put off."""
    return strategy.replicates or offload
