"""What failures of machines cost a run: the checkpoint interval that loses least, and the time left for training.

Failures are independent of one another and equally likely at any time. Then the expected time of a run is known
exactly, and with it the best interval: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22 (2006). Its first term is Young's interval, √(2·δ·M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdptrain.config.hardware import Hardware
from fsdptrain.config.plan import Plan

STORAGE_BW = 1e9  # bytes/s between a node and the storage of checkpoints, assumed: a good network disk


START_S = 300.0  # seconds until the workers of a restart load a checkpoint, assumed: most of it is a replacement node


@dataclass(frozen=True)
class Goodput:
    """A run with failures, and checkpoints at the best interval. Times are in seconds.

    Training waits `blocked_s` for a checkpoint, which is complete `write_s` later. After a failure, `restart_s` pass
    until the work that was lost is repeated. `share` is the part of the time in which new steps are made with a
    checkpoint every `every` steps; `own_share` that with the recipe's `checkpoint.every`, None without one.
    """

    mtbf_hours: float  # of the whole job
    blocked_s: float
    write_s: float
    restart_s: float
    every: int
    share: float
    own_share: float | None


def goodput(plan: Plan, hardware: Hardware, step_s: float, checkpoint_bytes: int, mtbf_hours: float) -> Goodput:
    """Return what failures cost a plan. `mtbf_hours` are the mean hours between failures of a node; the job has all."""
    topology, checkpoint = plan.topology, plan.recipe.checkpoint
    job_s = 3600 * mtbf_hours / topology.nnodes
    # One copy of the model writes a checkpoint; every copy reads it.
    written = checkpoint_bytes / max(1, plan.shard_size // topology.nproc_per_node) / STORAGE_BW
    copied = checkpoint_bytes / plan.shard_size / hardware.pcie_bw
    blocked, write = (copied, written) if checkpoint.async_ else (copied + written, 0.0)
    # What was trained while a checkpoint was being written is lost too, if a failure comes before the next one.
    restart = START_S + written + write
    every = max(1, math.ceil(max(best_interval(blocked, job_s), write) / step_s))

    def share(steps: int) -> float:
        trained = steps * step_s
        between = max(trained, write)  # a checkpoint waits until the one before is complete
        return useful_share(between, blocked, restart, job_s) * trained / between

    own = checkpoint.every
    return Goodput(job_s / 3600, blocked, write, restart, every, share(every), share(own) if own else None)


def best_interval(blocked_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two checkpoints that lose least (Daly 2006)."""
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked_s


def useful_share(interval_s: float, blocked_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of the time in which new steps are made (Daly 2006); 0 if none ever is."""
    try:
        slowdown = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + blocked_s) / mtbf_s) / interval_s
    except OverflowError:
        return 0.0
    return 1 / slowdown
