"""Print text and tables: wrapped between words to the width of a terminal, unchanged in a pipe; and the live line.

    step 12/700  ━━━━╺━━━━━━━━━━  loss 5.9941  6,230 tok/s  ETA 2:13  lr 1.76e-04  norm 0.88  0.42 GiB

The live line is at the bottom of a terminal: the work under way, its progress and its time. If the terminal is too
narrow, parts are left out, the least important first. It is redrawn several times a second, so it follows a change of
the width.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fsdptrain.text import HANGING_INDENT, NO_BREAK_SPACE, duration, printable, wrapped

GAP = "  "  # between the columns of a table
WHOLE = 25  # characters of a name with its cell, below which they stay on one line of a paragraph

# The space between a number and its unit, at which no line is broken.
UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:bytes|[KMGT]iB|s|TFLOP)(?!\w))")


class Terminal(Console):
    """A console whose texts may be foreign: it makes their control characters visible, and adds only its own styles."""

    def __init__(self, stream: IO[str] | None = None, quiet: bool = False) -> None:
        """Write to standard output, or to another stream."""
        stream = stream or sys.stdout
        file, is_terminal = getattr(stream, "styled", stream), stream.isatty()
        # Set force_terminal, because with FORCE_COLOR Rich treats a pipe as a terminal and fills it with frames.
        super().__init__(file=file, quiet=quiet, highlight=False, force_terminal=is_terminal)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of what is printed."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else piece._replace(text=printable(piece.text))


class Page:
    """Prints paragraphs, tables and commands. `width` is the terminal's in columns, None in a pipe."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Terminal()
        self.width: int | None = None
        if self.console.is_terminal:  # for a dumb terminal Rich assumes 80 columns
            dumb = self.console.is_dumb_terminal
            self.width = shutil.get_terminal_size().columns if dumb else self.console.width

    def say(self, text: str, indent: int = 0, style: str = "") -> None:
        """Print a text, each of its lines wrapped to the width."""
        for line in printable(text).splitlines() or [""]:
            self.draw(Text(self._wrapped(line, indent)), indent, style)

    def draw(self, text: Text, indent: int = 0, style: str = "") -> None:
        """Print lines that fit the width already."""
        for line in text.split("\n", allow_blank=True):
            self.console.print(Text(" " * indent) + line, style=style, soft_wrap=True, markup=False)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 0, titles: int = 1) -> None:
        """Print a table, with columns of numbers aligned to the right.

        On a terminal that is too narrow, print each row as a title (its first `titles` cells) and a paragraph.
        """
        rows = [[*map(printable, row)] for row in rows]
        widths = [max(cell_len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        right = [all(row[i][:1].isdigit() for row in rows) for i in range(len(header))]
        if self.width is not None and indent + sum(widths) + len(GAP) * (len(widths) - 1) > self.width:
            for row in rows:
                self.say(" ".join(row[:titles]), indent)
                cells = zip(header[titles:], row[titles:], strict=True)
                parts = [f"{name} {cell}".strip() for name, cell in cells if cell]
                parts = [part.replace(" ", NO_BREAK_SPACE) if len(part) < WHOLE else part for part in parts]
                paragraph = self._wrapped(", ".join(parts), indent + HANGING_INDENT, hanging=0)
                self.draw(Text(paragraph), indent + HANGING_INDENT)
            return
        for row in [header, *rows]:
            padded = [
                " " * (width - cell_len(cell)) + cell if number else cell + " " * (width - cell_len(cell))
                for cell, width, number in zip(row, widths, right, strict=True)
            ]
            self.draw(Text(GAP.join(padded).rstrip()), indent, "bold" if row is header else "")

    def command(self, words: Sequence[str], indent: int = 0, label: str = "") -> None:
        """Print a command line behind a label; it can be pasted into a shell: broken lines end in a backslash."""
        line = " ".join(shlex.quote(word).replace(" ", NO_BREAK_SPACE) for word in words)
        backslash = " \\"
        lines = self._wrapped(line, indent + len(label) + len(backslash), hanging=0).split("\n")
        self.draw(Text(label + f"{backslash}\n{' ' * len(label)}".join(lines)), indent)

    def _wrapped(self, line: str, used: int, hanging: int = HANGING_INDENT) -> str:
        """Return a line broken where the columns that are not `used` end; unchanged in a pipe."""
        if self.width is None:
            return line.replace(NO_BREAK_SPACE, " ")
        return wrapped(UNIT_SPACE.sub(NO_BREAK_SPACE, line), self.width - used, hanging)


SHORTEST_BAR, LONGEST_BAR = 8, 30
PART_GAP = 2  # columns between parts
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
        bar_space = width - total_width([part for part in parts if part.text is not None]) - PART_GAP
        bar = ProgressBar(total=self._total, completed=self._done, width=min(LONGEST_BAR, bar_space))
        line = Table.grid(padding=(0, PART_GAP, 0, 0))
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
            frame, count = self._spinner.render(now), f": {self._done:,.0f}" if self._done > 1 else ""
            return [Part(2, str(frame)), Part(0, self._work_name + count), Part(1, elapsed(seconds))]
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
    return sum(widths) + PART_GAP * (len(widths) - 1)


def elapsed(seconds: float) -> str:
    """Return a time as `12 s`, or as `1:15` from a minute on."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds)
