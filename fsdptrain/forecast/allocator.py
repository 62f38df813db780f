"""A model of PyTorch's CUDA caching allocator with expandable segments: what it would reserve for a trace.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.13), with
`expandable_segments:True`, which workers set, and otherwise the default settings; torch's names are given in brackets.
What a training step does not use is left out: `record_stream`, CUDA graphs, private pools, and the settings that are
off by default (`max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`). The device is never
full: torch would then release cached memory and try once more.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from fsdptrain.forecast.trace import Alloc, Free, Storage, Trace

MIB = 2**20
GRANULARITY = 512  # kMinBlockSize: every size is rounded up to a multiple of this (`round_size`)
SMALL = MIB  # kSmallSize: blocks up to this size come from the small pool
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB  # kSmallBuffer, kLargeBuffer: the pages that a pool grows by


def reserved_bytes(trace: Trace, device: str) -> int:
    """Return the bytes that the allocator takes from a device for the allocations and releases of a trace."""
    pools: dict[tuple[int, bool], Pool] = {}
    blocks: dict[Storage, tuple[Pool, Block]] = {}
    for event in trace.all():
        if isinstance(event, Alloc) and event.storage.device == device:
            small = event.size <= SMALL
            pool = pools.setdefault((event.stream, small), Pool(SMALL_PAGE if small else LARGE_PAGE))
            blocks[event.storage] = pool, pool.malloc(event.size)
        elif isinstance(event, Free) and event.storage.device == device:
            pool, block = blocks.pop(event.storage)
            pool.free(block)
    return sum(pool.reserved for pool in pools.values())


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, in use or cached."""

    address: int
    size: int
    cached: bool = False


@dataclass
class Pool:
    """The small or the large blocks of one stream: one segment, which grows at its end by pages of `page` bytes."""

    page: int
    reserved: int = 0
    segment: list[Block] = field(default_factory=list)  # by address, without gaps
    cached: list[tuple[int, int, Block]] = field(default_factory=list)  # (size, address, block), sorted

    def malloc(self, size: int) -> Block:
        """Return a block of at least `size` bytes: the best fit among the cached ones, or new memory."""
        size = round_up(size, GRANULARITY)
        block = self._best_fit(size) or self._grow(size)
        if block.size - size >= GRANULARITY:  # the remainder becomes a block of its own (`should_split`)
            rest = Block(block.address + size, block.size - size)
            block.size = size
            self.segment.insert(self._place(rest), rest)
            self._put(rest)
        return block

    def free(self, block: Block) -> None:
        """Merge a block with its cached neighbours and cache it (`free_block`, `try_merge_blocks`)."""
        place = self._place(block)
        for neighbour in (*self.segment[place + 1 : place + 2], *self.segment[max(0, place - 1) : place]):
            if neighbour.cached:
                self._take(neighbour)
                self.segment.remove(neighbour)
                block.address = min(block.address, neighbour.address)
                block.size += neighbour.size
        self._put(block)

    def _best_fit(self, size: int) -> Block | None:
        """Return the smallest sufficient cached block, the one at the lowest address among equals (`get_free_block`).

        The last one of the segment can grow, so that it counts as the largest.
        """
        place = bisect.bisect_left(self.cached, (size,))
        if place == len(self.cached):
            return None
        if self.cached[place][2] is self.segment[-1] and place + 1 < len(self.cached):
            place += 1
        block = self.cached.pop(place)[2]
        block.cached = False
        return block

    def _grow(self, size: int) -> Block:
        """Map pages after the last block, which is a part of the result if it is cached, so that nothing is lost
        (`try_allocate_expandable_block`).
        """
        if self.segment and self.segment[-1].cached:
            self._take(self.segment[-1])
        else:
            self.segment.append(Block(self.reserved, 0))
        block = self.segment[-1]
        missing = round_up(size - block.size, self.page)
        block.size += missing
        self.reserved += missing
        return block

    def _place(self, block: Block) -> int:
        return bisect.bisect_left(self.segment, block.address, key=lambda each: each.address)

    def _put(self, block: Block) -> None:
        block.cached = True
        bisect.insort(self.cached, (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        del self.cached[bisect.bisect_left(self.cached, (block.size, block.address))]
        block.cached = False


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple
