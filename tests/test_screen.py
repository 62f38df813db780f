"""The live line at every width, and the first and last lines of a run: no torch, no terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support import ROOT, write_recipe

from fsdptrain.config.hardware import parse_hardware
from fsdptrain.config.plan import draft_plan, make_plan
from fsdptrain.config.reader import load
from fsdptrain.config.topology import topology_of
from fsdptrain.launch.attempts import EarlierAttempts
from fsdptrain.launch.heading import heading
from fsdptrain.liveline import LiveLine
from fsdptrain.rundir import RunDir
from fsdptrain.screen import Screen
from fsdptrain.text import rate, wrapped

STARTED = {
    "event": "start", "parameters": 158144, "units": 5, "device": "cpu", "attention": "sdpa", "total_steps": 40,
    "blocks": 326, "seq_len": 64, "fill": 0.99, "data_notes": [],
}  # fmt: skip


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "loss": 5.9941, "lr": 3e-4, "grad_norm": 0.83, "tokens": 500, "step_s": 0.5,
        "tokens_per_s": 1000.0, "positions_per_s": 1024.0, "peak_memory_bytes": 2**30, "total_tokens": 500 * number,
        "total_positions": 512 * number, "total_s": 0.5 * number,
    } | changes  # fmt: skip


def drawn(line: LiveLine, width: int) -> str:
    """Return the live line as it is drawn on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(line, end="")
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


@given(
    st.integers(60, 200), st.integers(1, 99_999), st.floats(0, 9.9), st.floats(1, 9e6), st.floats(0.01, 3), st.data()
)
def test_the_live_line_keeps_its_most_important_parts(
    width: int, total: int, loss: float, speed: float, step_s: float, data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, total))
    screen = Screen(Console(file=io.StringIO()))
    screen.show(STARTED | {"total_steps": total})
    screen.show(step(number, loss=loss, positions_per_s=speed, step_s=step_s))
    shown = drawn(screen._line, width)
    assert len(shown) <= width - 2 and "\n" not in shown  # room for the ^C that a terminal prints
    kept = rf"step {number}/{total}  .*loss {loss:.4f}  {re.escape(rate(speed))}  ETA \d+:[\d:]+(  .*)?"
    assert re.fullmatch(kept, shown), shown
    assert width < 110 or re.search(r"lr 3.00e-04  norm 0.83  1.00 GiB$", shown.rstrip())


def test_allocator_retries_are_shown_only_when_there_are_any() -> None:
    screen = Screen(Console(file=io.StringIO()))
    screen.show(STARTED)
    for retries, shown in ((0, False), (3, True)):
        screen.show(step(1, reserved_memory_bytes=2**31, alloc_retries=retries))
        assert ("allocator retries 3" in drawn(screen._line, 150)) == shown


@given(st.integers(12, 60), st.integers(0, 3000), st.integers(0, 3000))
def test_work_fits_any_width_and_has_a_bar_only_with_a_count(width: int, done: int, total: int) -> None:
    line = LiveLine()
    line.show_work("tokenise", done, total)
    shown = drawn(line, width)
    assert "tokenise" in shown and len(shown) <= width - 2
    assert total > 1 or not re.search(r"\d/\d|━|\d:\d", shown)  # without a count no bar and no ETA


