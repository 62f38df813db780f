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
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdptrain.errors import CheckpointError, Stopped, StorageError
from fsdptrain.events import Progress
from fsdptrain.files import set_aside, write_atomically
from fsdptrain.ownership import WEIGHTS, Stamps, file_stamps, read_export_record, write_mark
from fsdptrain.processes import StopRequest
from fsdptrain.rundir import RunDir
from fsdptrain.storage import abort_uploads, object_path, store_errors

WRITTEN_BY = "written-by.json"


CLAIM = "claim.json"  # names the process that writes the run (see `launch.holder`)


EXPORT, EXPORT_RECORD = "export", "export.json"


# The small files: of the first names below, all that is neither a lock nor being written.
SMALL = (
    "plan.json", "recipe.yaml", "plans", "metrics.jsonl", "commits.json", "forecast.json", "tensorboard", "logs",
    "model",
)  # fmt: skip


# Of these, what rank 0 appends to.
HISTORY = ("metrics.jsonl", "tensorboard")


NOT_COPIED = ("logs/lock*", "logs/seen-by-all-*", "*.tmp")


# Files without which transformers or peft open nothing: they are uploaded last, and removed first.
OPENS_EXPORT = ("config.json", "adapter_config.json")


AT_ONCE = 8  # files that are copied at the same time


POLL_S = 0.25


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
        mine = json.dumps({"host": socket.gethostname(), "folder": str(self.rundir.root), "id": uuid.uuid4().hex})
        self._write(WRITTEN_BY, mine.encode())
        if theirs:
            self.fetch(self.rundir.root, names)
        write_atomically(self.rundir.root / WRITTEN_BY, mine)  # only now: a fetch that was killed is repeated

    def take(self) -> None:
        """Make the local folder the one that writes, on rank 0 before it writes: of several nodes any may have rank 0.

        The plan is left as the launcher of this node has written it.
        """
        self._begin(HISTORY)

    def is_writer(self) -> bool:
        """Return whether the local folder is the one that writes."""
        theirs = self._read(WRITTEN_BY)
        return theirs is not None and theirs == self._own_name()

    def _own_name(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.rundir.root / WRITTEN_BY).read_bytes()
        return None

    def fetch(self, folder: Path, names: Collection[str] = SMALL) -> None:
        """Download small files into a folder. Raises FileNotFoundError if one disappears meanwhile.

        Their modification time is 1970, so that it tells which were changed here, and no report of a hang looks new.
        """

        def copy(name: str) -> None:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            source, scratch = self.root / name, target.with_name(f".{target.name}.tmp")
            with store_errors(source):
                source.fs.get_file(source.key, str(scratch))
            os.utime(scratch, (0, 0))
            scratch.replace(target)

        _all(copy, [name for name in self._listed() if _is_copied(name) and name.split("/")[0] in names])

    def push(self) -> None:
        """Upload the small files that are new or have changed since this process uploaded them.

        Raises StorageError also if another machine has taken over the run.
        """
        if not self.is_writer():
            by = json.loads(self._read(WRITTEN_BY) or b"{}").get("host", "nobody")
            raise StorageError(f"{self.root}: this run was taken over by {by}: nothing more is written from here")
        self._push(_is_copied)

    def push_worker_logs(self) -> None:
        """Upload the logs of this node's workers; for the nodes on which rank 0 is not."""
        self._push(lambda name: fnmatchcase(name, "logs/rank-*.log"))

    def _push(self, is_wanted: Callable[[str], bool]) -> None:
        stamps = {name: stamp for name, stamp in file_stamps(self.rundir.root).items() if is_wanted(name)}
        # What was fetched and not changed since is in the store, where another node may have a newer one.
        changed = {name: stamp for name, stamp in stamps.items() if stamp[1] and self._sent.get(name) != stamp}

        def copy(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
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

    def push_export(self, stop: StopRequest, progress: Progress, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Upload the export of the local folder in place of the one in the store, unless that is of the same step.

        It cannot be opened until it is complete. `meanwhile` is called every POLL_S. Raises Stopped after a signal.
        """
        step, files = read_export_record(self.rundir)
        if step is None or self.exported_step() == step:
            return
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
            _all(lambda name: self._put(f"{EXPORT}/{name}", count), group, meanwhile)
        found = self.uploaded_sizes()
        if wrong := [name for name in names if found.get(name) != files[name][0]]:
            raise CheckpointError(f"{target / wrong[0]} has not the size of the file that was uploaded: run again")
        self._put(EXPORT_RECORD)

    def _export_record(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            found = json.loads(self._read(EXPORT_RECORD) or b"{}")
            return found if isinstance(found, dict) and isinstance(found.get("step"), int) else {}
        return {}

    def _listed(self, below: str = "") -> dict[str, int]:
        """Return the names of the objects of the run, and their bytes."""
        folder = self.root / below if below else self.root
        with store_errors(folder):
            found = folder.fs.find(folder.key, detail=True)
        return {key.removeprefix(f"{self.root.key}/"): facts["size"] for key, facts in found.items()}

    def _put(self, name: str, count: Callable[[int], None] = lambda size: None) -> None:
        from fsspec.callbacks import Callback

        class Sent(Callback):
            def relative_update(self, inc: int = 1) -> None:
                count(inc)

        target = self.root / name
        with store_errors(target):
            target.fs.put_file(str(self.rundir.root / name), target.key, callback=Sent())

    def _read(self, name: str) -> bytes | None:
        source = self.root / name
        with contextlib.suppress(FileNotFoundError), store_errors(source):
            return bytes(source.fs.cat_file(source.key))
        return None

    def _write(self, name: str, content: bytes) -> None:
        target = self.root / name
        with store_errors(target):
            target.fs.pipe_file(target.key, content)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            target = self.root / name
            with contextlib.suppress(FileNotFoundError), store_errors(target):
                target.fs.rm_file(target.key)


def _is_copied(name: str) -> bool:
    parts = name.split("/")  # anyone may have written the objects
    known = parts[0] in SMALL and not {"", ".", ".."}.intersection(parts)
    return known and not any(fnmatchcase(name, pattern) for pattern in NOT_COPIED)


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in WEIGHTS)


def _all(copy: Callable[[str], None], names: Iterable[str], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Copy files, AT_ONCE at a time; call `meanwhile` every POLL_S. After an error no further one is begun."""
    failure: BaseException | None = None
    with ThreadPoolExecutor(AT_ONCE, "copy") as pool:
        waiting = {pool.submit(copy, name) for name in names}
        while waiting:
            done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
            meanwhile()
            errors = [each.exception() for each in done if not each.cancelled()]
            failure = failure or next(filter(None, errors), None)
            if failure:
                pool.shutdown(wait=False, cancel_futures=True)
                waiting = {each for each in waiting if not each.cancelled()}  # these are never reported as done
    if failure:
        raise failure
