"""Sharded checkpoints: save, verify, load, keep. One safetensors file a rank, one manifest, one rename.

    every rank: copy shards to host memory → write its file → fsync → read it back ─┐ (in the background if asked for)
    rank 0:     ──────────────────────────────────────── manifest → rename → fsync ─┴→ drop the oldest

Shards are slices along dimension 0 (that is how FSDP2 shards), stored with their first row, so any world size can read
them back: a rank copies the rows that overlap its own. Position in the data and dropout seeds are functions of the
step, so the step is all there is to remember besides tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import reprlib
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdptrain.dist import World
from fsdptrain.errors import FULL_DISK, CheckpointError, OtherVersion, RecipeError
from fsdptrain.manifest import (
    FORMAT,
    Manifest,
    complete_steps,
    faults,
    file_entry,
    fsync,
    newest_manifest,
    read_manifest,
    resume_problems,
    set_aside,
)
from fsdptrain.model import saved_state
from fsdptrain.ownership import remove_checkpoint
from fsdptrain.plan import Plan
from fsdptrain.report import size
from fsdptrain.rundir import RunDir

Tell = Callable[..., None]  # (event, its fields): where events are written
FULL = re.compile(rf"(?:os error|Errno) (?:{'|'.join(map(str, FULL_DISK))})\b")


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one tensor: `local` holds rows first … first + len(local) of `shape`; a scalar is one row."""

    local: torch.Tensor
    first: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether these are all the rows there are."""
        return self.local.numel() == math.prod(self.shape)


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
        return Shard(torch.atleast_1d(tensor), 0, tuple(tensor.shape))
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(tensor.to_local(), offsets[0] if offsets else 0, tuple(tensor.shape))


class Checkpointer:
    """Writes and reads the checkpoints of one run; every method is called by every rank."""

    def __init__(self, rundir: RunDir, plan: Plan, world: World, content: dict[str, str], tell: Tell) -> None:
        """`content` names what the recipe's words stand for: digests of the data and of the tokenizer."""
        self.rundir, self.plan, self.world, self.tell = rundir, plan, world, tell
        self.identity = plan.identity() | content
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: dict[str, torch.Tensor] = {}

    def save(self, step: int, model: Any, optimizer: torch.optim.Optimizer, wait: bool) -> None:
        """Save what `step` steps have made; returns when the copy is staged, or (`wait`) when it is committed.

        Raises CheckpointError when this save, or the one before that was still being written, failed.
        """
        self.wait()
        started = time.monotonic()
        mine = shards_of(model, optimizer) if self.world.writes else {}
        if self.world.rank != 0:  # plain tensors (buffers) are equal everywhere: rank 0's are written
            mine = {name: shard for name, shard in mine.items() if not shard.is_whole}
        staged = self._stage(mine, wait)
        arguments = (step, staged, started, time.monotonic() - started)
        self._thread = threading.Thread(target=self._commit, args=arguments, name="checkpoint")
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

    def _stage(self, shards: dict[str, Shard], wait: bool) -> dict[str, Shard]:
        """The shards in host memory, where the steps that follow do not change them.

        While we wait nothing changes them, and those in host memory already need no copy. The others go to the same
        pages at every save: to get fresh ones from the system takes longer than to fill them.
        """
        staged = {}
        for name, shard in shards.items():
            local = shard.local
            if not wait or local.device.type != "cpu":
                if name not in self._staging:
                    self._staging[name] = torch.empty_like(local, device="cpu")
                local = self._staging[name].copy_(local)
            staged[name] = Shard(local, shard.first, shard.shape)
        return staged

    def _commit(self, step: int, staged: dict[str, Shard], started: float, blocked_s: float) -> None:
        """Runs in a thread on every rank, with collectives on the side group only."""
        target = self.rundir.checkpoint(step)
        try:
            size = self._write(step, staged, target)
            keep = self.plan.recipe.checkpoint.keep
            self._first("remove old checkpoints", partial(keep_newest, self.rundir, step, keep))
            facts = {"step": step, "path": str(target), "bytes": size}
            facts |= {"seconds": time.monotonic() - started, "blocked_s": blocked_s}
            self._first(f"report {target}", partial(self.tell, "save", **facts))
        except BaseException as error:
            self._error = error  # for the training thread, which raises it in its next wait()

    def _write(self, step: int, staged: dict[str, Shard], target: Path) -> int:
        """Write and commit a checkpoint; its size in bytes. When any rank fails, nothing is left of it."""
        scratch = target.with_name(target.name + ".tmp")
        saving = f"save {target}"
        try:
            needed = sum(self._exchange(sum(shard.local.nbytes for shard in staged.values())))
            told = space_told(scratch, needed)  # around whatever writes
            self._first(saving, told(partial(make_room, scratch, target, needed)))
            entry = self._together(saving, told(partial(write_shards, scratch / file_name(self.world.rank), staged)))
            files = dict(filter(None, self._exchange(entry)))
            self._first(saving, told(partial(self._publish, step, scratch, target, files)))
        except BaseException:
            if self.world.rank == 0:
                with contextlib.suppress(OSError):
                    remove_checkpoint(scratch)
            raise
        return sum(facts["bytes"] for facts in files.values())

    def _publish(self, step: int, scratch: Path, target: Path, files: dict[str, Any]) -> None:
        Manifest(FORMAT, step, self.world.size, self.plan.digest(), self.identity, files).write(scratch)
        fsync(scratch)
        refuse_taken(target)  # an empty folder would be replaced without a word
        scratch.rename(target)
        fsync(target.parent)

    def _exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.world.side)
        return values

    def _first(self, doing: str, work: Callable[[], Any]) -> None:
        """Rank 0 does the work; if it fails, raise one CheckpointError on all."""
        self._together(doing, lambda: work() if self.world.rank == 0 else None)

    def _together(self, doing: str, work: Callable[[], Any]) -> Any:
        """Do the work on this rank; if it failed on any, raise one CheckpointError on all."""
        result, failure = None, None
        try:
            result = work()
        except (OSError, CheckpointError) as error:
            failure = str(error)
        except BaseException as error:  # of any class (a panic in Rust is no Exception): the others wait for us
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        self.all_or_none(failure and f"cannot {doing}: rank {self.world.rank}: {failure}")
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
        spoilt = sorted(path.name for path in self.rundir.checkpoints.glob("step-*.damaged*"))
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
        are checkpoints and none is valid, or when another version of fsdptrain wrote the newest.
        """
        steps = self._exchange(self.rundir.checkpoint_steps())[0]
        for step in reversed(steps):
            folder = self.rundir.checkpoint(step)
            problems = self._verify(folder)
            if not problems:
                self._together(f"load {folder}", partial(load, folder, shards_of(model, optimizer)))
                return int(step)
            self._first(f"set {folder} aside", partial(self._set_aside, folder, problems))
        if steps:
            raise CheckpointError(f"no valid checkpoint is left in {self.rundir.checkpoints}: all were damaged")
        return 0

    def _set_aside(self, folder: Path, problems: list[str]) -> None:
        self.tell("set_aside", path=str(set_aside(folder)), problems=problems)

    def _verify(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint: every rank reads its share of the files.

        Raises CheckpointError on every rank when the checkpoint is of another version.
        """
        mine, refusal = [], None
        try:
            mine = faults(folder, slice(self.world.rank, None, self.world.size))
        except OtherVersion as error:
            refusal = error
        self.all_or_none(refusal)
        return sorted({problem for found in self._exchange(mine) for problem in found})


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def write_shards(path: Path, shards: dict[str, Shard]) -> tuple[str, dict[str, Any]] | None:
    """Write shards durably; (file name, size and checksum), or None where there is nothing to write.

    Raises CheckpointError when the disk gives back something else than it was given.
    """
    shards = {name: shard for name, shard in shards.items() if shard.local.numel()}
    if not shards:
        return None
    places = {name: [shard.first, *shard.shape] for name, shard in shards.items()}
    tensors = {name: shard.local.contiguous() for name, shard in shards.items()}
    save_tensors(tensors, path, {"places": json.dumps(places)})
    entry = file_entry(path)  # as it stands in memory still
    fsync(path)
    if file_entry(path) != entry:
        raise CheckpointError(f"{path} reads otherwise than it was written: this disk cannot be relied on")
    return path.name, entry


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions that the umask leaves, not readable to its owner only."""
    path.touch()
    mode = path.stat().st_mode  # what the umask leaves
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def make_room(scratch: Path, target: Path, needed: int) -> None:
    """Make an empty folder to write into.

    Raises CheckpointError when the target's name is taken, or when the disk has less than `needed` bytes free.
    """
    refuse_taken(target)
    remove_checkpoint(scratch)
    missing = [folder for folder in (scratch, *scratch.parents) if not folder.exists()]
    scratch.mkdir(parents=True)
    for folder in missing:
        fsync(folder.parent)
    needed += needed // 100  # headers, and what the file system takes for itself
    if room(scratch) < needed:
        raise CheckpointError(no_space(scratch, needed))


def refuse_taken(target: Path) -> None:
    """Raise CheckpointError when there is something of this name: a checkpoint never replaces anything."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already: move it away, nothing is overwritten")


