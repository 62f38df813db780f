"""A run as a job: the batch script for Slurm, the manifest for Kubeflow Trainer, the command for each of plain hosts.

Slurm's stop signal goes to the script alone, which passes it on through `srun` and notes that the time is over. Then,
and after a preemption, it requeues the job. A job that `scancel` ends must not come back.

    Slurm ── SIGUSR1, before the time limit ──> script ──> srun ──> every process of the step: checkpoint, exit code 75
    Slurm ── SIGTERM, when it preempts the job ───────────────────> every process of the step: checkpoint, exit code 75
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptrain.config.hardware import HardwareChoice
from fsdptrain.config.launchers import Launched
from fsdptrain.config.paths import expanded, is_hub_data
from fsdptrain.config.paths import places as data_places
from fsdptrain.config.plan import Plan, draft_plan
from fsdptrain.config.reader import LoadedRecipe
from fsdptrain.config.schema import node_range
from fsdptrain.config.syntax import yaml_documents
from fsdptrain.config.topology import check_agreement, topology_of_job
from fsdptrain.errors import Problem, RecipeError, Stopped
from fsdptrain.launch.claim import check_run_dir
from fsdptrain.launch.sbatch import check_times, directives, parse_options, take_stop_signal
from fsdptrain.ownership import write_mark
from fsdptrain.rundir import MARK
from fsdptrain.storage import URL
from fsdptrain.text import counted

KINDS = ("slurm", "k8s", "hosts")


KIND_OF = {  # options of `submit` that only one kind of job has
    "--sbatch": "slurm", "--time": "slurm", "--partition": "slurm", "--account": "slurm",
    "--image": "k8s", "--volume": "k8s", "--runtime": "k8s", "--hosts": "hosts",
}  # fmt: skip


SHORTEST_S = 30  # a job that lived shorter is not requeued


WHOLE_NODES = {"--exclusive": "", "--mem": "0"}  # all cores and memory: without an option, a task has one core


RENDEZVOUS_PORT = 29500  # of plain hosts


HOST = re.compile(r"(?:[^\s@:-][^\s@:]*@)?([^\s@:-][^\s@:]*)")  # [USER@]ADDRESS


CONFIG_MOUNT = "/etc/fsdptrain"  # where a pod finds the recipe


POD_STOP_S = 300  # at least so long a pod may take to stop; with launch.grace_s a minute more than that


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


def check_kind(on: str, options: Mapping[str, str | Sequence[str] | None]) -> None:
    """Raise RecipeError for an unknown kind of job, for empty options, and for those of another kind.

    `options` are values of options in KIND_OF; None if they are not given.
    """
    if on not in KINDS:
        raise RecipeError(f"--on: {on!r} is not one of {', '.join(KINDS)}")
    problems = []
    for name, value in options.items():
        text = value if isinstance(value, str) else " ".join(value or ())
        if value is not None and KIND_OF[name] != on:
            ways_out = f"remove it, or use --on {KIND_OF[name]}"
            problems.append(Problem(f"{text} has no effect with --on {on}: {ways_out}", name))
        elif value is not None and not text:
            problems.append(Problem("is empty: give a value, or remove it", name))
    if problems:
        raise RecipeError(problems)


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


def prepare_job(
    recipe: str, written: LoadedRecipe, overrides: Sequence[str], on: str, nodes: int | None, gpus: int
) -> Job:
    """Return the job of a recipe on `nodes` nodes (None: `launch.nnodes`) with so many GPUs each.

    Raises RecipeError for keys that contradict the job, and for what `run` would refuse before it starts workers.
    """
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
    shares_nodes = options.keys() & {"--cpus-per-task", "-c"}
    own = {
        "--job-name": job.name,
        "--nodes": str(job.plan.topology.nnodes),
        "--ntasks-per-node": "1",  # fsdptrain starts the workers of a node
        **({"--gpus-per-node": str(job.gpus_per_node)} if job.gpus_per_node else {}),
        **({} if shares_nodes else WHOLE_NODES),
        "--output": str(job.logs).replace("%", "%%") + "/slurm-%j.log",
        "--open-mode": "append",
        "--requeue": "",
        "--signal": f"B:USR1@{stop_before_s}",
    }
    named = {"--time": limit, "--partition": partition, "--account": account}
    lines = directives(own | {name: value for name, value in named.items() if value is not None} | options)
    script = SCRIPT.format(command=shlex.join(job.command()), stopped=Stopped.exit_code, shortest_s=SHORTEST_S)
    return "\n".join(["#!/bin/bash", *lines, script])


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

# The step of a preempted job gets SIGTERM, as with scancel. In the record of the job they differ; SIGNALING is RUNNING.
is_preempted() {{
  scontrol show job --oneliner "$SLURM_JOB_ID" | grep -qE ' JobState=(RUNNING|SIGNALING) .* PreemptTime=[0-9]'
}}

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
    run, new = job.logs.parent, []
    if job.plan.rundir.url is None:
        new = [path for path in (job.logs, run / MARK, run, *run.parents) if not path.exists()]
        run.mkdir(parents=True, exist_ok=True)
        write_mark(run)
        job.logs.mkdir(exist_ok=True)
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        with contextlib.suppress(OSError):  # a folder that another process has written to meanwhile stays
            for path in new:
                path.rmdir() if path.is_dir() else path.unlink()
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
    written = [(key, path) for key, path in places.items() if path]
    if not is_hub_data(job.plan.data_path):
        written += [("data.path", path) for path in data_places(recipe.data.path)]
    way_out = f"give a path below {mount}" if mount else "add --volume CLAIM:/PATH"
    outside = [
        Problem(f"{path} is not on the volume: {way_out}", key)
        for key, path in written
        if not URL.match(path) and not (mount and Path(path).is_relative_to(mount))
    ]
    if outside:
        raise RecipeError(outside)
    return yaml_documents(train_job(job, image, claim, mount, runtime))


def kubernetes_name(name: str, nnodes: int) -> str:
    """Return the name of a run as a DNS label that starts with a letter (RFC 1035), as Kubeflow requires it.

    Its length leaves room for what JobSet appends for the last pod: its webhook requires at most 63 characters in all.
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = words if words[:1].isalpha() else f"run-{words}"
    return label[: 63 - len(f"-node-0-{nnodes - 1}-abcde")].strip("-")


