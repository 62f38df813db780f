"""The page of a report: one HTML file that needs no network and runs no code."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from fsdptrain.config.keys import yaml_text
from fsdptrain.config.reader import SECRET
from fsdptrain.errors import RecipeError, StorageError, first_line
from fsdptrain.report.charts import COLOURS, FAULTS, charts_of, drawings, progress_chart, short
from fsdptrain.report.history import RunHistory, changed_keys, read_run, set_labels
from fsdptrain.report.status import ENDED, is_run_folder, runs_below, stop_text
from fsdptrain.run_folder.files import shipped, write_atomically
from fsdptrain.run_folder.records import EVENTS, Record, RunState, by_loss, shares_of
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.page import Terminal
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import NO_BREAK_SPACE, counted, duration, printable, rate, size

MAX_ROWS = 60  # of a time line, half of them the newest
MAX_SAMPLES = 10  # evaluations, the newest, whose samples are shown
SUBTITLE = ("model", "size", "ranks")  # of the facts, those below the name of a single run
GENERATOR = '<meta name="generator" content="fsdptrain'  # by which a report is known that may be replaced


def check_report(out: Path) -> None:
    """Raise RecipeError if no report can be written to `out`. This is cheap: call it before the runs are read."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--out: {out.name!r} must end in .html")
    if not out.parent.is_dir():
        raise RecipeError(f"--out: folder {str(out.parent)!r} does not exist")
    if out.exists() and not (out.is_file() and GENERATOR.encode() in out.read_bytes()[:1000]):
        raise RecipeError(f"--out: {out} exists and is not a report of fsdptrain; it is not overwritten")


@dataclass(frozen=True)
class Drawing:
    """How curves are drawn: over one of AXES, losses with a logarithmic axis or not.

    `renew_s`: after so many seconds a browser reads the page again, as long as a run goes on; 0: never.
    """

    over: str = "steps"
    log: bool = False
    renew_s: int = 0


def write_report(opened: Sequence[RunDir], out: Path, drawing: Drawing = Drawing()) -> tuple[list[str], bool]:
    """Write the page of these runs, and of the runs below these folders.

    Returns what could not be read, and whether a run goes on. Raises RecipeError if no run has anything to show, or if
    there are more than have a colour.
    """
    folders = dict.fromkeys(path for folder in opened for path in _runs_in(folder.root))
    if len(folders) > COLOURS:
        raise RecipeError(f"a report compares up to {COLOURS} runs, and these are {len(folders)}: name some of them")
    runs, left_out = list[RunHistory](), list[str]()
    for path in folders:
        try:
            runs.append(read_run(RunDir.open(path), drawing.over))
        except (RecipeError, StorageError) as error:
            if len(folders) == 1:
                raise
            left_out.append(f"left out: {first_line(error)}")
    if not runs:
        raise RecipeError("no run has anything to report:\n  " + "\n  ".join(left_out))
    set_labels(runs)
    notes = left_out + [f"{run.label}: {note}" for run in runs for note in run.notes]
    goes_on = any(run.status["state"] not in (None, *ENDED) for run in runs)
    write_atomically(out, page(runs, notes, drawing if goes_on else replace(drawing, renew_s=0)))
    return notes, goes_on


def _runs_in(folder: Path) -> list[Path]:
    return [folder] if is_run_folder(folder) else runs_below(folder) or [folder]


