"""What is trained of a conversation: the assistant's content and its end-of-turn token in every turn, nothing else.

The expected texts are written by hand for every template (`chat_templates.Family.turn`) and compared with the decoded
trained tokens.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, OMITTED, Family

from fsdptrain.config.formats import Format
from fsdptrain.config.schema import Data
from fsdptrain.data.chat import ConversationRenderer, earlier_turns_differ
from fsdptrain.data.columns import read_rows
from fsdptrain.data.encode import Encoder
from fsdptrain.data.sources import open_sources
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.errors import DataError

Talk = list[dict[str, Any]]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
CALL = {"type": "function", "id": "123456789", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}


@cache
def tokenizer_of(name: str) -> Any:
    """Return a byte-level BPE with a family's special tokens and its template."""
    family = FAMILIES[name]
    return tokenizer_with(family.template, family.tokens, family.bos, family.stops)


def tokenizer_with(template: str, tokens: tuple[str, ...], bos: str | None = None, stops: tuple[str, ...] = ()) -> Any:
    """Return a byte-level BPE with any template; the first of `tokens` is the end of a sequence."""
    tokenizer = train_bpe(iter(["Hello there, how are you? Assistant: User: answer the question\n\n" * 3]), 300)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.eos_token = tokens[0]
    if bos:
        tokenizer.bos_token = bos
    tokenizer.chat_template = template
    tokenizer.stop_tokens = list(stops)
    return tokenizer


def whole_text(tokenizer: Any, talk: Talk, tools: Any = None) -> str:
    """Return what the template renders, with the token of the next role where that has to end the last turn."""
    text: str = tokenizer.apply_chat_template(talk, tools=tools, tokenize=False)
    if "<|observation|>" in tokenizer.stop_tokens and talk[-1]["role"] == "assistant" and talk[-1].get("weight", 1):
        return text + ("<|observation|>" if "tool_calls" in talk[-1] else "<|user|>")
    return text


def trained(tokenizer: Any, talk: Talk, tools: Any = None, **data: Any) -> list[str]:
    """Return the trained parts of a conversation, decoded; checks that its text is what the template renders."""
    _, rows = encode(tokenizer, talk, tools=tools, **data)
    if not rows:
        return []
    [(ids, mask)] = rows
    assert tokenizer.decode(ids) == (
        whole_text(tokenizer, talk, tools)
        if data.get("train_on") != "all"
        else tokenizer.apply_chat_template(talk, tools=tools, tokenize=False)
    )
    return runs_of(tokenizer, ids, mask)


def encode(tokenizer: Any, *talks: Talk, tools: Any = None, **data: Any) -> tuple[Encoder, list[Any]]:
    """Return an encoder and what it makes of conversations: rows of tokens with their flags."""
    encoder = Encoder(tokenizer, Data(format=Format.chat, seq_len=4096, **data))
    rows = [{"messages": talk, "tools": tools, "place": "talks.jsonl:1"} for talk in talks]
    return encoder, list(encoder(rows))


def runs_of(tokenizer: Any, ids: list[int], mask: Sequence[int]) -> list[str]:
    runs = itertools.groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [tokenizer.decode([token for token, _ in run]) for flag, run in runs if flag]


