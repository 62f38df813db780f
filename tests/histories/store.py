"""An object store in a folder, for `az://`: an object appears there as a whole or not at all, and nothing is renamed.

A server for S3 takes milliseconds for each request, and the library for it seconds until its first one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fsdptrain.run_folder import storage

URL = "az://bucket/run"


class FolderStore(LocalFileSystem):
    """The objects are files below `root`; what is being uploaded is beside it, where no object can be seen."""

    protocol = ("az",)
    root = "/"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        name = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
        return f"{cls.root}/{name.removeprefix('az://')}".rstrip("/") if name.startswith("az://") else name.rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of an object."""
        return f"az://{name.removeprefix(f'{self.root}/')}"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object; with the mode `create` raise FileExistsError if there is one."""
        self._publish(path, lambda scratch: scratch.write_bytes(value), mode)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **_: Any) -> None:
        """Upload a file."""
        self._publish(rpath, lambda scratch: shutil.copyfile(lpath, scratch), "overwrite")
        if callback is not None:
            callback.relative_update(Path(lpath).stat().st_size)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy an object."""
        self._publish(path2, lambda scratch: shutil.copyfile(path1, scratch), "overwrite")

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        Path(path).unlink()

    def _publish(self, path: str, write: Any, mode: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        uploads = Path(f"{self.root}.uploads")
        uploads.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=uploads)
        os.close(descriptor)
        scratch = Path(name)
        write(scratch)
        if mode == "create":
            try:
                os.link(scratch, path)
            finally:
                scratch.unlink()
        else:
            scratch.replace(path)


def register(root: Path) -> None:
    """Let this process find the store of `root` under `az://`."""
    FolderStore.root = str(root)
    storage.MODULES["az"] = "fsspec"
    fsspec.register_implementation("az", FolderStore, clobber=True)
