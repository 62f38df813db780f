"""The checks of `gpu.py` that begin, and those that train the shipped 8B recipe on all cards, from random weights."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from common import ROOT
from gpu_checks import MEASURED, Row, Setting, forecasted, message_of, output_of, steps_of, timed, usual, verdict
from omegaconf import OmegaConf

from fsdptrain.text import GIB, counted

SHIPPED = ROOT / "recipes/llama3.1-8b-full-shard-8xh100.yaml"
FIRST = ("product", "all-reduce", "varlen", "compile", "optimizer")  # calls of gpu_smoke
ON_ALL = ("product", "all-reduce")  # the others are made on one card
TOO_LARGE = (3, 6)  # exit codes of `validate`: for the memory, for the disk
REFUSED = 2  # for the recipe
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {  # of checks: names of runs, and what they change of `8B`
    "8B": {"8B": {}},
    "8B-packed": {"8B-packed": {"data__packing": "concat"}},  # the same rows by varlen
    "8B-float8": {f"8B-float8-{kind}": {"train__float8": kind} for kind in ("rowwise", "tensorwise")},
    "8B-muon": {"8B-muon": {"optim__name": "muon"}},
    "8B-8bit": {"8B-8bit": {"optim__name": "adamw_8bit"}},
}
SHALLOWER = (24, 16, 12, 8, 4, 2)  # layers, of 32, until it fits


class Refused(Exception):
    """`validate` refuses the keys of a variant on this machine."""


def check_smoke(what: str, setting: Setting) -> list[Row]:
    """A first call, in seconds: the product and the all-reduce on all cards, the others on one."""
    started, world = time.monotonic(), setting.many if what in ON_ALL else 1
    error = setting.job("smoke", world, what=what)
    figure = f"differs by {error:.1e} on {counted(world, 'rank')}, after {time.monotonic() - started:.0f} s"
    return [Row(f"first call, {what}", figure, verdict(True))]


def shipped(setting: Setting, name: str, **changes: Any) -> Path:
    """Write the shipped recipe with `changes` (keys with __ for dots) for all cards: random weights, `Setting.rows`.

    Where it does not fit by what `validate` says, its layers are recomputed, and then there are fewer of them. Raises
    Refused if `validate` refuses a key of `changes`.
    """
    values: Any = OmegaConf.to_container(OmegaConf.load(SHIPPED))  # to PyYAML 1e-5 is a text
    world = setting.many
    config = {"model_type": "llama", **values["model"]["config"]}
    changes = {path.replace("__", "."): value for path, value in changes.items()}
    fixed = {
        **setting.rows(),
        "data.seq_len": 128 if setting.tiny else values["data"]["seq_len"], "fsdp.strategy": values["fsdp"]["strategy"],
        "train.global_batch_size": 2 * world, "train.micro_batch_size": 1, "launch.nproc_per_node": world,
    }  # fmt: skip
    recompute = {"fsdp.activation_checkpointing": "full"}
    fewer = [recompute | {"model.config.num_hidden_layers": layers} for layers in SHALLOWER]
    for smaller in ({}, recompute, *(fewer if "model.id" not in changes else [])):
        recipe = setting.recipe(name, config, fixed | smaller | changes)
        code, output = setting.command("validate", recipe, "--json")
        if code == 0:
            found = json.loads(output[output.index("{") : output.rindex("}") + 1])
            setting.forecasts[name] = found | {"smaller": smaller}
            return recipe
        if code == REFUSED and any(f"{path}: " in message_of(output) for path in changes):
            raise Refused(message_of(output))
        if code not in TOO_LARGE:
            raise RuntimeError(f"fsdptrain validate exited with {code}: {output[-300:]}")
    raise RuntimeError(f"{name} does not fit with {SHALLOWER[-1]} layers either, in memory or on the disk")


def trained_rows(what: str, setting: Setting, recipe: Path, forecast: dict[str, Any]) -> list[Row]:
    """Train a recipe to its end; return rows on its speed and memory, and that the loss does not rise."""
    events = setting.run(recipe)
    steps, seq_len = steps_of(events), next(event["seq_len"] for event in events if event["event"] == "start")
    step_s, rate, mfu = (usual(events, figure) for figure in ("step_s", "positions_per_s", "mfu"))
    setting.rates[what] = rate
    shape = f"{forecast['model']['parameters'] / 1e9:.3g} billion parameters, rows of {seq_len}"
    shape += f", forecast with {forecast['attention']}" if forecast["attention"] else ""
    shape += "".join(f", {path.split('.')[-1]} {value}" for path, value in forecast["smaller"].items())
    first, last = steps[0]["loss"], steps[-1]["loss"]
    figure = f"{rate:,.0f} tokens/s on {counted(setting.many, 'rank')}; loss {first:.3g} → {last:.3g}"
    note = f"{shape}{f'; MFU {mfu:.1%}' if setting.on_gpu else ''}"
    if what != "8B" and "8B" in setting.rates and forecast["smaller"] == setting.forecasts["8B"]["smaller"]:
        note += f"; {rate / setting.rates['8B']:.3f}× 8B"
    rows = [Row(f"{what}, speed", figure, verdict(last <= 1.02 * first), note)]
    rows.append(timed(what, forecast, step_s, setting.on_gpu))
    if setting.on_gpu:
        peak = max(event["peak_memory_bytes"] for event in steps)
        rows.append(forecasted(f"{what}, memory allocated", forecast["peak_bytes"], peak, 0.02))
    return rows


def check_shipped(variants: dict[str, dict[str, Any]], setting: Setting) -> list[Row]:
    """The shipped 8B recipe on all cards, with random weights: speed, step time and memory beside the forecast."""
    rows = []
    for name, changes in variants.items():
        try:
            recipe = shipped(setting, name, train__steps=6 if setting.tiny else 12, **changes)
        except Refused as refused:  # a library, or units of the card, are missing
            rows.append(Row(f"{name}, speed", "not run", MEASURED, str(refused)))
            continue
        try:
            rows += trained_rows(name, setting, recipe, setting.forecasts[name])
        finally:
            shutil.rmtree(output_of(recipe) / "checkpoints", ignore_errors=True)  # 12 bytes a parameter
    return rows


def check_shipped_saves(setting: Setting) -> list[Row]:
    """The shipped 8B recipe on all cards: checkpoint, export, and a resume to a later step."""
    recipe = shipped(setting, "8B-saves", train__steps=4, checkpoint__every=4, checkpoint__keep=1, export__at_end=True)
    events = setting.run(recipe)
    save = next(event for event in events if event["event"] == "save")
    export = next(event for event in events if event["event"] == "export")
    again = setting.run(recipe, "train.steps=6", "export.at_end=false")
    resumed = max((event["step"] for event in again if event["event"] == "resume"), default=0)
    made = [event["step"] for event in steps_of(again)]
    setting.exports.append(output_of(recipe) / "export")
    shutil.rmtree(output_of(recipe) / "checkpoints")
    layers = setting.forecasts["8B-saves"]["smaller"].get("model.config.num_hidden_layers", "all")
    written = f"{save['bytes'] / GIB:.3g} GiB in {save['seconds']:.3g} s, which blocks for {save['blocked_s']:.3g} s"
    return [
        Row("8B-saves, checkpoint", written, MEASURED, f"{layers} layers"),
        Row("8B-saves, export", f"{export['bytes'] / GIB:.3g} GiB", verdict(bool(export["bytes"]))),
        Row("8B-saves, resume", f"from step {resumed} to {max(made)}", verdict((resumed, max(made)) == (4, 6))),
    ]


def check_shipped_qlora(setting: Setting) -> list[Row]:
    """QLoRA on all cards, on the model that 8B-saves has exported."""
    if not setting.exports:
        return [Row("8B-qlora, speed", "not run", MEASURED, "run 8B-saves in the same call")]
    base = {"model__id": str(setting.exports[-1]), "model__init": "pretrained", "model__config": None}
    base |= {"model__tokenizer": None, "adapter__kind": "qlora"}
    return check_shipped({"8B-qlora": base}, setting)


def check_profile(setting: Setting) -> list[Row]:
    """A profile of two steps of the shipped 8B recipe on all cards and a snapshot of its memory, into the archive."""
    recipe = shipped(setting, "8B-profile", train__steps=20)
    found = setting.job("profiled", setting.many, recipe=str(recipe), folder=str(setting.folder), steps=2)
    figure = f"{found['step_s']:.3g} s a step, {found['profiled_s']:.3g} s with the profiler"
    return [Row("8B-profile", figure, MEASURED, "in the archive")]
