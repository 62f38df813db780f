"""Ranks that share rows, divide layers or experts, or have layers one after another train as one process does.

That is `parallel.context`, `parallel.tensor`, `parallel.experts` and `parallel.pipeline`, alone and together.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import KINDS, small_config
from reference import batches_of, cosine_rates, largest_difference, plain_curve, stream_of, worst_gradient
from support import TINY, on_ranks, planned, write_pairs, write_pretrained, write_recipe
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3MoeConfig

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.model.attention import check_context
from fsdptrain.model.expert_parallel import check_experts
from fsdptrain.model.pipeline import check_stages
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.tensor_parallel import check_layers
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.train.preflight import prepare_model

STEPS, BATCH = 4, 8
LIMIT = 1e-6  # relative, in float32
CONTEXT, TENSOR, EXPERTS, STAGES = (f"parallel.{key}=2" for key in ("context", "tensor", "experts", "pipeline"))
CONTEXT_4, TENSOR_4, EXPERTS_4, STAGES_4 = (word.replace("2", "4") for word in (CONTEXT, TENSOR, EXPERTS, STAGES))
GPIPE, INTERLEAVED = "parallel.schedule=gpipe", "parallel.schedule=interleaved"
FULL, SELECTIVE = "fsdp.activation_checkpointing=full", "fsdp.activation_checkpointing=selective"
IN_HOST_MEMORY = "fsdp.activation_checkpointing={kind: full, offload: true}"
OFFLOADED, ONE, HELD = "fsdp.cpu_offload=true", "train.micro_batch_size=1", "fsdp.accumulation=hold"
GRAD_OP, NO_SHARD = "fsdp.strategy=SHARD_GRAD_OP", "fsdp.strategy=NO_SHARD"
HALVES = ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"]
LORA = ["adapter.kind=lora", "adapter.r=3", "export.adapter=merged"]
QLORA = ["adapter.kind=qlora", *LORA[1:]]
ON_EXPERTS = [*LORA, "adapter.target=[q_proj,o_proj,experts.gate_up_proj,experts.down_proj]"]
PAIRS = ["train.objective=dpo", "data.path=${..}/pairs.jsonl", "data.format=preference"]
SOAK = pytest.mark.soak
AT_ONCE = 24  # architectures in one process, which keeps what they compile

SEVEN = TINY | {"num_hidden_layers": 7}
OF_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, Any] = {  # with four query heads and two key heads, but for one
    "experts": Qwen3MoeConfig(**TINY, **OF_EXPERTS, head_dim=16),
    # The auxiliary loss of the router is that of the global batch.
    "balanced": Qwen3MoeConfig(**TINY, **OF_EXPERTS, head_dim=16, output_router_logits=True, router_aux_loss_coef=0.5),
    "tied": MistralConfig(**SEVEN, sliding_window=20, tie_word_embeddings=True),
    "deep": Qwen3MoeConfig(**SEVEN, **OF_EXPERTS, head_dim=16),
    "many heads": Qwen3MoeConfig(**TINY | {"num_attention_heads": 8}, **OF_EXPERTS, head_dim=8),
}
LAYOUTS: dict[str, dict[str, list[str]]] = {  # model → layouts of four ranks
    "experts": {
        "context 4, more than key heads; held, recomputed selectively": [CONTEXT_4, HELD, SELECTIVE],
        "tensor 4, more than key heads; held": [TENSOR_4, HELD, ONE],
        "tensor × context, recomputed": [TENSOR, CONTEXT, FULL],
    },
    "balanced": {
        "accumulated": [HELD, ONE],
        "tensor × experts over both, recomputed": [TENSOR, EXPERTS_4, FULL],
        "experts 2, accumulated": [EXPERTS, HELD, ONE],
    },
    "tied": {
        "stages 2 × FSDP 2": [STAGES, ONE],
        "stages 4, recomputed": [STAGES_4, ONE, FULL],
        "stages 2 × tensor 2, held": [STAGES, TENSOR, HELD],
        "interleaved": [STAGES, INTERLEAVED, ONE],
    },
}
MORE_LAYOUTS = {
    "context 2": [CONTEXT],
    "context 2, recomputed": [CONTEXT, FULL],
    "context 2, SHARD_GRAD_OP": [CONTEXT, GRAD_OP],
    "context 2, HYBRID_SHARD": [CONTEXT, *HALVES],
    "context 4, HYBRID_SHARD": [CONTEXT_4, *HALVES],
    "context 2, NO_SHARD": [CONTEXT, NO_SHARD],
    "context 4, offloaded": [CONTEXT_4, OFFLOADED],
    "tensor 2": [TENSOR],
    "tensor 2, recomputed selectively": [TENSOR, SELECTIVE],
    "tensor 2, SHARD_GRAD_OP": [TENSOR, GRAD_OP],
    "tensor 2, HYBRID_SHARD": [TENSOR, *HALVES],
    "tensor 4, HYBRID_SHARD": [TENSOR_4, *HALVES],
    "tensor 2, NO_SHARD": [TENSOR, NO_SHARD],
    "tensor 2, offloaded": [TENSOR, OFFLOADED],
    "tensor 2, shards held": [TENSOR, *HALVES, "fsdp.accumulation=hold_shards"],
    "tensor 2, kept in host memory": [TENSOR, IN_HOST_MEMORY],
    "tensor × experts over both": [TENSOR, EXPERTS_4],
    "experts 2, recomputed": [EXPERTS, FULL],
    "experts 4": [EXPERTS_4],
    "experts 4, recomputed selectively": [EXPERTS_4, SELECTIVE],
    "experts 4, SHARD_GRAD_OP": [EXPERTS_4, GRAD_OP],
    "experts 4, HYBRID_SHARD": [EXPERTS_4, *HALVES],
    "experts 2, NO_SHARD": [EXPERTS, NO_SHARD],
    "experts 4, offloaded, held": [EXPERTS_4, OFFLOADED, HELD, ONE],
    "experts 4 × context": [EXPERTS_4, CONTEXT],
    "experts 2 × tensor × context": [EXPERTS, TENSOR, CONTEXT],
    "experts 4 × tensor 4": [EXPERTS_4, TENSOR_4],
}
MORE_STAGES = {
    "GPipe": [STAGES, GPIPE, ONE],
    "GPipe of 4, layers as the recipe says": [STAGES_4, GPIPE, ONE, "parallel.stage_layers=[1,3,2,1]"],
    "interleaved, three stages a rank": [STAGES, INTERLEAVED, "parallel.chunks=3", ONE],
    "2 × context 2": [STAGES, CONTEXT],
    "2, one micro-batch": [STAGES, "train.micro_batch_size=4"],
    "2, recomputed selectively": [STAGES, ONE, SELECTIVE],
    "2, SHARD_GRAD_OP": [STAGES, ONE, GRAD_OP],
    "2, HYBRID_SHARD": [STAGES, ONE, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=1"],
    "2, NO_SHARD": [STAGES, ONE, NO_SHARD],
    "2, shards held": [STAGES, ONE, NO_SHARD, "fsdp.accumulation=hold_shards"],
    "2, offloaded": [STAGES, ONE, OFFLOADED],
    "4, kept in host memory": [STAGES_4, ONE, IN_HOST_MEMORY],
}
SOAKED = {
    "experts": MORE_LAYOUTS,
    "tied": MORE_STAGES,
    "deep": LAYOUTS["tied"] | MORE_STAGES | {"2 × experts 2": [STAGES, EXPERTS, ONE]},
}
OF_EIGHT = {
    "many heads": {
        **{f"{key} {n} of 8": [f"parallel.{key}={n}", ONE]
           for key in ("context", "tensor", "experts") for n in (2, 4, 8)},
        "context 8, offloaded": ["parallel.context=8", ONE, IN_HOST_MEMORY.replace("}", ", keep_attention: true}")],
        "tensor 2 × context 2 × experts 8": [TENSOR, CONTEXT, "parallel.experts=8", ONE],
    },
    "deep": {
        "2 × FSDP 2 × tensor 2": [STAGES, TENSOR, ONE],
        "4 × tensor 2, recomputed": [STAGES_4, TENSOR, ONE, FULL],
        "2 × context 2 × tensor 2": [STAGES, TENSOR, CONTEXT, ONE],
        "2 × experts 4": [STAGES, EXPERTS_4, ONE],
        "2 × tensor 2, interleaved": [STAGES, TENSOR, INTERLEAVED, ONE],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random mixture of experts, on packed documents; beside it are the others."""
    tmp = tmp_path_factory.mktemp("layouts")
    recipe = write_pretrained(
        tmp, MODELS["experts"], data__eval={"fraction": 0.1}, train__steps=STEPS, train__global_batch_size=BATCH,
        train__micro_batch_size=2,
    )  # fmt: skip
    for name, config in MODELS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp / name)
    write_pairs(tmp / "pairs.jsonl")
    (tmp / "short.jsonl").write_text("".join(f'{{"text": "Hear row {n}."}}\n' for n in range(80)))
    return recipe


