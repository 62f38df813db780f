"""The numerical contract: every strategy, world size and accumulation split gives the curve of a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import build
from reference import batches_of, cosine_rates, largest_difference, plain_curve, stream_of
from support import STRATEGIES, TINY, events, on_ranks, strategies, write_pretrained, write_recipe
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS, BATCH = 20, 16
LIMITS = {"float32": 1e-5, "bfloat16": 2e-3}
FEWER = dict.fromkeys(LIMITS, 4)  # the soak test makes all steps
Curve = Callable[[str, str, int], list[list[float]]]  # of a model, in a dtype, with so many steps


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random Llama, with several documents in every sequence."""
    tmp = tmp_path_factory.mktemp("numerics")
    recipe = write_pretrained(tmp, LlamaConfig(**TINY), train__steps=STEPS, train__global_batch_size=BATCH)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY, tie_word_embeddings=True)).save_pretrained(tmp / "tied")
    return recipe


@pytest.fixture(scope="module")
def reference(recipe: Path) -> Curve:
    """Return the function that computes the curve of the plain loop, over documents that are not packed."""
    batches = batches_of(stream_of(recipe)[0], BATCH, STEPS)
    assert all(len(labels) > BATCH for _, _, labels in batches), "no sequence has several documents"
    rates = cosine_rates(3e-4, STEPS)
    torch.set_num_threads(1)

    @functools.cache
    def curve(model: str, dtype: str, steps: int) -> list[list[float]]:
        folder = str(recipe.parent / model)
        return plain_curve(folder, batches[:steps], rates[:steps], getattr(torch, dtype))

    return curve


def variant(world: int, strategy: str, accumulation: int, hold: bool, dtype: str) -> tuple[str, list[str]]:
    overrides = [
        *strategies(world)[strategy], f"fsdp.mixed_precision.param_dtype={dtype}",
        f"train.micro_batch_size={BATCH // (world * accumulation)}",
        f"fsdp.accumulation={'hold' if hold else 'reduce'}",
    ]  # fmt: skip
    return f"{strategy} × {world} / {accumulation}{' held' if hold else ''} {dtype}", overrides


def all_variants(world: int) -> dict[str, list[str]]:
    """Return every strategy that this world size allows, with accumulation 1, 2 (held) and 4, in both dtypes."""
    return dict(variant(world, s, a, a == 2, dtype) for dtype in LIMITS for s in strategies(world) for a in (1, 2, 4))


def some_variants(world: int, recipe: Path) -> dict[str, list[str]]:
    """Return one variant of each strategy in float32 with held gradients (on one rank NO_SHARD), FULL_SHARD in bf16."""
    chosen = {1: ("NO_SHARD",), 2: STRATEGIES}[world]
    names = [f"{strategy} × {world} / 2 held float32" for strategy in chosen]
    made = {name: overrides for name, overrides in all_variants(world).items() if name in names}
    made |= dict([variant(world, "FULL_SHARD", 4, False, "bfloat16")])
    return made | (of_two_ranks(recipe) if world == 2 else {})


def of_two_ranks(recipe: Path) -> dict[str, list[str]]:
    """Return variants that hold shards of gradients, between copies and on their way to the host, and of one bucket.

    Also of the plain loss (the others use the chunked one), and of tied weights, which belong to the root unit.
    """
    held = "fsdp.accumulation=hold_shards"
    _, bucket = variant(2, "NO_SHARD", 4, False, "bfloat16")
    _, copies = variant(2, "HYBRID_SHARD", 4, False, "float32")
    _, offloaded = variant(2, "FULL_SHARD", 4, False, "bfloat16")
    _, plain = variant(2, "FULL_SHARD", 2, True, "float32")
    _, tied = variant(2, "FULL_SHARD", 2, True, "bfloat16")
    return {
        "HYBRID_SHARD × 2 / 4 shards held float32": [*copies, "fsdp.shard_size=1", held],
        "FULL_SHARD × 2 / 4 shards held, offloaded bfloat16": [*offloaded, "fsdp.cpu_offload=true", held],
        "NO_SHARD × 2 / 4 in one bucket bfloat16": [*bucket, "fsdp.bucket_cap_mb=100"],
        "plain FULL_SHARD × 2 / 2 held float32": [*plain, "train.loss=plain"],
        "tied FULL_SHARD × 2 / 2 held bfloat16": [*tied, f"model.id={recipe.parent / 'tied'}"],
    }


