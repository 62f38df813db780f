"""Start the workers of a run, watch and stop them, explain the first failure, restart. No torch in this process.

    this process ── agent ────────────────────────── one worker per rank
         │  SIGTERM once: save after this step, exit        │
         ├── a pipe: the nodes have met; how the first ─────┤
         │   worker failed                                  │
         └── metrics.jsonl; hang reports of the watchdogs ──┘

No process outlives this one: the agent ends with it, and the workers end with the agent (see `processes`).

On several nodes each has such a process. They meet for each attempt anew, and those that are there train: with a range
of nodes (`launch.nnodes: MIN:MAX`) as many as have come. Until they meet, the records in the folder are of others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import IO

from fsdptrain.checkpoint.resume import EarlierAttempts, inspect_earlier_attempts
from fsdptrain.errors import (
    KernelFailed,
    KilledForMemory,
    NodeWaits,
    NotMet,
    Stopped,
    StorageError,
    WorkerError,
    WorkerLost,
    from_record,
)
from fsdptrain.failures.explain import explain, explain_hang, hung_ranks
from fsdptrain.launch.run_lock import lock_run
from fsdptrain.plan.plan import PLAN_DIGEST, Plan
from fsdptrain.processes import STOP_SIGNALS, StopRequest, child_command, child_environment
from fsdptrain.report.run_banner import heading, nodes_allowed, nodes_text
from fsdptrain.run_folder.events import cut_partial_lines, record_restart
from fsdptrain.run_folder.files import open_to_append
from fsdptrain.run_folder.ownership import FolderWatch
from fsdptrain.run_folder.records import EVENTS, Record, Tail
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import counted

POLL_S = 0.1  # between two checks of the agent
BLOCKING = "CUDA_LAUNCH_BLOCKING"

# CPU tensors come from malloc. By default it returns large blocks to the system when they are freed, so that every step
# waits for the same pages again. With these settings it keeps freed memory and uses huge pages.
GLIBC_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=134217728:glibc.malloc.trim_threshold=8589934592"

ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # torch's settings, by the new and the old name

MAX_FRUITLESS_RESTARTS = 2  # successive restarts without a new checkpoint, after which the run ends
LOOKS_PER_S = 100  # for ranks that hang, of the launchers of all nodes together: one file system may answer them all
HANG_REPORTS_S = 5.0  # after the first rank reported a hang: the time for the reports of the others
FOLDER_S = 1.0  # between two looks whether the run folder is still there
LATE_S = 60.0  # that a node waits for the others before it reports it
MEET_S = 600.0  # with a range of nodes: without news of the others, a node then gives up, as torchrun does


def launch(
    plan: Plan, screen: Screen, earlier: EarlierAttempts, poll: Callable[[bool], None] = lambda is_first: None
) -> None:
    """Run the workers of a plan to the end. Restart them if they were lost, not if they would fail again.

    Start them again once, with blocking launches, if a kernel failed on a GPU of a single node: only then does Python
    know where.

    `earlier` is shown in the heading, and `poll` is that of Attempt. Raises the error of the first rank that failed,
    Stopped after a stop signal, or WorkerError: when a worker died, after two restarts without a new checkpoint, or
    when a worker was killed a second time for full host memory.
    """
    rundir = plan.rundir
    restarts = fruitless = memory_kills = 0
    settings: dict[str, str] = {}  # in the environment of the workers
    alone_since = time.monotonic()  # with a range of nodes: when this node was last sure of others
    with StopRequest() as stop, contextlib.ExitStack() as lock, contextlib.closing(FolderWatch(rundir)) as folder:
        screen.say(heading(plan, rundir, earlier))  # inside `stop`: from the first line on, Ctrl-C is handled
        while True:
            checkpoints = rundir.checkpoint_steps()
            attempt = Attempt(plan, screen, stop, folder=folder, settings=settings, poll=poll)
            # Now, because a line that a lost worker has not finished is cut off. Other nodes may train by now.
            if restarts and plan.topology.nnodes == 1:
                record_restart(rundir, restarts, plan.recipe.launch.max_restarts)
            try:
                attempt.run()
                return
            except NodeWaits as error:
                if stop.count:
                    raise
                screen.say(str(error))
                alone_since = time.monotonic()
            except NotMet as error:
                if not plan.topology.is_elastic:
                    raise
                if stopped := attempt.others.get("stop"):
                    raise Stopped(
                        f"the run was stopped on another node after step {stopped['step']}; run the same command to "
                        "continue"
                    ) from None
                if inspect_earlier_attempts(rundir, plan).finished:
                    screen.say("the other nodes have finished the run")
                    return
                if attempt.others or attempt.waited:  # they start again, and this node with them
                    alone_since = time.monotonic()
                    continue
                left_s = alone_since + MEET_S - time.monotonic()
                if left_s < 0:
                    raise
                screen.say(f"{error}\ntrying again, for {left_s:.0f} s")
            except KernelFailed as error:
                if stop.count or plan.topology.nnodes > 1 or {**os.environ, **settings}.get(BLOCKING) == "1":
                    raise
                settings = {BLOCKING: "1"}
                screen.say(f"{error}\nrepeating it once with {BLOCKING}=1, which is slower")
            except WorkerLost as error:
                fruitless = fruitless + 1 if restarts and rundir.checkpoint_steps() == checkpoints else 0
                if stop.count or restarts >= plan.recipe.launch.max_restarts:
                    raise
                memory_kills += isinstance(error, KilledForMemory)
                if memory_kills > 1:
                    raise WorkerError(f"gave up: a worker was killed for full memory a second time\n{error}") from None
                if fruitless == MAX_FRUITLESS_RESTARTS:
                    raise WorkerError(
                        f"gave up after {MAX_FRUITLESS_RESTARTS} restarts without a new checkpoint\n{error}"
                    ) from None
                restarts += 1
                alone_since = time.monotonic()
                screen.say(f"{error}\nrestart {restarts} of {plan.recipe.launch.max_restarts}")
                # If the first node has left the run: else a node that joins takes its lock, and writes another plan.
                lock_run(lock, rundir)


def worker_settings(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of libraries that workers add to their environment, without those that the user has set."""
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # torch's flight recorder: shows where a rank hangs
        # Else each rank starts a process for each core (`decide_compile_threads` in torch/_inductor/config.py).
        "TORCHINDUCTOR_COMPILE_THREADS": str(min(plan.threads, 32)),
    }
    if plan.topology.device == "cpu":
        settings["GLIBC_TUNABLES"] = GLIBC_TUNABLES
    elif not environment.keys() & ALLOCATOR:
        settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {name: value for name, value in settings.items() if name not in environment}


