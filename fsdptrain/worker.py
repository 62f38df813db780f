"""One rank of a run: assembles the rooms, and holds the only loop.

plan → data → world → model → shard → weights → engine → resume;
while steps remain: evaluate? save? done? step → report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from fsdptrain.assets import save_assets
from fsdptrain.attempts import changes_since, fewer_steps
from fsdptrain.checkpoint import Checkpointer
from fsdptrain.commits import pinned
from fsdptrain.data import Batch, Corpus, Stream, prepare, tokenizer_digest
from fsdptrain.dist import World
from fsdptrain.engine import Engine, model_flops
from fsdptrain.errors import (
    LONGEST,
    CheckpointError,
    FsdptrainError,
    NonFiniteError,
    RecipeError,
    Stopped,
    WorkerError,
    WorkerLost,
    is_disk_full,
    shortened,
    to_record,
)
from fsdptrain.export import export_live
from fsdptrain.hub import checkpoint_files, spare_retries
from fsdptrain.launch import STOP_WORKER, StopRequest
from fsdptrain.machine import disk_facts, disk_problems
from fsdptrain.model import long_positions
from fsdptrain.nonfinite import find_sources
from fsdptrain.optim import learning_rate, make_optimizer, set_step, start_state
from fsdptrain.ownership import sweep
from fsdptrain.pace import Pace
from fsdptrain.plan import Plan, read_plan
from fsdptrain.preflight import load_checked
from fsdptrain.pulse import Pulse
from fsdptrain.report import Reporter, Screen
from fsdptrain.rundir import RunDir
from fsdptrain.shard import build
from fsdptrain.watchdog import Watchdog
from fsdptrain.weights import allocate, check_replicas, draw_weights, read_weights

GC_EVERY = 500  # steps


@dataclass
class Run:
    """The assembled rooms of one rank."""

    plan: Plan
    world: World
    engine: Engine
    stream: Stream
    held_out: list[int]
    eval_corpus: Corpus
    checkpointer: Checkpointer
    reporter: Reporter
    stop: StopRequest
    total_steps: int
    flops_per_step: float
    peak_flops: float
    watchdog: Watchdog
    state_bytes: int  # of this rank's part of a checkpoint
    pace: Pace = field(default_factory=Pace)
    tokens: int = 0  # label tokens, positions and seconds of this process's steps so far
    positions: int = 0
    seconds: float = 0.0
    skipped: int = 0  # steps in a row that were not finite

    def stops(self) -> bool:
        """Whether any rank was asked to stop; collective."""
        return self.world.any(self.stop.count)


def train(plan: Plan, stop: StopRequest, screen: Screen | None) -> None:
    """Run the plan on this rank. Raises Stopped when a stop signal ended it, another FsdptrainError when it failed."""
    rundir, rank = RunDir(Path(plan.run_dir)), int(os.environ["RANK"])
    with (
        Watchdog(plan, rank) as watchdog,
        contextlib.closing(reporter_of(plan, rundir, rank, screen)) as reporter,
    ):
        try:
            run, bare = assemble(plan, rundir, reporter, stop, watchdog)
        except Stopped:
            reporter.event("stop", step=0, signal=stop.name or "another rank")
            raise
        stopped = loop(run)
        if stopped is None and plan.recipe.export.at_end:
            stopped = export(run, bare)
        if stopped is not None:
            reporter.event("stop", step=stopped, signal=stop.name or "another rank")
            raise Stopped(f"stopped by {stop.by or 'another rank'} after step {stopped}, with a checkpoint")


def reporter_of(plan: Plan, rundir: RunDir, rank: int, screen: Screen | None) -> Reporter:
    """The pen of the first rank; the others' do nothing."""
    return Reporter(rundir, plan.recipe.log.tensorboard, screen) if rank == 0 else Reporter(None)


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


