"""Ranks that share rows (parallel.context) train as ranks with rows of their own, whatever else the recipe sets."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from architectures import KINDS as KINDS_OF_ALL
from architectures import small_config
from reference import batches_of, cosine_rates, largest_difference, plain_curve, stream_of
from support import TINY, on_ranks, planned, write_pretrained, write_recipe
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.model.attention import check_context
from fsdptrain.model.exchange import exchanged
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.varlen import all_to_all
from fsdptrain.parallel.patches import collective_of
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.train import trainer
from fsdptrain.train.preflight import prepare_model

STEPS, BATCH = 4, 8
LIMIT = 1e-6  # relative, in float32
TWO, FOUR = "parallel.context=2", "parallel.context=4"
LAYOUTS = {  # of four ranks: the models have four query heads and two key heads
    "4, more than key heads; recomputed selectively": [FOUR, "fsdp.activation_checkpointing=selective"],
    "2, accumulated": [TWO, "fsdp.accumulation=hold"],
}
MORE_LAYOUTS = {
    "2, recomputed": [TWO, "fsdp.activation_checkpointing=full"],
    "2, SHARD_GRAD_OP": [TWO, "fsdp.strategy=SHARD_GRAD_OP"],
    "2, HYBRID_SHARD": [TWO, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"],
    "4, HYBRID_SHARD": [FOUR, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"],
    "2, NO_SHARD": [TWO, "fsdp.strategy=NO_SHARD"],
    "4, offloaded": [FOUR, "fsdp.cpu_offload=true"],
}
ADAPTER = ["adapter.r=3", "export.adapter=merged"]
OPTIONS = {  # of two ranks
    "windows, tied head, plain loss": ["model.id=${..}/mistral", "train.loss=plain"],
    "QLoRA": ["adapter.kind=qlora", *ADAPTER],
}
MORE_OPTIONS = {
    "LoRA": ["adapter.kind=lora", *ADAPTER],
    "not packed": ["data.packing=none"],
    "a part without labels": ["data.packing=none", "data.path=${..}/short.jsonl", "train.micro_batch_size=1"],
    "one stream": ["data.packing=concat"],
    "frozen": ["model.trainable=[layers.2]"],
    "8-bit state": ["optim.name=adamw_8bit"],
    "compiled": ["train.compile=true"],
}
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random Qwen3, whose layers norm queries and keys, on packed documents."""
    tmp = tmp_path_factory.mktemp("context")
    recipe = write_pretrained(
        tmp, Qwen3Config(**TINY, head_dim=16), data__eval={"fraction": 0.1}, train__steps=STEPS,
        train__global_batch_size=BATCH, train__micro_batch_size=2,
    )  # fmt: skip
    many = Qwen3Config(**TINY | {"num_attention_heads": 8}, head_dim=8)
    AutoModelForCausalLM.from_config(many).save_pretrained(tmp / "many heads")
    (tmp / "short.jsonl").write_text("".join(f'{{"text": "Hear row {n}."}}\n' for n in range(80)))
    mistral = MistralConfig(**TINY, sliding_window=20, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(mistral).save_pretrained(tmp / "mistral")
    return recipe


def assert_layouts_agree(
    variants: dict[str, list[str]], recipe: Path, tmp: Path, size: int = 4, model: str = "model", **how: Any
) -> None:
    """Assert that `size` ranks in each of these layouts have the curve of a plain loop."""
    batches = batches_of(stream_of(recipe)[0], BATCH, STEPS)
    assert all(len(labels) > BATCH for _, _, labels in batches), "no sequence has several documents"
    expected = plain_curve(str(recipe.parent / model), batches, cosine_rates(3e-4, STEPS), torch.float32)
    variants = {name: [f"model.id={recipe.parent / model}", *words] for name, words in variants.items()}
    ranks = on_ranks(size, "curves", tmp, recipe=str(recipe), variants=variants, steps=STEPS, **how)
    assert all(other == ranks[0] for other in ranks), "ranks report different curves"
    for name, curve in ranks[0].items():
        loss, norm = largest_difference(curve, expected)
        print(f"{name:48} loss {loss:.1e}  norm {norm:.1e}")
        assert max(loss, norm) < LIMIT, name


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=SOAK)], ids=["some", "more"])
def test_curves_agree_with_the_plain_loop(layouts: dict[str, list[str]], recipe: Path, tmp_path: Path) -> None:
    assert_layouts_agree(layouts, recipe, tmp_path)


@pytest.mark.soak
def test_eight_ranks_share_rows(recipe: Path, tmp_path: Path) -> None:
    kept = "fsdp.activation_checkpointing={kind: full, offload: true, keep_attention: true}"
    layouts = {f"{n} of 8": [f"parallel.context={n}", "train.micro_batch_size=1"] for n in (1, 2, 4, 8)}
    layouts |= {"8 of 8, offloaded": ["parallel.context=8", kept], "4 of 8, offloaded": [FOUR, kept]}
    assert_layouts_agree(layouts, recipe, tmp_path, size=8, model="many heads", timeout=900)


