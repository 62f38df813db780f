"""Write the events of a run to `metrics.jsonl`, and read them back with every step once."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from fsdptrain.errors import to_record
from fsdptrain.run_folder.files import is_regular_file, open_to_append
from fsdptrain.run_folder.records import Record, RunState, Tail, json_safe, without_undone
from fsdptrain.run_folder.rundir import RunDir

Progress = Callable[[str, int, int], None]  # gets a stage, how many of its parts are done, and how many there are
PROGRESS_INTERVAL_S = 0.2  # between two progress records of one stage


def progress_record(stage: str, done: int, total: int) -> Record:
    """Return the record of how far a stage is; a `total` of 0 means that the number is unknown."""
    return {"event": "progress", "stage": stage, "done": done, "total": total}


class Reporter:
    """Writes the events of a run, on rank 0. On other ranks (`rundir=None`) every call does nothing."""

    def __init__(self, rundir: RunDir | None, show: Callable[[Record], None] = lambda record: None) -> None:
        """`show` gets the records as they are written."""
        self._rundir, self._show = rundir, show
        self._metrics: IO[str] | None = None
        self._progress: IO[str] | None = None
        self._last_progress = ("", 0.0)
        if rundir is None:
            return
        rundir.logs.mkdir(exist_ok=True)  # but not the run folder, if it was removed
        self._metrics = open_to_append(rundir.metrics)
        self._progress = open_to_append(rundir.progress)

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event with its time (`at`, seconds since 1970). Trackers get it from the file."""
        if self._metrics is None:
            return
        record = {"event": kind, "at": round(time.time(), 3), **fields}
        self._metrics.write(json.dumps(json_safe(record)) + "\n")
        self._show(record)

    def resume(self, step: int, changed: dict[str, Any], notes: Sequence[str] = ()) -> None:
        """Write that training continues after `step`, unless this is the first start. Readers drop later events."""
        if step or self._earlier().has_trained:
            self.event("resume", step=step, changed=changed, notes=[*notes])

    def trained_by(self, step: int) -> Record | None:
        """Return the `start` event of the attempt that trained `step`; None if it is not in the records."""
        state = self._earlier()
        state.add({"event": "resume", "step": step})
        return state.trained_by

    def has(self, kind: str, step: int) -> bool:
        """Return whether the run has an event of this kind and step, from this or an earlier attempt."""
        return self._earlier().has(kind, step)

    def _earlier(self) -> RunState:
        return RunState.of(Tail(self._rundir.metrics, from_end=False).read() if self._rundir else ())

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
        self._show(record)

    def close(self) -> None:
        """Flush and close every file."""
        for stream in (self._metrics, self._progress):
            if stream is not None:
                stream.close()
        self._metrics = self._progress = None


def record_error(rundir: RunDir, error: BaseException, **where: Any) -> None:
    """Write an `error` event, with these fields."""
    with contextlib.closing(Reporter(rundir)) as reporter:
        reporter.event("error", **where, **to_record(error))


def record_restart(rundir: RunDir, restart: int, of: int) -> None:
    """Write a `restart` event, after the workers of the newest attempt were lost."""
    with contextlib.closing(Reporter(rundir)) as reporter:
        reporter.event("restart", attempt=rundir.newest_attempt(), restart=restart, of=of)


def cut_partial_lines(rundir: RunDir) -> None:
    """Cut off the partial last line that a full disk or a killed process left in a log. No process may be writing."""
    for path in (rundir.metrics, rundir.progress):
        complete = Tail(path).offset
        if is_regular_file(path) and path.stat().st_size > complete:
            os.truncate(path, complete)


def read_losses(metrics: Path, source: str | None) -> dict[int, float]:
    """Return the held-out losses in `metrics.jsonl` that can be compared, of a source or of all, by step."""
    return RunState.of(Tail(metrics, from_end=False).read()).losses(source)


def read_history(metrics: Path | str) -> list[Record]:
    """Return the events in `metrics.jsonl`, other lines left out, without those that a later attempt undid."""
    return without_undone(Tail(Path(metrics), from_end=False).read())
