"""One rank of `validate --here`: look at this node, meet the other ranks, compare the nodes, and measure the links.

The ranks first exchange what they found through a TCPStore, because that works with other versions, other plans
and without a network that gloo or NCCL can use. Only if nothing speaks against it do they form a process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdptrain.checkpoint.nodes import DATA, FOLDER, GPUS, PLAN, file_to_see, sees, shared_folder
from fsdptrain.checkpoint.resume import describe_changes, plan_changes
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.data.sources import quick_fingerprint
from fsdptrain.data.windows import pin_commits
from fsdptrain.errors import FsdptrainError, RecipeError, WorkerLost, first_line, from_record, listed, to_record
from fsdptrain.failures.translate import as_fsdptrain_error, write_error_file
from fsdptrain.parallel.world import World, check_hosts_of_copies, open_tcp_store
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Plan, model_name_problems
from fsdptrain.processes import STOP_SIGNAL, StopRequest
from fsdptrain.run_folder.files import write_atomically
from fsdptrain.text import counted
from fsdptrain.validation.dry_run import describe_machine, hardware_here, node_problems
from fsdptrain.validation.findings import Findings, Outcome
from fsdptrain.validation.request import OUTCOME, REQUEST, Request

HEADING = "Nodes"
HEADER = ["node", "verdict", "plan", "data", "GPUs", "inside", "between"]
DATA_BYTES = 2**30  # of data files are read for their digest
CONNECT_S = 60.0  # for the process group and the measurement; a network that does not connect would wait for hours
LEAVE_S = 10.0  # that rank 0, which may hold the TCPStore, waits for the others
BUFFER_BYTES = {"cuda": 2**28, "cpu": 2**24}  # of the all-reduce that measures a link


@dataclass(frozen=True)
class Node:
    """What the first rank of a node found out.

    `data` is a digest, None if there is no data; `changes` are the differences of its plan from that of the first node;
    `shares_output` is whether it sees a file that the first node wrote. Bandwidths are bytes/s of a rank, None if they
    were not measured. `problems` are records of errors of this node alone.
    """

    host: str
    ranks: int
    plan: str
    changes: list[str]
    data: str | None
    shares_output: bool
    gpus: list[str]
    problems: list[dict[str, str]] = field(default_factory=list)
    inside_bw: float | None = None
    between_bw: float | None = None


class Ranks:
    """The ranks of a run, which exchange JSON values through their TCPStore."""

    def __init__(self, plan: Plan) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
            raise WorkerLost(
                f"not all of {counted(self.size, 'rank')} answered within {timeout_s:g} s (launch.timeout_s): "
                f"see the output of the other nodes ({first_line(error)})"
            ) from None

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
    answers_for_node = os.environ["LOCAL_RANK"] == "0"
    with contextlib.ExitStack() as stack:
        # What this node sees by itself.
        own = _describe_node(request) if answers_for_node else {}
        shared = shared_folder(plan)
        if ranks.rank == 0 and shared:
            own["file"] = stack.enter_context(file_to_see(shared[1]))
        answers = ranks.exchange("answers", own)
        # What it sees compared with the first node: the plan, a file.
        seen = {}
        if answers_for_node:
            changes = describe_changes(plan_changes(json.loads(answers[0]["plan"]), plan))
            seen = {"changes": changes, "shares_output": sees(answers[0].get("file", ""))}
        both = zip(answers, ranks.exchange("seen", seen), strict=True)
        nodes = [Node(**answer["node"], **more) for answer, more in both if answer]
    findings = Findings()
    for note in request.notes:
        findings.add_note(note)
    words = compare_nodes(nodes, shared[0] if shared else "", findings)
    # How fast the links are, if nothing was found that keeps the ranks from forming the process group of the plan.
    if findings.problems:
        findings.add_note("the links were not measured, because of the problems")
    else:
        # A rank that has an error at once waits for those that are still connecting: its error must be seen.
        measured = ranks.exchange("links", measured_links(plan, ranks.tcp_store), more_s=CONNECT_S)
        _add_link_problems(measured, findings)
        size = plan.topology.nproc_per_node
        for n, node in enumerate(nodes):
            links = measured[n * size : (n + 1) * size]
            slowest: dict[str, Any] = {
                key: min((each[key] for each in links if each.get(key)), default=None)
                for key in ("inside_bw", "between_bw")
            }
            nodes[n] = dataclasses.replace(node, **slowest)
    show_nodes(nodes, words, hardware_here(plan), findings)
    ranks.leave()
    if not findings.problems:
        findings.forecast = f"{counted(len(nodes), 'node')}, {counted(ranks.size, 'rank')}: ready"
    return findings.outcome()


def _describe_node(request: Request) -> dict[str, Any]:
    """Return what this process finds out about its node alone: its plan, and fields of a Node."""
    plan, data = request.plan, None
    errors: list[FsdptrainError] = [RecipeError(problem) for problem in request.problems]
    errors += [RecipeError(str(problem)) for problem in model_name_problems(plan.recipe)]
    go_offline_if_unreachable(plan, lambda *_: None)
    try:
        errors += node_problems(plan, describe_machine(plan))
        pinned = pin_commits(plan, plan.rundir, keep=False)
        paths = [path for path in (*pinned.data_paths, pinned.eval_path) if path]
        data = " ".join(quick_fingerprint(path, DATA_BYTES // len(paths)) for path in paths)
    except (FsdptrainError, OSError) as error:
        errors.append(as_fsdptrain_error(error))
    count = torch.cuda.device_count() if plan.topology.device == "cuda" else 0
    node = {
        "host": socket.gethostname(), "ranks": plan.topology.nproc_per_node, "plan": plan.digest(), "data": data,
        "gpus": [torch.cuda.get_device_properties(n).name.removeprefix("NVIDIA ") for n in range(count)],
        "problems": [*map(to_record, errors)],
    }  # fmt: skip
    return {"node": node, "plan": plan.shared().to_json()}


def node_names(nodes: Sequence[Node]) -> list[str]:
    """Return the host name of each node, with its number where several have the same."""
    count = Counter(node.host for node in nodes)
    return [node.host if count[node.host] == 1 else f"{node.host}/{n}" for n, node in enumerate(nodes)]


def compare_nodes(nodes: Sequence[Node], folder_key: str, findings: Findings) -> list[list[str]]:
    """Add what is wrong with some nodes. Return the words for it, for each node, for the table.

    `folder_key` is the key of the folder that all must share.
    """
    names = node_names(nodes)
    words: list[list[str]] = [[] for _ in nodes]

    def add(found: Sequence[int], word: str, error: FsdptrainError) -> None:
        findings.add_problem(error)
        for n in found:
            words[n].append(word)

    # What a node found by itself, the same problem of several nodes once.
    where: dict[tuple[str, str], list[int]] = {}
    for n, node in enumerate(nodes):
        for record in node.problems:
            where.setdefault((record["type"], record["message"]), []).append(n)
    for (kind, message), found in where.items():
        on = f"on {listed(names[n] for n in found)}: " if len(found) < len(nodes) else ""
        add(found, "machine", from_record({"type": kind, "message": f"{on}{message}"}))
    # What must be the same on all nodes, as `train.setup` compares it.
    digests = [node.data and " ".join(each[:12] for each in node.data.split()) for node in nodes]
    for agreed, what, values in (
        (PLAN, "the plan", ["; ".join([node.plan[:6], *node.changes]) for node in nodes]),
        (DATA, "the digest of the data", digests),
        (GPUS, "the hardware", [_gpus_text(node) for node in nodes]),
    ):
        counts = Counter(value for value in values if value is not None)
        if len(counts) > 1:
            usual, count = counts.most_common(1)[0]
            odd = [n for n, value in enumerate(values) if value not in (usual, None)]
            others = listed(f"{values[n]} on {names[n]}" for n in odd)
            message = f"{what} is {others}, but {usual} on {counted(count, 'node')}: {agreed.way_out}"
            add(odd, agreed.word, agreed.error(message))
    if apart := [n for n, node in enumerate(nodes) if not node.shares_output]:
        which = listed(names[n] for n in apart)
        message = f"{folder_key}: {which} cannot see what {names[0]} writes there: {FOLDER.way_out}"
        add(apart, FOLDER.word, FOLDER.error(message))
    return words


def _gpus_text(node: Node) -> str:
    """Return the GPUs of a node: `8 × H100 80GB HBM3`."""
    return " + ".join(f"{count} × {name}" for name, count in Counter(node.gpus).items()) or "no GPU"


def show_nodes(
    nodes: Sequence[Node], words: Sequence[list[str]], hardware: Hardware | None, findings: Findings
) -> None:
    """Add the table of the nodes. `hardware` is what the forecast assumes of a rank."""
    names = node_names(nodes)
    rows = [
        [
            name, ", ".join(dict.fromkeys(faults)) or "ok", node.plan[:6], (node.data or "none")[:6], _gpus_text(node),
            _bandwidth_text(node.inside_bw), _bandwidth_text(node.between_bw),
        ]
        for name, faults, node in zip(names, words, nodes, strict=True)
    ]  # fmt: skip
    findings.add_item(HEADING, "table", header=HEADER, rows=rows)
    findings.levels["nodes"] = {name: dataclasses.asdict(node) for name, node in zip(names, nodes, strict=True)}
    if hardware is not None:
        inside, between = _bandwidth_text(hardware.intra_bw), _bandwidth_text(hardware.inter_bw)
        assumed = f"the forecast assumes {inside} inside and {between} between nodes"
        findings.add_lines(HEADING, f"bandwidth of a rank in an all-reduce; {assumed}")


def _bandwidth_text(bandwidth: float | None) -> str:
    if bandwidth is None:
        return ""
    return f"{bandwidth / 1e9:.{1 if bandwidth > 1e9 else 2}f} GB/s"


def measured_links(plan: Plan, tcp_store: dist.Store) -> dict[str, Any]:
    """Form the process group of the plan, and return the bandwidths of this rank, or the `error`. Collective.

    After CONNECT_S the measurement is left alone.
    """
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            world = World.start(plan, StopRequest(), tcp_store)
            check_hosts_of_copies(plan, world)
            shape = (plan.topology.nnodes, plan.topology.nproc_per_node)
            mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("node", "local"))
            inside = all_reduce_bandwidth(mesh["local"].get_group(), world.device)
            found.update(inside_bw=inside, between_bw=all_reduce_bandwidth(mesh["node"].get_group(), world.device))
        except Exception as error:
            traceback.print_exc()
            found["error"] = to_record(as_fsdptrain_error(error))

    thread = threading.Thread(target=run, name="links", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return dict(found) or {"error": to_record(WorkerLost(f"no answer within {CONNECT_S:.0f} s"))}


def all_reduce_bandwidth(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return the bytes/s that a rank sends in a ring all-reduce, the best of three; None for one rank. Collective.

    In a ring of n ranks each sends 2 (n - 1) / n of the buffer.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    buffer = torch.zeros(BUFFER_BYTES[device.type], dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * (ranks - 1) / ranks * len(buffer) / min(times)


def _add_link_problems(links: Sequence[dict[str, Any]], findings: Findings) -> None:
    """Add why the ranks could not form a process group."""
    errors = {rank: from_record(each["error"]) for rank, each in enumerate(links) if "error" in each}
    refused = [error for error in errors.values() if isinstance(error, RecipeError)]
    if refused:
        findings.add_problem(refused[0])
    elif errors:
        rank, error = min(errors.items(), key=lambda item: ("no answer" in str(item[1]), item[0]))
        findings.add_problem(WorkerLost(
            f"the ranks cannot exchange data (rank {rank}: {first_line(error)}): check the firewall, and that gloo and "
            "NCCL use the network between the nodes (ip -br address); GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose "
            "the interface"
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
