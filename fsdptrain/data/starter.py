"""A first recipe for some data and a model, with comments: `fsdptrain init`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from fsdptrain.config.paths import find_data, model_name_fault, path_fault
from fsdptrain.config.schema import FORMAT_FIELDS, Data, long_row_treatment
from fsdptrain.config.strategy import DEFAULT_STRATEGY, Strategy
from fsdptrain.config.syntax import yaml_text
from fsdptrain.data.columns import column_names, describe_columns, guess_format, peek
from fsdptrain.errors import DataError, Problem, RecipeError, listed, shortened
from fsdptrain.storage import url_fault

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
  # eval: {{fraction: 0.01}} # share of the tokens to hold out; then also set eval: {{every: 100}} (steps)

fsdp:
  strategy: {strategy} # one of {strategies}
  activation_checkpointing: none # selective or full: less memory, more time

optim: {{lr: 2e-5}}
train:
  epochs: 1
  global_batch_size: 64 # sequences of one optimizer step, over all ranks
  micro_batch_size: 1 # sequences that a rank computes at a time
checkpoint: {{every: 500}} # steps
"""


def starter_recipe(data: str, model: str, dest: Path) -> str:
    """Return the text of a recipe, to be written to `dest`, that trains `model` on `data`, read by its column names.

    Raises DataError for data that is missing, cannot be read, or whose columns match no format, and RecipeError for a
    model that is neither a folder nor a Hub id and for a path or URL that cannot be used.
    """
    if fault := model_name_fault(model):
        raise RecipeError([Problem(fault, "--model")])
    if fault := path_fault(data) or url_fault(data):
        raise RecipeError([Problem(fault, "--data")])
    found = find_data(data, Path.cwd())
    available = column_names(found)
    likely = guess_format(available)
    if likely is None:
        formats = "; ".join(f"{form}: {', '.join(fields)}" for form, fields in FORMAT_FIELDS.items())
        raise DataError(f"{data}: its columns match no format ({formats}); columns: {listed(available)}")
    form, columns = likely
    read_as = Data(format=form, columns=columns)  # type: ignore[arg-type]
    peek(found, read_as)
    return RECIPE.format(
        dest=dest,
        name=_run_name(model, data),
        model=yaml_text(model),
        path=yaml_text(_path_from_recipe(data, found, dest)),
        form=form,
        fields=_one_line(describe_columns(found, read_as)),
        columns=f"  columns: {yaml_text(columns)}\n" if columns else "",
        seq_len=_sequence_length(model),
        long_rows=long_row_treatment(read_as),
        strategy=DEFAULT_STRATEGY,
        strategies=", ".join(Strategy),
    )


def _path_from_recipe(data: str, found: str, dest: Path) -> str:
    """Return the data's path relative to the recipe's folder; unchanged when it is absolute or a Hub id."""
    if found == data or data.startswith("~") or Path(data).is_absolute():
        return data
    return os.path.relpath(found, dest.parent.absolute())


def _run_name(model: str, data: str) -> str:
    words = [Path(model.rstrip("/")).name, Path(data.rstrip("/")).name.partition(".")[0]]
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-.") or "run"


def _sequence_length(model: str, usual: int = 2048) -> int:
    """Return the usual sequence length, or the model's limit when that is lower and `model` is a folder."""
    try:
        limit = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return usual
    return min(usual, limit) if isinstance(limit, int) and limit >= 8 else usual


def _one_line(text: str) -> str:
    """Return a text without line breaks, shortened, for a comment."""
    return shortened(" ".join(text.split()))
