"""A run as a job: the batch script for Slurm, the manifest for Kubeflow Trainer, the command for each of plain hosts.

Slurm's stop signal goes to the script alone, which passes it on through `srun` and notes that the time is over. Then,
and after a preemption, it requeues the job. A job that `scancel` ends must not come back.

    Slurm ── SIGUSR1, before the time limit ──> script ──> srun ──> every process of the step: checkpoint, exit code 75
    Slurm ── SIGTERM, when it preempts the job ───────────────────> every process of the step: checkpoint, exit code 75
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdptrain.config.launchers import Launched
from fsdptrain.config.paths import expanded
from fsdptrain.config.plan import Plan, draft_plan
from fsdptrain.config.reader import LoadedRecipe
from fsdptrain.config.schema import node_range
from fsdptrain.config.topology import check_agreement, topology_of_job
from fsdptrain.errors import Problem, RecipeError, Stopped
from fsdptrain.launch.claim import check_run_dir
from fsdptrain.ownership import write_mark
from fsdptrain.storage import URL
from fsdptrain.text import counted

KINDS = ("slurm", "k8s", "hosts")


STOP_BEFORE_S = 300  # from the stop signal to the time limit: the last checkpoint must be written meanwhile


STOP_OPTION = re.compile(r"--signal=B:(SIG)?USR1@[0-9]+")  # `B:` is the script, which handles USR1


SHORTEST_S = 30  # a job that lived shorter is not requeued


WHOLE_NODES = ("--exclusive", "--mem=0")  # all cores and memory: without an option, a task has one core


RENDEZVOUS_PORT = 29500  # of plain hosts


CONFIG_MOUNT = "/etc/fsdptrain"  # where a pod finds the recipe


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
        """The folder for the output of the job: in the run folder, or here if that is in an object store."""
        return self.plan.rundir.logs if self.plan.rundir.url is None else Path.cwd()

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

    def command(self, *more: str) -> list[str]:
        """Return the command that runs it, with this Python."""
        python = [sys.executable, "-P", "-m", "fsdptrain"]  # -P: imports nothing from the working folder
        return [*python, "run", self.recipe, *self.overrides, *more]


def prepare_job(
    recipe: str, written: LoadedRecipe, overrides: Sequence[str], on: str, nodes: int | None, gpus: int | None
) -> Job:
    """Return the job of a recipe on `nodes` nodes (None: `launch.nnodes`) with so many GPUs each.

    Raises RecipeError for keys that contradict the job, and for what `run` would refuse before it starts workers.
    """
    if on not in KINDS:
        raise RecipeError(f"--on: {on!r} is not one of {', '.join(KINDS)}")
    if gpus is None:
        raise RecipeError("--gpus-per-node is not set: give the GPUs of a node (0: train on the CPU), or --hardware")
    nnodes = nodes or node_range(written.recipe.launch.nnodes)[1]
    check_agreement(written.recipe, Launched("this job", nnodes, 0, endpoint="its own endpoint"), written.where)
    topology = topology_of_job(written.recipe, nnodes, gpus)
    least, most = node_range(written.recipe.launch.nnodes)
    planned = written
    if on == "hosts" and least < min(most, nnodes):  # jobs of schedulers have a fixed number of nodes
        topology = dataclasses.replace(topology, least_nnodes=least)
        launch = dataclasses.replace(written.recipe.launch, nnodes=f"{least}:{nnodes}")
        planned = dataclasses.replace(written, recipe=dataclasses.replace(written.recipe, launch=launch))
    plan, problems = draft_plan(planned, topology, elsewhere=on == "k8s")
    if problems:
        raise RecipeError(problems)
    if on == "slurm" and plan.recipe.checkpoint.resume == "never":
        raise RecipeError("checkpoint.resume: never does not let the job go on after its time limit: use auto")
    if on != "k8s":
        check_run_dir(plan)
    path = Path(expanded(recipe))
    return Job(plan, written, str(path.absolute()) if path.is_file() else recipe, tuple(overrides), gpus)


def slurm_script(job: Job, options: Sequence[str], stop_before_s: int = STOP_BEFORE_S) -> str:
    """Return the batch script of a job; `options` are further ones of `sbatch`, such as `--time=4:00:00`.

    Raises RecipeError for options that cannot stand in a script, and for a signal that does not reach it.
    """
    for option in options:
        _check_option(option)
    gpus = [f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
    directives = [
        f"--job-name={shlex.quote(job.name)}",
        f"--nodes={job.plan.topology.nnodes}",
        "--ntasks-per-node=1",  # fsdptrain starts the workers of a node
        *gpus,
        *([] if any(option.startswith(("--cpus-per-task", "--exclusive")) for option in options) else WHOLE_NODES),
        f"--output={shlex.quote(str(job.logs).replace('%', '%%') + '/slurm-%j.log')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{stop_before_s}",
        *map(_quoted, options),
    ]
    head = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives)]
    return (
        "\n".join(head)
        + "\n"
        + SCRIPT.format(command=shlex.join(job.command()), stopped=Stopped.exit_code, shortest_s=SHORTEST_S)
    )


def _check_option(option: str) -> None:
    """Raise RecipeError for an option of sbatch that would break the script or the stop before the time limit."""
    if not option.startswith("-") or not option.isprintable():
        raise RecipeError(f"--sbatch: {option!r} is not an option: write it as --sbatch=--NAME=VALUE")
    if option.startswith("--signal") and not STOP_OPTION.fullmatch(option):
        raise RecipeError(
            f"--sbatch: {option} would not reach the script, which stops the run and requeues the job: write "
            f"--sbatch=--signal=B:USR1@{STOP_BEFORE_S}, with the seconds before the time limit"
        )


def _quoted(option: str) -> str:
    """Return `--NAME=VALUE` with a value that Slurm reads as one word; other options as they are."""
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else option


# `wait` returns when a signal comes, so it is repeated until srun has ended.
SCRIPT = """
step= time_is_over=
trap 'time_is_over=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1
trap time_is_over= TERM  # scancel: the step gets it too, and needs time for its checkpoint

