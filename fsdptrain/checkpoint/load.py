"""Read a checkpoint, independent of the number of ranks that wrote it."""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from typing import Any

import torch
from safetensors import SafetensorError

from fsdptrain.checkpoint.manifest import read_manifest
from fsdptrain.checkpoint.shards import Shard, shard_of
from fsdptrain.checkpoint.stored import open_tensors
from fsdptrain.errors import CheckpointError
from fsdptrain.files import NOTHING_THERE, system_errors
from fsdptrain.storage import Location


def load_checkpoint(folder: Location, shards: dict[str, Shard]) -> None:
    """Fill the shards of a run from a verified checkpoint; raises CheckpointError when another model wrote it."""
    with StoredCheckpoint(folder) as stored:
        unknown = sorted(stored.shapes.keys() - shards.keys())
        if unknown:
            raise CheckpointError(f"{folder}: it holds {unknown[0]!r}, which the model does not have")
        for name, shard in shards.items():
            stored.fill(name, shard)


class StoredCheckpoint:
    """A checkpoint open for reading: whole tensors or some of their rows, whichever ranks wrote them.

    Correct checksums prove that the files are as they were written, not that fsdptrain wrote them. So their metadata is
    checked. Raises CheckpointError when the pieces are not complete tensors.
    """

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, Any]]] = {}  # name → [(first row, slice of an open file)]
        with contextlib.ExitStack() as stack:
            for name in sorted(read_manifest(folder).files):
                try:
                    with system_errors(folder / name):
                        self._add_file(stack.enter_context(open_tensors(folder / name)))
                except (SafetensorError, *NOTHING_THERE, ValueError, RecursionError) as error:
                    raise CheckpointError(f"{folder / name} is not a checkpoint file: {error}") from None
            for name in self.shapes:
                self._reject_gaps(name)
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
            if not isinstance(place, list) or not place or any(type(n) is not int or n < 0 for n in place):
                raise ValueError(f"{name!r} has an invalid place: {reprlib.repr(place)}")
            (first, *shape), rows = place, opened.get_slice(name)
            if not rows.get_shape() or rows.get_shape()[1:] != shape[1:]:
                raise ValueError(f"{name!r} has shape {rows.get_shape()}, its place says {reprlib.repr(shape)}")
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(
                    f"{name!r} has shape {self.shapes[name]} in another file, {reprlib.repr(shape)} in this one"
                )
            self._pieces.setdefault(name, []).append((first, rows))

    def _reject_gaps(self, name: str) -> None:
        """Raise CheckpointError unless a tensor's pieces have one dtype and cover its rows without gap or overlap."""
        pieces = sorted(self._pieces[name], key=lambda piece: piece[0])
        starts = [first for first, _ in pieces]
        ends = [first + math.prod(rows.get_shape()[:1]) for first, rows in pieces]
        row_count = math.prod(self.shapes[name][:1])
        if starts != [0, *ends[:-1]] or ends[-1] != row_count:
            spans = ", ".join(f"{start} to {end}" for start, end in zip(starts, ends, strict=True))
            raise CheckpointError(f"{self.folder}: {name!r} has {row_count} rows, the files hold {spans}")
        dtypes = {rows.get_dtype() for _, rows in pieces}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.folder}: {name!r} has several dtypes: {', '.join(sorted(dtypes))}")

    def fill(self, name: str, shard: Shard) -> None:
        """Copy into a shard the stored rows that overlap it.

        Raises CheckpointError when the tensor is missing, or has another shape or dtype.
        """
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder}: {name}, which the model needs, is missing")
        if self.shapes[name] != shard.shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {self.shapes[name]}, the model needs {shard.shape}")
        dtype = self._pieces[name][0][1][:0].dtype
        if dtype != shard.local.dtype:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}, the model needs {shard.local.dtype}")
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