@pytest.mark.parametrize(
    ("model", "layouts", "ranks"),
    [
        *((model, layouts, 4) for model, layouts in LAYOUTS.items()),
        *(pytest.param(model, layouts, 4, marks=SOAK) for model, layouts in SOAKED.items()),
        *(pytest.param(model, layouts, 8, marks=SOAK) for model, layouts in OF_EIGHT.items()),
    ],
)
def test_curves_agree_with_the_plain_loop(
    model: str, layouts: dict[str, list[str]], ranks: int, recipe: Path, tmp_path: Path
) -> None:
    batches = batches_of(stream_of(recipe)[0], BATCH, STEPS)
    assert all(len(labels) > BATCH for _, _, labels in batches), "no sequence has several documents"
    expected = plain_curve(str(recipe.parent / model), batches, cosine_rates(3e-4, STEPS), torch.float32)
    variants = {name: [f"model.id={recipe.parent / model}", *words] for name, words in layouts.items()}
    first, *others = on_ranks(ranks, "curves", tmp_path, 900, recipe=str(recipe), variants=variants, steps=STEPS)
    assert all(other == first for other in others), "ranks report different curves"
    for name, curve in first.items():
        loss, norm = largest_difference(curve, expected)
        print(f"{name:64} loss {loss:.1e}  norm {norm:.1e}")
        assert max(loss, norm) < LIMIT, name


