"""An enumeration of words whose members are rows of a table."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class TableEnum(StrEnum):
    """A word of the recipe with properties: `NAME = word, value, …`, a value for each annotation of the class."""

    def __new__(cls, word: str, *values: Any) -> TableEnum:
        """Make the member of a row."""
        member = str.__new__(cls, word)
        member._value_ = word
        vars(member).update(zip(cls.__annotations__, values, strict=True))
        return member
