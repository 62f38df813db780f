"""Answers of a model at a terminal, token by token, with transformers' `generate`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteriaList, TextStreamer

from fsdptrain.data.encode import end_tokens, prompt_tokens, renders_chat
from fsdptrain.data.turn_spans import Message
from fsdptrain.errors import RecipeError
from fsdptrain.inference.load_model import OpenedModel
from fsdptrain.model.config import position_limit
from fsdptrain.processes import Interrupted, StopRequest

EXIT = "/exit"
NEW = "/new"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: at most `max_tokens`; the most likely ones if the temperature is 0."""

    max_tokens: int
    temperature: float
    seed: int


class Dialogue:
    """A conversation with a model, or continuations of texts where a chat template is not what it was trained with."""

    def __init__(self, opened: OpenedModel, sampling: Sampling, source: str | None = None) -> None:
        """Begin a conversation, in which prompts are those of a source of the run, by default `prompt_source`.

        The seed is set once, so that the same inputs get the same answers. Raises RecipeError for an unknown source.
        """
        self.opened, self.sampling = opened, sampling
        self.source = opened.source(source)
        self.data = self.source.data if self.source else None
        self.is_chat = renders_chat(opened.tokenizer, self.data)
        self.messages: list[Message] = []
        torch.manual_seed(sampling.seed)

    @property
    def usage(self) -> str:
        """What to type, in one sentence."""
        kind = "each line is a message" if self.is_chat else "each line is a text that the model continues"
        if self.source and self.opened.data and self.opened.data.sources:
            kind += f", as in the rows of {self.source.name}"
        new = f"; {NEW} begins a new conversation" * self.is_chat
        return f"{kind}; Ctrl-C ends an answer, Ctrl-D or {EXIT} the dialogue{new}"

    def answer(self, text: str, stopped: Callable[[], bool] = lambda: False) -> str:
        """Print the answer to a message as it is written, until `stopped` returns True; return it.

        Raises RecipeError if the conversation is longer than the model's positions.
        """
        opened, tokenizer = self.opened, self.opened.tokenizer
        if not self.is_chat:
            self.messages.clear()
        self.messages.append({"role": "user", "content": text})
        ids = prompt_tokens(tokenizer, self.messages, self.data, opened.day(self.data))
        limit = position_limit(opened.model.config)
        if not ids or (limit is not None and len(ids) >= limit):
            self.messages.pop()
            raise RecipeError(f"{len(ids):,} tokens, and the model has {limit:,} positions" if ids else "no tokens")
        inputs = torch.tensor([ids], device=opened.model.device)
        most = self.sampling.max_tokens if limit is None else min(self.sampling.max_tokens, limit - len(ids))
        temperature = self.sampling.temperature
        how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        ends = end_tokens(tokenizer, opened.model.generation_config)

        def is_stopped(ids: torch.Tensor, scores: Any) -> torch.Tensor:
            return torch.full(ids.shape[:1], stopped(), device=ids.device)

        output: Any = opened.model.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=most, **how,
            eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            stopping_criteria=StoppingCriteriaList([is_stopped]),
        )  # fmt: skip
        written = str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": written})
        return written


def talk(dialogue: Dialogue) -> None:
    """Answer each line of standard input until it ends or is /exit; Ctrl-C ends the answer that is being written."""
    for line in lines_of_user():
        if line.strip() == NEW:
            dialogue.messages.clear()
            continue
        with StopRequest() as stop:
            try:
                dialogue.answer(line, lambda: stop.count > 0)
            except RecipeError as error:
                print(f"{error}; {NEW} begins a new conversation", file=sys.stderr)
            if stop.count and stop.name != "SIGINT":  # the terminal is gone, or the system shuts down
                return


def lines_of_user() -> Iterator[str]:
    """Yield what the user types, without empty lines, up to /exit, Ctrl-D, or Ctrl-C at the prompt."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # from then on `input` edits lines
    while True:
        try:
            line = input(prompt)
        except (EOFError, Interrupted):
            if prompt:
                print()
            return
        if line.strip() == EXIT:
            return
        if line.strip():
            yield line