Options = dict[str, tuple[list[str], Sequence[str]]]  # name → overrides, and the divisions that they are tried with
OPTIONS: Options = {
    "windows, tied head, plain loss": (["model.id=${..}/tied", "train.loss=plain"], [CONTEXT]),
    "QLoRA": (QLORA, [CONTEXT]),
    "LoRA on experts": (ON_EXPERTS, [TENSOR, EXPERTS]),
    "LoRA": (LORA, [STAGES]),
}
DIVIDED = [TENSOR, EXPERTS]
MORE_OPTIONS: Options = {
    "plain loss": (["train.loss=plain"], [*DIVIDED, STAGES]),
    "windows, tied head": (["model.id=${..}/tied"], [TENSOR, STAGES]),
    "windows, tied head, LoRA": (["model.id=${..}/tied", *LORA], [STAGES]),
    "LoRA": (LORA, [CONTEXT, *DIVIDED]),
    "QLoRA": (QLORA, [STAGES]),
    "not packed": (["data.packing=none"], [CONTEXT, *DIVIDED, STAGES]),
    "a part without labels": (["data.packing=none", "data.path=${..}/short.jsonl", ONE], [CONTEXT]),
    "one stream": (["data.packing=concat"], [CONTEXT]),
    "frozen": (["model.trainable=[layers.2]"], [CONTEXT, *DIVIDED]),
    "frozen, each stage trains": (["model.trainable=[layers.0,layers.2]"], [STAGES]),
    "Lion": (["optim.name=lion"], DIVIDED),
    "Muon": (["optim.name=muon"], [EXPERTS, STAGES]),
    "bfloat16 moments": (["optim.name=adamw_bf16"], [*DIVIDED, STAGES]),
    "8-bit state": (["optim.name=adamw_8bit"], [CONTEXT, EXPERTS, STAGES]),
    "one expert a token": (["model.config.num_experts_per_tok=1"], DIVIDED),
    "compiled": (["train.compile=true"], [CONTEXT, *DIVIDED]),
    "compiled, recomputed": (["train.compile=true", FULL], [*DIVIDED, STAGES]),
    "preferences": (PAIRS, DIVIDED),
    "preferences, LoRA": ([*PAIRS, *LORA], DIVIDED),
}


