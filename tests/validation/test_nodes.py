"""The nodes of a run are compared before it, as recorded and by real ranks: what differs is named."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import Command
from support import environment, fsdptrain, write_recipe

from fsdptrain.checkpoint.nodes import file_to_see, sees, shared_folder
from fsdptrain.config.reader import load
from fsdptrain.data.sources import quick_fingerprint
from fsdptrain.errors import DataError, NoData, RecipeError, to_record
from fsdptrain.plan.hardware import KNOWN
from fsdptrain.plan.network import unused_port
from fsdptrain.plan.plan import draft_plan, make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.terminal.screen import Screen
from fsdptrain.validation import request as requests
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.node_check import Node, compare_nodes, show_nodes

H100 = KNOWN["h100-80gb"]


def node(number: int, **changes: Any) -> Node:
    """Return a node with eight healthy GPUs."""
    own = Node(
        host=f"gpu-{number}", ranks=8, plan="1e51da", changes=[],
        data="f6bba6000000aaaa", shares_output=True, gpus=["H100 80GB HBM3"] * 8,
        inside_bw=340e9, between_bw=44e9,
    )  # fmt: skip
    return dataclasses.replace(own, **changes)


def compared(*nodes: Node) -> Findings:
    findings = Findings()
    show_nodes(nodes, compare_nodes(nodes, "output_dir", findings), H100, findings)
    return findings


FAULTS: dict[str, tuple[dict[str, Any], str, int, str]] = {  # what node 1 has → its word, the exit code, the message
    "plan": ({"changes": ["seed: 1 → 2"]}, "plan", 2, "seed: 1 → 2 on gpu-1"),
    "data": ({"data": "0000aaaa11112222"}, "data", 4, "0000aaaa1111 on gpu-1, but f6bba6000000 on 2 nodes"),
    "no data": (
        {"data": None, "problems": [to_record(NoData("data.path: '/d' was not found"))]}, "machine", 4,
        "on gpu-1: data.path",
    ),
    "folder": ({"shares_output": False}, "output_dir", 2, "output_dir: gpu-1 cannot see what gpu-0 writes there"),
    "a GPU less": ({"gpus": ["H100 80GB HBM3"] * 7}, "GPUs", 2, "7 × H100 80GB HBM3 on gpu-1, but 8 × H100"),
    "no GPU": ({"gpus": []}, "GPUs", 2, "no GPU on gpu-1"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_that_differs_is_named_with_the_way_out(fault: str) -> None:
    changes, word, code, message = FAULTS[fault]
    findings = compared(node(0), node(1, **changes), node(2))
    [problem] = findings.problems
    table = findings.sections["Nodes"][0]
    verdicts = [row[table["header"].index("verdict")] for row in table["rows"]]
    assert message in problem and (findings.exit_code, verdicts) == (code, ["ok", word, "ok"])


def test_nodes_on_one_machine_have_numbers() -> None:
    findings = compared(node(0, host="box"), node(1, host="box"))
    assert findings.problems == findings.notes == []
    assert [row[0] for row in findings.sections["Nodes"][0]["rows"]] == ["box/0", "box/1"]


def test_nodes_may_differ_in_their_cores_but_not_in_their_folder(tmp_path: Path) -> None:
    plan = make_plan(load(write_recipe(tmp_path)), Topology("cpu", 1, 1))
    more_cores = dataclasses.replace(plan, threads=plan.threads + 1)
    assert plan.digest() == more_cores.digest() != dataclasses.replace(plan, run_dir="/another/folder").digest()


@pytest.mark.parametrize(
    ("words", "nodes", "expected"),
    [
        (["output_dir=/runs"], 2, ("output_dir", "/runs")),
        (["output_dir=/runs", "checkpoint.path=/disk"], 2, ("checkpoint.path", "/disk")),
        (["output_dir=/runs"], 1, None),
        (["output_dir=/runs", "checkpoint.path=s3://bucket/run"], 2, None),
    ],
)
def test_the_folder_that_the_nodes_share_is_that_of_the_checkpoints(
    tmp_path: Path, words: list[str], nodes: int, expected: tuple[str, str] | None
) -> None:
    recipe = write_recipe(tmp_path, launch__rdzv_endpoint="gpu-0:29400" if nodes > 1 else None)
    plan = draft_plan(load(recipe, [f"launch.nnodes={nodes}", *words]), Topology("cpu", nodes, 1), elsewhere=True)[0]
    assert shared_folder(plan) == (expected and (expected[0], Path(expected[1])))


def test_a_file_that_nodes_look_for_is_in_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    with file_to_see(tmp_path / "not" / "yet") as name:
        assert Path(name).parent == tmp_path and sees(name)
    assert [*tmp_path.iterdir()] == [] and sees("")


def test_the_quick_digest_reads_a_limited_part_of_each_file(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "x" * 100), ("b.jsonl", "y" * 10)):
        (tmp_path / name).write_text(text)
    whole, part = (quick_fingerprint(str(tmp_path), budget) for budget in (110, 40))
    (tmp_path / "a.jsonl").write_text("x" * 99 + "z")
    assert quick_fingerprint(str(tmp_path), 110) != whole and quick_fingerprint(str(tmp_path), 40) == part
    (tmp_path / "a.jsonl").write_text("x" * 101)
    assert quick_fingerprint(str(tmp_path), 40) != part
    with pytest.raises(DataError, match="was not found"):
        quick_fingerprint(str(tmp_path / "none"), 40)


def test_two_nodes_meet_measure_and_leave_no_trace(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, launch__nproc_per_node="auto", train__global_batch_size=8)
    port = str(unused_port())
    words = [sys.executable, "-m", "fsdptrain", "validate", str(recipe), "--here", "--json"]
    ranks = [
        Command(
            words, stdout=subprocess.PIPE, text=True,
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
        )
        for rank in range(2)
    ]  # fmt: skip
    shown = [rank.communicate(timeout=180)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and shown[1] == ""
    report = json.loads(shown[0])
    assert report["verdict"] == "2 nodes, 2 ranks: ready" and report["problems"] == []
    for found in report["nodes"].values():
        assert found["between_bw"] > 1e6 and found["inside_bw"] is None
        assert found["data"] and found["shares_output"] and found["ranks"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "text.jsonl"}


def test_a_first_node_whose_name_leads_to_another_node_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, launch__nnodes=2, launch__rdzv_endpoint="gpu-0:29400")
    monkeypatch.setattr(requests, "address_of", lambda host: "127.0.1.1")
    with pytest.raises(RecipeError, match=r"launch.rdzv_endpoint: gpu-0 resolves to 127.0.1.1 on .*/etc/hosts"):
        requests.check_here(requests.make_request(load(recipe), None, trust_remote_code=False), Screen())


def test_options_of_the_dry_run_do_not_go_with_the_check_of_the_nodes(tmp_path: Path) -> None:
    done = fsdptrain("validate", write_recipe(tmp_path), "--here", "--hardware", "8xh100", "--price-per-gpu-hour", "5")
    assert done.returncode == 2 and "--here: cannot be combined with --hardware, --price-per-gpu-hour" in done.stderr


def test_a_first_node_whose_name_is_unknown_is_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    done = fsdptrain("run", recipe, "launch.nnodes=2", "launch.rdzv_endpoint=gpu-0.invalid:29400")
    assert f"gpu-0.invalid cannot be resolved on {socket.gethostname()}; choose a" in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / "run").exists()
