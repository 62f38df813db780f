"""Draw the packages of fsdptrain and which of them import which: a Mermaid graph, read off the imports.

python docs/packages.py          # prints the graph; docs/architecture.md holds it, and a test compares the two
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fsdptrain"


def imports() -> Counter[tuple[str, str]]:
    """Count the imports between packages: (importing, imported) → modules; the top level is called `top`."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        home = package_of(path.relative_to(PACKAGE).parts)
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = [node.module.split(".")[1:] for node in nodes if (node.module or "").startswith("fsdptrain")]
        found.update((home, other) for parts in names if (other := package_of((*parts, ""))) != home)
    return found


def package_of(parts: tuple[str, ...]) -> str:
    """The package of a module's path; `top` for the modules beside them."""
    return parts[0] if (PACKAGE / parts[0]).is_dir() and parts[0] else "top"


def graph() -> str:
    """The graph, without the top level: every package imports that."""
    edges = sorted(pair for pair in imports() if "top" not in pair)
    return "\n".join(["```mermaid", "graph TD", *(f"  {home} --> {other}" for home, other in edges), "```"])


if __name__ == "__main__":
    print(graph())
