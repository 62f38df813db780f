"""Numbered marks in the contents of messages, and where they are in the rendered conversation.

A mark is a number between two characters that no text contains. Rendering a conversation with marks shows where the
template puts each message's content.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]
LEADING_TAG = re.compile(r"\s*<[^<>]*>\s*(?=\S)")

# Kinds of marks: before a message's content, after a tag it begins with, after it, before the name of a called tool.
BEGIN, INNER, END, CALL = KINDS = range(4)


@dataclass(frozen=True)
class Mark:
    """A mark found in a rendered text: its position in the text without marks, its message's number, its kind."""

    at: int
    message: int
    kind: int


@dataclass(frozen=True)
class MarkedText:
    """A rendering of marked messages: the text without the marks, and the marks in order."""

    text: str
    marks: list[Mark]

    def after(self, mark: Mark, to_the_end: bool = False) -> str | None:
        """Return the text from a mark to the next message's; None when the mark is not there.

        `to_the_end`: also None when another message's mark follows.
        """
        places = [i for i, m in enumerate(self.marks) if (m.message, m.kind) == (mark.message, mark.kind)]
        if not places:
            return None
        later = [m.at for m in self.marks[places[-1] + 1 :] if m.message != mark.message]
        if to_the_end and later:
            return None
        return self.text[self.marks[places[-1]].at : later[0] if later else None]


Placement = Callable[[str], Span | None]  # content → where its marks go; None: it gets none


def around(content: str) -> Span | None:
    """Return the whole content; None when it is blank."""
    return (0, len(content)) if content.strip() else None


def _inside_space(content: str) -> Span | None:
    """Return the content without white space at both ends, which a template may trim."""
    return (len(content) - len(content.lstrip()), len(content.rstrip())) if content.strip() else None


def _inside_space_without_markup(content: str) -> Span | None:
    """Return None for content with markup, at which a template may split it: thoughts above all."""
    return None if re.search(r"[<\[|]", content) else _inside_space(content)


def _inside_tags(content: str) -> Span | None:
    """Return the content without a tag at either end, which a template may compare."""
    found = re.fullmatch(r"(\s*(?:<[^>]*>)?)(.*?)((?:<[^>]*>)?\s*)", content, re.DOTALL)
    return found.span(2) if found and found[2].strip() else None


def _nowhere(content: str) -> Span | None:
    return None


# (placement in the assistant's messages, in the others'), in the order in which they are tried.
PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    (around, around),
    (_inside_space, _inside_space),
    (_inside_space_without_markup, _inside_space),
    (_inside_space, _inside_tags),
    (_inside_space_without_markup, _inside_tags),
    (_inside_space, _nowhere),
    (_inside_space_without_markup, _nowhere),
)


def delimiters_for(text: str) -> list[str]:
    """Return two Unicode noncharacters that are not in a text; fewer when it contains nearly all of them."""
    return [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in text][:2]


def with_marks(message: Message, number: int, placement: Placement, delimiters: list[str]) -> Message:
    """Return a message with marks at both edges of its content, and before the name of every tool it calls."""

    def mark(kind: int) -> str:
        return f"{delimiters[0]}{number * len(KINDS) + kind}{delimiters[1]}"

    marked = dict(message)
    content = message.get("content")
    where = placement(content) if isinstance(content, str) else None
    if where is not None and isinstance(content, str):
        a, b = where
        tag = LEADING_TAG.match(content, a, b)
        inner = content[a : tag.end()] + mark(INNER) + content[tag.end() : b] if tag else content[a:b]
        marked["content"] = content[:a] + mark(BEGIN) + inner + mark(END) + content[b:]
    if called_tools(message) and placement is not _inside_space_without_markup:
        marked["tool_calls"] = [_with_marked_name(call, mark(CALL)) for call in message["tool_calls"]]
    return marked


def _with_marked_name(call: Any, mark: str) -> Any:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _with_marked_name(call["function"], mark)}
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return {**call, "name": mark + call["name"]}
    return call


def take_marks(rendered: str, delimiters: list[str]) -> MarkedText:
    """Take the marks out of a rendered text."""
    parts = re.split(f"{delimiters[0]}([0-9]+){delimiters[1]}", rendered)
    marks, at = [], 0
    for text, number in zip(parts[::2], parts[1::2], strict=False):
        at += len(text)
        marks.append(Mark(at, *divmod(int(number), len(KINDS))))
    return MarkedText("".join(parts[::2]), marks)


def called_tools(message: Message) -> list[str]:
    """Return the names of the tools that a message calls."""
    calls = message.get("tool_calls") or []
    functions = [call.get("function") or call for call in calls if isinstance(call, dict)]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]
