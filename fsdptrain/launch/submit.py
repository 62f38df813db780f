"""A run as a job of Slurm: its batch script. Files for other schedulers are in `recipes/clusters`.

Slurm's stop signal goes to the script alone, which passes it on through `srun` and notes that the time is over. Then,
and after a preemption, it requeues the job. A job that `scancel` ends must not come back.

    Slurm ── SIGUSR1, before the time limit ──> script ──> srun ──> every process of the step: checkpoint, exit code 75
    Slurm ── SIGTERM, when it preempts the job ───────────────────> every process of the step: checkpoint, exit code 75
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptrain.config.paths import expanded
from fsdptrain.config.reader import LoadedRecipe
from fsdptrain.config.schema import node_range
from fsdptrain.errors import RecipeError, Stopped
from fsdptrain.launch import requeue
from fsdptrain.launch.run_lock import check_run_dir
from fsdptrain.plan.hardware import HardwareChoice
from fsdptrain.plan.launchers import Launched
from fsdptrain.plan.plan import Plan, draft_plan
from fsdptrain.plan.topology import check_agreement, topology_of_job
from fsdptrain.run_folder.ownership import write_mark
from fsdptrain.run_folder.rundir import MARK
from fsdptrain.text import counted

PYTHON = (sys.executable, "-P")  # -P: imports nothing from the working folder
SHORTEST_S = 30  # a job that reaches its time limit in less is not requeued
RESTARTS = 3  # of the workers of a job, unless the recipe sets launch.max_restarts: less work than a requeue
WHOLE_NODES = {"--exclusive": "", "--mem": "0"}  # all cores and memory: without an option, a task has one core

# `wait` returns when a signal comes, so it is repeated until srun has ended.
SCRIPT = """
step='' time_is_over='' cancelled='' started=$(date +%s)
trap 'time_is_over=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1
trap 'time_is_over="" cancelled=yes' TERM  # scancel: the step gets it too, and needs time for its checkpoint

srun --kill-on-bad-exit=0 {command} &
step=$!
while wait "$step"; code=$?; [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do :; done

# A job whose signal comes at once, because its time limit is too short, would be requeued for ever.
[ "$SECONDS" -gt {shortest_s} ] || time_is_over=''

# The step of a preempted job gets SIGTERM, as with scancel. In the record of the job they differ; SIGNALING is RUNNING.
is_preempted() {{
  scontrol show job --oneliner "$SLURM_JOB_ID" | grep -qE ' JobState=(RUNNING|SIGNALING) .* PreemptTime=[0-9]'
}}

# It says why. A lost worker was restarted before, unless the step itself was lost.
is_worth_it() {{
  [ -z "$cancelled" ] && {python} -m fsdptrain.processes $$ {judge} "$code" "$started"
}}

case "$code" in
  0) again='' ;;
  {stopped}) if [ -n "$time_is_over" ] || is_preempted; then again=yes; else again=''; fi ;;
  *) if is_worth_it; then again=yes; else again=''; fi ;;
esac
if [ -n "$again" ]; then
  trap - TERM
  scontrol requeue "$SLURM_JOB_ID" && sleep infinity  # Slurm ends this script, and starts it again
