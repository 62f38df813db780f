"""Hardware, the timing of a trace, and forecasts by the forecasting process."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shipped
import torch
from rich.console import Console
from simulated import SMALL, config_of, on_fake, plan_of
from support import TINY, sample

from fsdptrain import processes
from fsdptrain.config.schema import Recipe, Recomputation
from fsdptrain.errors import FsdptrainError, RecipeError
from fsdptrain.forecast import timing
from fsdptrain.forecast.forecaster import Forecast, Forecaster, compare_with_measured, hardware_of
from fsdptrain.forecast.server import time_of
from fsdptrain.forecast.timing import (
    COMPILED,
    LATENCY_S,
    Timing,
    collective_s,
    kernel_s,
    recomputation_s,
    replay_streams,
)
from fsdptrain.forecast.trace import Collective, Event, Kernel, Moment, RecordEvent, Synchronize, Trace, WaitEvent
from fsdptrain.model.config import load_config
from fsdptrain.model.skeleton import skeleton
from fsdptrain.parallel.world import World
from fsdptrain.plan.hardware import CALIBRATED, CPU, KNOWN, Hardware, card, cards_named_in, parse_hardware
from fsdptrain.plan.plan import Plan
from fsdptrain.plan.topology import topology_of
from fsdptrain.terminal.page import Page
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import GIB
from fsdptrain.validation.dry_run import dry_run
from fsdptrain.validation.findings import Findings, show_outcome
from fsdptrain.validation.request import Request

H100 = KNOWN["h100-80gb"]
SHALLOW = SMALL | {"num_hidden_layers": 2, "vocab_size": 512}

# --- hardware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KNOWN, "cpu"])
def test_hardware_is_parsed_with_its_count_in_any_spelling(name: str) -> None:
    plain = name.replace("-", " ").upper()
    for text, count in ((name, None), (f"8x{name}", 8), (plain, None), (f"64 × {plain}", 64), (f"{name}:4", 4)):
        found = parse_hardware(text)
        assert (found.count, found.hardware.name) == (count, name), text
    assert parse_hardware("NVIDIA H100 80GB HBM3").hardware.name == "h100-80gb"
    assert parse_hardware("2x3090").hardware.name == "rtx3090-24gb"
    assert not parse_hardware(name).note
    assert parse_hardware("8xA100").note == "--hardware 8xA100: taken as a100-80gb, not a100-40gb"
    hardware = parse_hardware("memory=48e9,flops=200e12,intra_bw=30e9,inter_bw=5e9").hardware
    assert (hardware.memory, hardware.flops, hardware.intra_bw, hardware.inter_bw) == (48e9, 200e12, 30e9, 5e9)


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("# fsdptrain validate x --hardware 2x8xa100-40gb\n# for an H100", "2x8xa100-40gb"),
        ("# eight H100 80 GB", "h100-80gb"), ("my-run-8xa100", "a100-80gb"), ("on 2 × RTX 4090", "rtx4090-24gb"),
        ("on 2 × RTX4090", "rtx4090-24gb"), ("no card is named, only 4k and 8b", "8xh100-80gb"),
    ],
)  # fmt: skip
def test_the_cards_that_a_recipe_names_are_found(text: str, cards: str) -> None:
    assert cards_named_in(text) == cards and parse_hardware(cards)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h1000", "did you mean h100-80gb?"), ("rtx", "Known: h100-80gb"), ("8xmi300x", "not a CUDA device"),
        ("8x", "'8x' is not known; expected CARD, GPUSxCARD or NODESxGPUSxCARD"),
        ("memory=48e9", "expected memory=…,flops=…,"), ("memory=x,flops=1,intra_bw=1,inter_bw=1", "above 0"),
        ("memory=-1,flops=1,intra_bw=1,inter_bw=1", "above 0"), ("memory=1,colour=2", "expected memory=…,flops=…,"),
        *((text, "expected CARD") for text in ("", ":4", "0x8xh100", "16x0xh100", "2x16x8xh100", "16x8xh100:4")),
    ],
)  # fmt: skip
def test_unknown_hardware_is_rejected_with_a_way_out(text: str, says: str) -> None:
    with pytest.raises(RecipeError, match="--hardware") as refused:
        parse_hardware(text)
    assert says in str(refused.value)


def test_a_card_says_what_its_times_are_based_on() -> None:
    bases = {name: (hardware.basis, hardware.spread) for name, hardware in KNOWN.items()}
    calibrated = {name for name, (basis, _) in bases.items() if basis == CALIBRATED}
    assert calibrated == {"h100-80gb", "a100-80gb", "a100-40gb"}
    assert bases["h100-80gb"][1] < bases["h200-141gb"][1] < bases["b200-192gb"][1]
    custom = parse_hardware("memory=48e9,flops=200e12,intra_bw=30e9,inter_bw=5e9").hardware
    assert custom.basis == bases["l4-24gb"][0] and custom.spread == bases["l4-24gb"][1]


def test_the_range_is_wider_where_no_published_run_is_like_the_plan(tmp_path: Path) -> None:
    def range_of(
        card: str, world: int = 8, product: str = "mm", attention: tuple[str, ...] = ("FlashAttention 2",),
        **changes: Any,
    ) -> tuple[float, str]:  # fmt: skip
        usual = {"data__seq_len": 4096, "train__micro_batch_size": 1, "fsdp__mixed_precision__param_dtype": "bfloat16"}
        batch = {"train__global_batch_size": world * {**usual, **changes}["train__micro_batch_size"]}
        plan = plan_of(tmp_path, world, world // 8, "cuda", **(usual | batch | changes))
        found = time_of(plan, {0: Trace([], [Kernel(product, BUSY, 0, 0, 0)])}, [0], KNOWN[card], 1, 1.0, attention)
        low, high = (seconds / found["step_s"] for seconds in found["step_s_range"])
        assert math.isclose(low + high, 2)
        return round(high - 1, 3), found["time_basis"]

    for name in ("h100-80gb", "a100-80gb"):
        assert range_of(name) == range_of(name, 512) == (0.1, CALIBRATED)
    assert range_of("h200-141gb", data__seq_len=8192)[0] == 0.25
    for differs, world, changes in (
        ("on more than 512 GPUs", 520, {}),
        ("with rows of more than 8,192 tokens", 8, {"data__seq_len": 8200}),
        ("with micro-batches of less than 4,096 tokens", 8, {"data__seq_len": 2048}),
        ("with attention by cuDNN", 8, {"attention": ("FlashAttention 2", "cuDNN")}),
        ("with experts", 8, {"product": "_grouped_mm"}),
        ("with offloading", 8, {"fsdp__cpu_offload": True}),
        ("in float32", 8, {"fsdp__mixed_precision__param_dtype": "float32"}),
    ):
        assert range_of("h100-80gb", world, **changes) == (0.2, f"{CALIBRATED}, but none {differs}")
        assert range_of("h200-141gb", world, **changes)[0] == 0.35
        assert range_of("b200-192gb", world, **changes) == range_of("b200-192gb"), "an estimate as it is"


def test_a_count_must_fill_whole_nodes() -> None:
    topology = topology_of(Recipe(), 64, H100)
    assert (topology.nnodes, topology.nproc_per_node, topology.device) == (8, 8, "cuda")
    assert topology_of(Recipe(), 4, H100).world_size == 4
    assert topology_of(Recipe(), None, H100).nproc_per_node == 8
    with pytest.raises(RecipeError, match="12 × h100-80gb do not fill nodes of 8"):
        topology_of(Recipe(), 12, H100)


def test_a_visible_card_is_identified_by_name_and_memory() -> None:
    found = card("NVIDIA A100-SXM4-40GB", 40 * GIB)
    assert found and found.name == "a100-40gb" and found.memory == 40 * GIB
    for unknown in ("NVIDIA GeForce GTX 1080", "NVIDIA RTX 6000 Ada Generation", "Tesla P4"):
        assert card(unknown, 8 * GIB) is None
    for name, memory, wanted in (
        ("NVIDIA H100 PCIe", 79, "h100-pcie-80gb"), ("NVIDIA H100 NVL", 93, "h100-nvl-94gb"),
        ("NVIDIA H100 80GB HBM3", 79, "h100-80gb"), ("NVIDIA GH200 480GB", 94, "gh200-96gb"),
        ("NVIDIA L40", 44, "l40-48gb"), ("NVIDIA L40S", 44, "l40s-48gb"), ("Tesla T4", 14, "t4-16gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95, "rtx-pro-6000-96gb"),
    ):  # fmt: skip
        found = card(name, memory * GIB)
        assert found and (found.name, found.memory) == (wanted, memory * GIB), name


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA L40", "NVIDIA A10"])
def test_mfu_and_forecast_use_the_same_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(World, "device_memory", lambda self: 80 * GIB)
    world = World(0, 0, 1, torch.device("cuda", 0), None, None, [])  # type: ignore[arg-type]
    known = card(name, 80 * GIB)
    assert known and world.peak_flops(torch.bfloat16) == known.flops


# --- time ------------------------------------------------------------------------------------------------------------

BUSY = 1_000_000_000_000  # FLOPs


def seconds(flops: int) -> float:
    return flops / (H100.flops * H100.product_share)


def test_a_collective_on_its_own_stream_overlaps_with_compute() -> None:
    gather = Collective("all-gather", tuple(range(8)), 10**9, stream=1)
    alone = collective_s(gather, H100, 8)
    work = [Kernel("mm", 20 * BUSY, 0, 0, stream=0)]
    together = replay_streams([gather, *work], H100, half=True, ranks_per_node=8)
    slowed = H100.contention * (alone - H100.launch_s)  # until the collective ends
    assert math.isclose(together.step_s, H100.hook_s + H100.launch_s + seconds(20 * BUSY) + slowed)
    assert alone < together.step_s
    waiting = replay_streams([gather, RecordEvent(1, 1), WaitEvent(1, 0), *work], H100, half=True, ranks_per_node=8)
    assert math.isclose(waiting.step_s, H100.hook_s + seconds(20 * BUSY) + alone)
    assert math.isclose(waiting.exposed_s, H100.hook_s + alone, rel_tol=1e-6)


def test_collectives_on_the_same_links_do_not_overlap() -> None:
    def together(first: tuple[int, ...], second: tuple[int, ...]) -> float:
        pair = [Collective("all-gather", first, 10**9, 1), Collective("reduce-scatter", second, 10**9, 2)]
        return replay_streams(pair, punctual, half=True, ranks_per_node=8).step_s - H100.hook_s

    punctual = dataclasses.replace(H100, late_s=0.0)
    inside, across = (collective_s(Collective("all-gather", (0, n), 10**9, 1), H100, 8) for n in (1, 8))
    assert math.isclose(together((0, 1), (0, 1)), 2 * inside)
    assert math.isclose(together((0, 1), (0, 2)), 2 * inside), "two groups share the links of a card"
    assert math.isclose(together((0, 8), (0, 16)), 2 * across), "and its network card"
    assert math.isclose(together((0, 8), (0, 1)), across), "but these have links of their own"


def test_late_ranks_delay_a_step_for_each_collective_between_nodes() -> None:
    def delay(ranks: tuple[int, ...], hidden: int) -> float:
        events = [*[Collective("all-gather", ranks, 10**6, stream=1)] * 3, Kernel("mm", hidden * BUSY, 0, 0, stream=0)]
        steps = [
            replay_streams(events, dataclasses.replace(H100, late_s=late_s), half=True, ranks_per_node=8).step_s
            for late_s in (0.0, 1e-3)
        ]
        return steps[1] - steps[0]

    assert delay(tuple(range(8)), hidden=0) == 0
    for hidden in (0, 1000):  # compute does not hide it
        assert math.isclose(delay(tuple(range(16)), hidden), 3 * 16e-3)
        assert math.isclose(delay((0, 8), hidden), 3 * 2e-3)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    def bare(ranks: range, kind: Any = "all-gather", hardware: Hardware = H100) -> float:
        seconds = collective_s(Collective(kind, tuple(ranks), 8 * 10**9, 0), hardware, 8)
        return seconds - LATENCY_S

    assert math.isclose(bare(range(8)), 7e9 / H100.intra_bw)
    assert math.isclose(bare(range(0, 64, 8)), 7e9 / H100.inter_bw)  # one rank on each node: its own network card
    # Each of 8 rings has an eighth of the buffer, and leaves the node through a network card of its own.
    slow = dataclasses.replace(H100, inter_bw=1e9)
    assert math.isclose(bare(range(16)), max(7.5e9 / H100.intra_bw, 7.5e9 / (8 * H100.inter_bw)))
    assert math.isclose(bare(range(1024), hardware=slow), 8e9 * 1023 / 1024 / 8e9)
    assert math.isclose(bare(range(8), "all-reduce"), 2 * bare(range(8)))
    assert collective_s(Collective("all-gather", (0,), 10**9, 0), H100, 8) == 0


def test_a_kernel_takes_as_long_as_its_arithmetic_or_its_memory() -> None:
    assert math.isclose(kernel_s(Kernel("mm", BUSY, 1, 0, 0), H100, half=True), seconds(BUSY))
    assert math.isclose(
        kernel_s(Kernel("mm", BUSY, 1, 0, 0), H100, half=False), BUSY / (H100.flops32 * H100.product_share)
    )
    memory = kernel_s(Kernel("add", 0, 10**9, 0, 0), H100, half=True)
    assert math.isclose(memory, 1e9 / (H100.memory_bw * H100.memory_share))
    assert math.isclose(kernel_s(Kernel("copy_", 0, 10**9, 10**9, 0), H100, half=True), 1e9 / H100.pcie_bw)
    assert kernel_s(Kernel("_fused_adamw_", 0, 10**9, 0, -1), H100, half=True) == 1e9 / H100.host_bw
    product = Kernel("mm", BUSY, 10**9, 0, 0)  # adds both on a GPU alone
    assert math.isclose(kernel_s(product, H100, half=True), seconds(BUSY) + memory)
    rates = CPU.flops * CPU.product_share, CPU.memory_bw * CPU.memory_share
    assert math.isclose(kernel_s(product, CPU, half=True), max(BUSY / rates[0], 1e9 / rates[1]))


def test_a_reduction_in_a_group_of_its_own_shares_the_links_with_a_gather() -> None:
    """Issued first and twice as long, it takes as much longer as the gather beside it, which need not wait for it."""
    ranks = tuple(range(8))
    small, large = (collective_s(Collective("all-gather", ranks, n * 10**10, 1), H100, 8) for n in (1, 2))

    card = dataclasses.replace(H100, hook_s=0.0, launch_s=0.0, contention=0.0)
    work = Kernel("mm", 10**17, 0, 0, 0)  # longer than both

    def end(event: int, apart: bool) -> float:
        """Return when work begins that waits for one of them."""
        reduction, gather = (
            Collective("reduce-scatter", ranks, 2 * 10**10, 2, apart),
            Collective("all-gather", ranks, 10**10, 1),
        )
        issued = [reduction, RecordEvent(2, 2), gather, RecordEvent(1, 1), WaitEvent(event, 0), work]
        return replay_streams(issued, card, True, 8).step_s - kernel_s(work, card, True)

    assert end(1, apart=False) == pytest.approx(large + small) and end(2, apart=False) == pytest.approx(large)
    assert end(1, apart=True) == pytest.approx(2 * small) and end(2, apart=True) == pytest.approx(large + small)


@pytest.mark.parametrize("name", ["_varlen_attn", "_scaled_dot_product_flash_attention"])
def test_flash_operators_take_the_rate_of_the_kernel_behind_them(name: str) -> None:
    for kernel, shares in H100.attention_share.items():
        for way, suffix in enumerate(("", "_backward")):
            found = kernel_s(Kernel(name + suffix, BUSY, 0, 0, 0), H100.with_attention(kernel), half=True)
            assert math.isclose(found, BUSY / (H100.flops * shares[way]))
    for kind in ("cudnn", "efficient"):
        found = kernel_s(Kernel(f"_scaled_dot_product_{kind}_attention", BUSY, 0, 0, 0), H100, half=True)
        assert math.isclose(found, BUSY / (H100.flops * H100.attention_share[kind][0]))
    other = KNOWN["a100-80gb"]  # no cuDNN there: a kernel without a rate of its own is like the flash kernel
    found = kernel_s(Kernel("_scaled_dot_product_cudnn_attention", BUSY, 0, 0, 0), other, half=True)
    assert math.isclose(found, BUSY / (other.flops * other.attention_share["flash"][0]))
    assert not H100.with_attention("flash").prefers_cudnn  # flash_attention_2 is never cuDNN
    custom = parse_hardware("memory=80e9,flops=1e15,intra_bw=3e11,inter_bw=5e10").hardware
    others = KNOWN["a100-80gb"], dataclasses.replace(H100, flash="FA3"), custom
    faster = [card.faster_flash for card in (H100, KNOWN["b200-192gb"], *others)]
    assert faster == ["FA3", "FA4", None, None, None]
    start = {"device": "NVIDIA H100 80GB HBM3", "device_memory_bytes": H100.memory}
    assert [getattr(hardware_of(start | used), "flash", "") for used in ({}, {"flash": "FA3"})] == ["flash", "FA3"]


def test_recomputation_takes_time_of_the_host() -> None:
    events = [Moment("backward of layers.0"), Kernel("mm", 1, 1, 0, 0)]
    alone, more = (replay_streams(events, H100, True, 8, extra).step_s for extra in (0.0, 1e-3))
    assert math.isclose(more, alone + 1e-3)
    none, full, selective = (recomputation_s(Recomputation(kind)) for kind in ("none", "full", "selective"))
    assert recomputation_s(Recomputation("full", every=2)) == full / 2 < selective and none == 0


COPY = Kernel("add", 0, 10**9, 0, 0)


@pytest.mark.parametrize(
    "moment, kernel, share",
    [
        ("forward of layers.0", COPY, COMPILED),
        ("backward of head", COPY, COMPILED),
        ("forward of embedding", COPY, 1.0),
        ("optimizer", COPY, 1.0),
        ("forward of layers.0", COPY._replace(name="mm", flops=10**12), 1.0),
        ("forward of layers.0", COPY._replace(stream=1), 1.0),  # FSDP2's
    ],
)
def test_the_compiler_saves_memory_traffic_of_layers_and_loss(moment: str, kernel: Kernel, share: float) -> None:
    # A second one waits for the first, so that the host's time cancels out.
    one, two = ([Moment(moment), *[kernel] * count] for count in (1, 2))
    for compiled in (False, True):
        ends = [replay_streams(events, H100, True, 8, compiled=compiled).step_s for events in (one, two)]
        assert math.isclose(ends[1] - ends[0], kernel_s(kernel, H100, True) * (share if compiled else 1.0))


def test_waiting_for_an_event_does_not_wait_for_what_is_queued_after_it() -> None:
    work = [Kernel("mm", BUSY, 0, 0, 0), RecordEvent(1, 0), Kernel("mm", 9 * BUSY, 0, 0, 0)]
    after = [Kernel("mm", 5 * BUSY, 0, 0, 1)]  # on an idle stream: begins when the host launches it
    one, all_work = (
        replay_streams([*work, wait, *after], H100, half=True, ranks_per_node=8).step_s
        for wait in (Synchronize(1), Synchronize())
    )
    assert math.isclose(one, 10 * seconds(BUSY), rel_tol=0.01)
    assert math.isclose(all_work, 15 * seconds(BUSY), rel_tol=0.01)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_equal_micro_batches_need_not_all_be_replayed(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, fsdp__strategy=strategy, train__global_batch_size=320)
    trace, played = on_fake(plan), []

    def counted(events: Iterable[Event], *machine: Any) -> Timing:
        played.append(len(events := [*events]))
        return replay_streams(events, *machine)

    monkeypatch.setattr(timing, "replay_streams", counted)
    machine = dataclasses.replace(H100, contention=0.3), True, 8
    found, whole = timing.replay_step(trace, 40, *machine), replay_streams(trace.repeated(40), *machine)
    assert found.equals(whole) and found.step_s > 10 * found.exposed_s / 11 > 0
    assert len(played) < 6 and sum(played) < len([*trace.repeated(40)])


# --- the forecasting process -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forecaster(forked_children: None) -> Iterator[Forecaster]:
    with Forecaster() as process:
        yield process


def gpu_plan(tmp_path: Path, world: int = 8, nodes: int = 1, **changes: Any) -> Plan:
    changes = {"model__config": SHALLOW, "train__global_batch_size": 2 * world, "fsdp__mixed_precision": {}} | changes
    return plan_of(tmp_path, world, nodes, "cuda", **changes)


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="the varlen kernel of this torch saves keys and values for every head"
)
@pytest.mark.parametrize(
    "command", [*shipped.SHALLOW, *(pytest.param(each, marks=pytest.mark.soak) for each in shipped.COMMANDS)]
)
def test_the_forecast_of_a_shipped_recipe_is_the_stored_one(command: str, forecaster: Forecaster) -> None:
    """`python tests/shipped.py` renews the file. Versions of torch agree within 1%.

    Before 2.15 a unit whose gradient no other rank has a part of divided it by 1.0 into a new tensor.
    """
    expected, found = flat(shipped.stored()[command]), flat(shipped.forecast(command, forecaster))
    if "no-shard" in command and torch.__version__ >= (2, 15):
        assert 0.98 * expected["peak_bytes"] < found["peak_bytes"] <= expected["peak_bytes"]
        expected, found = (
            {k: v for k, v in fields.items() if not k.startswith(MEMORY)} for fields in (expected, found)
        )
        assert {"step_s", "flops"} <= expected.keys()
    assert found == {
        key: value if isinstance(value, str) else pytest.approx(value, rel=0.01) for key, value in expected.items()
    }


MEMORY = ("peak_bytes", "reserved_bytes", "breakdown", "moment")


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with the parts of lists and mappings beside the others."""
    whole: dict[str, Any] = {}
    for name, field in fields.items():
        parts = dict(enumerate(field)) if isinstance(field, list) else field
        whole |= {f"{name} {key}": part for key, part in parts.items()} if isinstance(parts, dict) else {name: field}
    return whole


