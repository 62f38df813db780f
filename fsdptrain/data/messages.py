"""Messages and tools as data sets write them → the one form that chat templates render.

What a row holds is read, known to say nothing to a model (HARMLESS), or counted in `Unread`: columns, keys of messages
and of tool calls, and roles.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

from fsdptrain.data.readers import type_name, without_nulls
from fsdptrain.errors import DataError, listed, shortened

Message = dict[str, Any]

CALLS = ("function_call", "tool_call", "tool_calls")  # roles of messages whose content is the JSON text of a call
TOOL_ROLES = ("tool", "function", "ipython", "observation", "function_response", "tool_response", "tool_result")
ROLES = {  # names of roles, in lower case → those of chat templates
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "chatbot", "ai", *CALLS), "assistant"),
    **{role: role for role in ("system", "developer")},
    **dict.fromkeys(TOOL_ROLES, "tool"),
}
ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value", "text")
# Where data and templates have the thought of the assistant; the first is what rows are read to.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thinking_content", "thought", "thoughts")
TRAINED_IF = (
    "weight",
    "loss",
    "loss_weight",
    "loss_mask",
    "train",
    "training",
    "trainable",
    "trained",
    "train_on_turn",
)
MASKED_IF = ("masked", "is_masked", "ignore_loss")
# Their meaning depends on the tool (`mask`), or parts of a message are trained.
UNCLEAR_FLAGS = ("mask", "train_on", "train_detail", "training_detail")
READ_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "weight"})
ARGUMENTS = ("arguments", "parameters", "args")

_HARMLESS = """
id _id ids idx index row_id uid uuid guid key hash md5 sha256 prompt_id question_id example_id sample_id
conversation_id conv_id chat_id session_id thread_id dialogue_id dialog_id message_id parent_id message_tree_id
source sources source_id src origin dataset dataset_name dataset_id data_source subset split config task task_id
task_name task_type type category categories subcategory topic domain subject tag tags language lang locale license
url urls link date time timestamp created created_at create_time updated_at update_time author annotator user_id
file filename file_name path repo repo_name version model model_name model_id generator chosen_model rejected_model
score scores rating ratings quality quality_score reward rewards rank score_chosen score_rejected chosen_score
rejected_score chosen_rating rejected_rating chosen_reward rejected_reward margin difficulty level
num_tokens n_tokens num_turns n_turns token_count tokens_count word_count char_count length len
meta metadata meta_info extra_info info __index_level_0__ emojis review_count review_result deleted lang_score
"""
HARMLESS = frozenset(
    {*_HARMLESS.split(), "", "unnamed: 0"}
)  # columns and keys, in lower case, that say nothing to a model
MOST_UNREAD = 40  # columns, keys and roles that are named
EMPTY: tuple[Any, ...] = (None, "", [], {})
EMPTY_ANSWER = "answer is empty: only its end is trained"


class Unread:
    """Counts what rows hold and nothing reads. `found`: a sentence on it → how often, and the place of the first.

    `template` is the chat template, which may read keys and roles that are not known here.
    """

    def __init__(self, template: str | None = None) -> None:
        names = re.findall(
            r"""(?<!loop)\.(\w+)\b(?!\()|\[\s*['"](\w+)['"]|['"](\w+)['"]\s+in\b|get\(\s*['"](\w+)""", template or ""
        )
        self.template_keys = frozenset(chain.from_iterable(names))
        quoted = {*re.findall(r"""['"](\w+)['"]""", template or "")}
        self.template_roles = quoted if template else {"tool"}
        self.found: dict[str, tuple[int, str]] = {}

    def add(self, what: str, place: str) -> None:
        """Count a thing that is not read."""
        if what not in self.found and len(self.found) >= MOST_UNREAD:
            what = "more columns and keys are not read"
        count, first = self.found.get(what, (0, place))
        self.found[what] = (count + 1, first)

    def add_keys(self, keys: Iterable[str], known: frozenset[str], owner: str, place: str) -> None:
        """Count the keys of a mapping that are neither known, harmless, nor read by the template."""
        for key in keys:
            if key not in known and key not in self.template_keys and key.lower() not in HARMLESS:
                self.add(f"key {shortened(key)!r} of {owner} is not read", place)

    def tool_role(self, role: str) -> str:
        """Return the role of a tool's answer that the template knows; as it is written if it knows none of them."""
        return next((each for each in TOOL_ROLES if each in self.template_roles), role)


def parsed(value: Any) -> Any:
    """Return the value of the JSON text of a list or an object; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def is_conversation(value: Any) -> bool:
    """Return whether a value is a message, a list of messages, or the JSON text of one of them."""
    value = parsed(value)
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and any(key in first for key in ROLE_KEYS)


def is_sharegpt(value: Any) -> bool:
    """Return whether any of these messages has the keys of ShareGPT."""
    value = parsed(value)
    return isinstance(value, list) and any(
        isinstance(each, dict) and {"from", "value"} <= each.keys() for each in value
    )


def read_messages(
    row: dict[str, Any], column: str, place: str, unread: Unread, text_role: str | None = None
) -> list[Message]:
    """Return the messages of a column. `text_role`: whose message it is if it is a text; then it may also be calls.

    Raises DataError for what is no conversation, and for a message without content.
    """
    value = parsed(given := row.get(column))
    if text_role and isinstance(given, str) and not is_conversation(value):
        is_call = text_role == "assistant" and bool(value) and all(map(_is_call, _listed(value)))
        value = [{"role": text_role, "tool_calls": value} if is_call else {"role": text_role, "content": given}]
    columns = list(value.values()) if isinstance(value, dict) else []
    if all(isinstance(each, list) for each in columns) and len({*map(len, columns)}) == 1:  # a list for each key
        value = [dict(zip(value, each, strict=True)) for each in zip(*columns, strict=True)]
    value = _listed(value)
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: {column!r} is {type_name(given)}; expected a list of messages, or its JSON text")
    messages: list[Message] = []
    for number, each in enumerate(value, 1):
        at = f"{place}: message {number} of {column!r}"
        message, is_call = _read_message(parsed(each), at, place, unread)
        check_unicode(json.dumps(message, ensure_ascii=False, default=str), column, place)
        if is_call and messages and messages[-1]["role"] == "assistant" and not messages[-1].get("content"):
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])  # of one turn
        else:
            messages.append(message)
    return messages


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and ("function" in value or ("name" in value and any(n in value for n in ARGUMENTS)))


def _read_message(message: Any, at: str, place: str, unread: Unread) -> tuple[Message, bool]:
    """Return a message in the form of chat templates, and whether all of it was the JSON text of a call."""
    left = without_nulls(message) if isinstance(message, dict) else {}
    role, content = _take(left, ROLE_KEYS), _take(left, CONTENT_KEYS)
    if isinstance(content, list):
        content = _text_parts(content, at)
    if not isinstance(role, str) or not isinstance(content, (str, list, type(None))):
        wrong = f"has a content that is {type_name(content)}, and not text" if isinstance(role, str) else "has no role"
        raise DataError(
            f"{at} {wrong}: neither {{role: text, content: text}} nor ShareGPT's {{from: text, value: text}}"
        )
    is_call = role.lower() in CALLS
    if is_call:
        left["tool_calls"], content = parsed(content), None
    read: Message = {"role": _role(role, message.get("role") is None, at, place, unread)}
    read |= {} if content is None else {"content": content}
    if legacy := left.pop("function_call", None):
        left["tool_calls"] = [*(left.get("tool_calls") or []), legacy]
    if (calls := left.pop("tool_calls", None)) not in EMPTY:
        read["tool_calls"] = _read_calls(calls, at, place, unread)
    if read["role"] == "assistant":
        given = {key: left.pop(key) for key in THOUGHT_KEYS if isinstance(left.get(key), str)}
        thoughts = {text: key for key, text in given.items()}
        if len(thoughts) > 1:
            raise DataError(f"{at} has different thoughts in {' and '.join(thoughts.values())}: keep one of them")
        read |= dict.fromkeys(THOUGHT_KEYS[:1] * len(thoughts), *thoughts)  # the template's key of it: see `chat`
    read |= _weight(left, read["role"], at)
    if content is None and "tool_calls" not in read and THOUGHT_KEYS[0] not in read:
        null = next((f"{key} is null; expected text" for key in CONTENT_KEYS if key in message), None)
        raise DataError(f"{at} has no content: {null or f'only {listed(message)}; its text belongs in `content`'}")
    is_trained = read["role"] == "assistant" and read.get("weight", 1)
    if is_trained and not (str(content or "").strip() or {"tool_calls", THOUGHT_KEYS[0]} & {*read}):
        unread.add(EMPTY_ANSWER, place)
    unread.add_keys((k for k, v in left.items() if v not in EMPTY), READ_KEYS, "messages", place)
    return read | left, is_call


def _take(mapping: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Remove and return the first of these keys that is there; an equal value of a later one goes, too."""
    found = next((mapping[key] for key in keys if key in mapping), None)
    for key in keys:
        if mapping.get(key) == found:
            mapping.pop(key, None)
    return found


def _role(written: str, is_sharegpt: bool, at: str, place: str, unread: Unread) -> str:
    """Return the role of chat templates for a name of it; one that is not known stays, and is counted."""
    role = ROLES.get(written.strip().lower())
    if role == "tool":
        return unread.tool_role(written.strip().lower())
    if role is None and is_sharegpt:
        raise DataError(f"{at}: unknown speaker {shortened(repr(written))}; known: {', '.join(ROLES)}")
    if role is None and written not in unread.template_roles:
        unread.add(f"role {shortened(written)!r} of messages is not known: they are not trained", place)
    return role or written


def _weight(message: Message, role: str, at: str) -> dict[str, int]:
    """Take from a message what says whether it is trained, under any name, and return it as `weight`: 1 or 0."""
    weights = dict[int, str]()
    for key in [key for key in message if key in (*TRAINED_IF, *MASKED_IF, *UNCLEAR_FLAGS)]:
        value = message.pop(key)
        if key in UNCLEAR_FLAGS or value not in (0, 1):
            raise DataError(f"{at}: {key} is {shortened(repr(value))}; expected weight: 1 (trained) or 0 (not trained)")
        weights[int(value) ^ (key in MASKED_IF)] = key
    if 1 in weights and role != "assistant":
        key = weights[1]
        raise DataError(f"{at}: {key} is 1, but only messages of the assistant are trained: remove it, or write 0")
    if len(weights) > 1:
        raise DataError(f"{at}: {weights[0]} says that it is not trained, {weights[1]} that it is: keep one of them")
    return {"weight": next(iter(weights))} if weights else {}


def masking_keys(messages: Any) -> list[str]:
    """Return the keys that say of messages, as they are in the data, whether they are trained."""
    return [key for key in (*TRAINED_IF, *MASKED_IF) if any(key in each for each in _listed(parsed(messages)))]


def _text_parts(content: list[Any], at: str) -> list[dict[str, str]]:
    """Return the parts of a content, all of type text, without other keys; raises DataError for other parts."""
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {shortened(repr(kind))}" if kind not in (None, "text") else "not {type: text, text: …}"
            raise DataError(
                f"{at}: part {number} of its content is {what}, and only text is trained: remove the part or the row"
            )
    return [{"type": "text", "text": part["text"]} for part in content]


def _read_calls(value: Any, at: str, place: str, unread: Unread) -> list[dict[str, Any]]:
    """Return the calls of a message as {type, function: {name, arguments}}, the arguments as an object."""
    calls = []
    for given in map(parsed, value if isinstance(value := _listed(parsed(value)), list) else [value]):
        call = dict(given) if isinstance(given, dict) else {}
        function = parsed(call.get("function"))
        if isinstance(function, dict):
            call["function"] = function = dict(function)
        else:  # without the level of `function`
            name = {"name": function} if isinstance(function, str) else {}
            function = name | {key: call.pop(key) for key in ("name", *ARGUMENTS) if key in call}
            call = {"type": "function", **call, "function": function}
        if not isinstance(function.get("name"), str):
            raise DataError(
                f"{at}: a tool call is {shortened(repr(given))}; expected "
                "{function: {name: text, arguments: object}}"
            )
        function["arguments"] = as_mapping(_take(function, ARGUMENTS)) or {}
        if not isinstance(function["arguments"], dict):
            unread.add("arguments of tool calls are no JSON object, and rendered as they are", place)
        unread.add_keys(call, frozenset({"id", "type", "function"}), "tool calls", place)
        unread.add_keys(function, frozenset({"name", "arguments"}), "tool calls", place)
        calls.append(call)
    return calls


def as_mapping(value: Any) -> Any:
    """Return a value as an object if it is the JSON text of one, or a map as Arrow writes it: a list of its entries."""
    value = parsed(value)
    if isinstance(value, list) and value:
        entries = [
            tuple(each.values()) if isinstance(each, dict) and {*each} == {"key", "value"} else each for each in value
        ]
        if all(isinstance(each, (tuple, list)) and len(each) == 2 and isinstance(each[0], str) for each in entries):
            return dict(entries)
    return value


def read_tools(row: dict[str, Any], column: str, place: str) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of a conversation's tools, given as a list or as JSON text; None when it has none."""
    given = row.get(column)
    value = _listed(parsed(given))
    if value in EMPTY or (isinstance(value, str) and not value.strip()):
        return None
    tools = [without_nulls(parsed(tool)) for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) and tool for tool in tools):
        raise DataError(f"{place}: {column!r} is {type_name(given)}; expected a list of JSON schemas, or its JSON text")
    check_unicode(json.dumps(tools, ensure_ascii=False, default=str), column, place)
    return [_read_tool(tool) for tool in tools]


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as {type: function, function: {name, description, parameters}}; one without a name as it is."""
    function = parsed(tool.get("function"))
    if not isinstance(function, dict):
        if not isinstance(tool.get("name"), str):
            return tool
        function = {key: value for key, value in tool.items() if key != "type"}
        tool = {"type": "function"}
    if "parameters" in function:
        schema = parsed(function["parameters"])
        if isinstance(schema, dict) and "properties" in schema:
            schema = schema | {"properties": as_mapping(schema["properties"])}
        function = function | {"parameters": schema}
    return tool | {"function": function}


def check_unicode(text: str, column: str, place: str) -> str:
    """Return the text; raise DataError for a lone surrogate (`\\ud83d` in JSON), which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {column!r} contains half a character (a lone surrogate): {error.object[error.start]!a}"
        ) from None
    return text
