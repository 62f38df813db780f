"""Assemble one rank: data, world, model, weights, optimizer, engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers

from fsdptrain.checkpoint.disk import disk_facts, disk_problems
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.config.plan import Plan
from fsdptrain.data.commits import pin_commits
from fsdptrain.data.corpus import Corpus, Stream, prepare
from fsdptrain.data.hub import go_offline_if_unreachable, safetensors_files
from fsdptrain.data.tokenizer import tokenizer_digest
from fsdptrain.errors import RecipeError, Stopped, WorkerLost
from fsdptrain.events import Reporter
from fsdptrain.launch.attempts import changes_since, too_few_steps
from fsdptrain.model.assets import save_assets
from fsdptrain.model.config import long_positions
from fsdptrain.model.flops import model_flops
from fsdptrain.model.init import draw_weights
from fsdptrain.model.weights import allocate, read_weights
from fsdptrain.ownership import remove_leftovers
from fsdptrain.parallel.pulse import Pulse
from fsdptrain.parallel.replicas import check_replicas
from fsdptrain.parallel.shard import build
from fsdptrain.parallel.world import World
from fsdptrain.processes import StopRequest
from fsdptrain.rundir import RunDir
from fsdptrain.train.failure import leave
from fsdptrain.train.optim import make_optimizer, set_step, start_state
from fsdptrain.train.preflight import load_checked
from fsdptrain.train.step import Engine
from fsdptrain.train.stragglers import Pace
from fsdptrain.train.watchdog import Watchdog


@dataclass
class Run:
    """Everything that one rank trains with."""

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
    go_offline_if_unreachable(plan, progress)
    progress("checking the model", 0, 0)
    with Pulse(plan, lambda words: leave(plan, WorkerLost(words))):
        settled = pin_commits(plan, rundir)
        tokenizer, ready = load_checked(settled, progress)
        config, bare = ready.config, ready.bare
        counting = long_positions(config, recipe.data.seq_len) is None
        stream, held_out, eval_corpus = prepare(settled, tokenizer, progress, counting)
        if plan.pretrained:
            progress(f"looking for the weights of {plan.recipe.model.id}", 0, 0)
            safetensors_files(plan)  # downloads, if it must, while nobody waits in a collective
        progress("building the model", 0, 0)
        world = World.start(plan, stop)
    watchdog.beat()
    world.agree((ready.plan.digest(), len(stream), stream.corpus.fingerprint), "the plan or the data")
    if world.rank == 0:
        remove_leftovers(rundir)

    content = {"data.content": stream.corpus.fingerprint, "model.tokenizer.content": tokenizer_digest(tokenizer)}
    checkpointer = Checkpointer(rundir, plan, world, content, reporter.event)
    checkpointer.reject_another_run()
    if world.rank == 0:
        save_assets(plan, config, bare, tokenizer, rundir.model)
    baseline = world.peak_memory()
    model, units = build(ready.plan, config, world)  # with the kernel that `attn_implementation: auto` stands for
    home = torch.device("cpu") if recipe.fsdp.cpu_offload else world.device

    total_steps = plan.total_steps(len(stream))
    params = sum(param.numel() for param in bare.parameters())
    newest = checkpointer.newest_step()
    if newest > total_steps:
        raise RecipeError(too_few_steps(newest, total_steps))
    if newest < total_steps:  # asked now, not after hours of training
        short = disk_problems(plan, disk_facts(plan, params, total_steps)) if world.rank == 0 else iter(())
        checkpointer.raise_on_every_rank(next(short, None))
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
        "divided": "text was divided: its last part is held out for evaluation",
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
