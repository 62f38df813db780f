"""GPUs are counted from a machine's files and programs; CUDA_VISIBLE_DEVICES selects among them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdptrain.plan.gpus import damaged_gpus, installed_gpus, visible_gpus

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
        (
            [
                "dev/nvidia0",
                "dev/nvidia1",
                f"{CAPABILITIES}/gpu0/mig/gi1/access",
                f"{CAPABILITIES}/gpu0/mig/gi1/ci0/access",
            ],
            1,
        ),
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


def test_gpus_with_damaged_memory_are_named_and_only_those_that_are_visible_are_asked(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, f"echo \"$@\" > {tmp_path}/words; printf '0, 0\\n3, 2\\n4, [N/A]\\n'")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,3,4"}
    (found,) = damaged_gpus(env)
    assert found.startswith("the memory of GPU 3 had 2 errors that ECC could not correct: restart the node, or reset")
    assert (tmp_path / "words").read_text().startswith("-i 0,3,4 --query-gpu=index,ecc.errors")
    write_nvidia_smi(tmp_path, "exit 9")
    assert damaged_gpus(env) == damaged_gpus(NOTHING) == []
