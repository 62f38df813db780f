"""Nodes that fail, fall silent or join while others still prepare their data: one store, a pulse for each node."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdptrain.errors import DataError, Stopped
from fsdptrain.parallel import pulse
from fsdptrain.parallel.pulse import Pulse

NODES, WORKERS = 3, 2


@pytest.fixture
def pulses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Pulse, list[str]]]:
    """Return the pulse of each node, with the messages of its `lost`. The store ends with the test."""
    monkeypatch.setattr(pulse, "INTERVAL_S", 0.02)
    monkeypatch.setattr(pulse, "MAX_MISSED", 25)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(pulse.dist, "rendezvous", lambda *_, **__: iter([(dist.PrefixStore("run", store), 0, 1)]))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    plan: Any = SimpleNamespace(topology=SimpleNamespace(nnodes=NODES, nproc_per_node=WORKERS))
    made = []
    for node in range(NODES):
        monkeypatch.setenv("RANK", str(node * WORKERS))
        lost: list[str] = []
        made.append((Pulse(plan, lost.append), lost))
    return made


def leave(own: Pulse, error: BaseException | None = None) -> None:
    own.__exit__(type(error) if error else None, error, None)


def test_nodes_that_join_one_after_another_lose_none(pulses: list[tuple[Pulse, list[str]]]) -> None:
    for own, _ in pulses:
        own.__enter__()
    for own, _ in pulses:
        time.sleep(0.7)  # longer than a node may be silent
        leave(own)
    assert [lost for _, lost in pulses] == [[], [], []]


@pytest.mark.parametrize("how", ["fails", "falls silent"])
def test_a_node_that_is_lost_is_named_by_all_others(how: str, pulses: list[tuple[Pulse, list[str]]]) -> None:
    for own, _ in pulses:
        own.__enter__()
    time.sleep(0.2)
    leave(pulses[1][0], DataError("no rows") if how == "fails" else Stopped("it gets no further"))
    end = time.monotonic() + 20
    while not (pulses[0][1] and pulses[2][1]) and time.monotonic() < end:
        time.sleep(0.02)
    messages = [lost for _, lost in pulses]
    assert not messages[1] and all("node 1 (" in text for lost in (messages[0], messages[2]) for text in lost)
    assert [len(lost) for lost in messages] == [1, 0, 1]
