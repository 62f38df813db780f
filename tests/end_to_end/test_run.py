"""The command as a user meets it: real torchrun workers, real files, the screen, the exit codes."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from injection import Running, valid_steps
from reference import documents_of, plain_loss, stream_of
from safetensors.torch import load_file
from support import (
    ROOT,
    TESTS,
    TINY,
    events,
    fsdptrain,
    processes_using,
    python,
    send_all,
    wait_for_step,
    wait_until,
    write_recipe,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdptrain.run_folder.records import EVENTS, Tail

STEPS = 6
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    tmp = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(
        tmp, train__steps=STEPS, data__eval={"fraction": 0.2}, eval__every=3, checkpoint__keep=2,
        log__trackers=["tensorboard"], log__profile={"steps": [2, 3]},
        eval__prompts=["First Citizen:"], eval__max_new_tokens=4,
    )  # fmt: skip
    return tmp, fsdptrain("run", recipe)


@pytest.mark.smoke
def test_a_run_finishes_and_shows_how_to_load_the_model(finished: Any) -> None:
    tmp, done = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'\nfolder = "{tmp}/run/export"\n' in done.stdout
    assert f"\nlonger  fsdptrain run {tmp}/recipe.yaml train.steps=12\n" in done.stdout
    assert f"\ncurves  tensorboard --logdir {tmp}/run/tensorboard\n" in done.stdout
    assert "\nranks  2 × cpu, FULL_SHARD\n" in done.stdout and f"step {STEPS}/{STEPS}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_run_folder_has_the_documented_files(finished: Any) -> None:
    run = finished[0] / "run"
    assert (run / "recipe.yaml").read_text() == (finished[0] / "recipe.yaml").read_text()
    names = {"recipe.yaml", "plan.json", "metrics.jsonl", "tensorboard", "logs", "checkpoints", "export", "model"}
    names |= {"profiles", "trackers"}
    assert {path.name for path in run.iterdir()} == names | {".fsdptrain", "plans", "export.json"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000004", "step-00000006"}
    assert all((run / "logs" / f"rank-{rank}.log").exists() for rank in range(2))
    assert json.loads((run / "plan.json").read_text())["accumulation"] == 4


def test_the_steps_of_log_profile_are_in_a_trace_of_each_rank(finished: Any) -> None:
    tmp, done = finished
    assert f"\nprofile {tmp}/run/profiles (traces for ui.perfetto.dev, " in done.stdout
    traces = sorted(path.name for path in (tmp / "run" / "profiles").iterdir())
    assert traces == [f"rank-{rank}-steps-2-3.json.gz" for rank in range(2)]
    with gzip.open(tmp / "run" / "profiles" / "rank-1-steps-2-3.json.gz") as file:
        names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
    assert names["Optimizer.step#AdamW.step"] == 2, "only these steps are recorded"
    assert names["gloo:all_to_all"] and names["aten::mm"], "collectives and operators are in it"


def test_metrics_have_the_documented_fields(finished: Any) -> None:
    found = events(finished[0] / "run")
    assert [event["event"] for event in found][:1] == ["start"] and found[-1]["event"] == "export"
    steps = events(finished[0] / "run", "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert all({"epoch", "tokens", "tokens_per_s", "data_s", "samples"} <= event.keys() for event in steps)
    ranks = [event["peak_memory_by_rank"] for event in steps if "peak_memory_by_rank" in event]
    assert "peak_memory_by_rank" in steps[0] and max(ranks[-1]) == steps[-1]["peak_memory_bytes"]
    assert all(len(found) == 2 for found in ranks)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [event["step"] for event in events(finished[0] / "run", "eval")] == [0, 3, 6]


def test_what_a_run_writes_is_in_the_table_of_events(finished: Any) -> None:
    for name in ("metrics.jsonl", "logs/progress.jsonl"):
        tail = Tail(finished[0] / "run" / name, from_end=False)
        for record in tail.read():
            event = EVENTS[record["event"]]
            assert record.keys() - {"event", "at"} <= event.fields.keys() | event.optional.keys()
        assert tail.offset and not tail.faults


@pytest.mark.smoke
def test_evaluation_is_the_plain_mean_over_all_held_out_tokens(finished: Any) -> None:
    _, held_out, corpus = stream_of(finished[0] / "recipe.yaml")
    documents = documents_of(corpus, held_out)
    loss = plain_loss(str(finished[0] / "run" / "export"), documents)
    last = events(finished[0] / "run", "eval")[-1]
    assert last["loss"] == pytest.approx(loss, rel=1e-5)
    assert last["tokens"] == int((documents[2] != -100).sum())


def test_eval_opens_the_export_and_the_checkpoint_of_the_same_step(finished: Any) -> None:
    tmp, losses = finished[0], []
    for step in ([], ["--step", str(STEPS)], ["--step", "4"]):
        done = fsdptrain("eval", tmp / "run", "--data", tmp / "text.jsonl", "--json", *step)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout)["files"][0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) != losses[2]


@pytest.mark.smoke
def test_plain_transformers_opens_the_export(finished: Any) -> None:
    folder = finished[0] / "run" / "export"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("First Citizen:", return_tensors="pt").input_ids
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, name) == getattr(model.config, name) == getattr(model.generation_config, name)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)
    assert model.config.dtype == torch.float32
    assert tokenizer.chat_template is None  # the model has seen no conversation


def test_a_longer_run_resumes_and_shows_what_was_changed(finished: Any, tmp_path: Path) -> None:
    recipe, run = finished[0] / "recipe.yaml", tmp_path / "run"
    shutil.copytree(finished[0] / "run", run)
    mine = ["notes.md", "export/notes.md", "model/notes.md", "checkpoints/notes.tmp", "checkpoints/step-00000004/notes"]
    for name in mine:
        (run / name).write_text("mine")
    done = fsdptrain("run", recipe, f"output_dir={run}", "train.steps=8", "optim.lr=1e-4")
    assert done.returncode == 0, done.stderr
    changed = {"train.steps": [6, 8], "optim.lr": [0.0003, 0.0001], "output_dir": [str(finished[0] / "run"), str(run)]}
    (resume,) = events(run, "resume")
    assert (resume["step"], resume["changed"]) == (STEPS, changed)
    [profiled, note] = sorted(resume["notes"])
    assert "log.profile" in profiled and "the schedule has 8 steps now and had 6: the learning rate goes from" in note
    lines = ["resumed after step 6", *(f"  {key}: {old} → {new}" for key, (old, new) in changed.items()), f"  {note}"]
    assert all(line in done.stdout.splitlines() for line in lines)
    assert [event["step"] for event in events(run, "step")] == list(range(1, 9))
    assert {path.name for path in (run / "plans").iterdir()} == {"0001.json", "0001.yaml", "0002.json", "0002.yaml"}
    mine[-1] = "checkpoints/step-00000004.old.kept/notes"
    assert all((run / name).read_text() == "mine" for name in mine)
    assert {path.name for path in run.iterdir()} == {path.name for path in (finished[0] / "run").iterdir()} | {mine[0]}
    assert json.loads((run / "export.json").read_text())["step"] == 8


@pytest.mark.smoke
def test_an_offline_export_is_the_same_folder(finished: Any, tmp_path: Path) -> None:
    done = fsdptrain("export", finished[0] / "run", "--out", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    first, second = finished[0] / "run" / "export", tmp_path / "again"
    assert {p.name for p in first.iterdir()} == {p.name for p in second.iterdir()}
    a, b = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    done = fsdptrain("export", finished[0] / "run", "--out", tmp_path / "half", "--dtype", "bfloat16", "--step", 4)
    assert done.returncode == 0, done.stderr
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_batch_larger_than_an_epoch_is_refused_before_training(tmp_path: Path) -> None:
    train = {"epochs": 1, "global_batch_size": 64, "micro_batch_size": 1}
    refused = fsdptrain("run", write_recipe(tmp_path, launch__nproc_per_node=1, data__max_rows=20, train=train))
    assert refused.returncode == 2 and "train.global_batch_size: 64 sequences, but one epoch has" in refused.stderr
    assert "Traceback" not in refused.stderr and events(tmp_path / "run", "start") == []


def test_a_limit_of_threads_does_not_change_what_is_computed(tmp_path: Path) -> None:
    """With more threads than OMP_THREAD_LIMIT, torch's products in bfloat16 are NaN, in training and in `eval`."""
    recipe = write_recipe(
        tmp_path, fsdp={"mixed_precision": {"param_dtype": "bfloat16"}}, launch__nproc_per_node=1, export={},
    )  # fmt: skip
    limit = {"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "2"}
    done = fsdptrain("run", recipe, executed=True, **limit)
    assert done.returncode == 0 and "logits compared" in done.stdout, done.stderr
    done = fsdptrain("eval", tmp_path / "run", "--data", tmp_path / "text.jsonl", executed=True, **limit)
    assert done.returncode == 0 and "nan" not in done.stdout, done.stdout + done.stderr


def test_under_torchrun_the_command_is_a_worker(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".fsdptrain").touch()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"event": "sta')  # half a line of an attempt that was killed
    workers = ["--standalone", "--nproc-per-node=2", "--no-python", sys.executable, "-m", "fsdptrain", "run", recipe]
    done = python("-m", "torch.distributed.run", *workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 steps in" in done.stdout
    assert done.stdout.count("step 2/2") == 1  # only rank 0 prints
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2]
    assert len(events(tmp_path / "run", "start")) == 1  # the partial line before it was cut off


def test_scancel_which_signals_every_process_twice_loses_nothing(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, train__steps=2000, checkpoint__every=None), tmp_path / "run"
    recorded = json.loads((TESTS / "plan" / "launchers.json").read_text())
    (slurm,) = recorded["sbatch -N2 --ntasks-per-node=2, srun -N1 -n1"]  # one node of the job, one task
    running = Running(recipe, **slurm)
    wait_for_step(run, 2)
    for _ in range(2):
        send_all(signal.SIGTERM, {running.process.pid, *processes_using(run)})
    assert not running.wait().problems(75, r"2 × cpu \(from Slurm job 6\), FULL_SHARD")
    (stop,) = events(run, "stop")
    assert valid_steps(run) == [stop["step"]] and stop["step"] >= 2


def test_a_stop_signal_is_obeyed_while_a_large_model_is_checked(tmp_path: Path) -> None:
    config = {"model_type": "llama", **TINY, "num_hidden_layers": 4096}  # takes a minute
    recipe, run = write_recipe(tmp_path, model__config=config, launch__grace_s=20), tmp_path / "run"
    running = Running(recipe)
    wait_until((run / "logs" / "progress.jsonl").exists, "no worker has started")
    time.sleep(2)  # its constructor runs
    running.process.send_signal(signal.SIGTERM)
    ended = running.wait()
    assert not ended.problems(75, "stopped by SIGTERM before the first step; nothing was lost")
    assert "killed" not in ended.output, ended.output


def test_an_export_overwrites_no_file_of_the_user(finished: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    done = fsdptrain("export", finished[0] / "run", "--out", tmp_path / "mine")
    assert done.returncode == 2 and "is not empty" in done.stderr
    assert (tmp_path / "mine" / "precious").exists()


@pytest.mark.soak
@pytest.mark.parametrize(("seed", "kernels"), [(42, {}), (1, WITHOUT_AVX512)], ids=["as_it_is", "without_avx512"])
def test_the_demo_answers_as_the_readme_says(seed: int, kernels: dict[str, str], tmp_path: Path) -> None:
    """The runs of `make demo` and their scores, which depend on the seed and on the processor's kernels."""
    names = ("shakespeare", "speakers", "speakers-lora")
    for name in names:
        done = fsdptrain("run", name, f"seed={seed}", cwd=tmp_path, timeout=1800, **kernels)
        assert done.returncode == 0, done.stderr
    words = [ROOT / "recipes" / "score.py", ROOT / "recipes" / "data" / "speakers-test.jsonl"]
    exports = [f"runs/{name}/export" for name in names]
    done = python(*words, *exports, cwd=tmp_path, timeout=600, executed=True, **kernels)
    before, *after = (float(share) for share in re.findall(r"^ *([\d.]+)% exact", done.stdout, re.MULTILINE))
    assert before == 0 and len(after) == 2 and min(after) > 95, done.stdout + done.stderr
