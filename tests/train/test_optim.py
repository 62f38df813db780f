"""The optimizer keeps the state that its registry entry lists; the learning rate is a pure function of the step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import small_config
from hypothesis import given
from hypothesis import strategies as st
from reference import OPTIMIZERS, library_optimizers
from support import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import pad

from fsdptrain.checkpoint.shards import named_parts, shards_of
from fsdptrain.config.optimizers import OptimizerKind, padded_columns
from fsdptrain.config.schema import Model, Optim, Recipe, Schedule
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import weights_of
from fsdptrain.train.optim import (
    assert_dtypes,
    learning_rate,
    length_note,
    make_optimizer,
    set_step,
    start_state,
    warmup_note,
    warmup_steps,
)

OPTIM = Optim(lr=1.0)
TABLES_OF_VALUES = ("qmap1", "qmap2")  # of bitsandbytes
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
    model = skeleton(small_config(kind, **own), Model(attn_implementation="eager")).to_empty(device="cpu")
    params = dict(model.named_parameters())
    for param in params.values():
        param.data.fill_(1.0)
    optimizer = make_optimizer(model, dataclasses.replace(OPTIM, lr=0.5, weight_decay=0.5))
    start_state(optimizer)
    for part in named_parts(optimizer).values():
        part.grad = torch.zeros_like(part)
    optimizer.step()  # without gradients, only decay changes weights: by lr times weight decay
    assert {float(value) for param in params.values() for value in param.unique()} == {0.75, 1.0}
    undecayed = {name: param.ndim for name, param in params.items() if (param == 1.0).all()}
    assert {".".join(name.split(".")[-2:]) for name, ndim in undecayed.items() if ndim > 1} == tables
    assert {name for name, param in params.items() if param.ndim < 2} <= undecayed.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_registry_lists_the_state_that_the_optimizer_keeps(name: str) -> None:
    for master in ("float32", "bfloat16"):
        recipe = Recipe(model=Model(dtype=master), optim=OPTIMIZERS[name])  # type: ignore[arg-type]
        # An embedding, vectors, and matrices with and without blocks of 8-bit values.
        parts = torch.nn.Embedding(5, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 3), torch.nn.Linear(3, 512)
        model = torch.nn.Sequential(*parts).to(getattr(torch, master))
        optimizer = make_optimizer(model, recipe.optim)
        start_state(optimizer)
        kept = []
        for param, weight in weights_of(model).items():
            listed = {tensor.key: tensor for tensor in recipe.optim.state(weight, master)}  # type: ignore[arg-type]
            state = optimizer.state[named_parts(optimizer)[param]]
            kept += [state[key] for key in listed]
            assert all(str(state[key].dtype)[6:] == tensor.dtype for key, tensor in listed.items())
            assert all(state[key].numel() == math.prod(tensor.shape) for key, tensor in listed.items())
            # What is not listed, and so not saved, is small: counters, and tables that are the same for all.
            others = {
                key: value for key, value in state.items() if key not in listed and isinstance(value, torch.Tensor)
            }
            assert all(value.numel() == 1 or key in TABLES_OF_VALUES for key, value in others.items())
        assert_dtypes(model, optimizer, recipe)
        weights = weights_of(model).values()
        assert recipe.optim.state_bytes(weights, master) == sum(value.nbytes for value in kept)  # type: ignore[arg-type]
        set_step(optimizer, 7)
        assert {float(state["step"]) for state in optimizer.state.values() if "step" in state} <= {7.0}


def of_kind(kind: OptimizerKind, **settings: Any) -> Optim:
    """Return the settings of an optimizer, with its own defaults."""
    return dataclasses.replace(OPTIM, name=kind, **(kind.traits.settings | settings))


def test_state_of_another_dtype_than_the_registry_lists_is_refused() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = make_optimizer(model, OPTIM)
    start_state(optimizer)
    state = optimizer.state[named_parts(optimizer)["weight"]]
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(RuntimeError, match=r"should be torch\.float32.* but some are torch\.bfloat16"):
        assert_dtypes(model, optimizer, Recipe())


@pytest.mark.parametrize("kind", [kind for kind in OptimizerKind if kind.traits.found_inf])
def test_a_step_with_found_inf_changes_nothing_and_is_not_counted(kind: OptimizerKind) -> None:
    model = torch.nn.Linear(64, 3)
    optimizer = make_optimizer(model, of_kind(kind, weight_decay=0.5))
    start_state(optimizer)
    set_step(optimizer, 7)
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


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.soak) for world in (1, 4))])
def test_the_update_on_shards_is_that_of_the_library_on_whole_tensors(world: int, tmp_path: Path) -> None:
    # With rows that do not divide, one row, no rows at all, and rows that are not whole blocks of 8-bit values.
    ranks = on_ranks(world, updates, tmp_path, kinds=list(OPTIMIZERS), steps=3)
    for name, distances in ranks[0].items():
        # The ends of a part are not computed with vector instructions. Only Adafactor's means are sums over ranks.
        limit = 0.0 if world == 1 else 2e-6 if name.startswith("adafactor") else 2e-8
        assert max(distances.values()) <= limit, name


@pytest.mark.parametrize(("beta2", "wrong"), [(0.95, 0.01), (0.995, 0.05), (0.999, None)])
def test_a_second_moment_in_bfloat16_settles_where_that_in_float32_does(beta2: float, wrong: float | None) -> None:
    means = {}
    for kind in (OptimizerKind.adamw, OptimizerKind.adamw_bf16):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = make_optimizer(model, of_kind(kind, betas=[0.9, beta2], lr=0.0))
        part = named_parts(optimizer)["weight"]
        for _ in range(int(5 / (1 - beta2))):
            part.grad = torch.randn(part.shape)
            optimizer.step()
        means[kind] = float(optimizer.state[part]["exp_avg_sq"].float().mean())
    off = abs(means[OptimizerKind.adamw_bf16] / means[OptimizerKind.adamw] - 1)
    assert off < wrong if wrong else off > 0.5


def rates(total: int, **schedule: object) -> list[float]:
    return [learning_rate(step, total, OPTIM, Schedule(**schedule)) for step in range(total)]  # type: ignore[arg-type]


def test_warm_up_is_linear_and_counts_fractions_or_steps() -> None:
    assert rates(10, name="constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert rates(10, name="constant", warmup=0.4) == rates(10, name="constant", warmup=4)
    assert rates(3, name="constant", warmup=0) == [1, 1, 1]
    assert rates(2, name="cosine", warmup=8) == [1 / 8, 2 / 8], "a warm-up longer than the run keeps its slope"
    note = warmup_note(2, OPTIM, Schedule(warmup=8))
    assert note and "8 steps and the run 2" in note and "0.25" in note
    assert warmup_note(8, OPTIM, Schedule(warmup=8)) is None and warmup_note(5, OPTIM, Schedule(warmup=0.9)) is None


def test_a_run_that_gets_longer_says_that_its_rate_jumps() -> None:
    schedule = Schedule(name="cosine", warmup=0, min_lr=0)
    note = length_note(100, 100, 200, OPTIM, schedule)
    assert note and "from 0.00e+00 in step 100 to 4.96e-01 in the next" in note
    assert length_note(100, 100, 200, OPTIM, Schedule(name="constant", warmup=0)) is None
    assert length_note(50, 100, 100, OPTIM, schedule) is None and length_note(0, 100, 200, OPTIM, schedule) is None


def test_linear_cosine_and_wsd_have_their_shapes() -> None:
    assert rates(101, name="linear", warmup=0, min_lr=0)[50] == pytest.approx(0.5)
    assert rates(101, name="cosine", warmup=0, min_lr=0)[25] == pytest.approx(0.5 + 0.5 * 2**-0.5)
    falling = rates(101, name="cosine", warmup=0, min_lr=0.1)
    assert falling == sorted(falling, reverse=True) and falling[-1] == pytest.approx(0.1)
    wsd = rates(101, name="wsd", warmup=0, min_lr=0)
    assert wsd[:81] == [1] * 81 and wsd[90] == pytest.approx(1 - 9 / 19)


@given(
    st.integers(1, 300), st.sampled_from(["constant", "linear", "cosine", "wsd"]), st.floats(0, 400), st.floats(0, 1)
)  # fmt: skip
def test_a_rate_rises_to_lr_and_falls_to_its_end_however_short_the_run(
    total: int, name: str, warmup: float, floor: float
) -> None:
    curve, steps = rates(total, name=name, warmup=warmup, min_lr=floor), warmup_steps(total, Schedule(warmup=warmup))
    assert curve[:steps] == sorted(curve[:steps]) and all(0 < rate <= 1 + 1e-12 for rate in curve[:steps])
    assert max(curve) <= 1 + 1e-12
    assert all(rate >= floor - 1e-12 for rate in curve[steps:])
    if steps < total:
        assert max(curve) == pytest.approx(1)
        assert curve[-1] == pytest.approx(1 if name == "constant" or total == 1 else floor)


# --- on every rank -------------------------------------------------------------------------------------------------


class Shapes(torch.nn.Module):
    """Parameters of many kinds: with rows that no number of ranks divides, one row, and rows of less than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(11, 512), torch.nn.LayerNorm(512)
        self.wide, self.tall = torch.nn.Linear(512, 7), torch.nn.Linear(300, 513, bias=False)
        self.narrow, self.row = torch.nn.Linear(6, 9, bias=False), torch.nn.Linear(256, 1, bias=False)
        self.equal, self.experts = torch.nn.Linear(260, 260), torch.nn.Parameter(torch.zeros(5, 3, 256))


