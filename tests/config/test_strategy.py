"""What each strategy means: read off real meshes and plans, the document, and the module that alone knows the names."""

from __future__ import annotations

import re

import pytest
from support import ROOT

from fsdptrain.config.keys import json_schema, unused_with
from fsdptrain.config.strategy import Strategy

DOCUMENT = ROOT / "docs" / "from-fsdp1.md"
RANKS = {  # strategy → ranks per copy on 2 nodes × 4 ranks, without and with shard_size: 2
    "FULL_SHARD": (8, 8), "SHARD_GRAD_OP": (8, 8), "HYBRID_SHARD": (4, 2), "HYBRID_SHARD_ZERO2": (4, 2),
    "NO_SHARD": (1, 1),
}  # fmt: skip
RESHARDING = {"FULL_SHARD", "HYBRID_SHARD"}


def test_the_recipe_takes_these_words() -> None:
    assert [strategy.name for strategy in Strategy] == [strategy.value for strategy in Strategy] == list(RANKS)
    assert json_schema()["properties"]["fsdp"]["properties"]["strategy"]["enum"] == list(RANKS)


@pytest.mark.parametrize("strategy", Strategy)
def test_ranks_per_copy_and_the_sizes_to_try(strategy: Strategy) -> None:
    assert (strategy.ranks_per_copy(None, 8, 4), strategy.ranks_per_copy(2, 8, 4)) == RANKS[strategy]
    assert strategy.reshards == (strategy in RESHARDING)
    assert strategy.replicates == (RANKS[strategy][0] < 8)
    assert strategy.in_groups == (RANKS[strategy][0] != RANKS[strategy][1])
    assert strategy.sizes_to_try(2, 4) == [RANKS[strategy][0]]


def test_groups_to_try_divide_the_nodes_and_are_neither_one_rank_nor_all() -> None:
    assert Strategy.HYBRID_SHARD.sizes_to_try(12, 1) == [2, 3, 4, 6]
    assert Strategy.HYBRID_SHARD.sizes_to_try(1, 8) == []
    assert Strategy.SHARD_GRAD_OP.sizes_to_try(1, 1) == []  # the same as NO_SHARD
    assert Strategy.FULL_SHARD.sizes_to_try(1, 1) == [1]


def test_keys_without_effect_follow_from_what_a_strategy_gathers() -> None:
    assert {strategy.value: unused_with("fsdp.strategy", strategy) for strategy in Strategy} == {
        "FULL_SHARD": {"fsdp.shard_size": None, "fsdp.bucket_cap_mb": None},
        "SHARD_GRAD_OP": {
            "fsdp.shard_size": None, "fsdp.backward_prefetch": "NONE", "fsdp.bucket_cap_mb": None,
        },
        "HYBRID_SHARD": {"fsdp.bucket_cap_mb": None},
        "HYBRID_SHARD_ZERO2": {
            "fsdp.backward_prefetch": "NONE", "fsdp.bucket_cap_mb": None,
        },
        "NO_SHARD": {
            "fsdp.shard_size": None, "fsdp.forward_prefetch": 0, "fsdp.backward_prefetch": "NONE",
        },
    }  # fmt: skip


def test_the_document_has_each_with_its_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(?:.*)\| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    described = {name: meaning for name, meaning in rows if name in RANKS}
    assert described == {strategy.value: strategy.meaning for strategy in Strategy}
