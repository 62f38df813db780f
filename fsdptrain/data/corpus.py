"""Rows cut into pieces and packed into sequences, and `Stream.batch(positions)`: a pure function of seed and positions.

Terms:

    row       one document or conversation, as tokens; of answers that are judged, a prompt with one of them
    piece     consecutive tokens of one row in one sequence; pieces of a sequence do not attend to one another
    sequence  `seq_len` tokens: a row of a batch

Rows are packed in random order: rows of one length, or of one place in the file, in one sequence would make the
gradient of a step a worse estimate, and learning slower (docs/internals/measurements.md).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
import json
import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch

from fsdptrain.config.mixture import MixtureSource
from fsdptrain.config.schema import Data
from fsdptrain.data.cache import PARTS_FILE
from fsdptrain.data.teacher import TeacherOutputs

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
TOKENS, FLAGS = np.dtype(np.uint32), np.dtype(np.bool_)
IGNORED = -100  # the label of a position that carries no loss
SHOWN = 1600  # characters of a row that are shown, about
WINDOW = 1024  # pieces among which `fill_sequences` looks for those that fill a sequence
CHUNK = 2**16  # pieces whose labels are counted at a time: a Python number takes more memory than one in an array
TRIED = 4  # pieces that it tries to complete with another


class TokenArray:
    """The arrays of several files as one [T], of which a slice is a part of a row and reads no more than it needs."""

    def __init__(self, folder: Path, stream: str) -> None:
        """`stream`: tokens or trained. `folder` is one of the cache, with PARTS_FILE (see `data.prepare`)."""
        parts = json.loads((folder / PARTS_FILE).read_text(encoding="utf-8"))
        self.dtype = {"tokens": TOKENS, "trained": FLAGS}[stream]
        self.starts = np.cumsum([0, *(count for _, count, _ in parts)])
        self.files = [
            folder / f"{stream}-{number}.bin" if is_copied else folder.parent.parent / name / f"{stream}.bin"
            for number, (name, _, is_copied) in enumerate(parts)
        ]
        self.folders = [folder, *(folder.parent.parent / name for name, *_ in parts)]  # of the cache, with parts
        self._opened: dict[int, Array] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return len(self) * self.dtype.itemsize

    def __getitem__(self, wanted: slice) -> Array:
        start, stop, _ = wanted.indices(len(self))
        # A last piece of one token predicts the empty slice at the very end: it is of the last file.
        first = min(int(np.searchsorted(self.starts, start, side="right")), len(self.files)) - 1
        begin, end = self.starts[first : first + 2].tolist()
        assert stop <= end, "a row is in one file"
        return self._open(first)[start - begin : stop - begin]

    def open_files(self) -> None:
        """Open all files, so that they can be read after they were removed."""
        for number in range(len(self.files)):
            self._open(number)

    def _open(self, number: int) -> Array:
        if number not in self._opened:  # a plain array: slicing a memory map takes ten times as long
            self._opened[number] = np.asarray(np.memmap(self.files[number], self.dtype, "r"))
        return self._opened[number]


Flags = TokenArray | Array


class Batch(TypedDict):
    """A micro-batch. The first three are int64 [rows, seq_len]; `is_token`, bool, is False for padding; see
    `document_bounds` for the next two.

    With answers that are judged, `answers` int64 [rows, seq_len] is the number of the answer that a position belongs to
    (of pair i, 2i the chosen one, 2i + 1 the rejected one), and their count for padding. `reference` float64 [answers]
    are their log-probabilities under the reference, 0 as long as these are not computed.

    If they are judged one by one, `desirable` bool [answers] says how; `mismatched` has the same prompts with the
    answers of other rows (see `Corpus.mismatched`), and a step adds its estimate of the KL divergence as `kl`, float64.

    With a teacher, `teacher_ids` int32 [rows, seq_len, k] and `teacher_log_probs` float32 [rows, seq_len, k + 1] are
    its `TeacherOutputs`, 0 without label.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    is_token: torch.Tensor
    documents: torch.Tensor
    longest: int
    answers: NotRequired[torch.Tensor]
    reference: NotRequired[torch.Tensor]
    desirable: NotRequired[torch.Tensor]
    mismatched: NotRequired[Batch]
    kl: NotRequired[torch.Tensor]
    teacher_ids: NotRequired[torch.Tensor]
    teacher_log_probs: NotRequired[torch.Tensor]


