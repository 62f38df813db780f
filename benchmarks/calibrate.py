"""Calibrate the forecast of time on published runs: fit on some, check on the others, print the errors, plot them.

    python benchmarks/calibrate.py [--traces FOLDER] [--plot docs/calibration.png]

`published_runs.csv` holds 160 runs of llm-foundry (MPT models, FSDP, 2023; Apache-2.0, MosaicML). Each is written as a
recipe of a GPT-2 of the same shape: tied embeddings, learned positions, an MLP of 4·H without a gate. One step of it is
simulated at two depths, and the time of the whole depth follows on a line. One figure of a card family is fitted, on
the rows of at most 2,048 tokens: what matrix products reach of the peak. The share of attention is not fitted: these
runs had FlashAttention 1, which takes twice the time of FlashAttention 2 (Dao, arXiv:2307.08691), so that the shares of
`config.hardware` are halved for them.

For the errors a model size is left out, the figure is fitted on the other sizes, and the rows of this size are
forecast. Traces take about 15 minutes on one core; with `--traces` they are kept.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import pickle
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers import AutoConfig

from fsdptrain.config.hardware import KNOWN, Hardware
from fsdptrain.config.plan import make_plan
from fsdptrain.config.reader import load
from fsdptrain.config.topology import Topology
from fsdptrain.forecast.timing import recomputation_s, replay_streams
from fsdptrain.forecast.trace import Alloc, Event, Free, Trace
from fsdptrain.simulate.step import simulate

DEPTHS = (3, 6)
FITTED = ("product_share",)
FITTED_TOKENS = 2048  # longer rows are dominated by attention, whose kernel was another one
FLASH_1 = 0.5  # of the rate of FlashAttention 2
FAMILIES = {"h100-80gb": "H100", "a100-80gb": "A100", "a100-40gb": "A100"}
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}


@dataclass(frozen=True)
class Run:
    """A published run: its recipe, and the seconds of its step."""

    name: str
    gpu: str
    gpus: int
    config: dict[str, Any]  # without the number of layers
    layers: int
    seq_len: int
    micro_batch: int
    accumulation: int
    step_s: float
    recompute: str = "none"
    strategy: str = "FULL_SHARD"
    master: str = "float32"
    reduce: str = "float32"
    flash_1: bool = False

    @property
    def nodes(self) -> int:
        """Machines of up to 8 GPUs."""
        return max(1, self.gpus // 8)

    def recipe(self, depth: int, folder: Path) -> dict[str, Any]:
        """Return the recipe of this run with so many layers."""
        layers = "n_layer" if self.config["model_type"] == "gpt2" else "num_hidden_layers"
        return {
            "output_dir": str(folder / "run"),
            "model": {
                "config": self.config | {layers: depth}, "tokenizer": {"train": 512}, "init": "random",
                "dtype": self.master, "attn_implementation": "sdpa",
            },
            "data": {"path": str(folder / "text.txt"), "seq_len": self.seq_len, "packing": "none"},
            "fsdp": {
                "strategy": self.strategy, "activation_checkpointing": self.recompute,
                "mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": self.reduce},
            },
            "train": {
                "steps": 1, "micro_batch_size": self.micro_batch,
                "global_batch_size": self.micro_batch * self.gpus * self.accumulation,
            },
            "launch": {"nproc_per_node": self.gpus // self.nodes, "nnodes": self.nodes}
            | ({"rdzv_endpoint": "host:29500"} if self.nodes > 1 else {}),
        }  # fmt: skip


def published_runs() -> list[Run]:
    """Return the rows of `published_runs.csv`."""
    with (Path(__file__).parent / "published_runs.csv").open() as file:
        return [_mpt(row) for row in csv.DictReader(file)]


def _mpt(row: dict[str, str]) -> Run:
    gpus, seq_len, micro, accumulation = (int(row[name]) for name in ("gpus", "seq_len", "micro_batch", "accumulation"))
    config = {
        "model_type": "gpt2", "vocab_size": int(row["vocab"]), "n_embd": int(row["hidden"]),
        "n_head": int(row["heads"]), "n_positions": seq_len, "activation_function": "gelu",
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    step_s = micro * gpus * accumulation * seq_len / float(row["tokens_per_s"])
    return Run(
        row["model"], row["gpu"], gpus, config, int(row["layers"]), seq_len, micro, accumulation, step_s,
        row["recompute"], row["strategy"], row["master"], row["reduce"], flash_1=True,
    )  # fmt: skip


def field_runs() -> list[Run]:
    """Return other published runs, none of them fitted: torchtitan (Dec 2024) and accelerate, tokens/s a GPU.

    torchtitan saves every second product under its selective recomputation, and `selective` here every one. Of the last
    it is not known whether it recomputes.
    """

    def run(name: str, gpu: str, gpus: int, config: Any, layers: int, rows: int, rate: float, recompute: str) -> Run:
        return Run(name, gpu, gpus, config, layers, 8192, rows, 1, rows * 8192 / rate, recompute)

    return [
        run("torchtitan 8B", "h100-80gb", 8, LLAMA_8B, 32, 2, 5762, "selective"),
        run("torchtitan 8B", "h100-80gb", 128, LLAMA_8B, 32, 2, 5605, "selective"),
        run("torchtitan 8B", "a100-80gb", 64, LLAMA_8B, 32, 1, 2973, "selective"),
        run("torchtitan 70B", "a100-80gb", 64, LLAMA_70B, 80, 1, 331, "full"),
        run("accelerate 8B", "h100-80gb", 8, LLAMA_8B, 32, 1, 8000, "full"),
        run("accelerate 8B", "h100-80gb", 8, LLAMA_8B, 32, 1, 8000, "none"),
    ]


def traces(run: Run, number: str, folder: Path) -> list[Trace]:
    """Simulate one step of a run at each of DEPTHS, or read what an earlier call left in `folder`."""
    found = []
    for depth in DEPTHS:
        path = folder / f"{number}-{depth}.pickle"
        if not path.exists():
            (folder / "text.txt").write_text("any text\n")
            recipe = folder / "recipe.yaml"
            recipe.write_text(yaml.safe_dump(run.recipe(depth, folder)))
            plan = make_plan(load(recipe), Topology("cuda", run.nodes, run.gpus // run.nodes))
            config = dict(plan.recipe.model.config)
            trace = simulate(plan, AutoConfig.for_model(config.pop("model_type"), **config), pretend=True)
            events: list[Event] = [event for event in trace.events if not isinstance(event, Alloc | Free)]
            path.write_bytes(pickle.dumps(Trace([], events)))
            print(f"simulated {run.name}, {run.gpus} × {run.gpu}, {run.seq_len} tokens, {depth} layers", flush=True)
        found.append(pickle.loads(path.read_bytes()))
    return found


def forecast_s(run: Run, shallow: Sequence[Trace], hardware: Hardware) -> float:
    """Return the forecast seconds of a step: linear in the micro-batches beyond two, and in the layers."""
    if run.flash_1:
        flash_1 = [share * FLASH_1 for share in hardware.attention_share["flash"]]
        hardware = dataclasses.replace(hardware, attention_share={"flash": flash_1})
    at_depth = []
    for trace in shallow:
        two, three = (
            replay_streams(trace.repeated(count), hardware, True, 8, recomputation_s(run.recompute)).step_s
            for count in (2, 3)
        )
        at_depth.append(two + max(0, run.accumulation - 2) * (three - two))
    low, high = DEPTHS
    return at_depth[0] + (run.layers - low) * (at_depth[1] - at_depth[0]) / (high - low)


@dataclass(frozen=True, eq=False)
class Measured:
    """A run with its traces."""

    run: Run
    shallow: Sequence[Trace]

    def log_error(self, figures: Sequence[float]) -> float:
        """Return log(forecast / published) with these values of FITTED."""
        return math.log(forecast_s(self.run, self.shallow, _with(KNOWN[self.run.gpu], figures)) / self.run.step_s)


def _with(hardware: Hardware, figures: Sequence[float]) -> Hardware:
    return dataclasses.replace(hardware, **dict(zip(FITTED, figures, strict=True)))  # type: ignore[arg-type]


def fit(rows: Sequence[Measured], start: Sequence[float], rounds: int = 3) -> list[float]:
    """Return the values of FITTED with the least squared log errors, by Gauss-Newton steps on their logarithms."""
    figures = list(start)
    for _ in range(rounds):
        errors = np.array([row.log_error(figures) for row in rows])
        slopes = []
        for i in range(len(figures)):
            moved = [value * (1.05 if i == j else 1.0) for j, value in enumerate(figures)]
            slopes.append((np.array([row.log_error(moved) for row in rows]) - errors) / math.log(1.05))
        change, *_ = np.linalg.lstsq(np.stack(slopes, axis=1), -errors, rcond=None)
        figures = [value * math.exp(max(-0.5, min(0.5, step))) for value, step in zip(figures, change, strict=True)]
    return figures


def cross_validated(rows: Sequence[Measured], fitted: Sequence[float]) -> dict[Measured, float]:
    """Return the relative error of each row by figures that were fitted without any row of its model's size."""
    errors: dict[Measured, float] = {}
    for name in sorted({row.run.name for row in rows}):
        others = [row for row in rows if row.run.name != name and row.run.seq_len <= FITTED_TOKENS]
        figures = fit(others, fitted, rounds=2)
        errors |= {row: math.exp(row.log_error(figures)) - 1 for row in rows if row.run.name == name}
    return errors


