"""How ranks that hang, die or are slow are explained, and how errors travel between processes."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import dataclasses
import errno
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import TINY, on_ranks, plan_here, python, wait_until, write_recipe
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain import errors
from fsdptrain.checkpoint.manifest import reject_external_symlinks
from fsdptrain.checkpoint.resume import EarlierAttempts
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.config.reader import load
from fsdptrain.failures.explain import explain, explain_hang, hung_ranks
from fsdptrain.failures.translate import as_fsdptrain_error, first_line_of
from fsdptrain.failures.watchdog import Watchdog, current_place
from fsdptrain.launch import launcher
from fsdptrain.launch.agent import Failure, first_failure
from fsdptrain.launch.launcher import Attempt
from fsdptrain.parallel.patches import NamedComm
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.processes import StopRequest
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen
from fsdptrain.train.pace import MIN_COST, STEP_PER_FORWARD, WINDOW, LayerClock, Pace
from fsdptrain.train.step import StepStats
from fsdptrain.train.trainer import Totals, Trainer

STACKS = """Timeout (0:00:05)!
Thread 0x00007f7cabfff6c0 (most recent call first):
  File "{package}/checkpoint.py", line 141 in _exchange

Thread 0x00007f7d2a5f5b80 (most recent call first):
  File "/usr/lib/python3/json.py", line 7 in loads
  File "{package}/data.py", line 133 in batch
  File "{package}/worker.py", line 240 in one_step
