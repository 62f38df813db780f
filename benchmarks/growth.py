"""Growth of step time and memory with ranks, depth, length and accumulation; of host memory with the data set.

    python benchmarks/growth.py [--rounds 1]

Every row is a `fsdptrain run` of a small Llama on gloo ranks. Its metrics give the median step after the first, and the
peak resident memory of the worst rank minus the memory before the model. In the first table each row changes one
setting of `base`; the global batch is constant, so with more ranks the work of the step is too. The second table uses
rows made of GSM8K's questions, each with a number in front so that all are different. `peak` is the worker's peak
resident memory from its start through preparation and training. `own` (read every 20 ms) is without mapped pages of
files, which the kernel drops when memory is short. The tokenizer is in the cache, the tokens are not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
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

STEPS = 3
SHIPPED = common.ROOT / "recipes" / "data"
RECIPE = f"""
model:
  config: {{model_type: llama, vocab_size: 2048, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4,
            num_attention_heads: 4, max_position_embeddings: 2048, tie_word_embeddings: true}}
  tokenizer: {{train: 2048}}
  init: random
data: {{path: {SHIPPED}/tinyshakespeare.txt, seq_len: 512}}
fsdp: {{mixed_precision: {{param_dtype: {common.compute_dtype()}}}}}
train: {{steps: {STEPS}, global_batch_size: 8, micro_batch_size: 2}}
checkpoint: {{every: null}}
export: {{at_end: false}}
log: {{forecast: false, tensorboard: false}}
launch: {{nproc_per_node: 2}}
"""
ACCUMULATED = [
    (f"accumulation {n}, {how}", f"train.global_batch_size={4 * n}", f"fsdp.accumulation={how}")
    for n, how in itertools.product((1, 2, 4), ("reduce", "hold"))
]
GROWTHS: dict[str, list[str]] = {
    "base": [],
    **{f"ranks {n}": [f"launch.nproc_per_node={n}"] for n in (1, 4)},
    **{f"layers {n}": [f"model.config.num_hidden_layers={n}"] for n in (2, 8)},
    **{f"seq_len {n}": [f"data.seq_len={n}"] for n in (256, 1024, 2048)},
    **{name: overrides for name, *overrides in ACCUMULATED},
}
ROWS = (2_000, 20_000, 200_000)
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        measure_step(folder, "train.steps=1")  # trains the tokenizer
        contenders: dict[str, Callable[[], Figures]] = {
            name: functools.partial(measure_step, folder, *overrides) for name, overrides in GROWTHS.items()
        }
        contenders |= {f"{rows:,} rows": functools.partial(measure_rows, folder, rows) for rows in ROWS}
        report(common.alternate(contenders, rounds))


def report(found: dict[str, list[Figures]]) -> None:
    """Print the tables, with medians over the rounds."""
    middle = {name: {w: statistics.median(e[w] for e in each) for w in each[0]} for name, each in found.items()}
    base = middle["base"]
    print(f"{common.describe_machine()}\n{len(found['base'])} rounds of {STEPS} steps")
    print(
        "base: 2 ranks, 4 layers, seq_len 512, a global batch of 8 in micro-batches of 2, so accumulation 2 (reduce)\n"
    )
    print(f"{'':24}{'step s':>8}{'to base':>9}{'peak MB':>9}{'to base':>9}")
    for name in GROWTHS:
        step, peak = middle[name]["step"], middle[name]["peak"]
        print(f"{name:24}{step:8.3f}{step / base['step']:7.2f} x{peak / 1e6:9.0f}{peak / base['peak']:7.2f} x")
    names = [f"{rows:,} rows" for rows in ROWS]
    first = middle[names[0]]
    print(f"\n{'':24}{'file MB':>8}{'first batch s':>15}{'peak MB':>9}{'own MB':>8}{'own, over the first':>21}")
    for name in names:
        each = middle[name]
        print(
            f"{name:24}{each['file'] / 1e6:8.1f}{each['first']:15.1f}{each['peak'] / 1e6:9.0f}{each['own'] / 1e6:8.0f}"
            f"{(each['own'] - first['own']) / 1e6:18.0f} MB"
        )


def measure_step(folder: Path, *overrides: str) -> Figures:
    """Run a few steps; return the seconds and the peak memory of a step."""
    events = common.run_fsdptrain(RECIPE, folder, *overrides)
    start = next(event for event in events if event["event"] == "start")
    steps = [event for event in events if event["event"] == "step"]
    peak = max(step["peak_memory_bytes"] for step in steps) - start["baseline_memory_bytes"]
    return {"step": statistics.median(step["step_s"] for step in steps[1:] or steps), "peak": peak}


def measure_rows(folder: Path, rows: int) -> Figures:
    """Run one rank on `rows` rows with an empty cache; return the seconds to its first batch, and its memory."""
    data = folder / f"rows-{rows}.jsonl"
    if not data.exists():
        write_rows(data, rows)
    tokenizer = next(folder.glob("*/run/model"))  # from the first run
    figures: Figures = {"file": data.stat().st_size, "first": 0.0, "own": 0.0}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        recipe = RECIPE.replace(f"{SHIPPED}/tinyshakespeare.txt", f"{data}, format: text, packing: bfd")
        (Path(own) / "recipe.yaml").write_text(recipe.replace("{train: 2048}", str(tokenizer)))
        arguments = [f"{own}/recipe.yaml", f"output_dir={own}/run", "launch.nproc_per_node=1", "train.steps=3"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FSDPTRAIN_CACHE": f"{own}/cache"}
        started = time.time()
        run = subprocess.Popen(
            [sys.executable, "-m", "fsdptrain", "run", *arguments], env=environment, stdout=subprocess.DEVNULL
        )
        metrics = Path(own) / "run" / "metrics.jsonl"
        while run.poll() is None:
            time.sleep(0.02)
            figures["own"] = max(figures["own"], worker_memory(f"{own}/run/plan.json"))
            if not figures["first"] and metrics.exists() and metrics.stat().st_size:
                figures["first"] = time.time() - started  # the `start` event comes just before the first batch
        if run.returncode:
            sys.exit(f"fsdptrain run {' '.join(arguments)} exited with {run.returncode}")
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return figures | {"peak": max(event.get("peak_memory_bytes", 0) for event in events)}


def write_rows(path: Path, count: int) -> None:
    """Write `count` rows of text, all different."""
    lines = (SHIPPED / "gsm8k-train.jsonl").read_text().splitlines()
    questions = itertools.cycle([json.loads(line)["question"] for line in lines])
    with path.open("w") as stream:
        for number, question in zip(range(count), questions, strict=False):
            stream.write(json.dumps({"text": f"{number} {question}"}) + "\n")


def worker_memory(plan: str) -> float:
    """Return the anonymous memory of the worker of a plan in bytes, or 0 if there is none yet."""
    found = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):  # a process may end at any moment
            command = (process / "cmdline").read_text().split("\0")
            if "fsdptrain.train.worker" in command and plan in command:
                found = max(found, common.process_memory("RssAnon", process.name))
    return found


if __name__ == "__main__":
    main()
