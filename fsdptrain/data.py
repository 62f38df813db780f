"""Rows → tokens → packed blocks, once, before any process group exists; then `batch(position)`, a pure function.

The cache is a folder of flat, memory-mapped arrays named by the content that made it, so the ranks of a node share one
copy and a second run starts at once. Words used here:

    row     one document or conversation, as tokens
    piece   a run of tokens of one row that lies in one block; pieces of a block do not attend to one another
    block   `seq_len` tokens: what the model sees as one sequence
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from fsdptrain import __version__
from fsdptrain.encode import Encoder
from fsdptrain.errors import DataError, RecipeError, is_disk_full
from fsdptrain.plan import LAYOUT, Plan
from fsdptrain.rows import fingerprint, open_sources, read, stamps
from fsdptrain.schema import Data

SUMMED = 2**26  # bytes at the beginning of a prepared file whose checksum is kept; beyond, its size is enough
SUMS = "sums.json"
IGNORED = -100  # the label of a position that carries no loss
Progress = Callable[[str, int, int], None]
Batch = dict[str, torch.Tensor]
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Corpus:
    """The cached token stream of one data set, cut into pieces and packed into blocks.

    `tokens` uint32 [T]; `trained` bool [T], whether a token is to be predicted; `ends` int64 [R+1] offsets of rows;
    `pieces` int64 [P, 3] (first token, length, end of its row), in block order; `blocks` int64 [B+1] offsets into
    pieces; `labels` int64 [B] label tokens of each block; `notes` what was split, cut or dropped; `lengths` uint32 [R]
    tokens of every row before anything was cut.
    """

    tokens: np.ndarray[Any, Any]
    trained: np.ndarray[Any, Any]
    pieces: Ints
    blocks: Ints
    labels: Ints
    notes: dict[str, int]
    seq_len: int
    pad: int
    fingerprint: str
    lengths: np.ndarray[Any, Any]
    ends: Ints
    name: str = ""
    counting: bool = True  # whether the positions of padding go on from those of the last piece

    def __len__(self) -> int:
        return len(self.blocks) - 1

    def fill(self) -> float:
        """The share of real (not padding) tokens in all blocks."""
        return float(self.pieces[:, 1].sum()) / (len(self) * self.seq_len)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Blocks `numbers` as int64 tensors [len(numbers), seq_len]: `input_ids`, `labels`, `position_ids`.

        Labels are already shifted: position i is to predict labels[i], or nothing where that is -100. Position ids
        restart at every piece, which is how transformers knows that pieces do not attend to one another. Padding goes
        on counting: nothing before it sees it, and a block of one piece needs no mask but the causal one, so that it
        gets the flash kernel; where the highest position matters to all (`counting` is False) its positions are 0.
        A number of -1 gives a block of padding.
        """
        shape = (len(numbers), self.seq_len)
        ids, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, number in enumerate(numbers):
            at = length = 0
            for start, length, end in self.pieces[self.blocks[number] : self.blocks[number + 1]] if number >= 0 else ():
                ids[row, at : at + length] = self.tokens[start : start + length]
                positions[row, at : at + length] = np.arange(length)
                targets = slice(start + 1, min(start + length + 1, end))
                wanted = np.where(self.trained[targets], self.tokens[targets].astype(np.int64), IGNORED)
                labels[row, at : at + len(wanted)] = wanted
                at += length
            if self.counting:
                positions[row, at:] = np.arange(length, length + self.seq_len - at)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def show(self, tokenizer: Any, number: int = 0) -> str:
        """Block `number`'s first piece as text, with the trained parts in ⟦ ⟧."""
        start, length, _ = (int(n) for n in self.pieces[self.blocks[number]])
        shown = slice(start, start + min(length, 400))
        ids, flags = self.tokens[shown].tolist(), np.asarray(self.trained[shown])
        turns = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))  # starts and ends of what is trained
        places = [len(tokenizer.decode(ids[:turn])) for turn in turns]  # of the whole: a part may lose its first space
        text = tokenizer.decode(ids)
        for place, mark in reversed(list(zip(places, itertools.cycle("⟦⟧"), strict=False))):
            text = text[:place] + mark + text[place:]
        return text + ("…" if length > 400 else "")