@given(st.lists(st.text("abc/·", min_size=1, max_size=30), min_size=1, max_size=20), st.integers(8, 80), st.booleans())
def test_wrapping_keeps_every_word_whole(words: list[str], width: int, labelled: bool) -> None:
    text = ("label  " if labelled else "") + " ".join(words)
    lines = wrapped(text, width).split("\n")
    assert " ".join(lines).split() == text.split()
    label = int(labelled)  # the label stays on the line of its first word
    assert all(len(line) <= width or len(line.split()) == 1 + label * (not n) for n, line in enumerate(lines))
    assert not labelled or all(line.startswith(" " * min(7, width // 3)) for line in lines[1:])


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_heading_of_every_shipped_recipe(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the working tree may hold runs/, to which recipes refer
    written = load(recipe, [f"output_dir={tmp_path / 'run'}"])
    plan = draft_plan(written, topology_of(written.recipe, None, parse_hardware("h100-80gb").hardware), elsewhere=True)[
        0
    ]
    lines = dict(
        line.split(maxsplit=1) for line in heading(plan, RunDir(tmp_path / "run"), EarlierAttempts()).splitlines()
    )
    assert lines["run"] == f"{written.recipe.name}: new, in run"
    numbers = [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", lines["batch"])]
    size, ranks, micro_batches, micro_batch, tokens = numbers
    assert size == ranks * micro_batches * micro_batch == written.recipe.train.global_batch_size
    assert tokens == size * written.recipe.data.seq_len
    assert lines["ranks"].startswith(f"{ranks} × cuda") and written.recipe.fsdp.strategy in lines["ranks"]
    assert ("hub" in lines) == (written.recipe.model.id is not None)
    if plan.freezes:
        assert lines["trains"].startswith("LoRA of rank 16 on all linear layers, in float32; the rest is frozen in ")
    assert ("trains" in lines) == ("-lora" in recipe.stem or "-qlora" in recipe.stem)


def test_the_heading_states_whether_a_run_is_new_or_resumes(tmp_path: Path) -> None:
    written = load(write_recipe(tmp_path), [])
    plan = make_plan(written, topology_of(written.recipe, None, parse_hardware("cpu").hardware))
    rundir = plan.rundir
    found = [EarlierAttempts(), EarlierAttempts(2), EarlierAttempts(4, trained=True)]
    states = [heading(plan, rundir, before).splitlines()[0].split(": ")[1].split(",")[0] for before in found]
    rundir.root.mkdir()
    rundir.metrics.touch()
    states.append(heading(plan, rundir, EarlierAttempts()).splitlines()[0].split(": ")[1].split(",")[0])
    assert states == [
        "new", "resumes after step 2", "all 4 steps are trained; evaluation or export is not complete",
        "starts from step 0 (no checkpoint yet)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [STARTED, step(40)],
            "40 steps in 1:15 · 1,024 tok/s while training · peak 1.00 GiB/rank\n20,000 label tokens",
        ),
        (
            [STARTED, {"event": "resume", "step": 16}, step(17), step(40, total_tokens=12_000)],
            "24 steps in 1:15 (40 total) · 1,024 tok/s while training · peak 1.00 GiB/rank\n12,000 label tokens",
        ),
        (
            [STARTED, step(7), STARTED, {"event": "resume", "step": 6}, step(40, total_tokens=17_000)],
            "40 steps in 1:15 (1 restart) · 1,024 tok/s while training · peak 1.00 GiB/rank\n20,500 label tokens",
        ),
    ],
)
def test_the_summary_separates_this_command_from_the_whole_run(records: list[dict[str, Any]], message: str) -> None:
    screen = Screen(Console(file=io.StringIO(), width=80))
    for record in records:
        screen.show(record)
    screen.summary(75.0)
    shown = screen.console.file.getvalue()  # type: ignore[attr-defined]
    assert f"\n{message} · training loss 5.9941\n" in shown


def test_an_export_shows_how_far_it_is_from_the_trained_model() -> None:
    screen = Screen(Console(file=io.StringIO(), width=400))
    record = {"event": "export", "path": "out", "bytes": 1024, "dtype": "float32", "adapter": "both"}
    found = {"tokens": 200, "held_out": True, "spread": 2.345, "mean": 1.23e-7, "largest": 4.56e-6, "limit": 1e-3}
    screen.show(record | {"compared": [{"what": "merged", **found}, {"what": "separate", **found, "mean": 2e-7}]})
    screen.show(record | {"not_compared": "opening it took more than 30:00"})
    shown = screen.console.file.getvalue()  # type: ignore[attr-defined]
    assert (
        "  opened in a fresh process, logits differ from the trained model's: merged by 1.2e-07 on average, 4.6e-06 at "
        "most; adapter on its base by 2.0e-07 on average, 4.6e-06 at most (200 held-out tokens, logits spread by 2.3)\n"
    ) in shown
    assert "  not compared with the trained model: opening it took more than 30:00\n" in shown


def test_a_pipe_gets_no_escape_sequences_even_with_force_color(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Screen() as screen:
        screen.show(STARTED)
        screen.show(step(40))
    assert "\x1b" not in capsys.readouterr().out
