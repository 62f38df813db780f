"""Runs on two hosts with a switch between them: the curve, the bytes on the link, and what clusters do to runs.

After every fault the same command on the same hosts resumes, and the run is bitwise equal to an undisturbed one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import Table
from hosts import Host, call, missing, switched_hosts
from injection import SMALL, last_step, small_recipe
from support import TESTS, environment, events, fsdptrain, python_path

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing())]

TIMEOUT_S = 10  # launch.timeout_s
MODEL = {"model_type": "llama", **SMALL, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with switched_hosts(tmp_path_factory.mktemp("hosts"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def whole(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on both hosts that nothing disturbed."""
    tmp = tmp_path_factory.mktemp("whole")
    assert Job(hosts, recipe_of_two(tmp)).wait().codes == [0, 0]
    return tmp / "run"


def recipe_of_two(tmp: Path, **changes: Any) -> Path:
    """Write the recipe of the fault tests for two hosts with two workers each."""
    return small_recipe(
        tmp, model__config=MODEL, fsdp__strategy="HYBRID_SHARD", launch__nnodes=2, launch__nproc_per_node=2,
        launch__rdzv_endpoint="host-0:29400", launch__timeout_s=TIMEOUT_S, **changes,
    )  # fmt: skip


@dataclass
class Job:
    """The command on every host, each with caches of its own; `texts`, `codes` and `seconds` when it has ended."""

    hosts: list[Host]
    recipe: Path
    faults: list[dict[str, Any]] = field(default_factory=list)
    delays: tuple[float, ...] = (0, 0)  # seconds until each host starts the command

    def __post_init__(self) -> None:
        self.run = self.recipe.parent / "run"
        self.fault_at = time.monotonic()
        self._logs = [self.recipe.parent / f"{host.name}.out" for host in self.hosts]
        self._commands = [self._start(*each) for each in zip(self.hosts, self._logs, self.delays, strict=True)]

    def _start(self, host: Host, log: Path, delay: float) -> subprocess.Popen[bytes]:
        env = environment(
            FSDPTRAIN_CACHE=str(host.local / "cache"), TMPDIR=str(host.local), FSDPTRAIN_FAULTS=json.dumps(self.faults),
            PYTHONPATH=python_path(TESTS / "faults"),
        )  # fmt: skip
        command = ["sh", "-c", 'sleep "$0"; exec "$@"', str(delay), sys.executable, "-m", "fsdptrain", "run"]
        with log.open("w") as output:
            return subprocess.Popen([*host.prefix, *command, str(self.recipe)], stdout=output, stderr=output, env=env)

    def wait_for_step(self, step: int, timeout: float = 120) -> None:
        end = time.monotonic() + timeout
        while last_step(self.run) < step:
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


def test_the_bytes_on_the_link_are_those_of_the_forecast(hosts: list[Host], tmp_path: Path, link_table: Table) -> None:
    """The difference of two runs of 6 and of 18 steps is 12 steps, without start, checkpoint and export."""
    sent, few, many = [], 6, 18
    for steps in (few, many):
        before = [host.sent() for host in hosts]
        recipe = recipe_of_two(tmp_path / str(steps), train__steps=steps, checkpoint__every=None)
        assert Job(hosts, recipe).wait().codes == [0, 0]
        sent.append([host.sent().payload_since(then) for host, then in zip(hosts, before, strict=True)])
    forecast = call(*hosts[0].prefix, sys.executable, "-m", "fsdptrain", "validate", recipe, "--json")
    between = sum(each["wire"] for each in json.loads(forecast)["collectives"] if each["nodes"] == 2)
    expected = between * 2  # ranks of a host
    for host, one, other in zip(hosts, *sent, strict=True):
        measured = (other - one) / (many - few)
        difference = measured / expected - 1
        link_table.rows.append(
            (f"HYBRID_SHARD 2×2, {host.name}", f"{measured:,.0f}", f"{expected:,}", f"{difference:+.2%}")
        )
        assert abs(difference) < BYTES_LIMIT
