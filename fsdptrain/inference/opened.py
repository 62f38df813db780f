"""A run or a Hugging Face folder, opened in one process, on a GPU or the CPU, and its answers by `generate`."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import StoppingCriteriaList, TextStreamer

from fsdptrain.checkpoint.export import export_checkpoint
from fsdptrain.checkpoint.export_check import open_adapter, open_model
from fsdptrain.checkpoint.manifest import is_model
from fsdptrain.config.adapter import ADAPTER_CONFIG
from fsdptrain.config.mixture import MixtureSource, prompt_source, source_named
from fsdptrain.config.schema import Data
from fsdptrain.data.columns import Message
from fsdptrain.data.encode import end_tokens, prompt_tokens, renders_chat
from fsdptrain.data.hub import model_revision, recipe_errors, reject_symlinks_outside
from fsdptrain.data.tokenizer import open_tokenizer, own_code_note
from fsdptrain.data.windows import pin_date
from fsdptrain.errors import RecipeError
from fsdptrain.model.config import position_limit
from fsdptrain.plan.plan import Plan, open_plan
from fsdptrain.processes import Interrupted, StopRequest
from fsdptrain.run_folder.files import is_there, scratch_folder
from fsdptrain.run_folder.ownership import read_export_record
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen

EXIT = "/exit"
NEW = "/new"


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
    computing, by default that of training, or of the files; on a CPU float32, because few are fast in another one.
    Raises RecipeError if there is nothing to open, or it cannot be opened.
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
            folder, name = stack.enter_context(_exported_for_now(rundir, plan, step, trust_remote_code, screen))
        if dtype is None and torch.cuda.is_available():
            dtype = plan.recipe.fsdp.mixed_precision.param_dtype if plan else "auto"
        options: dict[str, Any] = {"dtype": dtype or "float32", "trust_remote_code": trust_remote_code}
        with screen.busy(f"opening {name}"), recipe_errors(f"{folder} cannot be opened"):
            model, tokenizer = _open_model(str(folder), options), open_tokenizer(str(folder))
        for note in filter(None, map(own_code_note, (model, tokenizer))):
            screen.say(note)
        if plan and plan.recipe.adapter.kind == "qlora" and is_there(folder / ADAPTER_CONFIG):
            screen.say("the weights of the base are not quantised here, as they were in training")
        yield OpenedModel(model, tokenizer, name, plan, rundir, options)


@contextlib.contextmanager
def _exported_for_now(
    rundir: RunDir, plan: Plan, step: int | None, trusted: bool, screen: Screen
) -> Iterator[tuple[Path, str]]:
    """Export a checkpoint to a temporary folder, in the dtype of training; yield the folder and its name."""
    if not rundir.checkpoint_steps():
        raise RecipeError(f"{rundir.root} has neither an export nor a complete checkpoint: run it first")
    separate = plan.recipe.adapter.kind and plan.recipe.export.adapter == "separate"
    with scratch_folder() as scratch:
        out = scratch / "export"
        with screen.busy("exporting a checkpoint"):
            quiet = Screen(quiet=True)
            dtype = None if separate else plan.recipe.model.dtype
            export_checkpoint(rundir, step, out, dtype, quiet, compare=False, trusted=trusted)
        yield out, f"{rundir.root}, step {quiet.last['export']['step']}"


def _open_model(name: str, options: dict[str, Any]) -> Any:
    reject_symlinks_outside("model", name)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of peft and transformers about one another
    is_adapter = is_there(Path(name) / ADAPTER_CONFIG)
    model = open_adapter(name, unquantised=None, **options) if is_adapter else open_model(name, **options)
    return model.eval().to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class Dialogue:
    """A conversation with a model, or continuations of texts where a chat template is not what it was trained with."""

    def __init__(
        self, opened: OpenedModel, max_tokens: int, temperature: float, seed: int, source: str | None = None
    ) -> None:
        """Begin a conversation, in which prompts are those of a source of the run, by default `prompt_source`.

        An answer has at most `max_tokens`, the most likely ones if the temperature is 0. The seed is set once, so that
        the same inputs get the same answers. Raises RecipeError for an unknown source.
        """
        self.opened, self.max_tokens, self.temperature = opened, max_tokens, temperature
        self.source = opened.source(source)
        self.data = self.source.data if self.source else None
        self.is_chat = renders_chat(opened.tokenizer, self.data)
        self.messages: list[Message] = []
        torch.manual_seed(seed)

    @property
    def usage(self) -> str:
        """What to type, in one sentence."""
        kind = "each line is a message" if self.is_chat else "each line is a text that the model continues"
        if self.source and self.opened.data and self.opened.data.sources:
            kind += f", as in the rows of {self.source.name}"
        new = f"; {NEW} begins a new conversation" * self.is_chat
        return f"{kind}; Ctrl-C ends an answer, Ctrl-D or {EXIT} the dialogue{new}"

    def answer(self, text: str, stopped: Callable[[], bool] = lambda: False) -> str:
        """Print the answer to a message as it is written, until `stopped` returns True; return it.

        Raises RecipeError if the conversation is longer than the model's positions.
        """
        opened, tokenizer = self.opened, self.opened.tokenizer
        if not self.is_chat:
            self.messages.clear()
        self.messages.append({"role": "user", "content": text})
        ids = prompt_tokens(tokenizer, self.messages, self.data, opened.day(self.data))
        limit = position_limit(opened.model.config)
        if not ids or (limit is not None and len(ids) >= limit):
            self.messages.pop()
            raise RecipeError(f"{len(ids):,} tokens, and the model has {limit:,} positions" if ids else "no tokens")
        inputs = torch.tensor([ids], device=opened.model.device)
        most = self.max_tokens if limit is None else min(self.max_tokens, limit - len(ids))
        how = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        ends = end_tokens(tokenizer, opened.model.generation_config)

        def is_stopped(ids: torch.Tensor, scores: Any) -> torch.Tensor:
            return torch.full(ids.shape[:1], stopped(), device=ids.device)

        output: Any = opened.model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=most, **how,
            eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            stopping_criteria=StoppingCriteriaList([is_stopped]),
        )  # fmt: skip
        written = str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": written})
        return written


def talk(dialogue: Dialogue) -> None:
    """Answer each line of standard input until it ends or is /exit; Ctrl-C ends the answer that is being written."""
    for line in _lines_of_user():
        if line.strip() == NEW:
            dialogue.messages.clear()
            continue
        with StopRequest() as stop:
            try:
                dialogue.answer(line, lambda: stop.count > 0)
            except RecipeError as error:
                print(f"{error}; {NEW} begins a new conversation", file=sys.stderr)
            if stop.count and stop.name != "SIGINT":  # the terminal is gone, or the system shuts down
                return


def _lines_of_user() -> Iterator[str]:
    """Yield what the user types, without empty lines, up to /exit, Ctrl-D, or Ctrl-C at the prompt."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # from then on `input` edits lines
    while True:
        try:
            line = input(prompt)
        except (EOFError, Interrupted):
            if prompt:
                print()
            return
        if line.strip() == EXIT:
            return
        if line.strip():
            yield line
