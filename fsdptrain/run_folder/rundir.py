"""The paths of a run folder."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdptrain.run_folder.files import NOTHING_THERE, is_there
from fsdptrain.run_folder.records import read_object
from fsdptrain.run_folder.storage import URL, CheckpointStorage, Location, object_path, open_storage

MARK = ".fsdptrain"  # the file that marks a folder that fsdptrain writes
ATTEMPT = re.compile(r"[0-9]{4,9}")  # the name of an attempt's folder


class Below:
    """A path below the folder of a run, as an attribute of `RunDir`."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, rundir: RunDir, owner: type[RunDir]) -> Path:
        return rundir.root.joinpath(*self._parts)


@dataclass(frozen=True)
class RunDir:
    """The folder of one run, and the place of its checkpoints. Reading a path creates nothing."""

    root: Path
    checkpoint_path: str | None = None  # where the checkpoints are, if not in the folder: a folder or a URL

    mark = Below(MARK)  # marks this folder as written by fsdptrain; it is written first
    recipe = Below("recipe.yaml")  # as the user wrote it
    plan = Below("plan.json")  # all that the workers read
    plans = Below("plans")  # the plan and the recipe of every attempt: 0001.json, 0001.yaml, 0002.json, …
    metrics = Below("metrics.jsonl")  # the events of the run, one JSON object per line
    pinned = Below("pinned.json")  # the commit of each Hub data set, and the date of the chat template
    reference = Below("reference")  # of preferences: the log-probability of each answer under the first weights
    forecast = Below("forecast.json")  # compared with the measurements of the run
    export_record = Below("export.json")  # the step of the export, and the files that fsdptrain wrote into it
    tensorboard = Below("tensorboard")  # TensorBoard's event files
    trackers = Below("trackers")  # how far each tracker is (NAME.json), and W&B's files
    profiles = Below("profiles")  # of `log.profile`, for each rank: traces (.json.gz), memory snapshots (.pickle)
    logs = Below("logs")  # of every worker and of the launcher
    launcher_log = Below("logs", "launcher.log")  # what the launcher's agent printed
    progress = Below("logs", "progress.jsonl")  # of long work (tokenising, exporting), which the launcher shows
    attempts = Below("logs", "attempts")  # a folder for each attempt whose ranks have met: 0001, 0002, …
    model = Below("model")  # config, generation config and tokenizer: an export without the weights
    checkpoints = Below("checkpoints")  # unless they are elsewhere; for an object store, the files to upload
    export = Below("export")  # the Hugging Face folder

    @classmethod
    def open(cls, root: Path) -> RunDir:
        """Return the folder of an earlier run, whose plan says where the checkpoints are.

        Raises StorageError if the system cannot read that plan.
        """
        place = None
        with contextlib.suppress(*NOTHING_THERE, ValueError, LookupError, TypeError):
            place = read_object(root / "plan.json")["recipe"]["checkpoint"]["path"]
        return cls(root, place if isinstance(place, str) and place else None)

    def rank_log(self, rank: int) -> Path:
        """Return the log of what one worker printed."""
        return self.logs / f"rank-{rank}.log"

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts that have a folder, in ascending order."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(int(path.name) for path in self.attempts.iterdir() if ATTEMPT.fullmatch(path.name))
        return []

    def newest_attempt(self) -> int:
        """Return the number of the attempt whose ranks were the last to meet; 0 before the first."""
        return max(self.attempt_numbers(), default=0)

    def attempt(self, number: int) -> Path:
        """Return the folder of an attempt: a file of each rank, and below `hangs` what ranks report that hang."""
        return self.attempts / f"{number:04}"

    def remove_attempt(self, number: int) -> None:
        """Remove what the ranks of an attempt wrote into its folder; other files, and their folders, stay."""
        for folder in (self.hangs(number), self.attempt(number)):
            for path in (*folder.glob("stuck-rank-*.txt"), *folder.glob("*rank-*.json")):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty, or not there
                folder.rmdir()

    def stack_dump(self, attempt: int, rank: int) -> Path:
        """Return the file for the stacks of a rank that hangs and whose watchdog cannot run."""
        return self.attempt(attempt) / f"stuck-rank-{rank}.txt"

    def hangs(self, attempt: int) -> Path:
        """Return the folder of what ranks report that hang; it is empty, or missing, as long as none does."""
        return self.attempt(attempt) / "hangs"

    def hang_report(self, attempt: int, rank: int) -> Path:
        """Return the file in which the watchdog of a rank reports where the rank hangs, with its last collectives."""
        return self.hangs(attempt) / f"rank-{rank}.json"

    @property
    def checkpoint_place(self) -> Location | None:
        """The place of the checkpoints, if it is not in this folder: a local folder, or one in an object store."""
        if self.checkpoint_path is None:
            return None
        if URL.fullmatch(self.checkpoint_path):
            return object_path(self.checkpoint_path)
        folder = Path(self.checkpoint_path)
        return None if folder == self.checkpoints else folder

    @cached_property
    def storage(self) -> CheckpointStorage:
        """Where the checkpoints are; raises StorageError for a URL that cannot be used."""
        return open_storage(self.checkpoint_path, self.checkpoints)

    def checkpoint(self, step: int) -> Any:
        """Return the folder (a Location) of a checkpoint; it exists only if the checkpoint is complete."""
        return self.storage.checkpoint(step)

    def checkpoint_steps(self) -> list[int]:
        """Return the steps that have a published checkpoint, in ascending order."""
        return self.storage.steps()

    def has_run(self) -> bool:
        """Return whether a run was started in this folder, or has checkpoints where this one would keep them."""
        here = any(is_there(path) for path in (self.plan, self.metrics, self.checkpoints))
        return here or bool(self.checkpoint_path and self.checkpoint_steps())

    def written_paths(self) -> list[Path]:
        """Return every file and folder that a run writes directly into its folder."""
        inputs = [self.mark, self.recipe, self.plan, self.plans, self.pinned, self.reference]
        reports = [self.metrics, self.forecast, self.tensorboard, self.trackers, self.profiles, self.logs]
        return [*inputs, *reports, self.model, self.checkpoints, self.export, self.export_record]
