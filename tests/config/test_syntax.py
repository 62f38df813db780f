"""Values that are written as YAML, into recipes, messages and manifests, are read as they were."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fsdptrain.config.keys import RecipeLoader, yaml_text

# What one of the readers takes for something else if it is written without quotes.
AMBIGUOUS = st.sampled_from(["1e-5", "010", "12:30:45", "yes", "Null", "~", "", "1_0", "0x1f", "=", "<<", "2026-11-23"])
TEXTS = (
    AMBIGUOUS | st.text(st.characters(codec="utf-8")) | st.text("a b\n\t\r\x85\u2028\u2029\ufeff:#-\"'|>%@`,[]{}\x1c")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=8,
)


@given(VALUES)
@example("\x85")
@example({"a\nb\x85c\n": ["\u2028"]})
def test_a_value_is_read_as_it_was(value: Any) -> None:
    line = yaml_text(value)
    assert "\n" not in line
    for written in (line, f"{{key: {line}}}", f"key: {line} # a comment"):
        for loader in (RecipeLoader, yaml.SafeLoader):
            read = yaml.load(written, Loader=loader)
            assert same(read if written == line else read["key"], value), (written, loader)


def same(read: Any, written: Any) -> bool:
    """Return whether two values are equal, and of equal types; 1.0 is not 1."""
    return json.dumps(read) == json.dumps(written)
