"""Sharded weights → a Hugging Face folder, one layer at a time, so that no process holds the whole model.

The weights come from a live model (every rank gathers, rank 0 writes) or from a checkpoint on disk (one process); the
rest is the same.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from fsdptrain.checkpoint.export_check import POLL_S, Sample, comparison
from fsdptrain.checkpoint.export_tensors import Exported, publish
from fsdptrain.checkpoint.manifest import (
    CONFIG,
    checkpoint_problems,
    file_sums,
    read_manifest,
    reject_external_symlinks,
)
from fsdptrain.checkpoint.resume import (
    BASE_KEY,
    DATA_KEY,
    HELD_OUT_KEY,
    TOKENIZER_KEY,
    WITHOUT_EFFECT,
    resume_problems,
)
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.checkpoint.shards import CheckpointReader, Tensors
from fsdptrain.config.adapter import ADAPTER_FOLDER
from fsdptrain.config.keys import flat, yaml_text
from fsdptrain.config.paths import is_hub_data, places
from fsdptrain.config.rules import unmet_needs
from fsdptrain.config.schema import Recipe
from fsdptrain.data.hub import file_checksums, files_digest, safetensors_files, stamps_of
from fsdptrain.errors import CUSTOM_CODE, CheckpointError, RecipeError, StorageError, first_line
from fsdptrain.model.config import announced_mtp, read_config
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import saved_state, trained_state
from fsdptrain.parallel.shard import whole_tensor
from fsdptrain.parallel.world import World
from fsdptrain.plan.plan import HubData, Plan, open_plan, varied
from fsdptrain.run_folder.events import Progress, Reporter, progress_record, read_losses
from fsdptrain.run_folder.files import openable, shipped
from fsdptrain.run_folder.ownership import (
    CARD,
    WEIGHTS,
    Stamps,
    file_stamps,
    output_lock,
    read_export_record,
    write_export_record,
)
from fsdptrain.run_folder.records import RunState, Tail, by_loss, shares_of
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import MANIFEST_NAME, Location
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import printable


def gathered_tensors(
    model: Any, groups: list[list[str]], world: World, between_groups: Callable[[], None]
) -> Iterator[Tensors]:
    """Yield the state of a live sharded model on the CPU, group by group; collective. Empty but on rank 0.

    Of a pipeline, the first rank of a stage sends what only that stage has.
    """
    tensors = saved_state(model)
    own = [*tensors] if world.rank == world.ranks_of_stage[0] else []
    first = {name: rank for rank, names in reversed([*enumerate(world.gather_objects(own))]) for name in names}
    for group in groups:
        between_groups()
        tensors_on_cpu = {}
        for name in group:
            whole = []
            if name in tensors and name not in model.repeated:
                whole = [whole_tensor(tensors[name].detach(), model.parts.get(name), world)]
            if world.rank in (0, first[name]):
                whole = world.list_on_rank_zero([each.cpu() for each in whole], first[name])
            if world.rank == 0:
                tensors_on_cpu[name] = whole[0]
        yield tensors_on_cpu


def export_live(
    model: nn.Module,
    unsharded: PreTrainedModel,
    plan: Plan,
    checkpointer: Checkpointer,
    reporter: Reporter,
    step: int,
    between_groups: Callable[[], None] = lambda: None,
    sample: Sample | None = None,
    stamps: list[tuple[str, int, int]] | None = None,
) -> None:
    """Export a live model after `step` steps; collective. Raises CheckpointError on every rank when rank 0 fails.

    `between_groups` is called on every rank before each group of tensors, and while a fresh process opens the export
    and compares it with `sample`; it may raise, if it does so on all ranks. Without `sample` nothing is compared.
    `stamps` are the `stamps_of` the frozen weights when the run began.
    """
    rundir, world = checkpointer.rundir, checkpointer.world
    what = Exported(unsharded, plan, rundir, step, checkpointer.identity)
    writes = world.rank == 0

    def wait() -> None:
        world.gather_objects(True)
        between_groups()
        time.sleep(POLL_S)

    tensors = gathered_tensors(model, what.trained_groups, world, between_groups)
    failure: Exception | None = None
    if writes:
        ways = what.ways() if sample else {}
        with comparison(sample, ways, what.runs_own_code, reporter.progress, wait) as compare:
            try:
                with output_lock(rundir.export):
                    check_base = partial(check_unchanged, plan, stamps, checkpointer.identity)
                    fields = _write(what, tensors, rundir.export, reporter.progress, compare, wait, check_base)
                reporter.event("export", **fields)
            except (CheckpointError, RecipeError) as error:
                failure = error
    for _ in tensors:  # gathering is collective: complete it even after a failure
        pass
    while any(world.gather_objects(False)):  # rank 0 waits for the other process
        between_groups()
    checkpointer.raise_on_every_rank(failure)


def export_checkpoint(
    rundir: RunDir,
    step: int | None,
    out: Path,
    dtype: str | None,
    screen: Screen,
    adapter: str | None = None,
    merge_base: str | None = None,
    compare: bool = True,
    best: bool = False,
    trusted: bool = False,
) -> None:
    """Export from a checkpoint of a run folder in one process; from the newest valid one when `step` is None.

    With `best`, or if `export.which` asks for it, from the valid one with the lowest held-out loss.

    `adapter` and `merge_base` replace those keys of the recipe's section `export`. With `compare` a fresh process opens
    the folder, unless the recipe says otherwise. Raises RecipeError if an option has no effect, the run's own code is
    not `trusted`, or the checkpoint's adapter would be merged into other frozen weights than it was trained with.
    """
    reject_external_symlinks(rundir)
    disable_progress_bar()  # the screen shows the progress
    plan = with_options(open_plan(rundir.plan), adapter, merge_base)
    if plan.trust_remote_code and not trusted and any(rundir.model.glob("*.py")):
        raise RecipeError(f"the model of {rundir.root} {CUSTOM_CODE}")
    plan = replace(plan, trust_remote_code=trusted)
    best = best or (step is None and plan.recipe.export.which == "best")
    folder = _choose_checkpoint(rundir, plan, step, screen.say, best)

    def progress(stage: str, done: int, total: int) -> None:
        screen.show(progress_record(stage, done, total))

    try:
        manifest = read_manifest(folder)
        what = Exported(_build_skeleton(rundir, plan), plan, rundir, manifest.step, manifest.identity, dtype)
        if dtype is not None and what.adapter == "separate":
            raise RecipeError(
                "--dtype has no effect: export.adapter: separate saves the adapter in model.dtype; add --adapter merged"
            )
        if what.needs_base:
            check_frozen_files(plan, manifest.identity)
        # There is no trained model to compare with: the folder is only opened. The base of a separate adapter may be
        # on another machine.
        opens = compare and plan.recipe.export.compare
        ways = {name: way for name, way in what.ways().items() if opens and not way.adapter}
        wait = partial(time.sleep, POLL_S)
        with (
            CheckpointReader(folder) as checkpoint,
            comparison(None, ways, what.runs_own_code, progress, wait) as check,
        ):
            state = trained_state(what.trained)
            tensors = (
                {name: checkpoint.whole(f"model.{name}", state[name]) for name in group}
                for group in what.trained_groups
            )
            fields = _write(what, tensors, out, progress, check, wait)
    except (CheckpointError, OSError):
        _reject_removed(folder, plan)  # which may be the cause
        raise
    screen.show({"event": "export", **fields})
    screen.summary(0.0)


def _reject_removed(folder: Location, plan: Plan) -> None:
    try:
        (folder / MANIFEST_NAME).lstat()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} was removed while it was read (a run keeps checkpoint.keep: {plan.recipe.checkpoint.keep}): "
            "run the command again for a newer one"
        ) from None


def with_options(plan: Plan, adapter: str | None, merge_base: str | None) -> Plan:
    """Return the plan with `export.adapter` and `export.merge_base` from the command line; None keeps the recipe's.

    Raises RecipeError if one of them has no effect on this run.
    """
    options = {"export.adapter": adapter, "export.merge_base": merge_base}
    given = {key: value for key, value in options.items() if value}
    plan = varied(plan, given)
    if problems := [*unmet_needs(plan.recipe, given)]:
        raise RecipeError(problems)
    return plan


def check_frozen_files(plan: Plan, identity: dict[str, Any]) -> None:
    """Raise RecipeError unless the files of the pretrained model are those that a checkpoint was trained on."""
    found = files_digest(file_checksums(safetensors_files(plan)))
    if problems := resume_problems(identity, identity | {BASE_KEY: found}):
        raise RecipeError(problems)


def check_unchanged(plan: Plan, stamps: list[tuple[str, int, int]] | None, identity: dict[str, Any]) -> None:
    """Raise RecipeError if the files of `model.id` were replaced by other ones since their `stamps`."""
    if stamps is None or stamps_of([path for path, *_ in stamps]) == stamps:
        return
    try:
        check_frozen_files(plan, identity)
    except RecipeError:
        alone = f", or save the adapter alone: fsdptrain export {shlex.quote(plan.run_dir)} --adapter separate"
        alone = alone if plan.recipe.adapter.kind else ""
        raise RecipeError(
            f"model.id: the files of {plan.recipe.model.id} changed during the run, and what was trained belongs "
            f"to the former ones: put these back and run it again{alone}"
        ) from None


def _write(
    what: Exported,
    tensors: Iterator[Tensors],
    out: Path,
    progress: Progress,
    compare: Callable[[Path], dict[str, Any]],
    wait: Callable[[], None],
    check_base: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write an export with its model card; return the fields of the `export` event.

    That of the run folder replaces an earlier one, and is recorded. `wait` is called while checksums are computed.
    """
    rundir, is_recorded = what.rundir, out == what.rundir.export
    before = read_export_record(rundir).files if is_recorded else {}
    sums: dict[str, str] = {}
    compared: dict[str, Any] = {}

    def fill(folder: Path) -> int:
        count = what.write(tensors, folder, progress, check_base)
        progress("computing the checksums of the export", 0, 0)
        sums.update(file_sums(folder, file_stamps(folder), wait))
        write_cards(folder, what, sums, out, before)
        compared.update(compare(folder))
        return count

    count, files, kept = publish(fill, out, what.needed_bytes, before)
    if is_recorded:
        write_export_record(rundir, what.step, files, sums)
    fields = {"step": what.step, "path": str(out), "bytes": count, "dtype": what.dtype, **compared}
    if what.adapter:
        fields["adapter"] = what.adapter
    if kept:
        fields["kept"] = str(kept)
    return fields


