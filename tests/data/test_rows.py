"""Every reader, and every fault of a data file: a DataError with the file, and the line if it has lines."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import json
import os
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset
from datasets.data_files import DataFilesList, get_data_patterns
from support import DATA, as_nobody, python

from fsdptrain.config.formats import Format, guess_format
from fsdptrain.config.paths import find_all_data, find_data
from fsdptrain.config.schema import Data
from fsdptrain.data import sources
from fsdptrain.data.columns import describe_columns, read_rows
from fsdptrain.data.sources import file_sizes, fingerprint, hub_commit, open_sources
from fsdptrain.errors import DataError

PC = {"format": Format.prompt_completion}
CHAT = {"format": Format.chat}
OK = {"text": "a"}
CALLS = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "\ud83d"}}]}
OK_CHAT = {"messages": [{"role": "user", "content": "a"}]}
# More than 10 MiB, from which `datasets` would infer the types of a JSON file.
FILLER = "x" * 10_000
LONG = [{"text": FILLER}] * 1_060


def rows_of(path: object, limit: int | None = None, **data: Any) -> list[dict[str, Any]]:
    """Return all rows behind a path, from all its files, without the places of conversations."""
    rows = (row for rows in read_rows(open_sources(str(path)), Data(**data), limit) for row in rows)
    return [{field: value for field, value in row.items() if field != "place"} for row in rows]


def complaint(path: object, **data: Any) -> str:
    """Return the message of the DataError for a path with wrong rows."""
    with pytest.raises(DataError) as caught:
        rows_of(path, **data)
    return str(caught.value)


def test_up_to_ten_broken_rows_are_reported_at_once_over_all_files(tmp_path: Path) -> None:
    content = "".join('{"text": "a"}\n' + ('{"text": 5}\n' if number % 2 else "{\n") for number in range(4))
    for name in "abc":
        put(tmp_path, f"{name}.jsonl", content)
    counts = [source.counted() for source in open_sources(str(tmp_path))]
    assert counts == [8, 8, 8], "a broken row counts as a row"
    shown = complaint(tmp_path).splitlines()
    assert len(shown) == 11 and shown[-1] == "  12 broken rows, of which the first 10 are listed"
    places = [re.sub(r".*/(.*?): .*", r"\1", line) for line in shown[:5]]
    assert places == ["a.jsonl:2", "a.jsonl:4", "a.jsonl:6", "a.jsonl:8", "b.jsonl:2"]
    assert "not a JSON object" in shown[0] and "is an int; expected text" in shown[1]
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path, 4)
    assert len(str(caught.value).splitlines()) == 2, "rows beyond the limit are not read"


def test_a_list_of_files_is_read_in_its_order_without_the_empty_ones(tmp_path: Path) -> None:
    folder, empty = tmp_path / "folder", put(tmp_path, "empty.jsonl", "")
    folder.mkdir()
    last, inside = put(tmp_path, "z.jsonl", lines({"text": "z"})), put(folder, "a.jsonl", lines({"text": "a"}))
    path = find_all_data([str(empty), str(last), str(folder), str(inside)], tmp_path)
    rows = [row["text"] for batch in read_rows(open_sources(path), Data(), None) for row in batch]
    assert rows == ["z", "a"] and len(file_sizes(path)) == 3, "each file once"
    assert fingerprint(path) != fingerprint([str(inside), str(last)]) != fingerprint([str(last), str(inside)])
    with pytest.raises(DataError, match=r"'.*gone' was not found"):
        find_all_data([str(last), str(tmp_path / "no/gone")], tmp_path)
    with pytest.raises(DataError, match="is empty"):
        open_sources([str(empty)])
    parquet(tmp_path, "e.parquet", text=pa.array([], pa.string()))
    assert [source.counted() for source in open_sources(str(tmp_path / "*.*"))] == [1]


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(folder: Path, name: str, **columns: Any) -> Path:
    path = folder / name
    pq.write_table(pa.table(columns), path)
    return path


# --------------------------------------------------------------------------------------------------------- readers

TEXTS = [
    "To be, or not to be:\n“that” is the question",
    ' a "quoted", comma\tand tab ',
    "naïve 東京 🙂 \u2028 line\x00end",
]


TEXT = "First\n\n\n  second – 東京 🙂\nno line end at the end"


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.jsonl", lines(*({"text": t} for t in TEXTS)), TEXTS),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}', ["a", "b"]),
        ("a.jsonl", '{"text": "a", "deep": ' + "[" * 50 + "]" * 50 + "}\n", ["a"]),
        ("a.ndjson", lines(OK, OK), ["a", "a"]),
        ("a.JSONLINES", lines(OK), ["a"]),
        ("part[1].jsonl", lines(OK), ["a"]),
        ("a.json", json.dumps([{"text": t} for t in TEXTS]), TEXTS),
        ("a.json", json.dumps([{"text": t} for t in TEXTS], indent=2), TEXTS),
        ("a.json", lines({"text": "a"}, {"text": "b"}), ["a", "b"]),
        (
            "a.csv",
            'id,text\n1,plain\n2,"a ""b"", c\nand a line"\n3,  d  \n',
            ["plain", 'a "b", c\nand a line', "  d  "],
        ),
        ("a.csv", "text\n2024-01-01\n 1 \n007\n1e5\ntrue\nNA\n", ["2024-01-01", " 1 ", "007", "1e5", "true", "NA"]),
        ("a.tsv", "id\ttext\n1\ta; b, c\n", ["a; b, c"]),
        ("a.csv", "id;text\n1;a, b\n", ["a, b"]),
        ("a.csv", "id\ttext\n1\ta, b\n", ["a, b"]),
        ("a.csv", '"id";"text"\n"1";"a; b, ""c"""\n', ['a; b, "c"']),
        ("a.csv", '"a;b",text\n1,"a; b"\n', ["a; b"]),
        ("a.txt", TEXT, [TEXT]),
        ("a.text", TEXT, [TEXT]),
    ],
)
def test_a_file_is_read(tmp_path: Path, name: str, content: str | bytes, texts: list[str]) -> None:
    assert rows_of(put(tmp_path, name, content)) == [{"text": text} for text in texts]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    path = parquet(tmp_path, "a.parquet", id=pa.array(range(3)), text=pa.array(TEXTS).cast(kind))
    assert rows_of(path) == [{"text": t} for t in TEXTS]


