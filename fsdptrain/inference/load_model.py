"""Open a run or a Hugging Face folder with transformers, in one process: on a GPU, or on the CPU if there is none."""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from fsdptrain.checkpoint.export import export_checkpoint
from fsdptrain.checkpoint.export_check import open_adapter, open_model
from fsdptrain.checkpoint.manifest import is_model
from fsdptrain.config.adapter import ADAPTER_CONFIG
from fsdptrain.config.mixture import MixtureSource, prompt_source, source_named
from fsdptrain.config.schema import Data
from fsdptrain.data.hub import model_revision, recipe_errors, reject_symlinks_outside
from fsdptrain.data.resume_pins import pin_date
from fsdptrain.data.tokenizer import open_tokenizer, own_code_note
from fsdptrain.errors import RecipeError
from fsdptrain.plan.plan import Plan, open_plan
from fsdptrain.run_folder.files import is_there, scratch_folder
from fsdptrain.run_folder.ownership import read_export_record
from fsdptrain.run_folder.rundir import RunDir
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
    options: dict[str, Any] = field(default_factory=dict)  # with which it was opened

    @property
    def data(self) -> Data | None:
        """How the rows are read that the run trained on, perhaps of several sources."""
        return self.plan.recipe.data if self.plan else None

    def source(self, name: str | None) -> MixtureSource | None:
        """Return the source of the run with this name, by default that of prompts; None of a folder of unknown origin.

        Raises RecipeError for a name that is none of a source.
        """
        if self.data is not None:
            return prompt_source(self.data) if name is None else source_named(self.data, name)
        if name is not None:
            raise RecipeError(f"--source: {self.name} is not a run: leave it out")
        return None

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """Yield the model with which the run began, to which DPO compares: without the adapter, or opened again.

        Raises RecipeError if its files do not have the weights with which the run began, or cannot be opened.
        """
        assert self.plan is not None
        model, start = self.plan.recipe.model, self.plan.recipe.adapter.from_
        if not self.plan.pretrained or model.add_tokens:
            reason = "model.add_tokens" if model.add_tokens else "model.init: random"
            raise RecipeError(f"no files have the reference of this run, because its recipe has {reason}")
        if hasattr(self.model, "disable_adapter") and start is None:
            with self.model.disable_adapter():
                yield self.model
            return
        name = start or str(model.id)
        where = {} if start else {"revision": model_revision(self.plan), "config": self.model.config}
        with recipe_errors(f"{name} cannot be opened"):
            reference = _open_model(name, self.options | where)
        yield reference

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
            folder, name = stack.enter_context(exported_for_now(rundir, plan, step, trust_remote_code, screen))
        options: dict[str, Any] = {"dtype": dtype or default_dtype(plan), "trust_remote_code": trust_remote_code}
        with screen.busy(f"opening {name}"), recipe_errors(f"{folder} cannot be opened"):
            model, tokenizer = _open_model(str(folder), options), open_tokenizer(str(folder))
        for note in filter(None, map(own_code_note, (model, tokenizer))):
            screen.say(note)
        if plan and plan.recipe.adapter.kind == "qlora" and is_there(folder / ADAPTER_CONFIG):
            screen.say("the weights of the base are not quantised here, as they were in training")
        yield OpenedModel(model, tokenizer, name, plan, rundir, options)


@contextlib.contextmanager
def exported_for_now(
    rundir: RunDir, plan: Plan, step: int | None, trusted: bool, screen: Screen
) -> Iterator[tuple[Path, str]]:
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
            dtype = None if separate else plan.recipe.model.dtype
            export_checkpoint(rundir, step, out, dtype, quiet, compare=False, trusted=trusted)
        yield out, f"{rundir.root}, step {quiet.last['export']['step']}"


def default_dtype(plan: Plan | None) -> str:
    """Return the dtype of weights and computing: few CPUs are fast in another one than float32."""
    if not torch.cuda.is_available():
        return "float32"
    return plan.recipe.fsdp.mixed_precision.param_dtype if plan else "auto"


def _open_model(name: str, options: dict[str, Any]) -> Any:
    """Return the model of a folder or of the Hub in evaluation mode, with the adapter if the folder has one."""
    reject_symlinks_outside("model", name)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of peft and transformers about one another
    is_adapter = is_there(Path(name) / ADAPTER_CONFIG)
    model = open_adapter(name, unquantised=None, **options) if is_adapter else open_model(name, **options)
    return model.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
