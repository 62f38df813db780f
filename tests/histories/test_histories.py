"""Random histories of a run: a state machine plays what persons, machines and clusters do to it (`histories.player`).

After every event the invariants of `histories.invariants` hold; at the end all that can be undone is undone, and the
run must reach its end. `make test` plays the same histories each time, `make soak` new ones until HISTORIES_S is over:
Hypothesis reduces a failure to few events and prints them. Those that were found are `FOUND` below.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from histories.client import Server
from histories.player import FILE_OF, History
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

HISTORIES = 10  # of `make test`
EVENTS, MANY = 3, 6  # of a history, at most, beside its start and its end: in `make test` and in the soak
BATCH = 50  # histories of one call of Hypothesis in the soak


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("histories") / "server")
    yield server
    server.close()


def at(step: int, do: str, count: int = 1, role: str = "worker") -> dict[str, Any]:
    return {"role": role, "match": f"step-{step:08d}", "at": count, "do": do}


stops = st.builds(at, st.integers(2, 4), st.just("SIGTERM command"), st.integers(1, 3))
kills = st.builds(
    lambda at, whom: {"role": "worker", "at": at, "do": f"SIGKILL {whom}"},
    st.integers(1, 80),
    st.sampled_from(["worker", "agent", "command"]),
)
refusals = st.builds(
    lambda role, at, do: {"role": role, "at": at, "do": do},
    st.sampled_from(["worker", "command"]),
    st.integers(1, 60),
    st.sampled_from(["ENOSPC", "EIO"]),
)
freezes = st.builds(
    lambda role, event, at: {"role": role, "event": event, "at": at, "do": "freeze"},
    st.sampled_from(["worker", "agent", "command"]),
    st.sampled_from(["", "os.rename"]),
    st.integers(1, 30),
)


class Histories(RuleBasedStateMachine):
    """What happens to a run whose checkpoints are in a folder or in an object store."""

    history: History

    @initialize(fault=stops | kills)
    def start(self, fault: dict[str, Any]) -> None:
        self.history.run(fault=fault)

    @rule(what=st.sampled_from(sorted(FILE_OF)))
    def change(self, what: str) -> None:
        self.history.change(what)

    @rule()
    def restore(self) -> None:
        self.history.restore()

    @rule(number=st.integers(0, 50), how=st.sampled_from(["remove", "cut", "flip"]), newest=st.booleans())
    def damage(self, number: int, how: str, newest: bool) -> None:
        self.history.damage(number, how, newest)

    def teardown(self) -> None:
        try:
            self.history.settle()
        finally:
            self.history.kill_all()
            note("\n".join(self.history.log))


class InFolder(Histories):
    @rule(fault=st.none() | stops | kills | refusals, ahead=st.sampled_from([0.0, 0.0, 3600.0]))
    def run(self, fault: dict[str, Any] | None, ahead: float) -> None:
        self.history.run(fault=fault, ahead=ahead)

    @rule(ahead=st.sampled_from([0.0, 3600.0]))
    def hang(self, ahead: float) -> None:
        self.history.run(fault=at(4, "hang"), ahead=ahead)

    @rule(key=st.sampled_from(["optim.lr=0.02", "optim.weight_decay=0.5", "train.micro_batch_size=1", "seed=7"]))
    def run_with_another_key(self, key: str) -> None:
        self.history.run(key)

    @rule(
        out=st.sampled_from(["", "copy", "copy-2"]),
        at=st.integers(1, 30),
        do=st.sampled_from(["", "SIGKILL command", "SIGTERM command", "ENOSPC", "EIO"]),
    )
    def export(self, out: str, at: int, do: str) -> None:
        self.history.export(out, fault={"role": "command", "at": at, "do": do} if do else None)

    @rule(
        frozen=freezes,
        second=st.sampled_from(["run", "export", "export --out", "status", "verify"]),
        then=st.none() | freezes,
    )
    def two_at_once(self, frozen: dict[str, Any], second: str, then: dict[str, Any] | None) -> None:
        self.history.during(frozen, second, then)

    @rule()
    def look(self) -> None:
        self.history.look()

    @rule()
    def another_run_shares_the_checkpoints(self) -> None:
        self.history.share()

    @rule(number=st.integers(0, 50), pattern=st.sampled_from(["**/*", "checkpoints/*/*"]))
    def take_rights(self, number: int, pattern: str) -> None:
        self.history.take_rights(number, pattern)

    @rule(number=st.integers(0, 20))
    def plant(self, number: int) -> None:
        self.history.plant(number)

    @rule(copy=st.booleans())
    def move(self, copy: bool) -> None:
        self.history.move(copy)


class InStore(Histories):
    @rule(fault=st.none() | stops | kills | refusals)
    def run(self, fault: dict[str, Any] | None) -> None:
        self.history.run(fault=fault)

    @rule(frozen=freezes, then=st.none() | freezes)
    def two_at_once(self, frozen: dict[str, Any], then: dict[str, Any] | None) -> None:
        self.history.during(frozen, "run", then)


MACHINES = {"folder": InFolder, "store": InStore}


def play(server: Server, place: str, histories: int, events: int, **options: Any) -> None:
    chosen = settings(
        max_examples=histories, stateful_step_count=events, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck), **options,
    )  # fmt: skip

    def begin() -> RuleBasedStateMachine:
        machine = MACHINES[place]()
        machine.history = History(server, in_store=place == "store")
        return machine

    run_state_machine_as_test(begin, settings=chosen)


def test_random_histories(server: Server) -> None:
    play(server, "folder", HISTORIES, EVENTS, derandomize=True, phases=[Phase.generate, Phase.shrink])


@pytest.mark.soak
@pytest.mark.parametrize("place", MACHINES)
def test_many_random_histories(server: Server, place: str) -> None:
    end, played = time.monotonic() + float(os.environ.get("HISTORIES_S", 300)), 0
    while time.monotonic() < end and played < int(os.environ.get("HISTORIES", 100_000)):
        play(server, place, BATCH, MANY)
        played += BATCH
    print(f"\n{played} histories")


def unreadable_checkpoints(history: History) -> None:
    history.run(fault=at(3, "SIGKILL worker"))
    for number in range(4):  # two checkpoints of two files
        history.take_rights(number, "checkpoints/*/*.*")
    history.run()


def another_configuration(history: History) -> None:
    history.run(fault=at(3, "SIGKILL worker"))
    history.change("config")
    history.run()


def two_exports_to_one_folder(history: History) -> None:
    history.run(fault=at(4, "SIGKILL worker"))
    before_the_rename = {"role": "command", "event": "os.rename", "match": ".copy.writing", "at": 1}
    history.during(before_the_rename, "export --out", before_the_rename)


def checkpoints_of_another_run(history: History) -> None:
    history.run(fault=at(4, "SIGKILL worker"))
    history.share()


def a_hang_on_a_clock_ahead(history: History) -> None:
    history.run(fault=at(3, "hang"), ahead=3600.0)


def other_held_out_data(history: History) -> None:
    history.run(fault=at(3, "SIGKILL worker"))
    history.change("held-out")
    history.run()


def an_undone_save(history: History) -> None:
    history.run(fault=at(4, "SIGKILL worker"))
    history.damage(1, "flip", newest=True)
    before_the_save = {"role": "worker", "match": "step-00000003.tmp", "at": 1, "do": "SIGKILL worker"}
    history.run(fault=before_the_save)


def an_export_killed_before_its_mark(history: History) -> None:
    history.run(fault=at(4, "SIGKILL worker"))
    before_the_mark = {"role": "command", "event": "open", "match": ".export.writing", "at": 1}
    history.export(fault={**before_the_mark, "do": "SIGKILL command"})


def a_file_of_the_model_is_not_finished(history: History) -> None:
    before_its_name = {"role": "worker", "event": "os.rename", "match": "model/.fsdptrain", "at": 1}
    history.run(fault={**before_its_name, "do": "SIGKILL worker"})


FOUND: list[Callable[[History], None]] = [
    unreadable_checkpoints, another_configuration, two_exports_to_one_folder, checkpoints_of_another_run,
    a_hang_on_a_clock_ahead, other_held_out_data, an_undone_save, an_export_killed_before_its_mark,
    a_file_of_the_model_is_not_finished,
]  # fmt: skip


@pytest.mark.parametrize("play", FOUND, ids=lambda play: play.__name__)
def test_histories_that_failed(play: Callable[[History], None], server: Server) -> None:
    history = History(server)
    try:
        play(history)
        history.settle()
    finally:
        print("\n".join(history.log))
        history.kill_all()


@pytest.mark.parametrize("in_store", [False, True], ids=MACHINES)
def test_an_undisturbed_history(server: Server, in_store: bool) -> None:
    history = History(server, in_store)
    history.run()
    history.run()
    history.settle()
    assert history.steps() == [2, 3, 4], "the best, and the two newest"