def test_the_rows_of_speakers_are_made_from_the_text() -> None:
    made = runpy.run_path(str(DATA / "speakers.py"))["make_rows"]()
    assert {name: rows_of(DATA / name, **PC) for name in made} == made
    held_out, training = ({row["prompt"] for row in rows} for rows in made.values())
    assert (len(held_out), len(training), held_out & training) == (200, 1040, set())
    counts = [Counter(row["completion"] for row in rows) for rows in made.values()]
    assert [set(count.values()) for count in counts] == [{20}, {104}] and counts[0].keys() == counts[1].keys()


ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Hi"},
    {"instruction": "Part.", "output": "Bye"},
]


def test_several_columns_are_joined_by_an_empty_line_and_empty_ones_left_out(tmp_path: Path) -> None:
    """In Alpaca's files many rows have no input. A column may serve two fields."""
    columns: dict[str, Any] = {"prompt": ["instruction", "input"], "completion": "output"}
    path = parquet(tmp_path, "a.parquet", **{name: [row.get(name) for row in ALPACA] for name in ALPACA[0]})
    rows = rows_of(path, columns=columns, **PC)
    assert [[*row.values()] for row in rows] == [["Add.\n\n1 and 2", "3"], ["Greet.", "Hi"], ["Part.", "Bye"]]
    read_as = describe_columns(str(path), Data(columns=columns, **PC))
    assert read_as == "instruction + input as prompt, output as completion"
    twice = rows_of(path, columns={"prompt": "output", "completion": "output"}, **PC)
    assert twice[0] == {"prompt": "3", "completion": "3"}
    path = put(tmp_path, "b.jsonl", lines({"instruction": "Add.", "input": 5, "output": "3"}))
    assert "'input' is an int" in complaint(path, columns=columns, **PC)


def compress(kind: str, content: bytes) -> bytes:
    """Compress as the program of that kind does; Zstandard with Arrow, because older Pythons have none."""
    if kind != "zst":
        return gzip.compress(content) if kind == "gz" else bz2.compress(content)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["gz", "bz2", "zst"])
