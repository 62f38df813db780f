"""Forecasts on disk: used again for the same plan, and for no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from simulated import SMALL, plan_of

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.paths import cache_root
from fsdptrain.config.strategy import Strategy
from fsdptrain.forecast import kept
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.plan.hardware import CPU, KNOWN, Hardware
from fsdptrain.plan.plan import Plan, varied

H100 = KNOWN["h100-80gb"]
FOUND = Forecast(
    fits=True, tight=False, memory_bytes=8, peak_bytes=5, reserved_bytes=6, overhead_bytes=1, host_bytes=0,
    moment="loss", breakdown={"gradients": 5}, peaks={"loss": 5}, collectives=[{"kind": "all-gather"}], flops=1.0,
    model_flops=1.0, step_s=0.1 + 0.2, step_s_range=[0.2, 0.4], compute_s=0.1, communication_s=0.1, exposed_s=0.1,
    tokens_per_s=3.0, mfu=0.4, hardware="h100-80gb", method="pretended accelerator", notes=["a note"],
)  # fmt: skip


def made_of(plan: Plan, hardware: Hardware = H100, model: dict[str, Any] = SMALL) -> tuple[Forecast, int]:
    """Return a forecast, and how many were made for it."""
    made = []

    def make(plan: Plan) -> Forecast:
        made.append(plan)
        return dataclasses.replace(FOUND, notes=[*FOUND.notes])

    return kept.kept_or_made(plan, model, hardware, make), len(made)


def test_a_forecast_is_used_again_for_the_same_plan_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, device="cuda")
    first, made = made_of(plan)
    assert made == 1 and first == FOUND
    beside = {"optim.lr": 0.5, "schedule.warmup": 7, "eval.max_new_tokens": 3, "log.every": 9, "data.path": "other"}
    again, made = made_of(dataclasses.replace(varied(plan, beside), run_dir="elsewhere"))
    assert made == 0 and "kept in the cache" in again.notes.pop() and again == first
    changes = [
        {"data.seq_len": 512}, {"train.micro_batch_size": 1}, {"fsdp.strategy": Strategy.SHARD_GRAD_OP},
        {"optim.name": OptimizerKind.lion}, {"model.dtype": "bfloat16"}, {"adapter.kind": "lora"},
        {"data.packing": "none"},
        {"export.adapter": "merged"},
        {"teacher.top_k": 8},
    ]  # fmt: skip
    assert [made_of(varied(plan, change))[1] for change in changes] == [1] * len(changes)
    assert made_of(plan, dataclasses.replace(H100, memory=1))[1] == 1
    assert made_of(plan, model={**SMALL, "hidden_size": 384})[1] == 1
    assert made_of(dataclasses.replace(plan, libraries={"torch": "3.0"}))[1] == 1
    monkeypatch.setattr(kept, "_own_code", lambda: "other code")
    assert made_of(plan)[1] == 1


def test_what_is_measured_damaged_or_of_foreign_code_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPTRAIN_CACHE", str(tmp_path / "cache"))
    plan = plan_of(tmp_path, device="cuda")
    assert [made_of(plan, CPU)[1] for _ in range(2)] == [1, 1]
    assert [made_of(dataclasses.replace(plan, trust_remote_code=True))[1] for _ in range(2)] == [1, 1]
    assert [made_of(plan)[1] for _ in range(2)] == [1, 0]
    for content in (b"", b"{}", b'{"fits": 1', b"[]"):
        for file in (cache_root() / "forecasts").iterdir():
            file.write_bytes(content)
        assert [made_of(plan)[1] for _ in range(2)] == [1, 0]
    (cache_root() / "forecasts").chmod(0o500)
    assert made_of(varied(plan, {"data.seq_len": 512}))[0] == FOUND