"""


def plan_for(tmp_path: Path, world: int, **changes: Any) -> Plan:
    plan = plan_here(write_recipe(tmp_path, launch__nproc_per_node=world, **changes))
    plan.rundir.root.mkdir(exist_ok=True)
    return plan


def test_a_hang_is_explained_in_one_paragraph_also_if_some_reports_cannot_be_read(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 7, train__global_batch_size=7)
    rundir = plan.rundir
    rundir.hangs(1).mkdir(parents=True)
    for rank, text in ((4, "[1"), (5, '{"rank": 1}')):
        rundir.hang_report(1, rank).write_text(text)
    os.mkfifo(rundir.stack_dump(1, 6))
    for rank in (0, 2):
        report = {"rank": rank, "waits": True, "where": "all-gather of model.layers.7"}
        rundir.hang_report(1, rank).write_text(json.dumps(report))
    rundir.stack_dump(1, 1).write_text(STACKS.format(package=Path(errors.__file__).parent))
    rundir.stack_dump(1, 3).touch()
    message = explain_hang(1, plan, rundir, "after step 12")
    assert "the run hung after step 12: no progress for 60 s" in message
    assert "ranks 0 and 2 wait in all-gather of model.layers.7; rank 1 is in data.batch (data.py:133)" in message
    assert "ranks 4 and 5 are in unknown code, because their reports cannot be read" in message
    assert "ranks 3 and 6 do not respond" in message


def test_a_collective_on_a_thread_of_autograd_is_found() -> None:
    released, unit = threading.Event(), FSDPParamGroup.__new__(FSDPParamGroup)
    unit._all_gather_comm = NamedComm(None, "all-gather", "model.layers.7")  # type: ignore[assignment]

    def post_backward(self: FSDPParamGroup) -> None:
        released.wait(60)

    _thread.start_new_thread(post_backward, (unit,))  # `threading` does not know this thread, as autograd's
    end, found = time.monotonic() + 30, (False, "")
    while not found[0] and time.monotonic() < end:
        found = current_place()
    released.set()
    assert found == (True, "reduce-scatter of model.layers.7")


def test_a_rank_that_waits_for_its_save_is_where_the_save_is() -> None:
    saved, found = threading.Event(), [""]

    class Words:
        def __str__(self) -> str:
            saved.wait(60)
            return ""

    def look() -> None:
        end = time.monotonic() + 30
        while not found[-1].startswith("errors.first_line (errors.py:") and time.monotonic() < end:
            found.append(current_place()[1])
        saved.set()

    checkpointer = Checkpointer.__new__(Checkpointer)
    checkpointer._error = None
    checkpointer._thread = threading.Thread(target=errors.first_line, args=(Words(),), name="checkpoint")
    checkpointer._thread.start()
    with ThreadPoolExecutor() as pool:
        pool.submit(look)
        checkpointer.wait()
    assert found[-1].startswith("errors.first_line (errors.py:")


# Seconds of progress before a stall, and seconds of the stall, up to the limit of 8 s: the watchdog acts at moments of
# its own.
STALLS_S = {
    "a few": [(before, 7.5) for before in (0.4, 0.8, 1.2, 1.6)],
    "many": [(0.25 * n, 5.0 + 0.5 * m) for n in range(8) for m in range(6)],
}


@pytest.mark.parametrize("which", ["a few", pytest.param("many", marks=pytest.mark.soak)])
def test_a_rank_that_goes_on_does_not_hang_however_long_it_was_stalled(which: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, launch__timeout_s=8)
    stalls = [(before, seconds, False) for before, seconds in STALLS_S[which]]
    stalls += [(0.0, seconds, True) for seconds in (5.0, 7.5, 11.0)]  # the last one is longer than the alarm
    found = on_ranks(len(stalls), stall, tmp_path / "ranks", recipe=str(recipe), stalls=stalls)
    assert [any(hung) for hung in found] == [False] * len(stalls)


def test_a_hang_is_of_a_rank_that_was_not_fed_and_of_its_attempt_whatever_the_clocks_say(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 2, launch__timeout_s=1)
    first, report = Attempt(plan, Screen(quiet=True), StopRequest()), plan.rundir.hang_report(1, 0)
    with Watchdog(plan, 0) as watchdog:
        watchdog.begin(1)
        watchdog.reset(step_done=True)
        watchdog.reset(disk_bytes=10**9)  # fifty seconds of a slow disk
        time.sleep(1.6)
        assert not report.exists()
        watchdog.reset()
        wait_until(report.exists, "no report of a hang")
    reported = json.loads(report.read_text())
    assert reported["rank"] == 0 and "entries" in reported["collectives"]["gloo"]
    plan.rundir.stack_dump(1, 1).write_text(STACKS)
    assert first._hung_ranks() == [0, 1]
    for path in plan.rundir.logs.rglob("*"):  # another machine wrote them, with a clock that is ahead
        os.utime(path, (time.time() + 3600,) * 2)
    second = Attempt(plan, Screen(quiet=True), StopRequest())
    assert second._hung_ranks() == []  # also before its ranks have met
    with Watchdog(plan, 1) as later:
        later.begin(2)
        assert second._hung_ranks() == []
        plan.rundir.stack_dump(2, 1).write_text(STACKS)
        os.utime(plan.rundir.stack_dump(2, 1), (0, 0))
        assert second._hung_ranks() == [1]


def test_a_rank_shows_that_its_process_runs_without_a_change_of_its_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdptrain.failures.watchdog.heartbeat_s", lambda world: 0.05)
    plan = plan_for(tmp_path, 1)
    dump = plan.rundir.stack_dump(1, 0)
    with Watchdog(plan, 0) as watchdog:
        watchdog.begin(1)
        for _ in range(2):
            os.utime(dump, (0, 0))
            wait_until(lambda: dump.stat().st_mtime, "no heartbeat")
        assert not dump.stat().st_size and hung_ranks(plan.rundir, 1, [0]) == []
    assert not dump.exists()


class Lost:
    """Attempts whose workers are lost: each saves a checkpoint before, as far as `saves` says so."""

    def __init__(
        self, saves: list[bool], error: type[errors.WorkerLost] = errors.WorkerLost, asked: bool = False
    ) -> None:
        """`asked`: the run is asked to stop before its workers are lost."""
        self.saves, self.error, self.asked, self.started = saves, error, asked, 0

    def __call__(self, plan: Plan, *_: Any, **__: Any) -> SimpleNamespace:
        def run() -> None:
            if self.started == len(self.saves):
                return  # trained to the end
            saves, self.started = self.saves[self.started], self.started + 1
            if saves:
                plan.rundir.checkpoint(self.started).mkdir(parents=True)
            if self.asked:
                os.kill(os.getpid(), signal.SIGTERM)
            raise self.error("rank 0 was killed")

        return SimpleNamespace(run=run)


@pytest.mark.parametrize(
    ("lost", "started", "message"),
    [
        (Lost([True] * 5), 5, None),  # with a new checkpoint each time, up to launch.max_restarts
        (Lost([True] * 6), 6, "^rank 0 was killed"),
        (Lost([False] * 6), 3, "gave up after 2 restarts without a new checkpoint\nrank 0 was killed"),
        (Lost([True, False, True, False, True]), 5, None),
        (Lost([True, False, False, True]), 3, "gave up after 2 restarts without a new checkpoint"),
        (Lost([True] * 6, errors.KilledForMemory), 2, "killed for full memory a second time"),
        (Lost([True] * 6, asked=True), 1, "^rank 0 was killed"),
    ],
)
def test_lost_workers_are_started_again_while_that_may_help(
    lost: Lost, started: int, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(tmp_path, 1, launch__max_restarts=5)
    plan.rundir.logs.mkdir()
    monkeypatch.setattr(launcher, "Attempt", lost)
    with pytest.raises(errors.WorkerError, match=message) if message else contextlib.nullcontext():
        launcher.launch(plan, Screen(quiet=True), EarlierAttempts())
    assert lost.started == started


def test_a_node_says_once_that_others_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meeting = {"launch__rdzv_endpoint": "127.0.0.1:29400", "launch__max_restarts": 1}
    for nnodes, says in ((2, 1), ("1:2", 0)):
        plan = plan_for(tmp_path, 1, launch__nnodes=nnodes, **meeting)
        attempt = Attempt(plan, Screen(), StopRequest())
        attempt._say_late()
        assert "waiting" not in capsys.readouterr().out
        with monkeypatch.context() as later:
            later.setattr("fsdptrain.launch.launcher.LATE_S", 0.0)
            attempt._say_late()
            attempt._say_late()
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.count("still waiting for all 2 nodes at 127.0.0.1:29400: start the command on each") == says


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_of_which_there_is_no_record_is_a_stop(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, stop = plan_for(tmp_path, 1), StopRequest()
    attempt = Attempt(plan, Screen(), stop)
    attempt._raise_failure(0, {})  # it has finished
    with pytest.raises(errors.WorkerLost, match=f"agent was killed by {number.name}"):
        attempt._raise_failure(-number, {})  # nobody has asked for a stop
    stop.count, stop.name = 1, number.name
    with pytest.raises(errors.Stopped, match=f"stopped by {stop.by}; run the same command"):
        attempt._raise_failure(0, {})  # of a host that does not share the folder
    with pytest.raises(errors.Stopped, match="before the first step; nothing was lost"):
        attempt._raise_failure(-number, {})  # the agent cannot handle it yet
    assert f"{stop.by}: stopping; no step has been trained yet" in capsys.readouterr().out
    with pytest.raises(errors.WorkerLost, match="agent was killed by SIGKILL"):
        attempt._raise_failure(-signal.SIGKILL, {})


def explained(tmp_path: Path, *failures: dict[str, Any], full_memory: bool = False) -> errors.FsdptrainError:
    found = {}
    for rank, fields in enumerate(failures):
        file = tmp_path / f"{rank}.json"
        if "type" in fields:
            file.write_text(json.dumps({"message": {"message": "", "extraInfo": {"timestamp": "1", **fields}}}))
        found[rank] = Failure(fields["code"], str(file), fields.get("pid", 0))
    chosen = first_failure(found, RunDir(tmp_path).rank_log, full_memory)
    return explain(json.loads(json.dumps(chosen)), RunDir(tmp_path), "after step 3")


BEFORE_THE_FORK = """
import importlib, os, torch
from fsdptrain.launch.agent import WORKERS
def asked(*_, **__): raise AssertionError("a module asks for GPUs when it is imported")
for module in (torch.cuda, torch.accelerator):
    for name in ("is_available", "device_count", "current_device", "synchronize", "_lazy_init"):
        if hasattr(module, name):
            setattr(module, name, asked)
