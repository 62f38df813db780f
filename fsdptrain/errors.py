"""The exceptions that end a command, with their exit codes.

    FsdptrainError            1   an internal error, if no subclass applies
    ├── RecipeError           2   the recipe or the command line is wrong
    │   ├── NoModel           2   a model or tokenizer is not on this machine, and the Hub cannot be reached
    │   ├── FolderInUse       2   another run uses the run folder
    │   └── Unreadable        2   a file of a run folder is not what fsdptrain writes there
    ├── DoesNotFit            3   a dry run found that the plan does not fit into memory
    ├── DataError             4   the data is wrong: file, line, what was expected
    │   └── NoData            4   the data is not on this machine, and the Hub or store refuses
    ├── WorkerError           5   a worker raised another exception: a restart would raise it again
    │   ├── OutOfMemory       5   a worker needed more memory than its device has
    │   ├── KernelFailed      5   an assert or a wrong address in a GPU's kernel: repeated once with blocking launches
    │   ├── WorkerLost        5   a worker was killed, hung, or lost its peers: a restart may help
    │   │   └── KilledForMemory 5 the kernel killed a worker for full host memory: a restart may help once
    │   └── NotMet            5   the nodes did not meet, so no worker was started
    ├── CheckpointError       6   a checkpoint is damaged, or the disk is full
    │   ├── OtherVersion      6   a checkpoint is intact, but was written by another version of fsdptrain
    │   ├── StorageError      6   a disk or an object store refuses, or does not answer
    │   └── FolderLost        6   the run folder was removed, renamed or replaced while the run used it
    ├── NonFiniteError        7   the loss or the gradient became NaN or infinite
    └── Stopped              75   stopped by a signal, checkpoint saved: run the command again to continue
        └── NodeWaits        75   the workers ended after a checkpoint, so that another node can join them

An error travels from a worker to the command line as its class name and its message (`to_record`, `from_record`). So
the terminal shows the message of the rank that failed, and the shell gets the right exit code.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent
MAX_MESSAGE_CHARS = 8000  # of a message or a traceback that is sent to another process
HUB_UNREACHABLE = "the Hub cannot be reached"
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # the disk or the user's quota is full
# In messages of Python and of Rust, whose libraries (tokenizers, safetensors) raise classes of their own.
DISK_FULL = re.compile(rf"(?:Errno|os error|Os {{ code:) (?:{'|'.join(map(str, DISK_FULL_ERRNOS))})\b")


class FsdptrainError(Exception):
    """A failure with a message that is shown to the user as it is; the base class of all others."""

    exit_code = 1


class RecipeError(FsdptrainError):
    """The recipe or the command line is wrong; nothing was started."""

    exit_code = 2

    def __init__(self, problems: list[Problem] | str) -> None:
        self.problems = [Problem(problems)] if isinstance(problems, str) else problems
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NoModel(RecipeError):
    """A model or tokenizer is not on this machine and cannot be downloaded; another machine may have it."""


class FolderInUse(RecipeError):
    """Another run uses the run folder at this moment."""


class Unreadable(RecipeError, ValueError):
    """A file of a run folder is not what fsdptrain writes there; the message begins with its path."""


class DoesNotFit(FsdptrainError):
    """The memory that a dry run predicts is more than the hardware has."""

    exit_code = 3


class DataError(FsdptrainError):
    """A file, a column or a row is not what the recipe says it is."""

    exit_code = 4


class NoData(DataError):
    """Data is not on this machine and cannot be downloaded; another machine may have it."""


class WorkerError(FsdptrainError):
    """A worker raised an exception that is not an FsdptrainError."""

    exit_code = 5


class OutOfMemory(WorkerError):
    """A worker needed more memory than its device has: a smaller batch may fit."""


class KernelFailed(WorkerError):
    """A kernel failed on a GPU, with an assert or a wrong address: it would again, but then Python can say where."""


class WorkerLost(WorkerError):
    """A worker was killed, hung, or lost its peers: its code is not the cause, so the launcher may restart it."""


class KilledForMemory(WorkerLost):
    """The kernel killed a worker because the memory of its host was full; another process may be the cause."""


class NotMet(WorkerError):
    """The nodes did not meet: one did not answer, or the rendezvous ended before this node could join."""


class CheckpointError(FsdptrainError):
    """A checkpoint is damaged, or there is no disk space to write one."""

    exit_code = 6


class OtherVersion(CheckpointError):
    """A checkpoint was written by another version of fsdptrain; it is intact, so it is not set aside."""


class StorageError(CheckpointError):
    """A disk or an object store refuses or does not answer: what it holds may be intact."""


class FolderLost(CheckpointError):
    """The run folder was removed, renamed or replaced: nothing more is written there, not even this error."""


class NonFiniteError(FsdptrainError):
    """The loss or the gradient norm is NaN or infinite; the weights were not changed."""

    exit_code = 7


class Stopped(FsdptrainError):
    """The run was stopped by a signal, after saving what could be saved."""

    exit_code = 75


class NodeWaits(Stopped):
    """The workers ended after a checkpoint, so that another node can join them: the launcher starts them again."""


@dataclass(frozen=True)
class Problem:
    """One error in a recipe: its location, the field, and a message that says what to do."""

    message: str
    field: str | None = None
    where: str | None = None  # "recipe.yaml:12", or "command line"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.field, self.message) if part)


def to_record(error: BaseException) -> dict[str, str]:
    """Return an error as `{"type": class name, "message": text}`, the text shortened, for another process."""
    return {"type": type(error).__name__, "message": shortened(str(error), MAX_MESSAGE_CHARS)}


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error of the system or of a library is a failed write because the disk or a quota is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in DISK_FULL_ERRNOS
    return not isinstance(error, FsdptrainError) and bool(DISK_FULL.search(str(error)))


def disk_full_error(error: BaseException) -> CheckpointError:
    """Return the error for a write for which `is_disk_full` is true; without a file it may be a temporary one."""
    has_name = getattr(error, "filename", None)
    temporary = "" if has_name else f" (temporary files are in {os.environ.get('TMPDIR', '/tmp')}: see TMPDIR)"
    return CheckpointError(f"no space: {error}{temporary}")


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library in Rust: its class is no Exception, and cannot be imported."""
    return type(error).__name__ == "PanicException"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the one it was raised from or while handling, and so on to the first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or the name of its class if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