def options_that_differ(
    options: Options, recipe: Path, tmp: Path, limit: float = LIMIT, apart: float = 1e-5, **how: Any
) -> list[str]:
    """Return the options with which evaluations, curves or logits are not the same with a division as without."""
    variants: dict[str, list[str]] = {}
    for name, (words, divisions) in options.items():
        own = [word.replace("${..}", str(recipe.parent)) for word in words]
        variants |= {name: own} | {f"{name}, {each}": [*own, each] for each in divisions}
    found, wrong = on_ranks(2, "shared_rows", tmp, recipe=str(recipe), variants=variants, steps=2, **how)[0], []
    for name, divided in ((name, f"{name}, {each}") for name, (_, divisions) in options.items() for each in divisions):
        own, other = found[name], found[divided]
        if "refused" in own:
            print(f"{divided:48} {own['refused']}")
            assert other == own
            continue
        loss, norm = largest_difference(other["curve"], own["curve"])
        off = np.abs(np.array(other["logits"]) - np.array(own["logits"])).max()
        print(f"{divided:48} loss {loss:.1e}  norm {norm:.1e}  logits {off:.1e}")
        evaluated = abs(other["evaluation"] / own["evaluation"] - 1)
        if max([evaluated, *[loss, norm] * (name not in DRAWS)]) > limit or off > apart:
            wrong.append(divided)
    return wrong


@pytest.mark.parametrize("options", [OPTIONS, pytest.param(MORE_OPTIONS, marks=SOAK)], ids=["some", "more"])
def test_options_give_the_same(options: Options, recipe: Path, tmp_path: Path) -> None:
    assert not options_that_differ(options, recipe, tmp_path, compiled="aot_eager", timeout=1800)


GRADIENTS = {  # model → layouts
    "experts": {"tensor": [TENSOR_4], "experts": [EXPERTS_4, TENSOR]},
    "tied": {"four": [STAGES_4, ONE], "interleaved": [STAGES, INTERLEAVED, ONE]},
    "deep": {"four": [STAGES_4, ONE], "tensor": [STAGES, TENSOR, ONE], "interleaved": [STAGES, INTERLEAVED, ONE]},
}


@pytest.mark.parametrize("model", ["experts", "tied", pytest.param("deep", marks=SOAK)])
def test_every_gradient_and_the_export_are_those_of_one_process(model: str, recipe: Path, tmp_path: Path) -> None:
    # Adam would scale up the rounding errors of gradients that are almost zero.
    same = [f"model.id={recipe.parent / model}", "optim.name=sgd", "optim.lr=0.05"]
    for ranks, layouts in ((1, {"alone": list[str]()}), (4, GRADIENTS[model])):
        variants = {name: [*same, *words, f"output_dir={tmp_path / name}"] for name, words in layouts.items()}
        words: dict[str, Any] = {"recipe": str(recipe), "variants": variants, "steps": 2, "made": str(tmp_path)}
        on_ranks(ranks, "exports", tmp_path, **words)
    expected = torch.load(tmp_path / "alone.pt")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "export").state_dict()
    for name in GRADIENTS[model]:
        difference, worst = worst_gradient(torch.load(tmp_path / f"{name}.pt"), expected)
        assert difference < 2e-6, (name, worst)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").state_dict()
        assert max((exported[key] - weights[key]).abs().max() for key in weights) < 1e-5, name


