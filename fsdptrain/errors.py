"""Everything that can end a command, and the exit code it ends with.

    FsdptrainError            1   an internal error, when nothing more exact is known
    ├── RecipeError           2   the recipe or the command line is wrong
    │   └── NoModel           2   a model or tokenizer is not here, nor can the Hub be reached
    ├── DoesNotFit            3   a dry run says that the memory will not do
    ├── DataError             4   the data is wrong: file, line, what was expected
    │   └── NoData            4   there is no data here, nor can the Hub be reached
    ├── WorkerError           5   a worker raised something that is not one of ours: again it would raise the same
    │   └── WorkerLost        5   a worker was killed, hung, or lost its peers: a restart may mend it
    ├── CheckpointError       6   a checkpoint is damaged, or the disk is full
    │   └── OtherVersion      6   a checkpoint is not damaged, but written by another version of fsdptrain
    ├── NonFiniteError        7   the loss or the gradient became NaN or infinite
    └── Stopped              75   stopped by a signal, checkpoint saved: run again to go on

An error crosses from a worker to the command line as its class name and its message (`to_record`, `from_record`), so
that the person sees the failing rank's own words and the shell sees the right code.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass

MAX_MESSAGE_CHARS = 8000  # characters of a message or a traceback that crosses to another process


MAX_LISTED = 30  # names in a list that a message shows


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or this user's share of it


class FsdptrainError(Exception):
    """A failure with a message written for the person at the terminal."""

    exit_code = 1


class RecipeError(FsdptrainError):
    """The recipe or the command line cannot be honoured; nothing was started."""

    exit_code = 2

    def __init__(self, problems: list[Problem] | str) -> None:
        self.problems = [Problem(problems)] if isinstance(problems, str) else problems
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NoModel(RecipeError):
    """A model or tokenizer that is not on this machine, and not to be had from it; another may have it."""


class DoesNotFit(FsdptrainError):
    """What a dry run foresees does not fit into the memory there is."""

    exit_code = 3


class DataError(FsdptrainError):
    """A row, a file or a column is not what the recipe says it is."""

    exit_code = 4


class NoData(DataError):
    """Data that is not on this machine, and not to be had from it; another may have it."""


class WorkerError(FsdptrainError):
    """A worker raised something that is not one of ours."""

    exit_code = 5


class WorkerLost(WorkerError):
    """A worker was killed, hung, or lost its peers: not its code's doing, so the launcher may start it again."""


class CheckpointError(FsdptrainError):
    """A checkpoint is damaged, or there is no room to write one."""

    exit_code = 6


class OtherVersion(CheckpointError):
    """A checkpoint that another version of fsdptrain wrote: nothing is wrong with it, so it is not set aside."""


class NonFiniteError(FsdptrainError):
    """The loss or the gradient norm is NaN or infinite; the weights were not touched."""

    exit_code = 7


class Stopped(FsdptrainError):
    """A signal asked us to stop; whatever could be saved has been."""

    exit_code = 75


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe: where it stands, what stands there, and the way out."""

    message: str
    field: str | None = None
    where: str | None = None  # "recipe.yaml:12", or "command line"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.field, self.message) if part)


_BY_NAME: dict[str, type[FsdptrainError]] = {
    cls.__name__: cls
    for cls in (
        FsdptrainError,
        RecipeError,
        NoModel,
        DoesNotFit,
        DataError,
        NoData,
        WorkerError,
        WorkerLost,
        CheckpointError,
        OtherVersion,
        NonFiniteError,
        Stopped,
    )
}


def to_record(error: BaseException) -> dict[str, str]:
    """The two facts that travel between processes: `{"type": class name, "message": text}`, the text shortened."""
    return {"type": type(error).__name__, "message": shortened(str(error), MAX_MESSAGE_CHARS)}


def is_disk_full(error: BaseException) -> bool:
    """Return whether the system refused to write for want of space, on the disk or in the user's quota."""
    return isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says that is not empty; the name of its class where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shortened(text: str, longest: int = 200) -> str:
    """A text of at most so many characters and a mark: its beginning, and of what is left out the end."""
    if len(text) <= longest:
        return text
    tail = longest // 4
    return f"{text[: longest - tail]} […] {text[-tail:]}"


def listed(names: Iterable[object], most: int = MAX_LISTED) -> str:
    """Names for a message: `a, b, c`, or the first of them and how many more there are."""
    words = [shortened(str(name)) for name in names]
    more = len(words) - most
    return ", ".join(words) if more <= 0 else f"{', '.join(words[:most])}, and {more:,} more"


def from_record(record: dict[str, str]) -> FsdptrainError:
    """The error that `to_record` described; a class that is not ours becomes a `WorkerError` with its name in front."""
    cls = _BY_NAME.get(record["type"])
    if cls is None:
        return WorkerError(f"{record['type']}: {record['message']}")
    return cls(record["message"])
