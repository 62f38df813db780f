"""What a dry run finds, level by level: facts, notes, and problems, which are all told together at the end."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from fsdptrain.errors import CheckpointError, DataError, DoesNotFit, FsdptrainError, NoData, NoModel, RecipeError
from fsdptrain.report import Screen

# Exit codes, the most basic first.
BASIC_FIRST = [error.exit_code for error in (RecipeError, DataError, CheckpointError, DoesNotFit, FsdptrainError)]


class Findings:
    """Facts by level, notes and problems; a level is shown as it passes, unless `quiet`.

    `elsewhere`: the plan is for another machine, and what this one lacks is a note.
    """

    def __init__(self, screen: Screen, quiet: bool = False, elsewhere: bool = False) -> None:
        self.screen, self.quiet, self.elsewhere = screen, quiet, elsewhere
        self.levels: dict[str, dict[str, Any]] = {}
        self.step: dict[str, Any] = {}  # the forecast, whose names stand beside the levels' in the JSON
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._codes: set[int] = set()

    def passed(self, level: str, facts: dict[str, Any], *lines: str) -> None:
        """Keep a level's facts and show its lines."""
        self.levels.setdefault(level, {}).update(facts)
        self.shown(level, *lines)

    def shown(self, level: str, *lines: str) -> None:
        """Show lines of a level whose facts are kept elsewhere."""
        for number, line in enumerate(lines):
            self._say("" if number else level, line)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Show a table."""
        if not self.quiet:
            self.screen.table(header, rows)

    def draw(self, renderable: Any) -> None:
        """Show something Rich can print."""
        if not self.quiet:
            self.screen.console.print(renderable)

    def note(self, text: str) -> None:
        """Keep and show what the person should know, though nothing is wrong with it."""
        if text not in self.notes:
            self.notes.append(text)
            self._say("note", text)

    def fail(self, error: FsdptrainError, only_here: bool = False) -> None:
        """Keep a problem for the end. What only this machine lacks (`only_here`) is a note for a plan for another."""
        only_here = only_here or isinstance(error, (NoModel, NoData))
        for text in map(str, error.problems if isinstance(error, RecipeError) else [error]):
            if only_here and self.elsewhere:
                self.note(f"not checked here: {text}")
            elif text not in self.problems:
                self.problems.append(text)
                self._codes.add(error.exit_code)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """What is raised inside is a problem, and no reason not to go on with the next level."""
        try:
            yield
        except FsdptrainError as error:
            self.fail(error)
        except Exception as error:
            traceback.print_exc()
            self.fail(FsdptrainError(f"a defect of ours: {error!r}"))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is."""
        if not self.quiet:
            self.screen.show({"event": "progress", "stage": stage, "done": done, "total": total})

    @property
    def exit_code(self) -> int:
        """That of the most basic problem; 0 without one."""
        return min(self._codes, key=BASIC_FIRST.index, default=0)

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps({**self.levels, **self.step, "notes": self.notes, "problems": self.problems}, indent=2)

    def tell_problems(self) -> None:
        """List the problems on standard error."""
        if len(self.problems) == 1:
            print(f"fsdptrain: {self.problems[0]}", file=sys.stderr)
        elif self.problems:
            listed = "".join(f"\n  {problem}" for problem in self.problems)
            print(f"fsdptrain: {len(self.problems)} problems{listed}", file=sys.stderr)

    def _say(self, name: str, text: str) -> None:
        if not self.quiet:
            indent = "\n" + " " * 10
            self.screen.say(f"{name:>8}  {indent.join(text.splitlines())}")