@dataclass(frozen=True)
class EncodedRows:
    """The cached token stream of one data set.

    `tokens` uint32 [T]; `trained` bool [T], whether a token is a label, or for the first of a row, which nothing
    predicts, whether an answer that is judged by itself is desirable; `ends` int64 [R+1] offsets of rows; `lengths`
    uint32 [rows read] tokens of every row, or pair, before it was cut or dropped; `notes` counts of rows that were
    read, split, cut, dropped or divided, and of tokens; `fingerprint` of the files, `digest` of the rows as tokens;
    `name` the digest of all that the stream was made from; `conversations` uint32 [R] which one each row is of, if
    several may be of one. `answers` as in `Format`: of 2, every two rows are a pair, which stay in one sequence.
    `unread`: what the rows hold that is not read → how often, and the place of the first.
    """

    tokens: TokenArray | Array
    trained: TokenArray | Array
    ends: Ints
    lengths: Array
    notes: dict[str, int]
    seq_len: int
    pad: int
    fingerprint: str
    name: str
    digest: str
    conversations: Array | None = field(default=None, kw_only=True)
    answers: int = field(default=0, kw_only=True)
    unread: dict[str, tuple[int, str]] = field(default_factory=dict, kw_only=True)

    @property
    def wholes(self) -> Ints:
        """The offsets of what is not divided among data sets: of rows, or of pairs."""
        return self.ends[:: max(1, self.answers)]


