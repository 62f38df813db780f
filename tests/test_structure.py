"""The order of the packages: a module imports only its own package and those above it, without a cycle; the packages in
LIGHT import no torch; the document lists every module."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, environment

from fsdptrain.config.formats import Format
from fsdptrain.config.objectives import Objective
from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.plan.hardware import KNOWN

PACKAGE = ROOT / "fsdptrain"
ORDER = (
    "", "run_folder", "terminal", "config", "plan", "data", "model", "parallel", "failures",
    "checkpoint", "report", "launch", "train", "forecast", "inference", "validation",
)  # fmt: skip
LIGHT = (  # they import no torch
    "", "run_folder", "terminal", "config", "plan", "launch", "report",
)  # fmt: skip
LIGHT_MODULES = (  # in other packages
    "failures.explain", "failures.translate", "failures.notify_nodes",
    "checkpoint.manifest", "checkpoint.resume", "checkpoint.nodes", "validation.findings",
    "validation.request", "forecast.trace", "forecast.allocator",
    "forecast.timing", "forecast.forecaster", "forecast.search", "forecast.render", "forecast.plot",
)  # fmt: skip
HEAVY = {"torch", "transformers", "datasets", "tokenizers", "numpy", "tensorboard"}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
}


def package(module: str) -> str:
    return module.rpartition(".")[0]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree; the first is its root."""
    return list(ast.walk(ast.parse(path.read_text())))


def body_of(path: Path) -> list[ast.stmt]:
    root = nodes_of(path)[0]
    assert isinstance(root, ast.Module)
    return root.body


def imported(path: Path, only_top: bool = False) -> set[str]:
    found = set()
    for node in body_of(path) if only_top else nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdptrain"):
            base = str(node.module).removeprefix("fsdptrain").lstrip(".")
            named = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            found |= {name if name in MODULES else base for name in named} & MODULES.keys()
    return found


def test_every_package_has_its_place() -> None:
    assert {package(module) for module in MODULES} == set(ORDER)


def test_the_tests_mirror_the_packages() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders == {".", "end_to_end", "cluster", "histories", "mutants", *ORDER} - {""}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_package_and_above(module: str) -> None:
    # Inside their functions `cli` and `api` import the other packages, so that a page of help needs none of them.
    above = module in ("cli", "api")
    place = ORDER.index("run_folder" if above else package(module))
    below = {name for name in imported(MODULES[module], above) if ORDER.index(package(name)) > place}
    assert not below


KINDS = {  # enum → its home: no other module mentions one of its members in an expression
    "Strategy": "config.strategy",
    "OptimizerKind": "config.optimizers",
}


def members_mentioned(path: Path, kind: str, words: set[str]) -> set[str]:
    """Return the members of an enum that a module mentions, as `KIND.MEMBER` or as (a part of) its value."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == kind:
            found |= {node.attr} & words
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(text := node.value.strip("_")) > 4:
            found |= {text for word in words if f"_{text}_" in f"_{word}_"}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_or_an_optimizer_is_known_by_name_in_one_module(kind: str) -> None:
    home = KINDS[kind]
    words = {member.value for member in getattr(importlib.import_module(f"fsdptrain.{home}"), kind)}
    found = {module: members_mentioned(path, kind, words) for module, path in MODULES.items() if module != home}
    assert {module: names for module, names in found.items() if names} == {}
    assert members_mentioned(MODULES[home], kind, words)


def names_compared(path: Path, attribute: str) -> list[str]:
    """Return the words that a module compares `ANY.attribute` with."""
    compared = [node for node in nodes_of(path) if isinstance(node, ast.Compare)]
    sides = [[node.left, *node.comparators] for node in compared]
    found = [side for side in sides if any(isinstance(each, ast.Attribute) and each.attr == attribute for each in side)]
    return [each.value for side in found for each in side if isinstance(each, ast.Constant)]


def test_no_module_compares_a_format_with_its_name() -> None:
    found = {module: names_compared(path, "format") for module, path in MODULES.items()}
    assert {module: names for module, names in found.items() if names} == {}
    mentioned = {module for module, path in MODULES.items() if re.search(r"\bFormat\.[a-z]", path.read_text())}
    assert mentioned == {"config.formats"}


def test_no_module_compares_an_objective_with_its_name() -> None:
    assert {module: names for module, path in MODULES.items() if (names := names_compared(path, "objective"))} == {}
    homes = {"config.objectives", "config.schema", "model.objectives"}
    mention = rf"\bObjective\.({'|'.join(Objective)})\b"
    assert {module for module, path in MODULES.items() if re.search(mention, path.read_text())} <= homes


def test_the_document_shows_the_packages_as_they_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    done = subprocess.run([sys.executable, ROOT / "docs" / "packages.py"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in text
    lines = [line for line in text.partition("## ")[0].splitlines() if line.startswith("| ")]
    rows = {line.split("|")[1].split()[0].strip("`"): line for line in lines}
    for module in MODULES:
        assert f"`{module.rpartition('.')[2]}`" in rows[package(module) or "top"], module


@pytest.mark.parametrize(
    ("document", "place", "names"),
    [
        ("docs/guarantees.md", r"^- \*\*Optimizers\*\*: (.*)$", list(OptimizerKind)),
        ("README.md", r"^  format: (.*)$", list(Format)),
        ("docs/memory.md", r"^\| `optim.name` \|[^\n]*\n[^\n]*\n((?:\|[^\n]*\n)*)", list(OptimizerKind)),
        ("docs/validate.md", r"^\*\*Cards\.\*\* ([^.]*)\.", [*KNOWN, "cpu"]),
    ],
)
def test_a_document_lists_every_row_of_a_table(document: str, place: str, names: list[str]) -> None:
    found = re.search(place, (ROOT / document).read_text(), re.MULTILINE)
    assert found, place
    cells = re.findall(r"^\| `([^`]+)`", found[1], re.MULTILINE) or re.findall("`([^`]+)`", found[1])
    assert sorted(cells or {*re.findall(r"\w+", found[1])} - {"or"}) == sorted(names)


def test_no_module_is_in_an_import_cycle() -> None:
    needs = {module: imported(path) for module, path in MODULES.items()}
    while free := [module for module, needed in needs.items() if not needed & needs.keys()]:
        for module in free:
            del needs[module]
    assert not needs


def test_light_modules_import_no_torch() -> None:
    code = f"""if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            assert not (found := {HEAVY} & sys.modules.keys()), (name, found)
    """
    modules = [f"fsdptrain.{name}" for name in MODULES if package(name) in LIGHT or name in LIGHT_MODULES]
    subprocess.run([sys.executable, "-c", code, *modules], env=environment(), check=True)


def test_the_benchmarks_import_only_names_that_exist() -> None:
    # No test runs a benchmark, and it imports most of fsdptrain inside functions.
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in nodes_of(script):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdptrain"):
                for name in node.names:
                    pkgutil.resolve_name(f"{node.module}.{name.name}")
