"""Runs that read their files in windows: equal on one and two ranks, after a stop, and beside a slow preparation."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from injection import Running, differences, run_with, small_recipe
from support import SHAKESPEARE, events, planned, wait_for_step

from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.data.windows import windows_of

FILES, WINDOW, STEPS = 6, 2, 32  # three windows, and the first one again
KINDS = ("data", "packed", "tokens")
ENCODES = "fsdptrain.data.prepare:PartEncoder._write"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("corpus")
    text = SHAKESPEARE.read_text()
    train_bpe(iter([text[:20000]]), 300).save_pretrained(tmp / "bpe")
    (tmp / "files").mkdir()
    rows = iter(text.split("\n\n"))
    for file in range(FILES):
        lines = [json.dumps({"text": next(rows)}) for _ in range(10 + 3 * file)]
        (tmp / "files" / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp


def recipe_of(corpus: Path, tmp: Path, **changes: Any) -> Path:
    return small_recipe(
        tmp, model__tokenizer=str(corpus / "bpe"), data__path=str(corpus / "files"), data__window=WINDOW,
        train__steps=STEPS, train__global_batch_size=12, train__micro_batch_size=3, checkpoint__every=50, **changes,
    )  # fmt: skip


def cache_of(recipe: Path) -> dict[str, str]:
    return {"FSDPTRAIN_CACHE": str(recipe.parent / "cache")}


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipe_of(corpus, tmp_path_factory.mktemp("whole"))
    assert run_with(recipe, **cache_of(recipe)).problems(0) == []
    return recipe.parent


def files_of_windows(recipe: Path) -> list[list[Path]]:
    return [[*map(Path, window)] for window in windows_of(planned(recipe))]


def test_ranks_enter_all_windows_and_leave_nothing_of_those_behind(whole: Path) -> None:
    entered = events(whole / "run", "window")
    order = [event["window"] for event in entered]
    assert order == [1, 2, 3, 1] and {event["of"] for event in entered} == {3}
    start = events(whole / "run", "start")[0]
    assert any("6 files in 3 windows of 2 (data.window); the first has" in note for note in start["notes"])
    assert "SHA-256 of what was trained on is that of their types" in (whole / "run/export/README.md").read_text()
    windows = files_of_windows(whole / "recipe.yaml")
    rows = [sum(len(file.read_text().splitlines()) for file in window) for window in windows]
    left = sorted(json.loads(path.read_text())["rows"] for path in (whole / "cache").glob("data/*/notes.json"))
    current, following = order[-1] - 1, order[-1] % 3
    assert left in ([rows[current]], sorted([rows[current], rows[following]]))
    for kind in KINDS:
        folders = [path for path in (whole / "cache" / kind).iterdir() if path.is_dir()]
        assert len(folders) <= 2 + 2 * (kind == "tokens"), folders


def test_a_window_that_takes_longer_than_the_watchdog_waits_is_no_hang(
    whole: Path, corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path, launch__timeout_s=6)
    match = str(files_of_windows(recipe)[1][0])
    slow = {"where": ENCODES, "do": "sleep", "match": match, "how": {"seconds": 20}, "mark": str(tmp_path / "mark")}
    done = run_with(recipe, slow, **cache_of(recipe))
    assert done.problems(0, r"waited 0:\d+ for window 2 of 3 of the data") == []
    assert (tmp_path / "mark").exists()
    waited = {event["window"]: event["waited_s"] for event in events(tmp_path / "run", "window")[:2]}
    assert waited[2] > 5 > waited[1]
    progress = (tmp_path / "run" / "logs" / "progress.jsonl").read_text()
    assert "waiting for the next window of data.window" in progress
    assert differences(tmp_path / "run", whole / "run") == []


def test_a_stop_while_the_ranks_wait_loses_no_step(whole: Path, corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, tmp_path)
    match = str(files_of_windows(recipe)[1][0])
    slow = {"where": ENCODES, "do": "sleep", "match": match, "how": {"seconds": 600}}
    running = Running(recipe, slow, **cache_of(recipe))
    last = events(whole / "run", "window")[1]["step"] - 1  # of the first window
    wait_for_step(tmp_path / "run", last)
    time.sleep(1)  # now the ranks wait
    running.process.send_signal(signal.SIGTERM)
    assert running.wait().problems(75, "with a checkpoint") == []
    assert [events(tmp_path / "run", kind)[-1]["step"] for kind in ("step", "save")] == [last, last]
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert run_with(recipe, **cache_of(recipe)).problems(0) == []
    assert differences(tmp_path / "run", whole / "run") == []
    assert [event["window"] for event in events(tmp_path / "run", "window")] == [1, 2, 3, 1]


def test_a_wrong_row_in_a_later_window_ends_the_run_behind_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, tmp_path)
    wrong = files_of_windows(recipe)[1][0]
    before = wrong.read_text()
    wrong.write_text(before + '{"text": 3}\n')
    done = run_with(recipe, **cache_of(recipe))
    wrong.write_text(before)
    assert done.problems(4, re.escape(wrong.name)) == []
    trained = events(tmp_path / "run", "step")[-1]["step"]
    assert events(tmp_path / "run", "save")[-1]["step"] == trained > 0
