"""The commits of a run's Hub data sets: found out once, kept in the run folder, and read from there by every rank.

A branch moves. So the first worker of a start that comes here asks the Hub and writes what it heard into commits.json;
all others of that start, and its restarts, take that. Once there is a checkpoint, every later start takes it too: it
goes on with the data it began with, whatever was committed since, and whether or not the Hub can be reached.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from filelock import FileLock

from fsdptrain.config.plan import HubData, Plan
from fsdptrain.data.hub_data import COMMIT, hub_commit
from fsdptrain.errors import CheckpointError
from fsdptrain.ownership import write_atomically
from fsdptrain.rundir import RunDir

Commits = dict[str, str | None]  # `org/name[:config[:split]][@revision]` → commit, None where nobody could tell


def pin_commits(plan: Plan, rundir: RunDir, keep: bool = True) -> Plan:
    """Return the plan with every Hub data set at a commit; `keep` writes the commits down (a dry run does not).

    Raises CheckpointError when what was written down cannot be read.
    """
    asked = [path for path in (plan.data_path, plan.eval_path) if path and not Path(path).is_absolute()]
    if not asked:
        return plan
    if keep:
        with FileLock(rundir.logs / "commits.lock"):
            commits = _commits_of_run(rundir, asked)
            write_atomically(rundir.commits, json.dumps({"start": _newest_start(rundir), "commits": commits}, indent=2))
    else:
        commits = _commits_of_run(rundir, asked)

    paths = {path: str(HubData.of(path).at(commit)) for path, commit in commits.items() if commit}
    return dataclasses.replace(
        plan,
        data_path=paths.get(plan.data_path, plan.data_path),
        eval_path=paths.get(plan.eval_path, plan.eval_path) if plan.eval_path else None,
    )


def _commits_of_run(rundir: RunDir, asked: list[str]) -> Commits:
    """The commits that were written down and still hold, with those of what is asked for now."""
    commits: Commits = {}
    if rundir.commits.is_file():
        try:
            kept = json.loads(rundir.commits.read_text(encoding="utf-8"))
            if rundir.checkpoint_steps() or kept["start"] == _newest_start(rundir):
                commits = {path: _check_commit(commit) for path, commit in kept["commits"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{rundir.commits} cannot be read ({error!r}), so the commit of the data is not known: put it back, or "
                "delete it and name the commit in data.revision"
            ) from None
    return commits | {path: hub_commit(path) for path in asked if path not in commits}


def _check_commit(commit: str | None) -> str | None:
    if commit is not None and not COMMIT.fullmatch(commit):
        raise ValueError(f"{commit!r:.60} is no commit")
    return commit


def _newest_start(rundir: RunDir) -> int:
    """The number of the newest start of the command: each keeps its plan."""
    return max((int(path.stem) for path in rundir.plans.glob("*.json") if path.stem.isdigit()), default=0)
