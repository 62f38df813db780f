"""How this process was started: by torchrun, Slurm, MPI or Kubeflow, as the variables of its environment say.

Every function is a function of the environment. Some launchers start one process on each machine, and fsdptrain starts
the workers there; others start every worker themselves. `find_launcher` tells them apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fsdptrain.errors import RecipeError

Environment = Mapping[str, str]


DEFAULT_PORT = 29500  # of torch's `env://` rendezvous, where a launcher names no port and no job


# A port for each step of each job. It lies below the ports that Linux gives to outgoing connections (from 32768), and
# is different for jobs whose numbers differ by less than 270, so that jobs that share a machine do not meet.
FIRST_PORT, PORTS, STEPS = 20000, 10000, 37


SLURM_OWN_STEP = 0xFFFFFFF0  # higher step ids are the shells of `sbatch` and `salloc`: `srun` did not start them


@dataclass(frozen=True)
class Launched:
    """The place of this process in a run that a launcher started on `nnodes` machines.

    `source` names the launcher and its job. `node` is the number of this machine. `nproc_per_node` is the number of
    workers on each, if the launcher sets it. `endpoint` is host:port on the first machine; None on a single machine
    where fsdptrain starts the workers. A process that is a worker itself has a `local_rank` on its machine.
    """

    source: str
    nnodes: int
    node: int
    nproc_per_node: int | None = None
    endpoint: str | None = None
    local_rank: int | None = None


def find_launcher(env: Environment) -> Launched | None:
    """Return how a launcher started this process; None if a person did.

    The first one found counts, because the variables of an outer launcher (Slurm around `mpirun`, Kubeflow around
    torchrun) are inherited. Raises RecipeError for variables that contradict each other, or do not say enough.
    """
    if env.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"} and env.keys() & {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}:
        return _torchrun(env)
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in env:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        return _mpi(env, "Open MPI", *names, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if "MPI_LOCALNRANKS" in env and "PMI_SIZE" in env:  # Slurm's PMI sets PMI_SIZE alone
        return _mpi(env, "MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    shell = "SLURM_PTY_PORT" in env  # `srun --pty bash`: what a user types there runs on this machine only
    if "SLURM_STEP_ID" in env and _number(env, "SLURM_STEP_ID") < SLURM_OWN_STEP and not shell:
        return _slurm(env)
    if "PET_NNODES" in env:
        return _kubeflow_trainer(env)
    if env.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"}:
        return _pytorch_job(env)
    return None


def is_first(launched: Launched | None) -> bool:
    """Return whether this process is the only one, or the first one that the launcher started: it shows the run."""
    return launched is None or (launched.node == 0 and not launched.local_rank)


def worker_variables(launched: Launched | None) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker; none if this process is no worker that was launched."""
    if launched is None or launched.local_rank is None:
        return {}
    assert launched.nproc_per_node is not None and launched.endpoint is not None
    host, _, port = launched.endpoint.rpartition(":")
    return {
        "RANK": str(launched.node * launched.nproc_per_node + launched.local_rank),
        "LOCAL_RANK": str(launched.local_rank),
        "WORLD_SIZE": str(launched.nnodes * launched.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(launched.nproc_per_node),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's notation: `gpu-a08` of `gpu-a[08-11,14],login`."""
    first = re.match(r"(?:\[[^]]*\]|[^,[])+", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0]) if first else ""


def port_of_job(job: int, step: int = 0) -> int:
    """Return the port on which the workers of a job's step meet."""
    return FIRST_PORT + (job * STEPS + step % STEPS) % PORTS


class Place(NamedTuple):
    """The place of a process among equally many on each of `nnodes` machines."""

    nnodes: int
    node: int
    per_node: int
    local_rank: int


def _torchrun(env: Environment) -> Launched:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_world = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank % local_world
    nnodes = _nodes(world, local_world, "torchrun")
    endpoint = _endpoint(env, env["MASTER_ADDR"], DEFAULT_PORT)
    return Launched("torchrun", nnodes, rank // local_world, local_world, endpoint, local_rank)


def _mpi(env: Environment, source: str, *names: str) -> Launched:
    """Read rank, number of ranks, and both on this machine. MPI tells no address: a user or Slurm must."""
    rank, world, local_rank, local_world = (_number(env, name) for name in names)
    place = Place(_nodes(world, local_world, source), rank // local_world, local_world, local_rank)
    if rank % local_world != local_rank:
        raise RecipeError(
            f"{source} placed rank {rank} as number {local_rank} of {local_world} on its machine: ranks that share a "
            "machine must have consecutive numbers (mpirun --map-by slot)"
        )
    host = first_host(env.get("SLURM_JOB_NODELIST", ""))
    if place.nnodes > 1 and not (host or env.get("MASTER_ADDR")):
        raise RecipeError(
            f"{source} does not say where rank 0 runs: give every process MASTER_ADDR, with mpirun -x MASTER_ADDR=HOST "
            "(Open MPI) or -genv MASTER_ADDR HOST (MPICH, Intel)"
        )
    job = env.get("PMIX_NAMESPACE") or env.get("SLURM_JOB_ID", "")
    digits = re.findall(r"\d+", job)  # `1266221057`; since Open MPI 5 `prterun-HOST-PID@1`
    port = port_of_job(int("".join(digits[-2:]))) if digits else DEFAULT_PORT
    return _started(env, source, place, host, port)


def _slurm(env: Environment) -> Launched:
    """Read the step that `srun` started; the job may have more machines than the step."""
    job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    tasks = _value(env, "SLURM_STEP_TASKS_PER_NODE")  # `8(x4)`, or `2,1`
    counts = set(re.sub(r"\(x\d+\)", "", tasks).split(","))
    if len(counts) > 1:
        raise RecipeError(f"Slurm job {job} has {tasks} tasks on its nodes: start as many on each (--ntasks-per-node)")
    # Ranks are counted node by node, whatever `srun --distribution` says: SLURM_PROCID is not read.
    nnodes, node = _number(env, "SLURM_STEP_NUM_NODES"), _number(env, "SLURM_NODEID")
    place = Place(nnodes, node, int(counts.pop()), _number(env, "SLURM_LOCALID"))
    host = first_host(_value(env, "SLURM_STEP_NODELIST"))
    return _started(env, f"Slurm job {job}", place, host, port_of_job(job, step))


def _started(env: Environment, source: str, place: Place, host: str, port: int) -> Launched:
    """Return how a process was started that is alone on its machine, or a worker beside others."""
    endpoint = _endpoint(env, host if place.nnodes > 1 else "127.0.0.1", port)
    if place.per_node > 1:
        return Launched(source, place.nnodes, place.node, place.per_node, endpoint, place.local_rank)
    return Launched(source, place.nnodes, place.node, endpoint=endpoint if place.nnodes > 1 else None)


def _kubeflow_trainer(env: Environment) -> Launched:
    """Read what Kubeflow sets for torchrun in the pods of a `TrainJob`."""
    nodes, workers = env["PET_NNODES"], env.get("PET_NPROC_PER_NODE", "auto")
    if not nodes.isdigit():
        raise RecipeError(f"the environment variable PET_NNODES is {nodes!r}: the number of nodes must be fixed")
    nproc = int(workers) if workers.isdigit() else None  # else auto, cpu or gpu
    if nodes == "1":
        return Launched("Kubeflow", 1, 0, nproc)
    endpoint = f"{_value(env, 'PET_MASTER_ADDR')}:{_value(env, 'PET_MASTER_PORT')}"
    return Launched("Kubeflow", int(nodes), _number(env, "PET_NODE_RANK"), nproc, endpoint)


def _pytorch_job(env: Environment) -> Launched:
    """Read RANK and WORLD_SIZE without their local counterparts: as in Kubeflow's `PyTorchJob`, they count pods."""
    nnodes = _number(env, "WORLD_SIZE")
    endpoint = _endpoint(env, env["MASTER_ADDR"], DEFAULT_PORT) if nnodes > 1 else None
    return Launched("RANK and WORLD_SIZE", nnodes, _number(env, "RANK"), None, endpoint)


def _endpoint(env: Environment, host: str, port: int) -> str:
    """Return host:port of the first machine; MASTER_ADDR and MASTER_PORT, if they are set, replace them."""
    return f"{env.get('MASTER_ADDR') or host}:{env.get('MASTER_PORT') or port}"


def _nodes(world: int, local_world: int, source: str) -> int:
    """Return the number of machines; raise RecipeError if they cannot have the same number of processes."""
    if not local_world or world % local_world:
        raise RecipeError(f"{source} started {world} processes, {local_world} of them here: start as many on each node")
    return world // local_world


def _number(env: Environment, name: str) -> int:
    value = _value(env, name)
    if not (value.isascii() and value.isdigit()):
        raise RecipeError(f"the environment variable {name} is {value!r}, but must be a whole number")
    return int(value)


def _value(env: Environment, name: str) -> str:
    if not (value := env.get(name, "")):
        raise RecipeError(f"the environment variable {name} is not set, though its launcher sets it")
    return value
