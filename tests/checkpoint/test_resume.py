"""A resumed run is equal to one that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from reference import largest_difference
from support import TINY, events, on_ranks, write_recipe

from fsdptrain.config.optimizers import OptimizerKind

AT, STEPS = 5, 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Return runs over two ranks that saved in the middle: name → (recipe, curve and samples)."""
    made = {}
    for name, config in {"plain": {}, "dropout": {"attention_dropout": 0.2, "tie_word_embeddings": False}}.items():
        tmp = tmp_path_factory.mktemp(name)
        recipe = write_recipe(
            tmp, model__config={"model_type": "llama", **TINY, **config}, train__steps=STEPS,
            train__global_batch_size=12, fsdp__activation_checkpointing="full" if config else "none",
            fsdp__mixed_precision={"param_dtype": "bfloat16" if config else "float32"},
        )  # fmt: skip
        made[name] = (
            recipe,
            on_ranks(2, "save_between", tmp / "ranks", recipe=str(recipe), overrides=[], at=AT, steps=STEPS)[0],
        )
    return made


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(name: str, saved: Any, tmp_path: Path) -> None:
    recipe, whole = saved[name]
    rest = on_ranks(2, "resume", tmp_path, recipe=str(recipe), overrides=[], steps=STEPS)[0]
    assert rest["first"] == AT
    assert rest["curve"] == whole["curve"][AT:]
    assert rest["samples"] == whole["samples"][AT:]


def test_dropout_changes_the_curve_and_not_the_samples(saved: Any) -> None:
    assert saved["plain"][1]["curve"] != saved["dropout"][1]["curve"]
    assert saved["plain"][1]["samples"] == saved["dropout"][1]["samples"]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, []),
        (3, ["fsdp.strategy=SHARD_GRAD_OP"]),
        (4, ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"]),
    ],
)
def test_another_world_size_continues_with_the_same_samples(
    world: int, overrides: list[str], saved: Any, tmp_path: Path
) -> None:
    recipe, whole = saved["plain"]
    rest = on_ranks(world, "resume", tmp_path, recipe=str(recipe), overrides=overrides, steps=STEPS)[0]
    assert rest["samples"] == whole["samples"][AT:]
    assert max(largest_difference(rest["curve"], whole["curve"][AT:])) < 1e-5


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_loaded(saved: Any, tmp_path: Path) -> None:
    recipe, whole = saved["plain"]
    shutil.copytree(recipe.parent / "run", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000008"
    shutil.copytree(tmp_path / "run" / "checkpoints" / f"step-{AT:08}", newest)
    shard = newest / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    overrides = [f"output_dir={tmp_path / 'run'}"]
    rest = on_ranks(2, "resume", tmp_path / "ranks", recipe=str(recipe), overrides=overrides, steps=STEPS)[0]
    assert rest["first"] == AT
    assert rest["curve"] == whole["curve"][AT:]
    assert not newest.exists() and newest.with_name(newest.name + ".damaged").exists()
    event = events(tmp_path / "run", "set_aside")[0]
    assert event["path"] == f"{newest}.damaged" and any("checksum differs" in problem for problem in event["problems"])


@pytest.mark.parametrize("kinds", [["adamw_8bit"], pytest.param(list(OptimizerKind), marks=pytest.mark.soak)])
def test_every_optimizer_resumes_and_skips_a_step_that_is_not_finite(kinds: list[str], tmp_path: Path) -> None:
    recipe = write_recipe(  # rows of 256 and 300 values: some are whole blocks of 8-bit values
        tmp_path, model__config={"model_type": "llama", **TINY, "hidden_size": 256, "intermediate_size": 300},
        optim__lr=1e-3, train__steps=4, train__global_batch_size=6,
    )  # fmt: skip
    variants = {str(kind): [f"optim.name={kind}", f"output_dir={tmp_path / kind}"] for kind in kinds}
    saved = on_ranks(2, "saved_optimizers", tmp_path / "two", recipe=str(recipe), variants=variants, at=2, steps=4)[0]
    others = on_ranks(3, "resumes", tmp_path / "three", recipe=str(recipe), variants=variants, steps=4)[0]
    for name, found in saved.items():
        assert found["first"] == 2 and found["resumed"] == found["curve"][2:], name
        assert found["unchanged"], name
        assert found["stored"] == found["planned"], name
        assert max(largest_difference(others[name], found["curve"][2:])) < 1e-5, name
    assert len({str(found["curve"]) for found in saved.values()}) == len(kinds)
