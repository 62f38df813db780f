"""The versions of torch and transformers that fsdptrain was tested with, and a warning about others. No torch."""

from __future__ import annotations

import re
from importlib.metadata import version

# From the first version to below the second; pyproject.toml has the same limits. A newer version may change the private
# functions that the modules `patches` replace, without an error at the import.
TESTED = {"torch": ("2.11", "2.14"), "transformers": ("5.17", "6.0")}


def untested_versions(installed: dict[str, str] | None = None) -> list[str]:
    """Return a warning for each library outside of its tested range; `installed` is library → version."""
    found = installed or {name: version(name) for name in TESTED}
    return [
        f"{name} {found[name]} was not tested with fsdptrain: it may fail, or compute something else; "
        f'install "{name}>={first},<{end}"'
        for name, (first, end) in TESTED.items()
        if not _numbers(first) <= _numbers(found[name]) < _numbers(end)
    ]


def _numbers(version_text: str) -> tuple[int, ...]:
    """Return major and minor number of a version: (2, 13) of `2.13.0+cu130`."""
    return tuple(int(number) for number in re.findall(r"\d+", version_text)[:2])
