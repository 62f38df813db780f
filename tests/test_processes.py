"""No process outlives a killed one, and output that cannot be written ends no process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
from injection import LEAVE_WITHIN_S, STEPS, run_with, small_recipe, valid_steps
from pseudo_terminal import Terminal
from support import SHAKESPEARE, environment, events, fsdptrain, planned, run_folder, wait_for_step, wait_until

from fsdptrain import processes
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.errors import Stopped, disk_full_error, is_disk_full
from fsdptrain.processes import SAME_REQUEST_S, Child, StopRequest
from fsdptrain.text import printable

AGENT, WORKER = "fsdptrain.launch.agent", "[rank 1]"
FSDPTRAIN = ("-m", "fsdptrain")
PR_SET_CHILD_SUBREAPER = 36
RUN = (*FSDPTRAIN, "run")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", *RUN)


def processes_of(run: Path) -> dict[psutil.Process, str]:
    """Return the processes of a command, other than zombies → command line and name; a forked worker has a name only.

    They have the variable MARK of the command.
    """
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("MARK") == str(run):
                found[process] = f"{' '.join(process.cmdline())} [{process.name()}]"
    return found


def process_of(run: Path, part: str, command: subprocess.Popen[bytes]) -> psutil.Process:
    """Wait for a process of a command with this text in its command line or name."""
    while command.poll() is None:
        for process, words in processes_of(run).items():
            if part in words:
                return process
        time.sleep(0.01)
    raise AssertionError(f"the command ended before a process {part!r} started")


def check_all_end(run: Path) -> None:
    wait_until(lambda: not processes_of(run), "some processes did not end", LEAVE_WITHIN_S)


def check_killed(run: Path, moment: str, victim: str, *words: object) -> None:
    """Start `python words`; at a moment (`2`, `step+1`, `PROCESS+0.5`) kill a process: all others must end soon.

    This process adopts orphans, as systemd, slurmstepd and the first process of a container do: their new parent is not
    process 1.
    """
    adopt = partial(ctypes.CDLL(None).prctl, PR_SET_CHILD_SUBREAPER)
    adopt(1)
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = subprocess.Popen([sys.executable, *map(str, words)], env=environment(MARK=str(run)), **nowhere)
    try:
        process, _, seconds = moment.rpartition("+")
        if process == "step":
            wait_for_step(run, 1)
        elif process:
            process_of(run, process, command)
        time.sleep(float(seconds))
        (command if victim == "command" else process_of(run, victim, command)).kill()
        check_all_end(run)
    finally:
        for left in processes_of(run):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        command.wait()
        adopt(0)


CHILD = """
import os, signal, sys
from fsdptrain.processes import answer_parent, records_of_parent
send = answer_parent()
for record in records_of_parent():
    print("what a library prints")
    if record["do"] == "answer":
        send({"got": record}, bytes(3))
    elif record["do"] == "fail":
        sys.exit("ValueError: the reason\\nthe last line")
    elif record["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        signal.pause()
"""


def test_a_child_answers_records_and_its_end_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "child_command", lambda module: [sys.executable, "-c", CHILD])
    with Child("any", keep_errors=True) as child:
        for text in ("é", "\ud800"):
            asked = {"do": "answer", "text": text}
            assert child.ask(asked) == {"got": asked} and child.content(3) == bytes(3)
        assert child.ask({"do": "fail"}, wait=lambda: None) is None
        assert (child.code, child.killed, child.last_error()) == (1, "", "ValueError: the reason")
        printed = ["what a library prints"] * 3
        assert child.errors().splitlines() == [*printed, "ValueError: the reason", "the last line"]
        assert child.ask({"do": "answer"}) is None, "it has ended"
    with Child("any", keep_errors=True) as child:
        assert child.ask({"do": "die"}) is None and "SIGKILL" in child.killed
    waits: list[int] = []
    with Child("any", keep_errors=True) as child, pytest.raises(TimeoutError):
        child.ask({"do": "nothing"}, wait=lambda: waits.append(1), limit_s=1.0)
    assert waits and child.code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("message", "is_full"),
    [
        ("No space left on device (os error 28)", True),
        ('IoError(Os { code: 28, kind: StorageFull, message: "…" })', True),
        ("a CUDA driver failed with error code: 28", False),
    ],
)
def test_a_full_disk_of_a_library_in_rust_names_the_folder_of_temporary_files(message: str, is_full: bool) -> None:
    """tokenizers and safetensors, in Rust, raise no OSError and name no file."""
    assert is_disk_full(error := RuntimeError(message)) == is_full
    assert "TMPDIR" in str(disk_full_error(error))


MOMENTS = ["0", "0.5", "2", "6", f"{AGENT}+0", f"{WORKER}+0", f"{WORKER}+2", "step+1"]
UNDER_TORCHRUN = ["-u -m fsdptrain+1", "-u -m fsdptrain+4", "step+1"]
KILLS = [
    *((moment, victim, RUN) for moment in MOMENTS for victim in ("command", AGENT, WORKER)),
    # torchrun, or a worker
    *((moment, victim, TORCHRUN) for moment in UNDER_TORCHRUN for victim in ("command", "-u -m fsdptrain run ")),
    ("fsdptrain.forecast.server+0.2", "command", (*FSDPTRAIN, "validate", "--advise")),
]


@pytest.mark.parametrize(
    ("moment", "victim", "start"),
    [
        (f"{AGENT}+0.8", "command", RUN),
        (f"{WORKER}+0", AGENT, RUN),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in KILLS),
    ],
)
def test_no_process_outlives_a_killed_one(moment: str, victim: str, start: Sequence[str], tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=5000)
    check_killed(tmp_path / "run", moment, victim, *start, recipe)


POOL = """
import time
from concurrent.futures import ProcessPoolExecutor
from fsdptrain.processes import forked_after_import
if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, forked_after_import("json"))
    pool.submit(time.sleep, 600)
    print(pool.submit(len, "ready").result(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_of_a_pool_outlives_the_one_that_started_it(tmp_path: Path, way: signal.Signals) -> None:
    """The parent of its processes is a server of the standard library, which alone is a child of that one."""
    (tmp_path / "pool.py").write_text(POOL)
    env = environment(MARK=str(tmp_path))
    with subprocess.Popen([sys.executable, tmp_path / "pool.py"], env=env, stdout=subprocess.PIPE) as command:
        assert command.stdout and command.stdout.readline() == b"5\n"
        assert len(processes_of(tmp_path)) >= 4
        command.send_signal(way)
    check_all_end(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("command", ["prepare", "validate", "run"])
def test_no_process_outlives_a_killed_command_that_tokenises(command: str, tmp_path: Path) -> None:
    train_bpe(iter([""]), 300).save_pretrained(tmp_path / "tokenizer")
    words = small_recipe(tmp_path, model__tokenizer=str(tmp_path / "tokenizer")), f"data.path={tmp_path}/data"
    (tmp_path / "data").mkdir()
    text = SHAKESPEARE.read_text()
    for number in range(2):  # each a part that a process encodes
        rows = (json.dumps({"text": f"{command} {number} {row} {text[row : row + 2000]}"}) for row in range(9000))
        (tmp_path / "data" / f"{number}.jsonl").write_text("\n".join(rows))
    check_killed(tmp_path / "run", "multiprocessing.forkserver+8", "command", *FSDPTRAIN, command, *words)


@pytest.mark.soak
def test_a_run_of_a_killed_program_ends_with_a_checkpoint(tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path, train__steps=5000, checkpoint__every=None), tmp_path / "run"
    program = f"import fsdptrain; fsdptrain.run({str(recipe)!r})"
    check_killed(run, "step+1", "command", "-c", program)
    assert valid_steps(run) and events(run, "stop")[-1]["signal"]


# --- output that cannot be written -----------------------------------------------------------------------------------

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def run_redirected(to: str, *words: object, **extra: str) -> tuple[int, str]:
    """Run a command in a shell with its output redirected; return its exit code and standard error."""
    line = shlex.join([sys.executable, "-m", "fsdptrain", *map(str, words)])
    done = subprocess.run(
        ["bash", "-c", f"{line} {to}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, timeout=180, env=environment(**extra), check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [("schema",), ("recipes", "list"), ("recipes", "show", "shakespeare"), ("--help",)])
def test_a_result_that_cannot_be_written_ends_with_6(words: Sequence[str]) -> None:
    assert run_redirected("> /dev/full", *words) == (
        6, "fsdptrain: standard output cannot be written: No space left on device\n",
    )  # fmt: skip
    for no_reader in ("| true", ">&-", ">&- 2>&- <&-"):
        assert run_redirected(no_reader, *words) == (0, "")
    assert run_redirected("> /dev/null", *words, **ASCII) == (0, "")


def test_the_exit_code_of_a_failure_does_not_depend_on_its_readers(tmp_path: Path) -> None:
    code, stderr = run_redirected("> /dev/full", "verify", tmp_path)
    assert code == 6 and stderr == f"fsdptrain: {tmp_path}: no checkpoint\n"
    recipe = small_recipe(tmp_path, optim__lr=-1)
    assert run_redirected("| true", "validate", recipe)[0] == run_redirected("2> /dev/full", "validate", recipe)[0] == 2


def test_characters_that_an_encoding_lacks_are_escaped() -> None:
    print_it = (
        "from fsdptrain.processes import open_safe_streams; open_safe_streams(); print('2 × 2 · ⟦a⟧ → é夜\\udcff')"
    )
    for encoding, text in (
        ("ascii", r"2 \xd7 2 \xb7 \u27e6a\u27e7 \u2192 \xe9\u591c\udcff"),
        ("latin-1", r"2 × 2 · \u27e6a\u27e7 \u2192 é\u591c\udcff"),
    ):
        env = environment(PYTHONIOENCODING=encoding)
        done = subprocess.run([sys.executable, "-X", "utf8", "-c", print_it], capture_output=True, env=env, check=True)
        assert done.stdout.decode(encoding) == text + "\n"


def test_no_command_prints_control_characters_of_foreign_text(tmp_path: Path) -> None:
    """Of rows, file names, columns, the command line and the records of a run."""
    foreign = "\x1b]0;title\a\x1b[31mred\x1b[2J\r\x7f\x9b\u202e[link=http://x]"
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / f"{foreign.replace('/', '')}.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{foreign} {number}", foreign: 1}) for number in range(40)))
    recipe, run = small_recipe(tmp_path, data__path=str(tmp_path / "data")), tmp_path / "run"

    def check(code: int, *words: object) -> None:
        done = fsdptrain(*words)
        shown = done.stdout + done.stderr
        assert done.returncode == code and shown == printable(shown)
        assert r"\x1b]0;title\x07\x1b[31mred\x1b[2J" in shown

    check(0, "validate", recipe, "--no-build")
    check(2, "validate", foreign)
    rundir = run_folder(planned(recipe))
    record = {"event": "error", "at": time.time(), "type": foreign, "message": foreign}
    rundir.metrics.write_text(json.dumps(record) + "\n")
    check(0, "status", run)
    assert json.loads(fsdptrain("status", run, "--json").stdout)["why"].count("\x7f")  # its own escapes


def test_a_run_does_not_end_because_its_output_cannot_be_written(tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path), tmp_path / "run"
    rows = [json.dumps({"text": f"— {number} · «ночь» ⟦…⟧ 夜"}, ensure_ascii=False) for number in range(400)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert run_redirected("> /dev/full", "run", recipe, **ASCII) == (0, "")
    assert [event["step"] for event in events(run, "step")] == list(range(1, STEPS + 1))
    assert not [path.name for path in (run / "logs").iterdir() if not path.stat().st_size and path.name != "lock"]
    assert run_redirected("> /dev/full", "verify", run)[0] == 6
    assert run_redirected(">&-", "verify", run, **ASCII) == (0, "")


def test_a_closed_terminal_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    recipe, run = small_recipe(tmp_path, train__steps=5000, checkpoint__every=None), tmp_path / "run"
    with Terminal("run", recipe) as terminal:
        wait_for_step(run, 2)
        terminal.hang_up()
        assert terminal.process.wait(60) == 75
    assert valid_steps(run) and events(run, "stop")[-1]["signal"] == "SIGUSR1"


def test_an_error_of_any_length_arrives(tmp_path: Path) -> None:
    text = "ü" * 15_000 + " the end"
    fault = {"where": "fsdptrain.data.prepare:prepare", "do": "fail", "how": {"text": text}}
    ended = run_with(small_recipe(tmp_path), fault)
    assert not ended.problems(5, "failed before the first step was done: RuntimeError: üüü", "the end\n")
    assert len(ended.output) < 20_000 and len(json.dumps(events(tmp_path / "run", "error"))) < 200_000


def test_a_folder_that_cannot_be_written_is_named_in_one_line_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    code, stderr = run_redirected("> /dev/null", "run", small_recipe(tmp_path), FSDPTRAIN_CACHE=str(cache))
    assert code == 2 and f"{cache}/tokenizers: Not a directory" in stderr and "set FSDPTRAIN_CACHE" in stderr
    recipe = small_recipe(tmp_path, output_dir=str(tmp_path / "Läufe"))
    code, locale = run_redirected("> /dev/null", "run", recipe, **ASCII)
    assert code == 2 and "set LC_ALL=C.UTF-8" in locale
    assert len(stderr.splitlines()) == len(locale.splitlines()) == 1


def test_without_a_home_folder_the_message_names_the_cache() -> None:
    ask = (
        "import os, pwd; from fsdptrain.data.cache import cache_dir; os.getuid() or os.setuid(54321); cache_dir('data')"
    )
    env = {name: value for name, value in environment().items() if name not in ("HOME", "FSDPTRAIN_CACHE")}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=False)
    if os.getuid():
        pytest.skip("only root can become an unknown user")
    assert "RecipeError: the cache for prepared data cannot be written" in done.stderr


def test_a_stop_signal_ends_long_work_of_a_library_at_once() -> None:
    with StopRequest() as stop:
        with pytest.raises(Stopped, match=r"stopped by SIGTERM before the first step"), stop.obeyed_at_once():
            for _ in range(10**6):
                with contextlib.suppress(Exception):  # as libraries do
                    os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped), stop.obeyed_at_once():  # one that came before
            raise AssertionError("the work began")
        os.kill(os.getpid(), signal.SIGTERM)  # outside, it is only counted
    assert stop.count >= 1


@pytest.mark.parametrize(
    ("signals", "count", "by"),
    [
        ("TERM TERM", 1, "SIGTERM"),
        ("TERM TERM later TERM", 2, "SIGTERM"),
        ("USR1 TERM TERM", 1, "SIGTERM"),  # Slurm's, before and at the time limit
        ("USR1 TERM TERM later TERM", 2, "SIGTERM"),
        ("INT INT", 2, "Ctrl-C"),
    ],
)
def test_a_repeated_sigterm_is_one_request_and_a_later_one_is_a_second(signals: str, count: int, by: str) -> None:
    with StopRequest() as stop:
        for name in signals.split():
            if name == "later":
                time.sleep(SAME_REQUEST_S + 0.05)
            else:
                os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
    assert (stop.count, stop.by) == (count, by)
