"""Print which packages of fsdptrain import which, as a table made from the imports.

python docs/packages.py          # docs/architecture.md has a copy of the table, and a test compares the two
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "fsdptrain"


def imports() -> Counter[tuple[str, str]]:
    """Count the imports between packages: (importing, imported) → number; the top level is called `top`."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        home = package_of(path.relative_to(PACKAGE).parts)
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = [node.module.split(".")[1:] for node in nodes if (node.module or "").startswith("fsdptrain")]
        found.update((home, other) for parts in names if (other := package_of((*parts, ""))) != home)
    return found


def package_of(parts: tuple[str, ...]) -> str:
    """Return the package of a module from the parts of its path; `top` for a module beside the packages."""
    return parts[0] if (PACKAGE / parts[0]).is_dir() and parts[0] else "top"


def table() -> str:
    """Return a row for each package, without the top level, which every package imports."""
    edges = sorted(pair for pair in imports() if "top" not in pair)
    rows = [
        f"| `{home}` | {' '.join(f'`{other}`' for _, other in group)} |"
        for home, group in itertools.groupby(edges, key=operator.itemgetter(0))
    ]
    return "\n".join(["| package | imports |", "| --- | --- |", *rows])


if __name__ == "__main__":
    print(table())
