"""The page of `fsdptrain report`: of runs that are written by hand."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import environment, fsdptrain, run_folder, sample, wait_until, write_recipe

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.report.charts import charts_of, progress_chart, short
from fsdptrain.report.document import Drawing, check_report, event_rows, facts, page, results, samples, write_report
from fsdptrain.report.history import changed_keys, read_run, set_labels
from fsdptrain.run_folder.records import EVENTS
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import GIB

CARD = "NVIDIA H100 80GB HBM3"
BEGAN = 1.8e9


class Written:
    """A run folder as the workers of eight GPUs write it."""

    def __init__(self, tmp: Path, **changes: Any) -> None:
        tmp.mkdir(exist_ok=True)
        plan = make_plan(load(write_recipe(tmp, **changes)), Topology("cuda", 1, 8))
        self.rundir, self.now, self.total_s = run_folder(plan), BEGAN, 0.0

    def event(self, kind: str, **fields: Any) -> None:
        fields = sample(kind, **fields) if kind in EVENTS else fields
        with self.rundir.metrics.open("a") as stream:
            stream.write(json.dumps({"event": kind, "at": self.now, **fields}) + "\n")

    def start(self, total: int, **fields: Any) -> None:
        self.total_s = 0.0
        memory = {"device_memory_bytes": 79 * GIB, "baseline_memory_bytes": GIB // 2}
        self.event("start", device=CARD, total_steps=total, world_size=8, **memory, **fields)

    def steps(self, first: int, last: int, total: int, **fields: Any) -> None:
        for step in range(first, last + 1):
            self.now, self.total_s = self.now + 5.5, self.total_s + 5.5
            fields |= {"loss": 1.1 + 1.2 * math.exp(-6 * step / total), "total_s": self.total_s}
            self.event("step", step=step, step_s=5.5, total_tokens=int(self.total_s * 30_000), **fields)

    def eval(self, step: int, loss: float, **fields: Any) -> None:
        self.event("eval", step=step, loss=loss, perplexity=math.exp(loss), tokens=100_000, **fields)


def mixture(tmp: Path, total: int = 400) -> RunDir:
    """Write a run of three sources that lost its workers once, skipped a step, and has samples and a forecast."""
    run, half = Written(tmp, name="mixture"), total // 2
    run.start(total, notes=["web: read 2.1 times in the run"])
    for begin in range(0, total, total // 8):
        held_out = 1.15 + 1.15 * math.exp(-6 * begin / total)
        run.eval(begin, held_out, losses={"web": held_out + 0.2, "code": held_out - 0.3, "chat": held_out + 0.05})
        text = "a sea of <b>troubles</b> & more" if begin else "the the the"
        run.event("generated", step=begin, prompts=["To be or not to be, that is"], texts=[f" {text} ({begin})"])
        if begin == half:
            run.event("save", step=half, path="checkpoints/step", bytes=GIB, seconds=9.0)
            run.steps(half + 1, half + 30, total)
            run.event("error", type="WorkerLost", message="rank 3 on n1 was killed (SIGKILL)", rank=3)
            run.event("restart", attempt=1, restart=1, of=3)
            run.now += 120
            run.start(total)
            run.event("resume", step=half, changed={"log.every": [1, 2]}, notes=[])
        run.steps(begin + 1, begin + total // 8, total)
    run.event("skip", step=total - 1, what="step was not finite: rank 2, samples 17 and 18")
    run.eval(total, 1.16, losses={"web": 1.36, "code": 0.86, "chat": 1.21})
    compared = {"forecast": 40 * GIB, "measured": 40.5 * GIB, "ratio": 1.01}
    speed = {"forecast": 5.4, "measured": 5.5, "ratio": 1.02}
    run.rundir.forecast.write_text(json.dumps({"compared": {"peak_bytes": compared, "step_s": speed}}))
    return run.rundir


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return mixture(tmp_path_factory.mktemp("mixed"))


def preferences(tmp: Path, name: str = "dpo") -> RunDir:
    """Write a run whose events have numbers that only some objectives have."""
    run = Written(tmp, name=name, optim__lr=1e-5)
    run.start(20)
    for step in range(1, 21):
        run.steps(step, step, 20, margin=step / 10, accuracy=0.5 + step / 50)
    run.event("stop", step=20, signal="SIGTERM")
    return run.rundir


class Reader(HTMLParser):
    """Reads a page: its text, its tags with their attributes; `errors` are tags that do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open, self.errors, self.tags, self.text = list[str](), list[str](), list[tuple[str, dict[str, Any]]](), ""
        self.feed(source)
        self.close()
        self.errors += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.errors.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(*rundirs: RunDir) -> Reader:
    runs = [read_run(rundir) for rundir in rundirs]
    set_labels(runs)
    return Reader(page(runs))


