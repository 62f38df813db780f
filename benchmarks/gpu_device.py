"""What `gpu.py` measures on a device. Figures that only CUDA has are in one class; on a CPU they are None or empty."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType

from fsdptrain.plan.gpus import driver_version

CALLS = 20  # of a piece of work, timed together
AHEAD = 50_000_000  # clock cycles, some 30 ms, in which the host queues these calls
SYNC_WARNING = "synchronizing CUDA operation"  # what torch.cuda.set_sync_debug_mode writes


class Cpu:
    """A CPU: wall times, and no figures of an accelerator."""

    name = "cpu"
    kernels = DeviceType.CPU  # the events of a profile that count as busy

    def describe(self) -> dict[str, Any]:
        """Return name, memory and versions of the device and its libraries."""
        return {"gpus": 0}

    def synchronize(self) -> None:
        """Wait until the device has done all of its work."""

    def seconds(self, work: Callable[[], object], rounds: int = 10, warm_up: int = 3) -> float:
        """Return the median seconds of a piece of work."""
        for _ in range(warm_up):
            work()
        return statistics.median(self._seconds(work) for _ in range(rounds))

    def _seconds(self, work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def reset_peak(self) -> None:
        """Measure the peak of memory from now on."""

    def memory(self) -> dict[str, int] | None:
        """Return the bytes allocated and reserved by torch at the peak, and those in use outside of torch."""
        return None

    @contextlib.contextmanager
    def recorded_syncs(self) -> Iterator[list[str] | None]:
        """Record where the host waits for the device: `file:line` for each wait; None if this cannot be recorded."""
        yield None

    def busy_seconds(self, events: list[Any]) -> float:
        """Return the seconds in which at least one kernel of a profile ran."""
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in events
            # Annotations of the device, such as `nccl:_all_gather_base`, last longer than their kernels.
            if event.device_type == self.kernels and not event.is_user_annotation
        ]
        return union(spans) / 1e6


class Cuda(Cpu):
    """The current CUDA device."""

    name = "cuda"
    kernels = DeviceType.CUDA

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(0)
        nccl = torch.cuda.nccl.version()
        return {
            "gpus": torch.cuda.device_count(), "name": properties.name, "memory": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}", "driver": driver_version(os.environ) or "unknown",
            "cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, nccl)),
        }  # fmt: skip

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _seconds(self, work: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)  # the host queues all calls meanwhile: what it takes to launch them is not measured
        begin.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / CALLS

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int] | None:
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "outside": total - free - torch.cuda.memory_reserved(),
        }  # fmt: skip

    @contextlib.contextmanager
    def recorded_syncs(self) -> Iterator[list[str] | None]:
        places: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places += places_of(caught)


def places_of(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return `file:line` of the warnings that report a wait."""
    syncs = [warning for warning in caught if SYNC_WARNING in str(warning.message)]
    return [f"{'/'.join(warning.filename.split('/')[-2:])}:{warning.lineno}" for warning in syncs]


def union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals: kernels of several streams overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def device_of(name: str) -> Cpu:
    """Return the device `cpu` or `cuda`."""
    return Cuda() if name == "cuda" else Cpu()
