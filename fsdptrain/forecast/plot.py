"""Plots of memory: the timeline of a step as SVG or PNG, and a bar of its peak for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rich.text import Text

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.forecast.memory import BEFORE, levels
from fsdptrain.forecast.trace import Alloc, Category, Trace
from fsdptrain.report.charts import fixed_style, require_matplotlib
from fsdptrain.run_folder.files import replaced
from fsdptrain.text import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SUFFIXES = (".svg", ".png")
MAX_POINTS = 2000  # drawn at most, whatever the number of events
MIN_PHASE_WIDTH = 0.08  # fraction of the plot that a phase of the step gets at least
LEGEND_THRESHOLD = 0.001  # fraction of the peak: a smaller category is left out of the legend
FIGURE_SPACE = "\u2007"  # a space as wide as a digit


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


class Point(NamedTuple):
    """Memory after one event of the step: the moment, and bytes by category in the order of STYLES."""

    moment: str
    stack: tuple[int, ...]

    @property
    def allocated(self) -> int:
        """Bytes of all categories."""
        return sum(self.stack)


class Phase(NamedTuple):
    """A phase of the step (all of `forward of …` is one `forward`) and its horizontal position in the plot: 0 to 1."""

    name: str
    first: float
    last: float
    points: list[Point]

    def positions(self) -> Iterator[tuple[float, Point]]:
        """Yield every point with its horizontal position; the points are evenly spaced."""
        for i, point in enumerate(self.points):
            yield self.first + (self.last - self.first) * i / len(self.points), point


def draw_timeline(trace: Trace, device: str, capacity: int, path: Path, title: str, granularity: int = 1) -> None:
    """Plot the memory of one step on a device, stacked by category, with a line at the card's `capacity` bytes.

    The suffix of `path` selects SVG or PNG. Raises RecipeError as `check_plot_path` does, or if the file cannot be
    written.
    """
    check_plot_path(path)
    from matplotlib.figure import Figure

    phases = [
        phase._replace(points=thin(phase.points, phase.last - phase.first))
        for phase in timeline(trace, device, granularity)
    ]
    with fixed_style():
        # A Figure without pyplot needs no window and no backend, and there is nothing to close.
        figure = Figure(figsize=(11, 5.6), dpi=120)
        axes = figure.add_axes((0.06, 0.07, 0.68, 0.75))
        figure.text(0.06, 0.985, textwrap.fill(title, 100), fontsize=12, va="top")
        points = [point for phase in phases for point in phase.positions()]
        top_x, top = max(points, key=lambda point: point[1].allocated)
        _draw_stack(axes, points, top)
        # The label of the capacity goes to the left if the label of the peak leaves room there.
        _draw_capacity(axes, top.allocated, capacity, left=0.2 < top_x <= 0.5 or top_x > 0.8)
        _draw_peak(axes, top_x, top)
        _draw_phases(axes, phases)
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
    the peak. Sizes are rounded up to `granularity` bytes.
    """
    # The first point is the memory after the last allocation before the step.
    allocated_before = sum(isinstance(event, Alloc) and event.storage.device == device for event in trace.before)
    during = islice(levels(trace, device, granularity), max(0, allocated_before - 1), None)
    points = [Point(level.moment, tuple(level.by_category.get(name, 0) for name in STYLES)) for level in during]
    # Consecutive points of one phase belong together; the phases come once for each micro-batch.
    runs = [(name, [*run]) for name, run in groupby(points, lambda point: phase_of(point.moment))]
    if not runs:
        return [Phase("nothing", 0.0, 1.0, [Point(BEFORE, (0,) * len(STYLES))])]
    min_width = min(MIN_PHASE_WIDTH, 0.5 / len(runs)) * len(points)
    widths = [max(min_width, len(run)) for _, run in runs]
    edges = [edge / sum(widths) for edge in accumulate(widths, initial=0.0)]
    return [Phase(name, *ends, run) for (name, run), ends in zip(runs, pairwise(edges), strict=True)]


