"""Pictures of memory: a step's timeline as SVG or PNG, and a bar of its peak for the terminal."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rich.text import Text

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.forecast.memory import BEFORE, levels
from fsdptrain.forecast.trace import Alloc, Category, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


GIB = 2**30


SUFFIXES = (".svg", ".png")


MOST_POINTS = 2000


NARROWEST = 0.08  # of the picture: the least a phase of the step is given


SHOWN = 0.001  # of the peak: what is less has no place in a legend


FIGURE_SPACE = "\u2007"  # as wide as a digit


class Style(NamedTuple):
    """How a category is drawn: a letter where there is no colour, the ink to write it with, a colour."""

    letter: str
    ink: str
    colour: str


# Stacked from the bottom: what is always there, what comes and goes with a unit, what grows with the tokens. The
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


BESIDE = {"fragments": Style("F", "black", "#bbbbbb"), "outside torch": Style("#", "white", "#555555")}


assert STYLES.keys() == set(get_args(Category))


def refuse_undrawable(path: Path) -> None:
    """Raise RecipeError if no picture can be written there: cheap, to be asked before the long simulation."""
    problem = None
    if path.suffix.lower() not in SUFFIXES:
        problem = f"{path.name!r} is neither .svg nor .png"
    elif not path.parent.is_dir():
        problem = f"there is no folder {str(path.parent)!r}"
    elif importlib.util.find_spec("matplotlib") is None:
        problem = "needs matplotlib: pip install 'fsdptrain[plot]'"
    if problem:
        raise RecipeError([Problem(problem, "--plot")])


class Point(NamedTuple):
    """The level after one event of the step: its moment, and bytes by category in the order of STYLES."""

    moment: str
    stack: tuple[int, ...]

    @property
    def allocated(self) -> int:
        """Bytes of all categories."""
        return sum(self.stack)


class Phase(NamedTuple):
    """A phase of the step (all of `forward of …` is one `forward`), and where in the picture it lies: 0 to 1."""

    name: str
    first: float
    last: float
    points: list[Point]

    def across(self) -> Iterator[tuple[float, Point]]:
        """Its points, evenly spread."""
        for i, point in enumerate(self.points):
            yield self.first + (self.last - self.first) * i / len(self.points), point


def draw_timeline(trace: Trace, device: str, capacity: int, path: Path, title: str, granularity: int = 1) -> None:
    """Write one step's memory on a device, stacked by category, against the card's `capacity` bytes.

    The suffix of `path` chooses SVG or PNG. Raises RecipeError where `refuse_undrawable` does, or when it cannot write.
    """
    refuse_undrawable(path)
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [
        phase._replace(points=thin(phase.points, phase.last - phase.first))
        for phase in timeline(trace, device, granularity)
    ]
    with matplotlib.rc_context():  # gives back what is set here
        matplotlib.rcdefaults()  # a picture does not depend on somebody's matplotlibrc
        matplotlib.rcParams["svg.hashsalt"] = "fsdptrain"  # nor on the run: equal traces, equal files
        figure = Figure(figsize=(11, 5.6), dpi=120)  # not pyplot's: no window, no backend, nothing to close
        axes = figure.add_axes((0.06, 0.07, 0.68, 0.75))
        figure.text(0.06, 0.985, textwrap.fill(title, 100), fontsize=12, va="top")
        steps = [step for phase in drawn for step in phase.across()]
        top_x, top = max(steps, key=lambda step: step[1].allocated)
        _draw_stack(axes, steps, top)
        beside = 0.2 < top_x <= 0.5 or top_x > 0.8  # where the note of the peak leaves the left free
        _draw_capacity(axes, top.allocated, capacity, left=beside)
        _draw_peak(axes, top_x, top)
        _draw_phases(axes, drawn)
        try:
            dated = {"Date": None} if path.suffix.lower() == ".svg" else None
            figure.savefig(path, metadata=dated, bbox_inches="tight", pad_inches=0.15)  # as large as all that is in it
        except OSError as error:
            raise RecipeError([Problem(f"cannot write {str(path)!r}: {error.strerror}", "--plot")]) from None


def timeline(trace: Trace, device: str, granularity: int = 1) -> list[Phase]:
    """The step's phases, with the level when it begins and after each of its allocations and releases on a device.

    A phase is as wide as it has events, but never too narrow to be seen: the loss has few, and often the peak.
    """
    held_before = sum(isinstance(event, Alloc) and event.storage.device == device for event in trace.before)
    during = islice(levels(trace, device, granularity), max(0, held_before - 1), None)
    points = [Point(each.moment, tuple(each.by_category.get(name, 0) for name in STYLES)) for each in during]
    runs = [(name, [*run]) for name, run in groupby(points, lambda point: phase_of(point.moment))]
    if not runs:
        return [Phase("nothing", 0.0, 1.0, [Point(BEFORE, (0,) * len(STYLES))])]
    least = min(NARROWEST, 0.5 / len(runs)) * len(points)
    widths = [max(least, len(run)) for _, run in runs]
    edges = [edge / sum(widths) for edge in accumulate(widths, initial=0.0)]
    return [Phase(name, *ends, run) for (name, run), ends in zip(runs, pairwise(edges), strict=True)]


def thin(points: list[Point], share: float) -> list[Point]:
    """Of MOST_POINTS no more than this share: the highest of every stretch, so that no peak is lost, and both ends."""
    most = max(3, int(MOST_POINTS * share))
    if len(points) <= most:
        return points
    inner, stretches = points[1:-1], most - 2
    edges = [len(inner) * i // stretches for i in range(stretches + 1)]
    highest = [max(inner[a:b], key=lambda point: point.allocated) for a, b in pairwise(edges)]
    return [points[0], *highest, points[-1]]


def phase_of(moment: str) -> str:
    """The phase of the step a moment belongs to: `loss` in both directions, else the word before ` of `."""
    if moment == BEFORE:  # and yet in the step: no unit has begun, so it is the root's forward
        return "forward"
    return "loss" if moment.endswith("loss") else moment.partition(" of ")[0]


def _draw_stack(axes: Axes, steps: list[tuple[float, Point]], top: Point) -> None:
    """The areas, each drawn over those that lie higher, and a legend with what each category has at the peak."""
    decimals = 2 if top.allocated >= GIB else 4
    for i, (name, style) in reversed([*enumerate(STYLES.items())]):
        if max(point.stack[i] for _, point in steps) > SHOWN * top.allocated:
            size = f"{top.stack[i] / GIB:.{decimals}f}".rjust(6).replace(" ", FIGURE_SPACE)
            outline = _outline([(x, sum(point.stack[: i + 1]) / GIB) for x, point in steps])
            axes.fill(*zip(*outline, strict=True), color=style.colour, linewidth=0, label=f"{size}  {name}")
    if axes.patches:
        axes.legend(
            title="GiB at the peak", alignment="left", loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0,
            frameon=False, handlelength=1.2,
        )  # fmt: skip


def _outline(heights: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of an area under steps, which hold their height up to the next; only where it changes."""
    corners, height = [(0.0, 0.0)], 0.0
    for x, new in heights:
        if new != height:
            corners += [(x, height), (x, new)]
            height = new
    return [*corners, (1.0, height), (1.0, 0.0)]


