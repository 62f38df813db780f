"""The trace of one optimizer step of one rank: allocations and releases, kernels, collectives, stream events.

`forecast.simulation` writes a trace; the forecast reads memory, communication and time from it, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Category = Literal[
    "parameter shards", "gradients", "optimizer state", "gathered parameters", "communication buffers",
    "saved activations", "recomputed activations", "logits and loss", "inputs and buffers", "temporaries",
]  # fmt: skip

HOST = "cpu"
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

    `apart`: it is in a group for reductions alone, which NCCL carries out at the same time as gathers.
    """

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "other"]
    ranks: tuple[int, ...]
    size: int
    stream: int
    apart: bool = False


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

    def repeated(self, micro_batches: int) -> Iterator[Event]:
        """Yield the events of a step of `micro_batches`: of those simulated, the last but one is repeated."""
        first = next((event for event in self.events if isinstance(event, Moment)), None)
        starts = [i for i, event in enumerate(self.events) if isinstance(event, Moment) and event == first]
        if len(starts) < 2:
            yield from self.events
            return
        yield from self.events[: starts[-2]]
        for _ in range(micro_batches - len(starts) + 1):
            yield from self.events[starts[-2] : starts[-1]]
        yield from self.events[starts[-1] :]
