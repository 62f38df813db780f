"""Runs on two to four hosts with a switch between them: the curve, the bytes on the link, what clusters do to runs.

After every fault the same command on the same hosts resumes, and the run is bitwise equal to an undisturbed one.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hosts import Host, call, missing, switched_hosts
from injection import SMALL, curve, differences, last_step, small_recipe
from support import TESTS, environment, events, fsdptrain, python_path, send_all

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing())]

TIMEOUT_S = 10  # launch.timeout_s
MODEL = {"model_type": "llama", **SMALL, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with switched_hosts(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


@pytest.fixture(autouse=True)
def as_before(hosts: list[Host]) -> Iterator[None]:
    """Leave the hosts to the next test without processes and connected, also if a test fails."""
    yield
    for host in hosts:
        host.signal("SIGKILL")
        host.connect()


@pytest.fixture(scope="module")
def whole(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on both hosts that nothing disturbed."""
    tmp = tmp_path_factory.mktemp("whole")
    assert Job(hosts, recipe_of_two(tmp)).wait().codes == [0, 0]
    return tmp / "run"


@pytest.fixture(scope="module")
def more_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with switched_hosts(tmp_path_factory.mktemp("more_hosts"), 4) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in one process, of a batch that three and four ranks can share."""
    tmp = tmp_path_factory.mktemp("alone")
    recipe = small_recipe(tmp, model__config=MODEL, launch__nproc_per_node=1, train__global_batch_size=12)
    done = fsdptrain("run", recipe)
    assert done.returncode == 0, done.stderr
    return tmp / "run"


def recipe_of_two(tmp: Path, **changes: Any) -> Path:
    """Write the recipe of the fault tests, for two hosts with two workers each unless `changes` say more."""
    usual: dict[str, Any] = {
        "model__config": MODEL, "fsdp__strategy": "HYBRID_SHARD", "launch__nnodes": 2, "launch__nproc_per_node": 2,
        "launch__rdzv_endpoint": "host-0:29400", "launch__timeout_s": TIMEOUT_S,
    }  # fmt: skip
    return small_recipe(tmp, **usual | changes)


@dataclass
class Job:
    """The command on every host, each with caches of its own; `texts`, `codes` and `seconds` when it has ended."""

    hosts: list[Host]
    recipe: Path
    faults: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = self.recipe.parent / "run"
        self.fault_at = time.monotonic()
        attempt = len([*self.recipe.parent.glob("*.out")])
        self._logs = [self.recipe.parent / f"{host.name}-{attempt}.out" for host in self.hosts]
        self._commands = [self._start(*each) for each in zip(self.hosts, self._logs, strict=True)]

    def _start(self, host: Host, log: Path) -> subprocess.Popen[bytes]:
        env = environment(
            FSDPTRAIN_CACHE=str(host.local / "cache"), TMPDIR=str(host.local), FSDPTRAIN_FAULTS=json.dumps(self.faults),
            PYTHONPATH=python_path(TESTS / "faults"),
        )  # fmt: skip
        command = [*host.prefix, sys.executable, "-m", "fsdptrain", "run", str(self.recipe)]
        with log.open("w") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=env)

    def start_again(self, number: int) -> None:
        """Start the command of a host again, after it was killed."""
        self._commands[number].wait()
        self._logs[number] = self._logs[number].with_suffix(".again.out")
        self._commands[number] = self._start(self.hosts[number], self._logs[number])

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        self.wait_until(lambda: last_step(self.run) >= step, timeout)

    def wait_until(self, happened: Callable[[], bool], timeout: float = 240) -> None:
        end = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < end and None in [command.poll() for command in self._commands], self.texts
            time.sleep(0.05)

    def after(self, step: int, fault: Callable[[], object]) -> Job:
        """Make a fault happen when this step was reported."""
        self.wait_for_step(step)
        self.fault_at = time.monotonic()
        fault()
        return self

    def wait(self, timeout: float = 240) -> Job:
        """Wait until no process of the job is left on any host; kill what is left after `timeout`."""
        ended: dict[str, float] = {}
        while len(ended) < len(self.hosts) and time.monotonic() < self.fault_at + timeout:
            for host, command in zip(self.hosts, self._commands, strict=True):
                if host.name not in ended and command.poll() is not None and not host.processes():
                    ended[host.name] = time.monotonic() - self.fault_at
            time.sleep(0.05)
        for host in self.hosts:
            host.signal("SIGKILL")
        self.codes = [command.wait() for command in self._commands]
        self.seconds = [ended.get(host.name, float("inf")) for host in self.hosts]
        return self

    def thaw(self, number: int) -> None:
        """Let the processes of a host continue that were stopped; `nsenter` stops and continues with its command."""
        self.hosts[number].signal("SIGCONT")
        self._commands[number].send_signal(signal.SIGCONT)

    @property
    def texts(self) -> list[str]:
        """What the command printed on each host."""
        return [log.read_text() for log in self._logs]

    @property
    def verdicts(self) -> list[str]:
        """The error of the command on each host."""
        return [text.partition("\nfsdptrain: ")[2].strip() for text in self.texts]


# --- undisturbed -----------------------------------------------------------------------------------------------------


def test_two_hosts_train_the_curve_of_one_process(whole: Path, tmp_path: Path) -> None:
    alone = small_recipe(tmp_path, model__config=MODEL, launch__nproc_per_node=1)
    done = fsdptrain("run", alone)
    assert done.returncode == 0, done.stderr
    for one, two in zip(events(tmp_path / "run", "step"), events(whole, "step"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5) and two["samples"] == one["samples"]


def test_the_ranks_of_a_host_share_a_copy_and_each_host_has_its_own_caches(hosts: list[Host], whole: Path) -> None:
    plan = json.loads((whole / "plan.json").read_text())
    assert (plan["topology"]["nnodes"], plan["replicas"], plan["shard_size"]) == (2, 2, 2)
    for n, host in enumerate(hosts):
        logs = [(whole / f"logs/rank-{rank}.log").read_text() for rank in (2 * n, 2 * n + 1)]
        assert all(f"gloo listens on eth0 ({host.address})" in log for log in logs)
        assert [*(host.own / "cache" / "data").iterdir()], f"{host.name} has prepared no data"


BYTES_LIMIT = 0.01  # how far the bytes on the link may be from the forecast


def compare_bytes(sharding: str, hosts: list[Host], tmp: Path, **changes: Any) -> Path:
    """Compare what each host sends with the forecast; return the folder of the longer of two runs.

    The difference of runs of 6 and of 18 steps is 12 steps, without start, checkpoint and export.
    """
    sent, few, many = [], 6, 18
    for steps in (few, many):
        before = [host.sent() for host in hosts]
        recipe = recipe_of_two(tmp / str(steps), train__steps=steps, checkpoint__every=None, **changes)
        job = Job(hosts, recipe).wait()
        assert job.codes == [0] * len(hosts), job.texts
        sent.append([host.sent().payload_since(then) for host, then in zip(hosts, before, strict=True)])
    forecast = json.loads(call(*hosts[0].prefix, sys.executable, "-m", "fsdptrain", "validate", recipe, "--json"))
    workers = json.loads((job.run / "plan.json").read_text())["topology"]["nproc_per_node"]
    expected = workers * sum(each["wire"] for each in forecast["collectives"] if each["nodes"] > 1)
    measured = [(other - one) / (many - few) for one, other in zip(*sent, strict=True)]
    for host, size in zip(hosts, measured, strict=True):
        print(f"{sharding}, {host.name}: {size:,.0f} bytes a step, forecast {expected:,} ({size / expected - 1:+.2%})")
    assert all(abs(size / expected - 1) < BYTES_LIMIT for size in measured)
    return job.run


def test_the_bytes_on_the_link_are_those_of_the_forecast(hosts: list[Host], tmp_path: Path) -> None:
    compare_bytes("HYBRID_SHARD 2×2", hosts, tmp_path)


@pytest.mark.parametrize(
    ("sharding", "count", "changes"),
    [
        ("FULL_SHARD 3×1", 3, {"fsdp__strategy": "FULL_SHARD"}),
        ("HYBRID_SHARD 4×1, shard_size 2", 4, {"fsdp__shard_size": 2}),  # each copy is on two hosts
    ],
)
def test_three_and_four_hosts(
    sharding: str, count: int, changes: Any, more_hosts: list[Host], alone: Path, tmp_path: Path
) -> None:
    size = {"launch__nnodes": count, "launch__nproc_per_node": 1, "train__global_batch_size": 12}
    run = compare_bytes(sharding, more_hosts[:count], tmp_path, **size, **changes)
    several = events(run, "step")
    for one, other in zip(events(alone, "step"), several, strict=False):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5) and other["samples"] == one["samples"]


# --- disturbed -------------------------------------------------------------------------------------------------------

PACE = {"where": "fsdptrain.data.corpus:batch_of", "do": "sleep", "rank": 0, "times": None, "how": {"seconds": 0.2}}
AT_STEP = 5  # when the faults happen
ANY_TIME = float("inf")


def problems(job: Job, fault: str, codes: list[int], *words: str, within: float = 2 * TIMEOUT_S) -> list[str]:
    """Print how a job ended; return what is not as expected. `words` are a pattern for each host."""
    for host, code, seconds, said in zip(job.hosts, job.codes, job.seconds, job.verdicts, strict=True):
        print(fault, host.name, str(code), f"{seconds:.1f} s", " ".join(said.split())[:300])
    found = [] if job.codes == codes else [f"exit codes {job.codes}, not {codes}"]
    found += [
        f"{host.name}: ended after {s:.1f} s" for host, s in zip(job.hosts, job.seconds, strict=True) if s > within
    ]
    for host, said, word in zip(job.hosts, job.texts, words, strict=False):
        found += [] if re.search(word, said) else [f"{host.name}: no {word!r} in {said}"]
        found += [f"{host.name} shows a traceback: {said}"] if "Traceback" in said else []
    return found


def resumes(job: Job, whole: Path) -> list[str]:
    """Run the same command again on all hosts; return what is different from an undisturbed run."""
    again = Job(job.hosts, job.recipe).wait()
    return ([] if again.codes == [0, 0] else again.texts) + differences(job.run, whole)


def turn_off(host: Host) -> None:
    host.connect("down")
    host.signal("SIGKILL")


# What happens to a host → the host, what does it, and for each host its exit code and what it says.
ENDS: dict[str, tuple[int, Callable[[Host], object], list[int], list[str]]] = {
    "link cut": (1, lambda host: host.connect("down"), [5, 5], ["suspect a GPU or the network of host-0, host-1"] * 2),
    "host-0 killed": (0, lambda host: host.signal("SIGKILL"), [-9, 5], ["", "lost the connection to 10.78.0.1"]),
    "host-1 killed": (1, lambda host: host.signal("SIGKILL"), [5, -9], ["lost the connection to 10.78.0.2", ""]),
    "host-1 without power": (1, turn_off, [5, -9], ["ranks 2 and 3 on host-1 do not respond", ""]),
}


@pytest.mark.parametrize("fault", ENDS)
def test_a_lost_host_ends_the_other(fault: str, hosts: list[Host], whole: Path, tmp_path: Path) -> None:
    number, happen, codes, words = ENDS[fault]
    job = Job(hosts, recipe_of_two(tmp_path), [PACE]).after(AT_STEP, lambda: happen(hosts[number])).wait()
    hosts[number].connect()
    assert not problems(job, fault, codes, *words) + resumes(job, whole)


def test_a_link_that_flaps_is_survived(hosts: list[Host], whole: Path, tmp_path: Path) -> None:
    def flap() -> None:
        for _ in range(3):
            hosts[1].connect("down")
            time.sleep(TIMEOUT_S / 5)
            hosts[1].connect()
            time.sleep(TIMEOUT_S / 5)

    job = Job(hosts, recipe_of_two(tmp_path), [PACE]).after(AT_STEP, flap).wait()
    found = problems(job, "link flaps: 3 × 2 s without a connection", [0, 0], within=ANY_TIME)
    assert not found + differences(job.run, whole)


def test_a_slow_link_slows_down_and_blames_no_rank(hosts: list[Host], whole: Path, tmp_path: Path) -> None:
    with hosts[1].slow(50) as limit:
        job = Job(hosts, recipe_of_two(tmp_path, train__steps=24)).wait()
    found = problems(job, f"slow link: {limit}", [0, 0], within=ANY_TIME)
    made, undisturbed = curve(job.run), curve(whole)
    found += [f"step {step} differs" for step in undisturbed if made[step] != undisturbed[step]]
    slow, usual = (median(event["step_s"] for event in events(run, "step")) for run in (job.run, whole))
    assert not found and not events(job.run, "straggler") and slow > usual


def test_a_slow_host_is_named(hosts: list[Host], tmp_path: Path) -> None:
    layer = "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward"
    faults = [{**PACE, "where": layer, "rank": rank, "how": {"seconds": 0.1}} for rank in (2, 3)]
    job = Job(hosts, recipe_of_two(tmp_path, train__steps=24), faults).wait()
    assert not problems(job, "slow host", [0, 0], *["rank [23] on host-1 is slow"] * 2, within=ANY_TIME)
    named = {(event["rank"], event["cause"]) for event in events(job.run, "straggler")}
    assert named <= {(2, "compute"), (3, "compute")}


@pytest.mark.parametrize("number", [0, 1])
def test_a_frozen_host_ends_the_other_and_ends_when_it_continues(
    number: int, hosts: list[Host], whole: Path, tmp_path: Path
) -> None:
    job = Job(hosts, recipe_of_two(tmp_path), [PACE]).after(AT_STEP, lambda: hosts[number].signal("SIGSTOP"))
    threading.Timer(2 * TIMEOUT_S, job.thaw, [number]).start()
    job.wait()
    words = ["", ""]
    words[1 - number] = f"ranks {2 * number} and {2 * number + 1} on host-{number} do not respond"
    found = problems(job, f"host-{number} frozen for 20 s", [5, 5], *words, within=3 * TIMEOUT_S)
    found += [] if job.seconds[1 - number] < 2 * TIMEOUT_S else [f"host-{1 - number} waited for the other"]
    assert not found + resumes(job, whole)


def test_a_full_disk_on_one_host_ends_both(hosts: list[Host], whole: Path, tmp_path: Path) -> None:
    hosts[1].small_disk("64k")  # less than a tokenizer and the prepared data take
    job = Job(hosts, recipe_of_two(tmp_path)).wait()
    hosts[1].usual_disk()
    found = problems(
        job,
        "full disk on host-1",
        [5, 6],
        r"node 1 \(host-1\) stopped",
        "no space: .* on host-1 for the cache",
        within=ANY_TIME,
    )
    found += [] if abs(job.seconds[0] - job.seconds[1]) < TIMEOUT_S else [f"ended after {job.seconds}"]
    assert not found + resumes(job, whole)


@pytest.mark.parametrize(
    ("fault", "key", "codes", "words"),
    [
        ("output_dir not shared", "output_dir", [2, 2], "on host-1 is not the folder"),
        ("other data on host-1", "data__path", [4, 4], "ranks 2 and 3 on host-1 read other data than rank 0 on host-0"),
    ],
)
def test_what_differs_between_the_hosts_is_refused(
    fault: str, key: str, codes: list[int], words: str, hosts: list[Host], tmp_path: Path
) -> None:
    place = hosts[0].local / ("run" if key == "output_dir" else "text.jsonl")  # another one on each host
    recipe = recipe_of_two(tmp_path, **{key: str(place)})
    rows = (tmp_path / "text.jsonl").read_text().splitlines(keepends=True)
    for number, host in enumerate(hosts):
        (host.own / "text.jsonl").write_text("".join(rows[number:]))  # one row is missing on host-1
    job = Job(hosts, recipe).wait()
    assert not problems(job, fault, codes, *[words] * 2, within=ANY_TIME)


# --- a range of nodes ------------------------------------------------------------------------------------------------

STEPS = 24
SLOWLY = {**PACE, "how": {"seconds": 0.5}}  # a command that is started again needs seconds until it waits


def elastic_recipe(tmp: Path, **changes: Any) -> Path:
    """Write the recipe of the fault tests for one to three hosts with one worker each."""
    return small_recipe(tmp, **{
        "launch__nnodes": "1:3", "launch__nproc_per_node": 1, "launch__rdzv_endpoint": "host-0:29400",
        "launch__timeout_s": TIMEOUT_S, "launch__max_restarts": 5, "train__global_batch_size": 6,
        "train__steps": STEPS, "checkpoint__every": 3, **changes,
    })  # fmt: skip


@pytest.fixture
def three_hosts(more_hosts: list[Host]) -> Iterator[list[Host]]:
    """Return three hosts, which the next test gets without processes and connected, also if this one fails."""
    yield more_hosts[:3]
    for host in more_hosts[:3]:
        host.signal("SIGKILL")
        host.connect()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """Return the curve of the same training in one process that nothing disturbed."""
    tmp = tmp_path_factory.mktemp("undisturbed")
    recipe = elastic_recipe(tmp, launch__nnodes=1, launch__rdzv_endpoint=None, launch__max_restarts=0)
    done = fsdptrain("run", recipe)
    assert done.returncode == 0, done.stderr
    return curve(tmp / "run")


def ranks_of_attempts(run: Path) -> list[int]:
    return [event["world_size"] for event in events(run, "start")]


def elastic_problems(job: Job, fault: str, ranks: list[int], undisturbed: dict[int, list[Any]]) -> list[str]:
    """Print how a job ended, and how long it took until the next step was made with fewer nodes.

    Return what is not as expected: exit codes, number of ranks of each attempt, and the curve.
    """
    lost_at = time.time() - (time.monotonic() - job.fault_at)
    resumed = next((event["at"] - lost_at for event in events(job.run, "step") if event["at"] > lost_at + 5), None)
    print(
        fault, f"ranks of the attempts: {ranks_of_attempts(job.run)}; next step after {resumed or float('nan'):.1f} s"
    )
    found = problems(job, fault, [0] * len(job.hosts), within=ANY_TIME)
    found += [] if ranks_of_attempts(job.run) == ranks else [f"ranks {ranks_of_attempts(job.run)}, not {ranks}"]
    made = curve(job.run)
    found += [f"steps {[*made]}"] if made.keys() != undisturbed.keys() else []
    for step, (loss, _, samples) in made.items():
        if step in undisturbed and not (
            samples == undisturbed[step][2] and loss == pytest.approx(undisturbed[step][0], rel=1e-5)
        ):
            found.append(f"step {step}: {made[step]}, not {undisturbed[step]}")
    return found


# What happens to a host → the host, what does it, and what brings it back.
LOSSES: dict[str, tuple[int, Callable[[Host], object], Callable[[Job], object]]] = {
    "killed and started again": (2, lambda host: host.signal("SIGKILL"), lambda job: job.start_again(2)),
    "cut off and connected": (1, lambda host: host.connect("down"), lambda job: job.hosts[1].connect()),
    "frozen": (2, lambda host: host.signal("SIGSTOP"), lambda job: job.thaw(2)),
}


@pytest.mark.parametrize("fault", LOSSES)
def test_a_lost_host_is_left_behind_and_joins_at_the_next_checkpoint(
    fault: str, three_hosts: list[Host], undisturbed: dict[int, list[Any]], tmp_path: Path
) -> None:
    number, happen, undo = LOSSES[fault]
    job = Job(three_hosts, elastic_recipe(tmp_path), [SLOWLY]).after(AT_STEP, lambda: happen(three_hosts[number]))
    job.wait_until(lambda: len(ranks_of_attempts(job.run)) == 2)
    undo(job)
    job.wait(timeout=600)
    assert not elastic_problems(job, f"1:3, host-{number} {fault}", [3, 2, 3], undisturbed)
    if "started" in fault:
        assert events(job.run, "resume")[0]["step"] == 3
        assert "this one waits, and joins" in job.texts[2] and "another node joins" in job.texts[0]


def test_a_host_that_comes_back_joins_at_a_restart(
    three_hosts: list[Host], undisturbed: dict[int, list[Any]], tmp_path: Path
) -> None:
    """No checkpoint is due any more, so only the loss of a worker lets it join."""
    job = Job(three_hosts, elastic_recipe(tmp_path, checkpoint__every=12), [SLOWLY])
    job.after(13, lambda: three_hosts[2].signal("SIGKILL"))
    job.wait_until(lambda: len(ranks_of_attempts(job.run)) == 2)
    job.start_again(2)
    job.wait_until(lambda: "this one waits" in job.texts[2])
    worker = max(three_hosts[1].processes())  # started last
    send_all(signal.SIGKILL, [worker])
    job.wait(timeout=600)
    found = elastic_problems(job, "1:3, host-2 killed, then a worker", [3, 2, 3], undisturbed)
    assert not found and "restart 2 of 5" in job.texts[1]


def test_without_the_host_of_the_endpoint_the_others_wait_until_it_is_back(
    three_hosts: list[Host], undisturbed: dict[int, list[Any]], tmp_path: Path
) -> None:
    job = Job(three_hosts, elastic_recipe(tmp_path), [SLOWLY])
    job.after(AT_STEP, lambda: three_hosts[0].signal("SIGKILL"))
    job.wait_until(lambda: "start the command there again" in job.texts[1] + job.texts[2])
    job.start_again(0)
    job.wait(timeout=600)
    # The two that wait and the one that comes back meet at once, or on a busy machine it joins at the next checkpoint.
    ranks = [3, 3] if len(ranks_of_attempts(job.run)) == 2 else [3, 2, 3]
    assert not elastic_problems(job, "1:3, host-0 killed and started again", ranks, undisturbed)
