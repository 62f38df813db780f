"""Faults injected into real runs lose nothing; docs/faults.md lists them with what must hold.

After every fault the same command resumes, and its results are bitwise equal to those of an undisturbed run: the loss,
the gradient norm and the samples of every step, the last checkpoint, the export.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import FaultTable
from hosts import Host, switched_hosts
from hosts import missing as hosts_missing
from injection import EVERY, STEPS, Running, curve, differences, holder, last_step, run_with, small_recipe, valid_steps
from support import environment, events, fsdptrain, wait_for_step

from fsdptrain.failures.heartbeat import MAX_MISSED

SEED = int(os.environ.get("FSDPTRAIN_FAULT_SEED", "20261120"))
LOSS, UPDATE = "fsdptrain.train.step:Engine.loss", "fsdptrain.train.step:Engine.update"
BATCH = "fsdptrain.data.corpus:batch_of"  # of a stream and of held-out rows
MICRO_BATCHES = 2  # of a rank in a step


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of an undisturbed run."""
    tmp = tmp_path_factory.mktemp("reference")
    ended = run_with(small_recipe(tmp))
    assert not ended.problems(0, f"{STEPS} steps in")
    return tmp / "run"


EVALUATED: Any = {"data__eval": {"fraction": 0.1}, "eval__every": 3}  # not a step with a checkpoint


@pytest.fixture(scope="module")
def whole_with_evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of an undisturbed run that evaluates."""
    tmp = tmp_path_factory.mktemp("evaluated")
    assert not run_with(small_recipe(tmp, **EVALUATED)).problems(0)
    return tmp / "run"


def record_try(
    table: FaultTable, fault: str, problems: list[str], notice: Sequence[float] = (), lost: str = "nothing"
) -> list[str]:
    """Add one try to the table; return its problems."""
    table.add(fault, 1, 0 if problems else 1, notice, lost)
    return problems


def kill(where: str, rank: int, call: int, mark: Path | None = None, **more: Any) -> dict[str, Any]:
    return {"where": where, "do": "send", "rank": rank, "call": call, **({"mark": str(mark)} if mark else {}), **more}


# --- killed ----------------------------------------------------------------------------------------------------------


def test_a_worker_killed_while_it_writes_is_named_and_restarted(
    reference: Path, tmp_path: Path, fault_table: FaultTable
) -> None:
    recipe, run = small_recipe(tmp_path, launch__max_restarts=1), tmp_path / "run"
    ended = run_with(recipe, kill("fsdptrain.checkpoint.save:write_shards", rank=1, call=3, mark=tmp_path / "killed"))
    problems = ended.problems(0, r"rank 1 was killed by SIGKILL.* after step \d", "restart 1 of 1")
    problems += differences(run, reference)
    problems += [] if events(run, "resume")[-1]["step"] >= EVERY else ["it started again at step 0"]
    restarts = [[record[name] for name in ("attempt", "restart", "of")] for record in events(run, "restart")]
    problems += [] if restarts == [[1, 1, 1]] else [f"recorded restarts: {restarts}"]
    assert not record_try(fault_table, "worker killed while writing, restarted", problems)


@pytest.mark.parametrize("to", ["agent", "command"])
def test_no_process_outlives_a_killed(to: str, tmp_path: Path, fault_table: FaultTable) -> None:
    recipe = small_recipe(tmp_path, train__steps=2000)
    ended = run_with(recipe, kill(UPDATE, rank=1, call=5, mark=tmp_path / "killed", how={"to": to}))
    problems = ended.problems(5 if to == "agent" else -9)
    problems += [] if valid_steps(tmp_path / "run") else ["no valid checkpoint"]
    assert not record_try(fault_table, f"{to} killed", problems, [ended.notice + ended.leaving])


PHASES: dict[str, list[dict[str, Any]]] = {
    "forward": [{"where": LOSS, "call": (5, 12), "delay": 0.02}],
    "backward": [{"where": "torch:Tensor.backward", "call": (5, 12), "delay": 0.02}],
    "update": [
        {"where": UPDATE, "call": (3, 6), "delay": 0.005},
        {"where": UPDATE, "call": (3, 6)},
        {"where": UPDATE, "call": (3, 6), "at": "exit"},
    ],
    "staging": [
        {"where": "fsdptrain.checkpoint.save:Checkpointer.save", "call": (2, 3), "delay": 0.005},
        {"where": "fsdptrain.checkpoint.save:Checkpointer.save", "call": (2, 3), "at": "exit"},
    ],
    "writing": [
        {"where": "fsdptrain.checkpoint.save:write_shards", "call": (2, 3)},
        {"where": "fsdptrain.checkpoint.save:write_shards", "call": (2, 3), "delay": 0.005},
        {"where": "fsdptrain.checkpoint.save:write_shards", "call": (2, 3), "at": "exit"},
    ],
    "commit": [
        {"where": "fsdptrain.run_folder.storage:_LocalStorage.publish", "rank": 0, "call": (2, 3)},
        {"where": "fsdptrain.run_folder.storage:_LocalStorage.publish", "rank": 0, "call": (2, 3), "at": "exit"},
        {"where": "os:rename", "rank": 0, "call": (2, 3), "match": ".tmp"},
        {"where": "os:rename", "rank": 0, "call": (2, 3), "match": ".tmp", "at": "exit"},
    ],
    "retention": [
        {"where": "fsdptrain.checkpoint.save:remove_old_checkpoints", "rank": 0, "call": (2, 3)},
        {"where": "os:rename", "rank": 0, "call": (1, 1), "match": ".old", "at": "exit"},
        {"where": "os:unlink", "rank": 0, "call": (1, 2), "match": "safetensors", "at": "exit"},
        {"where": "fsdptrain.checkpoint.save:remove_old_checkpoints", "rank": 0, "call": (2, 3), "at": "exit"},
    ],
}
KILLS_A_PHASE = 8


def random_kills(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return (phase, kill) in random order: KILLS_A_PHASE per phase, its kinds in turn, at random calls and ranks."""
    chance = random.Random(seed)
    kills = []
    for phase, kinds in PHASES.items():
        for number in range(KILLS_A_PHASE):
            kind = dict(kinds[number % len(kinds)])
            first, last = kind.pop("call")
            rank = kind.pop("rank", chance.randrange(2))
            delay = chance.uniform(0, kind.pop("delay", 0.0))
            kills.append((phase, kill(**kind, rank=rank, call=chance.randint(first, last), delay=delay)))
    chance.shuffle(kills)
    return kills