@dataclass(frozen=True)
class Stream:
    """An endless stream over some blocks of a corpus: epoch after epoch, each a new permutation.

    What stands at a position depends on (seed, position) alone: not on the world size, nor on what was read before.
    """

    corpus: Corpus
    numbers: Ints  # the blocks in this stream
    seed: int

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, positions: Sequence[int]) -> list[int]:
        """The block numbers at these positions of the stream."""
        return [int(self.numbers[_permutation(self.seed, p // len(self), len(self))[p % len(self)]]) for p in positions]

    def batch(self, positions: Sequence[int]) -> Batch:
        """The blocks at these positions; see `Corpus.batch`."""
        return self.corpus.batch(self.at(positions))

    def label_tokens(self, positions: Sequence[int]) -> int:
        """How many label tokens the blocks at these positions hold together."""
        return int(self.corpus.labels[self.at(positions)].sum())

    def digest(self, positions: Sequence[int]) -> str:
        """A short digest of which blocks these are, to compare runs by."""
        return hashlib.sha256(np.array(self.at(positions), np.int64).tobytes()).hexdigest()[:16]


_permutations: dict[tuple[int, int, int], Ints] = {}


def _permutation(seed: int, epoch: int, size: int) -> Ints:
    """The order of one epoch; the two newest are kept, since a batch may straddle two epochs."""
    wanted = (seed, epoch, size)
    if wanted not in _permutations:
        while len(_permutations) > 3:
            _permutations.pop(next(iter(_permutations)))
        _permutations[wanted] = np.random.default_rng([seed, epoch]).permutation(size)
    return _permutations[wanted]


def prepare(plan: Plan, tokenizer: Any, progress: Progress, counting: bool = True) -> tuple[Stream, list[int], Corpus]:
    """The training stream, the held-out block numbers and the corpus they belong to; `counting` as in `Corpus`.

    Raises DataError for wrong rows, and when no row with a trained token is left.
    """
    data, seed = plan.recipe.data, plan.recipe.seed
    corpus = open_corpus(plan.data_path, data, tokenizer, data.max_rows, progress)
    corpus = dataclasses.replace(corpus, counting=counting)
    held_out = None
    if plan.eval_path is not None:
        held_out = open_corpus(plan.eval_path, data, tokenizer, (data.eval or {}).get("max_rows"), progress)
        held_out = dataclasses.replace(held_out, counting=counting)
    elif data.eval is not None:
        corpus, held_out = divide(corpus, data, data.eval["fraction"], seed)
    stream = Stream(corpus, np.arange(len(corpus)), seed)
    return stream, list(range(len(held_out))) if held_out else [], held_out or corpus


def divide(corpus: Corpus, data: Data, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
    """A corpus to train on and one to hold out, of whole rows: no row is in both.

    Only where most of what is to be held out cannot be had in whole rows, a text is divided and its end held out: a row
    of its own, so that no token of it is a label of the first part. Raises DataError where either would be empty.
    """

    def write(folder: Path) -> None:
        starts, stops, held, divided = choose(corpus.ends, fraction, seed, data.format == "text")
        for name, side in (("train", ~held), ("held", held)):
            pieces, blocks, labels = arrange(starts[side], stops[side], corpus.trained, data)
            if not len(pieces):
                kept = "to hold out" if name == "held" else "to train on"
                raise DataError(f"data.eval: fraction {fraction} of {len(corpus.ends) - 1} rows leaves none {kept}")
            for kind, values in (("pieces", pieces), ("blocks", blocks), ("labels", labels)):
                np.save(folder / f"{name}-{kind}.npy", values)
        (folder / "notes.json").write_text(json.dumps({"divided": divided}), encoding="utf-8")

    folder = kept("splits", [corpus.name, fraction, seed], write)
    notes = corpus.notes | json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    train, held = (
        dataclasses.replace(
            corpus,
            notes=notes,
            **{kind: np.load(folder / f"{name}-{kind}.npy", mmap_mode="r") for kind in ("pieces", "blocks", "labels")},
        )
        for name in ("train", "held")
    )
    return train, held


def choose(ends: Ints, fraction: float, seed: int, divisible: bool) -> tuple[Ints, Ints, np.ndarray[Any, Any], int]:
    """Draw rows by `seed` until they hold this fraction of all tokens.

    `ends` int64 [R+1]: the rows' offsets. Returns starts and ends of rows, whether each is held out, how many were
    divided.
    """
    lengths, wanted = np.diff(ends), round(fraction * int(ends[-1]))
    drawn = np.random.default_rng([seed, 0, 1]).permutation(len(lengths))  # no epoch's stream
    short = drawn[lengths[drawn] <= wanted]
    whole = short[: np.searchsorted(np.cumsum(lengths[short]), wanted, side="right")]
    missing = wanted - int(lengths[whole].sum())
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


def open_corpus(path: str, data: Data, tokenizer: Any, max_rows: int | None, progress: Progress) -> Corpus:
    """The corpus of a data path from the cache; whoever holds the lock first makes it."""
    before = stamps(path)
    content = fingerprint(path)
    wanted = {
        "version": [__version__, LAYOUT], "content": content, "tokenizer": tokenizer_digest(tokenizer),
        "max_rows": max_rows,
        "keys": [data.format, data.columns, data.seq_len, data.packing, data.train_on, data.separator],
    }  # fmt: skip

    def write(folder: Path) -> None:
        _write_corpus(folder, path, data, tokenizer, max_rows, progress)
        if stamps(path) != before:
            raise DataError(f"{path} was changed while it was read: run again when nobody writes to it")

    folder = kept("data", wanted, write)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    flat: dict[str, Any] = {name: np.memmap(folder / f"{name}.bin", dtype, "r") for name, dtype in _STREAMS.items()}
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return Corpus(**flat, **arrays, notes=notes, seq_len=data.seq_len, pad=pad, fingerprint=content, name=folder.name)


_ARRAYS = ("pieces", "blocks", "labels", "lengths", "ends")
_STREAMS: dict[str, Any] = {"tokens": np.uint32, "trained": np.bool_}


def kept(kind: str, wanted: Any, write: Callable[[Path], None]) -> Path:
    """The cache's folder of what `wanted` (JSON) describes; `write` fills it where there is none, or a damaged one."""
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir(kind) / name
    with FileLock(f"{folder}.lock"):
        if not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            scratch = folder.with_suffix(f".{os.getpid()}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                write(scratch)
                seal(scratch)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def cache_dir(kind: str) -> Path:
    """The folder that keeps what is prepared of a kind, made if need be: data, splits, or tokenizers.

    It is in $FSDPTRAIN_CACHE, else in fsdptrain/ of the user's cache folder. Raises RecipeError where none can be had.
    """
    wanted, base = os.environ.get("FSDPTRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(wanted or Path(base or Path.home() / ".cache") / "fsdptrain") / kind
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        if is_disk_full(error):
            raise
        where = f"{folder}: {error.strerror}" if isinstance(error, OSError) else f"{error}"
        raise RecipeError(
            f"the cache for prepared {kind} cannot be written ({where}); set FSDPTRAIN_CACHE to a folder that can be"
        ) from None
    return folder


def seal(folder: Path) -> None:
    """Write down what is in a prepared folder."""
    (folder / SUMS).write_text(json.dumps(_sums(folder)), encoding="utf-8")


def is_whole(folder: Path) -> bool:
    """Whether a prepared folder holds what it held when it was sealed; a damaged one is made again."""
    try:
        return bool(json.loads((folder / SUMS).read_text(encoding="utf-8")) == _sums(folder))
    except (OSError, ValueError, RecursionError):
        return False


def _sums(folder: Path) -> dict[str, list[int]]:
    """The size of every file, and the CRC-32 of its beginning."""
    found = {}
    for file in folder.iterdir():
        if file.name != SUMS:
            with file.open("rb") as stream:
                found[file.name] = [file.stat().st_size, zlib.crc32(stream.read(SUMMED))]
    return found


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over all that decides which tokens a text becomes: the vocabulary, the rules, the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else _saved(tokenizer)
    split = bool(getattr(tokenizer, "split_special_tokens", False))  # of a text, into plain tokens
    parts = [rules, str(split), str(tokenizer.chat_template), str(sorted(tokenizer.special_tokens_map.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _saved(tokenizer: Any) -> str:
    """All files of a tokenizer written in Python, as text: its vocabulary, its merges, its switches."""
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        files = sorted(file for file in Path(name).rglob("*") if file.is_file())
        return "\0".join(f"{file.name}\0{file.read_bytes().hex()}" for file in files)


def _write_corpus(
    folder: Path, path: str, data: Data, tokenizer: Any, max_rows: int | None, progress: Progress
) -> None:
    """Tokenise every row into flat files, then cut and pack them."""
    sources = open_sources(path)
    total = sum(len(source) for source in sources)
    total = min(total, max_rows) if max_rows is not None else total
    encode = Encoder(tokenizer, data)
    ends, done = array("q", [0]), 0
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as trained:
        for source in sources:
            for batch in read(source, data, None if max_rows is None else max_rows - done):
                for ids, mask in encode(batch):
                    tokens.write(array("I", ids))
                    trained.write(mask)
                    ends.append(ends[-1] + len(ids))
                done += len(batch)
                progress("tokenise", done, total)
    if ends[-1] == 0:
        raise DataError(f"{path}: no row with a trained token is left of {done}")
    offsets = np.array(ends)
    flags = np.memmap(folder / "trained.bin", np.bool_, "r")
    pieces, blocks, labels = arrange(offsets[:-1], offsets[1:], flags, data)
    for name, values in zip(_ARRAYS, (pieces, blocks, labels, np.array(encode.lengths), offsets), strict=True):
        np.save(folder / f"{name}.npy", values)
    counts = {**encode.counts, "divided": 0}
    notes = {"rows": done, **counts, "tokens": int(ends[-1]), "label_tokens": int(labels.sum())}
    (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")


def arrange(starts: Ints, stops: Ints, trained: np.ndarray[Any, Any], data: Data) -> tuple[Ints, Ints, Ints]:
    """Cut and pack rows (first tokens [R], ends [R]): pieces [P, 3], blocks [B+1] and labels [B], as in a `Corpus`.

    Pieces without a label token are left out.
    """
    ends = np.concatenate([[0], np.cumsum(stops - starts)])  # of the rows, one behind the other
    pieces = cut(ends, data)
    shift = (starts - ends[:-1])[np.searchsorted(ends, pieces[:, 0], side="right") - 1]
    placed = pieces + np.stack([shift, np.zeros_like(shift), shift], axis=1)
    labels = piece_labels(placed, trained)
    used = labels > 0
    if not used.any():
        return placed[used], np.zeros(1, np.int64), labels[used]
    order, blocks = pack(pieces[used], data)
    return placed[used][order], blocks, np.add.reduceat(labels[used][order], blocks[:-1])


def cut(ends: Ints, data: Data) -> Ints:
    """Rows (offsets [R+1]) → pieces [P, 3] of at most seq_len tokens: (first token, length, end of the row).

    With `concat` the stream of all rows is cut every seq_len tokens, so that blocks are full; otherwise every row is
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


def piece_labels(pieces: Ints, trained: np.ndarray[Any, Any]) -> Ints:
    """Label tokens of each piece: the trained tokens its positions are to predict, which all lie in the same row."""
    flags = np.asarray(trained)  # of a memory map, too: slicing those takes ten times as long
    start, length, end = pieces.T
    wanted = zip((start + 1).tolist(), np.minimum(start + length + 1, end).tolist(), strict=True)
    return np.array([np.count_nonzero(flags[a:b]) for a, b in wanted], np.int64)


def pack(pieces: Ints, data: Data) -> tuple[Ints, Ints]:
    """Put pieces into blocks: (order of the pieces [P], offsets of the blocks [B+1]).

    `concat` fills block after block in order; `none` gives every piece its own block; `bfd` is best-fit decreasing.
    """
    lengths = pieces[:, 1]
    if data.packing == "none":
        return np.arange(len(pieces)), np.arange(len(pieces) + 1)
    if data.packing == "concat":
        block = pieces[:, 0] // data.seq_len
        changes = np.flatnonzero(np.diff(block)) + 1
        return np.arange(len(pieces)), np.concatenate([[0], changes, [len(pieces)]])
    bins = best_fit_decreasing(lengths.tolist(), data.seq_len)
    order = np.array([piece for members in bins for piece in members])
    return order, np.cumsum([0] + [len(members) for members in bins])


def best_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Bins of at most `size`, each item going to the fullest bin that still takes it, long items first.

    `room` is a bit set of the free spaces that some open bin has; its lowest bit from `length` on is the best fit, so
    an item costs O(size / 64) and not a search over the bins. (Johnson et al., SIAM J. Comput. 3(4), 1974.)
    """
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}
    room = 0
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[item]
        fitting = room >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            number = by_space[space].pop()
            if not by_space[space]:
                room ^= 1 << space
        else:
            space, number = size, len(bins)
            bins.append([])
        bins[number].append(item)
        left = space - length
        by_space.setdefault(left, []).append(number)
        room |= 1 << left
    return bins
