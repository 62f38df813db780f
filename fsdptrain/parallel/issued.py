"""Which unit a collective of FSDP2 was for: torch's flight recorder numbers the collectives, but knows no units."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

KINDS = {"all-gather": ("all-gather",), "reduction": ("reduce-scatter", "all-to-all", "all-reduce")}


class Issued(NamedTuple):
    """A collective that FSDP2 is about to issue: when (nanoseconds since 1970), of which kind, and for which unit."""

    at_ns: int
    kind: Literal["all-gather", "reduction"]
    unit: str


ISSUED: deque[Issued] = deque(maxlen=2000)  # of this process; as many as the flight recorder keeps


class NamedComm:
    """A communication of FSDP2 that notes the name of its unit in `ISSUED` before each collective."""

    def __init__(self, comm: Any, kind: Literal["all-gather", "reduction"], unit: str) -> None:
        self._comm, self._kind, self._unit = comm, kind, unit

    def allocate(self, *args: Any, **options: Any) -> Any:
        """Return memory for the buffers; FSDP2 calls this shortly before the collective, on the same thread."""
        ISSUED.append(Issued(time.time_ns(), self._kind, self._unit))
        return self._comm.allocate(*args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Issue the collective."""
        return self._comm(*args, **options)


def named(entries: list[dict[str, Any]], issued: Iterable[Issued]) -> list[dict[str, Any]]:
    """Return the entries of a flight recorder with `collective`: `all-gather of model.layers.7`, or only the kind.

    `issued` are in order of time. A collective belongs to the last unit that was noted before it, if the kinds agree;
    an all-reduce between copies of the model follows the reduce-scatter of the same unit.
    """
    waiting = deque(issued)
    current: Issued | None = None
    taken: set[str] = set()  # the kinds that were issued for `current`
    found = []
    for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
        while waiting and waiting[0].at_ns <= entry["time_created_ns"]:
            current, taken = waiting.popleft(), set()
        kind = entry["profiling_name"].rpartition(":")[2].strip("_").removesuffix("_base").replace("_", "-")
        matches = current is not None and kind in KINDS[current.kind] and kind not in taken
        # "undefined" is a group beside the training loop (`World.side`); other threads use it.
        if matches and current is not None and entry["process_group"][1] != "undefined":
            taken.add(kind)
            shown = "reduce-scatter" if kind == "all-to-all" else kind  # see `shard.GlooReduceScatter`
            found.append({**entry, "collective": f"{shown} of {current.unit}"})
        else:
            found.append({**entry, "collective": kind})
    return found