for worker in WORKERS.values():
    importlib.import_module(worker)
names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
print(len(names) - names.count("jemalloc_bg_thd"))  # of Arrow's allocator, which starts it again after a fork
"""


def test_what_the_agent_imports_before_it_forks_asks_for_no_gpu_and_starts_no_thread() -> None:
    """CUDA cannot be used in a process that is forked after CUDA was, and other threads' locks stay locked in it."""
    done = python("-c", BEFORE_THE_FORK, executed=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_the_cause_is_explained_and_not_its_consequence(tmp_path: Path) -> None:
    lost = {"code": 5, "type": "WorkerLost", "message": "connection closed", "at": 1.0}
    killed = explained(tmp_path, lost, {"code": -9}, {"code": -15})
    assert type(killed) is errors.WorkerLost and "rank 1 was killed by SIGKILL" in str(killed)
    full = explained(tmp_path, lost, {"code": -9}, {"code": -15}, full_memory=True)
    assert type(full) is errors.KilledForMemory and "rank 1 was killed by the kernel" in str(full)
    assert type(explained(tmp_path, {"code": -11}, full_memory=True)) is errors.WorkerLost
    wrong = explained(tmp_path, lost, {"code": 5, "type": "WorkerError", "message": "KeyError: 7", "at": 2.0})
    assert type(wrong) is errors.WorkerError and "rank 1 failed after step 3: KeyError: 7" in str(wrong)
    data = explained(tmp_path, {"code": 4, "type": "DataError", "message": "rows.jsonl:7: no", "at": 3.0}, lost)
    assert type(data) is errors.DataError and str(data) == "rows.jsonl:7: no"


# The texts are torch's and NCCL's, from public reports.
WATCHDOG = (
    "[rank0]:[E318 09:26:18.141499142 ProcessGroupNCCL.cpp:2068] {0}\nException raised from run at ProcessGroupNCCL.cpp"
    "\nframe #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f6e21d7eeb0 in libc10.so)\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {0}\n"
)
IN_WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: "
ASSERTED = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [73,0,0], thread: [0,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed."
)
BUILD = "this build of torch does not fit the card or its driver: for the NVIDIA driver"
DEVICE_ASSERT = "CUDA error: device-side assert triggered"
ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"
REMOTE = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\nncclRemoteError: A call "
    "failed possibly due to a network error or a remote process exiting prematurely."
)


