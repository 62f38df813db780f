"""Ranks that share rows (parallel.context) give the curve of a plain loop, whatever else the recipe sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference import batches_of, cosine_rates, largest_difference, plain_curve, stream_of
from support import TINY, on_ranks, write_recipe
from transformers import AutoModelForCausalLM, Qwen3Config

STEPS, BATCH, RANKS = 4, 8, 4
LIMIT = 1e-6  # relative, in float32
VARIANTS = {  # of four ranks; a model has four query heads and two key heads
    "2": ["parallel.context=2"],
    "4, more than key heads": ["parallel.context=4"],
    "2, accumulated": ["parallel.context=2", "train.micro_batch_size=2", "fsdp.accumulation=hold"],
    "2, plain loss": ["parallel.context=2", "train.loss=plain"],
    "2, recomputed": ["parallel.context=2", "fsdp.activation_checkpointing=full"],
    "4, recomputed selectively": ["parallel.context=4", "fsdp.activation_checkpointing=selective"],
    "2, HYBRID_SHARD": ["parallel.context=2", "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"],
    "2, NO_SHARD": ["parallel.context=2", "fsdp.strategy=NO_SHARD"],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random Qwen3, whose layers norm queries and keys, on packed documents."""
    tmp = tmp_path_factory.mktemp("context")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(Qwen3Config(**TINY, head_dim=16)).save_pretrained(tmp / "model")
    return write_recipe(
        tmp, model={"id": str(tmp / "model"), "tokenizer": {"train": 512}}, train__steps=STEPS,
        train__global_batch_size=BATCH, launch__nproc_per_node=RANKS,
    )  # fmt: skip


def test_curves_agree_with_the_plain_loop(recipe: Path, tmp_path: Path) -> None:
    batches = batches_of(stream_of(recipe)[0], BATCH, STEPS)
    assert all(len(labels) > BATCH for _, _, labels in batches), "no sequence has several documents"
    expected = plain_curve(str(recipe.parent / "model"), batches, cosine_rates(3e-4, STEPS), torch.float32)
    ranks = on_ranks(RANKS, "curves", tmp_path, recipe=str(recipe), variants=VARIANTS, steps=STEPS)
    assert all(other == ranks[0] for other in ranks), "ranks report different curves"
    for name, curve in ranks[0].items():
        loss, norm = largest_difference(curve, expected)
        print(f"{name:28} loss {loss:.1e}  norm {norm:.1e}")
        assert max(loss, norm) < LIMIT, name
