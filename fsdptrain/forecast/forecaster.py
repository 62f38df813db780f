"""Forecast the memory and time of a plan in a separate process, which runs the engine on fake tensors.

And compare a run on GPUs with its forecast. A run on a CPU is not compared: the measured memory would be that of the
process, of which tensors are the smaller part.

This module imports no torch; `forecast.server` is the process. It is separate because a pretended accelerator cannot be
removed again, and because an error inside autograd's device thread ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.errors import FsdptrainError, from_record
from fsdptrain.forecast.trace import Category
from fsdptrain.plan.hardware import CPU, ESTIMATED, Hardware, card
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import Child
from fsdptrain.report.history import comparison_line
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.files import write_atomically
from fsdptrain.run_folder.records import Record, without_undone
from fsdptrain.terminal.screen import Screen

WARM_UP = 3  # first steps that are not compared: they compile, connect and fill caches
SERVER = "fsdptrain.forecast.server"
MIN_STEPS = 8  # after the warm-up; with fewer the measured speed means little


@dataclass(frozen=True)
class Forecast:
    """One optimizer step of the rank with the highest peak, in bytes and seconds; docs/validate.md explains the names.

    `peak_bytes` is what torch has allocated at `moment`, and `breakdown` its parts. `reserved_bytes` is what the
    caching allocator reserves, `overhead_bytes` what the driver and NCCL take in addition. `waiting_share` is the share
    of its passes in which a rank of a pipeline waits for others, on average. `attention` is the kernel whose rate is
    assumed; empty on a CPU.
    """

    fits: bool
    tight: bool
    memory_bytes: int
    peak_bytes: int
    reserved_bytes: int
    overhead_bytes: int
    host_bytes: int
    moment: str
    breakdown: dict[Category, int]
    peaks: dict[str, int]
    collectives: list[dict[str, Any]]
    flops: float
    model_flops: float
    step_s: float
    step_s_range: list[float]
    compute_s: float
    communication_s: float
    exposed_s: float
    tokens_per_s: float
    mfu: float
    hardware: str
    method: str
    waiting_share: float = 0.0
    time_basis: str = ESTIMATED
    attention: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """All memory of the card that is in use at the peak: the whole card if it fits only just."""
        return self.memory_bytes if self.tight else self.reserved_bytes + self.overhead_bytes


class Forecaster(contextlib.AbstractContextManager["Forecaster"]):
    """A process that forecasts one plan after another. It starts to import at once, before it gets the first plan."""

    def __init__(self) -> None:
        self._child = Child(SERVER, keep_errors=True)

    def forecast(self, plan: Plan, hardware: Hardware, on_progress: Progress | None = None, **job: Any) -> Forecast:
        """Forecast a plan on its hardware; `on_progress` gets how far each simulated step is.

        `job` may hold `vocab_size` (of the tokenizer), `config_dir` (a folder with the model's config.json) and `plot`
        (a file for the timeline of the step). Raises RecipeError if the model rejects the recipe, and FsdptrainError if
        the simulation fails.
        """
        described = {"plan": plan.to_json(), "hardware": dataclasses.asdict(hardware)}
        self._child.send({**job, **described, "progress": on_progress is not None})
        for answer in self._child.records():
            if "error" in answer:
                raise from_record(answer["error"])
            if "progress" not in answer:
                return Forecast(**answer)
            if on_progress:
                on_progress(*answer["progress"])
        cause = self._child.last_error() or "no message"
        self._child.close()
        self._child = Child(SERVER, keep_errors=True)
        raise FsdptrainError(f"the step could not be simulated: {cause.removeprefix('[rank0]: ')[:200]}")

    def __exit__(self, *exception: object) -> None:
        self._child.close()


def hardware_of(start: Mapping[str, Any]) -> Hardware | None:
    """Return the hardware that a `start` event names; None for an unknown card."""
    if start["device"] == "cpu":
        return dataclasses.replace(CPU, memory=start["device_memory_bytes"])
    return card(start["device"], start["device_memory_bytes"], start.get("flash", "flash"))


def compare_with_measured(plan: Plan, records: Iterable[Record], screen: Screen) -> None:
    """Forecast a run on GPUs that has ended, from its records; show and write how that compares with what it measured.

    Nothing happens if the run made too few steps.
    """
    events = without_undone(records)
    steps = [event for event in events if event["event"] == "step"][WARM_UP:]
    starts = [event for event in events if event["event"] == "start"]
    if not starts or len(steps) < MIN_STEPS:
        return
    if len({plan.of_attempt(start).topology for start in starts}) > 1:
        screen.say("forecast and measurement are not compared: the number of nodes changed")
        return
    start = starts[-1]
    hardware = hardware_of(start)
    if hardware is None:
        screen.say(f"no forecast to compare with: no hardware figures for {start['device']}")
        return
    try:
        with screen.busy("forecasting the run"), Forecaster() as forecaster:
            config = str(plan.rundir.model)
            forecast = forecaster.forecast(plan.of_attempt(start), hardware, config_dir=config)
    except (FsdptrainError, OSError, ValueError) as error:
        screen.say(f"no forecast to compare with: {error}")
        return
    # Memory as allocated by torch.
    peak = max(step["peak_memory_bytes"] for step in steps) - start["baseline_memory_bytes"]
    step_s = statistics.median(step["step_s"] for step in steps)
    pairs = {"peak_bytes": (forecast.peak_bytes, peak), "step_s": (forecast.step_s, step_s)}
    found = {
        "compared": {
            name: {"forecast": expected, "measured": measured, "ratio": measured / expected}
            for name, (expected, measured) in pairs.items()
        },
        "steps": len(steps),
        "device": start["device"],
        "forecast": dataclasses.asdict(forecast),
    }
    write_atomically(plan.rundir.forecast, json.dumps(found, indent=2))
    screen.say(comparison_line(found))
