"""Conversations → text and the character spans to train: the assistant's content and its end-of-turn token.

The whole conversation is rendered once, and that text is what is trained (with `data.turns: last` or `split`, a
conversation is what leads to one turn, with that turn). The assistant's parts of it are located by the template's own
`{% generation %}` marks, or by rendering the conversation again with marks (see `turn_spans`).

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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from transformers.utils.chat_template_utils import render_jinja_template

from fsdptrain.config.schema import Data
from fsdptrain.data.columns import THOUGHT_KEYS
from fsdptrain.data.patches import templates_on
from fsdptrain.data.turn_spans import (
    BEGIN,
    END,
    Mark,
    MarkedConversation,
    Message,
    Render,
    Span,
    TurnFinder,
    called_tools,
    cannot_locate,
    check_order,
    delimiters_for,
    function_of,
    with_function,
)
from fsdptrain.errors import DataError
from fsdptrain.processes import memory_limited_to
from fsdptrain.text import size

Path = tuple[Any, ...]  # keys and indices that lead to a value
FOR_AN_API = ("strict", "additionalProperties")  # keys of tools that no template renders for a model


def _left_out(
    render: Render, messages: list[Message], tools: list[Any] | None, text: str, values: list[tuple[Path, Any]]
) -> Iterator[Path]:
    """Yield the paths of those of these values that `text`, the rendering of the messages, does not depend on."""
    if not values:
        return
    row = {"messages": messages, "tools": tools}
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


def _values(messages: list[Message], tools: list[Any] | None) -> Iterator[tuple[Path, Any]]:
    """Yield what a template should render, each with its path: contents, thoughts, calls, and the names of tools."""
    functions: list[tuple[Path, Any]] = [(("tools", n), tool) for n, tool in enumerate(tools or [])]
    for i, message in enumerate(messages):
        for key in ("content", *THOUGHT_KEYS):
            if isinstance(text := message.get(key), str) and text.strip():
                yield ("messages", i, key), text
        functions += [
            (("messages", i, "tool_calls", n), call) for n, call in enumerate(message.get("tool_calls") or [])
        ]
    for path, call in functions:
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
        tokens = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        longest_first = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        ends = (self.tokenizer.eos_token, *stop_tokens(self.tokenizer))
        self.finder = TurnFinder(self._apply_template, tuple(longest_first), ends)
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
            conversation = None if trains_all else self.finder.mark(messages, tools, text)
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
                spans = _spans_of_turns(spans, conversation or self.finder.mark(messages, tools, text), wanted)
            marks = conversation.view.marks if conversation else []
            marked = {m.message for m in marks if any(start <= m.at <= stop for start, stop in spans)}
            self.notes["unmarked"] += len({m.message for m in marks}.intersection(wanted) - marked)
            return text, spans
        assert conversation is not None
        turns = {i: conversation.turn_span(i) for i in wanted}
        check_order([span for span in turns.values() if span[1] > span[0]], conversation.view.marks, messages)
        last = len(messages) - 1
        if last in turns and not text[: turns[last][1]].rstrip().endswith(self.finder.ends):
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
        for path in _left_out(self._apply_template, messages, tools, text, values):
            if path[-1] not in THOUGHT_KEYS:
                raise _left_out_error(path, messages)
            shortened |= {path[1]} & {*wanted}
        self.notes["shortened"] += len(shortened)
        self.notes["cut_tools"] += len(wanted) * self._cuts_tools(messages, tools, text)
        self.notes["cut_content"] += sum(messages[i]["role"] != "assistant" for i in begun ^ shown)

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
            for n, tool in enumerate(tools):
                place = ("tools", n, "function") if "function" in tool else ("tools", n)
                leaves = _leaves(function_of(tool), place)
                values += [each for each in leaves if each[0][-1] not in FOR_AN_API and each[0][2:] != ("type",)]
            self.cut_tools[key] = any(True for _ in _left_out(self._apply_template, messages, tools, text, values))
        return self.cut_tools[key]

    def _as_template_reads(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Return messages with thoughts under a key that the template reads, and arguments in the type that it takes.

        That is JSON text if it rejects objects, or prints them as Python does.
        """
        messages = [self._with_thought(message) for message in messages]
        if self.arguments_as_text is False or not any(map(called_tools, messages)):
            return messages
        texts = [_with_arguments_as_text(message) for message in messages]
        if self.arguments_as_text is None:
            try:
                text = self._apply_template(messages, tools)
            except DataError as error:
                with contextlib.suppress(DataError):
                    self._apply_template(texts, tools)
                    self.arguments_as_text = True
                if not self.arguments_as_text:
                    raise error from None
            else:
                calls = itertools.chain.from_iterable(message.get("tool_calls") or [] for message in messages)
                objects = [str(function_of(call)["arguments"]) for call in calls if function_of(call).get("arguments")]
                self.arguments_as_text = any(value in text for value in objects) if objects else None
        return texts if self.arguments_as_text else messages

    def _with_thought(self, message: Message) -> Message:
        if called_tools(message):
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
            if (end := text[:stop].rstrip()).endswith(self.finder.tokens):
                turn[-1] = (start, max(start, len(end)))
        spans = list(itertools.chain.from_iterable(turns))
        if conversation is None:
            return spans
        # transformers counts wrongly when these marks are inside a macro: compare the spans with marks in the contents.
        check_order(spans, marks, messages)
        any_empty = any(m["role"] == "assistant" and not m.get("content", "").strip() for m in messages)  # has no marks
        for turn in turns:
            inside = [
                m for m in marks if turn[0][0] <= m.at <= turn[-1][1] and messages[m.message]["role"] == "assistant"
            ]
            kinds = {m.kind for m in inside}
            if (not inside and not any_empty) or (BEGIN in kinds and END not in kinds):
                raise cannot_locate("has {% generation %} marks that do not cover the assistant's content")
            if inside:
                self.notes["endless"] += not conversation.has_end(inside[-1].message, turn[-1][1], text)
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
        raise cannot_locate("has {% generation %} marks around several messages")
    return kept


def stop_tokens(tokenizer: Any) -> list[str]:
    """Return the tokens that end an answer by the configuration of the model; see `load_tokenizer`."""
    return list(getattr(tokenizer, "stop_tokens", []))


def _is_within(content: Any, text: str) -> bool:
    if not isinstance(content, str) or content.strip() in text:
        return True
    return "".join(content.split()) in "".join(text.split())


def _with_arguments_as_text(message: Message) -> Message:
    if not called_tools(message):
        return message
    given = [(call, function_of(call).get("arguments")) for call in message["tool_calls"]]
    calls = [
        with_function(call, arguments=json.dumps(arguments, ensure_ascii=False))
        if isinstance(arguments, dict)
        else call
        for call, arguments in given
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
        what = f"the call of {function_of(calls[rest[1]])['name']!r} in message {number + 1}"
        if len(calls) > 1:
            what += f" (call {rest[1] + 1} of {len(calls)})"
        if "arguments" in rest and (key := rest[rest.index("arguments") + 1 :]):
            what = f"{'.'.join(map(str, key))!r} in {what}"
        what += "; use a template that renders all `tool_calls`, or write the call as the message's content"
    else:
        role = messages[number]["role"]
        what = f"the {rest[0]} of message {number + 1} ({role}); use a template that renders it, or remove it"
    return DataError(f"the chat template leaves out {what}")
