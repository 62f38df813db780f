"""fsdptrain from a Python program, on one node: what the commands do, with their refusals as exceptions.

    import fsdptrain

    outcome = fsdptrain.validate("recipe.yaml", ["train.steps=100"], hardware="8xh100-80gb")
    print(outcome.verdict, outcome.report["step_s"])
    folder = fsdptrain.run("recipe.yaml", ["train.steps=100"])
    losses = [event["loss"] for event in fsdptrain.read_history(folder) if event["event"] == "step"]
    model = fsdptrain.export(folder, out="model")

`run` and `export` are child processes, as their commands are: a program keeps its GPUs, signals and memory to itself,
and when it ends they do, a run with a checkpoint.
The exceptions are those of `fsdptrain.errors`; `exit_code` is what the command would have ended with.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptrain.errors import (
    CheckpointError,
    DataError,
    FsdptrainError,
    NonFiniteError,
    RecipeError,
    Stopped,
    WorkerError,
)
from fsdptrain.processes import PROGRAM

if TYPE_CHECKING:
    from fsdptrain.config.reader import LoadedRecipe
    from fsdptrain.validation.findings import Outcome

Place = str | os.PathLike[str]
ENDED: dict[int, type[FsdptrainError]] = {
    error.exit_code: error for error in (RecipeError, DataError, WorkerError, CheckpointError, NonFiniteError, Stopped)
}


def load_recipe(recipe: Place, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return a recipe file, or a shipped recipe by its name, with overrides such as `optim.lr=1e-5` applied.

    Raises RecipeError with every problem found.
    """
    from fsdptrain.cli import find_recipe

    if isinstance(overrides, str):  # a sequence, too: of its letters
        raise RecipeError(f"overrides are a list, here [{overrides!r}]")
    return find_recipe(os.fspath(recipe), list(overrides))


def validate(
    recipe: Place, overrides: Sequence[str] = (), *, hardware: str | None = None, price: float | None = None
) -> Outcome:
    """Return what `fsdptrain validate` finds: verdict, problems and exit code, and in `report` what `--json` prints.

    `hardware` plans for other machines, such as `8xh100-80gb`; `price` is in dollars per GPU-hour. A plan that does not
    fit is an outcome with the exit code 3. Raises RecipeError for a wrong recipe, unknown hardware, or a price without
    GPUs.
    """
    from fsdptrain.terminal.screen import Screen
    from fsdptrain.validation.request import make_request, run_dry_run

    request = make_request(load_recipe(recipe, overrides), hardware, price=price)
    with Screen(quiet=True) as screen:
        return run_dry_run(request, screen)


def run(recipe: Place, overrides: Sequence[str] = (), *, fresh: bool = False) -> str:
    """Train a model, or resume its run; print what the command prints; return the run folder.

    With `fresh` a folder that holds a run is refused. An interrupt (KeyboardInterrupt) saves a checkpoint and raises
    Stopped: call again to continue. Raises the FsdptrainError that the command reports.
    """
    folder = load_recipe(recipe, overrides).recipe.output_dir
    _command("run", os.fspath(recipe), *overrides, *["--fresh"] * fresh)
    return folder


def read_history(run_dir: Place) -> list[dict[str, Any]]:
    """Return the events of a run (docs/events.md) in their order, without those that a resume undid.

    Raises RecipeError if the folder holds no run.
    """
    from fsdptrain.run_folder import events
    from fsdptrain.run_folder.rundir import RunDir

    metrics = RunDir(Path(run_dir)).metrics
    if not metrics.is_file():
        raise RecipeError(f"{os.fspath(run_dir)} is not a run folder: it has no {metrics.name}")
    return events.read_history(metrics)


def export(run_dir: Place, *, out: Place | None = None, step: int | None = None, dtype: str | None = None) -> Path:
    """Write a checkpoint, by default the newest, as a Hugging Face folder; return that folder.

    `out` is by default `export` in the run folder, `dtype` the recipe's. Raises CheckpointError if there is none.
    """
    options = {"--out": out, "--step": step, "--dtype": dtype}
    given = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    _command("export", os.fspath(run_dir), *given)
    return Path(out) if out is not None else Path(run_dir) / "export"


def _command(*words: str) -> None:
    """Run a command of fsdptrain and print its output; raise what it reports as the exception of its exit code."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        command = [sys.executable, "-m", "fsdptrain", *words]
        # In a session of its own: Ctrl-C at a terminal would reach it, too, and a second signal stops it at once.
        options: dict[str, Any] = {"start_new_session": True, "env": {**os.environ, PROGRAM: str(os.getpid())}}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, **options) as child:
            assert child.stdout is not None
            try:
                for line in child.stdout:
                    print(line, end="", flush=True)
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                print(child.communicate()[0], end="", flush=True)
        errors.seek(0)
        message = errors.read().strip().removeprefix("fsdptrain: ")
    if child.returncode:
        raise ENDED.get(child.returncode, FsdptrainError)(message)
