"""What is read from a run folder: records of any origin, and the state that they fold to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plan_here, run_folder, sample, write_recipe
from typer.testing import CliRunner

from fsdptrain.cli import app
from fsdptrain.config.reader import load
from fsdptrain.errors import FsdptrainError, RecipeError, Unreadable
from fsdptrain.launch.run_lock import claim_run_dir
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology, find_topology
from fsdptrain.report.run_banner import heading
from fsdptrain.report.status import Observer, status_lines
from fsdptrain.run_folder.events import Reporter, cut_partial_lines, read_history
from fsdptrain.run_folder.ownership import read_export_record
from fsdptrain.run_folder.records import (
    EVENTS,
    MAX_BYTES,
    Record,
    RunState,
    Tail,
    by_loss,
    ends_early,
    evaluations_since_best,
    record_fault,
    without_undone,
)
from fsdptrain.run_folder.rundir import RunDir

# --- histories -------------------------------------------------------------------------------------------------------


def record(kind: str, **fields: Any) -> Record:
    return {"event": kind, "at": 1.0, **sample(kind, **fields)}


class Replay:
    """A naive reader: it keeps the events that each attempt has made, and forgets what a resume discards."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.made: list[tuple[str, int, int]] = []  # kind, step, attempt
        self.step = self.resumed = self.attempts = 0

    def attempt(self, resumes_at: int, steps: int, is_silent: bool, save_every: int, is_late: bool) -> None:
        """Resume, and train some steps; `is_silent`: without a resume event; `is_late`: saves end a step later."""
        self.attempts += 1
        self.records.append(record("start", total_steps=self.attempts))
        at = 0 if is_silent else min(resumes_at, self.step)
        if not is_silent:
            self.records.append(record("resume", step=at))
            self.made = [event for event in self.made if event[1] <= at and at]
            self.step = self.resumed = at
            if not at:
                self.add("eval", 0)
        for step in range(at + 1, at + steps + 1):
            if step == at + 1:  # what was made of this step and of later ones is made again
                self.made = [event for event in self.made if event[1] < step]
                self.resumed = min(self.resumed, at)
            self.add("step", step)
            self.add("eval", step)
            saved = step - is_late
            if saved > at and saved % save_every == 0:
                self.add("save", saved)
            self.step = step

    def add(self, kind: str, step: int) -> None:
        self.records.append(record(kind, step=step, tokens=self.attempts, loss=float(self.attempts)))
        self.made.append((kind, step, self.attempts))

    def steps(self, kind: str) -> list[int]:
        return [step for name, step, _ in self.made if name == kind]


attempts = st.tuples(st.integers(0, 12), st.integers(0, 9), st.booleans(), st.integers(1, 4), st.booleans())


@given(st.lists(attempts, max_size=7), st.data())
def test_the_state_of_a_run_is_what_its_attempts_have_left(
    history: list[tuple[int, int, bool, int, bool]], data: st.DataObject
) -> None:
    replay, state = Replay(), RunState()
    for each in history:
        replay.attempt(*each)
    cut = data.draw(st.integers(0, len(replay.records)))
    for part in (replay.records[:cut], replay.records[cut:]):  # as a reader that looks now and then
        for one in part:
            state.add(one)
    read = [{**vars(each), "newest": [*each.newest.values()]} for each in (state, RunState.of(replay.records))]
    assert read[0] == read[1]
    # Every event once, as it was made last.
    kept = without_undone(replay.records)
    for kind in ("step", "eval", "save"):
        found = [(one["event"], one["step"], one["tokens"]) for one in kept if one["event"] == kind]
        assert found == [event for event in replay.made if event[0] == kind]
        assert kind == "step" or state.newest.get(kind, {}).get("step") == max(replay.steps(kind), default=None)
    starts = [[one for one in each if one["event"] == "start"] for each in (kept, replay.records)]
    assert starts[0] == starts[1]
    # What resume, launcher and status ask for.
    assert (state.steps_made, state.attempts) == (replay.step, replay.attempts)
    assert state.saved_step == max([*replay.steps("save"), replay.resumed])
    by = [attempt for kind, _, attempt in replay.made if kind == "step"]
    assert (state.trained_by or {}).get("total_steps") == (by[-1] if by else None)
    assert all(state.has("eval", step) == (step in replay.steps("eval")) for step in range(25))
    assert state.losses() == {step: by for kind, step, by in replay.made if kind == "eval" and step}


