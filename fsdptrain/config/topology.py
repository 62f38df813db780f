"""The processes of a run: how many, on which machines and devices."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsdptrain.config.gpus import visible_gpus
from fsdptrain.config.hardware import Hardware
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import Problem, RecipeError
from fsdptrain.text import counted


@dataclass(frozen=True)
class Topology:
    """The processes of a run: `nnodes` machines with `nproc_per_node` workers each, on one kind of device."""

    device: Literal["cpu", "cuda"]
    nnodes: int
    nproc_per_node: int
    joined: bool = False  # the workers were started by another torchrun

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nnodes * self.nproc_per_node


def writes_run_dir(topology: Topology) -> bool:
    """Return whether this process writes the run folder: the command itself, or rank 0 under another torchrun."""
    return not topology.joined or os.environ["RANK"] == "0"


def find_topology(recipe: Recipe, env: dict[str, str], elsewhere: bool = False, root: Path = Path("/")) -> Topology:
    """Return the processes of a run on this machine: those of a running torchrun, else those that `launch` sets.

    `env` is the environment, `root` the folder that holds /dev and /proc. `elsewhere`: the run is planned for other
    machines. Raises RecipeError for more workers than visible GPUs, unless `elsewhere`.
    """
    gpus = visible_gpus(env, root)
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    if "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        world = int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_WORLD_SIZE", world))
        return Topology(device, world // local, local, joined=True)
    nproc = _workers(recipe, gpus or 2)
    if gpus and nproc > gpus and not elsewhere:
        message = f"{nproc} workers, but only {counted(gpus, 'GPU')} visible: lower it, or use auto"
        raise RecipeError([Problem(message, "launch.nproc_per_node")])
    return Topology(device, recipe.launch.nnodes, nproc)


def topology_of(recipe: Recipe, count: int | None, hardware: Hardware) -> Topology:
    """Return the processes of a run on other machines: one on each of `count` cards, else what `launch` sets.

    Raises RecipeError for a `count` that does not fill whole nodes.
    """
    device: Literal["cpu", "cuda"] = "cpu" if hardware.is_cpu else "cuda"
    launch = recipe.launch
    if count is None:
        return Topology(device, launch.nnodes, _workers(recipe, hardware.gpus_per_node))
    nproc = min(count, hardware.gpus_per_node)
    if count % nproc:
        raise RecipeError(
            f"--hardware: {count} × {hardware.name} do not fill nodes of {nproc}: use a multiple of {nproc}"
        )
    return Topology(device, count // nproc, nproc)


def _workers(recipe: Recipe, available: int) -> int:
    """Return `launch.nproc_per_node`; for `auto` the devices `available`, if each gets at least one micro-batch."""
    wanted, train = recipe.launch.nproc_per_node, recipe.train
    if wanted != "auto":
        return wanted
    busy = train.global_batch_size // (train.micro_batch_size * recipe.launch.nnodes)
    return min(available, max(1, busy))
