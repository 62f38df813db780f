"""Use a cache of the session, so that no test reads the user's one; hide the GPUs; print the time of each file.

The variables of the caches are set when pytest starts, before the libraries that read them at import.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a busy machine is slow: that is no failure
settings.load_profile("any machine")

# The background job of a shell ignores Ctrl-C, and its children would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

_cache = tempfile.TemporaryDirectory(prefix="fsdptrain-tests-")  # removed when the session ends
os.environ["FSDPTRAIN_CACHE"] = _cache.name
os.environ["HF_HOME"] = os.path.join(_cache.name, "hf")  # noqa: PTH118
os.environ["HF_HUB_OFFLINE"] = "1"

_visible = os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Fork the workers of pytest-xdist from the server that forks commands (`forks`), and let them share it."""
    with pytest.MonkeyPatch.context() as patch:
        if session.config.getoption("numprocesses", None):
            os.environ[forks.SERVER] = forks.server_of_this_session()[1:]
            patch.setattr(subprocess, "Popen", forks.Command)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first: else a worker of pytest-xdist waits for one at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("histories", "end_to_end", "train", "tests"))


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test, which may start processes
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide the GPUs from the processes that a test starts, unless it is marked `gpu`.

    The tests are written for the CPU, and start two ranks also where there is one GPU, which two ranks cannot share.
    """
    if item.get_closest_marker("gpu") is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif _visible is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible


@pytest.fixture(scope="session")
def cache() -> Path:
    return Path(_cache.name)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a cache of its own, of which it can say what is there; return its folder."""
    monkeypatch.setenv("FSDPTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which the files are added whose rows are encoded."""
    from fsdptrain.data.prepare import PartEncoder

    names, encode = list[str](), PartEncoder._write

    def note(self: PartEncoder, folder: Path, part: Any) -> None:
        names.extend(map(str, part.stamps))
        encode(self, folder, part)

    monkeypatch.setattr(PartEncoder, "_write", note)
    return names


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """Let a `processes.Child` of this process be forked by a server that has imported everything (see `forks`)."""
    from forks import Command

    from fsdptrain import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "child_command", lambda module: [sys.executable, "-m", module])
        patch.setattr(processes, "subprocess", SimpleNamespace(Popen=Command, PIPE=subprocess.PIPE))
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each file's tests with their fixtures, longest first, so that growth is seen."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    terminalreporter.section("time per file")
    for name, s in seconds.most_common():
        if s >= 1:
            terminalreporter.write_line(f"{s:7.0f} s  {name}")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what was imported: it would look at two million objects again and again."""
    gc.collect()
    gc.freeze()
