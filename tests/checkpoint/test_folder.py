"""The run folder: no file of the user is lost, and a run that is refused changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import pytest
from forks import Command
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support import NOBODY, as_nobody, environment, fsdptrain, make_searchable, plan_here, sample, write_recipe

from fsdptrain.checkpoint.manifest import FORMAT_VERSION, Manifest, file_entry, read_manifest, survey
from fsdptrain.checkpoint.resume import changes_since, inspect_earlier_attempts
from fsdptrain.cli import _show_finished
from fsdptrain.data.sources import data_files
from fsdptrain.errors import CheckpointError, OtherVersion, RecipeError
from fsdptrain.launch.run_lock import (
    DATA_LIKE_FILES,
    check_inputs,
    check_run_dir,
    claim_run_dir,
    is_inside,
    lock_for_export,
    would_include,
)
from fsdptrain.plan.plan import PLAN_DIGEST, read_plan
from fsdptrain.report.run_banner import heading
from fsdptrain.report.status import Observer
from fsdptrain.run_folder.events import Reporter
from fsdptrain.run_folder.ownership import (
    asset_names,
    file_stamps,
    install_assets,
    make_scratch,
    marked_run,
    output_lock,
    parents_made,
    read_export_record,
    remove_scratch,
    replace_export,
    write_export_record,
    write_mark,
)
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import MANIFEST_NAME, remove_checkpoint


def claim(recipe: Path, *overrides: str, fresh: bool = False, **env: str) -> contextlib.AbstractContextManager[Any]:
    return claim_run_dir(plan_here(recipe, *overrides, **env), recipe.read_text(), fresh)


def refused(words: str, recipe: Path, *overrides: str, fresh: bool = False, **env: str) -> None:
    """Assert that a run is refused with words that match a pattern, and that no file near the recipe is changed."""
    before = contents(recipe.parent)
    with pytest.raises((RecipeError, CheckpointError), match=words), claim(recipe, *overrides, fresh=fresh, **env):
        pass
    assert contents(recipe.parent) == before


def contents(root: Path) -> dict[str, bytes | None]:
    """Return every path below a folder with its content (None if it is not a file), without locks."""
    found = (path for path in root.rglob("*") if not path.name.startswith("lock"))
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in found}


def fill(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"my {name}")


# --- folders without a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["plan.json"], "plan.json"),
        (["checkpoints/step-00000001/a", "export/b", "model/c", "logs/d"], "checkpoints/, export/, logs/, and 1 more"),
        ([".fsdptrain/cache"], ".fsdptrain/"),
    ],
)
def test_a_folder_with_other_files_is_refused_and_not_changed(names: list[str], message: str, tmp_path: Path) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "run"
    fill(root, *names)
    for fresh in (False, True):
        words = f"output_dir: {root} holds files that fsdptrain did not write ({message})"
        refused(re.escape(words), recipe, fresh=fresh)


@pytest.mark.parametrize(
    ("output_dir", "message"),
    [
        ("/", "is the root or home folder"),
        ("~/.", "is the root or home folder"),
        ("{tmp}/file", "is a file"),
        ("{tmp}/file/run", "Not a directory"),
        ("{tmp}/link", "is a broken link"),
        ("~nobody-here/x", "there is no user 'nobody-here'"),
    ],
)
def test_an_unusable_output_dir_is_refused(
    output_dir: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused(f"output_dir.*{message}", write_recipe(tmp_path), f"output_dir={output_dir.format(tmp=tmp_path)}")


def test_a_link_to_an_empty_folder_is_that_folder(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with claim(recipe):
        assert (tmp_path / "disk" / ".fsdptrain").is_file() and (tmp_path / "disk" / "plan.json").is_file()


def test_a_link_that_leads_out_of_a_run_folder_is_not_written_through(tmp_path: Path) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "run"
    with claim(recipe):
        pass
    fill(tmp_path, "precious")
    for part in ("recipe.yaml", "metrics.jsonl", "logs/rank-0.log", "export.json", "tensorboard", "plans/0002.json"):
        (root / part).unlink(missing_ok=True)
        (root / part).symlink_to(tmp_path / "precious")
        refused("leads out of the run folder", recipe)
        (root / part).unlink()


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.id={run}/export", "model.id"),
        ("model.tokenizer={run}/model", "model.tokenizer"),
        ("data.path={run}/*.jsonl", "data.path"),
        ("data.eval={{path: {run}/text.jsonl}}", "data.eval"),
    ],
)
def test_inputs_inside_the_run_folder_are_refused(override: str, key: str, tmp_path: Path) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "run"
    with claim(recipe):
        pass
    fill(root, "export/config.json", "model/config.json", "text.jsonl")
    more = ["model.config={}"] if key == "model.id" else []
    words = rf"{key}: .* is inside output_dir \({root}\), which this run writes"
    refused(words, recipe, override.format(run=root), *more)


PARTS = st.sampled_from(["*", "**", "a", "run", "*.jsonl", "*.json", "r?n", "metrics.jsonl", "logs", "[ab]"])


@given(parts=st.lists(PARTS, min_size=0, max_size=4), root=st.sampled_from(["run", "a/run", "a/b/run"]))
def test_data_that_would_include_files_of_the_run_is_recognised_beforehand(
    parts: list[str], root: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp = tmp_path_factory.mktemp("glob")
    pattern = str(Path(tmp, *parts))
    predicted = is_inside(pattern, str(tmp / root)) or would_include(pattern, str(tmp / root), DATA_LIKE_FILES)
    (tmp / "a" / "b").mkdir(parents=True)
    fill(tmp / root, *DATA_LIKE_FILES)
    read = any(path.resolve().is_relative_to(tmp / root) for path in data_files(pattern))
    shutil.rmtree(tmp)
    if not any(part == "run" for part in parts):  # `run` exists now, so the pattern means another thing
        assert predicted or not read
        assert predicted == read or "**" in parts


def test_a_data_folder_around_the_run_folder_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    for path in (tmp_path, tmp_path / "**" / "*.jsonl", tmp_path / "*"):
        words = r"data\.path: .* would include files that this run writes to output_dir"
        refused(words, recipe, f"data.path={path}")
    fill(tmp_path, "ru/text.jsonl")  # the folder's name begins like that of the run folder
    check_inputs(plan := plan_here(recipe, f"data.path={tmp_path}/ru/**/*.jsonl"), plan.rundir)
    with claim(recipe, f"data.path={tmp_path}/*.jsonl"):
        assert (tmp_path / "run" / "plan.json").exists()


# --- one run at a time -----------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "run"
    with claim(recipe):
        assert (root / "recipe.yaml").read_text() == recipe.read_text()
        for overrides in ([], ["optim.lr=1"]):
            refused(f"output_dir: another run is using {root}", recipe, *overrides)
        with pytest.raises(RecipeError, match=r"is using .* use --out DIR"), lock_for_export(RunDir(root)):
            pass
    with claim(recipe, "optim.lr=1"):
        assert read_plan(root / "plan.json").recipe.optim.lr == 1


@pytest.mark.parametrize(("fresh", "message"), [(True, "is not empty"), (False, "model.config.* was .* in the run")])
def test_a_folder_that_another_run_used_before_the_lock_is_refused(
    fresh: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run starts, saves and ends after this one has looked, and before it locks."""
    recipe, root, lock = write_recipe(tmp_path), tmp_path / "run", fcntl.flock
    other = plan_here(recipe, "model.config.num_hidden_layers=2")

    def late(descriptor: int, operation: int) -> None:
        if not other.rundir.plan.exists():
            other.rundir.plan.write_text(other.to_json())
            checkpoint = other.rundir.checkpoint(1)
            checkpoint.mkdir(parents=True)
            files = {"rank-00000.safetensors": {"bytes": 1, "sha256": "0" * 64}}
            manifest = Manifest(FORMAT_VERSION, 1, json.loads(other.to_json()), other.identity(), files)
            (checkpoint / MANIFEST_NAME).write_bytes(manifest.sealed())
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(RecipeError, match=message), claim(recipe, fresh=fresh):
        pass
    assert read_plan(root / "plan.json").digest() == other.digest()


