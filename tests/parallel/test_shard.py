"""Strategies, units, prefetch, recomputation and dtypes: each key has its effect on real gloo ranks."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import build, curve, gradients_of
from reference import largest_difference
from support import TINY, on_ranks, write_recipe
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.config.schema import Fsdp, Model
from fsdptrain.errors import NonFiniteError, RecipeError
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import decoder_layers, in_buckets, tied, units_of
from fsdptrain.parallel.patches import ISSUED, named, recorded_collectives
from fsdptrain.parallel.recompute import recompute
from fsdptrain.plan.plan import varied
from fsdptrain.train.nonfinite import find_sources
from fsdptrain.train.prefetch import batches_of

LAYERS = 4
NO_PREFETCH = "fsdp.backward_prefetch=NONE"


def bare(kind: str = "llama", **config: Any) -> Any:
    return skeleton(AutoConfig.for_model(kind, **{**TINY, **config}), Model())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"model_type": "llama", **TINY, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    return write_recipe(tmp_path_factory.mktemp("shard"), model__config=config)


@pytest.fixture(scope="module")
def logs(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    variants = {
        "pre": [],
        "post": ["fsdp.backward_prefetch=BACKWARD_POST"],
        "none": [NO_PREFETCH],
        "ahead": ["fsdp.forward_prefetch=2"],
        "full recompute": [NO_PREFETCH, "fsdp.activation_checkpointing=full"],
        "selective recompute": [NO_PREFETCH, "fsdp.activation_checkpointing=selective"],
        "kept": ["fsdp.strategy=SHARD_GRAD_OP"],
        "accumulated": [NO_PREFETCH],
        "kept, accumulated": ["fsdp.strategy=SHARD_GRAD_OP"],
        "copies": ["fsdp.strategy=NO_SHARD"],
    }
    variants = {name: ["train.global_batch_size=4", "train.micro_batch_size=2", *o] for name, o in variants.items()}
    for name in ("accumulated", "kept, accumulated"):
        variants[name][0] = "train.global_batch_size=8"
    return dict(on_ranks(2, gathers, tmp_path_factory.mktemp("gathers"), recipe=str(recipe), variants=variants)[0])


def backward_of(log: list[str], layer: int) -> list[str]:
    """Return the events of a layer's backward and of the gather of the layer before it, in order."""
    names = {f"gather {layer - 1}": "gather next", f"backward {layer}": "backward", f"reduce {layer}": "reduce"}
    backward = log[log.index(f"backward {LAYERS - 1}") - 2 :]
    return [names[event] for event in backward if event in names]


@pytest.mark.parametrize("layer", range(1, LAYERS - 1))
def test_backward_prefetch_moves_the_gather_of_the_next_unit(logs: dict[str, list[str]], layer: int) -> None:
    assert backward_of(logs["pre"], layer) == ["gather next", "backward", "reduce"]
    assert backward_of(logs["post"], layer) == ["backward", "gather next", "reduce"]
    assert backward_of(logs["none"], layer) == ["backward", "reduce", "gather next"]


def test_forward_prefetch_gathers_that_many_units_ahead(logs: dict[str, list[str]]) -> None:
    def gathered_before(log: list[str], layer: int) -> int:
        return len({e for e in log[: log.index(f"forward {layer}")] if e in {f"gather {n}" for n in range(LAYERS)}})

    assert [gathered_before(logs["none"], layer) for layer in range(LAYERS)] == [1, 2, 3, 4]
    assert [gathered_before(logs["ahead"], layer) for layer in range(LAYERS)] == [3, 4, 4, 4]


@pytest.mark.parametrize(
    ("name", "times", "ends"),
    [
        ("pre", 2, 1), ("post", 2, 1), ("none", 2, 1), ("full recompute", 2, 1), ("selective recompute", 2, 1),
        ("kept", 1, 1), ("accumulated", 4, 2), ("kept, accumulated", 1, 1),
    ],
)  # fmt: skip
def test_a_unit_is_gathered_once_a_pass(logs: dict[str, list[str]], name: str, times: int, ends: int) -> None:
    """The embedding and the head not for their backward; weights that stay once a step."""
    assert [logs[name].count(f"gather {layer}") for layer in range(LAYERS)] == [times] * LAYERS
    assert [logs[name].count(f"gather {unit}") for unit in ("embedding", "head")] == [ends] * 2


