"""A private Slurm of two nodes on this machine: its own munge, ports and folders; nothing outlives it.

Each node has its own process and mount namespace and its own host name, and both share the network of the machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support import fsdptrain

NODES = ("node-0", "node-1")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare")

GRACE_S = 120  # for a preempted job of the partition `grace`; those of `all` have none

CONFIG = """
ClusterName=private
SlurmctldHost=node-0(127.0.0.1)
SlurmctldPort={controller}
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
NodeName=node-0 NodeHostname=node-0 NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=node-1 NodeHostname=node-1 NodeAddr=127.0.0.1 Port={second} CPUs=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=grace Nodes=ALL MaxTime=INFINITE State=UP GraceTime={grace_s}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """A running Slurm; `environment` makes its commands find it."""

    def __init__(self, folder: Path) -> None:
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: object) -> str:
        """Run one of Slurm's commands; return what it printed."""
        env = os.environ | self.environment
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=env, timeout=300, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, recipe: Path, *words: object, **extra: str) -> str:
        """Submit a recipe as a user does, for two nodes; return the number of the job."""
        size = ("--nodes", 2, "--gpus-per-node", 0)
        done = fsdptrain("submit", recipe, *size, *words, **self.environment, **extra)
        assert done.returncode == 0, done.stderr
        return re.findall(r"Slurm job (\d+)", done.stdout)[0]

    def facts(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))

    def wait(self, job: str, *values: str, key: str = "JobState", timeout: float = 900) -> dict[str, str]:
        """Wait until a fact about a job, by default its state, has one of these values; return all facts."""
        end = time.monotonic() + timeout
        while (facts := self.facts(job))[key] not in values:
            assert time.monotonic() < end, f"{key} of job {job} is {facts[key]}, not {' or '.join(values)}"
            time.sleep(0.5)
        return facts


def missing() -> str:
    """Return why no private Slurm can run here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: make cluster"
    return "" if os.getuid() == 0 else "only root can create namespaces"


@contextlib.contextmanager
def private_slurm(folder: Path) -> Iterator[Slurm]:
    """Start a Slurm of two nodes in this folder; stop it, with everything that runs in it, at the end."""
    for name in ("munge", "state", "spool-node-0", "spool-node-1"):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (folder / "munge" / "key").chmod(0o400)
    controller, first, second = free_ports(3)
    text = CONFIG.format(folder=folder, controller=controller, first=first, second=second, grace_s=GRACE_S)
    (folder / "slurm.conf").write_text(text)
    hosts = Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n"
    (folder / "hosts").write_text(hosts)
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    slurm = Slurm(folder)
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str, inside: str = NODES[0]) -> None:
            unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts"]
            script = f'hostname {inside}; mount --bind {folder}/hosts /etc/hosts; exec "$@"'
            log = stack.enter_context((folder / f"{name}.out").open("w"))
            env = os.environ | slurm.environment
            process = subprocess.Popen([*unshare, "sh", "-ec", script, "sh", *words], stdout=log, stderr=log, env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)

        start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge)
        wait_for((folder / "munge" / "socket").exists)
        start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            start(node, "slurmd", "-D", "-N", node, inside=node)
        wait_for(lambda: subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True, env=os.environ | slurm.environment,
            check=False,
        ).stdout.split() == ["idle"])  # fmt: skip
        yield slurm


def wait_for(condition: object, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "Slurm did not start: see the logs in its folder"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
