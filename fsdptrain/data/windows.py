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
from typing import Any, cast

import numpy as np

from fsdptrain.data.cache import remove_folder
from fsdptrain.data.corpus import Corpus, Stream, epoch_order
from fsdptrain.data.sources import data_objects, file_sizes
from fsdptrain.data.token_store import TokenArray
from fsdptrain.errors import Problem, RecipeError
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.text import counted

Window = dict[str, int]  # the bytes of each file by name
Known = list[dict[str, Any]]  # of each window that a run has read: how many `sequences` it has, digest of its `tokens`


def windows_of(plan: Plan) -> list[Window]:
    """Return the windows of the training data, in the order in which they are read.

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


def of_first_window(plan: Plan) -> tuple[Plan, list[Window]]:
    """Return the plan with the first window of its data, and all windows; a single window is a run without the key."""
    windows = windows_of(plan)
    if len(windows) == 1:
        return varied(plan, {"data.window": None}), windows
    return of_window(plan, windows[0]), windows


def windows_note(windows: Sequence[Window], sequences: int) -> str:
    """Return a sentence on several windows, of which the first has this many sequences."""
    return (
        f"{sum(map(len, windows)):,} files in {len(windows):,} windows of {len(windows[0]):,} (data.window); the first "
        f"has {counted(sequences, 'sequence')}, the whole some {estimated_length(windows, sequences):,}"
    )


def estimated_length(windows: Sequence[Window], sequences: int) -> int:
    """Estimate by their bytes how many sequences all windows have, if the first of them has this many."""
    sizes = [sum(files.values()) for files in windows]
    return round(sequences * sum(sizes) / sizes[0])


def place_in_window(known: Known, windows: int, position: int) -> tuple[int, int, int] | None:
    """Return epoch and window of a position of the stream, and how many sequences of the window are before it.

    None if that needs windows, of which there are so many in all, that are not known.
    """
    starts = [0, *accumulate(read["sequences"] for read in known)]
    if position >= starts[-1] and len(known) < windows:
        return None
    epoch, nth = divmod(position, starts[-1]) if len(known) == windows else (0, position)
    window = bisect_right(starts, nth) - 1
    return epoch, window, nth - starts[window]


@dataclass(frozen=True)
class WindowStream(Stream):
    """An endless stream over windows: each as a whole, in a new permutation, before the next one.

    `windows` are the files of each, `make` prepares the one of a number. Those in `opened` can be read although the
    cache has them no more. `corpus` is the window in which the run began or continued.
    """

    windows: list[Window]
    make: Callable[[int], Corpus]
    known: Known
    opened: dict[int, Corpus] = field(default_factory=dict)

    def place_in_window(self, position: int) -> tuple[int, int, int]:
        """Return epoch, window and number in it of a position of the stream; windows are opened until it is known."""
        while (found := place_in_window(self.known, len(self.windows), position)) is None:
            self.part(len(self.known))
        return found

    def known_at(self, positions: Iterable[int]) -> set[int]:
        """Return the windows of these positions of the stream, as far as they are known."""
        found = (place_in_window(self.known, len(self.windows), position) for position in positions)
        return {place[1] for place in found if place}

    def place(self, position: int) -> tuple[int, int]:
        """Return the window that is read at a position, and the number of the sequence in it."""
        epoch, window, nth = self.place_in_window(position)
        return window, int(epoch_order(self.seed, window, epoch, self.known[window]["sequences"])[nth])

    def part(self, source: int) -> Corpus:
        """Return the corpus of a window, prepared if it is not in the cache; of those that are not known, the first.

        Raises RecipeError if it is another than the run has read before.
        """
        if source not in self.opened:
            corpus = self.make(source)
            for array in (corpus.tokens, corpus.trained):
                cast(TokenArray, array).open_files()
            read = {"sequences": len(corpus), "tokens": corpus.digest}
            if source == len(self.known):
                self.known.append(read)
            if self.known[source] != read:
                raise RecipeError([Problem(
                    f"window {source + 1} of {len(self.windows)} (with {next(iter(self.windows[source]))}) has other "
                    "rows, tokens or sequences than when this run read it: restore the files, the tokenizer and the "
                    "versions of transformers and tokenizers, or choose another `name` or output_dir", "data.path",
                )])  # fmt: skip
            self.opened[source] = corpus
        return self.opened[source]

    def some_rows(self) -> Corpus:
        """Return a window that is open: `corpus` is one that may have left the cache."""
        return next(iter(self.opened.values()))

    @property
    def starts(self) -> list[int]:
        """The number of the first sequence of each known window, and that after the last of them."""
        return [0, *accumulate(read["sequences"] for read in self.known)]

    def leave(self, numbers: Iterable[int], remove: bool) -> None:
        """Forget windows that have been read; `remove` also removes what the cache has of their files."""
        for number in numbers:
            corpus = self.opened.pop(number)
            if not remove:
                continue
            packed = str(cast(np.memmap, corpus.pieces).filename)
            for folder in (*cast(TokenArray, corpus.tokens).folders, Path(packed).parent):
                remove_folder(folder)
            for each in data_objects([*self.windows[number]]):
                each.copy.unlink(missing_ok=True)
