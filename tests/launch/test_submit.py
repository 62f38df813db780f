"""Runs as jobs of Slurm: the batch script, with stand-ins for srun and scontrol."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import fsdptrain, wait_until, write_recipe

from fsdptrain.cli import find_recipe
from fsdptrain.errors import RecipeError
from fsdptrain.launch.submit import Job, gpus_of_node, parse_options, prepare_job, slurm_script, submit_to_slurm
from fsdptrain.plan.hardware import parse_hardware

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
    wait_until(calls.exists, "srun did not start")
    if send == signal.SIGUSR1:  # Slurm sends it to the script alone, and long after the start of srun
        while "USR1" not in calls.read_text() and time.monotonic() < end:
            process.send_signal(send)  # again, if the script did not know srun yet
            with contextlib.suppress(AssertionError):
                wait_until(lambda: "USR1" in calls.read_text(), "no signal came", 3)
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
        *((code, None, 100, RUNNING, code, []) for code in (1, 5, 127)),
    ],
)
def test_a_job_is_requeued_only_if_its_time_is_over_or_it_is_preempted(
    code: int, send: signal.Signals | None, age_s: int, record: str, exits: int, calls: list[str], tmp_path: Path
) -> None:
    assert run_script(tmp_path, code, send, age_s, record) == (exits, calls)


def directives_of(script: str) -> dict[str, str]:
    lines = [shlex.split(line)[1:] for line in script.splitlines() if line.startswith("#SBATCH ")]
    found = [(word.partition("=")[0], word.partition("=")[2]) for (word,) in lines]
    assert len(dict(found)) == len(found)  # none is given twice
    return dict(found)


def test_the_script_of_a_job(tmp_path: Path) -> None:
    folder = tmp_path / "a 100% run"
    job = job_of(tmp_path, "optim.lr=1e-4", name="my run", output_dir=str(folder))
    script = slurm_script(job, own={"--time": "4:00:00", "--account": "lab", "--partition": None})
    assert directives_of(script) == {
        "--job-name": "my run", "--nodes": "2", "--ntasks-per-node": "1", "--gpus-per-node": "4", "--exclusive": "",
        "--mem": "0", "--output": f"{tmp_path}/a 100%% run/logs/slurm-%j.log", "--open-mode": "append", "--requeue": "",
        "--signal": "B:USR1@300", "--time": "4:00:00", "--account": "lab",
    }  # fmt: skip
    (line,) = [line for line in script.splitlines() if line.startswith("command=")]
    assert shlex.split(line.removeprefix("command=(").removesuffix(")")) == [
        sys.executable, "-P", "-m", "fsdptrain", "run", str(tmp_path / "recipe.yaml"), "optim.lr=1e-4",
        "launch.max_restarts=3",
    ]  # fmt: skip
    for option in ("--cpus-per-task=8", "--mem-per-gpu=64G"):
        assert not {"--exclusive", "--mem"} & directives_of(slurm_script(job, [option])).keys()
    assert "--gpus-per-node" not in directives_of(slurm_script(job_of(tmp_path, gpus=0)))
    assert "max_restarts=3" not in slurm_script(job_of(tmp_path, launch__max_restarts=0))
    assert not folder.exists()


def test_options_of_sbatch_are_words_of_the_script(tmp_path: Path) -> None:
    given = {
        "--comment": "it's; $HOME #1", "--constraint": "ib&ssd", "--signal": "B:USR1@600", "--mem": "64G",
        "--gpus-per-node": "h100:4", "--exclusive": "user", "--gres": "lscratch:10",
    }  # fmt: skip
    script = slurm_script(job_of(tmp_path), [*(f"{name}={value}" for name, value in given.items()), "--hold"])
    assert (given | {"--hold": ""}).items() <= directives_of(script).items()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--nodes=4", "--nodes is set by submit"),
        ("--no-requeue", "--no-requeue is set by submit"),
        ("--signal=USR1@600", "the script handles only --signal=B:USR1@SECONDS"),
        ("-N4", "is not a long option"),
        ("--comment=a\nrm -r /", "is not a long option"),
        ("--exclusive --nodes=4", "is not a long option"),
    ],
)
def test_options_of_sbatch_that_contradict_the_job_are_refused(option: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_options([option])


def test_a_range_of_nodes_becomes_the_number_of_the_job(tmp_path: Path) -> None:
    assert "#SBATCH --nodes=2\n" in slurm_script(job_of(tmp_path, "launch.nnodes=1:2", nodes=None))
    assert job_of(tmp_path, "launch.nnodes=1:2", nodes=1).plan.topology.nnodes == 1


@pytest.mark.parametrize(
    ("overrides", "options", "says"),
    [
        (["launch.nnodes=4"], {}, "launch.nnodes: 4 contradicts this job, which has 2"),
        (["launch.nnodes=1:2"], {"nodes": 4}, "launch.nnodes: 1:2 contradicts this job, which has 4"),
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
        (None, 4, 4), (None, 0, 0), ("8xh100", None, 8), ("16xh100", 16, 16), ("h100", 2, 2), ("cpu", None, 0),
        (None, None, None), ("h100", None, None), ("8xh100", 4, None), ("cpu", 2, None),
    ],
)  # fmt: skip
def test_the_gpus_of_a_node_are_known_or_refused(hardware: str | None, given: int | None, gpus: int | None) -> None:
    choice = parse_hardware(hardware) if hardware else None
    if gpus is not None:
        assert gpus_of_node(choice, given) == gpus
        return
    with pytest.raises(RecipeError, match="--gpus-per-node"):
        gpus_of_node(choice, given)


def test_the_log_of_a_job_can_be_written_and_what_sbatch_says_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    job = job_of(tmp_path, output_dir=str(tmp_path / "runs" / "one"))
    with pytest.raises(RecipeError, match="sbatch refused the job: invalid partition"):
        submit_to_slurm(job, slurm_script(job))
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
