"""Find where each turn of the assistant begins and ends in a rendered conversation, by rendering it with marks.

    … content of another ][ header ][ content of the assistant ][ end-of-turn token ][ header ][ content of another …

The marks show where contents begin and end. The header is what the template adds to the messages before the turn if it
renders them with a generation prompt. The ending is what it adds to the turn, whatever the role of the next message. A
turn is the content with its ending. If it cannot be located, DataError is raised: a turn is never guessed.

A mark is three numbers between two characters that no text contains, in the content of a message, before its thought or
before the name of a tool that it calls. Rendering a conversation with marks shows where the template puts each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.data.columns import THOUGHT_KEYS, Message, common_prefix_length
from fsdptrain.errors import DataError

Span = tuple[int, int]
LEADING_TAG = re.compile(r"\s*<[^<>]*>\s*(?=\S)")

# Kinds of marks: before a message's content, after a tag it begins with, after it, before the name of a called tool,
# before its thought.
BEGIN, INNER, END, CALL, THOUGHT = range(5)


@dataclass(frozen=True)
class Mark:
    """A mark found in a rendered text: its position in the text without marks, its message's number, its kind.

    `call`: the number of the called tool that it is before.
    """

    at: int
    message: int
    kind: int
    call: int = 0


@dataclass(frozen=True)
class MarkedText:
    """A rendering of marked messages: the text without the marks, and the marks in order."""

    text: str
    marks: list[Mark]

    def after(self, mark: Mark, to_the_end: bool = False) -> str | None:
        """Return the text from a mark to the next message's; None when the mark is not there.

        `to_the_end`: also None when another message's mark follows.
        """
        same = (mark.message, mark.kind, mark.call)
        places = [i for i, m in enumerate(self.marks) if (m.message, m.kind, m.call) == same]
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
    return (len(content) - len(content.lstrip()), len(content.rstrip())) if content.strip() else None


def _inside_space_without_markup(content: str) -> Span | None:
    """Return None for content with markup, at which a template may split it: thoughts above all."""
    return None if re.search(r"[<\[|]", content) else _inside_space(content)


def _inside_tags(content: str) -> Span | None:
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
    """Return a message with marks at both edges of its content, before its thought and the names of called tools."""

    def mark(kind: int, call: int = 0) -> str:
        return f"{delimiters[0]}{number},{kind},{call}{delimiters[1]}"

    marked = dict(message)
    content = message.get("content")
    where = placement(content) if isinstance(content, str) else None
    if where is not None and isinstance(content, str):
        a, b = where
        tag = LEADING_TAG.match(content, a, b)
        inner = content[a : tag.end()] + mark(INNER) + content[tag.end() : b] if tag else content[a:b]
        marked["content"] = content[:a] + mark(BEGIN) + inner + mark(END) + content[b:]
    if placement is not _inside_space_without_markup:
        if names := called_tools(message):
            calls = zip(message["tool_calls"], names, strict=True)
            marked["tool_calls"] = [with_function(c, name=mark(CALL, n) + name) for n, (c, name) in enumerate(calls)]
        for key in THOUGHT_KEYS:
            if isinstance(thought := message.get(key), str) and (where := _inside_space(thought)):
                marked[key] = thought[: where[0]] + mark(THOUGHT) + thought[where[0] :]
    return marked


def take_marks(rendered: str, delimiters: list[str]) -> MarkedText:
    """Take the marks out of a rendered text. A tool's name that is repeated, before its result, is no call."""
    parts = re.split(f"{delimiters[0]}([0-9]+),([0-9]+),([0-9]+){delimiters[1]}", rendered)
    marks, at, seen = list[Mark](), 0, set[tuple[str, ...]]()
    for text, *numbers in zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=False):
        at += len(text)
        mark = Mark(at, *map(int, numbers))
        if mark.kind != CALL or tuple(numbers) not in seen:
            marks.append(mark)
        seen.add(tuple(numbers))
    return MarkedText("".join(parts[::4]), marks)


def called_tools(message: Message) -> list[str]:
    """Return the names of the tools that a message calls."""
    functions = map(function_of, message.get("tool_calls") or [])
    return [str(function.get("name", "")) for function in functions]


