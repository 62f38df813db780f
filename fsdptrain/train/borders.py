"""All ranks enter a window of the data (`data.windows`) together: they wait for it, compare it, and remove others.

A window may take longer to prepare than a collective or the watchdog waits. So before the first step that reads it, the
ranks exchange again and again whether each has it, until all do. One process of a node prepares the next window while
this one is trained; without it, the ranks do so when they get there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fsdptrain.checkpoint.agreement import DATA
from fsdptrain.data.resume_pins import pin_windows
from fsdptrain.data.windows import WindowStream, prepare_in_child
from fsdptrain.errors import FsdptrainError
from fsdptrain.failures.translate import as_fsdptrain_error
from fsdptrain.parallel.world import World
from fsdptrain.processes import Child
from fsdptrain.text import ranks_text
from fsdptrain.train.prefetch import Prefetch
from fsdptrain.train.setup import Inputs, Session

POLL_S = 0.25  # between two exchanges of ranks that wait for a window


class Borders:
    """The borders between the windows of a run, which its ranks pass together."""

    def __init__(
        self, session: Session, inputs: Inputs, stream: WindowStream, world: World, prefetch: Prefetch, total_steps: int
    ) -> None:
        self._session, self._inputs, self._stream, self._world = session, inputs, stream, world
        self._plan, self._prefetch = inputs.plan, prefetch
        self._end = total_steps * inputs.plan.recipe.train.global_batch_size  # of the positions that are trained
        self._entered = 0  # all ranks have the windows of the positions before
        self._failed = False  # a rank could not enter a window
        self._failure: BaseException | None = None  # why this one could not
        self._child: Child | None = None  # prepares the next window

    def close(self) -> None:
        """End the process that prepares the next window: a later start keeps the parts that it has finished."""
        if self._child:
            self._child.close()
        self._child = None

    def is_before(self, step: int) -> bool:
        """Return whether a step (from 0) of the run is the first that reads a window."""
        return self._entered <= self._plan.step_positions(step)[-1] < self._end

    def enter(self, step: int) -> bool:
        """Wait until all ranks have the windows that a step reads, and go on to them; collective.

        Returns whether that was not possible: a stop came, or a rank failed (see `raise_failure`). Raises DataError if
        ranks have other windows.
        """
        positions, began = self._plan.step_positions(step), time.monotonic()
        while True:
            made = self._prefetch.is_made(step)
            self._failure = self._prefetch.failure(step) if made else None
            digest = self._stream.digest_of_windows(positions) if made and not self._failure else 0
            state = [made, self._failure is not None, self._session.stop.count > 0, digest]
            all_made, self._failed, stop, digests = self._exchanged(state)
            self._session.watchdog.reset()
            if self._failed or stop:
                return True
            if all_made:
                break
            self._session.reporter.progress("waiting for the next window of data.window", 0, 0)
            time.sleep(POLL_S)
        self._compare(digests)
        self._go_on(step, time.monotonic() - began)
        return False

    def _exchanged(self, state: Sequence[float]) -> tuple[bool, bool, bool, list[float]]:
        """Return whether all ranks are done, whether any failed or has a stop request, and their digests."""
        made, failed, stop, digests = self._world.gather(torch.tensor(state, dtype=torch.float64)).T
        return bool(made.all()), bool(failed.any()), bool(stop.any()), digests.tolist()

    def raise_failure(self) -> None:
        """Raise on every rank what kept one from a window, if anything did; collective, when no save is under way."""
        if not self._failed:
            return
        found = self._world.gather_objects(as_fsdptrain_error(self._failure) if self._failure else None)
        raise next(error for error in found if isinstance(error, FsdptrainError))

    def _compare(self, digests: list[float]) -> None:
        """Raise DataError, on every rank, if ranks have other windows than rank 0."""
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            hosts = self._world.hosts
            raise DATA.error(
                f"data.path: {ranks_text(others, hosts)} read other data in this window (data.window) than rank 0 on "
                f"{hosts[0]}: {DATA.way_out}"
            )

    def _go_on(self, step: int, waited_s: float) -> None:
        """Report the last window that a step reads, remove those before it, and begin to prepare the next one."""
        stream, windows, plan = self._stream, self._stream.corpus, self._plan
        last = plan.step_positions(step)[-1]
        _, window, _ = stream.place(last)
        self._entered = stream.border_after(last)
        windows.parts[:] = [windows.open(window)]
        if self._world.rank == 0:
            pin_windows(self._session.rundir, windows.record())
            self._session.reporter.event(
                "window", step=step + 1, window=window + 1, of=len(windows.windows), sequences=len(windows.parts[0]),
                waited_s=waited_s,
            )  # fmt: skip
        following = (window + 1) % len(windows.windows)
        # The inputs of this step are made. Those of the next one may be under way.
        needed = {window, following, *stream.known_windows(plan.step_positions(step + 1))}
        windows.leave({*windows.opened} - needed)
        self.close()
        if self._world.local_rank == 0 and following not in windows.opened and self._entered < self._end:
            left = self._inputs.cores[plan.topology.nproc_per_node :] or self._inputs.cores  # by the ranks
            self._child = prepare_in_child(plan, windows.windows[following], self._inputs.day, left)
