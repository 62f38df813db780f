"""The commits of a run's Hub data sets: requested once, stored in the run folder, and read from there by every rank.

A branch of a data set moves. So the first worker of a start requests the commits and writes them into commits.json; the
other workers of that start, and its restarts, use those. Once there is a checkpoint, every later start uses them too:
the run continues with the data it began with, whatever was committed since and even without the Hub.
"""

from __future__ import annotations

import dataclasses
import json

from filelock import FileLock

from fsdptrain.config.paths import is_hub_data
from fsdptrain.config.plan import HubData, Plan
from fsdptrain.data.hub_data import COMMIT, hub_commit
from fsdptrain.errors import CheckpointError
from fsdptrain.files import write_atomically
from fsdptrain.records import read_object
from fsdptrain.rundir import RunDir

Commits = dict[str, str | None]  # `org/name[:config[:split]][@revision]` → commit, None when it is not known


def pin_commits(plan: Plan, rundir: RunDir, keep: bool = True) -> Plan:
    """Return the plan with every Hub data set at a commit; `keep` writes the commits (a dry run does not).

    Raises CheckpointError when the stored commits cannot be read.
    """
    hub_paths = [path for path in (plan.data_path, plan.eval_path) if path and is_hub_data(path)]
    if not hub_paths:
        return plan
    if keep:
        with FileLock(rundir.logs / "commits.lock"):
            commits = _commits_of_run(rundir, hub_paths)
            write_atomically(rundir.commits, json.dumps({"start": _newest_start(rundir), "commits": commits}, indent=2))
    else:
        commits = _commits_of_run(rundir, hub_paths)

    paths = {path: str(HubData.of(path).at(commit)) for path, commit in commits.items() if commit}
    return dataclasses.replace(
        plan,
        data_path=paths.get(plan.data_path, plan.data_path),
        eval_path=paths.get(plan.eval_path, plan.eval_path) if plan.eval_path else None,
    )


def _commits_of_run(rundir: RunDir, hub_paths: list[str]) -> Commits:
    """Return the stored commits that are still valid, and for every other path the commit that the Hub returns."""
    commits: Commits = {}
    if rundir.commits.is_file():
        try:
            stored = read_object(rundir.commits)
            if rundir.checkpoint_steps() or stored["start"] == _newest_start(rundir):
                commits = {path: _check_commit(commit) for path, commit in stored["commits"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{rundir.commits} cannot be read ({error!r}), so the commit of the data is not known: restore it, or "
                "delete it and set data.revision to the commit"
            ) from None
    return commits | {path: hub_commit(path) for path in hub_paths if path not in commits}


def _check_commit(commit: str | None) -> str | None:
    if commit is not None and not COMMIT.fullmatch(commit):
        raise ValueError(f"{commit!r:.60} is not a commit")
    return commit


def _newest_start(rundir: RunDir) -> int:
    """Return the number of the newest start of the command, each of which stores its plan."""
    return max((int(path.stem) for path in rundir.plans.glob("*.json") if path.stem.isdigit()), default=0)
