"""Conversations → text and the character spans to train: what the assistant says, and its end-of-turn token.

The whole conversation is rendered once, and that text is what is trained. Where the assistant speaks in it is found by
the template's own `{% generation %}` marks, or by rendering the conversation again with numbered marks around every
message's words. Without its marks that second text has to be the first one; a template that treats marked words
differently (it trims, splits or compares them) gets them elsewhere. What cannot be found is refused, never guessed.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from fsdptrain.errors import DataError

TEMPLATE_S = 30  # seconds that a chat template may take over one conversation, and bytes beyond those in use before


TEMPLATE_BYTES = 2**32


REMEMBERED = 4096  # texts between two messages, of at most so many characters, whose parts are kept in mind


SHORT = 200


Message = dict[str, Any]


Span = tuple[int, int]


# For tokenizers without a chat template: readable, and every assistant turn ends with the end-of-sequence token.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n"
    "{% else %}{{ message.role | capitalize }}: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


LEADING_TAG = re.compile(r"\s*<[^<>]*>\s*(?=\S)")


# Kinds of marks: before a message's words, behind a tag they begin with, behind them, before the name of a called tool.
BEGIN, INNER, END, CALL = KINDS = range(4)


@dataclass(frozen=True)
class Mark:
    """Where a mark stood: its position in the text without marks, its message's number, its kind."""

    at: int
    message: int
    kind: int


@dataclass(frozen=True)
class Marked:
    """A rendering of marked messages: the text without the marks, and where these stood, in order."""

    text: str
    marks: list[Mark]

    def behind(self, mark: Mark, to_the_end: bool = False) -> str | None:
        """The text from a mark to the next message's; None where the mark is not there.

        `to_the_end`: None, too, where another message's mark comes later.
        """
        places = [i for i, m in enumerate(self.marks) if (m.message, m.kind) == (mark.message, mark.kind)]
        if not places:
            return None
        later = [m.at for m in self.marks[places[-1] + 1 :] if m.message != mark.message]
        if to_the_end and later:
            return None
        return self.text[self.marks[places[-1]].at : later[0] if later else None]


Edges = Callable[[str], Span | None]  # of a message's words: where its marks go; None: it gets none


def _whole(words: str) -> Span | None:
    return (0, len(words)) if words.strip() else None


def _stripped(words: str) -> Span | None:
    """Inside the white space at both ends, which a template may trim."""
    return (len(words) - len(words.lstrip()), len(words.rstrip())) if words.strip() else None


def _plain(words: str) -> Span | None:
    """None for words with markup, at which a template may cut them: thoughts, above all."""
    return None if re.search(r"[<\[|]", words) else _stripped(words)


def _inside(words: str) -> Span | None:
    """Inside a tag at either end, which a template may look for."""
    found = re.fullmatch(r"(\s*(?:<[^>]*>)?)(.*?)((?:<[^>]*>)?\s*)", words, re.DOTALL)
    return found.span(2) if found and found[2].strip() else None


def _nowhere(words: str) -> Span | None:
    return None


# Where marks go, (the assistant's, the others'), the first that leaves the text as it is.
PLACES: tuple[tuple[Edges, Edges], ...] = (
    (_whole, _whole), (_stripped, _stripped), (_plain, _stripped), (_stripped, _inside), (_plain, _inside),
    (_stripped, _nowhere), (_plain, _nowhere),
)  # fmt: skip


def plain_template(prefix: str) -> str:
    """The plain chat template for a tokenizer that begins every text with `prefix`, so that conversations do too."""
    return prefix + PLAIN_CHAT_TEMPLATE


