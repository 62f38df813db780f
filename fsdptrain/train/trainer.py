"""`Trainer`: the set-up of one rank, the only training loop, and one step of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdptrain.checkpoint.export import export_live
from fsdptrain.checkpoint.export_check import ROWS, TOKENS, Sample
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.data.encode import end_tokens
from fsdptrain.data.windows import WindowStream
from fsdptrain.errors import NodeWaits, NonFiniteError, Stopped
from fsdptrain.parallel.shard import build, check_replicas
from fsdptrain.parallel.world import check_hosts_of_copies
from fsdptrain.plan.plan import fastest_on_one_gpu
from fsdptrain.run_folder.records import by_loss, ends_early, evaluations_since_best
from fsdptrain.text import ranks_text
from fsdptrain.train.nonfinite import find_sources, find_weights
from fsdptrain.train.optim import learning_rate
from fsdptrain.train.pace import NOTICED_S, Pace, Recording, StopPoll, count_within
from fsdptrain.train.prefetch import Prefetch, StepInputs, WindowBarrier
from fsdptrain.train.reference import with_reference
from fsdptrain.train.setup import (
    Inputs,
    Session,
    Sizes,
    check_cards,
    check_remaining_steps,
    check_same_inputs,
    join_ranks,
    load_state,
    open_run_folder,
    report_start,
    use_best_flash,
)
from fsdptrain.train.step import Engine, QueuedStep, StepStats
from fsdptrain.train.teacher import with_teacher

GC_EVERY = 500  # steps
LENGTHS_OF_PROMPTS = 128  # tokens: a multiple of it, so that few shapes occur


@dataclass(frozen=True)
class MadeStep:
    """A step that was queued and not read: its inputs, its learning rate, and its numbers to come."""

    inputs: StepInputs
    lr: float
    queued: QueuedStep


@dataclass
class Totals:
    """Running totals over the steps of this process."""

    tokens: int = 0  # label tokens
    positions: int = 0
    seconds: float = 0.0
    skipped: int = 0  # non-finite steps since the last finite one
    alloc_retries: list[int] = field(default_factory=list)  # of each rank's allocator, up to the last `step` event
    peak_memory: list[int] = field(default_factory=list)  # of each rank, at the last `step` event
    pace: Pace = field(default_factory=Pace)


class Trainer:
    """One rank of a run: `set_up` creates it, `train` runs the loop, `export` writes the Hugging Face folder."""

    def __init__(
        self,
        session: Session,
        inputs: Inputs,
        engine: Engine,
        checkpointer: Checkpointer,
        sizes: Sizes,
        peak_flops: float,
    ) -> None:
        """`peak_flops` is the FLOP/s of all ranks together, to which MFU is relative."""
        self.session, self.plan, self.reporter = session, inputs.plan, session.reporter
        self.inputs, self.stream = inputs, inputs.stream
        self.engine, self.world, self.checkpointer = engine, engine.world, checkpointer
        self.sizes, self.peak_flops = sizes, peak_flops
        self.totals = Totals()
        self.done = engine.steps_made
        self.recording = Recording(self.plan, self.world.rank, self.world.device)
        self.prefetch = Prefetch(self.plan, self.stream, self.world.rank, self.world.device, sizes.total_steps)
        self.barrier: WindowBarrier | None = None
        if isinstance(self.stream, WindowStream):
            self.barrier = WindowBarrier(session, inputs, self.stream, self.world, self.prefetch, sizes.total_steps)
        # An accelerator needs the next step in its queue before the host waits for the numbers of this one.
        self.reads_late = self.world.device.type != "cpu"
        self.unread: list[MadeStep] = []
        self.most_unread = 1  # steps, besides the newest

    @classmethod
    def set_up(cls, session: Session) -> Trainer:
        """Set up this rank, up to its next step: plan → data → world → model → shard → resume → engine.

        Raises an FsdptrainError on every rank if the run cannot succeed, and Stopped after a stop signal.
        """
        inputs, world = join_ranks(session)
        plan = fastest_on_one_gpu(inputs.plan, inputs.prepared.weights, world.device_memory())
        inputs = dataclasses.replace(inputs, prepared=dataclasses.replace(inputs.prepared, plan=plan))
        session.watchdog.reset()
        check_hosts_of_copies(plan, world)
        check_cards(plan, world)
        check_same_inputs(inputs, world)
        checkpointer = open_run_folder(session, inputs, world)
        # What would end the run later is checked before the teacher is asked and weights are read, which may take long.
        sizes = Sizes.of(inputs)
        check_remaining_steps(plan, checkpointer, sizes)
        inputs = with_teacher(session, inputs, world)
        # The model is sharded before it has weights, so that no rank ever holds all of them.
        baseline_memory = world.peak_memory()
        flash_note = use_best_flash(session, inputs, world)
        session.watchdog.reset()
        model, units = build(plan, inputs.prepared.config, world)
        session.watchdog.reset()
        optimizer, steps_made = load_state(model, session, inputs, checkpointer, sizes.state_bytes)
        check_replicas(model, world)
        session.watchdog.reset()
        scale = checkpointer.loss_scale
        engine = Engine(model, optimizer, world, plan, steps_made, session.watchdog.reset, scale)
        inputs = with_reference(session, inputs, engine, checkpointer)
        # All checks have passed: the start is reported only now, so that a refused run has no `start` event.
        report_start(session, inputs, checkpointer, sizes, steps_made, len(units), baseline_memory, flash_note)
        checkpointer.restore_losses()
        compute_dtype = getattr(torch, plan.recipe.fsdp.mixed_precision.param_dtype)
        return cls(session, inputs, engine, checkpointer, sizes, world.size * world.peak_flops(compute_dtype))

    def train(self) -> int | None:
        """Train to the last step, or until a stop. Return the number of steps made if stopped, else None.

        The loop runs once more than there are steps, so that the last evaluation and save are not written twice.
        """
        # Automatic collections come at a different moment on each rank, and each of them delays all ranks. What the
        # set-up has made stays: no collection needs to look at it.
        gc.collect()
        gc.freeze()
        gc.disable()
        with contextlib.closing(self.prefetch), contextlib.ExitStack() as stack:
            if self.barrier:
                stack.enter_context(contextlib.closing(self.barrier))
            self.done, stop = self.train_steps()
        self.recording.close()  # a stop may have come between its steps
        gc.enable()
        gc.unfreeze()
        # The last checkpoint may still be under way; if it fails, the run fails.
        self.finish_save()
        self.checkpointer.release()  # an export needs host memory of its own
        if self.barrier and self.barrier.failure:
            raise self.barrier.failure
        return self.done if stop else None

    def train_steps(self) -> tuple[int, bool]:
        """Run the loop of `train`. Return the number of steps made, and whether a stop ended the loop."""
        recipe, resumed = self.plan.recipe, self.engine.steps_made
        done, stop = resumed, self.enter_window(resumed)
        while True:
            last = done >= self.sizes.total_steps
            # An evaluation or a save needs all steps read: one may have to be skipped or to end the run.
            if last or stop or due(done, recipe.eval.every) or due(done, recipe.checkpoint.every):
                stop |= self.read_steps()
            # Evaluate before saving: a stop during the evaluation is then still followed by a save.
            if not stop and self.evaluation_due(done, last):
                stop = self.evaluate(done)
            last = last or self.ends_early(done)
            # Save on a stop as well, so that no step is lost. The checkpoint that was resumed from exists already.
            wanted = due(done, recipe.checkpoint.every) or self.checkpointer.is_among_best(done)
            saves = done > resumed and (last or stop or wanted)
            # A save writes a part of each copy, so they are compared before it.
            if saves:
                self.compare_copies(done)
                stop |= self.save(done, wait=last or stop or not recipe.checkpoint.async_)
                gc.collect()
            if last or stop:
                return done, stop
            if saves:
                self.let_nodes_join(done)
            with self.recording.step(done):
                stop = self.step(done)
            done += 1
            stop = stop or self.enter_window(done)
            if done % GC_EVERY == 0:
                gc.collect()

    def enter_window(self, step: int) -> bool:
        """Wait for the window of the data that begins with a step (from 0), if one does; collective.

        Returns whether a stop came, or a failure, which `train` raises when a checkpoint is saved.
        """
        if self.barrier is None or not self.barrier.is_before(step):
            return False
        if self.read_steps():
            return True
        self.finish_save()
        return self.barrier.enter(step)

    def step(self, step: int) -> bool:
        """Make optimizer step number `step` (from 0). Return whether any rank has a stop request, as far as it is read.

        On an accelerator this step is queued. The steps before it are read when one of them is logged, and at the
        latest after half of NOTICED_S seconds, which the ranks count in steps (see `stops`).
        """
        # The wait for data is measured by itself, to tell slow input from slow compute. It delays nothing as long as
        # the device has queued steps to work on.
        started = time.perf_counter()
        inputs = self.prefetch.get(step)
        idle = not self.unread or self.unread[-1].queued.numbers.done()
        self.unread.append(self.queue_step(inputs, time.perf_counter() - started if idle else 0.0))
        if not self.reads_late:
            return self.read_steps()
        read = due(step, self.plan.recipe.log.every) or len(self.unread) > self.most_unread
        return self.read_steps(keep=1) if read else False

    def queue_step(self, inputs: StepInputs, data_s: float = 0.0) -> MadeStep:
        """Queue a step; nothing waits for the device. `data_s` are the seconds that it was delayed by its inputs."""
        recipe, step = self.plan.recipe, inputs.step
        lr = learning_rate(step, self.sizes.total_steps, recipe.optim, recipe.schedule)
        # The stop request is exchanged with the numbers of the step, so that it needs no collective of its own.
        stop = bool(self.session.stop.count)
        queued = self.engine.step(step, inputs.batches, inputs.divisor, lr, stop, data_s)
        return MadeStep(inputs, lr, queued)

    def read_steps(self, keep: int = 0) -> bool:
        """Wait for the queued steps, except the newest `keep`, and report them.

        Returns whether any rank had a stop request when one of them was queued.
        """
        stop = False
        while ready := self.unread[: len(self.unread) - keep]:
            try:
                for made, stats in zip(ready, self.engine.read([made.queued for made in ready]), strict=True):
                    del self.unread[0]
                    self.add_step(made, stats)
                    stop |= stats.stop
            except NonFiniteError as error:
                nonfinite, *later = self.unread
                self.unread = []
                stop |= self.skip_or_raise(nonfinite.inputs, error)
                self.unread = [self.queue_step(made.inputs) for made in later]  # they have changed nothing
        return stop

    def add_step(self, made: MadeStep, stats: StepStats) -> None:
        """Count a finite step, and report it."""
        self.session.watchdog.reset(step_done=True)
        if not math.isfinite(stats.grad_norm):
            what = f"the gradient overflows float16 with a loss scale of {stats.loss_scale:g}, which is halved"
            self.reporter.event("skip", step=made.inputs.step + 1, what=f"step {made.inputs.step + 1}: {what}")
            self.checkpointer.skipped += 1
            return
        positions = len(made.inputs.positions) * self.plan.recipe.data.seq_len
        self.totals.tokens += made.inputs.label_tokens
        self.totals.positions += positions
        self.totals.seconds += stats.step_s
        self.totals.skipped = 0
        self.most_unread = count_within(NOTICED_S, stats.usual_step_s)
        self.report_step(made, stats)

    def report_step(self, made: MadeStep, stats: StepStats) -> None:
        """Write the `step` event if it is due, and a `straggler` event if a rank slows the others down."""
        total_steps, seq_len = self.sizes.total_steps, self.plan.recipe.data.seq_len
        step, positions, label_tokens = made.inputs.step, made.inputs.positions, made.inputs.label_tokens
        if due(step + 1, self.plan.recipe.log.every) or step + 1 == total_steps:
            self.reporter.event(
                "step",
                step=step + 1,
                epoch=(step + 1) * self.plan.recipe.train.global_batch_size / len(self.stream),
                loss=stats.loss,
                **stats.measures,
                lr=made.lr,
                grad_norm=stats.grad_norm,
                **({"loss_scale": stats.loss_scale} if self.engine.loss_scale else {}),
                **({"expert_load": stats.expert_load} if stats.expert_load else {}),
                tokens=label_tokens,
                tokens_per_s=label_tokens / stats.step_s,
                positions_per_s=len(positions) * seq_len / stats.step_s,
                mfu=self.sizes.flops_per_step / (stats.step_s * self.peak_flops),
                step_s=stats.step_s,
                data_s=max(stats.data_s),
                peak_memory_bytes=max(stats.peak_memory),
                **self.memory_fields(stats),
                samples=self.stream.digest(positions),
                total_tokens=self.totals.tokens,
                total_positions=self.totals.positions,
                total_s=self.totals.seconds,
            )
        if straggler := self.totals.pace.add(stats.data_s, stats.compute_s, stats.step_s):
            self.reporter.event("straggler", step=step + 1, **straggler)

    def memory_fields(self, stats: StepStats) -> dict[str, Any]:
        """Return the fields of a `step` event on memory that not all of them have.

        The peak of each rank, if it is another than at the last event; on GPUs the reserved bytes, and the allocator's
        retries since the last event, both of the rank with the most.
        """
        fields = {"peak_memory_by_rank": stats.peak_memory} if stats.peak_memory != self.totals.peak_memory else {}
        self.totals.peak_memory = stats.peak_memory
        if self.world.device.type != "cuda":
            return fields
        before = self.totals.alloc_retries or [0] * self.world.size
        self.totals.alloc_retries = stats.alloc_retries
        retries = max(now - earlier for now, earlier in zip(stats.alloc_retries, before, strict=True))
        return {**fields, "reserved_memory_bytes": stats.reserved_memory, "alloc_retries": retries}

    def skip_or_raise(self, inputs: StepInputs, error: NonFiniteError) -> bool:
        """Report what made a step non-finite. Skip the step if the recipe allows it, else raise NonFiniteError.

        Collective; nothing was updated. Returns whether any rank has a stop request, as `step` does.
        """
        train, step = self.plan.recipe.train, inputs.step
        cause = self.nonfinite_cause(inputs)
        self.totals.skipped += 1
        skip = train.on_nonfinite == "skip" and self.totals.skipped <= train.max_skipped
        self.reporter.event("skip" if skip else "nonfinite", step=step + 1, what=f"{error}: {cause}")
        if skip:
            self.checkpointer.skipped += 1
            return self.any_stop()
        limit = f", after {train.max_skipped} skipped steps in a row" if train.on_nonfinite == "skip" else ""
        raise NonFiniteError(
            f"{error}{limit}: {cause}; this step changed no weights, and no checkpoint was saved after it"
        )

    def nonfinite_cause(self, inputs: StepInputs) -> str:
        """Repeat a non-finite step. Return what in it is not finite, on which rank, for which samples; collective.

        Ranks that share a row get the numbers of one another in attention.
        """
        self.finish_save()
        samples: dict[str, list[int]] = {}
        for rank, number, what in find_sources(self.engine, inputs.step, inputs.batches, inputs.divisor):
            first = rank - self.plan.part_of_row(rank)
            others = [other for other in range(first, first + self.plan.ranks_of_row) if other != rank]
            shared = f", which shares its rows with {ranks_text(others)}" if others else ""
            micro_batch = self.plan.micro_batches(inputs.step, rank)[number]
            samples.setdefault(f"{what} on rank {rank}{self.plan.stages_text(rank)}{shared}", []).extend(
                self.stream.at(micro_batch)
            )
        causes = [f"{what} (samples {', '.join(map(str, numbers))})" for what, numbers in samples.items()]
        return "; ".join([*find_weights(self.engine), *causes]) or (
            "not reproducible when the step was repeated: suspect the hardware"
        )

    def finish_save(self) -> None:
        """Wait for a save that is under way, and raise its error: its thread communicates beside training.

        It comes before every `World.gather_objects` of training, which would meet the collectives of that thread.
        """
        self.session.watchdog.reset(disk_bytes=2 * self.sizes.state_bytes)
        self.checkpointer.wait()

    def evaluation_due(self, done: int, last: bool) -> bool:
        """Return whether to evaluate after `done` steps; collective if the run was resumed there."""
        if not self.inputs.held_out or not (done == 0 or last or due(done, self.plan.recipe.eval.every)):
            return False
        # A run that resumes here evaluates only what a stop has prevented.
        return not (done == self.engine.steps_made and self.world.any(self.reporter.has("eval", done)))

    def evaluate(self, done: int) -> bool:
        """Report the loss over all held-out sequences. Return whether a stop interrupted it."""
        self.reporter.progress("evaluating", 0, 0)
        stops = StopPoll(self.world, self.session.stop)
        results = []
        for corpus in self.inputs.eval_corpus.parts:
            if (result := self.engine.evaluate(corpus, range(len(corpus)), stops)) is None:
                break
            results.append(result)
        texts = self.continue_prompts(stops) if result is not None else None
        if texts is not None:
            loss = self.report_evaluation(done, results)
            when = f"after step {done}" if done else "before the first step"
            if not math.isfinite(loss):  # one that only overflows may come back to numbers
                self.finish_save()
                if weights := find_weights(self.engine):
                    raise NonFiniteError(f"{when} the held-out loss is {loss:g}: {weights[0]}")
            if texts:
                self.reporter.event("generated", step=done, prompts=self.plan.recipe.eval.prompts, texts=texts)
        if not done and self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # what the first evaluation has cached is of other sizes than a step needs
        return texts is None

    def continue_prompts(self, stops: StopPoll) -> list[str] | None:
        """Return what the model writes behind each of `eval.prompts`, None if a stop interrupted it; collective.

        A text ends before a token whose logits are not numbers.
        """
        if not self.inputs.prompts:
            return []
        plan, tokenizer, prompts = self.plan, self.inputs.tokenizer, self.inputs.prompts
        most, seq_len = plan.recipe.eval.max_new_tokens, plan.recipe.data.seq_len
        # A compiled model and ranks that share rows compute the shape of training, the others what is needed.
        if not plan.compiles and plan.ranks_of_row == 1:
            seq_len = min(seq_len, -(-(max(map(len, prompts)) + most) // LENGTHS_OF_PROMPTS) * LENGTHS_OF_PROMPTS)
        written: list[list[int]] = [[] for _ in prompts]
        growing = [*range(len(prompts))]
        ends = {-1, *end_tokens(tokenizer, self.inputs.prepared.bare.generation_config)}
        for _ in range(most):
            if stops():
                return None
            rows = self.inputs.eval_corpus.parts[0].with_rows([prompts[n] + written[n] for n in growing], seq_len)
            found = dict(zip(growing, self.engine.next_tokens(rows), strict=True))
            growing = [n for n, token in found.items() if token not in ends]
            for n in growing:
                written[n].append(found[n])
            if not growing:
                break
        return [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in written]

    def report_evaluation(self, done: int, results: list[tuple[float, int, Any]]) -> float:
        """Write the `eval` event of what `Engine.evaluate` returns of each held-out set, and of all sets together.

        Returns the loss of all.
        """
        of_sets, tokens, measures = zip(*results, strict=True)
        divisors = [corpus.divisor(range(len(corpus))) for corpus in self.inputs.eval_corpus.parts]
        shares = [divisor / sum(divisors) for divisor in divisors]

        def mean(values: Iterable[float]) -> float:
            return sum(share * value for share, value in zip(shares, values, strict=True))

        loss, names = mean(of_sets), [source.name for source in self.plan.sources]
        losses = dict(zip(names, of_sets, strict=True)) if len(results) > 1 else {}
        fields = self.plan.recipe.train.objective.means(*sum(measures).tolist())
        fields = fields or {"perplexity": math.exp(min(loss, 700.0))}
        self.reporter.event(
            "eval", step=done, loss=loss, tokens=sum(tokens), **fields, **({"losses": losses} if losses else {})
        )
        if done:
            best_of = self.plan.recipe.eval.best_of
            self.checkpointer.losses[done] = losses[best_of] if best_of else loss  # the same on all ranks
        return loss

    def ends_early(self, done: int) -> bool:
        """Return whether `eval.patience` ends the run after `done` steps, and report that."""
        losses, settings = self.checkpointer.losses, self.plan.recipe.eval
        if not ends_early(losses, done, settings.patience):
            return False
        fields: dict[str, Any] = {"best": by_loss(losses)[0]} if by_loss(losses) else {}
        fields |= {"source": settings.best_of} if settings.best_of else {}
        self.reporter.event("early_stop", step=done, evaluations=evaluations_since_best(losses), **fields)
        return True

    def compare_copies(self, done: int) -> None:
        """Raise WorkerLost if the copies of the model differ after `done` steps, once earlier saves are complete."""
        if self.world.replicas == 1 and self.world.tensor is None:
            return
        self.finish_save()  # a save would wait for it anyway
        check_replicas(self.engine.model, self.world, done)

    def save(self, done: int, wait: bool) -> bool:
        """Save a checkpoint. Return whether a stop came during it; always False without `wait`."""
        # Within this call two saves may be written and read back: the previous one and this one.
        self.session.watchdog.reset(disk_bytes=4 * self.sizes.state_bytes)
        self.checkpointer.loss_scale = self.engine.loss_scale.state() if self.engine.loss_scale else None
        self.checkpointer.save(done, self.engine.model, self.engine.optimizer, wait)
        self.session.watchdog.reset()
        return wait and self.any_stop()  # a collective, so only where all ranks wait anyway

    def let_nodes_join(self, done: int) -> None:
        """Raise NodeWaits if another node waits to join, once the checkpoint of `done` steps is complete; collective.

        This costs a restart, but no step: the run goes on from this checkpoint.
        """
        if not self.plan.topology.is_elastic or not self.world.any(self.session.join.count):
            return
        self.finish_save()
        if self.any_stop():  # no rank leaves before the checkpoint is complete on all; the next step notices the stop
            return
        raise NodeWaits(f"another node joins: the workers start again from the checkpoint of step {done}")

    def export(self) -> int | None:
        """Write the Hugging Face folder. Return the number of steps made if a stop interrupted it, else None."""

        def check_stop() -> None:
            self.session.watchdog.reset()
            if self.any_stop():
                raise Stopped("stopped while exporting")

        exported = self.done
        if self.plan.recipe.export.which == "best":
            self.reporter.progress("reading the best checkpoint", 0, 0)
            self.session.watchdog.reset(disk_bytes=2 * self.sizes.state_bytes)
            exported = self.checkpointer.load_best(self.engine.model, self.engine.optimizer, self.done)
        sample = self.sample() if self.plan.recipe.export.compare else None
        try:
            export_live(
                self.engine.model, self.inputs.prepared.bare, self.plan, self.checkpointer, self.reporter, exported,
                check_stop, sample, self.inputs.stamps,
            )  # fmt: skip
        except Stopped:
            return self.done
        return None

    def sample(self) -> Sample:
        """Return the beginnings of some rows, and the logits that the model computes for them; collective.

        They are of the rows that are held out, or of those that it trains on if there are none.
        """
        self.session.watchdog.reset()
        held_out = self.inputs.held_out
        corpus = self.inputs.eval_corpus.parts[0] if held_out else self.stream.some_rows()
        length = min(TOKENS, self.plan.tokens_of_row)
        first = corpus.pieces[corpus.offsets[: min(ROWS, len(corpus))]]
        rows = [corpus.tokens[start : start + min(count, length)].tolist() for start, count, _ in first]
        logits = self.engine.logits(corpus.with_rows(rows, corpus.seq_len))
        if self.world.any(any(bool(each.isnan().any()) for each in logits)):
            weights = find_weights(self.engine) or ["all weights are finite, so its activations overflow"]
            raise NonFiniteError(f"the trained model's logits are nan: {weights[0]}")
        return Sample(rows, logits, bool(held_out))

    def any_stop(self) -> bool:
        """Return whether any rank has a stop request; collective."""
        return self.world.any(self.session.stop.count)


def due(done: int, every: int | None) -> bool:
    """Return whether something that happens every `every` steps is due after `done` steps."""
    return every is not None and done % every == 0
