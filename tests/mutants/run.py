"""Plant plausible mistakes in a copy of the package, one at a time, and count those that the default suite notices.

    python tests/mutants/run.py [PART_OF_A_NAME …]      (`make mutants`)

A mistake is a file NAME.patch beside this one: a line that says what is wrong, a line `tests: FILE[::TEST] …` that
names the tests that should fail, and a diff. To add one: plant it, `git diff -U1 > tests/mutants/NAME.patch`, write the
two lines above the diff, and `git checkout fsdptrain`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

MUTANTS = Path(__file__).parent
ROOT = MUTANTS.parent.parent
WANTED = 0.95  # of all mistakes
OPTIONS = ["-x", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not soak and not cluster"]
LIBRARIES = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "transformers", "datasets")
LIMIT_S = 900.0  # a mistake that lets a test hang is noticed, too


@dataclass(frozen=True)
class Mutant:
    """A mistake: its patch, what is wrong with it, and the tests that should fail."""

    patch: Path
    wrong: str
    tests: list[str]

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        """Read a patch. Raise ValueError if the lines above the diff are not as they should be."""
        wrong, tests, *_ = patch.read_text().splitlines()
        if not wrong.endswith(".") or not tests.startswith("tests: tests/"):
            raise ValueError(f"{patch.name}: write what is wrong in the first line, and `tests: tests/…` in the second")
        return cls(patch, wrong, tests.split()[1:])


def mutants(parts: Sequence[str] = ()) -> list[Mutant]:
    """Return all mutants whose names contain any of these parts, by name."""
    found = sorted(MUTANTS.glob("*.patch"))
    return [Mutant.read(patch) for patch in found if not parts or any(part in patch.stem for part in parts)]


def apply(mutant: Mutant, tree: Path, *options: str) -> None:
    """Apply a patch to a tree. Raise ValueError, with the reason of git, if that is not possible."""
    # Inside the folder of another repository, git would skip all files that are not in its index.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    words = ["git", "apply", *options, mutant.patch]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{mutant.patch.name} does not apply, so it has to be planted again: {done.stderr.strip()}")


def copy_of_tree(folder: Path) -> Path:
    """Copy the working tree, so that neither a mistake nor an interruption ever touches it."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist"))
    # Compiled files that are checked by content: a mistake may be as long as the original, and come in the same second.
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "fsdptrain"]
    subprocess.run(compiled, cwd=tree, check=True)
    return tree


def import_libraries(scratch: Path) -> None:
    """Import what takes longest, for the processes that are forked from this one; but nothing that a mistake changes.

    The variables are those of `conftest.py`, which comes too late for the libraries.
    """
    os.environ |= {"HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in LIBRARIES:
        importlib.import_module(name)


def run_tests(tree: Path, tests: Sequence[str], output: Path) -> NoReturn:
    """Run tests in a tree, as a forked process, until one fails; end it with the code of pytest."""
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = pytest.main([*OPTIONS, f"--basetemp={tree.parent / 'tmp'}", *tests])
    sys.stdout.flush()
    os._exit(code)


def first_failure(tree: Path, tests: Sequence[str], limit_s: float | None = None) -> str | None:
    """Run tests in a tree until one fails. Return which, or None. Raise ValueError if they cannot be run."""
    output = tree.parent / "output"
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tree, tests, output))
    process.start()
    try:
        process.join(limit_s)
        code = process.exitcode
    finally:  # also after Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code is None:
        return f"(no end within {limit_s:.0f} s)"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text := output.read_text(), re.MULTILINE)
    if code and not failed:
        raise ValueError(f"pytest ended with {code}:\n{text[-3000:]}")
    return failed[1] if failed else None


def main() -> int:
    """Print a line for each mutant and the rate; return 1 if less than WANTED of them were noticed."""
    chosen, noticed = mutants(sys.argv[1:]), 0
    with tempfile.TemporaryDirectory(prefix="fsdptrain-mutants-") as scratch:
        tree = copy_of_tree(Path(scratch))
        import_libraries(Path(scratch))
        for mutant in chosen:
            apply(mutant, tree, "--check")
        print(f"{len(chosen)} mistakes; first, the tests that should notice them run without any", flush=True)
        if failure := first_failure(tree, sorted({test for mutant in chosen for test in mutant.tests})):
            raise ValueError(f"{failure} fails without any mistake")
        for mutant in chosen:
            started = time.monotonic()
            apply(mutant, tree)
            failure = first_failure(tree, mutant.tests, LIMIT_S)
            apply(mutant, tree, "--reverse")
            noticed += failure is not None
            outcome = f"noticed by {failure.rpartition('::')[2]}" if failure else f"SURVIVED: {mutant.wrong}"
            print(f"{time.monotonic() - started:4.0f} s  {mutant.patch.stem:50} {outcome}", flush=True)
    print(f"{noticed} of {len(chosen)} mistakes were noticed: {noticed / max(1, len(chosen)):.0%}, wanted {WANTED:.0%}")
    return int(noticed < WANTED * len(chosen))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
