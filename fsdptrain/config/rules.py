"""Check a recipe across its keys: contradictions, and keys that would have no effect."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fsdptrain.config.adapter import ADAPTER_CONFIG, FROM_FOLDER
from fsdptrain.config.keys import KEYS, value_at, value_text
from fsdptrain.config.mixture import KEYS as SOURCE_KEYS
from fsdptrain.config.mixture import mixture_problems, sources_of
from fsdptrain.config.optimizers import DEFAULT_OPTIMIZER
from fsdptrain.config.paths import expanded, path_problems
from fsdptrain.config.schema import MAX_NODES, Data, Recipe, node_range
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import Problem

# Keys that say the same thing in different ways. On the command line, one replaces the other one of the file.
ALTERNATIVES = {
    "train.steps": "train.epochs", "train.epochs": "train.steps",
    "log.trackers": "log.tensorboard", "log.tensorboard": "log.trackers",
}  # fmt: skip

# Keys whose rules below also look at other sections, beside those that the schema says they need.
SECTIONS_READ = {
    "data.format": ("train",),
    "data.seq_len": ("parallel",),
    "data.window": ("model", "train"),
    "model.attn_implementation": ("data", "train"),
    "model.trainable": ("adapter",),
    "adapter.kind": ("model",),
    "fsdp.mixed_precision.param_dtype": ("model",),
    "parallel.context": ("data", "model"),
    "fsdp.activation_checkpointing": ("model",),
    "eval.best_of": ("data",),
    "train.float8": ("adapter", "data", "fsdp", "model", "parallel"),
    "export.dtype": ("adapter",),
}


def cross_field_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    """Yield a problem for each contradiction and each key without effect. `where` has the keys set explicitly."""
    of_data = {path for path in where if path.startswith("data.")} if recipe.data.sources else set()
    yield from _unmet_needs(recipe, where.keys() - of_data)
    yield from path_problems(recipe)
    if "/" in recipe.name or recipe.name in (".", ".."):
        yield Problem(
            f"{value_text(recipe.name)} cannot name a folder: choose a name without `/`, or set output_dir", "name"
        )
    yield from _model_problems(recipe, where)
    yield from _adapter_problems(recipe, where)
    yield from _mixture_problems(recipe, of_data) if recipe.data.sources else _data_problems(recipe)
    if not recipe.data.sources:
        yield from _preference_problems(recipe)
    if recipe.data.window is not None:
        yield from _window_problems(recipe)
    if isinstance(recipe.data.eval, dict) and "source" in recipe.data.eval:
        yield from _held_out_problems(recipe.data, recipe.data.eval["source"])
    if recipe.eval.best_of is not None and recipe.data.eval:
        yield from _best_of_problems(recipe)
    yield from _fsdp_problems(recipe)
    yield from _context_problems(recipe)
    yield from _optim_problems(recipe)
    yield from _float8_problems(recipe)
    if recipe.train.steps is not None and recipe.train.epochs is not None and "train.epochs" in where:
        yield Problem("has no effect if train.steps is set: remove one of the two", "train.epochs")
    if recipe.train.steps is None and recipe.train.epochs is None:
        yield Problem("is null, and so is train.steps: set one of the two", "train.epochs")
    yield from _launch_problems(recipe)
    yield from _tracker_problems(recipe, where)
    if recipe.log.profile and (problem := profile_problem(recipe, recipe.train.steps)):
        yield problem


def _tracker_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    """Yield the problems with `log.trackers`: a library that is not installed, or a key that has no effect."""
    log = recipe.log
    beside = [name for name in log.chosen_trackers if name != "tensorboard"]  # which is always installed
    for name in beside:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # or a folder that a tracker has written here
            yield Problem(f"{name} is not installed: pip install 'fsdptrain[{name}]'", "log.trackers")
    if log.tensorboard is not None and "log.trackers" in where:
        yield Problem("is short for log.trackers, which is set, too: remove one of the two", "log.tensorboard")
    if log.project is not None and not beside:
        yield Problem("has no effect without wandb, mlflow or trackio in log.trackers", "log.project")


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
        return Problem(f"steps: {value_text(steps)}, but the last step of the run is {total_steps}", PROFILE)
    return None


def sections_read(path: str) -> set[str]:
    """Return the sections that decide whether a key of the recipe is valid: its own, and those of what it needs."""
    needs = KEYS[path].needs if path in KEYS else ()
    return {*(each.partition(".")[0] for each in (path, *needs)), *SECTIONS_READ.get(path, ())}


def _unmet_needs(recipe: Recipe, written: Collection[str]) -> Iterator[Problem]:
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


def _context_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems with ranks that share a row."""
    size, seq_len, kernel = recipe.parallel.context, recipe.data.seq_len, recipe.model.attn_implementation
    if size > 1 and kernel not in ("auto", "sdpa"):
        yield Problem(f"has no effect on {kernel}, which computes whole rows: use auto or sdpa", "parallel.context")
    if size > 1 and seq_len % size:
        yield Problem(f"{seq_len} tokens do not divide among {size} ranks (parallel.context)", "data.seq_len")


