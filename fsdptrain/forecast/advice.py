"""The plans that a search found, as rows, lines and commands for the terminal."""

from __future__ import annotations

import math

from fsdptrain.forecast.search import MAX_NODES, SAME_TIME, Advice, Option, override_words
from fsdptrain.text import NO_BREAK_SPACE, counted, size

SHOWN = 8  # plans in the table; the own plan and the best of each strategy always are


HEADER = ["", "strategy", "micro-batches", "recomputed", "memory", "a step", "tok/s", "MFU", ""]


TITLES = 2  # the first cells of a row, which name the plan


def shown(options: list[Option]) -> list[Option]:
    """Return the ranked options to show: the own plan, the best of each strategy, and others that need less memory.

    An option that is left out is slower and needs more memory than one that is shown.
    """
    best_of: dict[str, Option] = {}
    leaner: list[Option] = []  # each needs less memory than all faster options
    least = math.inf
    for option in options:
        if option.fits:
            best_of.setdefault(option.strategy, option)
            leaner += [option] if option.needed_bytes < least else []
            least = min(least, option.needed_bytes)
    always = [option for option in options if option.own or option in best_of.values()]
    more = [option for option in leaner if option not in always][: max(0, SHOWN - len(always))]
    return [option for option in options if option in always or option in more]


def rows(options: list[Option]) -> list[list[str]]:
    """Return the table of the options to show, with the columns of `HEADER`, numbered as in `commands`."""
    return [[f"{number}", *_option_cells(option)] for number, option in enumerate(shown(options), 1)]


def _option_cells(option: Option) -> list[str]:
    """Return the cells of an option after its number."""
    hybrid = f" of {option.shard_size}" if option.strategy.in_groups else ""
    recomputed = option.activation_checkpointing
    marks = {
        "yours": option.own, "does not fit": not option.fits, "only just": option.fits and option.tight,
        "hold_shards": option.overrides.get("fsdp.accumulation") == "hold_shards",
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
        ", ".join(mark for mark, applies in marks.items() if applies),
    ]


def lines(advice: Advice) -> list[str]:
    """Return what the search found, in a few lines."""
    best, own = advice.best, next(option for option in advice.options if option.own)
    found = [f"{advice.tried} other plans were tried; a rank has {size(own.memory_bytes)}"]
    if best is None:
        found.append("no plan fits")
    elif best.own:
        found.append("your plan is the fastest that fits")
    elif own.fits and own.step_s < SAME_TIME * best.step_s:
        found.append("your plan is about as fast as the fastest that fits")
    else:
        gain = f"{own.step_s / best.step_s:.2f} times as fast as yours" if own.fits else "yours does not fit"
        found.append(f"the fastest that fits takes {best.step_s:.3g} s a step, {gain}")
    if advice.failed:
        found.append(f"{counted(len(advice.failed), 'plan')} could not be forecast; the first: {advice.failed[0]}")
    return found


def cards_line(advice: Advice, hardware: str) -> str:
    """Return the number of cards that each kind of training needs."""
    found = {kind: str(cards or f"more than {MAX_NODES} nodes") for kind, cards in advice.cards.items()}
    least = ", ".join(f"{kind} {cards}".replace(" ", NO_BREAK_SPACE) for kind, cards in found.items())
    return f"cards of {hardware} that the job needs, without offload: {least}"


def commands(advice: Advice) -> list[tuple[str, list[str]]]:
    """Return, for each plan shown, its title and the overrides that turn the recipe into it."""
    found = [(f"plan {n}:", override_words(o.overrides)) for n, o in enumerate(shown(advice.options), 1) if not o.own]
    return found + [
        (
            f"fits with {leaner.kind.name} ({size(leaner.option.needed_bytes)}, {leaner.option.step_s:.3g} s a step); "
            f"{leaner.kind.effect}:",
            override_words(leaner.option.overrides),
        )
        for leaner in advice.leaner
    ]
