"""A node that is refused before the nodes have met: those that wait for it hear of it, and end as it does."""

from __future__ import annotations

import errno
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from support import TESTS, fsdptrain, write_recipe
from typer.testing import CliRunner

from fsdptrain.cli import app
from fsdptrain.errors import FsdptrainError
from fsdptrain.plan.network import unused_port

# What Slurm sets on each of two nodes, with one task on each.
NODES = json.loads((TESTS / "plan" / "launchers.json").read_text())["srun -N2 --ntasks-per-node=1"]


@pytest.mark.parametrize("refused", [0, 1])
def test_all_nodes_end_with_the_reason_of_the_one_that_is_refused(refused: int, tmp_path: Path) -> None:
    port = str(unused_port())
    recipes = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        path = write_recipe(tmp_path / str(node), name="two")
        path.write_text(path.read_text().replace("text.jsonl", "gone.jsonl") if node == refused else path.read_text())
        recipes.append(path)

    def start(node: int) -> tuple[int, str]:
        launched = NODES[node] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # Executed: torch reads when it is imported whether it prints warnings, with their stacks, of the other's end.
        done = fsdptrain("run", recipes[node], executed=True, **launched)
        return done.returncode, " ".join(done.stderr.split())

    with ThreadPoolExecutor() as pool:
        ends = [*pool.map(start, range(2))]
    assert [code for code, _ in ends] == [4, 4]
    reason, host = f"data.path: '{tmp_path / str(refused) / 'gone.jsonl'}' was not found", socket.gethostname()
    assert ends[refused][1].startswith(f"fsdptrain on {host}: {reason}")
    assert ends[1 - refused][1].startswith(f"fsdptrain on {host}: node {host} was refused: {reason}")
    assert not any(word in text for _, text in ends for word in ("frame #", "Traceback"))


def test_an_error_of_the_system_refuses_a_node_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))

    seen = list[FsdptrainError]()
    monkeypatch.setattr("fsdptrain.launch.run_lock.claim_run_dir", claim)
    monkeypatch.setattr("fsdptrain.failures.notify_nodes.tell_other_nodes", lambda error, recipe: seen.append(error))
    done = CliRunner().invoke(app, ["run", str(write_recipe(tmp_path))])
    assert done.exit_code == 6 and [str(error) for error in seen] == [
        f"{tmp_path}: Input/output error (errno 5, EIO): look for errors of the disk in the kernel's log (dmesg)"
    ]
