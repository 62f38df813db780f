"""The last lines of a run: commands and a few lines of Python to paste, for what is done with a model next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdptrain.config.adapter import ADAPTER_CONFIG
from fsdptrain.config.mixture import prompt_source
from fsdptrain.launch.run_banner import short_path
from fsdptrain.plan.plan import Plan
from fsdptrain.report.trackers import TrackerState
from fsdptrain.run_folder.records import RunState, Tail
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import counted

LENGTH_KEYS = ("train.steps", "train.epochs")
VLLM_RANK = 16  # the largest rank that vLLM serves unless it is given a larger one
QUESTION = "What is 7 times 6?"


def next_steps(plan: Plan, words: Sequence[str]) -> str:
    """Return lines to paste after a finished run, without line breaks inside a command.

    `words` is the command line of the run behind `fsdptrain`. What needs the exported folder is left out without it.
    """
    rundir, export = plan.rundir, plan.rundir.export
    lines = [*_commands(plan, words)]
    if export.is_dir():
        lines += ["try it in Python:", *_snippet(plan, export)]
    else:
        lines += [_line("export", ["fsdptrain", "export", _shown(rundir.root)])]
    return "\n".join(lines)


def _commands(plan: Plan, words: Sequence[str]) -> Iterator[str]:
    rundir, recipe, folder = plan.rundir, plan.recipe, _shown(plan.rundir.export)
    for name in recipe.log.chosen_trackers:
        if shown_by := TrackerState.read(rundir, name).shown_by:
            *command, last = shown_by
            yield _line("curves", [*command, _shown(Path(last)) if last.startswith("/") else last])
    if rundir.profiles.is_dir():
        yield f"profile {_shown(rundir.profiles)} ({_profile_words(rundir)})"
    if rundir.export.is_dir():
        if serving := _serve(plan, folder):
            yield _line("serve", serving)
        yield _line("share", ["hf", "upload", "ORG/NAME", folder])
    key, value = _longer(plan)
    yield _line("longer", [*_command(words, LENGTH_KEYS if key in LENGTH_KEYS else [key]), f"{key}={value:g}"])
    if plan.pretrained and rundir.export.is_dir():
        start = "adapter.from" if _is_adapter(rundir.export) else "model.id"
        again = {start: folder, "data.path": "MORE_DATA", "output_dir": f"{_shown(rundir.root)}-2"}
        yield _line("more", [*_command(words, [*again]), *(f"{key}={value}" for key, value in again.items())])


def _longer(plan: Plan) -> tuple[str, float]:
    """Return the key that has ended the run, and twice its value."""
    train, patience = plan.recipe.train, plan.recipe.eval.patience
    if patience and "early_stop" in RunState.of(Tail(plan.rundir.metrics, from_end=False).read()).newest:
        return "eval.patience", 2 * patience
    return ("train.steps", 2 * train.steps) if train.steps else ("train.epochs", 2 * (train.epochs or 1))


def _profile_words(rundir: RunDir) -> str:
    """Return how many files `log.profile` has written of each kind, and what opens them."""
    kinds = {"trace": ("*.json.gz", "ui.perfetto.dev"), "memory snapshot": ("*.pickle", "pytorch.org/memory_viz")}
    counts = {what: len([*rundir.profiles.glob(files)]) for what, (files, _) in kinds.items()}
    return ", ".join(f"{counted(counts[what], what)} for {page}" for what, (_, page) in kinds.items() if counts[what])


def _command(words: Sequence[str], replaced: Sequence[str]) -> list[str]:
    """Return the words of the command of a run without the overrides of these keys, which others replace."""
    kept = [word for word in words if word != "--fresh" and word.partition("=")[0] not in replaced]
    return ["fsdptrain", *kept]


def _serve(plan: Plan, folder: str) -> list[str]:
    """Return vLLM's command for an export; none for an adapter that vLLM does not serve."""
    adapter = plan.recipe.adapter
    if not _is_adapter(plan.rundir.export):
        return ["vllm", "serve", folder]
    if adapter.use_dora or adapter.modules_to_save or plan.recipe.model.id is None:
        return []
    rank = ["--max-lora-rank", str(adapter.r)] if adapter.r > VLLM_RANK else []
    modules = ["--enable-lora", "--lora-modules", f"{plan.recipe.name}={folder}"]
    return ["vllm", "serve", _shown(Path(plan.recipe.model.id)), *modules, *rank]


def _snippet(plan: Plan, export: Path) -> list[str]:
    """Return a program that generates from the exported folder; its prompt has the format of the training rows."""
    if _is_adapter(export):  # peft loads the model that the adapter belongs to, too
        imports = ["from peft import AutoPeftModelForCausalLM as Model", "from transformers import AutoTokenizer"]
    else:
        imports = ["from transformers import AutoModelForCausalLM as Model, AutoTokenizer"]
    trust = ", trust_remote_code=True" if plan.trust_remote_code else ""
    data = prompt_source(plan.recipe.data).data
    if data.format.is_chat:
        prompt = f'[{{"role": "user", "content": "{QUESTION}"}}]'
        settings = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        settings += "".join(f", {name}={value!r}" for name, value in data.chat_template_kwargs.items())
        encode = f'tokenizer.apply_chat_template({prompt}, {settings})["input_ids"]'
    else:
        text = QUESTION + data.separator if data.format.has_prompt or data.format.is_paired else "Once upon a time"
        encode = f'tokenizer({_literal(text)}, return_tensors="pt").input_ids'
    return [
        *imports,
        f"folder = {_literal(str(export))}",
        f"model, tokenizer = Model.from_pretrained(folder{trust}), AutoTokenizer.from_pretrained(folder{trust})",
        f"ids = {encode}",
        "print(tokenizer.decode(model.generate(input_ids=ids, max_new_tokens=64)[0]))",
    ]


def _is_adapter(export: Path) -> bool:
    return (export / ADAPTER_CONFIG).is_file()


def _literal(text: str) -> str:
    """Return a string as Python and JSON write it."""
    return json.dumps(text, ensure_ascii=False)


def _shown(path: Path) -> str:
    """Return a path, or the name of a model on the Hub, as a command takes it in the working folder."""
    return short_path(path) if path.is_absolute() else str(path)


def _line(label: str, words: Sequence[str]) -> str:
    return f"{label:<8}{shlex.join(words)}"
