"""Adapters as a user meets them: an export that is wrong fails the run, the next one repairs it, peft opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from injection import SMALL, Ended, run_with, small_recipe
from safetensors.torch import load_file
from support import events
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS = 4
ZEROS = {"where": "fsdptrain.checkpoint.export_tensors:collected", "do": "zero", "at": "exit", "rank": 0}


def recipe(tmp: Path, adapter: dict[str, Any], **changes: Any) -> Path:
    changes = {
        "model": {"id": str(tmp.parent / "base"), "tokenizer": {"train": 512}}, "model__config": {},
        "adapter": adapter, "export": {"adapter": "separate"}, "train__steps": STEPS, "optim__lr": 1e-2,
    } | changes  # fmt: skip
    return small_recipe(tmp, **changes)


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("adapters")
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(tmp / "base")
    return tmp


@pytest.fixture(scope="module")
def zeros(tmp: Path) -> Ended:
    """Return how a run ended whose adapter was written as zeros. A whole layer is trained beside it."""
    return run_with(recipe(tmp / "first", {"kind": "lora", "r": 3, "modules_to_save": ["layers.1"]}), ZEROS)


@pytest.fixture(scope="module")
def repaired(tmp: Path, zeros: Ended) -> Path:
    """Return the run folder after the same command, which had only the export to do again."""
    ended = run_with(tmp / "first" / "recipe.yaml")
    assert not ended.problems(0, "logits compared with the trained model's")
    return tmp / "first" / "run"


def test_an_adapter_that_was_written_as_zeros_fails_the_run(zeros: Ended) -> None:
    assert not zeros.problems(6, "does not compute what was trained", "the checkpoint is not affected")


def test_the_same_command_repairs_the_export(repaired: Path) -> None:
    assert [event["step"] for event in events(repaired, "step")] == list(range(1, STEPS + 1))
    assert all(tensor.any() for tensor in load_file(repaired / "export" / "adapter_model.safetensors").values())


def test_a_run_continues_from_the_adapter_of_another(repaired: Path, tmp: Path) -> None:
    second = recipe(tmp / "second", {"kind": "lora", "from": str(repaired / "export")}, train__steps=1, optim__lr=0)
    assert not run_with(second).problems(0)
    first = load_file(repaired / "export" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp / "second" / "run" / "export" / "adapter_model.safetensors").items():
        assert torch.equal(tensor, first[name]), name
