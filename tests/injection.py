"""Run the command with injected faults, and check how it ended: real processes, real files."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from forks import Command
from support import TESTS, environment, events, processes_using, python_path, send_all, write_recipe

from fsdptrain.checkpoint import manifest
from fsdptrain.run_folder.rundir import RunDir

STEPS, EVERY = 12, 2
SMALL = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
FAULTLESS: Any = {  # steps of about 50 ms; a constant schedule, so that the curve does not depend on train.steps
    "model__config": {"model_type": "llama", **SMALL}, "data__seq_len": 32, "train__steps": STEPS,
    "train__global_batch_size": 4, "schedule": {"name": "constant", "warmup": 0}, "checkpoint__every": EVERY,
    "checkpoint__keep": 2, "launch__timeout_s": 30,
}  # fmt: skip
LEAVE_WITHIN_S = 5.0  # after the command has ended, for its workers to end
LEFTOVERS = (".tmp", ".old", ".damaged", ".writing", ".kept")


def small_recipe(tmp: Path, **changes: Any) -> Path:
    tmp.mkdir(parents=True, exist_ok=True)
    return write_recipe(tmp, **{**FAULTLESS, **changes})


@dataclass
class Ended:
    """How a command ended. `notice` is the seconds from the fault to the end, NaN if the fault left no mark file."""

    code: int
    output: str
    notice: float
    left: list[int]  # processes that still used the run folder after LEAVE_WITHIN_S

    def problems(self, code: int, *words: str, within: float | None = None) -> list[str]:
        """Return what is not as expected: exit code, patterns in the output, time to notice, processes left."""
        found = [] if self.code == code else [f"exit code {self.code}, not {code}"]
        found += [f"{word!r} is not in the output" for word in words if not re.search(word, self.output)]
        found += ["a traceback is shown"] if "Traceback" in self.output else []
        found += [f"processes are left: {self.left}"] if self.left else []
        found += [f"noticed after {self.notice:.1f} s"] if within is not None and not self.notice <= within else []
        return [*found, self.output] if found else []


class Running:
    def __init__(self, recipe: Path, *faults: dict[str, Any], prefix: Sequence[str] = (), **extra: str) -> None:
        """Start the command; `prefix` is a command that runs it, `extra` is added to its environment."""
        self.run = Path(yaml.safe_load(recipe.read_text())["output_dir"])
        self.marks = [Path(fault["mark"]) for fault in faults if "mark" in fault]
        self.process = (subprocess.Popen if prefix else Command)(
            [*prefix, sys.executable, "-m", "fsdptrain", "run", str(recipe)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(PYTHONPATH=python_path(TESTS / "faults"), FSDPTRAIN_FAULTS=json.dumps(faults), **extra),
        )  # fmt: skip

    def wait(self, timeout: float = 180) -> Ended:
        """Wait for the end of the command and of its workers. After `timeout` the command is killed."""
        try:
            output = self.process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            output = self.process.communicate()[0] + f"killed by the test: it did not end within {timeout} s"
        ended = time.time()
        while (left := processes_using(self.run)) and time.time() < ended + LEAVE_WITHIN_S:
            time.sleep(0.05)
        send_all(signal.SIGKILL, left)  # so that they do not slow down the next test
        moments = [mark.stat().st_mtime for mark in self.marks if mark.exists()]
        notice = ended - max(moments) if moments else float("nan")
        return Ended(self.process.returncode, output, notice, left)


def run_with(recipe: Path, *faults: dict[str, Any], timeout: float = 180, **extra: str) -> Ended:
    return Running(recipe, *faults, **extra).wait(timeout)


def valid_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints whose every byte is as their manifest says."""
    rundir = RunDir(run)
    return [step for step in rundir.checkpoint_steps() if not manifest.checkpoint_problems(rundir.checkpoint(step))]


def last_step(run: Path) -> int:
    return int(next((event["step"] for event in reversed(events(run, "step"))), 0))


def curve(run: Path) -> dict[int, list[Any]]:
    """Return step → [loss, gradient norm, samples], for the last time that each step was trained."""
    return {event["step"]: [event["loss"], event["grad_norm"], event["samples"]] for event in events(run, "step")}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint or export, without the manifest, which contains the run folder's name."""
    return {
        path.name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != manifest.MANIFEST_NAME
    }


def differences(run: Path, reference: Path) -> list[str]:
    """Return where a run that was disturbed and finished is not bitwise equal to an undisturbed one."""
    try:
        disturbed, whole = curve(run), curve(reference)
    except json.JSONDecodeError as error:
        return [f"{run / 'metrics.jsonl'} holds a line that is not JSON: {error.doc}"]
    found = [f"step {n}: {disturbed.get(n)}, not {whole[n]}" for n in whole if disturbed.get(n) != whole[n]]
    found += [f"step {step} is not in the reference" for step in disturbed.keys() - whole.keys()]
    final = f"checkpoints/step-{max(whole):08}"
    found += [f"{part} differs" for part in (final, "export") if contents(run / part) != contents(reference / part)]
    remains = [path.name for path in run.rglob("*") if path.suffix in LEFTOVERS]
    return found + [f"{name} is left" for name in remains]


@dataclass
class Inside:
    """Linux namespaces that process `pid` holds open; `prefix` runs a command inside them."""

    pid: int
    prefix: list[str]


@contextlib.contextmanager
def holder(*unshare: str, script: str) -> Iterator[Inside]:
    """Create namespaces (flags of `unshare`), set up by a shell script; they end with the context.

    Raises PermissionError with the system's message if this machine does not allow it.
    """
    with_this_process = ["setpriv", "--pdeathsig", "KILL"]  # else they would outlive a test session that is killed
    process = subprocess.Popen(
        [*with_this_process, "unshare", *unshare, "sh", "-ec", f"{script}\necho ready; exec sleep infinity"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        if first != "ready":
            raise PermissionError(first)
        flags = [flag if flag != "--map-root-user" else "--preserve-credentials" for flag in unshare]
        yield Inside(process.pid, ["nsenter", "--target", str(process.pid), *flags])
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
