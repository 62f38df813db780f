"""Conversations → text and the character spans to train: the assistant's content and its end-of-turn token.

The whole conversation is rendered once, and that text is what is trained (with `data.turns: last` or `split`, a
conversation is what leads to one turn, with that turn). The assistant's parts of it are located by the template's own
`{% generation %}` marks, or by rendering the conversation again with marks.

    … content of another ][ header ][ content of the assistant ][ end-of-turn token ][ header ][ content of another …

The marks show where contents begin and end. The header is what the template adds to the messages before the turn if it
renders them with a generation prompt. The ending is what it adds to the turn, whatever the role of the next message. A
turn is the content with its ending. If it cannot be located, DataError is raised: a turn is never guessed.

A mark is three numbers between two characters that no text contains, in the content of a message, before its thought or
before the name of a tool that it calls. Rendering a conversation with marks shows where the template puts each of them.

Every value of a conversation changes the text, or is left out, which is refused or counted. One rendering with a mark
behind each value shows most of them. For each of the others, the conversation is rendered with another value in its
place: if that gives the same text, the template does not read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from transformers.utils.chat_template_utils import render_jinja_template

from fsdptrain.config.schema import Data
from fsdptrain.data.columns import THOUGHT_KEYS, Message, common_prefix_length
from fsdptrain.data.patches import templates_on
from fsdptrain.errors import DataError
from fsdptrain.processes import memory_limited_to
from fsdptrain.text import size

Span = tuple[int, int]

# Kinds of marks: before a message's content, after it, before the name of a called tool, before its thought.
BEGIN, END, CALL, THOUGHT = range(4)


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


Delimiters = tuple[str, str]  # of a mark
Placement = Callable[[str], Span | None]  # content → where its marks go; None: it gets none


def _around(content: str) -> Span | None:
    return (0, len(content)) if content.strip() else None


def _inside_space(content: str) -> Span | None:
    return (len(content) - len(content.lstrip()), len(content.rstrip())) if content.strip() else None


def _inside_space_without_markup(content: str) -> Span | None:
    """Return None for content with markup, at which a template may split it: thoughts above all."""
    return None if re.search(r"[<\[|]", content) else _inside_space(content)


def _nowhere(content: str) -> Span | None:
    return None


# (placement in the assistant's messages, in the others'), in the order in which they are tried.
PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    (_around, _around),
    (_inside_space, _inside_space),
    (_inside_space_without_markup, _inside_space),
    (_inside_space_without_markup, _nowhere),
)


def _delimiters_for(text: str) -> tuple[str, str]:
    """Return two characters that are not in a text: Unicode noncharacters, unless it contains nearly all of them."""
    unused = (chr(code) for code in range(0xFDD0, 0x110000) if chr(code) not in text)
    return next(unused), next(unused)


def _with_marks(message: Message, number: int, placement: Placement, delimiters: Delimiters) -> Message:
    """Return a message with marks at both edges of its content, before its thought and the names of called tools."""

    def mark(kind: int, call: int = 0) -> str:
        return f"{delimiters[0]}{number},{kind},{call}{delimiters[1]}"

    marked, content = dict(message), message.get("content")
    if isinstance(content, str) and (where := placement(content)):
        a, b = where
        marked["content"] = content[:a] + mark(BEGIN) + content[a:b] + mark(END) + content[b:]
    if placement is not _inside_space_without_markup:
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                _with_function(call, name=mark(CALL, n) + call["function"]["name"]) for n, call in enumerate(calls)
            ]
        for key in THOUGHT_KEYS:
            if isinstance(thought := message.get(key), str) and (where := _inside_space(thought)):
                marked[key] = thought[: where[0]] + mark(THOUGHT) + thought[where[0] :]
    return marked


def _take_marks(rendered: str, delimiters: Delimiters) -> MarkedText:
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


def _with_function(call: dict[str, Any], **changes: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], **changes}}


MAX_CACHED = 4096  # texts between two contents whose header or ending is remembered
MAX_CACHED_LENGTH = 200  # characters of such a text


@dataclass(frozen=True)
class MarkedConversation:
    """One conversation, rendered with marks: `view` is `marked` rendered, and its text is that of `messages`."""

    renderer: ConversationRenderer
    messages: list[Message]
    marked: list[Message]
    tools: list[Any] | None
    delimiters: Delimiters
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
            raise _cannot_locate("renders the assistant's content apart from its calls of tools", i)
        return start, stop

    def _content_span(self, i: int) -> tuple[int | None, int, Mark | None]:
        own = [m for m in self.view.marks if m.message == i and m.kind != THOUGHT]
        begins = [m.at for m in own if m.kind == BEGIN]
        last = own[-1] if own and own[-1].kind in (END, CALL) else None
        if len(begins) > 1:
            raise _cannot_locate("repeats the assistant's content", i)
        if begins and last:
            return begins[0], last.at, last
        # The template dropped a mark, as part of a thought for example.
        left, right = self._span_by_replacement(i)
        begin = next(iter(begins), left)
        if last:  # an empty content may have its place behind the calls, and behind their results
            return None if begin is not None and begin > last.at else begin, last.at, last
        if right is None or (begin is not None and begin > right):
            raise _cannot_locate("cuts the assistant's content", i)
        return begin, right, None

    def _span_by_replacement(self, i: int) -> tuple[int | None, int | None]:
        """Return where the content of turn `i` begins and ends, by what surrounds another content in its place."""
        other = [*self.marked[:i], _with_marks({**self.messages[i], "content": "x"}, i, _around, self.delimiters)]
        view = self.renderer.render_marked([*other, *self.marked[i + 1 :]], self.tools, self.delimiters)
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
        if key in self.renderer.headers:
            return at + self.renderer.headers[key]
        if i:
            length = self._header_length(i, previous, gap, begin is not None, stop, anchor)
        else:  # no content precedes it: the header is what the prompt writes that follows the conversation
            prompted = self.renderer.render_marked(self.marked, self.tools, self.delimiters, True)
            extends = prompted is not None and prompted.text.startswith(text)
            prompt = prompted.text.removeprefix(text) if prompted is not None and extends else ""
            length = gap.rindex(prompt) + len(prompt) if prompt and prompt in gap else None
        if length is None and begin is None:
            raise _cannot_locate("modifies the assistant's content", i)
        length = len(gap) if length is None else length
        if begin is not None and len(gap) < MAX_CACHED_LENGTH and len(self.renderer.headers) < MAX_CACHED:
            self.renderer.headers[key] = length
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
        last, calls = i + 1 == len(self.messages), bool(self.messages[i].get("tool_calls"))
        key = (behind, last)
        if key not in self.renderer.endings or calls:
            length = self._ending_length(i, end, behind, anchor, last, calls)
            if calls or len(behind) >= MAX_CACHED_LENGTH or len(self.renderer.endings) >= MAX_CACHED:
                return end + length
            self.renderer.endings[key] = length
        return end + self.renderer.endings[key]

    def _ending_length(self, i: int, end: int, behind: str, anchor: Mark | None, last: bool, calls: bool) -> int:
        """Return how much of the text behind the assistant's content belongs to its turn."""
        if found := self.renderer.end_in(behind, calls):
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
            tokens = self.renderer.leading_tokens(behind)
            if tokens and prompted is not None:
                tokens_before_prompt = self.renderer.leading_tokens(prompted[end - anchor.at :])
                return tokens[0][1] if tokens_before_prompt[:1] == tokens[:1] else 0
        if calls:
            raise _cannot_locate("writes no end-of-turn token after a tool call", i)
        return 0

    def next_role(self, i: int) -> str:
        """Return the token of the role that the template lets follow the last turn, if that ends an answer, or ""."""
        calls = bool(self.messages[i].get("tool_calls"))
        if calls not in self.renderer.next_roles:
            anchor = next((m for m in reversed(self.view.marks) if m.message == i and m.kind in (END, CALL)), None)
            following = {"role": "tool", "name": "x"} if calls else {"role": "user"}
            found = self.renderer.end_in(self._text_before({**following, "content": "x"}, anchor), calls)
            if anchor is None:
                return ""
            self.renderer.next_roles[calls] = found[0] if found else ""
        return self.renderer.next_roles[calls]

    def has_end(self, i: int, stop: int, text: str) -> bool:
        """Return whether there is anything behind the content of turn `i`, which ends at `stop` in the trained text."""
        ends = [m.at for m in self.view.marks if (m.message, m.kind) == (i, END)]
        if not ends or self.messages[i].get("tool_calls"):
            return text[:stop].rstrip().endswith(self.renderer.tokens)
        return bool(text[ends[-1] : stop].strip())

    def _text_before(self, following: Message, anchor: Mark | None) -> str:
        """Return the text between a mark and the content of a message that follows the conversation."""
        if anchor is None:
            return ""
        marked = [*self.marked, _with_marks(following, len(self.marked), _around, self.delimiters)]
        view = self.renderer.render_marked(marked, self.tools, self.delimiters)
        return (view.after(anchor) if view is not None else None) or ""

    def _text_after(self, mark: Mark | None, messages: list[Message], prompt: bool) -> str | None:
        """Render only these messages and return the text behind a mark, or all of it without one.

        None when the template rejects them, or when another content follows the mark.
        """
        view = self.renderer.render_marked(messages, self.tools, self.delimiters, prompt)
        if view is None or mark is None:
            return view.text if view is not None else None
        return view.after(mark, to_the_end=True)


