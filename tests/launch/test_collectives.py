"""A hang names the collective: read from dumps as NCCL writes them (a sample by hand); test_faults has real ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import TESTS

from fsdptrain.launch.collectives import waited_for
from fsdptrain.parallel.issued import Issued, named

SAMPLE = json.loads((TESTS / "launch" / "nccl_flight_recorder.json").read_text())["entries"]
NOTES = [
    Issued(1900, "all-gather", "model.layers.6"),
    Issued(2900, "all-gather", "model.layers.7"),
    Issued(3900, "reduction", "model.layers.7"),
]


def recorder(last: int, done: int, group: str = "0", later_ns: int = 0) -> dict[str, Any]:
    """Return the dump of a rank that has entered the collectives up to `last`, and completed those up to `done`."""
    entries = []
    for entry in named(SAMPLE, NOTES):
        if entry["collective_seq_id"] <= last:
            finished = entry["collective_seq_id"] <= done
            state = {"retired": finished, "state": "completed" if finished else "started"}
            at = {"process_group": [group, "mesh_shard"], "time_created_ns": entry["time_created_ns"] + later_ns}
            entries.append({**entry, **state, **at})
    return {"nccl": {"entries": entries}}


def test_collectives_get_the_names_of_their_units() -> None:
    assert [entry["collective"] for entry in named(SAMPLE, NOTES)] == [
        "all-gather", "all-gather of model.layers.6", "all-gather of model.layers.7",
        "reduce-scatter of model.layers.7",
    ]  # fmt: skip


def test_a_unit_is_named_once_and_never_for_another_kind_or_a_group_beside_the_loop() -> None:
    gathers = [{**SAMPLE[1], "time_created_ns": at} for at in (2000, 2100)]
    assert [entry["collective"] for entry in named(gathers, NOTES)] == ["all-gather of model.layers.6", "all-gather"]
    beside = {**SAMPLE[1], "process_group": ["1", "undefined"]}
    assert [entry["collective"] for entry in named([beside], NOTES)] == ["all-gather"]
    other_kind = {**SAMPLE[3], "time_created_ns": 2000}
    assert [entry["collective"] for entry in named([other_kind], NOTES)] == ["reduce-scatter"]
    copies = [{**SAMPLE[3], "profiling_name": name} for name in ("gloo:all_to_all", "nccl:all_reduce")]
    assert [entry["collective"] for entry in named(copies, NOTES)] == [
        "reduce-scatter of model.layers.7", "all-reduce of model.layers.7",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "silent", "expected"),
    [
        # The others have issued more collectives behind the one that they wait for.
        (
            [(732, 730), (732, 730), (731, 730), (730, 730)],
            [],
            "rank 3 never entered all-gather #731 of model.layers.7",
        ),
        ([(732, 730), (730, 730), (730, 730)], [], "ranks 1 and 2 never entered all-gather #731 of model.layers.7"),
        ([(731, 730), (731, 730)], [2], "the other ranks wait for rank 2 in all-gather #731 of model.layers.7"),
        (
            [(732, 731), (732, 731)],
            [],
            "all ranks entered reduce-scatter #732 of model.layers.7, but it did not complete",
        ),
        ([(732, 728), (732, 728)], [], "all ranks entered all-gather #729, but"),
        ([(732, 732), (732, 732)], [], ""),
        ([], [0, 1], ""),
    ],
)
def test_the_rank_that_never_entered_is_named(ranks: list[tuple[int, int]], silent: list[int], expected: str) -> None:
    recorded = {rank: recorder(last, done) for rank, (last, done) in enumerate(ranks)}
    found = waited_for(recorded, silent)
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_of_several_groups_the_one_that_waited_first_is_the_cause() -> None:
    later = {rank: recorder(731, 730, "9", later_ns=500) for rank in (2, 3)}
    found = waited_for({0: recorder(731, 730), 1: recorder(730, 730), **later}, [])
    assert found == "rank 1 never entered all-gather #731 of model.layers.7"
