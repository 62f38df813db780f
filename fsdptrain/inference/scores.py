"""The loss of a model on files: the mean over all label tokens, as a run's evaluation computes it on held-out rows.

Every piece of a row is computed by itself, so that it does not matter how an architecture tells packed documents apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from fsdptrain.config.formats import Format, guess_format
from fsdptrain.config.paths import find_data, path_fault
from fsdptrain.config.schema import Data
from fsdptrain.data.columns import peek, seam_without_space, unknown_columns_error
from fsdptrain.data.corpus import IGNORED, Batch, Corpus, notes_on_rows, open_rows, pack_rows
from fsdptrain.data.sources import first_source, readable_files
from fsdptrain.errors import DataError, NoData, NonFiniteError, Problem, RecipeError
from fsdptrain.folder.events import Progress, progress_record
from fsdptrain.folder.storage import url_fault
from fsdptrain.inference.opened import OpenedModel
from fsdptrain.model.config import longrope_threshold, position_limit
from fsdptrain.model.units import nonfinite_names, nonfinite_note
from fsdptrain.terminal.page import Page
from fsdptrain.terminal.screen import Screen

TOKENS = 2048  # of the pieces that are computed at a time, unless one has more
LOGITS = 2**24  # that are converted to float32 at a time
DEFAULT_SEQ_LEN = 2048  # or as many positions as the model has


@dataclass(frozen=True)
class Score:
    """What a model scored on some data: the sum of the losses of its label tokens, and their number."""

    rows: int
    tokens: int
    total: float

    def report(self) -> dict[str, Any]:
        """Return it for JSON."""
        loss = self.total / self.tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": self.tokens, "rows": self.rows}


@dataclass(frozen=True)
class ReadAs:
    """How rows are read, as the command line says: None, or no columns, where it says nothing."""

    form: str | None = None
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    seq_len: int | None = None


def score_files(opened: OpenedModel, paths: Sequence[str], read_as: ReadAs, screen: Screen) -> dict[str, Any]:
    """Return loss and perplexity on each path and in all, ready for JSON; see `places_of_data` for the paths.

    Raises DataError for rows that cannot be read, and NonFiniteError for weights that are not finite.
    """

    def progress(stage: str, done: int, total: int) -> None:
        screen.show(progress_record(stage, done, total))

    scores, files = [], []
    for path, place in zip(paths, places_of_data(paths), strict=True):
        readable_files(place, progress=progress)  # downloads what is in an object store
        try:
            data = data_of(opened, place, read_as)
            rows = open_rows(place, data, opened.tokenizer, None, progress, opened.day(data))
        except DataError as error:
            if "columns" in str(error):
                error.add_note("Here data.format and data.columns are the options --format and --column.")
            raise
        (corpus,) = pack_rows(rows, data, seed=0)
        total, tokens = summed_loss(opened.model, corpus, progress)
        if not math.isfinite(total) and (names := nonfinite_names(opened.model)):
            raise NonFiniteError(f"{opened.name}: {nonfinite_note(names)}")
        scores.append(Score(rows.notes["rows"], tokens, total))
        notes = list(itertools.chain(*notes_on_rows(corpus)))
        files.append({"path": path, **scores[-1].report(), "notes": notes})
    everything = Score(*(sum(values) for values in zip(*map(dataclasses.astuple, scores), strict=True)))
    return {"model": opened.name, "files": files, "all": everything.report()}


def places_of_data(paths: Sequence[str]) -> list[str]:
    """Return the files, globs, folders, URLs or Hub data sets of `--data`; raises RecipeError or NoData for others."""
    if fault := next((fault for path in paths if (fault := path_fault(path) or url_fault(path))), None):
        raise RecipeError([Problem(fault, "--data")])
    try:
        return [find_data(path, Path.cwd()) for path in paths]
    except NoData as error:
        raise NoData(str(error).replace("data.path", "--data", 1)) from None


def data_of(opened: OpenedModel, place: str, read_as: ReadAs) -> Data:
    """Return how the rows of a path are read: by the command line, else by the run's recipe, else by their columns."""
    seq_len = read_as.seq_len or (opened.data.seq_len if opened.data else None)
    if seq_len is None:
        seq_len = min(DEFAULT_SEQ_LEN, position_limit(opened.model.config) or DEFAULT_SEQ_LEN)
    if opened.data and read_as.form is None and not opened.data.format.is_paired:
        columns = opened.data.columns | read_as.columns
        return dataclasses.replace(opened.data, seq_len=seq_len, columns=columns)
    likely = guess_format([*first_source(place).columns, *read_as.columns])  # fields that are named, too
    if read_as.form is None and likely is None:
        raise unknown_columns_error(place)
    form = likely[0] if likely and read_as.form is None else next(each for each in Format if each == read_as.form)
    if form.is_paired:
        raise RecipeError(
            f"{place} has two answers in a row: say which is read, such as --format prompt_completion --column "
            "completion=chosen"
        )
    columns = likely[1] if likely and likely[0] is form else {}
    data = Data(format=form, columns={**columns, **read_as.columns}, seq_len=seq_len)
    if form.is_chat and opened.tokenizer.chat_template is None:
        raise RecipeError(f"{opened.name} has no chat template, which conversations ({place}) need")
    if form.has_prompt and seam_without_space(peek(place, data)[1], data):
        data.separator = "\n"
    return data


