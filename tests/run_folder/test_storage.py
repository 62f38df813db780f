"""Checkpoints in a folder and in an object store: one exists or it does not, whatever the store answers."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Command
from support import environment, events, fsdptrain, planned, processes_using, send_all, write_recipe

pytest.importorskip("s3fs", reason="needs pip install '.[dev]'")
pytest.importorskip("moto", reason="needs pip install '.[dev]'")

from broken_saves import load_alone, save, shards_of_rank, write
from object_store import BUCKET, EXPIRED, FORBIDDEN, INTERNAL, REFUSALS, SLOW_DOWN, Answer, ObjectStore, serve_here
from safetensors.torch import save_file
from typer.testing import CliRunner

from fsdptrain.checkpoint import shards as shards_module
from fsdptrain.checkpoint.manifest import FORMAT_VERSION, Manifest, checkpoint_problems, complete_steps, survey
from fsdptrain.checkpoint.resume import inspect_earlier_attempts
from fsdptrain.checkpoint.save import remove_old_checkpoints
from fsdptrain.checkpoint.shards import CheckpointReader, find_pieces, load_checkpoint, open_tensors
from fsdptrain.cli import app
from fsdptrain.config.reader import load
from fsdptrain.errors import CheckpointError, RecipeError, StorageError
from fsdptrain.launch.run_lock import claim_run_dir
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder import storage as storage_module
from fsdptrain.run_folder.ownership import marked_run
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import MANIFEST_NAME, ObjectPath, checkpoint_name


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    yield from serve_here()


@pytest.fixture(params=["folder", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path, server: ObjectStore) -> RunDir:
    """Return an empty run folder with its checkpoints in a folder, or in the object store."""
    place = f"s3://{BUCKET}/{tmp_path.name}/run" if request.param == "s3" else str(tmp_path / "elsewhere")
    return RunDir(tmp_path / "run", place)


@pytest.fixture
def remote(tmp_path: Path, server: ObjectStore) -> RunDir:
    return RunDir(tmp_path / "run", f"s3://{BUCKET}/{tmp_path.name}/run")


def test_a_checkpoint_exists_when_its_manifest_is_there(run: RunDir) -> None:
    storage = run.storage
    assert storage.steps() == []
    storage.remove_leftovers()
    files = write(storage, 3)
    assert storage.steps() == [] and storage.other_names()[0] == []
    storage.publish(3, Manifest(FORMAT_VERSION, 3, {}, {}, files).sealed())
    assert storage.steps() == complete_steps(run) == [3] and checkpoint_problems(storage.checkpoint(3)) == []
    with (storage.checkpoint(3) / MANIFEST_NAME).open("rb") as manifest:
        size = sum(entry["bytes"] for entry in files.values()) + len(manifest.read())
    assert storage.size_of(3) == (size, 3)
    with pytest.raises(CheckpointError, match="exists already and is not overwritten"):
        storage.prepare(3)


def test_an_interrupted_save_is_removed_and_others_files_stay(run: RunDir) -> None:
    storage = run.storage
    storage.remove_leftovers()
    save(storage, 1)
    write(storage, 2)
    assert RunDir(run.root, run.checkpoint_path).storage.other_names()[1]
    RunDir(run.root, run.checkpoint_path).storage.remove_leftovers()  # the next start
    assert storage.other_names() == ([], []) and storage.steps() == [1]
    write(storage, 2)
    storage.discard(2)
    assert storage.other_names() == ([], []) and checkpoint_problems(storage.checkpoint(1)) == []


def test_old_checkpoints_are_removed_and_damaged_ones_are_set_aside(run: RunDir) -> None:
    storage = run.storage
    for step in (1, 2, 3):
        save(storage, step)
    remove_old_checkpoints(run, 3, keep=1, keep_best=1, losses={1: nan, 2: 2.0, 3: 3.0, 9: 1.0})
    assert storage.steps() == [2, 3]
    first, second = storage.set_aside(3), (save(storage, 3), storage.set_aside(3))[1]
    assert (first.rpartition("/")[2], second.rpartition("/")[2]) == ("step-00000003.damaged", "step-00000003.damaged-2")
    assert storage.steps() == [2]
    assert storage.other_names() == (["step-00000003.damaged", "step-00000003.damaged-2"], [])
    found = survey(run)
    assert found["good"] and found["resume"] == 2 and found["set_aside"] == storage.other_names()[0]


def test_what_an_interrupted_removal_leaves_in_a_store_is_no_checkpoint(remote: RunDir, server: ObjectStore) -> None:
    save(remote.storage, 1)
    removed = []

    def only_one(method: str, path: str) -> Answer | None:  # then the store refuses, as if the process were killed
        if method == "DELETE":
            removed.append(path)
        return FORBIDDEN if len(removed) > 1 else None

    with server.failing(only_one), pytest.raises(StorageError):
        remote.storage.remove(1)
    assert len(removed) > 1 and remote.storage.steps() == []


def test_any_number_of_ranks_reads_its_rows(run: RunDir) -> None:
    save(run.storage, 1)
    for rank, world in ((0, 1), (1, 2), (3, 4)):  # the last reads from the middle of a file
        wanted = shards_of_rank(rank, world)
        made = {name: replace(s, local=torch.empty_like(s.local)) for name, s in wanted.items()}
        load_alone(run.checkpoint(1), made)
        assert all(torch.equal(made[name].local, wanted[name].local) for name in wanted)


def test_ranks_share_the_headers_and_open_only_files_with_their_rows(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, opened, folder = 4, list[str](), run.checkpoint(1)
    files = sorted(write(run.storage, 1, world=world))
    run.storage.publish(1, b"")  # no manifest: one rank has read it for all
    monkeypatch.setattr(shards_module, "open_tensors", lambda path: opened.append(path.name) or open_tensors(path))
    wanted = [shards_of_rank(rank, world) for rank in range(world)]
    found = [find_pieces(folder, files, wanted[rank], slice(rank, None, world)) for rank in range(world)]
    pieces = np.concatenate(found)
    assert len(opened) == world
    for shards in wanted:
        made = {name: replace(s, local=torch.empty_like(s.local)) for name, s in shards.items()}
        load_checkpoint(folder, files, made, pieces)
        assert all(torch.equal(made[name].local, shards[name].local) for name in shards)
    assert len(opened) == 2 * world
    with pytest.raises(CheckpointError, match=r"the model needs \[0:8, 0:3, 0:5\], the files hold \[2:4, 0:3, 0:5\], "):
        load_checkpoint(folder, files, shards_of_rank(0, 1), pieces[pieces[:, 1] > 0])
    with pytest.raises(CheckpointError, match="which the model needs, is missing"):
        load_checkpoint(folder, files, wanted[0], pieces[pieces[:, 1] > 0])


def test_only_the_rows_asked_for_are_read(remote: RunDir, server: ObjectStore, tmp_path: Path) -> None:
    tensors = {"big": torch.randn(1000, 64), "empty": torch.empty(0, 3), "half": torch.randn(4, 6).half()}
    save_file(tensors, tmp_path / "rank-00000.safetensors", {"k": "v"})
    stored = remote.storage.deliver(1, tmp_path / "rank-00000.safetensors")
    with open_tensors(stored) as opened:
        assert set(opened.keys()) == set(tensors) and opened.metadata() == {"k": "v"}
        for name, tensor in tensors.items():
            rows = opened.get_slice(name)
            assert rows.get_shape() == list(tensor.shape)
            for first, last in ((0, len(tensor)), (1, 3), (2, 2), (0, 0)):
                assert torch.equal(rows[first:last], tensor[first:last]) and rows[first:last].dtype == tensor.dtype
        server.requests.clear()
        opened.get_slice("big")[10:20]
        assert len(server.requests) == 1


def test_a_flipped_bit_in_a_store_is_named(remote: RunDir) -> None:
    save(remote.storage, 1)
    save(remote.storage, 2)
    path = remote.checkpoint(2) / "rank-00001.safetensors"
    *good, last = path.read(0, path.stat().st_size)
    path.fs.pipe_file(path.key, bytes([*good, last ^ 1]))
    assert checkpoint_problems(path.parent) == [f"{path} is damaged: its checksum differs from the manifest's"]
    assert survey(remote)["resume"] == 1
    path.fs.rm_file(path.key)
    assert checkpoint_problems(path.parent) == [f"{path} is missing"]


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8 + b"{}", b"\x20" + b"\0" * 7 + b"{}"])
def test_a_file_that_is_not_of_safetensors_is_a_checkpoint_error(content: bytes, remote: RunDir) -> None:
    save(remote.storage, 1)
    path = remote.checkpoint(1) / "rank-00001.safetensors"
    path.fs.pipe_file(path.key, content)
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is not a checkpoint file"):
        CheckpointReader(path.parent)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"connect_timeout": 1, "read_timeout": 0.5, "retries": {"total_max_attempts": 2, "mode": "standard"}}
    monkeypatch.setitem(storage_module.OPTIONS, "s3", {"config_kwargs": options})


READING: dict[str, Callable[[RunDir], Any]] = {
    "listing": lambda run: run.storage.steps(),
    "verifying": lambda run: checkpoint_problems(run.checkpoint(1)),
    "loading": lambda run: load_alone(run.checkpoint(1), shards_of_rank(0)),
    "saving": lambda run: save(run.storage, 2),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.usefixtures("impatient")
def test_a_store_that_refuses_is_an_error_and_no_checkpoint_is_called_damaged(
    name: str, remote: RunDir, server: ObjectStore
) -> None:
    answer, words = REFUSALS[name]
    save(remote.storage, 1)
    for action in READING.values():
        with server.times(-1, answer), pytest.raises(StorageError, match=words):
            action(remote)
        assert len(server.requests) <= 12
    assert remote.storage.steps() == [1] and checkpoint_problems(remote.checkpoint(1)) == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", [INTERNAL, SLOW_DOWN], ids=["500", "503"])
def test_one_refusal_is_tried_again_and_a_slow_answer_is_waited_for(
    answer: Any, remote: RunDir, server: ObjectStore
) -> None:
    with server.times(1, answer, "PUT"):
        save(remote.storage, 1)
    with server.times(1, answer, "GET"):
        assert remote.storage.steps() == [1]
    with server.slow(0.2):  # each answer; 0.5 s are none
        assert checkpoint_problems(remote.checkpoint(1)) == []
    with server.slow(1.2), pytest.raises(StorageError, match="the store does not answer"):
        remote.storage.steps()
    assert len(server.requests) <= 10


def test_a_bucket_that_does_not_exist_is_reported_at_the_start(tmp_path: Path, server: ObjectStore) -> None:
    run = RunDir(tmp_path, "s3://no-such-bucket/run")
    with pytest.raises(StorageError, match=r"no such bucket: create it, or correct the URL"):
        run.storage.remove_leftovers()


def test_the_newest_of_two_places_is_continued(tmp_path: Path) -> None:
    earlier, other = (planned(write_recipe(tmp_path), *words) for words in ([], [f"checkpoint.path={tmp_path}/other"]))
    for step, folder in ((2, earlier.rundir.checkpoints), (1, tmp_path / "other")):
        (folder / checkpoint_name(step)).mkdir(parents=True)
    earlier.rundir.plan.write_text(earlier.to_json())
    with pytest.raises(RecipeError, match=r"up to step 2, and those in .*other end at step 1"):
        inspect_earlier_attempts(other.rundir, earlier)


def test_the_checkpoints_of_another_run_in_a_store_are_not_continued(tmp_path: Path, server: ObjectStore) -> None:
    place = f"s3://{BUCKET}/{tmp_path.name}/run"

    def claim(output_dir: str = "a", lr: float = 3e-4, seed: int = 0) -> contextlib.AbstractContextManager[Any]:
        return claim_run_dir(plan(output_dir, lr, seed), "", fresh=False)

    def plan(output_dir: str, lr: float, seed: int = 0) -> Plan:
        keys = {"checkpoint__path": place, "output_dir": str(tmp_path / output_dir), "optim__lr": lr, "seed": seed}
        return planned(write_recipe(tmp_path, **keys), ranks=2)

    refused = f"checkpoint.path: {place} holds the checkpoints of "
    with claim() as found:
        assert found.step == 0
    first = plan("a", 3e-4)
    store, storage = first.rundir.checkpoint_place, first.rundir.storage
    assert isinstance(store, ObjectPath) and marked_run(store) == str(tmp_path / "a")
    storage.remove_leftovers()
    save(storage, 2, plan=first)
    before = store.names()
    assert before == [".fsdptrain", "step-00000002/"] and storage.steps() == [2]
    with pytest.raises(RecipeError, match=f"{refused}the run in {tmp_path}/a; choose another"), claim("b", 1e-3):
        pass
    with claim(lr=1e-3) as found:  # its own, with a change that it can name
        assert found.step == 2
    shutil.rmtree(tmp_path / "a")  # another machine
    with pytest.raises(RecipeError, match=f"{refused}the run in {tmp_path}/a on another machine, "), claim(seed=7):
        pass
    assert not (tmp_path / "b").exists() and not (tmp_path / "a").exists() and store.names() == before
    with claim(lr=1e-3) as found:
        assert found.step == 2


def test_an_url_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"output_dir: .* is not a folder"):
        load(write_recipe(tmp_path, output_dir="s3://bucket/runs"))
    (tmp_path / "plan.json").write_text("{}")
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--out", "s3://bucket/run"])
    assert isinstance(done.exception, RecipeError) and "'s3://bucket/run' is not a path: " in str(done.exception)


@pytest.mark.soak
def test_a_run_in_an_object_store_survives_its_refusals_and_a_kill_in_mid_upload(
    tmp_path: Path, server: ObjectStore
) -> None:
    place, uploading = f"s3://{BUCKET}/{tmp_path.name}/run", threading.Event()
    recipe = write_recipe(
        tmp_path, checkpoint__keep=1, checkpoint__path=place, export__at_end=False, train__steps=6,
        schedule={"name": "constant", "warmup": 0},
    )  # fmt: skip
    run = RunDir(tmp_path / "run", place)
    for answer, requests, words in (
        (FORBIDDEN, "PUT", "access is refused: check the credentials"),  # the right to read, but not to write
        (EXPIRED, "rank-", "which may have expired"),  # during the first save
    ):
        with server.times(-1, answer, requests):
            done = fsdptrain("run", recipe, timeout=300)
        assert done.returncode == 6 and words in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
        assert bool(events(run.root, "step")) == (answer is EXPIRED) and run.checkpoint_steps() == []

    def stall_second_save(method: str, path: str) -> Answer | None:
        if method == "PUT" and "step-00000004/rank-00001" in path:
            uploading.set()
            time.sleep(20)
            return INTERNAL  # to nobody: else the object would appear in the middle of the next run
        return None

    command = [sys.executable, "-m", "fsdptrain", "run", str(recipe)]
    with server.failing(stall_second_save):
        process = Command(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert uploading.wait(300)
        send_all(signal.SIGKILL, (*processes_using(run.root), process.pid))
        process.wait()
    assert run.checkpoint_steps() == [2] and checkpoint_problems(run.checkpoint(2)) == []
    done = fsdptrain("run", recipe, timeout=300)
    assert done.returncode == 0, done.stderr
    assert events(run.root, "resume")[-1]["step"] == 2
    assert RunDir.open(run.root).checkpoint_path == place
    assert run.checkpoint_steps() == [6] and run.storage.other_names() == ([], [])
    assert not list(run.root.rglob("rank-*.safetensors"))  # nothing stays on the disk
    done = fsdptrain("verify", run.root, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["resume"] == 6, done.stderr
    done = fsdptrain("export", run.root)
    assert done.returncode == 0, done.stderr
