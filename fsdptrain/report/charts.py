"""The curves of a report: which ones there are follows from the numbers in the events; matplotlib draws them as SVG."""

from __future__ import annotations

import contextlib
import html
import io
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdptrain.report.history import Points, RunHistory
from fsdptrain.text import GIB, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = 8  # of runs, or of curves in one chart; the page has them as --c1 to --c8, for light and dark
WIDE, NARROW = (880, 280), (340, 200)  # width and height of a drawing, in the units of its text, which is 11 high
MAX_CHARTS = 60  # a damaged file may have any number of names
MAX_DOTS = 60  # of a curve with more points only the line is drawn
FAR = 3  # times the highest point: a limit above that is written, not drawn
ROUND = [1, 2, 2.5, 5, 10]  # multiples of a power of ten at which an axis has numbers
TOO_LARGE = 1e30  # such a value, and one that is not a number, is a gap in its curve
SPIKE = 50  # times the median: a curve that is higher has a logarithmic axis

# Drawn in these colours, which matplotlib writes into the SVG, and which become variables of the page's style.
INK, QUIET, GRID, FAULT = "#0000f0", "#0000f1", "#0000f2", "#0000f3"
VARIABLES = {INK: "ink", QUIET: "quiet", GRID: "grid", FAULT: "fault"}
VARIABLES |= {f"#{number:06x}": f"c{number}" for number in range(1, COLOURS + 1)}


@contextlib.contextmanager
def fixed_style(salt: str = "fsdptrain", **settings: Any) -> Iterator[None]:
    """Draw with matplotlib's defaults and these settings until the block ends.

    Equal input gives equal files: neither the user's matplotlibrc nor a random id changes a plot. `salt` makes the ids
    of an SVG differ from those of others on the same page.
    """
    import matplotlib

    with matplotlib.rc_context():  # restores the settings that are changed here
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams  # its type lists every name
        parameters.update({"svg.hashsalt": salt, **settings})
        yield


class Curve(NamedTuple):
    """Points of one colour; `label` is empty where a curve belongs to the one before."""

    label: str
    colour: int
    points: Points
    faint: bool = False  # raw values behind smoothed ones, and what a resume undid
    marker: str = ""  # at every point, "o" or "x"; without a line if `faint`


@dataclass
class Chart:
    """A title and its curves over the steps, or over hours; `shown` formats a value."""

    title: str
    curves: list[Curve]
    shown: Callable[[float], str]
    note: str = ""
    limits: dict[str, float] = field(default_factory=dict)  # label → value: a dashed line
    marks: list[float] = field(default_factory=list)  # steps from which training was resumed
    over: str = "steps"
    from_zero: bool = False
    wide: bool = False
    whole: bool = False  # its values are whole numbers
    log: bool = False

    @property
    def newest(self) -> list[tuple[str, int, str]]:
        """Label, colour and newest value of each curve that has a label."""
        return [(line.label, line.colour, self.shown(line.points[-1][1])) for line in self.curves if line.label]


