"""A rank's rows of every tensor that a checkpoint holds, and reading them, whatever number of ranks wrote it.

every rank: read the headers of its share of the files → which rows of which tensors are where (`find_pieces`)
all ranks:  exchange that ─> every rank: check that no row is missing, read its rows from the files that have them

Files are opened where they are: whole on a disk, or piece by piece in an object store.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import reprlib
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from fsdptrain.model.units import trained_state, weights_of
from fsdptrain.parallel.world import first_row
from fsdptrain.run_folder.files import NOTHING_THERE, openable, system_errors
from fsdptrain.run_folder.storage import READ_BYTES, Location, ObjectPath

Tensors = dict[str, torch.Tensor]  # by name


@dataclass(frozen=True)
class Shard:
    """This rank's rows of one tensor: `local` holds rows first … first + len(local) of `shape`; a scalar is one row."""

    local: torch.Tensor
    first: int
    shape: tuple[int, ...]


def shards_of(model: nn.Module, optimizer: torch.optim.Optimizer, optim: Optim) -> dict[str, Shard]:
    """Return all that a checkpoint holds: trained parameters and persistent buffers as `model.NAME`, and their state.

    The state is called `optim.NAME.KEY`; `optim` says which of its tensors are saved, and which have the rows of the
    weights. Frozen parameters are in the files of the pretrained model.
    """
    state = trained_state(model)
    shards = {f"model.{name}": shard_of(tensor) for name, tensor in state.items()}
    parts, weights = named_parts(optimizer), weights_of(model)
    for name, param in model.named_parameters():
        sharded = isinstance(param, DTensor) or name not in state
        assert sharded, f"{name} is not sharded: a forward without a backward left it gathered"
        rows = shard_of(param)
        for tensor in state_of(optim, weights[name], parts[name]) if name in parts else ():
            value = optimizer.state[parts[name]][tensor.key]
            if tensor.whole:
                shard = Shard(value, 0, tensor.shape)
            else:  # some libraries keep a tensor flat
                shard = Shard(value.view(len(rows.local), *tensor.shape[1:]), rows.first, tensor.shape)
            shards[f"optim.{name}.{tensor.key}"] = shard
    return shards


def share_of_copy(shards: dict[str, Shard], copy: int, copies: int, writes_whole: bool) -> dict[str, Shard]:
    """Return those of a rank's shards that it writes: `copies` ranks hold the same ones, and share the bytes evenly.

    `copy` is its number among these. Whole tensors (buffers, single rows) are equal on the ranks of one copy too, so
    only those with `writes_whole` write them.
    """
    loads, share = [(0, number) for number in range(copies)], {}
    for name, shard in sorted(shards.items(), key=lambda item: (-item[1].local.nbytes, item[0])):
        if shard.local.numel() == math.prod(shard.shape) and not writes_whole:
            continue
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + shard.local.nbytes, writer))
        if writer == copy:
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


def shard_of(tensor: torch.Tensor) -> Shard:
    """Return the local rows of a tensor, which are all of them when it is not sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Shard(torch.atleast_1d(tensor), 0, tuple(tensor.shape))
    return Shard(tensor.to_local(), first_row(tensor), tuple(tensor.shape))


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
                found += [(numbers[name], file_number, *span) for span in reader.spans(name)]
    return np.array(found, np.int64).reshape(-1, 4)


def load_checkpoint(folder: Location, files: Sequence[str], shards: dict[str, Shard], pieces: PieceTable) -> None:
    """Fill the shards of a run from a verified checkpoint; raises CheckpointError when another model wrote it.

    `pieces` are those of all files, as the ranks have found them. Of the files only those are opened that hold rows of
    these shards.
    """
    names, (tensor, file, start, count) = sorted(shards), pieces.T
    first = np.array([shards[name].first for name in names])[tensor]
    rows = np.array([len(shards[name].local) for name in names])[tensor]
    needed = np.unique(file[(start < first + rows) & (start + count > first)])
    with CheckpointReader(folder, [files[number] for number in needed]) as reader:
        for name, shard in shards.items():
            if len(shard.local):
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
        self._pieces: dict[str, list[tuple[int, Any]]] = {}  # name → [(first row, slice of an open file)]
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
            is_list = isinstance(place, list) and place
            if not is_list or any(type(n) is not int or not 0 <= n < MAX_ROWS for n in place):
                raise ValueError(f"{name!r} has an invalid place: {reprlib.repr(place)}")
            (first, *shape), rows = place, opened.get_slice(name)
            found = rows.get_shape()
            if not found or found[1:] != shape[1:] or first + found[0] > math.prod(shape[:1]):
                raise ValueError(f"{name!r} has shape {found}, its place says {reprlib.repr(place)}")
            if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise ValueError(
                    f"{name!r} has shape {self.shapes[name]} in another file, {reprlib.repr(shape)} in this one"
                )
            self._pieces.setdefault(name, []).append((first, rows))

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Return the first row and the number of rows of each piece of a tensor in the open files."""
        return [(first, math.prod(rows.get_shape()[:1])) for first, rows in self._pieces[name]]

    def compare(self, name: str, shard: Shard) -> None:
        """Raise CheckpointError when a tensor is missing, or has another shape or dtype than a shard of the model."""
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder}: {name}, which the model needs, is missing")
        if self.shapes[name] != shard.shape:
            raise CheckpointError(f"{self.folder}: {name} has shape {self.shapes[name]}, the model needs {shard.shape}")
        for dtype in {rows[:0].dtype for _, rows in self._pieces[name]} - {shard.local.dtype}:
            raise CheckpointError(f"{self.folder}: {name} is {dtype}, the model needs {shard.local.dtype}")

    def fill(self, name: str, shard: Shard) -> None:
        """Copy into a shard the rows in the files that overlap it; raises what `compare` raises.

        Raises CheckpointError as well unless the files hold each of its rows once.
        """
        self.compare(name, shard)
        wanted = range(shard.first, shard.first + len(shard.local))
        done, is_once = wanted.start, True
        for first, rows in sorted(self._pieces[name], key=lambda piece: piece[0]):
            begin, end = max(first, wanted.start), min(first + rows.get_shape()[0], wanted.stop)
            if begin < end:
                shard.local[begin - wanted.start : end - wanted.start].copy_(rows[begin - first : end - first])
                done, is_once = end, is_once and begin == done
        if not is_once or done < wanted.stop:
            spans = listed(f"{first} to {first + count}" for first, count in sorted(self.spans(name)))
            raise CheckpointError(
                f"{self.folder}: {name!r} has {math.prod(shard.shape[:1])} rows, of which the model needs "
                f"{wanted.start} to {wanted.stop}, the files hold {spans}"
            )

    def whole(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor in host memory; raises CheckpointError unless it has the shape and dtype of `like`."""
        tensor = torch.empty_like(like, device="cpu")
        self.fill(name, shard_of(tensor))
        return tensor


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
