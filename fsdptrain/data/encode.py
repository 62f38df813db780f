"""Rows of text, prompts with completions, or conversations → token ids, and which of them are trained.

A row is one text, encoded as a whole, so that its tokens are those that the tokenizer gives for that text. What is
trained is a span of its characters. Where a token crosses the edge of a span the text is cut there, and the rest is
encoded as a continuation, which is what a model sees that continues a prompt.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import date
from typing import Any

from tokenizers import Tokenizer

from fsdptrain.config.mixture import prompt_source
from fsdptrain.config.schema import Data, Recipe
from fsdptrain.data.chat import ConversationRenderer, Rendered
from fsdptrain.data.columns import Message, prompts_and_trained
from fsdptrain.errors import DataError, Problem, RecipeError, first_line, is_panic
from fsdptrain.text import counted

TRAINED = 1  # in the flags of a row
# What is counted of turns, and what a note says of it.
OF_TURNS = {
    "endless": "trained without an end: the chat template writes none, so that the model does not learn to stop there",
    "shortened": "trained without a thought, or another part of the content, that the chat template leaves out "
    "(data.turns: split may keep that of an earlier turn)",
    "cut_content": "of others than the assistant: the chat template leaves out the beginning or the end of the content",
    "cut_tools": "with tools of which the chat template leaves out a part, such as a description or a parameter",
    "unmarked": "not trained: the {% generation %} marks of the chat template leave them out",
}
POLL_S = 0.2
Row = tuple[list[int], bytes]  # tokens; a flag for each: 1 where it is trained
Located = tuple[list[int], list[int]]  # tokens of a text; for each edge in it, how many tokens stand before it


class Encoder:
    """Encodes rows of one format as tokens and flags, and counts the rows that are dropped.

    `day` is what a chat template sees as today. While the tokenizer works, `tick` is called, which may raise.

    Raises DataError for a tokenizer without an end-of-sequence token, and for one that fails on a text.
    """

    def __init__(
        self, tokenizer: Any, data: Data, day: date | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        self.tokenizer, self.data, self.tick = tokenizer, data, tick
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError("model.tokenizer: has no end-of-sequence token, which every row has to end with")
        self.eos = int(tokenizer.eos_token_id)
        self.prefix = prefix_tokens(tokenizer)  # the call also turns truncation and padding off in the backend
        self.added = tuple(sorted(tokenizer.get_added_vocab(), key=len, reverse=True))
        self.any_added = re.compile("|".join(map(re.escape, self.added)) or "(?!)")
        found = tokenizer.added_tokens_decoder
        self.added_ids = frozenset(found)
        self.taking_space = tuple(token.content for token in found.values() if token.rstrip)
        self.continuing = _without_prefix_space(self.backend)
        self.render_conversation: ConversationRenderer | None = None
        if data.format.is_chat or (data.format.answers and tokenizer.chat_template):
            self.render_conversation = ConversationRenderer(tokenizer, data, day)
        self.lengths = array("I")  # tokens of each row, or of both answers of a pair
        self.dropped = 0
        self.notes = self.render_conversation.notes if self.render_conversation else Counter[str]()
        self.conversation = 0  # number of the conversation that is encoded
        self.conversations = array("I")  # that of each row that is kept

    def __call__(self, rows: list[dict[str, Any]]) -> Iterator[Row]:
        """Encode a batch of rows; rows without a trained token are dropped and counted.

        The two answers of a pair, which follow one another, are kept or dropped together.
        """
        rendered = [self._render(row) for row in rows]
        encoded = self._encode_masked([each for made in rendered for each in made])
        for row, made in zip(rows, rendered, strict=True):
            self.conversation += 1
            found: Iterator[Row] = itertools.islice(encoded, len(made))
            if "place" not in row:  # for a conversation, the template decides what begins and ends it
                found = itertools.starmap(self._with_begin_and_end, found)
            if self.data.format.has_label:  # see `corpus.EncodedRows`
                found = ((ids, bytes([row["label"]]) + mask[1:]) for ids, mask in found)
            for whole in zip(*[found] * self.data.format.rows, strict=True):
                self.lengths.append(sum(len(ids) for ids, _ in whole))
                if all(TRAINED in mask[1:] for _, mask in whole):
                    self.conversations.extend([self.conversation] * len(whole))
                    yield from whole
                else:
                    self.dropped += 1

    def _render(self, row: dict[str, Any]) -> list[Rendered]:
        """Return the texts that a row becomes, with the spans to train: a pair two, a conversation perhaps several."""
        data, form, render = self.data, self.data.format, self.render_conversation
        if "place" in row:
            if render is None:
                raise DataError(
                    f"{row['place']}: the tokenizer has no chat template, which messages need: set data.chat_template"
                )
            prompt = row["prompt"] if form.answers else []
            talks = [prompt + row[field] for field in form.text_fields]
            return [each for talk in talks for each in render(talk, row.get("tools"), row["place"], len(prompt))]
        is_all = not form.answers and (data.train_on == "all" or not form.has_prompt)
        parts = prompts_and_trained(row, data)
        return [(before + last, [(0 if is_all else len(before), len(before + last))]) for before, last in parts]

    def _with_begin_and_end(self, ids: list[int], mask: bytes) -> Row:
        """Add the tokens that the tokenizer puts before every text, and a trained end of sequence, where missing."""
        if ids[: len(self.prefix)] != self.prefix:
            ids, mask = self.prefix + ids, b"\0" * len(self.prefix) + mask
        return (ids, mask) if ids[-1:] == [self.eos] else ([*ids, self.eos], mask + b"\1")

    def _encode(self, texts: list[str]) -> Iterable[list[int]]:
        # Without offsets and attention masks, which takes half the time.
        return (found.ids for found in encoded_apart(self.backend.encode_batch_fast, texts, self.tick))

    def _encode_masked(self, rendered: list[Rendered]) -> Iterator[Row]:
        """Encode texts; the tokens inside one of a text's spans are trained."""
        texts = [text for text, _ in rendered]
        if all(span == (0, len(text)) for text, spans in rendered for span in spans):
            for (_, spans), ids in zip(rendered, self._encode(texts), strict=True):
                yield ids, (b"\1" if spans else b"\0") * len(ids)
            return
        every = encoded_apart(self.backend.encode_batch, texts, self.tick)
        for (text, spans), found in zip(rendered, every, strict=True):
            edges = sorted({edge for span in spans for edge in span})
            ids, counts = self._locate(found, text, edges)
            before = dict(zip(edges, counts, strict=True))
            mask = bytearray(len(ids))
            for a, b in spans:
                mask[before[a] : before[b]] = b"\1" * (before[b] - before[a])
            yield ids, bytes(mask)

    def _locate(self, found: Any, text: str, edges: list[int]) -> Located:
        edges = [self._beside_added(found, edge, text) for edge in edges]
        counts = [_tokens_before(found, edge, len(text)) for edge in edges]
        located = [count for count in counts if count is not None]
        return (found.ids, located) if len(located) == len(edges) else self._encode_in_parts(found, text, edges)

    def _beside_added(self, found: Any, edge: int, text: str) -> int:
        """Return an edge in the white space that an added token takes (`lstrip`, `rstrip`) as one beside that token."""
        token = found.char_to_token(edge) if 0 < edge < len(text) else None
        if token is None or found.ids[token] not in self.added_ids:
            return edge
        begin, end = found.token_to_chars(token)
        if begin != edge and not text[edge:end].strip():
            return int(end)
        if begin != edge and not text[begin:edge].strip():
            return int(begin)
        return edge

    def _encode_in_parts(self, found: Any, text: str, edges: list[int]) -> Located:
        """Encode a text in parts, cut at its edges; as a whole when the parts decode to another text.

        WordPiece, for example, has no tokens for the continuation of a cut word. There a token that crosses an edge
        counts as behind it.
        """
        bounds = [0, *edges, len(text)]
        parts = [
            self._encode_continuation(text[:a], text[a:b]) if a else self._encode_one(text[:b])
            for a, b in itertools.pairwise(bounds)
        ]
        ids = list(itertools.chain.from_iterable(parts))
        if self.tokenizer.decode(ids) == self.tokenizer.decode(found.ids):
            return ids, list(itertools.accumulate(len(part) for part in parts[:-1]))
        return found.ids, [sum(1 for _, end in found.offsets if end <= edge) for edge in edges]

    def _encode_one(self, text: str) -> list[int]:
        return next(iter(self._encode([text])))

    def _encode_continuation(self, before: str, text: str) -> list[int]:
        """Encode a text that follows another: without the space that some tokenizers put before every text.

        Some also put it behind every added token; there the text is encoded together with that token.
        """
        if (stripped := before.rstrip()).endswith(self.taking_space):
            before = stripped
        if before.endswith(self.added):
            token = next(token for token in self.added if before.endswith(token))
            return self._encode_one(token + text)[len(self._encode_one(token)) :]
        special = self.any_added.search(text)
        head = text[: special.start()] if special else text
        ids: list[int] = encoded_apart(self.continuing.encode_batch_fast, [head], self.tick)[0].ids
        return ids + self._encode_one(text[len(head) :]) if len(head) < len(text) else ids