def thin(points: list[Point], share: float) -> list[Point]:
    """Reduce the points to at most `share` of MAX_POINTS; keep both ends and the highest point of every interval."""
    limit = max(3, int(MAX_POINTS * share))
    if len(points) <= limit:
        return points
    inner, intervals = points[1:-1], limit - 2
    edges = [len(inner) * i // intervals for i in range(intervals + 1)]
    highest = [max(inner[a:b], key=lambda point: point.allocated) for a, b in pairwise(edges)]
    return [points[0], *highest, points[-1]]


def phase_of(moment: str) -> str:
    """Return the phase of the step that a moment belongs to: `loss` in both directions, else the text before ` of `."""
    if moment == BEFORE:  # an event of the step before any unit has begun: the forward of the root unit
        return "forward"
    return "loss" if moment.endswith("loss") else moment.partition(" of ")[0]


def _draw_stack(axes: Axes, points: list[tuple[float, Point]], top: Point) -> None:
    """Draw the areas from the top of the stack down, and a legend with the size of each category at the peak."""
    decimals = 2 if top.allocated >= GIB else 4
    for i, (name, style) in reversed([*enumerate(STYLES.items())]):
        if max(point.stack[i] for _, point in points) > LEGEND_THRESHOLD * top.allocated:
            size = f"{top.stack[i] / GIB:.{decimals}f}".rjust(6).replace(" ", FIGURE_SPACE)
            outline = _outline([(x, sum(point.stack[: i + 1]) / GIB) for x, point in points])
            axes.fill(*zip(*outline, strict=True), color=style.colour, linewidth=0, label=f"{size}  {name}")
    if axes.patches:
        axes.legend(
            title="GiB at the peak", alignment="left", loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0,
            frameon=False, handlelength=1.2,
        )  # fmt: skip


def _outline(heights: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the area under a step function given as (x, height); equal heights add no corner."""
    corners, current = [(0.0, 0.0)], 0.0
    for x, height in heights:
        if height != current:
            corners += [(x, current), (x, height)]
            current = height
    return [*corners, (1.0, current), (1.0, 0.0)]


def _draw_capacity(axes: Axes, peak: int, capacity: int, left: bool) -> None:
    """Set up the axes and draw a dashed line at the card's memory, or only a label if that is far above the stack."""
    limit, highest = capacity / GIB, peak / GIB or 1.0
    far = limit > 4 * highest
    axes.set(xlim=(0, 1), ylim=(0, 1.25 * highest if far else max(1.25 * highest, 1.08 * limit)), xticks=[])
    axes.set_xlabel("allocations and releases of the step, in order (not time)")
    axes.set_ylabel("GiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="black", alpha=0.15, linewidth=0.6)
    if not far:
        axes.axhline(limit, color="black", linestyle=(0, (6, 4)), linewidth=1.2, zorder=4)
    axes.annotate(
        f"device memory {_gib(capacity)} GiB" + (", far above" if far else ""),
        (0 if left else 1, axes.get_ylim()[1] if far else limit), xycoords=("axes fraction", "data"),
        xytext=(6 if left else -6, -4), textcoords="offset points", ha="left" if left else "right", va="top",
        zorder=6, bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip


def _draw_peak(axes: Axes, x: float, top: Point) -> None:
    """Draw a dot at the peak and, on the side with more room, its size and moment."""
    left = x > 0.5
    axes.plot(x, top.allocated / GIB, "o", color="black", markersize=4, clip_on=False, zorder=5)
    axes.annotate(
        f"peak {_gib(top.allocated)} GiB\n{top.moment}", (x, top.allocated / GIB), xytext=(-16 if left else 16, 8),
        textcoords="offset points", ha="right" if left else "left", va="bottom", zorder=6,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "black", "linewidth": 0.8},
        arrowprops={"arrowstyle": "-", "color": "black", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2},
    )  # fmt: skip


def _draw_phases(axes: Axes, phases: list[Phase]) -> None:
    """Draw a bracket over each phase of the step; a name that would touch its neighbour moves up a row."""
    row_ends: list[float] = []  # the right end of the last name in every row, in pixels
    transform = axes.get_xaxis_transform()  # x in data coordinates, y as a fraction of the axes
    line: dict[str, Any] = {"transform": transform, "color": "black", "clip_on": False}
    for phase in phases:
        middle = (phase.first + phase.last) / 2
        axes.plot([phase.first + 0.001, phase.last - 0.001], [1.02, 1.02], linewidth=2, solid_capstyle="butt", **line)
        axes.axvline(phase.first, color="black", linewidth=0.6, alpha=0.5, zorder=3)
        label = axes.text(
            middle, 1.03, phase.name.replace(" ", "\n"), transform=transform, ha="center", va="bottom", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        box = label.get_window_extent()
        row = next((i for i, end in enumerate(row_ends) if end + 4 < box.x0), len(row_ends))
        row_ends[row : row + 1] = [box.x1]
        if row:
            label.set_y(1.03 + 0.08 * row)
            axes.plot([middle, middle], [1.02, 1.03 + 0.08 * row], linewidth=0.6, zorder=0, **line)


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
