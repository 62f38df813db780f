"""The NVIDIA GPUs of this machine, counted without importing torch. `python -m fsdptrain.config.gpus` prints them.

Only the standard library is imported: the Makefile runs this module before anything is installed.
"""

from __future__ import annotations

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
    """
    names = env.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return installed_gpus(env, root)
    visible: list[str] = []
    for name in map(str.strip, names.split(",")):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        visible.append(name)
    return len(visible) if len(set(visible)) == len(visible) else 0


def installed_gpus(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """Count the GPUs of this machine.

    A container has a device file for each GPU that it may use. The driver's files in /proc exist without device files
    after a start without a display, and are absent under WSL2 and in some sandboxes: nvidia-smi is called there.
    """
    devices = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(devices) or len([*root.glob("proc/driver/nvidia/gpus/*")]) or _listed_by_nvidia_smi(env, root)


def _listed_by_nvidia_smi(env: Mapping[str, str], root: Path) -> int:
    """Return how many GPUs `nvidia-smi -L` lists; 0 without that program, or if it fails or does not answer."""
    program = shutil.which("nvidia-smi", path=os.pathsep.join([env.get("PATH", os.defpath), str(root / WSL_TOOLS)]))
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))


if __name__ == "__main__":
    print(installed_gpus(os.environ))
