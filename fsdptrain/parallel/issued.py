"""Which unit a collective of FSDP2 is for: torch's flight recorder numbers the collectives, but knows no units."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

KINDS = {"all-gather": ("all-gather",), "reduction": ("reduce-scatter", "all-to-all", "all-reduce")}


SIDE = "side"  # the description of `World.side` in the flight recorder


class Issued(NamedTuple):
    """A collective that FSDP2 issues: the name of its group, its number there, its kind, and its unit."""

    group: str
    number: int
    kind: Literal["all-gather", "reduction"]
    unit: str


ISSUED: deque[Issued] = deque(maxlen=2000)  # of this process; as many as the flight recorder keeps


def named(entries: Iterable[dict[str, Any]], issued: Iterable[Issued]) -> list[dict[str, Any]]:
    """Return the entries of a flight recorder with `collective` and `side`.

    `collective` is `all-gather of model.layers.7`, or only the kind where FSDP2 has issued no collective of this kind
    with this group and number. `side` says whether the group is the one beside the training loop.
    """
    units = {(each.group, each.number): each for each in issued}
    found = []
    for entry in entries:
        group, description = entry["process_group"]
        kind = entry["profiling_name"].rpartition(":")[2].strip("_").removesuffix("_base").replace("_", "-")
        note = units.get((group, entry["collective_seq_id"]))
        if note is not None and kind in KINDS[note.kind]:
            shown = "reduce-scatter" if kind == "all-to-all" else kind  # see `shard.GlooReduceScatter`
            kind = f"{shown} of {note.unit}"
        found.append({**entry, "collective": kind, "side": description == SIDE})
    return found
