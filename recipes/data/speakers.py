"""Make the rows of the `speakers` recipes from Shakespeare's text: `python recipes/data/speakers.py`.

A prompt has the first lines of two speeches, one of which follows the other, and asks who answers; the completion is
the name. No speech of the held-out rows is in a row for training.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
TRAIN, TEST = 4000, 200  # rows


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of both files by the file's name."""
    text = (FOLDER / "tinyshakespeare.txt").read_text(encoding="utf-8")
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    speeches = ["\n".join(part[:2]) for part in parts if len(part) > 1 and part[0].endswith(":")]
    starts = [i for i in range(len(speeches) - 1) if _name(speeches[i]) != _name(speeches[i + 1])]
    random.Random(0).shuffle(starts)
    held_out: list[int] = []
    for start in starts:
        if len(held_out) < TEST and not {start - 1, start + 1} & set(held_out):
            held_out.append(start)
    away = {near for start in held_out for near in (start - 1, start, start + 1)}
    training = [start for start in starts if start not in away][:TRAIN]
    chosen = {"speakers-train.jsonl": training, "speakers-test.jsonl": held_out}
    return {name: [_row(*speeches[i : i + 2]) for i in found] for name, found in chosen.items()}


def _row(first: str, second: str) -> dict[str, str]:
    return {"prompt": f"{first}\n\n{second}\n\nWho answers?", "completion": _name(second)}


def _name(speech: str) -> str:
    return speech.split(":\n")[0]


if __name__ == "__main__":
    for name, rows in make_rows().items():
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
