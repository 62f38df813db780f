"""Write the events of a run to `metrics.jsonl` and TensorBoard, and read them back with every step once."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from fsdptrain.errors import to_record
from fsdptrain.rundir import RunDir

Record = dict[str, Any]


PROGRESS_INTERVAL_S = 0.2  # between two progress records of one stage


class Display(Protocol):
    """An object that shows records as they are written."""

    def show(self, record: Record) -> None:
        """Show one record."""


def progress_record(stage: str, done: int, total: int) -> Record:
    """Return the record of how far a stage is; a `total` of 0 means that the number is unknown."""
    return {"event": "progress", "stage": stage, "done": done, "total": total}


class Reporter:
    """Writes the events of a run, on rank 0. On other ranks (`rundir=None`) every call does nothing."""

    def __init__(self, rundir: RunDir | None, tensorboard: bool = False, screen: Display | None = None) -> None:
        self._rundir, self._screen = rundir, screen
        self._metrics: IO[str] | None = None
        self._progress: IO[str] | None = None
        self._board: Any = None
        self._last_progress = ("", 0.0)
        if rundir is None:
            return
        rundir.logs.mkdir(exist_ok=True)  # but not the run folder, if it was removed
        self._metrics = rundir.metrics.open("a", buffering=1, encoding="utf-8")
        self._progress = rundir.progress.open("a", buffering=1, encoding="utf-8")
        if tensorboard:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._board = EventFileWriter(str(rundir.tensorboard))

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event with its time (`at`, seconds since 1970); `step` and `eval` go to TensorBoard too."""
        if self._metrics is None:
            return
        record = {"event": kind, "at": round(time.time(), 3), **fields}
        self._metrics.write(json.dumps(_json_safe(record)) + "\n")
        if self._screen:
            self._screen.show(record)
        if self._board and kind in ("step", "eval"):
            self._scalars(kind, fields)
        if self._board and kind == "resume":
            self._purge(fields["step"])

    def resume(self, step: int, changed: dict[str, Any]) -> None:
        """Write that training continues after `step`, unless this is the first start. Readers drop later events."""
        records = read_history(self._rundir.metrics) if self._rundir else ()
        if step or any(record["event"] in STEP_EVENTS for record in records):
            self.event("resume", step=step, changed=changed)

    def has(self, kind: str, step: int | None = None) -> bool:
        """Return whether the run has an event of this kind (and of this step), from this or an earlier attempt."""
        records = read_history(self._rundir.metrics) if self._rundir else ()
        return any(record["event"] == kind and step in (None, record.get("step")) for record in records)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Write how many rows, tensors or files of a stage are done, at most once per PROGRESS_INTERVAL_S.

        A `total` of 0 means that the number is unknown.
        """
        now = time.monotonic()
        last_stage, last_time = self._last_progress
        if self._progress is None or (stage == last_stage and now - last_time < PROGRESS_INTERVAL_S and done < total):
            return
        self._last_progress = (stage, now)
        record = {**progress_record(stage, done, total), "at": time.time()}
        self._progress.write(json.dumps(record) + "\n")
        if self._screen:
            self._screen.show(record)

    def close(self) -> None:
        """Flush and close every file."""
        for stream in (self._metrics, self._progress, self._board):
            if stream is not None:
                stream.close()
        self._metrics = self._progress = self._board = None

    def _scalars(self, kind: str, fields: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in fields.items() if isinstance(v, (int, float)) and k != "step"}
        values = [Summary.Value(tag=f"{kind}/{name}", simple_value=number) for name, number in numbers.items()]
        self._board.add_event(Event(wall_time=time.time(), step=fields["step"], summary=Summary(value=values)))

    def _purge(self, step: int) -> None:
        """Make TensorBoard drop what earlier attempts wrote about steps after `step`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._board.add_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))


def record_error(rundir: RunDir, error: BaseException, **where: Any) -> None:
    """Write an `error` event, with these fields."""
    with contextlib.closing(Reporter(rundir)) as reporter:
        reporter.event("error", **where, **to_record(error))


def cut_partial_lines(rundir: RunDir) -> None:
    """Cut off the partial last line that a full disk or a killed process left in a log. No process may be writing."""
    for path in (rundir.metrics, rundir.progress):
        if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)


def _json_safe(record: Record) -> Record:
    """Return a record with non-finite numbers as text ("nan", "inf"), because JSON has none."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class Tail:
    """Reads the complete lines that other processes append to a JSON-lines file."""

    def __init__(self, path: Path, from_end: bool = True) -> None:
        self._path = path
        # After the last complete line: a partial one is cut off before the next is written.
        self._offset = path.read_bytes().rfind(b"\n") + 1 if from_end and path.exists() else 0

    def read(self) -> Iterator[Record]:
        """Yield the records that were appended since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with contextlib.suppress(json.JSONDecodeError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record


# Events that are dropped if the run resumes from before their step.
STEP_EVENTS = ("step", "eval", "save", "skip", "nonfinite", "straggler")


def without_undone(records: Iterable[Record]) -> list[Record]:
    """Return the records without those that a later attempt undid, so that every step is there once.

    A `resume` event undoes the events of all later steps. So does a `step` event whose step was there before.
    """
    kept: list[Record] = []
    newest = -1
    for record in records:
        kind, step = record.get("event"), record.get("step")
        if kind in ("resume", "step") and isinstance(step, int):
            last = step if kind == "resume" else step - 1
            if newest > last:
                kept = [old for old in kept if old.get("event") not in STEP_EVENTS or old["step"] <= last]
                newest = last
        if kind in STEP_EVENTS:
            if not isinstance(step, int):
                continue
            newest = max(newest, step)
        kept.append(record)
    return kept


def read_history(metrics: Path) -> list[Record]:
    """Return the events in `metrics.jsonl` without those that a later attempt undid."""
    return without_undone(Tail(metrics, from_end=False).read())


Progress = Callable[[str, int, int], None]