def _check_order(spans: list[Span], marks: list[Mark], messages: list[Message]) -> None:
    """Raise DataError when spans of the assistant overlap or include another's content."""
    others = [m.at for m in marks if messages[m.message]["role"] != "assistant"]
    stops = [0, *(stop for _, stop in spans)]
    for stop, (a, b) in zip(stops, spans, strict=False):
        if a < stop or any(a < at < b for at in others):
            raise _cannot_locate("mixes the assistant's content with other messages")


def _cannot_locate(cause: str, i: int | None = None) -> DataError:
    """Return the error for a conversation in which what to train is not known; `i`: the message concerned."""
    where = "" if i is None else f" in message {i + 1}"
    return DataError(
        f"cannot locate the assistant's tokens: the chat template {cause}{where}; use a template with "
        "{% generation %} marks, or train on all with data.train_on: all"
    )


Path = tuple[Any, ...]  # keys and indices that lead to a value
FOR_AN_API = ("strict", "additionalProperties")  # keys of tools that no template renders for a model


def _values(messages: list[Message], tools: list[Any] | None) -> Iterator[tuple[Path, Any]]:
    """Yield what a template should render, each with its path: contents, thoughts, calls, and the names of tools."""
    for path, function in _functions_of(tools):
        if isinstance(function.get("name"), str):
            yield (*path, "name"), function["name"]
    for i, message in enumerate(messages):
        for key in ("content", *THOUGHT_KEYS):
            if isinstance(text := message.get(key), str) and text.strip():
                yield ("messages", i, key), text
        for n, call in enumerate(message.get("tool_calls") or []):
            path = ("messages", i, "tool_calls", n, "function")
            yield (*path, "name"), call["function"]["name"]
            yield from _leaves(call["function"]["arguments"], (*path, "arguments"))