def nccl_error(what: str, call: str, last: str) -> Exception:
    where = "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
    hint = "(run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9"
    return dist.DistBackendError(f"NCCL error in: {where}, {what} {hint}\n{call}\nLast error:\n{last}")


NCCL_MEMORY = nccl_error(
    "unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 2 'out of memory'"
)
TIMED_OUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=_ALLGATHER_BASE, NumelIn=513, "
    "NumelOut=2052, Timeout(ms)=1200000) ran for 1200036 milliseconds before timing out."
)
numbers = itertools.count(1000)


def aborted(tmp_path: Path, rank: int, text: str) -> dict[str, Any]:
    """Write a text to the log of a rank, as a process that NCCL's watchdog ends by SIGABRT; return how it failed."""
    pid, log = next(numbers), RunDir(tmp_path).rank_log(rank)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        file.write(first_line_of(pid) + text.encode())
    return {"code": -signal.SIGABRT, "pid": pid}


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (DEVICE_ASSERT, errors.KernelFailed, ("a kernel failed on the GPU", DEVICE_ASSERT)),
        (ILLEGAL_ADDRESS, errors.KernelFailed, ("a kernel failed on the GPU", ILLEGAL_ADDRESS)),
        (str(NCCL_MEMORY), errors.OutOfMemory, ("out of memory: Cuda failure 2 'out of memory'",)),
        ("CUDA error: uncorrectable ECC error encountered", errors.WorkerLost, ("the GPU failed: look for Xid",)),
        (TIMED_OUT, errors.WorkerLost, ("waited too long", "OpType=_ALLGATHER_BASE")),
        ("a text that nobody knows", errors.WorkerLost, ("killed by SIGABRT",)),
    ],
)
def test_an_abort_of_the_watchdog_has_the_name_of_its_cause(
    text: str, kind: type, words: tuple[str, ...], tmp_path: Path
) -> None:
    aborted(tmp_path, 0, WATCHDOG.format(IN_WATCHDOG + DEVICE_ASSERT))  # of an attempt before
    peer = aborted(tmp_path, 1, WATCHDOG.format(IN_WATCHDOG + REMOTE))
    lost = {"code": 5, "type": "WorkerLost", "message": "connection closed", "at": 1.0}
    error = explained(tmp_path, aborted(tmp_path, 0, WATCHDOG.format(IN_WATCHDOG + text)), peer, lost)
    if text == TIMED_OUT:  # a consequence as well: what was recorded says more
        assert "connection closed" in str(error)
        error = explained(tmp_path, aborted(tmp_path, 0, WATCHDOG.format(IN_WATCHDOG + text)))
    assert type(error) is kind and "rank 0 " in str(error)
    assert not [each for each in words if each not in str(error)], str(error)