def assert_options_agree(
    options: dict[str, list[str]],
    recipe: Path,
    tmp: Path,
    limit: float = LIMIT,
    share: str = TWO,
    apart: float = 1e-5,
    **how: Any,
) -> None:
    """Assert that with each option evaluations, curves and logits are the same with shared rows as without."""
    variants = {}
    for name, words in options.items():
        words = [word.replace("${..}", str(recipe.parent)) for word in words]
        variants |= {name: words, f"{name}, shared": [*words, share]}
    wrong = list[str]()
    found = on_ranks(2, "shared_rows", tmp, recipe=str(recipe), variants=variants, steps=2, **how)[0]
    for name in options:
        if "refused" in found[name]:
            print(f"{name:32} {found[name]['refused']}")
            assert found[name] == found[f"{name}, shared"]
            continue
        own, shared = found[name], found[f"{name}, shared"]
        loss, norm = largest_difference(shared["curve"], own["curve"])
        off = np.abs(np.array(shared["logits"]) - np.array(own["logits"])).max()
        print(f"{name:32} loss {loss:.1e}  norm {norm:.1e}  logits {off:.1e}")
        evaluated = abs(shared["evaluation"] / own["evaluation"] - 1)
        if max([evaluated, *[loss, norm] * (name not in DRAWS)]) > limit or off > apart:
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("options", [OPTIONS, pytest.param(MORE_OPTIONS, marks=SOAK)], ids=["some", "more"])
def test_options_give_the_same_with_shared_rows(options: dict[str, list[str]], recipe: Path, tmp_path: Path) -> None:
    assert_options_agree(options, recipe, tmp_path, compiled="aot_eager")


def test_a_run_resumes_bitwise_and_with_other_ranks_in_a_row(recipe: Path, tmp_path: Path) -> None:
    words: dict[str, Any] = {"recipe": str(recipe), "steps": STEPS}
    folder = f"output_dir={tmp_path / 'run'}"
    whole = on_ranks(2, "save_between", tmp_path / "a", **words, overrides=[TWO, folder], at=2)[0]
    same = on_ranks(2, "resume", tmp_path / "b", **words, overrides=[TWO, folder])[0]
    other = on_ranks(2, "resume", tmp_path / "c", **words, overrides=[folder])[0]
    assert same["first"] == 2 and same["curve"] == whole["curve"][2:]
    assert other["samples"] == whole["samples"][2:]
    assert max(largest_difference(other["curve"], whole["curve"][2:])) < LIMIT


def test_a_report_on_a_hang_names_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[str | None]()
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: found.append(collective_of(sys._getframe(1))))
    exchange = functools.partial(all_to_all, group=dist.GroupMember.NON_GROUP_MEMBER)
    exchanged(torch.ones(2, 3, requires_grad=True), exchange, exchange).sum().backward()
    assert found == ["all-to-all of parallel.context"] * 2


def test_a_report_on_a_nan_names_the_ranks_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(write_recipe(tmp_path), TWO, ranks=4)
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


KINDS = {  # kind → what hinders ranks to share its rows
    "llama": "", "gemma3_text": "", "deepseek_v3": "", "qwen3_moe": "",
    "qwen3_next": "what attention gets depends on more than a token and its position",
    "bamba": "a token sees others outside of attention",
    "mamba2": "its attention is eager", "gpt_oss": "its attention is eager",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_is_refused_if_tokens_see_one_another_outside_of_attention(kind: str, tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), TWO, ranks=2)
    bare = skeleton(small_config(kind), plan.recipe.model)
    if KINDS[kind]:
        with pytest.raises(RecipeError, match=f"parallel.context: 2 ranks cannot share a row: .*{KINDS[kind]}"):
            check_context(plan, bare)
    else:
        check_context(plan, bare)


# Some gradients of these models are rounding errors at first, which Adam scales up to the size of all others.
DRAWS = ("phimoe",)  # its router draws random numbers in training
UNSCALED = {"gemma3n_text": ["optim.name=sgd", "optim.lr=0.05"]}


@pytest.mark.soak
def test_every_architecture_that_is_accepted_gives_the_same_with_shared_rows(recipe: Path, tmp_path: Path) -> None:
    plan, accepted = planned(recipe, TWO, ranks=2), dict[str, list[str]]()
    for kind in KINDS_OF_ALL:
        with contextlib.suppress(RecipeError):
            config = small_config(kind)
            check_context(plan, skeleton(config, plan.recipe.model))
            config.save_pretrained(tmp_path / kind)
            accepted[kind] = [f"model.id={tmp_path / kind}", "model.init=random", *UNSCALED.get(kind, [])]
    print(f"{len(accepted)} of {len(KINDS_OF_ALL)} architectures are accepted")
    assert len(accepted) > 60
    # On some processors the norms of two with experts, flex_olmo and glm4_moe_lite, are 1.2e-6 apart.
    assert_options_agree(accepted, recipe, tmp_path, limit=2e-6, timeout=3600)


REFUSED = {  # what the recipe says → what the message says
    "heads": (["model.config.num_attention_heads=2", FOUR], "2 query heads, which do not divide among 4 ranks"),
    "length": (["data.seq_len=66", FOUR], "data.seq_len: 66 tokens do not divide among 4 ranks"),
    "node": (
        ["data.seq_len=66", "parallel.context=3"],
        "parallel.context: 3 does not divide the 4 ranks of a node; use one of 1, 2, 4",
    ),
    "kernel": (
        ["model.attn_implementation=eager", TWO],
        "parallel.context: has no effect with model.attn_implementation",
    ),
    "batch": (["train.global_batch_size=9", TWO], "9 sequences do not divide over 4 ranks / parallel.context 2"),
}


def test_ranks_of_several_whole_nodes_can_share_a_row(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert make_plan(load(recipe, [FOUR]), Topology("cpu", 2, 2)).ranks_of_row == 4
    with pytest.raises(RecipeError, match=r"4 does not divide the 3 ranks of a node; use one of 1, 3"):
        make_plan(load(recipe, [FOUR]), Topology("cpu", 4, 3))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_share_rows_is_refused(case: str, tmp_path: Path) -> None:
    words, message = REFUSED[case]
    with pytest.raises(RecipeError) as refused:
        prepare_model(planned(write_recipe(tmp_path), *words, ranks=4), 512)
    assert message in str(refused.value)
