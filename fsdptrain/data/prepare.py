"""Rows → tokens → packed sequences, before any process group exists: in a run, or ahead of it (`fsdptrain prepare`).

The cache holds folders of flat, memory-mapped arrays, named by a digest of what they were made from: the tokens, and
for each seed how they are packed. So the ranks of a node share one copy and a second run starts at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from fsdptrain.config.mixture import reading, source_named
from fsdptrain.config.paths import DataPath, cache_root, places
from fsdptrain.config.schema import Data
from fsdptrain.data.cache import cached_folder
from fsdptrain.data.corpus import (
    Corpus,
    EncodedRows,
    Interleave,
    Ints,
    Mixture,
    Stream,
    cut_and_pack,
    split_pairs,
)
from fsdptrain.data.encode import OF_TURNS
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.data.resume_pins import date_note, pin_commits, pin_date, pinned_windows
from fsdptrain.data.sources import (
    DIGEST_FILE,
    data_stamps,
    fingerprint,
    quick_fingerprint,
    readable_files,
    splits_note,
)
from fsdptrain.data.token_store import TokenArray, encode_parts, join, parts_of, token_key, unread_in
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.data.windows import (
    WindowStream,
    estimated_length,
    of_first_window,
    of_window,
    place_in_window,
    windows_note,
)
from fsdptrain.errors import DataError, listed
from fsdptrain.plan.plan import LAYOUT, Plan
from fsdptrain.processes import Child, records_of_parent
from fsdptrain.run_folder.events import Progress
from fsdptrain.text import counted, share, size

NICENESS = 19  # of the process that prepares the next window


def open_stream(
    plan: Plan, tokenizer: Any, progress: Progress, count_padding: bool = True, day: date | None = None
) -> tuple[Stream, list[int], Corpus | Mixture]:
    """Return what `prepare` returns; with several windows (`data.window`), of the one in which the run continues.

    Raises as `prepare` does, and as `WindowStream.part`.
    """
    of_first, windows = of_first_window(plan)
    if len(windows) == 1:
        return prepare(of_first, tokenizer, progress, count_padding, day)

    def make(number: int) -> Corpus:
        stream, *_ = prepare(_alone(plan, windows[number]), tokenizer, lambda *_: None, count_padding, day)
        return stream.part(0)

    listing, pinned = quick_fingerprint(plan.data_path, 0), pinned_windows(plan.rundir)
    known = pinned["read"] if pinned.get("files") == listing else []  # else the run is refused, if it is resumed
    made = max(plan.rundir.checkpoint_steps(), default=0) * plan.recipe.train.global_batch_size
    place = place_in_window(known, len(windows), made)
    number = place[1] if place else len(known)
    opened, held_out, eval_corpus = prepare(of_window(plan, windows[number]), tokenizer, progress, count_padding, day)
    corpus = opened.part(0)
    # What identifies the data is of the first window, and so is the size of the whole: every start finds the same.
    first: dict[str, Any] = known[0] if known else {"sequences": len(corpus), "tokens": corpus.digest}
    # Its files are not opened, which would keep them on the disk after the window has left the cache.
    corpus = dataclasses.replace(corpus, fingerprint=listing, digest=first["tokens"])
    length = estimated_length(windows, first["sequences"])
    stream = WindowStream(corpus, plan.recipe.seed, Interleave((1,), 0), length, windows, make, known)
    stream.part(number)
    return stream, held_out, eval_corpus


def prepare_in_child(plan: Plan, files: Iterable[str], cores: Iterable[int]) -> Child:
    """Start a process that prepares a window for those that will open it, on these cores, when they are idle."""
    child = Child(__name__, niceness=NICENESS)
    child.send({"plan": _alone(plan, files).to_json(), "cores": [*cores]})
    return child


def _alone(plan: Plan, files: Iterable[str]) -> Plan:
    """Return the plan of a later window, without the held-out rows, which are read once."""
    return dataclasses.replace(of_window(plan, files), eval_path=None)


def main() -> None:
    """Prepare the data of a plan that the parent sends. What goes wrong is reported by the ranks, which try it, too."""
    record = next(records_of_parent())
    os.sched_setaffinity(0, record["cores"])
    plan = Plan.from_json(record["plan"])
    tokenizer = load_tokenizer(plan, lambda *_: None)
    prepare(plan, tokenizer, lambda *_: None, day=pin_date(plan, tokenizer, plan.rundir, keep=False))


def prepare(
    plan: Plan, tokenizer: Any, progress: Progress, count_padding: bool = True, day: date | None = None
) -> tuple[Stream, list[int], Corpus | Mixture]:
    """Return the training stream, the held-out sequence numbers and their corpus; `count_padding` as in `Corpus`.

    With `data.eval.fraction` and several sources, that corpus has a part for each. `day` is what a chat template sees
    as today. Raises DataError for wrong rows, and when no row of a source has a trained token.
    """
    seed, wanted = plan.recipe.seed, plan.recipe.data.eval or {}

    def packed(data: Data, max_rows: int | None, fraction: float | None = None) -> list[Corpus]:
        rows = open_rows(data.path, data, tokenizer, max_rows, progress, day)
        found = pack_rows(rows, data, seed, fraction)
        return [dataclasses.replace(each, count_padding=count_padding) for each in found]

    trained, held_out = list[Corpus](), list[Corpus]()
    for source in plan.sources:
        with errors_of(source.name if plan.recipe.data.sources else None):
            train, *held = packed(source.data, source.data.max_rows, wanted.get("fraction"))
        trained.append(train)
        held_out += held
    if plan.eval_path is not None:
        data = dataclasses.replace(plan.recipe.data, path=plan.eval_path, window=None)
        if data.sources:
            data = reading(data, source_named(data, wanted["source"]))
        held_out += packed(data, wanted.get("max_rows"))
    stream = Stream.of(plan.sources, trained, seed)
    corpus = Mixture.of(held_out) if held_out else stream.corpus
    return stream, list(range(len(corpus))) if held_out else [], corpus


@contextlib.contextmanager
def errors_of(source: str | None) -> Iterator[None]:
    """Name the source of a mixture in the errors of its data; None: there is only one."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{error} (source {source})") if source else error from None


