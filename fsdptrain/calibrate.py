"""Forecast beside reality: a run is forecast while it goes, and at its end the two are compared."""

from __future__ import annotations

import dataclasses
import json
import statistics
import threading
import time
from typing import Any

from fsdptrain.errors import FsdptrainError
from fsdptrain.forecast import Forecast, Forecaster
from fsdptrain.hardware import CPU, Hardware, card
from fsdptrain.plan import Plan
from fsdptrain.report import Screen, Tail, size
from fsdptrain.rundir import RunDir

WARM_UP = 3  # steps that do not count: the first ones compile, connect and fill caches
ENOUGH = 8  # steps from which on a speed is worth comparing
PATIENCE_S = 60.0  # for a forecast that is not ready when the run is


class Calibration:
    """Watches a run from the launcher's side.

    On GPUs the forecast takes the time that the workers leave the CPU. On a CPU they leave none, and its speed, which
    the forecast measures, is theirs: there it is made at the end.
    """

    def __init__(self, plan: Plan, rundir: RunDir) -> None:
        self._plan, self._rundir = plan, rundir
        self._events, self._ended = Tail(rundir.metrics), False
        self._forecast: Forecast | None = None
        self._why_not = "it was not ready in time"
        self._forecaster: Forecaster | None = None
        self._thread = threading.Thread(target=self._foresee, args=(Tail(rundir.metrics),), daemon=True)
        self._thread.start()

    def _foresee(self, events: Tail) -> None:
        """Forecast this run once its workers have said what they run on, and made a step: the first is waited for."""
        start: dict[str, Any] | None = None
        while not self._ended:
            for event in events.read():
                if event["event"] == "start":
                    start = event
                elif event["event"] == "step" and start is not None:
                    if start["device"] != "cpu":
                        self._ask(start)
                    return
            time.sleep(0.5)

    def _ask(self, start: dict[str, Any]) -> None:
        hardware = hardware_of(start)
        if hardware is None:
            self._why_not = f"no figures are known of {start['device']}"
            return
        self._forecaster = Forecaster(niceness=19)
        try:
            self._forecast = self._forecaster.ask(self._plan, hardware, config_dir=str(self._rundir.model))
        except (FsdptrainError, OSError, ValueError) as error:
            self._why_not = str(error)

    def close(self) -> None:
        """Stop forecasting."""
        self._ended = True
        if self._forecaster:
            self._forecaster.close()

    def tell(self, screen: Screen) -> None:
        """Compare on screen and in the run folder; nothing is said of a run too short to compare."""
        events = list(self._events.read())
        steps = [event for event in events if event["event"] == "step"][WARM_UP:]
        start = next((event for event in reversed(events) if event["event"] == "start"), None)
        if start is None or len(steps) < ENOUGH:
            return
        with screen.busy("forecast"):
            if start["device"] == "cpu":
                self._thread = threading.Thread(target=self._ask, args=(start,), daemon=True)
                self._thread.start()
            self._thread.join(PATIENCE_S)
        if self._forecast is None:
            screen.say(f"no forecast to compare with: {self._why_not}")
            return
        found = compare(self._forecast, start, steps)
        self._rundir.forecast.write_text(json.dumps(found, indent=2), encoding="utf-8")
        screen.say(in_words(found))


def hardware_of(start: dict[str, Any]) -> Hardware | None:
    """The hardware a run's `start` event names; None for a card we have no figures of."""
    return CPU if start["device"] == "cpu" else card(start["device"], start["device_memory_bytes"])


def compare(forecast: Forecast, start: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What was foreseen and what was measured; a ratio is measured over foreseen.

    On a GPU the memory is what torch allocated at most; on a CPU it is the growth of the resident memory over what the
    process had before the model, gloo's copies included.
    """
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


def in_words(found: dict[str, Any]) -> str:
    """The comparison in one line for the person."""
    memory, speed = found["compared"]["peak_bytes"], found["compared"]["step_s"]
    return (
        f"forecast and reality: memory {size(memory['forecast'])}, measured {size(memory['measured'])} "
        f"({memory['ratio']:.2f}×); a step {speed['forecast']:.3g} s, measured {speed['measured']:.3g} s "
        f"({speed['ratio']:.2f}×)"
    )
