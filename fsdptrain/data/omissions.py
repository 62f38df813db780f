"""Find what a chat template leaves out of a conversation: every value of it changes the text, or is left out.

One rendering with a mark behind each value shows most of them. For each of the others, the conversation is rendered
with another value in its place: if that gives the same text, the template does not read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdptrain.data.messages import THOUGHT_KEYS
from fsdptrain.data.turn_spans import Message, Render, delimiters_for, function_of
from fsdptrain.errors import DataError

Path = tuple[Any, ...]  # keys and indices that lead to a value
FOR_AN_API = ("strict", "additionalProperties")  # keys of tools that no template renders for a model


def find_left_out(
    render: Render, messages: list[Message], tools: list[Any] | None, text: str, shown: set[int]
) -> list[Path]:
    """Return where the values are that a template leaves out of `text`, its rendering of these messages.

    `shown`: numbers of messages whose contents are known to be in the text.
    """
    values = [(path, value) for path, value in _values(messages, tools) if path[2] != "content" or path[1] not in shown]
    return [*_left_out(render, {"messages": messages, "tools": tools}, text, values)]


def cuts_tools(render: Render, messages: list[Message], tools: list[Any], text: str) -> bool:
    """Return whether a template leaves out of `text` a part of the tools: a description, or one of a parameter.

    `type: function` and FOR_AN_API are not looked for.
    """
    of_schemas = (leaf for n, tool in enumerate(tools) for leaf in _leaves(function_of(tool), _place_of(tool, n)))
    values = [(path, value) for path, value in of_schemas if path[-1] not in FOR_AN_API and path[2:] != ("type",)]
    return any(True for _ in _left_out(render, {"messages": messages, "tools": tools}, text, values))


def _place_of(tool: Any, number: int) -> Path:
    return ("tools", number, "function") if "function" in tool else ("tools", number)


def _left_out(render: Render, row: dict[str, Any], text: str, values: list[tuple[Path, Any]]) -> Iterator[Path]:
    """Yield the paths of those of these values of a row that its rendering `text` does not depend on."""
    if not values:
        return
    delimiters, marked = delimiters_for(text), row
    marks = [str(number).join(delimiters) for number in range(len(values))]
    for (path, value), mark in zip(values, marks, strict=True):
        marked = _replaced(marked, path, value + mark if isinstance(value, str) else mark)

    def rendered(row: dict[str, Any]) -> str | None:
        try:
            return render(row["messages"], row["tools"], False)
        except DataError:
            return None

    found = rendered(marked) or ""
    missing = [each for each, mark in zip(values, marks, strict=True) if len(delimiters) < 2 or mark not in found]
    yield from (path for path, value in missing if rendered(_replaced(row, path, _another(value))) == text)


def describe_left_out(path: Path, messages: list[Message], tools: list[Any] | None) -> str:
    """Return what a template leaves out, with a way out, for a message."""
    kind, number, *rest = path
    if kind == "tools":
        return "the tools; use a template that renders `tools`, or remove the column"
    place = f"message {number + 1}"
    if rest[0] != "tool_calls":
        role = messages[number]["role"]
        return f"the {rest[0]} of {place} ({role}); use a template that renders it, or remove it from the row"
    calls = messages[number]["tool_calls"]
    where = (
        f"the call of {function_of(calls[rest[1]])['name']!r} in {place}"
        + f" (call {rest[1] + 1} of {len(calls)})" * (len(calls) > 1)
    )
    key = rest[rest.index("arguments") + 1 :] if "arguments" in rest else []
    what = f"{'.'.join(map(str, key))!r} in " * bool(key) + where
    return f"{what}; use a template that renders all `tool_calls`, or write the call as the message's content"


def _values(messages: list[Message], tools: list[Any] | None) -> Iterator[tuple[Path, Any]]:
    """Yield what a template should render, each with its path: contents, thoughts, calls, and the names of tools."""
    for i, message in enumerate(messages):
        for key in ("content", *THOUGHT_KEYS):
            if isinstance(text := message.get(key), str) and text.strip():
                yield ("messages", i, key), text
        for n, call in enumerate(message.get("tool_calls") or []):
            yield from _values_of_function(call, ("messages", i, "tool_calls", n))
    for n, tool in enumerate(tools or []):
        yield from _values_of_function(tool, ("tools", n))


def _values_of_function(call: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    function = function_of(call)
    if isinstance(function.get("name"), str):
        path = (*path, "function") if "function" in call else path
        yield (*path, "name"), function["name"]
        yield from _leaves(function.get("arguments", {}), (*path, "arguments"))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _replaced(value: Any, path: Path, other: Any) -> Any:
    """Return a copy of nested lists and mappings in which one value is replaced."""
    if not path:
        return other
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], other)
    return copy


def _another(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, str):
        return "x" if value != "x" else "y"
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else 0
