"""A cache of its own for the whole session, so that no test reads what this machine's user has prepared.

Set when pytest starts, before any library that reads these variables at import is imported.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

_cache = tempfile.TemporaryDirectory(prefix="fsdptrain-tests-")  # removed when the session ends
os.environ["FSDPTRAIN_CACHE"] = _cache.name
os.environ["HF_HOME"] = os.path.join(_cache.name, "hf")  # noqa: PTH118
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def cache() -> Path:
    """The folder of prepared data and tokenizers."""
    return Path(_cache.name)
