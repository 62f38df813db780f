"""Conversations → text and the character spans to train: the assistant's content and its end-of-turn token.

The whole conversation is rendered once, and that text is what is trained (with `data.turns: last` or `split`, a
conversation is what leads to one turn, with that turn). The assistant's parts of it are located by the template's own
`{% generation %}` marks, or by rendering the conversation again with marks (see `turns`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from transformers.utils.chat_template_utils import render_jinja_template

from fsdptrain.config.schema import Data
from fsdptrain.data.patches import templates_on
from fsdptrain.data.turns import (
    BEGIN,
    END,
    MarkedConversation,
    Message,
    Span,
    TurnFinder,
    called_tools,
    cannot_locate,
    check_order,
)
from fsdptrain.errors import DataError
from fsdptrain.processes import memory_limited_to
from fsdptrain.text import size

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

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the pattern that transformers looks for


def plain_template(prefix: str) -> str:
    """Return the plain chat template with `prefix`, which the tokenizer puts before every text, in front."""
    return prefix + PLAIN_CHAT_TEMPLATE


@dataclass
class ConversationRenderer:
    """Renders conversations with a tokenizer's chat template, and finds what is trained in them.

    `data` says what is trained (`train_on`, `turns`) and has values for the template. `day`: what it sees as today.
    """

    tokenizer: Any
    data: Data
    day: date | None = None

    def __post_init__(self) -> None:
        self.marked_by_template = bool(GENERATION.search(self.tokenizer.chat_template))
        tokens = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        longest_first = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.finder = TurnFinder(self._apply_template, self.special, self.tokenizer.eos_token)

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
        """Return a conversation as text, and the spans of these messages of the assistant."""
        text = self._apply_template(messages, tools)
        if tools and text == self._apply_template(messages, None):
            raise DataError(
                "the chat template leaves out the tools; use a template that renders `tools`, or remove the column"
            )
        # `parts`: number of an assistant's message → the text that must contain the names of the tools it calls.
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = dict.fromkeys(assistants, text)
        if self.data.train_on == "all":
            spans = [(0, len(text))]
        elif self.marked_by_template:
            spans = self._generation_spans(messages, tools, text)
            if wanted != assistants:
                spans = _spans_of_turns(spans, self.finder.mark(messages, tools, text), wanted)
        else:
            conversation = self.finder.mark(messages, tools, text)
            turns = {i: conversation.turn_span(i) for i in wanted}
            spans = [span for span in turns.values() if span[1] > span[0]]
            check_order(spans, conversation.view.marks, messages)
            parts |= {i: text[start:stop] for i, (start, stop) in turns.items()}
        for i, part in parts.items():
            missing = [name for name in called_tools(messages[i]) if name not in part]
            if missing:
                raise DataError(
                    f"the chat template leaves out the call of {missing[0]!r} in message {i + 1}; use a template that "
                    "renders `tool_calls`, or write the call as the message's content"
                )
        return text, spans

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

        def render(content: str | list[TextPart]) -> str:
            return self._apply_template([*messages[:i], {**messages[i], "content": content}, *messages[i + 1 :]], tools)

        text: str = messages[i]["content"]
        try:
            if render([{"type": "text", "text": text}]) != render(text):
                return text
            rendered = render(parts)
        except DataError:
            return text
        for trimmed, separator in itertools.product((False, True), SEPARATORS):
            if render(joined := _text_of_parts(parts, separator, trimmed)) == rendered:
                return joined
        raise DataError(
            f"the chat template separates the parts of message {i + 1} in a way that is not supported: write its "
            "content as one text"
        )

    def _generation_spans(self, messages: list[Message], tools: list[Any] | None, text: str) -> list[Span]:
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
        spans = []
        for start, stop in indices:
            turn = text[start:stop].rstrip()
            ends = [found.end() for found in self.special.finditer(turn)]
            spans.append((start, start + len(turn) if ends[-1:] == [len(turn)] else stop))
        # transformers counts wrongly when these marks are inside a macro: compare the spans with marks in the contents.
        try:
            marks = self.finder.mark(messages, tools, text).view.marks
        except DataError:
            return spans
        check_order(spans, marks, messages)
        any_empty = any(m["role"] == "assistant" and not m.get("content", "").strip() for m in messages)  # has no marks
        for a, b in spans:
            inside = {m.kind for m in marks if a <= m.at <= b and messages[m.message]["role"] == "assistant"}
            if (not inside and not any_empty) or (BEGIN in inside and END not in inside):
                raise cannot_locate("has {% generation %} marks that do not cover the assistant's content")
        return spans

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


def _spans_of_turns(spans: list[Span], conversation: MarkedConversation, wanted: list[int]) -> list[Span]:
    """Return the spans that are in these turns; raises DataError when one of them is also in another turn."""
    turns = [conversation.turn_span(i) for i in wanted]
    kept = [(a, b) for a, b in spans if any(a < stop and start < b for start, stop in turns)]
    others = [m.at for m in conversation.view.marks if m.message not in wanted]
    if any(a < at < b for a, b in kept for at in others):
        raise cannot_locate("has {% generation %} marks around several messages")
    return kept


def _text_of_parts(parts: list[TextPart], separator: str = OF_SERVERS, trimmed: bool = False) -> str:
    """Return the texts of parts as one; `trimmed`: each without white space at both ends."""
    return separator.join(part["text"].strip() if trimmed else part["text"] for part in parts)


def _rejection(messages: list[Message], error: Exception) -> DataError:
    return DataError(
        f"the chat template rejects a conversation: {error!r:.300}; the conversation begins {str(messages)[:120]}"
    )


@contextlib.contextmanager
def _finishing(messages: list[Message], day: date | None) -> Iterator[None]:
    """Let templates see `day` inside; raise DataError for one that does not finish."""
    try:
        with _limited_resources(), templates_on(day):
            yield
    except (TimeoutError, MemoryError) as error:
        reason = str(error) or f"rendering takes more than {size(TEMPLATE_BYTES)} of memory"
        raise DataError(
            f"the chat template does not finish: {reason}; the conversation begins {str(messages)[:120]}"
        ) from None


@contextlib.contextmanager
def _limited_resources() -> Iterator[None]:
    """Raise TimeoutError or MemoryError for what takes longer than TEMPLATE_S or more memory than TEMPLATE_BYTES.

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
        with memory_limited_to(TEMPLATE_BYTES):
            yield
    finally:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
