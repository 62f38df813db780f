"""Where the checkpoints of a run are: in a local folder, or in an object store through fsspec. No torch.

A checkpoint exists or it does not. In a folder, its files are written under another name, and one rename publishes
them. An object store cannot rename, but an object appears there as a whole or not at all: the files are uploaded first
and the manifest last, and what has no manifest is no checkpoint.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.util
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptrain.errors import CheckpointError, FsdptrainError, StorageError, first_line, install_line, shortened
from fsdptrain.run_folder.files import NOTHING_THERE, fsync, is_regular_file, set_aside, system_errors, unused_name

MANIFEST_NAME = "manifest.json"

# The files of a checkpoint; `.tmp…` are temporary files of safetensors.
CHECKPOINT_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors|manifest\.json|\.tmp\w{6}")

CHECKPOINT_NAME = re.compile(r"step-(0[0-9]{7}|[1-9][0-9]{7,})")
UNFINISHED = re.compile(r"step-[0-9]{8,}\.(?:tmp|old)")  # a save or a removal that was interrupted
URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
LIKE_A_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:/")  # `S3://…` or `s3:/…` would be a folder of that name
MODULES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # scheme → the module that implements it

# A store that does not answer is an error after eight minutes at the most: botocore sends a request up to 4 times, s3fs
# repeats that once, and when it reads an object it repeats both once more, because an answer may also break off.
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 10,
            "read_timeout": 30,
            "retries": {"total_max_attempts": 4, "mode": "standard"},
        }
    }
}

S3FS_TRIES = 2  # its default, 5, is 25 when it reads
READ_BYTES = 2**25  # in one request
EXISTS_ALREADY = "{} exists already and is not overwritten: move it away"
PROBE = ".fsdptrain-probe"  # an object that is written and removed to learn whether that is allowed


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def url_fault(url: str) -> str | None:
    """Return why a URL does not name a place in an object store, with the way out; None if it does or is a path."""
    found = URL.fullmatch(url)
    if not found and LIKE_A_URL.match(url):
        return f"{shortened(url)!r} is neither a folder nor a place in a store: write s3://BUCKET/FOLDER"
    if not found:
        return None
    scheme, place = found.groups()
    if scheme not in MODULES:
        return f"{shortened(url)!r}: {scheme}:// is not supported: use s3://, gs://, az:// or a local folder"
    if "::" in place:
        return f"{shortened(url)!r}: fsspec reads '::' as a chain of two places: rename it (in data, ?? matches it)"
    bucket, _, folder = place.rstrip("/").partition("/")
    if bucket and not folder:
        whole = f"{scheme}://{bucket}/*"
        return f"{shortened(url)!r} is a whole bucket: write {scheme}://BUCKET/FOLDER, or, for data, {whole}"
    if not bucket or not folder or any(part in ("", ".", "..") for part in folder.split("/")):
        return f"{shortened(url)!r} is not a place in a store: write {scheme}://BUCKET/FOLDER"
    if importlib.util.find_spec(MODULES[scheme]) is None:
        return f"{scheme}:// needs {MODULES[scheme]}, which is not installed: {install_line(scheme)}"
    return None


@dataclass(frozen=True)
class ObjectPath:
    """An object or a folder in an object store. What a Path can do as well has the same name.

    Every method raises StorageError if the store refuses or does not answer, so that a checkpoint which cannot be read
    now is not taken for a damaged one.
    """

    fs: Any  # an fsspec.AbstractFileSystem
    key: str

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.key))

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.fs, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The folder of the object."""
        return ObjectPath(self.fs, self.key.rpartition("/")[0])

    def is_symlink(self) -> bool:
        """Return False: object stores have no links."""
        return False

    def lstat(self) -> os.stat_result:
        """Return size and kind of an object; raises FileNotFoundError if there is none."""
        with store_errors(self):
            info = self.fs.info(self.key)
        kind = stat.S_IFREG if info["type"] == "file" else stat.S_IFDIR
        return os.stat_result((kind, 0, 0, 0, 0, 0, info["size"] or 0, 0, 0, 0))

    stat = lstat

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of an object; raises FileNotFoundError if there is none."""
        with store_errors(self):
            return bytes(self.fs.cat_file(self.key, start=start, end=stop))

    def names(self) -> list[str]:
        """Return the names of what is directly below a folder, sorted; those of folders end with a slash."""
        try:
            with store_errors(self):
                found = self.fs.ls(self.key, detail=True)
        except FileNotFoundError:
            return []
        keys = {info["name"].rstrip("/"): "/" * (info["type"] == "directory") for info in found}
        return sorted(key.rpartition("/")[2] + slash for key, slash in keys.items() if key != self.key)

    def write_bytes(self, content: bytes) -> None:
        """Write an object, in place of one that is there."""
        with store_errors(self):
            self.fs.pipe_file(self.key, content)

    def remove(self) -> None:
        """Remove an object if there is one."""
        with contextlib.suppress(FileNotFoundError), store_errors(self):
            self.fs.rm_file(self.key)

    def create(self, content: bytes) -> bool:
        """Create an object; return False if there is one already."""
        try:
            with store_errors(self):
                self.fs.pipe_file(self.key, content, mode="create")
        except StorageError:  # libraries of stores have classes of their own for an object that exists
            with store_errors(self):
                if not self.fs.exists(self.key):
                    raise
            return False
        return True

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open an object for reading, in large pieces; raises FileNotFoundError if there is none."""
        return io.BufferedReader(_ObjectReader(self), READ_BYTES)


