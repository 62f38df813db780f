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
    joined: bool = False  # somebody else's torchrun started us

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nnodes * self.nproc_per_node


def writes_run_dir(topology: Topology) -> bool:
    """Return whether this process writes the run folder: the command itself, or rank 0 under another torchrun."""
    return not topology.joined or os.environ["RANK"] == "0"


def find_topology(recipe: Recipe, env: dict[str, str], elsewhere: bool = False) -> Topology:
    """The processes this recipe would run on here: those of a torchrun that already runs, or what `launch` asks for.

    Raises RecipeError when it asks for more workers than there are GPUs, unless they need not be here.
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
        raise RecipeError([Problem(f"{nproc} workers, but {gpus} GPUs are visible", "launch.nproc_per_node")])
    return Topology(device, recipe.launch.nnodes, nproc)


def topology_of(recipe: Recipe, count: int | None, hardware: Hardware) -> Topology:
    """The processes on machines one is not on: `count` cards where it is said, else what `launch` asks for.

    Raises RecipeError for a count that does not fill its nodes.
    """
    device: Literal["cpu", "cuda"] = "cpu" if hardware.is_cpu else "cuda"
    launch = recipe.launch
    if count is None:
        nproc = hardware.gpus_per_node if launch.nproc_per_node == "auto" else launch.nproc_per_node
        return Topology(device, launch.nnodes, nproc)
    nproc = min(count, hardware.gpus_per_node)
    if count % nproc:
        raise RecipeError(f"--hardware: {count} × {hardware.name} do not fill nodes of {nproc}")
    return Topology(device, count // nproc, nproc)


def visible_gpus(env: dict[str, str]) -> int:
    """NVIDIA GPUs this process may use, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len([name for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/proc/driver/nvidia/gpus/*"))
