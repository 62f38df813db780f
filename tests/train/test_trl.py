"""The objectives beside TRL's trainers, on the same rows: needs `pip install trl`, which is not in the extra `dev`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import stream_of
from support import TINY, on_ranks, planned, write_pairs, write_pretrained
from test_objectives import words_of, write_feedback
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.data.tokenizer import load_tokenizer

STEPS, BATCH, LR = 8, 8, 1e-3
ALL = {
    "output_dir": "unused", "max_steps": STEPS, "learning_rate": LR, "lr_scheduler_type": "constant",
    "adam_beta2": 0.95, "weight_decay": 0.0, "max_grad_norm": 1.0, "logging_steps": 1,
    "report_to": "none", "save_strategy": "no",
    "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "remove_unused_columns": False,
    "train_sampling_strategy": "sequential", "max_length": 192, "disable_tqdm": True, "logging_nan_inf_filter": False,
}  # fmt: skip
CLASSES = {  # objective → trainer and configuration, values of the latter, rows of a micro-batch
    "ipo": ("trl.DPO", {"loss_type": ["ipo"], "beta": 0.2}, BATCH),
    "simpo": ("trl.experimental.cpo.CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 0.7}, 8),
    "orpo": ("trl.experimental.orpo.ORPO", {"beta": 0.3}, 1),
    "kto": ("trl.KTO", {"beta": 0.4, "desirable_weight": 0.7, "undesirable_weight": 1.3}, BATCH),
}


@pytest.mark.soak
@pytest.mark.parametrize("objective", CLASSES)
def test_curves_agree_with_trl(objective: str, tmp_path: Path) -> None:
    """Rows as tokens, in our order, one in each sequence.

    TRL's ORPO has the prompt in its cross-entropy, and averages over the tokens of a micro-batch instead of over
    answers: here prompts are empty, and micro-batches have one pair. TRL's KTO pairs the prompts of a micro-batch with
    one another's answers: here it gets our mismatched rows, with the global batch as its micro-batch.
    """
    pytest.importorskip("trl")
    write_pairs(tmp_path / "pairs.jsonl")
    write_feedback(tmp_path / "feedback.jsonl")
    if objective == "orpo":
        rows = [json.loads(line) | {"prompt": ""} for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = write_pretrained(
        tmp_path, LlamaConfig(**TINY),
        optim={"lr": LR, "weight_decay": 0.0}, schedule={"name": "constant", "warmup": 0},
        data={"path": str(tmp_path / "pairs.jsonl"), "format": "preference", "seq_len": 192, "packing": "none"},
        train={"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 2, "objective": "dpo"},
    )  # fmt: skip
    words = words_of(recipe, objective)
    [found, _] = on_ranks(2, "curves", tmp_path, recipe=str(recipe), variants={"": words}, steps=STEPS)
    expected = trl_curve(objective, recipe, words)
    worst = np.abs(np.subtract(found[""], expected)) / np.maximum(1, np.abs(expected))
    print(f"{objective:8} loss, norm, rewards of both, margin, accuracy or KL: {worst.max(axis=0)}")
    assert (worst <= [2e-6, 1e-5, *[1e-5] * 4]).all()


def trl_curve(objective: str, recipe: Path, words: list[str]) -> list[list[float]]:
    import importlib

    from datasets import Dataset

    torch.manual_seed(0)
    path, keys, micro = CLASSES[objective]
    module, _, name = path.rpartition(".")
    trainer_class, config = (getattr(importlib.import_module(module), f"{name}{end}") for end in ("Trainer", "Config"))
    rows, columns = token_rows(objective, recipe, words)
    losses, logged = [], []

    class Watched(trainer_class):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def training_step(self, *arguments: Any, **more: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*arguments, **more)
            losses.append(loss.item())
            return loss

        def log(self, logs: dict[str, float], *more: Any) -> None:
            super().log(logs, *more)
            logged.append(logs)

    tokenizer = load_tokenizer(planned(recipe, *words), lambda *_: None)
    old = objective in ("simpo", "orpo")  # they tokenise texts when they are made, and get our tokens afterwards
    texts = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    sizes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": BATCH // micro}
    trainer = Watched(
        model=AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.float32),
        args=config(**ALL | keys | sizes), train_dataset=texts if old else Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    if old:
        trainer.train_dataset = Dataset.from_list(rows)
    trainer.train()
    means = np.sum(np.reshape(losses, (STEPS, -1)), axis=1)
    names = ["grad_norm", *(f"rewards/{each}" for each in ("chosen", "rejected", "margins")), columns]
    return [[loss, *(logs[name] for name in names)] for loss, logs in zip(means, logged, strict=False)]


def token_rows(objective: str, recipe: Path, words: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of all steps as TRL's trainer has them after tokenising, and the name of our last measure."""
    stream = stream_of(recipe, *words)[0]
    corpus, rows = stream.corpus.parts[0], []
    for number in stream.at(range(STEPS * BATCH)):
        pieces = corpus.pieces_of(number)
        made = [corpus.tokens[start:end].tolist() for start, _, end in pieces]
        cut = [corpus.trained[start:end].tolist().index(True, 1) for start, _, end in pieces]
        prompt, answers = made[0][: cut[0]], [ids[at:] for ids, at in zip(made, cut, strict=True)]
        if objective == "kto":
            others, label = corpus.mismatched(pieces[0])[0].tolist()[cut[0] :], bool(corpus.desirable(number)[0])
            row = {"completion_ids": answers[0], "KL_completion_ids": others, "label": label, "prompt_ids": prompt}
        elif objective == "ipo":
            row = {"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1]}
        else:
            row = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
            for kind, ids, at in zip(("chosen", "rejected"), made, cut, strict=True):
                row |= {f"{kind}_input_ids": ids, f"{kind}_attention_mask": [1] * len(ids)}
                row |= {f"{kind}_labels": [-100] * at + ids[at:]}
        rows.append(row)
    return rows, "kl" if objective == "kto" else "rewards/accuracies"