srun --kill-on-bad-exit=0 {command} &
step=$!
while wait "$step"; code=$?; [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do :; done

# A job whose signal comes at once, because its time limit is too short, would be requeued for ever.
[ "$SECONDS" -gt {shortest_s} ] || time_is_over=

# The step of a preempted job gets SIGTERM, as with scancel. In the record of the job they differ.
is_preempted() {{ scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING .* PreemptTime=[0-9]'; }}

if [ "$code" -eq {stopped} ] && {{ [ -n "$time_is_over" ] || is_preempted; }}; then
  trap - TERM
  scontrol requeue "$SLURM_JOB_ID" && sleep infinity  # Slurm ends this script, and starts it again
fi
exit "$code"
"""


def submit_to_slurm(job: Job, script: str) -> str:
    """Submit the batch script of a job; return its number. Raises RecipeError with what sbatch said.

    The folder of the logs is created before, because Slurm opens the log before the script starts.
    """
    if shutil.which("sbatch") is None:
        raise RecipeError("--on slurm: there is no sbatch on this machine; --dry-run prints the script")
    if job.plan.rundir.url is None:
        job.logs.parent.mkdir(parents=True, exist_ok=True)
        write_mark(job.logs.parent)
        job.logs.mkdir(exist_ok=True)
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecipeError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def manifest(job: Job, image: str | None, volume: str | None, runtime: str) -> str:
    """Return the YAML of a ConfigMap with the recipe, and of a Kubeflow TrainJob that runs it.

    `volume` is CLAIM:PATH, the PersistentVolumeClaim that holds run folder and data, and where it is mounted; None if
    all of it is in object stores. Raises RecipeError for options that are missing, and for paths outside of the volume.
    """
    claim, _, mount = (volume or "").partition(":")
    recipe, in_store = job.plan.recipe, job.plan.rundir.url is not None
    if image is None or not ((claim and mount.startswith("/")) or (in_store and volume is None)):
        raise RecipeError("--on k8s needs --image, and --volume CLAIM:/PATH for the run folder and the data")
    places = {"output_dir": recipe.output_dir, "checkpoint.path": recipe.checkpoint.path}
    places |= {"data.path": recipe.data.path} if Path(job.plan.data_path).is_absolute() else {}
    way_out = f"give a path below {mount}" if mount else "add --volume CLAIM:/PATH"
    outside = [
        Problem(f"{path} is not on the volume: {way_out}", key)
        for key, path in places.items()
        if path and not URL.match(path) and not (mount and Path(path).is_relative_to(mount))
    ]
    if outside:
        raise RecipeError(outside)
    parts = train_job(job, image, claim, mount, runtime)
    return yaml.safe_dump_all(parts, sort_keys=False, allow_unicode=True, width=120)


def train_job(job: Job, image: str, claim: str, mount: str, runtime: str) -> list[dict[str, Any]]:
    """Return the ConfigMap and the TrainJob (trainer.kubeflow.org/v1alpha1, since Trainer 2.2)."""
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:50] or "run"  # as Kubernetes allows it
    volumes: list[dict[str, Any]] = [{"name": "recipe", "configMap": {"name": name}}]
    mounts: list[dict[str, Any]] = [{"name": "recipe", "mountPath": CONFIG_MOUNT, "readOnly": True}]
    if claim:
        volumes.insert(0, {"name": "run", "persistentVolumeClaim": {"claimName": claim}})
        mounts.insert(0, {"name": "run", "mountPath": mount})
    pod = {
        "terminationGracePeriodSeconds": STOP_BEFORE_S,  # a pod that is deleted gets SIGTERM, and saves
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    pods = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [pods]}}}
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": job.plan.topology.nnodes,
        "command": ["fsdptrain", "run", f"{CONFIG_MOUNT}/recipe.yaml", *job.overrides],
    }
    if job.gpus_per_node:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(job.gpus_per_node)}}
    spec = {
        "runtimeRef": {"name": runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": "fsdptrain/submit", "trainingRuntimeSpec": patch}],
    }
    recipe = {"recipe.yaml": job.written.text}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": recipe},
        {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": spec},
    ]


def host_commands(job: Job, hosts: Sequence[str]) -> list[str]:
    """Return a command for each host; all of them must be started at about the same time."""
    if len(hosts) != job.plan.topology.nnodes:
        raise RecipeError(f"--hosts: give the {counted(job.plan.topology.nnodes, 'host')} as a,b,c")
    least = job.plan.topology.least_nnodes
    nnodes = f"{least}:{len(hosts)}" if least else str(len(hosts))
    several = [f"launch.nnodes={nnodes}", f"launch.rdzv_endpoint={hosts[0]}:{RENDEZVOUS_PORT}"]
    command = shlex.join(job.command(*(several if len(hosts) > 1 else [])))
    return [f"ssh {host} {shlex.quote(f'cd {shlex.quote(str(Path.cwd()))} && {command}')}" for host in hosts]
