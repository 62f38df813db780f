"""Traces of deep models from those of shallow ones: event for event those of a whole simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulated import SMALL, config_of, plan_of

from fsdptrain.forecast import depth
from fsdptrain.forecast.simulation import simulate
from fsdptrain.forecast.trace import Collective
from fsdptrain.model.adapters import freeze
from fsdptrain.model.skeleton import skeleton
from fsdptrain.plan.hardware import CPU
from fsdptrain.plan.plan import Plan, varied

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
LORA = {"adapter.kind": "lora", "adapter.r": 5}


def bare_of(plan: Plan) -> Any:
    return freeze(skeleton(config_of(plan), plan.recipe.model), plan.recipe)


EXPERTS = {
    "model__config": {**SMALL, "model_type": "qwen3_moe", **MIXTURE}, "world": 8, "fsdp__shard_size": 4,
    "fsdp__strategy": "HYBRID_SHARD", "fsdp__mixed_precision": {"param_dtype": "bfloat16"},
    "optim__name": "adamw_8bit", "train__loss": "plain",
}  # fmt: skip
SELECTIVE = {"fsdp__accumulation": "hold", "fsdp__activation_checkpointing": "selective"}
STAGES = {"parallel.pipeline": 2, "parallel.stage_layers": [13, 14]}


@pytest.mark.parametrize(
    ("layers", "place", "changes", "more", "simulated"),
    [
        pytest.param(12, 0, {}, {}, [4, 5], id="full"),
        pytest.param(13, 0, SELECTIVE, LORA, [4, 5], id="lora", marks=pytest.mark.soak),
        pytest.param(14, 0, EXPERTS, {}, [4, 5], id="experts"),
        pytest.param(24, 0, {"fsdp__activation_checkpointing": {"every": 2}}, {}, [8, 10], id="every second",
                     marks=pytest.mark.soak),
        # Of a pipeline the other stage remains whole.
        pytest.param(27, 0, {}, STAGES, [4 + 14, 5 + 14], id="first stage"),
        pytest.param(27, 1, {}, STAGES, [13 + 4, 13 + 5], id="last stage"),
    ],
)  # fmt: skip
def test_the_trace_of_a_deep_model_is_that_of_a_whole_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, place: int, changes: dict[str, Any],
    more: dict[str, Any], simulated: list[int],
) -> None:  # fmt: skip
    config = changes.get("model__config", SMALL) | {"num_hidden_layers": layers}
    plan = varied(plan_of(tmp_path, **changes | {"model__config": config, "train__global_batch_size": 32}), more)
    depths = []

    def counted(plan: Plan, config: Any, *args: Any) -> Any:
        depths.append(config.num_hidden_layers)
        return simulate(plan, config, *args)

    monkeypatch.setattr(depth, "simulate", counted)
    made = depth.simulate_by_depth(plan, config_of(plan), bare_of(plan), CPU, False, place)
    assert depths == simulated
    found, whole = (depth.written(each) for each in (made, simulate(plan, config_of(plan), False, CPU, False, place)))
    assert found.kinds == whole.kinds
    assert (found.numbers == whole.numbers).all()
    messages = {(e.ranks, e.size) for e in made.events if isinstance(e, Collective) and e.kind == "message"}
    states = 2 * 256 * SMALL["hidden_size"] * 4  # of a micro-batch, in float32
    assert messages == ({((0, 2) if place == 0 else (2, 0), states)} if more is STAGES else set())


def test_layers_that_differ_are_simulated_in_their_order_or_all(tmp_path: Path) -> None:
    windows = {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 32}
    first_dense = {"model_type": "qwen3_moe", **MIXTURE, "mlp_only_layers": [0]}
    for changes, every, period in (({}, 1, 1), (windows, 1, 2), (windows, 3, 6), (first_dense, 1, 6)):
        plan = plan_of(
            tmp_path,
            model__config={**SMALL, **changes, "num_hidden_layers": 6},
            fsdp__activation_checkpointing={"every": every},
        )
        assert depth.period_of_layers(plan, bare_of(plan)) == period


def test_traces_that_do_not_grow_by_blocks_are_not_extended(tmp_path: Path) -> None:
    traces = []
    for layers, tokens in ((3, 128), (4, 256)):
        plan = plan_of(tmp_path, model__config=SMALL | {"num_hidden_layers": layers}, data__seq_len=tokens)
        traces.append(simulate(plan, config_of(plan), False, CPU, False))
    traces[1].events = traces[1].events[: len(traces[1].events) // 2]
    assert depth.extended(traces[0], traces[1], 3) is None
