"""Make the rows of the `speakers` recipe from Shakespeare's text: `python recipes/data/speakers.py`.

A prompt has the beginning of a speech, under the name of its speaker, and asks who speaks; the completion is the name.
No speech of the held-out rows is in a row for training.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
TEST, TRAIN = 200, 4000  # rows


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of both files by the file's name."""
    text = (FOLDER / "tinyshakespeare.txt").read_text(encoding="utf-8")
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    speeches = ["\n".join(part[:2]) for part in parts if len(part) > 1 and part[0].endswith(":")]
    speeches = list(dict.fromkeys(speeches))  # each once
    random.Random(0).shuffle(speeches)
    chosen = {"speakers-test.jsonl": speeches[:TEST], "speakers-train.jsonl": speeches[TEST : TEST + TRAIN]}
    return {
        name: [{"prompt": f"{speech}\n\nWho speaks?", "completion": speech.split(":\n")[0]} for speech in found]
        for name, found in chosen.items()
    }


if __name__ == "__main__":
    for name, rows in make_rows().items():
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
