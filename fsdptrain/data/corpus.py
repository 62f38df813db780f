"""Rows → tokens → packed sequences, once, before any process group exists; then `batch(position)`, a pure function.

The cache holds folders of flat, memory-mapped arrays, named by a digest of what they were made from: the tokens, and
for each seed how they are packed. So the ranks of a node share one copy and a second run starts at once. Terms:

    row       one document or conversation, as tokens; of preferences, a prompt with one of its two answers
    piece     consecutive tokens of one row in one sequence; pieces of a sequence do not attend to one another
    sequence  `seq_len` tokens: a row of a batch
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch

from fsdptrain.config.mixture import (
    MixtureSource,
    describe_readings,
    reading,
    readings,
    source_named,
    sources_of,
)
from fsdptrain.config.paths import DataPath, places
from fsdptrain.config.schema import Data
from fsdptrain.data.cache import cached_folder
from fsdptrain.data.encode import OF_TURNS
from fsdptrain.data.interleave import Interleave
from fsdptrain.data.joined import Joined, join
from fsdptrain.data.pack import Ints, cut_and_pack, split_pairs
from fsdptrain.data.parts import encode_parts, parts_of, token_key, unread_in
from fsdptrain.data.sources import (
    DIGEST_FILE,
    data_stamps,
    fingerprint,
    first_source,
    readable_files,
    splits_note,
)
from fsdptrain.errors import DataError, listed
from fsdptrain.plan.plan import LAYOUT, Plan
from fsdptrain.run_folder.events import Progress
from fsdptrain.text import counted, share

IGNORED = -100  # the label of a position that carries no loss
SHOWN = 400  # tokens of a row, about, that are shown


class Batch(TypedDict):
    """A micro-batch. The first three are int64 [rows, seq_len]; see `document_bounds` for the next two.

    With preferences, `answers` int64 [rows, seq_len] is the number of the answer that a position belongs to: 2i the
    chosen one of pair i, 2i + 1 the rejected one, and their count for padding. `reference` float64 [answers] are their
    log-probabilities under the reference, 0 as long as these are not computed.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    documents: torch.Tensor
    longest: int
    answers: NotRequired[torch.Tensor]
    reference: NotRequired[torch.Tensor]


@dataclass(frozen=True)
class EncodedRows:
    """The cached token stream of one data set.

    `tokens` uint32 [T]; `trained` bool [T], whether a token is a label; `ends` int64 [R+1] offsets of rows; `lengths`
    uint32 [rows read] tokens of every row, or pair, before it was cut or dropped; `notes` counts of rows that were
    read, split, cut, dropped or divided, and of tokens; `fingerprint` of the files, `digest` of the rows as tokens;
    `name` the digest of all that the stream was made from; `conversations` uint32 [R] which one each row is of, if
    several may be of one. `paired`: every two rows are a pair, chosen and rejected, which stay in one sequence.
    `unread`: what the rows hold that is not read → how often, and the place of the first.
    """

    tokens: Joined | np.ndarray[Any, Any]
    trained: Joined | np.ndarray[Any, Any]
    ends: Ints
    lengths: np.ndarray[Any, Any]
    notes: dict[str, int]
    seq_len: int
    pad: int
    fingerprint: str
    name: str
    digest: str
    conversations: np.ndarray[Any, Any] | None = field(default=None, kw_only=True)
    paired: bool = field(default=False, kw_only=True)
    unread: dict[str, tuple[int, str]] = field(default_factory=dict, kw_only=True)

    @property
    def wholes(self) -> Ints:
        """The offsets of what is not divided among data sets: of rows, or of pairs."""
        return self.ends[::2] if self.paired else self.ends


