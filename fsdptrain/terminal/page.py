"""Print text and tables: wrapped between words to the width of a terminal, unchanged in a pipe."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fsdptrain.text import NO_BREAK_SPACE, printable, wrapped

HANGING_INDENT = 2  # columns by which continuation lines are indented
GAP = "  "  # between the columns of a table

# The space between a number and its unit, at which no line is broken.
UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:bytes|[KMGT]iB|s|TFLOP)(?!\w))")


class Terminal(Console):
    """A console whose texts may be foreign: it makes their control characters visible, and adds only its own styles."""

    def __init__(self, file: IO[str] | None = None, stderr: bool = False, quiet: bool = False) -> None:
        # Set force_terminal, because with FORCE_COLOR Rich treats a pipe as a terminal and fills it with frames.
        terminal = (file or (sys.stderr if stderr else sys.stdout)).isatty()
        super().__init__(
            file=file, stderr=stderr, quiet=quiet, highlight=False, soft_wrap=True, force_terminal=terminal
        )

    def _styled(self) -> IO[str]:
        stream = Console.file.fget(self)  # type: ignore[attr-defined]
        return getattr(stream, "styled", stream)

    file = Console.file.getter(_styled)  # type: ignore[attr-defined]

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
            first, *rest = self._lines(UNIT_SPACE.sub(NO_BREAK_SPACE, line), indent)
            self.draw(Text("\n".join([first, *(" " * HANGING_INDENT + more for more in rest)])), indent, style)

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
                parts = [f"{name} {cell}".strip().replace(" ", NO_BREAK_SPACE) for name, cell in cells if cell]
                self.draw(
                    Text("\n".join(self._lines(", ".join(parts), indent + HANGING_INDENT))), indent + HANGING_INDENT
                )
            return
        for row in [header, *rows]:
            padded = [
                " " * (width - cell_len(cell)) + cell if number else cell + " " * (width - cell_len(cell))
                for cell, width, number in zip(row, widths, right, strict=True)
            ]
            self.draw(Text(GAP.join(padded).rstrip()), indent, "bold" if row is header else "")

    def command(self, words: Sequence[str], indent: int = 0) -> None:
        """Print a command line that can be pasted into a shell: broken lines end in a backslash."""
        line = " ".join(shlex.quote(word).replace(" ", NO_BREAK_SPACE) for word in words)
        self.draw(Text(" \\\n".join(self._lines(line, indent))), indent)

    def _lines(self, line: str, indent: int) -> list[str]:
        """Return a line broken into pieces that leave room for `indent` and for a hanging indent or a backslash."""
        if self.width is None:
            return [line.replace(NO_BREAK_SPACE, " ")]
        return wrapped(line, self.width - indent - HANGING_INDENT).split("\n")
