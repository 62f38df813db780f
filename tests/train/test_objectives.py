"""Objectives that judge answers: each gives the curve of a plain loop that holds a second model, in every layout."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import build, curve, evaluated
from reference import Documents, Judge, cosine_rates, documents_of, plain_answers, stream_of

from reference import judge_dpo, judge_ipo, judge_kto, judge_orpo, judge_simpo  # isort: skip
from support import TINY, on_ranks, strategies, write_pairs, write_pretrained
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.config.objectives import Objective
from fsdptrain.data.corpus import Corpus
from fsdptrain.errors import CheckpointError
from fsdptrain.train import step as engine_module

STEPS, BATCH, LR = 4, 8, 1e-3
# objective → words that change its keys, and its plain form with their values
OBJECTIVES: dict[str, tuple[list[str], Judge]] = {
    "dpo": (
        ["train.dpo.beta=0.5", "train.dpo.label_smoothing=0.1", "train.dpo.sft_weight=0.3"],
        judge_dpo(0.5, 0.1, 0.3),
    ),
    "ipo": (["train.ipo.beta=0.2"], judge_ipo(0.2)),
    "simpo": (["train.simpo.beta=2.5", "train.simpo.gamma=0.7"], judge_simpo(2.5, 0.7)),
    "orpo": (["train.orpo.beta=0.3"], judge_orpo(0.3)),
    "kto": (
        ["train.kto.beta=0.4", "train.kto.desirable_weight=0.7", "train.kto.undesirable_weight=1.3"],
        judge_kto(0.4, 0.7, 1.3),
    ),
}
MICRO = "train.micro_batch_size=2"
LAYOUTS = {  # number of ranks → layouts
    1: {"1 / 4": [MICRO], "plain loss": [MICRO, "train.loss=plain"], "not packed": [MICRO, "data.packing=none"]},
    2: {
        "FULL_SHARD × 2 / 2, held": [MICRO, "fsdp.accumulation=hold"],
        "HYBRID_SHARD_ZERO2 × 2 / 4": ["fsdp.strategy=HYBRID_SHARD_ZERO2", "fsdp.shard_size=1"],
        "context 2": [MICRO, "parallel.context=2"],
        "tensor 2": [MICRO, "parallel.tensor=2"],
    },
    4: {**strategies(4), "context 2": [MICRO, "parallel.context=2"], "context 4": [MICRO, "parallel.context=4"]},
}
SOME = {  # ranks → objectives with their layouts: each objective, the layouts of one, and of one with feedback
    1: {"dpo": ["1 / 4", "plain loss"], "ipo": ["1 / 4"], "simpo": ["not packed"], "orpo": ["1 / 4"], "kto": ["1 / 4"]},
    2: {"dpo": ["FULL_SHARD × 2 / 2, held", "HYBRID_SHARD_ZERO2 × 2 / 4", "context 2", "tensor 2"],
        "kto": ["FULL_SHARD × 2 / 2, held", "context 2"]},
}  # fmt: skip
ALL = {ranks: {objective: [*layouts] for objective in OBJECTIVES} for ranks, layouts in LAYOUTS.items()}
SOAK = pytest.mark.soak


def write_feedback(path: Path) -> list[dict[str, Any]]:
    """Write the answers of pairs as rows with a label, of which a third are undesirable; return them."""
    write_pairs(path)
    pairs = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [
        {"prompt": pair["prompt"], "completion": pair["rejected" if i % 3 == 1 else "chosen"], "label": i % 3 != 1}
        for i, pair in enumerate(pairs)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe that starts from a random Llama, with several pairs in every sequence."""
    tmp = tmp_path_factory.mktemp("objectives")
    write_pairs(tmp / "pairs.jsonl")
    write_feedback(tmp / "feedback.jsonl")
    return write_pretrained(
        tmp, LlamaConfig(**TINY), optim__lr=LR,
        data={"path": str(tmp / "pairs.jsonl"), "format": "preference", "seq_len": 192, "eval": {"fraction": 0.2}},
        train={"steps": STEPS, "global_batch_size": BATCH, "objective": "dpo"},
    )  # fmt: skip


def words_of(recipe: Path, objective: str) -> list[str]:
    """Return the overrides that train an objective, with all of its keys."""
    own = ["data.format=feedback", f"data.path={recipe.parent / 'feedback.jsonl'}"] if objective == "kto" else []
    folder = f"output_dir={recipe.parent / objective}"
    return [*own, f"train.objective={objective}", *OBJECTIVES[objective][0], folder]


def feedback_of(recipe: Path, corpus: Corpus, sequences: Sequence[int]) -> tuple[Documents, torch.Tensor]:
    """Return the mismatched documents of some sequences, and which of their rows are desirable, from the rows alone."""
    rows = [json.loads(line) for line in (recipe.parent / "feedback.jsonl").read_text().splitlines()]
    tokens = [corpus.tokens[a:b].tolist() for a, b in zip(corpus.ends[:-1], corpus.ends[1:], strict=True)]
    flags = [corpus.trained[a:b].tolist() for a, b in zip(corpus.ends[:-1], corpus.ends[1:], strict=True)]
    assert len(tokens) == len(rows), "rows were dropped"
    trained = sorted(int(row) for row in corpus.rows_of(range(len(corpus))))  # and not held out
    found, longest = [], corpus.seq_len
    ids, mask, labels = (torch.full((len(corpus.rows_of(sequences)), longest), fill) for fill in (0, 0, -100))
    for place, row in enumerate(corpus.rows_of(sequences).tolist()):
        other = trained[trained.index(row) - 1]
        own, others = (flags[n].index(True, 1) for n in (row, other))
        made = [*tokens[row][:own], *tokens[other][others:]]
        ids[place, : len(made)], mask[place, : len(made)] = torch.tensor(made), 1
        labels[place, own - 1 : len(made) - 1] = torch.tensor(made[own:])
        found.append(rows[row]["label"])
    return (ids, mask, labels), torch.tensor(found)


