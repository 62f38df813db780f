"""Preferences: the forms that a pair may have, its tokens, and how pairs are cut and packed."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SHAKESPEARE, planned, write_recipe

from fsdptrain.config.formats import Format
from fsdptrain.config.reader import load
from fsdptrain.config.schema import Data
from fsdptrain.data.columns import read_rows
from fsdptrain.data.encode import Encoder
from fsdptrain.data.prepare import notes_on_rows, open_rows, pack_rows, prepare
from fsdptrain.data.sources import open_sources
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.errors import DataError

USER, OTHER = {"role": "user", "content": "Who is it?"}, {"role": "user", "content": "Who else?"}
GOOD, BAD = {"role": "assistant", "content": "It is I."}, {"role": "assistant", "content": "Nobody at all."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = train_bpe(iter(SHAKESPEARE.read_text()[:40000].split("\n\n")), 300)
    found.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return found


def encoded(tmp: Path, tokenizer: Any, *rows: dict[str, Any], **keys: Any) -> tuple[list[tuple[str, str]], Encoder]:
    """Return of each answer its text, and the trained part of it."""
    (tmp / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(write_recipe(tmp), ["data.format=preference", "train.objective=dpo"]).recipe.data
    data = Data(**vars(data) | {"path": str(tmp / "pairs.jsonl"), "seq_len": 256} | keys)
    encode, found = Encoder(tokenizer, data), []
    for batch in read_rows(open_sources(data.path), data, None):
        for ids, mask in encode(batch):
            trained = [token for token, flag in zip(ids, mask, strict=True) if flag]
            found.append((tokenizer.decode(ids), tokenizer.decode(trained)))
    return found, encode


def test_texts_with_and_without_a_prompt(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"prompt": "Is it 12?", "chosen": " It is 12.", "rejected": " It is not."},
        {"chosen": "I say it is 12.", "rejected": "I say it is 13."},
    ]
    found, _ = encoded(tmp_path, tokenizer, rows[0], separator="\n")
    assert found == [
        ("Is it 12?\n It is 12.<|endoftext|>", " It is 12.<|endoftext|>"),
        ("Is it 12?\n It is not.<|endoftext|>", " It is not.<|endoftext|>"),
    ]
    assert encoded(tmp_path, tokenizer, rows[1])[0] == [
        ("I say it is 12.<|endoftext|>", " 12.<|endoftext|>"),
        ("I say it is 13.<|endoftext|>", " 13.<|endoftext|>"),
    ], "whole words differ"
    with pytest.raises(DataError, match="separator stands behind a prompt, and this row has none"):
        encoded(tmp_path, tokenizer, rows[1], separator="\n")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER, BAD, OTHER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, BAD, OTHER, GOOD], "rejected": [USER, BAD, OTHER, BAD]},
        {"prompt": [USER, BAD, OTHER], "chosen": [USER, BAD, OTHER, GOOD], "rejected": [USER, BAD, OTHER, BAD]},
        {"prompt": "Who is it?", "chosen": [USER, BAD, OTHER, GOOD], "rejected": [USER, BAD, OTHER, BAD]},
    ],
    ids=["prompt", "no prompt", "prompt in both", "prompt as text"],
)
@pytest.mark.parametrize("marks", [False, True], ids=["", "generation marks"])
def test_conversations(row: dict[str, Any], marks: bool, tmp_path: Path, tokenizer: Any) -> None:
    """Only the last answers are trained: what the assistant says in the prompt is the same in both."""
    if marks:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
            "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}\n{% endfor %}"
        )
    found, _ = encoded(tmp_path, tokenizer, row)
    for (text, trained), answer in zip(found, (GOOD, BAD), strict=True):
        assert text == tokenizer.apply_chat_template([USER, BAD, OTHER, answer], tokenize=False)
        assert trained == answer["content"] + "<|endoftext|>"


def test_a_text_beside_messages_is_what_the_user_says(tmp_path: Path, tokenizer: Any) -> None:
    found, _ = encoded(tmp_path, tokenizer, {"prompt": USER["content"], "chosen": [GOOD], "rejected": [BAD]})
    assert [text for text, _ in found] == [
        tokenizer.apply_chat_template([USER, answer], tokenize=False) for answer in (GOOD, BAD)
    ]
    tokenizer = train_bpe(iter(["abc"]), 260)
    with pytest.raises(DataError, match=r"pairs\.jsonl:1.*no chat template, which messages need"):
        encoded(tmp_path, tokenizer, {"chosen": [USER, GOOD], "rejected": [USER, BAD]})


def test_a_pair_is_cut_and_dropped_as_a_whole(tmp_path: Path, tokenizer: Any) -> None:
    long, size = "and so on " * 40, 64
    rows = [
        {"prompt": "a", "chosen": long, "rejected": "b"},
        {"prompt": "a", "chosen": long, "rejected": long},
        {"prompt": long, "chosen": "a", "rejected": "b"},
    ]
    _, encode = encoded(tmp_path, tokenizer, *rows, {"prompt": "a", "chosen": "b", "rejected": "c"})
    assert [*encode.lengths] == [246, 486, 486, 6], "a pair has one length, and is whole"
    data = Data(path=str(tmp_path / "pairs.jsonl"), format=Format.preference, seq_len=size)
    made = open_rows(data.path, data, tokenizer, None, lambda *_: None)
    assert np.diff(made.ends).tolist() == [size - 3, 3, size // 2, size // 2, 3, 3], (
        "the longer answer gets what the other one leaves"
    )
    assert {name: made.notes[name] for name in ("rows", "cut", "dropped")} == {"rows": 4, "cut": 3, "dropped": 1}
    made = open_rows(data.path, replace(data, long_rows="drop"), tokenizer, None, lambda *_: None)
    assert np.diff(made.ends).tolist() == [3, 3]
    assert {name: made.notes[name] for name in ("too_long", "dropped")} == {"too_long": 3, "dropped": 0}


def test_pairs_with_equal_answers_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    answers = [("b", "c"), ("b", "b"), ("c", "b"), ("c", "c")]
    encoded(tmp_path, tokenizer, *({"prompt": "a", "chosen": good, "rejected": bad} for good, bad in answers))
    data = Data(path=str(tmp_path / "pairs.jsonl"), format=Format.preference, seq_len=64)
    lost, _ = notes_on_rows(open_rows(data.path, data, tokenizer, None, lambda *_: None))
    assert lost == ["2 of 4 rows (50%) with two equal answers, of which none is preferred"]
    recipe = write_recipe(tmp_path, model__tokenizer={"train": 300})
    words = ["data.format=preference", "train.objective=dpo", f"data.path={tmp_path / 'pairs.jsonl'}"]
    encoded(tmp_path, tokenizer, *({"prompt": "a", "chosen": good, "rejected": good} for good, _ in answers))
    with pytest.raises(DataError, match="the answers of all 4 pairs are equal"):
        prepare(planned(recipe, *words), tokenizer, lambda *_: None)


def test_misspelt_columns_of_a_pair_are_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"did you mean data\.columns: \{chosen: choosen, rejected: reject\}\?"):
        encoded(tmp_path, tokenizer, {"prompt": "a", "choosen": "b", "reject": "c"})


def test_pairs_stay_in_one_sequence_of_one_data_set(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"{i}?", "chosen": "yes " * (i % 7), "rejected": "no " * (i % 5)} for i in range(1, 60)]
    encoded(tmp_path, tokenizer, *rows)
    data = Data(format=Format.preference, seq_len=64, path=str(tmp_path / "pairs.jsonl"))
    made = open_rows(data.path, data, tokenizer, None, lambda *_: None)
    train, held_out = pack_rows(made, data, 3, 0.3)
    seen = []
    for corpus in (train, held_out):
        for number in range(len(corpus)):
            of_sequence = corpus.rows_of([number])
            assert (of_sequence[::2] % 2 == 0).all() and (of_sequence[1::2] == of_sequence[::2] + 1).all()
            trained = sum(int(made.trained[made.ends[row] + 1 : made.ends[row + 1]].sum()) for row in of_sequence)
            assert corpus.labels[number] == trained and corpus.divisor([number]) == len(of_sequence) // 2
            seen += of_sequence.tolist()
    assert sorted(seen) == [*range(len(made.ends) - 1)] and len(held_out)
    batch = train.batch([0, -1, 1])
    answers, labels = batch["answers"].numpy(), batch["labels"].numpy()
    assert answers[1].min() == answers[1].max() == len(batch["reference"]), "padding is no answer"
    for answer, row in enumerate(train.rows_of([0, -1, 1])):
        tokens = made.tokens[made.ends[row] : made.ends[row + 1]]
        assert (batch["input_ids"].numpy()[answers == answer] == tokens).all()
        assert (labels[answers == answer] != -100).sum() == made.trained[made.ends[row] + 1 : made.ends[row + 1]].sum()
