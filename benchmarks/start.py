"""Waiting time: for help, for recipe errors, and for the first step of a run, compared with a bare FSDP2 script.

    python benchmarks/start.py [--rounds 5]

The run is a Llama of 22 million parameters on two gloo ranks, from `fsdptrain run` to the `step` event of its first
step; it computes in bfloat16 if the CPU has instructions for it, else in float32. `cold` has an empty cache; `warm` has
the tokenizer and the tokens in the cache. The bare script is started as one process a rank, without a launcher. It
imports what every such trainer needs, and makes the same first step of the same model on random tokens, without recipe,
data, checkpoints or any file written.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

WORLD, ROWS, LENGTH = 2, 4, 512
SHAPE = common.LLAMA | {"vocab_size": 8192}
RECIPE = f"""
model:
  config: {json.dumps(SHAPE)}
  tokenizer: {{train: {SHAPE["vocab_size"]}}}
  init: random
data: {{path: {common.ROOT}/recipes/data/tinyshakespeare.txt, seq_len: {LENGTH}}}
fsdp: {{mixed_precision: {{param_dtype: {common.compute_dtype()}}}}}
train: {{steps: 1, global_batch_size: {ROWS * WORLD}, micro_batch_size: {ROWS}}}
checkpoint: {{every: null}}
export: {{at_end: false}}
launch: {{nproc_per_node: {WORLD}}}
"""
BROKEN = RECIPE.replace("micro_batch_size", "micro_batch").replace("random", "none").replace("steps: 1", "steps: one")
Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        contenders: dict[str, Callable[[], Times]] = {
            "--help": lambda: run_command("--help", expected=0),
            "three errors": lambda: run_command(
                "run", write(folder / "broken.yaml", BROKEN), expected=2, message="3 problems"
            ),
            "bare": bare,
            "ours, warm": functools.partial(first_step, folder, folder / "warm"),
            "ours, cold": functools.partial(first_step, folder),
        }
        first_step(folder, folder / "warm")  # fills the cache
        found = common.alternate(contenders, rounds)
    report(found)


def report(found: dict[str, list[Times]]) -> None:
    """Print the medians over the rounds, and the ratios to the bare script."""
    middle = {
        name: {figure: statistics.median(each[figure] for each in times) for figure in times[0]}
        for name, times in found.items()
    }
    print(f"{common.describe_machine()}\n{len(found['bare'])} rounds, medians in seconds\n")
    print(f"{'':14}{'ready':>8}{'(lowest, highest)':>20}{'step begins':>13}{'ready, to bare':>16}")
    for name, times in found.items():
        ready = [each["ready"] for each in times]
        row = f"{name:14}{middle[name]['ready']:8.2f}{f'({min(ready):.2f}, {max(ready):.2f})':>20}"
        if "begins" in middle[name]:
            row += f"{middle[name]['begins']:13.2f}{middle[name]['ready'] / middle['bare']['ready']:14.2f} x"
        print(row)


def write(path: Path, text: str) -> str:
    """Write the text to the path; return the path as a string."""
    path.write_text(text)
    return str(path)


def run_command(*arguments: str, expected: int, message: str = "") -> Times:
    """Run `fsdptrain arguments` to its end; exit if its exit code or message is not the expected one."""
    started = time.time()
    done = subprocess.run([sys.executable, "-m", "fsdptrain", *arguments], capture_output=True, text=True)
    if done.returncode != expected or message not in done.stderr:
        sys.exit(f"fsdptrain {' '.join(arguments)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return {"ready": time.time() - started}


def first_step(folder: Path, cache: Path | None = None) -> Times:
    """Run `fsdptrain run` and time it until its metrics have the first step; without `cache`, with an empty cache."""
    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    cache = cache or output.parent / "cache"
    arguments = ["run", write(output.parent / "recipe.yaml", RECIPE), f"output_dir={output}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FSDPTRAIN_CACHE": str(cache)}
    started = time.time()
    run = subprocess.Popen(
        [sys.executable, "-m", "fsdptrain", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    ready = None
    while ready is None and run.poll() is None:
        time.sleep(0.01)
        ready = first_step_s(output / "metrics.jsonl")
    ended = time.time()
    output_text = run.communicate()[0].decode()
    if ready is None or run.returncode:
        sys.exit(f"the run exited with {run.returncode}:\n{output_text}")
    return {"ready": ended - started, "begins": ended - started - ready}


def first_step_s(metrics: Path) -> float | None:
    """Return the seconds of the first step, or None if it is not in the metrics yet."""
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    events = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return next((event["step_s"] for event in events if event["event"] == "step"), None)


def bare() -> Times:
    """Run fresh ranks of `bare_rank`; return the times of the slower one."""
    started = time.time()
    results = common.run_ranks(Path(__file__), WORLD)
    return {figure: max(each[figure] for each in results) - started for figure in results[0]}


def bare_rank() -> None:
    """Run one rank of the bare script; pass on the times at which its first step began and ended."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE), dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, common.compute_dtype()), reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    rotary = model.model.rotary_emb
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(rotary)(model.config)  # its buffers were on the meta device and are in no state dict
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    begins = time.time()
    tokens = torch.randint(SHAPE["vocab_size"], (ROWS, LENGTH))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    common.exit_with_result({"ready": time.time(), "begins": begins})


if __name__ == "__main__":
    bare_rank() if "RANK" in os.environ else main()
