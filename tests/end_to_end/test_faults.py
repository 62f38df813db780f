"""Faults injected into real runs lose nothing; docs/faults.md lists them with what must hold.

After every fault the same command resumes, and its results are bitwise equal to those of an undisturbed run: the loss,
the gradient norm and the samples of every step, the last checkpoint, the export.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, switched_hosts
from hosts import missing as hosts_missing
from injection import EVERY, STEPS, Running, curve, differences, holder, last_step, run_with, small_recipe, valid_steps
from launch.test_launch import ASSERTED, DEVICE_ASSERT
from support import events, fsdptrain, wait_for_step, wait_until

from fsdptrain.failures.watchdog import MAX_MISSED

SEED = int(os.environ.get("FSDPTRAIN_FAULT_SEED", "20261120"))
LOSS, UPDATE = "fsdptrain.train.step:Engine.loss", "fsdptrain.train.step:Engine.update"
BATCH = "fsdptrain.data.corpus:batch_of"  # of a stream and of held-out rows
WRITE, SAVE = "fsdptrain.checkpoint.save:write_shards", "fsdptrain.checkpoint.save:Checkpointer.save"
PUBLISH = "fsdptrain.run_folder.storage:CheckpointStorage.publish"
REMOVE_OLD = "fsdptrain.checkpoint.save:remove_old_checkpoints"
WRITE_FOLDER = "fsdptrain.checkpoint.export_tensors:write_folder"
MLP = "transformers.models.llama.modeling_llama:LlamaMLP.forward"
MICRO_BATCHES = 2  # of a rank in a step
EVALUATED: Any = {"data__eval": {"fraction": 0.1}, "eval__every": 3}  # not a step with a checkpoint
RESTARTS: Any = {"launch__max_restarts": 5}
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("reference")
    assert not run_with(small_recipe(tmp)).problems(0, f"{STEPS} steps in")
    return tmp / "run"


@pytest.fixture(scope="module")
def whole_with_evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("evaluated")
    assert not run_with(small_recipe(tmp, **EVALUATED)).problems(0)
    return tmp / "run"


@pytest.fixture(scope="module")
def whole_on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("four")
    assert not run_with(small_recipe(tmp, **FOUR)).problems(0)
    return tmp / "run"


def resume_problems(tmp: Path, reference: Path) -> list[str]:
    """Run the same command again without faults; return where its results are not those of an undisturbed run."""
    return run_with(tmp / "recipe.yaml").problems(0) + differences(tmp / "run", reference)


def kill(where: str, rank: int, call: int, **more: Any) -> dict[str, Any]:
    return {"where": where, "do": "send", "rank": rank, "call": call, **more}


def sleep(where: str, call: int = 1, seconds: float = 3600, **more: Any) -> dict[str, Any]:
    return {"where": where, "do": "sleep", "rank": 1, "call": call, "how": {"seconds": seconds}, **more}


def always(where: str, do: str, call: int, **more: Any) -> dict[str, Any]:
    return {"where": where, "do": do, "call": call, "times": None, **more}


# --- one fault, one end ----------------------------------------------------------------------------------------------


@dataclass
class Case:
    code: int
    faults: list[dict[str, Any]]
    words: list[str] = field(default_factory=list)  # patterns in the output
    never: str = ""  # a text that is not in the output
    changes: dict[str, Any] = field(default_factory=dict)  # of the recipe
    within: float | None = None  # seconds from the first fault to the end
    resumes: str = ""  # the fixture of the run as which it then ends


CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 1.20 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def out_of_memory(where: str, moment: str) -> Case:
    """Return a case in which rank 1 has no memory: the moment, the forecast and what would fit are shown."""
    how = {"error": "torch:OutOfMemoryError", "text": CUDA_OOM}
    request = r"Tried to allocate 2.00 GiB\..* 1.20 GiB is free\.\n"
    words = [
        rf"rank 1 failed (after|before) .*step.*: out of memory in {moment}.*{request}",
        r"forecast: \S+ \S+ of \S+ \S+, the peak in",
        r"these overrides need less:\n +fsdp.activation_checkpointing=full +\(.* s a step\)",
    ]
    return Case(5, [{"where": where, "do": "fail", "rank": 1, "call": 9, "how": how}], words, "restart ", RESTARTS)


HANG_S = 8  # launch.timeout_s
STOPPED: Any = {"do": "send", "how": {"name": "SIGSTOP"}}
RESUMED: Any = {"resumes": "whole_with_evaluation", **EVALUATED}
FOUR: Any = {"launch__nproc_per_node": 4, "train__global_batch_size": 8}


def hang(
    fault: dict[str, Any], *words: str, beside: list[Any] | None = None, resumes: str = "", **changes: Any
) -> Case:
    changes = {"launch__timeout_s": HANG_S, **changes}
    return Case(5, [fault, *(beside or [])], [*words], "", changes, HANG_S + 10, resumes)


CASES = {
    "dies_every_time_given_up_after_two_restarts": Case(
        5, [kill(UPDATE, 1, 1, times=1)], ["restart 2 of 5"], "restart 3", RESTARTS
    ),
    "internal_error": Case(5, [always(UPDATE, "fail", 3, rank=0)], [], "restart ", RESTARTS),
    "nan": Case(7, [always(LOSS, "nan", 5, rank=1, at="exit")], [], "restart ", RESTARTS),
    "bad_data": Case(
        4, [always(BATCH, "fail", 5, how={"error": "fsdptrain.errors:DataError"})], [], "restart ", RESTARTS
    ),
    "never_leaves_the_process_group": Case(
        5,
        [sleep("torch.distributed:destroy_process_group")],
        ["the run hung after step 12: .*rank 1 is in worker.leave_group"],
        changes={"launch__timeout_s": 4},
    ),
    "hangs_in_the_data": hang(
        sleep(BATCH, call=7),
        "rank 0 waits in",
        "rank 1 is in corpus.batch",
        r"; rank 1 never entered all-gather #\d+ of model\.\w+",
    ),
    # The save that was begun before the step waits for the rank as well, and earlier: rank 0 is late.
    "stopped_in_a_step": hang(
        {**sleep(LOSS, 5), **STOPPED},
        "rank 1 does not respond",
        r"the other ranks wait for rank 1 in all-gather #\d+ of model\.\w+",
        beside=[sleep(LOSS, 5, seconds=1, rank=0)],
    ),
    "stopped_by_sigstop": hang({**sleep(UPDATE, 5), **STOPPED}, "rank 1", **RESUMED),
    "in_c_holding_the_gil": hang(sleep(UPDATE, 5, how={"seconds": 3600, "holding_the_gil": True}), "rank 1", **RESUMED),
    "hangs_in_the_evaluation": hang(sleep("fsdptrain.train.step:Engine.evaluate", call=2), "rank 1", **RESUMED),
    "hangs_in_the_export": hang(
        sleep("fsdptrain.checkpoint.export_tensors:names_by_decoder_layer"), "rank 1", **RESUMED
    ),
    "hangs_among_four_ranks": hang(
        sleep(BATCH, call=5),
        "ranks 0, 2 and 3 wait in all-gather",
        "rank 1 is in corpus.batch",
        resumes="whole_on_four_ranks",
        **FOUR,
    ),
    "out_of_memory_in_forward": out_of_memory(MLP, r"the forward of model\.layers\.\d"),
    "out_of_memory_in_backward": out_of_memory(
        "fsdptrain.parallel.shard:_GlooReduceScatter.__call__", "the backward, after the reduction of "
    ),
}
IN_DEFAULT = ("out_of_memory_in_forward", "hangs_in_the_data")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_DEFAULT else soak) for name in CASES])
def test_a_fault_ends_the_run_with_its_code_and_message(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case, first = CASES[name], {"mark": str(tmp_path / "happened")} if CASES[name].within else {}
    ended = run_with(small_recipe(tmp_path, **case.changes), case.faults[0] | first, *case.faults[1:])
    assert ended.problems(case.code, *case.words, within=case.within) == []
    assert not case.never or case.never not in ended.output
    assert not case.resumes or resume_problems(tmp_path, request.getfixturevalue(case.resumes)) == []


def test_a_device_assert_is_repeated_once_with_blocking_launches(tmp_path: Path) -> None:
    abort = {"where": MLP, "do": "abort", "rank": 1, "call": 9, "mark": str(tmp_path / "aborted")}
    abort["how"] = {"text": f"{ASSERTED}\nterminate called after throwing …\n  what():  … exception: {DEVICE_ASSERT}\n"}
    # With blocking launches Python reports the assert, where it happens.
    again = {"where": MLP, "do": "fail", "rank": 1, "call": 9}
    again["how"] = {"error": "torch:AcceleratorError", "text": DEVICE_ASSERT}
    printed = {"where": MLP, "do": "printenv", "rank": 1, "call": 8, "how": {"name": "CUDA_LAUNCH_BLOCKING"}}
    ended = run_with(small_recipe(tmp_path), again, printed, abort)  # the last one acts first
    problems = ended.problems(
        5,
        rf"rank 1 failed .*step.*: a kernel failed on the GPU; .*{re.escape(ASSERTED)}\n.*{DEVICE_ASSERT}\n",
        r"repeating it once with CUDA_LAUNCH_BLOCKING=1",
        rf"rank 1 failed .*: a kernel failed on the GPU; .*: {DEVICE_ASSERT}\n.*faults/sitecustomize.py.*\n",
    )
    assert problems == []
    log = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert [*dict.fromkeys(re.findall("CUDA_LAUNCH_BLOCKING=(.*)", log))] == ["None", "1"]


# --- killed ----------------------------------------------------------------------------------------------------------


def test_a_worker_killed_while_it_writes_is_named_and_restarted(reference: Path, tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path, launch__max_restarts=1), tmp_path / "run"
    ended = run_with(recipe, kill(WRITE, rank=1, call=3, mark=str(tmp_path / "killed")))
    assert ended.problems(0, r"rank 1 was killed by SIGKILL.* after step \d", "restart 1 of 1") == []
    assert differences(run, reference) == []
    assert events(run, "resume")[-1]["step"] >= EVERY, "it started again at step 0"
    assert [[record[name] for name in ("attempt", "restart", "of")] for record in events(run, "restart")] == [[1, 1, 1]]


@soak
def test_a_run_killed_twice_finishes_in_one_command(reference: Path, tmp_path: Path) -> None:
    marks = [str(tmp_path / name) for name in ("first", "second")]
    kills = [kill(UPDATE, 1, 3, mark=marks[0]), kill(UPDATE, 0, 5, mark=marks[1])]
    ended = run_with(small_recipe(tmp_path, **RESTARTS), *kills)
    assert ended.problems(0, "rank 1 was killed", "rank 0 was killed", "restart 2 of 5") == []
    assert differences(tmp_path / "run", reference) == []


PHASES: dict[str, list[dict[str, Any]]] = {  # kinds of kills; `call` is the first and last in which they come
    "forward": [{"where": LOSS, "call": (5, 12), "delay": 0.02}],
    "backward": [{"where": "torch:Tensor.backward", "call": (5, 12), "delay": 0.02}],
    "update": [
        {"where": UPDATE, "call": (3, 6), "delay": 0.005},
        {"where": UPDATE, "call": (3, 6)},
        {"where": UPDATE, "call": (3, 6), "at": "exit"},
    ],
    "staging": [{"where": SAVE, "call": (2, 3), "delay": 0.005}, {"where": SAVE, "call": (2, 3), "at": "exit"}],
    "writing": [
        {"where": WRITE, "call": (2, 3)},
        {"where": WRITE, "call": (2, 3), "delay": 0.005},
        {"where": WRITE, "call": (2, 3), "at": "exit"},
    ],
    "commit": [
        {"where": PUBLISH, "rank": 0, "call": (2, 3)},
        {"where": PUBLISH, "rank": 0, "call": (2, 3), "at": "exit"},
        {"where": "os:rename", "rank": 0, "call": (2, 3), "match": ".tmp"},
        {"where": "os:rename", "rank": 0, "call": (2, 3), "match": ".tmp", "at": "exit"},
    ],
    "retention": [
        {"where": REMOVE_OLD, "rank": 0, "call": (2, 3)},
        {"where": "os:rename", "rank": 0, "call": (1, 1), "match": ".old", "at": "exit"},
        {"where": "os:unlink", "rank": 0, "call": (1, 2), "match": "safetensors", "at": "exit"},
        {"where": REMOVE_OLD, "rank": 0, "call": (2, 3), "at": "exit"},
    ],
}
KILLS_A_PHASE = 8


def random_kills(seed: int) -> list[dict[str, Any]]:
    """Return KILLS_A_PHASE kills of each phase in random order: its kinds in turn, at random calls and ranks."""
    chance = random.Random(seed)
    kills = []
    for kinds in PHASES.values():
        for number in range(KILLS_A_PHASE):
            kind = dict(kinds[number % len(kinds)])
            first, last = kind.pop("call")
            rank = kind.pop("rank", chance.randrange(2))
            delay = chance.uniform(0, kind.pop("delay", 0.0))
            kills.append(kill(**kind, rank=rank, call=chance.randint(first, last), delay=delay))
    chance.shuffle(kills)
    return kills


@soak
def test_workers_killed_at_any_moment_lose_nothing(tmp_path: Path) -> None:
    print(f"FSDPTRAIN_FAULT_SEED={SEED}")
    kills = random_kills(SEED)
    steps = 6 * len(kills)  # more than the runs train until their kills
    whole = small_recipe(tmp_path / "whole", train__steps=steps, checkpoint__every=None)
    problems = run_with(whole).problems(0)
    recipe, run = small_recipe(tmp_path / "killed", train__steps=steps), tmp_path / "killed" / "run"
    for number, fault in enumerate(kills):
        before = max(valid_steps(run), default=0)
        ended = run_with(recipe, {**fault, "mark": str(tmp_path / f"kill-{number}")})
        valid = max(valid_steps(run), default=0)
        # What a kill in the retention has left is removed at the next start, where the same kill then strikes.
        where = r"(after step \d|before the first step)"
        found = ended.problems(5, rf"rank {fault['rank']} was killed by SIGKILL.* {where}", within=5.0)
        found += [] if valid >= before else [f"a checkpoint of step {before} was there, now the newest is {valid}"]
        found += [] if last_step(run) <= valid + 2 * EVERY else [f"too many steps lost: the newest is {valid}"]
        problems += [f"{fault}: {problem}" for problem in found]
    problems += resume_problems(recipe.parent, whole.parent / "run")
    assert not problems, "\n".join(problems)


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


@soak
def test_a_worker_that_the_kernel_kills_for_full_memory_is_restarted_once(tmp_path: Path, small_cgroup: Path) -> None:
    fault = {"where": UPDATE, "do": "exceed_memory", "rank": 1, "call": 3, "how": {"cgroup": str(small_cgroup)}}
    ended = run_with(small_recipe(tmp_path, **RESTARTS), fault)
    full = "rank 1 was killed by the kernel after step .*, because the memory of its host was full"
    gave_up = "gave up: a worker was killed for full memory a second time"
    assert ended.problems(5, full, "restart 1 of 5", gave_up) == []
    assert "restart 2" not in ended.output


# --- late ------------------------------------------------------------------------------------------------------------

LATE = {
    "input": sleep(BATCH, seconds=0.05, times=None),
    "compute": sleep("transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward", seconds=0.03, times=None),
}


@soak
@pytest.mark.parametrize("cause", LATE)
def test_a_straggler_is_named(cause: str, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=48, checkpoint__every=None, export__at_end=False)
    assert run_with(recipe, LATE[cause]).problems(0) == []
    stragglers = events(tmp_path / "run", "straggler")
    assert {(event["rank"], event["cause"]) for event in stragglers} == {(1, cause)}
    assert all(0.1 < event["cost"] < 1 for event in stragglers)


# --- not finite ------------------------------------------------------------------------------------------------------

AT = 6  # the step that is not finite
LASTING = {"call": MICRO_BATCHES * (AT - 1) + 1, "times": 2 * MICRO_BATCHES}  # also when the step is repeated
NANS: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({**LASTING, "where": LOSS, "do": "nan"}, r"the loss is nan on rank 1 \(samples \d+"),
    "gradient": ({**LASTING, "where": LOSS, "do": "nan_gradient"}, r"the gradient of \S+ on rank 1 \(samples \d+"),
    "once": ({"where": "fsdptrain.train.step:Engine.local_grads", "do": "nan", "call": AT}, "hardware"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "loss" else soak) for name in NANS])
def test_a_nan_on_one_rank_touches_nothing_and_the_run_resumes(name: str, reference: Path, tmp_path: Path) -> None:
    fault, words = NANS[name]
    ended = run_with(small_recipe(tmp_path), {**fault, "rank": 1, "at": "exit"})
    assert ended.problems(7, f"step {AT}", words) == []
    run = tmp_path / "run"
    assert (valid_steps(run), last_step(run)) == ([AT - 4, AT - 2], AT - 1)
    assert not (run / "export").exists()
    assert resume_problems(tmp_path, reference) == []


@soak
@pytest.mark.parametrize(("bad", "code"), [(2, 0), (3, 7)])
def test_not_finite_steps_are_skipped_up_to_the_bound(bad: int, code: int, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__on_nonfinite="skip", train__max_skipped=2)
    ended = run_with(recipe, {**NANS["loss"][0], "rank": 1, "at": "exit", "times": 2 * MICRO_BATCHES * bad})
    assert ended.problems(code) == []
    assert [event["step"] for event in events(tmp_path / "run", "skip")][:2] == [AT, AT + 1]


# --- full disk -------------------------------------------------------------------------------------------------------

DISK_MB = 12  # space for all that the run writes, with three checkpoints of 1 MB


@dataclass
class SmallDisk:
    """A file system of DISK_MB in its own mount namespace; `inside` and `outside` are its paths there and here."""

    inside: Path
    outside: Path
    prefix: list[str]

    def fill(self, free: int) -> None:
        (self.outside / "ballast").write_bytes(bytes(shutil.disk_usage(self.outside).free - free))

    def recipe(self) -> Path:
        return small_recipe(self.inside.parent, output_dir=str(self.inside / "run"))

    def resume_problems(self, recipe: Path, reference: Path) -> list[str]:
        """Free the space and run the same command; return what is not as expected."""
        (self.outside / "ballast").unlink(missing_ok=True)
        return Running(recipe, prefix=self.prefix).wait().problems(0) + differences(self.outside / "run", reference)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = ["--mount"] if os.getuid() == 0 else ["--user", "--map-root-user", "--mount"]
    try:
        with holder(*flags, script=f"mount -t tmpfs -o size={DISK_MB}m none {disk}") as inside:
            yield SmallDisk(disk, Path(f"/proc/{inside.pid}/root") / disk.relative_to("/"), inside.prefix)
    except PermissionError as error:
        pytest.skip(f"no file system may be mounted here: {error}")


FILLINGS = {  # when → the call on rank 0 at which another file takes all the space, and what is said besides
    "before_the_second_save": ("fsdptrain.checkpoint.nodes:check_space", 2, ["needs", "has"]),
    "in_the_second_save": (WRITE, 2, []),
    "for_metrics.jsonl": ("fsdptrain.run_folder.events:Reporter.event", 8, []),
    "at_the_export": (WRITE_FOLDER, 1, []),
}


@soak
@pytest.mark.parametrize("when", FILLINGS)
def test_a_disk_that_is_full_at_any_moment_loses_nothing(when: str, reference: Path, small_disk: SmallDisk) -> None:
    where, call, words = FILLINGS[when]
    fault = {"where": where, "do": "fill", "rank": 0, "call": call, "how": {"path": str(small_disk.inside / "ballast")}}
    recipe, run = small_disk.recipe(), small_disk.outside / "run"
    ended = Running(recipe, fault, prefix=small_disk.prefix).wait()
    assert ended.problems(6, "no space", *words) == []
    assert valid_steps(run) and not [*run.glob("checkpoints/*.tmp")]
    assert small_disk.resume_problems(recipe, reference) == []


@soak
def test_a_disk_without_space_for_two_checkpoints_is_refused_before_the_run(
    reference: Path, small_disk: SmallDisk
) -> None:
    small_disk.fill(free=2**20)
    recipe = small_disk.recipe()
    ended = Running(recipe, prefix=small_disk.prefix).wait()
    assert ended.problems(6, "no space: needs .*, has .* on the disk of") == []
    assert curve(small_disk.outside / "run") == {}
    assert small_disk.resume_problems(recipe, reference) == []


def test_a_full_disk_of_temporary_files_is_named(small_disk: SmallDisk, tmp_path: Path) -> None:
    """Not even the file is written there in which the agent looks for the error of a rank."""
    small_disk.fill(free=8192)
    temporary = str(small_disk.inside)
    ended = Running(small_recipe(tmp_path, train__steps=1), prefix=small_disk.prefix, TMPDIR=temporary).wait()
    assert not ended.problems(6, f"no space: .*{temporary}")


# --- two nodes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[list[Host]]:
    if why := hosts_missing():
        pytest.skip(why)
    folder = tmp_path / "hosts"
    folder.mkdir()
    with switched_hosts(folder, 2) as nodes:
        yield nodes


@soak
@pytest.mark.parametrize(("do", "within"), [("send", MAX_MISSED + 10.0), ("fail", 10.0)])
def test_a_node_that_is_lost_before_it_connects_ends_the_others(
    do: str, within: float, tmp_path: Path, two_nodes: list[Host]
) -> None:
    way = "fsdptrain.data.prepare:prepare"
    faults = [
        {"where": way, "rank": 1, "do": do, "mark": str(tmp_path / "lost")},
        sleep(way, seconds=5, mark=str(tmp_path / "slow")),
    ]
    two = {"nnodes": 2, "nproc_per_node": 1, "rdzv_endpoint": "host-0:29400", "timeout_s": 10}
    recipe = small_recipe(tmp_path, launch=two)
    commands = [Running(recipe, *faults, prefix=host.prefix) for host in two_nodes]
    other, lost = (command.wait() for command in commands)
    assert lost.problems(5, "rank 1 (was killed|failed)") == []
    assert other.problems(5, r"node 1 \(host-1\) stopped responding", within=within) == []


# --- stopped ---------------------------------------------------------------------------------------------------------

STOPS: dict[str, dict[str, Any]] = {  # moment → the call in which the signal comes
    "tokenising": {"where": "fsdptrain.data.encode:Encoder.__call__"},
    "loading": {"where": "fsdptrain.train.setup:draw_weights"},
    "resuming": {"where": "fsdptrain.checkpoint.save:Checkpointer.load_newest"},
    "forward": {"where": "fsdptrain.train.step:begin_backward", "call": 7},
    "evaluation": {"where": "fsdptrain.train.step:Engine.evaluate", "call": 2},  # after some steps
    "saving": {"where": WRITE, "call": 2},
    "export": {"where": WRITE_FOLDER},
}
LONG_ENOUGH_S = 1.0  # for the signal to arrive through the command
SENT = [("SIGTERM", moment) for moment in STOPS]  # all signals take the same path
SENT += [(name, moment) for name in ("SIGINT", "SIGUSR1") for moment in ("forward", "evaluation")]


def stop(where: dict[str, Any], mark: Path, name: str = "SIGTERM", **more: Any) -> dict[str, Any]:
    return {**where, "rank": 0, "do": "send", "how": {"name": name, "to": "command"}, "mark": str(mark), **more}


@soak
@pytest.mark.parametrize(("name", "moment"), SENT)
def test_a_stop_at_any_moment_loses_nothing(
    name: str, moment: str, whole_with_evaluation: Path, tmp_path: Path
) -> None:
    recipe, where, mark = small_recipe(tmp_path, **EVALUATED), STOPS[moment], tmp_path / "stopped"
    if moment == "resuming":
        run_with(recipe, kill(UPDATE, rank=1, call=5))
    cache = tmp_path / "cache" if moment == "tokenising" else Path(os.environ["FSDPTRAIN_CACHE"])
    held = {**where, "rank": 0, "do": "sleep", "how": {"seconds": LONG_ENOUGH_S}, "mark": f"{mark}-held"}
    ended = run_with(recipe, held, stop(where, mark, name), FSDPTRAIN_CACHE=str(cache))
    by = "Ctrl-C" if name == "SIGINT" else name
    assert ended.problems(75, f"stopped by {by}", "run the same command to continue", within=15.0) == []
    saved, made = max(valid_steps(tmp_path / "run"), default=0), last_step(tmp_path / "run")
    killed = moment == "resuming"  # a step after the newest checkpoint, before the stop
    assert made - killed <= saved <= made, "the newest checkpoint is not that of the last step"
    assert made or moment in ("tokenising", "loading"), "no step was made before the stop"
    assert resume_problems(tmp_path, whole_with_evaluation) == []


@soak
def test_a_second_signal_ends_at_once(reference: Path, tmp_path: Path) -> None:
    where = {"where": UPDATE, "call": 6}
    faults = [sleep(UPDATE, 6, rank=0), stop(where, tmp_path / "first"), stop(where, tmp_path / "stopped", delay=1.0)]
    ended = run_with(small_recipe(tmp_path), *faults)
    assert ended.code in (5, 75)
    assert ended.problems(ended.code, within=5.0) == []
    assert valid_steps(tmp_path / "run")
    assert resume_problems(tmp_path, reference) == []


@soak
def test_a_stop_that_takes_too_long_is_killed(reference: Path, tmp_path: Path) -> None:
    grace = 4
    recipe = small_recipe(tmp_path, launch__grace_s=grace)
    ended = run_with(recipe, sleep(WRITE, 3), stop({"where": UPDATE, "call": 6}, tmp_path / "stopped"))
    assert ended.problems(75, within=grace + 5.0) == []
    assert valid_steps(tmp_path / "run")
    assert resume_problems(tmp_path, reference) == []


@soak
def test_a_finished_run_exits_0_every_time(tmp_path: Path) -> None:
    for number in range(50):
        recipe = small_recipe(tmp_path / str(number), train__steps=2, data__path=str(tmp_path / "0" / "text.jsonl"))
        assert fsdptrain("run", recipe).returncode == 0


@pytest.mark.parametrize("how", [pytest.param("removed", marks=soak), "renamed"])
def test_a_run_whose_folder_goes_away_ends_and_makes_no_other(how: str, tmp_path: Path) -> None:
    recipe, run, away = small_recipe(tmp_path, train__steps=10_000), tmp_path / "run", tmp_path / "away"
    running = Running(recipe)
    wait_for_step(run, 4)
    wait_until(lambda: valid_steps(run), "no checkpoint")  # the first may still be under way
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
    else:
        assert run_with(small_recipe(tmp_path, train__steps=4)).problems(0) == []
