"""A first recipe for some data and a model, with comments: `fsdptrain init`.

Its sizes are chosen from the data in a dry run, and on GPUs its plan by a search.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdptrain.config.keys import flat, yaml_text
from fsdptrain.config.objectives import DEFAULT_OBJECTIVE, Objective
from fsdptrain.config.paths import DataPath, find_all_data, is_folder, model_name_fault, path_fault, places
from fsdptrain.config.reader import LoadedRecipe, parse
from fsdptrain.config.schema import Data, Recipe, Treatment
from fsdptrain.config.strategy import Strategy
from fsdptrain.data.columns import describe_columns, likely_format, peek, seam_without_space, unknown_columns_error
from fsdptrain.data.corpus import fill_sequences
from fsdptrain.data.sources import first_source, held_out_files
from fsdptrain.errors import Problem, RecipeError, shortened
from fsdptrain.run_folder.files import unused_name
from fsdptrain.run_folder.storage import url_fault
from fsdptrain.terminal.page import Page
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import counted, duration, one_line, seconds, size
from fsdptrain.validation.findings import Outcome, show_notes, show_section
from fsdptrain.validation.request import make_request, run_dry_run

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
{columns}  seq_len: {keys[data.seq_len]} # tokens of a sequence; rows are packed into sequences, and longer ones are \
{long_rows}
  {held_out}

{forecast}fsdp:
  strategy: {keys[fsdp.strategy]} # one of {strategies}
  activation_checkpointing: {keys[fsdp.activation_checkpointing]} # selective or full: less memory, more time
{fsdp}{parallel}
optim: {{lr: {rate}}}
train:
{objective}  epochs: {keys[train.epochs]}
  global_batch_size: {keys[train.global_batch_size]} # sequences of one optimizer step, over all ranks
  micro_batch_size: {keys[train.micro_batch_size]} # sequences that a rank computes at a time
checkpoint: {{every: {keys[checkpoint.every]}}} # steps
log: {{every: {keys[log.every]}}} # steps
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
        written = {path: yaml_text(value) for path, value in (flat(Recipe()) | dict(keys)).items()}
        fraction, every = (keys.get("data.eval") or {}).get("fraction"), keys.get("eval.every")
        held_out = f"eval: {{fraction: {fraction}}} # share of the tokens to hold out" if fraction else NOT_HELD_OUT
        if self.held_out:
            held_out, every = f"eval: {{path: {yaml_text(self.held_out)}}}", every or written["checkpoint.every"]
        extras = {"columns": self.read_as.columns, "separator": self.read_as.separator}
        more = {"fsdp": "", "parallel": ""}  # the other keys that a search has set
        for path, value in keys.items():
            section, _, name = path.partition(".")
            if section in more and f"{{keys[{path}]}}" not in RECIPE and value is not None:
                more[section] += f"  {name}: {written[path]}\n"
        stems = Path(self.model.rstrip("/")).name, Path(places(self.path)[0].rstrip("/")).name.partition(".")[0]
        name = re.sub(r"[^a-z0-9.]+", "-", "-".join(stems).lower()).strip("-.")
        rate, objective = "2e-5", ""
        if (usual := Objective.usual(self.read_as.format)) is not DEFAULT_OBJECTIVE:
            rate, objective = "1e-6", f"  objective: {usual} # {usual.says}\n"
        text = RECIPE.format(
            keys=written,
            dest=self.dest,
            name=unused_name(Path("runs") / (name or "run")).name,
            model=yaml_text(self.model),
            path=yaml_text(self.path),
            form=self.read_as.format,
            fields=one_line(self.described),
            columns="".join(f"  {name}: {yaml_text(value)}\n" for name, value in extras.items() if value),
            long_rows=self.read_as.treatment,
            held_out=held_out,
            forecast="".join(f"# {line}\n" for line in forecast),
            strategies=", ".join(Strategy),
            fsdp=more["fsdp"],
            parallel=more["parallel"] and f"parallel:\n{more['parallel']}",
            rate=rate,
            objective=objective,
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
    # Relative to the recipe's folder, unless a path is absolute or a Hub id.
    held_out, folder, written_out = held_out_files(found), dest.parent.absolute(), []
    for given, path in zip(data, [found] if isinstance(found, str) else found, strict=True):
        is_kept = path == given or given.startswith("~") or Path(given).is_absolute()
        written_out.append(given if is_kept else os.path.relpath(path, folder))
    if held_out and written_out[0] == os.path.relpath(str(found), folder):
        held_out = os.path.relpath(held_out, folder)
    read = describe_columns(found, read_as)
    return Starter(dest, model, written_out[0] if len(written_out) == 1 else written_out, read_as, read, held_out)


def _missing_model(model: str) -> str | None:
    """Return what is wrong with a name that could be a Hub id, but is a path on this machine; None for nothing."""
    if is_folder(model):
        return None if (Path(model) / "config.json").is_file() else f"{shortened(model)!r} has no config.json"
    folder = model.rpartition("/")[0]
    return f"{shortened(model)!r} does not exist in the folder {folder}" if folder and is_folder(folder) else None


COVERED = 0.99  # share of the rows that are not longer than a sequence, if a few are much longer
FILLED = 0.85  # share of the tokens of sequences that are not padding, if rows and steps allow
LONGEST = {"split": 2048, "cut": 8192, "drop": 8192, "continued": 2048}  # tokens of a sequence, by `Data.treatment`
STEP_TOKENS = 2**17  # of an optimizer step, if there are enough
MICRO_TOKENS = 2**11  # of a micro-batch, before a search for the fastest plan
STEPS = 100  # that a run should have at least
FEWEST_STEPS = 10  # that longer sequences must leave
FEW, FEW_ROWS = 800, 2000  # sequences, or rows; below, an epoch has not enough for STEPS of a useful size
FEWEST_ROWS = 50  # of which some are held out
MOST_ROWS = 200_000  # that are read; of more data, the sizes are chosen from the first of them
SAMPLED = 2000  # rows that are packed to see how well they fill sequences


@dataclass(frozen=True)
class RowLengths:
    """What is known of the data: tokens of every row that was read [R], and how many rows there are in all."""

    lengths: np.ndarray[Any, Any]
    available: int

    def tokens(self, seq_len: int, treatment: Treatment) -> int:
        """Return how many tokens all rows have in sequences of `seq_len`, extrapolated from those that were read."""
        lengths = self.lengths
        kept = {"cut": np.minimum(lengths, seq_len), "drop": lengths[lengths <= seq_len]}.get(treatment, lengths)
        return round(float(kept.sum()) * self.available / len(lengths))


def choose_sizes(
    rows: RowLengths, treatment: Treatment, positions: int | None, ranks: int, held_out: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return keys of a recipe for these rows: dotted path → value.

    `positions` is the longest sequence that the model supports, None if there is no limit; the batch divides over
    `ranks`. `held_out` is the recipe's `data.eval`, None to choose one.
    """
    limit = LONGEST[treatment] if positions is None else min(positions, LONGEST[treatment])
    seq_len, sequences = _sequence_length(rows, treatment, limit, ranks)
    units = rows.available if treatment in ("cut", "drop") else max(rows.available, sequences)
    epochs = _epochs(units, sequences)
    if held_out is None and units >= FEWEST_ROWS:
        fraction = 0.1 if units < 1000 else 0.05 if units < 20_000 else 0.01
        held_out, sequences = {"fraction": fraction}, max(1, math.floor(sequences * (1 - fraction)))
    # A multiple of `ranks` that gives STEPS if possible, at most an epoch.
    wanted = min(epochs * sequences // STEPS, STEP_TOKENS // seq_len, sequences)
    batch = ranks * _power_of_two_below(wanted // ranks)
    steps = math.ceil(epochs * sequences / batch)
    micro = _power_of_two_below(min(batch // ranks, MICRO_TOKENS // seq_len))  # divides another power of two
    return {
        "data.seq_len": seq_len,
        "data.eval": held_out,
        "eval.every": _round_down(steps / 10) if held_out else None,
        "train.epochs": epochs,
        "train.global_batch_size": batch,
        "train.micro_batch_size": micro,
        "checkpoint.every": _round_down(min(500, steps / 2)),
        "log.every": 1 if steps < 5000 else 10,
    }


def _sequence_length(rows: RowLengths, treatment: Treatment, limit: int, ranks: int) -> tuple[int, int]:
    """Return the tokens of a sequence, at most `limit`, and how many sequences the rows fill.

    It is the first multiple of 64, or of 128 above 1,024, that covers nearly all rows, or all if none is much longer,
    and that rows fill well; else the one that they fill best, as long as there are FEWEST_STEPS.
    """
    usual, longest = np.quantile(rows.lengths, COVERED), rows.lengths.max()
    covering = math.ceil(longest if longest <= 2 * usual else usual)
    multiple = 64 if covering <= 1024 else 128
    least = max(8, min(-(-covering // multiple) * multiple, limit))
    found = best = (0.0, least, 0)
    for seq_len in range(least, max(least, min(limit, MICRO_TOKENS)) + 1, multiple):
        sequences = _packed(rows, seq_len, treatment)
        found = (rows.tokens(seq_len, treatment) / (sequences * seq_len), seq_len, sequences)
        if seq_len > least and _epochs(rows.available, sequences) * sequences < FEWEST_STEPS * ranks:
            break
        best = max(best, found)
        if best[0] >= FILLED:
            break
    return best[1:]


def _packed(rows: RowLengths, seq_len: int, treatment: Treatment) -> int:
    """Return how many sequences all rows fill, extrapolated from SAMPLED of them, packed as a run packs them."""
    sample = np.random.default_rng(0).permutation(rows.lengths)[:SAMPLED].astype(np.int64)
    whole, rest = np.divmod(sample, seq_len)
    if treatment in ("cut", "drop"):
        fits = sample < seq_len
        whole, rest = (sample == seq_len if treatment == "drop" else ~fits), np.where(fits, sample, 0)
    packed = int(whole.sum()) + sum(1 for _ in fill_sequences(rest[rest > 0].tolist(), seq_len))
    return max(1, math.ceil(packed * rows.available / len(sample)))


def _epochs(rows: int, sequences: int) -> int:
    return 1 if rows >= FEW_ROWS or sequences >= FEW else 3


def _power_of_two_below(number: int) -> int:
    """Return the largest power of two that is not larger than `number`; 1 for less."""
    return 1 << max(0, number.bit_length() - 1)


def _round_down(number: float) -> int:
    """Return a round number of steps: 1, 2 or 5 times a power of ten, not larger than `number`; 1 for less."""
    power = 10 ** max(0, math.floor(math.log10(max(number, 1))))
    return next((factor * power for factor in (5, 2, 1) if factor * power <= number), 1)


def propose(starter: Starter, hardware: str | None, screen: Screen) -> tuple[str | None, list[str], Outcome]:
    """Return a recipe for all rows of the data, and for the GPUs of this machine or `hardware` with the fastest plan.

    Its text is None if the data or the model cannot be used. With it come lines on the forecast of the plan, and the
    outcome of the dry run. Raises RecipeError for unknown hardware.
    """
    topology = make_request(_parsed(starter, starter.text({})), hardware).plan.topology
    on_gpus, written = topology.device == "cuda", starter.text({"train.global_batch_size": topology.world_size})
    request = make_request(_parsed(starter, written), hardware, choose=True, build=on_gpus, advise=on_gpus)
    outcome = run_dry_run(request, screen)
    chosen = outcome.report.get("chosen")
    if chosen is None:
        return None, [], outcome
    found = outcome.report.get("advice", {}).get("options", [])
    forecast: list[str] = []
    if best := next((option for option in found if option["fits"]), None):
        forecast, chosen = _forecast_lines(best, outcome, hardware), chosen | best["overrides"]
    text = starter.text(chosen, forecast)
    return _parsed(starter, text).text, forecast, outcome


def _parsed(starter: Starter, text: str) -> LoadedRecipe:
    return parse(text, starter.dest.name, starter.dest.parent.absolute(), [])


def _forecast_lines(best: dict[str, Any], outcome: Outcome, hardware: str | None) -> list[str]:
    """Return what the search found, for a comment and for the screen."""
    tried, cards = counted(outcome.report["advice"]["tried"] + 1, "plan"), hardware or "the GPUs of this machine"
    lines = [
        f"the fastest of {tried} for {cards}, by forecast: {size(best['needed_bytes'])} of "
        f"{size(best['memory_bytes'])} a GPU, {seconds(best['step_s'])} s a step, MFU {best['mfu']:.0%}"
    ]
    rows = outcome.report.get("data", {})
    if "steps" in rows and rows["rows"] < MOST_ROWS:  # else the steps may be those of a part of the data
        lines.append(f"{counted(rows['steps'], 'step')} take about {duration(rows['steps'] * best['step_s'])}")
    return lines


def show_proposal(forecast: list[str], outcome: Outcome, page: Page) -> None:
    """Print what the data is, how the plan was chosen, and notes."""
    for heading, items in outcome.sections:
        if heading == "Data":
            show_section(heading, items, page)
    if forecast:
        show_section("Plan", [{"kind": "text", "text": line} for line in forecast], page)
    show_notes([*(note for note in outcome.notes if not note.startswith("not checked here")), *outcome.problems], page)
