"""Write the tables of docs/from-fsdp1.md, what replaces the names and values of other tools, from `config.names`.

python docs/names.py             # replaces the document's end, from its heading "Names" on; a test compares the two
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fsdptrain.config.names import FOREIGN_NAMES, FOREIGN_VALUES, TABLES, leading_key

DOCUMENT = Path(__file__).parent / "from-fsdp1.md"
HEADING = "## Names"


def tables() -> str:
    """Return the end of the document: names that have a key here, names that have none, and values."""
    with_key, without = [], []
    for text, names in FOREIGN_NAMES.items():
        key = leading_key(text)
        here = text.removeprefix(key or "").replace(TABLES, "this document")
        row = f"| {quoted(names.split())} | {f'`{key}`' if key else ''}{here} |"
        (with_key if key else without).append(row)
    values = [f"| `{key}` | {'; '.join(value_pairs(pairs))} |" for key, pairs in FOREIGN_VALUES.items()]
    return f"""{HEADING}

{table("elsewhere | here", with_key)}

No key replaces these:

{table("elsewhere | here", without)}

## Values

{table("key | elsewhere → here", values)}
"""


def table(head: str, rows: list[str]) -> str:
    """Return a table of two columns."""
    return "\n".join([f"| {head} |", "| --- | --- |", *rows])


def value_pairs(pairs: dict[Any, Any]) -> Iterator[str]:
    """Yield the values of other tools with the recipe's value for them; those with the same meaning together."""
    for own in dict.fromkeys(map(json.dumps, pairs.values())):
        yield f"{quoted(word(value) for value in pairs if json.dumps(pairs[value]) == own)} → `{word(json.loads(own))}`"


def word(value: Any) -> str:
    """Return a value as it is written in a recipe."""
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def quoted(words: Iterable[str]) -> str:
    """Return words as code, with commas between them."""
    return ", ".join(f"`{name}`" for name in words)


if __name__ == "__main__":
    written = DOCUMENT.read_text(encoding="utf-8").partition(f"\n{HEADING}\n")[0]
    DOCUMENT.write_text(f"{written}\n{tables()}", encoding="utf-8")
