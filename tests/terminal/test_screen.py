"""The live line at every width, and the first and last lines of a run: no torch, no terminal."""

from __future__ import annotations

import io
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from support import ROOT

from fsdptrain.checkpoint.resume import EarlierAttempts
from fsdptrain.config.reader import load
from fsdptrain.plan.hardware import KNOWN
from fsdptrain.plan.plan import draft_plan
from fsdptrain.plan.topology import topology_of
from fsdptrain.processes import VisibleText
from fsdptrain.report.run_banner import heading
from fsdptrain.run_folder.records import EVENTS
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.page import LiveLine, Page
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import printable, rate, wrapped

STARTED = {
    "event": "start", "parameters": 158144, "units": 5, "device": "cpu", "attention": "sdpa", "total_steps": 40,
    "blocks": 326, "seq_len": 64, "fill": 0.99, "notes": [],
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


def shown(*records: dict[str, Any], summary_s: float = 0.0) -> tuple[Screen, str]:
    """Return a screen in a wide pipe that has shown these records, and its text."""
    screen = Screen(Console(file=io.StringIO(), width=400))
    for record in records:
        screen.show(record)
    if summary_s:
        screen.summary(summary_s)
    return screen, screen.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ranks", "peak"), [([93, 100], "1.00 GiB/rank"), ([50, 100], "0.50 to 1.00 GiB/rank (most on rank 1)")]
)
def test_memory_is_shown_of_the_fullest_and_the_emptiest_rank_where_they_differ(ranks: list[int], peak: str) -> None:
    first = step(1, peak_memory_by_rank=[2**30 * share // 100 for share in ranks])
    screen, text = shown(STARTED, first, step(2), summary_s=1.0)  # they are written when they have changed
    assert f" · peak {peak}\n" in text
    screen.show(step(3))
    assert ("0.50 to 1.00 GiB" in drawn(screen._line, 200)) == (" to " in peak)


def test_allocator_retries_are_shown_only_when_there_are_any() -> None:
    for retries in (0, 3):
        screen, _ = shown(STARTED, step(1, reserved_memory_bytes=2**31, alloc_retries=retries))
        assert ("allocator retries 3" in drawn(screen._line, 150)) == bool(retries)


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
    topology = topology_of(written.recipe, None, KNOWN["h100-80gb"])
    plan, _ = draft_plan(written, topology, elsewhere=True)
    head = heading(plan, RunDir(tmp_path / "run"), EarlierAttempts())
    lines = dict(line.split(maxsplit=1) for line in head.splitlines())
    assert lines["run"] == f"{written.recipe.name}: new, in run"
    numbers = [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", lines["batch"])]
    size, groups, *shared, micro_batches, micro_batch, tokens = numbers
    assert (shared or [1]) == [plan.ranks_of_row]
    ranks = groups * plan.ranks_of_row
    assert size == groups * micro_batches * micro_batch == written.recipe.train.global_batch_size
    assert tokens == size * written.recipe.data.seq_len
    assert lines["ranks"].startswith(f"{ranks} × cuda") and written.recipe.fsdp.strategy in lines["ranks"]
    assert ("hub" in lines) == ((written.recipe.model.id or written.recipe.teacher.id) is not None)
    if plan.freezes:
        kind = f"LoRA of rank {plan.recipe.adapter.r} on all linear layers"
        assert lines["trains"].startswith(f"{kind}, in float32; the rest is frozen in ")
    assert ("trains" in lines) == ("-lora" in recipe.stem or "-qlora" in recipe.stem)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([STARTED, step(40)], "40 steps in 1:15 · {}\n20,000 label tokens"),
        (
            [STARTED, {"event": "resume", "step": 16}, step(17), step(40, total_tokens=12_000)],
            "24 steps in 1:15 (40 total) · {}\n12,000 label tokens",
        ),
        (
            [STARTED, step(7), STARTED, {"event": "resume", "step": 6}, step(40, total_tokens=17_000)],
            "40 steps in 1:15 (1 restart) · {}\n20,500 label tokens",
        ),
    ],
)
def test_the_summary_separates_this_command_from_the_whole_run(records: list[dict[str, Any]], message: str) -> None:
    message = message.format("1,024 tok/s while training · peak 1.00 GiB/rank")
    assert f"\n{message} · training loss 5.9941\n" in shown(*records, summary_s=75.0)[1]


def test_an_export_shows_how_far_it_is_from_the_trained_model() -> None:
    record = {"event": "export", "path": "out", "bytes": 1024, "dtype": "float32", "adapter": "both"}
    found = {"tokens": 200, "held_out": True, "spread": 2.345, "mean": 1.23e-7, "largest": 4.56e-6, "limit": 1e-3}
    rounded, meant = found | {"rounded_to": "bfloat16"}, found | {"rounded_to": None, "limit": None}
    exact = found | {"rounded_to": "float32"}
    _, text = shown(
        record | {"compared": [{"what": "merged", **exact}, {"what": "separate", **rounded, "mean": 2e-7}]},
        record | {"compared": [{"what": "merged", **meant}]},
        record | {"compared": [{"what": "model", **found, "mean": 0.0, "largest": 0.0}]},
        record | {"not_compared": "opening it took more than 30:00"},
    )
    opened = "  opened in a fresh process, logits compared with the trained model's on 200 held-out tokens: "
    far = "(1.2e-07 on average, 4.6e-06 at most, of a spread of 2.3)"
    rounding = "equal within the rounding of"
    assert f"{opened}merged: {rounding} float32 {far}; adapter on its base: {rounding} bfloat16" in text
    reason = "the adapter was trained on quantised weights and merged into the original ones"
    assert f"merged: different, because {reason} {far}\n" in text
    assert f"{opened}identical\n" in text and "0.0e+00" not in text
    assert "  not compared with the trained model: opening it took more than 30:00\n" in text


def terminal(width: int = 60) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)


