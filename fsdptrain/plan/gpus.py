"""The NVIDIA GPUs of this machine, counted without importing torch. `python -m fsdptrain.plan.gpus` prints them.

Only the standard library is imported: the Makefile runs this module before anything is installed.
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
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    if program is None:
        return []
    only = ["-i", names] if (names := env.get("CUDA_VISIBLE_DEVICES")) else []
    query = ["--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run([program, *only, *query], capture_output=True, text=True, timeout=SMI_S, check=True)
        rows = [line.split(", ") for line in listed.stdout.splitlines()]
        return [
            f"the memory of GPU {index} had {errors} errors that ECC could not correct: restart the node, or reset "
            f"the GPU (nvidia-smi --gpu-reset -i {index}), and replace it if there are errors again"
            for index, errors in (row for row in rows if len(row) == 2)  # not messages
            if errors.isdigit() and int(errors)  # `[N/A]` without ECC
        ]
    return []


def _found(env: Mapping[str, str], root: Path) -> tuple[int, bool]:
    """Return the number of GPUs, and whether one of them is divided into MIG instances.

    A container has a device file for each GPU that it may use. The driver's files in /proc exist without device files
    after a start without a display, and are absent under WSL2 and in some sandboxes: nvidia-smi is called there.
    """
    devices = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if gpus := len(devices) or len([*root.glob("proc/driver/nvidia/gpus/*")]):
        return gpus, any(root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*"))
    listed = _listed_by_nvidia_smi(env, root)
    return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE)), bool(re.search(r"^\s+MIG \S+", listed, re.MULTILINE))


def _listed_by_nvidia_smi(env: Mapping[str, str], root: Path) -> str:
    """Return what `nvidia-smi -L` prints; nothing without that program, or if it fails or does not answer."""
    program = shutil.which("nvidia-smi", path=os.pathsep.join([env.get("PATH", os.defpath), str(root / WSL_TOOLS)]))
    if program is None:
        return ""
    try:
        return subprocess.run([program, "-L"], capture_output=True, text=True, timeout=SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    print(installed_gpus(os.environ))
