"""Every command on a pseudo-terminal: what a person sees, not what a pipe gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import write_recipe
from terminal import seen


@pytest.mark.parametrize("columns", [60, 120])
def test_a_run_a_dry_run_and_a_check_end_without_a_traceback(columns: int, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=3)
    for words in (("validate", recipe), ("run", recipe), ("verify", tmp_path / "run")):
        code, text = seen(*words, columns=columns)
        assert code == 0, text
        assert "Traceback" not in text
