"""How a run takes its folder: what can be refused is refused before a byte in it changes. No torch.

    checks that only read → mark → lock → the same checks, for another run may have come between → plans/, recipe.yaml,
    plan.json

One process writes: the command, the first of the nodes to come, or rank 0 under somebody else's torchrun. The others
wait until the plan in the folder is theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from filelock import FileLock, Timeout

from fsdptrain.checkpoint.manifest import reject_external_symlinks
from fsdptrain.config.paths import expanded, is_folder
from fsdptrain.config.plan import Plan
from fsdptrain.errors import CheckpointError, Problem, RecipeError, is_disk_full, listed
from fsdptrain.launch.attempts import (
    EarlierAttempts,
    archive_plan,
    describe_changes,
    inspect_earlier_attempts,
    plan_changes,
)
from fsdptrain.ownership import is_marked, write_atomically, write_mark
from fsdptrain.rundir import RunDir

# Where a run writes files that look like data: what a data.path must not match.
LOOKS_LIKE_DATA = (
    "metrics.jsonl", "plan.json", "plans/0001.json", "logs/progress.jsonl", "logs/defect.txt", "model/config.json",
    "export/config.json", "checkpoints/step-00000001/manifest.json",
)  # fmt: skip


POLL_S = 0.2


# With the host name, which several machines or containers may share: the boot of the machine, and the container in it.
BOOT_ID, CONTAINER = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@contextlib.contextmanager
def claim_run_dir(plan: Plan, recipe_text: str, fresh: bool) -> Iterator[EarlierAttempts]:
    """Lock the run folder, write the plan, and yield what earlier attempts made. A finished run is not touched.

    `fresh`, or `checkpoint.resume: never`: a folder that was used is refused. Raises RecipeError when the folder must
    not be written by this run, and what `inspect_earlier_attempts` raises.
    """
    rundir = RunDir(Path(plan.run_dir))
    fresh = fresh or plan.recipe.checkpoint.resume == "never"
    writes = not plan.topology.joined or os.environ["RANK"] == "0"
    check_output_dir(rundir)
    check_inputs(plan, rundir)
    # With several nodes, the first may have begun to use it a moment ago: then it is asked under the lock alone.
    if fresh and writes and rundir.has_run() and not (plan.topology.nnodes > 1 and is_marked(rundir.root)):
        _refuse_used(rundir)
    before = inspect_earlier_attempts(rundir, plan)
    if before.finished:
        yield before
        return
    if not writes:
        _wait_for(plan, rundir)
        yield before
        return
    with _readable_errors(rundir):
        rundir.root.mkdir(parents=True, exist_ok=True)
        write_mark(rundir.root)
    with _held(rundir, plan) as first:
        if first and fresh and rundir.has_run():
            _refuse_used(rundir)
        before = inspect_earlier_attempts(rundir, plan)
        if first and not before.finished:
            with _readable_errors(rundir):
                archive_plan(rundir, plan, recipe_text)
                write_atomically(rundir.plan, plan.to_json())
        elif not before.finished:
            _wait_for(plan, rundir)
        yield before


def check_run_dir(plan: Plan) -> EarlierAttempts:
    """Make the checks of `claimed` and change nothing, for a dry run; raises what it raises."""
    rundir = RunDir(Path(plan.run_dir))
    check_output_dir(rundir)
    check_inputs(plan, rundir)
    if plan.recipe.checkpoint.resume == "never" and rundir.has_run():
        _refuse_used(rundir)
    return inspect_earlier_attempts(rundir, plan)


def _refuse_used(rundir: RunDir) -> None:
    raise RecipeError(f"output_dir: {rundir.root} is not empty: choose another, or delete it")


def check_output_dir(rundir: RunDir) -> None:
    """Raise RecipeError unless the folder can be made, is empty, or carries the mark of a run.

    Raises CheckpointError when a link in it leads elsewhere.
    """
    root = rundir.root
    if os.path.realpath(root) in ("/", os.path.realpath(expanded("~"))):
        raise RecipeError(f"output_dir: {root} is the root or home folder; use a subfolder")
    if os.path.lexists(root) and not root.is_dir():
        what = "a link to nowhere" if root.is_symlink() else "a file"
        raise RecipeError(f"output_dir: {root} is {what}; choose another")
    with _readable_errors(rundir):
        found = sorted(f"{path.name}/" if path.is_dir() else path.name for path in _entries(root))
    if found and not is_marked(root) and not _is_of_earlier_version(rundir):
        raise RecipeError(
            f"output_dir: {root} holds files that no run of fsdptrain wrote ({listed(found, 3)}); choose another"
        )
    reject_external_symlinks(rundir)


def check_inputs(plan: Plan, rundir: RunDir) -> None:
    """Raise RecipeError for a model or data inside the run folder, and for data that includes what a run writes."""
    root = os.path.realpath(rundir.root)
    model, names = plan.recipe.model, {"data.path": plan.data_path, "data.eval": plan.eval_path}
    names |= {"model.id": model.id} | ({"model.tokenizer": model.tokenizer} if model.tokenizer else {})
    problems = []
    for key, name in names.items():
        if not isinstance(name, str) or not (os.path.isabs(name) or is_folder(name)):  # noqa: PTH117
            continue
        if Path(os.path.realpath(_fixed_part(name))).is_relative_to(root):
            problems.append(Problem(f"{name} lies in output_dir ({rundir.root}), which this run writes: move one", key))
        elif key.startswith("data.") and _would_read(name, root):
            problems.append(Problem(f"{name} would include what is written to output_dir ({root}): move one", key))
    if problems:
        raise RecipeError(problems)


def _fixed_part(name: str) -> str:
    """Return a path, or the part of a glob before its first pattern."""
    if os.path.lexists(name) or not has_magic(name):
        return name
    parts = Path(name).parts
    return str(Path(*parts[: next(i for i, part in enumerate(parts) if has_magic(part))]))


def _would_read(name: str, root: str) -> bool:
    """Return whether a data path, a folder or a glob, takes in files that a run writes below `root`."""
    if Path(name).is_dir():
        return Path(root).is_relative_to(os.path.realpath(name))
    fixed = _fixed_part(name)
    pattern = (*Path(os.path.realpath(fixed)).parts, *Path(name).parts[len(Path(fixed).parts) :])
    written = [Path(root), *(Path(root, file) for file in LOOKS_LIKE_DATA)]
    return any(_matches(path.parts[:length], pattern) for path in written for length in range(1, len(path.parts) + 1))


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not pattern or not parts:
        return parts == pattern or set(pattern) == {"**"}
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_of_earlier_version(rundir: RunDir) -> bool:
    """Return whether a folder without a mark holds a run of a version that set none: its plan says so."""
    try:
        fields = json.loads(rundir.plan.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and {"version", "recipe", "run_dir", "topology"} <= fields.keys()


@contextlib.contextmanager
def lock_for_export(rundir: RunDir) -> Iterator[None]:
    """Hold a run folder against runs, to write an export into it; raises RecipeError when a run is at work."""
    with contextlib.ExitStack() as stack:
        if not _locked(stack, rundir, "lock"):
            raise RecipeError(f"a run is using {rundir.root} and will write its export there; use --out DIR")
        yield


@contextlib.contextmanager
def _held(rundir: RunDir, plan: Plan) -> Iterator[bool]:
    """Hold the run folder, or, as one of several nodes, this machine's part of it; whether this is the first node.

    The system lets go of a lock when its process ends, however it ends.
    """
    several = plan.topology.nnodes > 1 and not plan.topology.joined
    with contextlib.ExitStack() as stack:
        if several and not _locked(stack, rundir, f"lock-{_node_name()}"):
            raise RecipeError(f"output_dir: another run is at work in {rundir.root} on this machine")
        first = _locked(stack, rundir, "lock")
        if not first and not several:
            raise RecipeError(f"output_dir: another run is at work in {rundir.root}")
        yield first


def _node_name() -> str:
    """Return what tells this node from the others, for the name of a file."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        parts += [BOOT_ID.read_text(encoding="ascii").strip(), str(CONTAINER.stat().st_ino)]
    return "-".join(parts)


