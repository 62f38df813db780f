"""What a dry run finds, level by level: facts, what is shown of them, notes and problems."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
)

# Exit codes, the most basic first.
BASIC_FIRST = [error.exit_code for error in (RecipeError, DataError, CheckpointError, DoesNotFit, FsdptrainError)]


UNCHECKED = {  # what cannot be checked on another machine, by the field that its message begins with
    "data.path": "data", "data.eval.path": "evaluation data", "model.id": "model", "model.tokenizer": "tokenizer",
    "model.attn_implementation": "attention kernel", "launch.nproc_per_node": "number of GPUs",
    "launch.rdzv_endpoint": "rendezvous", "output_dir": "room on the disk",
}  # fmt: skip


Item = dict[str, Any]  # something to show: `kind` and the arguments of `summary`'s function of that name


SendRecord = Callable[[dict[str, Any]], None]  # takes the records of progress that `Screen.show` takes


@dataclass(frozen=True)
class Outcome:
    """The end of a dry run. `facts` is what `--json` prints, `sections` the same for the person: heading and items.

    `unchecked` names what only the machine planned for can tell; `notes` has the reasons.
    """

    verdict: str
    sections: list[tuple[str, list[Item]]]
    notes: list[str]
    unchecked: list[str]
    problems: list[str]
    exit_code: int
    facts: dict[str, Any]


class Findings:
    """Facts by level, sections, notes and problems. `send` takes records of what is being done.

    `elsewhere`: the plan is for another machine, and what this one lacks is a note.
    """

    def __init__(self, send: SendRecord = lambda record: None, elsewhere: bool = False) -> None:
        self.send, self.elsewhere = send, elsewhere
        self.levels: dict[str, dict[str, Any]] = {}
        self.step: dict[str, Any] = {}  # the forecast, whose names stand beside the levels' in the JSON
        self.forecast: str | None = None  # the forecast in one line
        self.sections: dict[str, list[Item]] = {}
        self.notes: list[str] = []
        self.unchecked: list[str] = []
        self.problems: list[str] = []
        self._codes: dict[str, int] = {}

    def passed(self, level: str, facts: dict[str, Any], heading: str, *lines: str) -> None:
        """Keep a level's facts, and lines to be shown of them under a heading."""
        self.levels.setdefault(level, {}).update(facts)
        self.shown(heading, *lines)

    def shown(self, heading: str, *lines: str) -> None:
        """Keep lines to be shown."""
        for line in lines:
            self.draw(heading, "text", text=line)

    def draw(self, heading: str, kind: str, **arguments: Any) -> None:
        """Keep something else to be shown: a table, bars, a command."""
        self.sections.setdefault(heading, []).append({"kind": kind, **arguments})

    def note(self, text: str) -> None:
        """Keep what the person should know, though nothing is wrong with it."""
        if text not in self.notes:
            self.notes.append(text)

    def fail(self, error: FsdptrainError, only_here: bool = False) -> None:
        """Keep a problem. What only this machine lacks (`only_here`) is a note for a plan for another."""
        only_here = only_here or isinstance(error, (NoModel, NoData))
        for text in map(str, error.problems if isinstance(error, RecipeError) else [error]):
            if only_here and self.elsewhere:
                self.note(f"not checked here: {text}")
                name = UNCHECKED.get(text.partition(":")[0], "build of torch")
                name += " (no Hub)" if HUB_UNREACHABLE in text else ""
                self.unchecked += [name] if name not in self.unchecked else []
            elif text not in self.problems:
                self.problems.append(text)
                self._codes[text] = error.exit_code

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """What is raised inside is a problem, and no reason not to go on with the next level."""
        try:
            yield
        except FsdptrainError as error:
            self.fail(error)
        except Exception as error:
            traceback.print_exc()
            self.fail(FsdptrainError(f"internal error: {error!r} (please report it, with the traceback above)"))

    def busy(self, what: str) -> None:
        """Say what is being done from now on."""
        self.send({"event": "busy", "what": what})

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is."""
        self.send({"event": "progress", "stage": stage, "done": done, "total": total})

    @property
    def exit_code(self) -> int:
        """That of the most basic problem; 0 without one."""
        return min(self._codes.values(), key=BASIC_FIRST.index, default=0)

    @property
    def verdict(self) -> str:
        """What came of it, in one line."""
        beside = [text for text in self.problems if self._codes[text] != DoesNotFit.exit_code]
        count = f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)} (listed at the end)"
        if not beside:
            return self.forecast or "no problem found; memory and time were not forecast"
        return f"{count}; memory forecast: {self.forecast}" if self.forecast else count

    def outcome(self) -> Outcome:
        """Everything, to be shown or printed as JSON."""
        verdict = self.verdict
        facts = {**self.levels, **self.step, "verdict": verdict, "notes": self.notes, "problems": self.problems}
        sections = [*self.sections.items()]
        return Outcome(verdict, sections, self.notes, self.unchecked, self.problems, self.exit_code, facts)
