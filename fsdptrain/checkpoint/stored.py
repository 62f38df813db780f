"""Open the file of a rank where it is stored: all of it on a disk, or piece by piece in an object store."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors import safe_open

from fsdptrain.errors import CheckpointError
from fsdptrain.folder.files import openable
from fsdptrain.folder.storage import READ_BYTES, Location, ObjectPath

MAX_HEADER_BYTES = 10**8  # as in the library
REQUESTS = 8  # at a time


def open_tensors(path: Location) -> contextlib.AbstractContextManager[Any]:
    """Open a safetensors file as `safe_open` does; raises what it raises, ValueError for a wrong header, and
    StorageError if the system or the store cannot read it.
    """
    return RemoteTensors(path) if isinstance(path, ObjectPath) else safe_open(openable(path), framework="pt")


class RemoteTensors:
    """A safetensors file in an object store, with those methods of `safe_open` that loading needs.

    Only the rows that are asked for are read.
    """

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

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata in the header."""
        return self._opened.metadata()

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._opened.keys())

    def get_slice(self, name: str) -> RemoteRows:
        """Return a tensor of which rows can be read."""
        return RemoteRows(self._path, self._opened.get_slice(name), self._starts[name])


class RemoteRows:
    """A tensor in an object store; `rows[a:b]` reads its rows from a to b."""

    def __init__(self, path: ObjectPath, holes: Any, start: int) -> None:
        self._path, self._holes, self._start = path, holes, start

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._holes.get_shape())

    def get_dtype(self) -> str:
        """Return the dtype as the file names it."""
        return str(self._holes.get_dtype())

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
