"""The model card of an export: what it is, how to load it, what it was trained on and with, and what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from fsdptrain.checkpoint.export_tensors import Exported
from fsdptrain.checkpoint.manifest import BASE_KEY, DATA_KEY, HELD_OUT_KEY, TOKENIZER_KEY
from fsdptrain.checkpoint.resume import WITHOUT_EFFECT
from fsdptrain.config.adapter import ADAPTER_FOLDER
from fsdptrain.config.keys import flat, yaml_text
from fsdptrain.config.paths import is_hub_data, places
from fsdptrain.config.schema import Recipe
from fsdptrain.model.config import announced_mtp
from fsdptrain.plan.plan import HubData, Plan
from fsdptrain.run_folder.ownership import CARD, WEIGHTS, Stamps, file_stamps
from fsdptrain.run_folder.records import Record, Tail, shares_of
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import printable

LICENCE = "TODO: choose a licence that those of the base model and the data allow, and add `license:` at the top."


@dataclass(frozen=True)
class Origin:
    """Where an export comes from: the weights of `step`, of a run with this `identity`, whose files are compared."""

    rundir: RunDir
    step: int
    identity: dict[str, Any]


def write_cards(folder: Path, what: Exported, origin: Origin, sums: dict[str, str], out: Path, before: Stamps) -> None:
    """Write the cards of an export in `folder`, which will replace `out`; `sums` are the SHA-256 of its files.

    A card in `out` that someone else has written or edited (it is not as in `before`) stays, and none is written.
    """
    adapter = folder / ADAPTER_FOLDER
    if what.adapter == "both":
        _card(what, origin, sums, is_adapter=True).save(adapter / CARD)
    if before and os.path.lexists(out / CARD) and file_stamps(out).get(CARD) != before.get(CARD):
        return
    _card(what, origin, sums, is_adapter=what.adapter == "separate").save(folder / CARD)


def _card(what: Exported, origin: Origin, sums: dict[str, str], is_adapter: bool) -> ModelCard:
    plan, recipe, newest = what.plan, what.plan.recipe, _newest(origin)
    metadata = ModelCardData(
        base_model=_published(recipe.model.id),
        base_model_relation=("adapter" if is_adapter else "finetune") if _published(recipe.model.id) else None,
        datasets=[HubData.of(plan.data_path).name] if is_hub_data(plan.data_path) else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["fsdptrain", *([str(recipe.adapter.kind)] if recipe.adapter.kind else [])],
    )
    parts = {
        "How to load it": _loading(is_adapter, what.runs_own_code),
        "Licence": LICENCE,
        "Results": "\n".join(_results(origin.step, newest)),
        "Data": "\n".join(_data(plan, origin.identity, newest)),
        "Recipe": "```yaml\n" + "\n".join(_changed_keys(plan)) + "\n```",
        "Versions": ", ".join(f"{name} {version}" for name, version in _versions(plan).items()),
        "Files": "\n".join(["SHA-256 of the weights:", "", *_digests(sums)]),
    }
    text = "\n\n".join(f"## {title}\n\n{part}" for title, part in parts.items())
    head = f"---\n{metadata.to_yaml()}\n---\n\n# {recipe.name}\n\n{_summary(what)}"
    return ModelCard(printable(f"{head}\n\n{text}\n"))


def _published(name: str | None) -> str | None:
    """Return the name of a model on the Hub; None for a folder, which others do not have."""
    return None if name is None or Path(name).is_dir() else name


def _summary(what: Exported) -> str:
    """Return what the model is, in a sentence."""
    recipe, model = what.plan.recipe, what.plan.recipe.model
    base = f"`{_published(model.id) or Path(str(model.id)).name}`"
    mtp = " Its layers for multi-token prediction are not trained." if announced_mtp(what.unsharded.config) else ""
    adapter = recipe.adapter
    if adapter.kind:
        kind = "DoRA" if adapter.use_dora else {"lora": "LoRA", "qlora": "QLoRA"}[str(adapter.kind)]
        whole = f", and {', '.join(adapter.modules_to_save)} as a whole" if adapter.modules_to_save else ""
        merged = " merged into its weights" if what.adapter == "merged" else ""
        size = f"rank {adapter.r}, alpha {adapter.alpha:g}"
        return f"A {kind} adapter ({size}{whole}) for {base}{merged}, trained with fsdptrain.{mtp}"
    if what.plan.pretrained:
        return f"{base}, fine-tuned with fsdptrain.{mtp}"
    return f"A language model ({type(what.unsharded).__name__}), trained from scratch with fsdptrain."


def _loading(is_adapter: bool, runs_own_code: bool) -> str:
    name = "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM"
    library, trust = "peft" if is_adapter else "transformers", ", trust_remote_code=True" if runs_own_code else ""
    lines = [f"from {library} import {name}", "from transformers import AutoTokenizer", ""]
    lines += [f'model = {name}.from_pretrained("THIS FOLDER"{trust})']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER"{trust})']
    return "\n".join(["```python", *lines, "```"])


def _newest(origin: Origin) -> dict[str, Record]:
    """Return the newest start, window, step and evaluation of the run up to the step of the export."""
    newest: dict[str, Record] = {}
    for record in Tail(origin.rundir.metrics, from_end=False).read():
        if record["event"] in ("start", "window", "step", "eval") and record.get("step", 0) <= origin.step:
            newest[record["event"]] = record
    return newest


def _results(step: int, newest: dict[str, Record]) -> Iterator[str]:
    """Yield the steps and the losses, one line each."""
    yield f"- {step:,} steps"
    for kind, name in (("step", "training loss"), ("eval", "held-out loss")):
        if found := newest.get(kind):
            yield f"- {name} {found['loss']:.4f} (after step {found['step']:,})"


def _data(plan: Plan, identity: dict[str, Any], newest: dict[str, Record]) -> Iterator[str]:
    """Yield the data, without the folders of this machine, and the SHA-256 that a resume compares."""
    paths = {"trained on": (plan.data_path, DATA_KEY), "held out": (plan.eval_path, HELD_OUT_KEY)}
    for what, (path, key) in paths.items():
        names = [place if is_hub_data(place) else Path(place).name for place in places(path)]
        if names:
            yield f"- {what}: {', '.join(f'`{name}`' for name in names)}{_digest(identity, key)}"
    if "window" in newest:
        yield "- read in windows of files: the SHA-256 of what was trained on is that of their types and sizes"
    if shares := shares_of(newest.get("start", {})):
        yield f"- shares of the tokens: {shares}"
    if plan.eval_path is None and plan.recipe.data.eval:
        yield f"- held out: {plan.recipe.data.eval['fraction']:g} of it"
    for key, name in ((TOKENIZER_KEY, "tokenizer"), (BASE_KEY, "weights of the base model")):
        if key in identity:
            yield f"- {name}{_digest(identity, key)}"


def _digest(identity: dict[str, Any], key: str) -> str:
    return f" (SHA-256 {identity[key]})" if key in identity else ""


def _changed_keys(plan: Plan) -> Iterator[str]:
    """Yield the keys of the recipe that are not at their defaults and change the model, without folders."""
    default = flat(Recipe())
    for path, value in flat(plan.recipe).items():
        if value != default[path] and not path.startswith(WITHOUT_EFFECT) and not path.startswith("eval."):
            yield f"{path}: {yaml_text(_without_folders(value))}"


def _without_folders(value: Any) -> Any:
    """Return a value with the last part of absolute paths, also in lists and mappings."""
    if isinstance(value, dict):
        return {name: _without_folders(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _versions(plan: Plan) -> dict[str, str]:
    return {**plan.versions, "Python": sys.version.split()[0]}


def _digests(sums: dict[str, str]) -> Iterator[str]:
    weights = [name for name in sorted(sums) if any(Path(name).match(pattern) for pattern in WEIGHTS)]
    yield from (f"- `{name}` {sums[name]}" for name in weights)
