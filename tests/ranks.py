"""Jobs that run on every rank of a real gloo process group (see `support.on_ranks`). Their results are JSON."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from reference import OPTIMIZERS, library_optimizers
from safetensors import safe_open
from strict import be_strict, compare_ranks
from support import as_nobody, events
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.checkpoint import load as loading
from fsdptrain.checkpoint.export import export_live
from fsdptrain.checkpoint.shards import named_parts, shards_of
from fsdptrain.config.optimizers import padded_columns
from fsdptrain.config.reader import load
from fsdptrain.config.schedule import learning_rate
from fsdptrain.errors import CheckpointError, FsdptrainError, NonFiniteError, RecipeError, WorkerLost
from fsdptrain.failures.explain import hung_ranks
from fsdptrain.failures.watchdog import Watchdog
from fsdptrain.model import attention, loss, nf4, varlen, weights
from fsdptrain.model.parameters import weights_of
from fsdptrain.model.skeleton import init_groups, initial_weights, skeleton
from fsdptrain.model.units import base_name, decoder_layers
from fsdptrain.parallel import shard
from fsdptrain.parallel.patches import ISSUED, named, recorded_collectives
from fsdptrain.parallel.world import HostCopy, World
from fsdptrain.plan.plan import make_plan, varied
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest
from fsdptrain.run_folder.ownership import read_export_record
from fsdptrain.run_folder.storage import open_storage
from fsdptrain.train import loss_scale, stops, trainer
from fsdptrain.train import step as engine_module
from fsdptrain.train.nonfinite import find_sources
from fsdptrain.train.optim import make_optimizer, set_step, start_state
from fsdptrain.train.prefetch import batches_of
from fsdptrain.train.setup import Session
from fsdptrain.train.trainer import Trainer
from fsdptrain.train.worker import reporter_of

loss_chunks = loss.loss_chunks
answer_log_probs = engine_module.Engine.answer_log_probs


def flops(recipe: str, overrides: list[str]) -> list[float]:
    """Train to the end; return the FLOPs of each step that its MFU counts."""
    run = build(recipe, overrides)
    run.train()
    return [event["mfu"] * event["step_s"] * run.peak_flops for event in events(run.session.rundir.root, "step")]


def build(recipe: str, overrides: list[str]) -> Trainer:
    """Set up the trainer of a recipe on this process group."""
    written = load(Path(recipe), overrides)
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    plan = dataclasses.replace(plan, threads=1)  # more would only wait for one another
    rank = int(os.environ["RANK"])
    plan.rundir.root.mkdir(parents=True, exist_ok=True)  # as the command does
    reporter, watchdog = reporter_of(plan, rank, None), Watchdog(plan, rank)
    return Trainer.set_up(Session(plan, reporter, StopRequest(), watchdog))


def curve(run: Trainer, steps: int, first: int = 0) -> list[list[float]]:
    """Make the steps from `first` to `steps`; return [loss, gradient norm] of each."""
    made = []
    for step in range(first, steps):
        batches = batches_of(run.plan, run.stream, step, run.world.rank)
        divisor = run.stream.divisor(run.plan.step_positions(step))
        lr = learning_rate(step, run.sizes.total_steps, run.plan.recipe.optim, run.plan.recipe.schedule)
        [stats] = run.engine.read([run.engine.step(step, batches, divisor, lr)])
        made.append([stats.loss, stats.grad_norm, *stats.measures.values()])
    return made


def evaluated(run: Trainer) -> dict[str, Any]:
    """Return the fields of the event of an evaluation."""
    with patch.object(run.reporter, "event") as event:
        run.evaluate(0)
    return dict(event.call_args.kwargs)


def preferences_resumed(recipe: str, overrides: list[str], emptied: str) -> dict[str, Any]:
    """Return the curve of a run that learns from preferences, and of its resume; `emptied` is a folder for caches.

    `passes` counts those over data sets: of the run, of another one with the same start, and of the resume without the
    cache. `refused` is the message of a resume in which the run's file is damaged.
    """
    with patch.object(engine_module.Engine, "answer_log_probs", autospec=True, side_effect=answer_log_probs) as passes:
        os.environ["FSDPTRAIN_CACHE"] = f"{emptied}/first"
        own = [*overrides, f"output_dir={emptied}/own"]
        run = build(recipe, own)
        made = curve(run, 2)
        run.checkpointer.save(2, run.engine.model, run.engine.optimizer, wait=True)
        made += curve(run, 4, 2)
        held_out = evaluated(run)
        kept = run.session.rundir.reference
        calls = [passes.call_count]
        other = build(recipe, [*overrides, f"output_dir={emptied}/run", "train.dpo.beta=0.2"])
        both = zip(other.stream.corpus.parts, run.stream.corpus.parts, strict=True)
        assert all((one.reference == another.reference).all() for one, another in both)
        calls.append(passes.call_count)
        os.environ["FSDPTRAIN_CACHE"] = f"{emptied}/second"  # as on another host
        resumed = build(recipe, own)
        rest = curve(resumed, 4, resumed.engine.steps_made)
        again = evaluated(resumed)
        calls.append(passes.call_count)
    next(kept.glob("*.npy")).write_bytes(b"x")
    try:
        refused = build(recipe, own).plan.run_dir
    except CheckpointError as error:
        refused = str(error)
    return {"curve": made, "resumed": rest, "held out": [held_out, again], "passes": calls, "refused": refused}


def first_steps(recipe: str, variants: dict[str, list[str]], shifts: dict[str, float]) -> dict[str, str]:
    """Make the first step of each variant, after its reference was shifted; return what it raises, or an empty text."""
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, [*overrides, f"name={name}"])
        for part in run.stream.corpus.parts:
            part.reference[:] += shifts.get(name, 0.0)
        try:
            run.step(0)
            found[name] = ""
        except CheckpointError as error:
            found[name] = str(error)
        run.prefetch.close()
    return found


def curves(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Return the curve of each variant (name → overrides)."""
    return {name: curve(build(recipe, overrides), steps) for name, overrides in variants.items()}


def shared_rows(recipe: str, variants: dict[str, list[str]], steps: int, compiled: str = "") -> dict[str, Any]:
    """Return of each variant the held-out loss, the curve, and the logits with which an export is compared.

    `compiled` is the backend of what is compiled. Of a refused variant it is the message.
    """
    found: dict[str, Any] = {}
    for name, overrides in variants.items():
        with patch.object(torch, "compile", functools.partial(torch.compile, backend=compiled or "inductor")):
            try:
                run = build(recipe, overrides)
            except RecipeError as error:
                found[name] = {"refused": str(error)}
                continue
            loss, *_ = run.engine.evaluate(run.inputs.eval_corpus, run.inputs.held_out) or (float("nan"), 0)
            logits = [row[:8].sum(0).tolist() for row in run.sample().logits]  # of the first rank
            found[name] = {"evaluation": loss, "curve": curve(run, steps), "logits": logits}
    return found


