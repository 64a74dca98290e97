"""Chat templates with the common forms of tools and calls, for small tokenizers."""

import copy
from functools import cache
from typing import Any

from tests.tokenizers_fixture import byte_level

TAGGED = """{% if tools %}# system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>{% endif %}{% for m in messages %}# {{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}# assistant
{% endif %}"""

# Like Llama 3.1: a tool may only answer a call, and a turn with a call has no text and a special end token.
STRICT = """<|begin_of_text|>{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
{{ raise_exception('a tool answers a call') }}{% endif %}[{{ m.role }}]
{% if m.tool_calls %}{% for call in m.tool_calls %}<|python_tag|>
{{- {'name': call.function.name, 'parameters': call.function.arguments} | tojson -}}
{% endfor %}<|eom_id|>{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]
{% endif %}"""

WITHOUT_ENDS = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

ALTERNATING = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

TEMPLATES = {"alternating": ALTERNATING, "tagged": TAGGED, "strict": STRICT, "without_ends": WITHOUT_ENDS}


@cache
def talking(name: str) -> Any:
    """Return a byte-level tokenizer with the template."""
    specials = ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
    tokenizer = copy.deepcopy(byte_level(640, eos="<|im_end|>", extra=specials))
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer
