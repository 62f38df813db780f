"""A node that is refused before the nodes have met: those that wait for it hear of it, and end as it does."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import TESTS, fsdptrain, write_recipe

# What Slurm sets on each of two nodes, with one task on each.
NODES = json.loads((TESTS / "config" / "launchers.json").read_text())["srun -N2 --ntasks-per-node=1"]


@pytest.mark.parametrize("refused", [0, 1])
def test_all_nodes_end_with_the_reason_of_the_one_that_is_refused(refused: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    recipes = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        path = write_recipe(tmp_path / str(node), name="two")
        path.write_text(path.read_text().replace("text.jsonl", "gone.jsonl") if node == refused else path.read_text())
        recipes.append(path)

    def start(node: int) -> tuple[int, str]:
        launched = NODES[node] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = fsdptrain("run", recipes[node], **launched)
        return done.returncode, " ".join(done.stderr.split())

    with ThreadPoolExecutor() as pool:
        ends = [*pool.map(start, range(2))]
    assert [code for code, _ in ends] == [4, 4]
    reason, host = f"data.path: '{tmp_path / str(refused) / 'gone.jsonl'}' was not found", socket.gethostname()
    assert ends[refused][1].startswith(f"fsdptrain on {host}: {reason}")
    assert ends[1 - refused][1].startswith(f"fsdptrain on {host}: node {host} was refused: {reason}")
    assert not any(word in text for _, text in ends for word in ("frame #", "Traceback"))
