"""Ranks that divide layers (parallel.tensor) or experts (parallel.experts) train as one process does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import KINDS as KINDS_OF_ALL
from architectures import small_config
from reference import largest_difference, worst_gradient
from support import TINY, on_ranks, planned, write_pairs, write_pretrained, write_recipe
from torch import nn
from train.test_context import LIMIT, UNSCALED, assert_layouts_agree, assert_options_agree
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3MoeConfig

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.model.attention import check_context
from fsdptrain.model.expert_parallel import check_experts, connect_experts, divide_experts
from fsdptrain.model.parts import Part
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.tensor_parallel import check_layers
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.train.preflight import prepare_model

STEPS, BATCH = 4, 8
CONTEXT, TENSOR, FOUR = "parallel.context=2", "parallel.tensor=2", "parallel.tensor=4"
EXPERTS, ALL = "parallel.experts=2", "parallel.experts=4"
FULL, HELD = "fsdp.activation_checkpointing=full", ["fsdp.accumulation=hold", "train.micro_batch_size=1"]
LAYOUTS = {  # of four ranks: the model has four query heads, two key heads and eight experts
    "tensor 4, more than key heads; held": [FOUR, *HELD],
    "tensor × context, recomputed": [TENSOR, CONTEXT, FULL],
    "tensor × experts over both": [TENSOR, ALL],
    "experts 2, recomputed": [EXPERTS, FULL],
}
MORE_LAYOUTS = {
    "tensor 2": [TENSOR],
    "tensor 2, recomputed selectively": [TENSOR, "fsdp.activation_checkpointing=selective"],
    "tensor 2, SHARD_GRAD_OP": [TENSOR, "fsdp.strategy=SHARD_GRAD_OP"],
    "tensor 2, HYBRID_SHARD": [TENSOR, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"],
    "tensor 4, HYBRID_SHARD": [FOUR, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"],
    "tensor 2, NO_SHARD": [TENSOR, "fsdp.strategy=NO_SHARD"],
    "tensor 2, offloaded": [TENSOR, "fsdp.cpu_offload=true"],
    "tensor 2, shards held": [
        TENSOR,
        "fsdp.strategy=HYBRID_SHARD",
        "fsdp.shard_size=2",
        "fsdp.accumulation=hold_shards",
    ],
    "tensor 2, kept in host memory": [TENSOR, "fsdp.activation_checkpointing={kind: full, offload: true}"],
    "experts 4": [ALL],
    "experts 4, recomputed selectively": [ALL, "fsdp.activation_checkpointing=selective"],
    "experts 4, SHARD_GRAD_OP": [ALL, "fsdp.strategy=SHARD_GRAD_OP"],
    "experts 4, HYBRID_SHARD": [ALL, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"],
    "experts 2, NO_SHARD": [EXPERTS, "fsdp.strategy=NO_SHARD"],
    "experts 4, offloaded, held": [ALL, "fsdp.cpu_offload=true", *HELD],
    "experts 4 × context": [ALL, CONTEXT],
    "experts 2 × tensor × context": [EXPERTS, TENSOR, CONTEXT],
    "experts 4 × tensor 4": [ALL, FOUR],
}
LORA = ["adapter.kind=lora", "adapter.r=3", "export.adapter=merged"]
ON_EXPERTS = [*LORA, "adapter.target=[q_proj,o_proj,experts.gate_up_proj,experts.down_proj]"]
PAIRS = ["train.objective=dpo", "data.path=${..}/pairs.jsonl", "data.format=preference"]
OPTIONS = {"LoRA on experts": ON_EXPERTS}  # of two ranks
MORE_OPTIONS = {
    "plain loss": ["train.loss=plain"],
    "windows, tied head": ["model.id=${..}/mistral"],
    "LoRA": LORA,
    "not packed": ["data.packing=none"],
    "frozen": ["model.trainable=[layers.2]"],
    "Lion": ["optim.name=lion"],
    "bfloat16 moments": ["optim.name=adamw_bf16"],
    "one expert a token": ["model.config.num_experts_per_tok=1"],
    "compiled": ["train.compile=true"],
    "compiled, recomputed": ["train.compile=true", FULL],
    "preferences": PAIRS,
    "preferences, LoRA": [*PAIRS, *LORA],
}
ONLY_EXPERTS = {"Muon": ["optim.name=muon"], "8-bit state": ["optim.name=adamw_8bit"]}
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random mixture of experts, on packed documents."""
    tmp = tmp_path_factory.mktemp("divided")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    recipe = write_pretrained(
        tmp, Qwen3MoeConfig(**TINY, **experts, head_dim=16), data__eval={"fraction": 0.1}, train__steps=STEPS,
        train__global_batch_size=BATCH, train__micro_batch_size=2,
    )  # fmt: skip
    write_pairs(tmp / "pairs.jsonl")
    mistral = MistralConfig(**TINY, sliding_window=20, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(mistral).save_pretrained(tmp / "mistral")
    eight = Qwen3MoeConfig(**TINY | {"num_attention_heads": 8}, **experts, head_dim=8)
    AutoModelForCausalLM.from_config(eight).save_pretrained(tmp / "eight heads")
    return recipe


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=SOAK)], ids=["some", "more"])
def test_curves_agree_with_the_plain_loop(layouts: dict[str, list[str]], recipe: Path, tmp_path: Path) -> None:
    assert_layouts_agree(layouts, recipe, tmp_path)


