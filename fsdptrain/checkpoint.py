"""Sharded checkpoints: save, verify, load, keep. One safetensors file a rank, one manifest, one rename.

    every rank: copy shards to host memory → write its file → fsync → checksum ─┐ (in the background if asked for)
    rank 0:     ───────────────────────────────────── manifest → rename → fsync ┴→ drop the oldest

Shards are slices along dimension 0 (that is how FSDP2 shards), stored with their first row, so any world size can read
them back: a rank copies the rows that overlap its own. Position in the data and dropout seeds are functions of the
step, so the step is all there is to remember besides tensors.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdptrain.dist import World
from fsdptrain.errors import CheckpointError, RecipeError
from fsdptrain.manifest import (
    FORMAT,
    Manifest,
    damaged,
    file_entry,
    fsync,
    newest_manifest,
    read_manifest,
    resume_problems,
)
from fsdptrain.model import saved_state
from fsdptrain.plan import Plan
from fsdptrain.rundir import RunDir

Saved = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one tensor: `local` holds rows first … first + len(local) of `shape`."""

    local: torch.Tensor
    first: int
    shape: tuple[int, ...]


def shards_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Shard]:
    """Everything a checkpoint holds: `model.NAME` parameters and persistent buffers, `optim.NAME.KEY` moments."""
    tensors = {f"model.{name}": tensor for name, tensor in saved_state(model).items()}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is gathered: a forward without backward was not resharded"
        moments = optimizer.state[param].items()
        tensors |= {f"optim.{name}.{key}": value for key, value in moments if value.ndim}
    return {name: shard_of(tensor) for name, tensor in tensors.items()}


