"""Calibrate the forecast of time on published runs: fit on some, check on the others, print the errors.

    python benchmarks/calibrate.py [--traces FOLDER]

`published_runs.csv` holds 160 runs of llm-foundry (MPT models, FSDP, 2023; Apache-2.0, MosaicML). Each is written as a
recipe of a GPT-2 of the same shape: tied embeddings, learned positions, an MLP of 4·H without a gate. One step of it is
simulated at two depths, and the time of the whole depth follows on a line. One figure of a card family is fitted, on
the rows of at most 2,048 tokens: what matrix products reach of the peak.

Differences of software are stated factors, not fitted: FlashAttention 1 in Triton (`FLASH_1`), and for the runs of
torchtitan its recomputation and its cards.

For the errors a model size is left out, the figure is fitted on the other sizes, and the rows of this size are
forecast. Traces take about 20 minutes on one core; with `--traces` they are kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import dataclasses
import functools
import math
import pickle
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig

from fsdptrain.config.reader import load
from fsdptrain.forecast.timing import recomputation_s, replay_streams
from fsdptrain.forecast.trace import Alloc, Event, Free, Trace
from fsdptrain.parallel import shard
from fsdptrain.plan.hardware import KNOWN, Hardware
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.simulate.simulation import simulate

FITTED_TOKENS = 2048  # longer rows are dominated by attention, whose kernel was another one
# Shares of the rate of FlashAttention 2 that FlashAttention 1 in Triton, which llm-foundry's benchmark used, reaches in
# forward and backward: "around 1.3-1.5× faster in the forward pass and around 2× in the backward pass" (Dao,
# arXiv:2307.08691, section 4.1).
FLASH_1 = (1 / 1.4, 1 / 2)
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
LLAMA2_70B = LLAMA_70B | {"vocab_size": 32000}
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
    every_second: bool = False  # `selective` as in torchtitan, which keeps every second product
    card: Hardware | None = None  # if it is not that of the table

    @property
    def nodes(self) -> int:
        """Machines of up to 8 GPUs."""
        return max(1, self.gpus // 8)

    @property
    def hardware(self) -> Hardware:
        """The card, as far as it is published."""
        return self.card or KNOWN[self.gpu]

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
    """Return other published runs, none of them fitted, with their tokens/s a GPU.

    torchtitan: `docs/performance.md` of 2024 (A100) and `benchmarks/llama3_h100_202412_torchtitan.md`. Of accelerate's
    run it is not known whether it recomputes.
    """

    def run(
        name: str, gpu: str, gpus: int, config: Any, layers: int, rows: int, seq_len: int, rate: float, recompute: Any,
        **other: Any,
    ) -> Run:  # fmt: skip
        return Run(name, gpu, gpus, config, layers, seq_len, rows, 1, rows * seq_len / rate, recompute, **other)

    titan: dict[str, Any] = {"every_second": True}
    meta: dict[str, Any] = {"every_second": True, "card": META_H100}
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


def traces(run: Run, number: str, folder: Path) -> list[Trace]:
    """Simulate one step of a run at each of its depths, or read what an earlier call left in `folder`."""
    found = []
    for depth in run.depths:
        path = folder / f"{number}-{depth}.pickle"
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


def forecast_s(run: Run, shallow: Sequence[Trace], hardware: Hardware) -> float:
    """Return the forecast seconds of a step: linear in the micro-batches beyond two, and in the layers."""
    if run.flash_1:
        flash_1 = [share * part for share, part in zip(hardware.attention_share["flash"], FLASH_1, strict=True)]
        hardware = dataclasses.replace(hardware, attention_share={"flash": flash_1})
    at_depth = []
    for trace in shallow:
        two, three = (
            replay_streams(trace.repeated(count), hardware, True, 8, recomputation_s(run.recompute)).step_s
            for count in (2, 3)
        )
        at_depth.append(two + max(0, run.accumulation - 2) * (three - two))
    low, high = run.depths
    return at_depth[0] + (run.layers - low) * (at_depth[1] - at_depth[0]) / (high - low)


@dataclass(frozen=True, eq=False)
class Measured:
    """A run with its traces."""

    run: Run
    shallow: Sequence[Trace]

    def log_error(self, share: float) -> float:
        """Return log(forecast / published) with this `product_share`."""
        card = dataclasses.replace(self.run.hardware, product_share=share)
        return math.log(forecast_s(self.run, self.shallow, card) / self.run.step_s)


def fit(rows: Sequence[Measured], share: float, rounds: int = 3) -> float:
    """Return the `product_share` with the least squared log errors, by Gauss-Newton steps on its logarithm."""
    for _ in range(rounds):
        errors, moved = (np.array([row.log_error(share * by) for row in rows]) for by in (1.0, 1.05))
        slopes = (moved - errors) / math.log(1.05)
        share *= math.exp(np.clip(-(slopes @ errors) / (slopes @ slopes), -0.5, 0.5))
    return share


def cross_validated(rows: Sequence[Measured], fitted: float) -> dict[Measured, float]:
    """Return the relative error of each row by a share that was fitted without any row of its model's size."""
    errors: dict[Measured, float] = {}
    for name in sorted({row.run.name for row in rows}):
        others = [row for row in rows if row.run.name != name and row.run.seq_len <= FITTED_TOKENS]
        share = fit(others, fitted, rounds=2)
        errors |= {row: math.exp(row.log_error(share)) - 1 for row in rows if row.run.name == name}
    return errors


