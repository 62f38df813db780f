"""Every planted mistake fits today's code, and names tests that exist; `make mutants` runs them."""

from __future__ import annotations

import pytest
from mutants.run import ROOT, Mutant, apply, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.patch.stem)
def test_a_planted_mistake_fits_the_code_and_names_tests_that_exist(mutant: Mutant) -> None:
    apply(mutant, ROOT, "--check")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (f"def {name}(" if name else "def test") in (ROOT / file).read_text(), test
