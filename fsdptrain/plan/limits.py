"""What this machine must allow the workers of a run: open files, shared and locked memory, a compiler. No torch."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.plan.plan import Plan
from fsdptrain.text import MIB, size

GROUPS = 4  # process groups of a rank: all ranks, those for side work, and the two dimensions of the mesh
OWN_FILES = 256  # of a rank besides its groups: libraries, data, logs
SHM_PER_WORKER = 64 * MIB  # a container has 64 MiB by default, which NCCL exceeds with two GPUs
SHM_WAY_OUT = "docker run --ipc=host or --shm-size, in Kubernetes a memory-backed emptyDir"
LOCKED_BYTES = 1024 * MIB  # RDMA registers its buffers, which locks them
RDMA_DEVICES = Path("/sys/class/infiniband")


def files_needed(world: int) -> int:
    """Return how many files a rank has open: in each group gloo has a connection to every rank, and three more."""
    return GROUPS * (world + 3) + OWN_FILES


def raise_limits(plan: Plan) -> None:
    """Raise the soft limits of this process and of its children as far as the run needs it and the hard ones allow.

    Raises RecipeError for what would end the workers without a message: too few open files, no compiler.
    """
    needs = {resource.RLIMIT_NOFILE: files_needed(plan.topology.world_size), resource.RLIMIT_MEMLOCK: LOCKED_BYTES}
    for kind, needed in needs.items():
        soft, hard = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(kind, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard))
    if problems := list(fatal_limits(plan)):
        raise RecipeError(problems)


def fatal_limits(plan: Plan) -> Iterator[Problem]:
    """Yield the limits of this process with which no worker can train."""
    world, open_files = plan.topology.world_size, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if open_files != resource.RLIM_INFINITY and open_files < (needed := files_needed(world)):
        yield Problem(
            f"a process may open {open_files} files, but each of {world} ranks needs {needed}: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE of the service, docker run --ulimit nofile)",
            "open files",
        )
    if (fault := compile_fault(plan)) and not uncompiled_note(plan):
        yield Problem(f"{fault}, or set train.compile=false", "train.compile")


def compile_fault(plan: Plan, env: Mapping[str, str] = os.environ) -> str | None:
    """Return what torch.compile lacks here, None if it lacks nothing or is not used."""
    if not plan.compiles:
        return None
    # As Triton looks for one (triton/runtime/build.py), to which CC is one word, and as inductor does for the CPU.
    name, programs = "C compiler (gcc or clang, or CC)", [env["CC"]] if "CC" in env else ["gcc", "clang"]
    if plan.topology.device == "cpu":
        name, programs = "C++ compiler (g++, or CXX)", env.get("CXX", "g++").split()[:1]
    lacks = [] if any(map(shutil.which, programs)) else [name]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        lacks.append("Python.h")
    return f"there is no {' and '.join(lacks)}: install gcc, g++ and python3-dev" if lacks else None


def uncompiled_note(plan: Plan) -> str | None:
    """Return a note if `train.compile: auto` does not compile here. Several nodes must be equal."""
    fault = compile_fault(plan)
    is_free = plan.recipe.train.compile == "auto" and plan.topology.nnodes == 1
    return f"train.compile: {fault}; without them the model is not compiled" if fault and is_free else None


def risky_limits(plan: Plan) -> Iterator[str]:
    """Yield the limits with which NCCL may fail, depending on how it connects the GPUs."""
    topology = plan.topology
    if topology.device == "cpu":
        return
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        shm, needed = found.f_blocks * found.f_frsize, SHM_PER_WORKER * topology.nproc_per_node
        if topology.nproc_per_node > 1 and shm < needed:
            yield f"/dev/shm has {size(shm)}, and NCCL may need {size(needed)}: {SHM_WAY_OUT}"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if topology.nnodes > 1 and any(RDMA_DEVICES.glob("*")) and 0 <= locked < LOCKED_BYTES:  # -1: unlimited
        yield (
            f"a process may lock {size(locked)} of memory, too little for NCCL over InfiniBand or RoCE: "
            "ulimit -l unlimited, docker run --ulimit memlock=-1, in Kubernetes the capability IPC_LOCK"
        )


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that a new process can use: of the machine, or of the job's or container's limit.

    `root` holds /proc and /sys.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    available = int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) * 1024
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        groups = []
    for line in groups:  # every control group whose limit holds for this process
        _, controllers, name = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        limit, used, cache = "memory.max", "memory.current", "inactive_file"
        if "memory" in controllers.split(","):  # version 1
            top /= "memory"
            limit, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        elif controllers:
            continue
        own = Path(name.lstrip("/"))
        for group in (top / own, *(top / parent for parent in own.parents)):
            try:
                most, now = (int((group / file).read_text(encoding="ascii")) for file in (limit, used))
                counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                available = min(available, most - now + int(counts[cache]))  # the cache of files can be freed
            except (OSError, ValueError, KeyError):  # no limit, or not to be read
                continue
    return available