def expected_curve(
    recipe: Path, objective: str, words: list[str], policy: Any = None, steps: int = STEPS, held_out: bool = False
) -> list[list[float]]:
    """Return the curve of the first steps; `held_out`: and as in a step behind them what the held-out rows measure."""
    torch.set_num_threads(1)
    stream, numbers, corpus = stream_of(recipe, *words)
    sets = [(stream.corpus, stream.at(range(step * BATCH, (step + 1) * BATCH))) for step in range(steps)]
    sets += [(corpus, numbers)] * held_out
    feedback = [feedback_of(recipe, *each) for each in sets] if objective == "kto" else []
    models = [AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32) for _ in range(2)]
    documents, rates = [documents_of(*each) for each in sets], [*cosine_rates(LR, STEPS)[:steps], 0.0][: len(sets)]
    assert objective == "kto" or "data.packing=none" in words or len(documents[0][2]) > 2 * BATCH, "one pair a sequence"
    return plain_answers(policy or models[0], models[1], documents, rates, OBJECTIVES[objective][1], feedback)


def assert_agrees(found: list[list[float]], expected: list[list[float]], name: str) -> None:
    worst = np.abs(np.subtract(found, expected)) / np.maximum(1, np.abs(expected))
    print(f"{name:40} loss, norm, measures: {worst.max(axis=0)}")
    norm = 1e-5 if name.startswith("dpo") else 1e-6
    assert (worst <= [1e-6, norm, *[2e-6] * (len(expected[0]) - 2)]).all(), name


@pytest.mark.parametrize(
    ("ranks", "chosen"), [*SOME.items(), *(pytest.param(*each, marks=SOAK) for each in ALL.items())]
)
def test_curves_agree_with_the_plain_loop(
    ranks: int, chosen: dict[str, list[str]], recipe: Path, tmp_path: Path
) -> None:
    variants = {
        f"{objective}, {layout}": [*words_of(recipe, objective), *LAYOUTS[ranks][layout]]
        for objective, layouts in chosen.items()
        for layout in layouts
    }
    first, *others = on_ranks(ranks, "curves", tmp_path, 1800, recipe=str(recipe), variants=variants, steps=STEPS)
    assert all(other == first for other in others), "ranks report different curves"
    expected: dict[tuple[str, bool], list[list[float]]] = {}
    for name, found in first.items():
        objective = name.partition(",")[0]
        of = objective, "not packed" in name
        if of not in expected:
            expected[of] = expected_curve(recipe, objective, variants[name])
            assert abs(expected[of][0][0] - expected[of][-1][0]) > 1e-3, "nothing is learned"
        assert_agrees(found, expected[of], name)
        assert (recipe.parent / objective / "reference").exists() == Objective(objective).needs_reference


@pytest.mark.parametrize("objective", [pytest.param("simpo", marks=SOAK), "kto"])
def test_a_resume_is_bitwise(objective: str, recipe: Path, tmp_path: Path) -> None:
    overrides = [*words_of(recipe, objective), MICRO, f"output_dir={tmp_path / 'run'}"]
    words: dict[str, Any] = {"recipe": str(recipe), "overrides": overrides, "steps": STEPS}
    [found, _] = on_ranks(2, "save_between", tmp_path / "first", **words, at=2)
    [resumed, _] = on_ranks(2, "resume", tmp_path / "second", **words)
    assert resumed["first"] == 2 and resumed["curve"] == found["curve"][2:]


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


@pytest.mark.parametrize("objective", [pytest.param("ipo", marks=SOAK), "kto"])
def test_adapters_and_held_out_rows_are_judged_beside_the_base(objective: str, recipe: Path, tmp_path: Path) -> None:
    """What is held out is judged after two steps."""
    base, folder = AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32), tmp_path / "lora"
    get_peft_model(base, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"])).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, folder, is_trainable=True)
    words = [*words_of(recipe, objective), MICRO, "adapter.kind=lora", "export.adapter=merged"]
    words += [f"adapter.from={folder}", f"output_dir={tmp_path / 'run'}"]
    [found, _] = on_ranks(2, trained_and_evaluated, tmp_path, recipe=str(recipe), overrides=words)
    *curve, held_out = expected_curve(recipe, objective, words, policy, steps=2, held_out=True)
    assert_agrees(found["curve"], curve, "LoRA")
    del held_out[1]
    names = ("loss", *Objective(objective).measures)
    assert [found["held out"][name] for name in names] == pytest.approx(held_out, rel=1e-5, abs=1e-6)


# --- on every rank -------------------------------------------------------------------------------------------------


def trained_and_evaluated(recipe: str, overrides: list[str]) -> dict[str, Any]:
    run = build(recipe, overrides)
    return {"curve": curve(run, 2), "held out": evaluated(run)}


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
