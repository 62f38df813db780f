"""The text of a first recipe for some data and a model, with comments: `fsdptrain init`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptrain.config.paths import DataPath, find_all_data, is_folder, model_name_fault, path_fault
from fsdptrain.config.schema import Data
from fsdptrain.config.strategy import DEFAULT_STRATEGY, Strategy
from fsdptrain.config.syntax import yaml_text
from fsdptrain.data.columns import describe_columns, likely_format, peek, seam_without_space, unknown_columns_error
from fsdptrain.data.sources import first_source, held_out_files
from fsdptrain.errors import Problem, RecipeError, shortened
from fsdptrain.run_folder.storage import url_fault
from fsdptrain.text import one_line

RECIPE = """\
# yaml-language-server: $schema=recipe.schema.json
#
# fsdptrain validate {dest}: what is wrong, whether it fits, how long it takes; starts nothing
# fsdptrain run {dest}: train; run it again to resume where it stopped
# fsdptrain schema > recipe.schema.json: once, for completion and checks in an editor (by the first line)
#
# Every other key has a default: fsdptrain schema lists them.

name: {name} # the run is written to runs/NAME

model:
  id: {model} # weights and tokenizer: a folder, or org/name on the Hub

data:
  path: {path}
  format: {form} # {fields}
{columns}  seq_len: {seq_len} # tokens of a sequence; rows are packed into sequences, and longer ones are {long_rows}
  {held_out}

{forecast}fsdp:
  strategy: {strategy} # one of {strategies}
  activation_checkpointing: {recomputed} # selective or full: less memory, more time
{fsdp}
optim: {{lr: {rate}}}
train:
{objective}  epochs: {epochs}
  global_batch_size: {batch} # sequences of one optimizer step, over all ranks
  micro_batch_size: {micro} # sequences that a rank computes at a time
checkpoint: {{every: {checkpoint}}} # steps
log: {{every: {log}}} # steps
"""

NOT_HELD_OUT = "# eval: {fraction: 0.05} # share of the tokens to hold out; then also set eval: {every: 10} (steps)"


@dataclass(frozen=True)
class Starter:
    """A recipe without sizes: the model, and how the data is read. `dest` is where it is written."""

    dest: Path
    model: str
    path: DataPath
    read_as: Data
    described: str  # which columns are read as what
    held_out: str | None = None  # the split to hold out; without it a share of the rows is held out

    def text(self, keys: Mapping[str, Any], forecast: Sequence[str] = ()) -> str:
        """Return the recipe with these values: dotted path → value. `forecast` are comments on the strategy."""
        fraction, every = (keys.get("data.eval") or {}).get("fraction"), keys.get("eval.every")
        held_out = f"eval: {{fraction: {fraction}}} # share of the tokens to hold out" if fraction else NOT_HELD_OUT
        if self.held_out:
            held_out, every = f"eval: {{path: {yaml_text(self.held_out)}}}", every or keys.get("checkpoint.every", 500)
        extras = {"columns": self.read_as.columns, "separator": self.read_as.separator}
        written = {"fsdp.strategy", "fsdp.activation_checkpointing"}
        fsdp = {
            path.removeprefix("fsdp."): value
            for path, value in keys.items()
            if path.startswith("fsdp.") and path not in written and value is not None
        }
        text = RECIPE.format(
            dest=self.dest,
            name=_run_name(self.model, self.path if isinstance(self.path, str) else self.path[0]),
            model=yaml_text(self.model),
            path=yaml_text(self.path),
            form=self.read_as.format,
            fields=one_line(self.described),
            columns="".join(f"  {name}: {yaml_text(value)}\n" for name, value in extras.items() if value),
            seq_len=keys.get("data.seq_len", 2048),
            long_rows=self.read_as.treatment,
            held_out=held_out,
            forecast="".join(f"# {line}\n" for line in forecast),
            strategy=keys.get("fsdp.strategy", DEFAULT_STRATEGY),
            strategies=", ".join(Strategy),
            recomputed=yaml_text(keys.get("fsdp.activation_checkpointing", "none")),
            fsdp="".join(f"  {name}: {yaml_text(value)}\n" for name, value in fsdp.items()),
            rate="1e-6" if self.read_as.format.is_paired else "2e-5",
            objective="  objective: dpo # learn which of two answers is preferred\n" * self.read_as.format.is_paired,
            epochs=keys.get("train.epochs", 1),
            batch=keys.get("train.global_batch_size", 64),
            micro=keys.get("train.micro_batch_size", 1),
            checkpoint=keys.get("checkpoint.every", 500),
            log=keys.get("log.every", 1),
        )
        return text + (f"eval: {{every: {every}}} # steps\n" if every else "")


def read_starter(data: Sequence[str], model: str, dest: Path) -> Starter:
    """Look at the model's name and the first rows of the data: what its columns are, and how they are read.

    Raises DataError for data that is missing, cannot be read, or whose columns match no format, and RecipeError for a
    model that is neither a folder nor a Hub id and for a path or URL that cannot be used.
    """
    if fault := model_name_fault(model) or _missing_model(model):
        raise RecipeError([Problem(fault, "--model")])
    for each in data:
        if fault := path_fault(each) or url_fault(each):
            raise RecipeError([Problem(fault, "--data")])
    written: DataPath = data[0] if len(data) == 1 else list(data)
    found = find_all_data(written, Path.cwd())
    likely = likely_format(first_source(found))
    if likely is None:
        raise unknown_columns_error(found)
    form, columns = likely
    read_as = Data(format=form, columns=dict(columns))
    _, rows = peek(found, read_as)
    if seam_without_space(rows, read_as):
        read_as.separator = "\n"
    places = [
        _path_from_recipe(a, b, dest) for a, b in zip(data, [found] if isinstance(found, str) else found, strict=True)
    ]
    held_out, folder = held_out_files(found), dest.parent.absolute()
    if held_out and places[0] == os.path.relpath(str(found), folder):  # relative to the recipe, as the data
        held_out = os.path.relpath(held_out, folder)
    read = describe_columns(found, read_as)
    return Starter(dest, model, places[0] if len(places) == 1 else places, read_as, read, held_out)


def _missing_model(model: str) -> str | None:
    """Return what is wrong with a name that could be a Hub id, but is a path on this machine; None for nothing."""
    if is_folder(model):
        return None if (Path(model) / "config.json").is_file() else f"{shortened(model)!r} has no config.json"
    folder = model.rpartition("/")[0]
    return f"{shortened(model)!r} does not exist in the folder {folder}" if folder and is_folder(folder) else None


def _path_from_recipe(data: str, found: str, dest: Path) -> str:
    """Return the data's path relative to the recipe's folder; unchanged when it is absolute or a Hub id."""
    if found == data or data.startswith("~") or Path(data).is_absolute():
        return data
    return os.path.relpath(found, dest.parent.absolute())


def _run_name(model: str, data: str) -> str:
    words = [Path(model.rstrip("/")).name, Path(data.rstrip("/")).name.partition(".")[0]]
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-.") or "run"