def room(scratch: Path) -> int:
    """Bytes there are for what is written into `scratch`: those free, and those it has taken."""
    return shutil.disk_usage(scratch.parent).free + sum(path.stat().st_size for path in scratch.glob("*"))


def no_space(scratch: Path, needed: int) -> str:
    """What is said of a full disk, whenever it is noticed."""
    return f"no space: needs {size(needed)}, has {size(room(scratch))}"


@contextlib.contextmanager
def space_told(scratch: Path, needed: int) -> Iterator[None]:
    """Inside, a disk that fills up is a CheckpointError with the numbers (safetensors says `os error 28`)."""
    try:
        yield
    except Exception as error:
        if FULL.search(str(error)):
            raise CheckpointError(f"{no_space(scratch, needed)} ({error})") from error
        raise


def keep_newest(rundir: RunDir, newest: int, keep: int) -> None:
    """Remove all but the `keep` newest complete checkpoints; damaged ones neither count nor go.

    Raises CheckpointError, and removes nothing, when `newest`, just written, is not among them. They are renamed away
    first, so that a half-removed one is never seen.
    """
    steps = complete_steps(rundir)
    if newest not in steps:
        raise CheckpointError(f"{rundir.checkpoint(newest)} is not complete after all: nothing is removed")
    for step in steps[:-keep]:
        old = rundir.checkpoint(step)
        trash = old.with_name(old.name + ".old")
        remove_checkpoint(trash)
        old.rename(trash)
        remove_checkpoint(trash)


