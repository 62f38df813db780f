"""Data in object stores: the same rows as from a folder, downloaded once, and nothing half in the cache."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forks import Command
from support import environment, planned, python, write_recipe

pytest.importorskip("s3fs", reason="needs pip install '.[dev]'")
pytest.importorskip("moto", reason="needs pip install '.[dev]'")

from object_store import BUCKET, FORBIDDEN, REFUSALS, ObjectStore, serve_here

from fsdptrain.config.reader import load
from fsdptrain.config.schema import Data
from fsdptrain.data import readers, sources
from fsdptrain.data.columns import read_rows
from fsdptrain.data.prepare import open_rows, open_stream
from fsdptrain.data.readers import fetch, list_objects
from fsdptrain.data.sources import data_files, fingerprint, open_sources, quick_fingerprint
from fsdptrain.data.tokenizer import load_tokenizer, train_bpe
from fsdptrain.data.windows import WindowStream
from fsdptrain.errors import CheckpointError, DataError, NoData, RecipeError, Stopped
from fsdptrain.launch.run_lock import DATA_LIKE_CHECKPOINT, check_inputs, is_inside, would_include
from fsdptrain.run_folder import storage
from fsdptrain.run_folder.storage import object_path
from fsdptrain.validation import data as validate_data
from fsdptrain.validation.data import check_data
from fsdptrain.validation.findings import Findings


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    yield from serve_here()


@pytest.fixture(autouse=True)
def _separate_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTRAIN_CACHE", str(tmp_path / "cache"))
    list_objects.cache_clear()


@pytest.fixture
def bucket(tmp_path: Path, server: ObjectStore) -> Any:
    """Return a folder in the store, as an ObjectPath."""
    return object_path(f"s3://{BUCKET}/{tmp_path.name}")


def put(folder: Any, **files: bytes | str) -> None:
    """Write objects; `__` in their names stands for a dot, and `___` for a slash."""
    for name, content in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.fs.pipe_file(path.key, content.encode() if isinstance(content, str) else content)


def relist(url: object) -> tuple[readers.DataObject, ...]:
    """List again, as another process does."""
    list_objects.cache_clear()
    return list_objects(str(url))


def cached(tmp_path: Path) -> list[str]:
    """Return the names in the cache of objects, without its locks."""
    folder = tmp_path / "cache" / "objects"
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.exists() else []


def gets(server: ObjectStore, name: str = "") -> int:
    """Return how many requests read the content of an object with this name."""
    return sum(r.startswith("GET") and "list-type" not in r and name in r for r in server.requests)


LINE = json.dumps({"text": "To be, or not to be"}) + "\n"


def test_a_url_has_the_files_the_rows_and_the_fingerprint_of_the_same_folder(tmp_path: Path, bucket: Any) -> None:
    folder = tmp_path / "local"
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "c.parquet")
    files: dict[str, bytes] = {
        "a.jsonl": LINE.encode(), "b.jsonl.gz": gzip.compress(2 * LINE.encode()), "sub/d.csv": b"text\nthree\n",
        "c.parquet": (tmp_path / "c.parquet").read_bytes(), "sub/e.txt": b"Words.\n", ".part.jsonl": LINE.encode(),
        "sub/deep/f.json": f"[{LINE}]".encode(), "notes.md": b"# Notes", "sub-g.jsonl": LINE.encode(), "empty/": b"",
        ".dot/.h.jsonl": LINE.encode(), ".dot/i.jsonl": LINE.encode(),
    }  # fmt: skip
    for name, content in files.items():
        bucket.fs.pipe_file(f"{bucket.key}/{name}", content)
        if content:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    patterns = (
        "", "/", "/*.jsonl", "/sub/*", "/**/*.json*", "/.*.jsonl", "/a.jsonl", "/sub", "/[ab].jsonl*", "/.dot/*",
        "/sub/**", "/su**", "/**b/***.txt",
    )  # fmt: skip
    for pattern in patterns:
        local, url = f"{folder}{pattern}", f"{bucket}{pattern}"
        names = [path.relative_to(folder).as_posix() for path in data_files(local)]
        assert [each.name.removeprefix(f"{bucket}/") for each in list_objects(url)] == names and names
        assert fingerprint(url) == fingerprint(local)
        rows = [[*read_rows(open_sources(where), Data(), None)] for where in (local, url)]
        assert rows[0] == rows[1] and rows[0]


def test_a_folder_whose_name_must_not_be_requested_is_listed(bucket: Any, server: ObjectStore) -> None:
    put(bucket, a__jsonl=LINE)

    def refuse(method: str, path: str) -> Any:  # a policy that allows s3:GetObject on what is in the folder
        return FORBIDDEN if method == "HEAD" and "a.jsonl" not in path else None

    with server.failing(refuse):
        assert [each.place.name for each in relist(bucket)] == ["a.jsonl"]
        assert [each.place.name for each in relist(f"{bucket}/a*.jsonl")] == ["a.jsonl"]
        assert [each.place.name for each in relist(f"{bucket}/*.jsonl")] == ["a.jsonl"]
        with pytest.raises(NoData, match="access is refused"):
            relist(f"{bucket}/absent")


def test_a_folder_is_listed_once(bucket: Any, server: ObjectStore) -> None:
    put(bucket, **{f"{name}___{name}__jsonl": LINE for name in "abcdef"})
    server.requests.clear()
    assert len(relist(f"{bucket}/**")) == 6
    assert sum("list-type" in request for request in server.requests) <= 4  # of any number of folders


def test_etags_with_and_without_quotes_are_the_same_object(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bucket, a__jsonl=LINE)
    [found], info = relist(bucket), type(bucket.fs).info

    def bare(*arguments: Any, **options: Any) -> dict[str, Any]:
        found = info(*arguments, **options)
        return found | {"ETag": found["ETag"].strip('"')}

    monkeypatch.setattr(found.place.fs, "info", lambda key: bare(found.place.fs, key))
    fetch([found])
    assert found.is_here


def test_a_folder_of_save_to_disk_is_recognised(bucket: Any) -> None:
    put(bucket, saved___dataset_info__json="{}", saved___state__json="{}")
    with pytest.raises(DataError, match=r"/saved was written by save_to_disk, .*to_parquet"):
        relist(bucket)


def test_the_digest_of_objects_is_cached_at_once(tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "QUICKLY_READ", 1)
    put(bucket, a__jsonl=LINE)
    first = fingerprint(str(bucket))
    monkeypatch.setattr(sources, "_content", None)
    assert fingerprint(str(bucket)) == first
    monkeypatch.undo()
    monkeypatch.setenv("FSDPTRAIN_CACHE", str(tmp_path / "cache"))
    put(bucket, a__jsonl=2 * LINE)
    assert relist(bucket) and fingerprint(str(bucket)) != first


def test_an_error_in_an_object_names_the_object_and_the_line(bucket: Any) -> None:
    put(bucket, bad__jsonl=LINE + "{\n", bad__parquet=b"PAR1", cut__jsonl__gz=gzip.compress(LINE.encode())[:-9])
    for name, words in (("bad.jsonl", ":2: not a JSON"), ("bad.parquet", ": cannot"), ("cut.jsonl.gz", " cannot be")):
        with pytest.raises(DataError) as wrong:
            list(read_rows(open_sources(f"{bucket}/{name}"), Data(), None))
        assert str(wrong.value).startswith(f"{bucket}/{name}{words}")


def test_an_object_is_downloaded_again_only_when_it_changed(tmp_path: Path, bucket: Any, server: ObjectStore) -> None:
    put(bucket, a__jsonl=LINE, b__jsonl=LINE)
    first = fingerprint(str(bucket))
    server.requests.clear()
    assert all(each.is_here for each in relist(bucket)) and fingerprint(str(bucket)) == first
    assert gets(server) == 0 and len(cached(tmp_path)) == 2
    quick = quick_fingerprint(str(bucket), 1)
    put(bucket, b__jsonl=2 * LINE)
    server.requests.clear()
    assert [each.size for each in relist(bucket) if not each.is_here] == [2 * len(LINE)]
    assert quick_fingerprint(str(bucket), 1) != quick and gets(server) == 0  # made from the listing alone
    assert fingerprint(str(bucket)) != first
    assert (gets(server, "a.jsonl"), gets(server, "b.jsonl")) == (0, 1)


def test_a_copy_that_was_cut_is_downloaded_again(bucket: Any) -> None:
    put(bucket, a__jsonl=LINE)
    before = fingerprint(str(bucket))
    os.truncate(list_objects(str(bucket))[0].path, 5)
    assert fingerprint(str(bucket)) == before


def test_nothing_there(bucket: Any) -> None:
    put(bucket, notes__md="# Notes")
    for url, words in (
        (f"{bucket}/absent.jsonl", "absent.jsonl' was not found"),
        (f"{bucket}/*.jsonl", r"\*.jsonl' was not found"),
        (str(bucket), "no data files in s3://"),
        ("s3://no-such-bucket/x", "there is no such bucket: create it, or correct the URL"),
        ("s3://no-such-bucket/*.jsonl", "there is no such bucket: create it, or correct the URL"),
    ):
        with pytest.raises(DataError, match=rf"^data: .*{words}"):
            list_objects(url)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces of 8 bytes, and wait less than a second for a store."""
    options = {"connect_timeout": 1, "read_timeout": 0.5, "retries": {"total_max_attempts": 2, "mode": "standard"}}
    monkeypatch.setitem(storage.OPTIONS, "s3", {"config_kwargs": options})
    monkeypatch.setattr(readers, "REQUEST_BYTES", 8)
    monkeypatch.setattr(readers, "POLL_S", 0.02)


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.usefixtures("small_pieces")
def test_a_store_that_refuses_leaves_nothing_half_in_the_cache(
    name: str, tmp_path: Path, bucket: Any, server: ObjectStore
) -> None:
    put(bucket, a__jsonl=LINE, b__jsonl=2 * LINE)
    answer, words = REFUSALS[name]
    with server.times(-1, answer), pytest.raises(NoData, match=rf"^data: s3://.*{words}"):
        list_objects(str(bucket))
    found = relist(bucket)
    sent = []

    def die_in_the_middle(method: str, path: str) -> Any:  # of the second object, after two pieces
        sent.append(path)
        return answer if "b.jsonl" in path and len([p for p in sent if "b.jsonl" in p]) > 2 else None

    with server.failing(die_in_the_middle), pytest.raises(NoData, match=rf"^data: s3://.*b\.jsonl: .*{words}"):
        fetch(found)
    assert [each.is_here for each in found][1] is False and not [n for n in cached(tmp_path) if n.endswith(".tmp")]
    fetch(found)
    assert [each.path.read_text() for each in found] == [LINE, 2 * LINE]


