"""Checkpoints that tests write, and faults while one is written: functions that return a context with the fault."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from fsdptrain.checkpoint.manifest import FORMAT_VERSION, Manifest, read_manifest
from fsdptrain.checkpoint.save import write_shards
from fsdptrain.checkpoint.shards import Shard, find_pieces, load_checkpoint
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.storage import MANIFEST_NAME, CheckpointStorage, Location

FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


class Panic(BaseException):
    """A panic in a Rust library, as Python sees it: no subclass of Exception."""


@contextmanager
def nothing(checkpointer: Any, step: int) -> Iterator[None]:
    yield


again = once_more = nothing


@contextmanager
def taken_name(checkpointer: Any, step: int) -> Iterator[None]:
    """Put an empty folder where the checkpoint will go, which a rename would replace silently."""
    if checkpointer.world.rank == 0:
        checkpointer.rundir.checkpoint(step).mkdir()
    yield


def when_synced(act: Callable[[Path], object]) -> AbstractContextManager[Any]:
    """Act on every file and folder after it was synced to the disk; what is raised seems to come from the system."""
    sync = os.fsync

    def syncing(descriptor: int) -> None:
        sync(descriptor)
        act(Path(f"/proc/self/fd/{descriptor}").readlink())

    return patch.object(os, "fsync", syncing)


def taken_meanwhile(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
    """Take the checkpoint's name while its files are written."""

    def take(path: Path) -> None:
        if path.name.startswith("rank-"):
            checkpointer.rundir.checkpoint(step).mkdir(exist_ok=True)

    return when_synced(take)


def cut_short(error: BaseException) -> Callable[[Any, int], AbstractContextManager[Any]]:
    """Let rank 1 fail after half of its file."""

    def writing(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
        def write(tensors: Any, path: Path, metadata: Any) -> None:
            Path(path).write_bytes(b"half a file")
            raise error

        library = safetensors.torch
        return patch.object(
            library, "serialize_file", write if checkpointer.world.rank == 1 else library.serialize_file
        )

    return writing


disk_fills_up = cut_short(SafetensorError(FULL))
quota_is_used_up = cut_short(OSError(errno.EDQUOT, "Disk quota exceeded"))
library_panics = cut_short(Panic("index out of bounds"))


def disk_is_full_already(*_: Any) -> AbstractContextManager[Any]:
    return patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))


def disk_flips_a_bit(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
    """Flip a bit of rank 1's file after it was written."""
    return when_synced(lambda path: flip(path) if path.name == "rank-00001.safetensors" else None)


def commit_fails(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
    """Let the disk fail between the manifest and the rename."""

    def fail(path: Path) -> None:
        if path.name == MANIFEST_NAME:
            raise OSError(errno.EIO, "Input/output error")

    return when_synced(fail)


def metrics_cannot_be_written(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return patch.object(checkpointer, "write_event", failing)


@contextmanager
def newest_is_short(checkpointer: Any, step: int) -> Iterator[None]:
    """Cut the end of the checkpoint before this one, which then must not count as kept."""
    if checkpointer.world.rank == 0:
        newest = checkpointer.rundir.checkpoint(checkpointer.rundir.checkpoint_steps()[-1])
        file = newest / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    yield


@contextmanager
def newest_is_damaged(checkpointer: Any) -> Iterator[None]:
    """Flip a bit of the newest checkpoint, and take the name under which it would be set aside."""
    if checkpointer.world.rank == 0:
        newest = checkpointer.rundir.checkpoint(checkpointer.rundir.checkpoint_steps()[-1])
        flip(newest / "rank-00001.safetensors")
        newest.with_name(newest.name + ".damaged").mkdir()
    dist.barrier(checkpointer.world.side)
    yield


TENSORS = (("a", (3, 5), torch.float32), ("b", (), torch.bfloat16), ("c", (700,), torch.float64))


def shards_of_rank(rank: int, world: int = 2) -> dict[str, Shard]:
    """Return a rank's rows of some random tensors."""
    draw = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(8, *shape, generator=draw).to(dtype) for name, shape, dtype in TENSORS}
    size = 8 // world
    return {
        name: Shard.of_rows(tensor[rank * size : (rank + 1) * size], rank * size, tuple(tensor.shape))
        for name, tensor in rows.items()
    }


def write(storage: CheckpointStorage, step: int, world: int = 2) -> dict[str, Any]:
    """Write the files of all ranks, without publishing them; return the entries of the manifest."""
    storage.prepare(step)
    written = {}
    for rank in range(world):
        path = storage.staging(step) / f"rank-{rank:05}.safetensors"
        entry = write_shards(path, shards_of_rank(rank, world), True, lambda path: storage.deliver(step, path))
        assert entry
        written[entry[0]] = entry[1]
    return written


def save(storage: CheckpointStorage, step: int, plan: Plan | None = None) -> None:
    """Write a checkpoint of two ranks: of a plan, if one is given."""
    fields, identity = (json.loads(plan.to_json()), plan.identity()) if plan else ({}, {})
    storage.publish(step, Manifest(FORMAT_VERSION, step, fields, identity, write(storage, step)).sealed())


def load_alone(folder: Location, shards: dict[str, Shard]) -> None:
    """Load shards from a checkpoint as a run of one process."""
    files = sorted(read_manifest(folder).files)
    load_checkpoint(folder, files, shards, find_pieces(folder, files, shards))


def flip(path: Path, place: int = -1, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
