"""Rows in the layouts of public data sets: all they hold is read, known to be harmless, or counted by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_chat import TOOLS, tokenizer_of

from fsdptrain.config.formats import Format
from fsdptrain.config.schema import Data
from fsdptrain.data.columns import Unread, likely_format, read_rows
from fsdptrain.data.prepare import notes_on_rows, open_rows, pack_rows
from fsdptrain.data.sources import first_source, open_sources
from fsdptrain.errors import DataError

USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


def put(tmp_path: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> str:
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / name)


def read(path: str, template: str | None = None, **data: Any) -> tuple[list[dict[str, Any]], Unread]:
    """Return the rows of a file as the format that its columns have, without their places, and what is not read."""
    form, columns = likely_format(first_source(path)) or (Format.text, {})
    unread = Unread(template)
    rows = [
        row
        for batch in read_rows(open_sources(path), Data(format=form, columns=columns, **data), None, unread)
        for row in batch
    ]
    return [{field: value for field, value in row.items() if field != "place"} for row in rows], unread


def chat(*messages: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": list(messages), **row}


def talk(*messages: dict[str, Any]) -> dict[str, Any]:
    """Return a row of chat whose first message is the question."""
    return chat(USER, *messages)


def calling(*calls: Any, **message: Any) -> dict[str, Any]:
    return talk({"role": "assistant", **message, "tool_calls": [*calls]})


FLAT = {"name": "get_weather", "arguments": {"city": "Paris"}}
NESTED, WEATHER = json.dumps(FLAT), TOOLS[0]["function"]
PAIR = {"chosen": [ANSWER], "rejected": [ANSWER | {"content": "B"}]}
TALK, CALLED, WITH_TOOLS = talk(ANSWER), talk(CALLING), chat(USER, ANSWER, tools=TOOLS)
FLAGS = (
    ("loss", False, 0), ("train", False, 0), ("training", 0, 0), ("trainable", 1, 1), ("weight", False, 0),
    ("train_on_turn", 0.0, 0), ("loss_mask", 0, 0), ("masked", True, 0), ("loss_weight", True, 1),
)  # fmt: skip


def with_weather(**changes: Any) -> dict[str, Any]:
    """Return a row with a tool of which some keys are written in another way."""
    return chat(USER, ANSWER, tools=[{"type": "function", "function": WEATHER | changes}])


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # a row, and what is read of it
    # Keys and roles of a message.
    "text": (chat({"role": "user", "text": "Q"}, {"role": "assistant", "text": "A"}), TALK),
    "null beside a text": (chat(USER | {"content": None, "text": "Q"}, ANSWER | {"text": None}), TALK),
    "mixed keys": (chat({"role": "User", "value": "Q"}, {"from": "MODEL", "content": "A"}), TALK),
    "ai": (chat({"role": "prompter", "content": "Q"}, {"role": "AI", "content": "A"}), TALK),
    **{role: (talk(CALLING, {"role": role, "content": "20"}, ANSWER),
              talk(CALLING, {"role": "tool", "content": "20"}, ANSWER))
       for role in ("function", "ipython", "observation", "tool_response")},
    # What is trained.
    **{f"{key} {value}": (talk(ANSWER | {key: value}, ANSWER | {key: not value}),
                          talk(ANSWER | {"weight": weight}, ANSWER | {"weight": 1 - weight}))
       for key, value, weight in FLAGS},
    # Thoughts.
    **{key: (talk(ANSWER | {key: "T"}), talk(ANSWER | {"reasoning_content": "T"}))
       for key in ("reasoning_content", "reasoning", "thinking", "thought")},
    "a thought twice": (talk(ANSWER | {"reasoning": "T", "reasoning_content": "T"}),
                        talk(ANSWER | {"reasoning_content": "T"})),
    # Calls.
    "args": (calling({"name": "get_weather", "args": {"city": "Paris"}}), CALLED),
    "calls as JSON text": (talk({"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}), CALLED),
    "a call as text": (calling(json.dumps(CALL)), CALLED),
    "flat": (calling(FLAT), CALLED),
    "arguments as JSON text": (calling(CALL | {"function": FLAT | {"arguments": '{"city": "Paris"}'}}), CALLED),
    "a map as pairs": (calling({"name": "get_weather", "parameters": [["city", "Paris"]]}), CALLED),
    "a map as keys and values": (calling(FLAT | {"arguments": [{"key": "city", "value": "Paris"}]}), CALLED),
    "nulls of a union": (calling(CALL | {"function": FLAT | {"arguments": {"city": "Paris", "unit": None}}}), CALLED),
    "function_call": (talk({"role": "assistant", "content": None, "function_call": FLAT}), CALLED),
    "ShareGPT's function_call": (talk({"from": "function_call", "value": NESTED}), CALLED),
    "parallel calls": (talk(*[{"role": "tool_call", "content": NESTED}] * 2), calling(CALL, CALL)),
    "without arguments": (calling({"function": {"name": "now", "arguments": ""}}),
                          calling({"function": {"name": "now", "arguments": {}}})),
    # Tools.
    "flat tools": (chat(USER, ANSWER, tools=[WEATHER]), WITH_TOOLS),
    "functions": (chat(USER, ANSWER, functions=[WEATHER]), WITH_TOOLS),
    "one as text": (chat(USER, ANSWER, tools=json.dumps(WEATHER)), WITH_TOOLS),
    "texts": (chat(USER, ANSWER, tools=[json.dumps(WEATHER)]), WITH_TOOLS),
    "parameters as text": (with_weather(parameters=json.dumps(WEATHER["parameters"])), WITH_TOOLS),
    "nulls in a schema": (with_weather(strict=None, parameters=WEATHER["parameters"] | {
        "properties": {"city": {"type": "string", "enum": None}, "x": None}}), WITH_TOOLS),
    # Columns.
    **{f"tools beside a joined {more}": ({"instruction": "Q", "input": more, "output": "A", "tools": [WEATHER]},
                                         chat(USER | {"content": question}, ANSWER, tools=TOOLS))
       for more, question in (("", "Q"), (None, "Q"), ("I", "Q\n\nI"))},
    "texts as answers": ({"prompt": [USER], "chosen": "A", "rejected": "B"}, {"prompt": [USER], **PAIR}),
    "messages as JSON text": ({"messages": json.dumps([USER, ANSWER])}, TALK),
    "a list for each key": ({"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, TALK),
    "prompt and completion of messages": ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
                                          talk(ANSWER | {"weight": 0}, USER, ANSWER)),
    "a text as prompt": ({"prompt": "Q", "completion": [ANSWER]}, TALK),
    "xlam": ({"id": 1, "query": "Q", "answers": f"[{NESTED}]", "tools": json.dumps([WEATHER])},
             chat(USER, CALLING, tools=TOOLS)),
    "an answer beside tools": ({"prompt": "Q", "completion": "{1}", "tools": [WEATHER]},
                               chat(USER, {"role": "assistant", "content": "{1}"}, tools=TOOLS)),
    "a system prompt of a conversation": (
        {"system": "S", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        chat({"role": "system", "content": "S"}, USER, ANSWER)),
    "a system prompt of a text": ({"system_prompt": "S", "question": "Q", "response": "A"},
                                  {"prompt": "S\n\nQ", "completion": "A"}),
    "no system prompt": ({"system": None, "instruction": "Q", "output": "A"}, {"prompt": "Q", "completion": "A"}),
    "dolly": ({"instruction": "Q", "context": "C", "response": "A"}, {"prompt": "Q\n\nC", "completion": "A"}),
    "orca's pairs": ({"system": "S", "question": "Q", "chosen": "A", "rejected": "B"},
                     {"prompt": "S\n\nQ", "chosen": "A", "rejected": "B"}),
    "alpaca's pairs": ({"instruction": "Q", "input": "I", "chosen": "A", "rejected": "B"},
                       {"prompt": "Q\n\nI", "chosen": "A", "rejected": "B"}),
    "a system prompt of pairs": (
        {"system": "S", "prompt": "Q", **{name: [USER, *answer] for name, answer in PAIR.items()}},
        {"prompt": [{"role": "system", "content": "S"}, USER], **PAIR}),
    "ShareGPT's pairs": ({"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"},
                          "rejected": {"from": "gpt", "value": "B"}}, {"prompt": [USER], **PAIR}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read(name: str, tmp_path: Path) -> None:
    row, expected = LAYOUTS[name]
    rows, unread = read(put(tmp_path, row))
    assert rows == [expected] and not unread.found


def test_maps_of_arrow_are_objects(tmp_path: Path) -> None:
    kind = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(kind))])
    call = {"name": "get_weather", "arguments": [("city", "Paris")]}
    table = pa.table({"messages": pa.array([[USER, {"role": "assistant", "tool_calls": [call]}]], pa.list_(message))})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert read(str(tmp_path / "rows.parquet"))[0] == [talk(CALLING)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (talk({"role": "assistant", "body": "A"}), "message 2 of 'messages' has no content: only role, body"),
        (talk({"role": "assistant", "content": None}), "has no content: content is null"),
        (talk(ANSWER | {"mask": True}), "mask is True; expected weight: 1 (trained) or 0 (not trained)"),
        (talk(ANSWER | {"loss": "yes"}), "loss is 'yes'; expected weight"),
        (talk(ANSWER | {"loss": 0, "train": True}), "loss says that it is not trained, train that it is"),
        (talk(ANSWER | {"train_detail": [{"begin": 0}]}), "train_detail is"),
        (talk(ANSWER | {"thinking": "a", "reasoning": "b"}), "different thoughts in reasoning and thinking"),
        (talk(CALLING | {"tool_calls": "get_weather(Paris)"}), "a tool call is 'get_weather(Paris)'"),
        (talk({"from": "function_call", "value": "get_weather(Paris)"}), "a tool call is 'get_weather(Paris)'"),
        ({"messages": "[{'role': 'user'}]"}, "'messages' is a str; expected a list of messages, or its JSON text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = put(tmp_path, talk(ANSWER), row)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ") and words in str(caught.value)


def test_what_is_not_read_is_counted_by_name(tmp_path: Path) -> None:
    """Over all rows; a key that the template reads is not counted, and neither is one without a value."""
    odd = CALL | {"approved": True}
    path = put(
        tmp_path,
        chat(USER | {"id": 1, "mood": "", "lang": "en"}, ANSWER, category="x", images=[], tools=None),
        chat(USER | {"mood": "sad"}, {"role": "critic", "content": "C"}, ANSWER | {"channel": "f"}, images=["a.png"]),
        chat(USER | {"mood": "gay"}, CALLING | {"tool_calls": [odd]}, images=["b.png"], chat_template_kwargs={"a": 1}),
        chat(USER, {"role": "narrator", "content": "N"}),
        chat({"role": "system", "content": "S"}, USER, ANSWER, system="T"),
        chat(USER, ANSWER | {"loss": False}),
    )  # fmt: skip
    template = "{{ message.channel }} {% if role == 'critic' and loop.mood %}{{ message.mood() }}"
    rows, unread = read(path, template)
    assert len(rows) == 6 and unread.found == {
        "column 'images' is not read": (2, f"{path}:2"),
        "key 'mood' of messages is not read": (2, f"{path}:2"),
        "column 'chat_template_kwargs' is not read": (1, f"{path}:3"),
        "key 'approved' of tool calls is not read": (1, f"{path}:3"),
        "role 'narrator' of messages is not known: they are not trained": (1, f"{path}:4"),
        "conversation without a trained message: none of the assistant, but of user, narrator": (1, f"{path}:4"),
        "column 'system' is not read beside a system message": (1, f"{path}:5"),
        "conversation without a trained message: loss masks all of the assistant's": (1, f"{path}:6"),
    }


EMPTY = "answer is empty: only its end is trained"
UNTRAINED = "conversation without a trained message:"
BOTH = {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "B"}]}
COUNTED: dict[str, tuple[list[dict[str, Any]], dict[str, int]]] = {  # rows; what is counted once → the line of the file
    "an empty text": ([{"prompt": "Q", "completion": " "}, {"prompt": "", "completion": "A"}], {EMPTY: 1}),
    "an empty message": ([talk(ANSWER | {"content": "\n"}), talk(
        CALLING | {"content": ""}, ANSWER | {"content": "", "weight": 0}, ANSWER)], {EMPTY: 1}),
    "untrained answers": (
        [{"prompt": [USER], "chosen": [USER], "rejected": [ANSWER]},
         {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"loss": 0}]}],
        {f"{UNTRAINED} none of the assistant, but of user": 1, f"{UNTRAINED} loss masks all of the assistant's": 2}),
    **{f"arguments {arguments}": ([calling({"name": "f", "arguments": arguments})],
                                  {"arguments of tool calls are no JSON object, and rendered as they are": 1})
       for arguments in ("{'city': 'Paris'}", "city=Paris", '"{}"', "null", [1])},
    "a prompt that is not what both answers begin with": (
        [{"prompt": "Q", **BOTH}, {"prompt": "another", **BOTH}],
        {"column 'prompt' is not read beside the messages with which both answers begin": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_lost_is_counted(name: str, tmp_path: Path) -> None:
    rows, expected = COUNTED[name]
    path = put(tmp_path, *rows)
    assert read(path)[1].found == {what: (1, f"{path}:{line}") for what, line in expected.items()}


def test_texts_between_conversations_stay_where_they_are(tmp_path: Path) -> None:
    row = {"context": "C", "more": "D", "history": [USER, ANSWER], "question": "Q", "hint": "", "answer": "A"}
    [sources] = open_sources(put(tmp_path, row))
    [[found]] = read_rows([sources], Data(format=Format.chat, columns={"messages": [*row]}), None)
    assert found["messages"] == [USER | {"content": "C\n\nD"}, USER, ANSWER | {"weight": 0}, USER, ANSWER]


@pytest.mark.parametrize("row", [{"prompt": [USER], "completion": [ANSWER]}, talk(ANSWER)], ids=["prompt", "messages"])
def test_answers_of_kto_are_not_trained_as_good_ones(row: dict[str, Any], tmp_path: Path) -> None:
    path = put(tmp_path, row | {"label": False})
    assert read(path)[0][0]["completion"] == [ANSWER] and read(path)[0][0]["label"] is False
    form = Format.chat if "messages" in row else Format.prompt_completion
    with pytest.raises(DataError, match=r"label says whether an answer is good, .*feedback with train.objective: kto"):
        next(read_rows(open_sources(path), Data(format=form), None))


def test_an_optional_column_is_read_in_the_rows_that_have_it(tmp_path: Path) -> None:
    early = {"instruction": "Q", "output": "A"}
    path = put(tmp_path, early, early | {"input": "I"}, early | {"input": None})
    assert [row["prompt"] for row in read(path)[0]] == ["Q", "Q\n\nI", "Q"]
    # Later than the rows from which the columns are known: it is named, and read if the recipe names it.
    path = put(tmp_path, *[early] * 300, early | {"input": "I"})
    _, unread = read(path)
    assert unread.found == {"column 'input' is not read": (1, f"{path}:301")}
    data = Data(format=Format.prompt_completion, columns={"prompt": ["instruction", "input"], "completion": "output"})
    [source] = open_sources(path)
    for part in (source, source.between((0, 0), (len(json.dumps(early)) + 1, 1))):
        assert next(read_rows([part], data, None))[0]["prompt"] == "Q"
    assert list(read_rows([source], data, None))[-1][-1]["prompt"] == "Q\n\nI"
    path = put(tmp_path, *[talk(ANSWER)] * 300, chat(USER, CALLING, tools=TOOLS))
    assert read(path)[0][-1]["tools"] == TOOLS


def test_the_columns_of_other_kinds_of_files_are_named_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "id": [1, 2], "images": ["x", None]}), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet"))[1].found == {
        "column 'images' is not read": (2, f"{tmp_path / 'a.parquet'}, row 1")
    }
    (tmp_path / "a.csv").write_text("text,images,score\na,,1\nb,x,2\n")
    assert read(str(tmp_path / "a.csv"))[1].found == {"column 'images' is not read": (1, f"{tmp_path / 'a.csv'}:3")}


def test_the_role_of_a_tool_is_that_which_the_template_reads(tmp_path: Path) -> None:
    path = put(tmp_path, talk(ANSWER | {"thinking": "T"}, {"role": "tool", "content": "1"}))
    [row], _ = read(path, "{% if m.role == 'observation' %}{{ m.content }}{% endif %}{{ m['thinking'] }}")
    assert row["messages"][1:] == [ANSWER | {"reasoning_content": "T"}, {"role": "observation", "content": "1"}]
    [row], _ = read(put(tmp_path, talk({"role": "observation", "content": "1"})), "{{ m.role }}")
    assert row["messages"][1]["role"] == "observation", "the template writes any role"


def test_counts_stay_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several files and parts."""
    monkeypatch.setenv("FSDPTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fsdptrain.data.prepare.SMALL", 10)  # each file is a part
    folder = tmp_path / "rows"
    folder.mkdir()
    put(folder, talk(ANSWER), name="a.jsonl")
    put(folder, talk(ANSWER), talk(ANSWER | {"mood": "sad"}), name="b.jsonl")
    put(folder, talk(ANSWER | {"mood": "sad"}), name="b.jsonl2.jsonl")
    data = Data(format=Format.chat, seq_len=64)

    def notes() -> list[str]:
        rows = open_rows(str(folder), data, tokenizer_of("chatml"), None, lambda *_: None)
        return notes_on_rows(rows)[0]

    assert notes() == [f"key 'mood' of messages is not read (2 times, first in {folder}/b.jsonl:2)"]
    monkeypatch.setattr("fsdptrain.data.prepare.read_rows", None)
    assert notes() == [f"key 'mood' of messages is not read (2 times, first in {folder}/b.jsonl:2)"]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.csv.gz"])
