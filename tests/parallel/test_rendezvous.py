"""Nodes that meet: as many as are there at the end of the last call; one that comes later waits and disturbs none."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import write_recipe
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError, WorkerLost
from fsdptrain.parallel import rendezvous
from fsdptrain.parallel.rendezvous import BACKEND, Rendezvous, register_rendezvous, tell_refusal
from fsdptrain.parallel.world import open_tcp_store
from fsdptrain.plan.network import unused_port
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest

Places = list[tuple[int, int]]  # (number of a node, number of all nodes), of each node that has met others


@pytest.fixture
def met() -> Places:
    return []


@pytest.fixture
def waiting(met: Places, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which nodes that have met add "waits" while another one waits, and that one "others"."""
    found: list[str] = []
    monkeypatch.setattr(rendezvous, "LAST_CALL_S", 1)
    monkeypatch.setattr(rendezvous.rendezvous_handler_registry, "_registry", {})

    def report(record: dict[str, Any]) -> None:
        if "nodes" in record:
            met.append((record["node"], record["nodes"]))
        else:
            found.extend(record)

    register_rendezvous(report, lambda: found.append("waits"))
    return found


def free_endpoint() -> str:
    return f"127.0.0.1:{unused_port()}"


def node(endpoint: str) -> Rendezvous:
    """Return a node of a run on one or two nodes; each attempt has new ones."""
    handler = get_rendezvous_handler(RendezvousParameters(BACKEND, endpoint, "run", 1, 2, "127.0.0.1"))
    assert isinstance(handler, Rendezvous)
    return handler


def test_a_node_that_comes_late_waits_for_the_next_attempt(met: Places, waiting: list[str]) -> None:
    endpoint = free_endpoint()
    first, late = node(endpoint), node(endpoint)
    limit_s = 3  # torch's limit does not apply while others train; a busy machine may stop this process for a second
    late.settings.timeout._join = timedelta(seconds=limit_s)
    with ThreadPoolExecutor() as pool:
        assert first.next_rendezvous().world_size == 1
        joining = pool.submit(late.next_rendezvous)
        started = time.monotonic()
        while ({*waiting} != {"waits", "others"} and time.monotonic() < started + 20) or (
            time.monotonic() < started + limit_s + 1
        ):
            assert first.num_nodes_waiting() == 0  # any other number makes torch's agent kill its workers
            time.sleep(0.1)
        assert {*waiting} == {"waits", "others"} and not joining.done() and met == [(0, 1)]
        first.shutdown()
        with pytest.raises(RendezvousClosedError):
            joining.result()