def _functions_of(tools: list[Any] | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the mapping that has the name of each tool: the tool itself in some data."""
    for n, tool in enumerate(tools or []):
        inner = tool.get("function")
        yield (("tools", n, "function"), inner) if isinstance(inner, dict) else (("tools", n), tool)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _replaced(value: Any, path: Path, other: Any) -> Any:
    if not path:
        return other
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], other)
    return copy


def _another(value: Any) -> Any:
    if isinstance(value, str):
        return "x" if value != "x" else "y"
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else 0


TEMPLATE_S = 30  # how long a chat template may render one conversation
TEMPLATE_BYTES = 2**32  # how much memory it may take, beyond what is in use before

# For tokenizers without a chat template: readable, and every assistant turn ends with the end-of-sequence token.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)

Rendered = tuple[str, list[Span]]  # a text; the spans of it that are trained
TextPart = dict[str, str]  # {type: text, text: …}

# How a template may separate the parts of a content, and the separator for templates that take texts only: that of vLLM
# and llama.cpp, so that the model is trained on what it gets when it is served.
SEPARATORS = ("", "\n", " ", "\n\n")
OF_SERVERS = "\n"

MAX_TOOLS = 1000  # lists of tools of which it is remembered whether the template leaves out a part
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the pattern that transformers looks for


@dataclass
class ConversationRenderer:
    """Renders conversations with a tokenizer's chat template, and finds what is trained in them.

    `data` says what is trained (`train_on`, `turns`) and has values for the template. `day`: what it sees as today.
    `notes` counts turns: `endless` ones, in which the template writes no end that could be learned, `shortened` ones,
    of which it leaves out a thought, or another part of the content, `unmarked` ones, which its {% generation %} marks
    leave out, those with tools of which it leaves out a part (`cut_tools`), and messages of others with `cut_content`.
    """

    tokenizer: Any
    data: Data
    day: date | None = None

    def __post_init__(self) -> None:
        self.marked_by_template = bool(GENERATION.search(template := self.tokenizer.chat_template))
        read = (key for key in THOUGHT_KEYS if re.search(rf"[.'\"]{key}\b", template))
        self.thought_key = next(read, THOUGHT_KEYS[0])
        self.arguments_as_text: bool | None = None  # how the template takes the arguments of calls, once it is known
        special = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        self.tokens = tuple(sorted((token for token in special if token.strip()), key=len, reverse=True))
        self.any_token = re.compile("|".join(map(re.escape, self.tokens)) or "(?!)")
        # Tokens that end an answer: that of the sequence, and where a family has it so, that of the next role.
        self.ends = (self.tokenizer.eos_token, *stop_tokens(self.tokenizer))
        # What was found: of the text between two contents how much is a header, or an ending; the next role's token.
        self.headers, self.endings = dict[tuple[str, str], int](), dict[tuple[str, bool], int]()
        self.next_roles = dict[bool, str]()
        self.notes = Counter[str]()
        self.cut_tools: dict[str, bool] = {}  # tools as JSON → whether the template leaves out a part of them

    def __call__(self, messages: list[Message], tools: list[Any] | None, place: str, first: int = 0) -> list[Rendered]:
        """Return the rows of a conversation, each as text with the spans of it to train, in order.

        Messages before `first` are not trained.

        Raises DataError, which begins with `place`, when the template rejects the conversation, does not finish, leaves
        out tools or calls of tools, or when the assistant's content cannot be located.
        """
        trained = [m["role"] == "assistant" and m.get("weight", 1) for m in messages]
        wanted = [i for i in range(first, len(messages)) if trained[i]]
        if self.data.train_on == "all" and any(m.get("weight") == 0 for m in messages):
            raise DataError(
                f"{place}: a message has weight 0, but data.train_on: all trains all of the text: use completion"
            )
        messages = [{name: value for name, value in m.items() if name != "weight"} for m in messages]
        rows: list[tuple[list[Message], list[int]]] = [(messages, wanted)]
        if self.data.turns != "all" and wanted:
            rows = [(messages[: i + 1], [i]) for i in wanted[-1 if self.data.turns == "last" else 0 :]]
        try:
            with _finishing(messages, self.day):
                return [self._render(self._with_texts(part, tools), tools, trained) for part, trained in rows]
        except DataError as error:
            raise DataError(f"{place}: {error}") from None

    def prompt(self, messages: list[Message]) -> str:
        """Return a conversation as text, up to where the assistant answers; raises DataError as a call does."""
        with _finishing(messages, self.day):
            return self._apply_template(messages, None, prompt=True)

    def _render(self, messages: list[Message], tools: list[Any] | None, wanted: list[int]) -> Rendered:
        messages = self._as_template_reads(messages, tools)
        text, trains_all = self._apply_template(messages, tools), self.data.train_on == "all"
        conversation = None
        try:
            conversation = None if trains_all else self.mark(messages, tools, text)
        except DataError:
            if not self.marked_by_template:
                self._check_left_out(messages, tools, text, None, wanted)
                raise
        self._check_left_out(messages, tools, text, conversation, wanted)
        if trains_all:
            return text, [(0, len(text))]
        if self.marked_by_template:
            spans = self._generation_spans(messages, tools, text, conversation)
            if wanted != [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
                spans = _spans_of_turns(spans, conversation or self.mark(messages, tools, text), wanted)
            marks = conversation.view.marks if conversation else []
            marked = {m.message for m in marks if any(start <= m.at <= stop for start, stop in spans)}
            self.notes["unmarked"] += len({m.message for m in marks}.intersection(wanted) - marked)
            return text, spans
        assert conversation is not None
        turns = {i: conversation.turn_span(i) for i in wanted}
        _check_order([span for span in turns.values() if span[1] > span[0]], conversation.view.marks, messages)
        last = len(messages) - 1
        if last in turns and not text[: turns[last][1]].rstrip().endswith(self.ends):
            # As the next role's token ends the other turns, so it is trained to end this one.
            text += (end := conversation.next_role(last))
            turns[last] = (turns[last][0], len(text) if end else turns[last][1])
        self.notes["endless"] += sum(not conversation.has_end(i, stop, text) for i, (_, stop) in turns.items())
        return text, [span for span in turns.values() if span[1] > span[0]]

    def _check_left_out(
        self, messages: list[Message], tools: list[Any] | None, text: str, conversation: MarkedConversation | None,
        wanted: list[int],
    ) -> None:  # fmt: skip
        """Raise DataError for what the template leaves out of `text`; of the thoughts of turns, count that it does."""
        marks = conversation.view.marks if conversation else []
        begun, shown = ({mark.message for mark in marks if mark.kind == kind} for kind in (BEGIN, END))
        shortened = {i for i in wanted if not _is_within(messages[i].get("content"), text)}
        values = [each for each in _values(messages, tools) if each[0][2] != "content" or each[0][1] not in shown]
        for path in self._left_out(messages, tools, text, values):
            if path[-1] not in THOUGHT_KEYS:
                raise _left_out_error(path, messages)
            shortened |= {path[1]} & {*wanted}
        self.notes["shortened"] += len(shortened)
        self.notes["cut_tools"] += len(wanted) * self._cuts_tools(messages, tools, text)
        self.notes["cut_content"] += sum(messages[i]["role"] != "assistant" for i in begun ^ shown)

    def _left_out(
        self, messages: list[Message], tools: list[Any] | None, text: str, values: list[tuple[Path, Any]]
    ) -> Iterator[Path]:
        """Yield the paths of those of these values that `text`, the rendering of the messages, does not depend on."""
        if not values:
            return
        row: dict[str, Any] = {"messages": messages, "tools": tools}
        delimiters, marked = _delimiters_for(text), row
        marks = [str(number).join(delimiters) for number in range(len(values))]
        for (path, value), mark in zip(values, marks, strict=True):
            marked = _replaced(marked, path, value + mark if isinstance(value, str) else mark)
        found = self._rendered(**marked) or ""
        missing = [each for each, mark in zip(values, marks, strict=True) if mark not in found]
        yield from (path for path, value in missing if self._rendered(**_replaced(row, path, _another(value))) == text)

    def _cuts_tools(self, messages: list[Message], tools: list[Any] | None, text: str) -> bool:
        """Return whether the template leaves out a part of the tools, such as a description of a parameter.

        It is asked once of tools that come again. `type: function` and FOR_AN_API are not looked for.
        """
        if not tools:
            return False
        key = json.dumps(tools, default=str)
        if key not in self.cut_tools:
            if len(self.cut_tools) == MAX_TOOLS:
                self.cut_tools.clear()
            values = list[tuple[Path, Any]]()
            for place, function in _functions_of(tools):
                leaves = _leaves(function, place)
                values += [each for each in leaves if each[0][-1] not in FOR_AN_API and each[0][2:] != ("type",)]
            self.cut_tools[key] = any(True for _ in self._left_out(messages, tools, text, values))
        return self.cut_tools[key]

    def _as_template_reads(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Return messages with thoughts under a key that the template reads, and arguments in the type that it takes.

        That is JSON text if it rejects objects, or prints them as Python does.
        """
        messages = [self._with_thought(message) for message in messages]
        calls = [call for message in messages for call in message.get("tool_calls") or []]
        if self.arguments_as_text is False or not calls:
            return messages
        texts = [_with_arguments_as_text(message) for message in messages]
        if self.arguments_as_text is None:
            try:
                text = self._apply_template(messages, tools)
            except DataError:
                if self._rendered(texts, tools) is None:
                    raise
                self.arguments_as_text = True
            else:
                objects = [str(given) for call in calls if (given := call["function"]["arguments"])]
                self.arguments_as_text = any(value in text for value in objects) if objects else None
        return texts if self.arguments_as_text else messages

    def _with_thought(self, message: Message) -> Message:
        if message.get("tool_calls"):
            message = {"content": "", **message}  # some templates add to it
        thought = next((message[key] for key in THOUGHT_KEYS if message.get(key)), None)
        others = {key: value for key, value in message.items() if key not in THOUGHT_KEYS}
        return {**others, self.thought_key: thought} if thought else message

    def _with_texts(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Return messages with texts as contents: lists of parts are joined as the template joins them."""
        parts = {i: m["content"] for i, m in enumerate(messages) if isinstance(m.get("content"), list)}
        texts = [{**m, "content": _text_of_parts(parts[i])} if i in parts else m for i, m in enumerate(messages)]
        for i, content in parts.items():
            if len(content) > 1:
                texts[i]["content"] = self._text_of(content, texts, i, tools)
        return texts

    def _text_of(self, parts: list[TextPart], messages: list[Message], i: int, tools: list[Any] | None) -> str:
        """Return the text that the template renders as it renders these parts as the content of message `i`.

        All `messages` have texts, which stays if the template takes no parts there. Raises DataError if it takes some,
        but renders them as no known text.
        """

        def render(content: str | list[TextPart]) -> str | None:
            return self._rendered([*messages[:i], {**messages[i], "content": content}, *messages[i + 1 :]], tools)

        text: str = messages[i]["content"]
        takes_parts = render([{"type": "text", "text": text}]) == render(text)
        if not takes_parts or (rendered := render(parts)) is None:
            return text
        for trimmed, separator in itertools.product((False, True), SEPARATORS):
            if render(joined := _text_of_parts(parts, separator, trimmed)) == rendered:
                return joined
        raise DataError(
            f"the chat template separates the parts of message {i + 1} in a way that is not supported: write its "
            "content as one text"
        )

    def _generation_spans(
        self, messages: list[Message], tools: list[Any] | None, text: str, conversation: MarkedConversation | None
    ) -> list[Span]:
        """Return the spans between the template's own marks, without white space behind an end-of-turn token.

        Raises DataError when the marks change the text or do not cover the assistant's content.
        """
        try:
            found: Any = render_jinja_template(
                [messages], tools, chat_template=self.tokenizer.chat_template, return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.data.chat_template_kwargs},
            )  # fmt: skip
        except Exception as error:  # a template may raise anything through jinja
            raise _rejection(messages, error) from None
        (rendered,), (indices,) = found
        if rendered != text:
            raise DataError("the chat template's {% generation %} marks change its text: use one where they do not")
        marks = conversation.view.marks if conversation else []
        turns = _by_turn(indices, marks)
        for turn in turns:
            start, stop = turn[-1]
            if (end := text[:stop].rstrip()).endswith(self.tokens):
                turn[-1] = (start, max(start, len(end)))
        spans = list(itertools.chain.from_iterable(turns))
        if conversation is None:
            return spans
        # transformers counts wrongly when these marks are inside a macro: compare the spans with marks in the contents.
        _check_order(spans, marks, messages)
        any_empty = any(m["role"] == "assistant" and not m.get("content", "").strip() for m in messages)  # has no marks
        for turn in turns:
            inside = [
                m for m in marks if turn[0][0] <= m.at <= turn[-1][1] and messages[m.message]["role"] == "assistant"
            ]
            kinds = {m.kind for m in inside}
            if (not inside and not any_empty) or (BEGIN in kinds and END not in kinds):
                raise _cannot_locate("has {% generation %} marks that do not cover the assistant's content")
            if inside:
                self.notes["endless"] += not conversation.has_end(inside[-1].message, turn[-1][1], text)
        return spans

    def end_in(self, behind: str, calls: bool) -> tuple[str, int] | None:
        """Return the token that ends a turn, and where it ends in the text behind the content, or a called name."""
        tokens = [(m[0], m.end()) for m in self.any_token.finditer(behind)] if calls else self.leading_tokens(behind)
        return next((found for found in tokens if found[0] in self.ends), None)

    def leading_tokens(self, text: str) -> list[tuple[str, int]]:
        """Return the special tokens that a text begins with, after white space, each with where it ends."""
        found, at = [], len(text) - len(text.lstrip())
        while token := self.any_token.match(text, at):
            at = token.end()
            found.append((token[0], at))
        return found

    def mark(self, messages: list[Message], tools: list[Any] | None, text: str) -> MarkedConversation:
        """Mark a conversation so that it still renders as `text`; raises DataError when no placement does."""
        delimiters, tried = _delimiters_for(text), list[list[Message]]()
        for assistants, others in PLACEMENTS:
            marked = [
                _with_marks(m, i, assistants if m["role"] == "assistant" else others, delimiters)
                for i, m in enumerate(messages)
            ]
            if marked not in tried:
                tried.append(marked)
                view = self.render_marked(marked, tools, delimiters)
                if view is not None and view.text == text:
                    return MarkedConversation(self, messages, marked, tools, delimiters, view)
        raise _cannot_locate("transforms the content of messages")

    def render_marked(
        self, messages: list[Message], tools: list[Any] | None, delimiters: Delimiters, prompt: bool = False
    ) -> MarkedText | None:
        """Render marked messages and take the marks out again; None when the template rejects them."""
        text = self._rendered(messages, tools, prompt)
        return None if text is None else _take_marks(text, delimiters)

    def _rendered(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str | None:
        with contextlib.suppress(DataError):
            return self._apply_template(messages, tools, prompt)
        return None

    def _apply_template(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools, tokenize=False, add_generation_prompt=prompt, **self.data.chat_template_kwargs
                )
            )
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:  # a template may raise anything through jinja
            raise _rejection(messages, error) from None


def earlier_turns_differ(tokenizer: Any, data: Data, rows: list[dict[str, Any]], day: date | None) -> bool:
    """Return whether these rows train any turn with another text than it has as the last turn of its conversation."""

    def trained(row: dict[str, Any], turns: Literal["all", "split"]) -> list[str]:
        render = ConversationRenderer(tokenizer, dataclasses.replace(data, turns=turns), day)
        found = render(row["messages"], row.get("tools"), row["place"])
        return [text[start:stop] for text, spans in found for start, stop in spans]

    with contextlib.suppress(DataError):  # a template may reject a part of a conversation
        return (
            data.train_on == "completion"
            and data.turns == "all"
            and any(trained(row, "all") != trained(row, "split") for row in rows)
        )
    return False


def _by_turn(spans: list[Span], marks: list[Mark]) -> list[list[Span]]:
    turns = list[list[Span]]()
    for span in spans:
        if marks and turns and len({m.message for m in marks if turns[-1][0][0] <= m.at <= span[1]}) < 2:
            turns[-1].append(span)
        else:
            turns.append([span])
    return turns


def _spans_of_turns(spans: list[Span], conversation: MarkedConversation, wanted: list[int]) -> list[Span]:
    """Return the spans that are in these turns; raises DataError when one of them is also in another turn."""
    turns = [conversation.turn_span(i) for i in wanted]
    kept = [(a, b) for a, b in spans if any(a < stop and start < b for start, stop in turns)]
    others = [m.at for m in conversation.view.marks if m.message not in wanted]
    if any(a < at < b for a, b in kept for at in others):
        raise _cannot_locate("has {% generation %} marks around several messages")
    return kept


def stop_tokens(tokenizer: Any) -> list[str]:
    """Return the tokens that end an answer by the configuration of the model; see `load_tokenizer`."""
    return list(getattr(tokenizer, "stop_tokens", []))


def _is_within(content: Any, text: str) -> bool:
    if not isinstance(content, str) or content.strip() in text:
        return True
    return "".join(content.split()) in "".join(text.split())


def _with_arguments_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    given = [(call, call["function"]["arguments"]) for call in message["tool_calls"]]
    calls = [
        _with_function(call, arguments=json.dumps(value, ensure_ascii=False)) if isinstance(value, dict) else call
        for call, value in given
    ]
    return {**message, "tool_calls": calls}


def _text_of_parts(parts: list[TextPart], separator: str = OF_SERVERS, trimmed: bool = False) -> str:
    """Return the texts of parts as one; `trimmed`: each without white space at both ends."""
    return separator.join(part["text"].strip() if trimmed else part["text"] for part in parts)


def _rejection(messages: list[Message], error: Exception) -> DataError:
    return DataError(
        f"the chat template rejects a conversation: {error!r:.300}; change the row, or set a template that "
        f"accepts it in data.chat_template; the conversation begins {str(messages)[:120]}"
    )


@contextlib.contextmanager
def _finishing(messages: list[Message], day: date | None) -> Iterator[None]:
    """Let templates see `day` inside; raise DataError for one that needs more than TEMPLATE_S or TEMPLATE_BYTES.

    transformers renders in jinja's sandbox, which keeps code inside but does not stop nested loops or products of
    texts. The timer uses a signal, so it works only in the main thread of a process, where all of `prepare` runs.
    """

    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError(f"rendering takes longer than {TEMPLATE_S} s")

    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGALRM, stop) if in_main_thread else None
    try:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_REAL, TEMPLATE_S)
        with memory_limited_to(TEMPLATE_BYTES), templates_on(day):
            yield
    except (TimeoutError, MemoryError) as error:
        reason = str(error) or f"rendering takes more than {size(TEMPLATE_BYTES)} of memory"
        raise DataError(
            f"the chat template does not finish: {reason}; the conversation begins {str(messages)[:120]}"
        ) from None
    finally:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)


def _left_out_error(path: Path, messages: list[Message]) -> DataError:
    kind, number, *rest = path
    if kind == "tools":
        what = "the tools; use a template that renders `tools`, or remove the column"
    elif rest[0] == "tool_calls":
        calls = messages[number]["tool_calls"]
        what = f"the call of {calls[rest[1]]['function']['name']!r} in message {number + 1}"
        if len(calls) > 1:
            what += f" (call {rest[1] + 1} of {len(calls)})"
        if "arguments" in rest and (key := rest[rest.index("arguments") + 1 :]):
            what = f"{'.'.join(map(str, key))!r} in {what}"
        what += "; use a template that renders all `tool_calls`, or write the call as the message's content"
    else:
        role = messages[number]["role"]
        what = f"the {rest[0]} of message {number + 1} ({role}); use a template that renders it, or remove it"
    return DataError(f"the chat template leaves out {what}")