@pytest.mark.parametrize("shard_nodes", [4, 2, 1])
def test_the_bytes_of_a_step_are_those_of_the_closed_formulas(
    tmp_path: Path, forecaster: Forecaster, shard_nodes: int
) -> None:
    """32 ranks on 4 nodes; layers are gathered for forward and backward, embedding and head once."""
    changes = {"fsdp__strategy": "HYBRID_SHARD", "fsdp__shard_size": 8 * shard_nodes} if shard_nodes < 4 else {}
    plan = gpu_plan(tmp_path, 32, 4, train__global_batch_size=32, train__micro_batch_size=1, **changes)
    found = forecaster.forecast(plan, H100)
    model = skeleton(config_of(plan), plan.recipe.model)
    every, layers = (sum(p.numel() for p in part.parameters()) for part in (model, model.model.layers))
    size = 8 * shard_nodes
    ring = (size - 1) / size
    expected = {
        "all-gather": 2 * (every + layers) * ring,  # bfloat16
        "reduce-scatter": 4 * every * ring,  # float32
        "all-reduce": 2 * 4 * every / size * (1 - 1 / plan.replicas),  # of the shard, over the copies
    }
    # Each node has 8 ranks of a group of several nodes, and one rank of each group of copies.
    leave = dict.fromkeys(expected, 1 / 8 if shard_nodes > 1 else 0.0) | {"all-reduce": 1.0}
    for key, share in {"wire": dict.fromkeys(expected, 1.0), "network": leave}.items():
        sent = {k: sum(c[key] for c in found.collectives if c["kind"] == k and c["count"] > 1) for k in expected}
        assert sent == pytest.approx({k: whole * share[k] for k, whole in expected.items()}, rel=1e-3), key


