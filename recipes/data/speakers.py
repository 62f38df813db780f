"""Make the rows of the `speakers` recipe from Shakespeare's text: `python recipes/data/speakers.py`.

A prompt has the beginning of a speech, under the name of its speaker, and asks who speaks; the completion is the name.
The speakers are the 10 who speak most, each equally often. No speech of the held-out rows is in a row for training.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
SPEAKERS, TEST = 10, 20  # persons, held-out rows of each


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of both files by the file's name."""
    text = (FOLDER / "tinyshakespeare.txt").read_text(encoding="utf-8")
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    speeches = [(part[0].removesuffix(":"), part[1]) for part in parts if len(part) > 1 and part[0].endswith(":")]
    speeches = list(dict.fromkeys(speeches))  # each once
    random.Random(0).shuffle(speeches)
    most = dict(Counter(who for who, _ in speeches).most_common(SPEAKERS))
    rows: dict[str, list[dict[str, str]]] = {"speakers-test.jsonl": [], "speakers-train.jsonl": []}
    used: Counter[str] = Counter()
    for who, line in speeches:
        if who in most and used[who] < min(most.values()):
            name = "speakers-test.jsonl" if used[who] < TEST else "speakers-train.jsonl"
            rows[name].append({"prompt": f"{who}:\n{line}\n\nWho speaks?", "completion": who})
            used[who] += 1
    return rows


if __name__ == "__main__":
    for name, rows in make_rows().items():
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
