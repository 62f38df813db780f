"""Make README's picture: replay a finished run on a recorded terminal, with its live line as it was halfway.

    (cd /tmp && fsdptrain run shakespeare) && python docs/picture.py /tmp/runs/shakespeare > docs/terminal.svg

The run is in another folder than the heading names, so that the heading calls it new. The folder is cut from the
picture.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from fsdptrain.attempts.attempts import EarlierAttempts
from fsdptrain.folder.records import Tail
from fsdptrain.folder.rundir import RunDir
from fsdptrain.launch.heading import heading
from fsdptrain.plan.plan import Plan
from fsdptrain.terminal.screen import Screen


def main(run: Path) -> None:
    """Print the picture of a run folder as SVG."""
    console = Console(record=True, file=io.StringIO(), width=96, force_terminal=True, highlight=False, soft_wrap=True)
    screen, rundir = Screen(console), RunDir(run)
    plan = Plan.from_json(rundir.plan.read_text())
    events = list(Tail(rundir.metrics, from_end=False).read())
    steps = [event["step"] for event in events if event["event"] == "step"]
    screen.say(f"$ fsdptrain run {plan.recipe.name}")
    screen.say(heading(plan, RunDir(Path.cwd() / "runs" / plan.recipe.name), EarlierAttempts()))
    for event in events:
        screen.show(event)
        if event["event"] == "step" and event["step"] == steps[len(steps) // 2]:
            console.print(screen._line, soft_wrap=False)
    screen.summary(events[-1]["at"] - events[0]["at"])
    print(console.export_svg(title="fsdptrain").replace(str(run.parent.parent) + "/", ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
