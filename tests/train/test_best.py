"""The best checkpoint and the early stop: over failures and resumes, with losses from a script, and in a real run."""

from __future__ import annotations

import contextlib
import json
import time
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import build
from support import TINY, events, fsdptrain, on_ranks, planned, write_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from fsdptrain.checkpoint.manifest import survey
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.errors import FsdptrainError
from fsdptrain.report.status import Observer, status_lines
from fsdptrain.run_folder.ownership import read_export_record
from fsdptrain.run_folder.rundir import RunDir

EVALUATED: dict[str, Any] = {
    "model__config": {"model_type": "llama", **TINY, "num_hidden_layers": 1}, "data__eval": {"fraction": 0.1},
    "train__global_batch_size": 2, "checkpoint__keep": 1, "checkpoint__keep_best": 1, "export__which": "best",
}  # fmt: skip


def test_the_best_are_kept_and_exported_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **EVALUATED, eval__every=2, eval__patience=3, checkpoint__every=5, train__steps=30)
    patient = "eval.patience=9"
    attempts = [
        # Steps 0, 2, 4, 6: the first weights do not count; the best of all is lost with the save of its step.
        ([], [0.1, 5, 3, 0.2], 6),
        # Steps 6, …, 14: a loss that is no number is never the best, nor is an equal one.
        ([], [4, 2.5, nan, 9, 2.5], 0),
        # Steps 16, 17: more patience continues the run; nothing is kept of step 16, although it is the best.
        ([patient, "checkpoint.keep_best=null", "export.which=last", "train.steps=17"], [2.2, 4], 0),
        # Steps 18, 20, 22: the best of those that have a checkpoint are kept.
        ([patient, "checkpoint.keep_best=2", "train.steps=22"], [5, 2.4, 9], 0),
    ]
    found = on_ranks(2, with_losses, tmp_path / "ranks", recipe=str(recipe), attempts=attempts)
    early = [[14, 8]]
    assert found[0] == found[1] == [
        [[4, 5], None, []], [[8, 14], 8, early], [[17], 17, early], [[17, 20, 22], 20, early],
    ]  # fmt: skip
    rundir = RunDir(tmp_path / "run")
    assert survey(rundir)["best"] == 20


