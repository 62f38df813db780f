"""The processes of a run: how many, on which machines and devices."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Literal

from fsdptrain.config.hardware import Hardware
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import Problem, RecipeError


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


def find_topology(recipe: Recipe, env: dict[str, str], elsewhere: bool = False) -> Topology:
    """Return the processes of a run on this machine: those of a running torchrun, else those that `launch` sets.

    `env` is the environment. Raises RecipeError for more workers than visible GPUs, unless `elsewhere` says that the
    run is planned for other machines.
    """
    gpus = visible_gpus(env)
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    if "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        world = int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_WORLD_SIZE", world))
        return Topology(device, world // local, local, joined=True)
    wanted = recipe.launch.nproc_per_node
    nproc = (gpus or 2) if wanted == "auto" else wanted
    if gpus and nproc > gpus and not elsewhere:
        message = f"{nproc} workers, but {gpus} GPUs are visible: lower it, or use auto"
        raise RecipeError([Problem(message, "launch.nproc_per_node")])
    return Topology(device, recipe.launch.nnodes, nproc)


def topology_of(recipe: Recipe, count: int | None, hardware: Hardware) -> Topology:
    """Return the processes of a run on other machines: one on each of `count` cards, else what `launch` sets.

    Raises RecipeError for a `count` that does not fill whole nodes.
    """
    device: Literal["cpu", "cuda"] = "cpu" if hardware.is_cpu else "cuda"
    launch = recipe.launch
    if count is None:
        nproc = hardware.gpus_per_node if launch.nproc_per_node == "auto" else launch.nproc_per_node
        return Topology(device, launch.nnodes, nproc)
    nproc = min(count, hardware.gpus_per_node)
    if count % nproc:
        raise RecipeError(
            f"--hardware: {count} × {hardware.name} do not fill nodes of {nproc}: use a multiple of {nproc}"
        )
    return Topology(device, count // nproc, nproc)


def visible_gpus(env: dict[str, str]) -> int:
    """Count the NVIDIA GPUs that this process may use, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len([name for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/proc/driver/nvidia/gpus/*"))
