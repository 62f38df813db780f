"""A model of PyTorch's CUDA caching allocator with expandable segments: what it would reserve for a trace.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.13), with
`expandable_segments:True`, which workers set, and otherwise the default settings; torch's names are given in brackets.
What a training step does not use is left out: `record_stream`, CUDA graphs, private pools, and the settings that are
off by default (`max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from fsdptrain.forecast.trace import Alloc, Free, Storage, Trace

MIB = 2**20
GRANULARITY = 512  # kMinBlockSize: every size is rounded up to a multiple of this (`round_size`)
SMALL = MIB  # kSmallSize: blocks up to this size come from the small pool
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB  # kSmallBuffer, kLargeBuffer: the pages that a pool grows by
ADDRESS_SPACE = 2**62  # bytes; more than the memory of any device


@dataclass(frozen=True)
class Reserved:
    """The result of a replay in bytes, with the names of `torch.cuda.memory_stats`.

    `peak_reserved` is what the allocator took from the device, `peak_allocated` what the blocks in use held. `retries`
    counts how often the device was full and cached memory was released (`num_alloc_retries`). If that does not help,
    the replay stops, and `fits` is false.
    """

    peak_reserved: int
    peak_allocated: int
    retries: int
    fits: bool


def replay_allocations(trace: Trace, device: str, capacity: int | None = None) -> Reserved:
    """Replay the allocations and releases of a trace on a device of `capacity` bytes (None: unlimited)."""
    allocator, fits = Allocator(capacity), True
    blocks: dict[Storage, Block] = {}
    for event in trace.all():
        if isinstance(event, Alloc) and event.storage.device == device:
            block = allocator.malloc(event.size, event.stream)
            if block is None:
                fits = False
                break
            blocks[event.storage] = block
        elif isinstance(event, Free) and event.storage.device == device:
            allocator.free(blocks.pop(event.storage))
    return Reserved(allocator.peak_reserved, allocator.peak_allocated, allocator.retries, fits)


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment: in use, free, or addresses without memory."""

    pool: Pool
    address: int
    size: int
    free: bool = False
    mapped: bool = True
    previous: Block | None = None  # the neighbours in its segment
    next: Block | None = None

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes; return the rest as a new block after this one."""
        rest = Block(self.pool, self.address + size, self.size - size, False, self.mapped, self, self.next)
        if self.next is not None:
            self.next.previous = rest
        self.size, self.next = size, rest
        return rest

    def absorb_next(self) -> None:
        """Merge the next block into this one."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        self.next = absorbed.next
        if absorbed.next is not None:
            absorbed.next.previous = self


