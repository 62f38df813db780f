"""Which plan for which machine: search the fastest plans for models of 1B to 405B on 1 to 1,024 GPUs.

    python benchmarks/choosing.py [PART_OF_A_MODEL …]

Asks `fsdptrain validate --advise` for every row, as a user does, and writes the table of docs/choosing.md: at first the
fastest plan that fits, then the fastest that differs from it in what ranks divide, and why it is slower. Takes minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT

from fsdptrain.forecast.render import why_slower
from fsdptrain.forecast.search import Option

DOCUMENT, HEADING = ROOT / "docs" / "choosing.md", "## The table"
GIB = 2**30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
SHAPES = {  # layers, hidden size, intermediate size, heads, more
    "Llama 3.2 1B": (16, 2048, 8192, 32, {"head_dim": 64, "tie_word_embeddings": True}),
    "Llama 3.1 8B": (32, 4096, 14336, 32, {}),
    "Qwen3 32B": (64, 5120, 25600, 64, {"model_type": "qwen3", "vocab_size": 151936}),
    "Llama 3.3 70B": (80, 8192, 28672, 64, {}),
    "Llama 3.1 405B": (126, 16384, 53248, 128, {}),
}
H100 = "h100-80gb"
SLOW = "memory=84.9e9,flops=989e12,intra_bw=330e9,inter_bw=1.5e9"  # the same card, 100 Gbit/s for the 8 of a node
JOBS = [  # model, nodes, GPUs of a node, hardware, rows of 4,096 tokens in a step
    ("Llama 3.2 1B", 1, 1, H100, 64), ("Llama 3.1 8B", 1, 1, H100, 64), ("Llama 3.1 8B", 1, 8, H100, 128),
    ("Qwen3 32B", 1, 8, H100, 128), ("Llama 3.3 70B", 1, 8, H100, 64), ("Llama 3.3 70B", 8, 8, H100, 64),
    ("Llama 3.3 70B", 8, 8, SLOW, 128), ("Llama 3.1 405B", 16, 8, H100, 128),
    ("Llama 3.1 405B", 128, 8, H100, 1024), ("Llama 3.1 405B", 128, 8, SLOW, 1024),
]  # fmt: skip
RECIPE = """
name: {name}
model: {{id: org/model, config: {config}}}
data: {{path: train.jsonl, format: chat, seq_len: 4096}}
fsdp: {{strategy: FULL_SHARD, activation_checkpointing: full}}
train: {{global_batch_size: {rows}, micro_batch_size: 1}}
launch: {{nnodes: {nodes}, nproc_per_node: {gpus}}}
"""
COLUMNS = [
    "model",
    "machine",
    "rows a step",
    "GiB of ZeRO 1, 2, 3",
    "fastest plan",
    "GiB",
    "tok/s a GPU",
    "the next one",
]


def main() -> None:
    parts = sys.argv[1:]
    jobs = [job for job in JOBS if not parts or any(part in job[0] for part in parts)]
    table = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            table.append(f"| {' | '.join(row(Path(folder), *job))} |")
            print(table[-1], flush=True)
            if not parts:  # the rows so far
                text = DOCUMENT.read_text(encoding="utf-8").partition(f"{HEADING}\n")[0]
                DOCUMENT.write_text("\n".join([f"{text}{HEADING}\n", *table, ""]), encoding="utf-8")


def row(folder: Path, model: str, nodes: int, gpus: int, hardware: str, rows: int) -> list[str]:
    layers, hidden, intermediate, heads, more = SHAPES[model]
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    config = json.dumps(LLAMA | sizes | {"num_attention_heads": heads} | more)
    recipe, ranks, began = folder / "recipe.yaml", nodes * gpus, time.monotonic()
    recipe.write_text(RECIPE.format(name="job", config=config, rows=rows, nodes=nodes, gpus=gpus))
    words = [sys.executable, "-m", "fsdptrain", "validate", str(recipe), "--hardware", hardware, "--advise", "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    print(f"{model} on {nodes} × {gpus}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    found = json.loads(done.stdout)
    parameters, links = found["model"]["parameters"], ", 100 Gbit/s between nodes" if hardware == SLOW else ""
    # bfloat16 weights 2 B and gradients 2 B, float32 master weights and two moments 12 B: 16 B a parameter.
    zero = [(4 + 12 / ranks) * parameters, (2 + 14 / ranks) * parameters, 16 / ranks * parameters]
    beside = ", ".join(f"{size / GIB:,.0f}" for size in zero)
    machine = f"{nodes} × {gpus}{links}" if nodes > 1 else f"{gpus}"
    options = [option for option in found["advice"]["options"] if option["fits"]]
    if not options:
        return [model, machine, f"{rows:,}", beside, "none fits", "", "", ""]
    best = options[0]
    other = next((option for option in options if divided(option) != divided(best)), None)
    needed = f"{best['memory_bytes'] / GIB:.1f}, only just" if best["tight"] else f"{best['needed_bytes'] / GIB:.1f}"
    speed = f"{best['tokens_per_s'] / ranks:,.0f}"
    return [model, machine, f"{rows:,}", beside, f"**{described(best)}**", needed, speed, compared(other, best)]


def divided(option: dict[str, Any]) -> dict[str, int]:
    """Return what ranks divide in a plan, beside FSDP."""
    keys = ("tensor", "pipeline", "context")
    return {key: ranks for key in keys if (ranks := option["overrides"].get(f"parallel.{key}", 1)) > 1}


def described(option: dict[str, Any]) -> str:
    recomputed = option["activation_checkpointing"]
    kind = recomputed if isinstance(recomputed, str) else recomputed["kind"]
    words = [f"{key} {ranks}" for key, ranks in divided(option).items()]
    group = f" of {option['shard_size']}" if option["strategy"].startswith("HYBRID") else ""
    words += [option["strategy"] + group, f"{option['accumulation']} × {option['micro_batch_size']}"]
    words += [f"{kind} recomputation" if kind != "none" else "no recomputation"]
    return ", ".join([*words, *["state in host memory"] * option["cpu_offload"]])


def compared(option: dict[str, Any] | None, best: dict[str, Any]) -> str:
    if option is None:
        return "FSDP alone is best" if not divided(best) else "no other fits"
    name = ", ".join(f"{key} {ranks}" for key, ranks in divided(option).items()) or "FSDP alone"
    return f"{name}: {option['step_s'] / best['step_s'] - 1:+.0%} time ({why_slower(Option(**option), Option(**best))})"


if __name__ == "__main__":
    main()