def adapted(recipe: str, variants: dict[str, list[str]], steps: int, made: str) -> dict[str, Any]:
    """Train adapters; return of each variant the curve, dtypes, and what became of the base.

    `unchanged`: whether it is what it was before, bit for bit; `as in the file`: whether it is as in the file. `made`
    is the folder for what `observed_curve` writes, in a file of each variant.
    """
    found = {}
    for number, (name, overrides) in enumerate(variants.items()):
        run = build(recipe, overrides)
        params = dict(run.engine.model.named_parameters())
        base = {n: p for n, p in params.items() if not p.requires_grad}
        before = {n: local(p.detach()).clone() for n, p in base.items()}
        reached = observed_curve(run, steps, Path(made) / f"{number}.pt")
        whole = {base_name(n).removeprefix("transformer."): gathered_whole(p.detach()) for n, p in base.items()}
        with safe_open(Path(run.plan.recipe.model.id) / "model.safetensors", framework="pt") as file:
            keys = {key.removeprefix("transformer."): key for key in file.keys() if "experts" not in key}  # noqa: SIM118
            found[name] = {
                "curve": reached,
                "unchanged": all(torch.equal(before[n], local(p.detach())) for n, p in base.items()),
                "as in the file": all(
                    torch.equal(whole[n], file.get_tensor(key).to(whole[n].dtype))
                    for n, key in keys.items()
                    if n in whole
                ),
                "base": sorted({str(p.dtype) for p in base.values()}),
                "copied": copied(run.engine.model),
                "trained": sorted({str(p.dtype) for p in params.values() if p.requires_grad}),
            }
    return found


def copied(model: Any) -> list[str]:
    """Return the parameters of a sharded model that take other memory than their shards while they are gathered."""
    shards = {name: local(param.detach()).data_ptr() for name, param in model.named_parameters()}
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    found = [name for name, param in model.named_parameters() if param.data_ptr() != shards[name]]
    for unit in units:
        unit.reshard()
    return found


def observed_curve(run: Trainer, steps: int, path: Path) -> list[list[float]]:
    """Make some steps; return their curve. Rank 0 writes what is trained, whole, to a file.

    The file has dictionaries by parameter: `start` and `end`, the values before the first step and after the last, and
    `gradients`, those of the batches of step 0 with the values at the end, without clipping.
    """
    trained = {name: param for name, param in run.engine.model.named_parameters() if param.requires_grad}
    start = {name: param.detach().full_tensor().clone() for name, param in trained.items()}
    reached = curve(run, steps)
    end = {name: param.detach().full_tensor() for name, param in trained.items()}
    gradients = gradients_of(run, 0)
    if run.world.rank == 0:
        torch.save({"start": start, "end": end, "gradients": gradients}, path)
    return reached


def gradients_of(run: Trainer, step: int) -> dict[str, torch.Tensor]:
    """Return the whole gradient of every trained parameter for the batches of a step, which is not made."""
    batches = batches_of(run.plan, run.stream, step, run.world.rank)
    run.engine.accumulate(step, batches, run.stream.label_tokens(run.plan.step_positions(step)))
    params = run.engine.model.named_parameters()
    found = {name: param.grad.full_tensor() for name, param in params if param.requires_grad}
    run.engine.drop_gradients()
    return found


def quantised(recipe: str, variants: dict[str, list[str]], steps: int, made: str) -> dict[str, Any]:
    """Train adapters beside quantised weights; return of each variant the curve and what became of the weights.

    `as bitsandbytes`: whether every quantised weight, gathered, is what bitsandbytes makes of the whole tensor of the
    file, bit for bit. `unchanged`: whether all frozen bytes are the same after training. `gathered`: the bytes of the
    gathers of a step. With `export.adapter: both` the model is exported. `made` is the folder for what
    `observed_curve` writes, in a file of each variant.
    """
    from bitsandbytes import functional

    found, gather = {}, DefaultAllGather.__call__
    for number, (name, overrides) in enumerate(variants.items()):
        run = build(recipe, overrides)
        model, same, count = run.engine.model, True, 0
        compute = getattr(torch, run.plan.recipe.fsdp.mixed_precision.param_dtype)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        before = [local(param.detach()).clone() for param in frozen]
        with safe_open(Path(run.plan.recipe.model.id) / "model.safetensors", framework="pt") as file:
            in_file = {key.removeprefix("transformer."): key for key in file.keys()}  # noqa: SIM118
            for layer_name, layer in model.named_modules():
                if isinstance(layer, nf4.NF4Linear):
                    key = in_file[base_name(f"{layer_name}.weight").removeprefix("transformer.")]
                    whole = file.get_tensor(key).to(compute)
                    whole = whole.T.contiguous() if layer.transposed else whole
                    packed, state = functional.quantize_4bit(whole, compress_statistics=True, quant_type="nf4")
                    weight, absmax, *buffers = layer.quantised
                    own = nf4.dequantise((gathered_whole(weight), gathered_whole(absmax), *buffers), compute)
                    same, count = same and torch.equal(own, functional.dequantize_4bit(packed, state)), count + 1
        gathered: list[int] = []

        def counted(
            comm: Any, output_tensor: torch.Tensor, *args: Any, gathered: list[int] = gathered, **options: Any
        ) -> Any:
            gathered.append(output_tensor.nbytes)
            return gather(comm, output_tensor, *args, **options)

        with patch.object(DefaultAllGather, "__call__", counted):
            reached = observed_curve(run, steps, Path(made) / f"{number}.pt")
        after = [local(param.detach()) for param in model.parameters() if not param.requires_grad]
        found[name] = {
            "curve": reached,
            "quantised": count,
            "as bitsandbytes": same,
            "unchanged": all(map(torch.equal, before, after)),
            "gathered": sum(gathered) / (steps + 1),  # the gradients of one more step are observed
            "copied": copied(model),
        }
        if run.plan.recipe.export.adapter == "both":
            assert run.export() is None
    return found


