"""Copies of the model: equal before each checkpoint, and each of them on one node."""

from __future__ import annotations

from pathlib import Path

from support import on_ranks, write_recipe


def test_copies_that_become_different_end_the_run_before_a_checkpoint_of_them(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=6, checkpoint__every=2, fsdp__strategy="NO_SHARD")
    variants = {
        "before-save": [],
        "one-copy": ["fsdp.strategy=FULL_SHARD"],
    }
    found = on_ranks(2, "split_while_training", tmp_path / "ranks", recipe=str(recipe), variants=variants)
    assert found[0] == found[1]
    error, checkpoints = found[0]["before-save"]
    assert error.startswith("after step 4 ") and "is not the same on ranks 0 (" in error
    assert checkpoints == [2]
    assert found[0]["one-copy"] == [None, [2, 4, 6]]


def test_a_copy_stays_on_one_node_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path, fsdp__strategy="HYBRID_SHARD", train__global_batch_size=4, train__micro_batch_size=1
    )
    variants = {"default": [], "asked": ["fsdp.shard_size=2"]}
    [found, *_] = on_ranks(
        4, "placed", tmp_path / "ranks", recipe=str(recipe), orders=["aabb", "abab"], variants=variants
    )
    assert found["aabb"] == {"default": [0, ""], "asked": [0, ""]} and found["abab"]["asked"] == [0, ""]
    code, message = found["abab"]["default"]
    assert code == 2 and "ranks 0 and 1, which share a copy, are on a and b" in message
