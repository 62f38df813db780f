"""What ranks learn of one another, and what gathering numbers costs on ranks that are pretended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import on_ranks, write_recipe
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptrain.config.reader import load
from fsdptrain.parallel.world import World
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_gathering_takes_as_many_operations_on_a_thousand_ranks_as_on_two() -> None:
    counts = []
    for size in (2, 1024):
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        world = World(0, 0, size, torch.device("cpu"), None, None, [])  # type: ignore[arg-type]
        with Operations() as operations:
            assert world.all_gather(torch.zeros(9)).shape == (size, 9)
        dist.destroy_process_group()
        counts.append(operations.count)
    assert counts[0] == counts[1] < 10


def test_a_flag_of_one_rank_is_seen_by_all_and_all_groups_have_the_time_limit_of_the_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, fsdp__strategy="HYBRID_SHARD", fsdp__shard_size=1, launch__timeout_s=50)
    for found in on_ranks(2, world_of, tmp_path, recipe=str(recipe)):
        assert found == {"flags": [True, False], "limits": [200.0] * 3}


# --- on every rank -------------------------------------------------------------------------------------------------


def world_of(recipe: str) -> dict[str, list[Any]]:
    """Return what every rank sees of a flag of the last rank, and of one that no rank has.

    Also the seconds after which collectives fail: of the group of all ranks, and of those of the mesh.
    """
    written = load(Path(recipe))
    world = World.start(make_plan(written, find_topology(written.recipe, dict(os.environ))), StopRequest())
    groups: list[Any] = [dist.group.WORLD, *world.mesh.get_all_groups()]
    limits = [group._get_backend(world.device).options._timeout.total_seconds() for group in groups]
    return {"flags": [world.any(world.rank == world.size - 1), world.any(0)], "limits": limits}