def test_what_layers_keep_moves_to_the_host_and_kept_attention_saves_its_time(
    tmp_path: Path, forecaster: Forecaster
) -> None:
    layers, tokens, hidden = 8, 2 * 8192, 256
    shape = SMALL | {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 8}
    long = {"data__seq_len": 8192, "model__config": shape | {"num_key_value_heads": 8, "max_position_embeddings": 8192}}

    def forecast_with(how: Any) -> Forecast:
        return forecaster.forecast(gpu_plan(tmp_path, 4, **long, fsdp__activation_checkpointing=how), H100)

    full, offload, kept, both = (
        forecast_with(how if how == "full" else {"kind": "full", **how})
        for how in ("full", {"offload": True}, {"keep_attention": True}, {"offload": True, "keep_attention": True})
    )
    own = 2 * tokens * hidden  # bytes of a layer's input, and of the result of its attention
    sums = 4 * tokens * 8  # of attention
    saved = full.breakdown["saved activations"]
    assert saved - offload.breakdown["saved activations"] == pytest.approx(layers * own, rel=0.02)
    assert kept.breakdown["saved activations"] - saved == pytest.approx(layers * (own + sums), rel=0.02)
    assert offload.host_bytes - full.host_bytes == pytest.approx(layers * own, rel=0.02)
    assert both.host_bytes - full.host_bytes == pytest.approx(layers * (2 * own + sums), rel=0.02)
    # Of each layer two copies at most are on the device, one copied out or in and one in use.
    assert offload.peak_bytes < full.peak_bytes - (layers - 3) * own
    attention = layers * 2 * 2 * tokens * (8192 + 1) // 2 * hidden
    assert full.flops - kept.flops == full.flops - both.flops == pytest.approx(attention, rel=0.01)
    assert full.flops == offload.flops and full.compute_s == pytest.approx(offload.compute_s, rel=1e-3)
    assert kept.compute_s < full.compute_s