def test_compressed_files(tmp_path: Path, kind: str) -> None:
    contents = {
        "a.jsonl": lines(*({"text": t} for t in TEXTS)), "b.json": json.dumps([{"text": "b"}]), "c.csv": "text\nc\n",
        "d.txt": "d",
    }  # fmt: skip
    for name, content in contents.items():
        put(tmp_path, f"{name}.{kind}", compress(kind, content.encode()))
    assert [row["text"] for row in rows_of(tmp_path)] == [*TEXTS, "b", "c", "d"]
    bad = put(tmp_path, f"e.jsonl.{kind}", compress(kind, lines(*LONG[:3]).encode())[:-12])
    assert complaint(bad).startswith(f"{bad} cannot be read: ")
    wrong = put(tmp_path, f"f.jsonl.{kind}", lines(OK))
    assert complaint(wrong).startswith(f"{wrong} cannot be read: ")
    late = put(tmp_path, f"g.jsonl.{kind}", compress(kind, lines(OK, {"text": None}).encode()))
    assert complaint(late).startswith(f"{late}:2: 'text' is null")


def test_a_json_list_of_one_line_or_many_has_a_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": str(i)} for i in range(100)]
    one, many = put(tmp_path, "a.json", json.dumps(rows)), put(tmp_path, "b.json", json.dumps(rows, indent=1))
    listed = put(tmp_path, "c.json", lines(*rows))
    assert rows_of(one) == rows_of(many) == rows_of(listed) == rows
    monkeypatch.setattr("fsdptrain.data.readers.MAX_JSON", 500)
    assert rows_of(listed) == rows, "JSON lines are never read as a whole"
    assert "longer than 500 bytes: write one object per line (.jsonl)" in complaint(many)
    assert "a.json:1: a line longer than 500 bytes" in complaint(one)


