"""The documentation names what exists, stays short, and its commands run."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import ROOT, environment, fsdptrain

from fsdptrain.errors import install_line

DOCS, PACKAGE = ROOT / "docs", ROOT / "fsdptrain"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_the_readme_can_be_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_no_picture_loads_anything() -> None:
    assert not [path.name for path in DOCS.glob("*.svg") if re.search(r"url\(.?https?:", path.read_text())]


def test_the_score_in_the_readme_is_the_measured_one() -> None:
    (score,) = re.findall(r"held-out rows, ([\d.]+)% are exact", (DOCS / "internals" / "measurements.md").read_text())
    assert f"0% exactly before, and {score}% after either" in (ROOT / "README.md").read_text()


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


def test_a_script_makes_every_picture() -> None:
    pictures = {path.name for path in DOCS.iterdir() if path.suffix in (".png", ".svg")}
    assert pictures == runpy.run_path(str(DOCS / "picture.py"))["PICTURES"].keys()
    shown = re.findall(r"!\[[^\]]*\]\((?:docs/)?(.+?)\)", "\n".join(page.read_text() for page in PAGES))
    assert sorted(shown) == sorted(pictures)


def recorded(word: str) -> tuple[list[str], str]:
    """Return the words of the one command with this word whose screen is quoted in a document, and that screen."""
    screens = [
        screen
        for page in PAGES
        for screen in re.findall(r"^```\n\$ fsdptrain (.*?)^```$", page.read_text(), re.M | re.S)
    ]
    found = [screen.split("\n", 1) for screen in screens if screen.startswith(word)]
    assert len(found) == 1
    return found[0][0].split(), found[0][1]


def test_what_the_readme_says_of_a_wrong_recipe_is_printed(tmp_path: Path) -> None:
    words, screen = recorded("run")
    lines = "model: {id: meta-llama/Llama-3.1-8B, tokeniser: x}", "data: {path: train.jsonl, seq_len: 4k}"
    (tmp_path / words[1]).write_text("\n".join(["name: my-sft", *lines, "train: {epochs: 2}"]))
    assert fsdptrain(*words, cwd=tmp_path).stderr == screen


PLANS = re.findall(r"^\|.*\| ([\d.]+) \| ([\d,]+) \| `(.+?)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.soak
@pytest.mark.parametrize(("needed", "speed", "command"), PLANS)
def test_a_plan_in_the_readme_is_what_its_command_says(needed: str, speed: str, command: str, tmp_path: Path) -> None:
    found = fsdptrain("validate", *command.split(), cwd=tmp_path, timeout=900).stdout
    assert found.startswith("fits ") and f": {needed} of " in found and f" {speed} tok/s" in found


def installs() -> set[str]:
    """Return what pip is told to install in the documents, the recipes and the package."""
    texts = [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "recipes").rglob("*.*"), *PACKAGE.rglob("*.py")]
    lines = re.findall(
        r"pip install ((?:--\S+ )*)(['\"]?)([^\s'\"`{]+)\2", "\n".join(each.read_text() for each in texts)
    )
    return {wanted.rstrip(".,;") or "." for _, _, wanted in lines}


def test_what_pip_is_told_to_install_exists() -> None:
    """It is this folder, or a library: this package is in no index yet."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for wanted in installs():
        own = re.fullmatch(r"\.(?:\[([\w,]+)\])?", wanted)
        assert own or Requirement(wanted).name != "fsdptrain", wanted
        assert not own or {*(own[1] or "lora").split(",")} <= extras.keys(), wanted
    for extra in extras.keys() - {"dev", "docs", "bench"}:
        for wanted in map(Requirement, re.findall("'(.*?)'", install_line(extra))):
            with contextlib.suppress(PackageNotFoundError):
                assert wanted.specifier.contains(version(wanted.name)), wanted


@pytest.mark.soak
@pytest.mark.parametrize("wanted", sorted(each for each in installs() if each.startswith(".")))
def test_pip_finds_all_that_it_is_told_to_install(wanted: str) -> None:
    """Needs the index, which the installation of this environment needed too."""
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", wanted]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stderr == ""


def blocks(path: Path, language: str) -> Iterator[str]:
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
    """All of `laptop` and `preferences`; of the others what needs no GPU and no other nodes.

    Where a page says that a plan does not fit, to show what `--advise` lists, the exit code may be 3.
    """
    whole = path.stem in ("laptop", "preferences")
    folder = str(Path(sys.executable).parent)
    env = environment(PATH=f"{folder}:/usr/bin:/bin")
    for block in blocks(path, "bash"):
        lines = block if whole else "\n".join(re.findall(r"^fsdptrain (?:recipes|validate(?!.*--here)).*", block, re.M))
        if "does not fit (exit code 3)" in path.read_text():
            lines = re.sub(r"^(fsdptrain validate .* --advise)$", r"\1 || [ $? = 3 ]", lines, flags=re.M)
        subprocess.run(["bash", "-euc", lines], cwd=tmp_path, env=env, check=True)
    for block in blocks(path, "python"):
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=env, check=True)


@pytest.mark.soak
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells as one program: they have no magic commands, so no kernel is needed."""
    cells = json.loads((DOCS / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    env = environment(MPLBACKEND="agg", CUDA_VISIBLE_DEVICES="")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def phrases(picture: Path) -> set[str]:
    """Return what a picture of a terminal says, without its numbers and without memory, which may lack room."""
    lines = re.findall(r">([^<>]+)</text>", picture.read_text())
    words = (re.sub(r"[\d.]+ (?:to [\d.]+ )?GiB.*", "GiB", line.replace("&#160;", " ")) for line in lines)
    return {re.sub(r"[\d.,:/e-]+|[━╸╺ ]+", " ", line).strip() for line in words} - {"GiB"}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["step.png", "terminal.svg", "advise.svg"])
def test_a_picture_shows_what_is_shown_today(name: str, tmp_path: Path) -> None:
    """If not: `python docs/picture.py NAME`. A plot with another version of matplotlib is another one."""
    made = tmp_path / name
    code = f"import os, runpy; from pathlib import Path; os.chdir({str(tmp_path)!r}); " + (
        f"runpy.run_path({str(DOCS / 'picture.py')!r})['PICTURES'][{name!r}](Path({str(made)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(CUDA_VISIBLE_DEVICES=""), check=True)
    if made.suffix == ".svg":
        assert phrases(made) == phrases(DOCS / name)
    else:
        assert made.read_bytes() == (DOCS / name).read_bytes()
