"""Memory and traffic of a trace: the peak by category and moment, the timeline, the collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fsdptrain.forecast.trace import Alloc, Category, Collective, Event, Free, Moment, Trace

BEFORE = "before the step"


@dataclass(frozen=True)
class Level:
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

    `wire` is what a ring moves in and out of each rank (Patarasuk & Yuan, J. Parallel Distrib. Comput. 69, 2009).
    """

    kind: str
    ranks: int
    nodes: int
    count: int
    size: int

    @property
    def wire(self) -> int:
        """Bytes that a rank sends: (n-1)/n of the buffer, and twice that for an all-reduce."""
        return ring_bytes(self.kind, self.size, self.ranks)

    @property
    def network(self) -> int:
        """Bytes of `wire` that leave the node; see `network_share`."""
        return int(self.wire * network_share(self.ranks, self.nodes))


def ring_bytes(kind: str, size: int, ranks: int) -> int:
    """Return the bytes that a rank sends for a collective with a full buffer of `size` bytes."""
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
    count: Counter[tuple[str, int, int]] = Counter()
    size: Counter[tuple[str, int, int]] = Counter()
    for event in events:
        if isinstance(event, Collective):
            key = event.kind, len(event.ranks), len({rank // ranks_per_node for rank in event.ranks})
            count[key] += 1
            size[key] += event.size
    return [Traffic(*key, count[key], size[key]) for key in sorted(count)]