@pytest.mark.parametrize("text", [IN_WATCHDOG + REMOTE, IN_WATCHDOG + TIMED_OUT, "free(): invalid pointer"])
def test_an_abort_does_not_outrank_what_another_rank_has_recorded(text: str, tmp_path: Path) -> None:
    wrong = {"code": 5, "type": "WorkerError", "message": "KeyError: 7", "at": 2.0}
    error = explained(tmp_path, aborted(tmp_path, 0, WATCHDOG.format(text)), wrong)
    assert type(error) is errors.WorkerError and "rank 1 failed after step 3: KeyError: 7" in str(error)


def test_a_recorded_assert_of_a_gpu_is_shown_with_what_the_gpu_has_printed(tmp_path: Path) -> None:
    record = errors.to_record(as_fsdptrain_error(torch.AcceleratorError(DEVICE_ASSERT)))
    error = explained(tmp_path, {**aborted(tmp_path, 0, f"{ASSERTED}\n{ASSERTED}\n"), **record, "at": 1.0})
    assert type(error) is errors.KernelFailed and str(error).count(ASSERTED) == 1


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), errors.WorkerLost, "closed by"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.0.2]:29500"),
         errors.WorkerLost, "lost the connection to 10.1.0.2: "),
        (dist.DistNetworkError("no route"), errors.WorkerLost, "no route"),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), errors.WorkerLost, "Xid"),
        (torch.AcceleratorError(DEVICE_ASSERT), errors.KernelFailed, DEVICE_ASSERT),
        (RuntimeError(f"Triton Error [CUDA]: {ILLEGAL_ADDRESS.partition(': ')[2]}"), errors.KernelFailed, "a kernel"),
        (torch.AcceleratorError("CUDA error: out of memory"), errors.OutOfMemory, "out of memory in"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
         errors.OutOfMemory, "CUBLAS_STATUS_ALLOC_FAILED"),
        (NCCL_MEMORY, errors.OutOfMemory, "Cuda failure 2"),
        (dist.DistBackendError(REMOTE), errors.WorkerLost, "remote process exited"),
        (torch.OutOfMemoryError("tried to allocate"), errors.OutOfMemory, "tried to allocate"),
        (RuntimeError("CUDA driver error: out of memory"), errors.OutOfMemory, "out of memory in"),
        (torch.AcceleratorError("CUDA error: a text that nobody knows"), errors.WorkerLost, "nobody knows"),
        (KeyError("x"), errors.WorkerError, "KeyError: 'x'"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl"), errors.CheckpointError, "metrics.jsonl"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "metrics.jsonl"), errors.CheckpointError, "metrics.jsonl"),
        (errors.NonFiniteError("nan"), errors.NonFiniteError, "nan"),
        (errors.NotMet("nobody came"), errors.NotMet, "nobody came"),
        # What a restart would repeat has a way out.
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
         errors.WorkerError, BUILD),
        (RuntimeError("CUDA driver error: device kernel image is invalid"), errors.WorkerError, BUILD),
        (torch.AcceleratorError("CUDA error: the provided PTX was compiled with an unsupported toolchain."),
         errors.WorkerError, BUILD),
        (torch.AcceleratorError("CUDA error: invalid device ordinal"), errors.WorkerError, "set CUDA_VISIBLE_DEVICES"),
        (torch.AcceleratorError("CUDA error: invalid argument"), errors.WorkerError, "rejects how it is called"),
        (nccl_error("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.",
                    "Cuda failure 209 'no kernel image is available for execution on the device'"),
         errors.WorkerError, BUILD),
        (nccl_error("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
                    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"),
         errors.WorkerError, "two workers use"),
        (nccl_error("invalid argument", "ncclInvalidArgument: Invalid value for an argument.", ""),
         errors.WorkerError, "rejects"),
        (nccl_error("unhandled system error", "ncclSystemError: System call or external library call failed",
                    "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space "
                    "left on device (28)"),
         errors.WorkerError, "/dev/shm is full: docker run --ipc=host or --shm-size"),
    ],
)  # fmt: skip
def test_only_errors_that_a_restart_can_fix_are_worker_lost(error: Exception, kind: type, words: str) -> None:
    found = as_fsdptrain_error(error)
    assert type(found) is kind and words in str(found)
    assert type(errors.from_record(errors.to_record(found))) is kind


