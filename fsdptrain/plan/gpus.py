"""The NVIDIA GPUs of this machine, counted without importing torch, and the processors near one of them.

Only the standard library is imported: the Makefile runs `plan.driver` before anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SMI_S = 10.0  # nvidia-smi may take seconds to wake a GPU; if the driver hangs, it never returns
WSL_TOOLS = "usr/lib/wsl/lib"  # where WSL2 keeps nvidia-smi, often outside of PATH
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # of the environment: torch's settings, new and old name
EXPANDABLE = "expandable_segments:True"


def default_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return what workers on GPUs add to this environment: expandable segments, unless the user has set anything."""
    return {} if any(name in env for name in VARIABLES) else {VARIABLES[0]: EXPANDABLE}


def visible_gpus(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """Count the GPUs that a process with this environment may use. `root` is the folder that holds /dev and /proc.

    CUDA_VISIBLE_DEVICES, if set, names them by index, UUID or MIG name; like CUDA, the list ends at the first entry
    that is none of these (so an empty value or -1 hides all GPUs), and no GPU is visible if it names a device twice.
    CUDA shows a process one MIG instance at most.
    """
    names = env.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        gpus, divided = _found(env, root)
        return min(gpus, 1) if divided else gpus
    visible: list[str] = []
    for name in map(str.strip, names.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        visible.append(name)
    if len(set(visible)) < len(visible):
        return 0
    return 1 if any(name.startswith("MIG-") for name in visible) else len(visible)


def installed_gpus(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """Count the GPUs of this machine; one that is divided into MIG instances is one GPU."""
    return _found(env, root)[0]


def damaged_gpus(env: Mapping[str, str]) -> list[str]:
    """Return a sentence for each visible GPU whose memory had errors that ECC could not correct since the last boot."""
    only = ["-i", names] if (names := env.get("CUDA_VISIBLE_DEVICES")) else []
    query = ["--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    rows = [line.split(", ") for line in call_nvidia_smi(env, Path("/"), *only, *query)[0].splitlines()]
    return [
        f"the memory of GPU {index} had {errors} errors that ECC could not correct: restart the node, or reset "
        f"the GPU (nvidia-smi --gpu-reset -i {index}), and replace it if there are errors again"
        for index, errors in (row for row in rows if len(row) == 2)  # not messages
        if errors.isdigit() and int(errors)  # `[N/A]` without ECC
    ]


def _found(env: Mapping[str, str], root: Path) -> tuple[int, bool]:
    """Return the number of GPUs, and whether one of them is divided into MIG instances.

    A container has a device file for each GPU that it may use. The driver's files in /proc exist without device files
    after a start without a display, and are absent under WSL2 and in some sandboxes: nvidia-smi is called there.
    """
    devices = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if gpus := len(devices) or len([*root.glob("proc/driver/nvidia/gpus/*")]):
        return gpus, any(root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*"))
    listed, _ = call_nvidia_smi(env, root, "-L")
    return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE)), bool(re.search(r"^\s+MIG \S+", listed, re.MULTILINE))


def call_nvidia_smi(env: Mapping[str, str], root: Path, *words: str) -> tuple[str, str]:
    """Return what nvidia-smi prints, and why it failed; both are empty without that program. `root` holds WSL2's."""
    program = shutil.which("nvidia-smi", path=os.pathsep.join([env.get("PATH", os.defpath), str(root / WSL_TOOLS)]))
    if program is None:
        return "", ""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=SMI_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {SMI_S:g} s"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, ""
    said = (done.stdout + done.stderr).strip()
    return "", said.splitlines()[0] if said else f"exit code {done.returncode}"


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
