"""One rank of a run: assembles the rooms, and holds the only loop.

plan → data → world → model → shard → weights → engine → resume;
while steps remain: evaluate? save? done? step → report.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fsdptrain.checkpoint import Checkpointer, sweep
from fsdptrain.data import Corpus, Stream, prepare, tokenizer_digest
from fsdptrain.dist import World
from fsdptrain.engine import Engine, StepStats, model_flops
from fsdptrain.errors import FsdptrainError, NonFiniteError, RecipeError, Stopped, WorkerError, to_record
from fsdptrain.export import export_live
from fsdptrain.hub import checkpoint_files
from fsdptrain.launch import STOP_WORKER, StopRequest, die_with_parent
from fsdptrain.machine import disk_facts, disk_problems
from fsdptrain.model import load_config, save_assets, skeleton
from fsdptrain.optim import learning_rate, make_optimizer, set_step, start_state
from fsdptrain.plan import Plan
from fsdptrain.report import Reporter, Screen
from fsdptrain.rundir import RunDir
from fsdptrain.shard import build
from fsdptrain.tokenizer import load_tokenizer
from fsdptrain.weights import allocate, draw_weights, read_weights

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
    tokens: int = 0  # label tokens and seconds of this process's steps so far
    seconds: float = 0.0


def train(plan: Plan, stop: StopRequest, screen: Screen | None) -> None:
    """Run the plan on this rank. Raises Stopped when a stop signal ended it, another FsdptrainError when it failed."""
    rundir = RunDir(Path(plan.run_dir))
    writer = os.environ["RANK"] == "0"
    with contextlib.closing(
        Reporter(rundir if writer else None, plan.recipe.log.tensorboard, screen if writer else None)
    ) as reporter:
        try:
            run, bare = assemble(plan, rundir, reporter, stop)
        except Stopped:
            reporter.event("stop", step=0, signal=stop.name)
            raise
        try:
            stopped = loop(run)
        except NonFiniteError:  # raised by every rank; a good checkpoint may still be on its way to the disk
            run.checkpointer.wait()
            raise
        if stopped is not None:
            reporter.event("stop", step=stopped, signal=stop.name or "another rank")
            raise Stopped(f"stopped by {stop.name or 'another rank'} after step {stopped}, checkpoint saved")
        if plan.recipe.export.at_end:
            export_live(run.engine.model, bare, rundir, plan, run.checkpointer, reporter)


def assemble(plan: Plan, rundir: RunDir, reporter: Reporter, stop: StopRequest) -> tuple[Run, Any]:
    """Build every room in order; returns the run and an unsharded skeleton of its model.

    Data comes first, before any process group exists: tokenising may take longer than a collective may.
    """

    def progress(stage: str, done: int, total: int) -> None:
        if stop.count and not dist.is_initialized():  # from then on all ranks must agree, as they do at every step
            raise Stopped(f"stopped by {stop.name} before the first step; nothing was lost")
        reporter.progress(stage, done, total)

    recipe = plan.recipe
    if recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    tokenizer = load_tokenizer(plan, progress)
    stream, held_out, eval_corpus = prepare(plan, tokenizer, progress)
    config = load_config(plan, len(tokenizer))
    if plan.pretrained:
        checkpoint_files(plan)  # downloads, if it must, while nobody waits in a collective
    world = World.start(plan)
    world.agree((plan.digest(), len(stream), stream.corpus.fingerprint), "the plan or the data")
    if world.rank == 0:
        sweep(rundir)

    content = {"data.content": stream.corpus.fingerprint, "model.tokenizer.content": tokenizer_digest(tokenizer)}
    checkpointer = Checkpointer(rundir, plan, world, content, lambda facts: reporter.event("save", **facts))
    checkpointer.refuse_another_run()
    bare = skeleton(config, recipe.model)
    if world.rank == 0:
        save_assets(plan, config, bare, tokenizer, rundir.model)
    baseline = world.peak_memory()
    model, units = build(plan, config, world)
    home = torch.device("cpu") if recipe.fsdp.cpu_offload else world.device

    total_steps = plan.total_steps(len(stream))
    params = sum(param.numel() for param in bare.parameters())
    if checkpointer.newest_step() < total_steps:  # asked now, not after hours of training
        short = disk_problems(plan, disk_facts(plan, params, total_steps)) if world.rank == 0 else iter(())
        checkpointer.all_or_none(next(short, None))
    optimizer, resumed = fill(model, bare, plan, rundir, home, checkpointer, progress)
    world.barrier()  # on the patient group: one rank's disk may be much slower than another's
    facts = start_facts(plan, world, stream, params, len(units), total_steps)
    reporter.event("start", **facts, baseline_memory_bytes=baseline)
    if resumed:
        reporter.event("resume", step=resumed)
    print(f"the first sequence, trained parts in ⟦ ⟧:\n{stream.corpus.show(tokenizer)}\n", flush=True)

    engine = Engine(model, optimizer, world, plan, resumed)
    if recipe.data.packing != "none" and not engine.documents_are_apart():
        raise RecipeError(
            f"data.packing: {recipe.data.packing} would let the documents of a block see one another: "
            f"{type(bare).__name__} ignores position ids with {recipe.model.attn_implementation}; use none"
        )
    tokens = recipe.train.global_batch_size * recipe.data.seq_len
    run = Run(
        plan, world, engine, stream, held_out, eval_corpus, checkpointer, reporter, stop, total_steps,
        flops_per_step=model_flops(bare, tokens, recipe.data.seq_len),
        peak_flops=world.size * world.peak_flops(getattr(torch, recipe.fsdp.mixed_precision.param_dtype)),
    )  # fmt: skip
    return run, bare


def fill(
    model: Any, bare: Any, plan: Plan, rundir: RunDir, home: torch.device, checkpointer: Checkpointer, progress: Any
) -> tuple[torch.optim.AdamW, int]:
    """Weights and optimizer state: from the newest checkpoint, else the pretrained files, else drawn from the seed.

    Returns the optimizer and the number of steps already made.
    """
    resuming = bool(checkpointer.newest_step())
    if resuming or not plan.pretrained:
        allocate(model, home)
    if not resuming and plan.pretrained:
        read_weights(model, bare, plan, home, progress)
    elif not resuming:
        draw_weights(model, bare, plan.recipe.seed, progress)
    optimizer = make_optimizer(model, plan.recipe.optim)
    start_state(optimizer)
    step = checkpointer.load_newest(model, optimizer) if resuming else 0
    set_step(optimizer, step)
    return optimizer, step


def start_facts(plan: Plan, world: World, stream: Stream, params: int, units: int, total_steps: int) -> dict[str, Any]:
    """The `start` event: what is trained on what."""
    notes = stream.corpus.notes
    said = {
        "cut": "rows were cut at {} tokens", "split": "rows were split into pieces of {} tokens",
        "dropped": "rows were dropped: no trained token within {} tokens",
        "untrained turns": "assistant turns are not trained: the chat template rewrites them once a later turn follows",
    }  # fmt: skip
    return {
        "parameters": params,
        "units": units,
        "strategy": plan.recipe.fsdp.strategy,
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
        if done > resumed and run.held_out and (last or due(done, recipe.eval.every)):
            evaluate(run, done)
        if done > resumed and (last or stop or due(done, recipe.checkpoint.every)):
            wait = last or stop or not recipe.checkpoint.async_
            run.checkpointer.save(done, run.engine.model, run.engine.optimizer, wait)
            gc.collect()
        if last or stop:
            break
        stats = one_step(run, done)
        done, stop = done + 1, stats.stop
        if done % GC_EVERY == 0:
            gc.collect()
    gc.enable()
    run.checkpointer.wait()
    return None if last else done


def due(done: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after `done` of them."""
    return every is not None and done % every == 0


