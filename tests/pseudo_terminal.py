"""Run a command on a pseudo-terminal and read its screen; pyte interprets the escape sequences."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pyte
from forks import take_terminal
from support import environment, how_to_start

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


class Terminal:
    """Run `fsdptrain WORDS` on a terminal of `columns` × `rows`; use it as a context manager.

    `stdout` and `stderr` may be redirected, as by `> file` and `2> file`; the other streams stay on the terminal. It is
    the controlling terminal, so that `press_ctrl_c` reaches every process in the foreground. The command is a fork
    (see `forks`), unless it is `executed`: then its start is seen as well.
    """

    def __init__(
        self, *words: object, columns: int = 80, rows: int = 24, stdout: Any = None, stderr: Any = None,
        executed: bool = False, **extra: str,
    ) -> None:  # fmt: skip
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        env |= {"TERM": "xterm-256color", **extra}
        start = subprocess.Popen if executed else how_to_start(extra)
        self.process = start(
            [sys.executable, "-m", "fsdptrain", *map(str, words)],
            stdin=slave, stdout=stdout or slave, stderr=stderr or slave, env=env, start_new_session=True,
            preexec_fn=take_terminal,
        )  # fmt: skip
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def lines(self) -> list[str]:
        """Return the lines that were scrolled away, then those on the screen, without trailing spaces."""
        width = self._screen.columns
        past = ["".join(line[x].data for x in range(width)).rstrip() for line in self._screen.history.top]
        return [*past, *(line.rstrip() for line in self._screen.display)]

    def display(self) -> list[str]:
        """Return the lines that are on the screen now."""
        return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        """Return `lines` as one text, stripped."""
        return "\n".join(self.lines()).strip()

    def wait_for(self, text: str, timeout: float = 90) -> None:
        """Read until `text` appears, on the screen or scrolled away; fail with the screen after `timeout` seconds."""
        end = time.monotonic() + timeout
        while text not in self.text():
            assert time.monotonic() < end and (self._pump() or self.process.poll() is None), (
                f"no {text!r}:\n{self.text()}"
            )

    def pieces(self) -> list[str]:
        """Return every line that was written, including overwritten ones, as on an infinitely wide terminal."""
        return [piece.rstrip() for piece in re.split(r"[\r\n]+", ESCAPES.sub("", self.raw.decode())) if piece.strip()]

    def resize(self, columns: int) -> None:
        """Change the terminal's width, as when a user drags its window.

        The screen changes after the next redraws: a line of the old width that is on its way when the size changes
        would be wrapped, and no program can prevent that.
        """
        rows = self._screen.lines
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            self._pump()
        self._screen.resize(rows, columns)

    @property
    def cursor_is_reset(self) -> bool:
        """Whether the cursor is visible and at the beginning of a line, as a shell needs it."""
        return not self._screen.cursor.hidden and self._screen.cursor.x == 0

    def type(self, text: str) -> None:
        """Type a text."""
        os.write(self._master, text.encode())

    def press_ctrl_c(self) -> None:
        """Send Ctrl-C."""
        os.write(self._master, b"\x03")

    def hang_up(self) -> None:
        """Close the terminal, as when its window is closed or an SSH connection is lost."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDWR)

    def wait(self, timeout: float = 180) -> int:
        """Read until the process ends; return its exit code."""
        end = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still running:\n{self.text()}"
            self._pump()
        while self._pump():
            pass
        return self.process.returncode

    def _pump(self) -> bool:
        """Feed what is written within a tenth of a second to the screen; return whether there was anything."""
        if not select.select([self._master], [], [], 0.1)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # every process has closed the terminal
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)


def run_on_terminal(*words: object, columns: int = 80, timeout: float = 180, **extra: Any) -> tuple[int, str]:
    """Run a command on a terminal to its end; return its exit code and all that it showed."""
    with Terminal(*words, columns=columns, **extra) as terminal:
        return terminal.wait(timeout), terminal.text()
