"""The loss of a model on files, as a run's evaluation computes it on held-out rows: the mean over all units of the
run's objective, and its measures.

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
from fsdptrain.config.mixture import reading, sources_of
from fsdptrain.config.objectives import DEFAULT_OBJECTIVE, SHOWN, Objective
from fsdptrain.config.paths import find_data, path_fault, places
from fsdptrain.config.schema import Data
from fsdptrain.data.columns import peek, seam_without_space, unknown_columns_error
from fsdptrain.data.corpus import IGNORED, Batch, Corpus, Ints
from fsdptrain.data.prepare import notes_on_rows, open_rows, pack_rows
from fsdptrain.data.sources import first_source, readable_files
from fsdptrain.errors import DataError, NonFiniteError, Problem, RecipeError
from fsdptrain.inference.opened import OpenedModel
from fsdptrain.model.config import longrope_threshold, position_limit
from fsdptrain.model.objectives import answers_loss, sum_answers
from fsdptrain.model.units import nonfinite_names, nonfinite_note
from fsdptrain.run_folder.events import Progress, progress_record
from fsdptrain.run_folder.storage import url_fault
from fsdptrain.terminal.page import Page
from fsdptrain.terminal.screen import Screen

TOKENS = 2048  # of the pieces that are computed at a time, unless one has more
LOGITS = 2**24  # that are converted to float32 at a time
DEFAULT_SEQ_LEN = 2048  # or as many positions as the model has


@dataclass(frozen=True)
class Score:
    """What a model scored on rows with so many label tokens; `units` are those of `Objective.unit`.

    `totals` are sums over the units: of their losses and, of answers, of the measures of the run's objective, and
    how many units have each of these.
    """

    rows: int
    tokens: int
    units: int
    totals: np.ndarray[Any, Any]

    def report(self, objective: Objective) -> dict[str, Any]:
        """Return it for JSON."""
        loss, measures = float(self.totals[0]) / self.units, self.totals[1:].reshape(2, -1)
        found = objective.means(*measures.tolist()) if measures.size else {"perplexity": math.exp(min(loss, 700.0))}
        return {"loss": loss, **found, "tokens": self.tokens, "rows": self.rows}


@dataclass(frozen=True)
class ReadAs:
    """How rows are read, as the command line says: None, or no columns, where it says nothing."""

    form: str | None = None
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    seq_len: int | None = None
    source: str | None = None


def score_files(opened: OpenedModel, paths: Sequence[str], read_as: ReadAs, screen: Screen) -> dict[str, Any]:
    """Return loss and perplexity, or measures, on each path (a value of `--data`) and in all, for JSON.

    Raises DataError for rows that cannot be read, RecipeError if only some of the paths have answers to judge, and
    NonFiniteError for weights that are not finite.
    """

    def progress(stage: str, done: int, total: int) -> None:
        screen.show(progress_record(stage, done, total))

    scores, files = [], []
    objective = opened.plan.recipe.train.objective if opened.plan else DEFAULT_OBJECTIVE
    for path, place in zip(paths, _places_of_data(paths), strict=True):
        readable_files(place, progress=progress)  # downloads what is in an object store
        try:
            data = _data_of(opened, place, read_as)
            rows = open_rows(place, data, opened.tokenizer, None, progress, opened.day(data))
        except DataError as error:
            if "columns" in str(error):
                error.add_note("Here data.format and data.columns are the options --format and --column.")
            raise
        (corpus,) = pack_rows(rows, data, seed=0)
        scores.append((_score_answers if corpus.answers else _score_rows)(opened, corpus, progress))
        if not np.isfinite(scores[-1].totals).all() and (names := nonfinite_names(opened.model)):
            raise NonFiniteError(f"{opened.name}: {nonfinite_note(names)}")
        if len(scores[0].totals) != len(scores[-1].totals):
            raise RecipeError(
                f"--data: one of {paths[0]} and {path} has {objective.unit}s: evaluate them one after the other"
            )
        notes = list(itertools.chain(*notes_on_rows(corpus)))
        files.append({"path": path, **scores[-1].report(objective), "notes": notes})
    everything = Score(*(sum(values) for values in zip(*map(dataclasses.astuple, scores), strict=True)))
    return {"model": opened.name, "files": files, "all": everything.report(objective)}


def _places_of_data(paths: Sequence[str]) -> list[str]:
    if fault := next((fault for path in paths if (fault := path_fault(path) or url_fault(path))), None):
        raise RecipeError([Problem(fault, "--data")])
    return [find_data(path, Path.cwd(), key="--data") for path in paths]


def _data_of(opened: OpenedModel, place: str, read_as: ReadAs) -> Data:
    """Return how the rows of a path are read: as those of a source of the run, else as their columns say.

    What the command line says goes first.
    """
    seq_len = min(DEFAULT_SEQ_LEN, position_limit(opened.model.config) or DEFAULT_SEQ_LEN)
    seq_len = read_as.seq_len or (opened.data.seq_len if opened.data else seq_len)
    data = _as_the_run_reads(opened, place, read_as) or _as_columns_say(opened, place, read_as)
    return dataclasses.replace(data, seq_len=seq_len)


def _as_the_run_reads(opened: OpenedModel, place: str, read_as: ReadAs) -> Data | None:
    """Return how the run reads such rows; None if it has another format, or answers that these rows have not."""
    source, data = opened.source(read_as.source), opened.data
    if data is None or source is None:
        return None
    read = reading(data, source, read_as.columns)
    if read_as.source is not None:
        return read
    if data.sources and read_as.form is None:
        names = [each.name for each in sources_of(data)]
        raise RecipeError(f"{place}: name the source as whose rows it is read with --source: {', '.join(names)}")
    if data.sources or read_as.form not in (None, read.format):
        return None
    needed = [column for field in read.format.fields for column in places(read.columns.get(field, field))]
    fits = {*needed} <= {*first_source(place).columns}
    # Where a column is missing the error names it.
    return read if fits or not (read_as.form or read.format.answers) else None


def _as_columns_say(opened: OpenedModel, place: str, read_as: ReadAs) -> Data:
    likely = guess_format([*first_source(place).columns, *read_as.columns])  # fields that are named, too
    if read_as.form is None and likely is None:
        raise unknown_columns_error(place)
    form = likely[0] if likely and read_as.form is None else next(each for each in Format if each == read_as.form)
    if form.has_label:
        raise RecipeError(
            f"{place} has judged answers, which only a run with such an objective compares: keep the good ones, "
            "without the column of labels"
        )
    if form.answers:
        raise RecipeError(
            f"{place} has two answers in a row: say which is read, such as --format prompt_completion --column "
            "completion=chosen"
        )
    columns = likely[1] if likely and likely[0] is form else {}
    data = Data(format=form, columns={**columns, **read_as.columns})
    if form.is_chat and opened.tokenizer.chat_template is None:
        raise RecipeError(f"{opened.name} has no chat template, which conversations ({place}) need")
    if form.has_prompt and seam_without_space(peek(place, data)[1], data):
        data.separator = "\n"
    return data


def _score_rows(opened: OpenedModel, corpus: Corpus, progress: Progress) -> Score:
    total, tokens = 0.0, 0
    for log_probs, _ in _log_probs(opened.model, corpus, progress):
        total, tokens = total - float(log_probs.double().sum()), tokens + len(log_probs)
    return Score(corpus.notes["rows"], tokens, tokens, np.array([total]))


def _score_answers(opened: OpenedModel, corpus: Corpus, progress: Progress) -> Score:
    """Return the score by the objective of the run; the reference is the model with which the run began."""
    assert opened.plan is not None
    train = opened.plan.recipe.train
    sets = [corpus, _mismatched(corpus)] if train.objective.estimates_kl else [corpus]
    own = [_judged(opened.model, each, progress) for each in sets]
    if train.objective.needs_reference:
        with opened.reference() as reference:
            for (_, batch), each in zip(own, sets, strict=True):
                batch["reference"] = sum_answers(*_judged(reference, each, progress), None).sums
    log_probs, batch = own[0]
    for others in own[1:]:
        batch["kl"] = sum_answers(*others, None).ratios.mean().clamp(min=0)
        batch["desirable"] = torch.from_numpy(np.concatenate([*map(corpus.desirable, range(len(corpus)))]))
    loss, measures = answers_loss(train, log_probs, batch, 1)
    totals = np.array([float(loss), *measures.flatten().tolist()])
    return Score(corpus.notes["rows"], len(log_probs), corpus.divisor(range(len(corpus))), totals)


def _judged(model: Any, corpus: Corpus, progress: Progress) -> tuple[torch.Tensor, Any]:
    """Return the log-probability of each label, and what `sum_answers` reads of a batch: to which answer it belongs."""
    log_probs, answers = (torch.cat(each) for each in zip(*_log_probs(model, corpus, progress), strict=True))
    return log_probs, {"answers": answers, "labels": answers, "reference": torch.zeros(len(corpus.pieces))}


def _mismatched(corpus: Corpus) -> Corpus:
    """Return a corpus of the mismatched rows, in the order of the pieces."""
    tokens, labels = zip(*map(corpus.mismatched, corpus.pieces), strict=True)
    trained = np.concatenate([np.append(False, row != IGNORED) for row in labels])
    lengths = np.array([len(row) for row in tokens])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    pieces = np.stack([ends[:-1], lengths, ends[1:]], axis=1)
    return dataclasses.replace(corpus, tokens=np.concatenate(tokens), trained=trained, ends=ends, pieces=pieces)


def _log_probs(model: Any, corpus: Corpus, progress: Progress) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, some pieces at a time, the log-probability of each label, float32, and the number of its piece."""
    done, alone = 0, longrope_threshold(model.config, corpus.seq_len) is not None
    for numbers, batch in _batches(corpus, alone):
        labels = batch["labels"]
        with torch.no_grad():
            log_probs = _batch_log_probs(model, batch)
        yield log_probs[labels.flatten() != IGNORED], torch.from_numpy(numbers)[torch.nonzero(labels != IGNORED)[:, 0]]
        progress("evaluating", done := done + len(numbers), len(corpus.pieces))


