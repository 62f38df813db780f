"""The files of a run in an object store, if `output_dir` is a URL. No torch.

The run works in a folder on the local disk, where files can be appended to, locked and renamed. Its small files are
uploaded before each checkpoint is published and at the end of an attempt, the export when it is complete.

    fetch (if another folder has written last) → … upload → checkpoint … upload → checkpoint … → upload → export

`written-by.json` names the working folder that wrote last: a folder that is named there has everything that is in the
store, any other one fetches it first. So a machine that has lost the run to another one notices it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdptrain.errors import CheckpointError, RunLost, Stopped, StorageError
from fsdptrain.folder.events import Progress
from fsdptrain.folder.files import read_if_there, replaced, set_aside, write_atomically
from fsdptrain.folder.ownership import WEIGHTS, Stamps, file_stamps, read_export_record, write_mark
from fsdptrain.folder.records import json_object
from fsdptrain.folder.rundir import RunDir
from fsdptrain.folder.storage import ObjectPath, abort_uploads, object_path, store_errors
from fsdptrain.processes import StopRequest

WRITTEN_BY = "written-by.json"
CLAIM = "claim.json"  # names the process that writes the run (see `attempts.holder`)
EXPORT, EXPORT_RECORD = "export", "export.json"

# The small files: of the first names below, all that is neither a lock nor being written.
SMALL = (
    "plan.json", "recipe.yaml", "plans", "metrics.jsonl", "pinned.json", "commits.json", "forecast.json", "tensorboard",
    "trackers", "profiles", "logs", "model", "reference",
)  # fmt: skip

# Of these, what is appended to or read on the node of rank 0.
HISTORY = ("metrics.jsonl", "tensorboard", "trackers", "reference")

NOT_COPIED = ("logs/lock*", "*.tmp")

# Files without which transformers or peft open nothing: they are uploaded last, and removed first.
OPENS_EXPORT = ("config.json", "adapter_config.json")

AT_ONCE = 8  # files that are copied at the same time
POLL_S = 0.25
WATCH_S = 20.0  # between two looks for another machine that has taken over the run


class RunStore:
    """The files of one run in an object store. Each method raises StorageError if the store refuses."""

    def __init__(self, rundir: RunDir) -> None:
        assert rundir.url
        self.rundir, self.root = rundir, object_path(rundir.url)
        self._sent: Stamps = {}

    @classmethod
    def of(cls, rundir: RunDir) -> RunStore | None:
        """Return the store of a run; None if its files are in a folder."""
        return cls(rundir) if rundir.url else None

    def begin(self) -> None:
        """Make the local folder the one that writes, with all that the store has. One process of a machine at a time.

        If the run was removed from the store, what the local folder has of it is renamed to NAME.kept.
        """
        if self._own_name() and self._read(WRITTEN_BY) is None:
            set_aside(self.rundir.root)
            self.rundir.root.mkdir()
            write_mark(self.rundir.root)
        self._begin(SMALL)

    def _begin(self, names: Collection[str]) -> None:
        theirs = self._read(WRITTEN_BY)
        if theirs and theirs == self._own_name():
            return
        # First in the store: what another machine uploads from now on is refused there, so that nothing is missed.
        mine = json.dumps({**this_process(), "folder": str(self.rundir.root), "id": uuid.uuid4().hex})
        (self.root / WRITTEN_BY).write_bytes(mine.encode())
        if theirs:
            self.fetch(self.rundir.root, names)
        write_atomically(self.rundir.root / WRITTEN_BY, mine)  # only now: a fetch that was killed is repeated

    def take(self) -> None:
        """Make the local folder the one that writes, on rank 0 before it writes: of several nodes any may have rank 0.

        `check_claim` comes first, because another machine may have taken over the run.

        The plan is left as the launcher of this node has written it.
        """
        self._begin(HISTORY)

    def is_writer(self) -> bool:
        """Return whether the local folder is the one that writes."""
        theirs = self._read(WRITTEN_BY)
        return theirs is not None and theirs == self._own_name()

    def check_writer(self) -> None:
        """Raise RunLost, which says who writes now, unless the local folder is the one that writes.

        To be called before anything in the store is changed: a machine that was frozen does not know that it is late.
        """
        theirs = self._read(WRITTEN_BY)
        if theirs is None:
            raise RunLost(
                f"{self.root}: {WRITTEN_BY} is gone, so this run was removed from the store, or moved, while it was "
                f"trained here. Nothing more is uploaded: what this machine has of the run is in {self.rundir.root}, "
                "without checkpoints. The same command renames that folder to ….kept, and starts at step 0"
            )
        if theirs != self._own_name():
            raise self._taken_over(parsed_object(theirs))

    def check_claim(self, run: str | None) -> None:
        """Raise RunLost if the claim of the run is held by another one; `run` is what the own claim says."""
        claim = read_claim(self.root / CLAIM)
        if claim is not None and claim.get("run") != run:
            raise self._taken_over(claim)

    def _taken_over(self, by: dict[str, Any]) -> RunLost:
        return RunLost(
            f"{self.root}: this run was taken over by {described(by)}. This machine ({socket.gethostname()}) uploads "
            f"nothing more: what it has made since its last upload is in {self.rundir.root} alone, until the same "
            "command is run here again, which replaces it with what is in the store"
        )

    @contextlib.contextmanager
    def watched(self, lost: Callable[[RunLost], None]) -> Iterator[None]:
        """Inside, call `lost` from a thread when the local folder is not the one that writes any more."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(WATCH_S):
                try:
                    self.check_writer()
                except RunLost as error:
                    lost(error)
                    break
                except StorageError:  # it is tried again, and a save reports it
                    continue

        thread = threading.Thread(target=watch, name="owner", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def _own_name(self) -> bytes | None:
        return read_if_there(self.rundir.root / WRITTEN_BY)

    def fetch(self, folder: Path, names: Collection[str] = SMALL) -> None:
        """Download small files into a folder. Raises FileNotFoundError if one disappears.

        Their modification time is 1970, so that it tells which were changed here. What ranks of earlier attempts have
        written about hangs is not downloaded: attempts are numbered in each folder.
        """

        def copy(name: str) -> None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = self.root / name
            with replaced(target) as file, store_errors(source):
                source.fs.get_file(source.key, file.name)
                os.utime(file.name, (0, 0))

        wanted = [name for name in self._listed() if _is_copied(name) and name.split("/")[0] in names]
        _all(copy, [name for name in wanted if not name.startswith("logs/attempts/")])

    def push(self) -> None:
        """Upload the small files that are new or have changed since this process uploaded them.

        Raises RunLost if another machine has taken over the run.
        """
        self.check_writer()
        self._push(_is_copied)

    def push_worker_logs(self) -> None:
        """Upload logs and profiles of this node's workers; for the nodes without rank 0. `check_claim` comes first."""
        self._push(lambda name: fnmatchcase(name, "logs/rank-*.log") or fnmatchcase(name, "profiles/rank-*"))

    def _push(self, is_wanted: Callable[[str], bool]) -> None:
        stamps = {name: stamp for name, stamp in file_stamps(self.rundir.root).items() if is_wanted(name)}
        # What was fetched and not changed since is in the store, where another node may have a newer one.
        changed = {name: stamp for name, stamp in stamps.items() if stamp[1] and self._sent.get(name) != stamp}

        def copy(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                self._put(name)

        _all(copy, changed)
        self._sent |= changed

    def exported_step(self) -> int | None:
        """Return the step of the export in the store; None if there is no complete one."""
        record = self._export_record()
        return int(record["step"]) if record else None

    def uploaded_sizes(self) -> dict[str, int]:
        """Return the bytes of every object below `export/`, which need not be complete."""
        return {name.removeprefix(f"{EXPORT}/"): size for name, size in self._listed(EXPORT).items()}

    def recorded_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of the complete export; empty if there is none."""
        return {name: size for name, (size, _) in self._export_record().get("files", {}).items()}

    def push_export(self, stop: StopRequest, progress: Progress, poll: Callable[[], None] = lambda: None) -> None:
        """Upload the export of the local folder in place of the one in the store, unless that is of the same step.

        It cannot be opened until it is complete. `poll` is called every POLL_S. Raises Stopped after a signal, and
        RunLost if another machine has taken over the run.
        """
        record = read_export_record(self.rundir)
        step, files = record.step, record.files
        if step is None or self.exported_step() == step:
            return
        self.check_writer()
        target, names = self.root / EXPORT, sorted(files)
        last = [name for name in names if name in OPENS_EXPORT]
        old = self._export_record().get("files", {})
        self._remove([EXPORT_RECORD, *(f"{EXPORT}/{name}" for name in OPENS_EXPORT)])
        # Weights also if no record names them: an upload that was interrupted has left them.
        stale = [name for name in self.uploaded_sizes() if name not in files and (name in old or _is_weights(name))]
        self._remove(f"{EXPORT}/{name}" for name in stale)
        abort_uploads(target / "")
        sent, total = [0], sum(size for size, _ in files.values())
        whole = -(-total >> 20)

        def count(size: int) -> None:
            if stop.count:
                raise Stopped(f"stopped by {stop.by} while the export was uploaded; run the same command to continue")
            sent[0] += size
            progress("uploading the export (MiB)", sent[0] >> 20 if sent[0] < total else whole, whole)

        for group in ([name for name in names if name not in last], last):
            self.check_writer()
            _all(lambda name: self._put(f"{EXPORT}/{name}", count), group, poll)
        found = self.uploaded_sizes()
        if wrong := [name for name in names if found.get(name) != files[name][0]]:
            raise CheckpointError(f"{target / wrong[0]} has not the size of the file that was uploaded: run again")
        self.check_writer()
        self._put(EXPORT_RECORD)

    def _export_record(self) -> dict[str, Any]:
        found = parsed_object(self._read(EXPORT_RECORD) or b"")
        return found if isinstance(found.get("step"), int) and isinstance(found.get("files"), dict) else {}

    def _listed(self, below: str = "") -> dict[str, int]:
        folder = self.root / below if below else self.root
        with store_errors(folder):
            found = folder.fs.find(folder.key, detail=True)
        return {key.removeprefix(f"{self.root.key}/"): info["size"] for key, info in found.items()}

    def _put(self, name: str, count: Callable[[int], None] = lambda size: None) -> None:
        from fsspec.callbacks import Callback

        class Sent(Callback):
            def relative_update(self, inc: int = 1) -> None:
                count(inc)

        target = self.root / name
        with store_errors(target):
            target.fs.put_file(str(self.rundir.root / name), target.key, callback=Sent())

    def _read(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.root / name).read_bytes()
        return None

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).remove()


def this_process() -> dict[str, Any]:
    """Return host and number of this process, and the time, as claims name who writes a run since when."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return {"host": socket.gethostname(), "process": os.getpid(), "since": since}


def described(by: dict[str, Any]) -> str:
    """Return what `this_process` returned on another machine, for a message."""
    return f"{by.get('host')} (process {by.get('process')}), since {by.get('since')}"


def read_claim(place: ObjectPath) -> dict[str, Any] | None:
    """Return the fields of a claim; {} for an object that is none, None if there is no object."""
    try:
        return parsed_object(place.read_bytes())
    except FileNotFoundError:
        return None


def parsed_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in the content of a file; {} if it is not one."""
    with contextlib.suppress(ValueError):
        return json_object(content)
    return {}


def _is_copied(name: str) -> bool:
    parts = name.split("/")  # anyone may have written the objects
    known = parts[0] in SMALL and not {"", ".", ".."}.intersection(parts)
    return known and not any(fnmatchcase(name, pattern) for pattern in NOT_COPIED)


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in WEIGHTS)


def _all(copy: Callable[[str], None], names: Iterable[str], poll: Callable[[], None] = lambda: None) -> None:
    """Copy files, AT_ONCE at a time; call `poll` every POLL_S. After an error no further one is begun."""
    failure: BaseException | None = None
    with ThreadPoolExecutor(AT_ONCE, "copy") as pool:
        waiting = {pool.submit(copy, name) for name in names}
        while waiting:
            done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
            poll()
            errors = [each.exception() for each in done if not each.cancelled()]
            failure = failure or next(filter(None, errors), None)
            if failure:
                pool.shutdown(wait=False, cancel_futures=True)
                waiting = {each for each in waiting if not each.cancelled()}  # these are never reported as done
    if failure:
        raise failure