def test_nodes_with_the_same_host_name_and_process_number_meet(
    met: Places, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, nodes = free_endpoint(), []
    for _ in range(2):
        # Torch numbers the handlers of a process, so the first one of each process has the same number.
        monkeypatch.setattr(Rendezvous._node_desc_generator, "_local_id", 0)
        nodes.append(node(endpoint))
        nodes[-1].settings.timeout._join = timedelta(seconds=10)
    with ThreadPoolExecutor() as pool:
        assert [each.world_size for each in pool.map(lambda each: each.next_rendezvous(), nodes)] == [2, 2]
    assert sorted(met) == [(0, 2), (1, 2)] and not waiting


REFUSAL = {"host": "n2", "type": "DataError", "message": "data.path: rows.jsonl was not found"}


@pytest.mark.parametrize("refused", ["the first node", "another node", "all nodes"])
def test_nodes_that_wait_hear_that_another_was_refused(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(rendezvous.rendezvous_handler_registry, "_registry", {})
    register_rendezvous(heard.append, lambda: None, "Slurm job 7")
    endpoint, waiting = free_endpoint(), {"the first node": (1, 2), "another node": (0, 1), "all nodes": ()}[refused]

    def wait_at(number: int) -> None:
        wanted = RendezvousParameters(BACKEND, endpoint, "run", 3, 3, "127.0.0.1", is_host=number == 0)
        node = get_rendezvous_handler(wanted)
        assert isinstance(node, Rendezvous)
        node.settings.timeout._join = timedelta(seconds=3)
        with contextlib.suppress(RendezvousError):  # the TCPStore may have ended
            node.next_rendezvous()

    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(wait_at, number) for number in waiting]
        for number in {0, 1, 2}.difference(waiting):
            pool.submit(tell_refusal, endpoint, "Slurm job 6", 3, False, {**REFUSAL, "message": "of another job"}, 1.0)
            nodes.append(pool.submit(tell_refusal, endpoint, "Slurm job 7", 3, number == 0, REFUSAL, 60.0))
        started = time.monotonic()
        for each in nodes:
            each.result()
        assert time.monotonic() - started < 30  # nobody waits for the 60 s in which others might come
    assert heard == [{"refused": REFUSAL}] * len(waiting)


def described(endpoint: str, least: int = 1, heard: Any = None, **changes: Any) -> RendezvousHandler:
    """Return a node of a run that has this description, with the records of refused nodes in `heard`."""
    run = {"digest": "d", "name": "one", "output_dir": "/runs/one", "host": "n1", "versions": {"torch": "2.12"}}
    rendezvous.rendezvous_handler_registry._registry.clear()
    hear = (heard if heard is not None else []).append
    register_rendezvous(hear, lambda: None, "one", json.dumps(run | changes))
    return get_rendezvous_handler(RendezvousParameters(BACKEND, endpoint, "run", least, 2, "127.0.0.1"))


def test_nodes_of_different_runs_do_not_meet_and_each_difference_has_its_name(waiting: list[str]) -> None:
    endpoint = free_endpoint()
    first = described(endpoint)
    assert isinstance(first, Rendezvous) and isinstance(described(endpoint, host="n2"), Rendezvous)
    for says, changes in {
        "n1 has started the run one in /runs/one at this meeting place: use another port": {"name": "two"},
        r"n1 has other versions \(torch 2.12, here 2.13\): install the same": {"versions": {"torch": "2.13"}},
        "n1 has another plan: start the same command on all nodes": {},
    }.items():
        with pytest.raises(RecipeError, match=says):
            described(endpoint, digest="e", host="n2", **changes)
    with pytest.raises(RecipeError, match="n1 has started the run one"):  # validate --here
        rendezvous.check_run(first._store, json.dumps({"digest": "check"}), endpoint, pytest.fail)


@pytest.mark.parametrize("least", [1, 2])
def test_nodes_that_wait_hear_that_another_has_another_plan(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(rendezvous, "LEAVE_S", 2.0)
    monkeypatch.setattr(rendezvous.rendezvous_handler_registry, "_registry", {})
    endpoint = free_endpoint()
    first = described(endpoint, least, heard)  # as long as it is there, so is its TCPStore
    with pytest.raises(RecipeError, match="n1 has another plan") as refused:
        described(endpoint, least, digest="e", host="n2")
    end = time.monotonic() + (10 if least == 2 else 1)
    while not heard and time.monotonic() < end:
        time.sleep(0.1)
    told = {"host": "n2", "type": "RecipeError", "message": str(refused.value)}
    assert heard == ([{"refused": told}] if least == 2 else [])  # of a range of nodes, the others meet without it
    first.shutdown()


def test_a_firewall_that_lets_only_the_meeting_place_through_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = free_endpoint().split(":")
    written = load(write_recipe(tmp_path), ["launch.nnodes=2", f"launch.rdzv_endpoint={host}:1"])
    plan = make_plan(written, find_topology(written.recipe, {"CUDA_VISIBLE_DEVICES": ""}, explicit=written.where))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        WorkerLost, match=rf"{host}:{port} cannot be reached from .*: a firewall .* open the ports \d+ to"
    ):
        open_tcp_store(plan, 1, timedelta(seconds=1), StopRequest())