@dataclass(slots=True, eq=False)
class Pool:
    """The small or the large blocks of one stream: one unlimited segment with addresses of its own."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # (size, address, block), sorted
    unmapped: list[Block] = field(default_factory=list)  # sorted by address

    @property
    def page(self) -> int:
        """The size of the pages that it grows by."""
        return SMALL_PAGE if self.small else LARGE_PAGE

    def put(self, block: Block) -> None:
        """Add a block that is no longer in use to the cached ones."""
        block.free = True
        bisect.insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        """Remove a block from the cached ones."""
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        block.free = False


class Allocator:
    """Pools of blocks, backed by pages of the device; freed blocks are cached for their stream.

    New memory is mapped after a free block that is too small, so that no remainder is lost. A release unmaps every page
    that is inside a free block. There are two simplifications. Addresses never run out; torch reserves 9/8 of the
    device for a segment and then starts another one. If the device cannot back all of a request, nothing is mapped;
    torch may map a part of it before it releases everything that is free.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.peak_reserved = 0
        self.allocated = self.peak_allocated = 0
        self.retries = 0
        self.pools: dict[tuple[int, bool], Pool] = {}

    def malloc(self, size: int, stream: int) -> Block | None:
        """Return a block of at least `size` bytes (the best fit among the free ones, or new memory), or None.

        If the device is full, all cached memory is released and the allocator tries once more (`malloc`).
        """
        size = round_up(size, GRANULARITY)
        pool = self.pool(stream, size <= SMALL)
        block = self.best_fit(pool, size) or self.grow(pool, size)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self.grow(pool, size)
            if block is None:
                return None
        if block.size - size >= GRANULARITY:  # the remainder becomes a block of its own (`should_split`)
            pool.put(block.split(size))
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Merge a block with its free neighbours and cache it (`free_block`, `try_merge_blocks`)."""
        self.allocated -= block.size
        pool = block.pool
        if block.next is not None and block.next.free:
            pool.take(block.next)
            block.absorb_next()
        if block.previous is not None and block.previous.free:
            block = block.previous
            pool.take(block)
            block.absorb_next()
        pool.put(block)

    def pool(self, stream: int, small: bool) -> Pool:
        """Return the pool of a stream; create it at the first call, with addresses but no memory."""
        pool = self.pools.get((stream, small))
        if pool is None:
            pool = self.pools[stream, small] = Pool(small)
            pool.unmapped.append(Block(pool, 0, ADDRESS_SPACE, mapped=False))
        return pool

    def best_fit(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest sufficient free block, the one at the lowest address among equals (`get_free_block`).

        Memory that can be mapped after a block counts as part of it.
        """
        place = bisect.bisect_left(pool.free, (size,))
        if place == len(pool.free):
            return None
        while place + 1 < len(pool.free) and _expanded_size(pool.free[place + 1][2]) < _expanded_size(
            pool.free[place][2]
        ):
            place += 1
        block = pool.free.pop(place)[2]
        block.free = False
        return block

    def grow(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest possible addresses (`try_allocate_expandable_block`); None if the device is full."""
        start, missing = self.find_range(pool, size)
        if self.capacity is not None and self.reserved + missing > self.capacity:
            return None
        self.reserved += missing
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        # The range begins with a free block or with unmapped addresses …
        if start.free:
            pool.take(start)
        else:
            self.map_pages(start, size)
        # … and takes in its neighbours until it is large enough, and a free block that then follows it.
        while start.next is not None and (start.size < size or start.next.free):
            if start.next.free:
                pool.take(start.next)
            else:
                self.map_pages(start.next, size - start.size)
            start.absorb_next()
        return start

    def find_range(self, pool: Pool, size: int) -> tuple[Block, int]:
        """Return the first of adjacent free or unmapped blocks with `size` bytes, and the bytes that must be mapped."""
        for unmapped in pool.unmapped:
            before = unmapped.previous
            start = before if before is not None and before.free else unmapped
            block: Block | None = start
            found = missing = 0
            while found < size and block is not None and (block.free or not block.mapped):
                part = block.size if block.free else min(block.size, round_up(size - found, pool.page))
                missing += 0 if block.free else part
                found += part
                block = block.next
            if found >= size:
                return start, missing
        raise AssertionError("the last unmapped block is larger than any request")

    def map_pages(self, block: Block, size: int) -> None:
        """Back the first `size` bytes of an unmapped block, in whole pages (`map_block`)."""
        pool = block.pool
        place = pool.unmapped.index(block)
        pages = round_up(size, pool.page)
        if pages < block.size:
            pool.unmapped[place] = block.split(pages)
        else:
            del pool.unmapped[place]
        block.mapped = True

    def release_cached(self) -> None:
        """Unmap every page inside a free block (`unmap_block`)."""
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                first = round_up(block.address, pool.page)
                last = (block.address + block.size) // pool.page * pool.page
                if first < last:
                    self.unmap(pool, block, first, last)

    def unmap(self, pool: Pool, block: Block, first: int, last: int) -> None:
        """Unmap the addresses from `first` to `last` of a free block; what is left on either side stays free."""
        pool.take(block)
        self.reserved -= last - first
        if last < block.address + block.size:
            pool.put(block.split(last - block.address))
        if first > block.address:
            rest = block.split(first - block.address)
            pool.put(block)
            block = rest
        block.mapped = False
        if block.next is not None and not block.next.mapped:
            pool.unmapped.remove(block.next)
            block.absorb_next()
        if block.previous is not None and not block.previous.mapped:
            block.previous.absorb_next()
        else:
            bisect.insort(pool.unmapped, block, key=lambda b: b.address)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def _expanded_size(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
