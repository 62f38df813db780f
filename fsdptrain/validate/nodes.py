"""What was found of the nodes of a run, compared: a table with a verdict for each node, and what differs. No torch."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdptrain.checkpoint.agreement import DATA, FOLDER, GPUS, PLAN, VERSIONS, Agreed
from fsdptrain.checkpoint.resume import describe_changes
from fsdptrain.errors import CheckpointError, FsdptrainError, RecipeError, WorkerError, from_record, listed
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.network import LocalEnd, is_loopback
from fsdptrain.text import GIB, counted, size
from fsdptrain.validate.findings import Findings

HEADING = "Nodes"
MAX_CLOCK_S = 1.0  # nodes that a time server sets differ by milliseconds
MAX_USED = 2 * GIB  # bytes of a GPU; a context of this process is below
SLOW_GPU = 0.8  # of the median rate of the GPUs
SLOW_LINK = 0.5  # of the bandwidth that the forecast assumes
LITTLE_SPACE = GIB  # bytes


@dataclass(frozen=True)
class Gpu:
    """What a rank found out about its GPU: bytes in all, bytes that others use, FLOP/s of a matrix product.

    `fault` says why it cannot be used; it is empty if it can.
    """

    name: str = ""
    memory: int = 0
    used: int = 0
    rate: float = 0.0
    fault: str = ""


@dataclass(frozen=True)
class Node:
    """What the ranks of a node found out. `changes` are the differences of its plan from that of the first node.

    `data` is a digest, None if there is no data; `clock_s` the seconds by which its clock is ahead of the first node's;
    `free` the bytes on the disk of each path; `shares_output` whether it sees a file that the first node wrote;
    `own_address` what its own name resolves to; `nccl` the network and the interface that NCCL chose. Bandwidths are
    bytes/s of a rank, None if they were not measured. `problems` are records of errors of this node alone.
    """

    host: str
    ranks: int
    versions: dict[str, str]
    plan: str
    changes: list[str]
    data: str | None
    clock_s: float
    free: dict[str, int]
    shares_output: bool
    gloo: LocalEnd | None
    own_address: str | None
    nccl: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    inside_bw: float | None = None
    between_bw: float | None = None
    problems: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, sent: Mapping[str, Any], **compared: Any) -> Node:
        """Make a node from the values that its first rank sent as JSON, and from what was compared."""
        names = {each.name for each in dataclasses.fields(cls)}
        own = {name: value for name, value in sent.items() if name in names}
        return cls(**own | compared | {"plan": sent["digest"], "gloo": sent["gloo"] and LocalEnd(*sent["gloo"])})


class Difference(NamedTuple):
    """Something wrong with some nodes: their numbers, a word for the table, and the error; a note if it is text."""

    nodes: set[int]
    word: str
    error: FsdptrainError | str


def compare_nodes(nodes: Sequence[Node], hardware: Hardware | None, findings: Findings) -> None:
    """Add a table of the nodes, and what is wrong with them. `hardware` is what the forecast assumes of a rank."""
    names = node_names(nodes)
    found = [*own_problems(nodes, names), *must_be_equal(nodes, names), *network_faults(nodes, names)]
    found += [*gpu_faults(nodes, names), *slow_links(nodes, names, hardware), *little_space(nodes, names)]
    rows = [_row(nodes, n, name, found) for n, name in enumerate(names)]
    shown = [i for i, title in enumerate(HEADER) if i < 2 or any(row[i] for row in rows)]
    findings.add_item(HEADING, "table", header=[HEADER[i] for i in shown], rows=[[r[i] for i in shown] for r in rows])
    versions = ", ".join(f"{name} {version}" for name, version in nodes[0].versions.items())
    findings.add_lines(HEADING, f"{'' if len({*_versions(nodes)}) == 1 else f'on {names[0]}: '}{versions}")
    if nodes[0].free:
        findings.add_lines(HEADING, f"free: on the disks of {', '.join(nodes[0].free)}")
    if hardware:
        findings.add_lines(
            HEADING,
            f"bandwidth of a rank in an all-reduce; the forecast assumes {_rate(hardware.intra_bw)} inside a node and "
            f"{_rate(hardware.inter_bw)} between nodes ({hardware.name})",
        )
    for difference in found:
        if isinstance(difference.error, str):
            findings.add_note(difference.error)
        else:
            findings.add_problem(difference.error)
    findings.levels["nodes"] = {name: dataclasses.asdict(node) for name, node in zip(names, nodes, strict=True)}


def plan_differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys in which another node's `Plan.shared` differs from the first's: `optim.lr: 0.1 → 0.2`."""
    before, after = ({key.removeprefix("recipe."): value for key, value in _leaves(plan)} for plan in (first, other))
    keys = dict.fromkeys([*before, *after])  # versions are compared by themselves
    return describe_changes({
        key: [before.get(key), after.get(key)]
        for key in keys
        if before.get(key) != after.get(key) and key != "version" and not key.startswith("libraries.")
    })  # fmt: skip


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of everything in a nested mapping."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def why_not_measured(nodes: Sequence[Node], draft: bool) -> str:
    """Return why the ranks must not form a process group; empty if they can. `draft`: the plan has problems."""
    names = node_names(nodes)
    if draft:
        return "the plan has problems"
    if any(node.changes for node in nodes):
        return "the plans of the nodes differ"
    if len({*_versions(nodes)}) > 1:
        return "the versions differ"
    if any(gpu.fault for node in nodes for gpu in node.gpus):
        return "a GPU cannot be used"
    if any(isinstance(fault.error, FsdptrainError) for fault in network_faults(nodes, names)):
        return "gloo cannot reach the other nodes"
    return ""


def nccl_network(log: str) -> str:
    """Return the network that NCCL chose, and its interface and address, from its log: `IB eth0 10.0.0.1`."""
    network = re.search(r"Using network (\S+)", log)
    bootstrap = re.search(r"Bootstrap ?: Using (?:\[\d\])?([^\s:]+):(\S+?)<", log)
    return " ".join([*(network.groups() if network else ()), *(bootstrap.groups() if bootstrap else ())])


def node_names(nodes: Sequence[Node]) -> list[str]:
    """Return the host name of each node, with its number where several have the same."""
    count = Counter(node.host for node in nodes)
    return [node.host if count[node.host] == 1 else f"{node.host}/{n}" for n, node in enumerate(nodes)]


def own_problems(nodes: Sequence[Node], names: Sequence[str]) -> Iterator[Difference]:
    """Yield what nodes found by themselves, the same problem of several nodes once."""
    where: dict[tuple[str, str], set[int]] = {}
    for n, node in enumerate(nodes):
        for record in node.problems:
            where.setdefault((record["type"], record["message"]), set()).add(n)
    for (kind, message), found in where.items():
        on = f"on {listed(names[n] for n in sorted(found))}: " if len(found) < len(nodes) else ""
        key = re.match(r"(?:[\w.]+:\d+: |command line: )?([\w.]+): ", message)
        error = from_record({"type": kind, "message": f"{on}{message}"})
        yield Difference(found, key[1] if key else "machine", error)


def must_be_equal(nodes: Sequence[Node], names: Sequence[str]) -> Iterator[Difference]:
    """Yield what must be the same on all nodes and is not: versions, plan, data, clock, folder of the run."""
    for library in dict.fromkeys(name for node in nodes for name in node.versions):
        found = [node.versions.get(library, "not installed") for node in nodes]
        yield from _odd(names, found, library, VERSIONS)
    for changes in dict.fromkeys("; ".join(node.changes) for node in nodes if node.changes):
        changed = {n for n, node in enumerate(nodes) if "; ".join(node.changes) == changes}
        which = listed(names[n] for n in changed)
        message = f"the plan of {which} is not that of {names[0]} ({changes}): {PLAN.way_out}"
        yield Difference(changed, PLAN.word, PLAN.error(message))
    digests = [node.data and " ".join(digest[:12] for digest in node.data.split()) for node in nodes]
    yield from _odd(names, digests, "the digest of the data", DATA)
    late = {n: node.clock_s for n, node in enumerate(nodes) if abs(node.clock_s) > MAX_CLOCK_S}
    if late:
        clocks = listed(f"{names[n]} by {seconds:+.1f} s" for n, seconds in late.items())
        yield Difference({*late}, "clock", RecipeError(
            f"the clock of {names[0]} and of other nodes differ ({clocks}): let chrony or ntpd set all clocks"
        ))  # fmt: skip
    if apart := {n for n, node in enumerate(nodes) if not node.shares_output}:
        key = "checkpoint.path" if "checkpoint.path" in nodes[0].free else FOLDER.word
        which = listed(names[n] for n in sorted(apart))
        message = f"{key}: {which} cannot see what {names[0]} writes there: {FOLDER.way_out}"
        yield Difference(apart, key, FOLDER.error(message))


def _odd(names: Sequence[str], values: Sequence[str | None], what: str, agreed: Agreed) -> Iterator[Difference]:
    """Yield a difference if some nodes have another value than most; None is no value."""
    counts = Counter(value for value in values if value is not None)
    if len(counts) < 2:
        return
    usual, count = counts.most_common(1)[0]
    odd = [n for n, value in enumerate(values) if value not in (usual, None)]
    others = listed(f"{values[n]} on {names[n]}" for n in odd)
    message = f"{what} is {others}, but {usual} on {counted(count, 'node')}: {agreed.way_out}"
    yield Difference({*odd}, agreed.word, agreed.error(message))


def network_faults(nodes: Sequence[Node], names: Sequence[str]) -> Iterator[Difference]:
    """Yield the nodes whose gloo or NCCL listens where other machines cannot reach it."""
    if len({node.host for node in nodes}) == 1:  # processes of one machine reach each other through loopback
        return
    fix = (
        "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the network between the nodes (`ip -br "
        "address` lists them), or give the name its own address in /etc/hosts"
    )
    for n, node in enumerate(nodes):
        own, cause = node.own_address, ""
        if own is None:
            cause = f"{node.host} cannot resolve its own name"
        elif is_loopback(own):
            cause = f"{node.host} resolves its own name to {own}, which other nodes cannot reach"
        if node.gloo is None or is_loopback(node.gloo.address):
            where = f"on {node.gloo.interface} ({node.gloo.address})" if node.gloo else "on no interface that exists"
            by_name = node.gloo is not None and node.gloo.address == own
            because = f", because {cause}" if by_name else " (GLOO_SOCKET_IFNAME, or the way to the first node)"
            yield Difference({n}, "gloo", RecipeError(f"gloo of {names[n]} listens {where}{because}: {fix}"))
        elif cause:
            note = f"{cause}: gloo uses {node.gloo.interface} ({node.gloo.address}) instead"
            yield Difference({n}, "", f"{note}; for other programs, give it its address in /etc/hosts")
        if any(is_loopback(part) for part in node.nccl.split()):
            yield Difference({n}, "NCCL", RecipeError(f"NCCL of {names[n]} uses {node.nccl}: {fix}"))
    networks = [node.nccl.partition(" ")[0] or None for node in nodes]
    way_out = "NCCL_DEBUG=INFO shows why (a driver, a plugin, NCCL_IB_DISABLE)"
    yield from _odd(names, networks, "the network of NCCL", Agreed("NCCL", RecipeError, way_out))


