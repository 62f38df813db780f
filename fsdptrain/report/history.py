"""What a run has written, read for a report: its records, its state, and how it went over time."""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdptrain.config.keys import flat
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import RecipeError, StorageError, Unreadable, first_line
from fsdptrain.plan.plan import Plan, open_plan
from fsdptrain.report.status import UNKNOWN, Observer
from fsdptrain.run_folder.files import NOTHING_THERE
from fsdptrain.run_folder.records import Record, Tail, numbers_in, read_object, without_undone
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import seconds, size

Points = list[tuple[float, float]]
AXES = {"steps": ("", 1), "tokens": ("total_tokens", 1), "hours": ("total_s", 3600)}  # what counts them in events; unit


@dataclass
class RunHistory:
    """A run for a report. `records` has all that was written, in order; `kept` lacks what a resume undid.

    Where an attempt ended without a word, `records` has a `lost` event, which no file has.
    """

    rundir: RunDir
    records: list[Record]
    status: dict[str, Any]
    plan: Plan | None  # None: of another version
    notes: list[str]
    label: str = ""
    over: str = "steps"  # of AXES: what curves are drawn over
    kept: list[Record] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = without_undone(self.records)
        self.records = [*_with_lost_attempts(self.records)]

    @cached_property
    def start(self) -> Record:
        """The newest `start` event; empty before the first."""
        return next((record for record in reversed(self.records) if record["event"] == "start"), {})

    def of_kind(self, kind: str) -> list[Record]:
        """Return the events of a kind that no resume undid."""
        return [record for record in self.kept if record["event"] == kind]

    @cached_property
    def series(self) -> dict[str, dict[str, Points]]:
        """Kind of event → name → (place, value) of every number in it; one in an object is `object.name`."""
        found: dict[str, dict[str, Points]] = {"step": {}, "eval": {}}
        for record in self.kept:
            if record["event"] in found:
                place = self.place(record["step"])
                for names, value in numbers_in(record):
                    found[record["event"]].setdefault(".".join(names), []).append((place, float(value)))
        return found

    def place(self, step: int) -> float:
        """Return where a step is on the axis of curves: its number, or what was trained until its end."""
        if self.over == "steps":
            return float(step)
        steps, places = self._places
        number = bisect.bisect_right(steps, step)
        return places[number - 1] if number else 0.0

    @cached_property
    def _places(self) -> tuple[list[int], list[float]]:
        name, unit = AXES[self.over]
        totals = self._totals[name]
        return [*totals], [total / unit for total in totals.values()]

    @cached_property
    def _totals(self) -> dict[str, dict[int, float]]:
        """Name → step → what is counted by that name until the end of the step, in all steps that count."""
        found: dict[str, dict[int, float]] = {name: {} for name in ("total_tokens", "total_positions", "total_s")}
        kept = {id(record) for record in self.kept}
        for name, totals in found.items():
            for attempt in self.attempts():
                before = next(reversed(totals.values()), 0.0)  # events count from the start of their attempt
                steps = (record for record in attempt if record["event"] == "step" and id(record) in kept)
                totals |= {record["step"]: before + record[name] for record in steps}
        return found

    def attempts(self) -> Iterator[list[Record]]:
        """Yield the records of each attempt, from one `start` to the next."""
        attempt: list[Record] = []
        for record in self.records:
            if record["event"] == "start" and attempt:
                yield attempt
                attempt = []
            attempt.append(record)
        yield attempt

    @cached_property
    def totals(self) -> dict[str, float]:
        """The label tokens, positions and seconds of all steps that count."""
        return {name: next(reversed(totals.values()), 0.0) for name, totals in self._totals.items()}

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Key → value of the recipe with all overrides; empty if it is of another version."""
        return flat(self.plan.recipe) if self.plan else {}

    @cached_property
    def forecast(self) -> dict[str, Any]:
        """The forecast beside the measurement: `peak_bytes`, as the chart of memory has it, and `says`, a sentence."""
        with contextlib.suppress(*NOTHING_THERE, Unreadable, LookupError, TypeError, ValueError):
            found = read_object(self.rundir.forecast)
            peak = found["compared"]["peak_bytes"]["forecast"] + self.start["baseline_memory_bytes"]
            return {"peak_bytes": float(peak), "says": comparison_line(found)}
        return {}


def _with_lost_attempts(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the records and, before a start that follows no end, that the attempt before it was lost."""
    newest, ended = Record(), True
    for record in records:
        if record["event"] == "start" and not ended:
            yield {"event": "lost", "at": newest["at"]}
        ended = record["event"] in ("stop", "error", "restart", "nonfinite", "export")
        newest = record
        yield record


def read_run(rundir: RunDir, over: str = "steps") -> RunHistory:
    """Read a run folder, which nothing locks: the run may go on. Its curves are drawn over one of AXES.

    Raises RecipeError if it has nothing to report.
    """
    notes, status, plan = [], UNKNOWN, None
    tail = Tail(rundir.metrics, from_end=False)
    records = [*tail.read()]
    try:
        status = Observer(rundir).status()
        plan = open_plan(rundir.plan) if records else None
    except (RecipeError, StorageError) as error:
        if not records:
            raise
        notes.append(f"state and recipe are not known: {first_line(error)}")
    if not any(record["event"] == "start" for record in records):
        raise RecipeError(f"{rundir.root} has nothing to report yet: {status['why'] or 'no worker has started'}")
    return RunHistory(rundir, records, status, plan, [*notes, *tail.faults], over=over)


def set_labels(runs: Sequence[RunHistory]) -> None:
    """Give each run the shortest label that tells it from the others: its name, its folder, or where they part."""
    names = [run.status["name"] or run.rundir.root.name for run in runs]
    folders, places = [run.rundir.root.name for run in runs], [str(run.rundir.root) for run in runs]
    if len({*places}) > 1:
        common = os.path.commonpath(places)
        places = [os.path.relpath(place, common) for place in places]
    chosen = next((labels for labels in (names, folders) if len({*labels}) == len(runs)), places)
    for run, label in zip(runs, chosen, strict=True):
        run.label = label


def changed_keys(runs: Sequence[RunHistory]) -> list[str]:
    """Return the keys of one run's recipe that are not the defaults; of several, the keys in which they differ."""
    recipes = [run.recipe for run in runs if run.plan]
    others = recipes[1:] if len(runs) > 1 else [flat(Recipe())]
    keys = recipes[0].keys() - {"name", "output_dir"} if recipes else ()
    return [key for key in flat(Recipe()) if key in keys and any(recipes[0][key] != other[key] for other in others)]


def comparison_line(found: dict[str, Any]) -> str:
    """Format the comparison as one line for the terminal."""
    memory, speed = found["compared"]["peak_bytes"], found["compared"]["step_s"]
    return (
        f"forecast and measurement: memory {size(memory['forecast'])}, measured {size(memory['measured'])} "
        f"({memory['ratio']:.2f}×); a step {seconds(speed['forecast'])} s, measured {seconds(speed['measured'])} s "
        f"({speed['ratio']:.2f}×)"
    )
