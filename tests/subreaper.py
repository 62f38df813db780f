"""Runs a command, kills one of its processes, and counts who outlives it.

`python subreaper.py RUN MOMENT VICTIM COMMAND…` is what systemd, slurmstepd and the first process of a container are:
whoever loses its parent becomes its child, not that of process 1. Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ADOPTED_S = 0.5  # for so long somebody may be seen neither below its parent nor below us
GIVE_UP_S = 20.0  # they are gone within 5, by and large; a machine with other work may take longer


def process_table() -> dict[int, tuple[int, str]]:
    """Process → (parent, command line), of those that are no zombies."""
    table = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state != "Z":
            table[int(path.name)] = (int(parent), words)
    return table


def descendants(root: int) -> dict[int, str]:
    """The command lines of all processes that come from this one."""
    table, found, front = process_table(), {}, [root]
    while front:
        parent = front.pop()
        for pid, (above, words) in table.items():
            if above == parent:
                found[pid] = words
                front.append(pid)
    return found


def wait_for(part: str, command: subprocess.Popen[bytes]) -> int:
    """The first process that has `part` in its command line."""
    while command.poll() is None:
        for pid, words in sorted(descendants(os.getpid()).items()):
            if part in words:
                return pid
        time.sleep(0.01)
    raise SystemExit(f"ended before there was {part}")


def wait_for_step(run: Path, command: subprocess.Popen[bytes]) -> None:
    """Wait until the run has made a step."""
    metrics = run / "metrics.jsonl"
    while command.poll() is None:
        if metrics.exists() and '"event": "step"' in metrics.read_text():
            return
        time.sleep(0.02)
    raise SystemExit("ended before its first step")


def main() -> None:
    """Wait for MOMENT (seconds, a step, or seconds after a process), kill VICTIM (a part of its command line)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    run, moment, victim, *words = sys.argv[1:]
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process, _, seconds = moment.rpartition("+")
    if process == "step":
        wait_for_step(Path(run), command)
    elif process:
        wait_for(process, command)
    time.sleep(float(seconds))
    os.kill(command.pid if victim == "command" else wait_for(victim, command), signal.SIGKILL)
    killed = seen = time.monotonic()
    left: dict[int, str] = {}
    while time.monotonic() < min(seen + ADOPTED_S, killed + GIVE_UP_S):
        time.sleep(0.05)
        command.poll()
        if left := descendants(os.getpid()):
            seen = time.monotonic()
    after = seen - killed
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    print(json.dumps({"left": list(left.values()), "seconds": after, "code": command.wait()}))


if __name__ == "__main__":
    main()
