"""Forecast the reserved memory that torchtitan has published, by this engine (docs/field.md).

`python benchmarks/torchtitan_memory.py` takes some minutes. torchtitan's tables 1 and 3 (its document
benchmarks/llama3_h100_202412_torchtitan.md, torchtitan 9dec370, torch of 2024-12-23): Llama 3.1 8B, local batch 2, 8192
tokens, selective AC per operator, FSDP, no compile. torchtitan's script sets expandable segments since pull request 643
(2024-10); whether the launcher of the published runs set them too is not known.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from calibrate import LLAMA_8B, save_every_second_product
from transformers import AutoConfig

from fsdptrain.config.reader import load
from fsdptrain.config.schema import Optim
from fsdptrain.forecast import simulation
from fsdptrain.forecast.allocator import reserved_bytes
from fsdptrain.forecast.device import PRETEND
from fsdptrain.model.units import Unit, decoder_layers
from fsdptrain.parallel import shard
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.text import GIB
from fsdptrain.train.optim import make_optimizer
from fsdptrain.train.step import Engine

PUBLISHED = {8: 82.4, 128: 67.0}  # GPUs → peak reserved GiB


def units_of(model: Any, wrap: Any) -> list[Unit]:
    """Return the layers; all else is in the root unit. The last layer stays gathered, as the head does here."""
    *layers, last = [Unit(name, [layer]) for name, layer in decoder_layers(model)]
    return [*layers, Unit("head", last.modules)]


class Foreach(torch.optim.AdamW):
    """AdamW of several kernels, with temporary memory; unlike the fused one it has no use for `found_inf`."""

    found_inf = property(lambda _: None, lambda _, flag: None)

    def __init__(self, groups: Any) -> None:
        named = [[*zip(group["param_names"], group["params"], strict=True)] for group in groups]
        super().__init__([{"params": params} for params in named], foreach=True)


one_step = Engine.step


def two_steps(self: Any, *arguments: Any) -> Any:
    """Make two steps: the first one creates the optimizer's state at its end."""
    one_step(self, *arguments)
    return one_step(self, *arguments)


def forecast_gib(ranks: int, folder: Path) -> float:
    """Return the peak reserved GiB of torchtitan's run on `ranks` GPUs; call it in a new process."""
    (folder / "text.txt").write_text("any text\n")
    recipe = folder / "recipe.yaml"
    text = {
        "output_dir": str(folder / "run"),
        "model": {"config": LLAMA_8B | {"num_hidden_layers": 32}, "tokenizer": {"train": 512}, "init": "random"},
        "data": {"path": str(folder / "text.txt"), "seq_len": 8192, "packing": "none"},
        "train": {"steps": 1, "loss": "plain", "micro_batch_size": 2, "global_batch_size": 2 * ranks},
    }
    recipe.write_text(yaml.safe_dump(text))
    plan = make_plan(load(recipe), Topology("cuda", ranks // 8, 8))
    config = dict(plan.recipe.model.config)
    with (
        mock.patch.object(shard, "recompute", save_every_second_product),
        mock.patch.object(shard, "units_of", units_of),
        mock.patch.object(
            simulation, "make_optimizer", lambda model, _: Foreach(make_optimizer(model, Optim()).param_groups)
        ),
        mock.patch.object(simulation, "start_state", lambda optimizer: None),
        mock.patch.object(Engine, "step", two_steps),
    ):
        trace = simulation.simulate(plan, AutoConfig.for_model(config.pop("model_type"), **config), pretend=True)
    return reserved_bytes(trace, PRETEND) / GIB


def main() -> None:
    """Print the published and the forecast figure of each number of GPUs."""
    if len(sys.argv) == 1:
        for ranks in PUBLISHED:
            subprocess.run([sys.executable, __file__, str(ranks)], check=True)
        return
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        found = forecast_gib(ranks, Path(scratch))
    print(f"{ranks} GPUs: {PUBLISHED[ranks]} GiB published, {found:.1f} GiB forecast")


if __name__ == "__main__":
    main()
