"""Whole runs with `output_dir` in an object store: what a bucket alone must be enough for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import FaultTable
from forks import Command
from support import environment, events, fsdptrain, processes_using, write_recipe

pytest.importorskip("s3fs", reason="needs pip install 'fsdptrain[dev]'")
pytest.importorskip("moto", reason="needs pip install 'fsdptrain[dev]'")

from object_store import BUCKET, EXPIRED, INTERNAL, Answer, ObjectStore, serve_here
from typer.testing import CliRunner

from fsdptrain.cli import app
from fsdptrain.config.paths import working_folder
from fsdptrain.folder.events import read_history
from fsdptrain.folder.rundir import RunDir
from fsdptrain.folder.runstore import RunStore
from fsdptrain.folder.storage import object_path
from fsdptrain.plan.network import unused_port


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    yield from serve_here()


def recipe_for(tmp: Path, name: str, output_dir: str, **more: Any) -> Path:
    """Write a recipe of two ranks and six steps that saves every two steps."""
    keys = {"checkpoint__every": 2, "checkpoint__keep": 1, "train__steps": 6, **more}
    return write_recipe(tmp, output_dir=output_dir, **keys).rename(tmp / f"{name}.yaml")


def working_in(cache: Path, url: str) -> Path:
    """Return the working folder of a run with this cache."""
    return cache / "runs" / working_folder(url).name


def objects_of(url: str) -> dict[str, bytes]:
    """Return the objects of a run by their names."""
    place = object_path(url)
    return {key.removeprefix(f"{place.key}/"): place.fs.cat_file(key) for key in place.fs.find(place.key)}


def losses(metrics: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and gradient norm of every step of a run, exactly as they were written."""
    return [(e["step"], e["loss"], e["grad_norm"]) for e in read_history(metrics) if e["event"] == "step"]


