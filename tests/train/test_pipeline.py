"""Ranks that have the layers one after another (parallel.pipeline): their schedules, and what reports name."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import build
from support import TINY, on_ranks, planned, write_recipe

from fsdptrain.config.reader import load
from fsdptrain.config.schema import Parallel
from fsdptrain.model.pipeline import balanced
from fsdptrain.parallel.messages import await_message
from fsdptrain.parallel.patches import collective_of
from fsdptrain.plan.pipeline import passes, step_seconds
from fsdptrain.plan.topology import topology_of_job
from fsdptrain.train.nonfinite import find_sources
from fsdptrain.train.prefetch import batches_of

TWO, INTERLEAVED, ONE = "parallel.pipeline=2", "parallel.schedule=interleaved", "train.micro_batch_size=1"

# -------------------------------------------------------------------------------------------------- what is reported


def spoilt(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Make the output of layer 5 not finite, then the gradient there, in the second micro-batch; return the reports."""
    run = build(recipe, overrides)
    batches = batches_of(run.plan, run.stream, 0, run.world.rank)
    layer, found = run.engine.model.get_submodule("model.layers.5"), dict[str, Any]()
    own = next(layer.parameters(), None) is not None  # else another rank has it
    spoils = {"forward": lambda out: out * torch.nan, "backward": lambda out: out + (out - out.detach()).sqrt()}
    for name, spoil in spoils.items():
        passed = itertools.count()

        def hook(
            _layer: Any, _inputs: Any, out: torch.Tensor, passed: Any = passed, spoil: Any = spoil
        ) -> torch.Tensor | None:
            return spoil(out) if next(passed) == 1 else None

        handle = layer.register_forward_hook(hook) if own else None
        found[name] = find_sources(run.engine, 0, batches, 100)
        if handle:
            handle.remove()
    found["again"] = find_sources(run.engine, 0, batches, 100)
    return found


def test_a_report_on_a_nan_names_rank_and_layer(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model__config={"model_type": "llama", **TINY, "num_hidden_layers": 7})
    ranks = on_ranks(2, spoilt, tmp_path, recipe=str(recipe), overrides=[TWO, ONE])
    layer = "model.layers.5"
    for found in ranks:
        [forward], [backward] = found["forward"], found["backward"]
        assert forward == [1, 1, f"the loss is nan, first in the output of {layer}"]
        assert backward[:2] == [1, 1] and re.match(rf"the gradient of {layer}\.", backward[2])
        assert found["again"] == []


def test_a_report_on_a_nan_names_the_stages_of_the_rank(tmp_path: Path) -> None:
    words: dict[str, list[str]] = {" (stage 2 of 2)": [TWO], " (stages 2, 4 of 4)": [TWO, INTERLEAVED], "": []}
    for text, overrides in words.items():
        assert planned(write_recipe(tmp_path), *overrides, ranks=4).stages_text(3) == text


def test_as_many_ranks_start_as_a_batch_has_work_for(tmp_path: Path) -> None:
    recipe = load(write_recipe(tmp_path), [TWO, "train.global_batch_size=2", ONE, "launch.nproc_per_node=auto"]).recipe
    assert topology_of_job(recipe, 1, 8).nproc_per_node == 4


def test_a_report_on_a_hang_names_what_is_waited_for() -> None:
    found = list[str | None]()
    work: Any = SimpleNamespace(wait=lambda: found.append(collective_of(sys._getframe(1))))
    await_message(work, "hidden states of micro-batch 3 from rank 0")
    assert found == ["the pipeline, for hidden states of micro-batch 3 from rank 0"]


# ------------------------------------------------------------------------------------------------------- the schedules

SCHEDULES = [
    Parallel(pipeline=ranks, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    for ranks in (1, 2, 3, 4, 8)
    for schedule, chunks in (("1f1b", None), ("gpipe", None), ("interleaved", 2), ("interleaved", 3))
]


@pytest.mark.parametrize("parallel", SCHEDULES, ids=str)
def test_no_rank_waits_for_ever_and_the_bubble_is_that_of_the_papers(parallel: Parallel) -> None:
    ranks, chunks = parallel.pipeline, parallel.stages_of_rank
    for rounds in range(1, 7):
        micro_batches = ranks * rounds
        for place in range(ranks):
            order = passes(parallel, place, micro_batches)
            assert len({*order}) == len(order) == 2 * chunks * micro_batches
            for each in order:  # backward comes after forward
                assert each.forward or order.index(each) > order.index(each._replace(forward=True))
        even = {True: [1.0] * parallel.stages, False: [2.0] * parallel.stages}
        work = 3.0 * chunks * micro_batches
        # (P - 1) / (M + P - 1) of the step; of interleaved stages, (P - 1) / (M · chunks + P - 1)
        assert step_seconds(parallel, even, micro_batches) == pytest.approx(work + 3.0 * (ranks - 1))
        uneven = {way: [1.0 + stage % 3 for stage in range(parallel.stages)] for way in (True, False)}
        slowest = max(sum(uneven[True][place::ranks]) for place in range(ranks))
        assert step_seconds(parallel, uneven, micro_batches) >= 2 * micro_batches * slowest
    if parallel.schedule != "interleaved":  # any number of micro-batches
        for micro_batches in range(1, 2 * ranks):
            step_seconds(parallel, {True: [1.0] * ranks, False: [2.0] * ranks}, micro_batches)


@pytest.mark.parametrize("place", range(4))
def test_1f1b_keeps_the_activations_of_few_micro_batches(place: int) -> None:
    kept, most = 0, 0
    for each in passes(Parallel(pipeline=4), place, 32):
        kept += 1 if each.forward else -1
        most = max(most, kept)
    assert most == 4 - place


@pytest.mark.parametrize("head", [0, 1, 5, 30])
def test_layers_are_balanced(head: int) -> None:
    costs = [3, 3, 1, 1, 2, 5, 2, 1]
    for stages in range(1, 9):
        counts = balanced(costs, head, stages)
        assert sum(counts) == 8 and min(counts) >= 1
        every = [
            [*(b - a for a, b in itertools.pairwise((0, *cuts, 8)))]
            for cuts in itertools.combinations(range(1, 8), stages - 1)
        ]
        assert longest(counts, costs, head) == min(longest(each, costs, head) for each in every)


def longest(counts: list[int], costs: list[int], head: int) -> int:
    ends = [*itertools.accumulate(counts)]
    times = [sum(costs[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    return max([*times[:-1], times[-1] + head])
