"""What `support.on_ranks` starts on every rank of a gloo process group, and functions that several tests run there.

Others are beside their tests. Their results are JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors import safe_open
from strict import be_strict, compare_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor

from fsdptrain.checkpoint.export import export_live
from fsdptrain.config.reader import load
from fsdptrain.errors import FsdptrainError, NonFiniteError, RecipeError
from fsdptrain.failures.watchdog import Watchdog
from fsdptrain.model import loss as chunked_loss
from fsdptrain.model import nf4
from fsdptrain.model.units import base_name, weights_of
from fsdptrain.parallel.shard import sum_parts, sum_tied_ends, whole_tensor
from fsdptrain.parallel.world import HostCopy, World
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest
from fsdptrain.run_folder.events import Reporter
from fsdptrain.train import pace, trainer
from fsdptrain.train import step as engine_module
from fsdptrain.train.optim import learning_rate
from fsdptrain.train.prefetch import batches_of
from fsdptrain.train.setup import Session
from fsdptrain.train.trainer import Trainer


def build(recipe: str, overrides: list[str]) -> Trainer:
    """Set up the trainer of a recipe on this process group."""
    written = load(Path(recipe), overrides)
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    plan = dataclasses.replace(plan, threads=1)  # more would only wait for one another
    rank = int(os.environ["RANK"])
    plan.rundir.root.mkdir(parents=True, exist_ok=True)  # as the command does
    reporter, watchdog = Reporter(None if rank else plan.rundir), Watchdog(plan, rank)
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
    with patch.object(run.reporter, "event") as event:
        run.evaluate(0)
    return dict(event.call_args.kwargs)


def curves(recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Return the curve of each variant, from the step of its newest checkpoint if it has one."""
    runs = ((name, build(recipe, overrides)) for name, overrides in variants.items())
    return {name: curve(run, steps, run.engine.steps_made) for name, run in runs}


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

    `unchanged`: whether it is what it was before, bit for bit; `as in the file`: whether it is as in the file, which
    bitsandbytes quantises for as many weights as `quantised` says. `gathered`: the bytes of the gathers of a step. A
    quantised model with `export.adapter: both` is exported. `made` is the folder for what `observed_curve` writes, in a
    file of each variant.
    """
    found, gather = {}, DefaultAllGather.__call__
    for number, (name, overrides) in enumerate(variants.items()):
        run, gathered = build(recipe, overrides), list[int]()
        params = dict(run.engine.model.named_parameters())
        base = {n: p for n, p in params.items() if not p.requires_grad}
        before = {n: local(p.detach()).clone() for n, p in base.items()}
        same, count = compared_with_file(run, base)

        def counted(
            comm: Any, output_tensor: torch.Tensor, *args: Any, gathered: list[int] = gathered, **options: Any
        ) -> Any:
            gathered.append(output_tensor.nbytes)
            return gather(comm, output_tensor, *args, **options)

        with patch.object(DefaultAllGather, "__call__", counted):
            reached = observed_curve(run, steps, Path(made) / f"{number}.pt")
        after = {n: p for n, p in run.engine.model.named_parameters() if not p.requires_grad}
        found[name] = {
            "curve": reached,
            "unchanged": all(torch.equal(before[n], local(p.detach())) for n, p in after.items()),
            "as in the file": same,
            "quantised": count,
            "base": sorted({str(p.dtype) for p in base.values() if p.is_floating_point()}),
            "gathered": sum(gathered) / (steps + 1),  # the gradients of one more step are observed
            "copied": copied(run.engine.model),
            "trained": sorted({str(p.dtype) for p in params.values() if p.requires_grad}),
        }
        if run.plan.recipe.adapter.kind == "qlora" and run.plan.recipe.export.adapter == "both":
            assert run.export() is None
    return found


def compared_with_file(run: Trainer, base: dict[str, torch.nn.Parameter]) -> tuple[bool, int]:
    """Return whether frozen parameters are those of the file but for experts, and how many of them are in 4 bits."""
    from bitsandbytes import functional

    same, compute = True, getattr(torch, run.plan.recipe.fsdp.mixed_precision.param_dtype)
    layers = {f"{n}.weight": m for n, m in run.engine.model.named_modules() if isinstance(m, nf4.NF4Linear)}
    with safe_open(Path(run.plan.recipe.model.id) / "model.safetensors", framework="pt") as file:
        keys = {key.removeprefix("transformer."): key for key in file.keys() if "experts" not in key}  # noqa: SIM118
        for name, param in base.items():
            key = keys.get(base_name(name).removeprefix("transformer."))
            if key is None:
                continue
            whole, own = file.get_tensor(key), gathered_whole(param.detach())
            if layer := layers.get(name):
                whole = whole.to(compute)
                whole = whole.T.contiguous() if layer.transposed else whole
                whole = functional.dequantize_4bit(
                    *functional.quantize_4bit(whole, compress_statistics=True, quant_type="nf4")
                )
                _, absmax, *buffers = layer.quantised
                own = nf4.dequantise((own, gathered_whole(absmax), *buffers), compute)
            same = same and torch.equal(own, whole.to(own.dtype))
    return same, len(layers)


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
    start = {name: whole(run, name, param.detach()).clone() for name, param in trained.items()}
    reached = curve(run, steps)
    end = {name: whole(run, name, param.detach()) for name, param in trained.items()}
    gradients = gradients_of(run, 0)
    if run.world.rank == 0:
        torch.save({"start": start, "end": end, "gradients": gradients}, path)
    return reached


def gradients_of(run: Trainer, step: int) -> dict[str, torch.Tensor]:
    """Return the whole gradient of every trained parameter for the batches of a step, which is not made.

    Rank 0 has those of all stages of a pipeline.
    """
    batches = batches_of(run.plan, run.stream, step, run.world.rank)
    run.engine.accumulate(step, batches, run.stream.label_tokens(run.plan.step_positions(step)))
    sum_parts(run.engine.model, run.world)
    sum_tied_ends(run.engine.model, run.world)
    params = run.engine.model.named_parameters()
    found = {name: whole(run, name, param.grad) for name, param in params if param.requires_grad}
    run.engine.drop_gradients()
    for first in range(run.plan.stage_ranks, run.world.size, run.plan.stage_ranks):
        names = run.world.gather_objects([*found])[first]
        own = [*found.values()] if run.world.rank in (0, first) else []
        found |= dict(zip(names, run.world.list_on_rank_zero(own, first), strict=run.world.rank in (0, first)))
    return found


def whole(run: Trainer, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of what has the shape of a parameter; collective."""
    return whole_tensor(tensor, run.engine.model.parts.get(name), run.world)


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
    run = build(recipe, overrides)
    first = run.engine.steps_made
    samples = [run.stream.digest(run.plan.step_positions(step)) for step in range(first, steps)]
    return {"first": first, "curve": curve(run, steps, first), "samples": samples}


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


