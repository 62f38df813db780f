"""What to change after a rank ran out of memory: the forecast of the plan, and overrides with which it would fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fsdptrain.errors import FsdptrainError
from fsdptrain.folder.records import Record
from fsdptrain.forecast.client import Forecast
from fsdptrain.forecast.search import RequestForecast, changes_of_kind, changes_that_save_memory, command_text
from fsdptrain.plan.hardware import CPU, Hardware, card
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.text import size

SHOWN = 3  # overrides


NOTHING_FITS = "no override of strategy, micro-batch, recomputation or offload was found that fits"


LIMIT_S = 120.0  # no further forecast is started after this time: the run has failed, and somebody waits


def relief_lines(plan: Plan, start: Record | None, request: RequestForecast, **job: Any) -> list[str]:
    """Return the forecast of a plan that ran out of memory, and the first overrides with which it fits.

    `start` is the run's `start` event, which names the card; without it, or if the card is unknown, nothing is
    forecast. Where nothing is forecast, the overrides are those that save the most for the least time.
    """
    plan = plan.of_attempt(start)
    changes = [*changes_that_save_memory(plan)]
    hardware = hardware_of(start) if start else None
    if hardware is None:
        return ["no forecast: the card is not known", *_untried(changes)]
    deadline = time.monotonic() + LIMIT_S
    try:
        own = request(plan, hardware, **job)
    except FsdptrainError as error:
        return [f"no forecast: {error}", *_untried(changes)]
    fitting = list(_fitting(plan, changes, hardware, request, deadline, job))
    title = "these overrides need less:" if own.fits else "with these overrides it would fit:"
    lines = [_own_line(own), *([title, *map(_line, fitting)] if fitting else [NOTHING_FITS])]
    # Other kinds of training only where all that fits is offloaded, which is slow.
    if all(overrides.get("fsdp.cpu_offload", plan.recipe.fsdp.cpu_offload) for overrides, _ in fitting):
        for kind, overrides in changes_of_kind(plan, offload=False):
            for fit in _fitting(plan, [overrides], hardware, request, deadline, job):
                lines += [f"fits with {kind.name}; {kind.effect}:", _line(fit)]
    return lines


def hardware_of(start: Mapping[str, Any]) -> Hardware | None:
    """Return the hardware that a `start` event names; None for an unknown card."""
    if start["device"] == "cpu":
        return dataclasses.replace(CPU, memory=start["device_memory_bytes"])
    return card(start["device"], start["device_memory_bytes"])


def _own_line(own: Forecast) -> str:
    """Return the forecast peak beside the memory of the card."""
    line = f"forecast: {size(own.needed_bytes)} of {size(own.memory_bytes)}, the peak in the {own.moment}"
    if own.fits and not own.tight:
        line += "; that fits, so look for another process on this GPU (nvidia-smi)"
    return line


def _fitting(
    plan: Plan, changes: list[dict[str, Any]], hardware: Hardware, request: RequestForecast, deadline: float,
    job: Mapping[str, Any],
) -> Iterator[tuple[dict[str, Any], Forecast]]:  # fmt: skip
    """Yield the first changes that fit, with their forecasts; changes that cannot be forecast are passed over."""
    found = 0
    for overrides in changes:
        if found == SHOWN or time.monotonic() > deadline:
            return
        try:
            forecast = request(varied(plan, overrides), hardware, **job)
        except FsdptrainError:
            continue
        if forecast.fits:
            found += 1
            yield overrides, forecast


def _line(fit: tuple[dict[str, Any], Forecast]) -> str:
    overrides, forecast = fit
    return f"  {command_text(overrides)}  ({size(forecast.needed_bytes)}, {forecast.step_s:.3g} s a step)"


def _untried(changes: list[dict[str, Any]]) -> list[str]:
    """Return the first changes as lines."""
    if not changes:
        return ["no override of strategy, micro-batch, recomputation or offload would save memory"]
    return ["overrides that need less memory:", *(f"  {command_text(overrides)}" for overrides in changes[:SHOWN])]
