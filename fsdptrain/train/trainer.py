"""`Trainer`: one rank of a run. Its set-up, the only training loop, and one step of it."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from dataclasses import dataclass, field

import torch

from fsdptrain.checkpoint.export import export_live
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.data.corpus import Batch
from fsdptrain.errors import NonFiniteError, Stopped, WorkerLost
from fsdptrain.parallel.pulse import Pulse
from fsdptrain.parallel.replicas import check_replicas
from fsdptrain.parallel.shard import build
from fsdptrain.parallel.world import World
from fsdptrain.train.failure import exit_from_thread
from fsdptrain.train.nonfinite import find_sources
from fsdptrain.train.optim import learning_rate
from fsdptrain.train.setup import (
    Inputs,
    Session,
    Sizes,
    check_remaining_steps,
    load_state,
    open_run_folder,
    prepare_inputs,
    prepare_process,
    report_start,
    start_facts,
)
from fsdptrain.train.step import Engine, StepStats
from fsdptrain.train.stragglers import Pace

GC_EVERY = 500  # steps


@dataclass
class Totals:
    """What the steps of this process add up to."""

    tokens: int = 0  # label tokens
    positions: int = 0
    seconds: float = 0.0
    skipped: int = 0  # steps in a row that were not finite
    pace: Pace = field(default_factory=Pace)

    def add(self, tokens: int, positions: int, seconds: float) -> None:
        """Count a step that was finite."""
        self.tokens += tokens
        self.positions += positions
        self.seconds += seconds
        self.skipped = 0


class Trainer:
    """One rank of a run. `set_up` makes it, `train` runs the loop, `export` writes the result."""

    def __init__(
        self,
        session: Session,
        inputs: Inputs,
        engine: Engine,
        checkpointer: Checkpointer,
        sizes: Sizes,
        peak_flops: float,
    ) -> None:
        """`peak_flops` are FLOP/s of all ranks together: the denominator of MFU."""
        self.session, self.plan, self.reporter = session, session.plan, session.reporter
        self.inputs, self.stream = inputs, inputs.stream
        self.engine, self.world, self.checkpointer = engine, engine.world, checkpointer
        self.sizes, self.peak_flops = sizes, peak_flops
        self.totals = Totals()

    @classmethod
    def set_up(cls, session: Session) -> Trainer:
        """Return a trainer that is ready for its next step: plan → data → world → model → shard → resume → engine.

        Raises an FsdptrainError on every rank if the run cannot succeed, and Stopped after a stop signal.
        """
        plan = session.plan
        prepare_process(session)
        # Data first, without a process group: tokenising may take longer than a collective may. Until the ranks have
        # met, only the pulse notices that another node is lost.
        session.progress("checking the model", 0, 0)
        with Pulse(plan, lambda reason: exit_from_thread(plan, WorkerLost(reason))):
            inputs = prepare_inputs(session)
            session.progress("building the model", 0, 0)
            world = World.start(plan, session.stop)
        session.watchdog.beat()
        # Ranks that read other files would train another model without an error, so they compare what they read.
        stream = inputs.stream
        world.agree((inputs.prepared.plan.digest(), len(stream), stream.corpus.fingerprint), "the plan or the data")
        checkpointer = open_run_folder(session, inputs, world)
        # The model is sharded while it has no weights: no rank ever holds all of it.
        baseline_memory = world.peak_memory()
        model, units = build(inputs.prepared.plan, inputs.prepared.config, world)
        # Reading weights takes minutes: whether there is anything to do, and room for it, is checked before.
        sizes = Sizes.of(plan, inputs)
        check_remaining_steps(plan, checkpointer, sizes)
        session.watchdog.beat(disk_bytes=2 * sizes.state_bytes)  # a checkpoint is verified, then read
        optimizer, steps_made = load_state(model, session, inputs, checkpointer)
        check_replicas(model, world)
        session.watchdog.beat()
        # From here on nothing can refuse the run, so its start is reported.
        report_start(session, inputs, world, steps_made, start_facts(inputs, world, sizes, len(units), baseline_memory))
        engine = Engine(model, optimizer, world, plan, steps_made, session.watchdog.beat)
        compute_dtype = getattr(torch, plan.recipe.fsdp.mixed_precision.param_dtype)
        return cls(session, inputs, engine, checkpointer, sizes, world.size * world.peak_flops(compute_dtype))

    def train(self) -> int | None:
        """Train to the last step, or until a stop. Return the number of steps made if stopped, else None.

        The loop runs once more than there are steps, so that the last evaluation and save are not written twice.
        """
        recipe, resumed = self.plan.recipe, self.engine.steps_made
        done, stop = resumed, False
        # Python would collect on each rank at another moment, and every collection delays all ranks.
        gc.disable()
        while True:
            last = done >= self.sizes.total_steps
            # Evaluate before saving: a stop that comes meanwhile is still followed by a save.
            if (
                not stop
                and self.inputs.held_out
                and (last or due(done, recipe.eval.every))
                and not self.evaluated(done)
            ):
                stop = self.evaluate(done)
            # Save after a stop too, so that no step is lost; what was resumed from is on the disk already.
            if done > resumed and (last or stop or due(done, recipe.checkpoint.every)):
                stop |= self.save(done, wait=last or stop or not recipe.checkpoint.async_)
                gc.collect()
            if last or stop:
                break
            stop = self.step(done)
            done += 1
            if done % GC_EVERY == 0:
                gc.collect()
        gc.enable()
        # A checkpoint may still be on its way to the disk, and its failure is the run's.
        self.session.watchdog.beat(disk_bytes=2 * self.sizes.state_bytes)
        self.checkpointer.wait()
        return done if stop else None

    def step(self, step: int) -> bool:
        """Make optimizer step number `step` (from 0) and report it. Return whether any rank was asked to stop."""
        # What each rank waits for its data is reported beside the step: it explains a slow one.
        started = time.perf_counter()
        positions = self.plan.step_positions(step)
        batches = [self.stream.batch(micro) for micro in self.plan.micro_batches(step, self.world.rank)]
        label_tokens = self.stream.label_tokens(positions)
        data_s = time.perf_counter() - started
        # A stop request travels with the step's own numbers, so that it needs no collective of its own.
        recipe, stop = self.plan.recipe, bool(self.session.stop.count)
        lr = learning_rate(step, self.sizes.total_steps, recipe.optim, recipe.schedule)
        try:
            stats = self.engine.step(step, batches, label_tokens, lr, stop, data_s)
        except NonFiniteError as error:
            return self.skip_or_raise(step, batches, label_tokens, error)
        self.session.watchdog.beat(step_done=True)
        self.totals.add(label_tokens, len(positions) * recipe.data.seq_len, stats.step_s)
        self.report_step(step, positions, label_tokens, lr, stats)
        return stats.stop

    def report_step(self, step: int, positions: range, label_tokens: int, lr: float, stats: StepStats) -> None:
        """Write the `step` event if one is due, and name a rank that slows the others down."""
        total_steps, seq_len = self.sizes.total_steps, self.plan.recipe.data.seq_len
        if due(step + 1, self.plan.recipe.log.every) or step + 1 == total_steps:
            self.reporter.event(
                "step",
                step=step + 1,
                loss=stats.loss,
                lr=lr,
                grad_norm=stats.grad_norm,
                tokens=label_tokens,
                tokens_per_s=label_tokens / stats.step_s,
                positions_per_s=len(positions) * seq_len / stats.step_s,
                mfu=self.sizes.flops_per_step / (stats.step_s * self.peak_flops),
                step_s=stats.step_s,
                data_s=max(stats.data_s),
                peak_memory_bytes=stats.peak_memory,
                samples=self.stream.digest(positions),
                total_tokens=self.totals.tokens,
                total_positions=self.totals.positions,
                total_s=self.totals.seconds,
            )
        if straggler := self.totals.pace.add(stats.data_s, stats.compute_s, stats.step_s):
            self.reporter.event("straggler", step=step + 1, **dataclasses.asdict(straggler))

    def skip_or_raise(self, step: int, batches: list[Batch], label_tokens: int, error: NonFiniteError) -> bool:
        """Report what made a step non-finite. Skip the step if the recipe allows it, else raise NonFiniteError.

        The step has updated nothing. Collective: every rank does the same. Returns whether any rank was asked to stop.
        """
        train = self.plan.recipe.train
        cause = self.cause_of(step, batches, label_tokens)
        self.totals.skipped += 1
        skip = train.on_nonfinite == "skip" and self.totals.skipped <= train.max_skipped
        self.reporter.event("skip" if skip else "nonfinite", step=step + 1, what=f"{error}: {cause}")
        if skip:
            return self.stops()
        # A checkpoint of good steps may still be on its way to the disk: without it more steps would be lost.
        self.session.watchdog.beat(disk_bytes=2 * self.sizes.state_bytes)
        self.checkpointer.wait()
        limit = f", after {train.max_skipped} skipped steps in a row" if train.on_nonfinite == "skip" else ""
        raise NonFiniteError(f"{error}{limit}: {cause}; the weights were not touched, and nothing was saved after them")

    def cause_of(self, step: int, batches: list[Batch], label_tokens: int) -> str:
        """Repeat the micro-batches of a non-finite step, and name loss or gradient, rank and samples; collective."""
        samples: dict[str, list[int]] = {}
        for source in find_sources(self.engine, step, batches, label_tokens):
            micro_batch = self.plan.micro_batches(step, source.rank)[source.micro_batch]
            samples.setdefault(f"{source.what} on rank {source.rank}", []).extend(self.stream.at(micro_batch))
        causes = [f"{what} (samples {', '.join(map(str, numbers))})" for what, numbers in samples.items()]
        return "; ".join(causes) or "not reproducible when the step was repeated: suspect the hardware"

    def evaluated(self, done: int) -> bool:
        """Return whether this step was evaluated before the run was resumed from it; a stop may have come first."""
        return done == self.engine.steps_made and (done == 0 or self.world.any(self.reporter.has("eval", done)))

    def evaluate(self, done: int) -> bool:
        """Report the loss over all held-out blocks. Return True if a stop cut it short."""
        self.reporter.progress("evaluating", 0, 0)
        result = self.engine.evaluate(self.inputs.eval_corpus, self.inputs.held_out, self.stops)
        if result is not None:
            loss, tokens = result
            self.reporter.event("eval", step=done, loss=loss, perplexity=math.exp(min(loss, 700.0)), tokens=tokens)
        return result is None

    def save(self, done: int, wait: bool) -> bool:
        """Save a checkpoint. Return whether a stop came meanwhile; asked only if `wait`, where ranks meet anyway."""
        # Two saves may be written and read back within this call: the one before, and this one.
        self.session.watchdog.beat(disk_bytes=4 * self.sizes.state_bytes)
        self.checkpointer.save(done, self.engine.model, self.engine.optimizer, wait)
        self.session.watchdog.beat()
        return wait and self.stops()

    def export(self) -> int | None:
        """Write the Hugging Face folder. Return the number of steps made if a stop cut it short, else None."""

        def check_stop() -> None:
            self.session.watchdog.beat()
            if self.stops():
                raise Stopped("stopped while exporting")

        bare, rundir, done = self.inputs.prepared.bare, self.session.rundir, self.sizes.total_steps
        try:
            export_live(self.engine.model, bare, rundir, self.plan, self.checkpointer, self.reporter, done, check_stop)
        except Stopped:
            return done
        return None

    def stops(self) -> bool:
        """Return whether any rank was asked to stop; collective."""
        return self.world.any(self.session.stop.count)


def due(done: int, every: int | None) -> bool:
    """Return whether something that happens every so many steps happens after `done` of them."""
    return every is not None and done % every == 0
