"""Make the pairs of the `verses-dpo` recipe from Shakespeare's text: `python recipes/data/verses.py`.

A prompt has the beginning of a speech; the chosen answer is its next line, the rejected one has the words of that line
in another order. No speech of the held-out pairs is in a pair for training.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
TRAIN, TEST = 400, 60


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of both files by the file's name."""
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
    return {"verses-test.jsonl": rows[:TEST], "verses-train.jsonl": rows[TEST:]}


if __name__ == "__main__":
    for name, rows in make_rows().items():
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
