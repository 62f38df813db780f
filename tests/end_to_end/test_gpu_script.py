"""`make gpu` on a CPU, with tiny models: it runs to its end, and it does not claim to know a GPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plan.test_gpus import write_nvidia_smi
from support import ROOT, environment

from fsdptrain.plan.hardware import KNOWN
from fsdptrain.text import GIB

SCRIPT = ROOT / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.soak


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("gpu")


def test_gpus_that_torch_does_not_see_end_the_script_before_a_check(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, "case $1 in -L) echo 'GPU 0: NVIDIA H100';; *) echo 535.161.08;; esac")
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}") | {"CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, SCRIPT, "--folder", tmp_path / "folder"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=170, env=env)
    assert done.returncode == 1 and "sees no GPU: " in done.stderr and "pip install --index-url" in done.stderr
    with tarfile.open(done.stdout.split()[-1]) as archive:
        assert {"folder/machine/driver.txt", "folder/versions.log"} <= {*archive.getnames()}


def test_all_checks_run_on_a_cpu(tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    table.write_text("what is before the table stays\n\n## The last run\n\nthe table of another day\n")
    command = [sys.executable, SCRIPT, "--device", "cpu", "--folder", tmp_path / "folder", "--table", table]
    env = environment(OMP_THREAD_LIMIT=str(os.cpu_count()))  # with fewer than OMP_NUM_THREADS a product is wrong
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=1800, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    before, _, after = table.read_text().partition("## The last run\n")
    assert before == "what is before the table stays\n\n" and "another day" not in after
    rows = [line.strip("| ").split(" | ") for line in after.splitlines() if line.startswith("| ")][2:]
    assert all(row[0] in done.stdout for row in rows)
    assert {row[2] for row in rows} == {"needs a GPU"}
    names = " ".join(row[0] for row in rows)
    assert all(name in names for name in ("attention, flash, causal", "varlen", "packed gradients", "chunked loss"))
    failed = [row[0] for row in rows if row[1] == "failed"]
    trainers = [row[0] for row in rows if "the Trainer" in row[0]]
    assert len(trainers) == 4 and failed == ([] if importlib.util.find_spec("accelerate") else trainers)


def test_the_table_of_the_repository_is_not_that_of_a_cpu() -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    assert text.count("## The last run\n") == 1
    assert "needs a GPU |" not in text


def test_every_check_is_documented(script: Any) -> None:
    listed = " ".join(line.split(" | ")[0] for line in (ROOT / "docs/gpu.md").read_text().splitlines())
    assert [name for name in script.CHECKS if name not in listed] == []
    assert all(script.function_doc(check.run) for check in script.CHECKS.values())


def a_setting(script: Any, tmp: Path, **facts: Any) -> Any:
    return script.Setting(
        tmp, {"device": "cuda", "gpus": 1, "name": "NVIDIA H100 80GB HBM3", "memory": 85e9, **facts}, True
    )


def test_a_check_that_raises_is_a_line_and_the_others_go_on(script: Any, tmp_path: Path) -> None:
    def broken(setting: Any) -> Any:
        raise ValueError("no | such\nfile")

    good = [script.Row("good", "1", "ok")]
    chosen = {
        "broken": script.Check(broken, 10), "exits": script.Check(lambda _: sys.exit("the ranks exited"), 10),
        "two": script.Check(broken, 10, gpus=2), "good": script.Check(lambda _: good, 10),
    }  # fmt: skip
    rows = list(script.run_checks(chosen, a_setting(script, tmp_path)))
    assert [row.verdict for row in rows] == [
        "failed: ValueError: no / such file", "failed: SystemExit: the ranks exited", "needs 2 GPUs", "ok",
    ]  # fmt: skip
    assert "ValueError" in (tmp_path / "broken.log").read_text()


def test_the_table_is_there_after_each_line_and_a_killed_first_job_ends_nothing(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    table, seen = tmp_path / "gpu.md", list[str]()

    def look(setting: Any) -> Any:
        seen.append(table.read_text())
        return [script.Row("later", "1", "ok")]

    monkeypatch.setattr(script, "RANKS", tmp_path / "killed.py")
    monkeypatch.setattr(script, "CHECKS", {"versions": script.CHECKS["versions"], "later": script.Check(look, 10)})
    options = SimpleNamespace(device="cpu", tiny=True, table=table, only=None, lanes=1)
    assert script.make_table(options, tmp_path) == ["versions"]
    assert "| versions |  | failed: SystemExit: killed.py" in seen[0] and "exited with [-9]" in seen[0]
    assert "| later |" in table.read_text() and json.loads((tmp_path / "figures.json").read_text())["rows"]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "LEAVE_S", 0.1)
    lines = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('no such card')\ntime.sleep(600)\n"
    (tmp_path / "one.py").write_text(lines)
    with pytest.raises(SystemExit, match=r"exited with \[None, 1\]: no such card"):
        common.run_ranks(tmp_path / "one.py", 2, log=tmp_path / "log", timeout=500)


STEP = {"event": "step", "loss": 1.0, "grad_norm": 1.0, "samples": "a"}
TWO = [STEP | {"step": 1}, STEP | {"step": 2}]
HANG, WANTED = "fsdptrain: the run hung after step 4: rank 0 is in corpus.batch", {"where": "rank 0 is in corpus"}
MEMORY = (
    "fsdptrain: restarting\nfsdptrain: rank 0 failed before the first step: out of memory in the forward\n"
    "forecast: 400 GiB of 79.1 GiB, the peak in the loss\n"
    "with these overrides it would fit:\n  train.loss=chunked  (…)\n"
)
FORECAST = {"step_s": 1.0, "step_s_range": [0.9, 1.1]}


def test_verdicts(script: Any) -> None:
    checks = script.checks
    of_memory = functools.partial(checks.judged, "what", wanted=checks.OUT_OF_MEMORY, codes=(3, 5))
    good = [
        checks.synced("packed", {"step.py:7": 8}, 8), checks.against("what", 0.03, 0.012, "eager"),
        checks.forecasted("what", 100e9, 101e9, 0.02), checks.timed("", FORECAST, 1.09, True),
        checks.equal_events("what", TWO, [TWO[0], *TWO], ""), checks.judged("what", 5, HANG, WANTED),
        of_memory(5, MEMORY),
    ]  # fmt: skip
    wrong = [
        checks.synced("packed", {"step.py:7": 8, "loss.py:3": 1}, 8), checks.against("what", 0.5, 0.012, "eager"),
        checks.forecasted("what", 100e9, 103e9, 0.02), checks.timed("", FORECAST, 1.11, True),
        checks.timed("", FORECAST, 0.89, True), checks.equal_events("what", TWO, [TWO[0]], ""),
        checks.equal_events("what", TWO, [TWO[0], TWO[1] | {"loss": 1.1}], ""),
        checks.equal_events("what", [], [], ""), checks.judged("what", 1, HANG, WANTED),
        checks.judged("what", 5, "fsdptrain: the run hung", WANTED),
        of_memory(5, MEMORY.replace("would fit", "need less")), of_memory(1, "Traceback …: CUDA out of memory"),
    ]  # fmt: skip
    assert {row.verdict for row in good} == {"ok"} and {row.verdict for row in wrong} == {"WRONG"}
    curve = [[2.0, 1.0], [1.0, 1.0]]
    curves = {"first": curve, "same": curve, "short": curve[:1], "off": [[2.1, 1]] * 2}
    assert [row.verdict for row in checks.compared_curves(curves, 2)] == ["ok", "WRONG", "WRONG"]
    assert checks.message_of(MEMORY).startswith("fsdptrain: rank 0 failed before the first step: out of memory in the")


def test_the_measured_fields_of_a_card_can_be_put_into_its_row(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = a_setting(script, tmp_path, gpus=8)
    rates = {"kernel": "flash", "forward": 3e14, "backward": 2e14}
    made: dict[str, Any] = {
        "rates": {"flops": 7e14, "bytes": 3e12},
        "attention_rates": [
            rates | {"kind": "causal", "forward": 1e14}, rates | {"kernel": "efficient", "kind": "causal"},
            rates | {"kernel": "varlen", "kind": "causal"}, rates | {"kernel": "varlen FA3", "kind": "packed"},
            {"kernel": "varlen FA3", "kind": "causal", "forward": 5e14, "backward": 2e14},
            {"kernel": "cudnn", "kind": "causal", "why": "not built"}, rates | {"kernel": "new", "kind": "causal"},
        ],
        "step": {"idle": 0.1, "memory": {"allocated": 2 * GIB, "reserved": 3 * GIB, "outside": GIB}},
        "bandwidths": {"all-gather": 3e11, "reduce-scatter": 3.2e11, "all-reduce": 3.4e11},
    }  # fmt: skip
    card = KNOWN["h100-80gb"]
    forecast = {"peak_bytes": 2 * GIB, "reserved_bytes": 3 * GIB, "overhead_bytes": card.context}
    monkeypatch.setattr(script.Setting, "job", lambda self, name, *_, **__: made[name])
    monkeypatch.setattr(script.Setting, "command", lambda *_: (0, json.dumps(forecast)))
    names = ["rates", "attention", "forecast-1B", "bandwidths"]
    rows = {row.what: row for row in script.run_checks({name: script.CHECKS[name] for name in names}, setting)}
    assert rows["1B, idle share of the GPU"].verdict == rows["1B, memory outside torch"].verdict == "WRONG"
    assert rows["1B, memory allocated"].verdict == rows["all-gather, bus bandwidth"].verdict == "ok"
    seconds, figures = script.remarks(setting)
    assert seconds.startswith("Seconds: rates ") and "`h100-80gb`" in figures
    fields = eval(f"dict({figures.split('`')[-2]})", {"int": int, "GIB": GIB})
    shares = {**card.attention_share, "flash": (0.3, 0.2), "FA3": (0.51, 0.2)}  # what was not measured stays
    assert fields == {"memory_share": 0.9, "attention_share": shares, "context": GIB, "intra_bw": 3.2e11}


def test_the_end_of_a_job_ends_the_checks_and_leaves_the_archive(tmp_path: Path) -> None:
    code = f"""if True:
        import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
        import os, signal, subprocess, gpu

        def check(setting):
            child = subprocess.Popen(["sleep", "600"])
            setting.log.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            child.wait()
            raise RuntimeError

        gpu.CHECKS = {{"begun": gpu.Check(check, 900, alone=False)}}
        gpu.find_setting = lambda _, folder, tiny: gpu.Setting(folder, {{"device": "cpu", "gpus": 0}}, tiny)
        gpu.collect = lambda folder: (folder / "again.log").touch() if (folder / "begun.log").exists() else None
        gpu.main()
    """
    command = [sys.executable, "-c", code, "--folder", tmp_path / "made"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode and "KeyboardInterrupt" in done.stderr
    with tarfile.open(tmp_path / "made.tar.gz") as archive:
        assert {"made/begun.log", "made/again.log"} <= {*archive.getnames()}