def test_a_page_is_well_formed_and_asks_for_nothing(mixed: RunDir) -> None:
    read = read_page(mixed)
    assert read.errors == []
    attributes = [(name, value or "") for _, found in read.tags for name, value in found.items()]
    assert not [value for _, value in attributes if re.search(r"https?:|//|url\((?!#)", value)]
    references = [value for name, value in attributes if name in ("href", "src", "xlink:href")]
    ids = Counter(value for name, value in attributes if name == "id")
    assert {value for value in references if not value.startswith("#")} == {"data:,"}
    assert {value[1:] for value in references if value.startswith("#")} <= ids.keys() and set(ids.values()) == {1}
    assert not [tag for tag, _ in read.tags if tag in ("script", "img", "iframe", "object")]
    policy = next(found["content"] for _, found in read.tags if "http-equiv" in found)
    assert "default-src 'none'" in policy and "script" not in policy


def test_names_values_and_messages_are_text_and_secrets_are_hidden(tmp_path: Path) -> None:
    run = Written(tmp_path, name="run", data__format="prompt_completion", data__separator="<i>&</i>")
    secret = "hf_" + "a" * 30
    run.rundir.plan.write_text(run.rundir.plan.read_text().replace('"name": "run"', '"name": "<script>1</script>"'))
    run.start(9, notes=["<img src=x>"])
    run.steps(1, 3, 9)
    run.event("error", type="DataError", message="'</main><script>alert(1)</script>")
    run.event("error", type="DataError", message=f"s3://key:{secret}@store refuses")
    read = read_page(run.rundir)
    assert secret not in read.text and "(hidden: it looks like a secret)" in read.text
    assert read.errors == [] and not {"script", "img", "i"} & {tag for tag, _ in read.tags}
    for words in ("<script>1</script>", "<i>&</i>", "<img src=x>", "'</main><script>alert(1)</script>"):
        assert words in read.text


def test_which_curves_there_are_follows_from_the_events(mixed: RunDir, tmp_path: Path) -> None:
    usual, memory = ["Learning rate", "Gradient norm", "Throughput", "MFU, %"], "Peak memory (highest rank), GiB"
    charts = charts_of([read_run(mixed)])
    assert [chart.title for chart in charts] == ["Loss", *usual, memory]
    newest = [("training, smoothed", 1), ("held-out", 2, "1.1600"), ("held-out: web", 3, "1.3600")]
    newest += [("held-out: code", 4, "0.8600"), ("held-out: chat", 5, "1.2100")]
    assert charts[0].newest[1:] == newest[1:] and charts[0].newest[0][:2] == newest[0] and charts[0].marks == [200]
    assert charts[-1].limits == {"card": 79, "forecast peak": 40.5}
    assert charts[-1].note == (
        "forecast and measurement: memory 40.0 GiB, measured 40.5 GiB (1.01×); a step 5.4 s, measured 5.5 s (1.02×); "
        "card: 79.0 GiB"
    )
    charts = charts_of([read_run(preferences(tmp_path))])
    assert [chart.title for chart in charts] == ["Loss", *usual, "Margin", "Accuracy", memory]
    assert charts[5].curves[0].points == [(step, step / 10) for step in range(1, 21)]


def test_steps_that_a_resume_undid_are_not_drawn_nor_counted(mixed: RunDir) -> None:
    run = read_run(mixed)
    assert [step for step, _ in run.series["step"]["loss"]] == [*range(1, 401)]
    assert run.totals["total_s"] == pytest.approx(400 * 5.5)
    shown = {name: (value, remark) for name, value, remark in results(run)}
    assert shown["Label tokens"] == ("66M", "in 36:40 · 4.89 GPU-hours") and shown["Steps"] == ("400", "of 400")
    lines = [curve for curve in progress_chart([run]).curves if not curve.marker]
    assert [(curve.faint, curve.points[0][1], curve.points[-1][1]) for curve in lines] == [
        (True, 1, 230), (False, 1, 200), (False, 201, 400)
    ]  # fmt: skip


