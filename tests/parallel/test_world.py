"""What ranks learn of one another, what it costs, and copies of the model: equal, and each of them on one node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import build, local, refusals
from reference import Operators
from support import on_ranks, write_recipe
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdptrain.config.reader import load
from fsdptrain.errors import WorkerLost
from fsdptrain.parallel.world import World
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest
from fsdptrain.train.trainer import Trainer


def test_gathering_takes_as_many_operations_on_a_thousand_ranks_as_on_two() -> None:
    counts = []
    for size in (2, 1024):
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        world = World(0, 0, size, torch.device("cpu"), None, None, [])  # type: ignore[arg-type]
        with Operators() as operators:
            assert world.all_gather(torch.zeros(9)).shape == (size, 9)
        dist.destroy_process_group()
        counts.append(len(operators.called))
    assert counts[0] == counts[1] < 10


def test_a_flag_of_one_rank_is_seen_by_all_and_all_groups_have_the_time_limit_of_the_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, fsdp__strategy="HYBRID_SHARD", fsdp__shard_size=1, launch__timeout_s=50)
    for found in on_ranks(2, world_of, tmp_path, recipe=str(recipe)):
        assert found == {"flags": [True, False], "limits": [200.0] * 3}


def test_copies_that_become_different_end_the_run_before_a_checkpoint_of_them(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6, checkpoint__every=2, fsdp__strategy="NO_SHARD")
    variants = {
        "before-save": [],
        "one-copy": ["fsdp.strategy=FULL_SHARD"],
    }
    found = on_ranks(2, split_while_training, tmp_path / "ranks", recipe=str(recipe), variants=variants)
    assert found[0] == found[1]
    error, checkpoints = found[0]["before-save"]
    assert error.startswith("after step 4 ") and "is not the same on ranks 0 (" in error
    assert checkpoints == [2]
    assert found[0]["one-copy"] == [None, [2, 4, 6]]


def test_a_copy_stays_on_one_node_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path, fsdp__strategy="HYBRID_SHARD", train__global_batch_size=4, train__micro_batch_size=1
    )
    variants = {"default": [], "asked": ["fsdp.shard_size=2"], "tensor": ["fsdp.shard_size=2", "parallel.tensor=2"]}
    [found, *_] = on_ranks(
        4, placed, tmp_path / "ranks", recipe=str(recipe), orders=["aabb", "abab"], variants=variants
    )
    assert {*map(tuple, found["aabb"].values())} == {(0, "")} and found["abab"]["asked"] == [0, ""]
    code, message = found["abab"]["default"]
    assert "parallel.tensor: layers are divided inside a node, but ranks 0 and 1" in found["abab"]["tensor"][1]
    assert code == 2 and "ranks 0 and 1 of a group are on a and b" in message


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


def split_while_training(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Flip a bit of a weight of the last rank after the third step; return each run's error and checkpoints."""
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, [f"name={name}", *overrides])

        def spoiling(number: int, run: Trainer = run, make_step: Any = run.step) -> bool:
            stop = make_step(number)
            if number == 2 and dist.get_rank() == dist.get_world_size() - 1:
                local(list(run.engine.model.parameters())[-1].detach()).view(torch.int32).view(-1)[:1] ^= 1
            return bool(stop)

        error = None
        with patch.object(run, "step", spoiling):
            try:
                run.train()
            except WorkerLost as lost:
                error = str(lost)
        found[name] = [error, run.session.rundir.checkpoint_steps()]
    return found


def placed(recipe: str, orders: list[str], variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return `refusals` on nodes of two ranks, for each order of hosts: a letter is the host name of a rank."""
    found = {}
    for hosts in orders:
        with (
            patch.dict(os.environ, LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(int(os.environ["RANK"]) % 2)),
            patch("socket.gethostname", lambda hosts=hosts: hosts[int(os.environ["RANK"])]),
        ):
            named = {name: [f"name={hosts}-{name}", *overrides] for name, overrides in variants.items()}
            found[hosts] = refusals(recipe, named)
    return found
