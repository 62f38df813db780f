"""Make the rows of the `verses-…` recipes from Shakespeare's text: `python recipes/data/verses.py`.

A prompt has the beginning of a speech; the chosen answer is its next line, the rejected one has the words of that line
in another order. No speech of the held-out pairs is in a pair for training. Of each pair one answer is a row of the
files of `verses-kto`, with the label whether it is the chosen one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TRAIN, TEST = 400, 60


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all files by the file's name."""
    text = (FOLDER / "tinyshakespeare.txt").read_text(encoding="utf-8")
    speeches = dict.fromkeys(tuple(part.split("\n")[:3]) for part in text.strip().split("\n\n"))  # each once
    drawn = random.Random(0)
    rows = []
    for speech in drawn.sample(
        [each for each in speeches if len(each) == 3 and len(each[2].split()) > 3], TRAIN + TEST
    ):
        words = speech[2].split()
        while words == speech[2].split():
            drawn.shuffle(words)
        rows.append({"prompt": f"{speech[0]}\n{speech[1]}\n", "chosen": speech[2], "rejected": " ".join(words)})
    judged = [
        {"prompt": row["prompt"], "completion": row[("rejected", "chosen")[number % 2]], "label": number % 2 == 1}
        for number, row in enumerate(rows)
    ]
    return {
        "verses-test.jsonl": rows[:TEST], "verses-train.jsonl": rows[TEST:],
        "verses-judged-test.jsonl": judged[:TEST], "verses-judged-train.jsonl": judged[TEST:],
    }  # fmt: skip


if __name__ == "__main__":
    for name, rows in make_rows().items():
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