def summary(errors: Iterable[float], spread: float) -> str:
    """Return a row of the table: count, median absolute error, bias, share within the printed range, worst."""
    listed = list(errors)
    inside = sum(abs(1 / (1 + error) - 1) <= spread for error in listed)  # the range is around the forecast
    return (
        f"{len(listed)} | {statistics.median(map(abs, listed)):.1%} | {statistics.median(listed):+.1%} | "
        f"{inside / len(listed):.0%} | {max(listed, key=abs):+.0%}"
    )


def draw(errors: dict[str, dict[Measured, float]], path: Path) -> None:
    """Draw forecast over published against the length of the sequences, a panel for each card family."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(errors), figsize=(10, 4), sharey=True, layout="constrained")
    for panel, (family, found) in zip(panels, errors.items(), strict=True):
        for name in sorted({row.run.name for row in found}, key=lambda name: _billions(name)):
            rows = [row for row in found if row.run.name == name]
            panel.plot([row.run.seq_len for row in rows], [1 + found[row] for row in rows], "o", ms=4, label=name)
        panel.axhspan(0.8, 1.2, color="0.92", zorder=0)
        panel.axhline(1, color="0.5", lw=1)
        panel.set(xscale="log", title=f"{family}, model size left out of the fit", xlabel="tokens a sequence")
        panel.set_xscale("log", base=2)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("seconds of a step: forecast / published")
    figure.savefig(path, dpi=110)


def _billions(name: str) -> float:
    number = name.rpartition("-")[2]
    return float(number[:-1]) * (1 if number.endswith("b") else 1e-3)


def main() -> None:
    """Print the fitted figures and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder")
    parser.add_argument("--plot", type=Path, help="draw the errors into this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [Measured(run, traces(run, str(i), folder)) for i, run in enumerate(published_runs())]
        field = [Measured(run, traces(run, f"field-{i}", folder)) for i, run in enumerate(field_runs())]
    found: dict[str, dict[Measured, float]] = {}
    figures_of: dict[str, list[float]] = {}
    print("| rows | runs | median error | bias | inside the printed range | worst |")
    print("| --- | --- | --- | --- | --- | --- |")
    for family in dict.fromkeys(FAMILIES.values()):
        mine = [row for row in rows if FAMILIES[row.run.gpu] == family]
        short = [row for row in mine if row.run.seq_len <= FITTED_TOKENS]
        card = KNOWN[next(name for name, kind in FAMILIES.items() if kind == family)]
        start = [getattr(card, name) for name in FITTED]
        figures = figures_of[family] = fit(short, start)
        fitted = [math.exp(row.log_error(figures)) - 1 for row in short]
        found[family] = cross_validated(mine, figures)
        left_out = [error for row, error in found[family].items() if row.run.seq_len <= FITTED_TOKENS]
        longer = [error for row, error in found[family].items() if row.run.seq_len > FITTED_TOKENS]
        as_set = [math.exp(row.log_error(start)) - 1 for row in mine]
        for what, errors in (
            (f"up to {FITTED_TOKENS} tokens, fitted", fitted),
            (f"up to {FITTED_TOKENS} tokens, size left out", left_out),
            ("longer, size left out", longer),
            ("all, size left out", list(found[family].values())),
            ("all, with the figure of `config.hardware`", as_set),
        ):
            if errors:
                print(f"| {family}, {what} | {summary(errors, card.spread)} |")
    print()
    for family, figures in figures_of.items():
        print(f"{family}: " + ", ".join(f"{name} {value:.3f}" for name, value in zip(FITTED, figures, strict=True)))
    print("\n| published run, not fitted | published | forecast | error |\n| --- | --- | --- | --- |")
    for row in field:
        run, figures = row.run, [getattr(KNOWN[row.run.gpu], name) for name in FITTED]
        tokens = run.seq_len * run.micro_batch
        seconds = forecast_s(run, row.shallow, _with(KNOWN[run.gpu], figures))
        print(
            f"| {run.name}, {run.gpus} × {run.gpu}, {run.micro_batch} × {run.seq_len}, {run.recompute} | "
            f"{tokens / run.step_s:,.0f} tok/s | {tokens / seconds:,.0f} | {run.step_s / seconds - 1:+.0%} |"
        )
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