def test_a_row_that_is_too_long_to_be_encoded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever field its characters are in; rows together are divided into batches."""
    monkeypatch.setattr("fsdptrain.data.columns.MAX_ROW", 100)
    monkeypatch.setattr("fsdptrain.data.columns.BATCH_CHARACTERS", 150)
    texts = put(tmp_path, "a.jsonl", lines(*[{"text": "x" * 60}] * 5, {"text": "x" * 91}))
    [file] = open_sources(str(texts))
    batches = read_rows([file], Data(), 5)
    assert [len(batch) for batch in batches] == [3, 2]
    long = "characters in one row, and 100 are the most that a tokenizer gets at once: divide it into several rows"
    assert f"a.jsonl:6: 103 {long}" in complaint(texts)
    messages = [{"role": "system", "content": "x" * 30}, {"role": "user", "content": "a"}]
    chat = put(tmp_path, "b.jsonl", lines({"messages": [*messages, {"role": "assistant", "content": "b"}]}))
    assert long in complaint(chat, format=Format("chat"))
    document = put(tmp_path, "c.txt", "x\n" * 51)
    assert f"c.txt: 165 {long}" in complaint(document)


PAIRS = Format.prompt_completion
RECOGNISED: dict[str, tuple[Format, dict[str, Any]] | None] = {
    "messages id": (Format.chat, {}), "id conversations": (Format.chat, {"messages": "conversations"}),
    "prompt completion": (PAIRS, {}), "question answer": (PAIRS, {"prompt": "question", "completion": "answer"}),
    "instruction input output": (PAIRS, {"prompt": ["instruction", "input"], "completion": "output"}),
    "instruction response": (PAIRS, {"prompt": "instruction", "completion": "response"}),
    "text label": (Format.text, {}), "content": (Format.text, {"text": "content"}), "a b": None,
}  # fmt: skip


@pytest.mark.parametrize("columns", RECOGNISED)
def test_columns_are_recognised_and_the_suggestion_reads_them(tmp_path: Path, columns: str) -> None:
    names, expected = columns.split(), RECOGNISED[columns]
    assert guess_format(names) == expected
    row = {name: OK_CHAT["messages"] if name in ("messages", "conversations") else "x" for name in names}
    path = put(tmp_path, "a.jsonl", lines(row))
    wrong = next(data for data in ({}, PC, CHAT) if data.get("format", "text") != (expected or ("text",))[0])
    message = complaint(path, **wrong)
    if expected is None:
        assert "data: {format: prompt_completion, columns: {prompt: a, completion: b}}" in message
        return
    advised = yaml.safe_load(message.partition("They fit ")[2])["data"]
    assert (advised["format"], advised.get("columns", {})) == expected
    assert len(rows_of(path, **advised | {"format": Format(advised["format"])})) == 1


def test_the_message_for_thousands_of_columns_is_short(tmp_path: Path) -> None:
    names = [f"a column called {i} {'x' * 100}" for i in range(4_000)]
    path = put(tmp_path, "a.csv", ",".join(names) + "\n" + ",".join("v" for _ in names) + "\n")
    for data in ({}, PC, {"columns": {"text": "y" * 5_000}}):
        message = complaint(path, **data)
        assert "a column called 0" in message and ", and 3,970 more" in message
        assert len(message) < 6_000
    path = put(tmp_path, "b.jsonl", lines(OK, dict.fromkeys(names, "v")))
    assert len(complaint(path)) < 6_000


def test_a_folder_of_save_to_disk_is_recognised(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved" / "train")
    assert "to_parquet" in complaint(tmp_path / "saved")


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("", "abcd"), ("sub", "cd"), ("*.json*", "ab"), ("[ab].json*", "ab"), ("**/*.txt", "d"), ("*/c.csv", "c"),
        ("**/*[!d]", "abcd"),
        ("sub/**", "cd"),
    ],
)  # fmt: skip
def test_folders_and_globs_give_every_file_once_in_order(tmp_path: Path, pattern: str, texts: str) -> None:
    """Also of several types in nested folders, with a file that is no data in between."""
    put(tmp_path, "b.jsonl", lines({"text": "b"}))
    put(tmp_path, "a.json", json.dumps([{"text": "a"}]))
    put(tmp_path, "sub/c.csv", "text\nc\n")
    put(tmp_path, "sub/deep/d.txt", "d")
    put(tmp_path, "README.md", "not data")
    assert [row["text"] for row in rows_of(tmp_path / pattern)] == list(texts)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("org/name", ("org/name", None, "train", None)),
        ("org/name:de", ("org/name", "de", "train", None)),
        ("org/name:de:test", ("org/name", "de", "test", None)),
        ("org/name::test[:1%]", ("org/name", None, "test[:1%]", None)),
        ("org/name:de@v2", ("org/name", "de", "train", "v2")),
    ],
)
def test_a_hub_data_set(path: str, words: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(name: str, config: str | None, split: str, revision: str | None) -> Dataset:
        assert (name, config, split, revision) == words
        return Dataset.from_dict({"id": range(3), "text": ["a", "b", None]})

    monkeypatch.setattr("datasets.load_dataset", fake)
    assert find_data(path.partition("@")[0], Path.cwd()) == path.partition("@")[0]
    assert rows_of(path, limit=2) == [{"text": "a"}, {"text": "b"}]
    assert complaint(path).startswith(f"{path}, row 3: 'text' is null")
    assert "id, text" in complaint(path, **CHAT)


def test_the_fingerprint_of_a_hub_data_set_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = "1" * 40, "2" * 40
    refs = tmp_path / "datasets--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(one)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub_commit.cache_clear()
    assert hub_commit("org/name:de:test") == one
    assert hub_commit(f"org/name@{two}") == two and hub_commit("org/name@v2") is None
    assert fingerprint(f"org/name@{one}") == fingerprint("org/name") == fingerprint("org/name::train")
    before = fingerprint("org/name")
    (refs / "main").write_text(two)
    assert fingerprint("org/name") == before  # within a process the commit stays the same
    hub_commit.cache_clear()
    assert fingerprint("org/name") != before

    def fake(*_: Any, revision: str, **__: Any) -> Dataset:
        assert revision == two
        made = Dataset.from_dict({"text": ["a"]})
        made.save_to_disk(tmp_path / one)
        return Dataset.load_from_disk(str(tmp_path / one))  # another commit, cached before

    monkeypatch.setattr("datasets.load_dataset", fake)
    assert f"data.revision: commit {two} of org/name is not in the cache (cached: {one})" in complaint("org/name")
    hub_commit.cache_clear()


def test_a_hub_data_set_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: Any, **__: Any) -> Dataset:
        raise FileNotFoundError("Dataset org/name doesn't exist on the Hub")

    monkeypatch.setattr("datasets.load_dataset", fake)
    assert re.search(r"data\.path: .*'org/name'.*FileNotFoundError", complaint("org/name"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("megabytes", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_a_very_long_line(tmp_path: Path, name: str, megabytes: int) -> None:
    texts = ["a", "naïve 🙂 " * 84_000 * megabytes, "b"]
    assert len(texts[1].encode()) > megabytes * 1_000_000
    content = "\n".join(["text", *texts]) if name == "a.csv" else lines(*({"text": text} for text in texts))
    assert [row["text"] for row in rows_of(put(tmp_path, name, content))] == texts


# ---------------------------------------------------------------------------------------- what is wrong, and where


def said(**message: Any) -> str:
    """Return a line with a conversation of this message, of the user if it has no role."""
    return lines({"messages": [{"role": "user"} | message]})


IMAGE = [{"type": "text", "text": "a"}, {"type": "image", "url": "a.png"}]
JSON, LIST = ["not a JSON object"], ["list of messages"]

WRONG_LINES: dict[str, tuple[str | bytes, dict[str, Any], int, list[str]]] = {
    "null": (lines(OK, {"text": None}), {}, 2, ["'text'", "null"]),
    "a number after texts": (lines(OK, {"text": 5}), {}, 2, ["'text'", "int", "put quotes around it"]),
    "numbers only": (lines({"text": 5.5}, {"text": 6}), {}, 1, ["'text'", "float"]),
    "an object": (lines(OK, OK, {"text": {"a": "b"}}), {}, 3, ["dict"]),
    "a column renamed in the middle": (lines(OK, {"txt": "b"}, OK), {}, 2, ["'text'"]),
    "deep in a long file": (lines(*LONG, {"txt": "b"}), {}, len(LONG) + 1, ["'text'"]),
    "no completion": (lines({"prompt": "a", "completion": "b"}, {"prompt": "a"}), PC, 2, ["'completion'"]),
    "after blank lines": ("\n" + lines(OK) + "\n  \n\t\n" + lines({"text": None}), {}, 6, ["null"]),
    "after Windows line ends": ('{"text": "a"}\r\n\r\n{"text": null}\r\n', {}, 3, ["null"]),
    "after a line separator": (lines(OK, {"text": "a\u2028b"}, {"text": 5}), {}, 3, ["int"]),
    "a broken line": (lines(OK) + '\n{"text": "b"\n' + lines(OK), {}, 3, JSON),
    "two rows on a line": ('{"text": "a"} {"text": "b"}\n{"text": null}\n', {}, 1, JSON),
    "rows over several lines": ('{\n"text": "a"\n}\n{\n"text": null\n}\n', {}, 1, JSON),
    "a list for a row": (lines(OK, [1, 2]), {}, 2, ["list"]),
    "null for a row": (lines(OK, None, OK), {}, 2, ["null"]),
    "bad UTF-8": (b'{"text": "a"}\n\n{"text": "caf\xe9"}\n', {}, 3, ["UTF-8", "0xe9"]),
    "half a surrogate pair": (lines(OK) + '{"text": "a\\ud83d"}\n', {}, 2, ["half a character", "ud83d"]),
    "half a pair in a message": (said(content="a") + json.dumps({"messages": [CALLS]}), CHAT, 2, ["half a character"]),
    "null for messages": (lines(OK_CHAT, {"messages": None}), CHAT, 2, ["null", *LIST]),
    "no messages": (lines(OK_CHAT, {"messages": []}), CHAT, 2, ["empty", *LIST]),
    "a text for messages": (lines({"messages": "hi"}), CHAT, 1, ["str", *LIST]),
    "one message for messages": (lines({"messages": {"role": "user"}}), CHAT, 1, ["no content"]),
    "a text for a message": (lines(OK_CHAT, {"messages": ["hi"]}), CHAT, 2, ["message 1"]),
    "no role": (lines({"messages": [*OK_CHAT["messages"], {"content": "b"}]}), CHAT, 1, ["message 2", "no role"]),
    "an unknown speaker": (lines({"messages": [{"from": "narrator", "value": "a"}]}), CHAT, 1, ["'narrator'", "gpt"]),
    "null for a content": (lines({"messages": [{"from": "human", "value": None}]}), CHAT, 1, ["null", "expected text"]),
    "half a weight": (said(role="assistant", content="a", weight=0.5), CHAT, 1, ["weight is 0.5", "1 (trained) or 0"]),
    "a weight of the user": (said(content="a", weight=1), CHAT, 1, ["weight is 1, but only messages of the assistant"]),
    "messages for a prompt": (lines({"prompt": OK_CHAT["messages"], "completion": "b"}), PC, 1, ["data.format: chat"]),
    "an image": (said(content=IMAGE), CHAT, 1, ["message 1 of 'messages': part 2", "of type 'image'", "remove"]),
    "a part that is a text": (said(content=["a"]), CHAT, 1, ["part 1", "{type: text, text"]),
    "a part without a text": (said(content=[{"type": "text"}]), CHAT, 1, ["part 1"]),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_line_is_named(tmp_path: Path, name: str) -> None:
    content, data, line, words = WRONG_LINES[name]
    path = put(tmp_path, "a.jsonl", content)
    message = complaint(path, **data)
    assert message.startswith(f"{path}:{line}: ")
    assert all(word in message for word in words), message


WRONG_FILES: dict[str, tuple[str, str | bytes, str, list[str]]] = {
    "json: null": ("a.json", json.dumps([OK, {"text": None}]), ", row 2: ", ["null"]),
    "json: broken": ("a.json", '[{"text": "a"},\n{"text":]', ":2: ", ["not JSON"]),
    "json: cut": ("a.json", '[{"text": "a"},\n{"text": "b"}', ":2: ", ["not JSON"]),
    "json: bad UTF-8": ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', ":2: ", ["UTF-8", "0xff"]),
    "json: columns, not rows": ("a.json", '{"text": ["a", "b"]}', "", ["list"]),
    "json: no rows": ("a.json", "[]", "", ["no rows"]),
    "json: a number for a row": ("a.json", '[{"text": "a"}, 5]', ", row 2: ", ["an int"]),
    "json: one number": ("a.json", "5", "", ["an int"]),
    "jsonl: empty": ("a.jsonl", "", "", ["is empty"]),
    "jsonl: blank lines": ("a.jsonl", "\n  \n\n", "", ["no rows"]),
    "csv: bad UTF-8": ("a.csv", b"text,n\na,1\n\xff,2\n", ":3: ", ["UTF-8", "0xff"]),
    "csv: an open quote": ("a.csv", 'text,n\n"a,1\nb,2\n', ":2: ", ["not CSV"]),
    "csv: too few values": ("a.csv", "n,text\n1,a\n2\n", ":3: ", ["'text'"]),
    "csv: too many values": ("a.csv", "text,n\na,1\nb,2,3\n", ":3: ", ["3 values for 2 columns"]),
    "csv: a header only": ("a.csv", "text,n\n", "", ["no rows"]),
    "txt: bad UTF-8": ("a.txt", b"one\ntwo\nthr\xffee\n", ":3: ", ["UTF-8", "0xff", "column 4"]),
    "parquet: damaged": ("a.parquet", b"PAR1 this is none", "", ["cannot be read"]),
    "parquet: empty": ("a.parquet", "", "", ["is empty"]),
    "a spreadsheet": ("a.xlsx", "a", ": unknown data file type", ["as CSV", ".jsonl"]),
    "an archive": ("a.zip", "a", ": unknown data file type", ["unpack"]),
    "an unknown compression": ("a.jsonl.lz4", "a", ": unknown data file type", [".jsonl"]),
    "a compressed parquet": ("a.parquet.gz", "a", ": unknown data file type", []),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_named(tmp_path: Path, name: str) -> None:
    file, content, where, words = WRONG_FILES[name]
    path = put(tmp_path, f"inside/{file}", content)
    message = complaint(path)
    assert message.startswith(f"{path}{where}")
    assert all(word in message for word in words), message
    put(tmp_path, "inside/0.jsonl", lines(OK))
    if "no rows" not in words and "is empty" not in words and "unknown" not in where:
        assert str(path) in complaint(path.parent), "the wrong file of several"


@pytest.mark.parametrize("values", [["a", None], [1, 2], [b"a"], [["a"]], [{"a": "b"}]], ids=str)
def test_wrong_parquet(tmp_path: Path, values: list[Any]) -> None:
    path = parquet(tmp_path, "a.parquet", text=pa.array(values))
    kind = "null" if values[-1] is None else type(values[0]).__name__
    assert re.search(rf"^{path}, row {1 + (kind == 'null')}: 'text' is .*{kind}", complaint(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_the_message_for_a_missing_column_lists_the_others(tmp_path: Path, name: str) -> None:
    path, row = tmp_path / name, {"question": "a", "answer": "b"}
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(lines(row) if name == "a.jsonl" else "question,answer\na,b\n")
    half: dict[str, Any] = {**PC, "columns": {"prompt": "question"}}
    for data, missing in ((CHAT, "'messages'"), (PC, "'prompt'"), (half, "'completion'")):
        message = complaint(path, **data)
        assert message.startswith(str(path)) and (missing in message or name == "a.txt")
        assert ("text" if name == "a.txt" else "question, answer") in message


READ = """
import sys
from fsdptrain import errors
from fsdptrain.config import schema
from fsdptrain.data import columns, sources
for path in sys.argv[1:]:
    try: list(columns.read_rows(sources.open_sources(path), schema.Data(), None))
    except errors.DataError as error: print(error)
