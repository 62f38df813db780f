"""The processes of a run: how many, on which machines and devices."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdptrain.config.keys import value_at, value_text
from fsdptrain.config.schema import MAX_NODES, MAX_WORKERS, Recipe, node_range
from fsdptrain.errors import Problem, RecipeError
from fsdptrain.plan.gpus import visible_gpus
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.launchers import Launched, check_announced, find_launcher
from fsdptrain.plan.network import address_of
from fsdptrain.text import counted

NO_ENDPOINT = (
    "several nodes need a rendezvous: set launch.rdzv_endpoint to host:port of the first node, or start the command on "
    "every node with srun"
)

# Seconds in which the name of the first node may become known: name servers have pauses, and in Kubernetes a pod gets
# its name when it starts, maybe later than this one.
NAME_S, POD_NAME_S, NAME_POLL_S = 3.0, 60.0, 0.5


@dataclass(frozen=True)
class Topology:
    """The processes of a run: `nnodes` machines with `nproc_per_node` workers each, on one kind of device.

    `source` names the launcher that these numbers come from; it is empty if they come from the recipe. `endpoint` is
    host:port on the first machine, where the others meet it; None on a single machine.

    If the run may go on with fewer machines, `least_nnodes` is their least number, and `nnodes` the largest until the
    machines have met (see `Plan.on_nodes`).
    """

    device: Literal["cpu", "cuda"]
    nnodes: int
    nproc_per_node: int
    joined: bool = False  # the launcher started the workers
    source: str = ""
    endpoint: str | None = None
    least_nnodes: int | None = None

    def problems(self) -> list[Problem]:
        """Return a problem for each number that no run has."""
        limits = {"nnodes": MAX_NODES, "least_nnodes": MAX_NODES, "nproc_per_node": MAX_WORKERS}
        numbers = {name: getattr(self, name) for name in limits if getattr(self, name) is not None}
        return [
            Problem(f"{value_text(value)} is not a number from 1 to {limits[name]}{self.origin}", f"launch.{name}")
            for name, value in numbers.items()
            if not 1 <= value <= limits[name]
        ]

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change from one attempt to the next."""
        return self.least_nnodes is not None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nnodes * self.nproc_per_node

    @property
    def origin(self) -> str:
        """The source as an addition to the numbers: ` (from Slurm job 12)`; empty without one."""
        return f" (from {self.source})" if self.source else ""

    @property
    def meeting_place(self) -> str:
        """The endpoint, with what determines it: `n1:20037 (from Slurm job 1)`."""
        return f"{self.endpoint}{self.origin or ' (launch.rdzv_endpoint)'}"

    def unknown_host(self) -> RecipeError:
        """Return the error of an endpoint whose host this machine does not know."""
        way_out = "a host that every node can resolve"
        fault = f"{host_of(self.endpoint or '')} cannot be resolved on {socket.gethostname()}"
        if not self.source:
            return RecipeError(f"launch.rdzv_endpoint: {self.endpoint}: {fault}; choose {way_out}")
        return RecipeError(
            f"{self.endpoint}, where {self.source} lets its nodes meet: {fault}; set MASTER_ADDR to {way_out}"
        )


def find_topology(
    recipe: Recipe,
    env: Mapping[str, str],
    elsewhere: bool = False,
    root: Path = Path("/"),
    explicit: Collection[str] = (),
) -> Topology:
    """Return the processes of a run on this machine: those of the launcher that started this one, else of `launch`.

    `env` is the environment, `root` the folder that holds /dev and /proc, `explicit` the keys that the recipe sets.
    `elsewhere`: the run is planned for other machines. Raises RecipeError for keys that contradict the launcher and,
    unless `elsewhere`, for more workers than visible GPUs and for several nodes without an endpoint; and as
    `check_announced` does.
    """
    gpus = visible_gpus(env, root)
    launch, launched = recipe.launch, find_launcher(env)
    if launched:
        check_agreement(recipe, launched, explicit)
    least, most = node_range(launch.nnodes)
    found = launched or Launched("", most, 0, endpoint=launch.rdzv_endpoint)
    topology = dataclasses.replace(
        topology_of_job(recipe, found.nnodes, gpus, found.nproc_per_node),
        joined=found.local_rank is not None,
        source=found.source,
        endpoint=found.endpoint,
        least_nnodes=least if least < most and not launched else None,
    )
    if problems := topology.problems():
        raise RecipeError(problems)
    if found.nnodes == 1:
        check_announced(env, found.source)
    if elsewhere:
        return topology
    check_endpoint(topology)
    if gpus and topology.nproc_per_node > gpus and not topology.joined:
        message = f"{topology.nproc_per_node} workers, but only {counted(gpus, 'GPU')} visible: lower it, or use auto"
        raise RecipeError([Problem(message, "launch.nproc_per_node")])
    return topology