def row_notes(plan: Plan, train: Corpus | Mixture, held_out: Corpus | Mixture) -> tuple[list[str], list[str]]:
    """Return sentences on rows of which not all is used, and sentences on rows that are divided."""
    lost: list[str] = []
    divided: list[str] = []
    names = [f"{source.name}: " if plan.recipe.data.sources else "" for source in plan.sources]
    for name, source in zip(names, plan.sources, strict=True):
        divided += [f"{name}{text}" for text in splits_note(source.data.path, plan.eval_path)]
    sets = [*zip(names, train.parts, strict=True)]
    if plan.eval_path is not None and held_out.name != train.name:
        sets += [("data.eval: ", rows) for rows in held_out.parts]
    for name, rows in sets:
        for texts, found in zip((lost, divided), notes_on_rows(rows), strict=True):
            texts += [f"{name}{text}" for text in found]
    return lost, divided


def reading_notes(plan: Plan, stream: Stream) -> list[str]:
    """Return sentences on the sources of a mixture that are read again earlier than the others, or not to the end."""
    if not plan.recipe.data.sources:
        return []
    steps = plan.total_steps(len(stream))
    positions = steps * plan.recipe.train.global_batch_size
    notes, usual = [], positions / len(stream)
    for source, times in zip(plan.sources, stream.reads(positions), strict=True):
        if times > max(1.0, 1.01 * usual):
            first = math.ceil(steps / times)
            notes.append(
                f"{source.name}: read {times:.2f} times in the run; it is repeated from about step {first:,} on"
            )
        elif times < min(1.0, 0.99 * usual):
            notes.append(f"{source.name}: only {times:.1%} of it is read in the run")
    return notes


def notes_on_rows(rows: EncodedRows) -> tuple[list[str], list[str]]:
    """Return sentences on rows that are lost, as a whole or in part, and on what else was done with the data."""
    notes, limit = rows.notes, f"{rows.seq_len:,} tokens"
    lost = {
        "dropped": "dropped: no trained token" + f" in the first {limit}" * bool(notes["cut"]),
        "too_long": f"dropped: longer than {limit} (data.long_rows)",
        "cut": f"cut at {limit} (data.seq_len): without its end, a row teaches not to stop (data.long_rows: drop)",
    }
    divided = {"split": f"split into pieces of at most {limit} (data.seq_len)"}
    found_lost, found_divided = (
        [f"{share(notes[what], notes['rows'], 'row')} {text}" for what, text in texts.items() if notes.get(what)]
        for texts in (lost, divided)
    )
    found_lost += [
        f"{what} ({counted(count, 'time')}, first in {place})" for what, (count, place) in rows.unread.items()
    ]
    found_lost += [f"{counted(notes[what], 'turn')} {text}" for what, text in OF_TURNS.items() if notes.get(what)]
    if empty := notes.get("empty_files"):
        found_divided.append(f"{counted(empty, 'empty file')} skipped")
    if notes.get("divided"):
        found_divided.append("one text is longer than the held-out share: its last part is held out, the rest trained")
    return found_lost, found_divided


