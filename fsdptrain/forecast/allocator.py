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
    previous: Block | None = None  # the neighbours in its segment
    next: Block | None = None


@dataclass
class Pool:
    """The small or the large blocks of one stream: one segment, which grows at its end by pages of `page` bytes."""

    page: int
    reserved: int = 0
    cached: list[tuple[int, int, Block]] = field(default_factory=list)  # (size, address, block), sorted
    last: Block | None = None  # in the segment

    def malloc(self, size: int) -> Block:
        """Return a block of at least `size` bytes: the best fit among the cached ones, or new memory."""
        size = round_up(size, GRANULARITY)
        block = self._best_fit(size) or self._grow(size)
        if block.size - size >= GRANULARITY:  # the remainder becomes a block of its own (`should_split`)
            rest = Block(block.address + size, block.size - size, previous=block, next=block.next)
            if block.next is None:
                self.last = rest
            else:
                block.next.previous = rest
            block.size, block.next = size, rest
            self._put(rest)
        return block

    def free(self, block: Block) -> None:
        """Merge a block with its cached neighbours and cache it (`free_block`, `try_merge_blocks`)."""
        if block.next is not None and block.next.cached:
            self._take(block.next)
            self._absorb_next(block)
        if block.previous is not None and block.previous.cached:
            block = block.previous
            self._take(block)
            self._absorb_next(block)
        self._put(block)

    def _best_fit(self, size: int) -> Block | None:
        """Return the smallest sufficient cached block, the one at the lowest address among equals (`get_free_block`).

        The last one of the segment can grow, so that it counts as the largest.
        """
        place = bisect.bisect_left(self.cached, (size,))
        if place == len(self.cached):
            return None
        if self.cached[place][2] is self.last and place + 1 < len(self.cached):
            place += 1
        block = self.cached.pop(place)[2]
        block.cached = False
        return block

    def _grow(self, size: int) -> Block:
        """Map pages after the last block, which is a part of the result if it is cached, so that nothing is lost
        (`try_allocate_expandable_block`).
        """
        block = self.last
        if block is not None and block.cached:
            self._take(block)
        else:
            block = self.last = Block(self.reserved, 0, previous=block)
            if block.previous is not None:
                block.previous.next = block
        missing = round_up(size - block.size, self.page)
        block.size += missing
        self.reserved += missing
        return block

    def _put(self, block: Block) -> None:
        block.cached = True
        bisect.insort(self.cached, (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        del self.cached[bisect.bisect_left(self.cached, (block.size, block.address))]
        block.cached = False

    def _absorb_next(self, block: Block) -> None:
        absorbed = block.next
        assert absorbed is not None
        block.size += absorbed.size
        block.next = absorbed.next
        if absorbed.next is None:
            self.last = block
        else:
            absorbed.next.previous = block


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple
