"""A checkpoint is complete or absent, and nothing in one is used before it is checked."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from broken_saves import flip, load_alone, when_synced
from ranks import build, curve
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import Payload, events, fsdptrain, on_ranks, planned, run_folder, write_recipe
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptrain.checkpoint.export import export_checkpoint
from fsdptrain.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    checkpoint_problems,
    file_entry,
    newest_manifest,
    read_manifest,
    survey,
    with_checksum,
)
from fsdptrain.checkpoint.save import Checkpointer, Staging, write_shards
from fsdptrain.checkpoint.shards import CheckpointReader, Shard, shard_of, share_of_rank
from fsdptrain.errors import CheckpointError, FolderLost, OtherVersion, from_record, to_record
from fsdptrain.model.parts import Part
from fsdptrain.run_folder.ownership import file_stamps, write_export_record, write_mark
from fsdptrain.run_folder.records import MAX_BYTES
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import open_storage
from fsdptrain.terminal.screen import Screen
from fsdptrain.train import trainer

FAULTS = (
    "nothing", "taken_name", "taken_meanwhile", "disk_fills_up", "quota_is_used_up", "library_panics",
    "disk_is_full_already", "disk_flips_a_bit", "commit_fails", "again", "metrics_cannot_be_written", "newest_is_short",
    "once_more",
)  # fmt: skip
STEP = {name: f"step-{number:08}" for number, name in enumerate(FAULTS, 1)}
GIVEN_BACK = (STEP["taken_name"], STEP["taken_meanwhile"])  # empty folders that were there before the save


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return a folder with recipe and run, and what each rank observed of a series of saves, most with a fault."""
    tmp = tmp_path_factory.mktemp("saves")
    recipe = write_recipe(tmp, checkpoint__keep=2, train__global_batch_size=2, train__steps=len(FAULTS))
    run_folder(planned(recipe, ranks=2))
    return tmp, on_ranks(2, save_into_faults, tmp / "ranks", recipe=str(recipe), faults=list(FAULTS))


@pytest.fixture
def run(saves: Any, tmp_path: Path) -> RunDir:
    """Return a run folder with two good checkpoints, the second with its bit flipped back, and nothing else."""
    made, rundir = saves[0] / "run", RunDir(tmp_path / "run")
    shutil.copytree(made, rundir.root, ignore=shutil.ignore_patterns("checkpoints"))
    for name, source in ((STEP["newest_is_short"],) * 2, (STEP["once_more"], f"{STEP['once_more']}.damaged-2")):
        shutil.copytree(made / "checkpoints" / source, rundir.checkpoints / name)
    flip(rundir.checkpoint(rundir.checkpoint_steps()[1]) / "rank-00001.safetensors")
    return rundir


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("taken_name", f"rank 0: .*{STEP['taken_name']} exists already"),
        ("taken_meanwhile", f"rank 0: .*{STEP['taken_meanwhile']} exists already"),
        ("disk_fills_up", r"rank 1: no space: needs \d\S* .iB, has \d\S* .iB \(.*os error 28"),
        ("quota_is_used_up", r"rank 1: no space: needs \d\S* .iB, has \d\S* .iB \(.*quota"),
        ("library_panics", "rank 1: Panic: index out of bounds"),
        ("disk_is_full_already", r"rank 0: no space: needs \d\S* .iB, has 4\.9 KiB$"),
        ("disk_flips_a_bit", "rank 1: .*rank-00001.safetensors: the bytes read back are not those written"),
        ("commit_fails", "rank 0: .*Input/output error"),
    ],
)
def test_a_failed_save_raises_on_every_rank_and_leaves_nothing(fault: str, words: str, saves: Any) -> None:
    before = saves[1][0][FAULTS[FAULTS.index(fault) - 1]]["there"]
    for seen in (rank[fault] for rank in saves[1]):
        assert seen["error"][0] == "CheckpointError"
        assert re.search(words, seen["error"][1]), seen["error"][1]
        assert set(seen["there"]) - set(before) <= set(GIVEN_BACK) and STEP["nothing"] in seen["there"]
        assert all([*(saves[0] / "run" / "checkpoints" / name).iterdir()] == [] for name in GIVEN_BACK)
        assert not seen["reported"]


def test_a_save_into_a_folder_that_another_run_has_replaced_says_so_and_touches_nothing(tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path))
    plan.rundir.root.mkdir()
    write_mark(plan.rundir.root)
    world: Any = SimpleNamespace(rank=0, size=1, gather_objects=lambda value: [value])
    checkpointer = Checkpointer(plan.rundir, plan, world, {}, lambda *_, **__: None)
    shutil.move(plan.rundir.root, tmp_path / "before")
    plan.rundir.root.mkdir()  # of a run that saves the same step at this moment
    write_mark(plan.rundir.root)
    plan.rundir.storage.prepare(2)
    (plan.rundir.storage.staging(2) / "rank-00000.safetensors").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FolderLost, match=f"rank 0: output_dir: .*/run was renamed to {tmp_path}/before"):
        checkpointer._write(2, 0, {})
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_after_a_failed_one_succeeds_and_only_complete_checkpoints_count_as_kept(saves: Any) -> None:
    for rank, found in enumerate(saves[1]):
        seen, unreported = found["again"], found["metrics_cannot_be_written"]
        assert seen["error"] is None and seen["reported"] == (rank == 0)
        assert unreported["error"][0] == "CheckpointError" and "cannot report" in unreported["error"][1]
        # A run without space for its checkpoints is refused before anything is loaded.
        assert re.search(r"output_dir: no space: needs .*, has 4\.9 KiB", found["at the start"])
    after = {fault: [name for name in saves[1][0][fault]["there"] if name not in GIVEN_BACK] for fault in FAULTS}
    short, newest = STEP["metrics_cannot_be_written"], STEP["newest_is_short"]
    assert after["again"] == [STEP["nothing"], STEP["again"]]  # two are kept; the empty folders do not count
    assert after["metrics_cannot_be_written"] == [STEP["again"], short]
    assert after["newest_is_short"] == [STEP["again"], short, newest]
    assert after["once_more"] == [short, newest, STEP["once_more"]]


def test_a_resume_skips_a_damaged_checkpoint_even_if_its_new_name_is_taken(saves: Any) -> None:
    steps = [int(STEP[name][-8:]) for name in ("newest_is_short", "once_more")]
    names = {path.name for path in (saves[0] / "run" / "checkpoints").iterdir()}
    assert [seen["resumed"] for seen in saves[1]] == [steps[0]] * 2
    event = events(saves[0] / "run", "set_aside")[0]
    assert event["path"].endswith(f"{STEP['once_more']}.damaged-2")
    assert any("checksum differs" in problem for problem in event["problems"])
    assert {f"{STEP['once_more']}.damaged", f"{STEP['once_more']}.damaged-2"} <= names


@pytest.mark.parametrize("flips", [10, pytest.param(100, marks=pytest.mark.soak)])
def test_every_flipped_bit_is_named_and_refused(flips: int, run: RunDir) -> None:
    assert all(len(read_manifest(run.checkpoint(step)).files) == 2 for step in run.checkpoint_steps())
    draw, named = random.Random(flips), 0
    files = [path for step in run.checkpoint_steps() for path in sorted(run.checkpoint(step).iterdir())]
    for number in range(flips):
        path = files[number % len(files)]
        place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        flip(path, place, bit)
        problems = {Path(each["path"]): each["problems"] for each in survey(run)["checkpoints"]}
        found = any(path.name in problem for problem in problems.pop(path.parent))
        named += found and list(problems.values()) == [[]] and bool(refused(path.parent))
        flip(path, place, bit)
    assert named == flips and survey(run)["good"]


