"""Adapters as a user meets them: an export that is wrong fails the run, and the next one repairs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from injection import SMALL, run_with, small_recipe
from safetensors.torch import load_file
from support import events
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS = 4
ZEROS = {"where": "fsdptrain.checkpoint.export:gathered_tensors", "do": "zero", "at": "exit", "rank": 0}


def recipe(tmp: Path, adapter: dict[str, Any], **changes: Any) -> Path:
    return small_recipe(
        tmp, model={"id": str(tmp.parent / "base"), "tokenizer": {"train": 512}}, model__config={}, adapter=adapter,
        export={"adapter": "separate"}, launch__nproc_per_node=1, **changes,
    )  # fmt: skip


def test_an_export_of_zeros_fails_the_run_the_same_command_repairs_it_and_another_run_continues_from_it(
    tmp_path: Path,
) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "base")
    adapter = {"kind": "lora", "r": 3, "modules_to_save": ["layers.1"]}  # a whole layer is trained beside it
    first = recipe(tmp_path / "first", adapter, train__steps=STEPS, optim__lr=1e-2)
    wrong = run_with(first, ZEROS)
    assert not wrong.problems(6, "does not compute what was trained", "the checkpoint is not affected")
    assert not run_with(first).problems(0, "logits compared with the trained model's")
    run, second = tmp_path / "first" / "run", tmp_path / "second"
    assert [event["step"] for event in events(run, "step")] == list(range(1, STEPS + 1))
    trained = load_file(run / "export" / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in trained.values())
    continues = {"kind": "lora", "from": str(run / "export")}
    assert not run_with(recipe(second, continues, train__steps=1, optim__lr=0)).problems(0)
    for name, tensor in load_file(second / "run" / "export" / "adapter_model.safetensors").items():
        assert torch.equal(tensor, trained[name]), name