def _launch_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems with `launch`."""
    launch = recipe.launch
    least, most = node_range(launch.nnodes)
    if most > MAX_NODES:
        yield Problem(f"{most} is too large: must be at most {MAX_NODES}", "launch.nnodes")
    if isinstance(launch.nnodes, str) and least >= most:
        yield Problem(f"{launch.nnodes} is not a range MIN:MAX: MIN must be below MAX", "launch.nnodes")
    if most == 1 and launch.rdzv_endpoint is not None:
        yield Problem("has no effect with launch.nnodes: 1 (a single node uses loopback)", "launch.rdzv_endpoint")


def _model_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    """Yield the problems between keys of `model`."""
    model = recipe.model
    if model.id is None:
        if "model_type" not in model.config:
            yield Problem("is not set: give a Hub id, a folder, or a whole model.config with `model_type`", "model.id")
        if model.tokenizer is None:
            yield Problem(
                "is not set: for a model from scratch give a folder, a Hub id, or {train: 4096}", "model.tokenizer"
            )
        if model.init == "pretrained" and "model.init" in where:
            yield Problem("there are no weights to load without model.id: use init: random", "model.init")
    elif model.revision is not None and _exists(model.id):
        yield Problem("has no effect: model.id is a local folder", "model.revision")
    if model.id is not None and _exists(f"{model.id}/{ADAPTER_CONFIG}"):
        is_model = _exists(f"{model.id}/config.json")
        yield Problem(
            f"{model.id} has an adapter beside its weights ({ADAPTER_CONFIG}), which transformers adds when it opens "
            "them: move the adapter's files to a folder of their own, and name that in adapter.from to train it further"
            if is_model
            else f"{model.id} is an adapter: name the model that it belongs to here, and this folder in adapter.from",
            "model.id",
        )
    if any(not token.strip() for token in model.add_tokens):
        yield Problem("a token without a visible character: remove it from the list", "model.add_tokens")
    if repeated := next((token for token in model.add_tokens if model.add_tokens.count(token) > 1), None):
        yield Problem(f"{value_text(repeated)} is listed twice: remove one of the two", "model.add_tokens")
    if model.attn_implementation == "flash_attention_2" and not one_row_if_packed(recipe):
        apart = "" if recipe.train.objective == "dpo" else ", data.packing=none"
        yield Problem(
            "flash_attention_2 supports several documents in a sequence only in micro-batches of one: set "
            f"train.micro_batch_size=1{apart} or model.attn_implementation=sdpa",
            "model.attn_implementation",
        )


LIBRARIES = {"lora": ("peft",), "qlora": ("peft", "bitsandbytes")}  # of a kind of adapter


def _adapter_problems(recipe: Recipe, where: dict[str, str]) -> Iterator[Problem]:
    """Yield the problems between the keys of `adapter`, `model.trainable` and `export`."""
    adapter, model = recipe.adapter, recipe.model
    if adapter.kind and model.trainable:
        yield Problem(
            "has no effect with an adapter, which freezes the model: name whole modules to train in "
            "adapter.modules_to_save",
            "model.trainable",
        )
    for library in LIBRARIES.get(adapter.kind or "", ()):
        if importlib.util.find_spec(library) is None:
            yield Problem(
                f"{adapter.kind} needs {library}, which is not installed: pip install 'fsdptrain[{adapter.kind}]'",
                "adapter.kind",
            )
    if adapter.kind == "qlora" and adapter.use_dora:
        yield Problem(
            "DoRA needs the norms of the unquantised weights: use adapter.kind: lora, or remove use_dora",
            "adapter.use_dora",
        )
    if adapter.kind and adapter.from_ is not None:
        for path in (path for name in FROM_FOLDER if (path := f"adapter.{name}") in where):
            yield Problem("is determined by the folder of adapter.from: remove this key", path)
    set_dtype = "export.dtype" in where and recipe.export.dtype != Recipe().export.dtype
    if adapter.kind and recipe.export.adapter == "separate" and set_dtype:
        yield Problem(
            "has no effect with export.adapter: separate, which saves the adapter in model.dtype: use merged or both",
            "export.dtype",
        )
    for path, freezes in (("adapter.kind", adapter.kind is not None), ("model.trainable", bool(model.trainable))):
        if freezes and (model.id is None or model.init == "random"):
            yield Problem(
                "freezes the model's weights, so they must be pretrained: set model.id, without model.init: random",
                path,
            )


def one_row_if_packed(recipe: Recipe) -> bool:
    """Return whether no micro-batch has several rows of several documents: flash_attention_2 rejects them."""
    return not recipe.documents_share_sequences or recipe.train.micro_batch_size == 1


def _exists(path: str) -> bool:
    """Return whether a path exists on this machine."""
    try:
        return Path(expanded(path)).exists()
    except OSError:  # too long for a file name
        return False


def _data_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems between keys of `data`."""
    data = recipe.data
    fields = (*data.format.fields, *data.format.optional)
    if data.path is None:
        yield Problem("is not set: give a file, a glob, a folder, a list of them, or a Hub data set", "data.path")
    if data.chat_template is not None and not data.chat_template.strip():
        yield Problem("is empty: give a file or the text of a template, or remove the key", "data.chat_template")
    for name in data.columns:
        if name not in fields:
            yield Problem(
                f"`{name}` is not a field of format {data.format}; its fields: {', '.join(fields)}", "data.columns"
            )
    for name in fields if data.format.renders_chat else ():
        if isinstance(data.columns.get(name), list) and name not in ("messages", "prompt"):
            yield Problem(f"`{name}` must be a single column: only texts and messages can be joined", "data.columns")


