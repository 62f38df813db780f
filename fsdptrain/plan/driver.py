"""Which build of torch runs with this machine's NVIDIA driver, and why torch sees no GPU. No torch.

`python -m fsdptrain.plan.driver` prints what the Makefile installs torch from: the folder of the machine's own torch if
that can use the GPUs, else what to give pip. Only the standard library is imported, as nothing is installed then.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
from collections.abc import Mapping
from pathlib import Path

from fsdptrain.plan.gpus import call_nvidia_smi, installed_gpus
from fsdptrain.plan.versions import TESTED, is_tested

# A driver runs all builds for its major version of CUDA: 12 from 525, 13 from 580 (docs.nvidia.com/deploy/
# cuda-compatibility/minor-version-compatibility.html). Since 2.11 PyPI's torch is for CUDA 13 (pytorch#177975). Builds
# for 12.8, which know Blackwell, end with 2.11; those for 12.6 end before 2.15 (pytorch#190385). Only the latter have
# kernels for cards before Turing, down to Maxwell, and only they have none for Blackwell (pytorch#175253: RELEASE.md).
BUILDS = (  # the first version of the driver, the least compute capability, the index of torch's wheels, their versions
    (580, (7, 5), "cu130", f">={TESTED['torch'][0]},<{TESTED['torch'][1]}"),
    (570, (7, 5), "cu128", "==2.11.*"),
    (525, (5, 0), "cu126", "==2.13.*"),
)
CUDA_13, TURING = BUILDS[0][:2]  # the first driver and the least compute capability that run PyPI's builds
CPU_TORCH = "torch==2.13.0"  # a range would install the newest build, with gigabytes of CUDA
DISPLAY_CLASSES = ("0x0300", "0x0302")  # of PCI devices: graphics and 3D controllers


def why_unseen(cuda: str | None, env: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return why a torch built for this version of CUDA sees none of the machine's GPUs, and the way out.

    None is a build without CUDA. `root` is the folder that holds /proc.
    """
    driver = driver_version(env, root)
    if fault := call_nvidia_smi(env, root, "-L")[1]:
        return (
            f"nvidia-smi fails ({fault}): restart this machine if its driver was updated, or install the driver again"
        )
    if not installed_gpus(env, root):
        return "this machine has no NVIDIA GPU"
    number = int(driver.partition(".")[0]) if driver else CUDA_13
    name = f"the NVIDIA driver {driver or '(of unknown version)'}"
    install = install_words(number, capability(env, root))
    if not install:
        return f"{name} is older than {BUILDS[-1][0]}, and no build of torch in range runs with it: update the driver"
    if cuda is None:
        return f"this torch is a build without CUDA; for {name}: pip install {install}"
    if number < CUDA_13 and int(cuda.partition(".")[0]) >= 13:
        return f"{name} is older than {CUDA_13}, which CUDA {cuda} needs: update it, or pip install {install}"
    return (
        f"{name} runs CUDA {cuda}: set CUDA_VISIBLE_DEVICES to GPUs of nvidia-smi -L, or in a container set "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )


def build_words(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Return the way out for a torch without kernels for this machine's cards: the build that has them, if any."""
    driver, card = driver_version(env, root), capability(env, root)
    install = install_words(int(driver.partition(".")[0]) if driver else CUDA_13, card)
    found = f"the NVIDIA driver {driver or '(of unknown version)'} and compute capability {card[0]}.{card[1]}"
    return f"for {found}: pip install {install}" if install else f"no build of torch in range fits {found}"


def install_words(driver: int, card: tuple[int, int]) -> str | None:
    """Return what to give pip for the newest tested torch that runs with a driver and a card's compute capability."""
    found = next(
        ((index, versions) for first, least, index, versions in BUILDS if driver >= first and card >= least), None
    )
    return found and f"--index-url https://download.pytorch.org/whl/{found[0]} 'torch{found[1]}'"


def capability(env: Mapping[str, str], root: Path = Path("/")) -> tuple[int, int]:
    """Return the highest compute capability of the machine's cards, of which an older one may be for a display only.

    It is Turing's if nvidia-smi does not tell.
    """
    listed, _ = call_nvidia_smi(env, root, "--query-gpu=compute_cap", "--format=csv,noheader")
    found = re.findall(r"^(\d+)\.(\d+)$", listed, re.MULTILINE)
    return max(((int(major), int(minor)) for major, minor in found), default=TURING)


def driver_version(env: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the version of the NVIDIA driver; None if it cannot be read. WSL2 has no file for it."""
    path = root / "proc/driver/nvidia/version"
    if path.is_file() and (
        found := re.search(r"^NVRM version:.*?\s(\d{3,}(\.\d+)+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ):
        return found[1]
    listed, _ = call_nvidia_smi(env, root, "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.match(r"\d{3,}(\.\d+)+", listed)
    return found and found[0]


def unused_cards_note(env: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return a note if this machine has NVIDIA cards and no driver, so that a run is planned for the CPU.

    An empty CUDA_VISIBLE_DEVICES asks for the CPU: then there is none. `root` is the folder that holds /dev and /sys.
    """
    cards = sum(_is_nvidia_card(device) for device in (root / "sys/bus/pci/devices").glob("*"))
    if not cards or "CUDA_VISIBLE_DEVICES" in env or installed_gpus(env, root):
        return None
    return (
        f"this machine has NVIDIA cards on its PCI bus ({cards}), but no driver that shows them here, so it trains on "
        "the CPU: install the driver, or start the container with its GPUs (docker run --gpus all); "
        "CUDA_VISIBLE_DEVICES= (empty) says that the CPU is meant"
    )


def _is_nvidia_card(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith(DISPLAY_CLASSES)


def own_torch(only_12: bool) -> Path | None:
    """Return the folder with the torch of this Python, if it is in range and a build for CUDA that can be used.

    `only_12`: those for CUDA 13 cannot.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    folder = Path(spec.origin).parent
    try:
        facts = runpy.run_path(str(folder / "version.py"))  # without the seconds that it takes to import torch
        runs = int(facts["cuda"].partition(".")[0]) < 13 or not only_12
        return folder.parent if runs and is_tested("torch", facts["__version__"]) else None
    except (OSError, KeyError, AttributeError, ValueError):  # a build without CUDA, or not torch
        return None


def main() -> None:
    """Print the folder of the machine's own torch, or what to give pip; nothing where pip's default fits."""
    version = driver_version(os.environ) if installed_gpus(os.environ) else None
    number = int(version.partition(".")[0]) if version else CUDA_13
    card = capability(os.environ)
    only_12 = number < CUDA_13 or card < TURING
    if not installed_gpus(os.environ):
        print(CPU_TORCH)
    elif folder := own_torch(only_12):
        print(folder)
    elif only_12:
        print(install_words(number, card) or "")


if __name__ == "__main__":
    main()