TIED, DEEP = "model.id=${..}/tied", "model.id=${..}/deep"
RESUMES = {  # layout → another, in which its checkpoint is continued
    "tensor 4": ([TENSOR_4], [TENSOR, EXPERTS]),
    "adapters": ([TENSOR, *ON_EXPERTS], [EXPERTS_4, *ON_EXPERTS]),
    "stages": ([STAGES, ONE, TIED], [CONTEXT, TIED]),
}
MORE_RESUMES: dict[str, tuple[list[str], list[str]]] = {
    "context": ([CONTEXT], []),
    "experts": ([EXPERTS_4, TENSOR], []),
    "no division": ([], [TENSOR_4, EXPERTS_4]),
    "4 stages": ([STAGES_4, ONE, DEEP], [STAGES, ONE, DEEP]),
    "no stages": ([DEEP], [STAGES_4, ONE, DEEP]),
    "interleaved": ([STAGES, INTERLEAVED, ONE, TIED], [STAGES_4, ONE, TIED]),
    "adapters on stages": ([STAGES, ONE, DEEP, *LORA], [STAGES_4, ONE, DEEP, *LORA]),
    "adapters without stages": ([STAGES, ONE, *LORA], [TENSOR, *LORA]),
}


@pytest.mark.parametrize("layout", [*RESUMES, *(pytest.param(layout, marks=SOAK) for layout in MORE_RESUMES)])
def test_a_run_resumes_bitwise_and_in_another_layout(layout: str, recipe: Path, tmp_path: Path) -> None:
    own, other = (
        [word.replace("${..}", str(recipe.parent)) for word in (*words, f"output_dir={tmp_path / 'run'}")]
        for words in (RESUMES | MORE_RESUMES)[layout]
    )
    words: dict[str, Any] = {"recipe": str(recipe), "steps": STEPS}
    ranks, others = {"stages": (2, 2), "tensor 4": (4, 2)}.get(layout, (4, 4))
    whole = on_ranks(ranks, "save_between", tmp_path / "a", **words, overrides=own, at=2)[0]
    same = on_ranks(ranks, "resume", tmp_path / "b", **words, overrides=own)[0]
    changed = on_ranks(others, "resume", tmp_path / "c", **words, overrides=other)[0]
    assert same["first"] == 2 and same["curve"] == whole["curve"][2:]
    assert changed["samples"] == whole["samples"][2:]
    assert max(largest_difference(changed["curve"], whole["curve"][2:])) < LIMIT


# --------------------------------------------------------------------------------------------------- what is refused