def pack_rows(rows: EncodedRows, data: Data, seed: int, fraction: float | None = None) -> list[Corpus]:
    """Return the corpus of these rows; with a `fraction` of their tokens to hold out, the one without them and theirs.

    No row, and no conversation, is in both. A text is divided only when whole rows give less than half of the tokens to
    hold out. Its end is then held out as a row of its own, so that none of its tokens is a label of the first part.
    Raises DataError when either corpus would be empty.
    """
    names = ("train",) if fraction is None else ("train", "held")

    def write(folder: Path) -> None:
        starts, stops = rows.wholes[:-1], rows.wholes[1:]
        count = len(starts)
        held, divided = np.zeros(count, bool), None
        if fraction is not None:
            lengths, part = stops - starts, np.arange(count)
            if rows.conversations is not None:  # all rows of a conversation are on one side
                part = np.unique(rows.conversations, return_inverse=True)[1]
                lengths = np.bincount(part, lengths).astype(np.int64)
            held, divided = choose_held_out(lengths, fraction, seed, data.format.long_rows == "split")
            held = held[part]
        if divided is not None:
            row, tokens = divided
            edge = stops[row] - tokens
            starts, stops = np.insert(starts, row + 1, edge), np.insert(stops, row, edge)
            held = np.insert(held, row + 1, True)
        for name, side in zip(names, (~held, held), strict=False):
            pieces, offsets, labels = cut_and_pack(starts[side], stops[side], rows.trained, data, seed)
            if not len(pieces):
                use = "to hold out" if name == "held" else "to train on"
                raise DataError(f"data.eval: fraction {fraction} of {count} rows leaves none {use}")
            if rows.paired:
                pieces, offsets, labels = split_pairs(pieces, offsets, rows.ends, rows.trained)
            for kind, values in zip(_PACKED.values(), (pieces, offsets, labels), strict=True):
                np.save(folder / f"{name}-{kind}.npy", values)
        notes = {"divided": int(divided is not None)}
        (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")

    key = [rows.name, rows.seq_len, data.packing, seed, fraction, LAYOUT]
    folder = cached_folder("packed", key, write)
    notes = rows.notes | json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    return [
        Corpus(
            **vars(rows)
            | {"notes": notes}
            | {part: np.load(folder / f"{name}-{kind}.npy", mmap_mode="r") for part, kind in _PACKED.items()}
        )
        for name in names
    ]


_PACKED = {"pieces": "pieces", "offsets": "blocks", "labels": "labels"}  # field of `Corpus` → its file in the cache


def choose_held_out(
    lengths: Ints, fraction: float, seed: int, divisible: bool
) -> tuple[np.ndarray[Any, Any], tuple[int, int] | None]:
    """Draw rows of these lengths [R] by `seed` until they have this fraction of all tokens.

    Returns whether each row is held out [R], and (row, tokens to hold out of its end) if one is to be divided.
    """
    wanted = round(fraction * int(lengths.sum()))
    drawn = np.random.default_rng([seed, 0, 1]).permutation(len(lengths))  # [seed, epoch] is the stream's
    short = drawn[lengths[drawn] <= wanted]
    whole = short[: np.searchsorted(np.cumsum(lengths[short]), wanted, side="right")]
    missing = wanted - int(lengths[whole].sum())  # tokens that whole rows do not give
    held = np.zeros(len(lengths), bool)
    held[whole] = True
    if missing <= wanted / 2 or len(short) == len(drawn):
        return held, None
    long = int(drawn[lengths[drawn] > wanted][0])
    held[long] = not divisible
    return held, (long, missing) if divisible else None


def open_rows(
    path: DataPath, data: Data, tokenizer: Any, max_rows: int | None, progress: Progress, day: date | None = None
) -> EncodedRows:
    """Return the rows of a data path from the cache, made by the first process that needs them, with all cores.

    Raises DataError for wrong rows, for files that change while they are read, and when no row has a trained token.
    """
    readable_files(path, progress=progress)  # downloads what is in an object store
    before = data_stamps(path)
    content = fingerprint(path)
    limit = None if data.treatment == "continued" else data.seq_len  # above which a row is cut or dropped, or counted
    key = [LAYOUT, token_key(tokenizer, data, day), content, max_rows, data.treatment, limit]

    def write(folder: Path) -> None:
        parts = parts_of(path)
        with contextlib.closing(encode_parts(parts, tokenizer, data, day, max_rows, progress)) as encoded:
            notes = join(folder, encoded, data)
        if notes["tokens"] == 0:
            long = f"; {found:,} are longer than data.seq_len" if (found := notes.get("too_long")) else ""
            raise DataError(f"{listed(places(path))}: none of the {notes['rows']} rows has a trained token{long}")
        if data_stamps(path) != before:
            raise DataError(f"{listed(places(path))} changed while it was read: run again when nothing writes to it")
        notes["empty_files"] = len(before) - len({file for part in parts for file in part.stamps})
        (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")

    folder = cached_folder("data", key, write)
    streams: dict[str, Any] = {name: TokenArray(folder, name) for name in ("tokens", "trained")}
    names = _OF_ROWS if data.turns == "split" else _OF_ROWS.keys() - {"conversations"}
    arrays = {name: np.memmap(folder / f"{name}.bin", _OF_ROWS[name], "r") for name in names}
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    digest = (folder / DIGEST_FILE).read_text(encoding="ascii")
    return EncodedRows(
        **streams, **arrays, notes=notes, seq_len=data.seq_len, pad=pad, fingerprint=content, digest=digest,
        name=folder.name, paired=data.format.is_paired,
        unread=unread_in(folder, path),
    )  # fmt: skip


_OF_ROWS: dict[str, Any] = {"ends": np.int64, "lengths": np.uint32, "conversations": np.uint32}


def prepare_ahead(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Tokenise and pack the data of a plan, of several windows the first, into the cache; return what it became.

    Raises RecipeError for the tokenizer and DataError for the data, as the run would.
    """
    go_offline_if_unreachable(plan, progress)
    plan, windows = of_first_window(pin_commits(plan, plan.rundir, keep=False))
    tokenizer = load_tokenizer(plan, progress)
    day = pin_date(plan, tokenizer, plan.rundir, keep=False)
    stream, held_out, eval_corpus = prepare(plan, tokenizer, progress, day=day)
    packed = [corpus for mixed in (stream.corpus, eval_corpus) for corpus in mixed.parts]
    made = list({corpus.name: corpus for corpus in packed}.values())
    arrays = [array for corpus in made for array in (corpus.tokens, corpus.trained, corpus.ends, corpus.lengths)]
    arrays += [array for corpus in packed for array in (corpus.pieces, corpus.labels)]
    lost, divided = row_notes(plan, stream.corpus, eval_corpus)
    if len(windows) > 1:
        divided.append(f"{windows_note(windows, len(stream))}: only the first is prepared")
    return {
        **{name: sum(corpus.notes[name] for corpus in made) for name in ("rows", "tokens", "label_tokens")},
        "sequences": len(stream), "eval_sequences": len(held_out),
        "cache": str(cache_root()), "host": socket.gethostname(), "bytes": sum(array.nbytes for array in arrays),
        "notes": [*lost, *divided, *([date_note(day)] if day else [])],
    }  # fmt: skip


def prepared_lines(made: dict[str, Any], seq_len: int) -> Iterator[str]:
    """Yield what `prepare_ahead` returned, for a reader."""
    yield f"{counted(made['rows'], 'row')}, {made['tokens']:,} tokens, {made['label_tokens']:,} trained"
    held_out = f"; {made['eval_sequences']:,} held out" if made["eval_sequences"] else ""
    yield f"{counted(made['sequences'], 'sequence')} of {seq_len:,} tokens{held_out}"
    yield f"{size(made['bytes'])} in {made['cache']} on {made['host']}; another host needs a cache of its own"
    yield from (f"note: {note}" for note in made["notes"])
