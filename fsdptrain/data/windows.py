"""A corpus of many files, read in windows of some files: each is prepared while the one before it is trained.

Which files share a window is drawn by the seed. A window is what `prepare` makes of its files; its sequences are read
in a permutation of their own, then those of the next one, and after the last window the first one begins again. Where a
window begins is known once those before it are prepared: a run keeps how many sequences they have, so that a resume
need not prepare them again, and their digests. When all ranks have entered a window (`train.borders`), what was
prepared of those before it is removed from the cache. Its parts are named by data.window, too, so that other runs
without it never rely on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from fsdptrain.data.cache import remove_folder
from fsdptrain.data.corpus import Corpus, Mixture, Stream, epoch_order, prepare
from fsdptrain.data.interleave import Interleave
from fsdptrain.data.joined import Joined
from fsdptrain.data.parts import PartEncoder, parts_of
from fsdptrain.data.readers import DataObject
from fsdptrain.data.resume_pins import pinned_windows
from fsdptrain.data.sources import data_objects, file_sizes, quick_fingerprint
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.errors import Problem, RecipeError
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.processes import Child, records_of_parent
from fsdptrain.run_folder.events import Progress
from fsdptrain.text import counted

TRIES = 5  # to open a window, of which another run may remove files at any moment
NICENESS = 19  # of the process that prepares the next window


class WindowRead(TypedDict):
    """What a run keeps of a window that it has read: its sequences, and digests of its files and of its tokens."""

    sequences: int
    content: str
    tokens: str


@dataclass(frozen=True)
class OpenWindow:
    """A window whose files in the cache are open; `paths` are what to remove there when it has been read."""

    corpus: Corpus
    paths: list[Path]


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
        f"has {counted(sequences, 'sequence')}, the whole some {in_all(windows, sequences):,}"
    )


def in_all(windows: Sequence[dict[str, int]], sequences: int) -> int:
    """Return about how many sequences all windows have, by their bytes, if the first of them has this many."""
    sizes = [sum(files.values()) for files in windows]
    return round(sequences * sum(sizes) / sizes[0])


@dataclass(frozen=True)
class Windows(Mixture):
    """The windows of a data set, whose sequences are numbered one window after another; `parts` is the one in use.

    `windows` are their files, `listing` the fingerprint of all types and sizes, `known` what the run keeps of those
    that it has read, the first ones; `opened` are open. `make` prepares one; two threads may ask for it.
    """

    windows: list[dict[str, int]]
    listing: str
    make: Callable[[list[str], Progress], OpenWindow]
    known: list[WindowRead]
    opened: dict[int, OpenWindow] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def starts(self) -> list[int]:
        """The number of the first sequence of each known window, and that after the last of them."""
        return [0, *accumulate(read["sequences"] for read in self.known)]

    @property
    def fingerprint(self) -> str:
        """The digest of the types and sizes of all files: their content is not read yet."""
        return self.listing

    @property
    def digest(self) -> str:
        """The digest of the rows of the first window, as tokens."""
        return self.known[0]["tokens"]

    def open(self, number: int, progress: Progress = lambda *_: None) -> Corpus:
        """Return a window, prepared if it is not in the cache; of those that are not known, the first one.

        Raises RecipeError if it is another than the run has read before.
        """
        with self.lock:
            if number not in self.opened:
                window = self.make([*self.windows[number]], progress)
                corpus = window.corpus
                read = WindowRead(sequences=len(corpus), content=corpus.fingerprint, tokens=corpus.digest)
                if self.known[number : number + 1] not in ([], [read]):
                    raise RecipeError([self._changed(number, read)])
                if number == len(self.known):
                    self.known.append(read)
                self.opened[number] = window
            return self.opened[number].corpus

    def leave(self, numbers: Iterable[int]) -> None:
        """Close windows that have been read, and remove what the cache has of them alone."""
        left = [self.opened.pop(number) for number in numbers]
        kept = {path for window in [*self.opened.values()] for path in window.paths}
        for path in {path for window in left for path in window.paths} - kept:
            if path.is_dir():
                remove_folder(path)
            else:
                path.unlink(missing_ok=True)

    @property
    def note(self) -> str:
        """A sentence on the windows."""
        return windows_note(self.windows, self.known[0]["sequences"])

    def record(self) -> dict[str, Any]:
        """Return what the run keeps of the windows (`pinned.pin_windows`)."""
        return {"files": self.listing, "read": [*self.known]}

    def _changed(self, number: int, read: WindowRead) -> Problem:
        before = self.known[number]
        what, way_out = "data differs from", "put that data back"
        if read["content"] == before["content"]:
            what = "same rows became other tokens or sequences than"
            way_out = "restore the tokenizer, or the versions of transformers and tokenizers"
        message = (
            f"the {what} what this run has read before (window {number + 1} of {len(self.windows)}, with "
            f"{next(iter(self.windows[number]))}): {way_out}, or choose another `name` or output_dir"
        )
        return Problem(message, "data.path")

    def _find(self, number: int) -> tuple[Corpus, int]:
        starts = self.starts
        which = bisect_right(starts, number) - 1
        return self.open(which), number - starts[which]


@dataclass(frozen=True)
class WindowStream(Stream):
    """An endless stream over windows: each as a whole, in a new permutation, before the next one."""

    corpus: Windows

    def place(self, position: int) -> tuple[int, int, int]:
        """Return epoch and window of a position, and how many sequences of the window are before it.

        Windows that are not known are opened until that is known.
        """
        while not self._is_known(position):
            self.corpus.open(len(self.corpus.known))
        starts = self.corpus.starts
        epoch, nth = divmod(position, starts[-1]) if len(starts) > len(self.corpus.windows) else (0, position)
        window = bisect_right(starts, nth) - 1
        return epoch, window, nth - starts[window]

    def _is_known(self, position: int) -> bool:
        starts = self.corpus.starts
        return position < starts[-1] or len(starts) > len(self.corpus.windows)

    def _number(self, position: int) -> int:
        epoch, window, nth = self.place(position)
        start, stop = self.corpus.starts[window : window + 2]
        return start + int(epoch_order(self.seed, window, epoch, stop - start)[nth])

    def known_windows(self, positions: Iterable[int]) -> set[int]:
        """Return the windows of these positions, as far as they are known."""
        return {self.place(position)[1] for position in positions if self._is_known(position)}

    def digest_of_windows(self, positions: Iterable[int]) -> int:
        """Return a digest of the windows of these positions, which are known, as a float64 holds it."""
        read = [self.corpus.known[number] for number in sorted(self.known_windows(positions))]
        return int(hashlib.sha256(json.dumps(read).encode()).hexdigest()[:12], 16)

    def border_after(self, position: int) -> int:
        """Return the first position behind the window of a position."""
        _, window, nth = self.place(position)
        return position - nth + self.corpus.known[window]["sequences"]

    def reads(self, positions: int) -> list[float]:
        """Return about how often the data is read in the first positions of the stream."""
        return [positions / len(self)]


def open_stream(
    plan: Plan, tokenizer: Any, progress: Progress, count_padding: bool = True, day: date | None = None
) -> tuple[Stream, list[int], Corpus | Mixture]:
    """Return what `prepare` returns; with several windows, of the one in which the run continues.

    Raises as `prepare` does, and as `Windows.open`.
    """
    first, windows = of_first_window(plan)
    if len(windows) == 1:
        return prepare(first, tokenizer, progress, count_padding, day)

    def make(files: list[str], progress: Progress) -> OpenWindow:
        return open_window(plan, files, tokenizer, progress, count_padding, day)

    listing, pinned = quick_fingerprint(plan.data_path, 0), pinned_windows(plan.rundir)
    known = pinned["read"] if pinned.get("files") == listing else []  # else the run is refused, if it is resumed
    corpus = Windows([], (1,), windows, listing, make, known)
    made = max(plan.rundir.checkpoint_steps(), default=0) * plan.recipe.train.global_batch_size
    stream = WindowStream(corpus, plan.recipe.seed, Interleave((1,), 0), 1)
    number = next(iter(stream.known_windows([made])), len(known))
    corpus.parts.append(corpus.open(number, progress))
    # The whole is estimated from the first window, so that every start of the run estimates the same.
    stream = dataclasses.replace(stream, epoch=in_all(windows, known[0]["sequences"]))
    if plan.eval_path is None:
        return stream, [], corpus
    _, held_out, eval_corpus = prepare(of_window(plan, windows[number]), tokenizer, progress, count_padding, day)
    return stream, held_out, eval_corpus


def open_window(
    plan: Plan,
    files: list[str],
    tokenizer: Any,
    progress: Progress,
    count_padding: bool = True,
    day: date | None = None,
) -> OpenWindow:
    """Return a window, prepared if it is not in the cache. Raises as `prepare` does."""
    alone = dataclasses.replace(of_window(plan, files), eval_path=None)
    for each in data_objects(alone.data_path):
        if not each.is_here:
            _mark_of(each).touch()
    left = TRIES
    while True:
        left -= 1
        try:
            [corpus] = prepare(alone, tokenizer, progress, count_padding, day)[0].corpus.parts
            for flat in (corpus.tokens, corpus.trained):
                if isinstance(flat, Joined):
                    flat.open_files()
            return OpenWindow(corpus, paths_of_window(alone, tokenizer, day, corpus))
        except FileNotFoundError:  # another run has just removed what it prepared of this window
            if not left:
                raise


def paths_of_window(alone: Plan, tokenizer: Any, day: date | None, corpus: Corpus) -> list[Path]:
    """Return what the cache has of a window, the plan's only one; nothing on ranks that remove none.

    Copies of objects that were there before a run with windows stay: other recipes may read them.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return []
    [source], path, arrays = alone.sources, alone.data_path, list[Any]([corpus.ends, corpus.pieces])  # memory maps
    encoder = PartEncoder((tokenizer, source.data, day, 0), lambda _: None)
    parts = filter(None, map(encoder.found, parts_of(path)))
    downloaded = [each for each in data_objects(path) if _mark_of(each).exists()]
    copies = [found for each in downloaded for found in (each.copy, _mark_of(each))]
    return [*copies, *(Path(array.filename).parent for array in arrays), *parts]


def _mark_of(found: DataObject) -> Path:
    """Return the file beside the copy of an object that says that a run with windows has downloaded it."""
    return found.copy.with_name(f"{found.copy.name}.window")


def prepare_in_child(plan: Plan, files: Iterable[str], day: date | None, cores: Iterable[int]) -> Child:
    """Start a process that prepares a window for those that will open it, on these cores, when they are idle."""
    child = Child(__name__, niceness=NICENESS)
    record = {"plan": plan.to_json(), "files": [*files], "day": day and day.isoformat(), "cores": [*cores]}
    child.send(record)
    return child


def main() -> None:
    """Prepare the window that the parent sends. What goes wrong is reported by the ranks, which then try it, too."""
    record = next(records_of_parent())
    os.sched_setaffinity(0, record["cores"])
    plan, day = Plan.from_json(record["plan"]), record["day"] and date.fromisoformat(record["day"])
    tokenizer = load_tokenizer(plan, lambda *_: None)
    open_window(plan, record["files"], tokenizer, lambda *_: None, day=day)
