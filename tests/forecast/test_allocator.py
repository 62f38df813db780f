"""The model of the caching allocator: every rule by hand, properties of random traces, and two published runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT, TESTS, environment, python_path, write_recipe

from fsdptrain.config.schema import Optim
from fsdptrain.forecast.allocator import (
    GRANULARITY,
    LARGE_PAGE,
    SMALL_PAGE,
    Block,
    Pool,
    reserved_bytes,
    round_up,
)
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


def test_free_neighbours_are_merged() -> None:
    for order in ("abc", "acb", "bac", "bca", "cab", "cba"):
        tape = Tape().take("a", 6 * MIB).take("b", 6 * MIB).take("c", 6 * MIB).give(*order)
        assert tape.take("d", 20 * MIB).reserved() == 20 * MIB


def test_streams_share_nothing() -> None:
    one = Tape().take("a", 40 * MIB).give("a").take("b", 40 * MIB)
    assert one.reserved() == 40 * MIB
    two = Tape().take("a", 40 * MIB).give("a").take("b", 40 * MIB, stream=1)
    assert two.reserved() == 80 * MIB


def test_only_the_given_device_counts_and_so_do_allocations_before_the_step() -> None:
    tape = Tape().take("kept", 40 * MIB)
    tape.trace.before, tape.trace.events = tape.trace.events, [Moment("forward")]  # type: ignore[assignment]
    tape.take("host", GIB, device=HOST).give("host").take("a", 20 * MIB).give("kept")
    assert tape.reserved() == 60 * MIB


def test_a_segment_grows_after_a_free_block() -> None:
    tape = Tape().take("a", 30 * MIB).give("a").take("b", 50 * MIB)
    assert tape.reserved() == 60 * MIB  # 40 for a, 20 more for b


def test_a_block_that_can_expand_is_kept_for_a_larger_request() -> None:
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
        for block, following in pairwise(segment):
            assert block.next is following and following.previous is block
            assert following.address == block.address + block.size
            assert not (block.cached and following.cached), "neighbours that were not merged"
        assert not segment or pool.last is segment[-1]
    for _, block in live:
        pool.free(block)
    assert [size for size, _, _ in pool.cached] == ([pool.reserved] if pool.reserved else [])


# torchtitan's tables 1 and 3 (benchmarks/llama3_h100_202412_torchtitan.md, torchtitan 9dec370, torch of 2024-12-23):
# Llama 3.1 8B, local batch 2, 8192 tokens, selective AC per operator, FSDP, no compile; GPUs → peak reserved GiB.
PUBLISHED = {8: 82.4, 128: 67.0}


@pytest.mark.soak
def test_torchtitans_published_memory_is_forecast_within_five_percent() -> None:
    """torchtitan's script sets expandable segments since pull request 643 (2024-10).

    Whether the launcher of the published runs set them too is not known.
    """
    done = subprocess.run(
        [sys.executable, __file__, *map(str, PUBLISHED)],
        capture_output=True, text=True, timeout=600, env=environment(PYTHONPATH=python_path(TESTS)), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    forecast = {int(ranks): found for ranks, found in json.loads(done.stdout.splitlines()[-1]).items()}
    print(forecast)
    for ranks, published in PUBLISHED.items():
        assert forecast[ranks] == pytest.approx(published, rel=0.05)


def torchtitan(ranks: int, folder: Path) -> float:
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
    return reserved_bytes(trace, PRETEND) / GIB


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps({ranks: torchtitan(int(ranks), Path(scratch)) for ranks in sys.argv[1:]}))
