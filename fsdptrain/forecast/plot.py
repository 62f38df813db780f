"""Plots of memory: the timeline of a step as SVG or PNG, and a bar of its peak for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple, get_args

from rich.text import Text

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.forecast.trace import BEFORE, Alloc, Category, Level, Trace, levels
from fsdptrain.report.charts import fixed_style, require_matplotlib
from fsdptrain.run_folder.files import replaced
from fsdptrain.text import GIB

SUFFIXES = (".svg", ".png")
MAX_POINTS = 1000  # drawn at most, whatever the number of events
MIN_PHASE_WIDTH = 0.08  # fraction of the plot that a phase of the step gets at least
LEGEND_THRESHOLD = 0.001  # fraction of the peak: a smaller category is left out of the legend


class Style(NamedTuple):
    """How a category is drawn: a letter (for terminals without colour), the letter's colour, the area's colour."""

    letter: str
    ink: str
    colour: str


# Stacked from the bottom: what is always allocated, what is allocated per unit, what grows with the tokens. The
# colours are Paul Tol's "muted" scheme, which stays distinct under colour blindness (https://sronpersonalpages.nl/~pault/).
STYLES: dict[Category, Style] = {
    "parameter shards": Style("P", "white", "#332288"),
    "optimizer state": Style("O", "black", "#88ccee"),
    "gradients": Style("G", "white", "#117733"),
    "gathered parameters": Style("W", "black", "#ddcc77"),
    "communication buffers": Style("C", "black", "#999933"),
    "inputs and buffers": Style("I", "black", "#dddddd"),
    "saved activations": Style("A", "black", "#cc6677"),
    "recomputed activations": Style("R", "white", "#882255"),
    "logits and loss": Style("L", "black", "#44aa99"),
    "temporaries": Style("T", "white", "#aa4499"),
}

NON_TENSOR_STYLES = {
    "fragments": Style("F", "black", "#bbbbbb"),
    "outside torch": Style("#", "white", "#555555"),
}

assert STYLES.keys() == set(get_args(Category))


def check_plot_path(path: Path) -> None:
    """Raise RecipeError if no plot can be written to `path`. This is cheap: call it before the long simulation."""
    problem = None
    if path.suffix.lower() not in SUFFIXES:
        problem = f"{path.name!r} must end in .svg or .png"
    elif not path.parent.is_dir():
        problem = f"folder {str(path.parent)!r} does not exist"
    if problem:
        raise RecipeError([Problem(problem, "--plot")])
    require_matplotlib("--plot")


class Phase(NamedTuple):
    """A phase of the step (all of `forward of …` is one `forward`), and where in the plot it begins and ends."""

    name: str
    first: float  # 0 to 1
    last: float
    levels: list[Level]


def draw_timeline(trace: Trace, device: str, capacity: int, path: Path, title: str, granularity: int = 1) -> None:
    """Plot the memory of one step on a device, stacked by category, with a line at the card's `capacity` bytes.

    The suffix of `path` selects SVG or PNG. Raises RecipeError as `check_plot_path` does, or if the file cannot be
    written.
    """
    check_plot_path(path)
    from matplotlib.figure import Figure

    phases = timeline(trace, device, granularity)
    xs = [x for phase in phases for x in _positions(phase)]
    levels = [level for phase in phases for level in phase.levels]
    x, top = max(zip(xs, levels, strict=True), key=lambda place: place[1].allocated)
    # A category below the threshold is neither drawn nor in the legend.
    sizes = {name: [level.by_category.get(name, 0) / GIB for level in levels] for name in STYLES}
    sizes = {name: each for name, each in sizes.items() if max(each) * GIB > LEGEND_THRESHOLD * top.allocated}
    at_peak = {name: f"{top.by_category.get(name, 0) / GIB:.2f}  {name}" for name in sizes}
    with fixed_style():
        # A Figure without pyplot needs no window and no backend, and there is nothing to close.
        figure = Figure(figsize=(11, 5.6), dpi=120)
        axes = figure.add_subplot()
        axes.set_title(textwrap.fill(title, 100))
        colours = [STYLES[name].colour for name in sizes]
        if sizes:
            axes.stackplot([*xs, 1.0], *([*each, each[-1]] for each in sizes.values()), colors=colours,
                           labels=at_peak.values(), step="post", linewidth=0)  # fmt: skip
        axes.axhline(capacity / GIB, color="black", linestyle="--", label=f"device memory {_gib(capacity)} GiB")
        axes.plot(x, top.allocated / GIB, "ko", label=f"peak {_gib(top.allocated)} GiB, {top.moment}")
        for phase in phases[1:]:
            axes.axvline(phase.first, color="black", linewidth=0.6, alpha=0.5)
        middles = [(phase.first + phase.last) / 2 for phase in phases]
        axes.set_xticks(middles, [phase.name for phase in phases], rotation=30, ha="right")
        highest = max(top.allocated, capacity if capacity < 2 * top.allocated else 0)  # one far above is in the legend
        axes.set(xlim=(0, 1), ylim=(0, 1.1 * highest / GIB or 1), ylabel="GiB")
        axes.set_xlabel("allocations and releases of the step, in order (not time)")
        axes.legend(title="GiB at the peak", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, reverse=True)
        try:
            kind = path.suffix.lower().removeprefix(".")
            no_date = {"Date": None} if kind == "svg" else None
            with replaced(path) as file:  # nothing is cut off
                figure.savefig(file, format=kind, metadata=no_date, bbox_inches="tight", pad_inches=0.15)
        except OSError as error:
            raise RecipeError([Problem(f"cannot write {str(path)!r}: {error.strerror}", "--plot")]) from None


def timeline(trace: Trace, device: str, granularity: int = 1) -> list[Phase]:
    """Return the phases of the step, with the memory at its start and after each allocation and release on a device.

    The width of a phase is proportional to its number of events, with a minimum: the loss has few events, but often
    the peak. Sizes are rounded up to `granularity` bytes. There are at most about MAX_POINTS levels.
    """
    # The first is the memory after the last allocation before the step.
    allocated_before = sum(isinstance(event, Alloc) and event.storage.device == device for event in trace.before)
    during = islice(levels(trace, device, granularity), max(0, allocated_before - 1), None)
    points = [level._replace(by_category=dict(level.by_category)) for level in during]
    points = points or [Level(0, BEFORE, {})]
    # Consecutive points of one phase belong together; the phases come once for each micro-batch.
    runs = [(name, [*run]) for name, run in groupby(points, lambda point: phase_of(point.moment))]
    min_width = min(MIN_PHASE_WIDTH, 0.5 / len(runs)) * len(points)
    widths = [max(min_width, len(run)) for _, run in runs]
    edges = [edge / sum(widths) for edge in accumulate(widths, initial=0.0)]
    return [
        Phase(name, first, last, _thinned(run, int(MAX_POINTS * (last - first))))
        for (name, run), (first, last) in zip(runs, pairwise(edges), strict=True)
    ]


def _positions(phase: Phase) -> list[float]:
    """Return where its levels are in the plot: they are evenly spaced."""
    count = len(phase.levels)
    return [phase.first + (phase.last - phase.first) * i / count for i in range(count)]


def _thinned(points: list[Level], limit: int) -> list[Level]:
    """Return the highest of every interval, of which there are `limit`."""
    if len(points) <= limit:
        return points
    edges = [len(points) * i // limit for i in range(limit + 1)]
    return [max(points[a:b], key=lambda point: point.allocated) for a, b in pairwise(edges)]


def phase_of(moment: str) -> str:
    """Return the phase of the step that a moment belongs to: `loss` in both directions, else the text before ` of `."""
    if moment == BEFORE:  # an event of the step before any unit has begun: the forward of the root unit
        return "forward"
    return "loss" if moment.endswith("loss") else moment.partition(" of ")[0]


def memory_bar(by_category: Mapping[Category, int], beside: Mapping[str, int], capacity: int, width: int) -> Text:
    """Return memory as a bar of `width` columns, and below it the sum and a legend with the largest category first.

    The closing `|` marks the end of the card: what does not fit is drawn after it. `beside` has the bytes that no
    tensor holds, under the names in `NON_TENSOR_STYLES`. Categories below LEGEND_THRESHOLD of the sum are not in the
    legend.
    """
    sizes: dict[str, int] = dict(sorted(by_category.items(), key=lambda item: -item[1]))
    sizes |= beside
    total = sum(sizes.values())
    styles = dict[str, Style]([*STYLES.items(), *NON_TENSOR_STYLES.items()])
    inner = max(1, width - 2)
    letters = "".join(
        styles[name].letter * count
        for name, count in zip(sizes, _column_counts([*sizes.values()], inner, capacity), strict=True)
    )
    end = inner if total <= capacity else min(inner - 1, inner * capacity // total)
    style_of_letter = {style.letter: f"{style.ink} on {style.colour}" for style in styles.values()}
    bar = Text("|")
    for letter, run in groupby(letters[:end].ljust(end, ".")):
        bar.append("".join(run), style_of_letter.get(letter, "dim"))
    bar.append("|", "bold")
    bar.append(letters[end:], "bold white on red")
    bar.append(f"\n{_gib(total)} of {_gib(capacity)} GiB: ")
    free = capacity - total
    bar.append(*((f"{_gib(free)} free", "green") if free >= 0 else (f"{_gib(-free)} TOO MUCH", "bold red")))
    in_legend = {name: size for name, size in sizes.items() if size > LEGEND_THRESHOLD * total}
    return bar.append(_legend(in_legend, styles, width))


def _column_counts(sizes: list[int], width: int, capacity: int) -> list[int]:
    """Return how many columns each size takes if `width` columns are the card, or all sizes if they are larger.

    The edges are rounded, not the widths, so that the widths add up to the rounded sum.
    """
    whole, edges = max(capacity, sum(sizes), 1), [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    columns = [(edge * width + whole // 2) // whole for edge in edges]
    return [b - a for a, b in pairwise(columns)]


def _legend(sizes: Mapping[str, int], styles: Mapping[str, Style], width: int) -> Text:
    """Format `A saved activations 24.64  P parameter shards 3.74 …`, broken into lines of at most `width` columns."""
    legend, column = Text(), width
    for name, size in sizes.items():
        label = f" {name} {_gib(size)}"
        if column + 3 + len(label) > width:
            legend.append("\n")
            column = 0
        else:
            legend.append("  ")
            column += 2
        legend.append(styles[name].letter, f"{styles[name].ink} on {styles[name].colour}").append(label)
        column += 1 + len(label)
    return legend


def _gib(size: int) -> str:
    gib = size / GIB
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"