def check_agreement(recipe: Recipe, launched: Launched, explicit: Collection[str]) -> None:
    """Raise RecipeError for those of the `explicit` keys of `launch` that contradict the launcher."""
    least, most = node_range(recipe.launch.nnodes)
    known = {
        "launch.nnodes": recipe.launch.nnodes if least <= launched.nnodes <= most else launched.nnodes,
        "launch.nproc_per_node": launched.nproc_per_node,
        "launch.rdzv_endpoint": launched.endpoint,
    }
    problems = []
    for path, found in known.items():
        wanted = value_at(recipe, path)
        if path not in explicit or found is None or wanted in (None, "auto", found):
            continue
        # A shipped recipe can be overridden only.
        way_out = "remove this key" if path == "launch.rdzv_endpoint" else f"set {path}={found}, or remove this key"
        problems.append(Problem(f"{wanted} contradicts {launched.source}, which has {found}: {way_out}", path))
    if problems:
        raise RecipeError(problems)


def check_endpoint(topology: Topology) -> None:
    """Raise RecipeError if the workers of several nodes have no place to meet."""
    if topology.nnodes > 1 and topology.endpoint is None:
        raise RecipeError([Problem(NO_ENDPOINT, "launch.nnodes")])


def check_name(topology: Topology, env: Mapping[str, str]) -> None:
    """Raise RecipeError if this machine does not know the name of the first node, and did not learn it in some seconds.

    Without this check torch would try for a minute, and then say that the nodes did not meet.
    """
    if topology.nnodes == 1 or topology.endpoint is None:
        return
    host = host_of(topology.endpoint)
    end = time.monotonic() + (POD_NAME_S if "KUBERNETES_SERVICE_HOST" in env else NAME_S)
    while address_of(host) is None:
        if time.monotonic() > end:
            raise topology.unknown_host()
        time.sleep(NAME_POLL_S)


def host_of(endpoint: str) -> str:
    """Return the host of HOST:PORT, of [IPv6]:PORT, or of a HOST without a port."""
    host, _, port = endpoint.rpartition(":")
    return (host if host and port.isdigit() else endpoint).strip("[]")


def topology_of(recipe: Recipe, count: int | None, hardware: Hardware, overridden: Collection[str] = ()) -> Topology:
    """Return the processes of a run on other machines: one on each of `count` cards, else what `launch` sets.

    Raises RecipeError for a `count` that does not fill whole nodes, or that contradicts the keys of `launch` that the
    command line sets, `overridden`; those of the file are replaced.
    """
    gpus = 0 if hardware.is_cpu else hardware.gpus_per_node
    if count is None:
        least, most = node_range(recipe.launch.nnodes)
        return dataclasses.replace(topology_of_job(recipe, most, gpus), least_nnodes=least if least < most else None)
    nproc = min(count, hardware.gpus_per_node)
    if count % nproc:
        raise RecipeError(
            f"--hardware: {count} × {hardware.name} do not fill nodes of {nproc}: use a multiple of {nproc}, or "
            f"NODESxGPUSx{hardware.name}"
        )
    check_agreement(recipe, Launched(f"--hardware {count}x{hardware.name}", count // nproc, 0, nproc), overridden)
    return topology_of_job(recipe, count // nproc, gpus, nproc)


def topology_of_job(recipe: Recipe, nnodes: int, gpus_per_node: int, workers: int | None = None) -> Topology:
    """Return the processes of a run on `nnodes` nodes with `gpus_per_node` GPUs each (0: on the CPU).

    `workers` on each, else `launch.nproc_per_node`; for `auto` as many as GPUs (two on the CPU), if each gets at least
    one micro-batch.
    """
    wanted, train = workers or recipe.launch.nproc_per_node, recipe.train
    if wanted == "auto":
        of_rows = recipe.parallel.ranks_of_row * recipe.parallel.pipeline
        busy = train.global_batch_size * of_rows // (train.micro_batch_size * nnodes)
        wanted = min(gpus_per_node or 2, max(1, busy))
    return Topology("cuda" if gpus_per_node else "cpu", nnodes, wanted)
