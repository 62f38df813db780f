"""Rows → tokens with four families of tokenizers: the tokens of the whole text, of which the completion is trained.

The reference is the tokenizer on the whole text, with offsets: a token belongs to the completion when it ends in it.
"""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support import GSM8K
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fsdptrain.config.formats import Format
from fsdptrain.config.schema import Data
from fsdptrain.data.encode import Encoder, encoded_apart, prefix_tokens, prompt_tokens
from fsdptrain.data.tokenizer import tokenizer_digest
from fsdptrain.errors import DataError
from fsdptrain.processes import Interrupted, interrupt

PROBLEMS = [json.loads(line) for line in GSM8K.read_text().splitlines()][:90]
CODE = [
    ("def f():\n", "    return 1"), ("What is 2+2?\n", "4"), ("Q:", " A"), ("Q: ", "A"), ("Q:\n\n", "\n  A"),
    ("", "alone"), ("x", "y"), ("東京", "です🙂"), ("a  ", "  b"), ("one\ttwo", "three"), ("end.", "</s>"),
    ("e", "\u0301"),
]  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLE_LINES = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # noqa: E501
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
USUAL: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}  # of every trainer


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizers are trained on."""
    for problem in PROBLEMS:
        yield problem["question"] + "\n" + problem["answer"]
    yield from (prompt + completion for prompt, completion in CODE)


def byte_level(trim: bool) -> Tokenizer:
    """Return a tokenizer like GPT-2's and Llama 3's; with `trim`, offsets leave out a token's space, as theirs do."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, **USUAL))
    return made


def metaspace(scheme: str | None) -> Tokenizer:
    """Return a tokenizer like Llama 2's, BPE with byte fallback; None: with a normalizer, as in older files."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme is None:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    # Trained on lines, so that no token contains a line break, with every byte in the vocabulary.
    lines = (line for text in texts() for line in text.split("\n"))
    with_bytes = USUAL | {"special_tokens": SPECIAL + bytes_}
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=900, **with_bytes))
    plain = json.loads(made.to_str())  # bytes are not special tokens
    plain["added_tokens"] = plain["added_tokens"][: len(SPECIAL)]
    return Tokenizer.from_str(json.dumps(plain))


def unigram() -> Tokenizer:
    """Return a tokenizer like T5's and XLM's: Unigram over words, with a space before each."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(texts(), trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", **USUAL))
    return made


def word_piece() -> Tokenizer:
    """Return a tokenizer like BERT's: no white space, and other tokens inside a word than at its beginning."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(texts(), trainers.WordPieceTrainer(vocab_size=900, **USUAL))
    return made


MAKERS = {
    "byte-level": lambda: byte_level(False), "byte-level, trimmed": lambda: byte_level(True),
    "Metaspace, first": lambda: metaspace("first"), "Metaspace, always": lambda: metaspace("always"),
    "Prepend": lambda: metaspace(None), "Unigram": unigram, "WordPiece": word_piece,
}  # fmt: skip
LOSSLESS = ["byte-level", "byte-level, trimmed", "Metaspace, first", "Metaspace, always", "Prepend"]


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Return a tokenizer of each family."""
    made = MAKERS[request.param]()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    wrapped.family = request.param
    return wrapped


def encoded(tokenizer: Any, rows: list[dict[str, Any]], **data: Any) -> list[tuple[list[int], bytes]]:
    """Return rows as tokens and flags; checks that none is dropped."""
    places = [{"place": "rows.jsonl:1"} if "messages" in row else {} for row in rows]
    encoder = Encoder(tokenizer, Data(seq_len=10**6, **data))
    found = list(encoder([place | row for place, row in zip(places, rows, strict=True)]))
    assert len(found) == len(rows)
    return found