def test_each_collective_of_a_step_has_the_name_of_its_unit(logs: dict[str, list[str]]) -> None:
    layers = [f"model.layers.{layer}" for layer in range(LAYERS)]
    units = ["model.embed_tokens", *layers, "model.norm, lm_head"]
    gathers = [f"all-gather of {unit}" for unit in units]
    reductions = [f"reduce-scatter of {unit}" for unit in reversed(units)]
    # The last one gathers the numbers of the step.
    assert logs["none, recorded"][: len(units)] == gathers and logs["none, recorded"][-1] == "all-gather"
    assert sorted(logs["none, recorded"]) == sorted([*gathers, *gathers[1:-1], *reductions, "all-gather"])
    assert [name for name in logs["copies, recorded"] if "reduce" in name] == [
        f"all-reduce of {unit}" for unit in reversed(units)
    ]


BF16 = "fsdp.mixed_precision.param_dtype=bfloat16"
INSPECTED: dict[str, list[str]] = {
    "plain": [],
    "bf16": [BF16],
    "bf16 buffers": [BF16, "fsdp.mixed_precision.buffer_dtype=bfloat16"],
    "bf16 reduction": [BF16, "fsdp.mixed_precision.reduce_dtype=bfloat16"],
    "bf16 master": [BF16, "model.dtype=bfloat16"],
    "offload": ["fsdp.cpu_offload=true"],
    "replicated": ["fsdp.strategy=NO_SHARD"],
    "full": ["fsdp.activation_checkpointing=full"],
    "selective": ["fsdp.activation_checkpointing=selective"],
    "by inner class": ["fsdp.wrap=[LlamaMLP, LlamaAttention]", "fsdp.activation_checkpointing=full"],
    "by size": ["fsdp.wrap={min_params: 20000}"],
    "eager": ["model.attn_implementation=eager"],
    "deterministic": ["train.deterministic=true"],
    "compiled, selective": ["train.compile=true", "fsdp.activation_checkpointing=selective"],
    "compiled, every": ["train.compile=true", "fsdp.activation_checkpointing={every: 2}"],
}


