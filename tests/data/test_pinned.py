"""A data set of the Hub and today's date change, a run keeps its commit and its date.

The Hub is a local server that answers with a commit.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from datasets.arrow_writer import ArrowWriter
from support import planned, write_recipe

from fsdptrain.checkpoint.resume import archive_plan, resume_problems
from fsdptrain.data.sources import fingerprint, hub_commit, open_sources
from fsdptrain.data.windows import pin_commits, pin_date
from fsdptrain.errors import CheckpointError, NoData
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.rundir import RunDir


class Hub(ThreadingHTTPServer):
    """A Hub on which every request finds a new commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """The answer to `HfApi.dataset_info`."""

    server: Hub

    def do_GET(self) -> None:
        if self.path.startswith("/api/datasets/"):  # the library sends other requests too
            self.server.requests.append(self.path)
        body = json.dumps({"id": "org/name", "sha": f"{len(self.server.requests):040x}"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        hub_commit.cache_clear()
        yield server
        server.shutdown()
        hub_commit.cache_clear()


def start(plan: Plan) -> RunDir:
    """Return a run folder as a start of the command prepares it for the workers."""
    rundir = plan.rundir
    rundir.logs.mkdir(parents=True, exist_ok=True)
    archive_plan(rundir, plan, "")
    return rundir


def in_a_new_process(plan: Plan, rundir: RunDir, keep: bool = True) -> str:
    hub_commit.cache_clear()
    return pin_commits(plan, rundir, keep).data_path


def test_a_run_with_a_checkpoint_keeps_its_commit(hub: Hub, tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), "data.path=org/name:de", "data.eval={path: org/name:de:test}")
    first, second = (f"org/name:de@{commit:040x}" for commit in (1, 3))
    rundir = start(plan)
    assert in_a_new_process(plan, rundir) == first, hub.requests
    assert in_a_new_process(plan, rundir) == first  # after a restart
    start(plan)  # by the user, before the first checkpoint: perhaps the data was corrected
    assert in_a_new_process(plan, rundir) == second
    rundir.checkpoint(5).mkdir(parents=True)
    start(plan)
    requests, stored = len(hub.requests), rundir.pinned.read_bytes()
    assert in_a_new_process(plan, rundir, keep=False) == second and rundir.pinned.read_bytes() == stored
    hub.shutdown()
    hub.server_close()
    assert in_a_new_process(plan, rundir) == second and len(hub.requests) == requests
    assert pin_commits(plan, rundir).eval_path == f"org/name:de:test@{4:040x}"


def test_a_run_resumes_with_its_commit_as_revision(hub: Hub, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    plan = planned(recipe, "data.path=org/name")
    found = pin_commits(plan, start(plan)).data_path
    by_name = planned(recipe, "data.path=org/name", f"data.revision={1:040x}")
    content = [{"data.content": fingerprint(path)} for path in (found, by_name.data_path)]
    assert not resume_problems(plan.identity() | content[0], by_name.identity() | content[1])
    other = {"data.content": fingerprint(f"org/name@{2:040x}")}
    assert [p.field for p in resume_problems(plan.identity() | content[0], plan.identity() | other)] == ["data.path"]


def test_ranks_that_start_together_use_one_commit(hub: Hub, tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), "data.path=org/name")
    rundir = start(plan)
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as ranks:
        answers = [each.data_path for each in ranks.map(pin_commits, [plan] * 3, [rundir] * 3)]
    assert answers == [f"org/name@{1:040x}"] * 3 and len(hub.requests) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"commits": {}}', '{"start": 1, "commits": {"org/name": "../x"}}'])
def test_unreadable_commits_are_an_error(text: str, tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), "data.path=org/name")
    rundir = start(plan)
    rundir.pinned.write_text(text)
    with pytest.raises(CheckpointError, match=r"pinned\.json cannot be read .* data\.revision") as caught:
        pin_commits(plan, rundir)
    assert not re.search(r"\w\('|\wError", str(caught.value)), "a class of Python"


