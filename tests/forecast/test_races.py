"""Streams and the host wait for one another wherever one uses what another has made; see `waits.races`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import waits
from forecast.test_simulate import WAITING
from simulated import SMALL, plan_of
from support import in_process

from fsdptrain.config.optimizers import OptimizerKind

PREFETCHED = {"data__packing": "none", "fsdp__forward_prefetch": 1}
OFFLOADED = {"fsdp__cpu_offload": True, "fsdp__backward_prefetch": "BACKWARD_POST"}
COPIES = {"fsdp__strategy": "HYBRID_SHARD", "fsdp__shard_size": 2, "train__global_batch_size": 16}
SHARED = {
    "parallel__context": 2, "fsdp__activation_checkpointing": "full",
    "fsdp__mixed_precision": {"param_dtype": "bfloat16"},
}  # fmt: skip
KEPT = SHARED | {  # several layers: what the last one keeps is on the device anyway
    "fsdp__activation_checkpointing": {"kind": "full", "offload": True, "keep_attention": True},
    "model__config": SMALL | {"num_hidden_layers": 2},
}


def found(folder: Path, runs: list[tuple[dict[str, Any], str | None]]) -> list[list[str]]:
    """Return the races of runs with these changes, each without one of the waits of `waits.MISSING` if it is named."""
    return list(in_process(races_of, str(folder), runs, timeout=3600))


def races_of(folder: str, runs: list[tuple[dict[str, Any], str | None]]) -> list[list[str]]:
    shape = {"model__config": SMALL | {"num_hidden_layers": 1}}
    return [
        waits.races(plan_of(Path(folder), device="cuda", **(shape | changes)), missing) for changes, missing in runs
    ]


MISSING = {  # wait of `waits.MISSING` that is left out → the race that is found then
    "of the host for the numbers of a step": "read on the host after _to_copy",
    "of a save for its copies": "read on the host after copy_",
    "of the host for offloaded gradients": "_foreach_norm.Scalar on the host after _to_copy",
    "of the computation for collectives": "after _reduce_scatter_base_",
    "of collectives for the computation": "new memory on stream",
}


def test_every_access_waits_for_those_before_it_and_a_missing_wait_is_found(tmp_path: Path) -> None:
    chosen = ["of the host for the numbers of a step", "of collectives for the computation"]
    planted = [(PREFETCHED, wait) for wait in chosen]
    free = [(changes, None) for changes in (PREFETCHED, OFFLOADED | COPIES, KEPT)]
    *raced, prefetched, offloaded, kept = found(tmp_path, [*planted, *free])
    assert prefetched == offloaded == kept == []
    for wait, races in zip(chosen, raced, strict=True):
        assert any(MISSING[wait] in race for race in races), (wait, races[:5])


@pytest.mark.soak
def test_each_missing_wait_is_found(tmp_path: Path) -> None:
    planted = [(OFFLOADED if "offloaded" in wait else PREFETCHED, wait) for wait in MISSING]
    copies = [(KEPT, wait) for wait in MISSING if "collectives" in wait]
    *raced, after, before, shared = found(tmp_path, [*planted, *copies, (SHARED, None)])
    assert shared == []
    assert any("after copy_.default on stream" in race for race in after), after[:5]
    assert any("copy_.default on stream" in race and "_varlen_attn" in race for race in before), before[:5]
    for (wait, expected), races in zip(MISSING.items(), raced, strict=True):
        assert any(expected in race for race in races), (wait, races[:5])


@pytest.mark.soak
def test_every_configuration_is_free_of_races(tmp_path: Path) -> None:
    recomputed = {"fsdp__activation_checkpointing": "full", "fsdp__backward_prefetch": "NONE"}
    matrix = [recomputed, *({"optim__name": kind.value} for kind in OptimizerKind), *WAITING]
    for changes, races in zip(matrix, found(tmp_path, [(changes, None) for changes in matrix]), strict=True):
        assert not races, (changes, races[:5])
