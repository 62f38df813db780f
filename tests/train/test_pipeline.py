"""Ranks that have the layers one after another (parallel.pipeline) train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import TINY, write_pretrained
from train.test_context import assert_layouts_agree
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3MoeConfig

STEPS, BATCH = 4, 8
TWO, FOUR, ONE = "parallel.pipeline=2", "parallel.pipeline=4", "train.micro_batch_size=1"
TENSOR, CONTEXT, EXPERTS = "parallel.tensor=2", "parallel.context=2", "parallel.experts=2"
GPIPE, INTERLEAVED = "parallel.schedule=gpipe", "parallel.schedule=interleaved"
FULL, HELD = "fsdp.activation_checkpointing=full", "fsdp.accumulation=hold"
LAYOUTS = {  # of four ranks; the model has seven layers
    "2 × FSDP 2": [TWO, ONE],
    "4, recomputed": [FOUR, ONE, FULL],
    "2 × tensor 2, held": [TWO, TENSOR, HELD],
    "interleaved": [TWO, INTERLEAVED, ONE],
}


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


@pytest.mark.parametrize("model", ["model", "tied"])
def test_curves_agree_with_the_plain_loop(model: str, recipe: Path, tmp_path: Path) -> None:
    assert_layouts_agree(LAYOUTS, recipe, tmp_path, model=model)
