"""Rows → tokens → packed blocks, once, before any process group exists; then `batch(position)`, a pure function.

The cache is a folder of flat, memory-mapped arrays named by the content that made it, so the ranks of a node share one
copy and a second run starts at once. Words used here:

    row     one document or conversation, as tokens
    piece   a run of tokens of one row that lies in one block; pieces of a block do not attend to one another
    block   `seq_len` tokens: what the model sees as one sequence
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from fsdptrain import __version__
from fsdptrain.errors import DataError, RecipeError
from fsdptrain.plan import Plan
from fsdptrain.rows import fingerprint, open_sources, read, stamps
from fsdptrain.schema import Data

LAYOUT = 3  # of a cached corpus: another number, other folders
SUMMED = 2**26  # bytes at the beginning of a prepared file whose checksum is kept; beyond, its size is enough
SUMS = "sums.json"
TEMPLATE_S = 30  # seconds that a chat template may take over one conversation, and bytes beyond those in use before
TEMPLATE_BYTES = 2**32
IGNORED = -100  # the label of a position that carries no loss
TRAINED = 1  # in the flags of a row
Row = tuple[list[int], bytes]  # tokens; a byte for each, 1 where it is to be predicted
Progress = Callable[[str, int, int], None]
Batch = dict[str, torch.Tensor]
Ints = np.ndarray[Any, np.dtype[np.int64]]

# For tokenizers without a chat template: readable, and every assistant turn ends with the end-of-sequence token.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


@dataclass(frozen=True)
class Corpus:
    """The cached token stream of one data set, cut into pieces and packed into blocks.

    `tokens` uint32 [T]; `trained` bool [T], whether a token is to be predicted;
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
        gets the flash kernel. A number of -1 gives a block of padding.
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
            positions[row, at:] = np.arange(length, length + self.seq_len - at)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def show(self, tokenizer: Any, number: int = 0) -> str:
        """Block `number`'s first piece as text, with the trained parts in ⟦ ⟧."""
        start, length, _ = self.pieces[self.blocks[number]]
        text, trained = "", False
        for i in range(start, min(start + length, start + 400)):
            if self.trained[i] != trained:
                trained = bool(self.trained[i])
                text += "⟦" if trained else "⟧"
            text += tokenizer.decode([int(self.tokens[i])])
        return text + ("⟧" if trained else "") + ("…" if length > 400 else "")


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


def prepare(plan: Plan, tokenizer: Any, progress: Progress) -> tuple[Stream, list[int], Corpus]:
    """The training stream, the held-out block numbers and the corpus they belong to.

    Raises DataError for wrong rows, and when no row with a trained token is left.
    """
    data, seed = plan.recipe.data, plan.recipe.seed
    corpus = open_corpus(plan.data_path, data, tokenizer, data.max_rows, progress)
    numbers = np.arange(len(corpus))
    if plan.eval_path is not None:
        held_out = open_corpus(plan.eval_path, data, tokenizer, (data.eval or {}).get("max_rows"), progress)
        return Stream(corpus, numbers, seed), list(range(len(held_out))), held_out
    if data.eval is None:
        return Stream(corpus, numbers, seed), [], corpus
    count = max(1, round(data.eval["fraction"] * len(corpus)))
    if count >= len(corpus):
        raise DataError(f"data.eval: fraction {data.eval['fraction']} of {len(corpus)} blocks leaves none to train on")
    chosen = np.sort(np.random.default_rng([seed, 0, 1]).permutation(len(corpus))[:count])  # no epoch's stream
    return Stream(corpus, np.setdiff1d(numbers, chosen), seed), [int(n) for n in chosen], corpus


