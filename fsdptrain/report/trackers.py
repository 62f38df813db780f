"""Trackers: one process beside a run follows metrics.jsonl and hands each event to the libraries. No torch.

The run never waits for it, except for some seconds at the end. A tracker that fails is left out for the rest of the
attempt. The file `trackers/NAME.json` keeps how far each one is, and the next attempt goes on from there. Without a
network the libraries themselves keep files to send later (`WANDB_MODE=offline`).

Names are those of the events: `step/loss`, `eval/loss`. Each library is configured by its own environment variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fsdptrain.errors import Stopped, StorageError, first_line
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import Child, Interrupted, StopRequest, answer_parent, records_of_parent
from fsdptrain.run_folder.files import write_atomically
from fsdptrain.run_folder.records import (
    COUNT,
    EVENTS,
    NOT_READ,
    NUMBERS,
    TEXT,
    TEXTS,
    Record,
    Tail,
    field_fault,
    last_kept,
    numbers_in,
    read_object,
    without_undone,
)
from fsdptrain.run_folder.rundir import RunDir

PROJECT = "fsdptrain"  # unless the recipe or the library's own variable names another
MAX_PARAM = 500  # characters of a param; older servers of MLflow refuse more
NICENESS = 10  # the workers have priority, and at 19 a busy machine would delay the end
POLL_S = 0.5  # between two reads of metrics.jsonl
FLUSH_S, STOPPED_FLUSH_S = 30.0, 5.0  # for the trackers after the run has ended, and after a stop signal
KILL_S = 2.0  # for a killed process to be gone: one that waits for a dead file system is not
SAID_S = 3.0  # of them before the user is told what is waited for


@dataclass
class TrackerState:
    """How far a tracker is, as the run folder keeps it."""

    id: str = ""
    shown_by: list[str] = field(default_factory=list)  # the URL or the words of the command that shows the run
    offset: int = 0  # bytes of metrics.jsonl that it got
    newest: dict[str, int] = field(default_factory=dict)  # kind of event → the newest step that it got

    @classmethod
    def read(cls, rundir: RunDir, name: str) -> TrackerState:
        """Return how far a tracker of a run is; of a new one, or if the file cannot be read, not at all."""
        kinds = {"id": TEXT, "shown_by": TEXTS, "offset": COUNT, "newest": NUMBERS}
        with contextlib.suppress(*NOT_READ):
            found = read_object(rundir.trackers / f"{name}.json")
            is_valid = found.keys() == kinds.keys() and not field_fault(found, kinds)
            if is_valid and "".join(found["shown_by"]).isprintable():
                return cls(**found)
        return cls()

    def write(self, rundir: RunDir, name: str) -> None:
        """Write it into the run folder."""
        write_atomically(rundir.trackers / f"{name}.json", json.dumps(dataclasses.asdict(self)))


class Library(NamedTuple):
    """What a library does with a run that it has begun or continued. It may raise or hang."""

    # Records what was measured after a step, at a time in seconds since 1970: numbers and texts by their names.
    log: Callable[[int, float, dict[str, float], dict[str, str]], None]
    # Sends what is left, and marks the run as `finished`, `stopped` or `failed`, with the reason.
    finish: Callable[[str, str], None]
    # Drops what was logged about later steps than this one; returns whether the library can do that.
    rewind: Callable[[int], bool] = lambda last: False


class Tracker:
    """Hands the events of a run to a library. Only the trackers' process calls it."""

    def __init__(self, rundir: RunDir, name: str, run_name: str, project: str | None) -> None:
        """Begin the run in the library `name`, or continue it; `run_name` and `project` are what it shows."""
        self.rundir, self.name, self.run_name, self.project = rundir, name, run_name, project
        self.state = TrackerState.read(rundir, name)
        plan = read_object(rundir.plan)
        self.config = {"recipe": plan.pop("recipe"), "plan": plan}
        rundir.trackers.mkdir(exist_ok=True)
        self.is_new = not self.state.id
        self.state.id = self.state.id or uuid.uuid4().hex[:8]
        self.library = LIBRARIES[name](self)
        self._tail = Tail(rundir.metrics, from_end=False)
        with contextlib.suppress(FileNotFoundError):
            self._tail.offset = min(self.state.offset, rundir.metrics.stat().st_size)
        self.state.write(rundir, name)

    def hand_over(self) -> None:
        """Log what is new in metrics.jsonl."""
        is_first = self._tail.offset == 0
        try:
            new = self._tail.read()
        except StorageError:  # a shared folder may refuse for a moment
            return
        for record in without_undone(new) if is_first else new:
            self._hand_over(record)
        if self._tail.offset != self.state.offset:
            self.state.offset = self._tail.offset
            self.state.write(self.rundir, self.name)

    def _hand_over(self, record: Record) -> None:
        """Pass an event on. A step that is made again is passed on if it replaces the old one or may differ from it."""
        kind, newest = record["event"], self.state.newest
        if kind == "resume":
            last = last_kept(record["step"])
            if self.library.rewind(last) or record.get("changed"):
                newest.update({known: min(step, last) for known, step in newest.items()})
        elif kind in EVENTS and EVENTS[kind].tracked and record["step"] > newest.get(kind, -1):
            fields = {name: value for name, value in record.items() if name not in ("event", "at", "step")}
            pairs = zip(record.get("prompts", ()), record.get("texts", ()), strict=False)
            texts = {f"{kind}/{i}": f"{prompt}\n\n{text}" for i, (prompt, text) in enumerate(pairs, 1)}
            numbers = {"/".join((kind, *names)): number for names, number in numbers_in(fields)}
            self.library.log(record["step"], record["at"], numbers, texts)
            newest[kind] = record["step"]