def short(value: float) -> str:
    """Return a number with three digits: `0.001`, `2e-5`, `1,230`, `51.2k`, `8.03B`."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if max(unit, 1e4) <= abs(value) < 1e12:
            return f"{float(f'{value / unit:.3g}'):g}{name}"
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e4 else f"{value:.3g}"
    return re.sub("e([+-])0*", lambda found: "e" + found[1].strip("+"), text)


class Measure(NamedTuple):
    """How a number of an event is shown, in units of `unit`."""

    title: str
    shown: Callable[[float], str] = short
    smooth: bool = False
    from_zero: bool = False
    unit: float = 1


MEASURES = {
    "step.loss": Measure("Training loss", "{:.4f}".format, smooth=True),
    "eval.loss": Measure("Held-out loss", "{:.4f}".format),
    "step.lr": Measure("Learning rate", from_zero=True),
    "step.grad_norm": Measure("Gradient norm", smooth=True),
    "step.positions_per_s": Measure("Throughput", rate, smooth=True, from_zero=True),
    "step.mfu": Measure("MFU, %", "{:.1f}%".format, smooth=True, from_zero=True, unit=0.01),
    "step.expert_load": Measure("Tokens of the busiest expert, times the mean", "{:.2f}".format, from_zero=True),
}
SMOOTHED = "smoothed over a twentieth of the values, at most 500"
BY_SOURCE = "losses."  # the held-out loss of each source, in the `eval` events of a mixture
MEMORY = {"peak_memory_bytes": "peak", "reserved_memory_bytes": "reserved by the allocator"}
NOT_DRAWN = {  # what other charts show, or what only counts
    "at", "step", "epoch", "tokens", "tokens_per_s", "step_s", "data_s", "total_tokens", "total_positions", "total_s",
    "perplexity", "seconds", *MEMORY,
}  # fmt: skip


def charts_of(runs: Sequence[RunHistory], log: bool = False) -> list[Chart]:
    """Return the charts of one run, or of several over one another, in the order of the page.

    `log`: losses have a logarithmic axis.
    """
    is_one = len(runs) == 1
    found = {f"{kind}.{name}": None for kind in ("step", "eval") for run in runs for name in run.series[kind]}
    names = [*MEASURES, *(name for name in found if name not in MEASURES)]
    drawn = [name for name in names if name.partition(".")[2] not in NOT_DRAWN]
    charts = [_losses(runs[0])] if is_one else []
    charts += filter(None, (_measured(runs, name) for name in drawn if not (is_one and _is_loss(name))))
    charts += filter(None, [_memory(runs)])
    for chart in charts[:1]:
        chart.wide = True
    for chart in charts:
        chart.over, chart.log = runs[0].over, log and chart.shown is MEASURES["step.loss"].shown
    return [chart for chart in charts if chart.curves][:MAX_CHARTS]


def _losses(run: RunHistory) -> Chart:
    curves = _smoothed("training, smoothed", 1, run.series["step"].get("loss", []))
    for name, points in run.series["eval"].items():
        if _is_loss(f"eval.{name}"):
            label = "held-out" + f": {name.removeprefix(BY_SOURCE)}" * (name != "loss")
            curves.append(Curve(label, _colour(len(curves)), points, marker="o" * (len(points) <= MAX_DOTS)))
    resumes = [run.place(record["step"]) for record in run.of_kind("resume") if record["step"]]
    note = SMOOTHED + ("; vertical lines: resumed from a checkpoint" if resumes else "")
    return Chart("Loss", curves, MEASURES["step.loss"].shown, note, marks=resumes)


def _is_loss(name: str) -> bool:
    return name in ("step.loss", "eval.loss") or name.startswith(f"eval.{BY_SOURCE}")


def _measured(runs: Sequence[RunHistory], name: str) -> Chart | None:
    """Return the chart of one number, a curve for each run; None if all of it is 0 or missing."""
    kind, _, field_name = name.partition(".")
    words = ("held-out " if kind == "eval" else "") + field_name.replace(BY_SOURCE, "loss: ").replace("_", " ")
    measure = MEASURES.get(name, Measure(words[:1].upper() + words[1:], smooth=kind == "step"))
    curves = []
    for colour, run in enumerate(runs, 1):
        points = [(step, value / measure.unit) for step, value in run.series[kind].get(field_name, [])]
        if measure.smooth:
            curves += _smoothed(run.label, colour, points, raw=len(runs) == 1)
        elif points:
            marker = "o" * (kind == "eval" and len(points) <= MAX_DOTS)
            curves.append(Curve(run.label, _colour(colour), points, marker=marker))
    if not any(value for curve in curves for _, value in curve.points):
        return None
    note = SMOOTHED if measure.smooth else ""
    return Chart(measure.title, curves, measure.shown, note, from_zero=measure.from_zero)


def _memory(runs: Sequence[RunHistory]) -> Chart | None:
    """Return the chart of the peak memory of the highest rank beside the forecast and the card's limit."""
    curves, limits, notes = list[Curve](), dict[str, float](), list[str]()
    for number, run in enumerate(runs):
        for name, label in MEMORY.items() if len(runs) == 1 else [("peak_memory_bytes", run.label)]:
            if points := [(step, value / GIB) for step, value in run.series["step"].get(name, [])]:
                curves.append(Curve(label, _colour(number + 1 + (name != "peak_memory_bytes")), points))
        if run.start:
            where = "card" if run.start["device"] != "cpu" else "machine, which all its ranks share"
            limits[where] = run.start["device_memory_bytes"] / GIB
        if run.forecast:
            limits |= {"forecast peak": run.forecast["peak_bytes"] / GIB} if len(runs) == 1 else {}
            notes.append(f"{run.label}: " * (len(runs) > 1) + run.forecast["says"])
    if not curves:
        return None
    notes += [f"{label}: {value:.1f} GiB" for label, value in limits.items() if "forecast" not in label]
    title = "Peak memory (highest rank), GiB"
    return Chart(title, curves, "{:.1f} GiB".format, "; ".join(notes), limits, from_zero=True)