def one_step(run: Run, step: int) -> StepStats:
    """Fetch this rank's micro-batches, make the step, and report it."""
    started = time.perf_counter()
    positions = run.plan.step_positions(step)
    batches = [run.stream.batch(micro) for micro in run.plan.micro_batches(step, run.world.rank)]
    label_tokens = run.stream.label_tokens(positions)
    data_s = time.perf_counter() - started
    lr = learning_rate(step, run.total_steps, run.plan.recipe.optim, run.plan.recipe.schedule)
    stats = run.engine.step(step, batches, label_tokens, lr, bool(run.stop.count), data_s)
    run.tokens, run.seconds = run.tokens + label_tokens, run.seconds + stats.step_s
    if due(step + 1, run.plan.recipe.log.every) or step + 1 == run.total_steps:
        run.reporter.event(
            "step",
            step=step + 1,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            tokens=label_tokens,
            tokens_per_s=label_tokens / stats.step_s,
            mfu=run.flops_per_step / (stats.step_s * run.peak_flops),
            step_s=stats.step_s,
            data_s=stats.data_s,
            peak_memory_bytes=stats.peak_memory,
            samples=run.stream.digest(positions),
            total_tokens=run.tokens,
            total_s=run.seconds,
        )
    return stats


def evaluate(run: Run, done: int) -> None:
    """Report the loss over all held-out blocks."""
    loss, tokens = run.engine.evaluate(run.eval_corpus, run.held_out)
    run.reporter.event("eval", step=done, loss=loss, perplexity=math.exp(min(loss, 700.0)), tokens=tokens)


def quiet_libraries() -> None:
    """Keep transformers' bars out of the log: loading has a bar of ours."""
    transformers.utils.logging.disable_progress_bar()


def work(plan: Plan) -> None:
    """Be one rank, and leave the process with the right exit code.

    Leaves by `os._exit`: an interpreter that shuts down after FSDP and gloo aborts now and then (pytorch#179291).
    """
    handler = get_error_handler()
    handler.initialize()
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
        traceback.print_exc()
        with contextlib.suppress(OSError):  # a full disk must not hide why we end
            record_failure(plan, error)
        code = error.exit_code if isinstance(error, FsdptrainError) else WorkerError.exit_code
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def record_failure(plan: Plan, error: BaseException) -> None:
    """Leave the error where torchrun's agent looks for it, and an `error` event in the metrics."""
    get_error_handler().record_exception(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    record = {**to_record(error), "traceback": traceback.format_exc(), "at": time.time()}
    if path and Path(path).is_file():
        import json

        written = json.loads(Path(path).read_text())
        written["message"]["extraInfo"] |= record
        Path(path).write_text(json.dumps(written))
    with contextlib.closing(Reporter(RunDir(Path(plan.run_dir)))) as reporter:
        reporter.event("error", rank=int(os.environ["RANK"]), **to_record(error))


def main() -> None:
    """`python -m fsdptrain.worker PLAN`, started by the agent: one rank, with its output in a file of its own."""
    die_with_parent()
    plan = Plan.from_json(Path(sys.argv[1]).read_text())
    log = RunDir(Path(plan.run_dir)).rank_log(int(os.environ["RANK"]))
    with log.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    work(plan)


if __name__ == "__main__":
    main()
