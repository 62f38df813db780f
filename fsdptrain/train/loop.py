"""The only training loop: evaluate, save, step, report."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from typing import Any

from fsdptrain.checkpoint.export import export_live
from fsdptrain.data.corpus import Batch
from fsdptrain.errors import NonFiniteError, Stopped
from fsdptrain.train.nonfinite import find_sources
from fsdptrain.train.optim import learning_rate
from fsdptrain.train.setup import Run

GC_EVERY = 500  # steps


def export(run: Run, bare: Any) -> int | None:
    """Write the Hugging Face folder; the number of steps made when a stop cut it short, else None."""

    def alive() -> None:
        run.watchdog.beat()
        if run.stops():
            raise Stopped("stopped while exporting")

    try:
        rundir, step = run.checkpointer.rundir, run.total_steps
        export_live(run.engine.model, bare, rundir, run.plan, run.checkpointer, run.reporter, step, alive)
    except Stopped:
        return run.total_steps
    return None


def loop(run: Run) -> int | None:
    """Train to the last step, or to a stop: then the number of steps made, else None.

    Goes round once more than there are steps, so that the last evaluation and save are the same lines as any other.
    """
    recipe, resumed = run.plan.recipe, run.engine.steps_made
    done, stop = resumed, False
    gc.disable()  # collections at a moment of its own choosing would make one rank late, and all others wait for it
    while True:
        last = done >= run.total_steps
        if not stop and run.held_out and (last or due(done, recipe.eval.every)) and not evaluated(run, done):
            stop = evaluate(run, done)
        if done > resumed and (last or stop or due(done, recipe.checkpoint.every)):
            stop |= save(run, done, wait=last or stop or not recipe.checkpoint.async_)
            gc.collect()
        if last or stop:
            break
        stop = one_step(run, done)
        done += 1
        if done % GC_EVERY == 0:
            gc.collect()
    gc.enable()
    run.watchdog.beat(disk_bytes=2 * run.state_bytes)
    run.checkpointer.wait()
    return done if stop else None


def due(done: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after `done` of them."""
    return every is not None and done % every == 0


def save(run: Run, done: int, wait: bool) -> bool:
    """Save a checkpoint; whether a stop came meanwhile (asked only where all ranks wait anyway)."""
    run.watchdog.beat(disk_bytes=4 * run.state_bytes)  # two saves are written and read back: the last one and this
    run.checkpointer.save(done, run.engine.model, run.engine.optimizer, wait)
    run.watchdog.beat()
    return wait and run.stops()


def one_step(run: Run, step: int) -> bool:
    """Fetch this rank's micro-batches, make the step, and report it; whether a rank was asked to stop."""
    started = time.perf_counter()
    positions = run.plan.step_positions(step)
    batches = [run.stream.batch(micro) for micro in run.plan.micro_batches(step, run.world.rank)]
    label_tokens = run.stream.label_tokens(positions)
    data_s = time.perf_counter() - started
    lr = learning_rate(step, run.total_steps, run.plan.recipe.optim, run.plan.recipe.schedule)
    try:
        stats = run.engine.step(step, batches, label_tokens, lr, bool(run.stop.count), data_s)
    except NonFiniteError as error:
        return not_finite(run, step, batches, label_tokens, error)
    run.watchdog.beat(step_done=True)
    run.skipped = 0
    all_positions = len(positions) * run.plan.recipe.data.seq_len
    run.tokens, run.positions = run.tokens + label_tokens, run.positions + all_positions
    run.seconds += stats.step_s
    if due(step + 1, run.plan.recipe.log.every) or step + 1 == run.total_steps:
        run.reporter.event(
            "step",
            step=step + 1,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            tokens=label_tokens,
            tokens_per_s=label_tokens / stats.step_s,
            positions_per_s=all_positions / stats.step_s,
            mfu=run.flops_per_step / (stats.step_s * run.peak_flops),
            step_s=stats.step_s,
            data_s=max(stats.data_s),
            peak_memory_bytes=stats.peak_memory,
            samples=run.stream.digest(positions),
            total_tokens=run.tokens,
            total_positions=run.positions,
            total_s=run.seconds,
        )
    if late := run.pace.see(stats.data_s, stats.compute_s, stats.step_s):
        run.reporter.event("straggler", step=step + 1, **dataclasses.asdict(late))
    return stats.stop


def not_finite(run: Run, step: int, batches: list[Batch], label_tokens: int, error: NonFiniteError) -> bool:
    """A step updated nothing: find out whose doing it was, and stop, or go on if the recipe says so; as `one_step`.

    Raises NonFiniteError on every rank.
    """
    train = run.plan.recipe.train
    found = find_sources(run.engine, step, batches, label_tokens)
    samples: dict[str, list[int]] = {}
    for f in found:
        micro_batch = run.plan.micro_batches(step, f.rank)[f.micro_batch]
        samples.setdefault(f"{f.what} on rank {f.rank}", []).extend(run.stream.at(micro_batch))
    told = [f"{what} (samples {', '.join(map(str, numbers))})" for what, numbers in samples.items()]
    whose = "; ".join(told) or "not seen again when the step was repeated: look at the hardware"
    run.skipped += 1
    skip = train.on_nonfinite == "skip" and run.skipped <= train.max_skipped
    run.reporter.event("skip" if skip else "nonfinite", step=step + 1, what=f"{error}: {whose}")
    if skip:
        return run.stops()
    run.watchdog.beat(disk_bytes=2 * run.state_bytes)
    run.checkpointer.wait()  # a good checkpoint may still be on its way to the disk
    bound = f", after {train.max_skipped} skipped steps in a row" if train.on_nonfinite == "skip" else ""
    raise NonFiniteError(f"{error}{bound}: {whose}; the weights were not touched, and nothing was saved after them")


def evaluated(run: Run, done: int) -> bool:
    """Whether this step was evaluated before it was resumed from; a stop may have come first."""
    return done == run.engine.steps_made and (done == 0 or run.world.any(run.reporter.has("eval", done)))


def evaluate(run: Run, done: int) -> bool:
    """Report the loss over all held-out blocks; True when a stop cut it short."""
    run.reporter.progress("evaluating", 0, 0)
    result = run.engine.evaluate(run.eval_corpus, run.held_out, run.stops)
    if result is not None:
        loss, tokens = result
        run.reporter.event("eval", step=done, loss=loss, perplexity=math.exp(min(loss, 700.0)), tokens=tokens)
    return result is None
