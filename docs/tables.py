"""Write the tables that are made from the code: the names of other tools, and the events of a run.

python docs/tables.py            # replaces the end of each document in ENDS; a test compares them
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fsdptrain.config.names import FOREIGN_NAMES, FOREIGN_VALUES, TABLES, leading_key
from fsdptrain.run_folder.records import EVENTS, EventKind


def names() -> str:
    """Return what replaces the names and values of other tools: names with a key, those without effect, the rest."""
    with_key, needless, without = [], [], []
    for text, names in FOREIGN_NAMES.items():
        key = leading_key(text)
        here = text.removeprefix(key or "").replace(TABLES, "this document")
        why = re.sub("[:;] delete the line$|^not supported: ", "", here)
        row = f"| {quoted(names.split())} | {f'`{key}`{here}' if key else why} |"
        (with_key if key else needless if here.endswith("delete the line") else without).append(row)
    values = [f"| `{key}` | {'; '.join(value_pairs(pairs))} |" for key, pairs in FOREIGN_VALUES.items()]
    return f"""## Names

{table("elsewhere | here", with_key)}

Delete these:

{table("elsewhere | why", needless)}

Not supported, unless the table says otherwise:

{table("elsewhere | why, and what to use instead", without)}

## Values

{table("key | elsewhere → here", values)}
"""


def events() -> str:
    """Return the table of the events."""
    rows = [
        f"| `{kind}` | {event.says} | {fields_text(event)} | {'yes' * event.undone} | {'yes' * event.tracked} |"
        for kind, event in EVENTS.items()
    ]
    head = "event | what it says | fields, in brackets those that may be missing | undone by a resume | in trackers"
    return f"## Events\n\n{table(head, rows)}\n"


def fields_text(event: EventKind) -> str:
    """Return the names of the fields of an event."""
    return ", ".join([*(f"`{name}`" for name in event.fields), *(f"[`{name}`]" for name in event.optional)])


def table(head: str, rows: list[str]) -> str:
    """Return a table with this head."""
    return "\n".join([f"| {head} |", "|" + " --- |" * len(head.split(" | ")), *rows])


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


ENDS = {"from-fsdp1.md": names, "events.md": events}


if __name__ == "__main__":
    for name, end in ENDS.items():
        document, made = Path(__file__).parent / name, end()
        written = document.read_text(encoding="utf-8").partition(f"\n{made.splitlines()[0]}\n")[0]
        document.write_text(f"{written}\n{made}", encoding="utf-8")