def masked_and_apart(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Return two curves of each variant, and evaluations after them: with masks, and in the varlen kernel."""
    found: dict[str, Any] = {}
    for name, overrides in variants.items():
        found[name] = []
        for reason in ("masks", None):
            with patch.object(attention, "obstacle", lambda *_, reason=reason: reason):
                run = build(recipe, overrides)
            assert varlen.used_by(run.engine.model) == (reason is None)
            made = curve(run, steps)
            found[name].append([*made, list(run.engine.evaluate(run.stream.corpus, range(7)) or ())[:2]])
    return found


def dropout(recipe: str) -> dict[str, Any]:
    """Return losses of one micro-batch, the same on all ranks: in training steps 0, 1 and 0, and in evaluations.

    `logits` says whether those that an export is compared with are the same when they are computed again; `drawn` are
    the first random numbers of steps 0 and 1.
    """
    run = build(recipe, [])
    batch = run.stream.batch([0])
    train = [run.engine.accumulate(step, [batch], 1).item() for step in (0, 1)]
    evaluations = [run.engine.evaluate(run.stream.corpus, [0, 1]) for _ in range(2)]
    logits = [run.sample().logits for _ in range(2)]
    train.append(run.engine.accumulate(0, [batch], 1).item())
    drawn = [(run.engine.seed(step), torch.rand(()).item())[1] for step in (0, 1)]
    return {"train": train, "evaluations": evaluations, "logits": all(map(torch.equal, *logits)), "drawn": drawn}


def stopped_in_evaluation(recipe: str, later: list[list[str]]) -> list[Any]:
    """Train until a signal comes in the evaluation after step 2; then go on with each of these overrides.

    Returns after each of them the number of steps at which it was stopped, if it was, and the steps that have a
    checkpoint, and those that have an evaluation.
    """
    run = build(recipe, [])
    on_progress, rundir = run.engine.on_progress, run.session.rundir

    def stopping() -> None:
        on_progress()
        if not run.engine.model.training and run.totals.tokens and not run.session.stop.count:
            os.kill(os.getpid(), signal.SIGTERM)

    run.engine.on_progress = stopping

    def state(run: Trainer) -> list[Any]:
        stopped = run.train()
        assert not run.checkpointer._staging, "an export needs the memory of the copies"
        return [stopped, rundir.checkpoint_steps(), [event["step"] for event in events(rundir.root, "eval")]]

    with run.session.stop:
        found = [state(run)]
    return found + [state(build(recipe, overrides)) for overrides in later]


def with_losses(recipe: str, attempts: list[tuple[list[str], list[float], int]]) -> list[Any]:
    """Train in attempts of these overrides, whose evaluations return these losses in turn; a save of that step fails.

    Returns after each of them the steps that have a checkpoint, that of the export, and those of early stops.
    """
    found = []
    for overrides, losses, fails_at in attempts:
        run = build(recipe, overrides)
        save, rundir, left = run.save, run.session.rundir, iter(losses)

        def failing(done: int, wait: bool, fails_at: int = fails_at, save: Any = save) -> bool:
            if done == fails_at:
                raise InterruptedError
            return bool(save(done, wait))

        def slowly(*arguments: Any, write: Any = run.checkpointer._write) -> Any:
            time.sleep(0.2 * dist.get_rank())  # the saves of ranks are at different places when a loss is no number
            return write(*arguments)

        run.save, run.engine.evaluate = failing, lambda *_, left=left: (next(left), 1, {})  # type: ignore[method-assign]
        run.checkpointer._write = slowly  # type: ignore[method-assign]
        exported = None
        with contextlib.suppress(InterruptedError):
            assert run.train() is None and run.export() is None and not [*left]
            exported = read_export_record(rundir).step
        run.checkpointer.wait()
        dist.barrier()
        early = [[event["step"], event.get("best")] for event in events(rundir.root, "early_stop")]
        found.append([rundir.checkpoint_steps(), exported, early])
        dist.barrier()
    print("CPU", time.process_time(), flush=True)
    return found


def world_of(recipe: str) -> dict[str, list[Any]]:
    """Return what every rank sees of a flag of the last rank, and of one that no rank has.

    Also the seconds after which collectives fail: of the group of all ranks, and of those of the mesh.
    """
    written = load(Path(recipe))
    world = World.start(make_plan(written, find_topology(written.recipe, dict(os.environ))), StopRequest())
    groups: list[Any] = [dist.group.WORLD, *world.mesh.get_all_groups()]
    limits = [group._get_backend(world.device).options._timeout.total_seconds() for group in groups]
    return {"flags": [world.any(world.rank == world.size - 1), world.any(0)], "limits": limits}


def in_float8(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Train each variant, resume it in the middle, and export it; return curves and a digest of the first weights.

    `start` is that digest, `curve` the whole curve, `resumed` its second half from the checkpoint in the middle.
    """
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        start, model = hashlib.sha256(), run.engine.model
        for param in model.parameters():
            start.update(param.detach().full_tensor().numpy().tobytes())
        made = curve(run, steps // 2)
        run.checkpointer.save(steps // 2, model, run.engine.optimizer, wait=True)
        made += curve(run, steps, steps // 2)
        resumed = build(recipe, overrides)
        rest = curve(resumed, steps, resumed.engine.steps_made)
        export_live(model, run.inputs.prepared.bare, run.plan, run.checkpointer, run.reporter, steps)
        found[name] = {"start": start.hexdigest(), "curve": made, "resumed": rest}
    return found


def save_between(recipe: str, overrides: list[str], at: int, steps: int) -> dict[str, Any]:
    """Save a checkpoint after `at` steps and continue; return the curve and the digests of the samples."""
    run = build(recipe, overrides)
    made = curve(run, at)
    run.engine.evaluate(run.stream.corpus, range(5))
    run.checkpointer.save(at, run.engine.model, run.engine.optimizer, wait=False)
    made += curve(run, steps, at)
    run.checkpointer.wait()
    return {"curve": made, "samples": [run.stream.digest(run.plan.step_positions(step)) for step in range(steps)]}


def resume(recipe: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """Resume from the newest checkpoint; return its step, the curve and the digests of the samples."""
    run = build(recipe, overrides)
    first = run.engine.steps_made
    samples = [run.stream.digest(run.plan.step_positions(step)) for step in range(first, steps)]
    return {"first": first, "curve": curve(run, steps, first), "samples": samples}


def resume_without_rights(recipe: str) -> dict[str, Any]:
    """Save steps 2 and 4, and resume when rank 1 may not read, and does not see, the newest checkpoint."""
    run, found = build(recipe, []), dict[str, Any]()
    checkpointer, model, optimizer = run.checkpointer, run.engine.model, run.engine.optimizer
    for step in (2, 4):
        curve(run, step, step - 2)
        checkpointer.save(step, model, optimizer, wait=True)
    folder = checkpointer.rundir.checkpoint(4)

    def refusal() -> str:
        try:
            return f"resumed from step {checkpointer.load_newest(model, optimizer)}"
        except CheckpointError as error:
            return str(error)

    if run.world.rank == 0:
        for path in (folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"):
            path.chmod(0)
    dist.barrier(run.world.side)
    with as_nobody() if run.world.rank == 1 else contextlib.nullcontext():
        found["unreadable"] = refusal()
    dist.barrier(run.world.side)
    if run.world.rank == 0:
        for path in folder.iterdir():
            path.chmod(0o644)
    dist.barrier(run.world.side)
    elsewhere = open_storage(None, checkpointer.rundir.root / "elsewhere")
    with patch.object(checkpointer, "storage", elsewhere if run.world.rank == 1 else checkpointer.storage):
        found["not mounted"] = refusal()
    found["resumed"] = checkpointer.load_newest(model, optimizer)
    found["names"] = sorted(path.name for path in checkpointer.rundir.checkpoints.iterdir())
    return found


def saved_optimizers(recipe: str, variants: dict[str, list[str]], at: int, steps: int) -> dict[str, Any]:
    """For each variant: save in the middle, go on, resume, and make a step that is not finite.

    Returns the whole `curve`, the curve `resumed`, the bytes of the checkpoint and those in the plan, and whether the
    step that was not finite left weights and state as they were.
    """
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        made = curve(run, at)
        run.checkpointer.save(at, run.engine.model, run.engine.optimizer, wait=True)
        made += curve(run, steps, at)
        files = sorted(run.checkpointer.rundir.checkpoint(at).glob("*.safetensors"))
        stored = 0
        for file in files:
            with safe_open(file, framework="pt") as opened:
                stored += sum(opened.get_tensor(key).nbytes for key in opened.keys())  # noqa: SIM118
        resumed = build(recipe, overrides)
        rest = curve(resumed, steps, resumed.engine.steps_made)
        before, whole = digest_of(resumed), resumed.engine.loss
        resumed.engine.loss = lambda *batch, whole=whole: whole(*batch) * float("nan")  # type: ignore[method-assign]
        for step in (steps, steps + 1):  # queued before the first is read, as on an accelerator
            batches = [resumed.stream.batch(micro) for micro in resumed.plan.micro_batches(step, resumed.world.rank)]
            resumed.engine.step(step, batches, 1, 1e-3)
            resumed.engine.loss = whole  # type: ignore[method-assign]
        planned = run.plan.state_bytes(weights_of(run.inputs.prepared.trained).values())
        found[name] = {
            "curve": made, "resumed": rest, "first": steps - len(rest), "stored": stored, "planned": planned,
            "unchanged": digest_of(resumed) == before,
        }  # fmt: skip
    return found


def resumes(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Resume each variant; return its curve."""
    return {name: resume(recipe, overrides, steps)["curve"] for name, overrides in variants.items()}


def saves(recipe: str, faults: list[str]) -> dict[str, Any]:
    """Save at steps 1, 2, …, each time with another fault of tests/broken_saves.py.

    Returns for each fault what was raised, what is in the folder then, and whether the save was reported. `at the
    start` is what a full disk raises before the first step, `resumed` the step that a resume takes up at the end.
    """
    import broken_saves as injected

    found: dict[str, Any] = {}
    # The full disk must be refused before any state is loaded, so `load_state` is not callable.
    with injected.disk_is_full_already(), patch.object(trainer, "load_state", None):
        try:
            build(recipe, [])
        except CheckpointError as refused:
            found["at the start"] = str(refused)
    run = build(recipe, [])
    curve(run, 1)
    reports: list[int] = []
    run.checkpointer.write_event = lambda _, **fields: reports.append(fields["step"])
    folder = run.checkpointer.rundir.checkpoints
    for step, name in enumerate(faults, 1):
        error = None
        with getattr(injected, name)(run.checkpointer, step):
            try:
                run.checkpointer.save(step, run.engine.model, run.engine.optimizer, wait=step % 2 == 0)
                run.checkpointer.wait()
            except BaseException as raised:
                error = [type(raised).__name__, str(raised)]
        dist.barrier(run.world.side)
        found[name] = {"error": error, "there": sorted(p.name for p in folder.iterdir()), "reported": step in reports}
        dist.barrier(run.world.side)
    with injected.newest_is_damaged(run.checkpointer), injected.disk_is_full_already():
        found["resumed"] = build(recipe, []).engine.steps_made  # past its last step: no more room is needed
    return found


def exports(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Make some steps of each variant and export it; return the traceback of each failure, by name."""
    wrong = {}
    for name, overrides in variants.items():
        try:
            run = build(recipe, overrides)
            curve(run, steps)
            export_live(run.engine.model, run.inputs.prepared.bare, run.plan, run.checkpointer, run.reporter, steps)
        except Exception:
            wrong[name] = traceback.format_exc()
    return wrong


def adapter_exports(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, str]:
    """Train adapters of each variant and export them, for each `export.merge_base` into a folder of that name.

    The run folder also gets `sample.pt`: rows, and the logits that the trainer computes for them. Returns the traceback
    of each variant that fails.
    """
    failed: dict[str, str] = {}
    for name, overrides in variants.items():
        try:
            run = build(recipe, overrides)
            curve(run, steps)
            sample, rundir, bare = run.sample(), run.session.rundir, run.inputs.prepared.bare
            for base in ("original", "dequantized") if run.plan.recipe.adapter.kind == "qlora" else ("original",):
                plan = varied(run.plan, {"export.merge_base": base})
                export_live(run.engine.model, bare, plan, run.checkpointer, run.reporter, steps)
                if run.world.rank == 0:
                    rundir.export.rename(rundir.root / base)
            if run.world.rank == 0:
                torch.save([sample.rows, sample.logits], rundir.root / "sample.pt")
        except Exception:
            traceback.print_exc()
            failed[name] = traceback.format_exc()
    return failed


def trains(recipe: str, variants: dict[str, list[str]]) -> dict[str, list[str]]:
    """Make a step of each variant; return [class, message] of the error that refused it, or []."""
    found: dict[str, list[str]] = {}
    for name, overrides in variants.items():
        try:
            curve(build(recipe, overrides), 1)
            found[name] = []
        except Exception as error:
            traceback.print_exc()
            found[name] = [type(error).__name__, str(error)]
    return found


def pairs_alone(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return of each variant the log-probability of every answer at the start; of a refused variant the message."""
    found: dict[str, Any] = {}
    for name, overrides in variants.items():
        try:
            found[name] = build(recipe, overrides).stream.corpus.parts[0].reference.tolist()
        except RecipeError as error:
            found[name] = str(error)
    return found


def gathers(recipe: str, variants: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what a step of each variant does, in order: `gather U`, `forward U`, `backward U`, `reduce U`.

    `NAME, recorded` has the collectives of the same step, as a hang report names them.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module

    log: list[str] = []
    names: dict[int, str] = {}  # id of a module → the unit it is in
    issue, reduce = group_module.foreach_all_gather, group_module.FSDPParamGroup.post_backward

    def logged_issue(params: Any, *args: Any, **kwargs: Any) -> Any:
        log.append(f"gather {names.get(id(params[0]._module_info.module))}")
        return issue(params, *args, **kwargs)

    def logged_reduce(self: Any, *args: Any) -> Any:
        log.append(f"reduce {names.get(id(self.fsdp_params[0]._module_info.module))}")
        return reduce(self, *args)

    group_module.foreach_all_gather = logged_issue
    group_module.FSDPParamGroup.post_backward = logged_reduce
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        names |= {id(run.engine.model.model.embed_tokens): "embedding", id(run.engine.model.lm_head): "head"}
        names |= {id(run.engine.model.model.norm): "head"}
        for number, layer in enumerate(run.engine.model.model.layers):
            names |= {id(module): str(number) for module in layer.modules()}
            layer.register_forward_pre_hook(lambda *_, n=number: log.append(f"forward {n}"))
            layer.mlp.register_full_backward_hook(
                lambda *_, n=number: log.append(f"backward {n}")
            )  # half of it is done
        curve(run, 1)
        log.clear()
        before = len(recorded())
        curve(run, 2, 1)
        found[name] = list(log)
        found[f"{name}, recorded"] = recorded()[before:]
    return found


def continuations(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return what each variant writes behind `eval.prompts`, and then with weights that are not numbers.

    `curves`, of a variant without overrides: of two steps, and of two steps with prompts between them.
    """
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        state = torch.get_rng_state()
        texts = run.continue_prompts(lambda: False)
        assert texts is not None and torch.equal(state, torch.get_rng_state())
        curves = []
        if not overrides:
            curves = [curve(build(recipe, overrides), 2), curve(run, 1)]
            run.continue_prompts(lambda: False)
            curves[1] += curve(run, 2, 1)
        with torch.no_grad():
            for param in run.engine.model.parameters():
                param.fill_(math.nan)
        found[name] = {"texts": texts, "curves": curves, "nan": run.continue_prompts(lambda: False)}
    return found


def recorded() -> list[str]:
    """Return the collectives of this rank in the flight recorder, in order, with their units."""
    entries = named(recorded_collectives()["gloo"]["entries"], ISSUED)
    return [entry["collective"] for entry in entries if not entry["side"]]


class Shapes(torch.nn.Module):
    """Parameters of many kinds: with rows that no number of ranks divides, one row, and rows of less than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(11, 512), torch.nn.LayerNorm(512)
        self.wide, self.tall = torch.nn.Linear(512, 7), torch.nn.Linear(300, 513, bias=False)
        self.narrow, self.row = torch.nn.Linear(6, 9, bias=False), torch.nn.Linear(256, 1, bias=False)
        self.equal, self.experts = torch.nn.Linear(260, 260), torch.nn.Parameter(torch.zeros(5, 3, 256))


def updates(kinds: list[str], steps: int) -> dict[str, Any]:
    """Return how far parameters and state are from those of the libraries on whole tensors, by optimizer and mesh.

    The distances are relative to the change; `saved` says whether the bytes of a checkpoint are as the registry says.
    """
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    meshes = {"shard": init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))}
    if world == 4:
        meshes["hybrid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    for kind in kinds:
        for name, mesh in meshes.items():
            found[f"{kind} {name}"] = compare_updates(kind, mesh, steps)
    return found


def compare_updates(kind: str, mesh: DeviceMesh, steps: int) -> dict[str, float]:
    """Make steps with the optimizer of a recipe on shards, and with those of the libraries on whole tensors."""
    torch.manual_seed(0)
    model = Shapes()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.1)
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    before = {name: param.clone() for name, param in whole.items()}
    # The library quantises rows of 260 and 300 values only as part of longer ones.
    padded = {name: padded_columns(tuple(p.shape)) - p.shape[-1] for name, p in whole.items()}
    if kind == "adamw_8bit":
        whole = {name: pad(p, (0, max(0, padded[name]))) for name, p in whole.items()}
    undecayed = {"embedding.weight", "norm.weight", "norm.bias", "wide.bias", "equal.bias", "row.weight"}
    decayed = [param for name, param in whole.items() if name not in undecayed]
    others = [param for name, param in whole.items() if name in undecayed]
    references = library_optimizers(kind, decayed, others, [param for param in decayed if param.ndim == 2])
    model = fully_shard(model, mesh=mesh)
    model.frozen_names = set()  # as a skeleton has them
    optim = OPTIMIZERS[kind]
    optimizer = make_optimizer(model, optim)
    start_state(optimizer)
    set_step(optimizer, 0)
    parts = named_parts(optimizer)
    for step in range(steps):
        torch.manual_seed(step)
        for name, param in model.named_parameters():
            gradient = torch.randn(param.shape) * 10.0 ** (step % 3 - 2)
            whole[name].grad = pad(gradient, (0, whole[name].shape[-1] - gradient.shape[-1]))
            parts[name].grad = distribute_tensor(gradient, mesh, param.placements).to_local()
        for each in (optimizer, *references):
            each.step()
    distances = {}
    for name, param in model.named_parameters():
        made, wanted = param.full_tensor(), whole[name][..., : param.shape[-1]]
        distances[name] = float((made - wanted).norm() / (wanted - before[name]).norm())
    shards = shards_of(model, optimizer, optim)
    listed = {name: optim.state(weight, "float32") for name, weight in weights_of(model).items()}
    shapes = {f"optim.{name}.{tensor.key}": tensor.shape for name, state in listed.items() for tensor in state}
    assert {name: shard.shape for name, shard in shards.items() if name.startswith("optim.")} == shapes
    return distances


def inspect(recipe: str, variants: dict[str, list[str]], backend: str = "aot_eager") -> dict[str, Any]:
    """Return the sharded model of each variant after two steps, and their curve.

    `graphs` counts what was compiled in the first step and in the second, with this backend.
    """
    found = {}
    for name, overrides in variants.items():
        counters.clear()
        with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
            run = build(recipe, overrides)
            made = curve(run, 1)
            graphs = counters["stats"]["unique_graphs"]
            made += curve(run, 2, 1)
        model, optimizer = run.engine.model, run.engine.optimizer
        found[name] = {
            "curve": made,
            "graphs": [graphs, counters["stats"]["unique_graphs"] - graphs],
            "params": sorted({f"{p.dtype} {p.device}" for p in model.parameters()}),
            "state": sorted({f"{v.dtype} {v.device}" for s in optimizer.state.values() for v in s.values() if v.ndim}),
            "buffers": sorted({str(b.dtype) for b in model.buffers()}),
            "local_share": sum(p.to_local().numel() for p in model.parameters())
            / sum(p.numel() for p in model.parameters()),
            "names": sorted(name for name, _ in model.named_parameters()),
        }
    return found


def poisoned(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Put a NaN into the loss, then into a gradient, on the last rank only; return what is raised and found.

    `unit` and `operator` put it into the output of a layer, and into what the backward of one makes. `again`
    is what is found when the step is finite, as after a fault that does not recur.
    """
    run = build(recipe, overrides)
    curve(run, 1)
    params = list(run.engine.model.parameters())
    before = [p.detach().to_local().clone() for p in params]
    batches = batches_of(run.plan, run.stream, 1, run.world.rank)
    tokens = run.stream.label_tokens(run.plan.step_positions(1))
    found: dict[str, Any] = {"again": find_sources(run.engine, 1, batches, tokens)}
    whole, mlp = run.engine.loss, decoder_layers(run.engine.model)[1][1].mlp
    of_loss = {"loss": lambda loss: loss * float("nan"), "gradient": spoilt_gradient}
    of_layer = {"unit": lambda output: output * float("nan"), "operator": lambda output: output + zero_root(output)}
    for name, spoil in {**of_loss, **of_layer}.items():

        def loss(batch: Any, divisor: int, name: str = name, spoil: Any = spoil) -> torch.Tensor:
            if run.world.rank < run.world.size - 1 or batch is not batches[1]:
                return whole(batch, divisor)
            if name in of_loss:
                return spoil(whole(batch, divisor))
            hook = mlp.register_forward_hook(lambda _module, _inputs, output: spoil(output))
            value = whole(batch, divisor)
            hook.remove()
            return value

        run.engine.loss = loss
        try:
            list(run.engine.read([run.engine.step(1, batches, tokens, 1e-3)]))
        except NonFiniteError as error:
            after = [p.detach().to_local() for p in params]
            unchanged = all(map(torch.equal, before, after)) and not any(p.grad is not None for p in params)
            sources = [dataclasses.asdict(source) for source in find_sources(run.engine, 1, batches, tokens)]
            found[name] = {"message": str(error), "unchanged": unchanged, "sources": sources}
    return found


def late(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Train with a NaN in the loss of step 3, on the last rank, reading each step at once, one step late, and 4 steps
    read together.

    Returns for each what was reported, how many steps were read together, and digests of weights and state at the end;
    and what is left by the step with the NaN and three steps after it when the run ends there.
    """
    found: dict[str, Any] = {}
    for name in ("at once", "late", "late, but read before a save", "4 together"):
        logged = ["log.every=100"] if name == "4 together" else []
        run, events = build(recipe, [*overrides, *logged, "train.on_nonfinite=skip"]), []
        together = watch(run, events, late=name != "at once", most_unread=4 if name == "4 together" else 1)
        for step in range(6):
            run.step(step)
            if step == 2 and name == "late, but read before a save":
                run.read_steps()
        run.read_steps()
        run.prefetch.close()
        found[name] = {"events": events, "state": digest_of(run), "together": together}
    found["counted"] = counted(recipe, [*overrides, "log.every=100", "train.steps=20"])
    run = build(recipe, [*overrides, "log.every=100"])
    watch(run, [], late=True, most_unread=3)
    run.step(0), run.step(1), run.read_steps()
    before, error = digest_of(run), ""
    try:
        for step in range(2, 6):
            run.step(step)
    except NonFiniteError as raised:
        error = f"{raised} [in step {step + 1}]"
    run.prefetch.close()
    return found | {"stopped": {"error": error, "unchanged": before == digest_of(run)}}


def skips(recipe: str, overrides: list[str], at: int, steps: int) -> dict[str, Any]:
    """Skip steps 2 and 4, whose losses are NaN; save after step `at`, go on, and resume from there.

    Returns the steps that were skipped, and whether this rank's part of the weights is in the end, bit for bit, that of
    torch's AdamW that is given the gradients and rates of the other steps only (`plain`), and whether weights and state
    are those of the resumed run (`resumed`).
    """
    overrides, events = [*overrides, "train.on_nonfinite=skip", "train.max_skipped=1"], []  # in a row
    run = build(recipe, overrides)
    watch(run, events, late=False, bad=(1, 3))
    optimizer = run.engine.optimizer
    groups = [{**group, "params": [part.clone() for part in group["params"]]} for group in optimizer.param_groups]
    update, updates = optimizer.step, []

    def recorded() -> None:
        if not optimizer.found_inf:  # type: ignore[attr-defined]
            gradients = [[part.grad.clone() for part in group["params"]] for group in optimizer.param_groups]
            updates.append((optimizer.param_groups[0]["lr"], gradients))
        update()

    optimizer.step = recorded  # type: ignore[method-assign, assignment]
    for step in range(steps):
        run.step(step)
        if step + 1 == at:
            run.checkpointer.save(at, run.engine.model, optimizer, wait=True)
    run.prefetch.close()
    resumed = build(recipe, overrides)
    for step in range(resumed.engine.steps_made, steps):
        resumed.step(step)
    resumed.prefetch.close()
    plain = torch.optim.AdamW(groups)
    for lr, gradients in updates:
        for group, grads in zip(plain.param_groups, gradients, strict=True):
            group["lr"] = lr
            for part, grad in zip(group["params"], grads, strict=True):
                part.grad = grad
        plain.step()
    pairs = zip(plain.param_groups, optimizer.param_groups, strict=True)
    return {
        "skipped": [event[1] for event in events if event[0] == "skip"],
        "updates": len(updates),
        "plain": all(all(map(torch.equal, own["params"], found["params"])) for own, found in pairs),
        "resumed": resumed.engine.steps_made == at and digest_of(resumed) == digest_of(run),
    }


def scaled(recipe: str, overrides: list[str], start: float, interval: int, at: int) -> dict[str, Any]:
    """Train in float16 with a loss scale that begins with `start`; save after step `at`, and resume from there.

    Returns [loss, gradient norm, loss scale] of each step, what was reported as skipped, and whether weights, state and
    loss scale at the end are those of the resumed run (`resumed`), which reports the same steps again (`again`).
    """
    found: dict[str, Any] = {}
    with patch.object(loss_scale, "START", start), patch.object(loss_scale, "INTERVAL", interval):
        for name in ("curve", "again"):
            run = build(recipe, overrides)
            events: list[Any] = []
            run.reporter.event = lambda kind, events=events, **fields: events.append((kind, fields))  # type: ignore
            report, made = run.add_step, []

            def add_step(queued: Any, stats: Any, report: Any = report, made: Any = made) -> None:
                made.append([stats.loss, stats.grad_norm, stats.loss_scale])
                report(queued, stats)

            run.add_step = add_step  # type: ignore[method-assign]
            run.reads_late = name == "again"  # the same, one step late
            for step in range(run.engine.steps_made, run.sizes.total_steps):
                run.step(step)
                if name == "curve" and step + 1 == at:
                    run.save(at, wait=True)
            run.read_steps()
            run.prefetch.close()
            found[name], end = made, [digest_of(run), run.engine.loss_scale.state()]  # type: ignore[union-attr]
            found.setdefault("skipped", [fields for kind, fields in events if kind == "skip"])
            found["resumed"] = found.setdefault("end", end) == end
    return found


def counted(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Train ten finite steps, read every second by clocks on which a step takes 0.1 s on rank 0 and 0.3 s on rank 1.

    Returns how many steps were read together, and for each whether its wait for data was counted; no copy of numbers
    seems complete before it is read.
    """
    run, queued, waited = build(recipe, overrides), [0], []
    together = watch(run, [], late=True)
    make = run.engine.accumulate

    def accumulate(*words: Any) -> torch.Tensor:
        queued[0] += 1
        return make(*words)

    run.engine.accumulate = accumulate  # type: ignore[method-assign]
    run.totals.pace.add = lambda data_s, *_: waited.append([each > 0 for each in data_s])  # type: ignore
    clock = SimpleNamespace(perf_counter=lambda: queued[0] * (0.1 + 0.2 * run.world.rank))
    with (
        patch.object(trainer, "count_within", stops.count_within),
        patch.object(trainer, "NOTICED_S", 2.0),
        patch.object(engine_module, "time", clock),
        patch.object(HostCopy, "done", lambda copy: False),
        patch.object(HostCopy, "wait", lambda copy: None),
    ):
        for step in range(3, 13):
            run.step(step)
        run.read_steps()
    run.prefetch.close()
    return {"together": together, "waited": waited}


def watch(run: Trainer, events: list[Any], late: bool, most_unread: int = 1, bad: tuple[int, ...] = (2,)) -> list[int]:
    """Collect the events of a trainer, and make the losses of steps `bad` (from 0) NaN, on the last rank.

    They are NaN also when they are repeated. Returns a list to which the number of steps is added whenever some are
    read together.
    """
    run.reads_late, run.most_unread, together = late, most_unread, []
    read, trainer.count_within = run.engine.read, lambda *_: most_unread
    run.engine.read = lambda queued: together.append(len(queued)) or read(queued)  # type: ignore
    shown = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "total_tokens", "what")
    run.reporter.event = lambda kind, **fields: events.append([kind, *(fields.get(key) for key in shown)])  # type: ignore
    whole, seed, at = run.engine.loss, run.engine.seed, [0]

    def seeded(step: int) -> None:
        at[0] = step
        seed(step)

    def loss(batch: Any, divisor: int) -> torch.Tensor:
        spoilt = at[0] in bad and run.world.rank == run.world.size - 1
        return whole(batch, divisor) * (float("nan") if spoilt else 1.0)

    run.engine.seed, run.engine.loss = seeded, loss  # type: ignore[method-assign]
    return together


def digest_of(run: Trainer) -> str:
    """Return a digest of this rank's weights and optimizer state."""
    digest = hashlib.sha256()
    for part, state in run.engine.optimizer.state.items():
        for tensor in filter(torch.is_tensor, (part, *state.values())):
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def zero_root(output: torch.Tensor) -> torch.Tensor:
    """Return zeros, whose gradient is not finite."""
    return (output - output.detach()).sqrt()


def spoilt_gradient(loss: torch.Tensor) -> torch.Tensor:
    """Return the same loss with a gradient of NaN."""
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


def masked(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Compare gradients with and without a micro-batch of no labels; compute the loss of a batch without any label."""
    run = build(recipe, overrides)
    micros = [run.stream.batch(m) for m in run.plan.micro_batches(0, run.world.rank)]
    tokens = run.stream.label_tokens(run.plan.step_positions(0))
    grads = []
    empty = {**micros[0], "labels": torch.full_like(micros[0]["labels"], -100)}
    for batches in (micros, [*micros, empty]):
        run.engine.drop_gradients()
        run.engine.accumulate(0, batches, tokens)
        grads.append([g.clone() for g in run.engine.local_grads()])
    run.engine.drop_gradients()
    [stats] = run.engine.read([run.engine.step(0, [empty], 0, 0.0)])  # a whole window without a label
    return {"equal": all(map(torch.equal, *grads)), "nothing": [stats.loss, stats.grad_norm]}


def edge_cases(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return the results of `poisoned`, of `masked`, and of `norms` of each variant."""
    found = {"poisoned": poisoned(recipe, []), "masked": masked(recipe, [])}
    return found | {name: norms(recipe, overrides) for name, overrides in variants.items()}


def norms(recipe: str, overrides: list[str]) -> list[dict[str, float]]:
    """Make a step of plain SGD that clips gradients to half their norm, and one that may have twice their norm.

    Return for each the gradient norm of the engine (`engine`), that of the gathered gradients (`full`, pytorch#170862),
    and how far the step is from that with the gathered gradients, relative to its length (`off`).
    """
    run = build(recipe, [*overrides, "optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0"])
    params, found = dict(run.engine.model.named_parameters()), []
    batches = [run.stream.batch(m) for m in run.plan.micro_batches(0, run.world.rank)]
    tokens = run.stream.label_tokens(run.plan.step_positions(0))
    for share in (0.5, 2.0):
        before = {name: param.detach().full_tensor().clone() for name, param in params.items()}
        whole = gradients_of(run, 0)
        norm = sum((gradient.double() ** 2).sum() for gradient in whole.values()).sqrt().item()
        run.engine.plan = varied(run.plan, {"optim.max_grad_norm": share * norm})
        [stats] = run.engine.read([run.engine.step(0, batches, tokens, 1.0)])
        wanted = {name: -min(share, 1.0) * gradient for name, gradient in whole.items()}
        off = [params[name].detach().full_tensor() - before[name] - update for name, update in wanted.items()]
        lengths = [torch.nn.utils.get_total_norm(tensors).item() for tensors in (off, wanted.values())]
        found.append({"engine": stats.grad_norm, "full": norm, "off": lengths[0] / lengths[1]})
    return found


def bytes_read(recipe: str, variants: dict[str, list[str]], resumed: list[str]) -> dict[str, dict[str, int]]:
    """Return the bytes of tensors that this rank reads, of the model's files and of a checkpoint's, when it starts.

    Each variant is started; then those in `resumed` save a checkpoint and are started again. `held` is this rank's part
    of the parameters.
    """
    read: dict[str, int] = {}

    class CountingRows:
        def __init__(self, rows: Any, kind: str) -> None:
            self._rows, self._kind = rows, kind

        def __getattr__(self, name: str) -> Any:
            return getattr(self._rows, name)

        def __getitem__(self, key: Any) -> Any:
            tensor = self._rows[key]
            read[self._kind] += tensor.nbytes
            return tensor

    class CountingFile(contextlib.AbstractContextManager[Any]):
        def __init__(self, path: Any, framework: str) -> None:
            self._file, self._kind = safe_open(path, framework), "checkpoint" if "checkpoints" in str(path) else "model"

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __exit__(self, *exception: object) -> None:
            self._file.__exit__(*exception)

        def get_slice(self, name: str) -> CountingRows:
            return CountingRows(self._file.get_slice(name), self._kind)

    weights.safe_open = loading.safe_open = CountingFile
    found = {}
    for name, overrides in variants.items():
        read = {"model": 0, "checkpoint": 0}
        run = build(recipe, overrides)
        found[name] = read | {"held": sum(local(param).nbytes for param in run.engine.model.parameters())}
        if name in resumed:
            run.checkpointer.save(1, run.engine.model, run.engine.optimizer, wait=True)
            read = {"model": 0, "checkpoint": 0}
            build(recipe, overrides)
            found[f"{name}, resumed"] = read
    return found


class Memory(contextlib.AbstractContextManager["Memory"]):
    """Finds by how many bytes this process's memory grows at most within a `with` block: `most`.

    Counts anonymous memory, every 2 ms. Pages of files do not count: the kernel drops them when it needs memory.
    """

    def __enter__(self) -> Memory:
        libc = ctypes.CDLL(None)
        assert libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: larger pieces are given back when they are freed
        libc.malloc_trim(0)
        self._start, self.most = self._now(), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._now() - self._start)

    @staticmethod
    def _now() -> int:
        _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(of_files)) * resource.getpagesize()


def memory(recipe: str, variants: dict[str, list[str]]) -> dict[str, dict[str, int]]:
    """Return by how many bytes this rank's memory grows at most while the weights of each variant are read: `load`.

    `held` is what it has at the end of parameters, buffers and optimizer state, and `export` what it takes to export.
    """
    load_state, found = trainer.load_state, {}
    for name, overrides in variants.items():
        loading = Memory()

        def measured(*arguments: Any, loading: Memory = loading) -> Any:
            with loading:
                return load_state(*arguments)

        with patch.object(trainer, "load_state", measured):
            run = build(recipe, overrides)
        states = run.engine.optimizer.state.values()
        held = [*run.engine.model.parameters(), *run.engine.model.buffers(), *(v for s in states for v in s.values())]
        with Memory() as exporting:
            assert run.export() is None
        size = sum(local(tensor).nbytes for tensor in held)
        found[name] = {"held": size, "load": loading.most, "export": exporting.most}
    return found


def accounts(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return what torch's profiler records of a step of each variant: memory, and collectives with their bytes.

    gloo copies tensors on threads of its own; what the step itself allocates, it allocates on this one. Where gloo's
    thread is the last to let go of a buffer, its release is not seen: so the peak is found between two bounds.
    """
    found = {}
    loss.loss_chunks = loss_chunks
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        curve(run, 1)
        held = [*run.engine.model.parameters(), *run.engine.model.buffers()]
        held += [v for state in run.engine.optimizer.state.values() for v in state.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(local, held)}
        with torch.profiler.profile(profile_memory=True, record_shapes=True) as profiler:
            for step in range(1, 3):
                with torch.profiler.record_function("one step"):
                    curve(run, step + 1, step)
        results = profiler.profiler.kineto_results
        spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in results.events() if e.name() == "one step"]
        changes = sorted(allocations(results.experimental_event_tree()))
        least, most = zip(*(bounds([c for c in changes if a <= c[0] <= b]) for a, b in spans), strict=True)
        calls, gloo = collectives([e for e in results.events() if spans[-1][0] <= e.start_ns() <= spans[-1][1]])
        base = sum(storages.values())
        found[name] = {"peak": [base + max(least), base + min(most)], "calls": calls, "gloo": gloo}
    return found


def collectives(events: Any) -> tuple[list[Any], list[Any]]:
    """[kind, bytes of the full buffer] of what torch called, and [name, bytes] of what gloo then did."""
    width = {"float": 4, "c10::BFloat16": 2, "double": 8}
    kinds = {
        "c10d::_allgather_base_": ("all-gather", 0), "c10d::alltoall_base_": ("reduce-scatter", 1),
        "c10d::allreduce_": ("all-reduce", None), "c10d::allgather_": ("all-gather", None),
    }  # fmt: skip
    calls, gloo = [], []
    for event in events:
        if event.name() in kinds:
            kind, place = kinds[event.name()]
            shape = [0] if place is None else event.shapes()[place]
            kind = "all-to-all" if len(shape) > 1 else kind  # of ranks that share rows
            calls.append([kind, None if place is None else math.prod(shape) * width[event.dtypes()[place]]])
        elif event.name().startswith("gloo:"):
            gloo.append([event.name(), math.prod(event.shapes()[0]) * width[event.dtypes()[0]]])
    return calls, gloo


def allocations(events: Any) -> Any:
    """(time, thread, address, bytes asked for or given back) of every allocation in a tree of profiler events."""
    for event in events:
        if event.tag.name == "Allocation":
            yield event.start_time_ns, event.start_tid, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from allocations(event.children)


def bounds(changes: Any) -> tuple[int, int]:
    """Between what the peak of this thread's allocations lies: without, and with, what was never seen to be freed."""
    freed, follows = [], {}  # whether each is a release, or an allocation that one follows at its address
    for _, _, address, size in reversed(changes):
        freed.append(size < 0 or follows.get(address, 1) < 0)
        follows[address] = size
    levels, peaks, mine = [0, 0], [0, 0], {}
    for (_, thread, address, size), seen in zip(changes, reversed(freed), strict=True):
        if size > 0 and thread == 1:
            mine[address] = seen
        elif address not in mine:
            continue
        levels[0] += size if mine[address] else 0
        levels[1] += size
        peaks = [max(pair) for pair in zip(peaks, levels, strict=True)]
        if size < 0:
            del mine[address]
    return peaks[0], peaks[1]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, of which this rank may have a part only."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digests(recipe: str, variants: dict[str, list[str]]) -> dict[str, str]:
    """SHA-256 of all weights at the start, by name."""
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        digest = hashlib.sha256()
        for param in run.engine.model.parameters():
            digest.update(param.detach().full_tensor().numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


def parities(recipe: str, kinds: list[str]) -> dict[str, Any]:
    """How far logits and gradients of every architecture are from those of transformers' own bf16 model.

    By architecture: the largest difference of logits over the largest logit, the largest difference of a gradient over
    its norm, and whose; or, as a text, what was raised. All ranks have the same tokens, so that gradients are doubled.
    """
    written = load(Path(recipe))
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    world = World.start(plan, StopRequest())
    found: dict[str, Any] = {}
    for kind in kinds:
        try:
            found[kind] = parity(kind, plan, world, Path(recipe).parent / kind)
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"[:300]
    return found


def parity(kind: str, plan: Any, world: World, folder: Path) -> list[Any]:
    """See `parities`; through the files in `folder`."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    if torch.__version__ >= (2, 15):  # FSDP does not round a gradient that a product with float32 gives a bf16 weight
        for param in reference.parameters():
            param.grad_dtype = None
    config = AutoConfig.from_pretrained(folder)
    plan.recipe.model.id, plan.recipe.model.attn_implementation = str(folder), "eager"
    bare = skeleton(config, plan.recipe.model)
    plan.recipe.fsdp.wrap = "auto" if decoder_layers(bare) else {"min_params": 20_000}
    model, _ = shard.build(plan, config, world)
    weights.read_weights(model, bare, plan, world.device, lambda *_: None)
    ids = torch.arange(3, 35)[None]
    logits = []
    for one in (reference, model):
        out = one.eval()(input_ids=ids, position_ids=torch.arange(32)[None], use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten().roll(-1)).backward()
        logits.append(out.detach())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    expected = dict(reference.named_parameters())
    off = [(0.0, "")]
    for name, param in model.named_parameters():
        ours, theirs = param.grad, expected[name].grad
        assert (ours is None) == (theirs is None), f"gradient of {name}"
        if ours is not None and theirs is not None:
            wanted = theirs.float() * world.size
            difference = (ours.full_tensor().float() - wanted).norm()
            if difference:
                off.append(((difference / wanted.norm()).item(), name))
    return [((logits[1] - logits[0]).abs().max() / logits[0].abs().max()).item(), *max(off)]


def moments(recipe: str, variants: dict[str, list[str]]) -> dict[str, dict[str, list[float]]]:
    """Mean and standard deviation of every weight at the start, in memory that was NaN before; by variant and name.

    All of them are compared with the whole ones that are drawn, bit for bit.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        weights = {n: p.detach().full_tensor() for n, p in run.engine.model.named_parameters()}
        mirror, drawn = run.inputs.prepared.bare, {}
        for group in initial_weights(mirror, init_groups(mirror), run.plan.recipe):
            drawn |= group
        assert all(torch.equal(weight, drawn[n]) for n, weight in weights.items()), name
        found[name] = {n: [w.mean().item(), w.std(correction=0).item()] for n, w in weights.items()}
    return found


def split_copies(recipe: str, variants: dict[str, list[str]]) -> dict[str, str | None]:
    """Flip a bit in a weight or a buffer of the last rank; return the error that each variant raises, or None."""
    load_state, found = trainer.load_state, {}
    for name, overrides in variants.items():

        def spoilt(model: Any, *others: Any, what: str = name.split()[-1]) -> Any:
            loaded = load_state(model, *others)
            tensors = {"weight": model.parameters, "buffer": model.buffers}
            if dist.get_rank() == dist.get_world_size() - 1 and what in tensors:
                local(list(tensors[what]())[-1].detach()).view(torch.int32).view(-1)[:1] ^= 1
            return loaded

        with patch.object(trainer, "load_state", spoilt):
            try:
                build(recipe, overrides)
                found[name] = None
            except FsdptrainError as error:
                found[name] = str(error)
    return found


def split_while_training(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Flip a bit of a weight of the last rank after the third step; return each run's error and checkpoints."""
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, [f"name={name}", *overrides])

        def spoiling(number: int, run: Trainer = run, make_step: Any = run.step) -> bool:
            stop = make_step(number)
            if number == 2 and dist.get_rank() == dist.get_world_size() - 1:
                local(list(run.engine.model.parameters())[-1].detach()).view(torch.int32).view(-1)[:1] ^= 1
            return bool(stop)

        error = None
        with patch.object(run, "step", spoiling):
            try:
                run.train()
            except WorkerLost as lost:
                error = str(lost)
        found[name] = [error, run.session.rundir.checkpoint_steps()]
    return found


def placed(recipe: str, orders: list[str], variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return `refusals` on nodes of two ranks, for each order of hosts: a letter is the host name of a rank."""
    found = {}
    for hosts in orders:
        with (
            patch.dict(os.environ, LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(int(os.environ["RANK"]) % 2)),
            patch("socket.gethostname", lambda hosts=hosts: hosts[int(os.environ["RANK"])]),
        ):
            named = {name: [f"name={hosts}-{name}", *overrides] for name, overrides in variants.items()}
            found[hosts] = refusals(recipe, named)
    return found


def held_out_failures(recipe: str) -> list[tuple[int, str]]:
    """Return (exit code, message) of an evaluation, and of the logits with which an export is compared."""
    run, found = build(recipe, []), []
    for compute in (lambda: run.evaluate(0), run.sample):
        try:
            compute()
        except FsdptrainError as error:
            found.append((error.exit_code, str(error)))
    return found


def refusals(recipe: str, variants: dict[str, list[str]], folders: Sequence[str] = ()) -> dict[str, Any]:
    """Set up each variant; return (exit code, message) of its refusal, (0, "") where it is not refused.

    `folders` are the working folders of the ranks.
    """
    found: dict[str, Any] = {}
    if folders:
        os.chdir(folders[int(os.environ["RANK"])])
    for name, overrides in variants.items():
        try:
            build(recipe, overrides)
            found[name] = (0, "")
        except FsdptrainError as error:
            found[name] = (error.exit_code, str(error))
    return found


def stall(recipe: str, stalls: list[tuple[float, float, bool]]) -> list[bool]:
    """Stall between two resets of the watchdog; return after which of the next ones this rank counts as hung.

    `stalls` has for each rank the seconds in which it makes progress before, those of the stall, and whether it holds
    the interpreter lock meanwhile.
    """
    written = load(Path(recipe))
    plan, rank = make_plan(written, find_topology(written.recipe, {})), int(os.environ["RANK"])
    found = []
    plan.rundir.root.mkdir(parents=True, exist_ok=True)  # as the command does
    with Watchdog(plan, rank) as watchdog:
        watchdog.begin(1)
        before_s, seconds, holding_the_gil = stalls[rank]
        watchdog.reset(step_done=True)
        time.sleep(before_s)
        watchdog.reset()
        if holding_the_gil:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        else:
            time.sleep(seconds)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            watchdog.reset()
            found.append(bool(hung_ranks(plan.rundir, 1, [rank])))
            time.sleep(0.05)
    return found


def main() -> NoReturn:
    """Run the job of the command line on this rank, write its result, and end the process."""
    _, job, out, arguments = sys.argv
    torch.set_num_threads(1)
    be_strict()
    loss.loss_chunks = lambda tokens, *_: -(-tokens // 24)  # a micro-batch is several chunks, of unequal lengths
    World.peak_flops = lambda self, dtype: 1e9  # type: ignore[method-assign]  # else it is measured for each variant
    result = globals()[job](**json.loads(arguments))
    (Path(out) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        compare_ranks()
    sys.stdout.flush()
    os._exit(0)
