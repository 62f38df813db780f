"""What only a GPU would run is executed on fake `cuda` tensors; `make cuda-fakes` shows which lines ran.

And what Inductor and Triton make for a GPU is compiled to its machine code.
"""

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


def printed(folder: Path, module: str, *words: object) -> list[str]:
    """Return the lines that a module of `cuda_fakes` prints; it runs with the shim, and its caches are in `folder`."""
    shim = folder / "libcuda.so.1"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-Wl,-soname,{shim.name}"]
    subprocess.run([*compiler, TESTS / "cuda_fakes" / "shim.c", "-o", shim], check=True)
    env = environment(
        LD_PRELOAD=str(shim),
        PYTHONPATH=python_path(TESTS.parent, TESTS),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
        TRITON_CACHE_DIR=str(folder / "triton"),
    )
    command = [sys.executable, "-m", f"cuda_fakes.{module}", *map(str, words)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    assert done.returncode == 0
    return done.stdout.splitlines()


def test_every_statement_for_cuda_runs_on_fake_tensors(tmp_path: Path) -> None:
    assert not [line for line in printed(tmp_path, "runs", tmp_path) if line.startswith("NOT RUN")]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_shipped_recipes_compile_for_a_card(tmp_path: Path, capability: int) -> None:
    """Triton's, of a compiled decoder layer and of the loss: forward, backward and evaluation."""
    assert not [line for line in printed(tmp_path, "compiled", capability) if line.startswith("NOT COMPILED")]
