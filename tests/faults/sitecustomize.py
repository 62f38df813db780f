"""Inject faults into a run from outside. Python runs this file at its start if this folder is on PYTHONPATH.

fsdptrain has no hooks for faults: a fault names a function, which is wrapped once its module has been imported.
$FSDPTRAIN_FAULTS holds a JSON list of `Fault`s; without it this file does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass
class Fault:
    """One fault: which function, in which process, at which call, and what happens then."""

    where: str  # "module:function" or "module:Class.method"
    do: str  # the name of an action below
    rank: int | None = None  # $RANK of the process; None: in every process that calls the function
    call: int = 1  # the first call in a process that has the fault …
    times: int | None = 1  # … and how many calls in a row have it; None: all from then on
    match: str = ""  # only calls with this text in their arguments count
    at: str = "entry"  # or "exit": after the function has done its work
    delay: float = 0.0  # seconds to wait, in a thread, while the process continues
    mark: str | None = None  # a file to create when the fault happens; if it exists, the fault does not happen
    how: dict[str, Any] = field(default_factory=dict)  # arguments of the action
    calls: int = 0

    def hits(self, arguments: object) -> bool:
        if self.rank is not None and str(self.rank) != os.environ.get("RANK"):
            return False
        if self.match and self.match not in repr(arguments):
            return False
        self.calls += 1
        last = self.call + self.times if self.times is not None else float("inf")
        return self.call <= self.calls < last and not (self.mark and Path(self.mark).exists())

    def happen(self, result: Any = None) -> Any:
        """Act, now or after the delay; return what the wrapped function returns."""
        if self.delay:
            timer = threading.Timer(self.delay, self._act, [None])
            timer.daemon = True
            timer.start()
            return result
        return self._act(result)

    def _act(self, result: Any) -> Any:
        if self.mark:
            try:
                Path(self.mark).touch(exist_ok=False)
            except FileExistsError:  # another process was first
                return result
        return ACTIONS[self.do](result, **self.how)


def send(result: Any, name: str = "SIGKILL", to: str = "self") -> Any:
    """Send a signal to this process, to its parent (`agent`) or to its parent's parent (`command`)."""
    agent = os.getppid()
    if to == "command":
        agent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    with contextlib.suppress(ProcessLookupError):
        os.kill(os.getpid() if to == "self" else agent, signal.Signals[name])
    return result


def sleep(result: Any, seconds: float, holding_the_gil: bool = False) -> Any:
    """Sleep; with `holding_the_gil` in C, so that no other Python thread can run."""
    if holding_the_gil:
        ctypes.PyDLL(None).sleep(int(seconds))
    else:
        time.sleep(seconds)
    return result


def fail(result: Any, error: str = "builtins:RuntimeError", text: str = "injected") -> Any:
    module, _, name = error.partition(":")
    raise getattr(importlib.import_module(module), name)(text)


def abort(result: Any, text: str) -> None:
    """Print a text and end this process by SIGABRT, as C++ does when nobody catches an exception."""
    os.write(2, text.encode())
    os.abort()


def printenv(result: Any, name: str) -> Any:
    print(f"{name}={os.environ.get(name)}", flush=True)
    return result


def nan(result: Any) -> Any:
    """Make the result of a function NaN: a tensor, or the first of a list of tensors."""
    if isinstance(result, list):
        result[0].fill_(float("nan"))
        return result
    return result * float("nan")


def zero(result: Any) -> Any:
    """Make the tensors zero that a function yields by name, in groups."""
    for group in result:
        for tensor in group.values():
            tensor.zero_()
        yield group


def nan_gradient(result: Any) -> Any:
    result.register_hook(lambda gradient: gradient * float("nan"))
    return result


def fill(result: Any, path: str) -> Any:
    with Path(path).open("ab", buffering=0) as ballast:
        for size in (2**16, 2**12, 1):
            try:
                while ballast.write(bytes(size)):
                    pass
            except OSError:
                continue
    return result


def exceed_memory(result: Any, cgroup: str) -> Any:
    """Move this process into a cgroup with a memory limit, and exceed it: the kernel kills the process."""
    (Path(cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    ballast = []
    while True:
        ballast.append(b"1" * 2**24)


ACTIONS: dict[str, Callable[..., Any]] = {
    action.__name__: action
    for action in (abort, printenv, send, sleep, fail, nan, zero, nan_gradient, fill, exceed_memory)
}


def wrapped(function: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    """Return the function with the fault in it."""

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        hit = fault.hits((args, kwargs))
        if hit and fault.at == "entry":
            fault.happen()
        result = function(*args, **kwargs)
        return fault.happen(result) if hit and fault.at == "exit" else result

    return faulty


def inject(module: ModuleType, faults: list[Fault]) -> None:
    """Put the faults into a module, and into those that have imported the function by its name."""
    for fault in faults:
        *owners, name = fault.where.partition(":")[2].split(".")
        owner = functools.reduce(getattr, owners, module)
        function = getattr(owner, name)
        for place in (owner, *sys.modules.values()):
            if getattr(place, "__dict__", {}).get(name) is function or place is owner:
                setattr(place, name, wrapped(function, fault))


class Watcher(MetaPathFinder):
    """Injects faults into modules when they are imported."""

    def __init__(self, faults: dict[str, list[Fault]]) -> None:
        self.faults = faults

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the usual spec of a module that has faults, with a loader that injects them; else None."""
        spec = PathFinder.find_spec(name, path, target) if name in self.faults else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            inject(module, self.faults[name])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main() -> None:
    """Inject the faults of modules that are imported already, and prepare the others."""
    waiting: dict[str, list[Fault]] = {}
    for fields in json.loads(os.environ.get("FSDPTRAIN_FAULTS", "[]")):
        fault = Fault(**fields)
        waiting.setdefault(fault.where.partition(":")[0], []).append(fault)
    for name in waiting.keys() & sys.modules.keys():
        inject(sys.modules[name], waiting[name])
    if waiting:
        sys.meta_path.insert(0, Watcher(waiting))


main()
