"""Child processes that end with their parent and exchange records with it, stop signals, and safe standard streams.

`python -m fsdptrain.processes PARENT MODULE [argument]…` runs `MODULE.main()` in a child of process PARENT. The child
binds itself to its parent before it imports the module, because the import may take ten seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import io
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, TYPE_CHECKING, Any, NoReturn

from fsdptrain.errors import CheckpointError, Stopped, WorkerLost, killed_by
from fsdptrain.text import printable

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

STOP_SIGNAL = signal.SIGUSR1  # tells a worker to save a checkpoint and exit
JOIN_SIGNAL = signal.SIGUSR2  # tells a worker to exit after its next checkpoint, because another node waits to join

# A SIGTERM so soon after another is the same request: at a time limit, Slurm sends it to a step, and to its job.
SAME_REQUEST_S = 0.7

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that the terminal or the system sends to a group


class Interrupted(BaseException):
    """A stop signal came; no `except Exception` of a library may take it for an error of its own."""


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise Interrupted: the handler of Ctrl-C in a command that has nothing to save."""
    raise Interrupted


class StopRequest:
    """Count stop signals while entered. The first one requests an orderly stop, the second an immediate one."""

    def __init__(self, *signals: signal.Signals) -> None:
        default = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
            default.append(signal.SIGHUP)
        self.signals = signals or tuple(default)
        self.count = 0
        self.name = ""
        self._last = float("-inf")  # when the last signal came that was not a repetition
        self._before: dict[signal.Signals, object] = {}
        self._raises = False

    def __enter__(self) -> StopRequest:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Slurm sends SIGUSR1 before the time limit, and twice SIGTERM at the limit or for scancel: one request.
        now, before = time.monotonic(), self.name
        again = number == signal.SIGTERM and self.count > 0 and now - self._last <= SAME_REQUEST_S
        if not again:
            self._last = now
            self.count += not (number == signal.SIGTERM and before == "SIGUSR1")
        self.name = signal.Signals(number).name
        if self._raises:
            self._raises = False  # a second signal must not interrupt what the first one ends
            raise Interrupted

    @contextlib.contextmanager
    def obeyed_at_once(self, outcome: str = "before the first step; nothing was lost") -> Iterator[None]:
        """Raise Stopped wherever the first stop signal comes inside the context, which must have nothing to save.

        What the context has begun is undone by its own context managers, which later signals do not interrupt.
        """
        try:
            self._raises = True
            if self.count:
                raise Interrupted
            yield
        except Interrupted:
            raise Stopped(f"stopped by {self.by} {outcome}") from None
        finally:
            self._raises = False

    @property
    def by(self) -> str:
        """The last stop signal as shown to the user: `Ctrl-C` or its name; empty if none has come."""
        return "Ctrl-C" if self.name == "SIGINT" else self.name


@contextlib.contextmanager
def memory_limited_to(more: int) -> Iterator[None]:
    """Let allocations fail inside the context when this process uses `more` bytes more than before."""
    in_use = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = min(each for each in (in_use + more, soft, hard) if each != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


PROGRAM = "FSDPTRAIN_PROGRAM"  # the variable with the process of a Python program that waits for a command
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that the kernel sends to this process when its parent dies
PR_SET_NAME = 15  # prctl(2): the name of this thread, and of the process if it is the first thread
PARENT_POLL_S = 0.25  # between checks whether a foreign program, the parent, is alive
ANSWER_POLL_S = 0.05  # between two calls of what a parent does while it waits for an answer
NO_READER_ERRNOS = (errno.EPIPE, errno.EBADF, errno.EIO)  # a closed pipe, a closed descriptor, a closed terminal


def child_command(module: str, *words: object) -> list[bytes]:
    """Return the command that runs `main` of a module in a child process, which ends when this process does.

    Start it from a thread that lives as long as the child should, because the kernel treats the end of that thread as
    the end of the parent. The words are UTF-8 bytes, because the locale's encoding may lack some of their characters.
    """
    return [word.encode("utf-8", "surrogateescape") for word in (sys.executable, *child_arguments(module, *words))]


def child_arguments(module: str, *words: object) -> list[str]:
    """Return `child_command` without the interpreter, for a library that starts the child itself."""
    return ["-m", "fsdptrain.processes", str(os.getpid()), module, *map(str, words)]


def threads_for(cores: int) -> int:
    """Return how many threads of OpenMP compute on this many cores: one each, but no more than OMP_THREAD_LIMIT.

    With more of them, torch's products in bfloat16 on a CPU are wrong or NaN: oneDNN leaves out the share of those that
    do not start.
    """
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    return max(1, min(cores, int(limit)) if limit.isdecimal() else cores)


def child_environment() -> dict[str, str]:
    """Return the environment of a child: it can import this package, and nothing from the working folder.

    The child reads and writes files as UTF-8 in every locale; its standard streams have the encoding of this process.
    """
    package = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    settings = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "PYTHONUTF8": "1", "PYTHONIOENCODING": encoding}
    return {**os.environ, **settings}