def test_a_manifest_that_was_edited_is_refused(run: RunDir) -> None:
    manifest = newest(run) / MANIFEST_NAME
    before = manifest.read_bytes()
    assert before.count(b'"skipped": 0') == 1
    manifest.write_bytes(before.replace(b'"skipped": 0', b'"skipped": 1'))
    assert "its checksum does not match" in refused(newest(run))[0]
    manifest.write_bytes(before)


def refused(folder: Path) -> list[str]:
    """Return what the loader finds wrong with a checkpoint before it opens it."""
    try:
        return checkpoint_problems(folder)
    except OtherVersion as error:
        return [str(error)]


def newest(run: RunDir) -> Path:
    return run.checkpoint(run.checkpoint_steps()[-1])


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and its checksum, as anyone can."""
    fields = json.loads((folder / MANIFEST_NAME).read_text())
    del fields["sha256"]
    change(fields)
    (folder / MANIFEST_NAME).write_bytes(with_checksum(json.dumps(fields, indent=2).removesuffix("\n}").encode()))


def rename_file(fields: dict[str, Any], name: str) -> None:
    fields["files"][name] = fields["files"].pop("rank-00001.safetensors")


def test_a_manifest_of_version_3_has_no_plan(run: RunDir) -> None:
    assert read_manifest(newest(run)).plan["recipe"] == json.loads(run.plan.read_text())["recipe"]

    def make_older(fields: dict[str, Any]) -> None:
        del fields["plan"]
        fields |= {"format": 3, "world_size": 2, "plan_digest": "0" * 64}

    reseal(newest(run), make_older)
    assert read_manifest(newest(run)).plan == {} and checkpoint_problems(newest(run)) == []


WRONG_FILE_NAMES = ("../rank-00001.safetensors", "/etc/passwd", "", "a\0b", "model.safetensors")
MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"file {name!r}": lambda fields, name=name: rename_file(fields, name) for name in WRONG_FILE_NAMES},
    "files a list": lambda fields: fields.update(files=["rank-00000.safetensors"]),
    "no files": lambda fields: fields.update(files={}),
    "entry a text": lambda fields: fields["files"].update({"rank-00001.safetensors": "x"}),
    "negative bytes": lambda fields: fields["files"]["rank-00001.safetensors"].update(bytes=-1),
    "sum a number": lambda fields: fields["files"]["rank-00001.safetensors"].update(sha256=7),
    "a negative step": lambda fields: fields.update(step=-1),
    "identity a list": lambda fields: fields.update(identity=["seed"]),
    "format a text": lambda fields: fields.update(format="2"),
    "no step": lambda fields: fields.pop("step"),
    "one more": lambda fields: fields.update(more=1),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_with_the_right_checksum_is_still_checked(
    change: Callable[[dict[str, Any]], object], run: RunDir
) -> None:
    reseal(newest(run), change)
    with pytest.raises(CheckpointError, match="is not a valid manifest"):
        read_manifest(newest(run))
    found = survey(run)
    assert not found["good"] and found["resume"] == run.checkpoint_steps()[0]


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"null", b"\xff\xfe", b"[" * 10**6, b'{"step": ' + b"9" * 10**4 + b"}", b"{}" + b" " * MAX_BYTES],
    ids=["empty", "list", "null", "not UTF-8", "deep", "long number", "huge"],
)
def test_a_manifest_of_garbage_is_a_checkpoint_error(text: bytes, run: RunDir) -> None:
    (newest(run) / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(newest(run))


def test_nothing_is_read_through_links_and_pipes(run: RunDir, tmp_path: Path) -> None:
    folder = newest(run)
    for name in (MANIFEST_NAME, "rank-00000.safetensors"):
        path, elsewhere = folder / name, tmp_path / name
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        assert any(name in fault and "not a regular file" in fault for fault in checkpoint_problems(folder))
        path.unlink()
        os.mkfifo(path)  # opening it would block for ever
        assert any(name in fault and "not a regular file" in fault for fault in checkpoint_problems(folder))
        path.unlink()
        elsewhere.rename(path)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert "is a link" in checkpoint_problems(folder)[0]


@pytest.mark.parametrize(
    "what", ["plan.json", "model", "model/config.json", "checkpoints", f"checkpoints/{STEP['again']}"]
)
def test_a_run_folder_with_links_out_of_it_is_refused(what: str, run: RunDir, tmp_path: Path) -> None:
    path = run.root / what
    path.rename(tmp_path / "elsewhere") if path.exists() else (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    for reading in (survey, newest_manifest, lambda run: export_checkpoint(run, None, run.export, None, Screen())):
        with pytest.raises(CheckpointError, match="leads out of the run folder"):
            reading(run)


def shards(run: RunDir) -> dict[str, Shard]:
    """Return empty shards for every tensor of a good checkpoint of the run."""
    with CheckpointReader(run.checkpoint(run.checkpoint_steps()[0])) as reader:
        return {name: Shard.of_rows(torch.empty(shape), 0, shape) for name, shape in reader.shapes.items()}


def forge(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change the tensors and the places in the first file of a checkpoint, and its checksums with it."""
    path = folder / "rank-00000.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as opened:
        places = json.loads(opened.metadata()["places"])
    change(tensors, places)
    save_file(tensors, path, metadata={"places": json.dumps(places)} if places else None)
    reseal(folder, lambda fields: fields["files"].update({path.name: file_entry(path)}))
    assert checkpoint_problems(folder) == []


