"""Windows of files (`data.window`): a corpus of which only some files are prepared at a time.

Which files share a window is drawn by the seed. The sequences of a window are read in a permutation of their own, then
those of the next one, and after the last window the first one begins again. Where a window begins is known once those
before it are prepared: a run keeps how many sequences they have, so that a resume need not prepare them again. When all
ranks have entered a window (`train.window_barrier`), what was prepared of those before it is removed from the cache.
Its parts are named by data.window, too, so that other runs without it never rely on them.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from fsdptrain.data.cache import remove_folder
from fsdptrain.data.corpus import Corpus, Stream, epoch_order
from fsdptrain.data.sources import data_objects, file_sizes
from fsdptrain.data.token_store import TokenArray
from fsdptrain.errors import Problem, RecipeError
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.run_folder.events import Progress
from fsdptrain.text import counted


class WindowRead(TypedDict):
    """What a run keeps of a window that it has read: how many sequences it has, and the digest of its tokens."""

    sequences: int
    tokens: str


def windows_of(plan: Plan) -> list[dict[str, int]]:
    """Return the windows of the training data, in the order in which they are read: the bytes of each file by name.

    One window if `data.window` is not set, or if there are no more files. Several ones have no empty files.
    """
    size = plan.recipe.data.window
    files = {} if size is None else file_sizes(plan.data_path)
    filled = [name for name, number in files.items() if number]
    if size is None or len(filled) <= size:
        return [files]
    drawn = np.random.default_rng([plan.recipe.seed, 0, 3]).permutation(len(filled))  # [seed, 0, 2] is the packing's
    groups = (sorted(drawn[at : at + size]) for at in range(0, len(filled), size))
    return [{filled[number]: files[filled[number]] for number in group} for group in groups]


def of_window(plan: Plan, files: Iterable[str]) -> Plan:
    """Return the plan of a run that trains on these files alone."""
    return dataclasses.replace(plan, data_paths=[[*files]])


def of_first_window(plan: Plan) -> tuple[Plan, list[dict[str, int]]]:
    """Return the plan with the first window of its data, and all windows; a single window is a run without the key."""
    windows = windows_of(plan)
    if len(windows) == 1:
        return varied(plan, {"data.window": None}), windows
    return of_window(plan, windows[0]), windows


def windows_note(windows: Sequence[dict[str, int]], sequences: int) -> str:
    """Return a sentence on several windows, of which the first has this many sequences."""
    return (
        f"{sum(map(len, windows)):,} files in {len(windows):,} windows of {len(windows[0]):,} (data.window); the first "
        f"has {counted(sequences, 'sequence')}, the whole some {_estimate(windows, sequences):,}"
    )


def _estimate(windows: Sequence[dict[str, int]], sequences: int) -> int:
    """Estimate by their bytes how many sequences all windows have, if the first of them has this many."""
    sizes = [sum(files.values()) for files in windows]
    return round(sequences * sum(sizes) / sizes[0])


@dataclass(frozen=True)
class Windows:
    """The windows of a run: the `files` of each, and in `known` what the run keeps of those that it has read.

    `make` prepares the window of a number. Those in `opened` can be read although the cache has them no more.
    """

    files: list[dict[str, int]]
    make: Callable[[int, Progress], Corpus]
    known: list[WindowRead]
    opened: dict[int, Corpus] = field(default_factory=dict)

    @property
    def starts(self) -> list[int]:
        """The number of the first sequence of each known window, and that after the last of them."""
        return [0, *accumulate(read["sequences"] for read in self.known)]

    def estimated_length(self) -> int:
        """Estimate how many sequences all windows have, from the first one."""
        return _estimate(self.files, self.known[0]["sequences"])

    def note(self) -> str:
        """Return a sentence on the windows."""
        return windows_note(self.files, self.known[0]["sequences"])

    def open(self, number: int, progress: Progress = lambda *_: None) -> Corpus:
        """Return a window, prepared if it is not in the cache; of those that are not known, the first one.

        Raises RecipeError if it is another than the run has read before.
        """
        if number not in self.opened:
            corpus = self.make(number, progress)
            for array in (corpus.tokens, corpus.trained):
                cast(TokenArray, array).open_files()
            read = WindowRead(sequences=len(corpus), tokens=corpus.digest)
            if number == len(self.known):
                self.known.append(read)
            if self.known[number] != read:
                raise RecipeError([Problem(
                    f"window {number + 1} of {len(self.files)} (with {next(iter(self.files[number]))}) has other rows, "
                    "tokens or sequences than when this run read it: restore the files, the tokenizer and the versions "
                    "of transformers and tokenizers, or choose another `name` or output_dir", "data.path",
                )])  # fmt: skip
            self.opened[number] = corpus
        return self.opened[number]

    def is_known(self, position: int) -> bool:
        """Return whether the window of a position of the stream is known without preparing others."""
        return position < self.starts[-1] or len(self.known) == len(self.files)

    def place(self, position: int) -> tuple[int, int, int]:
        """Return epoch and window of a position of the stream, and how many sequences of the window are before it.

        Windows that are not known are opened until that is known.
        """
        while not self.is_known(position):
            self.open(len(self.known))
        starts = self.starts
        epoch, nth = divmod(position, starts[-1]) if len(self.known) == len(self.files) else (0, position)
        window = bisect_right(starts, nth) - 1
        return epoch, window, nth - starts[window]

    def known_at(self, positions: Iterable[int]) -> set[int]:
        """Return the windows of these positions of the stream, as far as they are known."""
        return {self.place(position)[1] for position in positions if self.is_known(position)}

    def end_of(self, position: int) -> int:
        """Return the first position of the stream behind the window of a position."""
        _, window, nth = self.place(position)
        return position - nth + self.known[window]["sequences"]

    def leave(self, numbers: Iterable[int], remove: bool) -> None:
        """Forget windows that have been read; `remove` also removes what the cache has of their files."""
        for number in numbers:
            corpus = self.opened.pop(number)
            if not remove:
                continue
            packed = str(cast(np.memmap, corpus.pieces).filename)
            for folder in (*cast(TokenArray, corpus.tokens).folders, Path(packed).parent):
                remove_folder(folder)
            for each in data_objects([*self.files[number]]):
                each.copy.unlink(missing_ok=True)


@dataclass(frozen=True)
class WindowStream(Stream):
    """An endless stream over windows: each as a whole, in a new permutation, before the next one.

    `corpus` is the window in which the run began or continued.
    """

    windows: Windows

    def place(self, position: int) -> tuple[int, int]:
        """Return the window that is read at a position, and the number of the sequence in it."""
        epoch, window, nth = self.windows.place(position)
        return window, int(epoch_order(self.seed, window, epoch, self.windows.known[window]["sequences"])[nth])

    def part(self, source: int) -> Corpus:
        """Return the corpus of a window, prepared if it is not in the cache."""
        return self.windows.open(source)

    def some_rows(self) -> Corpus:
        """Return a window that is open: `corpus` is one that may have left the cache."""
        return next(iter(self.windows.opened.values()))

    @property
    def starts(self) -> list[int]:
        """The number of the first sequence of each known window."""
        return self.windows.starts