@dataclass(frozen=True)
class Corpus(EncodedRows):
    """Rows that are cut into pieces and packed into sequences.

    `pieces` int64 [P, 3] (first token, length, end of its row), sequence by sequence; `offsets` int64 [B+1] of the
    sequences in `pieces`; `labels` int64 [B] label tokens of each sequence. `reference` float64 [1 or 2, R]: of answers
    that are judged, the log-probability of each row's trained tokens under the reference, and of its `mismatched` ones.
    """

    pieces: Ints
    offsets: Ints
    labels: Ints
    count_padding: bool = True  # whether positions of padding continue those of the last piece, or are 0
    reference: Array | None = None
    teacher: TeacherOutputs | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pieces_of(self, number: int) -> Ints:
        """Return the pieces [P, 3] of a sequence; the number -1 has none."""
        return self.pieces[self.offsets[number] : self.offsets[number + 1]] if number >= 0 else self.pieces[:0]

    def rows_of(self, numbers: Sequence[int]) -> Ints:
        """Return the number of the row of each piece of sequences `numbers`, in order."""
        starts = [self.pieces_of(number)[:, 0] for number in numbers]
        return np.searchsorted(self.ends, np.concatenate([np.zeros(0, np.int64), *starts]), side="right") - 1

    def row(self, piece: Ints) -> tuple[Array, Array]:
        """Return the tokens of a piece, and its labels, which may lack the last: see `batch`."""
        start, length, end = piece
        targets = slice(start + 1, min(start + length + 1, end))
        return self.tokens[start : start + length], _labels(self.tokens[targets], self.trained[targets])

    def mismatched(self, piece: Ints) -> tuple[Array, Array]:
        """Return what `row` does of the row's prompt with the answer of the row before it in the data, cyclic.

        So it depends on the data alone, not on what is in a batch.
        """
        start, end = int(piece[0]), int(piece[2])
        other = int(self._starts[np.searchsorted(self._starts, start) - 1])
        other_end = int(self.ends[np.searchsorted(self.ends, other, side="right")])
        prompt = slice(start, start + prompt_length(self.trained[start:end]))
        answer = slice(other + prompt_length(self.trained[other:other_end]), other_end)
        tokens, trained = (
            np.concatenate([of[prompt], of[answer]])[: self.seq_len] for of in (self.tokens, self.trained)
        )
        return tokens, _labels(tokens[1:], trained[1:])

    @functools.cached_property
    def _starts(self) -> Ints:
        return np.sort(self.pieces[:, 0])

    def desirable(self, number: int) -> Array:
        """Return which answers of a sequence are desirable, if they are judged one by one: bool [pieces]."""
        firsts = [self.trained[start : start + 1] for start in self.pieces_of(number)[:, 0]]
        return np.concatenate([np.zeros(0, bool), *firsts])

    def fill(self) -> float:
        """Return the fraction of tokens, in all sequences, that are not padding."""
        return float(self.pieces[:, 1].sum()) / (len(self) * self.seq_len)

    def document(self) -> float:
        """Return the tokens of the document that a position belongs to, on average; none for those of padding."""
        return float((self.pieces[:, 1].astype(np.float64) ** 2).sum()) / (len(self) * self.seq_len)

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
        """Return by what the summed loss of sequences `numbers` is divided: their label tokens, pairs or rows."""
        if self.answers:
            return int((self.offsets[np.add(numbers, 1)] - self.offsets[list(numbers)]).sum()) // self.answers
        return self.label_tokens(numbers)

    @property
    def parts(self) -> list[Corpus]:
        """The corpora that this one consists of: itself."""
        return [self]

    def with_rows(self, rows: Sequence[Sequence[int]], seq_len: int) -> Corpus:
        """Return a corpus of these rows of tokens, each in a sequence of its own, without labels."""
        lengths = np.array([len(row) for row in rows])
        ends = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.fromiter(itertools.chain.from_iterable(rows), np.uint32)
        return dataclasses.replace(
            self, tokens=tokens, trained=np.zeros(len(tokens), bool), ends=ends, lengths=lengths, seq_len=seq_len,
            pieces=np.stack([ends[:-1], lengths, ends[1:]], axis=1), offsets=np.arange(len(rows) + 1),
            labels=np.zeros_like(lengths), answers=0, teacher=None,
        )  # fmt: skip

    def show(self, tokenizer: Any) -> str:
        """Return the first row, or pair, as text, with the trained parts in ⟦ ⟧; of a long part, both ends."""
        names = ("chosen: ", "rejected: ") if self.answers == 2 else ("",)
        return "\n".join(f"{name}{self._show_row(row, tokenizer)}" for row, name in enumerate(names))

    def _show_row(self, row: int, tokenizer: Any) -> str:
        begin, end = self.ends[row : row + 2].tolist()
        ids, flags = self.tokens[begin:end].tolist(), np.array(self.trained[begin:end])
        flags[:1] &= self.answers != 1  # else it is a label
        bounds = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(ids)]
        text, most = "", max(40, SHOWN // (len(bounds) - 1))
        for start, stop in itertools.pairwise(bounds):
            before = max(0, start - 4)  # a part decoded alone may lose its first space
            context, whole = tokenizer.decode(ids[before:start]), tokenizer.decode(ids[before:stop])
            part = whole[len(context) :] if whole.startswith(context) else tokenizer.decode(ids[start:stop])
            if len(part) > most:
                part = f"{part[: most // 2]}…{part[-most // 2 :]}"
            text += f"⟦{part}⟧" if flags[start] else part
        return text


@dataclass(frozen=True)
class Mixture:
    """Several corpora, whose sequences are numbered one corpus after another.

    `shares` are those of the corpora in what is read, relative to one another: means are over that.
    """

    parts: list[Corpus]
    shares: tuple[int, ...]

    @classmethod
    def of(cls, parts: list[Corpus], shares: tuple[int, ...] = ()) -> Corpus | Mixture:
        """Return the mixture of corpora, without `shares` as large as they are; a single one as it is."""
        return parts[0] if len(parts) == 1 else cls(parts, shares or tuple(map(len, parts)))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def seq_len(self) -> int:
        """The tokens of a sequence."""
        return self.parts[0].seq_len

    @property
    def name(self) -> str:
        """The digest of all that the token streams were made from."""
        return digest_of(part.name for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """The digest of the files of all corpora."""
        return digest_of(part.fingerprint for part in self.parts)

    @property
    def digest(self) -> str:
        """The digest of the rows of all corpora, as tokens."""
        return digest_of(part.digest for part in self.parts)

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


def with_each(corpus: Corpus | Mixture, change: Callable[[Corpus], Corpus]) -> Corpus | Mixture:
    """Return a corpus, or a mixture, with each of its corpora changed."""
    parts = [change(part) for part in corpus.parts]
    return dataclasses.replace(corpus, parts=parts) if isinstance(corpus, Mixture) else parts[0]


def digest_of(digests: Iterable[str]) -> str:
    """Return a SHA-256 over these digests."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def batch_of(rows: Sequence[tuple[Corpus, int]]) -> Batch:
    """Return these sequences, each a number in its corpus, as the rows of a micro-batch; see `Corpus.batch`."""
    batch = _batch_of(rows, Corpus.row, 0)
    if rows[0][0].answers == 1:
        batch["desirable"] = torch.from_numpy(np.concatenate([corpus.desirable(number) for corpus, number in rows]))
        batch["mismatched"] = _batch_of(rows, Corpus.mismatched, 1)
    return batch


def _batch_of(
    rows: Sequence[tuple[Corpus, int]], read: Callable[[Corpus, Ints], tuple[Array, Array]], reference: int
) -> Batch:
    """Return the micro-batch of what `read` returns of each piece; `reference` is its place in `Corpus.reference`."""
    shape = (len(rows), rows[0][0].seq_len)
    ids, labels = np.empty(shape, np.int64), np.full(shape, IGNORED, np.int64)
    positions, answers = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    is_token = np.zeros(shape, bool)
    references = [np.zeros(0)]
    answer = 0
    lengths: list[list[int]] = []
    for row, (corpus, number) in enumerate(rows):
        ids[row] = corpus.pad
        at = length = 0  # the next free position of the sequence; the length of its last piece
        lengths.append([])
        for piece in corpus.pieces_of(number):
            tokens, shifted = read(corpus, piece)
            length = len(tokens)
            answers[row, at : at + length] = answer
            answer += 1
            ids[row, at : at + length] = tokens
            positions[row, at : at + length] = np.arange(length)
            labels[row, at : at + len(shifted)] = shifted
            lengths[-1].append(length)
            at += length
        is_token[row, :at] = True
        if corpus.count_padding:
            positions[row, at:] = np.arange(length, length + corpus.seq_len - at)
        lengths[-1].append(corpus.seq_len - at)
        if corpus.answers:
            of_rows = corpus.rows_of([number])
            known = corpus.reference
            references.append(np.zeros(len(of_rows)) if known is None else known[reference][of_rows])
    documents, longest = document_bounds(lengths)
    batch: Batch = {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "is_token": torch.from_numpy(is_token),
        "documents": documents,
        "longest": longest,
    }
    if rows[0][0].answers:
        batch["answers"] = torch.from_numpy(np.where(answers < 0, answer, answers))
        batch["reference"] = torch.from_numpy(np.concatenate(references))
    if rows[0][0].teacher is not None:
        top_k = rows[0][0].teacher.top_k
        teacher_ids, log_probs = np.zeros((*shape, top_k), np.int32), np.zeros((*shape, top_k + 1), np.float32)
        for row, (corpus, number) in enumerate(rows):
            if number >= 0 and corpus.teacher is not None:
                trained = labels[row] != IGNORED
                teacher_ids[row, trained], log_probs[row, trained] = corpus.teacher.at(number)
        batch |= {"teacher_ids": torch.from_numpy(teacher_ids), "teacher_log_probs": torch.from_numpy(log_probs)}
    return batch


def _labels(tokens: Array, trained: Array) -> Array:
    return np.where(trained, tokens.astype(np.int64), IGNORED)


def prompt_length(trained: Array) -> int:
    """Return how many tokens of a row are before its answer: before the first that is trained and can be predicted."""
    return int(trained[1:].argmax()) + 1


def widths_of_rows(starts: Ints, stops: Ints, trained: Flags, seq_len: int) -> Ints:
    """Return for how many tokens each row needs space: of itself, and of its prompt with the answer before its own."""
    rows = zip(starts.tolist(), stops.tolist(), strict=True)
    prompts, lengths = np.array([prompt_length(trained[a:b]) for a, b in rows]), stops - starts
    return np.maximum(lengths, np.minimum(prompts + np.roll(lengths - prompts, 1), seq_len))


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
        for name in (
            "input_ids", "labels", "position_ids", "is_token", "answers", "teacher_ids", "teacher_log_probs"
        )
        if name in batch
    }  # fmt: skip
    if "mismatched" in batch:
        own["mismatched"] = part_of_rows(batch["mismatched"], part, parts)
    return cast(Batch, {**batch, **own})


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Interleave:
    """The order of the sources in a stream, by shares relative to one another: a pure function of the position.

    Two sources alternate as evenly as whole numbers allow: of the first n sequences, the smaller one has its share of
    n, rounded. More of them are joined two by two, the smallest first, until two are left. So for any n the count of a
    source among the first n is near its share of n: of two sources within 1/2, of three within 1, of more within 1.7
    (the sum of half of w/W over the nodes above a source of share w, of which Huffman's tree has W of at least w, 2w,
    3w, 5w, 8w, …).
    """

    shares: tuple[int, ...]
    tree: Any  # the number of a source, or (share of the left part, share of both, left, right)

    @classmethod
    def of(cls, shares: Sequence[Fraction]) -> Interleave:
        """Return the order of sources with these shares, which are above 0."""
        unit = math.lcm(*(share.denominator for share in shares))
        whole = tuple(int(share * unit) for share in shares)
        heap: list[tuple[int, int, Any]] = [(share, number, number) for number, share in enumerate(whole)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (smaller, first, left), (larger, second, right) = heapq.heappop(heap), heapq.heappop(heap)
            both = smaller + larger
            heapq.heappush(heap, (both, min(first, second), (smaller, both, left, right)))
        return cls(whole, heap[0][2])

    def at(self, position: int) -> tuple[int, int]:
        """Return the number of the source at a position, and how many sequences of it are before."""
        node = self.tree
        while isinstance(node, tuple):
            share, both, left, right = node
            before, after = _rounded(position * share, both), _rounded((position + 1) * share, both)
            node, position = (left, before) if after > before else (right, position - before)
        return node, position

    def counts(self, positions: int) -> list[int]:
        """Return how many of the first `positions` are of each source."""
        counts = [0] * len(self.shares)
        todo = [(self.tree, positions)]
        while todo:
            node, number = todo.pop()
            if isinstance(node, tuple):
                share, both, left, right = node
                of_left = _rounded(number * share, both)
                todo += [(left, of_left), (right, number - of_left)]
            else:
                counts[node] = number
        return counts


def _rounded(dividend: int, divisor: int) -> int:
    return (2 * dividend + divisor) // (2 * divisor)


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

    def place(self, position: int) -> tuple[int, int]:
        """Return the source that is read at a position, and the number of the sequence in it."""
        source, nth = self.order.at(position)
        size = len(self.part(source))
        return source, int(epoch_order(self.seed, source, nth // size, size)[nth % size])

    def part(self, source: int) -> Corpus:
        """Return the corpus of a source."""
        return self.corpus.parts[source]

    def some_rows(self) -> Corpus:
        """Return a corpus of trained rows that can be read now."""
        return self.corpus.parts[0]

    @property
    def starts(self) -> list[int]:
        """The number of the first sequence of each source: they are numbered one source after another."""
        return [0, *itertools.accumulate(map(len, self.corpus.parts))]

    def at(self, positions: Sequence[int]) -> list[int]:
        """Return the sequence numbers at these positions of the stream."""
        places = [*map(self.place, positions)]
        starts = self.starts
        return [starts[source] + number for source, number in places]

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
        return batch_of([(self.part(source), number) for source, number in map(self.place, positions)])

    def label_tokens(self, positions: Sequence[int]) -> int:
        """Return how many label tokens the sequences at these positions have in total."""
        return sum(self.part(source).label_tokens([number]) for source, number in map(self.place, positions))

    def divisor(self, positions: Sequence[int]) -> int:
        """Return by what the loss at these positions is divided; see `Corpus.divisor`."""
        return sum(self.part(source).divisor([number]) for source, number in map(self.place, positions))

    def digest(self, positions: Sequence[int]) -> str:
        """Return a short digest of the sequence numbers at these positions, with which runs are compared."""
        return hashlib.sha256(np.array(self.at(positions), np.int64).tobytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)  # of each source a batch may span two epochs; two threads make batches
def epoch_order(seed: int, source: int, epoch: int, size: int) -> Ints:
    """Return the order of a source's sequences in one epoch; that of source 0 is `[seed, epoch]`'s."""
    return np.random.default_rng([seed, epoch, 0, source]).permutation(size)


def cut_and_pack(
    starts: Ints, stops: Ints, trained: Flags, data: Data, seed: int, widths: Ints | None = None
) -> tuple[Ints, Ints, Ints]:
    """Cut and pack rows, given by starts [R] and ends [R]: `pieces`, `offsets` and `labels` of a `Corpus`.

    Rows that share sequences are shuffled by `seed`. Pieces without a label token are left out. `widths` [R]: the
    tokens for which each row, which is one piece, needs space; None: its own.
    """
    if data.packing != "none":
        shuffled = np.random.default_rng([seed, 0, 2]).permutation(len(starts))  # [seed, epoch] is the stream's
        starts, stops = starts[shuffled], stops[shuffled]
        widths = None if widths is None else widths[shuffled]
    # Rows are cut as if they followed one another without gaps; then the pieces are moved to where their rows are.
    ends = np.concatenate([[0], np.cumsum(stops - starts)])
    pieces = cut(ends, data)
    shift = (starts - ends[:-1])[np.searchsorted(ends, pieces[:, 0], side="right") - 1]
    pieces[:, 0] += shift
    pieces[:, 2] += shift
    labels = piece_labels(pieces, trained)
    used = labels > 0
    if not used.all():
        pieces, labels, shift = pieces[used], labels[used], shift[used]
    if not len(pieces):
        return pieces, np.zeros(1, np.int64), labels
    order, offsets = pack(np.stack([pieces[:, 0] - shift, pieces[:, 1] if widths is None else widths], axis=1), data)
    return pieces[order], offsets, np.add.reduceat(labels[order], offsets[:-1])


def cut(ends: Ints, data: Data) -> Ints:
    """Cut rows (offsets [R+1]) into pieces [P, 3] of at most seq_len tokens: (first token, length, end of the row).

    With `concat` the stream of all rows is cut every seq_len tokens, so that sequences are full; otherwise every row is
    cut from its own beginning.
    """
    size = data.seq_len
    if data.packing == "concat":
        bounds = np.union1d(ends, np.arange(0, ends[-1], size))
    else:
        lengths = np.diff(ends)
        counts = -(-lengths // size)
        first = np.repeat(ends[:-1], counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        bounds = np.append(first + within * size, ends[-1])
    starts = bounds[:-1]
    return np.stack([starts, np.diff(bounds), ends[np.searchsorted(ends, starts, side="right")]], axis=1)


def split_pairs(pieces: Ints, offsets: Ints, ends: Ints, trained: Flags) -> tuple[Ints, Ints, Ints]:
    """Return `pieces`, `offsets` and `labels` with two pieces for each pair, chosen and rejected, that was one piece.

    `ends` [R+1] are the offsets of the rows, two for each pair.
    """
    start, length, end = pieces.T
    middle = ends[np.searchsorted(ends, start, side="right")]
    halves = np.stack([start, middle - start, middle, middle, start + length - middle, end], axis=1).reshape(-1, 3)
    return halves, 2 * offsets, np.add.reduceat(piece_labels(halves, trained), 2 * offsets[:-1])


def piece_labels(pieces: Ints, trained: Flags) -> Ints:
    """Count the label tokens of each piece: the trained tokens that its positions predict, all in the same row."""
    labels = np.empty(len(pieces), np.int64)
    in_file = np.argsort(pieces[:, 0])  # read in order: they may be larger than memory
    for at in range(0, len(pieces), CHUNK):
        some = in_file[at : at + CHUNK]
        start, length, end = pieces[some].T
        wanted = zip((start + 1).tolist(), np.minimum(start + length + 1, end).tolist(), strict=True)
        labels[some] = [np.count_nonzero(trained[a:b]) for a, b in wanted]
    return labels


def pack(pieces: Ints, data: Data) -> tuple[Ints, Ints]:
    """Put pieces into sequences; return the order of the pieces [P] and the offsets of the sequences [B+1].

    `concat` fills one after another in order; `none` gives each piece its own; `bfd` is `fill_sequences`.
    """
    if data.packing == "none":
        return np.arange(len(pieces)), np.arange(len(pieces) + 1)
    if data.packing == "concat":
        sequence = pieces[:, 0] // data.seq_len
        changes = np.flatnonzero(np.diff(sequence)) + 1
        return np.arange(len(pieces)), np.concatenate([[0], changes, [len(pieces)]])
    order, counts = array("q"), array("q", [0])
    lengths = np.ascontiguousarray(pieces[:, 1]).data  # a memoryview: its items are ints
    for members in fill_sequences(lengths, data.seq_len):
        order.extend(members)
        counts.append(len(members))
    return np.asarray(order), np.cumsum(counts)


def fill_sequences(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield sequences of at most `size`, as numbers of pieces, which have these lengths and come in random order.

    A sequence takes the pieces that come next until there is space for about two more. The rest is filled as well as
    possible with one or two of the next WINDOW pieces, again and again until none fits. So a sequence is a random
    sample of the pieces but for its last ones, and is filled as well as by best-fit decreasing over all pieces.
    """
    window = _Window(lengths)
    two = 2 * sum(lengths) / max(1, len(lengths))
    while window.waiting:
        sequence: list[int] = []
        space = size
        while (piece := window.first()) is not None and (not sequence or space >= max(two, lengths[piece])):
            space -= window.take(piece)
            sequence.append(piece)
        while found := window.best_fit(space):
            space -= sum(map(window.take, found))
            sequence += found
        yield sequence


class _Window:
    """The next WINDOW pieces: `waiting` in the order in which they come, `ranked` as sorted (length, piece)."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.ranked: list[tuple[int, int]] = []
        self._coming = iter(range(len(lengths)))
        self._admit(WINDOW)

    def _admit(self, count: int) -> None:
        for piece in itertools.islice(self._coming, count):
            self.waiting[piece] = None
            insort(self.ranked, (self.lengths[piece], piece))

    def first(self) -> int | None:
        """Return the piece that comes next."""
        return next(iter(self.waiting), None)

    def take(self, piece: int) -> int:
        """Remove a piece, and admit another; return its length."""
        length = self.lengths[piece]
        del self.waiting[piece]
        del self.ranked[bisect_left(self.ranked, (length, piece))]
        self._admit(1)
        return length

    def best_fit(self, space: int) -> list[int]:
        """Return the piece that fills a space best, or two of which one is among the first TRIED; [] if none fits."""
        best, longest = self._longest(space)
        found = [longest]
        for piece in itertools.islice(self.waiting, TRIED):
            length, other = self._longest(space - self.lengths[piece], besides=piece)
            if length and self.lengths[piece] + length > best:
                best, found = self.lengths[piece] + length, [piece, other]
        return found if best else []

    def _longest(self, space: int, besides: int = -1) -> tuple[int, int]:
        """Return (length, piece) of the longest piece that fits, `besides` another one; (0, -1) if none fits."""
        at = bisect_right(self.ranked, (space, math.inf)) - 1
        at -= at >= 0 and self.ranked[at][1] == besides
        return self.ranked[at] if at >= 0 else (0, -1)