ranks = st.integers(2, 8)


@given(ranks, st.integers(0, 7), st.sampled_from(["input", "compute"]), st.floats(0.0, 0.5))
def test_a_slow_rank_is_named_with_its_cause_once_it_costs_a_tenth(
    world: int, rank: int, cause: str, excess: float
) -> None:
    rank, pace, results = rank % world, Pace(), []
    for step in range(2 * WINDOW):
        data, compute = [0.001] * world, [0.2] * world
        (data if cause == "input" else compute)[rank] += excess / (1 if cause == "input" else STEP_PER_FORWARD)
        (data if step % WINDOW == 3 else [0.0] * world)[0] += 0.9  # one slow step, maybe of another rank
        results.append(pace.add(data, compute, 1.0))
    named = [straggler for straggler in results if straggler]
    assert [step for step, found in enumerate(results) if found] == ([WINDOW - 1, 2 * WINDOW - 1] if named else [])
    own_share = excess / (0.2 * STEP_PER_FORWARD + excess)  # the most that a rank which only computes can cost
    cost = excess if cause == "input" else min(excess, own_share)
    assert all(found == {"rank": rank, "cause": cause, "cost": pytest.approx(cost, abs=1e-6)} for found in named)
    if abs(cost - MIN_COST) > 1e-6:
        assert bool(named) == (cost > MIN_COST)


def test_the_events_have_retries_since_the_last_event_and_the_memory_of_ranks_if_it_has_changed() -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.totals = Totals()
    trainer.world = SimpleNamespace(device=torch.device("cuda"), size=2)  # type: ignore[assignment]
    stats = StepStats(1.0, 1.0, 1.0, False, 7, 1.0, 1.0, [4, 5], [0, 5], [], [])
    found = {"peak_memory_by_rank": [4, 5], "reserved_memory_bytes": 7, "alloc_retries": 5}
    assert trainer.memory_fields(stats) == found
    # The rank with the most in all is not the one with the most since the last event.
    for retries, since in (([3, 6], 3), ([3, 6], 0), ([3, 7], 1)):
        assert trainer.memory_fields(dataclasses.replace(stats, alloc_retries=retries))["alloc_retries"] == since
    trainer.world = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    assert trainer.memory_fields(stats) == {}
    assert trainer.memory_fields(dataclasses.replace(stats, peak_memory=[4, 6])) == {"peak_memory_by_rank": [4, 6]}


