"""Rows → tokens → packed sequences, once, before any process group exists; then `batch(position)`, a pure function.

The cache holds folders of flat, memory-mapped arrays, named by a digest of what they were made from: the tokens, and
for each seed how they are packed. So the ranks of a node share one copy and a second run starts at once. Terms:

    row       one document or conversation, as tokens; of preferences, a prompt with one of its two answers
    piece     consecutive tokens of one row in one sequence; pieces of a sequence do not attend to one another
    sequence  `seq_len` tokens: a row of a batch
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch

from fsdptrain import __version__
from fsdptrain.config.paths import DataPath, places
from fsdptrain.config.schema import Data
from fsdptrain.data.cache import cached_folder
from fsdptrain.data.columns import read_all_rows
from fsdptrain.data.encode import TRAINED, Encoder
from fsdptrain.data.pack import Ints, cut_and_pack, split_pairs
from fsdptrain.data.sources import DIGEST_FILE, count_files, data_stamps, fingerprint, open_sources, readable_files
from fsdptrain.data.tokenizer import tokenizer_digest
from fsdptrain.errors import DataError, listed
from fsdptrain.folder.events import Progress
from fsdptrain.plan.plan import BY_LENGTH, LAYOUT, Plan
from fsdptrain.text import counted, share

IGNORED = -100  # the label of a position that carries no loss
NOT_OF_TOKENS = ("path", "revision", "max_rows", "eval")  # keys of `data` that say which rows are read


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
    uint32 [rows read] tokens of every row before it was cut or dropped; `notes` counts of rows that were read, split,
    cut, dropped or divided, and of tokens; `fingerprint` of the files, `digest` of the rows as tokens; `name` the
    digest of all that the stream was made from. `paired`: every two rows are a pair, chosen and rejected, which stay in
    one sequence.
    """

    tokens: np.ndarray[Any, Any]
    trained: np.ndarray[Any, Any]
    ends: Ints
    lengths: np.ndarray[Any, Any]
    notes: dict[str, int]
    seq_len: int
    pad: int
    fingerprint: str
    name: str
    digest: str
    paired: bool = field(default=False, kw_only=True)

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

    def divisor(self, numbers: Sequence[int]) -> int:
        """Return by what the summed loss of sequences `numbers` is divided: their label tokens, or their pairs."""
        if self.paired:
            return int((self.offsets[np.add(numbers, 1)] - self.offsets[list(numbers)]).sum()) // 2
        return int(self.labels[list(numbers)].sum())

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
        shape = (len(numbers), self.seq_len)
        ids, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        positions, answers = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        lengths: list[list[int]] = []
        answer = 0
        for row, number in enumerate(numbers):
            at = length = 0  # the next free position of the sequence; the length of its last piece
            pieces = self.pieces[self.offsets[number] : self.offsets[number + 1]] if number >= 0 else self.pieces[:0]
            for start, length, end in pieces:
                ids[row, at : at + length] = self.tokens[start : start + length]
                positions[row, at : at + length] = np.arange(length)
                answers[row, at : at + length] = answer
                answer += 1
                targets = slice(start + 1, min(start + length + 1, end))
                shifted = np.where(self.trained[targets], self.tokens[targets].astype(np.int64), IGNORED)
                labels[row, at : at + len(shifted)] = shifted
                at += length
            if self.count_padding:
                positions[row, at:] = np.arange(length, length + self.seq_len - at)
            lengths.append([*pieces[:, 1].tolist(), self.seq_len - int(at)])
        documents, longest = document_bounds(lengths)
        batch: Batch = {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(positions),
            "documents": documents,
            "longest": longest,
        }
        if self.paired:
            of_rows = np.zeros(answer) if self.reference is None else self.reference[self.rows_of(numbers)]
            batch["answers"] = torch.from_numpy(np.where(answers < 0, answer, answers))
            batch["reference"] = torch.from_numpy(of_rows)
        return batch

    def beginnings(self, numbers: Sequence[int], length: int) -> Corpus:
        """Return a corpus with the beginning of the first piece of sequences `numbers`, each in one of its own.

        A beginning has at most `length` tokens.
        """
        first = self.pieces[self.offsets[list(numbers)]]
        lengths = np.minimum(first[:, 1], length)
        pieces = np.stack([first[:, 0], lengths, first[:, 2]], axis=1)
        return dataclasses.replace(self, pieces=pieces, offsets=np.arange(len(pieces) + 1), labels=lengths)

    def show(self, tokenizer: Any) -> str:
        """Return the first row, or pair, as text, with the trained parts in ⟦ ⟧."""
        return "\n".join(self._show_row(row, tokenizer) for row in range(1 + self.paired))

    def _show_row(self, row: int, tokenizer: Any) -> str:
        first, length = int(self.ends[row]), int(self.ends[row + 1] - self.ends[row])
        shown = slice(first, first + min(length, 400))
        ids, flags = self.tokens[shown].tolist(), np.asarray(self.trained[shown])
        edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))  # of the trained parts
        # Decoded from the beginning each time: a part decoded alone may lose its first space.
        places = [len(tokenizer.decode(ids[:edge])) for edge in edges]
        text = tokenizer.decode(ids)
        for place, mark in reversed(list(zip(places, itertools.cycle("⟦⟧"), strict=False))):
            text = text[:place] + mark + text[place:]
        return text + ("…" if length > 400 else "")


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
    """An endless stream over some sequences of a corpus: epoch after epoch, each a new permutation.

    The sequence at a position depends on (seed, position) alone: not on the world size or on what was read before.
    """

    corpus: Corpus
    numbers: Ints  # of the sequences in this stream
    seed: int

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, positions: Sequence[int]) -> list[int]:
        """Return the sequence numbers at these positions of the stream."""
        return [int(self.numbers[_epoch_order(self.seed, p // len(self), len(self))[p % len(self)]]) for p in positions]

    def batch(self, positions: Sequence[int]) -> Batch:
        """Return the sequences at these positions; see `Corpus.batch`."""
        return self.corpus.batch(self.at(positions))

    def label_tokens(self, positions: Sequence[int]) -> int:
        """Return how many label tokens the sequences at these positions have in total."""
        return int(self.corpus.labels[self.at(positions)].sum())

    def divisor(self, positions: Sequence[int]) -> int:
        """Return by what the loss at these positions is divided; see `Corpus.divisor`."""
        return self.corpus.divisor(self.at(positions))

    def digest(self, positions: Sequence[int]) -> str:
        """Return a short digest of the sequence numbers at these positions, with which runs are compared."""
        return hashlib.sha256(np.array(self.at(positions), np.int64).tobytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=4)  # a batch may span two epochs; two threads make batches
def _epoch_order(seed: int, epoch: int, size: int) -> Ints:
    """Return the order of sequences in one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(size)


def prepare(
    plan: Plan, tokenizer: Any, progress: Progress, count_padding: bool = True, day: date | None = None
) -> tuple[Stream, list[int], Corpus]:
    """Return the training stream, the held-out sequence numbers and their corpus; `count_padding` as in `Corpus`.

    `day` is what a chat template sees as today. Raises DataError for wrong rows, and when no row has a trained token.
    """
    data, seed = plan.recipe.data, plan.recipe.seed
    held_out = data.eval or {}
    rows = open_rows(plan.data_path, data, tokenizer, data.max_rows, progress, day)
    packed = pack_rows(rows, data, seed, held_out.get("fraction"), plan.layout)
    if plan.eval_path is not None:
        rows = open_rows(plan.eval_path, data, tokenizer, held_out.get("max_rows"), progress, day)
        packed += pack_rows(rows, data, seed, layout=plan.layout)
    packed = [dataclasses.replace(corpus, count_padding=count_padding) for corpus in packed]
    stream = Stream(packed[0], np.arange(len(packed[0])), seed)
    return stream, list(range(len(packed[1]))) if packed[1:] else [], packed[-1]


def row_notes(train: EncodedRows, held_out: EncodedRows) -> tuple[list[str], list[str]]:
    """Return sentences on rows of which not all is used, and sentences on rows that are divided."""
    lost, divided = _row_notes(train)
    if held_out.name != train.name:  # from another path
        for texts, others in zip((lost, divided), _row_notes(held_out), strict=True):
            texts += [f"data.eval: {text}" for text in others]
    return lost, divided


def _row_notes(rows: EncodedRows) -> tuple[list[str], list[str]]:
    """Return sentences on rows that are lost, as a whole or in part, and on what else was done with the data."""
    notes, limit = rows.notes, f"{rows.seq_len:,} tokens"
    lost = {
        "dropped": "dropped: no trained token" + f" in the first {limit}" * bool(notes["cut"]),
        "cut": f"cut at {limit} (data.seq_len)",
    }
    divided = {"split": f"split into pieces of at most {limit} (data.seq_len)"}
    found_lost, found_divided = (
        [f"{share(notes[what], notes['rows'], 'row')} {text}" for what, text in texts.items() if notes[what]]
        for texts in (lost, divided)
    )
    if empty := notes.get("empty_files"):
        found_divided.append(f"{counted(empty, 'empty file')} skipped")
    if notes.get("divided"):
        found_divided.append("one text is longer than the held-out share: its last part is held out, the rest trained")
    return found_lost, found_divided


def pack_rows(
    rows: EncodedRows, data: Data, seed: int, fraction: float | None = None, layout: int = LAYOUT
) -> list[Corpus]:
    """Return the corpus of these rows; with a `fraction` of their tokens to hold out, the one without them and theirs.

    No row is in both. A text is divided only when whole rows give less than half of the tokens to hold out. Its end is
    then held out as a row of its own, so that none of its tokens is a label of the first part. Raises DataError when
    either corpus would be empty.
    """
    names = ("train",) if fraction is None else ("train", "held")

    def write(folder: Path) -> None:
        ends = rows.wholes
        starts, stops, held, divided = ends[:-1], ends[1:], np.zeros(len(ends) - 1, bool), 0
        if fraction is not None:
            starts, stops, held, divided = choose_held_out(ends, fraction, seed, data.format.long_rows == "split")
        for name, side in zip(names, (~held, held), strict=False):
            pieces, offsets, labels = cut_and_pack(
                starts[side], stops[side], rows.trained, data, None if layout == BY_LENGTH else seed
            )
            if not len(pieces):
                use = "to hold out" if name == "held" else "to train on"
                raise DataError(f"data.eval: fraction {fraction} of {len(ends) - 1} rows leaves none {use}")
            if rows.paired:
                pieces, offsets, labels = split_pairs(pieces, offsets, rows.ends, rows.trained)
            for kind, values in zip(_PACKED.values(), (pieces, offsets, labels), strict=True):
                np.save(folder / f"{name}-{kind}.npy", values)
        (folder / "notes.json").write_text(json.dumps({"divided": divided}), encoding="utf-8")

    folder = cached_folder("packed", [rows.name, seed, fraction, layout], write)
    notes = rows.notes | json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    return [
        Corpus(
            **vars(rows)
            | {"notes": notes}
            | {part: _array(folder / f"{name}-{kind}.npy") for part, kind in _PACKED.items()}
        )
        for name in names
    ]


_PACKED = {"pieces": "pieces", "offsets": "blocks", "labels": "labels"}  # field of `Corpus` → its file in the cache


def _array(path: Path) -> Any:
    return np.load(path, mmap_mode="r")


def choose_held_out(
    ends: Ints, fraction: float, seed: int, divisible: bool
) -> tuple[Ints, Ints, np.ndarray[Any, Any], int]:
    """Draw rows by `seed` until they have this fraction of all tokens.

    `ends` int64 [R+1]: the rows' offsets. Returns starts [R'], ends [R'], whether each row is held out [R'], and how
    many were divided (0 or 1).
    """
    lengths, wanted = np.diff(ends), round(fraction * int(ends[-1]))
    drawn = np.random.default_rng([seed, 0, 1]).permutation(len(lengths))  # [seed, epoch] is the stream's
    short = drawn[lengths[drawn] <= wanted]
    whole = short[: np.searchsorted(np.cumsum(lengths[short]), wanted, side="right")]
    missing = wanted - int(lengths[whole].sum())  # tokens that whole rows do not give
    held = np.zeros(len(lengths), bool)
    held[whole] = True
    if missing <= wanted / 2 or len(short) == len(drawn):
        return ends[:-1], ends[1:], held, 0
    long = int(drawn[lengths[drawn] > wanted][0])
    if not divisible:
        held[long] = True
        return ends[:-1], ends[1:], held, 0
    ends = np.insert(ends, long + 1, ends[long + 1] - missing)
    return ends[:-1], ends[1:], np.insert(held, long + 1, True), 1


def open_rows(
    path: DataPath, data: Data, tokenizer: Any, max_rows: int | None, progress: Progress, day: date | None = None
) -> EncodedRows:
    """Return the rows of a data path from the cache, made by the first process that needs them.

    Raises DataError for wrong rows, for files that change while they are read, and when no row has a trained token.
    """
    readable_files(path, progress=progress)  # downloads what is in an object store
    before = data_stamps(path)
    content = fingerprint(path)
    key = {
        "version": [__version__, LAYOUT], "content": content, "tokenizer": tokenizer_digest(tokenizer),
        "max_rows": max_rows, "day": day and day.isoformat(),
        "keys": [value for name, value in vars(data).items() if name not in NOT_OF_TOKENS],
    }  # fmt: skip

    def write(folder: Path) -> None:
        _write_rows(folder, path, data, Encoder(tokenizer, data, day), max_rows, progress)
        if data_stamps(path) != before:
            raise DataError(f"{listed(places(path))} changed while it was read: run again when nothing writes to it")

    folder = cached_folder("data", key, write)
    flat: dict[str, Any] = {name: np.memmap(folder / f"{name}.bin", dtype, "r") for name, dtype in _STREAMS.items()}
    arrays = {name: _array(folder / f"{name}.npy") for name in ("lengths", "ends")}
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    digest = (folder / DIGEST_FILE).read_text(encoding="ascii")
    return EncodedRows(
        **flat, **arrays, notes=notes, seq_len=data.seq_len, pad=pad, fingerprint=content, digest=digest,
        name=folder.name, paired=data.format.is_paired,
    )  # fmt: skip


_STREAMS: dict[str, Any] = {"tokens": np.uint32, "trained": np.bool_}


def _write_rows(
    folder: Path, path: DataPath, data: Data, encode: Encoder, max_rows: int | None, progress: Progress
) -> None:
    """Tokenise every row into flat files."""
    sources = open_sources(path)
    available = sum(len(source) for source in sources)
    total = min(available, max_rows) if max_rows is not None else available
    ends, done, labels, digest = array("q", [0]), 0, 0, hashlib.sha256()
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as trained:
        for batch in read_all_rows(sources, data, max_rows):
            for ids, mask in encode(batch):
                row = array("I", ids).tobytes()
                tokens.write(row)
                trained.write(mask)
                ends.append(ends[-1] + len(ids))
                digest.update(len(ids).to_bytes(8) + row + mask)
                labels += mask.count(TRAINED, 1)  # nothing predicts the first token of a row
            done += len(batch)
            progress("tokenise", done, total)
    if ends[-1] == 0:
        raise DataError(f"{listed(places(path))}: none of the {done} rows has a trained token")
    np.save(folder / "lengths.npy", np.array(encode.lengths))
    np.save(folder / "ends.npy", np.array(ends))
    empty = max(0, count_files(path) - len(sources))
    notes = {
        "rows": done,
        "available": available,
        "empty_files": empty,
        **encode.counts,
        "tokens": int(ends[-1]),
        "label_tokens": labels,
    }
    (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")
    (folder / DIGEST_FILE).write_text(digest.hexdigest(), encoding="ascii")
