"""Columns of a source → the fields of a format, every value checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Any

from fsdptrain.config.formats import Format, as_conversation, guess_format
from fsdptrain.config.paths import DataPath
from fsdptrain.config.schema import Data
from fsdptrain.config.syntax import yaml_text
from fsdptrain.data.messages import (
    EMPTY,
    EMPTY_ANSWER,
    HARMLESS,
    Message,
    Unread,
    check_unicode,
    is_conversation,
    is_sharegpt,
    masking_keys,
    read_messages,
    read_tools,
)
from fsdptrain.data.readers import BATCH_ROWS, READ_ON, Source, broken_rows_error, type_name
from fsdptrain.data.sources import first_source
from fsdptrain.errors import DataError, listed, shortened

PEEKED_ROWS = 8
MAX_ROW = 2**24  # characters, of which a tokenizer needs some 200 bytes and 3 µs each
BATCH_CHARACTERS = 2**22  # after which a batch has no more rows
LABELS = frozenset({"label", "kto_tag"})  # columns that say whether an answer is good, if they are true or false


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
    for row in _until_broken(rows):
        batch.append(row)
        size += _size(row)
        if len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked_rows(source: Source, data: Data, unread: Unread) -> Iterator[dict[str, Any] | DataError]:
    """Yield each row of a source with the format's fields, or what is wrong with it; raise for a missing column."""
    columns = columns_of(data)
    wanted = list(dict.fromkeys(name for names in columns.values() for name in names))
    if missing := [name for name in wanted if not source.has(name)]:
        raise DataError(f"{source.name}: {_missing_column_message(missing[0], source, data)}")
    if repeated := [name for name in wanted if source.columns.count(name) > 1]:
        raise DataError(f"{source.name}: more than one of its {len(source.columns)} columns is called {repeated[0]!r}")
    if (data.format.has_prompt or data.format.is_chat) and (label := _label_of_answers(source)):
        raise DataError(
            f"{source.name}: This is preference data without pairs ({label}: whether the answer is good), as for KTO, "
            f"which is not supported; to fine-tune on the good answers, keep the rows in which {label} is true, "
            "without that column"
        )
    for field, names in _optional_columns(data).items():
        absent = [name for name in names if not source.has(name)] if field in data.columns else []
        if absent:
            raise DataError(f"{source.name}: no column {absent[0]!r}, which data.columns names for {field}")
        if field in data.columns or not {*names} & {*wanted}:  # a column that serves another field serves that alone
            columns[field] = names
    wanted = list(dict.fromkeys(chain(wanted, *columns.values())))
    form, known = data.format, {*wanted, *(name for name in source.columns if name.lower() in HARMLESS)}
    check = _preference_fields if form.is_paired else _conversation_fields if form.is_chat else _text_fields
    silent = [name for name in source.columns if name not in known] if source.selects else []
    for place, row in source.rows([name for name in wanted if name in source.columns]):
        if isinstance(row, DataError):
            yield row
            continue
        for name in chain(silent, (name for name in row if name not in known and row[name] not in EMPTY)):
            if name.lower() not in HARMLESS:
                unread.add(f"column {shortened(name)!r} is not read", place)
        try:
            yield _check_size(check(columns, row, place, data, unread), place)
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
    return _named_columns(data.format.fields, data)


def _optional_columns(data: Data) -> dict[str, list[str]]:
    return _named_columns(data.format.optional, data)


def _named_columns(fields: Iterable[str], data: Data) -> dict[str, list[str]]:
    named = {field: data.columns.get(field, field) for field in fields}
    return {field: names if isinstance(names, list) else [names] for field, names in named.items()}


def likely_format(source: Source) -> tuple[Format, dict[str, Any]] | None:
    """Return how a source is read, as `guess_format` does, but by its first rows, too; None if that is not known.

    Prompts with completions that are messages, or that have tools, are conversations.
    """
    likely = guess_format(source.columns)
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
    parts = [
        field if names == [field] else f"{' + '.join(names)} as {field}" for field, names in columns_of(data).items()
    ]
    source = first_source(path)
    if data.format.is_chat:
        column = columns_of(data)["messages"][0]
        rows = (row for _, row in source.rows([column]) if isinstance(row, dict) and column in source.columns)
        if is_sharegpt(next(rows, {}).get(column)):
            parts[0] += " (ShareGPT: from as role, value as content)"
    there = {f: names for f, names in _optional_columns(data).items() if {*names} <= {*source.columns}}
    parts += [field if names == [field] else f"{' + '.join(names)} as {field}" for field, names in there.items()]
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