def gpu_faults(nodes: Sequence[Node], names: Sequence[str]) -> Iterator[Difference]:
    """Yield GPUs that differ, do not work, are used by others, or are slower than the rest."""
    kinds = [_gpus_text(node) or "no GPU" for node in nodes]
    yield from _odd(names, kinds, "the hardware", GPUS)
    rates = [gpu.rate for node in nodes for gpu in node.gpus if gpu.rate]
    median = statistics.median(rates) if rates else 0.0
    for n, node in enumerate(nodes):
        for number, gpu in enumerate(node.gpus):
            what = f"GPU {number} of {names[n]}"
            if gpu.fault:
                yield Difference({n}, "GPU", WorkerError(f"{what}: {gpu.fault}"))
            if gpu.used > MAX_USED:
                yield Difference({n}, "GPU", RecipeError(
                    f"{what}: {size(gpu.used)} of its memory are in use: nvidia-smi shows by which process; end it"
                ))  # fmt: skip
            if not gpu.fault and gpu.rate < SLOW_GPU * median:
                yield Difference({n}, "slow GPU", (
                    f"{what} computes at {gpu.rate / 1e12:.0f} TFLOP/s, the others at {median / 1e12:.0f}: nvidia-smi "
                    "-q -d PERFORMANCE shows what slows it down; every step waits for it"
                ))  # fmt: skip


def slow_links(nodes: Sequence[Node], names: Sequence[str], hardware: Hardware | None) -> Iterator[Difference]:
    """Yield the nodes with less than SLOW_LINK of the bandwidth that the forecast assumes."""
    if hardware is None:
        return
    for n, node in enumerate(nodes):
        if node.inside_bw is not None and node.inside_bw < SLOW_LINK * hardware.intra_bw:
            yield Difference({n}, "slow link", (
                f"inside {names[n]} {_rate(node.inside_bw)} were measured, but the forecast assumes "
                f"{_rate(hardware.intra_bw)}: steps will take longer"
            ))  # fmt: skip
    between = [node.between_bw for node in nodes if node.between_bw is not None]
    if between and min(between) < SLOW_LINK * hardware.inter_bw:
        yield Difference({*range(len(nodes))}, "slow link", (
            f"between the nodes {_rate(min(between))} were measured, but the forecast assumes "
            f"{_rate(hardware.inter_bw)}: steps will take longer (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose "
            "another network)"
        ))  # fmt: skip


def little_space(nodes: Sequence[Node], names: Sequence[str]) -> Iterator[Difference]:
    """Yield the disks that are almost full; `fsdptrain validate` says what a run needs."""
    for n, node in enumerate(nodes):
        for path, free in node.free.items():
            if free < LITTLE_SPACE:
                message = f"{path}: no space: {size(free)} are free on {names[n]}: delete files, or use another disk"
                yield Difference({n}, "disk", CheckpointError(message))


HEADER = ["node", "verdict", "plan", "data", "clock", "free", "GPUs", "gloo", "NCCL", "inside", "between"]


def _row(nodes: Sequence[Node], n: int, name: str, found: Sequence[Difference]) -> list[str]:
    node = nodes[n]
    words = dict.fromkeys(each.word for each in found if n in each.nodes and each.word)
    free = [f"{count / GIB:,.0f}" for count in node.free.values()]
    free = free if len({*free}) > 1 else free[:1]
    between = [_rate(node.between_bw)] if len(nodes) > 1 else [""]
    return [
        name, ", ".join(words) or "ok", node.plan[:6], (node.data or "none")[:6], f"{node.clock_s:+.2f} s",
        f"{'/'.join(free)} GiB" if free else "unknown", _gpus_text(node) or "no GPU",
        " ".join(node.gloo) if node.gloo else "none", node.nccl.rpartition(" ")[0], _rate(node.inside_bw), *between,
    ]  # fmt: skip


def _gpus_text(node: Node) -> str:
    """Return the GPUs of a node: `8 × H100 80GB HBM3`; empty without any."""
    kinds = Counter(gpu.name.removeprefix("NVIDIA ") or "unknown" for gpu in node.gpus)
    return " + ".join(f"{count} × {name}" for name, count in kinds.items())


def _rate(bandwidth: float | None) -> str:
    """Return a bandwidth as `12.3 GB/s`; empty for None."""
    return "" if bandwidth is None else f"{bandwidth / 1e9:.{1 if bandwidth > 1e9 else 2}f} GB/s"


def _versions(nodes: Sequence[Node]) -> list[str]:
    return [str(node.versions) for node in nodes]
