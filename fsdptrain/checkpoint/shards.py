"""A rank's rows of every tensor that a checkpoint holds, and reading them, whatever number of ranks wrote it.

every rank: read the headers of its share of the files → which rows of which tensors are where (`find_pieces`)
all ranks:  exchange that ─> every rank: check that no row is missing, read its rows from the files that have them

Files are opened where they are: whole on a disk, or piece by piece in an object store.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import reprlib
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptrain.checkpoint.manifest import read_manifest
from fsdptrain.config.optimizers import StateTensor, Weight
from fsdptrain.config.schema import Optim
from fsdptrain.errors import CheckpointError, listed
from fsdptrain.model.parts import Part
from fsdptrain.model.units import first_row, part_of, trained_state, weights_of
from fsdptrain.parallel.world import World
from fsdptrain.run_folder.files import NOTHING_THERE, openable, system_errors
from fsdptrain.run_folder.storage import READ_BYTES, Location, ObjectPath

Tensors = dict[str, torch.Tensor]  # by name


Span = tuple[int, int, int]  # along a dimension: the first number here, the first in the whole tensor, and how many
Box = tuple[Span, ...]  # a span for each dimension


@dataclass(frozen=True)
class Shard:
    """What this rank has of one tensor: `local` consists of `boxes` of the whole, which has `shape`.

    A scalar is a vector of one number. `holders` are the ranks that have the same.
    """

    local: torch.Tensor
    boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    holders: tuple[int, ...] = (0,)

    @classmethod
    def of_rows(cls, local: torch.Tensor, first: int, shape: tuple[int, ...], part: Part | None = None) -> Shard:
        """Return the shard of rows first … first + len(local), of the whole or of a `part` of it."""
        box: list[Span] = [(0, first, len(local)), *((0, 0, size) for size in local.shape[1:])]
        if part is None or part.count == 1:
            return cls(local, (tuple(box),), shape)
        axis, at, boxes = len(shape) + part.dim, 0, []
        for start, stop in part.spans:
            own = range(first, first + len(local)) if axis == 0 else range(sum(b - a for a, b in part.spans))
            begin, end = max(at, own.start), min(at + stop - start, own.stop)
            if begin < end:
                box[axis] = (begin - own.start, start + begin - at, end - begin)
                boxes.append(tuple(box))
            at += stop - start
        return cls(local, tuple(boxes), shape)

    def empty(self) -> Shard:
        """Return the shard of a rank that has no number of this tensor."""
        return replace(self, local=torch.empty(0, dtype=self.local.dtype), boxes=(), holders=())

    @property
    def rows(self) -> range:
        """The rows of the whole among which all of these numbers are."""
        spans = [(first, first + count) for (_, first, count), *_ in self.boxes]
        return range(min((first for first, _ in spans), default=0), max((stop for _, stop in spans), default=0))


def shards_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, optim: Optim, world: World | None = None
) -> dict[str, Shard]:
    """Return all that a checkpoint holds: trained parameters and persistent buffers as `model.NAME`, and their state.

    The state is called `optim.NAME.KEY`; `optim` says which of its tensors are saved, and which have the numbers of the
    weights. Frozen parameters are in the files of the pretrained model. With a `world` the shards have their holders.
    """
    state, divided = trained_state(model), getattr(model, "parts", {})
    shards = {f"model.{name}": shard_of(tensor, divided.get(name), world) for name, tensor in state.items()}
    parts, weights = named_parts(optimizer), weights_of(model)
    for name, param in model.named_parameters():
        sharded = isinstance(param, DTensor) or name not in state
        assert sharded, f"{name} is not sharded: a forward without a backward left it gathered"
        own = shard_of(param, divided.get(name), world)
        for tensor in state_of(optim, weights[name], parts[name]) if name in parts else ():
            value = optimizer.state[parts[name]][tensor.key]
            if tensor.whole:
                shard = shard_of(value, None, world)
            elif tensor.shape == own.shape:  # some libraries keep a tensor flat
                shard = replace(own, local=value.view_as(own.local))
            else:
                local = value.view(len(own.local), *tensor.shape[1:])
                shard = replace(Shard.of_rows(local, own.rows.start, tensor.shape), holders=own.holders)
            shards[f"optim.{name}.{tensor.key}"] = shard
    return shards


def without_repeated(shards: dict[str, Shard], model: Any) -> dict[str, Shard]:
    """Return the shards without those that an earlier stage of a pipeline saves."""
    repeated = tuple(prefix for name in model.repeated for prefix in (f"model.{name}", f"optim.{name}."))
    return {name: shard for name, shard in shards.items() if not name.startswith(repeated)} if repeated else shards


def share_of_rank(shards: dict[str, Shard], rank: int) -> dict[str, Shard]:
    """Return those of a rank's shards that it writes: the ranks that hold the same ones share the bytes evenly."""
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    share = {}
    for name, shard in sorted(shards.items(), key=lambda item: (-item[1].local.nbytes, item[0])):
        heap = loads.setdefault(shard.holders, [(0, writer) for writer in shard.holders])
        load, writer = heap[0]
        heapq.heapreplace(heap, (load + shard.local.nbytes, writer))
        if writer == rank:
            share[name] = shard
    return share


