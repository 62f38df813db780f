"""The torchrun agent, in its own process: starts the workers, passes a stop on, writes down how the first one failed.

`python -m fsdptrain.agent PLAN PIPE` is `torch.distributed.run` with three differences. Its rendezvous on one node is a
file, and the workers meet on loopback, so that no port is open to the network. SIGTERM becomes a wish to the workers,
who save and leave by themselves, however long that takes. And how the first worker failed goes into a pipe to the
launcher, which needs no disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import run as torchrun

from fsdptrain.errors import WorkerLost
from fsdptrain.launch import STOP_WORKER, die_with_parent
from fsdptrain.plan import Plan


def main() -> None:
    """Run the workers of the plan named on the command line; exit 1 when one failed."""
    die_with_parent()
    plan_path, pipe = Path(sys.argv[1]), int(sys.argv[2])
    plan = Plan.from_json(plan_path.read_text())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _start_passing_on)
    signal.signal(signal.SIGALRM, _pass_on)
    signal.signal(STOP_WORKER, signal.SIG_IGN)  # inherited: a worker that is still importing must not die of it
    if plan.topology.nnodes == 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # it would listen on every interface
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder: what a hang is explained with
    with tempfile.TemporaryDirectory(prefix="fsdptrain-") as scratch:
        try:
            words = [*torchrun_words(plan, Path(scratch)), "fsdptrain.worker", str(plan_path)]
            torchrun(get_args_parser().parse_args(words))
        except ChildFailedError as error:
            os.write(pipe, json.dumps(first_failure(error)).encode())
            sys.exit(1)


def torchrun_words(plan: Plan, scratch: Path) -> list[str]:
    """torchrun's command line for this plan, up to the module to run."""
    topology, launch = plan.topology, plan.recipe.launch
    words = [
        f"--nnodes={topology.nnodes}",
        f"--nproc-per-node={topology.nproc_per_node}",
        "--max-restarts=0",  # restarts are the launcher's: it knows which failures a restart can mend
        "--monitor-interval=0.1",
        "--signals-to-handle=SIGHUP",
        f"--log-dir={scratch}",
        "--rdzv-backend=c10d",
    ]
    if topology.nnodes == 1:
        meeting = [f"--rdzv-endpoint={scratch / 'rendezvous'}", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
    else:
        meeting = [f"--rdzv-endpoint={launch.rdzv_endpoint}", f"--rdzv-id={plan.recipe.name}"]
    return [*words, *meeting, "-m"]


def first_failure(error: ChildFailedError) -> dict[str, object]:
    """Who failed first, and how: `{rank, exitcode, signal, record}`; `record` is what the worker itself wrote.

    A worker that was killed comes first, for the others fail of its silence; then one that did not lose its peers, and
    the earliest record. (torchelastic's own times are whole seconds, in which a peer's "connection closed" easily ties
    with its cause.)
    """
    failures = []
    for rank, failure in error.failures.items():
        path = Path(failure.error_file)
        record = json.loads(path.read_text())["message"]["extraInfo"] if path.is_file() else {}
        name = failure.signal_name() if failure.exitcode < 0 else None
        killed = name not in (None, "SIGTERM")
        facts = {"rank": rank, "exitcode": failure.exitcode, "signal": name, "record": record or None}
        lost = record.get("type") == WorkerLost.__name__
        failures.append(((not killed, not record, lost, record.get("at", 0.0), rank), facts))
    return min(failures, key=lambda found: found[0])[1]


def _start_passing_on(number: int, frame: FrameType | None) -> None:
    """Pass the wish to stop on every second, until every worker has heard it and left."""
    signal.setitimer(signal.ITIMER_REAL, 0.01, 1.0)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Ask every worker to stop. SIGTERM itself is what torchrun kills the others with once one has failed."""
    me = os.getpid()
    for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), STOP_WORKER)


if __name__ == "__main__":
    main()