@pytest.mark.usefixtures("small_pieces")
def test_a_store_that_stops_answering_is_an_error(bucket: Any, server: ObjectStore) -> None:
    put(bucket, a__jsonl=LINE)
    [found] = relist(bucket)
    with server.slow(1.2, "a.jsonl"), pytest.raises(NoData, match="the store does not answer"):
        fetch([found])
    assert gets(server) <= 4 * 8  # each of four pieces: twice by botocore, twice by s3fs, twice because it reads
    assert not found.is_here


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("content", [LINE.replace("be", "do"), LINE[:9], None], ids=["same size", "shorter", "gone"])
def test_an_object_that_changes_during_the_download(
    content: str | None, tmp_path: Path, bucket: Any, server: ObjectStore
) -> None:
    put(bucket, a__jsonl=LINE)
    [found], changed = relist(bucket), []

    def change(method: str, path: str) -> None:
        if method == "GET" and "a.jsonl" in path and not changed:
            changed.append(path)
            other = object_path(str(bucket))
            thread = threading.Thread(
                target=lambda: put(other, a__jsonl=content) if content else other.fs.rm_file(f"{other.key}/a.jsonl")
            )
            thread.start()
            thread.join()

    changes = r"^data: s3://.*a\.jsonl changed while it was downloaded: run again"
    with server.failing(change), pytest.raises(DataError, match=changes):
        fetch([found])
    assert cached(tmp_path) == []


