"""The workers of a run: start, watch, explain the first failure, stop, restart. No torch in this process.

    this process ── agent ────────────────────────── one worker a rank
         │  SIGTERM once: stop at the next step, save       │
         ├──────── a pipe: how the first worker failed ─────┤
         └── metrics.jsonl; hang-rank-N.json of a watchdog ─┘

Nobody outlives this process: the agent ends with it, and the workers with the agent (see `processes`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsdptrain.config.plan import PLAN_DIGEST, Plan
from fsdptrain.errors import Stopped, WorkerError, WorkerLost
from fsdptrain.events import Tail, cut_partial_lines
from fsdptrain.launch.attempts import EarlierAttempts
from fsdptrain.launch.explain import explain, explain_hang
from fsdptrain.launch.heading import heading
from fsdptrain.processes import StopRequest, child_command, child_environment
from fsdptrain.rundir import RunDir
from fsdptrain.screen import Screen
from fsdptrain.text import counted

POLL_S = 0.1


FRUITLESS = 2  # restarts without a new checkpoint, after which there is no further one


HANG_REPORTS_S = 5.0  # how long after the first rank that hangs the others may take to say where they stand


def launch(plan: Plan, screen: Screen, before: EarlierAttempts) -> None:
    """Run the plan's workers to the end, restarting them when they were lost and not when they would fail again.

    `before` is what earlier attempts made, for the heading.
    Raises the first failing rank's own error, Stopped after a stop signal, or WorkerError when a worker died. Restarts
    that bring no new checkpoint are given up after two.
    """
    rundir = RunDir(Path(plan.run_dir))
    restarts = fruitless = 0
    with StopRequest() as stop:
        screen.say(heading(plan, rundir, before))  # from here on Ctrl-C has its answer
        while True:
            kept = rundir.checkpoint_steps()
            try:
                Attempt(plan, rundir, screen, stop).run()
                return
            except WorkerLost as error:
                fruitless = fruitless + 1 if restarts and rundir.checkpoint_steps() == kept else 0
                if stop.count or restarts >= plan.recipe.launch.max_restarts:
                    raise
                if fruitless == FRUITLESS:
                    raise WorkerError(
                        f"given up after {FRUITLESS} restarts without a new checkpoint\n{error}"
                    ) from None
                restarts += 1
                screen.say(f"{error}\nrestart {restarts} of {plan.recipe.launch.max_restarts}")


class Attempt:
    """One start of the workers."""

    def __init__(self, plan: Plan, rundir: RunDir, screen: Screen, stop: StopRequest) -> None:
        self.plan, self.rundir, self.screen, self.stop = plan, rundir, screen, stop
        cut_partial_lines(rundir)
        self._tails = (Tail(rundir.metrics), Tail(rundir.progress))
        self._started = time.time()
        self._ended = ""  # why we ended the workers ourselves, if we did

    def run(self) -> None:
        """Start the workers and watch them to their end; raises what `launch` does."""
        read, write = os.pipe()
        with (
            os.fdopen(read, "rb") as pipe,
            self.rundir.launcher_log.open("ab") as log,
            ThreadPoolExecutor(1) as reader,  # meanwhile: a pipe holds 64 KiB, and whoever writes more waits
        ):
            agent = subprocess.Popen(
                child_command("fsdptrain.launch.agent", self.rundir.plan, write),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(write,),
                env={**child_environment(), PLAN_DIGEST: self.plan.digest()},
            )  # fmt: skip
            os.close(write)
            failure = reader.submit(pipe.read)
            try:
                self.screen.show_waiting(f"starting {counted(self.plan.topology.world_size, 'worker')}")
                self._watch(agent)
            finally:
                if agent.poll() is None:  # the workers must not go on alone
                    agent.kill()
                    agent.wait()
            self._show_news()
            self._judge(agent.returncode, failure.result())
        if self.plan.topology.nnodes == 1 and not self.rundir.launcher_log.stat().st_size:
            self.rundir.launcher_log.unlink()

    def _show_news(self) -> None:
        news = [record for tail in self._tails for record in tail.read()]
        for record in sorted(news, key=lambda record: float(record.get("at", 0))):
            self.screen.show(record)

    def _watch(self, agent: subprocess.Popen[bytes]) -> None:
        """Show what the workers report and pass stop signals on, until they have ended or must be ended."""
        grace, asked_at = self.plan.recipe.launch.grace_s or float("inf"), float("inf")
        while agent.poll() is None:
            self._show_news()
            if self.stop.count and asked_at == float("inf"):
                asked_at = time.monotonic()
                self.screen.say(f"{self.stop.by}: {self._what_a_stop_does()}")
                agent.terminate()
            if self.stop.count > 1:
                self._ended = f"at once by a second {self.stop.by}"
                return
            if time.monotonic() - asked_at > grace:
                self._ended = f"by {self.stop.by}, then killed: not done within launch.grace_s ({grace:g} s)"
                return
            if self._hung() and self._wait_for_hung():
                return
            time.sleep(POLL_S)

    def _hung(self) -> list[int]:
        """Ranks that say they hang, or cannot even say so; what an earlier start left does not count."""

        def says_so(path: Path) -> bool:
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                return facts.st_size > 0 and facts.st_mtime > self._started
            return False

        ranks, rundir = range(self.plan.topology.world_size), self.rundir
        return [rank for rank in ranks if says_so(rundir.hang_report(rank)) or says_so(rundir.stack_dump(rank))]

    def _wait_for_hung(self) -> bool:
        """Give the other ranks time to tell where they stand; whether the run does hang."""
        end = time.monotonic() + HANG_REPORTS_S
        while time.monotonic() < end and len(self._hung()) < self.plan.topology.world_size:
            time.sleep(POLL_S)
        return bool(self._hung())  # after a pause of the whole machine there may be nobody left who hangs

    def _what_a_stop_does(self) -> str:
        """What the first stop signal brings about, and what a second one would cost."""
        made, kept, last = self._steps_made(), self._kept(), self.screen.last
        if "step" not in last:
            return f"stopping; nothing has been trained {f'since step {made}' if made else 'yet'}"
        if made >= last["start"]["total_steps"]:
            return "stopping: all steps are done; skipping the remaining evaluation and export"
        cost = f" and lose the work {f'since step {kept}' if kept else 'so far'}" if made > kept else ""
        return f"stopping after this step, with a checkpoint ({self.stop.by} again: stop now{cost})"

    def _steps_made(self) -> int:
        """The steps of this run that are known of: those reported, or those it went on from."""
        last = self.screen.last
        return max(int(last[kind]["step"]) if kind in last else 0 for kind in ("step", "resume"))

    def _kept(self) -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        return max(self.rundir.checkpoint_steps(), default=0)

    def _judge(self, code: int, failure: bytes) -> None:
        """Raise what this attempt ended with, if it is not a finished run."""
        if self._ended:
            raise Stopped(f"stopped {self._ended}; {self._lost()}; run the same command to go on")
        if hung := self._hung():
            raise WorkerLost(explain_hang(hung, self.plan, self.rundir, self._last_step()))
        if failure and code >= 0:  # else the agent was killed, maybe while it wrote
            raise explain(json.loads(failure), self.rundir, self._last_step())
        if "stop" in self.screen.last:
            step, by = self.screen.last["stop"]["step"], self.stop.by or self.screen.last["stop"]["signal"]
            when = f"after step {step}, with a checkpoint" if step else "before the first step; nothing was lost"
            raise Stopped(f"stopped by {by} {when}; run the same command to go on")
        if code == -signal.SIGTERM and self.stop.count:  # ours, before the agent could heed it, let alone start workers
            raise Stopped(
                f"stopped by {self.stop.by} before the first step; nothing was lost; run the same command to go on"
            )
        if code < 0:
            name = signal.Signals(-code).name
            raise WorkerLost(f"the launcher's agent was killed by {name} {self._last_step()}; so the workers ended too")
        if code:
            raise WorkerError(f"the launcher exited with {code}; see {self.rundir.launcher_log}")

    def _lost(self) -> str:
        """What of the work is in no checkpoint, and which one is the newest."""
        made, kept = self._steps_made(), self._kept()
        there_is = f"the newest checkpoint is that of step {kept}" if kept else "there is no checkpoint yet"
        if made <= kept:
            return there_is
        steps = f"step {made} is" if made == kept + 1 else f"steps {kept + 1} to {made} are"
        return f"{steps} lost, {there_is}"

    def _last_step(self) -> str:
        step = self.screen.last.get("step", {}).get("step")
        return f"after step {step}" if step else "before its first step was done"
