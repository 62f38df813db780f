"""Ranks that have the layers one after another (parallel.pipeline) train as one process does."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import KINDS as KINDS_OF_ALL
from architectures import small_config
from ranks import build
from reference import largest_difference, worst_gradient
from support import TINY, on_ranks, planned, write_pretrained, write_recipe
from train.test_context import LIMIT, UNSCALED, assert_layouts_agree, assert_options_agree
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3MoeConfig

from fsdptrain.config.reader import load
from fsdptrain.config.schema import Parallel
from fsdptrain.errors import RecipeError
from fsdptrain.model.pipeline import balanced, check_stages
from fsdptrain.model.skeleton import skeleton
from fsdptrain.parallel.messages import await_message
from fsdptrain.parallel.patches import collective_of
from fsdptrain.plan.pipeline import passes, step_seconds
from fsdptrain.plan.topology import topology_of_job
from fsdptrain.train.nonfinite import find_sources
from fsdptrain.train.prefetch import batches_of
from fsdptrain.train.preflight import prepare_model

STEPS, BATCH = 4, 8
AT_ONCE = 24  # architectures in one process, which keeps what they compile
TWO, FOUR, ONE = "parallel.pipeline=2", "parallel.pipeline=4", "train.micro_batch_size=1"
TENSOR, CONTEXT, EXPERTS = "parallel.tensor=2", "parallel.context=2", "parallel.experts=2"
GPIPE, INTERLEAVED = "parallel.schedule=gpipe", "parallel.schedule=interleaved"
FULL, HELD = "fsdp.activation_checkpointing=full", "fsdp.accumulation=hold"
LORA = ["adapter.kind=lora", "adapter.r=3", "export.adapter=merged"]
LAYOUTS = {  # of four ranks; the model has seven layers
    "2 × FSDP 2": [TWO, ONE],
    "4, recomputed": [FOUR, ONE, FULL],
    "2 × tensor 2, held": [TWO, TENSOR, HELD],
    "interleaved": [TWO, INTERLEAVED, ONE],
}
MORE_LAYOUTS = {
    "GPipe": [TWO, GPIPE, ONE],
    "GPipe of 4, layers as the recipe says": [FOUR, GPIPE, ONE, "parallel.stage_layers=[1,3,2,1]"],
    "interleaved, three stages a rank": [TWO, INTERLEAVED, "parallel.chunks=3", ONE],
    "2 × context 2": [TWO, CONTEXT],
    "2 × experts 2": [TWO, EXPERTS, ONE],
    "2, one micro-batch": [TWO, "train.micro_batch_size=4"],
    "2, recomputed selectively": [TWO, ONE, "fsdp.activation_checkpointing=selective"],
    "2, SHARD_GRAD_OP": [TWO, ONE, "fsdp.strategy=SHARD_GRAD_OP"],
    "2, HYBRID_SHARD": [TWO, ONE, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=1"],
    "2, NO_SHARD": [TWO, ONE, "fsdp.strategy=NO_SHARD"],
    "2, shards held": [TWO, ONE, "fsdp.strategy=NO_SHARD", "fsdp.accumulation=hold_shards"],
    "2, offloaded": [TWO, ONE, "fsdp.cpu_offload=true"],
    "4, kept in host memory": [FOUR, ONE, "fsdp.activation_checkpointing={kind: full, offload: true}"],
}
LAYOUTS_OF_EIGHT = {
    "2 × FSDP 2 × tensor 2": [TWO, TENSOR, ONE],
    "4 × tensor 2, recomputed": [FOUR, TENSOR, ONE, FULL],
    "2 × context 2 × tensor 2": [TWO, TENSOR, CONTEXT, ONE],
    "2 × experts 4": [TWO, "parallel.experts=4", ONE],
    "2 × tensor 2, interleaved": [TWO, TENSOR, INTERLEAVED, ONE],
}
OPTIONS = {"LoRA": LORA}  # of two ranks
MORE_OPTIONS = {
    "plain loss": ["train.loss=plain"],
    "windows, tied head": ["model.id=${..}/tied"],
    "windows, tied head, LoRA": ["model.id=${..}/tied", *LORA],
    "QLoRA": ["adapter.kind=qlora", *LORA[1:]],
    "not packed": ["data.packing=none"],
    "frozen": ["model.trainable=[layers.1,layers.5]"],
    "bfloat16 moments": ["optim.name=adamw_bf16"],
    "Muon": ["optim.name=muon"],
    "8-bit state": ["optim.name=adamw_8bit"],
    "compiled, recomputed": ["train.compile=true", FULL],
}
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random mixture of experts with seven layers, on packed documents."""
    tmp = tmp_path_factory.mktemp("pipeline")
    layers = {**TINY, "num_hidden_layers": 7}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    recipe = write_pretrained(
        tmp, Qwen3MoeConfig(**layers, **experts, head_dim=16), data__eval={"fraction": 0.1}, train__steps=STEPS,
        train__global_batch_size=BATCH, train__micro_batch_size=2,
    )  # fmt: skip
    mistral = MistralConfig(**layers, sliding_window=20, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(mistral).save_pretrained(tmp / "tied")
    return recipe


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=SOAK)], ids=["some", "more"])
@pytest.mark.parametrize("model", [pytest.param("model", marks=SOAK), "tied"])
def test_curves_agree_with_the_plain_loop(
    model: str, layouts: dict[str, list[str]], recipe: Path, tmp_path: Path
) -> None:
    if model == "tied":
        layouts = {name: words for name, words in layouts.items() if not any("experts" in word for word in words)}
    assert_layouts_agree(layouts, recipe, tmp_path, model=model)