def train_job(job: Job, image: str, claim: str, mount: str, runtime: str) -> list[dict[str, Any]]:
    """Return the ConfigMap and the TrainJob (trainer.kubeflow.org/v1alpha1, since Trainer 2.2)."""
    name = kubernetes_name(job.name, job.plan.topology.nnodes)
    volumes: list[dict[str, Any]] = [{"name": "recipe", "configMap": {"name": name}}]
    mounts: list[dict[str, Any]] = [{"name": "recipe", "mountPath": CONFIG_MOUNT, "readOnly": True}]
    if claim:
        volumes.insert(0, {"name": "run", "persistentVolumeClaim": {"claimName": claim}})
        mounts.insert(0, {"name": "run", "mountPath": mount})
    pod = {
        # A pod that is deleted gets SIGTERM, and saves.
        "terminationGracePeriodSeconds": max(POD_STOP_S, (job.plan.recipe.launch.grace_s or 0) + 60),
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


def host_names(text: str) -> list[str]:
    """Return the hosts of `a, user@b`. Raises RecipeError for what is no host, and for one that is named twice."""
    hosts = [name.strip() for name in text.split(",")]
    problems = [
        Problem(f"{host!r} in {text!r} is not the name of a host: write a,b or user@a,user@b", "--hosts")
        for host in hosts
        if not HOST.fullmatch(host)
    ]
    if problems:
        raise RecipeError(problems)
    addresses = [_address(host) for host in hosts]
    if twice := {address: None for address in addresses if addresses.count(address) > 1}:
        raise RecipeError(f"--hosts: {', '.join(twice)} is named twice: each host is one node, with all of its workers")
    return hosts


def _address(host: str) -> str:
    return host.rpartition("@")[2]


def host_commands(job: Job, hosts: Sequence[str]) -> list[str]:
    """Return a command for each host; all of them must be started at about the same time."""
    nodes = job.plan.topology.nnodes
    if len(hosts) != nodes:
        example = ",".join("abc"[:nodes]) + (",…" if nodes > 3 else "")
        raise RecipeError(
            f"--hosts names {counted(len(hosts), 'host')}, but the job has {counted(nodes, 'node')}: --hosts {example}"
        )
    least = job.plan.topology.least_nnodes
    nnodes = f"{least}:{nodes}" if least else str(nodes)
    several = [f"launch.nnodes={nnodes}", f"launch.rdzv_endpoint={_address(hosts[0])}:{RENDEZVOUS_PORT}"]
    command = shlex.join(job.command(*(several if nodes > 1 else [])))
    there = shlex.quote(f"cd {shlex.quote(str(Path.cwd()))} && {command}")
    return [f"ssh {shlex.quote(host)} {there}" for host in hosts]
