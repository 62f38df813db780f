"""One rank of `validate --here`: look at this node, meet the other ranks, measure the links, and compare.

The ranks first exchange what they found through a TCPStore, because that works with other versions, other plans
and without a network that gloo or NCCL can use. Only if nothing speaks against it do they form a process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdptrain.checkpoint.agreement import file_to_see, sees, shared_folder
from fsdptrain.checkpoint.disk import free_space
from fsdptrain.data.cache import cache_dir
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.data.resume_pins import pin_commits
from fsdptrain.data.sources import quick_fingerprint
from fsdptrain.errors import FsdptrainError, RecipeError, WorkerLost, first_line, from_record, to_record
from fsdptrain.failures.translate import as_fsdptrain_error, write_error_file
from fsdptrain.parallel.world import World, check_hosts_of_copies, matrix_rate, open_tcp_store
from fsdptrain.plan.gpus import damaged_gpus
from fsdptrain.plan.network import address_of, gloo_end
from fsdptrain.plan.plan import Plan, model_name_problems
from fsdptrain.processes import STOP_SIGNAL, StopRequest
from fsdptrain.run_folder.files import scratch_folder, write_atomically
from fsdptrain.text import counted
from fsdptrain.validate.costs import hardware_here
from fsdptrain.validate.findings import Findings, Outcome
from fsdptrain.validate.machine import describe_machine, node_problems
from fsdptrain.validate.nodes import Gpu, Node, compare_nodes, nccl_network, plan_differences, why_not_measured
from fsdptrain.validate.request import OUTCOME, REQUEST, Request

DATA_BYTES = 2**30  # of data files are read for their digest
CLOCK_ROUNDS = 5  # comparisons of the clocks, of which the median counts
CONNECT_S = 60.0  # for the process group and the measurement; a network that does not connect would wait for hours
LEAVE_S = 10.0  # that rank 0, which may hold the TCPStore, waits for the others
SMALLEST, LARGEST, ENOUGH_S = 2**20, 2**28, 0.1  # bytes of an all-reduce, and the time until which it grows
RATE_SIZE, EXACT_SIZE = 8192, 4096  # of the matrix products that measure a GPU and check its results


class Ranks:
    """The ranks of a run, which exchange JSON values through their TCPStore."""

    def __init__(self, plan: Plan) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.timeout_s = plan.recipe.launch.timeout_s
        self.tcp_store = open_tcp_store(plan, self.rank, timedelta(seconds=self.timeout_s), StopRequest())

    def exchange(self, name: str, value: Any, more_s: float = 0.0) -> list[Any]:
        """Return the values of all ranks; raises WorkerLost if some do not come within launch.timeout_s.

        They may come `more_s` seconds later if a rank knows that work of others takes so much longer than its own.
        """
        keys, timeout_s = [f"{name}/{rank}" for rank in range(self.size)], self.timeout_s + more_s
        self.tcp_store.set_timeout(timedelta(seconds=timeout_s))
        try:
            self.tcp_store.set(keys[self.rank], json.dumps(value))
            if self.rank == 0:  # one rank reads all, so that the TCPStore answers as many requests as there are ranks
                self.tcp_store.set(name, json.dumps([json.loads(text) for text in self.tcp_store.multi_get(keys)]))
            values: list[Any] = json.loads(self.tcp_store.get(name))
            return values
        except dist.DistError as error:
            later = f" and {more_s:g} s to measure the links" if more_s else ""
            missing = (
                f"not all of {counted(self.size, 'rank')} answered within {timeout_s:g} s (launch.timeout_s{later})"
            )
            raise WorkerLost(f"{missing}: see the output of the other nodes ({first_line(error)})") from None

    def leave(self) -> None:
        """Wait, in rank 0, until all ranks have read what they need."""
        left, deadline = self.tcp_store.add("left", 1), time.monotonic() + LEAVE_S
        while self.rank == 0 and left < self.size and time.monotonic() < deadline:
            time.sleep(0.02)
            left = self.tcp_store.add("left", 0)


def check_ranks(request: Request) -> Outcome:
    """Make the checks of this rank together with all others. Return what was found, the same on every rank.

    Raises WorkerLost if other ranks do not answer.
    """
    plan, ranks = request.plan, Ranks(request.plan)
    with contextlib.ExitStack() as stack:
        # What this process sees by itself.
        own: dict[str, Any] = {"local_rank": ranks.local_rank, "gpu": rank_gpu(plan, ranks.local_rank)}
        own |= describe_node(request) if ranks.local_rank == 0 else {}
        if ranks.rank == 0:
            shared = shared_folder(plan)
            own["file"] = stack.enter_context(file_to_see(shared[1])) if shared else ""
        answers = ranks.exchange("answers", own)
        # What it sees compared with the first node: the clock, the plan, a file.
        seen: dict[str, Any] = {"clock": read_clock(ranks)}
        if ranks.local_rank == 0:
            seen["changes"] = plan_differences(json.loads(answers[0]["plan"]), json.loads(plan.shared().to_json()))
            seen["shares_output"] = sees(answers[0]["file"])
        compared = ranks.exchange("compared", seen)
    # How fast the links are, unless the ranks cannot form the process group of the plan.
    nodes = nodes_of(answers, compared)
    obstacle = why_not_measured(nodes, any(each.get("draft") for each in answers))
    # A rank that has an error at once waits for those that are still connecting: its error must be seen.
    links = ranks.exchange("links", {} if obstacle else measured_links(plan, ranks.tcp_store), more_s=CONNECT_S)
    findings = Findings()
    for note in [*request.notes, *([f"the links were not measured: {obstacle}"] if obstacle else [])]:
        findings.add_note(note)
    add_link_problems(links, findings)
    compare_nodes(nodes_of(answers, compared, links), hardware_here(plan), findings)
    ranks.leave()
    if not findings.problems:
        findings.forecast = f"{counted(len(nodes), 'node')}, {counted(ranks.size, 'rank')}: ready"
    return findings.outcome()


def nodes_of(
    answers: Sequence[dict[str, Any]], compared: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]] = ()
) -> list[Node]:
    """Return the nodes from what their ranks exchanged; the first local rank of a node answers for it."""
    firsts = [rank for rank, each in enumerate(answers) if each["local_rank"] == 0]
    nodes = []
    for first, end in zip(firsts, [*firsts[1:], len(answers)], strict=True):
        differences = [own - leader for own, leader in zip(compared[first]["clock"], compared[0]["clock"], strict=True)]
        speeds = {
            key: min(found) if (found := [each[key] for each in links[first:end] if each.get(key)]) else None
            for key in ("inside_bw", "between_bw")
        }
        nodes.append(Node.of(
            answers[first],
            ranks=end - first,
            clock_s=statistics.median(differences),
            changes=compared[first]["changes"],
            shares_output=compared[first]["shares_output"],
            nccl=links[first].get("nccl", "") if links else "",
            gpus=[Gpu(**each["gpu"]) for each in answers[first:end] if each["gpu"]],
            **speeds,
        ))  # fmt: skip
    return nodes


def describe_node(request: Request) -> dict[str, Any]:
    """Return what this process finds out about its node alone, under the names of the fields of Node.

    `draft` says that the plan has problems, so that its ranks may not form a process group.
    """
    plan = request.plan
    errors: list[FsdptrainError] = [RecipeError(problem) for problem in request.problems]
    errors += [RecipeError(str(problem)) for problem in model_name_problems(plan.recipe)]
    data, free = None, {}
    go_offline_if_unreachable(plan, lambda *_: None)

    @contextlib.contextmanager
    def collected() -> Iterator[None]:
        try:
            yield
        except (FsdptrainError, OSError) as error:
            errors.append(as_fsdptrain_error(error))

    with collected():
        errors += node_problems(plan, describe_machine(plan))
    with collected():
        pinned = pin_commits(plan, plan.rundir, keep=False)
        paths = [path for path in (*pinned.data_paths, pinned.eval_path) if path]
        data = " ".join(quick_fingerprint(path, DATA_BYTES // len(paths)) for path in paths)
    with collected():
        free = {"output_dir": free_space(Path(plan.run_dir)), "cache": free_space(cache_dir("data"))}
        if plan.recipe.checkpoint.path:
            free["checkpoint.path"] = free_space(plan.rundir.storage.folder)
    if plan.topology.device == "cuda":
        errors += [WorkerLost(text) for text in damaged_gpus(os.environ)]
    return {
        "host": socket.gethostname(), "versions": versions(plan), "plan": plan.shared().to_json(),
        "digest": plan.digest(), "data": data, "free": free, "gloo": gloo_end(),
        "own_address": address_of(socket.gethostname()),
        "problems": [*map(to_record, errors)], "draft": bool(request.problems),
    }  # fmt: skip


def versions(plan: Plan) -> dict[str, str]:
    """Return the versions that all nodes must share, with those that only this check compares."""
    found = plan.versions | {"Python": platform.python_version()}
    return found | ({"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if torch.cuda.is_available() else {})


def rank_gpu(plan: Plan, local_rank: int) -> dict[str, Any] | None:
    """Return what this rank finds out about its GPU, the fields of a Gpu; None for a plan on the CPU."""
    if plan.topology.device == "cpu":
        return None
    try:
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        free, total = torch.cuda.mem_get_info(device)
        ones = torch.ones(EXACT_SIZE, EXACT_SIZE, device=device, dtype=torch.bfloat16)
        wrong = int((ones @ ones != EXACT_SIZE).sum())  # the numbers are exact in bfloat16
        gpu = Gpu(
            torch.cuda.get_device_name(device), total, total - free, matrix_rate(device, torch.bfloat16, RATE_SIZE),
            f"{counted(wrong, 'element')} of a matrix product are wrong: replace this GPU" if wrong else "",
        )  # fmt: skip
    except Exception as error:  # a GPU that is lost, or not there, raises many classes
        gpu = Gpu(fault=f"cannot be used: {first_line(error)}")
    return dataclasses.asdict(gpu)


def read_clock(ranks: Ranks) -> list[float]:
    """Return the seconds since 1970 at moments that are the same on all ranks, up to the time of a message."""
    clock = []
    for number in range(CLOCK_ROUNDS):
        ranks.exchange(f"clock/{number}", None)
        clock.append(time.time())
    return clock


def measured_links(plan: Plan, tcp_store: dist.Store) -> dict[str, Any]:
    """Return what `measure` found, and the network of NCCL, or the `error` raised; after CONNECT_S it is left alone."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found.update(measure(plan, tcp_store))
        except Exception as error:
            traceback.print_exc()
            found["error"] = to_record(as_fsdptrain_error(error))

    with scratch_folder() as scratch:  # removed also if the thread is left alone
        log = scratch / "nccl.log"
        os.environ.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)})
        thread = threading.Thread(target=run, name="links", daemon=True)
        thread.start()
        thread.join(CONNECT_S)
        links = dict(found) or {"error": to_record(WorkerLost(f"no answer within {CONNECT_S:.0f} s"))}
        if log.exists():
            links["nccl"] = nccl_network(log.read_text(encoding="utf-8", errors="replace"))
    return links


