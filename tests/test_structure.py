"""The house keeps its order: a room imports only rooms above it, and nothing above the torch line imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, environment

PACKAGE = ROOT / "fsdptrain"
ABOVE = (
    "errors", "text", "processes", "schema", "names", "paths", "recipe", "rundir", "ownership", "manifest", "hardware",
    "plan", "page", "liveline", "report", "attempts", "claim", "heading", "trace", "ledger", "closed_form", "allocator",
    "timing", "plot", "verify", "launch", "agent", "forecast", "outlook", "calibrate", "advise", "findings", "summary",
    "dryrun", "cli",
)  # fmt: skip
BELOW = (
    "dist", "rows", "commits", "starter", "chat", "encode", "data", "hub", "tokenizer", "model", "assets", "loss",
    "attention", "probe", "weights", "shard", "optim", "pace", "engine", "preflight", "nonfinite", "checkpoint",
    "export", "pretend", "recorder", "simulate", "estimate", "machine", "histogram", "anatomy", "validate", "watchdog",
    "pulse", "worker",
)  # fmt: skip
ROOMS = ABOVE + BELOW


def imported_rooms(path: Path, only_top: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if only_top else list(ast.walk(tree))
    return {
        n.module.partition(".")[2]
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.module and "fsdptrain." in n.module
    }


def test_every_file_is_a_room() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    # The command line hands over to the worker and the exporter by late imports; nobody else looks down.
    below = imported_rooms(PACKAGE / f"{room}.py", only_top=room == "cli") - set(ROOMS[: ROOMS.index(room)])
    assert not below


@pytest.mark.parametrize("room", ABOVE)
def test_nothing_above_the_torch_line_imports_torch(room: str) -> None:
    heavy = {"torch", "transformers", "datasets", "tokenizers", "numpy", "tensorboard"}
    code = f"import sys, fsdptrain.{room}; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == "[]"