def _preference_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems between a format with or without pairs, the objective, and what would divide pairs."""
    data = recipe.data
    if data.format.is_paired != (recipe.train.objective == "dpo"):
        yield Problem(
            f"{data.format} is trained with train.objective: dpo: set it" if data.format.is_paired else
            f"{data.format} has no pairs for train.objective: dpo: use preference (prompt, chosen, rejected)",
            "data.format",
        )  # fmt: skip
    if not data.format.is_paired:
        return
    if data.train_on == "all":
        yield Problem(
            "all compares prompts, which are equal in both answers of a pair: use completion", "data.train_on"
        )
    if data.packing == "concat":
        yield Problem("concat divides pairs: use bfd or none", "data.packing")
    if data.long_rows == "split":
        yield Problem("split divides pairs: use cut or drop", "data.long_rows")
    if data.drop_duplicates:
        yield Problem("compares single rows, and a pair has two: remove the key", "data.drop_duplicates")


def _mixture_problems(recipe: Recipe, written: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of several sources: each is checked alone; `written` has the keys of `data` that are set.

    A key of `data` is refused if no source can use it, a key of a source if that one cannot.
    """
    yield from mixture_problems(recipe.data)
    everywhere: list[Problem] | None = None
    for source, item in zip(sources_of(recipe.data), recipe.data.sources, strict=True):
        alone = dataclasses.replace(recipe, data=source.data)
        own = {f"data.{key}" for key in item if key in SOURCE_KEYS}
        found = [*_unmet_needs(alone, {*written, *own}), *(_data_problems(alone) if source.data.path else ())]
        for problem in found:
            if problem.field in own:
                key = (problem.field or "").removeprefix("data.")
                yield Problem(f"{source.name}: {key}: {problem.message}", "data.sources")
        for problem in _preference_problems(alone):  # all sources have pairs, or none
            key = (problem.field or "").removeprefix("data.")
            yield Problem(f"{source.name}: {key}: {problem.message}", "data.sources")
        common = [problem for problem in found if problem.field not in own]
        everywhere = common if everywhere is None else [each for each in everywhere if each in common]
    yield from everywhere or []


