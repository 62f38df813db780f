"""Columns of a source → the fields of a format, every value checked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import yaml

from fsdptrain.config.schema import FORMAT_FIELDS, Data
from fsdptrain.data.readers import BATCH_ROWS, Source, type_name
from fsdptrain.data.sources import first_source
from fsdptrain.errors import DataError, listed, shortened

# What data sets call the fields of our formats, the most telling name first. Alpaca's `input` belongs to its prompt.
COMMON_NAMES = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog"),
    "prompt": ("prompt", "instruction", "question", "query", "problem", "input", "inputs"),
    "completion": ("completion", "output", "response", "answer", "solution", "target", "targets"),
    "text": ("text", "content", "document", "body", "article", "code"),
}


# Who speaks in ShareGPT's {from, value}, in the words of chat templates.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


PEEKED_ROWS = 8


def peek(path: str, data: Data) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns behind a path and its first rows, checked as `read` checks them; the rest is not read.

    Raises DataError as `open_sources` and `read` do.
    """
    source = first_source(path)
    return source.columns, next(read_rows(source, data, PEEKED_ROWS), [])


def column_names(path: str) -> list[str]:
    """Return the columns behind a path; raises DataError as `open_sources` does."""
    return first_source(path).columns


def read_rows(source: Source, data: Data, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """Batches of rows with our field names, every value checked; those of conversations with their `place`, too.

    Raises DataError with the row's place for a missing column, a null or a value of the wrong type.
    """
    columns = columns_of(data)
    wanted = list(dict.fromkeys(name for names in columns.values() for name in names))
    if missing := [name for name in wanted if name not in source.columns]:
        raise DataError(f"{source.name}: {_missing_column_message(missing[0], source.columns, data)}")
    if twice := [name for name in wanted if source.columns.count(name) > 1]:
        raise DataError(f"{source.name}: {len(source.columns)} columns, and more than one is called {twice[0]!r}")
    check: Callable[[dict[str, Any], str], dict[str, Any]] = partial(_text_fields, columns)
    if data.format == "chat":  # rows of a JSON file may have tools where the first, which lists the columns, has none
        tools = str(data.columns.get("tools", "tools"))
        if "tools" in data.columns and tools not in source.columns:
            raise DataError(f"{source.name}: no column {tools!r}, which data.columns names as tools")
        check = partial(_conversation_fields, columns["messages"][0], tools)
        wanted += [tools] if tools in source.columns else []
    checked = (check(row, place) for place, row in islice(source.rows(wanted), limit))
    yield from iter(partial(_next_batch, checked), [])


def columns_of(data: Data) -> dict[str, list[str]]:
    """Return the columns behind each field of the recipe's format; several are joined."""
    named = {field: data.columns.get(field, field) for field in FORMAT_FIELDS[data.format]}
    return {field: names if isinstance(names, list) else [names] for field, names in named.items()}


def describe_columns(path: str, data: Data) -> str:
    """Return what is read from which columns, and joined how: `instruction + input as prompt, output as completion`."""
    words = [
        field if names == [field] else f"{' + '.join(names)} as {field}" for field, names in columns_of(data).items()
    ]
    if data.format == "chat":
        source = first_source(path)
        [column] = columns_of(data)["messages"]
        _, row = next(source.rows([column]), ("", {})) if column in source.columns else ("", {})
        if isinstance(messages := row.get(column), list) and any(map(_is_sharegpt, messages)):
            words[0] += " (ShareGPT: from is role, value is content)"
        if (tools := data.columns.get("tools", "tools")) in source.columns:
            words.append("tools" if tools == "tools" else f"{tools} as tools")
    return ", ".join(words) + (f", joined by {json.dumps(data.separator)}" if data.separator else "")


def guess_format(there: list[str]) -> tuple[str, dict[str, Any]] | None:
    """Return the format that columns of these names look like, and `data.columns` for it; None for any others."""
    found = {
        field: name for field, names in COMMON_NAMES.items() if (name := next((n for n in names if n in there), None))
    }
    for form in ("chat", "prompt_completion", "text"):
        fields = FORMAT_FIELDS[form]
        if set(fields) <= found.keys():
            columns: dict[str, Any] = {field: found[field] for field in fields if found[field] != field}
            if found.get("prompt") == "instruction" and form == "prompt_completion" and "input" in there:
                columns["prompt"] = ["instruction", "input"]
            return form, columns
    return None


def columns_as_yaml(columns: dict[str, Any]) -> str:
    """Return columns as they are written in a recipe: `{prompt: [instruction, input], completion: output}`."""
    return yaml.safe_dump(columns, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9).strip()


def _missing_column_message(missing: str, there: list[str], data: Data) -> str:
    """What to say about a column that is not there: those there are, and how they could be read."""
    message = f"no column {shortened(missing)!r}, which format {data.format} reads; there are: {listed(there)}. "
    likely = guess_format(there)
    if likely is None:
        fields = [field for field, names in columns_of(data).items() if missing in names]
        return f"{message}Name yours in data.columns: {{{fields[0]}: …}}"
    form, columns = likely
    keys = [f"format: {form}"] * (form != data.format) + [f"columns: {columns_as_yaml(columns)}"] * bool(columns)
    return f"{message}They look like data: {{{', '.join(keys)}}}"


def _next_batch(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(islice(rows, BATCH_ROWS))


def _text_fields(columns: dict[str, list[str]], row: dict[str, Any], place: str) -> dict[str, Any]:
    return {field: _check_text(row, *names, place=place) for field, names in columns.items()}


def _conversation_fields(messages: str, tools: str, row: dict[str, Any], place: str) -> dict[str, Any]:
    schemas = _check_tools(row, tools, place)
    kept = {"messages": _check_messages(row, messages, place=place), "place": place}
    return kept | ({"tools": schemas} if schemas else {})


def _check_text(row: dict[str, Any], column: str, *more: str, place: str) -> str:
    """The text in a column, and of those in `more` all that are not empty, with an empty line between them."""
    if column not in row:
        raise DataError(f"{place}: no {column!r} here; there are: {listed(row)}")
    value = row[column]
    if not isinstance(value, str):
        way_out = {int: "; put quotes around it", float: "; put quotes around it"}.get(type(value), "")
        if isinstance(value, list) and value and isinstance(value[0], dict):
            way_out = "; lists of messages are read with data.format: chat"
        raise DataError(f"{place}: {column!r} is {type_name(value)}; expected a text{way_out}")
    texts = [_check_text(row, name, place=place) for name in more if row.get(name) not in (None, "")]
    return "\n\n".join(text for text in [_check_unicode(value, column, place), *texts] if text)


def _check_unicode(text: str, column: str, place: str) -> str:
    """The text; `\\ud83d` in JSON without its other half is no character, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {column!r} holds half a character: {error.object[error.start]!a}") from None
    return text


def _check_messages(row: dict[str, Any], column: str, *, place: str) -> list[dict[str, Any]]:
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: {column!r} is {type_name(value)}; expected a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        if _is_sharegpt(message):
            message = _from_sharegpt(message, f"{place}: message {number} of {column!r}")
        kept = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content", ""), str):
            ways = "{role: text, content: text}, nor ShareGPT's {from: text, value: text}"
            raise DataError(f"{place}: message {number} of {column!r} is not {ways}")
        _check_unicode(json.dumps(kept, ensure_ascii=False, default=str), column, place)
        messages.append(kept)
    return messages


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys() and message.get("role") is None


def _from_sharegpt(message: dict[str, Any], place: str) -> dict[str, Any]:
    """A ShareGPT message in the words of chat templates."""
    role = SHAREGPT_ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise DataError(f"{place} is from {shortened(repr(message['from']))}; known: {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(message["value"], str):
        raise DataError(f"{place}: value is {type_name(message['value'])}; expected a text")
    others = {name: item for name, item in message.items() if name not in ("from", "value", "role", "content")}
    return {"role": role, "content": message["value"], **others}


def _check_tools(row: dict[str, Any], column: str, place: str) -> list[dict[str, Any]] | None:
    """The JSON schemas of the tools of a conversation, given as a list or as JSON text; None where it has none."""
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        _check_unicode(value, column, place)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: {column!r} is a text that is not JSON: {error}") from None
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return None
    tools = [_parse_tool(tool) for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) and tool for tool in tools):
        raise DataError(
            f"{place}: {column!r} is {type_name(row[column])}; expected a list of JSON schemas, or one as text"
        )
    _check_unicode(json.dumps(tools, ensure_ascii=False, default=str), column, place)
    return tools


def _parse_tool(tool: Any) -> Any:
    """One tool; some data sets hold each as a JSON text."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(tool) if isinstance(tool, str) else tool
    return None
