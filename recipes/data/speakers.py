"""Make the rows of the `speakers` recipe from Shakespeare's text: `python recipes/data/speakers.py`.

A prompt has the beginning of a speech, under the name of its speaker, and asks who speaks; the completion is the name.
The speakers are the 20 who speak most. No speech of the held-out rows is in a row for training.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
SPEAKERS, TEST = 20, 200  # persons, held-out rows


def make_rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of both files by the file's name."""
    text = (FOLDER / "tinyshakespeare.txt").read_text(encoding="utf-8")
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    speeches = [(part[0].removesuffix(":"), part[1]) for part in parts if len(part) > 1 and part[0].endswith(":")]
    speeches = list(dict.fromkeys(speeches))  # each once
    most = {speaker for speaker, _ in Counter(speaker for speaker, _ in speeches).most_common(SPEAKERS)}
    chosen = [speech for speech in speeches if speech[0] in most]
    random.Random(0).shuffle(chosen)
    rows = [{"prompt": f"{who}:\n{line}\n\nWho speaks?", "completion": who} for who, line in chosen]
    return {"speakers-test.jsonl": rows[:TEST], "speakers-train.jsonl": rows[TEST:]}


if __name__ == "__main__":
    for name, rows in make_rows().items():
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
