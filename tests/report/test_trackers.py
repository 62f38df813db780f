"""What trackers get of a run: every step once over resumes, and a run that none of them delays or ends."""

from __future__ import annotations

import contextlib
import errno
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support import python_path, sample
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fsdptrain.config.reader import parse
from fsdptrain.errors import NonFiniteError, RecipeError, Stopped
from fsdptrain.report import trackers
from fsdptrain.report.trackers import Tracker, Trackers, TrackerState, tracked
from fsdptrain.run_folder.events import Reporter, read_history
from fsdptrain.run_folder.rundir import RunDir

# The calls of a library that `libraries` makes. What they do is in FAKE_NAME: hang (in C, with the interpreter's lock),
# raise, die or exit, at the import, at init, or at the first log; and `log` is in the file NAME.calls in FAKES.
FAKE = """
import ctypes, json, os, sys, time
from pathlib import Path
NAME = __name__
def call(what, **fields):
    with (Path(os.environ["FAKES"]) / f"{NAME}.calls").open("a") as calls:
        calls.write(json.dumps({"call": what, **fields}) + "\\n")
    fault, _, where = os.environ.get(f"FAKE_{NAME}", "").partition("@")
    if where != what:
        return
    if fault == "hang":
        ctypes.PyDLL(None).pause()
    elif fault == "die":
        os.kill(os.getpid(), 9)
    elif fault == "exit":
        sys.exit("no way")
    elif fault == "raise":
        raise ConnectionError("http://me:hunter22@host refused " + os.environ.get("WANDB_API_KEY", ""))
call("import")
TRACKIO_DIR = os.environ["FAKES"]
def Html(text): return text.partition(">")[2].removesuffix("</pre>")
class Settings:
    def __init__(self, **settings): pass
class Config:
    def __init__(self, what): self.what = what
    def update(self, values, **words): call(self.what, values=values)
class Run:
    def __init__(self):
        self.config, self.summary = Config("config"), Config("summary")
        self.offline, self.url, self.dir = "WANDB_MODE" in os.environ, "https://wandb/run", f"{TRACKIO_DIR}/files"
    def define_metric(self, *words, **more): pass
    def log(self, values, step=None): call("log", values=values, step=step)
    def finish(self, exit_code=0): call("finish", exit_code=exit_code)
def init(*words, **more):
    more.pop("settings", None)
    call("init", words=words, **more)
    global log, finish
    run = Run()
    log, finish = run.log, run.finish
    return run
def alert(title, text): call("alert", title=title)
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put fake libraries on the paths of this process and its children; return the folder of what they were called."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in ("wandb", "trackio"):
        (folder / f"{name}.py").write_text(FAKE)
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", python_path(folder))
    monkeypatch.setenv("FAKES", str(folder))
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def calls(fakes: Path, name: str, what: str) -> list[dict[str, Any]]:
    """Return what a fake library was called with."""
    lines = [json.loads(line) for line in (fakes / f"{name}.calls").read_text().splitlines()]
    return [line for line in lines if line["call"] == what]


def run_folder(tmp_path: Path) -> RunDir:
    """Return a run folder with a plan."""
    rundir = RunDir(tmp_path / "run")
    rundir.root.mkdir(exist_ok=True)
    rundir.plan.write_text(json.dumps({"recipe": {"optim": {"lr": 1e-3}}, "version": "1"}))
    return rundir


def attempt(rundir: RunDir, resumed: int, last: int, changed: dict[str, Any] | None = None) -> None:
    """Write the steps and evaluations of an attempt, whose loss tells the attempt."""
    with contextlib.closing(Reporter(rundir)) as reporter:
        reporter.resume(resumed, changed or {})
        for step in range(resumed + 1, last + 1):
            for kind in ("step", "eval"):
                reporter.event(kind, **sample(kind, step=step, loss=float(10 * last + step)))


def follow(rundir: RunDir, library: str, state: str = "finished") -> TrackerState:
    """Hand over what a tracker has not got, in this process."""
    tracker = Tracker(rundir, library, "mine", None)
    tracker.hand_over()
    tracker.library.finish(state, "")
    return TrackerState.read(rundir, library)


def test_tensorboard_and_the_history_drop_what_a_resume_undid(tmp_path: Path) -> None:
    rundir = run_folder(tmp_path)
    for at, last in ((0, 9), (4, 7), (0, 3)):
        attempt(rundir, at, last)
        follow(rundir, "tensorboard")
        expected = [(s, 90.0 + s) for s in range(1, at + 1)] + [(s, 10.0 * last + s) for s in range(at + 1, last + 1)]
        board = EventAccumulator(str(rundir.tensorboard))
        board.Reload()
        for kind in ("step", "eval"):
            assert [(s.step, s.value) for s in board.Scalars(f"{kind}/loss")] == expected
            found = [(r["step"], r["loss"]) for r in read_history(str(rundir.metrics)) if r["event"] == kind]
            assert found == expected
    assert board.Tags()["tensors"] == ["config/recipe", "config/plan"]
    (text,) = [each.tensor_proto.string_val[0].decode() for each in board.Tensors("config/recipe")][-1:]
    assert '"lr": 0.001' in text


def test_an_attempt_that_ended_between_an_evaluation_and_its_first_step_event_is_undone(tmp_path: Path) -> None:
    rundir = run_folder(tmp_path)
    for loss in (1.0, 2.0):
        with contextlib.closing(Reporter(rundir)) as reporter:
            reporter.event("start", **sample("start"))
            reporter.resume(0, {})
            for step in (0, 25):  # eval.every: 25, log.every: 100
                reporter.event("eval", **sample("eval", step=step, loss=loss))
        follow(rundir, "tensorboard")
    assert [r["loss"] for r in read_history(rundir.metrics) if r["event"] == "eval"] == [2.0, 2.0]
    board = EventAccumulator(str(rundir.tensorboard))
    board.Reload()
    assert [s.value for s in board.Scalars("eval/loss")] == [2.0, 2.0]


def losses(fakes: Path, since: int = 0) -> list[tuple[int, float]]:
    """Return the step and the loss of each `step` event that the fake of W&B got, after the first `since`."""
    rows = [call["values"] for call in calls(fakes, "wandb", "log")]
    return [(row["step"], row["step/loss"]) for row in rows if "step/loss" in row][since:]


def test_a_resume_continues_the_same_run_with_every_step_once(tmp_path: Path, fakes: Path) -> None:
    rundir = run_folder(tmp_path)
    attempt(rundir, 0, 3)
    follow(rundir, "wandb", "stopped")
    attempt(rundir, 2, 5)  # step 3 again: its numbers are those of before
    follow(rundir, "wandb")
    assert losses(fakes) == [(1, 31.0), (2, 32.0), (3, 33.0), (4, 54.0), (5, 55.0)]
    attempt(rundir, 3, 6, {"optim.lr": [1, 2]})  # steps 4 and 5 are others
    follow(rundir, "wandb", "failed")
    assert losses(fakes, 5) == [(4, 64.0), (5, 65.0), (6, 66.0)]
    starts = calls(fakes, "wandb", "init")
    assert len(starts) == 3 and len({start["id"] for start in starts}) == 1
    assert {(start["resume"], start["name"], start["project"]) for start in starts} == {("allow", "mine", "fsdptrain")}
    assert [end["exit_code"] for end in calls(fakes, "wandb", "finish")] == [0, 0, 1]
    assert calls(fakes, "wandb", "config")[0]["values"] == {"recipe": {"optim": {"lr": 1e-3}}, "plan": {"version": "1"}}


def test_a_tracker_that_forgets_gets_all_again_without_what_was_undone(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    rundir = run_folder(tmp_path)
    attempt(rundir, 0, 3)
    follow(rundir, "wandb")
    attempt(rundir, 2, 4)
    progress = follow(rundir, "wandb")
    assert losses(fakes, 3) == [(1, 31.0), (2, 32.0), (3, 43.0), (4, 44.0)]
    assert progress.shown_by == ["wandb", "sync", str(fakes)]
    assert follow(rundir, "trackio").newest == {"step": 4, "eval": 4}  # one that is added later, too
    assert [c["step"] for c in calls(fakes, "trackio", "log") if "step/loss" in c["values"]] == [1, 2, 3, 4]


def test_numbers_in_objects_and_texts_of_prompts_are_passed_on(tmp_path: Path, fakes: Path) -> None:
    rundir = run_folder(tmp_path)
    with contextlib.closing(Reporter(rundir)) as reporter:
        fields = {"losses": {"web": 1.5, "code": 2.5}, "by_rank": [1, 2], "ok": True, "digest": "ab"}
        texts = {"prompts": ["Who?", "Why?"], "texts": ["Me.", "Because."]}
        reporter.event("eval", **sample("eval", step=1, **fields, **texts))
    follow(rundir, "wandb")
    (row,) = [call["values"] for call in calls(fakes, "wandb", "log")]
    assert {name: value for name, value in row.items() if "/" in name} == {
        "eval/loss": 1, "eval/tokens": 1, "eval/losses/web": 1.5, "eval/losses/code": 2.5, "eval/1": "Who?\n\nMe.",
        "eval/2": "Why?\n\nBecause.",
    }  # fmt: skip


NO_STATE = '{"id": "a", "shown_by": [], "offset": 5, "newest": {"step": "2"}}'


@pytest.mark.parametrize("text", ["", "[]", '{"id": 1}', '{"id": "a", "offset": -1}', NO_STATE, None])
def test_a_state_of_any_origin_is_read_or_left_out(text: str | None, tmp_path: Path) -> None:
    rundir = run_folder(tmp_path)
    rundir.trackers.mkdir()
    state = TrackerState("a", ["\x1b[2J"], 5, {})
    (rundir.trackers / "wandb.json").write_text(json.dumps(vars(state)) if text is None else text)
    assert TrackerState.read(rundir, "wandb") == TrackerState()
    state.shown_by = ["wandb", "sync"]
    state.write(rundir, "wandb")
    assert TrackerState.read(rundir, "wandb") == state


def test_tensorboard_reports_the_last_event_that_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = run_folder(tmp_path)
    board = Tracker(rundir, "tensorboard", "mine", None)
    attempt(rundir, 0, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", Mock(side_effect=full))
    monkeypatch.setattr(threading, "excepthook", Mock())  # TensorBoard's thread raises it, too
    with pytest.raises(OSError, match="No space left"):
        board.hand_over()


def plan_of(rundir: RunDir, *names: str) -> Any:
    """Return what `Trackers` reads of a plan."""
    log = SimpleNamespace(chosen_trackers=list(names), project=None)
    return SimpleNamespace(rundir=rundir, recipe=SimpleNamespace(log=log, name="mine"))


def wait_for(condition: Callable[[], bool], it: Trackers) -> None:
    """Poll trackers until a condition is true; no call may wait for a tracker."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        started = time.thread_time()
        it.poll()
        assert time.thread_time() - started < 0.2
        time.sleep(0.02)


