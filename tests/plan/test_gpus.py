"""GPUs are counted from a machine's files and programs; CUDA_VISIBLE_DEVICES selects among them.

Why torch sees none, which torch `make` installs, and the processors near a card, on machines that a folder pretends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, python

from fsdptrain.plan.gpus import build_words, driver_version, installed_gpus, unused_cards_note, visible_gpus, why_unseen

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"
OF_TWO = (  # as `nvidia-smi -L` prints it: the first of two GPUs is divided
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0)\n"
    "  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)\n"
    "  MIG 2g.10gb     Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)\n"
    "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-59d6f8a5-1d6b-7a2b-9f4e-6f4d5e2a4a11)\n"
)
CAPABILITIES = "proc/driver/nvidia/capabilities"
NOTHING = {"PATH": "nowhere"}


def machine(root: Path, *files: str) -> Path:
    """Return a folder with these files, as the root of a machine."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def write_nvidia_smi(folder: Path, script: str) -> None:
    """Write an `nvidia-smi` that runs this shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ([], 0),
        (["dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm"], 1),
        (["dev/nvidia0", "dev/nvidia1"], 2),
        (["dev/nvidiactl", "proc/driver/nvidia/gpus/0000:01:00.0"], 1),
        # A container: the driver lists all GPUs of the machine, and the device files are those that it may use.
        (["dev/nvidia3", "proc/driver/nvidia/gpus/a", "proc/driver/nvidia/gpus/b"], 1),
        # CUDA shows a process one MIG instance at most.
        (["dev/nvidia0", "dev/nvidia1", f"{CAPABILITIES}/gpu0/mig/gi1/ci0/access"], 1),
        (["dev/nvidia0", "dev/nvidia1", f"{CAPABILITIES}/mig/config"], 2),  # MIG is off
    ],
)
def test_gpus_are_counted_from_files(files: list[str], count: int, tmp_path: Path) -> None:
    assert visible_gpus(NOTHING, machine(tmp_path, *files)) == count


@pytest.mark.parametrize(
    ("script", "count"),
    [
        (f"echo 'GPU 0: NVIDIA H100 (UUID: {UUID})'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-0)'", 2),
        (f"cat <<'END'\n{OF_TWO}END", 1),
        ("echo 'No devices found.'", 0),
        ("echo 'GPU 0: has failed'; exit 9", 0),
        ("exec sleep 60", 0),
    ],
)
def test_gpus_are_counted_by_nvidia_smi(
    script: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdptrain.plan.gpus.SMI_S", 1.0)
    write_nvidia_smi(tmp_path / "bin", script)
    assert visible_gpus({"PATH": f"{tmp_path / 'bin'}:/bin"}, tmp_path) == count
    # Under WSL2 the program is often outside of PATH.
    write_nvidia_smi(tmp_path / "usr/lib/wsl/lib", script)
    assert visible_gpus(NOTHING, tmp_path) == count


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("0", 1),
        ("1, 3", 2),
        (UUID, 1),
        (f"{UUID},GPU-1", 2),
        (MIG, 1),
        ("MIG-c7384736-a75d-5afc-978f-d2f1294409fd,MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d", 1),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),  # set by some schedulers
        ("0,0", 0),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(value: str, count: int, tmp_path: Path) -> None:
    env = {**NOTHING, "CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(env, machine(tmp_path, "dev/nvidia0")) == count
    assert installed_gpus(env, tmp_path) == 1, "what is installed does not depend on it"


NVRM = "NVRM version: NVIDIA UNIX {} {}  Release Build  (dvs-builder)\nGCC version: gcc version 12.3.0\n"
CLOSED, OPEN = "x86_64 Kernel Module ", "Open Kernel Module for x86_64 "


def with_driver(root: Path, version: str, kind: str = OPEN) -> Path:
    machine(root, "dev/nvidia0", "proc/driver/nvidia/version")
    (root / "proc/driver/nvidia/version").write_text(NVRM.format(kind, version))
    return root


@pytest.mark.parametrize("kind", [CLOSED, OPEN])
def test_the_version_of_the_driver_is_read_from_its_file_or_by_nvidia_smi(kind: str, tmp_path: Path) -> None:
    assert driver_version(NOTHING, with_driver(tmp_path, "535.161.08", kind)) == "535.161.08"
    write_nvidia_smi(tmp_path / "wsl" / "usr/lib/wsl/lib", "printf '572.16\\n572.16\\n'")
    assert driver_version(NOTHING, tmp_path / "wsl") == "572.16"
    assert driver_version(NOTHING, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        ("535.161.08", "13.0", "535.161.08 is older than 580, which CUDA 13.0 needs: update it, or pip install"),
        ("570.86.15", "13.0", "--index-url https://download.pytorch.org/whl/cu128 'torch==2.11.*'"),
        ("470.82.01", "13.0", "470.82.01 is older than 525, and no build of torch in range runs with it: update"),
        ("580.65.06", None, "without CUDA; for the NVIDIA driver 580.65.06: pip install --index-url"),
        ("535.161.08", "12.6", "535.161.08 runs CUDA 12.6: set CUDA_VISIBLE_DEVICES"),
        ("580.65.06", "13.0", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    ],
)
def test_why_torch_sees_no_gpu(driver: str, cuda: str | None, words: str, tmp_path: Path) -> None:
    assert words in why_unseen(cuda, NOTHING, with_driver(tmp_path, driver))


def test_a_broken_driver_and_a_machine_without_a_gpu_have_sentences_of_their_own(tmp_path: Path) -> None:
    env = {"PATH": f"{tmp_path / 'bin'}:/bin"}
    assert why_unseen("13.0", env, tmp_path) == "this machine has no NVIDIA GPU"
    write_nvidia_smi(tmp_path / "bin", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    said = why_unseen("13.0", env, with_driver(tmp_path, "580.65.06"))
    assert said.startswith("nvidia-smi fails (Failed to initialize NVML: Driver/library version mismatch): restart")


@pytest.mark.parametrize(
    ("vendor", "kind", "env", "noted"),
    [
        ("0x10de", "0x030200", {}, True),
        ("0x10de", "0x030200", {"CUDA_VISIBLE_DEVICES": ""}, False),  # the CPU is meant
        ("0x10de", "0x040300", {}, False),  # sound
        ("0x1002", "0x030000", {}, False),
    ],
)
def test_cards_without_a_driver_are_noted(
    vendor: str, kind: str, env: dict[str, str], noted: bool, tmp_path: Path
) -> None:
    card = machine(tmp_path, *(f"sys/bus/pci/devices/0000:01:00.0/{name}" for name in ("vendor", "class")))
    for name, text in (("vendor", vendor), ("class", kind)):
        (card / "sys/bus/pci/devices/0000:01:00.0" / name).write_text(f"{text}\n")
    note = unused_cards_note(NOTHING | env, tmp_path)
    assert bool(note) == noted and (not note or "docker run --gpus all" in note)
    assert unused_cards_note(NOTHING, with_driver(tmp_path, "580.65.06")) is None


@pytest.mark.parametrize(
    ("number", "cards", "index"),
    [
        ("525.60.13", ["9.0"], "cu126"), ("569.1", ["7.5"], "cu126"), ("570.86.15", ["12.0"], "cu128"),
        ("610.1", ["7.5", "7.5"], "cu130"), ("580.65.06", ["7.0"], "cu126"), ("570.86.15", ["6.1"], "cu126"),
        ("524.1", ["7.5"], None), ("580.65.06", ["3.7"], None),
        ("580.65.06", ["6.1", "12.0"], "cu130"), ("580.65.06", ["Field \"compute_cap\" is not a valid field"], "cu130"),
    ],
)  # fmt: skip
def test_every_driver_from_525_has_a_build_with_kernels_for_its_cards(
    number: str, cards: list[str], index: str | None, tmp_path: Path
) -> None:
    write_nvidia_smi(tmp_path / "bin", "\n".join(f"echo '{card}'" for card in cards))
    said = build_words({"PATH": f"{tmp_path / 'bin'}:/bin"}, with_driver(tmp_path, number))
    assert f"driver {number} and compute" in said
    assert (f": pip install --index-url https://download.pytorch.org/whl/{index} " if index else "no build of") in said


def shown_by_make(folder: Path, torch: tuple[str, str | None] | None, driver: str | None) -> str:
    """Return the commands of `make install` on a machine with this driver and a torch of (version, CUDA) of its own."""
    answers = f'case "$1" in -L) echo "GPU 0: NVIDIA H100";; *) echo {driver};; esac'
    write_nvidia_smi(folder / "bin", answers if driver else "exit 9")
    if torch:
        (folder / "torch").mkdir()
        (folder / "torch/__init__.py").touch()
        (folder / "torch/version.py").write_text("__version__, cuda = {!r}, {!r}\n".format(*torch))
    hidden = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder)}
    words = ["make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", "install"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | hidden, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(installed_gpus(os.environ) > 0, reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("torch", "driver", "installs", "own"),
    [
        (None, None, "torch==2.13.0", False),
        (("2.11.0+cu130", "13.0"), None, "torch==2.13.0", False),  # no GPU that could use it
        (("2.11.0+cu130", "13.0"), "580.65.06", "", True),
        (("2.11.0+cu126", "12.6"), "535.161.08", "", True),
        (("2.11.0+cu130", "13.0"), "535.161.08", "whl/cu126 'torch==2.13.*'", False),
        (("2.9.0+cu126", "12.6"), "535.161.08", "whl/cu126 'torch==2.13.*'", False),
        (("2.13.0+cpu", None), "535.161.08", "whl/cu126 'torch==2.13.*'", False),
    ],
)
def test_make_takes_the_torch_of_the_machine_or_one_for_its_driver(
    torch: tuple[str, str | None] | None, driver: str | None, installs: str, own: bool, tmp_path: Path
) -> None:
    shown = shown_by_make(tmp_path, torch, driver)
    assert ("--system-site-packages" in shown) == own
    assert ("install --quiet torch==2.13.0" in shown) == (driver is None)
    assert installs in shown and (installs or "'torch" not in shown)


CARD = "0000:1b:00.0"


def system(root: Path, node: str, processors: str = "") -> Path:
    """Write the files of /sys for a card on a NUMA node with these processors."""
    files = {f"bus/pci/devices/{CARD}/numa_node": node, f"devices/system/node/node{node}/cpulist": processors}
    for name, text in files.items():
        if text:
            (root / "sys" / name).parent.mkdir(parents=True)
            (root / "sys" / name).write_text(f"{text}\n")
    return root


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

    def bound(processors: str, node: str = "0") -> str:
        root = system(tmp_path / f"{node}-{processors}", node, processors)
        return python("-c", BOUND, CARD, root, executed=True).stdout.strip()

    assert bound(f"{own[-1]},9999", "1") == f"{{({own[-1]},)}}"
    assert bound(f"{own[0]}-{own[-1]}") == f"{{{tuple(own)}}}"
    assert bound("9999") == f"{{{tuple(own)}}}"  # none that it may use: as before
    assert bound("", "-1") == bound("", "") == f"{{{tuple(own)}}}"  # unknown to the system; a container without /sys
