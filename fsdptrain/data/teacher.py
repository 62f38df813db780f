"""What a teacher finds likely at the label tokens of a corpus: computed once, cached in parts, and memory-mapped.

A part has some hundred sequences and a folder of its own, with checksums. So an interrupted stage loses one part, a
damaged part is made again, and the folder `teacher` of the cache can be copied to another machine. A label token takes
8 · k + 4 bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdptrain.data.cache import cached_folder, folder_of, is_intact

Array = np.ndarray[Any, Any]
KIND = "teacher"  # of its folders in the cache
PART = 256  # sequences


@dataclass(frozen=True)
class TeacherOutputs:
    """The outputs of a teacher for a corpus: `key` (JSON) identifies what decides them, `labels` int64 [B] as there."""

    key: list[Any]
    labels: Array
    top_k: int

    @property
    def parts(self) -> range:
        """The numbers of all parts."""
        return range(-(-len(self.labels) // PART))

    def sequences(self, part: int) -> range:
        """Return the numbers of the sequences in a part."""
        return range(part * PART, min((part + 1) * PART, len(self.labels)))

    def nbytes(self, part: int) -> int:
        """Return the bytes of a part."""
        return int(self.labels[self.sequences(part)].sum()) * bytes_of_label(self.top_k)

    def is_kept(self, part: int) -> bool:
        """Return whether the cache has a part, and its files are as they were written."""
        return is_intact(self._folder(part))

    def keep(self, part: int, ids: Array, log_probs: Array) -> None:
        """Put a part into the cache: int32 [L, k] and float32 [L, k + 1] of its L label tokens, in order.

        Raises CheckpointError as `cached_folder` does.
        """
        assert len(ids) == len(log_probs) == self.labels[self.sequences(part)].sum(), "a label token has no output"

        def write(folder: Path) -> None:
            np.save(folder / "ids.npy", ids)
            np.save(folder / "log_probs.npy", log_probs)

        cached_folder(KIND, [*self.key, part], write)
        _opened.cache_clear()  # of a damaged part that this one replaces

    def at(self, number: int) -> tuple[Array, Array]:
        """Return the outputs for the label tokens of a sequence: int32 [L, k] and float32 [L, k + 1]."""
        part = number // PART
        rows = slice(*(self._starts[[number, number + 1]] - self._starts[part * PART]))
        ids, log_probs = _opened(self._folder(part))
        return ids[rows], log_probs[rows]

    def _folder(self, part: int) -> Path:
        return folder_of(KIND, [*self.key, part])

    @functools.cached_property
    def _starts(self) -> Array:
        return np.concatenate([[0], np.cumsum(self.labels)])


@functools.lru_cache(maxsize=64)  # of which each holds two files open
def _opened(folder: Path) -> tuple[Array, Array]:
    ids, log_probs = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "log_probs"))
    return ids, log_probs


def bytes_of_label(top_k: int) -> int:
    """Return the bytes of the cache for a label token."""
    return 8 * top_k + 4