def summed_loss(model: Any, corpus: Corpus, progress: Progress) -> tuple[float, int]:
    """Return the cross-entropy summed over the label tokens of a corpus, and their number."""
    total, tokens, done = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches(corpus, longrope_threshold(model.config, corpus.seq_len) is not None):
            loss, count = batch_loss(model, batch)
            total, tokens, done = total + loss, tokens + count, done + len(batch["labels"])
            progress("evaluating", done, len(corpus.pieces))
    return total, tokens


def batches(corpus: Corpus, alone: bool) -> Iterator[Batch]:
    """Yield all pieces, each in a row of its own, with those of similar length, padded; `alone`: one at a time."""
    pieces = corpus.pieces[np.argsort(-corpus.pieces[:, 1], kind="stable")]
    first = 0
    while first < len(pieces):
        longest = int(pieces[first, 1])
        some = pieces[first : first + (1 if alone else max(1, TOKENS // longest))]
        first += len(some)
        rows = dataclasses.replace(corpus, pieces=some, offsets=np.arange(len(some) + 1), seq_len=longest)
        yield rows.batch(range(len(some)))


def batch_loss(model: Any, batch: Batch) -> tuple[float, int]:
    """Return the cross-entropy summed over the labels of a batch, in float32, and their number."""
    # No positions and no mask: every row is one document, and its padding is behind it.
    logits = model(input_ids=batch["input_ids"].to(model.device), use_cache=False).logits.flatten(0, 1)
    labels = batch["labels"].flatten().to(logits.device)
    parts = -(-logits.numel() // LOGITS)
    losses = [
        functional.cross_entropy(some.float(), wanted, ignore_index=IGNORED, reduction="sum")
        for some, wanted in zip(logits.tensor_split(parts), labels.tensor_split(parts), strict=True)
    ]
    return float(torch.stack(losses).double().sum()), int((labels != IGNORED).sum())


def show_scores(found: dict[str, Any], page: Page) -> None:
    """Print one line for each file and, if there are several, one for all."""
    page.say(found["model"])
    header = ["data", "loss", "perplexity", "label tokens", "rows"]
    rows = [
        [
            each.get("path", "all"),
            f"{each['loss']:.4f}",
            f"{each['perplexity']:.2f}",
            f"{each['tokens']:,}",
            f"{each['rows']:,}",
        ]
        for each in [*found["files"], found["all"]]
    ]
    page.table(header, rows if len(found["files"]) > 1 else rows[:1])
    for each in found["files"]:
        for note in each["notes"]:
            page.say(f"{each['path']}: {note}")