def _colour(number: int) -> int:
    return (number - 1) % COLOURS + 1


def _smoothed(label: str, colour: int, points: Points, raw: bool = True) -> list[Curve]:
    """Return a curve as it is and, in front of it, its exponential mean."""
    if not points:
        return []
    weight = 2 / (min(max(len(points) // 20, 3), 500) + 1)
    mean, total, smooth = 0.0, 0.0, []
    for step, value in points:
        if abs(value) < TOO_LARGE:
            mean, total = mean + weight * (value - mean), total + weight * (1 - total)
        smooth.append((step, mean / total if total else value))  # else the mean would begin at 0
    behind = [Curve("", _colour(colour), points, faint=True)] if raw else []
    return [*behind, Curve(label, _colour(colour), smooth)]


# --- the time line ---------------------------------------------------------------------------------------------------

FAULTS = ("lost", "error", "nonfinite", "skip", "set_aside", "restart")


def progress_chart(runs: Sequence[RunHistory]) -> Chart:
    """Return the steps of each run over the time since its first start: what counts, what was undone, faults."""
    longest = max(run.records[-1]["at"] - run.records[0]["at"] for run in runs)
    units = {"days": 86400, "hours": 3600, "min": 60, "s": 1}
    over = next((name for name, seconds in units.items() if longest > 2 * seconds), "s")
    curves = [curve for number, run in enumerate(runs, 1) for curve in _progress(run, _colour(number), units[over])]
    if len(runs) == 1:
        curves = [curve._replace(label="") for curve in curves]
    note = "dots: checkpoints; crosses: faults and restarts; pale: undone by a resume"
    return Chart("Steps over time", curves, "{:,.0f}".format, note, over=over, wide=True, whole=True)


def _progress(run: RunHistory, colour: int, unit: float) -> list[Curve]:
    """Return the curves of each attempt of a run, its checkpoints and its faults; the newest one has the label."""
    begin, kept = run.records[0]["at"], {id(record) for record in run.kept}
    curves, saves, faults = list[Curve](), Points(), Points()
    for attempt in run.attempts():
        made, counted, newest = Points(), Points(), 0.0
        for record in attempt:
            newest = float(record["step"]) if record["event"] in ("step", "save", "resume") else newest
            point = ((record["at"] - begin) / unit, newest)
            if record["event"] == "step":
                made.append(point)
                counted += [point] if id(record) in kept else []
            elif record["event"] == "save":
                saves.append(point)
            elif record["event"] in FAULTS:
                faults.append(point)
        curves += [Curve("", colour, made, faint=True)] if len(counted) < len(made) else []
        curves += [Curve("", colour, counted)] if counted else []
    if curves:
        curves[-1] = curves[-1]._replace(label=run.label)
    curves += [Curve("", colour, saves, True, "o")] if saves else []
    return curves + ([Curve("", 0, faults, True, "x")] if faults else [])


# --- drawing ---------------------------------------------------------------------------------------------------------


def drawings(chart: Chart, number: int) -> Iterator[tuple[str, str]]:
    """Yield each drawing of a chart as its class and SVG: one that fits a phone; of a wide one another for a desk."""
    if chart.wide:
        yield "desk", _draw(chart, WIDE, f"desk {number}")
    yield "phone" if chart.wide else "any", _draw(chart, NARROW, f"phone {number}")


def _draw(chart: Chart, extent: tuple[int, int], salt: str) -> str:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    # The library leaves out the points of a curve that nobody could see.
    style = {"svg.fonttype": "none", "path.simplify_threshold": 0.5, "font.size": 11, "axes.edgecolor": GRID}
    with fixed_style(salt, **style, **{"xtick.color": QUIET, "ytick.color": QUIET, "axes.linewidth": 1}):
        width, height = extent
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        axes = figure.add_axes((54 / width, 24 / height, 1 - 66 / width, 1 - 34 / height))
        axes.patch.set_visible(False)
        for curve in chart.curves:
            _draw_curve(axes, curve)
        _set_range(axes, chart)
        for mark in chart.marks:
            axes.axvline(mark, color=FAULT, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
        axes.annotate(
            chart.over, (0, 0), xycoords="axes fraction", xytext=(-7, -7), textcoords="offset points", ha="right",
            va="top", color=QUIET,
        )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(8 if width > 600 else 4, steps=ROUND, integer=chart.over == "steps"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_locator(NullLocator())
        if axes.get_yscale() == "linear" or high < 10 * low:  # else at powers of ten
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND, integer=chart.whole))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _of_the_page(stream.getvalue(), chart)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    colour = f"#{curve.colour:06x}" if curve.colour else FAULT
    xs = [x for x, _ in curve.points]
    ys = [y if abs(y) < TOO_LARGE else math.nan for _, y in curve.points]
    look: dict[str, Any] = {"linewidth": 1.8, "solid_joinstyle": "round"}
    if curve.marker and curve.faint:  # only dots or crosses
        look = {"linewidth": 0, "markersize": 6 if curve.marker == "x" else 4, "markeredgewidth": 2, "zorder": 5}
    elif curve.faint:
        look = {"linewidth": 1, "alpha": 0.35}
    elif curve.marker:
        look |= {"markersize": 4, "markeredgewidth": 0}
    axes.plot(xs, ys, color=colour, marker=curve.marker or None, **look)


def _set_range(axes: Axes, chart: Chart) -> None:
    values = [value for curve in chart.curves for _, value in curve.points if abs(value) < TOO_LARGE]
    highest = max(values, default=0.0)
    spikes = highest > SPIKE * statistics.median(values or [0.0])
    if values and not chart.from_zero and min(values) > 0 and (chart.log or spikes):
        axes.set_yscale("log")
    for label, value in chart.limits.items():
        if value < FAR * highest:
            axes.axhline(value, color=QUIET, linewidth=1, linestyle=(0, (5, 4)))
            axes.annotate(
                label, (1, value), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
                ha="right", va="bottom", color=QUIET, fontsize=10,
            )  # fmt: skip
    if chart.from_zero:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.margins(x=0.015)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5)
    axes.tick_params(axis="x", pad=7)


def _of_the_page(svg: str, chart: Chart) -> str:
    """Return matplotlib's SVG as an element of the page: without names of its own, with the page's font and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", svg.partition(">")[0]) + svg[svg.index(">") :]
    svg = re.sub(r"<!--.*?-->\s*|<style.*?</style>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z.]+[a-z0-9.]*_\d+"', "", svg).replace("xlink:href", "href")
    svg = re.sub(
        r"font: ([\d.]+px)[^;\"]*|font-family: [^;\"]*; ?", lambda f: f"font-size: {f[1]}" if f[1] else "", svg
    )
    svg = re.sub(
        r'="[^"]*"', lambda found: re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", found[0]), svg
    )
    svg = re.sub("#0000[0-9a-f]{2}", lambda found: f"var(--{VARIABLES[found[0]]})", svg)
    newest = ", ".join(f"{label} {value}" for label, _, value in chart.newest)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(f"{chart.title}: {newest}", quote=True)}"', 1)
