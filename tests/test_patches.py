"""What is private in other packages has one home in each of ours, and somebody has read it in the installed version."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import pkgutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from torch._ops import OpOverload

from fsdptrain.plan.gpus import READ_TORCH

PACKAGE = ROOT / "fsdptrain"
PATCHES = {path.parent.name: path for path in sorted(PACKAGE.glob("*/patches.py"))}
RELIES_ON = {  # (package, name) → version → digest
    (package, name): {version: digest for digest, versions in read.items() for version in versions.split()}
    for package in PATCHES
    for name, read in importlib.import_module(f"fsdptrain.{package}.patches").RELIES_ON.items()
}


def source(original: Any) -> str:
    """The source of a function or a class, the schema of an operator; else what it shows."""
    original = original.fget if isinstance(original, property) else original
    if isinstance(original, type) or inspect.isfunction(original):
        return inspect.getsource(original)
    if isinstance(original, OpOverload):
        return str(original._schema)
    if inspect.isbuiltin(original) or type(original).__name__ == "instancemethod":  # in C++
        return str(original.__doc__)
    return repr(sorted(map(str, original)) if isinstance(original, set) else original)


@pytest.mark.parametrize(("package", "name"), RELIES_ON)
def test_what_a_package_relies_on_was_read_in_the_installed_version(package: str, name: str) -> None:
    read = RELIES_ON[package, name]
    version = importlib.import_module(name.partition(".")[0]).__version__.partition("+")[0]
    digest = hashlib.sha256(source(pkgutil.resolve_name(name)).encode()).hexdigest()[:12]
    if version in read:
        assert read[version] == digest, (
            f"{name} has changed within version {version}: read it, adapt fsdptrain/{package}, then update the digest "
            f"in {package}/patches.py"
        )
    elif digest not in read.values():
        warnings.warn(
            f"{name} differs in version {version} from all that were read ({', '.join(read)}): fsdptrain/{package} may "
            f'fail with it, or compute something else; read it, then add "{version}": "{digest}" to '
            f"{package}/patches.py",
            stacklevel=1,
        )


def test_private_functions_are_few_and_read_in_every_version_of_torch_that_is_tested() -> None:
    assert len(RELIES_ON) <= 42
    for (package, name), read in RELIES_ON.items():
        if name.startswith("torch."):
            found = {version.rpartition(".")[0] for version in read}
            assert found == set(READ_TORCH), f"{package}: {name} was read in {', '.join(read)}"


def private_names(module: Path) -> set[str]:
    """The names with an underscore that a module takes from elsewhere: `_x` in `from a._x import y` or in `a._x`."""
    tree = ast.parse(module.read_text())
    nodes = [node for node in ast.walk(tree) if not isinstance(node, ast.Constant)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {"_replace", "_value_"}  # of named tuples and enums: documented
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fsdptrain"):
            found |= {part for name in (node.module or "", *(a.name for a in node.names)) for part in name.split(".")}
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner.split(".")[0] not in ("self", "cls", "aten", "c10d", "os", "sys"):
                found.add(node.attr)
    return {name for name in found - own if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("package", [path.name for path in sorted(PACKAGE.iterdir()) if path.is_dir()])
def test_private_names_of_other_packages_are_in_the_module_of_patches(package: str) -> None:
    listed = PATCHES[package].read_text() if package in PATCHES else ""
    for module in sorted((PACKAGE / package).glob("*.py")):
        missing = {name for name in private_names(module) if name not in listed}
        assert not missing, f"{module.name} uses {', '.join(sorted(missing))}: name it in {package}/patches.py"
