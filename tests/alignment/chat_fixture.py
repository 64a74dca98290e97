"""Messages, and small tokenizers with two chat templates."""

import copy
from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.tokenizers_fixture import byte_level, sentencepiece

TRIMMED = """{{ '<|begin_of_text|>' }}{% for message in messages -%}
{{ '[' + message.role + ']\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"""
PLAIN = """{% for message in messages %}{{ '<bos>' + message.role + '<pad>' + message.content + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<bos>assistant<pad>' }}{% endif %}"""


@cache
def small_chat(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer: `trimmed` is byte level and trims contents; `plain` is SentencePiece and keeps them."""
    return with_template(*{"trimmed": (byte_level(), TRIMMED), "plain": (sentencepiece(), PLAIN)}[name])


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def system(content: str) -> dict[str, object]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **fields}


def tool(content: str) -> dict[str, object]:
    return {"role": "tool", "content": content}


def call(name: str, arguments: dict[str, object]) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