def test_every_attempt_keeps_its_plan_and_a_recipe_that_was_edited_is_kept(tmp_path: Path) -> None:
    recipe, root = write_recipe(tmp_path), tmp_path / "run"
    for lr in (1, 2):
        with claim_run_dir(plan_here(recipe, f"optim.lr={lr}"), f"a: {lr}\n", False):
            assert (root / "recipe.yaml").read_text() == f"a: {lr}\n"
    assert not list(root.glob("*.kept*"))
    for name in ("recipe.yaml.kept", "recipe.yaml.kept-2"):
        (root / "recipe.yaml").write_text(f"edited: {name}\n")
        with claim_run_dir(plan_here(recipe), "a: 3\n", False):
            assert (root / "recipe.yaml").read_text() == "a: 3\n"
            assert (root / name).read_text() == f"edited: {name}\n"
    kept = {path.name: read_plan(path).recipe.optim.lr for path in (root / "plans").glob("*.json")}
    assert kept == {"0001.json": 1, "0002.json": 2, "0003.json": 3e-4, "0004.json": 3e-4}
    refused("is not empty", recipe, fresh=True)


def test_what_was_edited_in_the_model_folder_is_kept_and_not_exported(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def write(*names: str, text: str = "generated") -> None:
        fill(tmp_path / "scratch", *names)
        for name in names:
            (tmp_path / "scratch" / name).write_text(text)
        install_assets(tmp_path / "scratch", folder)
        shutil.rmtree(tmp_path / "scratch")

    fill(folder, "notes.md")
    write("config.json", "code/x.py")
    for path in (folder / "config.json", folder / "code" / "x.py"):
        os.utime(path, ns=(1, 1))  # as after a copy: other times, the same content
    write("config.json", "code/x.py")
    write("config.json", "code/x.py", text="generated for a new recipe")
    assert not list(folder.rglob("*.kept*"))
    (folder / "config.json").write_text("edited")
    write("config.json", "notes.md")
    assert (folder / "config.json.kept").read_text() == "edited" and (folder / "config.json").read_text() == "generated"
    assert (folder / "notes.md.kept").read_text() == "my notes.md"
    assert asset_names(folder) == ["config.json", "notes.md"]


@pytest.mark.parametrize("words", [["train.steps=3"], ["data.seq_len=32"], ["checkpoint.resume=never"], ["--fresh"]])
def test_a_refused_run_writes_nothing_not_even_a_lock(words: list[str], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    rundir = run_folder_after(recipe, steps=6, total=6)
    shutil.rmtree(rundir.logs)
    before = sorted((path, path.lstat().st_mtime_ns) for path in [rundir.root, *rundir.root.rglob("*")])
    overrides = [word for word in words if word != "--fresh"]
    refused(".", recipe, *overrides, fresh="--fresh" in words)
    if overrides:
        with pytest.raises(RecipeError):
            check_run_dir(plan_here(recipe, *overrides), fresh="checkpoint.resume=never" in words)
    assert sorted((path, path.lstat().st_mtime_ns) for path in [rundir.root, *rundir.root.rglob("*")]) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("part", ["logs", "logs/rank-0.log", "metrics.jsonl", "checkpoints", ".fsdptrain"])
def test_a_run_of_another_user_is_refused_before_it_trains(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", functools.partial(os.access, effective_ids=True))  # those of `as_nobody`
    make_searchable(tmp_path)
    recipe = write_recipe(tmp_path, train__steps=6)
    rundir, plan = run_folder_after(recipe, steps=3, total=6), plan_here(recipe)
    fill(rundir.root, "logs/rank-0.log")
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.chown(rundir.root / part, 0, 0)
    words = f"output_dir: {rundir.root / part} cannot be written by this user"
    with as_nobody(), pytest.raises(RecipeError, match=words), claim_run_dir(plan, "", False):
        pass
    assert len(list(rundir.plans.glob("*.json"))) == 1
    os.chown(rundir.root / part, NOBODY, NOBODY)
    with as_nobody(), claim_run_dir(plan, "", False):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_above_an_export_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    make_searchable(tmp_path)
    for out in (tmp_path / "out", tmp_path / "new" / "out"):
        words = f"cannot write {out}: {tmp_path}.*: Permission denied; name another"
        with as_nobody(), pytest.raises(RecipeError, match=words), parents_made(out), output_lock(out):
            pass
    assert list(tmp_path.iterdir()) == []


# --- other ranks and other nodes -------------------------------------------------------------------------------------

JOINED = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}


def test_under_torchrun_the_first_rank_writes_and_the_others_wait_for_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, root = write_recipe(tmp_path, launch__timeout_s=2), tmp_path / "run"
    monkeypatch.setenv("RANK", "1")
    words = rf"waited 2 s .* but on {gethostname()}: there is none; .* if ls {root} shows"
    refused(words, recipe, RANK="1", **JOINED)
    RunDir(root).logs.mkdir(parents=True)
    write_mark(root)
    RunDir(root).plan.write_text(plan_here(recipe, "seed=1", "launch.timeout_s=2").to_json())  # of an earlier run here
    words = r"matches this recipe, .*: seed: 1 → 42; start all nodes with the same command"
    refused(words, recipe, RANK="1", **JOINED)
    shutil.rmtree(root)
    entered = threading.Event()

    def wait() -> None:
        with claim(recipe, "launch.timeout_s=60", RANK="1", **JOINED):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.5)
    monkeypatch.setenv("RANK", "0")
    with claim(recipe, "launch.timeout_s=60", RANK="0", **JOINED):
        assert entered.wait(30)
        thread.join()
        monkeypatch.setenv("RANK", "1")
        refused(r"matches this recipe, .*optim\.lr: 0\.0003 → 0\.1", recipe, "optim.lr=0.1", RANK="1", **JOINED)


def test_one_of_several_nodes_writes_and_the_others_join_only_with_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, launch={"nnodes": 2, "nproc_per_node": 2, "rdzv_endpoint": "a:1", "timeout_s": 2})

    def on(name: str) -> None:
        monkeypatch.setattr("socket.gethostname", lambda: name)

    on("a")
    with claim(recipe):
        on("b")
        with claim(recipe):
            refused("on this machine", recipe)
            # A node with the same name is known by its boot, a container by its namespace.
            for what in ("BOOT_ID", "PID_NAMESPACE"):
                (tmp_path / what).write_text("another-boot-or-container")
                with monkeypatch.context() as patch:
                    patch.setattr(f"fsdptrain.launch.run_lock.{what}", tmp_path / what)
                    with claim(recipe):
                        pass
        refused(r"matches this recipe, .*: optim\.lr: 0\.0003 → 0\.1", recipe, "optim.lr=0.1")
        on("c")
        refused("another run is using", recipe, "launch.nnodes=1", "launch.rdzv_endpoint=null")


