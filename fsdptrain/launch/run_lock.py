"""Claim the run folder: every check that can refuse a run comes before the first change in the folder. No torch.

    checks that only read → mark → lock → the same checks again, because another run may have started in between →
    plans/, recipe.yaml, plan.json

One process writes: the command, the first node that gets the lock, or rank 0 if the command runs under torchrun. The
others wait until the plan in the folder is the same as their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any, NoReturn

from fsdptrain.checkpoint.manifest import reject_external_symlinks
from fsdptrain.checkpoint.resume import (
    EarlierAttempts,
    archive_plan,
    describe_changes,
    inspect_earlier_attempts,
    is_continued,
    plan_changes,
)
from fsdptrain.config.paths import expanded, is_folder, places
from fsdptrain.errors import (
    FolderInUse,
    Problem,
    RecipeError,
    StorageError,
    Unreadable,
    listed,
)
from fsdptrain.plan.plan import Plan, open_plan
from fsdptrain.run_folder.files import (
    NOTHING_THERE,
    is_regular_file,
    remove_unfinished,
    try_lock,
    write_atomically,
    write_errors,
)
from fsdptrain.run_folder.ownership import is_marked, mark_checkpoints, marked_run, write_mark
from fsdptrain.run_folder.rundir import MARK, RunDir
from fsdptrain.run_folder.storage import PROBE, URL

# Files of a run that could be read as data; a data.path must not match them.
DATA_LIKE_FILES: tuple[str, ...] = (
    "metrics.jsonl", "plan.json", "plans/0001.json", "logs/progress.jsonl", "logs/defect.txt", "model/config.json",
    "export/config.json", "checkpoints/step-00000001/manifest.json",
)  # fmt: skip
DATA_LIKE_CHECKPOINT: tuple[str, ...] = ("step-00000001/manifest.json",)  # below checkpoint.path
POLL_S = 0.2  # between two checks of plan.json

# Machines and containers may share a host name. The boot id identifies the machine, the PID namespace the container.
BOOT_ID, PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@contextlib.contextmanager
def claim_run_dir(plan: Plan, recipe_text: str, fresh: bool) -> Iterator[EarlierAttempts]:
    """Lock the run folder, write the plan into it, and yield what earlier attempts did. Do not change a finished run.

    With `fresh` or `checkpoint.resume: never`, a folder that holds a run is refused. Raises RecipeError if this run
    must not write into the folder, and what `inspect_earlier_attempts` raises.
    """
    rundir, writes = plan.rundir, not plan.topology.joined or os.environ["RANK"] == "0"
    fresh = fresh or plan.recipe.checkpoint.resume == "never"
    # Of several nodes, another may have marked the folder a moment ago; then only the check under the lock counts.
    is_shared = plan.topology.nnodes > 1 and is_marked(rundir.root)
    # Refuse whatever can be refused while nothing has been written.
    earlier = check_run_dir(plan, fresh and writes and not is_shared)
    if earlier.finished:
        yield earlier
        return
    if not writes:
        _wait_for_plan(plan, rundir)
        yield earlier
        return
    # The mark makes the folder one of fsdptrain's, and is what is locked.
    with write_errors(f"output_dir: cannot write to {rundir.root}"):
        rundir.root.mkdir(parents=True, exist_ok=True)
        write_mark(rundir.root)
    with _locked(rundir, plan) as first:
        # Another run may have used the folder since the checks above.
        if first and fresh and rundir.has_run():
            _refuse_used(rundir)
        earlier = inspect_earlier_attempts(rundir, plan)
        if first and not earlier.finished:
            _check_places(plan, rundir)
            place = rundir.checkpoint_place
            if place and marked_run(place) != str(rundir.root):
                with write_errors(f"checkpoint.path: cannot write to {place}"):
                    mark_checkpoints(place, str(rundir.root))
            with write_errors(f"output_dir: cannot write to {rundir.root}"):
                remove_unfinished(rundir.root)
                archive_plan(rundir, plan, recipe_text)
                write_atomically(rundir.plan, plan.to_json())
        elif not earlier.finished:
            _wait_for_plan(plan, rundir)
        yield earlier


def check_run_dir(plan: Plan, fresh: bool) -> EarlierAttempts:
    """Make the checks of `claim_run_dir` without changing anything, as a dry run does; raise what it raises."""
    rundir = plan.rundir
    _check_places(plan, rundir)
    if fresh and rundir.has_run():
        _refuse_used(rundir)
    earlier = inspect_earlier_attempts(rundir, plan)
    if not earlier.finished:
        _check_access(rundir)
    return earlier


def _check_access(rundir: RunDir) -> None:
    """Raise RecipeError for a part of the run that this user may not write: training would end there, hours later."""
    place = rundir.checkpoint_place
    checkpoints = place if isinstance(place, Path) else rundir.checkpoints
    folders = [rundir.root, rundir.plans, rundir.logs, rundir.model, rundir.tensorboard, rundir.trackers]
    folders += [rundir.export, checkpoints, *checkpoints.glob("step-*")]
    appended = [rundir.mark, rundir.metrics, *rundir.logs.glob("*")]
    for mode, paths in ((os.W_OK | os.X_OK, folders), (os.R_OK | os.W_OK, appended)):
        for path in paths:
            if path.exists() and not os.access(path, mode):
                raise RecipeError(
                    f"output_dir: {path} cannot be written by this user (its owner has the number "
                    f"{path.stat().st_uid}): run the command as its owner, or choose another output_dir"
                )


def _refuse_used(rundir: RunDir) -> NoReturn:
    if rundir.checkpoint_path and rundir.checkpoint_steps():
        raise RecipeError(f"checkpoint.path: {rundir.storage} is not empty: choose another, or delete what is in it")
    raise RecipeError(f"output_dir: {rundir.root} is not empty: choose another, or delete it")


def _check_places(plan: Plan, rundir: RunDir) -> None:
    """Raise RecipeError unless this run may write where its recipe says.

    Raises CheckpointError if a link inside the run folder leads out of it.
    """
    root = rundir.root
    _check_path(root, "output_dir")
    with write_errors(f"output_dir: cannot write to {rundir.root}"):
        entries = _names_in(root)
    if entries and not is_marked(root):
        raise RecipeError(
            f"output_dir: {root} holds files that fsdptrain did not write ({listed(entries, 3)}); choose another"
        )
    reject_external_symlinks(rundir)
    written = (rundir.plan, rundir.metrics, rundir.progress, rundir.pinned, rundir.export_record, rundir.launcher_log)
    for path in written:
        if os.path.lexists(path) and not is_regular_file(path):
            raise RecipeError(
                f"output_dir: {path} is not a regular file, and a run writes one there: move it away, or choose another"
            )
    if isinstance(place := rundir.checkpoint_place, Path):
        _check_checkpoint_folder(rundir, place)
    _check_owner_of_checkpoints(plan, rundir)
    check_inputs(plan, rundir)


def _check_path(folder: Path, key: str) -> None:
    if os.path.realpath(folder) in ("/", os.path.realpath(expanded("~"))):
        raise RecipeError(f"{key}: {folder} is the root or home folder; use a subfolder")
    if os.path.lexists(folder) and not folder.is_dir():
        what = "a broken link" if folder.is_symlink() else "a file"
        raise RecipeError(f"{key}: {folder} is {what}; choose another")


def _check_checkpoint_folder(rundir: RunDir, folder: Path) -> None:
    """Raise RecipeError for a folder in checkpoint.path that is a file, or is where another run or this one writes."""
    _check_path(folder, "checkpoint.path")
    real, root = Path(os.path.realpath(folder)), Path(os.path.realpath(rundir.root))
    if real == root or any(real.is_relative_to(root / path.name) for path in rundir.written_paths()):
        raise RecipeError(
            f"checkpoint.path: {folder} is inside output_dir, where the run stores other files: leave it out (then it "
            f"is {rundir.checkpoints}), or choose another place"
        )
    above = next((path for path in real.parents if path != root and is_marked(path)), None)
    if above or (is_marked(real) and marked_run(real) is None):
        raise RecipeError(f"checkpoint.path: {folder} is in {above or real}, which another run writes; choose another")


def _check_owner_of_checkpoints(plan: Plan, rundir: RunDir) -> None:
    """Raise RecipeError unless the place in checkpoint.path is for this run: new, empty, or with its checkpoints."""
    place = rundir.checkpoint_place
    if place is None:
        return
    with write_errors(f"checkpoint.path: cannot write to {place}"):
        names, owner = _names_in(place) if isinstance(place, Path) else place.names(), marked_run(place)
    entries = [name for name in names if name != PROBE]
    is_own, steps = owner == str(rundir.root), rundir.checkpoint_steps()
    # Another machine may have a run folder of the same name, and the same object store: then the run must be the same.
    if not entries or (is_own and (isinstance(place, Path) or rundir.plan.exists() or is_continued(rundir, plan))):
        return
    # A run folder may have been renamed, and checkpoints copied: then there is none at the place of the owner.
    in_use = owner is not None and not is_own and (Path(owner) / rundir.plan.name).exists()
    is_same = steps and rundir.plan.exists() and is_continued(rundir, plan)
    if not in_use and (entries == [MARK] or is_same):
        return
    held = f"files that fsdptrain did not write ({listed(entries, 3)})"
    if owner or steps:
        held = f"the checkpoints of {f'the run in {owner}' if owner else 'another run'}"
    if is_own:
        held += " on another machine, of which the recipe has another model, data, seed, batch or optimizer"
    raise RecipeError(f"checkpoint.path: {place} holds {held}; choose another")


def check_inputs(plan: Plan, rundir: RunDir) -> None:
    """Raise RecipeError for a model or data inside the run folder, and for data that would include files of the run."""
    model = plan.recipe.model
    names: list[tuple[str, Any]] = [("data.path", path) for path in places(plan.data_path)]
    names += [("data.eval", plan.eval_path), ("model.id", model.id), ("model.tokenizer", model.tokenizer)]
    written = [("output_dir", str(rundir.root), DATA_LIKE_FILES)]
    if rundir.checkpoint_path:
        written.append(("checkpoint.path", rundir.checkpoint_path, DATA_LIKE_CHECKPOINT))
    problems = []
    for key, name in names:
        if not isinstance(name, str) or not (URL.fullmatch(name) or os.path.isabs(name) or is_folder(name)):  # noqa: PTH117
            continue
        for field, place, files in written:
            what = ""
            if is_inside(name, place):
                what = f"is inside {field} ({place}), which this run writes"
            elif key.startswith("data.") and would_include(name, place, files):
                what = f"would include files that this run writes to {field} ({place})"
            if what:
                problems.append(Problem(f"{name} {what}: move one", key))
    if problems:
        raise RecipeError(problems)


def is_inside(name: str, place: str) -> bool:
    """Return whether a path or a URL, or the part of a glob before its first wildcard, is inside a place."""
    return _real(_fixed_part(name)).is_relative_to(_real(place))


def would_include(name: str, place: str, files: Iterable[str]) -> bool:
    """Return whether data (a file, a folder, a glob, or a URL of one) includes one of `files` below a place.

    A glob with `**` is taken to include everything below it whose end fits.
    """
    fixed, written = _fixed_part(name), [_real(place) / file for file in files]
    if fixed == name:
        return _real(place).is_relative_to(_real(name))
    pattern = str(_real(fixed) / name.removeprefix(fixed).lstrip("/"))
    # A folder that a glob matches is read whole.
    paths = {path for file in written for path in (file, *file.parents) if path.is_relative_to(_real(fixed))}
    depth = None if "**" in pattern else pattern.count("/")
    return any(
        fnmatchcase(str(path), pattern.replace("/**", "*")) and depth in (None, str(path).count("/")) for path in paths
    )


def _real(name: str) -> Path:
    """Return a path with its links followed; of a URL, which has none, a path that can be compared with others."""
    return Path(name if URL.fullmatch(name) else os.path.realpath(name))


def _fixed_part(name: str) -> str:
    """Return a path, or the part of a glob before its first wildcard."""
    if os.path.lexists(name) or not has_magic(name):
        return name
    return os.path.dirname(name[: next(match.start() for match in re.finditer(r"[*?[]", name))])  # noqa: PTH120


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; those of folders end with a slash."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(f"{path.name}/" if path.is_dir() else path.name for path in entries)


@contextlib.contextmanager
def lock_for_export(rundir: RunDir) -> Iterator[None]:
    """Lock a run folder to write its export; raise RecipeError if a run is using it."""
    with contextlib.ExitStack() as stack:
        if not lock_run(stack, rundir):
            raise RecipeError(f"a run is using {rundir.root} and will write its export there; use --out DIR")
        yield


@contextlib.contextmanager
def _locked(rundir: RunDir, plan: Plan) -> Iterator[bool]:
    """Lock the run folder; of several nodes, the first locks it and each locks it for its machine.

    Yields whether this is the first node. The system releases a lock when its process ends, even if it is killed.
    """
    several = plan.topology.nnodes > 1 and not plan.topology.joined
    with contextlib.ExitStack() as stack:
        if several:
            node = [socket.gethostname()]
            with contextlib.suppress(OSError):  # not Linux
                node += [BOOT_ID.read_text(encoding="ascii").strip(), str(PID_NAMESPACE.stat().st_ino)]
            if not lock_run(stack, rundir, rundir.logs / f"lock-{'-'.join(node)}"):
                raise FolderInUse(f"output_dir: another run is using {rundir.root} on this machine")
        first = lock_run(stack, rundir)
        if not first and not several:
            raise FolderInUse(f"output_dir: another run is using {rundir.root}")
        yield first


def lock_run(stack: contextlib.ExitStack, rundir: RunDir, path: Path | None = None) -> bool:
    """Lock a run until the end of `stack`, by its mark or another file; return whether no other process had done so."""
    with write_errors(f"output_dir: cannot write to {rundir.root}"):
        rundir.logs.mkdir(exist_ok=True)
        descriptor = try_lock(path or rundir.mark)
    if descriptor is not None:
        stack.callback(os.close, descriptor)
    return descriptor is not None


def _wait_for_plan(plan: Plan, rundir: RunDir) -> None:
    """Wait until the writing process has written the same plan; raise RecipeError after launch.timeout_s."""
    timeout, differences, unreadable = plan.recipe.launch.timeout_s, "there is none", None
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            found, unreadable = open_plan(rundir.plan), None
            if found.digest() == plan.digest():
                return
            differences = "; ".join(describe_changes(plan_changes(json.loads(found.to_json()), plan)))
        except StorageError as error:  # a shared folder may refuse for a moment, while the file is replaced
            unreadable = error
        except (*NOTHING_THERE, Unreadable):  # it does not exist yet, or is of another version
            unreadable = None
        time.sleep(POLL_S)
    if unreadable:
        raise unreadable
    raise RecipeError(
        f"output_dir: waited {timeout} s (launch.timeout_s) for a plan.json of the first rank in {rundir.root} that "
        f"matches this recipe, but on {socket.gethostname()}: {differences}; start all nodes with the same command and "
        f"versions, see the output of the first, and stop other runs there; if ls {rundir.root} shows other files on "
        "other hosts, choose a folder that all hosts share"
    )
