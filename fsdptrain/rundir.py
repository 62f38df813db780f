"""Every path of a run folder, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MARK = ".fsdptrain"


@dataclass(frozen=True)
class RunDir:
    """The folder of one run. Nothing is created by asking for a path."""

    root: Path

    @property
    def mark(self) -> Path:
        """The file that says that fsdptrain writes this folder; the first that is written into it."""
        return self.root / MARK

    @property
    def recipe(self) -> Path:
        """The recipe as the person wrote it."""
        return self.root / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """What the workers read."""
        return self.root / "plan.json"

    @property
    def plans(self) -> Path:
        """Plan and recipe of every attempt: 0001.json, 0001.yaml, 0002.json, …"""
        return self.root / "plans"

    @property
    def metrics(self) -> Path:
        """One JSON object an event."""
        return self.root / "metrics.jsonl"

    @property
    def commits(self) -> Path:
        """The commit at which each Hub data set is read."""
        return self.root / "commits.json"

    @property
    def forecast(self) -> Path:
        """What was foreseen of the run beside what was measured."""
        return self.root / "forecast.json"

    @property
    def export_record(self) -> Path:
        """Which step `export` holds, and which files fsdptrain wrote into it."""
        return self.root / "export.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        """Every worker's own output, and the launcher's."""
        return self.root / "logs"

    def rank_log(self, rank: int) -> Path:
        """What one worker printed."""
        return self.logs / f"rank-{rank}.log"

    @property
    def launcher_log(self) -> Path:
        """What torchrun printed."""
        return self.logs / "launcher.log"

    @property
    def progress(self) -> Path:
        """Counters of work under way (tokenising, loading, exporting), read by the terminal."""
        return self.logs / "progress.jsonl"

    def hang_report(self, rank: int | str) -> Path:
        """Where a rank stood when it hung."""
        return self.logs / f"hang-rank-{rank}.json"

    def stack_dump(self, rank: int | str) -> Path:
        """The stacks of a rank that could not even run the watchdog any more."""
        return self.logs / f"stuck-rank-{rank}.txt"

    def collectives(self, rank: int) -> Path:
        """The last collectives of a rank that hung, as torch's flight recorder has them."""
        return self.logs / f"collectives-rank-{rank}.json"

    @property
    def model(self) -> Path:
        """Config, generation config and tokenizer: all of an export but the weights."""
        return self.root / "model"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint taken after `step` optimizer steps. It exists only when it is complete."""
        return self.checkpoints / checkpoint_name(step)

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a committed checkpoint, ascending."""
        if not self.checkpoints.is_dir():
            return []
        names = (re.fullmatch(r"step-(0[0-9]{7}|[1-9][0-9]{7,})", path.name) for path in self.checkpoints.iterdir())
        return sorted(int(name.group(1)) for name in names if name)

    @property
    def export(self) -> Path:
        """The Hugging Face folder."""
        return self.root / "export"

    def has_run(self) -> bool:
        """Whether a run was started here before."""
        return any(path.exists() for path in (self.plan, self.metrics, self.checkpoints))

    def written_paths(self) -> list[Path]:
        """Every file and folder that a run writes into its folder."""
        return [
            *(
                self.mark,
                self.recipe,
                self.plan,
                self.plans,
                self.metrics,
                self.commits,
                self.forecast,
                self.tensorboard,
                self.logs,
            ),
            *(self.model, self.checkpoints, self.export, self.export_record),
        ]


def checkpoint_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{step:08d}"
