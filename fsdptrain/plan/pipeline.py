"""The order in which a rank of a pipeline computes its forward and backward passes.

The orders are those of GPipe (Huang et al., arXiv:1811.06965), of 1F1B (Narayanan et al., arXiv:2006.09503) and of its
interleaved form (Narayanan et al., arXiv:2104.04473), in which a rank has several stages, here called its chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fsdptrain.config.schema import Parallel


class Pass(NamedTuple):
    """A forward or backward pass of a micro-batch through the stage number `chunk` of a rank."""

    forward: bool
    chunk: int
    micro_batch: int


def passes(parallel: Parallel, place: int, micro_batches: int) -> list[Pass]:
    """Return all passes of a step on the ranks at a place of the pipeline, in order.

    Of micro-batches i, 1F1B and GPipe compute forward and backward in the order of i. The interleaved order takes
    `pipeline` micro-batches through one stage of the rank, then through its next one, and so on.
    """
    ranks, chunks = parallel.pipeline, parallel.stages_of_rank
    forward = forward_passes(parallel, micro_batches)
    backward = [Pass(False, chunks - 1 - each.chunk, each.micro_batch) for each in forward]
    ahead = ranks - 1 - place  # forward passes before the first backward
    if parallel.schedule == "gpipe":
        ahead = len(forward)
    elif chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * ranks
    ahead = min(ahead, len(forward))
    found = forward[:ahead]
    for one_forward, one_backward in zip(forward[ahead:], backward, strict=False):
        found += [one_forward, one_backward]
    return found + backward[len(forward) - ahead :]


def forward_passes(parallel: Parallel, micro_batches: int) -> list[Pass]:
    """Return the forward passes of some micro-batches in order, the same on all ranks."""
    ranks, chunks = parallel.pipeline, parallel.stages_of_rank
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    return [Pass(True, chunk, number) for group in groups for chunk in range(chunks) for number in group]


def step_seconds(
    parallel: Parallel, seconds: Mapping[bool, Sequence[float]], micro_batches: int, message_s: float = 0.0
) -> float:
    """Return when the last rank has made its last pass, if each begins as soon as its rank and its input are ready.

    `seconds` are those of a forward (True) and a backward pass through each stage, `message_s` those of a message.
    """
    lists = {place: passes(parallel, place, micro_batches)[::-1] for place in range(parallel.pipeline)}
    free = dict.fromkeys(lists, 0.0)
    done: dict[tuple[bool, int, int], float] = {}  # of a pass through a stage
    while any(lists.values()):
        before = len(done)
        for place, left in lists.items():
            while left:
                forward, chunk, number = left[-1]
                stage = place + chunk * parallel.pipeline
                begin = free[place]
                if stage != (0 if forward else parallel.stages - 1):  # else the rank has its input
                    before_it = forward, stage + (-1 if forward else 1), number
                    if before_it not in done:
                        break
                    begin = max(begin, done[before_it] + message_s)
                free[place] = done[forward, stage, number] = begin + seconds[forward][stage]
                left.pop()
        if len(done) == before:
            raise RuntimeError("internal error: the ranks of a pipeline wait for one another (please report it)")
    return max(free.values())
