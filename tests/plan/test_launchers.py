"""What is read from the environments of launchers.

`launchers.json` holds the environments of all processes of real commands, without unrelated variables: of Slurm 22.05
on two nodes, Open MPI 4.1, MPICH 4.0 and Intel MPI 2021.18. Those of Kubeflow, of other launchers and of clouds are
written after their sources and manuals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import write_recipe

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.plan import launchers
from fsdptrain.plan import topology as topologies
from fsdptrain.plan.launchers import (
    DEFAULT_PORT,
    FIRST_PORT,
    PORTS,
    STEPS,
    Launched,
    find_launcher,
    first_host,
    is_first,
    port_of_job,
    worker_variables,
)
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology, check_name, find_topology, host_of

RECORDED: dict[str, list[dict[str, str]]] = json.loads((Path(__file__).parent / "launchers.json").read_text())

# Command → nodes and processes per node; where several processes share a node, each is a worker.
SHAPES = {
    "srun -N2 --ntasks-per-node=1": (2, 1),
    "srun -N2 --ntasks-per-node=2": (2, 2),
    "srun -N1 -n3": (1, 3),
    "sbatch -N2 --ntasks-per-node=2, srun": (2, 2),
    "sbatch -N2 --ntasks-per-node=2, srun -N1 -n1": (1, 1),
    "sbatch, srun --mpi=pmi2": (2, 2),
    "sbatch, srun --distribution=cyclic": (2, 2),
    "sbatch, Open MPI -n 4": (2, 2),
    "sbatch, Open MPI -n 2 --map-by ppr:1:node": (2, 1),
    "sbatch, MPICH -n 4 -ppn 2": (2, 2),
    "Open MPI -n 2": (1, 2),
    "MPICH -n 2": (1, 2),
    "Intel MPI -n 2": (1, 2),
}
NEED_ADDRESS = {"MPICH -hosts a,b -n 4 -ppn 2": (2, 2), "MPICH -hosts a,b -n 2 -ppn 1": (2, 1)}
PET = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}  # fmt: skip
PYTORCH_JOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1"}
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def numbered(nodes: int, per_node: int, names: str, **same: str) -> list[dict[str, str]]:
    """Return the environments of all processes. `names` are those of rank, world, local rank, local world and node;
    `-` for one that the launcher does not set."""
    environments = []
    for rank in range(nodes * per_node):
        numbers = rank, nodes * per_node, rank % per_node, per_node, rank // per_node
        own = {name: str(number) for name, number in zip(names.split(), numbers, strict=False)}
        environments.append({name: number for name, number in own.items() if name != "-"} | same)
    return environments


AZURE = "RANK WORLD_SIZE LOCAL_RANK - NODE_RANK"
ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "6105"}
SKYPILOT = numbered(
    2, 1, "SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
    SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_TASK_ID="sky-2026-11-20-10-01-02-123456_cluster_7",
)  # fmt: skip
VERTEX = {
    "cluster": {
        "workerpool0": ["job-workerpool0-ab-0:2222"],
        "workerpool1": [f"job-workerpool1-ab-{n}:2222" for n in (0, 1)],
    },
    "environment": "cloud",
}
# Launcher → nodes, processes on each, where they meet, and the environments of all processes.
DOCUMENTED: dict[str, tuple[int, int, str, list[dict[str, str]]]] = {
    "Azure ML": (2, 8, "a:6105", numbered(2, 8, AZURE, AZUREML_NODE_COUNT="2", **ADDRESS)),
    "Azure ML, one process a node": (2, 1, "a:6105", numbered(2, 1, AZURE, AZUREML_NODE_COUNT="2", **ADDRESS)),
    "SkyPilot": (2, 1, f"10.0.0.1:{DEFAULT_PORT}", SKYPILOT),
    "RunPod": (2, 1, "10.65.0.2:29400", numbered(
        2, 1, "NODE_RANK NUM_NODES", PRIMARY_ADDR="10.65.0.2", MASTER_ADDR="10.65.0.2", PRIMARY_PORT="29400",
        MASTER_PORT="29400", NUM_TRAINERS="8", WORLD_SIZE="16",
    )),
    "Vertex AI": (3, 1, "job-workerpool0-ab-0:2222", [
        {"CLUSTER_SPEC": json.dumps({**VERTEX, "task": {"type": pool, "index": index, "trial": ""}})}
        for pool, index in (("workerpool0", 0), ("workerpool1", 0), ("workerpool1", 1))
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("command", "shape"), [*SHAPES.items(), *NEED_ADDRESS.items()])
def test_the_processes_of_a_real_command_form_one_run(command: str, shape: tuple[int, int]) -> None:
    added = {"MASTER_ADDR": "a"} if command in NEED_ADDRESS else {}
    host = "127.0.0.1" if shape[0] == 1 else added.get("MASTER_ADDR", "n1")
    check_one_run([env | added for env in RECORDED[command]], *shape, host)


@pytest.mark.parametrize("launcher", DOCUMENTED)
def test_the_processes_of_a_documented_launcher_form_one_run(launcher: str, tmp_path: Path) -> None:
    nodes, per_node, endpoint, environments = DOCUMENTED[launcher]
    check_one_run(environments, nodes, per_node, endpoint.partition(":")[0])
    plans = {topology(tmp_path, env, "train.global_batch_size=48") for env in environments}
    assert {(plan.nnodes, plan.endpoint) for plan in plans} == {(nodes, endpoint)} and len(plans) == 1


def check_one_run(environments: list[dict[str, str]], nodes: int, per_node: int, host: str) -> None:
    found = [each for env in environments if (each := find_launcher(env))]
    assert len(found) == nodes * per_node
    assert {(each.nnodes, each.source, each.endpoint) for each in found} == {
        (nodes, found[0].source, found[0].endpoint)
    }
    assert sorted(each.node for each in found) == [node for node in range(nodes) for _ in range(per_node)]
    assert sum(map(is_first, found)) == 1
    variables = [worker_variables(each) for each in found]
    if per_node == 1:  # fsdptrain starts the workers of the node
        assert variables == [{}] * nodes
        assert (found[0].endpoint is None) == (nodes == 1)
        return
    ranks = sorted((int(each["RANK"]), int(each["LOCAL_RANK"])) for each in variables)
    assert ranks == [(rank, rank % per_node) for rank in range(nodes * per_node)]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) for each in variables} == {
        (str(nodes * per_node), str(per_node))
    }
    assert {each["MASTER_ADDR"] for each in variables} == {host}


def test_the_hosts_of_sagemaker_are_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "SAGEMAKER_HOSTS", tmp_path / "resourceconfig.json")
    env = {"TRAINING_JOB_ARN": "arn:aws:sagemaker:us-east-1:1:training-job/one"}
    assert find_launcher(env) is None
    (tmp_path / "resourceconfig.json").write_text('{"current_host": "algo-2", "hosts": ["algo-2", "algo-1"]}')
    for each in (env, {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_HOST_COUNT": "2"}):
        assert find_launcher(each) == Launched("SageMaker", 2, 1, endpoint=f"algo-1:{DEFAULT_PORT}")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        # Variables that count several, of launchers that say too little.
        ({"PMI_RANK": "0", "PMI_SIZE": "16"}, "PMI_SIZE is 16, but no launcher was found, so this run would have 1"),
        ({"RANK": "0", "WORLD_SIZE": "16"}, "WORLD_SIZE is 16, but no launcher was found"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK is 3, but no launcher was found"),
        ({"PBS_NODENUM": "1"}, "PBS_NODENUM is 1, but no launcher was found"),
        ({"SM_HOST_COUNT": "2"}, "SM_HOST_COUNT is 2, but no launcher was found"),
        # A launcher of one node inside of one of several.
        (
            {**SKYPILOT[1], "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **ADDRESS},
            "SKYPILOT_NUM_NODES is 2, but torchrun has 1 node",
        ),
        # Ranks that contradict each other.
        (
            {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", **ADDRESS},
            "RANK is 9, LOCAL_RANK is 1 and WORLD_SIZE is 16, but LOCAL_WORLD_SIZE is not set",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16", **ADDRESS},
            "RANK is 0, LOCAL_RANK is 0 and WORLD_SIZE is 16, but LOCAL_WORLD_SIZE is not set",
        ),
        (
            {"RANK": "9", "LOCAL_RANK": "2", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", **ADDRESS},
            "RANK is 9, but LOCAL_RANK is 2 of LOCAL_WORLD_SIZE 8",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "RANK is 2, but WORLD_SIZE is 2"),
        ({**SKYPILOT[0], "SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK is 2, but SKYPILOT_NUM_NODES is 2"),
        # Values that no launcher sets.
        ({**PET, "PET_NNODES": "1:4"}, "PET_NNODES is '1:4'"),
        ({**PET, "PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
        ({**PYTORCH_JOB, "RANK": "x"}, "RANK is 'x'"),
    ],
)  # fmt: skip
def test_a_run_that_would_be_one_on_every_host_is_refused_with_both_numbers(
    env: dict[str, str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=says):
        topology(tmp_path, env)


@pytest.mark.parametrize(
    "env",
    [
        {"PBS_JOBID": "7.pbs01", "PBS_NODENUM": "0"},  # the script of a job
        {**RECORDED["srun -N1 -n3"][0], "SLURM_STEP_NUM_NODES": "2", "PMI_SIZE": "2", "SLURM_PTY_PORT": "41000"},
        {"NODE_RANK": "0", "NUM_NODES": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_run_on_one_node_is_not_refused(env: dict[str, str], tmp_path: Path) -> None:
    assert topology(tmp_path, env) == Topology("cpu", 1, 2)
    several = topology(tmp_path, {"PMI_SIZE": "2"}, "launch.nnodes=2", "launch.rdzv_endpoint=a:1")
    assert several.nnodes == 2  # plain hosts, as the recipe says


@pytest.mark.parametrize("command", ["salloc -N2", "sbatch -N2 --ntasks-per-node=2"])
def test_a_shell_inside_a_job_is_no_step(command: str) -> None:
    (env,) = RECORDED[command]
    assert "SLURM_JOB_ID" in env and find_launcher(env) is None
    # salloc with `use_interactive_step`, and the batch script of newer versions
    assert find_launcher({**RECORDED["srun -N1 -n3"][0], "SLURM_STEP_ID": "4294967290"}) is None
    assert find_launcher({**RECORDED["srun -N1 -n3"][0], "SLURM_PTY_PORT": "41000"}) is None  # srun --pty bash


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("srun -N2 -n3", "has 2,1 tasks on its nodes"),
        ("sbatch, Open MPI -n 4 --map-by node", "must have consecutive numbers"),
        ("MPICH -hosts a,b -n 4 -ppn 2", "MASTER_ADDR"),
    ],
)
def test_a_command_that_cannot_be_one_run_is_refused_by_a_rank(command: str, says: str) -> None:
    refusals = []
    for env in RECORDED[command]:
        try:
            find_launcher(env)
        except RecipeError as error:
            refusals.append(str(error))
    assert refusals and all(says in refusal for refusal in refusals)


def test_torchrun_inside_of_another_launcher_counts_itself() -> None:
    own = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h"}
    for outer in [*RECORDED["srun -N2 --ntasks-per-node=1"], PET, {}]:
        found = find_launcher({**outer, **own, "MASTER_PORT": "1"})
        assert found == Launched("torchrun", 2, 1, 4, "h:1", 1)
        assert worker_variables(found) == {**own, "MASTER_PORT": "1"}


def test_the_variables_of_kubeflow() -> None:
    assert find_launcher(PET) == Launched("Kubeflow", 4, 2, 8, "job-node-0-0.job:29400")
    assert find_launcher({**PET, "PET_NPROC_PER_NODE": "gpu"}) == Launched(
        "Kubeflow", 4, 2, None, "job-node-0-0.job:29400"
    )
    assert find_launcher({**PET, "PET_NNODES": "1", "PET_NODE_RANK": "0"}) == Launched("Kubeflow", 1, 0, 8)
    assert find_launcher(PYTORCH_JOB) == Launched("RANK and WORLD_SIZE", 3, 1, None, "job-master-0:23456")


# As `scontrol show hostnames` of Slurm 22.05 resolves them.
HOSTS = {
    "n[1-2]": "n1", "node[001-003,010]": "node001", "gpu-a[08-11]": "gpu-a08", "a,b,c": "a", "single": "single",
    "rack[0-1]-node[01-02]": "rack0-node01", "x[1,3-5],y7": "x1", "c[1-2]-ib[0,5],login": "c1-ib0",
    "n[1-3]n[4-5]": "n1n4", "gpu-[9-11]": "gpu-9",
    "p4d-dy-[1-2]": "p4d-dy-1", "n[0007]": "n0007", "dgx-[01,05-06]-c[2-3]": "dgx-01-c2", "": "",
}  # fmt: skip


@pytest.mark.parametrize(("hosts", "first"), HOSTS.items())
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


jobs = st.integers(1, 2**31)


@given(jobs, st.integers(0, STEPS - 1), st.integers(-269, 269), st.integers(0, STEPS - 1))
def test_steps_of_neighbouring_jobs_have_different_ports(job: int, step: int, apart: int, other: int) -> None:
    port, second = port_of_job(job, step), port_of_job(job + apart, other)
    assert FIRST_PORT <= port < FIRST_PORT + PORTS <= 32768
    assert (port == second) == ((job, step) == (job + apart, other))


def topology(tmp_path: Path, env: dict[str, str], *overrides: str, **options: Any) -> Topology:
    written = load(write_recipe(tmp_path, launch={"nproc_per_node": "auto"}), list(overrides))
    return find_topology(written.recipe, {**NO_GPUS, **env}, explicit=written.where, root=tmp_path, **options)


def test_the_same_recipe_becomes_the_run_that_its_launcher_started(tmp_path: Path) -> None:
    alone = topology(tmp_path, {})
    assert (alone, alone.origin) == (Topology("cpu", 1, 2), "")
    chosen = {"MASTER_ADDR": "ib-n1", "MASTER_PORT": "6000"}
    for env in RECORDED["srun -N2 --ntasks-per-node=1"]:
        by_node = Topology("cpu", 2, 2, source="Slurm job 1", endpoint=f"n1:{port_of_job(1)}")
        assert topology(tmp_path, env) == by_node
        assert topology(tmp_path, env | chosen).endpoint == "ib-n1:6000"
    by_task = topology(tmp_path, RECORDED["srun -N2 --ntasks-per-node=2"][1])
    assert by_task == Topology("cpu", 2, 2, joined=True, source="Slurm job 2", endpoint=f"n1:{port_of_job(2)}")
    torchrun = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "x"}
    worker = Topology("cuda", 2, 8, joined=True, source="torchrun", endpoint="x:29500")
    assert topology(tmp_path, torchrun | {"CUDA_VISIBLE_DEVICES": "0"}, "train.global_batch_size=16") == worker
    four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert topology(tmp_path, four) == Topology("cuda", 1, 4)
    assert topology(tmp_path, four, "launch.nproc_per_node=2") == Topology("cuda", 1, 2)
    gpus = topology(tmp_path, {**PET, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert (gpus.world_size, gpus.origin) == (32, " (from Kubeflow)")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["launch.nnodes=4"], "launch.nnodes: 4 contradicts Slurm job 2, which has 2: set launch.nnodes=2, or"),
        (["launch.nnodes=3:4"], "launch.nnodes: 3:4 contradicts Slurm job 2, which has 2"),
        (["launch.nproc_per_node=8"], "launch.nproc_per_node: 8 contradicts Slurm job 2, which has 2"),
        (
            ["launch.nnodes=2", "launch.rdzv_endpoint=n1:29500"],
            f"launch.rdzv_endpoint: n1:29500 contradicts Slurm job 2, which has n1:{port_of_job(2)}: remove this key",
        ),
    ],
)
def test_keys_that_contradict_the_launcher_are_refused(overrides: list[str], says: str, tmp_path: Path) -> None:
    env = RECORDED["srun -N2 --ntasks-per-node=2"][0]
    with pytest.raises(RecipeError) as refused:
        topology(tmp_path, env, *overrides)
    assert says in str(refused.value)
    assert topology(tmp_path, env, "launch.nnodes=2", "launch.nproc_per_node=2").world_size == 4


def test_several_plain_hosts_need_an_endpoint(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"launch\.nnodes: several nodes need a rendezvous.*rdzv_endpoint"):
        topology(tmp_path, {}, "launch.nnodes=2")
    assert topology(tmp_path, {}, "launch.nnodes=2", elsewhere=True).endpoint is None  # `validate` reports it


@pytest.mark.parametrize("nnodes", ["1:2", "2:4"])
def test_a_launcher_with_a_number_of_nodes_in_the_range_is_accepted(nnodes: str, tmp_path: Path) -> None:
    fixed = topology(tmp_path, RECORDED["srun -N2 --ntasks-per-node=1"][0], f"launch.nnodes={nnodes}")
    assert (fixed.nnodes, fixed.least_nnodes) == (2, None)  # Slurm ends a job that has lost a node
    hosts = topology(tmp_path, {}, f"launch.nnodes={nnodes}", "launch.rdzv_endpoint=a:1")
    assert (hosts.least_nnodes, hosts.nnodes) == tuple(map(int, nnodes.split(":")))


def test_a_name_of_the_first_node_that_stays_unknown_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str | None] = [None, None]
    monkeypatch.setattr(topologies, "address_of", lambda host: answers.pop() if answers else "10.0.0.1")
    monkeypatch.setattr(topologies, "NAME_POLL_S", 0.0)
    slurm = topology(tmp_path, {**RECORDED["srun -N2 --ntasks-per-node=1"][1], "SLURM_STEP_NODELIST": "gpu-a[08-09]"})
    kubeflow = topology(tmp_path, PET)
    hosts = topology(tmp_path, {}, "launch.nnodes=2", "launch.rdzv_endpoint=a:1")
    check_name(slurm, {})  # known at the third look: the name of a pod that has just started
    assert not answers
    for name in ("NAME_S", "POD_NAME_S"):
        monkeypatch.setattr(topologies, name, -1.0)
    for each, says in {
        slurm: "gpu-a08:20037, where Slurm job 1 lets its nodes meet: gpu-a08 cannot be resolved on .*; set MASTER",
        kubeflow: "Kubeflow lets its nodes meet: job-node-0-0.job cannot be resolved on .*; set MASTER_ADDR",
        hosts: "launch.rdzv_endpoint: a:1: a cannot be resolved on .*; choose a host that every node can resolve",
    }.items():
        answers.append(None)
        with pytest.raises(RecipeError, match=says):
            check_name(each, {})
    answers.append(None)
    check_name(topology(tmp_path, {}), {})  # one node needs none
    assert answers


def test_the_host_of_an_endpoint() -> None:
    endpoints = {"a:1": "a", "[fd00::1]:29400": "fd00::1", "fd00::a": "fd00::a", "10.0.0.1": "10.0.0.1"}
    assert {endpoint: host_of(endpoint) for endpoint in endpoints} == endpoints


def test_a_resume_does_not_depend_on_the_launcher(tmp_path: Path) -> None:
    written = load(write_recipe(tmp_path, launch={"nproc_per_node": 2}))
    environments = ({}, PET | {"PET_NPROC_PER_NODE": "2"}, RECORDED["srun -N2 --ntasks-per-node=2"][0])
    plans = [make_plan(written, find_topology(written.recipe, {**NO_GPUS, **env})) for env in environments]
    assert len({plan.digest() for plan in plans}) == 3  # two runs in one folder do not mix
    assert [plan.identity() for plan in plans] == [plans[0].identity()] * 3