def test_agent_and_worker_refuse_a_plan_that_is_not_the_launchers(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    path, digest = tmp_path / "run" / "plan.json", plan_here(recipe).digest()
    with claim(recipe, "optim.lr=1"):
        pass
    env, record = environment(**{PLAN_DIGEST: digest}), tmp_path / "error.json"
    words = [sys.executable, "-m", "fsdptrain.launch.agent", str(path), "1", "train"]  # it answers on its output
    agent = Command(words, env=env, stdout=subprocess.PIPE)
    failure = json.loads(agent.communicate()[0])
    env |= {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(record)}
    worker = Command([sys.executable, "-m", "fsdptrain.train.worker", str(path)], env=env)
    assert (agent.returncode, worker.wait()) == (1, RecipeError.exit_code)
    for message in (failure["record"], json.loads(record.read_text())["message"]["extraInfo"]):
        assert message["type"] == "RecipeError"
        assert "is not the plan that this run was started with" in message["message"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- what earlier attempts did ---------------------------------------------------------------------------------------


def run_folder_after(
    recipe: Path, *overrides: str, steps: int, total: int, sequences: int = 40, export: bool = True
) -> RunDir:
    """Write a run folder as after `steps` of `total` steps: plan, events, a checkpoint, and an export at the end."""
    plan = plan_here(recipe, *overrides)
    rundir = plan.rundir
    with claim_run_dir(plan, "", False):
        pass
    with contextlib.closing(Reporter(rundir)) as reporter:
        reporter.event("start", **sample("start", blocks=sequences, total_steps=total))
        for step in range(1, steps + 1):
            reporter.event("step", **sample("step", step=step))
    folder = rundir.checkpoint(steps)
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(b"weights")
    files = {"rank-00000.safetensors": file_entry(folder / "rank-00000.safetensors")}
    manifest = Manifest(FORMAT_VERSION, steps, json.loads(plan.to_json()), plan.identity(), files)
    (folder / MANIFEST_NAME).write_bytes(manifest.sealed())
    if steps == total and export:
        fill(rundir.export, "config.json")
        write_export_record(rundir, steps, file_stamps(rundir.export), {})
    return rundir


def rewrite_identity(rundir: RunDir, step: int, **changes: Any) -> None:
    """Rewrite the manifest of a checkpoint with changes to its identity; None removes a key."""
    folder = rundir.checkpoint(step)
    manifest = read_manifest(folder)
    identity = {key: value for key, value in (manifest.identity | changes).items() if value is not None}
    (folder / MANIFEST_NAME).write_bytes(dataclasses.replace(manifest, identity=identity).sealed())


def test_a_run_of_another_version_continues_unless_its_batches_are_others(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    rundir = run_folder_after(recipe, steps=3, total=6)
    rewrite_identity(rundir, 3, **{"data.separator": None})  # a key that the version lacked had its default
    assert inspect_earlier_attempts(rundir, plan_here(recipe)).step == 3
    words = r"data\.separator: was '' in the run to resume, is '\+' now"
    refused(words, recipe, "data.format=prompt_completion", "data.separator=+")
    rewrite_identity(rundir, 3, layout=5)
    with pytest.raises(OtherVersion, match="layout 5"):
        inspect_earlier_attempts(rundir, plan_here(recipe))


NO_EFFECT = ["log.every=3", "launch.max_restarts=1", "checkpoint.keep=3", "name=other", "launch.nproc_per_node=1"]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["optim.lr=1e-5", "log.every=2", "schedule.name=constant"],
         ["optim.lr: 0.0003 → 1e-05", "schedule.name: cosine → constant"]),
        (["train.steps=null", "train.epochs=0.5"], ["train.epochs: 1.0 → 0.5", "train.steps: 6 → None"]),
        (["export.dtype=float16"], ["export.dtype: float32 → float16"]),
        *((words, None) for words in ([], NO_EFFECT, ["train.steps=null", "train.epochs=1.2"])),
    ],
)  # fmt: skip
def test_a_finished_run_is_not_changed_and_a_changed_recipe_is_refused_with_what_differs(
    overrides: list[str], lines: list[str] | None, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    before = contents(run_folder_after(recipe, steps=6, total=6).root)
    if lines is None:
        with claim(recipe, *overrides) as found:
            assert (found.step, found.finished) == (6, True)
        assert contents(tmp_path / "run") == before
        return
    changed = r"\n".join(rf" *{re.escape(line)}" for line in lines)
    refused(rf"is finished \(6 steps\): nothing was trained.*\n{changed}\nchoose another `name`", recipe, *overrides)


def test_changes_are_relative_to_what_was_trained(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    rundir = run_folder_after(recipe, steps=6, total=6)
    with claim(recipe, "train.steps=9", "optim.lr=1e-5") as found:  # a longer run that ended before its first step
        assert (found.step, found.finished) == (6, False)
    assert changes_since(rundir, 6, plan_here(recipe, "train.steps=9", "optim.lr=1e-5"), {}) == {
        "optim.lr": [0.0003, 1e-5], "train.steps": [6, 9],
    }  # fmt: skip
    assert inspect_earlier_attempts(rundir, plan_here(recipe)).finished
    refused(r"optim\.lr: 0\.0003 → 1e-05", recipe, "optim.lr=1e-5")


def test_a_finished_run_without_its_export_or_last_evaluation_continues(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    rundir = run_folder_after(recipe, steps=6, total=6)
    shutil.rmtree(rundir.export)
    left = inspect_earlier_attempts(rundir, plan_here(recipe))
    assert not left.finished and "6/6 steps" in heading(plan_here(recipe), rundir, left)
    assert inspect_earlier_attempts(rundir, plan_here(recipe, "export.at_end=false")).finished
    fill(rundir.export, "config.json")
    for step, finished in ((4, False), (6, True)):  # of an earlier step, and of the last
        write_export_record(rundir, step, file_stamps(rundir.export), {})
        assert inspect_earlier_attempts(rundir, plan_here(recipe)).finished == finished
    for damage in (lambda path: path.write_text("{}"), Path.unlink):
        damage(rundir.export / "config.json")
        left = inspect_earlier_attempts(rundir, plan_here(recipe))
        assert not left.finished and "export is not complete" in heading(plan_here(recipe), rundir, left)
    shutil.rmtree(rundir.root)
    evaluated = write_recipe(tmp_path, train__steps=6, data__eval={"fraction": 0.1})
    rundir = run_folder_after(evaluated, steps=6, total=6)
    assert not inspect_earlier_attempts(rundir, plan_here(evaluated)).finished
    with contextlib.closing(Reporter(rundir)) as reporter:
        reporter.event("eval", **sample("eval", step=6))
    assert inspect_earlier_attempts(rundir, plan_here(evaluated)).finished


def test_a_run_that_ended_early_is_finished_until_the_recipe_has_more_patience(tmp_path: Path) -> None:
    changes = {"checkpoint__keep_best": 1, "data__eval": {"fraction": 0.1}, "eval__every": 2}
    recipe = write_recipe(tmp_path, train__steps=9, eval__patience=2, **changes)
    rundir = run_folder_after(recipe, steps=6, total=9)
    assert not inspect_earlier_attempts(rundir, plan_here(recipe)).trained
    with contextlib.closing(Reporter(rundir)) as reporter:
        for step, loss in ((2, 1.0), (4, 2.0), (6, 1.5), (8, 0.5)):  # of step 8 there is no checkpoint
            reporter.event("eval", **sample("eval", step=step, loss=loss))
    left = inspect_earlier_attempts(rundir, plan_here(recipe))
    assert (left.step, left.trained, left.finished) == (6, True, False), "there is no export"
    fill(rundir.export, "config.json")
    write_export_record(rundir, 6, file_stamps(rundir.export), {})
    for words in ([], ["eval.patience=1"], ["checkpoint.keep_best=2"]):
        assert inspect_earlier_attempts(rundir, plan_here(recipe, *words)).finished
    refused(r"more eval\.patience.* continue this one", recipe, "export.which=best")
    for word in ("eval.patience=3", "eval.patience=null"):
        assert not inspect_earlier_attempts(rundir, plan_here(recipe, word, "optim.lr=1e-5")).trained


def test_a_bad_record_of_an_export_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    rundir = run_folder_after(recipe, steps=6, total=6)
    rundir.export_record.write_text('{"step": 6, "files": {"config.json": [1]}}')
    fault = "export.json: not the record of an export; it counts as none"
    earlier = inspect_earlier_attempts(rundir, plan_here(recipe))
    assert (earlier.finished, earlier.faults) == (True, (fault,)) and Observer(rundir).status()["skipped"] == [fault]
    _show_finished(plan_here(recipe), earlier)
    assert f"note: {fault}\n" in capsys.readouterr().out
    (rundir.export / "config.json").write_text("{}")
    save_file({"w": np.zeros(1)}, rundir.export / "model.safetensors")
    assert survey(rundir)["export"]["problems"] == [f"{fault}, so contents were not compared"]


@pytest.mark.parametrize("overrides", [[], ["export.at_end=false"], ["train.steps=9"]])
def test_a_finished_run_without_its_checkpoints_is_not_trained_again(overrides: list[str], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    rundir = run_folder_after(recipe, steps=6, total=6)
    shutil.rmtree(rundir.checkpoints)
    refused(r"holds a finished run \(6 steps\), but its checkpoints are gone", recipe, *overrides)
    rundir.metrics.unlink()
    refused(r"holds an export \(6 steps\), but its checkpoints are gone", recipe, *overrides)
    (rundir.checkpoints / "step-00000004.damaged").mkdir(parents=True)
    refused(r"its checkpoints are damaged \(step-00000004\.damaged in", recipe, *overrides)
    shutil.rmtree(rundir.root)
    shutil.rmtree(run_folder_after(recipe, steps=4, total=6).checkpoints)  # a run that ended early
    with claim(recipe, *overrides) as found:
        assert (found.step, found.finished) == (0, False)


@pytest.mark.parametrize("steps", [2, 4])
def test_fewer_steps_than_were_made_are_refused(steps: int, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6)
    run_folder_after(recipe, steps=4, total=6)
    words = f"4 of 6 steps are trained already, and the recipe asks for {steps}"
    refused(words, recipe, f"train.steps={steps}")
    with claim(recipe, "train.steps=5") as found:
        assert (found.step, found.finished) == (4, False)


# --- checkpoint.path --------------------------------------------------------------------------------------------------


def test_only_the_checkpoints_of_the_own_run_are_continued_also_after_it_was_renamed(tmp_path: Path) -> None:
    recipe, place = write_recipe(tmp_path, train__steps=6), tmp_path / "checkpoints"
    run_folder_after(recipe, f"checkpoint.path={place}", steps=3, total=6)
    words = [f"checkpoint.path={place}", f"output_dir={tmp_path}/new"]
    shutil.copytree(tmp_path / "run", tmp_path / "new")  # a copy has none
    message = rf"checkpoint\.path: {place} holds the checkpoints of the run in {tmp_path}/run; choose another"
    refused(message, recipe, *words)
    with pytest.raises(RecipeError, match=message):
        check_run_dir(plan_here(recipe, *words), fresh=False)
    with claim(recipe, words[0]) as found:  # its own
        assert found.step == 3 and marked_run(place) == str(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with claim(recipe, *words) as found:
        assert found.step == 3 and marked_run(place) == str(tmp_path / "new")
    (place / ".fsdptrain").unlink()
    refused(f"{place} holds the checkpoints of another run; choose", recipe, words[0], f"output_dir={tmp_path}/other")
    shutil.copytree(place, tmp_path / "copied")
    with claim(recipe, words[1], f"checkpoint.path={tmp_path}/copied") as found:
        assert found.step == 3


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/", "is the root or home folder"),
        ("{tmp}/text.jsonl", "is a file"),
        ("{tmp}/m", "holds files that fsdptrain did not write"),
        ("{tmp}/empty", "is inside checkpoint.path"),
        ("{tmp}/run", "is inside output_dir"),
        ("{tmp}/run/export", "is inside output_dir"),
        ("{tmp}/data/x", "would include files that this run writes to checkpoint.path"),
        ("{tmp}/b", "which another run writes"),
        ("{tmp}/b/export", "which another run writes"),
    ],
)
def test_an_unusable_checkpoint_path_is_refused(place: str, message: str, tmp_path: Path) -> None:
    recipe, place = write_recipe(tmp_path), place.format(tmp=tmp_path)
    fill(tmp_path, "m/config.json", "data/a.jsonl")
    (tmp_path / "empty").mkdir()
    with claim(recipe, f"output_dir={tmp_path}/b"):
        pass
    words = [f"data.path={tmp_path}/data", f"checkpoint.path={place}"]
    words += [f"model.id={tmp_path}/empty", "model.config={}"] if place.endswith("empty") else []
    refused(message, recipe, *words)


# --- removal and replacement -----------------------------------------------------------------------------------------


def checkpoint(folder: Path) -> Path:
    fill(folder, "rank-00000.safetensors", "rank-00001.safetensors", "manifest.json", ".tmpAbC123")
    return folder


def test_only_fsdptrains_files_of_a_checkpoint_are_removed(tmp_path: Path) -> None:
    remove_checkpoint(checkpoint(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []
    for kept in ("b.kept", "b.kept-2"):
        fill(checkpoint(tmp_path / "b"), "notes.md", "plots/loss.png")
        remove_checkpoint(tmp_path / "b")
        assert contents(tmp_path / kept).keys() == {"notes.md", "plots", "plots/loss.png"}
    fill(tmp_path, "elsewhere/manifest.json")
    (tmp_path / "c").symlink_to(tmp_path / "elsewhere")
    remove_checkpoint(tmp_path / "c")
    assert (tmp_path / "elsewhere" / "manifest.json").exists() and not (tmp_path / "c").exists()


def test_only_leftovers_of_a_save_are_removed(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    for name in ("step-00000002.tmp", "step-00000001.old", "step-00000003", "step-00000004.damaged"):
        checkpoint(rundir.checkpoints / name)
    fill(rundir.checkpoints, "notes.tmp", "mine.old/x", "step-00000005.tmp/mine")
    rundir.storage.remove_leftovers()
    there = {"step-00000003", "step-00000004.damaged", "notes.tmp", "mine.old", "step-00000005.tmp.kept"}
    assert {path.name for path in rundir.checkpoints.iterdir()} == there
    assert (rundir.checkpoints / "mine.old" / "x").exists()


def export(rundir: RunDir, step: int, *names: str) -> Path | None:
    """Write an export whose files contain their step."""
    scratch = make_scratch(rundir.export)
    fill(scratch, *names)
    for name in names:
        (scratch / name).write_text(f"step {step}")
    files = file_stamps(scratch)
    kept = replace_export(scratch, rundir.export, read_export_record(rundir).files)
    write_export_record(rundir, step, files, {})
    return kept


def test_an_export_replaces_only_its_own_files(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    assert export(rundir, 1, "config.json", "a.safetensors", "b.safetensors", "templates/x") is None
    fill(rundir.export, "notes.md", "samples/1.txt")
    assert export(rundir, 2, "config.json", "model.safetensors") is None
    assert contents(rundir.export) == {
        "config.json": b"step 2", "model.safetensors": b"step 2", "notes.md": b"my notes.md", "samples": None,
        "samples/1.txt": b"my samples/1.txt",
    }  # fmt: skip
    (rundir.export / "config.json").write_text("step 2, and more of mine")
    fill(rundir.export, "README.md")
    kept = export(rundir, 3, "config.json", "model.safetensors", "README.md")
    assert kept == tmp_path / "export.kept"
    assert contents(kept) == {"config.json": b"step 2, and more of mine", "README.md": b"my README.md"}
    assert (rundir.export / "config.json").read_text() == "step 3" and (rundir.export / "notes.md").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"export", "export.json", "export.kept"}


def test_an_export_without_a_record_is_kept_whole(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    for change in (lambda: rundir.export_record.unlink(missing_ok=True), lambda: rundir.export_record.write_text("[")):
        shutil.rmtree(rundir.export, ignore_errors=True)
        fill(rundir.export, "config.json", "model.safetensors")
        change()
        kept = export(rundir, 2, "config.json")
        assert kept is not None and contents(kept).keys() == {"config.json", "model.safetensors"}
        assert contents(rundir.export) == {"config.json": b"step 2"}


@pytest.mark.parametrize("how", ["copied", "never recorded"])
def test_older_weights_are_never_in_a_new_export(how: str, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    first = ["config.json", "chat_template.jinja", "model.safetensors"]
    export(rundir, 1, *first)
    if how == "copied":  # as by an object store or `cp -r`: other times
        for path in rundir.export.iterdir():
            os.utime(path, ns=(1, 1))
    else:  # the process ended between the export and its record
        write_export_record(rundir, 0, {"config.json": [1, 1]}, {})
        (rundir.export / "chat_template.jinja").unlink()
    fill(rundir.export, "notes.md")
    new = {"config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    kept = export(rundir, 2, *new)
    assert contents(rundir.export).keys() == {*new, "notes.md"}
    assert kept is not None and contents(kept)["model.safetensors"] == b"step 1"
    export(rundir, 3, *first)
    assert contents(rundir.export).keys() == {*first, "notes.md"}


def test_an_export_record_cannot_delete_files_outside_the_export(tmp_path: Path) -> None:
    rundir, outside = RunDir(tmp_path / "run"), tmp_path / "outside"
    fill(outside, "precious")
    fill(rundir.export, "config.json")
    (rundir.export / "sub").symlink_to(outside)
    stamp = next(iter(file_stamps(outside).values()))
    names = ["../../outside/precious", str(outside / "precious"), "sub/precious"]
    write_export_record(rundir, 1, dict.fromkeys(names, stamp), {})
    export(rundir, 2, "config.json")
    assert (outside / "precious").exists()


def test_only_marked_leftovers_of_an_export_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, ".export.writing/mine", ".export.writing-2/mine", "export.writing/mine")
    left = make_scratch(tmp_path / "export")
    fill(left, "model.safetensors")
    assert list(make_scratch(tmp_path / "export").iterdir()) != [] and not left.exists()
    assert all((tmp_path / name / "mine").exists() for name in (".export.writing", ".export.writing-2"))


def test_the_next_export_removes_what_an_export_killed_at_any_moment_left(tmp_path: Path) -> None:
    def write_and_remove(moment: int) -> None:
        moments = itertools.count(1)

        def die(event: str, _: object) -> None:
            if event in ("open", "os.mkdir", "os.remove", "os.rmdir") and next(moments) == moment:
                os._exit(1)

        sys.addaudithook(die)
        scratch = make_scratch(tmp_path / "export")
        fill(scratch, "config.json", "adapter/config.json")
        remove_scratch(scratch)

    code, moment = 1, 0
    while code:
        moment += 1
        if not (child := os.fork()):
            write_and_remove(moment)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1)
        scratch = make_scratch(tmp_path / "export")
        assert [*tmp_path.iterdir()] == [scratch], f"killed before change {moment}"
        remove_scratch(scratch)
    assert moment > 8


# --- paths -----------------------------------------------------------------------------------------------------------


def test_tilde_is_expanded_on_the_command_line(tmp_path: Path) -> None:
    write_recipe(tmp_path, train__steps=6)
    run_folder_after(tmp_path / "recipe.yaml", steps=6, total=6)
    done = fsdptrain("run", "~/recipe.yaml", "output_dir=~/run", HOME=str(tmp_path))
    assert done.returncode == 0 and "is finished (6 steps): nothing was trained" in done.stdout, done.stderr
    assert f'folder = "{tmp_path}/run/export"' in done.stdout
    assert fsdptrain("recipes", "copy", "shakespeare", "~/new/", HOME=str(tmp_path)).returncode == 0
    assert (tmp_path / "new").is_dir()
    for words in (["export", "~/run", "--out", "$X"], ["run", "$X.yaml"]):
        done = fsdptrain(*words, HOME=str(tmp_path))
        assert done.returncode == 2 and "variables such as $HOME are not expanded" in done.stderr
    for out, message in {"~/run/checkpoints/x": "which the run itself writes", "~/recipe.yaml": "is a file"}.items():
        done = fsdptrain("export", "~/run", "--out", out, HOME=str(tmp_path))
        assert done.returncode == 2 and message in done.stderr


def test_tilde_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = write_recipe(tmp_path)
    (tmp_path / "m").mkdir()
    words = ["output_dir=~/x/y", "data.path=~/text.jsonl", "data.eval={path: ~/text.jsonl}", "model.tokenizer=~/m"]
    plan = plan_here(recipe, *words, "model.id=~/m", "model.config={}")
    assert plan.run_dir == str(tmp_path / "x" / "y")
    assert plan.data_path == plan.eval_path == str(tmp_path / "text.jsonl")
    assert plan.recipe.model.id == plan.recipe.model.tokenizer == str(tmp_path / "m")
    assert plan.recipe.data.path == "~/text.jsonl"  # unchanged, because earlier runs are identified by it
