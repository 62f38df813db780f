"""What a row of each data format has, and how it is read.

No other module compares the names of formats: they read these properties. To add a format of texts, add a row to
`Format`; one of another kind also needs its own check in `data.columns` and its own rendering in `data.encode`.
"""

from __future__ import annotations

from typing import Any, Literal

from fsdptrain.config.enums import TableEnum

LongRows = Literal["split", "cut", "drop"]
UNITS = ("label token", "row", "pair")  # by `Format.answers`: over what a loss is a mean
Names = tuple[str | tuple[str, ...], ...]  # usual names of columns; several in one are joined

PROMPT: Names = (
    "prompt", ("instruction", "input"), ("instruction", "context"), "instruction", ("question", "context"), "question",
    "query", "problem", "input", "inputs",
)  # fmt: skip
COMPLETION: Names = ("completion", "output", "response", "answer", "solution", "target", "targets", "answers")
TOOLS: Names = ("tools", "functions")
SYSTEM: Names = ("system", "system_prompt", "system_message")
NONE: dict[str, Names] = {}


class Format(TableEnum):
    """A data format; its value is the word in the recipe. The order is from the least to the most specific.

    `fields`: field → what data sets usually call its column, the most specific name first. The last field is trained;
    those before it are its prompt. `long_rows`: the default of `data.long_rows`.
    `is_chat`: a row is a conversation, which the tokenizer's chat template renders. `optional`: fields that are read if
    there is such a column. `answers`: how many answers of a row an objective judges as wholes, each a text or messages;
    0: none, it learns tokens.
    """

    fields: dict[str, Names]
    long_rows: LongRows
    is_chat: bool
    optional: dict[str, Names]
    answers: int

    text = "text", {"text": ("text", "content", "document", "body", "article", "code")}, "split", False, NONE, 0
    prompt_completion = (
        "prompt_completion",
        {"prompt": PROMPT, "completion": COMPLETION}, "cut", False, {"system": SYSTEM}, 0,
    )  # fmt: skip
    chat = (
        "chat", {"messages": ("messages", "conversations", "conversation", "dialogue", "dialog")}, "cut",
        True, {"tools": TOOLS, "system": SYSTEM}, 0,
    )  # fmt: skip
    feedback = (
        "feedback", {"completion": (*COMPLETION, "messages", "conversations"), "label": ("label", "kto_tag")}, "cut",
        False, {"prompt": PROMPT, "tools": TOOLS, "system": SYSTEM}, 1,
    )  # fmt: skip
    preference = (
        "preference", {"chosen": ("chosen",), "rejected": ("rejected",)}, "cut",
        False, {"prompt": (*PROMPT, "conversations", "conversation"), "tools": TOOLS, "system": SYSTEM}, 2,
    )  # fmt: skip

    @property
    def has_prompt(self) -> bool:
        """Whether a row has fields before the one that is trained, with `data.separator` between them."""
        return len(self.fields) > 1 and not self.answers

    @property
    def rows(self) -> int:
        """How many rows of tokens belong together: the two answers of a pair."""
        return max(1, self.answers)

    @property
    def text_fields(self) -> list[str]:
        """The fields that are texts or messages: of judged answers, those without a prompt."""
        return [*self.fields][: self.answers or None]

    @property
    def has_label(self) -> bool:
        """Whether a row says if its answer is desirable."""
        return "label" in self.fields

    @property
    def unit(self) -> str:
        """What a loss on its rows is a mean over."""
        return UNITS[self.answers]

    @property
    def renders_chat(self) -> bool:
        """Whether rows are conversations, or may be."""
        return self.is_chat or self.answers > 0

    @property
    def is_trained_in_part(self) -> bool:
        """Whether `data.train_on` chooses what is trained of a row; otherwise all of it is."""
        return self.has_prompt or self.renders_chat


DEFAULT_FORMAT = Format.text


def guess_format(available: list[str]) -> tuple[Format, dict[str, str | list[str]]] | None:
    """Return the format that columns of these names look like, with its `data.columns`; None if there is none."""
    for form in reversed(Format):
        found = {field: _column_named(names, available) for field, names in form.fields.items()}
        columns = {field: column for field, column in found.items() if column is not None}
        if len(columns) == len(found):
            others = {field: _column_named(names, available) for field, names in form.optional.items()}
            columns |= {field: column for field, column in others.items() if column is not None}
            return form, {field: column for field, column in columns.items() if column != field}
    return None


def as_conversation(columns: dict[str, str | list[str]], available: list[str]) -> tuple[Format, dict[str, Any]]:
    """Return how prompts with completions that are messages are read, as `guess_format` does for texts."""
    parts = [columns.get(field, field) for field in Format.prompt_completion.fields]
    joined = [name for part in parts for name in ([part] if isinstance(part, str) else part)]
    found, others = Format.chat, {f: _column_named(names, available) for f, names in Format.chat.optional.items()}
    return found, {"messages": joined} | {field: name for field, name in others.items() if name not in (None, field)}


def _column_named(names: Names, available: list[str]) -> str | list[str] | None:
    for name in names:
        if {*([name] if isinstance(name, str) else name)} <= {*available}:
            return name if isinstance(name, str) else list(name)
    return None
