"""How this process was started: by torchrun, Slurm, MPI, Kubeflow or a cloud, as the variables of its environment say.

Some launchers start one process on each machine, and fsdptrain starts the workers there; others start every worker
themselves. `find_launcher` tells them apart, and `check_announced` refuses a run on one node where a variable says
several.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsdptrain.errors import RecipeError

Environment = Mapping[str, str]
DEFAULT_PORT = 29500  # of torch's `env://` rendezvous, where a launcher names no port and no job

# A port for each step of each job. It lies below the ports that Linux gives to outgoing connections (from 32768), and
# is different for jobs whose numbers differ by less than 270, so that jobs that share a machine do not meet.
FIRST_PORT, PORTS, STEPS = 20000, 10000, 37

SLURM_OWN_STEP = 0xFFFFFFF0  # higher step ids are the shells of `sbatch` and `salloc`: `srun` did not start them
SAGEMAKER_HOSTS = Path("/opt/ml/input/config/resourceconfig.json")  # in every container of a training job


class Variables(NamedTuple):
    """The variables of a launcher: the number of a process and of all, then both on its machine, and where they meet.

    Without the local numbers it starts the command once on each node. `host` has the address of the first node, or a
    line for each; `option` gives it to every process, where the launcher tells none.
    """

    source: str
    rank: str
    world: str
    local_rank: str = ""
    local_world: str = ""
    host: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"
    option: str = ""


TORCHRUN = Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = (
    Variables(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", option="mpirun -x MASTER_ADDR=HOST",
    ),
    Variables(
        "MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", option="mpirun -genv MASTER_ADDR HOST"
    ),
)  # fmt: skip
NODES = (
    Variables("Kubeflow", "PET_NODE_RANK", "PET_NNODES", host="PET_MASTER_ADDR", port="PET_MASTER_PORT"),
    # Without their local counterparts they count pods, as in Kubeflow's `PyTorchJob`.
    Variables("RANK and WORLD_SIZE", "RANK", "WORLD_SIZE"),
    Variables("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", host="SKYPILOT_NODE_IPS"),
    Variables("NUM_NODES and NODE_RANK", "NODE_RANK", "NUM_NODES"),  # RunPod
)

# What tells that there are several nodes or processes, or that this is not the first (counted from 0).
NODE_COUNTS = ("SLURM_STEP_NUM_NODES", "PET_NNODES", "AZUREML_NODE_COUNT", "SKYPILOT_NUM_NODES", "SM_HOST_COUNT")
PROCESS_COUNTS = tuple(each.world for each in (TORCHRUN, *MPI))
NUMBERS = ("NODE_RANK", "PMIX_RANK", "PBS_NODENUM")


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
    for names in MPI:
        if names.local_world in env and names.world in env:  # Slurm's PMI sets PMI_SIZE alone
            return _mpi(env, names)
    if "SLURM_STEP_ID" in env and not _is_shell(env):
        return _slurm(env)
    for names in NODES:
        if env.keys() >= {names.world, names.rank, names.host}:
            host, port = _value(env, names.host).split()[0], env.get(names.port) or DEFAULT_PORT
            found = _started(env, _place(env, names), host, port)
            workers = env.get("PET_NPROC_PER_NODE", "")  # of Kubeflow; a number, or auto, cpu or gpu
            return dataclasses.replace(found, nproc_per_node=int(workers)) if workers.isdecimal() else found
    if env.keys() & {"SM_HOSTS", "TRAINING_JOB_ARN"} and SAGEMAKER_HOSTS.is_file():
        job = json.loads(SAGEMAKER_HOSTS.read_text(encoding="utf-8"))
        hosts = sorted(job["hosts"])
        return _started(env, Launched("SageMaker", len(hosts), hosts.index(job["current_host"])), hosts[0])
    if "workerpool0" in env.get("CLUSTER_SPEC", ""):  # Vertex AI: the first pool has one replica, the next the others
        job = json.loads(env["CLUSTER_SPEC"])
        pools, task = job["cluster"], job["task"]
        replicas = [(pool, index) for pool in sorted(pools) for index in range(len(pools[pool]))]
        place = Launched("Vertex AI", len(replicas), replicas.index((task["type"], int(task["index"]))))
        host, _, port = pools["workerpool0"][0].rpartition(":")
        return _started(env, place, host, port)
    return None


def _is_shell(env: Environment) -> bool:
    """Return whether the variables of a Slurm step are those of a shell: what a user types there runs on one machine.

    `srun` did not start the shells of `sbatch` and `salloc`, and started that of `srun --pty bash` for typing.
    """
    return _number(env, "SLURM_STEP_ID") >= SLURM_OWN_STEP or "SLURM_PTY_PORT" in env


def check_announced(env: Environment, source: str) -> None:
    """Raise RecipeError if a variable contradicts a run on one node: it counts several, or this is not the first.

    `source` is the launcher that said so; it is empty if none was found. Then several processes are several runs too.
    """
    shell = "SLURM_STEP_ID" in env and _is_shell(env)
    alone = source or shell  # then counts of processes, and numbers, are those of this node or of another launcher
    for name in (*NODE_COUNTS[shell:], *(() if alone else (*PROCESS_COUNTS, *NUMBERS))):
        if not (text := env.get(name, "")).isdecimal() or int(text) <= (name not in NUMBERS):
            continue
        known = f"{source} has 1 node" if source else "no launcher was found, so this run would have 1 node"
        raise RecipeError(
            f"the environment variable {name} is {text}, but {known}: start the command with a launcher of "
            "docs/clusters.md, or set launch.nnodes and launch.rdzv_endpoint; if the other processes are no part of "
            f"this run, unset {name}"
        )


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


def _torchrun(env: Environment) -> Launched:
    """Read what torchrun sets; Azure ML sets the same, but the number of nodes instead of LOCAL_WORLD_SIZE."""
    world, nnodes = _number(env, "WORLD_SIZE"), env.get("AZUREML_NODE_COUNT")
    if "LOCAL_WORLD_SIZE" not in env and nnodes is not None:
        counts = {**env, "LOCAL_WORLD_SIZE": str(world // _number(env, "AZUREML_NODE_COUNT"))}
        return _started(env, dataclasses.replace(_place(counts, TORCHRUN), source="Azure ML"), env["MASTER_ADDR"])
    if "LOCAL_WORLD_SIZE" not in env and world > 1:
        raise RecipeError(
            f"RANK is {env['RANK']}, LOCAL_RANK is {env['LOCAL_RANK']} and WORLD_SIZE is {world}, but LOCAL_WORLD_SIZE "
            "is not set: set it to the number of processes on each node"
        )
    counts = {"LOCAL_WORLD_SIZE": "1", **env}
    implied = {"LOCAL_RANK": str(_number(env, "RANK") % (_number(counts, "LOCAL_WORLD_SIZE") or 1))}
    endpoint = _endpoint(env, env["MASTER_ADDR"], DEFAULT_PORT)
    return dataclasses.replace(_place({**implied, **counts}, TORCHRUN), endpoint=endpoint)


def _place(env: Environment, names: Variables) -> Launched:
    """Return the place of this process; raise RecipeError for numbers that contradict each other."""
    rank, world = _number(env, names.rank), _number(env, names.world)
    if rank >= world:
        raise RecipeError(f"{names.rank} is {rank}, but {names.world} is {world}: they are counted from 0")
    if not names.local_world:
        return Launched(names.source, world, rank)
    local_rank, local_world = _number(env, names.local_rank), _number(env, names.local_world)
    if not local_world or world % local_world:
        raise RecipeError(
            f"{names.source} started {world} processes, {local_world} of them here: start as many on each node"
        )
    if rank % local_world != local_rank:
        raise RecipeError(
            f"{names.rank} is {rank}, but {names.local_rank} is {local_rank} of {names.local_world} {local_world}: "
            "ranks that share a machine must have consecutive numbers (mpirun --map-by slot)"
        )
    return Launched(names.source, world // local_world, rank // local_world, local_world, local_rank=local_rank)


def _mpi(env: Environment, names: Variables) -> Launched:
    """Read what MPI sets for a process. It tells no address: a user or Slurm must."""
    place, host = _place(env, names), first_host(env.get("SLURM_JOB_NODELIST", ""))
    if place.nnodes > 1 and not (host or env.get("MASTER_ADDR")):
        raise RecipeError(
            f"{names.source} does not say where rank 0 runs: give every process MASTER_ADDR, with {names.option}"
        )
    jobs = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    job = next((env[name] for name in jobs if env.get(name)), "")
    digits = re.findall(r"\d+", job)  # `1266221057`; since Open MPI 5 `prterun-HOST-PID@1`
    return _started(env, place, host, port_of_job(int("".join(digits[-2:]))) if digits else DEFAULT_PORT)


def _slurm(env: Environment) -> Launched:
    """Read the step that `srun` started; the job may have more machines than the step."""
    job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    tasks = _value(env, "SLURM_STEP_TASKS_PER_NODE")  # `8(x4)`, or `2,1`
    counts = set(re.sub(r"\(x\d+\)", "", tasks).split(","))
    if len(counts) > 1:
        raise RecipeError(f"Slurm job {job} has {tasks} tasks on its nodes: start as many on each (--ntasks-per-node)")
    # Ranks are counted node by node, whatever `srun --distribution` says: SLURM_PROCID is not read.
    nnodes, node, local_rank = (_number(env, f"SLURM_{name}") for name in ("STEP_NUM_NODES", "NODEID", "LOCALID"))
    place = Launched(f"Slurm job {job}", nnodes, node, int(counts.pop()), local_rank=local_rank)
    return _started(env, place, first_host(_value(env, "SLURM_STEP_NODELIST")), port_of_job(job, step))


def _started(env: Environment, place: Launched, host: str, port: int | str = DEFAULT_PORT) -> Launched:
    """Return the process at a place, with where its run meets: a worker beside others, or alone on its machine."""
    endpoint = _endpoint(env, host if place.nnodes > 1 else "127.0.0.1", port)
    if place.nproc_per_node not in (None, 1):
        return dataclasses.replace(place, endpoint=endpoint)
    return Launched(place.source, place.nnodes, place.node, endpoint=endpoint if place.nnodes > 1 else None)


def _endpoint(env: Environment, host: str, port: int | str) -> str:
    """Return host:port of the first machine; MASTER_ADDR and MASTER_PORT, if they are set, replace them."""
    return f"{env.get('MASTER_ADDR') or host}:{env.get('MASTER_PORT') or port}"


def _number(env: Environment, name: str) -> int:
    value = _value(env, name)
    if not (value.isascii() and value.isdigit()):
        raise RecipeError(f"the environment variable {name} is {value!r}, but must be a whole number")
    return int(value)


def _value(env: Environment, name: str) -> str:
    if not (value := env.get(name, "")):
        raise RecipeError(f"the environment variable {name} is not set, though its launcher sets it")
    return value
