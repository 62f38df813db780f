"""Forecast beside reality: a run on GPUs is forecast while it goes, and at its end the two are compared.

On a CPU there is nothing to compare: a step is forecast by the speed that the machine has meanwhile, which is the
run's own, and the measured memory is that of the process, in which tensors are the smaller part.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
from typing import Any

from fsdptrain.config.hardware import card
from fsdptrain.config.plan import Plan
from fsdptrain.errors import FsdptrainError
from fsdptrain.events import Tail, without_undone
from fsdptrain.forecast.client import Forecast, Forecaster
from fsdptrain.rundir import RunDir
from fsdptrain.screen import Screen
from fsdptrain.text import size

WARM_UP = 3  # steps that do not count: the first ones compile, connect and fill caches


POLL_S = 0.5


NICENESS = 19  # of the forecast: the workers come first


ENOUGH = 8  # steps from which on a speed is worth comparing


class ForecastComparison:
    """Watches a run on GPUs from the launcher's side, and forecasts it in the time that the workers leave the CPU."""

    def __init__(self, plan: Plan, rundir: RunDir) -> None:
        self._plan, self._rundir = plan, rundir
        self._events, self._ended = Tail(rundir.metrics), threading.Event()
        self._forecast: Forecast | None = None
        self._why_not = ""
        self._forecaster: Forecaster | None = None
        self._thread = threading.Thread(target=self._foresee, args=(Tail(rundir.metrics),), daemon=True)
        self._thread.start()

    def _foresee(self, events: Tail) -> None:
        """Forecast this run once its workers have said what they run on, and made a step: the first is waited for."""
        start: dict[str, Any] | None = None
        while not self._ended.wait(POLL_S):
            for event in events.read():
                if event["event"] == "start":
                    start = event
                elif event["event"] == "step" and start is not None:
                    self._ask(start)
                    return

    def _ask(self, start: dict[str, Any]) -> None:
        hardware = card(start["device"], start["device_memory_bytes"])
        if hardware is None:
            self._why_not = f"no figures are known of {start['device']}"
            return
        self._forecaster = Forecaster(NICENESS)
        if self._ended.is_set():  # `close` may not have seen it
            self._forecaster.close()
        try:
            self._forecast = self._forecaster.forecast(self._plan, hardware, config_dir=str(self._rundir.model))
        except (FsdptrainError, OSError, ValueError) as error:
            self._why_not = str(error)

    def close(self) -> None:
        """Stop forecasting."""
        self._ended.set()
        if self._forecaster:
            self._forecaster.close()
        self._thread.join()

    def report(self, screen: Screen) -> None:
        """Compare on screen and in the run folder; nothing is said of a run that ended before there was enough to."""
        events = without_undone(self._events.read())
        steps = [event for event in events if event["event"] == "step"][WARM_UP:]
        start = next((event for event in reversed(events) if event["event"] == "start"), None)
        if start is None or len(steps) < ENOUGH:
            return
        if self._forecast is not None:
            found = compare(self._forecast, start, steps)
            self._rundir.forecast.write_text(json.dumps(found, indent=2), encoding="utf-8")
            screen.say(comparison_line(found))
        elif self._why_not:
            screen.say(f"no forecast to compare with: {self._why_not}")


def compare(forecast: Forecast, start: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What was foreseen and what was measured (of memory: what torch allocated); a ratio is measured over foreseen."""
    peak = max(step["peak_memory_bytes"] for step in steps) - start["baseline_memory_bytes"]
    seconds = statistics.median(step["step_s"] for step in steps)
    pairs = {"peak_bytes": (forecast.peak_bytes, peak), "step_s": (forecast.step_s, seconds)}
    compared = {
        name: {"forecast": foreseen, "measured": measured, "ratio": measured / foreseen}
        for name, (foreseen, measured) in pairs.items()
    }
    return {
        "compared": compared,
        "steps": len(steps),
        "device": start["device"],
        "forecast": dataclasses.asdict(forecast),
    }


def comparison_line(found: dict[str, Any]) -> str:
    """The comparison in one line for the person."""
    memory, speed = found["compared"]["peak_bytes"], found["compared"]["step_s"]
    return (
        f"forecast and reality: memory {size(memory['forecast'])}, measured {size(memory['measured'])} "
        f"({memory['ratio']:.2f}×); a step {speed['forecast']:.3g} s, measured {speed['measured']:.3g} s "
        f"({speed['ratio']:.2f}×)"
    )
