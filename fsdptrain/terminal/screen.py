"""Show the events of a run: on a terminal with a live line, in a pipe as plain lines."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from fsdptrain.run_folder.records import Record, RunState, waits_for_slow_ranks, without_better
from fsdptrain.terminal.page import LiveLine, Page, Part, Terminal
from fsdptrain.text import GIB, counted, duration, printable, ranks_text, rate, size

PLAIN_INTERVAL_S = 1.0  # between two step lines in a pipe, at least
MEMORY_DIFFERS = 0.1  # share of the largest peak by which another rank's is noticeably less
SAMPLE_COLUMNS = 120  # of what the model writes behind a prompt, at most
LINES = 20  # of each kind that stay above the live line over a whole run, about
# What stands beside the loss, if events have it.
QUALITY = {"perplexity": ".2f", "margin": ".4f", "accuracy": ".1%", "kl": ".4f", "cross_entropy": ".4f"}


class Screen:
    """Shows records: on a terminal with a live line below them, otherwise as plain lines."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        """`quiet`: read the records, but print nothing."""
        self.console = console or Terminal(quiet=quiet)
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.state = RunState()
        self.last = self.state.newest
        self.peak_memory = 0
        self._rank_memory: list[int] = []  # peak bytes of each rank, as they were last written
        self._last_step_line = 0.0
        self._printed: dict[str, int] = {}  # kind of event → the step of its last line above the live line
        self._thinned = False  # whether an evaluation got no line
        self._resumed: list[int] = []  # for each start of the workers: the step that it resumed from
        self._label_tokens: list[int] = []  # for each start of the workers: trained so far
        self._line = LiveLine()
        self._display = Live(self._line, console=self.console, refresh_per_second=5, transient=True)

    def __enter__(self) -> Screen:
        if self.live:
            self._display.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._line.clear()
        self._display.stop()

    def show(self, record: Record) -> None:
        """Show one event or progress record."""
        self.state.add(record)
        handler = getattr(self, f"_on_{record['event']}", None)
        if handler:
            handler(record)

    def say(self, text: str) -> None:
        """Print lines above the live line; on a terminal, wrapped between words."""
        Page(self.console).say(text)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Print a table, fitted to the width of a terminal."""
        Page(self.console).table(header, rows)

    @contextlib.contextmanager
    def busy(self, work: str) -> Iterator[None]:
        """Show work that takes a while on the live line, until the block ends."""
        self.show_waiting(work)
        try:
            yield
        finally:
            self._line.clear()

    def show_waiting(self, work: str) -> None:
        """Show work and its elapsed seconds on the live line, until something else is shown there."""
        self._line.show_work(work)

    def _on_progress(self, record: Record) -> None:
        done, total, stage = record["done"], record["total"], record["stage"]
        self._line.show_work(stage, done, total)
        if done >= total > 1 and not self.live:
            self.say(f"{stage}: {done:,} of {total:,}")

    def _on_start(self, record: Record) -> None:
        self._resumed.append(0)
        self._label_tokens.append(0)
        self._printed = {}
        trained = f" ({record['trainable']:,} trained)" if "trainable" in record else ""
        self.say(
            f"{record['parameters']:,} parameters{trained} on {record['device']}, attention {record['attention']} · "
            f"{counted(record['total_steps'], 'step')}\n{counted(record['blocks'], 'sequence')} of "
            f"{record['seq_len']:,} tokens ({1 - record['fill']:.1%} padding)"
        )
        for line in record.get("notes", []):
            self.say(f"  {line}")
        self.show_waiting("first step")

    def _on_resume(self, record: Record) -> None:
        self._resumed[-1:] = [record["step"]]
        self._printed = {"step": record["step"]}
        self.say(
            f"resumed after step {record['step']}"
            if record["step"]
            else "the earlier attempt left no checkpoint: training starts again from step 0"
        )
        for key, (old, new) in record.get("changed", {}).items():
            self.say(f"  {key}: {old} → {new}")
        for line in record.get("notes", []):
            self.say(f"  {line}")

    def _on_step(self, record: Record) -> None:
        self.peak_memory = max(self.peak_memory, record["peak_memory_bytes"])
        self._rank_memory = record.get("peak_memory_by_rank", self._rank_memory)
        self._label_tokens[-1:] = [record["total_tokens"]]
        step = record["step"]
        total = self._total_steps(step)
        eta = max(0, total - step) * statistics.fmean(self.state.step_times)
        parts = [
            Part(1, f"loss {record['loss']:.4f}"),
            *(Part(2, text) for text in _quality(record, "accuracy" if "accuracy" in record else "margin")),
            Part(2, rate(record["positions_per_s"])),
            Part(3, f"ETA {duration(eta)}"),
            Part(5, f"lr {record['lr']:.2e}"),
            Part(6, f"norm {record['grad_norm']:.2f}"),
            Part(7, f"{self._least_memory()}{record['peak_memory_bytes'] / GIB:.2f} GiB"),
        ]
        if retries := record.get("alloc_retries"):  # absent on a CPU
            parts.insert(3, Part(4, f"allocator retries {retries}"))
        self._line.show_step(step, total, parts)
        if self.live and self._is_line_due("step", step, total):
            epoch = f"  epoch {record['epoch']:.2f}" if "epoch" in record else ""
            held_out = f"  held-out {self.last['eval']['loss']:.4f}" if "eval" in self.last else ""
            self.say(f"step {step:>{len(str(total))}}/{total}{epoch}  loss {self.state.training_loss:.4f}{held_out}")
        if not self.live and (step >= total or time.monotonic() - self._last_step_line >= PLAIN_INTERVAL_S):
            self._last_step_line = time.monotonic()
            self.say("  ".join([f"step {step}/{total}", *(str(part.text) for part in parts)]))

    def _total_steps(self, step: int) -> int:
        return int(self.last["start"]["total_steps"]) if "start" in self.last else step

    def _least_memory(self) -> str:
        """Return the peak of the rank with the least memory, as the beginning of a range, if the ranks differ."""
        least = min(self._rank_memory, default=0)
        return f"{least / GIB:.2f} to " if least < (1 - MEMORY_DIFFERS) * max(self._rank_memory, default=0) else ""

    def _is_line_due(self, kind: str, step: int, total: int) -> bool:
        """Return whether an event gets a line that stays above the live line; over a whole run LINES of a kind do."""
        before = self._printed.get(kind, 0)
        due = step in (0, total) or step * LINES // total > before * LINES // total
        if due:
            self._printed[kind] = step
        elif kind != "step" and not self._thinned:
            self._thinned = True
            self.say(f"only about {LINES} evaluations are shown here; metrics.jsonl and `report` have all")
        return due

    def _on_window(self, record: Record) -> None:
        if record["waited_s"] >= 1:
            waited = duration(record["waited_s"])
            self.say(f"waited {waited} for window {record['window']} of {record['of']} of the data (data.window)")

    def _on_eval(self, record: Record) -> None:
        step = record["step"]
        if not self.live or self._is_line_due("eval", step, self._total_steps(step)):
            sources = "  ".join(f"{name} {loss:.4f}" for name, loss in record.get("losses", {}).items())
            self.say(
                f"eval at step {step}: loss {record['loss']:.4f}  {'  '.join(_quality(record, *QUALITY))}  "
                f"({record['tokens']:,} label tokens)" + f"\n  {sources}" * bool(sources)
            )
        if not self.state.step_times:
            self.show_waiting("first step")

    def _on_early_stop(self, record: Record) -> None:
        self.say(f"{without_better(record)}: the run ends after step {record['step']} (eval.patience)")

    def _on_generated(self, record: Record) -> None:
        step = record["step"]
        if self.live and not self._is_line_due("generated", step, self._total_steps(step)):
            return
        room = min(self.console.width, SAMPLE_COLUMNS) if self.live else SAMPLE_COLUMNS
        for prompt, text in zip(record["prompts"], record["texts"], strict=False):
            line = printable(" ".join(f"{prompt} → {text}".split()))
            self.say(f"  {line[: room - 3]}…" if len(line) > room - 2 else f"  {line}")

    def _on_skip(self, record: Record) -> None:
        self.say(f"skipped: {record['what']}")

    def _on_straggler(self, record: Record) -> None:
        if not waits_for_slow_ranks(self.last.get("start")):
            return
        who = ranks_text([record["rank"]], self.state.hosts())
        self.say(
            f"{who} is slow: all other ranks wait for its {record['cause']}, about {record['cost']:.0%} of each step"
        )

    def _on_set_aside(self, record: Record) -> None:
        self.say(f"a damaged checkpoint was renamed to {record['path']}: {'; '.join(record['problems'])}")

    def _on_save(self, record: Record) -> None:
        self.say(f"checkpoint: {Path(record['path']).name} ({size(record['bytes'])}, {record['seconds']:.1f} s)")

    def _on_export(self, record: Record) -> None:
        kinds = {"separate": "the adapter, ", "merged": "merged, ", "both": "merged, and the adapter, "}
        what = kinds.get(record.get("adapter", ""), "")
        what += f"step {step}, " if (step := record.get("step", self.state.steps_made)) != self.state.steps_made else ""
        self.say(f"export: {record['path']} ({what}{size(record['bytes'])}, {record['dtype']})")
        if "compared" in record:
            self.say(f"  {_comparison_text(record['compared'])}")
        if record.get("opened"):
            self.say("  opened by transformers in a fresh process")
        if "not_opened" in record:
            self.say(f"  not opened in a fresh process: {record['not_opened']}")
        if "not_compared" in record:
            self.say(f"  not compared with the trained model: {record['not_compared']}")
        if "kept" in record:
            self.say(f"  files of the earlier export folder were moved to {record['kept']}")

    def summary(self, seconds: float) -> None:
        """Print what this command has trained, and how fast, and the steps of all commands in total."""
        self._line.clear()
        if "step" not in self.last:
            return
        step, before, restarts = self.last["step"], self._resumed[0], len(self._resumed) - 1
        extras = [f"{step['step']:,} total"] if before else []
        extras += [counted(restarts, "restart")] if restarts else []
        least, fullest = self._least_memory(), ""
        if least:
            rank = self._rank_memory.index(max(self._rank_memory))
            fullest = f" (most on {ranks_text([rank], self.state.hosts())})"
        speed = [
            f"{counted(step['step'] - before, 'step')} in {duration(seconds)}"
            + (f" ({', '.join(extras)})" if extras else ""),
            f"{rate(step['total_positions'] / step['total_s'])} while training",
            f"peak {least}{self.peak_memory / GIB:.2f} GiB/rank{fullest}",
        ]
        losses = [f"{sum(self._label_tokens):,} label tokens", f"training loss {self.state.training_loss:.4f}"]
        losses += [f"held-out loss {self.last['eval']['loss']:.4f}"] if "eval" in self.last else []
        self.say("\n" + " · ".join(speed) + "\n" + " · ".join(losses))


def _quality(record: Record, *names: str) -> list[str]:
    return [f"{name.replace('_', '-')} {record[name]:{QUALITY[name]}}" for name in names if name in record]


def _comparison_text(compared: list[Record]) -> str:
    names = {"model": "", "merged": "merged: ", "separate": "adapter on its base: "}
    ways = "; ".join(names[found["what"]] + _verdict(found) for found in compared)
    tokens, rows = compared[0]["tokens"], "held-out" if compared[0]["held_out"] else "training"
    return f"opened in a fresh process, logits compared with the trained model's on {tokens} {rows} tokens: {ways}"


def _verdict(found: Record) -> str:
    """Return what a difference of logits means. One that rounding does not explain was refused before."""
    if not found["largest"]:
        return "identical"
    meaning = "different, because the adapter was trained on quantised weights and merged into the original ones"
    if found.get("rounded_to"):
        meaning = f"equal within the rounding of {found['rounded_to']}"
    far = f"{found['mean']:.1e} on average, {found['largest']:.1e} at most, of a spread of {found['spread']:.2g}"
    return f"{meaning} ({far})"