def test_a_full_disk_is_reported_before_the_download(
    bucket: Any, server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, a__jsonl=LINE)
    found = relist(bucket)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3))
    server.requests.clear()
    with pytest.raises(CheckpointError, match=r"the data needs 32 bytes, and 3 bytes are free on .* FSDPTRAIN_CACHE"):
        fetch(found)
    assert gets(server) == 0


@pytest.mark.usefixtures("small_pieces")
def test_a_stop_ends_the_download_and_keeps_what_is_complete(tmp_path: Path, bucket: Any, server: ObjectStore) -> None:
    put(bucket, **{f"{name}__jsonl": 2 * LINE for name in "abcdefghijkl"})
    found = relist(bucket)

    def stop(stage: str, done: int, total: int) -> None:
        if sum(each.is_here for each in found) >= 2:
            raise Stopped("stopped by SIGTERM")

    with server.slow(0.01, "GET"), pytest.raises(Stopped):
        fetch(found, stop)
    kept = [each for each in found if each.is_here]
    assert 2 <= len(kept) < len(found) and len(cached(tmp_path)) == len(kept)
    assert {each.path.read_text() for each in kept} == {2 * LINE}


FETCH = "import sys; from fsdptrain.data.readers import *; fetch(list_objects(sys.argv[1])); print('done')"