@pytest.mark.soak
def test_eight_ranks_are_a_pipeline(recipe: Path, tmp_path: Path) -> None:
    assert_layouts_agree(LAYOUTS_OF_EIGHT, recipe, tmp_path, size=8, timeout=900)


@pytest.mark.parametrize("options", [OPTIONS, pytest.param(MORE_OPTIONS, marks=SOAK)], ids=["some", "more"])
def test_options_give_the_same(options: dict[str, list[str]], recipe: Path, tmp_path: Path) -> None:
    assert_options_agree(options, recipe, tmp_path, compiled="aot_eager", share=TWO)


@pytest.mark.parametrize("model", [pytest.param("model", marks=SOAK), "tied"])
def test_every_gradient_and_the_export_are_those_of_one_process(model: str, recipe: Path, tmp_path: Path) -> None:
    variants = {"four": [FOUR, ONE], "two": [TWO, TENSOR, ONE], "interleaved": [TWO, INTERLEAVED, ONE]}
    # Adam would scale up the rounding errors of gradients that are almost zero.
    same, words = [f"model.id={recipe.parent / model}", "optim.name=sgd", "optim.lr=0.05"], {"recipe": str(recipe)}
    alone = {"alone": [*same, f"output_dir={tmp_path / 'alone'}"]}
    on_ranks(1, "written_gradients", tmp_path, **words, variants=alone, made=str(tmp_path))
    on_ranks(1, "exports", tmp_path, **words, variants=alone, steps=2)
    staged = {name: [*same, *overrides, f"output_dir={tmp_path / name}"] for name, overrides in variants.items()}
    on_ranks(4, "written_gradients", tmp_path, **words, variants=staged, made=str(tmp_path))
    on_ranks(4, "exports", tmp_path, **words, variants=staged, steps=2)
    expected = torch.load(tmp_path / "alone.pt")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "export").state_dict()
    for name in variants:
        found = torch.load(tmp_path / f"{name}.pt")
        assert found.keys() == expected.keys(), name
        difference, worst = worst_gradient(found, expected)
        assert difference < 2e-6, (name, worst)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").state_dict()
        assert max((exported[key] - weights[key]).abs().max() for key in weights) < 1e-5, name


TIED = "model.id=${..}/tied"
RESUMES = {  # layout → others, in which its checkpoint is continued
    "4 stages": ([FOUR, ONE], [[TWO, ONE], []]),
}
MORE_RESUMES = {
    "none": ([], [[FOUR, ONE]]),
    "interleaved, tied": ([TWO, INTERLEAVED, ONE, TIED], [[FOUR, ONE, TIED]]),
    "adapters": ([TWO, ONE, *LORA], [[FOUR, ONE, *LORA], [TENSOR, *LORA]]),
}


@pytest.mark.parametrize("layout", [*RESUMES, *(pytest.param(layout, marks=SOAK) for layout in MORE_RESUMES)])
def test_a_run_resumes_bitwise_and_with_other_stages(layout: str, recipe: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"recipe": str(recipe), "steps": STEPS}
    own, others = (RESUMES | MORE_RESUMES)[layout]
    own, *changed = [[word.replace("${..}", str(recipe.parent)) for word in each] for each in (own, *others)]
    folder = f"output_dir={tmp_path / 'run'}"
    whole = on_ranks(4, "save_between", tmp_path / "a", **words, overrides=[*own, folder], at=2)[0]
    same = on_ranks(4, "resume", tmp_path / "b", **words, overrides=[*own, folder])[0]
    assert same["first"] == 2 and same["curve"] == whole["curve"][2:]
    for number, other in enumerate(changed):
        found = on_ranks(4, "resume", tmp_path / f"c{number}", **words, overrides=[*other, folder])[0]
        assert found["samples"] == whole["samples"][2:]
        assert max(largest_difference(found["curve"], whole["curve"][2:])) < LIMIT


# -------------------------------------------------------------------------------------------------- what is reported