Location = Path | ObjectPath


class _ObjectReader(io.RawIOBase):
    def __init__(self, path: ObjectPath) -> None:
        self._path, self._at, self._size = path, 0, path.stat().st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        content = self._path.read(self._at, stop) if stop > self._at else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@contextlib.contextmanager
def store_errors(place: object) -> Iterator[None]:
    """Raise StorageError for all that an object store may raise, except for a missing object."""
    try:
        yield
    except FsdptrainError:
        raise
    except Exception as error:  # libraries of stores have classes of their own
        missing = isinstance(error, FileNotFoundError)
        if missing and "bucket does not exist" not in str(error):
            raise
        elif missing:
            reason = "there is no such bucket: create it, or correct the URL"
        elif isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            reason = "access is refused: check the credentials, which may have expired, and their rights"
        elif isinstance(error, TimeoutError) or any(w in type(error).__name__ for w in ("Timeout", "Connect")):
            reason = "the store does not answer"
        elif "Bad Request" in str(error):  # the answer to a question without a body, which cannot say more
            reason = "the store refuses the request: the credentials may have expired"
        else:
            reason = "the store reports an error"
        raise StorageError(f"{place}: {reason} ({type(error).__name__}: {first_line(error)})") from error


@dataclass(frozen=True)
class CheckpointStorage:
    """The checkpoints of one run, in a folder that all ranks see: `step-N.tmp` is renamed to `step-N` when complete.

    Every rank may read, and calls `staging` and `deliver`; rank 0 does the rest.
    """

    folder: Path  # on the local disk, to which every rank writes

    def __str__(self) -> str:
        return str(self.folder)

    def checkpoint(self, step: int) -> Any:
        """Return the folder of a checkpoint (a Location); it exists only if the checkpoint is complete."""
        return self.folder / checkpoint_name(step)

    def steps(self) -> list[int]:
        """Return the steps that have a published checkpoint, in ascending order; raises StorageError if unknown."""
        return _steps(self._names())

    def staging(self, step: int) -> Path:
        """Return the local folder into which every rank writes its file; `prepare` comes first."""
        return self.folder / f"{checkpoint_name(step)}.tmp"

    def deliver(self, step: int, path: Path) -> Location:
        """Bring a file from the staging folder to where it stays until `publish`; return that place."""
        return path

    def remove_leftovers(self) -> None:
        """Make sure that checkpoints can be written, and remove what an interrupted save or removal left."""
        self._make_folder()
        for path in self.folder.glob("step-*"):
            if UNFINISHED.fullmatch(path.name):
                with contextlib.suppress(OSError, StorageError):
                    remove_checkpoint(path)

    def prepare(self, step: int) -> None:
        """Begin a save; raises CheckpointError if there is such a checkpoint already."""
        scratch = self.staging(step)
        _reject_existing(self.checkpoint(step))
        remove_checkpoint(scratch)
        self._make_folder()
        scratch.mkdir()
        fsync(self.folder)

    def _make_folder(self) -> None:
        """Create the folder if it is missing, but not the one above, which is missing if the run folder was removed."""
        if not self.folder.exists():
            self.folder.mkdir(exist_ok=True)
            fsync(self.folder.parent)

    def publish(self, step: int, manifest: bytes) -> None:
        """Make the checkpoint exist, with this manifest; raises CheckpointError as `prepare` does."""
        scratch, target = self.staging(step), self.checkpoint(step)
        (scratch / MANIFEST_NAME).write_bytes(manifest)
        fsync(scratch / MANIFEST_NAME)
        fsync(scratch)
        _reject_existing(target)  # rename() would replace an empty folder silently
        scratch.rename(target)
        fsync(target.parent)

    def discard(self, step: int) -> None:
        """Remove what a failed save has written."""
        with contextlib.suppress(OSError, StorageError):
            remove_checkpoint(self.staging(step))

    def remove(self, step: int) -> None:
        """Remove a checkpoint, so that a part of it is never taken for a whole one."""
        trash = self.folder / f"{checkpoint_name(step)}.old"
        remove_checkpoint(trash)
        self.checkpoint(step).rename(trash)
        remove_checkpoint(trash)

    def set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint to `.damaged`, `.damaged-2`, …, so that no run loads it; return its new path."""
        folder = self.checkpoint(step)
        aside = unused_name(folder.with_name(f"{folder.name}.damaged"))
        folder.rename(aside)
        fsync(folder.parent)
        return str(aside)

    def other_names(self) -> tuple[list[str], list[str]]:
        """Return the names of what was set aside, and of what an interrupted save or removal left."""
        names = self._names()
        unfinished = [*fnmatch.filter(names, "step-*.tmp"), *fnmatch.filter(names, "step-*.old")]
        return sorted(fnmatch.filter(names, "step-*.damaged*")), unfinished

    def size_of(self, step: int) -> tuple[int, int]:
        """Return the bytes of a checkpoint and the number of its files."""
        sizes = [path.lstat().st_size for path in self.checkpoint(step).rglob("*") if is_regular_file(path)]
        return sum(sizes), len(sizes)

    def _names(self) -> list[str]:
        with contextlib.suppress(*NOTHING_THERE), system_errors(self.folder):
            return os.listdir(self.folder)  # noqa: PTH208
        return []


@dataclass(frozen=True)
class _ObjectStorage(CheckpointStorage):
    """Checkpoints in an object store, as `step-N/…`; the manifest is written last and removed first.

    A rank writes its file to a local folder and uploads it from there: at most one file per rank is on the disk.
    """

    root: ObjectPath

    def __str__(self) -> str:
        return str(self.root)

    def checkpoint(self, step: int) -> ObjectPath:
        return self.root / checkpoint_name(step)

    def steps(self) -> list[int]:
        return _steps(name for name, objects in self._folders().items() if MANIFEST_NAME in objects)

    def staging(self, step: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def deliver(self, step: int, path: Path) -> ObjectPath:
        target = self.checkpoint(step) / path.name
        try:
            with store_errors(target):
                target.fs.put_file(str(path), target.key)
        finally:
            path.unlink(missing_ok=True)
        return target

    def remove_leftovers(self) -> None:
        probe = self.root / PROBE  # a store that refuses is reported before the first step
        probe.write_bytes(b"fsdptrain tries to write here.\n")
        probe.remove()
        for path in self.folder.glob("*"):  # of ranks that were killed in a save
            if CHECKPOINT_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for name in _without_manifest(self._folders()):
            self._remove(name)

    def prepare(self, step: int) -> None:
        self._reject_existing(step)
        self._remove(checkpoint_name(step))

    def publish(self, step: int, manifest: bytes) -> None:
        self._reject_existing(step)
        (self.checkpoint(step) / MANIFEST_NAME).write_bytes(manifest)

    def discard(self, step: int) -> None:
        with contextlib.suppress(CheckpointError):
            self._reject_existing(step)
            self._remove(checkpoint_name(step))

    def remove(self, step: int) -> None:
        self._remove(checkpoint_name(step))

    def set_aside(self, step: int) -> str:
        folders, source = self._folders(), checkpoint_name(step)
        names = (f"{source}.damaged" + (f"-{n}" if n > 1 else "") for n in range(1, len(folders) + 2))
        aside = next(name for name in names if name not in folders)
        for name in folders[source]:
            old, new = self.root / source / name, self.root / aside / name
            with store_errors(old):
                old.fs.cp_file(old.key, new.key)
        self._remove(source)
        return str(self.root / aside)

    def other_names(self) -> tuple[list[str], list[str]]:
        folders = self._folders()
        return sorted(name for name in folders if ".damaged" in name), _without_manifest(folders)

    def size_of(self, step: int) -> tuple[int, int]:
        sizes = self._folders().get(checkpoint_name(step), {}).values()
        return sum(sizes), len(sizes)

    def _folders(self) -> dict[str, dict[str, int]]:
        with store_errors(self.root):
            found = self.root.fs.find(self.root.key, detail=True)
        folders: dict[str, dict[str, int]] = {}
        for key, info in found.items():
            folder, _, name = key.removeprefix(f"{self.root.key}/").partition("/")
            if name and "/" not in name:
                folders.setdefault(folder, {})[name] = info["size"]
        return folders

    def _remove(self, folder: str) -> None:
        """Remove the files of a checkpoint, the manifest first; other objects stay."""
        names = [name for name in self._folders().get(folder, {}) if CHECKPOINT_FILE.fullmatch(name)]
        for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
            (self.root / folder / name).remove()

    def _reject_existing(self, step: int) -> None:
        target = self.checkpoint(step)
        with contextlib.suppress(FileNotFoundError):
            (target / MANIFEST_NAME).lstat()
            raise CheckpointError(EXISTS_ALREADY.format(target))


def open_storage(path: str | None, folder: Path) -> CheckpointStorage:
    """Return the storage at `path`, a URL or a local folder; if None, that in `folder` of the run.

    Raises StorageError for a URL that cannot be used (see `url_fault`).
    """
    found = URL.fullmatch(path or "")
    if not found:
        return CheckpointStorage(Path(path) if path else folder)
    if fault := url_fault(found[0]):
        raise StorageError(f"checkpoint.path: {fault}")
    return _ObjectStorage(folder / "upload", object_path(found[0]))


def object_path(url: str) -> ObjectPath:
    """Return the object or folder at a URL without fault; raises StorageError if the store cannot be used."""
    import fsspec

    with store_errors(url):
        options = OPTIONS.get(url.partition(":")[0], {})
        fs, key = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    if url.startswith("s3:"):
        fs.retries = S3FS_TRIES  # an attribute only
    return ObjectPath(fs, key.rstrip("/"))


def _without_manifest(folders: dict[str, dict[str, int]]) -> list[str]:
    return sorted(name for name, objects in folders.items() if _steps([name]) and MANIFEST_NAME not in objects)


def _steps(names: Iterable[str]) -> list[int]:
    matches = (CHECKPOINT_NAME.fullmatch(name) for name in names)
    return sorted(int(match.group(1)) for match in matches if match)


def _reject_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(EXISTS_ALREADY.format(target))


def remove_checkpoint(folder: Path) -> None:
    """Remove the files of a checkpoint and its folder; a folder with other files is renamed to NAME.kept."""
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.iterdir():
            if CHECKPOINT_FILE.fullmatch(path.name) and is_regular_file(path):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
    if os.path.lexists(folder):
        set_aside(folder)
