"""Start `python -m MODULE …` and `python -c CODE …` as forks of a process that has imported everything.

Importing torch and transformers takes an interpreter five seconds, and a run has three of them: a suite of hundreds of
commands would do little else. `Command` is a `subprocess.Popen` whose process a server forks in milliseconds, and the
children that fsdptrain starts with `processes.child_command` are forks of their parents (`Forked`). Code, environment,
signals, parents and exit codes are those of a process of its own. Different are the moment of the imports, and what
Python reads only at its start: options as `-X`, the encodings of the streams. Tests of those, and of what a person sees
of a start, use `subprocess.Popen`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import fsdptrain
from fsdptrain import processes
from fsdptrain.launch.launcher import GLIBC_TUNABLES

LONGEST_COMMAND_LINE = 2**14  # bytes that /proc can show of a forked process
SERVER = "FSDPTRAIN_TESTS_SERVER"  # the address, without its zero, of the server that workers of pytest-xdist share
# What is imported besides: by ranks, and by workers of pytest-xdist.
ALSO = (
    "ranks", "transformers.models.llama.modeling_llama", "transformers.generation.utils", "hypothesis", "peft", "s3fs",
)  # fmt: skip


class Command(subprocess.Popen[Any]):
    """A `Popen` of `[sys.executable, "-m" or "-c", …]` that a server forks: that of this process, or another."""

    def __init__(self, args: Any, *, server: str | None = None, **options: Any) -> None:
        """`server` is the address of its socket."""
        self._address = server or server_of_this_session()
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (_, preexec_fn, _, pass_fds, cwd, env, _, _, _, *pipes, _, _, _, _, _, new_session, _) = rest
        assert args[0] == sys.executable and not pass_fds and preexec_fn in (None, take_terminal), args
        request = {
            "words": list(map(os.fspath, args[1:])), "cwd": os.fspath(cwd or Path.cwd()), "new_session": new_session,
            "takes_terminal": preexec_fn is take_terminal,
            "env": dict(os.environ if env is None else env),
        }  # fmt: skip
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(self._address)
        socket.send_fds(self._server, [b"\n"], childs_ends(pipes))
        self._server.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._server.makefile("r")
        if not (number := self._answers.readline()):
            raise RuntimeError(f"the server {self._address[1:]} has ended")
        self.pid = int(number)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._server.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code. Raise subprocess.TimeoutExpired after `timeout`."""
        if self.returncode is None and not select.select([self._server], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code


@functools.cache
def server_of_this_session() -> str:
    """Return the address of the server's socket: of that in SERVER, or of one that is started now."""
    if SERVER in os.environ:
        return f"\0{os.environ[SERVER]}"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return start_server("forks", "", {**os.environ, "PYTHONPATH": path})[0]


def start_server(
    module: str, folder: object, env: Mapping[str, str], **options: Any
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a module that calls `serve`, in a process that ends with this one; return its address and its process."""
    address = f"\0{module} for {os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        words = [sys.executable, "-m", module, str(listener.fileno()), str(os.getpid()), str(folder)]
        # Threads do not survive a fork, and those of many processes on two cores wait for each other.
        env = {**env, "OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1", "HF_HUB_OFFLINE": "1"}
        env["GLIBC_TUNABLES"] = GLIBC_TUNABLES  # as of workers: forks keep them
        room = " " * LONGEST_COMMAND_LINE
        return address, subprocess.Popen([*words, room], pass_fds=[listener.fileno()], env=env, **options)


class Forked(subprocess.Popen[bytes]):
    """A `Popen` that forks this process where it would start `python -m fsdptrain.processes`."""

    started: Callable[[str], object] = staticmethod(lambda module: None)  # is called in the fork with its module

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [os.fsdecode(word) for word in args] if isinstance(args, list) else []
        niceness, words = (int(words[2]), words[3:]) if words[:2] == ["nice", "-n"] else (0, words)
        if words[1:3] != ["-m", "fsdptrain.processes"]:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        (_, _, _, pass_fds, _, env, _, _, _, *pipes, _, _, _, _, _, new_session, _) = rest
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return

        def prepare() -> None:
            os.nice(niceness)
            become(words[1:], env or os.environ, new_session)
            self.started(words[4])

        run_as_new(prepare, childs_ends(pipes), set(pass_fds))


def childs_ends(pipes: list[int]) -> list[int]:
    """Return the standard streams of a child, of `Popen`'s six ends of pipes: -1 is the stream of this process."""
    return [pipe if pipe != -1 else standard for standard, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]


def run_as_new(prepare: Callable[[], object], streams: Iterable[int], kept: Iterable[int] = ()) -> NoReturn:
    """Run what `prepare` leaves in `sys.orig_argv` as if an interpreter had just been started, and end the process.

    `streams` become its standard streams. Every other descriptor but those `kept` is closed, as by an exec: a lock is
    held until all copies of its descriptor are closed.
    """
    code = 1
    atexit._clear()  # what libraries registered in the server takes 0.07 s
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        copies = [fcntl.fcntl(stream, fcntl.F_DUPFD, 3) for stream in streams]
        for target, copy in enumerate(copies):
            os.dup2(copy, target)
        for link in [*Path("/proc/self/fd").iterdir()]:
            if int(link.name) not in {0, 1, 2, *kept}:
                with contextlib.suppress(OSError):
                    os.close(int(link.name))
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            mode, buffering = "w" if descriptor else "r", 1 if name == "stderr" else -1
            setattr(sys, name, os.fdopen(descriptor, mode, buffering, errors=getattr(sys, name).errors, closefd=False))
        prepare()
        run(sys.orig_argv[1:])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def become(words: list[str], env: Any, new_session: bool) -> None:
    """Give this process the words, the environment and the session of an interpreter that was started with them."""
    if new_session:
        os.setsid()
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]  # noqa: PTH109
    sys.path[:] = [*here, *folders, *(path for path in sys.path[1:] if path not in before)]
    sys.orig_argv = [sys.executable, *words]
    show_command_line(sys.orig_argv)
    for folder in folders:
        if (Path(folder) / "sitecustomize.py").exists():
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
            break


def take_terminal() -> None:
    """Make the terminal that of this process, with the signals of a new shell: tests may run under `nohup`."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def show_command_line(words: list[str]) -> None:
    """Write a command line to where /proc shows that of this process, and the server has left room for it."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run(words: list[str]) -> None:
    words = words[1:] if words[0] == "-u" else words  # of pytest-xdist, which flushes what it writes
    option, what, *_ = words
    assert option in ("-c", "-m"), f"a fork cannot run {option}: start it with `executed`"
    sys.argv = words[:1] + words[2:]
    if option == "-c":
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)
        return
    module = importlib.import_module(what)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{what}.__main__")
    sys.argv[0] = str(module.__file__)
    module.main()


