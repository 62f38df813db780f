"""What the model writes behind `eval.prompts` is what transformers' `generate` writes, on any arrangement of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from ranks import build, curve
from support import TINY, on_ranks, write_pretrained
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

PROMPTS, MOST = ["First Citizen:\n", "KING"], 6
VARIANTS = {
    "FULL_SHARD": [],
    "NO_SHARD, both in a micro-batch": ["fsdp.strategy=NO_SHARD", "train.micro_batch_size=2"],
    "ranks share rows": ["parallel.context=2"],
    "a pipeline": ["parallel.pipeline=2"],
    "LoRA": ["adapter.kind=lora", "export.adapter=merged"],
}


def test_every_arrangement_writes_what_generate_writes(tmp_path: Path) -> None:
    config = Qwen3Config(**TINY, head_dim=16, initializer_range=0.2)
    asked = {"prompts": PROMPTS, "max_new_tokens": MOST}
    recipe = write_pretrained(tmp_path, config, data__eval={"fraction": 0.1}, eval=asked)
    ranks = on_ranks(2, continuations, tmp_path / "out", recipe=str(recipe), variants=VARIANTS)
    assert ranks[0] == ranks[1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        written = model.generate(
            input_ids=ids, max_new_tokens=MOST, do_sample=False, eos_token_id=tokenizer.eos_token_id
        )
        expected.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    assert len({*expected}) == len(PROMPTS) and all(expected)
    for name, found in ranks[0].items():
        assert found["texts"] == expected, name
        assert found["nan"] == ["", ""], name
    without, with_prompts = ranks[0]["FULL_SHARD"]["curves"]
    assert without == with_prompts, "prompts change what is trained"


# --- on every rank -------------------------------------------------------------------------------------------------


def continuations(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return what each variant writes behind `eval.prompts`, and then with weights that are not numbers.

    `curves`, of a variant without overrides: of two steps, and of two steps with prompts between them.
    """
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        state = torch.get_rng_state()
        texts = run.continue_prompts(lambda: False)
        assert texts is not None and torch.equal(state, torch.get_rng_state())
        curves = []
        if not overrides:
            curves = [curve(build(recipe, overrides), 2), curve(run, 1)]
            run.continue_prompts(lambda: False)
            curves[1] += curve(run, 2, 1)
        with torch.no_grad():
            for param in run.engine.model.parameters():
                param.fill_(math.nan)
        found[name] = {"texts": texts, "curves": curves, "nan": run.continue_prompts(lambda: False)}
    return found
