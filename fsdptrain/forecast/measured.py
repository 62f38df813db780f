"""Compare a run on GPUs with its forecast, which is made while the run goes on.

A run on a CPU is not compared. Its forecast measures the speed of the machine, which the run uses at the same time, and
the measured memory is that of the process, of which tensors are the smaller part.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
from typing import Any

from fsdptrain.errors import FsdptrainError
from fsdptrain.forecast.changes import hardware_of
from fsdptrain.forecast.forecaster import Forecast, Forecaster
from fsdptrain.plan.plan import Plan
from fsdptrain.report.history import comparison_line
from fsdptrain.run_folder.files import write_atomically
from fsdptrain.run_folder.records import Tail, without_undone
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen

WARM_UP = 3  # first steps that are not compared: they compile, connect and fill caches
POLL_S = 0.5  # seconds between two reads of metrics.jsonl
NICENESS = 19  # of the forecasting process: the workers have priority
MIN_STEPS = 8  # after the warm-up; with fewer the measured speed means little


class ForecastComparison:
    """Forecasts a run on GPUs from the launcher's process, at low priority, and compares the two at the end."""

    def __init__(self, plan: Plan, rundir: RunDir) -> None:
        self._plan, self._rundir = plan, rundir
        self._events, self._ended = Tail(rundir.metrics), threading.Event()
        self._forecast: Forecast | None = None
        self._no_forecast_because = ""
        self._forecaster: Forecaster | None = None
        self._thread = threading.Thread(target=self._watch, args=(Tail(rundir.metrics),), daemon=True)
        self._thread.start()

    def _watch(self, events: Tail) -> None:
        """Forecast the run after its first step, so that the forecast does not delay it."""
        start: dict[str, Any] | None = None
        while not self._ended.wait(POLL_S):
            for event in events.read():
                if event["event"] == "start":
                    start = event
                elif event["event"] == "step" and start is not None:
                    self._make_forecast(start)
                    return

    def _make_forecast(self, start: dict[str, Any]) -> None:
        hardware = hardware_of(start)
        if hardware is None:
            self._no_forecast_because = f"no hardware figures for {start['device']}"
            return
        self._forecaster = Forecaster(NICENESS)
        if self._ended.is_set():  # `close` was called before the process existed
            self._forecaster.close()
        try:
            plan = self._plan.of_attempt(start)
            self._forecast = self._forecaster.forecast(plan, hardware, config_dir=str(self._rundir.model))
        except (FsdptrainError, OSError, ValueError) as error:
            self._no_forecast_because = str(error)

    def close(self) -> None:
        """Stop forecasting."""
        self._ended.set()
        if self._forecaster:
            self._forecaster.close()
        self._thread.join()

    def report(self, screen: Screen) -> None:
        """Print the comparison and write it to the run folder; do nothing if the run made too few steps."""
        events = without_undone(self._events.read())
        steps = [event for event in events if event["event"] == "step"][WARM_UP:]
        starts = [event for event in events if event["event"] == "start"]
        if not starts or len(steps) < MIN_STEPS:
            return
        if len({self._plan.of_attempt(start).topology for start in starts}) > 1:
            screen.say("forecast and measurement are not compared: the number of nodes changed")
            return
        start = starts[-1]
        if self._forecast is not None:
            found = compare(self._forecast, start, steps)
            write_atomically(self._rundir.forecast, json.dumps(found, indent=2))
            screen.say(comparison_line(found))
        elif self._no_forecast_because:
            screen.say(f"no forecast to compare with: {self._no_forecast_because}")


def compare(forecast: Forecast, start: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return forecast and measurement of memory (as allocated by torch) and time; `ratio` is measured / forecast."""
    peak = max(step["peak_memory_bytes"] for step in steps) - start["baseline_memory_bytes"]
    step_s = statistics.median(step["step_s"] for step in steps)
    pairs = {"peak_bytes": (forecast.peak_bytes, peak), "step_s": (forecast.step_s, step_s)}
    compared = {
        name: {"forecast": expected, "measured": measured, "ratio": measured / expected}
        for name, (expected, measured) in pairs.items()
    }
    return {
        "compared": compared,
        "steps": len(steps),
        "device": start["device"],
        "forecast": dataclasses.asdict(forecast),
    }
