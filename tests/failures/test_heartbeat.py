"""Nodes that fail, fall silent or join while others prepare their data: one TCPStore, a heartbeat for each node."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support import wait_until

from fsdptrain.errors import DataError, Stopped
from fsdptrain.failures import watchdog
from fsdptrain.failures.watchdog import Heartbeat

NODES, WORKERS = 3, 2


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Heartbeat, list[str]]]:
    """Return the heartbeat of each node, with the messages of its `lost`. The TCPStore ends with the test."""
    monkeypatch.setattr(watchdog, "INTERVAL_S", 0.02)
    monkeypatch.setattr(watchdog, "MAX_MISSED", 25)
    tcp_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(
        watchdog.dist, "rendezvous", lambda *_, **__: iter([(dist.PrefixStore("run", tcp_store), 0, 1)])
    )
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return [new_heartbeat(node * WORKERS, monkeypatch) for node in range(NODES)]


def new_heartbeat(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Heartbeat, list[str]]:
    """Return the heartbeat of a worker, with the messages of its `lost`."""
    plan: Any = SimpleNamespace(topology=SimpleNamespace(nnodes=NODES, nproc_per_node=WORKERS))
    monkeypatch.setenv("RANK", str(rank))
    lost: list[str] = []
    return Heartbeat(plan, lost.append), lost


def leave(own: Heartbeat, error: BaseException | None = None) -> None:
    own.__exit__(type(error) if error else None, error, None)


def test_nodes_that_join_one_after_another_lose_none(heartbeats: list[tuple[Heartbeat, list[str]]]) -> None:
    for own, _ in heartbeats:
        own.__enter__()
    for own, _ in heartbeats:
        time.sleep(0.7)  # longer than a node may be silent
        leave(own)
    assert [lost for _, lost in heartbeats] == [[], [], []]


@pytest.mark.parametrize("how", ["fails", "falls silent"])
def test_a_node_that_is_lost_is_named_by_all_others(how: str, heartbeats: list[tuple[Heartbeat, list[str]]]) -> None:
    for own, _ in heartbeats:
        own.__enter__()
    time.sleep(0.2)
    leave(heartbeats[1][0], DataError("no rows") if how == "fails" else Stopped("it gets no further"))
    wait_until(lambda: heartbeats[0][1] and heartbeats[2][1], "node 1 was not missed")
    messages = [lost for _, lost in heartbeats]
    assert not messages[1] and all("node 1 (" in text for lost in (messages[0], messages[2]) for text in lost)
    assert [len(lost) for lost in messages] == [1, 0, 1]


@pytest.mark.parametrize("first", ["is importing", "is preparing data"])
def test_a_failure_of_another_worker_is_known_to_all_other_nodes(
    first: str, heartbeats: list[tuple[Heartbeat, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = [0, 2] if first == "is importing" else [0, 1, 2]
    for node in watching:
        heartbeats[node][0].__enter__()
    second, lost = new_heartbeat(1 * WORKERS + 1, monkeypatch)
    leave(second.__enter__(), DataError("no rows"))
    wait_until(lambda: heartbeats[0][1] and heartbeats[2][1], "node 1 was not missed")
    assert [len(messages) for _, messages in heartbeats] == [1, 0, 1]
    assert not lost and all(f"node 1 ({socket.gethostname()}) stopped" in heartbeats[node][1][0] for node in (0, 2))
    if first != "is importing":
        leave(heartbeats[1][0])
