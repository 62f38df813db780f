"""Which collective a hung run waits for, and which rank never entered it: from the flight recorders of the ranks.

Every rank that hangs writes what its recorders hold: `{"nccl": {"entries": [...]}, "gloo": ...}`. The collectives of a
group of ranks have numbers that are the same on all of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fsdptrain.errors import listed
from fsdptrain.text import hosts_of, ranks_text

Recorded = Mapping[str, Any]  # backend → dump of its recorder


class Call(NamedTuple):
    """A collective that a rank has entered: its number in its group, its name, and when it was entered."""

    number: int
    name: str
    at_ns: int
    done: bool
    side: bool  # in the group beside the training loop


def waited_for(recorded: Mapping[int, Recorded], silent: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return one sentence on the collective that the run waits for; "" if no rank has entered one that is not done.

    `recorded` is rank → dumps; `silent` are the ranks that have not reported; `hosts` are the host names of all ranks,
    if they are known.
    """
    found = [each for group in _groups(recorded) if (each := _explain(_calls(recorded, group), silent, hosts))]
    return min(found)[2] if found else ""


def _explain(
    calls: Mapping[int, Sequence[Call]], silent: Sequence[int], hosts: Sequence[str]
) -> tuple[bool, int, str] | None:
    """Return a sentence on the first collective of a group that is not done; None if all are done.

    In front of it is what orders the sentences of several groups. A group of the training loop comes first: a save
    under way waits for a rank that is lost as well, and may have begun to do so earlier. Then the earliest comes first:
    it is the cause of the others.
    """
    open_calls = [call for of_rank in calls.values() for call in of_rank if not call.done]
    if not open_calls:
        return None
    # An asynchronous rank has entered many collectives behind the one that it waits for.
    first = min(open_calls, key=lambda call: (call.number, call.at_ns))
    name, _, unit = first.name.partition(" of ")
    what = f"{name} #{first.number}" + (f" of {unit}" if unit else "")
    absent = [rank for rank, of_rank in calls.items() if max(call.number for call in of_rank) < first.number]
    if absent:
        return first.side, first.at_ns, f"{ranks_text(absent, hosts)} never entered {what}"
    if silent:
        return first.side, first.at_ns, f"the other ranks wait for {ranks_text(silent, hosts)} in {what}"
    between = hosts_of([*calls], hosts)
    suspects = f"a GPU or the network of {listed(between, 4)}" if len(between) > 1 else "the network or a GPU"
    return first.side, first.at_ns, f"all ranks entered {what}, but it did not complete: suspect {suspects}"


def _groups(recorded: Mapping[int, Recorded]) -> set[tuple[str, str]]:
    """Return the groups of ranks that have entered collectives, as (backend, name)."""
    return {
        (backend, entry["process_group"][0])
        for dumps in recorded.values()
        for backend in dumps
        for entry in _entries(dumps, backend)
    }


def _calls(recorded: Mapping[int, Recorded], group: tuple[str, str]) -> dict[int, list[Call]]:
    """Return rank → its recorded collectives in a group, for the ranks that have any."""
    backend, name = group
    calls = {
        rank: [
            Call(
                entry["collective_seq_id"],
                entry["collective"],
                entry["time_created_ns"],
                entry["retired"] or entry["state"] == "completed",
                entry["side"],
            )
            for entry in _entries(dumps, backend)
            if entry["process_group"][0] == name
        ]
        for rank, dumps in recorded.items()
    }
    return {rank: of_rank for rank, of_rank in calls.items() if of_rank}


def _entries(dumps: Recorded, backend: str) -> Iterator[Mapping[str, Any]]:
    """Yield the collectives in the dump of a backend; sends and receives have numbers of their own."""
    return (entry for entry in dumps.get(backend, {}).get("entries", []) if not entry["is_p2p"])
