"""`World`: this process among the others: rank, device, process groups, mesh, and the few reductions we need."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdptrain.config.hardware import card
from fsdptrain.config.plan import Plan
from fsdptrain.errors import Stopped
from fsdptrain.processes import StopRequest

HEARD_S = 2.0  # the agent passes a stop on every second


Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from this one.

    `mesh` is ("shard",) or ("replicate", "shard"). `side` is a gloo group of all ranks for work beside the training
    loop (checkpoint threads), so that it never mixes with the loop's own collectives.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    side: dist.ProcessGroup

    @classmethod
    def start(cls, plan: Plan, stop: StopRequest) -> World:
        """Join the process group that torchrun's environment describes; NCCL on GPUs, gloo on CPU.

        Raises Stopped when a stop signal came before all ranks had met.
        """
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        topology = plan.topology
        if topology.device == "cuda":
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        else:
            device, backend = torch.device("cpu"), "gloo"
            torch.set_num_threads(plan.threads)
        if not dist.is_initialized():
            # The watchdogs speak first: they know where everyone stands. This is for when none of them can.
            timeout = timedelta(seconds=4 * plan.recipe.launch.timeout_s)
            store = meet(plan, rank, timeout, stop)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=topology.world_size, timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )  # fmt: skip
        mesh = make_mesh(plan, device.type)
        side = dist.new_group(backend="gloo", timeout=timedelta(hours=2))  # a slow disk is not a hang
        return cls(rank, local_rank, topology.world_size, device, mesh, side)

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def writes(self) -> bool:
        """Whether this rank's shards are written: those of the first copy are."""
        return self.mesh.ndim == 1 or self.mesh.get_local_rank("replicate") == 0

    def gather(self, values: torch.Tensor) -> Floats:
        """Every rank's float64 vector [k] → [size, k], in rank order: sums over it are bitwise equal on every rank."""
        local = values.to(self.device, torch.float64)
        ranks = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(ranks, local)
        return torch.stack(ranks).cpu().numpy()

    def any(self, flag: object) -> bool:
        """Whether `flag` is true on any rank; collective."""
        return bool(self.gather(torch.tensor([bool(flag)])).any())

    def agree(self, value: Any, what: str) -> None:
        """Raise RuntimeError unless every rank holds an equal `value`; collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.side)
        if any(other != value for other in values):
            raise RuntimeError(f"ranks disagree about {what}: {values}")

    def peak_memory(self) -> int:
        """Bytes this rank has needed at most: device memory allocated by torch, or resident memory on CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def device_memory(self) -> int:
        """Bytes of the device, or of this machine's memory on CPU."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_flops(self, dtype: torch.dtype) -> float:
        """FLOP/s against which MFU is counted: published for known GPUs, else this device's own matrix rate."""
        if self.device.type == "cuda" and dtype == torch.bfloat16:
            known = card(torch.cuda.get_device_name(self.device), self.device_memory())
            if known and known.bf16:
                return known.flops
        return matrix_rate(self.device, dtype)


def make_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The ranks as the plan's strategy groups them: ("shard",), or ("replicate", "shard")."""
    if plan.recipe.fsdp.strategy.replicates:
        return init_device_mesh(device_type, (plan.replicas, plan.shard_size), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (plan.shard_size,), mesh_dim_names=("shard",))


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 1024, rounds: int = 8) -> float:
    """FLOP/s of a `size`³ matrix product on random data: the best of `rounds`."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    with torch.random.fork_rng(devices=[]):
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(rounds):
        start = clock()
        torch.mm(a, b)
        best = min(best, clock() - start)
    return float(2 * size**3 / best)


def meet(plan: Plan, rank: int, timeout: timedelta, stop: StopRequest) -> dist.Store:
    """The store of the run, once every rank has come to it, however late: some prepare data, others find it cached.

    Raises Stopped when a stop signal comes first. A rank withdraws only where the last one has not come yet: after
    that, some may already have gone on.
    """
    store = _open_store(plan, rank, timeout, stop)
    size, key = plan.topology.world_size, "fsdptrain/here"
    here = store.add(key, 1)
    while here < size:
        if stop.count:
            if store.add(key, -1) < size - 1:
                time.sleep(HEARD_S if rank == 0 else 0)  # the store goes with the first rank: all hear the signal first
                raise _stopped(stop)
            here = store.add(key, 1)
        else:
            time.sleep(0.05)
            here = store.add(key, 0)
    return store


def _open_store(plan: Plan, rank: int, timeout: timedelta, stop: StopRequest) -> dist.Store:
    """Where ranks find each other: on one node of our own a store that listens on loopback, else torchrun's."""
    if plan.topology.nnodes > 1 or plan.topology.joined:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return store
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:  # TCPStore by itself would listen on every interface
        server = socket.create_server(("127.0.0.1", port))
        return dist.TCPStore(
            "127.0.0.1", port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=server.detach()
        )
    while not _listens(port):  # the first rank is not there yet
        if stop.count:
            raise _stopped(stop)
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout, wait_for_workers=False)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _stopped(stop: StopRequest) -> Stopped:
    return Stopped(f"stopped by {stop.name} before the first step; nothing was lost")
