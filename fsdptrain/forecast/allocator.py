"""What PyTorch's CUDA caching allocator would reserve for a trace: a model of it with its default settings.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.13); torch's own names
stand beside ours. Left out is what a training step does not use: `record_stream`, CUDA graphs and private pools, and
the settings that are off by default (`max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from fsdptrain.forecast.trace import Alloc, Free, Storage, Trace

MIB = 2**20


GRANULARITY = 512  # kMinBlockSize: every size is rounded up to a multiple of it (`round_size`)


SMALL = MIB  # kSmallSize: up to here a block comes from the small pool


SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: small blocks are packed in segments of this size


LARGE_SEGMENT = 20 * MIB  # large_segment_size, kLargeBuffer: the segment of blocks below the next limit


MIN_LARGE = 10 * MIB  # kMinLargeAlloc: from here on a block gets a segment of its own size


ROUND_LARGE = 2 * MIB  # kRoundLarge: … rounded up to a multiple of this


ENDLESS = 2**62  # bytes of addresses that no device has the memory for


@dataclass(frozen=True)
class Reserved:
    """What a replay came to; the words are those of `torch.cuda.memory_stats`.

    `peak_reserved` is what was taken from the device, `peak_allocated` what blocks in use held, a remainder too small
    to be split off included. `retries` counts how often the device was full and cached segments were released to go on
    (`num_alloc_retries`). Where that did not help the replay stops, and `largest_failed` is the request that failed.
    """

    peak_reserved: int
    peak_allocated: int
    retries: int
    fits: bool
    largest_failed: int | None


def replay_allocations(trace: Trace, device: str, capacity: int | None = None, expandable: bool = False) -> Reserved:
    """Replay what a trace allocates and frees on a device of `capacity` bytes (None: endless).

    More capacity can fail where less did not: the allocator releases nothing before the device is full, and what it
    kept may by then be split, each part pinned by a block in use.
    """
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(capacity)
    blocks: dict[Storage, Block] = {}
    failed = None
    for event in trace.all():
        if isinstance(event, Alloc):
            if event.storage.device == device:
                block = allocator.malloc(event.size, event.stream)
                if block is None:
                    failed = event.size
                    break
                blocks[event.storage] = block
        elif isinstance(event, Free) and event.storage.device == device:
            allocator.free(blocks.pop(event.storage))
    return Reserved(allocator.peak_reserved, allocator.peak_allocated, allocator.retries, failed is None, failed)


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment: in use, free, or (expandable segments only) addresses without memory behind them."""

    pool: Pool
    address: int
    size: int
    free: bool = False
    mapped: bool = True
    previous: Block | None = None  # the neighbours in its segment
    next: Block | None = None

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest, as a block of its own behind this one."""
        rest = Block(self.pool, self.address + size, self.size - size, False, self.mapped, self, self.next)
        if self.next is not None:
            self.next.previous = rest
        self.size, self.next = size, rest
        return rest

    def absorb_next(self) -> None:
        """Become one with the block behind this one."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.previous = self


@dataclass(slots=True, eq=False)
class Pool:
    """The blocks of one stream, small or large. Addresses are its own: pools share no segment."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # (size, address, block), sorted
    unmapped: list[Block] = field(default_factory=list)  # in the order of their addresses
    end: int = 0  # the first address that was never used

    @property
    def page(self) -> int:
        """The bytes that an expandable segment grows by."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def put(self, block: Block) -> None:
        """Cache a block that is no longer in use."""
        block.free = True
        bisect.insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        """Take a cached block out."""
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        block.free = False


