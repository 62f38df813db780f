"""Columns of a source → the fields of a format, every value checked; messages and tools in the form of chat templates.

What a row holds is read, known to say nothing to a model (HARMLESS), or counted in `Unread`: columns, keys of messages
and of tool calls, and roles.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain, groupby, islice
from typing import Any

from fsdptrain.config.formats import Format, as_conversation, guess_format
from fsdptrain.config.keys import yaml_text
from fsdptrain.config.paths import DataPath, places
from fsdptrain.config.schema import Data
from fsdptrain.data.readers import BATCH_ROWS, READ_ON, Source, broken_rows_error, type_name, without_nulls
from fsdptrain.data.sources import first_source
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
    "weight", "loss", "loss_weight", "loss_mask", "train", "training", "trainable", "trained", "train_on_turn",
)  # fmt: skip
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
    if role == "tool":  # the name that the template knows; as it is written if it knows none of them
        return next((each for each in TOOL_ROLES if each in unread.template_roles), written.strip().lower())
    if role is None and is_sharegpt:
        raise DataError(f"{at}: unknown speaker {shortened(repr(written))}; known: {', '.join(ROLES)}")
    if role is None and written not in unread.template_roles:
        unread.add(f"role {shortened(written)!r} of messages is not known: they are not trained", place)
    return role or written


def _weight(message: Message, role: str, at: str) -> dict[str, int]:
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


def _text_parts(content: list[Any], at: str) -> list[dict[str, str]]:
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
    return [_read_tool(tool) for tool in tools]


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
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


PEEKED_ROWS = 8
MAX_ROW = 2**24  # characters, of which a tokenizer needs some 200 bytes and 3 µs each
BATCH_CHARACTERS = 2**22  # after which a batch has no more rows
Columns = dict[str, list[str]]  # field → its columns
Checked = tuple[dict[str, Any], int]  # a row with the fields of its format; how many characters it has as JSON
LABELS = ("label", "kto_tag")  # columns that say whether an answer is good, if they are true or false
LABEL_WORDS = {  # what a label is as text, in lower case → whether the answer is desirable
    "true": True, "1": True, "1.0": True, "desirable": True,
    "false": False, "0": False, "0.0": False, "undesirable": False,
}  # fmt: skip


def peek(path: DataPath, data: Data, template: str | None = None) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns behind a path and its first rows, of which a batch is checked; the others are not read.

    Raises DataError as `open_sources` and `read_rows` do.
    """
    source = first_source(path)
    return source.columns, next(read_rows([source], data, None, Unread(template)), [])[:PEEKED_ROWS]