def shard_of(tensor: torch.Tensor) -> Shard:
    """The local rows of a (possibly sharded) tensor; a plain tensor is all its own."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Shard(tensor, 0, tuple(tensor.shape))
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(tensor.to_local(), offsets[0] if offsets else 0, tuple(tensor.shape))


class Checkpointer:
    """Writes and reads the checkpoints of one run; every method is called by every rank."""

    def __init__(self, rundir: RunDir, plan: Plan, world: World, content: dict[str, str], saved: Saved) -> None:
        """`content` names what the recipe's words stand for: digests of the data and of the tokenizer."""
        self.rundir, self.plan, self.world, self.saved = rundir, plan, world, saved
        self.identity = plan.identity() | content
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, model: Any, optimizer: torch.optim.Optimizer, wait: bool) -> None:
        """Save what `step` steps have made; returns when the copy is staged, or (`wait`) when it is committed.

        Raises CheckpointError when this save, or the one before that was still being written, failed.
        """
        self.wait()
        started = time.monotonic()
        mine = shards_of(model, optimizer) if self.world.writes else {}
        if self.world.rank != 0:  # plain tensors (buffers) are equal everywhere: rank 0's are written
            mine = {name: shard for name, shard in mine.items() if shard.local.shape != shard.shape or shard.first}
        # While we wait nothing changes the tensors, and those in host memory need no second copy of it.
        staged = {name: Shard(s.local.to("cpu", copy=not wait), s.first, s.shape) for name, s in mine.items()}
        self._thread = threading.Thread(target=self._commit, args=(step, staged, started), name="checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _commit(self, step: int, staged: dict[str, Shard], started: float) -> None:
        """Runs in a thread on every rank, with collectives on the side group only."""
        target = self.rundir.checkpoint(step)
        scratch = target.with_name(target.name + ".tmp")
        try:
            needed = sum(self._exchange(sum(s.local.nbytes for s in staged.values())))
            self._together(lambda: make_room(scratch, needed) if self.world.rank == 0 else None)
            entry = self._together(lambda: write_shards(scratch / file_name(self.world.rank), staged))
            files = dict(filter(None, self._exchange(entry)))
            self._together(lambda: self._publish(step, scratch, target, files) if self.world.rank == 0 else None)
        except Exception as error:  # raised by the next wait(), on the training thread
            if self.world.rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            self._error = error
            return
        size = sum(facts["bytes"] for facts in files.values())
        self.saved({"step": step, "path": str(target), "bytes": size, "seconds": time.monotonic() - started})

    def _publish(self, step: int, scratch: Path, target: Path, files: dict[str, Any]) -> None:
        size = self.world.size
        Manifest(FORMAT, step, size, self.plan.digest(), self.identity, files).write(scratch)
        fsync(scratch)
        scratch.rename(target)
        fsync(target.parent)
        keep_newest(self.rundir, self.plan.recipe.checkpoint.keep)

    def _exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.world.side)
        return values

    def _together(self, work: Callable[[], Any]) -> Any:
        """Do the work on this rank; if it failed on any, raise one CheckpointError on all."""
        result, failure = None, None
        try:
            result = work()
        except (OSError, CheckpointError) as error:
            failure = f"rank {self.world.rank}: {no_space(error)}"
        except Exception as error:  # safetensors raises its own class for a full disk
            failure = f"rank {self.world.rank}: {type(error).__name__}: {no_space(error)}"
        self.all_or_none(failure and f"cannot save a checkpoint in {self.rundir.checkpoints}: {failure}")
        return result

    def all_or_none(self, failure: object) -> None:
        """Raise one CheckpointError on every rank when any rank brings a failure; collective."""
        failures = [text for text in self._exchange(str(failure) if failure else None) if text]
        if failures:
            raise CheckpointError(failures[0])

    def newest_step(self) -> int:
        """The step of the newest checkpoint as rank 0 sees it, valid or not; 0 where there is none.

        Raises CheckpointError where there are only damaged ones: starting over would not be going on.
        """
        newest = int(self._exchange(max(self.rundir.checkpoint_steps(), default=0))[0])
        spoilt = sorted(path.name for path in self.rundir.checkpoints.glob("step-*.damaged"))
        self.all_or_none(None if newest or not spoilt else f"only damaged checkpoints are left: {', '.join(spoilt)}")
        return newest

    def refuse_another_run(self) -> None:
        """Raise RecipeError when the checkpoints here are of other data or another tokenizer under the same names."""
        manifest = newest_manifest(self.rundir)
        problems = resume_problems(manifest.identity, self.identity) if manifest else []
        if any(self._exchange(bool(problems))):
            raise RecipeError(problems or "another rank sees another run to resume")

    def load_newest(self, model: Any, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest valid checkpoint into an allocated model and a started optimizer; its step, or 0.

        A damaged checkpoint is named and set aside, and the one before it is taken. Raises CheckpointError when there
        are checkpoints and none is valid.
        """
        steps = self._exchange(self.rundir.checkpoint_steps())[0]
        for step in reversed(steps):
            problems = self._verify(step)
            if not problems:
                with Stored(self.rundir.checkpoint(step)) as stored:
                    for name, shard in shards_of(model, optimizer).items():
                        stored.fill(name, shard)
                return int(step)
            if self.world.rank == 0:
                folder = self.rundir.checkpoint(step)
                folder.rename(folder.with_name(folder.name + ".damaged"))
                print(f"checkpoint set aside as {folder.name}.damaged: {'; '.join(problems)}", flush=True)
            self.world.barrier()
        if steps:
            raise CheckpointError(f"no valid checkpoint is left in {self.rundir.checkpoints}: all were damaged")
        return 0

    def _verify(self, step: int) -> list[str]:
        """What is wrong with a checkpoint: every rank reads its share of the files."""
        folder = self.rundir.checkpoint(step)
        try:
            manifest = read_manifest(folder)
            mine = damaged(folder, manifest, sorted(manifest.files)[self.world.rank :: self.world.size])
        except CheckpointError as error:
            mine = [str(error)]
        return sorted({problem for found in self._exchange(mine) for problem in found})


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def write_shards(path: Path, shards: dict[str, Shard]) -> tuple[str, dict[str, Any]] | None:
    """Write shards durably; (file name, size and checksum), or None where there is nothing to write."""
    shards = {name: shard for name, shard in shards.items() if shard.local.numel()}
    if not shards:
        return None
    places = {name: [shard.first, *shard.shape] for name, shard in shards.items()}
    tensors = {name: shard.local.contiguous() for name, shard in shards.items()}
    save_file(tensors, path, metadata={"places": json.dumps(places)})
    fsync(path)
    return path.name, file_entry(path)


def make_room(scratch: Path, needed: int) -> None:
    """Make an empty folder to write into; raises CheckpointError when the disk has less than `needed` bytes free."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    free = shutil.disk_usage(scratch).free
    if free < needed * 1.01:
        raise CheckpointError(f"no space: needs {needed * 1.01 / 1e9:.2f} GB, has {free / 1e9:.2f} GB")


def no_space(error: BaseException) -> str:
    """The error's text, with a full disk named as such (safetensors says `os error 28`)."""
    text = str(error)
    return f"no space left on the disk ({text})" if "os error 28" in text or "Errno 28" in text else text


def keep_newest(rundir: RunDir, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints: renamed away first, so that a half-removed one is never seen."""
    for step in rundir.checkpoint_steps()[:-keep]:
        old = rundir.checkpoint(step)
        trash = old.with_name(old.name + ".old")
        old.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def sweep(rundir: RunDir) -> None:
    """Remove what an interrupted save or clean-up left behind."""
    for pattern in ("*.tmp", "*.old"):
        for path in rundir.checkpoints.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


class Stored:
    """A checkpoint open for reading: whole tensors or single rows of them, whatever ranks wrote them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, Any]]] = {}  # name → [(first row, slice of an open file)]
        self._stack = contextlib.ExitStack()
        for name in sorted(self.manifest.files):
            opened = self._stack.enter_context(safe_open(folder / name, framework="pt"))
            for tensor, (first, *shape) in json.loads(opened.metadata()["places"]).items():
                self.shapes[tensor] = tuple(shape)
                self._pieces.setdefault(tensor, []).append((first, opened.get_slice(tensor)))

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor is stored in."""
        return self._pieces[name][0][1][:0].dtype if self.shapes[name] else torch.float32

    def fill(self, name: str, shard: Shard) -> None:
        """Copy the stored rows that overlap a shard into it.

        Raises CheckpointError when the tensor is missing, has another shape, or does not cover the shard.
        """
        if self.shapes.get(name) != shard.shape:
            raise CheckpointError(f"{self.folder}: {name} is {self.shapes.get(name)}, the model wants {shard.shape}")
        wanted = range(shard.first, shard.first + len(shard.local))
        covered = 0
        for first, rows in self._pieces[name]:
            begin, end = max(first, wanted.start), min(first + rows.get_shape()[0], wanted.stop)
            if begin < end:
                shard.local[begin - wanted.start : end - wanted.start].copy_(rows[begin - first : end - first])
                covered += end - begin
        if covered < len(wanted):
            raise CheckpointError(f"{self.folder}: {name} has {covered} of the {len(wanted)} rows this rank needs")

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, put together in host memory."""
        local = torch.empty(self.shapes[name], dtype=self.dtype(name))
        self.fill(name, Shard(local, 0, self.shapes[name]))
        return local