def test_a_run_ends_when_one_source_gets_worse_and_goes_on_by_all(tmp_path: Path) -> None:
    """What is trained on loud is lost on quiet, so their losses order the steps the other way round."""
    for name, words in (("loud", "tick tock bang"), ("quiet", "still waters run")):
        rows = [json.dumps({"text": f"{words} " * (10 + number % 7)}) for number in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sources = [{"path": "loud.jsonl", "weight": 1000}, {"path": "quiet.jsonl", "weight": 1}]
    recipe = write_recipe(
        tmp_path, **EVALUATED, data__path=None, data__sources=sources, eval__every=1, eval__patience=2,
        eval__best_of="quiet", checkpoint__every=None, train__steps=6, optim__lr=0.01, schedule__name="constant",
        schedule__warmup=0, launch__nproc_per_node=1,
    )  # fmt: skip
    done = fsdptrain("run", recipe)
    run, said = tmp_path / "run", done.stdout
    losses = {event["step"]: event["losses"] for event in events(run, "eval")}
    assert done.returncode == 0 and [*losses] == [0, 1, 2, 3], said + done.stderr
    quiet, loud = ([losses[step][name] for step in (1, 2, 3)] for name in ("quiet", "loud"))
    assert quiet[0] == min(quiet) and loud[2] == min(loud)
    assert "no lower held-out loss of quiet than that of step 1 in 2 evaluations: the run ends after step 3" in said
    rundir = RunDir.open(run)
    assert rundir.checkpoint_steps() == [1, 3] and read_export_record(rundir).step == 1
    assert f"best   {losses[1]['quiet']:.4f} (quiet) at step 1, kept" in status_lines(Observer(rundir).status())
    assert "the lowest held-out loss of quiet is that of step 1\n" in fsdptrain("verify", run).stdout
    assert "\nlonger  fsdptrain run" in said and "eval.patience=4\n" in said
    assert "nothing was trained" in fsdptrain("run", recipe).stdout and len(events(run, "start")) == 1
    assert fsdptrain("export", run, "--best", "--step", 1).returncode == 2
    again = fsdptrain("export", run, "--best", "--out", tmp_path / "again")
    weights = [folder / "model.safetensors" for folder in (run / "export", tmp_path / "again")]
    assert again.returncode == 0 and weights[0].read_bytes() == weights[1].read_bytes(), again.stdout + again.stderr
    assert fsdptrain("run", recipe, "eval.patience=3").returncode == 0
    assert [(event["step"], event["best"]) for event in events(run, "early_stop")] == [(3, 1), (4, 1)]
    assert fsdptrain("run", recipe, "eval.best_of=null", "train.steps=5").returncode == 0
    assert rundir.checkpoint_steps() == [5] and read_export_record(rundir).step == 5


def test_a_weight_that_only_held_out_rows_reach_is_named_if_it_is_not_finite(tmp_path: Path) -> None:
    model = {"id": str(tmp_path / "model"), "tokenizer": {"train": 512}}
    recipe = write_recipe(tmp_path, model=model, data__eval={"path": str(tmp_path / "other.jsonl")}, data__max_rows=20)
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "ÿ" * 20}, ensure_ascii=False))
    base = LlamaForCausalLM(LlamaConfig(**TINY | {"num_hidden_layers": 1}))
    base.save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(planned(recipe), lambda *_: None)
    with torch.no_grad():
        base.model.embed_tokens.weight[tokenizer("ÿ").input_ids[-1]] = nan
    base.save_pretrained(tmp_path / "model")
    found = on_ranks(2, held_out_failures, tmp_path / "ranks", recipe=str(recipe))
    why = "model.embed_tokens.weight has values that are not finite"
    assert found[0] == found[1] == [
        [7, f"before the first step the held-out loss is nan: {why}"],
        [7, f"the trained model's logits are nan: {why}"],
    ]  # fmt: skip
    data = ["--data", tmp_path / "other.jsonl", "--json"]
    tokenizer.save_pretrained(tmp_path / "model")
    ended = fsdptrain("eval", tmp_path / "model", *data)
    assert ended.returncode == 7 and f"model: {why}" in ended.stderr, ended.stderr


# --- on every rank -------------------------------------------------------------------------------------------------


def with_losses(recipe: str, attempts: list[tuple[list[str], list[float], int]]) -> list[Any]:
    """Train in attempts of these overrides, whose evaluations return these losses in turn; a save of that step fails.

    Returns after each of them the steps that have a checkpoint, that of the export, and those of early stops.
    """
    found = []
    for overrides, losses, fails_at in attempts:
        run = build(recipe, overrides)
        save, rundir, left = run.save, run.session.rundir, iter(losses)

        def failing(done: int, wait: bool, fails_at: int = fails_at, save: Any = save) -> bool:
            if done == fails_at:
                raise InterruptedError
            return bool(save(done, wait))

        def slowly(*arguments: Any, write: Any = run.checkpointer._write) -> Any:
            time.sleep(0.2 * dist.get_rank())  # the saves of ranks are at different places when a loss is no number
            return write(*arguments)

        run.save, run.engine.evaluate = failing, lambda *_, left=left: (next(left), 1, np.zeros((2, 0)))  # type: ignore[method-assign]
        run.checkpointer._write = slowly  # type: ignore[method-assign]
        exported = None
        with contextlib.suppress(InterruptedError):
            assert run.train() is None and run.export() is None and not [*left]
            exported = read_export_record(rundir).step
        run.checkpointer.wait()
        dist.barrier()
        early = [[event["step"], event.get("best")] for event in events(rundir.root, "early_stop")]
        found.append([rundir.checkpoint_steps(), exported, early])
        dist.barrier()
    print("CPU", time.process_time(), flush=True)
    return found


def held_out_failures(recipe: str) -> list[tuple[int, str]]:
    """Return (exit code, message) of an evaluation, and of the logits with which an export is compared."""
    run, found = build(recipe, []), []
    for compute in (lambda: run.evaluate(0), run.sample):
        try:
            compute()
        except FsdptrainError as error:
            found.append((error.exit_code, str(error)))
    return found
