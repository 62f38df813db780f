"""`fsdptrain init` as a user runs it: the rows are read, and the recipe is one that `validate` accepts."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from support import fsdptrain
from transformers import GPT2Config, GPT2LMHeadModel

from fsdptrain.config.reader import load
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.validation.init_recipe import read_starter

PAIR = ("chosen", "rejected")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """Return the folder of a tiny GPT-2 with 128 positions: weights and tokenizer."""
    folder = tmp_path / "gpt2"
    train_bpe(iter(["what is the sum of the two"] * 3), 300).save_pretrained(folder)
    shape = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int) -> None:
    rows = (
        {"question": "what is the sum", "answer": "of the " * random.Random(i).randint(1, 70)} for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_init_chooses_sizes_from_all_rows_and_prints_what_validate_knows(tmp_path: Path, gpt2: Path) -> None:
    data, more, empty, dest = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl", "my recipe.yaml"))
    write_rows(data, 300)
    write_rows(more, 100)
    empty.write_text("")
    done = fsdptrain("init", "--data", data, "--data", more, "--data", empty, "--model", gpt2, dest)
    assert done.returncode == 0, done.stderr
    recipe = load(dest).recipe
    assert recipe.data.path == [str(data), str(more), str(empty)] and recipe.data.separator == "\n"
    assert 64 <= recipe.data.seq_len <= 128, "not longer than the positions of the model"
    assert recipe.train.global_batch_size < 64 and recipe.data.eval == {"fraction": 0.1} and recipe.eval.every
    assert "400 rows, " in done.stdout and "⟦of the " in done.stdout and "1 empty file skipped" in done.stdout
    assert done.stdout.splitlines()[-2:] == [str(dest), f"next: fsdptrain validate '{dest}'"]
    checked = json.loads(fsdptrain("validate", dest, "--no-build", "--json").stdout)
    assert checked["problems"] == [] and checked["data"]["steps"] >= 99
    refused = fsdptrain("validate", dest, "--no-build", "train.global_batch_size=1024")
    assert refused.returncode == 2 and "train.global_batch_size: 1,024 sequences, but one epoch has" in refused.stderr


def test_a_recipe_for_pairs_has_the_rate_of_dpo_and_the_separator_of_the_same_questions(tmp_path: Path) -> None:
    rows = {
        "pairs": {"prompt": "Who is it?", "chosen": "It is I.", "rejected": "Nobody."},
        "spaced": {"prompt": "Who is it?", "chosen": " It is I.", "rejected": " Nobody."},
        "alone": {"chosen": "Who is it? I.", "rejected": "Who is it? Nobody."},
        "talk": {name: [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": name}] for name in PAIR},
        "asked": {"prompt": "Who is it?", "completion": "It is I."},
    }
    recipes = {}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        starter = read_starter([str(tmp_path / f"{name}.jsonl")], "org/name", tmp_path / f"{name}.yaml")
        (tmp_path / f"{name}.yaml").write_text(starter.text({"data.eval": {"fraction": 0.1}, "eval.every": 2}))
        recipes[name] = load(tmp_path / f"{name}.yaml").recipe
    separators = {name: recipe.data.separator for name, recipe in recipes.items()}
    assert separators == {"pairs": "\n", "spaced": "", "alone": "", "talk": "", "asked": "\n"}
    assert {name: recipe.optim.lr for name, recipe in recipes.items()} == dict.fromkeys(rows, 1e-6) | {"asked": 2e-5}
    held_out = dataclasses.replace(starter, held_out="held-out.jsonl").text({"eval.every": 2})
    assert "\n  eval: {path: held-out.jsonl}\n" in held_out and held_out.endswith("\neval: {every: 2} # steps\n")


def test_the_held_out_split_of_every_configuration_is_one_glob_relative_to_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in ("main", "socratic"):
        for split in ("train", "test"):
            path = tmp_path / "data" / config / f"{split}-00000-of-00001.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_rows(path, 2)
    monkeypatch.chdir(tmp_path)
    for dest in ("recipe.yaml", "sub/recipe.yaml"):
        Path(dest).parent.mkdir(exist_ok=True)
        Path(dest).write_text(read_starter(["data"], "org/name", Path(dest)).text({}))
        data = load(Path(dest)).recipe.data
        up = "../" if "/" in dest else ""
        assert data.path == f"{up}data" and data.eval == {"path": f"{up}data/**/test-00000-of-00001.jsonl*"}


def test_init_estimates_from_bytes_without_a_tokenizer(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", 400)
    done = fsdptrain("init", "--data", tmp_path / "a.jsonl", "--model", "org/name", tmp_path / "recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert "400 rows, about " in done.stdout and "estimated" in done.stdout and "cannot be reached" in done.stdout
    assert 64 <= load(tmp_path / "recipe.yaml").recipe.data.seq_len <= 256


def test_init_for_other_hardware_writes_the_fastest_plan_with_its_forecast(tmp_path: Path, gpt2: Path) -> None:
    write_rows(tmp_path / "a.jsonl", 400)
    done = fsdptrain(
        "init", "--data", tmp_path / "a.jsonl", "--model", gpt2, "--hardware", "2xh100", tmp_path / "recipe.yaml",
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "recipe.yaml").read_text()
    assert "# the fastest of " in text and " for 2xh100, by forecast: " in text, done.stdout
    assert "strategy: NO_SHARD" in text
    assert load(tmp_path / "recipe.yaml").recipe.train.global_batch_size % 2 == 0
