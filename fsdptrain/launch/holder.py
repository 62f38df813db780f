"""The claim of a run in an object store, so that two machines do not write one run. No torch.

The claim is an object that only one process can create; it names host and process, and is written again every REFRESH_S
while the run lives. Whoever finds one waits: a claim that changes meanwhile is held, one that does not change for
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

from fsdptrain.config.plan import Plan
from fsdptrain.errors import RecipeError, StorageError
from fsdptrain.records import json_object
from fsdptrain.rundir import RunDir
from fsdptrain.runstore import CLAIM
from fsdptrain.storage import ObjectPath, object_path, store_errors

REFRESH_S = 20.0


STALE_S = 90.0  # a claim that has not changed for so long is of a process that is dead or cut off


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
def claimed(plan: Plan) -> Iterator[None]:
    """Hold the claim of a run in an object store. Raises RecipeError if another run holds it; see the module.

    All nodes of a run hold it together: those that meet at the same endpoint.
    """
    url, several = plan.rundir.url, plan.topology.nnodes > 1
    assert url
    place = object_path(url) / CLAIM
    run = plan.topology.endpoint if several else uuid.uuid4().hex
    mine: dict[str, Any] = {"run": run, "host": socket.gethostname(), "process": os.getpid(), "node": node_name()}
    mine["started"] = _start_of(os.getpid())
    mine["since"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    _acquire(place, mine, url)
    ended = threading.Event()
    refresher = threading.Thread(target=_refresh, args=(place, mine, ended), name="claim", daemon=True)
    refresher.start()
    try:
        yield
    finally:
        ended.set()
        refresher.join(REFRESH_S)
        with contextlib.suppress(StorageError, FileNotFoundError), store_errors(place):
            if (read_claim(place) or {}).get("run") == run:
                place.fs.rm_file(place.key)


def _content(mine: dict[str, Any]) -> bytes:
    return json.dumps({**mine, "beat": uuid.uuid4().hex}).encode()


def read_claim(place: ObjectPath) -> dict[str, Any] | None:
    """Return the fields of a claim; None if there is none."""
    try:
        with store_errors(place):
            content = place.fs.cat_file(place.key)
    except FileNotFoundError:
        return None
    with contextlib.suppress(ValueError):  # not of fsdptrain: it is taken over when it does not change
        return json_object(content)
    return {}


def _described(claim: dict[str, Any]) -> str:
    return f"{claim.get('host')} (process {claim.get('process')}), since {claim.get('since')}"


def holder_of(rundir: RunDir) -> str | None:
    """Return host and process that the claim of a run in an object store names; None if there is no claim."""
    claim = read_claim(object_path(rundir.url) / CLAIM) if rundir.url else None
    return None if claim is None else _described(claim)


def _acquire(place: ObjectPath, mine: dict[str, Any], url: str) -> None:
    """Create the claim, or join that of the same run; take over one that nobody holds, and refuse one that is held."""
    seen: dict[str, Any] | None = None
    seen_at = float("inf")
    # Looked at first, because some stores ignore the condition of a creation.
    while (found := read_claim(place)) is not None or not _create(place, mine):
        if found is None:
            continue
        if found.get("run") == mine["run"]:
            return
        holder = _described(found)
        here = found.get("node") == mine["node"] and found.get("started") is not None
        if (here and _start_of(found.get("process")) == found["started"]) or (seen is not None and found != seen):
            raise RecipeError(f"output_dir: another run is using {url}: {holder}")
        if here or time.monotonic() - seen_at > STALE_S:
            with contextlib.suppress(FileNotFoundError), store_errors(place):
                if read_claim(place) == found:
                    place.fs.rm_file(place.key)
            continue
        if seen is None:
            seen, seen_at = found, time.monotonic()
            print(
                f"output_dir: {url} is claimed by {holder}: taken over if it is not confirmed within {STALE_S:.0f} s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        time.sleep(POLL_S)


def _create(place: ObjectPath, mine: dict[str, Any]) -> bool:
    """Create the claim; return False if there is one already."""
    try:
        with store_errors(place):
            place.fs.pipe_file(place.key, _content(mine), mode="create")
    except FileExistsError:
        return False
    except StorageError:  # libraries of stores have classes of their own for an object that exists
        if read_claim(place) is None:
            raise
        return False
    return True


def _start_of(process: object) -> str | None:
    """Return when a process of this machine was started, in ticks since the boot; None without one, or without /proc.

    The number of a dead process may be that of a new one, most of all in containers.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        facts = Path(f"/proc/{int(str(process))}/stat").read_text(encoding="utf-8", errors="replace")
        return facts.rpartition(")")[2].split()[19]  # field 22 of proc(5)
    return None


def _refresh(place: ObjectPath, mine: dict[str, Any], ended: threading.Event) -> None:
    """Write the claim again every REFRESH_S, until it is that of another run."""
    while not ended.wait(REFRESH_S):
        with contextlib.suppress(StorageError), store_errors(place):  # it is tried again
            if (read_claim(place) or mine).get("run") != mine["run"]:
                return
            if not ended.is_set():
                place.fs.pipe_file(place.key, _content(mine))
