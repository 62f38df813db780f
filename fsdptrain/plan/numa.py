"""The processors near a card: on a machine with several sockets each has memory and slots of its own. No torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def processors_near(card: str, root: Path = Path("/")) -> set[int]:
    """Return the processors of the NUMA node of a PCI device (`0000:1b:00.0`); none if the system does not know it.

    `root` holds /sys.
    """
    try:
        node = int((root / f"sys/bus/pci/devices/{card}/numa_node").read_text(encoding="ascii"))
        ranges = (root / f"sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii")  # -1: unknown
    except (OSError, ValueError):
        return set()
    ends = [part.split("-") for part in ranges.strip().split(",") if part]
    return {number for each in ends for number in range(int(each[0]), int(each[-1]) + 1)}


def bind_near(card: str, root: Path = Path("/")) -> None:
    """Let the threads of this process run only on the processors near a card, as far as they may run there now.

    torch.numa does the same, but needs the program numactl. Memory is taken from the node of the thread that first
    writes it, and copies to and from a card of another socket are slower.
    """
    allowed = processors_near(card, root) & os.sched_getaffinity(0)
    for thread in Path("/proc/self/task").iterdir() if allowed else ():
        with contextlib.suppress(OSError):  # it has ended, or may run elsewhere only
            os.sched_setaffinity(int(thread.name), allowed)
