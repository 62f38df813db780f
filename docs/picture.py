"""Make the pictures of README and docs, by the commands that a user would type.

    python docs/picture.py [NAME …]        # such as step.png; without a name, all of PICTURES

Runs and traces are kept in build/pictures: what is there is not trained again. On an idle machine with two cores all of
them take an hour, half of it calibration.png. Pictures of reports need Chromium.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

import fsdptrain
from fsdptrain.checkpoint.resume import EarlierAttempts
from fsdptrain.cli import find_recipe
from fsdptrain.plan.plan import Plan
from fsdptrain.report.run_banner import heading
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.page import Page
from fsdptrain.terminal.screen import Screen
from fsdptrain.validation.findings import show_section
from fsdptrain.validation.request import make_request, run_dry_run

DOCS = Path(__file__).parent.absolute()
ROOT = DOCS.parent
WORK = ROOT / "build" / "pictures"


def terminal(picture: Path) -> None:
    """Replay a finished run on a recorded terminal, with its live line as it was halfway."""
    run = RunDir(Path(fsdptrain.run("shakespeare")).absolute())
    console = Console(record=True, file=io.StringIO(), width=96, force_terminal=True, highlight=False, soft_wrap=True)
    # As in a clone of the repository: no other folder is in the picture.
    screen, metrics = Screen(console), run.metrics.read_text().replace(f"{run.root.parent.parent}/", "")
    events = [json.loads(line) for line in metrics.splitlines()]
    steps = [event["step"] for event in events if event["event"] == "step"]
    screen.say("$ fsdptrain run shakespeare")
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):  # the heading calls the run new
        new = RunDir(Path.cwd() / "runs" / "shakespeare")
        screen.say(heading(Plan.from_json(run.plan.read_text()), new, EarlierAttempts()).replace(f"{ROOT}/", ""))
    for event in events:
        screen.show(event)
        if event["event"] == "step" and event["step"] == steps[len(steps) // 2]:
            console.print(screen._line, soft_wrap=False)
    screen.summary(events[-1]["at"] - events[0]["at"])
    write_svg(console, picture)


def advise(picture: Path) -> None:
    """Record the search for plans of a shipped recipe, without the notes that depend on this machine."""
    words = ["llama3.1-8b-full-shard-8xh100", "--hardware", "h100", "--advise"]
    outcome = run_dry_run(make_request(find_recipe(words[0], None), "h100", advise=True), Screen(Console(quiet=True)))
    console = Console(record=True, file=io.StringIO(), width=116, force_terminal=True, highlight=False, soft_wrap=True)
    page = Page(console)
    page.say(f"$ fsdptrain validate {' '.join(words)}\n{outcome.verdict}")
    for title, items in outcome.sections:
        if title == "Other plans for the same job":
            show_section(title, items, page)
    write_svg(console, picture)


def write_svg(console: Console, picture: Path) -> None:
    """Write what a console recorded, in whatever font with fixed widths the reader has: none is loaded."""
    drawn = console.export_svg(title="fsdptrain")
    picture.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")


def report(picture: Path) -> None:
    """Photograph the report of the same run."""
    photograph(picture, "light", fsdptrain.run("shakespeare"))


def report_two(picture: Path) -> None:
    """Photograph the report of two runs with other schedules."""
    ways = {"cosine": [], "linear": ["schedule.name=linear", "optim.lr=1e-3", "train.global_batch_size=8"]}
    shared = ["train.steps=60", "eval.every=20"]
    runs = [fsdptrain.run("shakespeare", [f"name={name}", *shared, *words]) for name, words in ways.items()]
    photograph(picture, "dark", *runs)


def photograph(picture: Path, scheme: str, *runs: str) -> None:
    """Write the report of runs, and what a browser shows of it."""
    command("-m", "fsdptrain", "report", *runs, "--out", "report.html")
    flags = ["--headless=new", "--hide-scrollbars", "--window-size=1100,1250", f"--screenshot={picture}"]
    flags.append(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}")
    subprocess.run(["chromium", *flags, (WORK / "report.html").as_uri()], check=True)


def step(picture: Path) -> None:
    """Plot the memory of a step as `validate` does."""
    command("-m", "fsdptrain", "validate", "llama3.1-8b-full-shard-8xh100", "--hardware", "8xh100", "--plot", picture)


def finetune(picture: Path) -> None:
    """Draw the held-out loss of full training, LoRA and QLoRA from one start."""
    from matplotlib.figure import Figure

    fsdptrain.run("shakespeare")
    ways = {
        "all weights": ("o-", "gsm8k-sft", []),
        "LoRA": ("o-", "gsm8k-lora", []),
        "QLoRA": ("x--", "gsm8k-lora", ["adapter.kind=qlora"]),  # nearly equal to LoRA: its crosses lie on the dots
    }
    shared = [
        "data.max_rows=null", "data.eval.max_rows=100", "train.epochs=0.65", "train.global_batch_size=4",
        "train.micro_batch_size=2", "eval.every=20", "checkpoint.every=null", "export.at_end=false",
    ]  # fmt: skip
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(title="GSM8K from the same start", xlabel="steps", ylabel="held-out loss, nats a token")
    for name, (line, recipe, words) in ways.items():
        history = fsdptrain.read_history(fsdptrain.run(recipe, [f"name={name.replace(' ', '-')}", *shared, *words]))
        evals = [event for event in history if event["event"] == "eval"]
        steps, losses = ([event[key] for event in evals] for key in ("step", "loss"))
        axes.plot(steps, losses, line, ms=4 if line == "o-" else 6, label=f"{name}: {losses[-1]:.2f}")
    axes.grid(axis="y", color="0.9")
    axes.legend()
    figure.savefig(picture, dpi=110)


def calibration(picture: Path) -> None:
    """Draw what the forecast says of published runs."""
    command(ROOT / "benchmarks" / "calibrate.py", "--traces", "traces", "--plot", picture)


def command(*words: Path | str) -> None:
    """Run a program of this tree."""
    subprocess.run([sys.executable, *map(str, words)], check=True)


def distillation(_: Path) -> None:
    """Draw what a student learns from a teacher, and write the tables beside it."""
    command("-m", "fsdptrain", "run", "shakespeare-teacher")
    command(ROOT / "benchmarks" / "distillation.py")


PICTURES = {
    "terminal.svg": terminal,
    "advise.svg": advise,
    "report.png": report,
    "report-two.png": report_two,
    "step.png": step,
    "finetune.png": finetune,
    "calibration.png": calibration,
    "distillation.svg": distillation,
}


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    WORK.mkdir(parents=True, exist_ok=True)
    os.chdir(WORK)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name](DOCS / name)
