"""Convert any exception to an FsdptrainError, and report why a rank failed where the launcher looks for it.

The texts of CUDA, cuBLAS and NCCL, in an exception or in a rank's log, tell the cause of a failure. NCCL's watchdog is
a thread that finds the errors of its GPU, too, and ends the process with SIGABRT, often before Python reports
(`ProcessGroupNCCL::Watchdog::run` in torch's ProcessGroupNCCL.cpp rethrows them). Then the rank's log is all that is
left, which the launcher reads: so this module imports torch only where an exception is one of torch's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from fsdptrain.errors import (
    MAX_MESSAGE_CHARS,
    FolderLost,
    FsdptrainError,
    KernelFailed,
    OutOfMemory,
    StorageError,
    Unreadable,
    WorkerError,
    WorkerLost,
    disk_full_error,
    is_disk_full,
    own_frame,
    shortened,
    to_record,
)
from fsdptrain.plan.gpus import build_words
from fsdptrain.plan.limits import SHM_WAY_OUT
from fsdptrain.plan.network import is_loopback
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import record_error
from fsdptrain.run_folder.files import NOTHING_THERE, write_atomically
from fsdptrain.run_folder.records import open_regular

TAIL_BYTES = 2**18  # of a log that are searched: the frames of C++ in an abort of NCCL's watchdog have some 10 KiB
LINE_CHARS = 300
WATCHDOG_SAYS = "watchdog thread terminated with exception: "
ASSERTION = re.compile(r"block: \[.*\], thread: \[.*\],? Assertion")  # printed by the GPU, once for each thread


class Cause(NamedTuple):
    """A cause of failures: its class, the texts that tell it, and what a message says of it, also of this machine."""

    error: type[WorkerError]
    texts: re.Pattern[str]
    says: str
    says_here: Callable[[], str] = lambda: ""


LOST_PEERS = Cause(
    WorkerLost,
    re.compile(
        r"Watchdog caught collective operation timeout|remote process exited or there was a network error"
        r"|ncclRemoteError|ncclSystemError|watchdog got stuck"
    ),
    "NCCL lost the connection to another rank, or waited too long for one",
)
CAUSES = (  # what causes others first: all of these may stand in one log
    Cause(
        KernelFailed,
        re.compile(
            r"device-side assert triggered|an illegal memory access was encountered|misaligned address"
            r"|an illegal instruction was encountered|invalid program counter"
        ),
        "a kernel failed on the GPU; with CUDA_LAUNCH_BLOCKING=1 the traceback shows which",
    ),
    Cause(
        OutOfMemory,
        re.compile(
            r"CUDA out of memory|CUDA (driver )?error: out of memory|CUDA\]: out of memory"
            r"|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|Cuda failure (2 )?'out of memory'"
            r"|Failed to CUDA (calloc|malloc)"  # in NCCL's src/include/alloc.h
        ),
        "out of memory",
    ),
    Cause(
        WorkerLost,
        re.compile(
            r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus|unspecified launch failure"
            r"|hardware stack error|CUDA error: unknown error|Cuda failure 999"
        ),
        "the GPU failed: look for Xid in dmesg on its host",
    ),
    Cause(
        WorkerError,
        re.compile(
            r"no kernel image is available|invalid device function|device kernel image is invalid"
            r"|compiled with an unsupported toolchain|CUDA driver version is insufficient"
        ),
        "this build of torch does not fit the card or its driver: ",
        build_words,
    ),
    Cause(
        WorkerError,
        re.compile(r"invalid device ordinal|Duplicate GPU detected"),
        "two workers use one GPU, or one uses a GPU that is not there: set CUDA_VISIBLE_DEVICES to as many GPUs as "
        "launch.nproc_per_node, and start the command once on each node",
    ),
    Cause(
        WorkerError,
        re.compile(r"/dev/shm/nccl-.*No space left on device|creating shared memory segment|failed to extend /dev/shm"),
        f"/dev/shm is full: {SHM_WAY_OUT}, and remove /dev/shm/nccl-* that killed runs have left",
    ),
    Cause(
        WorkerError,
        re.compile(
            r"(CUDA (driver )?error|Cuda failure( \d+)?)\b.*\binvalid (argument|configuration argument)"
            r"|ncclInvalid(Argument|Usage)"
        ),
        "CUDA or NCCL rejects how it is called, in this version or on this machine",
    ),
    LOST_PEERS,
)


def cause_in(text: str) -> Cause | None:
    """Return the cause that a text tells; None if it tells none of CAUSES."""
    return next((cause for cause in CAUSES if cause.texts.search(text)), None)


def quoted(text: str, cause: Cause) -> str:
    """Return the lines of a text that tell a cause: the first assertion of a kernel, and the first of its `texts`."""
    lines = [line.rpartition(WATCHDOG_SAYS)[2].strip() for line in text.splitlines()]
    first = [next((line for line in lines if each.search(line)), "") for each in (ASSERTION, cause.texts)]
    return "\n".join(shortened(line, LINE_CHARS) for line in first if line)


def error_of(cause: Cause, text: str) -> WorkerError:
    """Return the error of a rank whose exception or log is `text`."""
    return cause.error(f"{cause.says}{cause.says_here()}: {quoted(text, cause)}")


def output_of(log: Path, pid: int) -> str:
    """Return the end of what a worker with this process id has printed to its log; "" if that cannot be read."""
    try:
        with open_regular(log) as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            tail = stream.read()
    except (*NOTHING_THERE, Unreadable, StorageError, OSError):
        return ""
    _, begins, own = tail.rpartition(first_line_of(pid))
    return own.decode(errors="replace") if begins or len(tail) == TAIL_BYTES else ""


def first_line_of(pid: int) -> bytes:
    """Return the line with which a worker begins its output, in a log that has the output of earlier attempts."""
    return f"fsdptrain: process {pid}\n".encode()


def as_fsdptrain_error(error: BaseException) -> FsdptrainError:
    """Convert any exception to an FsdptrainError.

    A full disk becomes a CheckpointError, a device without memory an OutOfMemory, a kernel's failure a KernelFailed, a
    lost connection or device a WorkerLost, anything else a WorkerError, as CAUSES tells.
    """
    if isinstance(error, FsdptrainError):
        return error
    import torch
    import torch.distributed as dist

    message = f"{type(error).__name__}: {error}"
    if is_disk_full(error):
        return disk_full_error(error)
    if isinstance(error, torch.OutOfMemoryError):
        request = str(error).partition(" If reserved but unallocated")[0]  # without torch's own advice
        return OutOfMemory(f"out of memory in {_moment_of(error)}: {request}")
    if "gloo/transport" in str(error):
        # With the address at the other end of the connection, and what may have happened there.
        peer = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", message)
        if peer is None or is_loopback(peer[1]):
            return WorkerLost(message)
        return WorkerLost(
            f"lost the connection to {peer[1]}: see the output of the command on that host, which may have failed "
            "first; if it was killed there, or host or network failed, run the same command on all hosts to resume\n"
            f"{message}"
        )
    cause = cause_in(message)
    if cause and cause.error is OutOfMemory:  # of cuBLAS or NCCL, which allocate by themselves
        return OutOfMemory(f"out of memory in {_moment_of(error)}: {quoted(message, cause)}")
    if cause and cause is not LOST_PEERS:
        return error_of(cause, message)
    # What no restart fixes has its cause above. Another error of a device or connection may not come back in new
    # processes: a restart in vain costs minutes, as launch.max_restarts limits them, and giving up perhaps a night.
    if isinstance(error, (dist.DistError, torch.AcceleratorError)):
        return WorkerLost(message)
    return WorkerError(message)


def _moment_of(error: BaseException) -> str:
    """Return what a rank was doing when it failed: the forward of a unit, the backward, the update, or a function."""
    from torch.distributed.fsdp import FSDPModule

    from fsdptrain.parallel.patches import ISSUED, unit_name

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    functions = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames}
    if ("fsdptrain.train.step", "update") in functions:
        return "the optimizer's update"
    if ("torch._tensor", "backward") in functions:  # on a GPU its frames are on threads of autograd
        return "the backward" + (f", after the {ISSUED[-1].kind} of {ISSUED[-1].unit}" if ISSUED else "")
    for frame in reversed(frames):
        if isinstance(unit := frame.f_locals.get("self"), FSDPModule):
            return f"the forward of {unit_name(unit)}"
    return own_frame((f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in reversed(frames)) or "a thread"


def exit_from_thread(plan: Plan, error: FsdptrainError) -> NoReturn:
    """Report an error that a background thread has found, and end the process."""
    with contextlib.suppress(OSError):
        record_failure(plan, error)
    os._exit(error.exit_code)


def record_failure(plan: Plan, error: FsdptrainError) -> None:
    """Write the error to torchrun's error file, and as an `error` event to the metrics unless their folder is lost."""
    with contextlib.suppress(OSError):  # the disk of temporary files may be full, and that of the run folder not
        write_error_file(error)
    if not isinstance(error, FolderLost):
        record_error(plan.rundir, error, rank=int(os.environ["RANK"]))


def write_error_file(error: FsdptrainError) -> None:
    """Write the error and the current traceback to torchrun's error file, if there is one.

    The write is atomic: the agent may kill this process at any moment, and torchrun raises when the file is incomplete.
    """
    fields, stack, now = to_record(error), shortened(traceback.format_exc(), MAX_MESSAGE_CHARS), time.time()
    record = {"py_callstack": stack, "timestamp": str(int(now)), **fields, "traceback": stack, "at": now}
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        write_atomically(Path(path), json.dumps({"message": {"message": fields["message"], "extraInfo": record}}))