def import_and_freeze(name: str) -> ModuleType:
    """Import a module without garbage collection, and leave what exists then out of all later collections.

    Of the 5 s to import torch and transformers the collector would take 0.5 s. Forked processes go on sharing the pages
    that no collection touches.
    """
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def name_process(name: str) -> None:
    """Give this process a name (15 bytes) for `top` and `pgrep`: a forked one has its parent's command line."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


class Child:
    """A process that exchanges records with this one: lines of JSON over pipes. It ends with this process.

    It starts to import `module` at once, before it gets its first record. Its other end are `records_of_parent` and
    `answer_parent`.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str] | None = None, niceness: int = 0, keep_errors: bool = False
    ) -> None:
        """`keep_errors`: what it writes to standard error is not shown, but kept for `errors`."""
        self._errors = tempfile.TemporaryFile() if keep_errors else None  # noqa: SIM115
        command = child_command(module)
        self._process = subprocess.Popen(
            ["nice", "-n", str(niceness), *command] if niceness else command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment or child_environment(),
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the child
        )  # fmt: skip
        if niceness:  # with autogroup, Linux ignores the niceness of a process and uses that of its session
            with contextlib.suppress(OSError):
                Path(f"/proc/{self._process.pid}/autogroup").write_bytes(str(niceness).encode())

    def send(self, record: Mapping[str, Any]) -> None:
        """Send a record. If the process has ended, nothing happens: `records` has no more."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(record).encode() + b"\n")
            self._process.stdin.flush()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that the process writes, until it ends."""
        assert self._process.stdout
        while (line := self._process.stdout.readline()).endswith(b"\n"):
            yield json.loads(line)

    def content(self, count: int) -> bytes:
        """Return the `count` bytes that follow a record."""
        assert self._process.stdout
        return self._process.stdout.read(count)

    def ask(
        self, record: Mapping[str, Any], wait: Callable[[], None] | None = None, limit_s: float = math.inf
    ) -> dict[str, Any] | None:
        """Send a record and return the answer, or None if the process ends without one.

        `wait` is called until the answer comes, and may raise. Raises TimeoutError if it does not come in `limit_s`.
        """
        self.send(record)
        end = time.monotonic() + limit_s
        while wait and not self._answers():
            if time.monotonic() > end:
                raise TimeoutError
            wait()
        return next(self.records(), None)

    def _answers(self) -> bool:
        """Return whether something can be read by now: an answer, or that the process has ended."""
        assert self._process.stdout
        ready = select.poll()  # `select` knows descriptors up to 1023: rank 0 may have more, one for each other rank
        ready.register(self._process.stdout, select.POLLIN)
        return bool(ready.poll(1000 * ANSWER_POLL_S))

    @property
    def code(self) -> int:
        """The exit code of a process that has no more records."""
        return self._process.wait()

    @property
    def killed(self) -> str:
        """What killed a process that has no more records, for a message; empty if it ended by itself."""
        return killed_by(signal.Signals(-self.code).name) if self.code < 0 else ""

    def errors(self) -> str:
        """Return what a process that has ended has written to standard error."""
        assert self._errors
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def last_error(self) -> str:
        """Return the last line of standard error that names an error, else its last line; empty without any."""
        lines = [line.strip() for line in self.errors().splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")

    def close(self) -> None:
        """End the process; an answer that another thread waits for does not come."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def records_of_parent() -> Iterator[dict[str, Any]]:
    """Yield the records that the parent sends to this process, a `Child`."""
    return map(json.loads, sys.stdin.buffer)


def answer_parent() -> Callable[..., None]:
    """Return a function that writes a record to the parent, and then bytes if there are any.

    From now on, what libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def answer(record: Mapping[str, Any], content: bytes = b"") -> None:
        answers.write(json.dumps(record).encode() + b"\n" + content)
        answers.flush()

    return answer


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent process `parent` ends, even if it hangs in C code.

    It ends at once if its parent has ended already.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl. The new parent need not be 1: a subreaper adopts orphans too
        os._exit(WorkerLost.exit_code)


FORK_SERVER_OF = "FSDPTRAIN_FORK_SERVER_OF"  # the variable with the process that starts a server

if FORK_SERVER_OF in os.environ:  # this is the server, which imports this module first
    die_with_parent(int(os.environ.pop(FORK_SERVER_OF)))
    os.register_at_fork(after_in_child=partial(die_with_parent, os.getpid()))


def forked_after_import(module: str) -> ForkServerContext:
    """Return a context whose processes have imported a module, share its memory, and end with this process.

    They are forked by a server. Python's own server would wait, once it has imported all, until its forks have ended.
    """
    from multiprocessing import forkserver, get_context

    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, module])
    os.environ[FORK_SERVER_OF] = str(os.getpid())
    forkserver.ensure_running()
    del os.environ[FORK_SERVER_OF]
    return context


