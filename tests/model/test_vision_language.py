"""The language model of a vision-language checkpoint: trained on text, exported as the whole model it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_config
from reference import batches_of, mean_loss, stream_of
from safetensors.torch import load_file
from support import on_ranks, write_recipe
from transformers import AutoModelForImageTextToText

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.model.units import beside_text
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.train.preflight import prepare_model

KINDS = ("gemma3", "mistral3", "qwen3_5")
TEXT = "model.trainable=[language_model,lm_head]"
TRAINED = pytest.mark.parametrize(
    "kinds", [("gemma3",), pytest.param(("mistral3", "qwen3_5"), marks=pytest.mark.soak)], ids=str
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("vision")
    for kind in KINDS:
        torch.manual_seed(1)
        model = AutoModelForImageTextToText.from_config(small_config(kind), dtype=torch.bfloat16)
        model.save_pretrained(tmp / kind)
    return write_recipe(
        tmp, model={"id": str(tmp / "gemma3"), "tokenizer": {"train": 400}}, data__packing="none", optim__lr=1e-2,
        train__steps=2, train__global_batch_size=2, export={"compare": False},
    )  # fmt: skip


def variant(recipe: Path, kind: str, *words: str) -> list[str]:
    return [f"model.id={recipe.parent / kind}", f"output_dir={recipe.parent / 'runs' / kind}", *words]


def planned(recipe: Path, kind: str, *words: str) -> Plan:
    return make_plan(load(recipe, variant(recipe, kind, *words)), Topology("cpu", 1, 2))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@TRAINED
def test_the_first_step_is_that_of_the_original_class(kinds: tuple[str, ...], recipe: Path, tmp_path: Path) -> None:
    variants = {kind: variant(recipe, kind, TEXT, "train.steps=1", f"output_dir={tmp_path / kind}") for kind in kinds}
    found = on_ranks(2, "curves", tmp_path, recipe=str(recipe), variants=variants, steps=1)[0]
    [batch] = batches_of(stream_of(recipe)[0], 2, 1)
    for kind in kinds:
        model: Any = AutoModelForImageTextToText.from_pretrained(recipe.parent / kind, dtype=torch.float32)
        loss = mean_loss(model, dict(model.named_parameters()), batch, torch.float32)
        loss.backward()
        beside = beside_text(model)
        assert all(model.get_parameter(name).grad is None for name in beside) and beside
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert found[kind][0] == pytest.approx([loss.item(), norm.item()], rel=1e-5), kind


@TRAINED
def test_the_export_is_the_original_with_another_language_model(
    kinds: tuple[str, ...], recipe: Path, tmp_path: Path
) -> None:
    variants = {kind: variant(recipe, kind, TEXT) for kind in kinds}
    assert on_ranks(2, "exports", tmp_path, recipe=str(recipe), variants=variants, steps=2) == [{}, {}]
    for kind in kinds:
        before, after = stored(recipe.parent / kind), stored(recipe.parent / "runs" / kind / "export")
        assert before.keys() == after.keys()
        opened = [
            AutoModelForImageTextToText.from_pretrained(f)
            for f in (recipe.parent / kind, recipe.parent / "runs" / kind / "export")
        ]
        assert type(opened[0]) is type(opened[1]) and opened[0].config.architectures == opened[1].config.architectures
        beside, changed = {*beside_text(opened[0])}, 0
        for name, param in opened[0].named_parameters():
            same = torch.equal(param, opened[1].get_parameter(name))
            assert same or name not in beside, name
            changed += not same
        assert changed > len([*opened[0].get_decoder().parameters()]) // 2
        unchanged = {n for n, tensor in before.items() if torch.equal(tensor, after[n])}
        assert any("vision" in n or "visual" in n for n in unchanged)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_text_reaches_is_not_trained_in_silence(kind: str, recipe: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"ConditionalGeneration has parameters that no text reaches \(model\.vis.* with"
    ):
        prepare_model(planned(recipe, kind), 400)


def test_adapters_are_on_the_language_model_alone(recipe: Path) -> None:
    ready = prepare_model(planned(recipe, "gemma3", "adapter.kind=lora"), 400)
    adapted = {name for name, param in ready.trained.named_parameters() if param.requires_grad}
    assert adapted and all(name.startswith("model.language_model.layers.") for name in adapted)
