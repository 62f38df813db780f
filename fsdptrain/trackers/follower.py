"""The process of one tracker: it follows metrics.jsonl, and hands over what is new. No torch.

The file is the queue between the run and the tracker: it holds all, so nothing is dropped, and what a tracker has not
got is handed over when it works again, at the latest by the next start of the run. Beside it is how far the tracker is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import shutil
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fsdptrain.errors import first_line
from fsdptrain.processes import answer_parent, records_of_parent
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
from fsdptrain.trackers.libraries import TRACKERS, TrackedRun

POLL_S = 0.5  # between two reads of metrics.jsonl
KEEP_S = 2.0  # between two notes of how far the tracker is
LEFT_SHARE = 0.01  # of a disk, which is left free, or this number of bytes, if it is less:
LEFT_TO_CHECKPOINTS = 2**30  # on the run's disk
LEFT_TO_LIBRARY = 2**26  # on the disk of a library that does not report what it cannot write


@dataclass
class TrackerState:
    """How far a tracker is, as the run folder keeps it."""

    id: str = ""
    shown_by: list[str] = field(default_factory=list)  # the URL or the words of the command that shows the run
    offset: int = 0  # bytes of metrics.jsonl that it got
    newest: dict[str, int] = field(default_factory=dict)  # kind of event → the newest step that it got
    state: str = ""  # that the run was marked with; empty: it is not

    @classmethod
    def read(cls, rundir: RunDir, name: str) -> TrackerState:
        """Return how far a tracker of a run is; of a new one, or if the file cannot be read, not at all."""
        kinds = {"id": TEXT, "shown_by": TEXTS, "offset": COUNT, "newest": NUMBERS, "state": TEXT}
        with contextlib.suppress(*NOT_READ):
            found = read_object(rundir.trackers / f"{name}.json")
            if (
                found.keys() == kinds.keys()
                and not field_fault(found, kinds)
                and "".join(found["shown_by"]).isprintable()
            ):
                return cls(**found)
        return cls()

    def write(self, rundir: RunDir, name: str) -> None:
        """Write it into the run folder."""
        write_atomically(rundir.trackers / f"{name}.json", json.dumps(dataclasses.asdict(self)))


class Follower:
    """Hands over the events of a run to one tracker."""

    def __init__(self, root: str, tracker: str, name: str, project: str | None) -> None:
        """`name` and `project` are what the tracker shows."""
        self._rundir, self._tracker = RunDir(Path(root)), tracker
        self._state = TrackerState.read(self._rundir, tracker)
        plan = read_object(self._rundir.plan)
        config = {"recipe": plan.pop("recipe"), "plan": plan}
        is_new, given = not self._state.id, self._state.id or uuid.uuid4().hex[:8]
        self._library = TRACKERS[tracker]()
        self._rundir.trackers.mkdir(exist_ok=True)
        run = TrackedRun(given, is_new, name, project, self._rundir.root, config)
        self._state.id, self._state.shown_by = self._library.start(run)
        self._state.state = ""
        if not self._library.continues:
            self._state.offset, self._state.newest = 0, {}
        self._tail = Tail(self._rundir.metrics, from_end=False)
        with contextlib.suppress(FileNotFoundError):  # an object store may have an older copy of the file
            self._tail.offset = min(self._state.offset, self._rundir.metrics.stat().st_size)
        self._note()

    def follow(self, inbox: queue.Queue[Record]) -> None:
        """Hand over events until the parent says how the run ended; then mark it so."""
        end = None
        while end is None:
            with contextlib.suppress(queue.Empty):
                end = inbox.get(timeout=POLL_S)
            self._check_space()
            new = self._tail.read()
            for record in new if self._tail.offset else without_undone(new):
                self._hand_over(record)
                if time.monotonic() - self._kept_at > KEEP_S:
                    self._keep()
            if self._tail.offset != self._state.offset:
                self._keep()
        with contextlib.suppress(*NOT_READ):
            self._library.configure({"forecast": read_object(self._rundir.forecast)})
        self._library.finish(end["state"], end["message"])
        self._state.state = end["state"]
        self._keep()

    def _hand_over(self, record: Record) -> None:
        """Pass an event on. A step that is made again is passed on if it replaces the old one or may differ from it."""
        kind, newest = record["event"], self._state.newest
        if kind == "resume":
            last = last_kept(record["step"])
            if self._library.rewind(last) or record.get("changed"):
                newest.update({known: min(step, last) for known, step in newest.items()})
        elif kind in EVENTS and EVENTS[kind].tracked and record["step"] > newest.get(kind, -1):
            fields = {name: value for name, value in record.items() if name not in ("event", "at", "step")}
            pairs = zip(record.get("prompts", ()), record.get("texts", ()), strict=False)
            texts = {f"{kind}/{i}": f"{prompt}\n\n{text}" for i, (prompt, text) in enumerate(pairs, 1)}
            numbers = {"/".join((kind, *names)): number for names, number in numbers_in(fields)}
            self._library.log(record["step"], record["at"], numbers, texts)
            newest[kind] = record["step"]

    def _keep(self) -> None:
        self._check_space()  # on a full disk a library may have lost what it got since the last note
        self._note()

    def _note(self) -> None:
        self._state.offset, self._kept_at = self._tail.offset, time.monotonic()
        self._state.write(self._rundir, self._tracker)

    def _check_space(self) -> None:
        if _is_almost_full(self._rundir.root, LEFT_TO_CHECKPOINTS):
            raise OSError("the disk of the run folder is almost full, and checkpoints need the rest")
        if (folder := self._library.folder) and folder.is_dir() and _is_almost_full(folder, LEFT_TO_LIBRARY):
            raise OSError(f"the disk of {folder} is almost full, and the library does not report what it cannot write")


def _is_almost_full(folder: Path, left: int) -> bool:
    disk = shutil.disk_usage(folder)
    return disk.free < min(LEFT_SHARE * disk.total, left)


def without_secrets(text: str) -> str:
    """Return a text without passwords in URLs, and without the values of variables that hold a key or a password."""
    for name, value in os.environ.items():
        if len(value) >= 6 and re.search(r"KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "…")
    return re.sub(r"://[^/\s@]*@", "://…@", text)


def main() -> NoReturn:
    """Follow the run that the parent names, and tell it what fails.

    The process ends by `os._exit`: what a library has registered for the end of the interpreter may hang.
    """
    answer, inbox = answer_parent(), queue.Queue[Record]()
    messages = records_of_parent()

    def receive() -> None:
        for message in messages:
            inbox.put(message)

    run = next(messages)
    threading.Thread(target=receive, daemon=True).start()
    code = 0
    try:
        Follower(**run).follow(inbox)
    except BaseException as error:
        answer({"failed": without_secrets(f"{type(error).__name__}: {first_line(error)}")})
        code = 1
    os._exit(code)