def summary(errors: Iterable[float], spread: float) -> str:
    """Return a row of the table: count, median absolute error, bias, share within the printed range, worst."""
    listed = list(errors)
    inside = sum(abs(1 / (1 + error) - 1) <= spread for error in listed)  # the range is around the forecast
    return (
        f"{len(listed)} | {statistics.median(map(abs, listed)):.1%} | {statistics.median(listed):+.1%} | "
        f"{inside / len(listed):.0%} | {max(listed, key=abs):+.0%}"
    )


def main() -> None:
    """Print the fitted figures and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [Measured(run, traces(run, str(i), folder)) for i, run in enumerate(published_runs())]
        field = [Measured(run, traces(run, f"field-{i}", folder)) for i, run in enumerate(field_runs())]
    shares: dict[str, float] = {}
    print("| rows | runs | median error | bias | inside the printed range | worst |")
    print("| --- | --- | --- | --- | --- | --- |")
    for family in dict.fromkeys(FAMILIES.values()):
        mine = [row for row in rows if FAMILIES[row.run.gpu] == family]
        short = [row for row in mine if row.run.seq_len <= FITTED_TOKENS]
        card = KNOWN[next(name for name, kind in FAMILIES.items() if kind == family)]
        shares[family] = fit(short, card.product_share)
        fitted = [math.exp(row.log_error(shares[family])) - 1 for row in short]
        found = cross_validated(mine, shares[family])
        left_out = [error for row, error in found.items() if row.run.seq_len <= FITTED_TOKENS]
        longer = [error for row, error in found.items() if row.run.seq_len > FITTED_TOKENS]
        as_set = [math.exp(row.log_error(card.product_share)) - 1 for row in mine]
        for what, errors in (
            (f"up to {FITTED_TOKENS} tokens, fitted", fitted),
            (f"up to {FITTED_TOKENS} tokens, size left out", left_out),
            ("longer, size left out", longer),
            ("all, size left out", list(found.values())),
            ("all, with the figure of `plan.hardware`", as_set),
        ):
            if errors:
                print(f"| {family}, {what} | {summary(errors, card.spread)} |")
    print()
    for family, share in shares.items():
        print(f"{family}: product_share {share:.3f}")
    print("\n| published run, not fitted | published | forecast | error |\n| --- | --- | --- | --- |")
    for row in field:
        run, tokens = row.run, row.run.seq_len * row.run.micro_batch
        seconds = forecast_s(run, row.shallow, run.hardware)
        print(
            f"| {run.name}, {run.gpus} × {run.gpu}, {run.micro_batch} × {run.seq_len}, {run.recomputed} | "
            f"{tokens / run.step_s:,.0f} tok/s | {tokens / seconds:,.0f} | {run.step_s / seconds - 1:+.0%} |"
        )


if __name__ == "__main__":
    main()
