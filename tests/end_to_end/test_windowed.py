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
from support import SHAKESPEARE, events, fsdptrain, wait_for_step

from fsdptrain.config.reader import load
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.data.windows import windows_of
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology

FILES, WINDOW, STEPS = 6, 2, 32  # three windows, and the first one again
KINDS = ("data", "packed", "tokens")
ENCODES = "fsdptrain.data.token_store:PartEncoder._write"


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
    settings = {"train__steps": STEPS, "checkpoint__every": 50, "launch__timeout_s": 60,
                "train__global_batch_size": 12, "train__micro_batch_size": 3, **changes}  # fmt: skip
    return small_recipe(
        tmp, model__tokenizer=str(corpus / "bpe"), data__path=str(corpus / "files"), data__window=WINDOW, **settings
    )


def run(recipe: Path, *words: str) -> str:
    done = fsdptrain("run", recipe, *words, FSDPTRAIN_CACHE=str(recipe.parent / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("whole")
    run(recipe_of(corpus, tmp))
    return tmp


def prepared_rows(cache: Path) -> dict[str, int]:
    """Return how many rows each data set in the cache has."""
    return {path.parent.name: json.loads(path.read_text())["rows"] for path in (cache / "data").glob("*/notes.json")}


def rows_of_windows(recipe: Path) -> list[int]:
    written = load(recipe)
    windows = windows_of(make_plan(written, find_topology(written.recipe, {})))
    return [sum(len(Path(name).read_text().splitlines()) for name in window) for window in windows]


def test_ranks_enter_all_windows_and_leave_nothing_of_those_behind(whole: Path) -> None:
    entered = events(whole / "run", "window")
    order = [event["window"] for event in entered]
    assert order == [1, 2, 3, 1] and {event["of"] for event in entered} == {3}
    start = events(whole / "run", "start")[0]
    assert any("6 files in 3 windows of 2 (data.window); the first has" in note for note in start["notes"])
    assert "SHA-256 of what was trained on is that of their types" in (whole / "run/export/README.md").read_text()
    rows = rows_of_windows(whole / "recipe.yaml")
    left = sorted(prepared_rows(whole / "cache").values())
    current, following = order[-1] - 1, order[-1] % 3
    assert left in ([rows[current]], sorted([rows[current], rows[following]]))
    for kind in KINDS:
        folders = [path for path in (whole / "cache" / kind).iterdir() if path.is_dir()]
        assert len(folders) <= 2 + 2 * (kind == "tokens"), folders


def test_a_resume_in_the_second_window_is_bitwise_and_prepares_none_before(
    whole: Path, corpus: Path, tmp_path: Path
) -> None:
    entered = events(whole / "run", "window")
    stop = entered[1]["step"] + 2
    assert stop < entered[2]["step"]
    recipe = recipe_of(corpus, tmp_path)
    run(recipe, f"train.steps={stop}", "export.at_end=false")
    first = prepared_rows(tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "gone")
    rows = rows_of_windows(recipe)
    assert {*first.values()} <= {*rows[1:]}
    done = run_with(recipe, {"where": ENCODES, "do": "printenv", "how": {"name": "RANK"}}, **cache_of(tmp_path))
    assert done.code == 0, done.output
    assert differences(tmp_path / "run", whole / "run") == []
    [resumed] = events(tmp_path / "run", "resume")
    assert resumed["step"] == stop
    assert events(tmp_path / "run", "window")[2]["window"] == 2


def cache_of(tmp: Path) -> dict[str, str]:
    return {"FSDPTRAIN_CACHE": str(tmp / "cache")}


def file_of(recipe: Path, window: int) -> str:
    written = load(recipe)
    return next(iter(windows_of(make_plan(written, find_topology(written.recipe, {})))[window]))


def test_a_window_that_takes_longer_than_the_watchdog_waits_is_no_hang(
    whole: Path, corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path, launch__timeout_s=10)
    slow = {"where": ENCODES, "do": "sleep", "match": file_of(recipe, 1), "how": {"seconds": 30}}
    done = run_with(recipe, slow | {"mark": str(tmp_path / "mark")}, **cache_of(tmp_path))
    assert done.code == 0, done.output
    assert (tmp_path / "mark").exists()
    waited = {event["window"]: event["waited_s"] for event in events(tmp_path / "run", "window")[:2]}
    assert waited[2] > 5 > waited[1]
    assert re.search(r"waited 0:\d+ for window 2 of 3 of the data", done.output), done.output
    progress = (tmp_path / "run" / "logs" / "progress.jsonl").read_text()
    assert "waiting for the next window of data.window" in progress
    assert differences(tmp_path / "run", whole / "run") == []


def test_a_stop_while_the_ranks_wait_loses_no_step(whole: Path, corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, tmp_path)
    slow = {"where": ENCODES, "do": "sleep", "match": file_of(recipe, 1), "how": {"seconds": 600}}
    running = Running(recipe, slow, **cache_of(tmp_path))
    last = events(whole / "run", "window")[1]["step"] - 1  # of the first window
    wait_for_step(tmp_path / "run", last)
    time.sleep(1)  # now the ranks wait
    running.process.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.problems(75, "with a checkpoint") == []
    assert [events(tmp_path / "run", kind)[-1]["step"] for kind in ("step", "save")] == [last, last]
    run(recipe)
    assert differences(tmp_path / "run", whole / "run") == []


def test_a_wrong_row_in_a_later_window_ends_the_run_behind_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, tmp_path)
    wrong = Path(file_of(recipe, 1))
    before = wrong.read_text()
    wrong.write_text(before + '{"text": 3}\n')
    done = fsdptrain("run", recipe, **cache_of(tmp_path))
    wrong.write_text(before)
    assert done.returncode == 4 and wrong.name in done.stderr, done.stdout + done.stderr
    trained = events(tmp_path / "run", "step")[-1]["step"]
    assert events(tmp_path / "run", "save")[-1]["step"] == trained > 0
    done = fsdptrain("run", recipe, **cache_of(tmp_path))  # the list of files has the sizes that it had at the start
    assert done.returncode == 2 and "the data differs from that of the run to resume" in done.stderr, done.stderr
