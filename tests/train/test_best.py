"""The best checkpoint and the early stop: over failures and resumes, with losses from a script, and in a real run."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

from support import TINY, events, fsdptrain, on_ranks, write_recipe

from fsdptrain.checkpoint.verify import survey
from fsdptrain.folder.rundir import RunDir
from fsdptrain.launch.status import observe, status_lines

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
    found = on_ranks(2, "with_losses", tmp_path / "ranks", recipe=str(recipe), attempts=attempts)
    early = [[14, 8]]
    assert found[0] == found[1] == [
        [[4, 5], None, []], [[8, 14], 8, early], [[17], 17, early], [[17, 20, 22], 20, early],
    ]  # fmt: skip
    rundir = RunDir(tmp_path / "run")
    assert survey(rundir)["best"] == 20


def test_a_run_that_ends_early_is_finished_and_its_best_weights_are_exported(tmp_path: Path) -> None:
    """With such a learning rate each step makes it worse."""
    recipe = write_recipe(
        tmp_path, **EVALUATED, optim__lr=3.0, schedule__name="constant", schedule__warmup=0, eval__every=1,
        eval__patience=2, checkpoint__every=None, train__steps=40, launch__nproc_per_node=1,
    )  # fmt: skip
    done = fsdptrain("run", recipe)
    run, said = tmp_path / "run", done.stdout
    evaluated = {event["step"]: event["loss"] for event in events(run, "eval") if event["step"]}
    best, last = min(evaluated, key=lambda step: evaluated[step]), max(evaluated)
    assert done.returncode == 0 and last == best + 2 < 40, said + done.stderr
    assert f"no lower held-out loss than that of step {best} in 2 evaluations: the run ends after step {last}" in said
    assert "\nlonger  fsdptrain run" in said and "eval.patience=4\n" in said
    rundir = RunDir.open(run)
    assert rundir.checkpoint_steps() == [best, last] and survey(rundir)["best"] == best
    status = observe(rundir).status()
    assert (status["state"], status["step"], status["best"]["step"], status["best"]["kept"]) == (
        "finished",
        last,
        best,
        True,
    )
    assert f"best   {evaluated[best]:.4f} at step {best}, kept" in status_lines(status)
    assert "nothing was trained" in fsdptrain("run", recipe).stdout and len(events(run, "start")) == 1
    assert fsdptrain("export", run, "--best", "--step", best).returncode == 2
    again = fsdptrain("export", run, "--best", "--out", tmp_path / "again")
    weights = [folder / "model.safetensors" for folder in (run / "export", tmp_path / "again")]
    assert again.returncode == 0 and weights[0].read_bytes() == weights[1].read_bytes(), again.stdout + again.stderr
