"""The agent, in its own process: starts the workers, passes a stop on, writes down how the first one failed.

Called with PLAN and PIPE, it does on one node what torchrun does, with the environment that torchrun gives, and
without importing torch: the workers start a second or two earlier. They meet on loopback, so that no port is open to
the network. On several nodes it is `torch.distributed.run`. In both cases SIGTERM becomes a wish to the workers, who
save and leave by themselves, however long that takes; and how the first worker failed goes into a pipe to the launcher,
which needs no disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from fsdptrain.config.plan import Plan, read_plan
from fsdptrain.errors import RecipeError, WorkerLost, to_record
from fsdptrain.launch.launcher import POLL_S
from fsdptrain.processes import STOP_SIGNAL, child_arguments, child_command

# On a CPU tensors come from malloc, which by itself gives large ones back to the system as soon as they are freed, so
# that every step waits for the same pages again. Told so, it keeps what it has, and asks for huge pages.
KEEP_MEMORY = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=67108864:glibc.malloc.trim_threshold=8589934592"


LEAVE_S = 2  # seconds that the others may take to end once one has failed: no SIGTERM is heard by one that is stopped


WORKER = "fsdptrain.train.worker"


class Failure(NamedTuple):
    """How a worker ended: its exit code (negative: killed by that signal), and where it may have written why."""

    exitcode: int
    error_file: str


def main() -> None:
    """Run the workers of the plan named on the command line; exit 1 when one failed."""
    plan_path, pipe = Path(sys.argv[1]), int(sys.argv[2])
    try:
        plan = read_plan(plan_path)
    except RecipeError as error:
        os.write(pipe, json.dumps({"rank": 0, "exitcode": error.exit_code, "record": to_record(error)}).encode())
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _start_passing_on)
    signal.signal(signal.SIGALRM, _pass_on)
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # inherited: a worker that is still importing must not die of it
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)
    if plan.topology.device == "cpu":
        os.environ.setdefault("GLIBC_TUNABLES", KEEP_MEMORY)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder: what a hang is explained with
    with tempfile.TemporaryDirectory(prefix="fsdptrain-") as scratch:
        run = run_here if plan.topology.nnodes == 1 else run_torchrun
        failures = run(plan, plan_path, Path(scratch))
        if failures:
            with os.fdopen(pipe, "w", encoding="utf-8") as launcher:
                json.dump(first_failure(failures), launcher)
            sys.exit(1)


def run_here(plan: Plan, plan_path: Path, scratch: Path) -> dict[int, Failure]:
    """One worker a rank, until all have ended or one has failed, which ends the others; the failures by rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    words = child_command(WORKER, plan_path)
    files = {rank: str(scratch / f"error-{rank}.json") for rank in range(plan.topology.world_size)}
    workers = {
        rank: subprocess.Popen(
            words, env={**os.environ, **worker_environment(plan, rank, port, file)}, start_new_session=True
        )
        for rank, file in files.items()
    }
    while None in (codes := [worker.poll() for worker in workers.values()]) and not any(codes):
        time.sleep(POLL_S)
    end(list(workers.values()))
    return {rank: Failure(code, files[rank]) for rank, worker in workers.items() if (code := worker.returncode)}


def worker_environment(plan: Plan, rank: int, port: int, error_file: str) -> dict[str, str]:
    """What torchrun tells a worker on one node."""
    world = str(plan.topology.world_size)
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0"}
    sizes = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "GROUP_WORLD_SIZE": "1"}
    return {
        **ranks,
        **sizes,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def end(workers: list[subprocess.Popen[bytes]]) -> None:
    """Ask the workers that still run to end, and kill those that do not (a stopped process hears no SIGTERM)."""
    for worker in workers:
        worker.terminate()  # does nothing to one that has ended
    until = time.monotonic() + LEAVE_S
    for worker in workers:
        try:
            worker.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


def run_torchrun(plan: Plan, plan_path: Path, scratch: Path) -> dict[int, Failure]:
    """This node's part of a run on several nodes; the failures by rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as torchrun

    topology, launch = plan.topology, plan.recipe.launch
    words = [
        f"--nnodes={topology.nnodes}",
        f"--nproc-per-node={topology.nproc_per_node}",
        "--max-restarts=0",  # restarts are the launcher's: it knows which failures a restart can mend
        "--monitor-interval=0.1",
        "--signals-to-handle=SIGHUP",
        f"--log-dir={scratch}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.rdzv_endpoint}",
        f"--rdzv-id={plan.recipe.name}",
    ]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(LEAVE_S))
    try:
        torchrun(get_args_parser().parse_args([*words, *child_arguments(WORKER, plan_path)]))
    except ChildFailedError as error:
        return {rank: Failure(each.exitcode, each.error_file) for rank, each in error.failures.items()}
    return {}


def first_failure(failures: dict[int, Failure]) -> dict[str, object]:
    """Who failed first, and how: `{rank, exitcode, signal, record}`; `record` is what the worker itself wrote.

    A worker that was killed comes first, for the others fail of its silence; then one that did not lose its peers, and
    the earliest record. (torchelastic's own times are whole seconds, in which a peer's "connection closed" easily ties
    with its cause.)
    """
    found = []
    for rank, failure in failures.items():
        path = Path(failure.error_file)
        record = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"] if path.is_file() else {}
        name = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else None
        killed = name not in (None, "SIGTERM")
        facts = {"rank": rank, "exitcode": failure.exitcode, "signal": name, "record": record or None}
        lost = record.get("type") == WorkerLost.__name__
        found.append(((not killed, not record, lost, record.get("at", 0.0), rank), facts))
    return min(found, key=lambda each: each[0])[1]


def _start_passing_on(number: int, frame: FrameType | None) -> None:
    """Pass the wish to stop on every second, until every worker has heard it and left."""
    signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Ask every worker to stop. SIGTERM itself ends the others once one has failed."""
    me = os.getpid()
    for child in Path(f"/proc/{me}/task/{me}/children").read_text(encoding="utf-8").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), STOP_SIGNAL)