class CachingAllocator:
    """Segments from `cudaMalloc`, cut into blocks; blocks freed are kept for their stream."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.peak_reserved = 0
        self.allocated = self.peak_allocated = 0
        self.retries = 0
        self.pools: dict[tuple[int, bool], Pool] = {}

    def malloc(self, size: int, stream: int) -> Block | None:
        """A block of at least this size: the best fit among the free ones, else of new memory; None when there is none.

        On a full device all that is cached is released, and the allocator tries once more (`malloc`).
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
        if self.splits(pool, block.size - size):
            pool.put(block.split(size))
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Cache a block, as one with its free neighbours (`free_block`, `try_merge_blocks`)."""
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
        """The pool of a stream, made when it is first asked for."""
        pool = self.pools.get((stream, small))
        if pool is None:
            pool = self.pools[stream, small] = self.new_pool(small)
        return pool

    def new_pool(self, small: bool) -> Pool:
        """A pool that holds nothing."""
        return Pool(small)

    def best_fit(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that is large enough, of several the one at the lowest address (`get_free_block`)."""
        place = bisect.bisect_left(pool.free, (size,))
        if place == len(pool.free):
            return None
        block = pool.free.pop(place)[2]
        block.free = False
        return block

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A new segment (`alloc_block`), or None where the device is full."""
        segment = segment_size(size)
        if not self.reserve(segment):
            return None
        block = Block(pool, pool.end, segment)
        pool.end += segment
        return block

    def reserve(self, size: int) -> bool:
        """Take bytes from the device, if it has as many."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def splits(self, pool: Pool, rest: int) -> bool:
        """Whether a remainder becomes a block of its own (`should_split`): a large one only above 1 MiB."""
        return rest >= GRANULARITY if pool.small else rest > SMALL

    def release_cached(self) -> None:
        """Give back every segment that is one free block (`release_cached_blocks`): no part of it is in use."""
        for pool in self.pools.values():
            kept = []
            for entry in pool.free:
                block = entry[2]
                if block.previous is None and block.next is None:
                    self.reserved -= block.size
                else:
                    kept.append(entry)
            pool.free = kept


class ExpandableAllocator(CachingAllocator):
    """`expandable_segments:True`: a pool is one segment without end, backed by pages of 2 MiB (small) or 20 MiB.

    New memory is mapped behind a free block that is too small, so that no remainder is lost, and release unmaps every
    page that lies in a free block. Two simplifications: addresses never run out (torch reserves 9/8 of the device for
    each segment and starts another beyond that), and when the device cannot back all of a request nothing is mapped,
    where torch may map a part of it before it releases everything free.
    """

    def new_pool(self, small: bool) -> Pool:
        """A pool of addresses only."""
        pool = Pool(small)
        pool.unmapped.append(Block(pool, 0, ENDLESS, mapped=False))
        return pool

    def splits(self, pool: Pool, rest: int) -> bool:
        """Every remainder is split off."""
        return rest >= GRANULARITY

    def best_fit(self, pool: Pool, size: int) -> Block | None:
        """As in fixed segments, but what could be mapped behind a block counts as a part of it (`get_free_block`)."""
        place = bisect.bisect_left(pool.free, (size,))
        if place == len(pool.free):
            return None
        while place + 1 < len(pool.free) and _room(pool.free[place + 1][2]) < _room(pool.free[place][2]):
            place += 1
        block = pool.free.pop(place)[2]
        block.free = False
        return block

    def grow(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest address with room (`try_allocate_expandable_block`), or None: the device is full."""
        start, missing = self.find_room(pool, size)
        if not self.reserve(missing):
            return None
        if start.free:
            pool.take(start)
        else:
            self.map_pages(start, size)
        while start.next is not None and (start.size < size or start.next.free):
            if start.next.free:
                pool.take(start.next)
            else:
                self.map_pages(start.next, size - start.size)
            start.absorb_next()
        return start

    def find_room(self, pool: Pool, size: int) -> tuple[Block, int]:
        """The first of adjoining blocks, free or unmapped, that hold `size` bytes; how many of these must be mapped."""
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
        raise AssertionError("the last block is endless")

    def map_pages(self, block: Block, size: int) -> None:
        """Back the first `size` bytes of an unmapped block, in whole pages (`map_block`)."""
        pool = block.pool
        place = pool.unmapped.index(block)
        pages = round_up(size, pool.page)
        pool.unmapped[place : place + 1] = [block.split(pages)] if pages < block.size else []
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
        """Take the memory from these addresses of a free block; what is left of it on either side stays free."""
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


def segment_size(size: int) -> int:
    """The size of the segment that is made for a block (`get_allocation_size`)."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else round_up(size, ROUND_LARGE)


def round_up(size: int, multiple: int) -> int:
    """The next multiple, or the size itself where it is one."""
    return -(-size // multiple) * multiple


def _room(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
