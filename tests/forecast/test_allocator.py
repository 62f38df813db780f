"""The model of the caching allocator: every rule by hand, and properties of random traces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdptrain.forecast.allocator import GRANULARITY, LARGE_PAGE, SMALL_PAGE, Block, Pool, reserved_bytes, round_up
from fsdptrain.forecast.trace import HOST, Alloc, Free, Moment, Storage, Trace

KIB, MIB, GIB = 2**10, 2**20, 2**30
GPU = "cuda"


class Tape:
    """Build a trace by hand: `take` and `give` named storages."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.storages: dict[str, Storage] = {}

    def take(self, name: str, size: float, stream: int = 0, device: str = GPU) -> Tape:
        storage = self.storages[name] = Storage(device, "temporaries")
        self.trace.events.append(Alloc(storage, int(size), stream))
        return self

    def give(self, *names: str) -> Tape:
        self.trace.events += [Free(self.storages.pop(name)) for name in names]
        return self

    def reserved(self) -> int:
        return reserved_bytes(self.trace, GPU)


def test_small_and_large_blocks_grow_by_pages_of_their_own() -> None:
    tape = Tape()
    for i in range(4):
        tape.take(str(i), 512 * KIB)
    assert tape.reserved() == 2 * MIB
    assert tape.take("one more", 1).reserved() == 4 * MIB
    assert Tape().take("a", 5 * MIB).give("a").take("b", MIB).reserved() == (20 + 2) * MIB


def test_streams_share_nothing() -> None:
    for stream, reserved in ((0, 40 * MIB), (1, 80 * MIB)):
        assert Tape().take("a", 40 * MIB).give("a").take("b", 40 * MIB, stream).reserved() == reserved


def test_only_the_given_device_counts_and_so_do_allocations_before_the_step() -> None:
    tape = Tape().take("kept", 40 * MIB)
    tape.trace.before, tape.trace.events = tape.trace.events, [Moment("forward")]  # type: ignore[assignment]
    tape.take("host", GIB, device=HOST).give("host").take("a", 20 * MIB).give("kept")
    assert tape.reserved() == 60 * MIB


def test_a_block_that_can_expand_is_kept_for_a_larger_request() -> None:
    tape = Tape().take("a", 30 * MIB).give("a").take("b", 50 * MIB)
    assert tape.reserved() == 60 * MIB, "40 for a, 20 more for b"
    pool = Pool(LARGE_PAGE)
    a, _ = pool.malloc(40 * MIB), pool.malloc(30 * MIB)  # 10 MiB remain after the second, at the end
    assert pool.reserved == 80 * MIB
    pool.free(a)
    assert pool.malloc(10 * MIB).address == 0


# Random programs: a size allocates, an index frees one of the live blocks.
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB))
PROGRAMS = st.lists(st.one_of(st.tuples(SIZES), st.integers(0, 10**6)), min_size=15, max_size=60)


@settings(max_examples=40)
@given(PROGRAMS, st.sampled_from([SMALL_PAGE, LARGE_PAGE]))
def test_no_memory_is_lost(program: list[tuple[int] | int], page: int) -> None:
    pool, live, peak = Pool(page), list[tuple[int, Block]](), 0
    for step in program:
        if isinstance(step, tuple):
            live.append((step[0], pool.malloc(step[0])))
        elif live:
            pool.free(live.pop(step % len(live))[1])
        sizes = [round_up(size, GRANULARITY) for size, _ in live]
        assert [block.size for _, block in live] == sizes
        # All reserved memory is in use or cached, in one segment without gaps.
        peak = max(peak, sum(sizes))
        cached = [block for _, _, block in pool.cached]
        assert pool.cached == sorted(pool.cached, key=lambda entry: entry[:2])
        segment = sorted([*cached, *(block for _, block in live)], key=lambda block: block.address)
        assert pool.reserved == sum(sizes) + sum(block.size for block in cached) >= peak
        assert pool.segment == segment
        for block, following in pairwise(segment):
            assert following.address == block.address + block.size
            assert not (block.cached and following.cached), "neighbours that were not merged"
    for _, block in live:
        pool.free(block)
    assert [size for size, _, _ in pool.cached] == ([pool.reserved] if pool.reserved else [])
