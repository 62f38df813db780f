"""The options of sbatch: those that a user adds to a job, those that the job sets itself, and the times they leave."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence

from fsdptrain.errors import RecipeError

STOP_BEFORE_S = 300  # from the stop signal to the time limit: the last checkpoint must be written meanwhile


EARLY_S = 60  # by which Slurm may send the signal too early


INSTEAD = {  # options that a job sets itself → what to do instead
    ("--nodes", "-N"): "use --nodes",
    ("--time", "-t"): "use --time",
    ("--partition", "-p"): "use --partition",
    ("--account", "-A"): "use --account",
    ("--job-name", "-J"): "set the key name of the recipe",
    ("--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"): (
        "use --gpus-per-node, and for a type of GPU also --sbatch=--gpus-per-node=TYPE:NUMBER"
    ),
    ("--ntasks", "-n", "--ntasks-per-node", "--ntasks-per-core", "--ntasks-per-gpu", "--ntasks-per-socket"): (
        "each node has one task, which starts launch.nproc_per_node workers"
    ),
    ("--output", "-o", "--open-mode"): "the log of all attempts is logs/slurm-JOB.log in output_dir",
    ("--requeue", "--no-requeue"): "the job is requeued after its time limit; scancel ends it for good",
    ("--array", "-a"): "a run is one job",
    ("--chdir", "-D"): "run submit in that folder",
    ("--test-only",): "use --dry-run, which prints the script",
}


OPTION = re.compile(r"(--[a-z-]+)(?:[=\s]\s*(.*))?|(-[A-Za-z])\s*(.*)")


STOP_SIGNAL = re.compile(r"B:(?:SIG)?USR1@([0-9]+)")  # `B:` is the script, which handles USR1


TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(\d+)(?::(\d+))?(?::(?P<seconds>\d+))?")


def parse_options(texts: Sequence[str], gpus_per_node: int) -> dict[str, str]:
    """Return options such as `--mem=64G`, `-C ib` or `--exclusive` as name → value, empty for an option without one.

    Raises RecipeError for what is not one option, for an option that is given twice, and for those that a job sets
    itself. But `--gpus-per-node=TYPE:NUMBER` may add the type to the job's number of GPUs.
    """
    options: dict[str, str] = {}
    for text in texts:
        match = OPTION.fullmatch(text) if text.isprintable() else None
        name, value = (match[1] or match[3], match[2] or match[4] or "") if match else ("", "")
        if not name or value.startswith("-"):
            raise RecipeError(f"--sbatch: {text!r} is not an option: write it as --sbatch=--NAME=VALUE")
        if name in options:
            raise RecipeError(f"--sbatch: {name} is given twice, as {options[name]!r} and as {value!r}: remove one")
        has_type = name == "--gpus-per-node" and re.fullmatch(rf"[\w.-]+:{gpus_per_node}", value)
        known = "--gpus" if name == "--gres" and "gpu" in value else name
        for names, way_out in INSTEAD.items():
            if not has_type and any(_abbreviates(known, full) for full in names):
                raise RecipeError(f"--sbatch: {text} contradicts what submit sets for the job: {way_out}")
        options[name] = value
    return options


def _abbreviates(name: str, full: str) -> bool:
    """Return whether sbatch reads `name` as the option `full`: it accepts the beginning of a long name."""
    return name == full or (name.startswith("--") and full.startswith(name))


def take_stop_signal(options: dict[str, str]) -> int:
    """Remove `--signal` from the options; return how many seconds before the time limit Slurm sends the stop signal.

    Raises RecipeError for a signal that the script does not handle.
    """
    for name in [name for name in options if _abbreviates(name, "--signal")]:
        value = options.pop(name)
        if match := STOP_SIGNAL.fullmatch(value):
            return int(match[1])
        raise RecipeError(
            f"--sbatch: {name}={value} would not reach the script, which stops the run and requeues the job: write "
            f"--sbatch=--signal=B:USR1@{STOP_BEFORE_S}, with the seconds before the time limit"
        )
    return STOP_BEFORE_S


def check_times(limit: str | None, stop_before_s: int, grace_s: int | None) -> None:
    """Raise RecipeError if the stop signal comes at the start of the job, or if a stop may take until the time limit.

    `limit` is that of `--time` (None: the partition's), `grace_s` is `launch.grace_s`.
    """
    if limit is not None and (limit_s := time_limit_s(limit)) <= stop_before_s + EARLY_S:
        raise RecipeError(
            f"--time: {limit} is {limit_s / 60:.0f} min, and the stop signal comes {stop_before_s} s before that, or "
            f"up to {EARLY_S} s earlier: give more (12:00:00 is 12 hours), or --sbatch=--signal=B:USR1@SECONDS"
        )
    if grace_s is not None and grace_s >= stop_before_s:
        raise RecipeError(
            f"launch.grace_s: {grace_s} s is not less than the {stop_before_s} s from the stop signal to the time "
            f"limit: lower it, or give --sbatch=--signal=B:USR1@{grace_s + EARLY_S}"
        )


def time_limit_s(text: str) -> float:
    """Return a time limit of sbatch in seconds, rounded up to minutes as sbatch does; infinity if there is none.

    Raises RecipeError for a text that sbatch does not accept.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return math.inf
    match = TIME_LIMIT.fullmatch(text)
    if match is None:
        raise RecipeError(f"--time: {text!r} is not minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    days, first, second, third = (int(number or 0) for number in match.groups())
    if match["days"] is None and match["seconds"] is None:  # minutes, or minutes:seconds
        first, second, third = 0, first, second
    return 60 * ((24 * days + first) * 60 + second + math.ceil(third / 60)) or math.inf


def directives(options: Mapping[str, str]) -> list[str]:
    """Return a line of the script for each option, with a value that Slurm reads as one word."""
    lines = []
    for name, value in options.items():
        separator = "=" if name.startswith("--") else " "
        lines.append(f"#SBATCH {name}{separator}{shlex.quote(value)}" if value else f"#SBATCH {name}")
    return lines
