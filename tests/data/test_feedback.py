"""Answers that are judged one by one: the forms of a row and of its label, and the mismatched rows beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SHAKESPEARE, planned, write_recipe
from test_preferences import GOOD, OTHER, USER
from test_preferences import tokenizer as tokenizer  # a fixture

from fsdptrain.config.formats import Format
from fsdptrain.config.schema import Data
from fsdptrain.data.columns import likely_format, read_rows
from fsdptrain.data.prepare import open_rows, pack_rows, prepare
from fsdptrain.data.sources import first_source, open_sources
from fsdptrain.errors import DataError

ROW = {"prompt": "Is it 12?\n", "completion": "It is 12.", "label": True}


def written(tmp: Path, *rows: dict[str, Any]) -> str:
    (tmp / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp / "rows.jsonl")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (ROW, "Is it 12?\n⟦It is 12.<|endoftext|>⟧"),
        ({"prompt": [USER, GOOD, OTHER], "completion": [GOOD]}, ""),
        ({"prompt": [USER, GOOD, OTHER], "completion": GOOD["content"]}, ""),
        (
            {"prompt": "Who else?", "completion": [GOOD]},
            "<user>Who else?<|endoftext|>\n<assistant>⟦It is I.<|endoftext|>⟧\n",
        ),
        ({"messages": [USER, GOOD, OTHER, GOOD]}, ""),
    ],
    ids=["texts", "messages", "a text behind messages", "messages behind a text", "a whole conversation"],
)  # fmt: skip
def test_the_forms_of_a_row(row: dict[str, Any], text: str, tokenizer: Any, tmp_path: Path) -> None:
    """Without an expected text it is that of USER, GOOD, OTHER, GOOD, of which the last is trained."""
    path = written(tmp_path, *(row | {"kto_tag": good} for good in (False, True)))
    form, columns = likely_format(first_source(path)) or (None, {})
    if "label" in row:
        form, columns = Format.feedback, {}
    data = Data(path=path, format=form, columns=columns, seq_len=256)  # type: ignore[arg-type]
    [corpus] = pack_rows(open_rows(path, data, tokenizer, None, lambda *_: None), data, 1)
    turns = [f"<{m['role']}>{m['content']}<|endoftext|>\n" for m in (USER, GOOD, OTHER)]
    assert corpus.show(tokenizer) == (text or "".join(turns) + "<assistant>⟦It is I.<|endoftext|>⟧\n")
    assert sorted(corpus.desirable(0)) == ([True, True] if "label" in row else [False, True])


@pytest.mark.parametrize(
    ("label", "good"),
    [(True, True), (0, False), (1.0, True), ("False", False), ("1", True), ("undesirable", False), ("maybe", None),
     (None, None), (2, None), (-1, None)],
)  # fmt: skip
def test_labels(label: Any, good: bool | None, tmp_path: Path) -> None:
    path = written(tmp_path, ROW, ROW | {"label": label})
    rows = read_rows(open_sources(path), Data(format=Format.feedback), None)
    if good is None:
        with pytest.raises(DataError, match=r"rows\.jsonl:2: 'label' is .*; expected true or false \(or 1 and 0"):
            list(rows)
    else:
        assert next(rows)[1]["label"] is good


def test_a_text_needs_a_prompt_and_a_class_is_no_label(tmp_path: Path) -> None:
    del (row := dict(ROW))["prompt"]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: this row has no prompt: name its column in data\.columns"):
        list(read_rows(open_sources(written(tmp_path, row)), Data(format=Format.feedback), None))
    for label in (0, "positive", None):
        form, _ = likely_format(first_source(written(tmp_path, ROW | {"label": label}))) or (None, {})
        assert form == Format.prompt_completion


def test_mismatched_rows_are_of_the_row_before_and_fit_beside_the_others(tokenizer: Any, tmp_path: Path) -> None:
    words = SHAKESPEARE.read_text().split()
    rows = [
        {"prompt": " ".join(words[i : i + i % 9]), "completion": words[i] * (i % 5 + 1), "label": i % 3 > 0}
        for i in range(80)
    ]
    path = written(tmp_path, *rows, {"prompt": "a", "completion": "long " * 90, "label": True})
    data = Data(path=path, format=Format.feedback, seq_len=64)
    made = open_rows(path, data, tokenizer, None, lambda *_: None)
    assert made.notes["cut"] > 0 == made.notes["dropped"]
    assert made.notes["desirable"] == sum(row["label"] for row in rows) + 1
    for corpus in pack_rows(made, data, 3, 0.3):
        own = sorted(int(row) for row in corpus.rows_of(range(len(corpus))))
        batch = corpus.batch([*range(len(corpus)), -1])
        others, numbers = batch["mismatched"], corpus.rows_of(range(len(corpus))).tolist()
        assert corpus.divisor(range(len(corpus))) == len(numbers) == len(batch["reference"]) == len(others["reference"])
        for answer, row in enumerate(numbers):
            before = own[own.index(row) - 1]
            tokens = [made.tokens[made.ends[n] : made.ends[n + 1]].tolist() for n in (row, before)]
            cut = [made.trained[made.ends[n] : made.ends[n + 1]].tolist().index(True, 1) for n in (row, before)]
            found = others["input_ids"][others["answers"] == answer].tolist()
            assert found == (tokens[0][: cut[0]] + tokens[1][cut[1] :])[:64]
            labels = others["labels"][others["answers"] == answer]
            assert labels[labels != -100].tolist() == found[cut[0] :]
            assert batch["desirable"][answer] == (True if row == 80 else rows[row]["label"])
        assert (np.diff(corpus.offsets) > 1).any(), "no sequence has several rows"


@pytest.mark.parametrize("label", [True, False])
def test_answers_of_one_class_are_refused(label: bool, tokenizer: Any, tmp_path: Path) -> None:
    data = {"path": written(tmp_path, *[ROW | {"label": label}] * 3), "format": "feedback"}
    plan = planned(write_recipe(tmp_path, data=data, train__objective="kto"))
    found, other = ("desirable", "undesirable")[:: 1 if label else -1]
    with pytest.raises(DataError, match=f"label: all 3 answers are {found}, .*: add {other} ones"):
        prepare(plan, tokenizer, lambda *_: None)
