"""Make the micro-batches of the next step in a thread, while a step computes, and enter windows of the data together.

A window (`data.windows`) may take longer to prepare than a collective or the watchdog waits. So before the first step
that reads it, the ranks exchange again and again whether each has it, until all do. One process of a node prepares the
next window while this one is trained; without it, the ranks do so when they get there.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fsdptrain.checkpoint.nodes import DATA
from fsdptrain.data.corpus import Batch, Stream, part_of_rows
from fsdptrain.data.prepare import prepare_in_child
from fsdptrain.data.windows import WindowStream, pin_windows
from fsdptrain.errors import FsdptrainError
from fsdptrain.failures.translate import as_fsdptrain_error
from fsdptrain.parallel.world import World, to_device
from fsdptrain.plan.plan import Plan
from fsdptrain.processes import Child
from fsdptrain.text import ranks_text
from fsdptrain.train.setup import Inputs, Session

POLL_S = 0.25  # between two exchanges of ranks that wait for a window


@dataclass(frozen=True)
class StepInputs:
    """What a rank trains on in a step: `positions` of the global batch, and its own micro-batches on its device.

    `label_tokens` counts the global batch, and `divisor` divides its loss (see `Corpus.divisor`).
    """

    step: int
    positions: range
    batches: list[Batch]
    label_tokens: int
    divisor: int


def batches_of(plan: Plan, stream: Stream, step: int, rank: int) -> list[Batch]:
    """Return the micro-batches that a rank computes in a step: of ranks that share rows, its part of each."""
    whole = (stream.batch(positions) for positions in plan.micro_batches(step, rank))
    return [part_of_rows(batch, plan.part_of_row(rank), plan.ranks_of_row) for batch in whole]


class Prefetch:
    """Makes the inputs of steps, one step ahead.

    They are a pure function of the step: what was made ahead is either used or dropped, and never differs. The copies
    to the device are queued on its default stream, before the work that reads them.
    """

    def __init__(self, plan: Plan, stream: Stream, rank: int, device: torch.device, total_steps: int) -> None:
        self._plan, self._stream, self._rank, self._device = plan, stream, rank, device
        self._total_steps = total_steps
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: dict[int, Future[StepInputs]] = {}

    def get(self, step: int) -> StepInputs:
        """Return the inputs of step `step` (from 0); raise what was raised when they were made."""
        wanted, following = self.future(step), step + 1
        self._ahead = {following: self._executor.submit(self._make, following)} if following < self._total_steps else {}
        return wanted.result()

    def future(self, step: int) -> Future[StepInputs]:
        """Return the inputs of a step to come; begin to make them if nothing has."""
        if step not in self._ahead:
            self._ahead = {step: self._executor.submit(self._make, step)}
        return self._ahead[step]

    def close(self) -> None:
        """End the thread as soon as it has made what it is making."""
        self._ahead = {}
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _make(self, step: int) -> StepInputs:
        positions = self._plan.step_positions(step)
        batches = batches_of(self._plan, self._stream, step, self._rank)
        on_device = [to_device(batch, self._device) for batch in batches]
        stream = self._stream
        return StepInputs(step, positions, on_device, stream.label_tokens(positions), stream.divisor(positions))


class WindowBarrier:
    """Lets all ranks of a run enter a window together; `failure` is why they could not."""

    def __init__(
        self, session: Session, inputs: Inputs, stream: WindowStream, world: World, prefetch: Prefetch, total_steps: int
    ) -> None:
        self._session, self._inputs, self._stream, self._world = session, inputs, stream, world
        self._plan, self._prefetch = inputs.plan, prefetch
        self._end = total_steps * inputs.plan.recipe.train.global_batch_size  # of the positions that are trained
        self._entered = 0  # all ranks have the windows of the positions before
        self._child: Child | None = None  # prepares the next window
        self.failure: FsdptrainError | None = None

    def close(self) -> None:
        """End the process that prepares the next window: a later start keeps the parts that it has finished."""
        if self._child:
            self._child.close()
        self._child = None

    def is_before(self, step: int) -> bool:
        """Return whether a step (from 0) of the run is the first that reads a window."""
        return self._entered <= self._plan.step_positions(step)[-1] < self._end

    def enter(self, step: int) -> bool:
        """Wait until all ranks have the windows that a step reads, and go on to them; collective, without a save.

        Returns whether that was not possible: a stop came, or a rank failed.
        """
        began, inputs = time.monotonic(), self._prefetch.future(step)
        while True:
            made, error, read = inputs.done(), None, None
            if made and (raised := inputs.exception()):
                error = as_fsdptrain_error(raised)
            elif made:
                numbers = sorted(self._stream.known_at(self._plan.step_positions(step)))
                read = [self._stream.known[number] for number in numbers]
            ranks = self._world.gather_objects((made, error, read, self._session.stop.count > 0))
            self._session.watchdog.reset()
            all_made, errors, all_read, stops = zip(*ranks, strict=True)
            self.failure = next((error for error in errors if error), None)
            if self.failure or any(stops):
                return True
            if all(all_made):
                break
            self._session.reporter.progress("waiting for the next window of data.window", 0, 0)
            time.sleep(POLL_S)
        if others := [rank for rank, read in enumerate(all_read) if read != all_read[0]]:
            hosts = self._world.hosts
            raise DATA.error(
                f"data.path: {ranks_text(others, hosts)} read other data in this window (data.window) than rank 0 on "
                f"{hosts[0]}: {DATA.way_out}"
            )
        self._go_on(step, time.monotonic() - began)
        return False

    def _go_on(self, step: int, waited_s: float) -> None:
        """Report the last window that a step reads, remove those before it, and begin to prepare the next one."""
        stream, plan, positions = self._stream, self._plan, self._plan.step_positions(step)
        _, window, nth = stream.place_in_window(positions[-1])
        sequences = stream.known[window]["sequences"]
        self._entered = positions[-1] - nth + sequences
        if self._world.rank == 0:
            pin_windows(self._session.rundir, {"files": stream.corpus.fingerprint, "read": stream.known})
            self._session.reporter.event(
                "window", step=step + 1, window=window + 1, of=len(stream.windows), sequences=sequences,
                waited_s=waited_s,
            )  # fmt: skip
        following = (window + 1) % len(stream.windows)
        needed = {window, following} | stream.known_at(plan.step_positions(step + 1))
        stream.leave({*stream.opened} - needed, remove=self._world.local_rank == 0)
        self.close()
        if self._world.local_rank == 0 and following not in stream.opened and self._entered < self._end:
            left = self._inputs.cores[plan.topology.nproc_per_node :] or self._inputs.cores  # by the ranks
            self._child = prepare_in_child(plan, stream.windows[following], left)
