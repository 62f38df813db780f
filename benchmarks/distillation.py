"""What a student learns from a larger teacher and from the text alone, and what truncation leaves out of it.

    fsdptrain run shakespeare-teacher
    python benchmarks/distillation.py [SEED …]

Trains the student of `shakespeare-distill` three times for each seed, in the same order of the same rows, and writes
the figure and the tables of docs/distillation.md. On two idle cores that takes a quarter of an hour.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from common import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdptrain.model.distillation import bucket_log_probs, top_log_probs

RUNS, DOCUMENT, FIGURE = Path("runs"), ROOT / "docs" / "distillation.md", ROOT / "docs" / "distillation.svg"
TEACHER, TEXT = RUNS / "shakespeare-teacher", ROOT / "recipes" / "data" / "tinyshakespeare.txt"
STEPS, EVERY, SEEDS = 200, 25, (42, 43, 44)
KINDS = {  # what a student learns from → the recipe, the words behind it
    "the text alone": ("shakespeare", []),
    "a teacher, k = 64": ("shakespeare-distill", [f"teacher.id={TEACHER}/export", "teacher.top_k=64"]),
    "a teacher, k = 512": ("shakespeare-distill", [f"teacher.id={TEACHER}/export"]),
}
CHOICES, LENGTH = (8, 32, 64, 128, 512), 256


def run_of(kind: str, seed: int) -> Path:
    return RUNS / f"distillation-{kind.split()[-1]}-{seed}"


def curve(kind: str, seed: int) -> list[tuple[int, float]]:
    """Train a student, unless that is done; return (step, cross-entropy of the held-out text) of each evaluation."""
    run, (recipe, own) = run_of(kind, seed), KINDS[kind]
    words = [f"seed={seed}", f"train.steps={STEPS}", f"eval.every={EVERY}", f"output_dir={run}", "log.trackers=[]"]
    if not (run / "export").is_dir():
        subprocess.run([sys.executable, "-m", "fsdptrain", "run", recipe, *words, *own], check=True)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(e["step"], e.get("cross_entropy", e["loss"])) for e in events if e["event"] == "eval"]


def held_out_loss(run: Path) -> float:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([e["loss"] for e in events if e["event"] == "eval"][-1])


def draw(curves: dict[str, list[list[tuple[int, float]]]], teacher: float) -> None:
    """Draw the curves of all seeds."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for colour, (kind, of_seeds) in zip(("tab:gray", "tab:cyan", "tab:blue"), curves.items(), strict=True):
        for number, points in enumerate(of_seeds):
            label = None if number else f"from {kind}"
            axes.plot(*zip(*points[1:], strict=True), color=colour, marker="o", markersize=3, label=label)
    axes.axhline(teacher, color="tab:green", linestyle="--", linewidth=1, label="the teacher itself")
    axes.set(xlabel="step", ylabel="held-out cross-entropy, nats per token")
    axes.legend(frameon=False)
    figure.savefig(FIGURE)


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    """Return the logits [tokens, V] of a model on the end of the text, in rows of LENGTH tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT.read_text()[-40_000:], return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return torch.cat([model(each).logits.flatten(0, 1) for each in rows.split(8)]).float()


def truncation(teacher: torch.Tensor, student: torch.Tensor) -> list[list[str]]:
    """Return rows of a table: k, mass of the others, KL and its gradient relative to those of all tokens, bytes."""

    def divergence(top_k: int) -> tuple[float, float, torch.Tensor]:
        leaf = student.detach().requires_grad_()
        ids, p = top_log_probs(teacher, top_k, 1.0)
        q = bucket_log_probs(leaf.log_softmax(-1), ids.long())
        kl = (p.exp() * (p - q)).sum(1).mean()
        return float(p[:, -1].exp().mean()), float(kl.detach()), torch.autograd.grad(kl, leaf)[0]

    _, whole, gradient = divergence(teacher.shape[1])
    rows = []
    for k in CHOICES:
        others, kl, found = divergence(k)
        apart = float((found - gradient).norm() / gradient.norm())
        rows.append(
            [f"{k}", f"{others:.1%}", f"{kl / whole:.1%}", f"{apart:.1%}", f"{8 * k + 4:,}", f"{8 * k + 4:,} GB"]
        )
    return rows


def table(header: str, rows: list[list[str]]) -> str:
    lines = [f"| {header} |", "|" + " ---: |" * len(header.split(" | ")), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def write(name: str, text: str) -> None:
    """Replace what is between the marks of this name in the document."""
    before, mark, rest = DOCUMENT.read_text().partition(f"<!-- {name} -->\n")
    DOCUMENT.write_text(f"{before}{mark}{text}\n<!-- end{rest.partition('<!-- end')[2]}")


def main() -> None:
    """Train what is missing, and write figure and tables."""
    seeds: Any = [*map(int, sys.argv[1:])] or SEEDS
    curves = {kind: [curve(kind, seed) for seed in seeds] for kind in KINDS}
    teacher = held_out_loss(TEACHER)
    draw(curves, teacher)
    steps = [step for step, _ in next(iter(curves.values()))[0]][1:]
    losses = {
        kind: [[dict(points)[step] for points in of_seeds] for step in steps] for kind, of_seeds in curves.items()
    }
    rows = [
        [f"{step}", *(f"{statistics.fmean(each):.3f} ({min(each):.3f} to {max(each):.3f})" for each in pair)]
        for step, *pair in zip(steps, *losses.values(), strict=True)
    ]
    write("curves", table(" | ".join(["step", *(f"from {kind}" for kind in KINDS)]), rows))
    student = run_of("the text alone", seeds[0]) / "export"
    header = "k | mass of the others | KL | its gradient is off by | bytes a token | for 10⁹ tokens"
    write("truncation", table(header, truncation(logits_of(TEACHER / "export"), logits_of(student))))
    print(f"the teacher itself: {teacher:.3f}")


if __name__ == "__main__":
    main()