def expected(family: Family, talk: Talk) -> list[str]:
    """Return what the family's template makes of the assistant's turns, as written by hand."""
    turns = []
    for i, message in enumerate(talk):
        if message["role"] == "assistant":
            content = message["content"].strip() if family.trims else message["content"]
            frame = family.last_turn if family.last_turn and i + 1 == len(talk) else family.turn
            turns.append(frame.format(content))
    return turns


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def talk_of(*words: str, system: str | None = None) -> Talk:
    """Return a conversation that the user begins."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]
    return ([{"role": "system", "content": system}] if system else []) + turns


TALKS = {
    "one turn": talk_of("Hi there", "Hello you"),
    "three turns": talk_of("Hi", "Hello, who?", "Romeo", "O Romeo, Romeo!", "Yes?", "Deny thy father"),
    "system": talk_of("Count", "one two three", "On", "four five", system="Be brief."),
    "user last": talk_of("Hi", "Hello", "Bye"),
    "equal words": talk_of("Hello", "Hello", "Hello", "Hello", system="Hello"),
    "words of the user": talk_of("Say A and B", "A", "B and Say A", "Say A and B", "A", "B"),
    "not ASCII": talk_of("東京は?", "首都です。🙂", "é?", "naïve – “yes”"),
    "lines": talk_of("A list?", "1. one\n2. two\n\n- three", "more", "```\ncode\n```"),
    "markup": talk_of("<b>Hi</b>", "<b>Ho</b> [x] {y} <|z|>", "{{ m }}", "{% for %} \\n"),
    "empty questions": talk_of("", "Hello", "", "Bye"),
}
WELCOME = {"role": "assistant", "content": "Welcome"}
UNUSUAL: dict[str, tuple[Talk, tuple[str, ...]]] = {  # and the families that render it in a way of their own, or not
    "the assistant first": ([WELCOME, *talk_of("Hi", "Hello")], ("mistral", "gemma3", "command-a", "gpt-oss")),
    "twice": ([*talk_of("Hi", "Hello"), WELCOME], ("mistral", "gemma3", "metharme", "glm4.5")),
    "an empty answer": (talk_of("Hi", "", "What?", "Nothing."), ("metharme", "glm4.5")),
    "two system messages": ([{"role": "system", "content": "One."}, *talk_of("Hi", "Ho", system="Two.")],
                            ("mistral", "gemma3", "qwen3.5")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_assistant_is_trained(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    talks = TALKS | {title: talk for title, (talk, odd) in UNUSUAL.items() if not name.startswith(odd)}
    for title, talk in talks.items():
        assert trained(tokenizer, talk) == expected(family, talk), title
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        assert trained(tokenizer, talk, train_on="all") == [text]
    in_parts = [{**message, "content": parts(message["content"])} for message in TALKS["three turns"]]
    text_of_parts, same = encode(tokenizer, in_parts, TALKS["three turns"])[1]
    assert text_of_parts == same, "a content in one part is its text"


SPACED = [" ", "\n", "\n\n  ", "\t"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "falcon"])
def test_white_space_is_trained_with_the_content_that_has_it(name: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    draw = random.Random(name)
    for _ in range(6):
        words = [draw.choice(SPACED) + word + draw.choice(SPACED) for word in ("first", "second", "third", "fourth")]
        talk = talk_of(*words)
        if name == "qwen3":
            words[3] = words[3].lstrip()  # its template strips the last turn
            talk = talk_of(*words)
        assert trained(tokenizer, talk) == expected(family, talk)


WITH_TOOLS = [name for name, family in FAMILIES.items() if family.call]


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("content", [{}, {"content": ""}])
def test_a_call_of_a_tool_is_trained(name: str, content: dict[str, str]) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    talk = [
        {"role": "user", "content": "The weather in Paris?"},
        {"role": "assistant", **content, "tool_calls": [CALL]},
        {"role": "tool", "content": "18 degrees", "tool_call_id": "123456789", "name": "get_weather"},
        {"role": "assistant", "content": "It is 18 degrees."},
    ]
    assert family.call is not None
    call = family.call
    if name == "qwen2.5":
        call = "\n" + call  # its prompt ends with the line break that it writes again before its calls
    answer = (family.last_turn or family.turn).format("It is 18 degrees.")
    runs = trained(tokenizer, talk, TOOLS)
    assert [run.lstrip("\n") for run in runs] == [call.lstrip("\n"), answer.lstrip("\n")]
    assert [run.lstrip("\n") for run in trained(tokenizer, talk[:2], TOOLS)][-1].endswith(call.lstrip("\n"))


def test_thoughts_in_a_content_are_trained_if_the_template_keeps_them_and_else_counted() -> None:
    last, end = "<think>\nagain\n</think>\n\nStill 42.", "<｜end▁of▁sentence｜>"
    talk = talk_of("6 × 7?", "<think>\nsix\n</think>\n\n42", "Sure?", last)
    field = [*talk[:3], {"role": "assistant", "content": "Still 42.", "reasoning_content": "again"}]
    gemma = talk_of("6 × 7?", "<|channel>thought\nsix<channel|>\n 42 ", "Sure?", "kept <|channel>x<channel|>Still 42.")
    for name, messages, turns, cut in (
        ("qwen3", talk, ["42<|im_end|>", last + "<|im_end|>"], 1),
        ("qwen3", field, ["42<|im_end|>", last + "<|im_end|>"], 1),
        ("deepseek r1", talk, ["\n\n42" + end, "\n\nStill 42." + end], 2),
        ("gemma4", gemma, ["42<turn|>", "kept Still 42.<turn|>"], 2),
        ("chatml", talk, [talk[1]["content"] + "<|im_end|>", last + "<|im_end|>"], 0),
    ):
        encoder, [(ids, mask)] = encode(tokenizer_of(name), messages)
        assert runs_of(tokenizer_of(name), ids, mask) == turns and encoder.notes["shortened"] == cut, name


THINKERS = {
    "qwen3.5": ("42<|im_end|>", "Again.\n</think>\n\nYes.<|im_end|>"),
    "glm4.5": ("\n<think></think>\n42<|user|>", "\n<think>Again.</think>\nYes.<|user|>"),
    "gpt-oss": ("<|channel|>final<|message|>42<|end|>", "<|channel|>analysis<|message|>Again.<|end|><|start|>"
                          "assistant<|channel|>final<|message|>Yes.<|return|>"),
}  # fmt: skip


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", THINKERS)
def test_a_thought_that_is_rendered_is_trained_and_others_are_counted(name: str, key: str) -> None:
    """The prompt of Qwen3.5 closes a thought, which the turn has: the reference is what they have in common."""
    tokenizer = tokenizer_of(name)
    talk: Talk = talk_of("6 × 7?", "42", "Sure?", "Yes.")
    talk[1][key], talk[3][key] = "I multiply.", "Again."
    encoder, [(ids, mask)] = encode(tokenizer, talk)
    assert runs_of(tokenizer, ids, mask) == [*THINKERS[name]]
    assert encoder.notes["shortened"] == 1 and encoder.notes["endless"] == 0
    encoder, rows = encode(tokenizer, talk, turns="split")
    assert len(rows) == 2 and not encoder.notes["shortened"]


def test_turns_without_an_end_to_learn_are_counted() -> None:
    """The next role's token ends those of GLM, if the model's configuration says so."""
    family, talk = FAMILIES["glm4.5"], TALKS["three turns"]
    for name, stops, endless in [("stopped", family.stops, 0), ("not known", (), 3)]:
        tokenizer = tokenizer_with(family.template, family.tokens, stops=stops)
        encoder, [(ids, mask)] = encode(tokenizer, talk)
        ends = [run.endswith("<|user|>") for run in runs_of(tokenizer, ids, mask)]
        assert ends == [bool(stops)] * 3 and encoder.notes["endless"] == endless, name
    for name in FAMILIES:
        encoder, _ = encode(tokenizer_of(name), talk)
        endless = {"falcon": 3, "glm4": 3, "metharme": 2}.get(name, 0)
        assert encoder.notes["endless"] == endless, name


def test_a_conversation_of_many_turns_is_rendered_within_the_limit() -> None:
    talk = talk_of(*(f"text {number}" for number in range(1000)))
    _, [(ids, _)] = encode(tokenizer_of("chatml"), talk)
    assert len(ids) > 4000


@pytest.mark.parametrize(
    ("content", "cut"),
    [
        ("m.content.split('</think>')[-1]", 1),
        ("m.content.split('<')[0]", 1),
        ("m.content | upper", 0),
        ("m.content | tojson", 0),
    ],
)
def test_a_part_of_a_question_that_the_template_leaves_out_is_counted(content: str, cut: int) -> None:
    template = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{% if m.role == 'user' %}}{{{{ {content} }}}}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    tokenizer = tokenizer_with(template, FAMILIES["chatml"].tokens)
    encoder, rows = encode(tokenizer, talk_of("ab", "c", "Is </think> a tag?", "Yes"))
    assert len(rows) == 1 and encoder.notes["cut_content"] == cut


SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Where?"}}, "required": ["city"]}
NAMES_AND_DESCRIPTIONS = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "schema", "cut"),
    [(FAMILIES["qwen2.5"].template, SCHEMA, 0), (NAMES_AND_DESCRIPTIONS, SCHEMA, 4), (NAMES_AND_DESCRIPTIONS, {}, 0)],
    ids=["all", "without parameters", "none there"],
)
def test_tools_of_which_the_template_leaves_out_a_part_are_counted(template: str, schema: Any, cut: int) -> None:
    function = {"name": "weather", "description": "Says how it is.", "parameters": schema, "strict": True}
    talk, tools = talk_of("a", "b", "c", "d"), [{"type": "function", "function": function}]
    encoder, rows = encode(tokenizer_with(template, FAMILIES["qwen2.5"].tokens), talk, talk, tools=tools)
    assert len(rows) == 2 and encoder.notes["cut_tools"] == cut


def test_turns_that_generation_marks_leave_out_are_counted() -> None:
    name = "generation marks"
    last = (
        "{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    )
    template = (
        "{% for m in messages %}<|im_start|>" + last + "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    talk = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, "aBcDeF", strict=True)]
    talk[3]["weight"] = 0
    for each, unmarked in ((FAMILIES[name].template, 0), (template, 1)):
        encoder, rows = encode(tokenizer_with(each, FAMILIES[name].tokens), talk)
        assert len(rows) == 1
        assert encoder.notes["unmarked"] == unmarked


def test_a_template_with_two_generation_blocks_in_a_turn() -> None:
    """As TRL's for Phi-3, where the end of the sequence is marked by itself."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    )
    tokenizer = tokenizer_with(template, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"))
    for talk in (talk_of("Hi", "Hello"), talk_of("Hi", "Hello", "And?", " So\n")):
        reference = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        _, [(ids, mask)] = encode(tokenizer, talk)
        *earlier, last = runs_of(tokenizer, ids, mask)
        assert ids == reference["input_ids"]
        assert [*[run + "\n" for run in earlier], last] == runs_of(tokenizer, ids, reference["assistant_masks"])


def test_a_tool_result_in_a_user_message() -> None:
    """Qwen3 checks whether the content is between tags, so marks have to be inside them."""
    talk = talk_of("Weather?", "I look.", "<tool_response>\n18\n</tool_response>", "18 degrees.")
    assert trained(tokenizer_of("qwen3"), talk) == ["I look.<|im_end|>", "<think>\n\n</think>\n\n18 degrees.<|im_end|>"]


# What a template may do with a content `c` in parts: how it renders them, and the text that is trained of (" A ", "B").
OF_PARTS = {
    "all": ("{% for p in c %}{{ p.text }}{% endfor %}", " A B"),
    "each trimmed": ("{% for p in c %}{{ p.text | trim }}{% endfor %}", "AB"),
    "on lines": ("{{ c | map(attribute='text') | join('\n') }}", " A \nB"),
    "their repr": ("{{ c }}", " A \nB"),  # it takes texts only
    "nothing": ("", " A \nB"),
    "refused": ("{{ raise_exception('no text') }}", " A \nB"),
}


@pytest.mark.parametrize("name", OF_PARTS)
def test_contents_in_parts_are_trained_as_the_template_renders_them(name: str) -> None:
    of_parts, text = OF_PARTS[name]
    trims = " | trim" if "trim" in name else ""
    template = (
        "{% for m in messages %}{% set c = m.content %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if c is string %}{{ c" + trims + " }}{% else %}" + of_parts + "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    tokenizer = tokenizer_with(template, ("<|im_end|>", "<|im_start|>"))
    talk = [{"role": "user", "content": parts("Hi", "you")}, {"role": "assistant", "content": parts(" A ", "B")}]
    _, [(ids, mask)] = encode(tokenizer, talk)
    assert tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag]) == text + "<|im_end|>"
    if text != " A \nB":
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk, tokenize=False)


