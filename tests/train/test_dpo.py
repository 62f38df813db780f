"""Learning from preferences (DPO): every layout gives the curve of a plain loop that holds a second model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from ranks import build, curve, evaluated
from reference import Documents, batches_of, cosine_rates, plain_dpo, stream_of
from support import TINY, on_ranks, strategies, write_pairs, write_recipe
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.config.reader import load
from fsdptrain.data.prepare import prepare
from fsdptrain.errors import CheckpointError
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.train import reference
from fsdptrain.train import step as engine_module
from fsdptrain.train.preflight import prepare_tokenizer_and_model

STEPS, BATCH, LR = 4, 8, 1e-3
LIMITS = np.array([1e-6, 1e-5, 1e-6, 1e-6, 2e-6, 1e-9])  # in float32, relative to the larger of the value and 1
ALL_KEYS = ["train.dpo.beta=0.5", "train.dpo.label_smoothing=0.1", "train.dpo.sft_weight=0.3"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random Llama, with several pairs in every sequence."""
    tmp = tmp_path_factory.mktemp("dpo")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(tmp / "model")
    write_pairs(tmp / "pairs.jsonl")
    return write_recipe(
        tmp, model={"id": str(tmp / "model"), "tokenizer": {"train": 512}}, optim__lr=LR,
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
    expected = plain_dpo(str(recipe.parent / "model"), batches, cosine_rates(LR, STEPS), dpo or (0.1, 0.0, 0.0))
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
    assert found["passes"] == [4, 4, 4], "of the trained and the held-out pairs of each source, once"
    assert "reference is missing or damaged" in found["refused"]


def test_a_full_disk_leaves_nothing_beside_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "save", MagicMock(side_effect=OSError(28, "No space left on device")))
    session: Any = SimpleNamespace(rundir=RunDir(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        reference._write(session, None, {"digest": np.zeros(1)})
    assert not [*tmp_path.iterdir()]


LORA = ["adapter.kind=lora", "export.adapter=merged"]
SAME = ["train.dpo.beta=0.2", "optim.lr=1e-5", "train.global_batch_size=16", "name=other", "eval.every=7"]
OTHER = {  # what changes the log-probabilities, or their last bits
    "packing": ["data.packing=none"], "sequences": ["seed=1"], "seq_len": ["data.seq_len=256"],
    "rows": ["data.max_rows=9"],
    "prompt": ["data.separator=:"], "dtype": ["fsdp.mixed_precision.param_dtype=bfloat16"],
    "kernel": ["model.attn_implementation=eager"], "adapter": [*LORA, "adapter.r=4"],
    "loss": ["train.loss=plain"], "config": ["model.config.rms_norm_eps=0.1"], "tokens": ["model.add_tokens=[a b]"],
}  # fmt: skip


def test_the_cache_of_the_reference_is_of_all_that_decides_it(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(words: list[str]) -> str:
        written = load(recipe, words)
        plan = make_plan(written, Topology("cpu", 1, 2))
        tokenizer, prepared = prepare_tokenizer_and_model(plan, lambda *_: None)
        stream, _, held_out = prepare(prepared.plan, tokenizer, lambda *_: None)
        inputs: Any = SimpleNamespace(plan=prepared.plan, prepared=prepared)
        world: Any = SimpleNamespace(device=torch.device("cpu"))
        return json.dumps(reference._cache_key(inputs, world, [*stream.corpus.parts, *held_out.parts]))

    monkeypatch.setattr(reference, "frozen_digest", lambda *_: "weights")
    own = key([])
    assert [word for word in SAME if key([word]) != own] == []
    assert [name for name, words in OTHER.items() if key(words) == own] == []
    monkeypatch.setattr(reference, "frozen_digest", lambda *_: "others")
    assert key([]) != own


@pytest.mark.parametrize(("dtype", "shift"), [("float32", 0.05), ("bfloat16", 3.0)])
def test_a_first_step_of_another_model_than_the_reference_ends_the_run(
    dtype: str, shift: float, recipe: Path, tmp_path: Path
) -> None:
    """Not with dropout, which makes another model of it in every step."""
    words = [f"fsdp.mixed_precision.param_dtype={dtype}"]
    variants = {
        "right": words,
        "packed": [*words, "data.packing=none", "train.micro_batch_size=4"],
        "lora": [*words, *LORA],
        "shifted": words,
        "dropout": [*words, *LORA, "adapter.dropout=0.5"],
    }
    found = on_ranks(
        2, first_steps, tmp_path / "ranks", recipe=str(recipe), variants=variants, shifts={"shifted": shift}
    )
    for each in found:
        assert "in step 1 the model is the reference" in each.pop("shifted")
        assert each == dict.fromkeys(variants.keys() - {"shifted"}, "")


# --- on every rank -------------------------------------------------------------------------------------------------


answer_log_probs = engine_module.Engine.answer_log_probs


def preferences_resumed(recipe: str, overrides: list[str], emptied: str) -> dict[str, Any]:
    """Return the curve of a run that learns from preferences, and of its resume; `emptied` is a folder for caches.

    `passes` counts those over data sets: of the run, of another one with the same start, and of the resume without the
    cache. `refused` is the message of a resume in which the run's file is damaged.
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
        other = build(recipe, [*overrides, f"output_dir={emptied}/run", "train.dpo.beta=0.2"])
        both = zip(other.stream.corpus.parts, run.stream.corpus.parts, strict=True)
        assert all((one.reference == another.reference).all() for one, another in both)
        calls.append(passes.call_count)
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


def first_steps(recipe: str, variants: dict[str, list[str]], shifts: dict[str, float]) -> dict[str, str]:
    """Make the first step of each variant, after its reference was shifted; return what it raises, or an empty text."""
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, [*overrides, f"name={name}"])
        for part in run.stream.corpus.parts:
            part.reference[:] += shifts.get(name, 0.0)
        try:
            run.step(0)
            found[name] = ""
        except CheckpointError as error:
            found[name] = str(error)
        run.prefetch.close()
    return found
