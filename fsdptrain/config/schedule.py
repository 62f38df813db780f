"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from fsdptrain.config.schema import Optim, Schedule

WSD_DECAY = 0.2  # the last fifth of a warm-up–stable–decay schedule decays


def learning_rate(step: int, total: int, optim: Optim, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up, then constant, linear or cosine decay to `min_lr`·lr at the last step, or WSD: constant, then
    linear decay over the last 20%, at least the last step (Hägele et al., arXiv:2405.18392). A run of a single step
    without warm-up has the peak rate.
    """
    warmup = warmup_steps(total, schedule)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if schedule.name == "constant" or total == 1:
        return optim.lr
    first = max(warmup, min(round(total * (1 - WSD_DECAY)), total - 2)) if schedule.name == "wsd" else warmup
    # From 0 to 1; if a single step follows the warm-up, whose last step has the peak rate, it is the end.
    decayed = max(0.0, (step - first) / (total - 1 - first)) if first < total - 1 else 1.0
    shape = 0.5 * (1 + math.cos(math.pi * decayed)) if schedule.name == "cosine" else 1 - decayed
    return optim.lr * (schedule.min_lr + (1 - schedule.min_lr) * shape)


def warmup_steps(total: int, schedule: Schedule) -> int:
    """Return the length of the warm-up in steps, which may exceed `total`; a setting below 1 is a fraction of it."""
    return round(schedule.warmup * total) if schedule.warmup < 1 else round(schedule.warmup)


def warmup_note(total: int, optim: Optim, schedule: Schedule) -> str | None:
    """Return a note if the warm-up is longer than the run, so that the rate never reaches `optim.lr`; else None."""
    warmup = warmup_steps(total, schedule)
    if warmup <= total:
        return None
    highest = learning_rate(total - 1, total, optim, schedule)
    return (
        f"schedule.warmup: the warm-up has {warmup:,} steps and the run {total:,}, so the learning rate rises to "
        f"{highest:.2g} only, not to optim.lr ({optim.lr:g}); a fraction below 1 counts from the length of the run"
    )


def length_note(step: int, before: int, total: int, optim: Optim, schedule: Schedule) -> str | None:
    """Return a note if a resume after `step` steps changes the rate, because the run has another length than `before`.

    None if the last step would have had the same rate, within 1%, in a run of `total` steps.
    """
    if not step:
        return None
    had, would_have_had = (learning_rate(step - 1, steps, optim, schedule) for steps in (before, total))
    if math.isclose(had, would_have_had, rel_tol=0.01):
        return None
    return (
        f"the schedule has {total:,} steps now and had {before:,}: the learning rate goes from {had:.2e} in step "
        f"{step:,} to {learning_rate(step, total, optim, schedule):.2e} in the next"
    )
