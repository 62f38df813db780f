"""Advice: which plans are tried, ruled out and shown, and what is named where memory ran out."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import write_recipe

from fsdptrain.config.reader import load
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import FsdptrainError, Problem, RecipeError
from fsdptrain.forecast import render
from fsdptrain.forecast.forecaster import Forecast, Forecaster
from fsdptrain.forecast.render import does_not_fit_error
from fsdptrain.forecast.search import (
    RECOMPUTATION,
    Advice,
    Choice,
    changes_that_save_memory,
    command_text,
    divided_experts,
    divided_layers,
    micro_batches,
    other_kinds,
    override_words,
    overrides_of,
    pipelines,
    ranked,
    relief_lines,
    search,
    strategies_to_try,
)
from fsdptrain.plan.hardware import CPU, KNOWN
from fsdptrain.plan.plan import Counts, Plan, draft_plan, varied
from fsdptrain.plan.topology import Topology

H100 = KNOWN["h100-80gb"]
MEMORY = 1000


def plan_of(tmp_path: Path, *overrides: str, nodes: int = 1, ranks: int = 4) -> Plan:
    words = ["train.global_batch_size=32", "model.config.num_hidden_layers=16", *overrides]
    return draft_plan(load(write_recipe(tmp_path), words), Topology("cuda", nodes, ranks), elsewhere=True)[0]


@dataclasses.dataclass
class FakeForecaster:
    """Forecasts by simple rules that a test can follow, and records the plans it was asked for."""

    state: int = 400  # bytes of weights, gradients and moments together
    activations: int = 100  # bytes per sequence without recomputation
    memory: int = MEMORY
    comfort: float = 1.0  # a plan that needs a larger share of the memory fits only just
    fails: tuple[str, ...] = ()  # strategies that cannot be simulated
    divides: bool = False  # whether divided layers need less memory
    refuses: tuple[str, ...] = ()  # keys of `parallel` with which the model cannot be divided
    idle: float = 5.0  # seconds of a step that are not compute
    waits: float = 0.0  # seconds in every micro-batch, unless shards of gradients are held
    shard: int = 100  # bytes of such a shard
    gathers: float = 0.0  # seconds of gathers over all nodes, of which groups of a pipeline save all but their part
    messages: float = 0.0  # seconds of a pipeline
    asked: list[Plan] = dataclasses.field(default_factory=list)

    def __call__(self, plan: Plan, hardware: Any, **job: Any) -> Forecast:
        self.asked.append(plan)
        fsdp, parallel, micro = plan.recipe.fsdp, plan.recipe.parallel, plan.recipe.train.micro_batch_size
        if fsdp.strategy in self.fails:
            raise FsdptrainError("the step could not be simulated: no reason")
        for name in self.refuses:
            if (ranks := getattr(parallel, name)) > 1:
                raise RecipeError([Problem(f"{ranks} ranks cannot divide X", f"parallel.{name}")])
        kind, held = fsdp.recomputation, fsdp.accumulation == "hold_shards"
        rung = RECOMPUTATION.index(kind.kind) + kind.offload
        state = self.state * (0.5 if plan.recipe.model.dtype == "bfloat16" else 1) * (0.1 if fsdp.cpu_offload else 1)
        need = int(state / plan.shard_size + self.activations * micro / 2**rung) + held * self.shard
        need //= parallel.tensor if self.divides else 1
        busy = 10 + rung + plan.accumulation / 100 + plan.shard_size / 1000 + fsdp.cpu_offload * 10
        # Exchanging tokens takes a second, divided experts save one.
        step = busy + (parallel.tensor > 1) - (parallel.experts - 1) / 8 + (not held) * self.waits * plan.accumulation
        groups = parallel.pipeline
        waiting = (groups - 1) / (plan.accumulation + groups - 1)
        step = (step + self.gathers / groups + self.messages * (groups**2 - 1)) / (1 - waiting)
        return Forecast(
            fits=need <= self.memory, tight=self.memory >= need > self.comfort * self.memory, peaks={},
            memory_bytes=self.memory, peak_bytes=need, reserved_bytes=need, overhead_bytes=0, host_bytes=0,
            moment="loss", breakdown={}, collectives=[], flops=1, model_flops=1, step_s=step,
            step_s_range=[step] * 2, compute_s=busy - self.idle, communication_s=0, exposed_s=0,
            tokens_per_s=1000 / step, mfu=0.4, hardware="h100-80gb", method="pretended", waiting_share=waiting,
        )  # fmt: skip


def advice(plan: Plan, ask: FakeForecaster, parameters: int = 1, **more: Any) -> Advice:
    own = ask(plan, H100)
    ask.asked.clear()
    return search(plan, H100, own, [ask, ask], Counts(parameters, parameters), **more)


def tried(ask: FakeForecaster) -> Counter[tuple[str, int, str, int]]:
    return Counter(
        (p.recipe.fsdp.strategy, p.shard_size, p.recipe.fsdp.recomputation.kind, p.recipe.train.micro_batch_size)
        for p in ask.asked
    )


FLOAT8 = ("train.float8=rowwise", "fsdp.mixed_precision.param_dtype=bfloat16")


@pytest.mark.parametrize(
    ("batch", "own", "words", "sizes"),
    [
        (24, 2, (), [1, 2]), (48, 3, (), [1, 2, 3, 4]), (28, 1, (), [1]), (32, 1, (), [1, 2, 4, 8]),
        (16, 2, ("data.seq_len=24", *FLOAT8), [2, 4]),  # of a multiple of 16 tokens
    ],
)  # fmt: skip
def test_micro_batches_divide_the_share_of_a_rank(
    batch: int, own: int, words: tuple[str, ...], sizes: list[int], tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, f"train.global_batch_size={batch}", f"train.micro_batch_size={own}", *words)
    assert micro_batches(plan, Choice(Strategy.FULL_SHARD, 4, False)) == sizes


def test_more_recomputation_is_tried_only_where_less_does_not_fit(tmp_path: Path) -> None:
    ask = FakeForecaster(activations=300)
    found = advice(plan_of(tmp_path), ask)
    climbed = [("none", 2), ("none", 4), ("selective", 4), ("selective", 8), ("full", 8)]  # (none, 1) is the own plan
    assert [key[2:] for key in tried(ask) if key[0] == "FULL_SHARD"] == climbed
    assert found.options[0] is found.best and found.best.fits
    assert found.tried == len(ask.asked) == len({asked.digest() for asked in ask.asked}) and not found.failed
    ask = FakeForecaster(activations=300, idle=0.1)  # a larger micro-batch gains nothing any more
    advice(plan_of(tmp_path), ask)
    assert [key[2:] for key in tried(ask) if key[0] == "FULL_SHARD"] == climbed[:3]


def test_if_a_plan_fits_only_just_the_next_is_tried_too(tmp_path: Path) -> None:
    ask = FakeForecaster(activations=225, comfort=0.9)
    found = advice(plan_of(tmp_path), ask)
    assert {("none", 4), ("selective", 4)} < {key[2:] for key in tried(ask) if key[0] == "FULL_SHARD"}
    just = next(option for option in found.options if option.tight)
    assert just.fits and "only just" in render.advice_rows([just])[0][-1]


def test_after_a_micro_batch_that_does_not_fit_only_the_largest_is_tried(tmp_path: Path) -> None:
    ask = FakeForecaster(activations=10_000)
    advice(plan_of(tmp_path), ask)
    sizes = [key[2:] for key in tried(ask) if key[0] == "SHARD_GRAD_OP"]
    assert sizes[:4] == [("none", 1), ("selective", 1), ("full", 1), ("full", 8)]
    assert not any(key[3] in (2, 4) for key in tried(ask))


def test_plans_that_cannot_fit_by_arithmetic_are_not_simulated(tmp_path: Path) -> None:
    ask = FakeForecaster(activations=1)
    found = advice(plan_of(tmp_path), ask, parameters=100)  # 1200 bytes of state, of which a quarter fits
    assert {key[0] for key in tried(ask)} == {"FULL_SHARD", "SHARD_GRAD_OP"}
    assert {option.strategy for option in found.options} == {"FULL_SHARD", "SHARD_GRAD_OP"}
    ask = FakeForecaster(activations=1, memory=650)
    advice(plan_of(tmp_path), ask, parameters=100)  # SHARD_GRAD_OP: 300 + 400 gathered in float32
    assert {key[0] for key in tried(ask)} == {"FULL_SHARD"}


def test_groups_of_nodes_grow_only_as_far_as_needed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.global_batch_size=64", nodes=8, ranks=2)
    ask = FakeForecaster(activations=1)
    found = advice(plan, ask)
    assert {key[1] for key in tried(ask) if key[0] == "HYBRID_SHARD"} == {2}
    ask = FakeForecaster(activations=1, state=3000)
    found = advice(plan, ask)
    assert {key[1] for key in tried(ask) if key[0] == "HYBRID_SHARD"} == {2, 4}
    hybrid = next(option for option in found.options if option.strategy == "HYBRID_SHARD")
    assert hybrid.overrides["fsdp.shard_size"] == 4 and hybrid.fits


def test_one_rank_has_two_strategies(tmp_path: Path) -> None:
    ask = FakeForecaster(activations=1)
    advice(plan_of(tmp_path, ranks=1), ask)
    assert {key[0] for key in tried(ask)} == {"FULL_SHARD", "NO_SHARD"}


def test_offload_is_tried_only_if_nothing_fits_well_without_it(tmp_path: Path) -> None:
    ask = FakeForecaster(state=8000, activations=1)
    found = advice(plan_of(tmp_path), ask)
    assert found.options[0].cpu_offload and found.options[0].fits
    assert found.options[-1].own and not found.options[-1].fits
    first = next(i for i, plan in enumerate(ask.asked) if plan.recipe.fsdp.cpu_offload)
    later = [plan.recipe.fsdp.cpu_offload for plan in ask.asked[first:]]
    assert all(later) and len(later) > 1
    ask = FakeForecaster(activations=1)
    found = advice(plan_of(tmp_path, "fsdp.cpu_offload=true"), ask)
    assert [option.own for option in found.options if option.cpu_offload] == [True]
    assert found.best and found.best.overrides["fsdp.cpu_offload"] is False
    found = advice(plan_of(tmp_path), FakeForecaster(activations=1, comfort=0.05))
    assert {option.tight for option in found.options if not option.cpu_offload} == {True}
    assert any(option.cpu_offload and not option.tight for option in found.options)


def test_what_layers_of_long_rows_keep_is_offloaded_before_weights_are(tmp_path: Path) -> None:
    kept = {"kind": "full", "offload": True, "keep_attention": True}
    needs_half = 8 * (MEMORY - 100)  # of what full recomputation needs, beside 400 bytes of state on 4 ranks
    for words, found in ((["data.seq_len=32768"], kept), (["data.seq_len=2048"], "full")):
        best = advice(plan_of(tmp_path, *words), FakeForecaster(activations=needs_half)).best
        assert (best.activation_checkpointing if best else "full", best is not None) == (found, found == kept)
    assert best is None
    long = plan_of(tmp_path, "data.seq_len=32768", "fsdp.activation_checkpointing=full")
    changes = [*changes_that_save_memory(long)]
    where = [i for i, change in enumerate(changes) if change.get("fsdp.activation_checkpointing") == kept]
    assert where and where[-1] < next(i for i, change in enumerate(changes) if "fsdp.cpu_offload" in change)
    whole = "fsdp.activation_checkpointing={kind: full, offload: true, keep_attention: true}"
    option = advice(plan_of(tmp_path, "data.seq_len=32768", whole), FakeForecaster()).options[-1]
    assert "full, attention kept, offloaded" in render.advice_rows([dataclasses.replace(option, own=True)])[0]


def test_shards_are_held_where_that_is_faster_and_fits(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for shard, accumulation in ((100, "hold_shards"), (2000, None)):
        best = advice(plan, FakeForecaster(waits=1.0, state=8000, activations=1100, shard=shard)).best
        assert best is not None and best.cpu_offload
        assert best.overrides.get("fsdp.accumulation") == accumulation
        assert ("hold_shards" in render.advice_rows([best])[0][-1]) == (accumulation is not None)
    ask = FakeForecaster(waits=1.0, state=8000, activations=100)
    own = advice(plan_of(tmp_path, "fsdp.cpu_offload=true"), ask)  # the only plan that fits, and it offloads
    assert own.tried == len({asked.digest() for asked in ask.asked}), "a plan was tried twice"
    ask = FakeForecaster(waits=1.0, activations=400)
    advice(plan_of(tmp_path, "fsdp.accumulation=hold"), ask)
    assert {asked.recipe.fsdp.accumulation for asked in ask.asked} == {"hold"}


def test_nothing_fits(tmp_path: Path) -> None:
    found = advice(plan_of(tmp_path), FakeForecaster(activations=30_000))
    assert found.best is None
    assert [(option.own, option.fits) for option in found.options] == [(True, False)]
    assert "no plan fits" in render.advice_lines(found)


def pretrained_plan(tmp_path: Path, *overrides: str, **shape: int) -> Plan:
    base = ("model.id=org/base", "model.init=pretrained", "train.micro_batch_size=4", "data.packing=none")
    return plan_of(tmp_path, *base, *overrides, **shape)


@pytest.mark.parametrize("written", [("export.dtype=float32",), FLOAT8])
def test_other_kinds_of_training_are_accepted_by_the_recipe(tmp_path: Path, written: tuple[str, ...]) -> None:
    plan = pretrained_plan(tmp_path, *written)
    assert len(other_kinds(plan)) == 4
    for overrides in other_kinds(plan):
        pasted = pretrained_plan(tmp_path, *written, *command_text(overrides).split())
        assert pasted == varied(plan, overrides)


def test_what_is_offered_depends_on_what_is_trained(tmp_path: Path) -> None:
    def found(*overrides: str, pretrained: bool = True) -> list[str]:
        plan = (pretrained_plan if pretrained else plan_of)(tmp_path, *overrides)
        return [command_text(change).split()[0] for change in other_kinds(plan)]

    numerics = ["optim.name=adamw_8bit", "model.dtype=bfloat16"]
    lora, qlora = "adapter.kind=lora", "adapter.kind=qlora"
    assert found() == [*numerics, lora, qlora]
    assert found("optim.name=lion", "model.dtype=bfloat16") == [lora, qlora]
    assert found(lora, "export.adapter=both") == [qlora]
    assert found(lora, "export.adapter=both", "adapter.use_dora=true") == []
    assert found(qlora, "export.adapter=both") == []
    assert found("model.trainable=[layers.3]") == numerics
    assert found(pretrained=False) == numerics, "adapters need pretrained weights"


def test_plans_that_fail_are_counted_and_reported(tmp_path: Path) -> None:
    found = advice(plan_of(tmp_path), FakeForecaster(fails=("NO_SHARD",)))
    assert found.failed and all("fsdp.strategy=NO_SHARD" in word and "no reason" in word for word in found.failed)
    assert any(line.startswith(f"{len(found.failed)} plans could not") for line in render.advice_lines(found))
    assert "NO_SHARD" not in {option.strategy for option in found.options}


def test_the_own_plan_is_marked_and_simulated_only_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.micro_batch_size=8")
    ask, idle, progress = FakeForecaster(activations=1), FakeForecaster(), list[int]()
    found = search(plan, CPU, ask(plan, CPU), [ask, idle], Counts(1, 1), progress=progress.append)
    assert not idle.asked and progress == [*range(1, found.tried + 1)], "on a CPU one forecaster is used"
    found = advice(plan, ask)
    assert [option.own for option in found.options].count(True) == 1
    assert ("FULL_SHARD", 4, "none", 8) not in tried(ask)
    assert sum("yours" in row[-1] for row in render.advice_rows(found.options)) == 1
    best = found.best
    assert best and not best.own
    again = advice(varied(plan, best.overrides), ask)
    assert again.best and again.best.own and "your plan is the fastest that fits" in render.advice_lines(again)


def test_ranking_prefers_speed_then_free_memory_and_the_own_plan_is_shown_too(tmp_path: Path) -> None:
    option = advice(plan_of(tmp_path), FakeForecaster(activations=1)).options[0]
    slow = dataclasses.replace(option, step_s=10.0)
    tight = dataclasses.replace(option, step_s=9.8, tight=True)
    fast = dataclasses.replace(option, step_s=9.0, tight=True)
    refused = dataclasses.replace(option, step_s=1.0, fits=False)
    assert ranked([slow, refused, tight, fast]) == [fast, slow, tight, refused]
    options = [dataclasses.replace(option, step_s=1.0 + i, own=i == 11) for i in range(12)]
    assert render.shown_options(options) == [*options[: render.ADVICE_SHOWN], options[11]]


WRITTEN = (
    ("fsdp.strategy=FULL_SHARD", "fsdp.backward_prefetch=BACKWARD_PRE", "fsdp.forward_prefetch=2"),
    ("fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=4", "fsdp.backward_prefetch=BACKWARD_POST"),
    ("fsdp.strategy=HYBRID_SHARD",),
    ("fsdp.strategy=HYBRID_SHARD_ZERO2", "fsdp.shard_size=2", "fsdp.backward_prefetch=NONE"),
    ("fsdp.strategy=SHARD_GRAD_OP", "fsdp.activation_checkpointing={every: 2}"),
    ("fsdp.strategy=NO_SHARD", "fsdp.cpu_offload=true", "train.micro_batch_size=4"),
)


@pytest.mark.parametrize("written", WRITTEN, ids=lambda words: words[0].partition("=")[2])
def test_the_overrides_of_every_option_are_accepted(tmp_path: Path, written: tuple[str, ...]) -> None:
    words = ["train.global_batch_size=32", *written]
    recipe, topology = write_recipe(tmp_path), Topology("cuda", 4, 2)
    plan = draft_plan(load(recipe, words), topology, elsewhere=True)[0]
    choices, micros = [*itertools.chain(*strategies_to_try(plan, False), *strategies_to_try(plan, True))], [1, 2, 4]
    assert all(micro_batches(plan, choice) == micros for choice in choices)
    for choice, micro, recomputation in zip(choices, itertools.cycle(micros), itertools.cycle(RECOMPUTATION)):
        overrides = overrides_of(plan, choice, recomputation, micro)
        pasted = load(recipe, [*words, *shlex.split(command_text(overrides))])
        assert draft_plan(pasted, topology, elsewhere=True) == (varied(plan, overrides), [])


@pytest.mark.parametrize("nodes", [3, 2])  # all that may come, and those of an attempt
def test_with_a_range_of_nodes_every_option_runs_on_each_number_of_them(tmp_path: Path, nodes: int) -> None:
    words = ["train.global_batch_size=72", "train.micro_batch_size=3", "fsdp.strategy=HYBRID_SHARD"]
    words += ["launch.nnodes=1:3", "launch.max_restarts=3"]
    recipe, topology = write_recipe(tmp_path), Topology("cuda", 3, 4, least_nnodes=1)
    plan, problems = draft_plan(load(recipe, words), topology, elsewhere=True)
    assert not problems
    ask = FakeForecaster(state=100)
    found = advice(plan.on_nodes(nodes), ask)
    changes = [*changes_that_save_memory(plan.on_nodes(nodes)), *(option.overrides for option in found.options)]
    assert {option.micro_batch_size for option in found.options} == {1, 3}
    for overrides in changes:
        pasted = load(recipe, [*words, *shlex.split(command_text(overrides))])
        assert draft_plan(pasted, topology, elsewhere=True)[1] == []


# --- layers and experts that ranks divide ---------------------------------------------------------------------------


def divisions(ask: FakeForecaster) -> Counter[tuple[int, int]]:
    return Counter((plan.recipe.parallel.tensor, plan.recipe.parallel.experts) for plan in ask.asked)


@pytest.mark.parametrize(
    ("words", "fits", "layers", "experts"),
    [
        ((), True, [], [8]), ((), False, [2, 4, 8], [8]),
        (("parallel.tensor=4",), True, [1, 2], [8]), (("parallel.tensor=4",), False, [1, 2, 8], [8]),
        (("parallel.experts=8",), True, [], [1]), (("parallel.experts=4",), True, [], [8, 1]),
        # Fewer sequences than ranks: as many ranks share a row, and some of them divide layers.
        (("parallel.context=4", "train.global_batch_size=4"), True, [(2, 2), (4, 1)], [8]),
        (("parallel.tensor=2", "train.global_batch_size=8"), True, [(1, 2)], [8]),
        (("parallel.tensor=2", "train.global_batch_size=24"), True, [], [8]),  # not on 16 ranks each
        (("parallel.context=8",), False, [2], [8]),  # a row has no more ranks than there are
        (("optim.name=adafactor",), False, [], []), (FLOAT8, False, [], []),
        (("optim.name=muon",), False, [], [8]), (("model.attn_implementation=eager",), False, [], [8]),
    ],
)  # fmt: skip
def test_divisions_are_those_that_ranks_batch_and_recipe_allow(
    words: tuple[str, ...], fits: bool, layers: list[Any], experts: list[int], tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, *words, nodes=2, ranks=8)
    changes = [each if isinstance(each, tuple) else (each, None) for each in layers]
    assert divided_layers(plan, fits) == [
        {"parallel.tensor": n} | ({"parallel.context": context} if context else {}) for n, context in changes
    ]
    assert divided_experts(plan, 16) == [{"parallel.experts": n} for n in experts]
    assert all(change == {"parallel.experts": 1} for change in divided_experts(plan, 0)), "without experts"


def test_a_stage_has_the_ranks_of_a_row_whatever_those_of_a_copy_are(tmp_path: Path) -> None:
    copies = ("fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=4", "train.micro_batch_size=4")
    for words, groups in (((), [4, 2]), (copies, [4, 2]), (["parallel.context=4"], [2]), (["parallel.context=8"], [])):
        plan = plan_of(tmp_path, *words, nodes=4, ranks=2)
        assert pipelines(plan) == [{"parallel.pipeline": number} for number in groups]


def test_layers_are_divided_where_nothing_else_fits_before_weights_are_offloaded(tmp_path: Path) -> None:
    plan, ask = (
        plan_of(tmp_path, nodes=2, ranks=8),
        FakeForecaster(divides=True, activations=9000),
    )  # 2250 bytes with all recomputed
    found = advice(plan, ask)
    best = found.best
    assert best and best.overrides["parallel.tensor"] == 4 and not best.cpu_offload
    assert {tensor for tensor, _ in divisions(ask)} == {1, 2, 4}, "the fewest ranks that suffice"
    assert "tensor 4" in render.advice_rows([best])[0][-1]
    words = ["train.global_batch_size=32", "model.config.num_hidden_layers=16", *override_words(best.overrides)]
    pasted = draft_plan(load(write_recipe(tmp_path), words), plan.topology, elsewhere=True)
    assert pasted == (varied(plan, best.overrides), [])
    ask = FakeForecaster(divides=True, activations=9000, refuses=("tensor",))
    found = advice(plan, ask)
    assert sum(count for (tensor, _), count in divisions(ask).items() if tensor > 1) == 3, "each is asked once"
    assert found.refused == ["parallel.tensor: 2 ranks cannot divide X"] and not found.failed
    assert found.refused[0] in render.advice_lines(found)


def test_experts_are_divided_alone_and_with_layers(tmp_path: Path) -> None:
    plan, ask = plan_of(tmp_path, nodes=2, ranks=8), FakeForecaster(divides=True, activations=300)
    found = advice(plan, ask, experts=16)
    assert {*divisions(ask)} == {(1, 1), (1, 8)}
    assert found.best and found.best.overrides["parallel.experts"] == 8
    assert "experts 8" in render.advice_rows([found.best])[0][-1]
    back = advice(varied(plan, {"parallel.experts": 2}), FakeForecaster(divides=True, activations=300), experts=16)
    whole = next(option for option in back.options if option.overrides.get("parallel.experts") == 1)
    assert "experts 1" in render.advice_rows([whole])[0][-1]
    ask = FakeForecaster(divides=True, activations=5000)
    found = advice(plan, ask, experts=16)
    assert {*divisions(ask)} == {(1, 1), (1, 8), (2, 1), (2, 8)}
    ask = FakeForecaster(divides=True, activations=300, refuses=("experts",))
    found = advice(plan, ask, experts=16)
    assert divisions(ask)[1, 8] == 1 and found.refused == ["parallel.experts: 8 ranks cannot divide X"]


def test_a_search_with_real_forecasts_divides_layers_and_experts(tmp_path: Path) -> None:
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_key_value_heads": 2}
    words = ["model.config.model_type=qwen3_moe", *(f"model.config.{key}={value}" for key, value in sparse.items())]
    words += ["model.config.num_hidden_layers=2", "fsdp.mixed_precision.param_dtype=bfloat16"]
    plan = plan_of(tmp_path, *words, "train.global_batch_size=2", "parallel.tensor=2", ranks=2)
    asked: list[Plan] = []
    with Forecaster() as forecaster:

        def request(plan: Plan, hardware: Any, **job: Any) -> Forecast:
            asked.append(plan)
            return forecaster.forecast(plan, hardware, **job)

        found = search(plan, H100, request(plan, H100), [request], Counts(1, 1), experts=4)
        divided = {(each.recipe.parallel.tensor, each.recipe.parallel.experts) for each in asked}
        assert divided == {(2, 1), (2, 2), (1, 1), (1, 2)} and not found.failed and not found.refused
        overrides = [option.overrides for option in found.options]
        assert any(each.get("parallel.tensor") == 1 for each in overrides)
        assert any(each.get("parallel.experts") == 2 for each in overrides)
        dense = plan_of(tmp_path, "train.global_batch_size=2", ranks=2)  # whatever the search was told
        [refused] = search(dense, H100, request(dense, H100), [request], Counts(1, 1), experts=4).refused
        assert refused.startswith("parallel.experts: 2 ranks cannot divide the experts of LlamaForCausalLM")


# --- out of memory ---------------------------------------------------------------------------------------------------

H100_START = {"device": "NVIDIA H100 80GB HBM3", "device_memory_bytes": H100.memory}


def test_changes_that_save_memory_come_in_the_order_of_their_cost(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.micro_batch_size=2", "fsdp.strategy=SHARD_GRAD_OP")
    found = [override_words(change) for change in changes_that_save_memory(plan)]
    full, small, shard = "fsdp.activation_checkpointing=full", "train.micro_batch_size=1", "fsdp.strategy=FULL_SHARD"
    assert [sorted(words) for words in found] == [
        [full], [small], [shard], [full, small], sorted([full, small, shard]),
        sorted([full, small, shard, "fsdp.cpu_offload=true"]),
    ]  # fmt: skip
    assert all(varied(plan, change) for change in changes_that_save_memory(plan))
    least = plan_of(tmp_path, full, small, shard, "fsdp.cpu_offload=true")
    assert not [*changes_that_save_memory(least)], "nothing without effect"
    hold = next(changes_that_save_memory(plan_of(tmp_path, "fsdp.accumulation=hold")))
    assert hold == {"fsdp.accumulation": "reduce"}


def test_the_ways_out_of_a_plan_that_does_not_fit_are_not_set_in_it(tmp_path: Path) -> None:
    def ways(*overrides: str) -> str:
        error = does_not_fit_error("does not fit", plan_of(tmp_path, *overrides), searched=False)
        return str(error).partition("; or try one or more of: ")[2].partition("; these also need less memory")[0]

    full, small, offload = "fsdp.activation_checkpointing=full", "train.micro_batch_size=1", "fsdp.cpu_offload=true"
    assert ways("train.micro_batch_size=2") == f"{full}, {small}, {offload}, more ranks"
    assert ways(full, "train.micro_batch_size=1") == f"{offload}, more ranks"
    assert ways(full, offload) == "more ranks"
    assert ways(full, "fsdp.strategy=NO_SHARD") == f"fsdp.strategy=FULL_SHARD, {offload}, more ranks"
    message = str(does_not_fit_error("does not fit", pretrained_plan(tmp_path), searched=False))
    assert "weights are trained, or the precision: optim.name=adamw_8bit, model.dtype=bfloat16, " in message
    assert message.endswith("adapter.kind=lora export.adapter=merged, adapter.kind=qlora export.adapter=merged")


def test_shards_are_held_only_by_plans_in_which_that_has_an_effect(tmp_path: Path) -> None:
    held, offload = "fsdp.accumulation=hold_shards", "fsdp.cpu_offload=true"
    plan = plan_of(tmp_path, held, offload)
    changes = [*changes_that_save_memory(plan)]
    assert changes[0] == {"fsdp.accumulation": "reduce"}, "shards that were held in GPU memory are sent to the host"
    assert all("fsdp.accumulation" not in change for change in changes[1:]), "offload stays"
    hybrid = plan_of(tmp_path, held, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2")
    for change in changes_that_save_memory(hybrid):
        words = override_words(change)
        sharded = "fsdp.strategy=FULL_SHARD" in words and "fsdp.cpu_offload=true" not in words
        assert ("fsdp.accumulation=reduce" in words) == sharded
        load(tmp_path / "recipe.yaml", [held, "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2", *words])


def test_out_of_memory_shows_the_forecast_and_three_overrides_that_fit(tmp_path: Path) -> None:
    assert "another process on this GPU" in relief_lines(plan_of(tmp_path), H100_START, FakeForecaster())[0]
    plan = plan_of(tmp_path, "train.micro_batch_size=8")
    ask = FakeForecaster(activations=200)
    first, second, *fitting = relief_lines(plan, H100_START, ask)
    assert first.startswith("forecast: ") and "the peak in the loss" in first and "another process" not in first
    assert second == "with these overrides it would fit:" and 1 <= len(fitting) <= 3
    for line in fitting:
        words = line.split("  ")[1].split()
        assert ask(plan_of(tmp_path, "train.micro_batch_size=8", *words), H100).fits
    plan = pretrained_plan(tmp_path)
    last = relief_lines(plan, H100_START, FakeForecaster(state=6000, activations=1))[-1]  # all else needs offload
    assert last.startswith("these also need less memory, but change") and "adapter.kind=qlora" in last
    assert "adapter.kind" not in str(relief_lines(plan, H100_START, FakeForecaster(activations=400)))


@pytest.mark.parametrize("start", [None, {"device": "NVIDIA T1000", "device_memory_bytes": 4e9}])
def test_without_a_known_card_or_a_forecast_the_overrides_are_left(start: Any, tmp_path: Path) -> None:
    lines = relief_lines(plan_of(tmp_path), start, FakeForecaster())
    assert lines[:2] == ["no forecast: the card is not known", "overrides that need less memory:"]
    assert lines[2] == "  fsdp.activation_checkpointing=full"
    lines = relief_lines(plan_of(tmp_path), H100_START, FakeForecaster(fails=("FULL_SHARD",)))
    assert lines[0].startswith("no forecast: the step could not be simulated") and len(lines) > 2


# ------------------------------------------------------------------------------------------------------------ pipelines


def test_whole_nodes_are_a_pipeline_where_links_are_slow(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "train.global_batch_size=512", nodes=8, ranks=4)
    ask = FakeForecaster(idle=0.0, gathers=100.0, messages=1.0)
    found = advice(plan, ask)
    assert found.best and found.best.overrides["parallel.pipeline"] == 4
    staged = [asked for asked in ask.asked if asked.recipe.parallel.pipeline > 1]
    assert {asked.recipe.parallel.pipeline for asked in staged} == {2, 4, 8}, "fewer groups until that is slower"
    assert all(asked.accumulation >= asked.recipe.parallel.pipeline for asked in staged)
    assert {asked.recipe.fsdp.strategy for asked in staged} == {"FULL_SHARD", "SHARD_GRAD_OP"}
    best, *slower = render.advice_rows(found.options)
    assert best[-1].endswith("pipeline 4")
    assert any("waits for collectives" in row[-1] for row in slower) and any("stages wait" in row[-1] for row in slower)
    words = ["train.global_batch_size=512", "model.config.num_hidden_layers=16", *override_words(found.best.overrides)]
    pasted = draft_plan(load(write_recipe(tmp_path), words), plan.topology, elsewhere=True)
    assert pasted == (varied(plan, found.best.overrides), [])


def test_a_pipeline_is_left_where_links_are_fast(tmp_path: Path) -> None:
    ask = FakeForecaster(idle=0.0, gathers=0.01)
    found = advice(plan_of(tmp_path, "train.global_batch_size=512", nodes=8, ranks=4), ask)
    assert found.best and "parallel.pipeline" not in found.best.overrides
    assert {asked.recipe.parallel.pipeline for asked in ask.asked} == {1}, "what it computes and waits is longer"
    ask = FakeForecaster(idle=0.0, gathers=5.0, messages=1.0)
    advice(plan_of(tmp_path, "train.global_batch_size=512", nodes=8, ranks=4), ask)
    assert {asked.recipe.parallel.pipeline for asked in ask.asked} == {1, 8, 4, 2}
    own = plan_of(tmp_path, "train.global_batch_size=512", "parallel.pipeline=2", nodes=8, ranks=4)
    found = advice(own, ask)
    assert any(option.overrides.get("parallel.pipeline") == 1 for option in found.options)
