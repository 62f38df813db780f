"""Objectives that judge answers, beside DPO (`test_dpo`): each gives the curve of a plain loop in every layout."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import build, curve, evaluated
from reference import Documents, Judge, cosine_rates, documents_of, plain_answers, stream_of

from reference import judge_ipo, judge_kto, judge_orpo, judge_simpo  # isort: skip
from support import TINY, on_ranks, write_pairs, write_pretrained
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.config.objectives import Objective
from fsdptrain.data.corpus import Corpus

STEPS, BATCH, LR = 4, 8, 1e-3
# objective → words that change its keys, and its plain form with their values
OBJECTIVES: dict[str, tuple[list[str], Judge]] = {
    "ipo": (["train.ipo.beta=0.2"], judge_ipo(0.2)),
    "simpo": (["train.simpo.beta=2.5", "train.simpo.gamma=0.7"], judge_simpo(2.5, 0.7)),
    "orpo": (["train.orpo.beta=0.3"], judge_orpo(0.3)),
    "kto": (
        ["train.kto.beta=0.4", "train.kto.desirable_weight=0.7", "train.kto.undesirable_weight=1.3"],
        judge_kto(0.4, 0.7, 1.3),
    ),
}
MICRO = ["train.micro_batch_size=2"]
LAYOUTS = {
    1: {"1 / 4": MICRO, "plain loss": [*MICRO, "train.loss=plain"], "not packed": [*MICRO, "data.packing=none"]},
    2: {
        "FULL_SHARD × 2 / 2, held": [*MICRO, "fsdp.accumulation=hold"],
        "HYBRID_SHARD_ZERO2 × 2 / 4": ["fsdp.strategy=HYBRID_SHARD_ZERO2", "fsdp.shard_size=1"],
        "context 2": [*MICRO, "parallel.context=2"],
        "tensor 2": [*MICRO, "parallel.tensor=2"],
    },
}


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
    tmp = tmp_path_factory.mktemp("objectives")
    write_pairs(tmp / "pairs.jsonl")
    write_feedback(tmp / "feedback.jsonl")
    return write_pretrained(
        tmp, LlamaConfig(**TINY), optim__lr=LR,
        data={"path": str(tmp / "pairs.jsonl"), "format": "preference", "seq_len": 192, "eval": {"fraction": 0.2}},
        train={"steps": STEPS, "global_batch_size": BATCH, "objective": "dpo"},
    )  # fmt: skip


def words_of(recipe: Path, objective: str) -> list[str]:
    """Return the overrides that train another objective, with all of its keys."""
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
    recipe: Path, objective: str, words: list[str], policy: Any = None, steps: int = STEPS
) -> list[list[float]]:
    """Return the curve of the first steps, and as if in a step behind them, what is measured on the held-out rows."""
    stream, held_out, corpus = stream_of(recipe, *words)
    sets = [(stream.corpus, stream.at(range(step * BATCH, (step + 1) * BATCH))) for step in range(steps)]
    sets.append((corpus, held_out))
    feedback = [feedback_of(recipe, *each) for each in sets] if objective == "kto" else []
    models = [AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32) for _ in range(2)]
    documents, rates = [documents_of(*each) for each in sets], [*cosine_rates(LR, STEPS)[:steps], 0.0]
    return plain_answers(policy or models[0], models[1], documents, rates, OBJECTIVES[objective][1], feedback)


def assert_agrees(found: list[list[float]], expected: list[list[float]], name: str) -> None:
    worst = np.abs(np.subtract(found, expected)) / np.maximum(1, np.abs(expected))
    print(f"{name:40} loss, norm, measures: {worst.max(axis=0)}")
    assert (worst <= [1e-6, 1e-6, *[2e-6] * (len(expected[0]) - 2)]).all(), name


QUICK = ("ipo", 1), ("simpo", 1), ("orpo", 2), ("kto", 2)


@pytest.mark.parametrize(
    ("objective", "world"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.soak)
        for each in itertools.product(OBJECTIVES, LAYOUTS)
    ],
)
def test_curves_agree_with_the_plain_loop(objective: str, world: int, recipe: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    words = words_of(recipe, objective)
    variants = {name: [*words, *layout] for name, layout in LAYOUTS[world].items()}
    ranks = on_ranks(world, "curves", tmp_path / "ranks", recipe=str(recipe), variants=variants, steps=STEPS)
    assert all(other == ranks[0] for other in ranks), "ranks report different curves"
    expected = expected_curve(recipe, objective, words)[:STEPS]
    assert abs(expected[0][0] - expected[-1][0]) > 1e-3, "nothing is learned"
    for name, found in ranks[0].items():
        other = expected_curve(recipe, objective, variants[name])[:STEPS] if name == "not packed" else expected
        assert_agrees(found, other, name)


@pytest.mark.parametrize("objective", ["simpo", "kto"])
def test_a_resume_is_bitwise(objective: str, recipe: Path, tmp_path: Path) -> None:
    words = {
        "recipe": str(recipe),
        "overrides": [*words_of(recipe, objective), *MICRO, f"output_dir={tmp_path / 'run'}"],
    }
    [found, _] = on_ranks(2, "save_between", tmp_path / "first", **words, at=2, steps=STEPS)
    [resumed, _] = on_ranks(2, "resume", tmp_path / "second", **words, steps=STEPS)
    assert resumed["first"] == 2 and resumed["curve"] == found["curve"][2:]
    assert (tmp_path / "run" / "reference").exists() == (objective == "kto")


@pytest.mark.parametrize("objective", ["ipo", "kto"])
def test_adapters_and_held_out_rows_are_judged_beside_the_base(objective: str, recipe: Path, tmp_path: Path) -> None:
    """What is held out is judged after two steps."""
    base, folder = AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32), tmp_path / "lora"
    get_peft_model(base, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"])).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, folder, is_trainable=True)
    words = [
        *words_of(recipe, objective),
        *MICRO,
        "adapter.kind=lora",
        "export.adapter=merged",
        f"adapter.from={folder}",
    ]
    words.append(f"output_dir={tmp_path / 'run'}")
    [found, _] = on_ranks(2, trained_and_evaluated, tmp_path, recipe=str(recipe), overrides=words)
    *curve, held_out = expected_curve(recipe, objective, words, policy, steps=2)
    assert_agrees(found["curve"], curve, "LoRA")
    measures = Objective(objective).measures
    del held_out[1]
    assert [found["held out"][name] for name in ("loss", *measures)] == pytest.approx(held_out, rel=1e-5, abs=1e-6)


# --- on every rank -------------------------------------------------------------------------------------------------


def trained_and_evaluated(recipe: str, overrides: list[str]) -> dict[str, Any]:
    run = build(recipe, overrides)
    return {"curve": curve(run, 2), "held out": evaluated(run)}