def open_corpus(path: str, data: Data, tokenizer: Any, max_rows: int | None, progress: Progress) -> Corpus:
    """The corpus of a data path from the cache; whoever holds the lock first makes it."""
    before = stamps(path)
    content = fingerprint(path)
    wanted = {
        "version": [__version__, LAYOUT], "content": content, "tokenizer": tokenizer_digest(tokenizer),
        "max_rows": max_rows, "keys": [data.format, data.columns, data.seq_len, data.packing, data.train_on],
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir("data") / name
    with FileLock(f"{folder}.lock"):
        if not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            scratch = folder.with_suffix(f".{os.getpid()}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            try:
                _write_corpus(scratch, path, data, tokenizer, max_rows, progress)
                if stamps(path) != before:
                    raise DataError(f"{path} was changed while it was read: run again when nobody writes to it")
                seal(scratch)
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    flat = {name: np.memmap(folder / f"{name}.bin", dtype, "r") for name, dtype in _STREAMS.items()}
    notes = json.loads((folder / "notes.json").read_text(encoding="utf-8"))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return Corpus(**flat, **arrays, notes=notes, seq_len=data.seq_len, pad=pad, fingerprint=content)


_ARRAYS = ("pieces", "blocks", "labels", "lengths")
_STREAMS: dict[str, Any] = {"tokens": np.uint32, "trained": np.bool_}


def cache_dir(kind: str) -> Path:
    """The folder that keeps what is prepared of a kind, made if need be: data, or tokenizers.

    It is in $FSDPTRAIN_CACHE, else in fsdptrain/ of the user's cache folder. Raises RecipeError where none can be had.
    """
    wanted, base = os.environ.get("FSDPTRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(wanted or Path(base or Path.home() / ".cache") / "fsdptrain") / kind
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
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
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [rules, str(tokenizer.chat_template), str(sorted(tokenizer.special_tokens_map.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


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
    flags = np.memmap(folder / "trained.bin", np.bool_, "r")
    pieces = cut(np.array(ends), data)
    labels = piece_labels(pieces, flags)
    order, blocks = pack(pieces[labels > 0], data)
    pieces = pieces[labels > 0][order]
    block_labels = np.add.reduceat(labels[labels > 0][order], blocks[:-1])
    for name, values in zip(_ARRAYS, (pieces, blocks, block_labels, np.array(encode.lengths)), strict=True):
        np.save(folder / f"{name}.npy", values)
    notes = {"rows": done, **encode.counts, "tokens": int(ends[-1]), "label_tokens": int(block_labels.sum())}
    (folder / "notes.json").write_text(json.dumps(notes), encoding="utf-8")


class Encoder:
    """Rows of one format → (token ids, trained flags, a byte each), with the counts of what was cut or dropped."""

    def __init__(self, tokenizer: Any, data: Data) -> None:
        self.tokenizer, self.data = tokenizer, data
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        if tokenizer.eos_token_id is None:
            raise DataError("model.tokenizer: has no end-of-sequence token, so no document could ever end")
        self.eos = int(tokenizer.eos_token_id)
        empty = tokenizer("", add_special_tokens=True).input_ids  # also turns truncation and padding off in the backend
        self.bos = [int(empty[0])] if empty and empty[0] == tokenizer.bos_token_id else []
        self.marks = tuple(tokenizer.get_added_vocab())
        self.lengths = array("I")  # tokens of each row, before the cut
        self.counts = {"cut": 0, "dropped": 0, "split": 0, "untrained turns": 0}

    def __call__(self, rows: list[dict[str, Any]]) -> Iterator[Row]:
        """Encode a batch of rows; rows without a trained token are dropped and counted."""
        for ids, mask in getattr(self, f"_{self.data.format}")(rows):
            self.lengths.append(len(ids))
            if self.data.format == "text":
                self.counts["split"] += len(ids) > self.data.seq_len and self.data.packing != "concat"
            elif len(ids) > self.data.seq_len and self.data.packing != "concat":
                ids, mask = ids[: self.data.seq_len], mask[: self.data.seq_len]
                self.counts["cut"] += 1
            if TRAINED in mask[1:]:
                yield ids, mask
            else:
                self.counts["dropped"] += 1

    def _ids(self, texts: list[str]) -> Iterable[list[int]]:
        if self.backend is not None:  # without offsets and attention masks, which nobody asks for, in half the time
            return (found.ids for found in self.backend.encode_batch_fast(texts, add_special_tokens=False))
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        return encoded

    def _framed(self, ids: list[int], mask: bytes) -> Row:
        """A row with one begin-of-sequence token where the tokenizer wants it, and a trained end."""
        ids, mask = self._begun(ids, mask)
        return (ids, mask) if ids[-1:] == [self.eos] else ([*ids, self.eos], mask + b"\1")

    def _begun(self, ids: list[int], mask: bytes) -> Row:
        return (self.bos + ids, b"\0" + mask) if self.bos and ids[:1] != self.bos else (ids, mask)

    def _text(self, rows: list[dict[str, Any]]) -> Iterator[Row]:
        for ids in self._ids([row["text"] for row in rows]):
            yield self._framed(ids, b"\1" * len(ids))

    def _prompt_completion(self, rows: list[dict[str, Any]]) -> Iterator[Row]:
        prompts = self._ids([_with_gap(row["prompt"], row["completion"]) for row in rows])
        completions = self._ids([row["completion"] for row in rows])
        asked = b"\1" if self.data.train_on == "all" else b"\0"
        for prompt, completion in zip(prompts, completions, strict=True):
            yield self._framed(prompt + completion, asked * len(prompt) + b"\1" * len(completion))

    def _chat(self, rows: list[dict[str, Any]]) -> Iterator[Row]:
        rendered = [self._rendered(row["messages"]) for row in rows]
        encoded = self.tokenizer(
            [text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for ids, offsets, (text, spans) in zip(encoded.input_ids, encoded.offset_mapping, rendered, strict=True):
            edges = {edge for span in spans for edge in span}
            if all(edges.isdisjoint(range(start + 1, end)) for start, end in offsets):
                mask = bytes(end > start and any(a <= start < b for a, b in spans) for start, end in offsets)
            else:
                ids, mask = self._in_parts(text, spans)
            yield self._begun(ids, mask)

    def _in_parts(self, text: str, spans: list[tuple[int, int]]) -> Row:
        """Tokens of a text that are never partly inside a span, as when the model continues a generation prompt."""
        bounds = sorted({0, len(text), *(edge for span in spans for edge in span)})
        parts = [(text[a:b], any(x <= a < y for x, y in spans)) for a, b in pairwise(bounds)]
        encoded = list(self._ids([part for part, _ in parts]))
        mask = bytes(trained for ids, (_, trained) in zip(encoded, parts, strict=True) for _ in ids)
        return [token for ids in encoded for token in ids], mask

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        try:
            with _bounded():
                return self._render(messages)
        except (TimeoutError, MemoryError) as error:
            raise DataError(f"the chat template has no end: {error!r}; it got {str(messages)[:120]}") from None

    def _render(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and the character spans to train: all, or what each assistant turn adds.

        A turn's span begins where the template's generation prompt ends, and ends with its end-of-turn token.
        """
        text = self._template(messages, False)
        if self.data.train_on == "all":
            return text, [(0, len(text))]
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                after = self._template(messages[: i + 1], False)
                before = self._before(messages[: i + 1], after)
                if not (text.startswith(after) and after.startswith(before)):
                    if i + 1 < len(messages):  # the template rewrites earlier turns once there is a later one
                        self.counts["untrained turns"] += 1
                        continue
                    after = text
                start = len(before) if text.startswith(before) else _common(before, text)
                turn = text[start : len(after)].rstrip()
                spans.append((start, start + len(turn) if turn.endswith(self.marks) else len(after)))
        return text, spans

    def _before(self, messages: list[dict[str, Any]], after: str) -> str:
        """What stands before the words of the last of these messages; `after` is what stands up to their end."""
        if len(messages) > 1:
            return self._template(messages[:-1], True)
        opening = self._template(messages, True).removeprefix(after)  # no template renders a conversation of nothing
        return after[: after.find(opening) + len(opening)] if opening in after else after

    def _template(self, messages: list[dict[str, Any]], prompt: bool) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # a template may raise anything through jinja
            raise DataError(
                f"the chat template refuses a conversation: {error!r:.300}; it begins {str(messages)[:120]}"
            ) from None


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Inside, whatever takes longer than TEMPLATE_S or more than TEMPLATE_BYTES of memory is stopped.

    transformers renders in jinja's sandbox, from which no code gets out; but loops in loops and products of texts do
    not end there. The clock is a signal's, so it runs in a process's main thread only, as all of `prepare` does.
    """

    def late(signum: int, frame: Any) -> None:
        raise TimeoutError(f"it takes longer than {TEMPLATE_S} s")

    in_use = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = min(limit for limit in (in_use + TEMPLATE_BYTES, soft, hard) if limit != resource.RLIM_INFINITY)
    clock = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGALRM, late) if clock else None
    resource.setrlimit(resource.RLIMIT_AS, (room, hard))
    try:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, TEMPLATE_S)
        yield
    finally:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _common(a: str, b: str) -> int:
    """How many characters two texts share at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_gap(prompt: str, completion: str) -> str:
    """The prompt, with a line break after it unless either side brings its own white space."""
    return prompt if prompt[-1:].isspace() or completion[:1].isspace() else prompt + "\n"


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