@pytest.mark.soak
def test_eight_ranks_divide_a_model(recipe: Path, tmp_path: Path) -> None:
    one = "train.micro_batch_size=1"
    layouts = {f"tensor {n} of 8": [f"parallel.tensor={n}", one] for n in (2, 4, 8)}
    layouts |= {f"experts {n} of 8": [f"parallel.experts={n}", one] for n in (2, 4, 8)}
    layouts["tensor 2 × context 2 × experts 8"] = [TENSOR, CONTEXT, "parallel.experts=8", one]
    assert_layouts_agree(layouts, recipe, tmp_path, size=8, model="eight heads", timeout=900)


@pytest.mark.parametrize("options", [OPTIONS, pytest.param(MORE_OPTIONS, marks=SOAK)], ids=["some", "more"])
@pytest.mark.parametrize("word", [TENSOR, EXPERTS])
def test_options_give_the_same(word: str, options: dict[str, list[str]], recipe: Path, tmp_path: Path) -> None:
    if word == EXPERTS and options is MORE_OPTIONS:
        options = {name: words for name, words in options.items() if "mistral" not in words[0]} | ONLY_EXPERTS
    assert_options_agree(options, recipe, tmp_path, compiled="aot_eager", share=word)


def test_every_gradient_and_the_export_are_those_of_one_process(recipe: Path, tmp_path: Path) -> None:
    variants = {"tensor": [FOUR], "experts": [ALL, TENSOR]}
    alone = {"alone": [f"output_dir={tmp_path / 'alone'}"]}
    on_ranks(1, "written_gradients", tmp_path, recipe=str(recipe), variants=alone, made=str(tmp_path))
    on_ranks(1, "exports", tmp_path, recipe=str(recipe), variants=alone, steps=2)
    divided = {name: [*words, f"output_dir={tmp_path / name}"] for name, words in variants.items()}
    on_ranks(4, "written_gradients", tmp_path, recipe=str(recipe), variants=divided, made=str(tmp_path))
    on_ranks(4, "exports", tmp_path, recipe=str(recipe), variants=divided, steps=2)
    expected = torch.load(tmp_path / "alone.pt")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "export").state_dict()
    for name in variants:
        difference, worst = worst_gradient(torch.load(tmp_path / f"{name}.pt"), expected)
        assert difference < 2e-6, (name, worst)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").state_dict()
        assert max((found[key] - weights[key]).abs().max() for key in weights) < 1e-5, name


RESUMES = {  # layout → another, in which its checkpoint is continued
    "tensor 4": ([FOUR], [TENSOR, EXPERTS]),
    "experts": ([ALL, TENSOR], []),
    "no division": ([], [FOUR, ALL]),
    "adapters": ([TENSOR, *ON_EXPERTS], [ALL, *ON_EXPERTS]),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.soak if each in ("experts", "no division") else []) for each in RESUMES],
)
def test_a_run_resumes_bitwise_and_in_another_layout(layout: str, recipe: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"recipe": str(recipe), "steps": STEPS}
    (own, others), folder = RESUMES[layout], f"output_dir={tmp_path / 'run'}"
    whole = on_ranks(4, "save_between", tmp_path / "a", **words, overrides=[*own, folder], at=2)[0]
    same = on_ranks(4, "resume", tmp_path / "b", **words, overrides=[*own, folder])[0]
    ranks = 2 if TENSOR in others else 4
    other = on_ranks(ranks, "resume", tmp_path / "c", **words, overrides=[*others, folder])[0]
    assert same["first"] == 2 and same["curve"] == whole["curve"][2:]
    assert other["samples"] == whole["samples"][2:]
    assert max(largest_difference(other["curve"], whole["curve"][2:])) < LIMIT


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


