"""The processors near a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import environment

from fsdptrain.plan.gpus import processors_near

CARD = "0000:1b:00.0"


def system(root: Path, node: str, processors: str = "") -> Path:
    """Write the files of /sys for a card on a NUMA node with these processors."""
    files = {f"bus/pci/devices/{CARD}/numa_node": node, f"devices/system/node/node{node}/cpulist": processors}
    for name, text in files.items():
        if text:
            (root / "sys" / name).parent.mkdir(parents=True)
            (root / "sys" / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("node", "processors", "found"),
    [("1", "4-6,12", {4, 5, 6, 12}), ("0", "3", {3}), ("-1", "", set()), ("", "", set())],
    ids=["ranges", "one", "unknown to the system", "a container without /sys"],
)
def test_the_processors_near_a_card_are_those_of_its_node(
    node: str, processors: str, found: set[int], tmp_path: Path
) -> None:
    assert processors_near(CARD, system(tmp_path, node, processors)) == found


BOUND = """
import os, sys, threading
from pathlib import Path
from fsdptrain.plan.gpus import bind_near
end = threading.Event()
threading.Thread(target=end.wait).start()
bind_near(sys.argv[1], Path(sys.argv[2]))
print({tuple(sorted(os.sched_getaffinity(int(each)))) for each in os.listdir("/proc/self/task")})
end.set()
"""


def test_all_threads_are_bound_to_what_they_may_use_of_it(tmp_path: Path) -> None:
    own = sorted(os.sched_getaffinity(0))

    def bound(processors: str) -> str:
        root = system(tmp_path / processors, "0", processors)
        words = [sys.executable, "-c", BOUND, CARD, str(root)]
        return subprocess.run(words, capture_output=True, text=True, env=environment(), check=True).stdout.strip()

    assert bound(f"{own[-1]},9999") == f"{{({own[-1]},)}}"
    assert bound("9999") == f"{{{tuple(own)}}}"  # none that it may use: as before