def test_one_process_of_a_node_downloads_for_all(tmp_path: Path, bucket: Any, server: ObjectStore) -> None:
    put(bucket, **{f"{name}__jsonl": LINE for name in "abc"})
    with server.slow(0.3, "a.jsonl"):
        ranks = [Command([sys.executable, "-c", FETCH, str(bucket)], env=environment()) for _ in range(3)]
        assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
        assert [gets(server, f"{name}.jsonl") for name in "abc"] == [1, 1, 1]
    assert len(cached(tmp_path)) == 3


def test_a_process_that_is_killed_in_mid_download_leaves_no_half_object(
    tmp_path: Path, bucket: Any, server: ObjectStore
) -> None:
    put(bucket, a__jsonl=LINE, b__jsonl=2 * LINE)
    reading, release = threading.Event(), threading.Event()

    def stall(method: str, path: str) -> None:
        if method == "GET" and "b.jsonl" in path:
            reading.set()
            release.wait(30)

    words = [sys.executable, "-c", FETCH, str(bucket)]
    with server.failing(stall):
        process = Command(words, env=environment())
        assert reading.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        release.set()
    found = relist(bucket)
    assert not found[1].is_here
    assert python("-c", FETCH, bucket).stdout == "done\n"
    assert [each.path.read_text() for each in found] == [LINE, 2 * LINE] and len(cached(tmp_path)) == 2


def test_the_prepared_data_is_that_of_the_same_local_files(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path)
    put(bucket, text__jsonl=(tmp_path / "text.jsonl").read_bytes())
    tokenizer, made, stages = train_bpe(iter([LINE]), 300), [], list[tuple[str, int, int]]()
    for number, path in enumerate((str(tmp_path / "text.jsonl"), f"{bucket}/*.jsonl")):
        monkeypatch.setenv("FSDPTRAIN_CACHE", str(tmp_path / f"cache-{number}"))
        rows = open_rows(path, Data(path=path, seq_len=64), tokenizer, None, lambda *step: stages.append(step))
        made.append([rows.fingerprint, rows.digest, rows.notes])
        downloads = [step for step in stages if step[0].startswith("downloading data")]
        assert bool(downloads) == (number == 1)
    assert made[0] == made[1] and downloads[-1][1] == downloads[-1][2] > 1


