"""How this process was started: by torchrun, Slurm, MPI, Kubeflow or a cloud, as the variables of its environment say.

Every function is a function of the environment, except that SageMaker tells its hosts in a file. Some launchers start
one process on each machine, and fsdptrain starts the workers there; others start every worker themselves.
`find_launcher` tells them apart, and `check_announced` refuses a run on one node where a variable says several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdptrain.errors import RecipeError, listed
from fsdptrain.text import counted

Environment = Mapping[str, str]
DEFAULT_PORT = 29500  # of torch's `env://` rendezvous, where a launcher names no port and no job

# A port for each step of each job. It lies below the ports that Linux gives to outgoing connections (from 32768), and
# is different for jobs whose numbers differ by less than 270, so that jobs that share a machine do not meet.
FIRST_PORT, PORTS, STEPS = 20000, 10000, 37

SLURM_OWN_STEP = 0xFFFFFFF0  # higher step ids are the shells of `sbatch` and `salloc`: `srun` did not start them
SAGEMAKER_HOSTS = Path("/opt/ml/input/config/resourceconfig.json")  # in containers without SageMaker's toolkit too


class Variables(NamedTuple):
    """The variables of a launcher that starts processes: the number of this one and of all, then both on its machine.

    `option` gives every process another variable; it is empty where the launcher sets MASTER_ADDR.
    """

    source: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    option: str = ""


TORCHRUN = Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

MPI = (
    Variables(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun -x MASTER_ADDR=HOST",
    ),
    Variables(
        "MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpirun -genv MASTER_ADDR HOST"
    ),
)  # fmt: skip

# Variables of launchers: the number of nodes, the number of processes, and which of them this one is, from 0. Those of
# Flux, JSM, MVAPICH2 and PALS are not read otherwise: what they start is refused instead of being several runs.
NODE_COUNTS = (
    "SLURM_STEP_NUM_NODES", "FLUX_JOB_NNODES", "PET_NNODES", "AZUREML_NODE_COUNT", "SKYPILOT_NUM_NODES",
    "SM_HOST_COUNT",
)  # fmt: skip

PROCESS_COUNTS = (
    *(each.world for each in (TORCHRUN, *MPI)), "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "MV2_COMM_WORLD_SIZE",
)  # fmt: skip
NUMBERS = ("NODE_RANK", "PMIX_RANK", "PALS_RANKID", "PBS_NODENUM")


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
    if "PET_NNODES" in env:
        return _kubeflow_trainer(env)
    if env.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"}:
        return _pytorch_job(env)
    return _cloud(env)


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


class Place(NamedTuple):
    """The place of a process among equally many on each of `nnodes` machines."""

    nnodes: int
    node: int
    per_node: int
    local_rank: int


def _torchrun(env: Environment) -> Launched:
    """Read what torchrun sets; Azure ML sets the same, but the number of nodes instead of LOCAL_WORLD_SIZE."""
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "LOCAL_WORLD_SIZE" not in env and "AZUREML_NODE_COUNT" in env:
        nnodes = _number(env, "AZUREML_NODE_COUNT")
        if not nnodes or world % nnodes:
            raise RecipeError(f"WORLD_SIZE is {world}, but AZUREML_NODE_COUNT is {nnodes}: start as many on each node")
        counts = {**env, "LOCAL_WORLD_SIZE": str(world // nnodes)}
        return _started(env, "Azure ML", _place(counts, TORCHRUN), env["MASTER_ADDR"], DEFAULT_PORT)
    if "LOCAL_WORLD_SIZE" not in env and world > 1:
        raise RecipeError(
            f"RANK is {rank}, LOCAL_RANK is {env['LOCAL_RANK']} and WORLD_SIZE is {world}, but LOCAL_WORLD_SIZE is not "
            "set: set it to the number of processes on each node"
        )
    local_world = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else 1
    implied = {"LOCAL_WORLD_SIZE": str(local_world), "LOCAL_RANK": str(rank % (local_world or 1))}
    place = _place({**implied, **env}, TORCHRUN)
    endpoint = _endpoint(env, env["MASTER_ADDR"], DEFAULT_PORT)
    return Launched("torchrun", place.nnodes, place.node, local_world, endpoint, place.local_rank)


def _place(env: Environment, names: Variables) -> Place:
    """Return the place of this process; raise RecipeError for numbers that contradict each other."""
    rank, world, local_rank, local_world = (_number(env, name) for name in names[1:5])
    if not local_world or world % local_world:
        raise RecipeError(
            f"{names.source} started {world} processes, {local_world} of them here: start as many on each node"
        )
    if rank >= world:
        raise RecipeError(f"{names.rank} is {rank}, but {names.world} is {world}: ranks are counted from 0")
    if rank % local_world != local_rank:
        raise RecipeError(
            f"{names.rank} is {rank}, but {names.local_rank} is {local_rank} of {names.local_world} {local_world}: "
            "ranks that share a machine must have consecutive numbers (mpirun --map-by slot)"
        )
    return Place(world // local_world, rank // local_world, local_world, local_rank)


def _mpi(env: Environment, names: Variables) -> Launched:
    """Read what MPI and its relatives set for a process. They tell no address: a user or Slurm must."""
    place, host = _place(env, names), first_host(env.get("SLURM_JOB_NODELIST", ""))
    if place.nnodes > 1 and not (host or env.get("MASTER_ADDR")):
        raise RecipeError(
            f"{names.source} does not say where rank 0 runs: give every process MASTER_ADDR, with {names.option}"
        )
    jobs = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    job = next((env[name] for name in jobs if env.get(name)), "")
    digits = re.findall(r"\d+", job)  # `1266221057`; since Open MPI 5 `prterun-HOST-PID@1`
    port = port_of_job(int("".join(digits[-2:]))) if digits else DEFAULT_PORT
    return _started(env, names.source, place, host, port)


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


def _started(env: Environment, source: str, place: Place, host: str, port: int | str) -> Launched:
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
    return _node(env, "RANK and WORLD_SIZE", ("WORLD_SIZE", "RANK"), env["MASTER_ADDR"], DEFAULT_PORT)


def _cloud(env: Environment) -> Launched | None:
    """Read what a cloud sets on each of its nodes, on which it starts the command once; None without any."""
    if "SKYPILOT_NUM_NODES" in env:
        job = re.findall(r"\d+", env.get("SKYPILOT_TASK_ID", ""))
        first, _, _ = _value(env, "SKYPILOT_NODE_IPS").strip().partition("\n")
        job_port = port_of_job(int(job[-1])) if job else DEFAULT_PORT
        return _node(env, "SkyPilot", ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"), first, job_port)
    if env.keys() >= {"NUM_NODES", "NODE_RANK"} and env.keys() & {"MASTER_ADDR", "PRIMARY_ADDR"}:  # RunPod
        first, port = env.get("PRIMARY_ADDR", ""), env.get("PRIMARY_PORT") or DEFAULT_PORT
        return _node(env, "NUM_NODES and NODE_RANK", ("NUM_NODES", "NODE_RANK"), first, port)
    if "SM_HOSTS" in env or "TRAINING_JOB_ARN" in env:
        return _sagemaker(env)
    if "workerpool0" in env.get("CLUSTER_SPEC", ""):
        return _vertex(env)
    return None


def _node(env: Environment, source: str, names: tuple[str, str], first: str, port: int | str) -> Launched:
    """Return the place of a node from the variables of their number and of its own; `first` is the first host."""
    nnodes, node = (_number(env, name) for name in names)
    if node >= nnodes:
        raise RecipeError(f"{names[1]} is {node}, but {names[0]} is {nnodes}: nodes are counted from 0")
    return _started(env, source, Place(nnodes, node, 1, 0), first, port)


def _sagemaker(env: Environment) -> Launched | None:
    """Read the hosts of a training job, from SageMaker's toolkit or from the file that every container has."""
    if "SM_HOSTS" in env:
        job = {"hosts": _json(env, "SM_HOSTS"), "current_host": _value(env, "SM_CURRENT_HOST")}
    elif SAGEMAKER_HOSTS.is_file():
        job = json.loads(SAGEMAKER_HOSTS.read_text(encoding="utf-8"))
    else:
        return None
    hosts, own = sorted(job["hosts"]), job["current_host"]
    if own not in hosts:
        raise RecipeError(
            f"SageMaker names {counted(len(hosts), 'host')} ({listed(hosts)}), and {own} is not among them"
        )
    place = Place(len(hosts), hosts.index(own), 1, 0)
    return _started(env, "SageMaker", place, hosts[0], env.get("SM_MASTER_PORT") or DEFAULT_PORT)


def _vertex(env: Environment) -> Launched:
    """Read the worker pools of a Vertex AI job: the first has one replica, the next ones the others."""
    job = _json(env, "CLUSTER_SPEC")
    pools, task = job["cluster"], job["task"]
    replicas = [(pool, index) for pool in sorted(pools) for index in range(len(pools[pool]))]
    place = Place(len(replicas), replicas.index((task["type"], int(task["index"]))), 1, 0)
    host, _, port = pools["workerpool0"][0].rpartition(":")
    return _started(env, "Vertex AI", place, host, port)


def _json(env: Environment, name: str) -> Any:
    try:
        return json.loads(_value(env, name))
    except ValueError:
        raise RecipeError(f"the environment variable {name} is {env[name]!r}, but must be JSON") from None


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
