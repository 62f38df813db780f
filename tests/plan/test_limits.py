"""What a machine must allow the workers of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import environment, fsdptrain, write_recipe

from fsdptrain.cli import _claim
from fsdptrain.config.reader import load
from fsdptrain.launch.launcher import worker_settings
from fsdptrain.plan.limits import (
    Limits,
    compiled_where_possible,
    fatal_limits,
    files_needed,
    limits_here,
    risky_limits,
    uncompiled_note,
)
from fsdptrain.plan.plan import Plan, make_plan, open_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.text import MIB

ENOUGH = Limits(None, None, None, rdma=True, c_compiler=True, cpp_compiler=True, header=True)


def plan_on(tmp_path: Path, nnodes: int, device: Any = "cuda", *overrides: str) -> Plan:
    batch = 8 * nnodes
    written = load(write_recipe(tmp_path), [f"train.global_batch_size={batch}", *overrides])
    return make_plan(written, Topology(device, nnodes, 8, endpoint="a:1"))


@pytest.mark.parametrize(
    ("limits", "overrides", "says"),
    [
        ({"open_files": 600}, [], "may open 600 files, but each of 128 ranks needs 780: raise the hard limit"),
        ({"c_compiler": False}, ["train.compile=true"], "there is no C compiler (gcc or clang, or CC): install gcc"),
        ({"cpp_compiler": False}, ["train.compile=true"], ""),  # of the CPU
        ({"header": False}, ["train.compile=true"], "there is no Python.h"),
        ({"c_compiler": False}, ["train.compile=false"], ""),
        ({}, ["train.compile=true"], ""),
    ],
)
def test_limits_with_which_no_worker_can_train(
    limits: dict[str, Any], overrides: list[str], says: str, tmp_path: Path
) -> None:
    found = list(fatal_limits(plan_on(tmp_path, 16, "cuda", *overrides), dataclasses.replace(ENOUGH, **limits)))
    assert len(found) == bool(says) and says in "".join(map(str, found))


@pytest.mark.parametrize(
    ("nnodes", "overrides", "limits", "compiles"),
    [
        (1, [], {"c_compiler": False}, False),
        (1, [], {"header": False}, False),
        (1, [], {}, "auto"),
        (1, ["train.compile=true"], {"c_compiler": False}, True),  # refused
        (2, [], {"c_compiler": False}, "auto"),  # refused: another node may have a compiler
    ],
)
def test_without_a_compiler_auto_does_not_compile_on_a_node_of_its_own(
    nnodes: int, overrides: list[str], limits: dict[str, Any], compiles: object, tmp_path: Path
) -> None:
    plan, here = plan_on(tmp_path, nnodes, "cuda", *overrides), dataclasses.replace(ENOUGH, **limits)
    assert compiled_where_possible(plan, here).recipe.train.compile == compiles
    assert bool(list(fatal_limits(plan, here))) == bool(limits and compiles)
    note = uncompiled_note(plan, here)
    assert (note is not None and "install gcc, g++ and python3-dev; without them" in note) == (not compiles)
    assert uncompiled_note(compiled_where_possible(plan, here), here) is None


def test_what_is_run_is_planned_for_the_compiler_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdptrain.plan.topology.find_topology", lambda *_, **__: Topology("cuda", 1, 1))
    monkeypatch.setattr("fsdptrain.plan.limits.limits_here", lambda: dataclasses.replace(ENOUGH, c_compiler=False))
    with contextlib.ExitStack() as stack:
        plan, _ = _claim(stack, load(write_recipe(tmp_path)), fresh=False, trust_remote_code=False)
        assert plan.recipe.train.compile is False and not plan.compiles
        assert open_plan(plan.rundir.plan).recipe.train.compile is False


def test_the_ranks_of_a_node_share_its_cores_when_they_compile(tmp_path: Path) -> None:
    plan, name = dataclasses.replace(plan_on(tmp_path, 1), threads=12), "TORCHINDUCTOR_COMPILE_THREADS"
    assert worker_settings(plan, {})[name] == "12"
    assert worker_settings(dataclasses.replace(plan, threads=96), {})[name] == "32"
    assert name not in worker_settings(plan, {name: "1"})  # the user's is kept


def test_limits_with_which_nccl_may_fail(tmp_path: Path) -> None:
    tight = dataclasses.replace(ENOUGH, shm_bytes=64 * MIB, locked_bytes=8 * MIB)
    shm, locked = risky_limits(plan_on(tmp_path, 2), tight)
    assert shm.startswith("/dev/shm has 64.0 MiB, and NCCL may need 512.0 MiB: docker run --ipc=host")
    assert locked.startswith("a process may lock 8.0 MiB of memory, too little for NCCL over InfiniBand")
    for plan in (plan_on(tmp_path, 2, "cpu"), plan_on(tmp_path, 2)):
        assert not list(risky_limits(plan, ENOUGH))
    assert len(list(risky_limits(plan_on(tmp_path, 1), tight))) == 1  # one node locks no memory for RDMA
    assert not list(risky_limits(plan_on(tmp_path, 2, "cpu"), tight))


def test_the_limits_of_this_machine_are_found() -> None:
    found = limits_here({})
    assert found.shm_bytes is None or found.shm_bytes > 0
    assert found.open_files in (None, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


@pytest.mark.parametrize(
    ("programs", "env", "c", "cpp"),
    [
        ("cc g++ clang++", {}, False, True),
        ("gcc", {}, True, False),
        ("clang", {}, True, False),
        ("gcc", {"CC": "no-such-compiler"}, False, False),
        ("gcc ccache", {"CC": "ccache gcc"}, False, False),  # Triton starts a program of this name
        ("mine", {"CC": "mine", "CXX": "mine -O2"}, True, True),
    ],
)
def test_the_compilers_are_those_that_triton_and_inductor_would_start(
    programs: str, env: dict[str, str], c: bool, cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name in programs.split() else None)
    found = limits_here(env)
    assert (found.c_compiler, found.cpp_compiler) == (c, cpp)


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


def test_a_run_names_a_missing_compiler(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__compile=True)
    (tmp_path / "bin").mkdir()
    done = fsdptrain("run", recipe, PATH=str(tmp_path / "bin"))
    assert done.returncode == 2 and "train.compile: there is no C++ compiler (g++, or CXX): install" in done.stderr