def test_a_dry_run_reads_all_of_little_data_and_the_first_file_of_much(
    tmp_path: Path, bucket: Any, server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, a__jsonl=400 * LINE, b__jsonl=300 * LINE, c__jsonl=400 * LINE)
    whole: dict[str, Any] = {"train__steps": None, "train__epochs": 1, "train__global_batch_size": 4}
    whole["model__tokenizer"] = {"train": 300}
    for limit, read, notes in (
        (500 * len(LINE), ["a"], ["only the first file was read, and the number of steps is not known"]),
        (200 * len(LINE), [], ["none was read, and the number of steps is not known"]),
        (2**30, ["a", "b", "c"], []),
    ):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        list_objects.cache_clear()
        monkeypatch.setattr(validate_data, "LARGEST_DOWNLOAD", limit)
        findings = Findings()
        server.requests.clear()
        _, steps = check_data(planned(write_recipe(tmp_path, data__path=str(bucket), **whole)), findings)
        assert [name for name in "abc" if gets(server, f"{name}.jsonl")] == read
        assert findings.problems == [] and (steps is None) == bool(notes)
        assert len(findings.notes) == len(notes) and all(a in b for a, b in zip(notes, findings.notes, strict=True))
    assert findings.levels["data"]["files"] == 3


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/x", "is not supported: use s3://"),
        ("s3://bucket", r"write s3://BUCKET/FOLDER, or, for data, s3://bucket/\*"),
        ("s3://bucket/a::b", r"fsspec reads '::' as a chain of two places: rename it \(in data, \?\? matches it\)"),
        ("s3://bucket/$x/a.jsonl", r"variables such as \$HOME are not expanded; .*in data\.path \? matches a \$"),
        ("s3:/bucket/x", "is neither a folder nor a place in a store: write s3://BUCKET/FOLDER"),
        ("s3://bucket/../x", "is not a place in a store: write s3://BUCKET/FOLDER"),
        ("S3://bucket/x", "is neither a folder nor a place in a store: write s3://BUCKET/FOLDER"),
        ("gs://bucket/x.jsonl", r"needs gcsfs, which is not installed: pip install 'gcsfs>="),
    ],
)
def test_a_url_that_cannot_be_used_is_a_problem_of_the_recipe(url: str, words: str, tmp_path: Path) -> None:
    for key, value in (("data.path", url), ("data.eval", {"path": url}), ("checkpoint.path", url)):
        with pytest.raises(RecipeError, match=words) as refused:
            load(write_recipe(tmp_path, **{key.replace(".", "__"): value}))
        assert [problem.field for problem in refused.value.problems] == [key]


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("s3://bucket/runs/x", True), ("s3://bucket/runs/x/a.jsonl", True), ("s3://bucket/runs", True),
        ("s3://bucket/**", True), ("s3://bucket/*", True), ("s3://bucket/runs/*/*/*.json", True),
        ("s3://bucket/*.jsonl", False), ("s3://bucket/runs/y", False), ("s3://other/runs", False),
        ("gs://bucket/runs/x", False), ("s3://bucket/runs/*/*.json", False),
    ],
)  # fmt: skip
def test_data_that_would_include_checkpoints_is_refused(url: str, refused: bool, tmp_path: Path) -> None:
    place = "s3://bucket/runs/x"
    assert (is_inside(url, place) or would_include(url, place, DATA_LIKE_CHECKPOINT)) is refused
    if refused:
        plan = planned(write_recipe(tmp_path, data__path=str(url), checkpoint__path=place))
        with pytest.raises(RecipeError, match=rf"data\.path: {re.escape(url)} (is inside|would include)"):
            check_inputs(plan, plan.rundir)


def test_of_windows_only_one_is_downloaded(tmp_path: Path, bucket: Any, server: ObjectStore) -> None:
    put(bucket, **{f"{number}__jsonl": LINE * (2 + number) for number in range(4)})
    train_bpe(iter([LINE]), 300).save_pretrained(tmp_path / "bpe")
    recipe = write_recipe(tmp_path, model__tokenizer=str(tmp_path / "bpe"), data__path=str(bucket), data__window=1)
    plan = planned(recipe)
    stream = open_stream(plan, load_tokenizer(plan, lambda *_: None), lambda *_: None)[0]
    assert isinstance(stream, WindowStream) and len(cached(tmp_path)) == 1
    stream.part(1)
    assert len(cached(tmp_path)) == 2
    stream.leave([0, 1], remove=True)
    assert cached(tmp_path) == []
    assert len(stream.batch([0])["input_ids"]) == 1  # it is downloaded and prepared again
    assert len(cached(tmp_path)) == 1