def encoded_apart(
    encode: Callable[..., Any], texts: Sequence[str], tick: Callable[[], None] = lambda: None, specials: bool = False
) -> Any:
    """Return what `encode` makes of some texts in another thread, so that this one handles signals and calls `tick`.

    Raises DataError where a tokenizer in Rust panics, with the text.
    """
    found = Future[Any]()

    def work() -> None:
        try:
            found.set_result(encode(texts, add_special_tokens=specials))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # if it never ends, the process can
    while not wait([found], POLL_S).done:
        tick()
    error = found.exception()
    if error is None or not is_panic(error):
        return found.result()
    for text in texts if len(texts) > 1 else ():  # find the one
        encoded_apart(encode, [text], tick, specials)
    raise DataError(
        f"model.tokenizer: its rules fail ({first_line(error)}) on a text that begins {texts[0][:120]!r}: remove the "
        "text, or use another tokenizer"
    )


def renders_chat(tokenizer: Any, data: Data | None) -> bool:
    """Return whether a chat template renders prompts; None or preferences, which may be texts: if there is one."""
    return data.format.is_chat if data and not data.format.answers else tokenizer.chat_template is not None


def prompt_tokens(tokenizer: Any, messages: list[Message], data: Data | None, day: date | None = None) -> list[int]:
    """Return the tokens behind which a model that was trained on rows of `data` answers the last of the messages.

    Only a chat template renders the messages before it. Raises DataError if it rejects them.
    """
    if renders_chat(tokenizer, data):
        text = ConversationRenderer(tokenizer, data or Data(), day).prompt(messages)
        return [*encoded_apart(tokenizer, [text]).input_ids[0]]
    text = messages[-1]["content"] + (data.separator if data else "")
    prefix, ids = prefix_tokens(tokenizer), encoded_apart(tokenizer, [text]).input_ids[0]
    return [*ids] if ids[: len(prefix)] == prefix else [*prefix, *ids]


