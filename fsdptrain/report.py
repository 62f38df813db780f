"""What a run says: events → `metrics.jsonl` and TensorBoard (the workers' side) and → the terminal (the person's).

The two sides meet in files, so that the terminal of a launched run, a second terminal and a later reader see the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fsdptrain.liveline import LiveLine, Part
from fsdptrain.page import Page
from fsdptrain.rundir import RunDir
from fsdptrain.text import counted, duration, fitted, rate, wrapped

Record = dict[str, Any]
PROGRESS_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 1.0  # a piped run prints at most one step line a second
PACES = 32  # steps whose mean time makes the ETA
GIB = 2**30


class Reporter:
    """Rank 0's pen. On other ranks (`rundir=None`) every call does nothing."""

    def __init__(self, rundir: RunDir | None, tensorboard: bool = False, screen: Screen | None = None) -> None:
        self._rundir, self._screen = rundir, screen
        self._metrics: IO[str] | None = None
        self._progress: IO[str] | None = None
        self._board: Any = None
        self._last_progress = ("", 0.0)
        if rundir is None:
            return
        rundir.logs.mkdir(parents=True, exist_ok=True)
        self._metrics = rundir.metrics.open("a", buffering=1, encoding="utf-8")
        self._progress = rundir.progress.open("a", buffering=1, encoding="utf-8")
        if tensorboard:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._board = EventFileWriter(str(rundir.tensorboard))

    def event(self, kind: str, **fields: Any) -> None:
        """Write one event and when it was (`at`, seconds since 1970); `step` and `eval` go to TensorBoard too."""
        if self._metrics is None:
            return
        record = {"event": kind, "at": round(time.time(), 3), **fields}
        self._metrics.write(json.dumps(_finite(record)) + "\n")
        if self._screen:
            self._screen.show(record)
        if self._board and kind in ("step", "eval"):
            self._scalars(kind, fields)
        if self._board and kind == "resume":
            self._purge(fields["step"])

    def resume(self, step: int, changed: dict[str, Any]) -> None:
        """Write that training goes on after `step`, unless this is the first start; readers drop what is made again."""
        records = history(self._rundir.metrics) if self._rundir else ()
        if step or any(record["event"] in OF_A_STEP for record in records):
            self.event("resume", step=step, changed=changed)

    def has(self, kind: str, step: int | None = None) -> bool:
        """Whether this run holds such an event (of this step), of this process or an earlier one."""
        records = history(self._rundir.metrics) if self._rundir else ()
        return any(record["event"] == kind and step in (None, record.get("step")) for record in records)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is (rows, tensors or files); calls are thinned out. A total of 0: nobody knows."""
        now = time.monotonic()
        last_stage, last_time = self._last_progress
        if self._progress is None or (stage == last_stage and now - last_time < PROGRESS_INTERVAL_S and done < total):
            return
        self._last_progress = (stage, now)
        record = {"event": "progress", "at": time.time(), "stage": stage, "done": done, "total": total}
        self._progress.write(json.dumps(record) + "\n")
        if self._screen:
            self._screen.show(record)

    def close(self) -> None:
        """Flush and close every file."""
        for stream in (self._metrics, self._progress, self._board):
            if stream is not None:
                stream.close()
        self._metrics = self._progress = self._board = None

    def _scalars(self, kind: str, fields: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in fields.items() if isinstance(v, (int, float)) and k != "step"}
        values = [Summary.Value(tag=f"{kind}/{name}", simple_value=number) for name, number in numbers.items()]
        self._board.add_event(Event(wall_time=time.time(), step=fields["step"], summary=Summary(value=values)))

    def _purge(self, step: int) -> None:
        """Have TensorBoard forget what earlier attempts wrote of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._board.add_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))


def cut_half_lines(rundir: RunDir) -> None:
    """Cut off the half line that a full disk or a lost process left at the end of a log, while nobody writes to it."""
    for path in (rundir.metrics, rundir.progress):
        if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, text.rfind(b"\n") + 1)


