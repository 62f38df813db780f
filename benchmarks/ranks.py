"""The start of a run against the number of ranks: CPU seconds of each stage, and what rank 0 does more than the others.

    python benchmarks/ranks.py [--ranks 1 2 4 8 16] [--strategy FULL_SHARD] [--rounds 1] [--meet]

A Llama of 23 million parameters is read from bfloat16 files, on gloo, and makes one step. The prepared data is in the
cache, and the files of weights are not in that of the kernel: `disk` is what all ranks together read from the disk,
relative to the size of the files. All ranks are forked from one process that has imported everything, so that many of
them fit into this machine; `imports` is what the agent of a node spends on that, or on several nodes each worker. CPU
seconds hold on any machine; `wall`, in which each rank also waits for the others, only where each rank has a core.
With `--meet` the ranks only form their process groups: then 128 fit into 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import common

LENGTH = 128
RECIPE = f"""
output_dir: FOLDER/run
model: {{id: FOLDER/model, tokenizer: {{train: 512}}}}
data: {{path: {common.ROOT}/recipes/data/tinyshakespeare.txt, seq_len: {LENGTH}}}
fsdp: {{strategy: STRATEGY, mixed_precision: {{param_dtype: float32}}}}
train: {{steps: 1}}
checkpoint: {{every: null}}
export: {{at_end: false}}
log: {{forecast: false, tensorboard: false}}
"""
# stage → the function of the set-up that it is, as `fsdptrain.train.trainer` knows it
STAGES = {
    "model, data": "prepare_inputs", "meet": "World.start", "compare": "check_same_inputs", "folder": "open_run_folder",
    "shard": "build", "load": "load_state", "copies": "check_replicas", "step": "Trainer.step",
}  # fmt: skip
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--meet", action="store_true")
    options = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    begun = time.process_time()
    import fsdptrain.train.worker  # noqa: F401

    imports = time.process_time() - begun
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FSDPTRAIN_CACHE"] = f"{name}/cache"
        recipe = RECIPE.replace("FOLDER", name).replace("STRATEGY", options.strategy)
        (folder / "recipe.yaml").write_text(recipe)
        write_model(folder / "model")
        start(folder, 1, options.meet)  # fills the cache
        found = {n: [start(folder, n, options.meet) for _ in range(options.rounds)] for n in options.ranks}
    print(options.strategy)
    report(found, imports)


def write_model(folder: Path) -> None:
    """Write the random model in a process of its own: one that has computed cannot be forked."""
    if os.fork() == 0:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**common.LLAMA, vocab_size=8192)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        os._exit(0)
    os.wait()


def start(folder: Path, world: int, meet: bool) -> list[Figures]:
    """Start a run on so many ranks; return the figures of each rank. Exits if a rank fails."""
    files = [*folder.glob("model/*.safetensors")]
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    port, results = common.free_port(), Path(tempfile.mkdtemp(dir=folder))
    children = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in environment.items()}}
            with (results / f"{rank}.log").open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            run_rank(folder, world, meet, results / f"{rank}.json")
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        failed = next(rank for rank, code in enumerate(codes) if code)
        sys.exit(f"rank {failed} of {world} failed:\n{(results / f'{failed}.log').read_text()}")
    size = sum(file.stat().st_size for file in files)
    figures = [json.loads((results / f"{rank}.json").read_text()) for rank in range(world)]
    return [{**each, "disk": each["disk"] / size} for each in figures]


def run_rank(folder: Path, world: int, meet: bool, result: Path) -> NoReturn:
    """Set up one rank and make its first step, timing each stage; with `meet` only form its process groups."""
    code = 1
    try:
        result.write_text(json.dumps(timed_start(folder, world, meet)))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def timed_start(folder: Path, world: int, meet: bool) -> Figures:
    """Return the CPU seconds of each stage on this rank, its wall seconds, and what it read from the disk."""
    from fsdptrain.config.reader import load
    from fsdptrain.plan.plan import make_plan
    from fsdptrain.plan.topology import Topology
    from fsdptrain.processes import StopRequest
    from fsdptrain.train import trainer

    figures = {"disk": -float(bytes_from_disk())}
    for stage, name in STAGES.items():
        owner: Any = trainer
        *parents, function = name.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, function, timed(stage, getattr(owner, function), figures))
    begun, cpu = time.perf_counter(), time.process_time()
    overrides = [f"output_dir={folder}/run-{world}-{os.environ['MASTER_PORT']}", f"train.global_batch_size={world}"]
    plan = make_plan(load(folder / "recipe.yaml", overrides), Topology("cpu", 1, world))
    if meet:
        trainer.World.start(plan, StopRequest())
    else:
        common.set_up_rank(plan).step(0)
    figures["disk"] += bytes_from_disk()
    return figures | {"all": time.process_time() - cpu, "wall": time.perf_counter() - begun}


def timed(stage: str, function: Callable[..., Any], figures: Figures) -> Callable[..., Any]:
    """Return the function, which notes the CPU seconds that this process spends while it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        result = function(*args, **kwargs)
        figures[stage] = time.process_time() - begun
        return result

    return run


def bytes_from_disk() -> int:
    """Return what this process has read from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def report(found: dict[int, list[list[Figures]]], imports: float) -> None:
    """Print the medians over ranks and rounds, and what rank 0 spends more than the median of the others."""
    print(f"{common.describe_machine()}\nimports {imports:.2f} CPU seconds\n\nCPU seconds, median of the ranks")
    names = [name for name in (*STAGES, "all", "wall") if name in next(iter(found.values()))[0][0]]
    print(f"{'ranks':>5}" + "".join(f"{name:>{max(8, len(name) + 2)}}" for name in names) + f"{'disk':>8}")
    for world, rounds in found.items():
        ranks = [each for figures in rounds for each in figures]
        print(row(world, {name: statistics.median(each[name] for each in ranks) for name in names}), end="")
        print(f"{sum(each['disk'] for each in ranks) / len(rounds):8.2f}")
    print("\nrank 0, more than the median of the others")
    for world, rounds in found.items():
        if world > 1:
            more = {
                name: statistics.median(f[0][name] - statistics.median(each[name] for each in f[1:]) for f in rounds)
                for name in names[:-1]
            }
            print(row(world, more))


def row(world: int, figures: Figures) -> str:
    """Return a row of the table."""
    return f"{world:>5}" + "".join(f"{value:{max(8, len(name) + 2)}.3f}" for name, value in figures.items())


if __name__ == "__main__":
    main()
