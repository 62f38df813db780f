"""Learning from preferences (DPO): every layout gives the curve of a plain loop that holds a second model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import build, curve, evaluated
from reference import Documents, batches_of, cosine_rates, judge_dpo, plain_answers, stream_of
from support import TINY, on_ranks, strategies, write_pairs, write_pretrained
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.errors import CheckpointError
from fsdptrain.train import step as engine_module

STEPS, BATCH, LR = 4, 8, 1e-3
LIMITS = np.array([1e-6, 1e-5, 1e-6, 1e-6, 2e-6, 1e-9])  # in float32, relative to the larger of the value and 1
ALL_KEYS = ["train.dpo.beta=0.5", "train.dpo.label_smoothing=0.1", "train.dpo.sft_weight=0.3"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random Llama, with several pairs in every sequence."""
    tmp = tmp_path_factory.mktemp("dpo")
    write_pairs(tmp / "pairs.jsonl")
    return write_pretrained(
        tmp, LlamaConfig(**TINY), optim__lr=LR,
        data={"path": str(tmp / "pairs.jsonl"), "format": "preference", "seq_len": 192, "eval": {"fraction": 0.2}},
        train={"steps": STEPS, "global_batch_size": BATCH, "objective": "dpo"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def batches(recipe: Path) -> list[Documents]:
    """Return the documents of each step, which are not packed."""
    found = batches_of(stream_of(recipe)[0], BATCH, STEPS)
    assert all(len(labels) > 2 * BATCH for _, _, labels in found), "no sequence has several pairs"
    assert len({len(labels) for _, _, labels in found}) > 1, "every batch has as many pairs"
    return found


def assert_agree(
    world: int, variants: dict[str, list[str]], recipe: Path, batches: list[Documents], tmp: Path, *dpo: float
) -> None:
    torch.set_num_threads(1)
    models = [AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32) for _ in range(2)]
    expected = plain_answers(*models, batches, cosine_rates(LR, STEPS), judge_dpo(*dpo))
    assert expected[0][0] != expected[-1][0] and abs(expected[-1][4]) > 0.03, "nothing is learned"
    ranks = on_ranks(world, "curves", tmp / "ranks", recipe=str(recipe), variants=variants, steps=STEPS)
    assert all(other == ranks[0] for other in ranks), "ranks report different curves"
    for name, found in ranks[0].items():
        worst = np.abs(np.subtract(found, expected)) / np.maximum(1, np.abs(expected))
        print(f"{name:40} loss, norm, chosen, rejected, margin, accuracy: {worst.max(axis=0)}")
        assert (worst <= LIMITS).all(), name


def layouts(world: int) -> dict[str, list[str]]:
    """Return every strategy, by turns with two micro-batches whose gradients are held, and with four."""
    return {
        f"{name} × {world} / {count}": [
            *words,
            f"train.micro_batch_size={max(1, BATCH // world // count)}",
            f"fsdp.accumulation={'hold' if count == 2 else 'reduce'}",
        ]
        for (name, words), count in zip(strategies(world).items(), (2, 4, 2, 4, 2), strict=False)
    }


def test_curves_agree_with_the_plain_loop(recipe: Path, batches: list[Documents], tmp_path: Path) -> None:
    chosen = ("FULL_SHARD", "HYBRID_SHARD")  # all of them in the soak test
    variants = {name: words for name, words in layouts(2).items() if name.split()[0] in chosen}
    assert_agree(2, variants, recipe, batches, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_agrees_with_the_plain_loop(
    world: int, recipe: Path, batches: list[Documents], tmp_path: Path
) -> None:
    context = {
        f"context {size}": [f"parallel.context={size}", "train.micro_batch_size=2"]
        for size in {2, world} - {1}
        if world % size == 0
    }
    assert_agree(world, layouts(world) | context, recipe, batches, tmp_path)


def test_all_keys_agree_with_the_plain_loop_on_one_rank(recipe: Path, batches: list[Documents], tmp_path: Path) -> None:
    variants = {"chunked": ALL_KEYS, "plain": [*ALL_KEYS, "train.loss=plain"]}
    assert_agree(1, variants, recipe, batches, tmp_path, 0.5, 0.1, 0.3)


def test_a_resume_on_another_host_has_the_reference_of_the_start(recipe: Path, tmp_path: Path) -> None:
    """Of a mixture, in micro-batches with pairs of both sources."""
    path = recipe.parent / "pairs.jsonl"
    sources = f"[{{path: {path}}}, {{path: {path}, name: first, max_rows: 60}}]"
    overrides = ["data.path=null", f"data.sources={sources}", "train.micro_batch_size=4"]
    words = {"recipe": str(recipe), "overrides": overrides, "emptied": str(tmp_path / "caches")}
    (found,) = on_ranks(1, preferences_resumed, tmp_path / "rank", **words)
    assert found["resumed"] == found["curve"][2:]
    held_out, again = found["held out"]
    assert found["curve"][0][2:5] == pytest.approx([0, 0, 0], abs=1e-6), "the model is the reference"
    assert held_out == again and held_out["margin"] == pytest.approx(
        held_out["rewards_chosen"] - held_out["rewards_rejected"]
    )
    both = held_out["losses"]
    assert set(both) == {"pairs", "first"} and min(both.values()) < held_out["loss"] < max(both.values())
    assert found["passes"] == [4, 4], "of the trained and the held-out pairs of each source, once"
    assert "reference is missing or damaged" in found["refused"]


# --- on every rank -------------------------------------------------------------------------------------------------


answer_log_probs = engine_module.Engine.answer_log_probs


def preferences_resumed(recipe: str, overrides: list[str], emptied: str) -> dict[str, Any]:
    """Return the curve of a run that learns from preferences, and of its resume; `emptied` is a folder for caches.

    `passes` counts those over data sets: of the run, and with its resume. `refused` is the message of a resume in which
    the run's file is damaged.
    """
    with patch.object(engine_module.Engine, "answer_log_probs", autospec=True, side_effect=answer_log_probs) as passes:
        os.environ["FSDPTRAIN_CACHE"] = f"{emptied}/first"
        own = [*overrides, f"output_dir={emptied}/own"]
        run = build(recipe, own)
        made = curve(run, 2)
        run.checkpointer.save(2, run.engine.model, run.engine.optimizer, wait=True)
        made += curve(run, 4, 2)
        held_out = evaluated(run)
        kept = run.session.rundir.reference
        calls = [passes.call_count]
        os.environ["FSDPTRAIN_CACHE"] = f"{emptied}/second"  # as on another host
        resumed = build(recipe, own)
        rest = curve(resumed, 4, resumed.engine.steps_made)
        again = evaluated(resumed)
        calls.append(passes.call_count)
    next(kept.glob("*.npy")).write_bytes(b"x")
    try:
        refused = build(recipe, own).plan.run_dir
    except CheckpointError as error:
        refused = str(error)
    return {"curve": made, "resumed": rest, "held out": [held_out, again], "passes": calls, "refused": refused}
