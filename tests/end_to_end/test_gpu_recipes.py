"""The recipes of `make gpu`: that they are valid on GPUs, and that each trains on what its row of the table says."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from fsdptrain.config import rules
from fsdptrain.config.reader import load
from fsdptrain.plan.plan import Plan, make_plan, varied
from fsdptrain.plan.topology import Topology

STEP = {"event": "step", "step": 1, "step_s": 1.0, "positions_per_s": 1.0, "mfu": 0.4, "loss": 1.0}
FORECAST = {
    "model": {"parameters": 8e9}, "step_s": 1.0, "step_s_range": [0.9, 1.1], "peak_bytes": 1, "attention": "cuDNN",
}  # fmt: skip


class Stopped(Exception):
    """The recipes of a check are known."""


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: the plans of a check's recipes on GPUs, by the names of its variants, and its rows."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(rules, "version", lambda library: "2.13.0")
    found: dict[str, Plan] = {}

    def keep(name: str, recipe: object, *overrides: str) -> None:
        written = load(Path(str(recipe)), overrides)
        found[name] = make_plan(written, Topology("cuda", 1, written.recipe.launch.nproc_per_node))

    def run(_: Any, recipe: Path, *overrides: str) -> Any:
        keep(recipe.stem, recipe, *overrides)
        return [{"event": "start", "seq_len": 4096}, STEP | {"peak_memory_bytes": 1}]

    def job(*_: Any, recipe: str, variants: dict[str, list[str]], **__: Any) -> Any:
        for name, overrides in variants.items():
            keep(name, recipe, *overrides)
        raise Stopped

    def of(check: str) -> tuple[dict[str, Plan], list[Any]]:
        found.clear()
        setting = gpu.Setting(tmp_path, {"device": "cuda", "gpus": 2, "name": "H100", "memory": 85e9}, False)
        return found, gpu.run_check(check, gpu.CHECKS[check], setting)

    for name, stub in {"run": run, "job": job, "command": lambda *_: (0, json.dumps(FORECAST))}.items():
        monkeypatch.setattr(gpu.Setting, name, stub)
    return of


def has_rows_of_one_document(plan: Plan) -> bool:
    with Path(plan.recipe.data.path).open() as file:
        return len(file.readlines()) == 1 and plan.recipe.data.treatment in ("split", "continued")


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("8B-packed", {"8B-packed": ("data.packing", "concat")}),
        ("8B-float8", {f"8B-float8-{kind}": ("train.float8", kind) for kind in ("rowwise", "tensorwise")}),
    ],
)
def test_runs_of_8b_differ_in_one_key(check: str, changes: dict[str, tuple[str, Any]], plans: Any) -> None:
    usual = plans("8B")[0]["8B"]
    assert usual.recipe.data.packing == "none" and usual.recipe.data.seq_len == 4096
    found, rows = plans(check)
    assert {row.verdict for row in rows if "speed" in row.what or "step time" in row.what} == {"ok"}
    assert found.keys() == changes.keys()
    for name, plan in found.items():
        assert has_rows_of_one_document(plan)
        path, value = changes[name]
        expected = varied(usual, {path: value}).recipe
        assert plan.recipe == dataclasses.replace(expected, output_dir=plan.recipe.output_dir)


@pytest.mark.parametrize(("path", "verdict"), [("train.float8", "measured"), ("data.seq_len", "failed")])
def test_a_variant_that_this_machine_refuses_is_named(
    path: str, verdict: str, plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = f"fsdptrain: 8B-float8-rowwise.yaml:47: {path}: a100-80gb has none: remove it"
    monkeypatch.setattr("gpu_checks.Setting.command", lambda *_: (2, refusal))
    found, rows = plans("8B-float8")
    assert not found and {row.verdict.partition(":")[0] for row in rows} == {verdict}
    assert all(refusal in (row.note, row.verdict.partition("exited with 2: ")[2]) for row in rows)


@pytest.mark.parametrize("check", ["kernels", "syncs", "curves", "speed-1B", "speed-3B"])
def test_what_is_called_not_packed_is_not(check: str, plans: Any) -> None:
    found, _ = plans(check)
    named = {name: plan for name, plan in found.items() if "not packed" in name or "speed" in check}
    assert {plan.recipe.data.packing for plan in named.values()} == {"none"}
    for name, plan in found.items():
        if "speed" in check or "rows" in name:
            assert has_rows_of_one_document(plan)
