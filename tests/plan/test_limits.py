"""What a machine must allow the workers of a run."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import environment, write_recipe

from fsdptrain.cli import _plan_here
from fsdptrain.config.reader import load
from fsdptrain.launch.launcher import ALLOCATOR, worker_settings
from fsdptrain.launch.run_lock import claim_run_dir
from fsdptrain.plan import limits
from fsdptrain.plan.limits import compile_fault, fatal_limits, files_needed, risky_limits, uncompiled_note
from fsdptrain.plan.plan import Plan, make_plan, open_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.text import MIB


def plan_on(tmp_path: Path, nnodes: int, device: Any = "cuda", *overrides: str) -> Plan:
    batch = 8 * nnodes
    written = load(write_recipe(tmp_path), [f"train.global_batch_size={batch}", *overrides])
    return make_plan(written, Topology(device, nnodes, 8, endpoint="a:1"))


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    programs: str = "gcc g++",
    open_files: int = -1,
    locked: int = -1,
    header: bool = True,
) -> None:
    """Pretend that this machine has these programs, hard limits and header."""
    hard = {resource.RLIMIT_NOFILE: open_files, resource.RLIMIT_MEMLOCK: locked}
    monkeypatch.setattr("shutil.which", lambda name: name if name in programs.split() else None)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (0, hard[kind]))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)
    include = sysconfig.get_path("include") if header else "nowhere"
    monkeypatch.setattr("sysconfig.get_path", lambda name: include)


ON = "train.compile=true"


@pytest.mark.parametrize(
    ("nnodes", "overrides", "machine", "says", "noted"),
    [
        (16, [ON], {"open_files": 600}, "may open 600 files, but each of 128 ranks needs 780: raise the hard", False),
        (1, [ON], {"programs": "g++"}, "there is no C compiler (gcc or clang, or CC): install gcc", False),
        (1, [ON], {"programs": "clang"}, "", False),
        (1, [ON], {"header": False}, "there is no Python.h", False),
        (1, ["train.compile=false"], {"programs": ""}, "", False),
        # auto does not compile then, on a node of its own: another one may have a compiler.
        (1, [], {"programs": ""}, "", True),
        (1, [], {"header": False}, "", True),
        (1, [], {}, "", False),
        (2, [], {"programs": ""}, "there is no C compiler", False),
    ],
)
def test_limits_with_which_no_worker_can_train(
    nnodes: int, overrides: list[str], machine: Any, says: str, noted: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan = plan_on(tmp_path, nnodes, "cuda", *overrides)
    pretend(monkeypatch, **machine)
    found = list(fatal_limits(plan))
    assert len(found) == bool(says) and says in "".join(map(str, found))
    note = uncompiled_note(plan)
    assert ("install gcc, g++ and python3-dev; without them" in (note or "")) == noted


@pytest.mark.parametrize(
    ("env", "device", "programs", "fault"),
    [
        ({"CC": "icx"}, "cuda", "gcc", True), ({"CC": "icx"}, "cuda", "icx", False),
        ({"CC": "ccache gcc"}, "cuda", "gcc ccache", True), ({"CXX": "ccache g++"}, "cpu", "ccache", False),
        ({"CXX": "icpx"}, "cpu", "g++", True), ({}, "cpu", "gcc", True),
    ],
)  # fmt: skip
def test_compilers_are_found_as_triton_and_inductor_would_start_them(
    env: dict[str, str], device: str, programs: str, fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_on(tmp_path, 1, device, "train.compile=true")
    pretend(monkeypatch, programs)
    assert bool(compile_fault(plan, env)) == fault


def test_what_is_run_is_planned_for_the_compiler_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdptrain.plan.topology.find_topology", lambda *_, **__: Topology("cuda", 1, 1))
    pretend(monkeypatch, programs="")
    written = load(write_recipe(tmp_path))
    plan = _plan_here(written, trust_remote_code=False)
    with claim_run_dir(plan, written.text, fresh=False):
        assert plan.recipe.train.compile is False and not plan.compiles
        assert open_plan(plan.rundir.plan).recipe.train.compile is False


def test_the_ranks_of_a_node_share_its_cores_when_they_compile(tmp_path: Path) -> None:
    plan, name = dataclasses.replace(plan_on(tmp_path, 1), threads=12), "TORCHINDUCTOR_COMPILE_THREADS"
    assert worker_settings(plan, {})[name] == "12"
    assert worker_settings(dataclasses.replace(plan, threads=96), {})[name] == "32"
    assert name not in worker_settings(plan, {name: "1"})  # the user's is kept
    assert worker_settings(plan, {})["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for own in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert not worker_settings(plan, {own: "x"}).keys() & ALLOCATOR


def test_limits_with_which_nccl_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, locked=8 * MIB)
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(limits, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_blocks=64, f_frsize=MIB))
    shm, locked = risky_limits(plan_on(tmp_path, 2))
    assert shm.startswith("/dev/shm has 64.0 MiB, and NCCL may need 512.0 MiB: docker run --ipc=host")
    assert locked.startswith("a process may lock 8.0 MiB of memory, too little for NCCL over InfiniBand")
    assert len(list(risky_limits(plan_on(tmp_path, 1)))) == 1  # one node locks no memory for RDMA
    assert not list(risky_limits(plan_on(tmp_path, 2, "cpu")))
    pretend(monkeypatch)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_blocks=512, f_frsize=MIB))
    assert not list(risky_limits(plan_on(tmp_path, 2)))


def test_the_soft_limit_of_open_files_is_raised_and_a_hard_limit_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    needed = files_needed(2)
    script = (
        "import pathlib, resource, sys; from fsdptrain.plan import limits\n"
        "from fsdptrain.plan.plan import make_plan; from fsdptrain.config.reader import load\n"
        "from fsdptrain.plan.topology import Topology\n"
        "limits.raise_limits(make_plan(load(pathlib.Path(sys.argv[1]), []), Topology('cpu', 1, 2)))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    words = ["prlimit", "--nofile=64:4096", sys.executable, "-c", script, str(recipe)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert done.stdout.split() == [str(needed)], done.stderr
    words = ["prlimit", "--nofile=128:128", sys.executable, "-m", "fsdptrain", "run", str(recipe)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 2 and f"may open 128 files, but each of 2 ranks needs {needed}" in done.stderr
    assert not (tmp_path / "run").exists()
