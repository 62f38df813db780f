"""Every command on a pseudo-terminal: what a user sees, rather than what a pipe gets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from pathlib import Path

import pytest
from pseudo_terminal import Terminal
from support import events, python, write_recipe

HEADING = """\
run    run: {}, in {}
model  llama, from scratch; float32 weights, float32 compute
ranks  2 × cpu, FULL_SHARD
batch  8 = 2 ranks × 4 micro-batches × 1; 512 tokens a step
lr     0.0003, constant; 400 steps"""


# A line of one path behind a label, which cannot be broken.
PASTED = r'(\w+ +|folder = ")\S+$'


def live_frames(terminal: Terminal) -> list[str]:
    """Return the live line of training each time that it was drawn."""
    return [piece.removesuffix("^C") for piece in terminal.pieces() if re.match(r"step \d+/\d+  ", piece)]


def assert_tidy(terminal: Terminal, *widths: int) -> None:
    """Check that nothing crashed, no word was cut at the edge, and the cursor and the screen are left clean."""
    text = terminal.text()
    assert "Traceback" not in text and terminal.cursor_is_reset, text
    for piece in terminal.pieces():  # only one word (a path) may be too long
        assert len(piece) <= max(widths) or len(piece.removesuffix(" \\").split()) == 1 or re.match(PASTED, piece), (
            piece
        )
    dumb = b"\x1b" not in terminal.raw
    assert dumb or not re.search(r"━|ETA \d|^[-\\|/]  ", "\n".join(terminal.display()), re.MULTILINE), (
        text
    )  # of the live line


def test_a_run_that_is_stopped_twice_and_resumed(tmp_path: Path) -> None:
    slow = {"train__steps": 400, "schedule__name": "constant", "checkpoint__every": 5, "checkpoint__async": False}
    recipe, run = write_recipe(tmp_path, log__forecast=True, **slow), tmp_path / "run"

    with Terminal("run", recipe, columns=60) as fresh:  # stopped once
        fresh.wait_for("400 steps")
        assert not events(run)  # the heading is there before any worker has shown a word
        lines = fresh.lines()
        assert all(line in lines for line in HEADING.format("new", run).splitlines()[1:]), fresh.text()
        fresh.wait_for("checkpoint: step-00000010")
        fresh.press_ctrl_c()
        assert fresh.wait() == 75
        assert_tidy(fresh, 60)
        whole = r"step \d+/400  .*loss \d\.\d{4}  [\d,]+ tok/s  ETA [\d:]+"
        assert all(re.fullmatch(whole, frame) for frame in live_frames(fresh)), live_frames(fresh)
    stopped = events(run, "stop")[-1]["step"]
    shown = " ".join(fresh.text().split())
    lost = re.search(r"Ctrl-C: stopping after this step, with a checkpoint \(Ctrl-C again: stop now(.*?)\)", shown)
    assert lost and (not lost[1] or re.fullmatch(r" and lose the work since step \d*[05]", lost[1])), shown
    done = f"stopped by Ctrl-C after step {stopped}, with a checkpoint"
    assert f"fsdptrain: {done}; run the same command to continue" in shown

    with Terminal("run", recipe, columns=120, NO_COLOR="1") as resumed:  # with a resized window, stopped by two Ctrl-C
        resumed.wait_for(f"run: resumes after step {stopped}, in {run}")
        ahead = [f"checkpoint: step-{(stopped // 5 + more) * 5:08}" for more in (2, 4)]
        resumed.wait_for(ahead[0])
        assert any("GiB" in frame for frame in live_frames(resumed))
        resumed.resize(60)
        resumed.wait_for(ahead[1])
        assert len(live_frames(resumed)[-1]) <= 60
        resumed.press_ctrl_c()
        resumed.wait_for("stopping after this step")
        resumed.press_ctrl_c()
        assert resumed.wait() == 75
        assert_tidy(resumed, 120)
        assert b"\x1b[3" not in resumed.raw  # no colour
    shown = " ".join(resumed.text().split())
    made, kept = events(run, "step")[-1]["step"], max(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
    if f"step {made}, with a checkpoint" not in shown:  # the second Ctrl-C came before the checkpoint was complete
        assert "fsdptrain: stopped at once by a second Ctrl-C; " in shown
        assert f"the newest checkpoint is that of step {kept}; run the same command to continue" in shown

    with Terminal("run", recipe, f"train.steps={kept + 12}") as last:  # runs to its end
        assert last.wait() == 0
        assert_tidy(last, 80)
    text = last.text()
    assert re.search(
        rf"\n12 steps in \d:\d\d \({kept + 12} total\) · [\d,]+ tok/s while training · "
        r"peak ([\d.]+ to )?[\d.]+ GiB/rank( \(most on rank \d\))?\n",
        text,
    )
    assert "forecast" not in text and not (run / "forecast.json").exists()  # a run on a CPU has no forecast
    written = last.pieces()
    first = next(i for i, line in enumerate(written) if line.startswith("from transformers"))
    code = "\n".join([*written[first : first + 5], "print(len(tokenizer), model.config.hidden_size)"])
    assert python("-c", code).stdout == "512 64\n"

    steps = events(run, "step")
    assert all(event["positions_per_s"] >= event["tokens_per_s"] for event in steps)  # padding has no label
    assert steps[-1]["total_positions"] == 12 * 8 * 64

    for words in (("verify", run), ("export", run, "--out", tmp_path / "again"), ("run", recipe, "--fresh")):
        with Terminal(*words, columns=60) as other:
            assert other.wait() == (2 if words[0] == "run" else 0), other.text()
            assert_tidy(other, 60)


# The agent may not handle signals yet, and importing workers do not.
@pytest.mark.parametrize("patience", [0.0, pytest.param(2.0, marks=pytest.mark.soak)])
def test_a_stop_before_the_first_step_on_a_dumb_terminal(patience: float, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=2000)
    with Terminal("run", recipe, columns=60, TERM="dumb", executed=True) as terminal:
        terminal.wait_for("2,000 steps")
        time.sleep(patience)
        terminal.press_ctrl_c()
        assert terminal.wait() == 75
        assert_tidy(terminal, 60)
        assert b"\x1b" not in terminal.raw
        assert "Ctrl-C: stopping; no step has been trained yet" in terminal.text()


def test_ctrl_c_in_a_command_with_nothing_to_save(tmp_path: Path) -> None:
    recipe, made = write_recipe(tmp_path), tmp_path / "new" / "recipe.yaml"
    init = ("init", "--data", tmp_path / "text.jsonl", "--model", "org/name", "--hardware", "8xh100-80gb", made)
    for words in (init, ("validate", recipe)):
        with Terminal(*words, columns=60, executed=True) as terminal:
            terminal.wait_for("starting")
            terminal.press_ctrl_c()
            assert terminal.wait() == 75 and terminal.cursor_is_reset
            assert terminal.text() == "fsdptrain: stopped by Ctrl-C; run the same command again"
    assert not made.parent.exists()


def test_failures_with_one_stream_redirected(tmp_path: Path) -> None:
    """A redirected stream gets plain lines without escape sequences; the other one stays on the terminal."""
    recipe = write_recipe(tmp_path)
    with (tmp_path / "errors").open("w+") as errors:
        with Terminal("run", recipe, "fsdp.wrap=[GPT2Block]", stderr=errors) as terminal:  # a worker fails
            assert terminal.wait() == 2
            assert_tidy(terminal, 80)
            assert "checking the model" in terminal.raw.decode()
        errors.seek(0)
        assert errors.read().startswith("fsdptrain: fsdp.wrap: ['GPT2Block'] matches nothing in LlamaForCausalLM")
    (tmp_path / "text.jsonl").write_text('{"text": "a row"}\n{"text": 7}\n')
    with (tmp_path / "output").open("w+") as output:
        with Terminal("run", recipe, columns=60, stdout=output) as terminal:  # the data is wrong
            assert terminal.wait() == 4
            assert_tidy(terminal, 60)
            shown = terminal.text().replace("\n", "").replace("  ", "")  # the terminal wrapped the path
            assert shown.endswith("text.jsonl:2:'text' is an int; expected text; put quotes around it"), shown
        output.seek(0)
        plain = output.read()
    assert "\x1b" not in plain and "starting" not in plain
    assert plain.startswith("run    run: starts from step 0 (no checkpoint yet), in ") and plain.count("\n") == 6
    with Terminal("run", recipe, "optim.lr=fast", "model.tokeniser=x", columns=60) as terminal:  # the recipe is
        assert terminal.wait() == 2
        assert_tidy(terminal, 60)


def test_the_json_of_a_dry_run_is_the_last_on_a_terminal(tmp_path: Path) -> None:
    with Terminal("validate", write_recipe(tmp_path), "--json", "--no-build", columns=120) as terminal:
        assert terminal.wait() == 0, terminal.text()
        raw = terminal.raw.decode()
        assert json.loads(raw[raw.index("{") :])["plan"]["world_size"] == 2


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model={"id": "nobody/nothing"}, launch__nproc_per_node=1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        there = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for offline, asked in (("0", 1), ("1", 0)):
            cache = {"HF_ENDPOINT": there, "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path / "hub")}
            with Terminal("run", recipe, columns=120, **cache) as terminal:
                state = "downloaded if not cached" if asked else "from the cache only (HF_HUB_OFFLINE)"
                terminal.wait_for(f"hub    nobody/nothing: {state}")
                if asked:
                    terminal.wait_for("asking the Hub for nobody/nothing")
                assert terminal.wait() == 2
                assert_tidy(terminal, 120)
                shown = " ".join(terminal.text().split())
                assert "'nobody/nothing' is not in the cache, and the Hub cannot be reached" in shown
            assert connections_to(silent) == asked
        with Terminal("validate", recipe, HF_ENDPOINT=there, HF_HUB_OFFLINE="0") as terminal:
            terminal.wait_for("asking the Hub for nobody/nothing")
            assert terminal.wait() == 2 and "the Hub cannot be reached" in " ".join(terminal.text().split())


def connections_to(server: socket.socket) -> int:
    """Close the connections that wait at a listening socket; return how many there were."""
    server.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count
