"""Faults while a checkpoint is written; each function returns a context in which its fault happens (`ranks.saves`)."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from safetensors import SafetensorError

from fsdptrain.checkpoint import save as checkpoint
from fsdptrain.folder import storage

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


def taken_meanwhile(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
    """Take the checkpoint's name while its files are written."""
    write = checkpoint.write_shards

    def taking(*arguments: Any) -> Any:
        checkpointer.rundir.checkpoint(step).mkdir(exist_ok=True)
        return write(*arguments)

    return patch.object(checkpoint, "write_shards", taking)


def cut_short(error: BaseException) -> Callable[[Any, int], AbstractContextManager[Any]]:
    """Let rank 1 fail after half of its file."""

    def writing(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
        def write(tensors: Any, path: Path, metadata: Any) -> None:
            path.write_bytes(b"half a file")
            raise error

        return patch.object(checkpoint, "save_file", write if checkpointer.world.rank == 1 else checkpoint.save_file)

    return writing


disk_fills_up = cut_short(SafetensorError(FULL))
quota_is_used_up = cut_short(OSError(errno.EDQUOT, "Disk quota exceeded"))
library_panics = cut_short(Panic("index out of bounds"))


def disk_is_full_already(*_: Any) -> AbstractContextManager[Any]:
    return patch.object(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))


def disk_flips_a_bit(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
    """Flip a bit of rank 1's file after it was written."""
    fsync = checkpoint.fsync

    def flipping(path: Path) -> None:
        fsync(path)
        if path.name == "rank-00001.safetensors":
            flip(path)

    return patch.object(checkpoint, "fsync", flipping)


def commit_fails(checkpointer: Any, step: int) -> AbstractContextManager[Any]:
    """Let the disk fail between the manifest and the rename."""
    fsync = storage.fsync

    def failing(path: Path) -> None:
        if path.name.endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        fsync(path)

    return patch.object(storage, "fsync", failing)


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


def flip(path: Path, place: int = -1, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
