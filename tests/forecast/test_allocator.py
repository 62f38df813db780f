"""The model of the caching allocator: every rule by hand, properties of random traces, and two published runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT, TESTS, environment, python_path, write_recipe

from fsdptrain.config.schema import Optim
from fsdptrain.forecast.allocator import (
    GRANULARITY,
    Block,
    CachingAllocator,
    ExpandableAllocator,
    Reserved,
    replay_allocations,
    round_up,
)
from fsdptrain.forecast.trace import HOST, Alloc, Free, Moment, Storage, Trace
from fsdptrain.plan.gpus import default_settings, is_expandable

KIB, MIB, GIB = 2**10, 2**20, 2**30
GPU = "cuda"
BOTH = pytest.mark.parametrize("expandable", [False, True], ids=["fixed", "expandable"])


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

    def replay(self, capacity: float | None = None, expandable: bool = False) -> Reserved:
        return replay_allocations(self.trace, GPU, None if capacity is None else int(capacity), expandable)


@BOTH
@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB)])
def test_every_size_is_rounded_up_to_512_bytes(size: int, block: int, expandable: bool) -> None:
    assert Tape().take("a", size).replay(expandable=expandable).peak_allocated == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB), (21 * MIB, 22 * MIB),
    ],
)  # fmt: skip
def test_the_size_decides_the_segment(size: int, segment: int) -> None:
    assert Tape().take("a", size).replay().peak_reserved == segment


def test_small_blocks_share_a_segment_until_it_is_full() -> None:
    tape = Tape()
    for i in range(4):
        tape.take(str(i), 512 * KIB)
    assert tape.replay().peak_reserved == 2 * MIB
    assert tape.take("one more", 1).replay().peak_reserved == 4 * MIB


def test_small_requests_do_not_use_large_segments() -> None:
    assert Tape().take("a", 5 * MIB).give("a").take("b", MIB).replay().peak_reserved == (20 + 2) * MIB


def test_a_large_remainder_serves_the_next_request() -> None:
    assert Tape().take("a", 9 * MIB).take("b", 9.5 * MIB).replay().peak_reserved == 20 * MIB


def test_a_large_remainder_of_one_mib_stays_with_its_block_and_counts_as_allocated() -> None:
    assert Tape().take("a", 11 * MIB).replay() == Reserved(12 * MIB, 12 * MIB, 0, True, None)
    more = Tape().take("a", 11 * MIB).take("b", MIB + 512)  # the remaining MiB is not used
    assert more.replay().peak_reserved == (12 + 20) * MIB
    split = Tape().take("a", 11 * MIB - 512)  # the remainder is 512 bytes larger, so it is split off
    assert split.replay() == Reserved(12 * MIB, 11 * MIB - 512, 0, True, None)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    tape = Tape().take("a", 40 * MIB).take("b", 30 * MIB).give("a", "b")
    assert tape.take("c", 29 * MIB).take("d", 40 * MIB).replay().peak_reserved == 70 * MIB


def test_free_neighbours_are_merged() -> None:
    tape = Tape().take("a", 6 * MIB).take("b", 6 * MIB).take("c", 6 * MIB)
    apart = tape.give("a", "c").take("d", 12 * MIB)  # 6 MiB before b, 8 after it
    assert apart.replay().peak_reserved == (20 + 12) * MIB
    for order in ("abc", "acb", "bac", "bca", "cab", "cba"):
        tape = Tape().take("a", 6 * MIB).take("b", 6 * MIB).take("c", 6 * MIB).give(*order)
        assert tape.take("d", 20 * MIB).replay().peak_reserved == 20 * MIB


@BOTH
def test_streams_share_nothing(expandable: bool) -> None:
    one = Tape().take("a", 40 * MIB).give("a").take("b", 40 * MIB)
    assert one.replay(expandable=expandable).peak_reserved == 40 * MIB
    two = Tape().take("a", 40 * MIB).give("a").take("b", 40 * MIB, stream=1)
    assert two.replay(expandable=expandable).peak_reserved == 80 * MIB


def test_a_full_device_releases_cached_segments_and_continues() -> None:
    tape = Tape().take("a", 30 * MIB).give("a").take("b", 40 * MIB, stream=1)
    assert tape.replay(70 * MIB) == Reserved(70 * MIB, 40 * MIB, 0, True, None)
    assert tape.replay(69 * MIB) == Reserved(40 * MIB, 40 * MIB, 1, True, None)


def test_a_segment_with_a_block_in_use_is_not_released() -> None:
    tape = Tape().take("a", 5 * MIB).take("b", 9 * MIB).give("b").take("c", 40 * MIB)
    assert tape.replay(60 * MIB).retries == 0
    assert tape.replay(59 * MIB) == Reserved(20 * MIB, 14 * MIB, 1, False, 40 * MIB)


def test_the_replay_stops_where_the_run_would_fail() -> None:
    tape = Tape().take("a", 30 * MIB).take("b", 30 * MIB + 1).give("a").take("c", 10 * MIB)
    assert tape.replay(40 * MIB) == Reserved(30 * MIB, 30 * MIB, 1, False, 30 * MIB + 1)


def test_more_memory_can_fail_where_less_did_not() -> None:
    # With 120 MiB `b` still fits beside the cached 100. `c` is split off these, so they can no longer be released.
    tape = Tape().take("a", 100 * MIB).give("a").take("b", 20 * MIB, stream=1).take("c", 10 * MIB)
    tape.take("d", 70 * MIB, stream=1)
    assert tape.replay(110 * MIB) == Reserved(100 * MIB, 100 * MIB, 1, True, None)
    assert not tape.replay(120 * MIB).fits
    assert tape.replay(120 * MIB, expandable=True).fits


def test_only_the_given_device_counts_and_so_do_allocations_before_the_step() -> None:
    tape = Tape().take("kept", 30 * MIB)
    tape.trace.before, tape.trace.events = tape.trace.events, [Moment("forward")]  # type: ignore[assignment]
    tape.take("host", GIB, device=HOST).give("host").take("a", 10 * MIB).give("kept")
    assert tape.replay() == Reserved(40 * MIB, 40 * MIB, 0, True, None)


def test_expandable_segments_grow_by_pages_after_a_free_block() -> None:
    tape = Tape().take("a", 30 * MIB).give("a").take("b", 50 * MIB)
    assert tape.replay().peak_reserved == 80 * MIB
    assert tape.replay(expandable=True).peak_reserved == 60 * MIB  # 40 for a, 20 more for b
    assert Tape().take("a", 1).replay(expandable=True).peak_reserved == 2 * MIB


def test_a_block_that_can_expand_is_kept_for_a_larger_request() -> None:
    allocator = ExpandableAllocator()
    a, b = allocator.malloc(40 * MIB, 0), allocator.malloc(30 * MIB, 0)  # 10 MiB remain after b, at the end
    assert a and b and allocator.reserved == 80 * MIB
    allocator.free(a)
    c = allocator.malloc(10 * MIB, 0)
    assert c and c.address == 0


@pytest.mark.parametrize(("first", "second"), [(25, 5), (15, 15)])
def test_a_full_device_unmaps_free_pages_and_maps_the_lowest_ones_again(first: int, second: int) -> None:
    allocator = ExpandableAllocator(100 * MIB)
    a, b = allocator.malloc(30 * MIB, 0), allocator.malloc(30 * MIB, 0)
    assert a and b and allocator.reserved == 60 * MIB
    allocator.free(a)
    c = allocator.malloc(60 * MIB, 1)  # one page of a's 30 MiB can be unmapped, the other is shared with b
    assert c and (allocator.reserved, allocator.retries) == (100 * MIB, 1)
    allocator.free(c)
    d = allocator.malloc(first * MIB, 0)
    assert d and (d.address, allocator.reserved, allocator.retries) == (0, 60 * MIB, 2)
    assert allocator.malloc(second * MIB, 0) and allocator.reserved == 60 * MIB


def test_unmapped_pages_are_merged_into_one_range() -> None:
    allocator = ExpandableAllocator(60 * MIB)
    a, b = allocator.malloc(30 * MIB, 0), allocator.malloc(30 * MIB, 0)
    assert a and b
    for block in (a, b):
        allocator.free(block)
        allocator.release_cached()
    assert allocator.reserved == 0
    c = allocator.malloc(60 * MIB, 0)
    assert c and (c.address, allocator.reserved, allocator.retries) == (0, 60 * MIB, 0)


# Random programs: (size, stream) allocates, a number frees one of the live storages.
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(MIB, 64 * MIB))
PROGRAMS = st.lists(st.one_of(st.tuples(SIZES, st.integers(0, 2)), st.integers(0, 10**6)), min_size=15, max_size=60)
Program = list[tuple[int, int] | int]
CAPACITIES = st.integers(2 * MIB, 400 * MIB)
often = settings(max_examples=40)


def trace_of(program: Program) -> Trace:
    trace, live = Trace(), []
    for step in program:
        if isinstance(step, tuple):
            live.append(Storage(GPU, "temporaries"))
            trace.events.append(Alloc(live[-1], *step))
        elif live:
            trace.events.append(Free(live.pop(step % len(live))))
    return trace


def check(allocator: CachingAllocator, live: list[tuple[int, Block]]) -> None:
    """Check what holds after every call: all reserved memory is in use or cached, in segments without gaps."""
    free = [block for pool in allocator.pools.values() for _, _, block in pool.free]
    assert allocator.allocated == sum(block.size for _, block in live)
    assert allocator.reserved == allocator.allocated + sum(block.size for block in free)
    for block in [*free, *(block for _, block in live)]:
        following = block.next
        if following is not None:
            assert following.previous is block and following.address == block.address + block.size
            assert not (block.free and following.free), "neighbours that were not merged"
            assert following.mapped or following in block.pool.unmapped
    for size, block in live:
        spare = 0 if block.pool.small or isinstance(allocator, ExpandableAllocator) else MIB
        assert 0 <= block.size - round_up(size, GRANULARITY) <= spare
    for pool in allocator.pools.values():
        assert pool.free == sorted(pool.free, key=lambda entry: entry[:2])
        assert all(not b.mapped and (b.next is None or b.next.mapped) for b in pool.unmapped)
        assert pool.unmapped == sorted(pool.unmapped, key=lambda b: b.address)


@BOTH
@often
@given(PROGRAMS, st.none() | CAPACITIES)
def test_no_memory_is_lost_and_all_of_it_can_be_released(
    expandable: bool, program: Program, capacity: int | None
) -> None:
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(capacity)
    live: list[tuple[int, Block]] = []
    for step in program:
        if isinstance(step, tuple):
            block = allocator.malloc(*step)
            if block is not None:
                live.append((step[0], block))
        elif live:
            allocator.free(live.pop(step % len(live))[1])
        check(allocator, live)
        assert capacity is None or allocator.reserved <= capacity
    while live:
        allocator.free(live.pop()[1])
    check(allocator, live)
    allocator.release_cached()
    assert allocator.reserved == allocator.allocated == 0


@BOTH
@often
@given(PROGRAMS)
def test_the_peak_is_the_rounded_sizes_plus_remainders_up_to_one_mib(expandable: bool, program: Program) -> None:
    trace = trace_of(program)
    sizes: dict[Storage, int] = {}
    lower = upper = 0
    for event in trace.events:
        if isinstance(event, Alloc):
            sizes[event.storage] = round_up(event.size, GRANULARITY)
        elif isinstance(event, Free):
            del sizes[event.storage]
        lower = max(lower, sum(sizes.values()))
        upper = max(upper, sum(size + MIB * (size > MIB) for size in sizes.values()))
    done = replay_allocations(trace, GPU, expandable=expandable)
    assert lower <= done.peak_allocated <= (lower if expandable else upper)
    assert done.peak_allocated <= done.peak_reserved


@BOTH
@often
@given(PROGRAMS, CAPACITIES)
def test_a_capacity_is_never_exceeded_and_changes_nothing_above_the_peak(
    expandable: bool, program: Program, capacity: int
) -> None:
    trace = trace_of(program)
    unlimited = replay_allocations(trace, GPU, expandable=expandable)
    assert unlimited == replay_allocations(trace, GPU, expandable=expandable)
    assert unlimited.fits and unlimited.retries == 0
    limited = replay_allocations(trace, GPU, capacity, expandable)
    assert limited.peak_reserved <= capacity
    assert limited.fits == (limited.largest_failed is None)
    if capacity >= unlimited.peak_reserved:
        assert limited == unlimited
    else:
        assert limited.retries > 0


# torchtitan's tables 1 and 3 (benchmarks/llama3_h100_202412_torchtitan.md, torchtitan 9dec370, torch of 2024-12-23):
# Llama 3.1 8B, local batch 2, 8192 tokens, selective AC per operator, FSDP, no compile; GPUs → peak reserved GiB.
PUBLISHED = {8: 82.4, 128: 67.0}


@pytest.mark.soak
def test_torchtitans_published_memory_is_forecast_within_one_percent() -> None:
    """With the default allocator. torchtitan's script sets expandable segments since pull request 643 (2024-10).

    Whether the launcher of the published runs set them too is not known; with them the model is 3 to 4% below.
    """
    done = subprocess.run(
        [sys.executable, __file__, *map(str, PUBLISHED)],
        capture_output=True, text=True, timeout=600, env=environment(PYTHONPATH=python_path(TESTS)), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    forecast = {int(ranks): found for ranks, found in json.loads(done.stdout.splitlines()[-1]).items()}
    print(forecast)
    for ranks, published in PUBLISHED.items():
        assert forecast[ranks]["reserved"] == pytest.approx(published, rel=0.01)
        assert forecast[ranks]["expandable"] == pytest.approx(published, rel=0.05)


def torchtitan(ranks: int, folder: Path) -> dict[str, float]:
    """Return the peak reserved GiB of torchtitan's run on `ranks` GPUs, by this engine; call it in a new process."""
    import torch
    from transformers import AutoConfig

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from calibrate import save_every_second_product

    from fsdptrain.config.reader import load
    from fsdptrain.forecast import simulation as simulate
    from fsdptrain.forecast.device import PRETEND
    from fsdptrain.model.units import Unit, decoder_layers
    from fsdptrain.parallel import shard
    from fsdptrain.plan.plan import make_plan
    from fsdptrain.plan.topology import Topology
    from fsdptrain.train.optim import make_optimizer
    from fsdptrain.train.step import Engine

    def units_of(model: Any, wrap: Any) -> list[Unit]:
        """Return the layers; all else is in the root unit. The last layer stays gathered, as the head does here."""
        *layers, last = [Unit(name, [layer]) for name, layer in decoder_layers(model)]
        return [*layers, Unit("head", last.modules)]

    class Foreach(torch.optim.AdamW):
        """AdamW of several kernels, with temporary memory; unlike the fused one it has no use for `found_inf`."""

        found_inf = property(lambda _: None, lambda _, flag: None)

        def __init__(self, groups: Any) -> None:
            named = [[*zip(group["param_names"], group["params"], strict=True)] for group in groups]
            super().__init__([{"params": params} for params in named], foreach=True)

    def two_steps(self: Any, *arguments: Any) -> Any:  # the first step creates the optimizer's state at its end
        one_step(self, *arguments)
        return one_step(self, *arguments)

    one_step = Engine.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "recompute", save_every_second_product)
        patch.setattr(shard, "units_of", units_of)
        patch.setattr(simulate, "make_optimizer", lambda model, _: Foreach(make_optimizer(model, Optim()).param_groups))
        patch.setattr(simulate, "start_state", lambda optimizer: None)
        patch.setattr(Engine, "step", two_steps)
        config = {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        }  # fmt: skip
        recipe = write_recipe(
            folder, model__config={"model_type": "llama", **config}, data__seq_len=8192, data__packing="none",
            fsdp={}, train__loss="plain", train__micro_batch_size=2, train__global_batch_size=2 * ranks,
        )  # fmt: skip
        plan = make_plan(load(recipe, []), Topology("cuda", ranks // 8, 8))
        trace = simulate.simulate(plan, AutoConfig.for_model("llama", **config), pretend=True)
    fixed, expandable = (replay_allocations(trace, PRETEND, expandable=choice) for choice in (False, True))
    return {
        "allocated": fixed.peak_allocated / GIB,
        "reserved": fixed.peak_reserved / GIB,
        "expandable": expandable.peak_reserved / GIB,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps({ranks: torchtitan(int(ranks), Path(scratch)) for ranks in sys.argv[1:]}))


@pytest.mark.parametrize(
    ("env", "expandable"),
    [
        ({}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, True),
    ],
)
def test_workers_use_expandable_segments_unless_the_user_has_set_the_allocator(
    env: dict[str, str], expandable: bool
) -> None:
    assert is_expandable(env) == expandable
    assert default_settings(env) == ({} if env else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