def test_the_forecast_for_a_cpu_uses_its_measured_speed(tmp_path: Path, forecaster: Forecaster) -> None:
    forecast = forecaster.forecast(plan_of(tmp_path, 2), CPU)
    assert forecast.fits and forecast.method == "fake CPU" and forecast.memory_bytes > GIB
    assert 0 < forecast.step_s < 60 and 0 < forecast.mfu < 1


def test_a_recipe_that_the_model_rejects_is_a_recipe_error(tmp_path: Path, forecaster: Forecaster) -> None:
    plan = gpu_plan(tmp_path, model__config={"model_type": "llama", **TINY, "hiden_size": 3})
    with pytest.raises(RecipeError, match="did you mean `hidden_size`"):
        forecaster.forecast(plan, H100, vocab_size=512)


def test_a_simulation_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forecaster: Forecaster
) -> None:
    """A step on other hardware may not look like the forecast that was asked for."""
    script = "raise SystemExit('RuntimeError: no such stream')"
    monkeypatch.setattr(processes, "child_command", lambda _: [sys.executable, "-c", script])
    with Forecaster() as process:
        with pytest.raises(FsdptrainError, match="the step could not be simulated: RuntimeError: no such stream"):
            process.forecast(gpu_plan(tmp_path), H100)
        dry = Findings(elsewhere=True)
        dry_run(Request(gpu_plan(tmp_path), hardware=H100), dry, process)
    assert dry.exit_code == 1 and not dry.step
    assert "could not be simulated: RuntimeError: no such stream" in dry.problems[0]


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_fails_after_the_whole_forecast_is_shown(
    tmp_path: Path, forecaster: Forecaster
) -> None:
    plan = gpu_plan(tmp_path)
    found = Findings(elsewhere=True)
    small = parse_hardware("memory=1.73e9,flops=1e14,intra_bw=1e10,inter_bw=1e9").hardware
    dry_run(Request(plan, hardware=small), found, forecaster)
    page = Page(Console(file=io.StringIO()))
    show_outcome(found.outcome(), page)
    output = page.console.file.getvalue()  # type: ignore[attr-defined]
    first, *rest = output.splitlines()
    assert first.startswith("does not fit 8×CUSTOM: ") and first.endswith(" of 1.6 GiB a GPU")
    for heading in ("Plan", "Model", "Disk", "Peak memory (highest rank)", "Communication per step", "Time"):
        assert heading in rest
    assert "This machine" not in rest, "the plan is for another one"
    assert found.exit_code == 3 and found.problems[-1].startswith(first)
    assert "or try one or more of: fsdp.activation_checkpointing=full, train.micro_batch_size=1, " in found.problems[-1]
    assert "TOO MUCH" in output


