"""The loss of a folder is that of a plain loop over its rows, and its answers are those of `generate`."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudo_terminal import Terminal
from support import TINY, write_recipe
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.config.reader import load
from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.errors import DataError, RecipeError
from fsdptrain.folder.rundir import RunDir
from fsdptrain.inference.dialogue import Dialogue, Sampling
from fsdptrain.inference.opened import OpenedModel, opened_model
from fsdptrain.inference.scores import ReadAs, score_files
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.processes import VisibleText
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import printable

TEXTS = ["To be, or not to be, that is the question. " * 8, "KING: who is there?", "Nay, answer me: stand."]
POSITIONS = 20_000
QUIET = Screen(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedModel]:
    """Open a folder with a random Llama and a tokenizer with the plain chat template."""
    folder = tmp_path_factory.mktemp("folder")
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(
        LlamaConfig(**TINY | {"max_position_embeddings": POSITIONS}, initializer_range=0.2)
    )
    made.save_pretrained(folder)
    tokenizer = train_bpe(iter(TEXTS), 300)
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    with opened_model(RunDir.open(folder), None, None, False, QUIET) as opened:
        yield opened


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def plain_sum(model: Any, pieces: list[tuple[list[int], int, list[int]]]) -> tuple[float, int]:
    """Return the loss of a plain loop over pieces (tokens, the first that counts, tokens behind), and their labels."""
    total, labels = 0.0, 0
    for ids, first, behind in pieces:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        wanted = torch.tensor([*ids, *behind][1 : len(ids) + 1])
        logits, wanted = logits[max(0, first - 1) : len(wanted)], wanted[max(0, first - 1) :]
        total += functional.cross_entropy(logits, wanted, reduction="sum").item()
        labels += len(wanted)
    return total, labels


def test_the_loss_of_texts_is_that_of_a_plain_loop(model: OpenedModel, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    found = score_files(model, [path], ReadAs(seq_len=48), QUIET)
    pieces = []
    for text in TEXTS:
        ids = [*model.tokenizer(text).input_ids, model.tokenizer.eos_token_id]
        pieces += [(ids[i : i + 48], 0, ids[i + 48 : i + 49]) for i in range(0, len(ids), 48)]
    assert len(pieces) > len(TEXTS), "no row is split"
    total, labels = plain_sum(model.model, pieces)
    assert found["files"][0]["tokens"] == labels
    assert found["files"][0]["loss"] == pytest.approx(total / labels, rel=1e-6)
    assert found["all"]["perplexity"] == pytest.approx(math.exp(total / labels), rel=1e-5)


def test_formats_are_guessed_file_by_file_and_all_is_the_mean_over_tokens(model: OpenedModel, tmp_path: Path) -> None:
    asked = write_rows(tmp_path / "asked.jsonl", [{"question": text, "answer": "yes"} for text in TEXTS[1:]])
    talk = [{"role": "user", "content": TEXTS[1]}, {"role": "assistant", "content": TEXTS[2]}]
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": talk}])
    found = score_files(model, [asked, chats], ReadAs(), QUIET)
    eos = model.tokenizer.eos_token_id
    pieces = []
    for text in TEXTS[1:]:
        prompt = model.tokenizer(f"{text}\n").input_ids
        pieces.append(([*prompt, *model.tokenizer("yes").input_ids, eos], len(prompt), []))
    before = model.tokenizer.apply_chat_template(talk[:1], tokenize=True, add_generation_prompt=True).input_ids
    said = ([*before, *model.tokenizer(TEXTS[2]).input_ids, eos], len(before), [])
    sums = [plain_sum(model.model, pieces), plain_sum(model.model, [said])]
    for each, (total, labels) in zip(found["files"], sums, strict=True):
        assert each["tokens"] == labels and each["loss"] == pytest.approx(total / labels, rel=1e-6)
    total, labels = map(sum, zip(*sums, strict=True))
    assert found["all"]["tokens"] == labels and found["all"]["loss"] == pytest.approx(total / labels, rel=1e-6)


def test_what_cannot_be_read_is_refused_with_the_options(model: OpenedModel, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"a": "b"}])
    with pytest.raises(DataError, match="match no format") as error:
        score_files(model, [path], ReadAs(), QUIET)
    assert "--column" in error.value.__notes__[0]
    assert score_files(model, [path], ReadAs(columns={"text": "a"}), QUIET)["files"][0]["rows"] == 1
    with pytest.raises(DataError, match=r"^--data: 'none.txt' was not found"):
        score_files(model, ["none.txt"], ReadAs(), QUIET)


def test_of_preferences_the_answer_that_is_named_is_read(model: OpenedModel, tmp_path: Path) -> None:
    """Of a folder of unknown origin, and of a run that learned from preferences."""
    pairs = [{"prompt": "KING:", "chosen": " who is there?", "rejected": " stand."}] * 3
    path = write_rows(tmp_path / "pairs.jsonl", pairs)
    chosen = write_rows(
        tmp_path / "chosen.jsonl", [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    )
    recipe = write_recipe(tmp_path, data__path=path, data__format="preference", train__objective="dpo")
    of_run = dataclasses.replace(model, plan=make_plan(load(recipe), Topology("cpu", 1, 1)))
    way_out = "--format prompt_completion --column completion=chosen"
    for opened in (model, of_run):
        for read_as in (ReadAs(), ReadAs("preference")):
            with pytest.raises(RecipeError, match=rf"two answers in a row: say which is read, such as {way_out}$"):
                score_files(opened, [path], read_as, QUIET)
        found = score_files(opened, [path], ReadAs("prompt_completion", {"completion": "chosen"}), QUIET)
        assert found["all"] == score_files(model, [chosen], ReadAs(), QUIET)["all"]


def test_answers_are_those_of_generate(model: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue = Dialogue(model, Sampling(max_tokens=6, temperature=0, seed=0))
    messages: list[dict[str, str]] = []
    for text in TEXTS[1:]:
        messages.append({"role": "user", "content": text})
        ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
        written = model.model.generate(ids, attention_mask=ids**0, max_new_tokens=6, do_sample=False)
        answer = model.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        monkeypatch.setattr("sys.stdout", VisibleText(shown := io.BytesIO(), "utf-8"))
        assert dialogue.answer(text) == answer
        assert shown.getvalue().decode() == printable(answer) + "\n"
        messages.append({"role": "assistant", "content": answer})
    assert dialogue.messages == messages


def test_an_answer_ends_when_it_is_stopped_and_a_seed_repeats_it(model: OpenedModel) -> None:
    calls = iter([False, False, True])
    stopped = Dialogue(model, Sampling(50, 0, 0)).answer("x", lambda: next(calls))
    assert stopped == Dialogue(model, Sampling(3, 0, 0)).answer("x")
    first, again, other = (Dialogue(model, Sampling(8, 1.0, seed)).answer("x") for seed in (3, 3, 4))
    assert first == again != other


def test_a_conversation_that_is_too_long_is_refused_and_forgotten(model: OpenedModel) -> None:
    dialogue = Dialogue(model, Sampling(5, 0, 0))
    with pytest.raises(RecipeError, match="the model has 20,000 positions"):
        dialogue.answer("x" * 2 * POSITIONS)
    assert dialogue.messages == []


def test_ctrl_c_ends_an_answer_and_not_the_dialogue(model: OpenedModel) -> None:
    with Terminal("chat", model.rundir.root, "--max-tokens", POSITIONS, "--temperature", 0) as terminal:
        terminal.wait_for("/exit the dialogue")
        terminal.type("hello\n")
        terminal.wait_for("> hello\n")
        terminal.press_ctrl_c()
        terminal.type("/exit\n")
        assert terminal.wait(60) == 0, "the answer, which takes minutes, did not end"
        assert "Traceback" not in terminal.text()
