"""What a run says: events → `metrics.jsonl` and TensorBoard (the workers' side) and → the terminal (the person's).

The two sides meet in files, so that the terminal of a launched run, a second terminal and a later reader see the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fsdptrain.rundir import RunDir

Record = dict[str, Any]
PROGRESS_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 1.0  # a piped run prints at most one step line a second
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

    def has(self, kind: str, step: int) -> bool:
        """Whether this run has written such an event of this step, in this process or an earlier one."""
        records = Tail(self._rundir.metrics, from_end=False).read() if self._rundir else ()
        return any(record["event"] == kind and record.get("step") == step for record in records)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say how far a stage is (rows, tensors or files); calls are thinned out."""
        now = time.monotonic()
        last_stage, last_time = self._last_progress
        if self._progress is None or (stage == last_stage and now - last_time < PROGRESS_INTERVAL_S and done < total):
            return
        self._last_progress = (stage, now)
        record = {"event": "progress", "stage": stage, "done": done, "total": total}
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


def cut_half_a_line(path: Path) -> None:
    """Cut off what a full disk or a lost process left at the end of a JSON-lines file, while nobody writes to it."""
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
                    yield json.loads(line)


class _Count(ProgressColumn):
    """`done/total`; nothing for a task whose total is unknown."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}")


class Screen:
    """Shows records to the person: live bars on a terminal, plain lines in a pipe."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=False, highlight=False, soft_wrap=True)
        self.live = self.console.is_terminal
        self.last: dict[str, Record] = {}  # the newest record of each kind
        self.peak_memory = 0
        self._said_at = 0.0
        self._resumed = 0
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(bar_width=24),
            _Count(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.live,
        )

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def show(self, record: Record) -> None:
        """Show one event or progress record."""
        record = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in record.items()}
        kind = record["event"]
        self.last[kind] = record
        handler = getattr(self, f"_on_{kind}", None)
        if handler:
            handler(record)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, markup=False)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        """Print a table above the bars: fitted to a terminal, and in full in a pipe. Numbers stand to the right."""
        right = [all(row[i][:1].isdigit() for row in rows) for i in range(len(header))]
        if self.live:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
            for name, number in zip(header, right, strict=True):
                table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            self._bars.console.print(table, soft_wrap=False)
            return
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        for row in [header, *rows]:
            cells = zip(row, widths, right, strict=True)
            self.say("  ".join(f"{word:>{w}}" if number else f"{word:<{w}}" for word, w, number in cells).rstrip())

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Show on a live terminal that something takes a while."""
        task = self._bars.add_task(what, total=None, note="", visible=self.live)
        try:
            yield
        finally:
            self._bars.remove_task(task)

    def _bar(self, name: str, done: float, total: float, note: str = "") -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note=note)
        self._bars.update(self._tasks[name], completed=done, total=total, note=note, visible=True)

    def _on_progress(self, record: Record) -> None:
        done, total, stage = record["done"], record["total"], record["stage"]
        self._bar(stage, done, total)
        if done >= total:
            self._bars.update(self._tasks[stage], visible=False)
            if not self.live:
                self.say(f"{stage}: {done:,} of {total:,}")

    def _on_start(self, record: Record) -> None:
        self.say(
            f"{record['parameters']:,} parameters in {record['units']} units · {record['strategy']} over "
            f"{record['world_size']} × {record['device']} · {record['total_steps']:,} steps\n"
            f"{record['blocks']:,} sequences of {record['seq_len']} tokens, {record['fill']:.1%} of them real"
        )
        for line in record["data_notes"]:
            self.say(f"  {line}")

    def _on_resume(self, record: Record) -> None:
        self._resumed = record["step"]
        self.say(f"resumed after step {record['step']}")

    def _on_step(self, record: Record) -> None:
        self.peak_memory = max(self.peak_memory, record["peak_memory_bytes"])
        step = record["step"]
        total = self.last["start"]["total_steps"] if "start" in self.last else step
        note = (
            f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  norm {record['grad_norm']:.2f}  "
            f"{record['tokens_per_s']:,.0f} tok/s  {record['peak_memory_bytes'] / GIB:.2f} GiB"
        )
        if self.live:
            self._bar("train", step, total, note)
        elif step >= total or time.monotonic() - self._said_at >= PLAIN_INTERVAL_S:
            self._said_at = time.monotonic()
            eta = max(0, total - step) * record["total_s"] / (step - self._resumed)
            self.say(f"step {step}/{total}  {note}  ETA {duration(eta)}")

    def _on_eval(self, record: Record) -> None:
        self.say(
            f"eval at step {record['step']}: loss {record['loss']:.4f}  perplexity {record['perplexity']:.2f}  "
            f"({record['tokens']:,} tokens)"
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
        self.say(f"checkpoint: {record['path']} ({record['bytes'] / GIB:.2f} GiB, {record['seconds']:.1f} s)")

    def _on_export(self, record: Record) -> None:
        self.say(f"export: {record['path']} ({record['bytes'] / GIB:.2f} GiB, {record['dtype']})")

    def summary(self, seconds: float) -> None:
        """The closing lines of a finished run: time, tokens, throughput, memory, and how to load the result."""
        step = self.last.get("step")
        if step:
            losses = f"training loss {step['loss']:.4f}"
            if "eval" in self.last:
                losses += f" · held-out loss {self.last['eval']['loss']:.4f}"
            tokens = step["total_tokens"]
            self.say(
                f"\n{step['step']:,} steps in {duration(seconds)} · {tokens:,} label tokens · "
                f"{tokens / step['total_s']:,.0f} tok/s · "
                f"peak {self.peak_memory / GIB:.2f} GiB a rank\n{losses}"
            )
        if "export" in self.last:
            path = self.last["export"]["path"]
            self.say(
                f"the model is in {path}\n\n"
                f"    from transformers import AutoModelForCausalLM, AutoTokenizer\n"
                f'    model = AutoModelForCausalLM.from_pretrained("{path}")\n'
                f'    tokenizer = AutoTokenizer.from_pretrained("{path}")'
            )


def duration(seconds: float) -> str:
    """`75` → `1:15`; hours in front where there are any."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def size(count: float) -> str:
    """Bytes in the unit that suits them: `847.0 GiB`."""
    power = min(4, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 2 ** (10 * power):.{bool(power):d}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