def add_to_cache(commit: str, texts: list[str]) -> None:
    """Put a commit of org/cached into the cache of `datasets`, as the newest."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "org___cached" / "default" / "0.0.0" / commit
    folder.mkdir(parents=True)
    features = datasets.Features({"text": datasets.Value("string")})
    with ArrowWriter(path=str(folder / "cached-train.arrow"), features=features) as writer:
        for text in texts:
            writer.write({"text": text})
        count, size = writer.finalize()
    splits = datasets.SplitDict(dataset_name="cached")
    splits.add(datasets.SplitInfo("train", num_bytes=size, num_examples=count, dataset_name="cached"))
    details = {"builder_name": "parquet", "dataset_name": "cached", "config_name": "default", "version": "0.0.0"}
    datasets.DatasetInfo(features=features, splits=splits, **details).write_to_directory(str(folder))


def texts_of(path: str) -> list[str]:
    [source] = open_sources(path)
    return [row["text"] for _, row in source.rows(["text"])]


def test_without_the_hub_a_run_uses_its_commit_although_a_newer_one_is_cached(tmp_path: Path) -> None:
    old, new, absent = ("1a" * 20, "2b" * 20, "3c" * 20)
    plan = planned(write_recipe(tmp_path), "data.path=org/cached")
    rundir = start(plan)
    add_to_cache(old, ["a", "b", "c"])
    assert in_a_new_process(plan, rundir) == f"org/cached@{old}"
    rundir.checkpoint(1).mkdir(parents=True)
    add_to_cache(new, ["d"])
    start(plan)
    assert texts_of(in_a_new_process(plan, rundir)) == ["a", "b", "c"]
    assert texts_of("org/cached::train[:2]@" + old) == ["a", "b"] and texts_of("org/cached") == ["d"]
    with pytest.raises(NoData, match=rf"commit {absent} of org/cached is not in the cache \(cached: {new}\)"):
        open_sources(f"org/cached@{absent}")


def test_local_data_has_no_commit(tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path))
    assert pin_commits(plan, plan.rundir) == plan and not Path(plan.run_dir).exists()


# --- the date that a chat template renders ---------------------------------------------------------------------------

DATED = SimpleNamespace(chat_template="{{ strftime_now('%Y') }}")


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_run_with_a_checkpoint_keeps_its_date_and_its_commits(hub: Hub, tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), "data.path=org/name", "data.format=chat")
    rundir, today = start(plan), datetime.datetime.now().date()
    commit = pin_commits(plan, rundir).data_path
    assert pin_date(plan, DATED, rundir) in (today, today + datetime.timedelta(days=1))
    rewrite(rundir.pinned, date="2001-02-03")  # as if this start were of that day
    assert pin_date(plan, DATED, rundir) == datetime.date(2001, 2, 3)  # another rank, or a restart
    start(plan)
    assert pin_date(plan, DATED, rundir, keep=False) != datetime.date(2001, 2, 3)  # nothing was trained before
    rundir.checkpoint(5).mkdir(parents=True)
    assert pin_date(plan, DATED, rundir) == datetime.date(2001, 2, 3) and pin_commits(plan, rundir).data_path == commit
    rewrite(rundir.pinned, date="soon")
    with pytest.raises(CheckpointError, match=r"pinned\.json cannot be read"):
        pin_date(plan, DATED, rundir)


def test_a_date_is_pinned_only_if_the_template_renders_it(tmp_path: Path) -> None:
    chat, text = (planned(write_recipe(tmp_path), f"data.format={kind}") for kind in ("chat", "text"))
    for plan, template in ((chat, "{{ messages }}"), (chat, None), (text, DATED.chat_template)):
        assert pin_date(plan, SimpleNamespace(chat_template=template), plan.rundir) is None
    assert not chat.rundir.pinned.exists()