def assemble(plan: Plan, rundir: RunDir, reporter: Reporter, stop: StopRequest, watchdog: Watchdog) -> tuple[Run, Any]:
    """Build every room in order; returns the run and an unsharded skeleton of its model.

    Data comes first, before any process group exists: tokenising may take longer than a collective may.
    """

    def progress(stage: str, done: int, total: int) -> None:
        if dist.is_initialized():
            watchdog.beat()
        if stop.count:
            raise Stopped(f"stopped by {stop.by} before the first step; nothing was lost")
        reporter.progress(stage, done, total)

    recipe = plan.recipe
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    spare_retries(plan, progress)
    progress("checking the model", 0, 0)
    with Pulse(plan, lambda words: leave(plan, WorkerLost(words))):
        settled = pinned(plan, rundir)
        tokenizer, ready = load_checked(settled, progress)
        config, bare = ready.config, ready.bare
        counting = long_positions(config, recipe.data.seq_len) is None
        stream, held_out, eval_corpus = prepare(settled, tokenizer, progress, counting)
        if plan.pretrained:
            progress(f"looking for the weights of {plan.recipe.model.id}", 0, 0)
            checkpoint_files(plan)  # downloads, if it must, while nobody waits in a collective
        progress("building the model", 0, 0)
        world = World.start(plan, stop)
    watchdog.beat()
    world.agree((ready.plan.digest(), len(stream), stream.corpus.fingerprint), "the plan or the data")
    if world.rank == 0:
        sweep(rundir)

    content = {"data.content": stream.corpus.fingerprint, "model.tokenizer.content": tokenizer_digest(tokenizer)}
    checkpointer = Checkpointer(rundir, plan, world, content, reporter.event)
    checkpointer.refuse_another_run()
    if world.rank == 0:
        save_assets(plan, config, bare, tokenizer, rundir.model)
    baseline = world.peak_memory()
    model, units = build(ready.plan, config, world)  # with the kernel that `attn_implementation: auto` stands for
    home = torch.device("cpu") if recipe.fsdp.cpu_offload else world.device

    total_steps = plan.total_steps(len(stream))
    params = sum(param.numel() for param in bare.parameters())
    newest = checkpointer.newest_step()
    if newest > total_steps:
        raise RecipeError(fewer_steps(newest, total_steps))
    if newest < total_steps:  # asked now, not after hours of training
        short = disk_problems(plan, disk_facts(plan, params, total_steps)) if world.rank == 0 else iter(())
        checkpointer.all_or_none(next(short, None))
    state_bytes = 3 * params * getattr(torch, recipe.model.dtype).itemsize // plan.shard_size
    watchdog.beat(disk_bytes=2 * state_bytes)  # to verify a checkpoint, and to read it
    if checkpointer.newest_step():
        reporter.progress("reading the checkpoint", 0, 0)
    optimizer, resumed = fill(model, bare, plan, rundir, home, checkpointer, stop, progress)
    check_replicas(model, world)
    watchdog.beat()
    facts = start_facts(ready.plan, world, stream, params, len(units), total_steps)
    reporter.event("start", **facts, baseline_memory_bytes=baseline)
    if world.rank == 0:
        reporter.resume(resumed, changes_since(rundir, resumed, plan))
    print(f"the first sequence, trained parts in ⟦ ⟧:\n{stream.corpus.show(tokenizer)}\n", flush=True)

    engine = Engine(model, optimizer, world, plan, resumed, watchdog.beat)
    tokens = recipe.train.global_batch_size * recipe.data.seq_len
    run = Run(
        plan, world, engine, stream, held_out, eval_corpus, checkpointer, reporter, stop, total_steps,
        flops_per_step=model_flops(bare, tokens, recipe.data.seq_len),
        peak_flops=world.size * world.peak_flops(getattr(torch, recipe.fsdp.mixed_precision.param_dtype)),
        watchdog=watchdog, state_bytes=state_bytes,
    )  # fmt: skip
    return run, bare


def fill(
    model: Any,
    bare: Any,
    plan: Plan,
    rundir: RunDir,
    home: torch.device,
    checkpointer: Checkpointer,
    stop: StopRequest,
    progress: Any,
) -> tuple[torch.optim.AdamW, int]:
    """Weights and optimizer state: from the newest checkpoint, else the pretrained files, else drawn from the seed.

    Returns the optimizer and the number of steps already made. Raises Stopped, on every rank, when one was asked to.
    """
    resuming = bool(checkpointer.newest_step())
    try:
        if resuming or not plan.pretrained:
            allocate(model, home)
        if not resuming and plan.pretrained:
            read_weights(model, bare, plan, home, progress)
        elif not resuming:
            draw_weights(model, bare, plan.recipe, progress)
    except Exception:  # libraries wrap our Stopped in errors of theirs
        if not stop.count:
            raise
    heard = checkpointer.world.any(stop.count)
    if not heard:
        optimizer = make_optimizer(model, plan.recipe.optim)
        start_state(optimizer)
        step = checkpointer.load_newest(model, optimizer) if resuming else 0
        set_step(optimizer, step)
        heard = checkpointer.world.any(stop.count)
    if heard:
        raise Stopped("stopped before the first step; nothing was lost")
    return optimizer, step


