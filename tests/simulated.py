"""Shared by the tests of forecast and simulation: a small Llama, plans for it, and its step on fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import write_recipe
from transformers import AutoConfig

from fsdptrain.config.reader import load
from fsdptrain.forecast import simulation as simulate
from fsdptrain.forecast.trace import Trace
from fsdptrain.model.attention import choose_attention
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology

SMALL = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def plan_of(tmp: Path, world: int = 4, nodes: int = 1, device: str = "cpu", **changes: Any) -> Plan:
    changes = {"model__config": SMALL, "data__seq_len": 256, "train__micro_batch_size": 2} | changes
    topology = Topology(device, nodes, world // nodes)  # type: ignore[arg-type]
    return make_plan(load(write_recipe(tmp, **changes)), topology)


def config_of(plan: Plan) -> Any:
    config = dict(plan.recipe.model.config)
    return AutoConfig.for_model(config.pop("model_type"), **config)


def on_fake(plan: Plan) -> Trace:
    """Return the trace of a step on a fake CPU device, in this process."""
    if plan.ranks_of_row > 1:
        plan, _ = choose_attention(plan, config_of(plan))
    return simulate.simulate(plan, config_of(plan), pretend=False)


def named(changes: dict[str, Any] | str) -> str:
    return changes if isinstance(changes, str) else " ".join(str(value) for value in changes.values())
