"""Show the outcome of a dry run: the verdict, the sections under their headings, and notes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsdptrain.forecast.plot import memory_bar
from fsdptrain.forecast.trace import Category
from fsdptrain.terminal.page import Page
from fsdptrain.validate.findings import Item, Outcome

INDENT = 2
PIPE_WIDTH = 80  # columns of bars, if there is no terminal
WIDEST = 120  # columns of the memory bar: a longer one shows no more
LONGEST_BAR = 32  # columns of a histogram's bar


def show_outcome(outcome: Outcome, page: Page, verbose: bool = False) -> None:
    """Print an outcome without its problems. With `verbose`, also why some things were not checked.

    On a terminal the verdict comes again last, because what is between scrolls the first line away.
    """
    colour = "red" if outcome.exit_code else "yellow" if outcome.warnings else "green"
    page.say(outcome.verdict, style=f"bold {colour}")
    for heading, items in outcome.sections:
        show_section(heading, items, page)
    notes = [note for note in outcome.notes if verbose or not note.startswith("not checked here")]
    if outcome.unchecked and not verbose:
        notes.append(f"not checked here: {', '.join(outcome.unchecked)}; --verbose shows why")
    show_notes(notes, page)
    if page.width is not None and not outcome.problems:
        page.say("")
        page.say(outcome.verdict, style=f"bold {colour}")


def show_section(heading: str, items: list[Item], page: Page) -> None:
    """Print the items under their heading."""
    page.say("")
    page.say(heading, style="bold")
    for item in items:
        arguments = {name: value for name, value in item.items() if name != "kind"}
        RENDERERS[item["kind"]](page, **arguments)


def show_notes(notes: list[str], page: Page) -> None:
    """Print notes, if there are any, under a heading."""
    if notes:
        show_section("Notes", [{"kind": "text", "text": note} for note in notes], page)


def _memory(page: Page, by_category: dict[Category, int], beside: dict[str, int], capacity: int) -> None:
    """Draw the bar of the peak, as wide as the terminal."""
    width = PIPE_WIDTH if page.width is None else min(page.width, WIDEST)
    page.draw(memory_bar(by_category, beside, capacity, width - INDENT), INDENT)


def _lengths(page: Page, bins: list[dict[str, int]], seq_len: int, beyond: str) -> None:
    for line in histogram_lines(bins, seq_len, beyond, (page.width or PIPE_WIDTH) - INDENT):
        page.say(line, INDENT)


def histogram_lines(bins: list[dict[str, int]], seq_len: int, beyond: str, width: int) -> list[str]:
    """Return a line a bin, from the first that has rows; `beyond` is what happens to rows longer than `seq_len`."""
    while len(bins) > 1 and not bins[0]["rows"]:
        bins = bins[1:]
    most = max(each["rows"] for each in bins)
    names = [f"{each['from']:,}–{each['to']:,}" for each in bins]
    name_width, digits = max(map(len, names)), len(f"{most:,}")
    longest = max(1, min(LONGEST_BAR, width - name_width - digits - len(beyond) - 5))
    return [
        f"{name:>{name_width}} {each['rows']:>{digits},} "
        + ("█" * round(longest * each["rows"] / most) or "▏" * bool(each["rows"]))
        + (f" {beyond}" if each["from"] > seq_len and each["rows"] else "")
        for name, each in zip(names, bins, strict=True)
    ]


# Kind of an item → the function that prints it.
RENDERERS: dict[str, Callable[..., None]] = {
    "text": partial(Page.say, indent=INDENT),
    "table": partial(Page.table, indent=INDENT),
    "command": partial(Page.command, indent=2 * INDENT),
    "memory": _memory,
    "lengths": _lengths,
}