def page(runs: Sequence[RunHistory], notes: Sequence[str] = (), drawing: Drawing = Drawing()) -> str:
    """Return the report as HTML."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(shipped("report", "page.html").read_text(encoding="utf-8"))
    figures = [
        (chart, [(kind, Markup(svg)) for kind, svg in drawings(chart, number)])
        for number, chart in enumerate([*charts_of(runs, drawing.log), progress_chart(runs)])
    ]
    rendered = template.render(
        runs=runs,
        notes=notes,
        figures=figures,
        subtitle=" · ".join(cells[0][0] for name, cells in _rows(runs, facts) if name in SUBTITLE),
        results=_rows(runs, results),
        facts=_rows(runs, facts),
        timelines=[event_rows(run) for run in runs],
        faults=FAULTS,
        samples=[(run.label, samples(run)) for run in runs],
        recipe=[(key, [(yaml_text(run.recipe.get(key, "?")), "") for run in runs]) for key in changed_keys(runs)],
        version=version("fsdptrain"),
        renew_s=drawing.renew_s,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    # No recipe has a secret, but an error may repeat one.
    return SECRET.sub("(hidden: it looks like a secret)", printable(rendered))


Cell = tuple[str, str]  # a value and a remark


def _rows(
    runs: Sequence[RunHistory], of: Callable[[RunHistory], Iterable[tuple[str, *Cell]]]
) -> list[tuple[str, list[Cell]]]:
    """Return name → a cell for each run, of all that `of` yields: name, value and remark."""
    columns = [{name: (value, remark) for name, value, remark in of(run)} for run in runs]
    return [(name, [column.get(name, ("", "")) for column in columns]) for name in dict.fromkeys(chain(*columns))]


def results(run: RunHistory) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers that a reader looks for first: what, how much, and a remark."""
    if not (steps := run.of_kind("step")):
        return
    first, last, trained_s = steps[0], steps[-1], run.totals["total_s"]
    state = RunState.of(run.kept)
    yield "Training loss", f"{state.training_loss:.4f}", f"from {first['loss']:.4f}"
    losses = state.losses(source := run.recipe.get("eval.best_of"))
    if best := by_loss(losses)[:1]:
        of = f"of {source} " if source else ""
        yield "Best held-out loss", f"{losses[best[0]]:.4f}", f"{of}at step {best[0]:,}"
    yield "Steps", f"{last['step']:,}", f"of {run.start['total_steps']:,}"
    cost = "of training"
    if run.start["device"] != "cpu":
        cost = f"· {short(trained_s * run.start['world_size'] / 3600)} GPU-hours"
    yield "Label tokens", short(run.totals["total_tokens"]), f"in {duration(trained_s)} {cost}"
    yield "Throughput", rate(run.totals["total_positions"] / max(trained_s, 1e-9)), f"{last['mfu']:.1%} MFU"
    if loads := [record["expert_load"] for record in steps if "expert_load" in record]:
        remark = f"times the mean of its layer, at most {max(loads):.2f}; no token is dropped"
        yield "Tokens of the busiest expert", f"{loads[-1]:.2f}", remark
    peak = max(record["peak_memory_bytes"] for record in steps)
    yield "Peak memory", size(peak), f"of {size(run.start['device_memory_bytes'])}"


def facts(run: RunHistory) -> Iterator[tuple[str, str, str]]:
    """Yield what a run is and was made with: name, value and remark."""
    start, plan, recipe = run.start, run.plan, run.recipe
    if plan:
        scratch = f"{plan.recipe.model.config.get('model_type', 'model')}, from scratch"
        yield "model", recipe["model.id"] or scratch, ""
    trained = f"{start['trainable']:,} trained" if "trainable" in start else ""
    yield "size", f"{short(start['parameters'])} parameters", trained
    if path := recipe.get("data.path"):
        yield "data", yaml_text(path), ""
    if shares := shares_of(start):
        yield "shares", shares, ""
    yield "sequences", f"{start['blocks']:,} of {start['seq_len']:,} tokens", f"{1 - start['fill']:.1%} padding"
    hosts = {*start.get("hosts", [start["host"]])}
    where = counted(len(hosts), "host") if len(hosts) > 1 else f"host {start['host']}"
    yield "ranks", f"{start['world_size']}{NO_BREAK_SPACE}×{NO_BREAK_SPACE}{start['device']}", where
    yield "sharding", start.get("strategy", "?"), f"attention: {start['attention']}"
    versions = {"fsdptrain": plan.version} if plan else {}
    versions |= {name: start[name] for name in ("torch", "transformers") if name in start}
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions.items()), ""
    yield "attempts", str(sum(record["event"] == "start" for record in run.records)), ""
    yield "folder", str(run.rundir.root), ""


def event_rows(run: RunHistory) -> list[tuple[str, str, str]]:
    """Return rows of date, kind and sentence: starts, faults, and what followed."""
    rows = [
        (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record["at"])), record["event"], text)
        for record, text in _sentences(run)
    ]
    if len(rows) > MAX_ROWS:
        rows[MAX_ROWS // 2 : -MAX_ROWS // 2] = [("", "", counted(len(rows) - MAX_ROWS, "more event"))]
    return rows


def _sentences(run: RunHistory) -> Iterator[tuple[Record, str]]:
    screen = Screen(Terminal(io.StringIO()))
    said = {
        "lost": "the attempt ended without a record of why: its processes were killed, or the machine was lost",
        "error": "{type}: {message}", "nonfinite": "{what}",
        "restart": "workers were lost and are started again: restart {restart} of {of}",
    }  # fmt: skip
    for record in run.records:
        kind = record["event"]
        if kind == "stop":
            yield record, f"stopped {stop_text(record)}"
        elif kind in said:
            yield record, said[kind].format(**record)
        elif kind in EVENTS and kind not in ("step", "eval", "save", "generated", "progress"):
            screen.console.file = io.StringIO()
            screen.show(record)
            if text := screen.console.file.getvalue().strip():
                yield record, text


def samples(run: RunHistory) -> list[tuple[int, list[tuple[str, str]]]]:
    """Return step → (prompt, text) of what the model wrote at each evaluation, the newest first."""
    found = []
    for record in reversed(run.kept):
        texts, prompts = record.get("texts"), record.get("prompts")
        if isinstance(texts, list) and isinstance(prompts, list) and len(texts) == len(prompts) and texts:
            found.append((record.get("step", 0), [*zip(map(str, prompts), map(str, texts), strict=True)]))
    return found[:MAX_SAMPLES]