# Each begins the run `run.state.id` or continues it. It sets that id, if the library chooses it, and
# `run.state.shown_by`; of a library that has lost what it got, it sets the state back to its start.


def _tensorboard(run: Tracker) -> Library:
    """TensorBoard's event files in the run folder, with the config as texts."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = str(run.rundir.tensorboard)
    writer = EventFileWriter(folder, flush_secs=5)

    def log(step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()])
        for tag, text in texts.items():
            summary.MergeFrom(text_pb(tag, _as_markdown(text)))
        writer.add_event(Event(wall_time=at, step=step, summary=summary))
        writer.flush()  # a thread writes; `close` does not raise what failed there

    def rewind(last: int) -> bool:
        writer.add_event(Event(step=last + 1, session_log=SessionLog(status=SessionLog.START)))
        return True

    if run.is_new:
        rewind(-1)
    log(0, time.time(), {}, {f"config/{part}": json.dumps(values, indent=2) for part, values in run.config.items()})
    run.state.shown_by = ["tensorboard", "--logdir", folder]
    return Library(log, lambda state, message: writer.close(), rewind)  # it knows no state of a run


def _wandb(run: Tracker) -> Library:
    """Weights & Biases, online or, with WANDB_MODE=offline, as files in the run folder."""
    import wandb

    begun = wandb.init(
        id=run.state.id, resume="allow", name=run.run_name,
        project=run.project or os.environ.get("WANDB_PROJECT") or PROJECT,
        dir=os.environ.get("WANDB_DIR") or str(run.rundir.trackers),
        settings=wandb.Settings(console="off", silent=True),
    )  # fmt: skip
    begun.define_metric("*", step_metric="step")  # W&B's own step cannot go back to one that is made again
    begun.config.update(run.config, allow_val_change=True)  # a resume may have changed it
    run.state.shown_by = [begun.url] if begun.url else []
    if begun.offline:
        # Of several folders with one id, the last to be uploaded replaces the others (wandb#3841).
        run.state.offset, run.state.newest = 0, {}
        run.state.shown_by = ["wandb", "sync", str(Path(begun.dir).parent)]

    def log(step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        panels = {
            name: wandb.Html(f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>")
            for name, text in texts.items()
        }
        begun.log({"step": step, "_timestamp": at, **numbers, **panels})

    def finish(state: str, message: str) -> None:
        begun.summary.update({"state": state, "message": message})
        begun.finish(exit_code=int(state == "failed"))  # W&B itself knows finished and failed

    return Library(log, finish)


def _mlflow(run: Tracker) -> Library:
    """MLflow: the store that MLFLOW_TRACKING_URI names, else the one that the library has in the working folder.

    A run's params are `recipe.optim.lr`. What a resume has changed is a tag, since a param keeps its first value.
    """
    import mlflow
    from mlflow.entities import Metric

    mlflow.set_experiment(run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
    client, known_id = mlflow.MlflowClient(), None if run.is_new else run.state.id
    info = mlflow.start_run(run_id=known_id, run_name=run.run_name, log_system_metrics=False).info
    run.state.id = info.run_id
    known = client.get_run(info.run_id).data.params
    params = {_mlflow_name(name): str(value)[:MAX_PARAM] for name, value in _flat(run.config)}
    mlflow.log_params({name: value for name, value in params.items() if name not in known})
    mlflow.set_tags({name: value for name, value in params.items() if known.get(name, value) != value})
    uri = re.sub(r"//[^/@]*@", "//", mlflow.get_tracking_uri())
    page = f"{uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
    run.state.shown_by = [page] if uri.startswith("http") else ["mlflow", "ui", "--backend-store-uri", uri]

    def log(step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        metrics = [Metric(_mlflow_name(name), value, int(1000 * at), step) for name, value in numbers.items()]
        client.log_batch(info.run_id, metrics)
        for name, text in texts.items():
            client.log_text(info.run_id, text, f"step-{step:08}/{_mlflow_name(name)}.txt")

    def finish(state: str, message: str) -> None:
        mlflow.set_tag("message", message)
        mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[state])

    return Library(log, finish)


def _trackio(run: Tracker) -> Library:
    """Trackio: a local database, or the Space or server that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names.

    The run's name has the id, since Trackio looks for runs by name.
    """
    import trackio

    project = run.project or PROJECT
    trackio.init(project, name=f"{run.run_name}-{run.state.id}", config=run.config, resume="allow", embed=False)
    run.state.shown_by = ["trackio", "show", "--project", project]

    def log(step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        panels = {name: trackio.Markdown(_as_markdown(text)) for name, text in texts.items()}
        trackio.log({**numbers, **panels}, step=step)

    def finish(state: str, message: str) -> None:
        if state != "finished":  # Trackio knows no state of a run
            trackio.alert(title=state, text=message)
        trackio.finish()

    return Library(log, finish)


LIBRARIES: dict[str, Callable[[Tracker], Library]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio,
}  # fmt: skip


def _as_markdown(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", name)


def _flat(config: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def without_secrets(text: str) -> str:
    """Return a text without passwords in URLs, and without the values of variables that hold a key or a password."""
    for name, value in os.environ.items():
        if len(value) >= 6 and re.search(r"KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "…")
    return re.sub(r"://[^/\s@]*@", "://…@", text)


def main() -> NoReturn:
    """Follow the run that the parent names, and tell it which trackers fail.

    The process ends by `os._exit`: what a library has registered for the end of the interpreter may hang.
    """
    answer, messages = answer_parent(), records_of_parent()
    run, ends = next(messages), queue.SimpleQueue[Record]()
    threading.Thread(target=lambda: ends.put(next(messages)), daemon=True).start()
    rundir, running = RunDir(Path(run["root"])), dict[str, Tracker]()

    @contextlib.contextmanager
    def left_out_if_it_fails(library: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # a library may exit
            running.pop(library, None)
            answer({"tracker": library, "fault": without_secrets(f"{type(error).__name__}: {first_line(error)}")})

    for library in run["trackers"]:
        with left_out_if_it_fails(library):
            running[library] = Tracker(rundir, library, run["name"], run["project"])
    end = None
    while end is None:
        with contextlib.suppress(queue.Empty):
            end = ends.get(timeout=POLL_S)
        for library, tracker in [*running.items()]:
            with left_out_if_it_fails(library):
                tracker.hand_over()
    for library, tracker in [*running.items()]:
        with left_out_if_it_fails(library):
            tracker.library.finish(end["state"], end["message"])
    os._exit(0)


class Trackers:
    """The trackers of a run, on the node that has rank 0."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user: each tracker says once that it fails."""
        self._plan, self._say = plan, say
        self._names = plan.recipe.log.chosen_trackers
        self._child: Child | None = None
        self._listener = threading.Thread()
        self._faults = queue.SimpleQueue[str]()

    def poll(self, is_first: bool = True) -> None:
        """Start the process, and say which trackers have failed. Without rank 0 on this node (`is_first`), end it.

        To be called often: it waits for nothing.
        """
        recipe, root = self._plan.recipe, str(self._plan.rundir.root)
        if not is_first:
            self.close()
        elif self._child is None and self._names:
            try:
                self._child = Child(__name__, niceness=NICENESS, keep_errors=True)
                run = {"root": root, "trackers": self._names, "name": recipe.name, "project": recipe.log.project}
                self._child.send(run)
                self._listener = threading.Thread(target=self._listen, args=(self._child,), daemon=True)
                self._listener.start()
            except OSError as error:  # no process more, no descriptor, no memory
                self._names = []
                self._faults.put(f"the trackers cannot be started: {error}")
        while not self._faults.empty():
            self._say(
                f"{self._faults.get()}; the run goes on without it; a resume of an unfinished run sends what it lacks"
            )

    def _listen(self, child: Child) -> None:
        """Collect the faults that the process reports, and its own end; runs in a thread."""
        with contextlib.suppress(ValueError):  # `close` has closed the pipe
            for record in child.records():
                self._faults.put(f"{record['tracker']}: {record['fault']}")
            if child.code and child is self._child:
                how = child.killed or f"exit code {child.code}"
                self._faults.put(without_secrets(f"the process of the trackers has ended: {how} {child.last_error()}"))

    def finish(self, state: str, message: str = "") -> None:
        """Let the trackers mark the end of the run. End them if they take too long, or at a stop signal."""
        if self._child is None:
            return
        limit, started, said = STOPPED_FLUSH_S if state == "stopped" else FLUSH_S, time.monotonic(), False
        self._child.send({"state": state, "message": message})
        with StopRequest() as stop:
            while self._listener.is_alive() and (waited := time.monotonic() - started) < limit and not stop.count:
                if waited > SAID_S and not said:
                    self._say(f"waiting for the trackers, at most {limit:g} s (Ctrl-C: not)")
                    said = True
                self._listener.join(0.05)
        self.poll()
        if self._listener.is_alive():
            rest = "" if state == "finished" else "; a resume sends the rest"
            self._say(f"not all trackers have all of the run: not ready within {limit:g} s{rest}")
        self.close()

    def close(self) -> None:
        """Kill the process, if it still runs."""
        child, self._child = self._child, None
        if child:
            closing = threading.Thread(target=child.close, daemon=True)
            closing.start()
            closing.join(KILL_S)


@contextlib.contextmanager
def tracked(plan: Plan, say: Callable[[str], None]) -> Iterator[Trackers]:
    """Yield the trackers of a run, which mark at the end whether it has finished, was stopped or has failed."""
    trackers = Trackers(plan, say)
    try:
        yield trackers
    except BaseException as error:
        trackers.finish("stopped" if isinstance(error, (Stopped, Interrupted)) else "failed", str(error))
        raise
    trackers.finish("finished")
