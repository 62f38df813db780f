"""Open a run or a Hugging Face folder with transformers, in one process: on a GPU, or on the CPU if there is none."""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from fsdptrain.checkpoint.export import export_checkpoint
from fsdptrain.checkpoint.reopen import open_adapter, open_model
from fsdptrain.checkpoint.verify import is_model
from fsdptrain.config.adapter import ADAPTER_CONFIG
from fsdptrain.config.schema import Data
from fsdptrain.data.hub import recipe_errors, reject_symlinks_outside
from fsdptrain.data.pinned import pin_date
from fsdptrain.errors import RecipeError
from fsdptrain.folder.files import is_there, scratch_folder
from fsdptrain.folder.ownership import read_export_record
from fsdptrain.folder.rundir import RunDir
from fsdptrain.plan.plan import Plan, open_plan
from fsdptrain.terminal.screen import Screen


@dataclass(frozen=True)
class OpenedModel:
    """A model in evaluation mode with its tokenizer, and what messages call it.

    `plan` and `rundir` are those of its run, None for a folder of unknown origin.
    """

    model: Any
    tokenizer: Any
    name: str
    plan: Plan | None
    rundir: RunDir

    @property
    def data(self) -> Data | None:
        """How the rows are read that the run trained on."""
        return self.plan.recipe.data if self.plan else None

    def day(self, data: Data | None) -> datetime.date | None:
        """Return the date that the chat template renders: for rows as the run trained on, that of the run."""
        if self.plan and data and data.format.renders_chat:
            return pin_date(self.plan, self.tokenizer, self.rundir, keep=False)
        return datetime.datetime.now().date() if "strftime_now" in str(self.tokenizer.chat_template) else None


@contextlib.contextmanager
def opened_model(
    rundir: RunDir, step: int | None, dtype: str | None, trust_remote_code: bool, screen: Screen
) -> Iterator[OpenedModel]:
    """Open the export of a run, its checkpoint of `step`, or the folder `rundir.root` of transformers or peft.

    Without an export the newest checkpoint is exported to a temporary folder. `dtype` is that of the weights and of
    computing, by default float32 on a CPU and that of training, or of the files, on a GPU. Raises RecipeError if there
    is nothing to open, or it cannot be opened.
    """
    if is_model(rundir.root) and rundir.root == RunDir.open(rundir.root.parent).export:
        rundir = RunDir.open(rundir.root.parent)
    plan = open_plan(rundir.plan) if is_there(rundir.plan) else None
    if plan is None and step is not None:
        raise RecipeError(f"--step: {rundir.root} is not a run, so it has no checkpoints: leave it out")
    with contextlib.ExitStack() as stack:
        folder, name = rundir.root, str(rundir.root)
        if plan and step is None and is_model(rundir.export):
            folder, name = rundir.export, f"{rundir.export} (step {read_export_record(rundir).step})"
        elif plan:
            folder, name = stack.enter_context(exported_for_now(rundir, plan, step, screen))
        with screen.busy(f"opening {name}"):
            model, tokenizer = _open(folder, dtype or default_dtype(plan), trust_remote_code)
        if plan and plan.recipe.adapter.kind == "qlora" and is_there(folder / ADAPTER_CONFIG):
            screen.say("the weights of the base are not quantised here, as they were in training")
        yield OpenedModel(model, tokenizer, name, plan, rundir)


@contextlib.contextmanager
def exported_for_now(rundir: RunDir, plan: Plan, step: int | None, screen: Screen) -> Iterator[tuple[Path, str]]:
    """Export a checkpoint to a temporary folder, in the dtype of training; yield the folder and its name.

    Raises RecipeError if there is no checkpoint.
    """
    steps = rundir.checkpoint_steps()
    if not steps:
        raise RecipeError(f"{rundir.root} has neither an export nor a complete checkpoint: run it first")
    separate = plan.recipe.adapter.kind and plan.recipe.export.adapter == "separate"
    with scratch_folder() as scratch:
        out = scratch / "export"
        with screen.busy("exporting a checkpoint"):
            quiet = Screen(quiet=True)
            export_checkpoint(rundir, step, out, None if separate else plan.recipe.model.dtype, quiet, compare=False)
        yield out, f"{rundir.root}, step {quiet.last['export']['step']}"


def default_dtype(plan: Plan | None) -> str:
    """Return the dtype of weights and computing: few CPUs are fast in another one than float32."""
    if not torch.cuda.is_available():
        return "float32"
    return plan.recipe.fsdp.mixed_precision.param_dtype if plan else "auto"


def _open(folder: Path, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return model and tokenizer of a folder; raises RecipeError for one that transformers or peft cannot open."""
    reject_symlinks_outside("model", str(folder))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers.utils.logging.disable_progress_bar()
    how: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    how |= {"unquantised": None} if (is_adapter := is_there(folder / ADAPTER_CONFIG)) else {}
    with recipe_errors(f"{folder} cannot be opened"):
        warnings.filterwarnings("ignore", category=FutureWarning)  # of peft and transformers about one another
        model = (open_adapter if is_adapter else open_model)(str(folder), **how)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return model.eval().to(device), tokenizer
