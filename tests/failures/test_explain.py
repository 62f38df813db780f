"""A hang names the collective: read from dumps as NCCL writes them (a sample by hand); test_faults has real ones.

`nccl_flight_recorder.json` has the fields and types of `dump_json` in torch's `FlightRecorderDetail.hpp`, version 2.10
of the format, and the values that `ProcessGroupNCCL.cpp` records. Without TORCH_NCCL_ENABLE_TIMING a collective is
`scheduled` until it is `completed`, and there are no durations.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support import TESTS

from fsdptrain.failures import watchdog
from fsdptrain.failures.explain import explain_hang, waited_for
from fsdptrain.parallel.patches import SIDE, Issued, named, recorded_collectives
from fsdptrain.run_folder.files import write_atomically
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import ranks_text

DUMP = json.loads((TESTS / "failures" / "nccl_flight_recorder.json").read_text())
SAMPLE = DUMP["entries"]
NOTES = [
    Issued("0", 730, "all-gather", "model.layers.6"),
    Issued("0", 731, "all-gather", "model.layers.7"),
    Issued("0", 732, "reduction", "model.layers.7"),
]
MS = 1_000_000


def dumped(last: int, done: int) -> dict[str, Any]:
    """Return what NCCL's recorder holds on a rank that has issued the collectives up to `last`; `done` is completed."""
    dump = copy.deepcopy(DUMP)
    dump["entries"] = [entry for entry in dump["entries"] if entry["collective_seq_id"] <= last]
    for entry in dump["entries"]:
        finished = entry["collective_seq_id"] <= done
        entry |= {"retired": finished, "state": "completed" if finished else "scheduled"}
    return dump


def recorder(
    last: int, done: int, group: str = "0", later_ns: int = 0, description: str = "default_pg"
) -> dict[str, Any]:
    """Return the file of such a rank, as its watchdog writes it. Another group is entered by `later_ns` later."""
    entries = dumped(last, done)["entries"]
    for entry in entries:
        entry |= {"process_group": [group, description], "time_created_ns": entry["time_created_ns"] + later_ns}
    notes = [note._replace(group=group) for note in NOTES]
    return {"nccl": {"entries": named(entries, [] if description == SIDE else notes)}}


def test_a_unit_is_named_only_for_its_group_number_and_kind() -> None:
    beside = {**SAMPLE[1], "process_group": ["1", SIDE]}
    other_kind = {**SAMPLE[3], "collective_seq_id": 731}
    [first, second] = named([beside, other_kind], NOTES)
    assert (first["collective"], first["side"]) == ("all-gather", True)
    assert (second["collective"], second["side"]) == ("reduce-scatter", False)
    copies = [{**SAMPLE[3], "profiling_name": name} for name in ("gloo:all_to_all", "nccl:all_reduce")]
    assert [entry["collective"] for entry in named(copies, NOTES)] == [
        "reduce-scatter of model.layers.7", "all-reduce of model.layers.7",
    ]  # fmt: skip