def _build_skeleton(rundir: RunDir, plan: Plan) -> PreTrainedModel:
    try:
        model = replace(plan.recipe.model, attn_implementation="eager")  # nothing is computed, and there may be no GPU
        openable(rundir.model / CONFIG)  # transformers calls a configuration missing that it cannot open
        if plan.trust_remote_code:
            return skeleton(read_config(str(rundir.model), None, trusted=True), model)
        return skeleton(AutoConfig.from_pretrained(rundir.model, trust_remote_code=False), model)
    except (RecipeError, StorageError):
        raise
    except Exception as error:  # a model's constructor may raise anything over its config
        raise CheckpointError(f"{rundir.model} does not describe a model: {first_line(error)}") from None


def _choose_checkpoint(rundir: RunDir, plan: Plan, step: int | None, say: Callable[[str], None], best: bool) -> Path:
    """Return the verified checkpoint of `step`, or the newest or best valid one; raises CheckpointError without one."""
    steps = rundir.checkpoint_steps()
    if step is not None and step not in steps:
        raise CheckpointError(f"{rundir.storage} has no checkpoint of step {step}; steps: {steps}")
    ranked = by_loss(read_losses(rundir.metrics, plan.recipe.eval.best_of), steps) if best else steps[::-1]
    if not ranked:
        raise CheckpointError(
            f"{rundir.storage} has no checkpoint of a step that was evaluated (data.eval, eval.every, "
            f"checkpoint.keep_best); add --step with one of {steps}"
        )
    for candidate in [step] if step is not None else ranked:
        folder: Path = rundir.checkpoint(candidate)
        problems = checkpoint_problems(folder)
        if not problems:
            return folder
        _reject_removed(folder, plan)
        say(f"{folder.name} is not valid: {problems[0]}")
    raise CheckpointError(f"no valid checkpoint in {rundir.storage}")


