"""The files of a run in an object store: what is fetched, what is uploaded, and who may write."""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import write_recipe

pytest.importorskip("s3fs", reason="needs pip install 'fsdptrain[dev]'")
pytest.importorskip("moto", reason="needs pip install 'fsdptrain[dev]'")

from object_store import BUCKET, EXPIRED, FORBIDDEN, ObjectStore, serve_here
from typer.testing import CliRunner

from fsdptrain.attempts.claim import claim_run_dir
from fsdptrain.cli import _print_error, app
from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError, RunLost, Stopped, StorageError
from fsdptrain.folder import runstore
from fsdptrain.folder.ownership import file_stamps, write_export_record
from fsdptrain.folder.rundir import RunDir
from fsdptrain.folder.runstore import RunStore
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.processes import StopRequest
from fsdptrain.train.worker import take_store


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    yield from serve_here()


@pytest.fixture
def url(tmp_path: Path, server: ObjectStore) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}/run"


def folder_of(root: Path, url: str) -> RunDir:
    rundir = RunDir(root, f"{url}/checkpoints", url)
    rundir.logs.mkdir(parents=True)
    return rundir


def names_in(store: RunStore) -> set[str]:
    """Return the names of all objects of a run."""
    key = store.root.key
    return {name.removeprefix(f"{key}/") for name in store.root.fs.find(key)}


def objects_of(store: RunStore) -> dict[str, bytes]:
    """Return all objects of a run by their names."""
    return {name: store.root.fs.cat_file(f"{store.root.key}/{name}") for name in names_in(store)}


def with_export(rundir: RunDir, step: int, files: dict[str, bytes]) -> RunDir:
    """Write files as the export of `step`."""
    rundir.export.mkdir(exist_ok=True)
    for name, content in files.items():
        (rundir.export / name).write_bytes(content)
    write_export_record(rundir, step, {name: file_stamps(rundir.export)[name] for name in files})
    return rundir


def upload(rundir: RunDir) -> None:
    with StopRequest() as stop:
        RunStore(rundir).push_export(stop, lambda *_: None)


def test_small_files_are_uploaded_and_an_empty_folder_gets_them(tmp_path: Path, url: str, server: ObjectStore) -> None:
    here, there = folder_of(tmp_path / "a", url), folder_of(tmp_path / "b", url)
    store = RunStore(here)
    store.begin()
    copied = {"metrics.jsonl": "1\n", "plan.json": "{}", "logs/rank-0.log": "x", "model/tokenizer/t.json": "y"}
    kept = {
        "logs/lock": "",
        "checkpoints/upload/rank-00000.safetensors": "z",
        "export/config.json": "e",
        "mine.txt": "m",
    }
    for name, content in {**copied, **kept}.items():
        (here.root / name).parent.mkdir(parents=True, exist_ok=True)
        (here.root / name).write_text(content)
    store.push()
    assert names_in(store) == {*copied, "written-by.json"}
    server.requests.clear()
    store.push()
    assert not [request for request in server.requests if "PUT" in request]
    here.metrics.write_text("1\n2\n")
    store.push()
    RunStore(there).begin()
    found = {str(path.relative_to(there.root)) for path in there.root.rglob("*") if path.is_file()}
    assert found == {*copied, "written-by.json"} and there.metrics.read_text() == "1\n2\n"


def test_a_folder_that_has_lost_the_run_writes_nothing_more(tmp_path: Path, url: str) -> None:
    here, there = folder_of(tmp_path / "a", url), folder_of(tmp_path / "b", url)
    first, second = RunStore(here), RunStore(there)
    first.begin()
    here.metrics.write_text("1\n")
    first.push()
    second.begin()
    here.metrics.write_text("1\n2\n")
    host, before = re.escape(socket.gethostname()), objects_of(first)
    who = (
        rf"was taken over by {host} \(process {os.getpid()}\), since 20.* UTC\. This machine \({host}\) uploads nothing"
    )
    for upload_something in (first.push, lambda: upload(with_export(here, 2, {"config.json": b"2"}))):
        with pytest.raises(
            RunLost, match=rf"{who} more: what it has made since its last upload is in {here.root} alone"
        ):
            upload_something()
    assert objects_of(first) == before
    there.metrics.write_text("1\n2'\n")
    (there.logs / "rank-0.log").write_text("new")
    second.push()
    RunStore(here).begin()  # back again: what the other folder has written counts
    assert here.metrics.read_text() == "1\n2'\n"


def test_a_run_that_is_removed_from_the_store_while_it_is_trained_is_not_called_taken_over(
    tmp_path: Path, url: str
) -> None:
    here = folder_of(tmp_path / "a", url)
    store = RunStore(here)
    store.begin()
    store.root.fs.rm(store.root.key, recursive=True)
    with pytest.raises(RunLost, match=rf"this run was removed from the store, or moved, .* is in {here.root}") as lost:
        store.push()
    assert "taken over" not in str(lost.value) and names_in(store) == set()