def test_the_smooth_curve_is_the_exponential_mean(mixed: RunDir) -> None:
    raw, smooth = charts_of([read_run(mixed)])[0].curves[:2]
    values, weight = [value for _, value in raw.points], 2 / 21
    for number in (1, 2, 50, 400):
        weights = [(1 - weight) ** back for back in range(number)][::-1]
        mean = sum(w * value for w, value in zip(weights, values[:number], strict=True)) / sum(weights)
        assert smooth.points[number - 1] == (number, pytest.approx(mean))


def test_a_curve_is_drawn_where_its_values_are(mixed: RunDir) -> None:
    read, chart = read_page(mixed), charts_of([read_run(mixed)])[0]
    code = next(curve for curve in chart.curves if curve.label == "held-out: code")
    paths = [found for tag, found in read.tags if tag == "path" and "stroke: var(--c4)" in found.get("style", "")]
    drawn = re.findall(r"[ML] ([\d.]+) ([\d.]+)", next(p["d"] for p in paths if "clip-path" in p))
    assert len(drawn) == len(code.points) == 9
    for axis in (0, 1):
        pixels, values = [float(point[axis]) for point in drawn], [point[axis] for point in code.points]
        scale = (pixels[-1] - pixels[0]) / (values[-1] - values[0])
        assert scale > 0 if axis == 0 else scale < 0
        assert pixels == [pytest.approx(pixels[0] + scale * (value - values[0]), abs=0.2) for value in values]


@pytest.mark.parametrize(("over", "name", "unit"), [("tokens", "total_tokens", 1), ("hours", "total_s", 3600)])
def test_curves_are_drawn_over_what_was_trained(over: str, name: str, unit: float, tmp_path: Path) -> None:
    """An attempt counts from its own start; what was undone counts nothing, as in the totals of the page."""
    run = Written(tmp_path)
    for first, last in ((1, 6), (4, 9)):
        run.start(9)
        run.event("resume", step=first - 1)
        run.steps(first, last, 9)
    run.eval(0, loss=3.0)
    run.eval(9, loss=2.0)
    steps, placed = read_run(run.rundir), read_run(run.rundir, over)
    xs = [x for x, _ in placed.series["step"]["loss"]]
    assert len(xs) == 9 and xs == sorted({*xs}) and xs[-1] == pytest.approx(steps.totals[name] / unit)
    assert [value for _, value in placed.series["step"]["loss"]] == [v for _, v in steps.series["step"]["loss"]]
    assert [x for x, _ in placed.series["eval"]["loss"]] == [0.0, xs[-1]]
    chart, *_ = charts_of([placed], log=True)
    assert chart.log and chart.over == over and chart.marks == [xs[2]]
    read = Reader(page([placed], drawing=Drawing(over, True, 10)))
    assert read.errors == [] and ("meta", {"http-equiv": "refresh", "content": "10"}) in read.tags


def test_a_page_is_written_again_until_its_run_has_ended(tmp_path: Path) -> None:
    run, out = Written(tmp_path), tmp_path / "r.html"
    run.start(9)
    run.steps(1, 2, 9)
    words = [sys.executable, "-m", "fsdptrain", "report", run.rundir.root, "--out", out, "--watch"]
    watching = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    wait_until(lambda: out.exists() and "refresh" in out.read_text(), "the first page")
    run.steps(3, 9, 9)
    run.event("stop", signal="SIGTERM", step=9)
    assert watching.wait(60) == 0
    assert "refresh" not in out.read_text() and "stopped by SIGTERM after step 9" in out.read_text()


def test_several_runs_are_over_one_another_with_the_difference_of_their_recipes(mixed: RunDir, tmp_path: Path) -> None:
    runs = [read_run(mixed), read_run(preferences(tmp_path))]
    set_labels(runs)
    charts = {chart.title: chart for chart in charts_of(runs)}
    assert [label for label, _, _ in charts["Training loss"].newest] == ["mixture", "dpo"]
    assert {curve.colour for curve in charts["Training loss"].curves} == {1, 2}
    assert [charts[name].curves[0].colour for name in ("Margin", "Held-out loss: web")] == [2, 1]
    assert progress_chart(runs).newest == [("mixture", 1, "400"), ("dpo", 2, "20")]
    assert changed_keys(runs) == ["data.path", "optim.lr"]
    read = read_page(mixed, preferences(tmp_path / "again", "mixture"))
    assert read.errors == [] and "What differs in the recipes" in read.text
    assert str(mixed.root) in read.text and read.text.count("0.0003") == 1


