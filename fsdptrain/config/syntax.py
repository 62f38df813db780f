"""The YAML of a recipe: a safe subset, with the scalars that people mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

MAX_VALUES = 2_000  # the longest architectures list a word or two for each of their layers


MAX_DEPTH = 32  # an architecture nests three deep; OmegaConf and PyYAML run out of stack at some eighty


class _RecipeLoader(yaml.SafeLoader):
    """YAML with the scalars people mean: 1e-5 is a number; 010, 12:30:45, yes and no are texts, unlike in YAML 1.1."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            word = str(key_node.value)
            if word in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"`{word}` is written twice", problem_mark=node.start_mark
                )
            seen.add(word)
        return super().construct_mapping(node, deep)


_RecipeLoader.yaml_implicit_resolvers = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|nan)",
        "-+.0123456789",
    ),
):
    _RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])


def _refused_yaml(text: str) -> Iterator[tuple[str, int]]:
    """What YAML allows and a recipe does not, with its line; read as a stream, so that nothing deep is ever built."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_RecipeLoader):
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            yield "anchors and aliases (`&`, `*`) are not read in a recipe: write the value out", line
        tag = getattr(event, "tag", None)
        if tag and tag not in ("!", "tag:yaml.org,2002:str"):
            yield f"the YAML tag {tag!r} is refused: a recipe names no Python object", line
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            yield f"is nested more than {MAX_DEPTH} deep", line
            return
        values += isinstance(event, yaml.ScalarEvent)
        if values > MAX_VALUES:
            yield f"holds more than {MAX_VALUES:,} keys and values", line
            return