@pytest.mark.parametrize(
    ("card", "dtype", "float8", "problem"),
    [
        ("v100-32gb", "bfloat16", None, "param_dtype: v100-32gb has no"), ("v100-32gb", "float16", None, None),
        ("a100-80gb", "bfloat16", "rowwise", "train.float8: a100-80gb has no float8 units"),
        ("l40s-48gb", "bfloat16", "rowwise", None),
    ],
)  # fmt: skip
def test_a_card_without_units_for_a_dtype_rejects_the_recipe(
    card: str, dtype: str, float8: str | None, problem: str | None, tmp_path: Path, forecaster: Forecaster
) -> None:
    plan = gpu_plan(tmp_path, fsdp__mixed_precision={"param_dtype": dtype}, train__float8=float8)
    found = Findings(elsewhere=True)
    dry_run(Request(plan, hardware=KNOWN[card]), found, forecaster)
    assert found.exit_code == (2 if problem else 0)
    assert problem in found.problems[0] if problem else found.step["hardware"] == card


@pytest.mark.usefixtures("forked_children")
def test_a_run_on_gpus_is_compared_with_its_forecast(tmp_path: Path) -> None:
    """The events are those that a worker on a GPU writes; the forecast is real."""
    plan = gpu_plan(tmp_path)
    plan.rundir.root.mkdir(parents=True)
    load_config(plan, 512).save_pretrained(plan.rundir.model)
    device = {"device": "NVIDIA H100 80GB HBM3", "device_memory_bytes": H100.memory, "baseline_memory_bytes": 7}
    start = {"event": "start", **sample("start", **device)}
    steps = [sample("step", step=n, step_s=n / 10, peak_memory_bytes=10**9 + 7) for n in range(1, 12)]
    records = [{"at": 1.0, **start}, *({"at": 1.0, "event": "step", **step} for step in steps)]
    screen = Screen(Console(file=io.StringIO()))
    compare_with_measured(plan, records[:-1], screen)  # too few steps
    assert not plan.rundir.forecast.exists() and not screen.console.file.getvalue()  # type: ignore[attr-defined]
    unknown = {**records[0], "device": "NVIDIA T1000"}
    compare_with_measured(plan, [unknown, *records[1:]], screen)
    assert "no hardware figures for NVIDIA T1000" in screen.console.file.getvalue()  # type: ignore[attr-defined]
    compare_with_measured(plan, records, screen)
    found = json.loads(plan.rundir.forecast.read_text())
    assert found["steps"] == 8 and found["compared"]["step_s"]["measured"] == pytest.approx(0.75)
    assert found["compared"]["peak_bytes"]["measured"] == 10**9 and found["forecast"]["hardware"] == "h100-80gb"
    assert "forecast and measurement: memory" in screen.console.file.getvalue()  # type: ignore[attr-defined]
