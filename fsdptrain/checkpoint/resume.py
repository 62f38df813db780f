"""Earlier attempts of a run: their plans, what they trained, and what a new plan changes. No torch.

A checkpoint holds its plan. So a resume can tell how its plan differs from the one that the weights were trained with,
whatever attempts came in between. Every attempt that trains also writes its plan into `plans/` (of several nodes or
ranks, one writes).
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from fsdptrain.checkpoint.manifest import complete_steps, newest_manifest, read_manifest
from fsdptrain.config.keys import KEYS, flat
from fsdptrain.config.mixture import mixture_changes
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import OtherVersion, Problem, RecipeError, listed
from fsdptrain.plan.plan import HAS_MOMENTUM, LAYOUT_KEY, Plan
from fsdptrain.run_folder.files import is_there, set_aside, write_atomically
from fsdptrain.run_folder.ownership import ExportRecord, export_has, read_export_record
from fsdptrain.run_folder.records import RunState, Tail, by_loss, ends_early
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import checkpoint_name
from fsdptrain.text import counted

# Keys of an identity beside those of the recipe. What they stand for is read or computed by the workers, who must all
# find the same; a resume must find it again, except for MEASURED.
BASE_KEY = "model.id.content"  # with frozen weights: the digest of the files that hold them

DATA_KEY, HELD_OUT_KEY = "data.content", "data.eval.content"  # digests of files; the second with data.eval.path only
TOKENS_KEY = "data.tokens"  # the digest of the rows as they are trained
TOKENIZER_KEY = "model.tokenizer.content"  # the digest of the tokenizer, with its chat template
CODE_KEY = "model.code"  # of a model's own code, the SHA-256 of each file
RESOLVED = "settled."  # before each key of the model's configuration that decides what is trained
MEASURED = (HELD_OUT_KEY,)  # changes what is measured, not what is trained: a resume may change it, and says so

# Keys that may differ when a finished run is started again: they change neither weights nor evaluations.
WITHOUT_EFFECT = (
    "name", "output_dir", "checkpoint.", "log.", "launch.", "export.at_end", "export.compare", "eval.patience",
    "eval.best_of", "world_size", "device", "version", "libraries.",
)  # fmt: skip

ANOTHER_RUN = "choose another `name` or output_dir"
DIGITS = 12  # of a digest that is shown
Changes = dict[str, list[Any]]  # key → [old, new]


@dataclass(frozen=True)
class EarlierAttempts:
    """What the earlier attempts of a run have done."""

    step: int = 0  # of the newest complete checkpoint; 0 if there is none
    finished: bool = False  # all steps are trained, evaluated and exported as the plan asks
    trained: bool = False  # all steps are trained
    faults: tuple[str, ...] = ()  # the records of the run that cannot be used, and why


def archive_plan(rundir: RunDir, plan: Plan, recipe_text: str) -> None:
    """Write plan and recipe into `plans/` under the next number, and the recipe to `recipe.yaml`.

    A `recipe.yaml` that was edited since the last attempt is renamed to `recipe.yaml.kept`.
    """
    rundir.plans.mkdir(exist_ok=True)
    numbers = (path.stem for path in rundir.plans.glob("*.json"))
    last = max((int(number) for number in numbers if re.fullmatch(r"[0-9]{4,9}", number)), default=0)
    unedited = [recipe_text.encode(), *(path.read_bytes() for path in rundir.plans.glob(f"{last:04}.yaml"))]
    if rundir.recipe.is_file() and rundir.recipe.read_bytes() not in unedited:
        set_aside(rundir.recipe)
    write_atomically(rundir.plans / f"{last + 1:04}.yaml", recipe_text)
    write_atomically(rundir.plans / f"{last + 1:04}.json", plan.to_json())
    write_atomically(rundir.recipe, recipe_text)


def inspect_earlier_attempts(rundir: RunDir, plan: Plan) -> EarlierAttempts:
    """Return what earlier attempts did in the run folder in which `plan` would continue.

    Raises RecipeError if the plan is that of another run, or if it has changes but no step is left to train with them;
    CheckpointError if a link leads out of the folder, or if another version wrote the checkpoint.
    """
    metrics, progress = Tail(rundir.metrics, from_end=False), Tail(rundir.progress, from_end=False)
    before, export = RunState.of(metrics.read()), read_export_record(rundir)
    deque(progress.read(), maxlen=0)  # it is only displayed
    faults = (*metrics.faults, *progress.faults, *([export.fault] if export.fault else []))
    return replace(_inspect(rundir, plan, before, export), faults=faults)


def _inspect(rundir: RunDir, plan: Plan, before: RunState, export: ExportRecord) -> EarlierAttempts:
    """Return what earlier attempts did, whose records were read; raise what `inspect_earlier_attempts` raises."""
    _check_newest_checkpoint_is_here(rundir)
    manifest = newest_manifest(rundir)
    if manifest is None:
        _check_checkpoints_not_lost(rundir, before, export)
        return EarlierAttempts()
    complete, start = complete_steps(rundir), before.trained_by
    step = max(complete, default=0)
    # Would this plan continue the same run?
    if problems := resume_problems(manifest.identity, plan.identity()):
        if start and 0 < start["total_steps"] <= step:
            finished = f"the run in {rundir.root} is finished ({counted(step, 'step')}): nothing was trained"
            problems = [Problem(finished), *problems]
        raise RecipeError(problems)
    # Are steps left to train?
    if not step or not start:
        return EarlierAttempts(step)
    total, wanted = start["total_steps"], plan.total_steps(start["blocks"])
    losses = before.losses(plan.recipe.eval.best_of, until=step)
    if wanted > step and not ends_early(losses, step, plan.recipe.eval.patience):
        return EarlierAttempts(step)
    if wanted <= step < total:
        raise RecipeError(f"{rundir.root}: {too_few_steps(step, wanted, total)}")
    # All steps are trained, or eval.patience has ended the run. A changed plan would have no effect, so it is refused.
    without_effect = (*WITHOUT_EFFECT, *(("train.steps", "train.epochs") if wanted == step else ()))
    changed = changes_since(rundir, step, plan, _held_out_identity(plan))
    changed = {key: values for key, values in changed.items() if not key.startswith(without_effect)}
    if changed or wanted < step:
        lines = "".join(f"\n  {line}" for line in describe_changes(changed or {"steps": [step, wanted]}))
        raise RecipeError(
            f"the run in {rundir.root} is finished ({step} steps): nothing was trained or changed. The recipe, or the "
            f"data that it names, differs from what was trained:{lines}\n"
            "choose another `name` (or output_dir) for a new run, or ask for more steps (after an early stop: for more "
            "eval.patience) to continue this one; another export is written by `fsdptrain export RUN_DIR` with "
            "--dtype, --best or --step N"
        )
    evaluated = plan.recipe.data.eval is None or before.has("eval", step)
    best = by_loss(losses, complete) if plan.recipe.export.which == "best" else []
    # An export without a record counts: it was exported before the record was lost.
    exported = not plan.recipe.export.at_end or (
        is_there(rundir.export) and export_has(rundir, export.files) and export.step in (None, [*best, step][0])
    )
    return EarlierAttempts(step, evaluated and exported, trained=True)


def _check_newest_checkpoint_is_here(rundir: RunDir) -> None:
    """Raise RecipeError if the place where an earlier recipe had put the checkpoints has a newer one."""
    before = RunDir.open(rundir.root)
    if before.checkpoint_path == rundir.checkpoint_path:
        return
    newest, here = (max(run.checkpoint_steps(), default=0) for run in (before, rundir))
    if newest > here:
        raise RecipeError(
            f"checkpoint.path: the checkpoints of this run are in {before.storage}, up to step {newest}, and those in "
            f"{rundir.storage} end at step {here}: copy them there, or set checkpoint.path as it was"
        )


def _check_checkpoints_not_lost(rundir: RunDir, before: RunState, export: ExportRecord) -> None:
    """Raise RecipeError for a result without checkpoints, because a run from step 0 would replace it."""
    start, step = before.trained_by, before.steps_made
    finished = start is not None and (step >= start["total_steps"] or "early_stop" in before.newest)
    if not finished and export.step is None:
        return
    holds = f"{'a finished run' if finished else 'an export'} ({step if finished else export.step} steps)"
    damaged = [*map(checkpoint_name, rundir.checkpoint_steps()), *rundir.storage.other_names()[0]]
    fate = f"damaged ({listed(damaged)} in {rundir.storage})" if damaged else "gone"
    raise RecipeError(
        f"output_dir: {rundir.root} holds {holds}, but its checkpoints are {fate}: training would start at step 0 and "
        "replace the export. Restore one (of a damaged one remove its ending .damaged, and compare it with "
        f"`fsdptrain verify {rundir.root}`), choose another `name` or output_dir, or delete this folder"
    )


def is_continued(rundir: RunDir, plan: Plan) -> bool:
    """Return whether a plan would continue the newest checkpoint that there is, as the same run; True without one."""
    manifest = newest_manifest(rundir)
    return manifest is None or not resume_problems(manifest.identity, plan.identity())


def changes_since(rundir: RunDir, step: int, plan: Plan, identity: dict[str, Any]) -> Changes:
    """Return how the plan differs from the one that made the checkpoint of `step`; empty for step 0.

    The held-out data is compared, too, if `identity` has it.
    """
    if not step:
        return {}
    manifest = read_manifest(rundir.checkpoint(step))
    return plan_changes(manifest.plan, plan) | measured_changes(manifest.identity, identity)


def _held_out_identity(plan: Plan) -> dict[str, Any]:
    """Return the digest of the held-out files if they are on this machine: those of the Hub are read at one commit."""
    from fsdptrain.data.sources import data_files, fingerprint  # takes a third of a second, for a finished run only

    path = plan.eval_path
    return {HELD_OUT_KEY: fingerprint(path)} if path and data_files(path) else {}


def plan_changes(old: dict[str, Any], plan: Plan) -> Changes:
    """Return every key of the recipe that differs from an older plan, as [old, new]; also device, ranks and versions.

    Keys that the older plan lacks, because another version wrote it, are left out.
    """
    new = json.loads(plan.to_json())
    paths = {path: f"recipe.{path}" for path in KEYS}
    paths |= {"device": "topology.device", "version": "version"}
    paths |= {name: name for name in (f"libraries.{library}" for library in plan.libraries)}
    pairs = {name: [_at(old, path), _at(new, path)] for name, path in paths.items()}
    pairs["world_size"] = [_world_size(old), _world_size(new)]
    return {name: [a, b] for name, (a, b) in pairs.items() if a is not _MISSING and a != b}


def too_few_steps(trained: int, wanted: int, total: int | None = None) -> str:
    """Return the message for a recipe that asks for no more steps than are trained already, with the ways out."""
    of = f" of {total}" if total else ""
    return (
        f"{trained}{of} steps are trained already, and the recipe asks for {wanted} (train.steps, train.epochs), so "
        f"nothing would be trained. Ask for more than {trained} steps, choose another `name` for a new run, or export "
        "the newest checkpoint with `fsdptrain export`"
    )


def describe_changes(changed: Changes) -> list[str]:
    """Return one line per changed key: `optim.lr: 0.001 → 1e-05`."""
    return [f"{key}: {old} → {new}" for key, (old, new) in changed.items()]


_MISSING = object()


def _at(fields: Any, path: str) -> Any:
    for word in path.split("."):
        if not isinstance(fields, dict):
            return _MISSING
        fields = fields.get(word, _MISSING)
    return fields


def _world_size(fields: dict[str, Any]) -> Any:
    nodes, workers = _at(fields, "topology.nnodes"), _at(fields, "topology.nproc_per_node")
    return nodes * workers if isinstance(nodes, int) and isinstance(workers, int) else _MISSING


def resume_problems(before: dict[str, Any], now: dict[str, Any]) -> list[Problem]:
    """Return the differences between two identities, which would silently turn a resumed run into another one.

    A key that is missing in `before` had its default then. Raises OtherVersion when `before` is of a version that makes
    other tokens, batches or updates from the same recipe.
    """
    layout_before, layout_now = before.get(LAYOUT_KEY), now[LAYOUT_KEY]
    if layout_before != layout_now:
        raise OtherVersion(
            "the run to resume was trained by another version of fsdptrain, which makes other tokens, batches or "
            f"updates from the same recipe (layout {layout_before}; this version: {layout_now}): "
            f"continue with that version, or {ANOTHER_RUN}"
        )
    values_before = flat(Recipe()) | before
    changed = {
        path: value
        for path, value in now.items()
        if path in values_before and values_before[path] != value and path not in MEASURED
    }
    if changed.keys() & {DATA_KEY, TOKENIZER_KEY}:  # which are the reason for other tokens
        changed.pop(TOKENS_KEY, None)
    problems = [_changed(path, values_before[path], value) for path, value in changed.items()]
    if problems:
        *_, last = problems
        problems[-1] = replace(last, message=f"{last.message}; to train another run, {ANOTHER_RUN}")
    return problems


def measured_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what a resume may change beside the recipe, and what it says then: key → [old, new] digest."""
    return {
        key: [before[key][:DIGITS], now[key][:DIGITS]]
        for key in MEASURED
        if key in before and key in now and before[key] != now[key]
    }


