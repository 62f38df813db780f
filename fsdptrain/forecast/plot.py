"""A plot of memory: the timeline of a step as SVG or PNG."""

from __future__ import annotations

import textwrap
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from typing import NamedTuple, get_args

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.forecast.trace import BEFORE, Alloc, Category, Level, Trace, levels
from fsdptrain.report.charts import fixed_style
from fsdptrain.run_folder.files import replaced
from fsdptrain.text import GIB

SUFFIXES = (".svg", ".png")
MAX_POINTS = 1000  # drawn at most, whatever the number of events
MIN_PHASE_WIDTH = 0.08  # fraction of the plot that a phase of the step gets at least
LEGEND_THRESHOLD = 0.001  # fraction of the peak: a smaller category is left out of the legend


# Stacked from the bottom: what is always allocated, what is allocated per unit, what grows with the tokens. The
# colours are Paul Tol's "muted" scheme, which stays distinct under colour blindness (https://sronpersonalpages.nl/~pault/).
COLOURS: dict[Category, str] = {
    "parameter shards": "#332288",
    "optimizer state": "#88ccee",
    "gradients": "#117733",
    "gathered parameters": "#ddcc77",
    "communication buffers": "#999933",
    "inputs and buffers": "#dddddd",
    "saved activations": "#cc6677",
    "recomputed activations": "#882255",
    "logits and loss": "#44aa99",
    "temporaries": "#aa4499",
}

assert COLOURS.keys() == set(get_args(Category))


def check_plot_path(path: Path) -> None:
    """Raise RecipeError if no plot can be written to `path`. This is cheap: call it before the long simulation."""
    problem = None
    if path.suffix.lower() not in SUFFIXES:
        problem = f"{path.name!r} must end in .svg or .png"
    elif not path.parent.is_dir():
        problem = f"folder {str(path.parent)!r} does not exist"
    if problem:
        raise RecipeError([Problem(problem, "--plot")])


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
    xs = [
        phase.first + (phase.last - phase.first) * i / len(phase.levels)
        for phase in phases
        for i in range(len(phase.levels))
    ]
    levels = [level for phase in phases for level in phase.levels]
    x, top = max(zip(xs, levels, strict=True), key=lambda place: place[1].allocated)
    # A category below the threshold is neither drawn nor in the legend.
    sizes = {name: [level.by_category.get(name, 0) / GIB for level in levels] for name in COLOURS}
    sizes = {name: each for name, each in sizes.items() if max(each) * GIB > LEGEND_THRESHOLD * top.allocated}
    at_peak = {name: f"{top.by_category.get(name, 0) / GIB:.2f}  {name}" for name in sizes}
    with fixed_style():
        # A Figure without pyplot needs no window and no backend, and there is nothing to close.
        figure = Figure(figsize=(11, 5.6), dpi=120)
        axes = figure.add_subplot()
        axes.set_title(textwrap.fill(title, 100))
        colours = [COLOURS[name] for name in sizes]
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


def _gib(size: int) -> str:
    gib = size / GIB
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"
