"""A run as a job of Slurm: `recipes/clusters/job.sbatch`, filled in. Files for other schedulers are beside it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fsdptrain.config.paths import expanded
from fsdptrain.config.reader import LoadedRecipe
from fsdptrain.config.schema import node_range
from fsdptrain.errors import RecipeError
from fsdptrain.launch.run_lock import check_run_dir
from fsdptrain.plan.hardware import HardwareChoice
from fsdptrain.plan.launchers import Launched
from fsdptrain.plan.plan import Plan, draft_plan
from fsdptrain.plan.topology import check_agreement, topology_of_job
from fsdptrain.run_folder.files import shipped
from fsdptrain.run_folder.ownership import write_mark

PYTHON = (sys.executable, "-P")  # -P: imports nothing from the working folder
RESTARTS = 3  # of the workers of a job, unless the recipe sets launch.max_restarts
DIRECTIVE = re.compile(r"#SBATCH (--[a-z-]+)=?(.*)")
OPTION = re.compile(r"(--[a-z-]+)(?:=(.*))?")
# Options that the job depends on, so that --sbatch must not replace them.
FIXED = (
    "--job-name", "--nodes", "--ntasks", "--ntasks-per-node", "--gpus", "--array", "--chdir", "--output", "--open-mode",
    "--requeue", "--no-requeue",
)  # fmt: skip


class Job(NamedTuple):
    """A run on other machines: its plan there, and the command that runs it.

    Every node has `gpus_per_node` GPUs; 0: it trains on the CPU.
    """

    plan: Plan
    command: list[str]
    gpus_per_node: int


def gpus_of_node(choice: HardwareChoice | None, given: int | None) -> int:
    """Return the GPUs of a node (0: it trains on the CPU) from `--hardware` and `--gpus-per-node`.

    Raises RecipeError if neither says it, and if they contradict each other.
    """
    count = choice.count if choice else None
    if choice and choice.hardware.is_cpu:
        count = 0
    if given is None and count is None:
        raise RecipeError("--gpus-per-node is not set: give the GPUs of a node (0: train on the CPU), or --hardware")
    if given is not None and count not in (None, given):
        raise RecipeError(f"--gpus-per-node: {given} contradicts --hardware, which has {count}: remove one of them")
    return count if given is None else given  # type: ignore[return-value]


def prepare_job(recipe: str, written: LoadedRecipe, overrides: Sequence[str], nodes: int | None, gpus: int) -> Job:
    """Return the job of a recipe on `nodes` nodes (None: `launch.nnodes`) with `gpus` GPUs each.

    Raises RecipeError for keys that contradict the job, and for what `run` would refuse before it starts workers.
    """
    nnodes = nodes or node_range(written.recipe.launch.nnodes)[1]
    check_agreement(written.recipe, Launched("this job", nnodes, 0, endpoint="its own endpoint"), written.where)
    plan, problems = draft_plan(written, topology_of_job(written.recipe, nnodes, gpus))
    if problems:
        raise RecipeError(problems)
    if plan.recipe.checkpoint.resume == "never":
        raise RecipeError("checkpoint.resume: never does not let the job go on after its time limit: use auto")
    check_run_dir(plan, fresh=False)
    path = Path(expanded(recipe))
    command = [*PYTHON, "-m", "fsdptrain", "run", str(path.absolute()) if path.is_file() else recipe, *overrides]
    if "launch.max_restarts" not in written.where:
        command.append(f"launch.max_restarts={RESTARTS}")
    return Job(plan, command, gpus)


def slurm_script(job: Job, more: Sequence[str] = (), own: Mapping[str, str | None] | None = None) -> str:
    """Return the batch script of a job; `more` are options of sbatch, such as `--constraint=ib`.

    `own` are those that `submit` has an option for, such as `--time`. Raises RecipeError for `more` that would replace
    what the job depends on.
    """
    template = shipped("recipes", "clusters", "job.sbatch").read_text(encoding="utf-8").splitlines()
    options: dict[str, str | None] = {}
    for line in template:
        if match := DIRECTIVE.fullmatch(line):
            options[match[1]] = match[2]
    options |= {"--job-name": job.plan.recipe.name, "--nodes": str(job.plan.topology.nnodes)}
    options |= {"--gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else None}
    options |= {"--output": str(job.plan.rundir.logs).replace("%", "%%") + "/slurm-%j.log"}
    options |= own or {}
    given = parse_options(more)
    if any(name.startswith(("--cpus-per-", "--mem")) for name in given):  # else the job has whole nodes
        options |= {"--exclusive": None, "--mem": None}
    lines = []
    for name, value in (options | given).items():
        if value == "":
            lines.append(f"#SBATCH {name}")
        elif value is not None:
            lines.append(f"#SBATCH {name}={shlex.quote(value)}")
    shebang, *others = (line for line in template if not DIRECTIVE.fullmatch(line))
    command = f"command=({shlex.join(job.command)})"
    body = [command if line.startswith("command=") else line for line in others]
    return "\n".join([shebang, *lines, *body, ""])


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """Return options such as `--mem=64G` or `--exclusive` as name → value, empty for an option without one.

    Raises RecipeError for what is not one long option, and for those that a job sets itself.
    """
    options: dict[str, str] = {}
    for text in texts:
        match = OPTION.fullmatch(text) if text.isprintable() else None
        if match is None:
            raise RecipeError(f"--sbatch: {text!r} is not a long option: write it as --sbatch=--NAME=VALUE")
        name, value = match[1], match[2] or ""
        if any(fixed.startswith(name) for fixed in FIXED):  # sbatch accepts the beginning of a name
            raise RecipeError(f"--sbatch: {name} is set by submit (see fsdptrain submit --help)")
        if name == "--signal" and not value.startswith("B:USR1@"):
            raise RecipeError("--sbatch: the script handles only --signal=B:USR1@SECONDS before the time limit")
        options[name] = value
    return options


def submit_to_slurm(job: Job, script: str) -> str:
    """Submit the batch script of a job; return its number. Raises RecipeError with what sbatch said.

    The folder of the logs is created before, because Slurm opens the log before the script starts.
    """
    if shutil.which("sbatch") is None:
        raise RecipeError(
            "there is no sbatch on this machine: --dry-run prints the script for Slurm; for other clusters and clouds, "
            "take a file of `fsdptrain recipes list` (docs/clouds.md)"
        )
    rundir = job.plan.rundir
    rundir.root.mkdir(parents=True, exist_ok=True)
    write_mark(rundir.root)
    rundir.logs.mkdir(exist_ok=True)
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecipeError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