def test_a_machine_that_was_frozen_does_not_take_the_run_back_when_its_workers_start_again(
    tmp_path: Path, url: str
) -> None:
    for nodes in ({}, {"launch__nnodes": 2, "launch__rdzv_endpoint": "host-0:29500"}):
        here, there = folder_of(tmp_path / f"a{len(nodes)}", url), folder_of(tmp_path / f"b{len(nodes)}", url)
        topology = Topology("cpu", 2, 1, endpoint="host-0:29500") if nodes else Topology("cpu", 1, 2)
        plan = make_plan(load(write_recipe(tmp_path, output_dir=url, **nodes)), topology)
        RunStore(here).begin()
        take_store(RunStore(here), plan)
        RunStore(there).begin()
        claim = {"run": "other", "host": "far", "process": 7, "since": "noon"}
        RunStore(there).root.fs.pipe_file(f"{RunStore(there).root.key}/claim.json", json.dumps(claim).encode())
        before = objects_of(RunStore(there))
        with pytest.raises(RunLost, match="was taken over by"):
            take_store(RunStore(here), plan)
        assert objects_of(RunStore(there)) == before
        RunStore(there).root.fs.rm(RunStore(there).root.key, recursive=True)


def test_the_worker_notices_within_a_while_that_the_run_was_taken_over(
    tmp_path: Path, url: str, server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runstore, "WATCH_S", 0.05)
    here, there = folder_of(tmp_path / "a", url), folder_of(tmp_path / "b", url)
    RunStore(here).begin()
    found: queue.Queue[RunLost] = queue.Queue()
    with RunStore(here).watched(found.put):
        with server.times(2, FORBIDDEN, "written-by.json"):  # a store that refuses has not lost the run
            while len(server.requests) < 4:
                time.sleep(0.01)
        assert found.empty()
        RunStore(there).begin()
        assert "was taken over by" in str(found.get(timeout=30))


def test_the_node_that_gets_rank_0_goes_on_with_the_curve_and_keeps_its_plan(tmp_path: Path, url: str) -> None:
    here, there = folder_of(tmp_path / "a", url), folder_of(tmp_path / "b", url)
    for rundir in (there, here):
        RunStore(rundir).begin()
        rundir.plan.write_text(rundir.root.name)
    here.metrics.write_text("1\n")
    RunStore(here).push()
    (there.root / "logs/rank-1.log").write_text("of b")
    RunStore(there).push_worker_logs()
    RunStore(here).push()
    assert "logs/rank-1.log" in names_in(RunStore(here))
    RunStore(there).take()
    assert (there.metrics.read_text(), there.plan.read_text()) == ("1\n", "b")
    assert RunStore(there).is_writer() and not RunStore(here).is_writer()


def test_a_run_that_was_removed_from_the_store_is_not_continued(tmp_path: Path, url: str) -> None:
    rundir = folder_of(tmp_path / "a", url)
    store = RunStore(rundir)
    store.begin()
    rundir.metrics.write_text("1\n")
    store.push()
    store.root.fs.rm(store.root.key, recursive=True)
    RunStore(rundir).begin()
    assert not rundir.metrics.exists() and (tmp_path / "a.kept/metrics.jsonl").read_text() == "1\n"


def test_a_fetch_that_was_interrupted_is_repeated(tmp_path: Path, url: str, server: ObjectStore) -> None:
    here, there = folder_of(tmp_path / "a", url), folder_of(tmp_path / "b", url)
    store = RunStore(here)
    store.begin()
    here.metrics.write_text("1\n")
    store.push()
    with server.times(-1, EXPIRED, "metrics.jsonl"), pytest.raises(StorageError, match="may have expired"):
        RunStore(there).begin()
    assert not there.metrics.exists()
    RunStore(there).begin()
    assert there.metrics.read_text() == "1\n"


def test_names_that_lead_out_of_the_folder_are_not_fetched(tmp_path: Path, url: str) -> None:
    rundir = folder_of(tmp_path / "run", url)
    store = RunStore(rundir)
    for name in ("logs/../../escaped", "logs//x", "escaped", "plan.json"):
        store.root.fs.pipe_file(f"{store.root.key}/{name}", b"{}")
    store.fetch(rundir.root)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"plan.json"}


def test_an_export_can_be_opened_only_when_it_is_complete(tmp_path: Path, url: str, server: ObjectStore) -> None:
    rundir = with_export(folder_of(tmp_path / "run", url), 2, {"config.json": b"2", "old.safetensors": b"old"})
    store = RunStore(rundir)
    store.begin()
    upload(rundir)
    assert store.exported_step() == 2 and store.recorded_sizes() == {"config.json": 1, "old.safetensors": 3}
    server.requests.clear()
    upload(rundir)
    assert not [request for request in server.requests if request.startswith(("PUT", "DELETE"))]
    (rundir.export / "old.safetensors").unlink()
    with_export(rundir, 4, {"config.json": b"4", "model.safetensors": b"new", "tokenizer.json": b"t"})
    with server.times(-1, EXPIRED, "model.safetensors"), pytest.raises(StorageError):
        upload(rundir)
    store.root.fs.pipe_file(f"{store.root.key}/export/model-00001-of-00002.safetensors", b"of an interrupted upload")
    assert store.exported_step() is None and "export/config.json" not in names_in(store)
    server.requests.clear()
    upload(rundir)
    order = [request.partition("run/")[2].rstrip("?") for request in server.requests if request.startswith("PUT")]
    assert order[-2:] == ["export/config.json", "export.json"] and store.exported_step() == 4
    assert names_in(store) == {*(f"export/{name}" for name in store.recorded_sizes()), "export.json", "written-by.json"}


