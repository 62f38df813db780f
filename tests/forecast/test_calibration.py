"""The published runs that `benchmarks/calibrate.py` holds out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import ROOT, in_process


def compare(folder: str) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import calibrate

    from fsdptrain.plan.hardware import CALIBRATED, SPREADS

    figures, inside = calibrate.figures_as_set(), []
    for run in calibrate.published_runs():
        if run.held_out:
            ratio = run.step_s / calibrate.forecast_s(run, calibrate.traces(run, Path(folder)), figures)
            inside.append(abs(ratio - 1) <= SPREADS[CALIBRATED])
    print(f"{sum(inside)} of {len(inside)} published runs are inside the range of their forecast")
    assert len(inside) == 49 and sum(inside) >= 0.9 * len(inside)


@pytest.mark.soak
def test_nine_in_ten_of_the_runs_held_out_are_inside_the_range_that_is_printed(tmp_path: Path) -> None:
    in_process(compare, str(tmp_path), timeout=7200)
