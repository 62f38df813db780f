"""Columns of a source → the fields of a format, every value checked."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from fsdptrain.config.formats import Format, guess_format
from fsdptrain.config.paths import DataPath
from fsdptrain.config.schema import Data
from fsdptrain.config.syntax import yaml_text
from fsdptrain.data.readers import BATCH_ROWS, READ_ON, Source, broken_rows_error, type_name
from fsdptrain.data.sources import first_source
from fsdptrain.errors import DataError, listed, shortened

# ShareGPT's values of `from` → the roles of chat templates.
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}

PEEKED_ROWS = 8
MAX_ROW = 2**24  # characters, of which a tokenizer needs some 200 bytes and 3 µs each
BATCH_CHARACTERS = 2**22  # after which a batch has no more rows
LABELS = frozenset({"label", "kto_tag"})  # columns that say whether an answer is good, if they are true or false


def peek(path: DataPath, data: Data) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns behind a path and its first rows, of which a batch is checked; the others are not read.

    Raises DataError as `open_sources` and `read_rows` do.
    """
    source = first_source(path)
    return source.columns, next(read_rows([source], data, None), [])[:PEEKED_ROWS]


def read_rows(sources: Iterable[Source], data: Data, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of rows with the format's fields, every value checked; conversations also with their `place`.

    Raises DataError for a missing column, and for rows that are broken, too long, have a null or a value of the wrong
    type: up to MOST_BROKEN of them at once, each with its place.
    """
    rows = islice(chain.from_iterable(_checked_rows(source, data) for source in sources), limit)
    batch, size = list[dict[str, Any]](), 0
    for row in _until_broken(rows):
        batch.append(row)
        size += _size(row)
        if len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked_rows(source: Source, data: Data) -> Iterator[dict[str, Any] | DataError]:
    """Yield each row of a source with the format's fields, or what is wrong with it; raise for a missing column."""
    columns = columns_of(data)
    wanted = list(dict.fromkeys(name for names in columns.values() for name in names))
    if missing := [name for name in wanted if name not in source.columns]:
        raise DataError(f"{source.name}: {_missing_column_message(missing[0], source.columns, data)}")
    if repeated := [name for name in wanted if source.columns.count(name) > 1]:
        raise DataError(f"{source.name}: more than one of its {len(source.columns)} columns is called {repeated[0]!r}")
    if data.format.has_prompt and (label := _label_of_answers(source)):
        raise DataError(
            f"{source.name}: This is preference data without pairs ({label}: whether the answer is good), as for KTO, "
            f"which is not supported; to fine-tune on the good answers, keep the rows in which {label} is true, "
            "without that column"
        )
    # Optional fields: the first row, from which the columns of a JSON file are known, may have none.
    optional = {field: str(data.columns.get(field, field)) for field in data.format.optional}
    for field, column in optional.items():
        if field in data.columns and column not in source.columns:
            raise DataError(f"{source.name}: no column {column!r}, which data.columns names for {field}")
        wanted += [column] if column in source.columns else []
    check: Callable[[dict[str, Any], str], dict[str, Any]] = partial(_text_fields, columns)
    if data.format.is_paired:
        check = partial(_preference_fields, columns["chosen"][0], columns["rejected"][0], optional, data.separator)
    elif data.format.is_chat:
        check = partial(_conversation_fields, columns["messages"][0], optional["tools"])
    for place, row in source.rows(wanted):
        try:
            yield row if isinstance(row, DataError) else _check_size(check(row, place), place)
        except DataError as error:
            yield error


def _check_size(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a row; raise DataError if encoding it would take much memory and time."""
    if (size := _size(row)) > MAX_ROW:
        raise DataError(
            f"{place}: {size:,} characters in one row, and {MAX_ROW:,} are the most that a tokenizer gets at once: "
            "divide it into several rows (a .txt file is one)"
        )
    return row


def _size(row: dict[str, Any]) -> int:
    """Return how many characters a row has as JSON."""
    return len(json.dumps(row, ensure_ascii=False, default=str))


def _until_broken(rows: Iterator[dict[str, Any] | DataError]) -> Iterator[dict[str, Any]]:
    """Yield rows up to the first that is broken; then read on for others, and raise DataError."""
    for row in rows:
        if isinstance(row, DataError):
            broken, read = [row], 0
            try:
                for later in islice(rows, READ_ON):
                    read += 1
                    broken += [later] if isinstance(later, DataError) else []
            except DataError as error:  # a fault of a whole file
                broken.append(error)
            raise broken_rows_error(broken, read)
        yield row


def columns_of(data: Data) -> dict[str, list[str]]:
    """Return the columns behind each field of the recipe's format; several are joined."""
    named = {field: data.columns.get(field, field) for field in data.format.fields}
    return {field: names if isinstance(names, list) else [names] for field, names in named.items()}


def describe_columns(path: DataPath, data: Data) -> str:
    """Return which columns are read as what, for a message: `instruction + input as prompt, output as completion`."""
    parts = [
        field if names == [field] else f"{' + '.join(names)} as {field}" for field, names in columns_of(data).items()
    ]
    if data.format.is_chat:
        source = first_source(path)
        [column] = columns_of(data)["messages"]
        rows = (row for _, row in source.rows([column]) if isinstance(row, dict) and column in source.columns)
        if isinstance(messages := next(rows, {}).get(column), list) and any(map(_is_sharegpt, messages)):
            parts[0] += " (ShareGPT: from as role, value as content)"
    if data.format.optional:
        optional = {field: data.columns.get(field, field) for field in data.format.optional}
        there = {field: column for field, column in optional.items() if column in first_source(path).columns}
        parts += [field if field == column else f"{column} as {field}" for field, column in there.items()]
    return ", ".join(parts) + (f", joined by {json.dumps(data.separator)}" if data.separator else "")


def prompt_and_trained(row: dict[str, Any], data: Data) -> tuple[str, str]:
    """Return the two parts of a row of texts: its prompt with the separators, empty without one, and its last field.

    Of a pair it is the chosen answer.
    """
    if data.format.is_paired:
        return row["prompt"], row["chosen"]
    *before, trained = data.format.fields
    return "".join(row[field] + data.separator for field in before), row[trained]


def seam_without_space(rows: list[dict[str, Any]], data: Data) -> str | None:
    """Return the first place where no white space separates a prompt and its completion; None if there is none."""
    for prompt, completion in (prompt_and_trained(row, data) for row in rows if "place" not in row):
        if prompt and completion and not prompt[-1].isspace() and not completion[0].isspace():
            return json.dumps(f"{prompt[-20:]}⟦{completion[:20]}⟧", ensure_ascii=False)
    return None


def _label_of_answers(source: Source) -> str | None:
    """Return the column that says whether the answer of a row is good, as data for KTO has; None without one."""
    for name in LABELS.intersection(source.columns):
        row = next((row for _, row in source.rows([name])), {})
        if isinstance(row, dict) and isinstance(row.get(name), bool):
            return name
    return None


def unknown_columns_error(path: DataPath) -> DataError:
    """Return the error for data whose columns match no format: how to name them, with an example of its own columns."""
    source = first_source(path)
    available = source.columns
    row = next((row for _, row in source.rows(available) if isinstance(row, dict)), {})
    texts = [name for name in available if isinstance(row.get(name), str)]
    lists = [name for name in available if isinstance(row.get(name), list)]
    fitting = [form for form in reversed(Format) if form.is_chat == bool(lists) and not form.is_paired]
    form = next((form for form in fitting if len(form.fields) <= len(lists or texts)), fitting[-1])
    example = dict(zip(form.fields, lists or texts, strict=False)) or dict.fromkeys(form.fields, "COLUMN")
    formats = "; ".join(f"{form}: {', '.join(form.fields)}" for form in Format)
    return DataError(
        f"{source.name}: its columns match no format ({formats}); columns: {listed(available)}. Name those to read in "
        f"data.columns of a recipe, for example data: {{format: {form}, columns: {yaml_text(example)}}}"
    )


def _missing_column_message(missing: str, available: list[str], data: Data) -> str:
    """Return the message for a missing column: the columns there are, and how they could be read."""
    message = f"no column {shortened(missing)!r}, which format {data.format} needs; columns: {listed(available)}. "
    likely = guess_format(available)
    if likely is None:
        fields = [*data.format.fields]
        example = dict(zip(fields, available, strict=False)) if len(available) >= len(fields) else {fields[0]: "…"}
        return f"{message}Name the columns to read in data.columns, for example {yaml_text(example)}"
    form, columns = likely
    keys = [f"format: {form}"] * (form != data.format) + [f"columns: {yaml_text(columns)}"] * bool(columns)
    return f"{message}They fit data: {{{', '.join(keys)}}}"


def _text_fields(columns: dict[str, list[str]], row: dict[str, Any], place: str) -> dict[str, Any]:
    return {field: _check_text(row, *names, place=place) for field, names in columns.items()}


def _conversation_fields(messages: str, tools: str, row: dict[str, Any], place: str) -> dict[str, Any]:
    schemas = _check_tools(row, tools, place)
    kept = {"messages": _check_messages(row, messages, place=place), "place": place}
    return kept | ({"tools": schemas} if schemas else {})


def _preference_fields(
    chosen: str, rejected: str, optional: dict[str, str], separator: str, row: dict[str, Any], place: str
) -> dict[str, Any]:
    """Return the prompt of a pair and its two answers: texts, or lists of messages, then with their `place`.

    Without a prompt it is what both begin with (as in TRL): whole messages, or whole words.
    """
    names, given = (chosen, rejected), row.get(optional["prompt"])
    if any(isinstance(row.get(name), list) for name in names):
        schemas = _check_tools(row, optional["tools"], place)
        prompt, answers = _prompt_and_answers(names, optional["prompt"], row, place)
        pair = dict(zip(PAIR, (prompt, *answers), strict=True)) | {"place": place}
        return pair | ({"tools": schemas} if schemas else {})
    texts = [_check_text(row, name, place=place) for name in names]
    if given is not None:
        return dict(zip(PAIR, (_check_text(row, optional["prompt"], place=place) + separator, *texts), strict=True))
    if separator:
        raise DataError(f"{place}: data.separator stands behind a prompt, and this row has none: remove the key")
    shared = texts[0][: common_prefix_length(*texts)]
    end = len(shared) - len(re.search(r"\s?\S*\Z", shared)[0])  # type: ignore[index]
    return dict(zip(PAIR, (shared[:end], *(text[end:] for text in texts)), strict=True))


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


PAIR = ("prompt", "chosen", "rejected")


def _prompt_and_answers(
    names: Sequence[str], prompt: str, row: dict[str, Any], place: str
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Return the messages of a prompt, and those of two answers, which may repeat it, whether or not it has a column.

    A prompt that is a text is what the user says, unless both answers begin with the same messages.
    """
    answers = [_check_messages(row, name, place=place) for name in names]
    shared = answers[0][: min(common_prefix_length(*answers), *(len(answer) - 1 for answer in answers))]
    given = row.get(prompt)
    if isinstance(given, list) and given:
        before = _check_messages(row, prompt, place=place)
        return before, answers if shared != before else [answer[len(before) :] for answer in answers]
    if given and not shared:
        return [{"role": "user", "content": _check_text(row, prompt, place=place)}], answers
    return shared, [answer[len(shared) :] for answer in answers]


def _check_text(row: dict[str, Any], column: str, *more: str, place: str) -> str:
    """Return the text in a column and the non-empty texts in `more`, joined by an empty line."""
    if column not in row:
        raise DataError(f"{place}: this row has no {column!r}; it has: {listed(row)}")
    value = row[column]
    if not isinstance(value, str):
        way_out = {int: "; put quotes around it", float: "; put quotes around it"}.get(type(value), "")
        if isinstance(value, list) and value and isinstance(value[0], dict):
            way_out = "; use data.format: chat for lists of messages"
        raise DataError(f"{place}: {column!r} is {type_name(value)}; expected text{way_out}")
    others = [_check_text(row, name, place=place) for name in more if row.get(name) not in (None, "")]
    return "\n\n".join(text for text in [_check_unicode(value, column, place), *others] if text)


def _check_unicode(text: str, column: str, place: str) -> str:
    """Return the text; raise DataError for a lone surrogate (`\\ud83d` in JSON), which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {column!r} contains half a character (a lone surrogate): {error.object[error.start]!a}"
        ) from None
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
        if isinstance(kept.get("content"), list):
            kept["content"] = _text_parts(kept["content"], f"{place}: message {number} of {column!r}")
        if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content", ""), (str, list)):
            forms = "{role: text, content: text} nor ShareGPT's {from: text, value: text}"
            raise DataError(f"{place}: message {number} of {column!r} is neither {forms}")
        _check_weight(kept, f"{place}: message {number} of {column!r}")
        _check_unicode(json.dumps(kept, ensure_ascii=False, default=str), column, place)
        messages.append(kept)
    return messages


def _check_weight(message: dict[str, Any], place: str) -> None:
    """Raise DataError for a message whose `weight` is neither 0 nor 1, or that is not the assistant's and has 1."""
    weight = message.get("weight", 0)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"{place}: weight is {shortened(repr(weight))}; expected 1 (trained) or 0 (not trained)")
    if weight == 1 and message["role"] != "assistant":
        raise DataError(f"{place}: weight is 1, but only messages of the assistant are trained: remove it, or write 0")


def _text_parts(content: list[Any], place: str) -> list[dict[str, str]]:
    """Return the parts of a content, all of type text, without other keys; raises DataError for other parts."""
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {shortened(repr(kind))}" if kind not in (None, "text") else "not {type: text, text: …}"
            raise DataError(
                f"{place}: part {number} of its content is {what}, and only text is trained: remove the part or the row"
            )
    return [{"type": "text", "text": part["text"]} for part in content]


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys() and message.get("role") is None


def _from_sharegpt(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a ShareGPT message with the keys and roles of chat templates."""
    role = SHAREGPT_ROLES.get(message["from"]) if isinstance(message["from"], str) else None
    if role is None:
        raise DataError(
            f"{place}: unknown speaker {shortened(repr(message['from']))}; known: {', '.join(SHAREGPT_ROLES)}"
        )
    if not isinstance(message["value"], str):
        raise DataError(f"{place}: value is {type_name(message['value'])}; expected text")
    others = {name: item for name, item in message.items() if name not in ("from", "value", "role", "content")}
    return {"role": role, "content": message["value"], **others}


def _check_tools(row: dict[str, Any], column: str, place: str) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of a conversation's tools, given as a list or as JSON text; None when it has none."""
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        _check_unicode(value, column, place)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: {column!r} is text that is not JSON: {error}") from None
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return None
    tools = [_parse_tool(tool) for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) and tool for tool in tools):
        raise DataError(
            f"{place}: {column!r} is {type_name(row[column])}; expected a list of JSON schemas, or its JSON text"
        )
    _check_unicode(json.dumps(tools, ensure_ascii=False, default=str), column, place)
    return tools


def _parse_tool(tool: Any) -> Any:
    """Return one tool, which some data sets store as JSON text; None when it is not JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(tool) if isinstance(tool, str) else tool
    return None