def test_a_line_may_end_with_a_carriage_return_alone(name: str, tmp_path: Path) -> None:
    import gzip

    rows = ['{"prompt": "Q", "completion": "A"}', '{"prompt": "Q\\n1", "completion": ""}', '{"prompt": 5}']
    if "json" not in name:
        rows = ["prompt\tcompletion" if ".tsv" in name else "prompt,completion", "Q\tA" if ".tsv" in name else "Q,A",
                '"Q\n1"\t' if ".tsv" in name else '"Q\n1",']  # fmt: skip
    content = "\r".join(rows[:3] if "json" not in name else rows[:2]).encode() + b"\r"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    expected = [{"prompt": "Q", "completion": "A"}, {"prompt": "Q\n1", "completion": ""}]
    assert read(str(tmp_path / name))[0] == expected


def test_a_long_first_row_is_shown_with_the_end_of_its_prompt_and_every_trained_part(tmp_path: Path) -> None:
    """The tools alone have more tokens than are shown."""
    tools = [{"type": "function", "function": WEATHER | {"name": f"get_weather_{number}"}} for number in range(20)]
    answers = [{"role": "assistant", "content": f"answer {number} " + "x " * 200} for number in range(3)]
    question = {"role": "user", "content": "so " * 50 + "what?"}
    path = put(tmp_path, chat(question, CALLING, {"role": "tool", "content": "20"}, *answers, tools=tools))
    data, tokenizer = Data(format=Format.chat, seq_len=8192), tokenizer_of("qwen2.5")
    [corpus] = pack_rows(open_rows(path, data, tokenizer, None, lambda *_: None), data, seed=0)
    shown = corpus.show(tokenizer)
    assert shown.startswith("<|im_start|>system") and "what?<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>\n" in shown
    assert shown.count("⟦") == shown.count("⟧") == 4 and shown.count("…") >= 4
    assert all(f"⟦answer {number} x" in shown for number in range(3)) and shown.endswith("x <|im_end|>⟧\n")
    assert len(shown) < 2000