def test_parts_between_unknown_separators_are_refused() -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{{ m.content | map(attribute='text') | join(' + ') }}{% endif %}</s>{% endfor %}"
    )
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts("A", "B")}]
    with pytest.raises(DataError, match=r"talks\.jsonl:1: .*separates the parts of message 2"):
        encode(tokenizer_with(template, ("</s>",)), talk)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role + m.content | upper | reverse }}{% endfor %}", "transforms the content"),
        ("{% for m in messages %}{{ m.content | length }}{% endfor %}", "cuts|transforms|mixes|modifies"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}</s>{% endfor %}", "repeats"),
        ("{{ raise_exception('roles must alternate') }}", "rejects a .*roles must alternate.*; change the row, or set"),
        ("{% for m in messages %}{{ m.content + 5 }}{% endfor %}", "rejects a conversation: TypeError"),
        # transformers counts the positions of generation marks from the beginning of the macro
        ("{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
         "{% generation %}{{ m.content + '</s>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
         "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}", "marks that do not cover the assistant"),
    ],
)  # fmt: skip
def test_a_conversation_whose_turns_cannot_be_located_is_refused_with_its_place(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        trained(tokenizer_with(template, ("</s>",)), talk_of("Hi there, you", "Hello", "And?", "So"))
    assert re.match(r"talks\.jsonl:1: (cannot locate the assistant's tokens: )?the chat template ", str(caught.value))


def test_tools_and_calls_that_the_template_leaves_out_are_refused() -> None:
    with pytest.raises(DataError, match=r"talks\.jsonl:1: the chat template leaves out the tools"):
        trained(tokenizer_of("chatml"), talk_of("Hi", "Ho"), TOOLS)
    call_only = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for train_on in ("completion", "all"):
        with pytest.raises(DataError, match="leaves out the call of 'get_weather' in message 2"):
            trained(tokenizer_of("chatml"), call_only, train_on=train_on)


SECOND = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 3, "hot": True}},
}


