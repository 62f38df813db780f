"""The YAML of a recipe: a safe subset, with scalars as in YAML 1.2."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

MAX_VALUES = 2_000  # the longest model configs list one or two words per layer
MAX_DEPTH = 32  # a model config has about three levels; OmegaConf and PyYAML overflow the stack at about eighty


class RecipeLoader(yaml.SafeLoader):
    """A safe YAML loader: 1e-5 is a number; 010, 12:30:45, yes and no are strings, unlike in YAML 1.1."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node. Raise ConstructorError for a key that is set twice."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            word = str(key_node.value)
            if word in seen:
                raise yaml.constructor.ConstructorError(problem=f"`{word}` is set twice", problem_mark=node.start_mark)
            seen.add(word)
        return super().construct_mapping(node, deep)


RecipeLoader.yaml_implicit_resolvers = {}


for _tag, _pattern, _first_characters in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|nan)",
        "-+.0123456789",
    ),
):
    RecipeLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first_characters)
    )


RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])


def yaml_text(value: Any) -> str:
    """Return a value as one line of YAML, for anywhere in a recipe; YAML 1.1 reads it as that value, too.

    It is written as the item of a list, because `a{` is a text by itself, but not inside of brackets.
    """
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True}
    return yaml.dump([value], Dumper=_Dumper, width=math.inf, **options).strip()[1:-1]


class _Dumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the node of a string.

        Outside of double quotes PyYAML writes Unicode's line breaks as they are, and YAML reads them as others.
        """
        style = '"' if {*data} & {"\n", "\x85", "\u2028", "\u2029"} else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


_Dumper.yaml_implicit_resolvers = {  # a text that either reader would take for something else is quoted
    first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, []) + RecipeLoader.yaml_implicit_resolvers.get(first, [])
    for first in (*yaml.SafeDumper.yaml_implicit_resolvers, *RecipeLoader.yaml_implicit_resolvers)
}


def unsupported_yaml(text: str) -> Iterator[tuple[str, int]]:
    """Yield a message and a line for everything that YAML allows and a recipe does not.

    The text is read as a stream of events, so a deeply nested value is never built.
    """
    depth = values = 0
    for event in yaml.parse(text, Loader=RecipeLoader):
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            yield "anchors and aliases (`&`, `*`) are not allowed in a recipe: write the value out", line
        tag = getattr(event, "tag", None)
        if tag and tag not in ("!", "tag:yaml.org,2002:str"):
            yield f"the YAML tag {tag!r} is not allowed: a recipe cannot name Python objects", line
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            yield f"is nested more than {MAX_DEPTH} levels deep", line
            return
        values += isinstance(event, yaml.ScalarEvent)
        if values > MAX_VALUES:
            yield f"has more than {MAX_VALUES:,} keys and values", line
            return
