"""The torchrun workers of a run: start, watch, explain the first failure, stop, restart. No torch in this process.

    this process ── agent (torch.distributed.run) ── one worker a rank
         │  SIGTERM once: stop at the next step, save       ▲
         └──────── reads metrics.jsonl, failure.json ───────┘

Nobody outlives this process: the agent and the workers ask the kernel to die with their parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from fsdptrain.errors import FsdptrainError, Stopped, WorkerError, from_record
from fsdptrain.plan import Plan
from fsdptrain.report import Screen, Tail
from fsdptrain.rundir import RunDir

POLL_S = 0.1
PR_SET_PDEATHSIG = 1
STOP_WORKER = signal.SIGUSR1  # what a worker of ours takes for "save and leave"


class StopRequest:
    """Counts the stop signals this process gets while it is entered: one asks, the second means now."""

    def __init__(self, *signals: signal.Signals) -> None:
        self.signals = signals or (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self.count = 0
        self.name = ""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.name = signal.Signals(number).name


def launch(plan: Plan, screen: Screen) -> None:
    """Run the plan's workers to the end, restarting after failures that a restart can mend.

    Raises the first failing rank's own error, Stopped after a stop signal, or WorkerError when a worker died.
    """
    rundir = RunDir(Path(plan.run_dir))
    restarts = 0
    with StopRequest() as stop:
        while True:
            before = rundir.checkpoint_steps()
            try:
                _run_once(rundir, screen, stop)
                return
            except WorkerError as error:
                progressed = rundir.checkpoint_steps() != before
                if stop.count or restarts >= plan.recipe.launch.max_restarts or not (progressed or restarts == 0):
                    raise
                restarts += 1
                screen.say(f"{error}\nrestart {restarts} of {plan.recipe.launch.max_restarts}")


def _run_once(rundir: RunDir, screen: Screen, stop: StopRequest) -> None:
    rundir.failure.unlink(missing_ok=True)
    tails = (Tail(rundir.metrics), Tail(rundir.progress))
    with rundir.launcher_log.open("ab") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "fsdptrain.agent", str(rundir.plan)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=child_environment(),
        )  # fmt: skip
    try:
        _watch(agent, tails, screen, stop)
    finally:
        if agent.poll() is None:  # an error of ours: the workers must not go on alone
            agent.kill()
            agent.wait()
    for tail in tails:
        for record in tail.read():
            screen.show(record)
    if rundir.failure.exists():
        raise explain(json.loads(rundir.failure.read_text()), rundir)
    if "stop" in screen.last:
        step, name = screen.last["stop"]["step"], stop.name or screen.last["stop"]["signal"]
        what = f"after step {step}, checkpoint saved" if step else "before the first step, nothing was lost"
        raise Stopped(f"stopped by {name} {what}; run the same command to go on")
    if stop.count > 1:
        raise WorkerError(f"killed by a second {stop.name}; the checkpoints there are: {rundir.checkpoint_steps()}")
    if agent.returncode != 0:
        raise WorkerError(f"the launcher exited with {agent.returncode}; see {rundir.launcher_log}")


def child_environment() -> dict[str, str]:
    """Our environment, for a `python -m` that finds this package but no module that lies in the working folder."""
    package = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def _watch(agent: subprocess.Popen[bytes], tails: tuple[Tail, ...], screen: Screen, stop: StopRequest) -> None:
    """Show what the workers report and pass stop signals on, until the agent has ended."""
    passed_on = 0
    while agent.poll() is None:
        for tail in tails:
            for record in tail.read():
                screen.show(record)
        if stop.count > passed_on:
            passed_on = stop.count
            if passed_on == 1:
                screen.say(f"{stop.name}: saving a checkpoint at the end of this step; once more to stop at once")
                agent.terminate()
            else:
                agent.kill()
        time.sleep(POLL_S)


def explain(failure: dict[str, object], rundir: RunDir) -> FsdptrainError:
    """The error behind `failure.json`: the first failing rank's own words, and where to read on."""
    rank = failure["rank"]
    log = rundir.rank_log(int(str(rank)))
    log = log if log.exists() else rundir.launcher_log  # it failed before it had a log of its own
    record = failure.get("record")
    if isinstance(record, dict):
        error = from_record(record)
        if type(error) is not WorkerError:
            return error
        return WorkerError(f"rank {rank} failed: {error}\n{_where(record, log)}")
    if failure.get("signal"):
        hint = " (often: out of host memory)" if failure["signal"] == "SIGKILL" else ""
        return WorkerError(f"rank {rank} was killed by {failure['signal']}{hint}; its output: {log}")
    return WorkerError(f"rank {rank} exited with {failure['exitcode']} and said nothing; its output: {log}")


def _where(record: dict[str, str], log: Path) -> str:
    frames = [line.strip() for line in record.get("traceback", "").splitlines() if line.strip().startswith("File ")]
    return (f"{frames[-1]}\n" if frames else "") + f"the whole traceback: {log}"


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies, so that no worker trains on as an orphan."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent or (parent == 1 and "TORCHELASTIC_RUN_ID" in os.environ):
            os._exit(WorkerError.exit_code)
