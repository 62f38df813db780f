"""A cache of its own for the whole session, so that no test reads what this machine's user has prepared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, tokenizers and `datasets` files of this session."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["FSDPTRAIN_CACHE"] = str(folder)
    os.environ["HF_HOME"] = str(folder / "hf")
    os.environ["HF_HUB_OFFLINE"] = "1"
    return folder