def measure(plan: Plan, tcp_store: dist.Store) -> dict[str, float | None]:
    """Form the process group of the plan, and return the bandwidths of this rank. Collective.

    Raises RecipeError as `check_hosts_of_copies` does.
    """
    world = World.start(plan, StopRequest(), tcp_store)
    check_hosts_of_copies(plan, world)
    shape = (plan.topology.nnodes, plan.topology.nproc_per_node)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("node", "local"))
    return {
        "inside_bw": all_reduce_bandwidth(mesh["local"].get_group(), world.device),
        "between_bw": all_reduce_bandwidth(mesh["node"].get_group(), world.device),
    }


def all_reduce_bandwidth(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return the bytes/s that a rank sends in a ring all-reduce; None for one rank. Collective in the group.

    In a ring of n ranks each sends 2 (n - 1) / n of the buffer. The best of three calls counts; the buffer grows until
    a call takes ENOUGH_S on all ranks.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    count = SMALLEST
    while True:
        buffer = torch.zeros(count, dtype=torch.uint8, device=device)
        seconds = torch.tensor([min(all_reduce_s(buffer, group) for _ in range(3))], device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        slowest = seconds.item()
        if slowest > ENOUGH_S or count >= LARGEST:
            return 2 * (ranks - 1) / ranks * count / slowest
        count *= 4


def all_reduce_s(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Return the seconds of an all-reduce. Collective."""
    start = time.perf_counter()
    dist.all_reduce(buffer, group=group)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - start


def add_link_problems(links: Sequence[dict[str, Any]], findings: Findings) -> None:
    """Add why the ranks could not form a process group."""
    errors = {rank: from_record(each["error"]) for rank, each in enumerate(links) if "error" in each}
    refused = [error for error in errors.values() if isinstance(error, RecipeError)]
    if refused:
        findings.add_problem(refused[0])
    elif errors:
        rank, error = min(errors.items(), key=lambda item: ("no answer" in str(item[1]), item[0]))
        findings.add_problem(WorkerLost(
            f"the ranks cannot exchange data (rank {rank}: {first_line(error)}): check the firewall, and that gloo and "
            "NCCL use the same network on all nodes; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface"
        ))  # fmt: skip


def main() -> NoReturn:
    """Make the checks as one rank of the request in the folder of the file argv[1]; write the outcome there.

    It ends by `os._exit`, because the thread of a measurement may never end.
    """
    signal.signal(STOP_SIGNAL, lambda *_: os._exit(0))
    folder, code = Path(sys.argv[1]).parent, 0
    try:
        request = Request.from_record(json.loads((folder / REQUEST).read_text(encoding="utf-8")))
        plan = request.plan.on_nodes(int(os.environ["GROUP_WORLD_SIZE"]))
        outcome = check_ranks(dataclasses.replace(request, plan=plan))
        if os.environ["LOCAL_RANK"] == "0":
            write_atomically(folder / OUTCOME, json.dumps(dataclasses.asdict(outcome)))
    except BaseException as error:
        failure = as_fsdptrain_error(error)
        write_error_file(failure)
        traceback.print_exc()
        code = failure.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
