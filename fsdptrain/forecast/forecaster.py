"""Forecast the memory and time of a plan in a separate process, which runs the engine on fake tensors.

This module imports no torch; `forecast.server` is the process. It is separate because a pretended accelerator cannot be
removed again, and because an error inside autograd's device thread ends the process.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.errors import FsdptrainError, from_record
from fsdptrain.forecast.trace import Category
from fsdptrain.plan.hardware import ESTIMATED, Hardware
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import Child


@dataclass(frozen=True)
class Forecast:
    """One optimizer step of the rank with the highest peak, in bytes and seconds; docs/validate.md explains the names.

    `peak_bytes` is what torch has allocated at `moment`, and `breakdown` its parts. `reserved_bytes` is what the
    caching allocator reserves, `overhead_bytes` what the driver and NCCL take in addition. `attention` is the kernel
    whose rate is assumed; empty on a CPU.
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
    time_basis: str = ESTIMATED
    attention: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """All memory of the card that is in use at the peak."""
        return self.reserved_bytes + self.overhead_bytes


class Forecaster:
    """A process that forecasts one plan after another. It starts to import at once, before it gets the first plan."""

    def __init__(self, niceness: int = 0) -> None:
        self._niceness, self._closed = niceness, False
        self._child = self._started()

    def _started(self) -> Child:
        return Child("fsdptrain.forecast.server", niceness=self._niceness, keep_errors=True)

    def forecast(self, plan: Plan, hardware: Hardware, **job: Any) -> Forecast:
        """Forecast a plan on its hardware.

        `job` may hold `vocab_size` (of the tokenizer), `config_dir` (a folder with the model's config.json), `plot` (a
        file for the timeline of the step) and `document` (see `simulate.server.estimate`). Raises RecipeError if the
        model rejects the recipe, and FsdptrainError if the simulation fails.
        """
        described = {"plan": plan.to_json(), "hardware": dataclasses.asdict(hardware)}
        answer = self._child.ask({**job, **described, "pretend": not hardware.is_cpu})
        if answer is None:
            if self._closed:
                raise FsdptrainError("the forecast was cancelled")
            cause = self._child.last_error() or "no message"
            self._child.close()
            self._child = self._started()
            raise FsdptrainError(f"the step could not be simulated: {cause.removeprefix('[rank0]: ')[:200]}")
        if "error" in answer:
            raise from_record(answer["error"])
        return Forecast(**answer)

    def close(self) -> None:
        """End the process; a forecast that another thread waits for fails."""
        self._closed = True
        self._child.close()

    def __enter__(self) -> Forecaster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
