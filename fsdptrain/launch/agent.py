"""The agent process: start the workers, forward stop requests, report how the first worker failed.

It is called with PLAN, PIPE and a key of WORKERS. On one node it sets the environment variables that torchrun sets, but
imports torch and the rest once and forks the workers, which share that memory. They connect over loopback, so no port
is open to the network. On several nodes it calls `torch.distributed.run`, whose threads forbid a fork. In both cases it
forwards SIGTERM as a request to the workers, which save and exit by themselves, however long that takes. It reports how
the first worker failed through a pipe to the launcher, which works on a full disk too. On several nodes it first
reports that they met.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fsdptrain.errors import CheckpointError, FsdptrainError, KernelFailed, RecipeError, WorkerLost, to_record
from fsdptrain.failures.translate import ASSERTION, LOST_PEERS, cause_in, error_of, output_of
from fsdptrain.plan.launchers import find_launcher
from fsdptrain.plan.network import address_of, is_loopback, is_this_machine, local_end, unused_port
from fsdptrain.plan.plan import Plan, read_plan
from fsdptrain.plan.topology import host_of
from fsdptrain.processes import (
    JOIN_SIGNAL,
    STOP_SIGNAL,
    child_arguments,
    die_with_parent,
    import_and_freeze,
    name_process,
)
from fsdptrain.run_folder.files import scratch_folder

# What workers do → the module whose `main` they run.
WORKERS = {"train": "fsdptrain.train.worker", "check": "fsdptrain.validation.node_check"}

FORWARDED = (signal.SIGTERM, signal.SIGALRM)  # a stop request, and the timer that repeats it
POLL_S = 0.1  # between two looks at the workers
TERMINATE_S = 2  # after one worker failed: the time between SIGTERM and SIGKILL for the others


class Failure(NamedTuple):
    """How a worker failed: its exit code (negative: killed by that signal), the file with its error, if any, its id."""

    exitcode: int
    error_file: str
    pid: int


def main() -> None:
    """Run the workers of the plan named on the command line; exit with 1 if one failed."""
    plan_path, pipe, worker = Path(sys.argv[1]), int(sys.argv[2]), WORKERS[sys.argv[3]]
    try:
        plan = read_plan(plan_path)
    except RecipeError as error:
        refuse(pipe, error)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the workers, as what is ignored below
    # Forward a stop request now and every second, because a worker ignores it while it imports. SIGTERM would end the
    # workers at once, without a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0))
    signal.signal(signal.SIGALRM, lambda *_: _signal_workers(STOP_SIGNAL))
    for number in (STOP_SIGNAL, JOIN_SIGNAL):
        signal.signal(number, signal.SIG_IGN)  # must not kill a worker that has no handler yet
    kills = kills_for_memory()
    try:
        with scratch_folder() as scratch:
            if plan.topology.nnodes == 1:
                failures = run_on_this_node(plan, plan_path, worker, scratch)
            else:
                failures = run_torchrun(plan, plan_path, worker, scratch, pipe)
            signal.setitimer(signal.ITIMER_REAL, 0)  # SIGALRM would kill an interpreter that is shutting down
            if failures:
                tell(pipe, first_failure(failures, plan.rundir.rank_log, kills_for_memory() > kills))
                sys.exit(1)
    except (RecipeError, CheckpointError) as error:  # at the meeting place, or of a full disk
        refuse(pipe, error)


def refuse(pipe: int, error: FsdptrainError) -> NoReturn:
    """Exit because the workers cannot be started, and tell the launcher why."""
    tell(pipe, {"rank": 0, "exitcode": error.exit_code, "record": to_record(error)})
    sys.exit(1)


def tell(pipe: int, record: dict[str, object]) -> None:
    """Write a record to the launcher, as one line of JSON."""
    with os.fdopen(pipe, "w", encoding="utf-8", closefd=False) as launcher:
        launcher.write(json.dumps(record) + "\n")


def run_on_this_node(plan: Plan, plan_path: Path, worker: str, scratch: Path) -> dict[int, Failure]:
    """Run one worker per rank until all have ended; if one fails, end the others. Return the failures by rank."""
    import_and_freeze(worker)
    port = unused_port()
    files = {rank: str(scratch / f"error-{rank}.json") for rank in range(plan.topology.world_size)}
    workers = {
        rank: multiprocessing.get_context("fork").Process(
            target=run_worker, args=(worker, plan_path, worker_environment(plan, rank, port, file), os.getpid())
        )
        for rank, file in files.items()
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # a process that is forked must not run the agent's handlers
    for process in workers.values():
        process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while None in (codes := [process.exitcode for process in workers.values()]) and not any(codes):
        time.sleep(POLL_S)
    killed = terminate(list(workers.values()))
    failed = {rank: process for rank, process in workers.items() if process not in killed}
    return {
        rank: Failure(process.exitcode, files[rank], process.pid)
        for rank, process in failed.items()
        if process.exitcode and process.pid
    }


def run_worker(worker: str, plan_path: Path, variables: Mapping[str, str], agent: int) -> None:
    """Run a worker in this process, which the agent has just forked, as if it had been started by itself."""
    die_with_parent(agent)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the pipe to the launcher, which reads until all copies are closed
    os.setsid()
    name_process(f"rank {variables['RANK']}")
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.environ.update(variables)
    sys.argv = [worker, str(plan_path)]
    import_and_freeze(worker).main()


def worker_environment(plan: Plan, rank: int, port: int, error_file: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker on one node, of those that torch or a worker reads."""
    world = str(plan.topology.world_size)
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
        "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip


def terminate(workers: Sequence[ForkProcess]) -> list[ForkProcess]:
    """Send SIGTERM to the workers that still run; kill those that do not end, and return these.

    A process that was stopped does not end, nor does one that takes SIGTERM for a request to save (see
    `train.worker.work`).
    """
    killed = []
    for worker in workers:
        worker.terminate()  # has no effect on a worker that has ended
    deadline = time.monotonic() + TERMINATE_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.exitcode is None:
            worker.kill()
            worker.join()
            killed.append(worker)
    return killed


def run_torchrun(plan: Plan, plan_path: Path, worker: str, scratch: Path, pipe: int) -> dict[int, Failure]:
    """Run this node's workers of a run on several nodes; return the failures by rank.

    When the nodes have met, the launcher gets `{nodes, node, before}`: how many they are, the number of this one, and
    that of the last attempt before. While it waits for others that train, it gets `{others}` every ten minutes, and
    `{refused}` if one of those that it waits for was refused.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as torchrun

    from fsdptrain.parallel.rendezvous import BACKEND, register_rendezvous

    topology, launched = plan.topology, find_launcher(os.environ)
    assert topology.endpoint is not None
    run = {
        "digest": plan.digest(), "name": plan.recipe.name, "output_dir": plan.recipe.output_dir,
        "versions": plan.versions, "host": socket.gethostname(),
    }  # fmt: skip

    def report(record: dict[str, Any]) -> None:
        tell(pipe, record | ({"before": plan.rundir.newest_attempt()} if "nodes" in record else {}))

    register_rendezvous(
        report,
        on_waiting=lambda: _signal_workers(JOIN_SIGNAL),  # again and again: a worker ignores it while it imports
        meeting=topology.source or plan.recipe.name,  # others may come to the same port
        # Plans are compared there, except by `validate --here`, which compares them itself.
        run=json.dumps(run if worker == WORKERS["train"] else {"digest": worker}),
    )
    words = [
        f"--nnodes={topology.least_nnodes or topology.nnodes}:{topology.nnodes}",
        f"--nproc-per-node={topology.nproc_per_node}",
        "--max-restarts=0",  # the launcher restarts, and only after failures that a restart can fix
        "--monitor-interval=0.1",
        "--signals-to-handle=SIGHUP",
        f"--log-dir={scratch}",
        f"--rdzv-backend={BACKEND}",
        f"--rdzv-endpoint={topology.endpoint}",
        f"--rdzv-id={plan.digest() if worker == WORKERS['train'] else worker}",
    ]
    # On plain hosts torchrun compares addresses. That fails under launchers, where a node's name need not be its host
    # name, and on a host that cannot resolve its own name.
    if launched:
        words.append(f"--rdzv-conf=is_host={launched.node == 0}")
    elif address_of(socket.gethostname()) is None and not is_loopback(host := host_of(topology.endpoint)):
        words.append(f"--rdzv-conf=is_host={is_this_machine(host)}")  # several nodes on one machine use loopback
    # Without it the first node gives the others the name that it finds for itself, which may be localhost.
    if end := local_end(parse_rendezvous_endpoint(topology.endpoint, default_port=0)[0]):
        words.append(f"--local-addr={end.address}")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(TERMINATE_S))
    try:
        torchrun(get_args_parser().parse_args([*words, *child_arguments(worker, plan_path)]))
    except ChildFailedError as error:
        return {rank: Failure(each.exitcode, each.error_file, each.pid) for rank, each in error.failures.items()}
    return {}


def kills_for_memory() -> int:
    """Return how many processes the kernel has killed on this machine because memory was full, in any cgroup."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def first_failure(
    failures: Mapping[int, Failure], log_of: Callable[[int], Path], full_memory: bool = False
) -> dict[str, object]:
    """Return the failure that caused the others: `{rank, exitcode, signal, out_of_memory, record}`.

    The worker wrote `record`, or it is made of its log, `log_of(rank)`. `full_memory`: the kernel has killed a process,
    because memory was full.

    A killed worker comes first, because the others fail when it stops answering. Next come workers whose error is not
    that they lost their peers, the earliest first. (torchelastic's times are whole seconds, too coarse to tell a
    "connection closed" from its cause.) SIGABRT is no kill: NCCL's watchdog ends a worker with it for any reason.
    """
    candidates: list[tuple[Any, dict[str, object]]] = []
    for rank, failure in failures.items():
        record = record_of(failure, log_of(rank))
        name = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else None
        killed = name not in (None, "SIGTERM", "SIGABRT")
        report: dict[str, object] = {
            "rank": rank, "exitcode": failure.exitcode, "signal": name, "record": record or None,
            "out_of_memory": full_memory and name == "SIGKILL",
        }  # fmt: skip
        lost = record.get("type") == WorkerLost.__name__
        unknown = not record and name != "SIGABRT"
        # Without a record, an abort may be the cause of lost peers, but hardly of other errors.
        candidates.append(((not killed, unknown, lost, not record, record.get("at", 0.0), rank), report))
    return min(candidates, key=lambda each: each[0])[1]


def record_of(failure: Failure, log: Path) -> dict[str, Any]:
    """Return the error that a worker has recorded, or that the end of its log tells; {} if there is neither."""
    path = Path(failure.error_file)
    record: dict[str, Any] = {}
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]
    kind = record.get("type")
    if kind == KernelFailed.__name__:  # its exception does not have what the GPU has printed
        assertion = next(filter(ASSERTION.search, output_of(log, failure.pid).splitlines()), "")
        return record | {"message": f"{record['message']}\n{assertion.strip()}".rstrip()}
    if failure.exitcode == -signal.SIGABRT and kind in (None, WorkerLost.__name__):
        text = output_of(log, failure.pid)
        cause = cause_in(text)
        if cause is LOST_PEERS:  # those whose failure it has noticed have recorded theirs before
            return record or {**to_record(error_of(cause, text)), "at": time.time()}
        if cause:
            return {**record, **to_record(error_of(cause, text)), "at": 0.0}
    return record


def _signal_workers(number: signal.Signals) -> None:
    me = os.getpid()
    for child in Path(f"/proc/{me}/task/{me}/children").read_text(encoding="utf-8").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), number)
