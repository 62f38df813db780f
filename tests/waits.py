"""Count the waits of the host for the device, in training steps and in an evaluation, on the pretended accelerator.

`Trainer.step` runs as in a run, on fake tensors. A wait is an operator whose result the host needs (`.item()`, a
blocking copy), or a wait for an event that has not happened yet.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from fsdptrain.forecast.device import PretendCopy, pretend_accelerator, pretend_world
from fsdptrain.forecast.kernels import on_card
from fsdptrain.forecast.patches import fake_tensor_patches
from fsdptrain.forecast.recorder import Recorder
from fsdptrain.forecast.simulation import batch_of_zeros, make_engine, mark_moments
from fsdptrain.forecast.trace import Event, Moment, Synchronize
from fsdptrain.model.attention import choose_attention
from fsdptrain.plan.hardware import KNOWN
from fsdptrain.plan.plan import Counts, Plan, varied
from fsdptrain.train import pace, trainer
from fsdptrain.train.prefetch import StepInputs
from fsdptrain.train.setup import Sizes
from fsdptrain.train.step import Engine
from fsdptrain.train.trainer import Trainer

EVALUATED = 12  # micro-batches of a rank


class PretendedStream:
    """Samples that have no digest."""

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
    """Sequences of zeros."""

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
    run.prefetch = SimpleNamespace(get=lambda step: inputs_of(plan, step))  # type: ignore[assignment]
    return run


def inputs_of(plan: Plan, step: int) -> StepInputs:
    return StepInputs(step, range(1), [batch_of_zeros(plan) for _ in range(plan.accumulation)], 1, 1)
