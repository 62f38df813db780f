"""What this machine must allow the workers of a run: open files, shared and locked memory, a compiler. No torch."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.text import MIB, size

GROUPS = 4  # process groups of a rank: all ranks, those for side work, and the two dimensions of the mesh
OWN_FILES = 256  # of a rank besides its groups: libraries, data, logs
SHM_PER_WORKER = 64 * MIB  # a container has 64 MiB by default, which NCCL exceeds with two GPUs
SHM_WAY_OUT = "docker run --ipc=host or --shm-size, in Kubernetes a memory-backed emptyDir"
LOCKED_BYTES = 1024 * MIB  # RDMA registers its buffers, which locks them


@dataclass(frozen=True)
class Limits:
    """Limits of a process on this machine: bytes of /dev/shm and of locked memory, and what torch.compile needs.

    `open_files` is the hard limit. None: unlimited, or unknown. `rdma` says whether there is InfiniBand or RoCE.
    """

    open_files: int | None
    shm_bytes: int | None
    locked_bytes: int | None
    rdma: bool
    c_compiler: bool
    cpp_compiler: bool
    header: bool


def limits_here(env: Mapping[str, str] = os.environ) -> Limits:
    """Return the limits of this process."""
    shm = None
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        shm = found.f_blocks * found.f_frsize
    devices = Path("/sys/class/infiniband")
    return Limits(
        open_files=_finite(resource.RLIMIT_NOFILE),
        shm_bytes=shm,
        locked_bytes=_finite(resource.RLIMIT_MEMLOCK),
        rdma=devices.is_dir() and any(devices.iterdir()),
        # As Triton looks for one (triton/runtime/build.py), to which CC is one word, and as inductor does for the CPU.
        c_compiler=any(map(shutil.which, [env["CC"]] if "CC" in env else ["gcc", "clang"])),
        cpp_compiler=any(map(shutil.which, env.get("CXX", "g++").split()[:1])),
        header=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    )


def _finite(kind: int) -> int | None:
    """Return a hard limit; None if there is none."""
    hard = resource.getrlimit(kind)[1]
    return None if hard == resource.RLIM_INFINITY else hard


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
    if problems := list(fatal_limits(plan, limits_here())):
        raise RecipeError(problems)


def fatal_limits(plan: Plan, limits: Limits) -> Iterator[Problem]:
    """Yield the limits with which no worker can train."""
    world = plan.topology.world_size
    if limits.open_files is not None and limits.open_files < (needed := files_needed(world)):
        yield Problem(
            f"a process may open {limits.open_files} files, but each of {world} ranks needs {needed}: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE of the service, docker run --ulimit nofile)",
            "open files",
        )
    if (fault := compile_fault(plan, limits)) and not uncompiled_note(plan, limits):
        yield Problem(f"{fault}, or set train.compile=false", "train.compile")


def compile_fault(plan: Plan, limits: Limits) -> str | None:
    """Return what torch.compile lacks here, None if it lacks nothing or is not used."""
    on_cpu = plan.topology.device == "cpu"
    compiler = "C++ compiler (g++, or CXX)" if on_cpu else "C compiler (gcc or clang, or CC)"
    there = {compiler: limits.cpp_compiler if on_cpu else limits.c_compiler, "Python.h": limits.header}
    lacks = " and ".join(name for name in there if not there[name])
    if not lacks or not plan.compiles:
        return None
    return f"there is no {lacks}: install gcc, g++ and python3-dev"


def uncompiled_note(plan: Plan, limits: Limits) -> str | None:
    """Return a note if `train.compile: auto` does not compile here. Several nodes must be equal."""
    fault = compile_fault(plan, limits)
    is_free = plan.recipe.train.compile == "auto" and plan.topology.nnodes == 1
    return f"train.compile: {fault}; without them the model is not compiled" if fault and is_free else None


def compiled_where_possible(plan: Plan, limits: Limits) -> Plan:
    """Return the plan with `train.compile: false` if `uncompiled_note` has a note on it."""
    return varied(plan, {"train.compile": False}) if uncompiled_note(plan, limits) else plan


def risky_limits(plan: Plan, limits: Limits) -> Iterator[str]:
    """Yield the limits with which NCCL may fail, depending on how it connects the GPUs."""
    topology = plan.topology
    if topology.device == "cpu":
        return
    needed = SHM_PER_WORKER * topology.nproc_per_node
    if topology.nproc_per_node > 1 and limits.shm_bytes is not None and limits.shm_bytes < needed:
        yield f"/dev/shm has {size(limits.shm_bytes)}, and NCCL may need {size(needed)}: {SHM_WAY_OUT}"
    if topology.nnodes > 1 and limits.rdma and limits.locked_bytes is not None and limits.locked_bytes < LOCKED_BYTES:
        yield (
            f"a process may lock {size(limits.locked_bytes)} of memory, too little for NCCL over InfiniBand or RoCE: "
            "ulimit -l unlimited, docker run --ulimit memlock=-1, in Kubernetes the capability IPC_LOCK"
        )


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that a new process can use: of the machine, or of the job's or container's limit.

    `root` holds /proc and /sys.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    available = int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) * 1024
    for group, limit, used, cache in _memory_groups(root):
        try:
            most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
            counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            available = min(available, most - now + int(counts[cache]))
        except (OSError, ValueError, KeyError):  # no limit, or not to be read
            continue
    return available


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the folder of every control group whose memory limit holds for this process, and three names.

    They are the files of its limit and of what is used, and in its memory.stat the files' cache, which can be freed.
    """
    folder = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, names = folder, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = folder / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = Path(name.lstrip("/"))
        for part in (group, *group.parents):
            yield (top / part, *names)
