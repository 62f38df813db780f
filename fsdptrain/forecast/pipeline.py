"""A pipeline in the forecast: which of its stages are simulated, and the time of a step from those of their passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fsdptrain.config.schema import Parallel
from fsdptrain.forecast.timing import Timing
from fsdptrain.model.pipeline import layers_of_stages
from fsdptrain.plan.pipeline import step_seconds


def simulated_places(model: Any, parallel: Parallel) -> list[int]:
    """Return for each place of a pipeline, and for one without, the place whose simulation stands for it.

    The first has the embedding, and the activations of the most micro-batches, the last one the head. Of those between,
    the first that has the most layers stands for all.
    """
    last = parallel.pipeline - 1
    if last < 2:
        return [*range(parallel.pipeline)]
    stages = layers_of_stages(model, parallel)
    layers = [sum(map(len, stages[place :: parallel.pipeline])) for place in range(parallel.pipeline)]
    most = max(range(1, last), key=lambda place: layers[place])
    return [0, *[most] * (last - 1), last]


def time_stages(
    parallel: Parallel, timings: Mapping[int, Timing], places: list[int], micro_batches: int, message_s: float
) -> tuple[Timing, float]:
    """Return the timing of a step of a pipeline, and the share of its passes in which ranks wait for one another.

    `timings` are those of the simulated places as if they waited for nothing, `places` are `simulated_places`, and
    `message_s` are the seconds of a message. Each rank's passes of one direction count as equally long.
    """
    seconds = {
        forward: [
            timings[places[stage % parallel.pipeline]].passes_s[forward] / (micro_batches * parallel.stages_of_rank)
            for stage in range(parallel.stages)
        ]
        for forward in (True, False)
    }
    passes_s = step_seconds(parallel, seconds, micro_batches, message_s)
    rest_s = max(each.step_s - sum(each.passes_s.values()) for each in timings.values())
    busy_s = micro_batches * (sum(seconds[True]) + sum(seconds[False])) / parallel.pipeline
    slowest = max(timings.values(), key=lambda each: each.step_s)
    return dataclasses.replace(slowest, step_s=passes_s + rest_s), 1 - busy_s / passes_s
