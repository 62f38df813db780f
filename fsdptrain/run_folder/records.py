"""Read what a run has written: a table of its events, a reader, and `RunState`, which rebuilds a run's state.

A run folder may come from anyone, and a disk may damage it. So a record is used only if it comes from a regular file,
is one JSON object of bounded size, and has the fields of its event with the types in EVENTS. No torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fsdptrain.errors import StorageError, Unreadable
from fsdptrain.run_folder.files import NOTHING_THERE, system_errors
from fsdptrain.run_folder.storage import Location, ObjectPath
from fsdptrain.text import counted

Record = dict[str, Any]
MAX_BYTES = 2**24  # of a line, and of a file that is one object; the `start` event names the host of every rank
MAX_DEPTH = 16  # of lists and objects inside each other; a plan has six
NOT_READ = (*NOTHING_THERE, Unreadable, StorageError)  # errors of a file that is missing, damaged, or out of reach
SHOWN_FAULTS = 3  # faults of one file that are described; the others are counted
LOSS_STEPS = 10  # whose mean is called the training loss of a run
ETA_STEPS = 32  # of which the mean time gives the ETA


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldType:
    """What a field of an event may be: in words, and as a test of a value that was read from JSON."""

    words: str
    fits: Callable[[Any], bool]


def _is_compared(value: Any) -> bool:
    fields = {"what": TEXT, "tokens": COUNT, "held_out": FLAG, "mean": NUMBER, "largest": NUMBER, "spread": NUMBER}
    ways = value if isinstance(value, list) else []
    return bool(ways) and all(isinstance(way, dict) and not field_fault(way, fields) for way in ways)


COUNT = FieldType("a whole number from 0", lambda value: type(value) is int and 0 <= value < 2**63)
COUNTS = FieldType(
    "a list of whole numbers from 0",
    lambda value: isinstance(value, list) and bool(value) and all(map(COUNT.fits, value)),
)
NUMBER = FieldType("a number", lambda value: type(value) is float or (type(value) is int and abs(value) < 2**63))
NUMBERS = FieldType(
    "an object of numbers", lambda value: isinstance(value, dict) and all(map(NUMBER.fits, value.values()))
)
SECONDS = FieldType("a number of seconds", lambda value: type(value) in (int, float) and 0 <= value < 10**11)
FLAG = FieldType("true or false", lambda value: isinstance(value, bool))
TEXT = FieldType("a string", lambda value: isinstance(value, str))
TEXTS = FieldType("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.fits, value)))
OBJECT = FieldType("an object", lambda value: isinstance(value, dict))
CHANGES = FieldType(
    "an object of [old, new]",
    lambda value: isinstance(value, dict) and all(isinstance(v, list) and len(v) == 2 for v in value.values()),
)
COMPARED = FieldType("a list of comparisons", _is_compared)
MEASURES = dict.fromkeys(  # of `config.objectives`
    (
        "rewards_chosen", "rewards_rejected", "rewards_desirable", "rewards_undesirable", "margin", "accuracy", "kl",
        "cross_entropy",
    ), NUMBER,
)  # fmt: skip


@dataclass(frozen=True)
class EventKind:
    """A kind of event: what it says, its fields, and those that it may have."""

    says: str
    fields: dict[str, FieldType]
    optional: dict[str, FieldType] = field(default_factory=dict)
    undone: bool = False  # if the run resumes from before its step
    tracked: bool = False  # trackers get it
    trains: bool = False  # written by workers that have met


# Every event also has `at`, its time in seconds since 1970.
EVENTS = {
    "start": EventKind(
        "the workers are ready to train",
        {
            "parameters": COUNT, "device": TEXT, "attention": TEXT, "world_size": COUNT, "host": TEXT,
            "total_steps": COUNT, "blocks": COUNT, "seq_len": COUNT, "fill": NUMBER,
            "device_memory_bytes": COUNT, "baseline_memory_bytes": COUNT,
        },
        {
            "trainable": COUNT, "units": COUNT, "strategy": TEXT, "flash": TEXT, "hosts": TEXTS, "data": OBJECT,
            "notes": TEXTS, "torch": TEXT, "transformers": TEXT,
        },
        trains=True,
    ),
    "resume": EventKind(
        "training continues after `step`, with these changes of the recipe; later steps above in the file are undone",
        {"step": COUNT},
        {"changed": CHANGES, "notes": TEXTS},
    ),
    "step": EventKind(
        "a step is trained",
        {
            "step": COUNT, "loss": NUMBER, "lr": NUMBER, "grad_norm": NUMBER, "positions_per_s": NUMBER, "mfu": NUMBER,
            "step_s": SECONDS, "peak_memory_bytes": COUNT, "total_tokens": COUNT, "total_positions": COUNT,
            "total_s": SECONDS,
        },
        {
            "epoch": NUMBER, "tokens": COUNT, "tokens_per_s": NUMBER, "data_s": SECONDS, "samples": TEXT,
            "reserved_memory_bytes": COUNT, "alloc_retries": COUNT, "peak_memory_by_rank": COUNTS,
            "loss_scale": NUMBER, "expert_load": NUMBER, **MEASURES,
        },
        undone=True, tracked=True, trains=True,
    ),
    "window": EventKind(
        "the ranks enter a window of files (`data.window`) in `step`",
        {"step": COUNT, "window": COUNT, "of": COUNT, "sequences": COUNT, "waited_s": SECONDS},
        undone=True, trains=True,
    ),
    "eval": EventKind(
        "the held-out rows are evaluated after `step`; 0: with the first weights; `losses` has those of the sources",
        {"step": COUNT, "loss": NUMBER, "tokens": COUNT},
        {"perplexity": NUMBER, "losses": NUMBERS, **MEASURES},
        undone=True, tracked=True, trains=True,
    ),
    "generated": EventKind(
        "what the model writes behind the prompts of `eval.prompts` after `step`",
        {"step": COUNT, "prompts": TEXTS, "texts": TEXTS},
        undone=True, tracked=True, trains=True,
    ),
    "save": EventKind(
        "the checkpoint of `step` is complete",
        {"step": COUNT, "path": TEXT, "bytes": COUNT, "seconds": SECONDS},
        {"blocked_s": SECONDS},
        undone=True, trains=True,
    ),
    "skip": EventKind("a step was not finite and is left out", {"step": COUNT, "what": TEXT}, undone=True),
    "nonfinite": EventKind("a step was not finite and ends the run", {"step": COUNT, "what": TEXT}, undone=True),
    "straggler": EventKind(
        "a rank slows all others down by `cost`, a share of a step",
        {"step": COUNT, "rank": COUNT, "cause": TEXT, "cost": NUMBER},
        undone=True,
    ),
    "set_aside": EventKind("a damaged checkpoint was renamed", {"path": TEXT, "problems": TEXTS}),
    "export": EventKind(
        "the model is exported",
        {"path": TEXT, "bytes": COUNT, "dtype": TEXT},
        {
            "step": COUNT, "adapter": TEXT, "kept": TEXT, "compared": COMPARED, "opened": FLAG, "not_opened": TEXT,
            "not_compared": TEXT,
        },
        trains=True,
    ),
    "early_stop": EventKind(
        "the run ends after `step`: no loss of the last `evaluations` was below step `best`'s (`eval.patience`)",
        {"step": COUNT, "evaluations": COUNT},
        {"best": COUNT, "source": TEXT},
        trains=True,
    ),
    "stop": EventKind("the run was stopped by a signal after `step`", {"step": COUNT, "signal": TEXT}),
    "restart": EventKind(
        "on a single node the workers of `attempt` were lost, and are started again",
        {"attempt": COUNT, "restart": COUNT, "of": COUNT},
    ),
    "error": EventKind("a rank, or the command, failed", {"type": TEXT, "message": TEXT}, {"rank": COUNT}),
    "progress": EventKind(
        "`done` of `total` parts of a stage are done (logs/progress.jsonl); a `total` of 0 is not known",
        {"stage": TEXT, "done": COUNT, "total": COUNT},
        trains=True,
    ),
}  # fmt: skip


def record_fault(record: Record) -> str | None:
    """Return what is wrong with a record that was read, or None. An event of another version may have any fields."""
    kind = record.get("event")
    if not isinstance(kind, str):
        return "event is missing" if kind is None else "event is not a string"
    event = EVENTS.get(kind, EventKind("", {}, {"step": COUNT}))
    fault = field_fault(record, {"at": SECONDS, **event.fields}, event.optional)
    return f"{kind if kind in EVENTS else 'event'}.{fault}" if fault else None


def field_fault(
    record: Record, fields: dict[str, FieldType], optional: dict[str, FieldType] | None = None
) -> str | None:
    """Return which field is missing, or has a value of another type; None if there is none."""
    if missing := next((name for name in fields if name not in record), None):
        return f"{missing} is missing"
    known = fields | (optional or {})
    wrong = next((name for name, kind in known.items() if name in record and not kind.fits(record[name])), None)
    return f"{wrong} is not {known[wrong].words}" if wrong else None


# --- reading ---------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it.

    Raise Unreadable for a link, a folder, or a pipe, which could block; NOTHING_THERE, and StorageError if the system
    cannot read it.
    """
    try:
        with system_errors(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except StorageError as error:
        if getattr(error.__cause__, "errno", None) in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise Unreadable(f"{path}: not a regular file") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise Unreadable(f"{path}: not a regular file")


def read_bytes(path: Location) -> bytes:
    """Return the content of a small file or object. Raise Unreadable for a large one; else as `open_regular`."""
    with path.open() if isinstance(path, ObjectPath) else open_regular(path) as stream, system_errors(path):
        raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise Unreadable(f"{path}: larger than {MAX_BYTES:,} bytes")
    return raw


def read_text(path: Path) -> str:
    """Return the text of a small file. Raise Unreadable unless it is regular and UTF-8; else as `open_regular`."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path}: not UTF-8 at byte {error.start:,}") from None


def read_object(path: Location) -> dict[str, Any]:
    """Return the JSON object in a small file or object. Raise Unreadable if it has none; else as `open_regular`."""
    raw = read_bytes(path)
    try:
        return json_object(raw)
    except ValueError as error:
        raise Unreadable(f"{path}: {error}") from None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the object that JSON text holds, with finite numbers and MAX_DEPTH. Raise ValueError if it holds none."""
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if _is_deeper_than(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def _is_deeper_than(value: Any, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 1 or _is_deeper_than(part, depth - 1) for part in parts if isinstance(part, (dict, list)))


def json_safe(value: Any) -> Any:
    """Return a value for JSON, which has no numbers that are not finite: they become "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {name: json_safe(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def restore_numbers(record: Record) -> None:
    """Make numbers of the texts that `json_safe` wrote."""
    event = EVENTS.get(str(record.get("event")))
    for name, kind in (event.fields | event.optional).items() if event else ():
        if kind is NUMBER and name in record:
            record[name] = _restored(record[name])
        elif kind is NUMBERS and isinstance(record.get(name), dict):
            record[name] = {key: _restored(value) for key, value in record[name].items()}


def _restored(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def numbers_in(fields: Record) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers of a record with their names, those in objects too; not those in lists, which are of ranks."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from (((name, *below), number) for below, number in numbers_in(value))
        elif NUMBER.fits(value):
            yield (name,), value


class Tail:
    """Reads the records that other processes append to a file of JSON lines; lines that hold none are skipped."""

    def __init__(self, path: Path, from_end: bool = True) -> None:
        self._path = path
        self.offset = self._line = 0  # bytes and lines that were read
        self._is_in_long_line = False
        self._faults: dict[str, str] = {}  # where → what is wrong there, of the first
        self._skipped = 0
        if from_end:  # after the last complete line: a partial one is cut off before the next is written
            deque(self._lines(), maxlen=0)

    @property
    def faults(self) -> list[str]:
        """Name the lines that were skipped, and why; of many lines only the first."""
        found = [f"{where}: {fault}; skipped" for where, fault in self._faults.items()]
        more = self._skipped - len(found)
        return [*found, f"{self._path.name}: {counted(more, 'more line')} skipped"] if more else found

    def read(self) -> Iterator[Record]:
        """Yield the records that were appended since the last call."""
        for line in self._lines():
            try:
                record = json_object(line)
                restore_numbers(record)
                if fault := record_fault(record):
                    raise ValueError(fault)
            except ValueError as error:
                self._note(str(error))
            else:
                yield record

    def _lines(self) -> Iterator[bytes]:
        try:
            stream = open_regular(self._path)
        except NOTHING_THERE:
            return
        except Unreadable:
            self._faults[self._path.name], self._skipped = "not a regular file", max(1, self._skipped)
            return
        with stream:
            stream.seek(self.offset)
            while line := stream.readline(MAX_BYTES):
                is_complete = line.endswith(b"\n")
                if not is_complete and len(line) < MAX_BYTES:
                    return  # it is being written
                self.offset += len(line)
                self._line += is_complete
                was_in_long_line, self._is_in_long_line = self._is_in_long_line, not is_complete
                if is_complete and was_in_long_line:
                    self._note(f"longer than {MAX_BYTES:,} bytes")
                elif is_complete:
                    yield line

    def _note(self, fault: str) -> None:
        self._skipped += 1
        if self._skipped <= SHOWN_FAULTS:
            self._faults[f"{self._path.name} line {self._line}"] = fault


# --- state -----------------------------------------------------------------------------------------------------------


class RunState:
    """Rebuilds a run's state from its event log: what counts after all that later attempts have undone.

    A `resume` event undoes the events of all later steps, one of step 0 also that step's. So does a `step` event whose
    step was there before. Of the `step` events only the newest is kept: a long run has millions.
    """

    def __init__(self, is_elastic: bool = False) -> None:
        self._is_elastic = is_elastic  # then the run goes on after the errors of a node that was lost
        self._kept: dict[str, list[Record]] = {kind: [] for kind, event in EVENTS.items() if event.undone}
        self._trained: list[Record] = []  # of each attempt that made a step: the first, with its `start` event
        self._start: Record | None = None
        self._newest_step = -1  # of the events that a resume can undo
        self._not_compared = 0  # up to this step evaluations were of other held-out data, or of the first weights
        self.newest: dict[str, Record] = {}  # of each kind in EVENTS
        self.steps_made = 0
        self.attempts = 0
        self.ends: list[Record] = []  # what ended the newest attempt: `stop` and `error` events
        self.step_times: deque[float] = deque(maxlen=ETA_STEPS)  # of the newest attempt
        self._losses: deque[tuple[int, float]] = deque(maxlen=LOSS_STEPS)  # of the newest steps: step, loss

    @classmethod
    def of(cls, records: Iterable[Record]) -> RunState:
        """Return the state after records, in the order in which they were written."""
        state = cls()
        for record in records:
            state.add(record)
        return state

    def add(self, record: Record) -> int | None:
        """Add the next record. Return the step after which it undoes all earlier events, or None."""
        kind = record["event"]
        if kind not in EVENTS:
            return None  # of another version
        last = None
        if kind == "resume":
            last = last_kept(record["step"])
        elif kind == "step" and record["step"] <= self._newest_step:
            last = record["step"] - 1
        if last is not None:
            self._undo(last)
        if kind == "resume" and any(key.startswith("data.eval") for key in record.get("changed", {})):
            self._not_compared = record["step"]
        if kind in self._kept and kind != "window":  # which is entered before its step
            self._newest_step = max(self._newest_step, record["step"])
        if kind == "start":
            self._start = record
            self.attempts += 1
            self.ends = []
            for ending in ("restart", "early_stop"):
                self.newest.pop(ending, None)
            self.step_times.clear()
        elif kind == "restart":
            self.ends = []
        elif kind in ("stop", "error"):
            self.ends.append(record)
        elif kind == "step":
            self._add_step(record)
        elif kind in self._kept:
            _push(self._kept[kind], record)
        if kind in ("step", "resume", "early_stop"):
            self.steps_made = record["step"]
        self.newest[kind] = record
        return last

    def _add_step(self, record: Record) -> None:
        if self._is_elastic:
            self.ends = []
        if self._start is not None and not (self._trained and self._trained[-1]["start"] is self._start):
            _push(self._trained, {"step": record["step"], "start": self._start})
        self._kept["step"] = [record]
        self.step_times.append(record["step_s"])
        self._losses.append((record["step"], record["loss"]))

    def _undo(self, last: int) -> None:
        for records in (*self._kept.values(), self._trained):
            while records and records[-1]["step"] > last:
                records.pop()
        while self._losses and self._losses[-1][0] > last:
            self._losses.pop()
        self._newest_step = min(self._newest_step, last)
        self._not_compared = max(0, min(self._not_compared, last))
        for kind, records in self._kept.items():
            self.newest.pop(kind, None)
            self.newest.update({kind: records[-1]} if records else {})
        if "resume" in self.newest and self.newest["resume"]["step"] > last:
            del self.newest["resume"]

    @property
    def has_trained(self) -> bool:
        """Whether anything was made that a resume can undo."""
        return bool(self.steps_made) or any(self._kept.values())

    @property
    def training_loss(self) -> float:
        """The mean loss of the newest LOSS_STEPS steps, of fewer at the beginning; NaN before the first."""
        return statistics.fmean(loss for _, loss in self._losses) if self._losses else math.nan

    @property
    def newest_at(self) -> float | None:
        """The time of the newest record, in seconds since 1970."""
        return max((float(record["at"]) for record in self.newest.values()), default=None)

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that counts, saved or resumed from; 0 if there is none."""
        return max(int(self.newest[kind]["step"]) if kind in self.newest else 0 for kind in ("save", "resume"))

    @property
    def trained_by(self) -> Record | None:
        """The `start` event of the attempt that trained the newest step that is not undone."""
        return self._trained[-1]["start"] if self._trained else None

    def hosts(self, world_size: int | None = None) -> list[str]:
        """Return the host names of all ranks of the newest attempt that has reported them, if they are on several.

        The list is empty if that attempt had not `world_size` ranks: it was an earlier one.
        """
        hosts: list[str] = self.newest.get("start", {}).get("hosts", [])
        return hosts if world_size in (None, len(hosts)) else []

    def losses(self, source: str | None = None, until: float = math.inf) -> dict[int, float]:
        """Return the held-out losses that can be compared, of a source or of all, by step up to `until`.

        Those of the first weights do not count, nor those of other held-out data than the newest, nor those from before
        a resume gave the source this name.
        """
        evaluated = {each["step"]: {None: each["loss"], **each.get("losses", {})} for each in self._kept["eval"]}
        first = self._not_compared
        return {step: float(of[source]) for step, of in evaluated.items() if first < step <= until and source in of}

    def has(self, kind: str, step: int) -> bool:
        """Return whether an event of this kind and step, which a resume can undo, is not undone; `step` apart."""
        return any(record["step"] == step for record in self._kept[kind])


def _push(records: list[Record], record: Record) -> None:
    """Append a record to others, whose steps ascend, in place of those that the next undoing drops with it."""
    while records and records[-1]["step"] >= record["step"]:
        records.pop()
    records.append(record)


def by_loss(losses: Mapping[int, float], among: Collection[int] | None = None) -> list[int]:
    """Return the steps with a finite loss, of these or all, the lowest loss first; of equal ones, the earlier first."""
    steps = (step for step in losses if math.isfinite(losses[step]) and (among is None or step in among))
    return sorted(steps, key=lambda step: (losses[step], step))


def evaluations_since_best(losses: Mapping[int, float]) -> int:
    """Return how many evaluations came after that of the lowest loss."""
    best = [*by_loss(losses), 0][0]
    return sum(step > best for step in losses)


def without_better(early_stop: Record) -> str:
    """Return why a run ended before its last step."""
    of = f" of {early_stop['source']}" if "source" in early_stop else ""
    since = f" than that of step {early_stop['best']:,}" if "best" in early_stop else ""
    return f"no lower held-out loss{of}{since} in {counted(early_stop['evaluations'], 'evaluation')}"


def ends_early(losses: Mapping[int, float], step: int, patience: int | None) -> bool:
    """Return whether a run ends at `step`, which is evaluated: none of `patience` evaluations had a lower loss."""
    return patience is not None and step in losses and evaluations_since_best(losses) >= patience


def last_kept(resumed: int) -> int:
    """Return the last step whose events count when training continues after step `resumed`.

    From step 0 it starts again, maybe from other weights: then the evaluation of step 0 is made again, too.
    """
    return resumed or -1


def shares_of(start: Record) -> str:
    """Return the sources of a mixture with their shares of the tokens; empty if the `start` event names none."""
    shares = data.get("shares") if isinstance(data := start.get("data"), dict) else None
    found = shares.items() if isinstance(shares, dict) else ()
    return ", ".join(f"{name} {share:.1%}" for name, share in found if NUMBER.fits(share))


def waits_for_slow_ranks(start: Record | None) -> bool:
    """Return whether a slow rank is worth a line on the screen: on one host's CPU it is other work on that host."""
    return start is None or start["device"] != "cpu" or "hosts" in start


def without_undone(records: Iterable[Record]) -> list[Record]:
    """Return the records without those that a later attempt undid, so that every step is there once."""
    state = RunState()
    undoable = {kind for kind, event in EVENTS.items() if event.undone}
    kept: list[Record] = []
    for record in records:
        last = state.add(record)
        if last is not None:
            kept = [old for old in kept if old["event"] not in undoable or old["step"] <= last]
        kept.append(record)
    return kept
