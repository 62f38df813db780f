"""Find races between streams, and between the host and the device, with torch's own detector (`torch.cuda._sanitizer`).

The detector is fed with what `Trainer.step`, an evaluation and saves do on the pretended accelerator: which memory each
operator reads and writes, on which stream, and what waits for what. The host is a stream of its own. An operator that
is queued comes after all that the host has done, but the host comes after an operator only if it has waited for it.
Memory is freed on the stream that has allocated it, where torch gives it away again. A collective is work of the stream
that issues it. The thread that copies the data of the next step is not watched: it copies on the stream that computes,
ahead of what reads it, so that there is no wait that could be missing.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Iterator
from functools import partialmethod
from typing import Any
from unittest import mock

import numpy as np
import torch
import waits
from torch.cuda._sanitizer import Access, EventHandler, zip_arguments

from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.forecast.device import Backend, DeviceEvent, PretendCopy, PretendStream, current_stream
from fsdptrain.forecast.recorder import NO_KERNEL, Recorder, host_waits, storage_of, tensors_in
from fsdptrain.forecast.trace import HOST, Alloc, Event, Free, RecordEvent, Storage, Synchronize, WaitEvent
from fsdptrain.parallel.world import HostCopy
from fsdptrain.plan.plan import Plan
from fsdptrain.train.optim import optimizer_class

HOST_STREAM = -1


class RaceDetector(Recorder):
    """Passes what happens while it is entered to torch's detector; `races` are what that has found, in words."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.handler, self.races, self.allocated_on = EventHandler(), list[str](), dict[Storage, int]()
        self.freed = defaultdict[int, list[Storage]](list)  # by stream, since it last allocated memory
        self.handler._handle_stream_creation(HOST_STREAM)

    def write(self, event: Event) -> None:
        handler, accesses = self.handler, self.handler.tensors_accessed.accesses
        match event:
            case RecordEvent(number, stream):
                handler._handle_event_record(number, stream)
            case WaitEvent(number, stream):
                handler._handle_event_wait(number, stream)
            case Synchronize(None):
                handler._handle_device_synchronization()
            case Synchronize(number):
                handler._handle_event_synchronization(number)
            case Alloc(storage, _, stream):
                self.allocated_on[storage] = stream
                for each in self.freed.pop(stream, []):
                    self._access(stream, {}, {each: ["memory"]}, "new memory")
                    del accesses[each]
            case Free(storage) if storage in accesses:
                stream = self.allocated_on.pop(storage, None)
                found = accesses.pop(storage)
                if stream is not None and storage.device != HOST:
                    freed = Storage(storage.device, storage.category)  # the same may be allocated again
                    accesses[freed] = found
                    self.freed[stream].append(freed)

    def _record_work(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.is_view or func in NO_KERNEL or func is torch.ops.c10d.barrier.default:
            return
        reads, writes = defaultdict[Storage, list[str]](list), defaultdict[Storage, list[str]](list)
        for argument, value in zip_arguments(func._schema, args, kwargs):
            changed = argument.alias_info is not None and argument.alias_info.is_write
            for storage in self._storages(value):
                (writes if changed else reads)[storage].append(argument.name)
        for storage in self._storages(args[0] if func.namespace == "c10d" else result):  # c10d declares no changes
            if storage not in reads or func.namespace == "c10d":
                writes[storage].append("result")
        devices = {tensor.device.type for tensor in tensors_in((args, kwargs, result))}
        stream = current_stream() if devices - {HOST} else HOST_STREAM
        self._access(stream, reads, writes, func.__name__)
        if host_waits(func, args, kwargs, result):
            self.handler._handle_stream_synchronization(stream)

    def read_on_host(self, tensor: torch.Tensor) -> None:
        """Note that the host reads a tensor without an operator of torch."""
        self._access(HOST_STREAM, {storage: ["numbers"] for storage in self._storages(tensor)}, {}, "read")

    def _access(self, stream: int, reads: Any, writes: Any, operator: str) -> None:
        syncs = self.handler.syncs
        if stream != HOST_STREAM:  # it is queued after all that the host has done
            syncs._ensure_stream_exists(stream)
            syncs._state_wait_for_other(syncs.current_sync_states[stream], syncs.current_sync_states[HOST_STREAM])
        found = self.handler._handle_kernel_launch(
            stream, {*reads} - {*writes}, {*writes}, set(), operator, {**reads, **writes}
        )
        for error in found:
            now, before = error.current_access, error.previous_access  # type: ignore[attr-defined]
            self.races.append(f"{self.moment}: {_words(now)} after {_words(before)}")

    def _storages(self, tree: Any) -> Iterator[Storage]:
        """Yield the memory of tensors; where it was allocated before, nobody knows on which stream."""
        for tensor in tensors_in(tree):
            if (storage := storage_of(tensor)) not in self.known:
                self._add_storage(storage, tensor.device.type, "inputs and buffers")
                self.allocated_on.pop(self.known[storage].storage, None)
            yield self.known[storage].storage


def _words(access: Access) -> str:
    return f"{access.operator} on {'the host' if access.stream == HOST_STREAM else f'stream {access.stream}'}"


def ignored(*_: Any) -> None: ...


def wait_event(
    stream: PretendStream, event: DeviceEvent, on_compute: bool, wait: Any = PretendStream.wait_event
) -> None:
    if (stream is PretendStream.current[0]) != on_compute:
        wait(stream, event)


MISSING: dict[str, tuple[type, str, Any]] = {  # waits that a test leaves out
    "of the host for the numbers of a step": (PretendCopy, "wait", ignored),
    "of a save for its copies": (Backend, "synchronize", ignored),
    "of the host for offloaded gradients": (DeviceEvent, "synchronize", ignored),
    "of the computation for collectives": (PretendStream, "wait_event", partialmethod(wait_event, on_compute=True)),
    "of collectives for the computation": (PretendStream, "wait_event", partialmethod(wait_event, on_compute=False)),
}


def races(plan: Plan, missing: str | None = None) -> list[str]:
    """Return the races in three steps of rank 0, an evaluation, and a save in the background and one that waits."""
    plan.rundir.root.mkdir(parents=True, exist_ok=True)
    optimizer_class(plan.recipe.optim.name)  # its module may compute tables
    with contextlib.ExitStack() as entered:
        entered.enter_context(mock.patch.object(waits, "EVALUATED", 1))
        run, detector = entered.enter_context(waits.trained(plan, recorder_class=RaceDetector))
        assert isinstance(detector, RaceDetector)

        def numbers(copy: HostCopy) -> Any:
            detector.read_on_host(copy._copy)
            return np.zeros(copy._copy.shape)

        def commit(checkpointer: Checkpointer, step: int, state: Any, losses: Any, staged: Any, *_: Any) -> None:
            for shard in staged.values():
                detector.read_on_host(shard.local)

        replaced = [(PretendCopy, "_numbers", numbers), (Checkpointer, "_commit", commit)]
        for owner, name, value in [*replaced, *([MISSING[missing]] if missing else [])]:
            entered.enter_context(mock.patch.object(owner, name, value))
        # The places of accesses take long to find, and are not shown.
        entered.enter_context(mock.patch.object(traceback.StackSummary, "extract", lambda *_, **options: []))
        run.checkpointer = Checkpointer(plan.rundir, plan, run.world, {}, ignored)
        for step in range(2):
            run.step(step)
        run.read_steps()
        run.save(2, wait=False)
        run.step(2)
        run.read_steps()
        run.evaluate(0)
        run.checkpointer.save(3, run.engine.model, run.engine.optimizer, wait=True)
    return detector.races