@dataclass
class Conversations:
    """Renders conversations with a tokenizer's chat template, and finds what is trained in them.

    `everything`: all of the text is trained, not only what the assistant says.
    """

    tokenizer: Any
    everything: bool
    _headers: dict[tuple[str, str], int] = field(default_factory=dict)
    _endings: dict[tuple[str, bool], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.marked_by_template = bool(GENERATION.search(self.tokenizer.chat_template))
        tokens = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        longest_first = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def __call__(self, messages: list[Message], tools: list[Any] | None, place: str) -> tuple[str, list[Span]]:
        """A conversation as text, and the spans of it to train, in order.

        Raises DataError, which begins with `place`, where the template refuses the conversation, has no end, leaves out
        tools or calls of them, or where it cannot be told which words are the assistant's.
        """
        try:
            with _bounded():
                return self._render(messages, tools)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        except (TimeoutError, MemoryError) as error:
            raise DataError(f"{place}: the chat template has no end: {error!r}; it got {str(messages)[:120]}") from None

    def _render(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        text = self._template(messages, tools)
        if tools and text == self._template(messages, None):
            raise DataError(
                "the chat template leaves out the tools; use a template that renders `tools`, or remove the column"
            )
        if self.everything:
            spans = [(0, len(text))]
            parts = {i: text for i, message in enumerate(messages) if message["role"] == "assistant"}
        elif self.marked_by_template:
            spans = self._generations(messages, tools, text)
            parts = {i: text for i, message in enumerate(messages) if message["role"] == "assistant"}
        else:
            talk = self._marked_like(messages, tools, text)
            found = {i: talk.span(i) for i, message in enumerate(messages) if message["role"] == "assistant"}
            spans = [span for span in found.values() if span[1] > span[0]]
            _check_order(spans, talk.view.marks, messages)
            parts = {i: text[start:stop] for i, (start, stop) in found.items()}
        for i, part in parts.items():
            missing = [name for name in called(messages[i]) if name not in part]
            if missing:
                raise DataError(
                    f"the chat template leaves out the call of {missing[0]!r} in message {i + 1}; use a template that "
                    "renders `tool_calls`, or write the call as the message's content"
                )
        return text, spans

    def _generations(self, messages: list[Message], tools: list[Any] | None, text: str) -> list[Span]:
        """The spans between the template's own marks, each without the white space behind its end-of-turn token."""
        try:
            found: Any = render_jinja_template(
                [messages], tools, chat_template=self.tokenizer.chat_template, return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )  # fmt: skip
        except Exception as error:  # a template may raise anything through jinja
            raise _refusal(messages, error) from None
        (rendered,), (indices,) = found
        if rendered != text:
            raise DataError("the chat template's {% generation %} marks change its text: use one where they do not")
        spans = []
        for start, stop in indices:
            said = text[start:stop].rstrip()
            ends = [found.end() for found in self.special.finditer(said)]
            spans.append((start, start + len(said) if ends[-1:] == [len(said)] else stop))
        try:
            marks = self._marked_like(messages, tools, text).view.marks
        except DataError:
            return spans
        _check_order(spans, marks, messages)
        empty = any(m["role"] == "assistant" and not m.get("content", "").strip() for m in messages)  # has no marks
        for a, b in spans:  # transformers counts wrongly where these marks are inside a macro
            inside = {m.kind for m in marks if a <= m.at <= b and messages[m.message]["role"] == "assistant"}
            if (not inside and not empty) or (BEGIN in inside and END not in inside):
                raise _unknown("has {% generation %} marks that miss what the assistant says")
        return spans

    def _marked_like(self, messages: list[Message], tools: list[Any] | None, text: str) -> Talk:
        """The conversation with marks that leave its text as it is."""
        bounds = [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in text][:2]  # which no text holds
        tried: list[list[Message]] = []
        for mine, theirs in PLACES if len(bounds) == 2 else ():
            marked = [
                _with_marks(m, i, mine if m["role"] == "assistant" else theirs, bounds) for i, m in enumerate(messages)
            ]
            if marked not in tried:
                tried.append(marked)
                view = self.marked(marked, tools, bounds)
                if view is not None and view.text == text:
                    return Talk(self, messages, marked, tools, bounds, view)
        raise _unknown("changes words that are marked")

    def marked(
        self, messages: list[Message], tools: list[Any] | None, bounds: list[str], prompt: bool = False
    ) -> Marked | None:
        """Render marked messages and take the marks out again; None where the template refuses them."""
        try:
            text = self._template(messages, tools, prompt)
        except DataError:
            return None
        parts = re.split(f"{bounds[0]}([0-9]+){bounds[1]}", text)
        marks, at = [], 0
        for words, number in zip(parts[::2], parts[1::2], strict=False):
            at += len(words)
            marks.append(Mark(at, *divmod(int(number), len(KINDS))))
        return Marked("".join(parts[::2]), marks)

    def _template(self, messages: list[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=prompt)
            )
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:  # a template may raise anything through jinja
            raise _refusal(messages, error) from None


@dataclass(frozen=True)
class Talk:
    """One conversation, rendered with marks.

    `view` is `marked` rendered, and its text is that of `messages` rendered. For one turn of the assistant,

        … words of another ][ header ][ what the assistant says ][ end-of-turn token ][ header ][ words of another …

    the marks show where the others' words end and begin. The header is what the template, asked for a generation
    prompt, puts behind the messages so far; the ending what it puts behind this turn whoever speaks next.
    """

    of: Conversations
    messages: list[Message]
    marked: list[Message]
    tools: list[Any] | None
    bounds: list[str]
    view: Marked

    def span(self, i: int) -> Span:
        """Where turn `i` begins and ends. Raises DataError where that cannot be told."""
        begin, end, anchor = self._words(i)
        before = [m for m in self.view.marks if m.message != i and m.at <= (end if begin is None else begin)]
        after = [m.at for m in self.view.marks if m.message != i and m.at >= end and m not in before]
        previous = before[-1] if before else None
        anchor = anchor or previous
        stop = self._stop(i, end, min(after, default=len(self.view.text)), anchor)
        return self._start(i, previous, begin, end, stop, anchor), stop

    def _words(self, i: int) -> tuple[int | None, int, Mark | None]:
        """Where the words of turn `i` begin, if that can be told, and end; and its last mark, if it has any."""
        own = [m for m in self.view.marks if m.message == i]
        begins, inner = ([m.at for m in own if m.kind == kind] for kind in (BEGIN, INNER))
        last = own[-1] if own and own[-1].kind in (END, CALL) else None
        if len(begins) > 1:
            raise _unknown("repeats what the assistant says", i)
        if begins and last:
            return begins[0], last.at, last
        left, right = self._around(i)
        begin = next(iter(begins), next(iter(inner), None) if left is None else left)
        if last:
            return begin, last.at, last
        if right is None or (begin is not None and begin > right):
            raise _unknown("cuts what the assistant says", i)
        return begin, right, None

    def _around(self, i: int) -> tuple[int | None, int | None]:
        """Where the words of turn `i` begin and end by what stands around another word in their place."""
        other = [*self.marked[:i], _with_marks({**self.messages[i], "content": "x"}, i, _whole, self.bounds)]
        view = self.of.marked([*other, *self.marked[i + 1 :]], self.tools, self.bounds)
        text = self.view.text
        places = {m.kind: m.at for m in view.marks if m.message == i} if view is not None else {}
        if view is None or BEGIN not in places or END not in places:
            return None, None
        left, right = view.text[: places[BEGIN]], view.text[places[END] :]
        return len(left) if text.startswith(left) else None, len(text) - len(right) if text.endswith(right) else None

    def _start(self, i: int, previous: Mark | None, begin: int | None, end: int, stop: int, anchor: Mark | None) -> int:
        """Where turn `i` begins: behind its header, or with its words where the header is no generation prompt."""
        text = self.view.text
        at = previous.at if previous else 0
        gap = text[at : end if begin is None else begin]
        known = (gap, self.messages[i - 1]["role"] if i else "")
        if known in self.of._headers:
            return at + self.of._headers[known]
        header = self._header if i else self._header_of_the_first
        length = header(i, previous, gap, begin is not None, stop, anchor)
        if length is None and begin is None:
            raise _unknown("modifies the assistant's text", i)
        length = len(gap) if length is None else length
        if begin is not None and len(gap) < SHORT and len(self.of._headers) < REMEMBERED:
            self.of._headers[known] = length
        return at + length

    def _header(
        self, i: int, previous: Mark | None, gap: str, begins: bool, stop: int, anchor: Mark | None
    ) -> int | None:
        """How much of the gap between another's words and the assistant's is the header; None where none is found."""
        asked, unasked = (self._rendered(self.marked[:i], previous, prompt) for prompt in (True, False))
        if asked is None or not gap.startswith(asked):
            return None
        rest = gap[len(asked) :]
        if asked != unasked or not begins or not rest.strip():
            return len(asked)
        alone = self._rendered(self.marked[: i + 1], anchor, False) if anchor else None
        appended = alone[stop - anchor.at :].strip() if alone and anchor else ""
        return len(asked) if appended and asked.strip().endswith(appended) else None  # the header comes unasked

    def _header_of_the_first(self, i: int, previous: Mark | None, gap: str, *_: Any) -> int | None:
        """The same where no words stand before: all up to the generation prompt, as it is after the conversation."""
        text = self.view.text
        asked = self.of.marked(self.marked, self.tools, self.bounds, True)
        prompt = asked.text.removeprefix(text) if asked is not None and asked.text.startswith(text) else ""
        return gap.rindex(prompt) + len(prompt) if prompt and prompt in gap else None

    def _stop(self, i: int, end: int, following: int, anchor: Mark | None) -> int:
        """Where turn `i` ends: behind its end-of-turn token, before whatever belongs to the next."""
        behind = self.view.text[end:following]
        last, calls = i + 1 == len(self.messages), any(called(self.messages[i]))
        known = (behind, last)
        if known not in self.of._endings or calls:
            length = self._ending(i, end, behind, anchor, last, calls)
            if calls or len(behind) >= SHORT or len(self.of._endings) >= REMEMBERED:
                return end + length
            self.of._endings[known] = length
        return end + self.of._endings[known]

    def _ending(self, i: int, end: int, behind: str, anchor: Mark | None, last: bool, calls: bool) -> int:
        """How much of the text behind the assistant's words belongs to its turn."""
        run = _run(self.of.special, behind)
        eos = self.of.tokenizer.eos_token
        for token, length in run:
            if token == eos:
                return length
        if anchor is not None:
            alone = self._rendered(self.marked[: i + 1], anchor, False)
            longer = self.view.text[anchor.at : end] + behind
            if last:
                said = [*self.marked, _with_marks({"role": "user", "content": "x"}, i + 1, _whole, self.bounds)]
                view = self.of.marked(said, self.tools, self.bounds)
                longer = (view.behind(anchor) if view is not None else None) or ""
            if alone is not None and longer.startswith(alone):
                return max(0, anchor.at + len(alone.rstrip()) - end)
            answered = self._rendered(self.marked[: i + 1], anchor, True)
            if run and answered is not None:
                next_run = _run(self.of.special, answered[end - anchor.at :])
                return run[0][1] if next_run[:1] == run[:1] else 0
        if calls:
            if eos and eos in behind:
                return behind.index(eos) + len(eos)
            raise _unknown("writes no end-of-turn token after a tool call", i)
        return 0

    def _rendered(self, messages: list[Message], mark: Mark | None, prompt: bool) -> str | None:
        """What the template puts behind a mark, where these are all messages; None where other words come later.

        Without a mark: all of it.
        """
        view = self.of.marked(messages, self.tools, self.bounds, prompt)
        if view is None or mark is None:
            return view.text if view is not None else None
        return view.behind(mark, to_the_end=True)


def called(message: Message) -> list[str]:
    """The names of the tools that a message calls."""
    calls = message.get("tool_calls") or []
    functions = [call.get("function") or call for call in calls if isinstance(call, dict)]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def _with_marks(message: Message, number: int, edges: Edges, bounds: list[str]) -> Message:
    """The message with a mark at both edges of its content, and before the name of every tool it calls."""

    def mark(kind: int) -> str:
        return f"{bounds[0]}{number * len(KINDS) + kind}{bounds[1]}"

    marked = dict(message)
    words = message.get("content")
    where = edges(words) if isinstance(words, str) else None
    if where is not None and isinstance(words, str):
        a, b = where
        tag = LEADING_TAG.match(words, a, b)
        inner = words[a : tag.end()] + mark(INNER) + words[tag.end() : b] if tag else words[a:b]
        marked["content"] = words[:a] + mark(BEGIN) + inner + mark(END) + words[b:]
    if called(message) and edges is not _plain:
        marked["tool_calls"] = [_marked_call(call, mark(CALL)) for call in message["tool_calls"]]
    return marked


def _marked_call(call: Any, mark: str) -> Any:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], mark)}
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return {**call, "name": mark + call["name"]}
    return call


