"""Rows → tokens → packed sequences, before any process group exists: in a run, or ahead of it (`fsdptrain prepare`).

The cache holds folders of flat, memory-mapped arrays, named by a digest of what they were made from. So the ranks of a
node share one copy and a second run starts at once.

A part is some rows of a large file, or several small files. Its folder is named by their content and by what decides
their tokens. So what a killed process had finished is kept, an added file does not redo the others, and neither does
another `seq_len` or `packing`. The tokens are the same with any number of processes.

A data set has its own folder, with offsets and digest of its rows. Tokens are copied there only from a part in which
rows are cut: all others are read from the folders of the parts. How its rows are packed is in a folder for each seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import signal
import socket
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from fsdptrain.config.mixture import reading, source_named
from fsdptrain.config.paths import DataPath, cache_root, data_kind, is_hub_data, places
from fsdptrain.config.schema import Data
from fsdptrain.data.cache import PARTS_FILE, cached_folder, intact_folder
from fsdptrain.data.chat import stop_tokens
from fsdptrain.data.columns import Unread, read_rows
from fsdptrain.data.corpus import (
    FLAGS,
    TOKENS,
    Array,
    Corpus,
    EncodedRows,
    Interleave,
    Ints,
    Mixture,
    Stream,
    TokenArray,
    cut_and_pack,
    split_pairs,
    widths_of_rows,
)
from fsdptrain.data.encode import OF_TURNS, TRAINED, Encoder
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.data.readers import BEGIN, PART_BYTES, Cut, DataFile, Source
from fsdptrain.data.sources import (
    DIGEST_FILE,
    Content,
    Stamp,
    contents,
    fingerprint,
    open_sources,
    opened_files,
    quick_fingerprint,
    readable_files,
    splits_note,
    stamp,
)
from fsdptrain.data.tokenizer import load_tokenizer, tokenizer_digest
from fsdptrain.data.windows import (
    WindowStream,
    date_note,
    estimated_length,
    of_first_window,
    of_window,
    pin_commits,
    pin_date,
    pinned_windows,
    place_in_window,
    windows_note,
)
from fsdptrain.errors import DataError, WorkerLost, listed
from fsdptrain.plan.plan import LAYOUT, Plan
from fsdptrain.processes import STOP_SIGNAL, STOP_SIGNALS, Child, forked_after_import, records_of_parent
from fsdptrain.run_folder.events import Progress
from fsdptrain.text import counted, share, size

TOKENS_VERSION = 4  # the version of how a row becomes tokens: raise it when that changes, and parts are encoded again

# Keys of `data` that do not change the tokens of a part: which rows are read, and what is done with their tokens. The
# chat template is in the digest of the tokenizer.
NOT_OF_TOKENS = frozenset(
    {"path", "revision", "max_rows", "eval", "sources", "seq_len", "packing", "long_rows", "chat_template"}
)
KIND = "tokens"  # of the folders of parts in the cache
UNREAD_FILE = "unread.json"  # what rows of a folder hold that is not read → count, and place of the first
SMALL = 2**20  # bytes; smaller files share parts
POOLED = 2**25  # bytes to encode from which on more processes are worth their start
POLL_S = 0.2  # between two reports of what the processes have done

RowBytes = tuple[bytes, bytes]  # tokens, uint32, and whether each is trained


@dataclass(frozen=True)
class DataPart:
    """Sources that are encoded together: `content` (JSON) identifies their rows, `stamps` are their files as found.

    Of the rows, all are encoded (None) or the first `limit`.
    """

    content: list[Any]
    sources: list[Source]
    stamps: dict[DataFile, Stamp]
    size: int  # in bytes
    limit: int | None = None


def parts_of(path: DataPath) -> list[DataPart]:
    """Return the parts of all files behind a path, or of a Hub data set, in the order of their rows.

    Raises as `open_sources` does.
    """
    if is_hub_data(path):
        [source], identity = open_sources(path), fingerprint(path)
        return [
            DataPart([identity, start, stop], [source.between(start, stop)], {}, PART_BYTES)
            for start, stop in _bounds(source.cuts)
        ]
    stamps = {file: stamp(file) for file in readable_files(path)}
    found, sources, parts = contents(path), opened_files(path), list[DataPart]()
    for group in _groups(list(sources), stamps, found):
        own = {file: stamps[file] for file in group}
        bounds = _bounds(sources[group[0]].cuts or found[group[0]].cuts) if len(group) == 1 else [(BEGIN, None)]
        for start, stop in bounds:
            content = [[data_kind(file.name), found[file].sha256, start, stop] for file in group]
            part_bytes = sum(number for _, number, *_ in own.values()) // len(bounds)
            parts.append(DataPart(content, [sources[file].between(start, stop) for file in group], own, part_bytes))
    return parts


def _bounds(cuts: Sequence[Cut]) -> list[tuple[Cut, Cut | None]]:
    edges: list[Cut] = [BEGIN, *((place, rows) for place, rows in cuts)]
    return list(zip(edges, [*edges[1:], None], strict=True))


def _groups(
    files: list[DataFile], stamps: dict[DataFile, Stamp], found: dict[DataFile, Content]
) -> Iterator[list[DataFile]]:
    """Yield each large file by itself, and small ones in groups; an added file changes one group at most."""
    group: list[DataFile] = []
    for file in files:
        is_large = stamps[file][1] >= SMALL
        if group and is_large:
            yield group
            group = []
        group.append(file)
        ends_group = int(found[file].sha256[:2], 16) < 4  # one in 64: whatever stands before the file
        if ends_group or is_large or sum(stamps[each][1] for each in group) >= PART_BYTES:
            yield group
            group = []
    if group:
        yield group


def token_key(tokenizer: Any, data: Data, day: date | None) -> list[Any]:
    """Return (JSON) what decides the tokens of a row beside its content."""
    usual = vars(Data())
    keys = {k: v for k, v in vars(data).items() if k not in NOT_OF_TOKENS and v != usual[k]}
    return [TOKENS_VERSION, tokenizer_digest(tokenizer), stop_tokens(tokenizer), day and day.isoformat(), keys]


class PartEncoder:
    """Encodes parts into the cache; `tick` is called after each batch, and may raise.

    A folder has `tokens.bin` (uint32 [T]), `trained.bin` (bool [T]), `kept.bin` (uint32 [R], tokens of each row),
    `lengths.bin` (uint32, also those of rows that were dropped, because nothing in them is trained), `notes.json` and
    UNREAD_FILE; with `data.turns: split` also `conversations.bin` (uint32 [R]): of which conversation each row is.
    """

    def __init__(self, settings: tuple[Any, Data, date | None], tick: Callable[[], None]) -> None:
        """Take tokenizer, data, and the day that a chat template sees as `settings`."""
        self.settings, self.tick = settings, tick
        self.tokenizer, self.data, self.day = settings
        self.key = token_key(self.tokenizer, self.data, self.day)

    def is_encoded(self, part: DataPart) -> bool:
        """Return whether the cache has the folder of a part."""
        return intact_folder(KIND, [self.key, part.content, part.limit]) is not None

    def encode(self, part: DataPart) -> Path:
        """Return the folder of a part. Raises DataError for wrong rows and for changed files."""

        def write(folder: Path) -> None:
            self._write(folder, part)
            for file, before in part.stamps.items():
                if stamp(file) != before:
                    raise DataError(f"{file} changed while it was read: run again when nothing writes to it")

        return cached_folder(KIND, [self.key, part.content, part.limit], write)

    def _write(self, folder: Path, part: DataPart) -> None:
        encoder = Encoder(self.tokenizer, self.data, self.day, self.tick)
        done, kept = 0, array("I")
        unread = Unread(self.tokenizer.chat_template)
        with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as trained:
            for batch in read_rows(part.sources, self.data, part.limit, unread):
                for ids, mask in encoder(batch):
                    tokens.write(array("I", ids).tobytes())
                    trained.write(mask)
                    kept.append(len(ids))
                done += len(batch)
                self.tick()
        (folder / "kept.bin").write_bytes(kept.tobytes())
        (folder / "lengths.bin").write_bytes(encoder.lengths.tobytes())
        if self.data.turns == "split":
            (folder / "conversations.bin").write_bytes(encoder.conversations.tobytes())
        notes = {"rows": done, "dropped": encoder.dropped, "tokens": sum(kept), **encoder.notes}
        (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")
        (folder / UNREAD_FILE).write_text(json.dumps(unread.found), encoding="utf-8")


def _unread_in(folder: Path) -> dict[str, tuple[int, str]]:
    found = json.loads((folder / UNREAD_FILE).read_text(encoding="utf-8"))
    return {what: (count, place) for what, (count, *_, place) in found.items()}  # earlier versions: without the file


def encode_parts(
    parts: list[DataPart], tokenizer: Any, data: Data, day: date | None, limit: int | None, progress: Progress
) -> Generator[Path, None, None]:
    """Yield the folder of each part, up to the first `limit` rows.

    Raises DataError as `read_rows` and `Encoder` do, and WorkerLost if a process is killed.
    """
    done, parts = 0, list(_limited(parts, limit))
    encoder = PartEncoder((tokenizer, data, day), lambda: progress("tokenise", done, len(parts)))
    encoder.tick()
    missing = [part for part in parts if not encoder.is_encoded(part)]
    cores = min(len(os.sched_getaffinity(0)), len(missing)) if sum(part.size for part in missing) >= POOLED else 1
    with contextlib.closing(_encoded(encoder, parts, cores)) as folders:
        for folder in folders:
            done += 1
            encoder.tick()
            yield folder


def _limited(parts: list[DataPart], left: int | None) -> Iterator[DataPart]:
    """Yield the parts that have the first `left` rows; the last one has a limit, unless all of it is read."""
    for part in parts:
        if left is None:
            yield part
        elif left > 0:
            count = sum(source.counted() for source in part.sources)
            yield dataclasses.replace(part, limit=left if left < count else None)
            left -= count


def _encoded(encoder: PartEncoder, parts: list[DataPart], count: int) -> Generator[Path, None, None]:
    """Yield the folders of parts in their order, encoded in `count` processes."""
    if count == 1:
        yield from map(encoder.encode, parts)
        return
    # A new process, which has no threads and no GPU, imports what is needed and forks: the others share its memory.
    others = {*multiprocessing.active_children()}
    settings = (dict(os.environ), encoder.settings)
    pool = ProcessPoolExecutor(count, forked_after_import(__name__), _start, settings)
    try:
        for future in [pool.submit(_encode, part) for part in parts]:
            while not wait([future], POLL_S).done:
                encoder.tick()
            yield future.result()
    except BrokenProcessPool:
        raise WorkerLost(
            "a process that tokenises was killed (is the memory of the host full?): what was finished is kept; "
            "run the same command again"
        ) from None
    finally:
        for process in {*multiprocessing.active_children()} - others:
            process.kill()
        pool.shutdown(cancel_futures=True)


_encoder: PartEncoder  # of a process that encodes


def _start(environment: dict[str, str], settings: tuple[Any, Data, date | None]) -> None:
    """Begin such a process. It ends with the one that asked for it, which alone obeys signals."""
    global _encoder
    for number in (*STOP_SIGNALS, STOP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(environment | {"TOKENIZERS_PARALLELISM": "false"})  # each core has a process
    _encoder = PartEncoder(settings, lambda: None)


def _encode(part: DataPart) -> Path:
    return _encoder.encode(part)


def join(folder: Path, encoded: Iterable[Path], data: Data) -> dict[str, int]:
    """Write the rows of all parts, in order, to a folder of the cache; return counts of rows and tokens.

    `encoded`: the folder of each part. Beside PARTS_FILE, `ends.bin` has the offsets of the rows (int64 [R+1]),
    `lengths.bin` the tokens of every row that was read (uint32) and, with `data.turns: split`, `conversations.bin` the
    conversation of each row (uint32 [R]).
    """
    treatment, width = data.treatment, data.format.rows
    notes = dict.fromkeys(["rows", "cut", "dropped", "split", "tokens", "label_tokens", *OF_TURNS], 0)
    if treatment == "drop":
        notes["too_long"] = 0
    if data.turns == "split":
        notes["conversations"] = 0
    if data.format.has_label:
        notes["desirable"] = 0
    if width == 2:
        notes["equal"] = 0
    ends, lengths, conversations = [np.zeros(1, np.int64)], list[Array](), list[Array]()
    parts, unread, digest = list[tuple[str, int, bool]](), dict[str, tuple[int, str]](), hashlib.sha256()
    for part in encoded:
        found = json.loads((part / "notes.json").read_text(encoding="utf-8"))
        read, kept = (np.fromfile(part / f"{of}.bin", TOKENS) for of in ("lengths", "kept"))
        # Cut or leave out what is too long. What is not is read where it is.
        rows: Iterable[RowBytes | None] = _rows(part, kept)
        is_copied = treatment in ("cut", "drop") and bool((kept.reshape(-1, width).sum(axis=1) > data.seq_len).any())
        if is_copied:
            rows = _copied(_fitted(_rows(part, kept), data.seq_len, treatment, width), folder, len(parts))
        sizes, before = np.zeros(len(kept), np.int64), None
        for number, row in enumerate(rows):
            if row is not None:
                tokens, flags = row
                digest.update(len(flags).to_bytes(8) + tokens + flags)
                notes["label_tokens"] += flags.count(TRAINED, 1)  # nothing predicts the first token of a row
                if data.format.has_label:
                    notes["desirable"] += flags[0]  # see `EncodedRows`
                if width == 2:
                    notes["equal"], before = notes["equal"] + (number % 2 and row == before), row
                sizes[number] = len(flags)
        used = sizes > 0
        lengths.append(read)
        ends.append(notes["tokens"] + np.cumsum(sizes[used]))
        if data.turns == "split":
            numbers = np.fromfile(part / "conversations.bin", TOKENS)[used]
            conversations.append((numbers + notes["conversations"]).astype(TOKENS))
            notes["conversations"] += found["rows"]
        # Rows that are both too long and without a trained token are counted as too long.
        long = int(np.count_nonzero(read > data.seq_len))
        if treatment != "continued":
            notes["too_long" if treatment == "drop" else treatment] += long
        dropped = found["dropped"] + int(np.count_nonzero(~used)) // width
        notes["dropped"] += dropped - long if treatment == "drop" else dropped
        notes["rows"] += len(read)
        notes["tokens"] += int(sizes.sum())
        for name in OF_TURNS:
            notes[name] += found.get(name, 0)
        for what, (count, place) in _unread_in(part).items():
            earlier, first = unread.get(what, (0, place))
            unread[what] = (earlier + count, first)
        if used.any():
            parts.append((f"{part.parent.name}/{part.name}", int(sizes.sum()), is_copied))
    for name, arrays in (("ends", ends), ("lengths", lengths), ("conversations", conversations)):
        if arrays:
            np.concatenate(arrays).tofile(folder / f"{name}.bin")
    (folder / UNREAD_FILE).write_text(json.dumps(unread), encoding="utf-8")
    (folder / PARTS_FILE).write_text(json.dumps(parts), encoding="utf-8")
    (folder / DIGEST_FILE).write_text(digest.hexdigest(), encoding="ascii")
    return notes


def _rows(part: Path, lengths: Array) -> Iterator[RowBytes]:
    if not len(lengths):
        return
    tokens = np.asarray(np.memmap(part / "tokens.bin", TOKENS, "r"))
    flags = np.asarray(np.memmap(part / "trained.bin", FLAGS, "r"))
    stop = 0
    for length in lengths.tolist():
        start, stop = stop, stop + length
        yield tokens[start:stop].tobytes(), flags[start:stop].tobytes()


def _fitted(rows: Iterator[RowBytes], size: int, treatment: str, width: int) -> Iterator[RowBytes | None]:
    """Yield rows, of which every `width` have at most `size` tokens together: longer ones are cut, or None.

    They are None if any of them would have no trained token. Of two, the longer one gets what the other leaves.
    """
    for whole in zip(*[rows] * width, strict=True):
        sizes = [len(flags) for _, flags in whole]
        limit = max(size // width, size - sum(sizes) + max(sizes))
        if sum(sizes) > size and (treatment == "drop" or any(TRAINED not in flags[1:limit] for _, flags in whole)):
            yield from [None] * width
        else:
            yield from ((tokens[: limit * TOKENS.itemsize], flags[:limit]) for tokens, flags in whole)


def _copied(rows: Iterable[RowBytes | None], folder: Path, number: int) -> Iterator[RowBytes | None]:
    with (folder / f"tokens-{number}.bin").open("wb") as tokens, (folder / f"trained-{number}.bin").open("wb") as flags:
        for row in rows:
            if row is not None:
                tokens.write(row[0])
                flags.write(row[1])
            yield row


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

    def make(number: int) -> Corpus:  # the held-out rows are read once
        later = of_window(plan, windows[number], eval_path=None)
        stream, *_ = prepare(later, tokenizer, lambda *_: None, count_padding, day)
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
    child.send({"plan": of_window(plan, files, eval_path=None).to_json(), "cores": [*cores]})
    return child


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
    _check_answers(trained)
    if plan.eval_path is not None:
        data = dataclasses.replace(plan.recipe.data, path=plan.eval_path, window=None)
        if data.sources:
            data = reading(data, source_named(data, wanted["source"]))
        held_out += packed(data, wanted.get("max_rows"))
    stream = Stream.of(plan.sources, trained, seed)
    corpus = Mixture.of(held_out) if held_out else stream.corpus
    return stream, list(range(len(corpus))) if held_out else [], corpus


def _check_answers(corpora: list[Corpus]) -> None:
    """Raise DataError if all pairs have equal answers, or if all answers that are judged alone are of one class."""
    rows = sum(len(corpus.ends) - 1 for corpus in corpora)
    if 2 * sum(corpus.notes.get("equal", 0) for corpus in corpora) == rows:
        raise DataError(
            f"data.columns: chosen, rejected: the answers of all {rows // 2:,} pairs are equal, so neither is preferred"
        )
    if "desirable" not in corpora[0].notes:
        return
    desirable = sum(corpus.notes["desirable"] for corpus in corpora)
    if desirable in (0, rows):
        found, other = ("desirable", "undesirable")[:: 1 if desirable else -1]
        raise DataError(
            f"data.columns: label: all {rows:,} answers are {found}, and there is nothing to compare them with: add "
            f"{other} ones, or fine-tune on good answers alone with data.format: prompt_completion"
        )


@contextlib.contextmanager
def errors_of(source: str | None) -> Iterator[None]:
    """Name the source of a mixture in the errors of its data; None: there is only one."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{error} (source {source})") if source else error from None


def row_notes(plan: Plan, train: Corpus | Mixture, held_out: Corpus | Mixture) -> tuple[list[str], list[str]]:
    """Return sentences on rows of which not all is used, and sentences on rows that are divided."""
    lost, divided = list[str](), list[str]()
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
        "equal": "with two equal answers, of which none is preferred",
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
    if "desirable" in notes:
        found_divided.append(f"{share(notes['desirable'], len(rows.ends) - 1, 'answer')} are desirable")
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
            own, widths = (starts[side], stops[side]), None
            if data.format.has_label:
                widths = widths_of_rows(*own, rows.trained, data.seq_len)
            pieces, offsets, labels = cut_and_pack(*own, rows.trained, data, seed, widths)
            if not len(pieces):
                use = "to hold out" if name == "held" else "to train on"
                raise DataError(f"data.eval: fraction {fraction} of {count} rows leaves none {use}")
            if data.format.rows == 2:
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
    before = [stamp(file) for file in readable_files(path, progress=progress)]
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
        if [stamp(file) for file in readable_files(path)] != before:
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
        name=folder.name, answers=data.format.answers,
        unread=_unread_in(folder),
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
