"""`benchmarks/calibrate.py` on a few tiny runs, so that it works when it is needed."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest
from support import ROOT


def _calibrate(folder: Path) -> None:
    """Calibrate on runs of which the figure is known: their times are forecasts with another one."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import dataclasses

    import calibrate

    config = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 2048, "n_head": 16, "n_positions": 256}
    known = 0.5
    runs = []
    for gpu, name, gpus, accumulation in [
        ("h100-80gb", "tiny-1b", 8, 1), ("h100-80gb", "tiny-2b", 16, 3), ("a100-80gb", "tiny-1b", 8, 1),
        ("a100-40gb", "tiny-2b", 8, 1),
    ]:  # fmt: skip
        run = calibrate.Run(name, gpu, gpus, config, 8, 256, 64, accumulation, 1.0, flash_1=True)
        shallow = calibrate.traces(run, f"{gpu}-{name}", folder)
        card = dataclasses.replace(calibrate.KNOWN[gpu], product_share=known)
        runs.append(dataclasses.replace(run, step_s=calibrate.forecast_s(run, shallow, card)))
    calibrate.published_runs = lambda: runs
    calibrate.field_runs = lambda: runs[:1]
    sys.argv = ["calibrate.py", "--traces", str(folder)]
    with (folder / "out.txt").open("w") as sys.stdout:
        calibrate.main()


@pytest.mark.soak
def test_it_finds_the_figure_that_explains_the_runs(tmp_path: Path) -> None:
    """In a process of its own: a pretended accelerator cannot be removed again."""
    process = multiprocessing.get_context("spawn").Process(target=_calibrate, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    lines = (tmp_path / "out.txt").read_text().splitlines()
    [fitted] = [line for line in lines if line.startswith("H100: product_share")]
    assert float(fitted.split()[-1]) == pytest.approx(0.5, rel=1e-2)
    [left_out] = [line for line in lines if line.startswith("| H100, all, size left out")]
    assert "100%" in left_out
