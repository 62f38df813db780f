"""Find where each turn of the assistant begins and ends in a rendered conversation, by rendering it with marks.

    … content of another ][ header ][ content of the assistant ][ end-of-turn token ][ header ][ content of another …

The marks show where contents begin and end. The header is what the template adds to the messages before the turn if it
renders them with a generation prompt. The ending is what it adds to the turn, whatever the role of the next message. A
turn is the content with its ending. If it cannot be located, DataError is raised: a turn is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.data.marks import (
    BEGIN,
    CALL,
    END,
    INNER,
    PLACEMENTS,
    Mark,
    MarkedText,
    Message,
    Span,
    around,
    called_tools,
    delimiters_for,
    take_marks,
    with_marks,
)
from fsdptrain.errors import DataError

Render = Callable[[list[Message], list[Any] | None, bool], str]  # (messages, tools, with a generation prompt?) → text
MAX_CACHED = 4096  # texts between two contents whose header or ending is remembered
MAX_CACHED_LENGTH = 200  # characters of such a text


@dataclass
class TurnFinder:
    """Marks conversations for one chat template, and remembers the headers and endings it has found.

    `render` raises DataError when the template rejects the messages. `special` matches the tokenizer's special tokens.
    """

    render: Render
    special: re.Pattern[str]
    eos: str | None
    headers: dict[tuple[str, str], int] = field(default_factory=dict)
    endings: dict[tuple[str, bool], int] = field(default_factory=dict)

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
        before = [m for m in self.view.marks if m.message != i and m.at <= (end if begin is None else begin)]
        after = [m.at for m in self.view.marks if m.message != i and m.at >= end and m not in before]
        previous = before[-1] if before else None
        anchor = own_mark or previous  # the mark from which renderings of fewer messages are compared with this one
        stop = self._turn_end(i, end, min(after, default=len(self.view.text)), anchor)
        return self._turn_start(i, previous, begin, end, stop, anchor), stop

    def _content_span(self, i: int) -> tuple[int | None, int, Mark | None]:
        """Return where the content of turn `i` begins, if that is known, and ends; and its last mark, if it has any."""
        own = [m for m in self.view.marks if m.message == i]
        begins, inner = ([m.at for m in own if m.kind == kind] for kind in (BEGIN, INNER))
        last = own[-1] if own and own[-1].kind in (END, CALL) else None
        if len(begins) > 1:
            raise cannot_locate("repeats the assistant's content", i)
        if begins and last:
            return begins[0], last.at, last
        # The template dropped a mark, as part of a thought for example.
        left, right = self._span_by_replacement(i)
        begin = next(iter(begins), next(iter(inner), None) if left is None else left)
        if last:
            return begin, last.at, last
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
        """Return where turn `i` begins: behind its header, or with its content when no header is found."""
        text = self.view.text
        at = previous.at if previous else 0
        gap = text[at : end if begin is None else begin]
        key = (gap, self.messages[i - 1]["role"] if i else "")
        if key in self.finder.headers:
            return at + self.finder.headers[key]
        length = (
            self._header_length(i, previous, gap, begin is not None, stop, anchor)
            if i
            else self._first_header_length(gap)
        )
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
            return None
        rest = gap[len(with_prompt) :]
        if with_prompt != without or not begin_known or not rest.strip():
            return len(with_prompt)
        # The prompt changes nothing: either the template has none, or it always writes one, after this turn too.
        turn = self._text_after(anchor, self.marked[: i + 1], False) if anchor else None
        appended = turn[stop - anchor.at :].strip() if turn and anchor else ""
        return len(with_prompt) if appended and with_prompt.strip().endswith(appended) else None

    def _first_header_length(self, gap: str) -> int | None:
        """Return the header's length when no content precedes it: up to the prompt that follows the conversation."""
        text = self.view.text
        prompted = self.finder.render_marked(self.marked, self.tools, self.delimiters, True)
        prompt = prompted.text.removeprefix(text) if prompted is not None and prompted.text.startswith(text) else ""
        return gap.rindex(prompt) + len(prompt) if prompt and prompt in gap else None

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
        tokens = _leading_tokens(self.finder.special, behind)
        eos = self.finder.eos
        # An end-of-sequence token ends the turn.
        for token, length in tokens:
            if token == eos:
                return length
        if anchor is not None:
            # What the template writes for the conversation up to this turn, if it stays when another turn follows.
            turn = self._text_after(anchor, self.marked[: i + 1], False)
            continued: str = self.view.text[anchor.at : end] + behind
            if last:
                question = with_marks({"role": "user", "content": "x"}, i + 1, around, self.delimiters)
                view = self.finder.render_marked([*self.marked, question], self.tools, self.delimiters)
                continued = (view.after(anchor) if view is not None else None) or ""
            if turn is not None and continued.startswith(turn):
                return max(0, anchor.at + len(turn.rstrip()) - end)
            # Else the first special token, if it is also there when a generation prompt replaces the next turn.
            prompted = self._text_after(anchor, self.marked[: i + 1], True)
            if tokens and prompted is not None:
                tokens_before_prompt = _leading_tokens(self.finder.special, prompted[end - anchor.at :])
                return tokens[0][1] if tokens_before_prompt[:1] == tokens[:1] else 0
        if calls:
            if eos and eos in behind:
                return behind.index(eos) + len(eos)
            raise cannot_locate("writes no end-of-turn token after a tool call", i)
        return 0

    def _text_after(self, mark: Mark | None, messages: list[Message], prompt: bool) -> str | None:
        """Render only these messages and return the text behind a mark, or all of it without one.

        None when the template rejects them, or when another content follows the mark.
        """
        view = self.finder.render_marked(messages, self.tools, self.delimiters, prompt)
        if view is None or mark is None:
            return view.text if view is not None else None
        return view.after(mark, to_the_end=True)


def _leading_tokens(special: re.Pattern[str], text: str) -> list[tuple[str, int]]:
    """Return the special tokens that a text begins with, after white space, each with where it ends."""
    found, at = [], len(text) - len(text.lstrip())
    while token := special.match(text, at):
        at = token.end()
        found.append((token[0], at))
    return found


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