def printed(console: Console) -> list[str]:
    """Return the lines that a terminal has got, without those that the live line has drawn over itself."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    return [line.rsplit("\r", 1)[-1].rstrip() for line in text.splitlines()]


def evaluated(number: int, loss: float) -> dict[str, Any]:
    return {"event": "eval", "step": number, "loss": loss, "perplexity": 2.0, "tokens": 100}


@pytest.mark.parametrize("total", [700, 12])
def test_a_terminal_keeps_a_history_of_some_twenty_lines(total: int) -> None:
    console = terminal()
    with Screen(console) as screen:
        screen.show(STARTED | {"total_steps": total})
        screen.show(evaluated(0, 6.5))
        for number in range(1, total + 1):
            screen.show(step(number, loss=number % 2 + 1.0, epoch=number / 350))
            if number % 2 == 0:
                screen.show(evaluated(number, 3 - number / total))
    lines = [line for line in printed(console) if re.match(r"step +\d+/\d+  epoch", line) and "tok/s" not in line]
    assert len(lines) == min(total, 20) and all(len(line) <= 60 for line in lines)
    if total == 700:  # the mean of 10 losses that alternate between 1 and 2, and what was measured before
        assert lines[0] == "step  35/700  epoch 0.10  loss 1.5000  held-out 2.9514"
        assert lines[-1] == "step 700/700  epoch 2.00  loss 1.5000  held-out 2.0029"
    evals = [line for line in printed(console) if line.startswith("eval at step ")]
    assert evals[0].startswith("eval at step 0: loss 6.5") and evals[-1].startswith(f"eval at step {total}: ")
    assert len(evals) <= 21


def test_a_resumed_run_goes_on_with_its_history() -> None:
    console = terminal()
    with Screen(console) as screen:
        screen.show(STARTED | {"total_steps": 40})
        screen.show({"event": "resume", "step": 16})
        for number in range(17, 20):
            screen.show(step(number, loss=float(number)))
    lines = [line for line in printed(console) if line.startswith("step 1") and "tok/s" not in line]
    assert lines == ["step 18/40  loss 17.5000"]  # an earlier version recorded no epoch


def test_the_notes_of_a_start_and_of_a_resume_are_shown() -> None:
    _, text = shown(STARTED | {"notes": ["too long"]}, {"event": "resume", "step": 3, "notes": ["the rate jumps"]})
    assert "\n  too long\n" in text and "\n  the rate jumps\n" in text


def test_a_slow_rank_is_shown_unless_it_is_on_the_cpu_of_one_host() -> None:
    straggler = {"event": "straggler", "step": 20, "rank": 1, "cause": "compute", "cost": 0.2}
    for changes, is_shown in (({}, False), ({"hosts": ["a", "b"]}, True), ({"device": "H100"}, True)):
        assert ("is slow" in shown(STARTED | changes, straggler)[1]) == is_shown


def test_the_screen_handles_only_events_of_the_table() -> None:
    handled = {name.removeprefix("_on_") for name in vars(Screen) if name.startswith("_on_")}
    assert handled and handled <= EVENTS.keys()


class TerminalBytes(io.BytesIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_obeys_only_our_own_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All characters that a terminal obeys or that turn a text around are visible, however a text is printed."""
    turning = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    characters = [chr(code) for code in range(0x110000)]
    obeyed = [c for c in characters if unicodedata.category(c) == "Cc" or unicodedata.bidirectional(c) in turning]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", VisibleText(shown := TerminalBytes(), "utf-8"))
    text = "".join({*obeyed} - {"\n", "\t"}) + "\x1b[31mred[/red][link=x]"
    page, record = Page(), {"event": "skip", "step": 1, "what": text}
    with Screen() as screen:
        for show in (screen.say, page.say, screen.show_waiting):
            show(text)
        page.draw(Text(text))
        screen.show(record)
        page.table([text, "loss"], [[text, text]])
        page.table(["step"], [["1"]])
        page.command([text])
        print(text)
    print(text, end="")
    ours = re.compile(r"\x1b\[(\?25[lh]|[0-9;]*[mAK])|\r")
    assert {*ours.sub("", shown.getvalue().decode())}.isdisjoint({*obeyed} - {"\n"})
    assert shown.getvalue().decode().count(r"\x1b[31mred[/red][link=x]") >= 8 and b"\x1b[1m" in shown.getvalue()
    for harmless in ("naïve 東京\u3000\t🙂\u200d🔥\n", "שלום عليكم", "a\xa0b"):
        assert printable(harmless) == harmless