"""


def deep(key: str) -> str:
    """Return a row whose column `key` exceeds the stack of every recursive parser."""
    return '{"text": "a", "' + key + '": ' + "[" * 100_000 + "]" * 100_000 + "}\n"


def test_what_can_end_the_process(tmp_path: Path) -> None:
    contents = {"deep.json": f"[{deep('other')}]", "read.json": f"[{deep('text')}]", "deep.jsonl": deep("other"),
                "read.jsonl": deep("text"), "open.jsonl": '{"text": ' * 100_000, "null.json": "null"}  # fmt: skip
    paths = [put(tmp_path, name, content) for name, content in contents.items()]
    for path, message in zip(paths, python("-c", READ, *paths).stdout.splitlines(), strict=True):
        assert message.startswith(str(path))


# ------------------------------------------------------------------------------- files that are none, or not for long


def test_a_pipe_or_a_device_is_refused_without_waiting(tmp_path: Path) -> None:
    put(tmp_path, "a.jsonl", lines(OK))
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "*.jsonl"):
        assert complaint(path) == f"{pipe} is not a readable regular file"
    pipe.unlink()
    pipe.symlink_to(tmp_path / "gone")
    assert complaint(tmp_path) == f"{pipe} is not a readable regular file"
    assert complaint("/dev/zero") == "/dev/zero is not a readable regular file"


def test_a_folder_with_a_suffix_is_a_folder(tmp_path: Path) -> None:
    put(tmp_path, "x.jsonl/a.jsonl", lines(OK))
    (tmp_path / "y.jsonl").mkdir()
    assert rows_of(tmp_path / "x.jsonl") == rows_of(tmp_path) == [OK]
    assert "no data files" in complaint(tmp_path / "y.jsonl")


def test_unreadable_files_and_folders_are_named(tmp_path: Path) -> None:
    closed, inside = put(tmp_path, "one/a.jsonl", lines(OK)), put(tmp_path, "two/closed/b.jsonl", lines(OK))
    above = [folder for folder in tmp_path.parents if folder.name.startswith(("pytest-", "popen-"))]
    for folder in (tmp_path, *above, tmp_path / "one", tmp_path / "two"):
        folder.chmod(0o755)
    closed.chmod(0)
    inside.parent.chmod(0)
    with as_nobody():
        found = [complaint(path) for path in (closed, closed.parent, inside.parent.parent)]
    assert found == [f"{path} cannot be read: Permission denied" for path in (closed, closed, inside.parent)]


def test_a_damaged_parquet_file_is_a_data_error_or_is_read(tmp_path: Path) -> None:
    path = parquet(tmp_path, "a.parquet", text=pa.array([f"text number {i}" for i in range(200)]))
    sound = path.read_bytes()
    for at in range(0, len(sound), max(1, len(sound) // 150)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x55]) + sound[at + 1 :])
        with contextlib.suppress(DataError):
            rows_of(path)
        path.write_bytes(sound[:at])
        with pytest.raises(DataError):
            rows_of(path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", "text,text\na,b\n")
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "b.parquet")
    for name in ("a.csv", "b.parquet"):
        assert complaint(tmp_path / name).endswith("more than one of its 2 columns is called 'text'")
    put(tmp_path, "c.csv", "text,n,n\na,1,2\n")
    assert rows_of(tmp_path / "c.csv") == [{"text": "a"}]


# --------------------------------------------------------------------------------------------- content, not clocks


def test_fingerprints(tmp_path: Path) -> None:
    a, b = put(tmp_path, "x/a.jsonl", "1"), put(tmp_path, "y/b.jsonl", "1")
    assert fingerprint(str(a)) == fingerprint(str(b)) == fingerprint(str(a.parent))  # the path is not part of it
    put(tmp_path, "x/c.jsonl", "2")
    assert fingerprint(str(a.parent)) != fingerprint(str(a)) != fingerprint(str(put(tmp_path, "a.csv", "1")))
    assert fingerprint("org/one") != fingerprint("org/two")


def test_the_fingerprint_of_much_data_is_cached_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads = put(tmp_path, "a.txt", b"one"), []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: reads.append(1) or digest(*args))
    first = fingerprint(str(file))
    monkeypatch.setattr(sources, "QUICKLY_READ", 1)
    assert [fingerprint(str(file)) for _ in range(2)] == [first] * 2 and len(reads) == 3  # changed a moment ago
    monkeypatch.setattr(sources, "SETTLED_S", 0.0)
    assert [fingerprint(str(file)) for _ in range(3)] == [first] * 3 and len(reads) == 4
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(b"two")
    os.utime(file, ns=times)  # as many bytes, and the same time
    assert fingerprint(str(file)) != first and len(reads) == 5


# ------------------------------------------------------------------------------------------- the splits of a folder


LAYOUTS = [  # files of a folder; "*": those that are read; the path to hold out
    (["data/train-00000-of-00002.jsonl*", "data/train-00001-of-00002.jsonl*", "data/validation-00000-of-00001.jsonl",
      "data/test-00000-of-00002.jsonl", "data/test-00001-of-00002.jsonl"], "data/validation-00000-of-00001.jsonl"),
    (["data/train_sft-00000-of-00001.jsonl*", "data/test_sft-00000-of-00002.jsonl",
      "data/test_sft-00001-of-00002.jsonl"], "data/test_sft-*"),
    (["train/a.jsonl*", "train/b.jsonl*", "dev/a.jsonl", "dev/b.jsonl", "README.md"], "dev/*"),
    (["train.jsonl*", "valid.jsonl", "dataset_infos.json", "extra.jsonl"], "valid.jsonl"),
    (["my_train_1.jsonl*", "my-training.jsonl*", "my_val.jsonl", "eval.jsonl"], "my_val.jsonl"),
    (["en/train-00000-of-00001.jsonl*", "fr/train-00000-of-00001.jsonl*", "en/test-00000-of-00001.jsonl",
      "fr/test-00000-of-00001.jsonl"], "**/test-00000-of-00001.jsonl*"),
    (["en/train.jsonl*", "fr/train.jsonl*", "en/test-a.jsonl", "fr/b-test.jsonl"], None),
    (["train.jsonl*", "dev.jsonl", ".ipynb_checkpoints/train-checkpoint.jsonl", "__MACOSX/._train.jsonl",
      "._train.jsonl"], "dev.jsonl"),
    (["alpaca.jsonl*", "test.jsonl"], "test.jsonl"),
    (["test/a.jsonl*", "test/b.jsonl*"], None),
    (["a.jsonl*", "b.jsonl*", "state.json", "config.json"], None),
    (["trainer.jsonl*", "contest.jsonl*", "devices/evaluator.jsonl*"], None),
]  # fmt: skip


@pytest.mark.parametrize(("names", "held_out"), LAYOUTS)
def test_of_a_folder_with_splits_the_one_to_train_on_is_read(
    names: list[str], held_out: str | None, tmp_path: Path
) -> None:
    for name in names:
        put(tmp_path, name.rstrip("*"), lines({"text": name.rstrip("*")}))
    wanted = [name.rstrip("*") for name in names if name.endswith("*")]
    assert sorted(row["text"] for row in rows_of(tmp_path)) == sorted(wanted)
    found = sources.held_out_files(str(tmp_path))
    assert found == (str(tmp_path / held_out) if held_out else None)
    if found:
        assert len(rows_of(found)) >= 1 + ("*" in found)
        [note] = sources.splits_note(str(tmp_path), None)
        assert "read, not " in note and "set data.eval: {path: " in note and found in note
    # `datasets` finds the same files, where it finds a split to train on.
    patterns = get_data_patterns(str(tmp_path))
    if "train" in patterns and patterns["train"] != ["**"]:
        theirs = DataFilesList.from_patterns(patterns["train"], base_path=str(tmp_path))
        assert sorted(theirs) == sorted(str(tmp_path / name) for name in wanted)


def test_several_splits_to_train_on_are_refused(tmp_path: Path) -> None:
    for split in ("train_sft", "train_gen", "test_sft"):
        put(tmp_path, f"data/{split}-00000-of-00001.jsonl", lines(OK))
    message = complaint(tmp_path)
    assert "several splits for training (train_gen, train_sft)" in message and "/**/train_gen-*" in message
    assert len(rows_of(tmp_path / "data/train_sft-*")) == 1