def at(first: int, *shape: int, rows: int | None = None) -> list[Any]:
    """Return the place of some rows of a tensor, all by default."""
    counts = (shape[0] if rows is None else rows, *shape[1:]) if shape else ()
    return [[*shape], [[[0, 0 if n else first, count] for n, count in enumerate(counts)]]]


NORM, HEAD = "model.model.norm.weight", "model.lm_head.weight"
FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "no places": lambda tensors, places: places.clear(),
    "places of others": lambda tensors, places: places.pop(NORM),
    "a place too many": lambda tensors, places: places.update(more=at(0, 1)),
    "a place of nothing": lambda tensors, places: places.update({NORM: []}),
    "no box": lambda tensors, places: places[NORM].__setitem__(1, []),
    "a box twice": lambda tensors, places: places[NORM][1].append(places[NORM][1][0]),
    "a box of words": lambda tensors, places: places.update({NORM: [[64], [[["0", 0, 32]]]]}),
    "a place of words": lambda tensors, places: places.update({NORM: "0"}),
    "a negative place": lambda tensors, places: places.update({NORM: at(-1, 64, rows=32)}),
    "beyond the end": lambda tensors, places: places.update({HEAD: at(300, 512, 64, rows=256)}),
    "over another": lambda tensors, places: places.update({HEAD: at(1, 512, 64, rows=256)}),
    "other columns than another": lambda tensors, places: places.update(
        {HEAD: [[512, 64], [[[0, 0, 256], [0, 8, 64]]]]}
    ),
    "half of the rows twice": lambda tensors, places: tensors.update({HEAD: torch.ones(512, 64)}),
    "endless rows": lambda tensors, places: places.update({HEAD: at(0, 2**62, 64, rows=256)}),
    "other columns": lambda tensors, places: places.update({HEAD: at(0, 512, 65, rows=256)}),
    "more dimensions": lambda tensors, places: places.update({NORM: at(0, 64, 1, rows=32)}),
    "rows missing": lambda tensors, places: tensors.update({HEAD: tensors[HEAD][:-1].clone()}),
    "half in another dtype": lambda tensors, places: tensors.update({HEAD: tensors[HEAD].to(torch.bfloat16)}),
    "a scalar": lambda tensors, places: (tensors.update({NORM: torch.tensor(1.0)}), places.update({NORM: at(0)})),
    "a tensor of its own": lambda tensors, places: (tensors.update(x=torch.ones(2)), places.update(x=at(0, 2))),
    "a tensor less": lambda tensors, places: (tensors.pop(NORM), places.pop(NORM)),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_file_with_the_right_checksum_is_still_checked(change: Any, run: RunDir) -> None:
    wanted = shards(run)
    forge(newest(run), change)
    with pytest.raises(CheckpointError):
        load_alone(newest(run), wanted)


@pytest.mark.parametrize("name", [".metadata", "rng.pt", "rank-00000.safetensors"])
def test_a_pickle_in_a_checkpoint_is_never_opened(name: str, run: RunDir, tmp_path: Path) -> None:
    wanted, canary, folder = shards(run), tmp_path / "canary", newest(run)
    pickled = pickle.dumps(Payload(canary))
    (folder / name).write_bytes(pickled)
    if name in read_manifest(folder).files:  # in a shard's place, and with its checksum
        reseal(folder, lambda fields: fields["files"].update({name: file_entry(folder / name)}))
        with pytest.raises(CheckpointError, match="is not a checkpoint file"):
            load_alone(folder, wanted)
    else:
        load_alone(folder, wanted)
    survey(run)
    assert not canary.exists()
    pickle.loads(pickled)
    assert canary.exists()


DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.int64)


def different_tensors() -> dict[str, Shard]:
    """Return shards of several dtypes, some of which are not contiguous, empty or scalars."""
    tensors = {str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in DTYPES}
    tensors |= {"transposed": torch.arange(6.0).reshape(2, 3).T, "empty": torch.empty(0, 3), "a": torch.tensor(3.5)}
    return {name: shard_of(tensor) for name, tensor in tensors.items()}


def seal(folder: Path, written: tuple[str, dict[str, Any]] | None) -> None:
    """Write the manifest of a checkpoint of one file."""
    assert written
    (folder / MANIFEST_NAME).write_bytes(Manifest(FORMAT_VERSION, 1, {}, {}, dict([written])).sealed())


def test_tensors_of_any_dtype_and_shape_are_read_as_written(tmp_path: Path) -> None:
    folder, tensors = tmp_path / "step-00000001", different_tensors()
    folder.mkdir()
    seal(folder, write_shards(folder / "rank-00000.safetensors", tensors))
    made = {name: shard_of(torch.empty_like(shard.local).view(shard.shape)) for name, shard in tensors.items()}
    load_alone(folder, made)
    assert all(torch.equal(made[name].local, shard.local) for name, shard in tensors.items())


CHANGES: dict[str, Callable[[Path], object]] = {
    "a bit of the header": lambda path: flip(path, 20),
    "a bit of a tensor": lambda path: flip(path, -40),
    "the last bit": flip,
    "less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "more": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_reading_back_notices_every_change_and_the_checksum_shows_it_later(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    path = folder / "rank-00000.safetensors"
    assert write_shards(path, different_tensors()) == (path.name, file_entry(path))
    with when_synced(CHANGES[name]):
        with pytest.raises(CheckpointError, match="the bytes read back are not those written"):
            write_shards(path, different_tensors(), read_back=True)
        if name in ("less", "more"):  # another length is noticed without reading
            with pytest.raises(CheckpointError, match="the bytes read back are not those written"):
                write_shards(path, different_tensors(), read_back=False)
            return
        written = write_shards(path, different_tensors(), read_back=False)
    seal(folder, written)
    assert checkpoint_problems(folder) == [f"{path} is damaged: its checksum differs from the manifest's"]


def test_all_of_a_checkpoint_is_on_the_disk_before_its_name_is(tmp_path: Path) -> None:
    """After a power failure only what was synced is certain: files, then their names, then the checkpoint's name."""
    storage, synced = open_storage(None, tmp_path), list[tuple[str, bool]]()
    storage.prepare(3)
    scratch = storage.staging(3)
    with when_synced(lambda path: synced.append((str(path), storage.checkpoint(3).exists()))):
        for rank in range(2):
            write_shards(scratch / f"rank-{rank:05}.safetensors", different_tensors())
        storage.publish(3, b"{}")
    files = [f"{scratch}/{path.name}" for path in storage.checkpoint(3).iterdir()]
    assert len(files) == 3 and sorted(synced[:3]) == [(file, False) for file in sorted(files)]
    assert synced[3:] == [(str(scratch), False), (str(tmp_path), True)]


def test_a_checkpoint_of_another_version_is_refused_and_not_renamed(run: RunDir, saves: Any) -> None:
    write_mark(run.root)
    (newest(run) / MANIFEST_NAME).write_text(json.dumps({"format": FORMAT_VERSION + 1, "whatever": "it has"}))
    done = fsdptrain("run", saves[0] / "recipe.yaml", f"output_dir={run.root}")
    assert done.returncode == 6 and "written by another version of fsdptrain" in done.stderr
    assert "Traceback" not in done.stderr and newest(run).exists()
    with pytest.raises(OtherVersion) as refusal:
        export_checkpoint(run, None, run.export, None, Screen())
    assert type(from_record(to_record(refusal.value))) is OtherVersion
    found = survey(run)
    assert found["resume"] is None and not found["good"]


def test_only_a_folder_with_the_name_of_its_step_is_a_checkpoint(run: RunDir) -> None:
    for name in ("step-12", "step-000000012", "step-00000099.damaged", "step-0000009９"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "step-00000098").write_text("a file")
    assert [run.checkpoint(step).name for step in run.checkpoint_steps()][2:] == ["step-00000098"]
    assert "has no manifest.json: the checkpoint is not complete" in checkpoint_problems(run.checkpoint(98))[0]
    (run.checkpoints / "step-00000098").unlink()
    step = run.checkpoint_steps()[-1]
    newest(run).rename(run.checkpoint(step + 1))
    assert checkpoint_problems(newest(run)) == [f"{newest(run)} holds step {step}"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "model does not describe a model"),
        ({"model_type": "llama", "hidden_size": "many"}, "model does not describe a model"),
        ({"model_type": "no such"}, "model does not describe a model"),
        ({"num_hidden_layers": 4}, "which the model needs, is missing"),
    ],
)
def test_an_export_with_a_model_that_does_not_fit_is_a_checkpoint_error(config: Any, message: str, run: RunDir) -> None:
    path = run.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config) if config else "")
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(run, None, run.export, None, Screen())
    assert not [*run.root.glob("*export*")]


