"""Bind child processes to their parent; output errors never end a process.

`python -m fsdptrain.processes PARENT MODULE [argument]…` calls `main` of a module of ours in a child of process PARENT.
It binds the child to its parent first, and imports the module, which may take ten seconds, only then.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import importlib
import io
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNAL = signal.SIGUSR1  # what a worker of ours takes for "save and leave"


class StopRequest:
    """Counts the stop signals this process gets while it is entered: one asks, the second means now."""

    def __init__(self, *signals: signal.Signals) -> None:
        hung_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # as nohup makes it
        own = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *((signal.SIGHUP,) if hung_up else ()))
        self.signals = signals or own
        self.count = 0
        self.name = ""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.name = signal.Signals(number).name

    @property
    def by(self) -> str:
        """What asked last, in words: `Ctrl-C` or the signal's name; empty when nothing did."""
        return "Ctrl-C" if self.name == "SIGINT" else self.name


PR_SET_PDEATHSIG = 1


PARENT_POLL_S = 0.25  # how often a process looks whether its parent lives, where the kernel does not tell


EXIT_ORPHANED = 5  # the exit code of a process that lost its parent: WorkerLost's


EXIT_DISK_FULL = 6  # and of one whose output is lost: that of a full disk


NO_READER_ERRNOS = (errno.EPIPE, errno.EBADF, errno.EIO)  # nobody reads on: a closed pipe, descriptor or terminal


# What we print, for an encoding that has no such characters; others are escaped.
ASCII_FORMS: dict[str, str] = {
    "·": "-", "×": "x", "…": "...", "→": "->", "–": "-", "⟦": "[[", "⟧": "]]", "█": "#", "▏": "|", "│": "|",
    "─": "-", "━": "-",
    **{chr(spinner): "*" for spinner in range(0x2800, 0x2900)},
}  # fmt: skip


def child_command(module: str, *words: object) -> list[bytes]:
    """The command that calls `main` of a module of ours in a child of this process, which ends when this one does.

    Start it from a thread that lives as long as the child should: the kernel counts the end of that thread as the
    parent's. As bytes, for a locale's own encoding may lack what the words hold; children read UTF-8.
    """
    return [word.encode("utf-8", "surrogateescape") for word in (sys.executable, *child_arguments(module, *words))]


def child_arguments(module: str, *words: object) -> list[str]:
    """That command without the interpreter, for those who start a child in our stead."""
    return ["-m", "fsdptrain.processes", str(os.getpid()), module, *map(str, words)]


def child_environment() -> dict[str, str]:
    """Our environment, for a child that finds this package but no module that lies in the working folder.

    In every locale it reads and writes files as UTF-8; its standard streams have the encoding of ours.
    """
    package = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    ours = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "PYTHONUTF8": "1", "PYTHONIOENCODING": encoding}
    return {**os.environ, **ours}


def die_with_parent(parent: int) -> None:
    """End this process as soon as `parent`, which started it, is gone; at once if it is gone already.

    Linux kills a process when its parent dies, even one that hangs in C; elsewhere a thread looks.
    """
    linux = sys.platform.startswith("linux")
    if not linux or ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        watch_parent(parent)
    if os.getppid() != parent:  # before we asked. Not "is 1 now": a subreaper adopts orphans too
        os._exit(EXIT_ORPHANED)


def watch_parent(parent: int) -> None:
    """End this process soon after `parent` is gone, from a thread of its own.

    For a process that somebody else has started, maybe from a thread that ends long before its process does.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=look, name="parent", daemon=True).start()


class NonRaisingFile(io.FileIO):
    """A descriptor that is printed to. What cannot be written is dropped, and the first reason why is kept."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write some of the data, waiting where a descriptor does not block; say how many bytes are dealt with."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes


def open_safe_streams() -> None:
    """Let standard output and error print whatever they are given, wherever they lead, without ever raising.

    A descriptor that is closed leads nowhere from now on: the next file that is opened would take its place, and then
    what is printed. Characters that an encoding lacks are spelled out.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    codecs.register_error("fsdptrain.plain", _spelled_out)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", None) or "utf-8"
        raw = io.BufferedWriter(NonRaisingFile(descriptor, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, encoding, "fsdptrain.plain", line_buffering=True))


def exit_after_printing(code: int) -> NoReturn:
    """Exit with `code`, or with EXIT_DISK_FULL if a successful command could not write its standard output."""
    sys.stdout.flush()
    lost = getattr(getattr(sys.stdout.buffer, "raw", None), "lost", None)
    if lost and lost.errno not in NO_READER_ERRNOS and not code:
        print(f"fsdptrain: standard output cannot be written: {lost.strerror}", file=sys.stderr)
        code = EXIT_DISK_FULL
    sys.exit(code)


def _spelled_out(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = "".join(ASCII_FORMS.get(character, character) for character in error.object[error.start : error.end])
    return text.encode("ascii", "backslashreplace").decode(), error.end


def main() -> None:
    """Be a child: bound to its parent, with streams that last, then whatever the module does."""
    parent, module, *words = sys.argv[1:]
    die_with_parent(int(parent))
    open_safe_streams()
    sys.argv = [module, *words]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
