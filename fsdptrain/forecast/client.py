"""What a run will need and how fast it will be, asked of a process of its own that runs the engine on fake tensors.

No torch here: `estimate` is the other side. A process of its own, for a pretended accelerator cannot be taken back, and
an error inside autograd's device thread ends the process that asked for it.
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

from fsdptrain.config.hardware import Hardware
from fsdptrain.config.plan import Plan
from fsdptrain.errors import FsdptrainError, from_record
from fsdptrain.forecast.trace import Category
from fsdptrain.processes import child_command, child_environment


@dataclass(frozen=True)
class Forecast:
    """One optimizer step of the worst rank. Bytes and seconds; `docs/validate.md` explains every name.

    `peak_bytes` is what torch has allocated at `moment`, `breakdown` its parts; `reserved_bytes` what the caching
    allocator then holds; `overhead_bytes` what the driver and NCCL take beside it.
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
    notes: list[str] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """All of the card's memory that is taken at the peak."""
        return self.reserved_bytes + self.overhead_bytes


class Forecaster:
    """A process that forecasts one plan after the other. It starts to import at once and waits for the first."""

    def __init__(self, niceness: int = 0) -> None:
        self._niceness, self._closed = niceness, False
        self._start()

    def _start(self) -> None:
        if self._closed:
            raise FsdptrainError("the forecast was given up")
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        words = child_command("fsdptrain.simulate.server")
        self._process = subprocess.Popen(
            ["nice", "-n", str(self._niceness), *words] if self._niceness else words,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, encoding="utf-8",
            env=child_environment(),
            start_new_session=True,  # the terminal's Ctrl-C is for us to act on
        )  # fmt: skip
        if self._niceness:  # Linux may share the cores among sessions first, where a process's own niceness is nothing
            with contextlib.suppress(OSError):
                Path(f"/proc/{self._process.pid}/autogroup").write_bytes(str(self._niceness).encode())

    def forecast(self, plan: Plan, hardware: Hardware, **job: Any) -> Forecast:
        """The forecast of a plan; on a fake CPU device where the pretended accelerator fails.

        `job` may hold `vocab_size` (of the tokenizer), `config_dir` (a folder with the model's config.json), and `plot`
        (a file to draw the step's timeline to). Raises RecipeError for what the model refuses, and a plain
        FsdptrainError when the simulation itself failed.
        """
        job |= {"plan": plan.to_json(), "hardware": dataclasses.asdict(hardware)}
        answer = self._answer(job | {"pretend": not hardware.is_cpu})
        if answer is None and not hardware.is_cpu:
            first = self._last_words()
            self._restart()
            answer = self._answer(job | {"pretend": False})
            if answer is not None and "error" not in answer:
                answer["notes"].append(f"simulated as if on a CPU: the pretended accelerator failed ({first})")
        if answer is None:
            words = self._last_words()
            self._restart()
            raise FsdptrainError(f"the step could not be simulated: {words}")
        if "error" in answer:
            raise from_record(answer["error"])
        return Forecast(**answer)

    def _answer(self, job: dict[str, Any]) -> dict[str, Any] | None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing was said")
        return said.removeprefix("[rank0]: ")[:200]

    def _restart(self) -> None:
        self._end()
        self._start()

    def close(self) -> None:
        """End the process; a forecast that another thread waits for is given up."""
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
