"""The documentation names what exists, stays short, and its commands run."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support import ROOT, environment, fsdptrain

from fsdptrain.errors import install_line

DOCS, PACKAGE = ROOT / "docs", ROOT / "fsdptrain"
RUN = [*sorted((DOCS / "tutorials").glob("*.md")), DOCS / "how-to" / "exercises.md"]  # pages whose commands are run
# Commands that take seconds, which the default suite compares: of forecasts one.
QUICK = re.compile(r"fsdptrain (?:recipes|submit .*--gpus-per-node|validate .*(?:--here|--hardware 2x8xh100)).*")
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


def screens(page: Path) -> list[tuple[str, str]]:
    """Return the commands that a page quotes with what they print, in order: blocks that begin with `$ fsdptrain`."""
    found = re.findall(r"^```\n\$ fsdptrain (.*?)^```$", page.read_text(), re.M | re.S)
    return [(words, screen) for words, _, screen in (each.partition("\n") for each in found)]


def is_quoted(printed: str, quoted: str) -> bool:
    """Return whether a page quotes what was printed.

    In the quotation `…` stands for what may differ: alone in a line for any lines, else for any text of the line.
    """
    pattern = re.sub(r"^…\\\n", r"(?:.*\\n)*?", re.escape(quoted), flags=re.M).replace("…", ".*?")
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed.splitlines())) is not None


def test_dots_in_a_quotation_stand_for_what_may_differ() -> None:
    printed = "fits: 3.0 GiB; 4.1 s\nPlan\n  one\n  two\nrank [0]\n"
    for quoted in (printed, "fits: 3.0 GiB; … s\n…\n", "…\n  two\n…\n", "fits: …\n…\nrank [0]\n", "…\nrank [0]\n…\n"):
        assert is_quoted(printed, quoted), quoted
    for quoted in ("fits: 3.0 GiB; 4.1 s\n", "fits: 3.… GiB; 4.1 s\nPlan\n…\n  three\n…\n", "…\nrank 0\n"):
        assert not is_quoted(printed, quoted), quoted


def test_what_the_readme_says_of_a_wrong_recipe_is_printed(tmp_path: Path) -> None:
    [(command, screen)] = [each for each in screens(ROOT / "README.md") if each[0].startswith("run")]
    words = command.split()
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


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("path", RUN[:-1], ids=lambda path: path.stem)
def test_a_tutorial_is_read_in_minutes(path: Path) -> None:
    text = path.read_text()
    for _, block in blocks(path):
        text = text.replace(block, "")
    assert 400 <= len(text.split()) <= 800


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_every_command_of_a_tutorial_is_one(path: Path) -> None:
    """The soak runs those that need no GPU; here the words are compared with the command line."""
    from typer.main import get_command

    from fsdptrain.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for language, text in blocks(path) if language in ("", "bash", "sh") for line in text.splitlines()]
    found = [match for line in lines if (match := re.match(r"(?:\S+ )*?fsdptrain (\w+)([^#]*)", line))]
    assert found
    for name, words in (match.groups() for match in found):
        if name in commands:
            options = {option for param in commands[name].params for option in param.opts}
            assert set(re.findall(r" (--[\w-]+)", words)) <= options, (name, words)


def follow(page: Path, folder: Path, quick: bool = False) -> list[str]:
    """Run the commands of a page in order in a folder; return those whose screen is not the quoted one, with it.

    A block with `$ fsdptrain …` is run and compared. Blocks of `bash` and `python` are run, without the lines that
    install the package; a block of `sh` needs GPUs, other nodes or a network. `quick`: only what takes seconds.
    """
    env = environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    differ = []
    for language, text in blocks(page):
        first, _, quoted = text.partition("\n")
        screen = not language and first.startswith("$ fsdptrain ")
        command = first.removeprefix("$ ") if screen else re.sub(r"^(?:pip|git|cd) .*$", "", text, flags=re.M).strip()
        if not (screen or language in ("bash", "python")) or (quick and not QUICK.fullmatch(command)):
            continue
        if screen and not {*command} & {*"|<>&;$*"}:
            done = fsdptrain(*shlex.split(command)[1:], cwd=folder, timeout=1800)
        else:
            words = [sys.executable, "-c", command] if language == "python" else ["bash", "-uc", command]
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=not screen)
        if screen and not is_quoted(done.stdout + done.stderr, quoted):
            differ.append(f"{first}\n{done.stdout}{done.stderr}")
    return differ


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_the_quick_commands_of_a_page_print_what_it_says(path: Path, tmp_path: Path) -> None:
    assert follow(path, tmp_path, quick=True) == []


@pytest.mark.soak
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_the_commands_of_a_page_print_what_it_says(path: Path, tmp_path: Path) -> None:
    assert follow(path, tmp_path) == []


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


def test_the_workflow_is_valid_and_its_steps_are_targets_of_the_makefile() -> None:
    """What they do is what contributors run: `make check`, `make test` and the others."""
    file, linter = ROOT / ".github" / "workflows" / "ci.yml", Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run([linter, "--builtin-schema", "vendor.github-workflows", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    jobs = yaml.safe_load(file.read_text())["jobs"]
    steps = [
        re.sub(r"\S+\$\{\{.*?\}\}", "", step["run"]).split()
        for job in jobs.values()
        for step in job["steps"]
        if "run" in step
    ]
    assert len(steps) > 4 and {command for command, *_ in steps} == {"make"}
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for _, *words in steps for word in words if "=" not in word} <= {*targets.split()}