@dataclass(frozen=True)
class Corpus(EncodedRows):
    """Rows that are cut into pieces and packed into sequences.

    `pieces` int64 [P, 3] (first token, length, end of its row), sequence by sequence; `offsets` int64 [B+1] of the
    sequences in `pieces`; `labels` int64 [B] label tokens of each sequence. `reference` float64 [R]: of pairs, the
    log-probability of each row's trained tokens under the reference.
    """

    pieces: Ints
    offsets: Ints
    labels: Ints
    count_padding: bool = True  # whether positions of padding continue those of the last piece, or are 0
    reference: np.ndarray[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows_of(self, numbers: Sequence[int]) -> Ints:
        """Return the number of the row of each piece of sequences `numbers`, in order; the number -1 has none."""
        chosen = [self.pieces[self.offsets[n] : self.offsets[n + 1], 0] for n in numbers if n >= 0]
        return np.searchsorted(self.ends, np.concatenate([np.zeros(0, np.int64), *chosen]), side="right") - 1

    def fill(self) -> float:
        """Return the fraction of tokens, in all sequences, that are not padding."""
        return float(self.pieces[:, 1].sum()) / (len(self) * self.seq_len)

    def document(self) -> float:
        """Return the tokens of the document that a position belongs to, on average; none for those of padding."""
        return float((self.pieces[:, 1].astype(np.float64) ** 2).sum()) / (len(self) * self.seq_len)

    def lengths_per_sequence(self) -> float:
        """Return how many different lengths the pieces of a sequence have on average."""
        sequence = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        return len(np.unique(sequence * (self.seq_len + 1) + self.pieces[:, 1])) / len(self)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return sequences `numbers` as the rows of a micro-batch.

        Labels are already shifted: position i predicts labels[i], or nothing when that is -100. Position ids restart at
        every piece, from which transformers derives that pieces do not attend to one another. Padding continues the
        positions of the last piece: causal attention hides it from the tokens before it, and a sequence of one piece
        needs no other mask, so that it gets the flash kernel. With `count_padding=False`, for models in which the
        highest position affects every token, positions of padding are 0. The number -1 gives a sequence of padding. In
        `documents` the padding of a sequence is a document.
        """
        return batch_of([(self, number) for number in numbers])

    def label_tokens(self, numbers: Sequence[int]) -> int:
        """Return how many label tokens sequences `numbers` have in total."""
        return int(self.labels[list(numbers)].sum())

    def divisor(self, numbers: Sequence[int]) -> int:
        """Return by what the summed loss of sequences `numbers` is divided: their label tokens, or their pairs."""
        if self.paired:
            return int((self.offsets[np.add(numbers, 1)] - self.offsets[list(numbers)]).sum()) // 2
        return self.label_tokens(numbers)

    @property
    def parts(self) -> list[Corpus]:
        """The corpora that this one consists of: itself."""
        return [self]

    def beginnings(self, numbers: Sequence[int], length: int) -> Corpus:
        """Return a corpus with the beginning of the first piece of sequences `numbers`, each in one of its own.

        A beginning has at most `length` tokens.
        """
        first = self.pieces[self.offsets[list(numbers)]]
        lengths = np.minimum(first[:, 1], length)
        pieces = np.stack([first[:, 0], lengths, first[:, 2]], axis=1)
        return dataclasses.replace(self, pieces=pieces, offsets=np.arange(len(pieces) + 1), labels=lengths)

    def with_rows(self, rows: Sequence[Sequence[int]], seq_len: int) -> Corpus:
        """Return a corpus of these rows of tokens, each in a sequence of its own, without labels."""
        lengths = np.array([len(row) for row in rows])
        ends = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.fromiter(itertools.chain.from_iterable(rows), np.uint32)
        return dataclasses.replace(
            self, tokens=tokens, trained=np.zeros(len(tokens), bool), ends=ends, lengths=lengths, seq_len=seq_len,
            pieces=np.stack([ends[:-1], lengths, ends[1:]], axis=1), offsets=np.arange(len(rows) + 1),
            labels=np.zeros_like(lengths), paired=False,
        )  # fmt: skip

    def show(self, tokenizer: Any) -> str:
        """Return the first row, or pair, as text, with the trained parts in ⟦ ⟧."""
        return "\n".join(self._show_row(row, tokenizer) for row in range(1 + self.paired))

    def _show_row(self, row: int, tokenizer: Any) -> str:
        """Return a row as text; of a long one, the beginning and the end of its prompts and of its trained parts."""
        ids = self.tokens[int(self.ends[row]) : int(self.ends[row + 1])]
        flags = np.asarray(self.trained[int(self.ends[row]) : int(self.ends[row + 1])])
        bounds = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(ids)]
        most, left = len(ids), SHOWN  # of a part, and of all that are longer; short parts leave more to the others
        for number, length in enumerate(sorted(np.diff(bounds).tolist())):
            if length > (most := max(16, left // (len(bounds) - 1 - number))):
                break
            left -= length

        def decoded(start: int, stop: int) -> str:
            before = max(0, start - 4)  # a part decoded alone may lose its first space
            context, whole = (str(tokenizer.decode(ids[before:end].tolist())) for end in (start, stop))
            return (
                whole[len(context) :] if whole.startswith(context) else str(tokenizer.decode(ids[start:stop].tolist()))
            )

        text = ""
        for start, stop in itertools.pairwise(bounds):
            if stop - start <= most:
                part = decoded(start, stop)
            else:
                part = f"{decoded(start, start + most // 2)}…{decoded(stop - most // 2, stop)}"
            text += f"⟦{part}⟧" if flags[start] else part
        return text


@dataclass(frozen=True)
class Mixture:
    """Several corpora, whose sequences are numbered one corpus after another; it does what a `Corpus` does.

    `shares` are those of the corpora in what is read, relative to one another: means are over that.
    """

    parts: list[Corpus]
    shares: tuple[int, ...]

    @classmethod
    def of(cls, parts: list[Corpus], shares: tuple[int, ...] = ()) -> Corpus | Mixture:
        """Return the mixture of corpora, without `shares` as large as they are; a single one as it is."""
        return parts[0] if len(parts) == 1 else cls(parts, shares or tuple(map(len, parts)))

    @functools.cached_property
    def starts(self) -> list[int]:
        """The number of the first sequence of each corpus, and that after the last."""
        return [0, *itertools.accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def seq_len(self) -> int:
        """The tokens of a sequence."""
        return self.parts[0].seq_len

    @property
    def name(self) -> str:
        """The digest of all that the token streams were made from."""
        return _digest_of(part.name for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """The digest of the files of all corpora."""
        return _digest_of(part.fingerprint for part in self.parts)

    @property
    def digest(self) -> str:
        """The digest of the rows of all corpora, as tokens."""
        return _digest_of(part.digest for part in self.parts)

    @property
    def notes(self) -> dict[str, int]:
        """The counts of the corpora, added."""
        counts = Counter[str]()
        for part in self.parts:
            counts.update(part.notes)  # `+` would leave out those that are 0
        return dict(counts)

    def fill(self) -> float:
        """Return the fraction of tokens that are not padding; see `Corpus.fill`."""
        return self._mean([part.fill() for part in self.parts])

    def document(self) -> float:
        """Return the tokens of the document that a position belongs to; see `Corpus.document`."""
        return self._mean([part.document() for part in self.parts])

    def _mean(self, values: list[float]) -> float:
        return sum(share * value for share, value in zip(self.shares, values, strict=True)) / sum(self.shares)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return sequences `numbers` as the rows of a micro-batch; see `Corpus.batch`."""
        return batch_of([self._find(number) for number in numbers])

    def label_tokens(self, numbers: Sequence[int]) -> int:
        """Return how many label tokens sequences `numbers` have in total."""
        return sum(int(corpus.labels[number]) for corpus, number in map(self._find, numbers))

    def divisor(self, numbers: Sequence[int]) -> int:
        """Return by what the summed loss of sequences `numbers` is divided; see `Corpus.divisor`."""
        return sum(corpus.divisor([number]) for corpus, number in map(self._find, numbers))

    def beginnings(self, numbers: Sequence[int], length: int) -> Corpus:
        """Return the beginnings of those of sequences `numbers` that are in the first corpus: see `Corpus`."""
        return self.parts[0].beginnings([number for number in numbers if number < len(self.parts[0])], length)

    def _find(self, number: int) -> tuple[Corpus, int]:
        """Return the corpus that has a sequence, and its number there."""
        which = max(0, bisect.bisect_right(self.starts, number) - 1)
        return self.parts[which], number - self.starts[which]


def _digest_of(digests: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def batch_of(rows: Sequence[tuple[Corpus, int]]) -> Batch:
    """Return these sequences, each a number in its corpus, as the rows of a micro-batch; see `Corpus.batch`."""
    shape = (len(rows), rows[0][0].seq_len)
    ids, labels = np.empty(shape, np.int64), np.full(shape, IGNORED, np.int64)
    positions, answers = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    references = [np.zeros(0)]
    answer = 0
    lengths: list[list[int]] = []
    for row, (corpus, number) in enumerate(rows):
        ids[row] = corpus.pad
        at = length = 0  # the next free position of the sequence; the length of its last piece
        pieces = (
            corpus.pieces[corpus.offsets[number] : corpus.offsets[number + 1]] if number >= 0 else corpus.pieces[:0]
        )
        for start, length, end in pieces:
            answers[row, at : at + length] = answer
            answer += 1
            ids[row, at : at + length] = corpus.tokens[start : start + length]
            positions[row, at : at + length] = np.arange(length)
            targets = slice(start + 1, min(start + length + 1, end))
            shifted = np.where(corpus.trained[targets], corpus.tokens[targets].astype(np.int64), IGNORED)
            labels[row, at : at + len(shifted)] = shifted
            at += length
        if corpus.count_padding:
            positions[row, at:] = np.arange(length, length + corpus.seq_len - at)
        lengths.append([*pieces[:, 1].tolist(), corpus.seq_len - int(at)])
        if corpus.paired:
            of_rows = corpus.rows_of([number])
            references.append(np.zeros(len(of_rows)) if corpus.reference is None else corpus.reference[of_rows])
    documents, longest = document_bounds(lengths)
    batch: Batch = {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "documents": documents,
        "longest": longest,
    }
    if rows[0][0].paired:
        batch["answers"] = torch.from_numpy(np.where(answers < 0, answer, answers))
        batch["reference"] = torch.from_numpy(np.concatenate(references))
    return batch


def document_bounds(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
    """Return where the documents of a micro-batch begin and end, and a bound on their length, in tokens.

    `rows` has the lengths of the documents in each row. The bounds, int32 [N+1] and ascending from 0, count the tokens
    of all rows, one row after another. Both N (through empty documents at the end) and the bound on the length are
    powers of two, so that few different values occur: a compiled model may be compiled again for each.
    """
    ends = np.cumsum([length for row in rows for length in row if length], dtype=np.int32)
    longest = max((length for row in rows for length in row), default=1)
    bounds = np.full(_power_of_two(max(len(ends), 16)) + 1, ends[-1], np.int32)
    bounds[0], bounds[1 : len(ends) + 1] = 0, ends
    return torch.from_numpy(bounds), _power_of_two(max(longest, 128))


def part_of_rows(batch: Batch, part: int, parts: int) -> Batch:
    """Return a micro-batch with one of `parts` equal parts of each row; `documents` and `longest` stay as they are."""
    if parts == 1:
        return batch
    own: dict[str, Any] = {
        name: batch[name].tensor_split(parts, dim=1)[part].contiguous()
        for name in ("input_ids", "labels", "position_ids", "answers")
        if name in batch
    }
    return cast(Batch, {**batch, **own})


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Stream:
    """An endless stream over the sequences of a corpus or a mixture: each source, again and again, in new permutations.

    The sequence at a position depends on (seed, position) alone: not on the world size or on what was read before. In
    one epoch of the stream there are `epoch` sequences.
    """

    corpus: Corpus | Mixture
    seed: int
    order: Interleave
    epoch: int

    @classmethod
    def of(cls, sources: Sequence[MixtureSource], corpora: list[Corpus], seed: int) -> Stream:
        """Return the stream over the corpora of these sources."""
        weights = [source.weight for source in sources]
        read = [source.epochs * len(corpus) for source, corpus in zip(sources, corpora, strict=True)]
        order = Interleave.of([read[i] if weight is None else weight for i, weight in enumerate(weights)])
        corpus = Mixture.of(corpora, order.shares)
        # With weights nothing says how often a source is read: an epoch has as many sequences as there are.
        return cls(corpus, seed, order, max(1, round(sum(read))) if None in weights else len(corpus))

    def __len__(self) -> int:
        return self.epoch

    def at(self, positions: Sequence[int]) -> list[int]:
        """Return the sequence numbers at these positions of the stream."""
        return [*map(self._number, positions)]

    def _number(self, position: int) -> int:
        source, nth = self.order.at(position)
        size = len(self.corpus.parts[source])
        start = sum(map(len, self.corpus.parts[:source]))
        return start + int(epoch_order(self.seed, source, nth // size, size)[nth % size])

    def reads(self, positions: int) -> list[float]:
        """Return how often each source is read in the first positions of the stream."""
        counts = self.order.counts(positions)
        return [count / len(part) for count, part in zip(counts, self.corpus.parts, strict=True)]

    def token_shares(self) -> list[float]:
        """Return the share of each source in the tokens that are read, without padding."""
        tokens = [share * part.fill() for share, part in zip(self.order.shares, self.corpus.parts, strict=True)]
        return [each / sum(tokens) for each in tokens]

    def batch(self, positions: Sequence[int]) -> Batch:
        """Return the sequences at these positions; see `Corpus.batch`."""
        return self.corpus.batch(self.at(positions))

    def label_tokens(self, positions: Sequence[int]) -> int:
        """Return how many label tokens the sequences at these positions have in total."""
        return self.corpus.label_tokens(self.at(positions))

    def divisor(self, positions: Sequence[int]) -> int:
        """Return by what the loss at these positions is divided; see `Corpus.divisor`."""
        return self.corpus.divisor(self.at(positions))

    def digest(self, positions: Sequence[int]) -> str:
        """Return a short digest of the sequence numbers at these positions, with which runs are compared."""
        return hashlib.sha256(np.array(self.at(positions), np.int64).tobytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)  # of each source a batch may span two epochs; two threads make batches
def epoch_order(seed: int, source: int, epoch: int, size: int) -> Ints:
    """Return the order of a source's sequences in one epoch; that of source 0 is `[seed, epoch]`'s."""
    return np.random.default_rng([seed, epoch, 0, source]).permutation(size)


def prepare(
    plan: Plan, tokenizer: Any, progress: Progress, count_padding: bool = True, day: date | None = None
) -> tuple[Stream, list[int], Corpus | Mixture]:
    """Return the training stream, the held-out sequence numbers and their corpus; `count_padding` as in `Corpus`.

    With `data.eval.fraction` and several sources, that corpus has a part for each. `day` is what a chat template sees
    as today. Raises DataError for wrong rows, and when no row of a source has a trained token.
    """
    seed, wanted = plan.recipe.seed, plan.recipe.data.eval or {}

    def packed(
        data: Data, max_rows: int | None, fraction: float | None = None, earlier: Sequence[Corpus] = ()
    ) -> list[Corpus]:
        rows = open_rows(data.path, data, tokenizer, max_rows, progress, day)
        corpora = pack_rows(rows, data, seed, fraction, earlier)
        return [dataclasses.replace(corpus, count_padding=count_padding) for corpus in corpora]

    sources: list[list[Corpus]] = []
    for each in plan.sources:
        with errors_of(each.name if plan.recipe.data.sources else None):
            earlier = [train for train, *_ in sources]
            sources.append(packed(each.data, each.data.max_rows, wanted.get("fraction"), earlier))
    held_out = [corpus for _, *rest in sources for corpus in rest]
    if plan.eval_path is not None:
        held_out += packed(_held_out_data(plan, plan.eval_path), wanted.get("max_rows"))
    stream = Stream.of(plan.sources, [train for train, *_ in sources], seed)
    corpus = Mixture.of(held_out) if held_out else stream.corpus
    return stream, list(range(len(corpus))) if held_out else [], corpus


def _held_out_data(plan: Plan, path: str) -> Data:
    """Return how the held-out file of a recipe is read: in a mixture as the source that is named or its columns fit.

    The keys of `data` itself go first if a source has their format. Raises DataError if the sources read it in
    different ways, or none can.
    """
    data = dataclasses.replace(plan.recipe.data, path=path, window=None)
    if not data.sources:
        return data
    if named := data.eval.get("source"):
        return reading(data, source_named(data, named))
    readable_files(path, limit=1)
    columns = first_source(path).columns
    found = readings(data, columns)
    if data.format in {source.data.format for source in sources_of(data)}:
        found = readings(dataclasses.replace(data, sources=[]), columns) or found
    if len(found) == 1:
        return next(iter(found.values()))
    way_out = "name one in data.eval.source"
    if found:
        raise DataError(f"data.eval.path: sources read these columns in different ways ({listed(found)}): {way_out}")
    raise DataError(
        f"data.eval.path: its columns ({listed(columns)}) fit no source ({describe_readings(data)}): {way_out}"
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
    size, steps = plan.recipe.train.global_batch_size, plan.total_steps(len(stream))
    notes, usual = [], steps * size / len(stream)
    for source, times in zip(plan.sources, stream.reads(steps * size), strict=True):
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
    divided = {
        "split": f"split into pieces of at most {limit} (data.seq_len)",
        "duplicates": "dropped: the same tokens as an earlier row (data.drop_duplicates)",
        "in_earlier_sources": "dropped: the same tokens as a row of an earlier source (data.drop_duplicates)",
    }
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


def pack_rows(
    rows: EncodedRows,
    data: Data,
    seed: int,
    fraction: float | None = None,
    earlier: Sequence[EncodedRows] = (),
) -> list[Corpus]:
    """Return the corpus of these rows; with a `fraction` of their tokens to hold out, the one without them and theirs.

    No row, and no conversation, is in both. With `data.drop_duplicates`, rows that equal an earlier one, or one of the
    `earlier` sources, are left out before. A text is divided only when whole rows give less than half of the tokens to
    hold out. Its end is then held out as a row of its own, so that none of its tokens is a label of the first part.
    Raises DataError when either corpus would be empty.
    """
    names = ("train",) if fraction is None else ("train", "held")

    def write(folder: Path) -> None:
        ends = rows.wholes
        kept, counts = np.arange(len(ends) - 1), dict[str, int]()
        if data.drop_duplicates:
            kept, counts = first_of_equal_rows(rows, earlier)
            if not len(kept):
                raise DataError("data.drop_duplicates: all rows are in earlier sources, too: remove this one")
        starts, stops, held, divided = ends[:-1][kept], ends[1:][kept], np.zeros(len(kept), bool), None
        counts["tokens"] = int((stops - starts).sum())
        if fraction is not None:
            lengths, part = stops - starts, np.arange(len(kept))
            if rows.conversations is not None:  # all rows of a conversation are on one side
                part = np.unique(rows.conversations[kept], return_inverse=True)[1]
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
                raise DataError(f"data.eval: fraction {fraction} of {len(kept)} rows leaves none {use}")
            if rows.paired:
                pieces, offsets, labels = split_pairs(pieces, offsets, rows.ends, rows.trained)
            counts["label_tokens"] = counts.get("label_tokens", 0) + int(labels.sum())
            for kind, values in zip(_PACKED.values(), (pieces, offsets, labels), strict=True):
                np.save(folder / f"{name}-{kind}.npy", values)
        notes = {"divided": int(divided is not None)} | (counts if data.drop_duplicates else {})
        (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")

    key = [rows.name, rows.seq_len, data.packing, seed, fraction, LAYOUT]
    if data.drop_duplicates:
        key += ["drop_duplicates", *(each.name for each in earlier)]
    folder = cached_folder("packed", key, write)
    notes = rows.notes | json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    # So that a run of a version that kept these rows is not resumed without them.
    digest = _digest_of([rows.digest, "in_earlier_sources"]) if notes.get("in_earlier_sources") else rows.digest
    return [
        Corpus(
            **vars(rows)
            | {"notes": notes, "digest": digest}
            | {part: _array(folder / f"{name}-{kind}.npy") for part, kind in _PACKED.items()}
        )
        for name in names
    ]


_PACKED = {"pieces": "pieces", "offsets": "blocks", "labels": "labels"}  # field of `Corpus` → its file in the cache


def _array(path: Path) -> Any:
    return np.load(path, mmap_mode="r")


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


def first_of_equal_rows(rows: EncodedRows, earlier: Sequence[EncodedRows]) -> tuple[Ints, dict[str, int]]:
    """Return the numbers of the rows, ascending, that equal no earlier one in tokens and in which are trained.

    Also how many others there are: those that equal one of their own source, and those of `earlier` sources alone.
    """
    digests = _digests(rows)
    first = np.sort(np.unique(digests, return_index=True)[1])
    known = np.isin(digests[first], np.concatenate([digests[:0], *map(_digests, earlier)]))
    return first[~known], {"duplicates": len(digests) - len(first), "in_earlier_sources": int(known.sum())}


def _digests(rows: EncodedRows) -> np.ndarray[Any, Any]:
    """Return a digest of each row."""
    digests = bytearray()
    for start, stop in itertools.pairwise(rows.ends.tolist()):
        digest = hashlib.blake2b(rows.tokens[start:stop].tobytes(), digest_size=16)
        digest.update(rows.trained[start:stop].tobytes())
        digests += digest.digest()
    return np.frombuffer(digests, "S16")


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
    streams: dict[str, Any] = {name: Joined(folder, name) for name in ("tokens", "trained")}
    names = _OF_ROWS if data.turns == "split" else _OF_ROWS.keys() - {"conversations"}
    arrays = {name: np.memmap(folder / f"{name}.bin", _OF_ROWS[name], "r") for name in names}
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    digest = (folder / DIGEST_FILE).read_text(encoding="ascii")
    return EncodedRows(
        **streams, **arrays, notes=notes, seq_len=data.seq_len, pad=pad, fingerprint=content, digest=digest,
        name=folder.name, paired=data.format.is_paired, unread=unread_in(folder, path),
    )  # fmt: skip


_OF_ROWS: dict[str, Any] = {"ends": np.int64, "lengths": np.uint32, "conversations": np.uint32}