def spoilt(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Make the output of layer 5 not finite, then the gradient there, in the second micro-batch; return the reports."""
    run = build(recipe, overrides)
    batches = batches_of(run.plan, run.stream, 0, run.world.rank)
    layer, found = run.engine.model.get_submodule("model.layers.5"), dict[str, Any]()
    own = next(layer.parameters(), None) is not None  # else another rank has it
    spoils = {"forward": lambda out: out * torch.nan, "backward": lambda out: out + (out - out.detach()).sqrt()}
    for name, spoil in spoils.items():
        passed = itertools.count()

        def hook(
            _layer: Any, _inputs: Any, out: torch.Tensor, passed: Any = passed, spoil: Any = spoil
        ) -> torch.Tensor | None:
            return spoil(out) if next(passed) == 1 else None

        handle = layer.register_forward_hook(hook) if own else None
        found[name] = find_sources(run.engine, 0, batches, 100)
        if handle:
            handle.remove()
    found["again"] = find_sources(run.engine, 0, batches, 100)
    return found


def test_a_report_on_a_nan_names_rank_and_layer(recipe: Path, tmp_path: Path) -> None:
    [*ranks] = on_ranks(2, spoilt, tmp_path, recipe=str(recipe), overrides=[TWO, ONE])
    layer = "model.layers.5"
    for found in ranks:
        [forward], [backward] = found["forward"], found["backward"]
        assert forward == [1, 1, f"the loss is nan, first in the output of {layer}"]
        assert backward[:2] == [1, 1] and re.match(rf"the gradient of {layer}\.", backward[2])
        assert found["again"] == []


def test_a_report_on_a_nan_names_the_stages_of_the_rank(tmp_path: Path) -> None:
    words: dict[str, list[str]] = {" (stage 2 of 2)": [TWO], " (stages 2, 4 of 4)": [TWO, INTERLEAVED], "": []}
    for text, overrides in words.items():
        assert planned(write_recipe(tmp_path), *overrides, ranks=4).stages_text(3) == text


def test_as_many_ranks_start_as_a_batch_has_work_for(tmp_path: Path) -> None:
    recipe = load(write_recipe(tmp_path), [TWO, "train.global_batch_size=2", ONE, "launch.nproc_per_node=auto"]).recipe
    assert topology_of_job(recipe, 1, 8).nproc_per_node == 4


def test_a_report_on_a_hang_names_what_is_waited_for() -> None:
    found = list[str | None]()
    work: Any = SimpleNamespace(wait=lambda: found.append(collective_of(sys._getframe(1))))
    await_message(work, "hidden states of micro-batch 3 from rank 0")
    assert found == ["the pipeline, for hidden states of micro-batch 3 from rank 0"]


# ------------------------------------------------------------------------------------------------------- the schedules

SCHEDULES = [
    Parallel(pipeline=ranks, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    for ranks in (1, 2, 3, 4, 8)
    for schedule, chunks in (("1f1b", None), ("gpipe", None), ("interleaved", 2), ("interleaved", 3))
]


@pytest.mark.parametrize("parallel", SCHEDULES, ids=str)
def test_no_rank_waits_for_ever_and_the_bubble_is_that_of_the_papers(parallel: Parallel) -> None:
    ranks, chunks = parallel.pipeline, parallel.stages_of_rank
    for rounds in range(1, 7):
        micro_batches = ranks * rounds
        for place in range(ranks):
            order = passes(parallel, place, micro_batches)
            assert len({*order}) == len(order) == 2 * chunks * micro_batches
            for each in order:  # backward comes after forward
                assert each.forward or order.index(each) > order.index(each._replace(forward=True))
        even = {True: [1.0] * parallel.stages, False: [2.0] * parallel.stages}
        work = 3.0 * chunks * micro_batches
        # (P - 1) / (M + P - 1) of the step; of interleaved stages, (P - 1) / (M · chunks + P - 1)
        assert step_seconds(parallel, even, micro_batches) == pytest.approx(work + 3.0 * (ranks - 1))
        uneven = {way: [1.0 + stage % 3 for stage in range(parallel.stages)] for way in (True, False)}
        slowest = max(sum(uneven[True][place::ranks]) for place in range(ranks))
        assert step_seconds(parallel, uneven, micro_batches) >= 2 * micro_batches * slowest
    if parallel.schedule != "interleaved":  # any number of micro-batches
        for micro_batches in range(1, 2 * ranks):
            step_seconds(parallel, {True: [1.0] * ranks, False: [2.0] * ranks}, micro_batches)


@pytest.mark.parametrize("place", range(4))
def test_1f1b_keeps_the_activations_of_few_micro_batches(place: int) -> None:
    kept, most = 0, 0
    for each in passes(Parallel(pipeline=4), place, 32):
        kept += 1 if each.forward else -1
        most = max(most, kept)
    assert most == 4 - place


@pytest.mark.parametrize("head", [0, 1, 5, 30])
def test_layers_are_balanced(head: int) -> None:
    costs = [3, 3, 1, 1, 2, 5, 2, 1]
    for stages in range(1, 9):
        counts = balanced(costs, head, stages)
        assert sum(counts) == 8 and min(counts) >= 1
        every = [
            [*(b - a for a, b in itertools.pairwise((0, *cuts, 8)))]
            for cuts in itertools.combinations(range(1, 8), stages - 1)
        ]
        assert longest(counts, costs, head) == min(longest(each, costs, head) for each in every)


def longest(counts: list[int], costs: list[int], head: int) -> int:
    ends = [*itertools.accumulate(counts)]
    times = [sum(costs[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    return max([*times[:-1], times[-1] + head])


# --------------------------------------------------------------------------------------------------- what is refused

SEVEN = "model.config.num_hidden_layers=7"
REFUSED = {  # what the recipe says → what the message says
    "ranks": (["parallel.pipeline=3"], "parallel.pipeline: 3 does not divide 4 ranks; use one of 1, 2, 4"),
    "layers": ([FOUR, "model.config.num_hidden_layers=3"], "a pipeline of 4 stages: it has 3 layers: use fewer stages"),
    "list": (
        [TWO, SEVEN, "parallel.stage_layers=[3,3]"],
        "parallel.stage_layers: LlamaForCausalLM cannot be a pipeline",
    ),
    "short list": ([FOUR, SEVEN, "parallel.stage_layers=[3,4]"], "2 numbers of layers for 4 stages: give one for each"),
    "batch": (["train.global_batch_size=9", TWO], "9 sequences do not divide over 4 ranks / parallel.pipeline 2"),
    "odd": ([TWO, INTERLEAVED, "train.global_batch_size=6", SEVEN], "interleaved needs a multiple of 2 micro-batches"),
    "no pipeline": ([GPIPE], "parallel.schedule: has no effect without a pipeline: set parallel.pipeline"),
    "chunks": ([TWO, "parallel.chunks=2"], "parallel.chunks"),
    "units": ([TWO, "fsdp.wrap=[LlamaMLP]"], "a pipeline is not supported with fsdp.wrap: use fsdp.wrap: auto"),
}
OTHERS = {  # architecture → what hinders a pipeline
    "zamba2": "its layers share weights",
    "gemma4_unified_text": "its layers get more than hidden states from one another",
    "olmo": "its decoder changes hidden states outside of its layers",
    "gemma4_text": "its decoder does not run without its layers",
    "fuyu": "it is not one decoder with a list of layers and a head",
    "big_bird": "it is not one decoder with a list of layers and a head",
    "blt": "is neither in its decoder nor in its head",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_pipeline_is_refused(case: str, tmp_path: Path) -> None:
    words, message = REFUSED[case]
    with pytest.raises(RecipeError) as refused:
        prepare_model(planned(write_recipe(tmp_path), *words, ranks=4), 512)
    assert message in str(refused.value)


@pytest.mark.parametrize(("trained", "group"), [("layers.6", 1), ("embed_tokens", 2)])
def test_ranks_that_would_train_nothing_are_refused(trained: str, group: int, recipe: Path) -> None:
    with pytest.raises(RecipeError, match=f"group {group} of its ranks would train nothing"):
        prepare_model(planned(recipe, TWO, f"model.trainable=[{trained}]", ranks=2), 512)


@pytest.mark.parametrize("kind", OTHERS)
def test_an_architecture_that_cannot_be_a_pipeline_is_refused(kind: str, tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), TWO, ranks=2)
    with pytest.raises(RecipeError, match=f"parallel.pipeline: .* cannot be a pipeline of 2 stages: .*{OTHERS[kind]}"):
        check_stages(skeleton(small_config(kind), plan.recipe.model), plan.recipe.parallel)


@pytest.mark.soak
def test_every_architecture_that_is_accepted_gives_the_same(recipe: Path, tmp_path: Path) -> None:
    plan, accepted = planned(recipe, TWO, ranks=2), dict[str, list[str]]()
    for kind in KINDS_OF_ALL:
        try:
            config = small_config(kind)
            for name in [
                name for name, value in vars(config).items() if "dropout" in name and isinstance(value, float)
            ]:
                setattr(config, name, 0.0)  # each rank draws its own
            bare = skeleton(config, dataclasses.replace(plan.recipe.model, attn_implementation="auto"))
            check_stages(bare, plan.recipe.parallel)
            config.save_pretrained(tmp_path / kind)
            accepted[kind] = [f"model.id={tmp_path / kind}", "model.init=random", *UNSCALED.get(kind, [])]
        except RecipeError as error:
            print(f"{kind:32} {error}")
    print(f"{len(accepted)} of {len(KINDS_OF_ALL)} architectures are accepted")
    assert len(accepted) > 50
    names = [*accepted]
    for first in range(0, len(names), AT_ONCE):
        some, folder = {name: accepted[name] for name in names[first : first + AT_ONCE]}, tmp_path / f"{first}"
        folder.mkdir()
        assert_options_agree(some, recipe, folder, limit=2e-6, apart=2e-5, timeout=3600, share=TWO)