@pytest.mark.parametrize("train_on", ["completion", "all"])
@pytest.mark.parametrize("case", OMITTED)
def test_every_value_of_a_row_is_in_the_text_or_named(case: str, train_on: str) -> None:
    whole, less, message = OMITTED[case]
    family = FAMILIES["qwen2.5"]
    assert whole in family.template
    tokenizer = tokenizer_with(family.template.replace(whole, less), family.tokens)
    talk: Talk = [
        {"role": "user", "content": "The weather in Paris?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, SECOND]},
        {"role": "tool", "content": "Paris"},  # values that the row has elsewhere too
        {"role": "tool", "content": "get_weather Rome"},
        {"role": "assistant", "content": "I look."},
    ]
    if case == "a system prompt":
        talk = [{"role": "system", "content": "Paris?"}, *talk]
    if case == "nothing":
        assert len(encode(tokenizer, talk, tools=TOOLS, train_on=train_on)[1]) == 1
        return
    with pytest.raises(DataError, match=rf"talks\.jsonl:1: the chat template leaves out {message}.*; use a template"):
        encode(tokenizer, talk, tools=TOOLS, train_on=train_on)


@pytest.mark.parametrize(
    "printed", ["{{ '[' + call.function.arguments + ']' }}", "{{ '[' }}{{ call.function.arguments }}]"]
)
def test_arguments_become_json_text_for_a_template_that_takes_or_prints_texts(printed: str) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }}" + printed + "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    )
    tokenizer = tokenizer_with(template, ("<|im_end|>", "<|im_start|>"))
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL, SECOND]}]
    of_texts = [{**CALL["function"], "arguments": '{"city": "Paris"}'}, {**SECOND["function"], "arguments":  # type: ignore[dict-item]
                '{"city": "Rome", "days": 3, "hot": true}'}]  # fmt: skip
    texts = [talk[0], {"role": "assistant", "content": "", "tool_calls": [{"function": each} for each in of_texts]}]
    for ids, mask in encode(tokenizer, talk, talk)[1]:
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(texts, tokenize=False)
        assert runs_of(tokenizer, ids, mask)[0].endswith('[{"city": "Rome", "days": 3, "hot": true}]<|im_end|>')


