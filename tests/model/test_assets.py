"""Configuration, generation configuration and tokenizer of an export agree on bos, eos and pad."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from support import TINY, as_nobody, planned, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fsdptrain.data.tokenizer import train_bpe, vocabulary_size
from fsdptrain.errors import RecipeError
from fsdptrain.model.config import check_special_tokens, end_of_turn, load_config, save_assets, special_token_conflicts
from fsdptrain.model.skeleton import skeleton
from fsdptrain.plan.plan import Plan

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_in(folder: Path, template: str | None = None, **special: str) -> Any:
    made = train_bpe(iter(["to be, or not to be"] * 3), 300)
    made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], **special})
    made.chat_template = template
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def prepared(tmp: Path, tokenizer: Any, **changes: Any) -> tuple[Plan, Any, Any]:
    plan = planned(write_recipe(tmp, **changes))
    config = load_config(plan, vocabulary_size(tokenizer))
    return plan, config, skeleton(config, plan.recipe.model)


def written(tmp: Path, tokenizer: Any, **changes: Any) -> tuple[Any, Any, Plan]:
    """Return config and generation config as a run writes them, read back by transformers, and the plan."""
    plan, config, bare = prepared(tmp, tokenizer, **changes)
    save_assets(plan, config, bare, tokenizer, tmp / "assets")
    assert special_token_conflicts(tmp / "assets") == []
    return AutoConfig.from_pretrained(tmp / "assets"), GenerationConfig.from_pretrained(tmp / "assets"), plan


def model_in(folder: Path, kind: str = "llama", generation: dict[str, Any] | None = None, **config: Any) -> None:
    made = AutoConfig.for_model(kind, **{**TINY, **config})
    model = AutoModelForCausalLM.from_config(made)
    model.generation_config = GenerationConfig(**(generation or {}))
    model.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi3"])  # their default pad tokens are none, 0 and 32000
def test_from_scratch_the_tokenizers_special_tokens_are_used(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path / "tokenizer")
    config: dict[str, Any] = {"model_type": kind, **TINY, "vocab_size": 303}
    if kind == "gemma3":
        config = {"model_type": kind, "text_config": config | {"model_type": "gemma3_text"}}
        config["vision_config"] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    wanted = [getattr(tokenizer, name) for name in IDS]
    assert wanted == [None, 0, 0]
    model = {"config": config, "tokenizer": str(tmp_path / "tokenizer")}
    trained = prepared(tmp_path, tokenizer, model=model)[1].get_text_config()
    assert trained.pad_token_id is None, "the embedding of the padding token would get no gradient"
    found = written(tmp_path, tokenizer, model=model)
    assert [getattr(found[0].get_text_config(), name) for name in IDS] == wanted
    assert [getattr(found[0], name, None) for name in IDS] in (wanted, [None] * 3)
    assert [getattr(found[1], name) for name in IDS] == wanted


def test_a_model_with_its_own_tokenizer_keeps_its_other_end_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer = tokenizer_in(folder, CHATML)
    own = {"eos_token_id": [300, 0, 301], "top_p": 0.9, "do_sample": True}
    model_in(folder, eos_token_id=[0, 301], bos_token_id=5, generation=own)
    config, generation, _ = written(tmp_path, tokenizer, model={"id": str(folder)})
    assert (config.bos_token_id, config.eos_token_id) == (5, [0, 301])  # the tokenizer has no bos: the model's is kept
    assert sorted(generation.eos_token_id) == [0, 300, 301] and generation.top_p == 0.9


def test_another_tokenizer_replaces_the_special_tokens(tmp_path: Path) -> None:
    model_in(
        tmp_path / "model", bos_token_id=1, eos_token_id=[2, 7], pad_token_id=9,
        generation={"bos_token_id": 1, "eos_token_id": [2, 7], "suppress_tokens": [3], "min_p": 0.5, "do_sample": True},
    )  # fmt: skip
    tokenizer = tokenizer_in(tmp_path / "tokenizer", bos_token="<s>", pad_token="<pad>")
    model = {"id": str(tmp_path / "model"), "tokenizer": str(tmp_path / "tokenizer")}
    config, generation, _ = written(tmp_path, tokenizer, model=model)
    for found in (config, generation):
        assert [getattr(found, name) for name in IDS] == [getattr(tokenizer, name) for name in IDS]
    assert generation.suppress_tokens is None and generation.min_p == 0.5


UNSAVED = b'{"eos_token_id": [300, 0], "top_p": 0.9, "do_sample": false}'


@pytest.mark.parametrize(("content", "ends"), [(b"{", 0), (b"\xff", 0), (UNSAVED, [0, 300])])
def test_a_generation_config_that_is_invalid_is_said_and_keeps_its_end_tokens(
    content: bytes, ends: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    tokenizer = tokenizer_in(folder)
    model_in(folder, eos_token_id=0)
    (folder / "generation_config.json").write_bytes(content)
    _, generation, _ = written(tmp_path, tokenizer, model={"id": str(folder)})
    assert generation.eos_token_id == ends and generation.top_p != 0.9
    assert f"generation_config.json of {folder} is invalid, so a plain one is written" in capfd.readouterr().out


def test_a_generation_config_that_cannot_be_read_is_not_replaced() -> None:
    with tempfile.TemporaryDirectory(prefix="fsdptrain-") as name:
        Path(name).chmod(0o777)  # the folders of pytest are for their owner only
        tokenizer = tokenizer_in(folder := Path(name) / "model")
        model_in(folder)
        what = prepared(Path(name), tokenizer, model={"id": str(folder)})
        (folder / "generation_config.json").chmod(0)
        with as_nobody(), pytest.raises(PermissionError, match=r"generation_config\.json"):
            save_assets(*what, tokenizer, Path(name) / "assets")


def test_generation_stops_where_the_template_ends_a_turn(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer = tokenizer_in(folder, CHATML)
    model_in(folder, eos_token_id=0)
    chat = {"model": {"id": str(folder)}, "data__format": "chat"}
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn(tokenizer) == im_end
    _, generation, _ = written(tmp_path, tokenizer, **chat)
    assert generation.eos_token_id == [0, im_end]
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ eos_token }}")
    assert end_of_turn(tokenizer) is None
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_of_turn(tokenizer) is None


def test_contradictions_in_a_folder_are_found(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path / "tokenizer")
    written(tmp_path, tokenizer, model__tokenizer=str(tmp_path / "tokenizer"))
    config = AutoConfig.from_pretrained(tmp_path / "assets")
    config.eos_token_id = 2
    config.save_pretrained(tmp_path / "assets")
    assert special_token_conflicts(tmp_path / "assets") == ["eos_token_id: the tokenizer has 0, config.json 2"]


def test_a_recipe_that_contradicts_the_tokenizer_is_rejected(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path / "tokenizer")
    plan = planned(write_recipe(tmp_path, model__config__eos_token_id=2))
    with pytest.raises(RecipeError, match=r"eos_token_id: 2: remove this key: the tokenizer's value \(0\) is used"):
        check_special_tokens(plan, tokenizer)