def test_samples_shares_and_a_time_line_with_faults_and_what_followed(mixed: RunDir, tmp_path: Path) -> None:
    found = samples(read_run(mixed))
    assert [step for step, _ in found] == [*range(350, -1, -50)], "the newest first"
    assert found[0][1] == [("To be or not to be, that is", " a sea of <b>troubles</b> & more (350)")]
    kinds = ["start", "error", "restart", "start", "resume", "skip"]
    rows = event_rows(read_run(mixed))
    assert [kind for _, kind, _ in rows] == kinds and rows[0][0] == "2027-01-15 08:00:00"
    assert rows[1][2] == "WorkerLost: rank 3 on n1 was killed (SIGKILL)"
    assert rows[4][2] == "resumed after step 200\n  log.every: 1 → 2"
    run = Written(tmp_path)
    run.start(9, data={"rows": 3, "shares": {"web": 0.75, "code": 0.25, "odd": "x"}})
    assert ("shares", "web 75.0%, code 25.0%", "") in [*facts(read_run(run.rundir))]
    run.steps(1, 4, 9)
    for _ in range(40):
        run.start(9)
    run.event("stop", step=4, signal="SIGINT")
    rows = event_rows(read_run(run.rundir))
    assert [kind for _, kind, _ in rows[:4]] == ["start", "lost", "start", "lost"] and len(rows) == 61
    assert rows[30] == ("", "", "22 more events") and rows[-1][1:] == (
        "stop",
        "stopped by Ctrl-C after step 4, with a checkpoint",
    )


def test_runs_that_cannot_be_shown_are_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    with pytest.raises(RecipeError, match=r"nowhere is not a run folder: it has no plan.json$"):
        write_report([RunDir(tmp_path / "nowhere")], out)
    empty = Written(tmp_path / "empty")
    with pytest.raises(RecipeError, match=r"run has nothing to report yet: nothing was recorded yet$"):
        write_report([empty.rundir], out)
    assert not out.exists()
    empty.start(9)
    assert write_report([empty.rundir], out) == ([], True) and "No step was trained yet." in out.read_text()
    empty.steps(1, 2, 9)
    with empty.rundir.metrics.open("a") as stream:
        stream.write("{damaged\n")
    empty.rundir.plan.write_text("{}")  # of another version
    noted, _ = write_report([empty.rundir, RunDir(tmp_path / "nowhere")], out)
    assert [note.partition(": ")[0] for note in noted] == ["left out", "run", "run"]
    assert "state and recipe are not known: " in noted[1] and "line 4: not JSON" in noted[2]
    read = Reader(out.read_text())
    assert read.errors == [] and all(note in read.text for note in noted) and "state unknown" in read.text


@pytest.mark.parametrize(("loss", "steps"), [(math.nan, 2000), (math.inf, 3), (1e308, 3), (-1e308, 3), (0.0, 3)])
def test_losses_of_any_size_and_number_are_drawn_on_a_small_page(loss: float, steps: int, tmp_path: Path) -> None:
    run = Written(tmp_path)
    run.start(steps)
    run.steps(1, steps, steps)
    run.event("step", step=steps + 1, loss=str(loss) if not math.isfinite(loss) else loss)
    run.eval(steps + 1, loss=1.0)
    source = page([read_run(run.rundir)])
    assert Reader(source).errors == [] and len(source) < 250_000


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.001, "0.001"), (2e-5, "2e-5"), (0, "0"), (1230, "1,230"), (51_234, "51.2k"), (999_900, "1000k"),
     (8_030_261_248, "8.03B"), (-2.5e6, "-2.5M"), (1e13, "1e13"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_the_command_replaces_only_a_report(mixed: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    write_report([mixed], out)
    before = out.read_text()
    check_report(out)
    done = fsdptrain("report", mixed.root.parent, "--out", out, executed=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "")
    assert out.read_text().partition("Made by")[0] == before.partition("Made by")[0], "equal runs give equal pages"
    out.write_text("mine")
    for path, words in ((out, "is not a report of fsdptrain"), (tmp_path / "r.pdf", "must end in .html")):
        with pytest.raises(RecipeError, match=words):
            check_report(path)
    assert out.read_text() == "mine"