def test_an_upload_that_is_stopped_leaves_nothing_half_written(tmp_path: Path, url: str) -> None:
    rundir = with_export(
        folder_of(tmp_path / "run", url), 2, {"config.json": b"2", "model.safetensors": bytes(120 << 20)}
    )
    store, seen = RunStore(rundir), list[tuple[int, int]]()
    store.begin()
    with StopRequest() as stop:

        def stop_soon(stage: str, done: int, total: int) -> None:
            seen.append((done, total))
            stop.count, stop.name = 1, "SIGTERM"

        with pytest.raises(Stopped, match="stopped by SIGTERM while the export was uploaded; run the same command"):
            store.push_export(stop, stop_soon)
    assert len(seen) == 1 and store.exported_step() is None and names_in(store) == {"written-by.json"}
    assert not store.root.fs.list_multipart_uploads(BUCKET)


def plan_for(tmp: Path, url: str) -> Plan:
    return make_plan(load(write_recipe(tmp, output_dir=url)), Topology("cpu", 1, 2))


def test_a_run_in_a_store_works_in_the_cache_and_has_its_checkpoints_beside(
    tmp_path: Path, url: str, cache: Path
) -> None:
    plan = plan_for(tmp_path, f"{url}/")
    assert Path(plan.run_dir).parent == cache / "runs" and plan.rundir.place == url
    assert plan.recipe.checkpoint.path == f"{url}/checkpoints"
    with pytest.raises(RecipeError, match=r"checkpoint\.path: .* is inside output_dir"):
        load(write_recipe(tmp_path, output_dir=url, checkpoint__path=f"{url}/export"))
    reading = make_plan(load(write_recipe(tmp_path, output_dir=url, data__path=f"{url}/*.jsonl")), plan.topology)
    refused = pytest.raises(RecipeError, match=r"data\.path: .* would include files that this run writes")
    with refused, claim_run_dir(reading, "", fresh=False):
        pass


def test_an_attempt_uploads_its_files_however_it_ends(
    tmp_path: Path, url: str, server: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(tmp_path, url)
    store = RunStore(plan.rundir)
    with pytest.raises(Stopped), claim_run_dir(plan, "recipe", fresh=False):
        assert "claim.json" in names_in(store)
        raise Stopped("stopped")
    assert {"plan.json", "recipe.yaml", "plans/0001.json"} <= names_in(store) and "claim.json" not in names_in(store)
    with pytest.raises(Stopped) as stopped, claim_run_dir(plan, "recipe", fresh=False):
        server.fault = lambda method, path: EXPIRED if method == "PUT" else None
        raise Stopped("stopped")
    server.fault = None
    _print_error(stopped.value)
    (message,) = capsys.readouterr().err.split("fsdptrain: ")[1:]
    assert message.startswith(f"stopped\nthe newest logs are in {plan.run_dir} only: ")
    with pytest.raises(RecipeError, match=rf"output_dir: {url} is not empty"), claim_run_dir(plan, "", fresh=True):
        pass


@pytest.mark.parametrize("command", ["verify", "status", "export"])
def test_a_command_says_that_a_url_is_no_run(command: str, url: str) -> None:
    words = [command, url, *(["--out", "x"] if command == "export" else [])]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, RecipeError) and "is not the output_dir of a run" in str(done.exception)
    assert "add --out DIR" in str(CliRunner().invoke(app, ["export", url]).exception)


def test_status_of_a_run_in_a_store(tmp_path: Path, url: str) -> None:
    plan = plan_for(tmp_path, url)
    with pytest.raises(Stopped), claim_run_dir(plan, "recipe", fresh=False):
        plan.rundir.metrics.write_text('{"event": "stop", "at": 1.0, "step": 2, "signal": "SIGTERM"}\n')
        RunStore(plan.rundir).push()
        found = json.loads(CliRunner().invoke(app, ["status", url, "--json"]).stdout)
        assert found["state"] == "running" and "or was lost there" in found["why"] and found["run_dir"] == url
        raise Stopped("stopped")
    assert json.loads(CliRunner().invoke(app, ["status", url, "--json"]).stdout)["state"] == "stopped"


def test_a_refused_copy_ends_a_long_list() -> None:
    begun, raised = [], []

    def copy(name: str) -> None:
        begun.append(name)
        if name == "0":
            raise StorageError("refused")
        time.sleep(0.02)

    def copy_all() -> None:
        with pytest.raises(StorageError) as error:
            runstore._all(copy, map(str, range(100)))
        raised.append(error.value)

    copying = threading.Thread(target=copy_all, daemon=True)
    copying.start()
    copying.join(30)
    assert raised and len(begun) < 100
