"""Run a command, kill one of its processes, and find the processes that outlive it.

`python subreaper.py RUN MOMENT VICTIM COMMAND…` adopts orphans, as systemd, slurmstepd and the first process of a
container do: a process that loses its parent becomes its child, not that of process 1. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
ADOPTION_S = 0.5  # for so long an orphan may have neither its old parent nor its new one in /proc
GIVE_UP_S = 20.0  # usually they end within 5 s; a busy machine may take longer


def descendants() -> dict[psutil.Process, str]:
    """Return process → command line and name, without zombies; a forked worker is known by its name alone."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process] = f"{' '.join(process.cmdline())} [{process.name()}]"
    return found


def wait_for(part: str, command: psutil.Popen) -> psutil.Process:
    while command.poll() is None:
        for process, words in sorted(descendants().items(), key=lambda item: item[0].pid):
            if part in words:
                return process
        time.sleep(0.01)
    raise SystemExit(f"the command ended before a process {part!r} started")


def wait_for_step(run: Path, command: psutil.Popen) -> None:
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
    command = psutil.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process, _, seconds = moment.rpartition("+")
    if process == "step":
        wait_for_step(Path(run), command)
    elif process:
        wait_for(process, command)
    time.sleep(float(seconds))
    (command if victim == "command" else wait_for(victim, command)).kill()
    killed = seen = time.monotonic()
    left: dict[psutil.Process, str] = {}
    while time.monotonic() < min(seen + ADOPTION_S, killed + GIVE_UP_S):
        time.sleep(0.05)
        command.poll()
        if left := descendants():
            seen = time.monotonic()
    for outlived in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            outlived.kill()
    print(json.dumps({"left": list(left.values()), "seconds": seen - killed, "code": command.wait()}))


if __name__ == "__main__":
    main()