def _finite(record: Record) -> Record:
    """JSON has no NaN: such a number is written as its name."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class Tail:
    """Reads the complete lines that others append to a JSON-lines file."""

    def __init__(self, path: Path, from_end: bool = True) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> Iterator[Record]:
        """Records that have come since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with contextlib.suppress(json.JSONDecodeError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record


OF_A_STEP = ("step", "eval", "save", "skip", "nonfinite", "straggler")  # events that a resume from before it undoes


def effective(records: Iterable[Record]) -> list[Record]:
    """Leave out what a later attempt undid or made again, so that every step is there once.

    `resume` undoes the events of all later steps, and so does a step that is made a second time.
    """
    kept: list[Record] = []
    newest = -1
    for record in records:
        kind, step = record.get("event"), record.get("step")
        if kind in ("resume", "step") and isinstance(step, int):
            last = step if kind == "resume" else step - 1
            if newest > last:
                kept = [old for old in kept if old.get("event") not in OF_A_STEP or old["step"] <= last]
                newest = last
        if kind in OF_A_STEP:
            if not isinstance(step, int):
                continue
            newest = max(newest, step)
        kept.append(record)
    return kept


def history(metrics: Path) -> list[Record]:
    """Read the events of a run that count: those of `metrics.jsonl` but for steps that a resume undid."""
    return effective(Tail(metrics, from_end=False).read())


class Screen:
    """Shows records to the person: on a terminal with a live line below them, else as plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        # Rich would take a pipe for a terminal where FORCE_COLOR is set, and fill it with a frame after the other.
        self.console = console or Console(highlight=False, soft_wrap=True, force_terminal=sys.stdout.isatty())
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.last: dict[str, Record] = {}  # the newest record of each kind
        self.peak_memory = 0
        self._said_at = 0.0
        self._resumed: list[int] = []  # of each start of the workers, the step it went on from
        self._label_tokens: list[int] = []
        self._paces: deque[float] = deque(maxlen=PACES)
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
        record = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in record.items()}
        kind = record["event"]
        self.last[kind] = record
        handler = getattr(self, f"_on_{kind}", None)
        if handler:
            handler(record)

    def say(self, text: str) -> None:
        """Print lines above the live line; on a terminal they are wrapped between words."""
        if self.console.is_terminal:  # Rich takes a dumb terminal for 80 columns wide
            dumb = self.console.is_dumb_terminal
            text = fitted(text, self.console.file) if dumb else wrapped(text, self.console.width)
        self.console.print(Text(text), soft_wrap=True)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Print a table: fitted to a terminal, and in full in a pipe."""
        Page(self.console).table(header, rows)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Show on the live line that something takes a while."""
        self.wait_for(what)
        try:
            yield
        finally:
            self._line.clear()

    def wait_for(self, what: str) -> None:
        """Show on the live line, with the seconds, what is waited for; until something else is shown there."""
        self._line.show_work(what)

    def _on_progress(self, record: Record) -> None:
        done, total, stage = record["done"], record["total"], record["stage"]
        self._line.show_work(stage, done, total)
        if done >= total > 1 and not self.live:
            self.say(f"{stage}: {done:,} of {total:,}")

    def _on_start(self, record: Record) -> None:
        for kind in ("step", "resume"):  # of workers before these
            self.last.pop(kind, None)
        self._resumed.append(0)
        self._label_tokens.append(0)
        self.say(
            f"{record['parameters']:,} parameters on {record['device']}, attention {record['attention']} · "
            f"{counted(record['total_steps'], 'step')}\n{counted(record['blocks'], 'sequence')} of "
            f"{record['seq_len']:,} tokens, {record['fill']:.1%} of them real"
        )
        for line in record["data_notes"]:
            self.say(f"  {line}")
        self.wait_for("first step")

    def _on_resume(self, record: Record) -> None:
        self._resumed[-1:] = [record["step"]]
        self.say(
            f"resumed after step {record['step']}"
            if record["step"]
            else "there is no checkpoint of the earlier attempt: training starts again from step 0"
        )
        for key, (old, new) in record.get("changed", {}).items():
            self.say(f"  {key}: {old} → {new}")

    def _on_step(self, record: Record) -> None:
        self.peak_memory = max(self.peak_memory, record["peak_memory_bytes"])
        self._label_tokens[-1:] = [record["total_tokens"]]
        self._paces.append(record["step_s"])
        step = record["step"]
        total = self.last["start"]["total_steps"] if "start" in self.last else step
        eta = max(0, total - step) * statistics.fmean(self._paces)
        parts = [
            Part(1, f"loss {record['loss']:.4f}"),
            Part(2, rate(record["positions_per_s"])),
            Part(3, f"ETA {duration(eta)}"),
            Part(5, f"lr {record['lr']:.2e}"),
            Part(6, f"norm {record['grad_norm']:.2f}"),
            Part(7, f"{record['peak_memory_bytes'] / GIB:.2f} GiB"),
        ]
        self._line.show_step(step, total, parts)
        if not self.live and (step >= total or time.monotonic() - self._said_at >= PLAIN_INTERVAL_S):
            self._said_at = time.monotonic()
            self.say("  ".join([f"step {step}/{total}", *(str(part.text) for part in parts)]))

    def _on_eval(self, record: Record) -> None:
        self.say(
            f"eval at step {record['step']}: loss {record['loss']:.4f}  perplexity {record['perplexity']:.2f}  "
            f"({record['tokens']:,} label tokens)"
        )

    def _on_skip(self, record: Record) -> None:
        self.say(f"skipped: {record['what']}")

    def _on_straggler(self, record: Record) -> None:
        self.say(
            f"rank {record['rank']} is slow: its {record['cause']} costs about {record['cost']:.0%} of each step, "
            "and all others wait for it"
        )

    def _on_set_aside(self, record: Record) -> None:
        self.say(f"a damaged checkpoint was set aside as {record['path']}: {'; '.join(record['problems'])}")

    def _on_save(self, record: Record) -> None:
        self.say(f"checkpoint: {Path(record['path']).name} ({size(record['bytes'])}, {record['seconds']:.1f} s)")

    def _on_export(self, record: Record) -> None:
        self.say(f"export: {record['path']} ({size(record['bytes'])}, {record['dtype']})")
        if "kept" in record:
            self.say(f"  files of the earlier export folder were moved to {record['kept']}")

    def summary(self, seconds: float) -> None:
        """The closing lines: what was trained, how fast, and how to load the result."""
        self._line.clear()
        if "step" in self.last:
            self.say("\n" + self._trained(seconds))
        if "export" in self.last:
            snippet = (
                "\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
                f"folder = {json.dumps(self.last['export']['path'], ensure_ascii=False)}\n"
                "model = AutoModelForCausalLM.from_pretrained(folder)\n"
                "tokenizer = AutoTokenizer.from_pretrained(folder)"
            )
            self.console.print(Text(snippet), soft_wrap=True)  # to be copied: its lines stay whole

    def _trained(self, seconds: float) -> str:
        """Steps, speed, memory and losses of this command; steps of earlier commands are counted apart."""
        step, before, restarts = self.last["step"], self._resumed[0], len(self._resumed) - 1
        beside = [f"{step['step']:,} in all"] if before else []
        beside += [counted(restarts, "restart")] if restarts else []
        losses = [f"training loss {step['loss']:.4f}"]
        losses += [f"held-out loss {self.last['eval']['loss']:.4f}"] if "eval" in self.last else []
        made = [
            f"{counted(step['step'] - before, 'step')} in {duration(seconds)}"
            + (f" ({', '.join(beside)})" if beside else ""),
            f"{rate(step['total_positions'] / step['total_s'])} while training",
            f"peak {self.peak_memory / GIB:.2f} GiB a rank",
        ]
        return " · ".join(made) + "\n" + " · ".join([f"{sum(self._label_tokens):,} label tokens", *losses])


def size(count: float) -> str:
    """Bytes in the unit that suits them: `847.0 GiB`."""
    power = min(4, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 2 ** (10 * power):.{bool(power):d}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