def _run(special: re.Pattern[str], text: str) -> list[tuple[str, int]]:
    """The special tokens that a text begins with, after white space: each with where it ends."""
    found, at = [], len(text) - len(text.lstrip())
    while token := special.match(text, at):
        at = token.end()
        found.append((token[0], at))
    return found


def _check_order(spans: list[Span], marks: list[Mark], messages: list[Message]) -> None:
    """Raise DataError where spans overlap or hold another's words."""
    others = [m.at for m in marks if messages[m.message]["role"] != "assistant"]
    stops = [0, *(stop for _, stop in spans)]
    for stop, (a, b) in zip(stops, spans, strict=False):
        if a < stop or any(a < at < b for at in others):
            raise _unknown("mixes what the assistant says with other words")


def _unknown(what: str, i: int | None = None) -> DataError:
    where = "" if i is None else f" in message {i + 1}"
    return DataError(
        f"cannot locate the assistant's tokens: the chat template {what}{where}; use a template with "
        "{% generation %} marks, or train on all with data.train_on: all"
    )


def _refusal(messages: list[Message], error: Exception) -> DataError:
    return DataError(f"the chat template refuses a conversation: {error!r:.300}; it begins {str(messages)[:120]}")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Inside, whatever takes longer than TEMPLATE_S or more than TEMPLATE_BYTES of memory is stopped.

    transformers renders in jinja's sandbox, from which no code gets out; but loops in loops and products of texts do
    not end there. The clock is a signal's, so it runs in a process's main thread only, as all of `prepare` does.
    """

    def late(signum: int, frame: Any) -> None:
        raise TimeoutError(f"it takes longer than {TEMPLATE_S} s")

    in_use = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = min(limit for limit in (in_use + TEMPLATE_BYTES, soft, hard) if limit != resource.RLIM_INFINITY)
    clock = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGALRM, late) if clock else None
    resource.setrlimit(resource.RLIMIT_AS, (room, hard))
    try:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, TEMPLATE_S)
        yield
    finally:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
