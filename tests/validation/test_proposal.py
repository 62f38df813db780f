"""`fsdptrain init` as a user runs it: the rows are read, and the recipe is one that `validate` accepts."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fsdptrain
from transformers import GPT2Config, GPT2LMHeadModel

from fsdptrain.config.keys import flat
from fsdptrain.config.reader import load
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.validation.init_recipe import RowLengths, Treatment, choose_sizes, read_starter

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
    divided = {"parallel.experts": 4, "fsdp.accumulation": "hold_shards", "fsdp.cpu_offload": True}  # by a search
    (tmp_path / "divided.yaml").write_text(starter.text(divided))
    assert divided.items() <= flat(load(tmp_path / "divided.yaml").recipe).items()
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
    made = load(tmp_path / "recipe.yaml").recipe
    assert made.train.global_batch_size % 2 == 0
    assert done.stdout.endswith(f"next: fsdptrain validate {tmp_path / 'recipe.yaml'} --hardware 2xh100\n")
    (tmp_path / "runs" / made.name).mkdir(parents=True)
    done = fsdptrain("init", "--data", tmp_path / "a.jsonl", "--model", gpt2, tmp_path / "b.yaml", cwd=tmp_path)
    assert load(tmp_path / "b.yaml").recipe.name == f"{made.name}-2", "the first run is not resumed"


def sizes(
    lengths: np.ndarray[Any, Any], treatment: Treatment = "cut", positions: int | None = 512, ranks: int = 1,
    times: int = 1,
) -> dict[str, Any]:  # fmt: skip
    return choose_sizes(RowLengths(lengths, len(lengths) * times), treatment, positions, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 8, 6])
@pytest.mark.parametrize("rows", [1, 7, 90, 400, 5_000, 300_000])
@pytest.mark.parametrize("tokens", [12, 300, 3_000, 30_000])
@pytest.mark.parametrize("treatment", ["cut", "split", "continued"])
def test_a_batch_fits_an_epoch_and_gives_steps_if_the_data_allow(
    ranks: int, rows: int, tokens: int, treatment: Treatment
) -> None:
    found = sizes(np.full(rows, tokens), treatment, 4096, ranks)
    seq_len, batch = found["data.seq_len"], found["train.global_batch_size"]
    assert 8 <= seq_len <= 4096
    held_out = (found["data.eval"] or {"fraction": 0})["fraction"]
    whole, rest = divmod(tokens, seq_len) if treatment != "cut" else (tokens >= seq_len, tokens % seq_len)
    rest = 0 if treatment == "cut" and whole else rest
    sequences = (rows * whole + (math.ceil(rows / (seq_len // rest)) if rest else 0)) * (1 - held_out)
    assert batch % (found["train.micro_batch_size"] * ranks) == 0
    assert batch <= max(sequences, ranks), "never more than an epoch"
    steps = found["train.epochs"] * sequences / batch
    assert steps >= 99 or batch == ranks
    assert steps / found["checkpoint.every"] <= 5 or found["checkpoint.every"] == 500, "a run floods its disk"
    assert found["eval.every"] is None or found["eval.every"] <= max(1, steps)
    assert 1 <= found["checkpoint.every"] <= 500


def test_sequences_cover_nearly_all_rows_up_to_the_positions_of_the_model() -> None:
    lengths = np.array([200] * 990 + [5_000] * 10)
    assert sizes(lengths, positions=256)["data.seq_len"] == 256
    assert sizes(np.array([100] * 995 + [170] * 5), positions=192)["data.seq_len"] == 192, (
        "none is cut that is not much longer"
    )
    assert sizes(np.full(1000, 1_500))["data.seq_len"] == 512, "the limit of GPT-2 in this test"
    assert sizes(np.full(1000, 1_500), positions=None)["data.seq_len"] == 1_536
    assert sizes(np.full(10, 100_000), "split", None)["data.seq_len"] == 2_048


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [24, 500, 7_000])
@pytest.mark.parametrize("tokens", [20, 67, 130, 700])
def test_several_short_rows_fill_a_sequence_unless_too_few_steps_were_left(tokens: int, rows: int, ranks: int) -> None:
    found = sizes(np.full(rows, tokens), positions=8192, ranks=ranks)
    seq_len = found["data.seq_len"]
    fill = seq_len // tokens * tokens / seq_len
    assert fill >= (0.85 if rows > 24 else 0.7), seq_len


def test_a_tenth_of_few_rows_is_held_out_and_a_hundredth_of_many() -> None:
    held_out = {rows: sizes(np.full(rows, 100))["data.eval"] for rows in (24, 60, 7_000, 50_000)}
    fractions = {60: {"fraction": 0.1}, 7_000: {"fraction": 0.05}, 50_000: {"fraction": 0.01}}
    assert held_out == {24: None, **fractions}
    rows, given = RowLengths(np.full(60, 100), 60), {"path": "held-out.jsonl"}
    found = choose_sizes(rows, "cut", 512, 1, given)
    assert found["data.eval"] == given and found["eval.every"]


def test_data_of_which_a_part_was_read_counts_as_a_whole() -> None:
    part, whole = sizes(np.full(1000, 100)), sizes(np.full(1000, 100), times=50)
    assert whole["train.global_batch_size"] > part["train.global_batch_size"]
    assert (part["train.epochs"], whole["train.epochs"]) == (3, 1)
    assert math.isclose(whole["data.eval"]["fraction"], 0.01)
