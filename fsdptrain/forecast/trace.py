"""The trace of one optimizer step of one rank, and what follows from it: memory by category and moment, traffic.

`forecast.simulation` writes a trace; the forecast reads memory, communication and time from it, without torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Category = Literal[
    "parameter shards", "gradients", "optimizer state", "gathered parameters", "communication buffers",
    "saved activations", "recomputed activations", "logits and loss", "inputs and buffers", "temporaries",
]  # fmt: skip

HOST = "cpu"
BEFORE = "before the step"  # a moment
HOST_STREAM = -1  # the stream of kernels that run on the host although the model is on a device


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of memory. `category` is what it is used for, which may become known only after the allocation."""

    device: str
    category: Category


class Alloc(NamedTuple):
    """A storage of `size` bytes is allocated on the stream with this number."""

    storage: Storage
    size: int
    stream: int


class Free(NamedTuple):
    """A storage is freed."""

    storage: Storage


class Kernel(NamedTuple):
    """An operator on a stream. `moved` is the bytes it reads and writes; `link` is those that go over PCIe."""

    name: str
    flops: int
    moved: int
    link: int
    stream: int


class Collective(NamedTuple):
    """A collective of `ranks`. `size` is the bytes of its full buffer (after a gather, before a scatter).

    `apart`: it is in a group for reductions, tokens or messages alone, which NCCL carries out at the same time as
    gathers. A message is from the first of two ranks to the second.
    """

    kind: Literal[
        "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "gather of tokens", "sum of tokens",
        "tokens to experts", "message", "broadcast", "other",
    ]  # fmt: skip
    ranks: tuple[int, ...]
    size: int
    stream: int
    apart: bool = False

    def nodes(self, ranks_per_node: int) -> int:
        """Return on how many nodes its ranks are."""
        return len({rank // ranks_per_node for rank in self.ranks})


class RecordEvent(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int


class WaitEvent(NamedTuple):
    """A stream waits for an event."""

    event: int
    stream: int


class Synchronize(NamedTuple):
    """The host waits for an event, or for all kernels and collectives before this one."""

    event: int | None = None


class Moment(NamedTuple):
    """The start of a part of the step, such as `forward of layers.3` or `optimizer`."""

    name: str


Event = Alloc | Free | Kernel | Collective | RecordEvent | WaitEvent | Synchronize | Moment


@dataclass
class Trace:
    """The events of a step in program order; `before` has the allocations from before the step."""

    before: list[Alloc] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def all(self) -> Iterator[Event]:
        """Yield all events, beginning with an empty device."""
        yield from self.before
        yield from self.events

    @property
    def micro_batches(self) -> int:
        """How many were simulated."""
        return len(self._starts())

    def repeated(self, micro_batches: int) -> Iterator[Event]:
        """Yield the events of a step of `micro_batches`: of those simulated, the last but one is repeated."""
        starts = self._starts()
        if len(starts) < 2:
            yield from self.events
            return
        yield from self.events[: starts[-2]]
        for _ in range(max(1, micro_batches - len(starts) + 1)):
            yield from self.events[starts[-2] : starts[-1]]
        yield from self.events[starts[-1] :]

    def _starts(self) -> list[int]:
        first = next((event for event in self.events if isinstance(event, Moment)), None)
        return [i for i, event in enumerate(self.events) if isinstance(event, Moment) and event == first]


class Level(NamedTuple):
    """Bytes allocated after one event of the step, in all and by category, and the moment of the event."""

    allocated: int
    moment: str
    by_category: dict[Category, int]


def levels(trace: Trace, device: str, granularity: int = 1) -> Iterator[Level]:
    """Yield the level after every allocation and release on a device; sizes are rounded up to `granularity` bytes.

    `by_category` is one mapping, which the next level changes: copy it to keep it.
    """
    held: Counter[Category] = Counter()
    sizes: dict[int, tuple[Category, int]] = {}
    moment = BEFORE
    for event in trace.all():
        if isinstance(event, Moment):
            moment = event.name
        elif isinstance(event, (Alloc, Free)) and event.storage.device == device:
            if isinstance(event, Alloc):
                size = -(-event.size // granularity) * granularity
                sizes[id(event.storage)] = event.storage.category, size
                held[event.storage.category] += size
            else:
                category, size = sizes.pop(id(event.storage))
                held[category] -= size
            yield Level(sum(held.values()), moment, held)


def peak(trace: Trace, device: str, granularity: int = 1) -> Level:
    """Return the highest level on a device: an empty one if nothing was allocated."""
    highest = Level(0, BEFORE, {})
    for level in levels(trace, device, granularity):
        if level.allocated > highest.allocated:
            highest = Level(level.allocated, level.moment, dict(level.by_category))
    return highest


def peaks(trace: Trace, device: str, granularity: int = 1) -> dict[str, int]:
    """Return the peak in bytes of every moment of the step, in the order of their first occurrence."""
    highest: dict[str, int] = {}
    for level in levels(trace, device, granularity):
        highest[level.moment] = max(highest.get(level.moment, 0), level.allocated)
    return highest


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind and group size in a step: their number, and the bytes of their full buffers.

    `wire` is what a ring moves in and out of each rank (Patarasuk & Yuan, J. Parallel Distrib. Comput. 69, 2009), and
    `network` what of it leaves the node; see `ring_bytes` and `network_share`.
    """

    kind: str
    ranks: int
    nodes: int
    count: int
    size: int
    wire: int
    network: int


def ring_bytes(kind: str, size: int, ranks: int) -> int:
    """Return the bytes that a rank sends: (n-1)/n of the full buffer of `size` bytes, twice that for an all-reduce.

    A message is sent whole.
    """
    if kind == "message":
        return size
    share = size * (ranks - 1) // ranks
    return 2 * share if kind == "all-reduce" else share


def network_share(ranks: int, nodes: int) -> float:
    """Return the share of a rank's bytes that leave its node, if a group has this many `ranks` on this many `nodes`.

    A ring enters and leaves each node once, and NCCL divides the bytes over as many rings as the node has ranks of the
    group, each of which leaves through another network card. So with 8 ranks on each node, an eighth leaves it.
    """
    return nodes / ranks if nodes > 1 else 0.0


def traffic(events: Iterator[Event], ranks_per_node: int) -> list[Traffic]:
    """Count the collectives among the events, by kind, ranks and nodes."""
    sizes: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, Collective):
            sizes[event.kind, len(event.ranks), event.nodes(ranks_per_node)].append(event.size)
    found = []
    for (kind, ranks, nodes), each in sorted(sizes.items()):
        wire = ring_bytes(kind, sum(each), ranks)
        network = int(wire * network_share(ranks, nodes))
        found.append(Traffic(kind, ranks, nodes, len(each), sum(each), wire, network))
    return found