def by_offsets(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """Return the reference: tokens of the whole text, and whether each ends in a span."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return found.input_ids, [any(a < end <= b for a, b in spans) for _, end in found.offset_mapping]


@pytest.mark.parametrize("separator", ["", "\n", " "])
def test_prompts_and_completions_are_the_tokenizers_own_tokens(tokenizer: Any, separator: str) -> None:
    rows = [{"prompt": p["question"] + ("" if separator else "\n"), "completion": p["answer"]} for p in PROBLEMS]
    for row, (ids, mask) in zip(
        rows, encoded(tokenizer, rows, format=Format.prompt_completion, separator=separator), strict=True
    ):
        before = row["prompt"] + separator
        whole, labels = by_offsets(tokenizer, before + row["completion"], [(len(before), 10**9)])
        if separator == " ":  # a part of the next word's token, from which it has to be split here
            assert tokenizer.decode(ids[:-1]) == tokenizer.decode(whole)
            continue
        assert ids == [*whole, tokenizer.eos_token_id]
        assert list(mask) == [*labels, True]


def test_texts_are_the_tokenizers_own_tokens(tokenizer: Any) -> None:
    rows = [{"text": text} for text in texts()]
    for row, (ids, _) in zip(rows, encoded(tokenizer, rows, format=Format.text), strict=True):
        own = tokenizer(row["text"]).input_ids
        assert ids == (own if own[-1] == tokenizer.eos_token_id else [*own, tokenizer.eos_token_id])


@pytest.mark.parametrize(("prompt", "completion"), CODE)
def test_the_decoded_row_is_the_text(tokenizer: Any, prompt: str, completion: str) -> None:
    [(ids, mask)] = encoded(tokenizer, [{"prompt": prompt, "completion": completion}], format=Format.prompt_completion)
    body = ids[:-1] if completion != "</s>" else ids
    whole = tokenizer(prompt + completion, add_special_tokens=False).input_ids
    assert tokenizer.decode(body) == tokenizer.decode(whole)
    if tokenizer.family in LOSSLESS and prompt != "e":
        assert tokenizer.decode(body) == prompt + completion
        asked = ids[: mask.index(1)]
        assert tokenizer.decode(asked) == prompt
        if prompt and completion != "</s>":  # generation begins with these tokens
            assert tokenizer.decode([*tokenizer(prompt, add_special_tokens=False).input_ids]) == prompt


@pytest.mark.parametrize("template", [CHATML, ROLE_LINES], ids=["chatml", "role lines"])
def test_conversations_are_the_templates_text(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    rows = [
        {"messages": [{"role": "user", "content": p["question"]}, {"role": "assistant", "content": p["answer"]}] * 2}
        for p in PROBLEMS[:30]
    ]
    end = "<|im_end|>" if template == CHATML else "</s>"
    counts = [0, 0]
    for row, (ids, mask) in zip(rows, encoded(tokenizer, rows, format=Format.chat), strict=True):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        answer, at, spans = row["messages"][1]["content"] + end, 0, []
        for _ in range(2):
            at = text.index(answer, at)
            spans.append((at, at := at + len(answer)))
        whole, labels = by_offsets(tokenizer, text, spans)
        assert tokenizer.decode(ids) == tokenizer.decode(whole)
        counts[0] += sum(mask)
        counts[1] += sum(labels)
        if template == CHATML:
            assert ids == whole and list(mask) == labels
        elif tokenizer.family in LOSSLESS:  # the prompt ends with a space, where a token is cut
            assert tokenizer.decode([t for t, flag in zip(ids, mask, strict=True) if flag]) == answer * 2
    assert counts[0] == counts[1] if template == CHATML else abs(counts[0] / counts[1] - 1) < 0.01


@pytest.mark.parametrize("strips", ["rstrip", "lstrip", "both"])
def test_no_end_is_lost_in_white_space_that_an_added_token_takes(tokenizer: Any, strips: str) -> None:
    """As those of Phi-3, with `rstrip`: the reference is the tokenizer on the whole text."""
    sides = {"lstrip": strips != "rstrip", "rstrip": strips != "lstrip"}
    taking = copy.deepcopy(tokenizer)
    taking.add_special_tokens({
        "extra_special_tokens": [AddedToken(f"<|{name}|>", normalized=False, special=True, **sides)
                                 for name in ("user", "assistant", "end")]
    })  # fmt: skip
    taking.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    for answer in ("Answer", " Answer", "\n\n Answer \n", " ", ""):
        talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(["Hi", answer] * 2)]
        [(ids, mask)] = encoded(taking, [{"messages": talk}], format=Format.chat)
        whole = taking(taking.apply_chat_template(talk, tokenize=False), add_special_tokens=False).input_ids
        trained = [token for token, flag in zip(ids, mask, strict=True) if flag]
        ends = [i for i, token in enumerate(ids) if token == taking.convert_tokens_to_ids("<|end|>")]
        assert [mask[i] for i in ends] == [0, 1, 0, 1]
        assert taking.decode(trained).replace(" ", "").replace("\n", "") == f"{answer.strip()}<|end|>" * 2
        if strips != "lstrip":  # else a token with both `\n` before an answer and white space of it is cut
            assert ids == whole


@pytest.mark.parametrize("begin", [["<s>"], ["[gMASK]", "<sop>"], []], ids=["bos", "GLM", "none"])
def test_a_row_begins_as_the_tokenizer_begins_a_text(begin: list[str]) -> None:
    made = byte_level(False)
    made.add_special_tokens([AddedToken(token, special=True) for token in ("[gMASK]", "<sop>")])
    if begin:
        ids = [(token, made.token_to_id(token)) for token in begin]
        made.post_processor = processors.TemplateProcessing(single=" ".join([*begin, "$A"]), special_tokens=ids)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert wrapped.convert_ids_to_tokens(prefix_tokens(wrapped)) == begin
    for text in ("Hello there", "".join(begin) + "Hello there"):
        [(ids, _)] = encoded(wrapped, [{"text": text}])
        [(again, mask)] = encoded(wrapped, [{"prompt": text, "completion": " you"}], format=Format.prompt_completion)
        assert ids == [*wrapped("Hello there").input_ids, wrapped.eos_token_id]
        assert again == [*wrapped("Hello there you").input_ids, wrapped.eos_token_id]
        assert [wrapped.decode([t]) for t, flag in zip(again, mask, strict=True) if flag][-1] == "</s>"


def test_the_digest_covers_all_that_makes_tokens(tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(False), eos_token="</s>")
    fast.save_pretrained(tmp_path / "fast")
    split = AutoTokenizer.from_pretrained(tmp_path / "fast", split_special_tokens=True)
    assert fast("a</s>").input_ids != split("a</s>").input_ids
    rows = [{"prompt": "x", "completion": "</s>a"}]
    [(plain, _)], [(parted, _)] = (encoded(each, rows, format=Format.prompt_completion) for each in (fast, split))
    assert plain == [*fast("x</s>a").input_ids, fast.eos_token_id]
    assert parted == [*split("x</s>a").input_ids, split.eos_token_id]
    each = [fast, split, PreTrainedTokenizerFast(tokenizer_object=byte_level(True), eos_token="</s>")]
    digests = [tokenizer_digest(one) for one in each]
    assert len(set(digests)) == len(each)
    assert digests == [tokenizer_digest(one) for one in each]


BACKTRACKING = pre_tokenizers.Split(Regex(r"\b(a|aa)+$"), "isolated")


def test_a_tokenizer_that_panics_is_an_error_that_shows_the_text() -> None:
    """A panic of Rust is no Exception of Python."""
    made = byte_level(trim=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([BACKTRACKING, made.pre_tokenizer])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    hostile = "a" * 100 + "!"
    rows = [{"text": text} for text in ("one", hostile, "two")]
    message = rf"model\.tokenizer: its rules fail \(.*retry-limit.*\) on a text that begins '{'a' * 99}"
    with pytest.raises(DataError, match=message):
        list(Encoder(tokenizer, Data(seq_len=64))(rows))
    with pytest.raises(DataError, match=message):
        prompt_tokens(tokenizer, [{"role": "user", "content": hostile}], None)


def test_a_signal_ends_the_wait_for_a_tokenizer_that_does_not_end() -> None:
    """Python handles signals between its own instructions only."""
    released = Event()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            encoded_apart(lambda texts, **_: released.wait(), ["text"])
    finally:
        signal.signal(signal.SIGALRM, before)
        released.set()

    def tick() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        encoded_apart(lambda texts, **_: Event().wait(60), ["text"], tick)
