"""What happens to a process of a history: it is killed, frozen, hangs, or the system refuses it a file, at one moment.

The moment is a count: the n-th time that the process creates, opens for writing, renames or removes a file below the
folder of its history, of all files or of those with some text in their path (`match`). So a history is repeated
exactly, and every state in which a run can be left on the disk has a number. Python calls an audit hook before each of
these; what the hook raises, the caller gets from the system.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HANG_FACTOR = 0.1  # times the usual timeout, so that a hang is noticed soon
FAULT, CLOCK = "HISTORY_FAULT", "HISTORY_CLOCK"  # variables: a fault as JSON; seconds that the clock is ahead
ROLES = {"fsdptrain.launch.agent": "agent", "fsdptrain.train.worker": "worker", "command": "command"}
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NEEDS_SPACE = ("open", "os.mkdir")


def given() -> dict[str, Any]:
    return dict(json.loads(os.environ.get(FAULT, "{}")))


def start(module: str) -> None:
    """Prepare the fault of this process, if its history has one for it, and its clock."""
    role = ROLES.get(module)
    os.environ[f"HISTORY_{role}".upper()] = str(os.getpid())
    # Not of the launcher, which compares it with the times of files: the history moves these after the command.
    if role == "worker" and (ahead := float(os.environ.get(CLOCK, 0))):
        now = time.time
        time.time = lambda: now() + ahead
    fault = given()
    if role and fault.get("role") == role:
        sys.addaudithook(Hook(fault))


class Hook:
    """Counts what the process changes below a folder, and lets the fault happen at the count `at`."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self.below, self.match, self.at, self.do = fault["below"], fault.get("match", ""), fault["at"], fault["do"]
        self.event = fault.get("event", "")
        self.marker = Path(fault["marker"])
        self.count, self.acting, self.process = 0, False, os.getpid()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.acting or not (event in CHANGES or event == "open"):
            return
        if os.getpid() != self.process:  # a process that this one has forked, with a copy of the hook
            return
        path = arguments[0]
        if not isinstance(path, (str, bytes, os.PathLike)) or not os.fsdecode(path).startswith(self.below):
            return
        writes = event != "open" or bool((arguments[2] or 0) & WRITING)
        if self.do == "EIO":  # of a disk that cannot be read
            if not writes and "/step-" in os.fsdecode(path):
                raise self._error(errno.EIO, path)
            return
        paths = " ".join(os.fsdecode(each) for each in arguments[:2] if isinstance(each, (str, bytes, os.PathLike)))
        self.count += writes and self.match in paths and self.event in event
        if writes and self.do == "ENOSPC" and self.count >= self.at and event in NEEDS_SPACE:
            raise self._error(errno.ENOSPC, path)
        if writes and self.count == self.at and self.do != "ENOSPC":
            self.count += 1  # once
            self.acting = True
            self.marker.touch()
            self._act()
            self.acting = False

    def _error(self, number: int, path: Any) -> OSError:
        if not self.acting:
            self.acting = True
            self.marker.touch()
            self.acting = False
        return OSError(number, os.strerror(number), os.fsdecode(path))

    def _act(self) -> None:
        if self.do == "hang":
            time.sleep(3600)
        elif self.do == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            number, _, role = self.do.partition(" ")  # "SIGKILL agent"
            with contextlib.suppress(ProcessLookupError):  # an earlier fault has ended it
                os.kill(int(os.environ[f"HISTORY_{role}".upper()]), signal.Signals[number])