def watch_parent(parent: int, send: signal.Signals | None = None) -> None:
    """Start a thread that ends this process, or sends it a signal, soon after `parent` has ended.

    Use it in a process that a foreign program started: its starting thread may end long before the program does.
    """

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), send) if send else os._exit(WorkerLost.exit_code)

    threading.Thread(target=poll, name="parent", daemon=True).start()


class NonRaisingFile(io.FileIO):
    """A descriptor whose writes never raise: data that cannot be written is dropped, and the first error is kept."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write some of the data, waiting if the descriptor is non-blocking; return the bytes written or dropped."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            self.lost = self.lost or error
            return memoryview(data).nbytes


class VisibleText(io.TextIOWrapper):
    """A stream that makes control characters visible, which a terminal would obey: what is printed may be foreign.

    Its `styled` writes everything to the same place, for colours: see `terminal.page.Terminal`.
    """

    def __init__(self, buffer: IO[bytes], encoding: str) -> None:
        """Characters that the encoding lacks are escaped."""
        super().__init__(buffer, encoding, "backslashreplace", line_buffering=True, write_through=True)
        self.styled = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True, write_through=True)

    def write(self, text: str) -> int:
        """Write a text with its control characters visible."""
        super().write(printable(text))
        return len(text)


def open_safe_streams() -> None:
    """Replace standard output and error by streams that never raise, whatever is printed and wherever it goes.

    A closed descriptor (0 to 2) is opened on /dev/null; otherwise the next file to be opened would get its number and
    the printed text.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", None) or "utf-8"
        buffer = io.BufferedWriter(NonRaisingFile(descriptor, "w", closefd=False))
        setattr(sys, name, VisibleText(buffer, encoding))


def exit_after_printing(code: int) -> NoReturn:
    """Exit with `code`, or as on a full disk if a successful command could not write its standard output."""
    sys.stdout.flush()
    lost = getattr(getattr(sys.stdout.buffer, "raw", None), "lost", None)
    if lost and lost.errno not in NO_READER_ERRNOS and not code:
        print(f"fsdptrain: standard output cannot be written: {lost.strerror}", file=sys.stderr)
        code = CheckpointError.exit_code
    sys.exit(code)


def main() -> None:
    """Bind this process to its parent, make its streams safe, and run `main` of the module on the command line."""
    parent, module, *words = sys.argv[1:]
    die_with_parent(int(parent))
    open_safe_streams()
    sys.argv = [module, *words]
    import_and_freeze(module).main()


if __name__ == "__main__":
    main()
