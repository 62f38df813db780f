"""How step time and memory grow with ranks, depth, length and accumulation; host memory with the size of a data set.

    python benchmarks/growth.py [--rounds 1]

Every row is `fsdptrain run` of a small Llama on gloo ranks, from its metrics: the median step after the first, and the
peak resident memory of the worst rank over what it had before the model. In the first table each row changes one thing
against `base`; with ranks the global batch stays, so the work of the step does too. The second table repeats rows of
GSM8K's questions, each with a number before it so that no two are equal: `peak` is the worker's highest resident memory
from its start through preparation and training, `own` (looked at every 20 ms) leaves out mapped pages of files, which
the kernel drops when it needs the room. The tokenizer is there, the tokens are not.
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
    **{name: words for name, *words in ACCUMULATED},
}
ROWS = (2_000, 20_000, 200_000)
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stepped(folder, "train.steps=1")  # trains the tokenizer
        contenders: dict[str, Callable[[], Figures]] = {
            what: functools.partial(stepped, folder, *words) for what, words in GROWTHS.items()
        }
        contenders |= {f"{rows:,} rows": functools.partial(prepared, folder, rows) for rows in ROWS}
        report(common.alternate(contenders, rounds))


def report(found: dict[str, list[Figures]]) -> None:
    """Medians over the rounds."""
    middle = {name: {w: statistics.median(e[w] for e in each) for w in each[0]} for name, each in found.items()}
    base = middle["base"]
    print(f"{common.machine()}\n{len(found['base'])} rounds of {STEPS} steps")
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


def stepped(folder: Path, *words: str) -> Figures:
    """A run of a few steps: what a step took and needed."""
    events = common.train(RECIPE, folder, *words)
    start = next(event for event in events if event["event"] == "start")
    steps = [event for event in events if event["event"] == "step"]
    peak = max(step["peak_memory_bytes"] for step in steps) - start["baseline_memory_bytes"]
    return {"step": statistics.median(step["step_s"] for step in steps[1:] or steps), "peak": peak}


def prepared(folder: Path, rows: int) -> Figures:
    """A run on one rank over so many rows, from an empty cache: seconds to its first batch, and the worker's memory."""
    data = folder / f"rows-{rows}.jsonl"
    if not data.exists():
        write_rows(data, rows)
    tokenizer = next(folder.glob("*/run/model"))  # what the first run of all left
    figures: Figures = {"file": data.stat().st_size, "first": 0.0, "own": 0.0}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        recipe = RECIPE.replace(f"{SHIPPED}/tinyshakespeare.txt", f"{data}, format: text, packing: bfd")
        (Path(own) / "recipe.yaml").write_text(recipe.replace("{train: 2048}", str(tokenizer)))
        words = [f"{own}/recipe.yaml", f"output_dir={own}/run", "launch.nproc_per_node=1", "train.steps=3"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FSDPTRAIN_CACHE": f"{own}/cache"}
        started = time.time()
        run = subprocess.Popen(
            [sys.executable, "-m", "fsdptrain", "run", *words], env=environment, stdout=subprocess.DEVNULL
        )
        metrics = Path(own) / "run" / "metrics.jsonl"
        while run.poll() is None:
            time.sleep(0.02)
            figures["own"] = max(figures["own"], worker_memory(f"{own}/run/plan.json"))
            if not figures["first"] and metrics.exists() and metrics.stat().st_size:
                figures["first"] = time.time() - started  # the `start` event: the first batch is next
        if run.returncode:
            sys.exit(f"fsdptrain run {' '.join(words)} ended with {run.returncode}")
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return figures | {"peak": max(event.get("peak_memory_bytes", 0) for event in events)}


def write_rows(path: Path, count: int) -> None:
    """So many rows of text, no two of them equal."""
    lines = (SHIPPED / "gsm8k-train.jsonl").read_text().splitlines()
    questions = itertools.cycle([json.loads(line)["question"] for line in lines])
    with path.open("w") as stream:
        for number, question in zip(range(count), questions, strict=False):
            stream.write(json.dumps({"text": f"{number} {question}"}) + "\n")


def worker_memory(plan: str) -> float:
    """The anonymous memory of the worker of this plan; 0 while there is none."""
    found = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):  # it may end at any moment
            words = (process / "cmdline").read_text().split("\0")
            if "fsdptrain.train.worker" in words and plan in words:
                found = max(found, common.status("RssAnon", process.name))
    return found


if __name__ == "__main__":
    main()
