"""Write the tables that are made from the code: the events of a run, and the objectives.

python docs/tables.py            # replaces the end of each document in ENDS; a test compares them
"""

from __future__ import annotations

from pathlib import Path

from fsdptrain.config.objectives import Objective
from fsdptrain.run_folder.records import EVENTS, EventKind


def events() -> str:
    """Return the table of the events."""
    rows = [
        f"| `{kind}` | {event.says} | {fields_text(event)} | {'yes' * event.undone} | {'yes' * event.tracked} |"
        for kind, event in EVENTS.items()
    ]
    head = "event | what it says | fields, in brackets those that may be missing | undone by a resume | in trackers"
    return table("Events", head, rows)


def objectives() -> str:
    """Return the table of the objectives."""
    rows = [
        f"| `{each}` | {each.says} | {', '.join(f'`{form}`' for form in each.formats)} | {each.unit}s | "
        f"{'the start' * each.needs_reference} | {', '.join(f'`{name}`' for name in each.measures)} | {each.source} |"
        for each in Objective
    ]
    head = "`train.objective` | what it learns | `data.format` | loss: mean over | reference | in events | source"
    return table("Objectives", head, rows)


def table(title: str, head: str, rows: list[str]) -> str:
    """Return a section with a table."""
    return "\n".join([f"## {title}", "", f"| {head} |", "|" + " --- |" * len(head.split(" | ")), *rows, ""])


def fields_text(event: EventKind) -> str:
    """Return the names of the fields of an event."""
    return ", ".join([*(f"`{name}`" for name in event.fields), *(f"[`{name}`]" for name in event.optional)])


ENDS = {"events.md": events, "objectives.md": objectives}


if __name__ == "__main__":
    for name, end in ENDS.items():
        document, made = Path(__file__).parent / name, end()
        written = document.read_text(encoding="utf-8").partition(f"\n{made.splitlines()[0]}\n")[0]
        document.write_text(f"{written}\n{made}", encoding="utf-8")