fi
exit "$code"
"""
STOP_BEFORE_S = 300  # from the stop signal to the time limit: the last checkpoint must be written by then
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


@dataclass(frozen=True)
class Job:
    """A run on other machines: its plan there, its recipe, and the overrides of the command line.

    Every node has `gpus_per_node` GPUs; 0: it trains on the CPU.
    """

    plan: Plan
    written: LoadedRecipe
    recipe: str
    overrides: tuple[str, ...]
    gpus_per_node: int

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.plan.recipe.name

    @property
    def logs(self) -> Path:
        """The folder for the output of the job."""
        return self.plan.rundir.logs

    def size_keys(self) -> list[str]:
        """Return the overrides that give any plan the size of this job."""
        topology = self.plan.topology
        return [f"launch.nnodes={topology.nnodes}", f"launch.nproc_per_node={topology.nproc_per_node}"]

    def range_note(self) -> str | None:
        """Return what becomes of a range of nodes in `launch.nnodes`; None for a number."""
        least, most = node_range(self.plan.recipe.launch.nnodes)
        if least == most:
            return None
        nodes = self.plan.topology.nnodes
        return (
            f"launch.nnodes: {least}:{most}: this job is for {counted(nodes, 'node')}; --nodes chooses another number"
        )

    def command(self) -> list[str]:
        """Return the command that runs it, with this Python."""
        restarts = [] if "launch.max_restarts" in self.written.where else [f"launch.max_restarts={RESTARTS}"]
        return [*PYTHON, "-m", "fsdptrain", "run", self.recipe, *self.overrides, *restarts]


def gpus_of_node(choice: HardwareChoice | None, given: int | None) -> int:
    """Return the GPUs of a node (0: it trains on the CPU) from `--hardware` and `--gpus-per-node`.

    Raises RecipeError if neither says it, if they contradict each other, and for more GPUs in `--hardware` than a node
    usually has: there `validate --hardware` takes the number for that of all nodes.
    """
    if choice is None:
        if given is None:
            raise RecipeError(
                "--gpus-per-node is not set: give the GPUs of a node (0: train on the CPU), or --hardware"
            )
        return given
    name, usual, count = choice.hardware.name, choice.hardware.gpus_per_node, choice.count
    if choice.hardware.is_cpu:
        if count or given:
            raise RecipeError("--hardware: cpu has no GPUs: remove their number, and --gpus-per-node")
        return 0
    if given is not None:
        if given == 0 or count not in (None, given):
            written = f"{count}x{name}" if count else name
            raise RecipeError(f"--gpus-per-node: {given} contradicts --hardware {written}: remove one of them")
        return given
    if count is None:
        either = "" if name == "custom" else f"write --hardware {usual}x{name}, or "
        raise RecipeError(f"--hardware does not say how many GPUs a node has: {either}add --gpus-per-node {usual}")
    if count > usual:
        raise RecipeError(
            f"--hardware: {count}x{name} says that each node has {count} GPUs: write {usual}x{name} and "
            f"--nodes {math.ceil(count / usual)}, or add --gpus-per-node {count}"
        )
    return count


def prepare_job(recipe: str, written: LoadedRecipe, overrides: Sequence[str], nodes: int | None, gpus: int) -> Job:
    """Return the job of a recipe on `nodes` nodes (None: `launch.nnodes`) with `gpus` GPUs each.

    Raises RecipeError for keys that contradict the job, and for what `run` would refuse before it starts workers.
    """
    nnodes = nodes or node_range(written.recipe.launch.nnodes)[1]
    check_agreement(written.recipe, Launched("this job", nnodes, 0, endpoint="its own endpoint"), written.where)
    topology = topology_of_job(written.recipe, nnodes, gpus)
    plan, problems = draft_plan(written, topology)
    if problems:
        raise RecipeError(problems)
    if plan.recipe.checkpoint.resume == "never":
        raise RecipeError("checkpoint.resume: never does not let the job go on after its time limit: use auto")
    check_run_dir(plan)
    path = Path(expanded(recipe))
    return Job(plan, written, str(path.absolute()) if path.is_file() else recipe, tuple(overrides), gpus)


def slurm_script(
    job: Job,
    more: Sequence[str] = (),
    limit: str | None = None,
    partition: str | None = None,
    account: str | None = None,
) -> str:
    """Return the batch script of a job; `limit` is that of its time, `more` are options of sbatch, such as `-C ib`.

    Raises RecipeError for options that contradict the job, and for times that leave none for the last checkpoint.
    """
    options = parse_options(more, job.gpus_per_node)
    stop_before_s = take_stop_signal(options)
    check_times(limit, stop_before_s, job.plan.recipe.launch.grace_s)
    whole = {} if options.keys() & {"--cpus-per-task", "-c"} else WHOLE_NODES
    if any(name.startswith("--mem-per") for name in options):  # sbatch refuses a script with two sizes of memory
        whole = {name: value for name, value in whole.items() if name != "--mem"}
    own = {
        "--job-name": job.name,
        "--nodes": str(job.plan.topology.nnodes),
        "--ntasks-per-node": "1",  # fsdptrain starts the workers of a node
        **({"--gpus-per-node": str(job.gpus_per_node)} if job.gpus_per_node else {}),
        **whole,
        "--output": str(job.logs).replace("%", "%%") + "/slurm-%j.log",
        "--open-mode": "append",
        "--requeue": "",
        "--signal": f"B:USR1@{stop_before_s}",
    }
    named = {"--time": limit, "--partition": partition, "--account": account}
    if empty := [name for name, value in named.items() if value == ""]:
        raise RecipeError(f"{' and '.join(empty)}: is empty: give a value, or remove it")
    lines = directives(own | {name: value for name, value in named.items() if value is not None} | options)
    script = SCRIPT.format(
        command=shlex.join(job.command()), stopped=Stopped.exit_code, shortest_s=SHORTEST_S,
        python=shlex.join(PYTHON), judge=shlex.join([requeue.__name__, job.plan.recipe.output_dir, str(job.logs)]),
    )  # fmt: skip
    return "\n".join(["#!/bin/bash", *lines, script])


def submit_to_slurm(job: Job, script: str) -> str:
    """Submit the batch script of a job; return its number. Raises RecipeError with what sbatch said.

    The folder of the logs is created before, because Slurm opens the log before the script starts.
    """
    if shutil.which("sbatch") is None:
        raise RecipeError(
            "there is no sbatch on this machine: --dry-run prints the script for Slurm; for other clusters and clouds, "
            "take a file of `fsdptrain recipes list clusters` (docs/clouds.md)"
        )
    run = job.logs.parent
    new = [path for path in (job.logs, run / MARK, run, *run.parents) if not path.exists()]
    run.mkdir(parents=True, exist_ok=True)
    write_mark(run)
    job.logs.mkdir(exist_ok=True)
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        with contextlib.suppress(OSError):  # a folder that another process has written to stays
            for path in new:
                path.rmdir() if path.is_dir() else path.unlink()
        raise RecipeError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


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
