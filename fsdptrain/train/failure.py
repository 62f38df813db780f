"""Report why a rank failed where the launcher looks for it, and end the process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fsdptrain.errors import (
    MAX_MESSAGE_CHARS,
    FolderLost,
    FsdptrainError,
    OutOfMemory,
    WorkerError,
    WorkerLost,
    disk_full_error,
    is_disk_full,
    own_frame,
    shortened,
    to_record,
)
from fsdptrain.launch.device_errors import LOST_PEERS, cause_in, error_of, quoted
from fsdptrain.parallel.patches import ISSUED, unit_name
from fsdptrain.plan.network import is_loopback
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import record_error
from fsdptrain.run_folder.files import write_atomically


def as_fsdptrain_error(error: BaseException) -> FsdptrainError:
    """Convert any exception to an FsdptrainError.

    A full disk becomes a CheckpointError, a device without memory an OutOfMemory, a kernel's failure a KernelFailed, a
    lost connection or device a WorkerLost, anything else a WorkerError, as `device_errors.CAUSES` tells.
    """
    if isinstance(error, FsdptrainError):
        return error
    message = f"{type(error).__name__}: {error}"
    if is_disk_full(error):
        return disk_full_error(error)
    if isinstance(error, torch.OutOfMemoryError):
        request = str(error).partition(" If reserved but unallocated")[0]  # without torch's own advice
        return OutOfMemory(f"out of memory in {moment_of(error)}: {request}")
    if "gloo/transport" in str(error):
        return WorkerLost(lost_connection(message))
    cause = cause_in(message)
    if cause and cause.error is OutOfMemory:  # of cuBLAS or NCCL, which allocate by themselves
        return OutOfMemory(f"out of memory in {moment_of(error)}: {quoted(message, cause)}")
    if cause and cause is not LOST_PEERS:
        return error_of(cause, message)
    # What no restart fixes has its cause above. Another error of a device or connection may not come back in new
    # processes: a restart in vain costs minutes, as launch.max_restarts limits them, and giving up perhaps a night.
    if isinstance(error, (dist.DistError, torch.AcceleratorError)):
        return WorkerLost(message)
    return WorkerError(message)


def lost_connection(message: str) -> str:
    """Return gloo's message about a connection, with the address at its other end and what may have happened there."""
    peer = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", message)
    if peer is None or is_loopback(peer[1]):
        return message
    return (
        f"lost the connection to {peer[1]}: see the output of the command on that host, which may have failed first; "
        f"if it was killed there, or host or network failed, run the same command on all hosts to resume\n{message}"
    )


def moment_of(error: BaseException) -> str:
    """Return what a rank was doing when it failed: the forward of a unit, the backward, the update, or a function."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    functions = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames}
    if ("fsdptrain.train.step", "update") in functions:
        return "the optimizer's update"
    if ("torch._tensor", "backward") in functions:  # on a GPU its frames are on threads of autograd
        return "the backward" + (f", after the {ISSUED[-1].kind} of {ISSUED[-1].unit}" if ISSUED else "")
    unit = next((frame.f_locals["self"] for frame in reversed(frames) if _in_unit(frame)), None)
    if unit is not None:
        return f"the forward of {unit_name(unit)}"
    return own_frame((f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in reversed(frames)) or "a thread"


def _in_unit(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), FSDPModule)


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