def recipe_key(path: str) -> str:
    """Return the key of the recipe that a key of an identity belongs to."""
    if path.startswith(RESOLVED):
        return f"model.config.{path.removeprefix(RESOLVED)}"
    fields = {DATA_KEY: "data.path", TOKENS_KEY: "data.path", CODE_KEY: "model.id"}
    return fields.get(path) or path.removesuffix(".content").removesuffix(HAS_MOMENTUM)


def _changed(path: str, before: Any, now: Any) -> Problem:
    if path == CODE_KEY:
        files = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        flag = "pass --trust-remote-code" if before else "leave out --trust-remote-code"
        way_out = "restore it" if before and now else flag
        message = f"its own code differs from that of the run to resume ({listed(files)}): {way_out}"
    elif path in DIFFERENT:
        message = DIFFERENT[path].format(f"(digest {now[:DIGITS]}, was {before[:DIGITS]})")
    elif path == "data.sources":
        message = f"{mixture_changes(before, now)}, so the run would train on another stream"
    elif path.endswith(HAS_MOMENTUM):
        was, what = ("not 0", "0") if before else ("0", "not 0")
        message = f"was {was} in the run to resume, is {what} now"
    else:
        message = f"was {before!r} in the run to resume, is {now!r} now"
        if path.startswith(RESOLVED):
            message += ": restore it in the config.json of the model (a default: the version of transformers)"
    return Problem(message, recipe_key(path))


# What is compared by a digest → the message if it differs.
DIFFERENT = {
    BASE_KEY: "the files of the model differ from those that the run to resume has frozen {}, and checkpoints hold "
    "only what is trained: put those files back",
    DATA_KEY: "the data differs from that of the run to resume {}: put that data back",
    TOKENIZER_KEY: "the tokenizer or its chat template differs from that of the run to resume {}: put its files back",
    TOKENS_KEY: "the same rows became other tokens than in the run to resume {}: restore pinned.json, which has the "
    "date of the chat template, or the versions of transformers and tokenizers",
}
