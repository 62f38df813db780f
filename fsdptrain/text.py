"""Numbers and lines as a person reads them."""

from __future__ import annotations

import os
import re
import textwrap
from typing import IO

GIB = 2**30


def size(count: float) -> str:
    """Bytes in the unit that suits them: `847.0 GiB`."""
    power = min(4, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 2 ** (10 * power):.{bool(power):d}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


NO_BREAK_SPACE = "\u00a0"


def wrapped_for(text: str, stream: IO[str], extra_indent: int = 0) -> str:
    """The text for a stream: wrapped where that is a terminal, else as it is."""
    return wrapped(text, os.get_terminal_size(stream.fileno()).columns or 80, extra_indent) if stream.isatty() else text


def wrapped(text: str, width: int, extra_indent: int = 0) -> str:
    """Break lines longer than `width` columns between words; what is longer than a line is left to the terminal.

    What follows goes below the text of the first line, after its indent and its label (a word and two spaces), and so
    many columns `extra_indent`.
    """
    return "\n".join(_wrapped(line, width, extra_indent) for line in text.split("\n"))


def _wrapped(line: str, width: int, extra_indent: int) -> str:
    indent = re.match(r"\s*(?:\S+ {2,})?", line)
    assert indent is not None
    hanging = " " * min(indent.end() + extra_indent, width // 3)
    whole = indent[0].replace(" ", NO_BREAK_SPACE)  # a label stays with its first word, be that as long as it may
    found = textwrap.wrap(
        whole + line[indent.end() :], width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, expand_tabs=False,
    )  # fmt: skip
    return "\n".join(found).replace(NO_BREAK_SPACE, " ")


def counted(count: int, what: str, plural: str = "s") -> str:
    """`1 step`, `40 steps`."""
    return f"{count:,} {what}" + ("" if count == 1 else plural)


def rate(tokens_per_s: float) -> str:
    """`6,230 tok/s`, `512k tok/s`: positions a second, padding included."""
    thousands = tokens_per_s >= 100_000
    return f"{tokens_per_s / 1000:,.0f}k tok/s" if thousands else f"{tokens_per_s:,.0f} tok/s"


def duration(seconds: float) -> str:
    """`75` → `1:15`; hours in front where there are any."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
