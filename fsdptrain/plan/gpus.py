"""The NVIDIA GPUs of this machine and their driver, which build of torch runs with them, and which versions are tested.

`python -m fsdptrain.plan.gpus` prints what the Makefile installs torch from: the folder of the machine's own torch if
that can use the GPUs, else what to give pip. Only the standard library is imported, as nothing is installed then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

# From the first version to below the second; pyproject.toml has the same limits. Another version may change the private
# functions that the modules `patches` rely on, without an error at the import.
TESTED = {"torch": ("2.11", "2.16"), "transformers": ("5.17", "6.0")}
READ_TORCH = ("2.11", "2.13", "2.15")  # in which these functions were read, and with which `make versions` runs tests

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

SMI_S = 10.0  # nvidia-smi may take seconds to wake a GPU; if the driver hangs, it never returns
WSL_TOOLS = "usr/lib/wsl/lib"  # where WSL2 keeps nvidia-smi, often outside of PATH


def untested_versions(installed: dict[str, str] | None = None) -> list[str]:
    """Return a warning for each library outside of its tested range; `installed` is library → version."""
    found, notes = installed or {name: version(name) for name in TESTED}, []
    for name, limits in TESTED.items():
        way_out = '"{}>={},<{}"'.format(name, *limits)
        if _is_tested(name, found[name]):
            if name != "torch" or _numbers(found[name]) in map(_numbers, READ_TORCH):
                continue
            way_out = f"torch {', '.join(READ_TORCH[:-1])} or {READ_TORCH[-1]}"
        notes.append(
            f"{name} {found[name]} was not tested with fsdptrain: private functions of {name} may have changed, so "
            f"that training fails or computes something else; install {way_out}"
        )
    return notes


def _is_tested(name: str, installed: str) -> bool:
    first, end = TESTED[name]
    return _numbers(first) <= _numbers(installed) < _numbers(end)


def _numbers(version_text: str) -> tuple[int, ...]:
    """Return major and minor number of a version: (2, 13) of `2.13.0+cu130`."""
    return tuple(int(number) for number in re.findall(r"\d+", version_text)[:2])


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


def _found(env: Mapping[str, str], root: Path) -> tuple[int, bool]:
    """Return the number of GPUs, and whether one of them is divided into MIG instances.

    A container has a device file for each GPU that it may use. The driver's files in /proc exist without device files
    after a start without a display, and are absent under WSL2 and in some sandboxes: nvidia-smi is called there.
    """
    devices = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if gpus := len(devices) or len([*root.glob("proc/driver/nvidia/gpus/*")]):
        return gpus, any(root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*"))
    listed, _ = _call_nvidia_smi(env, root, "-L")
    return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE)), bool(re.search(r"^\s+MIG \S+", listed, re.MULTILINE))


def _call_nvidia_smi(env: Mapping[str, str], root: Path, *words: str) -> tuple[str, str]:
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


def bind_near(card: str, root: Path = Path("/")) -> None:
    """Let the threads of this process run only on the processors of a card's NUMA node, as far as they may run there.

    `card` is a PCI device, such as `0000:1b:00.0`; `root` holds /sys. Memory is taken from the node of the thread that
    first writes it, and copies to and from a card of another socket are slower. torch.numa does the same, but needs the
    program numactl.
    """
    try:
        node = int((root / f"sys/bus/pci/devices/{card}/numa_node").read_text(encoding="ascii"))  # -1: unknown
        ranges = (root / f"sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
    except (OSError, ValueError):
        return
    ends = [part.split("-") for part in ranges.strip().split(",") if part]
    near = {number for each in ends for number in range(int(each[0]), int(each[-1]) + 1)}
    allowed = near & os.sched_getaffinity(0)
    for thread in Path("/proc/self/task").iterdir() if allowed else ():
        with contextlib.suppress(OSError):  # it has ended, or may run elsewhere only
            os.sched_setaffinity(int(thread.name), allowed)


def why_unseen(cuda: str | None, env: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return why a torch built for this version of CUDA sees none of the machine's GPUs, and the way out.

    None is a build without CUDA. `root` is the folder that holds /proc.
    """
    driver = driver_version(env, root)
    if fault := _call_nvidia_smi(env, root, "-L")[1]:
        return (
            f"nvidia-smi fails ({fault}): restart this machine if its driver was updated, or install the driver again"
        )
    if not installed_gpus(env, root):
        return "this machine has no NVIDIA GPU"
    number = _major(driver)
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
    install = install_words(_major(driver), card)
    found = f"the NVIDIA driver {driver or '(of unknown version)'} and compute capability {card[0]}.{card[1]}"
    return f"for {found}: pip install {install}" if install else f"no build of torch in range fits {found}"


def install_words(driver: int, card: tuple[int, int]) -> str | None:
    """Return what to give pip for the newest tested torch that runs with a driver and a card's compute capability."""
    for first, least, index, versions in BUILDS:
        if driver >= first and card >= least:
            return f"--index-url https://download.pytorch.org/whl/{index} 'torch{versions}'"
    return None


def capability(env: Mapping[str, str], root: Path = Path("/")) -> tuple[int, int]:
    """Return the highest compute capability of the machine's cards, of which an older one may be for a display only.

    It is Turing's if nvidia-smi does not tell.
    """
    listed, _ = _call_nvidia_smi(env, root, "--query-gpu=compute_cap", "--format=csv,noheader")
    found = re.findall(r"^(\d+)\.(\d+)$", listed, re.MULTILINE)
    return max(((int(major), int(minor)) for major, minor in found), default=TURING)


def driver_version(env: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the version of the NVIDIA driver; None if it cannot be read. WSL2 has no file for it."""
    path = root / "proc/driver/nvidia/version"
    if path.is_file() and (
        found := re.search(r"^NVRM version:.*?\s(\d{3,}(\.\d+)+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ):
        return found[1]
    listed, _ = _call_nvidia_smi(env, root, "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.match(r"\d{3,}(\.\d+)+", listed)
    return found and found[0]


def _major(driver: str | None) -> int:
    return int(driver.partition(".")[0]) if driver else CUDA_13


def _own_torch(only_12: bool) -> Path | None:
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
        return folder.parent if runs and _is_tested("torch", facts["__version__"]) else None
    except (OSError, KeyError, AttributeError, ValueError):  # a build without CUDA, or not torch
        return None


def main() -> None:
    """Print the folder of the machine's own torch, or what to give pip; nothing where pip's default fits."""
    if not installed_gpus(os.environ):
        print(CPU_TORCH)
        return
    number, card = _major(driver_version(os.environ)), capability(os.environ)
    only_12 = number < CUDA_13 or card < TURING
    if folder := _own_torch(only_12):
        print(folder)
    elif only_12:
        print(install_words(number, card) or "")


if __name__ == "__main__":
    main()