REFUSED = {  # what the recipe says → what the message says
    "heads": (["model.config.num_attention_heads=2", FOUR], "2 query heads, which do not divide among 4 ranks"),
    "key heads": (
        [
            "model.config.hidden_size=96",
            "model.config.num_attention_heads=12",
            "model.config.num_key_value_heads=3",
            FOUR,
        ],
        "k_proj has 3 heads",
    ),
    "length": (["data.seq_len=66", FOUR], "data.seq_len: 66 tokens do not divide among 4 ranks (parallel.tensor)"),
    "node": (["data.seq_len=66", "parallel.tensor=3"], "parallel.tensor: 3 does not divide the 4 ranks of a node"),
    "both": ([FOUR, CONTEXT], "parallel.context: 2 × parallel.tensor 4 does not divide the 4 ranks of a node"),
    "kernel": (["model.attn_implementation=eager", FOUR], "parallel.tensor: has no effect with model.attn_impl"),
    "batch": (["train.global_batch_size=9", TENSOR], "9 sequences do not divide over 4 ranks / parallel.tensor 2"),
    "features": (["model.config.intermediate_size=98", FOUR], "mlp.gate_proj.weight has 98 results"),
    "optimizer": (["optim.name=muon", TENSOR], "not supported with optim.name: muon: use optim.name: adamw"),
    "quantised": (["adapter.kind=qlora", TENSOR], "not supported with adapter.kind: qlora: use adapter.kind: lora"),
    "units": (["fsdp.wrap=[LlamaMLP]", EXPERTS], "parallel.experts: weights that ranks divide are not supported"),
    "no experts": ([EXPERTS], "2 ranks cannot divide the experts of LlamaForCausalLM: it has no experts"),
    "experts and ranks": (["parallel.experts=3"], "parallel.experts: 3 does not divide 4 ranks; use one of 1, 2, 4"),
}
OTHERS = {  # architecture → what hinders ranks to divide its layers
    "bitnet": "transformers has no plan for it",
    "gemma3n_text": "compares its features with one another",
    "beam": "would be divided in a way that is not supported",
    "aria_text": "are transposed or have biases",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused(case: str, tmp_path: Path) -> None:
    words, message = REFUSED[case]
    with pytest.raises(RecipeError) as refused:
        prepare_model(planned(write_recipe(tmp_path), *words, ranks=4), 512)
    assert message in str(refused.value)


@pytest.mark.parametrize("kind", OTHERS)
def test_an_architecture_that_cannot_be_divided_is_refused(kind: str, tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), TENSOR, ranks=2)
    with pytest.raises(RecipeError, match=f"parallel.tensor: 2 ranks cannot divide the layers of .*{OTHERS[kind]}"):
        check_layers(skeleton(small_config(kind), plan.recipe.model), 2)


def test_experts_may_be_divided_over_several_whole_nodes(tmp_path: Path) -> None:
    assert make_plan(load(write_recipe(tmp_path), [ALL]), Topology("cpu", 2, 2)).recipe.parallel.experts == 4
    with pytest.raises(RecipeError, match="4 does not divide 6 ranks; use one of 1, 3, 6"):
        make_plan(load(write_recipe(tmp_path), [ALL, "train.global_batch_size=12"]), Topology("cpu", 2, 3))


@pytest.mark.soak
@pytest.mark.parametrize("word", [TENSOR, EXPERTS])
def test_every_architecture_that_is_accepted_gives_the_same(word: str, recipe: Path, tmp_path: Path) -> None:
    plan, accepted = planned(recipe, word, ranks=2), dict[str, list[str]]()
    for kind in KINDS_OF_ALL:
        try:
            config = small_config(kind)
            bare = skeleton(config, dataclasses.replace(plan.recipe.model, attn_implementation="auto"))
            if word == TENSOR:
                check_context(plan, bare)
            check_layers(bare, plan.recipe.parallel.tensor)
            check_experts(bare, plan.recipe.parallel.experts)
            config.save_pretrained(tmp_path / kind)
            alone = ["data.packing=none"] if word == EXPERTS else []
            accepted[kind] = [f"model.id={tmp_path / kind}", "model.init=random", *alone, *UNSCALED.get(kind, [])]
        except RecipeError as error:
            print(f"{kind:32} {error}")
    print(f"{len(accepted)} of {len(KINDS_OF_ALL)} architectures are accepted")
    assert len(accepted) > 50
    assert_options_agree(accepted, recipe, tmp_path, limit=2e-6, apart=2e-5, timeout=3600, share=word)


def test_the_auxiliary_loss_of_the_router_is_that_of_the_global_batch(recipe: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(recipe.parent / "model")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
    model.save_pretrained(recipe.parent / "balanced")
    layouts = {
        "alone": [],
        "accumulated": HELD,
        "divided": [TENSOR, ALL, FULL],
        "divided, accumulated": [EXPERTS, *HELD],
    }
    assert_layouts_agree(layouts, recipe, tmp_path, model="balanced")


def test_biases_of_routers_are_moved_towards_balance_in_every_layout(recipe: Path, tmp_path: Path) -> None:
    rate, config = 0.125, small_config("deepseek_v3", first_k_dense_replace=1)
    config.save_pretrained(tmp_path / "config")
    words = [f"model.id={tmp_path / 'config'}", "model.init=random", f"train.router_bias_rate={rate}"]
    layouts = {"alone": [], "divided": [ALL, CONTEXT, "train.micro_batch_size=1"]}
    variants = {name: [*words, *more, f"output_dir={tmp_path / name}"] for name, more in layouts.items()}
    found = on_ranks(4, "exports", tmp_path, recipe=str(recipe), variants=variants, steps=3)[0]
    assert max(largest_difference(found["divided"], found["alone"])) < LIMIT
    states = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").state_dict() for name in layouts]
    biases = {key: value for key, value in states[0].items() if key.endswith("e_score_correction_bias")}
    assert biases and all(torch.equal(value, states[1][key]) for key, value in biases.items())
    for bias in biases.values():
        assert bias.abs().max() > 0 and {*(bias / rate).tolist()} <= {float(n) for n in range(-3, 4)}
