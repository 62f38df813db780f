"""The versions of torch and transformers that fsdptrain was tested with, and a warning about others. No torch."""

from __future__ import annotations

import re
from importlib.metadata import version

# From the first version to below the second; pyproject.toml has the same limits. Another version may change the private
# functions that the modules `patches` rely on, without an error at the import.
TESTED = {"torch": ("2.11", "2.16"), "transformers": ("5.17", "6.0")}

READ_TORCH = ("2.11", "2.13", "2.15")  # in which these functions were read, and with which `make versions` runs tests


def untested_versions(installed: dict[str, str] | None = None) -> list[str]:
    """Return a warning for each library outside of its tested range; `installed` is library → version."""
    found = installed or {name: version(name) for name in TESTED}
    return [
        f"{name} {found[name]} was not tested with fsdptrain: private functions of {name} may have changed, so that "
        f"training fails or computes something else; install {way_out}"
        for name in TESTED
        if (way_out := _way_out(name, found[name]))
    ]


def is_tested(name: str, installed: str) -> bool:
    """Return whether a version of a library is in its tested range."""
    first, end = TESTED[name]
    return _numbers(first) <= _numbers(installed) < _numbers(end)


def _way_out(name: str, installed: str) -> str | None:
    """Return which version to install in place of an untested one; None for a tested one."""
    if not is_tested(name, installed):
        return '"{}>={},<{}"'.format(name, *TESTED[name])
    if name == "torch" and _numbers(installed) not in map(_numbers, READ_TORCH):
        return f"torch {', '.join(READ_TORCH[:-1])} or {READ_TORCH[-1]}"
    return None


def _numbers(version_text: str) -> tuple[int, ...]:
    """Return major and minor number of a version: (2, 13) of `2.13.0+cu130`."""
    return tuple(int(number) for number in re.findall(r"\d+", version_text)[:2])


if __name__ == "__main__":
    print(*READ_TORCH)