# --- the model card --------------------------------------------------------------------------------------------------


def write_cards(folder: Path, what: Exported, sums: dict[str, str], out: Path, before: Stamps) -> None:
    """Write the cards of an export in `folder`, which will replace `out`; `sums` are the SHA-256 of its files.

    A card in `out` that someone else has written or edited (it is not as in `before`) stays, and none is written.
    """
    adapter = folder / ADAPTER_FOLDER
    if what.adapter == "both":
        _card(what, sums, is_adapter=True).save(adapter / CARD)
    if before and os.path.lexists(out / CARD) and file_stamps(out).get(CARD) != before.get(CARD):
        return
    _card(what, sums, is_adapter=what.adapter == "separate").save(folder / CARD)


def _card(what: Exported, sums: dict[str, str], is_adapter: bool) -> ModelCard:
    from jinja2 import Environment, StrictUndefined

    plan, recipe, identity = what.plan, what.plan.recipe, what.identity
    records = Tail(what.rundir.metrics, from_end=False).read()
    state = RunState.of(record for record in records if record.get("step", 0) <= what.step)
    model = recipe.model.id
    published = None if model is None or Path(model).is_dir() else model  # others do not have a folder
    metadata = ModelCardData(
        base_model=published,
        base_model_relation=("adapter" if is_adapter else "finetune") if published else None,
        datasets=[HubData.of(plan.data_path).name] if is_hub_data(plan.data_path) else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["fsdptrain", *([str(recipe.adapter.kind)] if recipe.adapter.kind else [])],
    )
    versions = {**plan.versions, "Python": sys.version.split()[0]}
    mtp = " Its layers for multi-token prediction are not trained." if announced_mtp(what.unsharded.config) else ""
    paths = {"trained on": (plan.data_path, DATA_KEY), "held out": (plan.eval_path, HELD_OUT_KEY)}
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(shipped("checkpoint", "card.md").read_text(encoding="utf-8")).render(
        metadata=metadata.to_yaml(),
        export=what,
        base=published or Path(str(model)).name,
        architecture=type(what.unsharded).__name__,
        mtp=mtp,
        is_adapter=is_adapter,
        state=state,
        # Without the folders of this machine, and with the SHA-256 that a resume compares.
        data=[
            (name, [place if is_hub_data(place) else Path(place).name for place in places(path)], identity.get(key))
            for name, (path, key) in paths.items()
        ],
        shares=shares_of(state.newest.get("start", {})),
        fraction=recipe.data.eval["fraction"] if plan.eval_path is None and recipe.data.eval else None,
        others={"tokenizer": identity.get(TOKENIZER_KEY), "weights of the base model": identity.get(BASE_KEY)},
        keys=_changed_keys(plan),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        weights=[name for name in sorted(sums) if any(Path(name).match(pattern) for pattern in WEIGHTS)],
        sums=sums,
    )
    return ModelCard(printable(text))


def _changed_keys(plan: Plan) -> Iterator[str]:
    """Yield the keys of the recipe that are not at their defaults and change the model, without folders."""
    default = flat(Recipe())
    for path, value in flat(plan.recipe).items():
        if value != default[path] and not path.startswith(WITHOUT_EFFECT) and not path.startswith("eval."):
            yield f"{path}: {yaml_text(_without_folders(value))}"


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_folders(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
