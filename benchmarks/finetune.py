"""Fine-tune one model on grade-school maths with all weights, LoRA and QLoRA; draw the held-out losses.

    fsdptrain run shakespeare
    python benchmarks/finetune.py runs/shakespeare/export RUNS docs/finetune.png [OVERRIDE ...]

Every run starts from the same weights and has the same rows, and the learning rate of its shipped recipe. The runs are
in the folder RUNS: what is there already is not trained again. Overrides apply to every run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import common

RECIPE = [
    "data.max_rows=null", "data.eval={path: data/gsm8k-test.jsonl, max_rows: 100}", "train.epochs=0.65",
    "train.global_batch_size=4", "train.micro_batch_size=2", "eval.every=20", "checkpoint.every=null",
    "export.at_end=false", "log.forecast=false", "log.tensorboard=false",
]  # fmt: skip
WAYS = {  # what is trained → recipe and overrides
    "all weights": ["gsm8k-sft"],
    "LoRA": ["gsm8k-lora"],
    "QLoRA": ["gsm8k-lora", "adapter.kind=qlora"],
}
Events = list[dict[str, Any]]


def main(model: Path, runs: Path, picture: Path, *overrides: str) -> None:
    words = [*RECIPE, f"model.id={model.absolute()}", *overrides]
    found = {name: train(runs / name, *way, *words) for name, way in WAYS.items()}
    start = evaluations(found["all weights"])[0][1]
    print(f"{common.describe_machine()}\nheld-out loss at the start {start:.3f}\n")
    print("| trained | parameters | held-out loss | seconds a step | checkpoint |\n| --- | --- | --- | --- | --- |")
    for name, events in found.items():
        first = next(event for event in events if event["event"] == "start")
        count = first.get("trainable", first["parameters"])
        seconds = statistics.median(event["step_s"] for event in events if event["event"] == "step")
        newest = max((runs / name / "checkpoints").glob("step-*"))
        size = sum(path.stat().st_size for path in newest.glob("*.safetensors"))
        loss = evaluations(events)[-1][1]
        print(f"| {name} | {count:,} | {loss:.3f} | {seconds:.2f} | {size / 1e6:.1f} MB |")
    draw(picture, {name: evaluations(events) for name, events in found.items()})


def train(run: Path, recipe: str, *overrides: str) -> Events:
    """Train in this folder, or continue there, as a user does; return the events of the run. Exits on failure."""
    command = [sys.executable, "-m", "fsdptrain", "run", recipe, f"output_dir={run}", *overrides]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluations(events: Events) -> list[tuple[int, float]]:
    """Return (step, held-out loss) of every evaluation."""
    return [(event["step"], event["loss"]) for event in events if event["event"] == "eval"]


def draw(path: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    """Draw the held-out loss over the steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, found), line in zip(curves.items(), ("o-", "o-", "x--"), strict=True):  # two may be nearly equal
        steps, losses = zip(*found, strict=True)
        axes.plot(steps, losses, line, ms=6 if "x" in line else 4, label=f"{name}: {losses[-1]:.2f}")
    axes.set(xlabel="steps", ylabel="held-out loss, nats a token", title="GSM8K from the same start")
    axes.grid(axis="y", color="0.9")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit((__doc__ or "").strip())
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:])
