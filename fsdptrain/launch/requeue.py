"""Whether a submitted job that has failed is requeued by its batch script: only for what may not happen again.

    a worker or a node was lost      requeue, if there is a new checkpoint since the last time; at most REQUEUES times
    killed, the host's memory full   requeue once
    anything else                    it would fail again

Slurm itself requeues a job that loses a node (`--requeue`), and the script one that was stopped at its time limit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsdptrain.errors import FsdptrainError, KilledForMemory, NotMet, WorkerError, WorkerLost
from fsdptrain.run_folder.files import open_to_append
from fsdptrain.run_folder.records import Tail
from fsdptrain.run_folder.rundir import RunDir

REQUEUES = 20
LOST, MEMORY = "a worker or a node was lost", "a process was killed, probably because the host memory was full"

# Exit codes of a step whose processes did not end by themselves: 128 and the signal; Slurm's 125 for full memory.
SLURM_MEMORY_CODE, SHELL_CODES = 125, (126, 127)  # 126 and 127: the command cannot be started
KILLED_CODES = (SLURM_MEMORY_CODE, 128 + 9, 128 + SLURM_MEMORY_CODE)


class Verdict(NamedTuple):
    """Whether the job is requeued, and the reason."""

    worth_it: bool
    reason: str
    cause: str | None = None  # LOST or MEMORY, if it is requeued


def main() -> None:
    """Exit with 0 to requeue the job, and with 1 to end it; the arguments are OUTPUT_DIR LOGS CODE SINCE.

    LOGS is the folder of the job's log, CODE the exit code of the step, SINCE when it began (seconds since 1970).
    """
    output_dir, logs, code, since = sys.argv[1:]
    rundir = RunDir.open(Path(output_dir).absolute())
    notes = Path(logs) / f"slurm-{os.environ['SLURM_JOB_ID']}-requeues.jsonl"
    try:
        step = max(rundir.checkpoint_steps(), default=0)
        errors = errors_since(rundir, float(since))
        verdict = judge(int(code), errors, step, list(Tail(notes, from_end=False).read()))
        if verdict.worth_it:
            with open_to_append(notes) as stream:
                stream.write(
                    json.dumps({"event": "requeue", "at": time.time(), "step": step, "cause": verdict.cause}) + "\n"
                )
    except (OSError, FsdptrainError) as error:
        verdict = Verdict(False, f"the records of the run cannot be used: {error}")
    print(f"fsdptrain: the job {'is requeued' if verdict.worth_it else 'ends'}: {verdict.reason}", flush=True)
    sys.exit(not verdict.worth_it)


def errors_since(rundir: RunDir, since: float) -> list[str]:
    """Return the classes of the errors with which the commands of this attempt have ended, one on each node.

    Errors of single ranks are left out: most of them are consequences, and restarts may have mended them.
    """
    records = Tail(rundir.metrics, from_end=False).read()
    return [
        str(each["type"]) for each in records if each["event"] == "error" and "rank" not in each and each["at"] >= since
    ]


def judge(code: int, errors: Sequence[str], step: int, earlier: Sequence[Mapping[str, Any]]) -> Verdict:
    """Return whether a job is requeued whose step has ended with `code`, and the commands in it with these `errors`.

    `step` is that of the newest checkpoint, `earlier` the notes of the requeues before: `step` and `cause`.
    """
    lost = {cls.__name__ for cls in (WorkerLost, NotMet, KilledForMemory)}
    own = code == WorkerError.exit_code
    if code in SHELL_CODES or (code <= 128 and not own and code not in KILLED_CODES) or (own and {*errors} - lost):
        return Verdict(False, f"exit code {code}: it would fail again")
    cause = MEMORY if code in KILLED_CODES or KilledForMemory.__name__ in errors else LOST
    same = [note for note in earlier if note.get("cause") == cause]
    newest = f"the newest checkpoint is that of step {step}" if step else "there is no checkpoint yet"
    if cause == MEMORY and same:
        return Verdict(False, f"{cause}, for the second time: use less memory, or nodes with more")
    if same and step <= same[-1].get("step", 0):
        return Verdict(False, f"{cause} again without a new checkpoint ({newest})")
    if len(earlier) >= REQUEUES:
        return Verdict(False, f"{cause}, and it was requeued {REQUEUES} times before")
    return Verdict(True, f"{cause}; {newest} (requeue {len(earlier) + 1} of {REQUEUES} at most)", cause)