def import_everything() -> None:
    """Import all modules of fsdptrain, what it imports only when it is used, and what runs on ranks."""
    for module in pkgutil.walk_packages(fsdptrain.__path__, "fsdptrain."):
        importlib.import_module(module.name)
    for name in ALSO:
        importlib.import_module(name)


def serve(
    listener: socket.socket,
    before: Callable[[], object] = lambda: None,
    started: Callable[[], object] = lambda: None,
) -> NoReturn:
    """Fork a process for each connection; answer with its process id, and with its exit code when it ends.

    `before` is called before each fork in this process, `started` in the fork.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    connections: dict[int, socket.socket] = {}
    server = os.getpid()
    while True:
        ready, _, _ = select.select([listener, read], [], [])
        if read in ready:
            os.read(read, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] in connections:
                        answer(connections.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]), last=True)
        if listener in ready:
            connection, _ = listener.accept()
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("r") as lines:
                request = json.loads(lines.readline())
            before()
            if (child := os.fork()) == 0:
                run_as_new(functools.partial(prepare, request, server, started), streams)
            for stream in streams:
                os.close(stream)
            connections[child] = connection
            answer(connection, child)


def answer(connection: socket.socket, number: int, last: bool = False) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % number)
    if last:
        connection.close()


def prepare(request: dict[str, Any], server: int, started: Callable[[], object]) -> None:
    """Make this fork the process of a request. It ends with the server, even if it is frozen."""
    processes.die_with_parent(server)
    os.chdir(request["cwd"])
    become(request["words"], request["env"], request["new_session"])
    if request["takes_terminal"]:
        take_terminal()
    started()


def begin() -> tuple[socket.socket, str]:
    """Import everything in a server; return its socket, and the folder that `start_server` was given."""
    _, descriptor, parent, folder, _ = sys.argv
    processes.die_with_parent(int(parent))
    import_everything()
    subprocess.Popen = Forked  # type: ignore[misc]
    return socket.socket(fileno=int(descriptor)), folder


def main() -> None:
    listener, _ = begin()
    gc.collect()
    gc.freeze()  # the collector of a fork would touch, and so copy, every page
    serve(listener)


if __name__ == "__main__":
    main()