@pytest.mark.parametrize("fault", ["raise@init", "exit@import", "raise@log"])
def test_a_tracker_that_fails_is_said_once_and_the_others_and_the_next_attempt_get_all(
    fault: str, tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "SAID_S", 60.0)  # a busy machine may need more than 3 s to import TensorBoard
    monkeypatch.setenv("FAKE_wandb", fault)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    rundir, said = run_folder(tmp_path), list[str]()
    attempt(rundir, 0, 2)
    plan = plan_of(rundir, "wandb", "tensorboard")
    with pytest.raises(Stopped), tracked(plan, said.append) as it:
        wait_for(lambda: bool(said) and TrackerState.read(rundir, "tensorboard").newest.get("eval") == 2, it)
        raise Stopped("stopped by SIGTERM")
    (line,) = said
    assert line.startswith("wandb: ") and ("no way" if "exit" in fault else "ConnectionError") in line
    assert "hunter22" not in line and "0123456789" not in line
    monkeypatch.delenv("FAKE_wandb")
    attempt(rundir, 2, 3)
    with tracked(plan, said.append) as it:
        it.poll()
    assert len(said) == 1 and losses(fakes)[-3:] == [(1, 21.0), (2, 22.0), (3, 33.0)]


@pytest.mark.parametrize(("fault", "words"), [("hang@log", "not ready within 2 s"), ("die@log", "killed by SIGKILL")])
def test_a_library_that_hangs_or_dies_does_not_delay_or_end_the_run(
    fault: str, words: str, tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "FLUSH_S", 2.0)
    monkeypatch.setenv("FAKE_wandb", fault)
    rundir, said = run_folder(tmp_path), list[str]()
    attempt(rundir, 0, 2)
    with pytest.raises(NonFiniteError), tracked(plan_of(rundir, "wandb"), said.append) as it:
        wait_for(lambda: (fakes / "wandb.calls").exists() and bool(calls(fakes, "wandb", "log")), it)
        started = time.monotonic()
        raise NonFiniteError("step 3")
    assert time.monotonic() - started < 8
    assert len(said) == 1 and words in said[0]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_libraries_themselves_get_all_where_they_are_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.setattr(trackers, "FLUSH_S", 120.0)
    monkeypatch.setattr(trackers, "SAID_S", 120.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    rundir, said = run_folder(tmp_path), list[str]()
    for resumed, last in ((0, 3), (2, 4)):
        attempt(rundir, resumed, last)
        with tracked(plan_of(rundir, name), said.append) as it:
            it.poll()
    state = TrackerState.read(rundir, name)
    assert said == []
    if name == "mlflow":
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        found = [(one.step, one.value) for one in client.get_metric_history(state.id, "step/loss")]
        assert client.get_run(state.id).data.params["recipe.optim.lr"] == "0.001"
    elif name == "trackio":
        database = sqlite3.connect(next((tmp_path / "trackio").rglob("*.db")))
        rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
        found = [(step, row["step/loss"]) for step, row in rows if "step/loss" in row]
    else:
        (newest,) = Path(state.shown_by[2]).glob("*.wandb")
        assert newest.read_bytes().count(b"step/loss") >= 4  # all steps again, without the one that was undone
        return
    assert found == [(1, 31.0), (2, 32.0), (3, 33.0), (4, 44.0)]


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("log", "overrides", "words"),
    [
        ("{trackers: [wandb], project: p}", [], ""),
        ("{tensorboard: true}", ["log.trackers=[wandb]"], ""),
        ("{trackers: [comet]}", [], "a list of tensorboard, wandb, mlflow, trackio"),
        ("{trackers: [wandb], tensorboard: false}", [], "is short for log.trackers"),
        ("{project: p}", [], "has no effect without wandb"),
        ("{wandb_entity: me}", [], "an environment variable of the library"),
    ],
)
def test_recipes_with_trackers_that_cannot_work_are_refused(
    log: str, overrides: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").touch()
    recipe = f"data: {{path: {tmp_path}/data.txt}}\nmodel: {{id: a/b}}\nlog: {log}\n"
    with pytest.raises(RecipeError, match=words) if words else contextlib.nullcontext():
        parse(recipe, "recipe.yaml", tmp_path, overrides)
