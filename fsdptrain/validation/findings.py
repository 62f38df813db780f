"""What a dry run finds, level by level: values, notes and problems, and the text that shows them. No torch."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdptrain.errors import (
    HUB_UNREACHABLE,
    CheckpointError,
    DataError,
    DoesNotFit,
    FsdptrainError,
    NoData,
    NoModel,
    RecipeError,
    WorkerError,
)
from fsdptrain.run_folder.events import progress_record
from fsdptrain.terminal.page import Page
from fsdptrain.text import counted

# Exit codes, that of the most basic problem first.
BASIC_FIRST = [
    error.exit_code for error in (RecipeError, DataError, CheckpointError, WorkerError, DoesNotFit, FsdptrainError)
]

INDENT = 2
PIPE_WIDTH = 80  # columns of bars, if there is no terminal
LONGEST_BAR = 32  # columns of a histogram's bar

# What a plan for another machine leaves unchecked here, by the field that starts the message.
UNCHECKED = {
    "data": "data", "data.path": "data", "data.eval.path": "evaluation data", "model.id": "model",
    "teacher.id": "teacher",
    "model.tokenizer": "tokenizer", "model.attn_implementation": "attention kernel",
    "launch.nproc_per_node": "number of GPUs", "launch.rdzv_endpoint": "rendezvous", "output_dir": "disk space",
}  # fmt: skip

Item = dict[str, Any]  # something to show: its `kind`, and the arguments for the function in `RENDERERS`
SendRecord = Callable[[dict[str, Any]], None]  # takes the progress records that `Screen.show` accepts


@dataclass(frozen=True)
class Outcome:
    """The result of a dry run. `report` is what `--json` prints; `sections` shows it: (heading, items).

    `unchecked` names what can be checked only on the machine that the plan is for; `notes` gives the reasons.
    `warnings` are those of the notes that the verdict repeats.
    """

    verdict: str
    sections: list[tuple[str, list[Item]]]
    notes: list[str]
    warnings: list[str]
    unchecked: list[str]
    problems: list[str]
    exit_code: int
    report: dict[str, Any]


class Findings:
    """Collects the values, sections, notes and problems of a dry run. `send` receives records of progress.

    With `elsewhere` the plan is for another machine: what this machine lacks is then a note, not a problem.
    """

    def __init__(self, send: SendRecord = lambda record: None, elsewhere: bool = False) -> None:
        self.send, self.elsewhere = send, elsewhere
        self.levels: dict[str, dict[str, Any]] = {}
        self.step: dict[str, Any] = {}  # values of the forecast; in the JSON they are beside the levels
        self.forecast: str | None = None  # the forecast, or what else was found to be right, in one line
        self.sections: dict[str, list[Item]] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []  # those of the notes that the verdict repeats
        self.unchecked: list[str] = []
        self.problems: list[str] = []
        self._codes: dict[str, int] = {}

    def add_values(self, level: str, values: dict[str, Any], heading: str, *lines: str) -> None:
        """Add values of a level, and lines that show them under a heading."""
        self.levels.setdefault(level, {}).update(values)
        self.add_lines(heading, *lines)

    def add_lines(self, heading: str, *lines: str) -> None:
        """Add lines of text under a heading."""
        for line in lines:
            self.add_item(heading, "text", text=line)

    def add_item(self, heading: str, kind: str, **arguments: Any) -> None:
        """Add another item under a heading: a table, bars or a command, with its arguments."""
        self.sections.setdefault(heading, []).append({"kind": kind, **arguments})

    def add_note(self, text: str) -> None:
        """Add a note: something worth knowing that is not a problem."""
        if text not in self.notes:
            self.notes.append(text)

    def add_warning(self, text: str) -> None:
        """Add a note that is repeated in the verdict."""
        self.add_note(text)
        self.warnings.append(text)

    def add_problem(self, error: FsdptrainError, this_machine_only: bool = False) -> None:
        """Add a problem. With `this_machine_only` it is just a note if the plan is for another machine."""
        this_machine_only = this_machine_only or isinstance(error, (NoModel, NoData))
        for text in map(str, error.problems if isinstance(error, RecipeError) else [error]):
            if this_machine_only and self.elsewhere:
                self.add_note(f"not checked here: {text}")
                name = UNCHECKED.get(text.partition(":")[0], "limits of this machine")
                name += " (no Hub)" if HUB_UNREACHABLE in text else ""
                if name not in self.unchecked:
                    self.unchecked.append(name)
            elif text not in self.problems:
                self.problems.append(text)
                self._codes[text] = error.exit_code

    @contextlib.contextmanager
    def continue_on_error(self) -> Iterator[None]:
        """Turn an exception raised inside into a problem, so that the next level still runs."""
        try:
            yield
        except FsdptrainError as error:
            self.add_problem(error)
        except Exception as error:
            traceback.print_exc()
            self.add_problem(FsdptrainError(f"internal error: {error!r} (please report it, with the traceback above)"))

    def send_busy(self, what: str) -> None:
        """Report what the dry run does from now on."""
        self.send({"event": "busy", "what": what})

    def send_progress(self, stage: str, done: int, total: int) -> None:
        """Report how far a stage is."""
        self.send(progress_record(stage, done, total))

    @property
    def exit_code(self) -> int:
        """The exit code of the most basic problem; 0 if there is none."""
        return min(self._codes.values(), key=BASIC_FIRST.index, default=0)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        others = [text for text in self.problems if self._codes[text] != DoesNotFit.exit_code]
        count = f"{counted(len(self.problems), 'problem')} (listed at the end)"
        if not others:
            no_forecast = "memory and time were not forecast"
            found = self.forecast or (no_forecast if self.warnings else f"no problems found; {no_forecast}")
            return "; ".join([found, *self.warnings])
        return f"{count}; memory forecast: {self.forecast}" if self.forecast else count

    def outcome(self) -> Outcome:
        """Return everything, to be shown or printed as JSON."""
        verdict = self.verdict
        report = {**self.levels, **self.step, "verdict": verdict, "notes": self.notes, "problems": self.problems}
        sections = [*self.sections.items()]
        return Outcome(
            verdict, sections, self.notes, self.warnings, self.unchecked, self.problems, self.exit_code, report
        )


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


def _lengths(page: Page, bins: list[dict[str, int]], seq_len: int, beyond: str) -> None:
    """Print a line a bin, from the first that has rows; `beyond` is what happens to rows longer than `seq_len`."""
    width = (page.width or PIPE_WIDTH) - INDENT
    while len(bins) > 1 and not bins[0]["rows"]:
        bins = bins[1:]
    most = max(each["rows"] for each in bins)
    names = [f"{each['from']:,}–{each['to']:,}" for each in bins]
    name_width, digits = max(map(len, names)), len(f"{most:,}")
    longest = max(1, min(LONGEST_BAR, width - name_width - digits - len(beyond) - 5))
    for name, each in zip(names, bins, strict=True):
        bar = "█" * round(longest * each["rows"] / most) or "▏" * bool(each["rows"])
        note = f" {beyond}" if each["from"] > seq_len and each["rows"] else ""
        page.say(f"{name:>{name_width}} {each['rows']:>{digits},} {bar}{note}", INDENT)


# Kind of an item → the function that prints it.
RENDERERS: dict[str, Callable[..., None]] = {
    "text": partial(Page.say, indent=INDENT),
    "table": partial(Page.table, indent=INDENT),
    "command": partial(Page.command, indent=2 * INDENT),
    "lengths": _lengths,
}