def test_verify_checks_everything_and_changes_nothing(run: RunDir) -> None:
    export_checkpoint(run, None, run.export, None, Screen())
    (run.checkpoints / "step-00000002.damaged").mkdir()
    (run.checkpoints / "step-00000099.tmp").mkdir()
    before = sorted(run.root.rglob("*"))
    done = fsdptrain("verify", run.root)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["good"] * 3 and lines[3].startswith("export")
    assert all(name in done.stdout for name in ("step-00000002.damaged", "step-00000099.tmp"))
    assert f"a resume continues from step {run.checkpoint_steps()[-1]}" in done.stdout
    flip(newest(run) / "rank-00000.safetensors", 5000)
    (run.export / "model.safetensors").write_bytes((run.export / "model.safetensors").read_bytes()[:-1])
    done = fsdptrain("verify", run.root, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 6 and not found["good"] and found["resume"] == run.checkpoint_steps()[0]
    assert "rank-00000.safetensors is damaged" in found["checkpoints"][1]["problems"][0]
    assert "model.safetensors has " in found["export"]["problems"][0]
    assert sorted(run.root.rglob("*")) == before


def test_verify_of_nothing(run: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(run.checkpoints)
    done = fsdptrain("verify", run.root)
    assert done.returncode == 6 and "no checkpoint to resume from" in done.stdout
    assert fsdptrain("verify", tmp_path / "nowhere").returncode == 2


WRONG_EXPORTS: dict[str, Callable[[Path], object]] = {
    "config.json is missing": lambda export: (export / "config.json").unlink(),
    "model.safetensors is missing": lambda export: (export / "model.safetensors").unlink(),
    "config.json has 1 bytes, not 2": lambda export: (export / "config.json").write_text("{"),
    "config.json is damaged": lambda export: (export / "config.json").write_text("[]"),
    "is not of this export, and from_pretrained may load it": lambda export: (
        export / "model.safetensors.index.json"
    ).touch(),
}


@pytest.mark.parametrize("words", WRONG_EXPORTS)
def test_verify_finds_what_is_wrong_with_an_export(words: str, run: RunDir) -> None:
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, run.export / "model.safetensors")
    files = file_stamps(run.export)
    write_export_record(run, 2, files, {name: file_entry(run.export / name)["sha256"] for name in files})
    assert survey(run)["good"]
    WRONG_EXPORTS[words](run.export)
    assert words in survey(run)["export"]["problems"][0] and not survey(run)["good"]


def test_copies_of_gpu_memory_are_pinned_as_one_piece_if_possible(capfd: pytest.CaptureFixture[str]) -> None:
    pinned: list[int] = []

    def refuse(memory: torch.Tensor) -> None:
        raise RuntimeError("out of memory to pin")

    with FakeTensorMode():
        on_gpu = torch.empty(65537, dtype=torch.uint8, device="cuda")
    tensors = {  # pinned one by one, they would take 2^17 and 2^18 bytes
        "a": on_gpu,
        "b": torch.empty(65537, 2, dtype=torch.bfloat16),
    }
    staging = Staging(tensors, pin=lambda memory: pinned.append(memory.nbytes))
    assert staging.pinned and pinned == [staging.memory.nbytes] and 3 * 65537 * 2 > pinned[0] >= 65537 * 5
    assert {name: (copy.shape, copy.dtype) for name, copy in staging.copies.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    }
    assert not Staging(tensors, pin=refuse).pinned and "out of memory to pin" in capfd.readouterr().out
    assert not Staging({"b": tensors["b"]}, pin=refuse).pinned and not capfd.readouterr().out


def test_what_is_being_written_does_not_change_with_the_next_step(tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path))
    world: Any = SimpleNamespace(rank=1, size=2, device=torch.device("cpu"))
    checkpointer, weights = Checkpointer(plan.rundir, plan, world, {}, lambda *_, **__: None), torch.ones(3)
    for wait, kept in ((True, 0.0), (False, 1.0)):  # no step is made while the run waits
        weights.fill_(1.0)
        staged = checkpointer._copy_to_host({"x": Shard.of_rows(weights, 0, (3,))}, wait)
        weights.zero_()
        assert staged["x"].local.tolist() == [kept] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_memory_of_gpu_tensors() -> None:
    tensor = torch.randn(1000, device="cuda")
    staging = Staging({"x": tensor})
    copy = staging.copy("x", tensor)
    torch.cuda.synchronize()
    assert staging.memory.is_pinned() and torch.equal(copy, tensor.cpu())
    staging.close()