def _missing_column_message(missing: str, source: Source, data: Data) -> str:
    """Return the message for a missing column: the columns there are, and how they could be read."""
    available = source.columns
    message = f"no column {shortened(missing)!r}, which format {data.format} needs; columns: {listed(available)}. "
    likely = likely_format(source)
    if likely is None:
        fields = [*data.format.fields]
        example = dict(zip(fields, available, strict=False)) if len(available) >= len(fields) else {fields[0]: "…"}
        return f"{message}Name the columns to read in data.columns, for example {yaml_text(example)}"
    form, columns = likely
    keys = [f"format: {form}"] * (form != data.format) + [f"columns: {yaml_text(columns)}"] * bool(columns)
    return f"{message}They fit data: {{{', '.join(keys)}}}"


Columns = dict[str, list[str]]  # field → its columns


def _text_fields(columns: Columns, row: dict[str, Any], place: str, data: Data, unread: Unread) -> dict[str, Any]:
    fields = {field: _check_text(row, *columns[field], place=place) for field in data.format.fields}
    if data.format.has_prompt and not [*fields.values()][-1].strip():
        unread.add(EMPTY_ANSWER, place)
    if system := _system_text(columns, row, place):
        prompt = next(iter(fields))
        fields[prompt] = f"{system}\n\n{fields[prompt]}"
    return fields


def _system_text(columns: Columns, row: dict[str, Any], place: str) -> str:
    """Return the text in the column of system prompts; empty without one."""
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
        masked = f"{' and '.join(masking_keys(given))} masks all of the assistant's"
        why = masked if answers else f"none of the assistant, but of {listed({each['role']: 0 for each in messages})}"
        unread.add(f"conversation without a trained message: {why}", place)


def _conversation(
    columns: Columns, messages: list[Message], row: dict[str, Any], place: str, unread: Unread, field: str
) -> dict[str, Any]:
    """Return messages as a field of a row, behind the row's system prompt, with its tools and its place."""
    if system := _system_text(columns, row, place):
        if not messages or messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
        elif messages[0].get("content") != system:
            unread.add(f"column {columns['system'][0]!r} is not read beside a system message", place)
    tools = [each for name in columns.get("tools", []) for each in read_tools(row, name, place) or []]
    return {field: messages, "place": place} | ({"tools": tools} if tools else {})


def _preference_fields(columns: Columns, row: dict[str, Any], place: str, data: Data, unread: Unread) -> dict[str, Any]:
    """Return the prompt of a pair and its two answers: texts, or lists of messages, then with their `place`.

    Without a prompt it is what both begin with (as in TRL): whole messages, or whole words.
    """
    names, given = [columns[field][0] for field in data.format.fields], columns.get("prompt", [])
    has_prompt = any(row.get(name) is not None for name in given)
    if any(isinstance(row.get(name), list) or is_conversation(row.get(name)) for name in (*names, *given)):
        answers = [read_messages(row, name, place, unread, "assistant") for name in names]
        prompt, answers = _prompt_and_answers(answers, given if has_prompt else [], row, place, unread)
        for name, answer in zip(names, answers, strict=True):
            _count_untrained(answer, row[name], place, unread)
        return dict(zip(PAIR[1:], answers, strict=True)) | _conversation(columns, prompt, row, place, unread, PAIR[0])
    texts = [_check_text(row, name, place=place) for name in names]
    system = _system_text(columns, row, place)
    system = system and f"{system}\n\n"
    if has_prompt:
        prompt_text = system + _check_text(row, *given, place=place) + data.separator
        return dict(zip(PAIR, (prompt_text, *texts), strict=True))
    if data.separator:
        raise DataError(f"{place}: data.separator stands behind a prompt, and this row has none: remove the key")
    shared = texts[0][: common_prefix_length(*texts)]
    end = len(shared) - len(re.search(r"\s?\S*\Z", shared)[0])  # type: ignore[index]
    return dict(zip(PAIR, (system + shared[:end], *(text[end:] for text in texts)), strict=True))


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


PAIR = ("prompt", "chosen", "rejected")


def _prompt_and_answers(
    answers: list[list[Message]], prompt: list[str], row: dict[str, Any], place: str, unread: Unread
) -> tuple[list[Message], list[list[Message]]]:
    """Return the messages of a prompt, and those of two answers, which may repeat it, whether or not it has a column.

    A prompt that is a text is what the user says, unless both answers begin with the same messages.
    """
    shared = answers[0][: min(common_prefix_length(*answers), *(len(answer) - 1 for answer in answers))]
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
    """Return the text in a column and the non-empty texts in `more`, joined by an empty line."""
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
    return "\n\n".join(text for text in [check_unicode(value, column, place), *others] if text)
