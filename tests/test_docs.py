"""The documentation names what exists, stays short, and its commands run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT, environment

DOCS, PACKAGE = ROOT / "docs", ROOT / "fsdptrain"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))


def test_the_readme_can_be_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_tour_names_what_exists() -> None:
    packages = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    names = set(re.findall(rf"`((?:cli|errors|{packages})(?:\.\w+)+)`", (DOCS / "tour.md").read_text()))
    assert len(names) > 30 and [name for name in sorted(names) if not exists(name)] == []


def exists(name: str) -> bool:
    """Return whether this is a module of the package, or in one of them a function, a class or a method."""
    words = name.split(".")
    modules = [at for at in range(1, len(words) + 1) if PACKAGE.joinpath(*words[:at]).with_suffix(".py").is_file()]
    if not modules:
        return False
    text = PACKAGE.joinpath(*words[: modules[0]]).with_suffix(".py").read_text()
    return all(re.search(rf"^ *(?:class|def) {word}\b", text, re.MULTILINE) for word in words[modules[0] :])


def blocks(path: Path, language: str) -> Iterator[str]:
    """Yield the blocks of code of a document."""
    yield from re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_every_command_of_a_tutorial_is_one(path: Path) -> None:
    """The soak runs those that need no GPU; here the words are compared with the command line."""
    from typer.main import get_command

    from fsdptrain.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    found = re.findall(r"^(?:\S+ )*?fsdptrain (\w+)([^#\n]*)", "\n".join(blocks(path, "bash")), re.MULTILINE)
    assert found
    for name, words in found:
        options = {option for param in commands[name].params for option in param.opts}
        assert set(re.findall(r" (--[\w-]+)", words)) <= options, (name, words)


@pytest.mark.soak
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_commands_of_a_tutorial_run(path: Path, tmp_path: Path) -> None:
    """All of `laptop` and `preferences`; of the others what needs no GPU and no other nodes."""
    whole = path.stem in ("laptop", "preferences")
    folder = str(Path(sys.executable).parent)
    env = environment(PATH=f"{folder}:/usr/bin:/bin")
    for block in blocks(path, "bash"):
        lines = block if whole else "\n".join(re.findall(r"^fsdptrain (?:recipes|validate(?!.*--here)).*", block, re.M))
        subprocess.run(["bash", "-euc", lines], cwd=tmp_path, env=env, check=True)
    for block in blocks(path, "python"):
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=env, check=True)