def exports(recipe: str, variants: dict[str, list[str]], steps: int, made: str = "") -> dict[str, Any]:
    """Train each variant and export it; return their curves.

    `made` is a folder: in a file of each variant it gets the whole gradients of the first step.
    """
    found = {}
    for name, overrides in variants.items():
        print(name, flush=True)  # before a traceback
        run = build(recipe, overrides)
        if made:
            gradients = gradients_of(run, 0)
            if run.world.rank == 0:
                torch.save(gradients, Path(made) / f"{name}.pt")
        found[name] = curve(run, steps)
        export_live(run.engine.model, run.inputs.prepared.bare, run.plan, run.checkpointer, run.reporter, steps)
    return found


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
        patch.object(trainer, "count_within", pace.count_within),
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

    def loss(*batch: Any) -> torch.Tensor:
        spoilt = at[0] in bad and run.world.rank == run.world.size - 1
        return whole(*batch) * (float("nan") if spoilt else 1.0)

    run.engine.seed, run.engine.loss = seeded, loss  # type: ignore[method-assign]
    return together


def digest_of(run: Trainer) -> str:
    digest = hashlib.sha256()
    for part, state in run.engine.optimizer.state.items():
        for tensor in filter(torch.is_tensor, (part, *state.values())):
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, of which this rank may have a part only."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


def main() -> NoReturn:
    _, home, job, out, arguments = sys.argv
    sys.path.insert(0, str(Path(home).parent))
    function = getattr(importlib.import_module(Path(home).stem), job)
    torch.set_num_threads(1)
    be_strict()
    chunked_loss.loss_chunks = lambda tokens, *_: (
        -(-tokens // 24)
    )  # a micro-batch is several chunks, of unequal lengths
    World.peak_flops = lambda self, dtype: 1e9  # type: ignore[method-assign]  # else it is measured for each variant
    result = function(**json.loads(arguments))
    (Path(out) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        compare_ranks()
    sys.stdout.flush()
    os._exit(0)
