"""What ranks divide (parallel.context, tensor, experts): parts of tensors, tokens that are sent, what reports name."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import small_config
from reference import largest_difference
from support import TINY, on_ranks, planned, write_recipe
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fsdptrain.model import exchange
from fsdptrain.model.expert_parallel import connect_experts, divide_experts
from fsdptrain.model.parts import Part
from fsdptrain.model.varlen import all_to_all
from fsdptrain.parallel.patches import collective_of
from fsdptrain.train import trainer

# ----------------------------------------------------------------------------------------- tokens of experts elsewhere

ROUTES = {  # of four ranks with two experts each, the experts of each token of each rank
    "all to one expert": [[[5, 5]] * 4] * 4,
    "ranks without a token for their experts": [[[0, 1], [1, 0], [2, 3]], [[3, 0]], [[1, 2]] * 5, [[0, 2]]],
    "each rank to the next": [[[(2 * rank + 2) % 8, (2 * rank + 3) % 8]] * 3 for rank in range(4)],
    "one token": [[[7, 0]], [[6, 1]], [[5, 2]], [[4, 3]]],
}


def exchanged(routes: dict[str, list[list[list[int]]]]) -> dict[str, float]:
    """Return of each route the largest difference of results and gradients from those of all experts on one rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rank, config = dist.get_rank(), Qwen3MoeConfig(**TINY, num_experts=8, moe_intermediate_size=32)
    name, models = "model.layers.0.mlp.experts", [AutoModelForCausalLM.from_config(config) for _ in range(2)]
    for model in models:
        model.set_experts_implementation("eager")  # the others do not compute in float64
    whole, own = (model.get_submodule(name) for model in models)
    for param in whole.parameters():
        nn.init.normal_(param, std=0.1)
    own.load_state_dict(whole.state_dict())
    divided: Any = models[1]
    divided.parts, divided.divided_experts = {}, []
    divide_experts(divided, 4, rank)
    connect_experts(divided, dist.group.WORLD)
    found = {}
    for route, chosen in routes.items():
        tokens, weights = ([torch.randn(len(each), size) for each in chosen] for size in (64, 2))  # on every rank
        mine = [[x.clone().requires_grad_() for x in (tokens[rank], weights[rank])] for _ in range(2)]
        models[0].zero_grad(), divided.zero_grad()
        expected = [  # what one process computes for all
            whole(
                *(mine[0][:1] if n == rank else [tokens[n]]),
                torch.tensor(chosen[n]),
                mine[0][1] if n == rank else weights[n],
            )
            for n in range(4)
        ]
        torch.cat(expected).sin().sum().backward()
        made = own(mine[1][0], torch.tensor(chosen[rank]), mine[1][1])
        made.sin().sum().backward()
        pairs = [(made, expected[rank]), *((b.grad, a.grad) for a, b in zip(*mine, strict=True))]
        for key, param in own.named_parameters():
            pairs.append((param.grad, divided.parts[f"{name}.{key}"].take(whole.get_parameter(key).grad)))
        found[route] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


def test_tokens_reach_their_experts_and_come_back(tmp_path: Path) -> None:
    for found in on_ranks(4, exchanged, tmp_path, routes=ROUTES):
        assert max(found.values()) < 1e-12, found


# ---------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(("dim", "count", "packed"), [(-1, 2, 1), (-2, 4, 2), (-3, 3, 1), (-1, 2, 3), (-2, 1, 1)])
def test_parts_of_a_tensor_make_the_whole(dim: int, count: int, packed: int) -> None:
    whole = torch.arange(6 * 8 * 12.0).view(6, 8, 12)
    made = torch.full_like(whole, torch.nan)
    for number in range(count):
        part = Part.of((6, 8, 12), dim, number, count, count, packed)
        own = part.take(whole)
        assert own.numel() * count == whole.numel() and part.at(number) == part
        part.put(own, made) if count > 1 else made.copy_(own)
    assert torch.equal(made, whole)


def test_biases_of_routers_are_moved_towards_balance_in_every_layout(tmp_path: Path) -> None:
    rate, config = 0.125, small_config("deepseek_v3", first_k_dense_replace=1)
    config.save_pretrained(tmp_path / "config")
    recipe = write_recipe(
        tmp_path, model={"id": str(tmp_path / "config"), "tokenizer": {"train": 512}, "init": "random"},
        train__router_bias_rate=rate, train__micro_batch_size=2,
    )  # fmt: skip
    layouts = {"alone": [], "divided": ["parallel.experts=4", "parallel.context=2", "train.micro_batch_size=1"]}
    variants = {name: [*words, f"output_dir={tmp_path / name}"] for name, words in layouts.items()}
    found = on_ranks(4, "exports", tmp_path, recipe=str(recipe), variants=variants, steps=3)[0]
    assert max(largest_difference(found["divided"], found["alone"])) < 1e-6
    states = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").state_dict() for name in layouts]
    biases = {key: value for key, value in states[0].items() if key.endswith("e_score_correction_bias")}
    assert biases and all(torch.equal(value, states[1][key]) for key, value in biases.items())
    for bias in biases.values():
        assert bias.abs().max() > 0 and {*(bias / rate).tolist()} <= {float(n) for n in range(-3, 4)}


# ------------------------------------------------------------------------------------------------------------ reports


def test_a_report_on_a_hang_names_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[str | None]()
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: found.append(collective_of(sys._getframe(1))))
    send = functools.partial(all_to_all, group=dist.GroupMember.NON_GROUP_MEMBER)
    exchange.exchanged(torch.ones(2, 3, requires_grad=True), send, send).sum().backward()
    assert found == ["all-to-all of parallel.context"] * 2


def test_a_report_on_a_nan_names_the_ranks_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(write_recipe(tmp_path), "parallel.context=2", ranks=4)
    found = [(rank, 0, "the loss is nan") for rank in (2, 3)]
    monkeypatch.setattr(trainer, "find_sources", lambda *_: found)
    monkeypatch.setattr(trainer, "find_weights", lambda *_: [])
    run: Any = SimpleNamespace(plan=plan, engine=None, stream=SimpleNamespace(at=list), finish_save=lambda: None)
    inputs: Any = SimpleNamespace(step=0, batches=None, divisor=1)
    row = "(samples 1)"
    assert trainer.Trainer.nonfinite_cause(run, inputs) == (
        f"the loss is nan on rank 2, which shares its rows with rank 3 {row}; "
        f"the loss is nan on rank 3, which shares its rows with rank 2 {row}"
    )
