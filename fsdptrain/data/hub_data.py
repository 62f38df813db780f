"""Data sets of the Hub: the commit that a name stands for, and the rows at that commit."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from fsdptrain.data.readers import BEGIN, PART_BYTES, Cut, Rows, Source, without_nulls
from fsdptrain.errors import HUB_UNREACHABLE, DataError, NoData, causes, first_line, listed
from fsdptrain.plan.plan import HubData

COMMIT = re.compile("[0-9a-f]{40}")
HUB_TIMEOUT_S = 5.0  # how long the Hub may take to answer before only the cache is used


@functools.cache  # per process: everything that reads a data set sees the same commit
def hub_commit(path: str) -> str | None:
    """Return the commit that `org/name[:config[:split]][@revision]` stands for; None when it is unknown.

    The commit is requested from the Hub. When the Hub does not answer, it is the one that the Hub last returned for
    this revision, else the only commit in the cache.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    data = HubData.of(path)
    if COMMIT.fullmatch(data.revision):
        return data.revision
    try:
        return HfApi().dataset_info(data.name, revision=data.revision or None, timeout=HUB_TIMEOUT_S).sha
    except Exception:  # offline, no such revision, or any error of the HTTP library: loading reports it
        refs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=data.name, repo_type="dataset") / "refs"
        last_answer = refs / (data.revision or "main")
    if last_answer.is_file():
        return last_answer.read_text().strip()
    try:
        cached = _commits_of(_load_data_set(data, None))
    except Exception:  # opening the data set reports it
        return None
    return cached.pop() if len(cached) == 1 else None


def open_hub_data(path: str) -> Source:
    """Open `org/name[:config[:split]][@revision]` at its commit.

    Raises NoData when it is not in the cache and the Hub cannot be reached, and DataError for any other failure.
    """
    data, commit = HubData.of(path), hub_commit(path)
    try:
        opened = _load_data_set(data, commit)
    except ConnectionError:
        raise NoData(
            f"data.path: the data set {path!r} is not in the cache, and {HUB_UNREACHABLE}; name a local file or folder"
        ) from None
    except Exception as error:  # the Hub's failures have many classes; each means that there is no data
        raise DataError(f"data.path: cannot load the Hub data set {path!r}: {_root_cause(error)}") from None

    cached = _commits_of(opened)
    if commit and cached and commit not in cached:
        raise NoData(
            f"data.revision: commit {commit} of {data.name} is not in the cache (cached: {listed(sorted(cached))}), "
            f"and {HUB_UNREACHABLE}; set data.revision to a cached commit, or connect to the Hub"
        )

    step = max(1, len(opened) * PART_BYTES // max(1, opened.data.nbytes))
    cuts = [(row, row) for row in range(step, len(opened), step)]
    rows = functools.partial(_read, path, opened)
    return Source(path, opened.column_names, len(opened), rows, cuts, selects=True)


def _read(path: str, opened: Any, columns: list[str], start: Cut = BEGIN, stop: Cut | None = None) -> Rows:
    wanted = opened.select_columns(columns)
    wanted = wanted.select(range(start[0], stop[0] if stop else len(opened)))
    for number, row in enumerate(wanted, start[0] + 1):
        yield f"{path}, row {number}", {name: without_nulls(value) for name, value in row.items()}


def _load_data_set(data: HubData, commit: str | None) -> Any:
    """Return the data set from the Hub or, offline, from the cache: at `commit` if that is cached, else the newest."""
    from datasets import load_dataset  # takes a second to import, and local files do not need it
    from datasets.packaged_modules.cache.cache import Cache
    from datasets.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # its warning names the newest cached commit, which may not be the one that is read
    split = data.split or "train"
    opened = load_dataset(data.name, data.config or None, split=split, revision=commit or data.revision or None)
    if commit is None or commit in _commits_of(opened):
        return opened
    for file in opened.cache_files:
        folder = Path(file["filename"]).parent  # …/CONFIG/VERSION/COMMIT, of the newest commit
        if COMMIT.fullmatch(folder.name) and folder.with_name(commit).is_dir():
            config, version = folder.parts[-3:-1]
            name = data.name.rpartition("/")[2]
            wanted = Cache(dataset_name=name, config_name=config, version=version, hash=commit, repo_id=data.name)
            return wanted.as_dataset(split=split)
    return opened


def _commits_of(opened: Any) -> set[str]:
    """Return the commits in the paths of the files that a data set of `datasets` was loaded from."""
    return {part for file in opened.cache_files for part in Path(file["filename"]).parts if COMMIT.fullmatch(part)}


def _root_cause(error: BaseException) -> str:
    *_, first = causes(error)
    return f"{type(first).__name__}: {first_line(first)}"
