"""The plans that a search found, as rows, lines and commands for the terminal."""

from __future__ import annotations

import math

from fsdptrain.forecast.search import ALIKE, Advice, Option, words
from fsdptrain.text import size

SHOWN = 8


HEADER = ["", "strategy", "micro-batches", "recomputed", "memory", "a step", "tok/s", "MFU", ""]


TITLES = 2  # leading cells of a row that name the plan


def shown(options: list[Option]) -> list[Option]:
    """Of ranked options the person's own, the best of every strategy, and those that need less than all before them.

    The others are both slower and larger than something shown.
    """
    firsts: dict[str, Option] = {}
    leaner: list[Option] = []
    least = math.inf
    for option in options:
        if option.fits:
            firsts.setdefault(option.strategy, option)
            leaner += [option] if option.needed_bytes < least else []
            least = min(least, option.needed_bytes)
    must = [option for option in options if option.own or option in firsts.values()]
    more = [option for option in leaner if option not in must][: max(0, SHOWN - len(must))]
    return [option for option in options if option in must or option in more]


def rows(options: list[Option]) -> list[list[str]]:
    """The options to show, under `HEADER`, numbered as in `lines`."""
    return [[f"{number}", *_cells(option)] for number, option in enumerate(shown(options), 1)]


def _cells(option: Option) -> list[str]:
    hybrid = f" of {option.shard_size}" if option.strategy.in_groups else ""
    recomputed = option.activation_checkpointing
    marks = {
        "yours": option.own, "does not fit": not option.fits, "only just": option.fits and option.tight,
        f"and {size(option.host_bytes)} of host memory": option.cpu_offload, "approximate": not option.exact,
    }  # fmt: skip
    return [
        option.strategy + hybrid,
        f"{option.accumulation} × {option.micro_batch_size}",
        recomputed if isinstance(recomputed, str) else f"every {recomputed['every']}",
        size(option.needed_bytes),
        f"{option.step_s:.3g} s",
        f"{option.tokens_per_s:,.0f}",
        f"{option.mfu:.1%}",
        ", ".join(mark for mark, holds in marks.items() if holds),
    ]


def lines(advice: Advice) -> list[str]:
    """What to do."""
    best, own = advice.best, next(option for option in advice.options if option.own)
    said = [f"{advice.tried} other plans were looked at; a rank has {size(own.memory_bytes)}"]
    if best is None:
        said.append("none fits")
    elif best.own:
        said.append("your own plan is the fastest that fits")
    elif own.fits and own.step_s < ALIKE * best.step_s:
        said.append("your own plan is as fast as any that fits")
    else:
        gain = f"{own.step_s / best.step_s:.2f} times as fast as yours" if own.fits else "yours does not fit"
        said.append(f"the fastest that fits takes {best.step_s:.3g} s a step, {gain}")
    if advice.failed:
        said.append(f"{len(advice.failed)} of them could not be forecast; the first: {advice.failed[0]}")
    return said


def commands(advice: Advice) -> list[tuple[str, list[str]]]:
    """What a plan is called, and the overrides that make the recipe into it."""
    found = [(f"plan {n}:", words(o.overrides)) for n, o in enumerate(shown(advice.options), 1) if not o.own]
    return found + [
        (
            f"with master weights of 8 significant bits, which changes the numerics, it would fit "
            f"({size(option.needed_bytes)}, {option.step_s:.3g} s a step):",
            words(option.overrides),
        )
        for option in advice.narrower
    ]