def assert_curves_agree(
    world: int, variants: dict[str, list[str]], recipe: Path, reference: Curve, tmp: Path, steps: dict[str, int] = FEWER
) -> None:
    wrong = []
    for dtype, limit in LIMITS.items():
        chosen = {name: overrides for name, overrides in variants.items() if name.endswith(dtype)}
        words = {"recipe": str(recipe), "variants": chosen, "steps": steps[dtype]}
        ranks = on_ranks(world, "curves", tmp / dtype, **words)
        assert all(other == ranks[0] for other in ranks), "ranks report different curves"
        for name, curve in ranks[0].items():
            expected = reference("tied" if "tied" in name else "model", dtype, steps[dtype])
            loss, norm = largest_difference(curve, expected)
            print(f"{name:44} loss {loss:.1e}  norm {norm:.1e}")
            if max(loss, norm) > limit:
                wrong.append((name, loss, norm))
    assert not wrong


# 4 ranks: in test_resume, and in the soak test below.
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_curves_agree_with_the_plain_loop(world: int, recipe: Path, reference: Curve, tmp_path: Path) -> None:
    assert_curves_agree(world, some_variants(world, recipe), recipe, reference, tmp_path)


def test_dropout_has_other_masks_on_every_rank_and_step_and_none_in_evaluations(tmp_path: Path) -> None:
    """The same micro-batch everywhere: only the masks differ."""
    found = []
    for seed in (1, 2):
        words = {"seed": seed, "model__config": {"model_type": "llama", **TINY, "attention_dropout": 0.5}}
        recipe = write_recipe(tmp_path, output_dir=str(tmp_path / str(seed)), **words)
        found += on_ranks(2, dropout, tmp_path / f"ranks-{seed}", recipe=str(recipe))
    for rank in found:
        first, second, again = rank["train"]
        assert first == again != second
        assert rank["evaluations"][0] == rank["evaluations"][1] and rank["logits"]
    for of_all in ("train", "drawn"):
        assert len({number for rank in found for number in rank[of_all]}) == 2 * len(found), "two masks are the same"


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_curve_agrees_with_the_plain_loop(world: int, recipe: Path, reference: Curve, tmp_path: Path) -> None:
    variants = all_variants(world) | (of_two_ranks(recipe) if world == 2 else {})
    assert_curves_agree(world, variants, recipe, reference, tmp_path, dict.fromkeys(LIMITS, STEPS))


def test_mfu_counts_the_pairs_of_tokens_within_documents(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=1, launch__nproc_per_node=1)
    (found,) = on_ranks(1, flops, tmp_path / "rank", recipe=str(recipe), overrides=["fsdp.strategy=NO_SHARD"])
    corpus = stream_of(recipe)[2]
    pairs = 0
    for number in range(len(corpus)):
        pieces = corpus.pieces[corpus.offsets[number] : corpus.offsets[number + 1]]
        documents = [document for document, (_, length, _) in enumerate(pieces) for _ in range(length)]
        pairs += sum(other == document for document in documents for other in documents)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96  # queries and output, keys and values, the MLP
    products, rows = 6 * (3 * layer + 512 * 64) * 64, 8
    assert found == [pytest.approx(rows * (products + 12 * 3 * 64 * pairs / len(corpus)))]
    assert pairs < 0.9 * 64 * 64 * len(corpus)  # else there is nothing to see


# --- on every rank -------------------------------------------------------------------------------------------------


def flops(recipe: str, overrides: list[str]) -> list[float]:
    """Train to the end; return the FLOPs of each step that its MFU counts."""
    run = build(recipe, overrides)
    run.train()
    return [event["mfu"] * event["step_s"] * run.peak_flops for event in events(run.session.rundir.root, "step")]


def dropout(recipe: str) -> dict[str, Any]:
    """Return losses of one micro-batch, the same on all ranks: in training steps 0, 1 and 0, and in evaluations.

    `logits` says whether those that an export is compared with are the same when they are computed again; `drawn` are
    the first random numbers of steps 0 and 1.
    """
    run = build(recipe, [])
    batch = run.stream.batch([0])
    train = [run.engine.accumulate(step, [batch], 1).item() for step in (0, 1)]
    evaluations = [(run.engine.evaluate(run.stream.corpus, [0, 1]) or ())[:2] for _ in range(2)]
    logits = [run.sample().logits for _ in range(2)]
    train.append(run.engine.accumulate(0, [batch], 1).item())
    drawn = [(run.engine.seed(step), torch.rand(()).item())[1] for step in (0, 1)]
    return {"train": train, "evaluations": evaluations, "logits": all(map(torch.equal, *logits)), "drawn": drawn}
