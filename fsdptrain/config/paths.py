"""Paths in a recipe or on the command line: `~` is the home folder, and `$` is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from fsdptrain.config.schema import Recipe
from fsdptrain.errors import DataError, NoData, Problem, RecipeError, StorageError, shortened
from fsdptrain.run_folder.files import NOTHING_THERE, nearest_hint, system_errors
from fsdptrain.run_folder.records import read_text
from fsdptrain.run_folder.storage import LIKE_A_URL, URL, url_fault


def expanded(path: str) -> str:
    """Return a path with `~` or `~user` replaced by that home folder; unchanged if there is no such user."""
    return os.path.expanduser(path)  # noqa: PTH111  (Path's raises for an unknown user)


def path_fault(path: str) -> str | None:
    """Return why a path cannot be used as it is written, with the way out; None if it can."""
    if "$" in path:
        return (
            f"{path!r}: variables such as $HOME are not expanded; write the path out (~ is your home folder), or pass "
            "it on the command line without quotes, so that the shell expands it (in data.path ? matches a $)"
        )
    if expanded(path).startswith("~"):
        user = path.partition("/")[0]
        return f"{path!r}: there is no user {user[1:]!r}; if it is a folder, write ./{path}"
    return None


DataPath = str | list[str]  # data.path as it is written, and in a plan: one place, or a list of files and folders


def places(path: DataPath | None) -> list[str]:
    """Return the places that a data path names: one, those of a list, or none."""
    if path is None:
        return []
    return path if isinstance(path, list) else [path]


def path_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each path in a recipe that cannot be used as it is written."""
    data, tokenizer = recipe.data, recipe.model.tokenizer
    written = {
        "output_dir": recipe.output_dir,
        "model.id": recipe.model.id,
        "teacher.id": recipe.teacher.id,
        "model.tokenizer": tokenizer if isinstance(tokenizer, str) else None,
        "data.path": data.path,
        "data.chat_template": data.chat_template if is_template_file(data.chat_template) else None,
        "data.sources": [place for item in data.sources for place in places(item.get("path"))],
        "adapter.from": recipe.adapter.from_,
        "checkpoint.path": recipe.checkpoint.path,
        "data.eval": (data.eval or {}).get("path"),
    }
    may_be_urls = ("checkpoint.path", "data.path", "data.sources", "data.eval")
    for key, value in written.items():
        for path in places(value):
            if fault := path_fault(path) or (url_fault(path) if key in may_be_urls else None):
                yield Problem(fault, key)
    if LIKE_A_URL.match(recipe.output_dir):
        yield Problem(
            f"{shortened(recipe.output_dir)!r} is not a folder: the files of a run are on a disk, and its checkpoints "
            "can be in an object store (checkpoint.path)",
            "output_dir",
        )


def cache_root() -> Path:
    """Return the folder of the cache: $FSDPTRAIN_CACHE, else fsdptrain/ of the user's cache folder.

    Raises RuntimeError if the user has no home folder.
    """
    root, base = os.environ.get("FSDPTRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(root or Path(base or Path.home() / ".cache") / "fsdptrain")


def with_expanded_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with `~` expanded, which libraries do not, and the folder of checkpoint.path absolute.

    Data paths stay as written, because a run to resume is identified by them.
    """
    names: dict[str, Any] = {"id": recipe.model.id, "tokenizer": recipe.model.tokenizer}
    names = {key: expanded(name) if isinstance(name, str) else name for key, name in names.items()}
    path, teacher = recipe.checkpoint.path, recipe.teacher
    if path is not None and not URL.fullmatch(path):
        path = str(Path(expanded(path)).absolute())
    return dataclasses.replace(
        recipe,
        output_dir=expanded(recipe.output_dir),
        model=dataclasses.replace(recipe.model, **names),
        teacher=dataclasses.replace(teacher, id=teacher.id and expanded(teacher.id)),
        checkpoint=dataclasses.replace(recipe.checkpoint, path=path),
    )


def is_folder(path: str) -> bool:
    """Return whether a path is a folder; False for a string that cannot be a path.

    Raises StorageError if the system cannot tell: a folder without rights is no name on the Hub.
    """
    with contextlib.suppress(*NOTHING_THERE, ValueError), system_errors(path):
        return stat.S_ISDIR(Path(path).stat().st_mode)
    return False


JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
DATA_SUFFIXES = (*JSON_LINES, ".json", ".parquet", ".csv", ".tsv", ".txt", ".text")

# Suffix → name of the compression. It may follow any suffix above except .parquet, which is compressed inside.
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[\w.-]{1,96})?")
MAX_FOLDERS = 10_000  # searched for one data.path: /** would search the whole disk


def model_name_fault(name: str) -> str | None:
    """Return what is wrong with the name of a model or tokenizer: nothing (None) for a folder or a Hub id."""
    if is_folder(name):
        export = Path(name) / "export"  # as a run has it
        if os.path.lexists(export / "config.json") and not os.path.lexists(Path(name) / "config.json"):
            return f"{shortened(name)!r} has no config.json; did you mean {export}?"
        return None
    if HUB_ID.fullmatch(name):
        return None
    what = "is not a folder" if os.path.lexists(name) else "does not exist"
    hint = nearest_hint(Path(name)) or ". If another recipe exports this model, run that recipe first"
    return f"{shortened(name)!r} {what}, and is no Hub id (org/name){hint}"


def is_template_file(value: str | None) -> bool:
    """Return whether `data.chat_template` names a file, and is not the text of a template."""
    return value is not None and not re.search(r"\{[{%#]", value)


def with_chat_template(recipe: Recipe, folder: Path) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with the text of the file in `data.chat_template`, None if there is a problem with the file.

    The working folder is searched first, then the recipe's `folder`.
    """
    name = recipe.data.chat_template
    if name is None or not is_template_file(name):
        return recipe, []
    if not name.strip():
        message = "is empty: give a file or the text of a template, or remove the key"
        return recipe, [Problem(message, "data.chat_template")]
    text, fault = None, f"was not found (looked in {Path.cwd()} and {folder}){nearest_hint(Path(expanded(name)))}"
    for base in (folder, Path.cwd()):
        try:
            text = read_text(Path(os.path.realpath(base / expanded(name))))
        except NOTHING_THERE:
            continue
        except (ValueError, StorageError) as error:  # ValueError: Unreadable, or a name with a null
            fault = f"cannot be read: {error}"
    if text is not None and is_template_file(text):
        text, fault = None, "is not a Jinja template: it has neither {{ nor {%"
    if text is not None and "${" in text:  # a plan has no references
        text, fault = None, "contains ${, which is a reference in a recipe: write {{ '$' }}{ instead"
    problems = [Problem(f"{shortened(name)!r} {fault}", "data.chat_template")] if text is None else []
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, chat_template=text)), problems


