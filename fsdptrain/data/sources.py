"""A data path → its files, its objects or its Hub data set, opened; and what identifies their content.

The splits of a folder follow from the names in it, as the Hub and `datasets` lay them out.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import string
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fsdptrain.config.keys import yaml_text
from fsdptrain.config.paths import JSON_LINES, DataPath, data_kind, is_hub_data, matching_paths, places
from fsdptrain.data.cache import QUICKLY_READ, READ_BYTES, cached_folder
from fsdptrain.data.readers import (
    BEGIN,
    PART_BYTES,
    SUPPORTED,
    Cut,
    DataFile,
    DataObject,
    EmptyFile,
    Rows,
    Source,
    conversion_advice,
    fetch,
    file_errors,
    list_objects,
    open_file,
    reject_saved_to_disk,
    without_nulls,
)
from fsdptrain.errors import HUB_UNREACHABLE, DataError, NoData, causes, first_line, listed, shortened
from fsdptrain.plan.plan import HUB_TIMEOUT_S, HubData
from fsdptrain.run_folder.events import Progress
from fsdptrain.run_folder.files import nearest_hint
from fsdptrain.run_folder.storage import URL
from fsdptrain.text import counted

# Words in the names of files and folders → kinds of splits, in the order in which `datasets` looks for them.
TRAIN, VALIDATION, TEST = "train", "validation", "test"
KINDS_OF_SPLITS = {
    TRAIN: {"train", "training"},
    VALIDATION: {"validation", "valid", "dev", "val"},
    TEST: {"test", "testing", "eval", "evaluation"},
}
SHARD = re.compile(r"(\w+(?:\.\w+)*)-[0-9]{5}-of-[0-9]{5}")
# Files with the suffix of data that describe a data set or a model.
DESCRIPTIONS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "metadata.json"}
    | {"readme.txt", "license.txt", "requirements.txt"}
)


def _kind_of(name: str) -> str:
    """Return the kind of split that a word in a name stands for: that of `train_sft` is `train`; empty for none."""
    words = {*re.split(r"[-._ 0-9]+", name.lower())}
    return next((kind for kind, known in KINDS_OF_SPLITS.items() if words & known), "")


def _splits_to_train(splits: Collection[str], place: str) -> set[str]:
    """Return which of a folder's splits are trained: the one for training, without it those that are no known kind.

    If there is nothing else, a folder of held-out data is read. Raises DataError for several splits for training.
    """
    kinds = {split: _kind_of(split) for split in splits}
    train = [split for split, kind in kinds.items() if kind == TRAIN]
    if TRAIN in train or len(train) == 1:
        return {TRAIN} if TRAIN in train else {*train}
    if train:
        raise DataError(
            f"data.path: {place} has several splits for training ({listed(train)}): name the files of one, such as "
            f"{place.rstrip('/')}/**/{train[0]}-*"
        )
    return {split for split, kind in kinds.items() if not kind} or {*splits}


def _pattern_of(names: Collection[str], others: Collection[str]) -> str | None:
    """Return the path of one file, or a glob that matches these files and no others; None if that is not found."""
    if len(names) == 1:
        return next(iter(names))
    folder, _, beginning = os.path.commonprefix([*names]).rpartition("/")  # noqa: RUF071
    file = os.path.commonprefix([name.rpartition("/")[2] for name in names]).rstrip(string.digits)  # noqa: RUF071
    if not any(other.startswith(f"{folder}/{beginning.rstrip(string.digits)}") for other in others):
        return f"{folder}/{beginning.rstrip(string.digits)}*"
    below = (other for other in others if other.startswith(f"{folder}/"))
    if not file or any(other.rpartition("/")[2].startswith(file) for other in below):
        return None
    return f"{folder}/**/{file}*"


COMMIT = re.compile("[0-9a-f]{40}")


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
        *_, first = causes(error)
        reason = f"{type(first).__name__}: {first_line(first)}"
        raise DataError(f"data.path: cannot load the Hub data set {path!r}: {reason}") from None

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
    return {part for file in opened.cache_files for part in Path(file["filename"]).parts if COMMIT.fullmatch(part)}


SETTLED_S = 10.0  # since the last change: two changes within a tick of the file system's clock look like one
DIGEST_FILE = "sha256"  # in a folder of the cache
READERS = 8  # files that are read at a time for their digests


def data_files(path: str) -> list[Path]:
    """Return the data files behind a path, a glob or a folder, each once, sorted; empty when `path` is not local.

    Raises DataError for a folder that cannot be read, and for a pipe, a device or a broken link with the name of a data
    file: a reader would wait for the first two, and rows would be missing without notice because of the third.
    """

    def raise_unreadable(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None

    found = {Path(name) for name in matching_paths(path)}
    files = {each for each in found if not os.path.isdir(each)}  # noqa: PTH112
    for each in found - files:
        for folder, _, names in os.walk(each, onerror=raise_unreadable):
            reject_saved_to_disk(folder, names)
            files |= {Path(folder, name) for name in names}
    wanted = sorted(file for file in files if data_kind(file.name) or file in found)
    for file in wanted:
        if not os.path.isfile(file):  # noqa: PTH113  (Path's raises where a folder may not be entered)
            raise DataError(f"{file} is not a readable regular file")
    return wanted


def _found(path: DataPath) -> list[DataFile]:
    """Return the files and objects behind every place of a path, each once; none for a Hub data set.

    Of a folder with several splits, they are those of the split to train on.
    """
    found: dict[str, DataFile] = {}
    for place in places(path):
        splits = _by_split(place)
        for split in _splits_to_train(splits, place) if splits else ():
            found |= splits[split]
    return list(found.values())


def _by_split(place: str) -> dict[str, dict[str, DataFile]]:
    """Return the files and objects behind a place by split and name; what is not in a folder is of one split, ''.

    Files that describe the data in a folder are left out, and hidden ones, such as an editor's copies of others.
    """
    objects = {str(each): each for each in list_objects(place)} if URL.fullmatch(place) else {}
    files = {str(file): DataFile(file, str(file)) for file in data_files(place)} if not objects else {}
    splits: dict[str, dict[str, DataFile]] = {}
    folder = place.rstrip("/") + "/"
    for name, each in (files | objects).items():
        inside = name.removeprefix(folder)
        parts = inside.split("/")
        if inside == name or not (parts[-1].lower() in DESCRIPTIONS or any(p.startswith((".", "__")) for p in parts)):
            split = ""
            if inside != name:  # that of a shard, else a kind, first of the folders
                shard = SHARD.match(parts[-1])
                split = shard[1] if shard else next(filter(None, map(_kind_of, parts)), "")
            splits.setdefault(split, {})[name] = each
    return splits


def splits_note(path: DataPath, eval_path: str | None) -> list[str]:
    """Return a sentence for each folder of several splits: which is read, neither to train nor to evaluate."""
    found, evaluated = [], {str(each) for each in _found(eval_path)} if eval_path else set()
    for place in places(path):
        splits = _by_split(place)
        read = _splits_to_train(splits, place) if splits else set()
        others = [split for split in splits if split not in read and not splits[split].keys() <= evaluated]
        if others:
            chosen = f"split {', '.join(read)} is" if all(read) else "files of no split are"
            counts = (f"{split or 'others'} ({counted(len(splits[split]), 'file')})" for split in others)
            held_out = None if evaluated else held_out_files(place)
            offer = f"; to evaluate on it, set data.eval: {{path: {yaml_text(held_out)}}}" if held_out else ""
            found.append(f"of {shortened(place)} only the {chosen} read, not {listed(counts)}{offer}")
    return found


def held_out_files(path: DataPath) -> str | None:
    """Return the path of the validation split in the folder of the data, else of the test split; None without one."""
    if not isinstance(path, str) or len(splits := _by_split(path)) < 2:
        return None
    kinds = {_kind_of(split): split for split in reversed(splits)}
    wanted = kinds.get(VALIDATION, kinds.get(TEST))
    if wanted is None or wanted in _splits_to_train(splits, path):
        return None
    return _pattern_of(splits[wanted], [name for split, names in splits.items() if split != wanted for name in names])


def data_objects(path: DataPath) -> list[DataObject]:
    """Return the objects behind the URLs of a path; none for local files and Hub data. Raises as `list_objects`."""
    return [each for each in _found(path) if isinstance(each, DataObject)]


def readable_files(path: DataPath, limit: int | None = None, progress: Progress = lambda *_: None) -> list[DataFile]:
    """Return the files behind a path, or its first `limit` ones; objects are downloaded. None for a Hub data set.

    Raises as `data_files`, `list_objects` and `fetch` do.
    """
    found = _found(path)[:limit]
    fetch(found, progress)
    return found


def file_sizes(path: DataPath) -> dict[str, int]:
    """Return the bytes of every file behind a path by its name or URL, {} for a Hub data set; nothing is downloaded."""
    return {str(each): each.size if isinstance(each, DataObject) else stamp(each)[1] for each in _found(path)}


Stamp = list[Any]  # JSON: name and bytes of a data file, and what changes with its content


def stamp(file: DataFile) -> Stamp:
    """Return name, bytes, inode, and when content and status were changed in ns: no write leaves all of them.

    The file is opened, because a client of NFS trusts what it knows of files that are not.
    """
    with file_errors(file), file.path.open("rb") as stream:
        status = os.fstat(stream.fileno())
    return [file.name, status.st_size, status.st_ino, [status.st_mtime_ns, status.st_ctime_ns]]


def fingerprint(path: DataPath) -> str:
    """Return a SHA-256 over the type and content of every data file, or over a Hub data set's name and commit.

    From QUICKLY_READ on they are read by one process of a node only: their digest is cached, until a file is changed.
    """
    if is_hub_data(path):
        data = HubData.of(path)
        identity = [data.name, data.config, data.split or "train", hub_commit(path)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    digest = hashlib.sha256()
    for file, content in contents(path).items():
        digest.update(str(data_kind(file.name)).encode() + b"\0" + bytes.fromhex(content.sha256))
    return digest.hexdigest()


@dataclass(frozen=True)
class Content:
    """The SHA-256 of a file, and places at which a file of JSON lines can be cut, PART_BYTES apart."""

    sha256: str
    cuts: list[Cut]


def contents(path: DataPath) -> dict[DataFile, Content]:
    """Return what identifies the content of every file behind a path; nothing for a Hub data set.

    From QUICKLY_READ on it is cached: that of each large file by itself, that of all others together.
    """
    stamps = {file: stamp(file) for file in readable_files(path)}
    large = [file for file, (_, size, *_) in stamps.items() if size >= QUICKLY_READ]
    groups = [[file] for file in large] + [[file for file in stamps if file not in set(large)]]
    with ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0)))) as pool:  # hashing leaves the GIL
        found = dict(chain.from_iterable(pool.map(lambda group: _contents(group, stamps).items(), groups)))
    return {file: found[file] for file in stamps}


def _contents(files: list[DataFile], stamps: dict[DataFile, Stamp]) -> dict[DataFile, Content]:
    known = [stamps[file] for file in files]
    # An object does not change once it has its name in the cache.
    changes = [max(stamps[file][3]) for file in files if not isinstance(file, DataObject)]
    changed_s = max(changes, default=0) / 1e9
    if sum(size for _, size, *_ in known) < QUICKLY_READ or time.time() - changed_s < SETTLED_S:
        return {file: _content(file) for file in files}

    def write(folder: Path) -> None:
        found = [dataclasses.asdict(_content(file)) for file in files]
        (folder / DIGEST_FILE).write_text(json.dumps(found), encoding="ascii")

    read = json.loads((cached_folder("digests", known, write) / DIGEST_FILE).read_text(encoding="ascii"))
    return {file: Content(**each) for file, each in zip(files, read, strict=True)}


def _content(file: DataFile) -> Content:
    cuts: list[Cut] = []
    with file_errors(file), file.path.open("rb") as stream:
        if not file.name.lower().endswith(JSON_LINES):  # in other types a line need not begin a row
            return Content(hashlib.file_digest(stream, "sha256").hexdigest(), cuts)
        digest, at, lines = hashlib.sha256(), 0, 0
        while data := stream.read(READ_BYTES) + stream.readline():
            if at - (cuts[-1] if cuts else BEGIN)[0] >= PART_BYTES:
                cuts.append((at, lines))
            digest.update(data)
            at, lines = at + len(data), lines + data.count(b"\n")
    return Content(digest.hexdigest(), cuts)


def quick_fingerprint(path: DataPath, budget: int) -> str:
    """Return a SHA-256 over the type, the size and the beginning of every data file; at most `budget` bytes are read.

    Files that have fewer bytes together are read as a whole. For a Hub data set it is that of `fingerprint`; of objects
    it is made from what the store lists, the type, size and ETag of each. Raises NoData for a local path without files.
    """
    if is_hub_data(path):
        return fingerprint(path)
    found, digest = _found(path), hashlib.sha256()
    if not found:
        raise NoData(f"data.path: {shortened(', '.join(places(path)))!r} was not found")
    listed = [(data_kind(e.place.name), e.size, e.etag) for e in found if isinstance(e, DataObject)]
    digest.update(json.dumps(listed).encode())
    files = [stamp(file) for file in found if not isinstance(file, DataObject)]
    whole = sum(size for _, size, *_ in files) <= budget
    for name, size, *_ in files:
        digest.update(f"{data_kind(name)} {size}".encode() + b"\0")
        left = size if whole else budget // len(files)
        with file_errors(Path(name)), Path(name).open("rb") as stream:
            while left > 0 and (data := stream.read(min(left, READ_BYTES))):
                digest.update(data)
                left -= len(data)
    return digest.hexdigest()


def open_sources(path: DataPath) -> list[Source]:
    """Open every file of local paths and URLs, or the Hub data set `org/name[:config[:split]][@revision]`.

    Empty files are left out. Raises DataError for an unreadable or unsupported file, naming the line where there is
    one, and if all files are empty; NoData when the data is not on this machine and cannot be downloaded.
    """
    if is_hub_data(path):
        return [open_hub_data(path)]
    return list(opened_files(path).values())


def opened_files(path: DataPath) -> dict[DataFile, Source]:
    """Open every file of local paths and URLs; raises as `open_sources` does."""
    _check_places(path)
    return dict(_open_files(readable_files(path)))


def first_source(path: DataPath) -> Source:
    """Open the first file with rows behind a path; raises as `open_sources` does."""
    if is_hub_data(path):
        return open_hub_data(path)
    _check_places(path)
    return next(_open_files(_found(path)))[1]


def _open_files(files: Iterable[DataFile]) -> Iterator[tuple[DataFile, Source]]:
    empty, opened = list[EmptyFile](), False
    for file in files:
        fetch([file])
        try:
            yield file, open_file(file)
            opened = True
        except EmptyFile as error:
            empty.append(error)
    if not opened:
        all_empty = f"all {len(empty)} files are empty; the first: {empty[0]}"
        raise DataError(str(empty[0]) if len(empty) == 1 else all_empty)


def _check_places(path: DataPath) -> None:
    """Raise NoData for a local place that does not exist, and DataError for one without data files."""
    for place in places(path):
        if _by_split(place):
            continue
        if not URL.fullmatch(place) and not Path(place).exists():
            raise NoData(f"data.path: {shortened(place)!r} was not found{nearest_hint(Path(place))}")
        names = sorted(os.listdir(place)) if os.path.isdir(place) else []  # noqa: PTH112, PTH208
        hint = next((f"; {name}: {advice}" for name in names if (advice := conversion_advice(name))), "")
        raise DataError(f"data.path: no data files in {place} (supported: {SUPPORTED}){hint}")
