"""Start commands in the server of histories, and wait for them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import Command, start_server
from histories import world
from histories.faults import CLOCK, FAULT
from support import ROOT, TESTS, environment, python_path, send_all

LONGEST_S = 60.0  # until a command of a history must have ended; it takes less than one second
STACKS = signal.SIGRTMAX  # lets a process write where it is


@dataclass(frozen=True)
class Ended:
    """How a command ended: its words, exit code (negative: killed by that signal) and output."""

    words: list[str]
    code: int
    text: str
    happened: bool  # its fault
    killed: bool  # the fault was a kill: processes could not clean up
    started: float


@dataclass
class Started:
    server: Server
    words: list[str]
    process: Command
    output: Path
    marker: Path
    fault: dict[str, Any]
    started: float

    def wait(self) -> Ended:
        try:
            code = self.process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.words} did not end\n{self.server.stacks(self.process.pid)}") from None
        text, happened = self.output.read_text(errors="replace"), self.marker.exists()
        killed = happened and self.fault.get("do", "").startswith("SIGKILL")
        self.output.unlink()
        self.marker.unlink(missing_ok=True)
        return Ended(self.words, code, text, happened, killed, self.started)

    def frozen(self) -> list[int]:
        return [number for number in self.server.processes(self.process.pid) if state_of(number) == "T"]

    def thaw(self) -> None:
        send_all(signal.SIGCONT, self.frozen())

    def wait_for_fault(self) -> bool:
        """Wait until its fault happens or it ends; return whether it runs, with the fault."""
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            if self.marker.exists():
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.002)
                return False
        raise AssertionError(f"{self.words} neither ended nor had its fault")


class Server:
    """The process that forks commands; `folder` is where it has trained an undisturbed run (`warm/`)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "history"
        self._number = 0
        world.register_store(self.root / "store")
        for name in ("out", "tmp"):
            (folder / name).mkdir(parents=True)
        self._env = environment(
            PYTHONPATH=python_path(ROOT, TESTS), FSDPTRAIN_CACHE=str(folder / "cache"), HF_HOME=str(folder / "hf"),
            TMPDIR=str(folder / "tmp"), CUDA_VISIBLE_DEVICES="",
        )  # fmt: skip
        with (folder / "server.log").open("wb") as log:
            self._address, self._process = start_server("histories.server", folder, self._env, stdout=log, stderr=log)
        self.run("--version")  # waits until the server has trained

    def start(self, *words: object, fault: dict[str, Any] | None = None, ahead: float = 0.0) -> Started:
        """Start a command, with a fault (see `faults`) in one of its processes, and with a clock that is `ahead`."""
        self._number += 1
        output, marker = (self.folder / "out" / f"{self._number}.{kind}" for kind in ("txt", "happened"))
        given = {**fault, "below": str(self.root), "marker": str(marker)} if fault else {}
        env = {FAULT: json.dumps(given), CLOCK: str(ahead)}
        command = [sys.executable, "-m", "fsdptrain", *map(str, words)]
        with output.open("wb") as stream:
            process = Command(
                command, server=self._address, env=self._env | env, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=stream, start_new_session=True,
            )  # fmt: skip
        return Started(self, command[3:], process, output, marker, fault or {}, time.time())

    def run(self, *words: object, **how: Any) -> Ended:
        return self.start(*words, **how).wait()

    def stacks(self, process: int) -> str:
        """Return where a process and those that it has started are; they write it to their standard errors."""
        found = self.processes(process)
        send_all(STACKS, found)
        time.sleep(1.0)
        texts = {path.read_text(errors="replace")[-6000:] for number in found if (path := Path(f"/proc/{number}/fd/2"))}
        return "\n".join([*(f"{number}: {state_of(number)}" for number in found), *texts])

    def processes(self, of: int | None = None) -> list[int]:
        """Return the processes that commands have started and that have not ended; with `of`, a process and its own."""
        found, waiting = [of] if of else [], [of or self._process.pid]
        while waiting:
            number = waiting.pop()
            try:
                children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            except OSError:
                continue
            waiting += map(int, children)
            found += map(int, children)
        return [number for number in found if state_of(number) not in ("Z", "")]

    def close(self) -> None:
        send_all(signal.SIGKILL, self.processes())
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def state_of(number: int) -> str:
    """Return the letter for the state of a process, as in proc(5); empty if it has ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
