"""What only a GPU would run is executed on fake `cuda` tensors; `make cuda-fakes` shows which lines ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import TESTS, environment, python_path

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not torch.version.cuda, reason="this is a build of torch without CUDA: run make cuda-fakes"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, where no tensor need be fake"),
]


def test_every_statement_for_cuda_runs_on_fake_tensors(tmp_path: Path) -> None:
    shim = tmp_path / "libcuda.so.1"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-Wl,-soname,{shim.name}"]
    subprocess.run([*compiler, TESTS / "cuda_fakes" / "shim.c", "-o", shim], check=True)
    env = environment(LD_PRELOAD=str(shim), PYTHONPATH=python_path(TESTS.parent, TESTS))
    command = [sys.executable, "-m", "cuda_fakes.runs", str(tmp_path)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    assert done.returncode == 0 and "NOT RUN" not in done.stdout