def function_of(call: Any) -> dict[str, Any]:
    """Return the mapping that has the name and the arguments of a call: the call itself in some data."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    return function if isinstance(function, dict) else {}


def with_function(call: Any, **changes: Any) -> Any:
    """Return a call with other values in that mapping."""
    if not function_of(call):
        return call
    function = {**function_of(call), **changes}
    return {**call, "function": function} if "function" in call else function


Render = Callable[[list[Message], list[Any] | None, bool], str]  # (messages, tools, with a generation prompt?) → text
MAX_CACHED = 4096  # texts between two contents whose header or ending is remembered
MAX_CACHED_LENGTH = 200  # characters of such a text


@dataclass
class TurnFinder:
    """Marks conversations for one chat template, and remembers the headers and endings it has found.

    `render` raises DataError when the template rejects the messages. `tokens` are the tokenizer's special tokens, the
    longest first; those in `ends` end an answer: the end-of-sequence token, and where a family has it so, that of the
    next role.
    """

    render: Render
    tokens: tuple[str, ...]
    ends: tuple[str, ...]
    headers: dict[tuple[str, str], int] = field(default_factory=dict)
    endings: dict[tuple[str, bool], int] = field(default_factory=dict)
    next_roles: dict[bool, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.special = re.compile("|".join(map(re.escape, self.tokens)) or "(?!)")

    def end_in(self, behind: str, calls: bool) -> tuple[str, int] | None:
        """Return the token that ends a turn, and where it ends in the text behind the content, or a called name."""
        tokens = [(m[0], m.end()) for m in self.special.finditer(behind)] if calls else self.leading_tokens(behind)
        return next((found for found in tokens if found[0] in self.ends), None)

    def leading_tokens(self, text: str) -> list[tuple[str, int]]:
        """Return the special tokens that a text begins with, after white space, each with where it ends."""
        found, at = [], len(text) - len(text.lstrip())
        while token := self.special.match(text, at):
            at = token.end()
            found.append((token[0], at))
        return found

    def mark(self, messages: list[Message], tools: list[Any] | None, text: str) -> MarkedConversation:
        """Mark a conversation so that it still renders as `text`; raises DataError when no placement does."""
        delimiters = delimiters_for(text)
        tried: list[list[Message]] = []
        for assistants, others in PLACEMENTS if len(delimiters) == 2 else ():
            marked = [
                with_marks(m, i, assistants if m["role"] == "assistant" else others, delimiters)
                for i, m in enumerate(messages)
            ]
            if marked not in tried:
                tried.append(marked)
                view = self.render_marked(marked, tools, delimiters)
                if view is not None and view.text == text:
                    return MarkedConversation(self, messages, marked, tools, delimiters, view)
        raise cannot_locate("transforms the content of messages")

    def render_marked(
        self, messages: list[Message], tools: list[Any] | None, delimiters: list[str], prompt: bool = False
    ) -> MarkedText | None:
        """Render marked messages and take the marks out again; None when the template rejects them."""
        try:
            return take_marks(self.render(messages, tools, prompt), delimiters)
        except DataError:
            return None


@dataclass(frozen=True)
class MarkedConversation:
    """One conversation, rendered with marks: `view` is `marked` rendered, and its text is that of `messages`."""

    finder: TurnFinder
    messages: list[Message]
    marked: list[Message]
    tools: list[Any] | None
    delimiters: list[str]
    view: MarkedText

    def turn_span(self, i: int) -> Span:
        """Return where turn `i` begins and ends; raises DataError when that cannot be located."""
        begin, end, own_mark = self._content_span(i)
        thought = next((m.at for m in self.view.marks if (m.message, m.kind) == (i, THOUGHT)), None)
        if thought is not None:
            begin = min(thought, end if begin is None else begin)
        edge = end if begin is None else begin
        others = [m for m in self.view.marks if m.message != i]
        before = [m for m in others if m.at <= edge]
        after = [m.at for m in others if m.at >= end and m.at > edge]
        previous = before[-1] if before else None
        anchor = own_mark or previous  # the mark from which renderings of fewer messages are compared with this one
        stop = self._turn_end(i, end, min(after, default=len(self.view.text)), anchor)
        start = self._turn_start(i, previous, begin, end, stop, anchor)
        calls = [m.at for m in self.view.marks if (m.message, m.kind) == (i, CALL)]
        if not all(start <= at <= stop for at in (stop, *calls)):
            raise cannot_locate("renders the assistant's content apart from its calls of tools", i)
        return start, stop

    def _content_span(self, i: int) -> tuple[int | None, int, Mark | None]:
        own = [m for m in self.view.marks if m.message == i and m.kind != THOUGHT]
        begins, inner = ([m.at for m in own if m.kind == kind] for kind in (BEGIN, INNER))
        last = own[-1] if own and own[-1].kind in (END, CALL) else None
        if len(begins) > 1:
            raise cannot_locate("repeats the assistant's content", i)
        if begins and last:
            return begins[0], last.at, last
        # The template dropped a mark, as part of a thought for example.
        left, right = self._span_by_replacement(i)
        begin = next(iter(begins), next(iter(inner), None) if left is None else left)
        if last:  # an empty content may have its place behind the calls, and behind their results
            return None if begin is not None and begin > last.at else begin, last.at, last
        if right is None or (begin is not None and begin > right):
            raise cannot_locate("cuts the assistant's content", i)
        return begin, right, None

    def _span_by_replacement(self, i: int) -> tuple[int | None, int | None]:
        """Return where the content of turn `i` begins and ends, by what surrounds another content in its place."""
        other = [*self.marked[:i], with_marks({**self.messages[i], "content": "x"}, i, around, self.delimiters)]
        view = self.finder.render_marked([*other, *self.marked[i + 1 :]], self.tools, self.delimiters)
        text = self.view.text
        places = {m.kind: m.at for m in view.marks if m.message == i} if view is not None else {}
        if view is None or BEGIN not in places or END not in places:
            return None, None
        left, right = view.text[: places[BEGIN]], view.text[places[END] :]
        return len(left) if text.startswith(left) else None, len(text) - len(right) if text.endswith(right) else None

    def _turn_start(
        self, i: int, previous: Mark | None, begin: int | None, end: int, stop: int, anchor: Mark | None
    ) -> int:
        text = self.view.text
        at = previous.at if previous else 0
        gap = text[at : end if begin is None else begin]
        key = (gap, self.messages[i - 1]["role"] if i else "")
        if key in self.finder.headers:
            return at + self.finder.headers[key]
        if i:
            length = self._header_length(i, previous, gap, begin is not None, stop, anchor)
        else:  # no content precedes it: the header is what the prompt writes that follows the conversation
            prompted = self.finder.render_marked(self.marked, self.tools, self.delimiters, True)
            extends = prompted is not None and prompted.text.startswith(text)
            prompt = prompted.text.removeprefix(text) if prompted is not None and extends else ""
            length = gap.rindex(prompt) + len(prompt) if prompt and prompt in gap else None
        if length is None and begin is None:
            raise cannot_locate("modifies the assistant's content", i)
        length = len(gap) if length is None else length
        if begin is not None and len(gap) < MAX_CACHED_LENGTH and len(self.finder.headers) < MAX_CACHED:
            self.finder.headers[key] = length
        return at + length

    def _header_length(
        self, i: int, previous: Mark | None, gap: str, begin_known: bool, stop: int, anchor: Mark | None
    ) -> int | None:
        """Return how much of the gap between two contents is the assistant's header; None when none is found."""
        with_prompt, without = (self._text_after(previous, self.marked[:i], prompt) for prompt in (True, False))
        if with_prompt is None or not gap.startswith(with_prompt):
            # The prompt may close a thought, which this turn has: the header is what both begin with.
            common = common_prefix_length(gap, with_prompt or "")
            return None if begin_known or common <= len(without or "") else common
        rest = gap[len(with_prompt) :]
        if with_prompt != without or not begin_known or not rest.strip():
            return len(with_prompt)
        # The prompt changes nothing: either the template has none, or it always writes one, after this turn too.
        turn = self._text_after(anchor, self.marked[: i + 1], False) if anchor else None
        appended = turn[stop - anchor.at :].strip() if turn and anchor else ""
        return len(with_prompt) if appended and with_prompt.strip().endswith(appended) else None

    def _turn_end(self, i: int, end: int, following: int, anchor: Mark | None) -> int:
        """Return where turn `i` ends: behind its end-of-turn token, before anything that belongs to the next turn."""
        behind = self.view.text[end:following]
        last, calls = i + 1 == len(self.messages), any(called_tools(self.messages[i]))
        key = (behind, last)
        if key not in self.finder.endings or calls:
            length = self._ending_length(i, end, behind, anchor, last, calls)
            if calls or len(behind) >= MAX_CACHED_LENGTH or len(self.finder.endings) >= MAX_CACHED:
                return end + length
            self.finder.endings[key] = length
        return end + self.finder.endings[key]

    def _ending_length(self, i: int, end: int, behind: str, anchor: Mark | None, last: bool, calls: bool) -> int:
        """Return how much of the text behind the assistant's content belongs to its turn."""
        if found := self.finder.end_in(behind, calls):
            return found[1]
        if anchor is not None:
            # What the template writes for the conversation up to this turn, if it stays when another turn follows.
            turn = self._text_after(anchor, self.marked[: i + 1], False)
            continued: str = self.view.text[anchor.at : end] + behind
            if last:
                continued = self._text_before({"role": "user", "content": "x"}, anchor)
            if turn is not None and continued.startswith(turn):
                return max(0, anchor.at + len(turn.rstrip()) - end)
            # Else the first special token, if it is also there when a generation prompt replaces the next turn.
            prompted = self._text_after(anchor, self.marked[: i + 1], True)
            tokens = self.finder.leading_tokens(behind)
            if tokens and prompted is not None:
                tokens_before_prompt = self.finder.leading_tokens(prompted[end - anchor.at :])
                return tokens[0][1] if tokens_before_prompt[:1] == tokens[:1] else 0
        if calls:
            raise cannot_locate("writes no end-of-turn token after a tool call", i)
        return 0

    def next_role(self, i: int) -> str:
        """Return the token of the role that the template lets follow the last turn, if that ends an answer, or ""."""
        calls = any(called_tools(self.messages[i]))
        if calls not in self.finder.next_roles:
            anchor = next((m for m in reversed(self.view.marks) if m.message == i and m.kind in (END, CALL)), None)
            following = {"role": "tool", "name": "x"} if calls else {"role": "user"}
            found = self.finder.end_in(self._text_before({**following, "content": "x"}, anchor), calls)
            if anchor is None:
                return ""
            self.finder.next_roles[calls] = found[0] if found else ""
        return self.finder.next_roles[calls]

    def has_end(self, i: int, stop: int, text: str) -> bool:
        """Return whether there is anything behind the content of turn `i`, which ends at `stop` in the trained text."""
        ends = [m.at for m in self.view.marks if (m.message, m.kind) == (i, END)]
        if not ends or called_tools(self.messages[i]):
            return text[:stop].rstrip().endswith(self.finder.tokens)
        return bool(text[ends[-1] : stop].strip())

    def _text_before(self, following: Message, anchor: Mark | None) -> str:
        """Return the text between a mark and the content of a message that follows the conversation."""
        if anchor is None:
            return ""
        marked = [*self.marked, with_marks(following, len(self.marked), around, self.delimiters)]
        view = self.finder.render_marked(marked, self.tools, self.delimiters)
        return (view.after(anchor) if view is not None else None) or ""

    def _text_after(self, mark: Mark | None, messages: list[Message], prompt: bool) -> str | None:
        """Render only these messages and return the text behind a mark, or all of it without one.

        None when the template rejects them, or when another content follows the mark.
        """
        view = self.finder.render_marked(messages, self.tools, self.delimiters, prompt)
        if view is None or mark is None:
            return view.text if view is not None else None
        return view.after(mark, to_the_end=True)


def check_order(spans: list[Span], marks: list[Mark], messages: list[Message]) -> None:
    """Raise DataError when spans of the assistant overlap or include another's content."""
    others = [m.at for m in marks if messages[m.message]["role"] != "assistant"]
    stops = [0, *(stop for _, stop in spans)]
    for stop, (a, b) in zip(stops, spans, strict=False):
        if a < stop or any(a < at < b for at in others):
            raise cannot_locate("mixes the assistant's content with other messages")


def cannot_locate(cause: str, i: int | None = None) -> DataError:
    """Return the error for a conversation in which what to train is not known; `i`: the message concerned."""
    where = "" if i is None else f" in message {i + 1}"
    return DataError(
        f"cannot locate the assistant's tokens: the chat template {cause}{where}; use a template with "
        "{% generation %} marks, or train on all with data.train_on: all"
    )
