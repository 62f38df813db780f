"""The loss of a folder is that of a plain loop over its rows, and its answers are those of `generate`."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from pseudo_terminal import Terminal
from support import TINY, planned, write_recipe
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE
from fsdptrain.data.encode import evaluated_prompts
from fsdptrain.data.prepare import prepare
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.errors import DataError, RecipeError
from fsdptrain.inference.opened import Dialogue, OpenedModel, opened_model
from fsdptrain.inference.scores import ReadAs, score_files
from fsdptrain.processes import VisibleText
from fsdptrain.report.run_banner import _snippet
from fsdptrain.run_folder.rundir import RunDir
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
        total += functional.cross_entropy(logits.double(), wanted, reduction="sum").item()
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


THOUGHTS = PLAIN_CHAT_TEMPLATE + "{% if thinking %}<think>{% endif %}"


@pytest.fixture
def mixed(model: OpenedModel, tmp_path: Path) -> OpenedModel:
    """Return the model as that of a run on texts, maths and conversations of two kinds; `data` says nothing."""
    talk = [[{"role": "user", "content": TEXTS[1]}, {"role": "assistant", "content": TEXTS[2]}]]
    write_rows(tmp_path / "talk.jsonl", [{"talk": each} for each in talk])
    write_rows(tmp_path / "maths.jsonl", [{"question": "1 + 1?", "answer": "2"}])
    write_rows(tmp_path / "verse.jsonl", [{"text": TEXTS[0]}])
    chat, maths = (
        ({"format": "chat", "columns": {"messages": "talk"}} for _ in range(2)),
        {"format": "prompt_completion", "columns": {"prompt": "question", "completion": "answer"}},
    )
    sources = [
        {"path": "verse.jsonl"}, {"path": "maths.jsonl", "separator": "\n=> ", **maths},
        {"path": "talk.jsonl", "chat_template_kwargs": {"thinking": True}, **next(chat)},
        {"path": "talk.jsonl", "name": "curt", **next(chat)},
    ]  # fmt: skip
    recipe = write_recipe(tmp_path, data__path=None, data__sources=sources, data__chat_template=THOUGHTS)
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = THOUGHTS
    return dataclasses.replace(model, plan=planned(recipe), tokenizer=tokenizer)


def test_a_prompt_is_one_of_the_conversations_of_a_mixture(mixed: OpenedModel) -> None:
    """In `fsdptrain chat`, `eval.prompts`, the program that a run prints and the end tokens of an export."""
    assert mixed.plan is not None
    recipe, tokenizer = mixed.plan.recipe, mixed.tokenizer
    rendered = {
        thinking: tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], add_generation_prompt=True, thinking=thinking
        ).input_ids
        for thinking in (True, False)
    }
    prompts = dataclasses.replace(recipe.eval, prompts=["hi"], max_new_tokens=4)
    assert evaluated_prompts(dataclasses.replace(recipe, eval=prompts), tokenizer) == [rendered[True]]
    for source, ids in ((None, rendered[True]), ("curt", rendered[False]), ("maths", tokenizer("hi\n=> ").input_ids)):
        dialogue = Dialogue(mixed, 2, 0, 0, source)
        assert f", as in the rows of {source or 'talk'}; " in dialogue.usage
        written = mixed.model.generate(torch.tensor([ids]), max_new_tokens=2, do_sample=False)
        assert dialogue.answer("hi") == tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)
    with pytest.raises(RecipeError, match="'talks' is no source of the run: use one of verse, maths, talk, curt"):
        Dialogue(mixed, 2, 0, 0, "talks")
    assert "apply_chat_template" in "".join(_snippet(mixed.plan, Path("export")))
    assert "thinking=True" in "".join(_snippet(mixed.plan, Path("export")))


def test_files_are_read_as_the_source_of_a_mixture_that_is_named(mixed: OpenedModel, tmp_path: Path) -> None:
    def tokens(name: str, form: str | None = None, source: str | None = None) -> int:
        read_as = ReadAs(form, source=source)
        return int(score_files(mixed, [str(tmp_path / name)], read_as, QUIET)["all"]["tokens"])

    assert tokens("maths.jsonl", source="maths") == len(mixed.tokenizer("2").input_ids) + 1
    assert tokens("verse.jsonl", source="verse") == len(mixed.tokenizer(TEXTS[0]).input_ids)
    asked = write_rows(tmp_path / "asked.jsonl", [{"prompt": "1 + 1?", "completion": "2"}])
    assert tokens(asked, "prompt_completion") == tokens("maths.jsonl", source="maths"), "as its columns say"
    with pytest.raises(RecipeError, match=r"name the source .* with --source: verse, maths, talk, curt"):
        tokens("talk.jsonl")
    assert tokens("talk.jsonl", source="talk") == tokens("talk.jsonl", source="curt") > 0
    with pytest.raises(DataError, match="no column 'talk'"):
        tokens("verse.jsonl", source="talk")


def test_a_held_out_file_of_a_mixture_is_read_as_the_source_that_is_named(mixed: OpenedModel, tmp_path: Path) -> None:
    def held_out(words: str) -> str:
        plan = planned(tmp_path / "recipe.yaml", f"data.eval={{{words}}}")
        _, _, corpus = prepare(plan, mixed.tokenizer, lambda *_: None)
        return corpus.show(mixed.tokenizer)

    assert held_out("path: maths.jsonl, source: maths") == "1 + 1?\n=> ⟦2<|endoftext|>⟧"
    assert held_out("path: talk.jsonl, source: talk").endswith("<think>")
    assert held_out("path: talk.jsonl, source: curt").endswith("stand.<|endoftext|>⟧\n")
    for words, source in (("path: talk.jsonl, source: talks", "'talks'"), ("path: talk.jsonl", "null")):
        with pytest.raises(RecipeError, match=rf"source: {source} is not one of the sources verse, maths, talk, curt"):
            held_out(words)


def test_of_preferences_the_answer_that_is_named_is_read(model: OpenedModel, tmp_path: Path) -> None:
    """Of a folder of unknown origin; a run that learned from preferences has a reference to compare with."""
    pairs = [{"prompt": "KING:", "chosen": " who is there?", "rejected": " stand."}] * 3
    path = write_rows(tmp_path / "pairs.jsonl", pairs)
    chosen = write_rows(
        tmp_path / "chosen.jsonl", [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    )
    recipe = write_recipe(tmp_path, data__path=path, data__format="preference", train__objective="dpo")
    of_run = dataclasses.replace(model, plan=planned(recipe))
    way_out = "--format prompt_completion --column completion=chosen"
    for opened, reason in (
        (model, rf"two answers in a row: say which is read, such as {way_out}$"),
        (of_run, "no files have the reference of this run, because its recipe has model.init: random"),
    ):
        for read_as in (ReadAs(), ReadAs("preference")):
            with pytest.raises(RecipeError, match=reason):
                score_files(opened, [path], read_as, QUIET)
        found = score_files(opened, [path], ReadAs("prompt_completion", {"completion": "chosen"}), QUIET)
        assert found["all"] == score_files(model, [chosen], ReadAs(), QUIET)["all"]


@pytest.mark.parametrize("kind", ["full", "lora", "continued"])
def test_pairs_are_compared_with_the_model_at_the_start_as_a_plain_loop_does(
    kind: str, model: OpenedModel, tmp_path: Path
) -> None:
    pairs = [{"prompt": "KING:", "chosen": text, "rejected": text[::-1][:-3]} for text in TEXTS]
    path, folder = write_rows(tmp_path / "pairs.jsonl", pairs), model.rundir.root
    if kind == "continued":
        with_random_adapter(folder, 1).save_pretrained(tmp_path / "adapter")
    adapter = {"kind": None if kind == "full" else "lora"}
    adapter |= {"from": str(tmp_path / "adapter")} if kind == "continued" else {}
    recipe = write_recipe(
        tmp_path, model={"id": str(folder)}, adapter=adapter, export__compare=False, export__dtype="bfloat16",
        data={"path": path, "format": "preference", "seq_len": 2048},
        train={"objective": "dpo", "dpo": {"beta": 0.3, "label_smoothing": 0.1, "sft_weight": 0.2}},
    )  # fmt: skip
    plan = planned(recipe)
    trained = with_random_adapter(folder, 2)
    opened = dataclasses.replace(
        model, plan=plan, model=trained.merge_and_unload() if kind == "full" else trained,
        options={"dtype": "float32", "trust_remote_code": False},
    )  # fmt: skip
    found = score_files(opened, [path], ReadAs(), QUIET)["all"]
    starts = AutoModelForCausalLM.from_pretrained(folder) if kind != "continued" else with_random_adapter(folder, 1)
    losses, rewards, labels = [], [], 0
    for pair in pairs:
        prompt, eos = model.tokenizer(pair["prompt"]).input_ids, model.tokenizer.eos_token_id
        rows = [[*prompt, *model.tokenizer(pair[answer]).input_ids, eos] for answer in ("chosen", "rejected")]
        (now, before) = ([plain_sum(each, [(ids, len(prompt), [])]) for ids in rows] for each in (opened.model, starts))
        chosen, rejected = (0.3 * (b - a) for (a, _), (b, _) in zip(now, before, strict=True))
        margin, labels = chosen - rejected, labels + sum(count for _, count in now)
        loss = 0.9 * math.log1p(math.exp(-margin)) + 0.1 * math.log1p(math.exp(margin)) + 0.2 * now[0][0] / now[0][1]
        losses.append(loss)
        rewards.append([chosen, rejected, margin, margin > 0])
    means = [sum(each) / len(pairs) for each in zip(*rewards, strict=True)]
    expected = dict(zip(("rewards_chosen", "rewards_rejected", "margin", "accuracy"), means, strict=True))
    assert abs(means[2]) > 0.05, "the models are equal"
    assert found == pytest.approx({"loss": sum(losses) / len(pairs), **expected, "tokens": labels, "rows": 3}, rel=1e-5)
    with pytest.raises(RecipeError, match="has pairs: evaluate them one after the other"):
        texts = write_rows(tmp_path / "texts.jsonl", [{"text": "a"}])
        score_files(opened, [path, texts], ReadAs(), QUIET)


def test_judged_answers_are_compared_with_the_start_as_a_plain_loop_does(model: OpenedModel, tmp_path: Path) -> None:
    rows = [{"prompt": "KING:", "completion": text, "label": n != 1} for n, text in enumerate(TEXTS)]
    path, folder, train = write_rows(tmp_path / "rows.jsonl", rows), model.rundir.root, {"kto": {"beta": 0.3}}
    recipe = write_recipe(
        tmp_path,
        model={"id": str(folder)},
        data={"path": path, "format": "feedback"},
        train=train | {"objective": "kto"},
    )
    opened = dataclasses.replace(
        model, plan=planned(recipe), model=with_random_adapter(folder, 2).merge_and_unload(),
        options={"dtype": "float32", "trust_remote_code": False},
    )  # fmt: skip
    found = score_files(opened, [path], ReadAs(), QUIET)["all"]
    start, prompt = AutoModelForCausalLM.from_pretrained(folder), model.tokenizer("KING:").input_ids
    answers = [[*model.tokenizer(text).input_ids, model.tokenizer.eos_token_id] for text in TEXTS]

    def ratio(answer: list[int]) -> float:
        now, before = (plain_sum(each, [([*prompt, *answer], len(prompt), [])])[0] for each in (opened.model, start))
        return before - now

    ratios = [ratio(answer) for answer in answers]
    kl = max(0.0, sum(ratios) / len(rows))  # all prompts are equal, and so each answer is one of a mismatched row
    signs = [1 if row["label"] else -1 for row in rows]
    losses = [1 - 1 / (1 + math.exp(-0.3 * sign * (each - kl))) for sign, each in zip(signs, ratios, strict=True)]
    good, bad = ([0.3 * each for sign, each in zip(signs, ratios, strict=True) if sign == of] for of in (1, -1))
    expected = {"rewards_desirable": sum(good) / len(good), "rewards_undesirable": sum(bad) / len(bad), "kl": kl}
    expected["margin"] = expected["rewards_desirable"] - expected["rewards_undesirable"]
    tokens = sum(map(len, answers))
    assert abs(expected["margin"]) > 0.05, "the models are equal"
    assert found == pytest.approx({"loss": sum(losses) / 3, **expected, "tokens": tokens, "rows": 3}, rel=1e-5)


def with_random_adapter(folder: Path, seed: int) -> Any:
    """Return the model of a folder with an adapter that changes it."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()


def test_answers_are_those_of_generate(model: OpenedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue = Dialogue(model, max_tokens=6, temperature=0, seed=0)
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
    stopped = Dialogue(model, 50, 0, 0).answer("x", lambda: next(calls))
    assert stopped == Dialogue(model, 3, 0, 0).answer("x")
    first, again, other = (Dialogue(model, 8, 1.0, seed).answer("x") for seed in (3, 3, 4))
    assert first == again != other


def test_a_conversation_that_is_too_long_is_refused_and_forgotten(model: OpenedModel) -> None:
    dialogue = Dialogue(model, 5, 0, 0)
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