def test_a_window_is_kept_when_its_first_step_follows() -> None:
    records = [record("window", step=2), record("step", step=2), record("window", step=5), record("step", step=5)]
    assert [one["step"] for one in without_undone(records)] == [2, 2, 5, 5]
    undone = [*records, record("resume", step=4), record("window", step=5), record("step", step=5)]
    assert [one["step"] for one in without_undone(undone) if one["event"] == "window"] == [2, 5]


def test_numbers_that_json_lacks_are_read_as_they_were_written(tmp_path: Path) -> None:
    with contextlib.closing(Reporter(RunDir(tmp_path))) as reporter:
        reporter.event("step", **sample("step", loss=nan, grad_norm=inf, lr=-0.0))
    (found,) = read_history(tmp_path / "metrics.jsonl")
    assert (str(found["loss"]), found["grad_norm"], found["lr"]) == ("nan", inf, 0.0)


def test_losses_of_other_held_out_data_are_not_compared() -> None:
    state = RunState.of(record("eval", step=step, loss=float(step)) for step in range(5))
    assert state.losses() == {1: 1, 2: 2, 3: 3, 4: 4} and state.losses(until=2) == {1: 1, 2: 2}
    state.add(record("resume", step=3, changed={"data.eval.content": ["a", "b"]}))
    state.add(record("eval", step=4, loss=9.0))
    assert state.losses() == {4: 9}
    state.add(record("resume", step=2))  # with the same data as before: those of other data do not come back
    state.add(record("eval", step=3, loss=nan))
    assert [*state.losses()] == [3] and by_loss(state.losses()) == []


def test_the_losses_of_a_source_are_those_under_its_name_and_the_best_is_the_first_of_the_lowest() -> None:
    names = ["old", "web", "web"]
    state = RunState.of(
        record("eval", step=step, loss=1.0, losses={name: nan if step == 3 else 9.0 - step, "code": 2.0})
        for step, name in enumerate(names, 1)
    )
    assert state.losses("code") == {1: 2, 2: 2, 3: 2} and [*state.losses("web")] == [2, 3]
    losses = {2: nan, 4: 3.0, 6: inf, 8: 1.0, 10: 1.0, 12: -inf}
    assert by_loss(losses) == [8, 10, 4] and by_loss(losses, {4, 6, 10}) == [10, 4]
    assert evaluations_since_best(losses) == 2 and evaluations_since_best({2: nan, 4: nan}) == 2
    ends = [ends_early(losses, step, patience) for step, patience in ((12, 2), (12, 3), (13, 2), (12, None))]
    assert ends == [True, False, False, False], "only after an evaluation, and only if the recipe asks for it"


# --- files of any origin ---------------------------------------------------------------------------------------------

BRACKETS = b"[" * 200_000
LINES = {  # a line that is no record → what is said of it
    b"{}": "event is missing",
    b'{"event": []}': "event is not a string",
    b'{"event": "step"}': "step.at is missing",
    b'{"event": "step", "at": 1}': "step.step is missing",
    json.dumps(record("step", step="7")).encode(): "step.step is not a whole number from 0",
    json.dumps(record("step", step=True)).encode(): "step.step is not a whole number from 0",
    json.dumps(record("step", step_s=-1)).encode(): "step.step_s is not a number of seconds",
    json.dumps(record("save", step=10**30)).encode(): "save.step is not a whole number from 0",
    json.dumps(record("resume", changed={"lr": 1})).encode(): "resume.changed is not an object of [old, new]",
    b'{"event": "later", "at": "now"}': "event.at is not a number of seconds",
    b'{"event": "step", "at": NaN}': "not JSON: NaN is not a number of JSON",
    b'{"event": "\xff"}': "not JSON: 'utf-8' codec can't decode byte 0xff in position 11",
    b"\0" * 100: "not JSON",
    BRACKETS: "not JSON: maximum recursion depth exceeded",
    b'{"a": ' * 20 + b"1" + b"}" * 20: "nested too deeply",
    b"[]": "not a JSON object",
    b"": "not JSON",
    b'{"event": "' + b"x" * MAX_BYTES + b'"}': f"longer than {MAX_BYTES:,} bytes",
}


