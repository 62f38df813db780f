"""Earlier attempts of a run: their plans, what they trained, and what a new plan changes. No torch.

Every start that trains keeps its plan in `plans/` (of several nodes and ranks, the one that writes), and a checkpoint
names the plan that made it by its digest. So a resume can say what differs from the plan that the weights were trained
with, whatever attempts were made in between.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptrain.checkpoint.manifest import Manifest, complete_steps, newest_manifest, read_manifest, resume_problems
from fsdptrain.config.plan import Plan
from fsdptrain.config.schema import all_paths
from fsdptrain.errors import Problem, RecipeError
from fsdptrain.events import Record, read_history
from fsdptrain.ownership import read_export_record, set_aside, write_atomically
from fsdptrain.rundir import RunDir
from fsdptrain.text import counted

# Keys that change neither the weights nor the evaluations of a finished run.
WITHOUT_EFFECT = ("name", "output_dir", "checkpoint.", "log.", "launch.", "export.at_end", "world_size", "device")


Changes = dict[str, list[Any]]  # key → [old, new]


@dataclass(frozen=True)
class EarlierAttempts:
    """What earlier attempts made: steps with a checkpoint; whether all are made, and whether nothing is left to do."""

    step: int = 0
    finished: bool = False
    trained: bool = False


def archive_plan(rundir: RunDir, plan: Plan, recipe_text: str) -> None:
    """Write plan and recipe into `plans/` under the next number, and the recipe as `recipe.yaml`.

    A `recipe.yaml` that is not as the last attempt wrote it was edited: it is called `recipe.yaml.kept` from now on.
    """
    rundir.plans.mkdir(exist_ok=True)
    numbers = [int(path.stem) for path in _kept(rundir)]
    if not numbers and rundir.plan.is_file():  # an earlier version kept only the newest
        numbers = [1]
        write_atomically(rundir.plans / "0001.json", rundir.plan.read_text(encoding="utf-8"))
    last = max(numbers, default=0)
    known = [recipe_text.encode(), *(path.read_bytes() for path in rundir.plans.glob(f"{last:04}.yaml"))]
    if rundir.recipe.is_file() and rundir.recipe.read_bytes() not in known:
        set_aside(rundir.recipe)
    write_atomically(rundir.plans / f"{last + 1:04}.yaml", recipe_text)
    write_atomically(rundir.plans / f"{last + 1:04}.json", plan.to_json())
    write_atomically(rundir.recipe, recipe_text)


def inspect_earlier_attempts(rundir: RunDir, plan: Plan) -> EarlierAttempts:
    """Return what was made in a run folder that `plan` is to go on in.

    Raises RecipeError when going on would be another run, or when nothing is left to train with what was changed;
    CheckpointError for a folder that leads elsewhere or a checkpoint of another version.
    """
    manifest = newest_manifest(rundir)
    if manifest is None:
        _refuse_lost_checkpoints(rundir)
        return EarlierAttempts()
    made, events = max(complete_steps(rundir), default=0), read_history(rundir.metrics)
    start = _start_of_newest_step(events)
    if problems := resume_problems(manifest.identity, plan.identity()):
        if start and 0 < start["total_steps"] <= made:
            finished = f"the run in {rundir.root} is finished ({counted(made, 'step')}): nothing was trained"
            problems = [Problem(finished), *problems]
        raise RecipeError(problems)
    if not made or not start:
        return EarlierAttempts(made)
    total, wanted = start["total_steps"], plan.total_steps(start["blocks"])
    if wanted > made:
        return EarlierAttempts(made)
    if made < total:
        raise RecipeError(f"{rundir.root}: {too_few_steps(made, wanted, total)}")
    without_effect = (*WITHOUT_EFFECT, *(("train.steps", "train.epochs") if wanted == made else ()))
    changed = changes_since(rundir, made, plan)
    changed = {key: values for key, values in changed.items() if not key.startswith(without_effect)}
    if changed or wanted < made:
        raise RecipeError(_finished_otherwise(rundir, made, changed or {"steps": [made, wanted]}))
    return EarlierAttempts(made, _is_evaluated(plan, made, events) and _is_exported(rundir, plan, made), trained=True)


def _refuse_lost_checkpoints(rundir: RunDir) -> None:
    """Raise RecipeError when there was a result, and no checkpoint is left: a run from step 0 would replace it."""
    events, (of_step, _) = read_history(rundir.metrics), read_export_record(rundir)
    start, made = _start_of_newest_step(events), max((e["step"] for e in events if e["event"] == "step"), default=0)
    finished = start is not None and made >= start["total_steps"]
    if finished or of_step is not None:
        raise RecipeError(
            f"output_dir: {rundir.root} holds {'a finished run' if finished else 'an export'} "
            f"({made if finished else of_step} steps), but its checkpoints are gone: training would begin at step 0 "
            "and replace the export. Choose another `name` or output_dir, or delete this folder"
        )


def changes_since(rundir: RunDir, step: int, plan: Plan) -> Changes:
    """Return what the plan changes against the one that made the checkpoint of `step`; nothing for step 0."""
    if not step:
        return {}
    return plan_changes(_plan_behind(rundir, read_manifest(rundir.checkpoint(step)), plan), plan)


def plan_changes(old: dict[str, Any], plan: Plan) -> Changes:
    """Return every key of the recipe that differs from an older plan, as [old, new], and the ranks if they do.

    A key that the older plan does not have, as one of another version may not, is left out.
    """
    new = json.loads(plan.to_json())
    paths = {path: f"recipe.{path}" for path in all_paths()}
    paths |= {"device": "topology.device"}
    found = {name: [_at(old, path), _at(new, path)] for name, path in paths.items()}
    found["world_size"] = [_ranks(old), _ranks(new)]
    return {name: [a, b] for name, (a, b) in found.items() if a is not _NOTHING and a != b}


def too_few_steps(made: int, wanted: int, total: int | None = None) -> str:
    """Say that a recipe asks for no more steps than were made, with the ways out."""
    of = f" of {total}" if total else ""
    return (
        f"{made}{of} steps are made already, and the recipe asks for {wanted} (train.steps, train.epochs): nothing "
        f"would be trained. Ask for more than {made}, choose another `name` for a new run, or export what there is "
        "with `fsdptrain export`"
    )


def describe_changes(changed: Changes) -> list[str]:
    """Return a line for each changed key: `optim.lr: 0.001 → 1e-05`."""
    return [f"{key}: {old} → {new}" for key, (old, new) in changed.items()]


def _finished_otherwise(rundir: RunDir, made: int, changed: Changes) -> str:
    lines = "".join(f"\n  {line}" for line in describe_changes(changed))
    return (
        f"the run in {rundir.root} is finished ({made} steps): nothing was trained, and nothing in it was changed. The "
        f"recipe differs from what was trained:{lines}\n"
        "choose another `name` (or output_dir) for a new run; to train this one longer, ask for more steps"
        + ("; for another dtype: `fsdptrain export RUN_DIR --dtype …`" if "export.dtype" in changed else "")
    )


def _kept(rundir: RunDir) -> list[Path]:
    return sorted(
        (path for path in rundir.plans.glob("*.json") if re.fullmatch(r"[0-9]{4,9}", path.stem)),
        key=lambda path: int(path.stem),
    )


def _plan_behind(rundir: RunDir, manifest: Manifest, now: Plan) -> dict[str, Any]:
    """Return the fields of the plan that made a checkpoint; where it was not kept, those of the newest but `now`."""
    newest: dict[str, Any] = {}
    for path in reversed([rundir.plan, *_kept(rundir)]):
        try:
            text = path.read_text(encoding="utf-8")
            fields = json.loads(text)
            digest = "" if "${" in text else Plan.from_json(text).digest()
        except Exception:  # another version's, or a stranger's: whatever JSON, OmegaConf and dataclasses make of it
            continue
        if digest == manifest.plan_digest:
            return fields
        newest = newest or (fields if digest != now.digest() else {})
    return newest


def _start_of_newest_step(events: list[Record]) -> Record | None:
    """Return the `start` event of the attempt that made the newest step; None where none says what is needed."""
    start = found = None
    for event in events:
        if event["event"] == "start" and all(type(event.get(key)) is int for key in ("blocks", "total_steps")):
            start = event
        elif event["event"] == "step":
            found = start
    return found


def _is_evaluated(plan: Plan, step: int, events: list[Record]) -> bool:
    made = any(event["event"] == "eval" and event["step"] == step for event in events)
    return made or plan.recipe.data.eval is None


def _is_exported(rundir: RunDir, plan: Plan, step: int) -> bool:
    """Return whether the export is there, of this step where it is known of which."""
    recorded, _ = read_export_record(rundir)
    there = rundir.export.is_dir() and recorded in (None, step)
    return there or not plan.recipe.export.at_end


_NOTHING = object()


def _at(fields: Any, path: str) -> Any:
    """Return the value at a dotted path of a plan, or _NOTHING; earlier versions wrote `async_` for `async`."""
    for word in path.split("."):
        if not isinstance(fields, dict):
            return _NOTHING
        fields = fields.get(word, fields.get(f"{word}_", _NOTHING))
    return fields


def _ranks(fields: dict[str, Any]) -> Any:
    nodes, workers = _at(fields, "topology.nnodes"), _at(fields, "topology.nproc_per_node")
    return nodes * workers if isinstance(nodes, int) and isinstance(workers, int) else _NOTHING