def _window_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems between `data.window`, which is set, and what needs all of the data before the first step."""
    data, model = recipe.data, recipe.model
    held_out = data.eval if isinstance(data.eval, dict) else {}
    trains_tokenizer = isinstance(model.tokenizer, dict)
    for is_set, fault in (
        (bool(data.sources), "data.sources is not read in windows: name all files in data.path"),
        (
            "fraction" in held_out,
            "data.eval: fraction holds out rows of all data: name held-out files in data.eval.path",
        ),
        (data.drop_duplicates, "data.drop_duplicates compares the rows of all data: remove one of the two"),
        (data.max_rows is not None, "data.max_rows counts the rows of all data: name fewer files in data.path"),
        (
            recipe.train.objective == "dpo",
            "train.objective: dpo computes the reference of all data first: remove this key",
        ),
        (trains_tokenizer, "model.tokenizer: {train} reads all data: train it before, and name its folder there"),
    ):
        if is_set:
            yield Problem(fault, "data.window")


def _held_out_problems(data: Data, named: str) -> Iterator[Problem]:
    """Yield the problem with `source` of `data.eval`, which is set, unless it is one of several sources."""
    names = [each.name for each in sources_of(data)]
    if not data.sources:
        yield Problem("source has no effect without data.sources: remove it", "data.eval")
    elif named not in names:
        yield Problem(f"source: {value_text(named)} is not one of the sources {', '.join(names)}", "data.eval")


def _best_of_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problem with `eval.best_of`, which is set, unless it is one of several sources with held-out rows."""
    names = [source.name for source in sources_of(recipe.data)] if "fraction" in recipe.data.eval else []
    if len(names) < 2:
        yield Problem("has no effect: the held-out rows are of one source (data.eval): remove it", "eval.best_of")
    elif recipe.eval.best_of not in names:
        message = f"{value_text(recipe.eval.best_of)} is no source with held-out rows: use one of {', '.join(names)}"
        yield Problem(message, "eval.best_of")


def _optim_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if the optimizer's library is not installed, or its moments too coarse for their decay."""
    kind = recipe.optim.name
    library = kind.traits.library
    if library is not None and importlib.util.find_spec(library) is None:
        yield Problem(
            f"{kind} needs {library}, which is not installed: pip install 'fsdptrain[{library}]'", "optim.name"
        )
    betas, most = recipe.optim.betas, kind.traits.largest_beta2
    if betas[1] > most:
        yield Problem(
            f"{betas[1]} is above {most}: the second moment of {kind} would be rounded back to its value instead of "
            f"decaying; set at most {most}, or use optim.name: {DEFAULT_OPTIMIZER}",
            "optim.betas",
        )


