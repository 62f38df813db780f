"""Copies of the model: equal before each checkpoint, and each of them on one node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import build, local, refusals
from support import on_ranks, write_recipe

from fsdptrain.errors import WorkerLost
from fsdptrain.train.trainer import Trainer


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
    variants = {"default": [], "asked": ["fsdp.shard_size=2"]}
    [found, *_] = on_ranks(
        4, placed, tmp_path / "ranks", recipe=str(recipe), orders=["aabb", "abab"], variants=variants
    )
    assert found["aabb"] == {"default": [0, ""], "asked": [0, ""]} and found["abab"]["asked"] == [0, ""]
    code, message = found["abab"]["default"]
    assert code == 2 and "ranks 0 and 1, which share a copy, are on a and b" in message


# --- on every rank -------------------------------------------------------------------------------------------------


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