@pytest.mark.parametrize(("line", "fault"), LINES.items(), ids=lambda value: str(value[:20]))
def test_a_line_that_holds_no_record_is_named_and_skipped(line: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps(record("save", step=step)).encode() for step in (1, 2)]
    path.write_bytes(b"\n".join([good[0], line, good[1], b'{"partial":']))
    tail = Tail(path, from_end=False)
    assert [found["step"] for found in tail.read()] == [1, 2] and [*tail.read()] == []
    assert len(tail.faults) == 1 and tail.faults[0].startswith(f"metrics.jsonl line 2: {fault}")
    assert Tail(path).offset == path.stat().st_size - len(b'{"partial":')
    rundir = RunDir(tmp_path)
    cut_partial_lines(rundir)
    assert path.read_bytes().endswith(good[1] + b"\n")


def test_of_many_lines_the_first_are_named_and_an_event_of_a_later_version_is_read(tmp_path: Path) -> None:
    later = {"event": "later", "at": 1.0, "anything": [1]}
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{}\n" * 5000 + json.dumps(later).encode() + b"\n")
    tail = Tail(path, from_end=False)
    assert [*tail.read()] == [later] and len(tail.faults) == 4
    assert tail.faults[3] == "metrics.jsonl: 4,997 more lines skipped"
    assert vars(RunState.of([later])) == vars(RunState()), "it does not change the state"