def start_facts(plan: Plan, world: World, stream: Stream, params: int, units: int, total_steps: int) -> dict[str, Any]:
    """The `start` event: what is trained on what."""
    notes = stream.corpus.notes
    said = {
        "cut": "rows were cut at {} tokens", "split": "rows were split into pieces of {} tokens",
        "dropped": "rows were dropped: no trained token within {} tokens",
        "divided": "texts were split: the last part is held out for evaluation",
    }  # fmt: skip
    return {
        "parameters": params,
        "units": units,
        "strategy": plan.recipe.fsdp.strategy,
        "attention": plan.recipe.model.attn_implementation,
        "world_size": world.size,
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
        "device_memory_bytes": world.device_memory(),
        "total_steps": total_steps,
        "blocks": len(stream),
        "seq_len": plan.recipe.data.seq_len,
        "fill": stream.corpus.fill(),
        "data": notes,
        "data_notes": [f"{notes[k]:,} {text.format(stream.corpus.seq_len)}" for k, text in said.items() if notes[k]],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


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


def quiet_libraries() -> None:
    """Keep transformers' bars out of the log: loading has a bar of ours."""
    transformers.utils.logging.disable_progress_bar()


def work(plan: Plan) -> None:
    """Be one rank, and leave the process with the right exit code.

    Leaves by `os._exit`: an interpreter that shuts down after FSDP and gloo aborts now and then (pytorch#179291).
    """
    faulthandler.enable()
    quiet_libraries()
    joined = plan.topology.joined
    code = 0
    try:
        with StopRequest(*(() if joined else (STOP_WORKER,))) as stop:
            if joined and os.environ["RANK"] == "0":
                with Screen() as screen:
                    started = time.monotonic()
                    train(plan, stop, screen)
                    screen.summary(time.monotonic() - started)
            else:
                train(plan, stop, None)
    except Stopped as stopped:
        print(f"fsdptrain: {stopped}", file=sys.stderr)
        code = stopped.exit_code if joined else 0  # to torchrun, a worker that did what it was told has not failed
    except BaseException as error:
        ending = ours(error)
        with contextlib.suppress(OSError):  # a full disk must not hide why we end
            record_failure(plan, ending)
            traceback.print_exc()
        code = ending.exit_code
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ours(error: BaseException) -> FsdptrainError:
    """Any exception as one of ours: what came of other ranks' silence, what came of a full disk, and the rest."""
    if isinstance(error, FsdptrainError):
        return error
    words = f"{type(error).__name__}: {error}"
    if is_disk_full(error):
        return CheckpointError(f"no space: {error}")
    if isinstance(error, (dist.DistError, torch.AcceleratorError)) or "gloo/transport" in str(error):
        return WorkerLost(words)
    return WorkerError(words)


def leave(plan: Plan, error: FsdptrainError) -> None:
    """End this process for an error that a thread has found."""
    with contextlib.suppress(OSError):
        record_failure(plan, error)
    os._exit(error.exit_code)


def leave_record(error: FsdptrainError) -> None:
    """Leave the error where torchrun's agent looks for it.

    In one piece: the agent may end us while we write, and torchrun fails over half a file.
    """
    words, stack, now = to_record(error), shortened(traceback.format_exc(), LONGEST), time.time()
    record = {"py_callstack": stack, "timestamp": str(int(now)), **words, "traceback": stack, "at": now}
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        aside = Path(f"{path}.tmp")
        aside.write_text(json.dumps({"message": {"message": words["message"], "extraInfo": record}}), encoding="utf-8")
        aside.replace(path)


def record_failure(plan: Plan, error: FsdptrainError) -> None:
    """Leave the error where torchrun's agent looks for it, and an `error` event in the metrics."""
    leave_record(error)
    with contextlib.closing(Reporter(RunDir(Path(plan.run_dir)))) as reporter:
        reporter.event("error", rank=int(os.environ["RANK"]), **to_record(error))


def main() -> None:
    """Be one rank of the plan that the agent names, with the output in a file of its own."""
    try:
        plan = read_plan(Path(sys.argv[1]))
    except RecipeError as error:
        leave_record(error)
        sys.exit(error.exit_code)
    log = RunDir(Path(plan.run_dir)).rank_log(int(os.environ["RANK"]))
    with log.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    work(plan)
