"""What holds after every event of a history. Facts and exit codes only: no invariant reads the words of a message."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from histories.client import Ended, state_of
from support import wait_until

from fsdptrain.checkpoint.manifest import survey
from fsdptrain.errors import FsdptrainError
from fsdptrain.report.status import Observer
from fsdptrain.run_folder.events import read_history
from fsdptrain.run_folder.rundir import RunDir

if TYPE_CHECKING:
    from histories.player import History

DOCUMENTED = (0, 2, 3, 4, 5, 6, 7, 75)  # 1 is an internal error
CAN_BE_LOST = (0, 2, 4, 6)  # how a run may end whose files were damaged: it refuses, or starts again
WITHOUT_EFFECT = ("name", "output_dir", "checkpoint.", "log.", "launch.", "export.")  # on weights and losses
WEIGHTS = "model.safetensors"
SCRATCH = re.compile(r"\..*\.writing.*|step-\d+\.(tmp|old)|\..*\.tmp|\.tmp\w{6}")
GONE_S = 5.0  # until the processes of a command that was killed have ended


@dataclass(frozen=True)
class Undisturbed:
    """What a run gives to which nothing happens: the numbers of each step and evaluation, and the weights of each."""

    numbers: dict[tuple[str, int], Any]
    weights: dict[int, str]  # step → digest of the exported file

    @classmethod
    def of(cls, run: Path, exports: Path) -> Undisturbed:
        weights = {int(folder.name): digest(folder / WEIGHTS) for folder in exports.iterdir()}
        return cls(numbers(read_history(run / "metrics.jsonl")), weights)


def numbers(records: list[dict[str, Any]]) -> dict[tuple[str, int], Any]:
    kept = {"step": ("loss", "grad_norm", "lr", "samples", "tokens"), "eval": ("loss", "tokens")}
    return {
        (record["event"], record["step"]): [record[name] for name in kept[record["event"]]]
        for record in records
        if record["event"] in kept
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Files:
    """The bytes, times and rights of all files of a history outside the places that a command may write."""

    places: list[Path]
    found: dict[Path, tuple[str, int, int]]

    @classmethod
    def of(cls, root: Path, places: list[Path]) -> Files:
        found = {}
        for path in root.rglob("*"):
            # A place, or its scratch: `.NAME.writing` beside NAME.
            is_place = any(path.is_relative_to(place) for place in places) or any(
                place.parent in path.parents and path.relative_to(place.parent).parts[0].startswith(f".{place.name}.")
                for place in places
            )
            if path.is_file() and not is_place:
                status = path.stat()
                found[path] = (digest(path), status.st_mtime_ns, status.st_mode)
        return cls(places, found)

    def check(self, history: History, ended: Ended) -> None:
        """Raise AssertionError unless they are the same, and the user's files inside those places are still there."""
        after = Files.of(history.root, self.places).found
        changed = {str(path) for path, facts in self.found.items() if after.get(path) != facts}
        assert not changed, f"{ended.words} changed or removed what is not of its run: {sorted(changed)[:3]}"
        added = {str(path) for path in after.keys() - self.found.keys() if ".kept" not in str(path)}
        assert not added, f"{ended.words} wrote where it has nothing to write: {sorted(added)[:3]}"
        present = {path.name: path for path in history.root.rglob("mine-*.txt")}
        for name, content in history.planted.items():
            assert name in present, f"{ended.words} removed {name}, which a user has put there"
            assert present[name].read_bytes() == content, f"{ended.words} changed {present[name]}"


def check_command(ended: Ended) -> None:
    """Raise AssertionError unless a command ended as the documents say: a known code, one message, no traceback."""
    if ended.code < 0:
        assert ended.killed, f"{ended.words} was killed by {-ended.code}\n{ended.text}"
        return
    assert ended.code in DOCUMENTED, f"{ended.words} exited with {ended.code}\n{ended.text}"
    assert "Traceback" not in ended.text, f"{ended.words}\n{ended.text}"
    said = [line for line in ended.text.splitlines() if line.startswith("fsdptrain: ")]
    assert len(said) == bool(ended.code), f"{ended.words} exited with {ended.code}, {len(said)} messages\n{ended.text}"


def check_nothing_left(history: History, ended: Ended) -> None:
    """Raise AssertionError if a process, a lock or scratch is left."""
    server = history.server
    if any(state_of(number) == "T" for number in server.processes()):
        return  # of another command, which is frozen
    wait_until(lambda: not server.processes(), f"{ended.words}: processes did not end", GONE_S)
    for lock in history.run_dir.glob("logs/lock*"):
        if os.access(lock, os.W_OK) and lock.stat().st_mode & 0o600:
            try:
                FileLock(lock, timeout=0).acquire().lock.release()
            except Timeout:
                raise AssertionError(f"{ended.words} left {lock} locked") from None
    # A start of a finished run changes nothing: the next export removes what a killed one has left.
    idle = "nothing was trained" in ended.text
    if ended.code == 0 and not ended.happened and ended.words[0] == "run" and not idle:
        left_over = [path for path in history.run_dir.rglob("*") if SCRATCH.fullmatch(path.name)]
        assert not left_over, f"{ended.words} left {left_over[:3]}"