def read_rows(
    sources: Iterable[Source], data: Data, limit: int | None, unread: Unread | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of rows with the format's fields, every value checked; conversations also with their `place`.

    What the rows hold beside that is counted in `unread`, which also knows the chat template.

    Raises DataError for a missing column, and for rows that are broken, too long, have a null or a value of the wrong
    type: up to MOST_BROKEN of them at once, each with its place.
    """
    unread = unread or Unread()
    rows = islice(chain.from_iterable(_checked_rows(source, data, unread) for source in sources), limit)
    batch, size = list[dict[str, Any]](), 0
    for row, characters in _until_broken(rows):
        batch.append(row)
        size += characters
        if len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked_rows(source: Source, data: Data, unread: Unread) -> Iterator[Checked | DataError]:
    """Yield each row of a source with the format's fields, or what is wrong with it; raise for a missing column."""
    columns = _named_columns(data, data.format.fields)
    wanted = list(dict.fromkeys(name for names in columns.values() for name in names))
    if missing := [name for name in wanted if not source.has(name)]:
        needed = f"no column {shortened(missing[0])!r}, which format {data.format} needs"
        raise DataError(f"{source.name}: {needed}; {_misspelt(source, missing) or _columns_and_format(source)}")
    if repeated := [name for name in wanted if source.columns.count(name) > 1]:
        raise DataError(f"{source.name}: more than one of its {len(source.columns)} columns is called {repeated[0]!r}")
    if (data.format.has_prompt or data.format.is_chat) and (label := _label_of_answers(source)):
        raise DataError(
            f"{source.name}: {label} says whether an answer is good, and {data.format} would train all of them: use "
            "data.format: feedback with train.objective: kto; to fine-tune on the good answers alone, keep the rows in "
            f"which {label} is true, without that column"
        )
    for field, names in _named_columns(data, data.format.optional).items():
        absent = [name for name in names if not source.has(name)] if field in data.columns else []
        if absent:
            raise DataError(f"{source.name}: no column {absent[0]!r}, which data.columns names for {field}")
        if field in data.columns or not {*names} & {*wanted}:  # a column that serves another field serves that alone
            columns[field] = names
    wanted = list(dict.fromkeys(chain(wanted, *columns.values())))
    form, known = data.format, {*wanted, *(name for name in source.columns if name.lower() in HARMLESS)}
    check = _answer_fields if form.answers else _conversation_fields if form.is_chat else _text_fields
    silent = [name for name in source.columns if name not in known] if source.selects else []
    for place, row in source.rows([name for name in wanted if name in source.columns]):
        if isinstance(row, DataError):
            yield row
            continue
        for name in chain(silent, (name for name in row if name not in known and row[name] not in EMPTY)):
            if name.lower() not in HARMLESS:
                unread.add(f"column {shortened(name)!r} is not read", place)
        try:
            yield _checked_as_text(check(columns, row, place, data, unread), place)
        except DataError as error:
            yield error


def _checked_as_text(row: dict[str, Any], place: str) -> Checked:
    text = json.dumps({name: value for name, value in row.items() if name != "place"}, ensure_ascii=False, default=str)
    if len(text) > MAX_ROW:
        raise DataError(
            f"{place}: {len(text):,} characters in one row, and {MAX_ROW:,} are the most that a tokenizer gets at "
            "once: divide it into several rows (a .txt file is one)"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[max(0, error.start - 20) : error.end]!a}"
        raise DataError(
            f"{place}: the row contains half a character (a lone surrogate), at the end of {half}"
        ) from None
    return row, len(text)


def _until_broken(rows: Iterator[Checked | DataError]) -> Iterator[Checked]:
    """Yield rows up to the first that is broken; then read on for others, and raise DataError."""
    for row in rows:
        if isinstance(row, DataError):
            broken, read = [row], 0
            try:
                for later in islice(rows, READ_ON):
                    read += 1
                    if isinstance(later, DataError):
                        broken.append(later)
            except DataError as error:  # a fault of a whole file
                broken.append(error)
            raise broken_rows_error(broken, read)
        yield row


def _named_columns(data: Data, fields: Iterable[str]) -> dict[str, list[str]]:
    return {field: places(data.columns.get(field, field)) for field in fields}


def likely_format(source: Source) -> tuple[Format, dict[str, Any]] | None:
    """Return how a source is read, as `guess_format` does, but by its first rows, too; None if that is not known.

    Prompts with completions that are messages, or that have tools, are conversations.
    """
    likely = guess_format(source.columns)
    if likely and likely[0].has_label and _label_of_answers(source) is None:  # of another meaning, such as a class
        likely = guess_format([name for name in source.columns if name not in LABELS])
    if likely is None or not likely[0].has_prompt:
        return likely
    chat = as_conversation(likely[1], source.columns)
    tools = chat[1].get("tools", "tools")
    rows = [row for _, row in islice(source.rows(source.columns), PEEKED_ROWS) if isinstance(row, dict)]
    parts = chat[1]["messages"]
    is_chat = any(row.get(tools) not in EMPTY or any(is_conversation(row.get(name)) for name in parts) for row in rows)
    return chat if is_chat else likely


def describe_columns(path: DataPath, data: Data) -> str:
    """Return which columns are read as what, for a message: `instruction + input as prompt, output as completion`."""
    available = first_source(path).columns
    optional = _named_columns(data, data.format.optional)
    read = _named_columns(data, data.format.fields)
    read |= {field: names for field, names in optional.items() if {*names} <= {*available}}
    parts = [field if names == [field] else f"{' + '.join(names)} as {field}" for field, names in read.items()]
    return ", ".join(parts) + (f", joined by {json.dumps(data.separator)}" if data.separator else "")


def prompts_and_trained(row: dict[str, Any], data: Data) -> list[tuple[str, str]]:
    """Return the parts of a row of texts: its prompt with the separators, empty without one, and its last field.

    Of answers that are judged they are the prompt and each answer.
    """
    if data.format.answers:
        return [(row["prompt"], row[field]) for field in data.format.text_fields]
    *before, trained = data.format.fields
    return [("".join(row[field] + data.separator for field in before), row[trained])]


def seam_without_space(rows: list[dict[str, Any]], data: Data) -> str | None:
    """Return the first place where no white space separates a prompt and its completion; None if there is none."""
    texts = (prompts_and_trained(row, data)[0] for row in rows if "place" not in row)
    for prompt, completion in texts:
        if prompt and completion and not prompt[-1].isspace() and not completion[0].isspace():
            return json.dumps(f"{prompt[-20:]}⟦{completion[:20]}⟧", ensure_ascii=False)
    return None


def _label_of_answers(source: Source) -> str | None:
    """Return the column that says whether the answer of a row is good, as data for KTO has; None without one."""
    for name in (name for name in LABELS if name in source.columns):
        labels = [row.get(name) for _, row in islice(source.rows([name]), PEEKED_ROWS) if isinstance(row, dict)]
        words = [str(label).lower() for label in labels if isinstance(label, bool | str)]  # numbers may be classes
        if words and len(words) == len(labels) and all(word.isalpha() and word in LABEL_WORDS for word in words):
            return name
    return None


def unknown_columns_error(path: DataPath) -> DataError:
    """Return the error for data whose columns match no format: how to name them, with an example of its own columns."""
    source = first_source(path)
    formats = "; ".join(f"{form}: {', '.join(form.fields)}" for form in Format)
    return DataError(f"{source.name}: its columns match no format ({formats}); {_columns_and_format(source)}")


def _misspelt(source: Source, missing: Sequence[str]) -> str | None:
    """Return how to name columns that differ little from those that are missing; None if one has no such column."""
    nearest = {name: get_close_matches(name, source.columns, n=1) for name in missing}
    if not all(nearest.values()):
        return None
    columns = {name: found[0] for name, found in nearest.items()}
    return f"columns: {listed(source.columns)}; did you mean data.columns: {yaml_text(columns)}?"


def _columns_and_format(source: Source) -> str:
    """Return the columns of a source and how they are read; if that is not known, an example of how to name them."""
    available = source.columns
    likely = likely_format(source)
    if likely is not None:
        form, columns = likely
        named = f", columns: {yaml_text(columns)}" if columns else ""
        return f"columns: {listed(available)}. They fit data: {{format: {form}{named}}}"
    row = next((row for _, row in source.rows(available) if isinstance(row, dict)), {})
    texts = [name for name in available if isinstance(row.get(name), str)]
    lists = [name for name in available if isinstance(row.get(name), list)]
    fitting = [form for form in reversed(Format) if form.is_chat == bool(lists) and not form.answers]
    form = next((form for form in fitting if len(form.fields) <= len(lists or texts)), fitting[-1])
    example = dict(zip(form.fields, lists or texts, strict=False)) or dict.fromkeys(form.fields, "COLUMN")
    return (
        f"columns: {listed(available)}. Name those to read in data.columns of a recipe, for example data: "
        f"{{format: {form}, columns: {yaml_text(example)}}}"
    )


def _text_fields(columns: Columns, row: dict[str, Any], place: str, data: Data, unread: Unread) -> dict[str, Any]:
    fields = {field: _check_text(row, *columns[field], place=place) for field in data.format.fields}
    if data.format.has_prompt and not [*fields.values()][-1].strip():
        unread.add(EMPTY_ANSWER, place)
    if system := _system_text(columns, row, place):
        prompt = next(iter(fields))
        fields[prompt] = f"{system}\n\n{fields[prompt]}"
    return fields


def _system_text(columns: Columns, row: dict[str, Any], place: str) -> str:
    text = next((row[name] for name in columns.get("system", []) if row.get(name) is not None), "")
    return text and _check_text(row, *columns["system"], place=place)


def _conversation_fields(
    columns: Columns, row: dict[str, Any], place: str, data: Data, unread: Unread
) -> dict[str, Any]:
    """Return the messages of a row, with its tools. Of several columns, the last one alone is trained."""
    *before, last = columns["messages"]
    messages = list[Message]()
    for is_talk, names in groupby(before, lambda name: is_conversation(row.get(name))):
        given, (first, *more) = row, names
        if more and not is_talk:  # texts beside one another are one message, joined as those of a prompt are
            given, more = row | {first: _check_text(row, first, *more, place=place)}, []
        messages += [each for name in (first, *more) for each in read_messages(given, name, place, unread, "user")]
    if data.train_on == "completion":
        messages = [each | {"weight": 0} if each["role"] == "assistant" else each for each in messages]
    messages += read_messages(row, last, place, unread, "assistant" if before else None)
    if data.train_on == "completion":
        _count_untrained(messages, row[last], place, unread)
    return _conversation(columns, messages, row, place, unread, "messages")


def _count_untrained(messages: list[Message], given: Any, place: str, unread: Unread) -> None:
    """Count a conversation, or an answer, of which no message is trained: why, by the value `given` in its column."""
    answers = [each for each in messages if each["role"] == "assistant"]
    if not any(each.get("weight", 1) for each in answers):
        why = f"none of the assistant, but of {listed({each['role']: 0 for each in messages})}"
        if answers:
            written = _listed(parsed(given))
            keys = [key for key in (*TRAINED_IF, *MASKED_IF) if any(key in each for each in written)]
            why = f"{' and '.join(keys)} masks all of the assistant's"
        unread.add(f"conversation without a trained message: {why}", place)


def _conversation(
    columns: Columns, messages: list[Message], row: dict[str, Any], place: str, unread: Unread, field: str
) -> dict[str, Any]:
    if system := _system_text(columns, row, place):
        if not messages or messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        elif messages[0].get("content") != system:
            unread.add(f"column {columns['system'][0]!r} is not read beside a system message", place)
    tools = [each for name in columns.get("tools", []) for each in read_tools(row, name, place) or []]
    return {field: messages, "place": place} | ({"tools": tools} if tools else {})


def _answer_fields(columns: Columns, row: dict[str, Any], place: str, data: Data, unread: Unread) -> dict[str, Any]:
    """Return a prompt with its answers, texts or lists of messages, then with their `place`; and their label.

    Without a prompt it is what two answers begin with (as in TRL): whole messages, or whole words; of a single
    conversation it is what is before the last message.
    """
    fields, label = ["prompt", *data.format.text_fields], dict[str, Any]()
    if data.format.has_label:
        label["label"] = _read_label(row, columns["label"][0], place)
    names, given = [columns[field][0] for field in fields[1:]], columns.get("prompt", [])
    has_prompt = any(row.get(name) is not None for name in given)
    if any(isinstance(row.get(name), list) or is_conversation(row.get(name)) for name in (*names, *given)):
        answers = [read_messages(row, name, place, unread, "assistant") for name in names]
        prompt, answers = _prompt_and_answers(answers, given if has_prompt else [], row, place, unread)
        for name, answer in zip(names, answers, strict=True):
            _count_untrained(answer, row[name], place, unread)
        label |= _conversation(columns, prompt, row, place, unread, "prompt")
        return dict(zip(fields[1:], answers, strict=True)) | label
    texts = [_check_text(row, name, place=place) for name in names]
    system = _system_text(columns, row, place)
    system = system and f"{system}\n\n"
    if has_prompt:
        prompt_text = system + _check_text(row, *given, place=place) + data.separator
        return dict(zip(fields, (prompt_text, *texts), strict=True)) | label
    if label:
        raise DataError(f"{place}: this row has no prompt: name its column in data.columns")
    if data.separator:
        raise DataError(f"{place}: data.separator stands behind a prompt, and this row has none: remove the key")
    shared = texts[0][: common_prefix_length(*texts)]
    end = len(shared) - len(re.search(r"\s?\S*\Z", shared)[0])  # type: ignore[index]
    return dict(zip(fields, (system + shared[:end], *(text[end:] for text in texts)), strict=True))


def _read_label(row: dict[str, Any], column: str, place: str) -> bool:
    label = LABEL_WORDS.get(str(row.get(column)).strip().lower())
    if label is None:
        value = f"is {shortened(repr(row[column]))}" if column in row else "is missing"
        raise DataError(f"{place}: {column!r} {value}; expected true or false (or 1 and 0, desirable and undesirable)")
    return label


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _prompt_and_answers(
    answers: list[list[Message]], prompt: list[str], row: dict[str, Any], place: str, unread: Unread
) -> tuple[list[Message], list[list[Message]]]:
    """Return the messages of a prompt, and those of its answers, which may repeat it, whether or not it has a column.

    A prompt that is a text is what the user says, unless all answers begin with the same messages.
    """
    most = common_prefix_length(answers[0], answers[-1])
    shared = answers[0][: min(most, *(len(answer) - 1 for answer in answers))]
    if prompt and is_conversation(row.get(prompt[0])):
        before = read_messages(row, prompt[0], place, unread)
        return before, answers if shared != before else [answer[len(before) :] for answer in answers]
    if prompt and (text := _check_text(row, *prompt, place=place)):
        if not shared:
            return [{"role": "user", "content": text}], answers
        if text not in (each.get("content") for each in shared):
            unread.add(f"column {prompt[0]!r} is not read beside the messages with which both answers begin", place)
    return shared, [answer[len(shared) :] for answer in answers]


def _check_text(row: dict[str, Any], column: str, *more: str, place: str) -> str:
    if column not in row:
        raise DataError(f"{place}: this row has no {column!r}; it has: {listed(row)}")
    value = row[column]
    if not isinstance(value, str):
        way_out = {int: "; put quotes around it", float: "; put quotes around it"}.get(type(value), "")
        if isinstance(value, list) and value and isinstance(value[0], dict):
            way_out = (
                "; lists of messages are read with data.format: chat and columns: {messages: [prompt, completion]}"
            )
        raise DataError(f"{place}: {column!r} is {type_name(value)}; expected text{way_out}")
    others = [_check_text(row, name, place=place) for name in more if row.get(name) not in (None, "")]
    return "\n\n".join(text for text in [value, *others] if text)
