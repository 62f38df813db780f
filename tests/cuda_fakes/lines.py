"""Which lines of the package only a CUDA device executes, and which of them ran."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import fsdptrain

PACKAGE = Path(fsdptrain.__file__).parent
CUDA = re.compile(
    r"torch\.(backends\.)?cuda\.|\bis_cuda\b|device\.type [!=]= '(cuda|cpu)'|get_device_module|pin_memory"
)
ELSEWHERE = re.compile(r"!= 'cuda'|== 'cpu'")  # what follows such a test in its block is for the device
PRETENDED = ("forecast",)  # packages in which the device is pretended in any case

Lines = tuple[Path, int, int]  # of a statement: its first and last


def cuda_lines() -> Iterator[Lines]:
    """Yield the statements of functions that ask for a device, and those that only a CUDA device reaches by them."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name not in PRETENDED:
            functions = [f for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.FunctionDef)]
            lines = set().union(*(_concerned(function.body) for function in functions))
            yield from ((path, first, last) for first, last in sorted(lines))


def _concerned(block: Sequence[ast.stmt | ast.ExceptHandler]) -> set[tuple[int, int]]:
    found, reached = set(), False
    for statement in block:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        fields = [each for _, each in ast.iter_fields(statement) if isinstance(each, list)]
        blocks = [each for each in fields if each and isinstance(each[0], ast.stmt | ast.ExceptHandler)]
        inner = [each for block in blocks for each in block]
        own = " ".join(ast.unparse(child) for child in ast.iter_child_nodes(statement) if child not in inner)
        asks = bool(CUDA.search(own))
        if asks or reached:
            end = inner[0].lineno - 1 if inner else statement.end_lineno or 0
            found.add((statement.lineno, max(end, statement.lineno)))
        if isinstance(statement, ast.If) and asks and "type" in own:
            elsewhere = bool(ELSEWHERE.search(own))
            for each in statement.orelse if elsewhere else statement.body:
                found.add((each.lineno, each.end_lineno or each.lineno))
            reached |= elsewhere and isinstance(statement.body[-1], ast.Return)
        found |= set().union(*map(_concerned, blocks))
    return found


def traced(run: Callable[[], None], files: set[str]) -> set[tuple[str, int]]:
    """Run a function; return the (file, line) of these files that this thread has executed."""
    hit = set()

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        hit.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    sys.settrace(lambda frame, event, _: on_line if frame.f_code.co_filename in files else None)
    try:
        run()
    finally:
        sys.settrace(None)
    return hit