@pytest.mark.parametrize("tools", ["no JSON", 5, [5], ["no JSON"], [[]], "5", [{}]])
def test_wrong_tools_are_refused(tmp_path: Path, tools: Any) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": talk_of("Hi", "Ho"), "tools": tools}) + "\n")
    [source] = open_sources(str(path))
    with pytest.raises(DataError, match=r"talks\.jsonl:1: 'tools' is"):
        list(read_rows([source], Data(format=Format.chat), None))
    with pytest.raises(DataError, match=r"no column 'functions', which data\.columns names"):
        list(read_rows([source], Data(format=Format.chat, columns={"tools": "functions"}), None))


# ------------------------------------------------------------------------------------- turns, weights, variables


def rendered(tokenizer: Any, talk: Talk, **data: Any) -> list[tuple[str, list[str]]]:
    """Return the rows of a conversation: each as text, with the parts of it that are trained."""
    render = ConversationRenderer(tokenizer, Data(format=Format.chat, seq_len=4096, **data))
    return [(text, [text[a:b] for a, b in spans]) for text, spans in render(talk, None, "talks.jsonl:1")]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_turn_is_trained_as_the_last_of_its_own_row(name: str) -> None:
    """The reference is transformers: the conversation up to the turn, its prompt, and its open end."""
    family, tokenizer, talk = FAMILIES[name], tokenizer_of(name), TALKS["three turns"]
    rows = rendered(tokenizer, [*talk, {"role": "user", "content": "Bye"}], turns="split")
    for i, (text, parts) in zip((1, 3, 5), rows, strict=True):
        assert text == whole_text(tokenizer, talk[: i + 1])
        assert parts == expected(family, talk[: i + 1])[-1:]
        prompt = tokenizer.apply_chat_template(talk[:i], tokenize=False, add_generation_prompt=True)
        open_end = tokenizer.apply_chat_template(talk[: i + 1], tokenize=False, continue_final_message=True)
        if text.startswith(prompt) and name != "chatml without a prompt":
            assert (prompt + parts[0]).startswith(open_end) and text.startswith(prompt + parts[0])
    assert rendered(tokenizer, talk, turns="last") == rows[-1:]


