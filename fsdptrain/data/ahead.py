"""Prepare the data of a recipe ahead of its run: all that the ranks do before they train, with all cores."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

from fsdptrain.config.paths import cache_root
from fsdptrain.data.corpus import prepare, row_notes
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.data.resume_pins import date_note, pin_commits, pin_date
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.data.windows import of_first_window, windows_note
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import Progress
from fsdptrain.text import counted, duration, rate, size


class _Watch:
    """Passes progress on, and measures how many rows were encoded, without those in the cache, and for how long."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.rows, self.seconds = progress, 0, 0.0
        self._last = (0, time.monotonic())

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == "tokenise":
            if done:
                self.rows, self.seconds = self.rows + done - self._last[0], self.seconds + now - self._last[1]
            self._last = (done, now)
        self.progress(stage, done, total)


def prepare_ahead(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Tokenise and pack the data of a plan, of several windows the first, into the cache; return what it became.

    Raises RecipeError for the tokenizer and DataError for the data, as the run would.
    """
    go_offline_if_unreachable(plan, progress)
    plan, windows = of_first_window(pin_commits(plan, plan.rundir, keep=False))
    tokenizer, watch = load_tokenizer(plan, progress), _Watch(progress)
    day = pin_date(plan, tokenizer, plan.rundir, keep=False)
    stream, held_out, eval_corpus = prepare(plan, tokenizer, watch, day=day)
    packed = [corpus for mixed in (stream.corpus, eval_corpus) for corpus in mixed.parts]
    made = list({corpus.name: corpus for corpus in packed}.values())
    rows, tokens = (sum(corpus.notes[name] for corpus in made) for name in ("rows", "tokens"))
    arrays = [array for corpus in made for array in (corpus.tokens, corpus.trained, corpus.ends, corpus.lengths)]
    arrays += [array for corpus in packed for array in (corpus.pieces, corpus.labels)]
    lost, divided = row_notes(plan, stream.corpus, eval_corpus)
    if len(windows) > 1:
        divided.append(f"{windows_note(windows, len(stream))}: only the first is prepared")
    return {
        "rows": rows, "tokens": tokens, "label_tokens": sum(corpus.notes["label_tokens"] for corpus in made),
        "sequences": len(stream), "eval_sequences": len(held_out), "encoded_rows": watch.rows,
        "seconds": watch.seconds, "tokens_per_s": tokens * watch.rows / rows / watch.seconds if watch.rows else None,
        "cache": str(cache_root()), "host": socket.gethostname(), "bytes": sum(array.nbytes for array in arrays),
        "notes": [*lost, *divided, *([date_note(day)] if day else [])],
    }  # fmt: skip


def prepared_lines(made: dict[str, Any], seq_len: int) -> Iterator[str]:
    """Yield what `prepare_ahead` returned, for a reader."""
    found = "all of it was in the cache"
    if made["encoded_rows"]:
        known = made["rows"] - made["encoded_rows"]
        found = (
            f"{rate(made['tokens_per_s'])}, {duration(made['seconds'])}"
            + f"; {known:,} rows were in the cache" * bool(known)
        )
    yield f"{counted(made['rows'], 'row')}, {made['tokens']:,} tokens, {made['label_tokens']:,} trained ({found})"
    held_out = f"; {made['eval_sequences']:,} held out" if made["eval_sequences"] else ""
    yield f"{counted(made['sequences'], 'sequence')} of {seq_len:,} tokens{held_out}"
    yield f"{size(made['bytes'])} in {made['cache']} on {made['host']}; another host needs a cache of its own"
    yield from (f"note: {note}" for note in made["notes"])