@pytest.mark.parametrize("copies", [1, 2, 128])
def test_the_copies_of_a_model_share_what_they_write(copies: int) -> None:
    # Each copy has two shards; a buffer is on every rank.
    holders = [tuple(range(first, 2 * copies, 2)) for first in (0, 1)]
    shares: list[dict[str, Shard]] = []
    for rank in range(2 * copies):
        rows = {f"layers.{n}.weight": Shard.of_rows(torch.zeros(10 + n % 7, 4), 0, (64, 4)) for n in range(640)}
        shards = {name: replace(shard, holders=holders[rank % 2]) for name, shard in rows.items()}
        shards["buffer"] = replace(Shard.of_rows(torch.zeros(8), 0, (8,)), holders=tuple(range(2 * copies)))
        shares.append(share_of_rank(shards, rank))
    for first in (0, 1):
        written = [name for share in shares[first::2] for name in share if name != "buffer"]
        assert sorted(written) == sorted(f"layers.{n}.weight" for n in range(640))
    assert sum("buffer" in share for share in shares) == 1
    sizes = [sum(shard.local.nbytes for shard in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 16 * 4 * 4  # at most one tensor more


def layout(shape: tuple[int, ...], draw: random.Random) -> list[Shard]:
    """Divide a tensor of numbers in their order among ranks as a random layout does; return what each rank has."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    count, shards = draw.choice([1, 2, 4]), draw.randint(1, 5)
    dim, packed = draw.randint(-len(shape), -1), draw.choice([1, 2])
    found = []
    for number in range(count):
        part = Part.of(shape, dim, number, count, count, packed)
        own = part.take(whole)
        rows = -(-len(own) // shards)
        found += [
            Shard.of_rows(own[n * rows : (n + 1) * rows], n * rows, shape, part)
            for n in range(shards)
            if n * rows < len(own)
        ]
    return found


def test_what_any_layout_has_written_any_other_reads(tmp_path: Path) -> None:
    draw = random.Random(3)
    for number, shape in enumerate([(16, 8), (8, 16, 24), (8,), (24, 8, 8)] * 6):
        folder, files = tmp_path / str(number), {}
        folder.mkdir()
        for rank, shard in enumerate(layout(shape, draw)):
            path = folder / f"rank-{rank:05d}.safetensors"
            files |= dict(filter(None, [write_shards(path, {"x": shard}, False)]))
        with CheckpointReader(folder, sorted(files)) as reader:
            for wanted in layout(shape, draw):
                made = replace(wanted, local=torch.full_like(wanted.local, torch.nan))
                reader.fill("x", made)
                assert torch.equal(made.local, wanted.local), (shape, wanted.boxes)


# --- on every rank -------------------------------------------------------------------------------------------------


def save_into_faults(recipe: str, faults: list[str]) -> dict[str, Any]:
    """Save at steps 1, 2, …, each time with another fault of tests/broken_saves.py.

    Returns for each fault what was raised, what is in the folder then, and whether the save was reported. `at the
    start` is what a full disk raises before the first step, `resumed` the step that a resume takes up at the end.
    """
    import broken_saves as injected

    found: dict[str, Any] = {}
    # The full disk must be refused before any state is loaded, so `load_state` is not callable.
    with injected.disk_is_full_already(), patch.object(trainer, "load_state", None):
        try:
            build(recipe, [])
        except CheckpointError as refused:
            found["at the start"] = str(refused)
    run = build(recipe, [])
    curve(run, 1)
    reports: list[int] = []
    run.checkpointer.write_event = lambda _, **fields: reports.append(fields["step"])
    folder = run.checkpointer.rundir.checkpoints
    for step, name in enumerate(faults, 1):
        error = None
        with getattr(injected, name)(run.checkpointer, step):
            try:
                run.checkpointer.save(step, run.engine.model, run.engine.optimizer, wait=step % 2 == 0)
                run.checkpointer.wait()
            except BaseException as raised:
                error = [type(raised).__name__, str(raised)]
        dist.barrier(run.world.side)
        found[name] = {"error": error, "there": sorted(p.name for p in folder.iterdir()), "reported": step in reports}
        dist.barrier(run.world.side)
    with injected.newest_is_damaged(run.checkpointer), injected.disk_is_full_already():
        found["resumed"] = build(recipe, []).engine.steps_made  # past its last step: no more room is needed
    return found
