"""A private Slurm on two hosts (`hosts.py`), with a munge of its own; nothing outlives it.

The first host also is that of the controller, and the one on which users sit.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hosts
from support import environment, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")

GRACE_S = 120  # for a preempted job of the partition `grace`; those of `all` have none

CONFIG = """
ClusterName=private
SlurmctldHost={first.name}({first.address})
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
JobRequeue=1
NodeName={first.name} NodeAddr={first.address} CPUs=2
NodeName={second.name} NodeAddr={second.address} CPUs=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=grace Nodes=ALL MaxTime=INFINITE State=UP GraceTime={grace_s}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """A running Slurm; commands are called on its first host."""

    def __init__(self, folder: Path, nodes: list[hosts.Host]) -> None:
        self.nodes, self._conf = nodes, str(folder / "slurm.conf")

    def run(self, *words: object, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command; return how it ended."""
        env = environment(SLURM_CONF=self._conf, **extra)
        command = [*self.nodes[0].prefix, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)

    def call(self, *words: object, **extra: str) -> str:
        """Run a command that must succeed; return what it printed."""
        done = self.run(*words, **extra)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, recipe: Path, *words: object, **extra: str) -> str:
        """Submit a recipe as a user does, for two nodes; return the number of the job."""
        size = ("--nodes", 2, "--gpus-per-node", 0)
        said = self.call(sys.executable, "-m", "fsdptrain", "submit", recipe, *size, *words, **extra)
        return re.findall(r"Slurm job (\d+)", said)[0]

    def show(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))

    def wait(self, job: str, *values: str, key: str = "JobState", timeout: float = 900) -> dict[str, str]:
        """Wait until a field of a job, by default its state, has one of these values; return what `show` returns."""
        end = time.monotonic() + timeout
        while (shown := self.show(job))[key] not in values:
            assert time.monotonic() < end, f"{key} of job {job} is {shown[key]}, not {' or '.join(values)}"
            time.sleep(0.5)
        return shown


def missing() -> str:
    """Return why no private Slurm can run here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed: make cluster" if absent else hosts.missing()


@contextlib.contextmanager
def private_slurm(folder: Path) -> Iterator[Slurm]:
    """Start a Slurm of two nodes in this folder; stop it, with everything that runs in it, at the end."""
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(hosts.switched_hosts(folder, 2))
        for name in ("munge", "state", *(f"spool-{node.name}" for node in nodes)):
            (folder / name).mkdir(mode=0o755)
        (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
        (folder / "munge" / "key").chmod(0o400)
        text = CONFIG.format(folder=folder, first=nodes[0], second=nodes[1], grace_s=GRACE_S)
        (folder / "slurm.conf").write_text(text)
        munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        slurm = Slurm(folder, nodes)

        def start(name: str, *words: str, on: hosts.Host = nodes[0]) -> None:
            log = stack.enter_context((folder / f"{name}.out").open("w"))
            env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
            process = subprocess.Popen([*on.prefix, *words], stdout=log, stderr=log, env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)

        start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge)
        wait_until((folder / "munge" / "socket").exists, f"munge did not start: see {folder}")
        start("slurmctld", "slurmctld", "-D")
        for node in nodes:
            start(node.name, "slurmd", "-D", "-N", node.name, on=node)
        idle = lambda: slurm.run("sinfo", "--noheader", "--format=%T").stdout.split() == ["idle"]  # noqa: E731
        wait_until(idle, f"Slurm did not start: see the logs in {folder}")
        yield slurm