def test_every_event_of_the_table_has_a_sentence_and_samples_that_fit() -> None:
    for kind, event in EVENTS.items():
        assert event.says and record_fault(record(kind)) is None
        assert not event.fields.keys() & event.optional.keys()
        assert not event.undone or "step" in event.fields


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block does not end in time: a reader that waits for a pipe does not."""

    def expire(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


CONTENTS: dict[str, bytes | Callable[[Path], object]] = {
    "object": b"{}\n", "list": b"[]\n", "number": b"1\n", "utf-8": b"\xff\xfe{}\n", "nul": b"\0" * 4096 + b"\n",
    "brackets": BRACKETS + b"\n", "step": b'{"event": "step", "at": 1}\n', "empty": b"",
    "pipe": os.mkfifo, "folder": Path.mkdir, "loop": lambda path: path.symlink_to(path.name),
}  # fmt: skip


def run_of(tmp_path: Path) -> tuple[Path, Plan]:
    recipe = write_recipe(tmp_path)
    plan = plan_here(recipe)
    with claim_run_dir(plan, recipe.read_text(), fresh=False):
        pass
    with contextlib.closing(Reporter(plan.rundir)) as reporter:
        reporter.event("start", **sample("start", total_steps=9))
        reporter.event("step", **sample("step", step=7))
    return recipe, plan


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "logs/progress.jsonl", "plan.json", "plans/0001.json", "export.json"]
)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_fsdptrain_did_not_write_ends_no_command_in_a_traceback(
    name: str, content: str, tmp_path: Path
) -> None:
    recipe, plan = run_of(tmp_path)
    path = plan.rundir.root / name
    path.unlink(missing_ok=True)
    make = CONTENTS[content]
    path.write_bytes(make) if isinstance(make, bytes) else make(path)
    is_regular = isinstance(make, bytes)
    with within(30):
        result = CliRunner().invoke(app, ["status", str(plan.rundir.root), "--json"])
        if name == "plan.json":
            assert isinstance(result.exception, Unreadable) and str(path) in str(result.exception)
        else:
            assert result.exit_code == 0, result.exception
            found = json.loads(result.stdout)
            assert found["step"] == (0 if name == "metrics.jsonl" else 7)
            is_line = "jsonl" in name and content != "empty"
            assert len(found["skipped"]) == (is_line or name == "export.json")
            line = " line 1" * (is_line and is_regular)
            assert not found["skipped"] or found["skipped"][0].startswith(f"{path.name}{line}: ")
        result = CliRunner().invoke(app, ["verify", str(plan.rundir.root)])
        assert isinstance(result.exception, FsdptrainError), result.exception  # there is no checkpoint
        assert read_export_record(plan.rundir).files == {}
        with contextlib.suppress(FsdptrainError), claim_run_dir(plan, recipe.read_text(), fresh=False) as earlier:
            assert is_regular or name == "plans/0001.json"
            assert name == "plan.json" or list(earlier.faults) == found["skipped"]
            assert all(fault in heading(plan, plan.rundir, earlier) for fault in earlier.faults)
            cut_partial_lines(plan.rundir)
            with contextlib.closing(Reporter(plan.rundir)) as reporter:
                reporter.resume(0, {})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("topology.nproc_per_node", 10**12, "launch.nproc_per_node: 1000000000000 is not a number from 1 to 1024"),
        ("topology.nnodes", 0, "launch.nnodes: 0 is not a number from 1 to 16384"),
        ("topology.nnodes", "2", "it has another value for nnodes"),
        ("topology.device", "tpu", "it has another value for device"),
        ("topology.endpoint", [], "it has another value for endpoint"),
        ("topology.ranks", 2, "'ranks'"),
        ("recipe.train.micro_batch_size", 0, "micro_batch_size"),
        ("recipe.log.every", -1, "log.every"),
        ("recipe.name", "${oc.env:HOME}", "it contains a ${reference}"),
    ],
)
def test_a_plan_with_values_that_no_run_has_is_refused(path: str, value: object, message: str, tmp_path: Path) -> None:
    _, plan = run_of(tmp_path)
    fields = json.loads(plan.to_json())
    *sections, key = path.split(".")
    section = fields
    for each in sections:
        section = section[each]
    section[key] = value
    plan.rundir.plan.write_text(json.dumps(fields))
    with within(30), pytest.raises(Unreadable, match="is not a plan of this version") as refusal:
        Observer(plan.rundir)
    assert message in str(refusal.value)


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    launch = {"nnodes": "1:2", "nproc_per_node": 2, "rdzv_endpoint": "a:1", "max_restarts": 1}
    recipe = write_recipe(tmp_path_factory.mktemp("run"), launch=launch)
    plan = make_plan(load(recipe), Topology("cpu", 2, 2, least_nnodes=1))
    run_folder(plan)
    return plan


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([*EVENTS]), st.dictionaries(st.sampled_from(
    ["step", "loss", "step_s", "rank", "hosts", "total_steps", "world_size", "at", "message", "stage"]
), values, max_size=2)), max_size=8))  # fmt: skip
def test_status_reads_events_with_any_values(elastic: Plan, events: list[tuple[str, dict[str, Any]]]) -> None:
    lines = [json.dumps({**record(kind), "at": time.time(), **fields}) for kind, fields in events]
    elastic.rundir.metrics.write_text("\n".join(lines) + "\n")
    assert status_lines(Observer(elastic.rundir).status())


def test_more_workers_or_nodes_than_any_cluster_has_are_refused(tmp_path: Path) -> None:
    for override in ("launch.nproc_per_node=1000000000000", "launch.nnodes=100000", "launch.nnodes='1:99999'"):
        with pytest.raises(RecipeError, match=r"launch\.n.* is too large: must be at most"):
            load(write_recipe(tmp_path), [override])
    env = {"RANK": "0", "WORLD_SIZE": "999999", "MASTER_ADDR": "n1", "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(RecipeError, match=r"launch\.nnodes: 999999 is not a number from 1 to 16384"):
        find_topology(load(write_recipe(tmp_path)).recipe, env)
