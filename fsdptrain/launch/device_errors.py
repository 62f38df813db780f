"""What the texts of CUDA, cuBLAS and NCCL, in an exception or in a rank's log, say about the cause of a failure.

NCCL's watchdog is a thread that finds the errors of its GPU, too, and ends the process with SIGABRT, often before
Python reports (`ProcessGroupNCCL::Watchdog::run` in torch's ProcessGroupNCCL.cpp rethrows them). Then the rank's log is
all that is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fsdptrain.errors import KernelFailed, OutOfMemory, StorageError, Unreadable, WorkerError, WorkerLost, shortened
from fsdptrain.plan.driver import build_words
from fsdptrain.plan.limits import SHM_WAY_OUT
from fsdptrain.run_folder.files import NOTHING_THERE
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