def test_the_sample_has_the_fields_of_torchs_recorder(tmp_path: Path) -> None:
    """The recorders of NCCL and gloo are one template, so a dump of gloo shows the format of the installed torch."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        dist.barrier()
        dump = recorded_collectives()["gloo"]
    finally:
        dist.destroy_process_group()

    def types(record: dict[str, Any]) -> dict[str, type]:
        return {name: type(value) for name, value in record.items()}

    assert types(dump) == types(DUMP) and dump["version"] == DUMP["version"]
    assert types(dump["entries"][-1]) == types(SAMPLE[-1])
    assert dump["entries"][-1]["process_group"][1] == SAMPLE[-1]["process_group"][1]


@pytest.mark.parametrize(
    ("ranks", "silent", "expected"),
    [
        # The others have issued more collectives behind the one that they wait for.
        ([(732, 730), (731, 730), (730, 730)], [], "rank 2 never entered all-gather #731 of model.layers.7"),
        ([(732, 730), (730, 730), (730, 730)], [], "ranks 1 and 2 never entered all-gather #731 of model.layers.7"),
        ([(731, 730), (731, 730)], [2], "the other ranks wait for rank 2 in all-gather #731 of model.layers.7"),
        ([(732, 731), (732, 731)], [], "all ranks entered reduce-scatter #732 of model.layers.7, but it did not"),
        ([(732, 728), (732, 728)], [], "all ranks entered all-gather #729, but"),
        ([(732, 732), (732, 732)], [], ""),
        ([], [0, 1], ""),
    ],
)
def test_the_rank_that_never_entered_is_named(ranks: list[tuple[int, int]], silent: list[int], expected: str) -> None:
    recorded = {rank: recorder(last, done) for rank, (last, done) in enumerate(ranks)}
    found = waited_for(recorded, silent)
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_hosts_are_named_where_they_are_known() -> None:
    hosts = ["node-a", "node-a", "node-b", "node-b"]
    stuck = {rank: recorder(732, 731) for rank in (0, 2)}
    assert waited_for(stuck, [], hosts).endswith("suspect a GPU or the network of node-a, node-b")
    assert waited_for({0: recorder(732, 731)}, [1], hosts).endswith(
        "the other ranks wait for rank 1 on node-a in reduce-scatter #732 of model.layers.7"
    )
    late = {rank: recorder(731, 730) for rank in (0, 1)} | {rank: recorder(730, 730) for rank in (2, 3)}
    assert waited_for(late, [], hosts).startswith("ranks 2 and 3 on node-b never entered")
    assert ranks_text([1, 2], hosts) == "ranks 1 and 2"  # on all hosts


def test_of_several_groups_the_one_that_waited_first_is_the_cause() -> None:
    later = {rank: recorder(731, 730, "9", later_ns=MS) for rank in (2, 3)}
    found = waited_for({0: recorder(731, 730), 1: recorder(730, 730), **later}, [])
    assert found == "rank 1 never entered all-gather #731 of model.layers.7"


def test_a_save_under_way_is_named_only_if_the_training_does_not_wait_itself() -> None:
    """A rank stopped during a save is waited for twice, and by the save's thread perhaps first."""
    side = recorder(731, 730, "1", later_ns=-5 * MS, description=SIDE)["nccl"]["entries"]
    both = {"nccl": {"entries": [*side, *recorder(731, 730)["nccl"]["entries"]]}}
    assert waited_for({0: both}, [1]) == "the other ranks wait for rank 1 in all-gather #731 of model.layers.7"
    done = {"nccl": {"entries": [*side, *recorder(731, 731)["nccl"]["entries"]]}}
    assert waited_for({0: done}, [1]) == "the other ranks wait for rank 1 in all-gather #731"


def test_a_hang_on_nccl_is_explained_from_the_dumps_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL does not block the host: all ranks are found at a wait for the device, and only the dumps say for what."""
    rundir, where = RunDir(tmp_path), "world.read (world.py:44)"
    rundir.hangs(1).mkdir(parents=True)
    monkeypatch.setattr(watchdog, "ISSUED", NOTES)
    for rank, (last, done) in enumerate([(732, 730), (732, 730), (731, 730), (730, 730)]):
        dumps = {"gloo": {"version": "2.10"}, "nccl": dumped(last, done)}  # no entries: the key is absent
        monkeypatch.setattr(watchdog, "recorded_collectives", lambda dumps=dumps: dumps)
        report = {"rank": rank, "waits": rank != 3, "where": where if rank != 3 else "corpus.batch (corpus.py:112)"}
        report["collectives"] = watchdog.last_collectives()
        write_atomically(rundir.hang_report(1, rank), json.dumps(report))
    launch = SimpleNamespace(timeout_s=300)
    plan: Any = SimpleNamespace(topology=SimpleNamespace(world_size=4), recipe=SimpleNamespace(launch=launch))
    message = explain_hang(1, plan, rundir, "after step 12")
    assert "; rank 3 never entered all-gather #731 of model.layers.7. All stacks" in message
    assert "rank 3 is in corpus.batch (corpus.py:112)" in message
