"""What a run needs of its nodes: space on the disk and in memory, and what must be equal on all of them. No torch."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fsdptrain.config.optimizers import BYTES, Weight
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import CheckpointError, DataError, FsdptrainError, RecipeError, is_disk_full
from fsdptrain.plan.limits import available_memory
from fsdptrain.plan.plan import Counts, Plan
from fsdptrain.run_folder.storage import URL, ObjectPath
from fsdptrain.text import counted, size


def disk_space(plan: Plan, weights: Collection[Weight], steps: int | None) -> dict[str, Any]:
    """Return the bytes that checkpoints and export need on the disk of output_dir, and the bytes free there.

    A checkpoint holds trained master weights and optimizer state. While one is written there is one more than is kept
    (`checkpoint.keep` and `checkpoint.keep_best` together).
    Checkpoints of an earlier run count as space, because they will be replaced. Prepared data is in the cache already.
    Of checkpoints in an object store, only the files of one that are being uploaded are on the disk.
    """
    recipe, rundir = plan.recipe, plan.rundir
    keep = recipe.checkpoint
    count = keep.keep + (keep.keep_best or 0) + 1
    if steps is not None:
        count = min(count, 1 + sum((steps - 1) // every for every in intervals_of_saves(recipe)))
    checkpoint = plan.state_bytes(weights)
    export = export_bytes(recipe, Counts.of(weights)) if recipe.export.at_end else 0
    storage, on_disk, held = rundir.storage, checkpoint, 0
    if not isinstance(rundir.checkpoint_place, ObjectPath):
        on_disk = checkpoint * count
        held = sum(storage.size_of(step)[0] for step in storage.steps())
    return {
        "checkpoint_bytes": checkpoint,
        "checkpoints": count,
        "export_bytes": export,
        "needed_bytes": max(0, on_disk - held) + export,
        "free_bytes": shutil.disk_usage(existing_parent(storage.folder)).free,
    }


def intervals_of_saves(recipe: Recipe) -> list[int]:
    """Return after how many steps, each, a checkpoint may be saved while a run goes on."""
    every = [recipe.checkpoint.every, recipe.eval.every if recipe.checkpoint.keep_best else None]
    return [steps for steps in every if steps]


def export_bytes(recipe: Recipe, counts: Counts) -> int:
    """Return the bytes of an export: of the model, of the adapter alone, or of both."""
    model = (counts.all - counts.adapters) * (4 if recipe.export.dtype == "float32" else 2)
    adapter = counts.trained * BYTES[recipe.model.dtype]
    kind = recipe.export.adapter if recipe.adapter.kind else "merged"
    return {"separate": adapter, "merged": model, "both": model + adapter}[kind]


def disk_problems(plan: Plan, space: dict[str, Any]) -> Iterator[FsdptrainError]:
    """Yield an error when there is too little space, with what needs it."""
    if space["free_bytes"] < space["needed_bytes"]:
        way_out = "lower checkpoint.keep, or set output_dir to another disk"
        yield CheckpointError(
            f"output_dir: no space: needs {size(space['needed_bytes'])}, has {size(space['free_bytes'])} on the disk "
            f"of {plan.run_dir} ({_breakdown(space)}): {way_out}"
        )


def host_space(plan: Plan, weights: Collection[Weight], steps: int | None, activations: int = 0) -> dict[str, int]:
    """Return the bytes of a node's memory that its ranks and the copy of a checkpoint need, and those available.

    While a thread writes a checkpoint it holds a copy. What is in host memory is copied only if steps go on meanwhile.
    `activations` are the bytes that a rank's layers keep there.
    """
    recipe, topology = plan.recipe, plan.topology
    of_node = plan.state_bytes(weights) * topology.nproc_per_node // topology.world_size
    in_host = plan.host_state_bytes(weights) * topology.nproc_per_node
    saves = any(steps is None or every < steps for every in intervals_of_saves(recipe))
    goes_on = recipe.checkpoint.async_ and saves
    return {
        "state_bytes": in_host,
        "copy_bytes": of_node if goes_on or not in_host else 0,
        "activation_bytes": activations * topology.nproc_per_node,
        "available_bytes": available_memory(),
    }


def host_problems(space: dict[str, int]) -> Iterator[FsdptrainError]:
    """Yield an error when a node has too little memory: the kernel would kill a worker at a checkpoint or before."""
    if space["available_bytes"] < sum(_host_parts(space).values()):
        no_copy = "set checkpoint.async=false, " if space["state_bytes"] and space["copy_bytes"] else ""
        no_copy += "remove offload from fsdp.activation_checkpointing, " if space["activation_bytes"] else ""
        yield CheckpointError(
            f"checkpoint: no space in the memory of this node: {host_summary(space)}: {no_copy}use more nodes, or "
            "train fewer parameters"
        )


def host_summary(space: dict[str, int]) -> str:
    """Return the space in host memory in one line."""
    parts = _host_parts(space)
    needs = " and ".join(f"{what} of {size(needed)}" for what, needed in parts.items() if needed)
    return f"{size(sum(parts.values()))} needed ({needs}), {size(space['available_bytes'])} available"


def _host_parts(space: dict[str, int]) -> dict[str, int]:
    return {
        "parameters, gradients and optimizer state": space["state_bytes"],
        "the copy of a checkpoint": space["copy_bytes"],
        "what layers keep": space["activation_bytes"],
    }


def disk_summary(space: dict[str, Any]) -> str:
    """Return the space in one line."""
    return f"{size(space['needed_bytes'])} needed ({_breakdown(space)}), {size(space['free_bytes'])} free"


def _breakdown(space: dict[str, Any]) -> str:
    checkpoints = f"{counted(space['checkpoints'], 'checkpoint')} of {size(space['checkpoint_bytes'])}"
    return f"at most {checkpoints} at a time, an export of {size(space['export_bytes'])}"


def existing_parent(path: Path) -> Path:
    """Return the nearest folder on the way up from `path` that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_space(scratch: Path, needed: int) -> None:
    """Raise CheckpointError when the disk of an empty folder has less than `needed` bytes free."""
    needed += needed // 100  # for headers and the file system's own data
    if _available_bytes(scratch) < needed:
        raise CheckpointError(f"no space: needs {size(needed)}, has {size(_available_bytes(scratch))}")


