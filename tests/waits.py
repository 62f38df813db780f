"""The waits of the host and of streams in training steps and an evaluation, on the pretended accelerator.

`Trainer.step` runs as in a run, on fake tensors. `waits` counts those of the host for the device: operators whose
result it needs (`.item()`, a blocking copy), and waits for an event that has not happened yet. `races` finds missing
ones, between streams and between the host and the device, with torch's own detector (`torch.cuda._sanitizer`).

The detector is fed with what `Trainer.step`, an evaluation and saves do on the pretended accelerator: which memory each
operator reads and writes, on which stream, and what waits for what. The host is a stream of its own. An operator that
is queued comes after all that the host has done, but the host comes after an operator only if it has waited for it.
Memory is freed on the stream that has allocated it, where torch gives it away again. A collective is work of the stream
that issues it. The thread that copies the data of the next step is not watched: it copies on the stream that computes,
ahead of what reads it, so that there is no wait that could be missing.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda._sanitizer import Access, EventHandler, zip_arguments
from transformers import AutoConfig

from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.forecast.device import (
    Backend,
    DeviceEvent,
    PretendCopy,
    PretendStream,
    current_stream,
    pretend_accelerator,
    pretend_world,
)
from fsdptrain.forecast.kernels import on_card
from fsdptrain.forecast.patches import fake_tensor_patches
from fsdptrain.forecast.recorder import NO_KERNEL, Recorder, host_waits, storage_of, tensors_in
from fsdptrain.forecast.simulation import batch_of_zeros, make_engine, mark_moments
from fsdptrain.forecast.trace import HOST, Alloc, Event, Free, Moment, RecordEvent, Storage, Synchronize, WaitEvent
from fsdptrain.model.attention import choose_attention
from fsdptrain.parallel.world import HostCopy
from fsdptrain.plan.hardware import KNOWN
from fsdptrain.plan.plan import Counts, Plan, varied
from fsdptrain.train import pace, trainer
from fsdptrain.train.optim import optimizer_class
from fsdptrain.train.prefetch import StepInputs
from fsdptrain.train.setup import Sizes
from fsdptrain.train.step import Engine
from fsdptrain.train.trainer import Trainer

EVALUATED = 12  # micro-batches of a rank


class PretendedStream:
    def __len__(self) -> int:
        return 1

    def digest(self, positions: range) -> str:
        return ""


@contextlib.contextmanager
def trained(
    plan: Plan, device: torch.device | None = None, recorder_class: type[Recorder] = Recorder
) -> Iterator[tuple[Trainer, Recorder]]:
    """Provide a trainer on fake tensors, on the pretended accelerator or another device, and what records its work."""
    config: Any = dict(plan.recipe.model.config)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    plan, _ = choose_attention(varied(plan, {"train.compile": False}), config)  # fake tensors are not compiled
    with contextlib.ExitStack() as entered:
        enter = entered.enter_context
        enter(fake_tensor_patches(plan.recipe.documents_share_sequences, Recorder.unrecorded))
        world = enter(pretend_world(plan, device or pretend_accelerator()))
        enter(on_card(KNOWN["h100-80gb"]))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(torch.autograd.set_multithreading_enabled(False))
        # No rank requests a stop. Steps of fake tensors take no time that could be exchanged: they count as short.
        enter(mock.patch.object(PretendCopy, "_numbers", lambda copy: np.zeros(copy._copy.shape)))
        enter(mock.patch.object(trainer, "count_within", lambda *_: pace.MOST))
        enter(mock.patch.object(pace, "count_within", lambda *_: pace.MOST))
        engine, units = make_engine(plan, config, world)
        run = trainer_of(engine)
        recorder = enter(recorder_class(world.device.type, config.vocab_size))
        mark_moments(recorder, engine, units)
        read = engine.read
        enter(mock.patch.object(engine, "read", lambda queued: recorder.begin("read") or read(queued)))
        yield run, recorder


def recorded(plan: Plan, steps: int, device: torch.device | None = None) -> tuple[list[Event], list[Event]]:
    """Return the events of `steps` steps, after a first one that has nothing to read, and those of an evaluation."""
    with trained(plan, device) as (run, recorder):
        run.step(0)
        made: list[Event] = []
        evaluated: list[Event] = []
        recorder.trace.events = made
        for step in range(1, 1 + steps):
            run.step(step)
        recorder.trace.events = []
        run.read_steps()
        recorder.trace.events = evaluated
        run.evaluate(0)
    return made, evaluated


def waits(made: Iterable[Event], evaluated: Iterable[Event], steps: int) -> Counter[str]:
    """Return the waits a step by the kind of moment (`backward`, `gradient`, `read`, …), as means over `steps` steps.

    `evaluation` is the waits of the whole evaluation.
    """
    found: Counter[str] = Counter()
    moment = ""
    for event in made:
        moment = event.name.split()[0] if isinstance(event, Moment) else moment
        found[moment] += isinstance(event, Synchronize)
    means = Counter({kind: count / steps for kind, count in found.items() if count})
    return means + Counter({"evaluation": sum(isinstance(event, Synchronize) for event in evaluated)})


class PretendedCorpus:
    def __init__(self, plan: Plan, size: int) -> None:
        self.plan, self.labels, self.parts = plan, np.ones(size, dtype=np.int64), [self]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, numbers: Any) -> Any:
        return batch_of_zeros(self.plan)

    def divisor(self, numbers: Any) -> int:
        return len(numbers)


def trainer_of(engine: Engine) -> Trainer:
    """Return a trainer of this engine whose data is zeros, which reports to nobody."""
    plan, nothing = engine.plan, SimpleNamespace(event=lambda *_, **options: None, progress=lambda *_: None)
    session: Any = SimpleNamespace(
        initial_plan=plan, rundir=None, reporter=nothing, stop=SimpleNamespace(count=0),
        watchdog=SimpleNamespace(reset=lambda **_: None),
    )  # fmt: skip
    corpus = PretendedCorpus(plan, EVALUATED * engine.world.size)
    stream = PretendedStream()
    inputs: Any = SimpleNamespace(plan=plan, stream=stream, held_out=range(len(corpus)), eval_corpus=corpus, prompts=[])
    sizes = Sizes(weights=[], counts=Counts(1, 1), total_steps=1000, state_bytes=0, flops_per_step=1.0)
    run = Trainer(session, inputs, engine, None, sizes, 1.0)  # type: ignore[arg-type]
    run.most_unread = pace.MOST
    run.prefetch = SimpleNamespace(  # type: ignore[assignment]
        get=lambda step: StepInputs(step, range(1), [batch_of_zeros(plan) for _ in range(plan.accumulation)], 1, 1)
    )
    return run


# --- missing waits ---------------------------------------------------------------------------------------------------

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
        entered.enter_context(mock.patch.object(sys.modules[__name__], "EVALUATED", 1))
        run, detector = entered.enter_context(trained(plan, recorder_class=RaceDetector))
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
