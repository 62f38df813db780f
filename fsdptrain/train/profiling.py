"""Record chosen steps of a rank: a trace of what ran on host and device and, on CUDA, what was allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from fsdptrain.plan.plan import Plan
from fsdptrain.train.patches import record_allocations, write_allocations


class Recording:
    """Records the steps of `log.profile` on this rank, into files of the run folder; a closed one records no more.

    A run that continues or stops within these steps records a part of them.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self._steps = range(0)  # numbered from 0
        if plan.recipe.log.profile:
            first, last = plan.recipe.log.profile["steps"]
            self._steps = range(first - 1, last)
        self._folder, self._rank, self._on_cuda = plan.rundir.profiles, rank, device.type == "cuda"
        self._profile: profile | None = None
        self._first = self._newest = 0  # of the steps that are recorded

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record what is done inside this context, and until the next step, if `step` is to be recorded."""
        if step in self._steps and self._profile is None:
            self._begin(step)
        self._newest = step
        yield
        if step + 1 not in self._steps:
            self.close()

    def _begin(self, step: int) -> None:
        self._first = step
        if self._on_cuda:
            record_allocations()
        # Stacks would make a trace many times larger; FSDP2 names its units in it anyway.
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
        self._profile = profile(activities=sorted(wanted, key=str), record_shapes=True, profile_memory=True)
        self._profile.start()

    def close(self) -> None:
        """Wait for the device, and write what was recorded."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._folder.mkdir(exist_ok=True)  # but not the run folder, if it was removed
        name = f"rank-{self._rank}-steps-{self._first + 1}-{self._newest + 1}"
        recorded.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
        if self._on_cuda:
            write_allocations(self._folder / f"{name}.pickle")
