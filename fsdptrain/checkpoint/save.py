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
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fsdptrain.checkpoint.disk import prepare_scratch, reject_existing, report_full_disk
from fsdptrain.checkpoint.load import load_checkpoint
from fsdptrain.checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    checkpoint_problems,
    complete_steps,
    file_entry,
    fsync,
    newest_manifest,
    resume_problems,
    set_damaged_aside,
)
from fsdptrain.checkpoint.shards import Shard, shards_of
from fsdptrain.config.plan import Plan
from fsdptrain.errors import CheckpointError, OtherVersion, RecipeError
from fsdptrain.ownership import remove_checkpoint
from fsdptrain.parallel.world import World
from fsdptrain.rundir import RunDir

WriteEvent = Callable[..., None]  # (event, its fields): where events are written


class Checkpointer:
    """Writes and reads the checkpoints of one run; every method is called by every rank."""

    def __init__(
        self, rundir: RunDir, plan: Plan, world: World, content: dict[str, str], write_event: WriteEvent
    ) -> None:
        """`content` names what the recipe's words stand for: digests of the data and of the tokenizer."""
        self.rundir, self.plan, self.world, self.write_event = rundir, plan, world, write_event
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
        mine = self._shards(model, optimizer) if self.world.writes else {}
        if self.world.rank != 0:  # plain tensors (buffers) are equal everywhere: rank 0's are written
            mine = {name: shard for name, shard in mine.items() if not shard.is_whole}
        staged = self._copy_to_host(mine, wait)
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

    def _copy_to_host(self, shards: dict[str, Shard], wait: bool) -> dict[str, Shard]:
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
            self._on_rank_zero("remove old checkpoints", partial(remove_old_checkpoints, self.rundir, step, keep))
            facts = {"step": step, "path": str(target), "bytes": size}
            facts |= {"seconds": time.monotonic() - started, "blocked_s": blocked_s}
            self._on_rank_zero(f"report {target}", partial(self.write_event, "save", **facts))
        except BaseException as error:
            self._error = error  # for the training thread, which raises it in its next wait()

    def _write(self, step: int, staged: dict[str, Shard], target: Path) -> int:
        """Write and commit a checkpoint; its size in bytes. When any rank fails, nothing is left of it."""
        scratch = target.with_name(target.name + ".tmp")
        saving = f"save {target}"
        try:
            needed = sum(self._all_gather(sum(shard.local.nbytes for shard in staged.values())))
            told = report_full_disk(scratch, needed)  # around whatever writes
            self._on_rank_zero(saving, told(partial(prepare_scratch, scratch, target, needed)))
            entry = self._on_every_rank(
                saving, told(partial(write_shards, scratch / shard_name(self.world.rank), staged))
            )
            files = dict(filter(None, self._all_gather(entry)))
            self._on_rank_zero(saving, told(partial(self._publish, step, scratch, target, files)))
        except BaseException:
            if self.world.rank == 0:
                with contextlib.suppress(OSError):
                    remove_checkpoint(scratch)
            raise
        return sum(facts["bytes"] for facts in files.values())

    def _publish(self, step: int, scratch: Path, target: Path, files: dict[str, Any]) -> None:
        Manifest(FORMAT_VERSION, step, self.world.size, self.plan.digest(), self.identity, files).write(scratch)
        fsync(scratch)
        reject_existing(target)  # an empty folder would be replaced without a word
        scratch.rename(target)
        fsync(target.parent)

    def _all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.world.side)
        return values

    def _on_rank_zero(self, doing: str, work: Callable[[], Any]) -> None:
        """Rank 0 does the work; if it fails, raise one CheckpointError on all."""
        self._on_every_rank(doing, lambda: work() if self.world.rank == 0 else None)

    def _on_every_rank(self, doing: str, work: Callable[[], Any]) -> Any:
        """Do the work on this rank; if it failed on any, raise one CheckpointError on all."""
        result, failure = None, None
        try:
            result = work()
        except (OSError, CheckpointError) as error:
            failure = str(error)
        except BaseException as error:  # of any class (a panic in Rust is no Exception): the others wait for us
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        self.raise_on_every_rank(failure and f"cannot {doing}: rank {self.world.rank}: {failure}")
        return result

    def raise_on_every_rank(self, failure: object) -> None:
        """Raise one CheckpointError on every rank when any rank brings a failure; collective."""
        failures = [text for text in self._all_gather(str(failure) if failure else None) if text]
        if failures:
            raise CheckpointError(failures[0])

    def newest_step(self) -> int:
        """The step of the newest checkpoint as rank 0 sees it, valid or not; 0 where there is none.

        Raises CheckpointError where there are only damaged ones: starting over would not be going on.
        """
        newest = int(self._all_gather(max(self.rundir.checkpoint_steps(), default=0))[0])
        spoilt = sorted(path.name for path in self.rundir.checkpoints.glob("step-*.damaged*"))
        self.raise_on_every_rank(
            None if newest or not spoilt else f"only damaged checkpoints are left: {', '.join(spoilt)}"
        )
        return newest

    def reject_another_run(self) -> None:
        """Raise RecipeError when the checkpoints here are of other data or another tokenizer under the same names."""
        manifest = newest_manifest(self.rundir)
        problems = resume_problems(manifest.identity, self.identity) if manifest else []
        if any(self._all_gather(bool(problems))):
            raise RecipeError(problems or "another rank sees another run to resume")

    def _shards(self, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Shard]:
        return shards_of(model, optimizer, self.plan.recipe.optim.name)

    def load_newest(self, model: Any, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest valid checkpoint into an allocated model and a started optimizer; its step, or 0.

        A damaged checkpoint is named and set aside, and the one before it is taken. Raises CheckpointError when there
        are checkpoints and none is valid, or when another version of fsdptrain wrote the newest.
        """
        steps = self._all_gather(self.rundir.checkpoint_steps())[0]
        for step in reversed(steps):
            folder = self.rundir.checkpoint(step)
            problems = self._verify(folder)
            if not problems:
                self._on_every_rank(f"load {folder}", partial(load_checkpoint, folder, self._shards(model, optimizer)))
                return int(step)
            self._on_rank_zero(f"set {folder} aside", partial(self._set_aside, folder, problems))
        if steps:
            raise CheckpointError(f"no valid checkpoint is left in {self.rundir.checkpoints}: all were damaged")
        return 0

    def _set_aside(self, folder: Path, problems: list[str]) -> None:
        self.write_event("set_aside", path=str(set_damaged_aside(folder)), problems=problems)

    def _verify(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint: every rank reads its share of the files.

        Raises CheckpointError on every rank when the checkpoint is of another version.
        """
        mine, refusal = [], None
        try:
            mine = checkpoint_problems(folder, slice(self.world.rank, None, self.world.size))
        except OtherVersion as error:
            refusal = error
        self.raise_on_every_rank(refusal)
        return sorted({problem for found in self._all_gather(mine) for problem in found})


def shard_name(rank: int) -> str:
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


def remove_old_checkpoints(rundir: RunDir, newest: int, keep: int) -> None:
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
