"""Chat templates with the structure of those of real models, and what of a conversation has to be trained with each.

Written from the models' documentation and shortened (default system prompts, images). `Family.turn` is the text that a
turn of the assistant has to become, written by hand: {} stands for its content.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE


@dataclass(frozen=True)
class Family:
    """A template, the special tokens it writes, and how it renders a turn of the assistant."""

    template: str
    tokens: tuple[str, ...]  # all special ones, the end-of-sequence token first
    turn: str = "{}"  # from the generation prompt, exclusive, to the end-of-turn token, inclusive
    last_turn: str | None = None  # of the last turn, if it differs
    bos: str | None = None
    trims: bool = False  # white space around the content
    call: str | None = None  # of a turn that calls get_weather(city=Paris)
    stops: tuple[str, ...] = ()  # tokens that end an answer by the model's generation config


def loop(body: str, before: str = "", after: str = "") -> str:
    """Return a template with the same `body` for every message `m`, and generation prompt `after`."""
    prompt = "{% if add_generation_prompt %}{{ '" + after + "' }}{% endif %}" if after else ""
    return before + "{% for m in messages %}" + body + "{% endfor %}" + prompt


CHATML_TOKENS = ("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>")
SYSTEM_APART = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set talk = messages %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
INST = ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")  # fmt: skip

# Tools are before the last question, the system prompt inside it.
TEKKEN = (
    SYSTEM_APART + "{{ bos_token }}{% set users = talk | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in talk %}{% if m['role'] == 'user' %}"
    "{% if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' }}{% if loop.last and system or m == users[-1] and system %}{{ system + '\n\n' }}{% endif %}"
    "{{ m['content'] + '[/INST]' }}"
    "{% elif m.tool_calls is defined %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}"
    "{% set out = call.function | tojson %}{{ out[:-1] }}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ ', \"id\": \"' + call.id + '\"}' }}{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% elif m['role'] == 'tool' %}{{ '[TOOL_RESULTS]{\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
LLAMA3_HEAD = "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
LLAMA3 = loop(
    "{% set content = " + LLAMA3_HEAD + " + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}",
    after="<|start_header_id|>assistant<|end_header_id|>\n\n",
)
VICUNA = (
    "{{ bos_token }}"
    + SYSTEM_APART
    + "{{ (system or 'A chat between a user and an assistant.') + ' ' }}{% for m in talk %}"
    "{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GRANITE_ROLE = "'<|start_of_role|>' + m['role'] + '<|end_of_role|>'"
LLAMA31 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{{ 'Cutting Knowledge Date: December 2023\n\n' }}"
    "{% if tools %}{{ 'You have these functions:\n\n' }}{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}"
    "{% endif %}{{ system + '<|eot_id|>' }}"
    "{% for m in messages %}{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}' }}{{ '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% else %}{{ 'You are Qwen.\n\n' }}{% endif %}{{ '# Tools\n<tools>' }}"
    "{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
)
QWEN_CALLS = (
    "{% for call in m.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    "{% if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}{{ call.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
QWEN_RESULT = (
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
QWEN25 = (
    QWEN_TOOLS + "{% else %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' and not loop.first"
    " or m.role == 'assistant' and not m.tool_calls %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}{% set content = true %}"
    + QWEN_CALLS + "{{ '<|im_end|>\n' }}" + QWEN_RESULT + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
QWEN3 = (
    QWEN_TOOLS + "{% endif %}{% set ns = namespace(searching=true, last=messages | length - 1) %}"
    "{% for m in messages[::-1] %}{% set index = messages | length - 1 - loop.index0 %}"
    "{% if ns.searching and m.role == 'user' and not (m.content.startswith('<tool_response>') and"
    " m.content.endswith('</tool_response>')) %}{% set ns.searching = false %}{% set ns.last = index %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{% set content = m.content or '' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}"
    + QWEN_CALLS + "{{ '<|im_end|>\n' }}" + QWEN_RESULT + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
GEMMA3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set talk = messages[1:] %}{% else %}{% set first = '' %}{% set talk = messages %}{% endif %}"
    "{% for m in talk %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}"
    "{% endif %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{{ raise_exception('Invalid content type') }}"
    "{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
STRIP_THINKING = (
    "{% macro strip_thinking(text) %}{% set ns = namespace(result='') %}"
    "{% for part in text.split('<channel|>') %}"
    "{% if '<|channel>' in part %}{% set ns.result = ns.result + part.split('<|channel>')[0] %}"
    "{% else %}{% set ns.result = ns.result + part %}{% endif %}{% endfor %}{{ ns.result | trim }}{% endmacro %}"
)
# The results of tools are in the turn of the model, which goes on behind them.
GEMMA4 = (
    STRIP_THINKING
    + "{{ bos_token }}{% if tools %}{{ '<|turn>system\n<|tool>' + (tools | tojson) + '<tool|><turn|>\n' }}"
    "{% endif %}{% set state = namespace(role='', last='') %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{% if role != 'model' or state.role != 'model' %}{{ '<|turn>' + role + '\n' }}{% endif %}{% set state.role = role %}"
    "{% if m.reasoning_content and m.tool_calls %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{% for key, value in call.function.arguments | dictsort %}{{ key + ':<|\"|>' + value + '<|\"|>' }}{% endfor %}"
    "{{ '}<tool_call|>' }}{% endfor %}{% set state.last = 'call' if m.tool_calls else '' %}"
    "{% for result in messages[loop.index:] if m.tool_calls and result.role == 'tool' %}{% set state.last = 'result' %}"
    "{{ '<|tool_response>response:' + m.tool_calls[0].function.name + '{value:' + result.content + '}<tool_response|>' }}"
    "{% endfor %}"
    "{% set content %}{% if role == 'model' %}{{ strip_thinking(m['content'] or '') }}{% else %}{{ m['content'] | trim }}"
    "{% endif %}{% endset %}{{ content }}"
    "{% if state.last == 'call' %}{{ '<|tool_response>' }}{% elif state.last != 'result' or content %}{{ '<turn|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not state.last %}{{ '<|turn>model\n' }}{% endif %}"
)
QWEN35 = (
    QWEN_TOOLS + "{% endif %}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set content = (m.content or '') | trim %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' + value | string + '\n</parameter>\n' }}"
    "{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}" + QWEN_RESULT + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% if not enable_thinking %}{{ '\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)  # fmt: skip
GLM45 = (
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\n# Tools\n' + (tools | tojson) }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n<think>' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ m.reasoning_content.strip() }}{% endif %}{{ '</think>' }}"
    "{% if m.content %}{{ '\n' + m.content.strip() }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + call.function.name }}{% for key, value in call.function.arguments.items() %}"
    "{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
COHERE = ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
          "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", "<BOS_TOKEN>")  # fmt: skip
COMMAND_A = (
    "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|END_OF_TURN_TOKEN|>"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'tool' %}"
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% elif m.role == 'user' %}"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% elif m.role == 'assistant' %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m.tool_calls %}<|START_ACTION|>["
    '{% for c in m.tool_calls %}{"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
            "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>")  # fmt: skip


def deepseek(prompt: str, thoughts: str) -> str:
    """Return the template of DeepSeek V3 or R1: system messages come first, and thoughts are cut off."""
    return (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
        "{% if tools %}{{ '\n## Tools\n' + (tools | tojson) }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'assistant' and 'tool_calls' in m %}{{ '<｜Assistant｜>' }}{% for call in m.tool_calls %}"
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}"
        "{{ call.function.arguments | tojson }}{{ '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
        "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
        "{% elif m.role == 'assistant' %}{% set content = m.content %}" + thoughts
        + "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}"
        "{% elif m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '" + prompt + "' }}{% endif %}"
    )  # fmt: skip


CUT_THOUGHTS = "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
METHARME = (
    "{{ bos_token }}" + SYSTEM_APART + "{{ '<|system|>' + (system or 'Enter RP mode.') }}{% for m in talk %}"
    "{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'].strip() }}{% else %}"
    "{{ '<|model|>' + m['content'].strip() }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|model|>' }}{% else %}{{ eos_token }}{% endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}"
    "{% if messages[0].role == 'system' %}{% set instructions = messages[0].content %}{% set talk = messages[1:] %}"
    "{% else %}{% set instructions = '' %}{% set talk = messages %}{% endif %}"
    "{% if instructions or tools %}{{ '<|start|>developer<|message|>' }}"
    "{% if instructions %}{{ '# Instructions\n\n' + instructions + '\n\n' }}{% endif %}"
    "{% if tools %}{{ '# Tools\n' }}{% for t in tools %}{{ 'type ' + t.function.name + ' = ' + (t.function | tojson) }}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}{% endif %}"
    "{% set calls = namespace(name='') %}{% for m in talk %}"
    "{% if m.role == 'assistant' and 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
    "{% set calls.name = call.name %}{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{% if loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.' + calls.name + ' to=assistant<|message|>' + (m.content | tojson) + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINK = "<think>\n\n</think>\n\n"

FAMILIES = {
    "plain": Family(PLAIN_CHAT_TEMPLATE, ("<|endoftext|>",), "{}<|endoftext|>"),
    "llama3": Family(LLAMA3, ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
                     "{}<|eot_id|>", bos="<|begin_of_text|>", trims=True),
    "phi4": Family(loop("{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}",
                        after="<|im_start|>assistant<|im_sep|>"), (*CHATML_TOKENS, "<|im_sep|>"), "{}<|im_end|>"),
    "vicuna": Family(VICUNA, ("</s>", "<s>"), " {}</s>", bos="<s>"),
    "granite3": Family(loop("{{ " + GRANITE_ROLE + " + m['content'] + '<|end_of_text|>\n' }}",
                            after="<|start_of_role|>assistant<|end_of_role|>"),
                       ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), "{}<|end_of_text|>"),
    "llama3.1": Family(LLAMA31, ("<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>",
                                 "<|end_header_id|>"), "{}<|eot_id|>", bos="<|begin_of_text|>", trims=True,
                       call='{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>'),
    "chatml": Family(loop("{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
                          after="<|im_start|>assistant\n"), CHATML_TOKENS, "{}<|im_end|>"),
    "chatml of a base tokenizer": Family(loop("{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
                                              after="<|im_start|>assistant\n"), ("</s>",), "{}<|im_end|>"),
    "chatml without a prompt": Family(loop("{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"),
                                      CHATML_TOKENS, "{}<|im_end|>"),
    "generation marks": Family(MARKED, CHATML_TOKENS, "{}<|im_end|>"),
    "qwen2.5": Family(QWEN25, CHATML_TOKENS, "{}<|im_end|>", call=CALL + "<|im_end|>"),
    "qwen3": Family(QWEN3, (*CHATML_TOKENS, "<think>", "</think>"), "{}<|im_end|>", last_turn=THINK + "{}<|im_end|>",
                    call=CALL + "<|im_end|>"),
    "mistral tekken": Family(TEKKEN, INST, "{}</s>", bos="<s>", call='[TOOL_CALLS][{"name": "get_weather", '
                             '"arguments": {"city": "Paris"}, "id": "123456789"}]</s>'),
    "gemma3": Family(GEMMA3, ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "{}<end_of_turn>", bos="<bos>",
                     trims=True),
    "gemma4": Family(GEMMA4, ("<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>",
                              "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'), "{}<turn|>",
                     bos="<bos>", trims=True, stops=("<turn|>", "<|tool_response>"),
                     call='<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>'),
    "phi3": Family("{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
                   "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
                   ("<|endoftext|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>"), "{}<|end|>"),
    "command-a": Family(COMMAND_A, COHERE, "<|START_RESPONSE|>{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>",
                        call='<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]'
                        "<|END_ACTION|><|END_OF_TURN_TOKEN|>"),
    "deepseek v3": Family(deepseek("<｜Assistant｜>", ""), DEEPSEEK, "{}<｜end▁of▁sentence｜>",
                          bos="<｜begin▁of▁sentence｜>",
                          call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                          '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'),
    "deepseek r1": Family(deepseek("<｜Assistant｜><think>\n", CUT_THOUGHTS), DEEPSEEK, "{}<｜end▁of▁sentence｜>",
                          bos="<｜begin▁of▁sentence｜>"),
    "metharme": Family(METHARME, ("</s>", "<s>", "<|system|>", "<|user|>", "<|model|>"), "{}", last_turn="{}</s>", bos="<s>",
                       trims=True),
    "falcon": Family(loop("{{ m['role'] | capitalize + ': ' + m['content'] + '\n\n' }}", after="Assistant:"),
                     ("<|endoftext|>",), " {}"),
    "glm4": Family(loop("{{ '<|' + m['role'] + '|>\n' + m['content'] }}", "[gMASK]<sop>", "<|assistant|>"),
                   ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|system|>", "<|assistant|>"), "\n{}"),
    "gpt-oss": Family(HARMONY, ("<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"),
                      "<|channel|>final<|message|>{}<|end|>", last_turn="<|channel|>final<|message|>{}<|return|>",
                      call=' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'),
    "qwen3.5": Family(QWEN35, (*CHATML_TOKENS, "<think>", "</think>"), "{}<|im_end|>", trims=True,
                      call="<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
                      "</parameter>\n</function>\n</tool_call><|im_end|>"),
    "glm4.5": Family(GLM45, ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|system|>", "<|assistant|>", "<|observation|>",
                             "<think>", "</think>"), "\n<think></think>\n{}<|user|>", trims=True,
                     stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
                     call="\n<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
                     "</tool_call><|observation|>"),
}  # fmt: skip

# What a template may leave out, and what names it: (replaced in the template of Qwen2.5, by what, the message).
OMITTED = {
    "a call": ("in m.tool_calls %}", "in m.tool_calls[:1] %}", r"the call of 'get_weather' in message 2 \(call 2 of 2\)"),
    "an argument": ("{{ call.arguments | tojson }}", "{{ call.arguments.city }}",
                    r"'days' in the call of 'get_weather' in message 2 \(call 2 of 2\)"),
    "a value": ("{{ call.arguments | tojson }}", "{{ call.arguments.keys() | list | tojson }}", "'city' in the call of"),
    "a name": ("' + call.name + '", "tool", "the call of 'get_weather'"),
    "content": ("{% if m.content %}{{ '\n' + m.content }}{% endif %}", "", r"the content of message 2 \(assistant\)"),
    "a result": ("<tool_response>\n' + m.content + '", "<tool_response>\n", r"the content of message 3 \(tool\)"),
    "a system prompt": ("{{ messages[0].content + '\n\n' }}", "", r"the content of message 1 \(system\)"),
    "tools": ("{{ '\n' + (t | tojson) }}", "{{ 'x' }}", "the tools"),
    "nothing": ("{{ call.arguments | tojson }}", "{{ call.arguments | tojson(indent=1) | replace('\"', '') | upper }}", ""),
}  # fmt: skip