def _locked(stack: contextlib.ExitStack, rundir: RunDir, name: str) -> bool:
    with _readable_errors(rundir):
        rundir.logs.mkdir(exist_ok=True)
        try:
            stack.enter_context(FileLock(rundir.logs / name, timeout=0))
        except Timeout:
            return False
    return True


def _wait_for(plan: Plan, rundir: RunDir) -> None:
    """Wait until the process that writes has written this very plan; raises RecipeError when it does not come."""
    wait, found = plan.recipe.launch.timeout_s, None
    end = time.monotonic() + wait
    while time.monotonic() < end:
        with contextlib.suppress(Exception):  # not there yet, or another version's
            found = Plan.from_json(rundir.plan.read_text(encoding="utf-8"))
            if found.digest() == plan.digest():
                return
        time.sleep(POLL_S)
    differing = describe_changes(plan_changes(json.loads(found.to_json()), plan)) if found else []
    differ = f" ({'; '.join(differing)})" if differing else ""
    raise RecipeError(
        f"output_dir: waited {wait} s (launch.timeout_s) for a plan.json that matches this recipe{differ}; start all "
        f"nodes with the same command, or stop the other run in {rundir.root}"
    )


@contextlib.contextmanager
def _readable_errors(rundir: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise CheckpointError(f"no space: {error}") from None
        raise RecipeError(f"output_dir: cannot write to {rundir.root}: {error.strerror}") from None
