"""The parts of `gpu.py` that run inside ranks: `python benchmarks/gpu_ranks.py JOB ARGUMENTS`, started by `run_ranks`.

A job is a function of this file. Its arguments and its result are JSON. `device` is cpu or cuda in all of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import exit_with_result
from gpu_device import device_of
from gpu_smoke import join, relative, smoke
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrain.config.reader import load
from fsdptrain.failures.watchdog import Watchdog
from fsdptrain.model.attention import active_flash, installed_flash, restore_flash
from fsdptrain.parallel import messages
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest
from fsdptrain.run_folder.events import Reporter
from fsdptrain.train.setup import Session
from fsdptrain.train.trainer import Trainer

WARM_UP = 4  # steps
numbers = itertools.count()  # of the run folders of this process
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- device and kernels


def versions(device: str) -> dict[str, Any]:
    """Return what the machine has: GPUs, and the versions of the libraries that matter."""
    device = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    found = {"device": device, "python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "transformers", "accelerate", "torchao", "flash-attn", "flash-attn-3", "flash-attn-4"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | device_of(device).describe()


def rates(device: str, tiny: bool) -> dict[str, float]:
    """Return the FLOP/s of a bf16 matrix product and the bytes/s of a copy within the device's memory."""
    at, n = device_of(device), 256 if tiny else 4096
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    b = torch.randn(n, 7 * n // 2, device=device, dtype=torch.bfloat16)  # the shape of the MLP of an 8B model
    source = torch.empty(2**20 if tiny else 2**28, device=device)
    target = torch.empty_like(source)
    product_s, copy_s = at.seconds(lambda: a @ b), at.seconds(lambda: target.copy_(source))
    return {"flops": 2 * n * b.numel() / product_s, "bytes": 2 * source.nbytes / copy_s}


def attention_rates(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Return FLOP/s forward and backward of each attention kernel, of the pairs that it computes.

    Causal: half of all pairs, of one document. Masked: all of them, because kernels compute those that the mask hides,
    too. Packed: the pairs within the documents.
    """
    at, length, heads, size, count = device_of(device), *((256, 4, 64, 4) if tiny else (4096, 32, 128, 8))
    q, k, v, grad = (
        torch.randn(1, heads, length, size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)
    )
    bounds = [length * i // count for i in range(count + 1)]
    document = torch.arange(length, device=device) * count // length
    mask = (document[:, None] == document) & torch.ones(length, length, device=device, dtype=torch.bool).tril()
    pairs = {
        "causal": length**2 / 2,
        "masked": length**2,
        "packed": sum((b - a) ** 2 / 2 for a, b in itertools.pairwise(bounds)),
    }
    works: dict[tuple[str, str], Callable[[], torch.Tensor]] = {}
    for name in KERNELS:
        causal = functools.partial(scaled_dot_product_attention, q, k, v, is_causal=True)
        works[name, "causal"] = functools.partial(_in_kernel, KERNELS[name], causal)
        masked = functools.partial(scaled_dot_product_attention, q, k, v, mask[None, None])
        works[name, "masked"] = functools.partial(_in_kernel, KERNELS[name], masked)
    for kind, ends in {"causal": [0, length], "packed": bounds}.items():
        documents = torch.tensor(ends, dtype=torch.int32, device=device)
        works["varlen", kind] = functools.partial(_varlen, q, k, v, documents, -(-length // (len(ends) - 1)))

    def measured(name: str, kind: str, work: Callable[[], torch.Tensor]) -> dict[str, Any]:
        flops = 4 * heads * size * pairs[kind]
        row: dict[str, Any] = {"kernel": name, "kind": kind}
        try:
            row["forward"] = flops / at.seconds(work)
            out = work()
            of_out = grad.detach().view_as(out)
            row["backward"] = 2.5 * flops / at.seconds(lambda: torch.autograd.grad(out, (q, k, v), of_out, True))
        except (RuntimeError, NotImplementedError, ImportError) as error:
            row["why"] = f"{error}".splitlines()[0][:100]
        return row

    found = [measured(name, kind, work) for (name, kind), work in works.items()]

    def measured_varlen(name: str) -> list[dict[str, Any]]:
        return [measured(f"varlen {name}", kind, works["varlen", kind]) for kind in ("causal", "packed")]

    return found + _in_other_implementations(device, measured_varlen)


def _in_other_implementations(device: str, measure: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of `measure` for each other implementation of flash attention that is installed and runs here."""
    found: list[dict[str, Any]] = []
    for name in installed_flash(torch.cuda.get_device_capability()[0] if device == "cuda" else 0):
        try:
            attention.activate_flash_attention_impl(name)
            found += measure(name)
        except Exception as error:  # whatever the package raises
            found.append({"kernel": f"varlen {name}", "kind": "causal", "why": f"{error!r}"[:100]})
        restore_flash()
    return found


def _in_kernel(backend: SDPBackend, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    with sdpa_kernel(backend):
        return work()


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, longest: int) -> torch.Tensor:
    """Compute causal attention within documents; q, k, v [1, H, S, D] → [1, S, H, D]."""
    from fsdptrain.model import varlen

    module = torch.nn.Module()
    return varlen.attend_within_documents(module, q, k, v, None, documents=documents, longest_document=longest)[0]


class AttentionNames(TorchDispatchMode):
    """Records the names of the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if "attention" in name or "attn" in name:
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def kernels(device: str, recipe: str, variants: dict[str, list[str]]) -> dict[str, str]:
    """Return, for each variant of a recipe, the attention operators of a micro-batch."""
    found = {}
    for name, overrides in variants.items():
        with fresh_trainer(recipe, *overrides) as run, AttentionNames() as seen:
            run.engine.accumulate(0, [run.stream.corpus.batch([0])], 1)
            used = filter(None, [active_flash()])
        found[name] = ", ".join([*sorted(seen.names), *used]) or "matrix products and softmax"
    return found


# ----------------------------------------------------------------------------------------------------------- the engine


@contextlib.contextmanager
def fresh_trainer(recipe: str, *overrides: str) -> Any:
    """Set up a trainer as a worker does, in a run folder of its own, and free folder and memory at the end."""
    # The same folder on every rank: MASTER_PORT is another one for each job.
    folder = Path(recipe).parent / "runs" / f"job-{os.environ['MASTER_PORT']}-{next(numbers)}"
    written = load(Path(recipe), [f"output_dir={folder}", *overrides])
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    rank = int(os.environ["RANK"])
    plan.rundir.root.mkdir(parents=True, exist_ok=True)  # as the command does
    with contextlib.closing(Reporter(None if rank else plan.rundir)) as reporter:
        run = Trainer.set_up(Session(plan, reporter, StopRequest(), Watchdog(plan, rank)))
        try:
            yield run
        finally:
            run.__dict__.clear()  # the caller still has the trainer when the next one is made
    gc.collect()
    restore_flash()  # the next trainer chooses again
    torch._dynamo.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def train(run: Trainer) -> list[list[float]]:
    """Run the whole loop; return [loss, gradient norm] of each step, on rank 0."""
    run.train()
    metrics = run.session.rundir.metrics
    if run.world.rank:
        return []
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [[event["loss"], event["grad_norm"]] for event in events if event["event"] == "step"]


def curves(device: str, recipe: str, variants: dict[str, list[str]], tiny: bool) -> dict[str, list[list[float]]]:
    """Return the curve of each variant of a recipe: [loss, gradient norm] a step."""
    found = {}
    with cheap_compiler(tiny):
        for name, overrides in variants.items():
            with fresh_trainer(recipe, *overrides) as run:
                found[name] = train(run)
    return found


def cheap_compiler(tiny: bool) -> Any:
    """With `tiny` trace graphs as usual, but let torch's own operators run them: inductor takes a minute on a CPU."""
    return (
        patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        if tiny
        else patch.dict({})
    )


def graphs(device: str, recipe: str, overrides: list[str], tiny: bool, steps: int) -> dict[str, int]:
    """Return the number of graphs compiled in the first steps and in those after them, and of graph breaks."""
    from torch._dynamo.utils import counters

    counters.clear()
    with cheap_compiler(tiny), fresh_trainer(recipe, *overrides) as run:
        timed_steps(run, 0, WARM_UP)
        first = counters["stats"]["unique_graphs"]
        timed_steps(run, WARM_UP, steps)
        later = counters["stats"]["unique_graphs"] - first
    return {"first": first, "later": later, "breaks": sum(counters["graph_break"].values())}


def timed_steps(run: Trainer, first: int, count: int) -> float:
    """Make some steps, and wait for the device; return the seconds of one."""
    started = time.perf_counter()
    for step in range(first, first + count):
        run.step(step)
    device_of(run.world.device.type).synchronize()
    return (time.perf_counter() - started) / count


def gradients(device: str, recipe: str, variants: dict[str, list[str]], reference: str) -> dict[str, float]:
    """Return how much the gradient of all data differs between variants of a recipe and the variant `reference`.

    The difference is the largest of any parameter, relative to the largest element of its gradient.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for name, overrides in variants.items():
        with fresh_trainer(recipe, *overrides) as run:
            corpus = run.stream.corpus
            batches = [corpus.batch([number]) for number in range(len(corpus))]
            run.engine.accumulate(0, batches, int(corpus.labels.sum()))
            found[name] = [grad.float().cpu().clone() for grad in run.engine.local_grads()]
    expected = found.pop(reference)
    return {name: max(map(relative, grads, expected)) for name, grads in found.items()}


def syncs(device: str, recipe: str, variants: dict[str, list[str]], steps: int) -> dict[str, Any]:
    """Return for each variant the waits of the host in `steps` steps, by place; None if they cannot be recorded."""
    found: dict[str, Any] = {}
    for name, overrides in variants.items():
        with fresh_trainer(recipe, *overrides) as run:
            timed_steps(run, 0, WARM_UP)
            with device_of(device).recorded_syncs() as places:
                for step in range(WARM_UP, WARM_UP + steps):
                    run.step(step)
            found[name] = None if places is None else dict(Counter(places))
    return found


def step(device: str, recipe: str, steps: int) -> dict[str, Any]:
    """Return the memory of some steps of a recipe, and the share of time in which the device is idle."""
    at = device_of(device)
    # On a GPU its kernels only: to record the host's calls as well would slow the host down.
    activities = [ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]
    with fresh_trainer(recipe) as run:
        timed_steps(run, 0, WARM_UP)
        at.reset_peak()
        timed_steps(run, WARM_UP, steps)
        memory = at.memory()
        with profile(activities=activities) as recorded:
            wall_s = steps * timed_steps(run, WARM_UP + steps, steps)
        return {"memory": memory, "idle": 1 - at.busy_seconds(list(recorded.events())) / wall_s}


def profiled(device: str, recipe: str, folder: str, steps: int, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Write a profile of some steps of rank 0, and on a GPU a snapshot of its memory, into a folder.

    Returns the seconds of a step without the profiler, and with it.
    """
    made, on_gpu = Path(folder), device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with fresh_trainer(recipe, *overrides) as run:
        timed_steps(run, 0, WARM_UP)
        step_s = timed_steps(run, WARM_UP, steps)
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        with profile(activities=activities) as recorded:
            profiled_s = timed_steps(run, WARM_UP + steps, steps)
        if run.world.rank == 0:
            recorded.export_chrome_trace(str(made / "profile.json.gz"))
            table = recorded.key_averages().table("self_cpu_time_total", row_limit=60, max_name_column_width=80)
            (made / "profile.txt").write_text(table)
        if run.world.rank == 0 and on_gpu:
            torch.cuda.memory._dump_snapshot(str(made / "memory.pickle"))
    return {"step_s": step_s, "profiled_s": profiled_s}


def share_of_waits(device: str, recipe: str, steps: int, overrides: Sequence[str] = ()) -> float:
    """Return the share of the passes of a step in which this rank of a pipeline on a CPU waits for messages."""
    waited, passed, wait = [0.0], [0.0], messages.await_message

    def timed(function: Callable[..., None], total: list[float]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            began = time.perf_counter()
            function(*args)
            total[0] += time.perf_counter() - began

        return call

    with fresh_trainer(recipe, *overrides) as run, patch.object(messages, "await_message", timed(wait, waited)):
        run.engine.stages.train = timed(run.engine.stages.train, passed)  # type: ignore[method-assign]
        timed_steps(run, 0, WARM_UP)
        waited[0] = passed[0] = 0.0
        timed_steps(run, WARM_UP, steps)
    return waited[0] / passed[0]


# ----------------------------------------------------------------------------------------------------------- many ranks


def bandwidths(device: str, tiny: bool) -> dict[str, float]:
    """Return the bus bandwidth of each collective in bytes/s: what each rank sends, over the time."""
    at, size = device_of(device), 2**16 if tiny else 2**27
    join(device)
    world = dist.get_world_size()
    part = torch.ones(size // world, device=device)
    whole = torch.ones(world * len(part), device=device)
    works = {
        "all-gather": (1, lambda: dist.all_gather_into_tensor(whole, part)),
        "reduce-scatter": (1, lambda: dist.reduce_scatter_tensor(part, whole)),
        "all-reduce": (2, lambda: dist.all_reduce(whole)),
    }
    sent = whole.nbytes * (world - 1) / world
    return {name: times * sent / at.seconds(work) for name, (times, work) in works.items()}


def peer(
    device: str, loop: str, config: dict[str, Any], seq_len: int, recompute: bool, compiled: bool, steps: int,
    place: str,
) -> None:  # fmt: skip
    """Train with a loop of `peers.py` on random tokens, one row a step; what it measured is passed on there."""
    import peers

    def rows() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(config["vocab_size"], (steps, seq_len), generator=generator)

    work = peers.Workload(config, rows, 1, Path(place), device, recompute, compiled)
    if loop == "plain":
        peers.train_plain(work)
    peers.train_trainer(work, steps)


JOBS = {
    job.__name__: job
    for job in (
        versions, rates, attention_rates, kernels, curves, graphs, gradients, syncs, step, bandwidths, peer, smoke,
        profiled, share_of_waits,
    )
}  # fmt: skip


if __name__ == "__main__":
    exit_with_result(JOBS[sys.argv[1]](**json.loads(sys.argv[2])))
