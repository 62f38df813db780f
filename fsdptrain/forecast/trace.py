"""What one optimizer step of one rank does, written down: storages that come and go, kernels, collectives, streams.

`simulate` writes a trace; memory, communication and time are read off it, without torch.
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


HOST_STREAM = -1  # of kernels that the host computes for a device


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of memory. Its category is what it turned out to be for, known only after it was allocated."""

    device: str
    category: Category


class Alloc(NamedTuple):
    """A storage gets `size` bytes, on the stream with this number."""

    storage: Storage
    size: int
    stream: int


class Free(NamedTuple):
    """A storage gives its bytes back."""

    storage: Storage


class Kernel(NamedTuple):
    """An operator on a stream. `moved` counts the bytes it reads and writes; `link` those that go over PCIe."""

    name: str
    flops: int
    moved: int
    link: int
    stream: int


class Collective(NamedTuple):
    """A collective of `ranks`, with the bytes of its full buffer (gathered, or before it is scattered)."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "broadcast", "other"]
    ranks: tuple[int, ...]
    size: int
    stream: int


class RecordEvent(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int


class WaitEvent(NamedTuple):
    """A stream goes on only once an event has happened."""

    event: int
    stream: int


class Synchronize(NamedTuple):
    """The host waits for everything before it."""


class Moment(NamedTuple):
    """A part of the step begins: `forward of layers.3`, `optimizer`."""

    name: str


Event = Alloc | Free | Kernel | Collective | RecordEvent | WaitEvent | Synchronize | Moment


@dataclass
class Trace:
    """The events of a step in program order; `before` is what was allocated before it began."""

    before: list[Alloc] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def all(self) -> Iterator[Event]:
        """Everything, from an empty device on."""
        yield from self.before
        yield from self.events

    def repeated(self, micro_batches: int) -> Iterator[Event]:
        """The step with more micro-batches than the two that were simulated: the first comes again and again."""
        starts = [i for i, event in enumerate(self.events) if isinstance(event, Moment) and event == self._first()]
        if len(starts) == 2:
            for _ in range(micro_batches - 2):
                yield from self.events[starts[0] : starts[1]]
        yield from self.events

    def _first(self) -> Moment:
        return next(event for event in self.events if isinstance(event, Moment))