def end_tokens(tokenizer: Any, generation_config: Any) -> list[int]:
    """Return the tokens that end an answer, by the tokenizer and by the model's configuration."""
    ends = getattr(generation_config, "eos_token_id", None)
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(token for token in found if token is not None)


def evaluated_prompts(recipe: Recipe, tokenizer: Any, day: date | None = None) -> list[list[int]]:
    """Return the tokens of `eval.prompts`. Raises RecipeError for one that leaves no room in a sequence."""
    data, room = prompt_source(recipe.data).data, recipe.data.seq_len - recipe.eval.max_new_tokens
    found = []
    for number, text in enumerate(recipe.eval.prompts):
        found.append(prompt_tokens(tokenizer, [{"role": "user", "content": text}], data, day))
        if not 0 < (count := len(found[-1])) <= room:
            reason = (
                f"its {counted(count, 'token')} and the {recipe.eval.max_new_tokens:,} of eval.max_new_tokens are more "
                f"than data.seq_len ({recipe.data.seq_len:,}): shorten one of them"
            )
            raise RecipeError(
                [Problem(reason if count else "it has no tokens: leave it out", f"eval.prompts[{number}]")]
            )
    return found


def prefix_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text: `<s>`, `[gMASK]<sop>`, or none."""
    plain, whole = (encoded_apart(tokenizer, ["a"], specials=added).input_ids[0] for added in (False, True))
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return [int(token) for token in whole[:at]]


def _without_prefix_space(backend: Tokenizer) -> Tokenizer:

    def spaceless(rule: Any) -> Any:
        if isinstance(rule, list):
            return [spaceless(part) for part in rule if not (isinstance(part, dict) and part.get("type") == "Prepend")]
        if not isinstance(rule, dict):
            return rule
        changes: dict[str, dict[str, Any]] = {
            "Metaspace": {"prepend_scheme": "never"},
            "ByteLevel": {"add_prefix_space": False},
        }
        return {name: spaceless(part) for name, part in rule.items()} | changes.get(str(rule.get("type")), {})

    rules = json.loads(backend.to_str())
    if (rules["normalizer"] or {}).get("type") == "Prepend":
        rules["normalizer"] = None
    rules |= {name: spaceless(rules[name]) for name in ("normalizer", "pre_tokenizer")}
    copy: Tokenizer = Tokenizer.from_str(json.dumps(rules))
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy


def _tokens_before(found: Any, edge: int, size: int) -> int | None:
    """Return how many tokens of an encoded text of `size` characters precede an edge; None when a token crosses it.

    Offsets may leave out white space (`trim_offsets`): a space at the beginning of a token counts as part of it.
    """
    if edge in (0, size):
        return 0 if edge == 0 else len(found)
    token = next((t for c in range(edge, size) if (t := found.char_to_token(c)) is not None), None)
    if token is None:
        return None
    if token == 0:
        return 0 if found.token_to_chars(0)[0] >= edge else None
    return token if found.token_to_chars(token)[0] >= edge == found.token_to_chars(token - 1)[1] else None
