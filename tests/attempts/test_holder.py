"""The claim of a run in an object store: one process holds it, and a dead one does not hold it for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import write_recipe

pytest.importorskip("s3fs", reason="needs pip install 'fsdptrain[dev]'")
pytest.importorskip("moto", reason="needs pip install 'fsdptrain[dev]'")

from object_store import BUCKET, FORBIDDEN, ObjectStore, serve_here

from fsdptrain.attempts import holder
from fsdptrain.attempts.holder import claimed, read_claim
from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError, StorageError
from fsdptrain.folder.storage import ObjectPath, object_path
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    yield from serve_here()


@pytest.fixture
def plan(tmp_path: Path, server: ObjectStore) -> Plan:
    return make_plan(load(write_recipe(tmp_path, output_dir=f"s3://{BUCKET}/{tmp_path.name}")), Topology("cpu", 1, 2))


@pytest.fixture
def place(plan: Plan) -> ObjectPath:
    return object_path(plan.rundir.place) / "claim.json"


def move_to(place: ObjectPath, **changes: object) -> None:
    """Change fields of the claim, as if another process had written it."""
    place.fs.pipe_file(place.key, json.dumps({**(read_claim(place) or {}), **changes}).encode())


def test_one_process_holds_a_run_and_is_named(plan: Plan, place: ObjectPath) -> None:
    with claimed(plan):
        with (
            pytest.raises(
                RecipeError, match=rf"another run is using {plan.rundir.url}: .* \(process {os.getpid()}\), since 20"
            ),
            claimed(plan),
        ):
            pass
        assert read_claim(place)
    assert read_claim(place) is None


def test_the_claim_of_a_dead_process_of_this_machine_is_taken_over_at_once(plan: Plan, place: ObjectPath) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with claimed(plan):
        move_to(place, process=child.pid, run="other")
        with claimed(plan):
            assert (read_claim(place) or {})["process"] == os.getpid()


def test_a_claim_is_not_held_by_another_process_that_got_its_number(plan: Plan, place: ObjectPath) -> None:
    with claimed(plan):
        move_to(place, started="1", run="other")  # this process, as that of a container which was started again
        with claimed(plan):
            assert (read_claim(place) or {})["started"] != "1"


def test_an_object_that_is_no_claim_is_taken_over(
    plan: Plan, place: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "POLL_S", 0.05)
    monkeypatch.setattr(holder, "STALE_S", 0.1)
    place.fs.pipe_file(place.key, b"{")
    with claimed(plan):
        assert (read_claim(place) or {})["process"] == os.getpid()


def test_a_claim_of_another_machine_is_taken_over_when_it_does_not_change(
    plan: Plan, place: ObjectPath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(holder, "POLL_S", 0.05)
    monkeypatch.setattr(holder, "STALE_S", 0.3)
    place.fs.pipe_file(place.key, b'{"host": "far", "process": 7, "node": "far", "run": "other", "since": "then"}')
    with claimed(plan):
        assert (read_claim(place) or {})["node"] == holder.node_name()
    assert "is claimed by far (process 7), since then: taken over if it is not confirmed" in capsys.readouterr().err


def test_a_claim_that_is_confirmed_is_not_taken_over(
    plan: Plan, place: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "POLL_S", 0.05)
    monkeypatch.setattr(holder, "RENEW_S", 0.2)
    with claimed(plan):
        monkeypatch.setattr(holder, "node_name", lambda: "another machine")
        with pytest.raises(RecipeError, match="another run is using"), claimed(plan):
            pass
        assert read_claim(place)


def test_nodes_that_meet_at_one_endpoint_hold_a_run_together(tmp_path: Path, plan: Plan, place: ObjectPath) -> None:
    recipe = load(write_recipe(tmp_path, output_dir=plan.rundir.place, train__global_batch_size=8))
    nodes = make_plan(recipe, Topology("cpu", 2, 1, endpoint="host-0:29500"))
    with claimed(nodes), claimed(nodes), pytest.raises(RecipeError, match="another run is using"), claimed(plan):
        pass
    assert read_claim(place) is None


def test_a_store_that_refuses_the_claim_is_an_error(plan: Plan, server: ObjectStore) -> None:
    with server.times(-1, FORBIDDEN, "PUT"), pytest.raises(StorageError, match="access is refused"), claimed(plan):
        pass
