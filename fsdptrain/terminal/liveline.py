"""The live line at the bottom of a terminal: the work under way, its progress and its time.

    step 12/700  ━━━━╺━━━━━━━━━━  loss 5.9941  6,230 tok/s  ETA 2:13  lr 1.76e-04  norm 0.88  0.42 GiB

If the terminal is too narrow, parts are left out, the least important first. The line is redrawn several times a
second, so it follows a change of the terminal's width.
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
RIGHT_MARGIN = 3  # columns left free, because Ctrl-C prints ^C there; a wrapped line could not be redrawn


class Part(NamedTuple):
    """A part of the line. Those of the highest `tier` are left out first. A bar has no text and fills the rest."""

    tier: int
    text: str | None


BAR = Part(4, None)


class LiveLine:
    """The line as Rich draws it: empty, waiting, a counted progress, or a training step."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._work_name, self._since = "", 0.0
        self._done, self._total = 0.0, 0.0
        self._spinner = Spinner("line")

    def clear(self) -> None:
        """Show nothing."""
        self._work_name, self._parts = "", []

    def show_work(self, name: str, done: float = 0, total: float = 0) -> None:
        """Show work under way with its elapsed time; with a bar and a count if `total` is more than 1."""
        if name != self._work_name:
            self._work_name, self._since = name, time.monotonic()
        self._done, self._total, self._parts = done, total, []

    def show_step(self, step: int, total: int, parts: list[Part]) -> None:
        """Show the progress of training, with `parts` after the bar."""
        self._work_name, self._done, self._total = "", step, total
        self._parts = [Part(0, f"step {step}/{total}"), BAR, *parts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - RIGHT_MARGIN
        parts = parts_that_fit(self._parts or self._work_parts(), width)
        bar_space = width - total_width([part for part in parts if part.text is not None]) - GAP
        bar = ProgressBar(total=self._total, completed=self._done, width=min(LONGEST_BAR, bar_space))
        line = Table.grid(padding=(0, GAP, 0, 0))
        for _ in parts:
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*(bar if part.text is None else Text(part.text) for part in parts))
        yield Constrain(line, width)

    def _work_parts(self) -> list[Part]:
        if not self._work_name:
            return []
        now = time.monotonic()
        seconds = now - self._since
        if self._total <= 1:
            frame = self._spinner.render(now)
            return [Part(2, str(frame)), Part(0, self._work_name), Part(1, elapsed(seconds))]
        parts = [Part(0, self._work_name), BAR, Part(1, f"{self._done:,.0f}/{self._total:,.0f}")]
        left = seconds * (self._total - self._done) / self._done if self._done else 0
        return [*parts, Part(2, f"ETA {duration(left)}" if left else elapsed(seconds))]


def parts_that_fit(parts: list[Part], width: int) -> list[Part]:
    """Return the parts that fit into `width` columns, in their order; the most important one is always kept."""
    kept = list(parts)
    while len(kept) > 1 and total_width(kept) > width:
        kept.remove(max(kept, key=lambda part: part.tier))
    return kept


def total_width(parts: list[Part]) -> int:
    """Return the columns that the parts need, with a bar at its shortest."""
    widths = [SHORTEST_BAR if part.text is None else cell_len(part.text) for part in parts]
    return sum(widths) + GAP * (len(widths) - 1)


def elapsed(seconds: float) -> str:
    """Return a time as `12 s`, or as `1:15` from a minute on."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)
