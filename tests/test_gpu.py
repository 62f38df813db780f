"""The same contract on a GPU: NCCL, fused kernels, CPU offload. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import events, fsdptrain, write_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses(tmp: Path, name: str, *overrides: str) -> list[float]:
    """The losses of a short run on one GPU."""
    recipe = write_recipe(tmp, output_dir=str(tmp / name), launch={"nproc_per_node": 1})
    done = fsdptrain("run", recipe, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(tmp / name, "start")[0]["device"] == torch.cuda.get_device_name()
    return [event["loss"] for event in events(tmp / name, "step")]


def test_a_gpu_gives_the_cpus_curve(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, output_dir=str(tmp_path / "cpu"), launch={"nproc_per_node": 1})
    done = fsdptrain("run", recipe, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [event["loss"] for event in events(tmp_path / "cpu", "step")]
    assert losses(tmp_path, "gpu") == pytest.approx(expected, rel=1e-5)


def test_offload_and_recomputation_change_nothing(tmp_path: Path) -> None:
    plain = losses(tmp_path, "plain")
    assert losses(tmp_path, "offload", "fsdp.cpu_offload=true") == pytest.approx(plain, rel=1e-5)
    selective = "fsdp.activation_checkpointing=selective"
    assert losses(tmp_path, "selective", selective) == pytest.approx(plain, rel=1e-5)
