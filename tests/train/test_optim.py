"""The optimizer keeps the state that its registry entry lists; the learning rate is a pure function of the step."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from architectures import small_config
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.checkpoint.shards import named_parts
from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.schema import Model, Optim, Recipe, Schedule
from fsdptrain.model.skeleton import skeleton
from fsdptrain.train.optim import assert_dtypes, learning_rate, make_optimizer, set_step, start_state, warmup_steps

OPTIM = Optim(lr=1.0)
TABLES = {  # kind → its keys, and its parameters of two and more dimensions that are not weights of a matrix product
    "llama": ({}, {"embed_tokens.weight"}),
    "cohere": ({"use_qk_norm": True}, {"embed_tokens.weight", "q_norm.weight", "k_norm.weight"}),
    "gpt_oss": ({}, {"embed_tokens.weight", "experts.gate_up_proj_bias", "experts.down_proj_bias"}),
    "recurrent_gemma": ({}, {"embed_tokens.weight", "rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias"}),
    "jamba": ({}, {"embed_tokens.weight", "mamba.A_log"}),
    "rwkv": (
        {}, {"embeddings.weight", *(f"{part}.time_mix_{of}" for part, of in itertools.product(
            ("attention", "feed_forward"), ("key", "value", "receptance")) if (part, of) != ("feed_forward", "value"))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_weight_decay_depends_on_what_a_parameter_is(kind: str) -> None:
    own, tables = TABLES[kind]
    model = skeleton(small_config(kind, **own), Model(attn_implementation="eager"))
    decayed = set(make_optimizer(model, OPTIM).param_groups[0]["param_names"])
    undecayed = {name for name, param in model.named_parameters() if name not in decayed and param.ndim > 1}
    assert {".".join(name.split(".")[-2:]) for name in undecayed} == tables
    assert not any(param.ndim < 2 for name, param in model.named_parameters() if name in decayed)


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OptimizerKind)
def test_the_registry_lists_the_state_that_the_optimizer_keeps(kind: OptimizerKind, master: str) -> None:
    recipe = Recipe(model=Model(dtype=master), optim=dataclasses.replace(OPTIM, name=kind))  # type: ignore[arg-type]
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    model.to(getattr(torch, master))
    optimizer = make_optimizer(model, recipe.optim)
    start_state(optimizer)
    listed = {tensor.key: (tensor.dtype or master, tensor.counter) for tensor in kind.state}
    for name, param in model.named_parameters():
        state = optimizer.state[named_parts(optimizer)[name]]
        assert {key: (str(value.dtype)[6:], value.ndim == 0) for key, value in state.items()} == listed
        assert all(value.shape == param.shape for value in state.values() if value.ndim)
    assert_dtypes(model, optimizer, recipe)

    kept = [value for state in optimizer.state.values() for key, value in state.items() if key in kind.saved]
    count = sum(param.numel() for param in model.parameters())
    assert kind.state_bytes(count, master) == sum(value.nbytes for value in kept)
    set_step(optimizer, kind, 7)
    assert {float(state[key]) for state in optimizer.state.values() for key in kind.counters} == {7.0}


def test_state_of_another_dtype_than_the_master_weights_is_refused() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = make_optimizer(model, OPTIM)
    start_state(optimizer)
    state = optimizer.state[named_parts(optimizer)["weight"]]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(RuntimeError, match=r"should be torch\.float32, but some are \{torch\.bfloat16\}"):
        assert_dtypes(model, optimizer, Recipe())


@pytest.mark.parametrize("kind", OptimizerKind)
def test_a_step_with_found_inf_changes_nothing_and_is_not_counted(kind: OptimizerKind) -> None:
    model = torch.nn.Linear(64, 3)
    optimizer = make_optimizer(model, dataclasses.replace(OPTIM, name=kind, weight_decay=0.5))
    start_state(optimizer)
    set_step(optimizer, kind, 7)
    parts = [part for group in optimizer.param_groups for part in group["params"]]
    tensors = [*parts, *(value for state in optimizer.state.values() for value in state.values())]
    before = [tensor.clone() for tensor in tensors]
    for found in (1.0, 0.0):
        optimizer.found_inf = torch.tensor(found)  # type: ignore[attr-defined]
        for part in parts:
            part.grad = torch.full_like(part, float("nan") if found else 1.0)
        optimizer.step()
        assert any(map(torch.equal, before, tensors)) == bool(found)
        assert all(map(torch.equal, before, tensors)) == bool(found)
    assert model.weight.detach().data_ptr() in {part.data_ptr() for part in parts}


def rates(total: int, **schedule: object) -> list[float]:
    return [learning_rate(step, total, OPTIM, Schedule(**schedule)) for step in range(total)]  # type: ignore[arg-type]


def test_warm_up_is_linear_and_counts_fractions_or_steps() -> None:
    assert rates(10, name="constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert rates(10, name="constant", warmup=0.4) == rates(10, name="constant", warmup=4)
    assert rates(3, name="constant", warmup=0) == [1, 1, 1]
    assert rates(2, name="cosine", warmup=8) == [0.5, 1]


def test_decay_ends_at_min_lr() -> None:
    for name in ("linear", "cosine", "wsd"):
        curve = rates(101, name=name, warmup=0, min_lr=0.1)
        assert curve[0] == 1 and curve[-1] == pytest.approx(0.1)
        assert curve == sorted(curve, reverse=True)


def test_linear_cosine_and_wsd_have_their_shapes() -> None:
    assert rates(101, name="linear", warmup=0, min_lr=0)[50] == pytest.approx(0.5)
    assert rates(101, name="cosine", warmup=0, min_lr=0)[25] == pytest.approx(0.5 + 0.5 * 2**-0.5)
    wsd = rates(101, name="wsd", warmup=0, min_lr=0)
    assert wsd[:81] == [1] * 81 and wsd[90] == pytest.approx(1 - 9 / 19)


@given(
    st.integers(1, 3000), st.sampled_from(["constant", "linear", "cosine", "wsd"]), st.floats(0, 4000), st.floats(0, 1),
    st.data(),
)  # fmt: skip
def test_the_rate_is_at_most_lr_and_above_zero_in_warm_up(
    total: int, name: str, warmup: float, floor: float, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, total - 1))
    schedule = Schedule(name=name, warmup=warmup, min_lr=floor)  # type: ignore[arg-type]
    rate = learning_rate(step, total, OPTIM, schedule)
    assert 0 <= rate <= 1 + 1e-12
    if step >= warmup_steps(total, schedule):
        assert rate >= min(1.0, floor) - 1e-12
    else:
        assert rate > 0