@dataclass
class Killed:
    """The cost of one kill: seconds until the command ended, steps to repeat, and what was not as expected."""

    notice: float
    lost: int
    problems: list[str]


def kill_once(recipe: Path, fault: dict[str, Any], before: int) -> Killed:
    """Run into a kill; `before` is the step of the newest valid checkpoint."""
    run = recipe.parent / "run"
    ended = run_with(recipe, fault)
    valid = max(valid_steps(run), default=0)
    lost = last_step(run) - valid
    # What a kill in the retention has left is removed at the next start, where the same kill then strikes.
    where = r"(after step \d|before the first step)"
    problems = ended.problems(5, rf"rank {fault['rank']} was killed by SIGKILL.* {where}", within=5.0)
    problems += [] if valid >= before else [f"a checkpoint of step {before} was there, now the newest is {valid}"]
    problems += [] if lost <= 2 * EVERY else [f"{lost} steps lost: the newest checkpoint is {valid}"]
    return Killed(ended.notice, lost, [f"{fault}: {problem}" for problem in problems])


@pytest.mark.soak
def test_workers_killed_at_any_moment_lose_nothing(tmp_path: Path, fault_table: FaultTable) -> None:
    print(f"FSDPTRAIN_FAULT_SEED={SEED}")
    kills = random_kills(SEED)
    steps = 6 * len(kills)  # more than the runs train until their kills
    whole = small_recipe(tmp_path / "whole", train__steps=steps, checkpoint__every=None)
    problems = run_with(whole).problems(0)
    recipe, run = small_recipe(tmp_path / "killed", train__steps=steps), tmp_path / "killed" / "run"
    tried: dict[str, list[Killed]] = {phase: [] for phase in PHASES}
    for number, (phase, fault) in enumerate(kills):
        mark = str(tmp_path / f"kill-{number}")
        tried[phase].append(kill_once(recipe, {**fault, "mark": mark}, max(valid_steps(run), default=0)))
    problems += run_with(recipe).problems(0) + differences(run, whole.parent / "run")
    for phase, made in tried.items():
        problems += [f"{phase}: {problem}" for killed in made for problem in killed.problems]
        survived = sum(not killed.problems for killed in made)
        lost = f"at most {max(killed.lost for killed in made)} steps, made again"
        fault_table.add(f"worker killed in {phase}", len(made), survived, [killed.notice for killed in made], lost)
    assert not problems, "\n".join(problems)


# --- restarted -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_run_killed_twice_finishes_in_one_command(reference: Path, tmp_path: Path, fault_table: FaultTable) -> None:
    recipe = small_recipe(tmp_path, launch__max_restarts=5)
    kills = [kill(UPDATE, 1, 3, tmp_path / "first"), kill(UPDATE, 0, 5, tmp_path / "second")]
    ended = run_with(recipe, *kills)
    problems = ended.problems(0, "rank 1 was killed", "rank 0 was killed", "restart 2 of 5")
    problems += differences(tmp_path / "run", reference)
    assert not record_try(fault_table, "worker killed twice, restarted", problems)