def _available_bytes(scratch: Path) -> int:
    """Return the bytes available to the files in `scratch`: those free, and those they already take."""
    return shutil.disk_usage(scratch.parent).free + sum(path.stat().st_size for path in scratch.glob("*"))


@contextlib.contextmanager
def report_full_disk(scratch: Path, needed: int) -> Iterator[None]:
    """Raise CheckpointError with the bytes needed and available when the disk fills up inside."""
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            has = size(_available_bytes(scratch))
            raise CheckpointError(f"no space: needs {size(needed)}, has {has} ({error})") from error
        raise


class Agreed(NamedTuple):
    """Something that must be equal on all nodes: its word in a table, the error if it is not, and the way out."""

    word: str
    error: type[FsdptrainError]
    way_out: str


PLAN = Agreed(
    "plan", RecipeError,
    "start the same command with the same recipe and the same versions, in the same folder, on all nodes",
)  # fmt: skip
FILES = "copy the same files to all nodes, or put them on a file system that all nodes share"
DATA = Agreed("data", DataError, FILES)
MODEL = Agreed("model", RecipeError, FILES)
GPUS = Agreed("GPUs", RecipeError, "use nodes with the same GPUs")
FOLDER = Agreed(
    "output_dir", RecipeError,
    "set it to a folder on a file system that all nodes share, or use an object store as checkpoint.path",
)  # fmt: skip

SHARED_S = 10.0  # until a host sees a file that another has written: network file systems cache folders


def shared_folder(plan: Plan) -> tuple[str, Path] | None:
    """Return the folder that all nodes must share, with its key: None if there is one node, or an object store.

    Each node would keep its part of every checkpoint there: no resume could read them.
    """
    place = plan.rundir.checkpoint_path
    if plan.topology.nnodes == 1 or (place and URL.fullmatch(place)):
        return None
    return ("checkpoint.path", Path(place)) if place else ("output_dir", Path(plan.run_dir))


@contextlib.contextmanager
def file_to_see(folder: Path) -> Iterator[str]:
    """Yield a file that is for a moment in a folder, or in the nearest above it that exists; empty if that fails.

    It has a new name, which no node has cached as absent.
    """
    with contextlib.ExitStack() as stack:
        name = ""
        with contextlib.suppress(OSError):  # other checks report a folder that cannot be written
            parent = existing_parent(folder)
            name = stack.enter_context(tempfile.NamedTemporaryFile(dir=parent, prefix=".fsdptrain-")).name
        yield name


def sees(name: str) -> bool:
    """Return whether this node sees a file of `file_to_see` on another one, at the latest after SHARED_S."""
    deadline = time.monotonic() + SHARED_S
    while not (found := not name or Path(name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
