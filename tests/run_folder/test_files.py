"""Files are written under names that nobody can guess, and never through a link that others have planted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support import fsdptrain

from fsdptrain.run_folder.files import open_to_append, replaced, try_lock, write_atomically
from fsdptrain.run_folder.ownership import write_mark
from fsdptrain.run_folder.rundir import MARK


def planted(folder: Path, *names: str) -> Path:
    """Return a file of someone else, to which links with these names lead."""
    precious = folder / "precious"
    precious.write_text("precious")
    for name in names:
        (folder / name).symlink_to(precious)
    return precious


def test_no_file_is_written_through_a_planted_link(tmp_path: Path) -> None:
    precious, page = planted(tmp_path, "page.html", ".page.html.tmp", MARK, "lines"), tmp_path / "page.html"
    write_atomically(page, "new")
    write_mark(tmp_path)
    for refused in (open_to_append, try_lock):
        with pytest.raises(OSError, match="symbolic links"):
            refused(tmp_path / "lines")
    assert precious.read_text() == "precious" and page.read_text() == "new" and not page.is_symlink()
    (tmp_path / "mine.yaml").symlink_to(tmp_path / "elsewhere")
    done = fsdptrain("recipes", "copy", "shakespeare", tmp_path / "mine.yaml")
    assert done.returncode == 2 and "exists already" in done.stderr and not (tmp_path / "elsewhere").exists()


def test_a_file_that_replaces_another_has_the_usual_rights_and_leaves_nothing_after_an_error(tmp_path: Path) -> None:
    before, path = os.umask(0o027), tmp_path / "file"
    try:
        write_atomically(path, b"old")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(KeyError), replaced(path) as file:
        file.write(b"new")
        raise KeyError
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"
