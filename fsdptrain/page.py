"""Text for the person: on a terminal wrapped between words to its width, in a pipe every line as it is."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from fsdptrain.text import NO_BREAK_SPACE, wrapped

HANG = 2  # columns by which the continuation of a line is indented


GAP = "  "  # between the columns of a table


BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:bytes|[KMGT]iB|s|TFLOP)(?!\w))")  # where a line is not broken


class Page:
    """Prints paragraphs, tables and commands. `width` is the terminal's in columns, None in a pipe."""

    def __init__(self, console: Console | None = None) -> None:
        # Rich would take a pipe for a terminal where FORCE_COLOR is set.
        self.console = console or Console(highlight=False, force_terminal=sys.stdout.isatty())
        self.width: int | None = None
        if self.console.is_terminal:  # of a dumb one Rich does not ask the width
            dumb = self.console.is_dumb_terminal
            self.width = shutil.get_terminal_size().columns if dumb else self.console.width

    def say(self, text: str, indent: int = 0, style: str = "") -> None:
        """Print every line of a text."""
        for line in text.splitlines() or [""]:
            first, *rest = self._lines(BEFORE_UNIT.sub(NO_BREAK_SPACE, line), indent)
            self.draw(Text("\n".join([first, *(" " * HANG + more for more in rest)])), indent, style)

    def draw(self, text: Text, indent: int = 0, style: str = "") -> None:
        """Print lines that have their width already."""
        for line in text.split("\n", allow_blank=True):
            self.console.print(Text(" " * indent) + line, style=style, soft_wrap=True, markup=False)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 0, titles: int = 1) -> None:
        """Print a table, numbers to the right.

        On a terminal that is too narrow a row becomes a title (its first `titles` cells) and a paragraph.
        """
        widths = [max(cell_len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        right = [all(row[i][:1].isdigit() for row in rows) for i in range(len(header))]
        if self.width is not None and indent + sum(widths) + len(GAP) * (len(widths) - 1) > self.width:
            for row in rows:
                self.say(" ".join(row[:titles]), indent)
                cells = zip(header[titles:], row[titles:], strict=True)
                facts = [f"{name} {cell}".strip().replace(" ", NO_BREAK_SPACE) for name, cell in cells if cell]
                self.draw(Text("\n".join(self._lines(", ".join(facts), indent + HANG))), indent + HANG)
            return
        for row in [header, *rows]:
            padded = [
                " " * (width - cell_len(cell)) + cell if number else cell + " " * (width - cell_len(cell))
                for cell, width, number in zip(row, widths, right, strict=True)
            ]
            self.draw(Text(GAP.join(padded).rstrip()), indent, "bold" if row is header else "")

    def command(self, words: Sequence[str], indent: int = 0) -> None:
        """Print words of a command line so that they can be pasted: lines that go on end in a backslash."""
        line = " ".join(shlex.quote(word).replace(" ", NO_BREAK_SPACE) for word in words)
        self.draw(Text(" \\\n".join(self._lines(line, indent))), indent)

    def _lines(self, line: str, indent: int) -> list[str]:
        """A line in pieces that leave room for an indent and for what follows or precedes them."""
        if self.width is None:
            return [line.replace(NO_BREAK_SPACE, " ")]
        return wrapped(line, self.width - indent - HANG).split("\n")
