"""What a dry run shows: the verdict first, lines that fit the terminal, whole lines in a pipe, overrides to paste."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudo_terminal import Terminal
from rich.console import Console
from support import fsdptrain, write_recipe

from fsdptrain.config.reader import load
from fsdptrain.data import hub
from fsdptrain.errors import DoesNotFit, RecipeError
from fsdptrain.forecast.render import verdict
from fsdptrain.plan.plan import Plan, draft_plan, varied
from fsdptrain.plan.topology import Topology
from fsdptrain.terminal.page import Page
from fsdptrain.validation.findings import Findings, show_outcome
from fsdptrain.validation.request import Request, make_request

WIDTHS = [60, 80, 120]
GIB = 2**30


def page_of(width: int | None) -> Page:
    """Return a page on a terminal of this width; in a pipe if it is None."""
    return Page(Console(file=io.StringIO(), force_terminal=width is not None, width=width, color_system=None))


def printed(page: Page) -> list[str]:
    return page.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def gpu_plan(tmp_path: Path, world: int = 8) -> Plan:
    return draft_plan(load(write_recipe(tmp_path)), Topology("cuda", 1, world), elsewhere=True)[0]


# --- lines -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1), min_size=1, max_size=30))
@settings(max_examples=100)
def test_lines_break_between_words_and_only_there(words: list[str]) -> None:
    for width in (*WIDTHS, None):
        page = page_of(width)
        page.say(" ".join(words), 2)
        lines = printed(page)
        assert " ".join(line.strip() for line in lines) == " ".join(words)
        assert all(line.startswith("  " if line is lines[0] else "    ") for line in lines)
        if width is None:
            assert len(lines) == 1
        else:
            assert all(len(line) <= width or len(line.split()) <= 2 for line in lines)


def test_a_number_and_its_unit_stay_together() -> None:
    page = page_of(16)
    page.say("it takes 10.5 GiB, or 3 s")
    assert printed(page) == ["it takes", "  10.5 GiB, or", "  3 s"]


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_overrides_can_be_pasted_into_a_shell_however_they_are_broken(width: int | None) -> None:
    words = ["fsdp.strategy=HYBRID_SHARD", "fsdp.activation_checkpointing={every: 2}", "a.b='$x'", "c=" + "y" * 130]
    words += [f"train.micro_batch_size={number}" for number in range(9)]
    page = page_of(width)
    page.command(words, 4)
    pasted = page.console.file.getvalue()  # type: ignore[attr-defined]
    parsed = subprocess.run(["sh", "-c", f"printf '%s\\0' {pasted}"], capture_output=True, text=True, check=True).stdout
    assert parsed.split("\0")[:-1] == words
    lines = pasted.splitlines()
    assert len(lines) == 1 if width is None else all(len(line) <= width or "yyy" in line for line in lines)


HEADER = ["unit", "class", "×", "parameters", "a rank's shard", "gathered", "after use"]
ROWS = [
    ["embedding", "Embedding", "1", "525,336,576", "250.5 MiB", "1002.0 MiB", "freed"],
    ["model.layers.0-31", "LlamaDecoderLayer", "32", "218,112,000", "104.0 MiB", "416.0 MiB", "freed"],
]


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_a_table_that_is_too_wide_becomes_paragraphs(width: int | None) -> None:
    page = page_of(width)
    page.table(HEADER, ROWS, 2)
    lines = printed(page)
    everything = "\n".join(lines)
    assert all(cell in everything for row in ROWS for cell in row), "nothing is cut"
    if width is None or width == 120:
        assert [line.split()[0] for line in lines] == ["unit", "embedding", "model.layers.0-31"]
        assert len({line.index(word) for line, word in zip(lines, ["unit", "embedding", "model"], strict=True)}) == 1
    else:
        assert all(len(line) <= width for line in lines)
        assert "parameters 218,112,000" in everything and "gathered 1002.0 MiB" in everything


# --- the verdict -----------------------------------------------------------------------------------------------------

STEP = {
    "fits": True, "tight": False, "hardware": "h100-80gb", "needed_bytes": int(52.4 * GIB),
    "memory_bytes": int(79.1 * GIB), "step_s": 4.05, "run_s": 30555.0, "gpu_hours": 67.9, "dollars": 169.75,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "fits 8×H100-80GB: 52.4 of 79.1 GiB a GPU; 4.05 s a step; 67.9 GPU-hours; $169.75"),
        ({"tight": True, "dollars": None}, "fits 8×H100-80GB, but only just: 52.4 of 79.1 GiB a GPU; 4.05 s a step; "
         "67.9 GPU-hours"),
        ({"fits": False, "needed_bytes": 90 * GIB}, "does not fit 8×H100-80GB: 90.0 of 79.1 GiB a GPU"),
        ({"needed_bytes": GIB // 2, "step_s": None, "run_s": None, "dollars": None},
         "fits 8×H100-80GB: 512.0 MiB of 79.1 GiB a GPU"),
    ],
)  # fmt: skip
def test_the_verdict_is_one_line(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    step = {name: value for name, value in (STEP | changes).items() if value is not None}
    assert verdict(step, gpu_plan(tmp_path)) == expected


def test_the_verdict_of_a_plan_with_offload_has_the_memory_of_the_host(tmp_path: Path) -> None:
    plan = varied(gpu_plan(tmp_path), {"fsdp.cpu_offload": True})
    line = verdict(STEP | {"host_bytes": 131 * GIB}, plan)
    assert line.startswith("fits 8×H100-80GB: 52.4 of 79.1 GiB a GPU and 131.0 GiB of host memory; ")


def test_the_first_line_says_how_many_problems_there_are() -> None:
    found = Findings()
    assert found.verdict == "no problems found; memory and time were not forecast"
    found.forecast = "does not fit 8×H100-80GB: 90.0 of 79.1 GiB a GPU"
    found.add_problem(DoesNotFit(f"{found.forecast}; …"))
    assert found.verdict == found.forecast
    found.add_problem(RecipeError("a"))
    assert found.verdict.startswith("2 problems (listed at the end); memory forecast: does not fit")
    page = page_of(60)
    show_outcome(found.outcome(), page)
    assert printed(page)[0].startswith("2 problems (listed at the end)")


def test_a_request_survives_its_json(tmp_path: Path) -> None:
    asked = make_request(load(write_recipe(tmp_path, train__global_batch_size=64)), "8xA100", trust_remote_code=False)
    assert asked.notes == ["--hardware 8xA100: taken as a100-80gb, not a100-40gb"] and asked.hardware
    for price, plot, problems in ((None, None, []), (2.5, "step.svg", ["recipe.yaml:3: x", "y"])):
        changed = dataclasses.replace(asked, price=price, plot=plot, problems=problems, advise=True, build=False)
        assert Request.from_record(json.loads(json.dumps(changed.to_record()))) == changed
    here = dataclasses.replace(asked, hardware=None)
    assert Request.from_record(json.loads(json.dumps(here.to_record()))) == here


# --- the command -----------------------------------------------------------------------------------------------------

ELSEWHERE = ("--hardware", "8xh100", "--price-per-gpu-hour", "2.5", "train.steps=100000")
HEADINGS = [
    "Plan",
    "Data",
    "Model",
    "Disk",
    "Host memory of a node",
    "Peak memory (highest rank)",
    "Communication per step",
    "Time",
]


def test_on_a_terminal_lines_fit_and_progress_is_shown(tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    words = ("validate", write_recipe(tmp_path), *ELSEWHERE, f"--plot={picture}", "--advise")
    with Terminal(*words, columns=60, rows=40) as terminal:
        terminal.wait_for("simulating a step")
        assert "fits" not in terminal.text()
        assert terminal.wait() == 0, terminal.text()
        lines = terminal.lines()
        assert "comparing plans" in terminal.raw.decode()
    shown = [line for line in lines if line.strip()]
    assert shown[0].startswith("fits 8×H100-80GB: ") and "$" in " ".join(shown[:3])
    assert [line for line in shown if line in HEADINGS] == HEADINGS
    verdict = "".join(shown[: shown.index("Plan")])
    assert "".join(shown).endswith(verdict), "it comes again last, in sight"
    assert f"plotted over the step in {picture}".replace(" ", "") in "".join(lines).replace(" ", "")
    # The terminal breaks a line that is too long, without the indent of a wrapped line.
    start, headings = shown.index("Model"), [*HEADINGS, "Other plans for the same job", "Notes"]
    body = shown[start : -shown.index("Plan")]
    broken = [line for line in body if line not in headings and not line.startswith("  ")]
    assert [line for line in broken if not str(picture).endswith(line)] == []


def test_in_a_pipe_lines_are_whole_and_progress_is_silent(tmp_path: Path) -> None:
    done = fsdptrain("validate", write_recipe(tmp_path), *ELSEWHERE, FORCE_COLOR="1", COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fits 8×H100-80GB: ") and "\x1b" not in done.stdout
    assert [line for line in lines if line in HEADINGS] == HEADINGS
    assert max(map(len, lines)) > 120
    assert sum("not checked here" in line for line in lines) == 1 and "--verbose" in lines[-1]
    assert sum(line == lines[0] for line in lines) == 1


def test_a_plan_without_gpus_has_no_price(tmp_path: Path) -> None:
    done = fsdptrain("validate", write_recipe(tmp_path), "--price-per-gpu-hour", "2", "--json")
    assert done.returncode == 2 and "no GPUs" in json.loads(done.stdout)["problems"][0]


# --- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [False, True])
def test_the_hub_is_asked_once_after_it_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    stages: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    written = load(write_recipe(tmp_path, model={"id": "org/model", "tokenizer": "org/other"}))
    plan = draft_plan(written, Topology("cpu", 1, 2), elsewhere=True)[0]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # so that monkeypatch restores it
    hub.go_offline_if_unreachable(plan, progress)
    assert stages == [], "with HF_HUB_OFFLINE nothing is asked"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 60 if answers else 0.2)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        if answers:
            threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 200 OK\r\n\r\n"), daemon=True).start()
        hub.go_offline_if_unreachable(plan, progress)
    assert "org/model and org/other" in stages[0]
    assert answers == (not constants.HF_HUB_OFFLINE) == (len(stages) == 1)
    assert answers == ("HF_HUB_OFFLINE" not in os.environ), "the forecast processes do not ask again"


def test_a_dry_run_says_that_the_hub_is_asked(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model={"id": "org/model", "init": "random"})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Terminal("validate", recipe, HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint, NO_PROXY="127.0.0.1") as terminal:
            terminal.wait_for("asking the Hub for org/model")
            assert terminal.wait() == 2
            text = " ".join(terminal.text().split())
    assert text.startswith("1 problem (listed at the end)") and "the Hub cannot be reached" in text
