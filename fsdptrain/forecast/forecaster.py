"""Forecast the memory and time of a plan in a separate process, which runs the engine on fake tensors.

This module imports no torch; `simulate.server` is the process. It is separate because a pretended accelerator cannot be
removed again, and because an error inside autograd's device thread ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptrain.errors import FsdptrainError, from_record
from fsdptrain.forecast.trace import Category
from fsdptrain.plan.hardware import ESTIMATED, Hardware
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import child_command, child_environment


@dataclass(frozen=True)
class Forecast:
    """One optimizer step of the worst rank, in bytes and seconds; `docs/validate.md` explains every name.

    `peak_bytes` is what torch has allocated at `moment`, and `breakdown` its parts. `reserved_bytes` is what the
    caching allocator reserves, `overhead_bytes` what the driver and NCCL take in addition.
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
    textbook: dict[str, int]
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
    notes: list[str] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """All memory of the card that is in use at the peak."""
        return self.reserved_bytes + self.overhead_bytes


class Forecaster:
    """A process that forecasts one plan after another. It starts to import at once, before it gets the first plan."""

    def __init__(self, niceness: int = 0) -> None:
        self._niceness, self._closed = niceness, False
        self._start()

    def _start(self) -> None:
        if self._closed:
            raise FsdptrainError("the forecast was cancelled")
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = child_command("fsdptrain.simulate.server")
        self._process = subprocess.Popen(
            ["nice", "-n", str(self._niceness), *command] if self._niceness else command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, encoding="utf-8",
            env=child_environment(),
            start_new_session=True,  # the command handles Ctrl-C, not this process
        )  # fmt: skip
        if self._niceness:  # with autogroup, Linux ignores the niceness of a process and uses that of its session
            with contextlib.suppress(OSError):
                Path(f"/proc/{self._process.pid}/autogroup").write_bytes(str(self._niceness).encode())

    def forecast(self, plan: Plan, hardware: Hardware, **job: Any) -> Forecast:
        """Forecast a plan on its hardware.

        `job` may hold `vocab_size` (of the tokenizer), `config_dir` (a folder with the model's config.json), and `plot`
        (a file for the timeline of the step). Raises RecipeError if the model rejects the recipe, and FsdptrainError if
        the simulation fails.
        """
        described = {"plan": plan.to_json(), "hardware": dataclasses.asdict(hardware)}
        answer = self._request({**job, **described, "pretend": not hardware.is_cpu})
        if answer is None:
            cause = self._last_error()
            self._restart()
            raise FsdptrainError(f"the step could not be simulated: {cause}")
        if "error" in answer:
            raise from_record(answer["error"])
        return Forecast(**answer)

    def _request(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Send a job and return the answer, or None if the process ended without one."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def _last_error(self) -> str:
        """Return the last line of standard error that names an error, else its last line."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        error = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no message")
        return error.removeprefix("[rank0]: ")[:200]

    def _restart(self) -> None:
        self._end()
        self._start()

    def close(self) -> None:
        """End the process; a forecast that another thread waits for fails."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Forecaster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
