"""What this package changes in huggingface_hub, and the private parts of transformers that it relies on.

`RELIES_ON` names every original, and digests of its source with the versions in which it was read. A test fails when an
original has changed within a version, and warns when a version has another source: read it, adapt this package, add it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Any
from unittest import mock

from huggingface_hub import constants
from transformers.utils import chat_template_utils
from transformers.utils.hub import cached_file

RELIES_ON: dict[str, dict[str, str]] = {
    "huggingface_hub.constants.is_offline_mode": {"34319ec8b56a": "2.4.0"},  # by `go_offline`
    "transformers.utils.hub.cached_files": {"fdf3cdfc7397": "5.23.0"},  # by `cached_file_or_none`: a private keyword
    # by `templates_on`: its function `strftime_now` calls `datetime.now()`, with the module's `datetime`.
    "transformers.utils.chat_template_utils._cached_compile_jinja_template": {
        "37d56e4136fe": "5.23.0",
        "fd2303258122": "5.24.0",
    },
}


def go_offline() -> None:
    """Let huggingface_hub use its cache alone from now on, in this process and in those that it starts.

    Sets `huggingface_hub.constants.HF_HUB_OFFLINE`, which is read from the environment once, at import.
    """
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"


def cached_file_or_none(name: str, file: str, revision: str) -> str | None:
    """Return the path of a file of a local folder or of the Hub (downloaded if it must be); None if it has none.

    transformers' public functions raise the same error for a missing file and for a Hub that does not answer.
    """
    return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)


@contextlib.contextmanager
def templates_on(day: date | None) -> Iterator[None]:
    """Let chat templates see this day as today, at midnight, inside the context; None: see the clock.

    Replaces `transformers.utils.chat_template_utils.datetime`: transformers lets no function be passed to a template.
    """

    class Midnight(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Midnight:
            assert day is not None
            return cls.combine(day, time.min, tz)

    with mock.patch.object(chat_template_utils, "datetime", Midnight if day else datetime):
        yield