def state_of(optim: Optim, weight: Weight, part: torch.Tensor) -> list[StateTensor]:
    """Return the tensors that an optimizer keeps for a parameter, of which it updates the rows `part`."""
    master: Any = str(part.dtype).removeprefix("torch.")
    return optim.state(weight, master)


def named_parts(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what the optimizer updates, this rank's part of each parameter, by the parameter's name."""
    groups = optimizer.param_groups
    return {name: part for group in groups for name, part in zip(group["param_names"], group["params"], strict=True)}


def shard_of(tensor: torch.Tensor, part: Part | None = None, world: World | None = None) -> Shard:
    """Return what this rank has of a tensor, all of it when it is not sharded; `part` as in `tensor_parallel`."""
    tensor, shape = tensor.detach(), tuple(part.shape if part else tensor.shape)
    shard = Shard.of_rows(torch.atleast_1d(part_of(tensor)), first_row(tensor), shape, part)
    return replace(shard, holders=world.holders_of_same(tensor, part)) if world else shard


MAX_HEADER_BYTES = 10**8  # as in the library
REQUESTS = 8  # at a time
MAX_ROWS = 2**62  # of a tensor: sums of two such numbers are an int64
PieceTable = np.ndarray[Any, np.dtype[np.int64]]  # [pieces, 4]: number of the tensor, of the file, first row, rows


def find_pieces(
    folder: Location, files: Sequence[str], shards: dict[str, Shard], share: slice = slice(None)
) -> PieceTable:
    """Return which rows of which tensors are in a share of a checkpoint's files; only their headers are read.

    Tensors have the numbers of their sorted names in `shards`, and files those of their places in `files`: both are the
    same on all ranks. Raises CheckpointError when another model wrote the checkpoint.
    """
    numbers = {name: number for number, name in enumerate(sorted(shards))}
    found = []
    for file_number, file in [*enumerate(files)][share]:
        with CheckpointReader(folder, [file]) as reader:
            if unknown := sorted(reader.shapes.keys() - shards.keys()):
                raise CheckpointError(f"{folder}: it holds {unknown[0]!r}, which the model does not have")
            for name in reader.shapes:
                reader.compare(name, shards[name])
                found += [(numbers[name], file_number, *rows) for rows in reader.rows(name)]
    return np.array(found, np.int64).reshape(-1, 4)


def load_checkpoint(folder: Location, files: Sequence[str], shards: dict[str, Shard], pieces: PieceTable) -> None:
    """Fill the shards of a run from a verified checkpoint; raises CheckpointError when another model wrote it.

    `pieces` are those of all files, as the ranks have found them. Of the files only those are opened that hold rows of
    these shards.
    """
    names, (tensor, file, start, count) = sorted(shards), pieces.T
    first, stop = (np.array([getattr(shards[name].rows, end) for name in names])[tensor] for end in ("start", "stop"))
    needed = np.unique(file[(start < stop) & (start + count > first)])
    with CheckpointReader(folder, [files[number] for number in needed]) as reader:
        for name, shard in shards.items():
            if shard.local.numel():
                reader.fill(name, shard)


class CheckpointReader:
    """A checkpoint open for reading: whole tensors or some of their rows, whichever ranks wrote them.

    Correct checksums prove that the files are as they were written, not that fsdptrain wrote them. So their metadata is
    checked. Raises CheckpointError for a file that is none of a checkpoint.
    """

    def __init__(self, folder: Location, files: Iterable[str] | None = None) -> None:
        """Open these files, or all."""
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[list[Box], Any]]] = {}  # name → [(boxes, slice of an open file)]
        with contextlib.ExitStack() as stack:
            for name in sorted(read_manifest(folder).files) if files is None else files:
                try:
                    with system_errors(folder / name):
                        self._add_file(stack.enter_context(open_tensors(folder / name)))
                except (SafetensorError, *NOTHING_THERE, ValueError, RecursionError) as error:
                    raise CheckpointError(f"{folder / name} is not a checkpoint file: {error}") from None
            self._stack = stack.pop_all()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _add_file(self, opened: Any) -> None:
        """Add the pieces in a file; raises ValueError when its metadata does not match its tensors."""
        places = json.loads((opened.metadata() or {}).get("places", "null"))
        if not isinstance(places, dict) or places.keys() != set(opened.keys()):
            raise ValueError("its `places` do not match its tensors")
        for name, place in places.items():
            slices = opened.get_slice(name)
            found = slices.get_shape()
            try:
                shape, boxes = place
                valid = _is_place(found, shape, boxes)
            except (TypeError, ValueError):
                valid = False
            if not valid:
                raise ValueError(f"{name!r} has shape {found}, its place says {reprlib.repr(place)}")
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(
                    f"{name!r} has shape {self.shapes[name]} in another file, {reprlib.repr(shape)} in this one"
                )
            self._pieces.setdefault(name, []).append((boxes, slices))

    def rows(self, name: str) -> list[tuple[int, int]]:
        """Return the first row and the number of rows of each box of a tensor in the open files."""
        return [(box[0][1], box[0][2]) for boxes, _ in self._pieces[name] for box in boxes]

    def compare(self, name: str, shard: Shard) -> None:
        """Raise CheckpointError when a tensor is missing, or has another shape or dtype than a shard of the model."""
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder}: {name}, which the model needs, is missing")
        if self.shapes[name] != shard.shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {self.shapes[name]}, the model needs {shard.shape}")
        for dtype in {slices[:0].dtype for _, slices in self._pieces[name]} - {shard.local.dtype}:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}, the model needs {shard.local.dtype}")

    def fill(self, name: str, shard: Shard) -> None:
        """Copy into a shard the numbers in the files that overlap it; raises what `compare` raises.

        Raises CheckpointError as well unless the files hold each of its numbers once.
        """
        self.compare(name, shard)
        copied: list[Box] = []
        for boxes, slices in self._pieces[name]:
            for stored, own in itertools.product(boxes, shard.boxes):
                if common := _common(stored, own):
                    rows, *others = _slices(stored, common)
                    shard.local[_slices(own, common)].copy_(slices[rows][(slice(None), *others)])
                    copied.append(common)
        if _volume(copied) != shard.local.numel() or not _are_apart(copied):
            found = [box for boxes, _ in self._pieces[name] for box in boxes]
            raise CheckpointError(
                f"{self.folder}: of {name!r}, which has shape {list(shard.shape)}, the model needs "
                f"{listed(map(_text, shard.boxes), 2)}, the files hold {listed(map(_text, sorted(found, key=_firsts)))}"
            )

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor in host memory; raises CheckpointError unless it has the shape and dtype of `like`."""
        tensor = torch.empty_like(like, device="cpu")
        self.fill(name, shard_of(tensor))
        return tensor


def _is_place(found: list[int], shape: Any, boxes: Any) -> bool:
    """Return whether a tensor of shape `found` consists of these boxes of one of `shape`; raises for other types."""
    whole = shape or [1]
    if not all(
        type(n) is int and 0 <= n < MAX_ROWS for n in [*shape, *(n for box in boxes for span in box for n in span)]
    ):
        return False
    inside = (
        at + count <= here and first + count <= there
        for box in boxes
        for here, there, (at, first, count) in zip(found, whole, box, strict=True)
    )
    return bool(found) and all(inside) and _volume(boxes) == math.prod(found) and _are_apart(boxes)


def _common(a: Box, b: Box) -> Box | None:
    """Return what two boxes of a tensor have in common, with 0 as the first number here; None if nothing."""
    spans = []
    for (_, first, count), (_, other, others) in zip(a, b, strict=True):
        begin, end = max(first, other), min(first + count, other + others)
        if begin >= end:
            return None
        spans.append((0, begin, end - begin))
    return tuple(spans)


def _slices(box: Box, part: Box) -> tuple[slice, ...]:
    """Return where a part of a box is in the tensor that consists of boxes."""
    starts = (at + first - begin for (at, begin, _), (_, first, _) in zip(box, part, strict=True))
    return tuple(slice(start, start + count) for start, (*_, count) in zip(starts, part, strict=True))


def _volume(boxes: Iterable[Box]) -> int:
    return sum(math.prod(count for *_, count in box) for box in boxes)


def _are_apart(boxes: Iterable[Box]) -> bool:
    """Return whether boxes have no number in common; the columns of any two must be the same, or apart."""
    rows: dict[Any, list[tuple[int, int]]] = {}
    for (_, first, count), *others in boxes:
        rows.setdefault(tuple((start, size) for _, start, size in others), []).append((first, first + count))
    columns = [tuple((0, *span) for span in spans) for spans in rows]
    if any(_common(a, b) for a, b in itertools.combinations(columns, 2)):
        return False
    return all(end <= begin for spans in rows.values() for (_, end), (begin, _) in itertools.pairwise(sorted(spans)))


def _firsts(box: Box) -> list[int]:
    return [first for _, first, _ in box]


def _text(box: Box) -> str:
    """Return a box as Python writes slices: `[0:8, 32:64]`."""
    return f"[{', '.join(f'{first}:{first + count}' for _, first, count in box)}]"


def open_tensors(path: Location) -> contextlib.AbstractContextManager[Any]:
    """Open a safetensors file as `safe_open` does; raises ValueError for a wrong header in a store."""
    return RemoteTensors(path) if isinstance(path, ObjectPath) else safe_open(openable(path), framework="pt")


class RemoteTensors:
    """A safetensors file in an object store, like `safe_open`: only the requested rows are read."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, size = path, path.stat().st_size
        length = path.read(0, 8) if size > 8 else b""
        header_bytes = int.from_bytes(length, "little")
        if not 0 < header_bytes <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"it has {size:,} bytes, and a header of {header_bytes:,}")
        text = path.read(8, 8 + header_bytes)
        # The library checks the header, and knows shapes and dtypes, of a file that has it and holes for the tensors.
        with tempfile.NamedTemporaryFile() as holes:
            holes.write(length + text)
            holes.truncate(size)
            holes.flush()
            self._opened: Any = safe_open(holes.name, framework="pt")
        header = json.loads(text)
        self._starts = {name: 8 + header_bytes + header[name]["data_offsets"][0] for name in self.keys()}

    def __enter__(self) -> RemoteTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:  # `metadata` and `keys` are of the header
        return getattr(self._opened, name)

    def get_slice(self, name: str) -> RemoteRows:
        """Return a tensor of which rows can be read."""
        return RemoteRows(self._path, self._opened.get_slice(name), self._starts[name])


class RemoteRows:
    """A tensor in an object store; `rows[a:b]` reads its rows from a to b."""

    def __init__(self, path: ObjectPath, holes: Any, start: int) -> None:
        self._path, self._holes, self._start = path, holes, start

    def __getattr__(self, name: str) -> Any:  # `get_shape` and `get_dtype` are of the header
        return getattr(self._holes, name)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        empty = self._holes[:0]
        first, last, _ = rows.indices(self.get_shape()[0])
        row_bytes = math.prod(empty.shape[1:]) * empty.element_size()
        if last <= first or not row_bytes:
            return empty if last <= first else empty.new_empty(last - first, *empty.shape[1:])
        begin, content = self._start + first * row_bytes, bytearray((last - first) * row_bytes)

        def fetch(at: int) -> None:
            stop = min(at + READ_BYTES, len(content))
            piece = self._path.read(begin + at, begin + stop)
            if len(piece) != stop - at:
                raise CheckpointError(f"{self._path}: {len(piece)} bytes were read instead of {stop - at}")
            content[at:stop] = piece

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(fetch, range(0, len(content), READ_BYTES)))
        return torch.frombuffer(content, dtype=empty.dtype).view(last - first, *empty.shape[1:])
