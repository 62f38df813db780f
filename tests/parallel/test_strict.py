"""The ranks of the tests refuse what NCCL refuses, although gloo takes it; see `strict`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from strict import differences
from support import on_ranks


def refused() -> list[str]:
    """Return what calls say on a rank, on which `ranks.main` has made the collectives strict."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    square, found = torch.ones(4, 4), []
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(square),
        lambda: dist.all_reduce(square.t()),
        lambda: dist.broadcast(square.short(), 0),
        lambda: dist.all_gather_into_tensor(torch.ones(32), square),
    ]
    for call in calls:
        try:
            found.append(str(call()))
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_nccl_refuses_is_refused(tmp_path: Path) -> None:
    [[taken, *messages]] = on_ranks(1, refused, tmp_path)
    assert taken == "None"
    expected = ["[4, 4] (1, 4) is not contiguous", "torch.int16", "32 elements are not 1 × 16"]
    for message, part in zip(messages, expected, strict=True):
        assert message.startswith("NCCL refuses") and part in message


def test_ranks_that_issue_other_collectives_are_named() -> None:
    world, pair = ("0", (0, 1, 2)), ("1", (0, 2))
    same = {world: ["allreduce of 4 torch.float32"], pair: ["broadcast of 1 torch.int64"]}
    assert differences([same, {world: same[world]}, same]) == []
    other = {world: ["allreduce of 5 torch.float32"], pair: []}
    assert differences([same, {world: same[world]}, other]) == [
        "group 0: rank 0 issued allreduce of 4 torch.float32, and rank 2 allreduce of 5 torch.float32",
        "group 1: rank 0 issued broadcast of 1 torch.int64, and rank 2 None",
    ]
