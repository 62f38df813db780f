"""Files: what kind they are, errors of the system, unused names, changes that are atomic or durable. No torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from fsdptrain.errors import RecipeError, StorageError, disk_full_error, first_line, is_disk_full

NOTHING_THERE = (FileNotFoundError, NotADirectoryError)  # errors that say that no file has this name

WAYS_OUT = {
    errno.EACCES: "give this user the rights to it",
    errno.EPERM: "give this user the rights to it",
    errno.EIO: "look for errors of the disk in the kernel's log (dmesg)",
    errno.ESTALE: "mount its file system again",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
    errno.ENFILE: "raise the number of open files of this machine (fs.file-max)",
}


@contextlib.contextmanager
def system_errors(path: object) -> Iterator[None]:
    """Raise StorageError for an error of the system about a file or folder: what is there may be intact.

    NOTHING_THERE is raised as it is.
    """
    try:
        yield
    except NOTHING_THERE:
        raise
    except OSError as error:
        place = error.filename or path
        if error.errno == errno.ENAMETOOLONG:  # no file can have this name
            raise FileNotFoundError(error.errno, error.strerror, place) from None
        raise StorageError(f"{place} cannot be read: {system_reason(error)}; nothing was renamed or removed") from error


@contextlib.contextmanager
def write_errors(what: str) -> Iterator[None]:
    """Raise RecipeError for an error of the system with a place that the user has named; a full disk is no such error.

    `what` begins the message: `output_dir: cannot write to PLACE`.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full_error(error) from None
        raise RecipeError(f"{what}: {error.strerror}") from None


def system_reason(error: OSError) -> str:
    """Return why the system refuses, with the number and name of the error and, if known, the way out."""
    if error.errno is None:
        return first_line(error)
    reason = f"{error.strerror} (errno {error.errno}, {errno.errorcode.get(error.errno, 'unknown')})"
    return f"{reason}: {WAYS_OUT[error.errno]}" if error.errno in WAYS_OUT else reason


def is_there(path: Path) -> bool:
    """Return whether a path exists, through links; raise StorageError if the system cannot tell."""
    try:
        with system_errors(path):
            path.stat()
    except NOTHING_THERE:
        return False
    return True


TEMPORARY = ".fsdptrain-*.tmp"  # the name of a file that is not finished


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left of files that they wrote below a folder, in which nobody writes now."""
    for path in folder.rglob(TEMPORARY):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Yield an open file that is renamed to `path` in the end, so that readers see the old content or the new one.

    Others may write the folder: nobody can guess the name of the file, which is new, and no link is ever followed.
    """
    temporary = path.with_name(TEMPORARY.replace("*", secrets.token_hex(8)))
    with temporary.open("xb") as file:
        try:
            yield file
            file.close()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file as `replaced` does."""
    with replaced(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_to_append(path: Path) -> IO[str]:
    """Open a file to which lines are added, which is created if it is missing; a link raises OSError."""
    return open(path, "a", 1, "utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def nearest_hint(path: Path) -> str:
    """Return `; did you mean NAME?` with the path that is there under the most similar name; nothing without one."""
    with contextlib.suppress(OSError, ValueError):
        if near := get_close_matches(path.name, os.listdir(path.parent), n=1):  # noqa: PTH208
            return f"; did you mean {path.with_name(near[0])}?"
    return ""


def shipped(*parts: str) -> Path:
    """Return a file or folder that ships with fsdptrain: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed, checkout = package.joinpath(*parts), package.parent.joinpath(*parts)
    return installed if installed.exists() else checkout


def unused_name(path: Path) -> Path:
    """Return the path if it does not exist, else the first of NAME-2, NAME-3, … that does not."""
    number, unused = 1, path
    while os.path.lexists(unused):
        number += 1
        unused = path.with_name(f"{path.name}-{number}")
    return unused


def set_aside(path: Path) -> None:
    """Rename a file or folder that the user changed to NAME.kept, NAME.kept-2, …"""
    path.rename(unused_name(path.with_name(f"{path.name}.kept")))


def openable(path: Path) -> Path:
    """Return a path that can be opened, for safetensors, which calls every file missing that it cannot open."""
    with system_errors(path), path.open("rb"):
        return path


def regular_file_status(path: Any) -> os.stat_result | None:
    """Return the status of a regular file, or None for a link, a folder or a pipe. Raise OSError for a missing file.

    `path` is a Path, or what stands for one.
    """
    status: os.stat_result = path.lstat()
    return status if stat.S_ISREG(status.st_mode) else None


def is_regular_file(path: Path) -> bool:
    """Return whether the path is a regular file; a link to one is not. Raise StorageError if the system cannot tell."""
    with contextlib.suppress(*NOTHING_THERE), system_errors(path):
        return regular_file_status(path) is not None
    return False


def try_lock(path: Path) -> int | None:
    """Lock a file, which is created if it is missing; return its descriptor, or None if it is locked already.

    The content stays. The lock lasts until the descriptor is closed, also by the end of this process.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it: only a lock on the new file keeps others out


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty temporary folder, which is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="fsdptrain-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder is still the one at `path`: not removed, renamed or replaced.

    A file system that does not answer says nothing, so then it is.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except NOTHING_THERE:
        return False
    except OSError:
        return True


def fsync(path: Path) -> None:
    """Make a file or folder durable, and drop it from the page cache where possible, so that it is read from disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
