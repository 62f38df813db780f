"""Run a command, kill one of its processes, and find the processes that outlive it.

`python subreaper.py RUN MOMENT VICTIM COMMAND…` adopts orphans, as systemd, slurmstepd and the first process of a
container do: a process that loses its parent becomes its child, not that of process 1. Prints one JSON object.
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
ADOPTION_S = 0.5  # for so long an orphan may have neither its old parent nor its new one in /proc
GIVE_UP_S = 20.0  # usually they end within 5 s; a busy machine may take longer


def process_table() -> dict[int, tuple[int, str]]:
    """Return process → (parent, command line and name), without zombies; a forked worker is known by its name alone."""
    table = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            words += f"[{(path / 'comm').read_text().strip()}]"
        except OSError:
            continue
        if state != "Z":
            table[int(path.name)] = (int(parent), words)
    return table


def descendants(root: int) -> dict[int, str]:
    """Return the command lines of all descendants of a process, by process id."""
    table, found, front = process_table(), {}, [root]
    while front:
        parent = front.pop()
        for pid, (above, words) in table.items():
            if above == parent:
                found[pid] = words
                front.append(pid)
    return found


def wait_for(part: str, command: subprocess.Popen[bytes]) -> int:
    """Wait for a descendant with `part` in its command line; return its process id."""
    while command.poll() is None:
        for pid, words in sorted(descendants(os.getpid()).items()):
            if part in words:
                return pid
        time.sleep(0.01)
    raise SystemExit(f"the command ended before a process {part!r} started")


def wait_for_step(run: Path, command: subprocess.Popen[bytes]) -> None:
    """Wait until the run has reported a step."""
    metrics = run / "metrics.jsonl"
    while command.poll() is None:
        if metrics.exists() and '"event": "step"' in metrics.read_text():
            return
        time.sleep(0.02)
    raise SystemExit("the command ended before its first step")


def main() -> None:
    """Wait for MOMENT (`2`, `step+1` or `PROCESS+0.5`), then kill VICTIM (a part of that text, or `command`)."""
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
    while time.monotonic() < min(seen + ADOPTION_S, killed + GIVE_UP_S):
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