@pytest.mark.soak
def test_a_worker_that_dies_every_time_is_given_up_after_two_restarts(tmp_path: Path, fault_table: FaultTable) -> None:
    ended = run_with(small_recipe(tmp_path, launch__max_restarts=5), kill(UPDATE, 1, 1))
    problems = ended.problems(5, "restart 2 of 5")
    problems += ["restarted a third time"] if "restart 3" in ended.output else []
    assert not record_try(fault_table, "worker dies every time: given up", problems)


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Yield a cgroup in which processes may take 64 MiB."""
    root, own = Path("/sys/fs/cgroup"), f"fsdptrain-{os.getpid()}"
    version_1 = (root / "memory" / "memory.limit_in_bytes").exists()
    folder = (root / "memory" if version_1 else root) / own
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(2**26))
    except OSError as error:
        pytest.skip(f"cannot limit memory here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.soak
def test_a_worker_that_the_kernel_kills_for_full_memory_is_restarted_once(
    tmp_path: Path, fault_table: FaultTable, small_cgroup: Path
) -> None:
    fault = {"where": UPDATE, "do": "exceed_memory", "rank": 1, "call": 3, "how": {"cgroup": str(small_cgroup)}}
    ended = run_with(small_recipe(tmp_path, launch__max_restarts=5), fault)
    full = "rank 1 was killed by the kernel after step .*, because the memory of its host was full"
    problems = ended.problems(5, full, "restart 1 of 5", "gave up: a worker was killed for full memory a second time")
    problems += ["restarted a second time"] if "restart 2" in ended.output else []
    assert not record_try(fault_table, "host memory full: restarted once", problems)


DETERMINISTIC = {
    "an error in our code": (5, {"where": UPDATE, "do": "fail", "rank": 0, "call": 3, "times": None}),
    "NaN": (7, {"where": LOSS, "do": "nan", "at": "exit", "rank": 1, "call": 5, "times": None}),
    "bad data": (4, {"where": BATCH, "do": "fail", "call": 5, "times": None,
                     "how": {"error": "fsdptrain.errors:DataError"}}),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_what_would_fail_again_is_not_restarted(name: str, tmp_path: Path, fault_table: FaultTable) -> None:
    code, fault = DETERMINISTIC[name]
    ended = run_with(small_recipe(tmp_path, launch__max_restarts=5), fault)
    problems = ended.problems(code) + (["it was restarted"] if "restart " in ended.output else [])
    assert not record_try(fault_table, f"{name}: not restarted", problems)


# --- hanging ---------------------------------------------------------------------------------------------------------

HANG_S = 8  # launch.timeout_s


def hang(where: str, call: int = 1, do: str = "sleep", **how: Any) -> dict[str, Any]:
    """Return a fault in which rank 1 never returns from a call."""
    return {"where": where, "rank": 1, "call": call, "do": do, "how": {"seconds": 3600} | how if do == "sleep" else how}


def check_hang(tmp: Path, fault: dict[str, Any], *words: str, **changes: Any) -> tuple[list[str], float]:
    """Run into a hang; return what is not as expected, and the seconds until the run ended."""
    return check_hang_of([{**fault, "mark": str(tmp / "hung")}], tmp, *words, **changes)


def check_hang_of(faults: list[dict[str, Any]], tmp: Path, *words: str, **changes: Any) -> tuple[list[str], float]:
    """Run with faults into a hang, as `check_hang` does."""
    ended = run_with(small_recipe(tmp, launch__timeout_s=HANG_S, **changes), *faults)
    return ended.problems(5, *words, within=HANG_S + 10), ended.notice


def test_a_hang_is_ended_and_explained(tmp_path: Path, fault_table: FaultTable) -> None:
    words = ("rank 0 waits in", "rank 1 is in corpus.batch", r"; rank 1 never entered all-gather #\d+ of model\.\w+")
    problems, notice = check_hang(tmp_path, hang(BATCH, call=7), *words)
    problems += [] if valid_steps(tmp_path / "run") else ["no valid checkpoint"]
    assert not record_try(fault_table, "hang: in corpus.batch", problems, [notice])


@pytest.mark.soak
def test_a_rank_stopped_in_a_step_is_named_with_the_unit_that_waits(tmp_path: Path, fault_table: FaultTable) -> None:
    """The save that was begun before the step waits for the rank as well, and earlier: rank 0 is late."""
    stopped = {**hang(LOSS, 5, "send", name="SIGSTOP"), "mark": str(tmp_path / "hung")}
    late = {"where": LOSS, "rank": 0, "call": 5, "do": "sleep", "how": {"seconds": 1}}
    words = ("rank 1 does not respond", r"the other ranks wait for rank 1 in all-gather #\d+ of model\.\w+")
    problems, notice = check_hang_of([stopped, late], tmp_path, *words)
    assert not record_try(fault_table, "hang: stopped by SIGSTOP before a forward", problems, [notice])


HANGS = {
    "stopped by SIGSTOP": hang(UPDATE, 5, "send", name="SIGSTOP"),
    "in C, holding the GIL": hang(UPDATE, 5, holding_the_gil=True),
    "during evaluation": hang("fsdptrain.train.step:Engine.evaluate"),
    "during the export": hang("fsdptrain.checkpoint.export_tensors:names_by_decoder_layer"),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", HANGS)
def test_any_hang_is_ended_and_the_run_resumes(
    name: str, whole_with_evaluation: Path, tmp_path: Path, fault_table: FaultTable
) -> None:
    problems, notice = check_hang(tmp_path, HANGS[name], "rank 1", **EVALUATED)
    problems += run_with(tmp_path / "recipe.yaml").problems(0) + differences(tmp_path / "run", whole_with_evaluation)
    assert not record_try(fault_table, f"hang: {name}", problems, [notice])


@pytest.mark.soak
def test_a_hang_among_four_ranks_names_each_rank_and_its_place(tmp_path: Path, fault_table: FaultTable) -> None:
    words = ("ranks 0, 2 and 3 wait in all-gather", "rank 1 is in corpus.batch")
    changes: Any = {"launch__nproc_per_node": 4, "train__global_batch_size": 8}
    problems, notice = check_hang(tmp_path / "hung", hang(BATCH, call=5), *words, **changes)
    problems += run_with(tmp_path / "hung" / "recipe.yaml").problems(0)
    problems += run_with(small_recipe(tmp_path / "whole", **changes)).problems(0)
    problems += differences(tmp_path / "hung" / "run", tmp_path / "whole" / "run")
    assert not record_try(fault_table, "hang: one of four in corpus.batch", problems, [notice])


@pytest.mark.soak
def test_a_rank_that_never_leaves_the_process_group_is_reported(tmp_path: Path, fault_table: FaultTable) -> None:
    fault = {"where": "torch.distributed:destroy_process_group", "do": "sleep", "rank": 1, "how": {"seconds": 3600}}
    ended = run_with(small_recipe(tmp_path, launch__timeout_s=4), fault, timeout=90)
    problems = ended.problems(5, "the run hung after step 12: .*rank 1 is in worker.group_left_at_end")
    assert not record_try(fault_table, "hang: at the end", problems)


# --- out of memory ---------------------------------------------------------------------------------------------------

CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 1.20 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)
WITHOUT_MEMORY = {
    "forward": ("transformers.models.llama.modeling_llama:LlamaMLP.forward", r"the forward of model\.layers\.\d"),
    "backward": ("fsdptrain.parallel.shard:GlooReduceScatter.__call__", "the backward, after the reduction of "),
}


@pytest.mark.parametrize("moment", ["forward", pytest.param("backward", marks=pytest.mark.soak)])
def test_out_of_memory_shows_the_moment_the_forecast_and_what_would_fit(
    moment: str, tmp_path: Path, fault_table: FaultTable
) -> None:
    where, words = WITHOUT_MEMORY[moment]
    how = {"error": "torch:OutOfMemoryError", "text": CUDA_OOM}
    fault = {"where": where, "do": "fail", "rank": 1, "call": 9, "how": how}
    ended = run_with(small_recipe(tmp_path, launch__max_restarts=5), fault)
    request = r"Tried to allocate 2.00 GiB\..* 1.20 GiB is free\.\n"
    problems = ended.problems(
        5,
        rf"rank 1 failed (after|before) .*step.*: out of memory in {words}.*{request}",
        r"forecast: \S+ \S+ of \S+ \S+, the peak in",
        r"these overrides need less:\n +fsdp.activation_checkpointing=full +\(.* s a step\)",
    )
    problems += ["it was restarted"] if "restart " in ended.output else []
    assert not record_try(fault_table, f"out of memory in {moment}", problems)


# --- an assert on a GPU ----------------------------------------------------------------------------------------------

ASSERTED = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [73,0,0], thread: [0,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed."
)
DEVICE_ASSERT = "CUDA error: device-side assert triggered"


def test_a_device_assert_is_repeated_once_with_blocking_launches(tmp_path: Path, fault_table: FaultTable) -> None:
    where = "transformers.models.llama.modeling_llama:LlamaMLP.forward"
    abort = {"where": where, "do": "abort", "rank": 1, "call": 9, "mark": str(tmp_path / "aborted")}
    abort["how"] = {"text": f"{ASSERTED}\nterminate called after throwing …\n  what():  … exception: {DEVICE_ASSERT}\n"}
    # With blocking launches Python reports the assert, where it happens.
    again = {"where": where, "do": "fail", "rank": 1, "call": 9}
    again["how"] = {"error": "torch:AcceleratorError", "text": DEVICE_ASSERT}
    printed = {"where": where, "do": "printenv", "rank": 1, "call": 8, "how": {"name": "CUDA_LAUNCH_BLOCKING"}}
    ended = run_with(small_recipe(tmp_path), again, printed, abort)  # the last one acts first
    problems = ended.problems(
        5,
        rf"rank 1 failed .*step.*: a kernel failed on the GPU; .*{re.escape(ASSERTED)}\n.*{DEVICE_ASSERT}\n",
        r"repeating it once with CUDA_LAUNCH_BLOCKING=1",
        rf"rank 1 failed .*: a kernel failed on the GPU; .*: {DEVICE_ASSERT}\n.*faults/sitecustomize.py.*\n",
    )
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    problems += [] if [*dict.fromkeys(re.findall("CUDA_LAUNCH_BLOCKING=(.*)", log))] == ["None", "1"] else [log]
    assert not record_try(fault_table, "device assert", problems)


# --- late ------------------------------------------------------------------------------------------------------------

LATE = {
    "input": {"where": BATCH, "how": {"seconds": 0.05}},
    "compute": {
        "where": "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward", "how": {"seconds": 0.03}},
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("cause", LATE)
def test_a_straggler_is_named(cause: str, tmp_path: Path, fault_table: FaultTable) -> None:
    recipe = small_recipe(tmp_path, train__steps=48, checkpoint__every=None, export__at_end=False)
    ended = run_with(recipe, {**LATE[cause], "do": "sleep", "rank": 1, "times": None})
    stragglers = events(tmp_path / "run", "straggler")
    named = [event for event in stragglers if (event["rank"], event["cause"]) == (1, cause)]
    problems = ended.problems(0) + ([] if named and named == stragglers else [f"stragglers: {stragglers}"])
    problems += [f"cost {event['cost']}" for event in named if not 0.1 < event["cost"] < 1]
    assert not record_try(fault_table, f"straggler: {cause}", problems, lost="time")


# --- not finite ------------------------------------------------------------------------------------------------------

AT = 6  # the step that is not finite
LASTING = {
    "call": MICRO_BATCHES * (AT - 1) + 1,
    "at": "exit",
    "times": 2 * MICRO_BATCHES,
}  # also when the step is repeated
NANS: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({**LASTING, "where": LOSS, "do": "nan"}, r"the loss is nan on rank 1 \(samples \d+"),
    "gradient": ({**LASTING, "where": LOSS, "do": "nan_gradient"}, r"the gradient of \S+ on rank 1 \(samples \d+"),
    "once": ({"where": "fsdptrain.train.step:Engine.local_grads", "do": "nan", "at": "exit", "call": AT}, "hardware"),
}


def check_nan(name: str, tmp: Path) -> list[str]:
    """Run into a NaN on rank 1; return what is not as expected."""
    recipe, run = small_recipe(tmp), tmp / "run"
    fault, words = NANS[name]
    problems = run_with(recipe, {**fault, "rank": 1}).problems(7, f"step {AT}", words)
    problems += [] if valid_steps(run) == [AT - 4, AT - 2] else [f"checkpoints: {valid_steps(run)}"]
    problems += [] if last_step(run) == AT - 1 else [f"step {last_step(run)} was reported"]
    return problems + (["there is an export"] if (run / "export").exists() else [])


def test_a_loss_that_is_nan_on_one_rank_touches_nothing(tmp_path: Path, fault_table: FaultTable) -> None:
    problems = check_nan("loss", tmp_path)
    assert not record_try(fault_table, "NaN: loss", problems)


@pytest.mark.soak
@pytest.mark.parametrize("name", NANS)
def test_after_a_nan_the_run_resumes_from_the_checkpoint_before(
    name: str, reference: Path, tmp_path: Path, fault_table: FaultTable
) -> None:
    problems = check_nan(name, tmp_path)
    problems += run_with(tmp_path / "recipe.yaml").problems(0) + differences(tmp_path / "run", reference)
    assert not record_try(fault_table, f"NaN: {name}, then resumed", problems)


@pytest.mark.soak
@pytest.mark.parametrize(("bad", "code"), [(2, 0), (3, 7)])
def test_not_finite_steps_are_skipped_up_to_the_bound(
    bad: int, code: int, tmp_path: Path, fault_table: FaultTable
) -> None:
    recipe, run = small_recipe(tmp_path, train__on_nonfinite="skip", train__max_skipped=2), tmp_path / "run"
    ended = run_with(recipe, {**NANS["loss"][0], "rank": 1, "times": 2 * MICRO_BATCHES * bad})
    skipped = [event["step"] for event in events(run, "skip")]
    problems = ended.problems(code) + ([] if skipped[:2] == [AT, AT + 1] else [f"skipped: {skipped}"])
    assert not record_try(fault_table, f"NaN: {bad} steps in a row, 2 may be skipped", problems)


# --- full disk -------------------------------------------------------------------------------------------------------

DISK_MB = 12  # space for all that the run writes, with three checkpoints of 1 MB


@dataclass
class SmallDisk:
    """A file system of DISK_MB in its own mount namespace; `inside` and `outside` are its paths there and here."""

    inside: Path
    outside: Path
    prefix: list[str]

    def ballast(self, free: int) -> Path:
        """Fill the disk with one file until `free` bytes are free."""
        path = self.outside / "ballast"
        path.write_bytes(bytes(shutil.disk_usage(self.outside).free - free))
        return path

    def recipe(self, **changes: Any) -> Path:
        """Write the recipe of this suite with its run folder on the small disk."""
        return small_recipe(self.inside, output_dir=str(self.inside / "disk" / "run"), **changes)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Mount a small disk; skip if this machine does not allow it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = ["--mount"] if os.getuid() == 0 else ["--user", "--map-root-user", "--mount"]
    try:
        with holder(*flags, script=f"mount -t tmpfs -o size={DISK_MB}m none {disk}") as inside:
            yield SmallDisk(tmp_path, Path(f"/proc/{inside.pid}/root") / disk.relative_to("/"), inside.prefix)
    except PermissionError as error:
        pytest.skip(f"no file system may be mounted here: {error}")


def full_at(where: str, call: int, disk: SmallDisk) -> dict[str, Any]:
    """Return a fault in which another file takes all the space, at this call on rank 0."""
    path = str(disk.inside / "disk" / "ballast")
    return {"where": where, "do": "fill", "rank": 0, "call": call, "how": {"path": path},
            "mark": str(disk.inside / "filled")}  # fmt: skip


def resumes_with_space(disk: SmallDisk, recipe: Path, reference: Path) -> list[str]:
    """Free the space and run the same command; return what is not as expected."""
    (disk.outside / "ballast").unlink(missing_ok=True)
    return Running(recipe, prefix=disk.prefix).wait().problems(0) + differences(disk.outside / "run", reference)


def check_full(disk: SmallDisk, reference: Path, where: str, call: int, *words: str) -> tuple[list[str], float]:
    """Run into a full disk, free the space, resume; return what is not as expected, and the seconds to notice."""
    recipe, run = disk.recipe(), disk.outside / "run"
    ended = Running(recipe, full_at(where, call, disk), prefix=disk.prefix).wait()
    problems = ended.problems(6, "no space", *words)
    problems += [] if valid_steps(run) else ["no valid checkpoint"]
    problems += [f"{path} is left" for path in run.glob("checkpoints/*.tmp")]
    return problems + resumes_with_space(disk, recipe, reference), ended.notice


def test_a_disk_that_fills_up_costs_only_the_newest_checkpoint(
    reference: Path, small_disk: SmallDisk, fault_table: FaultTable
) -> None:
    problems, notice = check_full(small_disk, reference, "fsdptrain.checkpoint.nodes:check_space", 2, "needs", "has")
    assert not record_try(fault_table, "disk full before the second save", problems, [notice])


FILLINGS = {
    "in the second save": ("fsdptrain.checkpoint.save:write_shards", 2),
    "for metrics.jsonl": ("fsdptrain.run_folder.events:Reporter.event", 8),
    "at the export": ("fsdptrain.checkpoint.export_tensors:write_folder", 1),
}


@pytest.mark.soak
@pytest.mark.parametrize("when", FILLINGS)
def test_a_disk_that_is_full_at_any_moment_loses_nothing(
    when: str, reference: Path, small_disk: SmallDisk, fault_table: FaultTable
) -> None:
    problems, notice = check_full(small_disk, reference, *FILLINGS[when])
    assert not record_try(fault_table, f"disk full {when}", problems, [notice])


@pytest.mark.soak
def test_a_disk_without_space_for_two_checkpoints_is_refused_before_the_run(
    reference: Path, small_disk: SmallDisk, fault_table: FaultTable
) -> None:
    small_disk.ballast(free=2**20)
    recipe = small_disk.recipe()
    ended = Running(recipe, prefix=small_disk.prefix).wait()
    problems = ended.problems(6, "no space: needs .*, has .* on the disk of")
    problems += [f"step {step} was made" for step in curve(small_disk.outside / "run")]
    problems += resumes_with_space(small_disk, recipe, reference)
    assert not record_try(fault_table, "disk full before the run", problems)


def test_a_full_disk_of_temporary_files_is_named(small_disk: SmallDisk, tmp_path: Path) -> None:
    """Not even the file is written there in which the agent looks for the error of a rank."""
    small_disk.ballast(free=8192)
    temporary = str(small_disk.inside / "disk")
    recipe = small_recipe(tmp_path, train__steps=1, output_dir=str(tmp_path / "run"))
    ended = Running(recipe, prefix=small_disk.prefix, TMPDIR=temporary).wait()
    assert not ended.problems(6, f"no space: .* in {temporary}, for temporary files: .* set TMPDIR")


# --- two nodes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[list[Host]]:
    if why := hosts_missing():
        pytest.skip(why)
    folder = tmp_path / "hosts"
    folder.mkdir()
    with switched_hosts(folder, 2) as nodes:
        yield nodes


def recipe_of_two(tmp: Path, **changes: Any) -> Path:
    """Write the recipe of this suite for two nodes with one worker each."""
    return small_recipe(
        tmp, launch__nnodes=2, launch__nproc_per_node=1, launch__rdzv_endpoint="host-0:29400", launch__timeout_s=10,
        **changes,
    )  # fmt: skip


def check_nodes(nodes: list[Host], recipe: Path, **extra: str) -> tuple[int, dict[str, Any]]:
    """Run `validate --here` on every node; return the exit code and the facts, which are the same on all."""
    words = [sys.executable, "-m", "fsdptrain", "validate", str(recipe), "--here", "--json"]
    commands = [
        subprocess.Popen([*node.prefix, *words], stdout=subprocess.PIPE, text=True, env=environment(**extra))
        for node in nodes
    ]
    facts = [json.loads(command.communicate(timeout=180)[0]) for command in commands]
    assert facts[0] == facts[1] and commands[0].returncode == commands[1].returncode
    return commands[0].returncode, facts[0]


@pytest.mark.soak
def test_the_nodes_are_checked_before_a_run(tmp_path: Path, two_nodes: list[Host]) -> None:
    recipe = recipe_of_two(tmp_path)
    code, facts = check_nodes(two_nodes, recipe)
    assert (code, facts["problems"], facts["verdict"]) == (0, [], "2 nodes, 2 ranks: ready")
    for node in two_nodes:
        found = facts["nodes"][node.name]
        assert found["gloo"] == ["eth0", node.address] and found["between_bw"] > 1e6
    code, facts = check_nodes(two_nodes, recipe, GLOO_SOCKET_IFNAME="lo")
    assert code == 2 and "gloo of host-1 listens on lo (127.0.0.1)" in facts["problems"][1]
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["command", "agent", "self"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_process_killed_on_one_node_ends_both(
    victim: str, node: int, tmp_path: Path, two_nodes: list[Host], fault_table: FaultTable
) -> None:
    recipe, mark = recipe_of_two(tmp_path, train__steps=5000), tmp_path / "killed"
    fault = kill(UPDATE, rank=node, call=5, mark=mark, how={"to": victim})
    commands = [Running(recipe, fault, prefix=host.prefix) for host in two_nodes]
    ended = [command.wait() for command in commands]
    codes = [5, 5]
    codes[node] = -9 if victim == "command" else 5
    problems = [problem for each, code in zip(ended, codes, strict=True) for problem in each.problems(code, within=5.0)]
    what = {"self": "worker"}.get(victim, victim)
    assert not record_try(
        fault_table, f"{what} killed on node {node} of two", problems, [each.notice for each in ended]
    )


@pytest.mark.soak
@pytest.mark.parametrize(("do", "within"), [("send", MAX_MISSED + 10.0), ("fail", 10.0)])
def test_a_node_that_is_lost_before_it_connects_ends_the_others(
    do: str, within: float, tmp_path: Path, two_nodes: list[Host], fault_table: FaultTable
) -> None:
    way: dict[str, Any] = {"where": "fsdptrain.data.prepare:prepare", "rank": 1}
    faults = [
        {**way, "do": do, "mark": str(tmp_path / "lost")},
        {**way, "do": "sleep", "how": {"seconds": 5}, "mark": str(tmp_path / "slow")},
    ]
    recipe = recipe_of_two(tmp_path)
    commands = [Running(recipe, *faults, prefix=host.prefix) for host in two_nodes]
    other, lost = (command.wait() for command in commands)
    problems = lost.problems(5, "rank 1 (was killed|failed)") + other.problems(
        5, r"node 1 \(host-1\) stopped responding", within=within
    )
    assert not record_try(fault_table, f"node lost before the nodes met ({do})", problems, [other.notice])


# --- stopped ---------------------------------------------------------------------------------------------------------

STOPS: dict[str, dict[str, Any]] = {  # moment → the call in which the signal comes
    "tokenising": {"where": "fsdptrain.data.encode:Encoder.__call__"},
    "loading": {"where": "fsdptrain.model.skeleton:draw_weights"},
    "resuming": {"where": "fsdptrain.checkpoint.save:Checkpointer.load_newest"},
    "forward": {"where": "fsdptrain.parallel.shard:begin_micro_batch", "call": 7},
    "evaluation": {"where": "fsdptrain.train.step:Engine.evaluate", "call": 2},  # after some steps
    "saving": {"where": "fsdptrain.checkpoint.save:write_shards", "call": 2},
    "export": {"where": "fsdptrain.checkpoint.export_tensors:write_folder"},
}
LONG_ENOUGH_S = 1.0  # for the signal to arrive through the command


def stop_in(moment: str, name: str, mark: Path) -> list[dict[str, Any]]:
    """Return faults that send the command a signal at this moment, and sleep there until it has arrived."""
    where = {**STOPS[moment], "rank": 0, "mark": str(mark)}
    return [
        {**where, "do": "sleep", "how": {"seconds": LONG_ENOUGH_S}, "mark": f"{mark}-held"},
        {**where, "do": "send", "how": {"name": name, "to": "command"}},
    ]


SENT = [("SIGTERM", moment) for moment in STOPS]  # all signals take the same path
SENT += [(name, moment) for name in ("SIGINT", "SIGUSR1") for moment in ("forward", "evaluation")]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "moment"), SENT)
def test_a_stop_at_any_moment_loses_nothing(
    name: str, moment: str, whole_with_evaluation: Path, tmp_path: Path, fault_table: FaultTable
) -> None:
    recipe = small_recipe(tmp_path, **EVALUATED)
    if moment == "resuming":
        run_with(recipe, kill(UPDATE, rank=1, call=5))
    cache = tmp_path / "cache" if moment == "tokenising" else Path(os.environ["FSDPTRAIN_CACHE"])
    ended = run_with(recipe, *stop_in(moment, name, tmp_path / "stopped"), FSDPTRAIN_CACHE=str(cache))
    by = "Ctrl-C" if name == "SIGINT" else name
    problems = ended.problems(75, f"stopped by {by}", "run the same command to continue", within=15.0)
    saved, made = max(valid_steps(tmp_path / "run"), default=0), last_step(tmp_path / "run")
    killed = moment == "resuming"  # a step after the newest checkpoint, before the stop
    problems += [] if made - killed <= saved <= made else [f"of {made} steps, {saved} are in the newest checkpoint"]
    problems += ["no step was made before the stop"] if not made and moment not in ("tokenising", "loading") else []
    problems += run_with(recipe).problems(0) + differences(tmp_path / "run", whole_with_evaluation)
    assert not record_try(fault_table, f"{name} in {moment}", problems, [ended.notice])


@pytest.mark.soak
def test_a_second_signal_ends_at_once(reference: Path, tmp_path: Path, fault_table: FaultTable) -> None:
    recipe, mark = small_recipe(tmp_path), tmp_path / "stopped"
    where = {"where": UPDATE, "rank": 0, "call": 6}
    stop = {**where, "do": "send", "how": {"name": "SIGTERM", "to": "command"}}
    second = {**stop, "delay": 1.0, "mark": str(mark)}
    ended = run_with(recipe, {**where, "do": "sleep", "how": {"seconds": 3600}}, stop, second)
    problems = ended.problems(ended.code, within=5.0) + ([] if ended.code in (5, 75) else [f"exit code {ended.code}"])
    problems += [] if valid_steps(tmp_path / "run") else ["no checkpoint is left"]
    problems += run_with(recipe).problems(0) + differences(tmp_path / "run", reference)
    assert not record_try(fault_table, "a second SIGTERM", problems, [ended.notice])


@pytest.mark.soak
def test_a_stop_that_takes_too_long_is_killed(reference: Path, tmp_path: Path, fault_table: FaultTable) -> None:
    grace = 4
    recipe = small_recipe(tmp_path, launch__grace_s=grace)
    slow = {
        "where": "fsdptrain.checkpoint.save:write_shards",
        "do": "sleep",
        "rank": 1,
        "call": 3,
        "how": {"seconds": 3600},
    }
    stop = {"where": UPDATE, "rank": 0, "call": 6, "do": "send", "how": {"name": "SIGTERM", "to": "command"}}
    ended = run_with(recipe, slow, {**stop, "mark": str(tmp_path / "stopped")})
    problems = ended.problems(75, within=grace + 5.0)
    problems += [] if valid_steps(tmp_path / "run") else ["no checkpoint is left"]
    problems += run_with(recipe).problems(0) + differences(tmp_path / "run", reference)
    assert not record_try(fault_table, "a stop longer than launch.grace_s", problems, [ended.notice])


FINISHED = 50


@pytest.mark.soak
def test_a_finished_run_exits_0_every_time(tmp_path: Path, fault_table: FaultTable) -> None:
    codes = []
    for number in range(FINISHED):
        recipe = small_recipe(tmp_path / str(number), train__steps=2, data__path=str(tmp_path / "0" / "text.jsonl"))
        codes.append(fsdptrain("run", recipe).returncode)
    fault_table.add("none: a finished run exits 0", FINISHED, codes.count(0))
    assert codes == [0] * FINISHED


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_run_whose_folder_goes_away_ends_and_makes_no_other(how: str, tmp_path: Path) -> None:
    recipe, run, away = small_recipe(tmp_path, train__steps=10_000), tmp_path / "run", tmp_path / "away"
    running = Running(recipe)
    wait_for_step(run, 4)
    while not valid_steps(run):  # the first checkpoint may still be under way
        time.sleep(0.05)
    run.rename(away)
    if how == "removed":
        shutil.rmtree(away)
    ended = running.wait(60)
    messages = [f"run was renamed to {away}"]  # also if the run looks before it is removed
    if how == "removed":
        messages.append("run was removed while the run was using it")
    assert [] in [ended.problems(6, message) for message in messages], ended.output
    assert not run.exists()
    if how == "renamed":
        assert valid_steps(away)
    again = run_with(small_recipe(tmp_path, train__steps=4))
    assert again.problems(0) == []