def test_a_template_that_renders_earlier_turns_in_another_way_is_noticed() -> None:
    last = "<think>\nagain\n</think>\n\nStill 42."
    row = {"messages": talk_of("6 × 7?", "<think>\nsix\n</think>\n\n42", "Sure?", last), "place": "talks.jsonl:1"}
    found = {
        name: earlier_turns_differ(tokenizer_of(name), Data(format=Format.chat), [row], None)
        for name in ("qwen3", "chatml", "generation marks", "gpt-oss")
    }
    assert found == {"qwen3": True, "chatml": False, "generation marks": False, "gpt-oss": True}


@pytest.mark.parametrize("turns", ["all", "last", "split"])
@pytest.mark.parametrize("name", FAMILIES)
def test_messages_with_weight_0_are_not_trained(name: str, turns: str) -> None:
    family, tokenizer, plain = FAMILIES[name], tokenizer_of(name), TALKS["three turns"]
    talk = [{**m, "weight": weight} for m, weight in zip(plain, (0, 1, 0, 1, 0, 0), strict=True)]
    rows = rendered(tokenizer, talk, turns=turns)
    if turns == "all":
        [(text, parts)] = rows
        assert text == tokenizer.apply_chat_template(plain, tokenize=False)
        assert parts == expected(family, plain)[:2]
    else:
        wanted = [expected(family, plain[:2])[-1:], expected(family, plain[:4])[-1:]]
        assert [parts for _, parts in rows] == wanted[-1 if turns == "last" else 0 :]
    untrained = rendered(tokenizer, [{**m, "weight": 0} for m in plain], turns=turns)
    assert untrained == [(tokenizer.apply_chat_template(plain, tokenize=False), [])]


