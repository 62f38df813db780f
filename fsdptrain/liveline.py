"""The one live line of a terminal: what is being done, how far it is, how long it takes.

    step 12/700  ━━━━╺━━━━━━━━━━  loss 5.9941  6,230 tok/s  ETA 2:13  lr 1.76e-04  norm 0.88  0.42 GiB

Parts for which the terminal has no room are left out, the least needed first; it is drawn anew several times a second,
so it follows a change of the terminal's size.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fsdptrain.text import duration

SHORTEST_BAR, LONGEST_BAR = 8, 30


GAP = 2  # columns between parts


SPARE = 3  # columns at the end: a terminal writes ^C there, and what it then wraps could not be drawn over


class Part(NamedTuple):
    """A piece of the line; those of the highest `rank` are left out first. A bar has no text and takes the rest."""

    rank: int
    text: str | None


BAR = Part(4, None)


class LiveLine:
    """What Rich draws: nothing, a wait, a count, or a step of training."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._what, self._since = "", 0.0
        self._done, self._total = 0.0, 0.0
        self._spinner = Spinner("line")

    def clear(self) -> None:
        """Show nothing."""
        self._what, self._parts = "", []

    def show_work(self, what: str, done: float = 0, total: float = 0) -> None:
        """Show work under way and its seconds; as a bar with a count where there is more than one thing to count."""
        if what != self._what:
            self._what, self._since = what, time.monotonic()
        self._done, self._total, self._parts = done, total, []

    def show_step(self, step: int, total: int, parts: list[Part]) -> None:
        """Show how far training is; `parts` follow the bar."""
        self._what, self._done, self._total = "", step, total
        self._parts = [Part(0, f"step {step}/{total}"), BAR, *parts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - SPARE
        parts = parts_that_fit(self._parts or self._work(), width)
        room = width - total_width([part for part in parts if part.text is not None]) - GAP
        bar = ProgressBar(total=self._total, completed=self._done, width=min(LONGEST_BAR, room))
        line = Table.grid(padding=(0, GAP, 0, 0))
        for _ in parts:
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*(bar if part.text is None else Text(part.text) for part in parts))
        yield Constrain(line, width)

    def _work(self) -> list[Part]:
        if not self._what:
            return []
        now = time.monotonic()
        seconds = now - self._since
        if self._total <= 1:
            frame = self._spinner.render(now)
            return [Part(2, str(frame)), Part(0, self._what), Part(1, elapsed(seconds))]
        parts = [Part(0, self._what), BAR, Part(1, f"{self._done:,.0f}/{self._total:,.0f}")]
        left = seconds * (self._total - self._done) / self._done if self._done else 0
        return [*parts, Part(2, f"ETA {duration(left)}" if left else elapsed(seconds))]


def parts_that_fit(parts: list[Part], width: int) -> list[Part]:
    """The parts that fit into `width` columns, in their order; the most needed one is kept in any case."""
    kept = list(parts)
    while len(kept) > 1 and total_width(kept) > width:
        kept.remove(max(kept, key=lambda part: part.rank))
    return kept


def total_width(parts: list[Part]) -> int:
    """Columns that the parts take, a bar at its shortest."""
    widths = [SHORTEST_BAR if part.text is None else cell_len(part.text) for part in parts]
    return sum(widths) + GAP * (len(widths) - 1)


def elapsed(seconds: float) -> str:
    """`12 s`; from a minute on as `duration` has it."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)