def load(folder: Path, shards: dict[str, Shard]) -> None:
    """Fill the shards of a run from a verified checkpoint; raises CheckpointError when it is of another model."""
    with Stored(folder) as stored:
        unknown = sorted(stored.shapes.keys() - shards.keys())
        if unknown:
            raise CheckpointError(f"{folder}: the model has no {unknown[0]!r}")
        for name, shard in shards.items():
            stored.fill(name, shard)


class Stored:
    """A checkpoint open for reading: whole tensors or single rows of them, whatever ranks wrote them.

    That its files have the right checksums says that they are as they were written, not who wrote them: what they say
    of themselves is checked. Raises CheckpointError when it does not come out as whole tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, Any]]] = {}  # name → [(first row, slice of an open file)]
        with contextlib.ExitStack() as stack:
            for name in sorted(read_manifest(folder).files):
                try:
                    self._take(stack.enter_context(safe_open(folder / name, framework="pt")))
                except (SafetensorError, OSError, ValueError, RecursionError) as error:
                    raise CheckpointError(f"{folder / name} is not a file of a checkpoint: {error}") from None
            for name in self.shapes:
                self._refuse_gaps(name)
            self._stack = stack.pop_all()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _take(self, opened: Any) -> None:
        """Note the pieces in a file; raises ValueError when they are not where the file says they are."""
        places = json.loads((opened.metadata() or {}).get("places", "null"))
        if not isinstance(places, dict) or places.keys() != set(opened.keys()):
            raise ValueError("its `places` are not those of its tensors")
        for name, place in places.items():
            if not isinstance(place, list) or not place or any(type(n) is not int or n < 0 for n in place):
                raise ValueError(f"{name!r} has no place: {reprlib.repr(place)}")
            (first, *shape), rows = place, opened.get_slice(name)
            if not rows.get_shape() or rows.get_shape()[1:] != shape[1:]:
                raise ValueError(f"{name!r} is {rows.get_shape()} of {reprlib.repr(shape)}")
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(f"{name!r} is {self.shapes[name]} elsewhere, and {reprlib.repr(shape)} here")
            self._pieces.setdefault(name, []).append((first, rows))

    def _refuse_gaps(self, name: str) -> None:
        """Raise CheckpointError unless a tensor's pieces are of one dtype and follow upon each other to its end."""
        pieces = sorted(self._pieces[name], key=lambda piece: piece[0])
        starts = [first for first, _ in pieces]
        ends = [first + math.prod(rows.get_shape()[:1]) for first, rows in pieces]
        rows_in_all = math.prod(self.shapes[name][:1])
        if starts != [0, *ends[:-1]] or ends[-1] != rows_in_all:
            spans = ", ".join(f"{start} to {end}" for start, end in zip(starts, ends, strict=True))
            raise CheckpointError(f"{self.folder}: of the {rows_in_all} rows of {name!r} there are {spans}")
        dtypes = {rows.get_dtype() for _, rows in pieces}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.folder}: {name!r} is of several dtypes: {', '.join(sorted(dtypes))}")

    def fill(self, name: str, shard: Shard) -> None:
        """Copy the stored rows that overlap a shard into it.

        Raises CheckpointError when the tensor is missing, or has another shape or dtype.
        """
        if self.shapes.get(name) != shard.shape:
            raise CheckpointError(f"{self.folder}: {name} is {self.shapes.get(name)}, the model wants {shard.shape}")
        dtype = self._pieces[name][0][1][:0].dtype
        if dtype != shard.local.dtype:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}, the model wants {shard.local.dtype}")
        wanted = range(shard.first, shard.first + len(shard.local))
        for first, rows in self._pieces[name]:
            begin, end = max(first, wanted.start), min(first + rows.get_shape()[0], wanted.stop)
            if begin < end:
                shard.local[begin - wanted.start : end - wanted.start].copy_(rows[begin - first : end - first])

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A whole tensor, put together in host memory; raises CheckpointError when it is not `like` the model's."""
        made = torch.empty_like(like, device="cpu")
        self.fill(name, shard_of(made))
        return made
