"""What a run reads of its data, and keeps: windows of files, the commits of Hub data sets, the date in a chat template.

With windows of files (`data.window`) only some files of a corpus are prepared at a time. Which files share a window is
drawn by the seed. The sequences of a window are read in a permutation of their own, then those of the next one, and
after the last window the first one begins again. Where a window begins is known once those before it are prepared: a
run keeps how many sequences they have, so that a resume need not prepare them again. When all ranks have entered a
window (`train.prefetch`), what was prepared of those before it is removed from the cache. Its parts are named by
data.window, too, so that other runs without it never rely on them.

A branch of a data set moves, and some chat templates render today's date. So the first worker of a start looks both up
and writes them into pinned.json; the other workers of that start, and its restarts, use those. Once there is a
checkpoint, every later start uses them too: the run continues with the tokens it began with, whatever was committed
since, on any day, and even without the Hub. Rank 0 adds each window when the ranks enter it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
from filelock import FileLock

from fsdptrain.config.paths import is_hub_data
from fsdptrain.data.cache import remove_folder
from fsdptrain.data.corpus import Corpus, Stream, TokenArray, epoch_order
from fsdptrain.data.sources import COMMIT, data_objects, file_sizes, hub_commit
from fsdptrain.errors import CheckpointError, Problem, RecipeError
from fsdptrain.plan.plan import HubData, Plan, varied
from fsdptrain.run_folder.files import is_there, write_atomically
from fsdptrain.run_folder.records import read_object
from fsdptrain.run_folder.rundir import RunDir
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


def of_window(plan: Plan, files: Iterable[str], **changes: Any) -> Plan:
    """Return the plan of a run that trains on these files alone, with other changes."""
    return dataclasses.replace(plan, data_paths=[[*files]], **changes)


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
                each.path.unlink(missing_ok=True)


Commits = dict[str, str | None]  # `org/name[:config[:split]][@revision]` → commit, None when it is not known
Pinned = dict[str, Any]  # `commits`: Commits; `date`: as in ISO 8601; `windows`. Each is there only if the run needs it


def pin_commits(plan: Plan, rundir: RunDir, keep: bool = True) -> Plan:
    """Return the plan with every Hub data set at a commit; `keep` writes the commits (a dry run does not).

    Raises CheckpointError when the pinned commits cannot be read.
    """
    hub_paths = [path for path in (*plan.data_paths, plan.eval_path) if path and is_hub_data(path)]
    if not hub_paths:
        return plan

    def complete(pinned: Pinned) -> Pinned:
        known: Commits = pinned.get("commits", {})
        return {"commits": known | {path: hub_commit(path) for path in hub_paths if path not in known}}

    commits = _pin(rundir, keep, complete)["commits"]
    paths = {path: str(HubData.of(path).at(commit)) for path, commit in commits.items() if commit}
    return dataclasses.replace(
        plan,
        data_paths=[paths.get(path, path) if isinstance(path, str) else path for path in plan.data_paths],
        eval_path=paths.get(plan.eval_path, plan.eval_path) if plan.eval_path else None,
    )


def pin_date(plan: Plan, tokenizer: Any, rundir: RunDir, keep: bool = True) -> datetime.date | None:
    """Return the date that the chat template renders, if it renders one and conversations are trained.

    It is that of the day on which the run begins. `keep` writes it. Raises CheckpointError when the pinned one cannot
    be read.
    """
    if not plan.trains_chat or "strftime_now" not in str(tokenizer.chat_template):
        return None
    today = datetime.datetime.now().date()
    pinned = _pin(rundir, keep, lambda pinned: {"date": pinned.get("date", today.isoformat())})
    return datetime.date.fromisoformat(pinned["date"])


def date_note(day: datetime.date) -> str:
    """Return a sentence on the date that a chat template renders."""
    return f"the chat template renders today's date: in all attempts of the run it is {day}, when the run began"


def pin_windows(rundir: RunDir, windows: dict[str, Any]) -> None:
    """Write what is known of the windows of a run (see `data.windows`)."""
    _pin(rundir, True, lambda _: {"windows": windows})


def pinned_windows(rundir: RunDir) -> dict[str, Any]:
    """Return what `pin_windows` wrote, {} if the run has read none. Raises CheckpointError if it cannot be read."""
    return _pinned_before(rundir).get("windows", {})


def _pin(rundir: RunDir, keep: bool, complete: Callable[[Pinned], Pinned]) -> Pinned:
    """Return what is pinned and still valid, completed; `keep` writes it."""
    with FileLock(rundir.logs / "pinned.lock") if keep else contextlib.nullcontext():
        pinned = _pinned_before(rundir)
        pinned |= complete(pinned)
        if keep:
            write_atomically(rundir.pinned, json.dumps({"start": _newest_start(rundir), **pinned}, indent=2))
    return pinned


def _pinned_before(rundir: RunDir) -> Pinned:
    """Return what earlier attempts pinned; {} before the first checkpoint, unless it is of this start."""
    path = rundir.pinned
    if not is_there(path):
        return {}
    try:
        written = read_object(path)
        if not rundir.checkpoint_steps() and written["start"] != _newest_start(rundir):
            return {}
        if "windows" in written:
            written["windows"] = {"files": str(written["windows"]["files"]), "read": list(written["windows"]["read"])}
        if "date" in written:
            datetime.date.fromisoformat(written["date"])
        for commit in written.get("commits", {}).values():
            if commit is not None and not COMMIT.fullmatch(commit):
                raise ValueError(f"{commit!r:.60} is not a commit")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        words = str(error).removeprefix(f"{path}: ")
        reason = words if isinstance(error, ValueError) else "it is not what a run writes there"
        raise CheckpointError(
            f"{path} cannot be read ({reason}), so the commit of the data or the date of the chat template is not "
            "known: restore it, or delete it and set data.revision to the commit"
        ) from None
    return {name: written[name] for name in ("commits", "date", "windows") if name in written}


def _newest_start(rundir: RunDir) -> int:
    return max((int(path.stem) for path in rundir.plans.glob("*.json") if path.stem.isdigit()), default=0)