def updates(kinds: list[str], steps: int) -> dict[str, Any]:
    """Return how far parameters and state are from those of the libraries on whole tensors, by optimizer and mesh.

    The distances are relative to the change; `saved` says whether the bytes of a checkpoint are as the registry says.
    """
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    meshes = {"shard": init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))}
    if world == 4:
        meshes["hybrid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    for kind in kinds:
        for name, mesh in meshes.items():
            found[f"{kind} {name}"] = compare_updates(kind, mesh, steps)
    return found


def compare_updates(kind: str, mesh: DeviceMesh, steps: int) -> dict[str, float]:
    """Make steps with the optimizer of a recipe on shards, and with those of the libraries on whole tensors."""
    torch.manual_seed(0)
    model = Shapes()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    before = {name: param.clone() for name, param in whole.items()}
    # The library quantises rows of 260 and 300 values only as part of longer ones.
    padded = {name: padded_columns(tuple(p.shape)) - p.shape[-1] for name, p in whole.items()}
    if kind == "adamw_8bit":
        whole = {name: pad(p, (0, max(0, padded[name]))) for name, p in whole.items()}
    undecayed = {"embedding.weight", "norm.weight", "norm.bias", "wide.bias", "equal.bias", "row.weight"}
    decayed = [param for name, param in whole.items() if name not in undecayed]
    others = [param for name, param in whole.items() if name in undecayed]
    references = library_optimizers(kind, decayed, others, [param for param in decayed if param.ndim == 2])
    model = fully_shard(model, mesh=mesh)
    model.frozen_names = set()  # as a skeleton has them
    optim = OPTIMIZERS[kind]
    optimizer = make_optimizer(model, optim)
    start_state(optimizer)
    set_step(optimizer, 0)
    parts = named_parts(optimizer)
    for step in range(steps):
        torch.manual_seed(step)
        for name, param in model.named_parameters():
            gradient = torch.randn(param.shape) * 10.0 ** (step % 3 - 2)
            whole[name].grad = pad(gradient, (0, whole[name].shape[-1] - gradient.shape[-1]))
            parts[name].grad = distribute_tensor(gradient, mesh, param.placements).to_local()
        for each in (optimizer, *references):
            each.step()
    distances = {}
    for name, param in model.named_parameters():
        made, wanted = param.full_tensor(), whole[name][..., : param.shape[-1]]
        distances[name] = float((made - wanted).norm() / (wanted - before[name]).norm())
    shards = shards_of(model, optimizer, optim)
    listed = {name: optim.state(weight, "float32") for name, weight in weights_of(model).items()}
    shapes = {f"optim.{name}.{tensor.key}": tensor.shape for name, state in listed.items() for tensor in state}
    assert {name: shard.shape for name, shard in shards.items() if name.startswith("optim.")} == shapes
    return distances
