"""What a run keeps of its data: commits of Hub data sets, the date in its chat template, and the windows that it read.

A branch of a data set moves, and some chat templates render today's date. So the first worker of a start looks both up
and writes them into pinned.json; the other workers of that start, and its restarts, use those. Once there is a
checkpoint, every later start uses them too: the run continues with the tokens it began with, whatever was committed
since, on any day, and even without the Hub. Rank 0 adds each window of files (data.window) when the ranks enter it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable
from typing import Any

from filelock import FileLock

from fsdptrain.config.paths import is_hub_data
from fsdptrain.data.sources import COMMIT, hub_commit
from fsdptrain.errors import CheckpointError
from fsdptrain.plan.plan import HubData, Plan
from fsdptrain.run_folder.files import is_there, write_atomically
from fsdptrain.run_folder.records import read_object
from fsdptrain.run_folder.rundir import RunDir

Commits = dict[str, str | None]  # `org/name[:config[:split]][@revision]` → commit, None when it is not known
Pinned = dict[str, Any]  # `commits`: Commits; `date`: as in ISO 8601; `windows`. Each is there only if the run needs it


def pin_commits(plan: Plan, rundir: RunDir, keep: bool = True) -> Plan:
    """Return the plan with every Hub data set at a commit; `keep` writes the commits (a dry run does not).

    Raises CheckpointError when the pinned commits cannot be read.
    """
    hub_paths = [path for path in (*plan.data_paths, plan.eval_path) if path and is_hub_data(path)]
    if not hub_paths:
        return plan

    def complete(pinned: Pinned) -> Pinned:
        known: Commits = pinned.get("commits", {})
        return {"commits": known | {path: hub_commit(path) for path in hub_paths if path not in known}}

    commits = _pin(rundir, keep, complete)["commits"]
    paths = {path: str(HubData.of(path).at(commit)) for path, commit in commits.items() if commit}
    return dataclasses.replace(
        plan,
        data_paths=[paths.get(path, path) if isinstance(path, str) else path for path in plan.data_paths],
        eval_path=paths.get(plan.eval_path, plan.eval_path) if plan.eval_path else None,
    )


def pin_date(plan: Plan, tokenizer: Any, rundir: RunDir, keep: bool = True) -> datetime.date | None:
    """Return the date that the chat template renders, if it renders one and conversations are trained.

    It is that of the day on which the run begins. `keep` writes it. Raises CheckpointError when the pinned one cannot
    be read.
    """
    if not plan.trains_chat or "strftime_now" not in str(tokenizer.chat_template):
        return None
    today = datetime.datetime.now().date()
    pinned = _pin(rundir, keep, lambda pinned: {"date": pinned.get("date", today.isoformat())})
    return datetime.date.fromisoformat(pinned["date"])


def date_note(day: datetime.date) -> str:
    """Return a sentence on the date that a chat template renders."""
    return f"the chat template renders today's date: in all attempts of the run it is {day}, when the run began"


def pin_windows(rundir: RunDir, windows: dict[str, Any]) -> None:
    """Write what is known of the windows of a run (see `data.windows`)."""
    _pin(rundir, True, lambda _: {"windows": windows})


def pinned_windows(rundir: RunDir) -> dict[str, Any]:
    """Return what `pin_windows` wrote, {} if the run has read none. Raises CheckpointError if it cannot be read."""
    return _pinned_before(rundir).get("windows", {})


def _pin(rundir: RunDir, keep: bool, complete: Callable[[Pinned], Pinned]) -> Pinned:
    """Return what is pinned and still valid, completed; `keep` writes it."""
    with FileLock(rundir.logs / "pinned.lock") if keep else contextlib.nullcontext():
        pinned = _pinned_before(rundir)
        pinned |= complete(pinned)
        if keep:
            write_atomically(rundir.pinned, json.dumps({"start": _newest_start(rundir), **pinned}, indent=2))
    return pinned


def _pinned_before(rundir: RunDir) -> Pinned:
    """Return what earlier attempts pinned; {} before the first checkpoint, unless it is of this start."""
    path = rundir.pinned
    if not is_there(path):
        return {}
    try:
        written = read_object(path)
        if not rundir.checkpoint_steps() and written["start"] != _newest_start(rundir):
            return {}
        if "windows" in written:
            written["windows"] = {"files": str(written["windows"]["files"]), "read": list(written["windows"]["read"])}
        if "date" in written:
            datetime.date.fromisoformat(written["date"])
        for commit in written.get("commits", {}).values():
            if commit is not None and not COMMIT.fullmatch(commit):
                raise ValueError(f"{commit!r:.60} is not a commit")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        words = str(error).removeprefix(f"{path}: ")
        reason = words if isinstance(error, ValueError) else "it is not what a run writes there"
        raise CheckpointError(
            f"{path} cannot be read ({reason}), so the commit of the data or the date of the chat template is not "
            "known: restore it, or delete it and set data.revision to the commit"
        ) from None
    return {name: written[name] for name in ("commits", "date", "windows") if name in written}


def _newest_start(rundir: RunDir) -> int:
    return max((int(path.stem) for path in rundir.plans.glob("*.json") if path.stem.isdigit()), default=0)
