"""The command line without a run: help, versions, wrong arguments, `init`, and messages on a narrow terminal."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from pseudo_terminal import run_on_terminal
from support import ROOT, environment, fsdptrain, python

from fsdptrain import cli
from fsdptrain.cli import app
from fsdptrain.config.formats import Format
from fsdptrain.config.reader import load
from fsdptrain.config.schema import Data
from fsdptrain.data.columns import peek
from fsdptrain.errors import DISK_FULL_ERRNOS, DataError, RecipeError
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.validation.init_recipe import read_starter


def leaves(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield each command that does something: its words, and what it is for Typer."""
    below = getattr(command, "commands", {})
    for name, each in below.items():
        yield from leaves(each, *names, name)
    if not below:
        yield " ".join(names), command


COMMANDS = dict(leaves(typer.main.get_command(app)))


def test_help_and_versions_come_without_torch() -> None:
    """`-h` equals `--help` for every command; neither they nor `--version` import heavy packages."""
    code = """
import contextlib, io, json, sys
from fsdptrain.cli import app
shown = {}
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app(line.split())
    shown[line] = out.getvalue()
heavy = {"torch", "transformers", "numpy", "pyarrow", "datasets"} & sys.modules.keys()
print(json.dumps([shown, sorted(heavy)]))
"""
    commands = ["", "recipes", *COMMANDS]
    lines = [f"{command} {flag}".strip() for command in commands for flag in ("-h", "--help")] + ["--version"]
    shown, heavy = json.loads(python("-c", code, json.dumps(lines), executed=True).stdout)
    assert heavy == []
    for command in commands:
        assert "Usage:" in shown[f"{command} -h".strip()] == shown[f"{command} --help".strip()]
    assert shown["--version"].startswith(f"fsdptrain {version('fsdptrain')} (torch {version('torch')}, transformers ")


def test_the_help_of_each_command_has_an_example_that_is_accepted() -> None:
    assert {"run", "recipes copy"} <= COMMANDS.keys()
    for name, command in COMMANDS.items():
        assert len(command.epilog) <= 56, f"{name}: on a terminal of 60 columns its example is not one line"
        assert not command.get_short_help_str(44).endswith("..."), f"{name}: its first sentence is cut off in a list"
        example = command.epilog.removeprefix("Example: fsdptrain ").partition(" >")[0]
        assert example.split()[: len(name.split())] == name.split()
        command.make_context(name, shlex.split(example)[len(name.split()) :])  # raises UsageError
        for option in command.params:
            is_flag = getattr(option, "is_flag", False)
            assert is_flag or option.metavar, f"{name} {option.name}: help shows the type of Python"


def test_the_help_lists_every_command_in_one_group() -> None:
    listed = [name for names in cli.COMMANDS.values() for name in names]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert fsdptrain("recipes").stdout == fsdptrain("recipes", "list").stdout != ""


def test_a_misspelt_path_gets_the_nearest_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text('[{"text": "a b"}]')
    export = tmp_path / "runs" / "who" / "export"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    for words, hint in (
        (["status", "runs/whoo"], f"runs/whoo: there is no such folder; did you mean {tmp_path}/runs/who?"),
        (["init", "--data", "chat.json", "--model", "runs/who/export"], "; did you mean chats.json?"),
        (["init", "--data", "chats.json", "--model", "./runs/wo"], "(org/name); did you mean runs/who?"),
        (["init", "--data", "chats.json", "--model", "runs/who"], "has no config.json; did you mean runs/who/export?"),
    ):
        done = fsdptrain(*words, cwd=tmp_path)
        assert done.returncode in (2, 4) and hint in " ".join(done.stderr.split()), done.stderr


