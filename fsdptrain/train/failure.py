"""End a rank that failed, and leave its reason where the launcher looks for it."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from fsdptrain.config.plan import Plan
from fsdptrain.errors import (
    MAX_MESSAGE_CHARS,
    CheckpointError,
    FsdptrainError,
    WorkerError,
    WorkerLost,
    is_disk_full,
    shortened,
    to_record,
)
from fsdptrain.events import Reporter
from fsdptrain.ownership import write_atomically
from fsdptrain.rundir import RunDir


def ours(error: BaseException) -> FsdptrainError:
    """Any exception as one of ours: what came of other ranks' silence, what came of a full disk, and the rest."""
    if isinstance(error, FsdptrainError):
        return error
    words = f"{type(error).__name__}: {error}"
    if is_disk_full(error):
        return CheckpointError(f"no space: {error}")
    if isinstance(error, (dist.DistError, torch.AcceleratorError)) or "gloo/transport" in str(error):
        return WorkerLost(words)
    return WorkerError(words)


def leave(plan: Plan, error: FsdptrainError) -> NoReturn:
    """End this process for an error that a thread has found."""
    with contextlib.suppress(OSError):
        record_failure(plan, error)
    os._exit(error.exit_code)


def leave_record(error: FsdptrainError) -> None:
    """Leave the error where torchrun's agent looks for it.

    In one piece: the agent may end us while we write, and torchrun fails over half a file.
    """
    words, stack, now = to_record(error), shortened(traceback.format_exc(), MAX_MESSAGE_CHARS), time.time()
    record = {"py_callstack": stack, "timestamp": str(int(now)), **words, "traceback": stack, "at": now}
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        write_atomically(Path(path), json.dumps({"message": {"message": words["message"], "extraInfo": record}}))


def record_failure(plan: Plan, error: FsdptrainError) -> None:
    """Leave the error where torchrun's agent looks for it, and an `error` event in the metrics."""
    leave_record(error)
    with contextlib.closing(Reporter(RunDir(Path(plan.run_dir)))) as reporter:
        reporter.event("error", rank=int(os.environ["RANK"]), **to_record(error))
