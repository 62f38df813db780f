"""Calibrate the forecast of time on published runs: fit on some, check on the others, print the errors.

    python benchmarks/calibrate.py [--traces FOLDER] [--plot FILE.png]    # docs/picture.py draws docs/calibration.png

`published_runs.csv` holds all 209 runs in bf16 of llm-foundry's tables (MPT models, FSDP, 2023; Apache-2.0, MosaicML):
160 that are fitted, and 49 that are held out and never were. Each is written as a recipe of a GPT-2 of the same shape:
tied embeddings, learned positions, an MLP of 4·H without a gate. One step of it is simulated at two depths, and the
time of the whole depth follows on a line.

Two figures are fitted: what matrix products reach of the peak, by card family, and by how much late ranks delay a
collective. A third belongs to those runs: the rate of FlashAttention 1 in Triton, which most of them used. Large errors
pull no more than small ones, because some runs were slowed by what no forecast knows, such as an allocator that
retries. Other differences of software are stated: for the runs of torchtitan its recomputation and its cards.

Traces take about 20 minutes on one core, and the fit five; with `--traces` traces are kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import dataclasses
import functools
import hashlib
import math
import pickle
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig

from fsdptrain.config.reader import load
from fsdptrain.config.schema import Fsdp
from fsdptrain.forecast.simulation import simulate
from fsdptrain.forecast.timing import recomputation_s, replay_streams
from fsdptrain.forecast.trace import Alloc, Event, Free, Trace
from fsdptrain.parallel import shard
from fsdptrain.plan.hardware import CALIBRATED, KNOWN, SPREADS, Hardware
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology

# Shares of the rate of FlashAttention 2 that FlashAttention 1 in Triton reaches in forward and backward, on the A100:
# "around 1.3-1.5× faster in the forward pass and around 2× in the backward pass" (Dao, arXiv:2307.08691, section 4.1).
FLASH_1 = (1 / 1.4, 1 / 2)
FLASH_1_RATE = {"H100": 1.17, "A100": 1.06}  # times these, as fitted
LARGE = 0.03  # errors beyond it pull like this one (Huber)
FAMILIES = {"h100-80gb": "H100", "a100-80gb": "A100", "a100-40gb": "A100"}
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
LLAMA2_13B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
    "num_attention_heads": 40, "num_key_value_heads": 40, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA2_7B = LLAMA2_13B | {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
LLAMA2_70B = LLAMA_70B | {"vocab_size": 32000}
QWEN_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
# torchtitan's H100: "96GB HBM2e with 2.4 TB/sec", and a peak "between SXM and NVL": the mean of the two.
META_H100 = dataclasses.replace(
    KNOWN["h100-80gb"], memory_bw=2.4e12, flops=(KNOWN["h100-80gb"].flops + KNOWN["h100-nvl-94gb"].flops) / 2
)


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
    recompute: Any = "none"
    strategy: str = "FULL_SHARD"
    master: str = "float32"
    reduce: str = "float32"
    flash_1: bool = False
    held_out: bool = False
    compiled: bool = False
    every_second: bool = False  # `selective` as in torchtitan, which keeps every second product
    card: Hardware | None = None  # if it is not that of the table
    adapters: bool = False  # of rank 16 on all linear layers, and the rest is frozen

    @property
    def nodes(self) -> int:
        """Machines of up to 8 GPUs."""
        return max(1, self.gpus // 8)

    @property
    def family(self) -> str:
        """The chip, whose figures are fitted."""
        return FAMILIES[self.gpu]

    def hardware(self, figures: dict[str, float]) -> Hardware:
        """Return the card, as far as it is published, with these figures and the attention kernel that was used."""
        card = self.card or KNOWN[self.gpu]
        shares = card.attention_share["flash"]
        if self.flash_1:
            rate = figures[f"{self.family} flash_1"]
            shares = [rate * share * part for share, part in zip(shares, FLASH_1, strict=True)]
        return dataclasses.replace(
            card, product_share=figures[f"{self.family} product_share"], late_s=figures["late_s"],
            attention_share={"flash": shares},
        )  # fmt: skip

    def depends_on(self, figure: str) -> bool:
        """Return whether the forecast of this run depends on a figure."""
        if figure == "late_s":
            return self.nodes > 1
        family, name = figure.split()
        return family == self.family and (name != "flash_1" or self.flash_1)

    @property
    def depths(self) -> tuple[int, int]:
        """Numbers of layers that are simulated: even ones where every second is recomputed."""
        return (4, 8) if isinstance(self.recompute, dict) else (3, 6)

    @property
    def recomputed(self) -> str:
        """What backward recomputes, for a table."""
        if isinstance(self.recompute, dict):
            return f"every {self.recompute['every']} layers"
        return self.recompute + (", every second product kept" if self.every_second else "")

    def recipe(self, depth: int, folder: Path) -> dict[str, Any]:
        """Return the recipe of this run with so many layers."""
        layers = "n_layer" if self.config["model_type"] == "gpt2" else "num_hidden_layers"
        return {
            "output_dir": str(folder / "run"),
            "model": {
                "config": self.config | {layers: depth}, "tokenizer": {"train": 512}, "dtype": self.master,
                "attn_implementation": "sdpa", **({"id": "any"} if self.adapters else {"init": "random"}),
            },
            "data": {"path": str(folder / "text.txt"), "seq_len": self.seq_len, "packing": "none"},
            "fsdp": {
                "strategy": self.strategy, "activation_checkpointing": self.recompute,
                "mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": self.reduce},
            }
            | ({"accumulation": "hold"} if self.gpus == 1 else {}),
            "train": {
                "steps": 1, "micro_batch_size": self.micro_batch,
                # a trace has at most three micro-batches
                "global_batch_size": self.micro_batch * self.gpus * min(self.accumulation, 3),
            },
            "launch": {"nproc_per_node": self.gpus // self.nodes, "nnodes": self.nodes}
            | ({"rdzv_endpoint": "host:29500"} if self.nodes > 1 else {}),
        } | ({"adapter": {"kind": "lora"}} if self.adapters else {})  # fmt: skip


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
        row["recompute"], row["strategy"], row["master"], row["reduce"], flash_1=row["attention"] == "flash1",
        held_out=row["part"] == "held out",
    )  # fmt: skip


def field_runs() -> list[Run]:
    """Return other published runs, none of them fitted, with their tokens/s a GPU.

    torchtitan: `docs/performance.md` of 2024 (A100) and `benchmarks/llama3_h100_202412_torchtitan.md`. Of accelerate's
    run it is not known whether it recomputes. fms-fsdp: the table of its README; torchao: `torchao/float8/README.md`.
    AutoModel: `docs/performance-summary.md` with LoRA. Liger's kernels, which it has, count as compiled layers.
    """

    def run(
        name: str, gpu: str, gpus: int, config: Any, layers: int, rows: int, seq_len: int, rate: float, recompute: Any,
        accumulation: int = 1, **other: Any,
    ) -> Run:  # fmt: skip
        step_s = accumulation * rows * seq_len / rate
        return Run(name, gpu, gpus, config, layers, seq_len, rows, accumulation, step_s, recompute, **other)

    titan: dict[str, Any] = {"every_second": True}
    meta: dict[str, Any] = {"every_second": True, "card": META_H100}
    lora: dict[str, Any] = {"adapters": True, "accumulation": 16, "strategy": "SHARD_GRAD_OP", "compiled": True}
    h100, a100 = "h100-80gb", "a100-80gb"
    return [
        run("torchtitan 8B", h100, 8, LLAMA_8B, 32, 2, 8192, 5762, "selective", **meta),
        run("torchtitan 8B", h100, 128, LLAMA_8B, 32, 2, 8192, 5605, "selective", **meta),
        run("torchtitan 8B", a100, 64, LLAMA_8B, 32, 1, 8192, 2973, "selective", **titan),
        run("torchtitan 8B", a100, 64, LLAMA_8B, 32, 1, 8192, 2904, {"every": 2}),
        run("torchtitan 70B", a100, 64, LLAMA_70B, 80, 1, 8192, 331, "full"),
        run("torchtitan 13B", a100, 64, LLAMA2_13B, 40, 2, 4096, 2162, "none"),
        run("torchtitan 13B", a100, 64, LLAMA2_13B, 40, 2, 4096, 1904, "selective", **titan),
        run("torchtitan 13B", a100, 64, LLAMA2_13B, 40, 2, 4096, 1914, {"every": 2}),
        run("torchtitan 70B (Llama 2)", a100, 64, LLAMA2_70B, 80, 2, 4096, 353, "full"),
        run("torchtitan 70B (Llama 2)", a100, 64, LLAMA2_70B, 80, 1, 4096, 355, "selective", **titan),
        run("accelerate 8B", h100, 8, LLAMA_8B, 32, 1, 8192, 8000, "full"),
        run("accelerate 8B", h100, 8, LLAMA_8B, 32, 1, 8192, 8000, "none"),
        run("torchtitan 8B", h100, 8, LLAMA_8B, 32, 2, 8192, 6667, "selective", compiled=True, **meta),
        run("torchao 8B", h100, 8, LLAMA_8B, 32, 1, 8192, 6150, "selective", compiled=True, **meta),
        run("fms-fsdp 7B", a100, 128, LLAMA2_7B, 32, 2, 4096, 4550, "none", strategy="HYBRID_SHARD", compiled=True),
        run("fms-fsdp 7B", h100, 96, LLAMA2_7B, 32, 2, 4096, 9600, "none", strategy="HYBRID_SHARD", compiled=True),
        run("fms-fsdp 13B", a100, 128, LLAMA2_13B, 40, 2, 4096, 2150, {"every": 2}, compiled=True),
        run("fms-fsdp 13B", h100, 96, LLAMA2_13B, 40, 2, 4096, 4850, {"every": 2}, compiled=True),
        run("AutoModel 8B, LoRA", h100, 1, LLAMA_8B, 32, 2, 4096, 12473, "none", **lora),
        run("AutoModel 7B (Qwen2.5), LoRA", h100, 1, QWEN_7B, 28, 2, 4096, 14110, "none", **lora),
    ]


def save_every_second_product(layers: list[Any], *_: Any) -> None:
    """Apply torchtitan's selective AC: keep the outputs of attention and of every second `mm`, from the first on."""
    mm, attention = torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default

    def contexts() -> Any:
        seen: collections.Counter[bool] = collections.Counter()

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            seen[context.is_recompute] += operator is mm
            keep = operator is attention or (operator is mm and seen[context.is_recompute] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def recomputing(run: Run) -> Iterator[None]:
    """Recompute meanwhile what the run's own software recomputes."""
    usual = shard.recompute
    if run.every_second:
        shard.recompute = save_every_second_product
    try:
        yield
    finally:
        shard.recompute = usual


def traces(run: Run, folder: Path) -> list[Trace]:
    """Simulate one step of a run at each of its depths, or read what an equal run left in `folder`."""
    found = []
    for depth in run.depths:
        text = yaml.safe_dump(run.recipe(depth, Path())) + run.recomputed
        path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.pickle"
        if not path.exists():
            (folder / "text.txt").write_text("any text\n")
            recipe = folder / "recipe.yaml"
            recipe.write_text(yaml.safe_dump(run.recipe(depth, folder)))
            plan = make_plan(load(recipe), Topology("cuda", run.nodes, run.gpus // run.nodes))
            config = dict(plan.recipe.model.config)
            with recomputing(run):
                trace = simulate(plan, AutoConfig.for_model(config.pop("model_type"), **config), pretend=True)
            events: list[Event] = [event for event in trace.events if not isinstance(event, Alloc | Free)]
            path.write_bytes(pickle.dumps(Trace([], events)))
            print(f"simulated {run.name}, {run.gpus} × {run.gpu}, {run.seq_len} tokens, {depth} layers", flush=True)
        found.append(pickle.loads(path.read_bytes()))
    return found


def forecast_s(run: Run, shallow: Sequence[Trace], figures: dict[str, float]) -> float:
    """Return the forecast seconds of a step: linear in the micro-batches beyond two, and in the layers."""
    hardware, recompute_s = (
        run.hardware(figures),
        recomputation_s(Fsdp(activation_checkpointing=run.recompute).recomputation),
    )

    def step_s(trace: Trace, micro_batches: int) -> float:
        return replay_streams(trace.repeated(micro_batches), hardware, True, 8, recompute_s, run.compiled).step_s

    at_depth = []
    for trace in shallow:
        seconds = step_s(trace, 2)
        if run.accumulation > 2:
            seconds += (run.accumulation - 2) * (step_s(trace, 3) - seconds)
        at_depth.append(seconds)
    low, high = run.depths
    return at_depth[0] + (run.layers - low) * (at_depth[1] - at_depth[0]) / (high - low)


@dataclass(frozen=True, eq=False)
class Measured:
    """A run with its traces."""

    run: Run
    shallow: Sequence[Trace]

    def log_error(self, figures: dict[str, float]) -> float:
        """Return log(forecast / published)."""
        return math.log(forecast_s(self.run, self.shallow, figures) / self.run.step_s)


def figures_as_set() -> dict[str, float]:
    """Return the figures that are fitted, as `plan.hardware` and this file have them."""
    cards = {family: KNOWN[name] for name, family in FAMILIES.items()}
    shares = {f"{family} product_share": card.product_share for family, card in cards.items()}
    rates = {f"{family} flash_1": rate for family, rate in FLASH_1_RATE.items()}
    return shares | rates | {"late_s": KNOWN["h100-80gb"].late_s}


def fit(rows: Sequence[Measured], figures: dict[str, float], rounds: int = 3) -> dict[str, float]:
    """Return the figures with the least log errors (Huber), by Gauss-Newton steps on the logarithms of figures."""
    for _ in range(rounds):
        errors = np.array([row.log_error(figures) for row in rows])
        slopes = np.zeros((len(rows), len(figures)))
        for column, (name, value) in enumerate(figures.items()):
            for i, row in enumerate(rows):
                if row.run.depends_on(name):
                    moved = row.log_error(figures | {name: value * 1.05})
                    slopes[i, column] = (moved - errors[i]) / math.log(1.05)
        weights = np.sqrt(np.minimum(1.0, LARGE / np.maximum(np.abs(errors), 1e-9)))
        steps = np.linalg.lstsq(slopes * weights[:, None], -errors * weights)[0]
        changes = np.exp(np.clip(steps, -0.5, 0.5))
        figures = {name: value * change for (name, value), change in zip(figures.items(), changes, strict=True)}
    return figures


def summary(errors: Iterable[float]) -> str:
    """Return a row of the table: count, median absolute error, bias, shares within ranges, worst."""
    listed = list(errors)
    off = [abs(1 / (1 + error) - 1) for error in listed]  # a range is around the forecast
    inside = (f"{sum(each <= spread for each in off)} of {len(off)}" for spread in (0.05, 0.1, 0.2))
    return (
        f"{statistics.median(map(abs, listed)):.1%} | {statistics.median(listed):+.1%} | {' | '.join(inside)} | "
        f"{max(listed, key=abs):+.0%}"
    )


CLASSES: dict[str, Callable[[Run], bool]] = {
    "all": lambda run: True,
    "H100": lambda run: run.family == "H100",
    "A100": lambda run: run.family == "A100",
    "up to 4,096 tokens": lambda run: run.seq_len <= 4096,
    "longer": lambda run: run.seq_len > 4096,
    "128 to 512 GPUs": lambda run: run.gpus >= 128,
    "below 1 billion parameters": lambda run: run.name in ("mpt-125m", "mpt-350m", "mpt-760m"),
}


def draw(errors: Sequence[tuple[Run, float]], path: Path) -> None:
    """Draw forecast over published seconds against the length of the sequences, a panel for each card family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    spread = SPREADS[CALIBRATED]
    for panel, family in zip(figure.subplots(1, 2, sharey=True), dict.fromkeys(FAMILIES.values()), strict=True):
        for number, model in enumerate(dict.fromkeys(run.name for run, _ in errors)):
            panel.plot([], [], "o", ms=4, color=f"C{number}", label=model)
            for run, error in errors:
                if (run.name, run.family) == (model, family):
                    panel.plot(run.seq_len, 1 + error, "D" if run.held_out else ".", ms=6, color=f"C{number}")
        # Here the published time is inside the printed range.
        panel.axhspan(1 / (1 + spread), 1 / (1 - spread), color="0.92", zorder=0)
        panel.axhline(1, color="0.5", lw=1)
        panel.set_xscale("log", base=2)
        panel.set(title=f"{family}: runs fitted (dots) and held out (diamonds)", xlabel="tokens a sequence")
        panel.legend(fontsize=7)
    figure.axes[0].set_ylabel("seconds of a step: forecast / published")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the fitted figures and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder")
    parser.add_argument("--plot", type=Path, help="draw the errors into this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [Measured(run, traces(run, folder)) for run in published_runs()]
        field = [Measured(run, traces(run, folder)) for run in field_runs()]
    figures = figures_as_set()
    fitted = fit([row for row in rows if not row.run.held_out], figures)
    print(*(f"{name}: fitted {value:.3g}, set {figures[name]:.3g}" for name, value in fitted.items()), sep="\n")
    print("\n| runs | number | median error | bias | within 5% | 10% | 20% | worst |" + "\n|" + " --- |" * 8)
    errors = [(row.run, math.expm1(row.log_error(figures))) for row in rows]
    for part in (True, False):
        for name, belongs in CLASSES.items():
            if found := [error for run, error in errors if run.held_out == part and belongs(run)]:
                print(f"| {'held out' if part else 'fitted'}, {name} | {len(found)} | {summary(found)} |")
    if options.plot:
        draw(errors, options.plot)
    print("\n| published run, not fitted | published | forecast | error |\n| --- | --- | --- | --- |")
    for row in field:
        run, tokens = row.run, row.run.seq_len * row.run.micro_batch * row.run.accumulation
        seconds = forecast_s(run, row.shallow, figures)
        print(
            f"| {run.name}, {run.gpus} × {run.gpu}, {run.micro_batch} × {run.seq_len}, {run.recomputed}"
            f"{', compiled' * run.compiled} | "
            f"{tokens / run.step_s:,.0f} tok/s | {tokens / seconds:,.0f} | {run.step_s / seconds - 1:+.0%} |"
        )


if __name__ == "__main__":
    main()