def _batches(corpus: Corpus, alone: bool) -> Iterator[tuple[Ints, Batch]]:
    """Yield the numbers of pieces of similar length, and those pieces as rows, padded; `alone`: one at a time."""
    order, first = np.argsort(-corpus.pieces[:, 1], kind="stable"), 0
    while first < len(order):
        longest = int(corpus.pieces[order[first], 1])
        some = order[first : first + (1 if alone else max(1, TOKENS // longest))]
        first += len(some)
        rows = dataclasses.replace(
            corpus, pieces=corpus.pieces[some], offsets=np.arange(len(some) + 1), seq_len=longest, answers=0
        )
        yield some, rows.batch(range(len(some)))


def _batch_log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probability of the label of each position, float32 on the CPU; 0 where there is none."""
    # No positions and no mask: every row is one document, and its padding is behind it.
    logits = model(input_ids=batch["input_ids"].to(model.device), use_cache=False).logits.flatten(0, 1)
    labels = batch["labels"].flatten().to(logits.device)
    parts = -(-logits.numel() // LOGITS)
    losses = [
        functional.cross_entropy(some.float(), wanted, ignore_index=IGNORED, reduction="none")
        for some, wanted in zip(logits.tensor_split(parts), labels.tensor_split(parts), strict=True)
    ]
    return -torch.cat(losses).cpu()


def show_scores(found: dict[str, Any], page: Page) -> None:
    """Print one line for each file and, if there are several, one for all."""
    page.say(found["model"])
    columns = {
        "loss": ("loss", ".4f"), "perplexity": ("perplexity", ".2f"), **SHOWN,
        "tokens": ("label tokens", ","), "rows": ("rows", ","),
    }  # fmt: skip
    shown = {name: how for name, how in columns.items() if name in found["all"]}
    header = ["data", *(title for title, _ in shown.values())]
    rows = [
        [each.get("path", "all"), *(format(each[name], form) for name, (_, form) in shown.items())]
        for each in [*found["files"], found["all"]]
    ]
    page.table(header, rows if len(found["files"]) > 1 else rows[:1])
    for each in found["files"]:
        for note in each["notes"]:
            page.say(f"{each['path']}: {note}")
