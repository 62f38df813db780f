"""Format numbers for messages, and wrap lines for a terminal."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from typing import IO

from fsdptrain.errors import shortened

MIB = 2**20
GIB = 2**30


def size(count: float) -> str:
    """Return a number of bytes in a readable unit: `847.0 GiB`."""
    power = min(4, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 2 ** (10 * power):.{bool(power):d}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


NO_BREAK_SPACE = "\u00a0"  # in `wrapped`: stands for a space at which a line must not be broken


HANGING_INDENT = 2  # columns


def wrapped_for(text: str, stream: IO[str]) -> str:
    """Return the text for a stream: wrapped to its width if it is a terminal, else unchanged."""
    return wrapped(text, os.get_terminal_size(stream.fileno()).columns or 80) if stream.isatty() else text


def wrapped(text: str, width: int, hanging: int = HANGING_INDENT) -> str:
    """Return a text with lines longer than `width` columns broken between words; longer words are not broken.

    A continuation line begins below the text after the label of its first line (a word and two spaces); without a
    label, `hanging` columns to the right of the first line.
    """
    found: list[str] = []
    for line in printable(text).split("\n"):
        before = re.match(r"\s*(\S+ {2,})?", line)
        assert before is not None
        label = before[0].replace(" ", NO_BREAK_SPACE)  # so that the label stays on the line of its first word
        indent = before.end() if before[1] else before.end() + hanging
        lines = textwrap.wrap(
            label + line[before.end() :], width, break_long_words=False, break_on_hyphens=False, expand_tabs=False,
            replace_whitespace=False, subsequent_indent=" " * min(indent, width // 3),
        )  # fmt: skip
        found += lines or [""]
    return "\n".join(found).replace(NO_BREAK_SPACE, " ")


# What a terminal obeys, other than line breaks and tabs; Unicode's line breaks; what turns the direction of a text.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text that changes no colours and moves no cursor: its control characters are visible, as `\\x1b`."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a text in one line, without control characters, shortened."""
    return shortened(printable(" ".join(text.split())))


def counted(count: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun: `1 step`, `40 steps`."""
    return f"{count:,} {noun}" + ("" if count == 1 else plural)


def share(part: int, whole: int, noun: str) -> str:
    """Return a part of several things, in numbers and in percent: `31 of 60 rows (52%)`."""
    percent = 100 * part / whole
    rounded = f"{percent:.0f}%" if 1 <= percent <= 99 or part == whole else "under 1%" if percent < 1 else "over 99%"
    return f"{part:,} of {counted(whole, noun)} ({rounded})"


def ranks_text(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return ranks in words: `rank 3`, `ranks 0, 1 and 3`.

    With `hosts`, the host names of all ranks, also where they are, unless they are on all hosts: `rank 3 on node-1`.
    """
    text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_and(ranks)}"
    where = hosts_of(ranks, hosts)
    return f"{text} on {_and(where)}" if 0 < len(where) < len(set(hosts)) else text


def hosts_of(ranks: Sequence[int], hosts: Sequence[str]) -> list[str]:
    """Return the host names of these ranks, each once; none if `hosts`, those of all ranks, does not have them."""
    return [*dict.fromkeys(hosts[rank] for rank in ranks)] if max(ranks, default=-1) < len(hosts) else []


def _and(words: Sequence[object]) -> str:
    *others, last = map(str, words)
    return f"{', '.join(others)} and {last}" if others else last


def rate(tokens_per_s: float) -> str:
    """Return a speed as `6,230 tok/s` or `512k tok/s`; it counts positions, padding included."""
    thousands = tokens_per_s >= 100_000
    return f"{tokens_per_s / 1000:,.0f}k tok/s" if thousands else f"{tokens_per_s:,.0f} tok/s"


def seconds(number: float) -> str:
    """Return seconds with three digits, or all before the point: `0.0467`, `4.62`, `1,230`."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return a duration as `1:15` (75 seconds) or `1:00:05` (an hour and 5 seconds)."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