def test_a_misspelt_command_gets_its_nearest_name_and_shells_complete() -> None:
    done = fsdptrain("valdate")
    assert done.returncode == 2 and "No such command 'valdate'. Did you mean 'validate'?" in done.stderr
    pressed_tab = {"_FSDPTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "fsdptrain val", "COMP_CWORD": "1"}
    command = Path(sys.executable).with_name("fsdptrain")
    done = subprocess.run([command], capture_output=True, text=True, env=environment(**pressed_tab), check=False)
    assert done.stdout.split() == ["validate"]


@pytest.mark.parametrize("command", ["srun -N2 --ntasks-per-node=1", "srun -N1 -n3"])
def test_a_message_names_its_host_if_a_launcher_started_the_command_on_several(tmp_path: Path, command: str) -> None:
    env = json.loads((ROOT / "tests/plan/launchers.json").read_text())[command][-1]
    name = f"fsdptrain on {socket.gethostname()}" if "-N2" in command else "fsdptrain"
    recipe = tmp_path / "recipe.yaml"
    assert re.match(rf"{name}: .*recipe.yaml", fsdptrain("run", recipe, **env).stderr)  # there is no such file
    recipe.write_text("model: {}\n")
    assert fsdptrain("run", recipe, **env).stderr.startswith(f"{name}: 3 problems\n")


@pytest.mark.parametrize("command", ["run", "validate"])
def test_an_argument_that_is_not_a_recipe_is_refused_with_a_hint(tmp_path: Path, command: str) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {id: org/name}\n")
    (tmp_path / "rows.json").write_text('[{"text": "a"}]')
    for word, message in {
        tmp_path: f"is a folder; its recipe is {tmp_path / 'recipe.yaml'}",
        tmp_path.parent: "is a folder",
        "rows.jsonl": "is data, not a recipe; to write one for it: fsdptrain init --data rows.jsonl --model ID",
        tmp_path / "rows.json": "rows.json:1: a recipe must be a mapping of keys",
        tmp_path / "recip.yaml": f"did you mean {tmp_path / 'recipe.yaml'}?",
        "shakespear": "did you mean shakespeare?",
        "nothing-like-it": "no such file or shipped recipe; the shipped recipes: gsm8k-lora, gsm8k-sft, ",
        "x" * 300: "no such file",
    }.items():
        done = fsdptrain(command, word)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert message in done.stderr and "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------------------- init

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # a row, and how the recipe reads it
    "text": ({"text": "a"}, {"text": "a"}),
    "pairs": ({"question": "a", "answer": "b"}, {"prompt": "a", "completion": "b"}),
    "chat": ({"messages": TALK}, {"messages": TALK}),
    "sharegpt": ({"id": "1", "conversations": SHAREGPT}, {"messages": TALK}),
    "alpaca": ({"instruction": "a", "input": "b", "output": "c"}, {"prompt": "a\n\nb", "completion": "c"}),
}


@pytest.mark.parametrize("kind", ROWS)
def test_init_writes_a_recipe_that_reads_the_data(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, expected = ROWS[kind]
    data = tmp_path / "a folder: of 'data'"
    data.mkdir()
    (data / "rows.json").write_text(json.dumps([row]))
    (data / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    pq.write_table(pa.table({name: [value] for name, value in row.items()}), data / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate([*sorted(data.iterdir()), data, Path(data.name), Path(data.name) / "*.json"]):
        recipe = tmp_path / "recipes" / f"{number}.yaml"
        recipe.parent.mkdir(exist_ok=True)
        recipe.write_text(read_starter([str(path)], "org/name", recipe).text({}))
        written = load(recipe)
        monkeypatch.chdir("/")  # a relative path is also found from the folder of the recipe
        plan = make_plan(written, Topology("cpu", 1, 2))
        monkeypatch.chdir(tmp_path)
        found = peek(plan.data_path, plan.recipe.data)[1][0]
        assert {field: found[field] for field in expected} == expected


def test_init_reads_several_files_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    one, two, empty, void = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "empty", "void"))
    one.write_text('{"question": "a", "answer": "b"}\n')
    two.write_text('{"question": "c", "answer": "d"}\n')
    empty.touch()
    void.touch()
    dest = tmp_path / "recipe.yaml"
    starter = read_starter([str(empty), str(one), str(two)], "org/name", dest)
    dest.write_text(starter.text({}))
    plan = make_plan(load(dest), Topology("cpu", 1, 2))
    assert plan.recipe.data.path == plan.data_path == [str(empty), str(one), str(two)]
    assert (plan.recipe.data.separator, plan.recipe.data.columns["prompt"]) == ("\n", "question")
    with pytest.raises(RecipeError, match=r"data\.path: 'org/data' .* a list cannot hold data sets of the Hub"):
        read_starter([str(one), "org/data"], "org/name", dest)
    with pytest.raises(DataError, match=r"all 2 files are empty"):
        read_starter([str(empty), str(void)], "org/name", dest)
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"id": 5, "frage": "a", "antwort": "b"}\n')
    with pytest.raises(DataError, match=r"data\.columns .* columns: \{prompt: frage, completion: antwort\}"):
        read_starter([str(odd)], "org/name", dest)
    for pair in ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"chosen": TALK, "rejected": TALK}):
        odd.write_text(json.dumps(pair) + "\n")
        dest.write_text(read_starter([str(odd)], "org/name", dest).text({}))
        recipe = load(dest).recipe
        assert (recipe.data.format, recipe.train.objective) == (Format.preference, "dpo")
    for label, answer in (("label", "completion"), ("kto_tag", "answer")):
        odd.write_text("".join(json.dumps({"prompt": "a", answer: "b", label: good}) + "\n" for good in (True, False)))
        dest.write_text(read_starter([str(odd)], "org/name", dest).text({}))
        recipe = load(dest).recipe
        assert (recipe.data.format, recipe.train.objective) == (Format.feedback, "kto")
        with pytest.raises(DataError, match=rf"{label} says whether .* keep the rows in which {label} is true"):
            peek(str(odd), Data(format=Format.prompt_completion, columns={"completion": answer}))
    odd.write_text('{"prompt": "a", "completion": "b", "label": "greeting"}\n')
    assert read_starter([str(odd)], "org/name", dest).read_as.format == "prompt_completion"


