"""Start and watch the processes of the trackers beside a run, which none of them can delay or end. No torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from fsdptrain.errors import Stopped
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import Child, Interrupted, StopRequest
from fsdptrain.trackers.follower import TrackerState, without_secrets

NICENESS = 10  # the workers have priority, and at 19 a busy machine would delay the end
FLUSH_S = 30.0  # that the trackers together may take when the run has ended
STOPPED_FLUSH_S = 5.0  # the same after a stop signal
SAID_S = 3.0  # before the user is told what is waited for
RETRY_S = 60.0  # before a tracker that failed is started again; doubled each time
POLL_S = 0.05
KILL_S = 2.0  # for a killed process to be gone: one that waits for a dead file system is not


class TrackerProcess:
    """The process of one tracker."""

    def __init__(self, settings: dict[str, str | None]) -> None:
        self._child = Child("fsdptrain.trackers.follower", niceness=NICENESS, keep_errors=True)
        self._failure = ""
        self.is_noted = False  # its failure
        self._child.send(settings)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        with contextlib.suppress(ValueError):  # `close` has closed the pipe
            for record in self._child.records():
                self._failure = record["failed"]
            if (code := self._child.code) and not self._failure:
                how = self._child.killed or f"its process exited with {code}"
                self._failure = without_secrets(": ".join(filter(None, (how, self._child.last_error()))))

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, by itself or killed."""
        return not self._listener.is_alive()

    @property
    def failure(self) -> str:
        """Why the process ended; empty if it has done all, or has not ended."""
        return self._failure if self.has_ended else ""

    def finish(self, state: str, message: str) -> None:
        """Let it hand over the rest, mark the run and end."""
        self._child.send({"state": state, "message": message})

    def close(self) -> None:
        """Kill the process."""
        closing = threading.Thread(target=self._child.close, daemon=True)
        closing.start()
        closing.join(KILL_S)


class Trackers:
    """The trackers of a run, on the node that has rank 0."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user: each tracker says once that it fails."""
        self._rundir, self._say, log = plan.rundir, say, plan.recipe.log
        self._settings: dict[str, dict[str, str | None]] = {
            name: {"root": str(plan.rundir.root), "tracker": name, "name": plan.recipe.name, "project": log.project}
            for name in log.chosen_trackers
        }
        self._running: dict[str, TrackerProcess] = {}
        self._failures = dict.fromkeys(self._settings, 0)
        self._retry_at: dict[str, float] = {}

    def poll(self, is_first: bool = True) -> None:
        """Start the trackers, those that failed again after a while. Without rank 0 (`is_first`) on this node end them.

        To be called often: it waits for nothing.
        """
        if not is_first:
            return self.close()
        for name in [*self._settings]:
            process = self._running.get(name)
            if process is None or (process.is_noted and time.monotonic() > self._retry_at[name]):
                self._start(name)
            elif process.failure and not process.is_noted:
                self._note(name, process)
        return None

    def _start(self, name: str) -> None:
        try:
            self._running[name] = TrackerProcess(self._settings[name])
        except OSError as error:  # no process more, no descriptor, no memory
            del self._settings[name]
            self._say(f"{name}: {error}; the run goes on without it, and the next start of the run sends all")

    def _note(self, name: str, process: TrackerProcess) -> None:
        process.is_noted = True
        self._retry_at[name] = time.monotonic() + RETRY_S * 2 ** self._failures[name]
        if not self._failures[name]:
            self._say(f"{name}: {process.failure}; the run goes on, and {name} is tried again from time to time")
        self._failures[name] += 1

    def finish(self, state: str, message: str = "") -> None:
        """Let the trackers mark the end of the run. Kill those that take too long, or all at a stop signal."""
        limit, started, said = STOPPED_FLUSH_S if state == "stopped" else FLUSH_S, time.monotonic(), False
        for process in self._running.values():
            process.finish(state, message)
        with StopRequest() as stop:
            while (waited := time.monotonic() - started) < limit and not stop.count:
                if not (late := [name for name, process in self._running.items() if not process.has_ended]):
                    break
                if waited > SAID_S and not said:
                    self._say(f"waiting for {' and '.join(late)} to get the rest, at most {limit:g} s (Ctrl-C: not)")
                    said = True
                time.sleep(POLL_S)
        for name, process in self._running.items():
            if not process.has_ended or process.failure:
                why = process.failure or ("killed" if stop.count else f"not ready within {limit:g} s")
                self._say(f"{name} does not have all of the run: {why}; the same command sends the rest")
        self.close()

    def close(self) -> None:
        """Kill the trackers that still run."""
        for process in self._running.values():
            process.close()
        self._running = {}

    def catch_up(self) -> None:
        """Let the trackers get what they lack of a run that is finished; not of one of a version without them."""
        behind = [name for name in self._settings if TrackerState.read(self._rundir, name).state != "finished"]
        if behind and self._rundir.trackers.is_dir():
            self._settings = {name: self._settings[name] for name in behind}
            self.poll()
            self.finish("finished")


@contextlib.contextmanager
def tracked(plan: Plan, say: Callable[[str], None]) -> Iterator[Trackers]:
    """Yield the trackers of a run, which mark at the end whether it has finished, was stopped or has failed."""
    trackers = Trackers(plan, say)
    try:
        yield trackers
    except BaseException as error:
        trackers.finish("stopped" if isinstance(error, (Stopped, Interrupted)) else "failed", str(error))
        raise
    trackers.finish("finished")
