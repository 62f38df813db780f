"""Start the workers of a run, watch and stop them, explain the first failure, restart. No torch in this process.

    this process ── agent ────────────────────────── one worker per rank
         │  SIGTERM once: save after this step, exit        │
         ├──────── a pipe: how the first worker failed ─────┤
         └── metrics.jsonl; hang-rank-N.json of a watchdog ─┘

No process outlives this one: the agent ends with it, and the workers end with the agent (see `processes`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from fsdptrain.config.plan import PLAN_DIGEST, Plan
from fsdptrain.errors import Stopped, WorkerError, WorkerLost
from fsdptrain.events import Tail, cut_partial_lines
from fsdptrain.launch.attempts import EarlierAttempts
from fsdptrain.launch.explain import explain, explain_hang, hung_ranks
from fsdptrain.launch.heading import heading
from fsdptrain.processes import StopRequest, child_command, child_environment
from fsdptrain.rundir import RunDir
from fsdptrain.screen import Screen
from fsdptrain.text import counted

POLL_S = 0.1  # between two checks of the agent and the hang reports


MAX_FRUITLESS_RESTARTS = 2  # successive restarts without a new checkpoint, after which the run ends


HANG_REPORTS_S = 5.0  # after the first rank reported a hang: the time for the reports of the others


def launch(plan: Plan, screen: Screen, earlier: EarlierAttempts) -> None:
    """Run the workers of a plan to the end. Restart them if they were lost, not if they would fail again.

    `earlier` is shown in the heading. Raises the error of the first rank that failed, Stopped after a stop signal, or
    WorkerError: when a worker died, or after two restarts without a new checkpoint.
    """
    rundir = plan.rundir
    restarts = fruitless = 0
    with StopRequest() as stop:
        screen.say(heading(plan, rundir, earlier))  # inside `stop`: from the first line on, Ctrl-C is handled
        while True:
            checkpoints = rundir.checkpoint_steps()
            try:
                Attempt(plan, rundir, screen, stop).run()
                return
            except WorkerLost as error:
                fruitless = fruitless + 1 if restarts and rundir.checkpoint_steps() == checkpoints else 0
                if stop.count or restarts >= plan.recipe.launch.max_restarts:
                    raise
                if fruitless == MAX_FRUITLESS_RESTARTS:
                    raise WorkerError(
                        f"gave up after {MAX_FRUITLESS_RESTARTS} restarts without a new checkpoint\n{error}"
                    ) from None
                restarts += 1
                screen.say(f"{error}\nrestart {restarts} of {plan.recipe.launch.max_restarts}")


class Attempt:
    """One start of the workers, watched to their end. `worker` is a key of the agent's WORKERS: what they do."""

    def __init__(self, plan: Plan, rundir: RunDir, screen: Screen, stop: StopRequest, worker: str = "train") -> None:
        self.plan, self.rundir, self.screen, self.stop, self.worker = plan, rundir, screen, stop, worker
        cut_partial_lines(rundir)
        self._tails = (Tail(rundir.metrics), Tail(rundir.progress))
        self._started = time.time()
        self._killed_because = ""  # why this process killed the workers, if it did

    def run(self) -> None:
        """Start the workers and watch them to their end; raise what `launch` raises."""
        read, write = os.pipe()
        with (
            os.fdopen(read, "rb") as pipe,
            self.rundir.launcher_log.open("ab") as log,
            ThreadPoolExecutor(1) as reader,  # reads meanwhile: a pipe holds 64 KiB, then its writer waits
        ):
            agent = subprocess.Popen(
                child_command("fsdptrain.launch.agent", self.rundir.plan, write, self.worker),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(write,),
                env={**child_environment(), PLAN_DIGEST: self.plan.digest()},
            )  # fmt: skip
            os.close(write)
            failure = reader.submit(pipe.read)
            try:
                self.screen.show_waiting(f"starting {counted(self.plan.topology.world_size, 'worker')}")
                self._watch(agent)
            finally:
                if agent.poll() is None:  # after an error or a second Ctrl-C: the workers must not continue
                    agent.kill()
                    agent.wait()
            self._show_new_records()
            self._raise_failure(agent.returncode, failure.result())
        if self.plan.topology.nnodes == 1 and not self.rundir.launcher_log.stat().st_size:
            self.rundir.launcher_log.unlink()

    def _show_new_records(self) -> None:
        records = [record for tail in self._tails for record in tail.read()]
        for record in sorted(records, key=lambda record: float(record.get("at", 0))):
            self.screen.show(record)

    def _watch(self, agent: subprocess.Popen[bytes]) -> None:
        """Show what the workers report and forward stop signals, until the workers have ended or must be killed."""
        grace, stopped_at = self.plan.recipe.launch.grace_s or float("inf"), float("inf")
        while agent.poll() is None:
            self._show_new_records()
            if self.stop.count and stopped_at == float("inf"):
                stopped_at = time.monotonic()
                self.screen.say(f"{self.stop.by}: {self._stop_notice()}")
                agent.terminate()
            if self.stop.count > 1:
                self._killed_because = f"at once by a second {self.stop.by}"
                return
            if time.monotonic() - stopped_at > grace:
                limit = f"launch.grace_s ({grace:g} s)"
                self._killed_because = f"by {self.stop.by}, then killed: the workers did not exit within {limit}"
                return
            if self._hung_ranks() and self._still_hung():
                return
            time.sleep(POLL_S)

    def _hung_ranks(self) -> list[int]:
        return hung_ranks(self.rundir, self.plan.topology.world_size, self._started)

    def _still_hung(self) -> bool:
        """Wait for the hang reports of the other ranks; return whether any rank still hangs."""
        end = time.monotonic() + HANG_REPORTS_S
        while time.monotonic() < end and len(self._hung_ranks()) < self.plan.topology.world_size:
            time.sleep(POLL_S)
        return bool(self._hung_ranks())  # none, if the whole machine was only paused for a while

    def _stop_notice(self) -> str:
        """Return what the first stop signal does, and what a second one would lose."""
        step, saved, last = self._last_known_step(), self._saved_step(), self.screen.last
        if "step" not in last:
            return f"stopping; no step has been trained {f'since step {step}' if step else 'yet'}"
        if step >= last["start"]["total_steps"]:
            return "stopping: all steps are done; skipping the remaining evaluation and export"
        cost = f" and lose the work {f'since step {saved}' if saved else 'so far'}" if step > saved else ""
        return f"stopping after this step, with a checkpoint ({self.stop.by} again: stop now{cost})"

    def _last_known_step(self) -> int:
        """Return the last step that the workers reported, or else the step that they resumed from."""
        last = self.screen.last
        return max(int(last[kind]["step"]) if kind in last else 0 for kind in ("step", "resume"))

    def _saved_step(self) -> int:
        """Return the step of the newest checkpoint that the workers reported, or 0 if there is none."""
        last = self.screen.last
        return max(int(last[kind]["step"]) if kind in last else 0 for kind in ("save", "resume"))

    def _raise_failure(self, code: int, failure: bytes) -> None:
        """Raise the error that ended this attempt; return if the run is finished.

        `code` is the agent's exit code, `failure` what it wrote into the pipe.
        """
        # Ends caused by this process come first, because they make the agent and the workers fail.
        if self._killed_because:
            raise Stopped(f"stopped {self._killed_because}; {self._lost_work()}; run the same command to continue")
        if hung := self._hung_ranks():
            raise WorkerLost(explain_hang(hung, self.plan, self.rundir, self._when(), self._hosts()))
        cause = json.loads(failure) if failure and code >= 0 else {}  # if the agent was killed, it may be incomplete
        # SIGTERM ends an agent or a worker (to which `scancel` sends it) that cannot handle it yet.
        unprepared = self.stop.count and (code == -signal.SIGTERM or cause.get("signal") == "SIGTERM")
        if cause and not unprepared:
            raise explain(cause, self.rundir, self._when(), self._hosts())
        if "stop" in self.screen.last:
            step, by = self.screen.last["stop"]["step"], self.stop.by or self.screen.last["stop"]["signal"]
            when = f"after step {step}, with a checkpoint" if step else "before the first step; nothing was lost"
            raise Stopped(f"stopped by {by} {when}; run the same command to continue")
        if unprepared:
            raise Stopped(
                f"stopped by {self.stop.by} before the first step; nothing was lost; run the same command to continue"
            )
        if code < 0:
            name = signal.Signals(-code).name
            raise WorkerLost(f"the launcher's agent was killed by {name} {self._when()}; the workers ended with it")
        if code:
            raise WorkerError(f"the launcher's agent exited with {code}; see {self.rundir.launcher_log}")

    def _lost_work(self) -> str:
        """Return which steps are in no checkpoint, and the step of the newest checkpoint."""
        step, saved = self._last_known_step(), self._saved_step()
        newest = f"the newest checkpoint is that of step {saved}" if saved else "there is no checkpoint yet"
        if step <= saved:
            return newest
        steps = f"step {step} is" if step == saved + 1 else f"steps {saved + 1} to {step} are"
        return f"{steps} lost, {newest}"

    def _hosts(self) -> list[str]:
        """Return the host names of all ranks, as the workers reported them; none on one node, and before they did."""
        hosts: list[str] = self.screen.last.get("start", {}).get("hosts", [])
        return hosts if len(hosts) == self.plan.topology.world_size else []

    def _when(self) -> str:
        step = self.screen.last.get("step", {}).get("step")
        return f"after step {step}" if step else "before the first step was done"
