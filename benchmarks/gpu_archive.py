"""What `gpu.py` leaves behind, also where a check or the machine fails: facts of the machine, and one archive.

Nothing here imports torch, and nothing raises: it is run where something else has gone wrong.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT

COMMAND_S = 60.0  # that a command may take; a driver that hangs never answers
KEPT = (".csv", ".gz", ".json", ".jsonl", ".log", ".md", ".pickle", ".txt", ".yaml")  # weights and checkpoints are not
LARGEST = 2**28  # bytes of a file in the archive
XIDS = "grep -iE 'xid|nvrm|out of memory|oom-kill|mce:'"
HEADER = Path(sysconfig.get_path("include")) / "Python.h"

COMMANDS = {  # the name of a file, and what is written into it
    "driver": "cat /proc/driver/nvidia/version; nvidia-smi; nvidia-smi -q",
    "topology": "nvidia-smi topo -m; nvidia-smi nvlink --status; lscpu; numactl --hardware; ls /sys/class/infiniband",
    "collect_env": f"{sys.executable} -m torch.utils.collect_env",
    "kernel-log": f"dmesg --ctime | {XIDS}; journalctl --dmesg --no-pager | {XIDS}",
    "limits": f"df -h /dev/shm /tmp {ROOT}; free -m; ulimit -a; cat /proc/1/cgroup",
    "compiler": f"cc --version; gcc --version; ls -l {HEADER}; nvcc --version",
    "packages": f"{sys.executable} -m pip list",
    "variables": "env | grep -E '^(CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|OMP|GLOO|FSDPTRAIN|SLURM)'",
}


def collect(folder: Path) -> None:
    """Write what is known of this machine into `folder`/machine: a file for each of COMMANDS."""
    (folder / "machine").mkdir(parents=True, exist_ok=True)

    def write(name: str) -> None:
        with (folder / "machine" / f"{name}.txt").open("w") as output:
            try:
                command = ["bash", "-xc", COMMANDS[name]]
                subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=COMMAND_S)
            except (OSError, subprocess.SubprocessError) as error:
                output.write(f"{error}\n")

    with ThreadPoolExecutor(len(COMMANDS)) as pool:
        list(pool.map(write, COMMANDS))


def archive(folder: Path) -> Path:
    """Write logs, figures, recipes, profiles and facts of the machine into FOLDER.tar.gz; return its path."""
    path = folder.with_name(f"{folder.name}.tar.gz")
    new = path.with_name(f".{path.name}")
    with tarfile.open(new, "w:gz") as packed:
        for each in sorted(folder.rglob("*")):
            inside = each.relative_to(folder)
            try:
                kept = inside.parts[0] != "cache" and each.suffix in KEPT and each.is_file()
                if kept and each.stat().st_size <= LARGEST:
                    packed.add(each, Path(folder.name) / inside)
            except OSError:  # removed meanwhile
                continue
    new.replace(path)
    return path
