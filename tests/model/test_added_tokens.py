"""Special tokens that a recipe adds: their rows on all ranks, in training, after a resume, in exports and forecasts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import batches_of, cosine_rates, largest_difference, plain_curve, stream_of
from support import TINY, on_ranks, planned, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PhiConfig

from fsdptrain.checkpoint.resume import resume_problems
from fsdptrain.data.tokenizer import load_tokenizer, train_bpe
from fsdptrain.errors import RecipeError
from fsdptrain.train.preflight import prepare_model, prepare_tokenizer_and_model
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.model import check_model

ADDED = ["<|think|>", "<|answer|>", "<|done|>"]
WORDS = 500  # of the tokenizer before
SMALL = TINY | {"vocab_size": WORDS}
CONFIGS = {
    "untied": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "with room for one": LlamaConfig(**SMALL | {"vocab_size": WORDS + 1}),
    "with room": LlamaConfig(**SMALL | {"vocab_size": WORDS + 9}),
    "a bias of the head": PhiConfig(**SMALL, bos_token_id=None, eos_token_id=None),
}
STEPS, AT = 4, 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe whose rows have the tokens, a tokenizer without them, and models with its vocabulary."""
    tmp = tmp_path_factory.mktemp("added")
    rows = [
        f"{ADDED[0]}Is it {n}?{ADDED[1]}It is {n + 1}.{ADDED[2]} And so on, until all of them are counted."
        for n in range(300)
    ]
    (tmp / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    train_bpe(iter(rows), WORDS).save_pretrained(tmp / "tokenizer")
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        if name == "a bias of the head":
            torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(tmp / name)
    model = {"id": str(tmp / "untied"), "tokenizer": str(tmp / "tokenizer"), "add_tokens": ADDED}
    return write_recipe(tmp, model=model, export={"compare": False}, train__steps=STEPS, optim__lr=1e-3)


def ids_of(tokenizer: Any) -> range:
    ids = tokenizer.convert_tokens_to_ids(ADDED)
    assert ids == [*range(ids[0], ids[0] + len(ADDED))]
    return range(ids[0], ids[-1] + 1)


@pytest.fixture(scope="module")
def first_weights(recipe: Path) -> dict[str, list[Path]]:
    """Return what each model is exported as before its first step: on two ranks, some also on one."""
    found: dict[str, list[Path]] = {name: [] for name in CONFIGS}
    for world, names in {2: [*CONFIGS], 1: ["untied", "with room for one"]}.items():
        out = recipe.parent / f"ranks-{world}"
        variants = {n: [f"model.id={recipe.parent / n}", f"output_dir={out / n}"] for n in names}
        variants = {n: [*words, "export.dtype=float32"] for n, words in variants.items()}
        on_ranks(world, "exports", out, recipe=str(recipe), variants=variants, steps=0)
        for name in names:
            found[name].append(out / name / "export")
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_new_rows_are_the_mean_of_the_others_on_every_rank(
    name: str, recipe: Path, first_weights: dict[str, list[Path]]
) -> None:
    before = AutoModelForCausalLM.from_pretrained(recipe.parent / name)
    written = {(folder / "model.safetensors").read_bytes() for folder in first_weights[name]}
    assert len(written) == 1, "ranks that read other rows start with other ones"
    for folder in first_weights[name]:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids, size = ids_of(tokenizer), max(before.config.vocab_size, WORDS + len(ADDED))
        assert ids.start == WORDS and model.config.vocab_size == size
        changed = 0
        for old, new in zip(before.parameters(), model.parameters(), strict=True):
            if old.shape[0] != before.config.vocab_size:
                assert torch.equal(new, old)
                continue
            changed += 1
            kept = [i for i in range(len(old)) if i not in ids]
            assert len(new) == size and torch.equal(new[kept], old[kept])
            torch.testing.assert_close(
                new[ids.start : ids.stop], old[:WORDS].mean(0).expand_as(new[ids.start : ids.stop])
            )
        assert changed == {"tied": 1, "a bias of the head": 3}.get(name, 2)
        encoded = tokenizer(f"a{ADDED[1]}b").input_ids
        assert ids[1] in encoded and tokenizer.decode(encoded, skip_special_tokens=True) == "ab"


def test_they_are_trained_as_in_a_plain_loop(
    recipe: Path, first_weights: dict[str, list[Path]], tmp_path: Path
) -> None:
    names = ("untied", "tied", "with room")
    variants = {n: [f"model.id={recipe.parent / n}", f"output_dir={tmp_path / n}"] for n in names}
    found = on_ranks(2, "curves", tmp_path, recipe=str(recipe), variants=variants, steps=STEPS)[0]
    batches = batches_of(stream_of(recipe)[0], 8, STEPS)
    assert WORDS in {token for batch in batches for document in batch for token in document[0].tolist()}
    for name in names:
        expected = plain_curve(str(first_weights[name][0]), batches, cosine_rates(1e-3, STEPS), torch.float32)
        assert max(largest_difference(found[name], expected)) < 1e-5, name


def test_a_resume_is_bitwise_equal_and_other_tokens_are_another_run(recipe: Path, tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path / 'run'}"]
    whole = on_ranks(2, "save_between", tmp_path / "a", recipe=str(recipe), overrides=words, at=AT, steps=STEPS)[0]
    rest = on_ranks(2, "resume", tmp_path / "b", recipe=str(recipe), overrides=words, steps=STEPS)[0]
    assert (rest["first"], rest["curve"]) == (AT, whole["curve"][AT:])
    [problem] = resume_problems(planned(recipe).identity(), planned(recipe, "model.add_tokens=['<|end|>']").identity())
    assert problem.field == "model.add_tokens" and "was ['<|think|>'" in problem.message


def test_a_forecast_sees_the_new_rows(recipe: Path) -> None:
    numbers = {}
    for name, words in {"with": [], "without": ["model.add_tokens=[]"]}.items():
        findings, plan = Findings(), planned(recipe, *words)
        tokenizer = load_tokenizer(plan, lambda *_: None)
        check_model(plan, len(tokenizer), STEPS, findings)
        numbers[name] = findings.levels["model"]["parameters"]
    assert numbers["with"] - numbers["without"] == 2 * len(ADDED) * TINY["hidden_size"]


def test_a_trained_tokenizer_and_a_random_model_have_them_too(recipe: Path) -> None:
    scratch = [f"model.config={json.dumps({'model_type': 'llama', **SMALL | {'vocab_size': 303}})}", "model.id=null"]
    plan = planned(recipe, *scratch, "model.tokenizer={train: 300}")
    tokenizer, ready = prepare_tokenizer_and_model(plan, lambda *_: None)
    assert (*ids_of(tokenizer),) == (300, 301, 302) and ready.config.vocab_size == 303


LORA = ["adapter.kind=lora", "export.adapter=merged"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.add_tokens=[a, <|endoftext|>]"], r"the tokenizer has 'a' already \(id \d+\): remove it"),
        (["model.add_tokens=['<|a|>', '<|b|>', '<|a|>']"], r"'?<\|a\|>'? is listed twice"),
        (LORA, "because embed_tokens, lm_head would be frozen: add them to adapter.modules_to_save"),
        ([*LORA, "adapter.modules_to_save=[embed_tokens]"], "because lm_head would be frozen"),
        ([*LORA, "model.id=tied"], "embed_tokens, lm_head would be frozen: train without an adapter"),
        (["model.trainable=[layers.1, embed_tokens]"], "lm_head would be frozen: add them to model.trainable"),
        (
            ["adapter.kind=lora", "adapter.modules_to_save=[embed_tokens, lm_head]"],
            "model.config.vocab_size: 503, but 500 in .*use export.adapter: merged",
        ),
    ],
)
def test_what_would_not_work_is_refused(words: list[str], message: str, recipe: Path) -> None:
    words = [word.replace("=tied", f"={recipe.parent / 'tied'}") for word in words]
    with pytest.raises(RecipeError, match=message):
        prepare_tokenizer_and_model(planned(recipe, *words), lambda *_: None)


def test_adapters_may_train_them_beside(recipe: Path) -> None:
    whole = "adapter.modules_to_save=[embed_tokens, lm_head]"
    assert prepare_model(planned(recipe, *LORA, whole), WORDS + len(ADDED)).config.vocab_size == WORDS + len(ADDED)