def is_hub_data(found: DataPath) -> TypeGuard[str]:
    """Return whether the data that `find_data` found is on the Hub: not a path, and not a URL of an object store."""
    return isinstance(found, str) and not Path(found).is_absolute() and not URL.fullmatch(found)


def find_all_data(path: DataPath, folder: Path, elsewhere: bool = False, key: str = "data.path") -> DataPath:
    """Return what `key` refers to, which is `path`, of a list every place, as `find_data` does.

    Raises RecipeError for a Hub data set in a list, whose commit could not be kept, and NoData as `find_data` does.
    """
    if isinstance(path, str):
        return find_data(path, folder, elsewhere, key)
    found = [find_data(place, folder, elsewhere, key) for place in path]
    if on_hub := next((place for place in found if is_hub_data(place)), None):
        message = (
            f"{shortened(on_hub)!r} is not a file or folder: a list cannot hold data sets of the Hub; name it alone"
        )
        raise RecipeError([Problem(message, key)])
    return found


def find_data(path: str, folder: Path, elsewhere: bool = False, key: str = "data.path") -> str:
    """Return what `key` refers to, which is `path`: an absolute path or glob, or the URL or Hub id as written.

    The working folder is searched first, then the recipe's `folder`. If nothing is found there and the path cannot be a
    Hub id, raise NoData; with `elsewhere` (the plan is for other machines), return the path in the working folder.
    """
    if URL.fullmatch(path):
        return path
    for base in (Path.cwd(), folder):
        candidate = str(base / expanded(path))
        if matching_paths(candidate):
            return candidate
    if HUB_ID.fullmatch(path.partition(":")[0]) and not data_kind(path):
        return path
    if elsewhere:
        return str(Path.cwd() / expanded(path))
    places = " and ".join(dict.fromkeys(map(str, (Path.cwd(), folder))))
    raise NoData(f"{key}: {shortened(path)!r} was not found (looked in {places}){nearest_hint(Path(expanded(path)))}")


def data_kind(path: str) -> str | None:
    """Return the kind of a data file by its name (`.jsonl` for `rows.JSONL.gz`); None for an unknown suffix."""
    name, suffix = os.path.splitext(path.lower())  # noqa: PTH122
    if suffix in COMPRESSED:
        suffix = os.path.splitext(name)[1].replace(".parquet", "")  # noqa: PTH122
    if suffix in JSON_LINES:
        return JSON_LINES[0]
    return suffix if suffix in DATA_SUFFIXES else None


def matching_paths(pattern: str) -> list[str]:
    """Return the paths that match a path or glob, sorted. An existing path is never a pattern.

    As in the shell, `**` matches any number of folders but follows no links, and names that start with a dot match only
    a pattern that does too. Raise DataError for a folder that cannot be read, or if more than MAX_FOLDERS would have to
    be searched.
    """
    if os.path.lexists(pattern):
        return [pattern]
    found, opened = set(), 0
    # (folder, parts of the pattern below it). Folders are strings: Path objects take five times as long.
    todo: list[tuple[str, tuple[str, ...]]] = [("", Path(pattern).parts)]
    while todo:
        folder, parts = todo.pop()
        first, rest = (parts[0], parts[1:]) if parts else ("", ())
        if not parts:
            found.add(folder)
        elif not glob.has_magic(first):
            path = os.path.join(folder, first)  # noqa: PTH118
            todo += [(path, rest)] if os.path.lexists(path) else []
        elif (opened := opened + 1) > MAX_FOLDERS:
            reason = f"needs a search of more than {MAX_FOLDERS:,} folders: give a narrower pattern"
            raise DataError(f"data.path: {shortened(pattern)!r} {reason}")
        else:
            entries = [e for e in _scan(folder) if first.startswith(".") or not e.name.startswith(".")]
            if first != "**":
                todo += [(e.path, rest) for e in entries if fnmatch.fnmatchcase(e.name, first)]
                continue
            todo.append((folder, rest))
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append((entry.path, parts))
                elif not rest:
                    todo.append((entry.path, ()))
    return sorted(found)


def _scan(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; none if it is not a folder. Raise DataError if it cannot be read."""
    try:
        with os.scandir(folder or ".") as entries:
            yield from entries
    except (NotADirectoryError, FileNotFoundError):
        return
    except OSError as error:
        raise DataError(f"data.path: {folder} cannot be read: {error.strerror}") from None