def test_init_refuses_what_it_cannot_do_and_overwrites_nothing(tmp_path: Path) -> None:
    rows, odd, recipe = tmp_path / "rows.jsonl", tmp_path / "odd.jsonl", tmp_path / "recipe.yaml"
    (tmp_path / "models").mkdir()
    rows.write_text('{"text": "a"}\n')
    odd.write_text('{"x": "a", "y": 1}\n')
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": "hi"}\n')
    for data, model, dest, code, message in [
        (odd, "org/name", recipe, 4, "match no format (text: text; prompt_completion: prompt, completion; chat: "),
        (bad, "org/name", recipe, 4, "expected a list of messages"),
        (tmp_path / "gone.jsonl", "org/name", recipe, 4, "was not found"),
        (rows, "no/such/folder", recipe, 2, "--model: 'no/such/folder' does not exist, and is no Hub id"),
        (rows, "models", recipe, 2, "--model: 'models' has no config.json"),
        (rows, "models/mine", recipe, 2, "--model: 'models/mine' does not exist in the folder models"),
        (rows, "org/name", rows / "recipe.yaml", 2, "cannot write"),
    ]:
        done = fsdptrain("init", "--data", data, "--model", model, dest, cwd=tmp_path)
        assert (done.returncode, recipe.exists()) == (code, False), done.stderr
        assert message in done.stderr and "Traceback" not in done.stderr
    recipe.write_text("mine")
    done = fsdptrain("init", "--data", rows, "--model", "org/name", recipe)
    assert done.returncode == 2 and "exists already and is not overwritten" in done.stderr
    assert recipe.read_text() == "mine"
    for words in (["recipes", "copy", "shakespeare", "/proc/xx/"], ["recipes", "copy", "shakespeare", rows / "x/"]):
        done = fsdptrain(*words)
        assert done.returncode == 2 and "cannot write" in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = fsdptrain("init", "--data", rows, "--model", "org/name", "~/of/mine.yaml", HOME=str(tmp_path))
    assert done.returncode == 0 and (tmp_path / "of" / "mine.yaml").is_file(), done.stderr
    with pytest.raises(RecipeError, match=r"^--data: 'ftp://host/x': ftp:// is not supported"):
        read_starter(["ftp://host/x"], "org/name", recipe)
    done = fsdptrain("init", "--data", rows, "--model", "org/name", "$X/mine.yaml")
    assert done.returncode == 2 and "variables such as $HOME are not expanded" in done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_an_error_of_the_system_ends_in_one_message(number: int) -> None:
    """An OSError in a command ends it with a message and an exit code, without a traceback."""
    words = f"""
import os, sys
from fsdptrain import cli
@cli.app.command()
def refused() -> None:
    raise OSError({number}, os.strerror({number}), "/some/file")
sys.argv = ["fsdptrain", "refused"]
cli.main()
"""
    done = python("-c", words, executed=True)
    assert done.returncode == 6 and "Traceback" not in done.stderr, done.stderr
    assert "/some/file" in done.stderr and os.strerror(number) in done.stderr
    assert ("no space" in done.stderr) == (number in DISK_FULL_ERRNOS)


# --------------------------------------------------------------------------------------------------- on a terminal


@pytest.mark.parametrize("columns", [60, 120])
def test_refusals_are_wrapped_at_words_and_indented(tmp_path: Path, columns: int) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {id: org/name}\nfsdp: full\ndata: {seq_len: 4k}\nfrobnicate: 1\n")
    code, screen = run_on_terminal("run", recipe, columns=columns)
    piped = fsdptrain("run", recipe).stderr.splitlines()
    assert code == 2 and len(piped) == 4 and max(map(len, piped)) > 120
    shown = screen.splitlines()
    assert max(map(len, shown)) <= columns
    assert [line for line in shown if line.startswith("fsdptrain")] == [piped[0]]
    unwrapped = re.sub(r"\n {4}(?! )", " ", screen)
    assert unwrapped.splitlines() == piped, "the same words, broken only at spaces"


def test_the_readme_names_every_command() -> None:
    readme, names = (ROOT / "README.md").read_text(), {name.split()[0] for name in COMMANDS}
    listed = {*re.findall(r"`(?:fsdptrain )?(\w+)", readme.partition("## Commands")[2])}
    assert len(names) >= 7 and names <= listed


@pytest.mark.parametrize("after_s", [0.03, 0.06, 0.09, 0.12, 0.15])
def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback(after_s: float) -> None:
    words = [sys.executable, "-m", "fsdptrain", "validate", "shakespeare"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert "fsdptrain/cli.py" not in shown, shown
