"""The claim of a run in an object store, so that two machines do not write one run. No torch.

The claim is an object that only one process can create; it names host and process, and is written again every RENEW_S
while the run lives. A command that finds one waits: a claim that changes is held, one that does not change for
STALE_S is taken over. No clocks are compared. On the machine that is named, a look at the process decides at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdptrain.errors import RecipeError, StorageError
from fsdptrain.folder.rundir import RunDir
from fsdptrain.folder.runstore import CLAIM, described, read_claim, this_process
from fsdptrain.folder.storage import ObjectPath, object_path
from fsdptrain.plan.plan import Plan

RENEW_S = 20.0
STALE_S = 90.0  # without a change, after which a claim is of a process that is dead or cut off
POLL_S = 2.0

# Machines and containers may share a host name. The boot id identifies the machine, the PID namespace the container.
BOOT_ID, PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def node_name() -> str:
    """Return a file name part that is different on every node."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        parts += [BOOT_ID.read_text(encoding="ascii").strip(), str(PID_NAMESPACE.stat().st_ino)]
    return "-".join(parts)


@contextlib.contextmanager
def claimed(plan: Plan) -> Iterator[str]:
    """Hold the claim of a run in an object store. Raises RecipeError if another run holds it; see the module.

    Yields the run that the claim names: all nodes that meet at the same endpoint hold it together.
    """
    url, several = plan.rundir.url, plan.topology.nnodes > 1
    assert url
    place = object_path(url) / CLAIM
    run = str(plan.topology.endpoint) if several else uuid.uuid4().hex
    mine: dict[str, Any] = {"run": run, **this_process(), "node": node_name(), "started": _start_of(os.getpid())}
    _acquire(place, mine, url)
    ended = threading.Event()
    renewer = threading.Thread(target=_renew, args=(place, mine, ended), name="claim", daemon=True)
    renewer.start()
    try:
        yield run
    finally:
        ended.set()
        renewer.join(RENEW_S)
        with contextlib.suppress(StorageError):
            if (read_claim(place) or {}).get("run") == run:
                place.remove()


def _content(mine: dict[str, Any]) -> bytes:
    return json.dumps({**mine, "beat": uuid.uuid4().hex}).encode()


def holder_of(rundir: RunDir) -> str | None:
    """Return host and process that the claim of a run in an object store names; None if there is no claim."""
    claim = read_claim(object_path(rundir.url) / CLAIM) if rundir.url else None
    return None if claim is None else described(claim)


def _acquire(place: ObjectPath, mine: dict[str, Any], url: str) -> None:
    """Create the claim, or join that of the same run; take over one that nobody holds, and refuse one that is held."""
    seen: dict[str, Any] | None = None
    seen_at = float("inf")
    # Looked at first, because some stores ignore the condition of a creation.
    while (found := read_claim(place)) is not None or not place.create(_content(mine)):
        if found is None:
            continue
        if found.get("run") == mine["run"]:
            return
        holder = described(found)
        here = found.get("node") == mine["node"] and found.get("started") is not None
        if (here and _start_of(found.get("process")) == found["started"]) or (seen is not None and found != seen):
            raise RecipeError(f"output_dir: another run is using {url}: {holder}")
        if here or time.monotonic() - seen_at > STALE_S:
            if read_claim(place) == found:
                place.remove()
            continue
        if seen is None:
            seen, seen_at = found, time.monotonic()
            print(
                f"output_dir: {url} is claimed by {holder}: taken over if it is not confirmed within {STALE_S:.0f} s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        time.sleep(POLL_S)


def _start_of(process: object) -> str | None:
    """Return when a process of this machine was started, in ticks since the boot; None without one, or without /proc.

    The number of a dead process may be that of a new one, most of all in containers.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{int(str(process))}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]  # field 22 of proc(5)
    return None


def _renew(place: ObjectPath, mine: dict[str, Any], ended: threading.Event) -> None:
    """Write the claim again every RENEW_S, unless it is that of another run.

    That may be a machine which was frozen between reading and writing the claim, and will notice that it is late.
    """
    while not ended.wait(RENEW_S):
        with contextlib.suppress(StorageError):  # it is tried again
            if (read_claim(place) or mine).get("run") == mine["run"] and not ended.is_set():
                place.write_bytes(_content(mine))