def _draw_capacity(axes: Axes, peak: int, capacity: int, left: bool) -> None:
    """Axes, and the dashed line at the card's memory; one far above the stack is only spoken of."""
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
    """A dot at the peak and, on the side with more room, its size and moment."""
    left = x > 0.5
    axes.plot(x, top.allocated / GIB, "o", color="black", markersize=4, clip_on=False, zorder=5)
    axes.annotate(
        f"peak {_gib(top.allocated)} GiB\n{top.moment}", (x, top.allocated / GIB), xytext=(-16 if left else 16, 8),
        textcoords="offset points", ha="right" if left else "left", va="bottom", zorder=6,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "black", "linewidth": 0.8},
        arrowprops={"arrowstyle": "-", "color": "black", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2},
    )  # fmt: skip


def _draw_phases(axes: Axes, phases: list[Phase]) -> None:
    """A bracket over each phase of the step; a name that would touch its neighbour goes up a row."""
    ends: list[float] = []  # of every row, where its last name ends, in pixels
    across = axes.get_xaxis_transform()  # x as the data, y as a fraction of the axes
    ink: dict[str, Any] = {"transform": across, "color": "black", "clip_on": False}
    for phase in phases:
        middle = (phase.first + phase.last) / 2
        axes.plot([phase.first + 0.001, phase.last - 0.001], [1.02, 1.02], linewidth=2, solid_capstyle="butt", **ink)
        axes.axvline(phase.first, color="black", linewidth=0.6, alpha=0.5, zorder=3)
        label = axes.text(
            middle, 1.03, phase.name.replace(" ", "\n"), transform=across, ha="center", va="bottom", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
        box = label.get_window_extent()
        row = next((i for i, end in enumerate(ends) if end + 4 < box.x0), len(ends))
        ends[row : row + 1] = [box.x1]
        if row:
            label.set_y(1.03 + 0.08 * row)
            axes.plot([middle, middle], [1.02, 1.03 + 0.08 * row], linewidth=0.6, zorder=0, **ink)


def memory_bar(by_category: Mapping[Category, int], beside: Mapping[str, int], capacity: int, width: int) -> Text:
    """One level of memory as a bar of `width` columns, and below it the sum and a legend, the largest first.

    The closing `|` is the end of the card: what does not fit stands behind it. `beside` are bytes that no tensor
    holds, by the names in `BESIDE`. Categories below a thousandth of the sum are left out of the legend.
    """
    sizes: dict[str, int] = dict(sorted(by_category.items(), key=lambda item: -item[1]))
    sizes |= beside
    total = sum(sizes.values())
    styles = dict[str, Style]([*STYLES.items(), *BESIDE.items()])
    inner = max(1, width - 2)
    cells = "".join(
        styles[name].letter * count
        for name, count in zip(sizes, _cells([*sizes.values()], inner, capacity), strict=True)
    )
    end = inner if total <= capacity else min(inner - 1, inner * capacity // total)
    colours = {style.letter: f"{style.ink} on {style.colour}" for style in styles.values()}
    bar = Text("|")
    for letter, run in groupby(cells[:end].ljust(end, ".")):
        bar.append("".join(run), colours.get(letter, "dim"))
    bar.append("|", "bold")
    bar.append(cells[end:], "bold white on red")
    bar.append(f"\n{_gib(total)} of {_gib(capacity)} GiB: ")
    left = capacity - total
    bar.append(*((f"{_gib(left)} free", "green") if left >= 0 else (f"{_gib(-left)} TOO MUCH", "bold red")))
    return bar.append(_legend({name: size for name, size in sizes.items() if size > SHOWN * total}, styles, width))


def _cells(sizes: list[int], width: int, capacity: int) -> list[int]:
    """Columns for every size, when `width` stands for the card, or for all of them if that is more.

    Edges are rounded, not widths, so that the columns sum up to what the sizes sum up to.
    """
    whole, edges = max(capacity, sum(sizes), 1), [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    columns = [(edge * width + whole // 2) // whole for edge in edges]
    return [b - a for a, b in pairwise(columns)]


def _legend(sizes: Mapping[str, int], styles: Mapping[str, Style], width: int) -> Text:
    """`A saved activations 24.64  P parameter shards 3.74 …`, broken into lines of at most `width` columns."""
    legend, column = Text(), width
    for name, size in sizes.items():
        words = f" {name} {_gib(size)}"
        if column + 3 + len(words) > width:
            legend.append("\n")
            column = 0
        else:
            legend.append("  ")
            column += 2
        legend.append(styles[name].letter, f"{styles[name].ink} on {styles[name].colour}").append(words)
        column += 1 + len(words)
    return legend


def _gib(size: int) -> str:
    gib = size / GIB
    return f"{gib:.2f}" if gib >= 0.1 else f"{gib:.2g}"
