"""Read a checkpoint, independent of the number of ranks that wrote it.

every rank: read the headers of its share of the files → which rows of which tensors are where (`find_pieces`)
all ranks:  exchange that ─> every rank: check that no row is missing, read its rows from the files that have them
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from fsdptrain.attempts.manifest import read_manifest
from fsdptrain.checkpoint.shards import Shard, shard_of
from fsdptrain.checkpoint.stored import open_tensors
from fsdptrain.errors import CheckpointError, listed
from fsdptrain.folder.files import NOTHING_THERE, system_errors
from fsdptrain.folder.storage import Location

MAX_ROWS = 2**62  # of a tensor: sums of two such numbers are an int64


PieceTable = np.ndarray[Any, np.dtype[np.int64]]  # [pieces, 4]: number of the tensor, of the file, first row, rows


def find_pieces(folder: Location, shards: dict[str, Shard], share: slice = slice(None)) -> PieceTable:
    """Return which rows of which tensors are in a share of a checkpoint's files; only their headers are read.

    Tensors have the numbers of their sorted names in `shards`, which are the same on all ranks, and files those of
    their sorted names. Raises CheckpointError when another model wrote the checkpoint.
    """
    numbers = {name: number for number, name in enumerate(sorted(shards))}
    found = []
    for file_number, file in [*enumerate(sorted(read_manifest(folder).files))][share]:
        with StoredCheckpoint(folder, [file]) as stored:
            if unknown := sorted(stored.shapes.keys() - shards.keys()):
                raise CheckpointError(f"{folder}: it holds {unknown[0]!r}, which the model does not have")
            for name in stored.shapes:
                stored.compare(name, shards[name])
                found += [(numbers[name], file_number, *span) for span in stored.spans(name)]
    return np.array(found, np.int64).reshape(-1, 4)


def load_checkpoint(folder: Location, shards: dict[str, Shard], pieces: PieceTable | None = None) -> None:
    """Fill the shards of a run from a verified checkpoint; raises CheckpointError when another model wrote it.

    `pieces` are those of all files, as the ranks have found them; without them all headers are read. Of the files only
    those are opened that hold rows of these shards.
    """
    pieces = find_pieces(folder, shards) if pieces is None else pieces
    pieces = pieces[np.lexsort((pieces[:, 2], pieces[:, 0]))]  # by tensor, then by row
    bounds = np.searchsorted(pieces[:, 0], range(len(shards) + 1))
    needed: set[int] = set()
    for number, name in enumerate(sorted(shards)):
        _, files, starts, counts = pieces[bounds[number] : bounds[number + 1]].T
        shard, ends = shards[name], starts + counts
        if not len(files):
            raise missing(folder, name)
        _reject_gaps(folder, name, shard.shape, starts.tolist(), ends.tolist())
        overlap = (starts < shard.first + len(shard.local)) & (ends > shard.first)
        needed.update(files[overlap].tolist())
    names = sorted(read_manifest(folder).files)
    with StoredCheckpoint(folder, [names[number] for number in sorted(needed)]) as stored:
        for name, shard in shards.items():
            if len(shard.local):
                stored.fill(name, shard)


class StoredCheckpoint:
    """A checkpoint open for reading: whole tensors or some of their rows, whichever ranks wrote them.

    Correct checksums prove that the files are as they were written, not that fsdptrain wrote them. So their metadata is
    checked. Raises CheckpointError when the pieces are not complete tensors.
    """

    def __init__(self, folder: Location, files: Iterable[str] | None = None) -> None:
        """Open these files, whose pieces need not be complete tensors, or all."""
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, Any]]] = {}  # name → [(first row, slice of an open file)]
        with contextlib.ExitStack() as stack:
            for name in sorted(read_manifest(folder).files) if files is None else files:
                try:
                    with system_errors(folder / name):
                        self._add_file(stack.enter_context(open_tensors(folder / name)))
                except (SafetensorError, *NOTHING_THERE, ValueError, RecursionError) as error:
                    raise CheckpointError(f"{folder / name} is not a checkpoint file: {error}") from None
            for name, shape in self.shapes.items() if files is None else ():
                spans = sorted(self.spans(name))
                _reject_gaps(folder, name, shape, [first for first, _ in spans], [sum(span) for span in spans])
                self._reject_several_dtypes(name)
            self._stack = stack.pop_all()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _add_file(self, opened: Any) -> None:
        """Add the pieces in a file; raises ValueError when its metadata does not match its tensors."""
        places = json.loads((opened.metadata() or {}).get("places", "null"))
        if not isinstance(places, dict) or places.keys() != set(opened.keys()):
            raise ValueError("its `places` do not match its tensors")
        for name, place in places.items():
            if (
                not isinstance(place, list)
                or not place
                or any(type(n) is not int or not 0 <= n < MAX_ROWS for n in place)
            ):
                raise ValueError(f"{name!r} has an invalid place: {reprlib.repr(place)}")
            (first, *shape), rows = place, opened.get_slice(name)
            if not rows.get_shape() or rows.get_shape()[1:] != shape[1:]:
                raise ValueError(f"{name!r} has shape {rows.get_shape()}, its place says {reprlib.repr(shape)}")
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(
                    f"{name!r} has shape {self.shapes[name]} in another file, {reprlib.repr(shape)} in this one"
                )
            self._pieces.setdefault(name, []).append((first, rows))

    def _reject_several_dtypes(self, name: str) -> None:
        dtypes = {rows.get_dtype() for _, rows in self._pieces[name]}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.folder}: {name!r} has several dtypes: {', '.join(sorted(dtypes))}")

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Return the first row and the number of rows of each piece of a tensor in the open files."""
        return [(first, math.prod(rows.get_shape()[:1])) for first, rows in self._pieces[name]]

    def compare(self, name: str, shard: Shard) -> None:
        """Raise CheckpointError when a tensor is missing, or has another shape or dtype than a shard of the model."""
        if name not in self.shapes:
            raise missing(self.folder, name)
        if self.shapes[name] != shard.shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {self.shapes[name]}, the model needs {shard.shape}")
        for dtype in {rows[:0].dtype for _, rows in self._pieces[name]} - {shard.local.dtype}:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}, the model needs {shard.local.dtype}")

    def fill(self, name: str, shard: Shard) -> None:
        """Copy into a shard the stored rows that overlap it; raises what `compare` raises."""
        self.compare(name, shard)
        wanted = range(shard.first, shard.first + len(shard.local))
        for first, rows in self._pieces[name]:
            begin, end = max(first, wanted.start), min(first + rows.get_shape()[0], wanted.stop)
            if begin < end:
                shard.local[begin - wanted.start : end - wanted.start].copy_(rows[begin - first : end - first])

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor in host memory; raises CheckpointError unless it has the shape and dtype of `like`."""
        tensor = torch.empty_like(like, device="cpu")
        self.fill(name, shard_of(tensor))
        return tensor


def missing(folder: Location, name: str) -> CheckpointError:
    """Return the error for a tensor that no file of a checkpoint holds."""
    return CheckpointError(f"{folder}: {name}, which the model needs, is missing")


def _reject_gaps(folder: Location, name: str, shape: tuple[int, ...], starts: list[int], ends: list[int]) -> None:
    """Raise CheckpointError unless pieces, in the order of their rows, cover a tensor without gap or overlap."""
    row_count = math.prod(shape[:1])
    if starts != [0, *ends[:-1]] or ends[-1] != row_count:
        spans = listed(f"{start} to {end}" for start, end in zip(starts, ends, strict=True))
        raise CheckpointError(f"{folder}: {name!r} has {row_count} rows, the files hold {spans}")