CUSTOM_CODE = (
    "has custom code, which is not run: read the code, then pass --trust-remote-code (for a Hub id, also set "
    "model.revision to a full commit)"
)


def error_summary(error: BaseException) -> str:
    """Return the message of an error in one line; for custom code, the message of fsdptrain."""
    if "trust_remote_code" in str(error):
        return f"it {CUSTOM_CODE}"
    lines = str(error).strip().splitlines()
    message = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    plain = isinstance(error, (OSError, ValueError, ImportError)) and message
    return message[:300] if plain else f"{type(error).__name__}: {message[:300]}"


def shortened(text: str, max_chars: int = 200) -> str:
    """Return a text, its middle replaced by `[…]` if it has more than `max_chars` characters."""
    if len(text) <= max_chars:
        return text
    tail = max_chars // 4
    return f"{text[: max_chars - tail]} […] {text[-tail:]}"


def listed(names: Iterable[object], limit: int = 30) -> str:
    """Return names for a message: `a, b, c`, or the first `limit` of them and the number of the others."""
    words = [shortened(str(name)) for name in names]
    more = len(words) - limit
    return ", ".join(words) if more <= 0 else f"{', '.join(words[:limit])}, and {more:,} more"


def killed_by(signal_name: str) -> str:
    """Return `killed by SIGTERM` for a message, with the usual cause of a SIGKILL."""
    return f"killed by {signal_name}" + (" (often because the host memory is full)" if signal_name == "SIGKILL" else "")


def own_frame(frames: Iterable[tuple[str, int, str]]) -> str | None:
    """Return the first frame (file, line, function) of this package as `corpus.batch (corpus.py:112)`."""
    own = ((Path(file), line, name) for file, line, name in frames if Path(file).is_relative_to(PACKAGE))
    return next((f"{file.stem}.{name} ({file.name}:{line})" for file, line, name in own), None)


def from_record(record: dict[str, str]) -> FsdptrainError:
    """Return the error that `to_record` described; any other class becomes a WorkerError that names the class."""
    classes: list[type[FsdptrainError]] = [FsdptrainError]
    for cls in classes:
        if cls.__name__ == record["type"]:
            return cls(record["message"])
        classes += cls.__subclasses__()
    return WorkerError(f"{record['type']}: {record['message']}")


def install_line(extra: str) -> str:
    """Return the command that installs what an extra of this package needs: `pip install 'peft>=0.21'`.

    It names the libraries, not this package, which may come from a folder and not from an index.
    """
    from packaging.requirements import Requirement  # only where something is missing

    wanted = [Requirement(text) for text in importlib.metadata.requires("fsdptrain") or ()]
    of_extra = [each for each in wanted if each.marker and each.marker.evaluate({"extra": extra})]
    return "pip install " + " ".join(f"'{each.name}{each.specifier}'" for each in of_extra)