@pytest.fixture(scope="module")
def inspected(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    variants = {name: ["train.global_batch_size=4", *overrides] for name, overrides in INSPECTED.items()}
    return on_ranks(2, inspect, tmp_path_factory.mktemp("inspected"), recipe=str(recipe), variants=variants)


@pytest.mark.parametrize("name", [name for name in INSPECTED if name != "plain" and "bf16" not in name])
def test_options_of_the_computation_do_not_change_the_result(inspected: list[dict[str, Any]], name: str) -> None:
    assert max(largest_difference(inspected[0][name]["curve"], inspected[0]["plain"]["curve"])) < 1e-5
    assert inspected[0][name]["names"] == inspected[0]["plain"]["names"]


GRAPHS = 4 + 2  # a layer with a mask and without, in training and evaluations, and the loss of two lengths of chunks


def test_only_the_first_step_compiles(inspected: list[dict[str, Any]]) -> None:
    """Equal layers share a graph. Later steps have other numbers of label tokens; the soak has inductor, and bf16."""
    for rank in inspected:
        assert rank["compiled, selective"]["graphs"] == [GRAPHS, 0]
        assert rank["compiled, every"]["graphs"] == [GRAPHS + 4, 0], "layers of two kinds: every second is recomputed"
        assert rank["plain"]["graphs"] == [0, 0]


@pytest.mark.soak
def test_compiling_does_not_change_the_result(recipe: Path, tmp_path: Path) -> None:
    dtypes = {"float32": [], "bfloat16": ["fsdp.mixed_precision.param_dtype=bfloat16"]}
    variants = {
        f"{dtype} {kind}": [*options, "train.compile=true", f"fsdp.activation_checkpointing={json.dumps(kind)}"]
        for kind in ("none", "selective")
        for dtype, options in dtypes.items()
    }
    found = on_ranks(
        2, inspect, tmp_path, recipe=str(recipe), variants={**dtypes, **variants}, backend="inductor", timeout=900
    )[0]
    for name in variants:
        dtype = name.partition(" ")[0]
        difference = max(largest_difference(found[name]["curve"], found[dtype]["curve"]))
        assert difference < (1e-5 if dtype == "float32" else 2e-3)
        assert found[name]["names"] == found[dtype]["names"]
        assert found[name]["graphs"] == [GRAPHS, 0]


@pytest.mark.parametrize(
    ("kind", "times"),
    [("none", [1, 1, 1]), ("full", [2, 2, 2]), ("selective", [2, 2, 2]), ({"every": 2}, [2, 1, 2])],
)
def test_layers_are_computed_again_in_backward_as_the_recipe_says(kind: Any, times: list[int]) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    layers, found = [layer for _, layer in decoder_layers(model)], [0, 0, 0]
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda *_, n=number: found.__setitem__(n, found[n] + 1))
    recompute(layers, Fsdp(activation_checkpointing=kind).recomputation, torch.device("cpu"))
    model(input_ids=torch.arange(16)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    assert found == times


def test_dtypes_are_those_of_the_policy(inspected: list[dict[str, Any]]) -> None:
    assert inspected[0]["bf16"]["params"] == inspected[0]["bf16"]["state"] == ["torch.float32 cpu"]
    assert inspected[0]["bf16 master"]["params"] == inspected[0]["bf16 master"]["state"] == ["torch.bfloat16 cpu"]
    assert inspected[0]["bf16"]["buffers"] == ["torch.float32"]
    assert inspected[0]["bf16 buffers"]["buffers"] == ["torch.bfloat16"]
    curves = [inspected[0][name]["curve"] for name in ("plain", "bf16", "bf16 buffers", "bf16 reduction")]
    assert all(a != b for i, a in enumerate(curves) for b in curves[:i]), "a dtype had no effect"


def test_ranks_hold_their_share(inspected: list[dict[str, Any]]) -> None:
    assert sum(rank["plain"]["local_share"] for rank in inspected) == pytest.approx(1)
    assert all(rank["plain"]["local_share"] == pytest.approx(0.5, abs=0.01) for rank in inspected)
    assert all(rank["replicated"]["local_share"] == 1 for rank in inspected)


@pytest.fixture(scope="module")
def edges(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    variants = {
        "FULL_SHARD": [], "NO_SHARD": ["fsdp.strategy=NO_SHARD"],
        "HYBRID_SHARD": ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=1"],
    }  # fmt: skip
    return on_ranks(2, edge_cases, tmp_path_factory.mktemp("edges"), recipe=str(recipe), variants=variants)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_a_step_clips_the_whole_gradient_to_its_norm(strategy: str, edges: list[dict[str, Any]]) -> None:
    for step in (step for rank in edges for step in rank[strategy]):
        assert step["engine"] == pytest.approx(step["full"], rel=1e-6) and step["off"] < 1e-4


def test_a_nan_on_one_rank_stops_every_rank_before_the_update(edges: list[dict[str, Any]]) -> None:
    for rank in edges:
        assert rank["poisoned"]["loss"]["unchanged"] and rank["poisoned"]["gradient"]["unchanged"]
        assert "step 2: the loss is nan" in rank["poisoned"]["loss"]["message"]
        assert "the gradient norm nan" in rank["poisoned"]["gradient"]["message"]


def test_steps_that_are_read_late_give_the_same_run(recipe: Path, tmp_path: Path) -> None:
    """On an accelerator steps are read after the next one was queued: a NaN and its successors change nothing."""
    found = on_ranks(2, "late", tmp_path, recipe=str(recipe), overrides=["train.steps=6", "train.micro_batch_size=2"])
    for rank in found:
        once, *others = (rank[name] for name in ("at once", "late", "late, but read before a save", "4 together"))
        assert all(other["state"] == once["state"] for other in others)
        assert [other["events"] for other in others] == [
            once["events"],
            once["events"],
            [once["events"][i] for i in (2, 5)],
        ]
        assert [event[0] for event in once["events"]] == ["step", "step", "skip", "step", "step", "step"]
        assert once["together"] == [1] * 6 and others[-1]["together"] == [4, 1, 2]
        # A second is three steps of the slower rank, by its clock; the first steps were sent before any time was known.
        assert rank["counted"]["together"] == [1, 1, 1, 1, 3, 3]
        assert rank["counted"]["waited"] == [[True, True], *[[False, False]] * 9], "only the first found an idle device"
        assert rank["stopped"]["unchanged"]
        assert "step 3: the loss is nan" in rank["stopped"]["error"] and "[in step 6]" in rank["stopped"]["error"]
        assert "the loss is nan on rank 1 (samples " in rank["stopped"]["error"]


def test_the_rank_the_micro_batch_and_the_parameter_of_a_nan_are_found(edges: list[dict[str, Any]]) -> None:
    for rank in edges:
        assert rank["poisoned"]["loss"]["sources"] == [[1, 1, "the loss is nan"]]  # rank and micro-batch, from 0
        assert rank["poisoned"]["gradient"]["sources"] == [[1, 1, "the gradient of lm_head.weight"]]
        assert rank["poisoned"]["again"] == []
        layer = "the loss is nan, first in the output of model.layers.1"
        assert rank["poisoned"]["unit"]["sources"] == [[1, 1, layer]]
        [[*where, what]] = rank["poisoned"]["in a layer"]["sources"]
        assert where == [1, 1] and what.startswith("the gradient of model.layers.1.")


def test_a_micro_batch_or_a_window_without_labels_changes_nothing(edges: list[dict[str, Any]]) -> None:
    assert all(rank["masked"] == {"equal": True, "nothing": [0.0, 0.0]} for rank in edges)


def test_units_are_joined_up_to_the_size_of_a_bucket() -> None:
    model = bare(num_hidden_layers=7, tie_word_embeddings=False, hidden_size=256)
    units = units_of(model, "auto")
    model.model.embed_tokens.weight.requires_grad_(False)
    joined = {cap: in_buckets(units, Fsdp(bucket_cap_mb=cap)) for cap in (None, 1, 4, 100)}  # a layer has 1.03 MiB
    assert joined[None] == units and [unit.name for unit in joined[1]] == [unit.name for unit in units]
    assert [unit.name for unit in joined[4]] == [
        "embedding to model.layers.0", "model.layers.1 to model.layers.3", "model.layers.4 to head"
    ]  # fmt: skip
    assert [unit.name for unit in joined[100]] == ["embedding to head"]
    modules = [module for unit in units for module in unit.modules]
    assert all([module for unit in found for module in unit.modules] == modules for found in joined.values())


def test_auto_wraps_layers_embedding_and_head_but_tied_weights_stay_together_in_the_root() -> None:
    model = bare(tie_word_embeddings=False)
    units = units_of(model, "auto")
    assert [unit.name for unit in units] == ["embedding", *(f"model.layers.{i}" for i in range(3)), "head"]
    assert units[-1].modules == [model.model.norm, model.lm_head]
    model = bare(tie_word_embeddings=True)
    assert tied(model)
    assert [unit.name for unit in units_of(model, "auto")] == [f"model.layers.{i}" for i in range(3)]
    inside = {
        id(p)
        for size in (1000, 20000)
        for unit in units_of(model, {"min_params": size})
        for m in unit.modules
        for p in m.parameters()
    }
    assert id(model.lm_head.weight) not in inside


def test_units_by_size_are_the_innermost_modules_and_never_nested() -> None:
    model = bare(tie_word_embeddings=False)
    for size in (3000, 5000, 10000, 20000):
        units = [unit.modules[0] for unit in units_of(model, {"min_params": size})]
        assert len(units) > 4 and all(sum(p.numel() for p in unit.parameters()) >= size for unit in units)
        assert not any(inner is unit for unit in units for outer in units for inner in [*outer.modules()][1:])
        inside = {id(module) for unit in units for module in unit.modules()}
        left = [m for m in model.modules() if id(m) not in inside and not any(True for _ in m.children())]
        assert all(sum(p.numel() for p in m.parameters()) < size for m in left)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (["Embedding", "LlamaDecoderLayer"], "shares weights with other modules"),
        (["LlamaModel"], "shares weights with other modules"),
        (["GPT2Block"], r"GPT2Block.*LlamaDecoderLayer"),
        ({"min_params": 10**9}, "LlamaMLP"),
        ({"min_params": 40000}, "matches nothing"),  # only the model itself
    ],
)
def test_one_end_of_tied_weights_or_nothing_cannot_be_wrapped(wrap: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        units_of(bare(tie_word_embeddings=True), wrap)
    assert "shares" not in message or units_of(bare(tie_word_embeddings=False), wrap)


# --- on every rank -------------------------------------------------------------------------------------------------


def gathers(recipe: str, variants: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what a step of each variant does, in order: `gather U`, `forward U`, `backward U`, `reduce U`.

    `NAME, recorded` has the collectives of the same step, as a hang report names them.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group_module

    log: list[str] = []
    names: dict[int, str] = {}  # id of a module → the unit it is in
    issue, reduce = group_module.foreach_all_gather, group_module.FSDPParamGroup.post_backward

    def logged_issue(params: Any, *args: Any, **kwargs: Any) -> Any:
        log.append(f"gather {names.get(id(params[0]._module_info.module))}")
        return issue(params, *args, **kwargs)

    def logged_reduce(self: Any, *args: Any) -> Any:
        log.append(f"reduce {names.get(id(self.fsdp_params[0]._module_info.module))}")
        return reduce(self, *args)

    group_module.foreach_all_gather = logged_issue
    group_module.FSDPParamGroup.post_backward = logged_reduce
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        names |= {id(run.engine.model.model.embed_tokens): "embedding", id(run.engine.model.lm_head): "head"}
        names |= {id(run.engine.model.model.norm): "head"}
        for number, layer in enumerate(run.engine.model.model.layers):
            names |= {id(module): str(number) for module in layer.modules()}
            layer.register_forward_pre_hook(lambda *_, n=number: log.append(f"forward {n}"))
            layer.mlp.register_full_backward_hook(
                lambda *_, n=number: log.append(f"backward {n}")
            )  # half of it is done
        curve(run, 1)
        log.clear()
        before = len(recorded())
        curve(run, 2, 1)
        found[name] = list(log)
        found[f"{name}, recorded"] = recorded()[before:]
    return found


def inspect(recipe: str, variants: dict[str, list[str]], backend: str = "aot_eager") -> dict[str, Any]:
    """Return the sharded model of each variant after two steps and evaluations, and their curve.

    `graphs` counts what was compiled in the first and in the second, with this backend, and breaks of graphs.
    """
    found = {}
    for name, overrides in variants.items():
        counters.clear()
        with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
            run = build(recipe, overrides)
            made = curve(run, 1)
            run.engine.evaluate(run.stream.corpus, range(4))
            graphs = counters["stats"]["unique_graphs"]
            made += curve(run, 2, 1)
            run.engine.evaluate(run.stream.corpus, range(4))
        model, optimizer = run.engine.model, run.engine.optimizer
        found[name] = {
            "curve": made,
            "graphs": [graphs, counters["stats"]["unique_graphs"] - graphs + sum(counters["graph_break"].values())],
            "params": sorted({f"{p.dtype} {p.device}" for p in model.parameters()}),
            "state": sorted({f"{v.dtype} {v.device}" for s in optimizer.state.values() for v in s.values() if v.ndim}),
            "buffers": sorted({str(b.dtype) for b in model.buffers()}),
            "local_share": sum(p.to_local().numel() for p in model.parameters())
            / sum(p.numel() for p in model.parameters()),
            "names": sorted(name for name, _ in model.named_parameters()),
        }
    return found


def poisoned(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Put a NaN into the loss, then into a gradient, on the last rank only; return what is raised and found.

    `unit` and `operator` put it into the output of a layer, and into what the backward of one makes. `again`
    is what is found when the step is finite, as after a fault that does not recur.
    """
    run = build(recipe, overrides)
    curve(run, 1)
    params = list(run.engine.model.parameters())
    before = [p.detach().to_local().clone() for p in params]
    batches = batches_of(run.plan, run.stream, 1, run.world.rank)
    tokens = run.stream.label_tokens(run.plan.step_positions(1))
    found: dict[str, Any] = {"again": find_sources(run.engine, 1, batches, tokens)}
    whole, mlp = run.engine.loss, decoder_layers(run.engine.model)[1][1].mlp
    of_loss = {"loss": lambda loss: loss * float("nan"), "gradient": spoilt_gradient}
    of_layer = {"unit": lambda out: out * float("nan"), "in a layer": lambda out: out + (out - out.detach()).sqrt()}
    for name, spoil in {**of_loss, **of_layer}.items():

        def loss(batch: Any, *how: Any, name: str = name, spoil: Any = spoil) -> torch.Tensor:
            if run.world.rank < run.world.size - 1 or batch is not batches[1]:
                return whole(batch, *how)
            if name in of_loss:
                return spoil(whole(batch, *how))
            hook = mlp.register_forward_hook(lambda _module, _inputs, output: spoil(output))
            value = whole(batch, *how)
            hook.remove()
            return value

        run.engine.loss = loss
        try:
            list(run.engine.read([run.engine.step(1, batches, tokens, 1e-3)]))
        except NonFiniteError as error:
            after = [p.detach().to_local() for p in params]
            unchanged = all(map(torch.equal, before, after)) and not any(p.grad is not None for p in params)
            sources = find_sources(run.engine, 1, batches, tokens)
            found[name] = {"message": str(error), "unchanged": unchanged, "sources": sources}
    return found


def spoilt_gradient(loss: torch.Tensor) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


def masked(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Compare gradients with and without a micro-batch of no labels; compute the loss of a batch without any label."""
    run = build(recipe, overrides)
    micros = [run.stream.batch(m) for m in run.plan.micro_batches(0, run.world.rank)]
    tokens = run.stream.label_tokens(run.plan.step_positions(0))
    grads = []
    empty = {**micros[0], "labels": torch.full_like(micros[0]["labels"], -100)}
    for batches in (micros, [*micros, empty]):
        run.engine.drop_gradients()
        run.engine.accumulate(0, batches, tokens)
        grads.append([g.clone() for g in run.engine.local_grads()])
    run.engine.drop_gradients()
    [stats] = run.engine.read([run.engine.step(0, [empty], 0, 0.0)])  # a whole window without a label
    return {"equal": all(map(torch.equal, *grads)), "nothing": [stats.loss, stats.grad_norm]}


def edge_cases(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    found = {"poisoned": poisoned(recipe, []), "masked": masked(recipe, [])}
    return found | {name: norms(recipe, overrides) for name, overrides in variants.items()}


def norms(recipe: str, overrides: list[str]) -> list[dict[str, float]]:
    """Make a step of plain SGD that clips gradients to half their norm, and one that may have twice their norm.

    Return for each the gradient norm of the engine (`engine`), that of the gathered gradients (`full`, pytorch#170862),
    and how far the step is from that with the gathered gradients, relative to its length (`off`).
    """
    run = build(recipe, [*overrides, "optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0"])
    params, found = dict(run.engine.model.named_parameters()), []
    batches = [run.stream.batch(m) for m in run.plan.micro_batches(0, run.world.rank)]
    tokens = run.stream.label_tokens(run.plan.step_positions(0))
    for share in (0.5, 2.0):
        before = {name: param.detach().full_tensor().clone() for name, param in params.items()}
        whole = gradients_of(run, 0)
        norm = sum((gradient.double() ** 2).sum() for gradient in whole.values()).sqrt().item()
        run.engine.plan = varied(run.plan, {"optim.max_grad_norm": share * norm})
        [stats] = run.engine.read([run.engine.step(0, batches, tokens, 1.0)])
        wanted = {name: -min(share, 1.0) * gradient for name, gradient in whole.items()}
        off = [params[name].detach().full_tensor() - before[name] - update for name, update in wanted.items()]
        lengths = [torch.nn.utils.get_total_norm(tensors).item() for tensors in (off, wanted.values())]
        found.append({"engine": stats.grad_norm, "full": norm, "off": lengths[0] / lengths[1]})
    return found


def recorded() -> list[str]:
    """Return the collectives of this rank in the flight recorder, in order, with their units."""
    entries = named(recorded_collectives()["gloo"]["entries"], ISSUED)
    return [entry["collective"] for entry in entries if not entry["side"]]