FLOAT8_LIBRARY = ("torchao", (0, 18))  # compiled by Triton, the casts of earlier versions give NaN (triton#11111)
FLOAT8_MULTIPLE = 16  # of the sizes of a product in float8


def _float8_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems between `train.float8` and other keys."""
    kind, adapter, dtypes = recipe.train.float8, recipe.adapter.kind, recipe.fsdp.mixed_precision
    if kind is None:
        return
    if fault := _library_fault(*FLOAT8_LIBRARY):
        yield Problem(f"{kind} {fault}: pip install 'fsdptrain[float8]'", "train.float8")
    if adapter or recipe.model.trainable:
        frozen = f"adapter.kind: {adapter}" if adapter else "model.trainable"
        yield Problem(f"{kind} trains all weights, and {frozen} freezes some: remove one of the two", "train.float8")
    if dtypes.param_dtype != "bfloat16":
        yield Problem(
            f"{kind} needs fsdp.mixed_precision.param_dtype: bfloat16, for what stays out of float8", "train.float8"
        )
    tokens = recipe.train.micro_batch_size * recipe.data.seq_len // max(1, recipe.parallel.context)
    if tokens % FLOAT8_MULTIPLE:
        yield Problem(
            f"{kind} needs micro-batches (train.micro_batch_size · data.seq_len) of a multiple of {FLOAT8_MULTIPLE} "
            f"tokens, and these have {tokens}: change data.seq_len",
            "train.float8",
        )
    if isinstance(recipe.fsdp.wrap, list) and "Linear" in recipe.fsdp.wrap:
        yield Problem(f"{kind} replaces the layers that fsdp.wrap names, Linear: name decoder layers", "train.float8")


def _library_fault(library: str, least: tuple[int, int]) -> str | None:
    """Return why a library cannot be used, if it is not installed or older than `least`."""
    try:
        found = version(library)
    except PackageNotFoundError:
        return f"needs {library}, which is not installed"
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    return None if numbers >= least else f"needs {library} {least[0]}.{least[1]} or newer, and {found} is installed"


def _fsdp_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems between keys of `fsdp`, and with the dtype of the master weights."""
    strategy = recipe.fsdp.strategy
    yield from _recomputation_problems(recipe)
    if recipe.fsdp.mixed_precision.param_dtype == "float16" and recipe.model.dtype != "float32":
        yield Problem(
            f"float16 needs model.dtype: float32: an unscaled gradient is below what {recipe.model.dtype} can add",
            "fsdp.mixed_precision.param_dtype",
        )
    if recipe.fsdp.accumulation == "hold_shards" and not may_hold_shards(strategy, recipe.fsdp.cpu_offload):
        yield Problem(
            f"hold_shards has no effect with {strategy} without fsdp.cpu_offload: each rank's shard of the gradients "
            "stays on its device anyway; use reduce",
            "fsdp.accumulation",
        )


def _recomputation_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems between the keys of `fsdp.activation_checkpointing`, and with the attention kernel."""
    path, kernel = "fsdp.activation_checkpointing", recipe.model.attn_implementation
    how = recipe.fsdp.recomputation
    for name in ("offload", "keep_attention"):
        if getattr(how, name) and how.kind == "none":
            yield Problem(f"{name} has no effect with kind: none, which recomputes nothing: use kind: full", path)
    if how.kind == "selective" and how.keep_attention:
        yield Problem(
            "keep_attention has no effect with kind: selective, which keeps attention anyway: use kind: full", path
        )
    if how.kind == "selective" and how.offload:
        yield Problem("offload is not possible with kind: selective: use kind: full, with keep_attention", path)
    if how.keep_attention and how.kind == "full" and kernel not in ("auto", "sdpa"):
        yield Problem(f"keep_attention is not possible with {kernel} attention: use auto or sdpa", path)


def may_hold_shards(strategy: Strategy, offload: bool) -> bool:
    """Return whether anything follows the reduction of gradients to shards that `hold_shards` could put off."""
    return strategy.replicates or offload