REFUSED = {  # what is refused, and what the recipe says → what the message says
    "heads": (["model.config.num_attention_heads=2", CONTEXT_4], "2 query heads, which do not divide among 4 ranks"),
    "length": (["data.seq_len=66", CONTEXT_4], "data.seq_len: 66 tokens do not divide among 4 ranks"),
    "context and node": (
        ["data.seq_len=66", "parallel.context=3"],
        "parallel.context: 3 does not divide the 4 ranks of a node; use one of 1, 2, 4",
    ),
    "context and kernel": (
        ["model.attn_implementation=eager", CONTEXT],
        "parallel.context: has no effect with model.attn_implementation",
    ),
    "batch": (["train.global_batch_size=9", CONTEXT], "9 sequences do not divide over 4 ranks / parallel.context 2"),
    "heads of layers": (["model.config.num_attention_heads=2", TENSOR_4], "2 query heads, which do not divide among 4"),
    "key heads": (
        [f"model.config.{key}" for key in ("hidden_size=96", "num_attention_heads=12", "num_key_value_heads=3")]
        + [TENSOR_4],
        "k_proj has 3 heads",
    ),
    "length of layers": (["data.seq_len=66", TENSOR_4], "66 tokens do not divide among 4 ranks (parallel.tensor)"),
    "node": (["data.seq_len=66", "parallel.tensor=3"], "parallel.tensor: 3 does not divide the 4 ranks of a node"),
    "both": ([TENSOR_4, CONTEXT], "parallel.context: 2 × parallel.tensor 4 does not divide the 4 ranks of a node"),
    "kernel": (["model.attn_implementation=eager", TENSOR_4], "parallel.tensor: has no effect with model.attn_impl"),
    "rows": (["train.global_batch_size=9", TENSOR], "9 sequences do not divide over 4 ranks / parallel.tensor 2"),
    "features": (["model.config.intermediate_size=98", TENSOR_4], "mlp.gate_proj.weight has 98 results"),
    "optimizer": (["optim.name=muon", TENSOR], "not supported with optim.name: muon: use optim.name: adamw"),
    "quantised": (["adapter.kind=qlora", TENSOR], "not supported with adapter.kind: qlora: use adapter.kind: lora"),
    "units": (["fsdp.wrap=[LlamaMLP]", EXPERTS], "parallel.experts: weights that ranks divide are not supported"),
    "no experts": ([EXPERTS], "2 ranks cannot divide the experts of LlamaForCausalLM: it has no experts"),
    "experts and ranks": (["parallel.experts=3"], "parallel.experts: 3 does not divide 4 ranks; use one of 1, 2, 4"),
    "stages and ranks": (["parallel.pipeline=3"], "parallel.pipeline: 3 does not divide 4 ranks; use one of 1, 2, 4"),
    "layers": (
        [STAGES_4, "model.config.num_hidden_layers=3"],
        "a pipeline of 4 stages: it has 3 layers: use fewer stages",
    ),
    "list": ([STAGES, "parallel.stage_layers=[3,3]"], "parallel.stage_layers: LlamaForCausalLM cannot be a pipeline"),
    "short list": ([STAGES_4, "parallel.stage_layers=[3,4]"], "2 numbers of layers for 4 stages: give one for each"),
    "batch of stages": (["train.global_batch_size=9", STAGES], "9 sequences do not divide over 4 ranks / parallel.pip"),
    "odd": ([STAGES, INTERLEAVED, "train.global_batch_size=6"], "interleaved needs a multiple of 2 micro-batches"),
    "no pipeline": ([GPIPE], "parallel.schedule: has no effect without a pipeline: set parallel.pipeline"),
    "chunks": ([STAGES, "parallel.chunks=2"], "parallel.chunks"),
    "units of stages": ([STAGES, "fsdp.wrap=[LlamaMLP]"], "a pipeline is not supported with fsdp.wrap: use fsdp.wrap"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused(case: str, tmp_path: Path) -> None:
    words, message = REFUSED[case]
    deep = ["model.config.num_hidden_layers=7", *words]
    with pytest.raises(RecipeError) as refused:
        prepare_model(planned(write_recipe(tmp_path), *deep, ranks=4), 512)
    assert message in str(refused.value)


@pytest.mark.parametrize(("trained", "group"), [("layers.6", 1), ("embed_tokens", 2)])
def test_ranks_that_would_train_nothing_are_refused(trained: str, group: int, recipe: Path) -> None:
    words = [f"model.id={recipe.parent / 'deep'}", STAGES, f"model.trainable=[{trained}]"]
    with pytest.raises(RecipeError, match=f"group {group} of its ranks would train nothing"):
        prepare_model(planned(recipe, *words, ranks=2), 512)


def test_ranks_of_several_whole_nodes_can_share_rows_and_experts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__global_batch_size=12)
    plan = make_plan(load(recipe, [CONTEXT_4, EXPERTS_4]), Topology("cpu", 2, 2))
    assert (plan.ranks_of_row, plan.recipe.parallel.experts) == (4, 4)
    with pytest.raises(RecipeError, match=r"4 does not divide the 3 ranks of a node; use one of 1, 3"):
        make_plan(load(recipe, [CONTEXT_4]), Topology("cpu", 4, 3))
    with pytest.raises(RecipeError, match="4 does not divide 6 ranks; use one of 1, 3, 6"):
        make_plan(load(recipe, [EXPERTS_4]), Topology("cpu", 2, 3))


def check(plan: Plan, bare: Any) -> None:
    """Raise RecipeError if ranks cannot divide a model as the plan says."""
    if plan.ranks_of_row > 1:
        check_context(plan, bare)
    check_layers(bare, plan.recipe.parallel.tensor)
    check_experts(bare, plan.recipe.parallel.experts)
    check_stages(bare, plan.recipe.parallel)


CANNOT_SHARE = "parallel.context: 2 ranks cannot share a row: .*"
HINDERED = [  # division, architecture, and what hinders it; "": nothing
    *((CONTEXT, kind, "") for kind in ("llama", "gemma3_text", "deepseek_v3", "qwen3_moe")),
    (CONTEXT, "qwen3_next", f"{CANNOT_SHARE}what attention gets depends on more than a token and its position"),
    (CONTEXT, "bamba", f"{CANNOT_SHARE}a token sees others outside of attention"),
    *((CONTEXT, kind, f"{CANNOT_SHARE}its attention is eager") for kind in ("mamba2", "gpt_oss")),
    *(
        (TENSOR, kind, f"parallel.tensor: 2 ranks cannot divide the layers of .*{reason}")
        for kind, reason in {
            "bitnet": "transformers has no plan for it",
            "gemma3n_text": "compares its features with one another",
            "beam": "would be divided in a way that is not supported",
            "aria_text": "are transposed or have biases",
        }.items()
    ),
    *(
        (STAGES, kind, f"parallel.pipeline: .* cannot be a pipeline of 2 stages: .*{reason}")
        for kind, reason in {
            "zamba2": "its layers share weights",
            "gemma4_unified_text": "its layers get more than hidden states from one another",
            "olmo": "its decoder changes hidden states outside of its layers",
            "gemma4_text": "its decoder does not run without its layers",
            "fuyu": "it is not one decoder with a list of layers and a head",
            "big_bird": "it is not one decoder with a list of layers and a head",
            "blt": "is neither in its decoder nor in its head",
        }.items()
    ),
]


@pytest.mark.parametrize(("division", "kind", "reason"), HINDERED)
def test_an_architecture_that_cannot_be_divided_is_refused(
    division: str, kind: str, reason: str, tmp_path: Path
) -> None:
    plan = planned(write_recipe(tmp_path), division, ranks=2)
    bare = skeleton(small_config(kind), plan.recipe.model)
    with pytest.raises(RecipeError, match=reason) if reason else contextlib.nullcontext():
        check(plan, bare)


# Some gradients of these models are rounding errors at first, which Adam scales up to the size of all others.
UNSCALED = {"gemma3n_text": ["optim.name=sgd", "optim.lr=0.05"]}
DRAWS = ("phimoe",)  # its router draws random numbers in training


@pytest.mark.soak
@pytest.mark.parametrize("division", [CONTEXT, TENSOR, EXPERTS, STAGES])
def test_every_architecture_that_is_accepted_gives_the_same(division: str, recipe: Path, tmp_path: Path) -> None:
    plan, accepted = planned(recipe, division, ranks=2), Options()
    for kind in KINDS:
        config = small_config(kind)
        for each in (config, config.get_text_config()) if division == STAGES else ():
            for name in [name for name, value in vars(each).items() if "dropout" in name and isinstance(value, float)]:
                setattr(each, name, 0.0)  # each rank draws its own
        try:
            check(plan, skeleton(config, dataclasses.replace(plan.recipe.model, attn_implementation="auto")))
        except RecipeError as error:
            print(f"{kind:32} {error}")
            continue
        config.save_pretrained(tmp_path / kind)
        alone = ["data.packing=none"] if division == EXPERTS else []
        words = [f"model.id={tmp_path / kind}", "model.init=random", *alone, *UNSCALED.get(kind, [])]
        accepted[kind] = words, [division]
    print(f"{len(accepted)} of {len(KINDS)} architectures are accepted")
    assert len(accepted) > 50
    names, wrong = [*accepted], list[str]()
    for first in range(0, len(names), AT_ONCE):
        some, folder = {name: accepted[name] for name in names[first : first + AT_ONCE]}, tmp_path / f"{first}"
        wrong += options_that_differ(some, recipe, folder, limit=2e-6, apart=2e-5, timeout=3600)
    assert not wrong