@pytest.mark.soak
def test_a_run_that_is_killed_goes_on_on_an_empty_machine_as_if_nothing_had_happened(
    tmp_path: Path, server: ObjectStore, fault_table: FaultTable
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/run"
    here, recipe = tmp_path / "undisturbed", recipe_for(tmp_path, "store", url)
    first, second = tmp_path / "first-cache", tmp_path / "second-cache"
    uploading = threading.Event()

    def stall_second_save(method: str, path: str) -> Answer | None:
        if method == "PUT" and "step-00000004/rank-00001" in path:
            uploading.set()
            time.sleep(20)
            return INTERNAL  # to nobody: else the object would appear in the middle of the next run
        return None

    command = [sys.executable, "-m", "fsdptrain", "run", str(recipe)]
    env = environment(FSDPTRAIN_CACHE=str(first))
    with server.failing(stall_second_save):
        process = Command(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert uploading.wait(300)
        for pid in (*processes_using(working_in(first, url)), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(first)
    assert "claim.json" in objects_of(url)
    done = fsdptrain("run", recipe, timeout=300, FSDPTRAIN_CACHE=str(second))
    assert done.returncode == 0, done.stderr
    assert "resumes after step 2" in done.stdout and f"the export is in {url}/export" in done.stdout
    done = fsdptrain("run", recipe_for(tmp_path, "folder", str(here)), timeout=300)
    assert done.returncode == 0, done.stderr
    done = fsdptrain("export", url, "--out", tmp_path / "export", FSDPTRAIN_CACHE=str(tmp_path / "third-cache"))
    assert done.returncode == 0, done.stderr
    stored = objects_of(url)
    assert (tmp_path / "export/model.safetensors").read_bytes() == stored["export/model.safetensors"]
    (tmp_path / "metrics.jsonl").write_bytes(stored["metrics.jsonl"])
    assert losses(tmp_path / "metrics.jsonl") == losses(here / "metrics.jsonl")
    assert [event["step"] for event in events(tmp_path, "resume")] == [2]
    exported = {path.name: path.read_bytes() for path in (here / "export").iterdir()}
    assert {name[7:]: content for name, content in stored.items() if name.startswith("export/")} == exported
    assert "claim.json" not in stored and "checkpoints/step-00000006/manifest.json" in stored
    assert {"plan.json", "recipe.yaml", "plans/0001.json", "plans/0002.json", "logs/rank-0.log"} <= stored.keys()
    fault_table.add("S3, all files there: killed in mid-upload, machine lost", 1, 1)


@pytest.mark.soak
def test_nodes_that_share_no_folder_train_one_run(tmp_path: Path, server: ObjectStore) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/run"
    recipe = recipe_for(tmp_path, "store", url, launch__nnodes=2, launch__nproc_per_node=1)
    port = unused_port()
    command = [sys.executable, "-m", "fsdptrain", "run", str(recipe), f"launch.rdzv_endpoint=127.0.0.1:{port}"]
    for steps in (2, 4):
        nodes = [
            Command(
                [*command, f"train.steps={steps}"], env=environment(FSDPTRAIN_CACHE=str(tmp_path / name)),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for name in ("a", "b")
        ]  # fmt: skip
        printed = [node.communicate(timeout=300)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    stored = objects_of(url)
    (tmp_path / "metrics.jsonl").write_bytes(stored["metrics.jsonl"])
    assert [step for step, *_ in losses(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert json.loads(stored["export.json"])["step"] == 4 and "claim.json" not in stored
    assert all(stored[f"logs/rank-{rank}.log"].count(b"the first row,") == 2 for rank in range(2))


def test_an_export_that_the_store_refuses_is_uploaded_by_the_next_start(
    tmp_path: Path, server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/run"
    recipe, cache = recipe_for(tmp_path, "store", url, train__steps=2), tmp_path / "cache"
    with server.times(-1, EXPIRED, "/export/"):
        done = fsdptrain("run", recipe, timeout=300, FSDPTRAIN_CACHE=str(cache))
    assert done.returncode == 6 and "which may have expired" in " ".join(done.stderr.split()), done.stderr
    assert "export.json" not in objects_of(url) and (working_in(cache, url) / "export/config.json").is_file()

    def printed(command: str, cache: Path, *words: object) -> str:
        monkeypatch.setenv("FSDPTRAIN_CACHE", str(cache))
        done = CliRunner().invoke(app, [command, *map(str, words)])
        assert done.exit_code == 0, done.exception
        return done.stdout

    assert json.loads(printed("status", cache, url, "--json"))["state"] == "failed"
    assert "nothing was trained" in printed("run", cache, recipe)
    assert json.loads(objects_of(url)["export.json"])["step"] == 2
    # From here on another machine asks, whose disk is empty.
    said = printed("run", tmp_path / "empty", recipe)
    assert f"{url} is finished" in said and f"the export is in {url}/export" in said
    found = json.loads(printed("verify", tmp_path / "empty", url, "--json"))
    assert found["good"] and found["resume"] == 2 and found["export"]["path"] == f"{url}/export"
    found = json.loads(printed("status", tmp_path / "empty", url, "--json"))
    assert found["state"] == "finished" and found["run_dir"] == url


def test_a_machine_that_was_frozen_while_another_took_over_uploads_nothing_and_says_who_goes_on(
    tmp_path: Path, server: ObjectStore
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/run"
    recipe, here, frozen = recipe_for(tmp_path, "store", url), tmp_path / "here", threading.Event()

    def processes() -> set[int]:
        return {*processes_using(working_in(here, url)), process.pid}

    def freeze_after_the_first_save(method: str, path: str) -> None:
        if method == "PUT" and path.startswith(f"/{BUCKET}/{tmp_path.name}/run/checkpoints/step-00000002/manifest"):
            for pid in processes():
                os.kill(pid, signal.SIGSTOP)
            frozen.set()

    command = [sys.executable, "-m", "fsdptrain", "run", str(recipe)]
    env = environment(FSDPTRAIN_CACHE=str(here))
    with server.failing(freeze_after_the_first_save, received=True):
        process = Command(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert frozen.wait(300)
    try:
        # Meanwhile another machine has taken over the run, published the next checkpoint, and uploads one more.
        there = RunDir(tmp_path / "there", url=url)
        there.root.mkdir()
        store = RunStore(there)
        place = store.root.fs, store.root.key
        place[0].pipe_file(f"{place[1]}/claim.json", json.dumps({"run": "other", "host": "far"}).encode())
        store.begin()
        for name in ("step-00000004/manifest.json", "step-00000004/rank-00000.safetensors", "step-00000006/rank-00000"):
            place[0].pipe_file(f"{place[1]}/checkpoints/{name}", b"of the other machine")
        while "checkpoints/step-00000002/manifest.json" not in objects_of(url):  # the server may be writing it yet
            time.sleep(0.05)
        before = objects_of(url)
    finally:
        for pid in processes():
            os.kill(pid, signal.SIGCONT)
    printed = " ".join(process.communicate(timeout=120)[0].split())
    assert process.returncode == 6, printed
    assert f"this run was taken over by {socket.gethostname()} (process {os.getpid()}), since 20" in printed
    assert f"what it has made since its last upload is in {working_in(here, url)} alone" in printed
    assert "move it away" not in printed and "Traceback" not in printed and not processes_using(working_in(here, url))
    assert objects_of(url) == before
    assert {e["step"] for e in events(working_in(here, url), "step")} >= {1, 2}