def check_records(history: History) -> None:
    """Raise AssertionError unless records, status, verify and folder tell the same, and what was undisturbed."""
    folder = history.run_dir
    if not folder.is_dir():
        return
    check_set_aside(history)
    records = read_history(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    check_numbers(history, records)
    facts = check_answers(folder)
    if not facts or not records:
        return
    known = [record["step"] for record in records if record["event"] in ("save", "resume") and record["step"]]
    newest = max(known, default=None)
    told = facts["checkpoint"]["step"] if facts["checkpoint"] else None
    assert told == newest, f"status tells of the checkpoint of step {told}, the records of that of {newest}"
    trained = max((record["step"] for record in records if record["event"] in ("step", "resume")), default=0)
    assert facts["step"] == trained, f"status tells of step {facts['step']}, the records of {trained}"
    if history.damaged or history.unreadable:
        return
    assert newest is None or newest in history.steps() or max(history.steps(), default=0) > newest, (
        f"the records tell of the checkpoint of step {newest}, the folder has {history.steps()}"
    )
    saved = {record["step"] for record in records if record["event"] == "save"}
    losses = {record["step"]: record["loss"] for record in records if record["event"] == "eval"}
    best = min(saved & losses.keys(), key=lambda step: losses[step], default=None)
    if best and not history.trained_with_change:
        assert best in history.steps(), f"the best checkpoint is that of step {best}, the folder has {history.steps()}"
    surveyed = [each["step"] for each in survey(RunDir.open(folder))["checkpoints"]]
    assert surveyed == history.steps(), f"verify tells of {surveyed}, the folder has {history.steps()}"


def check_answers(folder: Path) -> dict[str, Any]:
    """Ask status and verify, which answer or refuse with one message; return the facts of status."""
    rundir, facts = RunDir.open(folder), {}
    with contextlib.suppress(FsdptrainError, OSError):
        facts = Observer(rundir).status()
        json.dumps(facts)
    with contextlib.suppress(FsdptrainError, OSError):
        survey(rundir)
    return facts


def check_set_aside(history: History) -> None:
    """Raise AssertionError if a checkpoint was renamed as damaged that is as it was written."""
    for folder in history.checkpoints.glob("*.damaged*"):
        try:
            files = json.loads((folder / "manifest.json").read_bytes())["files"]
            intact = all(digest(folder / name) == facts["sha256"] for name, facts in files.items())
        except (OSError, ValueError, KeyError, TypeError):
            continue
        assert not intact or history.damaged, f"{folder} is intact"


def check_numbers(history: History, records: list[dict[str, Any]]) -> None:
    """Raise AssertionError unless steps and evaluations are those of an undisturbed run, or the difference was said."""
    resumes = [record for record in records if record["event"] == "resume"]
    history.trained_with_change |= any(said_difference(record) for record in resumes)
    if history.trained_with_change:
        return
    wanted = history.undisturbed.numbers
    wrong = [key for key, found in numbers(records).items() if wanted.get(key) != found]
    assert not wrong, f"{wrong[0]} differs from an undisturbed run, and no resume event says that anything changed"


def said_difference(resume: dict[str, Any]) -> bool:
    """Return whether a resume event says that something changed which can change weights, losses or evaluations."""
    said = {name: value for name, value in resume.items() if name not in ("event", "at", "step", "changed") and value}
    changed = [key for key in resume.get("changed", {}) if not key.startswith(WITHOUT_EFFECT)]
    return bool(said or changed)


def check_export(history: History, folder: Path, step: int | None) -> None:
    """Raise AssertionError unless a folder is the export of a step (None: the newest)."""
    assert (folder / WEIGHTS).is_file(), f"the export to {folder} ended with 0, and there is no {WEIGHTS}"
    if step is not None and not history.trained_with_change:
        wanted = history.undisturbed.weights[step]
        assert digest(folder / WEIGHTS) == wanted, f"{folder} does not hold the weights of step {step}"


def check_result(history: History, ended: Ended) -> None:
    """Raise AssertionError unless a run to which nothing happens any more has reached its end, with the same model."""
    allowed = CAN_BE_LOST if history.damaged or history.trained_with_change else (0,)
    assert ended.code in allowed, f"after all was undone, {ended.words} exited with {ended.code}\n{ended.text}"
    if ended.code == 0 and not history.trained_with_change and not history.damaged:
        check_export(history, history.run_dir / "export", max(history.undisturbed.weights))