def test_only_layers_and_only_training_are_on_the_layer_clock() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    clock = LayerClock(model, torch.device("cpu"))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: time.sleep(0.03))
    model.lm_head.register_forward_hook(lambda *_: time.sleep(0.5))
    ids = torch.arange(8)[None]
    model(ids)
    model(ids)
    assert clock.seconds() >= 0.06
    with clock.stopped():
        model(ids)
    assert clock.seconds() == 0.0


def test_the_layer_clock_of_a_gpu_reads_only_events_that_have_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    now, finished = [0.0], [0.0]  # milliseconds: when the next event is recorded, and up to where the GPU has come

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]
            now[0] += 100

        def query(self) -> bool:
            return self.at <= finished[0]

        def elapsed_time(self, end: Event) -> float:
            assert end.query()
            return end.at - self.at

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    clock, found = LayerClock(model, torch.device("cuda")), []
    for up_to in (0, 600, 1200, 1200):
        model(torch.arange(8)[None])  # three layers: 300 of 600 ms
        finished[0] = up_to
        found.append(clock.seconds())
    assert found == pytest.approx([0, 0.3, 0.3, 0.3])


NODES, WORKERS = 128, 8  # of a run that is pretended: what it asks of its file system is counted


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the list to which each request to a file system adds its name."""
    found: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **words: (found.append(name), function(*args, **words))[1]

    for name in ("stat", "lstat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return found


def test_all_launchers_together_look_at_each_rank_once(tmp_path: Path, looks: list[str]) -> None:
    recipe = load(write_recipe(tmp_path, train__global_batch_size=NODES * WORKERS))
    plan = make_plan(recipe, Topology("cpu", NODES, WORKERS, source="Slurm job 7", endpoint="n1:20000"))
    attempts = [Attempt(plan, Screen(quiet=True), StopRequest()) for _ in range(NODES)]
    for node, attempt in enumerate(attempts):
        attempt._meeting = {"nodes": NODES, "node": node, "before": 0}
        attempt._note_meeting()
    plan.rundir.hangs(1).mkdir(parents=True)
    for rank in range(NODES * WORKERS):
        plan.rundir.stack_dump(1, rank).touch()
    looks.clear()
    assert not any(attempt._hung_ranks() for attempt in attempts)
    assert looks.count("stat") == NODES * WORKERS and len(looks) <= NODES * WORKERS + 2 * NODES
    plan.rundir.hang_report(1, 900).write_text("{}")
    plan.rundir.stack_dump(1, 9).write_text("Thread 0x")
    assert [attempt._hung_ranks() for attempt in attempts[:3]] == [[900], [9, 900], [900]]


def test_looking_for_links_does_not_look_at_the_files_of_each_rank(tmp_path: Path, looks: list[str]) -> None:
    rundir = RunDir(tmp_path)
    rundir.logs.mkdir()
    for rank in range(NODES * WORKERS):
        (rundir.logs / f"rank-{rank}.log").touch()
    looks.clear()
    reject_external_symlinks(rundir)
    assert len(looks) < 50


# --- on every rank -------------------------------------------------------------------------------------------------


def stall(recipe: str, stalls: list[tuple[float, float, bool]]) -> list[bool]:
    """Stall between two resets of the watchdog; return after which of the next ones this rank counts as hung.

    `stalls` has for each rank the seconds in which it makes progress before, those of the stall, and whether it holds
    the interpreter lock meanwhile.
    """
    plan, rank = plan_here(Path(recipe)), int(os.environ["RANK"])
    found = []
    plan.rundir.root.mkdir(parents=True, exist_ok=True)  # as the command does
    with Watchdog(plan, rank) as watchdog:
        watchdog.begin(1)
        before_s, seconds, holding_the_gil = stalls[rank]
        watchdog.reset(step_done=True)
        time.sleep(before_s)
        watchdog.reset()
        if holding_the_gil:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        else:
            time.sleep(seconds)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            watchdog.reset()
            found.append(bool(hung_ranks(plan.rundir, 1, [rank])))
            time.sleep(0.05)
    return found