class Attempt:
    """One start of the workers, watched to their end. `worker` is a key of the agent's WORKERS: what they do."""

    def __init__(
        self,
        plan: Plan,
        screen: Screen,
        stop: StopRequest,
        worker: str = "train",
        folder: FolderWatch | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        poll: Callable[[bool], None] = lambda is_first: None,
    ) -> None:
        """`folder` tells whether the run folder is still there; `settings` are added to the workers' environment.

        `poll` is called again and again once the nodes have met, with whether this is the node of rank 0.
        """
        self.plan, self.rundir, self.screen, self.stop, self.worker = plan, plan.rundir, screen, stop, worker
        self._settings, self._poll = settings, poll
        self._check_folder = folder.check if folder else lambda: None
        self.others: dict[str, Record] = {}  # the newest record of each kind, if others train
        self.waited = False  # for ten minutes or more, for others that train
        self._met = plan.topology.nnodes == 1
        # Once the nodes have met: how many `nodes`, which `node` this is, and the number of the attempt `before`.
        self._meeting: dict[str, int] = {}
        if self._met:
            self._meeting = {"nodes": 1, "node": 0, "before": self.rundir.newest_attempt()}
            cut_partial_lines(self.rundir)
        self._tails = (Tail(self.rundir.metrics), Tail(self.rundir.progress))
        self._started = time.monotonic()
        self._refusal: dict[str, str] = {}  # of another node, before they met
        self._errors: dict[int, Record] = {}  # by rank, the first that it has written as an event
        self._killed_because = ""  # why this process killed the workers, if it did
        self._said_stop = self._said_late = False

    def run(self) -> None:
        """Start the workers and watch them to their end; raise what `launch` raises."""
        self._check_folder()
        self.rundir.logs.mkdir(exist_ok=True)  # it may have been removed since the last attempt
        # What is read when an interpreter starts or torch is imported, because the workers are forked after that.
        environment = child_environment()
        environment |= worker_settings(self.plan, environment) | {"OMP_NUM_THREADS": str(self.plan.threads)}
        environment |= {**self._settings, PLAN_DIGEST: self.plan.digest()}
        read, write = os.pipe()
        with (
            os.fdopen(read, "rb") as pipe,
            open_to_append(self.rundir.launcher_log) as log,
            ThreadPoolExecutor(1) as reader,  # reads while the agent runs: a pipe holds 64 KiB, then its writer waits
        ):
            agent = subprocess.Popen(
                child_command("fsdptrain.launch.agent", self.rundir.plan, write, self.worker),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(write,),
                env=environment,
            )  # fmt: skip
            os.close(write)
            failure = reader.submit(self._read_reports, pipe)
            try:
                self._show_start()
                self._watch(agent)
            finally:
                if agent.poll() is None:  # after an error or a second Ctrl-C: the workers must not continue
                    agent.kill()
                    agent.wait()
            cause = failure.result()
            self._note_meeting()
            self._show_new_records()
            self._raise_failure(agent.returncode, cause)
        if self.plan.topology.nnodes == 1 and not self.rundir.launcher_log.stat().st_size:
            self.rundir.launcher_log.unlink()

    def _read_reports(self, pipe: IO[bytes]) -> Record:
        """Read what the agent reports; return how the first worker failed, or {}. Runs in a thread."""
        failure: Record = {}
        for line in pipe:
            with contextlib.suppress(json.JSONDecodeError):  # incomplete, if the agent was killed
                record = json.loads(line)
                if "nodes" in record:
                    self._meeting = record
                elif "others" in record:
                    self.waited = True
                elif "refused" in record:
                    self._refusal = record["refused"]
                else:
                    failure = record
        return failure

    def _show_start(self) -> None:
        if self._met:
            self.screen.show_waiting(f"starting {counted(self.plan.topology.world_size, 'worker')}")
        else:
            self.screen.show_waiting(f"waiting for nodes at {self.plan.topology.endpoint}")

    def _note_meeting(self) -> None:
        """When the nodes have met, plan for as many as they are; from now on the records are of this attempt."""
        if self._met or not self._meeting:
            return
        self._met = True
        if self._meeting["node"] == 0:  # the workers, which need seconds to start, do not write yet
            cut_partial_lines(self.rundir)
        self.plan = self.plan.on_nodes(self._meeting["nodes"])
        if self.plan.topology.is_elastic:
            self.screen.say(nodes_text(self.plan))
        self._show_start()

    def _say_late(self) -> None:
        """Say once what to look for if nodes do not come; a range of nodes starts without them."""
        topology = self.plan.topology
        if self._met or self._said_late or topology.is_elastic or time.monotonic() - self._started < LATE_S:
            return
        self._said_late = True
        self.screen.say(
            f"still waiting for all {topology.nnodes} nodes at {topology.endpoint}: start the command on each; "
            "where it has ended, its output says why"
        )

    def _show_new_records(self) -> None:
        records: list[Record] = []
        for tail in self._tails:
            with contextlib.suppress(StorageError):  # a shared folder may refuse for a moment: it is read again
                records += tail.read()
        for record in sorted(records, key=lambda record: float(record["at"])):
            kind = record["event"]
            if self._met:
                if kind == "error" and "rank" in record:
                    self._errors.setdefault(record["rank"], record)
                self.screen.show(record)
                continue
            # Of other nodes: the first record of their training shows that they go on without this node. Errors do not:
            # the workers of a lost attempt write them when some nodes have started again already.
            is_training = kind in EVENTS and EVENTS[kind].trains
            if not self.plan.topology.is_elastic or not (self.others or kind == "stop" or is_training):
                continue
            if not self.others and kind != "stop":
                self.screen.say(
                    "the run goes on on other nodes: this one waits, and joins them at their next checkpoint or restart"
                )
                self.screen.show_waiting("waiting to join the other nodes")
            self.others[kind] = record

    def _watch(self, agent: subprocess.Popen[bytes]) -> None:
        """Show what the workers report and forward stop signals, until the workers have ended or must be killed."""
        grace, stopped_at = self.plan.recipe.launch.grace_s or float("inf"), float("inf")
        looked = checked = 0.0  # for reports of hangs; whether the folder is there
        while agent.poll() is None:
            if time.monotonic() - checked > FOLDER_S:
                self._check_folder()
                checked = time.monotonic()
            self._note_meeting()
            if self._refusal and not self._met:
                return
            self._say_late()
            self._show_new_records()
            if self._met:
                self._poll(self._meeting["node"] == 0)
            if self.stop.count and not self._met:  # there are no workers to wait for
                self._killed_because = f"by {self.stop.by}"
                return
            if self.stop.count and stopped_at == float("inf"):
                stopped_at = time.monotonic()
                self._say_stop()
                agent.terminate()
            if self.stop.count > 1:
                self._killed_because = f"at once by a second {self.stop.by}"
                return
            if time.monotonic() - stopped_at > grace:
                limit = f"launch.grace_s ({grace:g} s)"
                self._killed_because = f"by {self.stop.by}, then killed: the workers did not exit within {limit}"
                return
            if self._met and time.monotonic() - looked > self._look_every_s():
                if self._hung_ranks():
                    # Wait for the reports of the others. None is left if the whole machine was only paused.
                    end = time.monotonic() + HANG_REPORTS_S
                    while time.monotonic() < end and len(self._hung_ranks()) < self.plan.topology.world_size:
                        time.sleep(max(POLL_S, self._look_every_s()))
                    if self._hung_ranks():
                        return
                looked = time.monotonic()
            time.sleep(POLL_S)

    def _look_every_s(self) -> float:
        """Return the seconds between two looks for ranks that hang: all launchers look at one file of each rank."""
        return min(self.plan.topology.world_size / LOOKS_PER_S, HANG_REPORTS_S)

    def _hung_ranks(self) -> list[int]:
        """Return the ranks that report a hang in this attempt, and the stuck ones of this node, which cannot."""
        attempt, local = self.rundir.newest_attempt(), self.plan.topology.nproc_per_node
        if not self._met or attempt <= self._meeting["before"]:  # the ranks have not met
            return []
        first = self._meeting["node"] * local
        return hung_ranks(self.rundir, attempt, range(first, first + local))

    def _say_stop(self) -> None:
        """Say once what the first stop signal does, and what a second one would lose."""
        if self._said_stop:
            return
        self._said_stop, state = True, self.screen.state
        step, saved = state.steps_made, state.saved_step
        if not state.step_times:
            notice = f"stopping; no step has been trained {f'since step {step}' if step else 'yet'}"
        elif step >= state.newest["start"]["total_steps"] or "early_stop" in state.newest:
            notice = "stopping: all steps are done; with a checkpoint, but without the rest of evaluation and export"
        else:
            cost = f" and lose the work {f'since step {saved}' if saved else 'so far'}" if step > saved else ""
            notice = f"stopping after this step, with a checkpoint ({self.stop.by} again: stop now{cost})"
        self.screen.say(f"{self.stop.by}: {notice}")

    def _raise_failure(self, code: int, failure: Record) -> None:
        """Raise the error that ended this attempt; return if the run is finished.

        `code` is the agent's exit code, `failure` how the first worker failed, as it reported.
        """
        if self._refusal and not self._met:
            reason = f"node {self._refusal['host']} was refused: {self._refusal['message']}"
            raise from_record({**self._refusal, "message": reason})
        self._check_folder()  # without it, all else fails
        # Ends caused by this process come first, because they make the agent and the workers fail.
        if self._killed_because and not self._met:
            when = "while this node waited for the others, which go on" if self.others else "before the nodes met"
            raise Stopped(f"stopped {self._killed_because} {when}; run the same command to continue")
        if self._killed_because:
            raise Stopped(f"stopped {self._killed_because}; {self._lost_work()}; run the same command to continue")
        hosts = self.screen.state.hosts(self.plan.topology.world_size)
        if self._hung_ranks():
            attempt = self.rundir.newest_attempt()
            raise WorkerLost(explain_hang(attempt, self.plan, self.rundir, self._when(), hosts))
        cause = failure if code >= 0 else {}
        # SIGTERM ends an agent or a worker (to which `scancel` sends it) that cannot handle it yet. The terminal sends
        # Ctrl-C to the agent, too, in the moment before it has a session of its own.
        unprepared = self.stop.count and (-code in STOP_SIGNALS or cause.get("signal") == "SIGTERM")
        if cause and not unprepared:
            # Where the disk of temporary files is full, the agent has no record.
            record = cause.get("record") or self._errors.get(cause["rank"])
            raise explain({**cause, "record": record}, self.rundir, self._when(), hosts)
        if "stop" in self.screen.last:
            step, by = self.screen.last["stop"]["step"], self.stop.by or self.screen.last["stop"]["signal"]
            when = f"after step {step}, with a checkpoint" if step else "before the first step; nothing was lost"
            raise Stopped(f"stopped by {by} {when}; run the same command to continue")
        if unprepared:
            self._say_stop()  # not said yet if the signal ended the agent at once
            raise Stopped(
                f"stopped by {self.stop.by} before the first step; nothing was lost; run the same command to continue"
            )
        if code < 0:
            name = signal.Signals(-code).name
            raise WorkerLost(f"the launcher's agent was killed by {name} {self._when()}; the workers ended with it")
        if code and not self._met:
            raise NotMet(
                f"{nodes_allowed(self.plan)} nodes did not meet at {self.plan.topology.meeting_place}: "
                "start the command on each; if that host was lost, start the command there "
                f"again, or on all nodes with the address of another one; log: {self.rundir.launcher_log}"
            )
        if code:
            raise WorkerError(f"the launcher's agent exited with {code}; see {self.rundir.launcher_log}")
        # A host that does not share the run folder sees no record of the stop.
        if self.stop.count and self.worker == "train" and not inspect_earlier_attempts(self.rundir, self.plan).finished:
            raise Stopped(f"stopped by {self.stop.by}; run the same command to continue")

    def _lost_work(self) -> str:
        """Return which steps are in no checkpoint, and the step of the newest checkpoint."""
        step, saved = self.screen.state.steps_made, self.screen.state.saved_step
        newest = f"the newest checkpoint is that of step {saved}" if saved else "there is no checkpoint yet"
        if step <= saved:
            return newest
        steps = f"step {step} is" if step == saved + 1 else f"steps {saved + 1} to {step} are"
        return f"{steps} lost, {newest}"

    def _when(self) -> str:
        state = self.screen.state
        return f"after step {state.steps_made}" if state.step_times else "before the first step was done"
