"""Sharded checkpoints: save, verify, load, remove. One safetensors file per rank, one manifest, one rename.

    every rank: copy shards to host memory → write its file → fsync, checksum → deliver it → read it back ─┐ (a thread)
    rank 0:     ─────────────────────────────────────────────────────────── publish it with the manifest ─┴→ remove old

`storage` knows what delivering (an upload), publishing and removing are in a folder and in an object store.

Shards are rows, as FSDP2 divides them, of what a rank has of a tensor. They are written with their boxes: where their
numbers are in the whole tensor. So any layout can read them: a rank copies what overlaps its own. The position in the
data and the dropout seeds are functions of the step, so a checkpoint needs no state of samplers or generators.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import socket
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from fsdptrain.checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    checkpoint_problems,
    complete_steps,
    newest_manifest,
    read_manifest,
)
from fsdptrain.checkpoint.nodes import check_space, report_full_disk
from fsdptrain.checkpoint.resume import resume_problems
from fsdptrain.checkpoint.shards import (
    Shard,
    find_pieces,
    load_checkpoint,
    shards_of,
    share_of_rank,
    without_repeated,
)
from fsdptrain.errors import CheckpointError, FolderLost, OtherVersion, RecipeError, StorageError
from fsdptrain.parallel.recompute import pin_memory
from fsdptrain.parallel.world import World
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import read_losses
from fsdptrain.run_folder.files import fsync, is_there
from fsdptrain.run_folder.ownership import FolderWatch
from fsdptrain.run_folder.records import by_loss
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import Location

WriteEvent = Callable[..., None]  # (event, its fields) → written to the run's metrics
READ_BYTES = 2**20  # read back at a time; with more, the processor's cache does not hold it until it is compared
ALIGNMENT = 64  # bytes: each copy begins at a multiple, as a tensor of any dtype may


class Checkpointer:
    """Writes and reads the checkpoints of one run; every rank calls every method, in the same order."""

    def __init__(
        self, rundir: RunDir, plan: Plan, world: World, content: dict[str, Any], write_event: WriteEvent
    ) -> None:
        """Take the run, its plan, and in `content` what the recipe's names stand for, which a resume must find."""
        self.rundir, self.plan, self.world, self.write_event = rundir, plan, world, write_event
        self.storage = rundir.storage
        self._folder = FolderWatch(rundir) if world.rank == 0 else None
        self.identity = plan.identity() | content
        self.skipped = 0  # of the steps made, those that were not finite
        self.loss_scale: list[float] | None = None  # see `Manifest`
        self.losses: dict[int, float] = {}  # held out, by step: those of `RunState.losses`
        self._saved: set[int] = set()  # steps that have a checkpoint, or had one until better ones came
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging: Staging | None = None

    def remove_leftovers(self) -> None:
        """Make sure that checkpoints can be written, and remove what interrupted saves left."""
        self._on_rank_zero(f"write checkpoints to {self.storage}", self.storage.remove_leftovers)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, wait: bool) -> None:
        """Save the state after `step` steps; return when it is copied or, with `wait`, when it is committed.

        Raises CheckpointError when this save failed, or the one before if that was still being written.
        """
        # At most one save at a time: host memory holds one copy.
        self.wait()
        started = time.monotonic()
        shards = shards_of(model, optimizer, self.plan.recipe.optim, self.world)
        own = share_of_rank(without_repeated(shards, model), self.world.rank)
        # Training blocks for the copy only; a thread writes it.
        staged = self._copy_to_host(own, wait)
        self._saved.add(step)
        state, losses = (self.skipped, self.loss_scale), dict(self.losses)
        arguments = (step, state, losses, staged, started, time.monotonic() - started)
        self._thread = threading.Thread(target=self._commit, args=arguments, name="checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def is_among_best(self, step: int) -> bool:
        """Return whether the checkpoint of `step`, which may not be saved yet, is one of `checkpoint.keep_best`."""
        count = self.plan.recipe.checkpoint.keep_best
        return bool(count and step in self.losses) and step in by_loss(self.losses, self._saved | {step})[:count]

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def release(self) -> None:
        """Free the host memory of the copies, once no save is in progress: there will be no other soon."""
        if self._staging:
            self._staging.close()
            self._staging = None

    def _copy_to_host(self, shards: dict[str, Shard], wait: bool) -> dict[str, Shard]:
        """Copy shards to host memory, where the next steps do not change them.

        With `wait` no step runs before the end of the save, so shards in host memory are not copied. The copies reuse
        the memory of the save before: allocating pages takes longer than filling them.
        """
        moved = {name: shard.local for name, shard in shards.items() if not wait or shard.local.device.type != "cpu"}
        if moved and not (self._staging and moved.keys() <= self._staging.copies.keys()):
            self.release()
            self._staging = Staging(moved)
        copies = {name: self._staging.copy(name, local) for name, local in moved.items()} if self._staging else {}
        if (device := self.world.device).type != "cpu":  # once for all copies, which were queued without waiting
            torch.get_device_module(device).synchronize(device)
        return {name: replace(shard, local=copies.get(name, shard.local)) for name, shard in shards.items()}

    def _commit(
        self, step: int, engine: Any, losses: dict[int, float], staged: dict[str, Shard], started: float, blocked: float
    ) -> None:
        """Write, publish and report a checkpoint; runs in a thread on every rank, so collectives use the side group."""
        target = self.storage.checkpoint(step)
        try:
            size = self._write(step, engine, staged)
            keep = self.plan.recipe.checkpoint
            remove = partial(remove_old_checkpoints, self.rundir, step, keep.keep, keep.keep_best or 0, losses)
            self._on_rank_zero("remove old checkpoints", remove)
            fields = {"step": step, "path": str(target), "bytes": size}
            fields |= {"seconds": time.monotonic() - started, "blocked_s": blocked}
            self._on_rank_zero(f"report {target}", partial(self.write_event, "save", **fields))
        except BaseException as error:
            self._error = error  # the training thread raises it in its next wait()

    def _write(self, step: int, engine: Any, staged: dict[str, Shard]) -> int:
        """Write and publish a checkpoint, and return its bytes; when any rank fails, remove all of it.

        `engine` are `skipped` and `loss_scale` of the manifest.
        """
        storage, action = self.storage, f"save {self.storage.checkpoint(step)}"
        try:
            self._on_rank_zero(action, partial(self._prepare, step))
            scratch: Path = self._on_every_rank(action, partial(storage.staging, step))[self.world.rank]
            total = sum(self.world.gather_objects(sum(shard.local.nbytes for shard in staged.values())))
            with_disk_report = report_full_disk(scratch, total)
            self._on_rank_zero(action, with_disk_report(partial(check_space, scratch, total)))
            read_back = self.plan.recipe.checkpoint.verify == "read-back"
            path = scratch / f"rank-{self.world.rank:05d}.safetensors"
            write = partial(write_shards, path, staged, read_back, partial(storage.deliver, step))
            files = dict(filter(None, self._on_every_rank(action, with_disk_report(write))))
            manifest = Manifest(FORMAT_VERSION, step, json.loads(self.plan.to_json()), self.identity, files, *engine)
            publish = partial(storage.publish, step, manifest.sealed())
            self._on_rank_zero(action, with_disk_report(publish))
        except BaseException as error:
            if self.world.rank == 0 and not isinstance(error, FolderLost):  # else it is another run's folder
                with contextlib.suppress(StorageError):
                    storage.discard(step)
            raise
        return sum(entry["bytes"] for entry in files.values())

    def _prepare(self, step: int) -> None:
        """Begin a save, on rank 0; raises FolderLost instead of writing into a folder that is another one now."""
        if self._folder:
            self._folder.check()
        self.storage.prepare(step)

    def _on_rank_zero(self, action: str, work: Callable[[], Any]) -> None:
        self._on_every_rank(action, lambda: work() if self.world.rank == 0 else None)

    def from_rank_zero(self, action: str, work: Callable[[], Any]) -> Any:
        """Do the work on rank 0 and return its result on every rank; if it failed, raise as `_on_rank_zero` does."""
        result: list[Any] = []
        self._on_rank_zero(action, lambda: result.append(work()))
        result = result or [None]
        dist.broadcast_object_list(result, src=0, group=self.world.side)
        return result[0]

    def _on_every_rank(self, action: str, work: Callable[[], Any]) -> list[Any]:
        """Do the work on every rank, and return all results; if it failed on any, raise as `raise_on_every_rank`."""
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # any class (a Rust panic is no Exception), because the other ranks wait
            kind, text = (type(error) if isinstance(error, CheckpointError) else CheckpointError), str(error)
            if not isinstance(error, (OSError, CheckpointError)):
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"
            failure = kind(f"cannot {action}: rank {self.world.rank}: {text}")
        return self.raise_on_every_rank(failure, result)

    def raise_on_every_rank(self, failure: Exception | None, result: Any = None) -> list[Any]:
        """Raise the same CheckpointError on every rank when any passes an error, else return all results; collective.

        Its class stays.
        """
        found = self.world.gather_objects((failure, result))
        for error, _ in found:
            if error is not None:
                raise error if isinstance(error, CheckpointError) else CheckpointError(str(error))
        return [each for _, each in found]

    def restore_losses(self) -> None:
        """Read the held-out losses of earlier attempts from the records, and which steps are saved; collective."""
        read = partial(read_losses, self.rundir.metrics, self.plan.recipe.eval.best_of)
        self.losses = self.from_rank_zero("read the held-out losses", read)
        self._saved = set(self.from_rank_zero("list the checkpoints", self.storage.steps))

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint on rank 0, valid or not; 0 when there is none.

        Raises CheckpointError when only damaged ones are left, because a resume must not silently start over.
        """
        steps = self.from_rank_zero("list the checkpoints", self.storage.steps)
        damaged = self.from_rank_zero("list the checkpoints", self.storage.other_names)[0]
        if damaged and not steps:
            raise CheckpointError(f"only damaged checkpoints are left: {', '.join(damaged)}")
        return max(steps, default=0)

    def reject_another_run(self) -> None:
        """Raise RecipeError when the checkpoints here are of another model, other data or another tokenizer."""
        before = self.from_rank_zero("read the newest manifest", partial(newest_manifest, self.rundir))
        problems = resume_problems(before.identity, self.identity) if before else []
        if any(self.world.gather_objects(bool(problems))):
            raise RecipeError(problems or "another rank found a different run to resume")

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest valid checkpoint into an allocated model and optimizer; return its step, or 0 without one.

        From then on `skipped` and `loss_scale` are the checkpoint's.

        Damaged checkpoints are reported and renamed, and the one before is loaded. Raises CheckpointError when there
        are checkpoints but none is valid, or when another version of fsdptrain wrote the newest.
        """
        steps = self.from_rank_zero("list the checkpoints", self.storage.steps)
        return self._load_first_valid(steps[::-1], model, optimizer)

    def load_best(self, model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> int:
        """Load the checkpoint with the lowest held-out loss; return its step. That of `done` steps is in memory.

        Damaged ones are treated as `load_newest` does.
        """
        steps = self.from_rank_zero("list the checkpoints", self.storage.steps)
        best = by_loss(self.losses, steps)
        return done if best[:1] in ([], [done]) else self._load_first_valid(best, model, optimizer)

    def _load_first_valid(self, steps: Sequence[int], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the first of these checkpoints that is not damaged, and return its step; 0 if there are none."""
        for step in steps:
            folder = self.storage.checkpoint(step)
            problems = self._verify(folder)
            if not problems:
                # One rank reads it for all: with the names of thousands of files, it has hundreds of kilobytes.
                manifest = self.from_rank_zero(f"read {folder}", partial(read_manifest, folder))
                shards, files = shards_of(model, optimizer, self.plan.recipe.optim), sorted(manifest.files)
                if self.world.messages:  # the files have the tensors of all stages
                    of_ranks = self.world.gather_objects({name: shard.empty() for name, shard in shards.items()})
                    shards = dict(ChainMap(shards, *of_ranks))
                # Every rank reads the headers of its share of the files, and opens those with its rows.
                share = slice(self.world.rank, None, self.world.size)
                found = self._on_every_rank(f"load {folder}", partial(find_pieces, folder, files, shards, share))
                pieces = np.concatenate(found)
                self._on_every_rank(f"load {folder}", partial(load_checkpoint, folder, files, shards, pieces))
                self.skipped, self.loss_scale = manifest.skipped, manifest.loss_scale
                return int(step)
            aside = self.from_rank_zero(f"set {folder} aside", partial(self.storage.set_aside, step))
            report = partial(self.write_event, "set_aside", path=aside, problems=problems)
            self._on_rank_zero(f"report {aside}", report)
        if steps:
            raise CheckpointError(f"no valid checkpoint in {self.storage}: all are damaged")
        return 0

    def _verify(self, folder: Location) -> list[str]:
        def check() -> list[str]:
            # A host on which the folder is not mounted must not make it damaged for all.
            if isinstance(folder, Path) and not is_there(folder):
                raise StorageError(
                    f"{folder} does not exist on {socket.gethostname()}, and rank 0 lists it: mount the folder on "
                    "every host; nothing was renamed or removed"
                )
            return checkpoint_problems(folder, slice(self.world.rank, None, self.world.size))

        return sorted({problem for of_rank in self._on_every_rank(f"check {folder}", check) for problem in of_rank})


class Staging:
    """One flat piece of host memory with a copy of each of some tensors; pinned if any of them is on a GPU.

    It is pinned where it is: torch's allocator of pinned memory would round what it is asked for up to a power of two,
    each tensor or all of them, and keep it for ever (CachingHostAllocator.h: `allocate`, `free`).
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], pin: Callable[[torch.Tensor], None] | None = None) -> None:
        """Allocate unset memory; it is pageable if `pin`, by default `pin_memory`, raises RuntimeError."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self.copies = {
            name: self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), start in zip(tensors.items(), itertools.accumulate(sizes, initial=0))  # noqa: B905
        }
        self.pinned = False
        if self.memory.nbytes and any(tensor.device.type == "cuda" for tensor in tensors.values()):
            try:
                (pin or pin_memory)(self.memory)
                self.pinned = True
            except RuntimeError as error:
                print(f"a checkpoint's copy is in pageable memory, which is slower: {error}", flush=True)

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor; if it is on a GPU, only when the GPU has been waited for."""
        return self.copies[name].copy_(tensor, non_blocking=True)

    def close(self) -> None:
        """Free the memory, which the GPU must not be writing."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        self.copies, self.pinned = {}, False
        del self.memory


def write_shards(
    path: Path,
    shards: dict[str, Shard],
    read_back: bool = True,
    deliver: Callable[[Path], Location] = lambda path: path,
) -> tuple[str, dict[str, Any]] | None:
    """Write shards durably; return (file name, bytes and checksum), or None when there is nothing to write.

    `deliver` brings the file to where it stays. Raises CheckpointError when there are other bytes than were written; of
    a file of the same size, this is noticed only with `read_back`.
    """
    shards = {name: shard for name, shard in shards.items() if shard.local.numel()}
    if not shards:
        return None
    places = {name: [shard.shape, shard.boxes] for name, shard in shards.items()}
    tensors = {name: shard.local.contiguous() for name, shard in shards.items()}
    save_tensors(tensors, path, {"places": json.dumps(places)})
    pieces = pieces_of_file(path, tensors)
    # One thread waits for the disk while the other computes the checksum: of the memory, not of the file.
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(fsync, path)
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        entry = {"bytes": sum(map(len, pieces)), "sha256": digest.hexdigest()}
        synced.result()
    delivered = deliver(path)
    if delivered.stat().st_size != entry["bytes"] or (read_back and not file_holds(delivered, pieces)):
        raise CheckpointError(f"{delivered}: the bytes read back are not those written: suspect the disk")
    return path.name, entry


def pieces_of_file(path: Path, tensors: dict[str, torch.Tensor]) -> list[memoryview]:
    """Return the bytes of a safetensors file: the header, which is read, and the memory of its tensors, not copied.

    The library chooses the order of the tensors, so it is taken from the header.
    """
    with path.open("rb") as stream:
        length = stream.read(8)
        text = stream.read(int.from_bytes(length, "little"))
    header = json.loads(text)
    order = sorted(tensors, key=lambda name: header[name]["data_offsets"])
    return [memoryview(length + text), *(tensors[name].view(-1).view(torch.uint8).numpy().data for name in order)]


def file_holds(path: Location, pieces: list[memoryview]) -> bool:
    """Return whether a file holds these bytes and no others. Comparing takes a fifth of the time of a checksum."""
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb") as stream:
        for piece in pieces:
            for start in range(0, len(piece), READ_BYTES):
                wanted = piece[start : start + READ_BYTES]
                if not np.array_equal(buffer[: stream.readinto(buffer[: len(wanted)])], wanted):
                    return False
        return not stream.read(1)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the umask's permissions; safetensors makes it readable to its owner only."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def remove_old_checkpoints(
    rundir: RunDir, newest: int, keep: int, keep_best: int = 0, losses: Mapping[int, float] | None = None
) -> None:
    """Remove all complete checkpoints but the `keep` newest, and the `keep_best` with the lowest of the losses.

    Damaged ones neither count nor are removed. Older ones that cannot be read are left, too. Raises CheckpointError and
    removes nothing when `newest`, which was just written, is not complete or cannot be read.
    """
    if checkpoint_problems(rundir.checkpoint(newest), checksums=False):
        raise CheckpointError(
            f"{rundir.checkpoint(newest)} is not complete, although it was just written: no older one is removed"
        )
    complete = complete_steps(rundir, unless=(OtherVersion, StorageError))
    kept = {*complete[-keep:], *by_loss(losses or {}, complete)[:keep_best]}
    for step in complete:
        if step not in kept:
            rundir.storage.remove(step)
