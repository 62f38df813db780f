"""`World`: the rank of this process, its device, process groups and mesh, and the few reductions that a run needs."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
import timeit
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdptrain.data.corpus import Batch
from fsdptrain.errors import RecipeError, Stopped, WorkerLost, first_line
from fsdptrain.model.parts import Part
from fsdptrain.model.varlen import Exchange
from fsdptrain.parallel.messages import Messages, kinds_of_messages
from fsdptrain.parallel.patches import CONTEXT, EXPERTS, SHARERS, SIDE, STAGE, TENSOR
from fsdptrain.plan.gpus import bind_near
from fsdptrain.plan.hardware import card
from fsdptrain.plan.network import ephemeral_ports, set_gloo_interface
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import StopRequest

POLLS_PER_S = 1000  # requests to rank 0's TCPStore from all ranks together, while they wait for the last one
STOP_S = 2.0  # longer than the second in which the agent sends a stop to every worker
SLOW_S = 0.02  # of a matrix product that measures the speed of a device: on a CPU 256³ has the rate of 1024³
DIMENSIONS = ("replicate", "shard")  # of a mesh
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class HostCopy:
    """A copy of a tensor in host memory. It may still be under way: only `wait` and `read` wait for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory, so that the host does not wait
        self._copied = torch.get_device_module(tensor.device).Event()  # a CPU's is always complete
        self._copied.record()

    def done(self) -> bool:
        """Return whether the copy is complete."""
        return bool(self._copied.query())

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if not self.done():
            self._copied.synchronize()

    def read(self) -> Floats:
        """Wait for the copy, and return it."""
        self.wait()
        return self._numbers()

    def _numbers(self) -> Floats:
        numbers: Floats = self._copy.numpy()
        return numbers


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from this one.

    `mesh` is ("shard",) or ("replicate", "shard"); `meshes[n]` is the mesh of the ranks that have the same part of what
    n ranks divide (1: all ranks). In a pipeline both are of the ranks that have the same layers, whose group is
    `stage`, and `messages` are exchanged with those of other stages. `side` is a gloo group of all ranks for work
    outside the training loop (checkpoint threads). `hosts` are the host names of the ranks. `attempt` numbers the times
    that ranks have met in the run folder. `sharers` are the ranks that share rows; of these, `context` exchange heads
    for tokens in attention, and `tensor` divide the layers; `experts` divide the experts. They are None where there
    would be one rank in each.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    side: dist.ProcessGroup
    hosts: list[str]
    attempt: int = 0
    context: Exchange | None = None
    tensor: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    sharers: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None
    messages: Messages | None = None
    meshes: dict[int, DeviceMesh] = field(default_factory=dict)

    @classmethod
    def start(cls, plan: Plan, stop: StopRequest, tcp_store: dist.Store | None = None) -> World:
        """Join the process group that torchrun's environment describes; NCCL on GPUs, gloo on CPU.

        `tcp_store` is that of the ranks, if they have met already. Raises Stopped if a stop signal comes before all
        have joined.
        """
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        topology = plan.topology
        if topology.device == "cuda":
            device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
            torch.cuda.set_device(device)
            gpu: Any = torch.cuda.get_device_properties(device)
            bind_near(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")  # as /sys has it
            backend = "cpu:gloo,cuda:nccl"
        else:
            device, backend = torch.device("cpu"), "gloo"
            torch.set_num_threads(plan.threads)
        # Longer than the watchdogs wait, because they report where each rank is: it applies if none of them can run.
        timeout = timedelta(seconds=4 * plan.recipe.launch.timeout_s)
        if not dist.is_initialized():
            tcp_store = tcp_store or wait_for_ranks(plan, rank, timeout, stop)
            # A rank gets all addresses in one request: else one TCPStore answers n² of them in each group.
            os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
            dist.init_process_group(
                backend, store=tcp_store, rank=rank, world_size=topology.world_size, timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )  # fmt: skip
        meshes = make_meshes(plan, device.type)
        for mesh in meshes.values():
            for group in mesh.get_all_groups():
                group.set_timeout(timeout)  # a mesh gives those that it makes torch's default, 30 minutes
        groups = make_groups(plan, timeout)
        hours = timedelta(hours=2)  # a slow disk is not a hang
        side = dist.new_group(backend="gloo", timeout=hours, group_desc=SIDE)
        own = socket.gethostname(), plan.rundir.newest_attempt()
        ranks: list[tuple[str, int]] = [own] * topology.world_size
        dist.all_gather_object(ranks, own, group=side)
        hosts, attempts = zip(*ranks, strict=True)
        attempt = max(attempts) + 1
        size, mesh = topology.world_size, meshes[1]
        return cls(rank, local_rank, size, device, mesh, side, [*hosts], attempt, meshes=meshes, **groups)

    @property
    def replicas(self) -> int:
        """The number of copies of the model."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def ranks_of_stage(self) -> Ints:
        """The ranks that have the same layers: all, or one group of a pipeline."""
        if self.messages is None:
            return np.arange(self.size)
        return np.array(dist.get_process_group_ranks(self.stage) if self.stage else [self.rank])

    def group_of(self, part: Part) -> dist.ProcessGroup:
        """Return the ranks that divide a parameter among them, this one included."""
        group = self.experts if self.tensor is None or self.tensor.size() != part.ranks else self.tensor
        assert group is not None
        return group

    def holders(self, tensor: torch.Tensor, part: Part | None = None) -> Ints:
        """Return which ranks of this one's stage hold the numbers of a parameter or buffer: [copies, pieces].

        Ranks in one column hold the same piece. `part` says of a parameter of a layer that it is divided.
        """
        of_stage = self.ranks_of_stage
        if not isinstance(tensor, DTensor):  # every rank has all of it
            return of_stage[:, None]
        parts, copies = (part.count, part.ranks // part.count) if part else (1, 1)
        shards = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
        ranks = of_stage.reshape(-1, shards, parts, copies)  # of each replica
        return ranks.transpose(0, 3, 1, 2).reshape(-1, shards * parts)

    def holders_of_same(self, tensor: torch.Tensor, part: Part | None = None) -> tuple[int, ...]:
        """Return the ranks that hold the same numbers of a parameter or buffer as this one."""
        ranks = self.holders(tensor, part)
        return tuple(ranks[:, (ranks == self.rank).any(0)].ravel().tolist())

    def sum_over_stage(self, tensor: torch.Tensor) -> None:
        """Sum a tensor in place over the ranks that have the same layers; collective."""
        if self.mesh.size() > 1:
            dist.all_reduce(tensor, group=self.stage)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather the vectors [k] of all ranks as float64 [size, k] in rank order: sums are bitwise equal everywhere.

        The result is on the device, and the host does not wait for it.
        """
        local = send(values.double(), self.device)
        ranks = local.new_empty(self.size * len(local))  # one tensor: a list of them costs time for each rank
        dist.all_gather_into_tensor(ranks, local)
        return ranks.view(self.size, -1)

    def host_copy(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy a tensor to host memory."""
        return HostCopy(tensor)

    def gather(self, values: torch.Tensor) -> Floats:
        """Gather as `all_gather` does, and wait for the result."""
        return self.host_copy(self.all_gather(values)).read()

    def any(self, flag: object) -> bool:
        """Return whether `flag` is true on any rank; collective."""
        return bool(self.gather(torch.tensor([bool(flag)])).any())

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank; collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.side)
        return values

    def list_on_rank_zero(self, values: list[torch.Tensor], source: int) -> list[torch.Tensor]:
        """Return the tensors of rank `source` there and on rank 0, those of the rank itself on all others; collective.

        They are on the CPU, and go over the side group.
        """
        if source == 0 or self.rank not in (0, source):
            return values
        if self.rank == source:
            dist.send_object_list([[(each.shape, each.dtype) for each in values]], dst=0, group=self.side)
            for each in values:
                dist.send(each.contiguous(), dst=0, group=self.side)
            return values
        kinds: list[Any] = [None]
        dist.recv_object_list(kinds, src=source, group=self.side)
        values = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds[0]]
        for each in values:
            dist.recv(each, src=source, group=self.side)
        return values

    def peak_memory(self) -> int:
        """Return this rank's peak in bytes: of the device memory that torch allocated, or of resident memory on CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def allocator_counts(self) -> tuple[int, int]:
        """Return the bytes that torch's allocator has reserved, and its retries on a full device; zeros on CPU."""
        if self.device.type != "cuda":
            return 0, 0
        counts = torch.cuda.memory_stats_as_nested_dict(self.device)
        return counts["reserved_bytes"]["all"]["current"], counts["num_alloc_retries"]

    def device_memory(self) -> int:
        """Return the bytes of the device's memory, or of this machine's on CPU."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of an MFU of 1: the published figure of a known GPU, else this device's matrix rate."""
        if self.device.type == "cuda" and dtype.itemsize == 2:
            known = card(torch.cuda.get_device_name(self.device), self.device_memory())
            if known and (known.bf16 or dtype == torch.float16):
                return known.flops
        return matrix_rate(self.device, dtype)


def make_meshes(plan: Plan, device_type: str) -> dict[int, DeviceMesh]:
    """Return `World.meshes`: of the plan's strategy, ("shard",), or ("replicate", "shard").

    FSDP2 holds shards of gradients only where they are summed over copies afterwards: one copy counts too.
    """
    copies = plan.recipe.fsdp.strategy.replicates or plan.recipe.fsdp.accumulation == "hold_shards"
    names = DIMENSIONS if copies else DIMENSIONS[1:]
    found: dict[int, DeviceMesh] = {}
    stages = plan.recipe.parallel.pipeline
    for ranks in (1, plan.recipe.parallel.tensor, plan.recipe.parallel.experts):
        shape = [plan.replicas, plan.shard_size]
        if plan.shard_size % ranks == 0:
            shape[1] //= ranks
        else:  # each copy has fewer ranks
            shape = [plan.stage_ranks // ranks, 1]
        around = {"stage": stages, **dict(zip(names, shape[-len(names) :], strict=True)), "part": ranks}
        around = {name: size for name, size in around.items() if name in names or size > 1}
        if ranks not in found:
            mesh = init_device_mesh(device_type, tuple(around.values()), mesh_dim_names=tuple(around))
            found[ranks] = mesh if len(around) == len(names) else mesh[names]
    return found


def make_groups(plan: Plan, timeout: timedelta | None = None) -> dict[str, Any]:
    """Return the groups of this rank's World; collective."""
    parallel = plan.recipe.parallel
    every = torch.arange(plan.topology.world_size)
    rows = every.view(-1, parallel.context, parallel.tensor)
    ranks = {
        CONTEXT: rows.mT.flatten(0, 1), TENSOR: rows.flatten(0, 1), SHARERS: rows.flatten(1),
        EXPERTS: every.view(-1, parallel.experts),
    }  # fmt: skip
    kinds = kinds_of_messages(parallel.stages_of_rank) if parallel.pipeline > 1 else []
    if kinds:
        stages = every.view(parallel.pipeline, -1)
        ranks |= {STAGE: stages} | dict.fromkeys(kinds, stages.mT)
    found: dict[str, dist.ProcessGroup | None] = {}
    for name, lists in ranks.items():
        same = [other for other in found if name == SHARERS and lists.equal(ranks[other])]
        if lists.shape[1] == 1 or same:
            found[name] = found[same[0]] if same else None
        else:
            found[name], _ = dist.new_subgroups_by_enumeration(lists.tolist(), timeout=timeout, group_desc=name)
    context = found[CONTEXT]
    neighbours = {kind: group for kind, group in found.items() if group and kind in kinds}
    return {
        "context": context and Exchange(context),
        "tensor": found[TENSOR],
        "experts": found[EXPERTS],
        "sharers": found[SHARERS],
        "stage": found.get(STAGE),
        "messages": Messages(neighbours) if neighbours else None,
    }


def check_hosts_of_copies(plan: Plan, world: World) -> None:
    """Raise RecipeError if ranks of several hosts divide layers, or share a copy that HYBRID_* keeps on one."""
    node_by_node = "let the launcher number the ranks node by node (srun --distribution=block, mpirun --map-by slot)"
    if pair := _on_two_hosts(world, plan.recipe.parallel.tensor):
        raise RecipeError(f"parallel.tensor: layers are divided inside a node, but {pair}: {node_by_node}")
    if not plan.recipe.fsdp.strategy.in_groups or plan.recipe.fsdp.shard_size is not None:
        return
    if pair := _on_two_hosts(world, plan.shard_size):
        raise RecipeError(
            f"fsdp.strategy: {plan.recipe.fsdp.strategy} keeps each copy of the model on one node, but {pair}: "
            f"{node_by_node}, or set fsdp.shard_size, which allows copies over several nodes"
        )


def _on_two_hosts(world: World, size: int) -> str | None:
    """Return which two ranks of a group of `size` consecutive ones are on different hosts; None if there are none."""
    hosts = world.hosts
    for first in range(0, world.size, size):
        if other := next((rank for rank in range(first, first + size) if hosts[rank] != hosts[first]), None):
            return f"ranks {first} and {other} of a group are on {hosts[first]} and {hosts[other]}"
    return None


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a matrix product on random data, the best of several: of 1024³ numbers, or of fewer.

    Where one takes more than SLOW_S, as on a CPU, smaller ones are used, which other processes interrupt less.
    """

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def shortest(size: int, rounds: int) -> float:
        with torch.random.fork_rng(devices=[]):
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return min(timeit.repeat(lambda: torch.mm(a, b), timer=clock, number=1, repeat=rounds))

    size = 1024
    while size > 128 and 64 * shortest(size // 4, rounds=2) > SLOW_S:  # twice: the first call loads kernels
        size //= 4
    return 2 * size**3 / shortest(size, rounds=8)


def wait_for_ranks(plan: Plan, rank: int, timeout: timedelta, stop: StopRequest) -> dist.Store:
    """Return the TCPStore of the run once every rank has opened it; without a limit, because ranks may prepare data.

    Raises Stopped if a stop signal comes before the last rank does: after that, some ranks may have continued.
    """
    tcp_store = open_tcp_store(plan, rank, timeout, stop)
    size, key = plan.topology.world_size, "fsdptrain/here"
    present, pause_s = tcp_store.add(key, 1), max(0.05, size / POLLS_PER_S)
    while present < size:
        if stop.count:
            if tcp_store.add(key, -1) < size - 1:
                # Rank 0 holds the TCPStore: let the others get the signal first, and end their pause.
                time.sleep(STOP_S + pause_s if rank == 0 else 0)
                raise _stopped(stop)
            present = tcp_store.add(key, 1)
        else:
            time.sleep(pause_s)
            present = tcp_store.add(key, 0)
    return tcp_store


def open_tcp_store(plan: Plan, rank: int, timeout: timedelta, stop: StopRequest) -> dist.Store:
    """Open the TCPStore of all ranks: torchrun's, or on loopback; raises WorkerLost if it cannot be reached."""
    if plan.topology.nnodes > 1 or plan.topology.joined or plan.topology.is_elastic:
        if plan.topology.nnodes > 1:
            set_gloo_interface(os.environ["MASTER_ADDR"])
        try:
            tcp_store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        except dist.DistNetworkError as error:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            first, last = ephemeral_ports()
            raise WorkerLost(
                f"{place} cannot be reached from {socket.gethostname()}, although the nodes have met "
                f"({first_line(error)}): a firewall is the usual cause; open the ports {first} to {last} "
                "(net.ipv4.ip_local_port_range) between all nodes (docs/clusters.md, Ports)"
            ) from None
        return tcp_store
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:  # TCPStore by itself would listen on every interface
        server = socket.create_server(("127.0.0.1", port))
        return dist.TCPStore(
            "127.0.0.1", port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=server.detach()
        )
    while True:
        with contextlib.suppress(OSError):  # rank 0 has not opened it yet
            socket.create_connection(("127.0.0.1", port)).close()
            return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout, wait_for_workers=False)
        if stop.count:
            raise _stopped(stop)
        time.sleep(0.05)


def _stopped(stop: StopRequest) -> Stopped:
    return Stopped(f"stopped by {stop.name} before the first step; nothing was lost")


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`. The host does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a micro-batch whose tensors are on `device`."""
    moved = {name: send(x, device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    if "mismatched" in batch:
        moved["mismatched"] = to_device(batch["mismatched"], device)
    return cast(Batch, moved)
