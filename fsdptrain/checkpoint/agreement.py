"""What must be equal on all nodes of a run: compared before it trains, and by `validate --here`. No torch."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fsdptrain.checkpoint.disk import existing_parent
from fsdptrain.errors import DataError, FsdptrainError, RecipeError
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.storage import URL


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
