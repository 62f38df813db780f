"""The language model of a vision-language checkpoint: trained on text, exported as the whole model it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import small_config
from reference import batches_of, mean_loss, stream_of
from safetensors.torch import load_file
from support import on_ranks, planned, write_recipe
from transformers import AutoModelForImageTextToText

from fsdptrain.errors import RecipeError
from fsdptrain.model.units import beside_text
from fsdptrain.train.preflight import prepare_model

KINDS = ("gemma3", "mistral3", "qwen3_5")
TEXT = "model.trainable=[language_model,lm_head]"


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


def stored(folder: Path) -> dict[str, torch.dtype]:
    return {name: t.dtype for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("kinds", [("gemma3",), pytest.param(("mistral3", "qwen3_5"), marks=pytest.mark.soak)], ids=str)
def test_the_first_step_is_that_of_the_original_class_and_only_its_language_model_changes(
    kinds: tuple[str, ...], recipe: Path, tmp_path: Path
) -> None:
    variants = {kind: variant(recipe, kind, TEXT) for kind in kinds}
    curves = on_ranks(2, "exports", tmp_path, recipe=str(recipe), variants=variants, steps=2)[0]
    [batch] = batches_of(stream_of(recipe)[0], 2, 1)
    for kind in kinds:
        before, after = recipe.parent / kind, recipe.parent / "runs" / kind / "export"
        model, trained = (AutoModelForImageTextToText.from_pretrained(f, dtype=torch.float32) for f in (before, after))
        assert type(model) is type(trained) and model.config.architectures == trained.config.architectures
        assert stored(before) == stored(after)
        loss = mean_loss(model, dict(model.named_parameters()), batch, torch.float32)
        loss.backward()
        beside, changed = {*beside_text(model)}, 0
        for name, param in model.named_parameters():
            same = torch.equal(param, trained.get_parameter(name))
            assert (same and param.grad is None) or name not in beside, name
            changed += not same
        assert changed > len([*model.get_decoder().parameters()]) // 2
        assert any("vision" in name or "visual" in name for name in beside)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert curves[kind][0] == pytest.approx([loss.item(), norm.item()], rel=1e-5), kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_text_reaches_is_not_trained_in_silence(kind: str, recipe: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"ConditionalGeneration has parameters that no text reaches \(model\.vis.* with"
    ):
        prepare_model(planned(recipe, *variant(recipe, kind)), 400)


def test_adapters_are_on_the_language_model_alone(recipe: Path) -> None:
    ready = prepare_model(planned(recipe, "adapter.kind=lora"), 400)
    adapted = {name for name, param in ready.trained.named_parameters() if param.requires_grad}
    assert adapted and all(name.startswith("model.language_model.layers.") for name in adapted)
