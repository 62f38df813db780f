"""The basis of the forecast: a step on fake tensors allocates and communicates as a step on real ones."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import build, curve
from reference import most_allocated
from safetensors.torch import load_file
from simulated import SMALL, config_of, named, on_fake, plan_of
from support import in_process, on_ranks, planned, write_recipe
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from waits import recorded, waits

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.forecast import simulation as simulate
from fsdptrain.forecast.device import DeviceEvent, PretendStream, pretend_accelerator, pretend_world
from fsdptrain.forecast.patches import fake_tensor_patches
from fsdptrain.forecast.recorder import LOSS_BACKWARD, Recorder, storage_of
from fsdptrain.forecast.trace import HOST, Alloc, Collective, Free, Kernel, peak, traffic
from fsdptrain.model.adapters import freeze
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import units_of, weights_of
from fsdptrain.model.weights import place_buffers, read_weights
from fsdptrain.parallel.patches import takes_two_dtypes
from fsdptrain.parallel.shard import shard
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.train.step import Engine


def on_real(plan: Plan) -> int:
    """Return the CPU allocator's peak in a step on real tensors, by torch's profiler; only the ranks are fake."""
    packed = plan.recipe.documents_share_sequences
    with fake_tensor_patches(packed, Recorder.unrecorded), pretend_world(plan, torch.device(HOST)) as world:
        engine, _ = simulate.make_engine(plan, config_of(plan), world)
        step(engine, plan, packed)  # so that the profiled step is not the first one
        held = [*engine.model.parameters(), *engine.model.buffers()]
        values = [value for state in engine.optimizer.state.values() for value in state.values()]
        held += filter(torch.is_tensor, values)
        storages = {s.data_ptr(): s.nbytes() for s in map(storage_of, held)}
        return sum(storages.values()) + most_allocated(step, engine, plan, packed)


def step(engine: Engine, plan: Plan, packed: bool) -> None:
    shape = (plan.recipe.train.micro_batch_size, plan.recipe.data.seq_len)
    positions = torch.arange(shape[1] // 2).repeat(2) if packed else torch.arange(shape[1])
    batches = [
        {
            "input_ids": torch.ones(shape, dtype=torch.long),
            "position_ids": positions.expand(shape).contiguous(),
            "labels": torch.ones(shape, dtype=torch.long),
        }
        for _ in range(plan.accumulation)
    ]
    engine.step(0, batches, 1, 1e-4)


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"]
RECOMPUTATIONS = ["none", "full", "selective", {"every": 2}]
ACCUMULATIONS = [(1, "reduce"), (2, "reduce"), (2, "hold")]
DTYPES = ["float32", "bfloat16"]
LOSSES = ["chunked", "plain"]
MATRIX = [
    {
        "fsdp__strategy": strategy, "fsdp__activation_checkpointing": recomputation, "fsdp__accumulation": mode,
        "fsdp__mixed_precision": {"param_dtype": dtype}, "train__global_batch_size": 8 * count, "train__loss": loss,
    }
    | ({"fsdp__shard_size": 2} if strategy.startswith("HYBRID") else {})
    for strategy, recomputation, (count, mode), dtype, loss in itertools.product(
        STRATEGIES, RECOMPUTATIONS, ACCUMULATIONS, DTYPES, LOSSES
    )
]  # fmt: skip


# In float32: torch before 2.15 describes the products of experts in bfloat16 only, but computes them.
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
EXPERTS = {"model__config": {**SMALL, "model_type": "qwen3_moe", **SPARSE}}


# Here or with adapters below: every strategy, accumulation, dtype and loss, recomputation in full and in part.
@pytest.mark.parametrize("changes", [*(MATRIX[n] for n in (68, 129, 192)), EXPERTS], ids=named)
def test_the_peak_is_that_of_the_real_allocator(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = plan_of(tmp_path, **changes)
    trace = on_fake(plan)
    assert math.isclose(peak(trace, HOST).allocated, on_real(plan), rel_tol=5e-3)
    names = {event.name for event in trace.events if isinstance(event, Kernel)}
    assert any("grouped_mm" in name for name in names) == (changes is EXPERTS)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak if kind != "adamw_8bit" else ()) for kind in OptimizerKind]
)
def test_the_state_of_every_optimizer_is_forecast(tmp_path: Path, kind: OptimizerKind) -> None:
    shape = {**SMALL, "hidden_size": 384}
    plan = plan_of(tmp_path, world=2, model__config=shape, optim__name=kind.value, train__global_batch_size=4)
    trace = on_fake(plan)
    assert math.isclose(peak(trace, HOST).allocated, on_real(plan), rel_tol=5e-3)
    kinds = {collective.kind for collective in traffic(trace.all(), 2)}
    assert ("all-to-all" in kinds) == (kind == "muon") and ("all-reduce" in kinds) == (kind == "adafactor")
    weights = weights_of(skeleton(config_of(plan), plan.recipe.model)).values()
    held = sum(e.size for e in trace.before if isinstance(e, Alloc) and e.storage.category == "optimizer state")
    others = 4 * len(weights) + 2 * 256 * 4  # counters, and the tables of 8-bit values
    assert 0 <= held - plan.recipe.optim.state_bytes(weights, "float32", ranks=2) <= others


@pytest.mark.parametrize("changes", [MATRIX[n] for n in (16, 98, 170)], ids=named)
def test_the_peak_with_adapters_is_that_of_the_real_allocator(tmp_path: Path, changes: dict[str, Any]) -> None:
    kind = "qlora" if changes == MATRIX[98] else "lora"
    if kind == "qlora" and not takes_two_dtypes():
        pytest.skip("torch before 2.13 converts quantised weights when it gathers them")
    plan = varied(plan_of(tmp_path, **changes), {"adapter.kind": kind, "adapter.r": 5})
    full = peak(on_fake(plan_of(tmp_path, **changes)), HOST)
    forecast = peak(on_fake(plan), HOST)
    # Up to 90 KB are missing at any size of the model, and without adapters too: 0.5% of this small
    # one, at most 0.15% with 25 million parameters.
    assert math.isclose(forecast.allocated, on_real(plan), rel_tol=5e-3, abs_tol=2**17)
    assert forecast.by_category["optimizer state"] < 0.1 * full.by_category["optimizer state"]


def test_only_products_that_a_gradient_of_adapters_needs_are_computed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, world=1, train__global_batch_size=2, fsdp__activation_checkpointing="none")
    rank = 5
    trace = on_fake(varied(plan, {"adapter.kind": "lora", "adapter.r": rank}))
    hidden, wide, layers = (SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    from_input = [(hidden, hidden), (hidden, hidden // 2), (hidden, hidden // 2)]  # q, k, v
    linear = [*from_input, (hidden, hidden), (hidden, wide), (hidden, wide), (wide, hidden)]
    weights = layers * sum(n * m for n, m in linear) + hidden * SMALL["vocab_size"]
    adapters = layers * sum(rank * (n + m) for n, m in linear)
    # Frozen weights: forward, and the gradient of their inputs. Adapters: that of their weights too. Nothing before the
    # first layer is trained, so its input has no gradient.
    products = 2 * weights + 3 * adapters - sum(n * m + rank * n for n, m in from_input)
    names = {"mm", "addmm", "addmm_"}
    found = sum(event.flops for event in trace.events if isinstance(event, Kernel) and event.name in names)
    assert found == 2 * products * 2 * 256  # two rows of 256 tokens


@pytest.mark.parametrize(
    ("world", "strategy"), [(2, "NO_SHARD"), pytest.param(1, "FULL_SHARD", marks=pytest.mark.soak)]
)
def test_a_rank_with_a_whole_copy_has_frozen_weights_once(tmp_path: Path, world: int, strategy: str) -> None:
    shallow = {"model__config": SMALL | {"num_hidden_layers": 2}, "fsdp__mixed_precision": {"param_dtype": "bfloat16"}}
    plan = plan_of(tmp_path, world, fsdp__strategy=strategy, **shallow)
    plan = varied(plan, {"adapter.kind": "lora", "adapter.r": 5})
    forecast = peak(on_fake(plan), HOST)
    adapters = plan.state_bytes(weights_of(freeze(skeleton(config_of(plan), plan.recipe.model), plan.recipe)).values())
    assert forecast.by_category["gathered parameters"] <= adapters / 6  # in bfloat16, beside 12 bytes of state
    assert math.isclose(forecast.allocated, on_real(plan), rel_tol=5e-3, abs_tol=2**17)


def llama(vocab: int, hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return SMALL | {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": hidden // heads,
    }  # fmt: skip


SIZES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    # a third of all combinations at 25 million parameters, a few at more, and with adapters
    "25M": (llama(16384, 384, 1024, 8, 6), MATRIX[::3], {}),
    "60M": (llama(16384, 640, 1792, 8, 10), MATRIX[7::30], {}),
    "150M": (llama(32000, 896, 2432, 10, 14), MATRIX[11::60], {}),
    "25M lora": (llama(16384, 384, 1024, 8, 6), MATRIX[1::17], {"adapter.kind": "lora"}),
    "25M qlora": (llama(16384, 384, 1024, 8, 6), MATRIX[5::17], {"adapter.kind": "qlora"}),
}


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_the_peaks_of_the_whole_matrix(tmp_path: Path, size: str) -> None:
    config, matrix, adapter = SIZES[size]
    errors = {}
    for changes in matrix:
        plan = varied(plan_of(tmp_path, model__config=config, **changes), adapter)
        forecast, real = peak(on_fake(plan), HOST), on_real(plan)
        errors[named(changes)] = forecast.allocated / real - 1
        print(f"{size} {forecast.allocated / 2**20:9.2f} {real / 2**20:9.2f} MiB {errors[named(changes)]:+.3%}  "
              f"{named(changes)}  ({forecast.moment})", flush=True)  # fmt: skip
    print(f"{size}: {len(errors)} combinations, worst {max(errors.values(), key=abs):+.3%}")
    assert all(abs(error) <= 5e-3 for error in errors.values())


RANKED = {
    "bfloat16": ["fsdp.mixed_precision.param_dtype=bfloat16"],
    "no shard, in buckets": ["fsdp.strategy=NO_SHARD", "fsdp.bucket_cap_mb=4"],
    "shards held": [
        "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=1", "fsdp.accumulation=hold_shards",
        "train.global_batch_size=12",
    ],
    "grad op, accumulated": ["fsdp.strategy=SHARD_GRAD_OP", "train.global_batch_size=8"],
    "shared rows": ["parallel.context=2", "train.global_batch_size=2"],
    "divided layers": ["parallel.tensor=2", "train.global_batch_size=2", "model.config.num_key_value_heads=2"],
    "divided experts": [  # every token goes to all: as many for each, as the forecast assumes
        "parallel.experts=2", "model.config.model_type=mixtral", "model.config.num_local_experts=4",
        "model.config.num_experts_per_tok=4",
    ],
}  # fmt: skip
OF_TOKENS = {"gather of tokens": "all-gather", "sum of tokens": "all-to-all", "tokens to experts": "all-to-all"}


def test_the_collectives_of_real_ranks_are_those_of_the_forecast(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path, model__config={**SMALL, "num_hidden_layers": 2}, data__seq_len=128, data__packing="none",
        train__micro_batch_size=2, train__global_batch_size=4, fsdp__mixed_precision={"param_dtype": "float32"},
    )  # fmt: skip
    rows = [{"prompt": f"{i}?", "completion": "It is so. " * 9, "label": i % 2 == 0} for i in range(64)]
    (tmp_path / "feedback.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = ["train.objective=kto", "data.format=feedback", f"data.path={tmp_path / 'feedback.jsonl'}"]
    variants = {**RANKED, "judged, accumulated": [*judged, "train.global_batch_size=12"]}
    found = on_ranks(2, collectives, tmp_path / "out", recipe=str(recipe), variants=variants)[0]
    for name, overrides in variants.items():
        plan = planned(recipe, *overrides, ranks=2)
        called = Counter()
        for kind, size in found[name]:
            called[kind] += 1
            called[f"{kind} bytes"] += size
        forecast = Counter()
        for collective in traffic(on_fake(plan).repeated(plan.accumulation), 2):
            kind = OF_TOKENS.get(collective.kind, collective.kind)
            forecast[kind] += collective.count
            forecast[f"{kind} bytes"] += collective.size if kind != "all-reduce" else 0
        assert forecast == called, name
        if "buckets" in name:
            assert forecast["all-reduce"] == 2  # two units each, of embedding, two layers and head


def check_trace(text: str) -> None:
    plan = Plan.from_json(text)
    config, traces = config_of(plan), []
    for _ in range(3):
        numbers: dict[Any, int] = {}
        lines: list[Any] = []
        for event in simulate.simulate(plan, config, pretend=True).all():
            if isinstance(event, Alloc | Free):
                number = numbers.setdefault(event.storage, len(numbers))
                lines.append((type(event).__name__, number, event.size if isinstance(event, Alloc) else 0))
            else:
                lines.append(type(event).__name__)
        traces.append(lines)
    assert traces[0] == traces[1] == traces[2]
    # What FSDP2 keeps in host memory is what is counted without a simulation.
    plan = varied(plan, {"fsdp.cpu_offload": True, "fsdp.accumulation": "hold_shards"})
    sizes: dict[str, list[int]] = {name: [] for name in ("parameter shards", "gradients", "optimizer state")}
    for event in simulate.simulate(plan, config, pretend=True).all():
        if isinstance(event, Alloc) and event.storage.device == HOST and event.storage.category in sizes:
            sizes[event.storage.category].append(event.size)
    weights, state = weights_of(skeleton(config, plan.recipe.model)).values(), sizes.pop("optimizer state")
    pinned = sum(2 ** math.ceil(math.log2(size)) for size in sizes["parameter shards"] + sizes["gradients"])
    assert plan.host_state_bytes(weights) == pinned + sum(state) - 4 * len(weights)  # the counters of steps


def test_the_trace_on_a_pretended_accelerator_is_always_the_same(tmp_path: Path) -> None:
    """Autograd would run its backward in a thread there, which frees its last gradient at any later moment."""
    in_process(
        check_trace, plan_of(tmp_path, device="cuda", train__global_batch_size=8, data__packing="none").to_json()
    )


def waits_of(folder: str, matrix: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for changes in matrix:
        plan = plan_of(Path(folder), device="cuda", model__config=SMALL | {"num_hidden_layers": 1}, **changes)
        steps, evaluation = recorded(plan, 2)
        products = {event.stream for event in steps if isinstance(event, Kernel) and event.flops}
        units = {event.stream for event in steps if isinstance(event, Collective) and event.size > 1000}
        found.append({**waits(steps, evaluation, 2), "beside": bool(units) and not units & products})
    return found


WAITING = [
    {
        "fsdp__strategy": strategy, "fsdp__accumulation": mode, "train__global_batch_size": 8 * count,
        "data__packing": packing, "log__every": every, "fsdp__cpu_offload": offload,
        "fsdp__mixed_precision": {"param_dtype": dtype},
    }
    | ({"fsdp__shard_size": 2} if strategy.startswith("HYBRID") else {})
    for strategy, (count, mode), offload, (packing, every, dtype) in itertools.product(
        STRATEGIES, [*ACCUMULATIONS, (4, "hold_shards")], [False, True],
        [("none", 1, "float32"), ("bfd", 2, "bfloat16"), ("bfd", 1, "float32")],
    )
    if mode != "hold_shards" or offload or "HYBRID" in strategy
]  # fmt: skip


@pytest.mark.parametrize(
    "matrix", [WAITING[13::38], pytest.param(WAITING, marks=pytest.mark.soak)], ids=["some", "every configuration"]
)
def test_the_host_waits_for_the_device_only_to_read_a_logged_step(tmp_path: Path, matrix: list[dict[str, Any]]) -> None:
    """A step waits only for the numbers of logged steps, an evaluation for its first exchange of stops and its result.

    With offload the host also waits for gradients and for the numbers of all ranks: it updates the weights.
    """
    for changes, found in zip(matrix, in_process(waits_of, str(tmp_path), matrix, timeout=3600), strict=True):
        print(named(changes), found)
        assert found.pop("beside"), "the collectives of units run in the stream of the matrix products"
        expected = {"read": 1 / changes["log__every"], "evaluation": 2}
        if changes["fsdp__cpu_offload"]:
            # FSDP2 adds to gradients in host memory: it waits for each of the 12 in every micro-batch but the first.
            adding = changes["train__global_batch_size"] // 8 - 1 if changes["fsdp__accumulation"] == "reduce" else 0
            expected = {"backward": 1 + 12 * adding, "gradient": 1, "evaluation": 2}
        assert found == expected, (changes, found)


def test_memory_that_is_freed_before_a_backward_pass_is_temporary() -> None:
    with Recorder("cpu") as recorder:
        for micro_batch in range(2):
            recorder.begin(f"forward {micro_batch}")
            torch.zeros(10)
            kept = torch.zeros(20)
            recorder.begin(LOSS_BACKWARD)
            del kept
    freed = [(event.storage.category, event.size) for event in recorder.trace.events if isinstance(event, Alloc)]
    assert freed == [("temporaries", 40), ("saved activations", 80)] * 2


def test_the_pretended_stream_and_event_have_what_those_of_torch_have() -> None:
    """A new release of torch may use any of it: 2.15 began to ask whether a stream is capturing."""
    for real, pretended in ((torch.Stream, PretendStream), (torch.Event, DeviceEvent)):
        missing = {name for name in dir(real) if not name.startswith("_")} - set(dir(pretended()))
        assert missing <= {"native_handle", "ipc_handle", "from_ipc_handle", "event_id", "device"}, missing
    assert PretendStream().device_type == int(torch._C._autograd.DeviceType.PrivateUse1)


def check_offloaded_weights(text: str) -> None:
    plan = Plan.from_json(text)
    config = AutoConfig.from_pretrained(plan.recipe.model.id)
    with pretend_world(plan, pretend_accelerator()) as world:
        bare = skeleton(config, plan.recipe.model)
        with FakeTensorMode(allow_non_fake_inputs=True):  # everything is fake except the weights
            model: Any = skeleton(config, plan.recipe.model)
            place_buffers(model, world.device, None)
            shard(model, units_of(model, "auto"), world, plan)
        read_weights(model, bare, plan, torch.device("cpu"), lambda *_: None)
        whole = load_file(f"{plan.recipe.model.id}/model.safetensors")
        for name, param in model.named_parameters():
            local = param.to_local()
            assert local.device.type == "cpu" and param.device_mesh.device_type == "pretend", name
            assert torch.equal(local, whole[name][: len(local)]) and len(local) * 2 == len(whole[name]), name


def test_offloaded_weights_are_read_into_host_memory_and_stay_there(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL)).save_pretrained(tmp_path / "model")
    plan = plan_of(
        tmp_path, world=2, device="cuda", fsdp__cpu_offload=True,
        model={"id": str(tmp_path / "model"), "tokenizer": {"train": 512}},
    )  # fmt: skip
    in_process(check_offloaded_weights, plan.to_json())


# --- on every rank -------------------------------------------------------------------------------------------------


def collectives(recipe: str, variants: dict[str, list[str]]) -> dict[str, list[tuple[str, int]]]:
    """Return of each variant the collectives of a step, as torch's profiler records them: kind, bytes of the buffer."""
    width = {"float": 4, "c10::BFloat16": 2, "double": 8, "long int": 8}
    kinds = {
        "c10d::_allgather_base_": ("all-gather", 0), "c10d::alltoall_base_": ("reduce-scatter", 1),
        "c10d::allreduce_": ("all-reduce", None), "c10d::allgather_": ("all-gather", None),
    }  # fmt: skip
    found: dict[str, list[tuple[str, int]]] = {}
    for name, overrides in variants.items():
        run, found[name] = build(recipe, overrides), []
        curve(run, 1)
        with torch.profiler.profile(record_shapes=True) as profiler:
            curve(run, 2, 1)
        for event in profiler.profiler.kineto_results.events():
            if event.name() in kinds:
                kind, place = kinds[event.name()]
                shape = [0] if place is None else event.shapes()[place]
                kind = "all-to-all" if len(shape) > 1 else kind  # of ranks that exchange tokens
                found[name].append((kind, 0 if place is None else math.prod(shape) * width[event.dtypes()[place]]))
    return found
