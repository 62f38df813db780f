"""`benchmarks/calibrate.py` on a few tiny runs, so that it works when it is needed, and on the runs held out."""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT

KNOWN = {
    "H100 product_share": 0.55,
    "A100 product_share": 0.7,
    "H100 flash_1": 1.3,
    "A100 flash_1": 0.95,
    "late_s": 6e-6,
}


def in_process(function: Callable[[Path], None], folder: Path) -> None:
    """Call a function in a process of its own: a pretended accelerator cannot be removed again."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


def _calibrate(folder: Path) -> None:
    """Calibrate on runs of which the figures are known: their times are forecasts with others, but for one outlier."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import dataclasses

    import calibrate

    runs = []
    for gpu, gpus, seq_len, rows, flash_1, slower in [
        ("h100-80gb", 8, 256, 64, True, 1.0), ("h100-80gb", 8, 8192, 2, True, 1.0),
        ("h100-80gb", 16, 256, 64, False, 1.0), ("h100-80gb", 512, 256, 64, False, 1.0),
        ("a100-80gb", 8, 256, 64, True, 1.0), ("a100-40gb", 8, 256, 64, True, 1.0),
        ("a100-80gb", 8, 8192, 2, True, 1.0), ("a100-40gb", 8, 8192, 2, True, 1.0),
        ("a100-40gb", 8, 256, 64, True, 1.5),
    ]:  # fmt: skip
        config = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 2048, "n_head": 16, "n_positions": seq_len}
        run = calibrate.Run("tiny", gpu, gpus, config, 8, seq_len, rows, 3, 1.0, flash_1=flash_1)
        step_s = slower * calibrate.forecast_s(run, calibrate.traces(run, folder), KNOWN)
        runs.append(dataclasses.replace(run, step_s=step_s))
    calibrate.published_runs = lambda: [*runs, dataclasses.replace(runs[0], held_out=True, step_s=1.0)]
    calibrate.field_runs = lambda: runs[:1]
    sys.argv = ["calibrate.py", "--traces", str(folder), "--plot", str(folder / "errors.png")]
    with (folder / "out.txt").open("w") as sys.stdout:
        calibrate.main()


@pytest.mark.soak
def test_it_finds_the_figures_that_explain_the_runs(tmp_path: Path) -> None:
    in_process(_calibrate, tmp_path)
    text = (tmp_path / "out.txt").read_text()
    fitted = {name: float(value) for name, value in re.findall(r"^(.*): fitted (\S+),", text, re.MULTILINE)}
    assert fitted == {name: pytest.approx(value, rel=0.05) for name, value in KNOWN.items()}
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^\| held out, all \| 1 \|", text, re.MULTILINE)


def _compare(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import calibrate

    from fsdptrain.plan.hardware import CALIBRATED, SPREADS

    figures, inside = calibrate.figures_as_set(), []
    for run in calibrate.published_runs():
        if run.held_out:
            ratio = run.step_s / calibrate.forecast_s(run, calibrate.traces(run, folder), figures)
            inside.append(abs(ratio - 1) <= SPREADS[CALIBRATED])
    print(f"{sum(inside)} of {len(inside)} published runs are inside the range of their forecast")
    assert len(inside) == 49 and sum(inside) >= 0.9 * len(inside)


@pytest.mark.soak
def test_nine_in_ten_of_the_runs_held_out_are_inside_the_range_that_is_printed(tmp_path: Path) -> None:
    in_process(_compare, tmp_path)
