"""The plan: all arithmetic of a run, through JSON and back; every shipped recipe planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import ROOT, SHAKESPEARE, plan_here, planned, write_recipe

from fsdptrain.config.optimizers import Weight
from fsdptrain.config.reader import load
from fsdptrain.errors import DataError, RecipeError
from fsdptrain.launch.run_lock import check_inputs
from fsdptrain.model.skeleton import seed_of
from fsdptrain.plan.plan import Plan, fastest_on_one_gpu, make_plan
from fsdptrain.plan.topology import Topology, find_topology

SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_planned(path: Path) -> None:
    on_cpu = "--hardware" not in path.read_text()
    gpus = ",".join(map(str, range(4 if "4x80gb" in path.stem else 1 if "8b-lora" in path.stem else 8)))
    overrides = [] if on_cpu else [f"data.path={SHAKESPEARE}"]
    for key, words in {"model": "\n  id: runs/", "teacher": "teacher: {id: runs/"}.items():  # runs not made here
        overrides += [f"{key}.id=org/name"] if words in path.read_text() else []
    overrides += ["launch.rdzv_endpoint=node0:29500"] if "nnodes" in path.read_text() else []
    plan = plan_here(path, *overrides, **({} if on_cpu else {"CUDA_VISIBLE_DEVICES": gpus}))
    recipe = plan.recipe
    assert plan.replicas * plan.shard_size == plan.topology.world_size
    batch = plan.accumulation * recipe.train.micro_batch_size * plan.topology.world_size
    assert batch == recipe.train.global_batch_size * recipe.parallel.ranks_of_row
    assert plan.topology.device == ("cpu" if on_cpu else "cuda")
    assert plan.compiles == (not on_cpu)  # train.compile: auto
    assert Plan.from_json(plan.to_json()) == plan


def test_one_gpu_with_room_keeps_its_weights_gathered(tmp_path: Path) -> None:
    def suited(*overrides: str, device: Any = "cuda", ranks: int = 1, billions: float = 3) -> tuple[str, str]:
        written = load(write_recipe(tmp_path, train__global_batch_size=8), overrides)
        plan = fastest_on_one_gpu(
            make_plan(written, Topology(device, 1, ranks)), [Weight((int(billions * 1e6), 1000))], 80 * 2**30
        )
        return plan.recipe.fsdp.strategy, plan.recipe.fsdp.accumulation

    bf16 = "fsdp.mixed_precision.param_dtype=bfloat16"
    assert suited(bf16) == ("SHARD_GRAD_OP", "hold")  # 18 bytes a parameter
    assert suited(billions=4) == ("SHARD_GRAD_OP", "hold")  # 16, without a copy in another dtype
    assert suited(bf16, billions=4) == suited(billions=4.1) == ("FULL_SHARD", "reduce")  # no room
    assert suited(bf16, "fsdp.cpu_offload=true") == suited(bf16, device="cpu") == ("FULL_SHARD", "reduce")
    assert suited(bf16, ranks=2) == ("FULL_SHARD", "reduce")
    assert suited(bf16, "fsdp.strategy=NO_SHARD") == ("NO_SHARD", "reduce")


def test_what_does_not_divide_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, launch={"nproc_per_node": 3})
    with pytest.raises(RecipeError, match=r"recipe\.yaml:\d+: train\.global_batch_size: .*3 ranks.*use 6 or 9"):
        plan_here(recipe)
    with pytest.raises(RecipeError, match=r"fsdp\.shard_size: 2 does not divide 3 ranks; use one of 1, 3"):
        plan_here(recipe, "train.global_batch_size=6", "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2")
    with pytest.raises(RecipeError, match="3 workers, but only 2 GPUs"):
        plan_here(recipe, CUDA_VISIBLE_DEVICES="0,1")


def test_missing_data_and_models_are_refused_before_the_start(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    missing = {
        "data.path": ["data.path=nope.jsonl"],
        "data.eval.path": ["data.eval={path: nope.jsonl}"],
        "data.sources: nope": ["data.path=null", "data.sources=[{path: nope.jsonl}]"],
    }
    for key, words in missing.items():
        with pytest.raises(DataError, match=rf"^{key}: 'nope\.jsonl' was not found"):
            plan_here(recipe, *words)
    with pytest.raises(RecipeError, match=r"model\.id: 'runs/nope/export' does not exist, .* run that recipe first"):
        plan_here(recipe, "model.id=runs/nope/export")
    assert plan_here(recipe, "data.path=openai/gsm8k:main:test").data_path == "openai/gsm8k:main:test"


def test_a_relative_path_is_searched_next_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(tmp_path, data__path="text.jsonl")
    assert plan_here(recipe).data_path == str(tmp_path / "text.jsonl")
    here = tmp_path / "here"
    here.mkdir()
    (here / "text.jsonl").write_text("{}")
    monkeypatch.chdir(here)
    assert plan_here(recipe).data_path == str(here / "text.jsonl")


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (2, 2), (8, 2)])
@pytest.mark.parametrize("name", ["shakespeare", "gsm8k-sft", "speakers", "speakers-lora"])
def test_the_small_recipes_run_on_any_number_of_gpus(name: str, count: int, workers: int, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for number in range(count):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    written = load(ROOT / "recipes" / f"{name}.yaml", [] if name == "shakespeare" else ["model.id=org/name"])
    topology = find_topology(written.recipe, {}, root=tmp_path)
    assert topology == Topology("cuda", 1, workers)
    make_plan(written, topology)  # raises unless the global batch can be divided


@pytest.mark.parametrize(
    ("train", "world", "sequences", "way_out"),
    [
        ({"global_batch_size": 64, "epochs": 1}, 2, 11, "but one epoch has 11: use 10 or less"),
        ({"global_batch_size": 64, "epochs": 5}, 2, 9, "64 sequences, but one epoch has 9: use 8 or less"),
        ({"global_batch_size": 96, "epochs": 1, "micro_batch_size": 3}, 1, 95, "use 93 or less"),
        ({"global_batch_size": 8, "epochs": 1}, 8, 7, "use fewer ranks, a smaller train.micro_batch_size"),
        ({"global_batch_size": 8, "epochs": 1}, 2, 8, None),
        ({"global_batch_size": 64, "steps": 3}, 2, 11, None),
    ],
)
def test_a_batch_larger_than_an_epoch_is_a_problem_with_a_fitting_one(
    tmp_path: Path, train: dict[str, Any], world: int, sequences: int, way_out: str | None
) -> None:
    plan = planned(write_recipe(tmp_path, train=train), ranks=world)
    problem = plan.length_problem(sequences)
    assert (problem is None) == (way_out is None)
    assert problem is None or (problem.field == "train.global_batch_size" and way_out and way_out in problem.message)


def test_few_steps_and_rows_that_a_step_repeats_are_notes(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train={"global_batch_size": 8, "epochs": 2})
    assert plan_here(recipe).length_notes(400) == []
    patient = "data.eval={fraction: 0.1}", "eval.every=40", "eval.patience=3"
    assert "patience: 3 ends no run that has only 3 evaluations" in plan_here(recipe, *patient).length_notes(400)[0]
    assert plan_here(recipe, *patient[:2], "eval.patience=2").length_notes(400) == []
    assert "only 19 optimizer steps in all" in plan_here(recipe).length_notes(76)[0]
    assert plan_here(recipe, "train.steps=3").length_notes(8) == []
    assert "reads the data (5 sequences) 1.6 times" in plan_here(recipe, "train.steps=3").length_notes(5)[0]


def test_a_list_of_files_is_a_data_path(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "more.jsonl").write_text('{"text": "a"}\n')
    plan = plan_here(recipe, "data.path=[text.jsonl, more.jsonl, 's3://bucket/x']")
    found = [str(tmp_path / "text.jsonl"), str(tmp_path / "more.jsonl"), "s3://bucket/x"]
    assert plan.data_path == found and Plan.from_json(plan.to_json()) == plan
    assert plan.identity()["data.path"] == ["text.jsonl", "more.jsonl", "s3://bucket/x"] and plan.hub_names() == []
    with pytest.raises(RecipeError, match=r"data\.path: 'org/data' .* a list cannot hold data sets of the Hub"):
        plan_here(recipe, "data.path=[text.jsonl, org/data]")
    with pytest.raises(RecipeError, match=r"data\.path: '\$HOME/x': variables"):
        load(recipe, ["data.path=[text.jsonl, $HOME/x]"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(RecipeError, match=r"data\.path: .*/run/x\.jsonl is inside output_dir"):
        check_inputs(plan := plan_here(recipe, "data.path=[text.jsonl, run/x.jsonl]"), plan.rundir)


def test_steps_cover_every_sequence_at_least_epochs_times(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train={"global_batch_size": 8, "epochs": 2})
    plan = plan_here(recipe)
    assert [plan.total_steps(sequences) for sequences in (1, 4, 5, 400)] == [1, 1, 2, 100]
    assert plan_here(recipe, "train.epochs=0.5").total_steps(400) == 25
    recipe = write_recipe(tmp_path, train={"global_batch_size": 8, "steps": 7})
    assert plan_here(recipe).total_steps(400) == 7


def test_the_identity_has_what_a_resume_must_not_change(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    same = ("optim.lr=1", "train.steps=99", "fsdp.strategy=NO_SHARD", "train.micro_batch_size=2", "eval.every=null")
    other = ("seed=1", "data.seq_len=32", "model.dtype=bfloat16", "train.global_batch_size=16", "data.train_on=all")
    before = plan_here(recipe).identity()
    assert all(plan_here(recipe, change).identity() == before for change in same)
    assert all(plan_here(recipe, change).identity() != before for change in other)


def test_frozen_weights_are_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    trained = [Weight((30, 40)), Weight((7,), decays=False, matrix=False)]
    frozen = [Weight((500, 600), trained=False), Weight((9, 9), trained=False, quantised=True)]
    found = plan_here(write_recipe(tmp_path)).state_bytes([*frozen, *trained])
    assert found == 3 * 4 * (30 * 40 + 7)  # weights and AdamW's two moments, in float32


def test_seeds_of_different_parts_differ() -> None:
    seeds = {seed_of(a, b, c) for a in range(10) for b in range(10) for c in ("x", "y")}
    assert len(seeds) == 200 and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, "23") != seed_of(12, "3")


def test_a_revision_belongs_to_a_hub_data_set(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    plan = plan_here(recipe, "data.path=org/name:de", "data.revision=v2", "data.eval={path: org/name:de:test}")
    assert (plan.data_path, plan.eval_path) == ("org/name:de@v2", "org/name:de:test@v2")
    assert plan_here(recipe, "data.path=org/name", "data.eval={path: org/other}").eval_path == "org/other"
    newest = plan_here(recipe, "data.path=org/name:de", "data.eval={path: org/name:de:test}")
    assert plan.identity() == newest.identity()
    with pytest.raises(RecipeError, match=r"data.revision: has no effect: data.path is not a Hub data set"):
        plan_here(recipe, "data.revision=v2")


# --- a range of nodes ------------------------------------------------------------------------------------------------

HOSTS = ["launch.nnodes=1:3", "launch.nproc_per_node=2", "launch.rdzv_endpoint=a:1", "launch.max_restarts=3"]


def test_with_a_range_of_nodes_every_number_of_them_makes_the_same_global_batch(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__global_batch_size=12, fsdp__strategy="HYBRID_SHARD")
    plan = plan_here(recipe, *HOSTS)
    assert Plan.from_json(plan.to_json()) == plan
    assert [(p.topology.nnodes, p.replicas, p.shard_size, p.accumulation) for p in plan.on_each_number()] == [
        (3, 3, 2, 2), (2, 2, 2, 3), (1, 1, 2, 6),
    ]  # fmt: skip
    for each in plan.on_each_number():
        ranks = range(each.topology.world_size)
        positions = [n for rank in ranks for batch in each.micro_batches(5, rank) for n in batch]
        assert sorted(positions) == [*plan.step_positions(5)]
        assert each.identity() == plan.identity() and each == each.on_nodes(each.topology.nnodes)
        assert plan.of_attempt({"world_size": len(ranks)}) == each
    assert len({each.digest() for each in plan.on_each_number()}) == 3


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["train.global_batch_size=8"],
            "launch.nnodes: 1:3: on 3 nodes, train.global_batch_size: 8 sequences do not divide over 6 ranks × "
            "micro-batches of 1; use a multiple of 12, which divides over every number of nodes, or another range",
        ),
        (
            ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=4"],
            "launch.nnodes: 1:3: on 3 nodes, fsdp.shard_size: 4 does not divide 6 ranks",
        ),
        (["launch.max_restarts=0"], "launch.nnodes: has no effect without launch.max_restarts"),
    ],
)
def test_a_range_with_a_number_of_nodes_that_cannot_run_is_refused(
    overrides: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as refused:
        plan_here(write_recipe(tmp_path, train__global_batch_size=12), *HOSTS, *overrides)
    assert says in str(refused.value)
