"""Small chat templates with the structure of public ones, and a tokenizer with their tokens."""

import copy
import re
from functools import cache
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.alignment.chat_fixture import assistant, call, tool, user
from tests.tokenizers_fixture import byte_level

_TOKEN = re.compile(r"<[|]/?\w+[|]>|</s>|\[/?[A-Z_]+\]")
_ARGUMENTS = "{{ c.function.arguments | tojson }}"
_PROMPT = "{% if add_generation_prompt %}<|a|>{% endif %}"
_MESSAGE = "{% for m in messages %}"

TEMPLATES = {
    # Closing text before the end, as Kimi K3 and Command A.
    "closing text": (
        _MESSAGE + "<|open|>{{ m.role }}<|sep|>{{ m.content }}<|close|>{{ m.role }}<|sep|><|end_of_msg|>{% endfor %}"
        "{% if add_generation_prompt %}<|open|>assistant<|sep|>{% endif %}",
        "<|end_of_msg|>",
    ),
    # Two closing tokens, the second is EOS, as Aya and Command R7B.
    "two closing tokens": (
        _MESSAGE + "{% if m.role == 'assistant' %}<|a|><|start_response|>{{ m.content }}<|end_response|><|e|>"
        "{% else %}<|u|>{{ m.content }}<|e|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|a|><|start_response|>{% endif %}",
        "<|e|>",
    ),
    # A tool's answer inside the model's turn, as Gemma 4.
    "answer in the turn": (
        _MESSAGE + "{% if m.role == 'user' %}<|u|>{{ m.content }}<|e|>{% elif m.role == 'assistant' %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|a|>{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}{% for c in m.tool_calls %}<|call|>{{ c.function.name }}" + _ARGUMENTS + "<|/call|>"
        "{% endfor %}{% for t in messages[loop.index0 + 1:loop.index0 + 2] %}<|result|>{{ t.name }}:{{ t.content }}"
        "<|/result|>{% endfor %}{% else %}<|e|>{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|a|>{% endif %}",
        "<|e|>",
    ),
    # A tool's answer that repeats the call's name, as Kimi K3 and Solar Open.
    "answer with the call's name": (
        "{% set seen = namespace(name='') %}" + _MESSAGE + "{% if m.role == 'tool' %}<|t|>{{ seen.name }}<|sep|>"
        "{{ m.content }}<|e|>{% elif m.role == 'assistant' %}<|a|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set seen.name = c.function.name %}<|call|>{{ c.function.name }}" + _ARGUMENTS + "{% endfor %}<|e|>"
        "{% else %}<|u|>{{ m.content }}<|e|>{% endif %}{% endfor %}" + _PROMPT,
        "<|e|>",
    ),
    # A tool's answer needs its call, and a generation prompt is missing, as Mistral Nemo.
    "no generation prompt": (
        _MESSAGE + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
        "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]"
        "{{ c.function.name }}[ARGS]" + _ARGUMENTS + "{% else %}{{ m.content }}{% endfor %}</s>{% endif %}{% endfor %}",
        "</s>",
    ),
    # No end after the last answer, as GLM 4, Apertus and Hunyuan.
    "no end": (
        _MESSAGE + "{{ '<|a|>' if m.role == 'assistant' else '<|u|>' }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}" + _ARGUMENTS + "{% endfor %}{% endfor %}" + _PROMPT,
        "</s>",
    ),
    # A channel in front and another end of the last turn, as gpt-oss.
    "channels": (
        _MESSAGE + "{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% else %}"
        "{% if m.thinking and loop.last and not add_generation_prompt %}<|start|>assistant<|channel|>analysis"
        "<|message|>{{ m.thinking }}<|end|>{% endif %}{% for c in m.tool_calls or [] %}<|start|>assistant<|channel|>"
        "{{ c.function.name }}<|message|>"
        + _ARGUMENTS
        + "<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|return|>",
    ),
    # Thinking of earlier turns is dropped, and the generation prompt opens it, as Qwen3 Thinking.
    "thinking": (
        _MESSAGE + "<|s|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.thinking or '' }}\n"
        "</think>\n\n{% endif %}{{ m.content | trim }}{% for c in m.tool_calls or [] %}\n<|call|>{{ c.function.name }}"
        + _ARGUMENTS
        + "{% endfor %}<|e|>\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n<think>\n{% endif %}",
        "<|e|>",
    ),
}
"""A template and its tokenizer's EOS, keyed by name."""
REWRITING = ("channels", "thinking")
"""Templates that write a turn differently if more messages follow."""

WEATHER = call("weather", {"city": "Bern"})
PLAIN = [user("One?"), assistant("Answer one."), user("Two?"), assistant("Answer two.")]
TOOL = [user("Weather?"), assistant("", tool_calls=[WEATHER]), tool("sunny"), assistant("It is sunny.")]


@cache
def chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return tokenizer_of(*TEMPLATES[name])


def tokenizer_of(template: str, eos: str, extra_tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template; all tokens in the template are special."""
    tokenizer = copy.deepcopy(byte_level())
    tokens = sorted({*_TOKEN.findall(template), *extra_tokens, eos})
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    return tokenizer


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, add_generation_prompt=prompt))