def test_weights_of_data_that_trains_everything_are_refused() -> None:
    talk = [*talk_of("Hi"), {"role": "assistant", "content": "Ho", "weight": 0}]
    with pytest.raises(DataError, match=r"talks\.jsonl:1: a message has weight 0, but data\.train_on: all"):
        rendered(tokenizer_of("chatml"), talk, train_on="all")


def test_one_mark_around_two_turns_does_not_train_one_of_them() -> None:
    template = (
        "{% generation %}{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% endgeneration %}"
    )
    tokenizer = tokenizer_with(template, ("<|im_end|>", "<|im_start|>"))
    talk = [{"role": "assistant", "content": "One"}, {"role": "assistant", "content": "Two", "weight": 0}]
    with pytest.raises(DataError, match="marks around several messages"):
        rendered(tokenizer, talk)


THINKING = FAMILIES["qwen3"].template.replace(
    "'<|im_start|>assistant\n' }}{% endif %}",
    "'<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)


def test_variables_of_the_template_are_set_in_every_rendering() -> None:
    """As in Qwen3's template, whose prompt has an empty thought without thinking: it is then not trained."""
    tokenizer, talk = tokenizer_with(THINKING, FAMILIES["qwen3"].tokens), TALKS["three turns"]
    thought, answers = "<think>\n\n</think>\n\n", [f"{talk[i]['content']}<|im_end|>" for i in (1, 3, 5)]
    without = {"chat_template_kwargs": {"enable_thinking": False}}
    assert [parts for _, parts in rendered(tokenizer, talk, turns="split")] == [[thought + each] for each in answers]
    for row, (text, parts) in zip((2, 4, 6), rendered(tokenizer, talk, turns="split", **without), strict=True):
        prompt = tokenizer.apply_chat_template(
            talk[: row - 1], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert text == f"{prompt}{parts[0]}\n" and parts == [answers[row // 2 - 1]]
    marked = "{{ greeting }}" + FAMILIES["generation marks"].template
    tokenizer = tokenizer_with(marked, FAMILIES["generation marks"].tokens)
    [(text, parts)] = rendered(tokenizer, talk, chat_template_kwargs={"greeting": "Welcome."})
    assert text.startswith("Welcome.<|im_start|>user") and parts == answers


def test_a_template_that_never_ends_is_an_error_of_a_prompt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdptrain.data.chat.TEMPLATE_S", 0.2)
    numbers = "range(99999)"
    loops = f"{{% for a in {numbers} %}}{{% for b in {numbers} %}}{{% endfor %}}{{% endfor %}}"
    render = ConversationRenderer(tokenizer_with(loops, ("</s>",)), Data(format=Format.chat))
    with pytest.raises(DataError, match=r"the chat template does not finish: rendering takes longer than 0\.2 s;"):
        render.prompt(talk_of("Hi"))
