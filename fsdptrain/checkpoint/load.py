"""Read a checkpoint back, whatever ranks wrote it."""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fsdptrain.checkpoint.manifest import read_manifest
from fsdptrain.checkpoint.shards import Shard, shard_of
from fsdptrain.errors import CheckpointError


def load_checkpoint(folder: Path, shards: dict[str, Shard]) -> None:
    """Fill the shards of a run from a verified checkpoint; raises CheckpointError when it is of another model."""
    with StoredCheckpoint(folder) as stored:
        unknown = sorted(stored.shapes.keys() - shards.keys())
        if unknown:
            raise CheckpointError(f"{folder}: the model has no {unknown[0]!r}")
        for name, shard in shards.items():
            stored.fill(name, shard)


class StoredCheckpoint:
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
                    self._add_file(stack.enter_context(safe_open(folder / name, framework="pt")))
                except (SafetensorError, OSError, ValueError, RecursionError) as error:
                    raise CheckpointError(f"{folder / name} is not a file of a checkpoint: {error}") from None
            for name in self.shapes:
                self._reject_gaps(name)
            self._stack = stack.pop_all()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _add_file(self, opened: Any) -> None:
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

    def _reject_gaps(self, name: str) -> None:
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
